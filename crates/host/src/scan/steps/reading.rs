//! Reading a VM's pages: by its agent, which hashes them, or from outside its process, piece by
//! piece. Here is when an agent does it, how much it is asked for at once, what its answers count
//! as, and what becomes of pages that have gone meanwhile.

use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ebb_core::page_hash::{LINE, LINES};
use ebb_core::range::batches;
use ebb_core::units::PAGE;
use ebb_core::wire::hashes::{HashRequest, PAGES_MAX, RANGES_MAX};
use rustix::io::Errno;

use super::windows::{GENTLE_LINES, GENTLE_PIECE, PIECE};
use super::{Job, Round, Worker};
use crate::scan::Changes;
use crate::scan::agents::HashLink;
use crate::scan::duplicate_filter::AHEAD;
use crate::scan::page_hashes::tag;
use crate::scan::savings::LINES_READ;
use crate::sys::{Range, VECTOR_MAX, read_process};

impl<'a> Job<'a> {
    /// The agent that hashes pages of a window, if one does.
    pub(super) fn agent(&self, vm: usize, window: Range) -> Option<&'a HashLink> {
        let agent = self.agents.get(&self.targets[vm].id)?;
        let has = |r: &Range| r.start <= window.start && window.end() <= r.end();
        (agent.ram.iter().any(has) && agent.failure().is_none()).then_some(agent)
    }

    /// Whether agents read no more than lines now.
    fn reads_lines(&self) -> bool {
        let spot_check = self.options.filter && self.options.changes == Changes::SpotCheck;
        spot_check || self.filter.is_some() && self.round == Round::All
    }
}

impl Worker<'_, '_> {
    /// Has the agent hash runs, and notes them. What is left when it fails is returned: all, where
    /// there is none.
    pub(super) fn ask(
        &mut self,
        agent: Option<&HashLink>,
        runs: &[Range],
        shared: bool,
    ) -> Result<Vec<Range>> {
        let Some(agent) = agent else { return Ok(runs.to_vec()) };
        let job = self.job;
        let lines = job.reads_lines();
        let most = match job.pace.is_gentle() {
            true if lines => GENTLE_LINES,
            true => GENTLE_PIECE,
            false => PAGES_MAX * PAGE,
        };
        let questions = batches(runs.iter().copied(), most, RANGES_MAX);
        for (i, now) in questions.iter().enumerate() {
            let ranges = now.clone();
            let Ok(reply) = agent.ask(&HashRequest { secret: *job.key.secret(), lines, ranges })
            else {
                return Ok(questions[i..].concat());
            };
            let asked: u64 = now.iter().map(|r| r.len / PAGE).sum();
            let read = reply.pages.len() as u64;
            if job.round == Round::All {
                let pages = &mut self.pages;
                match job.options.changes {
                    Changes::SpotCheck => pages.held += reply.held,
                    // Not in memory any more.
                    _ => pages.lost += asked - reply.held,
                }
                pages.free += reply.free;
                pages.lost += reply.held - reply.free - read;
                job.by_agents.fetch_add(read, Relaxed);
            }
            for (i, &(number, hash)) in reply.pages.iter().enumerate() {
                if let (Some(filter), Some(ahead)) = (&job.filter, reply.pages.get(i + AHEAD)) {
                    filter.fetch(tag(ahead.1));
                }
                let address = number * PAGE;
                match self.note(address, hash, shared) {
                    true if lines => job.blocks[self.vm].set(address, LINES_READ),
                    true => self.keep(address, Some(hash).filter(|h| *h != 0)),
                    false => {}
                }
            }
            let of_page = if lines { (LINES * LINE) as u64 } else { PAGE };
            self.account(read * of_page, Duration::from_nanos(reply.cpu_ns));
        }
        Ok(Vec::new())
    }

