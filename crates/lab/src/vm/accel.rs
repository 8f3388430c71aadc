//! What runs a guest's code, how that is found out, and how patient one is with it.

use std::fs;

use ebb_core::units::Bytes;

use super::{Vm, VmConfig};
use crate::image::cached;

/// What runs the guest's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    Kvm,
    Tcg,
}

impl Accel {
    /// The value of `-accel`, with a translation buffer of this size.
    pub fn option(self, buffer: Bytes) -> String {
        match self {
            Accel::Kvm => "kvm".into(),
            // The default translation buffer (1 GiB) would drown what is measured.
            Accel::Tcg => format!("tcg,tb-size={},thread=multi", buffer.0 >> 20),
        }
    }

    /// `kvm` or `tcg`.
    pub fn name(self) -> &'static str {
        if self == Accel::Kvm { "kvm" } else { "tcg" }
    }

    /// What deadlines are multiplied by; `EBB_LAB_PATIENCE` multiplies again.
    pub fn patience(self) -> f64 {
        let more = std::env::var("EBB_LAB_PATIENCE").ok().and_then(|v| v.parse().ok());
        let own = if self == Accel::Kvm { 1.0 } else { 4.0 };
        own * more.filter(|v| (0.1..=100.0).contains(v)).unwrap_or(1.0)
    }

    /// The best this machine boots our image with: KVM is tried for real, once
    /// per boot of the machine. `EBB_LAB_ACCEL` decides instead, if set.
    pub fn detect() -> Accel {
        match std::env::var("EBB_LAB_ACCEL").as_deref() {
            Ok("kvm") => return Accel::Kvm,
            Ok("tcg") => return Accel::Tcg,
            _ => {}
        }
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let known = cached(format!("accel-{}", boot.trim()));
        match fs::read_to_string(&known).as_deref() {
            Ok("kvm") => return Accel::Kvm,
            Ok("tcg") => return Accel::Tcg,
            _ => {}
        }
        let accel = if kvm_boots() { Accel::Kvm } else { Accel::Tcg };
        let _ = fs::write(known, accel.name());
        accel
    }
}

fn kvm_boots() -> bool {
    if fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return false;
    }
    let mut config = VmConfig::new("kvm-trial", Bytes::mib(256));
    config.accel = Some(Accel::Kvm);
    Vm::start(&config).is_ok()
}
