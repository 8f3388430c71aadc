//! The scanner against memory whose contents are known: processes of our own.

mod agents;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use ebb_core::policy::merge::Candidates;

use super::*;
use crate::probe::pagemap::Pagemap;
use crate::probe::process::read_stat;
use crate::testing::tree;

/// Memory of the holder, pages.
const PAGES: u64 = 4096;
const PAGE_LEN: usize = PAGE as usize;

/// What page `i` of holder `who` holds: a number for a content, 0 for zeros.
/// An eighth zeros, a quarter duplicates within, a quarter common to all, the rest
/// unlike any other.
fn content(who: u64, i: u64) -> u64 {
    match i / 16 % 8 {
        0 => 0,
        1 | 2 => ((who + 1) << 40) | (1 << 32) | (i % 32),
        3 | 4 => (1 << 33) | i,
        _ => ((who + 1) << 40) | (i + 1),
    }
}

fn fill(page: &mut [u8], content: u64) {
    let mut x = content;
    for word in page.chunks_exact_mut(8) {
        x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ content;
        word.copy_from_slice(&x.to_ne_bytes());
    }
}

/// Not a test: the process that the tests below look into. It fills its memory,
/// says where that is, and lives until its input ends. Each word on its input
/// writes the first quarter anew.
#[test]
#[ignore = "started by other tests"]
fn holder() {
    let Some(who) = std::env::var("EBB_HOLDER").ok().and_then(|v| v.parse::<u64>().ok()) else {
        return;
    };
    // Twice as much as is written: the rest stays absent.
    let mut memory = vec![0u8; (2 * PAGES as usize + 1) * PAGE_LEN];
    let pad = memory.as_ptr().align_offset(PAGE_LEN);
    let pages = &mut memory[pad..pad + PAGES as usize * PAGE_LEN];
    let write = |pages: &mut [u8], count: u64, salt: u64| {
        for i in 0..count {
            let page = &mut pages[i as usize * PAGE_LEN..][..PAGE_LEN];
            // Written in any case: a page of zeros that holds memory.
            page[0] = 1;
            fill(page, content(who, i) ^ salt);
        }
    };
    write(pages, PAGES, 0);
    println!("\nat {}", pages.as_ptr() as u64);
    let mut salt = 0;
    while std::io::stdin().read(&mut [0]).unwrap() == 1 {
        salt += 1 << 50;
        write(pages, PAGES / 4, salt);
        println!("written");
    }
}

struct Holder {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
    target: Target,
}

impl Holder {
    fn start(who: u64, group: &str) -> Holder {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "scan::tests::holder", "--ignored", "--nocapture"])
            .env("EBB_HOLDER", who.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let at = line(&mut said, "at ").parse().unwrap();
        let start = read_stat(&Root::default(), child.id()).unwrap().unwrap().start;
        let target = Target {
            id: VmId { pid: child.id(), start },
            name: format!("holder{who}"),
            group: group.into(),
            ram: vec![Range { start: at, len: PAGES * PAGE }],
            merged: Vec::new(),
            open: Vec::new(),
            held: Bytes::pages(PAGES),
        };
        Holder { child, said, target }
    }

    fn write_again(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        line(&mut self.said, "written");
    }

    fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rest of the next line that begins so.
fn line(said: &mut impl BufRead, begin: &str) -> String {
    for line in said.lines() {
        if let Some(rest) = line.unwrap().strip_prefix(begin) {
            return rest.trim().into();
        }
    }
    panic!("the holder ended without “{begin}”");
}

fn scanner() -> Scanner {
    Scanner::new(Root::default()).unwrap()
}

fn targets(holders: &[Holder]) -> Vec<Target> {
    holders.iter().map(|h| h.target.clone()).collect()
}

