//! Dirty: which pages of a file are to be written to it, and which are being written.
//!
//! ```text
//!   index    0   1   2   3   4   5   6   7   8   9  10  11
//!            [---- F ----]   [G]     [------ H ------]         folios
//!   bits      .  d  d  .      d       d  w  .  w               d dirty   w under write-back   (a bit a page)
//!   flags     DIRTY          DIRTY    DIRTY, WRITEBACK         (of each folio, in its descriptor)
//!   marks     D  T            D        D  W                    (of each entry, so that a search skips the rest)
//!
//!   begin_writeback from 0:  run 1..3 of F,  run of G,  the d of H         taken: d -> w, and held
//!   end_writeback of a run:  w -> clean, or -> d if it failed              the last of a folio gives its hold back
//! ```
//!
//! The flags sum the bits (`arena/dirty.rs`) up for a caller that looks at one folio, and the marks for a caller that
//! looks for folios. There is a third mark, **to write**: an integrity sync puts it on every entry that is dirty when
//! it begins ([`MappingGuard::tag_to_write`]) and then takes those and no others, so that a thread that goes on writing
//! does not keep it from ending. The mark goes only when the folio's last dirty page is taken or forgotten: a sync that
//! does not find it finds the page under write-back.
//!
//! All of it changes under the tree lock. Only a writer who finds the bits of its pages set needs none.
//!
//! A folio that **leaves** the index is not dirty any more, and its dirty pages are not written again. Those of it that
//! are being written stay held and counted until that write ends (`detached`), so that a thread that cuts or punches
//! the file can tell when the device has let go.
//!
//! Invariants (asserted by `Mapping::check`):
//!  1. A folio in the index has `DIRTY` exactly while one of its pages has the dirty bit, and its entry the mark;
//!     so `WRITEBACK`. An entry to write is dirty.
//!  2. The counts are those of the bits: dirty pages, pages under write-back, dirty pages of folios that drop behind.
//!  3. A page is taken for write-back only if it is not under write-back: it has one flush at a time.
//!  4. Since when something is dirty is known exactly while something is.
//!
//! Not an invariant: that a page under write-back is clean, or that a folio under write-back is in the index. Nor that
//! the pages of a folio of which one is dirty are all dirty: a folio of 2 MiB with one changed page writes 4 KiB.
//!
//! Locks: the tree lock; nothing is taken from the arena under it, and frames are given back. Cost: a way down for each
//! folio whose flags change, else a step for each 64 pages; a search steps along marked entries only.
//!
//! Kernel cousin: the tags of `mm/page-writeback.c`. This differs: pages of a large folio are told apart.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::arena::dirty::{BitTable, after_bytes, before_flush};
use crate::arena::pages_read::words;
use crate::arena::{Flags, PutOutcome, View};
use crate::backend::FillRun;
use crate::folio::HeldFolio;
use crate::units::{Frame, Millis, Order, PageIndex};
use crate::xarray::{Entry, INDICES_MAX, Kind, Mark};

use super::dirty_counts::NEVER;
use super::new_folio::FolioLifetime;
use super::owner::{Mapping, MappingGuard};

pub(super) const DIRTY: Mark = Mark::Zero;
/// The mark of a dirty entry that a sync is about to write.
pub(super) const TO_WRITE: Mark = Mark::One;
pub(super) const WRITEBACK: Mark = Mark::Two;

/// Pages of the longest run that is taken for one flush: 1 MiB.
pub const RUN_PAGES_MAX: u32 = 256;
/// Entries that are tagged under one hold of the lock.
pub const TAGGED_MAX: usize = 4096;
/// Entries that are looked at for write-back under one hold of the lock.
const ENTRIES_MAX: usize = 1024;
/// Entries that are listed at a time.
const ENTRIES_BATCH: usize = 64;

/// The outcome of marking pages dirty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MarkOutcome {
    /// The pages are dirty; `newly` of them were not before.
    Done {
        /// Pages that were not dirty before.
        newly: u32,
    },
    /// The folio has left the index, or one of them: bytes written there are lost with it. The caller writes it anew.
    Left,
}

/// Which pages are taken for write-back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TakeFilter {
    /// All that are dirty, but for those under write-back, which are passed over.
    Dirty,
    /// Dirty pages of tagged entries. One that is under write-back as well ends the call: the caller waits for it.
    ToWrite,
}

