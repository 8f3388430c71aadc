//! The bridge between commands and calls, without a libvirt.

use serde_json::json;

use super::*;
use crate::libvirt::xdr::Writer;

const XML: &str = "<domain><devices><memballoon model='virtio' autodeflate='on'>\
                   <stats period='2'/><alias name='balloon0'/></memballoon></devices></domain>";

fn domain() -> Domain {
    Domain { name: "a".into(), uuid: [1; 16], id: 4 }
}

/// What [`calls::looked_up`] reads.
fn found(id: i32) -> Vec<u8> {
    Writer::default().text("a").fixed(&[1; 16]).i32(id).done()
}

/// The size of a balloon, KiB, and that no job is under way.
fn size(kib: u64) -> Vec<u8> {
    Writer::default().u32(1).u32(6).u64(kib).done()
}

fn no_job() -> Vec<u8> {
    Writer::default().i32(0).u32(0).done()
}

/// The next call is this one; its answer.
fn call(b: &mut Bridge, expected: calls::Procedure, answer: Result<Vec<u8>, Refused>, at: Instant) {
    let (purpose, (procedure, _)) = b.next_call(at).unwrap();
    assert_eq!(procedure, expected);
    b.answered(purpose, answer, at);
}

/// One that was greeted long ago.
fn scene() -> (Bridge, Instant) {
    let now = Instant::now();
    (greeted(false, now), now)
}

fn greeted(monitor: bool, now: Instant) -> Bridge {
    greeted_at(monitor, now - 2 * MOVES)
}

fn greeted_at(monitor: bool, now: Instant) -> Bridge {
    let mut b = Bridge::new("a".into(), monitor);
    let (purpose, (procedure, _)) = b.next_call(now).unwrap();
    assert_eq!((&purpose, procedure), (&Purpose::LookUp, calls::LOOK_UP));
    b.answered(purpose, Ok(found(4)), now);
    let (purpose, _) = b.next_call(now).unwrap();
    assert_eq!((&purpose, b.output.is_empty()), (&Purpose::Describe, true));
    b.answered(purpose, Ok(Writer::default().text(XML).done()), now);
    assert!(said(&mut b)[0].get("QMP").is_some());
    b
}

fn said(b: &mut Bridge) -> Vec<Value> {
    let bytes = std::mem::take(&mut b.output);
    bytes.split(|c| *c == b'\n').filter_map(|l| serde_json::from_slice(l).ok()).collect()
}

fn tell(b: &mut Bridge, commands: &[Value], now: Instant) {
    let lines: String = commands.iter().map(|c| format!("{c}\n")).collect();
    b.feed(lines.as_bytes(), now);
}

fn ask(id: u64, command: &str) -> Value {
    json!({ "execute": command, "id": id })
}

fn order(id: u64, mib: u64) -> Value {
    json!({ "execute": "balloon", "arguments": { "value": mib << 20 }, "id": id })
}

fn set_interval(id: u64, seconds: u64) -> Value {
    let set = json!({ "path": "/x", "property": INTERVAL, "value": seconds });
    json!({ "execute": "qom-set", "arguments": set, "id": id })
}

fn numbers(current: u64) -> Numbers {
    let all = [
        ("state.state", 1),
        ("balloon.current", current),
        ("balloon.maximum", 1024),
        ("balloon.rss", 1),
    ];
    all.map(|(name, n)| (name.to_string(), n)).into()
}

/// No call is made for a domain that was held up, and only statistics tell that it is not any more.
#[test]
fn statistics_are_asked_for_again_while_a_domain_that_is_held_up_has_a_question() {
    let start = Instant::now();
    let mut b = greeted_at(false, start);
    let ms = |n| start + Duration::from_millis(n);
    tell(&mut b, &[ask(1, "query-status"), ask(2, "query-balloon")], ms(10));
    b.heard_stats(ms(11), [("state.state".to_string(), 1)].into(), ms(12));
    assert_eq!(said(&mut b).len(), 1, "only how it runs is known");
    assert!(!b.has_call());
    assert_eq!(b.bulk_at(), Some(ms(11) + TRIED_EVERY));
    b.heard_stats(ms(600), numbers(512), ms(601));
    assert!(b.has_call() && b.bulk_at().is_none());
}

