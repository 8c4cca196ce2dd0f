//! Grab: a range of folios found or created, all of them locked and held; and the way it ends.
//!
//! ```text
//!   round     look --> frames --> lock what is there --> insert the rest --> keep the prefix
//!                         ^               ^                    ^
//!                         +---------------+--------------------+---- here the tests step in
//! ```
//!
//! The letters are those of the specification's statements; G17, spilled pages, is where spills are.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use quinion::backend::{FillRun, WaitQueue};
use quinion::internals::arena::{Arena, Flags, Gap, HOLDS_MAX, HoldRefused, LockRefused, ReadableState};
use quinion::internals::folio::{LockedFolio, LockedState};
use quinion::internals::mapping::{
    AddedFolio, Committed, FolioShape, FrameSource, GRAB_PAGES_MAX, GapFrames, Grab, GrabEnd, GrabRequest,
    GrabStep, Grabbed, IndexHooks, InsertPurpose, Mapping, MarkDirty, MemoryWait, OnLocked, RemoveFilter,
    Replacement, SplitOutcome, TakeFilter, WritebackOutcome,
};
use quinion::internals::units::{Frame, Millis, Order, Orders, PAGE_SIZE, PageIndex};
use quinion::internals::xarray::{Entry, Kind, Stored, Value};
use quinion_testing::ablations::{NodesAtMost, OneByOne};
use quinion_testing::fixtures::mapping::{MappingFixture, page, shadow};

/// The library's way to grab, and its ablations.
const WAYS: [Option<&'static dyn IndexHooks>; 3] = [None, OneByOne::GRABS, OneByOne::GRABS_AND_LOOKUPS];

/// Frames straight from an arena, so many at most in one answer: each gap in the largest pieces that fit.
struct Frames<'a> {
    arena: &'a Arena,
    order_max: u8,
    pages_max: u64,
    asked: Vec<(u64, MemoryWait)>,
    given_back: u64,
}

impl<'a> Frames<'a> {
    fn of(fixture: &'a MappingFixture, order_max: u8) -> Self {
        Self { arena: &fixture.arena, order_max, pages_max: u64::MAX, asked: Vec::new(), given_back: 0 }
    }
    fn at_most(self, pages_max: u64) -> Self {
        Self { pages_max, ..self }
    }
}

/// The largest folios of which `pages` pages from `first` on are made, as (index, order).
fn pieces(first: u64, pages: u64, order_max: u8) -> Vec<(u64, u8)> {
    let (mut at, end, mut pieces) = (first, first + pages, Vec::new());
    while at < end {
        let order = at.trailing_zeros().min((end - at).ilog2()).min(u32::from(order_max)) as u8;
        pieces.push((at, order));
        at += 1 << order;
    }
    pieces
}

impl FrameSource for Frames<'_> {
    type Error = &'static str;
    fn take(&mut self, gaps: &[Gap], memory: MemoryWait) -> Result<GapFrames, Self::Error> {
        self.asked.push((gaps.iter().map(|gap| u64::from(gap.pages)).sum(), memory));
        let (mut left, mut runs) = (self.pages_max, Vec::new());
        for &Gap { first, pages } in gaps {
            let some = u64::from(pages).min(left);
            for (index, order) in pieces(first.0, some, self.order_max) {
                let frame = self.arena.alloc(Order(order)).expect("frames for a test");
                runs.push(FillRun { index: page(index), frame, pages: 1 << order });
            }
            left -= some;
        }
        Ok(GapFrames::Runs(runs))
    }
    fn settle(&mut self, _inserted: &[FillRun], left: &[FillRun]) {
        for run in left {
            self.given_back += u64::from(run.pages);
            self.arena.free_run(run.frame, run.pages);
        }
    }
    fn make_nodes(&mut self) -> bool {
        false
    }
    fn spill_in(&mut self, _: PageIndex, _: PageIndex) -> Result<(), Self::Error> {
        Err("spilled")
    }
}

fn how(order_max: u8) -> Grab {
    let orders = Orders { min: Order(0), max: Order(order_max) };
    let shape = FolioShape { purpose: InsertPurpose::Write, ..FolioShape::of(orders) };
    Grab { shape, on_locked: OnLocked::Wait, dirty: MarkDirty::OnUnlock(Millis(1)) }
}
fn nowait(order_max: u8) -> Grab {
    Grab { on_locked: OnLocked::Again, ..how(order_max) }
}
fn fixture() -> MappingFixture {
    let fixture = MappingFixture::new();
    fixture.mapping.set_size(1 << 32);
    fixture
}
/// A memory file's, which knows folios that were allocated and have no bytes.
fn memory() -> MappingFixture {
    MappingFixture::of_memory(1 << 20)
}
fn born(how: Grab) -> Grab {
    Grab { dirty: MarkDirty::OnInsert(Millis(1)), ..how }
}

struct Test<'a> {
    mapping: &'a Mapping,
    wait_queue: &'a WaitQueue,
}

impl<'a> Test<'a> {
    fn grab(
        &self,
        pages: std::ops::Range<u64>,
        how: Grab,
        frames: &mut Frames<'_>,
    ) -> (Grabbed<'a>, GrabEnd<&'static str>) {
        self.watched(pages, how, frames, &mut |_| {})
    }
    fn watched(
        &self,
        pages: std::ops::Range<u64>,
        how: Grab,
        frames: &mut Frames<'_>,
        watch: &mut dyn FnMut(GrabStep),
    ) -> (Grabbed<'a>, GrabEnd<&'static str>) {
        let request = GrabRequest { pages: page(pages.start)..page(pages.end), how };
        self.mapping.grab(self.wait_queue, request, frames, watch)
    }
}

fn once<'w>(step: GrabStep, mut act: impl FnMut() + 'w) -> impl FnMut(GrabStep) + 'w {
    let mut done = false;
    move |now| {
        if now == step && !done {
            done = true;
            act();
        }
    }
}

fn seen(grabbed: &Grabbed<'_>) -> Vec<(u64, u32, LockedState)> {
    grabbed.folios().map(|folio| (folio.first().0, folio.order().pages(), folio.state())).collect()
}
fn new(index: u64) -> (u64, u32, LockedState) {
    (index, 1, LockedState::New)
}

/// Checks that each folio follows the last, is locked, held once by the grab, and in the index.
#[track_caller]
fn all_locked(fixture: &MappingFixture, grabbed: &Grabbed<'_>) {
    let mut next = None;
    for folio in grabbed.folios() {
        assert!(next.is_none_or(|next| next == folio.first()), "{:?} does not follow", folio.first());
        next = Some(folio.end());
        let word = fixture.word(folio.frame());
        assert!(word.has(Flags::LOCKED) && word.holds() == 1 && word.is_live(), "{word:?}");
        assert_eq!(fixture.load(folio.first().0).kind(), Kind::Folio(folio.frame().0));
    }
}

/// Checks that no folio of the tree is locked or held, and that the frames that are out are the tree's.
#[track_caller]
fn nothing_leaks(fixture: &MappingFixture, free_before: u64) {
    let (mut at, mut pages) = (0, 0);
    while let Some((first, entry, order)) = fixture.tree(|tree| tree.next(at, u64::from(u32::MAX))) {
        if let Kind::Folio(frame) = entry.kind() {
            let word = fixture.word(Frame(frame));
            assert!(!word.has(Flags::LOCKED) && word.holds() == 0, "page {first} is left {word:?}");
            pages += 1 << order;
        }
        at = first + (1 << order);
    }
    assert_eq!(fixture.free_pages() + pages, free_before, "frames were lost");
    fixture.check();
}

fn all_free(fixture: &MappingFixture) -> u64 {
    let frames: Vec<_> = std::iter::from_fn(|| fixture.arena.alloc(Order::MAX)).collect();
    frames.iter().for_each(|&frame| fixture.arena.free(frame, Order::MAX));
    fixture.free_pages()
}