/// Pages that were taken for write-back: they follow each other in the file and in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WritebackRun {
    pub index: PageIndex,
    /// The frame of the first page; the others follow.
    pub frame: Frame,
    /// How many pages; [`RUN_PAGES_MAX`] at most.
    pub pages: u32,
}

impl WritebackRun {
    /// The first page behind it.
    pub fn end(&self) -> PageIndex {
        self.index.plus(u64::from(self.pages))
    }
}

/// Where a call that takes pages for write-back has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TakeEnd {
    /// At the end of its range: no page of it is left.
    Done,
    /// Before this page, because enough was taken, or looked at: come again from there.
    More(PageIndex),
    /// Before this page, which was changed while it is being written ([`TakeFilter::ToWrite`] only): come again from
    /// there when that has ended.
    Busy(PageIndex),
}

/// How write-back of a run has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WritebackOutcome {
    /// The file has the bytes.
    Written,
    /// The file does not have the bytes, or not surely: the pages are dirty again.
    Failed,
}

/// The outcome of a run's write-back.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct WritebackEnd {
    /// Pages that are dirty again because they failed; not those that were changed meanwhile.
    pub failed: u32,
    /// Pages of folios that had left the index: they are not written again.
    pub left: u32,
    /// The range of those folios of the run that are clean now and that only uncached writers used: the caller passes
    /// it to [`Mapping::drop_behind`]. `None`: there are none.
    pub behind: Option<Range<PageIndex>>,
}

impl Mapping {
    /// Whether all of `pages`, which the caller has changed and whose folio it holds, are dirty already, so that they
    /// are written after this call, whoever takes them. If not, it marks them. Takes no lock.
    ///
    /// # Panics
    /// If the folio does not cover the pages.
    pub fn is_dirty(&self, held: &HeldFolio<'_>, pages: Range<PageIndex>) -> bool {
        let (frame, pages) = frames_of(held.frame(), held.first(), held.order(), &pages);
        after_bytes(); // w2 of `arena/dirty.rs`
        self.view().count_bits(BitTable::Dirty, frame, pages) == pages
    }

    /// Whether a page of a held folio is dirty, by a look that orders nothing; for a caller that looks again, by
    /// [`Mapping::is_page_dirty`], when it has changed the page.
    #[inline]
    pub fn seems_dirty(&self, held: &HeldFolio<'_>, page: PageIndex) -> bool {
        let inside = page.0.wrapping_sub(held.first().0);
        inside < u64::from(held.order().pages())
            && self.view().has_bit(BitTable::Dirty, held.frame().plus(inside as u32))
    }

    /// As [`Mapping::is_dirty`], of one page.
    #[inline]
    pub fn is_page_dirty(&self, held: &HeldFolio<'_>, page: PageIndex) -> bool {
        after_bytes(); // w2 of `arena/dirty.rs`
        self.seems_dirty(held, page)
    }

    /// A folio that has been taken out of the tree is retired next, whoever holds it: it is not dirty any more.
    pub(super) fn forget_leaving(&self, frame: Frame, order: Order) {
        let (view, word) = (self.view(), self.view().own(frame).word());
        if word.has(Flags::DIRTY) {
            let pages = view.clear_bits(BitTable::Dirty, frame, order.pages());
            view.own(frame).clear_dirty();
            self.writeback().dirty.cleaned(pages, FolioLifetime::of(word));
        }
        if word.has(Flags::WRITEBACK) {
            let pages = view.count_bits(BitTable::Writeback, frame, order.pages());
            self.writeback().dirty.detached.fetch_add(u64::from(pages), Ordering::Relaxed);
        }
    }

    /// A reader or writer that is not uncached uses the folio: it no longer drops behind.
    pub(super) fn adopt(&self, frame: Frame) {
        let descriptor = self.view().own(frame);
        let word = descriptor.word();
        if word.has(Flags::DROPBEHIND) && word.has(Flags::DIRTY) {
            let pages = self.view().count_bits(BitTable::Dirty, frame, word.order().pages());
            self.writeback().dirty.sub(|pages| &pages.behind, pages);
        }
        descriptor.adopt();
    }

