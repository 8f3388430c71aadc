//! The experiments: each file is one, each prints a table and writes an
//! [`Outcome`](crate::result::Outcome). `record` reads what Ebb did meanwhile.

pub mod autoballoon;
pub mod demo;
pub mod handback;
pub mod overhead;
pub mod record;
