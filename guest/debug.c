// SPDX-License-Identifier: GPL-2.0
/*
 * /sys/kernel/debug/ebb: `audit` compares every bit with the buddy allocator
 * when it is read, `stats` tells what the header tells.  Lines of "name value".
 */
#include <linux/debugfs.h>
#include <linux/ktime.h>
#include <linux/seq_file.h>

#include "ebb.h"

static void line(struct seq_file *m, const char *name, u64 value)
{
	seq_printf(m, "%s %llu\n", name, value);
}

static int audit_show(struct seq_file *m, void *v)
{
	struct ebb_look sum;
	u64 passing, t = ktime_get_ns();
	int err = ebb_audit(&sum, &passing);

	if (err)
		return err;
	line(m, "pages", sum.pages);
	line(m, "free", sum.free);
	line(m, "set", sum.set);
	line(m, "false", sum.wrong);
	line(m, "missed", sum.missed);
	line(m, "passing", passing);
	if (sum.wrong)
		line(m, "first_false", sum.first_wrong);
	line(m, "ms", (ktime_get_ns() - t) / NSEC_PER_MSEC);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(audit);

static int stats_show(struct seq_file *m, void *v)
{
	const struct ebb_header *h = ebb.header;
	const struct ebb_stats *s = &h->stats;

	ebb_stats_update();
	line(m, "state", h->state);
	line(m, "reason", h->reason);
	line(m, "beat", h->beat);
	line(m, "header", h->self_gpa);
	line(m, "map_pages", h->map_pages);
	line(m, "extent_pages", h->extent_pages);
	line(m, "generation", h->generation);
	line(m, "order", h->order);
	line(m, "fault", ebb_fault);
	line(m, "set", s->set);
	line(m, "cleared", s->cleared);
	line(m, "repaired", s->repaired);
	line(m, "late", s->late);
	line(m, "suspect", s->suspect);
	line(m, "leaked", s->leaked);
	line(m, "hints", s->hints);
	line(m, "hints_lost", s->hints_lost);
	line(m, "scans", s->scans);
	line(m, "scan_pages", s->scan_pages);
	line(m, "scan_hold_ns", s->scan_hold_ns);
	line(m, "uncovered", s->uncovered);
	line(m, "drains", s->drains);
#ifdef EBB_FAULTS
	line(m, "taken_between", ebb_faults_taken());
#endif
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

/* Nothing depends on it: a kernel without debugfs gets none. */
void ebb_debug_init(void)
{
	ebb.debug = debugfs_create_dir("ebb", NULL);
	debugfs_create_file("audit", 0400, ebb.debug, NULL, &audit_fops);
	debugfs_create_file("stats", 0400, ebb.debug, NULL, &stats_fops);
}

void ebb_debug_exit(void)
{
	debugfs_remove_recursive(ebb.debug);
}
