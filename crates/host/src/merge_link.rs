//! Opening a VM's RAM to KSM, or closing it, between ticks.
//!
//! The same as `act/mergeable.rs` does at once, over the connection that a tick
//! drives, and without waiting: ask for the memory backends, set each, have the
//! mappings looked at, ask for the opposite where QEMU has it inverted.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::act::mergeable::{MergeableError, parse_backends};
use crate::act::merger::Look;
use crate::qmp::{Client, QmpError};

/// Breaking a VM's merges is done while QEMU answers: microseconds a page.
const PATIENCE: Duration = Duration::from_secs(60);

/// An order under way, and what became of the last one.
#[derive(Debug, Default)]
pub(crate) struct MergeLink {
    step: Option<(Step, Instant)>,
    error: Option<String>,
}

#[derive(Debug)]
enum Step {
    Listing { want: bool, id: u64 },
    Setting { want: bool, value: bool, backends: Vec<String>, ids: Vec<u64> },
    Looking { want: bool, value: bool, backends: Vec<String>, since: Instant },
}

impl MergeLink {
    /// Begins, unless an order is under way.
    pub fn order(&mut self, want: bool, client: &mut Client) {
        if self.step.is_some() {
            return;
        }
        self.error = None;
        match client.send("query-memdev", None) {
            Ok(id) => self.step = Some((Step::Listing { want, id }, Instant::now())),
            Err(e) => self.error = Some(e.to_string()),
        }
    }

    /// An order was refused before it was given.
    pub fn refuse(&mut self, why: String) {
        self.error = Some(why);
    }

    /// Whether an order is under way.
    pub fn is_busy(&self) -> bool {
        self.step.is_some()
    }

    /// What was wrong with the last one.
    pub fn error(&self) -> Option<&String> {
        self.error.as_ref()
    }

    /// Since when it waits for a look at the mappings.
    pub fn waits_for_look(&self) -> Option<Instant> {
        match &self.step {
            Some((Step::Looking { since, .. }, _)) => Some(*since),
            _ => None,
        }
    }

    /// Takes what is there and goes on.
    pub fn go_on(&mut self, client: Option<&mut Client>, look: Option<&Look>) {
        let Some((step, begun)) = self.step.take() else { return };
        let Some(client) = client else {
            return self.error = Some("the QMP connection was lost meanwhile".into());
        };
        if begun.elapsed() > PATIENCE {
            return self.error = Some(format!("not done in {} s", PATIENCE.as_secs()));
        }
        match next(step, client, look) {
            Ok(step) => self.step = step.map(|step| (step, begun)),
            Err(e) => self.error = Some(e.to_string()),
        }
    }
}

fn next(
    step: Step,
    client: &mut Client,
    look: Option<&Look>,
) -> Result<Option<Step>, MergeableError> {
    match step {
        Step::Listing { want, id } => match client.take_reply(id) {
            None => Ok(Some(Step::Listing { want, id })),
            Some(said) => Ok(Some(set(client, want, want, parse_backends(&said?)?)?)),
        },
        Step::Setting { want, value, backends, mut ids } => {
            let mut failed = None;
            ids.retain(|id| match client.take_reply(*id) {
                None => true,
                Some(said) => {
                    failed = failed.take().or(said.err());
                    false
                }
            });
            if let Some(error) = failed {
                return Err(error.into());
            }
            Ok(Some(match ids.is_empty() {
                true => Step::Looking { want, value, backends, since: Instant::now() },
                false => Step::Setting { want, value, backends, ids },
            }))
        }
        Step::Looking { want, value, backends, since } => match look {
            Some(look) if look.begun >= since => match &look.open {
                Ok(open) if *open == want => Ok(None),
                // QEMU 9.1.0 does the opposite of what it is told.
                Ok(_) if value == want => Ok(Some(set(client, want, !want, backends)?)),
                Ok(_) => Err(MergeableError::NoEffect),
                Err(why) => Err(MergeableError::NotSeen(why.clone())),
            },
            _ => Ok(Some(Step::Looking { want, value, backends, since })),
        },
    }
}

fn set(
    client: &mut Client,
    want: bool,
    value: bool,
    backends: Vec<String>,
) -> Result<Step, QmpError> {
    let one = |path: &String| client.send("qom-set", Some(arguments(path, value)));
    let ids = backends.iter().map(one).collect::<Result<Vec<u64>, QmpError>>()?;
    Ok(Step::Setting { want, value, backends, ids })
}

/// Of `qom-set`, for one backend.
pub(crate) fn arguments(path: &str, value: bool) -> Value {
    json!({ "path": path, "property": "merge", "value": value })
}
