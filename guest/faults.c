// SPDX-License-Identifier: GPL-2.0
/*
 * Test builds only: what a CPU may do while no tracepoint fires on it, done on
 * purpose.  A CPU that dies or starts takes pages, with its interrupts off, when
 * it is not online (any more, yet), and the module keeps them to its end.
 */
#include <linux/cpuhotplug.h>
#include <linux/gfp.h>
#include <linux/mm.h>

#include "ebb.h"

/* Too large for the per-CPU lists: they come from the buddy allocator. */
#define ORDER	5
#define TAKE	8

/* A state of the right kind, between online and dead, that x86 has no use for. */
#define BETWEEN	CPUHP_AP_ARM_TWD_STARTING

static struct page *taken[256];
static unsigned int takes;
static bool watching;

static int take(unsigned int cpu)
{
	unsigned int i;

	for (i = 0; i < TAKE && takes < ARRAY_SIZE(taken); i++) {
		struct page *page = alloc_pages(__GFP_NOWARN, ORDER);

		if (page)
			taken[takes++] = page;
	}
	return 0;
}

int ebb_faults_start(void)
{
	int err;

	if (!(ebb_fault & EBB_FAULT_DYING))
		return 0;
	err = cpuhp_setup_state_nocalls(BETWEEN, "ebb:between", take, take);
	watching = !err;
	return err;
}

u64 ebb_faults_taken(void)
{
	return (u64)READ_ONCE(takes) << ORDER;
}

void ebb_faults_stop(void)
{
	if (watching)
		cpuhp_remove_state_nocalls(BETWEEN);
	while (takes)
		__free_pages(taken[--takes], ORDER);
}
