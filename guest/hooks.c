// SPDX-License-Identifier: GPL-2.0
/*
 * Where pages enter and leave the buddy allocator.
 *
 * All of this runs under the zone->lock of the page, unless it says otherwise:
 *
 *   SET	mm_page_pcpu_drain		after insertion
 *		__putback_isolated_page		entry, insertion follows
 *   CLEAR	mm_page_alloc_zone_locked	after removal
 *		mm_page_alloc_extfrag		after removal; from 6.10 on some
 *						removals fire only this one, before
 *						that it fires *before* the removal,
 *						which fires the other one as well
 *		__isolate_free_page		entry (compaction, reporting, …)
 *		__offline_isolated_pages	entry, unlocked: the pages are isolated,
 *						none of them can come or go, and scans
 *						stay away (memory notifier)
 *		take_page_off_buddy		entry, unlocked; looked at once more
 *		mm_page_alloc			backstop, by the new owner
 *   HINT	__free_pages_ok			entry, unlocked: a block too large for
 *						the per-CPU lists goes into the buddy
 *						allocator, and no tracepoint tells
 *
 * Never set on mm_page_free: it fires before insertion, without the lock.
 *
 * The backstop is for compaction capture: __free_one_page() may hand the page
 * it merges straight to the task that compacts, and the drain probe cannot see
 * that and sets its bits; those of the buddies it merged with were set already.
 * The task's allocation ends with mm_page_alloc.  Until then the kernel writes
 * to such a page only to fill it with zeroes (init_on_alloc, __GFP_ZERO), as a
 * discard does, so nobody can tell; kernels that write anything else to pages
 * in between (poisoning, KASAN) are refused.  If the allocation is undone in
 * between, nothing fires, the page goes back to a free list, and whoever takes
 * it from there passes mm_page_alloc or mm_page_alloc_zone_locked.  Single pages
 * are never captured: one that the backstop finds means that a hook is missing,
 * and the map is withdrawn (ebb_main.c).
 *
 * Missed sets cost opportunity only and are repaired by the scans: isolation
 * that failed, extfrag before 6.10, frees that found the per-CPU lists locked,
 * memory that came online.
 *
 * Tracepoints are silent on a CPU that is not online: while there is one that is
 * not dead either, the map is empty (cpu.c).
 *
 * Entries are ftrace callbacks, not kprobes: with FTRACE_OPS_FL_PERMANENT
 * nobody can switch them off behind our back (sysctl kernel.ftrace_enabled,
 * debugfs kprobes/enabled).
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cc_platform.h>
#include <linux/ftrace.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/nodemask.h>
#include <linux/tracepoint.h>
#include <linux/utsname.h>
#include <linux/version.h>
#include <trace/events/kmem.h>

#include "ebb.h"
#include "known.h"

/*
 * A series is known when every way into and out of the free lists was read in
 * its mm/page_alloc.c and tried with every fault switch of a test build.
 */
struct series {
	u32 from, to;		/* inclusive; patch levels do not count */
	bool extfrag;		/* mm_page_alloc_extfrag means "removed" */
};

static const struct series known[] = {
	{ KERNEL_VERSION(6, 1, 0), KERNEL_VERSION(6, 1, 0), false },
	{ KERNEL_VERSION(6, 12, 0), KERNEL_VERSION(6, 12, 0), true },
};

static const struct series *series;

static inline void count_set(unsigned long n)
{
	this_cpu_add(ebb.counts->set, n);
}

static inline void count_cleared(unsigned long n)
{
	this_cpu_add(ebb.counts->cleared, n);
}

/* One page, and every page is recorded: nearly all that comes, so the short way. */
static inline bool single(unsigned int order)
{
	return likely(!(order | ebb.order));
}

/* Whole blocks of the smallest recorded order: what is torn open is cleared. */
static inline unsigned long widen(unsigned long *pfn, unsigned int order)
{
	if (order < ebb.order)
		order = ebb.order;
	*pfn &= ~0ul << order;
	return 1ul << order;
}

static noinline void clear_block(unsigned long pfn, unsigned int order)
{
	unsigned long n = widen(&pfn, order);

	count_cleared(ebb_map_clear(&ebb.map, pfn, n));
}

static inline void clear(struct page *page, unsigned int order)
{
	unsigned long pfn = page_to_pfn(page);

	if (single(order))
		count_cleared(ebb_map_clear_one(&ebb.map, pfn));
	else
		clear_block(pfn, order);
}

