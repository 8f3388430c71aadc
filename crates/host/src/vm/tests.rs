//! One VM against a scripted QEMU.

mod lost;
pub(crate) mod qemu;
pub(crate) mod shared;

use tempfile::TempDir;

use self::qemu::{ORDER, Qemu, State, WORDS};
use super::merging::look_is_due;
use super::questions::{BALLOON_CHANGE, INTERVAL_S, RARELY};
use super::*;
use crate::probe::qemu::{QemuArgs, QmpAddress};
use crate::qmp::Words;
use crate::qmp_balloon::{INTERVAL, REPORTING};
use crate::testing::{eventually, full_access, socket};

const LONG: Duration = Duration::from_secs(30);

#[test]
fn what_a_look_takes_decides_how_soon_the_next_may_be() {
    let (ms, s) = (Duration::from_millis, Duration::from_secs);
    for (news, age, took, due) in [
        (true, ms(999), ms(1), false),
        (true, s(1), ms(1), true),
        (true, s(4), ms(45), false),
        (true, s(5), ms(45), true),
        (true, s(30), s(2), true),
        (false, s(59), ms(1), false),
        (false, s(60), ms(1), true),
        (false, s(1999), s(2), false),
    ] {
        assert_eq!(look_is_due(news, age, took, took), due, "{news} {age:?} {took:?}");
    }
    // A hundred VMs like that.
    for (news, age, due) in [(true, s(44), false), (true, s(45), true), (false, s(60), true)] {
        assert_eq!(look_is_due(news, age, ms(45), 100 * ms(45)), due, "{news} {age:?}");
    }
}

fn tick(vm: &mut Vm) -> VmSample {
    vm.ask(Instant::now(), Stamp(0), false);
    hear_all(vm, Duration::from_millis(300));
    vm.sample(Stamp(0), 0, &mut Vec::new())
}

/// A tick at that time in which QEMU has answered everything.
fn answered(vm: &mut Vm, at: Stamp) -> VmSample {
    vm.ask(Instant::now(), at, false);
    assert!(hear_all(vm, LONG), "QEMU does not answer");
    vm.sample(at, 0, &mut Vec::new())
}

/// Takes answers until none is awaited or `patience` is over; whether none is awaited.
fn hear_all(vm: &mut Vm, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    while !vm.asked.is_empty() && Instant::now() < until {
        vm.client.iter_mut().for_each(Client::pump);
        vm.hear();
        std::thread::yield_now();
    }
    vm.asked.is_empty()
}

fn vm(path: PathBuf) -> Vm {
    let args = QemuArgs { qmp: QmpAddress::Paths(vec![path]), ..QemuArgs::default() };
    let plain = QemuProcess::plain(VmId { pid: std::process::id(), start: 0 }, "v".into());
    Vm::new(QemuProcess { args, ..plain }, full_access())
}

/// A VM of 1 GiB, but for that, and its QEMU.
fn with_qemu(but: impl FnOnce(&mut State)) -> (TempDir, Qemu, Vm) {
    let (dir, listener, path) = socket();
    (dir, Qemu::serve(listener, but), vm(path))
}

/// On a busy machine an answer can miss its tick. The agent is not told of RAM
/// before it is known whether the balloon reports free pages.
#[test]
fn what_a_balloon_is_asked_once_is_asked_again_until_it_is_answered() {
    let (_dir, qemu, mut vm) = with_qemu(|it| it.holds = Some(REPORTING));
    while qemu.it().held.is_empty() {
        assert_eq!(tick(&mut vm).balloon.and_then(|b| b.reporting), None);
        assert!(!vm.known());
    }
    // Too late for the tick that asked.
    qemu.it().holds = None;
    let late = qemu.it().held.concat();
    qemu.tell(&late);
    let found = (0..20).find_map(|_| tick(&mut vm).balloon?.reporting);
    assert_eq!((found, vm.known()), (Some(true), true));
}

