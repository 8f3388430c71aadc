//! Random worlds: each is made from 28 numbers between 0 and 1 ([`COORDINATES`]).
//!
//! The scenarios were made by those who made the controller. Here a point says everything, so
//! a search can walk to where the controller does worst ([`crate::search`]). All guests' needs
//! fit the host unless the point says that they do not.
//!
//! The last four came later. Up to 0.5, which a point that has fewer numbers stands for, the world
//! is as without them; from there to 1 there is more and more of what they are for. So half of all
//! worlds have nothing of each. They are drawn from a generator of their own, and what they leave
//! to chance as well: the others of a drawn world are what they were.

use ebb_core::config::Amount;
use ebb_core::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::demand::{Curve, Need, fit};
use crate::guest::{BOOT_MS, Spec};
use crate::host::OWN_SHARE;
use crate::world::Setup;

/// What a point tells, coordinate by coordinate.
pub const COORDINATES: [&str; 28] = [
    "guests",
    "ram",
    "shape",
    "period",
    "duty",
    "low",
    "high",
    "rate",
    "jitter",
    "fit",
    "swap",
    "guest-swap",
    "files",
    "mapped",
    "stream",
    "marks",
    "others",
    "late",
    "deflate-on-oom",
    "reporting",
    "agents",
    "weights",
    "hot",
    "stale",
    "starts",
    "mixed-ram",
    "pauses",
    "late-facts",
];
/// The number of those that are drawn first.
const FIRST: usize = 24;
/// The run, ms.
pub const RUN_MS: u64 = 400_000;
/// In so many of a hundred worlds not even all needs fit.
const OVERLOAD: f64 = 0.06;
/// A guest's floor, a share of its RAM, and what all floors together keep of the host at most.
const FLOOR: f64 = 0.25;
const FLOORS_MOST: f64 = 0.5;
/// What a guest has beyond its peak where all peaks are said to fit, a share of its RAM.
const SPLIT_MARGIN: f64 = 0.04;

/// What part of the guests starts during the run, or is paused, at most.
const PART_MOST: f64 = 0.5;
/// The utmost between the RAM of a world's guests and its middle, times, and the least RAM.
const MIXED_MOST: f64 = 4.0;
const RAM_LEAST: Bytes = Bytes::mib(512);
/// What a kernel needs until it is up, a share of RAM, and how long the first programs need what
/// they need as they start, ms.
const KERNEL: f64 = 0.05;
const FIRST_MS: u64 = 20_000;

/// A world: each coordinate 0 to 1, and a seed for what is left to chance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// For what is left to chance.
    pub seed: u64,
    /// By [`COORDINATES`].
    pub at: Vec<f64>,
}

/// A coordinate of all worlds that are drawn, and its value, from `NAME=VALUE`.
pub fn fixed(text: &str) -> Result<(usize, f64), String> {
    let (name, value) = text.split_once('=').ok_or("not NAME=VALUE, as in files=0.9")?;
    let i = COORDINATES.iter().position(|k| *k == name);
    let i = i.ok_or_else(|| format!("no coordinate is named so: {}", COORDINATES.join(", ")))?;
    let value: f64 = value.parse().map_err(|e| format!("{value}: {e}"))?;
    if !(0.0..=1.0).contains(&value) {
        return Err(format!("{value} is not from 0 to 1"));
    }
    Ok((i, value))
}

/// How guests' loads go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A job at the same moments in all.
    Together,
    /// Two groups are busy by turns.
    Turns,
    /// Each has a rhythm of its own.
    Own,
    /// Short spikes now and then.
    Spikes,
    /// Phases of any length.
    Phases,
}

const SHAPES: [Shape; 5] =
    [Shape::Together, Shape::Turns, Shape::Own, Shape::Spikes, Shape::Phases];

/// A value between two by its logarithm.
fn log(u: f64, least: f64, most: f64) -> f64 {
    least * (most / least).powf(u)
}

fn lin(u: f64, least: f64, most: f64) -> f64 {
    least + (most - least) * u
}

