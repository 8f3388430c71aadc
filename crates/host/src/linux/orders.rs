//! What the host is told to do with VMs, carried out or handed on: sizes of balloons first, then
//! what agents and threads beside the loop do. Merging stands in `merging.rs`.

use std::time::{Duration, Instant};

use ebb_core::plan::{Action, Outcome, Plan};
use ebb_core::sample::VmId;
use ebb_core::units::Bytes;

use super::{LinuxHost, clients};
use crate::probe::process::{Life, life};
use crate::qmp::{Client, QmpError, poll_all};
use crate::vm::Vm;

/// How long putting back how often guests are asked may take, at the end.
const RESTORE: Duration = Duration::from_secs(1);
/// Between two tries of that on a shared socket.
const RESTORE_AGAIN: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonOrder {
    pub vm: VmId,
    /// What the guest shall be left with.
    pub to: Bytes,
    /// Whether that is more than it has.
    pub gives: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActError {
    /// The process has ended; its pid may be another's by now.
    #[error("the VM's process {pid} has ended")]
    Gone { pid: u32 },
    #[error("no QMP connection: {0}")]
    NoLink(String),
    #[error("QEMU has not answered within {ms} ms: it may still follow")]
    Unanswered { ms: u64 },
    #[error("{0} before QEMU answered: it may have done it")]
    Lost(String),
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

impl LinuxHost {
    /// Carries out what the policy decided; outcomes in the order of the actions.
    pub fn apply(&mut self, actions: &[Action]) -> Vec<Outcome> {
        let order = |a: &Action| BalloonOrder { vm: a.vm, to: a.to, gives: a.gives() };
        let orders: Vec<BalloonOrder> = actions.iter().map(order).collect();
        let outcome = |(a, r): (&Action, Result<(), ActError>)| Outcome {
            vm: a.vm,
            unanswered: matches!(r, Err(ActError::Unanswered { .. } | ActError::Lost(_))),
            refused: matches!(r, Err(ActError::Qmp(QmpError::Command { .. }))),
            error: r.err().map(|e| e.to_string()),
        };
        let results = self.set_balloons(&orders, self.options.deadline);
        actions.iter().zip(results).map(outcome).collect()
    }

    /// Tells QEMU what each guest shall be left with (whole MiB make sense).
    /// Every VM's process is checked right before. All share one deadline;
    /// results are in the order of the orders. `Ok` means that QEMU has asked
    /// the guest, not that the guest has done it. QEMU has the time `wait` to answer.
    pub fn set_balloons(
        &mut self,
        orders: &[BalloonOrder],
        wait: Duration,
    ) -> Vec<Result<(), ActError>> {
        let sent: Vec<_> = orders.iter().map(|order| self.send_order(order)).collect();
        poll_all(&mut clients(&mut self.vms), Instant::now() + wait);
        let result = |(sent, order): (Result<u64, ActError>, &BalloonOrder)| {
            let command = sent?;
            let gone = ActError::Gone { pid: order.vm.pid };
            let vm = self.vms.get_mut(&order.vm).ok_or(gone)?;
            match vm.client.as_mut().and_then(|c| c.protocol.take_reply(command)) {
                Some(Err(QmpError::Busy(path, why))) => {
                    vm.not_sent(command);
                    Err(ActError::NoLink(format!("{path}: {why}")))
                }
                Some(Err(e)) if !matches!(e, QmpError::Command { .. }) => {
                    vm.answered(command, false);
                    Err(ActError::Lost(e.to_string()))
                }
                Some(Err(e)) => {
                    vm.not_sent(command);
                    Err(e.into())
                }
                Some(Ok(_)) => {
                    vm.answered(command, true);
                    Ok(())
                }
                // Nothing is carried out late: the next tick decides anew.
                None if vm.take_back(command) => {
                    let ms = wait.as_millis();
                    Err(ActError::NoLink(format!("QEMU has not served Ebb within {ms} ms")))
                }
                None => {
                    vm.not_answered(command);
                    Err(ActError::Unanswered { ms: wait.as_millis() as u64 })
                }
            }
        };
        sent.into_iter().zip(orders).map(result).collect()
    }

    fn send_order(&mut self, order: &BalloonOrder) -> Result<u64, ActError> {
        let gone = ActError::Gone { pid: order.vm.pid };
        let vm = self.vms.get_mut(&order.vm).ok_or_else(|| gone.clone())?;
        match life(&self.options.root, order.vm) {
            Life::Ended => Err(gone),
            // What cannot be looked at may still be given memory through its own connection.
            Life::Unknown if !order.gives => {
                Err(ActError::NoLink("its process cannot be looked at".into()))
            }
            Life::Alive | Life::Unknown => vm.order(order.to, order.gives),
        }
    }

    /// The size of the last order to a VM, if QEMU answered after its time was up that it has
    /// carried it out.
    pub fn done_late(&self, id: VmId) -> Option<Bytes> {
        self.vms.get(&id)?.done_late
    }

    /// Has QEMU ask these guests for statistics now rather than at the next
    /// interval. The answers are in a later sample.
    pub fn kick_stats(&mut self, vms: &[VmId]) {
        let at = LinuxHost::now();
        vms.iter().for_each(|id| self.vms.get_mut(id).into_iter().for_each(Vm::prepare_kick));
        self.keep_intervals();
        vms.iter().for_each(|id| self.vms.get_mut(id).into_iter().for_each(|vm| vm.kick(at)));
    }

    /// Puts back how often QEMU asked the guests for statistics before.
    pub fn restore_intervals(&mut self) {
        let until = Instant::now() + RESTORE;
        let restore = |(id, vm): (&VmId, &mut Vm)| Some((*id, vm.restore_interval()?));
        loop {
            let sent: Vec<(VmId, u64)> = self.vms.iter_mut().filter_map(restore).collect();
            poll_all(&mut clients(&mut self.vms), until);
            for (id, command) in &sent {
                self.vms.get_mut(id).into_iter().for_each(|vm| vm.restored_interval(*command));
            }
            // On a shared socket another client may have been served.
            let again = self.vms.values().any(Vm::is_not_restored);
            if !again || Instant::now() + RESTORE_AGAIN >= until {
                break;
            }
            std::thread::sleep(RESTORE_AGAIN);
        }
        self.keep_intervals();
    }

    /// Has libvirt note with these domains what their balloons hold without Ebb, which goes along
    /// when they are saved or migrated; `None`: nothing is owed to it.
    pub fn note(&mut self, notes: &[(VmId, Option<Bytes>)]) {
        for (id, others) in notes {
            self.vms.get_mut(id).into_iter().for_each(|vm| vm.note(*others));
        }
    }

    /// Has libvirt note what balloons hold, as [`LinuxHost::note`], and waits until it is written,
    /// for a second at most.
    pub fn note_last(&mut self, notes: &[(VmId, Option<Bytes>)]) {
        self.note(notes);
        let until = Instant::now() + RESTORE;
        while self.vms.values().any(Vm::is_note_due) && Instant::now() < until {
            std::thread::sleep(RESTORE_AGAIN);
        }
    }

    /// Leaves all shared sockets: the loop has something else to do for some seconds.
    pub fn leave_shared(&mut self) {
        clients(&mut self.vms).into_iter().for_each(Client::part);
    }

    /// Whether some of them are still to be put back, as far as is known.
    pub fn has_intervals(&self) -> bool {
        !self.intervals.is_empty()
    }

    pub(super) fn keep_intervals(&mut self) {
        let root = &self.options.root;
        let here = self.vms.iter().map(|(id, vm)| (*id, vm.interval_was));
        self.intervals.keep(here, |id| life(root, id) != Life::Ended);
    }

    /// Starts what runs beside the loop; later samples tell the result.
    pub fn start(&mut self, plan: &Plan) {
        for order in &plan.recycle {
            if let Some(agent) = self.vms.get_mut(&order.vm).and_then(|vm| vm.agent.as_mut()) {
                agent.order(order);
            }
        }
        self.query_for_orders();
        let (vms, hierarchy) = (&self.vms, self.limits.hierarchy.as_ref());
        let cgroup = |id: VmId| hierarchy?.directory(vms.get(&id)?.cgroup.as_deref()?);
        self.background.iter_mut().for_each(|b| b.order(&plan.orders, &cgroup));
    }

    /// Leaves a VM alone for `ms`; 0: no longer. The error is for people.
    pub fn hands_off(&mut self, name: &str, ms: u64) -> Result<(), String> {
        let named = |vm: &Vm| vm.process.name == name;
        let found = self.vms.iter().find(|(_, vm)| named(vm)).map(|(id, _)| *id);
        let id = found.ok_or_else(|| format!("no VM is called “{name}”"))?;
        self.hands_off.set(id, LinuxHost::now(), ms)
    }
}
