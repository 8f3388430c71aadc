//! The handshake as a model: every interleaving of a guest's page, the host's
//! steps and, where asked for, a reset, checked for a lost write. With each step
//! left out the checker finds one; that is how we know it looks.
//!
//! One page is enough: the host treats pages alike and independently, and a
//! window that holds several is lifted later than it had to be, never earlier.
//! Steps are single memory accesses or system calls; both sides order theirs
//! (the guest's clear is visible before its write, `protect` returns after every
//! CPU sees it), so interleaving them is all there is.

use std::collections::HashSet;

/// What is left out.
#[derive(Clone, Copy, Debug, Default)]
struct Without {
    protect: bool,
    reread: bool,
    unpopulated: bool,
    tripwire: bool,
    /// The check of "tripped" after the second reading.
    doubt: bool,
    /// The state word is read before the bits instead of after them.
    order: bool,
    /// What is open to KSM is not taken out of recycling.
    apart: bool,
    /// It is opened, or recycled again, without waiting for the other to end.
    handover: bool,
}

/// What the world may do besides allocating and freeing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum World {
    Plain,
    /// The page may be gone by the time it is protected (swapped, zapped).
    Absent,
    /// Free page reporting: the guest takes the page out (bit clear), QEMU
    /// discards it, the guest puts it back. In anonymous memory that discard
    /// takes our protection with it; in shared memory it stays. With `turns` it
    /// waits for the open window, as it does where our `madvise` is QEMU's.
    Reports {
        shared: bool,
        turns: bool,
    },
    /// The daemon opens the page to KSM and closes it again; KSM merges it while it is
    /// open, and protection goes.
    Merges,
    /// A reset: page 0 is written, then the page is used, its bit still set.
    Reset,
    /// The module leaves: the state word, then the map page is used for bits of
    /// anything (they all read as set), and the page is in use.
    Unload,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Guest {
    Free,
    /// The bit is clear, nothing was written.
    Cleared,
    /// It holds data that somebody wants back.
    Written,
    /// Taken out, to be discarded by QEMU.
    Reported,
    /// Reset: page 0 is to be written.
    Firmware,
    /// Unload: the word is out, the map is still as it was.
    Leaving,
    /// In use, and never tells again.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Host {
    Idle,
    Chosen,
    Protected,
    /// What the second reading said, and whether the map may still be used.
    Reread {
        free: bool,
        good: Option<bool>,
    },
    Discarded,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    guest: Guest,
    host: Host,
    bit: bool,
    protected: bool,
    present: bool,
    /// KSM may look at it; and it is left out of recycling.
    open: bool,
    apart: bool,
    /// What the page reads as; `true`: the guest's data.
    data: bool,
    wants_data: bool,
    running: bool,
    tripped: bool,
    /// The map was dropped for good.
    dropped: bool,
}

const START: State = State {
    guest: Guest::Free,
    host: Host::Idle,
    bit: true,
    protected: false,
    present: true,
    open: false,
    apart: false,
    data: false,
    wants_data: false,
    running: true,
    tripped: false,
    dropped: false,
};

fn guest_steps(s: State, world: World, without: Without, out: &mut Vec<State>) {
    let write =
        |s: State, next| State { guest: next, data: true, wants_data: true, present: true, ..s };
    match s.guest {
        Guest::Free => {
            out.push(State { guest: Guest::Cleared, bit: false, ..s });
            match world {
                World::Absent if matches!(s.host, Host::Idle | Host::Chosen) => {
                    out.push(State { present: false, ..s });
                }
                World::Reports { .. } => {
                    out.push(State { guest: Guest::Reported, bit: false, ..s });
                }
                World::Reset => out.push(State { guest: Guest::Firmware, ..s }),
                World::Unload => out.push(State { guest: Guest::Leaving, running: false, ..s }),
                World::Absent | World::Plain | World::Merges => {}
            }
        }
        Guest::Reported => {
            let World::Reports { shared, turns } = world else { return };
            if turns && !matches!(s.host, Host::Idle | Host::Chosen) {
                return;
            }
            let protected = s.protected && shared;
            let (data, present) = (false, false);
            out.push(State { guest: Guest::Free, bit: true, protected, data, present, ..s });
        }
        // A write to a protected page waits.
        Guest::Cleared if !s.protected => out.push(write(s, Guest::Written)),
        Guest::Written => {
            out.push(State { guest: Guest::Free, bit: true, wants_data: false, ..s });
            if world == World::Unload {
                out.push(State { guest: Guest::Leaving, running: false, ..s });
            }
        }
        // The write to page 0 marks the map, then waits for the open window.
        Guest::Firmware if without.tripwire => out.push(State { guest: Guest::Other, ..s }),
        Guest::Firmware if !s.tripped => out.push(State { tripped: true, ..s }),
        Guest::Firmware if matches!(s.host, Host::Idle | Host::Chosen) => {
            out.push(State { guest: Guest::Other, ..s });
        }
        Guest::Leaving => out.push(State { guest: Guest::Other, bit: true, ..s }),
        Guest::Other if !s.protected => out.push(write(s, Guest::Other)),
        _ => {}
    }
}

