//! Requests to an agent that wait for the answer, one function each. The daemon waits for
//! nothing (`agent_link.rs` of the host).

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ebb_core::wire::{
    AgentState, Answer, Attach, Command, Hello, Recycle, Recycled, Refused, SEGMENTS_MAX, Segment,
    Status, abi::Facts,
};
use ebb_host::agent::{Agent, AgentError, main_ram, parse_gpa2hva, parse_mtree};
use ebb_host::qmp::{Client, QmpError};
use ebb_host::scan::agents::HashLink;
use rustix::event::{PollFd, PollFlags};
use serde_json::json;

fn failed(call: &str, why: String) -> AgentError {
    AgentError::Failed("agent".into(), format!("{call}: {why}"))
}

fn unexpected<T>(answer: &Answer) -> Result<T, AgentError> {
    let what = format!("unexpected {answer:?}").chars().take(80).collect();
    Err(AgentError::Failed("agent".into(), what))
}

impl Requests for Agent {
    fn agent(&mut self) -> &mut Agent {
        self
    }
}

/// Requests that wait at most `timeout` long.
pub trait Requests {
    fn agent(&mut self) -> &mut Agent;

    fn request(&mut self, command: Command, timeout: Duration) -> Result<Answer, AgentError> {
        let id = self.agent().send(command)?;
        self.wait(id, timeout)
    }

    fn wait(&mut self, id: u64, timeout: Duration) -> Result<Answer, AgentError> {
        let (agent, until) = (self.agent(), Instant::now() + timeout);
        loop {
            agent.pump();
            if let Some(answer) = agent.take_reply(id) {
                return answer;
            }
            if let Some(error) = agent.failure() {
                return Err(error.clone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed("answer", format!("none in {} ms", timeout.as_millis())));
            }
            let Some(fd) = agent.fd() else { continue };
            let flags =
                if agent.wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let Ok(left) = left.try_into() else { continue };
            let _ = rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&left));
        }
    }

    /// Waits until it has found the module's map of the guest and uses it.
    fn wait_ready(&mut self, timeout: Duration) -> Result<(), AgentError> {
        let until = Instant::now() + timeout;
        loop {
            let status = self.status(false, timeout)?;
            if status.state == AgentState::Ready {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(failed("map", format!("not used yet: {status:?}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn hello(&mut self, timeout: Duration) -> Result<Hello, AgentError> {
        match self.request(Command::Hello, timeout)? {
            Answer::Hello(hello) => Ok(hello),
            other => unexpected(&other),
        }
    }

    /// Hands over the VM's RAM, with a descriptor of `/dev/userfaultfd` for a
    /// VMM that may not open it itself.
    fn attach(
        &mut self,
        attach: Attach,
        device: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<(), AgentError> {
        let attach = Attach { descriptor: device.is_some(), ..attach };
        let device = device.map(|d| d.try_clone_to_owned()).transpose();
        let device = device.map_err(|e| failed("dup of a descriptor", e.to_string()))?;
        let id = self.agent().send_with(Command::Attach(attach), device)?;
        self.wait(id, timeout).map(drop)
    }

    /// How it does; with `held`, also what the host holds of the free pages.
    fn status(&mut self, held: bool, timeout: Duration) -> Result<Status, AgentError> {
        match self.request(Command::Status { held, room: None }, timeout)? {
            Answer::Status(status) => Ok(status),
            other => unexpected(&other),
        }
    }

    /// Gives free pages back; the timeout is on top of the budget.
    fn recycle(&mut self, want: Recycle, timeout: Duration) -> Result<Recycled, AgentError> {
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
            other => unexpected(&other),
        }
    }

    /// What the guest says of itself.
    fn facts(&mut self, timeout: Duration) -> Result<Facts, AgentError> {
        match self.request(Command::Facts, timeout)? {
            Answer::Facts(facts) => Ok(facts),
            other => unexpected(&other),
        }
    }

    /// Has it hash pages of the RAM it was handed for a scan; who asks it does so at what is
    /// returned.
    fn hashes(&mut self, segments: &[Segment], timeout: Duration) -> Result<HashLink, AgentError> {
        let pair = HashLink::pair(segments);
        let (ours, theirs) = pair.map_err(|e| failed("socketpair", e.to_string()))?;
        let id = self.agent().send_with(Command::Hashes, Some(theirs))?;
        self.wait(id, timeout).map(|_| ours)
    }

    /// Relays that the vCPUs run, or not.
    fn run_state(&mut self, running: bool, timeout: Duration) -> Result<(), AgentError> {
        self.request(Command::RunState { running }, timeout).map(drop)
    }

    /// Has it give up all protection.
    fn stand_down(&mut self, timeout: Duration) -> Result<(), AgentError> {
        self.request(Command::StandDown, timeout).map(drop)
    }
}

/// Where QEMU has the guest's RAM, by two commands of its human monitor, all within the
/// timeout.
pub fn segments(qmp: &mut Client, timeout: Duration) -> Result<Vec<Segment>, QmpError> {
    let until = Instant::now() + timeout;
    let mut ask = |line: String| -> Result<String, QmpError> {
        let arguments = json!({ "command-line": line });
        let left = until.saturating_duration_since(Instant::now());
        let said = qmp.execute("human-monitor-command", Some(arguments), left)?;
        Ok(said.as_str().unwrap_or_default().to_string())
    };
    let ranges = main_ram(&parse_mtree(&ask("info mtree -f".into())?));
    let mut segments = Vec::new();
    for r in ranges.iter().take(SEGMENTS_MAX) {
        // Unmapped, or the address is refused: no segment; the agent says so.
        if let Some(hva) = parse_gpa2hva(&ask(format!("gpa2hva {:#x}", r.start))?) {
            segments.push(Segment { gpa: r.start, size: r.end - r.start, hva });
        }
    }
    Ok(segments)
}
