//! The whole host on a tree of files and on sockets of tests.

mod discovery;
mod orders;
mod shared;

use super::*;
use crate::testing::{ANYTHING, eventually, tree, within_a_minute};
use ebb_core::config::Config;
use ebb_core::plan::{MergeOrder, MergePlan};
use ebb_core::sample::{Link, Problem};
use ebb_core::units::Bytes;

/// The VM of a tree of files.
const VM: VmId = VmId { pid: 10, start: 7 };

fn configured(text: &str) -> Options {
    Options { config: Config::parse("f", text).unwrap(), ..Options::default() }
}

fn host(root: &Root, options: Options) -> LinuxHost {
    LinuxHost::new(Options { root: root.clone(), trust: ANYTHING, ..options }).unwrap()
}

#[test]
fn an_empty_machine_is_a_sample_of_unknowns() {
    let tree = tree(&[]);
    let mut host = host(&tree, configured("[host]\ncgroup = \"/x\"\n"));
    let sample = host.sample();
    assert_eq!((sample.host, sample.vms), (HostSample::default(), vec![]));
    let sources: Vec<&str> = sample.problems.iter().map(|p| p.source.as_str()).collect();
    assert_eq!(sources, ["host.cgroup"]);
}

/// A kernel without PSI gives no trigger: there cgroup v1's notifications tell the pool's pressure.
#[test]
fn without_psi_a_pool_of_cgroup_v1_tells_its_pressure() {
    let tree = tree(&[
        ("/proc/self/mountinfo", "1 0 0:1 / /cg rw - cgroup cgroup rw,memory\n"),
        ("/cg/vms/memory.pressure_level", ""),
        ("/cg/vms/cgroup.event_control", ""),
    ]);
    let mut host = host(&tree, configured("[host]\ncgroup = \"/vms\"\n"));
    host.sample();
    assert!(host.trigger.is_none());
    assert_eq!(host.notifications.as_ref().map(|n| n.cgroup.as_str()), Some("/vms"));
}

#[test]
fn a_vm_that_is_not_seen_is_still_left_alone() {
    let tree = tree(&[]);
    tree.process(10, "kvm", 'S', 7);
    let file = Some(tree.path("/hands-off.json"));
    let (mut hands_off, _) = HandsOffs::load(file.clone(), LinuxHost::now());
    hands_off.set(VM, LinuxHost::now(), 60_000).unwrap();
    // Its command line cannot be read: the scan finds no VM.
    let options = Options { hands_off: file, ..Options::default() };
    let mut host = host(&tree, options);
    assert!(host.sample().vms.is_empty());
    assert!(host.hands_off.left_ms(VM, LinuxHost::now()).is_some());
    tree.process(10, "kvm", 'S', 8);
    host.sample();
    assert_eq!(host.hands_off.left_ms(VM, LinuxHost::now()), None, "it has ended");
}

#[test]
fn what_others_merge_is_read_now_and_then_and_shown_all_the_time() {
    let tree = tree(&[("/sys/kernel/mm/ksm/run", "1\n")]);
    let shared = |n: u64| tree.put("/sys/kernel/mm/ksm/pages_shared", format!("{n}\n"));
    let mut host = host(&tree, Options::default());
    let mut seen = || host.sample().host.ksm.map(|k| k.pages_shared);
    shared(5);
    assert_eq!(seen(), Some(5));
    shared(6);
    assert_eq!(seen(), Some(5));
}

#[test]
fn a_sleep_ends_in_time_or_by_the_waker() {
    let tree = tree(&[]);
    let mut host = host(&tree, Options::default());
    assert!(!host.wait(Instant::now() + Duration::from_millis(5)));
    let waker = host.waker();
    let thread = std::thread::spawn(move || waker.wake());
    assert!(host.wait(Instant::now() + Duration::from_secs(60)));
    thread.join().unwrap();
    assert!(!host.wait(Instant::now()), "a wake-up counts once");
}