    /// Reads runs, piece by piece; `shared`: without pinning a page.
    pub(super) fn read_from_outside(&mut self, runs: &[Range], shared: bool) -> Result<()> {
        let most = if self.job.pace.is_gentle() { GENTLE_PIECE } else { PIECE };
        let mut pieces = batches(runs.iter().copied(), most, VECTOR_MAX).into_iter();
        pieces.try_for_each(|piece| self.piece(piece, shared))
    }

    /// Copies and notes a piece; pages that went away are passed over.
    fn piece(&mut self, mut piece: Vec<Range>, shared: bool) -> Result<()> {
        let pid = self.job.targets[self.vm].id.pid;
        let mut bytes = 0;
        while !piece.is_empty() {
            let copied = match self.memory.as_ref().filter(|_| shared) {
                Some(memory) => read_gently(memory, &piece, &mut self.buffer),
                None => read_process(pid, &piece, &mut self.buffer),
            };
            let n = match copied {
                Ok(n) => n as u64 / PAGE * PAGE,
                Err(e) if Errno::from_io_error(&e) == Some(Errno::FAULT) => 0,
                Err(e) => return Err(e),
            };
            bytes += n;
            self.note_all(&piece, n, shared);
            if n < piece.iter().map(|r| r.len).sum() {
                // The page at which it ended cannot be read.
                drop_front(&mut piece, n + PAGE);
                self.pages.lost += 1;
            } else {
                piece.clear();
            }
        }
        self.account(bytes, Duration::ZERO);
        Ok(())
    }

    /// Notes the first `n` bytes of the buffer, which came from these places.
    fn note_all(&mut self, places: &[Range], n: u64, shared: bool) {
        let addresses = places.iter().flat_map(|p| (p.start..p.end()).step_by(PAGE as usize));
        let count = (n / PAGE) as usize;
        let job = self.job;
        for (i, address) in addresses.take(count).enumerate() {
            let page = &self.buffer[i * PAGE as usize..(i + 1) * PAGE as usize];
            let hash = job.key.page(page);
            if hash.is_none() && self.walker.as_ref().is_some_and(|(_, w)| w.holds_nothing(address))
            {
                self.pages.held -= 1;
                continue;
            }
            let noted = match job.options.filter {
                true => job.key.of_page_lines(page),
                false => hash.unwrap_or(0),
            };
            if self.note(address, noted, shared) {
                self.keep(address, hash);
            }
        }
    }
}

/// Copies from places of a process, as [`read_process`] does, through its `mem`: pages
/// are looked at and not pinned, so what is merged stays merged.
fn read_gently(memory: &File, places: &[Range], to: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    for place in places {
        let end = done + place.len as usize;
        while done < end {
            let at = place.end() - (end - done) as u64;
            match memory.read_at(&mut to[done..end], at) {
                Ok(n) if n > 0 => done += n,
                // Gone, or the process is: what was copied before counts.
                Ok(_) => return Ok(done),
                Err(e) if Errno::from_io_error(&e) == Some(Errno::IO) => return Ok(done),
                Err(e) => return Err(e),
            }
        }
    }
    Ok(done)
}

/// Takes bytes off the front of a list of ranges.
fn drop_front(ranges: &mut Vec<Range>, mut bytes: u64) {
    ranges.retain_mut(|r| {
        let cut = bytes.min(r.len);
        bytes -= cut;
        *r = Range { start: r.start + cut, len: r.len - cut };
        r.len > 0
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_of_a_list_is_taken_off() {
        let r = |start, len| Range { start, len };
        for (bytes, left) in [
            (0, vec![r(0, 8), r(16, 8)]),
            (4, vec![r(4, 4), r(16, 8)]),
            (8, vec![r(16, 8)]),
            (12, vec![r(20, 4)]),
            (99, vec![]),
        ] {
            let mut ranges = vec![r(0, 8), r(16, 8)];
            drop_front(&mut ranges, bytes);
            assert_eq!(ranges, left, "{bytes}");
        }
    }
}