#[test]
fn a_qemu_that_knows_nothing_of_reporting_is_known_not_to_report() {
    let (_dir, _qemu, mut vm) = with_qemu(|it| it.refuses = Some(REPORTING));
    let known = (0..20).any(|_| {
        tick(&mut vm);
        vm.device.is_some() && vm.known()
    });
    assert!(known && vm.reporting.is_none());
}

/// A job of others may hold the domain for as long as libvirt waits.
#[test]
fn what_libvirt_could_not_ask_about_reporting_is_asked_again() {
    let (_dir, qemu, mut vm) = with_qemu(|it| {
        (it.refuses, it.is_held_up) = (Some(REPORTING), true);
    });
    while qemu.was_asked(REPORTING) < 3 {
        tick(&mut vm);
        assert!(!vm.known());
    }
    qemu.it().refuses = None;
    let found = (0..20).find_map(|_| tick(&mut vm).balloon?.reporting);
    assert_eq!((found, vm.known()), (Some(true), true));
}

#[test]
fn what_libvirt_could_not_ask_about_the_interval_is_asked_again() {
    let (_dir, qemu, mut vm) = with_qemu(|it| {
        (it.refuses, it.is_held_up) = (Some(INTERVAL), true);
    });
    assert!(until(&mut vm, |_| qemu.was_asked(INTERVAL) >= 3));
    qemu.it().refuses = None;
    assert!(until(&mut vm, |_| qemu.it().interval == INTERVAL_S));
}

/// libvirt refuses one look, and answers the next one, which holds nothing.
#[test]
fn a_look_for_the_balloon_that_libvirt_refuses_finds_nothing_and_loses_nothing() {
    const FIRST: Option<&str> = Some("/machine/peripheral\"");
    let (_dir, qemu, mut vm) = with_qemu(|it| (it.refuses, it.is_held_up) = (FIRST, true));
    for _ in 0..3 {
        answered(&mut vm, Stamp(0));
        assert!(vm.ready && !vm.known() && !vm.looked, "whether it has a balloon is not known");
    }
    qemu.it().refuses = None;
    answered(&mut vm, Stamp(0));
    assert!(vm.device.is_some(), "it is looked for again at once");
    qemu.it().refuses = FIRST;
    (vm.looked_up, vm.ran_asked) = (None, None);
    assert!(answered(&mut vm, Stamp(0)).balloon.is_some() && vm.device.is_some());
}

/// What is told of a VM whose guest has said nothing for this time.
fn silent(vm: &mut Vm, silence: Duration) -> Vec<Problem> {
    let mut problems = Vec::new();
    let now = Instant::now();
    (vm.stats_new, vm.ran_asked, vm.interval_asked) = (Some(now - silence), None, None);
    vm.ask(now, Stamp(0), false);
    assert!(hear_all(vm, LONG), "QEMU does not answer");
    vm.sample(Stamp(0), 0, &mut problems);
    problems
}

/// virt-manager sets 5 s.
#[test]
fn a_period_that_another_program_has_made_longer_is_corrected() {
    let (_dir, qemu, mut vm) = with_qemu(|_| ());
    assert!(until(&mut vm, |vm| qemu.it().interval == INTERVAL_S && vm.stats_new.is_some()));
    for (period, corrected) in [(2, false), (3, true), (5, true), (60, true)] {
        qemu.it().interval = period;
        let before = qemu.was_asked(INTERVAL);
        assert!(silent(&mut vm, Duration::from_secs(period)).is_empty());
        assert_eq!(qemu.was_asked(INTERVAL) > before, corrected, "{period} s");
        assert_eq!(qemu.it().interval, INTERVAL_S, "{period} s");
    }
}