#[test]
fn questions_of_a_tick_are_answered_by_one_look_at_all_domains() {
    let (mut b, now) = scene();
    let all = ["query-status", "query-balloon", "query-memory-size-summary"];
    tell(&mut b, &[ask(1, all[0]), ask(2, all[1])], now);
    assert!(b.bulk_at() == Some(now) && !b.has_call() && b.output.is_empty());
    b.heard_stats(now + Duration::from_millis(2), numbers(512), now);
    let answers = said(&mut b);
    assert_eq!(answers[0], json!({ "id": 1, "return": { "status": "running" } }));
    assert_eq!(answers[1], json!({ "id": 2, "return": { "actual": 512 << 10 } }));
    tell(&mut b, &[ask(3, all[2])], now + Duration::from_millis(10));
    let size = json!({ "base-memory": 1 << 20, "plugged-memory": 0 });
    assert_eq!(said(&mut b)[0]["return"], size, "of the same tick");
    tell(&mut b, &[ask(4, all[1])], now + Duration::from_millis(500));
    let next = Some(now + Duration::from_millis(500));
    assert!(b.bulk_at() == next && b.output.is_empty(), "the next tick asks anew");
}

/// Ebb's own call has the domain's job while libvirt looks at all domains.
#[test]
fn a_domain_that_ebbs_own_call_held_up_is_asked_again_at_once() {
    let start = Instant::now();
    let ms = |n| start + Duration::from_millis(n);
    let state = || Numbers::from([("state.state".to_string(), 1)]);
    for ended_before in [false, true] {
        let mut b = greeted_at(false, start);
        let all = [ask(1, "query-status"), ask(2, "query-balloon")];
        tell(&mut b, &all, ms(10));
        tell(&mut b, &[ask(3, "query-memory-size-summary")], ms(10));
        let (purpose, (procedure, _)) = b.next_call(ms(10)).unwrap();
        assert_eq!(procedure, calls::MEMORY_STATS);
        if ended_before {
            b.answered(purpose, Ok(size(512 << 10)), ms(13));
            b.heard_stats(ms(12), state(), ms(14));
        } else {
            b.heard_stats(ms(12), state(), ms(13));
            b.answered(purpose, Ok(size(512 << 10)), ms(14));
        }
        assert_eq!(said(&mut b).len(), 2, "how it runs and its size");
        assert_eq!(b.bulk_at(), Some(ms(10)), "at once");
        b.heard_stats(ms(15), state(), ms(16));
        assert_eq!(b.bulk_at(), Some(ms(15) + TRIED_EVERY), "another's call holds it up");
    }
}

/// Its guest deflates while libvirt looks at all domains.
#[test]
fn a_size_from_before_a_move_answers_no_question() {
    let start = Instant::now();
    let ms = |n| start + Duration::from_millis(n);
    let mut b = greeted(false, start);
    b.heard_stats(ms(1), numbers(400 << 10), ms(2));
    tell(&mut b, &[ask(1, "query-balloon")], ms(500));
    b.event(&domain(), Event::Balloon(450 << 10), ms(501));
    said(&mut b);
    b.heard_stats(ms(500), numbers(410 << 10), ms(502));
    assert!(b.output.is_empty());
    call(&mut b, calls::MEMORY_STATS, Ok(size(460 << 10)), ms(503));
    assert_eq!(said(&mut b), [json!({ "id": 1, "return": { "actual": 460 << 20 } })]);
}

/// libvirt held the first one for half a minute: each of the others would wait as long.
#[test]
fn orders_that_wait_behind_a_refused_one_are_refused_and_the_domains_job_is_asked_for() {
    let (mut b, now) = scene();
    tell(&mut b, &[ask(1, "query-migrate")], now);
    call(&mut b, calls::JOB, Ok(no_job()), now);
    tell(&mut b, &[order(2, 300), order(3, 400), set_interval(4, 2), order(5, 500)], now);
    said(&mut b);
    let (purpose, _) = b.next_call(now).unwrap();
    tell(&mut b, &[ask(6, "query-migrate")], now);
    said(&mut b);
    tell(&mut b, &[ask(7, "query-migrate")], now + JOB_EVERY);
    let busy = Refused { code: 68, message: "cannot acquire state change lock".into() };
    b.answered(purpose, Err(busy), now + JOB_EVERY);
    let refused: Vec<Value> = said(&mut b).iter().map(|s| s["id"].clone()).collect();
    assert_eq!(refused, [2, 3, 5]);
    let (purpose, _) = b.next_call(now + JOB_EVERY).unwrap();
    assert!(matches!(purpose, Purpose::Period(..)), "{purpose:?}");
    let (purpose, _) = b.next_call(now + JOB_EVERY).unwrap();
    assert!(matches!(purpose, Purpose::Job(_)), "{purpose:?}");
    // An answer that took long is one.
    b.answered(purpose, Ok(no_job()), now + 3 * JOB_EVERY);
    assert_eq!(said(&mut b), [json!({ "id": 7, "return": {} })]);
}

