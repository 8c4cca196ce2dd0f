//! View: numbers into references, each checked first.
//!
//! A view is a reader's access to an arena, in the owner and in other processes: an address and a [`Layout`].
//!
//! Index nodes and mapping records share **cells**. A page of a node extent is
//!
//! ```text
//!   0            768      1024                                      4096
//!   | 12 heads,  | spare |  12 cells of 256 B: 64 slots of 4 B each,  |
//!   | 64 B each  |       |  or one mapping record                     |
//! ```
//!
//! so that cell number `16 * frame + k`, k in 4..16, times 256 *is* the cell's offset, and no cell starts at the
//! beginning of a page: there, page-aligned destinations of small copies would alias the hottest slots of the tree.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::Descriptor;
use super::dirty::{self, BitTable};
use super::layout::{Header, Layout, LayoutError, OWNER_ENDED};
use super::pages_read;
use crate::units::{Frame, PAGE_SIZE};

/// Cells in a page of a node extent.
pub const CELLS_PER_PAGE: u32 = 12;
const CELL_BYTES: usize = 256;
const FIRST_CELL: u32 = 4;

/// The number of a cell; below 2^30, as a slot of the index has room for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CellNumber(pub u32);

impl CellNumber {
    /// The `k`th cell (0 to 11) of the page in `frame`. Frames beyond 2^26 (256 GiB) hold no cells.
    #[inline]
    pub fn of(frame: Frame, k: u32) -> Option<Self> {
        debug_assert!(k < CELLS_PER_PAGE);
        (frame.0 < 1 << 26).then_some(Self(frame.0 * 16 + FIRST_CELL + k))
    }
    /// The `k`th (0 to 3) number that is no cell's: nothing is found there.
    #[inline]
    pub const fn nowhere(k: u32) -> Self {
        assert!(k < FIRST_CELL);
        Self(k)
    }
    /// The frame whose page this cell lies in.
    #[inline]
    pub fn frame(self) -> Frame {
        Frame(self.0 / 16)
    }
    /// Which cell of its page this is, 0 to 11.
    #[inline]
    pub fn place(self) -> u32 {
        self.0 % 16 - FIRST_CELL
    }
}

/// The writers' state of a node, in words of their own; readers never look here.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct NodeHead {
    /// The tree says what they mean.
    pub words: [AtomicU64; 8],
}

const _: () = assert!(size_of::<NodeHead>() == 64);

impl NodeHead {
    /// Makes it the head of an empty node that is nowhere: all zeros.
    #[inline]
    pub fn clear(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// A mapping as its readers see it: one cell.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Record {
    /// The root of the tree: the entry in the low half, the number of levels above it.
    pub root: AtomicU64,
    /// The file's size in bytes, as the owner last knew it.
    pub size: AtomicU64,
    /// The mapping's number; 0 while the cell is no live mapping.
    pub id: AtomicU32,
    /// How far viewers may trust the file's cached pages, now: a [`Validation`].
    pub validation: AtomicU32,
    /// The file's device.
    pub device: AtomicU64,
    /// The file's inode.
    pub inode: AtomicU64,
    /// Unused.
    pub rest: [AtomicU64; 27],
}

const _: () = assert!(size_of::<Record>() == CELL_BYTES);

/// The check that a viewer makes before it uses cached pages of a file. A viewer looks at it before each read; the
/// owner brings the cached pages up to date before it makes this stronger.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Validation {
    /// The kernel reads: nothing guarantees that the file stays as it is. A record begins so.
    Kernel = 0,
    /// No check: the owner has a lease, and no process changes the file while it stands.
    Leased = 1,
    /// The file's times are looked at before each read: another process may write it without notice.
    CheckTimes = 2,
    /// No check: the file never changes, lease or no lease.
    Immutable = 3,
    /// The kernel reads this time, because the owner's heartbeat is late. A viewer concludes it for a file that says
    /// [`Validation::Leased`]; no record says so.
    OwnerLate = 4,
}

impl Validation {
    #[inline]
    const fn of(word: u32) -> Self {
        match word {
            1 => Self::Leased,
            2 => Self::CheckTimes,
            3 => Self::Immutable,
            _ => Self::Kernel,
        }
    }
}

