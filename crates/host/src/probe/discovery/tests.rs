//! Fixture trees that stand for `/proc`.

use std::sync::Arc;

use proptest::prelude::*;
use rustix::io::Errno;

use super::*;

/// Every process that is called QEMU: a fixture's files belong to the user of the tests.
fn anything() -> TrustRules {
    TrustRules { users: None, programs: None, containers: true }
}

#[test]
fn a_scan_passes_over_what_is_not_a_live_qemu_and_makes_names_unique() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path());
    let put = |path: String, bytes: &[u8]| root.put(path, bytes);
    let line = |socket: &str| {
        format!("qemu-kvm\0-name\0a\0-mem-path\0/huge/x\0-qmp\0unix:{socket},server\0")
    };
    let stat = |state, start| format!("1 (q) {state}{} {start} 0", " 0".repeat(18));
    put("/proc/self/mountinfo".into(), b"1 2 0:3 / /huge rw - hugetlbfs none rw\n");
    for (pid, cmdline, state, start) in [
        (10, line("/a"), 'S', 500),
        (11, line("rel"), 'S', 400),
        (12, line("/c"), 'Z', 1),
        (13, "bash\0".into(), 'S', 2),
    ] {
        put(format!("/proc/{pid}/cmdline"), cmdline.as_bytes());
        put(format!("/proc/{pid}/stat"), stat(state, start).as_bytes());
    }
    put("/proc/14/cmdline".into(), line("/d").as_bytes());
    std::os::unix::fs::symlink("/srv", root.path("/proc/11/cwd")).unwrap();
    let found = discover(&root, &anything()).unwrap().found;
    assert_eq!(found.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a-10", "a"]);
    assert_eq!(found[0].id, VmId { pid: 10, start: 500 });
    assert_eq!(found[1].args.qmp, QmpAddress::Paths(vec!["/srv/rel".into()]));
    assert!(found[0].args.hugepages);
}

#[test]
fn a_pool_of_huge_pages_that_is_mounted_later_is_seen_with_the_next_vm() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path());
    let begin = |pid: u32, mounts: &str| {
        let proc = dir.path().join(format!("proc/{pid}"));
        std::fs::create_dir_all(&proc).unwrap();
        std::fs::create_dir_all(root.path("/proc/self")).unwrap();
        std::fs::write(root.path("/proc/self/mountinfo"), mounts).unwrap();
        std::fs::write(proc.join("cmdline"), format!("kvm\0-mem-path\0/huge/{pid}\0")).unwrap();
        let stat = format!("{pid} (kvm) S{} 7 0", " 0".repeat(18));
        std::fs::write(proc.join("stat"), stat).unwrap();
    };
    let mut scanner = Scanner::new(anything());
    begin(10, "1 2 0:3 / / rw - ext4 none rw\n");
    assert!(!scanner.scan(&root, &none()).unwrap().found[0].args.hugepages);
    begin(11, "1 2 0:3 / /huge rw - hugetlbfs none rw\n");
    let found = scanner.scan(&root, &none()).unwrap().found;
    assert!(found.iter().find(|p| p.id.pid == 11).unwrap().args.hugepages);
}

#[test]
fn of_what_is_no_vm_only_the_name_is_read_again_but_now_and_then() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path());
    let proc = dir.path().join("proc/10");
    std::fs::create_dir_all(&proc).unwrap();
    let become_ = |comm: &str, start: u64, line: &str| {
        let stat = format!("10 ({comm}) S{} {start} 0", " 0".repeat(18));
        std::fs::write(proc.join("comm"), format!("{comm}\n")).unwrap();
        std::fs::write(proc.join("stat"), stat).unwrap();
        std::fs::write(proc.join("cmdline"), line).unwrap();
    };
    let mut scanner = Scanner::new(anything());
    let mut found = || scanner.scan(&root, &none()).unwrap().found.len();
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
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path());
    std::fs::create_dir_all(root.path("/proc/10")).unwrap();
    let mut scanner = Scanner::new(anything());
    let mut scan = |comm: &str, start: u64, line: &str| {
        let stat = format!("10 ({comm}) S{} {start} 0", " 0".repeat(18));
        std::fs::write(root.path("/proc/10/stat"), stat).unwrap();
        std::fs::write(root.path("/proc/10/cmdline"), line).unwrap();
        scanner.scan(&root, &none()).unwrap().found.len()
    };
    assert_eq!(scan("sh", 5, "sh\0"), 0);
    assert_eq!(scan("sh", 5, "kvm\0"), 0, "not read again");
    assert_eq!(scan("kvm", 5, "sh\0"), 0);
    assert_eq!(scan("kvm", 5, "kvm\0"), 1, "a wrapper became QEMU");
    assert_eq!(scan("kvm", 5, "sh\0"), 1, "not read again");
    assert_eq!(scan("ifup", 5, "sh\0"), 0, "a child of QEMU became something else");
    assert_eq!(scan("ifup", 6, "kvm\0"), 1, "another process of that pid");
}

