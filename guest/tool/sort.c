// SPDX-License-Identifier: GPL-2.0
/*
 * sort n= [seed=]: makes n 32-bit integers, sorts them (LSD radix, 8 bits a
 * pass, two arrays: 8n bytes), and checks order and sum.
 */
#include "tool.h"

#include <string.h>
#include <sys/mman.h>

/* Sorts v, with as much room in spare; four passes end in v again. */
int sort_u32(u32 *v, u32 *spare, size_t n)
{
	for (int shift = 0; shift < 32; shift += 8) {
		size_t at[256] = { 0 }, sum = 0;
		u32 *t;

		for (size_t i = 0; i < n; i++)
			at[v[i] >> shift & 255]++;
		for (int b = 0; b < 256; b++) {
			size_t count = at[b];

			at[b] = sum;
			sum += count;
		}
		for (size_t i = 0; i < n; i++)
			spare[at[v[i] >> shift & 255]++] = v[i];
		t = v;
		v = spare;
		spare = t;
	}
	return 0;
}

int work_sort(struct job_env *e, struct cmd *c)
{
	static struct json out;
	u64 n = cmd_u64(c, "n", 100000000);
	u64 rng = cmd_u64(c, "seed", 1);
	u64 sum = 0, check = 0, t, wrong = 0;
	u32 *v;

	if (!n || n > 1ULL << 34)
		c->bad = "n";
	if (!args_ok(e, c))
		return 1;
	v = mmap(NULL, n * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (v == MAP_FAILED)
		return fail(e, "mmap failed");
	t = now_ns();
	for (u64 i = 0; i < n; i++)
		sum += v[i] = (u32)rng_next(&rng);
	sort_u32(v, v + n, n);
	for (u64 i = 0; i < n; i++) {
		check += v[i];
		wrong += i && v[i - 1] > v[i];
	}
	e->stats->total_ns = now_ns() - t;
	e->stats->checks = n;
	e->stats->errors = wrong + (check != sum);
	json_start(&out);
	json_text(&out, "algorithm", "radix");
	json_double(&out, "seconds", (double)e->stats->total_ns / 1e9);
	job_report(e, 'R', &out);
	return e->stats->errors != 0;
}
