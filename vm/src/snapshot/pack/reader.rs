//! Reader: the bytes of a snapshot out of its pack, chunk by chunk, each compared with its digest.
//!
//! ```text
//!   read_at --> which chunk?  zeros                              nothing is read
//!                             all of it                          read, decompressed into the caller's buffer, compared
//!                             a part of it --> recent chunks?    copied from there
//!                                              no                read, decompressed, compared, kept for a while
//! ```
//!
//! **Recent chunks.** A fill may want less than a chunk: one page, in the extreme. So the chunks that were decompressed
//! last are kept, [`RECENT_BYTES`] of them, or [`RECENT_MIN`] if chunks are large. A chunk that several threads want is
//! decompressed once: the others wait for the first one. This memory is beside the cache's bound.
//!
//! **Damage.** A chunk whose stored bytes are damaged, or another's, has another digest; then it is an error, and no
//! byte of it is supplied. A read that meets such a chunk after others ends before it.
//!
//! Locks: the table of recent chunks, held for some steps; and that of one chunk, held while it is read: a thread takes
//! it when it wants that very chunk. No other lock is taken under either.
//!
//! Invariants:
//!  1. Bytes that are given out are those of a chunk whose digest is the index's.
//!  2. Memory for a chunk, stored or not, is as much as a chunk has at most, whatever the index says.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quinion::backend::{Attributes, BlockingSource, Identity, ReadAt, Version};
use sha2::{Digest, Sha256};
use zstd::bulk::Decompressor;

use super::super::recognition::END_MAGIC;
use super::super::{Assembled, FileIdentity};
use super::format::{ChunkForm, END_BYTES, HEADER_BYTES, Header, Index, PackIdentity, PackName, StoredChunk};
use super::source::PackSource;

/// Bytes of chunks that were decompressed last.
const RECENT_BYTES: usize = 16 << 20;
/// How many chunks may be kept, even if they have more than `RECENT_BYTES` bytes.
const RECENT_MIN: usize = 8;

static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

/// A snapshot in a pack, as a backend of the cache.
pub(in super::super) type PackBackend = BlockingSource<Pack>;

/// A snapshot in a pack.
pub(in super::super) struct Pack {
    index: Index,
    /// The pack itself, and then those that it refers to, in the order of its names.
    sources: Vec<Arc<dyn PackSource>>,
    recent: Mutex<RecentChunks>,
    decompressors: Mutex<Vec<Decompressor<'static>>>,
    number: u64,
}

struct RecentChunks {
    /// The one used last stands last.
    slots: VecDeque<Arc<ChunkSlot>>,
    slots_max: usize,
}

struct ChunkSlot {
    chunk: u64,
    /// Empty until the chunk was read.
    bytes: Mutex<Vec<u8>>,
}

impl fmt::Debug for Pack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pack")
            .field("index", &self.index)
            .field("sources", &self.sources)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RecentChunks {
    fn slot(&mut self, chunk: u64) -> Arc<ChunkSlot> {
        let known = self.slots.iter().position(|slot| slot.chunk == chunk);
        let slot = known.and_then(|at| self.slots.remove(at));
        let slot = slot.unwrap_or_else(|| Arc::new(ChunkSlot { chunk, bytes: Mutex::default() }));
        if self.slots.len() == self.slots_max {
            self.slots.pop_front();
        }
        self.slots.push_back(Arc::clone(&slot));
        slot
    }
}

fn unreadable(part: &str, error: &io::Error) -> String {
    format!("the pack's {part} cannot be read: {error}; check the disk or store that it is on, and try again")
}

/// The header of a pack, checked against its size.
pub(super) fn read_header(source: &dyn PackSource) -> Result<Header, String> {
    let mut bytes = [0; HEADER_BYTES];
    if source.bytes() < HEADER_BYTES as u64 {
        return Err("the pack is cut within its header; copy it again".to_owned());
    }
    source.read_exact(&mut bytes, 0).map_err(|error| unreadable("header", &error))?;
    Header::decode(&bytes, source.bytes())
}

