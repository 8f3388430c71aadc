// SPDX-License-Identifier: GPL-2.0
/*
 * Free pages in per-CPU lists are free, but not in the buddy allocator: they
 * can be taken without any hook, so they are not in the map.  From 6.7 on these
 * lists grow with what a task frees, to several percent of memory, and shrink
 * over many seconds only.  The kernel's own drain_all_pages() is not for
 * modules; alloc_contig_range() is, and begins with one for its zone.  So, in a
 * guest that has become quiet, with much in these lists: one page is allocated
 * that way out of a block that is wholly free (so that nothing has to be
 * migrated and the block's type does not matter), and is freed again.
 *
 * "Quiet": hardly an allocation since the last look, so nobody misses the lists.
 */
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/pageblock-flags.h>
#include <linux/version.h>

#include "ebb.h"

/* Worth it from this many pages on, and this part of a zone. */
#define MIN_PAGES	256
#define ZONE_PART	256

static unsigned long held(struct zone *zone)
{
	unsigned long sum = 0;
	int cpu;

	for_each_online_cpu(cpu)
		sum += READ_ONCE(per_cpu_ptr(zone->per_cpu_pageset, cpu)->count);
	return sum;
}

/* A pageblock below a page, all of whose pages are free, from the end of the zone; 0: none. */
static unsigned long free_pageblock(struct zone *zone, unsigned long below)
{
	unsigned long pfn = round_down(min(below, zone_end_pfn(zone)), pageblock_nr_pages);

	while (pfn >= zone->zone_start_pfn + pageblock_nr_pages) {
		pfn -= pageblock_nr_pages;
		if (ebb_map_count(&ebb.map, pfn, pageblock_nr_pages) == pageblock_nr_pages)
			return pfn;
	}
	return 0;
}

/* The last one of any zone below a page. */
unsigned long ebb_free_pageblock(unsigned long below)
{
	unsigned long pfn = 0;
	int nid, i;

	for_each_online_node(nid) {
		for (i = 0; i < MAX_NR_ZONES; i++) {
			struct zone *zone = &NODE_DATA(nid)->node_zones[i];

			if (populated_zone(zone) && zone->zone_start_pfn < below)
				pfn = max(pfn, free_pageblock(zone, below));
		}
	}
	return pfn;
}

/* Takes the first page of a free pageblock and gives it back. */
bool ebb_take_one(unsigned long pfn)
{
	bool done = false;

	/* Not while memory goes: its struct pages may go too. */
	mutex_lock(&ebb.scanning);
	if (pfn_to_online_page(pfn) && !test_bit(pfn / EBB_MAP_PFNS, ebb.blocked) &&
	    !alloc_contig_range(pfn, pfn + 1, EBB_CONTIG_ANY, GFP_KERNEL | __GFP_NOWARN)) {
		free_contig_range(pfn, 1);
		done = true;
	}
	mutex_unlock(&ebb.scanning);
	/* The rest of the block came back while it was isolated: no hook tells. */
	if (done)
		ebb_scan(pfn, pfn + pageblock_nr_pages);
	return done;
}

static void drain(struct zone *zone)
{
	unsigned long pfn;

	if (held(zone) < max_t(unsigned long, MIN_PAGES, zone_managed_pages(zone) / ZONE_PART))
		return;
	pfn = free_pageblock(zone, ~0ul);
	if (pfn && ebb_take_one(pfn))
		ebb.drains++;
}

/* With every update of the facts: `allocated` is their counter. */
void ebb_drain(u64 allocated)
{
	u64 since = allocated - ebb.allocated;
	int nid, i;

	ebb.allocated = allocated;
	if (since > MIN_PAGES || !READ_ONCE(ebb.recording))
		return;
	for_each_online_node(nid)
		for (i = 0; i < MAX_NR_ZONES; i++)
			if (populated_zone(&NODE_DATA(nid)->node_zones[i]))
				drain(&NODE_DATA(nid)->node_zones[i]);
}
