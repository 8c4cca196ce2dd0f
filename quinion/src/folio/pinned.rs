//! Pinned: bytes of the cache without a copy, for as long as the caller likes.
//!
//! A pin keeps its folios' bytes: they are not evicted, not reused and not
//! changed while it lives. If the file changes, outside or by a writer of this cache that does not wait for pins,
//! the folios leave the index, new readers read anew, and the pinned bytes stay what they were.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::arena::Arena;
use crate::sys::fork::ForkGuard;
use crate::units::{Frame, PageIndex};

use super::held::{Held, unpin};

/// A pinned range of a file.
pub struct Pinned {
    arena: Arc<Arena>,
    frames: Vec<Frame>,
    extents: Vec<Extent>,
    len: usize,
    /// Pages of folios that were pinned by this value first, and are not counted yet.
    uncounted_pages: u64,
    process: ForkGuard,
    /// Who is told when the pins are gone.
    after: Option<(Arc<dyn Unpinned>, Range<PageIndex>)>,
}

/// What is lent where a memory file has no bytes: it lies with the program's constants, which the system shares. It
/// begins with a page, as the bytes of files do, so that who hands chunks to a device finds them aligned alike.
static ZEROS: Zeros = Zeros([0; 64 << 10]);

#[repr(align(4096))]
struct Zeros([u8; 64 << 10]);

/// Who waits for pins to be given back. Handed down by the paths.
pub(crate) trait Unpinned: Send + Sync + fmt::Debug {
    /// Folios in `pages` were pinned, and this pin of them is gone. Called with no lock held.
    fn unpinned(&self, pages: Range<PageIndex>);
}

/// Consecutive bytes of a pinned range; of the shared zeros as many as there are to be, however few these are.
#[derive(Clone, Copy)]
struct Extent {
    first: *const u8,
    len: usize,
}

impl Extent {
    fn is_zeros(&self) -> bool {
        std::ptr::eq(self.first, ZEROS.0.as_ptr())
    }
    /// Whether bytes from `first` on, of a folio, are more of the same. Those that lie behind the shared zeros are not,
    /// whatever stands there.
    fn is_followed_by(&self, first: *const u8) -> bool {
        !self.is_zeros() && std::ptr::eq(self.first.wrapping_add(self.len), first)
    }
    /// Its bytes, as (address, length): at once, or the shared zeros as often as it takes.
    fn pieces(self) -> impl Iterator<Item = (*const u8, usize)> {
        let most = if self.is_zeros() { ZEROS.0.len() } else { self.len.max(1) };
        (0..self.len).step_by(most).map(move |at| (self.first, most.min(self.len - at)))
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len).finish_non_exhaustive()
    }
}

// SAFETY: the extents are bytes that nobody writes while the pins last; the rest is Send and Sync.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(arena: Arc<Arena>, process: ForkGuard) -> Self {
        let frames = Vec::new();
        Self { arena, frames, extents: Vec::new(), len: 0, uncounted_pages: 0, process, after: None }
    }

    /// How many bytes are pinned; fewer than asked where the file ends.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether nothing is pinned: the range lies past the end of the file.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, in order, in pieces as long as they lie together in memory.
    ///
    /// # Panics
    /// In a forked child, which does not have the cache's memory.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        assert!(!self.process.is_forked(), "pinned bytes belong to the process that pinned them");
        let pieces = self.extents.iter().flat_map(|extent| extent.pieces());
        // SAFETY: every extent is of the zeros, which are constant,
        // or lies in pages that had come and that this value's pins keep: nobody writes them
        // (a fill does not write what has landed again, a writer changes no page that is pinned and those who were
        // in one had left when the pin was given, and a change of the file replaces folios) and they stay mapped as
        // long as the arena lives, which this value shares.
        pieces.map(|(first, len)| unsafe { std::slice::from_raw_parts(first, len) })
    }

    /// Has `after` told when these pins of folios in `pages` are gone.
    pub(crate) fn tell(&mut self, after: Arc<dyn Unpinned>, pages: Range<PageIndex>) {
        self.after = Some((after, pages));
    }

    /// Adds what `held` has of the file from `position` on, and returns how many bytes that are: at most as many as
    /// `left` says once nobody changes them any more. May wait for a writer.
    pub(crate) fn add(&mut self, held: Held<'_>, position: u64, left: impl FnOnce() -> usize) -> usize {
        let inside = (position - held.first().first_byte()) as usize;
        // What comes later may be zeroes behind the file's end, which `left` need not know of.
        let ready = held.ready_bytes(position);
        // SAFETY: `inside` is less than the folio's length.
        let first = unsafe { held.bytes().add(inside) };
        let (frame, order) = held.into_pin();
        self.uncounted_pages += order.map_or(0, |order| u64::from(order.pages()));
        let bytes = ready.min(left());
        if bytes == 0 {
            self.give_back(frame);
            return 0;
        }
        self.frames.push(frame);
        match self.extents.last_mut() {
            Some(last) if last.is_followed_by(first) => last.len += bytes,
            _ => self.extents.push(Extent { first, len: bytes }),
        }
        self.len += bytes;
        bytes
    }

    /// Adds `len` zeros, of shared pages that are nobody's; what that takes does not depend on how many they are.
    pub(crate) fn add_zeros(&mut self, len: usize) {
        match self.extents.last_mut() {
            Some(last) if last.is_zeros() => last.len += len,
            _ => self.extents.push(Extent { first: ZEROS.0.as_ptr(), len }),
        }
        self.len += len;
    }

    /// Undoes a pin of which nothing is lent.
    #[cold]
    fn give_back(&mut self, frame: Frame) {
        self.count_pages();
        let last = unpin(&self.arena, frame);
        self.arena.sub_pinned(last.map_or(0, |order| u64::from(order.pages())));
    }

    /// Counts what was pinned since the last call; how many pages all pins keep now.
    pub(crate) fn count_pages(&mut self) -> u64 {
        self.arena.add_pinned(std::mem::take(&mut self.uncounted_pages))
    }
}

