//! Which VMs KSM may merge, when VMs are scanned, and what `ksmd` does this tick.
//!
//! KSM has one domain: it merges all that is open to it. So VMs of one share group
//! only are open (unless the operator joins groups), and `ksmd` rests while any
//! other is, or may be: a new VM is looked at first. What the operator said of a
//! VM comes before all: `merge = false` takes it out, `merge = true` opens it, and
//! one of which nothing is said stays as QEMU was started.
//!
//! A VM whose merged pages are written soon after (a storm of copies) is taken out for a
//! while, but only where the host has room for what is still merged of it: breaking
//! merges takes memory, and VMs that boot have a claim on it first. One that must go is taken
//! out where the limits above it have room. Where there is none it stays as it is, and `ksmd` rests.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Candidates, Facts, KsmdOrder, WORTH_A_BURST, govern, is_gentle, is_storm};
use crate::config::MergeMode;
use crate::model::{MergeHost, MergeVm, Model, Pressure, VmModel};
use crate::plan::{MergeOrder, MergePlan, ScanOrder};
use crate::sample::{Ksm, Link, MergeSample};
use crate::state::Memory;
use crate::units::{Bytes, PAGE, Stamp, doubled};

/// How long a VM is taken out after a storm; doubled each time.
const STORM_MS: (u64, u64) = (60_000, 3_600_000);
/// What is broken in this time counts together.
const STORM_SINCE_MS: u64 = 60_000;
/// An order that did nothing is given again after this.
const AGAIN_MS: u64 = 30_000;
/// Most VMs that are opened or closed in a tick: QEMU does nothing else meanwhile.
const SWITCHES: usize = 4;
/// A VM that has run for less is still booting: its pages will change, and are not scanned yet.
const YOUNG_MS: u64 = 60_000;
/// The first scan waits this long where the host lacks memory: a scan of pages that will change is
/// better than a late one.
const YOUNG_SHORT_MS: u64 = 10_000;
/// The first scan waits this long for agents that are being met.
const MEET_MS: u64 = 60_000;
/// Scans that found next to nothing double the time to the next one, this often at most.
const FRUITLESS_MOST: u32 = 3;
/// After this many spot checks all is scanned again, whatever they saw.
const SPOT_CHECKS_MOST: u32 = 7;
/// A spot check that finds this much changed has all scanned again.
const CHANGED: Bytes = Bytes::mib(8);
/// Most that a scan reads in a second.
const SCAN_RATE: f64 = 2e9;

/// What is remembered of merging between ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MergeMemory {
    pub govern: super::BurstMemory,
    /// When a scan was ordered last.
    pub scan: Option<Stamp>,
    /// Since when there has been a VM to scan.
    pub wanted: Option<Stamp>,
    /// Scans that were finished when last looked at.
    pub scans: u64,
    /// Scans in a row that found next to nothing.
    #[serde(rename = "lean")]
    pub fruitless: u32,
    /// What merging saved at the last tick, pages.
    pub saved: u64,
    /// The operator's last request for all VMs.
    pub asked: Option<bool>,
}

/// What is remembered of merging in one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmMergeMemory {
    /// Whether it was open before Ebb changed it: what is put back.
    pub was: Option<bool>,
    /// The last order, and when.
    pub ordered: Option<(Stamp, bool)>,
    /// The operator's last request for it.
    pub asked: Option<bool>,
    /// What its mappings showed as merged at the last look.
    #[serde(rename = "seen")]
    pub counts: Option<MergeCounts>,
    /// The look since which more merges have been broken than made, at most [`STORM_SINCE_MS`] ago.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub breaks_since: Option<MergeCounts>,
    /// It is out until then.
    pub storm_until: Option<Stamp>,
    pub storms: u32,
}

/// What a look at a VM's mappings showed, and the counters then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MergeCounts {
    pub at: Stamp,
    /// Merged, pages.
    pub merged: u64,
    /// Its process's counter then.
    pub counted: u64,
    /// The host's counter of copies then.
    pub copied: Option<u64>,
    /// What its agent had opened, pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opened: Option<u64>,
}