impl Record {
    /// How far the file's cached pages may be trusted.
    #[inline]
    pub fn validation(&self) -> Validation {
        // SeqCst, partner: `set_validation`. A read that starts after a writer was let go on sees that store, by the
        // two's system calls.
        Validation::of(self.validation.load(Ordering::SeqCst))
    }
    /// Sets how far the file's cached pages may be trusted.
    #[inline]
    pub fn set_validation(&self, validation: Validation) {
        self.validation.store(validation as u32, Ordering::SeqCst); // partner: `validation`
    }
}

/// A mapped arena and where its parts lie.
#[derive(Debug)]
pub struct View {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: all that a view hands out are shared references to atomics and raw addresses of page bytes.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// A view of an arena that this process built.
    ///
    /// # Safety
    /// `base` is the start of a mapping of at least `layout.bytes_max()` bytes, aligned to a page, that
    /// stays mapped as long as the view or anything it handed out is used.
    #[inline]
    pub unsafe fn new(base: NonNull<u8>, layout: Layout) -> Self {
        Self { base, layout }
    }

    /// A second view of the same arena.
    ///
    /// # Safety
    /// As for [`View::new`]: the arena stays mapped as long as the copy is used.
    #[inline]
    pub unsafe fn duplicate(&self) -> Self {
        Self { base: self.base, layout: self.layout }
    }

    /// A view of an arena that another process built, after checking its header.
    ///
    /// # Safety
    /// As for [`View::new`], with `mapped` bytes (at least a page).
    #[inline]
    pub unsafe fn attach(base: NonNull<u8>, mapped: u64) -> Result<Self, LayoutError> {
        // SAFETY: the first page is mapped and aligned, and a header is atomics only.
        let header = unsafe { base.cast::<Header>().as_ref() };
        Ok(Self { base, layout: header.read(mapped)? })
    }

    /// Where the parts lie.
    #[inline]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    /// The arena's first page.
    #[inline]
    pub fn header(&self) -> &Header {
        // SAFETY: the first page is mapped; see `new`.
        unsafe { self.base.cast::<Header>().as_ref() }
    }
    /// Frames that may be looked at now.
    #[inline]
    pub fn frames_grown(&self) -> u32 {
        // Acquire, partner: the Release in `publish_frames`: a thread that sees a frame sees its descriptor odd, or a
        // later one. A frame whose extent is not yet seen as grown is refused, a mere miss. The lesser of the two keeps
        // a bad header from harm.
        self.header().frames_grown.load(Ordering::Acquire).min(self.layout.frames_max)
    }

    /// Whether the owner has stopped answering viewers, or was killed. Known before any process can write a file that
    /// the owner had a lease on.
    #[inline]
    pub fn owner_has_ended(&self) -> bool {
        // SeqCst, partner: the store of `DeathNotice`, or the kernel's, which comes before the leases go.
        self.header().owner_lives.load(Ordering::SeqCst) & OWNER_ENDED != 0
    }

    /// There are so many frames from now on. For the owner.
    ///
    /// # Safety
    /// The caller is the owner, mapped the arena for writes, and has given memory to the frames and to their entries.
    #[inline]
    pub unsafe fn publish_frames(&self, frames: u32) {
        // Release, partner: the Acquire in `frames_grown`.
        self.header().frames_grown.store(frames, Ordering::Release);
    }

