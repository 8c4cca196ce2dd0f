//! The descriptor: 32 bytes that say which folio a frame heads.
//!
//! ```text
//!   word    63           32 31      16 15  12 11           0
//!          [   sequence    |  holds   | order |   flags     ]
//! ```
//!
//! | part | changed by | under what |
//! |---|---|---|
//! | sequence | `prepare` (odd to even), `retire`, `try_retire` (even to odd) | the tree lock of the folio's mapping; exclusive ownership while odd |
//! | | `begin_writes` (even to the next even), once in a folio's life | a writer's hold |
//! | | `try_begin_split` (even to odd), then `prepare_piece` (odd to even) | the tree lock, and no hold |
//! | holds | `prepare` (to 1), `try_hold`, `put`, `complete`; with `WRITEBACK` | nothing: one atomic step on the word |
//! | order | `prepare`; the arena, for free runs | exclusive ownership while the sequence is odd |
//! | `UPTODATE` | set by `complete` | the hold of the lock's holder; cleared only with the sequence, by `prepare` |
//! | `STEADY` | set by `complete` with `UPTODATE`, cleared by `begin_writes` with a step of the sequence by two | the fill's hold; a writer's hold |
//! | `LOCKED` | set by `prepare`, cleared by `complete` | the fill's hold |
//! | | set by `try_lock` and `try_lock_allocated`, cleared by `unlock` or `complete` | a grabber's hold |
//! | `MARKER` | set by `prepare`, cleared by `take_marker` | nothing |
//! | `DETACHED` | set by `retire` when the folio is held | the tree lock |
//! | `PARTIAL_UPTODATE` | set by `note_pages_read`, cleared by `prepare` | the fill's hold |
//! | `WORKINGSET` | set by `join_working_set`, cleared by `prepare` | the fill's hold |
//! | `DROPBEHIND` | set or cleared by `prepare_with`, cleared by `adopt` | the tree lock |
//! | `DIRTY` | set by `mark_dirty`, cleared by `clear_dirty` | the tree lock |
//! | `WRITEBACK` | set by `start_writeback`, with a hold; cleared by `end_writeback`, with it | the tree lock |
//! | `FREE` | the arena, on the first frame of a free run | the arena's lock |
//!
//! | sequence | UPTODATE | LOCKED | DETACHED | FREE | holds | meaning |
//! |---|---|---|---|---|---|---|
//! | odd | - | - | 0 | 1 | 0 | head of a free run of `order` |
//! | odd | - | - | 0 | 0 | 0 | inside a free run, inside a folio, or allocated and not yet prepared |
//! | even | 0 | 1 | 0 | 0 | >= 1 | in the index or about to be, being filled; its fill holds it, and so may readers who wait |
//! | even | 1 | 0 | 0 | 0 | any | in the index, readable |
//! | even | 1 | 1 | 0 | 0 | >= 1 | the same, and grabbed: readers and writers in place go on, other grabbers wait |
//! | even | 0 | 0 | 0 | 0 | any | **allocated**: in the index of a memory file, and no bytes were put there; zeros, whatever is in its frames |
//! | odd | any | any | 1 | 0 | >= 1 | out of the index, its bytes kept for those who hold it |
//! | odd | any | 0 | 1 | 0 | 0 | out of the index, and its last holder is about to free it |
//! | 0 | 0 | 0 | 0 | 0 | 0 | memory that was not touched: a folio of mapping 0, for which no reader asks |
//!
//! `LOCKED` is the **folio lock**. Its holder is alone in putting first bytes into a folio that is not up to date, and
//! keeps other grabbers, splits and spills away from one that is. It stops no reader of a folio that is up to date:
//! these look at `UPTODATE` first. How it is waited for, and in which order several are taken, is told in
//! `mapping/grab.rs`.
//!
//! In the third row `PARTIAL_UPTODATE` may be set: then readers, those who hold the folio and those who do not, read
//! those of its pages whose bits say that they have come (`pages_read.rs`). It is set nowhere else first, and stays
//! until the frames are freed.
//!
//! `WORKINGSET` says something only of a live folio, and of one that is being evicted.
//!
//! `DROPBEHIND` says that only uncached reads and writes have used the folio so far; how and when it is dropped is told
//! in `filemap/uncached.rs`.
//!
//! `DIRTY` and `WRITEBACK` sum up the bits of the folio's pages (`dirty.rs`):
//!
//! | in the index | DIRTY | WRITEBACK | meaning |
//! |---|---|---|---|
//! | yes | 0 | 0 | the file has its bytes, as far as the cache knows: it may be evicted |
//! | yes | 1 | 0 | a page of it is to be written; it is not evicted and not dropped behind a reader |
//! | yes | 0 | 1 | pages of it are being written and have not been changed since; as above |
//! | yes | 1 | 1 | some pages are being written, and some, of these or others, are to be written; as above |
//! | no | 0 | 0 or 1 | what was taken out is not dirty any more; what was being written is held until that has ended |
//!
//! Where bytes are put into a folio that is still `LOCKED`, by a writer who fills it itself, it is dirty before it is
//! unlocked. `try_retire` refuses both flags; `retire` takes any folio, and its caller forgets the dirty bits.
//!
//! A folio in the index is up to date as a whole, or being filled, or allocated. A folio with failed pages leaves the
//! index before it is unlocked, and its pages that had arrived go with it. `PARTIAL_UPTODATE` itself only says that
//! bits of its frames may be set and are to be cleared when they are freed.
//!
//! A folio is **steady** from the end of its fill until its first writer comes, and **written** from then on: up to
//! date and not steady. The bytes of a written folio change page by page, and each page has a sequence of its own
//! (`written.rs`). One bit tells the reader of a steady folio to skip that. The flag goes with a step of the sequence,
//! in one store, so a reader that found the folio steady finds out at its second look.
//!
//! In the rows with `DETACHED`, `UPTODATE` may still be set: the odd sequence alone keeps new readers away.
//!
//! A frame's sequence only ever rises, whatever the frame is used for, so an even number names one folio for good,
//! steady or written; it wraps after 2^29 of them at the soonest. Mapping and index are written only in `prepare` and
//! `prepare_piece`, while the sequence is odd. `tests/model_hit.rs` shows that this and two fences suffice.
//!
//! A **hold** keeps the bytes; it is taken by the owner's process only and is short. A **pin** is a hold that also
//! counts in `pins` and is a user's: it keeps the folio in the index too, unless a change from outside detaches it; the
//! pinned bytes live on.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{Mutant, mutant, ordering};
use crate::units::{Frame, MappingId, Order, PageIndex};

/// The most holds one folio can have at a time. (Write-back's own always finds room beside them.)
pub const HOLDS_MAX: u32 = u16::MAX as u32 - 1;

/// In the first link of a folio's head: it stands in no ring.
pub const NO_PLACE: u32 = 0;

const HOLD: u64 = 1 << 16;
const HOLDS_MASK: u64 = 0xffff << 16;
const ORDER_SHIFT: u32 = 12;
const SEQUENCE: u64 = 1 << 32;
const WRITTEN_STEP: u32 = 2;

/// The flags of a descriptor's word; the table in this file says who sets and clears each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flags;

