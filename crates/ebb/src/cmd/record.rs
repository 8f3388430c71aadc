//! `ebb record` and `ebb replay`: take a record of a running daemon, and decide
//! everything in it again.

use std::fs::File;
use std::io::BufReader;

use anyhow::{Context, Result, bail};
use ebb_core::plan::Plan;
use serde::Serialize;

use crate::daemon_client;
use crate::recorder;
use crate::table::{emit_all, emit_as};

/// Writes what the flight recorder holds to a file, or to standard output (`-`): lines of
/// JSON, and packed where the file's name ends in `.zst`.
pub fn record(socket: &str, output: &str) -> Result<()> {
    let body = daemon_client::record(socket)?;
    let mut lines = recorder::unpack(&body[..])?;
    if output == "-" {
        return emit_all(&mut lines);
    }
    let failed = || format!("cannot write {output}");
    let written = if output.ends_with(".zst") && recorder::is_packed(&body) {
        std::fs::write(output, &body).with_context(failed)?;
        body.len() as u64
    } else {
        let mut file = File::create(output).with_context(failed)?;
        std::io::copy(&mut lines, &mut file).with_context(failed)?
    };
    eprintln!("{output}: {written} bytes");
    Ok(())
}

#[derive(Debug, Default, Serialize)]
struct Replay {
    ticks: u64,
    actions: u64,
    /// Ticks whose plan came out otherwise.
    different: Vec<Difference>,
}

#[derive(Debug, Serialize)]
struct Difference {
    tick: u64,
    recorded: Plan,
    replayed: Plan,
}

/// Differences kept; the rest is only counted in the exit code.
const DIFFERENCES: usize = 100;

pub fn replay(path: &str, json: bool) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot read {path}"))?;
    let found = decide_again(BufReader::new(file)).with_context(|| path.to_string())?;
    emit_as(json, &found, || Ok(text(&found)))?;
    if found.different.is_empty() { Ok(()) } else { bail!("this version decides otherwise") }
}

fn text(found: &Replay) -> String {
    let mut out = String::new();
    for d in &found.different {
        out += &format!("tick {}: recorded {:?}\n", d.tick, d.recorded.actions);
        out +=
            &format!("{:>w$} now {:?}\n", "", d.replayed.actions, w = 5 + d.tick.to_string().len());
    }
    let (ticks, actions) = (found.ticks, found.actions);
    out + &format!("{ticks} ticks, {actions} actions, {} ticks differ\n", found.different.len())
}

/// Decides every tick of a record again.
fn decide_again(input: impl std::io::BufRead) -> Result<Replay> {
    let mut found = Replay::default();
    let any = recorder::replay(input, |engine, recorded| {
        let replayed = engine.replay(recorded).0.plan;
        found.ticks += 1;
        found.actions += replayed.actions.len() as u64;
        if replayed != recorded.plan && found.different.len() < DIFFERENCES {
            let (tick, recorded) = (recorded.number, recorded.plan.clone());
            found.different.push(Difference { tick, recorded, replayed });
        }
    })?;
    if any { Ok(found) } else { bail!("there is nothing in it") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::config::Config;
    use ebb_core::units::Bytes;
    use ebb_sim::{Setup, scenario};

    fn recorded() -> Vec<u8> {
        let crowd = scenario::crowd(12, Bytes::gib(2), Bytes::gib(12), 1, 4);
        recorder::tests::recorded(&Setup { run_ms: 200_000, ..crowd }, Config::default())
    }

    #[test]
    fn a_record_replays_to_the_same_plans_from_any_head() {
        let record = recorded();
        let found = decide_again(&record[..]).unwrap();
        assert!(found.ticks > 200 && found.actions > 10, "{found:?}");
        assert!(found.different.is_empty(), "{:?}", found.different[0]);
    }

    #[test]
    fn a_changed_plan_is_found() {
        let text = String::from_utf8(recorded()).unwrap();
        // As if the recorded version had aimed elsewhere.
        let at = text.find("\"actions\":[{").unwrap();
        let (head, tail) = text.split_at(at);
        let changed = format!("{head}{}", tail.replacen("\"to\":", "\"to\":1", 1));
        let found = decide_again(changed.as_bytes()).unwrap();
        assert!(!found.different.is_empty());
    }

    #[test]
    fn a_record_without_a_head_is_refused() {
        let text = String::from_utf8(recorded()).unwrap();
        let ticks = text.split_once('\n').unwrap().1;
        let said = format!("{:#}", decide_again(ticks.as_bytes()).unwrap_err());
        assert!(said.contains("line 1: a tick before any head"), "{said}");
        assert!(decide_again(&b""[..]).is_err());
    }
}