impl VmMergeMemory {
    /// Takes in a look: whether merged pages were broken by writes. A page that went
    /// in another way (a balloon that grows) was not copied; what its agent closed was, but not
    /// by the guest. `opened`: what that agent has opened.
    pub fn observe(
        &mut self,
        at: Stamp,
        vm: &MergeSample,
        copied: Option<u64>,
        opened: Option<Bytes>,
    ) {
        let (Some((when, merged)), Some(true)) = (vm.seen, vm.open) else {
            (self.counts, self.breaks_since) = (None, None);
            return;
        };
        let counted = vm.stat.merging_pages.unwrap_or(0);
        let opened = opened.map(|bytes| bytes.0 / PAGE);
        let now = MergeCounts { at: when, merged: merged.0 / PAGE, counted, copied, opened };
        if self.counts.is_some_and(|was| was.at == when) {
            return;
        }
        let Some(last) = self.counts.replace(now) else { return };
        // Looks are more frequent while merges are broken: each shows a part of it.
        let recent = |was: &MergeCounts| when.since(was.at) < STORM_SINCE_MS;
        let was = self.breaks_since.take().filter(recent).unwrap_or(last);
        let newly = counted.saturating_sub(was.counted);
        // Told to open other ranges, it may have closed any number.
        if was.opened.zip(opened).is_some_and(|(was, now)| was < now) {
            return;
        }
        let closed = was.opened.zip(opened).map_or(0, |(was, now)| was - now);
        let broken = (was.merged + newly).saturating_sub(now.merged).saturating_sub(closed);
        let written = match (was.copied, copied) {
            (Some(was), Some(now)) => now.saturating_sub(was) >= broken / 2,
            _ => true,
        };
        if written && is_storm(was.merged, broken, newly) {
            self.storm_until = Some(at.plus(doubled(STORM_MS, self.storms)));
            self.storms = self.storms.saturating_add(1);
        } else if written && broken > newly {
            self.breaks_since = Some(was);
        }
    }
}

impl MergeMemory {
    /// Takes in what a scan found, in all.
    pub fn observe(&mut self, scans: u64, found: &Candidates) {
        if scans != self.scans {
            self.scans = scans;
            let fruitless = found.saves() < WORTH_A_BURST;
            self.fruitless = if fruitless { (self.fruitless + 1).min(FRUITLESS_MOST) } else { 0 };
        }
    }
}

/// What of a VM's merged pages saves one; by its own counters, since the host's
/// also have what Ebb has nothing to do with.
pub fn saved(vm: &MergeSample, ksm: &Ksm) -> u64 {
    let mapped = vm.stat.merging_pages.unwrap_or(0) as f64;
    vm.stat.zero_pages.unwrap_or(0) + (mapped * ksm.share_saved()) as u64
}

/// Why a VM is to be out.
struct Out {
    why: String,
    /// `ksmd` must not work while it is in.
    must: bool,
}