#[test]
fn a_socket_that_another_process_serves_is_not_taken_for_the_vms() {
    let tree = tree(&[]);
    let _not_the_vm = tree.listen("/ebb-q");
    tree.vm(10, 7, &format!("-name\0a\0-qmp\0unix:{},server", tree.path("/ebb-q").display()));
    let mut host = host(&tree, Options::default());
    let sample = host.sample();
    let Link::Down(why) = &sample.vms[0].link else { panic!("{:?}", sample.vms[0].link) };
    assert!(why.contains(&format!("served by process {}", std::process::id())), "{why}");
    let mut act = || {
        let order = BalloonOrder { vm: VM, to: Bytes::mib(1), gives: false };
        host.set_balloons(&[order], Duration::ZERO).remove(0).unwrap_err()
    };
    assert_eq!(act(), ActError::NoLink(why.clone()));
    // The pid is another process's now.
    tree.process(10, "kvm", 'S', 8);
    assert_eq!(act(), ActError::Gone { pid: 10 });
}

#[test]
fn what_was_read_of_a_vms_user_holds_while_it_cannot_be_read() {
    let tree = tree(&[("/proc/10/status", "Uid: 107 107 107 107\n")]);
    tree.vm(10, 7, "-name\0a");
    let options = || configured("[vm.a]\nuser = 107\n");
    let mut first = host(&tree, options());
    assert_eq!(first.sample().vms[0].claim, Claim::Proven);
    tree.remove("/proc/10/status");
    tree.dir("/proc/10/status");
    assert_eq!(first.sample().vms[0].claim, Claim::Proven);
    let mut later = host(&tree, options());
    assert!(matches!(later.sample().vms[0].claim, Claim::Unread(_)));
    tree.remove("/proc/10/status");
    tree.put("/proc/10/status", "Uid: 108 108 108 108\n");
    for host in [&mut first, &mut later] {
        assert!(matches!(host.sample().vms[0].claim, Claim::Refused(_)));
    }
}

#[test]
fn a_section_that_names_a_socket_holds_before_qemu_listens_and_where_it_excludes_the_vm() {
    let tree = tree(&[]);
    let socket = tree.path("/db.qmp").display().to_string();
    tree.vm(10, 7, &format!("-qmp\0unix:{socket},server=on"));
    for manage in [true, false] {
        let section = format!("[vm.db]\nqmp = \"{socket}\"\nmanage = {manage}\n");
        let mut host = host(&tree, configured(&section));
        for _ in 0..2 {
            assert_eq!(host.sample().vms[0].name, "db", "managed: {manage}");
            host.scanned = None;
        }
    }
}

#[test]
fn a_socket_of_a_section_that_is_not_there_is_told_of_its_vm_and_its_setting() {
    let tree = tree(&[]);
    let socket = tree.path("/nosuch.qmp").display().to_string();
    tree.vm(10, 7, "-name\0a");
    let mut host = host(&tree, configured(&format!("[vm.a]\nqmp = \"{socket}\"\n")));
    host.sample();
    host.scanned = None;
    let problems = host.sample().problems;
    let of_it = problems.iter().find(|p| p.source == "[vm.a] qmp").unwrap();
    assert_eq!(of_it.vm, Some(VM));
    assert!(of_it.message.starts_with(&format!("{socket}: no such socket")), "{of_it:?}");
}

