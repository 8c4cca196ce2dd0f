//! C: the functions behind `quinion.h`, which other languages call as well.
//!
//! ```text
//!   C, C++, Go, Python       qn_pread(file, buffer, length, offset)
//!   ffi         catches panics; a failure becomes a negative errno and a message of the thread
//!   args        pointers become references; option structs of other releases are understood or refused
//!   cache, file, batch, pin, memory, pool, client, backend, stats      one file for each kind of handle
//!   quinion, quinion-service
//! ```
//!
//! No policy is here. `include/quinion.h` is made of these files by cbindgen, so the documentation of a function is
//! that of its C declaration: it says units, ranges, errors, what blocks and what the caller owns, in terms of C.
//!
//! Invariants:
//!  1. No panic leaves a function: each consists of one call of [`ffi::ffi_call`], and a test looks for that.
//!  2. A pointer is dereferenced after it was compared with NULL, and an option struct only as far as its `size` says.
//!  3. An out parameter is NULL after a failure.
//!  4. A handle that was made before a fork is not freed in the child: locks in it may be held by threads that the
//!     child does not have.
//!
//! Every function relies on its caller for this: a pointer that is not NULL points to what the header says; a handle
//! was not closed, and is not closed while a call uses it; buffers are not used by others meanwhile.
//! These cannot be checked. The SAFETY comments call them the caller's contract.
#![allow(unsafe_code, reason = "C passes pointers")]
#![allow(non_camel_case_types, reason = "these are C's names")]
#![allow(clippy::missing_safety_doc, reason = "the contract is the same for all, and stands above")]

mod ffi;
mod args;
mod pool;
mod cache;
mod file;
mod pin;
mod batch;
mod memory;
mod backend;
mod client;
mod stats;

pub use backend::{qn_attributes, qn_backend, qn_open_backend};
pub use batch::{qn_pread_batch, qn_read};
pub use cache::*;
pub use client::*;
pub use ffi::{qn_error_message, qn_version};
pub use file::*;
pub use memory::*;
pub use pin::*;
pub use pool::*;
pub use stats::{qn_cache_stat, qn_cache_stats, qn_stats};
