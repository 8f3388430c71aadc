// SPDX-License-Identifier: GPL-2.0
/*
 * A page for the host's tripwire.  After a reset the map of this kernel still
 * lies in memory, and the first write of the firmware tells the host so, if it
 * goes to a page that this kernel never writes to.  SeaBIOS writes below 1 MiB
 * first, which Linux leaves alone.  UEFI for VMs (OVMF) writes its first stack
 * to 0x810000: reserved by its own memory map where the VM can suspend to RAM,
 * plain memory elsewhere.  There the module takes the page and keeps it.  It fills the
 * page: QEMU, when it loads a snapshot, does not write a page that is zero in both.
 */
#include <linux/efi.h>
#include <linux/gfp.h>
#include <linux/ioport.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/string.h>
#include <linux/version.h>

#include "ebb.h"

#define FIRST_STACK_PFN	0x810
#define FILLED_WITH	0xeb

static bool taken;

/* Its address; 0 where firmware needs none, or the page is not to be had. */
u64 ebb_keep_page(void)
{
	taken = false;
	if (!efi_enabled(EFI_BOOT))
		return 0;
	if (page_is_ram(FIRST_STACK_PFN)) {
		if (!pfn_to_online_page(FIRST_STACK_PFN) ||
		    alloc_contig_range(FIRST_STACK_PFN, FIRST_STACK_PFN + 1, EBB_CONTIG_ANY,
				       GFP_KERNEL | __GFP_NOWARN)) {
			pr_warn("page %#x is in use: the host cannot notice a reset and leaves this guest alone; load ebb.ko earlier\n",
				FIRST_STACK_PFN << PAGE_SHIFT);
			return 0;
		}
		memset(page_address(pfn_to_page(FIRST_STACK_PFN)), FILLED_WITH, PAGE_SIZE);
		taken = true;
	}
	return (u64)FIRST_STACK_PFN << PAGE_SHIFT;
}

void ebb_keep_end(void)
{
	if (taken)
		free_contig_range(FIRST_STACK_PFN, 1);
	taken = false;
}
