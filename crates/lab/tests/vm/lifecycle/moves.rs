//! A guest's memory goes elsewhere and comes back: live migration between two
//! QEMUs, snapshots (`snapshot-save`, what `savevm` does, into a qcow2 image that
//! QEMU itself makes), hibernation.

use super::life::recycled;
use super::*;

/// A QEMU that waits for `config`'s guest to arrive.
fn target(kernel: Kernel, name: &str) -> Guest {
    let dir = tempfile::tempdir().unwrap();
    let (mut config, socket) = Guest::config(kernel, dir.path());
    config.name = name.into();
    config.args.extend(["-incoming".into(), "defer".into()]);
    Guest { vm: Vm::spawn(&config).unwrap(), socket, dir }
}

/// Begins a live migration at a few MiB a second, so that it lasts.
fn begin(from: &Guest, to: &Guest) {
    let uri = format!("unix:{}", to.dir.path().join("migration").display());
    to.vm.qmp("migrate-incoming", Some(json!({ "uri": uri }))).unwrap();
    let slow = json!({ "max-bandwidth": 8 << 20, "downtime-limit": 2000 });
    from.vm.qmp("migrate-set-parameters", Some(slow)).unwrap();
    from.vm.qmp("migrate", Some(json!({ "uri": uri }))).unwrap();
    let active = |vm: &Vm| migration(vm) == "active";
    from.vm.wait_for("the migration to begin", MINUTE, active).unwrap();
}

/// Lets it go as fast as it can, and waits until the guest runs elsewhere.
fn finish(from: &Guest, to: &Guest) {
    let fast = json!({ "max-bandwidth": 4u64 << 30 });
    from.vm.qmp("migrate-set-parameters", Some(fast)).unwrap();
    let there = |vm: &Vm| {
        let status = migration(&from.vm);
        assert_ne!(status, "failed");
        let runs = vm.qmp("query-status", None).unwrap()["status"] == "running";
        status == "completed" && runs
    };
    to.vm.wait_for("the guest to arrive", MINUTE, there).unwrap();
}

fn migration(vm: &Vm) -> String {
    let said = vm.qmp("query-migrate", None).unwrap();
    said["status"].as_str().unwrap_or_default().to_string()
}

#[test]
fn vm_a_guest_migrated_under_a_daemon_is_left_alone_and_recycled_at_its_target() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let source = Guest::boot(kernel, |c| c.name = "source".into());
        source.insmod();
        source.start_verify(100 << 20, "");
        let there = target(kernel, "target");
        let dir = source.dir.path().join("daemon");
        let daemon = Daemon::start(&dir, &["source", "target"], "").unwrap();
        let _ = daemon.wait_for("tier guest", MINUTE, |s| recycled(s, "source")).unwrap();
        daemon.reclaim().unwrap();
        begin(&source, &there);
        let apart = |s: &Value| recycled(s, "source").is_none();
        daemon.wait_for("hands off", MINUTE, apart).unwrap();
        source.verify_on(1_000);
        finish(&source, &there);
        source.vm.kill();
        // The tool, and with it the guest, goes on where it was.
        there.verify_on(2_000);
        let _ = daemon.wait_for("the tier again", MINUTE, |s| recycled(s, "target")).unwrap();
        let much = |s: &Value| {
            daemon.reclaim().unwrap();
            recycled(s, "target").filter(|r| *r > 16 << 20)
        };
        let came = daemon.wait_for("recycling at the target", MINUTE, much).unwrap();
        there.verify_on(5_000);
        let checks = there.stop_verify();
        println!("{kernel}: {checks} pages checked, {came} bytes recycled at the target");
        assert!(daemon.stop());
    }
}

/// The daemon looks at a VM once a second at worst: until then the agent works on.
#[test]
fn vm_recycling_that_goes_on_into_a_migration_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let source = Guest::boot(kernel, |_| ());
        source.insmod();
        source.start_verify(100 << 20, "");
        let there = target(kernel, "target");
        let recycling = source.recycle();
        begin(&source, &there);
        recycling.wait_more(&source.vm, Bytes::mib(4));
        source.verify_on(1_000);
        finish(&source, &there);
        drop(recycling);
        source.vm.kill();
        there.verify_on(2_000);
        let recycling = there.recycle();
        recycling.wait_more(&there.vm, Bytes::mib(16));
        there.verify_on(5_000);
        assert_eq!(there.audit_false(), 0);
        println!("{kernel}: {} pages checked, {:?}", there.stop_verify(), recycling.seen());
    }
}

/// Runs a job of QEMU's to its end.
fn job(vm: &Vm, command: &str, mut arguments: Value) {
    arguments["job-id"] = json!("life");
    vm.qmp(command, Some(arguments)).unwrap();
    let ended = |vm: &Vm| {
        let jobs = vm.qmp("query-jobs", None).unwrap();
        let job = jobs.as_array()?.iter().find(|j| j["id"] == "life")?.clone();
        (job["status"] == "concluded").then_some(job)
    };
    let job = vm.wait_for(command, MINUTE, ended).unwrap();
    vm.qmp("job-dismiss", Some(json!({ "id": "life" }))).unwrap();
    assert_eq!(job.get("error"), None, "{command}");
}

