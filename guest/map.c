// SPDX-License-Identifier: GPL-2.0
/*
 * The map: a table of map pages, each with the bits of 128 MiB.
 *
 * Who may change a bit: whoever holds the zone->lock of its page; and, to clear
 * it, also whoever owns the page.  So two writers never want different things
 * of one *bit*, but they may meet in one *word*: partial words change by atomic
 * operations, whole words (64 pages of one block, hence of one zone) by plain
 * stores.  A whole word that is stored as zero can at worst swallow a neighbour
 * zone's set, which costs opportunity and nothing else.
 *
 * When ebb_map_clear() returns, the clear is visible to all: the page may be
 * handed out and written to.  Runs beyond the table or in holes of it are
 * ignored: what is not covered is never set.
 */
#include "map.h"

#ifdef __KERNEL__
#include <linux/errno.h>
#include <linux/kernel.h>
#include <linux/string.h>

#define store(p, v)	WRITE_ONCE(*(p), v)
#define full_barrier()	smp_mb()
#define weight(v)	hweight64(v)
#else
#include <errno.h>

#ifdef __SANITIZE_THREAD__	/* it knows no fences */
#define store(p, v)	__atomic_store_n(p, v, __ATOMIC_SEQ_CST)
#define full_barrier()	((void)0)
#else
#define store(p, v)	__atomic_store_n(p, v, __ATOMIC_RELAXED)
#define full_barrier()	__atomic_thread_fence(__ATOMIC_SEQ_CST)
#endif
#define weight(v)	__builtin_popcountll(v)
#endif

/* A piece of a run that lies in one word; NULL where there is no map. */
struct piece {
	__u64 *word;
	__u64 mask;
	unsigned int bit, len;
};

static inline struct piece first_piece(const struct ebb_map *m, unsigned long pfn,
				       unsigned long n)
{
	struct piece p = { .word = ebb_map_word(m, pfn), .bit = pfn % EBB_WORD_PFNS };

	p.len = n < EBB_WORD_PFNS - p.bit ? n : EBB_WORD_PFNS - p.bit;
	p.mask = (~0ull >> (EBB_WORD_PFNS - p.len)) << p.bit;
	return p;
}

/* Whole words that follow each other; returns how many bits were set. */
static inline unsigned long change_words(__u64 *word, unsigned long words, bool to)
{
	unsigned long i, were = 0;

	for (i = 0; i < words; i++) {
		were += weight(ebb_load(&word[i]));
		store(&word[i], to ? ~0ull : 0);
	}
	return were;
}

/* Returns how many bits were otherwise before. */
static inline unsigned long change_run(struct ebb_map *m, unsigned long pfn, unsigned long n,
				       bool to)
{
	unsigned long changed = 0;

	while (n) {
		struct piece p = first_piece(m, pfn, n);
		unsigned long len = p.len, were = 0;

		if (len == EBB_WORD_PFNS) {
			/* All whole words up to the end of the map page. */
			len = EBB_MAP_PFNS - pfn % EBB_MAP_PFNS;
			len = (n < len ? n : len) & ~(EBB_WORD_PFNS - 1ul);
			if (p.word)
				were = change_words(p.word, len / EBB_WORD_PFNS, to);
		} else if (p.word) {
			were = weight((to ? ebb_fetch_or(p.word, p.mask) :
				       ebb_fetch_and(p.word, ~p.mask)) & p.mask);
		}
		if (p.word)
			changed += to ? len - were : were;
		pfn += len;
		n -= len;
	}
	return changed;
}

/* Sets a run; returns how many bits were not set before. */
unsigned long ebb_map_set(struct ebb_map *m, unsigned long pfn, unsigned long n)
{
	if (n == 1)
		return ebb_map_set_one(m, pfn);
	return change_run(m, pfn, n, true);
}

/* Clears a run, visible to all; returns how many bits were set before. */
unsigned long ebb_map_clear(struct ebb_map *m, unsigned long pfn, unsigned long n)
{
	unsigned long changed;

	if (n == 1)
		return ebb_map_clear_one(m, pfn);
	changed = change_run(m, pfn, n, false);
	if (n >= EBB_WORD_PFNS)
		full_barrier();		/* shorter ones were atomic throughout */
	return changed;
}

unsigned long ebb_map_count(const struct ebb_map *m, unsigned long pfn, unsigned long n)
{
	unsigned long count = 0;

	while (n) {
		struct piece p = first_piece(m, pfn, n);

		if (p.word)
			count += weight(ebb_load(p.word) & p.mask);
		pfn += p.len;
		n -= p.len;
	}
	return count;
}

/* How many pages of a run have a place in the map. */
unsigned long ebb_map_covered(const struct ebb_map *m, unsigned long pfn, unsigned long n)
{
	unsigned long count = 0;

	while (n) {
		struct piece p = first_piece(m, pfn, n);

		count += p.word ? p.len : 0;
		pfn += p.len;
		n -= p.len;
	}
	return count;
}

bool ebb_map_any(const struct ebb_map *m, unsigned long pfn, unsigned long n)
{
	while (n) {
		struct piece p = first_piece(m, pfn, n);

		if (p.word && (ebb_load(p.word) & p.mask))
			return true;
		pfn += p.len;
		n -= p.len;
	}
	return false;
}

void ebb_map_zero(struct ebb_map *m)
{
	unsigned long i, w;

	for (i = 0; i < m->pages; i++) {
		__u64 *page = ebb_map_word(m, i * EBB_MAP_PFNS);

		for (w = 0; page && w < EBB_PAGE_WORDS; w++)
			store(&page[w], 0);
	}
	full_barrier();
}

static bool extends(const struct ebb_extent *e, __u64 gpa, __u32 first)
{
	return e->first + e->pages == first &&
	       e->gpa + (__u64)e->pages * EBB_PAGE_SIZE == gpa;
}

/*
 * Appends a run of map pages, to the last extent where it continues that one.
 * -ENOSPC: the list is full.
 */
int ebb_extent_add(struct ebb_extent_page **list, unsigned int pages,
		   __u64 gpa, __u32 first, __u32 count)
{
	struct ebb_extent *last = NULL;
	unsigned int i;

	for (i = 0; i < pages; i++) {
		struct ebb_extent_page *p = list[i];

		if (p->count)
			last = &p->extent[p->count - 1];
		if (p->count == EBB_EXTENTS_A_PAGE)
			continue;
		if (last && extends(last, gpa, first)) {
			store(&last->pages, last->pages + count);
			return 0;
		}
		p->extent[p->count] = (struct ebb_extent){ gpa, first, count };
		store(&p->count, p->count + 1);
		return 0;
	}
	if (!last || !extends(last, gpa, first))
		return -ENOSPC;
	store(&last->pages, last->pages + count);
	return 0;
}

/* The address of the map page that has the bit of a pfn; 0: none has. */
__u64 ebb_extent_find(struct ebb_extent_page *const *list, unsigned int pages, __u64 pfn)
{
	__u64 at = pfn / EBB_MAP_PFNS;
	unsigned int i, j;

	for (i = 0; i < pages; i++) {
		for (j = 0; j < list[i]->count; j++) {
			const struct ebb_extent *e = &list[i]->extent[j];

			if (at >= e->first && at - e->first < e->pages)
				return e->gpa + (at - e->first) * EBB_PAGE_SIZE;
		}
	}
	return 0;
}