impl Flags {
    /// Every page of the folio holds the file's bytes.
    pub const UPTODATE: u64 = 1 << 0;
    /// The folio lock: a fill or a grabber has the folio for itself; a fill owns its bytes.
    pub const LOCKED: u64 = 1 << 1;
    /// Reading this folio should start the next readahead window.
    pub const MARKER: u64 = 1 << 2;
    /// Out of the index, kept by its holders.
    pub const DETACHED: u64 = 1 << 3;
    /// Head of a free run.
    pub const FREE: u64 = 1 << 4;
    /// The folio came back soon after it had been evicted.
    pub const WORKINGSET: u64 = 1 << 5;
    /// Bits of its frames may say that their pages have come; see `pages_read.rs`.
    pub const PARTIAL_UPTODATE: u64 = 1 << 6;
    /// An uncached read made it: it is dropped after that read, unless it is adopted.
    pub const DROPBEHIND: u64 = 1 << 7;
    /// The folio is up to date, and its bytes were not changed in place.
    pub const STEADY: u64 = 1 << 8;
    /// A page of the folio differs from the file, and is to be written.
    pub const DIRTY: u64 = 1 << 9;
    /// A page of the folio is being written to the file.
    pub const WRITEBACK: u64 = 1 << 10;
    /// The flags that keep a folio in the index until its bytes are in the file.
    pub const UNWRITTEN: u64 = Self::DIRTY | Self::WRITEBACK;
}

/// A descriptor's word, as read at one moment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DescriptorWord(pub u64);

impl DescriptorWord {
    /// The identity's sequence; even while the descriptor names a folio.
    #[inline]
    pub const fn sequence(self) -> u32 {
        (self.0 >> 32) as u32
    }
    /// Whether the descriptor names a folio that the index may hold.
    #[inline]
    pub const fn is_live(self) -> bool {
        self.sequence() & 1 == 0
    }
    /// How many hold the folio.
    #[inline]
    pub const fn holds(self) -> u32 {
        ((self.0 & HOLDS_MASK) >> 16) as u32
    }
    /// The order of the folio or free run.
    #[inline]
    pub const fn order(self) -> Order {
        Order(((self.0 >> ORDER_SHIFT) & 0xf) as u8)
    }
    /// Whether `flag` (one of [`Flags`], or any of several) is set.
    #[inline]
    pub const fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }
    /// Whether the folio is up to date and its bytes are changed in place, page by page; see `written.rs`.
    #[inline]
    pub const fn is_written(self) -> bool {
        self.has(Flags::UPTODATE) && !self.has(Flags::STEADY)
    }
    /// Whether this is a later word of the folio whose sequence was `sequence`: that has not changed, or by the step
    /// of its first write alone. (A folio prepared anew after as many steps is not a written one yet.)
    #[inline]
    pub const fn is_still(self, sequence: u32) -> bool {
        match self.sequence().wrapping_sub(sequence) {
            0 => true,
            WRITTEN_STEP => self.is_written(),
            _ => false,
        }
    }
}

impl core::fmt::Debug for DescriptorWord {
    #[inline]
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "seq {} holds {} {:?} flags {:#b}",
            self.sequence(),
            self.holds(),
            self.order(),
            self.0 & 0xfff
        )
    }
}

/// A reader's first look at a folio, to check after its copy: the stamp of an optimistic read.
#[derive(Clone, Copy, Debug)]
pub struct FolioStamp {
    word: DescriptorWord,
    /// The folio's first index.
    pub first: PageIndex,
}

impl FolioStamp {
    /// The folio's order.
    #[inline]
    pub fn order(&self) -> Order {
        self.word.order()
    }
    /// The folio's sequence: which folio of this frame, and whether it had been written.
    #[inline]
    pub fn sequence(&self) -> u32 {
        self.word.sequence()
    }
    /// Whether the folio carries the readahead marker.
    #[inline]
    pub fn has_marker(&self) -> bool {
        self.word.has(Flags::MARKER)
    }
    /// Whether the folio goes when the uncached reader that made it has passed.
    #[inline]
    pub fn drops_behind(&self) -> bool {
        self.word.has(Flags::DROPBEHIND)
    }
    /// Whether `word`, seen later, is of the same folio, in the index. If two steps lie between, the folio was
    /// written first, or retired and its frame prepared again; but that one is not written before two more.
    #[inline]
    fn names(&self, word: DescriptorWord) -> bool {
        word.is_still(self.word.sequence())
    }
}

/// Why a first look did not lead to a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotReady {
    /// The descriptor names another folio, or none: the hint was stale.
    Mismatch,
    /// The folio is the right one, but its bytes are not there yet.
    Filling,
    /// The folio is the right one, but written: read page by page, after [`Descriptor::begin_read_written`].
    Written,
}

/// Why bytes of a folio are not written in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteRefused {
    /// The folio's fill has not ended.
    Filling,
    /// The folio has left the index: a write to it would be lost.
    Left,
    /// A user's pin promises that these bytes do not change.
    Pinned,
}

/// Why the folio lock was not given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockRefused {
    /// A fill or a grabber has it.
    Locked,
    /// The folio has left the index since it was held.
    Left,
}

/// Whether the holder of a folio may read it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadableState {
    /// The bytes are there, and stay while the hold is kept.
    Yes,
    /// The holder of the lock is about to bring them.
    NotYet,
    /// The folio of a memory file has no bytes yet: it is allocated, and reads as zeros. Its frames must not be read.
    Zeros,
    /// The fill failed, or the folio left the index since it was held.
    Never,
}

/// Why a hold was not given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HoldRefused {
    /// See [`NotReady::Mismatch`].
    Mismatch,
    /// See [`NotReady::Filling`].
    Filling,
    /// The folio has [`HOLDS_MAX`] holds.
    TooMany,
}

/// The outcome of taking a folio out of the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RetireOutcome {
    /// The folio has no holders: its frames are the caller's to free.
    Free,
    /// The folio is held: it is detached, and the last holder frees its frames.
    Held,
}

/// A holder's duty after it has given its hold back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PutOutcome {
    /// The holder has nothing more to do.
    Kept,
    /// The hold was the last of a detached folio: free its frames.
    Last(Order),
}

/// Whether a folio was still in the index when its fill ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillEnd {
    /// The folio is still in the index.
    Attached,
    /// The folio left the index meanwhile; [`PutOutcome`] says who frees it.
    Detached(PutOutcome),
}

/// Called by a thread that fills a folio, before its first store to the folio's bytes. The fence in
/// [`Descriptor::prepare`] orders the stores of the thread that prepared, and no others.
#[inline]
pub fn before_bytes() {
    before_reuse(Mutant::FillFence);
}

#[inline]
fn before_reuse(step: Mutant) {
    // Release fence, partner: the Acquire fence in `end_read`. The odd sequence that ended the frame's last use came
    // before this call, through a lock or a queue. A thread that sees a store of this thread from here on sees that
    // sequence, or a later one.
    if !mutant(step) {
        fence(Ordering::Release);
    }
}

