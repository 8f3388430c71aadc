//! The same with agents: stand-ins that read the holders, or say what they like.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use ebb_core::wire::Segment;
use ebb_core::wire::hashes::{HashReply, HashRequest};

use super::*;
use crate::sys::read_process;

/// Answers until `answers` are given, then hangs up; `change` what it says.
fn agent(
    target: &Target,
    answers: u64,
    change: impl Fn(&mut HashReply) + Send + 'static,
) -> (Arc<HashLink>, Arc<AtomicU64>) {
    // The last pages are none of its RAM.
    let segment = Segment { gpa: 0, size: (PAGES - 64) * PAGE, hva: target.ram[0].start };
    let (ours, theirs) = HashLink::pair(&[segment]).unwrap();
    let (pid, given) = (target.id.pid, Arc::new(AtomicU64::new(0)));
    let count = Arc::clone(&given);
    std::thread::spawn(move || {
        let mut socket = UnixStream::from(theirs);
        let mut head = [0; HashRequest::HEAD];
        while count.load(SeqCst) < answers && socket.read_exact(&mut head).is_ok() {
            let mut rest = vec![0; HashRequest::rest(&head).unwrap()];
            socket.read_exact(&mut rest).unwrap();
            let ask = HashRequest::parse(&head, &rest).unwrap();
            let mut told = answer(pid, &ask);
            change(&mut told);
            socket.write_all(&told.encode()).unwrap();
            count.fetch_add(1, SeqCst);
        }
    });
    (Arc::new(ours), given)
}

fn answer(pid: u32, ask: &HashRequest) -> HashReply {
    let key = Key::new(ask.secret);
    let mut told = HashReply { cpu_ns: 1000, ..HashReply::default() };
    for &range in &ask.ranges {
        let mut bytes = vec![0; range.len as usize];
        read_process(pid, &[range], &mut bytes).unwrap();
        let pages = bytes.chunks_exact(PAGE_LEN).map(|page| match ask.lines {
            true => key.of_page_lines(page),
            false => key.page(page).unwrap_or(0),
        });
        told.pages.extend((range.start / PAGE..).zip(pages));
    }
    told.held = told.pages.len() as u64;
    told
}

/// The first two have agents; the second one's agent stops after `answers` answers.
fn with_agents(all: &[Target], answers: u64) -> (Scanner, Arc<HashLink>) {
    let [first, second] =
        [(0, u64::MAX), (1, answers)].map(|(n, most)| agent(&all[n], most, |_| ()).0);
    let mut scanner = scanner();
    scanner.use_agents([(all[0].id, first), (all[1].id, second.clone())].into());
    (scanner, second)
}

#[test]
fn agents_find_what_is_there_and_where_one_fails_its_vm_is_read_from_outside() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let all = targets(&holders);
    // The second hangs up after its first answer, in the middle of its VM.
    for answers in [u64::MAX, 1, 0] {
        let (mut scanner, second) = with_agents(&all, answers);
        let scan = scanner.scan(&all, &Options { changes: Changes::Note, ..Options::default() });
        assert_eq!(found(&scan.split), truth(&[(0, "a"), (1, "a")]), "{answers}");
        assert!(scan.vms.iter().all(|v| v.pages.read == PAGES && v.pages.held == PAGES));
        // It may have been asked once only.
        if answers != 1 {
            assert_eq!(second.failure().is_some(), answers == 0);
            let by = if answers == 0 { 1 } else { 2 };
            assert_eq!(scan.by_agents, Bytes::pages(by * (PAGES - 64)));
        }
        assert!(scan.by_agents >= Bytes::pages(PAGES - 64));
        // A spot check: what the agent noted is what is read from outside, and the other way.
        let one_in = 4;
        let look = Options { changes: Changes::SpotCheck, one_in, ..Options::default() };
        let look = scanner.scan(&all, &look);
        assert!(look.vms.iter().all(|v| v.pages.read > 0 && v.pages.changed == 0));
    }
}

