//! VMs of a real libvirtd, which has their only monitor: Ebb sees them, takes and gives memory,
//! and respects what is done with `virsh` meanwhile.

mod confined;
mod contained;
mod moves;
mod plugged;
mod session;

use std::process::Output;

use ebb_core::config::NAMESPACE;
use ebb_lab::libvirt::{Domain, Kind, Libvirtd};

use super::*;

/// What a guest does may take long beside other VMs.
const PATIENCE: Duration = Duration::from_secs(180);
/// Sooner than the daemon gives up a connection that owes it an answer (60 s).
const BEFORE_GIVEN_UP: Duration = Duration::from_secs(40);
const RAM: Bytes = Bytes::mib(512);
/// More than is left of a guest that was squeezed.
const HOG: &str = "size=314572800 pattern=random seed=1";
const BALLOON: &str = "<memballoon model='virtio' autodeflate='on' freePageReporting='off'/>";

/// A libvirtd beside any test.
fn host(kind: Kind) -> (Arena, Libvirtd) {
    (Arena::beside(Beside::AnyTest).unwrap(), Libvirtd::start_as(kind).unwrap())
}

fn boot(libvirtd: &Libvirtd, name: &str) -> Domain {
    libvirtd.boot(name, RAM, BALLOON, "").unwrap()
}

fn start(libvirtd: &Libvirtd, dir: &Path, names: &[&str]) -> Daemon {
    start_with(libvirtd, dir, names, "")
}

fn start_with(libvirtd: &Libvirtd, dir: &Path, names: &[&str], config: &str) -> Daemon {
    Daemon::configure(dir, names, config).unwrap();
    Daemon::start_program(&libvirtd.program().unwrap(), dir, &[]).unwrap()
}

/// A domain, and an Ebb that has heard from its guest.
fn watched(libvirtd: &Libvirtd, name: &str) -> (Domain, TempDir, Daemon) {
    let domain = boot(libvirtd, name);
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(libvirtd, dir.path(), &[name]);
    wait_told(libvirtd, &domain, &daemon);
    (domain, dir, daemon)
}

/// The same with two domains. A test that runs beside this one must call its own otherwise: to the
/// daemon a second VM of that name is another, and it adds the process to the name.
fn two_watched(libvirtd: &Libvirtd, names: [&str; 2]) -> (Domain, Domain, TempDir, Daemon) {
    let [one, two] = names.map(|name| boot(libvirtd, name));
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(libvirtd, dir.path(), &names);
    [&one, &two].iter().for_each(|domain| wait_told(libvirtd, domain, &daemon));
    (one, two, dir, daemon)
}

/// As [`wait_up`], and says more where the guest is not heard.
fn wait_told(libvirtd: &Libvirtd, domain: &Domain, daemon: &Daemon) {
    if let Err(e) = daemon.wait_for_vm(&domain.name, "statistics", PATIENCE, is_up) {
        panic!("{e}\n{}", libvirtd.report(domain));
    }
}

/// Waits until Ebb sees a VM, and sees it so.
fn wait_vm(daemon: &Daemon, name: &str, what: &str, is: impl FnMut(&Value) -> bool) {
    daemon.wait_for_vm(name, what, PATIENCE, is).unwrap();
}

fn wait_down(daemon: &Daemon, name: &str) {
    wait_vm(daemon, name, "a link that is down", |vm| vm["link"]["state"] != "up");
}

/// Has its guest hold more than it was left with, and waits until it was given that.
fn needs_memory(domain: &Domain, daemon: &Daemon, name: &str) {
    domain.tool.start_ready("hog", "hold", HOG, PATIENCE).unwrap();
    wait_given(daemon, name);
    domain.tool.stop("hog").unwrap();
}

/// Waits until it has more than it was left with.
fn wait_given(daemon: &Daemon, name: &str) {
    let given = |vm: &Value| vm["actual"].as_u64() > Some(Bytes::mib(330).0);
    wait_vm(daemon, name, "what the guest needs", given);
}

