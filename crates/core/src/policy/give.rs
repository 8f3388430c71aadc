//! Two-phase giving: how much of what guests in distress wish for is granted now.
//!
//! A wish has three parts. What keeps a guest from harm is granted whatever the
//! host's state: the host's reserve is there for it, and at worst the host swaps,
//! which is slow where the guest's OOM killer is deadly. Beyond headroom and swap
//! nothing is granted: there the host's own OOM killer would take a whole VM.
//! What makes it comfortable
//! comes from headroom above the mark of critical, everything else from headroom
//! above the reserve. What does not fit is deferred: others are squeezed for it at
//! once, and it is granted as what they freed shows up as headroom. Memory that was
//! granted and not touched yet counts as spent, so that no byte is granted twice.

use crate::model::{HostModel, Pressure};
use crate::units::Bytes;

/// What share of the reserve comfort does not touch: the mark of critical.
const KEPT: f64 = 0.25;
/// What share of the reserve nothing touches: the host must live.
const LAST: f64 = 0.1;

/// What a guest in distress is to have, as sizes that never fall.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wish {
    /// Its size, or the one it is growing to.
    pub from: Bytes,
    /// Without this it is harmed.
    pub urgent: Bytes,
    /// So much it is to have in any case: others are squeezed for it.
    pub well: Bytes,
    /// So much is good for it, where the host has it.
    pub comfort: Bytes,
    /// All that it is owed.
    pub all: Bytes,
    /// What it has left, to serve the poorest first.
    pub left: Bytes,
}

/// What it gets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Grant {
    /// The size to order now.
    pub to: Bytes,
    /// What it is to have and does not get yet.
    pub deferred: Bytes,
}

/// Divides the host's headroom among the wishes; grants in their order.
pub fn grant(host: &HostModel, wishes: &[Wish]) -> Vec<Grant> {
    let mut grants: Vec<Grant> =
        wishes.iter().map(|w| Grant { to: w.from, ..Grant::default() }).collect();
    let free = if host.known { host.headroom } else { Bytes(u64::MAX) };
    let mut order: Vec<usize> = (0..wishes.len()).collect();
    order.sort_by_key(|i| (wishes[*i].left, *i));
    let mut serve = |mut room: Bytes, upto: fn(&Wish) -> Bytes| {
        let mut used = Bytes::ZERO;
        for i in &order {
            let more = (upto(&wishes[*i]) - grants[*i].to).min(room);
            grants[*i].to += more;
            room = room - more;
            used += more;
        }
        used
    };
    let left = free - host.outstanding;
    let spent = serve(left + host.swap_left - host.reserve.share(LAST), |w| w.urgent);
    let room = |kept: Bytes| left - kept - spent;
    let comfort = serve(room(host.reserve.share(KEPT)), |w| w.comfort);
    if host.state <= Pressure::Soft {
        serve(room(host.reserve) - comfort, |w| w.all);
    }
    for (g, w) in grants.iter_mut().zip(wishes) {
        g.deferred = w.well - g.to;
    }
    grants
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(headroom: u64) -> HostModel {
        HostModel {
            known: true,
            headroom: Bytes::mib(headroom),
            reserve: Bytes::mib(1000),
            ..HostModel::default()
        }
    }

    fn wish(left: u64) -> Wish {
        Wish {
            from: Bytes::mib(400),
            urgent: Bytes::mib(500),
            well: Bytes::mib(800),
            comfort: Bytes::mib(800),
            all: Bytes::mib(2000),
            left: Bytes::mib(left),
        }
    }

    fn sizes(host: &HostModel, wishes: &[Wish]) -> Vec<(u64, u64)> {
        grant(host, wishes).iter().map(|g| (g.to.0 >> 20, g.deferred.0 >> 20)).collect()
    }

    #[test]
    fn everything_at_once_from_headroom() {
        assert_eq!(sizes(&host(10_000), &[wish(0)]), [(2000, 0)]);
        let unknown = HostModel { known: false, ..host(0) };
        assert_eq!(sizes(&unknown, &[wish(0)]), [(2000, 0)], "giving goes on");
    }

    #[test]
    fn what_keeps_from_harm_is_granted_whatever_the_host_has() {
        let swaps = HostModel { swap_left: Bytes::gib(1), ..host(0) };
        assert_eq!(sizes(&swaps, &[wish(0)]), [(500, 300)]);
        assert_eq!(sizes(&host(200), &[wish(0)]), [(500, 300)], "not from the last tenth");
    }

    #[test]
    fn what_neither_headroom_nor_swap_covers_would_cost_a_whole_vm() {
        assert_eq!(sizes(&host(160), &[wish(0)]), [(460, 340)]);
        assert_eq!(sizes(&host(0), &[wish(0)]), [(400, 400)]);
        assert_eq!(sizes(&host(210), &[wish(9), wish(1)]), [(410, 390), (500, 300)]);
    }

    #[test]
    fn comfort_stops_at_the_mark_of_critical_and_the_rest_at_the_reserve() {
        // 250 are kept, 100 are the urgent part's.
        assert_eq!(sizes(&host(450), &[wish(0)]), [(600, 200)]);
        assert_eq!(sizes(&host(900), &[wish(0)]), [(800, 0)]);
        assert_eq!(sizes(&host(1500), &[wish(0)]), [(900, 0)], "100 above the reserve are left");
        let hard = HostModel { state: Pressure::Hard, ..host(5000) };
        assert_eq!(sizes(&hard, &[wish(0)]), [(800, 0)]);
    }

    #[test]
    fn nothing_is_granted_twice() {
        let spent = HostModel { outstanding: Bytes::mib(200), ..host(650) };
        assert_eq!(sizes(&spent, &[wish(0)]), sizes(&host(450), &[wish(0)]));
    }

    #[test]
    fn the_poorest_is_served_first_and_nobody_harmed() {
        assert_eq!(sizes(&host(550), &[wish(9), wish(1)]), [(500, 300), (600, 200)]);
    }
}
