//! What an operator does to a daemon that has taken memory: stops, reloads, upgrades, kills it,
//! removes its files, starts another one beside it, sets sizes while there is none.

use std::os::unix::fs::PermissionsExt;

use ebb_lab::ebb;

use super::law::Watch;
use super::place::*;
use super::sequences::Scene;
use super::*;

fn executable(path: &std::path::Path, text: &str) {
    // Beside it, and renamed: a program that runs cannot be written.
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, PermissionsExt::from_mode(0o755)).unwrap();
    fs::rename(new, path).unwrap();
}

/// The built program, as a user has it who is going to upgrade it.
fn install(place: &Place) -> std::path::PathBuf {
    let program = place.file("ebb");
    let mut copy = Command::new("install");
    let copied = copy.args(["-m", "755"]).arg(ebb::binary().unwrap()).arg(&program).status();
    assert!(copied.unwrap().success());
    program
}

/// The socket is another's for a moment.
fn wait_answer(daemon: &Daemon) {
    wait_until(|| daemon.state().is_ok(), || daemon.log());
}

fn wait_nothing_owed(place: &Place) {
    wait_until(|| place.owned() == Default::default(), || format!("{:?}", place.owned()));
}

/// A stand-in whose idle memory a daemon has taken, under the law's eyes.
fn squeezed(name: &str, deflates: bool) -> Option<(Place, Standin, Watch, Daemon)> {
    let Scene { place, mut vms, watch, daemon } = Scene::new(OFTEN, &[(name, deflates)])?;
    squeeze(&daemon, &vms[0]);
    Some((place, vms.remove(0), watch, daemon))
}

#[test]
fn sigint_and_the_end_of_its_terminal_give_back_as_sigterm_does() {
    let Some((place, vm, mut watch, daemon)) = squeezed("stops", true) else { return };
    daemon.signal(Signal::INT);
    let (code, log) = daemon.end();
    assert_eq!(code, Some(0), "{log}");
    vm.wait_size(RAM);
    assert_eq!(place.owned(), Default::default());

    // On a terminal of its own, which goes away.
    let run = format!(
        "exec {} run --config {}",
        ebb::binary().unwrap().display(),
        place.file("ebb.toml").display()
    );
    let mut terminal = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--", "script", "-qec", &run, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut looks = 0;
    vm.wait_for("smaller size", |t| {
        if looks % 10 == 0 {
            let _ = ebb_host::daemon_client::post(place.file("ebb.sock"), "/v1/reclaim", "{}");
        }
        looks += 1;
        t.size + 8 * MIB <= RAM
    });
    terminal.kill().unwrap();
    terminal.wait().unwrap();
    vm.wait_size(RAM);
    wait_nothing_owed(&place);
    watch.end();
}

/// The next version is this one behind a script that says so.
#[test]
fn a_reload_executes_the_program_that_is_there_now_and_no_balloon_moves() {
    let Some(place) = Place::new() else { return };
    let vm = place.standin("upgraded", false);
    let watch = Watch::start(&place, [&vm]);
    place.configure(OFTEN, [&vm]);
    let program = install(&place);
    let daemon = place.daemon_of("ebb");
    squeeze(&daemon, &vm);
    let orders = vm.truth().orders.len();
    let said = |text: &str| said(&daemon, text);
    // One that does not take the configuration.
    executable(&program, "#!/bin/sh\necho the new one refuses it >&2\nexit 2\n");
    daemon.reload();
    said("the new one refuses it; going on as before");
    wait_ticks(&daemon, 3);
    let run = format!("exec {} \"$@\"", ebb::binary().unwrap().display());
    executable(&program, &format!("#!/bin/sh\necho the new one runs $1 as $$ >&2\n{run}\n"));
    daemon.reload();
    said(&format!("the new one runs run as {}\n", daemon.pid()));
    said("begun anew: what was remembered is taken over");
    wait_answer(&daemon);
    wait_ticks(&daemon, 10);
    let truth = vm.truth();
    assert_eq!((truth.size, truth.orders.len()), (vm.least, orders), "{}", daemon.log());
    Scene { place, vms: vec![vm], watch, daemon }.end_whole();
}

