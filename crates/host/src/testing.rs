//! What tests of several modules share: trees of files, sockets, and peers that they script.

use std::fs;
use std::io::{BufRead, BufReader, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebb_core::config::{AgentUse, SocketUse};
use ebb_core::wire::{Answer, Command, Hello, Lines, PROTOCOL, Reply, ReplyResult, Request};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::libvirt::NOT_ASKED;
use crate::probe::trust::TrustRules;
use crate::root::Root;
use crate::vm::Access;

/// Every process that is called QEMU: a fixture's files belong to the user of the tests.
pub(crate) const ANYTHING: TrustRules =
    TrustRules { users: None, programs: None, containers: true };

/// Ebb may do all with the VM.
pub(crate) fn full_access() -> Access {
    Access {
        managed: true,
        sockets: SocketUse::Any,
        agent: AgentUse::On,
        agent_then: AgentUse::On,
        ..Access::default()
    }
}

/// A tree of files that stands for `/`, for as long as it is kept.
pub(crate) struct Tree {
    root: Root,
    _dir: TempDir,
}

impl Deref for Tree {
    type Target = Root;

    fn deref(&self) -> &Root {
        &self.root
    }
}

/// A tree of these files, and of an empty `/proc`.
pub(crate) fn tree(files: &[(&str, &str)]) -> Tree {
    let dir = tempfile::tempdir().unwrap();
    let tree = Tree { root: Root::at(dir.path()), _dir: dir };
    tree.dir("/proc");
    files.iter().for_each(|(path, text)| tree.put(path, text));
    tree
}

impl Tree {
    pub(crate) fn dir(&self, path: impl AsRef<Path>) {
        fs::create_dir_all(self.path(path)).unwrap();
    }

    /// A link in place of what is there.
    pub(crate) fn link(&self, to: impl AsRef<Path>, path: impl AsRef<Path>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(to, path).unwrap();
    }

    /// A pipe without a writer: who reads it waits.
    pub(crate) fn pipe(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        path
    }

    pub(crate) fn listen(&self, path: impl AsRef<Path>) -> UnixListener {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        UnixListener::bind(path).unwrap()
    }

    pub(crate) fn remove(&self, path: impl AsRef<Path>) {
        let path = self.path(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    /// A process of this name.
    pub(crate) fn process(&self, pid: u32, comm: &str, state: char, start: u64) {
        self.put(format!("/proc/{pid}/stat"), stat(pid, comm, state, start));
        self.put(format!("/proc/{pid}/comm"), format!("{comm}\n"));
    }

    /// A process of QEMU with these arguments.
    pub(crate) fn vm(&self, pid: u32, start: u64, arguments: &str) {
        self.process(pid, "kvm", 'S', start);
        self.put(format!("/proc/{pid}/cmdline"), format!("kvm\0{arguments}\0"));
    }
}

/// `/proc/PID/stat`, as far as it is used.
pub(crate) fn stat(pid: u32, comm: &str, state: char, start: u64) -> String {
    format!("{pid} ({comm}) {state}{} {start} 0", " 0".repeat(18))
}

/// A socket of its own.
pub(crate) fn socket() -> (TempDir, UnixListener, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    (dir, UnixListener::bind(&path).unwrap(), path)
}

/// Tries until there is something.
#[track_caller]
pub(crate) fn within_a_minute<T>(mut gives: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(given) = gives() {
            return given;
        }
        assert!(Instant::now() < until, "not within a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Tries until it is so.
#[track_caller]
pub(crate) fn eventually(mut is_so: impl FnMut() -> bool) {
    within_a_minute(|| is_so().then_some(()));
}

/// What a QEMU says to a command: what it returns, or that it refuses.
pub(crate) type Said = Result<Value, &'static str>;

/// Serves a client as QEMU does until it leaves; what it `says` to a command and its line, where
/// it answers.
pub(crate) fn qmp(mut stream: UnixStream, mut says: impl FnMut(&Value, &str) -> Option<Said>) {
    let _ = stream.write_all(b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n");
    for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
        let asked: Value = serde_json::from_str(&line).unwrap();
        if let Some(said) = says(&asked, &line) {
            let _ = stream.write_all(qmp_answer(said, &asked["id"]).as_bytes());
        }
    }
}

pub(crate) fn qmp_answer(said: Said, id: &Value) -> String {
    let (key, said) = match said {
        Ok(said) => ("return", said),
        Err(NOT_ASKED) => ("error", json!({ "class": NOT_ASKED, "desc": "a job holds it" })),
        Err(why) => ("error", json!({ "class": "GenericError", "desc": why })),
    };
    json!({ key: said, "id": id }).to_string() + "\n"
}

/// Serves a client as an agent does until it leaves. `says`: its answer to a command, given the
/// number of descriptors that have come; it leaves where there is none. It answers hello by itself.
pub(crate) fn agent(
    mut stream: &UnixStream,
    wants_descriptor: bool,
    mut says: impl FnMut(Command, usize) -> Option<Answer>,
) {
    let mut lines = Lines::default();
    let mut descriptors = 0;
    loop {
        let mut buffer = [0u8; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let got = recvmsg(stream, &mut parts, &mut control, RecvFlags::empty());
        let Some(got) = got.ok().map(|got| got.bytes).filter(|got| *got > 0) else { return };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors += fds.count();
            }
        }
        let mut requests = Vec::new();
        lines.feed(&buffer[..got], |l| requests.push(Request::parse(l).unwrap())).unwrap();
        for request in requests {
            let answer = match request.command {
                Command::Hello => Some(Answer::Hello(Hello {
                    protocol: PROTOCOL,
                    version: "0".into(),
                    pid: std::process::id(),
                    advises: false,
                    hashes: false,
                    wants_descriptor,
                })),
                command => says(command, descriptors),
            };
            let Some(answer) = answer else { return };
            let reply = Reply { id: request.id, result: ReplyResult::Ok(answer) };
            let _ = stream.write_all(&reply.line());
        }
    }
}
