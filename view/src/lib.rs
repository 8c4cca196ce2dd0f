//! View: the code that the owner of a cache and its viewers share, with all that a hit needs.
//!
//! A cache lies in one memory file, the **arena**, that many processes map. One of them, the **owner** (crates
//! `quinion` and `quinion-owner`), changes it; the **viewers** only read it. Both run this crate: the layout, numbers
//! into references, reads while the owner may reuse the memory, and requests to the owner.
//!
//! ```text
//!      a viewer's read                              the owner's threads read by the same code
//!            |                                            |
//!            v                                            v
//!   hit      size -> walk -> look -> copy -> look again -> touch          no lock, no system call, no shared store
//!            |        |       |       |
//!   below    record   xarray  arena:: folio::copy
//!                             Descriptor
//!   viewer   its page in the control file: what was read, requests and answers
//! ```
//!
//! It is `no_std`, allocates nothing and has no dependency: the object that `quinion run` puts into programs links it,
//! and must not call the program's allocator or C library. Modules stand in the order of their layers; each names only
//! those before it.
//!
//! Invariants:
//!  1. Nothing here takes a lock or makes a system call, except what [`viewer`] does by [`viewer::sys`].
//!  2. A number that was read from shared memory is checked before it is used.
//!  3. No pointer stands in shared memory.
//!  4. The model checker runs the same source (cfg `quinion_model`): `tests/model_hit.rs`, `tests/xarray_model.rs`,
//!     `tests/model_descriptor.rs` and `tests/doorbells_model.rs` of crate `quinion`.
//!
//! No promise is made about names in here: programs use `quinion`, whose public interface is recorded.
#![cfg_attr(not(any(test, quinion_model)), no_std)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("quinion-view is for 64-bit Linux: it asks by futexes, and maps a cache's whole memory");

// Numbers and atomics.
pub mod units;
pub mod sync;
// The layout of shared memory.
#[allow(unsafe_code, reason = "numbers become references to mapped memory here")]
pub mod arena;
#[allow(unsafe_code, reason = "bytes are copied under the hit protocol")]
pub mod folio;
// Which folio is where.
pub mod xarray;
#[cfg(not(quinion_model))]
pub mod lookup;
// Paths.
#[cfg(not(quinion_model))]
#[allow(unsafe_code, reason = "hits copy to a caller's address")]
pub mod hit;
pub mod fdstate;
#[cfg(not(quinion_model))]
#[allow(
    unsafe_code,
    reason = "another process's memory becomes references, and hits copy to a caller's address"
)]
pub mod viewer;
#[cfg(all(test, not(quinion_model)))]
mod recorded;