/// Agents that read lines first, one of which fails in any place, and a VM without one.
#[test]
fn lines_first_finds_the_same_and_reads_little_of_what_is_alone() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a"), Holder::start(2, "b")];
    let all = targets(&holders);
    for answers in [u64::MAX, 3, 1, 0] {
        let (mut scanner, _) = with_agents(&all, answers);
        let (filter, changes) = (true, Changes::Note);
        let scan = scanner.scan(&all, &Options { filter, changes, ..Options::default() });
        assert!(scan.vms.iter().all(|v| v.pages.read == PAGES && v.pages.held == PAGES));
        assert_eq!(scan.read, Bytes::pages(3 * PAGES));
        // Three eighths are alone, a quarter of that in no VM with an agent.
        let alone = |vms: u64| vms * PAGES * 3 / 8;
        let pages = scan.by_lines.0 / PAGE;
        let least = alone(if answers == u64::MAX { 2 } else { 1 }) * 8 / 10;
        assert!((least..=alone(2)).contains(&pages), "{answers}: {pages}");
        let want = truth(&[(0, "a"), (1, "a"), (2, "b")]);
        assert_eq!(found(&scan.split), want, "{answers}");
        let blocks = |v: &VmResult| {
            let mut sum = Candidates::default();
            v.blocks.iter().for_each(|b| sum.add(&b.found()));
            (sum.pages, sum.zeros, sum.duplicates)
        };
        let known = |v: &VmResult| (PAGES, v.pages.zero, v.duplicates);
        assert!(scan.vms.iter().all(|v| blocks(v) == known(v)), "{answers}");
        let zeros: u64 = scan.vms.iter().map(|v| v.pages.zero).sum();
        assert_eq!(scan.moments.pages as u64, 3 * PAGES - zeros, "all are counted");
        // What lines were noted by is what is looked at, from inside and outside.
        let (changes, one_in) = (Changes::SpotCheck, 4);
        let look = scanner.scan(&all, &Options { filter, changes, one_in, ..Options::default() });
        assert!(look.vms.iter().all(|v| v.pages.read > 0 && v.pages.changed == 0));
    }
    // The second writes a quarter of its memory anew.
    let mut holders = holders;
    let links = all.iter().map(|t| (t.id, agent(t, u64::MAX, |_| ()).0)).collect();
    let mut scanner = scanner();
    scanner.use_agents(links);
    let options = Options { filter: true, changes: Changes::Note, ..Options::default() };
    let first = scanner.scan(&all, &options);
    holders[1].write_again();
    let second = scanner.scan(&all, &options);
    let changed = |scan: &Scan| scan.vms.iter().map(|v| v.pages.changed).collect::<Vec<_>>();
    assert_eq!((changed(&first), changed(&second)), (vec![PAGES; 3], vec![0, PAGES / 4, 0]));
    assert!(second.split.between < first.split.between);
}

#[test]
fn an_agent_that_lies_costs_an_estimate_and_is_bounded() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let all = targets(&holders);
    // All its pages are the first of the other's, it says, and cost ten years.
    let lie = |told: &mut HashReply| {
        told.pages.iter_mut().for_each(|p| p.1 = 77);
        told.cpu_ns = u64::MAX;
    };
    let mut scanner = scanner();
    let (link, given) = agent(&all[1], u64::MAX, lie);
    scanner.use_agents([(all[1].id, link)].into());
    let scan = scanner.scan(&all, &Options::default());
    assert!(given.load(SeqCst) > 0 && scan.by_agents == Bytes::pages(PAGES - 64));
    assert!(scan.cpu < scan.time * 8, "{:?} in {:?}", scan.cpu, scan.time);
    // Duplicates of its own making, and none for the other.
    assert!(scan.vms[1].duplicates >= PAGES - 64);
    let alone = self::scanner().scan(&all[..1], &Options::default());
    let own = |scan: &Scan| (scan.vms[0].duplicates, scan.vms[0].pages.zero);
    // But for what it tells the truth about.
    assert!(own(&scan).0 <= own(&alone).0 + 64 && own(&scan).1 == own(&alone).1);
}
