// SPDX-License-Identifier: GPL-2.0
/*
 * What the guest says of itself, and its knobs.
 *
 *   at once: ping  echo text=  meminfo  psi  readfile path= [offset=]
 *   tasks:   write path= value=  modprobe name= [params=]  swapon dev= [size=]
 *            drop [what=]  compact  sh cmd=
 *            kexecload kernel= initrd= append= [crash=1]
 *   final:   reboot  poweroff  kexec  sysrq c=
 *
 * /lib/modules/list holds a line per module: its name and what it needs, in
 * the order to load; /lib/modules/boot names those that are loaded at start.
 */
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/kexec.h>
#include <linux/reboot.h>
#include <sys/reboot.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#define READ_MAX	2048
#define SH_OUT		1300	/* fits a fragment, all escaped */

int write_file(const char *path, const char *value)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t n;
	int err;

	if (fd < 0)
		return -errno;
	n = write(fd, value, strlen(value));
	err = n < 0 ? -errno : 0;
	close(fd);
	return err;
}

static ssize_t read_file(const char *path, char *buf, size_t size, u64 offset)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	size_t len = 0;
	ssize_t n = 0;

	if (fd < 0)
		return -errno;
	if (offset && lseek(fd, (off_t)offset, SEEK_SET) < 0)
		n = -errno;
	while (!n && len < size) {
		ssize_t got = read(fd, buf + len, size - len);

		if (got < 0)
			n = -errno;
		if (got <= 0)
			break;
		len += (size_t)got;
	}
	close(fd);
	return n ? n : (ssize_t)len;
}

static const char *path_arg(struct cmd *c)
{
	const char *path = cmd_str(c, "path", "");

	return *path == '/' ? path : NULL;
}

static const char *do_readfile(struct cmd *c, struct json *out)
{
	static char buf[READ_MAX];
	const char *path = path_arg(c);
	u64 offset = cmd_u64(c, "offset", 0);
	ssize_t n;

	if (!path)
		return "path= must be absolute";
	n = read_file(path, buf, sizeof(buf), offset);
	if (n < 0)
		return strerror((int)-n);
	json_str(out, "text", buf, (size_t)n);
	json_bool(out, "more", n == sizeof(buf));
	return NULL;
}

static bool listed(const char *name, size_t len, const char *const *list)
{
	for (; *list; list++)
		if (strlen(*list) == len && !strncmp(*list, name, len))
			return true;
	return false;
}

/* Adds the listed fields of a file of "name[:] value [kB]" lines. */
static void add_fields(struct json *out, const char *path, const char *const *list)
{
	static char buf[16384];
	ssize_t n = read_file(path, buf, sizeof(buf) - 1, 0);
	char *save = NULL;

	buf[n < 0 ? 0 : n] = 0;
	for (char *l = strtok_r(buf, "\n", &save); l; l = strtok_r(NULL, "\n", &save)) {
		size_t len = strcspn(l, ": ");
		char *rest = l + len;
		u64 unit = strstr(rest, " kB") ? 1024 : 1;

		if (!*rest || !listed(l, len, list))
			continue;
		*rest++ = 0;
		json_u64(out, l, strtoull(rest, NULL, 10) * unit);
	}
}

static const char *do_meminfo(struct json *out)
{
	static const char *const meminfo[] = {
		"MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "SwapCached",
		"Active", "Inactive", "AnonPages", "Shmem", "AnonHugePages", "Slab",
		"SReclaimable", "SwapTotal", "SwapFree", "Balloon", NULL };
	static const char *const vmstat[] = {
		"nr_free_pages", "pgalloc_normal", "pgfree", "pgfault", "pgmajfault", "pswpin",
		"pswpout", "oom_kill", "allocstall_normal", "allocstall_movable",
		"allocstall_dma32", "pgscan_direct", "pgsteal_direct", "pgsteal_kswapd",
		"workingset_refault_anon", "workingset_refault_file", "thp_fault_alloc",
		"thp_split_page", "compact_success", "balloon_inflate", "balloon_deflate", NULL };

	add_fields(out, "/proc/meminfo", meminfo);
	add_fields(out, "/proc/vmstat", vmstat);
	return NULL;
}

