/* SPDX-License-Identifier: GPL-2.0 */
/*
 * ebb-guest-tool: the lab's hands inside a guest.
 *
 * The tool reads command lines from a virtio-serial port and answers each with
 * one line of JSON.  It is one process with one poll loop (main.c) that never
 * blocks: work that touches memory or may take long runs in a child of its own
 * (job.c), so that the OOM killer can take a job and leave the tool.
 *
 *   in:   ID VERB key=value ...          %XX escapes bytes in a value
 *   out:  {"id":N,"ok":true,...}         the answer
 *         {"id":N,"ok":false,"error":..} refused or failed
 *         {"event":NAME,"job":J,...}     progress of a job, unasked
 *
 * Sizes are bytes, durations nanoseconds unless a key says otherwise.
 */
#ifndef EBB_TOOL_H
#define EBB_TOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef uint64_t u64;
typedef uint32_t u32;

#define PAGE		4096UL
#define PAGE_WORDS	(PAGE / sizeof(u64))
#define HUGE		(2UL << 20)
#define IN_MAX		4096	/* longest command line */
#define OUT_MAX		16384	/* longest answer */
#define FRAGMENT_MAX	8192	/* longest report of a job */
#define NARGS_MAX	16
#define NAME_MAX_LEN	32	/* of a job */

/* proto.c: command lines in, JSON out; pure. */
struct arg {
	char *key;
	char *value;
	bool used;
};

struct cmd {
	u64 id;
	char *verb;
	int nargs;
	struct arg arg[NARGS_MAX];
	const char *bad;	/* first key whose value makes no sense */
};

struct json {
	size_t len;
	bool overflow;
	char buf[OUT_MAX];
};

const char *cmd_parse(char *line, struct cmd *c);
const char *cmd_str(struct cmd *c, const char *key, const char *def);
u64 cmd_u64(struct cmd *c, const char *key, u64 def);
double cmd_fraction(struct cmd *c, const char *key, double def);
const char *cmd_leftover(const struct cmd *c);

void json_start(struct json *j);
void json_u64(struct json *j, const char *key, u64 v);
void json_i64(struct json *j, const char *key, int64_t v);
void json_double(struct json *j, const char *key, double v);
void json_bool(struct json *j, const char *key, bool v);
void json_str(struct json *j, const char *key, const char *s, size_t len);
void json_text(struct json *j, const char *key, const char *s);
void json_fragment(struct json *j, const char *fragment);
bool json_end(struct json *j);

/* page.c: what is in a page; pure. */
enum pattern { PAT_ZERO, PAT_TOUCH, PAT_RANDOM, PAT_TEMPLATE, PAT_BAD };

struct fill {
	enum pattern pattern;	/* of the shared part; the rest is random */
	double share;		/* fraction of clusters that follow `pattern` */
	u64 cluster;		/* pages */
	u64 seed;		/* of this VM */
	u64 common;		/* of all VMs that hold the same pages */
};

u64 mix64(u64 x);
u64 rng_next(u64 *state);
enum pattern pattern_named(const char *name);
void page_random(u64 *page, u64 seed, u64 index);
void page_fill(u64 *page, const struct fill *f, u64 index);
void page_seal(u64 *page, u64 seed, u64 index, u64 generation);
const char *page_check(const u64 *page, u64 seed, u64 index, u64 generation,
		       u64 *expected, u64 *found);

/* job.c: children and their reports. */
struct job_stats {		/* shared with the child, always readable */
	u64 cycles;
	u64 pages;
	u64 checks;
	u64 errors;
	u64 bytes;		/* held now */
	u64 last_ns;
	u64 max_ns;
	u64 total_ns;
};

struct job_env {
	struct job_stats *stats;
	int fd;
};

void job_report(struct job_env *e, char tag, struct json *body);
void jobs_init(void);
bool job_command(struct cmd *c, struct json *out, bool *deferred);
int jobs_poll_fds(void *pollfds, int max);
void jobs_poll(void);
void jobs_reap(void);

/* Work: run in a child, return the exit code. */
struct work {
	const char *kind;
	int (*run)(struct job_env *e, struct cmd *c);
};

const struct work *work_find(const char *kind);
int work_verify(struct job_env *e, struct cmd *c);
int work_sort(struct job_env *e, struct cmd *c);
int work_pieces(struct job_env *e, struct cmd *c);
int work_pipes(struct job_env *e, struct cmd *c);
int work_chase(struct job_env *e, struct cmd *c);
int sort_u32(u32 *v, u32 *spare, size_t n);
int task_write(struct job_env *e, struct cmd *c);
int task_drop(struct job_env *e, struct cmd *c);
int task_compact(struct job_env *e, struct cmd *c);
int task_modprobe(struct job_env *e, struct cmd *c);
int task_swapon(struct job_env *e, struct cmd *c);
int task_kexecload(struct job_env *e, struct cmd *c);
int task_sh(struct job_env *e, struct cmd *c);
int fail(struct job_env *e, const char *what);
bool args_ok(struct job_env *e, struct cmd *c);
u64 now_ns(void);

/* sys.c: what the guest says of itself. */
bool sys_command(struct cmd *c, struct json *out);
bool sys_final(const struct cmd *c);
int load_boot_modules(void);
void start_cpus(void);
int write_file(const char *path, const char *value);

/* port.c: the virtio-serial port. */
int port_open(void);
void port_send(const char *line, size_t len);
void port_flush(void);
bool port_pending(void);
bool port_congested(void);
void port_reset(void);

int self_test(void);

#endif
