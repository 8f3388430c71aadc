// SPDX-License-Identifier: GPL-2.0
/*
 * What the map is made of: its header, the table of its pages, the pages, and
 * what else is allocated at load; and memory that comes and goes.
 *
 * The map only grows: a page that the host may have been told of is given back
 * at the end and not before.  Tables change under ebb.scanning, and
 * header->generation is odd meanwhile.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/memory.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/vmalloc.h>
#include <linux/vmstat.h>

#include "ebb.h"

/* Room in the table for memory that comes later: 512 GiB, 32 KiB of table. */
#define ROOM_PAGES	4096u
#define CHUNK_ORDER	4	/* map pages that are asked for in one piece */

static bool present(unsigned long section)
{
	unsigned long pfn = section * EBB_MAP_PFNS, i;

	for (i = 0; i < EBB_MAP_PFNS; i += EBB_BLOCK)
		if (pfn_to_online_page(pfn + i))
			return true;
	return false;
}

/* Gives `count` sections their map pages, which follow each other in memory. */
static int cover(unsigned long first, unsigned int count)
{
	struct page *page = alloc_pages(GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN |
					(count > 1 ? __GFP_NORETRY : 0), ilog2(count));
	unsigned int i;
	int err;

	lockdep_assert_held(&ebb.scanning);
	if (!page)
		return -ENOMEM;
	err = ebb_extent_add(ebb.extents, ebb.extent_pages, page_to_phys(page), first, count);
	if (err) {
		__free_pages(page, ilog2(count));
		return err;
	}
	split_page(page, ilog2(count));
	for (i = 0; i < count; i++)
		smp_store_release(&ebb.map.page[first + i], page_address(page + i));
	ebb.header->map_pages += count;
	return 0;
}

static bool covered(unsigned long first, unsigned long end)
{
	while (first < end && ebb.map.page[first])
		first++;
	return first >= end;
}

/*
 * Covers what is present of a range of sections, or all of it where it is only
 * about to come, in pieces as large as can be had.
 */
static int cover_range(unsigned long first, unsigned long end, bool hot)
{
	unsigned int piece;
	int err = 0;

	mutex_lock(&ebb.scanning);
	if (covered(first, end)) {
		mutex_unlock(&ebb.scanning);
		return 0;
	}
	WRITE_ONCE(ebb.header->generation, ebb.header->generation + 1);
	smp_mb();
	while (first < end && !err) {
		for (piece = 0; piece < 1u << CHUNK_ORDER && first + piece < end; piece++)
			if (ebb.map.page[first + piece] || (!hot && !present(first + piece)))
				break;
		if (!piece) {
			first++;
			continue;
		}
		for (piece = rounddown_pow_of_two(piece); ; piece /= 2) {
			err = cover(first, piece);
			if (err != -ENOMEM || piece == 1)
				break;
		}
		if (!err)
			first += piece;
	}
	smp_mb();
	WRITE_ONCE(ebb.header->generation, ebb.header->generation + 1);
	mutex_unlock(&ebb.scanning);
	return err;
}

static void uncover_all(void)
{
	unsigned long i;

	for (i = 0; ebb.map.page && i < ebb.map.pages; i++)
		if (ebb.map.page[i])
			free_page((unsigned long)ebb.map.page[i]);
}

static void block(unsigned long first, unsigned long end, bool on)
{
	mutex_lock(&ebb.scanning);
	for (; first < end; first++)
		if (on)
			__set_bit(first, ebb.blocked);
		else
			__clear_bit(first, ebb.blocked);
	mutex_unlock(&ebb.scanning);
}

/*
 * Scans keep away from memory that is going, until it has gone: its struct
 * pages may go too.  Memory that comes is covered if there is room; what is not
 * covered is never recorded, and that is all.
 */
static int on_memory(struct notifier_block *nb, unsigned long event, void *data)
{
	struct memory_notify *m = data;
	unsigned long pfn = m->start_pfn, n = m->nr_pages;
	unsigned long first = pfn / EBB_MAP_PFNS, end = DIV_ROUND_UP(pfn + n, EBB_MAP_PFNS);

	end = min(end, ebb.map.pages);
	switch (event) {
	case MEM_GOING_ONLINE:
		if (cover_range(first, end, true) || pfn + n > ebb.map.pages * EBB_MAP_PFNS)
			pr_warn_once("some memory has no place in the map\n");
		break;
	case MEM_ONLINE:
		ebb.header->stats.uncovered += n - ebb_map_covered(&ebb.map, pfn, n);
		ebb_scan(pfn, pfn + n);
		break;
	case MEM_GOING_OFFLINE:
		block(first, end, true);
		break;
	case MEM_OFFLINE:
		/* It may have been on its way before we came. */
		if (!(ebb_fault & EBB_FAULT_OFFLINE))
			ebb_map_clear(&ebb.map, pfn, n);
		fallthrough;
	case MEM_CANCEL_OFFLINE:
		block(first, end, false);
		break;
	}
	return NOTIFY_DONE;
}

