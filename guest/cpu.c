// SPDX-License-Identifier: GPL-2.0
/*
 * CPUs that come and go.
 *
 * A tracepoint is silent on a CPU that is not cpu_online(): between its last
 * moments online and its death, and between its start and its first moments
 * online, a CPU can take pages that no hook sees.  So the map is empty while a
 * CPU is between the two, and is made anew afterwards.
 *
 *	up	ebb:prepare, before the CPU starts	leave
 *		ebb:online, once it is online		settle
 *	down	ebb:online, while it still is		leave
 *		ebb:prepare, once it is dead		settle
 *
 * What fails half-way goes back through the callback that it came through.
 */
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/cpumask.h>

#include "ebb.h"

static struct cpumask between;		/* under ebb.life */
static enum cpuhp_state prepare, online;

/* Whether every CPU is online or dead. */
bool ebb_cpus_settled(void)
{
	lockdep_assert_held(&ebb.life);
	return cpumask_empty(&between);
}

static int leave(unsigned int cpu)
{
	mutex_lock(&ebb.life);
	cpumask_set_cpu(cpu, &between);
	mutex_unlock(&ebb.life);
	ebb_stop_recording(EBB_QUIET, EBB_WHY_CPU);
	return 0;
}

static int settle(unsigned int cpu)
{
	mutex_lock(&ebb.life);
	cpumask_clear_cpu(cpu, &between);
	mutex_unlock(&ebb.life);
	/* The thread makes the map anew, with its next beat. */
	return 0;
}

/* Both or none, with no CPU on its way from one to the other. */
int ebb_cpus_watch(void)
{
	int err;

	if (ebb_fault & EBB_FAULT_CPUS)
		return 0;
	cpus_read_lock();
	err = cpuhp_setup_state_nocalls_cpuslocked(CPUHP_BP_PREPARE_DYN, "ebb:prepare",
						   leave, settle);
	if (err < 0)
		goto out;
	prepare = err;
	err = cpuhp_setup_state_nocalls_cpuslocked(CPUHP_AP_ONLINE_DYN, "ebb:online",
						   settle, leave);
	if (err < 0)
		__cpuhp_remove_state_cpuslocked(prepare, false);
	else
		online = err;
out:
	cpus_read_unlock();
	return min(err, 0);
}

void ebb_cpus_forget(void)
{
	if (!online)
		return;
	cpus_read_lock();
	__cpuhp_remove_state_cpuslocked(online, false);
	__cpuhp_remove_state_cpuslocked(prepare, false);
	cpus_read_unlock();
}
