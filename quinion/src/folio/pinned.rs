//! Pinned: bytes of the cache without a copy, for as long as the caller likes.
//!
//! A pin keeps its folios' bytes: they are not evicted, not reused and not changed while it lives. If the file changes,
//! outside or by a writer of this cache that does not wait for pins, the folios leave the index, new readers read anew,
//! and the pinned bytes do not change.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use crate::arena::Arena;
use crate::sys::adjacent::AdjacentMapping;
use crate::sys::fork::ForkGuard;
use crate::units::{Frame, PageIndex};

use super::held::{HeldFolio, unpin};

/// A pinned range of a file. Cloning it is cheap: the clones share the pins, which end with the last of them.
#[derive(Clone)]
pub struct Pinned(Arc<Pins>);

struct Pins {
    arena: Arc<Arena>,
    /// One folio, most often: it takes no memory beside this.
    frames: SmallVec<[Frame; 1]>,
    extents: SmallVec<[PinnedExtent; 1]>,
    len: usize,
    /// Pages of folios that were pinned by this value first, and are not counted yet.
    uncounted_pages: u64,
    process: ForkGuard,
    after: Option<(Arc<dyn UnpinObserver>, Range<PageIndex>)>,
    /// The bytes mapped a second time, in one piece; `None`: they cannot be. Ends before the pins do.
    mapped: OnceLock<Option<AdjacentMapping>>,
    /// The bytes copied, if they were asked for in one piece and cannot be mapped so.
    copied: OnceLock<Box<[u8]>>,
}

/// The memory that a pin keeps: whole folios. Those of which it has only a part are named, since other pins may have
/// other parts. Those that it has whole are not: to name each costs more than to count it for each such pin.
#[derive(Clone, Debug, Default)]
pub struct KeptMemory {
    /// Bytes of folios that are pinned whole.
    whole_bytes: u64,
    /// The first and the last folio, with their bytes, as far as these are pinned in part.
    partial: [Option<(Frame, u64)>; 2],
}

impl KeptMemory {
    /// Memory of `bytes` bytes, counted as folios that are pinned whole.
    pub fn of_bytes(bytes: u64) -> Self {
        Self { whole_bytes: bytes, partial: [None; 2] }
    }

    /// The bytes that several keep, or more. A folio that they have in part is counted once, and once more for each
    /// that has it whole.
    pub fn sum_bytes<'a>(all: impl Iterator<Item = &'a Self>) -> u64 {
        let (mut sum, mut partial) = (0, Vec::new());
        for kept in all {
            sum += kept.whole_bytes;
            partial.extend(kept.partial.iter().flatten());
        }
        partial.sort_unstable();
        partial.dedup();
        sum + partial.iter().map(|&(_, bytes)| bytes).sum::<u64>()
    }
}

/// A constant that is lent where a memory file has no bytes. It begins with a page, as the bytes of files do, so that
/// a device finds chunks aligned alike.
static ZEROS: Zeros = Zeros([0; 64 << 10]);

#[repr(align(4096))]
struct Zeros([u8; 64 << 10]);

/// Waits for pins to be given back. Handed down by the paths.
pub(crate) trait UnpinObserver: Send + Sync + fmt::Debug {
    /// Folios in `pages` were pinned, and this pin of them is gone. Called with no lock held.
    fn unpinned(&self, pages: Range<PageIndex>);
}

/// Consecutive bytes of a pinned range; of the shared zeros as many as there are to be, however few these are.
#[derive(Clone, Copy, Debug)]
struct PinnedExtent {
    first: *const u8,
    len: usize,
}

impl PinnedExtent {
    fn is_zeros(&self) -> bool {
        std::ptr::eq(self.first, ZEROS.0.as_ptr())
    }
    /// Whether bytes from `first` on, of a folio, are more of the same. Those behind the shared zeros are not.
    fn is_followed_by(&self, first: *const u8) -> bool {
        !self.is_zeros() && std::ptr::eq(self.first.wrapping_add(self.len), first)
    }
    /// Takes the next bytes off: all of them, or of the shared zeros as many as there are.
    fn take_piece(&mut self) -> (*const u8, usize) {
        let len = if self.is_zeros() { self.len.min(ZEROS.0.len()) } else { self.len };
        self.len -= len;
        (self.first, len)
    }
}

/// The bytes of a [`Pinned`], in order, in pieces as long as they lie together in memory; see [`Pinned::chunks`].
#[derive(Clone, Debug)]
pub struct Chunks<'a> {
    extents: std::slice::Iter<'a, PinnedExtent>,
    left: PinnedExtent,
}

impl<'a> Iterator for Chunks<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        while self.left.len == 0 {
            self.left = *self.extents.next()?;
        }
        let (first, len) = self.left.take_piece();
        // SAFETY: every extent is of the zeros, which are constant, or lies in pages that were read and that the pins
        // keep. They are not written: a fill does not write a page again; a writer changes no page that is pinned, and
        // writers that were in one had left when the pin was given; and a change of the file replaces folios. They stay
        // mapped as long as the arena lives, which the `Pinned` shares that is borrowed for `'a`.
        Some(unsafe { std::slice::from_raw_parts(first, len) })
    }
}

