// SPDX-License-Identifier: GPL-2.0
/*
 * ebb: tells the host which pages of this guest are free.
 *
 * The module keeps a map in its own memory with one bit for each 4 KiB page:
 * *bit set => the page is in the buddy allocator now*.  A missing bit costs the
 * host an opportunity, a false one somebody's data, so everything here errs one
 * way.  ebb_abi.h has what the host sees, and the order of things it may rely
 * on; tables.c has what the map is made of; hooks.c has where bits change;
 * scan.c repairs what hooks missed.
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
#include <linux/kthread.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/panic_notifier.h>
#include <linux/reboot.h>
#include <linux/suspend.h>

#include "ebb.h"

#if !defined(CONFIG_X86_64) || !defined(CONFIG_ZONE_DMA)
#error "x86-64 with ZONE_DMA only: the host searches the first 16 MiB"
#endif

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

/* On error remove_notifiers() is due. */
static int add_notifiers(void)
{
	int err = ebb_memory_watch();

	if (!err)
		err = ebb_cpus_watch();
	if (err || (ebb_fault & EBB_FAULT_NOTIFIERS))
		return err;
	err = register_pm_notifier(&sleep_nb);
	if (!err)
		err = register_reboot_notifier(&reboot_nb);
	if (!err)
		err = atomic_notifier_chain_register(&panic_notifier_list, &panic_nb);
	return err;
}

/* Those that were not added are passed over: a chain knows what is in it. */
static void remove_notifiers(void)
{
	atomic_notifier_chain_unregister(&panic_notifier_list, &panic_nb);
	unregister_reboot_notifier(&reboot_nb);
	unregister_pm_notifier(&sleep_nb);
	ebb_cpus_forget();
	ebb_memory_forget();
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
	err = ebb_tables_make();
	if (err) {
		pr_err("no memory for the map, or none in ZONE_DMA for its header\n");
		return err;
	}
	err = add_notifiers();
	if (!err)
		err = ebb_faults_start();
	if (!err)
		err = ebb_hooks_arm();
	if (!err)
		err = start_recording();
	if (err)
		goto out;
	ebb_facts_update();
	ebb_stats_update();
	ebb.thread = kthread_run(work, NULL, "ebb");
	err = PTR_ERR_OR_ZERO(ebb.thread);
	if (err)
		goto out;
	ebb_beat_start();
	show_header(true);
	ebb_debug_init();
	pr_info("free pages are told to the host: %u map pages%s\n", ebb.header->map_pages,
		ebb_fault ? ", HOOKS LEFT OUT" : "");
	return 0;

out:	/* Each undoes what was done of it. */
	ebb_stop_recording(EBB_STOPPED, EBB_WHY_UNLOAD);
	ebb_hooks_disarm();
	ebb_faults_stop();
	remove_notifiers();
	if (ebb_hooks_stuck())
		return stay();
	ebb_tables_free();
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
	ebb_tables_free();
}

module_init(ebb_init);
module_exit(ebb_exit);

MODULE_DESCRIPTION("Tells the host which pages of this guest are free");
MODULE_AUTHOR("Ebb");
MODULE_VERSION(EBB_MODULE_VERSION);
MODULE_LICENSE("GPL");
