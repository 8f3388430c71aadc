//! `cargo lab`: set up, boot, try and tidy. Parses, dispatches, sets the exit code.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use ebb_core::units::Bytes;
use ebb_lab::arena::{self, Arena, ArenaConfig, Beside, Places, SwapConfig, SwapKind};
use ebb_lab::experiment::autoballoon::Autoballoon;
use ebb_lab::experiment::dedup::{Dedup, corunner};
use ebb_lab::experiment::demo::Demo;
use ebb_lab::experiment::density::Density;
use ebb_lab::experiment::handback::Handback;
use ebb_lab::experiment::overhead::Overhead;
use ebb_lab::experiment::rhythm::Rhythm;
use ebb_lab::experiment::tick::Tick;
use ebb_lab::experiment::{fragmented, mark_cost, paused, recycle, refault, scan, trial};
use ebb_lab::image::Kernel;
use ebb_lab::vm::{Balloon, Vm, VmConfig};
use ebb_lab::{setup, tidy};

/// Real VMs for Ebb's tests and experiments.
#[derive(Parser)]
#[command(name = "ebb-lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    /// Install missing programs, fetch guest kernels, build the guest images
    Setup(setup::Options),
    /// Boot VMs and keep them until Ctrl-C
    Boot(BootArgs),
    /// VMs on a host that is too small for them, without and with Ebb
    Demo(Demo),
    /// What merging finds and costs, against every page read one by one
    Dedup(Dedup),
    /// What a VM at work notices of merging beside it
    Corunner(trial::Options),
    /// How fast the page scanner is, beside raw hashing
    Scan(trial::Options),
    /// What the daemon costs, and how fast it answers a guest in distress
    Overhead(Overhead),
    /// What a tick of the daemon costs with many VMs (stand-ins)
    Tick(Tick),
    /// How fast freed memory comes back, against raw discards and stock QEMU
    Recycle(trial::Options),
    /// What the host still holds of memory that was freed in small pieces
    Fragmented(trial::Options),
    /// What comes back of a guest that was stopped right after it freed
    Paused(trial::Options),
    /// What module and recycling cost a guest that allocates all the time
    Refault(trial::Options),
    /// What one mark in the map costs, natively and in guest instructions
    MarkCost(trial::Options),
    /// VMs that need memory in turns: swapping and throughput without and with Ebb
    Autoballoon(Autoballoon),
    /// VMs that need memory all at once, or in turn within seconds
    Rhythm(Rhythm),
    /// How many VMs a budget holds before one of them is harmed
    Density(Density),
    /// A guest that was shrunk suddenly needs memory: how long until it has it
    Handback(Handback),
    /// Put back what an earlier run left behind
    Clean,
    /// Check the house rules
    Tidy {
        /// Count lines of product, tools and tests instead
        #[arg(long)]
        lines: bool,
    },
    /// Hold the arena until a signal (for the tests of the lab itself)
    #[command(hide = true)]
    HoldArena(HoldArgs),
}

#[derive(Args)]
struct BootArgs {
    /// Guest kernel
    #[arg(long, value_enum, default_value = "6.1")]
    kernel: Kernel,
    /// RAM of each, e.g. 1GiB
    #[arg(long, default_value = "512MiB")]
    memory: Bytes,
    /// vCPUs of each
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// How many
    #[arg(long, default_value_t = 1)]
    count: u32,
    /// Free page reporting
    #[arg(long)]
    reporting: bool,
}

#[derive(Args)]
struct HoldArgs {
    #[arg(long)]
    budget: Option<Bytes>,
    #[arg(long)]
    swap: Option<Bytes>,
    /// PATH=VALUE
    #[arg(long)]
    knob: Vec<String>,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            eprintln!("ebb-lab: {e:#}");
            ExitCode::from(2)
        }
    }
}