// SAFETY: as of `Pins`, from which it is borrowed.
unsafe impl Send for Chunks<'_> {}
// SAFETY: as above.
unsafe impl Sync for Chunks<'_> {}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len()).finish_non_exhaustive()
    }
}

// SAFETY: no thread writes the extents' bytes while the pins last; the rest is Send and Sync.
unsafe impl Send for Pins {}
// SAFETY: as above.
unsafe impl Sync for Pins {}

impl Pinned {
    pub(crate) fn new(arena: Arc<Arena>, process: ForkGuard) -> Self {
        let frames = SmallVec::new();
        let (extents, mapped, copied) = (SmallVec::new(), OnceLock::new(), OnceLock::new());
        let (len, uncounted_pages, after) = (0, 0, None);
        let pins = Pins { arena, frames, extents, len, uncounted_pages, process, after, mapped, copied };
        Self(Arc::new(pins))
    }

    /// How many bytes are pinned; fewer than asked where the file ends.
    pub fn len(&self) -> usize {
        self.0.len
    }
    /// Whether nothing is pinned: the range lies past the end of the file.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The bytes, in order, in pieces as long as they lie together in memory.
    ///
    /// # Panics
    /// In a forked child, which does not have the cache's memory.
    pub fn chunks(&self) -> Chunks<'_> {
        assert!(!self.0.process.is_forked(), "pinned bytes belong to the process that pinned them");
        Chunks { extents: self.0.extents.iter(), left: PinnedExtent { first: ZEROS.0.as_ptr(), len: 0 } }
    }

    /// All bytes in one slice, if they lie together in memory: those of one folio always do, and those of a range that
    /// readahead brought often. `None` otherwise; then there are [`Pinned::chunks`] and [`Pinned::mapped`].
    ///
    /// # Panics
    /// As [`Pinned::chunks`].
    pub fn as_slice(&self) -> Option<&[u8]> {
        let mut chunks = self.chunks();
        let first = chunks.next().unwrap_or(&[]);
        chunks.next().is_none().then_some(first)
    }

    /// All bytes in one slice without a copy, as a mapping of the file would have them. Where they do not lie together
    /// in memory they are mapped a second time at the first call, side by side: 2 to 4 microseconds for each piece.
    /// `None`: the pieces have fewer than 64 KiB on average, or one is a hole of a memory file; then there are
    /// [`Pinned::chunks`], and `AsRef<[u8]>`, which copies.
    ///
    /// # Panics
    /// As [`Pinned::chunks`].
    pub fn mapped(&self) -> Option<&[u8]> {
        self.as_slice().or_else(|| {
            // A hole is many pieces of one constant, which are not worth being listed.
            let has_hole = || self.0.extents.iter().any(PinnedExtent::is_zeros);
            let map = || {
                if has_hole() {
                    return None;
                }
                // SAFETY: chunks lie in the arena, which is shared memory in one file. It is not written while the pins
                // last, which end after the mapping.
                unsafe { AdjacentMapping::of(self.chunks()) }
            };
            self.0.mapped.get_or_init(map).as_ref()?.bytes()
        })
    }

    /// The bytes in a vector of their own.
    ///
    /// # Panics
    /// As [`Pinned::chunks`].
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.0.len);
        self.chunks().for_each(|chunk| bytes.extend_from_slice(chunk));
        bytes
    }

    /// The memory that it keeps. Looks at the descriptor of each folio.
    pub(crate) fn kept_memory(&self) -> KeptMemory {
        let Pins { arena, frames, extents, len, .. } = &*self.0;
        let mut frames = frames.to_vec();
        frames.dedup(); // a folio whose pages came one after the other was added more than once
        let (Some(&first), Some(&last)) = (frames.first(), frames.last()) else {
            return KeptMemory::default();
        };
        let bytes_of = |frame: Frame| arena.view().own(frame).word().order().bytes() as u64;
        let all: u64 = frames.iter().map(|&frame| bytes_of(frame)).sum();
        if extents.iter().any(PinnedExtent::is_zeros) {
            return KeptMemory::of_bytes(all); // of a memory file with holes
        }
        let before = extents[0].first.addr() - arena.view().bytes(first).map_or(0, |bytes| bytes.addr());
        let behind = all - before as u64 - *len as u64;
        let of_last = Some((last, bytes_of(last))).filter(|_| behind > 0);
        let of_first = Some((first, bytes_of(first)));
        let of_first = of_first.filter(|_| before > 0 && (first != last || of_last.is_none()));
        let partial = [of_first, of_last];
        KeptMemory {
            whole_bytes: all - partial.iter().flatten().map(|(_, bytes)| bytes).sum::<u64>(),
            partial,
        }
    }

    fn pins(&mut self) -> &mut Pins {
        Arc::get_mut(&mut self.0).expect("pins that are being gathered are not shared")
    }

    pub(crate) fn notify_on_drop(&mut self, after: Arc<dyn UnpinObserver>, pages: Range<PageIndex>) {
        self.pins().after = Some((after, pages));
    }

    /// Adds the bytes of `held` from the file's byte `position` on, and returns how many: at most as many as
    /// `left` returns once no thread changes them any more. May wait for a writer.
    pub(crate) fn add(&mut self, held: HeldFolio<'_>, position: u64, left: impl FnOnce() -> usize) -> usize {
        let inside = (position - held.first().first_byte()) as usize;
        // Pages that become ready later may be zeros behind the file's end, which `left` need not know of.
        let ready = held.ready_bytes(position);
        // SAFETY: `inside` is less than the folio's length.
        let first = unsafe { held.bytes().add(inside) };
        let (frame, order) = held.into_pin();
        let pins = self.pins();
        pins.uncounted_pages += order.map_or(0, |order| u64::from(order.pages()));
        let bytes = ready.min(left());
        if bytes == 0 {
            pins.give_back(frame);
            return 0;
        }
        pins.frames.push(frame);
        match pins.extents.last_mut() {
            Some(last) if last.is_followed_by(first) => last.len += bytes,
            _ => pins.extents.push(PinnedExtent { first, len: bytes }),
        }
        pins.len += bytes;
        bytes
    }

    /// Adds `len` zeros, of shared pages of no file; the cost does not depend on how many they are.
    pub(crate) fn add_zeros(&mut self, len: usize) {
        let pins = self.pins();
        match pins.extents.last_mut() {
            Some(last) if last.is_zeros() => last.len += len,
            _ => pins.extents.push(PinnedExtent { first: ZEROS.0.as_ptr(), len }),
        }
        pins.len += len;
    }

    /// Counts the pages pinned since the last call; how many pages all pins keep now.
    pub(crate) fn count_pages(&mut self) -> u64 {
        self.pins().count_pages()
    }

    pub(crate) fn frames(&self) -> &[Frame] {
        &self.0.frames
    }
}

