//! What a process holds: `/proc/PID/{stat,status}` (Linux `fs/proc/array.c`). A process that has
//! ended is `None`.

use std::fs::File;
use std::io::ErrorKind;
use std::time::Duration;

use ebb_core::sample::{ProcessMemory, VmId};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::meminfo::parse_kib;
use crate::root::{ParseError, ProbeError, Probed, Root, field, fields, parse_number};

/// The first uid of a person; those of services are below (Debian's policy, `login.defs`).
const FIRST_USER: u32 = 1000;

/// The flag of a thread of the kernel (Linux `include/linux/sched.h`).
const PF_KTHREAD: u64 = 0x0020_0000;

/// The fields in use of `/proc/PID/stat`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The program's name, cut to 15 bytes; its owner may write anything here.
    pub comm: String,
    /// State letter; `Z` and `X` hold no memory any more.
    pub state: char,
    /// It is a thread of the kernel.
    pub is_kernels: bool,
    /// CPU time in user mode, clock ticks (100 a second on x86 and Arm).
    pub user_ticks: u64,
    /// CPU time in the kernel, clock ticks.
    pub system_ticks: u64,
    /// Start, clock ticks since boot: tells a process from a later one with its pid.
    pub start: u64,
}

/// The pids that there are; an error also where they are not all listed.
pub fn processes(root: &Root) -> Result<Vec<u32>, ProbeError> {
    let absent = || ProbeError::Io { path: root.path("/proc"), error: ErrorKind::NotFound.into() };
    let names = root.read_dir("/proc")?.ok_or_else(absent)?;
    Ok(names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect())
}

pub fn is_named(root: &Root, pid: u32, name: &str) -> bool {
    let comm = root.read(format!("/proc/{pid}/comm")).ok().flatten();
    comm.is_some_and(|c| c.trim_end_matches('\n') == name)
}

/// The pid of a program of this name, or of a script of it that an interpreter runs for the
/// system.
pub fn running(root: &Root, name: &str) -> Option<u32> {
    let script = |pid: u32| {
        if !is_run_by(root, pid, |uid| uid < FIRST_USER) {
            return None;
        }
        let line = root.read_bytes(format!("/proc/{pid}/cmdline")).ok()??;
        let mut words = line.split(|b| *b == 0).map(String::from_utf8_lossy);
        let file = |word: &str| word.rsplit('/').next().unwrap_or_default().to_string();
        let by = file(&words.next()?);
        let scripted = by.starts_with("python") || by.starts_with("perl");
        Some(scripted && file(&words.next()?) == name)
    };
    processes(root)
        .ok()?
        .into_iter()
        .find(|pid| is_named(root, *pid, name) || script(*pid) == Some(true))
}

/// Whether a process has such uids only. Any user can keep a process's command line from being
/// read for as long as they like, so it is read of those that others than users run.
fn is_run_by(root: &Root, pid: u32, such: impl Fn(u32) -> bool) -> bool {
    matches!(read_credentials(root, pid), Ok(Some(c)) if c.uids.into_iter().all(such))
}

/// The pids of all `ebb run` by root, or by this user, that change something, in order.
pub fn daemons(root: &Root) -> Vec<u32> {
    let changes = |pid: u32| {
        let line = root.read_bytes(format!("/proc/{pid}/cmdline")).ok().flatten();
        let words: Vec<&[u8]> = line.iter().flat_map(|l| l.split(|b| *b == 0)).skip(1).collect();
        let has = |word: &[u8]| words.contains(&word);
        has(b"run") && !has(b"--dry-run")
    };
    let own = rustix::process::geteuid().as_raw();
    let ours = |pid: u32| is_run_by(root, pid, |uid| uid == 0 || uid == own);
    let runs = |pid: &u32| is_named(root, *pid, "ebb") && ours(*pid) && changes(*pid);
    let mut pids: Vec<u32> = processes(root).into_iter().flatten().filter(runs).collect();
    pids.sort_unstable();
    pids
}