/// One of several.
fn one_of<T: Copy>(u: f64, all: &[T]) -> T {
    all[((u * all.len() as f64) as usize).min(all.len() - 1)]
}

impl Point {
    /// Any.
    pub fn random(rng: &mut fastrand::Rng) -> Point {
        let seed = rng.u64(0..1 << 32);
        let mut own = fastrand::Rng::with_seed(seed ^ 0x1a7e);
        let draw = |i| if i < FIRST { rng.f64() } else { own.f64() };
        Point { seed, at: (0..COORDINATES.len()).map(draw).collect() }
    }

    /// The same with its first 24 coordinates only.
    pub fn plain(mut self) -> Point {
        self.at.truncate(FIRST);
        self
    }

    /// Another one near it: a few coordinates move, some far.
    pub fn near(&self, rng: &mut fastrand::Rng) -> Point {
        let mut next = self.clone();
        for _ in 0..rng.usize(1..4) {
            let i = rng.usize(0..next.at.len());
            next.at[i] = match rng.bool() {
                true => rng.f64(),
                false => (next.at[i] + (rng.f64() - 0.5) * 0.2).clamp(0.0, 1.0),
            };
        }
        next
    }

    /// The same with these coordinates.
    pub fn with(mut self, fixed: &[(usize, f64)]) -> Point {
        fixed.iter().for_each(|(i, u)| self.at[*i] = *u);
        self
    }

    fn of(&self, coordinate: &str) -> f64 {
        let i = COORDINATES.iter().position(|k| *k == coordinate).expect("a coordinate");
        self.at.get(i).copied().unwrap_or(0.5).clamp(0.0, 1.0)
    }

    /// How far a coordinate that came later is from neutral, 0 to 1.
    fn beyond(&self, coordinate: &str) -> f64 {
        ((self.of(coordinate) - 0.5) * 2.0).max(0.0)
    }

    /// For what such a coordinate leaves to chance.
    fn chance(&self, coordinate: &str) -> fastrand::Rng {
        let i = COORDINATES.iter().position(|k| *k == coordinate).expect("a coordinate");
        fastrand::Rng::with_seed(self.seed ^ 0x1a7e ^ ((i as u64) << 32))
    }

    /// Which guests such a coordinate is about.
    fn some(&self, coordinate: &str, rng: &mut fastrand::Rng) -> Vec<usize> {
        let count = (self.beyond(coordinate) * PART_MOST * self.guests() as f64).ceil() as usize;
        let mut all: Vec<usize> = (0..self.guests()).collect();
        rng.shuffle(&mut all);
        all.truncate(count);
        all
    }

    /// How its loads go together.
    pub fn shape(&self) -> Shape {
        one_of(self.of("shape"), &SHAPES)
    }

    /// The share of the host that all need at once at most, above 1 where that is too much.
    pub fn load(&self) -> f64 {
        match self.of("fit") {
            u if u > 1.0 - OVERLOAD => lin((u - 1.0 + OVERLOAD) / OVERLOAD, 1.02, 1.2),
            u => lin(u / (1.0 - OVERLOAD), 0.5, 0.88),
        }
    }

    /// In a few words, for people.
    pub fn about(&self) -> String {
        let later = COORDINATES[FIRST..].iter().filter(|k| self.beyond(k) > 0.0);
        let later: String =
            later.map(|k| format!(", {k} {:.0} %", self.beyond(k) * 100.0)).collect();
        format!(
            "{:?}, {} guests of {:.1} GiB, period {:.0} s, duty {:.0} %, load {:.0} %, swap {:.0} %, \
             {:.0} MB/s, mapped {:.0} %{later}",
            self.shape(),
            self.guests(),
            self.ram().0 as f64 / f64::from(1 << 30),
            self.period() / 1000.0,
            self.duty() * 100.0,
            self.load() * 100.0,
            self.swap() * 100.0,
            self.rate() / 1e6,
            self.mapped() * 100.0
        )
    }

    fn guests(&self) -> usize {
        4 + (self.of("guests") * 16.99) as usize
    }

