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
#include <linux/timer.h>
#include <linux/types.h>

#include "map.h"

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

	/* Under `scanning`: scans, blocked, extents, and the way to a state. */
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

	struct timer_list timer;	/* beats and answers */
	unsigned long challenged;	/* jiffies of the last new challenge */
	struct task_struct *thread;	/* facts, hints, scans */
	unsigned long scan_at;		/* where the re-scan is */
	unsigned long *events;
	struct dentry *debug;
};

extern struct ebb ebb;
extern unsigned int ebb_rescan_ms, ebb_facts_ms;
extern bool ebb_drain_on;

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
};

#ifdef EBB_FAULTS
extern unsigned int ebb_fault;
#else
#define ebb_fault 0u
#endif

/* hooks.c */
const char *ebb_hooks_refuse(void);
int ebb_hooks_arm(void);
void ebb_hooks_disarm(void);
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
void ebb_audit(struct ebb_look *sum, u64 *passing);

/* drain.c */
void ebb_drain(u64 allocated);

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
