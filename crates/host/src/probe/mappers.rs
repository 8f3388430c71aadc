//! Which other processes map the RAM that a QEMU shares (`/proc/PID/maps`).
//!
//! Such a process writes to that RAM past the page tables that the agent in QEMU watches.
//! What cannot be read is not known, and not known is a reason to keep off.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ebb_core::mapping::Mapping;
use ebb_core::sample::VmId;
use ebb_core::wire::Segment;

use crate::background_look::BackgroundLook;
use crate::probe::process::processes;
use crate::root::Root;

/// Most bytes read of one process: a QEMU of which KSM has 65,530 ranges has 6 MB.
const MAX_MAPS: u64 = 32 << 20;
/// Most bytes kept of a line: what is told of a mapping comes first, then a path of any length.
const LINE_MOST: u64 = 8192;

/// A look that takes longer is told of.
const LONG: Duration = Duration::from_secs(5);

/// A file as `/proc/PID/maps` names it: device and inode.
type Inode = ((u32, u32), u64);

/// Which other processes map a VM's RAM? The number goes with the answer.
#[derive(Clone, Debug)]
pub struct Question {
    pub vm: VmId,
    /// What made it unclear.
    pub generation: u64,
    /// Where its QEMU has it.
    pub segments: Vec<Segment>,
}

/// `Ok`: no other process maps it. The error is for people.
pub type Answer = (VmId, u64, Result<(), String>);

/// One look at all processes at a time, beside the loop: the kernel has a reader of `maps` wait
/// for as long as the process holds its mmap lock, and any user has processes with many mappings.
#[derive(Debug, Default)]
pub struct Search {
    look: BackgroundLook<Vec<Answer>>,
    /// When it began.
    begun: Option<Instant>,
    /// The process that is looked at now.
    at: Arc<AtomicU32>,
}

impl Search {
    /// Begins a look for these questions, or goes on with the one that is under way. `done` is
    /// called when it is over.
    pub fn go_on(
        &mut self,
        root: &Root,
        questions: Vec<Question>,
        done: impl FnOnce() + Send + 'static,
    ) -> Vec<Answer> {
        let begins = self.look.is_idle();
        if begins {
            if questions.is_empty() {
                return Vec::new();
            }
            self.begun = Some(Instant::now());
        }
        let (root, asked, at) = (root.clone(), questions.clone(), Arc::clone(&self.at));
        let search = move || look(&root, asked, &at);
        let why = match self.look.look_then(search, Duration::ZERO, done) {
            Some(answers) => return answers,
            None if begins => return Vec::new(),
            None if self.look.is_idle() => {
                "which processes map its RAM could not be looked up".to_owned()
            }
            None if self.begun.is_some_and(|at| at.elapsed() < LONG) => return Vec::new(),
            None => {
                let pid = self.at.load(Relaxed);
                format!("process {pid} keeps its mappings locked: it may map this VM's RAM")
            }
        };
        let say = |q: Question| (q.vm, q.generation, Err(why.clone()));
        questions.into_iter().map(say).collect()
    }
}

/// Reads the mappings of all processes, once for all questions.
fn look(root: &Root, questions: Vec<Question>, at: &AtomicU32) -> Vec<Answer> {
    let mut files: BTreeMap<Inode, Vec<usize>> = BTreeMap::new();
    let mut answers: Vec<Answer> = Vec::new();
    for (i, q) in questions.into_iter().enumerate() {
        at.store(q.vm.pid, Relaxed);
        let own = each_mapping(root, q.vm.pid, &mut |start, end, file| {
            let has = |s: &Segment| s.hva < end && start < s.hva.saturating_add(s.size);
            if file.1 != 0 && q.segments.iter().any(has) {
                files.entry(file).or_default().push(i);
            }
        });
        let own = own.map_err(|e| format!("its own mappings cannot be read: {e}"));
        answers.push((q.vm, q.generation, own));
    }
    if files.is_empty() {
        return answers;
    }
    let pids = match processes(root) {
        Ok(pids) => pids,
        Err(e) => {
            refuse(&mut answers, |_, _| true, &e.to_string());
            return answers;
        }
    };
    for pid in pids {
        at.store(pid, Relaxed);
        let mut mapped = BTreeSet::<usize>::new();
        let read = each_mapping(root, pid, &mut |_, _, file| {
            mapped.extend(files.get(&file).into_iter().flatten().copied());
        });
        match read {
            Ok(()) if mapped.is_empty() => {}
            Ok(()) => {
                let why = format!(
                    "process {pid} maps this VM's RAM as well: nothing is recycled until it has \
                     ended, or private_ram = true is set for the VM"
                );
                refuse(&mut answers, |i, vm| vm.pid != pid && mapped.contains(&i), &why);
            }
            // It ended meanwhile; a kernel thread has none.
            Err(e) if has_ended(root, pid, &e) => {}
            Err(e) => {
                let why = format!(
                    "mappings of process {pid} cannot be read: {e}; it may map this VM's RAM: run \
                     Ebb as root, or set private_ram = true for the VM"
                );
                refuse(&mut answers, |_, vm| vm.pid != pid, &why);
            }
        }
    }
    answers
}

/// The first reason stands.
fn refuse(answers: &mut [Answer], of: impl Fn(usize, VmId) -> bool, why: &str) {
    for (i, (vm, _, found)) in answers.iter_mut().enumerate() {
        if of(i, *vm) && found.is_ok() {
            *found = Err(why.to_owned());
        }
    }
}

