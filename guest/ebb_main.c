// SPDX-License-Identifier: GPL-2.0
/*
 * ebb: tells the host which pages of this guest are free.
 *
 * The module keeps a map in its own memory with one bit for each 4 KiB page:
 * *bit set => the page is in the buddy allocator now*.  A missing bit costs the
 * host an opportunity, a false one somebody's data, so everything here errs one
 * way.  ebb_abi.h has what the host sees, and the order of things it may rely
 * on; hooks.c has where bits change; scan.c repairs what hooks missed.
 *
 * This file has the module's life.  Its one state word is header->state:
 *
 *	load:	STARTING	CLEARs armed, all zone locks cycled, SETs armed,
 *				first scan, self-test of the hooks, audit
 *		RUNNING		the map holds
 *	sleep,	QUIET		SETs ignored, map cleared; back to STARTING after,
 *	a CPU:			for a scan and an audit
 *	end:	STOPPED		the same, for good: unload, reboot, kexec, panic,
 *				or a false bit found by ourselves
 *
 * On unload the magic is wiped and pages are given back last: the host looks at
 * the state after it looked at the map.  Map pages are never given back before.
 *
 * Timers beat and answer challenges (beat.c); one thread, woken by beats, does
 * what may take longer: facts, second looks, the slow re-scan, and the way back
 * from QUIET.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/delay.h>
#include <linux/init.h>
#include <linux/io.h>
#include <linux/kthread.h>
#include <linux/memory.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/panic_notifier.h>
#include <linux/random.h>
#include <linux/reboot.h>
#include <linux/suspend.h>
#include <linux/version.h>
#include <linux/vmalloc.h>
#include <linux/vmstat.h>

#include "ebb.h"

#if !defined(CONFIG_X86_64) || !defined(CONFIG_ZONE_DMA)
#error "x86-64 with ZONE_DMA only: the host searches the first 16 MiB"
#endif

/* Room in the table for memory that comes later: 512 GiB, 32 KiB of table. */
#define ROOM_PAGES	4096u
#define CHUNK_ORDER	4	/* map pages that are asked for in one piece */
#define WORK_MS		80	/* less than a beat, so that each one counts */
#define SCAN_PAGES_MS	2621	/* at most, of the re-scan: 10 GiB a second */
#define GRACE_MS	50	/* between STOPPED and the end of its pages */

struct ebb ebb;

static unsigned int order;
module_param(order, uint, 0444);
MODULE_PARM_DESC(order, "smallest block that is recorded, as an order (default 0: each page)");

unsigned int ebb_rescan_ms = 10000;
module_param_named(rescan_ms, ebb_rescan_ms, uint, 0644);
MODULE_PARM_DESC(rescan_ms, "time for a full pass of the slow re-scan, 0: none (default 10000)");

unsigned int ebb_facts_ms = 200;
module_param_named(facts_ms, ebb_facts_ms, uint, 0444);
MODULE_PARM_DESC(facts_ms, "time between two updates of facts and counters (default 200)");

bool ebb_drain_on = true;
module_param_named(drain, ebb_drain_on, bool, 0644);
MODULE_PARM_DESC(drain, "empty large per-CPU lists of a quiet guest into the map (default Y)");

bool ebb_force_unknown;
module_param_named(force_unknown, ebb_force_unknown, bool, 0444);
MODULE_PARM_DESC(force_unknown, "load on a kernel of a known series that somebody else built: if its page allocator was changed, the guest can lose data");

#ifdef EBB_FAULTS
unsigned int ebb_fault;
module_param_named(fault, ebb_fault, uint, 0444);
MODULE_PARM_DESC(fault, "what to leave out, bits of enum ebb_fault; for tests");
#endif

static enum ebb_state state(void)
{
	return READ_ONCE(ebb.header->state);
}

static void set_state(enum ebb_state to, enum ebb_reason why)
{
	WRITE_ONCE(ebb.header->reason, why);
	smp_mb();		/* what was done before, and then the word */
	WRITE_ONCE(ebb.header->state, to);
	smp_mb();		/* the word, and then what is done now */
}

/*
 * Leaves RUNNING; on return the map is clear and stays so: hooks and scans set
 * bits under a zone's lock only, and look at `recording` there.
 */
