//! The handshake under KVM's own fault path: a guest of a few instructions runs
//! on real vCPUs and keeps a free-page map in its memory, which the agent recycles
//! at full speed. It allocates (clear the bit), writes, later verifies and frees
//! its pages, in the order that ebb.ko keeps. A write to a protected page leaves
//! the guest with an EPT or NPT fault and waits in KVM.
//!
//! Real mode, so that it runs wherever KVM runs anything, also where nested
//! virtualisation cannot boot a stock kernel. What the module does besides (header,
//! beats, answers) a thread of this process does. Skipped, with the reason, where
//! /dev/kvm does not open or cannot run a guest that only halts.
//!
//! `EBB_STRESS_SECONDS` makes it longer.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

mod common;

use std::arch::global_asm;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::*;
use ebb_core::wire::abi::PAGE;
use ebb_core::wire::{HugePages, Recycle};
use ebb_vmm::faults::Faults;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

const CPUS: u64 = 2;
/// Pages that the guest allocates: all that real mode reaches above its own.
const PAGES: std::ops::Range<u64> = 32..256;
/// Where the code lies; below it is page 0, the tripwire.
const CODE: u64 = 0x8000;
/// One word per page: 0, or what the guest wrote to it.
const TABLE: u64 = 0x1_4000;
/// One page per vCPU: stop word, verified pages (at 8), lost ones (12), allocated ones (16).
const COUNTS: u64 = 0x1_5000;
const _: () = assert!(MAP == 0x1_2000 && COUNTS + CPUS * PAGE <= PAGES.start * PAGE);

// Segments: ds the map, fs the table, gs this vCPU's counts, es the page.
// Registers: eax random, ebx a page, bp a serial number, edi the first page.
global_asm!(
    ".pushsection .rodata.ebb_kvm_guest, \"a\"",
    ".code16",
    "ebb_kvm_guest:",
    "2: cmp word ptr gs:[0], 0",
    "jne 9f",
    // A random page of this vCPU's: every other one, so that runs mix them.
    "imul eax, eax, 1664525",
    "add eax, 1013904223",
    "mov ebx, eax",
    "shr ebx, 16",
    "imul ebx, ebx, {pages}",
    "shr ebx, 16",
    "add ebx, ebx",
    "add ebx, edi",
    "mov dx, bx",
    "shl dx, 8",
    "mov es, dx",
    "mov si, bx",
    "add si, si",
    "mov dx, fs:[si]",
    "test dx, dx",
    "jnz 5f",
    // It is free: clear its bit, then write.
    "lock btr word ptr ds:[0], bx",
    "add bp, 2",
    "mov dx, bp",
    "mov es:[0], dx",
    "mov es:[2046], dx",
    "mov es:[4094], dx",
    "mov fs:[si], dx",
    "inc dword ptr gs:[16]",
    "jmp 2b",
    // It is ours: is what we wrote still there? Then free it.
    "5: cmp es:[0], dx",
    "jne 7f",
    "cmp es:[2046], dx",
    "jne 7f",
    "cmp es:[4094], dx",
    "jne 7f",
    "6: mov word ptr fs:[si], 0",
    "lock bts word ptr ds:[0], bx",
    "inc dword ptr gs:[8]",
    "jmp 2b",
    "7: inc dword ptr gs:[12]",
    "jmp 6b",
    "9: hlt",
    "jmp 9b",
    "ebb_kvm_guest_end:",
    ".code64",
    ".popsection",
    pages = const (PAGES.end - PAGES.start) / CPUS,
);

// SAFETY: the two labels above, in read-only data of this program.
unsafe extern "C" {
    static ebb_kvm_guest: u8;
    static ebb_kvm_guest_end: u8;
}

/// The guest's instructions.
fn code() -> &'static [u8] {
    // SAFETY: both labels are in one section, in this order.
    unsafe {
        let (start, end) = (&raw const ebb_kvm_guest, &raw const ebb_kvm_guest_end);
        std::slice::from_raw_parts(start, end as usize - start as usize)
    }
}

/// A VM whose memory is the guest's, from address 0.
fn vm(guest: &Guest) -> Result<(Kvm, VmFd), String> {
    let kvm = Kvm::new().map_err(|e| format!("/dev/kvm cannot be opened: {e}"))?;
    let vm = kvm.create_vm().map_err(|e| format!("KVM makes no VM: {e}"))?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: guest.pages * PAGE,
        userspace_addr: guest.memory.address(),
    };
    // SAFETY: the memory is the guest's mapping; every test joins its vCPUs and
    // drops the VM before that goes.
    unsafe { vm.set_user_memory_region(region) }.map_err(|e| format!("no memory slot: {e}"))?;
    Ok((kvm, vm))
}

fn put(guest: &Guest, at: u64, bytes: &[u8]) {
    for (i, eight) in bytes.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..eight.len()].copy_from_slice(eight);
        guest.word(at + 8 * i as u64).store(u64::from_le_bytes(word), SeqCst);
    }
}

