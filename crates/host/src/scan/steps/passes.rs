//! What each `Round` does with one window of one VM: read what is in memory,
//! sift what is known by lines, read the rest whole.

use std::fs::File;
use std::io::Result;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Worker;
use super::windows::SAMPLE;
use crate::scan::agents::HashLink;
use crate::scan::walk::{Runs, Walker};
use crate::scan::{Changes, Pages};
use crate::sys::Range;

impl Worker<'_, '_> {
    pub(super) fn window(&mut self, vm: usize, window: Range, pages: &mut Pages) -> Result<()> {
        let (job, target) = (self.job, &self.job.targets[vm]);
        let look = job.options.changes == Changes::Look;
        if look && let Some(agent) = job.agent(vm, window) {
            // It lists pages itself, and pins none.
            let pieces = job.glances(vm, window);
            // What it leaves out when it fails others will look at.
            return self.ask(vm, agent, &pieces, false, pages).map(drop);
        }
        if self.walker.as_ref().is_none_or(|(of, _)| *of != vm) {
            let (pid, merged) = (target.id.pid, !target.merged.is_empty());
            self.memory = None;
            if merged {
                self.memory = Some(File::open(job.root.path(format!("/proc/{pid}/mem")))?);
            }
            self.walker = Some((vm, Walker::open(job.root, pid, merged, job.options.listing)?));
        }
        let Some((_, walker)) = self.walker.as_mut() else { return Ok(()) };
        let mut runs = std::mem::take(&mut self.runs);
        runs.clear();
        let chosen = if look { job.glances(vm, window) } else { vec![window] };
        for part in chosen {
            pages.merged += walker.runs(part, &target.merged, &job.seen, &mut runs)?;
        }
        pages.held += runs.pages();
        if job.options.one_in > 1 && !look {
            let sample = |runs: &[Range]| job.sample(vm, runs, SAMPLE);
            runs = Runs { own: sample(&runs.own), shared: sample(&runs.shared) };
        }
        let agent = job.agent(vm, window);
        let done = self.read(vm, agent, &runs.own, false, pages);
        let done = done.and_then(|()| self.read(vm, agent, &runs.shared, true, pages));
        self.runs = runs;
        done
    }

    /// Leaves out pages that are alone by their lines.
    pub(super) fn sift(&mut self, vm: usize, window: Range) -> Result<()> {
        let job = self.job;
        if let (Some(filter), Some(tags)) = (&job.filter, job.tags[vm]) {
            let alone = job.marks[vm].sift(window, tags, filter);
            job.by_lines.fetch_add(alone, Relaxed);
            self.account(0, Duration::ZERO);
        }
        Ok(())
    }

    /// Has pages read whole of which only lines were read.
    pub(super) fn whole(&mut self, vm: usize, window: Range, pages: &mut Pages) -> Result<()> {
        let runs = self.job.marks[vm].runs(window);
        let rest = match self.job.agent(vm, window) {
            Some(agent) => self.ask(vm, agent, &runs, false, pages)?,
            None => runs,
        };
        if !rest.is_empty() {
            // Its agent has failed meanwhile. Some of it may be merged.
            let pid = self.job.targets[vm].id.pid;
            self.memory = Some(File::open(self.job.root.path(format!("/proc/{pid}/mem")))?);
            self.read_from_outside(vm, &rest, true, pages)?;
        }
        Ok(())
    }

    /// Reads runs, or has them read; `shared`: without pinning a page.
    fn read(
        &mut self,
        vm: usize,
        agent: Option<&HashLink>,
        runs: &[Range],
        shared: bool,
        pages: &mut Pages,
    ) -> Result<()> {
        let rest = match agent {
            Some(agent) => self.ask(vm, agent, runs, shared, pages)?,
            None => runs.to_vec(),
        };
        self.read_from_outside(vm, &rest, shared, pages)
    }
}