void ebb_stop_recording(enum ebb_state to, enum ebb_reason why)
{
	mutex_lock(&ebb.life);
	if (state() != EBB_STOPPED) {
		set_state(to, why);
		WRITE_ONCE(ebb.recording, false);
		ebb_lock_cycle();
		ebb_map_zero(&ebb.map);
	}
	mutex_unlock(&ebb.life);
}

/* Whether it may be recorded now; if so, it is. */
static bool may_record(void)
{
	bool may;

	mutex_lock(&ebb.life);
	may = state() != EBB_STOPPED && !ebb.asleep && ebb_cpus_settled();
	if (may) {
		set_state(EBB_STARTING, EBB_WHY_NONE);
		WRITE_ONCE(ebb.recording, true);
	}
	mutex_unlock(&ebb.life);
	return may;
}

/* A scan, once the self-test, and an audit: what must be good before RUNNING. */
static int check(void)
{
	static bool tested;
	u64 passing, repaired = ebb.repaired;
	struct ebb_look sum;
	const char *why;
	int err;

	ebb_scan(0, ebb.map.pages * EBB_MAP_PFNS);
	ebb.repaired = repaired;	/* that was no repair */
	if (ebb_fault & EBB_FAULT_SELFTEST)
		return 0;
	why = tested ? NULL : ebb_selftest();
	if (why) {
		pr_err("refused: self-test of the hooks: %s\n", why);
		return -ENODEV;
	}
	tested = true;
	err = ebb_audit(&sum, &passing);
	if (!err && sum.wrong) {
		pr_err("refused: the audit found %llu pages in use that are marked as free, please report\n",
		       sum.wrong);
		err = -ENODEV;
	}
	return err;
}

/*
 * Records from now on; RUNNING after a scan and an audit, unless something else
 * came first, which the thread will see.
 */
static int start_recording(void)
{
	int err;

	if (!may_record())
		return 0;
	err = check();
	if (err)
		return err;
	mutex_lock(&ebb.life);
	if (state() == EBB_STARTING)
		set_state(EBB_RUNNING, EBB_WHY_NONE);
	mutex_unlock(&ebb.life);
	return 0;
}

/* By the thread: from QUIET to RUNNING, once nothing speaks against it. */
static void resume_recording(void)
{
	int err = start_recording();

	if (err == -ENODEV)
		ebb_stop_recording(EBB_STOPPED, EBB_WHY_BROKEN);
	else if (err)		/* no memory for an audit: with the next beat */
		ebb_stop_recording(EBB_QUIET, EBB_WHY_NONE);
}

/* A page in use was marked as free: this kernel is not as we know it. */
void ebb_withdraw(void)
{
	if (ebb_fault || state() == EBB_STOPPED)	/* tests want to see more */
		return;
	pr_err("a page in use was marked as free: the map is withdrawn for good, please report\n");
	ebb_stop_recording(EBB_STOPPED, EBB_WHY_BROKEN);
}

/* In a panic: no locks, and nobody sets any more who looks at `recording`. */
static int on_panic(struct notifier_block *nb, unsigned long event, void *data)
{
	set_state(EBB_STOPPED, EBB_WHY_PANIC);
	WRITE_ONCE(ebb.recording, false);
	ebb_map_zero(&ebb.map);
	return NOTIFY_DONE;
}

/* Reboot, halt, power off, and kexec. */
static int on_reboot(struct notifier_block *nb, unsigned long event, void *data)
{
	ebb_stop_recording(EBB_STOPPED, EBB_WHY_REBOOT);
	return NOTIFY_DONE;
}

static void set_asleep(bool asleep)
{
	mutex_lock(&ebb.life);
	ebb.asleep = asleep;
	mutex_unlock(&ebb.life);
}

/* Hibernation and restore write to pages that are free. */
static int on_sleep(struct notifier_block *nb, unsigned long event, void *data)
{
	switch (event) {
	case PM_HIBERNATION_PREPARE:
	case PM_SUSPEND_PREPARE:
	case PM_RESTORE_PREPARE:
		set_asleep(true);
		ebb_stop_recording(EBB_QUIET, EBB_WHY_SLEEP);
		break;
	case PM_POST_HIBERNATION:
	case PM_POST_SUSPEND:
	case PM_POST_RESTORE:
		set_asleep(false);
		break;
	}
	return NOTIFY_DONE;
}

