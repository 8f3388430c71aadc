//! libvirt's protocol as a state machine: bytes in, answers and events and bytes out, no socket
//! and no clock, so that tests and the fuzzer drive all of it.
//!
//! A message is its length, a header of six numbers, and arguments or results in XDR. Source:
//! libvirt `src/rpc/virnetprotocol.x`, `src/remote/remote_protocol.x`; procedures are never
//! renumbered.

use std::collections::BTreeMap;

use super::xdr::{Malformed, Reader, Writer};

/// libvirt's own procedures.
pub const REMOTE: u32 = 0x2000_8086;
/// Those that only its QEMU driver has.
pub const QEMU: u32 = 0x2000_8087;
/// Whether the peer lives.
const KEEPALIVE: u32 = 0x6b65_6570;
const PING: u32 = 1;
const PONG: u32 = 2;
/// The version of all three programs.
const VERSION: u32 = 1;
/// Types of messages.
const CALL: u32 = 0;
const REPLY: u32 = 1;
const MESSAGE: u32 = 2;
/// Length and header, bytes.
const HEADER: usize = 28;
/// Longest message taken, bytes: statistics of 1,000 domains are 1 MB.
pub const MAX_MESSAGE: usize = 16 << 20;
/// Longest message taken of a daemon in a container, which has a VM or a few.
const MAX_OF_CONTAINER: usize = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The answer to a call: what the procedure returns, or libvirt's error.
    Answer { serial: u32, result: Result<Vec<u8>, Refused> },
    /// An event: its procedure and what that says.
    Event(u32, Vec<u8>),
}

/// A call that failed; the connection is fine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refused {
    /// `virErrorNumber`.
    pub code: i32,
    /// libvirt's words, cut and cleaned.
    pub message: String,
}

/// The state of one connection. The caller has the socket.
#[derive(Debug, Default)]
pub struct Rpc {
    inbox: Vec<u8>,
    /// What is to be written.
    pub outbox: Vec<u8>,
    serial: u32,
    pending: BTreeMap<u32, (u32, u32)>,
    contained: bool,
}

impl Rpc {
    /// `contained`: with a daemon in a container, which may be hostile.
    pub fn new(contained: bool) -> Rpc {
        Rpc { contained, ..Rpc::default() }
    }

    /// Queues a call and returns its number.
    pub fn call(&mut self, program: u32, procedure: u32, arguments: &[u8]) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.pending.insert(self.serial, (program, procedure));
        self.send([program, procedure, CALL, self.serial], arguments);
        self.serial
    }

    fn send(&mut self, [program, procedure, kind, serial]: [u32; 4], body: &[u8]) {
        let header = Writer::default().u32((HEADER + body.len()) as u32).u32(program).u32(VERSION);
        let header = header.u32(procedure).u32(kind).u32(serial).u32(0).done();
        self.outbox.extend(header);
        self.outbox.extend(body);
    }

    /// Takes bytes from the peer, in any pieces. After an error nothing that follows can be
    /// trusted.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Heard>, Malformed> {
        self.inbox.extend_from_slice(bytes);
        let mut heard = Vec::new();
        let mut at = 0;
        let most = if self.contained { MAX_OF_CONTAINER } else { MAX_MESSAGE };
        while let Some(length) = Reader(&self.inbox[at..]).u32().ok().map(|n| n as usize) {
            if !(HEADER..=most).contains(&length) {
                return Err(Malformed);
            }
            let Some(message) = self.inbox.get(at + 4..at + length).map(<[u8]>::to_vec) else {
                break;
            };
            at += length;
            heard.extend(self.message(&message)?);
        }
        self.inbox.drain(..at);
        Ok(heard)
    }

    fn message(&mut self, message: &[u8]) -> Result<Option<Heard>, Malformed> {
        let mut r = Reader(message);
        let (program, version, procedure) = (r.u32()?, r.u32()?, r.u32()?);
        let (kind, serial, status) = (r.u32()?, r.u32()?, r.u32()?);
        if version != VERSION {
            return Err(Malformed);
        }
        match (program, kind) {
            (KEEPALIVE, MESSAGE) => {
                if procedure == PING {
                    self.send([KEEPALIVE, PONG, MESSAGE, serial], &[]);
                }
                Ok(None)
            }
            (_, MESSAGE) => Ok(Some(Heard::Event(procedure, r.0.to_vec()))),
            (_, REPLY) => {
                if self.pending.remove(&serial) != Some((program, procedure)) {
                    return Err(Malformed);
                }
                let result = if status == 0 { Ok(r.0.to_vec()) } else { Err(refused(&mut r)?) };
                Ok(Some(Heard::Answer { serial, result }))
            }
            _ => Err(Malformed),
        }
    }
}