    /// The view as if there were so many frames: for the owner, which is about to publish them.
    ///
    /// # Safety
    /// The entries of so many frames have memory, and the frames themselves before their bytes are touched.
    #[inline]
    pub unsafe fn grown_to(&self, frames: u32) -> GrownView<'_> {
        GrownView { view: self, frames: frames.min(self.layout.frames_max) }
    }

    /// The frames that exist now, looked up once for several of the questions below.
    #[inline]
    pub fn grown(&self) -> GrownView<'_> {
        GrownView { view: self, frames: self.frames_grown() }
    }
    /// See [`GrownView::descriptor`].
    #[inline]
    pub fn descriptor(&self, frame: Frame) -> Option<&Descriptor> {
        self.grown().descriptor(frame)
    }
    /// The descriptor of a frame this process's arena handed out.
    ///
    /// # Panics
    /// If the frame does not exist.
    #[inline]
    pub fn own(&self, frame: Frame) -> &Descriptor {
        self.descriptor(frame).expect("a frame of our own arena exists")
    }
    /// See [`GrownView::referenced`].
    #[inline]
    pub fn referenced(&self, frame: Frame) -> Option<&AtomicU8> {
        self.grown().referenced(frame)
    }
    /// Says that `pages` pages in the frames from `frame` on, which the caller fills, have come; see `pages_read.rs`.
    ///
    /// # Panics
    /// If the frames do not exist.
    #[inline]
    pub fn set_pages_read(&self, frame: Frame, pages: u32) {
        pages_read::words(frame, pages)
            .for_each(|(first, mask)| pages_read::set(self.pages_read_word(first), mask));
    }
    /// Undoes [`View::set_pages_read`] for `pages` frames from `frame` on, which are the caller's alone.
    #[inline]
    pub fn clear_pages_read(&self, frame: Frame, pages: u32) {
        pages_read::words(frame, pages)
            .for_each(|(first, mask)| pages_read::clear(self.pages_read_word(first), mask));
    }
    /// See [`GrownView::run_read`].
    #[inline]
    pub fn run_read(&self, frame: Frame, pages: u32) -> u32 {
        self.grown().run_read(frame, pages)
    }
    /// The number of `pages` pages from `frame` on that have arrived; for their fill.
    #[inline]
    pub fn count_pages_read(&self, frame: Frame, pages: u32) -> u32 {
        let in_word =
            |(first, mask): (Frame, u64)| (pages_read::load(self.pages_read_word(first)) & mask).count_ones();
        pages_read::words(frame, pages).map(in_word).sum()
    }
    /// Whether the page in `frame` has arrived; as [`View::run_read`].
    #[inline]
    pub fn is_page_read(&self, frame: Frame) -> bool {
        self.run_read(frame, 1) == 1
    }
    #[inline]
    fn pages_read_word(&self, first: Frame) -> &AtomicU64 {
        self.grown().pages_read_word(first).expect("a frame of our own arena exists")
    }
    /// Sets the bits of `pages` pages from `frame` on; how many were clear. See `dirty.rs`. The caller has the tree
    /// lock of their folio's mapping, as for the three below.
    ///
    /// # Panics
    /// If the frames do not exist; so do those below.
    #[inline]
    pub fn set_bits(&self, bits: BitTable, frame: Frame, pages: u32) -> u32 {
        let set = |(first, mask)| dirty::set(self.bits_word(bits, first), mask).count_ones();
        pages_read::words(frame, pages).map(set).sum()
    }
    /// Clears the bits of these pages; how many were set. As [`View::set_bits`].
    #[inline]
    pub fn clear_bits(&self, bits: BitTable, frame: Frame, pages: u32) -> u32 {
        let clear = |(first, mask)| dirty::clear(self.bits_word(bits, first), mask).count_ones();
        pages_read::words(frame, pages).map(clear).sum()
    }
    /// How many bits of these pages are set. As [`View::set_bits`]; a hint without the lock.
    #[inline]
    pub fn count_bits(&self, bits: BitTable, frame: Frame, pages: u32) -> u32 {
        let count =
            |(first, mask): (Frame, u64)| (dirty::load(self.bits_word(bits, first)) & mask).count_ones();
        pages_read::words(frame, pages).map(count).sum()
    }
    /// The bits of the frames that share a word with `frame`, in the order of their numbers. As [`View::count_bits`].
    #[inline]
    pub fn bits_around(&self, bits: BitTable, frame: Frame) -> u64 {
        dirty::load(self.bits_word(bits, Frame(frame.0 & !(pages_read::FRAMES_PER_WORD - 1))))
    }
    /// Whether the bit of the page in `frame` is set; as [`View::count_bits`].
    #[inline]
    pub fn has_bit(&self, bits: BitTable, frame: Frame) -> bool {
        self.bits_around(bits, frame) >> (frame.0 % pages_read::FRAMES_PER_WORD) & 1 != 0
    }
    #[inline]
    fn bits_word(&self, bits: BitTable, first: Frame) -> &AtomicU64 {
        self.grown().bits_word(bits, first).expect("a frame of our own arena exists")
    }
    /// See [`GrownView::write_sequence`].
    ///
    /// # Panics
    /// If the frame does not exist.
    #[inline]
    pub fn own_write_sequence(&self, frame: Frame) -> &AtomicU32 {
        self.grown().write_sequence(frame).expect("a frame of our own arena exists")
    }
    /// See [`GrownView::slots`].
    #[inline]
    pub fn slots(&self, cell: CellNumber) -> Option<&[AtomicU32; 64]> {
        self.grown().slots(cell)
    }
    /// See [`GrownView::head`].
    #[inline]
    pub fn head(&self, cell: CellNumber) -> Option<&NodeHead> {
        self.grown().head(cell)
    }
    /// See [`GrownView::record`].
    #[inline]
    pub fn record(&self, cell: CellNumber) -> Option<&Record> {
        self.grown().record(cell)
    }
    /// See [`GrownView::bytes`].
    #[inline]
    pub fn bytes(&self, frame: Frame) -> Option<*mut u8> {
        self.grown().bytes(frame)
    }

    #[inline]
    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.layout.frames_max as usize * PAGE_SIZE);
        // SAFETY: the offset lies inside the mapping: callers checked a frame number, tables lie below.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

