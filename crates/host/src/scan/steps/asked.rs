//! Having a VM's agent hash pages: when an agent does, how much it is asked for at once, and
//! what its answers count as.

use std::io::Result;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ebb_core::page_hash::{LINE, LINES};
use ebb_core::units::PAGE;
use ebb_core::wire::hashes::{Ask, PAGES_MAX, RANGES_MAX};

use super::outside::cut;
use super::windows::{GENTLE_LINES, GENTLE_PIECE};
use super::{Job, Round, Worker};
use crate::scan::agents::HashLink;
use crate::scan::duplicate_filter::AHEAD;
use crate::scan::page_hashes::tag;
use crate::scan::{Changes, Pages};
use crate::sys::Range;

impl<'a> Job<'a> {
    /// The agent that hashes pages of a window, if one does.
    pub(super) fn agent(&self, vm: usize, window: Range) -> Option<&'a HashLink> {
        let agent = self.agents.get(&self.targets[vm].id)?;
        let has = |r: &Range| r.start <= window.start && window.end() <= r.end();
        (agent.ram().iter().any(has) && agent.failure().is_none()).then_some(agent)
    }

    /// Whether agents read no more than lines now.
    fn reads_lines(&self) -> bool {
        let look = self.options.filter && self.options.changes == Changes::Look;
        look || self.filter.is_some() && self.round == Round::All
    }
}

impl Worker<'_, '_> {
    /// Has the agent hash runs, and notes them. What is left when it fails is returned.
    pub(super) fn ask(
        &mut self,
        vm: usize,
        agent: &HashLink,
        runs: &[Range],
        shared: bool,
        pages: &mut Pages,
    ) -> Result<Vec<Range>> {
        let job = self.job;
        let lines = job.reads_lines();
        // Looked at once: runs that are longer than a question would never be asked for.
        let most = match job.pace.is_gentle() {
            true if lines => GENTLE_LINES,
            true => GENTLE_PIECE,
            false => (PAGES_MAX * PAGE) as usize,
        };
        let runs: Vec<Range> = runs.iter().flat_map(|r| cut(*r, most)).collect();
        let mut rest = &runs[..];
        while !rest.is_empty() {
            let mut size = 0;
            let fits = |r: &&Range| {
                size += r.len;
                size <= most as u64
            };
            let count = rest.iter().take(RANGES_MAX).take_while(fits).count();
            let (now, after) = rest.split_at(count);
            let ranges: Vec<(u64, u64)> = now.iter().map(|r| (r.start, r.len)).collect();
            let Ok(told) = agent.ask(&Ask { secret: *job.key.secret(), lines, ranges }) else {
                return Ok(rest.to_vec());
            };
            rest = after;
            let asked: u64 = now.iter().map(|r| r.len / PAGE).sum();
            let read = told.pages.len() as u64;
            if job.round == Round::All {
                match job.options.changes {
                    Changes::Look => pages.held += told.held,
                    // Not in memory any more.
                    _ => pages.lost += asked - told.held,
                }
                pages.free += told.free;
                pages.lost += told.held - told.free - read;
                job.by_agents.fetch_add(read, Relaxed);
            }
            for (i, &(number, hash)) in told.pages.iter().enumerate() {
                if let (Some(filter), Some(ahead)) = (&job.filter, told.pages.get(i + AHEAD)) {
                    filter.fetch(tag(ahead.1));
                }
                let address = number * PAGE;
                match self.note(vm, address, hash, shared, pages) {
                    true if lines => job.marks[vm].set(address),
                    true => self.keep(vm, address, Some(hash).filter(|h| *h != 0), pages),
                    false => {}
                }
            }
            let of_page = if lines { (LINES * LINE) as u64 } else { PAGE };
            self.account(read * of_page, Duration::from_nanos(told.cpu_ns));
        }
        Ok(Vec::new())
    }
}