/// virt-manager's graph goes on.
#[test]
fn the_period_that_is_put_back_is_what_another_program_has_set_last() {
    let (_dir, qemu, mut vm) = with_qemu(|it| it.interval = 1);
    assert!(until(&mut vm, |vm| vm.interval.is_some() && vm.stats_new.is_some()));
    assert_eq!(vm.interval_was, None, "nothing was set");
    for (period, was) in [(5, Some(5)), (7, Some(7)), (0, Some(7))] {
        qemu.it().interval = period;
        silent(&mut vm, Duration::from_secs(8));
        assert_eq!((qemu.it().interval, vm.interval_was), (1, was), "{period}");
    }
}

/// A VM that is reached through libvirt.
fn through_libvirt(but: impl FnOnce(&mut State)) -> (TempDir, Qemu, Vm) {
    let (dir, listener, path) = socket();
    let qemu = Qemu::serve(listener, but);
    let ours = std::os::unix::net::UnixStream::connect(&path).unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut vm = vm(path);
    vm.adopt(Client::over(ours.into(), "libvirt".into(), Words::default()));
    (dir, qemu, vm)
}

/// What libvirt tells is what it has set, and QEMU may have been told otherwise since.
#[test]
fn through_libvirt_an_interval_is_set_again_where_a_guest_is_silent_and_that_is_told() {
    let (_dir, qemu, mut vm) = through_libvirt(|it| it.interval = 1);
    assert!(until(&mut vm, |vm| vm.interval.is_some() && vm.stats_new.is_some()));
    let mut is_set = |seconds| {
        let before = qemu.was_asked("qom-set");
        let told = silent(&mut vm, Duration::from_secs(seconds));
        let set = qemu.was_asked("qom-set") > before;
        assert_eq!(
            set,
            told.iter().any(|p| p.message.contains("has said nothing for")),
            "{told:?}"
        );
        set
    };
    assert!(!is_set(4) && is_set(12));
    assert!(!is_set(22), "once a minute");
    assert_eq!(qemu.it().interval, 1, "as libvirt has it");
    let mut later = |seconds, sets| {
        vm.interval_again = vm.interval_again.map(|at| at - Duration::from_secs(60));
        silent(&mut vm, Duration::from_secs(seconds));
        assert_eq!(qemu.was_asked("qom-set"), sets, "{seconds} s");
    };
    later(70, 2);
    later(130, 2);
    later(190, 3);
    // What QEMU itself says is believed.
    let (_dir, qemu, mut vm) = with_qemu(|it| it.interval = 1);
    assert!(until(&mut vm, |vm| vm.interval.is_some() && vm.stats_new.is_some()));
    silent(&mut vm, Duration::from_secs(12));
    assert_eq!(qemu.was_asked("qom-set"), 0);
}

#[test]
fn a_guest_that_was_paused_is_not_taken_for_silent() {
    let (_dir, qemu, mut vm) = through_libvirt(|it| it.interval = 1);
    assert!(until(&mut vm, |vm| vm.interval.is_some() && vm.stats_new.is_some()));
    for stopped in [true, false] {
        qemu.it().stopped = stopped;
        vm.ran_asked = None;
        assert!(until(&mut vm, |vm| (vm.answers.run == Some(RunState::Running)) != stopped));
        if stopped {
            // An hour passes.
            vm.stats_new = Some(Instant::now() - Duration::from_secs(3600));
        }
    }
    (vm.ran_asked, vm.interval_asked) = (None, None);
    vm.ask(Instant::now(), Stamp(0), false);
    assert!(hear_all(&mut vm, LONG));
    assert_eq!(qemu.was_asked("qom-set"), 0, "its period is not set again");
}

/// It may report free pages two seconds later.
#[test]
fn what_discards_is_not_known_once_a_balloon_was_plugged_in() {
    let (_dir, qemu, mut vm) = with_qemu(|it| it.unplugged = true);
    vm.agent = Some(AgentLink::new("/nowhere/agent".into(), std::process::id()));
    while !(vm.known() && qemu.was_asked("info network") > 0) {
        tick(&mut vm);
    }
    qemu.it().unplugged = false;
    // What can write to its memory is asked for right before an order.
    vm.ran_asked = None;
    tick(&mut vm);
    assert!(vm.device.is_none() && !vm.known());
    let found = (0..20).find_map(|_| tick(&mut vm).balloon?.reporting);
    assert_eq!((found, vm.known()), (Some(true), true));
}

