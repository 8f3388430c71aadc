//! What VMs are asked in a tick: all QEMUs against one deadline, then their agents.

use std::time::{Duration, Instant};

use ebb_core::config::MergeMode;
use ebb_core::sample::{Ksm, VmId};
use ebb_core::units::{Bytes, Stamp};
use rustix::event::PollFd;

use super::{LinuxHost, clients};
use crate::agent_link::{AgentLink, Stage};
use crate::probe::ksm::read_ksm;
use crate::qmp::{poll_all, pump_ready};
use crate::sockets::{self, interest};
use crate::vm::Vm;

/// From one agent that is handed its RAM to the next, where KSM has merged anything.
const ATTACH_EVERY: Duration = Duration::from_secs(1);
/// How long a tick waits for answers of agents that are not at work.
const AGENTS: Duration = Duration::from_millis(20);

impl LinuxHost {
    pub(super) fn query(&mut self, started: Instant, at: Stamp) {
        pump_ready(&mut clients(&mut self.vms));
        let resting = &self.resting;
        self.vms.iter_mut().for_each(|(id, vm)| vm.ask(started, at, resting.contains(id)));
        // From here: what reading took is not QEMU's doing.
        let deadline = Instant::now() + self.options.deadline;
        self.hear_vms(|_| true, deadline);
        let owed = &self.owed;
        let told = |(id, vm): &(&VmId, &mut Vm)| owed.contains(id) || vm.ordered.is_some();
        for (_, vm) in self.vms.iter_mut().filter(told) {
            if vm.access.hands_off_ms.is_some() && !vm.access.look_only {
                vm.withdraw(started);
            }
        }
        self.query_agents(started, deadline);
    }

    /// Asks QEMU what can write to a VM's memory where an agent is to give some back and that was
    /// not asked in this tick. The order goes out when QEMU has answered.
    pub(super) fn query_for_orders(&mut self) {
        let waits = |vm: &Vm| vm.agent.as_ref().is_some_and(AgentLink::order_waits);
        if !self.vms.values().any(waits) {
            return;
        }
        let (now, at) = (Instant::now(), LinuxHost::now());
        self.vms.values_mut().filter(|vm| waits(vm)).for_each(|vm| vm.ask(now, at, false));
        let deadline = now + self.options.deadline;
        self.hear_vms(waits, deadline);
        self.ask_agents(now, waits);
        self.hear_agents(now);
    }

    /// Takes the answers of these VMs, and asks what follows from them: a balloon that was just
    /// found is asked at once, and then set up.
    fn hear_vms(&mut self, which: impl Fn(&Vm) -> bool, deadline: Instant) {
        for _ in 0..3 {
            let mut vms: Vec<&mut Vm> = self.vms.values_mut().filter(|vm| which(vm)).collect();
            let mut clients: Vec<_> = vms.iter_mut().filter_map(|vm| vm.client.as_mut()).collect();
            poll_all(&mut clients, deadline);
            if !vms.into_iter().map(Vm::hear).fold(false, |a, b| a | b) {
                break;
            }
        }
    }

    /// The agents answer in microseconds, unless they are at work. One that was just
    /// met is handed its RAM at once, and then asked how it does.
    fn query_agents(&mut self, started: Instant, deadline: Instant) {
        let questions = self.vms.values_mut().filter_map(Vm::mappers_question).collect();
        let waker = self.waker.clone();
        let found = self.mappers.go_on(&self.options.root, questions, move || waker.wake());
        for (vm, generation, found) in found {
            let agent = self.vms.get_mut(&vm).and_then(|vm| vm.agent.as_mut());
            agent.into_iter().for_each(|agent| agent.mappers(generation, found.clone()));
        }
        for _ in 0..3 {
            self.ask_agents(started, |_| true);
            let new = self.vms.values().filter_map(|vm| vm.agent.as_ref()).any(AgentLink::is_new);
            // To be handed its RAM takes one longer, and much waits for that.
            let patience = if new { self.options.deadline } else { AGENTS };
            self.hear_agents(deadline.min(Instant::now() + patience));
            if !self.vms.values().filter_map(|vm| vm.agent.as_ref()).any(AgentLink::goes_on) {
                break;
            }
        }
    }

    /// Where KSM has merged anything, agents are handed their RAM one after the other: each may break
    /// all merges of its VM, and what is left afterwards is to be seen before the next one does.
    fn ask_agents(&mut self, now: Instant, which: impl Fn(&Vm) -> bool) {
        // What they have opened to KSM they leave open while Ebb merges.
        let keep_open = self.merger.is_some() && self.options.config.merge.mode == MergeMode::On;
        let stage = |vm: &Vm| vm.agent.as_ref().and_then(AgentLink::stage);
        let is_merged = |k: Ksm| k.saved() > Bytes::ZERO;
        let merges = || read_ksm(&self.options.root).ok().flatten().is_some_and(is_merged);
        let apart = |vm: &Vm| vm.agent.as_ref().is_some_and(AgentLink::is_apart);
        let by_turns = self.vms.values().any(apart) && merges();
        let met = self.vms.iter().filter(|(_, vm)| stage(vm) == Some(Stage::Met));
        let next = next_turn(met.map(|(id, _)| *id), self.turn)
            .filter(|_| self.attached_at.is_none_or(|at| now - at >= ATTACH_EVERY));
        for (id, vm) in self.vms.iter_mut().filter(|(_, vm)| which(vm)) {
            let limits = || self.limits.left(now, vm.cgroup.as_deref(), &vm.nodes);
            let room = vm.agent.as_ref().and_then(|_| limits());
            let was = stage(vm);
            vm.ask_agent(now, keep_open, (room, by_turns && next != Some(*id)));
            if stage(vm) != was && stage(vm) == Some(Stage::Attaching) {
                self.attached_at = Some(now);
            }
        }
        self.turn = next.or(self.turn);
    }

    fn hear_agents(&mut self, deadline: Instant) {
        loop {
            let now = Instant::now();
            let mut owed = false;
            for agent in self.vms.values_mut().filter_map(|vm| vm.agent.as_mut()) {
                owed |= agent.hear(now);
            }
            if !owed || now >= deadline {
                return;
            }
            let agents = self.vms.values().filter_map(|vm| vm.agent.as_ref()?.agent.as_ref());
            let fds = agents.filter_map(|a| Some((a.fd()?, a.wants_write())));
            let mut fds: Vec<PollFd<'_>> =
                fds.map(|(fd, write)| PollFd::from_borrowed_fd(fd, interest(write))).collect();
            sockets::ready(&mut fds, deadline - now);
        }
    }
}

/// Whose turn it is: the first after the last one, in a circle.
fn next_turn(mut all: impl Iterator<Item = VmId> + Clone, last: Option<VmId>) -> Option<VmId> {
    let after = all.clone().find(|id| last.is_some_and(|last| *id > last));
    after.or_else(|| all.next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_have_their_turn_also_beside_those_that_come_back() {
        let id = |pid: u32| VmId { pid, start: 1 };
        let turn = |of: &[u32], last| next_turn(of.iter().map(|pid| id(*pid)), last);
        let (mut last, mut had) = (None, Vec::new());
        for _ in 0..4 {
            last = turn(&[2, 5, 9], last);
            had.extend(last.map(|id| id.pid));
        }
        assert_eq!(had, [2, 5, 9, 2]);
        assert_eq!(turn(&[2, 5], Some(id(3))), Some(id(5)));
        assert_eq!(turn(&[2], Some(id(9))), Some(id(2)));
        assert_eq!(turn(&[], Some(id(2))), None);
    }
}
