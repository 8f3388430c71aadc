//! The flight recorder: the last minutes, always, within a bound.
//!
//! A record is lines of JSON: a [`Head`] (settings and what was remembered), then
//! [`Tick`]s, then perhaps another head. Every head is a place from which replay
//! can start, so the oldest part can be dropped at any head.

use std::collections::VecDeque;
use std::io::{BufRead, Read};

use anyhow::{Context, Result, bail};
use ebb_core::config::Config;
use ebb_core::memory::Memory;
use ebb_core::tick::{Engine, Tick};
use serde::{Deserialize, Serialize};

/// What the recorder may hold, bytes: minutes for a hundred VMs, and small beside
/// the daemon's budget of 30 MiB.
const MOST: usize = 4 << 20;
/// A new head after so many bytes, so that dropping one drops little.
const SEGMENT: usize = MOST / 8;
/// A new head after so many ticks.
const SEGMENT_TICKS: usize = 120;
/// No line of a record is longer (10,000 VMs fit).
const LINE_MOST: u64 = 32 << 20;
/// The record format.
const FORMAT: u32 = 1;

/// Where a replay can start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Head {
    /// Format number.
    pub ebb_record: u32,
    /// The version that wrote it.
    pub version: String,
    /// The settings.
    pub config: Config,
    /// What was remembered before the next tick.
    pub memory: Memory,
}

impl Head {
    /// A head for this moment.
    pub fn new(config: &Config, memory: &Memory) -> Head {
        Head {
            ebb_record: FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            config: config.clone(),
            memory: memory.clone(),
        }
    }
}

/// A line of a record.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Line {
    /// A place to start.
    Head(Box<Head>),
    /// A tick.
    Tick(Box<Tick>),
}

/// The ring.
#[derive(Default)]
pub struct Recorder {
    segments: VecDeque<Vec<u8>>,
    ticks: usize,
    bytes: usize,
}

impl Recorder {
    /// Whether the next tick must be preceded by a head.
    pub fn wants_head(&self) -> bool {
        self.segments.back().is_none_or(|s| s.len() >= SEGMENT) || self.ticks >= SEGMENT_TICKS
    }

    /// Starts a segment; drops the oldest while there is too much.
    pub fn head(&mut self, head: &Head) {
        self.segments.push_back(line(head));
        self.bytes += self.segments.back().map_or(0, Vec::len);
        self.ticks = 0;
        while self.bytes > MOST && self.segments.len() > 1 {
            self.bytes -= self.segments.pop_front().map_or(0, |s| s.len());
        }
    }

    /// Adds a tick, as its [`line`].
    pub fn tick(&mut self, text: &[u8]) {
        self.bytes += text.len();
        self.ticks += 1;
        if let Some(segment) = self.segments.back_mut() {
            segment.extend_from_slice(text);
        }
    }

    /// All that is held, oldest first.
    pub fn dump(&self) -> Vec<u8> {
        self.segments.iter().flatten().copied().collect()
    }
}

/// One line of a record.
pub fn line<T: Serialize>(value: &T) -> Vec<u8> {
    let mut text = serde_json::to_vec(value).unwrap_or_default();
    text.push(b'\n');
    text
}

/// Has every tick of a record decided again by `each`, with the engine as it was;
/// whether there was anything in it.
pub fn replay(input: impl BufRead, mut each: impl FnMut(&mut Engine, &Tick)) -> Result<bool> {
    let mut engine: Option<Engine> = None;
    read(input, |line| {
        match line {
            Line::Head(head) => {
                let mut fresh = Engine::new(head.config, false);
                fresh.memory = head.memory;
                engine = Some(fresh);
            }
            Line::Tick(tick) => {
                let Some(engine) = engine.as_mut() else { bail!("a tick before any head") };
                each(engine, &tick);
            }
        }
        Ok(())
    })?;
    Ok(engine.is_some())
}

/// Reads a record line by line; an error names the line. A last line that was cut
/// off (the writer was killed) ends the record.
pub fn read(mut input: impl BufRead, mut each: impl FnMut(Line) -> Result<()>) -> Result<usize> {
    let mut number = 0;
    loop {
        let mut text = Vec::new();
        let read = (&mut input).take(LINE_MOST).read_until(b'\n', &mut text)?;
        if read == 0 {
            return Ok(number);
        }
        number += 1;
        let whole = text.ends_with(b"\n");
        if !whole && read as u64 == LINE_MOST {
            bail!("line {number} is longer than {LINE_MOST} bytes: not a record of Ebb");
        }
        match serde_json::from_slice::<Line>(&text) {
            Ok(Line::Head(h)) if h.ebb_record != FORMAT => bail!(
                "line {number}: format {} (this ebb reads {FORMAT}): replay it with ebb {}",
                h.ebb_record,
                h.version
            ),
            Ok(parsed) => each(parsed).with_context(|| format!("line {number}"))?,
            Err(_) if !whole => return Ok(number - 1),
            Err(_) => bail!("line {number} is neither a head nor a tick: not a record of Ebb"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::sample::Sample;
    use proptest::prelude::*;

    fn tick(number: u64) -> Tick {
        Tick {
            number,
            sample: Sample::default(),
            requests: Vec::new(),
            wishes: Vec::new(),
            plan: Default::default(),
            outcomes: Vec::new(),
            applied: true,
            forbidden: None,
        }
    }

    fn head() -> Head {
        Head::new(&Config::default(), &Memory::default())
    }

    #[test]
    fn the_ring_is_bounded_and_always_starts_with_a_head() {
        let mut r = Recorder::default();
        for n in 0..60_000 {
            if r.wants_head() {
                r.head(&head());
            }
            r.tick(&line(&tick(n)));
        }
        let dump = r.dump();
        assert!(dump.len() <= MOST + SEGMENT + 1000, "{}", dump.len());
        assert!(dump.len() > MOST / 2);
        let mut seen = Vec::new();
        read(&dump[..], |l| {
            seen.push(matches!(l, Line::Head(_)));
            Ok(())
        })
        .unwrap();
        assert!(seen[0]);
    }

    #[test]
    fn a_cut_off_last_line_is_tolerated_and_nonsense_is_named() {
        let mut text = line(&head());
        text.extend(line(&tick(1)));
        let whole = text.len();
        text.extend(&line(&tick(2))[..20]);
        let mut n = 0;
        let count = |n: &mut i32| {
            *n += 1;
            Ok(())
        };
        assert_eq!(read(&text[..], |_| count(&mut n)).unwrap(), 2);
        text.truncate(whole);
        text.extend(b"{\"a\":1}\n");
        let said = read(&text[..], |_| Ok(())).unwrap_err().to_string();
        assert!(said.starts_with("line 3 is neither"), "{said}");
        let newer = String::from_utf8(line(&head())).unwrap().replace("record\":1", "record\":9");
        let said = read(newer.as_bytes(), |_| Ok(())).unwrap_err().to_string();
        assert!(said.contains("format 9"), "{said}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = read(&bytes[..], |_| Ok(()));
        }
    }
}
