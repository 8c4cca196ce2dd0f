//! Open file: what a client has open, as handles and pins keep it.
//!
//! When the server has ended, an object is **opened again** at the one that listens in its place, if it is still of the
//! same version: all that the store tells of it is as before, and has a strong ETag or a version id. The first open
//! file keeps the newest. No lock is held while a server is asked: several threads may each open the object, and one of
//! these is kept.
//!
//! Without such a server, and where the client has a store of its own for that, the object is read there (`direct.rs`).
//! That is not kept: each read looks for a server first.
//!
//! The last owner of an open file, a handle or a pin, gives the server its handle back, and the pages that were pinned.
//! Not in a forked child: there it is the parent's.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use quinion::internals::arena::CellNumber;
use quinion::internals::arena::control::Operation;
use quinion::internals::units::MappingId;
use quinion_object::Freshness;
use quinion_owner::internals::viewer::ViewedFile;

use crate::connection::{Connection, DEADLINE, RetryDeadline};
use crate::direct::{DirectObject, DirectStore};
use crate::error::{Error, ErrorKind, Result};
use crate::stores::{ObjectMetadata, OpenRequest};

#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) connection: Arc<Connection>,
    pub(crate) name: String,
    /// `None` of a file that the kernel reads, and of an object that is read from its store.
    pub(crate) viewed: Option<Viewed>,
    pub(crate) source: Source,
    /// The object at a store of the client's, if it has one for it.
    pub(crate) direct: Option<Arc<DirectObject>>,
    pub(crate) reopened: Reopened,
}

/// How an object is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjectOpening<'o> {
    pub(crate) url: &'o str,
    pub(crate) request: OpenRequest,
    /// How long reads wait for another server when this one has ended, if there is no store for that time.
    pub(crate) timeout: Duration,
    /// The client's stores for the time without a server.
    pub(crate) direct: &'o [DirectStore],
}

#[derive(Debug)]
pub(crate) struct Reopened {
    timeout: Duration,
    newest: RwLock<Option<Arc<OpenFile>>>,
    /// For those that only want to know: the lock orders the rest.
    is_some: AtomicBool,
}

impl Reopened {
    pub(crate) fn not_yet(timeout: Duration) -> Self {
        Self { timeout, newest: RwLock::default(), is_some: AtomicBool::new(false) }
    }

    fn set(&self, new: &Arc<OpenFile>) {
        let old = self.newest.write().unwrap_or_else(PoisonError::into_inner).replace(Arc::clone(new));
        self.is_some.store(true, Ordering::Relaxed);
        drop(old); // without the lock: it tells its server
    }
}

impl OpenFile {
    /// The newest that was opened again, whose server may have ended as well; `None` if there was no need yet.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`], if there is one: the lock may be a thread's that the child has not.
    #[inline]
    pub(crate) fn newest(&self) -> Result<Option<Arc<Self>>> {
        if !self.reopened.is_some.load(Ordering::Relaxed) {
            return Ok(None);
        }
        self.connection.viewer()?;
        Ok(self.reopened.newest.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    pub(crate) fn object(connection: &Arc<Connection>, opening: ObjectOpening<'_>) -> Result<Arc<Self>> {
        let ObjectOpening { url, request, timeout, direct } = opening;
        let (answer, metadata) = connection.open(url, request)?;
        let direct =
            if metadata.names_its_version() { DirectObject::of(direct, url, &metadata) } else { None };
        // The store is there at once.
        let timeout = if direct.is_some() { Duration::ZERO } else { timeout };
        Ok(Arc::new(Self {
            connection: Arc::clone(connection),
            name: url.into(),
            viewed: Some(Viewed::of(answer)),
            source: Source::Object(metadata),
            direct,
            reopened: Reopened::not_yet(timeout),
        }))
    }

    /// The result of `read` of the object at the server that is there now, or at the client's own store, after `dead`:
    /// the error of a read that has found its server gone. Not of an object without a name for its version, nor in a
    /// forked child.
    ///
    /// # Errors
    /// `dead`, or a later one like it: there is no server in time. [`ErrorKind::Changed`]; those of an open and of
    /// `read`.
    #[cold]
    pub(crate) fn read_elsewhere<T>(
        &self,
        mut dead: Error,
        mut read: impl FnMut(&Arc<Self>) -> Result<T>,
    ) -> Result<T> {
        let Source::Object(metadata) = &self.source else { return Err(dead) };
        if !metadata.names_its_version() {
            return Err(dead);
        }
        let mut retry = RetryDeadline::new(DEADLINE);
        let newest = self.newest()?;
        let mut connection =
            Arc::clone(newest.as_ref().map_or(&self.connection, |newest| &newest.connection));
        loop {
            connection = match connection.successor(self.reopened.timeout) {
                Ok(next) => next,
                Err(none) => return self.read_direct(none.or(dead), read),
            };
            // The store is asked: this handle's version may have been taken for current for long.
            let request = OpenRequest { freshness: Some(Freshness::Always), ..OpenRequest::default() };
            let (url, timeout) = (&*self.name, self.reopened.timeout);
            let opened = Self::object(&connection, ObjectOpening { url, request, timeout, direct: &[] });
            let answer = opened.map_err(|error| self.not_reopened(error)).and_then(|opened| {
                if !opened.is_same_version(metadata) {
                    return Err(Error::changed(&self.name));
                }
                self.reopened.set(&opened);
                read(&opened)
            });
            match answer {
                Err(error) if error.kind() == ErrorKind::OwnerDead => dead = error,
                Err(error) if error.is_unasked() => return self.read_direct(error, read),
                answer => return answer,
            }
            if !retry.pause() {
                return self.read_direct(dead, read);
            }
        }
    }

    /// The result of `read` at the client's own store.
    ///
    /// # Errors
    /// `gone`: there is none. Those of `read`.
    fn read_direct<T>(&self, gone: Error, mut read: impl FnMut(&Arc<Self>) -> Result<T>) -> Result<T> {
        let (Some(direct), Source::Object(metadata)) = (&self.direct, &self.source) else { return Err(gone) };
        read(&Arc::new(Self {
            connection: Arc::clone(&self.connection),
            name: self.name.clone(),
            viewed: None,
            source: Source::Object(metadata.clone()),
            direct: Some(Arc::clone(direct)),
            reopened: Reopened::not_yet(Duration::ZERO),
        }))
    }

    fn is_same_version(&self, metadata: &ObjectMetadata) -> bool {
        matches!(&self.source, Source::Object(own) if own.is_same_version(metadata))
    }

    fn not_reopened(&self, error: Error) -> Error {
        if error.errno() == Some(libc::ENOENT) { Error::changed(&self.name) } else { error }
    }
}

#[derive(Debug)]
pub(crate) enum Source {
    Object(ObjectMetadata),
    Local(File),
}

#[derive(Debug)]
pub(crate) struct Viewed {
    pub(crate) handle: u64,
    cell: CellNumber,
    id: MappingId,
    marker: AtomicU64,
    touched: AtomicU64,
}

impl Viewed {
    pub(crate) fn of([handle, place]: [u64; 2]) -> Self {
        let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
        Self { handle, cell, id, marker: AtomicU64::new(0), touched: AtomicU64::new(0) }
    }

    pub(crate) fn file(&self) -> ViewedFile<'_> {
        let Self { handle, cell, id, marker, touched } = self;
        ViewedFile { handle: *handle, cell: *cell, id: *id, marker_reported: marker, touched }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Some(viewed) = &self.viewed {
            self.connection.give_back(Operation::Detach, [viewed.handle, 0, 0]);
        }
    }
}