/// Checks the last bytes of a pack whose header is right.
fn check_end(source: &dyn PackSource) -> Result<(), String> {
    let mut end = END_MAGIC;
    let read = source.read_exact(&mut end, source.bytes() - END_BYTES);
    read.map_err(|error| unreadable("last 16 bytes", &error))?;
    if end == END_MAGIC {
        return Ok(());
    }
    Err("the pack's last 16 bytes are damaged; copy the pack again, or pack the snapshot anew".to_owned())
}

fn read_index(source: &dyn PackSource) -> Result<Index, String> {
    let header = read_header(source)?;
    // No more than the file has, and than CHUNKS_MAX allows.
    let mut bytes = vec![0; header.front_bytes() as usize - HEADER_BYTES];
    let read = source.read_exact(&mut bytes, HEADER_BYTES as u64);
    read.map_err(|error| unreadable("index", &error))?;
    Index::decode(header, bytes)
}

/// Opens a pack that another refers to, or says why it cannot.
type PackFinder<'f> = &'f mut dyn FnMut(&PackName) -> Result<Arc<dyn PackSource>, String>;

impl Pack {
    /// The pack in `source`; `find` opens those that it refers to, which are compared with their identities.
    pub(super) fn open(source: Arc<dyn PackSource>, find: PackFinder<'_>) -> Result<Self, String> {
        let index = read_index(&*source)?;
        check_end(&*source)?;
        let (mut sources, mut headers) = (vec![source], Vec::new());
        for name in &index.packs {
            let other = find(name).map_err(|why| format!("it refers to the pack {name}: {why}"))?;
            let header =
                read_header(&*other).map_err(|why| format!("it refers to the pack {name}: {why}"))?;
            if header.identity != name.identity {
                return Err(format!(
                    "it refers to the pack {name}, and the one of that name is another; put the one with the identity \
                     {} there (this one has {})",
                    name.identity, header.identity
                ));
            }
            check_end(&*other).map_err(|why| format!("it refers to the pack {name}: {why}"))?;
            sources.push(other);
            headers.push(header);
        }
        index.check_places(&headers)?;
        let slots_max = (RECENT_BYTES / index.header.chunk_bytes as usize).max(RECENT_MIN);
        Ok(Self {
            index,
            sources,
            recent: Mutex::new(RecentChunks { slots: VecDeque::new(), slots_max }),
            decompressors: Mutex::default(),
            number: LAST_NUMBER.fetch_add(1, Ordering::Relaxed),
        })
    }

    pub(super) fn identity(&self) -> PackIdentity {
        self.index.header.identity
    }
    /// The snapshot's size.
    pub(super) fn bytes(&self) -> u64 {
        self.index.header.bytes
    }
    pub(super) fn file_bytes(&self) -> u64 {
        self.index.header.file_bytes
    }
    pub(super) fn chunk_bytes(&self) -> u32 {
        self.index.header.chunk_bytes
    }
    pub(super) fn chunks(&self) -> u64 {
        self.index.header.chunks()
    }
    pub(super) fn chunk_len(&self, chunk: u64) -> usize {
        self.index.header.chunk_len(chunk)
    }
    /// `None` if the chunk is zeros.
    pub(super) fn chunk(&self, chunk: u64) -> Option<StoredChunk> {
        self.index.chunk(chunk)
    }
    /// The packs that it refers to.
    pub(super) fn names(&self) -> &[PackName] {
        &self.index.packs
    }
    /// The name of a pack that is not what it was when it was opened.
    pub(super) fn changed(&self) -> Option<String> {
        self.sources.iter().find(|source| source.has_changed()).map(|source| source.name())
    }

    /// Reads a chunk: `into` has its length. Its bytes are right, or there is an error, and they are anything.
    pub(super) fn read_chunk(&self, chunk: u64, into: &mut [u8]) -> io::Result<()> {
        let Some(stored) = self.chunk(chunk) else {
            into.fill(0);
            return Ok(());
        };
        let source = &*self.sources[usize::from(stored.pack)];
        let is_whole = match stored.form {
            ChunkForm::Raw => source.read_exact(into, stored.offset).map(|()| true)?,
            ChunkForm::Zstd => self.decompress(source, &stored, into)?,
        };
        if is_whole && Sha256::digest(&*into)[..] == stored.digest {
            return Ok(());
        }
        let from = chunk * u64::from(self.chunk_bytes());
        let why = format!(
            "bytes {from} to {} of the snapshot are damaged in {}: their checksum differs; copy that pack again",
            from + into.len() as u64,
            source.name()
        );
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    }

