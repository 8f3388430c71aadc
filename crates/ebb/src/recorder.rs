//! The flight recorder: the last minutes, always, within a bound.
//!
//! A record is lines of JSON: a [`Head`] (settings and what was remembered), then
//! [`Tick`]s, then perhaps another head. Every head is a place from which replay
//! can start, so the oldest part can be dropped at any head.
//!
//! One tick is much like the one before it. The ring therefore holds zstd frames, one
//! for each segment, whose window reaches back further than a tick is long. Frames
//! one after the other are a zstd file, so a client may have them as they are.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Cursor, Read, Write};
use std::sync::Arc;

use anyhow::{Result, bail};
use ebb_core::config::Config;
use ebb_core::state::Memory;
pub use ebb_core::text::json_line as line;
use ebb_core::tick::{Engine, Tick};
use ebb_core::units::Stamp;
use serde::{Deserialize, Serialize};
use zstd::stream::{read::Decoder, write::Encoder};

/// What the recorder may hold, bytes: a fifth of the daemon's budget of 30 MiB, and minutes
/// for hundreds of VMs.
const MOST: usize = 6 << 20;
/// What the record may take as lines of JSON: clients read no answer of more than 256 MiB.
const MOST_TEXT: u64 = 192 << 20;
/// A new head after this many bytes, so that dropping one drops little.
const SEGMENT: usize = MOST / 6;
/// A new head after this many ticks.
const SEGMENT_TICKS: usize = 240;
/// The fastest of zstd's ordinary levels: 3 packs a sixth better for half as much again.
const LEVEL: i32 = 1;
/// Bounds of the compressor's window, as powers of two: it and its tables are all the
/// memory that compressing takes.
const WINDOW: (u32, u32) = (17, 22);
/// The end of a zstd frame whose last block was flushed: an empty last block
/// (RFC 8878, 3.1.1.2).
const FRAME_END: [u8; 3] = [1, 0, 0];
/// How a zstd frame begins.
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// No line of a record is longer (10,000 VMs fit).
const LINE_MOST: u64 = 32 << 20;
const FORMAT: u32 = 1;

/// Where a replay can start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Head {
    pub ebb_record: u32,
    pub version: String,
    pub config: Config,
    /// What was remembered before the next tick.
    pub memory: Memory,
}

impl Head {
    pub fn new(config: &Config, memory: &Memory) -> Head {
        Head {
            ebb_record: FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            config: config.clone(),
            memory: memory.clone(),
        }
    }
}

#[derive(Default)]
pub struct Recorder {
    closed: VecDeque<Segment>,
    open: Option<Open>,
    last: Option<Stamp>,
}

/// A part of the record that can be replayed alone.
struct Segment {
    frame: Arc<[u8]>,
    text: u64,
    first: Option<Stamp>,
}

struct Open {
    frame: Encoder<'static, Vec<u8>>,
    text: u64,
    ticks: usize,
    first: Option<Stamp>,
}

impl Open {
    /// The window is as large as the head: that holds what is remembered of each VM and is
    /// longer than a tick.
    fn new(head: &[u8]) -> std::io::Result<Open> {
        let mut frame = Encoder::new(Vec::new(), LEVEL)?;
        let size = usize::BITS - head.len().leading_zeros();
        frame.window_log(size.clamp(WINDOW.0, WINDOW.1))?;
        frame.write_all(head)?;
        Ok(Open { frame, text: head.len() as u64, ticks: 0, first: None })
    }

    fn close(self) -> std::io::Result<Segment> {
        Ok(Segment { frame: self.frame.finish()?.into(), text: self.text, first: self.first })
    }
}

impl Recorder {
    /// Whether the next tick must be preceded by a head.
    pub fn wants_head(&self) -> bool {
        let full = |o: &Open| o.frame.get_ref().len() >= SEGMENT || o.ticks >= SEGMENT_TICKS;
        self.open.as_ref().is_none_or(full)
    }

    pub fn head(&mut self, head: &Head) {
        // Writing to memory does not fail; if it did, that part would be missing.
        self.closed.extend(self.open.take().and_then(|o| o.close().ok()));
        self.open = Open::new(&line(head)).ok();
        self.drop_oldest();
    }

    pub fn tick(&mut self, at: Stamp, text: &[u8]) {
        let Some(open) = &mut self.open else { return };
        if open.frame.write_all(text).is_err() {
            self.open = None;
            return;
        }
        open.text += text.len() as u64;
        open.ticks += 1;
        open.first.get_or_insert(at);
        self.last = Some(at);
        self.drop_oldest();
    }

    pub fn bytes(&self) -> usize {
        self.closed.iter().map(|s| s.frame.len()).sum::<usize>()
            + self.open.as_ref().map_or(0, |o| o.frame.get_ref().len())
    }

    fn text(&self) -> u64 {
        self.closed.iter().map(|s| s.text).sum::<u64>() + self.open.as_ref().map_or(0, |o| o.text)
    }