static noinline void set_block(unsigned long pfn, unsigned int order)
{
	unsigned long n;

	if (order < ebb.order && !ebb_in_buddy(pfn, ebb.order))
		return;
	n = widen(&pfn, order);
	count_set(ebb_map_set(&ebb.map, pfn, n));
}

/* For the self-test. */
static inline void note(enum ebb_hook hook, struct page *page, unsigned int order)
{
	if (unlikely(READ_ONCE(ebb.tester)))
		ebb_test_saw(hook, page_to_pfn(page), order);
}

static void on_drain(void *data, struct page *page, unsigned int order, int migratetype)
{
	unsigned long pfn = page_to_pfn(page);

	if (!READ_ONCE(ebb.recording))
		return;
	if (single(order))
		count_set(ebb_map_set_one(&ebb.map, pfn));
	else
		set_block(pfn, order);
}

static void on_zone_locked(void *data, struct page *page, unsigned int order, int migratetype,
			   int percpu_refill)
{
	clear(page, order);
	note(EBB_HOOK_ZONE_LOCKED, page, order);
}

static void on_extfrag(void *data, struct page *page, int alloc_order, int fallback_order,
		       int alloc_migratetype, int fallback_migratetype)
{
	clear(page, alloc_order);
	note(EBB_HOOK_EXTFRAG, page, alloc_order);
}

static void on_alloc(void *data, struct page *page, unsigned int order, gfp_t gfp_flags,
		     int migratetype)
{
	unsigned long pfn, n;

	if (!page)
		return;
	note(EBB_HOOK_ALLOC, page, order);
	pfn = page_to_pfn(page);
	if (likely(order ? !ebb_map_any(&ebb.map, pfn, 1ul << order) : !ebb_map_test(&ebb.map, pfn)))
		return;
	n = widen(&pfn, order);
	n = ebb_map_clear(&ebb.map, pfn, n);
	this_cpu_add(ebb.counts->late, n);
	if (!order)
		this_cpu_add(ebb.counts->leaked, n);
}

struct probe {
	const char *name;
	void *func;
	bool set;
	u32 fault;
	struct tracepoint *tp;
	bool armed;
};

static struct probe probes[] = {
	{ "mm_page_alloc_zone_locked", on_zone_locked, false, EBB_FAULT_ZONE_LOCKED },
	{ "mm_page_alloc_extfrag", on_extfrag, false, EBB_FAULT_EXTFRAG },
	{ "mm_page_alloc", on_alloc, false, EBB_FAULT_BACKSTOP },
	{ "mm_page_pcpu_drain", on_drain, true, EBB_FAULT_DRAIN },
};

/* The compiler compares each probe with what its tracepoint calls. */
static void __always_unused check_types(void)
{
	check_trace_callback_type_mm_page_alloc_zone_locked(on_zone_locked);
	check_trace_callback_type_mm_page_alloc_extfrag(on_extfrag);
	check_trace_callback_type_mm_page_alloc(on_alloc);
	check_trace_callback_type_mm_page_pcpu_drain(on_drain);
}

static unsigned long argument(struct ftrace_regs *fregs, unsigned int n)
{
	return regs_get_kernel_argument(ftrace_get_regs(fregs), n);
}

static void on_putback(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
		       struct ftrace_regs *fregs)
{
	struct page *page = (struct page *)argument(fregs, 0);
	unsigned int order = argument(fregs, 1);

	if (READ_ONCE(ebb.recording) && order >= ebb.order)
		count_set(ebb_map_set(&ebb.map, page_to_pfn(page), 1ul << order));
}

static void on_isolate(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
		       struct ftrace_regs *fregs)
{
	struct page *page = (struct page *)argument(fregs, 0);
	unsigned int order = argument(fregs, 1);

	clear(page, order);
	note(EBB_HOOK_ISOLATE, page, order);
}

static void on_offline(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
		       struct ftrace_regs *fregs)
{
	unsigned long start = argument(fregs, 0), end = argument(fregs, 1);

	count_cleared(ebb_map_clear(&ebb.map, start, end - start));
}

static void on_takeoff(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
		       struct ftrace_regs *fregs)
{
	struct page *page = (struct page *)argument(fregs, 0);

	clear(page, 0);
	/* A scan may set it again before it is taken off: look again. */
	ebb_ring_add(page_to_pfn(page), EBB_RING_TAKEN);
}

