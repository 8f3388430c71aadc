//! Units: bytes and moments as types, so that a page count or a second can
//! never be taken for either.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The page size of every architecture Ebb runs on, in bytes.
pub const PAGE: u64 = 4096;

/// A size in bytes. Adds and subtracts saturating: a kernel counter that goes
/// backwards gives zero, never a wrapped exabyte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    pub const ZERO: Bytes = Bytes(0);

    pub const fn kib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 10))
    }

    pub const fn mib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 20))
    }

    pub const fn gib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 30))
    }

    /// `n` pages of 4 KiB, saturating.
    pub const fn pages(n: u64) -> Bytes {
        Bytes(n.saturating_mul(PAGE))
    }

    /// This share of the size; `share` is clamped to 0 and above, NaN gives 0.
    pub fn share(self, share: f64) -> Bytes {
        Bytes((self.0 as f64 * share.max(0.0)) as u64)
    }

    /// `self / whole` as a fraction; 0 where `whole` is 0.
    pub fn fraction_of(self, whole: Bytes) -> f64 {
        if whole.0 == 0 { 0.0 } else { self.0 as f64 / whole.0 as f64 }
    }

    /// Rounded down to whole MiB, the grain in which balloons are set.
    pub const fn floor_mib(self) -> Bytes {
        Bytes(self.0 & !((1 << 20) - 1))
    }

    pub const fn abs_diff(self, other: Bytes) -> Bytes {
        Bytes(self.0.abs_diff(other.0))
    }

    /// Words about it; none where it is zero.
    pub fn if_any(self, words: impl FnOnce(Bytes) -> String) -> String {
        if self == Bytes::ZERO { String::new() } else { words(self) }
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, o: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(o.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, o: Bytes) {
        *self = *self + o;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    fn sub(self, o: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(o.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(iter: I) -> Bytes {
        iter.fold(Bytes::ZERO, Add::add)
    }
}

/// IEC units with at most one decimal, as people read them: `512 MiB`, `1.5 GiB`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let mut value = self.0 as f64;
        let mut name = 0;
        while value >= 1023.95 && name + 1 < NAMES.len() {
            value /= 1024.0;
            name += 1;
        }
        let text = if name == 0 || value >= 99.95 || (value - value.round()).abs() < 0.05 {
            format!("{value:.0} {}", NAMES[name])
        } else {
            format!("{value:.1} {}", NAMES[name])
        };
        f.pad(&text)
    }
}

/// What was wrong with a size given as text.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("“{0}” is not a size: {1}")]
pub struct NotASize(String, &'static str);

impl FromStr for Bytes {
    type Err = NotASize;

    /// Accepts a plain number of bytes, or a number with `KiB`, `MiB`, `GiB`,
    /// `TiB` (or their first letter alone), in any case, with or without a blank.
    fn from_str(text: &str) -> Result<Bytes, NotASize> {
        let no = |why| NotASize(text.chars().take(40).collect(), why);
        let bad = || no("write a number and a unit, as in 512MiB, 1.5GiB or 1073741824");
        let large = || no("it is too large");
        let t = text.trim();
        let split = t.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(t.len());
        let (number, unit) = t.split_at(split);
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            _ => return Err(bad()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(factor).map(Bytes).ok_or_else(large);
        }
        let value: f64 = number.parse().map_err(|_| bad())?;
        let bytes = value * factor as f64;
        if bytes.is_finite() && bytes >= 0.0 && bytes < u64::MAX as f64 {
            Ok(Bytes(bytes as u64))
        } else {
            Err(if value > 0.0 { large() } else { bad() })
        }
    }
}

/// A number of bytes in JSON and in records.
impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(self.0)
    }
}

/// A number of bytes, or a text as [`FromStr`] takes it (for configuration).
impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Bytes, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"512MiB\" or a number of bytes")
            }
            fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<Bytes, E> {
                Ok(Bytes(v))
            }
            fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<Bytes, E> {
                u64::try_from(v).map(Bytes).map_err(|_| E::custom("a size cannot be negative"))
            }
            fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Bytes, E> {
                v.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Visitor)
    }
}

/// A moment on the host's monotonic clock, in milliseconds since an arbitrary
/// start. Only differences mean anything.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Stamp(pub u64);

impl Stamp {
    /// Milliseconds from `earlier` to here; 0 where the clock went backwards.
    pub const fn since(self, earlier: Stamp) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The moment `ms` milliseconds after this one.
    pub const fn plus(self, ms: u64) -> Stamp {
        Stamp(self.0.saturating_add(ms))
    }
}

/// A pause of milliseconds that is doubled this often: `first` at first, at last `most`.
pub(crate) fn doubled((first, most): (u64, u64), times: u32) -> u64 {
    (first << times.min(16)).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512MiB", 512 << 20),
            ("512 mib", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("2g", 2 << 30),
            (" 1k ", 1024),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "MiB", "1.2.3G", "-1", "1e9", "99999999999TiB", "12MB", "nan", "∞"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_print_in_iec_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536 << 20, "1.5 GiB"),
            (512 << 20, "512 MiB"),
            ((1 << 30) - 1, "1 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn any_text_parses_or_is_refused_without_panic(text in ".{0,60}") {
            let _ = text.parse::<Bytes>();
        }
    }
}