/// Waits until Ebb does not see it any more.
fn wait_gone(daemon: &Daemon, name: &str) {
    let gone = |s: &Value| of(s, name).is_null();
    daemon.wait_for(&format!("{name} to be gone"), PATIENCE, gone).unwrap();
}

/// Its balloon's size as libvirt has QEMU tell it.
fn size(libvirtd: &Libvirtd, name: &str) -> Bytes {
    libvirtd.balloon(name).unwrap()
}

fn wait_size(libvirtd: &Libvirtd, name: &str, is: impl Fn(Bytes) -> bool) {
    let there = |l: &Libvirtd| is(size(l, name));
    if let Err(e) = libvirtd.wait(&format!("the size of {name}"), there) {
        panic!("{name} has {}: {e}", size(libvirtd, name));
    }
}

/// Ebb ends and returns to each domain all its memory.
fn wait_whole(libvirtd: &Libvirtd, daemon: Daemon, names: &[&str]) {
    let (code, log) = daemon.end();
    println!("{log}");
    assert_eq!(code, Some(0), "{log}");
    names.iter().for_each(|name| wait_size(libvirtd, name, |b| b == RAM));
}

/// Has Ebb take its idle memory until libvirt, too, has QEMU tell that its balloon is no larger
/// than `most`: a guest may be given more at any moment.
fn squeeze_balloon(libvirtd: &Libvirtd, daemon: &Daemon, name: &str, most: Bytes) {
    let small = |l: &Libvirtd| {
        let _ = daemon.reclaim_vm(name);
        size(l, name) <= most
    };
    libvirtd.wait(&format!("the balloon of {name} to be small"), small).unwrap();
}

/// Runs a command of `ebb` where this libvirtd is.
fn says(libvirtd: &Libvirtd, config: &Path, command: &[&str]) -> Output {
    let mut ebb = Command::new(libvirtd.program().unwrap());
    ebb.arg("--config").arg(config).args(command).output().unwrap()
}

/// Whether libvirt has QEMU ask this domain's guest for statistics.
fn asks_for_statistics(libvirtd: &Libvirtd, name: &str) -> bool {
    libvirtd.virsh(&["dumpxml", name]).unwrap().contains("<stats period=")
}

