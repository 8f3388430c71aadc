//! A look that may take long, beside the loop: what `/proc` tells of a process's memory waits for
//! its mmap lock, which the process holds for as long as it likes.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

#[derive(Debug)]
pub struct BackgroundLook<T>(Option<Receiver<T>>);

impl<T> Default for BackgroundLook<T> {
    fn default() -> BackgroundLook<T> {
        BackgroundLook(None)
    }
}

impl<T: Send + 'static> BackgroundLook<T> {
    /// None is under way.
    pub fn is_idle(&self) -> bool {
        self.0.is_none()
    }

    /// Begins this look, and waits for its end, at most this long. One that is under way is not
    /// waited for again: what it has found by now is taken.
    pub fn look(
        &mut self,
        look: impl FnOnce() -> T + Send + 'static,
        patience: Duration,
    ) -> Option<T> {
        self.look_then(look, patience, || ())
    }

    /// Begins this look, as [`look`](Self::look); `then` is called when what was found is there.
    pub fn look_then(
        &mut self,
        look: impl FnOnce() -> T + Send + 'static,
        patience: Duration,
        then: impl FnOnce() + Send + 'static,
    ) -> Option<T> {
        let begins = self.0.is_none();
        if begins {
            let (found, answer) = channel();
            let run = move || {
                let _ = found.send(look());
                then();
            };
            std::thread::Builder::new().name("look".into()).spawn(run).ok()?;
            self.0 = Some(answer);
        }
        let found = self.0.as_ref()?.recv_timeout(if begins { patience } else { Duration::ZERO });
        if !matches!(found, Err(RecvTimeoutError::Timeout)) {
            self.0 = None;
        }
        found.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::testing::within_a_minute;

    #[test]
    fn a_look_that_takes_long_is_not_waited_for_and_comes_later() {
        let mut beside = BackgroundLook::default();
        let (go_on, goes_on) = channel::<()>();
        let long = Duration::from_secs(60);
        let short = Duration::from_millis(1);
        assert_eq!(beside.look(move || goes_on.recv().map(|()| 1), short), None);
        let begun = Instant::now();
        assert_eq!(beside.look(|| Ok(2), long), None, "one at a time");
        assert!(begun.elapsed() < long, "and only who begins it waits");
        go_on.send(()).unwrap();
        assert_eq!(within_a_minute(|| beside.look(|| Ok(2), long)), Ok(1));
        assert_eq!(beside.look(|| Ok(2), long), Some(Ok(2)));
        let mut beside = BackgroundLook::<u32>::default();
        assert_eq!(beside.look(|| panic!("a fault"), long), None);
        assert_eq!(beside.look(|| 3, long), Some(3));
    }
}
