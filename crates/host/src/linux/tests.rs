//! The whole host on a tree of files and on sockets of tests.

mod orders;
mod shared;

use super::*;
use crate::probe::trust::TrustRules;
use crate::root::Root;
use ebb_core::config::Config;
use ebb_core::plan::{MergeOrder, MergePlan};
use ebb_core::sample::{Link, Problem};
use ebb_core::units::Bytes;
use std::os::unix::net::UnixListener;

fn configured(text: &str) -> Options {
    Options { config: Config::parse("f", text).unwrap(), ..Options::default() }
}

fn host(dir: &std::path::Path, options: Options) -> LinuxHost {
    let trust = TrustRules { users: None, programs: None, containers: true };
    let root = Root::at(dir);
    LinuxHost::new(Options { root, trust, ..options }).unwrap()
}

#[test]
fn an_empty_machine_is_a_sample_of_unknowns() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("proc")).unwrap();
    let mut host = host(dir.path(), configured("[host]\ncgroup = \"/x\"\n"));
    let sample = host.sample();
    assert_eq!((sample.host, sample.vms), (HostSample::default(), vec![]));
    let sources: Vec<&str> = sample.problems.iter().map(|p| p.source.as_str()).collect();
    assert_eq!(sources, ["/x"]);
}

/// A kernel without PSI gives no trigger: there cgroup v1's notifications tell the pool's pressure.
#[test]
fn without_psi_a_pool_of_cgroup_v1_tells_its_pressure() {
    let dir = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| Root::at(dir.path()).put(path, text);
    write("proc/self/mountinfo", "1 0 0:1 / /cg rw - cgroup cgroup rw,memory\n");
    write("cg/vms/memory.pressure_level", "");
    write("cg/vms/cgroup.event_control", "");
    let mut host = host(dir.path(), configured("[host]\ncgroup = \"/vms\"\n"));
    host.sample();
    assert!(host.trigger.is_none());
    assert_eq!(host.notifications.as_ref().map(|n| n.cgroup.as_str()), Some("/vms"));
}

#[test]
fn a_vm_that_is_not_seen_is_still_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let proc = dir.path().join("proc/10");
    std::fs::create_dir_all(&proc).unwrap();
    let starts = |at: u64| {
        let text = format!("10 (kvm) S{} {at} 0", " 0".repeat(18));
        std::fs::write(proc.join("stat"), text).unwrap();
    };
    starts(7);
    let file = Some(dir.path().join("hands-off.json"));
    let vm = VmId { pid: 10, start: 7 };
    let (mut hands_off, _) = HandsOffs::load(file.clone(), LinuxHost::now());
    hands_off.set(vm, LinuxHost::now(), 60_000).unwrap();
    // Its command line cannot be read: the scan finds no VM.
    let options = Options { hands_off: file, ..Options::default() };
    let mut host = host(dir.path(), options);
    assert!(host.sample().vms.is_empty());
    assert!(host.hands_off.left_ms(vm, LinuxHost::now()).is_some());
    starts(8);
    host.sample();
    assert_eq!(host.hands_off.left_ms(vm, LinuxHost::now()), None, "it has ended");
}

#[test]
fn what_others_merge_is_read_now_and_then_and_shown_all_the_time() {
    let dir = tempfile::tempdir().unwrap();
    let ksm = dir.path().join("sys/kernel/mm/ksm");
    std::fs::create_dir_all(dir.path().join("proc")).unwrap();
    std::fs::create_dir_all(&ksm).unwrap();
    let shared = |n: u64| {
        std::fs::write(ksm.join("run"), "1\n").unwrap();
        std::fs::write(ksm.join("pages_shared"), format!("{n}\n")).unwrap();
    };
    let mut host = host(dir.path(), Options::default());
    let mut seen = || host.sample().host.ksm.map(|k| k.pages_shared);
    shared(5);
    assert_eq!(seen(), Some(5));
    shared(6);
    assert_eq!(seen(), Some(5));
}

#[test]
fn a_sleep_ends_in_time_or_by_the_waker() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path(), Options::default());
    assert_eq!(host.wait(Instant::now() + Duration::from_millis(5)), Wake::Timer);
    let waker = host.waker();
    let thread = std::thread::spawn(move || waker.wake());
    assert_eq!(host.wait(Instant::now() + Duration::from_secs(60)), Wake::Woken);
    thread.join().unwrap();
    assert_eq!(host.wait(Instant::now()), Wake::Timer, "a wake-up counts once");
}

