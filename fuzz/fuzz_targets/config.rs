//! The configuration file: any text is a configuration within its bounds, or an
//! error that names the file.
#![no_main]

use ebb_core::config::{Config, User};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match Config::parse("file", text) {
        Ok(c) => {
            assert!(c.fast_tick_ms <= c.tick_ms && c.fast_tick_ms >= 100);
            for user in &c.users {
                match user {
                    User::Uid(uid) => assert!(*uid < u32::MAX),
                    User::Name(name) => assert!(!name.is_empty() && !name.contains([':', '\n'])),
                }
            }
            for name in c.vms.keys() {
                let uuid = name.strip_prefix("uuid:");
                assert!(uuid.is_none_or(|uuid| uuid.len() == 36));
                assert_eq!(c.section(name, uuid), c.vms.get(name));
            }
            for vm in c.vms.values().chain([&c.defaults]) {
                assert!(vm.weight.is_finite() && vm.weight > 0.0);
            }
        }
        Err(e) => assert!(e.to_string().starts_with("file")),
    }
});