/// The state of one frame; 32 bytes, in the arena.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct Descriptor {
    word: AtomicU64,
    index: AtomicU64,
    mapping: AtomicU32,
    pins: AtomicU32,
    /// Two numbers of the frame's owner. While it is free: the arena's list links; while it heads a folio of the index:
    /// its place in a ring ([`NO_PLACE`] in the first: none).
    links: [AtomicU32; 2],
}

#[cfg(not(quinion_model))]
const _: () = assert!(core::mem::size_of::<Descriptor>() == 32);

#[cfg(all(test, not(quinion_model)))]
impl Descriptor {
    /// The fields and where they lie, for `recorded.rs`. They fill the descriptor, so none is left out.
    pub(crate) const FIELDS: [(&str, usize); 5] = [
        ("word", core::mem::offset_of!(Self, word)),
        ("index", core::mem::offset_of!(Self, index)),
        ("mapping", core::mem::offset_of!(Self, mapping)),
        ("pins", core::mem::offset_of!(Self, pins)),
        ("links", core::mem::offset_of!(Self, links)),
    ];
}

impl Default for Descriptor {
    #[inline]
    fn default() -> Self {
        Self::new()
    }
}

impl Descriptor {
    /// A descriptor that names nothing.
    #[inline]
    pub fn new() -> Self {
        Self {
            word: AtomicU64::new(SEQUENCE),
            index: AtomicU64::new(0),
            mapping: AtomicU32::new(0),
            pins: AtomicU32::new(0),
            links: [AtomicU32::new(0), AtomicU32::new(0)],
        }
    }

    /// The word as it is now.
    #[inline]
    pub fn word(&self) -> DescriptorWord {
        DescriptorWord(self.word.load(Ordering::Relaxed))
    }
    /// The word as it is now, ordered after the stores before the folio got its identity: that it has no ring place
    /// yet; and, if it is not locked, after what was done under the last lock.
    #[inline]
    pub fn settled_word(&self) -> DescriptorWord {
        // Acquire, partners: the Release in `prepare`, in `unlock` and in `complete`.
        DescriptorWord(self.word.load(Ordering::Acquire))
    }
    /// The mapping whose folio this is; only for the holder of the folio or of the tree lock.
    #[inline]
    pub fn mapping(&self) -> MappingId {
        MappingId(self.mapping.load(Ordering::Relaxed))
    }
    /// The folio's first index; as [`Descriptor::mapping`].
    #[inline]
    pub fn index(&self) -> PageIndex {
        PageIndex(self.index.load(Ordering::Relaxed))
    }
    /// How many users' pins there are.
    #[inline]
    pub fn pins(&self) -> u32 {
        self.pins.load(Ordering::Relaxed)
    }

    // ---- the hit protocol -------------------------------------------------------------------

    /// The reader's first look: is this an up-to-date folio of `mapping` that covers `index`?
    #[inline]
    pub fn begin_read(&self, mapping: MappingId, index: PageIndex) -> Result<FolioStamp, NotReady> {
        // Acquire, partner: the Release in `complete`. If that store comes first the reader sees the identity and the
        // bytes it published; if not, it sees a folio that is not up to date and does not copy.
        let order = ordering(Mutant::ReaderAcquire, Ordering::Acquire, Ordering::Relaxed);
        let word = DescriptorWord(self.word.load(order));
        let stamp = self.check(word, mapping, index)?;
        if word.has(Flags::STEADY) {
            return Ok(stamp);
        }
        if !word.has(Flags::UPTODATE) && !mutant(Mutant::ReaderUptodate) {
            Err(NotReady::Filling)
        } else if word.is_written() && !mutant(Mutant::ReaderSteady) {
            Err(NotReady::Written)
        } else {
            Ok(stamp)
        }
    }

    /// The first look at a written folio. For each page the reader looks at that page's sequence, copies, and looks at
    /// it again; then comes [`Descriptor::end_read`].
    #[inline]
    pub fn begin_read_written(&self, mapping: MappingId, index: PageIndex) -> Result<FolioStamp, NotReady> {
        // Acquire, partner: the Release in `complete`, which every later step on the word hands on: the fill's bytes,
        // for pages that no writer has changed yet.
        let order = ordering(Mutant::WrittenAcquire, Ordering::Acquire, Ordering::Relaxed);
        let word = DescriptorWord(self.word.load(order));
        let stamp = self.check(word, mapping, index)?;
        // A written folio stays written: this is another folio of the same pages.
        if word.is_written() { Ok(stamp) } else { Err(NotReady::Mismatch) }
    }

    /// The first look at a folio that is being filled: how many pages from `index` on the reader may copy, at least
    /// one. `arrived(place, pages)` says how many of so many pages, from that place in the folio on, have arrived in a
    /// row; see `pages_read.rs` for why it may.
    #[cold]
    #[inline(never)]
    pub fn begin_read_partial(
        &self,
        mapping: MappingId,
        index: PageIndex,
        pages_read: impl FnOnce(u32, u32) -> u32,
    ) -> Result<(FolioStamp, u32), NotReady> {
        // Acquire, partner: the Release in `prepare` (its fence's or its store's), which every later step on the word
        // hands on until the folio is freed: the bits looked at next are not of an earlier use of the frames. And the
        // Release in `complete`, as in `begin_read`: the fill may have ended since that look.
        let order = ordering(Mutant::ReaderWordAcquire, Ordering::Acquire, Ordering::Relaxed);
        let word = DescriptorWord(self.word.load(order));
        let stamp = self.check(word, mapping, index)?;
        let place = (index.0 - stamp.first.0) as u32;
        let to_end = word.order().pages() - place;
        if word.is_written() && !mutant(Mutant::ReaderSteady) {
            return Err(NotReady::Written);
        }
        let pages = if word.has(Flags::UPTODATE) || mutant(Mutant::ReaderPartialUptodate) {
            to_end
        } else if word.has(Flags::PARTIAL_UPTODATE) {
            pages_read(place, to_end)
        } else {
            0
        };
        if pages > 0 { Ok((stamp, pages)) } else { Err(NotReady::Filling) }
    }

    /// Whether this is a folio of `mapping` that covers `index`, filled or not.
    #[inline]
    pub fn identify(&self, mapping: MappingId, index: PageIndex) -> Result<FolioStamp, NotReady> {
        // Acquire, partner: the Release in `prepare`: a thread that sees the word sees its identity, or a later one.
        self.check(DescriptorWord(self.word.load(Ordering::Acquire)), mapping, index)
    }

    /// The reader's second look: were the copied bytes this folio's, from the first to the last?
    #[inline]
    pub fn end_read(&self, stamp: FolioStamp) -> bool {
        // Acquire fence, partner: the Release fence in `before_reuse`. If the first look saw any part of a later
        // identity, or the copy any byte of a later folio, then the load below sees the odd sequence that came before,
        // or a later one. Partner, too: the fence in `written::enter`. If the copy of a steady folio saw a byte of a
        // writer's, then the load below sees the step that its first writer made.
        if !mutant(Mutant::ReaderFence) {
            fence(Ordering::Acquire);
        }
        self.word().sequence() == stamp.word.sequence() || mutant(Mutant::ReaderRecheck)
    }

