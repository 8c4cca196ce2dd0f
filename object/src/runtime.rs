//! Runtime: one of tokio, made where the system may give no threads.
//!
//! `tokio` panics if it gets none for its first worker. A program with a bound on its threads (`pids.max`, `ulimit -u`)
//! would end where it can be told; so here that is an error, after the words of the panic.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::runtime::{Builder, Runtime};

/// The runtime of `builder`.
///
/// # Errors
/// The system gives no threads, or no descriptors.
pub fn start(builder: &mut Builder) -> io::Result<Runtime> {
    let none = |_| Err(io::Error::new(io::ErrorKind::WouldBlock, "the system gives no thread"));
    catch_unwind(AssertUnwindSafe(|| builder.build())).unwrap_or_else(none)
}
