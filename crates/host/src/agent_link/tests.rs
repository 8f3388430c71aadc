//! One link against an agent that a test plays.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use ebb_core::plan::RecycleOrder;
use ebb_core::wire::{Answer, Lines, Refusal, Refused, Request};

use super::*;
use crate::testing::{agent, eventually, socket};

/// A peer that says hello and tells what came with `attach`, how many descriptors, and
/// its socket.
fn peer(socket: UnixStream, wants_descriptor: bool) -> (Attach, usize, UnixStream) {
    let mut handed = None;
    agent(&socket, wants_descriptor, |command, descriptors| match command {
        Command::Attach(attach) => {
            handed = Some((attach, descriptors));
            None
        }
        _ => Some(Answer::Done),
    });
    let (attach, descriptors) = handed.expect("the daemon hung up");
    (attach, descriptors, socket)
}

/// A link to such a peer.
fn linked(wants_descriptor: bool) -> (AgentLink, JoinHandle<(Attach, usize, UnixStream)>) {
    let (dir, listener, path) = socket();
    let serve = move || {
        let socket = listener.accept().unwrap().0;
        drop(dir);
        peer(socket, wants_descriptor)
    };
    (AgentLink::new(path, std::process::id()), std::thread::spawn(serve))
}

/// A tick of a VM that runs.
fn ask(link: &mut AgentLink, findings: Option<&Findings>) {
    link.ask(Instant::now(), Some(&RunState::Running), &[], Terms::default(), findings);
}

/// Ticks until it has handed its RAM over, with that against it.
fn hands_over<T>(link: &mut AgentLink, peer: JoinHandle<T>, objections: &[&str]) -> T {
    eventually(|| {
        ask(link, Some(&findings(objections)));
        peer.is_finished()
    });
    peer.join().unwrap()
}

fn findings(objections: &[&str]) -> Findings {
    Findings {
        begun: Instant::now(),
        objections: objections.iter().map(|o| o.to_string()).collect(),
        firmware: Firmware::Seabios,
        segments: vec![Segment { gpa: 0, size: 1 << 30, hva: 1 << 40 }],
    }
}

/// What an agent that is so is handed, with that against it.
fn handed(wants_descriptor: bool, objections: &[&str]) -> (Attach, usize) {
    let (mut link, peer) = linked(wants_descriptor);
    let (attach, descriptors, _) = hands_over(&mut link, peer, objections);
    (attach, descriptors)
}

#[test]
fn a_descriptor_goes_to_who_asks_for_it_and_may_work() {
    let there = File::options().read(true).write(true).open(USERFAULTFD).is_ok();
    let (attach, descriptors) = handed(true, &[]);
    assert_eq!((attach.descriptor, descriptors), (there, usize::from(there)));
    let (attach, descriptors) = handed(false, &[]);
    assert_eq!((attach.descriptor, descriptors), (false, 0), "it can make one itself");
    let (attach, descriptors) = handed(true, &["a vhost-user device"]);
    assert_eq!((attach.descriptor, descriptors), (false, 0), "it may not work");
    assert_eq!(attach.objections, ["a vhost-user device"]);
    // Of discards by others the agent is the judge.
    let (attach, descriptors) = handed(true, &[OTHERS_DISCARD]);
    assert_eq!((attach.descriptor, descriptors), (there, usize::from(there)));
}