#[test]
fn a_socket_that_another_process_serves_is_not_taken_for_the_vms() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("ebb-q");
    let _not_the_vm = UnixListener::bind(&socket).unwrap();
    let proc = dir.path().join("proc/10");
    std::fs::create_dir_all(&proc).unwrap();
    let line = format!("kvm\0-name\0a\0-qmp\0unix:{},server\0", socket.display());
    std::fs::write(proc.join("cmdline"), line).unwrap();
    std::fs::write(proc.join("stat"), format!("10 (kvm) S{} 7 0", " 0".repeat(18))).unwrap();
    let mut host = host(dir.path(), Options::default());
    let sample = host.sample();
    let Link::Down(why) = &sample.vms[0].link else { panic!("{:?}", sample.vms[0].link) };
    assert!(why.contains(&format!("served by process {}", std::process::id())), "{why}");
    let order = BalloonOrder { vm: sample.vms[0].id, to: Bytes::mib(1), gives: false };
    let act = host.set_balloons(&[order], Duration::ZERO).remove(0).unwrap_err();
    assert_eq!(act, ActError::NoLink(why.clone()));
    // The pid is another process's now.
    std::fs::write(proc.join("stat"), format!("10 (kvm) S{} 8 0", " 0".repeat(18))).unwrap();
    let order = BalloonOrder { vm: sample.vms[0].id, to: Bytes::mib(1), gives: false };
    let act = host.set_balloons(&[order], Duration::ZERO).remove(0).unwrap_err();
    assert_eq!(act, ActError::Gone { pid: 10 });
}

/// A process of QEMU in a tree of files.
fn qemu_at(dir: &std::path::Path, arguments: &str) -> std::path::PathBuf {
    let proc = dir.join("proc/10");
    std::fs::create_dir_all(&proc).unwrap();
    std::fs::write(proc.join("cmdline"), format!("kvm\0{arguments}\0")).unwrap();
    std::fs::write(proc.join("stat"), format!("10 (kvm) S{} 7 0", " 0".repeat(18))).unwrap();
    proc
}

#[test]
fn what_was_read_of_a_vms_user_holds_while_it_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let status = qemu_at(dir.path(), "-name\0a").join("status");
    std::fs::write(&status, "Uid: 107 107 107 107\n").unwrap();
    let options = || configured("[vm.a]\nuser = 107\n");
    let mut first = host(dir.path(), options());
    assert_eq!(first.sample().vms[0].claim, Claim::Proven);
    std::fs::remove_file(&status).unwrap();
    std::fs::create_dir(&status).unwrap();
    assert_eq!(first.sample().vms[0].claim, Claim::Proven);
    let mut later = host(dir.path(), options());
    assert!(matches!(later.sample().vms[0].claim, Claim::Unread(_)));
    std::fs::remove_dir(&status).unwrap();
    std::fs::write(&status, "Uid: 108 108 108 108\n").unwrap();
    for host in [&mut first, &mut later] {
        assert!(matches!(host.sample().vms[0].claim, Claim::Refused(_)));
    }
}

#[test]
fn a_section_that_names_a_socket_holds_before_qemu_listens_and_where_it_excludes_the_vm() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("db.qmp").display().to_string();
    qemu_at(dir.path(), &format!("-qmp\0unix:{socket},server=on"));
    for manage in [true, false] {
        let section = format!("[vm.db]\nqmp = \"{socket}\"\nmanage = {manage}\n");
        let mut host = host(dir.path(), configured(&section));
        for _ in 0..2 {
            assert_eq!(host.sample().vms[0].name, "db", "managed: {manage}");
            host.scanned = None;
        }
    }
}

