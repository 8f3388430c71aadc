/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The map of free pages, without the kernel around it: map.c builds in user
 * space as well (make test).
 */
#ifndef EBB_MAP_H
#define EBB_MAP_H

#ifdef __KERNEL__
#include <linux/atomic.h>
#include <linux/bitops.h>
#include <linux/types.h>

#define ebb_load(p)		READ_ONCE(*(p))
#define ebb_load_acquire(p)	smp_load_acquire(p)
#define ebb_fetch_or(p, v)	((__u64)atomic64_fetch_or((s64)(v), (atomic64_t *)(p)))
#define ebb_fetch_and(p, v)	((__u64)atomic64_fetch_and((s64)(v), (atomic64_t *)(p)))
#define ebb_bit_set(p, b)	test_and_set_bit(b, (unsigned long *)(p))
#define ebb_bit_clear(p, b)	test_and_clear_bit(b, (unsigned long *)(p))
#else
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ebb_load(p)		__atomic_load_n(p, __ATOMIC_RELAXED)
#define ebb_load_acquire(p)	__atomic_load_n(p, __ATOMIC_ACQUIRE)
#define ebb_fetch_or(p, v)	__atomic_fetch_or(p, v, __ATOMIC_SEQ_CST)
#define ebb_fetch_and(p, v)	__atomic_fetch_and(p, v, __ATOMIC_SEQ_CST)
#define ebb_bit_set(p, b)	(ebb_fetch_or(&(p)[(b) / 64], 1ull << (b) % 64) >> (b) % 64 & 1)
#define ebb_bit_clear(p, b)	(ebb_fetch_and(&(p)[(b) / 64], ~(1ull << (b) % 64)) >> (b) % 64 & 1)
#endif
#include "ebb_abi.h"

#define EBB_WORD_PFNS	64
#define EBB_PAGE_WORDS	(EBB_MAP_PFNS / EBB_WORD_PFNS)

struct ebb_map {
	__u64 **page;		/* by pfn / EBB_MAP_PFNS; NULL: not covered */
	unsigned long pages;	/* length of that table */
};

/* The map page that has a page's bit; NULL: it is not covered. */
static inline __u64 *ebb_map_page(const struct ebb_map *m, unsigned long pfn)
{
	unsigned long at = pfn / EBB_MAP_PFNS;

	return at < m->pages ? ebb_load_acquire(&m->page[at]) : NULL;
}

/* The word of a page's bit; NULL: it is not covered. */
static inline __u64 *ebb_map_word(const struct ebb_map *m, unsigned long pfn)
{
	__u64 *page = ebb_map_page(m, pfn);

	return page ? page + pfn / EBB_WORD_PFNS % EBB_PAGE_WORDS : NULL;
}

/* Whether the bit of one page is set: what every allocation asks. */
static inline bool ebb_map_test(const struct ebb_map *m, unsigned long pfn)
{
	const __u64 *word = ebb_map_word(m, pfn);

	return word && (ebb_load(word) >> pfn % EBB_WORD_PFNS & 1);
}

/*
 * Sets or clears one page's bit; true if that changed it.  Here, since this is what
 * most allocations and frees come to.
 */
static inline bool ebb_map_set_one(struct ebb_map *m, unsigned long pfn)
{
	__u64 *page = ebb_map_page(m, pfn);

	return page && !ebb_bit_set(page, pfn % EBB_MAP_PFNS);
}

static inline bool ebb_map_clear_one(struct ebb_map *m, unsigned long pfn)
{
	__u64 *page = ebb_map_page(m, pfn);

	return page && ebb_bit_clear(page, pfn % EBB_MAP_PFNS);
}

unsigned long ebb_map_set(struct ebb_map *m, unsigned long pfn, unsigned long n);
unsigned long ebb_map_clear(struct ebb_map *m, unsigned long pfn, unsigned long n);
unsigned long ebb_map_count(const struct ebb_map *m, unsigned long pfn, unsigned long n);
unsigned long ebb_map_covered(const struct ebb_map *m, unsigned long pfn, unsigned long n);
bool ebb_map_any(const struct ebb_map *m, unsigned long pfn, unsigned long n);
void ebb_map_zero(struct ebb_map *m);

int ebb_extent_add(struct ebb_extent_page **list, unsigned int pages,
		   __u64 gpa, __u32 first, __u32 count);
__u64 ebb_extent_find(struct ebb_extent_page *const *list, unsigned int pages, __u64 pfn);

#endif /* EBB_MAP_H */
