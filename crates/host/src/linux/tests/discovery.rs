//! A tree whose reads fail: what is known of VMs outlives that.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rustix::io::Errno;

use super::*;
use crate::root::Faults;
use crate::testing::{Tree, stat};

/// A machine with three VMs in a slice with a limit, whose reads can be made to fail while a host
/// uses it.
struct Machine {
    tree: Tree,
    faults: Arc<Mutex<Option<Faults>>>,
}

/// What a read gives, if it is to fail; `None`: what is there.
type Say = Option<Result<Vec<u8>, Errno>>;

const SLICE: &str = "/sys/fs/cgroup/machine.slice";
const VMS: [u32; 3] = [10, 11, 12];

impl Machine {
    fn new() -> Machine {
        let stalls = "some avg10=7 avg60=0 avg300=0 total=1\n";
        let tree = tree(&[
            ("/proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 4000 kB\n"),
            ("/proc/vmstat", "pgmajfault 3\n"),
            ("/proc/swaps", "Filename Type Size Used Priority\n/dev/zram0 partition 8 4 1\n"),
            ("/sys/block/zram0/mm_stat", "4096 100 200 0 0 0 0 0\n"),
            ("/sys/module/zswap/parameters/enabled", "Y\n"),
            ("/proc/pressure/memory", "some avg10=0 avg60=0 avg300=0 total=1\n"),
            ("/proc/self/mountinfo", "1 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("/sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ("/sys/fs/cgroup/machine.slice/memory.max", "9000000\n"),
            ("/sys/fs/cgroup/machine.slice/memory.current", "5000000\n"),
            ("/sys/fs/cgroup/machine.slice/memory.stat", "anon 4000000\n"),
            ("/sys/fs/cgroup/machine.slice/memory.swap.max", "700\n"),
            ("/sys/fs/cgroup/machine.slice/memory.swap.current", "200\n"),
            ("/sys/fs/cgroup/machine.slice/memory.pressure", stalls),
        ]);
        let machine = Machine { tree, faults: Arc::default() };
        VMS.iter().for_each(|pid| machine.vm(*pid, &format!("vm{pid}"), "machine.slice"));
        machine
    }

    fn vm(&self, pid: u32, name: &str, slice: &str) {
        self.tree.vm(pid, pid.into(), &format!("-name\0{name}"));
        for (file, text) in [
            ("environ", "A=1\0"),
            ("status", "Uid: 0 0 0 0\nRssAnon: 9 kB\nVmLck: 3 kB\n"),
            ("cgroup", &format!("0::/{slice}/{pid}.scope\n")),
        ] {
            self.tree.put(format!("/proc/{pid}/{file}"), text);
        }
        self.tree.dir(format!("/sys/fs/cgroup/{slice}/{pid}.scope"));
        self.tree.link("/", format!("/proc/{pid}/cwd"));
    }

    fn end(&self, pid: u32) {
        self.tree.remove(format!("/proc/{pid}"));
    }

    fn root(&self) -> Root {
        let faults = self.faults.clone();
        let now = move |path: &Path| faults.lock().unwrap().as_ref()?(path);
        self.tree.clone().with_faults(Arc::new(now))
    }

    fn fails(&self, say: impl Fn(&Path) -> Say + Send + Sync + 'static) {
        let fault = move |path: &Path| Some(say(path)?.map_err(io::Error::from));
        *self.faults.lock().unwrap() = Some(Arc::new(fault));
    }

    fn fails_no_more(&self) {
        *self.faults.lock().unwrap() = None;
    }

    fn host(&self) -> LinuxHost {
        scanning(&self.root())
    }
}

/// A host that scans with each sample.
fn scanning(root: &Root) -> LinuxHost {
    let (scan_every, psi_trigger_us) = (Duration::ZERO, None);
    host(root, Options { scan_every, psi_trigger_us, ..Options::default() })
}

fn id(pid: u32) -> VmId {
    VmId { pid, start: u64::from(pid) }
}

fn pids(sample: &Sample) -> Vec<u32> {
    sample.vms.iter().map(|v| v.id.pid).collect()
}

fn vm(sample: &Sample, pid: u32) -> &VmSample {
    sample.vms.iter().find(|v| v.id.pid == pid).unwrap()
}

const ERRORS: [Errno; 6] =
    [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO, Errno::ACCESS, Errno::PERM];

#[test]
fn no_kind_of_failing_read_makes_a_vm_forgotten() {
    let machine = Machine::new();
    let mut host = machine.host();
    assert_eq!(pids(&host.sample()), VMS);
    let of_vms = |path: &Path| path.starts_with("/proc/10") || path.starts_with("/proc/11");
    for errno in ERRORS {
        machine.fails(move |_| Some(Err(errno)));
        for _ in 0..3 {
            let sample = host.sample();
            assert_eq!(pids(&sample), VMS, "everything fails with {errno}");
            assert!(!sample.problems.is_empty() && sample.host.memory.is_none());
            assert_eq!(host.sample_owed(&VMS.map(id)).ended, []);
        }
        machine.fails(move |path| of_vms(path).then_some(Err(errno)));
        let sample = host.sample();
        assert_eq!(pids(&sample), VMS, "of two VMs, {errno}");
        assert!(vm(&sample, 10).process.is_none() && vm(&sample, 12).process.is_some());
    }
    for text in ["", "\n", "10\n", "nonsense", "10 (kvm) S 0 0 0", "\u{0}\u{0}"] {
        machine.fails(move |_| Some(Ok(text.into())));
        assert_eq!(pids(&host.sample()), VMS, "everything reads {text:?}");
    }
    machine.fails_no_more();
    // What is looked at beside the loop is told until it is looked at again.
    let until = Instant::now() + Duration::from_secs(20);
    let well = std::iter::repeat_with(|| host.sample())
        .inspect(|sample| assert_eq!(pids(sample), VMS))
        .find(|sample| sample.problems.is_empty() || Instant::now() > until);
    assert_eq!(well.unwrap().problems, []);
    machine.end(11);
    assert_eq!(pids(&host.sample()), [10, 12], "one that has ended is");
    assert_eq!(host.sample_owed(&VMS.map(id)).ended, [id(11)]);
}

/// Descriptors run out and come back: each read by itself fails or does not.
#[test]
fn reads_that_fail_now_and_then_make_no_vm_forgotten() {
    let machine = Machine::new();
    let mut host = machine.host();
    host.sample();
    for seed in 1..40usize {
        let count = AtomicUsize::new(seed);
        machine.fails(move |_| {
            let n = count.fetch_add(7, Ordering::Relaxed).wrapping_mul(0x9E37_79B9) >> 7;
            n.is_multiple_of(3).then(|| Err(ERRORS[n / 3 % ERRORS.len()]))
        });
        assert_eq!(pids(&host.sample()), VMS, "{seed}");
    }
}

#[test]
fn a_vm_found_while_reads_fail_is_whole_once_they_do_not() {
    let machine = Machine::new();
    let mut host = machine.host();
    machine.fails(|path| path.starts_with("/proc/10").then_some(Err(Errno::MFILE)));
    assert_eq!(pids(&host.sample()), [11, 12]);
    machine.fails_no_more();
    let sample = host.sample();
    assert_eq!((pids(&sample), vm(&sample, 10).name.as_str()), (VMS.to_vec(), "vm10"));
}

#[test]
fn a_vm_gets_its_plain_name_when_an_older_one_of_that_name_ends() {
    let machine = Machine::new();
    machine.vm(11, "vm10", "machine.slice");
    let mut host = machine.host();
    let sample = host.sample();
    assert_eq!((vm(&sample, 10).name.as_str(), &vm(&sample, 10).given), ("vm10", &None));
    assert_eq!(vm(&sample, 11).name, "vm10-11");
    assert_eq!(vm(&sample, 11).given_name(), "vm10");
    machine.end(10);
    let sample = host.sample();
    assert_eq!((vm(&sample, 11).name.as_str(), &vm(&sample, 11).given), ("vm10", &None));
}

#[test]
fn listed_vms_are_those_with_a_section_by_name_or_uuid() {
    let machine = Machine::new();
    let uuid = "AAAAAAAA-2222-3333-4444-555555555555";
    machine.tree.put("/proc/12/cmdline", format!("kvm\0-name\0x\0-uuid\0{uuid}\0"));
    machine.vm(11, "vm10", "machine.slice");
    let host = |sections: &str| {
        let text = format!("[host]\nvms = \"listed\"\n{sections}");
        super::host(&machine.tree, configured(&text))
    };
    let mut other = host("[vm.another]\n");
    let mut host = host(&format!("[vm.vm10]\n[vm.\"uuid:{}\"]\n", uuid.to_lowercase()));
    assert_eq!(pids(&host.sample()), VMS, "both of one name");
    assert_eq!(pids(&other.sample_owed(&[id(12)])), [12], "or such as are owed something");
}

#[test]
fn one_vm_outside_leaves_the_pool() {
    let machine = Machine::new();
    machine.vm(13, "outside", "elsewhere");
    let mut host = machine.host();
    let sample = host.sample();
    let pool = sample.host.pool.as_ref().unwrap();
    assert_eq!((pool.path.as_str(), pool.limit), ("/machine.slice", Bytes(9_000_000)));
    assert_eq!(pool.swap_left, Some(Bytes(500)));
    assert_eq!(vm(&sample, 13).cgroup.as_deref(), Some("/elsewhere/13.scope"));
    // Half of the VMs are not most; but what was the pool stays for a while.
    machine.vm(14, "outside too", "elsewhere");
    machine.end(10);
    assert_eq!(host.sample().host.pool.unwrap().path, "/machine.slice");
    machine.tree.remove(SLICE);
    assert_eq!(host.sample().host.pool, None, "unless it is gone");
}

/// Names, limits and swap left of the limits beside the pool.
fn others(sample: &Sample) -> Vec<(&str, u64, Option<u64>)> {
    let of = |b: &'_ ebb_core::sample::LimitSample| (b.limit.0, b.swap_left.map(|s| s.0));
    sample.host.other_limits.iter().map(|b| (b.path.as_str(), of(b).0, of(b).1)).collect()
}

#[test]
fn every_limit_on_the_way_up_from_a_vm_is_read() {
    let machine = Machine::new();
    let cgroup = |path: &str, files: &[(&str, &str)]| {
        let all = [("memory.current", "70\n"), ("memory.stat", "anon 50\nactive_file 9\n")];
        for (file, text) in all.iter().chain(files) {
            machine.tree.put(format!("/sys/fs/cgroup/{path}/{file}"), text);
        }
    };
    machine.vm(20, "a", "tenants.slice/a.slice");
    machine.vm(21, "b", "tenants.slice/b.slice");
    machine.vm(22, "free", "user.slice");
    cgroup("tenants.slice", &[("memory.max", "800\n")]);
    cgroup("tenants.slice/a.slice", &[("memory.max", "500\n"), ("memory.high", "400\n")]);
    cgroup("tenants.slice/b.slice", &[("memory.max", "max\n")]);
    cgroup("tenants.slice/b.slice/21.scope", &[("memory.high", "0\n")]);
    // The limit of nobody's cgroup, one that limits swap only, one of v1's number for none.
    cgroup("tenants.slice/c.slice", &[("memory.max", "300\n")]);
    cgroup("user.slice", &[("memory.swap.max", "60\n"), ("memory.swap.current", "20\n")]);
    cgroup("user.slice/22.scope", &[("memory.max", "9223372036854771712\n")]);
    let mut host = machine.host();
    let sample = host.sample();
    let none = ebb_core::sample::LimitSample::NO_LIMIT.0;
    let all = [
        ("/machine.slice", 9_000_000, Some(500)),
        ("/tenants.slice", 800, None),
        ("/user.slice", none, Some(40)),
        ("/tenants.slice/a.slice", 400, None),
        ("/tenants.slice/b.slice/21.scope", 0, None),
    ];
    assert_eq!(others(&sample), all);
    assert_eq!(sample.host.pool, None, "no cgroup with a limit holds more than three of six");
    let one = &sample.host.other_limits[1];
    assert_eq!((one.usage, one.anon, one.file), (Bytes(70), Bytes(50), Bytes(9)));
    // What cannot be read is what it was; what is no number is said with its file.
    let file = "/sys/fs/cgroup/tenants.slice/memory.max";
    machine.tree.put(file, "lots\n");
    let sample = host.sample();
    assert_eq!(others(&sample), all);
    let told = sample.problems.iter().find(|p| p.source == "/tenants.slice").unwrap();
    assert!(told.message.contains("tenants.slice/memory.max: line 1: “lots”"), "{told:?}");
    machine.fails(|path| path.ends_with("a.slice/memory.current").then_some(Err(Errno::ACCESS)));
    assert_eq!(others(&host.sample()), all);
    machine.fails_no_more();
    // A limit that is taken away, or its cgroup, bounds nothing any more.
    machine.tree.put(file, "max\n");
    machine.tree.remove("/sys/fs/cgroup/tenants.slice/a.slice");
    assert_eq!(others(&host.sample()), [all[0], all[2], all[4]]);
}

#[test]
fn nodes_that_vms_are_bound_to_are_limits() {
    let machine = Machine::new();
    let node = |n: u32, free: u32| {
        let text = format!("Node {n} MemTotal: 500 kB\nNode {n} MemFree: {free} kB\n");
        machine.tree.put(format!("/sys/devices/system/node/node{n}/meminfo"), text);
    };
    machine.tree.put("/sys/devices/system/node/has_memory", "0-1\n");
    node(0, 40);
    node(1, 400);
    machine.tree.put("/proc/10/status", "Uid: 0 0 0 0\nRssAnon: 9 kB\nMems_allowed_list:\t0\n");
    machine.tree.put("/proc/11/numa_maps", "55ac bind:1 file=/usr/bin/kvm\n");
    let mut host = machine.host();
    let sample = host.sample();
    let nodes = |sample: &Sample| VMS.map(|pid| vm(sample, pid).nodes.clone());
    assert_eq!(nodes(&sample), [vec![0], vec![1], vec![]]);
    let limits = [("node 0", 512_000, None), ("node 1", 512_000, None)];
    assert_eq!(others(&sample), limits);
    assert_eq!(sample.host.other_limits[0].usage, Bytes::kib(460));
    machine.fails(|path| {
        let fails = path.ends_with("numa_maps") || path.ends_with("node1/meminfo");
        fails.then_some(Err(Errno::IO))
    });
    let sample = host.sample();
    assert_eq!((nodes(&sample), others(&sample)), ([vec![0], vec![1], vec![]], limits.to_vec()));
    machine.fails_no_more();
    machine.tree.put("/sys/devices/system/node/has_memory", "0\n");
    let sample = host.sample();
    assert_eq!((nodes(&sample), others(&sample)), ([vec![], vec![], vec![]], vec![]));
}

/// A read of `numa_maps` waits for the process's mmap lock. Here the file is a pipe without a writer.
#[test]
fn a_vm_that_keeps_its_mmap_lock_does_not_hold_up_a_scan() {
    let machine = Machine::new();
    machine.tree.put("/sys/devices/system/node/has_memory", "0-1\n");
    machine.tree.put("/proc/11/numa_maps", "55ac bind:1 file=/usr/bin/kvm\n");
    let pipe = machine.tree.pipe("/proc/10/numa_maps");
    let mut host = machine.host();
    let mut nodes = || {
        let sample = host.sample();
        VMS.map(|pid| vm(&sample, pid).nodes.clone())
    };
    for _ in 0..3 {
        assert!(nodes().iter().all(Vec::is_empty));
    }
    std::fs::write(&pipe, "").unwrap();
    machine.tree.remove("/proc/10/numa_maps");
    machine.tree.put("/proc/10/numa_maps", "55ac bind:0 file=/usr/bin/kvm\n");
    eventually(|| nodes() == [vec![0], vec![1], vec![]]);
}

#[test]
fn a_cgroup_that_cannot_be_read_is_what_it_was() {
    let machine = Machine::new();
    let mut host = machine.host();
    let before = host.sample();
    assert_eq!(before.host.pool.as_ref().unwrap().path, "/machine.slice");
    assert_eq!(before.host.vms_psi.unwrap().some.avg10, 7.0);
    for failing in ["/proc/11/cgroup", "/proc/self/mountinfo", "/sys/fs/cgroup"] {
        machine.fails(move |path| path.starts_with(failing).then_some(Err(Errno::MFILE)));
        let sample = host.sample();
        assert_eq!(sample.host.pool, before.host.pool, "{failing}");
        assert_eq!(vm(&sample, 11).cgroup.as_deref(), Some("/machine.slice/11.scope"));
        assert!(!sample.problems.is_empty(), "{failing}");
    }
    // A process without the file is on its way out, and in its cgroup until then.
    machine.fails(|path| path.ends_with("11/cgroup").then_some(Err(Errno::SRCH)));
    assert_eq!(vm(&host.sample(), 11).cgroup.as_deref(), Some("/machine.slice/11.scope"));
}

#[test]
fn the_vms_own_stalls_are_those_of_the_cgroup_of_all_of_them() {
    let machine = Machine::new();
    machine.tree.remove(format!("{SLICE}/memory.max"));
    let mut host = machine.host();
    let sample = host.sample();
    assert!(sample.host.pool.is_none() && sample.host.vms_psi.unwrap().some.avg10 == 7.0);
    assert_eq!(sample.host.swaps[0].zram.unwrap().used, Bytes(200));
    assert!(sample.host.zswap);
    assert_eq!(vm(&sample, 10).process.unwrap().locked, Bytes::kib(3));
    machine.vm(13, "outside", "elsewhere");
    machine.tree.put("/sys/fs/cgroup/memory.pressure", "some avg10=9 avg60=0 avg300=0 total=1\n");
    assert_eq!(host.sample().host.vms_psi, None, "the whole machine's are no VM's own");
}

/// What a machine of 2,000 VMs answers to a read; the first of them have ended.
fn crowd(path: &str, ended: usize) -> Option<Vec<u8>> {
    let text = match path.split('/').collect::<Vec<_>>()[..] {
        ["", "proc"] => (1 + ended..=2_000).map(|pid| format!("{pid}\n")).collect(),
        ["", "proc", "self", "mountinfo"] => "1 1 0:26 / /c rw - cgroup2 cgroup2 rw\n".into(),
        ["", "proc", pid, file] if pid.parse::<usize>().ok()? > ended => match file {
            "stat" => stat(pid.parse().unwrap(), "kvm", 'S', pid.parse().unwrap()),
            "comm" => "kvm\n".into(),
            "cmdline" => "kvm\0-name\0same\0".into(),
            "status" => "Uid: 0 0 0 0\nRssAnon: 9 kB\n".into(),
            "cgroup" => format!("0::/machine.slice/{pid}.scope\n"),
            _ => return None,
        },
        ["", "c", "cgroup.controllers"] => "memory\n".into(),
        ["", "c", "machine.slice", "memory.max"] => "9000000\n".into(),
        ["", "c", "machine.slice", "memory.current"] => "8\n".into(),
        ["", "c", "machine.slice", "memory.stat"] => "anon 7\n".into(),
        _ => return None,
    };
    Some(text.into())
}

#[test]
fn two_thousand_vms_are_held() {
    let ended = Arc::new(AtomicUsize::new(0));
    let now = Arc::clone(&ended);
    let root = Root::at("/nonexistent").with_faults(Arc::new(move |path: &Path| {
        let answer = crowd(path.to_str().unwrap(), now.load(Ordering::Relaxed));
        Some(answer.ok_or_else(|| Errno::NOENT.into()))
    }));
    let mut host = scanning(&root);
    for there in [2_000, 2_000, 1_900] {
        ended.store(2_000 - there, Ordering::Relaxed);
        let sample = host.sample();
        let names: BTreeSet<&str> = sample.vms.iter().map(|v| v.name.as_str()).collect();
        assert_eq!((sample.vms.len(), names.len(), names.contains("same")), (there, there, true));
        assert_eq!(sample.host.pool.unwrap().path, "/machine.slice");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever one file says and another refuses, nothing panics and no VM is forgotten.
    #[test]
    fn any_text_in_any_file_leaves_the_vms_known(
        bytes in proptest::collection::vec(any::<u8>(), 0..80),
        salt in any::<u64>(),
    ) {
        thread_local!(static MACHINE: Machine = Machine::new());
        let known = MACHINE.with(|machine| {
            machine.fails_no_more();
            let mut host = machine.host();
            host.sample();
            machine.fails(move |path| {
                let path = path.as_os_str().as_encoded_bytes();
                let n = path.iter().fold(salt, |n, b| (n ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
                match n >> 8 & 3 {
                    0 => Some(Ok(bytes.clone())),
                    1 => Some(Err(ERRORS[(n >> 16) as usize % ERRORS.len()])),
                    _ => None,
                }
            });
            host.sample();
            pids(&host.sample())
        });
        prop_assert_eq!(known, VMS.to_vec());
    }
}
