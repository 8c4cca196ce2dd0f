//! The parts of the program `quinion-serve` that Quinion's other programs with stores share: what a configuration says,
//! how a store is opened and what it costs, how events are written, and what a service tells systemd.
//!
//! It is no library: no promise is made about anything here, and nothing but the programs of `faces` may name it.

pub mod config;
pub mod log;
pub mod notify;
pub mod price;
pub mod stores;