/// Since Linux 6.16 `ksm_stat` waits for the process's mmap lock. Here the files are pipes that
/// nobody writes to.
#[test]
fn a_process_that_keeps_its_mmap_lock_does_not_hold_up_a_tick() {
    let dir = tempfile::tempdir().unwrap();
    let ksm = dir.path().join("sys/kernel/mm/ksm");
    std::fs::create_dir_all(&ksm).unwrap();
    std::fs::write(ksm.join("run"), "1\n").unwrap();
    let pipe = |pid: u32| {
        let path = dir.path().join(format!("proc/{pid}/ksm_stat"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        path
    };
    let vm = pipe(10);
    let proc = dir.path().join("proc/10");
    std::fs::write(proc.join("cmdline"), "kvm\0-name\0a\0").unwrap();
    std::fs::write(proc.join("stat"), format!("10 (kvm) S{} 7 0", " 0".repeat(18))).unwrap();
    std::fs::create_dir_all(dir.path().join("proc/self")).unwrap();
    std::fs::write(dir.path().join("proc/self/ksm_stat"), "").unwrap();
    let stranger = pipe(11);
    let mut host = host(dir.path(), Options::default());
    for _ in 0..3 {
        let sample = host.sample();
        assert_eq!(sample.vms[0].merge.as_ref().unwrap().stat.merging_pages, None);
    }
    // It comes when the lock is free.
    std::fs::write(&vm, "ksm_merging_pages 5\n").unwrap();
    std::fs::write(&stranger, "ksm_merging_pages 7\n").unwrap();
    host.others_ksm = None;
    let until = Instant::now() + Duration::from_secs(60);
    let mut merging = None;
    while merging != Some(5) && Instant::now() < until {
        host.others_ksm = None;
        merging = host.sample().vms[0].merge.clone().unwrap().stat.merging_pages;
    }
    assert_eq!(merging, Some(5));
}

/// A QEMU serves one client at a time: even a connection that is closed at once is in its
/// manager's way.
#[test]
fn the_socket_of_a_vm_that_is_not_managed_is_let_be_also_while_another_is_owed_something() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, its) = (dir.path().join("other"), dir.path().join("its"));
    let other = UnixListener::bind(&socket).unwrap();
    other.set_nonblocking(true).unwrap();
    let proc = dir.path().join("proc/10");
    std::fs::create_dir_all(&proc).unwrap();
    std::fs::write(proc.join("cmdline"), "kvm\0-name\0a\0").unwrap();
    std::fs::write(proc.join("stat"), format!("10 (kvm) S{} 7 0", " 0".repeat(18))).unwrap();
    let text = format!("[vm.other]\nmanage = false\nqmp = {socket:?}\n");
    let owed = VmId { pid: 10, start: 7 };
    for (at, connects) in [(&its, false), (&socket, true)] {
        let mut host = host(dir.path(), configured(&text));
        host.reach_at([(owed, at.clone())]);
        host.sample_owed(&[owed]);
        assert_eq!(other.accept().is_ok(), connects, "{}", at.display());
    }
}

#[test]
fn nothing_is_taken_out_of_ksm_where_the_memory_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let proc = dir.path().join("proc/10");
    std::fs::create_dir_all(&proc).unwrap();
    std::fs::write(proc.join("cmdline"), "kvm\0-name\0a\0").unwrap();
    std::fs::write(proc.join("stat"), format!("10 (kvm) S{} 7 0", " 0".repeat(18))).unwrap();
    std::fs::write(proc.join("ksm_stat"), "ksm_merging_pages 100000\n").unwrap();
    let meminfo = |kib: u64| {
        let text = format!("MemTotal: 9000000 kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\n");
        std::fs::write(dir.path().join("proc/meminfo"), text).unwrap();
    };
    let ksm_note = Some(dir.path().join("ksm.json"));
    let options = Options { ksm_note, ..configured("[merge]\nmode = \"on\"\n") };
    let mut host = host(dir.path(), options);
    meminfo(600_000);
    let unread = ksm::Stats::default().merged(VmId { pid: 10, start: 7 });
    assert!(unread.unwrap_err().contains("not read yet"), "not known is not none");
    let until = Instant::now() + Duration::from_secs(60);
    let vm = loop {
        let vm = host.sample().vms.remove(0);
        if vm.merge.is_some_and(|m| m.stat.merging_pages.is_some()) {
            break vm.id;
        }
        assert!(Instant::now() < until);
    };
    let order = |open| MergePlan {
        vms: vec![MergeOrder { vm, name: "a".into(), open, reason: String::new() }],
        ..MergePlan::default()
    };
    let mut said = |kib, open| {
        meminfo(kib);
        host.merge(&order(open));
        let sample = host.sample();
        let error = sample.vms[0].merge.clone().unwrap().error.unwrap_or_default();
        let is_told = |p: &Problem| (p.vm, p.source.as_str()) == (Some(vm), "merging");
        assert!(sample.problems.iter().any(|p| is_told(p) && p.message == error));
        error
    };
    assert!(said(600_000, false).contains("breaking"), "390 MiB and what must stay free");
    assert!(said(700_000, false).contains("no QMP connection"), "there is room");
    assert!(said(600_000, true).contains("no QMP connection"), "opening takes none");
}
