//! Real-time priority for the threads that a vCPU may wait for.
//!
//! A write that meets an open window waits for the thread that opened it. If that thread has to
//! give its CPU to another one, the write waits for that as well: 4 ms and more. So the thread has
//! real-time priority while windows are open, the lowest there is, and the fault handler always. A
//! recycler that works for longer takes turns with other threads every `BURST`, between
//! two windows.
//!
//! Where the process may not have it (it takes root, CAP_SYS_NICE or RLIMIT_RTPRIO, and QEMU's
//! sandbox refuses it with `resourcecontrol=deny`), all goes on with ordinary priority.

use std::time::{Duration, Instant};

use crate::sys;

/// As long as a thread of ordinary priority keeps its CPU beside others, about.
const BURST: Duration = Duration::from_millis(3);

/// This thread has real-time priority, if it may, until this is dropped.
#[derive(Debug)]
pub struct RealTime(bool);

impl RealTime {
    pub fn begin() -> RealTime {
        RealTime(sys::real_time_begin())
    }
}

impl Drop for RealTime {
    fn drop(&mut self) {
        if self.0 {
            let _ = sys::set_scheduler(libc::SCHED_OTHER, 0);
        }
    }
}

/// Real-time priority of a thread that opens window after window.
#[derive(Debug, Default)]
pub struct Bursts(Option<(RealTime, Instant)>);

impl Bursts {
    /// A window is about to be opened.
    pub fn before_window(&mut self) {
        self.0.get_or_insert_with(|| (RealTime::begin(), Instant::now()));
    }

    /// It is closed. Other threads may run here.
    pub fn after_window(&mut self) {
        self.0.take_if(|(_, since)| since.elapsed() >= BURST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_real_time() -> bool {
        // SAFETY: takes and gives plain numbers; 0 is this thread.
        unsafe { libc::sched_getscheduler(0) == libc::SCHED_FIFO }
    }

    #[test]
    fn a_thread_has_real_time_priority_in_windows_and_takes_turns_between_them() {
        let first = RealTime::begin();
        let may = is_real_time();
        drop(first);
        assert!(!is_real_time());
        let mut bursts = Bursts::default();
        bursts.before_window();
        assert_eq!(is_real_time(), may, "where it may have it");
        std::thread::sleep(BURST);
        assert_eq!(is_real_time(), may);
        bursts.after_window();
        assert!(!is_real_time(), "it has had its turn");
        bursts.before_window();
        drop(bursts);
        assert!(!is_real_time());
    }
}