/// Whole folios of a memory file, pinned: memory of this process with an address, which nobody takes away or moves as
/// long as this lives.
///
/// They are the file's: who reads it sees what is in them. A write to the file finds them pinned, and does what its
/// handle says ([`OnPinned`](crate::OnPinned)); if it puts a copy in their place, they are the file's no longer.
pub struct PinnedFolios {
    pinned: Pinned,
    /// Of each folio its first frame, its position in the file and its length, in bytes.
    folios: Vec<(Frame, u64, usize)>,
    /// What was asked for begins at this byte of the file.
    position: u64,
}

/// One of the folios of [`PinnedFolios`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinnedFolio {
    position: u64,
    address: *mut u8,
    len: usize,
}

impl PinnedFolio {
    /// The position of its first byte in the file.
    pub fn position(&self) -> u64 {
        self.position
    }
    /// The address of its first byte, a multiple of its length. It may be read. Who stores there, or has a device store
    /// there, answers for it that nobody has the bytes lent by [`MemFile::pin`](crate::MemFile::pin) at that time, and
    /// that others who read them see them change.
    pub fn address(&self) -> *mut u8 {
        self.address
    }
    /// Its length in bytes: 4 KiB to 2 MiB, a power of two.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Never: it has a page at least.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl fmt::Debug for PinnedFolios {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedFolios").field("folios", &self.folios.len()).finish_non_exhaustive()
    }
}

impl PinnedFolios {
    /// None yet, for who asked for what begins at byte `position`.
    pub(crate) fn new(pinned: Pinned, position: u64) -> Self {
        Self { pinned, folios: Vec::new(), position }
    }
    /// Pins a held folio, that follows the last.
    pub(crate) fn add(&mut self, held: Held<'_>) {
        let (frame, position, len) = (held.frame(), held.first().first_byte(), held.order().bytes());
        self.pinned.add(held, position, || len);
        self.folios.push((frame, position, len));
    }
    /// As [`Pinned::count_pages`].
    pub(crate) fn count_pages(&mut self) -> u64 {
        self.pinned.count_pages()
    }

    /// How many folios there are.
    pub fn len(&self) -> usize {
        self.folios.len()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.folios.is_empty()
    }
    /// How far into the first folio the first byte that was asked for lies, in bytes.
    pub fn offset(&self) -> usize {
        self.folios.first().map_or(0, |(_, first, _)| (self.position - first) as usize)
    }
    /// The folios, each behind the one before in the file.
    ///
    /// # Panics
    /// In a forked child, which does not have the cache's memory.
    pub fn folios(&self) -> impl Iterator<Item = PinnedFolio> {
        assert!(!self.pinned.process.is_forked(), "pinned folios belong to the process that pinned them");
        self.folios.iter().map(|&(frame, position, len)| {
            let address = self.pinned.arena.view().bytes(frame).expect("a pinned folio has frames");
            PinnedFolio { position, address, len }
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return;
        }
        self.count_pages();
        let last = self.frames.iter().filter_map(|&frame| unpin(&self.arena, frame));
        let pages = last.map(|order| u64::from(order.pages())).sum();
        self.arena.sub_pinned(pages);
        if let Some((after, pages)) = self.after.take() {
            after.unpinned(pages);
        }
    }
}
