//! Giving in parts: how much of what guests in distress wish for is granted now.
//!
//! A wish has three parts. The first keeps a guest from harm. It is granted whatever the host's
//! state: the host's reserve is there for it, and at worst the host swaps, which is slow where the
//! guest's OOM killer is deadly. Beyond headroom and the swap that these guests may use nothing is
//! granted: there the host's own OOM killer, or their cgroup's, would take a whole VM. The second
//! makes a guest comfortable and comes from headroom above the mark of critical. The third comes
//! from headroom above what the host keeps. A host may keep more than its reserve: while tasks
//! stall, for VMs that have just started, and for others than VMs. One that is clear or soft gives
//! of that too, down to the reserve. What does not fit is deferred: others are squeezed for it at once, and it is
//! granted as what they freed shows up as headroom. A guest that is given more than the first part
//! takes all that it had before, too: it pays for what the host does not hold of that yet. What a
//! guest was granted lately and has not touched counts as spent.
//!
//! Where there is not enough for all, each gets as much of what it cannot live without; the rest is
//! divided by weight, and what one does not want falls to the others. Of swap one guest gets half
//! at most, where others want some too.

use crate::units::Bytes;

/// What share of the reserve the second part does not touch: the mark of critical.
const KEPT: f64 = 0.25;
/// What share of the reserve nothing touches: the host must live.
pub(super) const LAST: f64 = 0.1;
/// What one guest may draw from swap at once, where it is not the only one.
const SWAP_SHARE: f64 = 0.5;

/// What a guest in distress is to have, as sizes that never fall.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wish {
    /// Its size, or the one it is growing to.
    pub from: Bytes,
    /// What of that the host does not hold yet, nor swap.
    pub untouched: Bytes,
    /// What it may not hold beside that: a VMM may hold more itself than was seen.
    pub in_doubt: Bytes,
    /// What it was given lately and has not touched, and what of that it will touch in a moment.
    pub outstanding: Bytes,
    pub spoken_for: Bytes,
    /// Without this it cannot live: half a short mark above its need.
    pub bare: Bytes,
    /// With the first part. Without this it is harmed.
    pub first: Bytes,
    /// What it is to have in any case: others are squeezed for it.
    pub due: Bytes,
    /// With the second part: what it is to have where the host has more than the mark of critical.
    pub second: Bytes,
    /// With the third part: what it is likely to need again, where the host has more than it keeps.
    pub third: Bytes,
    /// The largest of these sizes.
    pub all: Bytes,
    pub weight: f64,
    /// It is not short: it is only likely to need that.
    pub is_likely: bool,
}

