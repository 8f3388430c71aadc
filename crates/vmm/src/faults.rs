//! Steps of the handshake left out on purpose, so that tests show each is needed.
//!
//! Without the cargo feature `faults` there is nothing to leave out: every
//! question is answered with a constant `false`.

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    #[cfg(feature = "faults")]
    bits: u32,
}

/// A question that is `false` in every build that people run.
macro_rules! fault {
    ($name:ident, $bit:expr, $what:literal) => {
        #[doc = $what]
        #[inline]
        pub fn $name(self) -> bool {
            #[cfg(feature = "faults")]
            return self.bits & (1 << $bit) != 0;
            #[cfg(not(feature = "faults"))]
            false
        }
    };
}

impl Faults {
    fault!(no_protect, 0, "Step 1 is left out.");
    fault!(no_reread, 1, "Step 2 is left out: the first reading is believed.");
    fault!(no_unpopulated, 2, "Absent pages cannot be protected.");
    fault!(no_tripwire, 3, "Page 0 is not watched.");
    fault!(no_challenge, 4, "Whatever looks like a header is believed.");
    fault!(any_page, 5, "Pages are taken whether or not the host holds them.");
    fault!(wide, 6, "The time between reading and discarding is longer.");
    fault!(no_doubt, 7, "State, generation and tripwire are not looked at again.");
    fault!(no_turns, 8, "Discards of the VMM's own do not wait for the window.");
    fault!(no_apart, 9, "What is open to KSM is recycled too.");
    fault!(no_devices, 10, "Devices are not looked for in a window.");
    fault!(no_beats, 11, "A map is used although its beat stands still.");
    fault!(wider, 13, "The same, long enough for a disk.");
    fault!(late_wire, 14, "Of several tripwires the first is not armed.");
    fault!(no_doors, 15, "Wires stay where a device that pins memory may be opened.");
    fault!(no_flush, 16, "What one pass found waits for a window of the next.");
    fault!(no_self_test, 12, "The kernel does not have to prove that it keeps protection.");

    /// By the names of the questions, with `+` between them.
    #[cfg(feature = "faults")]
    pub fn parse(text: &str) -> Option<Faults> {
        const NAMES: [&str; 17] = [
            "no_protect",
            "no_reread",
            "no_unpopulated",
            "no_tripwire",
            "no_challenge",
            "any_page",
            "wide",
            "no_doubt",
            "no_turns",
            "no_apart",
            "no_devices",
            "no_beats",
            "no_self_test",
            "wider",
            "late_wire",
            "no_doors",
            "no_flush",
        ];
        let mut bits = 0;
        for name in text.split('+').filter(|n| !n.is_empty()) {
            bits |= 1 << NAMES.iter().position(|n| *n == name)?;
        }
        Some(Faults { bits })
    }

    pub fn widen(self) {
        if self.wide() {
            std::thread::sleep(std::time::Duration::from_micros(300));
        }
        if self.wider() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
