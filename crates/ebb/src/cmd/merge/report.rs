//! `ebb merge report`: the scan of VMs' memory, put into numbers and words.
//!
//! [`Report`] is what `--json` says: fields may be added, not renamed.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use ebb_core::config::Config;
use ebb_core::policy::merge::{Candidates, Settings};
use ebb_core::sample::{Ksm, KsmStat};
use ebb_core::units::Bytes;
use ebb_host::probe::ksm::read_ksm;
use ebb_host::root::Root;
use ebb_host::scan::sampling::{Estimate, Sampling, survey};
use ebb_host::scan::{Found, Options, Pages, Scan, ScanOutcome, Scanner, Split, Target, VmResult};
use serde::Serialize;

use super::{Known, look};
use crate::table::{emit, emit_as, row, signed, size, table};
use crate::view::view;

view! {
/// Everything that `ebb merge report --json` says. Sizes are bytes.
#[derive(Debug, Serialize)]
Report(survey: &Sampling, all: Vec<VmReport>, now: Option<Ksm>):
    /// Resident memory of the VMs that KSM could merge.
    held: Bytes = all.iter().map(|v| v.held).sum();
    /// What merging saves without crossing groups.
    saves: Bytes = survey.scan.split.allowed();
    split: Split = survey.scan.split;
    /// For what was only sampled.
    estimate: Option<Estimate> = survey.estimate;
    groups: Vec<GroupReport> = groups(&all);
    vms: Vec<VmReport> = all;
    cost: Cost = cost(&survey.scan.vms);
    scan: ScanReport = ScanReport::new(&survey.scan);
    /// The host's counters; absent where KSM is not built in.
    ksm: Option<Ksm> = now;
}

view! {
#[derive(Debug, Serialize)]
GroupReport(its: &str, count: usize, all: Split):
    name: String = its.into();
    vms: usize = count;
    saves: Bytes = all.allowed();
    split: Split = all;
}