/// It takes the configuration, and is gone when it is to be executed.
#[test]
fn a_program_that_cannot_be_executed_any_more_gives_everything_back() {
    let Some(place) = Place::new() else { return };
    let vm = place.standin("removed", false);
    let mut watch = Watch::start(&place, [&vm]);
    place.configure(OFTEN, [&vm]);
    let program = install(&place);
    let daemon = place.daemon_of("ebb");
    squeeze(&daemon, &vm);
    executable(&program, "#!/bin/sh\nrm \"$0\"\n");
    daemon.reload();
    vm.wait_size(RAM);
    let (code, log) = daemon.end();
    assert!(log.contains("cannot execute") && log.contains("everything is given back"), "{log}");
    assert_eq!(code, Some(2), "{log}");
    assert_eq!(place.owned(), Default::default());
    watch.end();
}

#[test]
fn a_state_file_that_was_removed_is_there_again_before_it_is_needed() {
    let Some(place) = Place::new() else { return };
    let vm = place.standin("emptied", false);
    let daemon = place.daemon(OFTEN, [&vm]);
    squeeze(&daemon, &vm);
    wait_ticks(&daemon, 2);
    let before = place.owned();
    let orders = vm.truth().orders.len();
    for _ in 0..2 {
        fs::remove_file(place.state_file()).unwrap();
        fs::remove_file(place.file("state.lock")).unwrap();
        wait_ticks(&daemon, 3);
        assert_eq!(place.owned(), before);
        // Nor has another daemon a lock of its own now.
        let (code, said) = place.ebb("run");
        assert!(code == 2 && said.contains("another ebb holds"), "{said}");
    }
    assert_eq!(vm.truth().orders.len(), orders);
    daemon.crash();
    place.release();
    vm.wait_size(RAM);
}

#[test]
fn a_second_daemon_and_a_release_beside_a_running_one_change_nothing() {
    let Some((place, vm, watch, daemon)) = squeezed("one", false) else { return };
    let orders = vm.truth().orders.len();
    for command in ["run", "release"] {
        let (code, said) = place.ebb(command);
        assert!(code == 2 && said.contains("another ebb holds"), "{command}: {said}");
    }
    wait_ticks(&daemon, 5);
    let truth = vm.truth();
    assert_eq!((truth.size, truth.orders.len()), (vm.least, orders), "{}", daemon.log());
    Scene { place, vms: vec![vm], watch, daemon }.end_whole();
}

/// In the middle of giving back: a daemon that stops, and `ebb release`.
#[test]
fn who_is_killed_while_it_gives_back_leaves_the_rest_to_the_next() {
    for release in [false, true] {
        let Some((place, vm, watch, daemon)) = squeezed(&format!("half-{release}"), false) else {
            return;
        };
        vm.tell(&json!({ "speed": 20 * MIB }));
        let half = |t: &Truth| t.size >= vm.least + 40 * MIB;
        if release {
            daemon.crash();
            let mut release = Command::new(ebb::binary().unwrap())
                .args(["release", "--config", place.file("ebb.toml").to_str().unwrap()])
                .spawn()
                .unwrap();
            vm.wait_for("half of its memory", half);
            release.kill().unwrap();
            release.wait().unwrap();
        } else {
            daemon.signal(Signal::TERM);
            vm.wait_for("half of its memory", half);
            daemon.crash();
        }
        assert!(!place.owned().vms.is_empty());
        let daemon = place.daemon_again();
        let more = |v: &Value| v["actual"].as_u64() > Some(vm.least + 80 * MIB);
        wait_shown(&daemon, &vm, "a larger size", more);
        watch.check();
        let state = daemon.state().unwrap().to_string();
        assert!(!state.contains("was set, not by Ebb"), "{}", daemon.log());
        vm.tell(&json!({ "speed": 1 << 30 }));
        Scene { place, vms: vec![vm], watch, daemon }.end_whole();
    }
}

