//! A record from somebody else: any ticks that parse are decided without panic,
//! and no plan orders a guest below its floor or above its RAM.
#![no_main]

use ebb_core::config::Config;
use ebb_core::plan::Reason;
use ebb_core::tick::{Engine, Tick};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut engine = Engine::new(Config::default(), false);
    for line in data.split(|b| *b == b'\n').take(20) {
        let Ok(mut recorded) = serde_json::from_slice::<Tick>(line) else { continue };
        // A host's samples are sorted and unique by id.
        recorded.sample.vms.sort_by_key(|v| v.id);
        recorded.sample.vms.dedup_by_key(|v| v.id);
        let (tick, model) = engine.replay(&recorded);
        for a in &tick.plan.actions {
            let vm = model.vms.iter().find(|v| v.id == a.vm).unwrap();
            assert!(a.to >= vm.floor || a.to >= a.from || a.reason == Reason::Withdrawn);
            assert!(vm.ram.is_none_or(|r| a.to <= r || a.to <= a.from));
        }
    }
});
