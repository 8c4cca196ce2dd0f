//! Doubles: devices of a test.
//!
//! [`SimulatedBackend`] fails, ends early, delays, reorders and drops requests under a seed. It serves memory, a
//! generator or a [`CrashDisk`], which remembers what was done to it and says what a crash may leave. A [`Request`] is
//! the other side of a backend: a fill over ordinary memory.
//!
//! Invariant: with one thread, equal seeds and equal calls give equal outcomes.

mod crash;
mod request;
mod simulated;

pub use crash::{CrashDisk, CrashLog, SECTOR};
pub use request::{Request, UNTOUCHED};
pub use simulated::{
    CompletionOrder, CompletionPoint, FailureCount, Faults, Generator, SimulatedBackend, WriteFaults,
};
