// SPDX-License-Identifier: GPL-2.0
/*
 * What the guest says of itself, into the header page: memory pressure without
 * an exit.  Written by the module's thread alone, every facts_ms.
 */
#include <linux/atomic.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/swap.h>
#include <linux/timekeeping.h>
#include <linux/vmstat.h>

#include "ebb.h"

static u64 over_zones(const unsigned long *events, unsigned int first)
{
	u64 sum = 0;
	unsigned int i;

	/* One item a zone, in the order of enum zone_type. */
	for (i = 0; i <= ZONE_MOVABLE; i++)
		sum += events[first + i];
	return sum;
}

static u64 node_pages(enum node_stat_item item)
{
	return global_node_page_state_pages(item);
}

static void fill(struct ebb_facts *f, const struct sysinfo *si, const unsigned long *ev)
{
	u64 file = node_pages(NR_FILE_PAGES);

	f->time_ns = ktime_get_boottime_ns();
	f->total = si->totalram;
	f->free = si->freeram;
	f->available = si_mem_available();
	f->cached = file - min_t(u64, file, si->bufferram);
	f->buffers = si->bufferram;
	f->shmem = si->sharedram;
	f->anon = node_pages(NR_ANON_MAPPED);
	f->slab_reclaimable = node_pages(NR_SLAB_RECLAIMABLE_B);
	f->swap_free = max_t(s64, get_nr_swap_pages(), 0);
	f->alloc = over_zones(ev, PGALLOC_NORMAL - ZONE_NORMAL);
	f->freed = ev[PGFREE];
	f->alloc_stall = over_zones(ev, ALLOCSTALL_NORMAL - ZONE_NORMAL);
	f->scan_direct = ev[PGSCAN_DIRECT];
	f->steal_direct = ev[PGSTEAL_DIRECT];
	f->scan_kswapd = ev[PGSCAN_KSWAPD];
	f->steal_kswapd = ev[PGSTEAL_KSWAPD];
	f->refault_anon = node_pages(WORKINGSET_REFAULT_ANON);
	f->refault_file = node_pages(WORKINGSET_REFAULT_FILE);
	f->oom_kill = ev[OOM_KILL];
	f->swap_in = ev[PSWPIN];
	f->swap_out = ev[PSWPOUT];
	f->major_fault = ev[PGMAJFAULT];
	f->compact_stall = ev[COMPACTSTALL];
}

void ebb_facts_update(void)
{
	struct ebb_facts *f = &ebb.header->facts;
	struct sysinfo si = { };

	si_meminfo(&si);
	all_vm_events(ebb.events);
	WRITE_ONCE(f->seq, f->seq + 1);
	smp_wmb();
	f->fields = 24;
	fill(f, &si, ebb.events);
	smp_wmb();
	WRITE_ONCE(f->seq, f->seq + 1);
}

void ebb_stats_update(void)
{
	struct ebb_stats *s = &ebb.header->stats;
	u64 set = 0, cleared = 0, late = 0, leaked = 0;
	int cpu;

	for_each_possible_cpu(cpu) {
		const struct ebb_counts *c = per_cpu_ptr(ebb.counts, cpu);

		set += READ_ONCE(c->set);
		cleared += READ_ONCE(c->cleared);
		late += READ_ONCE(c->late);
		leaked += READ_ONCE(c->leaked);
	}
	WRITE_ONCE(s->set, set);
	WRITE_ONCE(s->cleared, cleared);
	WRITE_ONCE(s->late, late);
	WRITE_ONCE(s->leaked, leaked);
	WRITE_ONCE(s->repaired, ebb.repaired);
	WRITE_ONCE(s->suspect, ebb.suspect);
	WRITE_ONCE(s->hints, atomic64_read(&ebb.hints));
	WRITE_ONCE(s->hints_lost, atomic64_read(&ebb.hints_lost));
	WRITE_ONCE(s->scans, ebb.scans);
	WRITE_ONCE(s->scan_pages, ebb.scan_pages);
	WRITE_ONCE(s->scan_hold_ns, ebb.scan_hold_ns);
	WRITE_ONCE(s->drains, ebb.drains);
}