static struct notifier_block memory_nb = { .notifier_call = on_memory };

int ebb_memory_watch(void)
{
	return register_memory_notifier(&memory_nb);
}

void ebb_memory_forget(void)
{
	unregister_memory_notifier(&memory_nb);
}

static int make_header(void)
{
	static const u8 magic[] = EBB_MAGIC;
	/* First: it is one page, the header may be anywhere. */
	u64 kept = ebb_keep_page();
	struct page *page = alloc_page(GFP_KERNEL | GFP_DMA | __GFP_ZERO);
	struct ebb_header *h;

	if (!page || page_to_pfn(page) >= EBB_SEARCH_PAGES) {
		if (page)
			__free_page(page);
		return -ENOMEM;
	}
	h = ebb.header = page_address(page);
	h->version = EBB_ABI_VERSION;
	h->size = sizeof(*h);
	h->self_gpa = page_to_phys(page);
	get_random_bytes(&h->key, sizeof(h->key));
	get_random_bytes(h->instance, sizeof(h->instance));
	h->page_shift = PAGE_SHIFT;
	h->order = ebb.order;
	h->pfn_limit = (u64)ebb.map.pages * EBB_MAP_PFNS;
	h->linux_version = KERNEL_VERSION(LINUX_VERSION_MAJOR, LINUX_VERSION_PATCHLEVEL, 0);
	h->features = ebb_fault ? EBB_FEATURE_FAULTS : 0;
	strscpy(h->module_version, EBB_MODULE_VERSION, sizeof(h->module_version));
	h->kept_gpa = kept;
	memcpy(h->magic, magic, sizeof(magic));
	h->checksum = ebb_checksum(h);
	/* Nobody shall find it before it is whole. */
	memset(h->magic, 0, sizeof(h->magic));
	h->state = EBB_STARTING;
	h->tick_ms = EBB_TICK_MS;
	h->facts_ms = max(ebb_facts_ms, EBB_TICK_MS);
	return 0;
}

/* Enough for all sections that the table can hold, taken from page to page. */
static int make_extents(unsigned long sections)
{
	unsigned int i, n = DIV_ROUND_UP(sections, 1u << CHUNK_ORDER) * 2 / EBB_EXTENTS_A_PAGE + 1;
	u64 *next = &ebb.header->extents_gpa;

	n = min_t(unsigned int, n, EBB_EXTENT_PAGES_MAX);
	ebb.extents = kcalloc(n, sizeof(*ebb.extents), GFP_KERNEL);
	if (!ebb.extents)
		return -ENOMEM;
	for (i = 0; i < n; i++) {
		ebb.extents[i] = (void *)get_zeroed_page(GFP_KERNEL);
		if (!ebb.extents[i])
			break;
		*next = virt_to_phys(ebb.extents[i]);
		next = &ebb.extents[i]->next;
	}
	ebb.extent_pages = i;
	ebb.header->extent_pages = i;
	return i == n ? 0 : -ENOMEM;
}

static void free_extents(void)
{
	while (ebb.extent_pages)
		free_page((unsigned long)ebb.extents[--ebb.extent_pages]);
	kfree(ebb.extents);
}

/* One past the last page of any node. */
static unsigned long last_pfn(void)
{
	unsigned long last = 0;
	int nid;

	for_each_online_node(nid)
		last = max(last, pgdat_end_pfn(NODE_DATA(nid)));
	return last;
}

/* Also where not all of it was made. */
void ebb_tables_free(void)
{
	uncover_all();
	free_extents();
	free_page((unsigned long)ebb.header);
	ebb_keep_end();
	free_percpu(ebb.counts);
	kfree(ebb.events);
	kvfree(ebb.blocked);
	vfree(ebb.map.page);
}

int ebb_tables_make(void)
{
	unsigned long sections = DIV_ROUND_UP(last_pfn(), EBB_MAP_PFNS);
	int err = -ENOMEM;

	ebb.map.pages = max_t(unsigned long, 2 * sections, ROOM_PAGES);
	ebb.map.page = vzalloc(array_size(ebb.map.pages, sizeof(*ebb.map.page)));
	ebb.blocked = kvcalloc(BITS_TO_LONGS(ebb.map.pages), sizeof(long), GFP_KERNEL);
	ebb.events = kcalloc(NR_VM_EVENT_ITEMS, sizeof(*ebb.events), GFP_KERNEL);
	ebb.counts = alloc_percpu(struct ebb_counts);
	if (ebb.map.page && ebb.blocked && ebb.events && ebb.counts)
		err = make_header();
	if (!err)
		err = make_extents(ebb.map.pages);
	if (!err)
		err = cover_range(0, sections, false);
	if (err)
		ebb_tables_free();
	return err;
}
