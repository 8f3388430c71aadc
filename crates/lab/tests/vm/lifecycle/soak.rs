//! `verify` in the guest while its kernel does all that it can with memory, and
//! the host recycles everything without a pause.

use std::io::Write;

use ebb_core::histogram::Histogram;
use ebb_lab::guest::escape;
use ebb_vmm::priority::RealTime;
use ebb_vmm::sys::{Mapping, Range};
use ebb_vmm::uffd::Uffd;

use super::*;

const STRESS: &str = include_str!("stress.sh");

/// What the script must have done at least once.
const KINDS: [&str; 8] =
    ["pieces", "hog", "hugetlb", "compact", "cache", "forks", "hotplug", "bulk"];

/// A guest with a movable zone, swap, a disk to read and a disk to fill.
fn boot(kernel: Kernel) -> (Guest, tempfile::NamedTempFile) {
    let (mut disk, dir) = (tempfile::NamedTempFile::new().unwrap(), tempfile::tempdir().unwrap());
    let word = |i: u64| ((i * i) ^ (i << 40)).to_le_bytes();
    let noise: Vec<u8> = (0..4 << 20).flat_map(word).collect();
    disk.write_all(&noise).unwrap();
    let stress = dir.path().join("stress");
    std::fs::write(&stress, STRESS).unwrap();
    let guest = Guest::boot(kernel, |c| {
        (c.cpus, c.memory) = (2, Bytes::gib(1));
        c.append = "movablecore=384M".into();
        c.disks = vec![disk.path().into()];
        c.files.push(("stress".into(), stress));
    });
    let zram = "modprobe name=zram params=num_devices=2";
    guest.vm.request(zram, MINUTE).unwrap();
    guest.vm.request("swapon dev=/dev/zram0 size=300000000", MINUTE).unwrap();
    guest.sh("echo 150 > /proc/sys/vm/swappiness");
    (guest, disk)
}

/// How often each kind of work was done.
fn done(guest: &Guest) -> Vec<(&'static str, u64)> {
    let text = guest.sh("cd /tmp/n; grep . *");
    let count = |kind: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(kind)?.strip_prefix(':'));
        line.and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    KINDS.iter().map(|k| (*k, count(k))).collect()
}

/// Pages that went to swap and came back, and huge pages.
fn memory(guest: &Guest) -> Vec<(&'static str, u64)> {
    let all = guest.vm.request("meminfo", MINUTE).unwrap();
    ["pswpout", "pswpin", "thp_fault_alloc"].map(|k| (k, all.u64(k))).to_vec()
}

fn all_done(guest: &Guest) -> bool {
    done(guest).iter().chain(&memory(guest)).all(|k| k.1 > 0)
}

/// The stress of [`STRESS`], until /tmp/go is gone.
fn stress(guest: &Guest) {
    let script = "PIECES=9000 HUGE=150 sh /stress >/dev/null 2>&1 </dev/null";
    let all = format!("sh oom=-900 cmd={}", escape(script));
    guest.vm.tool().send(&all).unwrap();
}

/// `verify`, recycling without a pause, and the stress.
fn begin(guest: &Guest) -> Recycling {
    guest.insmod();
    guest.start_verify(450 << 20, "threads=2 oom=-800");
    let recycling = guest.recycle();
    stress(guest);
    recycling
}

