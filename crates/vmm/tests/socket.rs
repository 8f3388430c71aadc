//! The agent behind its socket: requests as lines, who may speak, what happens
//! when a daemon goes.

#![allow(unsafe_code)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use ebb_core::wire::{AgentState, Answer, Attach, Command, PROTOCOL};
use ebb_core::wire::{Recycle, Recycled, Reply, ReplyResult, Request};
use ebb_vmm::faults::Faults;
use ebb_vmm::server::{Peers, Server};

fn path(name: &str) -> PathBuf {
    let dir = std::env::temp_dir();
    dir.join(format!("ebb-agent-{name}-{}", std::process::id()))
}

struct Daemon {
    socket: BufReader<UnixStream>,
    next: u64,
}

impl Daemon {
    fn connect(path: &PathBuf) -> Daemon {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Daemon { socket: BufReader::new(socket), next: 1 }
    }

    fn say(&mut self, command: Command) -> u64 {
        let id = self.next;
        self.next += 1;
        self.socket.get_mut().write_all(&Request { id, command }.line()).unwrap();
        id
    }

    fn hear(&mut self) -> Option<Reply> {
        let mut line = String::new();
        self.socket.read_line(&mut line).ok().filter(|n| *n > 0)?;
        Some(Reply::parse(line.trim_end().as_bytes()).unwrap())
    }

    fn ask(&mut self, command: Command) -> ReplyResult {
        let id = self.say(command);
        let reply = self.hear().expect("an answer");
        assert_eq!(reply.id, id);
        reply.result
    }

    fn state(&mut self) -> AgentState {
        match self.ask(Command::Status { held: false, room: None }) {
            ReplyResult::Ok(Answer::Status(s)) => s.state,
            other => panic!("{other:?}"),
        }
    }

    fn attach(&mut self, guest: &Guest) {
        self.ask(Command::Attach(guest.attach()));
        self.until(AgentState::Ready);
    }

    fn until(&mut self, state: AgentState) {
        let is = within(Duration::from_secs(10), || self.state() == state);
        assert!(is, "{:?}", self.ask(Command::Status { held: true, room: None }));
    }
}

fn recycled(result: ReplyResult) -> Recycled {
    match result {
        ReplyResult::Ok(Answer::Recycled(done)) => done,
        other => panic!("{other:?}"),
    }
}

fn served(name: &str) -> (Server, PathBuf, Arc<Guest>, Beside) {
    let path = path(name);
    let server = Server::start(&path, Peers::Root, Faults::default()).unwrap();
    let guest = Guest::new(64, RamKind::Small);
    let beats = guest.beating();
    (server, path, guest, beats)
}

#[test]
fn a_daemon_is_served_and_only_one() {
    let (_server, path, guest, _beats) = served("one");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut daemon = Daemon::connect(&path);
    let ReplyResult::Ok(Answer::Hello(hello)) = daemon.ask(Command::Hello) else { panic!() };
    assert_eq!((hello.protocol, hello.pid), (PROTOCOL, std::process::id()));
    assert_eq!(daemon.state(), AgentState::Idle);
    let mut second = Daemon::connect(&path);
    assert!(matches!(second.hear().unwrap().result, ReplyResult::Error(_)));
    assert!(second.hear().is_none());
    daemon.attach(&guest);
    guest.fill_and_free(FIRST, 1000);
    let done = recycled(daemon.ask(Command::Recycle(Recycle::default())));
    assert_eq!(done.bytes.0, 1000 * 4096);
    // It goes; page 0 can be written to at once, and the next one finds it idle.
    drop(daemon);
    let begun = Instant::now();
    guest.write(0, 1);
    assert!(begun.elapsed() < Duration::from_secs(1));
    let mut next = Daemon::connect(&path);
    assert_eq!(next.state(), AgentState::Idle);
}

