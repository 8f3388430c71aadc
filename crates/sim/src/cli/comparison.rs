//! The comparison: every policy on every scenario; into docs/comparison.md as well.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ebb_sim::compare::{Comparison, compare};
use ebb_sim::{SCENARIOS, Scenario};

use super::{emit, emit_json, threads};

/// Between these lines of a document the table is written.
const BEGIN: &str = "<!-- comparison: begin";
const END: &str = "<!-- comparison: end -->";

/// Runs it with these scenarios (all, if there are none), prints it, and writes the table into a
/// document, with the commit to name there.
pub fn run(
    seeds: Range<u64>,
    only: &[String],
    document: Option<(&str, &str)>,
    json: bool,
) -> Result<()> {
    let result = compare(&scenarios(only)?, seeds, threads());
    if let Some((file, commit)) = document {
        let old = std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
        let new = written_into(&old, file, &section(&result, commit))?;
        replace(Path::new(file), &new).with_context(|| format!("cannot write {file}"))?;
    }
    if json { emit_json(&result) } else { emit(&text(&result)) }
}

/// The scenarios of these names; all, if there are none.
fn scenarios(names: &[String]) -> Result<Vec<Scenario>> {
    if let Some(bad) = names.iter().find(|n| SCENARIOS.iter().all(|s| s.name != **n)) {
        let known: Vec<&str> = SCENARIOS.iter().map(|s| s.name).collect();
        bail!("“{bad}” is no scenario: one of {}", known.join(", "));
    }
    let wanted = |s: &Scenario| names.is_empty() || names.iter().any(|n| n == s.name);
    Ok(SCENARIOS.into_iter().filter(wanted).collect())
}

/// Whole or not at all.
fn replace(file: &Path, text: &str) -> std::io::Result<()> {
    let beside = file.with_extension("new");
    std::fs::write(&beside, text)?;
    std::fs::rename(&beside, file)
}

fn section(c: &Comparison, commit: &str) -> String {
    format!(
        "{BEGIN} (generated, do not edit) -->\n\
         `ebb-sim --compare --seed {} --seeds {} --markdown docs/comparison.md --commit {commit}`.\n\
         Synthetic guests: a stand-in, no claim about real ones.\n\n{}{END}",
        c.first_seed,
        c.seeds,
        c.markdown()
    )
}

/// The document with its part between the markers replaced.
fn written_into(old: &str, file: &str, new: &str) -> Result<String> {
    let begin = old.find(BEGIN);
    let end = begin.and_then(|b| old[b..].find(END).map(|e| b + e + END.len()));
    let (Some(begin), Some(end)) = (begin, end) else {
        bail!(
            "{file}: there are no lines “{BEGIN} …-->” and “{END}”: put them where the table is to go"
        );
    };
    Ok(format!("{}{new}{}", &old[..begin], &old[end..]))
}

fn text(c: &Comparison) -> String {
    let mut out = c.text();
    out += &format!("laws broken by Ebb: {}\n", c.broken.len());
    for (run, breach) in c.broken.iter().take(20) {
        out += &format!("  {run}: {breach}\n");
    }
    let losses = c.losses();
    out += &format!("places where Ebb is beaten: {}\n", losses.len());
    for l in &losses {
        out += &format!("  {} by {}: {}\n", l.scenario, l.to, l.what);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stands_between_the_markers_is_replaced() {
        let old = format!("# A\n{BEGIN} x -->\nold\n{END}\nrest\n");
        let new = format!("{BEGIN} y -->\nnew\n{END}");
        assert_eq!(written_into(&old, "f", &new).unwrap(), format!("# A\n{new}\nrest\n"));
        let said = written_into("# A\n", "f", &new).unwrap_err().to_string();
        assert!(said.starts_with("f: there are no lines"), "{said}");
    }
}