#[test]
fn after_an_order_its_size_is_asked_of_qemu_and_libvirts_word_is_too_old() {
    let (mut b, now) = scene();
    tell(&mut b, &[order(7, 300), ask(8, "query-balloon")], now);
    let (purpose, (procedure, arguments)) = b.next_call(now).unwrap();
    assert_eq!((&purpose, procedure), (&Purpose::Order(json!(7)), calls::SET_MEMORY));
    assert_eq!((procedure, arguments), calls::set_memory(&domain(), 300 << 10));
    b.answered(purpose, Ok(Vec::new()), now);
    assert_eq!(said(&mut b), [json!({ "id": 7, "return": {} })]);
    // libvirt has not heard yet that the balloon moves.
    b.heard_stats(now, numbers(512 << 10), now);
    assert!(b.output.is_empty());
    call(&mut b, calls::MEMORY_STATS, Ok(size(400 << 10)), now);
    assert_eq!(said(&mut b), [json!({ "id": 8, "return": { "actual": 400 << 20 } })]);
}

#[test]
fn the_first_size_is_asked_of_qemu() {
    let now = Instant::now();
    let mut b = greeted_at(false, now);
    tell(&mut b, &[ask(1, "query-balloon")], now);
    b.heard_stats(now, numbers(143 << 10), now);
    assert!(b.output.is_empty(), "libvirt has not heard yet that it was given back");
    call(&mut b, calls::MEMORY_STATS, Ok(size(512 << 10)), now);
    assert_eq!(said(&mut b), [json!({ "id": 1, "return": { "actual": 512 << 20 } })]);
}

#[test]
fn to_ask_a_guest_on_the_spot_has_qemu_ask_it_every_second_from_then_on() {
    let (mut b, now) = scene();
    let set = |b: &mut Bridge, commands: &[Value]| -> Option<Request> {
        tell(b, commands, now);
        let (purpose, request) = b.next_call(now)?;
        b.answered(purpose, Ok(Vec::new()), now);
        Some(request)
    };
    let period = |seconds| Some(calls::set_period(&domain(), seconds));
    assert_eq!(set(&mut b, &[set_interval(0, 2)]), period(2));
    assert_eq!(set(&mut b, &[set_interval(1, 0), set_interval(2, 2)]), period(1));
    assert_eq!(set(&mut b, &[set_interval(3, 0), set_interval(4, 2)]), None, "it does already");
    assert_eq!(said(&mut b).len(), 5);
    tell(&mut b, &[set_interval(3, 0)], now);
    // As it was before Ebb.
    call(&mut b, calls::SET_PERIOD, Ok(Vec::new()), now);
    assert_eq!(said(&mut b), [json!({ "id": 3, "return": {} })]);
}

/// virt-manager sets 5 s.
#[test]
fn a_guest_is_asked_every_second_again_where_another_program_has_set_a_longer_period() {
    let (mut b, now) = scene();
    let kick = |b: &mut Bridge| {
        tell(b, &[set_interval(1, 0), set_interval(2, 2)], now);
        let (purpose, request) = b.next_call(now)?;
        b.answered(purpose, Ok(Vec::new()), now);
        Some(request)
    };
    let quick = Some(calls::set_period(&domain(), 1));
    assert_eq!((kick(&mut b), kick(&mut b)), (quick.clone(), None));
    b.event(&domain(), Event::Described, now);
    tell(&mut b, &[ask(3, "query-memory-devices")], now);
    let xml = XML.replace("period='2'", "period='5'");
    call(&mut b, calls::DESCRIBE, Ok(Writer::default().text(&xml).done()), now);
    assert_eq!((kick(&mut b), kick(&mut b)), (quick, None));
}

#[test]
fn after_memory_was_plugged_no_size_is_answered_before_the_new_description() {
    let (mut b, now) = scene();
    b.heard_stats(now, numbers(400 << 10), now);
    let later = now + Duration::from_secs(1);
    tell(&mut b, &[ask(1, "query-balloon"), ask(2, "query-memory-size-summary")], later);
    let maximum = ("balloon.maximum".to_string(), 2048);
    b.heard_stats(later, numbers(400 << 10).into_iter().chain([maximum]).collect(), later);
    assert!(b.output.is_empty() && b.has_call());
    call(&mut b, calls::DESCRIBE, Ok(Writer::default().text(XML).done()), later);
    assert_eq!(said(&mut b)[0]["return"], json!({ "actual": 400 << 20 }));
}

