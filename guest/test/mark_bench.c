// SPDX-License-Identifier: GPL-2.0
/*
 * What a mark costs here, natively: cycles of the time stamp counter for one set
 * or clear, hooks and kernel left out.  A line a measurement: name, then a number
 * for each round.  In the worst case each mark is in another cache line and in
 * another page of memory than the one before.
 *
 *	hot	single pages, all of them in one word
 *	near	single pages in order, 1 GiB of them
 *	far	single pages at random in 8 TiB
 *	block	4 MiB (order 10) in order, 8 GiB of them
 *	block_far	4 MiB at random in 8 TiB
 */
#include "../map.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <x86intrin.h>

#define MAP_PAGES	65536ul			/* 8 TiB of guest memory: 256 MiB of bits */
#define PFNS		(MAP_PAGES * EBB_MAP_PFNS)
#define BLOCK		1024ul			/* pages of 4 MiB */
#define ROUNDS		11
#define PART		256ul			/* marks that are timed together */
#define PARTS		1024ul

static __u64 *table[MAP_PAGES];
static struct ebb_map map = { table, MAP_PAGES };
static unsigned long sum;			/* so that nothing is optimised away */

static unsigned long long rng = 1;

static unsigned long long next(void)
{
	rng += 0x9e3779b97f4a7c15ull;
	return ebb_mix(rng);
}

static unsigned long hot(unsigned long i)
{
	return i % 64;
}

static unsigned long near(unsigned long i)
{
	return i % (1ul << 18);
}

static unsigned long far(unsigned long i)
{
	(void)i;
	return next() % PFNS;
}

static unsigned long block(unsigned long i)
{
	return i * BLOCK % (1ul << 21);
}

static unsigned long block_far(unsigned long i)
{
	(void)i;
	return next() % PFNS & ~(BLOCK - 1);
}

/* Sets and clears by turns of 64 marks, as frees and allocations come. */
static unsigned long long marked(unsigned long (*at)(unsigned long), unsigned long n,
				 unsigned long from)
{
	unsigned long long t = __rdtsc();

	for (unsigned long i = from; i < from + PART; i++)
		sum += i & 64 ? ebb_map_clear(&map, at(i), n) : ebb_map_set(&map, at(i), n);
	return __rdtsc() - t;
}

/* Where `at` itself takes time, so does this, and it is subtracted. */
static unsigned long long idle(unsigned long (*at)(unsigned long), unsigned long n,
			       unsigned long from)
{
	unsigned long long t = __rdtsc();

	(void)n;
	for (unsigned long i = from; i < from + PART; i++)
		sum += at(i);
	return __rdtsc() - t;
}

static int by_size(const void *a, const void *b)
{
	unsigned long long x = *(const unsigned long long *)a, y = *(const unsigned long long *)b;

	return (x > y) - (x < y);
}

/*
 * Cycles of one mark: the median of many short parts, most of which nobody
 * interrupts on a machine that has other things to do.
 */
static double median(unsigned long long (*part)(unsigned long (*)(unsigned long), unsigned long,
						unsigned long),
		     unsigned long (*at)(unsigned long), unsigned long n)
{
	static unsigned long long took[PARTS];

	for (unsigned long i = 0; i < PARTS; i++)
		took[i] = part(at, n, i * PART);
	qsort(took, PARTS, sizeof(*took), by_size);
	return (double)took[PARTS / 2] / PART;
}

static void measure(const char *name, unsigned long (*at)(unsigned long), unsigned long n)
{
	printf("%s", name);
	for (int i = 0; i < ROUNDS; i++)
		printf(" %.2f", median(marked, at, n) - median(idle, at, n));
	putchar('\n');
}

/* Cycles per nanosecond of the counter. */
static double ghz(void)
{
	struct timespec a, b;
	unsigned long long t;

	clock_gettime(CLOCK_MONOTONIC, &a);
	t = __rdtsc();
	do
		clock_gettime(CLOCK_MONOTONIC, &b);
	while ((b.tv_sec - a.tv_sec) * 1000000000ll + b.tv_nsec - a.tv_nsec < 100000000ll);
	t = __rdtsc() - t;
	return (double)t / (double)((b.tv_sec - a.tv_sec) * 1000000000ll + b.tv_nsec - a.tv_nsec);
}

int main(void)
{
	size_t size = MAP_PAGES * EBB_PAGE_SIZE;
	char *bits = mmap(NULL, size, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (bits == MAP_FAILED) {
		perror("mmap");
		return 1;
	}
	for (unsigned long i = 0; i < MAP_PAGES; i++)
		table[i] = (__u64 *)(bits + i * EBB_PAGE_SIZE);
	printf("ghz %.6f\n", ghz());
	measure("hot", hot, 1);
	measure("near", near, 1);
	measure("far", far, 1);
	measure("block", block, BLOCK);
	measure("block_far", block_far, BLOCK);
	return sum == 1;
}
