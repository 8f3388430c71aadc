//! Who is served on a Unix socket and who waits, as far as `/proc/net/unix` tells.
//!
//! It lists the server's end of each connection with the server's path, in state 03, or 02 while
//! the server has not accepted it. Source: Linux `net/unix/af_unix.c`, `unix_seq_show`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::probe::managers::bound_as;
use crate::root::Root;

/// One reading of the file serves for so long: many sockets may be asked about at once.
const FRESH: Duration = Duration::from_millis(20);

/// The connections to one server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Queue {
    /// Sockets that listen at this path; of several it is not known whose a connection is.
    listeners: u32,
    /// Clients that the server has not accepted.
    pub waiting: u32,
    /// Clients that it has accepted.
    pub served: u32,
}

impl Queue {
    /// Of the server at this path. `None` where that cannot be told: the file cannot be read, or
    /// no server or several look alike. QEMU may have bound the path relative to its own directory.
    pub fn of(path: &Path) -> Option<Queue> {
        type Last = Option<(Instant, Arc<BTreeMap<String, Queue>>)>;
        static LAST: Mutex<Last> = Mutex::new(None);
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let all = match &*last {
            Some((at, all)) if at.elapsed() < FRESH => Arc::clone(all),
            _ => {
                let text = Root::default().read("/proc/net/unix").ok()??;
                let all = Arc::new(parse(&text));
                *last = Some((Instant::now(), Arc::clone(&all)));
                all
            }
        };
        drop(last);
        find(&all, &bound_as(path).to_string_lossy())
    }
}

fn find(all: &BTreeMap<String, Queue>, path: &str) -> Option<Queue> {
    let relative = |bound: &str| !bound.starts_with('/') && path.ends_with(&format!("/{bound}"));
    let alike = all.iter().filter(|(bound, _)| *bound == path || relative(bound));
    let queue = alike.fold(Queue::default(), |a, (_, b)| Queue {
        listeners: a.listeners + b.listeners,
        waiting: a.waiting + b.waiting,
        served: a.served + b.served,
    });
    (queue.listeners == 1).then_some(queue)
}

fn parse(text: &str) -> BTreeMap<String, Queue> {
    let mut all: BTreeMap<String, Queue> = BTreeMap::new();
    let one = |line: &str| {
        let mut fields = line.split_once(": ")?.1.split_ascii_whitespace();
        let (_flags, state) = (fields.nth(2)?, fields.nth(1)?);
        let bound = fields.nth(1)?;
        line.ends_with(bound).then(|| (bound.to_owned(), state.to_owned()))
    };
    for (bound, state) in text.lines().filter_map(one) {
        let queue = all.entry(bound).or_default();
        match state.as_str() {
            "01" => queue.listeners += 1,
            "02" => queue.waiting += 1,
            "03" => queue.served += 1,
            _ => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_served_and_who_waits_is_seen_unless_two_servers_look_alike() {
        let line =
            |state, path| format!("0000: 00000002 00000000 00010000 0001 {state}  1126 {path}\n");
        let seen = |text: &str, path| find(&parse(text), path).map(|q| (q.served, q.waiting));
        let one =
            ["Num RefCount Protocol Flags Type St Inode Path\n", &line("01", "q.sock")].concat();
        assert_eq!(seen(&one, "/run/q.sock"), Some((0, 0)));
        assert_eq!(seen(&(one.clone() + &line("02", "q.sock")), "/run/q.sock"), Some((0, 1)));
        let two = one + &line("03", "q.sock");
        assert_eq!(seen(&two, "/run/q.sock"), Some((1, 0)));
        assert_eq!(seen(&two, "/run/xq.sock"), None, "another");
        assert_eq!(seen(&(two + &line("01", "q.sock")), "/run/q.sock"), None, "two servers");
        assert_eq!(seen("1: x\nnothing", "/run/q.sock"), None);
    }

    /// What this kernel shows of a client that left before it was accepted.
    #[test]
    fn a_client_that_left_the_queue_is_in_it_until_the_server_accepts_it() {
        use std::os::unix::net::{UnixListener, UnixStream};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("queue.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let seen = || {
            std::thread::sleep(FRESH);
            Queue::of(&path).map(|q| (q.served, q.waiting))
        };
        assert_eq!(seen(), Some((0, 0)));
        drop(UnixStream::connect(&path).unwrap());
        assert_eq!(seen(), Some((0, 1)));
        let accepted = listener.accept().unwrap();
        assert_eq!(seen(), Some((1, 0)));
        drop(accepted);
        assert_eq!(seen(), Some((0, 0)));
    }
}