impl Wish {
    /// The wish, none of its sizes above `most`.
    pub fn up_to(self, most: Bytes) -> Wish {
        let [bare, first, due, second, third, all] =
            [self.bare, self.first, self.due, self.second, self.third, self.all]
                .map(|size| size.min(most));
        Wish { bare, first, due, second, third, all, ..self }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Grant {
    /// The size to order now.
    pub to: Bytes,
    /// What it is to have and does not get yet.
    pub deferred: Bytes,
}

/// What there is to give to some guests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fund {
    /// What can be had without harm; `None`: not known.
    pub headroom: Option<Bytes>,
    /// Swap that they may use, as the memory that this frees.
    pub swap_left: Bytes,
    /// What is to be kept.
    pub reserve: Bytes,
    /// Given to others lately and not touched yet.
    pub outstanding: Bytes,
    /// What of it will be touched in a moment.
    pub spoken_for: Bytes,
    /// What the host keeps of its headroom where no guest is in need; it may be more than the
    /// reserve.
    pub keep: Bytes,
    /// The host is clear or soft: it gives down to the reserve.
    pub calm: bool,
}

/// Divides what there is among the wishes; grants in their order.
pub fn grant(fund: &Fund, wishes: &[Wish]) -> Vec<Grant> {
    let to: Vec<Bytes> = wishes.iter().map(|w| w.from).collect();
    let mut parts = Parts { wishes, unpaid: vec![Bytes::ZERO; to.len()], to };
    let all = Bytes(u64::MAX);
    let there = fund.headroom.unwrap_or(all);
    let spoken_for = fund.spoken_for + wishes.iter().map(|w| w.spoken_for).sum();
    let left = there - spoken_for;
    let last = fund.reserve.share(LAST);
    let equally = |_: &Wish| 1.0;
    let by_weight = |w: &Wish| w.weight;
    let mut spent = parts.serve(left - last, all, equally, |w| w.bare);
    spent += parts.serve(left - last - spent, all, by_weight, |w| w.first);
    // What of the last tenth and of what was given before is missing, swap covers first.
    let swap = fund.swap_left - ((last + spoken_for) - there);
    let alone = wishes.len() == 1;
    let most = if alone { all } else { swap.share(SWAP_SHARE) };
    spent += parts.serve(swap, most, equally, |w| w.first);
    // From here on each pays for what it has not touched.
    parts.unpaid = untouched(fund, wishes);
    // Those that are only likely to need more come after those that are short: what they pay would
    // be gone.
    let seconds: [fn(&Wish) -> Bytes; 2] =
        [|w| if w.is_likely { w.from } else { w.second }, |w| w.second];
    for second in seconds {
        let left = there - fund.spoken_for - parts.not_taken(second, |w| w.spoken_for);
        spent += parts.serve(left - fund.reserve.share(KEPT) - spent, all, by_weight, second);
    }
    let left = there - fund.outstanding - parts.not_taken(|w| w.third, |w| w.outstanding);
    spent += parts.serve(left - fund.keep - spent, all, by_weight, |w| w.third);
    if fund.calm {
        // All is the second part or the third (`wish` in `balloon.rs`). So more is given here only
        // where `keep` is more than the reserve.
        parts.serve(left - fund.reserve - spent, all, by_weight, |w| w.all);
    }
    let grant = |(w, to): (&Wish, Bytes)| Grant { to, deferred: w.due - to };
    wishes.iter().zip(parts.to).map(grant).collect()
}

/// What each may not have touched of its size. Too much of it, and a guest gets less of the
/// second part. Too little where there is no swap, and the kernel kills a VM.
fn untouched(fund: &Fund, wishes: &[Wish]) -> Vec<Bytes> {
    let in_doubt: Bytes = wishes.iter().map(|w| w.in_doubt).sum();
    let not_by_swap = (in_doubt - fund.swap_left).fraction_of(in_doubt);
    wishes.iter().map(|w| w.untouched + w.in_doubt.share(not_by_swap)).collect()
}

/// How far the wishes are granted.
struct Parts<'a> {
    wishes: &'a [Wish],
    to: Vec<Bytes>,
    /// What each has to pay before it is given more.
    unpaid: Vec<Bytes>,
}

impl Parts<'_> {
    /// Brings all up to a size as far as there is room, none by more than `most`; returns what that
    /// takes.
    fn serve(
        &mut self,
        room: Bytes,
        most: Bytes,
        weight: fn(&Wish) -> f64,
        upto: fn(&Wish) -> Bytes,
    ) -> Bytes {
        let want = |(i, w): (usize, &Wish)| match (upto(w) - self.to[i]).min(most) {
            Bytes(0) => (Bytes::ZERO, weight(w)),
            more => (more + self.unpaid[i], weight(w)),
        };
        let wants: Vec<(Bytes, f64)> = self.wishes.iter().enumerate().map(want).collect();
        let parts = fair(room, &wants);
        for (i, part) in parts.iter().enumerate() {
            let paid = self.unpaid[i].min(*part);
            self.unpaid[i] = self.unpaid[i] - paid;
            self.to[i] += *part - paid;
        }
        parts.into_iter().sum()
    }

    /// What counts as spent of those that want no more and have not paid.
    fn not_taken(&self, upto: fn(&Wish) -> Bytes, spent: fn(&Wish) -> Bytes) -> Bytes {
        let all = self.wishes.iter().zip(&self.to).zip(&self.unpaid);
        let done = all.filter(|((w, to), _)| upto(w) <= **to);
        done.map(|((w, _), unpaid)| spent(w).min(*unpaid)).sum()
    }
}