static struct notifier_block panic_nb = { .notifier_call = on_panic, .priority = INT_MAX };
static struct notifier_block reboot_nb = { .notifier_call = on_reboot, .priority = INT_MAX };
static struct notifier_block sleep_nb = { .notifier_call = on_sleep };

static bool present(unsigned long section)
{
	unsigned long pfn = section * EBB_MAP_PFNS, i;

	for (i = 0; i < EBB_MAP_PFNS; i += EBB_BLOCK)
		if (pfn_to_online_page(pfn + i))
			return true;
	return false;
}

/* Gives `count` sections their map pages, which follow each other in memory. */
static int cover(unsigned long first, unsigned int count)
{
	struct page *page = alloc_pages(GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN |
					(count > 1 ? __GFP_NORETRY : 0), ilog2(count));
	unsigned int i;
	int err;

	lockdep_assert_held(&ebb.scanning);
	if (!page)
		return -ENOMEM;
	err = ebb_extent_add(ebb.extents, ebb.extent_pages, page_to_phys(page), first, count);
	if (err) {
		__free_pages(page, ilog2(count));
		return err;
	}
	split_page(page, ilog2(count));
	for (i = 0; i < count; i++)
		smp_store_release(&ebb.map.page[first + i], page_address(page + i));
	ebb.header->map_pages += count;
	return 0;
}

static bool covered(unsigned long first, unsigned long end)
{
	while (first < end && ebb.map.page[first])
		first++;
	return first >= end;
}

/*
 * Covers what is present of a range of sections, or all of it where it is only
 * about to come, in pieces as large as can be had.
 */
static int cover_range(unsigned long first, unsigned long end, bool hot)
{
	unsigned int piece;
	int err = 0;

	mutex_lock(&ebb.scanning);
	if (covered(first, end)) {
		mutex_unlock(&ebb.scanning);
		return 0;
	}
	WRITE_ONCE(ebb.header->generation, ebb.header->generation + 1);
	smp_mb();
	while (first < end && !err) {
		for (piece = 0; piece < 1u << CHUNK_ORDER && first + piece < end; piece++)
			if (ebb.map.page[first + piece] || (!hot && !present(first + piece)))
				break;
		if (!piece) {
			first++;
			continue;
		}
		for (piece = rounddown_pow_of_two(piece); ; piece /= 2) {
			err = cover(first, piece);
			if (err != -ENOMEM || piece == 1)
				break;
		}
		if (!err)
			first += piece;
	}
	smp_mb();
	WRITE_ONCE(ebb.header->generation, ebb.header->generation + 1);
	mutex_unlock(&ebb.scanning);
	return err;
}

static void uncover_all(void)
{
	unsigned long i;

	for (i = 0; i < ebb.map.pages; i++)
		if (ebb.map.page[i])
			free_page((unsigned long)ebb.map.page[i]);
}

static void block(unsigned long first, unsigned long end, bool on)
{
	mutex_lock(&ebb.scanning);
	for (; first < end; first++)
		if (on)
			__set_bit(first, ebb.blocked);
		else
			__clear_bit(first, ebb.blocked);
	mutex_unlock(&ebb.scanning);
}

/*
 * Scans keep away from memory that is going, until it has gone: its struct
 * pages may go too.  Memory that comes is covered if there is room; what is not
 * covered is never recorded, and that is all.
 */
static int on_memory(struct notifier_block *nb, unsigned long event, void *data)
{
	struct memory_notify *m = data;
	unsigned long pfn = m->start_pfn, n = m->nr_pages;
	unsigned long first = pfn / EBB_MAP_PFNS, end = DIV_ROUND_UP(pfn + n, EBB_MAP_PFNS);

	end = min(end, ebb.map.pages);
	switch (event) {
	case MEM_GOING_ONLINE:
		if (cover_range(first, end, true) || pfn + n > ebb.map.pages * EBB_MAP_PFNS)
			pr_warn_once("some memory has no place in the map\n");
		break;
	case MEM_ONLINE:
		ebb.header->stats.uncovered += n - ebb_map_covered(&ebb.map, pfn, n);
		ebb_scan(pfn, pfn + n);
		break;
	case MEM_GOING_OFFLINE:
		block(first, end, true);
		break;
	case MEM_OFFLINE:
		/* It may have been on its way before we came. */
		if (!(ebb_fault & EBB_FAULT_OFFLINE))
			ebb_map_clear(&ebb.map, pfn, n);
		fallthrough;
	case MEM_CANCEL_OFFLINE:
		block(first, end, false);
		break;
	}
	return NOTIFY_DONE;
}