/// Whether root runs it, and not in a container with processes of its own.
pub fn is_hosts_own(root: &Root, pid: u32) -> bool {
    let whose = read_credentials(root, pid);
    matches!(whose, Ok(Some(c)) if c.inner.is_none() && c.uids.iter().all(|uid| *uid == 0))
}

pub fn read_stat(root: &Root, pid: u32) -> Probed<Stat> {
    root.parse(format!("/proc/{pid}/stat"), parse_stat)
}

/// Parses it. The name in parentheses may hold anything, so fields count from
/// the last `)`.
pub fn parse_stat(text: &str) -> Result<Stat, ParseError> {
    let bad = |what| ParseError::new(1, format!("no {what} after the last “)”"));
    let (name, rest) = text.rsplit_once(')').ok_or_else(|| bad("field"))?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().take(30).collect();
    // `state` is field 3 in proc(5), hence the offset.
    let number = |field: usize, name| {
        fields.get(field - 3).and_then(|f| f.parse::<u64>().ok()).ok_or_else(|| bad(name))
    };
    // The one after the last in use: a text that was cut off tells no wrong start.
    number(23, "vsize")?;
    Ok(Stat {
        comm: name.split_once('(').map_or("", |(_, comm)| comm).to_owned(),
        state: fields.first().and_then(|f| f.chars().next()).ok_or_else(|| bad("state"))?,
        is_kernels: number(9, "flags")? & PF_KTHREAD != 0,
        user_ticks: number(14, "utime")?,
        system_ticks: number(15, "stime")?,
        start: number(22, "starttime")?,
    })
}

/// Whether a process is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Alive,
    /// It is proven that it is not: another process has its pid, only its exit status is
    /// left, or the kernel knows no such pid.
    Ended,
    /// It could not be read (no descriptor or memory left, no permission): no proof of either.
    Unknown,
}

/// Whether a process is still there. A failing read proves nothing, and neither does an absent
/// file alone: `/proc` may be hidden (`hidepid=`).
pub fn life(root: &Root, id: VmId) -> Life {
    match read_stat(root, id.pid) {
        Ok(Some(stat)) if stat.start != id.start || matches!(stat.state, 'Z' | 'X') => Life::Ended,
        Ok(Some(_)) => Life::Alive,
        Ok(None) if !root.is_machine() || no_such_process(id.pid) => Life::Ended,
        Ok(None) | Err(_) => Life::Unknown,
    }
}

fn no_such_process(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH))
}

/// How long a task has run, to the nanosecond: `/proc/PID/schedstat`. Of a process with
/// several threads that is its first; `None` where the kernel does not count it.
pub fn read_run_time(root: &Root, task: u32) -> Probed<Duration> {
    root.parse(format!("/proc/{task}/schedstat"), |text| {
        let ns = text.split_ascii_whitespace().next().unwrap_or_default();
        parse_number(ns).map(Duration::from_nanos)
    })
}

/// Reads `/proc/PID/status`; `None` for what has no memory of its own.
pub fn read_status(root: &Root, pid: u32) -> Probed<ProcessMemory> {
    Ok(root.parse(format!("/proc/{pid}/status"), parse_status)?.flatten())
}

/// Parses it (Linux 4.5+ has the three `Rss*` fields); `None` for kernel
/// threads and zombies, which have none of them.
pub fn parse_status(text: &str) -> Result<Option<ProcessMemory>, ParseError> {
    let keys = ["RssAnon", "RssFile", "RssShmem", "VmSwap", "VmLck", "HugetlbPages"];
    let told = fields(text, keys, parse_kib)?;
    let seen = told.iter().any(Option::is_some);
    let [anon, file, shmem, swap, locked, hugetlb] = told.map(Option::unwrap_or_default);
    Ok(seen.then_some(ProcessMemory { anon, file, shmem, swap, locked, hugetlb, own: None }))
}

/// A process that is looked at again and again. Its `/proc/PID/status` is kept open, so that a
/// look is one system call.
#[derive(Debug, Default)]
pub struct Watched {
    id: VmId,
    file: Option<File>,
}

impl Watched {
    pub fn new(id: VmId) -> Watched {
        Watched { id, file: None }
    }