/// The agent is one thread: it opens and closes between windows, out of recycling
/// before open, and closed before recycled. KSM does what it does at any time.
fn merge_steps(s: State, without: Without, out: &mut Vec<State>) {
    if s.open && s.protected {
        out.push(State { protected: false, ..s });
    }
    if !without.handover && !matches!(s.host, Host::Idle) {
        return;
    }
    match (s.apart, s.open) {
        (false, false) => out.push(State { apart: true, open: without.apart, ..s }),
        (true, false) => {
            out.push(State { open: true, ..s });
            out.push(State { apart: false, ..s });
        }
        (true, true) => out.push(State { open: false, ..s }),
        (false, true) => {}
    }
}

fn host_steps(s: State, without: Without, out: &mut Vec<State>) {
    let good = |s: &State| s.running && (!s.tripped || without.doubt || without.tripwire);
    let idle = State { host: Host::Idle, protected: false, ..s };
    match s.host {
        Host::Idle if s.bit && !s.dropped && (!s.apart || without.apart) => {
            out.push(State { host: Host::Chosen, ..s });
        }
        // The window opens only while the map is not marked as dropped.
        Host::Chosen if s.tripped && !without.tripwire && !without.doubt => {
            out.push(State { dropped: true, ..idle });
        }
        Host::Chosen => {
            let sticks = !without.protect && (s.present || !without.unpopulated);
            out.push(State { host: Host::Protected, protected: sticks, ..s });
        }
        Host::Protected if without.order => {
            // Word first, bits later.
            out.push(State { host: Host::Reread { free: false, good: Some(good(&s)) }, ..s });
        }
        Host::Protected => {
            let free = s.bit || without.reread;
            out.push(State { host: Host::Reread { free, good: None }, ..s });
        }
        Host::Reread { free, good: None } => {
            let host = Host::Reread { free, good: Some(good(&s)) };
            out.push(State { host, ..s });
        }
        Host::Reread { free, good: Some(good) } => {
            let free = if without.order { s.bit } else { free };
            if good && free {
                let (data, present) = (false, false);
                out.push(State { host: Host::Discarded, data, present, protected: false, ..s });
            } else {
                out.push(State { dropped: s.dropped || !good, ..idle });
            }
        }
        Host::Discarded => out.push(idle),
        Host::Idle => {}
    }
}

/// The first way to lose a write, if there is one, and how many states there are.
fn check(world: World, without: Without) -> (Option<Vec<State>>, usize) {
    let mut seen = HashSet::from([START]);
    let mut ways = vec![vec![START]];
    while let Some(way) = ways.pop() {
        let s = way[way.len() - 1];
        if s.wants_data && !s.data {
            return (Some(way), seen.len());
        }
        let mut next = Vec::new();
        guest_steps(s, world, without, &mut next);
        host_steps(s, without, &mut next);
        if world == World::Merges {
            merge_steps(s, without, &mut next);
        }
        // Nobody waits for ever: whatever waits, somebody else can go on.
        assert!(!next.is_empty(), "stuck: {way:?}");
        for n in next {
            if seen.insert(n) {
                ways.push([&way[..], &[n]].concat());
            }
        }
    }
    (None, seen.len())
}

#[test]
fn no_interleaving_loses_a_write() {
    let shared = World::Reports { shared: true, turns: false };
    let turns = World::Reports { shared: false, turns: true };
    let worlds = [World::Plain, World::Absent, shared, turns, World::Reset, World::Unload];
    for world in worlds.into_iter().chain([World::Merges]) {
        let (lost, states) = check(world, Without::default());
        assert!(lost.is_none(), "{world:?}: {lost:#?}");
        println!("{world:?}: {states} states");
        assert!(states > 10);
    }
}

#[test]
fn each_step_left_out_is_found() {
    let none = Without::default();
    for (world, without) in [
        (World::Plain, Without { protect: true, ..none }),
        (World::Plain, Without { reread: true, ..none }),
        (World::Absent, Without { unpopulated: true, ..none }),
        (World::Reset, Without { tripwire: true, ..none }),
        (World::Reset, Without { doubt: true, ..none }),
        (World::Unload, Without { order: true, ..none }),
        (World::Merges, Without { apart: true, ..none }),
        (World::Merges, Without { handover: true, ..none }),
    ] {
        let (lost, _) = check(world, without);
        assert!(lost.is_some(), "{world:?} {without:?}: nothing was found");
    }
}

/// Why the agent stands aside from anonymous RAM that QEMU discards pages of too,
/// if it cannot have QEMU wait: the page may be reported, come back and be written
/// to between the second reading and the discard.
#[test]
fn reporting_and_recycling_anonymous_memory_go_together_in_turns_only() {
    let world = World::Reports { shared: false, turns: false };
    let (lost, _) = check(world, Without::default());
    assert!(lost.is_some());
}
