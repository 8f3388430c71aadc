// SPDX-License-Identifier: GPL-2.0
/*
 * The self-test at load: makes every CLEAR hook fire that can be made to, on
 * pages of our own, and asks whether it was seen.
 *
 *	mm_page_alloc_zone_locked	blocks too large for the per-CPU lists
 *	mm_page_alloc_extfrag		the largest blocks of ZONE_DMA, of which there
 *					are a few: first as reclaimable ones, then as
 *					movable ones, until one is of the other type
 *	mm_page_alloc			each of these
 *	__isolate_free_page		one page by alloc_contig_range()
 *
 * The other two fire only where memory goes offline or is broken.  Allocations
 * here do not reclaim, so no page of theirs is captured by compaction: each must
 * leave the allocator under the eyes of one of the first two.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/sched.h>

#include "ebb.h"

/* One more than PAGE_ALLOC_COSTLY_ORDER: not from the per-CPU lists. */
#define ORDER		4
#define NORMAL_TRIES	64
#define DMA_BLOCKS	(EBB_SEARCH_PAGES / EBB_BLOCK)
#define BLOCK_TRIES	8
#define NO_PFN		(~0ul)

/* What each hook saw last in the task that tests. */
static struct {
	unsigned long pfn;
	unsigned int order;
} saw[EBB_HOOKS];

/* By a hook, with ebb.tester set. */
void ebb_test_saw(enum ebb_hook hook, unsigned long pfn, unsigned int order)
{
	if (READ_ONCE(ebb.tester) != current || !in_task())
		return;
	saw[hook].pfn = pfn;
	saw[hook].order = order;
}

static void forget(void)
{
	unsigned int i;

	for (i = 0; i < EBB_HOOKS; i++)
		saw[i].pfn = NO_PFN;
}

static bool seen(enum ebb_hook hook, unsigned long pfn)
{
	return saw[hook].pfn != NO_PFN && pfn >= saw[hook].pfn &&
	       pfn - saw[hook].pfn < 1ul << saw[hook].order;
}

/* How often which hook saw a block leave. */
struct tally {
	unsigned int locked, extfrag, nobody, no_alloc;
};

static bool take(struct tally *b, gfp_t gfp, unsigned int order, struct list_head *held)
{
	struct page *page;
	unsigned long pfn;

	forget();
	page = alloc_pages(gfp | __GFP_NOWARN, order);
	if (!page)
		return false;
	list_add(&page->lru, held);
	pfn = page_to_pfn(page);
	b->no_alloc += !seen(EBB_HOOK_ALLOC, pfn);
	if (seen(EBB_HOOK_ZONE_LOCKED, pfn))
		b->locked++;
	else if (seen(EBB_HOOK_EXTFRAG, pfn))
		b->extfrag++;
	else
		b->nobody++;
	return true;
}

static void give_back(struct list_head *held, unsigned int order)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, held, lru)
		__free_pages(page, order);
	INIT_LIST_HEAD(held);
}

/* Until one block is taken from those of another type, or none is left. */
static void try_extfrag(struct tally *b, gfp_t type)
{
	LIST_HEAD(held);
	unsigned int i;

	for (i = 0; i < DMA_BLOCKS && !b->extfrag && !b->nobody; i++)
		if (!take(b, GFP_DMA | type, ilog2(EBB_BLOCK), &held))
			break;
	give_back(&held, ilog2(EBB_BLOCK));
}

static const char *test_allocations(void)
{
	bool extfrag = ebb_hooks_extfrag();
	struct tally b = { };
	LIST_HEAD(held);
	unsigned int i;

	for (i = 0; i < NORMAL_TRIES && !b.locked; i++)
		if (!take(&b, 0, ORDER, &held))
			break;
	give_back(&held, ORDER);
	if (!b.locked && !b.nobody)
		return "no free block of 64 KiB to test mm_page_alloc_zone_locked on";
	if (!b.locked || (b.nobody && !extfrag))
		return "mm_page_alloc_zone_locked was not seen";
	if (extfrag) {
		try_extfrag(&b, __GFP_RECLAIMABLE);
		try_extfrag(&b, __GFP_MOVABLE);
		if (b.nobody)
			return "mm_page_alloc_extfrag was not seen";
		if (!b.extfrag)
			pr_info("no free block in ZONE_DMA to test mm_page_alloc_extfrag on\n");
	}
	return b.no_alloc ? "mm_page_alloc was not seen" : NULL;
}

/* A free pageblock, made by compaction where there is none. */
static unsigned long some_pageblock(unsigned long below)
{
	unsigned long pfn = ebb_free_pageblock(below);
	struct page *page;

	if (pfn)
		return pfn;
	page = alloc_pages(GFP_KERNEL | __GFP_NOWARN | __GFP_RETRY_MAYFAIL, ilog2(EBB_BLOCK));
	if (!page)
		return 0;
	pfn = page_to_pfn(page);
	__free_pages(page, ilog2(EBB_BLOCK));
	ebb_scan(pfn, pfn + EBB_BLOCK);
	return pfn;
}

static const char *test_isolation(void)
{
	unsigned long pfn = NO_PFN;
	unsigned int i;

	for (i = 0; i < BLOCK_TRIES; i++) {
		pfn = some_pageblock(pfn);
		if (!pfn)
			break;
		forget();
		if (ebb_take_one(pfn))
			return seen(EBB_HOOK_ISOLATE, pfn) ? NULL :
				"__isolate_free_page was not seen";
	}
	return "no free block of memory to test __isolate_free_page on";
}

/* What is wrong with the hooks; NULL: they see what they must. */
const char *ebb_selftest(void)
{
	const char *why;

	WRITE_ONCE(ebb.tester, current);
	why = test_allocations();
	if (!why)
		why = test_isolation();
	WRITE_ONCE(ebb.tester, NULL);
	return why;
}
