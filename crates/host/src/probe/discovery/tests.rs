//! Fixture trees that stand for `/proc`.

use std::sync::Arc;

use proptest::prelude::*;
use rustix::io::Errno;

use super::*;
use crate::root::Fault;
use crate::testing::{ANYTHING, Tree, eventually, stat, tree};

/// A scan of that tree.
fn scan(scanner: &mut Scanner, root: &Root) -> Scan {
    scanner.scan(root, &HashSet::new(), |_| false).unwrap()
}

/// The same tree with these reads instead of its own.
fn but(root: &Root, reads: impl Fn(&Path) -> Option<Fault> + Send + Sync + 'static) -> Root {
    root.clone().with_faults(Arc::new(reads))
}

#[test]
fn a_scan_passes_over_what_is_not_a_live_qemu_and_makes_names_unique() {
    let root = tree(&[("/proc/10/mountinfo", "1 2 0:3 / /huge rw - hugetlbfs none rw\n")]);
    let line = |socket: &str| {
        format!("qemu-kvm\0-name\0a\0-mem-path\0/huge/x\0-qmp\0unix:{socket},server\0")
    };
    for (pid, cmdline, state, start) in [
        (10, line("/a"), 'S', 500),
        (11, line("rel"), 'S', 400),
        (12, line("/c"), 'Z', 1),
        (13, "bash\0".into(), 'S', 2),
    ] {
        root.put(format!("/proc/{pid}/cmdline"), cmdline);
        root.put(format!("/proc/{pid}/stat"), stat(pid, "q", state, start));
    }
    root.put("/proc/14/cmdline", line("/d"));
    root.link("/srv", "/proc/11/cwd");
    let found = discover(&root, &ANYTHING).unwrap().found;
    assert_eq!(found.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a-10", "a"]);
    assert_eq!(found[0].id, VmId { pid: 10, start: 500 });
    assert_eq!(found[1].args.qmp, QmpAddress::Paths(vec!["/srv/rel".into()]));
    assert!(found[0].args.hugepages);
}

#[test]
fn a_pool_of_huge_pages_that_is_mounted_later_is_seen_with_the_next_vm() {
    let root = tree(&[]);
    let begin = |pid: u32, mounts: &str| {
        root.put(format!("/proc/{pid}/mountinfo"), mounts);
        root.vm(pid, 7, &format!("-mem-path\0/huge/{pid}"));
    };
    let mut scanner = Scanner::new(ANYTHING);
    begin(10, "1 2 0:3 / / rw - ext4 none rw\n");
    assert!(!scan(&mut scanner, &root).found[0].args.hugepages);
    begin(11, "1 2 0:3 / /huge rw - hugetlbfs none rw\n");
    let found = scan(&mut scanner, &root).found;
    assert!(found.iter().find(|p| p.id.pid == 11).unwrap().args.hugepages);
}

#[test]
fn of_what_is_no_vm_only_the_name_is_read_again_but_now_and_then() {
    let root = tree(&[]);
    let become_ = |comm: &str, start: u64, line: &str| {
        root.process(10, comm, 'S', start);
        root.put("/proc/10/cmdline", line);
    };
    let mut scanner = Scanner::new(ANYTHING);
    let mut found = || scan(&mut scanner, &root).found.len();
    become_("sh", 5, "sh\0");
    assert_eq!(found(), 0);
    become_("sh", 6, "kvm\0-name\0a\0");
    let scans = (0..THOROUGH).take_while(|_| found() == 0).count();
    assert!((1..THOROUGH as usize).contains(&scans), "{scans}");
    become_("sh", 7, "sh\0");
    assert_eq!(found(), 0, "a VM's stat is read each time");
    become_("kvm", 7, "kvm\0-name\0a\0");
    assert_eq!(found(), 1, "another name is looked at at once");
}

#[test]
fn a_scanner_reads_a_command_line_again_only_when_the_program_changed() {
    let root = tree(&[]);
    let mut scanner = Scanner::new(ANYTHING);
    let mut scan = |comm: &str, start: u64, line: &str| {
        root.put("/proc/10/stat", stat(10, comm, 'S', start));
        root.put("/proc/10/cmdline", line);
        scan(&mut scanner, &root).found.len()
    };
    assert_eq!(scan("sh", 5, "sh\0"), 0);
    assert_eq!(scan("sh", 5, "kvm\0"), 0, "not read again");
    assert_eq!(scan("kvm", 5, "sh\0"), 0);
    assert_eq!(scan("kvm", 5, "kvm\0"), 1, "a wrapper became QEMU");
    assert_eq!(scan("kvm", 5, "sh\0"), 1, "not read again");
    assert_eq!(scan("ifup", 5, "sh\0"), 0, "a child of QEMU became something else");
    assert_eq!(scan("ifup", 6, "kvm\0"), 1, "another process of that pid");
}

fn two_vms() -> Tree {
    let tree = tree(&[]);
    tree.vm(10, 5, "-name\0a");
    tree.vm(11, 5, "-name\0b");
    tree
}

fn ids(found: &[QemuProcess]) -> Vec<u32> {
    found.iter().map(|p| p.id.pid).collect()
}

#[test]
fn a_vm_is_gone_only_where_that_was_seen() {
    type Happens = fn(&Tree);
    let end: [(&str, Happens, bool); 7] = [
        ("nothing happened", |_| {}, false),
        ("its directory is away", |t| t.remove("/proc/10"), true),
        ("a zombie", |t| t.process(10, "kvm", 'Z', 5), true),
        ("another process", |t| t.process(10, "kvm", 'S', 6), true),
        ("another program", |t| becomes(t, "ifup\0"), true),
        ("between two programs", |t| becomes(t, ""), false),
        ("nonsense", |t| t.put("/proc/10/stat", "10 (kvm"), false),
    ];
    fn becomes(tree: &Tree, line: &str) {
        tree.process(10, "ifup", 'S', 5);
        tree.put("/proc/10/cmdline", line);
    }
    for (what, happens, gone) in end {
        let tree = two_vms();
        let mut scanner = Scanner::new(ANYTHING);
        assert_eq!(ids(&scan(&mut scanner, &tree).found), [10, 11]);
        happens(&tree);
        let scan = scan(&mut scanner, &tree);
        let id = VmId { pid: 10, start: 5 };
        assert_eq!(scan.gone, if gone { vec![id] } else { vec![] }, "{what}");
        assert_eq!(scan.found.iter().any(|p| p.id == id), !gone, "{what}");
        assert!(scan.found.iter().any(|p| p.id.pid == 11), "{what}");
    }
}

/// What is read once must not be missing for ever because it failed then.
#[test]
fn a_vm_whose_first_read_fails_is_found_whole_by_the_next_scan() {
    let tree = tree(&[
        ("/proc/10/cmdline", "kvm\0-name\0a\0-qmp\0unix:q,server\0"),
        ("/proc/10/environ", "LD_PRELOAD=/x/libebb_vmm.so\0EBB_AGENT_SOCKET=/s\0"),
    ]);
    tree.process(10, "kvm", 'S', 5);
    tree.link("/srv", "/proc/10/cwd");
    for file in ["stat", "cmdline", "environ", "cwd", "ns/mnt"] {
        let mut scanner = Scanner::new(ANYTHING);
        let failing = but(&tree, move |path| {
            let fails = path == Path::new("/proc/10").join(file);
            fails.then(|| Err(Errno::NOMEM.into()))
        });
        assert_eq!(scan(&mut scanner, &failing).problems.len(), 1, "{file}");
        let scan = scan(&mut scanner, &tree);
        assert_eq!(scan.found[0].args.agent, Some("/s".into()), "{file}");
        assert_eq!(scan.found[0].args.qmp, QmpAddress::Paths(vec!["/srv/q".into()]), "{file}");
    }
}

#[test]
fn of_processes_that_are_closed_even_to_root_only_one_called_qemu_is_told_of() {
    let tree = two_vms();
    tree.put("/proc/11/stat", stat(11, "init", 'S', 5));
    let closed = but(&tree, |path| {
        let kept = path.ends_with("exe") || path.ends_with("status") || path.ends_with("ns/user");
        kept.then(|| Err(Errno::ACCESS.into()))
    });
    let scan = scan(&mut Scanner::default(), &closed);
    let told: Vec<&str> = scan.problems.iter().map(|p| p.0.as_str()).collect();
    assert_eq!((scan.found.len(), told), (0, vec!["/proc/10"]));
}

#[test]
fn a_stranger_that_poses_as_a_vm_is_refused_and_told_of() {
    let tree = two_vms();
    tree.put("/proc/10/status", "Uid: 0 0 0 0\nNSpid: 10\n");
    tree.put("/proc/11/status", "Uid: 4000000 4000000 4000000 4000000\nNSpid: 11\n");
    let trust = TrustRules { programs: None, ..TrustRules::default() };
    let mut scanner = Scanner::new(trust.clone());
    // A stranger can have whoever reads its command line wait for ever.
    let unread = but(&tree, |path| {
        assert!(!path.ends_with("11/cmdline"), "{}", path.display());
        None
    });
    for _ in 0..3 {
        let scan = scan(&mut scanner, &unread);
        assert_eq!((ids(&scan.found), scan.problems), (vec![10], vec![]));
        let (pid, why) = &scan.refused[0];
        assert!(*pid == 11 && why.contains("uid 4000000"), "{pid}: {why}");
    }
    // A command line is not read at each scan again.
    let rereads = but(&tree, |path| {
        assert!(!path.ends_with("cmdline"), "{}", path.display());
        None
    });
    assert_eq!(scan(&mut scanner, &rereads).refused.len(), 1);
    let at_once = serving(&tree, &trust, &HashSet::new(), 11).unwrap_err();
    assert!(at_once.contains("process 11 behind it is not taken for a VM"), "{at_once}");
    // It was a VM when memory was taken from it.
    let owed = HashSet::from([VmId { pid: 11, start: 5 }]);
    assert_eq!(ids(&scanner.scan(&tree, &owed, |_| false).unwrap().found), [10, 11]);
    assert!(serving(&tree, &trust, &owed, 11).is_ok());
    let mut scanner = Scanner::new(trust.clone());
    assert_eq!(scan(&mut scanner, &tree).refused.len(), 1);
    // What was refused may be allowed later.
    tree.put("/proc/11/status", "Uid: 0 0 0 0\n");
    assert!((0..THOROUGH).any(|_| scan(&mut scanner, &tree).found.len() == 2));
}

#[test]
fn of_vms_of_one_name_the_oldest_has_it_and_then_the_next() {
    let tree = tree(&[]);
    tree.vm(10, 50, "-name\0a");
    tree.vm(11, 40, "-name\0a");
    tree.vm(12, 60, "-name\0a-10");
    let mut scanner = Scanner::new(ANYTHING);
    let mut names = || {
        let found = scan(&mut scanner, &tree).found;
        found.into_iter().map(|p| (p.id.pid, p.name, p.given)).collect::<Vec<_>>()
    };
    let of = |pid, name: &str, given: &str| (pid, name.to_owned(), given.to_owned());
    let three = [of(10, "a-10-10", "a"), of(11, "a", "a"), of(12, "a-10", "a-10")];
    assert_eq!((names(), names()), (three.to_vec(), three.to_vec()));
    tree.remove("/proc/11");
    assert_eq!(names(), [of(10, "a", "a"), of(12, "a-10", "a-10")]);
}

proptest! {
    /// Whatever a read of a running VM gives, it is not taken for ended.
    #[test]
    fn no_vm_is_forgotten_for_what_a_read_gives(
        bytes in proptest::collection::vec(any::<u8>(), 0..60),
        which in 0usize..5,
        scans in 1u32..20,
    ) {
        let mut scanner = Scanner::new(ANYTHING);
        let tree = tree(&[]);
        tree.vm(10, 10, "-name\0same");
        scan(&mut scanner, &tree);
        let file = ["/proc", "/proc/10/stat", "/proc/10/comm", "/proc/10/cmdline", "/etc/passwd"];
        let root = but(&tree, move |path| (path == Path::new(file[which])).then(|| Ok(bytes.clone())));
        for _ in 0..scans {
            let scan = scan(&mut scanner, &root);
            prop_assert!(scan.gone.is_empty());
            prop_assert!(scan.found.iter().any(|p| p.id.pid == 10));
        }
    }
}

/// What `/proc` tells of a process's own memory waits for a lock that the process holds for as long
/// as it wants: a pipe without a writer stands for that.
#[test]
fn a_process_that_holds_its_memorys_lock_keeps_no_scan_from_other_vms() {
    let tree = two_vms();
    let line = std::fs::read(tree.path("/proc/11/cmdline")).unwrap();
    let wait = || {
        tree.remove("/proc/11/cmdline");
        tree.pipe("/proc/11/cmdline")
    };
    let pipe = wait();
    let mut scanner = Scanner::new(ANYTHING);
    let first = scan(&mut scanner, &tree);
    assert_eq!(ids(&first.found), [10]);
    assert!(first.problems[0].1.contains("the process holds its memory's lock"), "{first:?}");
    std::fs::write(&pipe, &line).unwrap();
    eventually(|| ids(&scan(&mut scanner, &tree).found) == [10, 11]);
    // One that is known stays a VM, whatever it calls itself.
    let pipe = wait();
    tree.put("/proc/11/stat", stat(11, "other", 'S', 5));
    let known = scan(&mut scanner, &tree);
    assert_eq!((ids(&known.found), known.problems.len()), (vec![10, 11], 1));
    std::fs::write(&pipe, &line).unwrap();
    eventually(|| scan(&mut scanner, &tree).problems.is_empty());
}