    fn ram(&self) -> Bytes {
        Bytes(log(self.of("ram"), 1.0, 8.0) as u64 * (1 << 30))
    }

    fn period(&self) -> f64 {
        log(self.of("period"), 4_000.0, 240_000.0)
    }

    fn duty(&self) -> f64 {
        lin(self.of("duty"), 0.1, 0.6)
    }

    fn rate(&self) -> f64 {
        log(self.of("rate"), 50e6, 2e9)
    }

    /// None in two of five worlds.
    fn swap(&self) -> f64 {
        ((self.of("swap") - 0.4) / 0.6).max(0.0) * 0.5
    }

    fn mapped(&self) -> f64 {
        one_of(self.of("mapped"), &[0.0, 0.1, 1.0])
    }

    /// The world.
    pub fn setup(&self) -> Setup {
        let mut rng = fastrand::Rng::with_seed(self.seed ^ 0x3057);
        let count = self.guests();
        let rams = self.rams();
        let mut guests: Vec<Spec> = (0..count).map(|i| self.guest(i, rams[i], &mut rng)).collect();
        self.start_later(&mut guests);
        self.pause(&mut guests);
        let mut chance = self.chance("late-facts");
        guests.iter_mut().for_each(|g| g.late_facts = chance.f64() < self.beyond("late-facts"));
        let peak = peak(&guests);
        let others_share = lin(self.of("others"), 0.0, 0.2);
        let host = Bytes((peak.0 as f64 / self.load()) as u64 + (256 << 20));
        let host = Bytes((host.0 as f64 / (1.0 - others_share / 2.0)) as u64);
        let others = self.others(host.share(others_share), &mut rng);
        if self.load() <= 1.0 {
            let room = host.share(0.93) - host.share(others_share);
            let mut needs: Vec<&mut Need> = guests.iter_mut().map(|g| &mut g.need).collect();
            fit(&mut needs, room.share(0.95));
        }
        let low = log(self.of("marks"), 0.002, 0.03);
        Setup {
            seed: self.seed,
            marks: (low, low * 1.5),
            others,
            late_one_in: one_of(self.of("late"), &[40, 10, 4, 2]),
            min: Amount::Share(floors(&guests, host)),
            ..Setup::of(host, host.share(self.swap()), RUN_MS, guests)
        }
    }

    /// The RAM of each guest: alike, or some larger and some smaller by the same factor.
    fn rams(&self) -> Vec<Bytes> {
        let (mixed, mut rng) = (self.beyond("mixed-ram"), self.chance("mixed-ram"));
        let factor = lin(mixed, 1.0, MIXED_MOST);
        let mut one = |_| match mixed > 0.0 {
            true => {
                let ram = self.ram().share([1.0 / factor, 1.0, factor][rng.usize(0..3)]);
                Bytes(ram.0 >> 28 << 28).max(RAM_LEAST)
            }
            false => self.ram(),
        };
        (0..self.guests()).map(&mut one).collect()
    }

    /// Some guests start during the run, within seconds of each other or minutes apart. Their
    /// programs touch much of their RAM as they start.
    fn start_later(&self, guests: &mut [Spec]) {
        let mut rng = self.chance("starts");
        let first = rng.u64(30_000..250_000);
        let apart = log(rng.f64(), 1_000.0, 100_000.0) as u64;
        for i in self.some("starts", &mut rng) {
            let g = &mut guests[i];
            let at = first + rng.u64(0..apart);
            let (kernel, touched) = (g.ram.share(KERNEL), g.ram.share(lin(rng.f64(), 0.2, 0.8)));
            g.need.anon = started(&g.need.anon, at, kernel, touched);
            g.need.files = started(&g.need.files, at, Bytes::ZERO, Bytes::ZERO);
            (g.starts_ms, g.boots, g.stale) = (at, true, Bytes::ZERO);
        }
    }

    /// Some guests are paused once, for 10 s to two minutes.
    fn pause(&self, guests: &mut [Spec]) {
        let mut rng = self.chance("pauses");
        for i in self.some("pauses", &mut rng) {
            let from = rng.u64(40_000..300_000);
            guests[i].paused = (from, from + log(rng.f64(), 10_000.0, 120_000.0) as u64);
        }
    }