/// Saves the guest's snapshot, or loads it.
pub fn snapshot(guest: &Guest, command: &str) {
    job(&guest.vm, command, json!({ "tag": "t", "vmstate": "snap", "devices": ["snap"] }));
}

/// An image that can hold snapshots, as node `snap`.
pub fn add_image(guest: &Guest) {
    let path = guest.dir.path().join("snap.qcow2");
    std::fs::File::create(&path).unwrap();
    let file = json!({ "driver": "file", "node-name": "snap-file", "filename": path });
    guest.vm.qmp("blockdev-add", Some(file)).unwrap();
    let options = json!({ "driver": "qcow2", "file": "snap-file", "size": 1 << 20 });
    job(&guest.vm, "blockdev-create", json!({ "options": options }));
    let image = json!({ "driver": "qcow2", "node-name": "snap", "file": "snap-file" });
    guest.vm.qmp("blockdev-add", Some(image)).unwrap();
}

/// After a load the map is the snapshot's, and so must be what is believed of it.
/// The agent is told of neither: writing the snapshot's page 0 trips the wire
/// before any other page is written.
#[test]
fn vm_a_guest_loaded_from_its_snapshot_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        load_snapshots(kernel, Firmware::Seabios, rounds());
    }
}

/// With UEFI the first page that QEMU writes and that tells of it lies at 8 MiB.
#[test]
fn vm_a_uefi_guest_loaded_from_its_snapshot_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        load_snapshots(kernel, Firmware::Edk2, rounds().min(3));
    }
}

fn load_snapshots(kernel: Kernel, firmware: Firmware, rounds: u64) {
    let guest = Guest::boot(kernel, |c| {
        c.uefi = firmware == Firmware::Edk2;
        // So the module has to keep the page of the tripwire.
        c.args.extend(["-global".into(), "PIIX4_PM.disable_s3=1".into()]);
    });
    add_image(&guest);
    guest.insmod();
    guest.start_verify(250 << 20, "");
    let recycling = Recycling::start_by(&guest.vm, &guest.socket, firmware);
    recycling.wait_ready(&guest.vm);
    guest.verify_on(60_000);
    let saved = guest.verified();
    snapshot(&guest, "snapshot-save");
    for round in 0..rounds {
        recycling.wait_ready(&guest.vm);
        guest.verify_on(5_000);
        // What is free now was in use then.
        let goal = recycling.seen().recycled + Bytes::mib(16);
        guest.stop_verify();
        recycling.wait_recycled(&guest.vm, goal);
        let trips = recycling.seen().status.counters.trips;
        snapshot(&guest, "snapshot-load");
        // It runs again, from where it was.
        assert!(guest.verified() >= saved);
        guest.verify_on(60_000);
        recycling.wait_ready(&guest.vm);
        let seen = recycling.seen();
        assert!(seen.status.counters.trips > trips, "{kernel} {round}: {seen:?}");
        assert_eq!(guest.audit_false(), 0);
        println!("{kernel} {round}: {:?}", seen.status.counters);
    }
    guest.stop_verify();
}

/// The image is written, the VM boots again, that kernel loads the module as well,
/// and then the image takes its memory over.
#[test]
fn vm_a_hibernated_guest_loses_nothing() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 30).unwrap();
        let mut guest = Guest::boot(kernel, |c| {
            c.disks = vec![disk.path().into()];
            // 6.1 would need a module of compression.
            c.append = "hibernate=nocompress".into();
        });
        guest.vm.request("swapon dev=/dev/vda", MINUTE).unwrap();
        guest.insmod();
        guest.start_verify(80 << 20, "");
        let recycling = guest.recycle();
        recycling.wait_more(&guest.vm, Bytes::mib(4));
        guest.verify_on(2_000);
        let sleep = "echo reboot > /sys/power/disk; echo disk > /sys/power/state";
        let send = |command: String| guest.vm.tool().send(&command).unwrap();
        send(format!("sh cmd={}", ebb_lab::guest::escape(sleep)));
        guest.vm.wait_ready().unwrap();
        guest.insmod();
        recycling.wait_ready(&guest.vm);
        guest.vm.tool().stat("v").unwrap_err();
        let number = guest.sh("cat /sys/block/vda/dev");
        let send = |command: String| guest.vm.tool().send(&command).unwrap();
        send(format!("write path=/sys/power/resume value={}", number.trim()));
        let back = |vm: &Vm| vm.tool().stat("v").ok();
        guest.vm.wait_for("the guest to wake up", MINUTE, back).unwrap();
        guest.verify_on(5_000);
        recycling.wait_ready(&guest.vm);
        recycling.wait_more(&guest.vm, Bytes::mib(4));
        guest.verify_on(5_000);
        assert_eq!(guest.audit_false(), 0);
        println!("{kernel}: {} pages checked, {:?}", guest.stop_verify(), recycling.seen());
    }
}