    #[inline]
    fn check(
        &self,
        word: DescriptorWord,
        mapping: MappingId,
        index: PageIndex,
    ) -> Result<FolioStamp, NotReady> {
        let first = self.index();
        // A wrapping difference is one comparison for "not before" and "not after".
        let inside = index.0.wrapping_sub(first.0) < u64::from(word.order().pages());
        let live = word.is_live() || mutant(Mutant::ReaderParity);
        let ours = self.mapping() == mapping || mutant(Mutant::ReaderMapping);
        if live && ours && (inside || mutant(Mutant::ReaderIndex)) {
            Ok(FolioStamp { word, first })
        } else {
            Err(NotReady::Mismatch)
        }
    }

    // ---- life of a folio ----------------------------------------------------------------------

    /// Names a folio: 2^`order` pages of `mapping` from `index`; locked, not up to date, with one hold, the fill's. The
    /// caller owns the frame alone; the folio is in no index yet.
    #[inline]
    pub fn prepare(&self, mapping: MappingId, index: PageIndex, order: Order) {
        self.prepare_with(mapping, index, order, 0);
    }

    /// As [`Descriptor::prepare`]; `born_with`: those of `MARKER` and `DROPBEHIND` that the folio has.
    pub fn prepare_with(&self, mapping: MappingId, index: PageIndex, order: Order, born_with: u64) {
        debug_assert!(born_with & !(Flags::MARKER | Flags::DROPBEHIND) == 0, "{born_with:#b} come later");
        let word = self.word();
        let odd = !word.is_live() || mutant(Mutant::RetireStep);
        debug_assert!(odd && word.holds() == 0 && !word.has(Flags::FREE), "{word:?} is not ours to prepare");
        debug_assert!(index.is_aligned(order), "{index:?} is not aligned for {order:?}");
        debug_assert!(mapping != MappingId::NONE, "a folio belongs to a mapping");
        before_reuse(Mutant::PrepareFence);
        self.mapping.store(mapping.0, Ordering::Relaxed);
        self.index.store(index.0, Ordering::Relaxed);
        self.pins.store(0, Ordering::Relaxed);
        self.links[0].store(NO_PLACE, Ordering::Relaxed);
        let step = if mutant(Mutant::PrepareStep) { u32::MAX } else { 1 };
        let sequence = u64::from(word.sequence().wrapping_add(step)) << 32;
        let word = sequence | HOLD | (u64::from(order.0) << ORDER_SHIFT) | Flags::LOCKED | born_with;
        // Release, partner: the Acquire in `hold`: a thread that holds the folio while it is filled holds this one. (A
        // reader without a hold is told "not up to date" until the Release in `complete` publishes identity and bytes.)
        let order = ordering(Mutant::PrepareRelease, Ordering::Release, Ordering::Relaxed);
        self.word.store(word, order);
    }

    /// Ends a fill: unlocks the folio, which is up to date, and gives the fill's hold back.
    pub fn complete(&self) -> FillEnd {
        self.end_fill(Flags::UPTODATE | Flags::STEADY)
    }

    /// As [`Descriptor::complete`] of a folio that is not up to date, since not all of its bytes came.
    pub fn complete_empty(&self) -> FillEnd {
        self.end_fill(0)
    }

    fn end_fill(&self, set: u64) -> FillEnd {
        let step = |word: u64| ((word & !Flags::LOCKED) | set) - HOLD;
        // Release, partner: the Acquire in `begin_read` and `try_hold`: a thread that sees UPTODATE sees the identity
        // and the bytes. Acquire, partner: the Release in `retire`, if this thread frees the frames.
        let order = ordering(Mutant::CompleteRelease, Ordering::AcqRel, Ordering::Acquire);
        let (before, after) = self.update(order, |word| Some(step(word))).expect("the step is unconditional");
        debug_assert!(before.has(Flags::LOCKED) && before.holds() > 0, "{before:?} was not being filled");
        if !after.has(Flags::DETACHED) {
            FillEnd::Attached
        } else {
            FillEnd::Detached(self.last_or_kept(after))
        }
    }

    /// Takes the lock of an allocated folio, with a hold; the caller has a hold already. The caller fills it, and ends
    /// that by [`Descriptor::complete`], up to date or, if it has put nothing there, allocated as before. `false`: it
    /// is not allocated any more, is locked, or has left; look again.
    #[inline]
    pub fn try_lock_allocated(&self) -> bool {
        let allocated = |word: DescriptorWord| word.is_live() && !word.has(Flags::UPTODATE | Flags::LOCKED);
        let fit = |word: DescriptorWord| allocated(word) && word.holds() < HOLDS_MAX;
        let step = |word: u64| fit(DescriptorWord(word)).then(|| (word | Flags::LOCKED) + HOLD);
        // Acquire, partner: the Release in `complete`, by a thread that allocated it, or had the lock before.
        self.update(Ordering::Acquire, step).is_some()
    }

    /// Takes a folio without holders out of the readers' sight; a fill holds its folios. `None`: it is held, not live
    /// or unwritten; nothing was changed. On success the frames are the caller's. The caller holds the tree lock.
    #[inline]
    pub fn try_retire(&self) -> Option<Order> {
        let busy = if mutant(Mutant::RetireHolds) { 0 } else { HOLDS_MASK };
        // `UNWRITTEN` changes under the tree lock only, which is the caller's.
        let unwritten = if mutant(Mutant::RetireUnwritten) { 0 } else { Flags::UNWRITTEN };
        let stays = SEQUENCE | busy | unwritten;
        let step = |word: u64| (word & stays == 0).then(|| Self::retired(word, 0));
        self.update(Self::retire_ordering(), step).map(|(before, _)| before.order())
    }

    /// Takes a folio out of the readers' sight, held or not, dirty or not. The caller holds the tree lock, and has
    /// cleared its dirty bits.
    #[inline]
    pub fn retire(&self) -> RetireOutcome {
        let step = |word: u64| {
            let held = word & HOLDS_MASK != 0 && !mutant(Mutant::RetireDetached);
            (word & SEQUENCE == 0).then(|| Self::retired(word, if held { Flags::DETACHED } else { 0 }))
        };
        let (_, after) = self.update(Self::retire_ordering(), step).expect("a folio is retired once");
        if after.has(Flags::DETACHED) { RetireOutcome::Held } else { RetireOutcome::Free }
    }

    #[inline]
    fn retired(word: u64, detached: u64) -> u64 {
        let step = if mutant(Mutant::RetireStep) { 0 } else { SEQUENCE };
        word.wrapping_add(step) | detached
    }

    /// Acquire, partner: the Release in `put`: what holders read comes before what this thread does with the bytes.
    /// Release, partner: the Acquire in `put` and `complete`: what this thread read comes before what a last holder
    /// does with them.
    #[inline(always)]
    fn retire_ordering() -> Ordering {
        let order = ordering(Mutant::RetireAcquire, Ordering::AcqRel, Ordering::Release);
        ordering(Mutant::RetireRelease, order, Ordering::Acquire)
    }

    // ---- split ----------------------------------------------------------------------------------

