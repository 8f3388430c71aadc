// SPDX-License-Identifier: GPL-2.0
/*
 * The loop: commands from the port, reports from jobs, deaths of children.
 */
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/utsname.h>
#include <unistd.h>

#define POLL_MAX	64

static char input[IN_MAX];
static size_t input_len;
static bool skipping;		/* the rest of a line that was too long */

static void answer(struct json *body, u64 id, bool ok)
{
	static char line[OUT_MAX + 64];
	int n;

	if (!json_end(body)) {
		json_start(body);
		json_text(body, "error", "the answer is too long");
		ok = false;
	}
	n = snprintf(line, sizeof(line), "{\"id\":%llu,\"ok\":%s%s%s}", (unsigned long long)id,
		     ok ? "true" : "false", body->len ? "," : "", body->buf);
	port_send(line, (size_t)n);
}

static void command(char *line)
{
	static struct json out;
	bool deferred = false;
	const char *why;
	struct cmd c;

	json_start(&out);
	why = cmd_parse(line, &c);
	if (!why && !job_command(&c, &out, &deferred) && !sys_command(&c, &out))
		why = "no such verb";
	if (why) {
		json_start(&out);
		json_text(&out, "error", why);
	}
	if (deferred)
		return;
	why = strncmp(out.buf, "\"error\":", 8) ? NULL : "refused";
	answer(&out, c.id, !why);
	if (!why)
		sys_final(&c);
}

static void take_lines(void)
{
	char *nl;

	while ((nl = memchr(input, '\n', input_len))) {
		size_t len = (size_t)(nl - input) + 1;

		*nl = 0;
		if (!skipping && *input && strlen(input) == len - 1)
			command(input);
		skipping = false;
		input_len -= len;
		memmove(input, nl + 1, input_len);
	}
	if (input_len == sizeof(input)) {
		static struct json out;

		json_start(&out);
		json_text(&out, "error", "the line is too long");
		if (!skipping)
			answer(&out, 0, false);
		skipping = true;
		input_len = 0;
	}
}

static void read_port(int fd)
{
	ssize_t n = read(fd, input + input_len, sizeof(input) - input_len);

	if (n > 0) {
		input_len += (size_t)n;
		take_lines();
	}
}

/* While nobody holds the host's end the port polls as hung up, at once and
 * always: look again ten times a second. */
static bool connected(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, 0) >= 0 && !(p.revents & POLLHUP);
}

static void loop(int fd, int sigfd)
{
	struct pollfd p[POLL_MAX];
	struct signalfd_siginfo si;

	for (;;) {
		bool up = connected(fd);
		int n = 2;

		if (!up) {
			input_len = 0;
			skipping = false;
			port_reset();
		}
		p[0] = (struct pollfd){ .fd = sigfd, .events = POLLIN };
		p[1] = (struct pollfd){ .fd = up ? fd : -1 };
		if (!port_congested())
			p[1].events |= POLLIN;
		if (port_pending())
			p[1].events |= POLLOUT;
		n += jobs_poll_fds(p + n, POLL_MAX - n);
		if (poll(p, (nfds_t)n, up ? -1 : 100) < 0 && errno != EINTR)
			return;
		if (p[1].revents & POLLOUT)
			port_flush();
		if (p[1].revents & POLLIN)
			read_port(fd);
		jobs_poll();
		while (read(sigfd, &si, sizeof(si)) == sizeof(si))
			;
		jobs_reap();
	}
}

static void say_ready(void)
{
	struct utsname u;
	int fd = open("/dev/console", O_WRONLY | O_CLOEXEC | O_NOCTTY);
	char line[256];

	uname(&u);
	snprintf(line, sizeof(line), "\nebb-guest-tool: ready on %s\n", u.release);
	if (fd < 0 || write(fd, line, strlen(line)) < 0)
		fputs(line, stderr);
	if (fd >= 0)
		close(fd);
}

int main(int argc, char **argv)
{
	sigset_t chld;
	int fd, sigfd;

	if (argc == 2 && !strcmp(argv[1], "--self-test"))
		return self_test();
	signal(SIGPIPE, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	write_file("/proc/self/oom_score_adj", "-1000");
	load_boot_modules();
	start_cpus();
	for (int tries = 0; (fd = port_open()) < 0; tries++) {
		if (tries == 100) {
			fprintf(stderr, "ebb-guest-tool: no port\n");
			return 1;
		}
		usleep(20000);
	}
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, NULL);
	sigfd = signalfd(-1, &chld, SFD_NONBLOCK | SFD_CLOEXEC);
	jobs_init();
	mlockall(MCL_CURRENT);
	say_ready();
	loop(fd, sigfd);
	return 1;
}
