//! PendingCopy: pages that arrived while the disk tier was behind, by where they are in memory, until they are copied.
//!
//! ```text
//!   arrival, refused by the disk --> [ folio | folio | folio ... ]   the oldest goes if there are too many
//!                                       |
//!   later, the disk has room:           1 look    this frame, mapping, page and sequence, up to date and steady?
//!                                       2 copy    into a buffer, under the hit protocol
//!                                       3 look    the same sequence still?    yes: to the disk    no: left out
//! ```
//!
//! **What must not happen.** Bytes that are put on the disk under a content's name are given out under it for years. So
//! it is not enough that a page is cached, of the right file, and up to date: the file may have been forgotten and
//! filled again, written by a second handle, or cut.
//!
//! **Why it cannot.** An entry is the folio that one arrival has filled, named by its frame and the sequence in its
//! descriptor, read while the fill holds the folio. A sequence names one folio for good: it steps when the folio leaves
//! the index, when it is split and when its bytes are first changed in place (`arena/descriptor.rs`). So a later look
//! that finds the same sequence, and the flag that the fill has ended, has found the bytes that this very fill was
//! given. The copy is a reader's (`folio/mod.rs`, the hit protocol), with that one condition more.
//!
//! Mapping and page are compared as well. A sequence wraps after 2^29 folios of one frame at the soonest; after these
//! it would still have to be the same page of the same mapping. Neither file, version nor backend is asked: none of
//! them decides which bytes are in the frame.
//!
//! The look is no read: it sets no referenced byte, counts nothing, holds nothing and takes no lock.
//!
//! Invariants:
//!  1. The bytes that [`PendingCopy::peek`] has copied, when it says `true`, are those that arrived for its key.
//!  2. There are [`PENDING_MAX`] entries at most, of 32 bytes. None keeps a file, a mapping or a backend; but each its
//!     content's key, which the entries of one open share: some MiB more, if each is of a content that is gone.
//!
//! Not an invariant: that pending pages are still in memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use quinion_disk::ContentKey;

use super::FillRun;
use crate::arena::View;
use crate::folio::copy;
use crate::units::{Frame, MappingId, PAGE_SIZE, PageIndex};

/// Entries at most; each is of one folio. 2 MiB of heap.
pub(super) const PENDING_MAX: usize = 1 << 16;

#[derive(Clone, Debug)]
pub(super) struct PendingCopy {
    key: Arc<ContentKey>,
    first: PageIndex,
    mapping: MappingId,
    /// The first frame of the folio.
    frame: Frame,
    sequence: u32,
    pages: u16,
    /// Whether they had arrived before, and so are worth a place on a full disk.
    is_known: bool,
}

const _: () = assert!(size_of::<PendingCopy>() == 32);

/// A fill that the tier did not take as a whole.
pub(super) struct Arrival<'k> {
    pub key: &'k Arc<ContentKey>,
    pub run: FillRun,
    /// The pages of the run that it did not take.
    pub wanted: Range<u32>,
    /// Whether they had arrived before, and so are worth a place on a full disk.
    pub is_known: bool,
}

impl PendingCopy {
    /// Copies of an arrived run's folios: to be made by the sink of its fill, before the fill is ended.
    pub(super) fn of_arrival(view: &View, arrival: Arrival<'_>) -> impl Iterator<Item = Self> {
        let Arrival { key, run, wanted, is_known } = arrival;
        let mut at = 0;
        let folios = std::iter::from_fn(move || {
            (at < wanted.end).then(|| {
                // The fill holds its folios, so their frames head no others before it has ended.
                let (first, frame) = (at, run.frame.plus(at));
                let descriptor = view.own(frame);
                let word = descriptor.word();
                at += word.order().pages();
                let pages = first.max(wanted.start)..at.min(wanted.end);
                // One that has left the index meanwhile is not live.
                let is_there = word.is_live() && descriptor.index() == run.index.plus(first.into());
                (is_there && !pages.is_empty()).then(|| Self {
                    key: Arc::clone(key),
                    first: run.index.plus(pages.start.into()),
                    mapping: descriptor.mapping(),
                    frame,
                    sequence: word.sequence(),
                    pages: pages.len() as u16,
                    is_known,
                })
            })
        });
        folios.flatten()
    }

    pub(super) fn key(&self) -> &ContentKey {
        &self.key
    }
    pub(super) fn first(&self) -> PageIndex {
        self.first
    }
    pub(super) fn pages(&self) -> u64 {
        self.pages.into()
    }
    pub(super) fn bytes(&self) -> usize {
        usize::from(self.pages) * PAGE_SIZE
    }
    pub(super) fn is_known(&self) -> bool {
        self.is_known
    }

