//! Server: a cache with stores, and a socket at which clients join.
//!
//! It is `serve` of `quinion-owner` with an owner that opens names (`stores.rs`). It answers in threads of its own;
//! its program may read through the same cache.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use object_store::ObjectStore;
use quinion::Cache;
use quinion_object::{AnswerTimes, FetchError, FetchStats, FirstByte, ObjectFile, Options};
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::{Owner, PIN_PERCENT, Service, ServiceOptions, VIEWERS};

use crate::error::{Error, ErrorKind, Result};
use crate::socket::{Listening, Socket};
use crate::stores::{OpenRequest, StoreRequest, Stores};
use crate::totals::{ClientCounts, ServerTotals};

/// Threads that answer at first, each of which waits for one miss; more come when all of them wait for stores.
const WORKERS: usize = 32;

/// How a [`Server`] is made.
pub struct Builder {
    cache: Cache,
    stores: Vec<StoreRequest>,
    clients_max: usize,
    pin_percent: u64,
    revisions: bool,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("stores", &self.stores.len())
            .field("clients_max", &self.clients_max)
            .finish_non_exhaustive()
    }
}

impl Builder {
    /// Adds a store: URLs that begin with `prefix` and a slash are its objects, by what follows. All clients may read
    /// whatever the store can.
    #[must_use]
    pub fn store(mut self, prefix: impl Into<String>, store: Arc<dyn ObjectStore>, options: Options) -> Self {
        self.stores.push(StoreRequest { prefix: prefix.into(), store, options });
        self
    }

    /// How many processes may be connected at a time: 1,024 by default, 1 to 4,096. More are refused
    /// ([`ErrorKind::Connect`]).
    ///
    /// Memory for them grows and shrinks with their number: 2 MiB of the cache's memory for each 100, of which the
    /// first 2 MiB are taken in any case, and two descriptors of this process for each.
    #[must_use]
    pub fn clients_max(mut self, clients: usize) -> Self {
        self.clients_max = clients;
        self
    }

    /// How much of the cache's memory one client may pin, in percent: 25 by default, 1 to 50. All pins of a cache
    /// together have half of its memory (`pinned_max` of the cache's own builder), so with 50 one client may take all
    /// of that from the others, whose pins are refused then ([`ErrorKind::Full`]); their reads are not.
    #[must_use]
    pub fn pin_percent(mut self, percent: u64) -> Self {
        self.pin_percent = percent;
        self
    }

    /// Whether clients may have revisions of local files opened; not by default. See
    /// [`Client::open_revision`](crate::Client::open_revision).
    ///
    /// The server opens and closes such a file by itself. By the rule of POSIX locks each close ends all locks of this
    /// process on the file: allow it only where nothing in this process locks files that clients share, as SQLite does
    /// its databases.
    #[must_use]
    pub fn revisions(mut self, allowed: bool) -> Self {
        self.revisions = allowed;
        self
    }

    /// Starts to serve under a name, or at a path, if it has a slash: see [`Client::connect`](crate::Client::connect).
    /// The socket's folder is made, if there is none, and must be this user's alone. A cache is served once: after a
    /// server has ended, the next one has a cache of its own.
    ///
    /// # Errors
    /// [`ErrorKind::Start`], also if the cache is served already, or was.
    pub fn start(self, name: &str) -> Result<Server> {
        self.start_at(Socket::bind(name)?)
    }

    /// Starts to serve at a socket that was made before the cache.
    ///
    /// # Errors
    /// As [`Builder::start`].
    pub fn start_at(self, socket: Socket) -> Result<Server> {
        let name = socket.path().display().to_string();
        let failed = |error: std::io::Error| {
            let has_remedy = error.kind() == std::io::ErrorKind::AlreadyExists;
            let error = Error::of_io(ErrorKind::Start, format!("cannot serve as {name:?}"), error);
            if has_remedy {
                error
            } else {
                error.with_hint("allow this process more threads, descriptors or memory")
            }
        };
        let stores = Stores::new(&self.cache, self.stores)
            .map_err(|why| Error::new(ErrorKind::Start, format!("cannot serve as {name:?}: {why}")))?;
        let stores = Arc::new(if self.revisions { stores.with_revisions() } else { stores });
        let owner = CacheOwner::new(self.cache).with_opener(Arc::clone(&stores) as _);
        let owner = Arc::new(owner);
        let (listening, socket) = socket.into_parts();
        let options = ServiceOptions {
            workers: WORKERS,
            viewers_max: self.clients_max,
            pin_percent: self.pin_percent,
            listener: Some(socket),
            ..ServiceOptions::default()
        };
        let service = Service::start_with(Arc::clone(&owner) as Arc<dyn Owner>, options).map_err(failed)?;
        stores.count_clients_by(ClientCounts { service: service.counters(), owner: Arc::downgrade(&owner) });
        Ok(Server { service, owner, stores, listening })
    }
}