view! {
#[derive(Debug, Serialize)]
VmReport(k: &Known, vm: Option<&VmResult>, how: &'static str, not: Option<String>):
    name: String = k.process.name.clone();
    pid: u32 = k.process.id.pid;
    group: String = k.group.clone();
    /// Resident memory that KSM could merge.
    held: Bytes = held(k, vm.filter(|_| how == "whole"));
    /// Of that, marked for KSM.
    mergeable: Bytes = k.found.as_ref().map_or(Bytes::ZERO, |f| f.mergeable);
    saves: Bytes = vm.map(|vm| vm.split.allowed()).unwrap_or_default();
    split: Split = vm.map(|vm| vm.split).unwrap_or_default();
    /// `whole`, `sample` or `not`.
    read: &'static str = how;
    /// Why it was not, or not all of it can be merged.
    why: Option<String> = not;
    pages: Pages = vm.map(|vm| vm.pages).unwrap_or_default();
    ksm: Option<VmKsm> = k.stat.filter(|s| s.merging_pages.is_some()).map(VmKsm::new);
}

view! {
#[derive(Debug, Serialize)]
VmKsm(stat: KsmStat):
    /// Mapped pages that are merged.
    merged: Bytes = Bytes::pages(stat.merging_pages.unwrap_or(0));
    /// Pages of zeros that were replaced.
    zero: Bytes = Bytes::pages(stat.zero_pages.unwrap_or(0));
    /// Saved less KSM's own, signed.
    profit: Option<i64> = stat.profit;
}

view! {
/// CPU seconds of `ksmd`, by cost per page as measured on another machine.
#[derive(Debug, Serialize)]
Cost(every: &Candidates, paying: &Candidates):
    /// If all memory that was read were given to KSM.
    all: f64 = every.cost_s();
    /// Each further scan of it.
    all_again: f64 = every.again_s();
    /// If only those 2 MiB blocks were that pay.
    steered: f64 = paying.cost_s();
    /// Each further scan of them.
    steered_again: f64 = paying.again_s();
    /// Their share of what was read.
    steered_share: f64 = share(paying.pages, every.pages);
    /// The share of all that can be merged that lies in them.
    steered_finds: f64
        = share(paying.zeros + paying.duplicates, every.zeros + every.duplicates);
}

view! {
#[derive(Debug, Serialize)]
ScanReport(scan: &Scan):
    seconds: f64 = scan.time.as_secs_f64();
    /// Of that, pauses because the host was short of memory.
    paused_seconds: f64 = scan.paused.as_secs_f64();
    cpu_seconds: f64 = scan.cpu.as_secs_f64();
    threads: usize = scan.threads;
    read: Bytes = scan.read;
    /// Reading, hashing and counting.
    bytes_per_cpu_second: f64 = scan.read.0 as f64 / scan.cpu.as_secs_f64().max(1e-9);
    table: Bytes = scan.table;
}

pub(super) fn report(
    config: &Config,
    names: &[String],
    full: bool,
    options: &Options,
    json: bool,
) -> Result<bool> {
    let root = Root::default();
    let known = look(config, &root, names)?;
    if known.is_empty() {
        emit("no VMs: no QEMU process was found\n")?;
        return Ok(false);
    }
    let mut scanner = Scanner::new(root.clone()).context("cannot read random bytes")?;
    let targets: Vec<Target> =
        known.iter().filter_map(|k| k.found.as_ref()?.target.clone()).collect();
    let held = known.iter().filter_map(|k| Some(k.found.as_ref()?.held())).sum();
    let survey = survey(&mut scanner, &targets, held, full, options);
    let report = tell(&known, &survey, read_ksm(&root)?);
    emit_as(json, &report, || Ok(text(&report)))?;
    Ok(true)
}

fn tell(known: &[Known], survey: &Sampling, ksm: Option<Ksm>) -> Report {
    let scan = &survey.scan;
    let scanned = |k: &Known| {
        let i = scan.vms.iter().position(|v| v.target.id == k.process.id)?;
        Some((&scan.vms[i], survey.whole[i]))
    };
    let vms = known.iter().map(|k| vm_report(k, scanned(k))).collect();
    Report::new(survey, vms, ksm)
}

fn vm_report(k: &Known, scanned: Option<(&VmResult, bool)>) -> VmReport {
    let Some((vm, whole)) = scanned else { return VmReport::new(k, None, "not", k.why.clone()) };
    let (read, why) = match &vm.outcome {
        ScanOutcome::Scanned if whole => ("whole", k.why.clone()),
        ScanOutcome::Scanned => ("sample", k.why.clone()),
        ScanOutcome::Ended => ("not", Some("it has ended".into())),
        ScanOutcome::Refused(reason) => ("not", Some(reason.clone())),
    };
    VmReport::new(k, Some(vm), read, why)
}

/// VMs live on: what a whole scan saw goes with what it found.
fn held(k: &Known, whole: Option<&VmResult>) -> Bytes {
    let seen = whole.map(|vm| Bytes::pages(vm.pages.held + vm.pages.merged));
    seen.or(k.found.as_ref().map(Found::held)).unwrap_or_default()
}

fn groups(vms: &[VmReport]) -> Vec<GroupReport> {
    let mut groups: BTreeMap<&str, (usize, Split)> = BTreeMap::new();
    for vm in vms {
        let (count, split) = groups.entry(&vm.group).or_default();
        *count += 1;
        split.add(&vm.split);
    }
    groups.into_iter().map(|(name, (vms, split))| GroupReport::new(name, vms, split)).collect()
}

fn cost(vms: &[VmResult]) -> Cost {
    let floor = Settings::default().floor;
    let blocks = vms.iter().flat_map(|v| v.blocks.iter());
    let all: Vec<Candidates> = blocks.map(|block| block.found()).collect();
    Cost::new(&all.iter().sum(), &all.iter().filter(|found| found.pays(floor)).sum())
}

fn share(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

fn text(r: &Report) -> String {
    let s = &r.scan;
    let mut out = format!(
        "{} VMs hold {} that can be merged; read {} in {:.1} s ({:.1} s of CPU, {} threads, \
         {:.1} GB/s a core)\n\n",
        r.vms.len(),
        r.held,
        s.read,
        s.seconds,
        s.cpu_seconds,
        s.threads,
        s.bytes_per_cpu_second / 1e9
    );
    let head = ["VM", "GROUP", "HELD", "ZERO", "WITHIN", "BETWEEN", "SAVES", "MERGED"];
    let row = |name: &str, group: &str, held: Bytes, split: &Split, merged: Option<Bytes>| {
        let saves = split.allowed();
        let saves = format!("{saves} ({:.0} %)", saves.fraction_of(held) * 100.0);
        row![name, group, held, split.zero, split.within, split.between, saves, size(merged)]
    };
    let merged = |v: &VmReport| v.ksm.as_ref().map(|k| k.merged + k.zero);
    let mut rows: Vec<Vec<String>> =
        r.vms.iter().map(|v| row(&v.name, &v.group, v.held, &v.split, merged(v))).collect();
    if rows.len() > 1 {
        let all = r.vms.iter().filter_map(merged).reduce(|a, b| a + b);
        rows.push(row("all", "", r.held, &r.split, all));
    }
    out += &table(&head, &rows, false);
    out += "\n";
    out += &notes(r);
    out
}

fn notes(r: &Report) -> String {
    let mut out = String::new();
    for vm in &r.vms {
        if let Some(why) = &vm.why {
            out += &format!("{}: {why}\n", vm.name);
        }
    }
    if let Some(e) = &r.estimate {
        let sampled = r.vms.iter().filter(|v| v.read == "sample").count();
        out += &format!(
            "{sampled} VMs were only sampled, few of their pages have duplicates; of all VMs together the \
             sample says {} ({} to {}), zeros not counted: --full reads all\n",
            e.likely, e.low, e.high
        );
    }
    if r.split.across > Bytes::ZERO {
        out += &format!("keeping groups apart leaves {} unmerged\n", r.split.across);
    }
    let c = &r.cost;
    if c.steered_finds > 0.0 {
        out += &format!(
            "ksmd would need about {:.1} s of CPU for all of it and {:.1} s for each further scan; \
             for the {:.0} % of memory with {:.0} % of what can be merged {:.1} s and {:.2} s\n",
            c.all,
            c.all_again,
            c.steered_share * 100.0,
            c.steered_finds * 100.0,
            c.steered,
            c.steered_again
        );
    }
    match &r.ksm {
        None => out += "this kernel has no KSM (CONFIG_KSM)\n",
        Some(k) => {
            let state = ["stopped", "running", "unmerging"].get(k.run as usize).unwrap_or(&"?");
            let saved = k.saved_now();
            let profit =
                k.profit_now().map_or(String::new(), |p| format!(", {} of it profit", signed(p)));
            out += &format!("KSM is {state}; it saves {saved} now{profit}\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str, group: &str, zero: u64, between: u64) -> VmReport {
        let split = Split {
            zero: Bytes::mib(zero),
            between: Bytes::mib(between),
            across: Bytes::mib(3),
            ..Split::default()
        };
        VmReport {
            name: name.into(),
            pid: 1,
            group: group.into(),
            held: Bytes::mib(100),
            mergeable: Bytes::ZERO,
            saves: split.allowed(),
            split,
            read: "whole",
            why: None,
            pages: Pages::default(),
            ksm: None,
        }
    }

    #[test]
    fn groups_are_summed_and_crossing_them_is_no_saving() {
        let vms = [vm("a", "x", 1, 2), vm("b", "y", 4, 8), vm("c", "x", 16, 32)];
        let g = groups(&vms);
        let all: Vec<_> = g.iter().map(|g| (g.name.as_str(), g.vms, g.saves.0 >> 20)).collect();
        assert_eq!(all, [("x", 2, 51), ("y", 1, 12)]);
        assert_eq!(g[0].split.across, Bytes::mib(6));
    }

    #[test]
    fn a_report_of_nothing_can_be_printed() {
        let r = Report {
            held: Bytes::ZERO,
            saves: Bytes::ZERO,
            split: Split::default(),
            estimate: None,
            groups: Vec::new(),
            vms: vec![VmReport { why: Some("it has ended".into()), ..vm("a", "x", 0, 0) }],
            cost: cost(&[]),
            scan: ScanReport {
                seconds: 0.0,
                paused_seconds: 0.0,
                cpu_seconds: 0.0,
                threads: 1,
                read: Bytes::ZERO,
                bytes_per_cpu_second: 0.0,
                table: Bytes::ZERO,
            },
            ksm: Some(Ksm { general_profit: Some(-64), ..Ksm::default() }),
        };
        let text = text(&r);
        assert!(text.contains("a: it has ended\n"), "{text}");
        assert!(text.contains("KSM is stopped; it saves 0 B now, −64 B of it profit"), "{text}");
    }
}