static struct notifier_block memory_nb = { .notifier_call = on_memory };

/* How many pages may be looked at after so long, for a pass in rescan_ms. */
static unsigned long allowance(unsigned int elapsed)
{
	unsigned int ms = READ_ONCE(ebb_rescan_ms);
	u64 pages = (u64)ebb.header->map_pages * EBB_MAP_PFNS;

	if (!ms || state() != EBB_RUNNING)
		return 0;
	elapsed = min(elapsed, EBB_TICK_MS);
	return clamp_t(u64, pages * elapsed / ms, EBB_BLOCK, elapsed * SCAN_PAGES_MS);
}

/* Test builds: as if an allocation under the lock did not end. */
static void wait_for_memory(void)
{
	mutex_lock(&ebb.scanning);
	while (!kthread_should_stop())
		schedule_timeout_interruptible(HZ);
	mutex_unlock(&ebb.scanning);
}

static void work_once(unsigned long *facts, unsigned int elapsed)
{
	if (ebb_fault & EBB_FAULT_HELD)
		return wait_for_memory();
	ebb_ring_drain();
	ebb_scan_some(allowance(elapsed));
	if (state() == EBB_QUIET)
		resume_recording();
	if (time_before(jiffies, *facts))
		return;
	*facts = jiffies + msecs_to_jiffies(ebb_facts_ms);
	ebb_facts_update();
	ebb_stats_update();
	if (ebb.header->stats.leaked)
		ebb_withdraw();
	if (READ_ONCE(ebb_drain_on))
		ebb_drain(ebb.header->facts.alloc);
}

/* Beats wake it, more often while the host asks: once in WORK_MS is enough. */
static int work(void *unused)
{
	unsigned long facts = jiffies, last = jiffies;

	for (;;) {
		unsigned int elapsed;

		set_current_state(TASK_INTERRUPTIBLE);
		if (kthread_should_stop())
			break;
		elapsed = jiffies_to_msecs(jiffies - last);
		if (elapsed < WORK_MS) {
			schedule();
			continue;
		}
		__set_current_state(TASK_RUNNING);
		last = jiffies;
		work_once(&facts, elapsed);
	}
	__set_current_state(TASK_RUNNING);
	return 0;
}

static int make_header(void)
{
	static const u8 magic[] = EBB_MAGIC;
	/* First: it is one page, the header may be anywhere. */
	u64 kept = ebb_keep_page();
	struct page *page = alloc_page(GFP_KERNEL | GFP_DMA | __GFP_ZERO);
	struct ebb_header *h;

	if (!page || page_to_pfn(page) >= EBB_SEARCH_PAGES) {
		if (page)
			__free_page(page);
		ebb_keep_end();
		return -ENOMEM;
	}
	h = ebb.header = page_address(page);
	h->version = EBB_ABI_VERSION;
	h->size = sizeof(*h);
	h->self_gpa = page_to_phys(page);
	get_random_bytes(&h->key, sizeof(h->key));
	get_random_bytes(h->instance, sizeof(h->instance));
	h->page_shift = PAGE_SHIFT;
	h->order = ebb.order;
	h->pfn_limit = (u64)ebb.map.pages * EBB_MAP_PFNS;
	h->linux_version = KERNEL_VERSION(LINUX_VERSION_MAJOR, LINUX_VERSION_PATCHLEVEL, 0);
	h->features = ebb_fault ? EBB_FEATURE_FAULTS : 0;
	strscpy(h->module_version, EBB_MODULE_VERSION, sizeof(h->module_version));
	h->kept_gpa = kept;
	memcpy(h->magic, magic, sizeof(magic));
	h->checksum = ebb_checksum(h);
	/* Nobody shall find it before it is whole. */
	memset(h->magic, 0, sizeof(h->magic));
	h->state = EBB_STARTING;
	h->tick_ms = EBB_TICK_MS;
	h->facts_ms = max(ebb_facts_ms, EBB_TICK_MS);
	return 0;
}

