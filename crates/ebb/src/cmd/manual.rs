//! `ebb completions` and `ebb man`: what packages ship, made from the definition of the flags.

use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::table::emit;

/// Completions for a shell, on standard output.
pub fn completions(mut ebb: Command, shell: Shell) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut ebb, "ebb", &mut text);
    emit(&String::from_utf8_lossy(&text))
}

/// A page for `ebb` and one for each command: `ebb.8`, `ebb-run.8`, ...
pub fn pages(ebb: Command, dir: &str) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {dir}"))?;
    let mut ebb = ebb.disable_help_subcommand(true);
    // Gives every command its full name, and the flags that hold for all.
    ebb.build();
    page(&ebb, Path::new(dir)).with_context(|| format!("cannot write the manual to {dir}"))
}

fn page(command: &Command, dir: &Path) -> std::io::Result<()> {
    let source = concat!("Ebb ", env!("CARGO_PKG_VERSION"));
    Man::new(command.clone()).section("8").source(source).generate_to(dir)?;
    let mut shown = command.get_subcommands().filter(|c| !c.is_hide_set());
    shown.try_for_each(|c| page(c, dir))
}
