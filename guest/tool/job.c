// SPDX-License-Identifier: GPL-2.0
/*
 * Jobs: a child process each, with a name.
 *
 * A child reports through a socketpair, one message a report: a tag ('p'
 * progress, 'r' ready, 'R' result, 'e' error) and a fragment of JSON.  Counters
 * live in a page shared with the child, so `stat` never waits for it.  A verb
 * that may block is a nameless job, a task: its answer is its result.
 * `poke` sends a job SIGUSR1: what that means is the job's own affair.
 * A child is in a process group of its own and is killed with all its children.
 */
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define JOBS_MAX	48
#define WAITERS_MAX	4

enum state { FREE, RUNNING, ENDED };
static const char *const verdicts[] = { "done", "failed", "killed", "stopped" };
enum verdict { DONE, FAILED, KILLED, STOPPED };

struct waiter {
	u64 id;
	bool used;
	bool until_ready;
};

struct job {
	enum state state;
	enum verdict verdict;
	char name[NAME_MAX_LEN + 1];	/* empty: a task */
	char kind[16];
	pid_t pid;
	int fd;
	bool ready;
	bool stopping;
	int code;			/* exit code, or signal if killed */
	u64 task_id;			/* the command that a task answers */
	u64 order;			/* when it started */
	struct waiter waiter[WAITERS_MAX];
	char result[FRAGMENT_MAX];
};

static struct job jobs[JOBS_MAX];
static struct job_stats *stats;		/* shared, one per slot */

static const struct work tasks[] = {
	{ "write", task_write },
	{ "drop", task_drop },
	{ "compact", task_compact },
	{ "modprobe", task_modprobe },
	{ "swapon", task_swapon },
	{ "kexecload", task_kexecload },
	{ "sh", task_sh },
};

void jobs_init(void)
{
	stats = mmap(NULL, sizeof(*stats) * JOBS_MAX, PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (stats == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
}

/* In the child: one report.  One that is too long is cut to nothing. */
void job_report(struct job_env *e, char tag, struct json *body)
{
	char msg[FRAGMENT_MAX] = { tag, 0 };

	if (json_end(body) && body->len < sizeof(msg) - 1)
		memcpy(msg + 1, body->buf, body->len + 1);
	while (send(e->fd, msg, strlen(msg), MSG_NOSIGNAL) < 0 && errno == EINTR)
		;
}

static struct job *job_named(const char *name)
{
	for (int i = 0; i < JOBS_MAX; i++)
		if (jobs[i].state != FREE && *jobs[i].name && !strcmp(jobs[i].name, name))
			return &jobs[i];
	return NULL;
}

/* A free slot, else that of the job that ended longest ago. */
static struct job *job_slot(void)
{
	struct job *old = NULL;

	for (int i = 0; i < JOBS_MAX; i++) {
		if (jobs[i].state == FREE)
			return &jobs[i];
		if (jobs[i].state == ENDED && (!old || jobs[i].order < old->order))
			old = &jobs[i];
	}
	return old;
}

static void child(const struct work *w, struct cmd *c, int fd, struct job_stats *s)
{
	struct job_env e = { .stats = s, .fd = fd };
	sigset_t none;

	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	write_file("/proc/self/oom_score_adj", cmd_str(c, "oom", "0"));
	_exit(w->run(&e, c));
}

static const char *job_start(const struct work *w, const char *name, struct cmd *c)
{
	static u64 order;
	struct job *j = *name ? job_named(name) : NULL;
	int sv[2];
	pid_t pid;

	if (j && j->state == RUNNING)
		return "a job of this name is running";
	if (!j)
		j = job_slot();
	if (!j)
		return "too many jobs";
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) < 0)
		return "no socket";
	memset(&stats[j - jobs], 0, sizeof(*stats));
	pid = fork();
	if (!pid) {
		close(sv[0]);
		child(w, c, sv[1], &stats[j - jobs]);
	}
	close(sv[1]);
	if (pid < 0) {
		close(sv[0]);
		return "cannot fork";
	}
	setpgid(pid, pid);
	fcntl(sv[0], F_SETFL, O_NONBLOCK);
	memset(j, 0, sizeof(*j));
	j->state = RUNNING;
	j->pid = pid;
	j->fd = sv[0];
	j->task_id = c->id;
	j->order = ++order;
	snprintf(j->name, sizeof(j->name), "%s", name);
	snprintf(j->kind, sizeof(j->kind), "%s", w->kind);
	return NULL;
}