static void on_large_free(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
			  struct ftrace_regs *fregs)
{
	atomic64_inc(&ebb.hints);
	ebb_ring_add(page_to_pfn((struct page *)argument(fregs, 0)), argument(fregs, 1));
}

struct entry {
	const char *name;
	ftrace_func_t func;
	bool set;
	bool optional;		/* not in every configuration, or only a hint */
	u32 fault;
	struct ftrace_ops ops;
	bool armed;
};

static struct entry entries[] = {
	{ "__isolate_free_page", on_isolate, false, false, EBB_FAULT_ISOLATE },
	{ "__offline_isolated_pages", on_offline, false,
	  !IS_ENABLED(CONFIG_MEMORY_HOTREMOVE), EBB_FAULT_OFFLINE },
	{ "take_page_off_buddy", on_takeoff, false,
	  !IS_ENABLED(CONFIG_MEMORY_FAILURE), EBB_FAULT_TAKEOFF },
	{ "__putback_isolated_page", on_putback, true, false, EBB_FAULT_PUTBACK },
	{ "__free_pages_ok", on_large_free, true, true, EBB_FAULT_HINT },
};

/*
 * A run to look at again, from any context: an order, or EBB_RING_TAKEN.  A slot
 * each, overwritten when the thread does not keep up; 0 is empty.
 */
void ebb_ring_add(unsigned long pfn, unsigned int what)
{
	unsigned int at = (unsigned int)atomic_inc_return(&ebb.ring_head) - 1;

	if (atomic64_xchg(&ebb.ring[at % EBB_RING], ((s64)pfn << 8 | what) + 1))
		atomic64_inc(&ebb.hints_lost);
}

static void find_tracepoint(struct tracepoint *tp, void *data)
{
	struct probe *p = data;

	if (!strcmp(tp->name, p->name))
		p->tp = tp;
}

static int arm_probe(struct probe *p)
{
	int err;

	for_each_kernel_tracepoint(find_tracepoint, p);
	if (!p->tp) {
		pr_err("refused: this kernel has no tracepoint %s\n", p->name);
		return -ENOENT;
	}
	if (ebb_fault & p->fault)
		return 0;
	err = tracepoint_probe_register(p->tp, p->func, NULL);
	if (err)
		pr_err("refused: tracepoint %s: error %d\n", p->name, err);
	else
		p->armed = true;
	return err;
}

static int arm_entry(struct entry *e)
{
	int err;

	e->ops.func = e->func;
	e->ops.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_PERMANENT;
	err = ftrace_set_filter(&e->ops, (unsigned char *)e->name, strlen(e->name), 1);
	if (err && e->optional)
		return 0;
	if (err) {
		pr_err("refused: this kernel does not let %s be traced (error %d)\n", e->name,
		       err);
		return err;
	}
	if (ebb_fault & e->fault) {
		ftrace_free_filter(&e->ops);
		return 0;
	}
	err = register_ftrace_function(&e->ops);
	if (err) {
		pr_err("refused: tracing %s: error %d\n", e->name, err);
		ftrace_free_filter(&e->ops);
		return err;
	}
	e->armed = true;
	return 0;
}

static int arm(bool set)
{
	unsigned int i;
	int err;

	for (i = 0; i < ARRAY_SIZE(probes); i++) {
		if (probes[i].set != set)
			continue;
		if (!series->extfrag && probes[i].fault == EBB_FAULT_EXTFRAG)
			continue;
		err = arm_probe(&probes[i]);
		if (err)
			return err;
	}
	for (i = 0; i < ARRAY_SIZE(entries); i++) {
		err = entries[i].set == set ? arm_entry(&entries[i]) : 0;
		if (err)
			return err;
	}
	return 0;
}

/* Once ftrace has found an error of its own it takes nothing off any more. */
static int disarm_entry(struct entry *e)
{
	int err;

	if ((ebb_fault & EBB_FAULT_STUCK) && e->func == on_isolate)
		return -ENODEV;
	err = unregister_ftrace_function(&e->ops);
	if (!err)
		ftrace_free_filter(&e->ops);
	return err;
}

static void disarm(bool set)
{
	int i;

	for (i = ARRAY_SIZE(entries) - 1; i >= 0; i--)
		if (entries[i].set == set && entries[i].armed)
			entries[i].armed = disarm_entry(&entries[i]);
	for (i = ARRAY_SIZE(probes) - 1; i >= 0; i--)
		if (probes[i].set == set && probes[i].armed)
			probes[i].armed = tracepoint_probe_unregister(probes[i].tp,
								      probes[i].func, NULL);
	tracepoint_synchronize_unregister();
}

