//! Hands a tick's merging orders to `act/ksm_worker.rs` and to agents, and puts KSM's counters into
//! the sample, also where Ebb does not steer KSM.

use std::time::{Duration, Instant};

use ebb_core::config::MergeMode;
use ebb_core::plan::MergePlan;
use ebb_core::sample::{MergeSample, Sample};
use ebb_core::units::Bytes;

use super::LinuxHost;
use crate::act::ksm::has_room;
use crate::agent_link::AgentLink;
use crate::probe::ksm;
use crate::vm::{noted, problem};

/// Where nothing is merged by Ebb, what others merge is read this often: a dozen files
/// and one of each VM, for people only.
const OTHERS_KSM_EVERY: Duration = Duration::from_secs(10);

impl LinuxHost {
    /// Steers KSM, opens and closes VMs, has them scanned: beside the loop.
    pub fn merge(&mut self, plan: &MergePlan) {
        let Some(merger) = &mut self.merger else { return };
        plan.ksmd.iter().for_each(|order| merger.order(order));
        plan.scan_cores.iter().for_each(|cores| merger.pace(*cores));
        for order in &plan.vms {
            let Some(vm) = self.vms.get_mut(&order.vm) else { continue };
            let root = &self.options.root;
            // Limits above the VM are the plan's matter.
            let room = |pages| has_room(root, Bytes::pages(pages), &[]).map_err(|e| e.to_string());
            match if order.open { Ok(()) } else { self.ksm_stats.merged(order.vm).and_then(room) } {
                Ok(()) => vm.switch_merging(order.open),
                Err(why) => vm.merging.error = Some(why),
            }
        }
        let results = merger.results();
        let scans = results.scan.number;
        for (id, vm) in &mut self.vms {
            let Some(agent) = &mut vm.agent else { continue };
            let (open, scans) = match results.ranges.get(id) {
                _ if plan.kept.contains(id) => continue,
                _ if !plan.ranged.contains(id) => (&[][..], 0),
                Some((open, _)) => (open.as_slice(), scans),
                // Before the first scan what is open stays so.
                None => continue,
            };
            let Some(closes) = agent.advise(open, scans) else { continue };
            // The answer is there in a moment, and something follows from it.
            self.waker.wake();
            // What closing takes is to be seen before the next one closes.
            if closes {
                break;
            }
        }
        drop(results);
        if let Some(scan) = &plan.scan {
            merger.scan(scan, |id| {
                let vm = self.vms.get_mut(&id)?;
                let agent = vm.agent.as_mut().and_then(AgentLink::scanner);
                Some((vm.process.name.clone(), agent))
            });
        }
    }

    pub fn release_ksm(&mut self, patience: Duration) -> Result<(), String> {
        self.merger.as_mut().map_or(Ok(()), |m| m.release(patience))
    }

    /// What is known of merging; has looked at what is not known any more.
    pub(super) fn sample_merging(&mut self, sample: &mut Sample) {
        if self.merger.is_none() {
            return self.sample_others_merging(sample);
        }
        self.sample_ksm(sample);
        let Sample { host, vms, problems, .. } = sample;
        let Some(merger) = &mut self.merger else { return };
        let results = merger.results();
        let (scan, knobs) = (results.scan.clone(), results.knobs.clone());
        let all = results.looks.values().map(|look| look.took).sum();
        drop(results);
        let refused = scan.error.clone();
        problems.extend(refused.map(|why| problem(None, "scan for equal pages".into(), why)));
        host.scan = Some(scan);
        problems.extend(knobs.map(|why| problem(None, "/sys/kernel/mm/ksm".into(), why)));
        problems.extend(merger.hangs_at().map(|id| {
            let why = "cannot be read for 30 s now; looks at other VMs wait for it";
            problem(id, format!("/proc/{}/smaps", id.pid), why.into())
        }));
        let copied = host.vmstat.and_then(|v| v.cow_ksm);
        let working = host.ksm.as_ref().is_some_and(|k| k.run != 0);
        let steer = self.options.config.merge.mode == MergeMode::On;
        for sample in vms.iter_mut() {
            let (Some(vm), Some(part)) = (self.vms.get_mut(&sample.id), &mut sample.merge) else {
                continue;
            };
            let results = merger.results();
            let (look, found) =
                (results.looks.get(&sample.id).cloned(), results.found.get(&sample.id));
            // By ranges, only what lies in them is to be had.
            let works = sample.agent.as_ref().is_some_and(|agent| !agent.observes);
            let ranged = results.ranges.get(&sample.id).filter(|_| works);
            part.found = ranged.map(|(_, found)| found).or(found).copied();
            drop(results);
            let is_open = vm.go_on_merging(look.as_ref());
            if steer && vm.decide_look(look.as_ref(), all, copied, part.stat.merging_pages, working)
            {
                merger.look(sample.id);
            }
            part.busy = vm.merging.is_busy();
            let refused = vm.agent.as_ref().and_then(AgentLink::refused);
            part.error = vm.merging.error.as_ref().or(refused).cloned();
            if let Some(look) = look {
                // An agent that reports mergeable RAM is believed over an older look; that nothing
                // is mergeable is believed when it is seen.
                let says = vm.agent.as_ref().is_some_and(|a| a.open() > Bytes::ZERO);
                let state = look.state.as_ref().ok();
                part.open = is_open.map(|is_open| is_open || says);
                part.seen = state.map(|state| (look.at, state.merged()));
                part.error = part.error.take().or(look.state.err());
            }
            let told = |why: &String| problem(sample.id, "merging".into(), why.clone());
            problems.extend(part.error.as_ref().map(told));
        }
    }

    /// What is merged where Ebb has no part in it: read now and then, and shown until
    /// it is read again.
    fn sample_others_merging(&mut self, sample: &mut Sample) {
        if let Some((_, ksm, stats)) =
            self.others_ksm.as_ref().filter(|o| o.0.elapsed() < OTHERS_KSM_EVERY)
        {
            sample.host.ksm = *ksm;
            for vm in &mut sample.vms {
                let stat = stats.get(&vm.id).copied();
                vm.merge = stat.map(|stat| MergeSample { stat, ..MergeSample::default() });
            }
            return;
        }
        self.sample_ksm(sample);
        let stats = sample.vms.iter().filter_map(|v| Some((v.id, v.merge.as_ref()?.stat)));
        self.others_ksm = Some((Instant::now(), sample.host.ksm, stats.collect()));
    }

    /// Reads KSM's counters, and those of each VM where anything is merged at all.
    fn sample_ksm(&mut self, sample: &mut Sample) {
        let Sample { host, vms, problems, .. } = sample;
        let root = &self.options.root;
        host.ksm = noted(problems, "/sys/kernel/mm/ksm", ksm::read_ksm(root));
        let merges = host.ksm.is_some_and(|k| k.run != 0 || k.pages_shared > 0);
        if self.merger.is_none() && !merges {
            return;
        }
        self.ksm_stats.read(root, vms);
        for vm in vms.iter_mut() {
            let read = self.ksm_stats.of(vm.id);
            if let Some(Err(why)) = read {
                problems.push(problem(None, format!("/proc/{}/ksm_stat", vm.id.pid), why.clone()));
            }
            let stat = read.and_then(|read| *read.as_ref().ok()?);
            vm.merge = Some(MergeSample { stat: stat.unwrap_or_default(), ..Default::default() });
        }
        host.ksm.iter_mut().for_each(|ksm| self.other_processes.tell(root, ksm, vms));
    }
}