fn none() -> HashSet<VmId> {
    HashSet::new()
}

/// A tree with VMs in it.
struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let fixture = Fixture { dir: tempfile::tempdir().unwrap() };
        std::fs::create_dir_all(fixture.dir.path().join("proc")).unwrap();
        fixture
    }

    fn root(&self) -> Root {
        Root::at(self.dir.path())
    }

    fn write(&self, pid: u32, file: &str, text: &str) {
        let proc = self.dir.path().join(format!("proc/{pid}"));
        std::fs::create_dir_all(&proc).unwrap();
        std::fs::write(proc.join(file), text).unwrap();
    }

    fn stat(&self, pid: u32, comm: &str, state: char, start: u64) {
        let text = format!("{pid} ({comm}) {state}{} {start} 0", " 0".repeat(18));
        self.write(pid, "stat", &text);
        self.write(pid, "comm", &format!("{comm}\n"));
    }

    fn vm(&self, pid: u32, start: u64, name: &str) {
        self.stat(pid, "kvm", 'S', start);
        self.write(pid, "cmdline", &format!("kvm\0-name\0{name}\0"));
    }

    fn end(&self, pid: u32) {
        std::fs::remove_dir_all(self.dir.path().join(format!("proc/{pid}"))).unwrap();
    }
}

fn ids(found: &[QemuProcess]) -> Vec<u32> {
    found.iter().map(|p| p.id.pid).collect()
}

#[test]
fn a_vm_is_gone_only_where_that_was_seen() {
    type Happens = fn(&Fixture);
    let end: [(&str, Happens, bool); 7] = [
        ("nothing happened", |_| {}, false),
        ("its directory is away", |f| f.end(10), true),
        ("a zombie", |f| f.stat(10, "kvm", 'Z', 5), true),
        ("another process", |f| f.stat(10, "kvm", 'S', 6), true),
        (
            "another program",
            |f| {
                f.stat(10, "ifup", 'S', 5);
                f.write(10, "cmdline", "ifup\0");
            },
            true,
        ),
        (
            "between two programs",
            |f| {
                f.stat(10, "ifup", 'S', 5);
                f.write(10, "cmdline", "");
            },
            false,
        ),
        ("nonsense", |f| f.write(10, "stat", "10 (kvm"), false),
    ];
    for (what, happens, gone) in end {
        let fixture = Fixture::new();
        fixture.vm(10, 5, "a");
        fixture.vm(11, 5, "b");
        let mut scanner = Scanner::new(anything());
        assert_eq!(ids(&scanner.scan(&fixture.root(), &none()).unwrap().found), [10, 11]);
        happens(&fixture);
        let scan = scanner.scan(&fixture.root(), &none()).unwrap();
        let id = VmId { pid: 10, start: 5 };
        assert_eq!(scan.gone, if gone { vec![id] } else { vec![] }, "{what}");
        assert_eq!(scan.found.iter().any(|p| p.id == id), !gone, "{what}");
        assert!(scan.found.iter().any(|p| p.id.pid == 11), "{what}");
    }
}

#[test]
fn a_vm_that_is_not_listed_or_not_read_stays() {
    let fixture = Fixture::new();
    fixture.vm(10, 5, "a");
    let mut scanner = Scanner::new(anything());
    assert_eq!(scanner.scan(&fixture.root(), &none()).unwrap().found.len(), 1);
    let failing = |what: &'static str, errno: Errno| {
        fixture.root().with_faults(Arc::new(move |path: &Path| {
            (path == Path::new(what)).then(|| Err(errno.into()))
        }))
    };
    for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO, Errno::ACCESS] {
        assert!(scanner.scan(&failing("/proc", errno), &none()).is_err());
        for _ in 0..=THOROUGH {
            let scan = scanner.scan(&failing("/proc/10/stat", errno), &none()).unwrap();
            assert_eq!((ids(&scan.found), &scan.gone[..]), (vec![10], &[][..]), "{errno}");
            assert_eq!(scan.problems.len(), 1);
        }
    }
    let unlisted = fixture.root().with_faults(Arc::new(|path: &Path| {
        (path == Path::new("/proc")).then(|| Ok(b"self\n".to_vec()))
    }));
    let scan = scanner.scan(&unlisted, &none()).unwrap();
    assert_eq!((ids(&scan.found), &scan.gone[..]), (vec![10], &[][..]));
}

