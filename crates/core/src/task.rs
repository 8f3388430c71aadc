//! Mechanisms: their stages; and for each one that works beside the loop its order, the result of
//! its orders, and the words for both.
//!
//! A new mechanism needs two structs, and an entry in the table at the end with the words for both.
//! Plans, samples, records, the log and the commands then have it. A policy in `policy/` decides when
//! it is ordered; a file in `act/` of `ebb-host` carries the order out.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::sample::VmId;
use crate::units::Bytes;

/// The mechanisms, in the order in which they are used: what is cheap and harmless
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageName {
    /// Pages that guests have freed.
    Recycle,
    /// Pages that are the same.
    Merge,
    /// Zero pages of VMs that are not merged.
    Zeros,
    /// Memory that is idle in a guest, or its page cache.
    Balloon,
    /// Cold memory, to the host's swap.
    Offload,
    /// New VMs are refused; what an operator could do is listed.
    Protect,
}

impl StageName {
    pub const ALL: [StageName; 6] = {
        use StageName::*;
        [Recycle, Merge, Zeros, Balloon, Offload, Protect]
    };
}

impl fmt::Display for StageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Has cold memory of one VM paged out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OffloadOrder {
    pub vm: VmId,
    pub name: String,
    /// The most that is paged out.
    pub bytes: Bytes,
    pub reason: String,
}

/// Cold memory of a VM that was sent to the host's swap on order, since the
/// daemon's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadSample {
    /// Gone to swap while orders were carried out, by the process's own counters.
    pub paged_out: Bytes,
    pub busy: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Splits those huge pages of one VM of which a balloon took a part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartialThpOrder {
    pub vm: VmId,
    pub name: String,
    /// The longest that this may take, milliseconds. It begins where the last order ended.
    pub ms: u64,
    pub reason: String,
}

/// Huge pages of a VM that a balloon left partially mapped and that were split, since the daemon's
/// start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialThpSample {
    /// Huge pages.
    pub split: u64,
    /// Their parts that were not mapped: those are the host's again.
    pub freed: Bytes,
    /// The last order did not come to the end of RAM.
    pub more: bool,
    pub busy: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Scans one VM for zero pages and frees them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ZeroOrder {
    pub vm: VmId,
    pub name: String,
    /// How much of its memory is looked at, from where the last order ended.
    pub read: Bytes,
    /// The longest that this may take, milliseconds.
    pub ms: u64,
    /// A huge page is split if at least this many of its 512 pages are zeros.
    pub split: Option<u64>,
    /// The most that may be written to swap.
    pub swap: Bytes,
    pub reason: String,
}

/// Zero pages of a VM that were freed without help of its guest, since the
/// daemon's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZeroSample {
    pub read: Bytes,
    /// Zero pages in it that could be freed.
    pub chosen: Bytes,
    /// What left DRAM meanwhile, by the process's own counters.
    pub freed: Bytes,
    /// How often all of its memory was scanned.
    pub rounds: u64,
    pub busy: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// An order about one VM that is carried out beside the loop.
pub trait TaskOrder: Clone + fmt::Debug + Send + 'static {
    /// What its orders have done.
    type Sample;
    fn vm(&self) -> VmId;
    /// Those of a plan.
    fn list(orders: &Orders) -> &[Self];
    /// Where a sample has what they have done.
    fn sample(tasks: &mut Tasks) -> &mut Option<Self::Sample>;
    /// There, whether one is under way, and what was wrong with the last one.
    fn state(sample: &mut Self::Sample) -> (&mut bool, &mut Option<String>);
}

/// An order of any mechanism, as the log and `ebb plan` tell it.
#[derive(Clone, Debug)]
pub struct Line<'a> {
    name: &'a str,
    what: String,
    reason: &'a str,
    /// It may slow the VM down: it is logged also without `--verbose`.
    pub always_logged: bool,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.name, self.what, self.reason)
    }
}