/// `remote_error`, as far as it matters.
fn refused(r: &mut Reader<'_>) -> Result<Refused, Malformed> {
    let (code, _domain) = (r.i32()?, r.i32()?);
    let message = r.maybe_text()?.unwrap_or_else(|| format!("libvirt error {code}"));
    let message = ebb_core::text::printable(&message, 300);
    Ok(Refused { code, message })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reply(program: u32, procedure: u32, serial: u32, status: u32, body: &[u8]) -> Vec<u8> {
        let w = Writer::default().u32((HEADER + body.len()) as u32).u32(program).u32(VERSION);
        let mut bytes = w.u32(procedure).u32(REPLY).u32(serial).u32(status).done();
        bytes.extend(body);
        bytes
    }

    #[test]
    fn answers_find_their_calls_whatever_their_order_and_pieces() {
        let mut rpc = Rpc::default();
        let (one, two) = (rpc.call(REMOTE, 1, &[]), rpc.call(QEMU, 1, &[0; 8]));
        assert_eq!(rpc.outbox.len(), 2 * HEADER + 8);
        let error = Writer::default().i32(38).i32(10).some_text("no\tdomain").done();
        let mut bytes = reply(QEMU, 1, two, 0, &[0, 0, 0, 9]);
        bytes.extend(reply(REMOTE, 1, one, 1, &error));
        let heard: Vec<Heard> = bytes.iter().flat_map(|b| rpc.feed(&[*b]).unwrap()).collect();
        assert_eq!(heard[0], Heard::Answer { serial: two, result: Ok(vec![0, 0, 0, 9]) });
        let refused = Refused { code: 38, message: "no domain".into() };
        assert_eq!(heard[1], Heard::Answer { serial: one, result: Err(refused) });
        assert!(rpc.pending.is_empty());
    }

    #[test]
    fn an_answer_to_nothing_or_an_impossible_length_ends_it() {
        let mut rpc = Rpc::default();
        let serial = rpc.call(REMOTE, 1, &[]);
        assert_eq!(rpc.feed(&reply(REMOTE, 2, serial, 0, &[])), Err(Malformed), "another call's");
        for length in [0, 27, u32::MAX] {
            assert_eq!(Rpc::default().feed(&length.to_be_bytes()), Err(Malformed));
        }
        let long = (MAX_OF_CONTAINER as u32 + 1).to_be_bytes();
        assert_eq!(Rpc::new(false).feed(&long), Ok(vec![]));
        assert_eq!(Rpc::new(true).feed(&long), Err(Malformed), "of a container");
    }

    #[test]
    fn a_ping_is_answered() {
        let mut rpc = Rpc::default();
        let mut ping = Rpc::default();
        ping.send([KEEPALIVE, PING, MESSAGE, 0], &[]);
        assert_eq!(rpc.feed(&ping.outbox), Ok(vec![]));
        let mut pong = Rpc::default();
        pong.send([KEEPALIVE, PONG, MESSAGE, 0], &[]);
        assert_eq!(rpc.outbox, pong.outbox);
    }

    proptest! {
        #[test]
        fn any_bytes_are_safe(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20)) {
            let mut rpc = Rpc::default();
            rpc.call(REMOTE, 1, &[]);
            for piece in pieces {
                if rpc.feed(&piece).is_err() {
                    break;
                }
                prop_assert!(rpc.inbox.len() <= 4000);
            }
        }
    }
}