/// What is read once must not be missing for ever because it failed then.
#[test]
fn a_vm_whose_first_read_fails_is_found_whole_by_the_next_scan() {
    let fixture = Fixture::new();
    fixture.vm(10, 5, "a");
    fixture.write(10, "cmdline", "kvm\0-name\0a\0-qmp\0unix:q,server\0");
    fixture.write(10, "environ", "LD_PRELOAD=/x/libebb_vmm.so\0EBB_AGENT_SOCKET=/s\0");
    std::os::unix::fs::symlink("/srv", fixture.dir.path().join("proc/10/cwd")).unwrap();
    for file in ["stat", "cmdline", "environ", "cwd", "ns/mnt"] {
        let mut scanner = Scanner::new(anything());
        let failing = fixture.root().with_faults(Arc::new(move |path: &Path| {
            let fails = path == Path::new("/proc/10").join(file);
            fails.then(|| Err(Errno::NOMEM.into()))
        }));
        assert_eq!(scanner.scan(&failing, &none()).unwrap().problems.len(), 1, "{file}");
        let scan = scanner.scan(&fixture.root(), &none()).unwrap();
        assert_eq!(scan.found[0].args.agent, Some("/s".into()), "{file}");
        assert_eq!(scan.found[0].args.qmp, QmpAddress::Paths(vec!["/srv/q".into()]), "{file}");
    }
}

#[test]
fn of_processes_that_are_closed_even_to_root_only_one_called_qemu_is_told_of() {
    let fixture = Fixture::new();
    fixture.vm(10, 5, "a");
    fixture.vm(11, 5, "b");
    let stat = fixture.root().read("/proc/11/stat").unwrap().unwrap();
    let open = stat.find('(').unwrap();
    let close = stat.rfind(')').unwrap();
    fixture.write(11, "stat", &format!("{}(init{}", &stat[..open], &stat[close..]));
    let closed = fixture.root().with_faults(Arc::new(|path: &Path| {
        let kept = path.ends_with("exe") || path.ends_with("status") || path.ends_with("ns/user");
        kept.then(|| Err(Errno::ACCESS.into()))
    }));
    let scan = Scanner::new(TrustRules::default()).scan(&closed, &none()).unwrap();
    let told: Vec<&str> = scan.problems.iter().map(|p| p.0.as_str()).collect();
    assert_eq!((scan.found.len(), told), (0, vec!["/proc/10"]));
}

#[test]
fn a_stranger_that_poses_as_a_vm_is_refused_and_told_of() {
    let fixture = Fixture::new();
    fixture.vm(10, 5, "a");
    fixture.vm(11, 5, "posing");
    fixture.write(10, "status", "Uid: 0 0 0 0\nNSpid: 10\n");
    fixture.write(11, "status", "Uid: 4000000 4000000 4000000 4000000\nNSpid: 11\n");
    let trust = TrustRules { programs: None, ..TrustRules::default() };
    let mut scanner = Scanner::new(trust.clone());
    // A stranger can have whoever reads its command line wait for ever.
    let unread = fixture.root().with_faults(Arc::new(|path: &Path| {
        assert!(!path.ends_with("11/cmdline"), "{}", path.display());
        None
    }));
    for _ in 0..3 {
        let scan = scanner.scan(&unread, &none()).unwrap();
        assert_eq!((ids(&scan.found), scan.problems), (vec![10], vec![]));
        let (pid, why) = &scan.refused[0];
        assert!(*pid == 11 && why.contains("uid 4000000"), "{pid}: {why}");
    }
    // A command line is not read at each scan again.
    let rereads = fixture.root().with_faults(Arc::new(|path: &Path| {
        assert!(!path.ends_with("cmdline"), "{}", path.display());
        None
    }));
    assert_eq!(scanner.scan(&rereads, &none()).unwrap().refused.len(), 1);
    let at_once = serving(&fixture.root(), &trust, &none(), 11).unwrap_err();
    assert!(at_once.contains("process 11 behind it is not taken for a VM"), "{at_once}");
    // It was a VM when memory was taken from it.
    let owed = HashSet::from([VmId { pid: 11, start: 5 }]);
    assert_eq!(ids(&scanner.scan(&fixture.root(), &owed).unwrap().found), [10, 11]);
    assert!(serving(&fixture.root(), &trust, &owed, 11).is_ok());
    let mut scanner = Scanner::new(trust.clone());
    assert_eq!(scanner.scan(&fixture.root(), &none()).unwrap().refused.len(), 1);
    // What was refused may be allowed later.
    fixture.write(11, "status", "Uid: 0 0 0 0\n");
    let scans =
        (0..THOROUGH).filter(|_| scanner.scan(&fixture.root(), &none()).unwrap().found.len() == 2);
    assert!(scans.count() > 0);
}