#[test]
fn vm_domains_are_ballooned_through_libvirt_and_whole_when_ebb_stops() {
    let (_arena, libvirtd) = host(Kind::Root);
    let domain = boot(&libvirtd, "tame");
    libvirtd.boot("rigid", RAM, "<memballoon model='none'/>", "").unwrap();
    let dir = tempfile::tempdir().unwrap();
    libvirtd.start_paused("alien", Bytes::mib(64), BALLOON).unwrap();
    let theirs = "[vm.alien]\nmanage = false\n";
    let daemon = start_with(&libvirtd, dir.path(), &["tame", "rigid"], theirs);
    wait_told(&libvirtd, &domain, &daemon);
    let vm = daemon.vm("tame").unwrap();
    assert_eq!(vm["pid"].as_u64(), Some(u64::from(domain.pid)), "{vm}");
    assert_eq!((vm["ram"].as_u64(), vm["deflate_on_oom"].as_bool()), (Some(RAM.0), Some(true)));
    wait_vm(&daemon, "rigid", "a link without a balloon", |vm| vm["link"]["state"] == "up");
    squeeze_balloon(&libvirtd, &daemon, "tame", Bytes::mib(300));
    assert!(asks_for_statistics(&libvirtd, "tame"));
    let set_period = |seconds: &str| {
        libvirtd.virsh(&["dommemstat", "tame", "--period", seconds, "--live"]).unwrap();
    };
    set_period("0");
    let again = |l: &Libvirtd| asks_for_statistics(l, "tame");
    libvirtd.wait("statistics of tame, which another program ended", again).unwrap();
    // As virt-manager does.
    let theirs_is_set = |l: &Libvirtd| {
        l.virsh(&["dumpxml", "tame"]).is_ok_and(|xml| xml.contains("<stats period='5'"))
    };
    set_period("5");
    libvirtd.wait("a period of Ebb's for tame", |l| again(l) && !theirs_is_set(l)).unwrap();
    let theirs = daemon.vm("alien").unwrap();
    assert!(theirs["link"]["why"].as_str().unwrap().contains("not managed"), "{theirs}");
    assert!(!asks_for_statistics(&libvirtd, "alien"), "nothing is set there");
    wait_whole(&libvirtd, daemon, &["tame"]);
    // Where its guest was asked on the spot meanwhile, Ebb has not seen the other program's.
    let as_it_was = theirs_is_set(&libvirtd) || !asks_for_statistics(&libvirtd, "tame");
    assert!(as_it_was, "the interval is as it was, or as another program has set it");
    set_period("0");
    // What its guest needs it is given back at once.
    let daemon = start(&libvirtd, dir.path(), &["tame"]);
    wait_up(&daemon, "tame");
    daemon.squeeze("tame", Bytes::mib(300)).unwrap();
    domain.tool.start_ready("hog", "hold", HOG, PATIENCE).unwrap();
    // Its guest may deflate the balloon itself: its word has to show that it needed that.
    wait_vm(&daemon, "tame", "what the guest needs", |vm| {
        vm["actual"].as_u64().min(vm["need"].as_u64()) > Some(Bytes::mib(330).0)
    });
    domain.tool.stop("hog").unwrap();
    // What a crash leaves owed is returned through libvirt.
    daemon.squeeze("tame", Bytes::mib(300)).unwrap();
    let config = daemon.config();
    daemon.crash();
    let said = says(&libvirtd, &config, &["release"]);
    assert!(said.status.success(), "{said:?}");
    wait_size(&libvirtd, "tame", |b| b == RAM);
    let daemon = start(&libvirtd, dir.path(), &["tame"]);
    wait_up(&daemon, "tame");
    daemon.squeeze("tame", Bytes::mib(300)).unwrap();
    // libvirt is not to be asked any more: the domain is given back, and nothing is left in it.
    let with_libvirt = |on: bool| {
        Daemon::configure(dir.path(), &["tame"], &format!("libvirt = {on}\n")).unwrap();
        daemon.reload();
    };
    let nothing = |l: &Libvirtd| {
        l.virsh(&["dumpxml", "tame"])
            .is_ok_and(|xml| !xml.contains("urn:ebb:balloon") && !xml.contains("<stats period="))
    };
    with_libvirt(false);
    wait_size(&libvirtd, "tame", |b| b == RAM);
    libvirtd.wait("nothing of Ebb's in the domain", nothing).unwrap();
    // Also where it is owed nothing.
    with_libvirt(true);
    libvirtd.wait("statistics of tame", again).unwrap();
    with_libvirt(false);
    libvirtd.wait("nothing of Ebb's in the domain", nothing).unwrap();
    assert!(daemon.stop());
    let taint = libvirtd.virsh(&["dominfo", "tame"]).unwrap();
    assert!(!taint.contains("custom-monitor"), "{taint}");
}

#[test]
fn vm_a_libvirtd_that_dies_or_hangs_loses_nothing_and_holds_nobody_up() {
    let (_arena, libvirtd) = host(Kind::Root);
    let (one, _two, _dir, daemon) = two_watched(&libvirtd, ["hit", "spared"]);
    daemon.squeeze("hit", Bytes::mib(300)).unwrap();

    // A libvirtd that is killed and started again: orders go on.
    libvirtd.kill_and_start().unwrap();
    wait_up(&daemon, "hit");
    needs_memory(&one, &daemon, "hit");

    // A QEMU that hangs: its neighbour is asked and told as before.
    wait_up(&daemon, "spared");
    signal(one.pid, Signal::STOP);
    wait_down(&daemon, "hit");
    wait_up(&daemon, "spared");
    signal(one.pid, Signal::CONT);
    wait_up(&daemon, "hit");

    // A libvirtd that hangs: ticks go on in time.
    signal(libvirtd.pid(), Signal::STOP);
    wait_down(&daemon, "hit");
    let tick = |d: &Daemon| d.state().unwrap()["tick"].as_u64().unwrap();
    let (begun, was) = (Instant::now(), tick(&daemon));
    std::thread::sleep(Duration::from_secs(5));
    let (ticks, took) = (tick(&daemon) - was, begun.elapsed().as_secs());
    assert!(ticks + 2 >= took, "{ticks} ticks in {took} s");
    signal(libvirtd.pid(), Signal::CONT);
    let names = ["hit", "spared"];
    names.iter().for_each(|name| wait_up(&daemon, name));
    wait_whole(&libvirtd, daemon, &names);
}