/// What a scan must find, from the contents: zeros, within, between, across.
fn truth(holders: &[(u64, &str)]) -> [u64; 4] {
    let mut zeros = 0;
    let mut contents: BTreeMap<u64, BTreeMap<&str, BTreeMap<u64, u64>>> = BTreeMap::new();
    for (who, group) in holders {
        for content in (0..PAGES).map(|i| content(*who, i)) {
            let groups = contents.entry(content).or_default();
            *groups.entry(group).or_default().entry(*who).or_default() += 1;
            zeros += u64::from(content == 0);
        }
    }
    contents.remove(&0);
    let (mut within, mut between, mut across) = (0, 0, 0);
    for groups in contents.values() {
        across += groups.len() as u64 - 1;
        between += groups.values().map(|vms| vms.len() as u64 - 1).sum::<u64>();
        within += groups.values().flat_map(BTreeMap::values).map(|n| n - 1).sum::<u64>();
    }
    [zeros, within, between, across]
}

fn found(split: &Split) -> [u64; 4] {
    [split.zero, split.within, split.between, split.across].map(|b| b.0 / PAGE)
}

#[test]
fn pages_are_listed_by_pagemap_scan_where_the_kernel_has_it() {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut parts = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
    let kernel = (parts.next().unwrap(), parts.next().unwrap());
    let pagemap = Pagemap::open(&Root::default(), std::process::id()).unwrap();
    assert_eq!(pagemap.can_scan(), kernel >= (6, 7), "{release}");
}

#[test]
fn a_full_scan_finds_just_what_is_there_however_pages_are_listed() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a"), Holder::start(2, "b")];
    let want = truth(&[(0, "a"), (1, "a"), (2, "b")]);
    assert!(want.iter().all(|n| *n > 0), "{want:?}");
    for entries in [false, true] {
        for threads in [1, 3] {
            let options = Options { threads: Some(threads), entries, ..Options::default() };
            let scan = scanner().scan(&targets(&holders), &options);
            assert_eq!(found(&scan.split), want, "entries: {entries} {threads}");
            for vm in &scan.vms {
                assert_eq!((vm.pages.read, vm.pages.lost), (PAGES, 0), "{entries}");
                assert_eq!(vm.outcome, ScanOutcome::Scanned);
            }
            assert!(scan.table.0 <= scan.read.0 / 200 + 4 * (1 << 20), "{}", scan.table);
        }
    }
}

#[test]
fn duplicates_are_where_the_blocks_say() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let scan = scanner().scan(&targets(&holders), &Options::default());
    for vm in &scan.vms {
        let blocks: Vec<_> = vm.blocks.iter().collect();
        let mut sum = Candidates::default();
        blocks.iter().for_each(|b| sum.add(&b.found()));
        assert_eq!((sum.pages, sum.zeros, sum.duplicates), (PAGES, vm.pages.zero, vm.duplicates));
        // Half of all pages, by `content`.
        assert_eq!(vm.duplicates, PAGES / 2);
        assert!(blocks.iter().all(|b| b.start % BLOCK == 0));
    }
}

#[test]
fn absent_pages_are_not_read_and_not_brought_in() {
    let mut holder = Holder::start(0, "a");
    holder.target.ram[0].len = 2 * PAGES * PAGE;
    for entries in [false, true] {
        let options = Options { entries, ..Options::default() };
        let scan = scanner().scan(std::slice::from_ref(&holder.target), &options);
        assert_eq!((scan.vms[0].pages.held, scan.vms[0].pages.read), (PAGES, PAGES));
        // A page of zeros that reading had brought in would be listed now.
        let pid = holder.target.id.pid;
        let walker = walk::Walker::open(&Root::default(), pid, false, true).unwrap();
        let mut runs = walk::Runs::default();
        walker.runs(holder.target.ram[0], &[], &walk::ListedPages::default(), &mut runs).unwrap();
        assert_eq!(runs.pages(), PAGES);
    }
}

#[test]
fn what_may_be_merged_is_read_without_pinning_and_is_the_same() {
    let mut holder = Holder::start(0, "a");
    let at = holder.target.ram[0].start;
    holder.target.merged = vec![Range { start: at + 7 * PAGE, len: 900 * PAGE }];
    for entries in [false, true] {
        let options = Options { entries, ..Options::default() };
        let scan = scanner().scan(std::slice::from_ref(&holder.target), &options);
        assert_eq!((scan.vms[0].pages.read, scan.vms[0].pages.lost), (PAGES, 0), "{entries}");
        assert_eq!(found(&scan.split), truth(&[(0, "a")]), "entries: {entries}");
    }
}

