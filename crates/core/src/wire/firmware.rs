//! Which firmware starts a guest, and what that means for a map that outlived a reset.
//!
//! After a reset the old kernel's map still lies in RAM. What tells of the reset is the
//! first write of the firmware to a page that no running kernel writes to. Sources: SeaBIOS
//! `src/romlayout.S`, `src/post.c`; edk2 `OvmfPkg/OvmfPkgX64.fdf`,
//! `OvmfPkg/ResetVector/Ia32/PageTables64.asm`, `OvmfPkg/Sec/X64/SecEntry.nasm`.

use serde::{Deserialize, Serialize};

use super::abi::PAGE;

/// Guest pages that are never open to KSM, whatever the firmware: merging drops the
/// protection of a tripwire, and these pages are alike in many VMs. First address, and the
/// first after it.
pub const NEVER_OPEN: [(u64, u64); 2] = [(0, 16 * PAGE), (0x80_0000, 0x82_0000)];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Firmware {
    /// None of these: the agent stands aside.
    #[default]
    Unknown,
    /// QEMU's own BIOS. Its stack (page 6) is the first RAM that it writes to, page 0
    /// follows. Linux uses neither (nothing below 1 MiB, since 5.13).
    Seabios,
    /// OVMF of edk2. It writes page tables at 8 MiB, and then its stack.
    Edk2,
}

/// Temporary RAM of OVMF's first phase. Reserved for good where the VM has S3; elsewhere
/// the guest's module has to keep it.
const EDK2_STACK: u64 = 0x81_0000;

impl Firmware {
    /// Guest pages that it writes first, and that a running kernel never writes to, for all
    /// that is known without the guest's word.
    pub fn wires(self) -> &'static [u64] {
        match self {
            Firmware::Unknown | Firmware::Edk2 => &[],
            Firmware::Seabios => &[6 * PAGE, 0],
        }
    }

    /// The page that it writes early. The guest's module has to say that nothing else writes it.
    pub fn kept_wire(self) -> Option<u64> {
        (self == Firmware::Edk2).then_some(EDK2_STACK)
    }

    /// The first address that is given back at all: below it RAM may be written before a wire is.
    /// OVMF begins at 8 MiB after a reset; QEMU writes from address 0 on when it loads a snapshot.
    pub fn early_end(self) -> u64 {
        match self {
            Firmware::Unknown | Firmware::Seabios => PAGE,
            Firmware::Edk2 => 0x82_0000,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// QEMU loads a snapshot from address 0 on: what it writes before it meets a wire is kept.
    #[test]
    fn nothing_before_the_first_tripwire_is_given_back() {
        for firmware in [Firmware::Seabios, Firmware::Edk2] {
            let wires = firmware.wires().iter().copied().chain(firmware.kept_wire());
            assert!(wires.min().unwrap() < firmware.early_end(), "{firmware:?}");
        }
    }
}