static const char *do_psi(struct json *out)
{
	char buf[512], key[32], which[8];
	ssize_t n = read_file("/proc/pressure/memory", buf, sizeof(buf) - 1, 0);
	char *save = NULL;
	double a, b, d;
	u64 total;

	if (n < 0)
		return "this guest has no PSI";
	buf[n] = 0;
	for (char *l = strtok_r(buf, "\n", &save); l; l = strtok_r(NULL, "\n", &save)) {
		if (sscanf(l, "%7s avg10=%lf avg60=%lf avg300=%lf total=%lu", which, &a, &b, &d,
			   &total) != 5)
			continue;
		snprintf(key, sizeof(key), "%s_avg10", which);
		json_double(out, key, a);
		snprintf(key, sizeof(key), "%s_avg60", which);
		json_double(out, key, b);
		snprintf(key, sizeof(key), "%s_total_us", which);
		json_u64(out, key, total);
	}
	return NULL;
}

static const char *do_ping(struct json *out)
{
	char id[64] = "";
	struct utsname u;

	uname(&u);
	if (read_file("/proc/sys/kernel/random/boot_id", id, 36, 0) > 0)
		json_text(out, "boot_id", id);
	json_text(out, "kernel", u.release);
	return NULL;
}

/* Whether the verb is ours.  `out` gets the answer's fields, or only `error`. */
bool sys_command(struct cmd *c, struct json *out)
{
	const char *why = NULL;

	if (!strcmp(c->verb, "ping"))
		why = do_ping(out);
	else if (!strcmp(c->verb, "echo"))
		json_text(out, "text", cmd_str(c, "text", ""));
	else if (!strcmp(c->verb, "meminfo"))
		why = do_meminfo(out);
	else if (!strcmp(c->verb, "psi"))
		why = do_psi(out);
	else if (!strcmp(c->verb, "readfile"))
		why = do_readfile(c, out);
	else if (!strcmp(c->verb, "sysrq"))
		cmd_str(c, "c", "");
	else if (strcmp(c->verb, "reboot") && strcmp(c->verb, "poweroff") &&
		 strcmp(c->verb, "kexec"))
		return false;
	if (!why && (c->bad || cmd_leftover(c)))
		why = "bad or unknown argument";
	if (why) {
		json_start(out);
		json_text(out, "error", why);
	}
	return true;
}

/* After the answer has gone out: what does not come back.  Returns whether the
 * verb was one of these. */
bool sys_final(const struct cmd *c)
{
	static const struct { const char *verb; int how; } ends[] = {
		{ "reboot", RB_AUTOBOOT }, { "poweroff", RB_POWER_OFF },
		{ "kexec", LINUX_REBOOT_CMD_KEXEC }, { "sysrq", 0 },
	};
	size_t i = 0;

	while (i < sizeof(ends) / sizeof(*ends) && strcmp(c->verb, ends[i].verb))
		i++;
	if (i == sizeof(ends) / sizeof(*ends))
		return false;
	port_flush();
	usleep(100000);		/* the host takes the answer from the queue */
	if (!ends[i].how) {
		write_file("/proc/sys/kernel/sysrq", "1");
		if (c->nargs)
			write_file("/proc/sysrq-trigger", c->arg[0].value);
		return true;
	}
	reboot(ends[i].how);
	return true;
}

static int insmod(const char *path, const char *params)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	int err;

	if (fd < 0)
		return -errno;
	err = syscall(SYS_finit_module, fd, params, 0) && errno != EEXIST ? -errno : 0;
	close(fd);
	return err;
}

/* Loads what /lib/modules/list says a module needs, then the module; a path is
 * loaded as it is. */
static int modprobe(const char *name, const char *params)
{
	char line[512], path[128], *save;
	int err = -ENOENT;
	FILE *f;

	if (*name == '/')
		return insmod(name, params);
	f = fopen("/lib/modules/list", "re");

	if (!f)
		return -errno;
	while (err == -ENOENT && fgets(line, sizeof(line), f)) {
		char *word = strtok_r(line, " \n", &save);

		if (!word || strcmp(word, name))
			continue;
		err = 0;
		while (!err && (word = strtok_r(NULL, " \n", &save))) {
			snprintf(path, sizeof(path), "/lib/modules/%s.ko", word);
			err = insmod(path, strcmp(word, name) ? "" : params);
		}
	}
	fclose(f);
	return err;
}

int load_boot_modules(void)
{
	FILE *f = fopen("/lib/modules/boot", "re");
	char name[64];
	int err = 0;

	if (!f)
		return 0;
	while (!err && fscanf(f, "%63s", name) == 1) {
		err = modprobe(name, "");
		if (err)
			fprintf(stderr, "ebb-guest-tool: module %s: %s\n", name, strerror(-err));
	}
	fclose(f);
	return err;
}

