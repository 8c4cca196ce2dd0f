//! Pin: bytes of an object without a copy.
//!
//! ```text
//!   Pin(handle, range) --> the server holds the folios --> the client finds them by the index, and lends slices
//!   dropped            --> Unpin                           the process ends: the server gives all back
//! ```
//!
//! The slices point into memory that the server writes, but are constant: the server has pinned the folios for this
//! process, and an open object never changes. The server takes a pin back when this value says so or the process has
//! ended, and leaves the memory in place if it ends first (`quinion_owner::internals::serve`, `pins.rs`).
//!
//! Invariants:
//!  1. A slice is lent only of pages that were found while the pin stood, and only as long as it stands.
//!  2. In a forked child nothing is lent: the memory is not there.
#![allow(unsafe_code, reason = "pages that the server has pinned become slices")]

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use quinion::internals::arena::control::Operation;
use quinion::internals::sys::adjacent::AdjacentMapping;
use quinion_owner::internals::viewer::{ViewedFile, Viewer};

use crate::open_file::OpenFile;

const LOCATE_TRIES_MAX: u32 = 100;

/// Bytes of a file, of an object without a copy: see [`ClientFile::pin`](crate::ClientFile::pin). Cheap to clone.
#[derive(Clone)]
pub struct PinnedBytes(Arc<Pin>);

struct Pin {
    file: Arc<OpenFile>,
    data: PinnedData,
    /// The bytes mapped a second time, in one piece, if that was asked for; `None`: they cannot be. Ends before the
    /// pin.
    mapped: OnceLock<Option<AdjacentMapping>>,
}

enum PinnedData {
    Copied(Box<[u8]>),
    Pinned { name: [u64; 3], pieces: Vec<Piece> },
}

#[derive(Clone, Copy)]
struct Piece {
    first: *const u8,
    len: usize,
}

// SAFETY: no thread writes the pieces' bytes while the pin stands; the rest is Send and Sync.
unsafe impl Send for Pin {}
// SAFETY: as above.
unsafe impl Sync for Pin {}

impl Drop for Pin {
    fn drop(&mut self) {
        drop(self.mapped.take());
        if let PinnedData::Pinned { name, .. } = self.data {
            self.file.connection.give_back(Operation::Unpin, name);
        }
    }
}

impl fmt::Debug for PinnedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBytes").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// One chunk, for as long as it is needed.
struct PinnedPiece {
    pin: PinnedBytes,
    place: usize,
}

impl AsRef<[u8]> for PinnedPiece {
    fn as_ref(&self) -> &[u8] {
        self.pin.chunks().nth(self.place).unwrap_or_default()
    }
}

impl PinnedBytes {
    /// `name` is what the range is given back by.
    pub(crate) fn new(file: &Arc<OpenFile>, name: [u64; 3]) -> Self {
        let data = PinnedData::Pinned { name, pieces: Vec::new() };
        Self(Arc::new(Pin { file: Arc::clone(file), data, mapped: OnceLock::new() }))
    }

    pub(crate) fn copied(file: &Arc<OpenFile>, bytes: Vec<u8>) -> Self {
        let (data, mapped) = (PinnedData::Copied(bytes.into()), OnceLock::new());
        Self(Arc::new(Pin { file: Arc::clone(file), data, mapped }))
    }

    /// With the places of its bytes; `None` if not all of them are found.
    pub(crate) fn locate(
        mut self,
        viewer: &Viewer,
        viewed: &ViewedFile<'_>,
        range: Range<u64>,
    ) -> Option<Self> {
        let pin = Arc::get_mut(&mut self.0).expect("it was made just now");
        let PinnedData::Pinned { pieces, .. } = &mut pin.data else { return None };
        // A look beside a change of the index finds nothing, and the next one does.
        for _ in 0..LOCATE_TRIES_MAX {
            pieces.clear();
            let found = viewer.locate(viewed, range.clone(), |first, len| match pieces.last_mut() {
                Some(last) if std::ptr::eq(last.first.wrapping_add(last.len), first) => last.len += len,
                _ => pieces.push(Piece { first, len }),
            });
            if found as u64 == range.end - range.start {
                return Some(self);
            }
            std::thread::yield_now();
        }
        None
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        match &self.0.data {
            PinnedData::Copied(bytes) => bytes.len(),
            PinnedData::Pinned { pieces, .. } => pieces.iter().map(|piece| piece.len).sum(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the bytes were copied: they are of a local file.
    pub fn is_copied(&self) -> bool {
        matches!(self.0.data, PinnedData::Copied(_))
    }

    /// The bytes in order, in pieces as they lie in memory. None in a forked child, which does not have that memory.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        let (copied, pieces) = match &self.0.data {
            PinnedData::Copied(bytes) => (Some(&bytes[..]), &[][..]),
            PinnedData::Pinned { pieces, .. } if self.0.file.connection.viewer().is_ok() => {
                (None, &pieces[..])
            }
            PinnedData::Pinned { .. } => (None, &[][..]),
        };
        let pinned = pieces.iter().map(|piece| {
            // SAFETY: the pages were found under the pin, which stands as long as `self` is borrowed; no thread writes
            // them: see the head of this file. They stay mapped until the process ends.
            unsafe { std::slice::from_raw_parts(piece.first, piece.len) }
        });
        copied.into_iter().chain(pinned)
    }

    /// The chunks, each with a share of the pin.
    pub(crate) fn pieces(&self) -> Vec<Bytes> {
        let places = 0..self.chunks().count();
        places.map(|place| Bytes::from_owner(PinnedPiece { pin: self.clone(), place })).collect()
    }

    /// The bytes as one slice, if they lie so.
    pub fn as_slice(&self) -> Option<&[u8]> {
        let mut chunks = self.chunks();
        let first = chunks.next();
        let is_one = chunks.next().is_none();
        first.filter(|_| is_one).or(if self.is_empty() { Some(&[]) } else { None })
    }

    /// The bytes as one slice without a copy: pieces apart are mapped a second time, side by side, at the first call,
    /// which takes 2 to 4 microseconds for each. `None`: the pieces have fewer than 64 KiB on average, or this is a
    /// forked child, which does not have that memory.
    pub fn mapped(&self) -> Option<&[u8]> {
        self.as_slice().or_else(|| {
            // SAFETY: the pieces are of memory that the server shares and that stays mapped. It does not write them as
            // long as the pin stands, which ends after the mapping.
            let mapped = self.0.mapped.get_or_init(|| unsafe { AdjacentMapping::of(self.chunks()) });
            mapped.as_ref()?.bytes()
        })
    }

    /// A copy of them.
    pub fn to_vec(&self) -> Vec<u8> {
        self.chunks().flatten().copied().collect()
    }
}
