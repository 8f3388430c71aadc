// SPDX-License-Identifier: GPL-2.0
/*
 * Looking at the buddy allocator itself: the first scan, the slow re-scan that
 * repairs what hooks missed, second looks at single runs, and the audit.
 *
 * Blocks of the largest order are looked at one at a time under their
 * zone->lock (struct pages of 4 MiB: some ten microseconds), with `scanning`
 * held.  A zone of the buddy allocator begins and ends at such a block, and a
 * free block never crosses its line.
 *
 * A page whose bit is set although it is not free may be one that compaction
 * captured a moment ago (hooks.c); a scan clears the bit and counts it.  If the
 * page is in use already, our hooks leak: the module then withdraws the whole
 * map for good.
 */
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/sched.h>

#include "ebb.h"

/* Runs that an audit looks at again; more than these are wrong at once. */
#define AUDIT_RUNS	1024
#define AUDIT_WAIT_MS	200

struct run {
	unsigned long pfn;
	unsigned int n;
};

/* The free block that begins at this page: its length, 0: it is not free. */
static unsigned long free_block(struct zone *zone, struct page *page)
{
	unsigned long order;

	if (!PageBuddy(page) || page_zone(page) != zone)
		return 0;
	order = page_private(page);
	return order <= ilog2(EBB_BLOCK) ? 1ul << order : 0;
}

static unsigned long allocated_run(struct zone *zone, struct page *page, unsigned long max)
{
	unsigned long n = 1;

	while (n < max && !free_block(zone, page + n))
		n++;
	return n;
}

/* A lookout: what to do with each run, in pfn order, under the zone's lock. */
struct lookout {
	void (*run)(struct lookout *l, unsigned long pfn, unsigned long n, bool free);
	struct ebb_look *sum;
	struct run *wrong;		/* audit: runs for the second look */
	unsigned int wrongs;
	bool leak;			/* repair: a page in use was marked as free */
};

/* Returns false where there is no memory to look at. */
static bool look_at_block(unsigned long start, struct lookout *l)
{
	struct page *page = pfn_to_online_page(start);
	unsigned long flags, i, n;
	struct zone *zone;
	u64 t;

	lockdep_assert_held(&ebb.scanning);
	if (!page || test_bit(start / EBB_MAP_PFNS, ebb.blocked))
		return false;
	zone = page_zone(page);
	if (!populated_zone(zone))
		return false;
	spin_lock_irqsave(&zone->lock, flags);
	t = ktime_get_ns();
	for (i = 0; i < EBB_BLOCK; i += n) {
		n = free_block(zone, page + i);
		if (n)
			l->run(l, start + i, n, true);
		else if ((n = allocated_run(zone, page + i, EBB_BLOCK - i)))
			l->run(l, start + i, n, false);
	}
	t = ktime_get_ns() - t;
	spin_unlock_irqrestore(&zone->lock, flags);
	if (t > ebb.scan_hold_ns)
		ebb.scan_hold_ns = t;
	return true;
}

/*
 * Whether a page surely has an owner: set by whoever got it, after the last hook
 * that can clear its bit.  (A page that was just captured has none of these.)
 */
static bool in_use(struct page *page)
{
	struct page *head = compound_head(page);

	return PageLRU(head) || PageSlab(head) || READ_ONCE(head->mapping);
}

/* Under the lock: pages that are not free, at least one of them with its bit set. */
static bool withdraw_run(unsigned long pfn, unsigned long n)
{
	bool leak = false;

	for (; n; pfn++, n--) {
		bool used = in_use(pfn_to_page(pfn));

		smp_rmb();	/* the owner: clear, then use */
		if (!ebb_map_test(&ebb.map, pfn))
			continue;
		ebb.suspect++;
		leak |= used;
		if (!ebb_fault)		/* tests want to see it */
			ebb_map_clear(&ebb.map, pfn, 1);
	}
	return leak;
}

