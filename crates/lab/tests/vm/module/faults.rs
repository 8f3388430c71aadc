//! Hooks left out on purpose: the audit finds each, the self-test those that it covers.

use super::*;

/// What is left out, what is done then, and what the audit (with the module's
/// counters) must find.
struct Fault {
    bit: u32,
    name: &'static str,
    stress: &'static str,
    kernels: &'static [Kernel],
    found: fn(&Numbers) -> bool,
}

const ALL: &[Kernel] = &Kernel::ALL;
const NEW: &[Kernel] = &[Kernel::V6_12];

pub(super) fn wrong(audit: &Numbers) -> bool {
    audit["false"] > 0
}

/// Such pages wait in per-CPU lists until the backstop finds them.
fn leaked(audit: &Numbers) -> bool {
    audit["false"] + audit["leaked"] > 0
}

fn missed(audit: &Numbers) -> bool {
    audit["missed"] * 50 > audit["free"]
}

fn fault(
    bit: u32,
    name: &'static str,
    stress: &'static str,
    kernels: &'static [Kernel],
    found: fn(&Numbers) -> bool,
) -> Fault {
    Fault { bit, name, stress, kernels, found }
}

#[test]
fn vm_every_hook_left_out_is_found_by_the_audit() {
    let _arena = held();
    let faults = [
        fault(1, "zone_locked", "compact", ALL, wrong),
        // Before 6.10 every removal fires the other one as well.
        fault(2, "extfrag", "steal", NEW, leaked),
        fault(4, "backstop", "huge", ALL, wrong),
        fault(8, "isolate", "compact", ALL, wrong),
        fault(16, "offline", "offline", ALL, wrong),
        // Debian's 6.1 has no CONFIG_MEMORY_FAILURE.
        fault(32, "takeoff", "soft", NEW, wrong),
        fault(64, "drain", "fill", ALL, missed),
        fault(128, "putback", "report", ALL, missed),
    ];
    for kernel in kernels(Kernel::V6_12) {
        let here: Vec<&Fault> = faults.iter().filter(|f| f.kernels.contains(&kernel)).collect();
        // Two guests at once: one reports free pages.
        in_pairs(&[true, false], |&reporting| {
            let guest = Guest::boot(kernel, true, |c: &mut VmConfig| {
                c.balloon = Some(Balloon { reporting, deflate_on_oom: false });
            });
            let its = |f: &&&Fault| reporting == (f.name == "putback");
            let faults: Vec<&Fault> = here.iter().filter(its).copied().collect();
            for f in &faults {
                let audit = left_out(&guest, f);
                println!("{kernel} {} left out: {audit:?}", f.name);
                assert!((f.found)(&audit), "{kernel} {} left out: {audit:?}", f.name);
            }
            nothing_left_out(&guest, kernel, &faults);
        });
    }
}

/// With the module that leaves these hooks out; without it afterwards.
fn faulty<T>(guest: &Guest, bits: u32, done: impl FnOnce() -> T) -> T {
    let said = guest.insmod(&format!("rescan_ms=0 fault={bits}"));
    assert_eq!(guest.numbers("stats")["state"], RUNNING, "{said}");
    let all = done();
    assert_eq!(guest.sh("rmmod ebb && echo gone"), "gone\n");
    all
}

/// In the same guest, afterwards, the module with every hook in place is innocent under every
/// stress: what the faults show is theirs.
fn nothing_left_out(guest: &Guest, kernel: Kernel, faults: &[&Fault]) {
    faulty(guest, 0, || {
        for f in faults {
            guest.stress(f.stress);
            let audit = guest.judged();
            println!("{kernel} {} in place: {audit:?}", f.name);
            let innocent = !(f.found)(&audit) && !leaked(&audit);
            assert!(innocent, "{kernel} {} in place: {audit:?}", f.name);
            guest.tidy();
        }
    });
}

fn left_out(guest: &Guest, f: &Fault) -> Numbers {
    faulty(guest, f.bit | NO_SELF_TEST, || {
        for _ in 0..10 {
            guest.stress(f.stress);
            let audit = guest.judged();
            guest.tidy();
            if (f.found)(&audit) {
                return audit;
            }
        }
        guest.judged()
    })
}

#[test]
fn vm_the_self_test_finds_a_hook_left_out_at_load() {
    let _arena = held();
    let hooks = [
        (1, "mm_page_alloc_zone_locked", ALL),
        (4, "mm_page_alloc", ALL),
        (8, "__isolate_free_page", ALL),
        (2, "mm_page_alloc_extfrag", NEW),
    ];
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, true, |_| ());
        for (bit, name, _) in hooks.iter().filter(|h| h.2.contains(&kernel)) {
            let said = guest.insmod(&format!("fault={bit}"));
            let message = format!("refused: self-test of the hooks: {name} was not seen");
            assert!(said.contains(&message), "{kernel}: {said}");
            assert_eq!(guest.sh("lsmod | grep -c ebb").trim(), "0");
        }
        for _ in 0..if soak() { 5 } else { 2 } {
            let said = guest.insmod("");
            assert!(!said.contains("no free block"), "{kernel}: {said}");
            assert_eq!(guest.numbers("stats")["state"], RUNNING, "{kernel}: {said}");
            assert_eq!(guest.sh("rmmod ebb && echo gone"), "gone\n");
        }
    });
}