    fn drop_oldest(&mut self) {
        while (self.bytes() > MOST || self.text() > MOST_TEXT) && !self.closed.is_empty() {
            self.closed.pop_front();
        }
    }

    /// From its first tick to its last one, milliseconds.
    pub fn span_ms(&self) -> u64 {
        let open = self.open.as_ref().and_then(|o| o.first);
        let first = self.closed.iter().find_map(|s| s.first).or(open);
        first.zip(self.last).map_or(0, |(first, last)| last.since(first))
    }

    pub fn record(&mut self) -> Record {
        let mut record = Record { frames: Vec::new(), text: self.text() };
        record.frames.extend(self.closed.iter().map(|s| s.frame.clone()));
        if let Some(open) = &mut self.open
            && open.frame.flush().is_ok()
        {
            record.frames.push([open.frame.get_ref(), &FRAME_END[..]].concat().into());
        }
        record
    }
}

/// A record as the ring holds it, oldest frame first. It shares them with the ring.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// zstd frames.
    pub frames: Vec<Arc<[u8]>>,
    pub text: u64,
}

impl Record {
    /// Its lines of JSON, unpacked while they are read.
    pub fn lines(self) -> std::io::Result<impl Read + Send> {
        Decoder::new(self.packed())
    }

    pub fn packed(self) -> impl Read + Send {
        Frames(self.frames.into_iter().map(Cursor::new).collect())
    }

    /// Its lines at once.
    #[cfg(test)]
    pub fn unpacked(self) -> Vec<u8> {
        let mut text = Vec::new();
        self.lines().unwrap().read_to_end(&mut text).unwrap();
        text
    }
}

/// Reads frames one after the other.
struct Frames(VecDeque<Cursor<Arc<[u8]>>>);

impl Read for Frames {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        while let Some(frame) = self.0.front_mut() {
            let n = frame.read(to)?;
            if n > 0 || to.is_empty() {
                return Ok(n);
            }
            self.0.pop_front();
        }
        Ok(0)
    }
}

pub fn is_packed(record: &[u8]) -> bool {
    record.starts_with(&MAGIC)
}

/// A record's lines, whether it is packed or not.
pub fn unpack<'a>(mut input: impl BufRead + 'a) -> Result<Box<dyn BufRead + 'a>> {
    if !is_packed(input.fill_buf()?) {
        return Ok(Box::new(input));
    }
    Ok(Box::new(BufReader::with_capacity(1 << 17, Decoder::with_buffer(input)?)))
}

