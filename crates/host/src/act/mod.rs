//! What is done to the machine itself, beside balloons: KSM's knobs, and which
//! VMs it may look at. Each file puts back what it changed.

pub mod governor;
pub mod ksm;
pub mod mergeable;
