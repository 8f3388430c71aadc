//! The VMs' jobs: what each does in every period, and how long it took.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ebb_core::units::Bytes;

use super::{COMMON, Kind, Plan};
use crate::guest::Event;
use crate::vm::Vm;

/// One VM in so many checks what it wrote.
const CHECKED: usize = 8;
/// A check's seconds.
const VERIFY_S: u64 = 2;
/// What such a VM also writes once, and reads in each period: what rests is what is taken.
const KEPT: Bytes = Bytes::mib(16);
/// A report may be so late on a busy machine.
const SLACK: Duration = Duration::from_secs(1);
/// Consoles are looked at this often.
const CHECK_EVERY: Duration = Duration::from_millis(500);

struct Job {
    kind: Kind,
    /// When it begins its next period.
    next: Instant,
    /// When it began this one.
    begun: Option<Instant>,
    /// When it frees what it took.
    free: Option<Instant>,
    /// When the touching began, or will begin, of which a report has not come yet.
    awaited: Instant,
    /// It is a `cycle` of its own, which keeps its times.
    started: bool,
    /// When it checks next, if it is one that does.
    verify: Option<Instant>,
}

/// All jobs, in the order of the VMs.
pub(super) struct Jobs {
    plan: Plan,
    jobs: Vec<Job>,
    /// How long each took to touch its memory, seconds, since this was cleared.
    pub(super) touches: Vec<f64>,
    /// Median of the first two VMs alone; 0 where it is not known.
    pub(super) alone: f64,
    /// Pages that were checked and right.
    pub(super) checks: u64,
    looked: Instant,
    /// Jobs that began before this do not count: they met what is over.
    from: Instant,
}

/// See [`Jobs::gap`]; the times are those from now on.
fn gap(begins: &[Duration], period: Duration) -> Duration {
    let apart = period / (2 * (begins.len() as u32 + 1));
    let mut at = Duration::ZERO;
    let near = |at: Duration, other: Duration| {
        let off = Duration::from_nanos((at.abs_diff(other).as_nanos() % period.as_nanos()) as u64);
        off.min(period - off) < apart
    };
    while at < period && begins.iter().any(|other| near(at, *other)) {
        at += Duration::from_millis(50);
    }
    at
}

impl Jobs {
    pub(super) fn new(plan: Plan) -> Jobs {
        let looked = Instant::now();
        let (jobs, touches, from) = (Vec::new(), Vec::new(), looked);
        Jobs { plan, jobs, touches, alone: 0.0, checks: 0, looked, from }
    }

    /// Counts what begins from now on.
    pub(super) fn count_anew(&mut self) {
        self.touches.clear();
        self.from = Instant::now();
    }

    fn count(&mut self, touch: Duration, since: Duration) {
        if Instant::now().checked_sub(touch + since).is_some_and(|begun| begun >= self.from) {
            self.touches.push(touch.as_secs_f64());
        }
    }

    /// The VM has booted: it reads what all have in common, and begins its job at `start`.
    pub(super) fn add(&mut self, vm: &Vm, start: Instant) -> Result<()> {
        let n = self.jobs.len();
        let read = format!("size={}", COMMON.0);
        let minute = Duration::from_secs(60);
        vm.ask(|tool| tool.start_ready("common", "read", &read, minute))?;
        let kind = match self.plan.job {
            Kind::Mixed => [Kind::Cycle, Kind::Pieces, Kind::Cache][n % 3],
            kind => kind,
        };
        if n % CHECKED == 1 {
            let kept = format!("size={} pattern=random seed={n}", KEPT.0);
            vm.ask(|tool| tool.start_ready("kept", "hold", &kept, minute))?;
        }
        let verify = (n % CHECKED == 1).then_some(start + self.plan.period / 3);
        let (next, awaited) = (start, start);
        let (begun, free, started) = (None, None, false);
        self.jobs.push(Job { kind, next, begun, free, awaited, started, verify });
        Ok(())
    }