/// Has every tick of a record, packed or not, decided again by `each`, with the engine as it was;
/// whether there was anything in it. A last line that was cut off (the writer was killed) ends the
/// record.
pub fn replay(input: impl BufRead, mut each: impl FnMut(&mut Engine, &Tick)) -> Result<bool> {
    let (mut input, mut engine) = (unpack(input)?, None);
    for number in 1_u64.. {
        let mut text = Vec::new();
        let read = (&mut input).take(LINE_MOST).read_until(b'\n', &mut text)?;
        if read == 0 {
            break;
        }
        let whole = text.ends_with(b"\n");
        if !whole && read as u64 == LINE_MOST {
            bail!("line {number} is longer than {LINE_MOST} bytes: not a record of Ebb");
        }
        if let Ok(tick) = serde_json::from_slice(&text) {
            let Some(engine) = &mut engine else { bail!("line {number}: a tick before any head") };
            each(engine, &tick);
            continue;
        }
        match serde_json::from_slice::<Head>(&text) {
            Ok(h) if h.ebb_record != FORMAT => bail!(
                "line {number}: format {} (this ebb reads {FORMAT}): replay it with ebb {}",
                h.ebb_record,
                h.version
            ),
            Ok(h) => engine.insert(Engine::new(h.config, false)).memory = h.memory,
            Err(_) if !whole => break,
            Err(_) => bail!("line {number} is neither a head nor a tick: not a record of Ebb"),
        }
    }
    Ok(engine.is_some())
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use ebb_core::sample::Sample;
    use ebb_core::tick::{Host, Next};
    use ebb_core::units::Bytes;
    use ebb_sim::{Setup, World, run};
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

    /// Ticks of a simulated host with so many VMs that lack memory, half a second apart,
    /// and what was remembered before each.
    fn ticks(vms: u32) -> impl Iterator<Item = (Memory, Tick)> {
        let host = Bytes::gib(u64::from(vms));
        let mut setup = ebb_sim::scenario::crowd(vms, Bytes::gib(2), host, 1, 10);
        setup.run_ms = u64::MAX;
        let mut world = World::new(&setup);
        let mut engine = Engine::new(setup.config(), false);
        std::iter::from_fn(move || {
            let before = engine.memory.clone();
            let (tick, _) = engine.step(&mut world);
            world.wait(&Next { at: tick.sample.at.plus(500), ..Next::default() });
            Some((before, tick))
        })
    }

    /// The lines of a simulated run, with the heads that they need.
    pub fn recorded(setup: &Setup, config: Config) -> Vec<u8> {
        let (mut world, mut engine) = (World::new(setup), Engine::new(config.clone(), false));
        let (mut recorder, mut before) = (Recorder::default(), Memory::default());
        run(&mut engine, &mut world, |engine, tick, _| {
            if recorder.wants_head() {
                recorder.head(&Head::new(&config, &before));
            }
            recorder.tick(tick.sample.at, &line(tick));
            before = engine.memory.clone();
            true
        });
        recorder.record().unpacked()
    }

    fn unknown(tick: Tick) -> (Memory, Tick) {
        (Memory::default(), tick)
    }

    /// The record of so many of them, and how large it was at most meanwhile.
    fn filled(ticks: impl Iterator<Item = (Memory, Tick)>) -> (Recorder, usize) {
        let (mut r, mut most) = (Recorder::default(), 0);
        for (memory, tick) in ticks {
            if r.wants_head() {
                r.head(&Head::new(&Config::default(), &memory));
            }
            r.tick(tick.sample.at, &line(&tick));
            most = most.max(r.bytes());
        }
        (r, most)
    }

    /// The numbers of a record's ticks.
    fn numbers(record: &[u8]) -> Result<Vec<u64>> {
        let mut numbers = Vec::new();
        replay(record, |_, tick| numbers.push(tick.number)).map(|_| numbers)
    }

    #[test]
    fn the_ring_is_bounded_and_always_starts_with_a_head() {
        // Bytes that cannot be packed, so that it is full soon.
        let mut random = fastrand::Rng::with_seed(1);
        let (mut r, most) = filled((0..60_000).map(|n| {
            let why: String = (0..200).map(|_| random.alphanumeric()).collect();
            unknown(Tick { forbidden: Some(why), ..tick(n) })
        }));
        assert!(most <= MOST + SEGMENT && r.bytes() > MOST / 2, "{most} {}", r.bytes());
        let record = r.record();
        assert!(record.text <= MOST_TEXT);
        let text = record.unpacked();
        let heads = text.split(|b| *b == b'\n').filter(|l| l.starts_with(b"{\"ebb_record")).count();
        let numbers = numbers(&text).unwrap();
        assert!(heads > 3 && numbers.windows(2).all(|w| w[0] + 1 == w[1]), "none is left out");
        assert_eq!(numbers.last(), Some(&59_999));
    }

    #[test]
    fn what_packs_well_is_bounded_by_its_lines_too() {
        let long = || Tick { forbidden: Some("x".repeat(1 << 20)), ..tick(0) };
        let (mut r, _) = filled((0..400).map(|_| unknown(long())));
        let record = r.record();
        assert!(record.text <= MOST_TEXT + (1 << 20), "{}", record.text);
        assert_eq!(record.text, record.clone().unpacked().len() as u64);
    }

    #[test]
    fn it_holds_ten_minutes_of_a_hundred_vms_and_three_of_three_hundred() {
        for (vms, minutes) in [(100, 10), (300, 3)] {
            let (mut r, most) = filled(ticks(vms).take(minutes * 121));
            let text = r.record().text;
            println!("{vms} VMs, {minutes} minutes: {text} bytes of lines in {most}");
            assert!(r.span_ms() >= minutes as u64 * 60_000, "{vms} VMs: {} ms", r.span_ms());
            assert!(most <= MOST + SEGMENT);
        }
    }

    #[test]
    fn a_record_can_be_had_at_any_moment_and_goes_on_after_it() {
        let (mut r, _) = filled((0..3).map(tick).map(unknown));
        for n in 3..20 {
            r.tick(Stamp(n), &line(&tick(n)));
            let record = r.record();
            let whole: Vec<u64> = (0..=n).collect();
            assert_eq!(numbers(&record.frames.concat()).unwrap(), whole, "packed");
            assert_eq!(record.text, record.clone().unpacked().len() as u64);
            assert_eq!(numbers(&record.unpacked()).unwrap(), whole);
        }
    }

    #[test]
    fn a_cut_off_last_line_is_tolerated_and_nonsense_is_named() {
        let mut text = line(&head());
        text.extend(line(&tick(1)));
        let whole = text.len();
        text.extend(&line(&tick(2))[..20]);
        assert_eq!(numbers(&text).unwrap(), [1]);
        text.truncate(whole);
        text.extend(b"{\"a\":1}\n");
        let said = numbers(&text).unwrap_err().to_string();
        assert!(said.starts_with("line 3 is neither"), "{said}");
        let newer = String::from_utf8(line(&head())).unwrap().replace("record\":1", "record\":9");
        let said = numbers(newer.as_bytes()).unwrap_err().to_string();
        assert!(said.contains("format 9"), "{said}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = numbers(&bytes);
        }
    }
}