    /// Whether the stored bytes are a chunk of this length.
    fn decompress(&self, source: &dyn PackSource, stored: &StoredChunk, into: &mut [u8]) -> io::Result<bool> {
        let mut packed = vec![0; stored.bytes as usize];
        source.read_exact(&mut packed, stored.offset)?;
        let idle = lock(&self.decompressors).pop();
        let mut decompressor = idle.map_or_else(Decompressor::new, Ok)?;
        // It writes to `into` and nowhere else: a frame of more bytes than that is an error.
        let bytes = decompressor.decompress_to_buffer(&packed, into);
        if bytes.is_ok() {
            lock(&self.decompressors).push(decompressor);
        }
        Ok(bytes.is_ok_and(|bytes| bytes == into.len()))
    }

    fn read_part(&self, chunk: u64, inside: Range<usize>, into: &mut [u8]) -> io::Result<()> {
        if self.chunk(chunk).is_none() {
            into.fill(0);
            return Ok(());
        }
        let slot = lock(&self.recent).slot(chunk);
        let mut bytes = lock(&slot.bytes);
        if bytes.is_empty() {
            let mut whole = vec![0; self.chunk_len(chunk)];
            self.read_chunk(chunk, &mut whole)?;
            *bytes = whole;
        }
        into.copy_from_slice(&bytes[inside]);
        Ok(())
    }
}

impl ReadAt for Pack {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let start = position.min(self.bytes());
        let end = start + (buffer.len() as u64).min(self.bytes() - start);
        let mut at = start;
        while at < end {
            let chunk = at / u64::from(self.chunk_bytes());
            let (first, len) = (chunk * u64::from(self.chunk_bytes()), self.chunk_len(chunk));
            let until = end.min(first + len as u64);
            let into = &mut buffer[(at - start) as usize..(until - start) as usize];
            let read = if into.len() == len {
                self.read_chunk(chunk, into)
            } else {
                self.read_part(chunk, (at - first) as usize..(until - first) as usize, into)
            };
            match read {
                Ok(()) => at = until,
                // The next read begins with this chunk, and is the error.
                Err(_) if at > start => break,
                Err(error) => return Err(error),
            }
        }
        Ok((at - start) as usize)
    }

    /// A name of its own: no other file has its pages. A change shows as another time.
    fn attributes(&self) -> io::Result<Attributes> {
        let mut digest = *b"quinion vm pack         ";
        digest[16..].copy_from_slice(&self.number.to_le_bytes());
        let time = if self.changed().is_none() { 1 } else { 2 };
        let version = Version { modified: time, changed: time, settled: true, steps: true };
        Ok(Attributes { identity: Identity::of_digest(digest), version, size: self.bytes() })
    }
}

impl Assembled for PackBackend {
    fn files(&self) -> Option<Vec<FileIdentity>> {
        self.source().sources.iter().map(|source| source.identity()).collect()
    }
    fn changed(&self) -> Option<String> {
        self.source().changed()
    }
    /// The kernel may hold compressed bytes, and these are no pages.
    fn copy_held(&self, _: &mut [u8], _: u64) -> bool {
        false
    }
}

/// Opens made-up bytes as a pack, with their digests corrected, and reads the first chunks: for the fuzzer.
///
/// # Errors
/// They are no pack.
pub fn read_made_up(mut bytes: Vec<u8>) -> Result<(), String> {
    const CHUNKS_MAX: u64 = 8;
    super::format::seal(&mut bytes);
    let pack = Pack::open(Arc::new(bytes), &mut |_| Err("there is none".to_owned()))?;
    for chunk in 0..pack.chunks().min(CHUNKS_MAX) {
        // An error is as good as the chunk.
        let _ = pack.read_chunk(chunk, &mut vec![0; pack.chunk_len(chunk)]);
    }
    Ok(())
}
