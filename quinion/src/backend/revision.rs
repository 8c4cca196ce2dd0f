//! Revision: a local file as it was at one moment, which never changes again; a change of the file ends it.
//!
//! ```text
//!   open    settled times? --no--> ETXTBSY: the next write may leave them as they are
//!              | yes: size and times are the revision's for ever, under an identity of its own
//!   fill    pread, then the times once more --other, or not told--> ESTALE: nothing of it is cached
//!                                           --the same-----------> the bytes are of this revision
//! ```
//!
//! A write changes the times of its file before it changes a byte, where the file system is local and its clock is
//! fine. So bytes that were read before a look that finds the old times are older than any write since. The file is
//! read by the thread that asks, and not by a ring: the look comes behind the read, and before the fill ends.
//!
//! Not told of: stores through a shared mapping, which change the times with the first store to a page since it was
//! written back, and not with the next one (on tmpfs with none); and a clock that is set back, which may give a later
//! content the times of an earlier one. The caller's identity has to tell of these ([`RevisionOpen::identity`]).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::engine::{Engine, EngineShared};
use super::open_file::{IoMode, OpenFile};
use super::{Attributes, Backend, Fill, Identity, ParkedBackend, Version};

/// The request of [`FileRevision::open`].
pub struct RevisionOpen<I> {
    /// Open for reading.
    pub file: OwnedFd,
    /// The revision's identity, from what the file is now. It has to be another for another size or other times, and
    /// may be another for whatever else tells contents apart.
    pub identity: I,
}

/// A regular file as it was when it was opened.
#[derive(Debug)]
pub struct FileRevision {
    file: OpenFile,
    engine: Arc<EngineShared>,
    /// Attributes of the revision. A read fails if the file has another size or other times by then.
    attributes: Attributes,
}

impl FileRevision {
    /// Opens the file as it is now. May wait for the file system.
    ///
    /// # Errors
    /// `ETXTBSY`: it was changed just now, or is in the future, so its times do not tell of the next write.
    /// `EOPNOTSUPP`: it is no regular file of a local file system whose times have nanoseconds. Else those of an open.
    pub fn open<I>(engine: &Engine, request: RevisionOpen<I>) -> io::Result<Self>
    where
        I: FnOnce(&Attributes) -> Identity,
    {
        let file = OpenFile::adopt(request.file).map_err(io::Error::other)?;
        let now = file.attributes()?;
        if !file.writes_set_times(now.version) {
            return Err(rustix::io::Errno::OPNOTSUPP.into());
        }
        if !file.has_settled_change(now.version) {
            return Err(rustix::io::Errno::TXTBSY.into());
        }
        let version = Version { settled: true, steps: true, ..now.version };
        let attributes = Attributes { identity: (request.identity)(&now), version, size: now.size };
        Ok(Self { file, engine: Arc::clone(&engine.shared), attributes })
    }

    /// Reads the bytes of a fill, and returns how many came if they are of this revision.
    fn read(&self, fill: &Fill) -> io::Result<usize> {
        let bytes = self.file.read_blocking(fill)?;
        let now = self.file.attributes()?;
        let is_same = now.size == self.attributes.size
            && now.version.modified == self.attributes.version.modified
            && now.version.changed == self.attributes.version.changed;
        if is_same { Ok(bytes) } else { Err(rustix::io::Errno::STALE.into()) }
    }
}

impl Backend for FileRevision {
    fn name(&self) -> &'static str {
        "file revision"
    }
    fn is_direct(&self) -> bool {
        self.file.way() == IoMode::Direct
    }
    fn mount(&self) -> Option<u64> {
        self.file.mount
    }
    fn parked(&self) -> Option<ParkedBackend> {
        Some(ParkedBackend::new(&self.engine, &self.file.open))
    }
    fn attributes(&self) -> io::Result<Attributes> {
        Ok(self.attributes)
    }
    fn submit(&self, fills: Vec<Fill>) {
        fills.into_iter().for_each(|fill| self.fill_here(fill));
    }
    fn fills_here(&self, _bytes: usize) -> bool {
        true
    }
    fn fill_here(&self, fill: Fill) {
        let outcome = self.read(&fill);
        fill.complete(outcome);
    }
}
