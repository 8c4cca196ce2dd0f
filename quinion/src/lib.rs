//! Quinion: a page cache you own.
#![cfg_attr(not(feature = "std"), no_std)]

// Ground floor.
#[allow(unsafe_code, reason = "numbers become references to mapped memory here")]
pub mod arena;
pub mod sync;
#[cfg(all(feature = "std", not(quinion_model)))]
#[allow(unsafe_code, reason = "system calls")]
pub mod sys;
pub mod units;
// Stuff.
#[cfg(all(feature = "std", not(quinion_model)))]
#[allow(unsafe_code, reason = "devices write into frames by address")]
pub mod backend;
#[allow(unsafe_code, reason = "bytes are copied under the hit protocol")]
pub mod folio;
// Index.
pub mod xarray;
// Paths.
#[cfg(not(quinion_model))]
#[allow(unsafe_code, reason = "hits copy to a caller's address")]
pub mod filemap;
