//! Quinion for objects: S3, GCS, Azure, HTTP and local stores, read through Quinion's page cache.
//!
//! The kernel caches files and no objects, so each engine that reads Parquet, Lance or weights from a store has a cache
//! of its own, or none. This crate makes an object readable through a [`quinion::Cache`]: pages of 4 KiB, fetched by
//! few and large range GETs, once for all threads, in one memory with one bound.
//!
//! ```text
//!   ObjectCache::open --one HEAD--> size, ETag ----------> Identity: store, key and version, as a digest
//!        |                                                    |  the same version opened twice: one mapping
//!        v                                                    v
//!   ObjectFile --read_at, bytes, read_ranges--> quinion::File --misses: fills--> ObjectBackend
//!        ^                                                                            | plan: neighbours join
//!        |                                                                            v
//!   CachedStore: the trait ObjectStore          range GETs with If-Match, retried, bounded <-- Fetcher
//! ```
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use object_store::{memory::InMemory, path::Path};
//! let cache = quinion::Cache::builder().memory(1 << 30).build()?;
//! let objects = quinion_object::ObjectCache::new(cache, Arc::new(InMemory::new()), Default::default())?;
//! let object = objects.open(&Path::from("table/part-0.parquet"))?;
//! let footer = object.bytes(object.len().saturating_sub(8)..object.len())?; // one GET
//! let again = object.bytes(0..4096)?; // not copied: the pages of the cache themselves
//! # drop((footer, again));
//! # Ok(())
//! # }
//! ```
//!
//! An engine that speaks `ObjectStore` takes one line: `let store = quinion_object::cached(store, cache)?;`
//!
//! What holds:
//!  1. *A version is a file of its own.* Its ETag is part of the identity, and every GET carries it as a condition. An
//!     object that was replaced is an error ([`Error::Changed`]) to handles of the older version, but to those that ask
//!     to go on with the new one ([`ObjectCache::open_following`]).
//!  2. *One GET for all that want a page*, as for devices.
//!  3. *A GET that fails fails the readers that wait for it*, after retries with backoff, and before its deadline.
//!  4. *Versions that cannot be told apart are not cached.* An object of which its store tells neither an ETag, nor a
//!     version id, nor a time is refused ([`Error::Unversioned`]), and a [`CachedStore`] asks its store for it.
//!  5. *The data in flight is bounded*, in requests and in bytes; the pages that it fills count to the cache's bound.
//!
//! Not promised: that memory of the HTTP client counts to that bound.

mod answer_times;
mod backend;
mod bare;
mod cache;
mod error;
mod fetch;
mod file;
mod first_byte;
mod following;
mod options;
mod metadata_cache;
mod newest;
mod plan;
mod retry;
mod retry_after;
mod runtime;
mod stats;
mod store;
mod store_text;
mod version;

pub use answer_times::AnswerTimes;
pub use cache::ObjectCache;
pub use error::{Error, FetchError, FetchFailure, Result};
pub use file::ObjectFile;
pub use first_byte::FirstByte;
pub use following::FollowingObject;
pub use options::{Freshness, Options};
pub use retry_after::RetryAdvice;
#[cfg(feature = "http")]
pub use retry_after::RetryAfterConnector;
pub use stats::FetchStats;
pub use store::{CachedStore, cached, cached_with};

/// Internals for Quinion's other packages. They change without notice.
#[doc(hidden)]
pub mod internals {
    pub use crate::bare::{
        exactly, get as bare_get, get_of_version as bare_get_of_version, get_ranges as bare_get_ranges,
    };
    pub use crate::metadata_cache::{
        MetadataCache, NoteWrites, Question, RangeOutside, Upload, Written, is_to_be_asked, noting_deletions,
        resolve,
    };
    pub use crate::newest::{CHANGES_MAX, Newest};
    pub use crate::runtime::start as start_runtime;
    pub use crate::store_text::shown;
}