fn has_ended(root: &Root, pid: u32, error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
        || matches!(root.metadata(format!("/proc/{pid}")), Ok(None))
}

/// Reads line by line: start, end, device and inode.
fn each_mapping(
    root: &Root,
    pid: u32,
    each: &mut dyn FnMut(u64, u64, Inode),
) -> std::io::Result<()> {
    let file = std::fs::File::open(root.path(format!("/proc/{pid}/maps")))?;
    let mut text = BufReader::new(file.take(MAX_MAPS));
    let mut line = Vec::new();
    while text.by_ref().take(LINE_MOST).read_until(b'\n', &mut line)? > 0 {
        if let Some(m) = Mapping::parse(&String::from_utf8_lossy(&line)) {
            each(m.start, m.end, (m.device, m.inode));
        }
        if !line.ends_with(b"\n") {
            // The rest of a long path is no line of its own.
            text.skip_until(b'\n')?;
        }
        line.clear();
    }
    match text.get_ref().limit() {
        0 => Err(std::io::Error::other("too long")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::testing::{Tree, tree};

    const RAM: &str = "7f0000000000-7f0040000000 rw-s 00000000 00:01 77 /memfd:ram (deleted)\n";
    const OTHER: &str = "55aa00000000-55aa00001000 r-xp 00000000 08:01 77 /usr/bin/x\nnonsense\n";
    const SEGMENT: Segment = Segment { gpa: 0, size: 1 << 30, hva: 0x7f00_0000_0000 };

    fn question(pid: u32, generation: u64, segment: Segment) -> Question {
        Question { vm: VmId { pid, start: 1 }, generation, segments: vec![segment] }
    }

    fn maps(root: &Tree, pid: u32, text: &str) {
        root.put(format!("/proc/{pid}/maps"), text);
    }

    #[test]
    fn a_second_mapper_is_found_and_what_cannot_be_read_is_no_yes() {
        let root = tree(&[]);
        maps(&root, 10, &format!("{OTHER}{RAM}7fff00000000-7fff00001000 rw-p 00000000 00:00 0\n"));
        maps(&root, 11, OTHER);
        let are_private = |pid: u32, segment: Segment| {
            look(&root, vec![question(pid, 3, segment)], &AtomicU32::new(0)).remove(0).2
        };
        assert_eq!(are_private(10, SEGMENT), Ok(()));
        maps(&root, 12, &format!("{OTHER}{RAM}"));
        let why = are_private(10, SEGMENT).unwrap_err();
        assert!(why.contains("process 12 maps"), "{why}");
        let elsewhere = Segment { hva: 0x10_0000, ..SEGMENT };
        assert_eq!(are_private(10, elsewhere), Ok(()), "not of this RAM");
        // Asked at once, each is told of the other, and a third of none.
        maps(&root, 13, &format!("{OTHER}{}", RAM.replace("77", "78")));
        let all = [10, 12, 13].map(|pid| question(pid, u64::from(pid), SEGMENT));
        let found = look(&root, all.to_vec(), &AtomicU32::new(0));
        let told: Vec<(u32, u64, bool)> =
            found.iter().map(|(vm, generation, f)| (vm.pid, *generation, f.is_ok())).collect();
        assert_eq!(told, [(10, 10, false), (12, 12, false), (13, 13, true)]);
        // A path that is longer than what is kept of a line, and ends like a mapping.
        let begun = "55aa00000000-55aa00001000 r-xp 00000000 08:01 77 /";
        let long = "x".repeat(LINE_MOST as usize - begun.len());
        maps(&root, 12, &format!("{begun}{long}{RAM}{OTHER}"));
        assert_eq!(are_private(10, SEGMENT), Ok(()));
        root.remove("/proc/12/maps");
        assert!(are_private(10, SEGMENT).unwrap_err().contains("process 12"));
        root.remove("/proc/12");
        assert_eq!(are_private(10, SEGMENT), Ok(()));
        assert!(are_private(99, SEGMENT).is_err());
    }

    /// Any user has a process whose mappings the kernel does not let others read for as long as
    /// it likes: here the file is a pipe that nobody writes to.
    #[test]
    fn a_process_that_keeps_its_mappings_locked_does_not_hold_up_the_loop() {
        let root = tree(&[]);
        maps(&root, 10, RAM);
        let pipe = root.pipe("/proc/12/maps");
        let (mut search, (told, done)) = (Search::default(), channel());
        let go_on = |search: &mut Search, generation| {
            let told = told.clone();
            let done = move || told.send(()).unwrap();
            search.go_on(&root, vec![question(10, generation, SEGMENT)], done)
        };
        assert!(go_on(&mut search, 1).is_empty());
        while search.at.load(Relaxed) != 12 {
            std::thread::yield_now();
        }
        assert!(go_on(&mut search, 1).is_empty(), "it is early to say");
        search.begun = search.begun.map(|at| at - LONG);
        let (_, generation, found) = go_on(&mut search, 2).remove(0);
        assert!(generation == 2 && found.unwrap_err().contains("process 12"));
        // It lets go: the answer is to the question that was asked.
        std::fs::write(&pipe, OTHER).unwrap();
        done.recv().unwrap();
        let (_, generation, found) = go_on(&mut search, 2).remove(0);
        assert_eq!((generation, found), (1, Ok(())));
    }
}