#[test]
fn vm_nothing_is_lost_while_a_kernel_does_all_at_once() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let (guest, _disk) = boot(kernel);
        let recycling = begin(&guest);
        let until = Instant::now() + Duration::from_secs(seconds());
        let mut audits = 0;
        // At least so long, and until everything was done.
        while Instant::now() < until || (audits < 1000 && !all_done(&guest)) {
            assert_eq!(guest.audit_false(), 0, "{kernel}");
            guest.verified();
            assert_eq!(recycling.seen().failure, None);
            audits += 1;
            sleep(Duration::from_millis(200));
        }
        let (did, wrong) = (done(&guest), guest.sh("ls /tmp/wrong 2>/dev/null"));
        let memory = memory(&guest);
        guest.sh("rm /tmp/go; sleep 2; rm -rf /tmp/s");
        let checks = guest.stop_verify();
        let seen = recycling.seen();
        println!(
            "{kernel}: {checks} pages checked, {audits} audits, {did:?}, {memory:?}; {} calls, {:?}\n\
             windows {}\nwaits {}",
            seen.calls, seen.status, seen.status.windows, seen.status.waits
        );
        assert_eq!(wrong, "", "{kernel}: a disk was not what it was");
        assert!(did.iter().all(|k| k.1 > 0), "{kernel}: {did:?}");
        assert!(memory.iter().all(|k| k.1 > 0), "{kernel}: {memory:?}");
        assert_eq!(guest.complaints(), "", "{kernel}");
    }
}

/// Windows of nothing but protecting and lifting, as long as Ebb's, in this process while two
/// loops read the same memory: how late this machine is by itself.
fn bare_windows(time: Duration) -> Histogram {
    const ALL: u64 = 64 << 20;
    let mut memory = Mapping::anonymous(ALL as usize).unwrap();
    memory.huge(false).unwrap();
    memory.bytes_mut().iter_mut().step_by(4096).for_each(|b| *b = 1);
    let uffd = Uffd::open(None, true).unwrap();
    let all = Range { start: memory.address(), len: ALL };
    uffd.register(all).unwrap();
    let bytes: &[u8] = memory.bytes_mut();
    let (quit, mut windows) = (AtomicBool::new(false), Histogram::default());
    std::thread::scope(|scope| {
        let busy = || {
            while !quit.load(SeqCst) {
                let pages = bytes.iter().step_by(4096);
                std::hint::black_box(pages.map(|b| u64::from(*b)).sum::<u64>());
            }
        };
        scope.spawn(busy);
        scope.spawn(busy);
        let until = Instant::now() + time;
        while Instant::now() < until {
            let first = RealTime::begin();
            let begun = Instant::now();
            let in_time = |_: &u64| begun.elapsed() < Duration::from_micros(500);
            let pages = (0..ALL).step_by(2 * 4096).take_while(in_time).map(|at| {
                uffd.protect(Range { start: all.start + at, len: 4096 }).unwrap();
                at + 4096
            });
            let len = pages.last().unwrap_or(4096);
            uffd.lift(Range { start: all.start, len }).unwrap();
            windows.add(begun.elapsed().as_nanos() as u64);
            drop(first);
            sleep(Duration::from_millis(2));
        }
        quit.store(true, SeqCst);
    });
    windows
}

/// How long vCPUs wait where two loops want the CPUs as well: printed, since what else the
/// machine does is in it too. How much that is, is printed first.
#[test]
fn vm_waits_beside_busy_loops_are_published() {
    let _arena = held();
    let bare = bare_windows(Duration::from_secs(seconds().div_ceil(10)));
    println!("bare windows {bare}\n{bare:?}");
    for kernel in kernels(Kernel::V6_12) {
        let (guest, _disk) = boot(kernel);
        let recycling = begin(&guest);
        let quit = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let busy = || (0u64..).take_while(|_| !quit.load(SeqCst)).count();
            let loops = [scope.spawn(busy), scope.spawn(busy)];
            sleep(Duration::from_secs(seconds()));
            quit.store(true, SeqCst);
            assert!(loops.map(|l| l.join().unwrap()) > [0, 0]);
        });
        let seen = recycling.seen();
        guest.sh("rm /tmp/go");
        let checks = guest.stop_verify();
        println!(
            "{kernel}: {checks} pages checked, {} recycled\nwindows {}\nwaits {}",
            seen.recycled, seen.status.windows, seen.status.waits
        );
        println!("{:?} {:?}", seen.status.windows, seen.status.waits);
    }
}
