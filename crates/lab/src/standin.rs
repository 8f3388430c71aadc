//! A stand-in for QEMU: a process that looks like one on its command line and answers
//! what the daemon asks over QMP. It has no guest. It exists to put many VMs under one
//! daemon (`cargo lab tick`) and carries no claim about real ones.
//!
//! The lab's binary is linked under QEMU's name and started with QEMU's options;
//! [`asked_for`] recognises that.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::LabError;

/// The name under which the lab's binary is a stand-in.
pub const PROGRAM: &str = "qemu-system-standin";
/// What one says it was given.
pub const RAM: u64 = 4 << 30;

/// What a stand-in is told on its command line.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    socket: PathBuf,
    /// Its place among the others: its numbers start there.
    number: u64,
    /// Its numbers stay as they are.
    still: bool,
}

/// How one is called: those whose numbers stay as they are begin with this letter.
pub fn name(number: u32, still: bool) -> String {
    format!("{}{number:04}", if still { STILL } else { 't' })
}

const STILL: char = 's';

/// Whether this process was started as a stand-in.
pub fn asked_for(args: &[String]) -> Option<Options> {
    let program = args.first()?.rsplit('/').next()?;
    let after = |name: &str| args.iter().skip_while(|a| *a != name).nth(1);
    let socket = after("-qmp")?.strip_prefix("unix:")?.split(',').next()?;
    let name = after("-name")?;
    let number = name.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().ok()?;
    let still = name.starts_with(STILL);
    (program == PROGRAM).then(|| Options { socket: socket.into(), number, still })
}

/// Starts one: `program` is the lab's binary under the name [`PROGRAM`].
pub fn start(program: &Path, dir: &Path, name: &str) -> Result<Child, LabError> {
    let socket = format!("unix:{}/{name}-ebb.qmp,server=on,wait=off", dir.display());
    // --pdeathsig: a lab that is killed leaves none of them.
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .args(["-name", name, "-m", "4096", "-qmp", &socket, "-device", "virtio-balloon-pci"])
        .stdin(Stdio::null())
        .spawn()
        .map_err(|e| LabError::Missing(format!("cannot start a stand-in: {e}")))
}

/// Serves one client at a time, as QEMU does, until it is killed.
pub fn serve(options: &Options) -> Result<(), LabError> {
    let _ = std::fs::remove_file(&options.socket);
    let socket = UnixListener::bind(&options.socket).map_err(LabError::file(&options.socket))?;
    let mut guest = Guest::new(options.number, options.still);
    loop {
        let Ok((stream, _)) = socket.accept() else { continue };
        let _ = guest.talk(stream);
    }
}

/// What QEMU has its guest say every 2 s, and when it is told to ask.
const INTERVAL: Duration = Duration::from_secs(2);

struct Guest {
    actual: u64,
    number: u64,
    still: bool,
    /// How often the guest was asked, and when it was last.
    asked: u64,
    asked_at: Option<Instant>,
    words: Value,
}

impl Guest {
    fn new(number: u64, still: bool) -> Guest {
        Guest { actual: RAM, number, still, asked: 0, asked_at: None, words: Value::Null }
    }

    fn talk(&mut self, stream: UnixStream) -> std::io::Result<()> {
        let mut out = stream.try_clone()?;
        let greeting = json!({"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0},
            "package": "stand-in"}, "capabilities": ["oob"]}});
        writeln!(out, "{greeting}")?;
        for line in BufReader::new(stream).lines() {
            let asked: Value = serde_json::from_str(&line?)?;
            let mut answers = String::new();
            let said = self.answer(&asked["execute"], &asked["arguments"], &mut answers);
            answers += &format!("{}\n", json!({"return": said, "id": asked["id"]}));
            out.write_all(answers.as_bytes())?;
        }
        Ok(())
    }

    fn answer(&mut self, command: &Value, with: &Value, events: &mut String) -> Value {
        match command.as_str().unwrap_or_default() {
            "query-status" => json!({"status": "running", "running": true}),
            "query-memory-size-summary" => json!({"base-memory": RAM, "plugged-memory": 0}),
            "query-balloon" => json!({"actual": self.actual}),
            "balloon" => {
                self.actual = with["value"].as_u64().unwrap_or(RAM).min(RAM);
                let now = json!({"seconds": seconds(), "microseconds": 0});
                let data = json!({"actual": self.actual});
                let event = json!({"event": "BALLOON_CHANGE", "data": data, "timestamp": now});
                *events += &format!("{event}\n");
                json!({})
            }
            "qom-list" if with["path"] == "/machine/peripheral-anon" => {
                json!([{"name": "device[0]", "type": "child<virtio-balloon-pci>"}])
            }
            "qom-list" => json!([]),
            "qom-get" => match with["property"].as_str().unwrap_or_default() {
                "guest-stats" => {
                    if self.asked_at.is_none_or(|at| at.elapsed() >= INTERVAL) {
                        self.asked_at = Some(Instant::now());
                        self.words = self.statistics();
                    }
                    self.words.clone()
                }
                "guest-stats-polling-interval" => json!(2),
                _ => json!(true),
            },
            // Its interval is set, which has QEMU ask the guest.
            "qom-set" => {
                self.asked_at = None;
                json!({})
            }
            _ => json!({}),
        }
    }

    /// Numbers that move a little, as a guest's do.
    fn statistics(&mut self) -> Value {
        self.asked += 1;
        let moves = if self.still { 0 } else { self.asked };
        let noise = (moves ^ self.number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40 << 12;
        let taken = RAM - self.actual;
        let used = (RAM / 8 * (1 + self.number % 4) + noise % (32 << 20)).min(self.actual);
        let available = self.actual - used;
        json!({"last-update": seconds(), "stats": {
            "stat-total-memory": RAM - taken,
            "stat-free-memory": available / 2,
            "stat-available-memory": available,
            "stat-disk-caches": available / 2,
            "stat-swap-in": 0,
            "stat-swap-out": 0,
            "stat-major-faults": 700 + moves / 16,
            "stat-minor-faults": 100_000 + moves * 40,
            "stat-htlb-pgalloc": 0,
            "stat-htlb-pgfail": 0,
        }})
    }
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_lab_under_the_other_name_is_a_stand_in() {
        let line = |program: &str| -> Vec<String> {
            [program, "-name", "t0007", "-qmp", "unix:/d/t0007-ebb.qmp,server=on"]
                .map(String::from)
                .to_vec()
        };
        let found = Options { socket: "/d/t0007-ebb.qmp".into(), number: 7, still: false };
        assert_eq!(asked_for(&line("/x/qemu-system-standin")), Some(found));
        assert_eq!(asked_for(&line("/x/ebb-lab")), None);
        assert_eq!(asked_for(&["ebb-lab".into(), "tidy".into()]), None);
    }

    #[test]
    fn what_it_says_is_what_the_daemon_reads() {
        let mut guest = Guest::new(3, false);
        let mut events = String::new();
        guest.answer(&json!("balloon"), &json!({"value": RAM / 2}), &mut events);
        assert!(events.contains("BALLOON_CHANGE"));
        let said =
            guest.answer(&json!("qom-get"), &json!({"property": "guest-stats"}), &mut events);
        let ram = Some(ebb_core::units::Bytes(RAM));
        let (stats, problems) = ebb_host::qmp_balloon::parse_guest_stats(&said, ram);
        assert!(stats.is_some() && problems.is_empty(), "{problems:?}");
    }
}