/// Decides a tick; also what is remembered of it. `None` where merging is off. `lacks`: what the
/// host lacks to back what all VMs are to have. Where it lacks [`WORTH_A_BURST`], merging works as
/// on a soft host, also while the host's state is clear: merging takes nothing from a guest, a
/// balloon does.
pub fn merge(model: &Model, memory: &Memory, lacks: Bytes) -> Option<(MergePlan, MergeMemory)> {
    let host = model.host.merge.as_ref()?;
    let state = match lacks < WORTH_A_BURST {
        true => model.host.shown.state,
        false => model.host.shown.state.max(Pressure::Soft),
    };
    let mut next = memory.merge;
    let mut plan = MergePlan::default();
    let vms: Vec<(&VmModel, &MergeVm)> =
        model.vms.iter().filter_map(|v| Some((v, v.merge.as_ref()?))).collect();
    let group = group(host, &vms);
    if host.config.mode == MergeMode::On {
        steer(model, memory, (host, state), (&group, &vms), &mut plan, &mut next);
    }
    let inside = |v: &VmModel, m: &MergeVm| match host.config.mode {
        MergeMode::On => v.managed && out(v, m, memory, &group, model.at).is_none(),
        _ => v.managed,
    };
    let read = |v: &VmModel, m: &MergeVm| inside(v, m) && v.hands_off.is_none();
    let targets: Vec<&(&VmModel, &MergeVm)> = vms.iter().filter(|(v, m)| read(v, m)).collect();
    let settings = &host.config.settings;
    let cores = settings.share(state);
    plan.scan_cores = host.scan.busy.then_some(cores);
    if !targets.is_empty() {
        next.wanted.get_or_insert(model.at);
    }
    let works = matches!(plan.ksmd, Some(KsmdOrder::Run { .. }));
    if let Some((reason, spot_check)) = due(model, (host, state), works, &targets, &next) {
        next.scan = Some(model.at);
        plan.scan = Some(ScanOrder {
            vms: targets.iter().map(|(v, _)| (v.id, v.group.clone())).collect(),
            spot_check,
            cores,
            threads: settings.cores.clamp(1.0, 1024.0).ceil() as u32,
            bytes_per_second: SCAN_RATE,
            reason,
        });
    }
    if plan.why.is_empty() {
        let found: Candidates = vms.iter().filter_map(|(_, m)| m.sample.found.as_ref()).sum();
        plan.why = match host.scan.number {
            0 => "nothing was scanned yet".into(),
            _ => format!("merging would save {}; merge.mode is not \"on\"", found.saves()),
        };
    }
    Some((plan, next))
}

/// The one group that may be merged (`None`: all together), or why there is none.
fn group(host: &MergeHost, vms: &[(&VmModel, &MergeVm)]) -> Result<Option<String>, String> {
    if host.config.across_groups {
        return Ok(None);
    }
    if let Some(group) = &host.config.group {
        return Ok(Some(group.clone()));
    }
    let wanted = vms.iter().filter(|(_, m)| m.wanted != Some(false));
    let groups: BTreeSet<&str> = wanted.map(|(v, _)| v.group.as_str()).collect();
    match groups.len() {
        0 | 1 => Ok(Some(groups.first().map_or(String::new(), |g| g.to_string()))),
        _ => Err(format!(
            "there are VMs of several share groups ({}) and KSM would merge them together: say \
             which with merge.group",
            Vec::from_iter(groups).join(", ")
        )),
    }
}

/// Why a VM is to be out; `None`: it may be in.
fn out(
    vm: &VmModel,
    part: &MergeVm,
    memory: &Memory,
    group: &Result<Option<String>, String>,
    at: Stamp,
) -> Option<Out> {
    let must = |why: String| Some(Out { why, must: true });
    let remembered = memory.of(vm.id).merge;
    match group {
        Err(why) => return must(why.clone()),
        Ok(Some(group)) if *group != vm.group => {
            return must(format!("it is of group {}, and {group} is merged here", vm.group));
        }
        Ok(Some(_)) if !vm.group_is_proven => {
            return must(format!(
                "it is of group {} by a name that it gives itself: its section needs user or \
                 cgroup where there are several groups",
                vm.group
            ));
        }
        Ok(_) => {}
    }
    if remembered.asked.or(memory.merge.asked) == Some(false) {
        return must("the operator took it out".into());
    }
    if part.wanted == Some(false) && remembered.asked != Some(true) {
        return must("merge = false in the configuration".into());
    }
    let agent = vm.agent.as_ref().filter(|agent| !agent.observes);
    match agent.map(|agent| (&agent.link, agent.advises)) {
        None | Some((Link::Up, true)) => {}
        Some((Link::Up, false)) => {
            return must("its RAM is recycled page by page, which merging would break".into());
        }
        Some((Link::Down(why) | Link::Slow(why) | Link::Taken(why), _)) => {
            return must(format!("its agent does not answer ({why})"));
        }
        Some((Link::Unknown, _)) => return must("its agent was not met yet".into()),
    }
    // Ebb has opened it.
    let asked = part.wanted == Some(true) || remembered.asked == Some(true);
    let is_open = agent.is_none() && part.sample.open == Some(true);
    if is_open && remembered.was == Some(false) && !asked {
        let why = "it was out before, and is not asked for any more".into();
        return Some(Out { why, must: false });
    }
    let left = remembered.storm_until.map(|until| until.since(at)).filter(|left| *left > 0)?;
    let why = format!("its merged pages are written: left out for {} s more", left / 1000);
    Some(Out { why, must: false })
}

