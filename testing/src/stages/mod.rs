//! Stages: one part of the cache, set up alone.
//!
//! Each builds an arena, a mapping or a file map with as little around it as that part needs, so that a test can put it
//! into any state: [`mapping`] (one mapping), [`batch`] (batched reads), [`parts`] (fills that complete in parts),
//! [`writeback`] (dirty files and a watched device), [`transfers`] (fills and flushes over ordinary memory).
//!
//! Invariant: nothing happens on a stage (no readahead, eviction or write-back) that the test did not ask for.

pub mod batch;
pub mod mapping;
pub mod parts;
pub mod transfers;
pub mod writeback;