/// A size below the one that Ebb ordered is the operator's. One above it can be Ebb's own order
/// under way: then the VM is given all that it had.
#[test]
fn a_size_that_is_set_while_no_daemon_runs_is_theirs_where_it_cannot_be_ebbs() {
    for (set, whole) in [(100, 100), (300, 512)] {
        let Some(place) = Place::new() else { return };
        let vm = place.standin(&format!("dead{set}"), false);
        let daemon = place.daemon(OFTEN, [&vm]);
        squeeze(&daemon, &vm);
        daemon.crash();
        vm.tell(&json!({ "order": set * MIB, "need": 32 * MIB }));
        vm.wait_size(set * MIB);
        let daemon = place.daemon_again();
        wait_link(&daemon, &vm);
        wait_ticks(&daemon, 5);
        let (code, log) = daemon.end();
        assert_eq!(code, Some(0), "{log}");
        assert_eq!(vm.truth().size, whole * MIB, "{log}");
        assert_eq!(place.owned(), Default::default());
    }
}

#[test]
fn a_vm_that_is_not_managed_any_more_is_given_back_and_not_spoken_to() {
    let Some((place, vm, watch, daemon)) = squeezed("unmanaged", false) else { return };
    let section = format!("[vm.\"{}\"]\n", vm.name);
    place.reconfigure(&section, &format!("{section}manage = false\n"));
    daemon.reload();
    vm.wait_size(RAM);
    wait_nothing_owed(&place);
    wait_ticks(&daemon, 3);
    let before = vm.truth().commands;
    wait_ticks(&daemon, 10);
    assert_eq!(vm.truth().commands, before);
    Scene { place, vms: vec![vm], watch, daemon }.end_whole();
}

/// The daemon serves its VMs all the same, and a later reload brings its socket back.
#[test]
fn a_reload_to_a_socket_that_cannot_be_used_goes_on_without_one() {
    let Some((place, vm, watch, daemon)) = squeezed("unheard", false) else { return };
    let orders = vm.truth().orders.len();
    let folder = place.file("folder.sock");
    fs::create_dir(&folder).unwrap();
    place.reconfigure("ebb.sock", "folder.sock");
    daemon.reload();
    said(&daemon, "commands are not answered (tried again each 60 s)");
    said(&daemon, "answers on no socket");
    assert!(folder.is_dir());
    assert_eq!((vm.truth().size, vm.truth().orders.len()), (vm.least, orders));
    vm.tell(&json!({ "need": vm.least - 6 * MIB }));
    vm.wait_for("help in need", |t| t.size >= vm.least + 32 * MIB);
    place.reconfigure("folder.sock", "ebb.sock");
    daemon.reload();
    wait_answer(&daemon);
    Scene { place, vms: vec![vm], watch, daemon }.end_whole();
}

/// A file system becomes read-only after an error. To give memory back needs no write.
#[test]
fn release_gives_back_from_a_state_file_that_cannot_be_written() {
    let Some((place, vm, mut watch, daemon)) = squeezed("read-only", false) else { return };
    daemon.crash();
    // In a mount namespace that ends with the command, also where this test fails.
    let read_only = "mount --bind $0 $0 && mount -o remount,bind,ro $0 && exec \"$@\"";
    let mut release = Command::new("unshare");
    release
        .args(["--mount", "sh", "-c", read_only])
        .arg(place.file(""))
        .arg(ebb::binary().unwrap());
    release.arg("--config").arg(place.file("ebb.toml")).arg("release");
    let done = release.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    let code = done.status.code();
    assert!(code == Some(2) && said.contains("which is not written down"), "{code:?} {said}");
    vm.wait_size(RAM);
    let (code, said) = place.ebb("release");
    assert_eq!(code, 0, "{said}");
    wait_nothing_owed(&place);
    watch.end();
}

