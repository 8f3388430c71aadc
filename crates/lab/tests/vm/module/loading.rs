//! Loading and unloading: by insmod alone and without a trace, refused where a kernel cannot
//! be trusted, and kept where the hooks do not go.

use super::*;

#[test]
fn vm_the_module_loads_by_insmod_alone_and_leaves_no_trace() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, false, |_| ());
        for round in 0..3 {
            let said = guest.insmod("");
            // What is freed while the first scan goes on is found by the next.
            let whole = |_: &Vm| {
                let audit = guest.numbers("audit");
                assert_eq!(audit["false"], 0, "{kernel}: {audit:?} {said}");
                audit["set"] > 150_000 && audit["missed"] * 100 < audit["free"]
            };
            guest.vm.wait_for("a map of what is free", Duration::from_secs(5), whole).unwrap();
            assert!(guest.insmod("").contains("File exists"));
            assert_eq!(guest.numbers("stats")["state"], RUNNING, "round {round}");
            // Nobody can switch the hooks off behind our back.
            let off = "f=/proc/sys/kernel/ftrace_enabled; echo 0 > $f; cat $f";
            assert_eq!(guest.sh(off).trim(), "1");
            let gone = guest.sh("rmmod ebb && ls /sys/module/ebb /sys/kernel/debug/ebb 2>&1");
            assert_eq!(gone.matches("No such file").count(), 2, "{gone}");
        }
        assert_eq!(guest.complaints(), "", "{kernel}");
        assert!(guest.insmod("order=11").contains("order is at most"));
        assert!(guest.insmod("fault=1").contains("unknown parameter"));
    });
}

#[test]
fn vm_the_module_refuses_what_it_cannot_trust() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, false, |c| c.append += " init_on_free=1");
        let said = guest.insmod("");
        assert!(said.contains("refused: init_on_free"), "{kernel}: {said}");
        assert_eq!(guest.sh("lsmod | grep -c ebb").trim(), "0");
    });
}

#[test]
fn vm_a_kernel_that_somebody_else_built_is_loaded_on_demand_only() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, true, |_| ());
        let said = guest.insmod(&format!("fault={VENDOR}"));
        assert!(said.contains("refused: this kernel is not a build by Debian"), "{kernel}: {said}");
        assert!(said.contains("force_unknown=1"), "{kernel}: {said}");
        assert_eq!(guest.sh("lsmod | grep -c ebb").trim(), "0");
        let said = guest.insmod(&format!("fault={VENDOR} force_unknown=1"));
        assert!(said.contains("this guest can lose data"), "{kernel}: {said}");
        assert_eq!(guest.numbers("stats")["state"], RUNNING, "{kernel}: {said}");
    });
}

/// Options of a kernel under which the hooks cannot be trusted.
const DISTRUSTED: [&str; 3] = ["LTO_CLANG", "CFI_CLANG", "KEXEC_JUMP"];

fn sources() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../guest"))
}

/// `make`, where the headers say so.
fn refused_by_make() {
    let dir = tempfile::tempdir().unwrap();
    for path in ["scripts/basic", "include/config"] {
        fs::create_dir_all(dir.path().join(path)).unwrap();
    }
    for path in ["Makefile", "Module.symvers", "scripts/basic/fixdep"] {
        fs::write(dir.path().join(path), "").unwrap();
    }
    let check = |config: &str| {
        fs::write(dir.path().join("include/config/auto.conf"), config).unwrap();
        let mut make = Command::new("make");
        make.arg("-C").arg(sources()).arg("check-kdir");
        let out = make.arg(format!("KDIR={}", dir.path().display())).output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    assert!(check("CONFIG_LTO_NONE=y\nCONFIG_KEXEC=y\n").0);
    for option in DISTRUSTED {
        let (built, said) = check(&format!("CONFIG_KEXEC=y\nCONFIG_{option}=y\n"));
        assert!(!built && said.contains(&format!("built with CONFIG_{option}")), "{said}");
    }
}

/// A module that kbuild made without our Makefile refuses when it is loaded.
#[test]
fn vm_kernels_that_cannot_be_trusted_are_refused_by_make_and_at_load() {
    let _arena = held();
    refused_by_make();
    in_pairs(&Kernel::ALL, |&kernel| {
        let image = Image::get(kernel).unwrap();
        let headers = image.headers.clone().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let build = dir.path().join("build");
        let modules = DISTRUSTED.map(|option| {
            let mut make = Command::new("make");
            make.arg("-s").arg("-C").arg(sources()).arg(format!("KDIR={}", headers.display()));
            make.arg(format!("BUILD={}", build.display()));
            make.arg(format!("CFLAGS_hooks.o=-DCONFIG_{option}=1"));
            assert!(make.output().unwrap().status.success(), "{kernel}: {option}");
            let kept = dir.path().join(option);
            fs::rename(build.join("ebb.ko"), &kept).unwrap();
            (format!("{option}.ko"), kept)
        });
        let guest = Guest::boot(kernel, false, |c| c.files.extend(modules));
        for option in DISTRUSTED {
            let said =
                guest.sh(&format!("insmod /{option}.ko 2>&1; dmesg | grep ebb: | tail -n 1"));
            let message = format!("refused: this kernel is built with CONFIG_{option}");
            assert!(said.contains(&message), "{kernel}: {said}");
        }
        assert_eq!(guest.sh("lsmod | grep -c ebb").trim(), "0");
    });
}

/// After an error of its own ftrace removes nothing; what it still calls must be there.
#[test]
fn vm_hooks_that_cannot_be_removed_keep_the_module() {
    let _arena = held();
    in_pairs(&kernels(Kernel::V6_12), |&kernel| {
        const LOADED: &str = "cat /sys/module/ebb/initstate";
        const SAID: &str = "dmesg | grep -c 'its hooks cannot be removed: the module stays'";
        let guest = Guest::boot(kernel, true, |_| ());
        // A load that fails: refused by the self-test, and with a hook that stays.
        guest.insmod(&format!("fault={}", STUCK | 1));
        assert_eq!((guest.sh(LOADED).trim(), guest.sh(SAID).trim()), ("live", "1"), "{kernel}");
        guest.stress("compact");
        let said = guest.sh("rmmod ebb 2>&1");
        assert!(said.contains("temporarily unavailable"), "{kernel}: {said}");
        assert_eq!(guest.sh(LOADED).trim(), "live");

        let guest = Guest::boot(kernel, true, |_| ());
        guest.insmod(&format!("fault={STUCK}"));
        // What a command leaves in the background is killed when it ends: by then rmmod is in the
        // kernel and stays there.
        let going = "until grep -q going /sys/module/ebb/initstate; do sleep 0.1; done";
        guest.sh(&format!("rmmod ebb >/dev/null 2>&1 </dev/null & {going}"));
        let said = |_: &Vm| guest.sh(SAID).trim() == "1";
        guest.vm.wait_for("hooks that stay", MINUTE, said).unwrap();
        assert_eq!(guest.sh(LOADED).trim(), "going", "{kernel}");
        guest.stress("compact");
        assert_eq!(guest.sh("dmesg | grep -E 'BUG|WARNING|Oops' | head -n 5"), "", "{kernel}");
    });
}
