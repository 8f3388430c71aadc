//! How well a VM can be heard: whether QMP answers and its guest tells its numbers.
//!
//! A VM that does not report cannot be given memory in time. One that fell silent
//! is given what it may need as far as the host has it, and when it is heard again it
//! is not asked for some time: the next silence may come while it is small.
//!
//! Where most VMs are silent at the same time, the cause is taken to be the host's or libvirt's.
//! When that is over, none is given anything for it, and each may be asked at once. If each were
//! given all that it is owed, the host would be full. A VM that stays silent after that is silent
//! by itself from then on.

use serde::{Deserialize, Serialize};

use super::LOOK_MS;
use crate::units::{Stamp, doubled};

/// A VM counts as silent after this time, beyond the life of its last numbers.
const SILENT_MS: u64 = 5_000;
/// How long it is not asked to give after that, at first and at most.
const PAUSE_MS: (u64, u64) = (120_000, 3_600_000);
/// If at least this many VMs are silent, and they are most, their silence has one cause.
const SHARED_LEAST: usize = 3;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// Its guest has spoken since it booted.
    pub spoke: bool,
    /// How long it was not heard while it was listened to, milliseconds.
    pub silent_ms: u64,
    /// Most VMs are silent with it.
    #[serde(default)]
    pub shared: bool,
    /// Not asked to give until then, because it was not heard for a while.
    pub until: Option<Stamp>,
    pub count: u32,
}

impl Contact {
    /// Listens for `dt_ms`. `heard`: it answers and its numbers are fresh.
    pub(super) fn observe(&mut self, at: Stamp, dt_ms: u64, heard: bool) {
        if !heard {
            if self.spoke {
                self.silent_ms += dt_ms.min(LOOK_MS);
            }
            return;
        }
        if self.is_silent() && !self.shared {
            self.until = Some(at.plus(self.pause()));
            self.count = (self.count + 1).min(16);
        } else if self.until.is_some_and(|t| at.since(t) >= self.pause()) {
            (self.until, self.count) = (None, 0);
        }
        (self.spoke, self.silent_ms, self.shared) = (true, 0, false);
    }

    /// It spoke, and has not been heard for a while.
    fn is_silent(&self) -> bool {
        self.spoke && self.silent_ms >= SILENT_MS
    }

    fn pause(&self) -> u64 {
        doubled(PAUSE_MS, self.count)
    }

    /// Its guest reboots: that it says nothing is no silence.
    pub(super) fn forget_guest(&mut self) {
        (self.spoke, self.silent_ms, self.shared) = (false, 0, false);
    }

    /// It is not listened to: that it says nothing is no silence any more.
    pub(super) fn rest(&mut self) {
        (self.silent_ms, self.shared) = (0, false);
    }

    /// What is left of the pause, milliseconds.
    pub fn left_ms(&self, at: Stamp) -> Option<u64> {
        self.until.map(|t| t.since(at)).filter(|left| *left > 0)
    }

    /// Why it should have what it may need although it shows no need, for people;
    /// empty where it can be heard.
    pub fn unseen(&self, at: Stamp) -> String {
        if self.silent_ms >= SILENT_MS {
            "its guest has fallen silent: what it needs cannot be seen".into()
        } else if self.left_ms(at).is_some() {
            format!("it was not heard for a while, {} times lately", self.count)
        } else {
            String::new()
        }
    }
}

/// Notes whether most of these VMs share a silence. One that stays silent when most are heard again
/// begins a silence of its own.
pub(super) fn compare(all: &mut [&mut Contact]) {
    let spoke = all.iter().filter(|r| r.spoke).count();
    let silent = all.iter().filter(|r| r.is_silent()).count();
    if silent >= SHARED_LEAST && 2 * silent > spoke {
        all.iter_mut().filter(|r| r.is_silent()).for_each(|r| r.shared = true);
    } else {
        let own = all.iter_mut().filter(|r| r.shared);
        own.for_each(|r| (r.silent_ms, r.shared) = (0, false));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(contact: &mut Contact, from_s: u64, to_s: u64, heard: bool) {
        for s in from_s..to_s {
            contact.observe(Stamp(s * 1000), 1000, heard);
        }
    }

    #[test]
    fn who_was_silent_is_left_alone_twice_as_long_each_time_and_forgiven() {
        let mut r = Contact::default();
        live(&mut r, 0, 60, false);
        assert_eq!((r.silent_ms, r.unseen(Stamp(60_000))), (0, String::new()), "never spoke");
        live(&mut r, 60, 70, true);
        live(&mut r, 70, 74, false);
        live(&mut r, 74, 80, true);
        assert_eq!(r.until, None, "a hiccup");
        live(&mut r, 80, 90, false);
        assert!(r.unseen(Stamp(90_000)).contains("silent"), "{r:?}");
        live(&mut r, 90, 100, true);
        assert_eq!(r.left_ms(Stamp(100_000)), Some(110_000));
        live(&mut r, 100, 110, false);
        live(&mut r, 110, 111, true);
        assert_eq!((r.left_ms(Stamp(110_000)), r.count), (Some(240_000), 2));
        live(&mut r, 111, 350, true);
        assert!(r.unseen(Stamp(349_000)).contains("2 times"));
        assert_eq!(Contact { count: 9, ..r }.pause(), PAUSE_MS.1);
        live(&mut r, 350, 2000, true);
        assert_eq!(r, Contact { spoke: true, ..Contact::default() });
    }

    #[test]
    fn a_loop_that_did_not_listen_has_heard_no_silence() {
        let mut r = Contact::default();
        r.observe(Stamp(0), 1000, true);
        r.observe(Stamp(60_000), 60_000, false);
        assert_eq!(r.silent_ms, LOOK_MS);
        r.forget_guest();
        live(&mut r, 61, 90, false);
        assert_eq!(r.silent_ms, 0, "it boots");
    }

    /// Of `all` VMs that spoke, `missed` are not heard for ten seconds; how many are left alone then.
    fn left_alone(missed: usize, all: usize) -> usize {
        let mut vms = vec![Contact::default(); all];
        for s in 0..20u64 {
            for (i, r) in vms.iter_mut().enumerate() {
                r.observe(Stamp(s * 1000), 1000, i >= missed || !(5..15).contains(&s));
            }
            compare(&mut vms.iter_mut().collect::<Vec<_>>());
        }
        vms.iter().filter(|r| r.left_ms(Stamp(20_000)).is_some()).count()
    }

    #[test]
    fn a_silence_that_most_share_is_held_against_none() {
        assert_eq!([1, 2, 3, 4].map(|missed| left_alone(missed, 4)), [1, 2, 0, 0]);
        let few = [(1, 1), (2, 2), (2, 3)].map(|(missed, all)| left_alone(missed, all));
        assert_eq!(few, [1, 2, 2], "too few to tell");
        let mut three = [Contact::default(); 3];
        for s in 0..40u64 {
            for (i, r) in three.iter_mut().enumerate() {
                r.observe(Stamp(s * 1000), 1000, s < 5 || s >= 15 && (i > 0 || s >= 30));
            }
            compare(&mut three.iter_mut().collect::<Vec<_>>());
        }
        let left = three.map(|r| r.left_ms(Stamp(40_000)).is_some());
        assert_eq!(left, [true, false, false], "the first is silent by itself for 15 s more");
        let mut new = [Contact::default(); 3];
        compare(&mut new.iter_mut().collect::<Vec<_>>());
        assert!(new.iter().all(|r| !r.shared), "none has spoken");
    }
}
