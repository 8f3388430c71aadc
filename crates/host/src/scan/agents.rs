//! The agents' part of a scan: an agent inside a VMM hashes its pages for less than it
//! costs to read them from outside.
//!
//! The other end may be a guest that took over its VMM. What it says is bounded and
//! taken for its own VM's pages alone ([`ebb_core::wire::hashes`]); wrong hashes have
//! ranges of that VM opened to KSM in vain. One that breaks the protocol, or is silent
//! for too long, is left alone from then on, and its VM read from outside.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ebb_core::sample::VmId;
use ebb_core::wire::Segment;
use ebb_core::wire::hashes::{HashReply, HashRequest};
use rustix::event::PollFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::Pid;

use crate::lock;
use crate::probe::process::is_named;
use crate::root::Root;
use crate::sockets::{self, interest};
use crate::sys::{Range, is_idle, set_idle};

/// An answer is awaited this long. It takes milliseconds of work, by a thread that has less weight
/// than others.
const PATIENCE: Duration = Duration::from_secs(30);

/// What an agent's thread calls itself.
const THREAD: &str = "ebb-hash";

/// Gives a VM's agent the weight of `ksmd` where it could not take it: QEMU's sandbox
/// forbids all but to run when nothing else needs the CPU, which on a full host is never.
/// A whole QEMU that runs so is left alone.
pub fn lift(root: &Root, vm: VmId) {
    if Pid::from_raw(vm.pid as i32).is_none_or(is_idle) {
        return;
    }
    let tasks = root.read_dir(format!("/proc/{}/task", vm.pid)).ok().flatten();
    let numbers = tasks.iter().flatten().filter_map(|name| name.to_str()?.parse::<u32>().ok());
    let threads = numbers.filter(|thread| is_named(root, *thread, THREAD));
    for thread in threads.filter_map(|t| Pid::from_raw(t as i32)).filter(|t| is_idle(*t)) {
        // Without CAP_SYS_NICE it stays as it is.
        let _ = set_idle(Some(thread), false);
    }
}

/// One VM's agent, as a scan uses it; for one question at a time.
#[derive(Debug)]
pub struct HashLink {
    /// What it has of the VM's RAM: each question is about one of these.
    pub(super) ram: Vec<Range>,
    socket: Mutex<OwnedFd>,
    failure: Mutex<Option<String>>,
}

impl HashLink {
    /// And the end that is for the agent, which was handed this RAM.
    pub fn pair(segments: &[Segment]) -> Result<(HashLink, OwnedFd)> {
        let mut ram: Vec<Range> =
            segments.iter().map(|s| Range { start: s.hva, len: s.size }).collect();
        ram.sort_by_key(|r| r.start);
        let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::STREAM);
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        Ok((HashLink { ram, socket: Mutex::new(ours), failure: Mutex::default() }, theirs))
    }

    pub fn ram(&self) -> &[Range] {
        &self.ram
    }

    pub fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    /// Asks. After an error nothing more is to be had of it.
    pub fn ask(&self, request: &HashRequest) -> Result<HashReply> {
        let socket = lock(&self.socket);
        if let Some(why) = self.failure() {
            return Err(Error::other(why));
        }
        let begun = Instant::now();
        let reply = exchange(&socket, request, begun + PATIENCE).map(|reply| {
            // It cannot have used more.
            let most = begun.elapsed().as_nanos() as u64;
            HashReply { cpu_ns: reply.cpu_ns.min(most), ..reply }
        });
        if let Err(e) = &reply {
            *lock(&self.failure) = Some(format!("its agent does not hash pages: {e}"));
        }
        reply
    }
}

fn exchange(socket: &OwnedFd, request: &HashRequest, until: Instant) -> Result<HashReply> {
    let garbage = || Error::new(ErrorKind::InvalidData, "not the protocol");
    let (mut outbox, mut inbox) = (request.encode(), Vec::new());
    loop {
        sockets::send(socket, &mut outbox, &mut None)?;
        let (bytes, there) = sockets::receive(socket)?;
        inbox.extend(bytes);
        if let Some((head, rest)) = inbox.split_first_chunk()
            && rest.len() >= HashReply::rest(head).ok_or_else(garbage)?
        {
            return HashReply::parse(head, rest, &request.ranges).ok_or_else(garbage);
        }
        if !there {
            return Err(Error::new(ErrorKind::UnexpectedEof, "it hung up"));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(ErrorKind::TimedOut, "no answer for too long"));
        }
        sockets::ready(&mut [PollFd::new(socket, interest(!outbox.is_empty()))], left);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use ebb_core::page_hash::SECRET;
    use ebb_core::units::PAGE;

    use super::*;

    fn ask(link: &HashLink, ranges: Vec<Range>) -> Result<HashReply> {
        link.ask(&HashRequest { secret: [0; SECRET], lines: false, ranges })
    }

    fn told_by(
        answer: impl FnOnce(&mut UnixStream) + Send + 'static,
    ) -> (HashLink, Result<HashReply>) {
        let (link, theirs) = HashLink::pair(&[]).unwrap();
        let peer = std::thread::spawn(move || {
            let mut socket = UnixStream::from(theirs);
            let mut asked = [0; HashRequest::HEAD + 16];
            socket.read_exact(&mut asked).unwrap();
            answer(&mut socket);
        });
        let reply = ask(&link, vec![Range { start: PAGE, len: PAGE }]);
        peer.join().unwrap();
        (link, reply)
    }

    #[test]
    fn an_answer_is_taken_and_costs_no_more_than_it_took() {
        let reply = HashReply { held: 1, free: 0, cpu_ns: u64::MAX, pages: vec![(1, 7)] };
        let (link, got) = told_by(move |s| s.write_all(&reply.encode()).unwrap());
        let got = got.unwrap();
        assert_eq!((got.pages, link.failure()), (vec![(1, 7)], None));
        assert!(got.cpu_ns < 10_000_000_000);
    }

    #[test]
    fn who_breaks_the_protocol_or_hangs_up_is_asked_no_more() {
        let other = HashReply { held: 1, pages: vec![(2, 7)], ..HashReply::default() };
        let answers: [Vec<u8>; 4] =
            [other.encode(), vec![], vec![0; 64], HashReply::default().encode()[..9].into()];
        for bytes in answers {
            let (link, got) = told_by(move |s| s.write_all(&bytes).unwrap());
            assert!(got.is_err() && link.failure().unwrap().contains("does not hash"));
            assert!(ask(&link, vec![]).is_err());
        }
    }
}