    /// Whether it is still there, and what it holds. Its file stays open where it is to be kept.
    pub fn look(&mut self, root: &Root, keep: bool) -> (Life, Probed<ProcessMemory>) {
        let path = format!("/proc/{}/status", self.id.pid);
        let was_open = self.file.is_some();
        let text = match root.reread(&path, &mut self.file) {
            Ok(Some(text)) => text,
            Ok(None) => return (life(root, self.id), Ok(None)),
            Err(e) => return (life(root, self.id), Err(e)),
        };
        if !keep {
            self.file = None;
        }
        let life = match was_open {
            _ if is_over(&text) => Life::Ended,
            true => Life::Alive,
            // What was opened just now may be a later process's.
            false => life(root, self.id),
        };
        let memory = parse_status(&text);
        (life, memory.map_err(|error| ProbeError::Parse { path: root.path(path), error }))
    }
}

/// Whether `/proc/PID/status` is of a process of which only the exit status is left.
fn is_over(status: &str) -> bool {
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| state.trim_start().starts_with(['Z', 'X']))
}

/// Whose a process is, of `/proc/PID/status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// `Uid`: real, effective, saved, of the file system.
    pub uids: [u32; 4],
    /// Its pid in its own pid namespace, if that is below the one of `/proc`: the last of several
    /// in `NSpid`.
    pub inner: Option<u32>,
}

pub fn read_credentials(root: &Root, pid: u32) -> Probed<Credentials> {
    root.parse(format!("/proc/{pid}/status"), parse_credentials)
}