    /// Has the jobs begin a fraction of a period apart, from now on. Those that run end.
    pub(super) fn stagger(&mut self, vms: &[Vm]) -> Result<()> {
        let (from, apart) = (Instant::now(), self.plan.period / vms.len().max(1) as u32);
        for (n, (job, vm)) in self.jobs.iter_mut().zip(vms).enumerate() {
            if std::mem::take(&mut job.started) {
                vm.tool().stop("job")?;
            }
            (job.begun, job.free) = (None, None);
            job.next = from + apart * n as u32;
            job.awaited = job.next;
            job.verify = job.verify.map(|_| job.next + self.plan.period / 3);
        }
        Ok(())
    }

    /// The number of a VM whose job should have reported by now that it has touched its memory.
    /// Touching may take `most` seconds. A job that hangs reports nothing.
    pub(super) fn late(&self, most: f64, now: Instant) -> Option<usize> {
        let most = Duration::from_secs_f64(most) + SLACK;
        self.jobs.iter().position(|job| {
            // A cycle says so at its end.
            let kept = if job.kind == Kind::Cycle { self.plan.hold } else { Duration::ZERO };
            now > job.awaited.max(self.from) + kept + most
        })
    }

    /// The next time at which one more job may begin: apart from the times at which others begin
    /// theirs by half of what they would have if they were spread evenly.
    pub(super) fn gap(&self) -> Instant {
        let now = Instant::now();
        let begins: Vec<Duration> = self.jobs.iter().map(|j| j.next - now).collect();
        now + gap(&begins, self.plan.period)
    }

    /// The jobs of these VMs have ended with them.
    pub(super) fn drop_lost(&mut self, lost: &[bool]) {
        let mut each = lost.iter();
        self.jobs.retain(|_| !each.next().is_some_and(|lost| *lost));
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.jobs.truncate(len);
    }

