//! Python: the compiled half of the package `quinion`; the other half, `python/quinion`, has its file objects.
//!
//! ```text
//!   quinion.Client, Cache, File    Python: positions, pickling, forks (each child connects anew)
//!   RawClient, RawCache            this: quinion_service's client, and a cache of this process with its stores
//!   RawFile                        what either has opened, read without the GIL; Ctrl-C ends what waits
//!   RawWaiter                      reads of an event loop, which threads wait for
//!   Pin                            the buffer protocol: pinned bytes, read-only, not copied
//!   Server                         quinion_service's server, with its stores
//! ```
//!
//! No policy is here. A failure becomes an `OSError` with a number (`error.rs`); a panic becomes an exception by pyo3.

mod error;
mod target;
mod stores;
mod wait;
mod memory;
mod source;
mod waiter;
mod file;
mod cache;
mod server;

use pyo3::prelude::*;

/// The module that Python imports as `quinion._quinion`. No test runs it without the GIL: so a free-threaded Python
/// that it was built for takes the GIL when it imports it.
#[pymodule(gil_used = true)]
mod _quinion {
    #[pymodule_export]
    use crate::cache::RawCache;
    #[pymodule_export]
    use crate::file::{RawClient, RawFile};
    #[pymodule_export]
    use crate::memory::Pin;
    #[pymodule_export]
    use crate::server::Server;
    #[pymodule_export]
    use crate::waiter::RawWaiter;
}