type Parties<'a> = (&'a Result<Option<String>, String>, &'a [(&'a VmModel, &'a MergeVm)]);

/// Which VMs are opened and closed, and what `ksmd` does.
fn steer(
    model: &Model,
    memory: &Memory,
    (host, state): (&MergeHost, Pressure),
    (group, vms): Parties<'_>,
    plan: &mut MergePlan,
    next: &mut MergeMemory,
) {
    let Some(ksm) = &host.ksm else {
        return plan.why = "this kernel has no KSM (CONFIG_KSM)".into();
    };
    let mut room = Room::of(model, memory, ksm);
    // What is being broken takes its memory, whatever is decided now.
    let breaks = |vm: &VmModel, part: &MergeVm| {
        let closes = memory.of(vm.id).merge.ordered.is_some_and(|(_, open)| !open);
        part.sample.busy && closes && part.sample.open == Some(true)
    };
    vms.iter().filter(|(vm, part)| breaks(vm, part)).for_each(|(vm, part)| room.reserve(vm, part));
    if let Err(why) = group {
        plan.ksmd = Some(KsmdOrder::Rest { why: why.clone() });
        // Their agents are told to close all.
        let agents = vms.iter().filter(|(vm, _)| vm.agent.as_ref().is_some_and(|a| !a.observes));
        let stays = agents.filter(|(vm, part)| !breaks(vm, part) && !room.take(vm, part, true));
        plan.kept = stays.map(|(vm, _)| vm.id).collect();
        let kept = match plan.kept.len() {
            0 => String::new(),
            n => format!("; no room to break what is merged of {n} VMs"),
        };
        return plan.why = format!("ksmd rests: {why}{kept}");
    }
    let mut blocked = None;
    let (mut planned, mut saved_now) = (Candidates::default(), 0);
    for (vm, part) in vms {
        let (open, out) = (part.sample.open, out(vm, part, memory, group, model.at));
        let remembered = memory.of(vm.id).merge;
        // An agent is told to close all.
        let by_agent = vm.agent.as_ref().is_some_and(|a| !a.observes);
        let closable = (by_agent || part.fixed.is_none()) && open != Some(false);
        if let Some(out) = out.as_ref().filter(|_| closable && !breaks(vm, part))
            && !room.take(vm, part, out.must)
        {
            let needed = room.needed(vm, part);
            let why = format!("{}: {}; no room to break {needed} of it", vm.name, out.why);
            blocked.get_or_insert(why);
            plan.kept.push(vm.id);
            continue;
        }
        if let Some(out) = out.as_ref().filter(|o| o.must && open != Some(false)) {
            blocked.get_or_insert_with(|| blocks(vm, part, out, open));
        }
        if out.is_none() && by_agent {
            plan.ranged.push(vm.id);
        }
        if out.is_none() && open == Some(true) {
            part.sample.found.iter().for_each(|f| planned.add(f));
            saved_now += saved(&part.sample, ksm);
        }
        if let Some(order) = switch(model.at, vm, part, &remembered, out)
            && plan.vms.len() < SWITCHES
        {
            plan.vms.push(order);
        }
    }
    if vms.iter().all(|(_, part)| part.sample.open.is_some()) {
        next.govern.note_closed(&planned, saved_now);
    }
    let facts = Facts {
        at: model.at,
        state,
        planned,
        plan: host.scan.number,
        cpu_ms: ksm.cpu_ms.unwrap_or(0),
        scanned: ksm.pages_scanned,
        scans: ksm.full_scans,
        saved: saved_now,
    };
    let order = match blocked {
        None => govern(&facts, &host.config.settings, &mut next.govern),
        // A burst goes on afterwards: one that began anew each time would never be judged.
        Some(why) => KsmdOrder::Rest { why },
    };
    plan.why = match &order {
        KsmdOrder::Run { why, .. } => format!("ksmd works: {why}"),
        KsmdOrder::Rest { why } => format!("ksmd rests: {why}"),
    };
    plan.ksmd = Some(order);
}

