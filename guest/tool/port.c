// SPDX-License-Identifier: GPL-2.0
/*
 * The virtio-serial port.  Writing never blocks: what the host does not take is
 * queued, up to QUEUE bytes.  Beyond that events are dropped (and the next
 * answer tells how many) and no further command is read until the host reads.
 */
#include "tool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PORT_NAME	"ebb.tool"
#define QUEUE		(8 * OUT_MAX)

static char queue[QUEUE];
static size_t queued;
static int port = -1;

/* udev would make /dev/virtio-ports/NAME; an initramfs has sysfs only. */
static bool port_path(char *path, size_t len)
{
	DIR *d = opendir("/sys/class/virtio-ports");
	struct dirent *e;
	bool found = false;

	while (d && !found && (e = readdir(d))) {
		char file[300], name[64] = "";
		FILE *f;

		snprintf(file, sizeof(file), "/sys/class/virtio-ports/%s/name", e->d_name);
		f = fopen(file, "re");
		if (!f)
			continue;
		if (fgets(name, sizeof(name), f))
			name[strcspn(name, "\n")] = 0;
		fclose(f);
		found = !strcmp(name, PORT_NAME);
		if (found)
			snprintf(path, len, "/dev/%s", e->d_name);
	}
	if (d)
		closedir(d);
	return found;
}

int port_open(void)
{
	char path[300] = "/dev/virtio-ports/" PORT_NAME;

	port = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
	if (port < 0 && port_path(path, sizeof(path)))
		port = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
	return port;
}

void port_flush(void)
{
	while (queued) {
		ssize_t n = write(port, queue, queued);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return;
		queued -= (size_t)n;
		memmove(queue, queue + n, queued);
	}
}

/* Queues a line; one that does not fit is dropped. */
void port_send(const char *line, size_t len)
{
	if (queued + len + 1 > sizeof(queue))
		port_flush();
	if (queued + len + 1 > sizeof(queue))
		return;
	memcpy(queue + queued, line, len);
	queued += len;
	queue[queued++] = '\n';
	port_flush();
}

bool port_pending(void)
{
	return queued > 0;
}

bool port_congested(void)
{
	return queued > sizeof(queue) / 2;
}

/* The host's end was closed: nobody waits for what is queued. */
void port_reset(void)
{
	queued = 0;
}
