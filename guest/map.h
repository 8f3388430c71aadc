/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The map of free pages, without the kernel around it: map.c builds in user
 * space as well (make test).
 */
#ifndef EBB_MAP_H
#define EBB_MAP_H

#ifdef __KERNEL__
#include <linux/types.h>
#else
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#endif
#include "ebb_abi.h"

#define EBB_WORD_PFNS	64
#define EBB_PAGE_WORDS	(EBB_MAP_PFNS / EBB_WORD_PFNS)

struct ebb_map {
	__u64 **page;		/* by pfn / EBB_MAP_PFNS; NULL: not covered */
	unsigned long pages;	/* length of that table */
};

/* The word of a page's bit; NULL: it is not covered. */
static inline __u64 *ebb_map_word(const struct ebb_map *m, unsigned long pfn)
{
	unsigned long at = pfn / EBB_MAP_PFNS;
	__u64 *page = at < m->pages ? __atomic_load_n(&m->page[at], __ATOMIC_ACQUIRE) : NULL;

	return page ? page + pfn / EBB_WORD_PFNS % EBB_PAGE_WORDS : NULL;
}

/* Whether the bit of one page is set: what every allocation asks. */
static inline bool ebb_map_test(const struct ebb_map *m, unsigned long pfn)
{
	const __u64 *word = ebb_map_word(m, pfn);

	return word && (__atomic_load_n(word, __ATOMIC_RELAXED) >> pfn % EBB_WORD_PFNS & 1);
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
