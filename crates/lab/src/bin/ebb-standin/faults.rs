//! What a test asks of a stand-in, and what is then wrong with it.
//!
//! One JSON object a connection; each key is one wish, and what is not named stays as it is:
//!
//! | key | |
//! |---|---|
//! | `latency_ms` | each command is carried out and answered so much later |
//! | `hang` | QEMU neither reads nor answers, its balloon stands still |
//! | `mute`, `refuse` | new clients are not greeted, or closed at once |
//! | `errors`, `answers` | commands that fail with this text, or return this value, till named anew |
//! | `garbage` | these bytes are sent now, or once somebody is connected |
//! | `cut` | the connection is closed |
//! | `loses` | the answer to the next order: the connection is closed instead |
//! | `order` | somebody else sets the size, bytes |
//! | `need`, `speed`, `follows`, `run` | of the guest |
//! | `help` | the guest takes so much from its balloon itself |
//! | `reset` | the guest is reset |
//! | `watch` | the state file: at each order of Ebb's what it says of this process is noted |

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

/// What is wrong with a stand-in.
#[derive(Default)]
pub struct Faults {
    pub latency: Duration,
    pub hang: bool,
    pub mute: bool,
    pub refuse: bool,
    pub errors: HashMap<String, String>,
    pub answers: HashMap<String, Value>,
    pub garbage: Option<String>,
    pub loses: bool,
    pub watch: Option<PathBuf>,
}

impl Faults {
    /// Takes in what is a fault of QEMU's; `false` for what is not.
    pub fn take(&mut self, key: &str, value: &Value) -> bool {
        let text = || value.as_str().map(str::to_owned);
        match key {
            "latency_ms" => self.latency = Duration::from_millis(value.as_u64().unwrap_or(0)),
            "hang" => self.hang = value == true,
            "mute" => self.mute = value == true,
            "refuse" => self.refuse = value == true,
            "errors" => self.errors = serde_json::from_value(value.clone()).unwrap_or_default(),
            "answers" => self.answers = serde_json::from_value(value.clone()).unwrap_or_default(),
            "garbage" => self.garbage = text(),
            "loses" => self.loses = value == true,
            "watch" => self.watch = text().map(PathBuf::from),
            _ => return false,
        }
        true
    }
}