    fn guest(&self, i: usize, ram: Bytes, rng: &mut fastrand::Rng) -> Spec {
        let low = ram.share(lin(self.of("low"), 0.05, 0.3) * lin(rng.f64(), 0.8, 1.2));
        let high = ram.share(lin(self.of("high"), 0.35, 0.85) * lin(rng.f64(), 0.8, 1.1));
        let anon = self.curve(i, low, high.max(low), rng);
        let mut need = Need::of(anon);
        need.rate = self.rate();
        need.hot_share = lin(self.of("hot"), 0.2, 0.9);
        need.files = Curve::flat(ram.share(lin(self.of("files"), -0.1, 0.25).max(0.0)));
        need.stream = lin(self.of("stream"), 0.0, 50e6);
        let mut spec = Spec::new(ram, need);
        spec.mapped = self.mapped();
        spec.deflate_on_oom = self.of("deflate-on-oom") > 0.4;
        spec.reporting = rng.f64() < one_of(self.of("reporting"), &[0.0, 0.5, 1.0]);
        spec.agent = rng.f64() < one_of(self.of("agents"), &[0.0, 0.0, 0.5, 1.0]);
        spec.stale = ram.share(lin(self.of("stale"), 0.0, 0.7));
        if self.of("guest-swap") > 0.6 {
            spec.swap = ram.share(0.25);
        }
        if self.of("weights") > 0.7 {
            spec.weight = [0.5, 1.0, 2.0, 4.0][rng.usize(0..4)];
        }
        spec
    }

    fn curve(&self, i: usize, low: Bytes, high: Bytes, rng: &mut fastrand::Rng) -> Curve {
        let (period, duty) = (self.period(), self.duty());
        let jitter = self.of("jitter") * 0.5;
        let (own, begin) = match self.shape() {
            Shape::Spikes => {
                let more = Curve::spikes(rng, RUN_MS, period as u64, high - low);
                return Curve::flat(low).plus(&more);
            }
            Shape::Phases => return Curve::phases(rng, RUN_MS, low, high),
            Shape::Together => (period, 0.0),
            Shape::Turns => (period, if i.is_multiple_of(2) { 0.0 } else { period / 2.0 }),
            Shape::Own => (period * lin(rng.f64(), 0.5, 1.5), period * rng.f64()),
        };
        let mut points = vec![(0, low)];
        let mut at = begin + 10_000.0;
        while at < RUN_MS as f64 {
            let from = at + own * jitter * rng.f64();
            points.push((from as u64, high));
            points.push(((from + own * duty) as u64, low));
            at += own;
        }
        Curve::new(points)
    }

    /// What else runs there: a saw of its own period.
    fn others(&self, most: Bytes, rng: &mut fastrand::Rng) -> Curve {
        let every = rng.u64(10_000..120_000);
        let steps = (0..RUN_MS).step_by(2_000);
        Curve::new(steps.map(|ms| (ms, most.share((ms % every) as f64 / every as f64))).collect())
    }
}

/// What a guest that starts during the run needs: nothing until then, its kernel's until that is
/// up, what its first programs touch, and then what it needs anyway.
fn started(curve: &Curve, at: u64, kernel: Bytes, touched: Bytes) -> Curve {
    let up = at + BOOT_MS;
    let goes = up + FIRST_MS;
    let points = [(0, Bytes::ZERO), (at, kernel), (up, touched), (goes, curve.at(goes))];
    let later = curve.moments().filter(|ms| *ms > goes).map(|ms| (ms, curve.at(ms)));
    Curve::new(points.into_iter().chain(later).collect())
}

/// The floor of each guest, a share of its RAM: the usual one, or what an operator sets where
/// those would keep more than half of the host.
fn floors(guests: &[Spec], host: Bytes) -> f64 {
    let ram: Bytes = guests.iter().map(|g| g.ram).sum();
    host.share(FLOORS_MOST).fraction_of(ram).min(FLOOR)
}

