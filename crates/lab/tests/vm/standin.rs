//! The built `ebb` and stand-ins for QEMU that are slow, hang, speak nonsense, hang up, are
//! reset and are ordered by others, while what is owed is compared with what was taken.

mod law;
mod many;
mod operator;
mod place;
mod proc_faults;
mod random;
mod sequences;

use super::*;
