//! A stand-in for QEMU: it has QEMU's command line and answers QMP, its guest is a few
//! numbers, and a test can make it slow, hung or wrong. It carries no claim about QEMU.
//!
//! Started under a name of QEMU as `qemu-system-x86_64 -name NAME -m MIB -qmp
//! unix:PATH,server=on,wait=off -device virtio-balloon-pci,deflate-on-oom=on`. On `PATH.test`
//! it takes one JSON object a connection ([`faults`]) and answers with how it stands
//! ([`server::Server::truth`]): what a test compares with what Ebb believes. `cargo lab tick`
//! puts many under one daemon, and says by `EBB_STANDIN_MOVES` which of them are not at rest.

mod faults;
mod guest;
mod server;

use std::path::PathBuf;
use std::process::ExitCode;

use rustix::process::{Signal, set_parent_process_death_signal};

use self::guest::Guest;
use self::server::Server;

/// What a command line says.
struct Options {
    socket: PathBuf,
    ram: u64,
    deflates: bool,
    reports: bool,
}

fn main() -> ExitCode {
    // A test that is killed leaves none behind.
    if set_parent_process_death_signal(Some(Signal::KILL)).is_err() {
        return ExitCode::FAILURE;
    }
    let args: Vec<String> = std::env::args().collect();
    let Some(options) = options(&args) else {
        eprintln!("usage: qemu-system-… -m MIB -qmp unix:PATH,server=on,wait=off …");
        return ExitCode::from(2);
    };
    let mut guest = Guest::new(options.ram, options.deflates, options.reports);
    guest.moves = std::env::var("EBB_STANDIN_MOVES").ok().and_then(|seed| seed.parse().ok());
    match Server::new(&options.socket, guest).and_then(|mut server| server.serve()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{}: {e}", options.socket.display());
            ExitCode::FAILURE
        }
    }
}

fn options(args: &[String]) -> Option<Options> {
    let after = |name: &str| args.iter().skip_while(|a| *a != name).nth(1);
    let device = after("-device").map_or("", String::as_str);
    Some(Options {
        socket: after("-qmp")?.strip_prefix("unix:")?.split(',').next()?.into(),
        ram: after("-m")?.parse::<u64>().ok()? << 20,
        deflates: device.contains("deflate-on-oom=on"),
        reports: device.contains("free-page-reporting=on"),
    })
}
