//! The parts of the program `quinion-serve` that Quinion's other programs with stores share: the configuration, how a
//! store is opened and by which credentials, what it costs and which headers of its answers are kept, how events are
//! written, and messages to systemd.
//!
//! It is no library: it makes no promise, and only the programs of `frontends` may name it.

pub mod config;
pub mod credentials;
pub mod fetching;
pub mod kept_headers;
pub mod log;
pub mod notify;
pub mod price;
pub mod stores;
