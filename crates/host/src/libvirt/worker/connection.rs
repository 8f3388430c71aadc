//! A connection to a libvirt daemon, and the calls that are under way on it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::io::Errno;

use super::super::bridge::Purpose;
use super::super::calls::{self, Procedure};
use super::super::rpc::Rpc;
use super::super::watch::Step;
use super::super::{Address, PATIENCE};
use crate::beside::Beside;

/// Calls under way on one connection; libvirt's own limit is 5.
const AT_ONCE: usize = 3;

pub(super) type Connected = rustix::io::Result<OwnedFd>;

#[derive(Debug)]
pub(super) enum For {
    Auth,
    Open,
    Register,
    /// Statistics of all domains, and when they were asked for.
    Bulk(Instant),
    /// Statistics of this client's domain alone, and when they were asked for.
    Alone(u64, Instant),
    Domain(u64, Purpose),
    Watch(u64, Step),
}

#[derive(Debug)]
pub(super) struct Connection {
    pub socket: OwnedFd,
    pub rpc: Rpc,
    pub calls: BTreeMap<u32, For>,
    pub open: bool,
    /// Events come on this connection.
    pub tells: bool,
}

impl Connection {
    /// Connects to libvirt's socket and queues the first call. The error is a text for people.
    /// What a container has mounted may keep the look at its socket waiting: that is `inside`.
    pub fn open(address: &Address, inside: &mut Beside<Connected>) -> Result<Connection, String> {
        let path = address.socket.display();
        let socket = match &address.container {
            None => address.connect(),
            Some(_) => {
                let address = address.clone();
                let found = inside.look(move || address.connect(), PATIENCE);
                found.unwrap_or(Err(Errno::TIMEDOUT))
            }
        };
        let socket = socket.map_err(|e| match e {
            Errno::NOENT | Errno::CONNREFUSED => {
                format!("{path}: libvirt does not run: start libvirtd or virtqemud")
            }
            Errno::ACCESS | Errno::PERM => format!("{path}: permission denied: run Ebb as root"),
            e => format!("{path}: {e}"),
        })?;
        let peer = rustix::net::sockopt::socket_peercred(&socket).map_err(|e| e.to_string())?;
        let pid = peer.pid.as_raw_pid().cast_unsigned();
        if !address.is_of(pid) {
            return Err(format!("{path}: served by process {pid} of another pid namespace"));
        }
        let peer = peer.uid.as_raw();
        // A link in a user's directory may lead to the system's socket.
        if let Some(owner) = address.owner.filter(|owner| *owner != peer) {
            return Err(format!("{path}: served by a process of uid {peer}, not of uid {owner}"));
        }
        let mut new = Connection {
            socket,
            rpc: Rpc::new(address.container.is_some()),
            calls: BTreeMap::new(),
            open: false,
            tells: false,
        };
        new.call(calls::AUTH_LIST, &[], For::Auth);
        Ok(new)
    }

    pub fn call(&mut self, (program, procedure): Procedure, arguments: &[u8], purpose: For) {
        let serial = self.rpc.call(program, procedure, arguments);
        self.calls.insert(serial, purpose);
    }

    pub fn is_free(&self) -> bool {
        self.open && self.calls.len() < AT_ONCE
    }
}