/// Since Linux 6.16 `ksm_stat` waits for the process's mmap lock. Here the files are pipes that
/// nobody writes to.
#[test]
fn a_process_that_keeps_its_mmap_lock_does_not_hold_up_a_tick() {
    let tree = tree(&[("/sys/kernel/mm/ksm/run", "1\n"), ("/proc/self/ksm_stat", "")]);
    tree.vm(10, 7, "-name\0a");
    let [vm, stranger] = [10, 11].map(|pid| tree.pipe(format!("/proc/{pid}/ksm_stat")));
    let mut host = host(&tree, Options::default());
    for _ in 0..3 {
        let sample = host.sample();
        assert_eq!(sample.vms[0].merge.as_ref().unwrap().stat.merging_pages, None);
    }
    // It comes when the lock is free.
    std::fs::write(&vm, "ksm_merging_pages 5\n").unwrap();
    std::fs::write(&stranger, "ksm_merging_pages 7\n").unwrap();
    eventually(|| {
        host.others_ksm = None;
        host.sample().vms[0].merge.clone().unwrap().stat.merging_pages == Some(5)
    });
}

/// A QEMU serves one client at a time: even a connection that is closed at once is in its
/// manager's way.
#[test]
fn the_socket_of_a_vm_that_is_not_managed_is_let_be_also_while_another_is_owed_something() {
    let tree = tree(&[]);
    let other = tree.listen("/other");
    other.set_nonblocking(true).unwrap();
    tree.vm(10, 7, "-name\0a");
    let [socket, its] = ["/other", "/its"].map(|path| tree.path(path));
    let text = format!("[vm.other]\nmanage = false\nqmp = {socket:?}\n");
    for (at, connects) in [(&its, false), (&socket, true)] {
        let mut host = host(&tree, configured(&text));
        host.reach_at([(VM, at.clone())]);
        host.sample_owed(&[VM]);
        assert_eq!(other.accept().is_ok(), connects, "{}", at.display());
    }
}

#[test]
fn nothing_is_taken_out_of_ksm_where_the_memory_is_not_there() {
    let tree = tree(&[("/proc/10/ksm_stat", "ksm_merging_pages 100000\n")]);
    tree.vm(10, 7, "-name\0a");
    let meminfo = |kib: u64| {
        let text = format!("MemTotal: 9000000 kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\n");
        tree.put("/proc/meminfo", text);
    };
    let ksm_note = Some(tree.path("/ksm.json"));
    let options = Options { ksm_note, ..configured("[merge]\nmode = \"on\"\n") };
    let mut host = host(&tree, options);
    meminfo(600_000);
    let unread = ksm::Stats::default().merged(VM);
    assert!(unread.unwrap_err().contains("not read yet"), "not known is not none");
    let vm = within_a_minute(|| {
        let vm = host.sample().vms.remove(0);
        vm.merge.is_some_and(|m| m.stat.merging_pages.is_some()).then_some(vm.id)
    });
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

/// Nine VMs, of which the first are due again when the last was never counted.
#[test]
fn what_vmms_hold_is_counted_of_four_in_a_second_of_those_first_that_are_due_longest() {
    let tree = tree(&[]);
    for pid in 11..20 {
        tree.vm(pid, 7, &format!("-name\0vm{pid}"));
        tree.put(format!("/proc/{pid}/status"), "RssAnon: 4 kB\n");
    }
    let mut host = host(&tree, Options::default());
    host.counted = Some(Instant::now() + Duration::from_secs(600));
    host.sample();
    let (begun, mut last) = (Instant::now(), None);
    let mut counted = |ms| {
        let now = begun + Duration::from_millis(ms);
        let due = counts_due(&host.vms, &mut last, now);
        for (id, vm) in &mut host.vms {
            vm.count_own(&tree, now, due.contains(id));
            eventually(|| {
                vm.count_own(&tree, now, false);
                // The count has ended.
                vm.own_is_due(begun + Duration::from_secs(60)).is_some()
            });
        }
        due.iter().map(|id| id.pid).collect::<Vec<_>>()
    };
    assert_eq!(counted(0), [11, 12, 13, 14]);
    assert_eq!(counted(999), [0; 0]);
    assert_eq!(counted(1_000), [15, 16, 17, 18]);
    // The first are due since then, too.
    assert_eq!(counted(2_000), [19, 11, 12, 13]);
    assert_eq!(counted(3_000), [14, 15, 16, 17]);
}
