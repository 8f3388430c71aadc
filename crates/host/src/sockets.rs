//! Unix stream sockets that never block: how QEMUs, agents and libvirt are reached, read and
//! written to.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

/// Room for the first read, bytes. Where more comes the room is doubled.
const AT_ONCE: usize = 4 << 10;
/// Most bytes of one [`receive`], so that a flood does not keep the caller.
const MAX_READ: usize = 4 << 20;

/// Unix sockets connect at once or not at all.
pub(crate) fn connect(path: &Path) -> Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match SocketAddrUnix::new(path) {
        Err(Errno::NAMETOOLONG) => connect_long(&socket, path)?,
        Err(e) => return Err(e),
        Ok(address) => rustix::net::connect(&socket, &address)?,
    }
    Ok(socket)
}

/// Socket addresses hold 108 bytes; a longer path goes through its directory.
fn connect_long(socket: &OwnedFd, path: &Path) -> Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::NAMETOOLONG);
    };
    let dir = rustix::fs::open(dir, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    rustix::net::connect(socket, &SocketAddrUnix::new(fd_path(&dir).join(name))?)
}

/// A path that leads to what a descriptor of ours is open on.
pub(crate) fn fd_path(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// The process that listens (`SO_PEERCRED`); `None`: of another pid namespace.
pub(crate) fn peer_pid(socket: &OwnedFd) -> Option<u32> {
    let cred = rustix::net::sockopt::socket_peercred(socket).ok()?;
    u32::try_from(rustix::process::Pid::as_raw(Some(cred.pid))).ok().filter(|pid| *pid > 0)
}

/// What has come, and whether the peer is still there.
pub(crate) fn receive(socket: &OwnedFd) -> Result<(Vec<u8>, bool)> {
    let mut all = Vec::new();
    while all.len() < MAX_READ {
        all.reserve(AT_ONCE);
        match rustix::net::recv(socket, spare_capacity(&mut all), RecvFlags::empty()) {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Ok((all, false)),
            // There was no more; what comes later `poll` tells.
            Ok(_) if all.len() < all.capacity() => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break,
            Err(e) => return Err(e),
        }
    }
    Ok((all, true))
}

/// What to poll a socket for; `writes`: something waits to be written.
pub(crate) fn interest(writes: bool) -> PollFlags {
    if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
}

/// Waits at most this long for any of these; tells of each whether it is ready.
pub(crate) fn ready(fds: &mut [PollFd<'_>], left: Duration) -> Vec<bool> {
    let polled = Timespec::try_from(left).is_ok_and(|left| poll(fds, Some(&left)).is_ok());
    fds.iter().map(|fd| polled && !fd.revents().is_empty()).collect()
}

/// A descriptor that goes with a byte of an outbox, and that byte's place.
pub(crate) type Descriptor = Option<(usize, OwnedFd)>;

/// Writes what the socket takes now: the rest stays in the outbox.
pub(crate) fn send(
    socket: &OwnedFd,
    outbox: &mut Vec<u8>,
    descriptor: &mut Descriptor,
) -> Result<()> {
    while !outbox.is_empty() {
        let sent = match descriptor {
            Some((0, fd)) => send_descriptor(socket, outbox, fd.as_fd()),
            Some((at, _)) => rustix::net::send(socket, &outbox[..*at], SendFlags::NOSIGNAL),
            None => rustix::net::send(socket, outbox, SendFlags::NOSIGNAL),
        };
        match sent {
            Ok(n) => {
                outbox.drain(..n);
                // Gone with its byte, or nearer to it.
                let left = descriptor.take().filter(|(at, _)| *at > 0);
                *descriptor = left.map(|(at, fd)| (at - n, fd));
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Sends bytes, and a descriptor with the first of them.
fn send_descriptor(socket: &OwnedFd, bytes: &[u8], descriptor: BorrowedFd<'_>) -> Result<usize> {
    let fds = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}