/// A VM whose balloon was found and whose guest has said nothing.
fn with_balloon() -> (TempDir, Qemu, Vm) {
    let (dir, qemu, mut vm) = with_qemu(|it| it.free = None);
    while tick(&mut vm).balloon.is_none() {}
    (dir, qemu, vm)
}

/// QEMU tells of something, and Ebb has read it.
fn hears(vm: &mut Vm, qemu: &Qemu, event: &str) {
    qemu.tell(&format!("{{\"event\": \"{event}\", \"data\": {{}}}}\n"));
    eventually(|| {
        vm.client.iter_mut().for_each(Client::pump);
        vm.any_event(|_| true)
    });
}

#[test]
fn how_a_vm_runs_and_its_size_are_asked_rarely_and_after_an_event() {
    let (_dir, qemu, mut vm) = with_balloon();
    vm.moved = None;
    let asked = || ["query-status", "query-balloon"].map(|command| qemu.was_asked(command));
    let (before, begun) = (asked(), Instant::now());
    for _ in 0..20 {
        let sample = answered(&mut vm, Stamp(0));
        assert_eq!(sample.run, Some(RunState::Running));
        assert!(sample.balloon.is_some_and(|b| b.age_ms == 0), "its size is known");
    }
    let most = 1 + (begun.elapsed().as_millis() / RARELY.as_millis()) as usize;
    let more = [0, 1].map(|n| asked()[n] - before[n]);
    assert!(more.iter().all(|more| *more <= most), "{more:?} of 20 ticks");

    // The guest has taken in a DIMM.
    qemu.it().ram = 1536;
    hears(&mut vm, &qemu, "ACPI_DEVICE_OST");
    let sample = answered(&mut vm, Stamp(0));
    let plugged = Some(Bytes::mib(1536));
    assert_eq!((sample.ram, sample.balloon.map(|b| b.actual)), (plugged, plugged));

    qemu.it().stopped = true;
    hears(&mut vm, &qemu, "STOP");
    assert_eq!(answered(&mut vm, Stamp(0)).run, Some(RunState::Paused));
    std::thread::sleep(RARELY);
    let before = asked();
    answered(&mut vm, Stamp(0));
    assert_eq!(asked(), before.map(|n| n + 1), "and now and then without any");
}

#[test]
fn a_balloon_that_moves_is_asked_for_its_size_in_each_tick() {
    let (_dir, qemu, mut vm) = with_balloon();
    let asks = |vm: &mut Vm| {
        let before = qemu.was_asked("query-balloon");
        (0..5).for_each(|_| drop(answered(vm, Stamp(0))));
        qemu.was_asked("query-balloon") - before
    };
    vm.moved = None;
    assert!(asks(&mut vm) <= 1);
    hears(&mut vm, &qemu, BALLOON_CHANGE);
    assert_eq!(asks(&mut vm), 5, "its guest has moved it");
    vm.moved = None;
    assert!(asks(&mut vm) <= 1);
    vm.order(Bytes::mib(900), false).unwrap();
    assert_eq!(asks(&mut vm), 5, "it was ordered to move");
}

