//! Lines for the journal, on stderr.
//!
//! The reader may be slow: the journal of a host that thrashes, a pager that is not scrolled. The
//! daemon's loop never waits for it. A thread writes the lines. Up to [`WAITING`] lines wait for
//! it; further ones are lost and counted.

use std::fs::File;
use std::io::{Write, stderr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Lines that may wait: those of some ticks in which every VM has one.
const WAITING: usize = 1000;
const LOST: &str = " lines lost: the log is read too slowly";
/// How long the end waits for what is not written yet.
const PATIENCE: Duration = Duration::from_secs(1);

static DAEMONS: OnceLock<Lines> = OnceLock::new();

/// From here on [`say`] does not wait.
pub fn begin() {
    // Not by way of std's `stderr`: while that waits, it has a lock that a panic needs.
    let own = stderr().as_fd().try_clone_to_owned().map(File::from);
    DAEMONS.get_or_init(|| match own {
        Ok(file) => Lines::to(file),
        Err(_) => Lines::to(stderr()),
    });
}

/// A line for the journal, or for the person who typed the command.
pub fn say(text: &str) {
    match DAEMONS.get() {
        Some(lines) => lines.say(text),
        None => write(&mut stderr(), text),
    }
}

/// Waits a moment for what was said to be written.
pub fn flush() {
    if let Some(lines) = DAEMONS.get() {
        lines.flush(PATIENCE);
    }
}

fn write(to: &mut impl Write, text: &str) {
    // One call: lines of several processes do not mix.
    let _ = to.write_all(format!("{text}\n").as_bytes());
}

enum Line {
    Text(String),
    /// All before it is written.
    End(Sender<()>),
}

struct Lines {
    waiting: SyncSender<Line>,
    lost: Arc<AtomicU64>,
}

impl Lines {
    fn to(mut out: impl Write + Send + 'static) -> Lines {
        let (waiting, lines): (_, Receiver<Line>) = sync_channel(WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let missed = Arc::clone(&lost);
        std::thread::spawn(move || {
            for line in lines {
                match line {
                    Line::Text(text) => write(&mut out, &text),
                    Line::End(tell) => drop(tell.send(())),
                }
                let missed = missed.swap(0, Relaxed);
                if missed > 0 {
                    write(&mut out, &format!("{missed}{LOST}"));
                }
            }
        });
        Lines { waiting, lost }
    }

    fn say(&self, text: &str) {
        if self.waiting.try_send(Line::Text(text.to_owned())).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }

    fn flush(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let (tell, told) = channel();
        while Instant::now() < until {
            if self.waiting.try_send(Line::End(tell.clone())).is_ok() {
                let _ = told.recv_timeout(until.saturating_duration_since(Instant::now()));
                break;
            }
            std::thread::sleep(PATIENCE / 100);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_log_that_is_not_read_keeps_nobody_waiting_and_what_is_lost_is_counted() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let lines = Lines::to(ours);
        // Far more than a socket and the queue take.
        let line = "x".repeat(1000);
        (0..20_000).for_each(|_| lines.say(&line));
        lines.flush(Duration::from_millis(10));
        theirs.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let (mut text, mut part) = (String::new(), [0; 1 << 16]);
        let mut read_until = |said: u64, last: &str| {
            let written =
                |text: &str| text.lines().filter(|l| *l == line || *l == last).count() as u64;
            let lost = |text: &str| {
                let told = text.lines().filter_map(|l| l.strip_suffix(LOST));
                told.map(|n| n.parse::<u64>().unwrap()).sum::<u64>()
            };
            while !text.ends_with('\n') || written(&text) + lost(&text) < said {
                let n = theirs.read(&mut part).unwrap();
                text += std::str::from_utf8(&part[..n]).unwrap();
            }
            assert_eq!(written(&text) + lost(&text), said);
            lost(&text)
        };
        let lost = read_until(20_000, "");
        assert!(lost > 10_000, "{lost}");
        lines.say("heard again");
        assert_eq!(read_until(20_001, "heard again"), lost);
    }
}