/// What others below a limit may take while merges are broken.
const MEANWHILE: Bytes = Bytes::mib(64);

/// Memory for breaking merges, in a tick.
struct Room<'a> {
    model: &'a Model,
    memory: &'a Memory,
    /// What the host has beyond what it keeps.
    spare: Bytes,
    /// What is left under each limit.
    left: Vec<Bytes>,
    /// `ksmd` works: it still has to count what was broken.
    counts: bool,
}

impl Room<'_> {
    fn of<'a>(model: &'a Model, memory: &'a Memory, ksm: &Ksm) -> Room<'a> {
        let host = &model.host;
        Room {
            model,
            memory,
            spare: host.shown.headroom - host.shown.promised - host.shown.reserve,
            left: host.limits.iter().map(|limit| limit.headroom - MEANWHILE).collect(),
            counts: ksm.run == 1,
        }
    }

    /// What breaking all merges of a VM takes. While `ksmd` rests the kernel goes on counting what was
    /// broken since; a look at the mappings does not, but it may be older than the last merges.
    fn needed(&self, vm: &VmModel, part: &MergeVm) -> Bytes {
        let stat = &part.sample.stat;
        let merged = Bytes::pages(stat.merged());
        let Some((at, seen)) = part.sample.seen.filter(|_| !self.counts) else { return merged };
        let counts = self.memory.of(vm.id).merge.counts.filter(|counts| counts.at == at);
        let counted = stat.merging_pages.unwrap_or(0);
        let newly = counts.map_or(0, |counts| counted.saturating_sub(counts.counted));
        merged.min(seen + Bytes::pages(stat.zero_pages.unwrap_or(0) + newly))
    }

    /// The room under each limit above a VM. One that need not go is also limited by what the host has
    /// beyond its reserve.
    fn above(&mut self, vm: &VmModel, must: bool) -> Vec<&mut Bytes> {
        let limits = self.model.host.limits.iter().zip(&mut self.left);
        let mut above: Vec<&mut Bytes> =
            limits.filter(|(l, _)| vm.is_below(l)).map(|(_, left)| left).collect();
        if !must {
            above.push(&mut self.spare);
        }
        above
    }

    /// Takes that, where it is there. Where a limit is reached, the kernel kills a process, and that
    /// may be a VM. A VM that need not go is closed only from what the host has beyond its reserve.
    fn take(&mut self, vm: &VmModel, part: &MergeVm, must: bool) -> bool {
        let needed = self.needed(vm, part);
        let above = self.above(vm, must);
        let there = above.iter().all(|left| **left >= needed);
        if there {
            above.into_iter().for_each(|left| *left = *left - needed);
        }
        there
    }

    /// Takes the room even if it is not there: QEMU is breaking these merges already.
    fn reserve(&mut self, vm: &VmModel, part: &MergeVm) {
        let needed = self.needed(vm, part);
        self.above(vm, false).into_iter().for_each(|left| *left = *left - needed);
    }
}

/// Why `ksmd` rests because of a VM.
fn blocks(vm: &VmModel, part: &MergeVm, out: &Out, open: Option<bool>) -> String {
    let name = &vm.name;
    match (open, part.fixed.as_ref().or(part.sample.error.as_ref())) {
        (None, Some(e)) => format!("{name} is not known to be out of KSM ({e}), but {}", out.why),
        (None, None) => format!("{name} was not looked at yet"),
        (_, Some(e)) => format!(
            "{name} is open to KSM, but {}, and cannot be closed: {e}; start it with -machine \
             mem-merge=off",
            out.why
        ),
        (_, None) if vm.agent.as_ref().is_some_and(|a| !a.observes && a.link != Link::Up) => {
            format!("{name} is open to KSM, and only its agent can close it: {}", out.why)
        }
        (_, None) => format!("{name} is being closed: {}", out.why),
    }
}

