// SPDX-License-Identifier: GPL-2.0
/*
 * pipes  size=: kernel memory that cannot be moved, in single pages, held in
 * pipes of 64 KiB until the job is stopped.
 */
#include "tool.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define PIPE_SIZE	(64u << 10)

int work_pipes(struct job_env *e, struct cmd *c)
{
	static const char zeroes[PIPE_SIZE];
	static struct json out;
	u64 size = cmd_u64(c, "size", 0);
	int ends[2];

	if (!size || size % PIPE_SIZE)
		c->bad = "size";
	if (!args_ok(e, c))
		return 1;
	for (u64 done = 0; done < size; done += PIPE_SIZE) {
		if (pipe(ends) || write(ends[1], zeroes, PIPE_SIZE) != PIPE_SIZE)
			return fail(e, strerror(errno));
		close(ends[1]);
		e->stats->bytes = done + PIPE_SIZE;
	}
	json_start(&out);
	job_report(e, 'r', &out);
	for (;;)
		pause();
}
