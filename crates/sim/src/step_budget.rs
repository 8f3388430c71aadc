//! What a step has to give: the host's memory and the guest's time.

use ebb_core::units::Bytes;

/// Swapping out on the host while a guest waits for the page, bytes a second.
pub const SWAP_OUT_RATE: f64 = 500e6;
/// What the host can do for its guests within one step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    pub free: Bytes,
    /// What can be swapped out while a guest waits.
    pub can_swap_out: Bytes,
    /// What can be swapped in.
    pub can_swap_in: Bytes,
    /// What had to be swapped out so far.
    pub wanted_out: Bytes,
    /// What was asked for and could not be had.
    pub refused: Bytes,
}

impl Room {
    /// Takes host memory: free, or swapped out for it while the guest waits.
    pub(crate) fn take(&mut self, bytes: Bytes, time: &mut Time) -> Bytes {
        let free = bytes.min(self.free);
        self.free = self.free - free;
        let forced = (bytes - free).min(self.can_swap_out).min(time.at(SWAP_OUT_RATE));
        self.can_swap_out = self.can_swap_out - forced;
        self.wanted_out += forced;
        time.wait_for_host(forced, SWAP_OUT_RATE);
        self.refused += bytes - free - forced;
        free + forced
    }
}

/// What is left of a step, ms.
pub(crate) struct Time {
    whole: f64,
    left: f64,
    /// Waited for the host.
    pub for_host: f64,
}

impl Time {
    pub fn of(dt_ms: u64) -> Time {
        Time { whole: dt_ms as f64, left: dt_ms as f64, for_host: 0.0 }
    }

    /// What can be moved at this rate in the time left.
    pub fn at(&self, rate: f64) -> Bytes {
        Bytes((rate * self.left / 1000.0) as u64)
    }

    pub fn wait(&mut self, bytes: Bytes, rate: f64) {
        self.left = (self.left - bytes.0 as f64 * 1000.0 / rate).max(0.0);
    }

    pub fn wait_for_host(&mut self, bytes: Bytes, rate: f64) {
        let before = self.left;
        self.wait(bytes, rate);
        self.for_host += before - self.left;
    }

    pub fn wait_share(&mut self, share: f64) {
        self.left *= 1.0 - share.clamp(0.0, 1.0);
    }

    pub fn wait_in_vain(&mut self, for_host: bool) {
        if for_host {
            self.for_host += self.left;
        }
        self.left = 0.0;
    }

    pub fn spent(&self) -> f64 {
        self.whole - self.left
    }
}