    /// The head of the folio of this mapping that write-back holds and of which `frame` holds the page at `index`.
    fn under_writeback(&self, frame: Frame, index: PageIndex) -> Option<Frame> {
        (0..=Order::MAX.0).find_map(|order| {
            let head = Frame(frame.0 & !(Order(order).pages() - 1));
            let descriptor = self.view().descriptor(head)?;
            let (word, inside) = (descriptor.word(), frame.0 - head.0);
            let covers = word.has(Flags::WRITEBACK) && inside < word.order().pages();
            let ours =
                || descriptor.mapping() == self.id() && descriptor.index().plus(u64::from(inside)) == index;
            (covers && ours()).then_some(head)
        })
    }
}

impl MappingGuard<'_> {
    /// Marks `pages`, which lie in the held folio, dirty at the moment `now`. A writer that has changed bytes calls
    /// this unless [`Mapping::is_dirty`] says that there is no need.
    ///
    /// # Panics
    /// As [`Mapping::is_dirty`].
    pub fn mark_dirty(&mut self, held: &HeldFolio<'_>, pages: Range<PageIndex>, now: Millis) -> MarkOutcome {
        self.mark_folio(held.frame(), pages, now)
    }

    /// As [`MappingGuard::mark_dirty`], all pages of the folios of `run`, which the caller has inserted and filled by
    /// itself, and has yet to complete. If some have left, the others are dirty all the same.
    pub fn mark_run_dirty(&mut self, run: FillRun, now: Millis) -> MarkOutcome {
        let (mut page, mut newly, mut left) = (0, 0, false);
        while page < run.pages {
            let (index, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
            let pages = self.mapping.view().own(frame).word().order().pages();
            match self.mark_folio(frame, index..index.plus(u64::from(pages)), now) {
                MarkOutcome::Done { newly: more } => newly += more,
                MarkOutcome::Left => left = true,
            }
            page += pages;
        }
        if left { MarkOutcome::Left } else { MarkOutcome::Done { newly } }
    }

    /// Marks pages of the folio that `frame` heads, which the caller holds.
    pub(super) fn mark_folio(&mut self, frame: Frame, pages: Range<PageIndex>, now: Millis) -> MarkOutcome {
        let mapping = self.mapping;
        let descriptor = mapping.view().own(frame);
        let (word, first) = (descriptor.word(), descriptor.index());
        if !word.is_live() {
            return MarkOutcome::Left; // it is retired under this lock, so as long as it is live it is in the index
        }
        debug_assert_eq!(descriptor.mapping(), mapping.id(), "{frame:?} is this mapping's");
        let (from, pages) = frames_of(frame, first, word.order(), &pages);
        let newly = mapping.view().set_bits(BitTable::Dirty, from, pages);
        if newly > 0 {
            let before = descriptor.mark_dirty();
            if !before.has(Flags::DIRTY) {
                self.remark(first, &[DIRTY], &[]);
            }
            mapping.writeback().dirty.dirtied(newly, FolioLifetime::of(before), now);
        }
        MarkOutcome::Done { newly }
    }

    /// A reader or writer that is not uncached uses the held folio, so it stays in the cache after its write-back.
    pub fn adopt(&mut self, held: &HeldFolio<'_>) {
        if self.mapping.view().own(held.frame()).word().is_live() {
            self.mapping.adopt(held.frame());
        }
    }

    /// Tags the dirty entries that meet `pages` as to be written, [`TAGGED_MAX`] of them at most. Returns where to go
    /// on, in another hold of the lock; the end of `pages` when it is done.
    pub fn tag_to_write(&mut self, pages: Range<PageIndex>) -> PageIndex {
        if pages.is_empty() {
            return pages.end;
        }
        let nodes = self.mapping.nodes();
        let mut tree = self.xarray(&nodes);
        let next = tree.mark_marked(pages.start.0, pages.end.0 - 1, DIRTY, TO_WRITE, TAGGED_MAX);
        next.map_or(pages.end, PageIndex)
    }

    /// Takes dirty pages of `pages`, in rising order, for write-back: at most `pages_max` of them, added to `out` as
    /// runs. The caller has each written, and then calls [`MappingGuard::end_writeback`] for each; until then
    /// write-back holds their folios. The bytes that it reads from now on are those written before the pages were
    /// marked, or newer ones.
    pub fn begin_writeback(
        &mut self,
        pages: Range<PageIndex>,
        which: TakeFilter,
        pages_max: u32,
        out: &mut Vec<WritebackRun>,
    ) -> TakeEnd {
        let mut taking = TakeProgress { which, left: pages_max, first: out.len(), out };
        let begun = self.take_from(pages, &mut taking);
        before_flush(); // b2 of `arena/dirty.rs`
        begun
    }

    /// As [`MappingGuard::begin_writeback`], without the fence.
    fn take_from(&mut self, pages: Range<PageIndex>, taking: &mut TakeProgress<'_>) -> TakeEnd {
        let mark = match taking.which {
            TakeFilter::Dirty => DIRTY,
            TakeFilter::ToWrite => TO_WRITE,
        };
        let mut at = pages.start;
        for _ in 0..ENTRIES_MAX / ENTRIES_BATCH {
            let found = self.marked(at..pages.end, mark, ENTRIES_BATCH);
            for folio in &found {
                let wanted = at.max(folio.first)..folio.end().min(pages.end);
                match self.take_of(folio, wanted, taking) {
                    TakeEnd::Done => at = folio.end(),
                    stopped => return stopped,
                }
            }
            if found.len() < ENTRIES_BATCH || at >= pages.end {
                return TakeEnd::Done;
            }
        }
        TakeEnd::More(at)
    }

    fn take_of(
        &mut self,
        folio: &TreeFolio,
        wanted: Range<PageIndex>,
        taking: &mut TakeProgress<'_>,
    ) -> TakeEnd {
        let view = self.mapping.view();
        let end = folio.frame_of(wanted.end);
        let (mut at, mut taken, mut begun) = (folio.frame_of(wanted.start), 0, TakeEnd::Done);
        while let Some(next) = next_dirty(view, at, end) {
            if next.is_busy && taking.which == TakeFilter::ToWrite {
                begun = TakeEnd::Busy(folio.page_of(next.frame));
                break;
            }
            at = next.frame.plus(next.pages);
            if next.is_busy {
                continue;
            }
            let some = next.pages.min(taking.left);
            if some > 0 {
                let cleared = view.clear_bits(BitTable::Dirty, next.frame, some);
                let set = view.set_bits(BitTable::Writeback, next.frame, some);
                debug_assert!(
                    cleared == some && set == some,
                    "what is taken was dirty, and not being written"
                );
                taking.push(folio.page_of(next.frame), next.frame, some);
                taken += some;
            }
            if some < next.pages {
                begun = TakeEnd::More(folio.page_of(next.frame.plus(some)));
                break;
            }
        }
        if taken > 0 {
            self.note_taken(folio, taken);
        }
        begun
    }

    fn note_taken(&mut self, folio: &TreeFolio, pages: u32) {
        let mapping = self.mapping;
        let descriptor = mapping.view().own(folio.frame);
        let before = descriptor.word();
        descriptor.start_writeback();
        mapping.writeback().dirty.cleaned(pages, FolioLifetime::of(before));
        mapping.writeback().dirty.add(|pages| &pages.writeback, pages);
        let begins: &[Mark] = if before.has(Flags::WRITEBACK) { &[] } else { &[WRITEBACK] };
        self.settle_clean(folio, begins);
    }

    /// If no page of the folio is dirty any more, its flag and its marks say so. Its entry gets the marks in `give`.
    fn settle_clean(&mut self, folio: &TreeFolio, give: &[Mark]) {
        let view = self.mapping.view();
        let clean = view.count_bits(BitTable::Dirty, folio.frame, folio.order.pages()) == 0;
        if clean {
            view.own(folio.frame).clear_dirty();
        }
        self.remark(folio.first, give, if clean { &[DIRTY, TO_WRITE] } else { &[] });
    }

    /// After a cut under this hold of the lock of a folio that was not under write-back, one of the pieces, which
    /// stands at `first`, is dirty if one of its own pages is. The counts stay, if the pieces drop behind as the whole.
    pub fn settle_split(&mut self, first: PageIndex, frame: Frame, order: Order) {
        let view = self.mapping.view();
        let dirty = view.count_bits(BitTable::Dirty, frame, order.pages()) > 0;
        if dirty {
            view.own(frame).mark_dirty();
        }
        self.settle_clean(&TreeFolio { first, frame, order }, if dirty { &[DIRTY] } else { &[] });
    }

    /// Write-back of `run`, or of whole pages of it, has ended, at the moment `now`. The pages are dirty again if that
    /// failed, unless their folio has left the index; the last of a folio gives write-back's hold back. The caller
    /// wakes those that wait for them, when it has let go of the lock.
    pub fn end_writeback(
        &mut self,
        run: WritebackRun,
        outcome: WritebackOutcome,
        now: Millis,
    ) -> WritebackEnd {
        let mapping = self.mapping;
        let (mut page, mut ended, mut free) = (0, WritebackEnd::default(), Vec::new());
        while page < run.pages {
            let (index, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
            let head = mapping.under_writeback(frame, index).expect("what is ended was begun");
            let descriptor = mapping.view().own(head);
            let (first, order) = (descriptor.index(), descriptor.word().order());
            let folio = TreeFolio { first, frame: head, order };
            let pages = (run.pages - page).min(head.0 + order.pages() - frame.0);
            let cleared = mapping.view().clear_bits(BitTable::Writeback, frame, pages);
            debug_assert_eq!(cleared, pages, "write-back of a page ends once");
            mapping.writeback().dirty.sub(|pages| &pages.writeback, pages);
            if !descriptor.word().is_live() {
                mapping.writeback().dirty.detached.fetch_sub(u64::from(pages), Ordering::Relaxed);
                ended.left += pages;
            } else if outcome == WritebackOutcome::Failed {
                match self.mark_folio(head, index..index.plus(u64::from(pages)), now) {
                    MarkOutcome::Done { newly } => ended.failed += newly,
                    MarkOutcome::Left => unreachable!("it is live, and the lock is held"),
                }
            }
            self.end_folio(&folio, &mut ended, &mut free);
            page += pages;
        }
        mapping.arena().free_all(&free);
        ended
    }

    fn end_folio(&mut self, folio: &TreeFolio, ended: &mut WritebackEnd, free: &mut Vec<(Frame, Order)>) {
        let view = self.mapping.view();
        if view.count_bits(BitTable::Writeback, folio.frame, folio.order.pages()) > 0 {
            return;
        }
        let word = view.own(folio.frame).word();
        if word.is_live() {
            self.remark(folio.first, &[], &[WRITEBACK]);
            if word.has(Flags::DROPBEHIND) && !word.has(Flags::DIRTY) {
                ended.add_behind(folio.first..folio.end());
            }
        }
        match view.own(folio.frame).end_writeback() {
            PutOutcome::Kept => {}
            PutOutcome::Last(order) => free.push((folio.frame, order)),
        }
    }

    /// Clears the dirty state of `pages`, whose bytes are no longer wanted, and returns how many were dirty. The thread
    /// that takes folios out of the index forgets them by itself.
    pub fn forget_dirty(&mut self, pages: Range<PageIndex>) -> u64 {
        let (mut at, mut forgotten) = (pages.start, 0);
        loop {
            let found = self.marked(at..pages.end, DIRTY, ENTRIES_BATCH);
            for folio in &found {
                let (from, end) = (folio.first.max(pages.start), folio.end().min(pages.end));
                let (view, frame) = (self.mapping.view(), folio.frame_of(from));
                let cleared = view.clear_bits(BitTable::Dirty, frame, (end.0 - from.0) as u32);
                let fate = FolioLifetime::of(view.own(folio.frame).word());
                self.mapping.writeback().dirty.cleaned(cleared, fate);
                self.settle_clean(folio, &[]);
                forgotten += u64::from(cleared);
                at = folio.end();
            }
            if found.len() < ENTRIES_BATCH {
                return forgotten;
            }
        }
    }

    /// All pages that were dirty at the moment `then` have been taken for write-back since.
    pub fn note_round(&mut self, then: Millis) {
        let since = &self.mapping.writeback().dirty.since;
        let now = since.load(Ordering::Relaxed);
        if now != NEVER {
            since.store(now.max(then.0.min(NEVER - 1)), Ordering::Relaxed);
        }
    }

    /// The cached and filled pages of `pages` are dirty, at the moment `now`: the file may lose them. Returns how many.
    pub fn mark_cached_dirty(&mut self, pages: Range<PageIndex>, now: Millis) -> u64 {
        let (mut at, mut cached) = (pages.start, 0);
        while at < pages.end {
            let folios = self.folios_from(at..pages.end, ENTRIES_BATCH);
            at = if folios.len() < ENTRIES_BATCH { pages.end } else { folios[ENTRIES_BATCH - 1].end() };
            for folio in folios {
                let meant = folio.first.max(pages.start)..folio.end().min(pages.end);
                if self.mapping.view().own(folio.frame).word().has(Flags::UPTODATE) {
                    cached += meant.end.0 - meant.start.0;
                    let marked = self.mark_folio(folio.frame, meant, now);
                    debug_assert_ne!(marked, MarkOutcome::Left, "it stands in the tree");
                }
            }
        }
        cached
    }

    fn folios_from(&self, pages: Range<PageIndex>, max: usize) -> Vec<TreeFolio> {
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        let folio = |(first, entry, order): (u64, Entry, u8)| match entry.kind() {
            Kind::Folio(frame) => {
                Some(TreeFolio { first: PageIndex(first), frame: Frame(frame), order: Order(order) })
            }
            _ => None,
        };
        tree.range(pages.start.0, pages.end.0 - 1).filter_map(folio).take(max).collect()
    }

    /// The first page of `pages` that is dirty.
    pub fn next_dirty(&self, pages: Range<PageIndex>) -> Option<PageIndex> {
        self.next_with(pages, DIRTY, BitTable::Dirty)
    }

    /// The first page of `pages` that is under write-back. Folios that have left the index are not found
    /// ([`WritebackState::detached_pages`](super::WritebackState::detached_pages)).
    pub fn next_writeback(&self, pages: Range<PageIndex>) -> Option<PageIndex> {
        self.next_with(pages, WRITEBACK, BitTable::Writeback)
    }

    fn next_with(&self, pages: Range<PageIndex>, mark: Mark, bits: BitTable) -> Option<PageIndex> {
        let mut at = pages.start;
        // An entry is found for any of its pages: those that are meant may be others.
        while let Some(folio) = self.marked(at..pages.end, mark, 1).first() {
            let (from, end) = (folio.first.max(at), folio.end().min(pages.end));
            let is_set = |page: &u64| {
                let frame = folio.frame_of(PageIndex(*page));
                self.mapping.view().count_bits(bits, frame, 1) == 1
            };
            let found = (from.0..end.0).find(is_set);
            if found.is_some() {
                return found.map(PageIndex);
            }
            at = folio.end();
        }
        None
    }

    fn marked(&self, pages: Range<PageIndex>, mark: Mark, max: usize) -> Vec<TreeFolio> {
        if pages.is_empty() {
            return Vec::new();
        }
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        let folio = |(first, entry, order): (u64, Entry, u8)| match entry.kind() {
            Kind::Folio(frame) => {
                TreeFolio { first: PageIndex(first), frame: Frame(frame), order: Order(order) }
            }
            _ => unreachable!("what carries a mark is a folio"),
        };
        tree.marked(pages.start.0, pages.end.0 - 1, mark).take(max).map(folio).collect()
    }

    fn remark(&mut self, index: PageIndex, give: &[Mark], take: &[Mark]) {
        if !give.is_empty() || !take.is_empty() {
            let nodes = self.mapping.nodes();
            self.xarray(&nodes).remark(index.0, give, take);
        }
    }

    /// The part of `Mapping::check` about dirty pages: flags and marks of each folio, and the counts of all.
    pub(super) fn check_dirty(&self) -> Result<(), String> {
        let (mapping, nodes) = (self.mapping, self.mapping.nodes());
        let (view, tree) = (mapping.view(), self.xarray(&nodes));
        let (mut dirty, mut writeback, mut behind) = (0, 0, 0);
        for (first, entry, order) in tree.range(0, INDICES_MAX - 1) {
            let Kind::Folio(frame) = entry.kind() else { continue };
            let word = view.own(Frame(frame)).word();
            let count = |bits| u64::from(view.count_bits(bits, Frame(frame), Order(order).pages()));
            let (d, w) = (count(BitTable::Dirty), count(BitTable::Writeback));
            let marked = |mark| tree.has_mark(first, mark);
            let (flag_d, flag_w) = (word.has(Flags::DIRTY), word.has(Flags::WRITEBACK));
            if (d > 0, w > 0) != (flag_d, flag_w) || (flag_d, flag_w) != (marked(DIRTY), marked(WRITEBACK)) {
                return Err(format!("page {first}: {d} dirty, {w} written; {word:?}; marks differ"));
            }
            if marked(TO_WRITE) && !flag_d {
                return Err(format!("page {first} is to be written and not dirty"));
            }
            (dirty, writeback) = (dirty + d, writeback + w);
            behind += if word.has(Flags::DROPBEHIND) { d } else { 0 };
        }
        let own = &mapping.writeback().dirty.own;
        let counted = (own.dirty(), own.writeback(), own.drop_behind());
        let found = (dirty, writeback + mapping.writeback().detached_pages(), behind);
        if counted != found {
            return Err(format!("dirty, written, behind: {counted:?} are counted, {found:?} found"));
        }
        if mapping.writeback().dirty_since().is_some() != (dirty > 0) {
            return Err(format!("{dirty} pages are dirty since {:?}", mapping.writeback().dirty_since()));
        }
        Ok(())
    }
}

impl WritebackEnd {
    fn add_behind(&mut self, pages: Range<PageIndex>) {
        self.behind = Some(match self.behind.take() {
            Some(behind) => behind.start.min(pages.start)..behind.end.max(pages.end),
            None => pages,
        });
    }
}

#[derive(Clone, Copy, Debug)]
struct TreeFolio {
    first: PageIndex,
    frame: Frame,
    order: Order,
}

impl TreeFolio {
    fn end(&self) -> PageIndex {
        self.first.plus(u64::from(self.order.pages()))
    }
    fn frame_of(&self, page: PageIndex) -> Frame {
        self.frame.plus((page.0 - self.first.0) as u32)
    }
    fn page_of(&self, frame: Frame) -> PageIndex {
        self.first.plus(u64::from(frame.0 - self.frame.0))
    }
}

#[derive(Debug)]
struct TakeProgress<'o> {
    which: TakeFilter,
    left: u32,
    /// Where its runs begin in `out`.
    first: usize,
    out: &'o mut Vec<WritebackRun>,
}