/// libvirt's figures are those of libvirt 9.0, in KiB.
#[test]
fn virtio_mem_is_told_apart_from_what_the_balloon_holds() {
    let (mut b, now) = scene();
    let asked = [ask(1, "query-balloon"), ask(2, "query-memory-size-summary")];
    let stats = |current, maximum| {
        let all = [("balloon.current".to_string(), current), (MAXIMUM.to_string(), maximum)];
        numbers(0).into_iter().chain(all).collect::<Numbers>()
    };
    b.heard_stats(now, stats(400 << 10, 512 << 10), now);
    // Plugged at once: 128 of 256 MiB.
    let look = |b: &mut Bridge, at: Instant, plugged: u64, described: bool| {
        tell(b, &asked, at);
        b.heard_stats(at, stats((400 + plugged) << 10, 768 << 10), at);
        while let Some((purpose, (procedure, _))) = b.next_call(at) {
            let answer = match procedure {
                calls::DESCRIBE => {
                    assert!(described, "it is read again only where something was plugged");
                    let device = format!(
                        "<devices><memory model='virtio-mem'><target><size>262144</size>\
                         <current>{}</current></target></memory>",
                        plugged << 10
                    );
                    Writer::default().text(&XML.replace("<devices>", &device)).done()
                }
                // What QEMU says is the balloon's alone.
                calls::MEMORY_STATS => size(400 << 10),
                other => panic!("{other:?}"),
            };
            b.answered(purpose, Ok(answer), at);
        }
        tell(b, &[ask(3, "query-memory-devices")], at);
        let answers = said(b);
        let of = |id| answers.iter().find(|a| a["id"] == id).unwrap()["return"].clone();
        assert_eq!(of(1), json!({ "actual": 400 << 20 }));
        assert_eq!(of(2), json!({ "base-memory": 512 << 20, "plugged-memory": plugged << 20 }));
        assert_eq!(of(3)[0], json!({ "type": "virtio-mem", "data": { "size": plugged << 20 } }));
    };
    let second = Duration::from_secs(1);
    look(&mut b, now + second, 128, true);
    look(&mut b, now + 2 * second, 128, true);
    look(&mut b, now + 3 * second, 128, false);
    look(&mut b, now + 4 * second, 256, true);
}

/// libvirt counts it in the domain's maximum. What the balloon holds is as before.
#[test]
fn an_nvdimm_that_is_plugged_is_no_ram() {
    let (mut b, now) = scene();
    let stats = |maximum| {
        let all = [("balloon.current".to_string(), 400 << 10), (MAXIMUM.to_string(), maximum)];
        numbers(0).into_iter().chain(all).collect::<Numbers>()
    };
    b.heard_stats(now, stats(512 << 10), now);
    let at = now + Duration::from_secs(1);
    tell(&mut b, &[ask(2, "query-memory-size-summary")], at);
    b.heard_stats(at, stats(768 << 10), at);
    while let Some((purpose, (procedure, _))) = b.next_call(at) {
        let device =
            "<devices><memory model='nvdimm'><target><size>262144</size></target></memory>";
        let answer = match procedure {
            calls::DESCRIBE => Writer::default().text(&XML.replace("<devices>", device)).done(),
            calls::MEMORY_STATS => size(400 << 10),
            other => panic!("{other:?}"),
        };
        b.answered(purpose, Ok(answer), at);
    }
    tell(&mut b, &[ask(3, "query-memory-size-summary")], at);
    let answers = said(&mut b);
    for id in [2, 3] {
        let answer = &answers.iter().find(|a| a["id"] == id).unwrap()["return"];
        assert_eq!(*answer, json!({ "base-memory": 512 << 20, "plugged-memory": 0 }), "{id}");
    }
}

#[test]
fn the_interval_is_looked_up_anew_each_time() {
    let now = Instant::now();
    let mut b = greeted(false, now - Duration::from_secs(1));
    let get = json!({ "path": "/x", "property": INTERVAL });
    tell(&mut b, &[json!({ "execute": "qom-get", "arguments": get, "id": 1 })], now);
    // Another program may have set it.
    let xml = XML.replace("period='2'", "period='10'");
    call(&mut b, calls::DESCRIBE, Ok(Writer::default().text(&xml).done()), now);
    assert_eq!(said(&mut b), [json!({ "id": 1, "return": 10 })]);
}