/// Parses it; kernels without pid namespaces have no `NSpid`. The process's name, which comes first
/// and may be anything, ends no line: the kernel escapes that.
pub fn parse_credentials(text: &str) -> Result<Credentials, ParseError> {
    let numbers = |ids: &str| -> Option<Vec<u32>> {
        ids.split_ascii_whitespace().map(|id| id.parse().ok()).collect()
    };
    let uids = field(text, "Uid", |ids| numbers(ids)?.try_into().ok())?;
    let pids = field(text, "NSpid", numbers)?.unwrap_or_default();
    Ok(Credentials {
        uids: uids.ok_or_else(|| ParseError::missing("Uid"))?,
        inner: pids.into_iter().skip(1).last(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use ebb_core::units::Bytes;

    use super::*;
    use crate::testing::{self, tree};

    #[test]
    fn a_hostile_name_does_not_shift_the_fields() {
        for name in ["qemu", ") (", "a) R 1 2 3 (b", "x\n5) Z", "\u{fffd}()"] {
            let text = format!(
                "77 ({name}) S 1 77 77 0 -1 4194560 5 0 0 0 11 12 0 0 20 0 1 0 99887 0 0\n"
            );
            let stat = parse_stat(&text).unwrap();
            assert_eq!((stat.comm.as_str(), stat.state, stat.start), (name, 'S', 99887));
            assert_eq!((stat.user_ticks, stat.system_ticks), (11, 12));
        }
        let cut = format!("77 (x) S{} 998", " 0".repeat(18));
        for text in ["", "77 (x", "77 (x)", "77 (x) S 1 2", &cut] {
            assert!(parse_stat(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_process_has_ended_only_where_that_is_proven() {
        let root = tree(&[]);
        let id = VmId { pid: 7, start: 99 };
        assert_eq!(life(&root, id), Life::Ended, "a fixture tree that lacks it");
        let stat = |state, start| testing::stat(7, "kvm", state, start);
        for (text, expected) in [
            (stat('S', 99), Life::Alive),
            (stat('S', 98), Life::Ended),
            (stat('Z', 99), Life::Ended),
            (stat('X', 99), Life::Ended),
            (String::new(), Life::Unknown),
            ("7 (kvm) S".into(), Life::Unknown),
        ] {
            root.put("/proc/7/stat", &text);
            assert_eq!(life(&root, id), expected, "{text}");
        }
        root.remove("/proc/7/stat");
        root.dir("/proc/7/stat");
        assert_eq!(life(&root, id), Life::Unknown, "it cannot be read");
    }

    #[test]
    fn a_watched_process_is_seen_to_end_and_not_taken_for_a_later_one() {
        let root = Root::default();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        let id = VmId { pid, start: read_stat(&root, pid).unwrap().unwrap().start };
        let mut kept = Watched::new(id);
        for _ in 0..2 {
            let (life, memory) = kept.look(&root, true);
            assert_eq!(life, Life::Alive);
            assert!(memory.unwrap().is_some());
        }
        let mut later = Watched::new(VmId { start: id.start - 1, ..id });
        assert_eq!(later.look(&root, true).0, Life::Ended, "its pid is another's now");
        let mut anew = Watched::new(id);
        assert_eq!((anew.look(&root, false).0, anew.file.is_none()), (Life::Alive, true));
        child.kill().unwrap();
        while read_stat(&root, pid).unwrap().unwrap().state != 'Z' {
            std::thread::yield_now();
        }
        assert!(matches!(kept.look(&root, true), (Life::Ended, Ok(None))), "a zombie");
        child.wait().unwrap();
        assert!(matches!(kept.look(&root, true), (Life::Ended, Ok(None))));
    }

    #[test]
    fn a_watched_process_whose_file_cannot_be_read_is_looked_at_anew() {
        let fails = Arc::new(AtomicBool::new(false));
        let switch = fails.clone();
        let root = Root::default().with_faults(Arc::new(move |_: &std::path::Path| {
            switch.load(Relaxed).then(|| Err(Errno::MFILE.into()))
        }));
        let pid = std::process::id();
        let id = VmId { pid, start: read_stat(&root, pid).unwrap().unwrap().start };
        let mut me = Watched::new(id);
        for fail in [false, true, false] {
            fails.store(fail, Relaxed);
            let (life, memory) = me.look(&root, true);
            assert_eq!(life, if fail { Life::Unknown } else { Life::Alive });
            assert_eq!((memory.is_err(), me.file.is_none()), (fail, fail));
        }
    }

    #[test]
    fn memory_is_read_where_there_is_some() {
        let m = parse_status(
            "Name:\tx\nRssAnon:\t 12 kB\nRssFile:\t 3 kB\nRssShmem:\t 1 kB\n\
                              VmSwap:\t 4 kB\n",
        );
        assert_eq!(m.unwrap().unwrap().resident(), Bytes::kib(16));
        let locked = parse_status("VmLck:\t 8 kB\nRssAnon:\t 9 kB\n").unwrap().unwrap();
        assert_eq!((locked.locked, locked.resident()), (Bytes::kib(8), Bytes::kib(9)));
        assert_eq!(parse_status("Name:\tkthreadd\nState:\tS\n").unwrap(), None);
        assert_eq!(parse_status("Name:\tx\nRssAnon:\t-1 kB\n").unwrap_err().line, 2);
    }

    #[test]
    fn whose_a_process_is_and_whether_it_is_in_a_container() {
        let text = "Name:\tkvm\nUid:\t0\t1000\t2\t3\nNSpid:\t77\n";
        let own = parse_credentials(text).unwrap();
        assert_eq!(own, Credentials { uids: [0, 1000, 2, 3], inner: None });
        let below = parse_credentials("Uid: 1 1 1 1\nNSpid:\t77\t12\t1\n").unwrap();
        assert_eq!(below.inner, Some(1));
        for text in [
            "Uid: 1 1 1 1\nNSpid: 7 x\n",
            "",
            "Name: Uid: 0 0 0 0\n",
            "Uid:\t0\t0\t0\n",
            "Uid: 0 0 0 -1\n",
        ] {
            assert!(parse_credentials(text).is_err(), "{text}");
        }
        let me = read_credentials(&Root::default(), std::process::id()).unwrap().unwrap();
        assert_eq!(me.uids[1], rustix::process::geteuid().as_raw());
    }

    #[test]
    fn this_process_reads() {
        let (root, me) = (Root::default(), std::process::id());
        let stat = read_stat(&root, me).unwrap().unwrap();
        assert!(stat.start > 0);
        assert!(read_status(&root, me).unwrap().unwrap().resident() > Bytes::kib(100));
        assert!(read_stat(&root, u32::MAX).unwrap().is_none());
    }
}