    /// Takes a folio without holders, and so without a fill, out of the readers' sight, to split it: its word then.
    /// `None`: it is held, or has left; nothing was changed. Each of its pieces is
    /// [prepared](Descriptor::prepare_piece) next, the one at its own frame too. The caller holds the tree lock.
    #[inline]
    pub fn try_begin_split(&self) -> Option<DescriptorWord> {
        let fit = |word: DescriptorWord| word.is_live() && word.holds() == 0;
        let odd = |word| if mutant(Mutant::SplitStep) { word } else { Self::retired(word, 0) };
        let step = |word: u64| fit(DescriptorWord(word)).then(|| odd(word));
        self.update(Self::retire_ordering(), step).map(|(before, _)| before)
    }

    /// Prepares the descriptor of a piece of `whole`, which was split and may be the piece at its own frame. The piece
    /// has no holders, the `INHERITED` flags of `whole`, and `more`; the marker is one of these. The caller holds the
    /// tree lock, and has taken the whole out of the readers' sight.
    pub fn prepare_piece(
        &self,
        mapping: MappingId,
        index: PageIndex,
        order: Order,
        whole: DescriptorWord,
        more: u64,
    ) {
        let word = self.word();
        let odd = !word.is_live() || mutant(Mutant::RetireStep) || mutant(Mutant::SplitStep);
        debug_assert!(odd && word.holds() == 0 && !word.has(Flags::FREE), "{word:?} is not ours to prepare");
        debug_assert!(index.is_aligned(order), "{index:?} is not aligned for {order:?}");
        before_reuse(Mutant::PieceFence);
        self.mapping.store(mapping.0, Ordering::Relaxed);
        self.index.store(index.0, Ordering::Relaxed);
        self.pins.store(0, Ordering::Relaxed);
        self.links[0].store(NO_PLACE, Ordering::Relaxed);
        // Two more than to the next even number: a piece may be born written, and a reader that knew what this frame
        // headed before must not take it for that folio. See `DescriptorWord::is_still`.
        let step = if word.is_live() { 0 } else { 1 + WRITTEN_STEP };
        let sequence = u64::from(word.sequence().wrapping_add(step)) << 32;
        let flags = whole.0 & Self::INHERITED | more;
        // Release, partner: the Acquire in `begin_read` and `hold`: the identity, and the bytes, which the steps on the
        // whole's word handed on from the fill and from writers.
        let release = ordering(Mutant::PieceRelease, Ordering::Release, Ordering::Relaxed);
        self.word.store(sequence | u64::from(order.0) << ORDER_SHIFT | flags, release);
    }

    const INHERITED: u64 =
        Flags::UPTODATE | Flags::STEADY | Flags::PARTIAL_UPTODATE | Flags::WORKINGSET | Flags::DROPBEHIND;

    // ---- holds and pins -----------------------------------------------------------------------

    /// Holds the up-to-date folio of `mapping` that covers `index`. Its bytes stay until [`Descriptor::put`].
    #[inline]
    pub fn try_hold(&self, mapping: MappingId, index: PageIndex) -> Result<FolioStamp, HoldRefused> {
        self.hold(mapping, index, Flags::UPTODATE)
    }

    /// As [`Descriptor::try_hold`], of a folio that may still be being filled. [`Descriptor::is_readable`] says when
    /// its bytes may be read.
    #[inline]
    pub fn try_hold_unfilled(&self, mapping: MappingId, index: PageIndex) -> Result<FolioStamp, HoldRefused> {
        self.hold(mapping, index, 0)
    }

    #[inline]
    fn hold(&self, mapping: MappingId, index: PageIndex, needs: u64) -> Result<FolioStamp, HoldRefused> {
        // Acquire, partner: the Release in `complete`, as in `begin_read`, and in `prepare`: a folio held
        // before it is filled is the one that was prepared.
        let order = ordering(Mutant::HoldAcquire, Ordering::Acquire, Ordering::Relaxed);
        let mut word = DescriptorWord(self.word.load(order));
        loop {
            let stamp = self.check(word, mapping, index).map_err(|_| HoldRefused::Mismatch)?;
            if word.0 & needs != needs && !mutant(Mutant::HoldUptodate) {
                return Err(HoldRefused::Filling);
            }
            if word.holds() >= HOLDS_MAX {
                return Err(HoldRefused::TooMany);
            }
            // The whole word is compared, sequence included, so the identity that was checked is unchanged. A later
            // identity cannot have been seen: it is written only after this hold has been given back. Acquire, partner
            // as above.
            if mutant(Mutant::HoldCompare) {
                word = self.word();
            }
            match self.word.compare_exchange(word.0, word.0 + HOLD, order, order) {
                Ok(_) => return Ok(stamp),
                Err(now) => word = DescriptorWord(now),
            }
        }
    }

    /// Whether the holder of a folio may read all of it now.
    #[inline]
    pub fn is_readable(&self, stamp: FolioStamp) -> ReadableState {
        self.is_page_readable(stamp, || false)
    }

    /// As [`Descriptor::is_readable`], of the page whose bit `is_page_read` looks at.
    #[inline]
    pub fn is_page_readable(&self, stamp: FolioStamp, is_page_read: impl FnOnce() -> bool) -> ReadableState {
        // Acquire, partner: the Release in `complete`.
        let word = DescriptorWord(self.word.load(ordering(
            Mutant::ReadableAcquire,
            Ordering::Acquire,
            Ordering::Relaxed,
        )));
        let same = stamp.names(word) || mutant(Mutant::ReadableSequence);
        if word.has(Flags::PARTIAL_UPTODATE) && same && is_page_read() {
            // The bit is looked at after the word: a page that arrived before its folio was let go was the file's.
            ReadableState::Yes
        } else if word.has(Flags::UPTODATE) {
            // Before the lock: a grabber's stops no reader.
            if same { ReadableState::Yes } else { ReadableState::Never }
        } else if word.has(Flags::LOCKED) {
            ReadableState::NotYet
        } else if same {
            ReadableState::Zeros
        } else {
            ReadableState::Never
        }
    }

    /// Whether this folio, which the caller holds, has not left the index since it was held. Surely `false` if the
    /// caller has seen, with Acquire, something that came after it had left.
    #[inline]
    pub fn is_attached(&self, stamp: FolioStamp) -> bool {
        stamp.names(self.word())
    }

    /// Whether the holder of this folio may read all of its bytes, in the index or not.
    #[inline]
    pub fn is_filled(&self) -> bool {
        // Acquire, partner: the Release in `complete`.
        DescriptorWord(self.word.load(Ordering::Acquire)).has(Flags::UPTODATE)
    }

    /// Notes that the bits of the folio's frames are in use. The caller is its fill, and sets them next.
    #[inline]
    pub fn note_pages_read(&self) {
        if !self.word().has(Flags::PARTIAL_UPTODATE) {
            let before = DescriptorWord(self.word.fetch_or(Flags::PARTIAL_UPTODATE, Ordering::Relaxed));
            debug_assert!(before.has(Flags::LOCKED), "{before:?} is not being filled");
        }
    }

    // ---- the folio lock -------------------------------------------------------------------------