#[test]
fn of_vms_of_one_name_the_oldest_has_it_and_then_the_next() {
    let fixture = Fixture::new();
    fixture.vm(10, 50, "a");
    fixture.vm(11, 40, "a");
    fixture.vm(12, 60, "a-10");
    let mut scanner = Scanner::new(anything());
    let mut names = || {
        let found = scanner.scan(&fixture.root(), &none()).unwrap().found;
        found.into_iter().map(|p| (p.id.pid, p.name, p.given)).collect::<Vec<_>>()
    };
    let of = |pid, name: &str, given: &str| (pid, name.to_owned(), given.to_owned());
    let three = [of(10, "a-10-10", "a"), of(11, "a", "a"), of(12, "a-10", "a-10")];
    assert_eq!((names(), names()), (three.to_vec(), three.to_vec()));
    fixture.end(11);
    assert_eq!(names(), [of(10, "a", "a"), of(12, "a-10", "a-10")]);
}

/// A machine of nothing but answers.
fn answering(answer: impl Fn(&str) -> Option<Vec<u8>> + Send + Sync + 'static) -> Root {
    Root::at("/nonexistent").with_faults(Arc::new(move |path: &Path| {
        let answer = answer(path.to_str().unwrap());
        Some(answer.ok_or_else(|| Errno::NOENT.into()))
    }))
}

/// What a VM of this pid has in a file of its own.
fn file_of(pid: &str, file: &str) -> Option<Vec<u8>> {
    match file {
        "comm" => Some("kvm\n".into()),
        "stat" => Some(format!("{pid} (kvm) S{} {pid} 0", " 0".repeat(18)).into()),
        "cmdline" => Some("kvm\0-name\0same\0".into()),
        _ => None,
    }
}

#[test]
fn two_thousand_vms_are_found_and_each_has_a_name_of_its_own() {
    let root = answering(|path| match path.split('/').collect::<Vec<_>>()[..] {
        ["", "proc"] => Some((1..=2_000).map(|n| format!("{n}\n")).collect::<String>().into()),
        ["", "proc", pid, file] => file_of(pid, file),
        _ => None,
    });
    let mut scanner = Scanner::new(anything());
    for _ in 0..2 {
        let scan = scanner.scan(&root, &none()).unwrap();
        let names: HashSet<&str> = scan.found.iter().map(|p| p.name.as_str()).collect();
        assert_eq!((scan.found.len(), names.len(), scan.problems.len()), (2_000, 2_000, 0));
    }
}

proptest! {
    /// Whatever a read of a running VM gives, it is not taken for ended.
    #[test]
    fn no_vm_is_forgotten_for_what_a_read_gives(
        bytes in proptest::collection::vec(any::<u8>(), 0..60),
        which in 0usize..5,
        scans in 1u32..20,
    ) {
        let machine = |path: &str| match path {
            "/proc" => Some(b"10\n".to_vec()),
            path => file_of("10", path.strip_prefix("/proc/10/")?),
        };
        let mut scanner = Scanner::new(anything());
        scanner.scan(&answering(machine), &none()).unwrap();
        let file = ["/proc", "/proc/10/stat", "/proc/10/comm", "/proc/10/cmdline", "/etc/passwd"];
        let root = answering(move |path| {
            if path == file[which] { Some(bytes.clone()) } else { machine(path) }
        });
        for _ in 0..scans {
            let scan = scanner.scan(&root, &none()).unwrap();
            prop_assert!(scan.gone.is_empty());
            prop_assert!(scan.found.iter().any(|p| p.id.pid == 10));
        }
    }
}