/// Serves a cache to other processes of this user until it is dropped.
pub struct Server {
    // Dropped first, before its socket is removed.
    service: Service,
    owner: Arc<CacheOwner>,
    stores: Arc<Stores>,
    // Dropped last: a server that waits for the name opens the folder of the disk tier next, and the cache has that
    // until it has ended. It ends in a bounded time, also if its disk hangs.
    listening: Listening,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("socket", &self.listening.path()).finish_non_exhaustive()
    }
}

/// Opens objects of a server's stores for the server's own process: see [`Server::opener`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ObjectOpener {
    stores: Arc<Stores>,
}

impl ObjectOpener {
    /// Opens the object at `url`, by the server's store for it and in its cache: clients that open it share the pages.
    /// The handle stays with the version that the object is now. Waits for the store.
    ///
    /// # Errors
    /// [`ErrorKind::Open`]: no store has that prefix, or it does not tell what the object is.
    pub fn open(&self, url: &str) -> Result<ObjectFile> {
        let opened = self.stores.open_object(url.as_bytes(), OpenRequest::default());
        let failed = |text| Error::new(ErrorKind::Open, format!("cannot open {text}"));
        opened.map(|opened| opened.file).map_err(|refusal| failed(refusal.text))
    }
}

/// Statistics of a server.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ServerStats {
    /// Processes that are connected now.
    pub clients: usize,
    /// Files and objects that they have open.
    pub open_files: usize,
    /// Ranges that they have pinned.
    pub pins: usize,
    /// Reads of all clients, as the clients count them.
    pub reads: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Reads that had to ask.
    pub asked: u64,
    /// Fetches, by the stores' prefixes.
    pub fetches: Vec<(String, FetchStats)>,
    /// How soon the stores' answers began, by the prefixes of those that gave enough of them.
    pub first_bytes: Vec<(String, FirstByte)>,
    /// How soon all answers of the stores began, by their prefixes, in buckets that can be added up.
    pub answer_times: Vec<(String, AnswerTimes)>,
}

impl Server {
    /// A server of that cache, to which stores are added.
    pub fn builder(cache: Cache) -> Builder {
        Builder {
            cache,
            stores: Vec::new(),
            clients_max: VIEWERS,
            pin_percent: PIN_PERCENT,
            revisions: false,
        }
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        self.listening.path()
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        self.owner.cache()
    }

    /// Opens objects of the server's stores for this process, on any thread, also when the server has ended. It keeps
    /// the cache alive.
    pub fn opener(&self) -> ObjectOpener {
        ObjectOpener { stores: Arc::clone(&self.stores) }
    }

    /// Statistics of the server.
    pub fn stats(&self) -> ServerStats {
        let (totals, attachments) = (self.service.totals(), self.owner.attachments());
        ServerStats {
            clients: self.service.viewers(),
            open_files: attachments.open_files,
            pins: attachments.pinned_ranges,
            reads: totals.reads,
            bytes: totals.bytes,
            asked: totals.asked,
            fetches: self.stores.stats(),
            first_bytes: self.stores.first_bytes(),
            answer_times: self.stores.answer_times(),
        }
    }

    /// The sums of them, as any client may ask for ([`Client::server_totals`](crate::Client::server_totals)).
    pub fn totals(&self) -> ServerTotals {
        self.stores.totals().expect("it serves until it is dropped")
    }

    /// Adds a store while clients read, or gives a prefix another: see [`Builder::store`].
    ///
    /// If both have the same name ([`Options::store_name`]), it is one store, reached in another way: the new one
    /// fetches from now on what clients have open, and its numbers go on. Else clients read on by the store before,
    /// with its credentials, until they open again: the new store may name other objects.
    ///
    /// # Errors
    /// [`ErrorKind::Start`]: the prefix is no URL.
    pub fn set_store(
        &self,
        prefix: impl Into<String>,
        store: Arc<dyn ObjectStore>,
        options: Options,
    ) -> Result<()> {
        let set = self.stores.set(StoreRequest { prefix: prefix.into(), store, options });
        set.map(drop).map_err(|why| Error::new(ErrorKind::Start, format!("cannot add a store: {why}")))
    }

    /// Takes a store away: clients can open nothing there any more, and continue to read their open objects by that
    /// store. Returns whether there was one of that prefix.
    pub fn remove_store(&self, prefix: &str) -> bool {
        self.stores.remove(prefix)
    }

    /// For each store of which a fetch has failed for good since the last call, the newest such failure. Clients are
    /// told that their reads failed, and not why: the log of this process is where to say it.
    pub fn take_store_failures(&self) -> Vec<(String, FetchError)> {
        self.stores.take_failures()
    }

    /// Whether a process that connects to the socket's path comes to this server: the socket may have been removed, or
    /// its queue be full. Waits for nothing.
    pub fn is_reachable(&self) -> bool {
        self.listening.is_reachable()
    }

    /// Stops serving: clients' reads of objects fail from now on, and the kernel reads local files. Their pinned
    /// bytes stay in the memory of this process.
    pub fn stop(self) {
        drop(self);
    }
}
