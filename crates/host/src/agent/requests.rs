//! Requests that wait for their answer, one function each, for the lab and tests: the daemon
//! waits for nothing (`agent_link.rs`).

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ebb_core::wire::{
    Answer, Attach, Command, Hello, Recycle, Recycled, Refused, Segment, Status, abi::Facts,
};
use rustix::event::{PollFd, PollFlags};

use super::{Agent, AgentError};
use crate::scan::agents::HashLink;

impl Agent {
    /// Sends a request and waits for its answer, at most `timeout` long.
    pub fn request(&mut self, command: Command, timeout: Duration) -> Result<Answer, AgentError> {
        let id = self.send(command)?;
        self.wait(id, timeout)
    }

    fn wait(&mut self, id: u64, timeout: Duration) -> Result<Answer, AgentError> {
        let until = Instant::now() + timeout;
        loop {
            self.pump();
            if let Some(answer) = self.take_reply(id) {
                return answer;
            }
            if let Some(error) = &self.failure {
                return Err(error.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.forget(id);
                return Err(AgentError::Timeout(self.named(), timeout.as_millis() as u64));
            }
            let Some(fd) = self.fd() else { continue };
            let flags =
                if self.wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let Ok(left) = left.try_into() else { continue };
            let _ = rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&left));
        }
    }

    pub fn hello(&mut self, timeout: Duration) -> Result<Hello, AgentError> {
        match self.request(Command::Hello, timeout)? {
            Answer::Hello(hello) => Ok(hello),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Hands over the VM's RAM, with a descriptor of `/dev/userfaultfd` for a
    /// VMM that may not open it itself.
    pub fn attach(
        &mut self,
        attach: Attach,
        device: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<(), AgentError> {
        let attach = Attach { descriptor: device.is_some(), ..attach };
        let device = device.map(|d| d.try_clone_to_owned()).transpose();
        let device = device
            .map_err(|e| AgentError::Io(self.named(), "dup of a descriptor", e.to_string()))?;
        let id = self.send_with(Command::Attach(attach), device)?;
        self.wait(id, timeout).map(drop)
    }

    /// How it does; with `held`, also what the host holds of the free pages.
    pub fn status(&mut self, held: bool, timeout: Duration) -> Result<Status, AgentError> {
        match self.request(Command::Status { held }, timeout)? {
            Answer::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Gives free pages back; the timeout is on top of the budget. For lab and tests, as all
    /// that waits here is.
    pub fn recycle(&mut self, want: Recycle, timeout: Duration) -> Result<Recycled, AgentError> {
        let timeout = timeout.saturating_add(Duration::from_millis(want.budget_ms));
        let mut done = self.request(Command::Recycle(want), timeout);
        // Who runs the VM by hand knows that nobody else is given its RAM.
        if matches!(&done, Err(AgentError::Refused(_, no)) if no.kind == Refused::NotReady)
            && let Some(generation) = self.status(false, timeout)?.unclear
        {
            self.request(Command::Cleared { generation }, timeout)?;
            done = self.request(Command::Recycle(want), timeout);
        }
        match done? {
            Answer::Recycled(done) => Ok(done),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What the guest says of itself.
    pub fn facts(&mut self, timeout: Duration) -> Result<Facts, AgentError> {
        match self.request(Command::Facts, timeout)? {
            Answer::Facts(facts) => Ok(facts),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Has it hash pages of the RAM it was handed for a scan; who asks it does so at what is
    /// returned.
    pub fn hashes(
        &mut self,
        segments: &[Segment],
        timeout: Duration,
    ) -> Result<HashLink, AgentError> {
        let pair = HashLink::pair(segments);
        let (ours, theirs) =
            pair.map_err(|e| AgentError::Io(self.named(), "socketpair", e.to_string()))?;
        let id = self.send_with(Command::Hashes, Some(theirs))?;
        self.wait(id, timeout).map(|_| ours)
    }

    /// Relays that the vCPUs run, or not.
    pub fn run_state(&mut self, running: bool, timeout: Duration) -> Result<(), AgentError> {
        self.request(Command::RunState { running }, timeout).map(drop)
    }

    /// Has it give up all protection.
    pub fn stand_down(&mut self, timeout: Duration) -> Result<(), AgentError> {
        self.request(Command::StandDown, timeout).map(drop)
    }

    fn unexpected(&self, answer: &Answer) -> AgentError {
        AgentError::Garbage(
            self.named(),
            format!("unexpected {answer:?}").chars().take(80).collect(),
        )
    }
}