/// `false`: house rules are broken.
fn run(command: Cmd) -> Result<bool> {
    match command {
        Cmd::Setup(options) => run_setup(&options),
        Cmd::Boot(args) => boot(&args),
        Cmd::Demo(args) => args.run(),
        Cmd::Dedup(args) => args.run(),
        Cmd::Corunner(o) => trial::run("corunner", &corunner::ARMS, &o, corunner::run),
        Cmd::Scan(o) => trial::run("scan", &scan::ARMS, &o, scan::run),
        Cmd::Overhead(args) => args.run(),
        Cmd::Tick(args) => args.run(),
        Cmd::Recycle(o) => trial::run("recycle", &recycle::ARMS, &o, recycle::run),
        Cmd::Fragmented(o) => trial::run("fragmented", &fragmented::ARMS, &o, fragmented::run),
        Cmd::Paused(o) => trial::run("paused", &paused::ARMS, &o, paused::run),
        Cmd::Refault(o) => trial::run("refault", &refault::ARMS, &o, refault::run),
        Cmd::MarkCost(o) => trial::run("mark-cost", &mark_cost::ARMS, &o, mark_cost::run),
        Cmd::Autoballoon(args) => args.run(),
        Cmd::Rhythm(args) => args.run(),
        Cmd::Density(args) => args.run(),
        Cmd::Handback(args) => args.run(),
        Cmd::Clean => clean(),
        Cmd::Tidy { lines } => return run_tidy(lines),
        Cmd::HoldArena(args) => hold_arena(&args),
    }?;
    Ok(true)
}

fn run_setup(options: &setup::Options) -> Result<()> {
    let mut done = 0;
    let images = setup::setup(options, &mut |line| {
        done += 1;
        println!("setup: {line}");
    })?;
    let names: Vec<&str> = images.iter().map(|i| i.release.as_str()).collect();
    let what = if done == 0 { "nothing to do" } else { "done" };
    println!("setup: {what} (guest kernels {})", names.join(", "));
    Ok(())
}

fn boot(args: &BootArgs) -> Result<()> {
    let mut vms = Vec::new();
    for n in 1..=args.count {
        let mut config = VmConfig::new(format!("lab{n}"), args.memory);
        config.kernel = args.kernel;
        config.cpus = args.cpus;
        config.balloon = Some(Balloon { reporting: args.reporting, deflate_on_oom: false });
        vms.push(Vm::spawn(&config)?);
    }
    for vm in &mut vms {
        vm.wait_ready()?;
        println!(
            "{}  pid {}  {}  {} of {} resident  ready in {:.1?}  qmp {}",
            vm.name,
            vm.pid,
            vm.release,
            vm.resident(),
            vm.memory,
            vm.boot_time,
            vm.qmp_path.display()
        );
    }
    println!("Ctrl-C ends them");
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    signals.forever().next();
    Ok(())
}

fn clean() -> Result<()> {
    match arena::clean(&Places::here())? {
        Ok(0) => println!("clean: nothing to do"),
        Ok(n) => println!("clean: put {n} things back"),
        Err(failed) => bail!("could not restore {}", failed.join("; ")),
    }
    Ok(())
}

fn run_tidy(lines: bool) -> Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if lines {
        print!("{}", tidy::count(&root)?);
        return Ok(true);
    }
    let findings = tidy::check_repository(&root)?;
    for finding in &findings {
        println!("{finding}");
    }
    Ok(findings.is_empty())
}

fn hold_arena(args: &HoldArgs) -> Result<()> {
    let swap = args.swap.map(|size| SwapConfig { size, kind: SwapKind::Any, priority: 5 });
    let mut knobs = Vec::new();
    for knob in &args.knob {
        let (path, value) = knob.split_once('=').context("--knob is PATH=VALUE")?;
        knobs.push((path.to_string(), value.to_string()));
    }
    let arena =
        Arena::enter(&ArenaConfig { budget: args.budget, swap, knobs, beside: Beside::Alone })?;
    println!("held {}", arena.cgroup().map_or("-".into(), |c| c.dir.display().to_string()));
    // The arena's own signal thread undoes everything and ends the process.
    loop {
        std::thread::park();
    }
}
