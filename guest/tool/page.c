// SPDX-License-Identifier: GPL-2.0
/*
 * What is in a page.  Contents follow from seeds and indexes alone, so two VMs
 * can be told to hold the same pages, and a page can be checked without a copy.
 *
 * A sealed page is { seed, index, generation, checksum, noise... }.  The
 * checksum covers every other word; the header catches what a checksum cannot:
 * a whole page that is older, or another one, or zero.
 */
#include "tool.h"

#include <string.h>

enum { W_SEED, W_INDEX, W_GENERATION, W_SUM, W_NOISE };

u64 mix64(u64 x)
{
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

u64 rng_next(u64 *state)
{
	*state += 0x9e3779b97f4a7c15ULL;
	return mix64(*state);
}

enum pattern pattern_named(const char *name)
{
	static const char *const names[] = { "zero", "touch", "random", "template" };

	for (int i = 0; i < PAT_BAD; i++)
		if (!strcmp(name, names[i]))
			return (enum pattern)i;
	return PAT_BAD;
}

/* xorshift64: cheap under emulation, and nothing compresses it. */
static void noise(u64 *to, size_t words, u64 x)
{
	x |= 1;
	for (size_t i = 0; i < words; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		to[i] = x;
	}
}

void page_random(u64 *page, u64 seed, u64 index)
{
	noise(page, PAGE_WORDS, mix64(seed ^ mix64(index)));
}

void page_fill(u64 *page, const struct fill *f, u64 index)
{
	u64 cluster = index / f->cluster;
	bool follows = f->share >= 1.0 ||
		       (double)(mix64(cluster ^ f->common) >> 11) * 0x1p-53 < f->share;

	switch (follows ? f->pattern : PAT_RANDOM) {
	case PAT_ZERO:
		memset(page, 0, PAGE);
		break;
	case PAT_TOUCH:
		page[0] = mix64(f->seed ^ mix64(index));
		break;
	case PAT_TEMPLATE:
		page_random(page, f->common, index);
		break;
	default:
		page_random(page, f->seed, index);
	}
}

static u64 page_sum(const u64 *page)
{
	u64 sum = 0x243f6a8885a308d3ULL;

	for (size_t i = 0; i < PAGE_WORDS; i++) {
		if (i == W_SUM)
			continue;
		sum = (sum ^ page[i]) * 0x9fb21c651e98df25ULL;
		sum ^= sum >> 32;
	}
	return sum;
}

void page_seal(u64 *page, u64 seed, u64 index, u64 generation)
{
	page[W_SEED] = seed;
	page[W_INDEX] = index;
	page[W_GENERATION] = generation;
	noise(page + W_NOISE, PAGE_WORDS - W_NOISE, mix64(seed ^ mix64(index) ^ generation << 40));
	page[W_SUM] = page_sum(page);
}

static bool differs(u64 want, u64 got, u64 *expected, u64 *found)
{
	*expected = want;
	*found = got;
	return want != got;
}

/* What is wrong with a page, or NULL.  Generation 0 is a page that was never
 * written, or given back: it must read as zeros. */
const char *page_check(const u64 *page, u64 seed, u64 index, u64 generation,
		       u64 *expected, u64 *found)
{
	if (!generation) {
		for (size_t i = 0; i < PAGE_WORDS; i++)
			if (differs(0, page[i], expected, found))
				return "not zero";
		return NULL;
	}
	if (differs(seed, page[W_SEED], expected, found))
		return "seed";
	if (differs(index, page[W_INDEX], expected, found))
		return "index";
	if (differs(generation, page[W_GENERATION], expected, found))
		return "generation";
	if (differs(page_sum(page), page[W_SUM], expected, found))
		return "checksum";
	return NULL;
}
