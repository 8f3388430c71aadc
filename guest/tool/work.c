// SPDX-License-Identifier: GPL-2.0
/*
 * Kinds of work.  Each runs in a child, reads all of its arguments first, and
 * says 'ready' when it is in the state that its name promises.
 *
 *   hold        size= [pattern= share= cluster= seed= common= huge=]
 *   cycle       size= [base= period_ms= hold_ms= count=] + as hold
 *   memhog      size=
 *   faultloop   size= [seconds= | iterations=] [huge=] [period_ms=]
 *   read        dev= size= [offset=]: into the page cache; tells the sum
 *   sort, verify, pieces, pipes, chase: see their files
 *
 * What is held is compared with what was written whenever the job is poked.
 */
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

u64 now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (u64)t.tv_sec * 1000000000ULL + (u64)t.tv_nsec;
}

static void sleep_ns(u64 ns)
{
	struct timespec t = { (time_t)(ns / 1000000000ULL), (long)(ns % 1000000000ULL) };

	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

/* Reports an error; returns the exit code to end with. */
int fail(struct job_env *e, const char *what)
{
	static struct json out;

	json_start(&out);
	json_text(&out, "error", what);
	job_report(e, 'e', &out);
	return 1;
}

bool args_ok(struct job_env *e, struct cmd *c)
{
	const char *left;
	char text[128];

	cmd_str(c, "oom", NULL);
	left = cmd_leftover(c);
	if (!c->bad && !left)
		return true;
	snprintf(text, sizeof(text), "%s argument: %.64s", c->bad ? "bad" : "unknown",
		 c->bad ? c->bad : left);
	fail(e, text);
	return false;
}

static void map_advise(void *p, size_t size, u64 huge)
{
	if (huge <= 1)
		madvise(p, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

static u64 *map_pages(u64 size, u64 huge)
{
	/* NORESERVE: more than there is must reach the OOM killer, not an errno. */
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED)
		return NULL;
	map_advise(p, size, huge);
	return p;
}

/* How a job's memory looks; sets c->bad on nonsense. */
static struct fill fill_args(struct cmd *c)
{
	struct fill f = {
		.pattern = pattern_named(cmd_str(c, "pattern", "random")),
		.share = cmd_fraction(c, "share", 1.0),
		.cluster = cmd_u64(c, "cluster", HUGE) / PAGE,
		.seed = cmd_u64(c, "seed", 1),
		.common = cmd_u64(c, "common", 0),
	};

	if (f.pattern == PAT_BAD)
		c->bad = "pattern";
	if (!f.cluster)
		c->bad = "cluster";
	return f;
}

/* Memory size arguments: at least a page, whole pages, no overflow. */
static u64 size_arg(struct cmd *c, const char *key, u64 def)
{
	u64 v = cmd_u64(c, key, def) & ~(PAGE - 1);

	if ((!v && !def) || v > 1ULL << 46)
		c->bad = key;
	return v;
}

static void fill_pages(u64 *p, u64 size, const struct fill *f, u64 first)
{
	for (u64 i = 0; i < size / PAGE; i++)
		page_fill(p + i * PAGE_WORDS, f, first + i);
}

static void timed(struct job_stats *s, u64 ns)
{
	s->last_ns = ns;
	s->total_ns += ns;
	if (ns > s->max_ns)
		s->max_ns = ns;
}

/* Whether all of it is what fill_pages wrote. */
static void check_held(struct job_env *e, const u64 *p, u64 size, const struct fill *f)
{
	static struct json out;
	static u64 want[PAGE_WORDS];

	for (u64 i = 0; i < size / PAGE; i++) {
		memset(want, 0, PAGE);
		page_fill(want, f, i);
		if (memcmp(want, p + i * PAGE_WORDS, PAGE))
			e->stats->errors++;
		e->stats->checks++;
	}
	json_start(&out);
	json_u64(&out, "checks", e->stats->checks);
	json_u64(&out, "errors", e->stats->errors);
	job_report(e, 'p', &out);
}

static int work_hold(struct job_env *e, struct cmd *c)
{
	static struct json out;
	struct fill f = fill_args(c);
	u64 size = size_arg(c, "size", 0);
	u64 huge = cmd_u64(c, "huge", 2);
	u64 t = now_ns();
	sigset_t poke;
	int signal;
	u64 *p;

	if (!args_ok(e, c))
		return 1;
	sigemptyset(&poke);
	sigaddset(&poke, SIGUSR1);
	sigprocmask(SIG_BLOCK, &poke, NULL);
	p = map_pages(size, huge);
	if (!p)
		return fail(e, "mmap failed");
	fill_pages(p, size, &f, 0);
	timed(e->stats, now_ns() - t);
	e->stats->bytes = size;
	e->stats->pages = size / PAGE;
	json_start(&out);
	json_u64(&out, "fill_ns", e->stats->last_ns);
	job_report(e, 'r', &out);
	for (;;)
		if (!sigwait(&poke, &signal))
			check_held(e, p, size, &f);
}

struct cycle {
	u64 size, huge, period, hold, count;
};

static int one_cycle(struct job_env *e, const struct cycle *k, const struct fill *f, u64 n)
{
	static struct json out;
	u64 t = now_ns();
	u64 *p = map_pages(k->size, k->huge);

	if (!p)
		return fail(e, "mmap failed");
	fill_pages(p, k->size, f, (n + 1) << 32);
	timed(e->stats, now_ns() - t);
	e->stats->bytes += k->size;
	e->stats->pages += k->size / PAGE;
	sleep_ns(k->hold);
	munmap(p, k->size);
	e->stats->bytes -= k->size;
	e->stats->cycles = n + 1;
	json_start(&out);
	json_u64(&out, "cycle", n);
	json_u64(&out, "touch_ns", e->stats->last_ns);
	job_report(e, 'p', &out);
	return 0;
}

static int work_cycle(struct job_env *e, struct cmd *c)
{
	static struct json out;
	struct fill f = fill_args(c);
	u64 base = size_arg(c, "base", PAGE);
	struct cycle k = {
		.size = size_arg(c, "size", 0),
		.huge = cmd_u64(c, "huge", 2),
		.period = cmd_u64(c, "period_ms", 1000) * 1000000,
		.hold = cmd_u64(c, "hold_ms", 0) * 1000000,
		.count = cmd_u64(c, "count", UINT64_MAX),
	};
	u64 *held;

	if (!args_ok(e, c))
		return 1;
	held = map_pages(base, k.huge);
	if (!held)
		return fail(e, "mmap failed");
	fill_pages(held, base, &f, 0);
	e->stats->bytes = base;
	json_start(&out);
	job_report(e, 'r', &out);
	for (u64 n = 0, next = now_ns(); n < k.count; n++) {
		u64 now = now_ns();

		if (next > now)
			sleep_ns(next - now);
		next += k.period;
		if (one_cycle(e, &k, &f, n))
			return 1;
	}
	return 0;
}

static int work_memhog(struct job_env *e, struct cmd *c)
{
	static struct json out;
	u64 size = size_arg(c, "size", 0);
	u64 t = now_ns();
	u64 *p;

	if (!args_ok(e, c))
		return 1;
	p = map_pages(size, 2);
	if (!p)
		return fail(e, "mmap failed");
	memset(p, 0xff, size);
	__asm__ volatile("" : : "r"(p) : "memory");
	timed(e->stats, now_ns() - t);
	e->stats->pages = size / PAGE;
	json_start(&out);
	json_double(&out, "seconds", (double)e->stats->total_ns / 1e9);
	job_report(e, 'R', &out);
	return 0;
}

/*
 * will-it-scale's page_fault1: map, touch each page, unmap, again; at once, or
 * when period_ms have passed since it last began.
 */
static int work_faultloop(struct job_env *e, struct cmd *c)
{
	static struct json out;
	u64 size = size_arg(c, "size", 128 << 20);
	u64 iterations = cmd_u64(c, "iterations", UINT64_MAX);
	u64 seconds = cmd_u64(c, "seconds", iterations == UINT64_MAX ? 5 : 1 << 30);
	u64 huge = cmd_u64(c, "huge", 0);
	u64 period = cmd_u64(c, "period_ms", 0) * 1000000ULL;
	u64 end = now_ns() + seconds * 1000000000ULL;

	if (!args_ok(e, c))
		return 1;
	json_start(&out);
	job_report(e, 'r', &out);
	while (e->stats->cycles < iterations && now_ns() < end) {
		u64 t = now_ns(), next = t + period, done;
		volatile char *p = (volatile char *)map_pages(size, huge);

		if (!p)
			return fail(e, "mmap failed");
		for (u64 i = 0; i < size; i += PAGE)
			p[i] = 1;
		munmap((void *)p, size);
		e->stats->pages += size / PAGE;
		e->stats->cycles++;
		done = now_ns();
		timed(e->stats, done - t);
		if (next > done)
			sleep_ns(next - done);
	}
	json_start(&out);
	job_report(e, 'R', &out);
	return 0;
}

static int work_read(struct job_env *e, struct cmd *c)
{
	static struct json out;
	static u64 buf[(256 << 10) / sizeof(u64)];
	const char *dev = cmd_str(c, "dev", "/dev/vda");
	u64 size = size_arg(c, "size", 0);
	u64 offset = cmd_u64(c, "offset", 0);
	u64 t = now_ns(), done = 0, sum = 0;
	int fd;

	if (!args_ok(e, c))
		return 1;
	fd = open(dev, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return fail(e, strerror(errno));
	while (done < size) {
		u64 want = size - done < sizeof(buf) ? size - done : sizeof(buf);
		ssize_t n = pread(fd, buf, want, (off_t)(offset + done));

		if (n < 0)
			return fail(e, strerror(errno));
		if (!n)
			break;
		for (size_t i = 0; i < (size_t)n / sizeof(*buf); i++)
			sum += buf[i];
		done += (u64)n;
		e->stats->bytes = done;
	}
	timed(e->stats, now_ns() - t);
	json_start(&out);
	json_u64(&out, "read_bytes", done);
	json_u64(&out, "sum", sum);
	job_report(e, 'R', &out);
	/* The last close of a block device drops its cache: hold it open. */
	job_report(e, 'r', &out);
	for (;;)
		pause();
}

const struct work *work_find(const char *kind)
{
	static const struct work kinds[] = {
		{ "hold", work_hold },
		{ "cycle", work_cycle },
		{ "memhog", work_memhog },
		{ "faultloop", work_faultloop },
		{ "read", work_read },
		{ "sort", work_sort },
		{ "verify", work_verify },
		{ "pieces", work_pieces },
		{ "pipes", work_pipes },
		{ "chase", work_chase },
	};

	for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
		if (!strcmp(kinds[i].kind, kind))
			return &kinds[i];
	return NULL;
}