#[test]
fn a_scan_tells_what_has_changed_since_the_last() {
    let mut holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let mut scanner = scanner();
    let options = Options { changes: Changes::Note, ..Options::default() };
    let first = scanner.scan(&targets(&holders), &options);
    assert_eq!(first.vms[0].pages.changed, PAGES, "all of it is new");
    let second = scanner.scan(&targets(&holders), &options);
    assert_eq!(found(&second.split), truth(&[(0, "a"), (1, "a")]));
    assert_eq!(second.vms[0].pages.changed, 0);
    holders[1].write_again();
    let third = scanner.scan(&targets(&holders), &options);
    assert_eq!(third.vms[0].pages.changed, 0);
    assert_eq!(third.vms[1].pages.changed, PAGES / 4);
}

#[test]
fn a_look_at_a_few_pages_tells_how_much_has_changed_since_the_last_scan() {
    let mut holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let mut scanner = scanner();
    let all = targets(&holders);
    let noted = scanner.scan(&all, &Options { changes: Changes::Note, ..Options::default() });
    assert_eq!(found(&noted.split), truth(&[(0, "a"), (1, "a")]), "all of it counts");
    let mut look = |salt| {
        let options = Options {
            changes: Changes::SpotCheck,
            one_in: 4,
            salt,
            threads: Some(1),
            ..Options::default()
        };
        let scan = scanner.scan(&all, &options);
        assert_eq!(scan.split, Split::default(), "nothing is counted");
        (scan.vms[0].pages, scan.vms[1].pages)
    };
    let mut read = 0;
    for salt in 0..20 {
        let (a, b) = look(salt);
        assert_eq!((a.changed, b.changed), (0, 0));
        read += a.read;
    }
    // 20 × 1024 pieces of four pages, of which a quarter: 5120 ± 62, each time others.
    assert!((4800..5450).contains(&(read / 4)), "{read}");
    holders[1].write_again();
    let looks: Vec<_> = (0..20).map(&mut look).collect();
    assert!(looks.iter().all(|(a, _)| a.changed == 0));
    let (changed, read) = looks.iter().fold((0, 0), |(c, r), (_, b)| (c + b.changed, r + b.read));
    // A spot check changes nothing of what is known: a quarter, each time.
    let share = changed as f64 / read as f64;
    assert!((0.22..0.28).contains(&share), "{share}");
}

#[test]
fn memory_that_changes_meanwhile_disturbs_nothing() {
    let mut writer = Holder::start(0, "a");
    let still = Holder::start(1, "a");
    let all = [writer.target.clone(), still.target.clone()];
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..40 {
                writer.write_again();
            }
            done.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        let mut scans = 0;
        while !done.load(std::sync::atomic::Ordering::SeqCst) || scans < 3 {
            let scan = scanner().scan(&all, &Options::default());
            assert_eq!(scan.vms[0].pages.read, PAGES);
            let [zeros, within, ..] = truth(&[(1, "a")]);
            assert_eq!(scan.vms[1].split.zero, Bytes::pages(zeros));
            assert!(scan.vms[1].split.within >= Bytes::pages(within));
            scans += 1;
        }
    });
}