impl TakeProgress<'_> {
    /// Adds pages: to the last run, as far as they follow it.
    fn push(&mut self, mut index: PageIndex, mut frame: Frame, mut pages: u32) {
        self.left -= pages;
        if let Some(last) = self.out[self.first..].last_mut()
            && (last.end(), last.frame.plus(last.pages)) == (index, frame)
        {
            let some = pages.min(RUN_PAGES_MAX - last.pages);
            last.pages += some;
            (index, frame, pages) = (index.plus(u64::from(some)), frame.plus(some), pages - some);
        }
        while pages > 0 {
            let some = pages.min(RUN_PAGES_MAX);
            self.out.push(WritebackRun { index, frame, pages: some });
            (index, frame, pages) = (index.plus(u64::from(some)), frame.plus(some), pages - some);
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct DirtyRange {
    frame: Frame,
    pages: u32,
    is_busy: bool,
}

/// The next of them from frame `from` on and before `end`, as far as their bits share a word.
fn next_dirty(view: &View, from: Frame, end: Frame) -> Option<DirtyRange> {
    words(from, end.0 - from.0).find_map(|(first, mask)| {
        let dirty = view.bits_around(BitTable::Dirty, first) & mask;
        if dirty == 0 {
            return None;
        }
        let (bit, busy) = (dirty.trailing_zeros(), view.bits_around(BitTable::Writeback, first));
        let is_busy = busy >> bit & 1 == 1;
        let alike = dirty & if is_busy { busy } else { !busy };
        Some(DirtyRange { frame: first.plus(bit), pages: (alike >> bit).trailing_ones(), is_busy })
    })
}

fn frames_of(head: Frame, first: PageIndex, order: Order, pages: &Range<PageIndex>) -> (Frame, u32) {
    let end = first.plus(u64::from(order.pages()));
    assert!(
        first <= pages.start && pages.start <= pages.end && pages.end <= end,
        "the folio covers the pages"
    );
    (head.plus((pages.start.0 - first.0) as u32), (pages.end.0 - pages.start.0) as u32)
}
