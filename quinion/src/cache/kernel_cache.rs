//! Kernel cache: does the kernel's page cache hold a file already, so that it should be read from there?
//!
//! ```text
//!   half of it or more is in memory    read(2) copies it          a byte that is in memory is not read from a device
//!   less                               O_DIRECT, if that may be   no byte is in memory twice
//! ```
//!
//! One look at the whole file decides for good: the file is read by one way, and each read sees what the file has.
//!
//! Not an invariant: that a page which the kernel's cache had at the look is there at a read.

use crate::backend::Backend;
use crate::sys::io::kernel_holds;
use crate::units::pages_of_bytes;

/// Returns whether the kernel's cache is used: it holds half of the file or more.
pub(super) fn use_kernel_cache_if_warm(backend: &dyn Backend, bytes: u64) -> bool {
    let Some(file) = backend.descriptor().filter(|_| bytes > 0) else { return false };
    let is_warm = kernel_holds(file, bytes).is_ok_and(|held| 2 * held.pages >= pages_of_bytes(bytes));
    if is_warm {
        backend.read_by_kernels_cache();
    }
    is_warm && !backend.is_direct()
}
