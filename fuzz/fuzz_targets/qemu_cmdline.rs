//! Any command line: no panic, names and lists within their limits, and an
//! address is either paths or a reason.
#![no_main]

use ebb_host::probe::qemu::{QmpAddress, parse_cmdline};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = parse_cmdline(data);
    let line = [b"qemu-system-x86_64\0", data].concat();
    let args = parse_cmdline(&line).expect("the program is QEMU");
    if let Some(name) = args.name {
        assert!(name.chars().count() <= 255 && !name.chars().any(char::is_control));
    }
    if let Some(why) = &args.pinned {
        assert!(why.chars().count() <= 160 && !why.chars().any(char::is_control));
    }
    match args.qmp {
        QmpAddress::Paths(paths) => assert!(!paths.is_empty() && paths.len() <= 8),
        QmpAddress::None { why } => assert!(!why.is_empty()),
    }
});
