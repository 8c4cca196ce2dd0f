//! Quinion: a page cache you own.
//!
//! The mechanisms of the Linux page cache, in user space: files are cached as
//! folios in one bounded arena, found through a tree per file, filled in batches
//! by readahead, and read without a system call, a lock or a store to shared memory.
//!
//! The order of the modules below is the architecture: each names only those
//! above it in this file, and `tests/tidy.rs` fails when one does not.
#![cfg_attr(not(feature = "std"), no_std)]

// Ground floor.
pub mod units;
pub mod sync;
#[allow(unsafe_code, reason = "numbers become references to mapped memory here")]
pub mod arena;

// Stuff.
#[allow(unsafe_code, reason = "bytes are copied under the hit protocol")]
pub mod folio;
#[cfg(all(feature = "std", not(quinion_model)))]
#[allow(unsafe_code, reason = "devices write into frames by address")]
pub mod backend;

// Index.
pub mod xarray;

// Paths.
#[cfg(not(quinion_model))]
#[allow(unsafe_code, reason = "hits copy to a caller's address")]
pub mod filemap;
// Door.
#[cfg(all(feature = "std", not(quinion_model)))]
pub mod serve;
#[cfg(not(quinion_model))]
#[allow(
    unsafe_code,
    reason = "another process's memory becomes references, and hits copy to a caller's address"
)]
pub mod viewer;