#[test]
fn a_vm_that_ends_in_the_middle_is_dropped_and_the_others_stand() {
    let mut holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    holders[0].end();
    let scan = scanner().scan(&targets(&holders), &Options::default());
    assert_eq!((&scan.vms[0].outcome, scan.vms[0].pages), (&ScanOutcome::Ended, Pages::default()));
    let [zeros, within, ..] = truth(&[(1, "a")]);
    assert_eq!(found(&scan.split), [zeros, within, 0, 0]);
    // At any moment of a scan, which is slowed down for it.
    for n in 0..8 {
        let mut victim = Holder::start(0, "a");
        let all = [victim.target.clone(), holders[1].target.clone()];
        let limits = Limits { bytes_per_second: Some(64e6), ..Limits::default() };
        let options = Options { threads: Some(1), limits, ..Options::default() };
        let scan = std::thread::scope(|s| {
            let scan = s.spawn(|| scanner().scan(&all, &options));
            std::thread::sleep(Duration::from_millis(n * 40));
            victim.end();
            scan.join().unwrap()
        });
        let ended = scan.vms[0].outcome == ScanOutcome::Ended;
        let want = if ended { [zeros, within, 0, 0] } else { truth(&[(0, "a"), (1, "a")]) };
        assert_eq!(found(&scan.split), want, "{n}");
    }
}

#[test]
fn a_vm_that_is_to_be_left_alone_is_not_read_and_counts_as_ended() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let options = Options::default();
    options.readers.leave_alone([holders[0].target.id].into());
    let scan = scanner().scan(&targets(&holders), &options);
    assert_eq!((&scan.vms[0].outcome, scan.vms[0].pages), (&ScanOutcome::Ended, Pages::default()));
    let [zeros, within, ..] = truth(&[(1, "a")]);
    assert_eq!(found(&scan.split), [zeros, within, 0, 0]);
    assert!(holders.iter().all(|h| !options.readers.reads(h.target.id)));
    // While it is read, that shows; and when it is no longer, nothing more of it is read.
    let limits = Limits { bytes_per_second: Some(4e6), ..Limits::default() };
    let options = Options { threads: Some(1), limits, ..Options::default() };
    let id = holders[0].target.id;
    let until = Instant::now() + Duration::from_secs(20);
    let wait = |reads: bool| {
        while options.readers.reads(id) != reads {
            assert!(Instant::now() < until, "{reads}: not in 20 s");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let scan = std::thread::scope(|s| {
        let scan = s.spawn(|| scanner().scan(&targets(&holders), &options));
        wait(true);
        options.readers.leave_alone(holders.iter().map(|h| h.target.id).collect());
        wait(false);
        scan.join().unwrap()
    });
    assert_eq!(scan.vms[1].outcome, ScanOutcome::Ended);
}

#[test]
fn a_pid_that_is_another_process_by_now_is_an_ended_vm() {
    let mut holder = Holder::start(0, "a");
    holder.target.id.start += 1;
    let scan = scanner().scan(std::slice::from_ref(&holder.target), &Options::default());
    assert_eq!(scan.vms[0].outcome, ScanOutcome::Ended);
    assert_eq!(scan.split, Split::default());
}

#[test]
fn a_process_that_may_not_be_read_is_named_with_what_to_do() {
    // A kernel thread has no memory to read; refusal proper needs another user.
    let start = read_stat(&Root::default(), 2).unwrap().map(|s| s.start);
    let Some(start) = start else { return };
    let mut holder = Holder::start(0, "a");
    holder.target.id = VmId { pid: 2, start };
    let scan = scanner().scan(std::slice::from_ref(&holder.target), &Options::default());
    assert_eq!(scan.vms[0].pages.read, 0);
    let refused = steps::outcome_of(&rustix::io::Errno::PERM.into(), &holder.target);
    let ScanOutcome::Refused(why) = refused else { panic!("{refused:?}") };
    assert!(why.contains("CAP_SYS_PTRACE"), "{why}");
}

#[test]
fn limits_are_kept() {
    let holder = Holder::start(0, "a");
    let size = (PAGES * PAGE) as f64;
    let limits = Limits { bytes_per_second: Some(size / 0.4), cores: None };
    let options = Options { limits, ..Options::default() };
    let scan = scanner().scan(std::slice::from_ref(&holder.target), &options);
    // Never faster than allowed; how much slower is the machine's affair.
    assert!(scan.time >= Duration::from_millis(390), "{:?}", scan.time);
    assert_eq!(scan.read, Bytes(PAGES * PAGE));
}

#[test]
fn a_gentle_scan_finds_the_same_and_hurries_when_it_is_told_to() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let dial = std::sync::Arc::new(Dial::new(0.002));
    let options = Options { threads: Some(1), dial: Some(dial.clone()), ..Options::default() };
    let (all, begun) = (targets(&holders), std::time::Instant::now());
    let scan = std::thread::scope(|s| {
        let scan = s.spawn(|| scanner().scan(&all, &options));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!scan.is_finished(), "or this test shows nothing");
        dial.set(1.0);
        scan.join().unwrap()
    });
    assert_eq!(found(&scan.split), truth(&[(0, "a"), (1, "a")]));
    // At the first speed it would have taken so long.
    let slow = scan.cpu.mul_f64(1.0 / 0.002);
    assert!(begun.elapsed() < slow.mul_f64(0.5), "{:?} of {slow:?}", begun.elapsed());
}

