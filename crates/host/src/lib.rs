//! Everything that reads from or writes to the Linux host.
//!
//! Reading and parsing are apart: `read_x(root)` opens a file below a [`root::Root`],
//! `parse_x(text)` is pure. What is read is checked and bounded here. Which VM gives, is given or
//! is merged is not decided in this crate. New sources go to `probe/`, new acts on the machine to
//! `act/`, new QMP meanings to `qmp_balloon.rs`; [`linux::LinuxHost`] joins them into one sample
//! per tick.

pub mod act;
pub mod agent;
mod agent_link;
mod background_look;
pub mod daemon_client;
pub mod durable;
pub mod hands_off;
mod intervals;
mod inventory;
pub mod libvirt;
mod limits;
pub mod linux;
pub mod probe;
pub mod qmp;
pub mod qmp_balloon;
pub mod root;
pub mod scan;
mod sockets;
pub mod sys;
#[cfg(test)]
mod testing;
mod vm;
pub mod waker;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Also after a thread has panicked that held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