/// A folio with its page numbers as its bytes; of a memory file, dirty.
fn put(fixture: &MappingFixture, index: u64, order: u8) -> Frame {
    let folio = fixture.folio(index, order);
    fixture.add(folio);
    if fixture.mapping.is_memory() {
        let run = FillRun { index: folio.index, frame: folio.frame, pages: 1 << order };
        fixture.mapping.lock().mark_run_dirty(run, Millis(1));
    }
    fixture.complete(folio);
    folio.frame
}

fn fill_all(grabbed: &mut Grabbed<'_>, byte: u8) {
    for folio in grabbed.folios_mut() {
        let bytes = vec![byte; folio.order().bytes()];
        folio.write(folio.first().first_byte(), &bytes).unwrap();
    }
}

fn byte_at(fixture: &MappingFixture, position: u64) -> u8 {
    let held = fixture.mapping.try_hold(PageIndex::of_byte(position)).unwrap();
    assert_eq!(held.is_readable(), ReadableState::Yes);
    let mut byte = [0];
    assert_eq!(held.copy_out(position, &mut byte), 1);
    byte[0]
}

/// G01: a grab of no pages is empty. One longer than a round is split inside, has one result, and waits for memory only
/// while nothing is locked.
#[test]
fn g01_an_empty_range_grabs_nothing_and_a_long_one_is_split_inside() {
    for way in WAYS {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        let mut frames = Frames::of(&fixture, 0);
        let (grabbed, end) = test.grab(7..7, how(0), &mut frames);
        assert!(grabbed.is_empty() && end == GrabEnd::All && frames.asked.is_empty());
        let (first, pages) = (100, 2 * GRAB_PAGES_MAX + 300);
        let (grabbed, end) = test.grab(first..first + pages, how(0), &mut frames);
        assert_eq!((grabbed.len() as u64, end), (pages, GrabEnd::All));
        assert_eq!((grabbed.start(), grabbed.end()), (Some(page(first)), Some(page(first + pages))));
        all_locked(&fixture, &grabbed);
        assert!(frames.asked.len() >= 3, "{:?}", frames.asked);
        let waits: Vec<_> = frames.asked.iter().map(|(_, memory)| *memory == MemoryWait::Wait).collect();
        assert!(
            waits[0] && waits[1..].iter().all(|wait| !wait),
            "memory is waited for only while nothing is locked"
        );
        drop(grabbed);
        nothing_leaks(&fixture, free);
        assert_eq!(fixture.pages(), 0, "what nobody touched is gone again");
    }
}

/// G02: absent folios are created, and come locked, held and in rising order.
#[test]
fn g02_absent_folios_are_created_locked_held_and_rising() {
    for way in WAYS {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        for (order_max, folios) in [(0, 128), (4, 8), (9, 1)] {
            let (mut grabbed, end) =
                test.grab(128..256, how(order_max), &mut Frames::of(&fixture, order_max));
            assert_eq!((grabbed.len(), end), (folios, GrabEnd::All));
            all_locked(&fixture, &grabbed);
            fill_all(&mut grabbed, order_max + 1);
            assert_eq!(grabbed.commit(), Committed { pages: 128, left: 0 });
            assert_eq!(byte_at(&fixture, 200 * 4096 + 17), order_max + 1);
            nothing_leaks(&fixture, free);
            fixture.mapping.lock().remove_all();
        }
    }
}

/// G03: a grab of pages that are all cached locks and returns those very folios, and allocates nothing.
#[test]
fn g03_cached_folios_are_the_same_and_nothing_is_allocated() {
    for way in WAYS {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        let there: Vec<Frame> = (40..80).map(|index| put(&fixture, index, 0)).collect();
        let (before, locks) = (fixture.free_pages(), fixture.mapping.index().tree_counts().locks);
        let mut frames = Frames::of(&fixture, 9);
        let (grabbed, end) = test.grab(40..80, how(9), &mut frames);
        assert_eq!(fixture.mapping.index().tree_counts().locks, locks, "who finds everything takes no lock");
        assert_eq!(end, GrabEnd::All);
        all_locked(&fixture, &grabbed);
        assert_eq!(grabbed.folios().map(|folio| folio.frame()).collect::<Vec<_>>(), there);
        assert!(grabbed.folios().all(|folio| folio.state() == LockedState::Data));
        assert_eq!((fixture.free_pages(), frames.asked.len()), (before, 0));
        let held = fixture.mapping.try_hold(page(50)).unwrap();
        assert_eq!(held.is_readable(), ReadableState::Yes);
        let mut number = [0; 8];
        held.copy_out(50 * 4096 + 80, &mut number);
        assert_eq!(u64::from_le_bytes(number), 50);
        assert!(fixture.mapping.index().probe(page(50)).is_ok(), "so does who holds nothing");
        drop((held, grabbed));
        nothing_leaks(&fixture, free);
    }
}

/// G04: whichever of eight pages are cached, the grab returns all eight, and the cached ones are the same folios.
#[test]
fn g04_every_pattern_of_eight_is_completed_and_present_folios_stay_the_same() {
    for way in WAYS {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        let mut pages = 0;
        for pattern in 0..256u64 {
            let first = 60 + pattern * 16;
            let bits = (0..8).filter(|nth| pattern >> nth & 1 == 1);
            let there: BTreeMap<u64, Frame> = bits.map(|nth| (nth, put(&fixture, first + nth, 0))).collect();
            let (grabbed, end) = test.grab(first..first + 8, how(0), &mut Frames::of(&fixture, 0));
            assert_eq!((grabbed.len(), end), (8, GrabEnd::All), "{pattern:08b}");
            all_locked(&fixture, &grabbed);
            for (nth, folio) in grabbed.folios().enumerate() {
                match there.get(&(nth as u64)) {
                    Some(frame) => assert_eq!((folio.frame(), folio.state()), (*frame, LockedState::Data)),
                    None => assert_eq!(folio.state(), LockedState::New),
                }
            }
            drop(grabbed);
            pages += there.len() as u64;
            assert_eq!(fixture.pages(), pages);
        }
        fixture.finish();
    }
}

/// G05: a folio that another thread inserts at the first page is no error, and is found in the next round.
/// 1 G has seen that pages 0 to 7 are absent, and has frames for them.
/// 2 Another inserts page 0.
/// 3 G inserts none of its frames, and looks again.
#[test]
fn g05_a_conflict_at_the_first_page_is_found_in_the_next_round() {
    for way in WAYS {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        let mut frames = Frames::of(&fixture, 0);
        let mut theirs = None;
        let (grabbed, end) = {
            let mut other = once(GrabStep::Framed, || theirs = Some(put(&fixture, 0, 0)));
            test.watched(0..8, how(0), &mut frames, &mut other)
        };
        assert_eq!((grabbed.len(), end), (8, GrabEnd::All));
        all_locked(&fixture, &grabbed);
        let first = grabbed.folios().next().unwrap();
        assert_eq!((Some(first.frame()), first.state()), (theirs, LockedState::Data));
        assert_eq!((frames.asked.len(), frames.given_back), (2, 8), "no frame of the first round was used");
        drop(grabbed);
        nothing_leaks(&fixture, free);
    }
}

/// G06: after a conflict in the middle the prefix is kept and the rest is tried again, until all pages are grabbed.
#[test]
fn g06_a_conflict_in_the_middle_keeps_the_prefix_and_tries_the_rest_again() {
    for way in WAYS {
        for (at, step) in (1..8).flat_map(|at| [(at, GrabStep::Framed), (at, GrabStep::Locked)]) {
            let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
            let free = all_free(&fixture);
            let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
            let behind = put(&fixture, 9, 0); // there from the start, behind the conflict
            let mut frames = Frames::of(&fixture, 0);
            let (mut theirs, mut prefix) = (None, Vec::new());
            let (grabbed, end) = {
                let mut rounds = 0;
                let mut other = |now| {
                    if now == step && rounds == 0 {
                        theirs = Some(put(&fixture, at, 0));
                    }
                    if now == GrabStep::Inserted && rounds == 0 {
                        prefix = (0..at).map(|index| fixture.walk(index).kind()).collect();
                        rounds = 1;
                    }
                };
                test.watched(0..10, how(0), &mut frames, &mut other)
            };
            assert_eq!((grabbed.len(), end), (10, GrabEnd::All), "at {at}, {step:?}");
            all_locked(&fixture, &grabbed);
            let got: Vec<Kind> = grabbed.folios().map(|folio| Kind::Folio(folio.frame().0)).collect();
            assert_eq!(got[..at as usize], prefix[..], "the prefix is not given up");
            assert_eq!((got[at as usize], got[9]), (Kind::Folio(theirs.unwrap().0), Kind::Folio(behind.0)));
            drop(grabbed);
            nothing_leaks(&fixture, free);
        }
    }
}