/* Whether a hook is there that could not be removed. */
bool ebb_hooks_stuck(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(entries); i++)
		if (entries[i].armed)
			return true;
	for (i = 0; i < ARRAY_SIZE(probes); i++)
		if (probes[i].armed)
			return true;
	return false;
}

/* Whether some removals fire mm_page_alloc_extfrag only. */
bool ebb_hooks_extfrag(void)
{
	return series->extfrag;
}

/* Whoever was between a hook and the end of its critical section is through. */
void ebb_lock_cycle(void)
{
	unsigned long flags;
	int nid, i;

	for_each_online_node(nid) {
		for (i = 0; i < MAX_NR_ZONES; i++) {
			struct zone *zone = &NODE_DATA(nid)->node_zones[i];

			if (!populated_zone(zone))
				continue;
			spin_lock_irqsave(&zone->lock, flags);
			spin_unlock_irqrestore(&zone->lock, flags);
		}
	}
}

/*
 * CLEARs first, then all zones' locks once: from then on no page leaves unseen.
 * Only then SETs, which wait for `recording`.  On error nothing is armed.
 */
int ebb_hooks_arm(void)
{
	int err = arm(false);

	if (!err) {
		ebb_lock_cycle();
		err = arm(true);
	}
	if (err)
		ebb_hooks_disarm();
	return err;
}

/* The reverse.  The map was cleared before: no set comes after disarm(true). */
void ebb_hooks_disarm(void)
{
	disarm(true);
	disarm(false);
}

/* Vendors that leave the number of a release as it is. */
#if defined(RHEL_RELEASE_CODE) || defined(CONFIG_VERSION_SIGNATURE) || \
	defined(CONFIG_SUSE_KERNEL) || defined(CONFIG_ANDROID_VENDOR_HOOKS)
#define VENDOR	true
#else
#define VENDOR	false
#endif

static const char *refuse_build(void)
{
	const struct new_utsname *uts = &init_uts_ns.name;

	/* A call that link-time optimisation inlines is a removal that no hook sees. */
	if (IS_ENABLED(CONFIG_LTO_CLANG))
		return "this kernel is built with CONFIG_LTO_CLANG: calls that are traced may be inlined";
	if (IS_ENABLED(CONFIG_CFI_CLANG) || IS_ENABLED(CONFIG_CFI))
		return "this kernel is built with CONFIG_CFI_CLANG: hooks were not checked under it";
	/* It comes back to this kernel, and no notifier tells. */
	if (IS_ENABLED(CONFIG_KEXEC_JUMP))
		return "this kernel is built with CONFIG_KEXEC_JUMP: another one may use its free pages";
	if (!VENDOR && !(ebb_fault & EBB_FAULT_VENDOR) &&
	    ebb_build_known(uts->release, uts->version))
		return NULL;
	if (!ebb_force_unknown)
		return "this kernel is not a build by Debian or of kernel.org's sources, so its page allocator was not checked; force_unknown=1 loads all the same: where it differs, this guest can lose data";
	pr_warn("force_unknown: the page allocator of %s was not checked: where it differs from Linux %u.%u, this guest can lose data\n",
		uts->release, LINUX_VERSION_MAJOR, LINUX_VERSION_PATCHLEVEL);
	return NULL;
}

/* Why not on this kernel; NULL: it will do. */
const char *ebb_hooks_refuse(void)
{
	u32 version = KERNEL_VERSION(LINUX_VERSION_MAJOR, LINUX_VERSION_PATCHLEVEL, 0);
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(known) && !series; i++)
		if (version >= known[i].from && version <= known[i].to)
			series = &known[i];
	if (!series)
		return "this kernel series is not known: its page allocator was not checked";
	if (IS_ENABLED(CONFIG_PREEMPT_RT))
		return "a PREEMPT_RT kernel was not checked";
	if (IS_ENABLED(CONFIG_KASAN) || IS_ENABLED(CONFIG_KMSAN))
		return "KASAN and KMSAN watch free pages";
#ifdef CONFIG_PAGE_POISONING
	if (page_poisoning_enabled())
		return "page poisoning writes to free pages and checks them";
#endif
	if (debug_pagealloc_enabled())
		return "debug_pagealloc unmaps free pages";
	if (want_init_on_free())
		return "init_on_free relies on what free pages hold";
	if (cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT))
		return "the memory of this guest is encrypted: the host cannot take it";
	return refuse_build();
}