static void show_header(bool show)
{
	static const u8 magic[] = EBB_MAGIC;

	smp_mb();
	if (show)
		memcpy(ebb.header->magic, magic, sizeof(magic));
	else
		memzero_explicit(ebb.header, sizeof(*ebb.header));
	smp_mb();
}

/* Enough for all sections that the table can hold, taken from page to page. */
static int make_extents(unsigned long sections)
{
	unsigned int i, n = DIV_ROUND_UP(sections, 1u << CHUNK_ORDER) * 2 / EBB_EXTENTS_A_PAGE + 1;
	u64 *next = &ebb.header->extents_gpa;

	n = min_t(unsigned int, n, EBB_EXTENT_PAGES_MAX);
	ebb.extents = kcalloc(n, sizeof(*ebb.extents), GFP_KERNEL);
	if (!ebb.extents)
		return -ENOMEM;
	for (i = 0; i < n; i++) {
		ebb.extents[i] = (void *)get_zeroed_page(GFP_KERNEL);
		if (!ebb.extents[i])
			break;
		*next = virt_to_phys(ebb.extents[i]);
		next = &ebb.extents[i]->next;
	}
	ebb.extent_pages = i;
	ebb.header->extent_pages = i;
	return i == n ? 0 : -ENOMEM;
}

static void free_extents(void)
{
	while (ebb.extent_pages)
		free_page((unsigned long)ebb.extents[--ebb.extent_pages]);
	kfree(ebb.extents);
}

/* One past the last page of any node. */
static unsigned long last_pfn(void)
{
	unsigned long last = 0;
	int nid;

	for_each_online_node(nid)
		last = max(last, pgdat_end_pfn(NODE_DATA(nid)));
	return last;
}

static int make_tables(void)
{
	unsigned long sections = DIV_ROUND_UP(last_pfn(), EBB_MAP_PFNS);
	int err = -ENOMEM;

	ebb.map.pages = max_t(unsigned long, 2 * sections, ROOM_PAGES);
	ebb.map.page = vzalloc(array_size(ebb.map.pages, sizeof(*ebb.map.page)));
	if (!ebb.map.page)
		return -ENOMEM;
	ebb.blocked = kvcalloc(BITS_TO_LONGS(ebb.map.pages), sizeof(long), GFP_KERNEL);
	if (!ebb.blocked)
		goto out_page;
	ebb.events = kcalloc(NR_VM_EVENT_ITEMS, sizeof(*ebb.events), GFP_KERNEL);
	if (!ebb.events)
		goto out_blocked;
	ebb.counts = alloc_percpu(struct ebb_counts);
	if (!ebb.counts)
		goto out_events;
	err = make_header();
	if (err)
		goto out_counts;
	err = make_extents(ebb.map.pages);
	if (err)
		goto out_header;
	err = cover_range(0, sections, false);
	if (err)
		goto out_cover;
	return 0;

out_cover:
	uncover_all();
out_header:
	free_extents();
	free_page((unsigned long)ebb.header);
	ebb_keep_end();
out_counts:
	free_percpu(ebb.counts);
out_events:
	kfree(ebb.events);
out_blocked:
	kvfree(ebb.blocked);
out_page:
	vfree(ebb.map.page);
	return err;
}

static void free_tables(void)
{
	uncover_all();
	free_extents();
	free_page((unsigned long)ebb.header);
	ebb_keep_end();
	free_percpu(ebb.counts);
	kfree(ebb.events);
	kvfree(ebb.blocked);
	vfree(ebb.map.page);
}