/// G07: when no frame can be had for a page the grab ends before it, and no folio behind it is left locked or held.
#[test]
fn g07_the_prefix_ends_where_memory_ends_and_nothing_behind_is_locked_or_held() {
    for way in WAYS {
        for k in 1..10u64 {
            let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
            let free = all_free(&fixture);
            let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
            let there: Vec<(u64, Frame)> = [2, 5, 11].map(|index| (index, put(&fixture, index, 0))).into();
            let (grabbed, end) = test.grab(0..12, how(0), &mut Frames::of(&fixture, 0).at_most(k));
            // The k-th absent page is the first that cannot be had.
            let absent: Vec<u64> = (0..12).filter(|index| ![2, 5, 11].contains(index)).collect();
            let want = absent.get(k as usize).copied().unwrap_or(12);
            let reason = if want == 12 { GrabEnd::All } else { GrabEnd::NoFrames };
            assert_eq!((grabbed.len() as u64, end), (want, reason), "{k} frames");
            all_locked(&fixture, &grabbed);
            for (index, frame) in there.iter().filter(|(index, _)| *index >= want) {
                let word = fixture.word(*frame);
                assert!(!word.has(Flags::LOCKED) && word.holds() == 0, "page {index} is {word:?}");
            }
            drop(grabbed);
            nothing_leaks(&fixture, free);
        }
    }
}

/// G08: when no frame can be had for the first page the grab is empty, and its end says why.
#[test]
fn g08_no_memory_at_all_is_nothing_and_says_so() {
    let (fixture, wait_queue) = (fixture(), WaitQueue::new());
    let free = all_free(&fixture);
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    put(&fixture, 3, 0);
    let (grabbed, end) = test.grab(0..8, how(0), &mut Frames::of(&fixture, 0).at_most(0));
    assert!(grabbed.is_empty() && end == GrabEnd::NoFrames);
    let (grabbed, end) = test.grab(3..8, how(0), &mut Frames::of(&fixture, 0).at_most(0));
    assert_eq!(
        (seen(&grabbed), end),
        (vec![(3, 1, LockedState::Data)], GrabEnd::NoFrames),
        "what is there is had"
    );
    drop(grabbed);
    nothing_leaks(&fixture, free);
}

/// G09: a page truncated during a grab is looked up again, and no detached folio is handed out.
/// 1 G has seen page 3, and page 6.
/// 2 Page 3 is truncated, before G locks it or after.
/// 3 G looks again there, and creates it.
#[test]
fn g09_a_page_truncated_on_the_way_is_looked_up_again_and_nothing_detached_is_handed_out() {
    for way in WAYS {
        for step in [GrabStep::Framed, GrabStep::Locked] {
            let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
            let free = all_free(&fixture);
            let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
            let there = [3, 6].map(|index| put(&fixture, index, 0));
            let (grabbed, end) = {
                let cut = || assert_eq!(fixture.mapping.remove_range(page(3)..page(4), RemoveFilter::All), 1);
                let mut cut = once(step, cut);
                test.watched(0..8, how(0), &mut Frames::of(&fixture, 0), &mut cut)
            };
            assert_eq!((grabbed.len(), end), (8, GrabEnd::All), "{step:?}");
            all_locked(&fixture, &grabbed);
            let folios: Vec<_> = grabbed.folios().collect();
            assert_eq!((folios[3].state(), folios[6].state()), (LockedState::New, LockedState::Data));
            assert_eq!(folios[6].frame(), there[1]);
            drop(grabbed);
            nothing_leaks(&fixture, free);
        }
    }
}

