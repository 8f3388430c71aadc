//! Orders about single VMs that take longer than a tick: a thread of their own carries
//! them out one after another, and later samples show the results.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_core::sample::VmId;

use crate::root::Root;

/// Orders that may wait: one a VM is enough, and few are given at a time.
const WAITING: usize = 64;

/// What a sample tells of a VM's orders.
pub(crate) trait Told: Clone + Default + Send + std::fmt::Debug + 'static {
    /// What carrying one out results in.
    type Done;
    fn busy(&mut self);
    /// One came to its end, or could not be given.
    fn over(&mut self, done: Result<Self::Done, String>);
}

/// Carries an order out; the last argument is kept for the VM's next one.
pub(crate) type Work<J, S, C> = fn(&Root, VmId, &J, &mut C) -> Result<<S as Told>::Done, String>;

type Shared<S> = Arc<Mutex<BTreeMap<VmId, S>>>;

fn lock<S>(told: &Shared<S>) -> MutexGuard<'_, BTreeMap<VmId, S>> {
    told.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub(crate) struct BackgroundJobs<J, S: Told, C> {
    root: Root,
    name: &'static str,
    work: Work<J, S, C>,
    jobs: Option<SyncSender<(VmId, J)>>,
    told: Shared<S>,
}

impl<J: Send + 'static, S: Told, C: Default + 'static> BackgroundJobs<J, S, C> {
    pub fn new(root: Root, name: &'static str, work: Work<J, S, C>) -> BackgroundJobs<J, S, C> {
        BackgroundJobs { root, name, work, jobs: None, told: Arc::default() }
    }

    /// Has it carried out after what was ordered before.
    pub fn order(&mut self, vm: VmId, job: J) {
        let jobs = self.jobs.get_or_insert_with(|| {
            let (send, receive) = sync_channel(WAITING);
            let (root, told, work) = (self.root.clone(), self.told.clone(), self.work);
            // Without a thread the channel is closed, which the order below tells.
            let _ = std::thread::Builder::new()
                .name(self.name.into())
                .spawn(move || run(&root, &receive, &told, work));
            send
        });
        // Held while it is sent: its end must not be told before its beginning.
        let mut told = lock(&self.told);
        let sample = told.entry(vm).or_default();
        match jobs.try_send((vm, job)) {
            Ok(()) => sample.busy(),
            Err(e) => sample.over(Err(format!("cannot be ordered: {e}"))),
        }
    }

    pub fn sample(&self, vm: VmId) -> Option<S> {
        lock(&self.told).get(&vm).cloned()
    }

    pub fn keep(&mut self, alive: impl Fn(&VmId) -> bool) {
        if self.jobs.is_some() {
            lock(&self.told).retain(|id, _| alive(id));
        }
    }
}

fn run<J, S: Told, C: Default>(
    root: &Root,
    jobs: &Receiver<(VmId, J)>,
    told: &Shared<S>,
    work: Work<J, S, C>,
) {
    let mut kept: BTreeMap<VmId, C> = BTreeMap::new();
    while let Ok((vm, job)) = jobs.recv() {
        let done = work(root, vm, &job, kept.entry(vm).or_default());
        if kept.len() > 10 * WAITING {
            kept.clear();
        }
        // A VM that was forgotten meanwhile stays so.
        if let Some(sample) = lock(told).get_mut(&vm) {
            sample.over(done);
        }
    }
}
