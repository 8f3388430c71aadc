// SPDX-License-Identifier: GPL-2.0
/*
 * Signs of life: beats, and answers to challenges.
 *
 * Two timers beat.  The lazy one is deferrable: it beats ten times a second
 * where a CPU is awake anyway, and never wakes one.  The other one fires only
 * when the lazy one has not for LIMIT_MS, so that an idle guest beats too, about
 * twice a second; while it is challenged it answers within EBB_CHALLENGED_MS.
 * Each beat winds both up again, on the CPU that is awake.
 *
 * They beat in softirqs, so a guest under load is not taken for a picture of
 * one.  The thread has no clock of its own: beats wake it, so what it does costs
 * no wake-up of a CPU.
 */
#include <linux/jiffies.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/timer.h>
#include <linux/version.h>

#include "ebb.h"

#define LAZY_MS		100
/*
 * EBB_TICK_MS, less what a timer of this length may be late: an eighth of 64
 * jiffies' range, 32 ms with 250 jiffies a second.
 */
#define LIMIT_MS	450
#define CHALLENGED_FOR	(10 * HZ)

static struct timer_list lazy, limit;
static DEFINE_SPINLOCK(beating);
static unsigned long challenged;	/* jiffies of the last new challenge */

/* How long until there must be another beat. */
static unsigned int answer(struct ebb_header *h)
{
	u64 challenge = READ_ONCE(h->challenge), answer = 0;

	if (challenge && READ_ONCE(h->state) == EBB_RUNNING)
		answer = ebb_response(challenge, h->key);
	if (answer && READ_ONCE(h->response) != answer)
		challenged = jiffies;
	WRITE_ONCE(h->response, answer);
	if (answer && time_before(jiffies, challenged + CHALLENGED_FOR))
		return EBB_CHALLENGED_MS;
	return LIMIT_MS;
}

/* Softirq: nothing here may sleep or take long. */
static void on_timer(struct timer_list *t)
{
	struct ebb_header *h = ebb.header;
	unsigned int ms;

	/* The other timer beats right now, and winds up both. */
	if (!spin_trylock(&beating))
		return;
	if (READ_ONCE(h->state) != EBB_STOPPED) {
		/* The host may read between the two: it looks again then. */
		WRITE_ONCE(h->beat, h->beat + 1);
		smp_wmb();
		WRITE_ONCE(h->beat_check, ebb_beat_check(h->beat, h->key));
		ms = answer(h);
		mod_timer(&limit, jiffies + msecs_to_jiffies(ms));
		mod_timer(&lazy, jiffies + msecs_to_jiffies(LAZY_MS));
		wake_up_process(ebb.thread);
	}
	spin_unlock(&beating);
}

void ebb_beat_start(void)
{
	timer_setup(&lazy, on_timer, TIMER_DEFERRABLE);
	timer_setup(&limit, on_timer, 0);
	mod_timer(&limit, jiffies + 1);
}

static void stop(struct timer_list *t)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
	timer_delete_sync(t);
#else
	del_timer_sync(t);
#endif
}

/* Once the state is EBB_STOPPED. */
void ebb_beat_stop(void)
{
	/* Whoever beats now does not know yet, and winds up once more. */
	spin_lock_bh(&beating);
	spin_unlock_bh(&beating);
	stop(&lazy);
	stop(&limit);
}