    /// Takes the free folio lock of a folio that the caller holds: the word then. Given back by [`Descriptor::unlock`],
    /// or with the hold by [`Descriptor::complete`], if the folio was not up to date and is now.
    pub fn try_lock(&self, stamp: FolioStamp) -> Result<DescriptorWord, LockRefused> {
        // Acquire, partner: the Release in `unlock` and in `complete`: what was done under the lock before.
        let order = ordering(Mutant::LockAcquire, Ordering::Acquire, Ordering::Relaxed);
        let mut word = self.word();
        loop {
            if !stamp.names(word) {
                return Err(LockRefused::Left);
            }
            if word.has(Flags::LOCKED) && !mutant(Mutant::LockTaken) {
                return Err(LockRefused::Locked);
            }
            match self.word.compare_exchange(word.0, word.0 | Flags::LOCKED, order, Ordering::Relaxed) {
                Ok(_) => return Ok(DescriptorWord(word.0 | Flags::LOCKED)),
                Err(now) => word = DescriptorWord(now),
            }
        }
    }

    /// Gives the folio lock back, and leaves `UPTODATE` as it is. The caller keeps its hold, and wakes the threads that
    /// may wait for the lock.
    #[inline]
    pub fn unlock(&self) {
        // Release, partner: the Acquire in `try_lock`.
        let order = ordering(Mutant::UnlockRelease, Ordering::Release, Ordering::Relaxed);
        let before = DescriptorWord(self.word.fetch_and(!Flags::LOCKED, order));
        debug_assert!(before.has(Flags::LOCKED) && before.holds() > 0, "{before:?} was not locked");
    }

    /// The stamp of the caller's own fill, in the index or not.
    #[inline]
    pub fn stamp_of_fill(&self) -> FolioStamp {
        let word = self.word();
        debug_assert!(word.has(Flags::LOCKED) && word.holds() > 0, "{word:?} is not being filled");
        let left = if word.is_live() { 0 } else { SEQUENCE };
        FolioStamp { word: DescriptorWord(word.0.wrapping_sub(left)), first: self.index() }
    }

    /// Gives a hold back.
    #[inline]
    pub fn put(&self) -> PutOutcome {
        // Release, partner: the Acquire here and in `retire_ordering`: this thread's reads of the bytes come before
        // what the thread that frees the frame does with them. Acquire: that may be this thread.
        let order = ordering(Mutant::PutRelease, Ordering::AcqRel, Ordering::Acquire);
        let order = ordering(Mutant::PutAcquire, order, Ordering::Release);
        let (before, after) =
            self.update(order, |word| Some(word - HOLD)).expect("the step is unconditional");
        debug_assert!(before.holds() > 0, "{before:?} is put once too often");
        self.last_or_kept(after)
    }