#[test]
fn only_a_domain_that_is_tainted_has_qemu_asked_through_libvirt() {
    let (mut b, now) = scene();
    let command = ask(1, "query-named-block-nodes");
    tell(&mut b, std::slice::from_ref(&command), now);
    assert!(said(&mut b)[0]["error"]["desc"].as_str().unwrap().contains("not asked this"));
    assert!(!b.has_call());
    let mut b = greeted(true, now);
    tell(&mut b, &[command], now);
    let answer = Writer::default().text("{\"return\":[5],\"id\":\"libvirt-9\"}").done();
    call(&mut b, calls::MONITOR, Ok(answer), now);
    assert_eq!(said(&mut b), [json!({ "id": 1, "return": [5] })]);
}

#[test]
fn a_domain_that_stops_or_starts_anew_is_left() {
    let (mut b, now) = scene();
    let other = Domain { uuid: [2; 16], ..domain() };
    b.event(&other, Event::Lifecycle(5), now);
    assert_eq!(b.over.as_deref(), None);
    b.event(&domain(), Event::Lifecycle(3), now);
    assert_eq!(said(&mut b)[0]["event"], "STOP");
    b.event(&Domain { id: -1, ..domain() }, Event::Lifecycle(5), now);
    assert_eq!(b.over.as_deref(), Some("the domain has stopped"));
    let mut b = Bridge::new("a".into(), false);
    call(&mut b, calls::LOOK_UP, Ok(found(-1)), now);
    assert!(b.over.as_deref().unwrap().contains("does not run"));
}

#[test]
fn a_refused_call_is_an_error_to_its_question_alone() {
    let (mut b, now) = scene();
    tell(&mut b, &[ask(1, "query-migrate"), ask(2, "query-status")], now);
    call(&mut b, calls::JOB, Err(Refused { code: 68, message: "busy".into() }), now);
    assert_eq!(said(&mut b)[0]["error"]["desc"], "busy");
    assert_eq!((b.over.as_deref(), b.bulk_at()), (None, Some(now)));
}

#[test]
fn what_libvirt_says_without_qemu_is_no_size() {
    let (mut b, now) = scene();
    tell(&mut b, &[ask(1, "query-status"), ask(2, "query-balloon"), ask(3, "query-migrate")], now);
    let mut busy = numbers(512);
    busy.remove("balloon.rss");
    b.heard_stats(now, busy, now);
    assert_eq!(said(&mut b).len(), 1, "whether it runs");
    assert_eq!(b.bulk_at(), Some(now + TRIED_EVERY), "libvirt is not asked without end");
    assert!(!b.has_call(), "a call would wait as well");
    b.heard_stats(now, numbers(512), now);
    assert_eq!(said(&mut b)[0]["return"], json!({ "actual": 512 << 10 }));
    assert!(b.has_call());
}

#[test]
fn what_a_guest_does_not_tell_any_more_is_forgotten() {
    let (mut b, now) = scene();
    let stats = json!({ "path": "/x", "property": STATS });
    let question = |id| json!({ "execute": "qom-get", "arguments": stats, "id": id });
    tell(&mut b, &[question(1)], now);
    let mut told = numbers(512);
    told.insert("balloon.usable".into(), 100);
    told.insert("balloon.last-update".into(), 5);
    b.heard_stats(now, told.clone(), now);
    let available = |b: &mut Bridge| said(b)[0]["return"]["stats"]["stat-available-memory"].clone();
    assert_eq!(available(&mut b), json!(100 << 10));
    told.remove("balloon.usable");
    let later = now + Duration::from_secs(1);
    tell(&mut b, &[question(2)], later);
    b.heard_stats(later, told, later);
    assert_eq!(available(&mut b), json!(-1));
}

#[test]
fn a_domain_that_is_saved_takes_no_order_and_one_that_is_backed_up_does() {
    // `VIR_DOMAIN_JOB_OPERATION_SAVE`, `_BACKUP`.
    for (operation, takes) in [(2, false), (9, true)] {
        let (mut b, now) = scene();
        tell(&mut b, &[ask(1, "query-migrate")], now);
        let job = Writer::default().i32(2).u32(1).text("operation").u32(1).i32(operation);
        call(&mut b, calls::JOB, Ok(job.done()), now);
        let status = said(&mut b)[0]["return"]["status"].clone();
        assert_eq!(status, if takes { Value::Null } else { json!("active") });
        tell(&mut b, &[order(2, 1)], now);
        let refused = said(&mut b);
        let why = refused.first().and_then(|said| said["error"]["desc"].as_str());
        assert_eq!(why.is_some_and(|why| why.contains("saves, migrates")), !takes);
        assert_eq!(b.has_call(), takes);
    }
}