#[test]
fn a_descriptor_of_userfaultfd_is_used() {
    let Ok(device) = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd")
    else {
        return println!("skipped: /dev/userfaultfd cannot be opened here");
    };
    let (_server, path, guest, _beats) = served("fd");
    let mut daemon = Daemon::connect(&path);
    let attach = Attach { descriptor: true, ..guest.attach() };
    let ReplyResult::Error(_) = daemon.ask(Command::Attach(attach.clone())) else { panic!() };
    let line = Request { id: 7, command: Command::Attach(attach) }.line();
    let fds = [device.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
    let flags = rustix::net::SendFlags::NOSIGNAL;
    let parts = [std::io::IoSlice::new(&line)];
    let sent = rustix::net::sendmsg(daemon.socket.get_ref(), &parts, &mut control, flags);
    assert_eq!(sent.unwrap(), line.len());
    assert_eq!(daemon.hear().unwrap().result, ReplyResult::Ok(Answer::Done));
    daemon.until(AgentState::Ready);
}

#[test]
fn nonsense_ends_or_is_refused_and_urgent_words_are_heard() {
    let (_server, path, guest, _beats) = served("nonsense");
    let mut daemon = Daemon::connect(&path);
    daemon.socket.get_mut().write_all(b"{\"id\":1,\"command\":\"dance\"}\n").unwrap();
    assert!(matches!(daemon.hear().unwrap().result, ReplyResult::Error(_)));
    daemon.attach(&guest);
    guest.fill_and_free(FIRST, 15_000);
    // Other requests wait for the end of a recycle, word of a reset does not.
    let all = Recycle { budget_ms: 5000, ..Recycle::default() };
    daemon.say(Command::Recycle(all));
    daemon.say(Command::Mark);
    let r = recycled(daemon.hear().unwrap().result);
    assert!(!r.more && r.bytes.0 == 15_000 * 4096, "{r:?}");
    daemon.hear().unwrap();
    guest.fill_and_free(FIRST, 15_000);
    daemon.say(Command::Recycle(all));
    daemon.say(Command::StandDown);
    println!("{:?}", recycled(daemon.hear().unwrap().result));
    daemon.hear().unwrap();
    assert_eq!(daemon.state(), AgentState::Idle);
    // A line without an end.
    let _ = daemon.socket.get_mut().write_all(&[b'x'; 40_000]);
    assert!(daemon.hear().is_none());
    let mut next = Daemon::connect(&path);
    assert_eq!(next.state(), AgentState::Idle);
}

#[test]
fn a_socket_that_is_served_is_not_taken_over_a_dead_one_is() {
    let path = path("stale");
    let server = Server::start(&path, Peers::Root, Faults::default()).unwrap();
    assert!(Server::start(&path, Peers::Root, Faults::default()).is_err());
    assert!(matches!(Daemon::connect(&path).ask(Command::Hello), ReplyResult::Ok(_)));
    drop(server);
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let _server = Server::start(&path, Peers::Root, Faults::default()).unwrap();
    assert!(matches!(Daemon::connect(&path).ask(Command::Hello), ReplyResult::Ok(_)));
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let path = path("file");
    std::fs::write(&path, "precious").unwrap();
    assert!(Server::start(&path, Peers::Root, Faults::default()).is_err());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    std::fs::remove_file(&path).unwrap();
}

/// Does something as another user. The system call is for this thread alone, and for those
/// that it starts.
fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            // SAFETY: changes this thread's own credentials, and nothing in memory.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
            assert_eq!(done, 0);
            act()
        });
        thread.join().unwrap()
    })
}

#[test]
fn only_root_is_served_unless_the_vmm_says_otherwise() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can be somebody else");
    }
    const OWN: u32 = 65534;
    for (peers, own) in [(Peers::Root, false), (Peers::Own, true)] {
        let path = path(&format!("peers-{own}"));
        let server = as_user(OWN, || Server::start(&path, peers, Faults::default()).unwrap());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
        let served = || {
            let mut daemon = Daemon::connect(&path);
            // Who may not is told so, and hung up on, before it says anything.
            let hello = Request { id: 1, command: Command::Hello };
            let _ = daemon.socket.get_mut().write_all(&hello.line());
            matches!(daemon.hear(), Some(Reply { result: ReplyResult::Ok(_), .. }))
        };
        assert!(served(), "root");
        // The last one has to be seen to have gone.
        let again = |uid| {
            (0..50).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                as_user(uid, served)
            })
        };
        assert_eq!(again(OWN), own, "{peers:?}");
        assert!(!again(OWN - 1), "{peers:?}");
        drop(server);
    }
}