/// A [`View`] and how many of its frames may be looked at: numbers into references.
///
/// Frames only ever come to be. Those of a punched extent have odd descriptors and no memory until they are grown
/// again: a late reader finds zeros (`shrink.rs`).
#[derive(Clone, Copy, Debug)]
pub struct GrownView<'a> {
    view: &'a View,
    frames: u32,
}

/// Asks for the line at an address; what lies there, if anything, is neither read nor waited for.
#[inline(always)]
pub(crate) fn fetch_line(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the instruction is part of every x86-64, and at no address does it fault or change anything.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

impl<'a> GrownView<'a> {
    /// How many frames there are: a number at or above it is of none.
    #[inline]
    pub fn frames(self) -> u32 {
        self.frames
    }

    /// The descriptor of `frame`; `None` if there is no such frame.
    #[inline]
    pub fn descriptor(self, frame: Frame) -> Option<&'a Descriptor> {
        let offset = self.view.layout.descriptors as usize + frame.0 as usize * size_of::<Descriptor>();
        // SAFETY: the frame is grown, so its entry in the table is mapped; descriptors are atomics only.
        (frame.0 < self.frames).then(|| unsafe { &*self.view.at(offset).cast::<Descriptor>() })
    }

    /// The descriptor of a frame that the caller has, which may have been grown after this view was looked up.
    ///
    /// # Panics
    /// There is no such frame.
    #[inline]
    pub fn own_descriptor(self, frame: Frame) -> &'a Descriptor {
        self.descriptor(frame)
            .unwrap_or_else(|| self.again().descriptor(frame).expect("the caller's frame exists"))
    }

    /// The slots of a node that the caller has; see [`GrownView::own_descriptor`].
    ///
    /// # Panics
    /// There is no such cell.
    #[inline]
    pub fn own_slots(self, cell: CellNumber) -> &'a [AtomicU32] {
        self.slots(cell).unwrap_or_else(|| self.again().slots(cell).expect("the caller's cell exists"))
    }

    /// The head of a node that the caller has; see [`GrownView::own_descriptor`].
    ///
    /// # Panics
    /// There is no such cell.
    #[inline]
    pub fn own_head(self, cell: CellNumber) -> &'a NodeHead {
        self.head(cell).unwrap_or_else(|| self.again().head(cell).expect("the caller's cell exists"))
    }

    /// The referenced byte of a frame that the caller has; see [`GrownView::own_descriptor`].
    ///
    /// # Panics
    /// There is no such frame.
    #[inline]
    pub fn own_referenced(self, frame: Frame) -> &'a AtomicU8 {
        self.referenced(frame)
            .unwrap_or_else(|| self.again().referenced(frame).expect("the caller's frame exists"))
    }

    #[cold]
    fn again(self) -> GrownView<'a> {
        self.view.grown()
    }

    /// Has the processor fetch the descriptor of `frame`; nothing waits for it, or happens if there is no such frame.
    #[inline]
    pub fn prefetch(self, frame: Frame) {
        if let Some(descriptor) = self.descriptor(frame) {
            fetch_line(core::ptr::from_ref(descriptor).cast());
        }
    }

    /// The referenced byte of `frame`; `None` if there is no such frame.
    #[inline]
    pub fn referenced(self, frame: Frame) -> Option<&'a AtomicU8> {
        let offset = self.view.layout.referenced as usize + frame.0 as usize;
        // SAFETY: as in `descriptor`.
        (frame.0 < self.frames).then(|| unsafe { &*self.view.at(offset).cast::<AtomicU8>() })
    }

    /// The write sequence of the page in `frame`; `None` if there is no such frame. See `written.rs`.
    #[inline]
    pub fn write_sequence(self, frame: Frame) -> Option<&'a AtomicU32> {
        let offset = self.view.layout.write_sequences as usize + frame.0 as usize * size_of::<AtomicU32>();
        // SAFETY: as in `descriptor`.
        (frame.0 < self.frames).then(|| unsafe { &*self.view.at(offset).cast::<AtomicU32>() })
    }

    /// How many of `pages` pages from `frame` on have arrived before the first that has not, or is none. For the holder
    /// of their folio, and a reader between its two looks at it.
    #[inline]
    pub fn run_read(self, frame: Frame, pages: u32) -> u32 {
        let mut row = 0;
        for (first, mask) in pages_read::words(frame, pages.min(self.frames.saturating_sub(frame.0))) {
            let Some(word) = self.pages_read_word(first) else { break };
            let missing = !pages_read::load(word) & mask;
            if missing != 0 {
                return row + (missing.trailing_zeros() - mask.trailing_zeros());
            }
            row += mask.count_ones();
        }
        row
    }

    #[inline]
    fn pages_read_word(self, first: Frame) -> Option<&'a AtomicU64> {
        self.word_of_bits(self.view.layout.uptodate, first)
    }

    #[inline]
    fn bits_word(self, bits: BitTable, first: Frame) -> Option<&'a AtomicU64> {
        let table = match bits {
            BitTable::Dirty => self.view.layout.dirty,
            BitTable::Writeback => self.view.layout.writeback,
        };
        self.word_of_bits(table, first)
    }

    #[inline]
    fn word_of_bits(self, table: u64, first: Frame) -> Option<&'a AtomicU64> {
        debug_assert!(first.0.is_multiple_of(pages_read::FRAMES_PER_WORD), "{first:?} begins no word");
        let offset = table as usize + first.0 as usize / 8;
        // SAFETY: frames grow by whole extents, so all frames of the word exist; their bits lie in the table,
        // aligned, and are atomics only.
        (first.0 < self.frames).then(|| unsafe { &*self.view.at(offset).cast::<AtomicU64>() })
    }

    /// The slots of a node; `None` if the number is beyond all cells. A stale number gives another cell's or a page's
    /// bytes, and a walk on them ends at a descriptor that tells. One comparison, because every level of every walk is
    /// here.
    #[inline]
    pub fn slots(self, cell: CellNumber) -> Option<&'a [AtomicU32; 64]> {
        let offset = cell.0 as usize * CELL_BYTES;
        // SAFETY: 16 cells to a frame, so the 256 bytes lie in a grown frame; slots are atomics only.
        (u64::from(cell.0) < u64::from(self.frames) * 16)
            .then(|| unsafe { &*self.view.at(offset).cast::<[AtomicU32; 64]>() })
    }

    /// The head of a node; `None` if the number is no cell's.
    #[inline]
    pub fn head(self, cell: CellNumber) -> Option<&'a NodeHead> {
        self.in_cells(cell).then(|| {
            let offset = cell.frame().offset() + cell.place() as usize * size_of::<NodeHead>();
            // SAFETY: as in `slots`; heads lie in the first 768 bytes of the cell's page.
            unsafe { &*self.view.at(offset).cast::<NodeHead>() }
        })
    }

    /// The mapping record in a cell; `None` if the number is no cell's. Its `id` says whether it is one.
    #[inline]
    pub fn record(self, cell: CellNumber) -> Option<&'a Record> {
        let offset = cell.0 as usize * CELL_BYTES;
        // SAFETY: as in `slots`; a record is atomics only.
        self.in_cells(cell).then(|| unsafe { &*self.view.at(offset).cast::<Record>() })
    }

    /// The address of the bytes of a frame; `None` if there is no such frame. They may change at any moment: they are
    /// copied by assembly or atomics only.
    #[inline]
    pub fn bytes(self, frame: Frame) -> Option<*mut u8> {
        (frame.0 < self.frames).then(|| self.view.at(frame.offset()))
    }

    #[inline]
    fn in_cells(self, cell: CellNumber) -> bool {
        let frame = cell.0 / 16;
        cell.0 % 16 >= FIRST_CELL && frame < self.frames && frame >= self.view.layout.frames_meta
    }
}
