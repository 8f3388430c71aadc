// SPDX-License-Identifier: GPL-2.0
/*
 * verify size= seconds= [seed= threads= stop=]: is this memory still ours?
 *
 * Every thread owns regions of sealed pages (page.c): small anonymous pages,
 * transparent huge pages, tmpfs files.  It allocates, rewrites, discards, frees
 * and moves them at random up to a budget that swings, and knows the generation
 * of each page.  A page is checked before it is rewritten, discarded or freed,
 * and all are checked every few seconds.  At times it forks: the child checks
 * the copies, rewrites its own and checks those, while the parent goes on.
 * It ends after its time or when it is poked, with a check of everything.
 */
#include "tool.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define REGION_PAGES	512U		/* at most; a THP has just as many */
#define THREADS_MAX	64
#define REPORTS_MAX	8
#define FULL_CHECK_NS	5000000000ULL

enum kind { SMALL, THP, FILES, KINDS };
static const char *const kind_names[] = { "small", "thp", "tmpfs" };

struct region {
	u64 *map;
	u32 pages;
	enum kind kind;
	u64 first;			/* index of its first page */
	u32 generation[REGION_PAGES];	/* 0: reads as zeros */
};

struct worker {
	struct job_env *env;
	pthread_t thread;
	u64 seed, rng, serial, end, budget, target, used, next_full;
	bool stop_on_error;
	struct region *regions;
	u32 nregions, max_regions;
};

static atomic_bool stopping;
static atomic_bool poked;

static void complain(struct worker *w, const struct region *r, u32 page, const char *what,
		     u64 expected, u64 found)
{
	struct json *out;

	if (__atomic_add_fetch(&w->env->stats->errors, 1, __ATOMIC_RELAXED) <= REPORTS_MAX) {
		out = malloc(sizeof(*out));
		if (!out)
			return;
		json_start(out);
		json_text(out, "what", what);
		json_text(out, "region", kind_names[r->kind]);
		json_u64(out, "index", r->first + page);
		json_u64(out, "page", page);
		json_u64(out, "expected", expected);
		json_u64(out, "found", found);
		job_report(w->env, 'e', out);
		free(out);
	}
	if (w->stop_on_error)
		atomic_store(&stopping, true);
}

static void check_pages(struct worker *w, const struct region *r, u32 from, u32 n)
{
	u64 expected = 0, found = 0;

	for (u32 i = from; i < from + n; i++) {
		const char *what = page_check(r->map + i * PAGE_WORDS, w->seed, r->first + i,
					      r->generation[i], &expected, &found);

		if (what)
			complain(w, r, i, what, expected, found);
	}
	__atomic_add_fetch(&w->env->stats->checks, n, __ATOMIC_RELAXED);
}

static void write_pages(struct worker *w, struct region *r, u32 from, u32 n)
{
	for (u32 i = from; i < from + n; i++)
		page_seal(r->map + i * PAGE_WORDS, w->seed, r->first + i, ++r->generation[i]);
	__atomic_add_fetch(&w->env->stats->pages, n, __ATOMIC_RELAXED);
}

static void *map_thp(void)
{
	char *p = mmap(NULL, 2 * HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *at;

	if (p == MAP_FAILED)
		return p;
	at = (char *)(((uintptr_t)p + HUGE - 1) & ~(HUGE - 1));
	if (at > p)
		munmap(p, (size_t)(at - p));
	if (p + HUGE > at)
		munmap(at + HUGE, (size_t)(p + HUGE - at));
	madvise(at, HUGE, MADV_HUGEPAGE);
	return at;
}

static void *map_tmpfs(size_t size)
{
	char path[] = "/tmp/verify.XXXXXX";
	int fd = mkostemp(path, O_CLOEXEC);
	void *p = MAP_FAILED;

	if (fd < 0)
		return p;
	unlink(path);
	if (!ftruncate(fd, (off_t)size))
		p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	return p;
}

static void *map_small(size_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p != MAP_FAILED)
		madvise(p, size, MADV_NOHUGEPAGE);
	return p;
}

static void allocate(struct worker *w)
{
	struct region *r = &w->regions[w->nregions];
	void *p;

	if (w->nregions == w->max_regions)
		return;
	memset(r, 0, sizeof(*r));
	r->kind = (enum kind)(rng_next(&w->rng) % KINDS);
	r->pages = r->kind == THP ? REGION_PAGES : 16 + (u32)(rng_next(&w->rng) % 241);
	r->first = w->serial;
	w->serial += REGION_PAGES;
	switch (r->kind) {
	case THP:
		p = map_thp();
		break;
	case FILES:
		p = map_tmpfs(r->pages * PAGE);
		break;
	default:
		p = map_small(r->pages * PAGE);
	}
	if (p == MAP_FAILED)
		return;
	r->map = p;
	w->nregions++;
	w->used += r->pages * PAGE;
	__atomic_add_fetch(&w->env->stats->bytes, r->pages * PAGE, __ATOMIC_RELAXED);
	write_pages(w, r, 0, r->pages);
}

static void release(struct worker *w, u32 which)
{
	struct region *r = &w->regions[which];

	check_pages(w, r, 0, r->pages);
	munmap(r->map, r->pages * PAGE);
	w->used -= r->pages * PAGE;
	__atomic_sub_fetch(&w->env->stats->bytes, r->pages * PAGE, __ATOMIC_RELAXED);
	*r = w->regions[--w->nregions];
}