    /// Counts a user's pin, and says whether it is the only one; the caller has a hold and keeps it as long as the pin.
    /// It calls [`Descriptor::may_have_writers`] next.
    #[inline]
    pub fn pin(&self) -> bool {
        self.pins.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Whether writers may be in the pages of a folio that the caller has just pinned: then it lends the bytes only
    /// after each page was [`has_no_writer`](super::written::has_no_writer). No writer enters after that.
    #[must_use]
    #[inline]
    pub fn may_have_writers(&self) -> bool {
        // SeqCst fence, partner: the one in `written::enter`. Either the writer sees the pin behind its fence; or this
        // thread sees below that the folio is written, and then that the writer is in its page.
        if !mutant(Mutant::PinFence) {
            fence(Ordering::SeqCst);
        }
        self.word().is_written() && !mutant(Mutant::PinWritten)
    }

    /// Gives a pin back, before its hold, and says whether it was the last.
    #[inline]
    pub fn unpin(&self) -> bool {
        // Release, partner: the Acquire in `is_pinned`: what was read under the pin comes before a writer's bytes.
        let order = ordering(Mutant::UnpinRelease, Ordering::Release, Ordering::Relaxed);
        let before = self.pins.fetch_sub(1, order);
        debug_assert!(before > 0, "a pin is given back once");
        before == 1
    }

    // ---- writing in place -----------------------------------------------------------------------

    /// Says that the folio is written from now on; the caller holds it, and enters its pages next
    /// ([`written::enter`](super::written::enter)).
    pub fn begin_writes(&self) -> Result<(), WriteRefused> {
        // Relaxed will do: the fence in `written::enter` comes next, publishes the step, and puts the fill's bytes
        // before this writer's. And being a read-modify-write, the step hands on the Release of `complete`.
        let mut now = self.word();
        while now.is_live() && now.has(Flags::STEADY) {
            let order = Ordering::Relaxed;
            match self.word.compare_exchange_weak(now.0, Self::written(now.0), order, order) {
                Ok(_) => return Ok(()),
                Err(other) => now = DescriptorWord(other),
            }
        }
        if !now.is_live() {
            Err(WriteRefused::Left)
        } else if now.is_written() {
            Ok(())
        } else {
            Err(WriteRefused::Filling)
        }
    }

    #[inline]
    fn written(word: u64) -> u64 {
        let step = if mutant(Mutant::WrittenStep) { 0 } else { u64::from(WRITTEN_STEP) * SEQUENCE };
        (word & !Flags::STEADY).wrapping_add(step)
    }

    /// Whether a user's pin forbids a writer who has entered a page of this folio to change it.
    #[inline]
    pub fn is_pinned(&self) -> bool {
        // Acquire, partner: the Release in `unpin`.
        let order = ordering(Mutant::PinnedAcquire, Ordering::Acquire, Ordering::Relaxed);
        self.pins.load(order) > 0 && !mutant(Mutant::WritePins)
    }

    /// The second look of a holder that copied bytes of a steady folio, or of what had arrived of it: whether they may
    /// have changed meanwhile, so that it must copy again, page by page. (A folio that left the index does not matter
    /// to its holder.)
    #[inline]
    pub fn was_written(&self) -> bool {
        // Acquire fence, partner: the fence in `written::enter`: a copied byte of a writer's implies the first writer's
        // step.
        if !mutant(Mutant::HolderFence) {
            fence(Ordering::Acquire);
        }
        self.word().is_written() && !mutant(Mutant::HolderRecheck)
    }

    #[inline]
    fn last_or_kept(&self, after: DescriptorWord) -> PutOutcome {
        let unheld = after.holds() == 0 || mutant(Mutant::PutHolds);
        let last = after.has(Flags::DETACHED) && unheld;
        if last { PutOutcome::Last(after.order()) } else { PutOutcome::Kept }
    }

    // ---- the marker ---------------------------------------------------------------------------

    /// Clears the readahead marker and says whether it was this call that did.
    #[inline]
    pub fn take_marker(&self, stamp: FolioStamp) -> bool {
        let ours = |word: DescriptorWord| {
            (word.sequence() == stamp.word.sequence() || mutant(Mutant::MarkerSequence))
                && (word.has(Flags::MARKER) || mutant(Mutant::MarkerFlag))
        };
        self.update(Ordering::Relaxed, |word| ours(DescriptorWord(word)).then_some(word & !Flags::MARKER))
            .is_some()
    }

    // ---- the working set ----------------------------------------------------------------------

    /// Notes that the folio came back soon after it had been evicted. The caller is its fill.
    #[inline]
    pub fn join_working_set(&self) {
        let before = DescriptorWord(self.word.fetch_or(Flags::WORKINGSET, Ordering::Relaxed));
        debug_assert!(before.has(Flags::LOCKED), "{before:?} is not being filled");
    }

    // ---- drop-behind ----------------------------------------------------------------------------

    /// Clears `DROPBEHIND`: another than an uncached reader or writer uses the folio. The caller holds the tree lock,
    /// and counts dirty pages of such folios.
    #[inline]
    pub fn adopt(&self) {
        self.word.fetch_and(!Flags::DROPBEHIND, Ordering::Relaxed);
    }

    /// As [`Descriptor::adopt`], under the lock of the folio's rings instead; whether it did. A dirty folio stays as it
    /// is, because its pages are counted under the tree lock.
    #[inline]
    pub fn adopt_clean(&self) -> bool {
        let step = |word: u64| (word & Flags::DIRTY == 0).then_some(word & !Flags::DROPBEHIND);
        self.update(Ordering::Relaxed, step).is_some()
    }

    // ---- dirty, and write-back ------------------------------------------------------------------

    /// A page of the folio is dirty; the word before. The caller holds the tree lock, as for those below.
    #[inline]
    pub fn mark_dirty(&self) -> DescriptorWord {
        DescriptorWord(self.word.fetch_or(Flags::DIRTY, Ordering::Relaxed))
    }

    /// No page of the folio is dirty any more.
    #[inline]
    pub fn clear_dirty(&self) {
        self.word.fetch_and(!Flags::DIRTY, Ordering::Relaxed);
    }

    /// A page of the folio is taken for write-back, which holds the folio until [`Descriptor::end_writeback`].
    #[inline]
    pub fn start_writeback(&self) {
        let step = |word: u64| (word & Flags::WRITEBACK == 0).then(|| (word | Flags::WRITEBACK) + HOLD);
        // Relaxed: what was written to the bytes before is in order by the fences of `dirty.rs`.
        self.update(Ordering::Relaxed, step);
    }

    /// No page of the folio is being written any more: gives write-back's hold back.
    #[inline]
    pub fn end_writeback(&self) -> PutOutcome {
        let step = |word: u64| (word & Flags::WRITEBACK != 0).then(|| (word & !Flags::WRITEBACK) - HOLD);
        // AcqRel, partners: those of `put`, for the device's reads of the bytes.
        let (_, after) = self.update(Ordering::AcqRel, step).expect("write-back of a folio ends once");
        self.last_or_kept(after)
    }

    // ---- the arena's use of a frame that is free --------------------------------------------------

    /// Makes this the head of a free run, or not one. The caller owns the frame alone.
    #[inline]
    pub fn set_free(&self, free: Option<Order>) {
        let word = self.word();
        debug_assert!(!word.is_live() || word == DescriptorWord(0), "{word:?} is a folio and cannot be free");
        let sequence = word.0 & !(SEQUENCE - 1) | SEQUENCE;
        let rest = free.map_or(0, |order| Flags::FREE | (u64::from(order.0) << ORDER_SHIFT));
        self.word.store(sequence | rest, Ordering::Relaxed);
    }
    /// The order of the free run this frame heads.
    #[inline]
    pub fn free_order(&self) -> Option<Order> {
        let word = self.word();
        word.has(Flags::FREE).then(|| word.order())
    }
    /// The two numbers of the frame's owner.
    #[inline]
    pub fn links(&self) -> [u32; 2] {
        [self.links[0].load(Ordering::Relaxed), self.links[1].load(Ordering::Relaxed)]
    }
    /// Sets one of the two numbers of the frame's owner.
    #[inline]
    pub fn set_link(&self, which: usize, frame: u32) {
        self.links[which].store(frame, Ordering::Relaxed);
    }

    #[inline]
    fn update(
        &self,
        order: Ordering,
        step: impl Fn(u64) -> Option<u64>,
    ) -> Option<(DescriptorWord, DescriptorWord)> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let next = step(word)?;
            match self.word.compare_exchange_weak(word, next, order, Ordering::Relaxed) {
                Ok(_) => return Some((DescriptorWord(word), DescriptorWord(next))),
                Err(now) => word = now,
            }
        }
    }

    /// Checks this descriptor as the head of an indexed folio. The caller holds the tree lock of `mapping`, and keeps
    /// pins from changing meanwhile.
    pub fn check_folio(
        &self,
        frame: Frame,
        mapping: MappingId,
        index: PageIndex,
    ) -> Result<(), &'static str> {
        let word = self.word();
        if !word.is_live() {
            return Err("a folio in the index has an odd sequence");
        }
        if self.mapping() != mapping {
            return Err("a folio in the index belongs to another mapping");
        }
        if self.index() != index.align_down(word.order()) {
            return Err("a folio stands at an index that is not its own");
        }
        if word.has(Flags::FREE | Flags::DETACHED) {
            return Err("a folio in the index is free or detached");
        }
        if frame.0 & (word.order().pages() - 1) != 0 {
            return Err("a folio's frames are not naturally aligned");
        }
        if self.pins() > word.holds() {
            return Err("a folio has more pins than holds");
        }
        if word.has(Flags::WRITEBACK) && word.holds() == 0 {
            return Err("a folio is being written and no thread holds it");
        }
        if word.has(Flags::WRITEBACK) && !word.has(Flags::UPTODATE) {
            return Err("a folio is being written whose bytes are not there");
        }
        if word.has(Flags::LOCKED) && word.holds() == 0 {
            return Err("a folio is locked and no thread holds it");
        }
        Ok(())
    }
}

#[cfg(all(test, not(quinion_model)))]
mod tests {
    use super::*;

    const FILE: MappingId = MappingId(7);

    fn filled(index: u64, order: u8) -> Descriptor {
        let d = Descriptor::new();
        d.prepare(FILE, PageIndex(index), Order(order));
        assert_eq!(d.complete(), FillEnd::Attached);
        d
    }

    #[test]
    fn a_folio_is_still_the_same_after_its_first_write_and_not_in_another_life() {
        let word = |sequence: u32, flags: u64| DescriptorWord(u64::from(sequence) << 32 | flags);
        let (steady, written) = (Flags::UPTODATE | Flags::STEADY, Flags::UPTODATE);
        assert!(word(8, steady).is_still(8));
        assert!(word(10, written).is_still(8), "the first write steps the sequence by two");
        assert!(!word(10, steady).is_still(8), "so does another life, which begins unwritten");
        assert!(!word(10, Flags::LOCKED).is_still(8));
        assert!(!word(12, written).is_still(8));
        assert!(word(0, written).is_still(u32::MAX - 1), "it wraps");
    }

    #[test]
    fn a_folio_is_readable_only_between_its_fill_and_its_retirement() {
        let d = Descriptor::new();
        assert_eq!(d.begin_read(FILE, PageIndex(8)).unwrap_err(), NotReady::Mismatch);
        d.prepare(FILE, PageIndex(8), Order(2));
        assert_eq!(d.begin_read(FILE, PageIndex(8)).unwrap_err(), NotReady::Filling);
        d.complete();
        let stamp = d.begin_read(FILE, PageIndex(11)).unwrap();
        assert_eq!(stamp.first, PageIndex(8));
        assert!(d.end_read(stamp));
        assert_eq!(d.retire(), RetireOutcome::Free);
        assert!(!d.end_read(stamp));
        assert_eq!(d.begin_read(FILE, PageIndex(8)).unwrap_err(), NotReady::Mismatch);
    }

