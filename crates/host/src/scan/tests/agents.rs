//! The same with agents: stand-ins that read the holders, or say what they like.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use ebb_core::wire::Segment;
use ebb_core::wire::hashes::{Ask, Told};

use super::*;
use crate::sys::read_process;

/// Answers until `answers` are given, then hangs up; `change` what it says.
fn agent(
    target: &Target,
    answers: u64,
    change: impl Fn(&mut Told) + Send + 'static,
) -> (Arc<HashLink>, Arc<AtomicU64>) {
    // The last pages are none of its RAM.
    let segment = Segment { gpa: 0, size: (PAGES - 64) * PAGE, hva: target.ram[0].start };
    let (ours, theirs) = HashLink::pair(&[segment]).unwrap();
    let (pid, given) = (target.id.pid, Arc::new(AtomicU64::new(0)));
    let count = Arc::clone(&given);
    std::thread::spawn(move || {
        let mut socket = UnixStream::from(theirs);
        let mut head = [0; Ask::HEAD];
        while count.load(SeqCst) < answers && socket.read_exact(&mut head).is_ok() {
            let mut rest = vec![0; Ask::rest(&head).unwrap()];
            socket.read_exact(&mut rest).unwrap();
            let ask = Ask::parse(&head, &rest).unwrap();
            let mut told = answer(pid, &ask);
            change(&mut told);
            socket.write_all(&told.encode()).unwrap();
            count.fetch_add(1, SeqCst);
        }
    });
    (Arc::new(ours), given)
}

fn answer(pid: u32, ask: &Ask) -> Told {
    let key = Key::new(ask.secret);
    let mut told = Told { cpu_ns: 1000, ..Told::default() };
    for &(start, len) in &ask.ranges {
        let mut bytes = vec![0; len as usize];
        read_process(pid, &[Range { start, len }], &mut bytes).unwrap();
        let pages = bytes.chunks_exact(PAGE_LEN).map(|page| key.page(page).unwrap_or(0));
        told.pages.extend((start / PAGE..).zip(pages));
    }
    told.held = told.pages.len() as u64;
    told
}

#[test]
fn agents_find_what_is_there_and_where_one_fails_its_vm_is_read_from_outside() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let all = targets(&holders);
    // The second hangs up after its first answer, in the middle of its VM.
    for answers in [u64::MAX, 1, 0] {
        let links = [agent(&all[0], u64::MAX, |_| ()), agent(&all[1], answers, |_| ())];
        let mut scanner = scanner();
        scanner
            .use_agents(all.iter().map(|t| t.id).zip(links.iter().map(|l| l.0.clone())).collect());
        let scan = scanner.scan(&all, &Options { changes: Changes::Note, ..Options::default() });
        assert_eq!(found(&scan.split), truth(&[(0, "a"), (1, "a")]), "{answers}");
        assert!(scan.vms.iter().all(|v| v.pages.read == PAGES && v.pages.held == PAGES));
        // It may have been asked once only.
        if answers != 1 {
            assert_eq!(links[1].0.failure().is_some(), answers == 0);
            let by = if answers == 0 { 1 } else { 2 };
            assert_eq!(scan.by_agents, Bytes::pages(by * (PAGES - 64)));
        }
        assert!(scan.by_agents >= Bytes::pages(PAGES - 64));
        // A look: what the agent noted is what is read from outside, and the other way.
        let one_in = 4;
        let look = Options { changes: Changes::Look, one_in, ..Options::default() };
        let look = scanner.scan(&all, &look);
        assert!(look.vms.iter().all(|v| v.pages.read > 0 && v.pages.changed == 0));
    }
}

#[test]
fn an_agent_that_lies_costs_an_estimate_and_is_bounded() {
    let holders = [Holder::start(0, "a"), Holder::start(1, "a")];
    let all = targets(&holders);
    // All its pages are the first of the other's, it says, and cost ten years.
    let lie = |told: &mut Told| {
        told.pages.iter_mut().for_each(|p| p.1 = 77);
        told.cpu_ns = u64::MAX;
    };
    let mut scanner = scanner();
    let (link, given) = agent(&all[1], u64::MAX, lie);
    scanner.use_agents([(all[1].id, link)].into());
    let scan = scanner.scan(&all, &Options::default());
    assert!(given.load(SeqCst) > 0 && scan.by_agents == Bytes::pages(PAGES - 64));
    assert!(scan.cpu < scan.time * 8, "{:?} in {:?}", scan.cpu, scan.time);
    // Twins of its own making, and none for the other.
    assert!(scan.vms[1].twins >= PAGES - 64);
    let alone = self::scanner().scan(&all[..1], &Options::default());
    let own = |scan: &Scan| (scan.vms[0].twins, scan.vms[0].pages.zero);
    // But for what it tells the truth about.
    assert!(own(&scan).0 <= own(&alone).0 + 64 && own(&scan).1 == own(&alone).1);
}
