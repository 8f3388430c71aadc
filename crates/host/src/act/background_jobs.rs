//! Orders about single VMs that take longer than a tick: a thread for each mechanism carries
//! them out one after another, and later samples show the results.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex};

use ebb_core::sample::VmId;
use ebb_core::task::{Orders, TaskOrder, Tasks};

use super::worker;
use crate::lock;
use crate::root::Root;

/// Orders that may wait: one a VM is enough, and few are given at a time.
const WAITING: usize = 64;

/// What a sample tells of a VM's orders.
pub(crate) trait TaskSample: Clone + Default + Send + Debug + 'static {
    /// Adds what one more order has done; by default it has done nothing.
    fn add(&mut self, done: Self);
}

/// An order came to its end, or could not be given.
fn over<O: TaskOrder<Sample: TaskSample>>(sample: &mut O::Sample, done: Result<O::Sample, String>) {
    let failed = done.as_ref().err().cloned();
    sample.add(done.unwrap_or_default());
    let (busy, error) = O::state(sample);
    (*busy, *error) = (false, failed);
}

/// Whose memory an order is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At<'a> {
    pub root: &'a Root,
    pub vm: VmId,
    /// The directory of its memory cgroup, where that is known.
    pub cgroup: Option<&'a Path>,
}

/// Carries an order out; the last argument is kept for the VM's next one.
pub(crate) type Work<O, C> = fn(At<'_>, &O, &mut C) -> Result<<O as TaskOrder>::Sample, String>;

/// A mechanism that works beside the loop.
pub(crate) trait Background: Debug + Send {
    /// Has its orders of a plan carried out after what was ordered before. `cgroup` tells the
    /// directory of a VM's memory cgroup.
    fn order(&mut self, orders: &Orders, cgroup: &dyn Fn(VmId) -> Option<PathBuf>);
    /// What its orders about a VM have done.
    fn tell(&self, vm: VmId, tasks: &mut Tasks);
    /// Forgets all others.
    fn keep(&mut self, alive: &dyn Fn(&VmId) -> bool);
}

type Shared<S> = Arc<Mutex<BTreeMap<VmId, S>>>;

/// An order, and the directory of its VM's memory cgroup.
type Job<O> = (O, Option<PathBuf>);

#[derive(Debug)]
pub(crate) struct BackgroundJobs<O: TaskOrder<Sample: TaskSample>, C> {
    root: Root,
    name: &'static str,
    work: Work<O, C>,
    jobs: Option<SyncSender<Job<O>>>,
    samples: Shared<O::Sample>,
}

impl<O: TaskOrder<Sample: TaskSample>, C: Default + 'static> BackgroundJobs<O, C> {
    pub fn new(root: &Root, name: &'static str, work: Work<O, C>) -> BackgroundJobs<O, C> {
        BackgroundJobs { root: root.clone(), name, work, jobs: None, samples: Arc::default() }
    }

    fn begin(&mut self, job: Job<O>) {
        let jobs = self.jobs.get_or_insert_with(|| {
            let (root, samples, work) = (self.root.clone(), self.samples.clone(), self.work);
            worker(self.name, WAITING, move |jobs| run(&root, &jobs, &samples, work))
        });
        // Held while it is sent: its end must not be told before its beginning.
        let mut samples = lock(&self.samples);
        let sample = samples.entry(job.0.vm()).or_default();
        match jobs.try_send(job) {
            Ok(()) => *O::state(sample).0 = true,
            Err(e) => over::<O>(sample, Err(format!("cannot be ordered: {e}"))),
        }
    }
}

impl<O: TaskOrder<Sample: TaskSample>, C: Default + Debug + 'static> Background
    for BackgroundJobs<O, C>
{
    fn order(&mut self, orders: &Orders, cgroup: &dyn Fn(VmId) -> Option<PathBuf>) {
        for order in O::list(orders) {
            self.begin((order.clone(), cgroup(order.vm())));
        }
    }

    fn tell(&self, vm: VmId, tasks: &mut Tasks) {
        *O::sample(tasks) = lock(&self.samples).get(&vm).cloned();
    }

    fn keep(&mut self, alive: &dyn Fn(&VmId) -> bool) {
        lock(&self.samples).retain(|id, _| alive(id));
    }
}

fn run<O: TaskOrder<Sample: TaskSample>, C: Default>(
    root: &Root,
    jobs: &Receiver<Job<O>>,
    samples: &Shared<O::Sample>,
    work: Work<O, C>,
) {
    let mut kept: BTreeMap<VmId, C> = BTreeMap::new();
    while let Ok((order, cgroup)) = jobs.recv() {
        let vm = order.vm();
        let at = At { root, vm, cgroup: cgroup.as_deref() };
        let outcome = work(at, &order, kept.entry(vm).or_default());
        if kept.len() > 10 * WAITING {
            kept.clear();
        }
        // A VM that was forgotten meanwhile stays so.
        if let Some(sample) = lock(samples).get_mut(&vm) {
            over::<O>(sample, outcome);
        }
    }
}