    /// The first so many of its pages, which are fewer than it has; it keeps the others.
    fn split_off_first(&mut self, pages: u16) -> Self {
        let first = Self { pages, ..self.clone() };
        (self.first, self.pages) = (self.first.plus(pages.into()), self.pages - pages);
        first
    }

    fn is_followed_by(&self, next: &Self) -> bool {
        self.first.plus(self.pages()) == next.first && self.key == next.key
    }

    /// `false`: the pages have changed since the arrival, or may have, and the content of `to` is arbitrary. Takes no
    /// lock.
    pub(super) fn peek(&self, view: &View, to: &mut [u8]) -> bool {
        assert_eq!(to.len(), self.bytes());
        let (Some(descriptor), Some(from)) = (view.descriptor(self.frame), view.bytes(self.frame)) else {
            return false;
        };
        // 1 A folio that is written is refused by `begin_read`, and its sequence is another.
        let Ok(ticket) = descriptor.begin_read(self.mapping, self.first) else { return false };
        let page = self.first.0 - ticket.first.0;
        if ticket.sequence() != self.sequence || page + self.pages() > u64::from(ticket.order().pages()) {
            return false;
        }
        // 2 SAFETY: the pages are inside a folio that was live at the first look, so inside the arena; it stays mapped,
        // whatever becomes of the folio, and a copy that others wrote over meanwhile is thrown away below. `to` is a
        // slice.
        unsafe { copy::copy_out(from.add(page as usize * PAGE_SIZE), to.as_mut_ptr(), to.len()) };
        // 3
        descriptor.end_read(ticket)
    }
}

#[derive(Debug)]
pub(super) struct PendingCopies {
    entries: VecDeque<PendingCopy>,
    entries_max: usize,
    pages: u64,
    pushes: u64,
}

