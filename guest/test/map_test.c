// SPDX-License-Identifier: GPL-2.0
/*
 * The laws of the map: it is a set of pages, whatever runs come; counts are
 * exact; what is not covered is never set.  One seed, printed on failure.
 */
#include "../map.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGES	5
#define PFNS	(PAGES * EBB_MAP_PFNS)

#define CHECK(x) do { \
	if (!(x)) { \
		fprintf(stderr, "%s:%d: %s (seed %llu)\n", __FILE__, __LINE__, #x, seed0); \
		exit(1); \
	} \
} while (0)

static unsigned long long seed0 = 1, rng;

static unsigned long long next(void)
{
	rng += 0x9e3779b97f4a7c15ull;
	return ebb_mix(rng);
}

static __u64 *table[PAGES];
static struct ebb_map map = { table, PAGES };
static unsigned char model[PFNS];

static void setup(void)
{
	for (int i = 0; i < PAGES; i++)
		if (i != 3)	/* a hole */
			table[i] = calloc(1, EBB_PAGE_SIZE);
}

static unsigned long model_change(unsigned long pfn, unsigned long n, int to)
{
	unsigned long changed = 0;

	for (unsigned long p = pfn; p < pfn + n && p < PFNS; p++) {
		if (p / EBB_MAP_PFNS == 3 || model[p] == to)
			continue;
		model[p] = to;
		changed++;
	}
	return changed;
}

static unsigned long model_count(unsigned long pfn, unsigned long n)
{
	unsigned long count = 0;

	for (unsigned long p = pfn; p < pfn + n && p < PFNS; p++)
		count += model[p];
	return count;
}

static void runs_are_sets(void)
{
	for (int i = 0; i < 100000; i++) {
		unsigned long order = next() % 11, pfn, n;

		if (next() % 4) {	/* a block, as the kernel has them */
			n = 1ul << order;
			pfn = next() % (PFNS + 2048) & ~(n - 1);
		} else {		/* any run */
			n = next() % 3000;
			pfn = next() % (PFNS + 2048);
		}
		if (next() % 2)
			CHECK(ebb_map_set(&map, pfn, n) == model_change(pfn, n, 1));
		else
			CHECK(ebb_map_clear(&map, pfn, n) == model_change(pfn, n, 0));
		pfn = next() % PFNS;
		n = next() % 700;
		CHECK(ebb_map_count(&map, pfn, n) == model_count(pfn, n));
		CHECK(ebb_map_any(&map, pfn, n) == !!model_count(pfn, n));
		CHECK(ebb_map_test(&map, pfn) == model_count(pfn, 1));
	}
	CHECK(ebb_map_count(&map, 0, PFNS) == model_count(0, PFNS));
	CHECK(ebb_map_covered(&map, 0, PFNS) == PFNS - EBB_MAP_PFNS);
	CHECK(ebb_map_covered(&map, PFNS - 10, 100) == 10);
	ebb_map_zero(&map);
	CHECK(!ebb_map_any(&map, 0, PFNS));
}

static void far_pages_are_ignored(void)
{
	static const unsigned long far[] = { PFNS, 1ul << 40, ~0ul >> 12, ~0ul - 100 };

	for (unsigned int i = 0; i < sizeof(far) / sizeof(*far); i++) {
		CHECK(ebb_map_set(&map, far[i], 64) == 0);
		CHECK(ebb_map_clear(&map, far[i], 64) == 0);
		CHECK(!ebb_map_any(&map, far[i], 64));
	}
	CHECK(ebb_map_set(&map, 5, 0) == 0 && !ebb_map_any(&map, 0, PFNS));
}

static void extents_are_merged_found_and_bounded(void)
{
	struct ebb_extent_page *list[2];
	__u32 first = 0;

	for (int i = 0; i < 2; i++)
		list[i] = calloc(1, sizeof(*list[i]));
	CHECK(ebb_extent_find(list, 2, 0) == 0);
	CHECK(ebb_extent_add(list, 2, 0x10000, 0, 16) == 0);
	CHECK(ebb_extent_add(list, 2, 0x20000, 16, 8) == 0);
	CHECK(list[0]->count == 1 && list[0]->extent[0].pages == 24);
	CHECK(ebb_extent_add(list, 2, 0x28000, 32, 1) == 0);	/* a hole before it */
	CHECK(ebb_extent_find(list, 2, 17ull * EBB_MAP_PFNS + 5) == 0x21000);
	CHECK(ebb_extent_find(list, 2, 24ull * EBB_MAP_PFNS) == 0);
	CHECK(ebb_extent_find(list, 2, 32ull * EBB_MAP_PFNS) == 0x28000);
	CHECK(ebb_extent_find(list, 2, ~0ull) == 0);
	for (first = 100; !ebb_extent_add(list, 2, 0x100000 + first * 0x2000ull, first, 1); first++)
		;
	CHECK(first - 100 == 2 * EBB_EXTENTS_A_PAGE - 2);
	/* Full, but the last one can still grow. */
	CHECK(ebb_extent_add(list, 2, 0x101000 + (first - 1) * 0x2000ull, first, 1) == 0);
	CHECK(ebb_extent_add(list, 2, 0, first + 2, 1) == -ENOSPC);
	CHECK(ebb_extent_find(list, 2, (__u64)first * EBB_MAP_PFNS) ==
	      0x101000 + (first - 1) * 0x2000ull);
	for (int i = 0; i < 2; i++)
		free(list[i]);
}

static void the_checksum_covers_the_static_part(void)
{
	static struct ebb_header h = { .magic = EBB_MAGIC, .version = EBB_ABI_VERSION };
	__u64 sum = ebb_checksum(&h);

	h.checksum = sum;
	CHECK(ebb_checksum(&h) == sum);
	h.state = EBB_RUNNING;
	h.challenge = 7;
	CHECK(ebb_checksum(&h) == sum);
	for (unsigned int i = 0; i < EBB_STATIC_BYTES; i++) {
		if (i >= 32 && i < 40)
			continue;
		((__u8 *)&h)[i] ^= 1;
		CHECK(ebb_checksum(&h) != sum);
		((__u8 *)&h)[i] ^= 1;
	}
	CHECK(ebb_response(1, 2) != ebb_response(1, 3));
	CHECK(ebb_beat_check(1, 2) != ebb_beat_check(2, 2));
	/* For other implementations. */
	CHECK(ebb_mix(0) == 0 && ebb_mix(1) == 0x5692161d100b05e5ull);
}

int main(int argc, char **argv)
{
	if (argc > 1)
		seed0 = strtoull(argv[1], NULL, 0);
	rng = seed0;
	setup();
	runs_are_sets();
	far_pages_are_ignored();
	extents_are_merged_found_and_bounded();
	the_checksum_covers_the_static_part();
	for (int i = 0; i < PAGES; i++)
		free(table[i]);
	puts("map_test: ok");
	return 0;
}