#[test]
fn without_qemus_word_nothing_is_handed_over_and_nothing_recycled() {
    let (mut link, peer) = linked(false);
    for _ in 0..100 {
        ask(&mut link, None);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!peer.is_finished() && link.stage == Stage::Met);
    let waits = Terms { waits: true, ..Terms::default() };
    link.ask(Instant::now(), Some(&RunState::Running), &[], waits, Some(&findings(&[])));
    assert_eq!(link.stage, Stage::Met, "another one may be breaking merges");
    let _open = hands_over(&mut link, peer, &[]);
    // Attached, and QEMU has not told anything for long.
    link.stage = Stage::Attached;
    (link.known_at, link.known_now) = (Some(Instant::now() - VERDICT_OLD), true);
    let order = |recycle, mark| RecycleOrder {
        vm: ebb_core::sample::VmId { pid: 1, start: 1 },
        name: "a".into(),
        recycle,
        mark,
        reason: String::new(),
    };
    let sent = |link: &AgentLink| link.asked.iter().map(|(kind, _)| *kind).collect::<Vec<_>>();
    link.asked.clear();
    link.order(&order(Some(Default::default()), true));
    assert_eq!(sent(&link), [], "what QEMU has told is old");
    (link.known_at, link.known_now) = (Some(Instant::now()), false);
    link.order(&order(Some(Default::default()), false));
    assert_eq!(sent(&link), [], "that was in an earlier tick");
    assert!(link.awaits_findings());
    assert!(link.sample().busy, "no balloon is to grow meanwhile");
    link.known_now = true;
    link.send_waiting();
    // The map is copied after pages were given back by the copy before.
    assert_eq!(sent(&link), [RequestKind::Recycle, RequestKind::Other]);
    assert!(!link.awaits_findings());
    link.order(&order(None, true));
    assert_eq!(sent(&link), [RequestKind::Recycle, RequestKind::Other, RequestKind::Other]);
    let since = Instant::now() - VERDICT_OLD;
    link.waiting = Some(Waiting { since, recycle: Default::default(), mark: true });
    link.send_waiting();
    assert_eq!((link.asked.len(), link.order_waits()), (3, false), "it has waited too long");
    link.known_now = false;
    link.order(&order(Some(Default::default()), false));
    link.order(&order(None, true));
    assert_eq!(link.asked.len(), 3, "nor is the map copied before");
    assert!(link.sample().busy);
    link.stand_down(Stage::Met);
    link.asked.clear();
    assert!(!link.sample().busy);
    assert_eq!(link.waiting, None, "it is not sent once RAM was handed over anew");
}

#[test]
fn an_agent_whose_connection_was_lost_has_left_only_when_it_says_so() {
    let (_dir, listener, path) = socket();
    let mut link = AgentLink::new(path, std::process::id());
    link.connect(Instant::now());
    link.stage = Stage::Attached;
    link.lose("silent for 20 s".into());
    assert!(!link.has_left(), "it may be in the middle of a window");
    drop(listener.accept().unwrap());
    link.leave(Instant::now(), true);
    link.retry_at = None;
    link.leave(Instant::now(), true);
    // It answers again, and is told to give up what it has protected.
    let socket = listener.accept().unwrap().0;
    let thread = std::thread::spawn(move || peer(socket, false));
    eventually(|| {
        link.hear(Instant::now());
        link.leave(Instant::now(), true);
        link.has_left()
    });
    assert!(link.agent.is_none() && link.stage == Stage::Hello);
    drop(link);
    let _ = thread.join();
}

/// The daemon was killed while the agent was at work for it.
#[test]
fn an_agent_of_an_earlier_daemon_has_left_only_when_it_says_so() {
    let (_dir, listener, path) = socket();
    let mut link = AgentLink::new(path.clone(), std::process::id());
    let now = Instant::now();
    for _ in 0..10 {
        link.leave(now, true);
        assert!(!link.has_left(), "it has said nothing to this daemon");
        link.hear(now);
    }
    let mut line = [0; 4096];
    let n = listener.accept().unwrap().0.read(&mut line).unwrap();
    assert!(String::from_utf8_lossy(&line[..n]).contains("stand_down"));
    // Nobody listens (any more): nothing that was begun lasts so long.
    drop(listener);
    let mut link = AgentLink::new(path, std::process::id());
    let now = Instant::now();
    for (after, left) in [(Duration::ZERO, false), (GONE, true)] {
        link.leave(now + after, true);
        assert_eq!(link.has_left(), left, "{after:?}");
    }
    // It is not spoken to: it is not managed, or to be off.
    let (_dir, listener, path) = socket();
    listener.set_nonblocking(true).unwrap();
    let mut link = AgentLink::new(path, std::process::id());
    link.leave(now, false);
    link.leave(now + 2 * GONE, false);
    assert!(link.has_left() && listener.accept().is_err());
}

/// The last command that the agent was sent.
fn last(link: &mut AgentLink, mut socket: &UnixStream) -> Command {
    link.agent.as_mut().unwrap().pump();
    let mut lines = Lines::default();
    let (mut buffer, mut last) = ([0u8; 4096], None);
    while last.is_none() {
        let got = socket.read(&mut buffer).unwrap();
        lines.feed(&buffer[..got], |l| last = Some(Request::parse(l).unwrap().command)).unwrap();
    }
    last.unwrap()
}

/// One that was handed its RAM, and the agent's end.
fn attached() -> (AgentLink, UnixStream) {
    let (mut link, peer) = linked(false);
    let (_, _, socket) = hands_over(&mut link, peer, &[]);
    link.stage = Stage::Attached;
    (link, socket)
}