    #[test]
    fn identity_is_mapping_and_every_covered_index_and_no_other() {
        let d = filled(8, 2);
        for index in 0..32 {
            assert_eq!(d.begin_read(FILE, PageIndex(index)).is_ok(), (8..12).contains(&index), "{index}");
        }
        assert!(d.begin_read(MappingId(8), PageIndex(8)).is_err());
    }

    #[test]
    fn the_last_holder_of_a_detached_folio_frees_it() {
        let d = filled(0, 3);
        d.try_hold(FILE, PageIndex(1)).unwrap();
        d.try_hold(FILE, PageIndex(2)).unwrap();
        assert_eq!(d.try_retire(), None, "a held folio is not evicted");
        assert_eq!(d.retire(), RetireOutcome::Held);
        assert_eq!(d.put(), PutOutcome::Kept);
        assert_eq!(d.put(), PutOutcome::Last(Order(3)));
    }

    #[test]
    fn a_fill_that_ends_after_the_folio_left_frees_it() {
        let d = Descriptor::new();
        d.prepare(FILE, PageIndex(0), Order(0));
        assert_eq!(d.retire(), RetireOutcome::Held);
        assert_eq!(d.complete(), FillEnd::Detached(PutOutcome::Last(Order(0))));
        assert!(d.begin_read(FILE, PageIndex(0)).is_err());
    }

    /// Fails a folio that the device does not deliver: out of the tree, then unlocked.
    fn fail(d: &Descriptor) -> PutOutcome {
        assert_eq!(d.retire(), RetireOutcome::Held, "a fill has a hold");
        match d.complete_empty() {
            FillEnd::Detached(put) => put,
            FillEnd::Attached => panic!("it was just retired"),
        }
    }

    #[test]
    fn a_held_folio_whose_fill_failed_is_freed_by_its_last_holder() {
        let d = Descriptor::new();
        d.prepare(FILE, PageIndex(0), Order(2));
        assert_eq!(fail(&d), PutOutcome::Last(Order(2)), "nobody came: it is the fill's to free");
        d.prepare(FILE, PageIndex(0), Order(2));
        let stamp = d.try_hold_unfilled(FILE, PageIndex(3)).unwrap();
        assert_eq!(d.is_readable(stamp), ReadableState::NotYet);
        assert_eq!(fail(&d), PutOutcome::Kept);
        assert_eq!(d.is_readable(stamp), ReadableState::Never);
        let sequence = d.word().sequence();
        assert_eq!(d.put(), PutOutcome::Last(Order(2)));
        assert_eq!((d.word().sequence(), d.word().holds()), (sequence, 0), "no borrow from the sequence");
    }

    #[test]
    fn an_allocated_folio_is_zeros_until_it_is_filled_under_its_lock() {
        let d = Descriptor::new();
        d.prepare(FILE, PageIndex(0), Order(1));
        let stamp = d.try_hold_unfilled(FILE, PageIndex(1)).unwrap();
        assert!(!d.try_lock_allocated(), "its first fill has the lock");
        assert_eq!(d.complete_empty(), FillEnd::Attached);
        assert_eq!(d.is_readable(stamp), ReadableState::Zeros);
        assert_eq!(d.begin_read(FILE, PageIndex(0)).unwrap_err(), NotReady::Filling, "no hit");
        assert_eq!(d.begin_writes(), Err(WriteRefused::Filling), "and no write in place");
        assert!(d.try_lock_allocated() && !d.try_lock_allocated());
        assert_eq!((d.is_readable(stamp), d.word().holds()), (ReadableState::NotYet, 2));
        assert_eq!(d.complete(), FillEnd::Attached);
        assert_eq!(d.is_readable(stamp), ReadableState::Yes);
        assert!(!d.try_lock_allocated(), "what is up to date is not allocated");
        assert_eq!((d.put(), d.retire()), (PutOutcome::Kept, RetireOutcome::Free));
        assert!(!d.try_lock_allocated());
    }

    #[test]
    fn one_hold_too_many_is_an_answer_and_not_a_carry() {
        let d = filled(0, 0);
        for _ in 0..HOLDS_MAX {
            d.try_hold(FILE, PageIndex(0)).unwrap();
        }
        assert_eq!(d.try_hold(FILE, PageIndex(0)).unwrap_err(), HoldRefused::TooMany);
        assert_eq!(d.word().holds(), HOLDS_MAX);
    }

    #[test]
    fn the_marker_is_taken_once() {
        let d = Descriptor::new();
        d.prepare_with(FILE, PageIndex(0), Order(0), Flags::MARKER);
        d.complete();
        let stamp = d.begin_read(FILE, PageIndex(0)).unwrap();
        assert!(stamp.has_marker());
        assert!(d.take_marker(stamp));
        assert!(!d.take_marker(stamp));
    }

    #[test]
    fn a_folio_of_the_working_set_says_so_to_its_eviction_and_no_longer() {
        let d = Descriptor::new();
        d.prepare_with(FILE, PageIndex(0), Order(3), Flags::MARKER);
        d.join_working_set();
        d.complete();
        let stamp = d.begin_read(FILE, PageIndex(0)).unwrap();
        assert!(d.take_marker(stamp));
        assert_eq!(d.try_retire(), Some(Order(3)));
        assert!(d.word().has(Flags::WORKINGSET));
        d.prepare(FILE, PageIndex(8), Order(0));
        assert!(!d.word().has(Flags::WORKINGSET));
        assert_eq!(d.word().order(), Order(0));
    }

    #[test]
    fn a_folio_drops_behind_from_its_birth_to_its_adoption_and_no_longer() {
        let d = Descriptor::new();
        d.prepare_with(FILE, PageIndex(0), Order(1), Flags::DROPBEHIND | Flags::MARKER);
        d.complete();
        let stamp = d.begin_read(FILE, PageIndex(1)).unwrap();
        assert!(stamp.drops_behind() && stamp.has_marker());
        d.adopt();
        assert!(d.end_read(stamp), "an adoption disturbs no reader");
        let stamp = d.begin_read(FILE, PageIndex(1)).unwrap();
        assert!(!stamp.drops_behind() && stamp.has_marker());
        d.retire();
        d.prepare_with(FILE, PageIndex(0), Order(1), Flags::DROPBEHIND);
        d.retire();
        d.complete();
        d.prepare(FILE, PageIndex(0), Order(0));
        assert!(!d.word().has(Flags::DROPBEHIND), "the next folio is born without");
    }

    #[test]
    fn the_sequence_wraps_and_stays_even() {
        let d = Descriptor::new();
        d.word.store(u64::from(u32::MAX) << 32, Ordering::Relaxed);
        d.prepare(FILE, PageIndex(0), Order(0));
        assert_eq!(d.word().sequence(), 0);
        d.complete();
        assert!(d.begin_read(FILE, PageIndex(0)).is_ok());
    }
}