impl PendingCopies {
    pub(super) fn new(entries_max: usize) -> Self {
        // At once, so that no arrival waits for a larger place; memory that is not used costs nothing.
        Self { entries: VecDeque::with_capacity(entries_max), entries_max, pages: 0, pushes: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    pub(super) fn pushes(&self) -> u64 {
        self.pushes
    }

    /// Returns the pages that had to go for it: the oldest, which leave memory first.
    pub(super) fn push(&mut self, pending: PendingCopy) -> u64 {
        let full = self.entries.len() == self.entries_max;
        let gone = if full { self.entries.pop_front().map_or(0, |oldest| oldest.pages()) } else { 0 };
        self.pages = self.pages + pending.pages() - gone;
        self.pushes += 1;
        self.entries.push_back(pending);
        gone
    }

    /// Takes the oldest, and those that follow it in the list and in the content: `pages_max` pages together.
    pub(super) fn take(&mut self, pages_max: u64) -> Vec<PendingCopy> {
        if let Some(oldest) = self.entries.front_mut()
            && oldest.pages() > pages_max
        {
            self.pages -= pages_max;
            return vec![oldest.split_off_first(pages_max as u16)];
        }
        let mut taken: Vec<PendingCopy> = Vec::new();
        let mut pages = 0;
        while let Some(next) = self.entries.front()
            && taken.last().is_none_or(|last| last.is_followed_by(next) && pages + next.pages() <= pages_max)
        {
            pages += next.pages();
            taken.extend(self.entries.pop_front());
        }
        self.pages -= pages;
        taken
    }

    /// Puts the taken copies back, as the oldest again. Returns the pages for which there is no place any more.
    pub(super) fn put_back(&mut self, taken: impl DoubleEndedIterator<Item = PendingCopy>) -> u64 {
        let mut gone = 0;
        for pending in taken.rev() {
            if self.entries.len() == self.entries_max {
                gone += pending.pages();
            } else {
                self.pages += pending.pages();
                self.entries.push_front(pending);
            }
        }
        gone
    }

    pub(super) fn clear(&mut self) -> u64 {
        self.entries.clear();
        std::mem::take(&mut self.pages)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;
    use crate::arena::{Arena, ArenaOptions, Descriptor, before_bytes};
    use crate::units::Order;

    const ORDER: Order = Order(2);
    const MAPPING: MappingId = MappingId(7);
    const FIRST: PageIndex = PageIndex(8);

    fn arena() -> Arena {
        Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap()
    }

    fn key(of: u8) -> Arc<ContentKey> {
        Arc::new(ContentKey([of; 32]))
    }

    fn filling(arena: &Arena) -> (Frame, &Descriptor) {
        let frame = arena.alloc(ORDER).unwrap();
        put_numbers(arena, frame, 1);
        arena.view().own(frame).prepare(MAPPING, FIRST, ORDER);
        (frame, arena.view().own(frame))
    }

    fn put_numbers(arena: &Arena, frame: Frame, first: u8) {
        for page in 0..4 {
            let to = arena.view().bytes(frame.plus(page)).unwrap();
            // SAFETY: the frames are this test's.
            unsafe { to.write_bytes(first + page as u8, PAGE_SIZE) };
        }
    }

    fn pending(arena: &Arena, frame: Frame, pages: u32, wanted: Range<u32>) -> Vec<PendingCopy> {
        let run = FillRun { index: FIRST, frame, pages };
        PendingCopy::of_arrival(arena.view(), Arrival { key: &key(1), run, wanted, is_known: false })
            .collect()
    }

    fn peeked(arena: &Arena, pending: &PendingCopy) -> Option<Vec<u8>> {
        let mut to = vec![0; pending.bytes()];
        let is_there = pending.peek(arena.view(), &mut to);
        is_there.then(|| to.chunks(PAGE_SIZE).map(|page| page[0]).collect())
    }

    #[test]
    fn a_steady_folio_is_peeked_and_one_that_is_being_filled_is_not() {
        let arena = arena();
        let (frame, descriptor) = filling(&arena);
        let all = pending(&arena, frame, 4, 0..4);
        let part = pending(&arena, frame, 4, 1..3);
        assert_eq!((all.len(), part.len()), (1, 1));
        assert_eq!(peeked(&arena, &all[0]), None, "its fill has not ended");
        descriptor.complete();
        let before = descriptor.word();
        assert_eq!(peeked(&arena, &all[0]), Some(vec![1, 2, 3, 4]));
        assert_eq!(peeked(&arena, &part[0]), Some(vec![2, 3]));
        assert_eq!(descriptor.word(), before, "nothing is held and nothing noted");
    }

    /// 1 A folio is filled, and its pages are pending. 2 It leaves the index; its frames are filled again, with other
    /// bytes, for the same page of the same mapping. 3 A peek that goes by mapping, page and flags alone takes these
    /// for the bytes that arrived.
    #[test]
    fn a_folio_that_was_filled_again_is_another() {
        let arena = arena();
        let (frame, descriptor) = filling(&arena);
        let pending = pending(&arena, frame, 4, 0..4);
        descriptor.complete();
        descriptor.try_retire().unwrap();
        assert_eq!(peeked(&arena, &pending[0]), None, "it has left the index");
        put_numbers(&arena, frame, 11);
        descriptor.prepare(MAPPING, FIRST, ORDER);
        assert_eq!(peeked(&arena, &pending[0]), None);
        descriptor.complete();
        assert_eq!(peeked(&arena, &pending[0]), None, "other bytes under the old name");
    }

    #[test]
    fn a_folio_that_was_written_or_split_is_another() {
        let arena = arena();
        let (frame, descriptor) = filling(&arena);
        let was_filled = pending(&arena, frame, 4, 0..4);
        descriptor.complete();
        descriptor.try_hold(MAPPING, FIRST).unwrap();
        descriptor.begin_writes().unwrap();
        assert_eq!(peeked(&arena, &was_filled[0]), None, "it is written from now on");
        descriptor.put();
        let (frame, descriptor) = filling(&arena);
        let was_whole = pending(&arena, frame, 4, 0..4);
        descriptor.complete();
        let whole = descriptor.try_begin_split().unwrap();
        for piece in 0..4 {
            let at = arena.view().own(frame.plus(piece));
            at.prepare_piece(MAPPING, FIRST.plus(piece.into()), Order(0), whole, 0);
        }
        assert_eq!(peeked(&arena, &was_whole[0]), None);
    }

    /// The second look: a peek in whose middle the folio leaves and its frames are filled with other bytes.
    #[test]
    fn a_folio_that_is_filled_again_during_a_peek_is_not_taken_for_the_old_one() {
        const LARGE: Order = Order(6);
        let arena = arena();
        let frame = arena.alloc(LARGE).unwrap();
        let descriptor = arena.view().own(frame);
        let current: Mutex<Option<(PendingCopy, u8)>> = Mutex::default();
        let (peeks, wrong, is_over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut to = vec![0; LARGE.bytes()];
                while !is_over.load(Ordering::Relaxed) {
                    let Some((pending, number)) = current.lock().unwrap().clone() else { continue };
                    peeks.fetch_add(1, Ordering::Relaxed);
                    if pending.peek(arena.view(), &mut to) && to.iter().any(|&byte| byte != number) {
                        wrong.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            for round in 0..500_u32 {
                let number = round as u8;
                before_bytes();
                for page in 0..LARGE.pages() {
                    let to = arena.view().bytes(frame.plus(page)).unwrap();
                    // SAFETY: the frames are this test's; a peek that sees the stores throws them away.
                    unsafe { copy::copy_in([number; PAGE_SIZE].as_ptr(), to, PAGE_SIZE) };
                }
                descriptor.prepare(MAPPING, PageIndex(0), LARGE);
                let run = FillRun { index: PageIndex(0), frame, pages: LARGE.pages() };
                let pending = PendingCopy::of_arrival(
                    arena.view(),
                    Arrival { key: &key(1), run, wanted: 0..LARGE.pages(), is_known: false },
                )
                .next();
                descriptor.complete();
                *current.lock().unwrap() = pending.map(|pending| (pending, number));
                let before = peeks.load(Ordering::Relaxed);
                while peeks.load(Ordering::Relaxed) == before {
                    std::thread::yield_now();
                }
                descriptor.try_retire().unwrap();
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(wrong.into_inner(), 0, "bytes of a later folio");
    }

    #[test]
    fn a_folio_that_left_before_its_fill_ended_is_not_pending() {
        let arena = arena();
        let (frame, descriptor) = filling(&arena);
        descriptor.retire();
        assert!(pending(&arena, frame, 4, 0..4).is_empty());
    }

    #[test]
    fn a_run_of_folios_is_pending_folio_by_folio() {
        let arena = arena();
        let frame = arena.alloc(Order(3)).unwrap();
        for (page, order) in [(0, Order(2)), (4, Order(1)), (6, Order(0)), (7, Order(0))] {
            let descriptor = arena.view().own(frame.plus(page));
            descriptor.prepare(MAPPING, FIRST.plus(page.into()), order);
        }
        let of = |wanted| pending(&arena, frame, 8, wanted);
        let pages =
            |pending: &[PendingCopy]| pending.iter().map(|o| (o.first.0 - 8, o.pages)).collect::<Vec<_>>();
        assert_eq!(pages(&of(0..8)), [(0, 4), (4, 2), (6, 1), (7, 1)]);
        assert_eq!(pages(&of(5..7)), [(5, 1), (6, 1)]);
    }

    fn entry(of: u8, first: u64, pages: u16) -> PendingCopy {
        let (mapping, frame, sequence) = (MAPPING, Frame(0), 2);
        let (key, first) = (key(of), PageIndex(first));
        PendingCopy { key, first, mapping, frame, sequence, pages, is_known: false }
    }

    fn firsts(pending: &[PendingCopy]) -> Vec<u64> {
        pending.iter().map(|pending| pending.first.0).collect()
    }

    #[test]
    fn neighbours_are_taken_together_and_no_others() {
        let mut list = PendingCopies::new(10);
        for (of, first, pages) in [(1, 0, 4), (1, 4, 4), (1, 8, 4), (2, 12, 4), (2, 20, 1)] {
            assert_eq!(list.push(entry(of, first, pages)), 0);
        }
        assert_eq!(list.pages(), 17);
        let taken = list.take(8);
        assert_eq!((firsts(&taken), list.pages()), (vec![0, 4], 9));
        assert_eq!(list.put_back(taken.into_iter().skip(1)), 0);
        assert_eq!(firsts(&list.take(100)), [4, 8]);
        assert_eq!(firsts(&list.take(1)), [12], "one that is too long is taken in parts");
        assert_eq!((firsts(&list.take(3)), list.pages()), (vec![13], 1));
        assert_eq!(firsts(&list.take(100)), [20]);
        assert!(list.is_empty() && list.take(100).is_empty() && list.pages() == 0);
    }

    #[test]
    fn a_full_list_lets_the_oldest_go_and_tells_its_pages() {
        let mut list = PendingCopies::new(3);
        let gone: u64 = (0..5).map(|at| list.push(entry(1, at * 10, 2 + at as u16))).sum();
        assert_eq!((gone, list.pages()), (2 + 3, 4 + 5 + 6));
        let taken = list.take(100);
        assert_eq!(firsts(&taken), [20]);
        list.push(entry(1, 90, 1));
        assert_eq!(list.put_back(taken.into_iter()), 4, "there is no place for it any more");
        assert_eq!(firsts(&list.take(100)), [30]);
        assert_eq!((list.clear(), list.pages(), list.is_empty()), (6 + 1, 0, true));
    }
}