/// `virsh dump` into a FIFO without a reader: libvirt keeps the domain locked.
#[test]
fn vm_a_domain_that_libvirt_has_locked_holds_no_other_up() {
    let (_arena, libvirtd) = host(Kind::Root);
    let (one, _two, _dir, daemon) = two_watched(&libvirtd, ["free", "locked"]);
    daemon.squeeze("free", Bytes::mib(300)).unwrap();
    daemon.squeeze("locked", Bytes::mib(300)).unwrap();
    let fifo = libvirtd.dir().join("fifo");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let path = fifo.display().to_string();
    std::thread::scope(|scope| {
        let dump = scope.spawn(|| libvirtd.virsh(&["dump", "locked", &path]));
        let helped = || -> Result<(), Box<dyn std::error::Error>> {
            let down = |vm: &Value| vm["link"]["state"] != "up";
            daemon.wait_for_vm("locked", "a link that is down", PATIENCE, down)?;
            one.tool.start_ready("hog", "hold", HOG, PATIENCE)?;
            let given = |vm: &Value| vm["actual"].as_u64() > Some(Bytes::mib(330).0);
            Ok(daemon.wait_for_vm("free", "what the guest needs", BEFORE_GIVEN_UP, given)?)
        };
        let helped = helped();
        // A reader that goes at once ends the dump.
        drop(std::fs::File::open(&fifo).unwrap());
        let _ = dump.join().unwrap();
        helped.unwrap();
    });
    wait_up(&daemon, "locked");
    wait_whole(&libvirtd, daemon, &["free", "locked"]);
}

#[test]
fn vm_what_virsh_does_meanwhile_is_respected() {
    let (_arena, libvirtd) = host(Kind::Root);
    let (domain, _dir, daemon) = watched(&libvirtd, "busy");
    let virsh = |args: &[&str]| libvirtd.virsh(args).unwrap();
    let wait = |what: &str, key: &str, value: &str| {
        wait_vm(&daemon, "busy", what, |vm| vm[key] == value);
    };

    virsh(&["suspend", "busy"]);
    wait("the suspended domain", "run", "paused");
    virsh(&["resume", "busy"]);
    wait("the resumed domain", "run", "running");

    // Saved while Ebb holds a part of its memory, and restored: its size then is not Ebb's to say,
    // since libvirt sets no balloon of a domain that it saves. `setmem` gives it all its memory.
    daemon.squeeze("busy", Bytes::mib(400)).unwrap();
    let file = libvirtd.dir().join("saved").display().to_string();
    virsh(&["save", "busy", &file]);
    wait_gone(&daemon, "busy");
    virsh(&["restore", &file]);
    wait_up(&daemon, "busy");
    assert_ne!(daemon.vm("busy").unwrap()["pid"].as_u64(), Some(u64::from(domain.pid)));
    // Not while Ebb gives: what `setmem` adds to that is an operator's size.
    wait_vm(&daemon, "busy", "nothing that is owed", |vm| vm["ballooned"] == 0);
    virsh(&["setmem", "busy", "512M", "--live"]);
    wait_size(&libvirtd, "busy", |b| b == RAM);

    wait_vm(&daemon, "busy", "that size", |vm| vm["actual"] == RAM.0);

    virsh(&["reset", "busy"]);
    std::thread::sleep(Duration::from_secs(3));
    wait_vm(&daemon, "busy", "rest after a reset", |vm| vm["standing"]["is"] == "ready");

    // A size that an operator sets is the operator's.
    virsh(&["setmem", "busy", "320M", "--live"]);
    wait_size(&libvirtd, "busy", |b| b == Bytes::mib(320));
    wait_vm(&daemon, "busy", "the operator's size", |vm| {
        vm["actual"] == Bytes::mib(320).0
            && vm["verdict"].as_str().is_some_and(|v| v.contains("was set, not by Ebb"))
    });
    assert_eq!(size(&libvirtd, "busy"), Bytes::mib(320));
    virsh(&["setmem", "busy", "512M", "--live"]);
    wait_size(&libvirtd, "busy", |b| b == RAM);
    virsh(&["undefine", "busy"]);
    wait_up(&daemon, "busy");
    assert!(daemon.stop());
}

