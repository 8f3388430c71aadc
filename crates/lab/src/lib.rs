//! The lab: real VMs on a real host, for tests and experiments.
//!
//! `image` prepares stock distribution kernels and an initramfs with the guest
//! tool; `vm` runs QEMU on them; `guest` speaks with the tool; `arena` holds
//! everything that is global to the machine (lock, budget, swap, knobs) and puts
//! it back, whatever happens; `sampler` watches; `ebb` runs the product as a user
//! would and `guest_stack` builds what guests and QEMU load; `baselines` runs others'
//! controllers; `ground_truth` counts equal pages the slow way; `experiment` holds the
//! experiments and `result` what they write; `tidy` holds the house rules. Beside it
//! `ebb-standin` is a process that looks like a VM. Only developers run any of it.

pub mod agent_requests;
pub mod arena;
pub mod baselines;
pub mod ebb;
pub mod experiment;
pub mod ground_truth;
pub mod guest;
pub mod guest_stack;
pub mod image;
pub mod libvirt;
pub mod lines;
pub mod result;
pub mod sampler;
pub mod setup;
pub mod systemd;
pub mod tidy;
pub mod vm;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ebb_sim::compare::in_parallel;

/// A file could not be read or written, or a program not run.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    /// A program that failed, or that is not there.
    #[error("`{command}` failed: {message}")]
    Command {
        command: String,
        /// The end of what it printed.
        message: String,
    },
    /// Something that is not there, and what to do about it.
    #[error("{0}")]
    Missing(String),
}

impl LabError {
    /// For `map_err`: names the path of an I/O error.
    pub fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> LabError {
        let path = path.into();
        move |source| LabError::File { path, source }
    }
}

/// Runs a program to its end and returns what it printed.
pub(crate) fn run(command: &mut std::process::Command) -> Result<String, LabError> {
    let line = format!("{command:?}").replace('"', "");
    let line: String = line.chars().take(300).collect();
    match output(command) {
        Ok((0, out, _)) => Ok(out),
        Ok((_, out, err)) => {
            Err(LabError::Command { command: line, message: tail(&(out + &err), 5) })
        }
        Err(e) => Err(LabError::Command { command: line, message: e.to_string() }),
    }
}

/// Runs a program to its end: exit code, standard output, standard error.
pub(crate) fn output(
    command: &mut std::process::Command,
) -> std::io::Result<(i32, String, String)> {
    let out = command.stdin(std::process::Stdio::null()).output()?;
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    Ok((out.status.code().unwrap_or(-1), text(&out.stdout), text(&out.stderr)))
}

/// Does `work` for each item, two at a time, and panics where one did: for guests
/// that have nothing to do with each other.
pub fn in_pairs<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) {
    in_parallel(items, 2, work);
}

/// Locks it, also where a thread that held it has panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that works beside its owner until it is ended or dropped.
#[derive(Debug)]
pub struct Background<T> {
    quit: Arc<AtomicBool>,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Background<T> {
    /// `work` returns soon after the flag was set; a thread that is parked then goes on.
    pub fn start(work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> Background<T> {
        let quit = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&quit);
        Background { quit, thread: Some(thread::spawn(move || work(&theirs))) }
    }
}

impl<T> Background<T> {
    /// Ends it, once; panics where it did.
    pub fn end(&mut self) -> T {
        self.join().expect("ended twice").expect("a thread beside this one panicked")
    }

    fn join(&mut self) -> Option<thread::Result<T>> {
        self.quit.store(true, SeqCst);
        let thread = self.thread.take()?;
        thread.thread().unpark();
        Some(thread.join())
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// What a wait looks for: that something is so, or something that is not there yet.
pub trait Sought {
    type Found;
    fn found(self) -> Option<Self::Found>;
}

impl Sought for bool {
    type Found = ();

    fn found(self) -> Option<()> {
        self.then_some(())
    }
}

impl<T> Sought for Option<T> {
    type Found = T;

    fn found(self) -> Option<T> {
        self
    }
}

/// Looks again and again, until something is found or the time is over.
pub fn poll<S: Sought>(deadline: Duration, mut look: impl FnMut() -> S) -> Option<S::Found> {
    let until = Instant::now() + deadline;
    loop {
        let found = look().found();
        if found.is_some() || Instant::now() >= until {
            return found;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Now, milliseconds since 1970: the daemon's clock in records and decisions.
pub fn wall_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |d| d.as_millis() as u64)
}

/// The last lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.trim_end().lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