#[test]
fn what_a_guest_has_said_is_looked_at_before_it_is_asked_only_where_it_is_not_known() {
    let (_dir, qemu, mut vm) = with_balloon();
    let says = |free: u64| qemu.it().free = Some(free);
    let look = |vm: &mut Vm, at| drop(answered(vm, Stamp(at)));
    let is_looked_at = |vm: &mut Vm, at| {
        vm.kick(Stamp(at));
        let looked_at = vm.asked.iter().any(|(query, _)| *query == Query::StatsBefore);
        assert!(hear_all(vm, LONG), "QEMU does not answer");
        looked_at
    };
    says(1);
    look(&mut vm, 1_000);
    assert!(is_looked_at(&mut vm, 1_120), "nothing is known yet");
    look(&mut vm, 1_200);
    assert!(is_looked_at(&mut vm, 1_320), "its answer was not seen and may have come since");
    look(&mut vm, 1_400);
    assert!(!is_looked_at(&mut vm, 1_460), "it is idle, and its words were read a moment ago");
    says(2);
    look(&mut vm, 1_500);
    assert!(is_looked_at(&mut vm, 1_560), "this may be from before it was asked");
    says(3);
    look(&mut vm, 1_600);
    assert_eq!(vm.heard.age_ms(Stamp(1_600), 9_000_000), 40, "this is not");
    assert!(!is_looked_at(&mut vm, 1_660), "its answer was seen");
    says(4);
    look(&mut vm, 1_700);
    assert_eq!(vm.heard.age_ms(Stamp(1_700), 9_000_000), 40, "it came after it was asked");
    assert!(is_looked_at(&mut vm, 3_660), "QEMU itself has asked since");
    look(&mut vm, 3_700);
    vm.forget_stats();
    look(&mut vm, 3_800);
    assert!(is_looked_at(&mut vm, 3_910), "another kernel's answer is none");
}

/// As QEMU 7.2 tells it: virtio-mem is a part of the plugged memory and not of the balloon's size.
#[test]
fn virtio_mem_is_a_part_of_ram_and_size_and_of_no_order() {
    let (_dir, qemu, mut vm) = with_balloon();
    let sizes = |vm: &mut Vm| {
        std::thread::sleep(RARELY);
        let sample = tick(vm);
        (sample.ram.unwrap(), sample.balloon.unwrap().actual)
    };
    vm.ordered = Some(Bytes::mib(900));
    qemu.it().plugged = [512, 256, 128];
    assert_eq!(sizes(&mut vm), (Bytes::mib(1792), Bytes::mib(1792)));
    assert_eq!(vm.ordered, Some(Bytes::mib(900 + 256)), "the same size of the balloon");
    assert_eq!(tick(&mut vm).balloon.unwrap().beyond_balloon, Bytes::mib(256));
    vm.order(Bytes::mib(1700), false).unwrap();
    assert_eq!(sizes(&mut vm).0, Bytes::mib(1792));
    assert_eq!(qemu.it().orders, [1700 - 256]);
    qemu.it().plugged = [0; 3];
    assert_eq!(sizes(&mut vm), (Bytes::mib(1024), Bytes::mib(1024)));
}

#[test]
fn a_still_vm_is_not_asked_before_its_guest_speaks_again_unless_something_happens() {
    let (_dir, qemu, mut vm) = with_qemu(|_| ());
    while tick(&mut vm).balloon.is_none_or(|b| b.guest.is_none()) {}
    let asks = |vm: &mut Vm| {
        let before = qemu.was_asked(WORDS);
        let sample = tick(vm);
        assert!(sample.balloon.is_some_and(|b| b.guest.is_some()), "what is known is told");
        qemu.was_asked(WORDS) > before
    };
    let asked = (0..20).filter(|_| asks(&mut vm)).count();
    assert!(asked < 10, "{asked} of 20 ticks");
    hears(&mut vm, &qemu, BALLOON_CHANGE);
    assert!(asks(&mut vm), "its balloon has moved");
    vm.kicked = Stamp(1);
    assert!(asks(&mut vm), "its guest was asked out of turn");
    vm.stats_new = Some(Instant::now() - Duration::from_millis(1500));
    assert!(asks(&mut vm), "its guest's next words are due");
}

/// A VM of 800 MiB whose guest says nothing and whose QEMU answers no order.
fn with_slow_orders() -> (TempDir, Qemu, Vm) {
    with_qemu(|it| (it.inflated, it.free, it.holds) = (224, None, Some(ORDER)))
}

