//! What a tick costs: observe, model, decide, learn, without the machine.
//! `make bench`, or `cargo bench -p ebb-core`. The goal: 1,000 VMs in 10 ms.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Guest, Toy};
use divan::{AllocProfiler, Bencher};
use ebb_core::config::Config;
use ebb_core::tick::{Engine, Host};
use ebb_core::units::Bytes;

/// Allocations are counted: those of one tick must not depend on those before.
#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

/// Guests of 4 GiB of which a third each is idle, busy, or short; the host lacks
/// most of what they want.
fn world(vms: u64) -> (Engine, Toy) {
    let guest = |i: u64| {
        let g = Guest::new(4, 1 + i % 3);
        if i % 3 == 2 { g.ballooned(1) } else { g }
    };
    let mut host = Toy::new(vms * 4 - vms / 2, 0, (0..vms).map(guest).collect());
    let mut engine = Engine::new(Config::default(), false);
    for _ in 0..20 {
        let (_, model) = engine.step(&mut host);
        host.wait(&engine.next(&model));
        host.others = Bytes::ZERO;
    }
    (engine, host)
}

/// A tick on a host that is short, sample and order lists included.
#[divan::bench(args = [100, 1000, 4000])]
fn tick(bencher: Bencher<'_, '_>, vms: u64) {
    let (mut engine, mut host) = world(vms);
    bencher.bench_local(|| {
        host.now += 500;
        engine.step(&mut host)
    });
}