static void discard(struct worker *w, struct region *r, u32 from, u32 n)
{
	check_pages(w, r, from, n);
	if (madvise(r->map + from * PAGE_WORDS, n * PAGE,
		    r->kind == FILES ? MADV_REMOVE : MADV_DONTNEED))
		return;
	memset(&r->generation[from], 0, n * sizeof(r->generation[0]));
}

/* A page through a pipe and back: pages change hands inside the kernel. */
static void through_pipe(struct worker *w, struct region *r, u32 i)
{
	u64 *page = r->map + i * PAGE_WORDS;
	int fd[2];

	if (pipe2(fd, O_CLOEXEC))
		return;
	check_pages(w, r, i, 1);
	if (write(fd[1], page, PAGE) == (ssize_t)PAGE) {
		memset(page, 0x5a, PAGE);
		if (read(fd[0], page, PAGE) != (ssize_t)PAGE)
			complain(w, r, i, "pipe", PAGE, 0);
		check_pages(w, r, i, 1);
	}
	close(fd[0]);
	close(fd[1]);
}

static void full_check(struct worker *w)
{
	for (u32 i = 0; i < w->nregions && !atomic_load(&stopping); i++)
		check_pages(w, &w->regions[i], 0, w->regions[i].pages);
	w->next_full = now_ns() + FULL_CHECK_NS;
}

/* Copy on write: in the child everything must look as at the fork, and what the
 * child writes must stay its own. Shared files are left to the parent. */
static void cow_child(struct worker *w)
{
	for (u32 i = 0; i < w->nregions && i < 16; i++) {
		struct region *r = &w->regions[rng_next(&w->rng) % w->nregions];
		u32 n = r->pages < 32 ? r->pages : 32;

		if (r->kind == FILES)
			continue;
		check_pages(w, r, 0, n);
		write_pages(w, r, 0, n);
		check_pages(w, r, 0, n);
	}
	_exit(0);
}

static void cow(struct worker *w)
{
	pid_t pid = fork();

	if (!pid)
		cow_child(w);
	if (pid < 0)
		return;
	for (u32 i = 0; i < w->nregions && i < 16; i++) {
		struct region *r = &w->regions[i];

		check_pages(w, r, 0, 8);
		write_pages(w, r, 0, 8);
	}
	waitpid(pid, NULL, 0);
}

static void step(struct worker *w)
{
	u64 dice = rng_next(&w->rng);
	u32 op = dice % 100;
	struct region *r;
	u32 which, from, n;

	if (!(dice >> 32 & 127))
		w->target = rng_next(&w->rng) % w->budget;
	if (!w->nregions || (op < 40 && w->used < w->target)) {
		allocate(w);
		return;
	}
	which = (u32)(rng_next(&w->rng) % w->nregions);
	r = &w->regions[which];
	from = (u32)(rng_next(&w->rng) % r->pages);
	n = 1 + (u32)(rng_next(&w->rng) % (r->pages - from));
	if (op < 40) {
		release(w, which);
	} else if (op < 65) {
		check_pages(w, r, from, n);
		write_pages(w, r, from, n);
	} else if (op < 80) {
		check_pages(w, r, from, n);
	} else if (op < 90) {
		discard(w, r, from, n);
	} else if (op < 99) {
		through_pipe(w, r, from);
	} else {
		cow(w);
	}
}

static void on_poke(int signal)
{
	(void)signal;
	atomic_store(&poked, true);
}

static void *worker(void *arg)
{
	struct worker *w = arg;

	while (!atomic_load(&stopping) && !atomic_load(&poked) && now_ns() < w->end) {
		step(w);
		__atomic_add_fetch(&w->env->stats->cycles, 1, __ATOMIC_RELAXED);
		if (now_ns() >= w->next_full)
			full_check(w);
	}
	full_check(w);
	while (w->nregions)
		release(w, 0);
	return NULL;
}

static bool worker_start(struct worker *w, u64 size)
{
	w->budget = size;
	w->target = size / 2;
	w->next_full = now_ns() + FULL_CHECK_NS;
	/* A region has 136 pages on average for two kinds of three. */
	w->max_regions = (u32)(size / (128 * PAGE)) + 16;
	w->regions = mmap(NULL, w->max_regions * sizeof(*w->regions), PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return w->regions != MAP_FAILED && !pthread_create(&w->thread, NULL, worker, w);
}

int work_verify(struct job_env *e, struct cmd *c)
{
	static struct worker workers[THREADS_MAX];
	static struct json out;
	u64 size = cmd_u64(c, "size", 64 << 20);
	u64 seconds = cmd_u64(c, "seconds", 10);
	u64 seed = cmd_u64(c, "seed", 1);
	u64 threads = cmd_u64(c, "threads", 1);
	u64 stop = cmd_u64(c, "stop", 1);
	u64 end = now_ns() + seconds * 1000000000ULL;

	if (!threads || threads > THREADS_MAX)
		c->bad = "threads";
	if (size < (threads << 22) || size > 1ULL << 46)
		c->bad = "size";
	if (!args_ok(e, c))
		return 1;
	signal(SIGUSR1, on_poke);
	for (u64 i = 0; i < threads; i++) {
		struct worker *w = &workers[i];

		*w = (struct worker){ .env = e, .seed = mix64(seed ^ i << 32), .end = end,
				      .rng = mix64(seed + i), .serial = i << 48,
				      .stop_on_error = stop };
		if (!worker_start(w, size / threads))
			return fail(e, "cannot start a thread");
	}
	json_start(&out);
	job_report(e, 'r', &out);
	for (u64 i = 0; i < threads; i++)
		pthread_join(workers[i].thread, NULL);
	return e->stats->errors != 0;
}