static void describe(const struct job *j, struct json *out)
{
	const struct job_stats *s = &stats[j - jobs];

	json_text(out, "job", j->name);
	json_text(out, "kind", j->kind);
	json_text(out, "state", j->state == RUNNING ? "running" : verdicts[j->verdict]);
	json_bool(out, "ready", j->ready);
	if (j->state == ENDED)
		json_i64(out, "code", j->code);
	json_u64(out, "cycles", s->cycles);
	json_u64(out, "pages", s->pages);
	json_u64(out, "checks", s->checks);
	json_u64(out, "errors", s->errors);
	json_u64(out, "bytes", s->bytes);
	json_u64(out, "last_ns", s->last_ns);
	json_u64(out, "max_ns", s->max_ns);
	json_u64(out, "total_ns", s->total_ns);
	json_fragment(out, j->result);
}

static void send_object(struct json *j)
{
	char line[OUT_MAX + 2];

	if (json_end(j))
		port_send(line, (size_t)snprintf(line, sizeof(line), "{%s}", j->buf));
}

static void answer_waiters(struct job *j)
{
	static struct json out;

	for (int i = 0; i < WAITERS_MAX; i++) {
		struct waiter *w = &j->waiter[i];

		if (!w->used || (j->state == RUNNING && !(w->until_ready && j->ready)))
			continue;
		w->used = false;
		json_start(&out);
		json_u64(&out, "id", w->id);
		json_bool(&out, "ok", true);
		describe(j, &out);
		send_object(&out);
	}
}

static const char *add_waiter(struct job *j, u64 id, bool until_ready)
{
	for (int i = 0; i < WAITERS_MAX; i++) {
		if (j->waiter[i].used)
			continue;
		j->waiter[i] = (struct waiter){ .id = id, .used = true, .until_ready = until_ready };
		answer_waiters(j);
		return NULL;
	}
	return "too many waiters";
}

static const char *start(struct cmd *c, struct json *out)
{
	const char *name = cmd_str(c, "job", "");
	const char *kind = cmd_str(c, "kind", "");
	const struct work *w = work_find(kind);
	const char *why;

	if (!*name || strlen(name) > NAME_MAX_LEN)
		return "job= needs a name of at most 32 characters";
	if (!w)
		return "no such kind of work";
	why = job_start(w, name, c);
	if (!why)
		json_text(out, "job", name);
	return why;
}

static const char *on_job(struct cmd *c, struct json *out, bool *deferred)
{
	struct job *j = job_named(cmd_str(c, "job", ""));
	const char *until = cmd_str(c, "until", "end");

	if (cmd_leftover(c))
		return "unknown argument";
	if (!j)
		return "no such job";
	if (!strcmp(c->verb, "stat")) {
		describe(j, out);
		return NULL;
	}
	if (!strcmp(c->verb, "poke")) {
		if (j->state == RUNNING)
			kill(j->pid, SIGUSR1);
		return NULL;
	}
	if (!strcmp(c->verb, "stop") && j->state == RUNNING) {
		j->stopping = true;
		kill(-j->pid, SIGKILL);
	}
	*deferred = true;
	return add_waiter(j, c->id, !strcmp(until, "ready") && !strcmp(c->verb, "wait"));
}

static void refuse(struct json *out, const char *why)
{
	json_start(out);
	json_text(out, "error", why);
}

