// SPDX-License-Identifier: GPL-2.0
/*
 * chase  size= [steps=]: how long memory makes a program wait.  A walk over all
 * cache lines of `size`, each telling where the next is, in an order that no
 * prefetcher guesses; `steps` of it are one sample.  When the job is poked it
 * tells the samples since the last time (median, 99th percentile) and begins anew.
 */
#include "tool.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define LINE_WORDS	(64 / sizeof(u64))
#define SAMPLES_MAX	(1U << 20)

/* One cycle through all lines (Sattolo). */
static void link_lines(u64 *p, u64 lines)
{
	u64 rng = 1;

	for (u64 i = 0; i < lines; i++)
		p[i * LINE_WORDS] = i;
	for (u64 i = lines - 1; i > 0; i--) {
		u64 j = rng_next(&rng) % i;
		u64 t = p[i * LINE_WORDS];

		p[i * LINE_WORDS] = p[j * LINE_WORDS];
		p[j * LINE_WORDS] = t;
	}
}

static void tell(struct job_env *e, u32 *ns, u32 *spare, size_t n)
{
	static struct json out;

	json_start(&out);
	json_u64(&out, "samples", n);
	if (n && !sort_u32(ns, spare, n)) {
		json_u64(&out, "p50_ns", ns[n / 2]);
		json_u64(&out, "p99_ns", ns[n - 1 - n / 100]);
		json_u64(&out, "max_ns", ns[n - 1]);
	}
	job_report(e, 'p', &out);
}

int work_chase(struct job_env *e, struct cmd *c)
{
	static struct json out;
	static u32 ns[SAMPLES_MAX], spare[SAMPLES_MAX];
	u64 size = cmd_u64(c, "size", 0) & ~(PAGE - 1);
	u64 steps = cmd_u64(c, "steps", 2048), at = 0;
	struct timespec now = { 0, 0 };
	sigset_t poke;
	size_t n = 0;
	u64 *p;

	if (size < 2 * PAGE || size > 1ULL << 40)
		c->bad = "size";
	if (!steps)
		c->bad = "steps";
	if (!args_ok(e, c))
		return 1;
	sigemptyset(&poke);
	sigaddset(&poke, SIGUSR1);
	sigprocmask(SIG_BLOCK, &poke, NULL);
	p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return fail(e, "mmap failed");
	link_lines(p, size / 64);
	e->stats->bytes = size;
	json_start(&out);
	job_report(e, 'r', &out);
	for (;;) {
		u64 t = now_ns();

		for (u64 i = 0; i < steps; i++)
			at = p[at * LINE_WORDS];
		/* Used, so that the walk is not left out. */
		__asm__ volatile("" : : "r"(at));
		t = now_ns() - t;
		if (n < SAMPLES_MAX)
			ns[n++] = t > UINT32_MAX ? UINT32_MAX : (u32)t;
		e->stats->cycles++;
		if (sigtimedwait(&poke, NULL, &now) == SIGUSR1) {
			tell(e, ns, spare, n);
			n = 0;
		}
	}
}
