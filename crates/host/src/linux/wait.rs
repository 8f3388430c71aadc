//! The sleep between two ticks: it ends early when the host or a VM needs attention.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::{LinuxHost, clients_of};
use crate::probe::vmpressure::PressureEvents;
use crate::qmp::{Client, interest};
use crate::sockets;
use crate::vm::Vm;

/// The least time between sleeps that notifications of reclaim end: they come for every 512
/// pages that are looked at.
const NOTIFIED_EVERY: Duration = Duration::from_secs(1);

/// While the loop sleeps, answers of QEMUs that come within this time are read together.
const TOGETHER: Duration = Duration::from_millis(20);
/// The least sleep between two looks at connections whose time may be up.
const LEAST: Duration = Duration::from_millis(1);

impl LinuxHost {
    /// Sleeps until `until`, or less (`true`): tasks on the host stalled for memory, another thread
    /// woke it, or a VM reset, stopped, resumed, migrated or went away, which ends each sleep until
    /// the next [`LinuxHost::sample`].
    pub fn wait(&mut self, until: Instant) -> bool {
        let mut answered = false;
        loop {
            clients_of(&mut self.vms).for_each(Client::flush);
            if self.vms.values_mut().any(Vm::is_urgent) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let tidy = clients_of(&mut self.vms).filter_map(|c| c.tidy_at()).min();
            let left = tidy.map_or(left, |at| {
                left.min(at.saturating_duration_since(Instant::now()).max(LEAST))
            });
            // Where one has answered, more will in a moment: they are heard together.
            let seen = match answered {
                true => self.poll(left.min(TOGETHER), false),
                false => self.poll(left, true),
            };
            if seen.woken {
                self.waker.clear();
            }
            if seen.woken || seen.pressure {
                return true;
            }
            answered = seen.answered;
        }
    }

    /// One `poll`: of QEMUs, where that is asked for, and of everything else. What QEMUs have
    /// said is read.
    fn poll(&mut self, left: Duration, qemus: bool) -> Polled {
        let mut fds = vec![PollFd::from_borrowed_fd(self.waker.as_fd(), PollFlags::IN)];
        let psi = self.trigger.as_ref().map(|t| PollFd::from_borrowed_fd(t.fd(), PollFlags::PRI));
        let psi_at = psi.is_some().then_some(fds.len());
        fds.extend(psi);
        let heard = self.notified.is_some_and(|at| at.elapsed() < NOTIFIED_EVERY);
        let levels = self.notifications.as_ref().filter(|_| !heard).map(PressureEvents::fds);
        let levels_at = fds.len()..fds.len() + levels.map_or(0, |l| l.len());
        fds.extend(levels.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let qemus_at = fds.len();
        let clients = self.vms.values().filter(|_| qemus).filter_map(|v| v.client.as_ref());
        fds.extend(clients.filter_map(|c| Some(PollFd::from_borrowed_fd(c.fd()?, interest(c)))));
        let ready = sockets::ready(&mut fds, left);
        let psi = psi_at.map_or(PollFlags::empty(), |i| fds[i].revents());
        drop(fds);
        let (woken, notified) = (ready[0], ready[levels_at].contains(&true));
        let ready = &ready[qemus_at..];
        // The same clients in the same order.
        let open = clients_of(&mut self.vms).filter(|c| c.fd().is_some());
        let mut answered = false;
        for (client, _) in open.zip(ready).filter(|(_, ready)| **ready) {
            client.pump();
            // A shared socket is left as soon as it has answered.
            answered |= !client.is_shared();
        }
        if notified {
            self.notified = Some(Instant::now());
        }
        if psi.intersects(PollFlags::ERR | PollFlags::NVAL) {
            self.trigger = None;
            return Polled { woken, pressure: notified, answered };
        }
        Polled { woken, pressure: notified || psi.contains(PollFlags::PRI), answered }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Polled {
    woken: bool,
    pressure: bool,
    answered: bool,
}
