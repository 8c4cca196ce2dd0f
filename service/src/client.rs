//! Client: the way in for programs.
//!
//! A URL is opened by the server, with its stores; a path by this process itself. Both are a [`ClientFile`]. A process
//! is connected from its first client on until it ends, and counts as one, however many clients it has.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use quinion_object::Freshness;

use crate::connection::{CONNECT_MAX, Connection, DEADLINE, RetryDeadline};
use crate::direct::DirectStore;
use crate::error::{Error, ErrorKind, Result};
use crate::file::ClientFile;
use crate::open_file::ObjectOpening;
use crate::revision::{FileRevision, RevisionRequest};
use crate::socket::path_of;
use crate::stores::OpenRequest;
use crate::totals::ServerTotals;

/// A connection to a server's cache. Cheap to clone; all clients of one server in a process are one connection.
///
/// When the server has ended and another listens in its place, objects are opened and read there: open ones are opened
/// again, if they are still of the same version. Open local files are the kernel's from then on.
#[derive(Clone, Debug)]
pub struct Client {
    connection: Arc<Connection>,
    reconnect_timeout: Duration,
    freshness: Option<Freshness>,
    direct: Vec<DirectStore>,
}

/// How long a server that has ended is waited for, unless a client says otherwise.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);

impl Client {
    /// Connects to the server of that name; a name with a slash is the path of its socket. Waits ten seconds at most.
    ///
    /// Connect again after a fork, in the child: what the parent has is not the child's.
    ///
    /// # Errors
    /// [`ErrorKind::Connect`]: there is no such server, or it does not admit this process.
    pub fn connect(server: &str) -> Result<Self> {
        Self::connect_within(server, CONNECT_MAX)
    }

    /// As [`Client::connect`], and waits as long at most.
    ///
    /// # Errors
    /// Those of [`Client::connect`].
    pub fn connect_within(server: &str, timeout: Duration) -> Result<Self> {
        let failed = |error| {
            Error::of_io(ErrorKind::Connect, format!("cannot connect to {server:?}"), error).with_hint(
                "name a server as it was started (`quinion serve --name`), or the path of its socket",
            )
        };
        let socket = path_of(server).map_err(failed)?;
        let connection = Connection::to(&socket, timeout.min(CONNECT_MAX))?;
        Ok(Self { connection, reconnect_timeout: RECONNECT_TIMEOUT, freshness: None, direct: Vec::new() })
    }

    /// How long opens and reads wait for another server in the place of one that has ended, from when that was noticed
    /// first, before they are [`ErrorKind::OwnerDead`]. 5 seconds by default. With zero they take the one that is
    /// there. A server that does not admit this process, or is of another version, is not waited for: that is
    /// [`ErrorKind::Connect`].
    #[must_use]
    pub fn with_reconnect_timeout(self, timeout: Duration) -> Self {
        Self { reconnect_timeout: timeout, ..self }
    }

    /// How old what the server knows of an object may be when an open by this client takes it for current, in place of
    /// the server's `Options::freshness`; with [`Freshness::Always`] the store is asked each time. A clone may have
    /// another. Local files are not affected.
    #[must_use]
    pub fn with_freshness(self, freshness: Freshness) -> Self {
        Self { freshness: Some(freshness), ..self }
    }

    /// Reads objects whose URLs begin with `prefix` and a slash from `store` when their server has ended, in place of
    /// [`ErrorKind::OwnerDead`]: by GETs of the version that is open, on the condition of its strong ETag or by its
    /// version id. If the store has another by then, the read is [`ErrorKind::Changed`]. An object that has neither,
    /// and an open, need a server.
    ///
    /// Reads of these objects wait for no other server ([`Client::with_reconnect_timeout`]), and take the one that is
    /// there. For objects that are opened by this client from now on.
    #[must_use]
    pub fn with_direct_store(mut self, prefix: &str, store: Arc<dyn ObjectStore>) -> Self {
        self.direct.retain(|other| !other.is_of(prefix));
        self.direct.push(DirectStore::new(prefix, store));
        self
    }

    /// Opens an object by its URL, as `s3://bucket/key`, by the stores that the server has; or a local file by its
    /// path. The URL's key is percent-decoded. Waits for the store's answer, unless what the server knows is fresh
    /// enough ([`Client::with_freshness`]).
    ///
    /// # Errors
    /// [`ErrorKind::Open`], with the server's words; [`ErrorKind::OwnerDead`]; [`ErrorKind::Connect`];
    /// [`ErrorKind::TimedOut`]; [`ErrorKind::Forked`].
    pub fn open(&self, name: &str) -> Result<ClientFile> {
        self.open_with(|connection| match name.split_once("://") {
            Some(("file", path)) => ClientFile::open_local(connection, path.as_ref()),
            Some(_) if name.contains('\n') => {
                let text = format!("cannot open {name:?}: a URL has no line break; write it as %0A");
                Err(Error::new(ErrorKind::Open, text))
            }
            Some(_) => self.open_object(connection, name, None),
            None => ClientFile::open_local(connection, name.as_ref()),
        })
    }