/* Whether the verb is ours.  `out` gets the answer's fields, or only `error`. */
bool job_command(struct cmd *c, struct json *out, bool *deferred)
{
	const char *why = NULL;

	if (!strcmp(c->verb, "start")) {
		why = start(c, out);
	} else if (!strcmp(c->verb, "stop") || !strcmp(c->verb, "stat") ||
		   !strcmp(c->verb, "poke") || !strcmp(c->verb, "wait")) {
		why = on_job(c, out, deferred);
	} else {
		const struct work *w = NULL;

		for (size_t i = 0; i < sizeof(tasks) / sizeof(*tasks); i++)
			if (!strcmp(c->verb, tasks[i].kind))
				w = &tasks[i];
		if (!w)
			return false;
		*deferred = true;
		why = job_start(w, "", c);
	}
	if (why) {
		*deferred = false;
		refuse(out, why);
	}
	return true;
}

static void event(const struct job *j, const char *name, const char *fragment)
{
	static struct json out;

	if (port_congested())
		return;
	json_start(&out);
	json_text(&out, "event", name);
	json_text(&out, "job", j->name);
	json_fragment(&out, fragment);
	send_object(&out);
}

static void take_report(struct job *j, const char *msg)
{
	const char *name = "progress";

	switch (msg[0]) {
	case 'r':
		j->ready = true;
		name = "ready";
		break;
	case 'R':
		snprintf(j->result, sizeof(j->result), "%s", msg + 1);
		return;
	case 'e':
		name = "error";
		if (!*j->result)
			snprintf(j->result, sizeof(j->result), "%s", msg + 1);
		break;
	}
	if (*j->name)
		event(j, name, msg + 1);
	answer_waiters(j);
}

static void drain(struct job *j)
{
	char msg[FRAGMENT_MAX];
	ssize_t n;

	while (j->fd >= 0) {
		n = recv(j->fd, msg, sizeof(msg) - 1, 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0) {
			close(j->fd);
			j->fd = -1;
		}
		if (n <= 0)
			return;
		msg[n] = 0;
		take_report(j, msg);
	}
}

static void answer_task(struct job *j)
{
	static struct json out;

	json_start(&out);
	json_u64(&out, "id", j->task_id);
	json_bool(&out, "ok", j->verdict == DONE);
	if (j->verdict != DONE && !strstr(j->result, "\"error\":"))
		json_text(&out, "error", verdicts[j->verdict]);
	json_fragment(&out, j->result);
	send_object(&out);
	j->state = FREE;
}

static void end(struct job *j, int status)
{
	static struct json out;

	drain(j);
	if (j->fd >= 0)
		close(j->fd);
	j->fd = -1;
	kill(-j->pid, SIGKILL);		/* grandchildren */
	j->state = ENDED;
	j->code = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
	if (j->stopping)
		j->verdict = STOPPED;
	else if (WIFSIGNALED(status))
		j->verdict = KILLED;
	else
		j->verdict = j->code ? FAILED : DONE;
	if (!*j->name) {
		answer_task(j);
		return;
	}
	json_start(&out);
	json_text(&out, "state", verdicts[j->verdict]);
	json_i64(&out, "code", j->code);
	event(j, "exit", out.buf);
	answer_waiters(j);
}

void jobs_reap(void)
{
	int status;
	pid_t pid;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
		for (int i = 0; i < JOBS_MAX; i++)
			if (jobs[i].state == RUNNING && jobs[i].pid == pid)
				end(&jobs[i], status);
}

int jobs_poll_fds(void *pollfds, int max)
{
	struct pollfd *p = pollfds;
	int n = 0;

	for (int i = 0; i < JOBS_MAX && n < max; i++)
		if (jobs[i].state == RUNNING && jobs[i].fd >= 0)
			p[n++] = (struct pollfd){ .fd = jobs[i].fd, .events = POLLIN };
	return n;
}

void jobs_poll(void)
{
	for (int i = 0; i < JOBS_MAX; i++)
		if (jobs[i].state == RUNNING)
			drain(&jobs[i]);
}