#[test]
fn a_sample_reads_its_share() {
    let holder = Holder::start(0, "a");
    let mut read = 0;
    for _ in 0..20 {
        let options = Options { one_in: 8, ..Options::default() };
        let scan = scanner().scan(std::slice::from_ref(&holder.target), &options);
        assert_eq!(scan.vms[0].pages.held, PAGES);
        read += scan.vms[0].pages.read;
    }
    // 20 × 256 pieces, of which an eighth: 640 ± 24.
    let pieces = read / 16;
    assert!((500..780).contains(&pieces), "{pieces}");
}

#[test]
fn a_survey_of_little_reads_all_and_tells_the_same() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let held = Bytes(2 * PAGES * PAGE);
    let all = targets(&holders);
    let survey = sampling::survey(&mut scanner(), &all, held, false, &Options::default());
    assert_eq!(found(&survey.scan.split), truth(&[(0, "a"), (1, "a")]));
    assert_eq!((survey.whole, survey.estimate), (vec![true; 2], None));
}

#[test]
fn a_survey_of_much_reads_whole_what_has_duplicates_in_a_sample() {
    let mut unlike = Holder::start(0, "a");
    // Its last quarters alone: no two pages are alike there, and none of others'.
    let range = unlike.target.ram[0];
    let piece = |i: u64| Range { start: range.start + (i * 8 + 5) * 16 * PAGE, len: 48 * PAGE };
    unlike.target.ram = (0..PAGES / 128).map(piece).collect();
    let like = Holder::start(1, "a");
    let all = [unlike.target.clone(), like.target.clone()];
    // A sample may by chance hold no two of the duplicates, though hardly ever.
    let deep = (0..4).find_map(|_| {
        let held = Bytes::gib(4096);
        let survey = sampling::survey(&mut scanner(), &all, held, false, &Options::default());
        assert!(!survey.whole[0] && survey.estimate.is_some());
        survey.whole[1].then_some(survey)
    });
    let [zeros, within, ..] = truth(&[(1, "a")]);
    assert_eq!(found(&deep.unwrap().scan.split), [zeros, within, 0, 0]);
}

#[test]
fn ram_that_is_many_times_the_hosts_memory_is_not_scanned() {
    let root = tree(&[]);
    let found = |gib: u64| {
        let (at, end) = (1u64 << 40, (1u64 << 40) + (gib << 30));
        let line = format!("{at:x}-{end:x} rw-p 00000000 00:00 0\n");
        root.put("/proc/7/smaps", line + "Rss: 4096 kB\nVmFlags: rd wr dc mg\n");
        Found::look(&root, VmId { pid: 7, start: 1 }, "a", "g").unwrap().unwrap()
    };
    assert!(found(1 << 14).target.is_some(), "the host's memory is not known");
    let meminfo = "MemTotal: 1048576 kB\nMemFree: 9 kB\nMemAvailable: 9 kB\n";
    root.put("/proc/meminfo", meminfo);
    let most = found(16);
    assert!(most.target.is_some() && most.refused.is_none());
    let beyond = found(17);
    assert_eq!(beyond.target, None);
    let (size, why) = beyond.refused.unwrap();
    assert!(size == Bytes::mib(4) && why == TOO_LARGE, "{why}");
}