/// G09: when the file is truncated during a grab, no folio is created past its new end.
#[test]
fn g09_nothing_is_created_behind_the_end_of_a_truncated_file() {
    for step in [GrabStep::Framed, GrabStep::Locked, GrabStep::Inserted] {
        let (fixture, wait_queue) = (fixture(), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        put(&fixture, 6, 0);
        let (mut grabbed, end) = {
            let mut cut = once(step, || {
                fixture.mapping.set_size(4 * 4096 + 1);
                fixture.mapping.remove_range(page(5)..page(100), RemoveFilter::All);
            });
            test.watched(2..9, how(0), &mut Frames::of(&fixture, 0), &mut cut)
        };
        assert_eq!(end, GrabEnd::Size);
        assert_eq!(grabbed.end(), Some(page(5)), "{step:?}");
        assert_eq!(fixture.mapping.lock().next_entry(page(5), page(100)), None);
        all_locked(&fixture, &grabbed);
        // Cut again while it is locked here: bytes written there are lost, and take no memory.
        fixture.mapping.set_size(3 * 4096);
        fixture.mapping.remove_range(page(3)..page(100), RemoveFilter::All);
        fill_all(&mut grabbed, 9);
        assert_eq!(grabbed.commit(), Committed { pages: 1, left: 2 });
        nothing_leaks(&fixture, free);
    }
}

/// G10: a grab that does not wait ends before a locked folio, and creates nothing from there on.
#[test]
fn g10_a_grab_that_does_not_wait_ends_before_a_locked_folio_and_creates_nothing_behind() {
    for way in WAYS {
        for j in 0..8u64 {
            let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
            let free = all_free(&fixture);
            let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
            put(&fixture, j, 0);
            put(&fixture, 7 - u64::from(j == 7), 0);
            let (theirs, end) = test.grab(j..j + 1, how(0), &mut Frames::of(&fixture, 0));
            assert_eq!((theirs.len(), end), (1, GrabEnd::All));
            let pages = fixture.pages();
            let mut frames = Frames::of(&fixture, 0);
            let (grabbed, end) = test.grab(0..8, nowait(0), &mut frames);
            assert_eq!((grabbed.len() as u64, end), (j, GrabEnd::Locked));
            all_locked(&fixture, &grabbed);
            let created = grabbed.folios().filter(|folio| folio.state() == LockedState::New).count() as u64;
            assert_eq!(fixture.pages(), pages + created, "nothing was created at or behind {j}");
            drop((grabbed, theirs));
            nothing_leaks(&fixture, free);
        }
    }
}

/// G11: a shadow in the range is consumed by the folio that takes its place, and is no error.
#[test]
fn g11_the_shadow_of_an_eviction_is_consumed() {
    for way in WAYS {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        fixture.put_shadow(2, 0, 1);
        fixture.put_shadow(8, 3, 2);
        fixture.put_shadow(64, 6, 3);
        let (mut grabbed, end) = test.grab(0..66, how(2), &mut Frames::of(&fixture, 2));
        assert_eq!((grabbed.end(), end), (Some(page(66)), GrabEnd::All));
        all_locked(&fixture, &grabbed);
        fill_all(&mut grabbed, 1);
        grabbed.commit();
        assert_eq!((fixture.load(8).kind(), fixture.load(66)), (fixture.load(11).kind(), shadow(1, 3)));
        nothing_leaks(&fixture, free);
    }
}

/// G12: a large folio that covers a part of the range is grabbed whole, as one entry, wherever the range meets it.
#[test]
fn g12_a_large_folio_is_one_entry_wherever_the_range_meets_it() {
    for way in WAYS {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        for index in [4, 12, 20] {
            put(&fixture, index, 2);
        }
        let four = |index| (index, 4, LockedState::Data);
        let (grabbed, end) = test.grab(6..22, how(2), &mut Frames::of(&fixture, 2));
        let want = vec![four(4), (8, 4, LockedState::New), four(12), (16, 4, LockedState::New), four(20)];
        assert_eq!((seen(&grabbed), end), (want, GrabEnd::All));
        all_locked(&fixture, &grabbed);
        drop(grabbed);
        let (grabbed, _) = test.grab(5..7, how(2), &mut Frames::of(&fixture, 2));
        assert_eq!(seen(&grabbed), [four(4)]);
        drop(grabbed);
        let (grabbed, _) = test.grab(7..13, how(0), &mut Frames::of(&fixture, 0));
        assert_eq!(seen(&grabbed), [four(4), new(8), new(9), new(10), new(11), four(12)]);
        drop(grabbed);
        nothing_leaks(&fixture, free);
    }
}

/// G12: a large folio that another thread inserts meanwhile is grabbed as it is.
/// 1 G has seen that pages 0 to 7 are absent.
/// 2 Another inserts a folio of pages 4 to 7, or of 0 to 7.
#[test]
fn g12_a_large_folio_that_comes_in_between_is_taken_as_it_is() {
    for (index, order) in [(4, 2), (0, 3), (0, 2)] {
        for step in [GrabStep::Framed, GrabStep::Locked] {
            let (fixture, wait_queue) = (fixture(), WaitQueue::new());
            let free = all_free(&fixture);
            let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
            put(&fixture, 9, 0);
            let mut other = once(step, || {
                put(&fixture, index, order);
            });
            let (grabbed, end) = test.watched(2..10, how(0), &mut Frames::of(&fixture, 0), &mut other);
            assert_eq!((grabbed.end(), end), (Some(page(10)), GrabEnd::All));
            all_locked(&fixture, &grabbed);
            assert!(seen(&grabbed).contains(&(index, 1 << order, LockedState::Data)), "{:?}", seen(&grabbed));
            drop((grabbed, other));
            nothing_leaks(&fixture, free);
        }
    }
}

/// G12: each new folio is as large as the range, the alignment and the allowed orders permit.
#[test]
fn g12_each_new_folio_is_the_largest_that_range_and_alignment_allow() {
    let (fixture, wait_queue) = (fixture(), WaitQueue::new());
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    let (grabbed, _) = test.grab(3..1030, how(9), &mut Frames::of(&fixture, 9));
    let orders: Vec<u32> = seen(&grabbed).iter().map(|(_, pages, _)| pages.ilog2()).collect();
    assert_eq!(orders, [0, 2, 3, 4, 5, 6, 7, 8, 9, 2, 1]);
    all_locked(&fixture, &grabbed);
}

/// G13: whatever ends a grab, each folio is unlocked and each hold given back: a commit, a drop, a panic, a removal.
#[test]
fn g13_every_way_out_unlocks_and_gives_every_hold_back() {
    for (nth, way) in (0..8).flat_map(|nth| WAYS.map(|way| (nth, way))) {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        put(&fixture, 2, 1);
        put(&fixture, 6, 0);
        let (mut grabbed, _) = test.grab(0..16, how(2), &mut Frames::of(&fixture, 2));
        let folios = grabbed.len();
        let ended = match nth {
            0 => grabbed.commit(),
            1 => {
                fill_all(&mut grabbed, 3);
                grabbed.commit()
            }
            2 => {
                drop(grabbed);
                Committed::default()
            }
            3 => {
                let ended = grabbed.commit_first(folios / 2);
                drop(grabbed);
                ended
            }
            4 => {
                let mut left = grabbed;
                left.front_mut().unwrap().zero(5, 100).unwrap();
                catch_unwind(AssertUnwindSafe(move || {
                    let _grabbed = left;
                    panic!("a closure that fails");
                }))
                .unwrap_err();
                Committed { pages: 1, left: 0 }
            }
            5 => {
                fixture.mapping.lock().remove_all();
                for folio in grabbed.folios_mut() {
                    // A folio that had bytes still has them; one that had none is filled without effect.
                    let written = folio.write(folio.first().first_byte(), &[1; 10]);
                    assert_eq!(written.is_ok(), folio.state() == LockedState::New);
                }
                let ended = grabbed.commit();
                assert!(ended.left > 0 && ended.pages == 0, "{ended:?}");
                ended
            }
            6 => {
                let held = grabbed.commit_into_held().unwrap();
                assert_eq!(held.len(), 0, "the first has no bytes");
                Committed::default()
            }
            _ => {
                fill_all(&mut grabbed, 7);
                let held = grabbed.commit_into_held().unwrap();
                assert_eq!(held.len(), folios);
                assert!(held.iter().all(|held| fixture.word(held.frame()).holds() == 1));
                drop(held);
                Committed::default()
            }
        };
        println!("{nth}: {ended:?}");
        nothing_leaks(&fixture, free);
    }
}

/// G13: a commit that keeps holds is refused where a folio has all the holds it can have.
#[test]
fn g13_a_folio_that_has_all_its_holds_is_an_error_for_a_caller_that_keeps_one() {
    let fixture = fixture();
    put(&fixture, 5, 0);
    let mut holds: Vec<_> = (1..HOLDS_MAX).map(|_| fixture.mapping.try_hold(page(5)).unwrap()).collect();
    let (wait_queue, mut frames) = (WaitQueue::new(), Frames::of(&fixture, 0));
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    let (grabbed, end) = test.grab(5..7, how(0), &mut frames);
    assert_eq!((grabbed.len(), end), (2, GrabEnd::All), "its hold is the last");
    assert_eq!(grabbed.commit_into_held().unwrap_err(), HoldRefused::TooMany);
    holds.pop();
    let (grabbed, _) = test.grab(5..7, how(0), &mut frames);
    assert_eq!(grabbed.commit_into_held().unwrap().len(), 1);
    drop(holds);
    fixture.check();
}

/// G17: a grab ends before a spilled folio, and asks for it to be brought back only when it has nothing locked.
#[test]
fn g17_a_spilled_folio_is_brought_back_by_a_thread_with_nothing_locked() {
    let (fixture, wait_queue) = (memory(), WaitQueue::new());
    let value = Entry::value(Value::spill(1, 40));
    assert_eq!(fixture.tree(|tree| tree.store(4, 1, value, |_, _, _| {})), Stored::Done);
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    let mut frames = Frames::of(&fixture, 0);
    let (grabbed, end) = test.grab(2..9, born(how(0)), &mut frames);
    assert_eq!((seen(&grabbed), end), (vec![new(2), new(3)], GrabEnd::Spilled));
    drop(grabbed);
    let (grabbed, end) = test.grab(4..9, born(how(0)), &mut frames);
    assert_eq!((grabbed.len(), end), (0, GrabEnd::Failed("spilled")), "its source was asked");
    drop(grabbed);
    fixture.tree(|tree| tree.erase(4));
    fixture.check();
}

/// G09: a grab that meets a page which is being removed waits for that, and creates the page anew. Another thread holds
/// the tree lock in the middle of a change of the page, for as long as it takes.
#[test]
fn g09_a_grab_that_meets_a_page_on_its_way_out_waits_for_that_and_ends() {
    let (fixture, wait_queue) = (fixture(), WaitQueue::new());
    let frame = put(&fixture, 5, 0);
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    let (rounds, has_begun) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            fixture.tree(|tree| {
                assert!(fixture.arena.view().own(frame).try_retire().is_some());
                has_begun.store(true, Ordering::Release);
                // The other thread may not come by before this one gives up; that proves nothing.
                let begun = Instant::now();
                while rounds.load(Ordering::Relaxed) < 2000 && begun.elapsed() < Duration::from_millis(50) {
                    std::thread::yield_now();
                }
                tree.erase(5);
            });
        });
        while !has_begun.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let mut frames = Frames::of(&fixture, 0);
        let mut count = |step| {
            if step == GrabStep::Framed {
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        };
        let (grabbed, end) = test.watched(5..6, how(0), &mut frames, &mut count);
        assert_eq!((seen(&grabbed), end), (vec![new(5)], GrabEnd::All));
    });
}

