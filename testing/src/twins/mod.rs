//! Twins: the system under test beside a naive one that is obviously right.
//!
//! A list of random operations is applied to both; each answer and the final state must agree. A file of a cache stands
//! beside the kernel's file ([`cache`]), a memory file beside a memfd ([`mem_file`]), the tree beside a sorted map
//! ([`xarray`]). A policy has no twin: [`rings`] is the naive cache that carries out what it says.
//!
//! Invariant: a twin shares no code with what it is compared to, except the types of arguments and results.

pub mod cache;
pub mod mem_file;
pub mod rings;
pub mod xarray;