/// Parts of `room` by weight, none larger than what is wanted; what one does not want
/// falls to the others.
fn fair(room: Bytes, wants: &[(Bytes, f64)]) -> Vec<Bytes> {
    let mut parts = vec![Bytes::ZERO; wants.len()];
    let mut left = room;
    let mut open: Vec<usize> = (0..wants.len()).collect();
    // The least wish for its weight is satisfied first.
    let each = |i: &usize| wants[*i].0.0 as f64 / wants[*i].1.max(f64::MIN_POSITIVE);
    open.sort_by(|a, b| each(a).total_cmp(&each(b)));
    let mut weights: f64 = wants.iter().map(|w| w.1).sum();
    for i in open {
        let (want, weight) = wants[i];
        let part = left.share((weight / weights).min(1.0)).min(want);
        parts[i] = part;
        left = left - part;
        weights -= weight;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fund(headroom: u64) -> Fund {
        Fund {
            headroom: Some(Bytes::mib(headroom)),
            reserve: Bytes::mib(1000),
            swap_left: Bytes::ZERO,
            outstanding: Bytes::ZERO,
            spoken_for: Bytes::ZERO,
            keep: Bytes::mib(250),
            calm: true,
        }
    }

    fn wish(weight: f64) -> Wish {
        Wish {
            from: Bytes::mib(400),
            untouched: Bytes::ZERO,
            in_doubt: Bytes::ZERO,
            outstanding: Bytes::ZERO,
            spoken_for: Bytes::ZERO,
            bare: Bytes::mib(420),
            first: Bytes::mib(500),
            due: Bytes::mib(800),
            second: Bytes::mib(800),
            third: Bytes::mib(800),
            all: Bytes::mib(2000),
            weight,
            is_likely: false,
        }
    }

    fn sizes(fund: &Fund, wishes: &[Wish]) -> Vec<(u64, u64)> {
        let mib = |b: Bytes| (b.0 + (1 << 19)) >> 20;
        grant(fund, wishes).iter().map(|g| (mib(g.to), mib(g.deferred))).collect()
    }

    #[test]
    fn everything_at_once_from_headroom() {
        assert_eq!(sizes(&fund(10_000), &[wish(1.0)]), [(2000, 0)]);
        let unknown = Fund { headroom: None, ..fund(0) };
        assert_eq!(sizes(&unknown, &[wish(1.0)]), [(2000, 0)], "giving goes on");
    }

    #[test]
    fn what_keeps_from_harm_is_granted_whatever_the_host_has() {
        let swaps = Fund { swap_left: Bytes::gib(1), ..fund(0) };
        assert_eq!(sizes(&swaps, &[wish(1.0)]), [(500, 300)]);
        assert_eq!(sizes(&fund(200), &[wish(1.0)]), [(500, 300)], "not from the last tenth");
    }

    #[test]
    fn what_neither_headroom_nor_swap_covers_would_cost_a_whole_vm() {
        assert_eq!(sizes(&fund(160), &[wish(1.0)]), [(460, 340)]);
        assert_eq!(sizes(&fund(0), &[wish(1.0)]), [(400, 400)]);
        let swap = Fund { swap_left: Bytes::mib(130), ..fund(40) };
        assert_eq!(sizes(&swap, &[wish(1.0)]), [(470, 330)], "60 are missing to the last tenth");
    }

    #[test]
    fn what_guests_live_by_is_divided_equally_and_the_rest_by_weight() {
        let both = [wish(10.0), wish(1.0)];
        assert_eq!(sizes(&fund(130), &both), [(415, 385), (415, 385)], "what they live by");
        assert_eq!(sizes(&fund(195), &both), [(470, 330), (425, 375)]);
        assert_eq!(sizes(&fund(265), &both), [(500, 300), (465, 335)], "one wants no more");
        // 250 are kept, 200 are the first parts.
        assert_eq!(sizes(&fund(560), &both), [(600, 200), (510, 290)]);
        let (bare, first) = (Bytes::mib(410), Bytes::mib(410));
        let small = Wish { bare, first, ..wish(1.0) };
        assert_eq!(sizes(&fund(210), &[wish(1.0), small]), [(500, 300), (410, 390)]);
    }

    #[test]
    fn of_swap_one_guest_gets_half_at_most_where_others_are_short_too() {
        let hog = Wish { first: Bytes::mib(2000), due: Bytes::mib(2000), ..wish(1.0) };
        let swap = Fund { swap_left: Bytes::mib(1100), ..fund(0) };
        assert_eq!(sizes(&swap, &[hog, wish(1.0)]), [(900, 1100), (500, 300)]);
        assert_eq!(sizes(&swap, &[hog]), [(1400, 600)]);
    }

    #[test]
    fn the_second_part_stops_at_the_mark_of_critical_and_the_rest_at_the_reserve() {
        // 250 are kept, 100 are the first part's.
        assert_eq!(sizes(&fund(450), &[wish(1.0)]), [(600, 200)]);
        assert_eq!(sizes(&fund(900), &[wish(1.0)]), [(800, 0)]);
        assert_eq!(sizes(&fund(1500), &[wish(1.0)]), [(900, 0)], "100 above the reserve");
        let hard = Fund { calm: false, ..fund(5000) };
        assert_eq!(sizes(&hard, &[wish(1.0)]), [(800, 0)]);
    }

    #[test]
    fn a_calm_host_that_keeps_more_than_its_reserve_gives_down_to_the_reserve() {
        let more = Wish { third: Bytes::mib(1900), all: Bytes::mib(1900), ..wish(1.0) };
        let keeps = |calm| Fund { keep: Bytes::mib(1500), calm, ..fund(2000) };
        assert_eq!(sizes(&keeps(false), &[more]), [(900, 0)], "500 MiB above what it keeps");
        assert_eq!(sizes(&keeps(true), &[more]), [(1400, 0)], "1000 MiB above the reserve");
    }

    #[test]
    fn nothing_is_granted_twice() {
        let spent = Fund { outstanding: Bytes::mib(200), spoken_for: Bytes::mib(200), ..fund(650) };
        assert_eq!(sizes(&spent, &[wish(1.0)]), sizes(&fund(450), &[wish(1.0)]));
        // What lies idle can be had again: it is nobody's reason to wait, but no surplus.
        let idle = Fund { outstanding: Bytes::mib(1000), ..fund(2000) };
        let more = Wish { third: Bytes::mib(1900), ..wish(1.0) };
        assert_eq!(sizes(&idle, &[more]), [(1150, 0)], "400 are needed, 250 kept of the rest");
    }

    /// The first was granted 900 MiB of it a moment ago, and will touch them.
    #[test]
    fn what_one_was_granted_of_swap_a_moment_ago_is_not_granted_to_another() {
        let given = Bytes::mib(900);
        let spent = Fund { outstanding: given, spoken_for: given, ..fund(100) };
        let swaps = Fund { swap_left: Bytes::gib(1), ..spent };
        let hog = Wish { first: Bytes::mib(2000), due: Bytes::mib(2000), ..wish(1.0) };
        // Headroom has 100 of what was granted, and the last tenth is 100.
        assert_eq!(sizes(&swaps, &[hog]), [(400 + 1024 - 800 - 100, 2000 - 524)]);
    }

    /// One was granted all of it a moment ago and grows into it; the other comes now.
    #[test]
    fn what_one_was_granted_a_moment_ago_is_not_granted_to_another() {
        let given = Bytes::mib(600);
        let (untouched, outstanding, spoken_for) = (given, given, given);
        let from = Bytes::mib(1000);
        let one = Wish { from, untouched, outstanding, spoken_for, ..wish(1.0).up_to(given) };
        let other = Wish { second: Bytes::mib(1100), third: Bytes::mib(1100), ..wish(1.0) };
        // A quarter of the reserve is kept: 250.
        assert_eq!(sizes(&Fund { keep: Bytes::mib(500), ..fund(1000) }, &[one, other])[1].0, 550);
    }

    /// One has not touched 2000 MiB of its size, and there are 450 beyond what is kept.
    #[test]
    fn each_pays_for_what_it_has_not_touched_and_no_other_does() {
        let large = Wish { untouched: Bytes::mib(2000), ..wish(1.0) };
        let fund = Fund { keep: Bytes::mib(1000), calm: false, ..fund(700) };
        // 200 are the first parts; each has a half of 250.
        assert_eq!(sizes(&fund, &[large, wish(1.0)]), [(500, 300), (625, 175)]);
        let doubt = Wish { in_doubt: Bytes::mib(100), ..wish(1.0) };
        assert_eq!(sizes(&fund, &[doubt]), [(750, 50)]);
        let swap = Fund { swap_left: Bytes::mib(50), ..fund };
        assert_eq!(sizes(&swap, &[doubt]), [(800, 0)]);
    }

    /// Each of three others has 1000 MiB that it has not touched, and 950 are beyond what is kept.
    #[test]
    fn what_others_are_only_likely_to_need_takes_nothing_from_one_that_is_short() {
        let (from, all) = (Bytes::mib(1500), Bytes::mib(1800));
        let (bare, first, due, second, third) = (from, from, all, all, all);
        let likely = Wish { from, bare, first, due, second, third, all, ..wish(1.0) };
        let likely = Wish { untouched: Bytes::mib(1000), is_likely: true, ..likely };
        let fund = Fund { keep: Bytes::mib(1000), calm: false, ..fund(1300) };
        assert_eq!(sizes(&fund, &[wish(1.0), likely, likely, likely])[0], (800, 0));
    }

    proptest! {
        #[test]
        fn never_more_than_there_is_nor_than_is_wanted(
            room in 0u64..10_000,
            wants in proptest::collection::vec((0u64..5000, 0.001f64..1000.0), 1..20),
        ) {
            let wants: Vec<(Bytes, f64)> =
                wants.iter().map(|(b, w)| (Bytes::mib(*b), *w)).collect();
            let parts = fair(Bytes::mib(room), &wants);
            let total: Bytes = parts.iter().copied().sum();
            prop_assert!(parts.iter().zip(&wants).all(|(p, w)| *p <= w.0));
            let all: Bytes = wants.iter().map(|w| w.0).sum();
            let there = Bytes::mib(room).min(all);
            prop_assert!(total <= there && there - total <= Bytes::kib(1), "{total} of {there}");
        }
    }
}