    /// Runs until every VM has touched its memory once.
    pub(super) fn until_touched(&mut self, vms: &[Vm], most: Duration) -> Result<Vec<f64>> {
        let until = Instant::now() + most + Duration::from_secs(60);
        while self.touches.len() < vms.len() {
            if let Some(harm) = self.step(vms)? {
                bail!("the first VMs: {harm}");
            }
            if Instant::now() > until {
                bail!("the first VMs' jobs did not touch their memory");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(self.touches.clone())
    }

    /// Begins and ends what is due, and takes what was said; harm, if there was some.
    pub(super) fn step(&mut self, vms: &[Vm]) -> Result<Option<String>> {
        let look = self.looked.elapsed() >= CHECK_EVERY;
        if look {
            self.looked = Instant::now();
        }
        for (n, vm) in vms.iter().enumerate() {
            if look && let Err(e) = vm.check() {
                let why = e.to_string();
                return Ok(Some(why.lines().next().unwrap_or_default().to_string()));
            }
            for event in vm.tool().take_events() {
                if let Some(harm) = self.hear(n, vm, &event) {
                    return Ok(Some(harm));
                }
            }
            if let Err(e) = self.due(n, vm) {
                return Ok(Some(format!("{}: {e:#}", vm.name)));
            }
        }
        Ok(None)
    }

    fn hear(&mut self, n: usize, vm: &Vm, event: &Event) -> Option<String> {
        let job = &mut self.jobs[n];
        match (event.job.as_str(), event.name.as_str(), job.kind) {
            ("job", "progress", Kind::Cycle) => {
                let touch = Duration::from_nanos(event.fields.u64("touch_ns"));
                let (now, took) = (Instant::now(), touch + self.plan.hold);
                job.awaited = now.checked_sub(took).unwrap_or(now) + self.plan.period;
                self.count(touch, self.plan.hold);
            }
            ("job", "ready", Kind::Pieces | Kind::Cache) => {
                let begun = job.begun.take()?;
                job.awaited = job.next;
                job.free = (job.kind == Kind::Pieces).then(|| Instant::now() + self.plan.hold);
                self.count(begun.elapsed(), Duration::ZERO);
            }
            ("kept", "progress", _) => {
                if event.fields.u64("errors") > 0 || event.fields.u64("checks") == 0 {
                    return Some(format!("{} read what it did not write: {event:?}", vm.name));
                }
                self.checks += event.fields.u64("checks");
            }
            ("verify", "exit", _) => {
                let stat = vm.tool().stat("verify").ok()?;
                if event.fields.str("state") == "failed" || stat.u64("errors") > 0 {
                    return Some(format!("{} read what it did not write: {:?}", vm.name, stat.0));
                }
                if event.fields.str("state") == "killed" {
                    return Some(format!("{} lost its check to the OOM killer", vm.name));
                }
                self.checks += stat.u64("checks");
            }
            // What was stopped says so too.
            (_, "exit", _) if event.fields.str("state") != "stopped" => {
                return Some(format!("{} lost a job: {event:?}", vm.name));
            }
            _ => {}
        }
        None
    }

    fn due(&mut self, n: usize, vm: &Vm) -> Result<()> {
        let (plan, job, now) = (&self.plan, &mut self.jobs[n], Instant::now());
        let tool = vm.tool();
        if job.verify.is_some_and(|at| now >= at) {
            job.verify = Some(now + plan.period);
            let size = plan.memory.0 / 8;
            let arguments = format!("size={size} seconds={VERIFY_S} seed={n}");
            tool.poke("kept").context("kept")?;
            tool.start("verify", "verify", &arguments).context("verify")?;
        }
        if job.free.is_some_and(|at| now >= at) {
            job.free = None;
            tool.poke("job").context("poke")?;
        }
        if now < job.next {
            return Ok(());
        }
        job.next = now.max(job.next + plan.period);
        if job.next < now + plan.period / 2 {
            job.next = now + plan.period;
        }
        let size = plan.size.0;
        match job.kind {
            Kind::Cycle if job.started => {}
            Kind::Cycle => {
                let arguments = format!(
                    "size={size} base=4096 period_ms={} hold_ms={} pattern=touch seed={n}",
                    plan.period.as_millis(),
                    plan.hold.as_millis()
                );
                tool.start("job", "cycle", &arguments)?;
            }
            Kind::Pieces | Kind::Cache | Kind::Mixed => {
                if job.started {
                    tool.stop("job")?;
                }
                (job.begun, job.awaited) = (Some(now), now);
                if job.kind == Kind::Cache {
                    tool.start("job", "read", &format!("size={size}"))?;
                } else {
                    let size = size & !((128 << 10) - 1);
                    tool.start("job", "pieces", &format!("size={size} piece=65536"))?;
                }
            }
        }
        self.jobs[n].started = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_never_says_that_it_has_touched_its_memory_is_late() {
        let plan = Plan {
            memory: Bytes::mib(512),
            budget: Bytes::gib(2),
            period: Duration::from_secs(40),
            hold: Duration::from_secs(2),
            size: Bytes::mib(384),
            job: Kind::Mixed,
            step: 1,
        };
        let mut jobs = Jobs::new(plan);
        let from = jobs.from;
        let at = |s| from + Duration::from_secs(s);
        let job = |kind, awaited| Job {
            kind,
            next: awaited,
            begun: None,
            free: None,
            awaited,
            started: true,
            verify: None,
        };
        jobs.jobs = vec![job(Kind::Cycle, at(10)), job(Kind::Cache, at(20))];
        assert_eq!(jobs.late(3.0, at(16)), None, "3 s to touch, 2 s kept, 1 s of slack");
        assert_eq!(jobs.late(3.0, at(17)), Some(0));
        jobs.jobs.remove(0);
        assert_eq!(jobs.late(3.0, at(24)), None, "what reads a file keeps nothing");
        assert_eq!(jobs.late(3.0, at(25)), Some(0));
        jobs.from = at(30);
        assert_eq!(jobs.late(3.0, at(34)), None, "it may still meet what is over");
        assert_eq!(jobs.late(3.0, at(35)), Some(0), "but not for good");
    }

    #[test]
    fn a_further_job_begins_soon_and_apart_from_the_others() {
        let s = Duration::from_secs_f64;
        assert_eq!(gap(&[], s(40.0)), s(0.0));
        // Two others: a sixth of a period.
        assert_eq!(gap(&[s(10.0), s(30.0)], s(40.0)), s(0.0));
        assert_eq!(gap(&[s(0.0), s(10.0)], s(40.0)), s(16.7));
        assert_eq!(gap(&[s(39.0), s(5.0)], s(40.0)), s(11.7), "they come again each period");
        let mut begins = Vec::new();
        for _ in 0..12 {
            begins.push(gap(&begins, s(40.0)));
            assert!(begins.iter().all(|b| *b < s(40.0)), "there is always one: {begins:?}");
        }
    }
}