/// It answers the last order now.
fn answers_order(qemu: &Qemu) {
    let last = qemu.it().held.pop().unwrap();
    qemu.tell(&last);
}

/// Ticks until that is so.
fn until(vm: &mut Vm, what: impl Fn(&mut Vm) -> bool) -> bool {
    (0..50).any(|_| {
        tick(vm);
        what(vm)
    })
}

#[test]
fn an_order_to_shrink_is_over_when_qemu_has_answered_its_withdrawal() {
    let (_dir, qemu, mut vm) = with_slow_orders();
    assert!(until(&mut vm, |vm| vm.actual.is_some()));
    for (size, gives) in [(600, false), (800, true)] {
        let command = vm.order(Bytes::mib(size), gives).unwrap();
        vm.not_answered(command);
    }
    assert!(!until(&mut vm, |vm| !vm.shrinks(true)), "QEMU has answered neither");
    assert_eq!(qemu.it().orders, [600, 800]);
    answers_order(&qemu);
    assert!(until(&mut vm, |vm| !vm.shrinks(true)));
}

/// QEMU is asked what can write to RAM, and does not know; whether it is asked where that is.
fn round(vm: &mut Vm) -> bool {
    let mut waiting = vm.inventory.questions(Instant::now());
    let asks = waiting.iter().any(|q| q.0 == Inquiry::Tree);
    while let Some((look, ..)) = waiting.pop() {
        waiting.extend(vm.inventory.answer(look, None));
    }
    asks
}

/// An agent gives memory back only by what QEMU has told in the same tick.
#[test]
fn findings_of_an_earlier_tick_are_none_of_this() {
    let mut vm = vm("/nowhere/qmp".into());
    round(&mut vm);
    vm.findings = vm.inventory.findings();
    assert!(vm.findings.is_some());
    vm.ask(Instant::now(), Stamp(1), true);
    assert_eq!(vm.findings, None, "nothing was asked in it");
}

/// What QEMU told of RAM before says nothing of it now.
#[test]
fn after_hands_off_and_when_ram_was_plugged_qemu_is_asked_anew_where_its_ram_is() {
    let mut vm = vm("/nowhere/qmp".into());
    vm.agent = Some(AgentLink::new("/nowhere/agent".into(), std::process::id()));
    let asks_for_ram = |vm: &mut Vm| {
        let asks = round(vm);
        assert!(vm.inventory.findings().is_some());
        asks
    };
    assert!(asks_for_ram(&mut vm) && !asks_for_ram(&mut vm), "once");
    vm.access.hands_off_ms = Some(1);
    vm.ask_agent(Instant::now(), false, (None, false));
    vm.access.hands_off_ms = None;
    assert!(asks_for_ram(&mut vm));
    // A shared socket tells no events.
    for (dimm, anew) in [(Bytes::gib(1), true), (Bytes::gib(1), false), (Bytes::ZERO, true)] {
        vm.plugged(dimm, Bytes::ZERO);
        assert_eq!(asks_for_ram(&mut vm), anew, "{dimm}");
    }
}

/// Merging, zero pages and the tier go by what a sample tells.
#[test]
fn of_an_agent_that_is_not_used_a_sample_tells_only_while_it_may_be_at_work() {
    let mut vm = vm("/nowhere/qmp".into());
    vm.agent = Some(AgentLink::new("/nowhere/agent".into(), std::process::id()));
    let tells = |vm: &mut Vm| vm.sample(Stamp(1), 0, &mut Vec::new()).agent.is_some();
    assert!(tells(&mut vm));
    (vm.access.agent, vm.access.agent_then) = (AgentUse::Off, AgentUse::Off);
    assert!(tells(&mut vm), "of an earlier daemon");
    vm.ask_agent(Instant::now() + Duration::from_secs(60), false, (None, false));
    assert!(!tells(&mut vm));
    vm.access.agent_then = AgentUse::On;
    assert!(tells(&mut vm), "its metadata is not read yet");
}