/// Whether each guest can have the most that it ever needs, and a little, for good.
pub fn own_peaks_fit(setup: &Setup) -> bool {
    let own = |g: &Spec| peak(std::slice::from_ref(g)) + g.ram.share(SPLIT_MARGIN);
    let others = setup.others.moments().map(|ms| setup.others.at(ms)).max().unwrap_or_default();
    let room = setup.host.share(1.0 - OWN_SHARE - setup.marks.1);
    setup.guests.iter().map(own).sum::<Bytes>() + others <= room
}

/// What all need at most at one moment.
fn peak(guests: &[Spec]) -> Bytes {
    let moments = guests.iter().flat_map(|g| g.need.moments());
    let at = |ms| guests.iter().map(|g| g.need.sum_at(ms)).sum::<Bytes>();
    moments.map(at).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_a_world_and_its_needs_fit_unless_it_says_otherwise() {
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..60 {
            let point = Point::random(&mut rng);
            let setup = point.setup();
            assert_eq!(format!("{setup:?}"), format!("{:?}", point.setup()));
            assert!((4..=20).contains(&setup.guests.len()), "{}", point.about());
            let floors: Bytes = setup.guests.iter().map(|g| setup.min.of(g.ram)).sum();
            assert!(floors <= setup.host.share(FLOORS_MOST), "{}: {floors}", point.about());
            if point.load() <= 1.0 {
                let others = (0..RUN_MS).step_by(500).map(|ms| setup.others.at(ms)).max().unwrap();
                assert!(
                    peak(&setup.guests) + others <= setup.host.share(0.94),
                    "{}",
                    point.about()
                );
            }
        }
    }

    /// A point of the first 24, and one that is neutral in the others, are the same world. What the
    /// others change is theirs alone.
    #[test]
    fn a_later_coordinate_is_neutral_up_to_a_half_and_leaves_the_others_alone() {
        let (mut rng, mut old) = (fastrand::Rng::with_seed(601), fastrand::Rng::with_seed(601));
        let mut neutral = [0; COORDINATES.len() - FIRST];
        for _ in 0..200 {
            let point = Point::random(&mut rng);
            assert_eq!(point.seed, old.u64(0..1 << 32));
            assert!((0..FIRST).all(|i| point.at[i] == old.f64()));
            let plain = format!("{:?}", point.clone().plain().setup());
            for u in [0.0, 0.2, 0.5] {
                let all: Vec<_> = (FIRST..COORDINATES.len()).map(|i| (i, u)).collect();
                let point = point.clone().with(&all);
                assert_eq!(format!("{:?}", point.setup()), plain);
                assert_eq!(point.about(), point.plain().about());
            }
            for (i, n) in (FIRST..).zip(&mut neutral) {
                let mut one = point.clone().plain();
                one.at.resize(COORDINATES.len(), 0.5);
                one.at[i] = point.at[i];
                *n += usize::from(format!("{:?}", one.setup()) == plain);
            }
        }
        assert!(neutral.iter().all(|n| (80..=120).contains(n)), "{neutral:?}");
    }

    #[test]
    fn a_coordinate_is_fixed_by_its_name() {
        let (i, u) = fixed("files=0.9").unwrap();
        let point = Point { seed: 0, at: vec![0.1; COORDINATES.len()] };
        assert_eq!(point.with(&[(i, u)]).of("files"), 0.9);
        for (text, why) in [
            ("files", "not NAME=VALUE"),
            ("fils=0.1", "guests, ram, shape"),
            ("files=x", "x: invalid float"),
            ("files=1.1", "not from 0 to 1"),
            ("files=NaN", "not from 0 to 1"),
        ] {
            let said = fixed(text).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn neighbours_differ_in_a_few_coordinates() {
        let mut rng = fastrand::Rng::with_seed(1);
        let point = Point::random(&mut rng);
        let near = point.near(&mut rng);
        let moved = point.at.iter().zip(&near.at).filter(|(a, b)| a != b).count();
        assert!((1..4).contains(&moved) && near.at.iter().all(|u| (0.0..=1.0).contains(u)));
    }
}
