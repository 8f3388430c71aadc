//! The experiments: each file is one, each prints a table and writes an
//! [`Outcome`](crate::result::Outcome).

pub mod dedup;
pub mod demo;
pub mod overhead;
