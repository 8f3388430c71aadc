//! Paging out on a real VM: what it holds leaves DRAM for swap, and is all there
//! when it is read again.

use ebb_core::plan::Plan;
use ebb_core::sample::VmId;
use ebb_core::task::{OffloadOrder, Orders};
use ebb_host::linux::{LinuxHost, Options};
use ebb_host::probe::process::{read_stat, read_status};

use super::*;

#[test]
fn vm_cold_memory_goes_to_swap_and_comes_back_whole() {
    let swap = SwapConfig { size: Bytes::mib(512), kind: SwapKind::Any, priority: 100 };
    let config =
        ArenaConfig { swap: Some(swap), beside: Beside::AnyTest, ..ArenaConfig::default() };
    let _arena = Arena::enter(&config).unwrap();
    let vm = Vm::start(&stock("cold", Bytes::mib(256))).unwrap();
    vm.tool().start("v", "verify", "size=67108864 seconds=100000 seed=7").unwrap();

    let root = Root::default();
    let start = read_stat(&root, vm.pid).unwrap().unwrap().start;
    let id = VmId { pid: vm.pid, start };
    let before = read_status(&root, id.pid).unwrap().unwrap();
    let mut host = LinuxHost::new(Options { look_only: true, ..Options::default() }).unwrap();
    let said = |host: &mut LinuxHost| {
        let sample = host.sample();
        let vm = sample.vms.into_iter().find(|vm| vm.id == id).expect("the VM is found");
        vm.tasks.offload
    };
    assert_eq!(said(&mut host), None);
    let (name, bytes, reason) = ("cold".into(), Bytes::mib(64), "a test".into());
    let order = OffloadOrder { vm: id, name, bytes, reason };
    let orders = Orders { offload: vec![order], ..Orders::default() };
    host.start(&Plan { orders, ..Plan::default() });
    let said = poll(MINUTE, || said(&mut host).filter(|said| !said.busy)).unwrap();
    let after = read_status(&root, id.pid).unwrap().unwrap();
    println!(
        "{said:?}, swap {} → {}, resident {} → {}",
        before.swap,
        after.swap,
        before.resident(),
        after.resident()
    );
    assert_eq!(said.error, None);
    // A piece more than was ordered may go; the guest reads back what it touches.
    assert!(said.paged_out >= Bytes::mib(16) && said.paged_out <= Bytes::mib(80), "{said:?}");
    assert!(after.swap > before.swap, "{after:?}");
    let end = vm.tool().finish("v", MINUTE).unwrap();
    assert_eq!(end.u64("errors"), 0, "{end:?}");
}
