// SPDX-License-Identifier: GPL-2.0
/*
 * pieces  size= [piece= of=]: memory in small pages.  When the job is poked, one
 * piece out of `of` is freed, each with a call of its own; the others stay until
 * it is stopped.  `bytes` is what it holds, `last_ns` the time of the free.
 */
#include "tool.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int work_pieces(struct job_env *e, struct cmd *c)
{
	static struct json out;
	u64 piece = cmd_u64(c, "piece", PAGE) & ~(PAGE - 1);
	u64 step = piece * cmd_u64(c, "of", 2);
	u64 size = cmd_u64(c, "size", 0), t;
	sigset_t poke;
	int signal;
	char *p;

	if (!step || !size || size % step)
		c->bad = "size";
	if (!args_ok(e, c))
		return 1;
	sigemptyset(&poke);
	sigaddset(&poke, SIGUSR1);
	sigprocmask(SIG_BLOCK, &poke, NULL);
	p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED || madvise(p, size, MADV_NOHUGEPAGE))
		return fail(e, strerror(errno));
	for (u64 i = 0; i < size; i += PAGE)
		page_random((u64 *)(p + i), 1, i / PAGE);
	e->stats->bytes = size;
	json_start(&out);
	job_report(e, 'r', &out);
	sigwait(&poke, &signal);
	t = now_ns();
	for (u64 i = 0; i < size; i += step)
		if (madvise(p + i, piece, MADV_DONTNEED))
			return fail(e, strerror(errno));
	e->stats->last_ns = now_ns() - t;
	e->stats->bytes = size - size / step * piece;
	json_start(&out);
	json_u64(&out, "freed_bytes", size / step * piece);
	job_report(e, 'p', &out);
	for (;;)
		pause();
}
