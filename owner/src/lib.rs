//! Quinion for several processes: one cache, which its **owner** keeps, and **viewers** that read it where it lies.
//!
//! ```text
//!   viewer's process                     owner's process
//!     read: finds the page in the shared   CacheOwner --files, leases, copies--> quinion::Cache
//!       index, copies it: no system call     ^
//!     miss, open, close: a request ------> Service: a socket, a page for each viewer, workers
//! ```
//!
//! A viewer maps the cache's memory for reading and walks its index as the owner's own threads do. For everything
//! else it sends a request. The viewer's side is in `quinion-view`, which needs no standard library.
//!
//! **To share a cache, use `quinion-service`**, or the command `quinion run`: both stand on this crate. The public
//! items show a [`quinion::Cache`] to viewers; sockets and requests are internals, of which no version promises
//! anything.
//!
//! | module | what |
//! |---|---|
//! | `sys` | credentials, a killed owner's mark, and calls that may hang |
//! | `viewer` | how a program that knows the library becomes a viewer |
//! | `serve` | the socket, viewers and their requests: what an owner is asked, and by whom |
//! | `owner` | a [`quinion::Cache`] that answers: which files are served, and what guarantees their bytes |
//!
//! [`ServeRules`] says which files may be served. Things with a name and no descriptor, such as an object of a store,
//! are opened by a [`NameOpener`].
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use quinion_owner::{CacheOwner, ServeRules};
//! let cache = quinion::Cache::builder().memory(1 << 30).build()?;
//! let owner = CacheOwner::new(cache).with_rules(ServeRules::default());
//! # drop(owner);
//! # Ok(())
//! # }
//! ```

#![cfg(not(quinion_model))]

/// The modules of this crate, for this repository's command, benchmark and tests. No promise is made: names and
/// behaviour change without an entry in the change log.
#[doc(hidden)]
#[path = "."]
pub mod internals {
    pub mod sys;
    #[allow(unsafe_code, reason = "another process's memory becomes references")]
    pub mod viewer;
    pub mod serve;
    pub(crate) mod owner;
}

pub(crate) use internals::*;

pub use internals::owner::{
    AttachmentCounts, CacheOwner, HotFile, NameOpener, NamedObject, ServeRules, Shortage, WithoutLease,
};
pub use internals::serve::{NameRefusal, RevisionRequest};
pub use quinion_view::viewer::sys::Errno;
