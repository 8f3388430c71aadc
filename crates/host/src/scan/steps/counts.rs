//! What a page that was read counts as: noted while it is read, compared with all others when
//! everything is.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use ebb_core::units::PAGE;

use super::{Job, Round, VmState, Worker};
use crate::lock;
use crate::scan::page_hashes::tag;
use crate::scan::rate_limit::thread_cpu;
use crate::scan::savings::{Blocks, Rules, Savings, VmTally};
use crate::scan::table::SHARDS;
use crate::scan::{Changes, Pages, ScanOutcome, Target, VmResult};

impl Worker<'_, '_> {
    /// Notes a page by what stands for it; whether it counts.
    pub(super) fn note(&mut self, address: u64, hash: u128, shared: bool) -> bool {
        let (job, vm, pages) = (self.job, self.vm, &mut self.pages);
        if job.round == Round::Whole {
            // It was, by its lines.
            return true;
        }
        let changes = job.options.changes;
        let tags = job.tags[vm];
        pages.read += 1;
        if changes == Changes::SpotCheck {
            pages.changed += u64::from(!tags.is_some_and(|t| t.still(address, hash)));
            return false;
        }
        if tags.is_some_and(|t| !t.same(address, hash)) {
            pages.changed += 1;
        }
        if let Some(filter) = &job.filter {
            filter.put(tag(hash));
        }
        // What is merged already is no page of this place alone, duplicate or not.
        if !shared {
            job.blocks[vm].read(address, false);
        }
        true
    }

    /// Puts a page that was read whole where it is compared with others; `None`: it is of
    /// zeros.
    pub(super) fn keep(&mut self, address: u64, hash: Option<u128>) {
        match hash {
            Some(hash) => self.filler.push(hash, self.vm as u32, address / PAGE),
            None => {
                self.pages.zero += 1;
                self.job.blocks[self.vm].read(address, true);
            }
        }
    }
}

impl Job<'_> {
    pub fn count(&self, threads: usize) -> Savings {
        if self.options.changes == Changes::SpotCheck {
            return Savings::new(self.targets.len());
        }
        let ended: Vec<bool> = self.vms.iter().map(|v| v.outcome() == ScanOutcome::Ended).collect();
        let rules = Rules { groups: &self.groups, ended: &ended, blocks: &self.blocks };
        let next = AtomicUsize::new(0);
        let all = Mutex::new(Savings::new(self.targets.len()));
        std::thread::scope(|s| {
            for _ in 0..threads {
                s.spawn(|| {
                    self.settle(&mut None);
                    let mut tally = Savings::new(self.targets.len());
                    loop {
                        let (shard, before) = (next.fetch_add(1, Relaxed), thread_cpu());
                        if shard >= SHARDS {
                            break;
                        }
                        self.table.drain(shard, |pages| tally.content(pages, &rules));
                        self.pace.used(0, thread_cpu().saturating_sub(before));
                    }
                    lock(&all).add(&tally);
                });
            }
        });
        let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (vm, state) in self.vms.iter().enumerate().filter(|(vm, _)| !ended[*vm]) {
            let split = all.vms[vm].split(state.pages().zero);
            all.split.zero += split.zero;
        }
        // A page whose lines have no duplicate has none.
        let alone = self.by_lines.load(Relaxed) as f64;
        all.moments.pages += alone;
        all.moments.distinct += alone;
        all.moments.single += alone;
        all
    }

    pub fn results(self, tallies: Vec<VmTally>) -> Vec<VmResult> {
        let parts = self.targets.iter().zip(self.vms).zip(tallies).zip(self.blocks);
        let one = |(((target, state), tally), blocks): (((&Target, VmState), VmTally), Blocks)| {
            let (outcome, mut pages) = (state.outcome(), state.pages());
            if outcome == ScanOutcome::Ended {
                pages = Pages::default();
            }
            VmResult {
                target: target.clone(),
                outcome,
                pages,
                split: tally.split(pages.zero),
                duplicates: tally.duplicates,
                blocks,
            }
        };
        parts.map(one).collect()
    }
}
