//! Quinion for several processes: one cache, owned by a server, read by clients in shared memory.
//!
//! Engines, data loaders and tools that read the same objects each keep a cache of their own, or none. Here one process
//! has the cache, the stores and their credentials. Others open an object by its URL and read it: cached bytes are
//! copied out of memory that the server shares, by the same walk as in the server, without a system call. The server
//! fetches the missing bytes, once for all processes that want them.
//!
//! ```text
//!   server                                              client
//!     Cache, stores by URL prefix                         Client::connect(name)
//!     a socket in a folder of the user   <--- join ---    maps the cache read-only
//!     opens "s3://bucket/key"            <--- name ---    open(..): a handle of one version
//!                                                         read_at: a hit is a walk and a copy
//!     fetches, fills                     <-- request --  read_at: a miss waits
//!     holds                              <-- request --  pin: bytes without a copy
//! ```
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use std::sync::Arc;
//! # let bucket = Arc::new(object_store::memory::InMemory::new());
//! use quinion_service::{Client, Server};
//! let cache = quinion::Cache::builder().memory(1 << 30).build()?;
//! let server = Server::builder(cache).store("s3://bucket", bucket, Default::default()).start("tables")?;
//! // In other processes of the same user:
//! let client = Client::connect("tables")?;
//! let object = client.open("s3://bucket/part-0.parquet")?;
//! let mut footer = [0; 8];
//! object.read_exact_at(&mut footer, object.len() - 8)?;
//! # drop(server);
//! # Ok(())
//! # }
//! ```
//!
//! An engine that speaks `ObjectStore` takes one line:
//! `let store = quinion_service::cached(store, client, "s3://bucket")?;`
//!
//! What holds:
//!  1. *A handle is of one version.* Its bytes never change. When the store has replaced the object, a read of bytes
//!     that are not cached fails ([`ErrorKind::Changed`]); a reader that asks for it goes on with the new version
//!     ([`Client::open_following`]).
//!  2. *Clients have no credentials.* The server opens what its stores can read, for processes with the very
//!     credentials of its own process, as the kernel tells (the same users, groups, capabilities and name spaces). They
//!     can read all that is cached.
//!  3. *A client that ends gives back its handles and pins*, however it ends: the server watches the process.
//!  4. *A server that ends is noticed* within a bounded time. Objects are opened again at the server that listens in
//!     its place, and read on if they are of the same version; without one, reads of objects fail
//!     ([`ErrorKind::OwnerDead`]), or, for a client that has a store of its own for that, are GETs of that very version
//!     ([`Client::with_direct_store`]). The kernel reads local files.
//!  5. *A forked child has nothing of it* ([`ErrorKind::Forked`]): it connects anew.
//!
//! The client itself opens local files, and hands the server its descriptor: so the server reads nothing that the
//! client could not. A file is served while a read lease of the kernel stands; else the kernel reads it.
//!
//! A file that processes change under locks of their own, such as a database, is cached for all of them by its
//! revisions ([`Client::open_revision`]).
//!
//! Not promised: that the mapping of a server that has ended is given back before the client ends.

mod error;
mod socket;
mod revision_attributes;
mod clock_steps;
mod totals;
mod stores;
mod server;
mod threads;
mod connection;
mod ranges;
mod direct;
mod open_file;
mod pin;
mod file;
mod revision;
mod client;
mod following;
mod client_store;

pub use client::Client;
pub use client_store::{ClientStore, ClientStoreBuilder, Failover, cached};
pub use error::{Error, ErrorKind, Result};
pub use file::ClientFile;
pub use following::FollowingFile;
pub use pin::PinnedBytes;
pub use quinion_object::Freshness;
pub use ranges::RangeRead;
pub use revision::{FileRevision, RevisionRead, RevisionRequest};
pub use revision_attributes::RevisionAttributes;
pub use server::{Builder, ObjectOpener, Server, ServerStats};
pub use socket::Socket;
pub use totals::ServerTotals;