/// The order that a VM needs, if any.
fn switch(
    at: Stamp,
    vm: &VmModel,
    part: &MergeVm,
    remembered: &VmMergeMemory,
    out: Option<Out>,
) -> Option<MergeOrder> {
    let open = part.sample.open?;
    let (to, reason) = match out {
        Some(out) => (false, out.why),
        None if part.wanted == Some(true) => (true, "merge = true in the configuration".into()),
        None if remembered.asked == Some(true) => (true, "the operator wants it in".into()),
        None if remembered.was == Some(true) => (true, "it was in before it was taken out".into()),
        None => return None,
    };
    let again = remembered.ordered.is_none_or(|(when, _)| at.since(when) >= AGAIN_MS);
    let other = remembered.ordered.is_some_and(|(_, was)| was != to);
    let without_agent = vm.agent.as_ref().is_none_or(|agent| agent.observes);
    let can = part.fixed.is_none() && !part.sample.busy && without_agent;
    let order = MergeOrder { vm: vm.id, name: vm.name.clone(), open: to, reason };
    (open != to && can && (again || other)).then_some(order)
}

/// Why a scan is due, if one is; and whether a look at a few pages will do. `works`: `ksmd` does.
fn due(
    model: &Model,
    (host, state): (&MergeHost, Pressure),
    works: bool,
    targets: &[&(&VmModel, &MergeVm)],
    memory: &MergeMemory,
) -> Option<(String, bool)> {
    let (scan, every) = (&host.scan, host.config.scan_ms);
    // A burst in pulses may take hours, and VMs come meanwhile.
    let gentle = is_gentle(host.config.settings.share(state));
    let idle = !scan.busy && (!works || gentle);
    if targets.is_empty() || !idle || state == Pressure::Critical {
        return None;
    }
    let met = |v: &VmModel| v.agent.as_ref().is_none_or(|a| a.link != Link::Unknown);
    let since = match (memory.scan, scan.number) {
        // One that is left out of the first waits long for the next. An agent may not be met while
        // another program has its VM's QMP socket.
        (None, _) => {
            let waited = memory.wanted.is_some_and(|at| model.at.since(at) >= MEET_MS);
            let may = waited || model.vms.iter().all(met);
            return may.then(|| ("the first scan".into(), false));
        }
        (Some(ordered), 0) => model.at.since(ordered),
        (Some(ordered), _) => model.at.since(scan.at.max(ordered)),
    };
    // A scan reads all VMs, not the new ones alone: pages of both may be equal.
    let took = memory.scan.map_or(0, |ordered| scan.at.since(ordered));
    let (young, rest) = match state {
        Pressure::Clear => (YOUNG_MS, YOUNG_MS),
        _ => (YOUNG_SHORT_MS, took.clamp(YOUNG_SHORT_MS, YOUNG_MS)),
    };
    let grown = |m: &MergeVm| m.age_ms.is_none_or(|age| age >= young.min(every));
    if targets.iter().any(|(_, m)| m.sample.found.is_none() && grown(m)) && since >= every.min(rest)
    {
        return Some(("VMs that were not scanned yet".into(), false));
    }
    if let Some(changed) = scan.changed.filter(|changed| *changed >= CHANGED) {
        return Some((format!("some {changed} have changed since the last"), false));
    }
    let wait = match state {
        Pressure::Clear => every << memory.fruitless.min(FRUITLESS_MOST),
        _ => every / 2,
    };
    // Of a sample there is nothing to compare with.
    let spot_check =
        scan.number > 0 && scan.one_in == 1 && scan.spot_checks_since < SPOT_CHECKS_MOST;
    (since >= wait).then(|| (format!("{} s after the last", since / 1000), spot_check))
}