/// What a tick over many domains costs: `EBB_DOMAINS` (50), all paused, since this machine could
/// not run so many. The test prints the daemon's processor time, and fails only if it is very high.
#[test]
fn vm_many_domains_of_libvirt_cost_little() {
    let _arena = Arena::beside(Beside::AnyTest).unwrap();
    let libvirtd = Libvirtd::start().unwrap();
    let names: Vec<String> =
        (0..set("EBB_DOMAINS").unwrap_or(50)).map(|i| format!("many-{i}")).collect();
    for name in &names {
        libvirtd.start_paused(name, Bytes::mib(64), BALLOON).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let daemon = start(&libvirtd, dir.path(), &names);
    let all = |s: &Value| names.iter().all(|name| of(s, name)["link"]["state"] == "up");
    daemon.wait_for("all domains", PATIENCE, all).unwrap();
    std::thread::sleep(Duration::from_secs(5));
    let spent = |d: &Daemon| {
        let state = d.state().unwrap();
        (state["daemon"]["cpu_s"].as_f64().unwrap(), state["tick"].as_u64().unwrap())
    };
    let ((cpu, tick), begun) = (spent(&daemon), Instant::now());
    std::thread::sleep(Duration::from_secs(30));
    let ((cpu_after, tick_after), took) = (spent(&daemon), begun.elapsed().as_secs_f64());
    let (share, ticks) = ((cpu_after - cpu) / took, tick_after - tick);
    println!("{} domains: {:.2} % of a core, {ticks} ticks", names.len(), share * 100.0);
    assert!(ticks > 0 && share < 0.5);
    assert!(daemon.stop());
    let left: Vec<_> = names.iter().filter(|n| asks_for_statistics(&libvirtd, n)).collect();
    assert!(left.is_empty(), "the interval is not as it was: {left:?}");
}

/// The settings that the domain's metadata holds count, also those that are set while it runs.
#[test]
fn vm_metadata_of_a_domain_is_followed_and_wrong_metadata_takes_nothing() {
    const SMALL: Bytes = Bytes::mib(256);
    let (_arena, libvirtd) = host(Kind::Root);
    let more = format!(
        "<metadata><ebb:memory xmlns:ebb='{NAMESPACE}' min='160MiB' max='240MiB' weight='2' \
         group='acme'/></metadata>"
    );
    let _domain = libvirtd.boot("meta", SMALL, BALLOON, &more).unwrap();
    let dir = tempfile::tempdir().unwrap();
    // Another one has a QMP socket for Ebb.
    let qmp = libvirtd.dir().join("own-ebb.qmp");
    let arg = |value: &str| format!("<qemu:arg value='{value}'/>");
    let more = format!(
        "<metadata><ebb:memory xmlns:ebb='{NAMESPACE}' min='150MiB'/></metadata>\
         <qemu:commandline>{}{}</qemu:commandline>",
        arg("-qmp"),
        arg(&format!("unix:{},server=on,wait=off", qmp.display()))
    );
    let _own = libvirtd.boot("direct", SMALL, BALLOON, &more).unwrap();
    // The section of the host's file wins for its key.
    let config = "[vm.meta]\nweight = 3\n[vm.direct]\n";
    let daemon = start_with(&libvirtd, dir.path(), &[], config);
    let set = |xml: &str| {
        let args = ["metadata", "meta", "--uri", NAMESPACE, "--key", "ebb", "--set", xml, "--live"];
        libvirtd.virsh(&[&args[..], &["--config"]].concat()).unwrap();
        Instant::now()
    };
    let wait = |what: &str, is: &dyn Fn(&Value) -> bool| wait_vm(&daemon, "meta", what, is);
    let bytes = |vm: &Value, key: &str| vm[key].as_u64().map(Bytes);
    let floor = |mib| move |vm: &Value| vm["floor"].as_u64() == Some(Bytes::mib(mib).0);

    wait_up(&daemon, "meta");
    wait("the floor of the metadata", &floor(160));
    let vm = daemon.vm("meta").unwrap();
    assert_eq!(
        (bytes(&vm, "ceiling"), vm["group"].as_str()),
        (Some(Bytes::mib(240)), Some("acme"))
    );
    let words = vm["by_metadata"].as_str().unwrap();
    assert!(words.contains("min 160 MiB") && words.contains("ebb.toml sets weight"), "{words}");
    wait_size(&libvirtd, "meta", |b| b <= Bytes::mib(240));
    let says = |command: &[&str]| {
        let out = says(&libvirtd, &daemon.config(), command);
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let text = says(&["explain", "meta"]);
    assert!(text.contains("metadata  min 160 MiB, max 240 MiB, group acme"), "{text}");
    assert!(says(&["status"]).contains("meta: set in its libvirt metadata: min 160 MiB"));

    wait_up(&daemon, "direct");
    wait_vm(&daemon, "direct", "the floor of the metadata", floor(150));
    assert!(!asks_for_statistics(&libvirtd, "direct"), "not through libvirt");
    let args = ["metadata", "direct", "--uri", NAMESPACE, "--key", "ebb", "--live", "--set"];
    libvirtd.virsh(&[&args[..], &["<memory manage='no'/>"]].concat()).unwrap();
    let alone = |vm: &Value| vm["link"]["why"].as_str().is_some_and(|w| w.contains("not managed"));
    wait_vm(&daemon, "direct", "a link that is left alone", alone);

    // A change is seen while both run.
    let at = set("<memory min='192MiB'/>");
    wait("the new floor", &floor(192));
    // It is told: what is not told is read each 50 s.
    assert!(at.elapsed() < Duration::from_secs(40), "{:?}", at.elapsed());
    daemon.squeeze("meta", Bytes::mib(200)).unwrap();
    assert!(size(&libvirtd, "meta") >= Bytes::mib(192));

    // What is wrong is named, and all is given back.
    set("<memory min='192MiB' weight='heavy'/>");
    let named = |vm: &Value| {
        let why = vm["verdict"].as_str().unwrap_or_default().to_owned()
            + vm["standing"]["why"].as_str().unwrap_or_default();
        why.contains("domain “meta” is wrong: attribute weight: “heavy”")
    };
    wait("what is wrong", &named);
    wait_size(&libvirtd, "meta", |b| b == SMALL);
    let _ = daemon.reclaim_vm("meta");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(size(&libvirtd, "meta"), SMALL, "and nothing is taken");
    let text = says(&["doctor"]);
    let line = text.lines().find(|l| l.contains("libvirt metadata:")).unwrap_or_default();
    assert!(line.contains("miss") && line.contains("virsh metadata meta --uri"), "{text}");

    // Corrected, it is taken up again; `manage` takes it out and brings it back.
    set("<memory min='128MiB'/>");
    wait_up(&daemon, "meta");
    wait("the right floor", &floor(128));
    daemon.squeeze("meta", Bytes::mib(200)).unwrap();
    set("<memory manage='no'/>");
    wait_size(&libvirtd, "meta", |b| b == SMALL);
    wait("the domain that is left alone", &alone);
    assert!(!asks_for_statistics(&libvirtd, "meta"), "the interval is as it was");
    libvirtd.virsh(&["metadata", "meta", "--uri", NAMESPACE, "--remove", "--live"]).unwrap();
    wait_up(&daemon, "meta");
    daemon.squeeze("meta", Bytes::mib(200)).unwrap();
    assert!(daemon.stop());
    wait_size(&libvirtd, "meta", |b| b == SMALL);
}
