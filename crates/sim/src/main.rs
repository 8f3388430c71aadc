//! `ebb-sim`: the daemon's loop and its rivals on synthetic guests, for those who work on Ebb.

mod cli;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use ebb_core::units::Bytes;
use ebb_sim::search::Search;
use ebb_sim::worlds::fixed;

use cli::scale::{Hosts, Run};

/// Runs the daemon's loop on synthetic guests: a stand-in, no claim about real ones
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    /// How many guests
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    vms: u32,
    /// RAM of each
    #[arg(long, default_value = "2GiB")]
    ram: Bytes,
    /// The host's memory [default: half of what the guests have]
    #[arg(long)]
    host: Option<Bytes>,
    /// Everything random comes from this; with --compare the first of its seeds [default: 1, with
    /// --compare and --search 0]
    #[arg(long)]
    seed: Option<u64>,
    /// Simulated seconds
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// So many such hosts, on all cores
    #[arg(long, conflicts_with_all = ["compare", "trace"])]
    hosts: Option<u32>,
    /// Every policy on every scenario instead: the table of docs/comparison.md
    #[arg(long)]
    compare: bool,
    /// Seeds: of each scenario, or of the search [default: 20, with --search 1]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// Only this scenario (may be given again)
    #[arg(long, requires = "compare", value_name = "NAME")]
    scenario: Vec<String>,
    /// Writes the table between the markers of this document
    #[arg(long, requires = "compare", value_name = "FILE")]
    markdown: Option<String>,
    /// The commit to name there
    #[arg(long, requires = "markdown")]
    commit: Option<String>,
    /// Looks for worlds in which the controller does worst: this many at random for each seed, then
    /// worse ones near the worst of them
    #[arg(long, value_name = "WORLDS", conflicts_with_all = ["compare", "trace", "hosts"])]
    search: Option<usize>,
    /// Steps from the worst worlds to worse ones, each eight
    #[arg(long, default_value_t = 10, requires = "search")]
    steps: usize,
    /// Draws only worlds with this coordinate, 0 to 1, as in files=0.9 (may be given again)
    #[arg(long, requires = "search", value_name = "NAME=VALUE", value_parser = fixed)]
    at: Vec<(usize, f64)>,
    /// Every policy on guests that want what those of a record had (`ebb record`)
    #[arg(long, value_name = "FILE", conflicts_with = "compare")]
    trace: Option<String>,
    /// The result as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ebb-sim: {e:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let Cli { vms, ram, host, seed, seconds, json, .. } = cli;
    if let Some(worlds) = cli.search {
        let (seed, seeds, threads) = (seed.unwrap_or(0), cli.seeds.unwrap_or(1), cli::threads());
        let (steps, fixed) = (cli.steps, cli.at);
        return cli::search::run(&Search { seed, seeds, worlds, steps, fixed, threads }, json);
    }
    if cli.compare {
        let first = seed.unwrap_or(0);
        let seeds = first..first.saturating_add(cli.seeds.unwrap_or(20));
        let commit = cli.commit.as_deref().unwrap_or("unknown");
        let document = cli.markdown.as_deref().map(|file| (file, commit));
        return cli::comparison::run(seeds, &cli.scenario, document, json);
    }
    if let Some(file) = cli.trace {
        return cli::trace::run(&file, host, json);
    }
    let half = Bytes(ram.0.saturating_mul(u64::from(vms)) / 2);
    let each = Run { vms, ram, host: host.unwrap_or(half), seed: seed.unwrap_or(1), seconds };
    match cli.hosts {
        Some(hosts) => cli::scale::hosts(&Hosts { hosts, each }, json),
        None => cli::scale::run(&each, json),
    }
}
