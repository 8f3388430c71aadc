// SPDX-License-Identifier: GPL-2.0
/*
 * The order the host relies on, with threads: guests clear, then write; the
 * host protects, then reads the bit, then discards.  Pages of two "zones" share
 * words, each zone has its lock.  A guest's word that is lost is a failure.
 * Protection is a flag here: a writer that finds it set waits, as a fault would.
 */
#include "../map.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define ZONES	2
#define BLOCK	16u			/* pages a thread takes at a time */
#define PFNS	4096ul
#define ROUNDS	40000
#define GUESTS	3

static __u64 words[EBB_PAGE_WORDS];
static __u64 *table[1] = { words };
static struct ebb_map map = { table, 1 };
static pthread_mutex_t lock[ZONES] = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER };
static unsigned char taken[PFNS / BLOCK];	/* under the zone's lock */
static atomic_uint data[PFNS], guarded[PFNS];
static atomic_uint lost, done, discards, saved;

/* Blocks alternate between the zones, so each word has pages of both. */
static unsigned int zone_of(unsigned long pfn)
{
	return pfn / BLOCK % ZONES;
}

static void *guest(void *arg)
{
	unsigned int id = (unsigned int)(size_t)arg, state = id * 2654435761u + 1;

	for (unsigned int r = 0; r < ROUNDS; r++) {
		unsigned long b, pfn;

		state = state * 1103515245u + 12345u;
		b = (state >> 8) % (PFNS / BLOCK);
		pfn = b * BLOCK;
		pthread_mutex_lock(&lock[zone_of(pfn)]);
		if (taken[b]) {
			pthread_mutex_unlock(&lock[zone_of(pfn)]);
			continue;
		}
		taken[b] = 1;
		ebb_map_clear(&map, pfn, BLOCK);
		pthread_mutex_unlock(&lock[zone_of(pfn)]);
		for (unsigned int i = 0; i < BLOCK; i++) {
			for (;;) {	/* the fault: no store while guarded */
				unsigned int free = 0;

				if (atomic_compare_exchange_strong(&guarded[pfn + i], &free, 2))
					break;
			}
			atomic_store(&data[pfn + i], id + r * 8 + 8);
			atomic_store(&guarded[pfn + i], 0);
		}
		for (unsigned int i = 0; i < BLOCK; i++)
			if (atomic_load(&data[pfn + i]) != id + r * 8 + 8)
				atomic_fetch_add(&lost, 1);
		pthread_mutex_lock(&lock[zone_of(pfn)]);
		taken[b] = 0;
		ebb_map_set(&map, pfn, BLOCK);
		pthread_mutex_unlock(&lock[zone_of(pfn)]);
	}
	atomic_fetch_add(&done, 1);
	return NULL;
}

static void *host(void *arg)
{
	(void)arg;
	while (atomic_load(&done) < GUESTS) {
		for (unsigned long p = 0; p < PFNS; p++) {
			unsigned int free = 0;

			if (!ebb_map_any(&map, p, 1))
				continue;
			if (!atomic_compare_exchange_strong(&guarded[p], &free, 1))
				continue;
			if (ebb_map_any(&map, p, 1)) {
				atomic_store(&data[p], 0);
				atomic_fetch_add(&discards, 1);
			} else {
				atomic_fetch_add(&saved, 1);
			}
			atomic_store(&guarded[p], 0);
		}
	}
	return NULL;
}

int main(void)
{
	pthread_t t[GUESTS + 1];

	ebb_map_set(&map, 0, PFNS);
	pthread_create(&t[GUESTS], NULL, host, NULL);
	for (size_t i = 0; i < GUESTS; i++)
		pthread_create(&t[i], NULL, guest, (void *)i);
	for (int i = 0; i <= GUESTS; i++)
		pthread_join(t[i], NULL);
	if (atomic_load(&lost) || ebb_map_count(&map, 0, PFNS) != PFNS) {
		fprintf(stderr, "race_test: %u lost, %lu of %lu set\n", atomic_load(&lost),
			ebb_map_count(&map, 0, PFNS), PFNS);
		return 1;
	}
	printf("race_test: ok, %u discards, %u saved by the second look\n",
	       atomic_load(&discards), atomic_load(&saved));
	return 0;
}