    /// As [`Client::open`], without blocking: a thread of the client's waits. Needs no particular runtime. An
    /// object that is opened for a future that was dropped is closed again.
    ///
    /// # Errors
    /// As [`Client::open`]; and [`ErrorKind::Start`]: the system gives no threads.
    pub async fn open_async(&self, name: &str) -> Result<ClientFile> {
        let (client, name) = (self.clone(), name.to_owned());
        self.connection.threads()?.run(move || client.open(&name)).await
    }

    /// Opens a local file by its path, which may be any: also one that looks as a URL, or is not UTF-8.
    ///
    /// # Errors
    /// [`ErrorKind::Open`]; [`ErrorKind::OwnerDead`]; [`ErrorKind::Connect`]; [`ErrorKind::TimedOut`];
    /// [`ErrorKind::Forked`].
    pub fn open_path(&self, path: impl AsRef<Path>) -> Result<ClientFile> {
        self.open_with(|connection| ClientFile::open_local(connection, path.as_ref()))
    }

    /// Opens a local file as it is now, under a name that the caller has for its content: all processes that give the
    /// same name, and find the same size and times, share the cached pages. The pages stay those bytes, whatever is
    /// written to the file later; bytes that are read after a change are refused.
    ///
    /// Open it, and read from it, while the file cannot change by the rules of those who write to it, as under a lock;
    /// else what is read may be older than the file is. Times do not tell of stores to mapped memory: the name has to
    /// tell contents apart that such stores make. Waits some tenths of a second at most.
    ///
    /// # Errors
    /// [`ErrorKind::Changed`]: the file was changed within the last 20 ms. [`ErrorKind::Open`]: its file system does
    /// not tell of each write by times (networks, FUSE, overlayfs, inodes of 128 bytes on ext4), or the server opens no
    /// revisions ([`Builder::revisions`](crate::Builder::revisions)), or cannot have the file.
    /// [`ErrorKind::OwnerDead`]; [`ErrorKind::Connect`]; [`ErrorKind::TimedOut`]; [`ErrorKind::Forked`].
    pub fn open_revision(&self, request: RevisionRequest<'_>) -> Result<FileRevision> {
        FileRevision::open(&self.current(Duration::ZERO)?, request)
    }

    pub(crate) fn open_first(&self, url: &str, len: u64) -> Result<ClientFile> {
        self.open_with(|connection| self.open_object(connection, url, Some(len)))
    }

    fn open_object(&self, connection: &Arc<Connection>, url: &str, first: Option<u64>) -> Result<ClientFile> {
        let request = OpenRequest { first, freshness: self.freshness };
        let opening = ObjectOpening { url, request, timeout: self.reconnect_timeout, direct: &self.direct };
        ClientFile::open_object(connection, opening)
    }

    fn open_with(&self, open: impl Fn(&Arc<Connection>) -> Result<ClientFile>) -> Result<ClientFile> {
        let mut connection = self.current(self.reconnect_timeout)?;
        let mut retry = RetryDeadline::new(DEADLINE);
        loop {
            match open(&connection) {
                // The server has ended meanwhile.
                Err(error) if error.kind() == ErrorKind::OwnerDead && retry.pause() => {
                    connection =
                        connection.successor(self.reconnect_timeout).map_err(|none| none.or(error))?;
                }
                opened => return opened,
            }
        }
    }

    /// The connection to the server that is there now, or comes in time; else the old one.
    fn current(&self, timeout: Duration) -> Result<Arc<Connection>> {
        let old = &self.connection;
        let new = old.viewer()?.owner_is_dead().then(|| old.successor(timeout).ok()).flatten();
        Ok(new.unwrap_or_else(|| Arc::clone(old)))
    }

    /// The numbers of the server: its reads for all clients so far, the fetches of the stores that it has now, and the
    /// bytes that it has now. A store that the server no longer has takes its fetches with it, so those may become
    /// fewer. It costs a question, which a busy server answers later; `timeout` bounds the wait. A server that has
    /// ended is not waited for.
    ///
    /// # Errors
    /// [`ErrorKind::OwnerDead`]; [`ErrorKind::Connect`]; [`ErrorKind::TimedOut`]; [`ErrorKind::Forked`];
    /// [`ErrorKind::Open`]: it is a server of an earlier version.
    pub fn server_totals(&self, timeout: Duration) -> Result<ServerTotals> {
        self.current(Duration::ZERO)?.totals(timeout)
    }

    /// Whether the server has ended, however it ended, and no other listens in its place. If it has, another that
    /// listens there is connected to: that waits for 0.2 s at most.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn owner_is_dead(&self) -> Result<bool> {
        Ok(self.current(Duration::ZERO)?.viewer()?.owner_is_dead())
    }
}
