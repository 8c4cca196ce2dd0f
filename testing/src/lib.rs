//! Quinion-testing: what the tests of this repository share. It is not published, and nothing of it is linked into a
//! program that is.
//!
//! | module | what |
//! |---|---|
//! | [`doubles`] | devices that fail on request under a seed, a disk that can crash, and fills over ordinary memory |
//! | [`ablations`] | the index without one of its mechanisms, and with nodes that run out |
//! | [`device`] | a device whose bytes say where they belong, which a test holds, breaks and watches |
//! | [`content`] | pages that say whose they are, the check of what a read returned, and a random number generator |
//! | [`twins`] | the system under test beside a naive model (or the kernel): each operation is done to both |
//! | [`fixtures`] | one part of the cache alone, without the parts above it |
//! | [`nodes`] | a node allocator for tree tests that runs out on request and finds leaks |
//! | [`hazard`] | refused system calls, signals, and tests in a process of their own |
//! | [`hanging`] | a file system that stops answering on request |
//! | [`naive_owner`] | the simplest owner that viewers can be served by |
//! | [`vmm`] | a VM monitor for page-fault servers, its guest, and a naive server |
//! | [`shrinking`] | makes a failing list of operations short |
//! | [`block_on`] | runs one future on the calling thread |
//!
//! The library's integration tests and the fuzz targets use this crate, and the benchmark, which compares the cache
//! with [`ablations`]. Its unit tests compile [`doubles`] as source (`quinion/src/backend/mod.rs` says why).
//!
//! Invariant: everything random here depends on a seed that the caller gives, so that a failure can be repeated.
#![cfg(not(quinion_model))]
#![allow(
    missing_docs,
    reason = "an operation's variants and a fixture's fields say by their names what they are"
)]

pub mod ablations;
pub mod block_on;
pub mod content;
pub mod device;
pub mod doubles;
pub mod fixtures;
pub mod hanging;
pub mod hazard;
pub mod naive_owner;
pub mod nodes;
pub mod shrinking;
pub mod twins;
pub mod vmm;