/// G13: a thread that waits for locked folios gets their locks when the grab is dropped.
#[test]
fn g13_the_next_thread_that_wants_the_lock_gets_it() {
    let (fixture, wait_queue) = (fixture(), WaitQueue::new());
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    put(&fixture, 1, 0);
    let (grabbed, _) = test.grab(0..3, how(0), &mut Frames::of(&fixture, 0));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
            let (mut grabbed, end) = test.grab(0..3, how(0), &mut Frames::of(&fixture, 0));
            fill_all(&mut grabbed, 5);
            (grabbed.commit(), end)
        });
        let held = fixture.mapping.try_hold(page(1)).unwrap();
        let again = quinion::internals::folio::LockedFolio::lock(held);
        assert_eq!(again.map_err(|(why, _)| why).unwrap_err(), LockRefused::Locked);
        drop(grabbed);
        assert_eq!(waiter.join().unwrap(), (Committed { pages: 3, left: 0 }, GrabEnd::All));
    });
}

/// G14: a reader that waits for a folio wakes when that one is filled and no earlier, and all bytes are the source's.
#[test]
fn g14_a_reader_that_waits_for_a_folio_wakes_when_that_one_is_filled() {
    let (fixture, wait_queue) = (fixture(), WaitQueue::new());
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    let (mut grabbed, _) = test.grab(0..8, how(0), &mut Frames::of(&fixture, 0));
    let awake = AtomicBool::new(false);
    let source: Vec<u8> = (0..8 * PAGE_SIZE).map(|at| (at / 7) as u8).collect();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let held = fixture.mapping.try_hold(page(5)).unwrap();
            let backend = &*fixture.mapping.backend();
            wait_queue.wait(backend, &mut || held.is_readable() != ReadableState::NotYet);
            awake.store(true, Ordering::SeqCst);
            assert_eq!(held.is_readable(), ReadableState::Yes);
            let mut bytes = vec![0; PAGE_SIZE];
            held.copy_out(5 * 4096, &mut bytes);
            bytes
        });
        for index in 0..8u64 {
            assert!(index > 5 || !awake.load(Ordering::SeqCst), "awake before its folio is filled");
            let from = index as usize * PAGE_SIZE;
            let folio = grabbed.front_mut().unwrap();
            folio.write(index * 4096, &source[from..from + PAGE_SIZE]).unwrap();
            assert_eq!(grabbed.commit_first(1), Committed { pages: 1, left: 0 });
        }
        assert_eq!(reader.join().unwrap(), source[5 * PAGE_SIZE..6 * PAGE_SIZE]);
    });
    for at in (0..source.len()).step_by(61) {
        assert_eq!(byte_at(&fixture, at as u64), source[at]);
    }
    assert_eq!(fixture.mapping.writeback().dirty_pages().dirty(), 8, "what was touched is to be written");
}

/// G15: when the source fails, folios that it has begun to fill are kept, with zeros for the rest, and others are
/// absent.
#[test]
fn g15_pages_before_a_failure_of_the_source_are_kept_and_the_rest_is_absent() {
    for (order_max, at) in [(0, 5 * 4096), (0, 5 * 4096 + 100), (2, 5 * 4096 + 100), (4, 0), (4, 1)] {
        let (fixture, wait_queue) = (fixture(), WaitQueue::new());
        let free = all_free(&fixture);
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        let (mut grabbed, _) = test.grab(0..16, how(order_max), &mut Frames::of(&fixture, order_max));
        for folio in grabbed.folios_mut() {
            let start = folio.first().first_byte();
            let len = (at - start.min(at)).min(folio.order().bytes() as u64) as usize;
            folio.write(start, &vec![8; len]).unwrap();
        }
        drop(grabbed); // the source has failed
        let pages = at.div_ceil(4096);
        let filled = pages.next_multiple_of(1 << order_max);
        assert_eq!(fixture.pages(), filled, "whole folios of what came");
        for position in (0..filled * 4096).step_by(509) {
            assert_eq!(byte_at(&fixture, position), if position < at { 8 } else { 0 }, "byte {position}");
        }
        nothing_leaks(&fixture, free);
    }
}

/// G16: a grab of a whole round takes the tree lock once, and its commit takes it once more at most.
#[test]
fn g16_a_round_takes_the_tree_lock_once() {
    for (pages, order) in [(128, 0), (512, 0), (512, 9), (300, 3)] {
        for is_memory in [false, true] {
            let fixture = if is_memory { memory() } else { fixture() };
            let wait_queue = WaitQueue::new();
            let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
            let locks = || fixture.mapping.index().tree_counts().locks;
            put(&fixture, 65, 0);
            let (before, how) = (locks(), if is_memory { born(how(order)) } else { how(order) });
            let (mut grabbed, end) = test.grab(0..pages, how, &mut Frames::of(&fixture, order));
            assert_eq!((locks() - before, end), (1, GrabEnd::All), "{pages} pages of order {order}");
            fill_all(&mut grabbed, 1);
            let before = locks();
            assert_eq!(grabbed.commit().pages, pages);
            // One more to mark what was touched; those born dirty need none.
            assert_eq!(locks() - before, u64::from(!is_memory));
            assert_eq!(fixture.mapping.writeback().dirty_pages().dirty(), pages);
        }
    }
    let (fixture, wait_queue) = (fixture().with_hooks(OneByOne::GRABS), WaitQueue::new());
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    let before = fixture.mapping.index().tree_counts().locks;
    let (_grabbed, _) = test.grab(0..128, how(0), &mut Frames::of(&fixture, 0));
    assert_eq!(fixture.mapping.index().tree_counts().locks - before, 1 + 128, "what it is compared with");
}

#[test]
fn nodes_that_run_out_end_a_grab_as_frames_do() {
    for most in [0, 1] {
        let fixture = MappingFixture::new().with_hooks(NodesAtMost::hooks(most));
        fixture.mapping.set_size(1 << 50);
        let (wait_queue, free) = (WaitQueue::new(), all_free(&fixture));
        let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
        let (grabbed, end) = test.grab(1 << 30..(1 << 30) + 200, how(0), &mut Frames::of(&fixture, 0));
        let want = if most == 0 { (0, GrabEnd::NoNode) } else { (200, GrabEnd::All) };
        assert_eq!((grabbed.len(), end), want);
        drop(grabbed);
        assert_eq!(fixture.free_pages(), free);
        fixture.finish();
    }
}

#[test]
fn allocated_folios_have_frames_and_no_bytes_until_they_are_filled() {
    let (fixture, wait_queue) = (memory(), WaitQueue::new());
    let free = all_free(&fixture);
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    let (grabbed, _) = test.grab(0..16, born(how(3)), &mut Frames::of(&fixture, 3));
    assert_eq!(grabbed.leave_allocated(), Committed::default());
    nothing_leaks(&fixture, free);
    let held = fixture.mapping.try_hold(page(9)).unwrap();
    assert_eq!(held.is_readable(), ReadableState::Zeros);
    assert_eq!(held.writer().unwrap_err(), quinion::internals::arena::WriteRefused::Filling);
    drop(held);
    let (mut grabbed, _) = test.grab(9..12, born(how(3)), &mut Frames::of(&fixture, 3));
    assert_eq!(seen(&grabbed), [(8, 8, LockedState::Allocated)]);
    let folio = grabbed.front_mut().unwrap();
    // In any order, over each other, with gaps.
    folio.write(11 * 4096, &[1; 10]).unwrap();
    folio.write(9 * 4096, &[2; 4096]).unwrap();
    folio.zero(11 * 4096 + 5, 100).unwrap();
    folio.write(13 * 4096, &[3; 50]).unwrap();
    assert_eq!(grabbed.commit(), Committed { pages: 8, left: 0 });
    let wanted = |at: u64| match at {
        36864..40960 => 2,
        45056..45061 => 1,
        53248..53298 => 3,
        _ => 0,
    };
    for position in (8 * 4096..16 * 4096).step_by(5) {
        assert_eq!(byte_at(&fixture, position), wanted(position), "byte {position}");
    }
    assert_eq!(fixture.mapping.writeback().dirty_pages().dirty(), 16);
    nothing_leaks(&fixture, free);
}

