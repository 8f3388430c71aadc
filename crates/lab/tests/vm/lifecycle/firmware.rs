//! The moment after a reset in which SeaBIOS has moved itself to the end of low RAM, and has
//! not come to guest page 0 yet. The guest is stopped right there by QEMU's debugger, and
//! the agent is asked for all that the old map calls free.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;

/// QEMU's debugger, over its own protocol (GDB's remote serial protocol).
struct Debugger {
    stream: UnixStream,
}

impl Debugger {
    /// Stops the guest.
    fn connect(path: &Path) -> Debugger {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(MINUTE)).unwrap();
        let mut debugger = Debugger { stream };
        debugger.send("?");
        assert!(debugger.answer().starts_with('T'));
        debugger
    }

    fn send(&mut self, packet: &str) {
        let sum = packet.bytes().fold(0u8, u8::wrapping_add);
        self.stream.write_all(format!("${packet}#{sum:02x}").as_bytes()).unwrap();
    }

    /// The next packet, which is acknowledged.
    fn answer(&mut self) -> String {
        let mut next = || {
            let mut byte = [0];
            self.stream.read_exact(&mut byte).unwrap();
            byte[0]
        };
        while next() != b'$' {}
        let packet: Vec<u8> =
            std::iter::repeat_with(&mut next).take_while(|b| *b != b'#').collect();
        let _checksum = [next(), next()];
        self.stream.write_all(b"+").unwrap();
        String::from_utf8(packet).unwrap()
    }

    /// That the guest has stopped may be told between question and answer.
    fn ask(&mut self, packet: &str) {
        self.send(packet);
        let told = std::iter::repeat_with(|| self.answer()).find(|a| !a.starts_with('T'));
        assert_eq!(told.as_deref(), Some("OK"), "{packet}");
    }
}

/// Where SeaBIOS moves itself to, by what it says: address and size.
fn moved_to(log: &Path) -> (u64, u64) {
    let text = std::fs::read_to_string(log).unwrap();
    let line = text.lines().find(|l| l.contains("Relocating init from")).expect("SeaBIOS's word");
    let to = line.split(" to 0x").nth(1).unwrap();
    let (address, rest) = to.split_once(" (size ").unwrap();
    let size = rest.trim_end_matches(')').parse().unwrap();
    (u64::from_str_radix(address, 16).unwrap(), size)
}

/// Resets a guest, stops it when SeaBIOS has moved, has the agent give back all that the old
/// map calls free, and goes on. Whether the guest boots within this time, and what was given
/// back.
fn boots(faults: &str, within: Duration) -> (bool, Bytes) {
    let dir = tempfile::tempdir().unwrap();
    let (debugger, log) = (dir.path().join("gdb"), dir.path().join("seabios"));
    let mut guest = Guest::boot_with_faults(Kernel::V6_12, faults, |c| {
        c.args.extend(["-gdb".into(), format!("unix:{},server=on,wait=off", debugger.display())]);
        c.args.extend(["-chardev".into(), format!("file,id=log,path={}", log.display())]);
        c.args.extend(["-device".into(), "isa-debugcon,iobase=0x402,chardev=log".into()]);
    });
    let (address, size) = moved_to(&log);
    guest.insmod();
    let mut agent = attached(&guest.vm, &guest.socket);
    agent.wait_ready(MINUTE).unwrap();
    let mut debugger = Debugger::connect(&debugger);
    let last = format!("{:x},8", address + size - 8);
    debugger.ask(&format!("Z2,{last}"));
    guest.vm.qmp("system_reset", None).unwrap();
    debugger.send("c");
    let stopped =
        std::iter::repeat_with(|| debugger.answer()).take(3).find(|a| a.contains("watch"));
    assert!(stopped.is_some(), "SeaBIOS did not come by");
    let all = Recycle { budget_ms: 3000, huge: HugePages::Split, ..Recycle::default() };
    let done = agent.recycle(all, SOON).map_or(Bytes::ZERO, |done| done.bytes);
    let seen = agent.status(false, SOON).unwrap();
    println!("{faults:?}: {done} given back, {:?} {:?}", seen.why, seen.wires);
    debugger.ask(&format!("z2,{last}"));
    debugger.ask("D");
    let up = guest.vm.wait_ready_within(within);
    (up.is_ok(), done)
}

#[test]
fn vm_when_seabios_has_moved_itself_the_old_map_is_dropped_and_without_tripwires_it_is_used() {
    let _arena = held();
    // The beat alone would stop it too, a moment later.
    assert_eq!(boots("no_beats", MINUTE), (true, Bytes::ZERO));
    // Page 0 alone does here: it is written to before SeaBIOS writes anything.
    if seconds() >= 60 {
        assert_eq!(boots("no_beats+late_wire", MINUTE), (true, Bytes::ZERO));
    }
    let (_, given) = boots("no_beats+no_tripwire", Duration::ZERO);
    assert!(given > Bytes::ZERO, "nothing is given back: this shows nothing");
}
