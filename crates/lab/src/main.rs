//! x
use ebb_core::units::Bytes; use ebb_lab::{image::*,setup,vm::*};
fn main() -> anyhow::Result<()> {
    let cache = Cache::from_env();
    for i in setup::setup(&cache, setup::Options::default(), &mut |l| println!("{l}"))? { println!("{i:?}"); }
    for k in Kernel::ALL { let mut c = VmConfig::new("a", Bytes::mib(512)); c.kernel = k; 
     let vm = Vm::start(&c)?; println!("{:?} {} {:?}", vm.boot_time, vm.resident(), vm.request("meminfo", std::time::Duration::from_secs(5))?); }
    Ok(())
}
