//! Request: what a caller asks of packing and of verifying, and the numbers and errors that they end with.
//!
//! The words of an error say what was asked, what is wrong, and what to do; nothing is left behind by any of them.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

use quinion::error::Error;

use super::format::PackIdentity;
use super::workers::NoThread;

/// A snapshot to be packed, and how.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PackRequest {
    /// The file with a VM's memory and the diffs above it, as [`Server::start_layers`](crate::Server::start_layers)
    /// takes them; or one pack, which is packed anew.
    pub layers: Vec<PathBuf>,
    /// Packs in the folder of [`PackRequest::out`]: chunks that they have are not stored again. The new pack needs
    /// those of them, and of the packs that they refer to, from which it took chunks.
    pub against: Vec<PathBuf>,
    /// The file that is written.
    pub out: PathBuf,
    /// Whether a file of that name is replaced. Packs that refer to it cannot be read any more then.
    pub replace: bool,
    /// Bytes of a chunk: a power of two from 64 KiB to 4 MiB. If not set, those of the packs of
    /// [`PackRequest::against`], or 256 KiB. A larger one compresses better, and a page that is wanted alone costs
    /// more.
    pub chunk_bytes: Option<u32>,
    /// The level of zstd, 1 to 19. If not set, 3.
    pub level: i32,
}

impl PackRequest {
    pub(super) const CHUNK_BYTES: u32 = 256 << 10;

    /// The snapshot in `layers` is packed into `out`.
    pub fn new(layers: Vec<PathBuf>, out: PathBuf) -> Self {
        Self { layers, against: Vec::new(), out, replace: false, chunk_bytes: None, level: 3 }
    }
}

/// How far packing or verifying is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PackProgress {
    /// Bytes of the snapshot that are done.
    pub done_bytes: u64,
    /// The snapshot's size in bytes.
    pub bytes: u64,
}

/// A pack that was written.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PackReport {
    /// The snapshot's size in bytes: of it are zeros, shared, repeated, and the rest, which was stored.
    pub bytes: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u32,
    /// Bytes of chunks of zeros.
    pub zero_bytes: u64,
    /// Bytes of chunks that other packs have.
    pub shared_bytes: u64,
    /// Bytes of chunks that this pack had already.
    pub repeated_bytes: u64,
    /// Bytes that the other chunks were stored in.
    pub stored_bytes: u64,
    /// The size of the pack in bytes.
    pub file_bytes: u64,
    /// The packs that it refers to, by their names in its folder.
    pub packs: Vec<PathBuf>,
}

impl PackReport {
    pub(super) fn new(bytes: u64, chunk_bytes: u32) -> Self {
        Self {
            bytes,
            chunk_bytes,
            zero_bytes: 0,
            shared_bytes: 0,
            repeated_bytes: 0,
            stored_bytes: 0,
            file_bytes: 0,
            packs: Vec::new(),
        }
    }
}

/// A pack whose header and index are right, and of which each chunk was read.
#[derive(Debug)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Which pack it is.
    pub identity: PackIdentity,
    /// The snapshot's size in bytes.
    pub bytes: u64,
    /// The size of the pack in bytes.
    pub file_bytes: u64,
    /// Chunks of the snapshot.
    pub chunks: u64,
    /// Chunks that are damaged, or cannot be read: in this pack or in one that it refers to.
    pub damaged_chunks: u64,
    /// The first of these.
    pub damaged: Vec<DamagedChunk>,
    /// The packs that it refers to, by their names in its folder.
    pub packs: Vec<PathBuf>,
}

/// A chunk that is damaged, or cannot be read.
#[derive(Debug)]
#[non_exhaustive]
pub struct DamagedChunk {
    /// The chunk's bytes of the snapshot.
    pub range: Range<u64>,
    /// Why.
    pub error: io::Error,
}

impl DamagedChunk {
    pub(super) fn new(range: Range<u64>, error: io::Error) -> Self {
        Self { range, error }
    }
}

/// Why no pack was written, or why a file cannot be verified.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each is said by its message")]
#[non_exhaustive]
pub enum PackError {
    #[error("{0}")]
    Request(String),
    #[error(transparent)]
    Open(#[from] Error),
    #[error("{}: a file of that name is there already; name another, or ask for it to be replaced", .0.display())]
    Exists(PathBuf),
    #[error("{}: the file was changed while it was packed; pack it when it is complete", .0.display())]
    Changed(PathBuf),
    #[error("byte {offset} of the snapshot cannot be read: {source}")]
    Read { offset: u64, source: io::Error },
    #[error(
        "{}: the pack cannot be written: {source}; name a file that you may write to, where there is room",
        .path.display()
    )]
    Write { path: PathBuf, source: io::Error },
    #[error("a chunk cannot be compressed: {0}")]
    Compress(#[source] io::Error),
    #[error("no thread can be started: {0}; raise the limit of this user's processes (ulimit -u)")]
    Thread(#[source] io::Error),
    #[error("it was interrupted; no file was written")]
    Interrupted,
}

impl From<NoThread> for PackError {
    fn from(NoThread(error): NoThread) -> Self {
        Self::Thread(error)
    }
}