/* Emulated guests boot with one CPU of several (vm/config.rs of the lab says why). */
void start_cpus(void)
{
	char path[64];
	int cpu = 0;

	do
		snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/online", ++cpu);
	while (!write_file(path, "1"));
}

int task_write(struct job_env *e, struct cmd *c)
{
	const char *path = path_arg(c);
	const char *value = cmd_str(c, "value", "");
	int err;

	if (!args_ok(e, c))
		return 1;
	if (!path)
		return fail(e, "path= must be absolute");
	err = write_file(path, value);
	return err ? fail(e, strerror(-err)) : 0;
}

/* The page cache and slab, before which dirty pages go out. */
int task_drop(struct job_env *e, struct cmd *c)
{
	const char *what = cmd_str(c, "what", "3");
	int err;

	if (!args_ok(e, c))
		return 1;
	sync();
	err = write_file("/proc/sys/vm/drop_caches", what);
	return err ? fail(e, strerror(-err)) : 0;
}

int task_compact(struct job_env *e, struct cmd *c)
{
	int err;

	if (!args_ok(e, c))
		return 1;
	err = write_file("/proc/sys/vm/compact_memory", "1");
	return err ? fail(e, strerror(-err)) : 0;
}

int task_modprobe(struct job_env *e, struct cmd *c)
{
	const char *name = cmd_str(c, "name", "");
	const char *params = cmd_str(c, "params", "");
	int err;

	if (!args_ok(e, c))
		return 1;
	err = modprobe(name, params);
	return err ? fail(e, err == -ENOENT ? "not in this image" : strerror(-err)) : 0;
}

/* A swap area on a block device; `size` first sets a zram device up. */
int task_swapon(struct job_env *e, struct cmd *c)
{
	static struct { char boot[1024]; u32 version, last_page, bad; char pad[3050]; char magic[10]; }
	head = { .version = 1, .magic = "SWAPSPACE2" };
	const char *dev = cmd_str(c, "dev", "/dev/vda");
	u64 size = cmd_u64(c, "size", 0);
	char text[64], path[64];
	off_t end;
	int fd;

	_Static_assert(sizeof(head) == PAGE, "the header is a page");
	if (!args_ok(e, c))
		return 1;
	if (size) {
		snprintf(path, sizeof(path), "/sys/block/%.32s/disksize", strrchr(dev, '/') + 1);
		snprintf(text, sizeof(text), "%llu", (unsigned long long)size);
		modprobe("lzo_rle", "");	/* zram's default on 6.1; nobody else loads it */
		if (modprobe("zram", "") || write_file(path, text))
			return fail(e, "cannot set the zram device up");
	}
	fd = open(dev, O_RDWR | O_CLOEXEC);
	end = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
	if (end < (off_t)(10 * PAGE))
		return fail(e, "no such device, or too small");
	head.last_page = (u32)((u64)end / PAGE - 1);
	if (pwrite(fd, &head, PAGE, 0) != (ssize_t)PAGE || fsync(fd) || swapon(dev, 0))
		return fail(e, strerror(errno));
	return 0;
}

/* Puts a kernel in place for the final `kexec`, or for after a panic. */
int task_kexecload(struct job_env *e, struct cmd *c)
{
	unsigned long flags = cmd_u64(c, "crash", 0) ? KEXEC_FILE_ON_CRASH : 0;
	int kernel = open(cmd_str(c, "kernel", ""), O_RDONLY | O_CLOEXEC);
	int initrd = open(cmd_str(c, "initrd", ""), O_RDONLY | O_CLOEXEC);
	const char *append = cmd_str(c, "append", "");

	if (!args_ok(e, c))
		return 1;
	if (kernel < 0 || initrd < 0)
		return fail(e, "kernel= and initrd= must be files");
	if (syscall(SYS_kexec_file_load, kernel, initrd, strlen(append) + 1, append,
		    flags))
		return fail(e, strerror(errno));
	return 0;
}

int task_sh(struct job_env *e, struct cmd *c)
{
	static struct json out;
	const char *cmd = cmd_str(c, "cmd", "");
	char text[SH_OUT], rest[256];
	size_t len;
	FILE *f;
	int status;

	if (!args_ok(e, c))
		return 1;
	f = popen(cmd, "re");
	if (!f)
		return fail(e, "cannot run a shell");
	len = fread(text, 1, sizeof(text), f);
	while (fread(rest, 1, sizeof(rest), f))
		;
	status = pclose(f);
	json_start(&out);
	json_str(&out, "text", text, len);
	json_i64(&out, "code", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
	job_report(e, 'R', &out);
	return 0;
}