/// The table of mechanisms. Each has the key under which plans and samples have it, its two
/// structs, whether it takes memory, whether its orders are always logged, its title in
/// `ebb explain`, and the words for an order and for what its orders have done.
macro_rules! tasks {
    ($(
        $(#[$meta:meta])*
        $key:ident: $order:ident => $sample:ident,
            takes $takes:literal, always_logged $logged:literal, $title:literal,
            $what:expr, $words:expr;
    )*) => {
        /// What is begun beside the loop, by mechanism.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Orders {
            $($(#[$meta])* #[serde(skip_serializing_if = "Vec::is_empty")] pub $key: Vec<$order>,)*
        }

        /// What orders about a VM have done; `None`: there was none.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Tasks {
            $($(#[$meta])* #[serde(skip_serializing_if = "Option::is_none")] pub $key: Option<$sample>,)*
        }

        $(impl TaskOrder for $order {
            type Sample = $sample;
            fn vm(&self) -> VmId { self.vm }
            fn list(orders: &Orders) -> &[$order] { &orders.$key }
            fn sample(tasks: &mut Tasks) -> &mut Option<$sample> { &mut tasks.$key }
            fn state(sample: &mut $sample) -> (&mut bool, &mut Option<String>) {
                (&mut sample.busy, &mut sample.error)
            }
        })*

        impl Orders {
            /// All of them.
            pub fn each(&self) -> Vec<Line<'_>> {
                let mut lines = Vec::new();
                $(let what: fn(&$order) -> String = $what;
                lines.extend(self.$key.iter().map(|o| Line {
                    name: &o.name, what: what(o), reason: &o.reason, always_logged: $logged,
                }));)*
                lines
            }

            /// Leaves nothing that takes memory.
            pub fn strike_takes(&mut self) {
                $(if $takes { self.$key.clear(); })*
            }
        }

        impl Tasks {
            /// Whether something is under way.
            pub fn is_busy(&self) -> bool {
                $(self.$key.as_ref().is_some_and(|sample| sample.busy))||*
            }

            /// Titles and words.
            pub fn lines(&self) -> Vec<(&'static str, String)> {
                let mut lines = Vec::new();
                $(let words: fn(&$sample) -> String = $words;
                lines.extend(self.$key.as_ref().map(|sample| {
                    let error = sample.error.as_ref().map_or(String::new(), |e| format!("; {e}"));
                    ($title, words(sample) + &error)
                }));)*
                lines
            }
        }
    };
}

tasks! {
    offload: OffloadOrder => OffloadSample, takes true, always_logged true, "paged out",
        |o| format!("page out {}", o.bytes), |s| format!("{} on order", s.paged_out);
    #[serde(alias = "torn")]
    partial_thp: PartialThpOrder => PartialThpSample, takes false, always_logged false, "huge",
        |_| "split partially mapped huge pages".into(),
        |s| format!("{} partially mapped huge pages split, {} freed", s.split, s.freed);
    zeros: ZeroOrder => ZeroSample, takes true, always_logged false, "zeros",
        |o| format!("look for zeros in {}", o.read),
        |s| format!("{} freed, {} scanned", s.freed, s.read);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;
    use crate::sample::VmSample;

    const VM: VmId = VmId { pid: 1, start: u64::MAX };

    fn orders() -> Orders {
        let (name, reason) = ("a".to_string(), "r".to_string());
        let bytes = Bytes(u64::MAX - 1);
        let page_out = OffloadOrder { vm: VM, name: name.clone(), bytes, reason: reason.clone() };
        let split = PartialThpOrder { vm: VM, name, ms: 500, reason };
        Orders { offload: vec![page_out], partial_thp: vec![split], ..Orders::default() }
    }

    #[test]
    fn plans_and_samples_have_each_mechanism_under_its_key_and_older_keys_are_read() {
        let plan = Plan { orders: orders(), ..Plan::default() };
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
        let was = text.replace("partial_thp", "torn");
        assert_ne!(was, text);
        assert_eq!(serde_json::from_str::<Plan>(&was).unwrap(), plan);
        let value = serde_json::to_value(&plan).unwrap();
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["actions", "held", "merge", "offload", "partial_thp"]);
        let done = PartialThpSample { freed: Bytes(u64::MAX), ..PartialThpSample::default() };
        let tasks = Tasks { partial_thp: Some(done), ..Tasks::default() };
        let vm = VmSample { id: VM, tasks, ..VmSample::default() };
        let text = serde_json::to_string(&vm).unwrap();
        assert!(text.contains(r#","partial_thp":{"split":0,"#), "{text}");
        assert_eq!(serde_json::from_str::<VmSample>(&text).unwrap(), vm);
        let was = text.replace("partial_thp", "torn");
        assert_eq!(serde_json::from_str::<VmSample>(&was).unwrap(), vm);
        let wrong = text.replace("\"split\":0", "\"split\":-1");
        assert!(serde_json::from_str::<VmSample>(&wrong).is_err(), "a record is read whole");
    }

    #[test]
    fn what_takes_is_struck_and_the_rest_is_told() {
        let mut orders = orders();
        let told = |orders: &Orders| orders.each().iter().map(Line::to_string).collect::<Vec<_>>();
        assert_eq!(told(&orders)[0], "a: page out 16 EiB: r");
        orders.strike_takes();
        assert_eq!(told(&orders), ["a: split partially mapped huge pages: r"]);
    }

    #[test]
    fn what_was_done_is_told_with_its_error_and_one_that_is_busy_is_seen() {
        let mut tasks = Tasks::default();
        assert!(!tasks.is_busy() && tasks.lines().is_empty());
        let (read, freed, error) = (Bytes::mib(9), Bytes::mib(3), Some("no".into()));
        tasks.zeros = Some(ZeroSample { read, freed, error, ..ZeroSample::default() });
        assert!(!tasks.is_busy());
        assert_eq!(tasks.lines(), [("zeros", "3 MiB freed, 9 MiB scanned; no".to_string())]);
        tasks.offload = Some(OffloadSample { busy: true, ..OffloadSample::default() });
        assert!(tasks.is_busy());
    }
}