#[test]
fn an_order_of_an_earlier_daemon_or_connection_is_withdrawn() {
    let (_dir, qemu, mut vm) = with_slow_orders();
    let withdrawn = |vm: &mut Vm| {
        // It does not grow.
        vm.grew = None;
        vm.withdraw(Instant::now());
        !vm.shrinks(true)
    };
    assert!(vm.shrinks(true) && !vm.shrinks(false), "only of one that is owed something");
    assert!(!until(&mut vm, withdrawn));
    assert_eq!(qemu.it().orders, [800], "once");
    answers_order(&qemu);
    assert!(until(&mut vm, withdrawn));
    assert_eq!(qemu.it().orders, [800]);
    // The connection is lost with an order on its way.
    let command = vm.order(Bytes::mib(600), false).unwrap();
    vm.not_answered(command);
    vm.forget_connection();
    eventually(|| qemu.it().client.is_none());
    qemu.it().orders.clear();
    assert!(!until(&mut vm, withdrawn));
    assert_eq!(qemu.it().orders, [800]);
    answers_order(&qemu);
    assert!(until(&mut vm, withdrawn));
}

/// One that is not managed is reached only to have its statistics' interval put back.
#[test]
fn a_qemu_that_does_not_answer_is_connected_to_once_for_its_interval() {
    let (_dir, listener, path) = socket();
    listener.set_nonblocking(true).unwrap();
    let mut vm = vm(path);
    vm.access.managed = false;
    // As after a connection that was lost.
    (vm.interval_was, vm.device) = (Some(7), Some("b".into()));
    (0..5).for_each(|_| vm.ask(Instant::now(), Stamp(0), false));
    assert_eq!(std::iter::from_fn(|| listener.accept().ok()).count(), 1);
    assert_eq!(vm.interval_was, Some(7));
}

#[test]
fn a_vm_that_has_lost_its_balloon_has_no_interval_to_be_put_back() {
    let (_dir, _qemu, mut vm) = with_balloon();
    (vm.device, vm.interval_was, vm.access.managed) = (None, Some(7), false);
    tick(&mut vm);
    assert_eq!((vm.interval_was, vm.client.is_none()), (None, true));
}

#[test]
fn a_vm_to_which_no_way_leads_is_let_be_once_its_interval_is_put_back() {
    let why = "its monitor is libvirt's".to_owned();
    let mut vm = vm("/nonexistent".into());
    let access = vm.access;
    vm.process.args.qmp = QmpAddress::None { why: why.clone() };
    vm.interval_was = Some(0);
    vm.allow(access);
    assert!(vm.may_ask_libvirt() && vm.access.look_only, "nothing else is set");
    vm.interval_was = None;
    assert!(!vm.may_ask_libvirt());
    let sample = tick(&mut vm);
    assert_eq!((sample.let_be, sample.link), (true, Link::Down(why)));
    vm.allow(Access { libvirt: true, ..access });
    assert!(vm.may_ask_libvirt() && vm.access.managed && !vm.access.look_only);
}

#[test]
fn ram_is_in_a_pool_of_huge_pages_by_what_the_kernel_counts() {
    let mut vm = vm("/nonexistent".into());
    vm.ram = Some(Bytes::gib(4));
    let mut is_in_pool = |hugepages, hugetlb| {
        vm.process.args.hugepages = hugepages;
        vm.memory =
            Some(ProcessMemory { hugetlb: Bytes::gib(hugetlb), ..ProcessMemory::default() });
        let sample = tick(&mut vm);
        assert_eq!(sample.pinned.is_some(), sample.in_pool || hugepages);
        sample.in_pool
    };
    assert!(is_in_pool(true, 4));
    assert!(!is_in_pool(true, 1), "an object of another purpose is there");
    assert!(is_in_pool(false, 4), "its command line does not tell");
    assert!(!is_in_pool(false, 0));
}
