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

    /// Begins this look unless one is under way, and waits for its end, at most this long.
    pub fn look(
        &mut self,
        look: impl FnOnce() -> T + Send + 'static,
        patience: Duration,
    ) -> Option<T> {
        self.look_then(look, patience, || ())
    }

    /// Begins this look and waits for its end, as [`look`](Self::look); `then` is called when what
    /// was found is there.
    pub fn look_then(
        &mut self,
        look: impl FnOnce() -> T + Send + 'static,
        patience: Duration,
        then: impl FnOnce() + Send + 'static,
    ) -> Option<T> {
        if self.0.is_none() {
            let (found, answer) = channel();
            let run = move || {
                let _ = found.send(look());
                then();
            };
            std::thread::Builder::new().name("look".into()).spawn(run).ok()?;
            self.0 = Some(answer);
        }
        let found = self.0.as_ref()?.recv_timeout(patience);
        if !matches!(found, Err(RecvTimeoutError::Timeout)) {
            self.0 = None;
        }
        found.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_takes_long_is_not_waited_for_and_comes_later() {
        let mut beside = BackgroundLook::default();
        let (go_on, goes_on) = channel::<()>();
        let long = Duration::from_secs(60);
        let short = Duration::from_millis(1);
        assert_eq!(beside.look(move || goes_on.recv().map(|()| 1), short), None);
        assert_eq!(beside.look(|| Ok(2), short), None, "one at a time");
        go_on.send(()).unwrap();
        assert_eq!(beside.look(|| Ok(2), long), Some(Ok(1)));
        assert_eq!(beside.look(|| Ok(2), long), Some(Ok(2)));
        let mut beside = BackgroundLook::<u32>::default();
        assert_eq!(beside.look(|| panic!("a fault"), long), None);
        assert_eq!(beside.look(|| 3, long), Some(3));
    }
}
