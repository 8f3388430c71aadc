//! Steps of the handshake left out on purpose, so that tests show each is needed.
//!
//! Without the cargo feature `faults` there is nothing to leave out: every
//! question is answered with a constant `false`.

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    #[cfg(feature = "faults")]
    bits: u32,
}

/// Questions that are `false` in every build that people run.
macro_rules! faults {
    ($($name:ident: $what:literal;)*) => {
        #[cfg(feature = "faults")]
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        #[cfg(feature = "faults")]
        #[expect(non_camel_case_types)]
        enum Bit { $($name),* }

        impl Faults {
            $(
                #[doc = $what]
                #[inline]
                pub fn $name(self) -> bool {
                    #[cfg(feature = "faults")]
                    return self.bits & (1 << Bit::$name as u32) != 0;
                    #[cfg(not(feature = "faults"))]
                    false
                }
            )*
        }
    };
}

faults! {
    no_protect: "Step 1 is left out.";
    no_reread: "Step 2 is left out: the first reading is believed.";
    no_unpopulated: "Absent pages cannot be protected.";
    no_tripwire: "Page 0 is not watched.";
    no_challenge: "Whatever looks like a header is believed.";
    any_page: "Pages are taken whether or not the host holds them.";
    wide: "The time between reading and discarding is longer.";
    wider: "The same, long enough for a disk.";
    no_doubt: "State, generation and tripwire are not looked at again.";
    no_turns: "Discards of the VMM's own do not wait for the window.";
    no_apart: "What is open to KSM is recycled too.";
    no_close: "What is recycled of open ranges counts as closed and is not.";
    no_devices: "Devices are not looked for in a window.";
    no_beats: "A map is used although its beat stands still.";
    no_self_test: "The kernel does not have to prove that it keeps protection.";
    late_wire: "Of several tripwires the first is not armed.";
    no_device_watch: "Tripwires stay where a device that pins memory may be opened.";
    no_early: "What may be written before a tripwire is given back, too.";
    zero_wire: "A tripwire is relied on although its page is zero.";
    no_late_beat: "The challenge is written without a beat since the tripwires were armed.";
    no_state: "The challenge is written to a module that says that it has stopped.";
    no_look_at_wires: "Tripwires are not looked at: KSM may have taken their protection.";
    moved_ram: "RAM is not looked at again before it is registered.";
    no_flush: "What one pass found waits for a window of the next.";
}

impl Faults {
    /// By the names of the questions, with `+` between them; `None`: this build has no such.
    pub fn parse(text: &str) -> Option<Faults> {
        #[cfg(feature = "faults")]
        {
            let bit = |name| NAMES.iter().position(|n| *n == name);
            let mut names = text.split('+').filter(|n| !n.is_empty());
            names.try_fold(0, |bits, name| Some(bits | 1 << bit(name)?)).map(|bits| Faults { bits })
        }
        #[cfg(not(feature = "faults"))]
        text.is_empty().then(Faults::default)
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