#[test]
fn all_threads_that_grab_overlapping_ranges_get_through() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 300;
    for way in WAYS {
        let (fixture, wait_queue) = (fixture().with_hooks(way), WaitQueue::new());
        let free = all_free(&fixture);
        // Each adds one to the first bytes of each page of its range: the lock keeps all of them.
        let work = |thread: u64| {
            let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
            let mut seed = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut added = [0u32; 64];
            for _ in 0..ROUNDS {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (first, len) = ((seed >> 33) % 56, (seed >> 50) % 8 + 1);
                let (mut grabbed, end) = test.grab(first..first + len, how(1), &mut Frames::of(&fixture, 1));
                assert_eq!(end, GrabEnd::All);
                for folio in grabbed.folios_mut() {
                    for index in folio.first().0.max(first)..folio.end().0.min(first + len) {
                        let mut count = [0; 4];
                        if folio.state() == LockedState::Data {
                            fixture.mapping.try_hold(page(index)).unwrap().copy_out(index * 4096, &mut count);
                        }
                        let count = u32::from_le_bytes(count) + 1;
                        folio.write(index * 4096, &count.to_le_bytes()).unwrap();
                        added[index as usize] += 1;
                    }
                }
                grabbed.commit();
            }
            added
        };
        let mut want = [0u32; 64];
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread + 1))).collect();
            for thread in threads {
                let added = thread.join().unwrap();
                want.iter_mut().zip(added).for_each(|(sum, more)| *sum += more);
            }
        });
        for (index, want) in want.into_iter().enumerate().filter(|(_, want)| *want > 0) {
            let held = fixture.mapping.try_hold(page(index as u64)).unwrap();
            let mut count = [0; 4];
            held.copy_out(index as u64 * 4096, &mut count);
            assert_eq!(u32::from_le_bytes(count), want, "page {index}");
        }
        nothing_leaks(&fixture, free);
    }
}

// ---- the twin -----------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Op {
    Put { index: u64, order: u8 },
    Remove { first: u64, pages: u64 },
    Lock { index: u64 },
    Grab { first: u64, pages: u64, order_max: u8, frames: u64, touch: u64, end: Ending },
}

#[derive(Clone, Copy, Debug)]
enum Ending {
    Commit,
    Drop,
    Allocated,
}

fn op() -> impl Strategy<Value = Op> {
    let ending = prop_oneof![Just(Ending::Commit), Just(Ending::Drop), Just(Ending::Allocated)];
    prop_oneof![
        (0..60u64, 0..4u8).prop_map(|(index, order)| Op::Put { index, order }),
        (0..64u64, 1..20u64).prop_map(|(first, pages)| Op::Remove { first, pages }),
        (0..64u64).prop_map(|index| Op::Lock { index }),
        (0..64u64, 0..40u64, 0..5u8, prop_oneof![Just(1000), 0..30u64], any::<u64>(), ending).prop_map(
            |(first, pages, order_max, frames, touch, end)| Op::Grab {
                first,
                pages,
                order_max,
                frames,
                touch,
                end
            }
        ),
    ]
}

#[derive(Clone, Copy, Debug)]
struct TwinFolio {
    order: u8,
    has_bytes: bool,
}

#[derive(Default)]
struct Twin {
    folios: BTreeMap<u64, TwinFolio>,
}

impl Twin {
    fn at(&self, index: u64) -> Option<(u64, TwinFolio)> {
        let (first, known) = self.folios.range(..=index).next_back()?;
        (index < first + (1 << known.order)).then_some((*first, *known))
    }
    fn put(&mut self, fixture: &MappingFixture, first: u64, order: u8) {
        if (first..first + (1 << order)).all(|index| self.at(index).is_none()) {
            put(fixture, first, order);
            self.folios.insert(first, TwinFolio { order, has_bytes: true });
        }
    }
    /// The expected result of a grab: the folios, and why it ends.
    fn grab(
        &self,
        pages: std::ops::Range<u64>,
        order_max: u8,
        mut frames: u64,
        locked: Option<u64>,
    ) -> (Vec<(u64, u8, LockedState)>, GrabEnd<&'static str>) {
        let (mut at, mut got) = (pages.start, Vec::new());
        while at < pages.end {
            let bound = (at - at % GRAB_PAGES_MAX + GRAB_PAGES_MAX).min(pages.end);
            match self.at(at) {
                Some((first, _)) if locked == Some(first) => return (got, GrabEnd::Locked),
                Some((first, known)) => {
                    let state = if known.has_bytes { LockedState::Data } else { LockedState::Allocated };
                    got.push((first, known.order, state));
                    at = first + (1 << known.order);
                }
                None => {
                    let gap = (at..bound).take_while(|index| self.at(*index).is_none()).count() as u64;
                    let some = gap.min(frames);
                    got.extend(
                        pieces(at, some, order_max)
                            .iter()
                            .map(|(index, order)| (*index, *order, LockedState::New)),
                    );
                    (at, frames) = (at + some, frames - some);
                    if some < gap {
                        return (got, GrabEnd::NoFrames);
                    }
                }
            }
        }
        (got, GrabEnd::All)
    }
}