static int add_notifiers(void)
{
	int err;

	err = register_memory_notifier(&memory_nb);
	if (err)
		return err;
	err = ebb_cpus_watch();
	if (err)
		goto out_memory;
	if (ebb_fault & EBB_FAULT_NOTIFIERS)
		return 0;
	err = register_pm_notifier(&sleep_nb);
	if (err)
		goto out_cpus;
	err = register_reboot_notifier(&reboot_nb);
	if (err)
		goto out_sleep;
	err = atomic_notifier_chain_register(&panic_notifier_list, &panic_nb);
	if (err)
		goto out_reboot;
	return 0;

out_reboot:
	unregister_reboot_notifier(&reboot_nb);
out_sleep:
	unregister_pm_notifier(&sleep_nb);
out_cpus:
	ebb_cpus_forget();
out_memory:
	unregister_memory_notifier(&memory_nb);
	return err;
}

static void remove_notifiers(void)
{
	if (!(ebb_fault & EBB_FAULT_NOTIFIERS)) {
		atomic_notifier_chain_unregister(&panic_notifier_list, &panic_nb);
		unregister_reboot_notifier(&reboot_nb);
		unregister_pm_notifier(&sleep_nb);
	}
	ebb_cpus_forget();
	unregister_memory_notifier(&memory_nb);
}

/*
 * Hooks that could not be taken off go on calling into the module: its code and
 * its map must stay.  At load a reference keeps it from being unloaded; an
 * unload that has begun cannot be refused any more, so it does not end.
 */
static int stay(void)
{
	pr_err("ftrace is broken and its hooks cannot be removed: the module stays, stopped, until the next boot\n");
	__module_get(THIS_MODULE);
	return 0;
}

static void __noreturn stay_for_ever(void)
{
	stay();
	for (;;) {
		set_current_state(TASK_IDLE);
		schedule();
	}
}

static int __init ebb_init(void)
{
	const char *why = ebb_hooks_refuse();
	int err;

	BUILD_BUG_ON(PAGE_SIZE != EBB_PAGE_SIZE);
	BUILD_BUG_ON(EBB_MAP_PFNS % EBB_BLOCK);
	if (why) {
		pr_err("refused: %s\n", why);
		return -EOPNOTSUPP;
	}
	if (order > ilog2(EBB_BLOCK) || ebb_facts_ms < 10) {
		pr_err("refused: order is at most %d, facts_ms at least 10\n", ilog2(EBB_BLOCK));
		return -EINVAL;
	}
	ebb.order = order;
	mutex_init(&ebb.life);
	mutex_init(&ebb.scanning);
	err = make_tables();
	if (err) {
		pr_err("no memory for the map, or none in ZONE_DMA for its header\n");
		return err;
	}
	err = add_notifiers();
	if (err)
		goto out_tables;
	err = ebb_faults_start();
	if (err)
		goto out_notifiers;
	err = ebb_hooks_arm();
	if (err)
		goto out_faults;
	err = start_recording();
	if (err)
		goto out_recording;
	ebb_facts_update();
	ebb_stats_update();
	ebb.thread = kthread_run(work, NULL, "ebb");
	if (IS_ERR(ebb.thread)) {
		err = PTR_ERR(ebb.thread);
		goto out_recording;
	}
	ebb_beat_start();
	show_header(true);
	ebb_debug_init();
	pr_info("free pages are told to the host: %u map pages%s\n", ebb.header->map_pages,
		ebb_fault ? ", HOOKS LEFT OUT" : "");
	return 0;

out_recording:
	ebb_stop_recording(EBB_STOPPED, EBB_WHY_UNLOAD);
	ebb_hooks_disarm();
out_faults:
	ebb_faults_stop();
out_notifiers:
	remove_notifiers();
	if (ebb_hooks_stuck())
		return stay();
out_tables:
	free_tables();
	return err;
}

static void __exit ebb_exit(void)
{
	ebb_debug_exit();
	ebb_stop_recording(EBB_STOPPED, EBB_WHY_UNLOAD);
	ebb_beat_stop();
	kthread_stop(ebb.thread);
	ebb_hooks_disarm();
	ebb_faults_stop();
	remove_notifiers();
	msleep(GRACE_MS);
	show_header(false);
	if (ebb_hooks_stuck())
		stay_for_ever();
	free_tables();
}

module_init(ebb_init);
module_exit(ebb_exit);

MODULE_DESCRIPTION("Tells the host which pages of this guest are free");
MODULE_AUTHOR("Ebb");
MODULE_VERSION(EBB_MODULE_VERSION);
MODULE_LICENSE("GPL");