impl Pins {
    #[cold]
    fn give_back(&mut self, frame: Frame) {
        self.count_pages();
        let last = unpin(&self.arena, frame);
        self.arena.sub_pinned(last.map_or(0, |order| u64::from(order.pages())));
    }

    fn count_pages(&mut self) -> u64 {
        self.arena.add_pinned(std::mem::take(&mut self.uncounted_pages))
    }
}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        self.mapped().unwrap_or_else(|| self.0.copied.get_or_init(|| self.to_vec().into_boxed_slice()))
    }
}

impl<'a> IntoIterator for &'a Pinned {
    type Item = &'a [u8];
    type IntoIter = Chunks<'a>;

    fn into_iter(self) -> Chunks<'a> {
        self.chunks()
    }
}

/// Where a pinned folio is.
struct FolioPlace {
    /// The folio's first frame.
    frame: Frame,
    /// The position of its first byte in the file.
    position: u64,
    /// Length of the folio in bytes.
    len: usize,
}

/// Whole folios of a memory file, pinned: memory of this process that is neither freed nor moved as long as this lives.
///
/// They are the file's: its readers see their contents. A write to the file finds them pinned, and acts by its
/// handle's option ([`OnPinned`](crate::OnPinned)); if it puts a copy in their place, they are the file's no longer.
pub struct PinnedFolios {
    pinned: Pinned,
    folios: Vec<FolioPlace>,
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
    /// The address of its first byte, a multiple of its length. It may be read. A caller that stores there, or has a
    /// device store there, guarantees that no [`Pinned`] of [`MemFile::pin`](crate::MemFile::pin) has the bytes at
    /// that time, and accepts that other readers see them change.
    pub fn address(&self) -> *mut u8 {
        self.address
    }
    /// Length of the folio in bytes: 4 KiB to 2 MiB, a power of two.
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
    pub(crate) fn new(pinned: Pinned, position: u64) -> Self {
        Self { pinned, folios: Vec::new(), position }
    }
    pub(crate) fn add(&mut self, held: HeldFolio<'_>) {
        let (frame, position, len) = (held.frame(), held.first().first_byte(), held.order().bytes());
        self.pinned.add(held, position, || len);
        self.folios.push(FolioPlace { frame, position, len });
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
        self.folios.first().map_or(0, |first| (self.position - first.position) as usize)
    }
    /// The folios, each behind the one before in the file.
    ///
    /// # Panics
    /// In a forked child, which does not have the cache's memory.
    pub fn folios(&self) -> impl Iterator<Item = PinnedFolio> {
        assert!(!self.pinned.0.process.is_forked(), "pinned folios belong to the process that pinned them");
        self.folios.iter().map(|&FolioPlace { frame, position, len }| {
            let address = self.pinned.0.arena.view().bytes(frame).expect("a pinned folio has frames");
            PinnedFolio { position, address, len }
        })
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return;
        }
        drop(self.mapped.take());
        self.count_pages();
        let last = self.frames.iter().filter_map(|&frame| unpin(&self.arena, frame));
        let pages = last.map(|order| u64::from(order.pages())).sum();
        self.arena.sub_pinned(pages);
        if let Some((after, pages)) = self.after.take() {
            after.unpinned(pages);
        }
    }
}