fn play(way: Option<&'static dyn IndexHooks>, ops: &[Op]) {
    let (fixture, wait_queue) = (memory().with_hooks(way), WaitQueue::new());
    let free = all_free(&fixture);
    let test = Test { mapping: &fixture.mapping, wait_queue: &wait_queue };
    let (mut twin, mut lock): (Twin, Option<Grabbed<'_>>) = Default::default();
    for op in ops {
        match *op {
            Op::Put { index, order } => twin.put(&fixture, index & !((1 << order) - 1), order),
            Op::Remove { first, pages } => {
                fixture.mapping.remove_range(page(first)..page(first + pages), RemoveFilter::All);
                twin.folios.retain(|at, known| *at < first || at + (1 << known.order) > first + pages);
                let held = lock.take().filter(|lock| lock.folios().all(|folio| folio.is_live()));
                lock = held;
            }
            Op::Lock { index } => {
                drop(lock.take());
                if twin.at(index).is_some() {
                    lock = Some(test.grab(index..index + 1, born(nowait(0)), &mut Frames::of(&fixture, 0)).0);
                }
            }
            Op::Grab { first, pages, order_max, frames, touch, end } => {
                let theirs = lock.as_ref().and_then(|lock| lock.start()).map(|start| start.0);
                let (want, reason) = twin.grab(first..first + pages, order_max, frames, theirs);
                let mut source = Frames::of(&fixture, order_max).at_most(frames);
                let (mut grabbed, ended) =
                    test.grab(first..first + pages, born(nowait(order_max)), &mut source);
                let got: Vec<_> =
                    grabbed.folios().map(|it| (it.first().0, it.order().0, it.state())).collect();
                assert_eq!((&got, ended), (&want, reason), "{op:?}");
                all_locked(&fixture, &grabbed);
                let mut touched = Vec::new();
                for (nth, folio) in grabbed.folios_mut().enumerate() {
                    if touch >> (nth % 64) & 1 == 1 {
                        folio.write(folio.first().first_byte() + 9, &[nth as u8]).unwrap();
                        touched.push(folio.first().0);
                    }
                }
                match end {
                    Ending::Commit => drop(grabbed.commit()),
                    Ending::Drop => drop(grabbed),
                    Ending::Allocated => drop(grabbed.leave_allocated()),
                }
                for (at, order, state) in want {
                    let has_bytes = state == LockedState::Data || touched.contains(&at);
                    if has_bytes || state == LockedState::Allocated || matches!(end, Ending::Allocated) {
                        twin.folios.insert(at, TwinFolio { order, has_bytes });
                    }
                }
            }
        }
        let there: u64 = twin.folios.values().map(|known| 1 << known.order).sum();
        assert_eq!(fixture.pages(), there, "after {op:?}");
        for (first, known) in &twin.folios {
            let held = fixture.mapping.try_hold(page(*first)).unwrap();
            assert_eq!((held.first().0, held.order().0), (*first, known.order));
            if theirs_not(&lock, *first) {
                let is = if known.has_bytes { ReadableState::Yes } else { ReadableState::Zeros };
                assert_eq!(held.is_readable(), is, "page {first} after {op:?}");
            }
        }
        fixture.check();
    }
    drop(lock);
    nothing_leaks(&fixture, free);
}

fn theirs_not(lock: &Option<Grabbed<'_>>, first: u64) -> bool {
    lock.as_ref().and_then(|lock| lock.start()) != Some(page(first))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn every_mixed_pattern_comes_out_as_a_naive_twin_says(
        way in prop::sample::select(&WAYS[..]), ops in prop::collection::vec(op(), 1..24),
    ) {
        play(way, &ops);
    }
}

// ---- the twin of a file: its size, its evictions, its bytes -------------------------------------------

/// Pages of the file at most; ranges reach a little beyond.
const FILE_PAGES: u64 = 64;
/// Where in each page bytes are compared.
const SAMPLED: [u64; 4] = [0, 9, 10, 4095];

#[derive(Clone, Debug)]
enum FileOp {
    /// A fill, as of a read.
    Put {
        index: u64,
        order: u8,
    },
    /// The file ends after so many bytes now: it is cut, or grows.
    Resize {
        bytes: u64,
    },
    Punch {
        first: u64,
        pages: u64,
    },
    Evict {
        index: u64,
        payload: u32,
    },
    WriteBack {
        first: u64,
        pages: u64,
    },
    Lock {
        index: u64,
    },
    Grab {
        first: u64,
        pages: u64,
        order_max: u8,
        frames: u64,
        touch: u64,
        reach: u64,
        first_only: usize,
    },
}

fn file_op() -> impl Strategy<Value = FileOp> {
    let frames = || prop_oneof![3 => Just(1000), 1 => 0..30u64];
    prop_oneof![
        2 => (0..FILE_PAGES, 0..5u8).prop_map(|(index, order)| FileOp::Put { index, order }),
        1 => (0..=FILE_PAGES * 4096).prop_map(|bytes| FileOp::Resize { bytes }),
        1 => (0..FILE_PAGES, 1..20u64).prop_map(|(first, pages)| FileOp::Punch { first, pages }),
        3 => (0..FILE_PAGES, 1..1000u32).prop_map(|(index, payload)| FileOp::Evict { index, payload }),
        1 => (0..FILE_PAGES, 1..64u64).prop_map(|(first, pages)| FileOp::WriteBack { first, pages }),
        1 => (0..FILE_PAGES).prop_map(|index| FileOp::Lock { index }),
        3 => (0..FILE_PAGES + 4, 0..40u64, 0..5u8, frames(), any::<u64>(), any::<u64>(), 0..30usize).prop_map(
            |(first, pages, order_max, frames, touch, reach, first_only)| {
                FileOp::Grab { first, pages, order_max, frames, touch, reach, first_only }
            }
        ),
    ]
}

/// A page of the file in the twin: its bytes where they are compared, and whether the device lacks them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TwinPage {
    bytes: [u8; SAMPLED.len()],
    is_dirty: bool,
}

struct FileTwin<'a> {
    fixture: &'a MappingFixture,
    size: u64,
    /// First page to order.
    folios: BTreeMap<u64, u8>,
    pages: BTreeMap<u64, TwinPage>,
    shadows: BTreeMap<u64, u32>,
    locked: Option<Grabbed<'a>>,
}

impl<'a> FileTwin<'a> {
    fn at(&self, index: u64) -> Option<(u64, u8)> {
        let (&first, &order) = self.folios.range(..=index).next_back()?;
        (index < first + (1 << order)).then_some((first, order))
    }
    fn is_locked(&self, first: u64) -> bool {
        self.locked.as_ref().and_then(|locked| locked.start()) == Some(page(first))
    }
    fn insert(&mut self, first: u64, order: u8, bytes: impl Fn(u64) -> [u8; SAMPLED.len()]) {
        self.folios.insert(first, order);
        for index in first..first + (1 << order) {
            self.pages.insert(index, TwinPage { bytes: bytes(index), is_dirty: false });
            self.shadows.remove(&index);
        }
    }
    fn remove(&mut self, first: u64) {
        let order = self.folios.remove(&first).expect("a folio of the twin");
        self.pages.retain(|index, _| !(first..first + (1 << order)).contains(index));
    }

    /// An insertion is refused where a folio is; else it returns the shadow at its highest page that has one.
    fn put(&mut self, first: u64, order: u8) {
        let pages = first..first + (1 << order);
        let folio = self.fixture.folio(first, order);
        if pages.clone().any(|index| self.at(index).is_some()) {
            assert_eq!(self.fixture.add(folio), AddedFolio::Present);
            return self.fixture.free(folio);
        }
        let want = self.shadows.range(pages).next_back().map(|(_, payload)| *payload);
        let AddedFolio::Added { shadow } = self.fixture.add(folio) else { panic!("nothing is in its way") };
        assert_eq!(shadow.map(|value| value.payload()), want, "the shadow of {first}, order {order}");
        self.fixture.complete(folio);
        self.insert(first, order, |index| SAMPLED.map(|at| index.to_le_bytes()[at as usize % 8]));
    }

    /// The folio over `edge` is halved until none is, unless it is locked.
    fn split(&mut self, edge: u64) -> bool {
        let split = self.fixture.mapping.split_at(page(edge));
        let Some((first, mut order)) = self.at(edge).filter(|(first, _)| *first < edge) else {
            assert_eq!(split, SplitOutcome::Done);
            return true;
        };
        if self.is_locked(first) {
            assert_eq!(split, SplitOutcome::Busy);
            return false;
        }
        assert_eq!(split, SplitOutcome::Done);
        let mut first = first;
        self.folios.remove(&first);
        while first < edge {
            order -= 1;
            let middle = first + (1 << order);
            let (other, next) = if edge < middle { (middle, first) } else { (first, middle) };
            self.folios.insert(other, order);
            first = next;
        }
        self.folios.insert(first, order);
        true
    }

    /// Folios and shadows in the range go; of shadows, the whole entry.
    fn punch(&mut self, range: std::ops::Range<u64>) {
        let entries = self.fixture.tree(|tree| tree.range(0, u64::MAX).collect::<Vec<_>>());
        self.fixture.mapping.remove_range(page(range.start)..page(range.end), RemoveFilter::All);
        let inside = |first: u64, order: u8| range.start <= first && first + (1 << order) <= range.end;
        let gone: Vec<u64> =
            self.folios.iter().filter(|(at, order)| inside(**at, **order)).map(|it| *it.0).collect();
        gone.into_iter().for_each(|first| self.remove(first));
        for (first, entry, order) in entries {
            let pages = first..first + (1 << order);
            if matches!(entry.kind(), Kind::Value(_)) && first < range.end && range.start < pages.end {
                self.shadows.retain(|index, _| !pages.contains(index));
            }
        }
        self.locked = self.locked.take().filter(|locked| locked.folios().all(|folio| folio.is_live()));
    }

    fn resize(&mut self, bytes: u64) {
        let edge = bytes.div_ceil(4096);
        if bytes < self.size && !self.split(edge) {
            return;
        }
        self.fixture.mapping.set_size(bytes);
        if bytes < self.size {
            self.punch(edge..1 << 20);
        }
        self.size = bytes;
    }