static void repair_run(struct lookout *l, unsigned long pfn, unsigned long n, bool free)
{
	if (!free && unlikely(ebb_map_any(&ebb.map, pfn, n)))
		l->leak |= withdraw_run(pfn, n);
	else if (free && n >> ebb.order && READ_ONCE(ebb.recording))
		ebb.repaired += ebb_map_set(&ebb.map, pfn, n);
}

/* Repairs a range; block by block, so that nobody waits for long. */
void ebb_scan(unsigned long start, unsigned long end)
{
	struct lookout l = { .run = repair_run };
	unsigned long pfn;

	for (pfn = start & ~(EBB_BLOCK - 1); pfn < end; pfn += EBB_BLOCK) {
		mutex_lock(&ebb.scanning);
		if (look_at_block(pfn, &l))
			ebb.scan_pages += EBB_BLOCK;
		mutex_unlock(&ebb.scanning);
		cond_resched();
	}
	if (l.leak)
		ebb_withdraw();
}

/* The next piece of the slow re-scan. */
void ebb_scan_some(unsigned long pages)
{
	unsigned long limit = ebb.map.pages * EBB_MAP_PFNS;
	unsigned long end;

	while (pages) {
		/* Do not spend the allowance on holes. */
		while (ebb.scan_at < limit && !ebb.map.page[ebb.scan_at / EBB_MAP_PFNS])
			ebb.scan_at += EBB_MAP_PFNS;
		if (ebb.scan_at >= limit) {
			ebb.scan_at = 0;
			ebb.scans++;
			return;
		}
		end = min(ebb.scan_at + min(pages, EBB_BLOCK * 16ul), limit);
		end = round_up(end, EBB_BLOCK);
		ebb_scan(ebb.scan_at, end);
		pages -= min(pages, end - ebb.scan_at);
		ebb.scan_at = end;
	}
}

/* Under the lock: whether a page lies in a free block of at least this order. */
bool ebb_in_buddy(unsigned long pfn, unsigned int order)
{
	for (; order <= ilog2(EBB_BLOCK); order++) {
		struct page *head = pfn_to_page(pfn & ~0ul << order);

		if (PageBuddy(head) && page_private(head) >= order)
			return true;
	}
	return false;
}

/* A page was to be taken off: a scan may have set its bit again meanwhile. */
static void look_at_taken(unsigned long pfn)
{
	struct page *page = pfn_to_online_page(pfn);
	unsigned long flags;

	if (!page || test_bit(pfn / EBB_MAP_PFNS, ebb.blocked))
		return;
	spin_lock_irqsave(&page_zone(page)->lock, flags);
	if (!ebb_in_buddy(pfn, 0))
		ebb_map_clear(&ebb.map, pfn, 1);
	spin_unlock_irqrestore(&page_zone(page)->lock, flags);
}

/* A large block was freed: is it free, or part of a larger one, by now? */
static void look_at_hint(unsigned long pfn, unsigned int order)
{
	struct page *page = pfn_to_online_page(pfn);
	unsigned long flags;

	order = max(order, ebb.order);
	pfn &= ~0ul << order;
	if (!page || test_bit(pfn / EBB_MAP_PFNS, ebb.blocked))
		return;
	spin_lock_irqsave(&page_zone(page)->lock, flags);
	if (READ_ONCE(ebb.recording) && ebb_in_buddy(pfn, order))
		ebb.repaired += ebb_map_set(&ebb.map, pfn, 1ul << order);
	spin_unlock_irqrestore(&page_zone(page)->lock, flags);
}

/* Looks at everything in the ring again. */
void ebb_ring_drain(void)
{
	unsigned int head = atomic_read(&ebb.ring_head);

	if (head - ebb.ring_tail > EBB_RING)
		ebb.ring_tail = head - EBB_RING;
	for (; ebb.ring_tail != head; ebb.ring_tail++) {
		s64 run = atomic64_xchg(&ebb.ring[ebb.ring_tail % EBB_RING], 0) - 1;

		if (run < 0)
			continue;
		mutex_lock(&ebb.scanning);
		if (run & EBB_RING_TAKEN)
			look_at_taken(run >> 8);
		else
			look_at_hint(run >> 8, run & 0xf);
		mutex_unlock(&ebb.scanning);
		cond_resched();
	}
}