#[test]
fn ranges_that_an_agent_could_not_close_are_named_again_after_a_while() {
    let (mut link, _socket) = attached();
    (link.advises, link.told) = (true, Some((Vec::new(), 0)));
    let [a, b] = [0, 8192].map(|offset| Range { start: (1 << 40) + offset, len: 4096 });
    assert_eq!(link.advise(&[a], 1), Some(false), "nothing was open");
    assert_eq!((link.advise(&[a], 1), link.advise(&[a], 2)), (None, Some(false)));
    assert_eq!((link.advise(&[a, b], 3), link.advise(&[b], 4)), (Some(false), Some(true)));
    let no = Refusal { kind: Refused::System, text: "few are left".into() };
    link.answer(RequestKind::Advise, Err(AgentError::Refused("advise".into(), no)));
    assert_eq!(link.refused().map(String::as_str), Some("few are left"));
    // Of a later part.
    link.answer(RequestKind::Advise, Ok(Answer::Advised { open: Bytes(4096) }));
    assert_eq!(link.refused().map(String::as_str), Some("few are left"));
    assert_eq!(link.advise(&[b], 4), None);
    link.refused.iter_mut().for_each(|(at, _)| *at -= PASSES);
    assert_eq!(link.advise(&[b], 4), Some(true), "what is open is not known");
    link.answer(RequestKind::Advise, Ok(Answer::Advised { open: Bytes(4096) }));
    assert_eq!((link.refused(), link.open()), (None, Bytes(4096)));
}

#[test]
fn why_one_stands_aside_is_told_also_while_it_is_handed_its_ram_anew() {
    let (mut link, _socket) = attached();
    let why = Some("no room".into());
    let aside = Status { state: AgentState::Aside, why, passes: true, ..Status::default() };
    link.answer(RequestKind::Status, Ok(Answer::Status(aside)));
    ask(&mut link, None);
    assert_eq!(link.stage, Stage::Attached);
    link.aside_since = link.aside_since.map(|at| at - PASSES);
    ask(&mut link, None);
    let said = link.sample();
    assert_eq!((link.stage, said.link, said.state), (Stage::Met, Link::Unknown, AgentState::Aside));
    assert!(said.why.unwrap().starts_with("no room"));
}

#[test]
fn what_is_unclear_is_cleared_by_a_later_word_of_qemus_and_a_look_at_who_maps_the_ram() {
    let (mut link, socket) = attached();
    let says = |link: &mut AgentLink, unclear| {
        let status = Status { unclear, ..Status::default() };
        link.answer(RequestKind::Status, Ok(Answer::Status(status)));
    };
    assert!(link.wants_mappers().is_none(), "nothing is unclear");
    let before = findings(&[]);
    says(&mut link, Some(3));
    assert_eq!(link.wants_mappers().map(|(g, s)| (g, s.len())), Some((3, 1)));
    let asked = link.asked.len();
    let clear = |link: &mut AgentLink, findings: &Findings| {
        let before = link.asked.len();
        link.clear(Some(findings));
        link.asked.len() > before
    };
    assert!(!clear(&mut link, &findings(&[])), "nobody looked who maps it");
    link.mappers(3, Err("process 7 maps it".into()));
    assert!(link.wants_mappers().is_none(), "it is looked again after a minute");
    assert!(!clear(&mut link, &findings(&[])), "another process maps it");
    assert_eq!(link.sample().why.as_deref(), Some("process 7 maps it"));
    let aside = Status { state: AgentState::Aside, why: Some("x".into()), ..Status::default() };
    let saved = (link.mapped.take(), link.status.replace(aside));
    assert!(link.sample().why.unwrap().contains("x (Ebb goes on as without the agent, and tries"));
    (link.mapped, link.status) = saved;
    link.mappers(3, Ok(()));
    assert!(!clear(&mut link, &before), "QEMU's word is from before the socket");
    assert!(!clear(&mut link, &findings(&["a vhost-user disk"])), "a device may be behind it");
    // Another socket: who maps the RAM is to be looked at again.
    says(&mut link, Some(4));
    assert!(link.wants_mappers().is_some() && !clear(&mut link, &findings(&[])));
    link.mappers(3, Ok(()));
    assert!(!clear(&mut link, &findings(&[])), "that look began before the socket came");
    link.mappers(4, Ok(()));
    says(&mut link, Some(4));
    assert_eq!(link.asked.len(), asked);
    assert!(clear(&mut link, &findings(&[])));
    assert!(matches!(last(&mut link, &socket), Command::Cleared { generation: 4 }));
    assert!(link.wants_mappers().is_none() && !clear(&mut link, &findings(&[])));
}