/// As on a full disk: nothing can be put beside it that would replace it.
#[test]
fn while_the_state_file_cannot_be_written_memory_is_only_given() {
    let Some(scene) = Scene::new(OFTEN, &[("needs", false), ("idles", false)]) else { return };
    let Scene { place, vms, watch, daemon } = &scene;
    let [needs, idles] = &vms[..] else { unreachable!() };
    squeeze(daemon, needs);
    fs::create_dir(place.file("state.new")).unwrap();
    needs.tell(&json!({ "need": needs.least - 6 * MIB }));
    needs.wait_for("help in need", |t| t.size >= needs.least + 32 * MIB);
    for _ in 0..5 {
        daemon.reclaim_vm(&idles.name).unwrap();
        wait_ticks(daemon, 2);
    }
    assert!(idles.truth().orders.is_empty(), "{:?}", idles.truth());
    watch.check();
    fs::remove_dir(place.file("state.new")).unwrap();
    squeeze(daemon, idles);
    scene.end_whole();
}

/// Its socket is removed, and is there again.
#[test]
fn a_vm_that_cannot_be_reached_stays_owed_until_it_can() {
    let Some((place, vm, mut watch, daemon)) = squeezed("cut-off", false) else { return };
    let socket = place.file(&format!("{}-ebb.sock", vm.name));
    let away = place.file("away.sock");
    fs::rename(&socket, &away).unwrap();
    // Who is connected stays so.
    wait_ticks(&daemon, 3);
    wait_link(&daemon, &vm);
    daemon.crash();
    let daemon = place.daemon_again();
    wait_ticks(&daemon, 3);
    let (code, log) = daemon.end();
    assert!(code == Some(2) && log.contains(&vm.name), "{code:?} {log}");
    let names: Vec<String> = place.owned().vms.into_iter().map(|v| v.name).collect();
    assert_eq!(names, [vm.name.as_str()]);
    fs::rename(&away, &socket).unwrap();
    place.release();
    vm.wait_size(RAM);
    assert_eq!(place.owned(), Default::default());
    watch.end();
}

/// A reload that changes where it is, a crash after that, and a reload that changes it back.
#[test]
fn what_is_owed_moves_with_the_state_file_when_ebb_is_reloaded() {
    let Some((place, vm, mut watch, daemon)) = squeezed("moved", false) else { return };
    let before = vm.truth().orders.len();
    // It looks at the file at its first place.
    watch.end();
    place.reconfigure("/state.json", "/other/state.json");
    for count in 1..=2 {
        daemon.reload();
        let anew = || daemon.log().matches("begun anew").count() >= count;
        wait_until(anew, || daemon.log());
    }
    wait_answer(&daemon);
    wait_ticks(&daemon, 5);
    assert_eq!((vm.truth().size, vm.truth().orders.len()), (vm.least, before), "{}", daemon.log());
    let moved = !place.file("state.json").exists() && place.file("other/state.json").exists();
    assert!(moved, "{}", daemon.log());
    daemon.crash();
    let daemon = place.daemon_again();
    wait_link(&daemon, &vm);
    said(&daemon, "owned again");
    // One that says what another daemon owes is not overwritten.
    let other = fs::read(place.file("other/state.json")).unwrap();
    fs::write(place.file("state.json"), &other).unwrap();
    place.reconfigure("/other/state.json", "/state.json");
    daemon.reload();
    said(&daemon, "other/state.json stays in use");
    fs::remove_file(place.file("state.json")).unwrap();
    daemon.reload();
    wait_until(|| place.file("state.json").exists(), || daemon.log());
    wait_answer(&daemon);
    assert!(!place.file("other/state.json").exists());
    let (code, log) = daemon.end();
    assert_eq!((code, vm.truth().size), (Some(0), RAM), "{log}");
    assert_eq!(place.owned(), Default::default());
}
