//! Python: the compiled half of the package `quinion`; the other half, `python/quinion`, has its file objects.
//!
//! ```text
//!   quinion.Client, quinion.File   Python: positions, pickling, forks (each child connects anew)
//!   RawClient, RawFile             this: quinion_service's client, without the GIL where it may wait
//!   Pin                            the buffer protocol: pinned bytes, read-only, not copied
//!   Server                         quinion_service's server, with its stores
//! ```
//!
//! No policy is here. A failure becomes an `OSError` with a number (`error.rs`); a panic becomes an exception by pyo3.

mod error;
mod memory;
mod file;
mod server;

use pyo3::prelude::*;

/// What Python imports as `quinion._quinion`.
#[pymodule]
mod _quinion {
    #[pymodule_export]
    use crate::file::{RawClient, RawFile};
    #[pymodule_export]
    use crate::memory::Pin;
    #[pymodule_export]
    use crate::server::Server;
}