/// A vCPU in real mode, at `CODE`.
fn vcpu(vm: &VmFd, cpu: u64) -> VcpuFd {
    let vcpu = vm.create_vcpu(cpu).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    for (segment, base) in [
        (&mut sregs.cs, CODE),
        (&mut sregs.ds, MAP),
        (&mut sregs.fs, TABLE),
        (&mut sregs.gs, COUNTS + cpu * PAGE),
    ] {
        (segment.base, segment.selector) = (base, (base >> 4) as u16);
    }
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rflags) = (0, 2);
    (regs.rax, regs.rbp, regs.rdi) = (cpu + 7, 1, PAGES.start + cpu);
    vcpu.set_regs(&regs).unwrap();
    vcpu
}

/// Runs a vCPU until it halts. An error: KVM cannot run it.
fn run(mut vcpu: VcpuFd) -> Result<(), String> {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::Hlt) => return Ok(()),
            Ok(VcpuExit::Intr) => {}
            Ok(other) => return Err(format!("KVM_RUN ends with {other:?}")),
            Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => {}
            Err(e) => return Err(format!("KVM_RUN: {e}")),
        }
    }
}

/// Why no guest runs here, if none does: tried with one that halts at once.
fn missing() -> Option<String> {
    let guest = Guest::new(16, RamKind::Small);
    put(&guest, CODE, &[0xf4]);
    let (_kvm, vm) = match vm(&guest) {
        Ok(made) => made,
        Err(why) => return Some(why),
    };
    run(vcpu(&vm, 0)).err()
}

fn started(vm: &VmFd) -> Receiver<Result<(), String>> {
    let (ended, end) = channel();
    for cpu in 0..CPUS {
        let (vcpu, ended) = (vcpu(vm, cpu), ended.clone());
        std::thread::spawn(move || ended.send(run(vcpu)));
    }
    end
}

/// Sum of a counter over the vCPUs.
fn count(guest: &Guest, at: u64) -> u64 {
    let word = |cpu| guest.word(COUNTS + cpu * PAGE + at / 8 * 8).load(SeqCst);
    (0..CPUS).map(|cpu| word(cpu) >> (at % 8 * 8) & 0xffff_ffff).sum()
}

/// Recycles against the running guest; returns pages it verified, pages it lost,
/// pages recycled, and pages that the second reading saved. Ends at the first loss.
fn contest(memory: RamKind, faults: Faults, time: Duration) -> (u64, u64, u64, u64) {
    let guest: Arc<Guest> = Guest::new(16, memory);
    put(&guest, CODE, code());
    PAGES.for_each(|p| guest.set(p, true));
    let (_kvm, vm) = vm(&guest).unwrap();
    let (mut agent, _beats) = attached(&guest, faults);
    let end = started(&vm);
    let until = Instant::now() + time;
    let want = Recycle { huge: HugePages::Split, split_min_pages: 1, ..Recycle::default() };
    while Instant::now() < until && count(&guest, 12) == 0 {
        recycle(&mut agent, want).unwrap();
    }
    (0..CPUS).for_each(|cpu| guest.word(COUNTS + cpu * PAGE).store(1, SeqCst));
    for _ in 0..CPUS {
        // Whoever waits here for long waits for a window that nobody closes.
        end.recv_timeout(Duration::from_secs(30)).expect("a vCPU that goes on").unwrap();
    }
    let counters = status(&mut agent, false).counters;
    let (checks, lost) = (count(&guest, 8), count(&guest, 12));
    println!(
        "{memory:?} {faults:?}: {} allocations, {checks} checks, {lost} lost, {counters:?}",
        count(&guest, 16)
    );
    (checks, lost, counters.recycled.0 / PAGE, counters.saved_pages)
}

#[test]
fn a_guest_under_kvm_loses_nothing_at_full_speed() {
    if let Some(why) = missing() {
        return println!("skipped: {why}");
    }
    for memory in [RamKind::Small, RamKind::Huge, RamKind::Memfd] {
        // On a busy machine the guest is seldom at work in a window: then some rounds more.
        let met = (0..20).any(|round| {
            let time = if round == 0 { seconds(3) } else { Duration::from_secs(3) };
            let (checks, lost, recycled, saved) = contest(memory, Faults::default(), time);
            assert_eq!(lost, 0, "{memory:?}");
            assert!(checks > 1000 && recycled > 1000, "{memory:?}");
            saved > 0
        });
        assert!(met, "{memory:?}: the guest took no page in a window");
    }
}

#[cfg(feature = "faults")]
#[test]
fn under_kvm_each_step_left_out_loses_pages() {
    if let Some(why) = missing() {
        return println!("skipped: {why}");
    }
    for (memory, faults) in LEFT_OUT {
        let parsed = Faults::parse(faults).unwrap();
        let (_, lost, ..) = contest(memory, parsed, Duration::from_secs(20));
        assert!(lost > 0, "{memory:?} {faults}: nothing was lost");
    }
}
