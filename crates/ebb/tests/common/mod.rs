//! How a test hears that a daemon is ready: the daemon sends `READY=1` to the socket that
//! `NOTIFY_SOCKET` names.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A machine that is busy is slow.
const PATIENCE: Duration = Duration::from_secs(90);

/// The socket on which one daemon says that it is ready.
pub struct Notify {
    pub path: PathBuf,
    socket: UnixDatagram,
}

impl Notify {
    pub fn bind(dir: &Path) -> Notify {
        let path = dir.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Notify { path, socket }
    }

    /// Fails when nothing comes for 90 seconds.
    pub fn await_ready(&self) -> io::Result<()> {
        let mut text = [0; 200];
        // The watchdog's first message comes before that of readiness.
        while !text.starts_with(b"READY=1") {
            match self.socket.recv(&mut text) {
                // A machine that is stopped and goes on interrupts a read with a timeout.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                received => drop(received?),
            }
        }
        Ok(())
    }
}
