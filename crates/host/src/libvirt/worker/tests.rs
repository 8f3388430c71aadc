//! The thread, with sockets for libvirts.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::super::xdr::Writer;
use super::super::{Watch, inode, open_inside};
use super::*;
use crate::testing::{socket, tree, within_a_minute};

fn address(socket: PathBuf, domain: &str) -> Address {
    let (key, domain) = (socket.clone(), domain.to_owned());
    Address { socket, key, uri: "qemu:///system", domain, ..Address::default() }
}

/// The thread, and how it is asked and woken.
fn worker() -> (Sender<WorkerRequest>, Waker, JoinHandle<()>) {
    let ((requests, asked), waker) = (channel(), Waker::new().unwrap());
    let woken = waker.clone();
    (requests, waker, std::thread::spawn(move || work(&asked, &woken)))
}

/// A client's end of its socket to the thread; a read waits `patience` at most.
fn attached(
    requests: &Sender<WorkerRequest>,
    waker: &Waker,
    address: Address,
    patience: Duration,
) -> UnixStream {
    let (ours, end) = UnixStream::pair().unwrap();
    end.set_nonblocking(true).unwrap();
    ours.set_read_timeout(Some(patience)).unwrap();
    let (words, end) = (Words::default(), end.into());
    requests.send(WorkerRequest::Attach { address, end, words, monitor: false }).unwrap();
    waker.wake();
    ours
}

/// Two processes of one container lead to its libvirt; the first ends, and another container's
/// process gets its number.
#[test]
fn a_libvirt_in_a_container_is_reached_by_who_is_there_and_by_no_number_of_before() {
    let tree = tree(&[]);
    let me = std::process::id().to_string();
    for process in ["10", "11", me.as_str()] {
        tree.link("pid:[2]", format!("/{process}/ns/pid"));
    }
    let [its, others] = ["its", "others"].map(|pod| tree.listen(format!("/{pod}/libvirt-sock")));
    [&its, &others].iter().for_each(|listener| listener.set_nonblocking(true).unwrap());
    tree.link(tree.path("/others"), "/10/root");
    tree.link(tree.path("/its"), "/11/root");
    let key = open_inside(&tree.path("/its"), Path::new("libvirt-sock"));
    let key = inode(&key.unwrap()).unwrap();
    let (requests, waker, thread) = worker();
    let attach = |process: &str| {
        let container = tree.path(format!("/{process}/root"));
        let plain = address(container.join("libvirt-sock"), "a");
        let address = Address { key: key.clone(), container: Some(container), ..plain };
        attached(&requests, &waker, address, Duration::from_secs(10))
    };
    let mut ours = attach("10");
    assert_eq!(ours.read(&mut [0]).unwrap(), 0, "it is turned away");
    let _ours = attach("11");
    let accepted = within_a_minute(|| its.accept().ok());
    assert!(others.accept().is_err(), "another's libvirt is not spoken to");
    drop((accepted, requests));
    waker.wake();
    thread.join().unwrap();
}

/// A libvirt that has locked a domain of this name, until it is `None`: how many calls hang.
type Locked = Arc<Mutex<(Option<&'static str>, usize)>>;

/// Answers one connection's calls as libvirt does, several at once.
fn serve(mut stream: UnixStream, locked: &Locked) {
    let mut head = [0; 28];
    while stream.read_exact(&mut head).is_ok() {
        let head: [u32; 7] =
            std::array::from_fn(|n| u32::from_be_bytes(head[4 * n..][..4].try_into().unwrap()));
        let mut body = vec![0; head[0] as usize - 28];
        stream.read_exact(&mut body).unwrap();
        let (mut stream, locked) = (stream.try_clone().unwrap(), Arc::clone(locked));
        std::thread::spawn(move || stream.write_all(&answer(head, &body, &locked)));
    }
}

fn answer(head: [u32; 7], body: &[u8], locked: &Locked) -> Vec<u8> {
    let names = || ["one", "two"].into_iter().filter(|name| contains(body, name));
    let hangs = || locked.lock().unwrap().0.is_some_and(|name| contains(body, name));
    if hangs() {
        locked.lock().unwrap().1 += 1;
        while hangs() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let domain = |name: &str| Writer::default().text(name).fixed(&[name.as_bytes()[0]; 16]).i32(1);
    let said = match (head[1], head[3]) {
        calls::LOOK_UP => names().map(|name| domain(name).done()).collect::<Vec<_>>().concat(),
        calls::DESCRIBE => Writer::default().text("<domain/>").done(),
        calls::ALL_STATS => {
            let stats = |name| domain(name).u32(1).text("state.state").u32(1).i32(1).done();
            let count = Writer::default().u32(names().count() as u32).done();
            std::iter::once(count).chain(names().map(stats)).collect::<Vec<_>>().concat()
        }
        _ => Vec::new(),
    };
    let w = Writer::default().u32(28 + said.len() as u32).u32(head[1]).u32(head[2]).u32(head[3]);
    [w.u32(1).u32(head[5]).u32(0).done(), said].concat()
}

fn contains(bytes: &[u8], word: &str) -> bool {
    bytes.windows(word.len()).any(|w| w == word.as_bytes())
}

#[test]
fn a_domain_that_libvirt_has_locked_holds_no_other_up_and_few_calls_hang() {
    let (_dir, listener, socket) = socket();
    let locked = Locked::default();
    let theirs = Arc::clone(&locked);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let its = Arc::clone(&theirs);
            std::thread::spawn(move || serve(stream.unwrap(), &its));
        }
    });
    let (requests, waker, thread) = worker();
    let attach = |domain: &str| {
        let address = address(socket.clone(), domain);
        BufReader::new(attached(&requests, &waker, address, 4 * BULK_PATIENCE))
    };
    let line = |client: &mut BufReader<UnixStream>| {
        let mut line = String::new();
        client.read_line(&mut line).map(|_| line)
    };
    let ask = |client: &mut BufReader<UnixStream>| {
        client.get_mut().write_all(b"{\"execute\": \"query-status\"}\n").unwrap();
    };
    let (mut one, mut two) = (attach("one"), attach("two"));
    assert!(line(&mut one).unwrap().contains("QMP") && line(&mut two).unwrap().contains("QMP"));
    let hung = || locked.lock().unwrap().1;

    locked.lock().unwrap().0 = Some("two");
    ask(&mut two);
    for round in 0..5 {
        let begun = Instant::now();
        ask(&mut one);
        assert!(line(&mut one).unwrap().contains("running"));
        assert!(round == 0 || begun.elapsed() < BULK_PATIENCE, "{round}: {:?}", begun.elapsed());
    }
    assert!(hung() <= 2, "one for all domains, and one for this: {}", hung());
    // Its client gives up, and comes again.
    drop(two);
    std::thread::sleep(LAST_WISHES + Duration::from_millis(200));
    two = attach("two");
    std::thread::sleep(Duration::from_millis(200));
    ask(&mut one);
    assert!(line(&mut one).unwrap().contains("running"));
    assert!(hung() <= 2, "{}", hung());

    locked.lock().unwrap().0 = None;
    assert!(line(&mut two).unwrap().contains("QMP"));
    ask(&mut two);
    assert!(line(&mut two).unwrap().contains("running"));
    drop((requests, one, two));
    waker.wake();
    thread.join().unwrap();
}

