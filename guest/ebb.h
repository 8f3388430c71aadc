/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the files of ebb.ko share.  There is one struct ebb: one map, one header,
 * one state word (in the header, where the host reads it too).
 */
#ifndef EBB_H
#define EBB_H

#include <linux/atomic.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/seq_file.h>
#include <linux/types.h>
#include <linux/version.h>

#include "map.h"

/* alloc_contig_range() of pages of any kind. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0)
#define EBB_CONTIG_ANY	ACR_FLAGS_NONE
#else
#define EBB_CONTIG_ANY	MIGRATE_MOVABLE
#endif

#define EBB_MODULE_VERSION	"0.1.0"

/* The largest blocks of the buddy allocator; they never cross such a line. */
#define EBB_BLOCK	MAX_ORDER_NR_PAGES
#define EBB_RING	1024
#define EBB_RING_TAKEN	0x80

struct ebb_counts {
	u64 set, cleared, late, leaked;
};

struct ebb {
	struct ebb_header *header;
	struct ebb_map map;
	unsigned int order;		/* smallest recorded */
	bool recording;			/* hooks may set bits */

	/*
	 * The way from one state to the next.  Nobody waits for memory with it
	 * held, so reboot, sleep and CPUs that go do not either.
	 */
	struct mutex life;
	bool asleep;			/* under it */

	/* Scans, blocked, extents; held over allocations.  Never with `life`. */
	struct mutex scanning;
	unsigned long *blocked;		/* sections that are going offline */
	struct ebb_extent_page **extents;
	unsigned int extent_pages;

	struct ebb_counts __percpu *counts;
	atomic64_t ring[EBB_RING];	/* runs to look at again; hooks.c */
	atomic_t ring_head;
	unsigned int ring_tail;
	atomic64_t hints, hints_lost;
	u64 repaired, suspect, scans, scan_pages, scan_hold_ns, drains;
	u64 allocated;			/* by the whole guest, at the last look */

	struct task_struct *thread;	/* facts, hints, scans, the way back to RUNNING */
	struct task_struct *tester;	/* in the self-test */
	unsigned long scan_at;		/* where the re-scan is */
	unsigned long *events;
	struct dentry *debug;
};

extern struct ebb ebb;
extern unsigned int ebb_rescan_ms, ebb_facts_ms;
extern bool ebb_drain_on, ebb_force_unknown;

/* Left out on purpose, in test builds: bits of ebb_fault. */
enum ebb_fault {
	EBB_FAULT_ZONE_LOCKED	= 1 << 0,
	EBB_FAULT_EXTFRAG	= 1 << 1,
	EBB_FAULT_BACKSTOP	= 1 << 2,
	EBB_FAULT_ISOLATE	= 1 << 3,
	EBB_FAULT_OFFLINE	= 1 << 4,
	EBB_FAULT_TAKEOFF	= 1 << 5,
	EBB_FAULT_DRAIN		= 1 << 6,
	EBB_FAULT_PUTBACK	= 1 << 7,
	EBB_FAULT_HINT		= 1 << 8,
	EBB_FAULT_NOTIFIERS	= 1 << 9,
	EBB_FAULT_SELFTEST	= 1 << 10,	/* self-test and audit at load */
	EBB_FAULT_CPUS		= 1 << 11,	/* cpu.c */
	/* Not left out but done: */
	EBB_FAULT_DYING		= 1 << 12,	/* CPUs take pages unseen (faults.c) */
	EBB_FAULT_STUCK		= 1 << 13,	/* __isolate_free_page stays traced */
	EBB_FAULT_VENDOR	= 1 << 14,	/* the kernel is somebody's own build */
	EBB_FAULT_HELD		= 1 << 15,	/* the thread waits for memory for ever */
};

#ifdef EBB_FAULTS
extern unsigned int ebb_fault;
int ebb_faults_start(void);
u64 ebb_faults_taken(void);
void ebb_faults_stop(void);
#else
#define ebb_fault 0u
static inline int ebb_faults_start(void) { return 0; }
static inline void ebb_faults_stop(void) { }
#endif

/* What the self-test waits for. */
enum ebb_hook {
	EBB_HOOK_ZONE_LOCKED,
	EBB_HOOK_EXTFRAG,
	EBB_HOOK_ALLOC,
	EBB_HOOK_ISOLATE,
	EBB_HOOKS,
};

/* hooks.c */
const char *ebb_hooks_refuse(void);
int ebb_hooks_arm(void);
void ebb_hooks_disarm(void);
bool ebb_hooks_stuck(void);
bool ebb_hooks_extfrag(void);
void ebb_lock_cycle(void);
void ebb_ring_add(unsigned long pfn, unsigned int what);

/* scan.c */
struct ebb_look {
	u64 pages, free, set, missed, wrong;
	unsigned long first_wrong;
};

bool ebb_in_buddy(unsigned long pfn, unsigned int order);
void ebb_scan(unsigned long start, unsigned long end);
void ebb_scan_some(unsigned long pages);
void ebb_ring_drain(void);
int ebb_audit(struct ebb_look *sum, u64 *passing);

/* drain.c */
void ebb_drain(u64 allocated);
unsigned long ebb_free_pageblock(unsigned long below);
bool ebb_take_one(unsigned long pfn);

/* selftest.c */
const char *ebb_selftest(void);
void ebb_test_saw(enum ebb_hook hook, unsigned long pfn, unsigned int order);

/* tables.c */
int ebb_tables_make(void);
void ebb_tables_free(void);
int ebb_memory_watch(void);
void ebb_memory_forget(void);

/* beat.c */
void ebb_beat_start(void);
void ebb_beat_stop(void);

/* cpu.c */
int ebb_cpus_watch(void);
void ebb_cpus_forget(void);
bool ebb_cpus_settled(void);

/* keep.c */
u64 ebb_keep_page(void);
void ebb_keep_end(void);

/* facts.c */
void ebb_facts_update(void);
void ebb_stats_update(void);

/* debug.c */
void ebb_debug_init(void);
void ebb_debug_exit(void);

/* ebb_main.c */
void ebb_withdraw(void);
void ebb_stop_recording(enum ebb_state state, enum ebb_reason why);

#endif /* EBB_H */