    /// A folio leaves its shadow unless it is dirty, held or locked.
    fn evict(&mut self, index: u64, payload: u32) {
        let Some((first, order)) = self.at(index) else { return };
        let Kind::Folio(frame) = self.fixture.load(first).kind() else { panic!("no folio at {first}") };
        let mut pages = first..first + (1 << order);
        let stays = self.is_locked(first) || pages.any(|index| self.pages[&index].is_dirty);
        let leave = |_| Replacement::Shadow(payload);
        let gone = self.fixture.mapping.lock().evict(page(first), Frame(frame), leave);
        assert_eq!(gone, (!stays).then_some(Order(order)), "page {first}");
        if !stays {
            self.fixture.arena.free(Frame(frame), Order(order));
            self.remove(first);
            self.shadows.extend((first..first + (1 << order)).map(|index| (index, payload)));
        }
    }

    fn write_back(&mut self, pages: std::ops::Range<u64>) {
        let (mut runs, mut guard) = (Vec::new(), self.fixture.mapping.lock());
        guard.begin_writeback(page(pages.start)..page(pages.end), TakeFilter::Dirty, 1000, &mut runs);
        for run in runs {
            for index in run.index.0..run.index.0 + u64::from(run.pages) {
                let known = self.pages.get_mut(&index).expect("a page of the twin");
                assert!(known.is_dirty && pages.contains(&index), "page {index} is written for no reason");
                known.is_dirty = false;
            }
            guard.end_writeback(run, WritebackOutcome::Written, Millis(2));
        }
        assert!(self.pages.range(pages).all(|(_, known)| !known.is_dirty), "a dirty page was passed over");
    }

    /// The expected result of a grab that does not wait.
    fn expected(
        &self,
        pages: std::ops::Range<u64>,
        order_max: u8,
        mut frames: u64,
    ) -> (Vec<(u64, u8)>, GrabEnd<&'static str>) {
        let (limit, mut at, mut got) = (pages.end.min(self.size.div_ceil(4096)), pages.start, Vec::new());
        while at < pages.end {
            if at >= limit {
                return (got, GrabEnd::Size);
            }
            let Some((first, order)) = self.at(at) else {
                let gap = (at..limit).take_while(|index| self.at(*index).is_none()).count() as u64;
                let some = gap.min(frames);
                got.extend(pieces(at, some, order_max));
                (at, frames) = (at + some, frames - some);
                if some < gap {
                    return (got, GrabEnd::NoFrames);
                }
                continue;
            };
            if self.is_locked(first) {
                return (got, GrabEnd::Locked);
            }
            got.push((first, order));
            at = first + (1 << order);
        }
        (got, GrabEnd::All)
    }

    /// Puts `stamp` into a folio, from the tenth byte of a page of it to that of another.
    fn touch(&mut self, folio: &mut LockedFolio<'_>, stamp: u8, reach: u64) {
        let count = u64::from(folio.order().pages());
        let (one, other) = (reach % count, reach / 64 % count);
        let (from, to) = (folio.first().0 + one.min(other), folio.first().0 + one.max(other));
        let bytes = vec![stamp; ((to - from) * 4096 + 1) as usize];
        folio.write(from * 4096 + 9, &bytes).unwrap();
        let is_new = folio.state() == LockedState::New;
        for index in folio.first().0..folio.end().0 {
            let known = self.pages.get_mut(&index).unwrap();
            for (byte, at) in known.bytes.iter_mut().zip(SAMPLED) {
                let at = index * 4096 + at;
                *byte = if (from * 4096 + 9..=to * 4096 + 9).contains(&at) { stamp } else { *byte };
            }
            known.is_dirty |= is_new || (from..=to).contains(&index);
        }
    }

    fn check(&self) {
        let mut entries = (BTreeMap::new(), BTreeMap::new());
        self.fixture.tree(|tree| {
            for (first, entry, order) in tree.range(0, u64::MAX) {
                match entry.kind() {
                    Kind::Folio(_) => drop(entries.0.insert(first, order)),
                    Kind::Value(value) => {
                        entries.1.extend((first..first + (1 << order)).map(|index| (index, value.payload())));
                    }
                    other => panic!("{other:?} at {first}"),
                }
            }
        });
        assert_eq!(entries, (self.folios.clone(), self.shadows.clone()), "folios and shadows");
        assert_eq!(self.fixture.pages(), self.pages.len() as u64);
        for (&index, known) in &self.pages {
            let held = self.fixture.mapping.try_hold(page(index)).unwrap();
            assert_eq!(
                self.fixture.mapping.is_page_dirty(&held, page(index)),
                known.is_dirty,
                "page {index}"
            );
            let (mut bytes, mut got) = ([0; 4096], [0; SAMPLED.len()]);
            held.copy_out(index * 4096, &mut bytes);
            got.iter_mut().zip(SAMPLED).for_each(|(byte, at)| *byte = bytes[at as usize]);
            assert_eq!(got, known.bytes, "page {index}");
        }
        let dirty = self.pages.values().filter(|known| known.is_dirty).count() as u64;
        assert_eq!(self.fixture.mapping.writeback().dirty_pages().dirty(), dirty);
        self.fixture.check();
    }
}

fn play_file(way: Option<&'static dyn IndexHooks>, ops: &[FileOp]) {
    let (fixture, wait_queue) = (MappingFixture::new().with_hooks(way), WaitQueue::new());
    let free = all_free(&fixture);
    let (size, test) = (FILE_PAGES * 4096, Test { mapping: &fixture.mapping, wait_queue: &wait_queue });
    fixture.mapping.set_size(size);
    let (folios, pages, shadows) = Default::default();
    let mut twin = FileTwin { fixture: &fixture, size, folios, pages, shadows, locked: None };
    for op in ops {
        match *op {
            FileOp::Put { index, order } => {
                let first = index >> order << order;
                if first + (1 << order) <= twin.size.div_ceil(4096) {
                    twin.put(first, order);
                }
            }
            FileOp::Resize { bytes } => twin.resize(bytes),
            FileOp::Punch { first, pages } => {
                if twin.split(first) && twin.split(first + pages) {
                    twin.punch(first..first + pages);
                }
            }
            FileOp::Evict { index, payload } => twin.evict(index, payload),
            FileOp::WriteBack { first, pages } => twin.write_back(first..first + pages),
            FileOp::Lock { index } => {
                twin.locked = None;
                if twin.at(index).is_some() {
                    let mut none = Frames::of(&fixture, 0);
                    twin.locked = Some(test.grab(index..index + 1, nowait(0), &mut none).0);
                }
            }
            FileOp::Grab { first, pages, order_max, frames, touch, reach, first_only } => {
                let (want, reason) = twin.expected(first..first + pages, order_max, frames);
                let mut source = Frames::of(&fixture, order_max).at_most(frames);
                let (mut grabbed, ended) = test.grab(first..first + pages, nowait(order_max), &mut source);
                let got: Vec<_> = grabbed.folios().map(|it| (it.first().0, it.order().0)).collect();
                assert_eq!((&got, ended), (&want, reason), "{op:?}");
                all_locked(&fixture, &grabbed);
                let mut untouched = Vec::new();
                for (nth, folio) in grabbed.folios_mut().enumerate() {
                    let (at, is_there) = (folio.first().0, twin.folios.contains_key(&folio.first().0));
                    assert_eq!(folio.state() == LockedState::Data, is_there, "page {at}");
                    if !is_there {
                        twin.insert(at, folio.order().0, |_| [0; SAMPLED.len()]);
                    }
                    if touch >> (nth % 64) & 1 == 1 {
                        twin.touch(folio, nth as u8 + 100, reach.rotate_left(nth as u32));
                    } else if !is_there {
                        untouched.push(at);
                    }
                }
                grabbed.commit_first(first_only.min(grabbed.len()));
                drop(grabbed);
                untouched.into_iter().for_each(|at| twin.remove(at));
            }
        }
        twin.check();
    }
    drop(twin);
    nothing_leaks(&fixture, free);
}

proptest! {
    #[test]
    fn a_file_that_is_cut_evicted_and_read_again_is_grabbed_as_a_naive_twin_says(
        way in prop::sample::select(&WAYS[..]), ops in prop::collection::vec(file_op(), 1..40),
    ) {
        play_file(way, &ops);
    }
}