static void audit_wrong(struct lookout *l, unsigned long pfn)
{
	struct run *last = l->wrongs ? &l->wrong[l->wrongs - 1] : NULL;

	if (last && last->pfn + last->n == pfn) {
		last->n++;
	} else if (l->wrongs < AUDIT_RUNS) {
		l->wrong[l->wrongs++] = (struct run){ pfn, 1 };
	} else {
		l->sum->wrong++;
	}
}

static void audit_run(struct lookout *l, unsigned long pfn, unsigned long n, bool free)
{
	unsigned long set = ebb_map_count(&ebb.map, pfn, n), i;

	l->sum->pages += n;
	l->sum->set += set;
	if (free && n >> ebb.order) {
		l->sum->free += n;
		l->sum->missed += ebb_map_covered(&ebb.map, pfn, n) - set;
		return;
	}
	/* Pieces of a torn block that are free are right, if unexpected. */
	for (i = 0; i < n && set && !free; i++)
		if (ebb_map_test(&ebb.map, pfn + i))
			audit_wrong(l, pfn + i);
}

/* Bits of memory that is not there (any more). */
static void audit_hole(struct lookout *l, unsigned long pfn)
{
	unsigned long i;

	if (!ebb_map_any(&ebb.map, pfn, EBB_BLOCK))
		return;
	for (i = 0; i < EBB_BLOCK; i++)
		if (ebb_map_test(&ebb.map, pfn + i))
			audit_wrong(l, pfn + i);
}

static bool still_wrong(unsigned long pfn)
{
	struct page *page = pfn_to_online_page(pfn);
	unsigned long flags;
	bool wrong;

	if (!page)
		return ebb_map_test(&ebb.map, pfn);
	spin_lock_irqsave(&page_zone(page)->lock, flags);
	wrong = ebb_map_test(&ebb.map, pfn) && !ebb_in_buddy(pfn, 0);
	spin_unlock_irqrestore(&page_zone(page)->lock, flags);
	return wrong;
}

/*
 * Compares every bit with the buddy allocator.  A wrong bit counts when it is
 * still wrong AUDIT_WAIT_MS later; those that were not are `passing`.
 */
int ebb_audit(struct ebb_look *sum, u64 *passing)
{
	struct lookout l = { .run = audit_run, .sum = sum };
	unsigned long limit = ebb.map.pages * EBB_MAP_PFNS, pfn;
	unsigned int i, j;

	*sum = (struct ebb_look){ };
	*passing = 0;
	l.wrong = kvcalloc(AUDIT_RUNS, sizeof(*l.wrong), GFP_KERNEL);
	if (!l.wrong)
		return -ENOMEM;
	for (pfn = 0; pfn < limit; pfn += EBB_BLOCK) {
		mutex_lock(&ebb.scanning);
		if (!test_bit(pfn / EBB_MAP_PFNS, ebb.blocked) && !look_at_block(pfn, &l))
			audit_hole(&l, pfn);
		mutex_unlock(&ebb.scanning);
		cond_resched();
	}
	if (l.wrongs)
		msleep(AUDIT_WAIT_MS);
	for (i = 0; i < l.wrongs; i++) {
		mutex_lock(&ebb.scanning);
		for (j = 0; j < l.wrong[i].n; j++) {
			pfn = l.wrong[i].pfn + j;
			if (!still_wrong(pfn)) {
				++*passing;
				continue;
			}
			if (!sum->wrong++)
				sum->first_wrong = pfn;
		}
		mutex_unlock(&ebb.scanning);
	}
	kvfree(l.wrong);
	return 0;
}