#[test]
fn a_daemon_is_left_when_it_has_had_no_domain_for_long() {
    let address = Address { owner: Some(0), ..address("/nonexistent".into(), "a") };
    let mut daemon = Daemon { address, ..Daemon::default() };
    let now = Instant::now();
    assert!(!daemon.count_idle(now));
    assert!(!daemon.count_idle(now + IDLE / 2));
    assert_eq!(daemon.due(now), Some(IDLE));
    assert!(daemon.count_idle(now + IDLE));
}

/// A daemon with one connection, on which this call is under way, and one client.
fn under_way(purpose: For) -> (Daemon, Words) {
    let (socket, _) = UnixStream::pair().unwrap();
    let calls = BTreeMap::from([(7, purpose)]);
    let rpc = Rpc::new(false);
    let connection =
        Connection { socket: socket.into(), rpc, calls, open: true, tells: true, ready: false };
    let (end, words) = (UnixStream::pair().unwrap().0.into(), Words::default());
    let client = Client {
        end: Ok(end),
        words: words.clone(),
        bridge: Bridge::new("a".into(), false),
        busy: false,
        alone: false,
        ready: false,
    };
    let address = address("/run/libvirt-sock".into(), "a");
    let (connections, clients) = (vec![connection], BTreeMap::from([(1, client)]));
    (Daemon { address, connections, clients, ..Daemon::default() }, words)
}

#[test]
fn a_libvirt_that_refuses_statistics_in_any_case_is_quoted() {
    let now = Instant::now();
    for (code, ends) in [(3, true), (8, true), (88, true), (68, false)] {
        for purpose in [For::Bulk(now), For::Alone(1, now)] {
            let (mut daemon, words) = under_way(purpose);
            let message = "unsupported flags (0x20000000)".to_owned();
            let result = Err(Refused { code, message });
            daemon.hear(0, Heard::Answer { serial: 7, result }, now).unwrap();
            let over = daemon.clients.values().find_map(|c| c.bridge.over.clone());
            daemon.flush();
            assert_eq!((over.is_some(), daemon.clients.is_empty()), (ends, ends), "{code}");
            let said = words.get().map(String::as_str);
            let why = "/run/libvirt-sock: libvirt refuses statistics: unsupported flags";
            assert_eq!(said.is_some_and(|said| said.starts_with(why)), ends, "{code}: {said:?}");
        }
    }
}

/// libvirt has one job at a time on a domain.
#[test]
fn a_domain_that_ebbs_own_note_held_up_is_asked_again_at_once() {
    let now = Instant::now();
    let write = || Step::Write(None);
    for (step, name, again) in
        [(write(), "a", true), (write(), "b", false), (Step::Read, "a", false)]
    {
        let (mut daemon, _) = under_way(For::Watch(2, step));
        daemon.watchers.insert(2, Watcher::new(name.into(), Watch::default()));
        let bridge = &mut daemon.clients.get_mut(&1).unwrap().bridge;
        let state = Numbers::from([("state.state".to_string(), 1)]);
        bridge.heard_stats(now, state, now);
        assert!(bridge.tried.is_some());
        let result = Ok(Writer::default().text("<a/>").done());
        daemon.hear(0, Heard::Answer { serial: 7, result }, now).unwrap();
        assert_eq!(daemon.clients[&1].bridge.tried.is_none(), again, "{step:?} of {name}");
    }
}
