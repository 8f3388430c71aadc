//! Measures what a sample costs on this machine.
use ebb_host::linux::{LinuxHost, Options};
fn main() {
    let mut host = LinuxHost::new(Options { psi_trigger_us: None, root: ebb_host::root::Root::at(std::env::args().nth(1).unwrap_or("/".into())), ..Options::default() }).unwrap();
    for _ in 0..3 { host.sample(); }
    let cpu = || { let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime); t.tv_sec as f64 + t.tv_nsec as f64 / 1e9 };
    let (c, w) = (cpu(), std::time::Instant::now());
    let n = 100;
    let mut worst = 0.0f64;
    for _ in 0..n { let t = std::time::Instant::now(); host.sample(); worst = worst.max(t.elapsed().as_secs_f64()); std::thread::sleep(std::time::Duration::from_millis(100)); }
    let s = host.sample();
    println!("{} VMs: cpu {:.2} ms/sample, worst wall {:.2} ms, total wall {:.1}s", s.vms.len(), (cpu() - c) * 1e3 / n as f64, worst * 1e3, w.elapsed().as_secs_f64());
    println!("{:?}", s.problems);
    println!("{:?}", s.vms.iter().map(|v| (&v.name, &v.link, &v.run)).collect::<Vec<_>>());
}
