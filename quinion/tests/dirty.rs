//! Dirty: what differs from the file stays until it is written, is written once, and is counted right.
//!
//! A mapping without the paths above it: the test itself takes runs for write-back, and reports how they ended. By
//! letter and number: D06 to D08, D14 to D16 and T09, as far as they concern the mapping; and the tags of a sync.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quinion::backend::FillRun;
use quinion::internals::arena::{Arena, Flags, HOLDS_MAX};
use quinion::internals::mapping::{
    AddedFolio, DetachOutcome, DirtyPages, DropReason, FolioLifetime, FolioShape, MarkOutcome, NewFolio,
    RUN_PAGES_MAX, RemoveFilter, Replacement, TAGGED_MAX, TakeEnd, TakeFilter, WritebackEnd,
    WritebackOutcome, WritebackRun,
};
use quinion::internals::sync::LockWait;
use quinion::internals::units::{Millis, Order, Orders, PAGE_SIZE, PageIndex};
use quinion_testing::fixtures::mapping::{MappingFixture, page};

const NOW: Millis = Millis(7);

fn pages(range: Range<u64>) -> Range<PageIndex> {
    page(range.start)..page(range.end)
}

struct Fixture {
    base: MappingFixture,
    totals: Arc<DirtyPages>,
}

impl std::ops::Deref for Fixture {
    type Target = MappingFixture;
    fn deref(&self) -> &MappingFixture {
        &self.base
    }
}

impl Fixture {
    fn new() -> Self {
        Self::of(Arena::MEMORY_MIN)
    }
    fn of(memory: u64) -> Self {
        let (mut base, totals) = (MappingFixture::of(memory), Arc::new(DirtyPages::default()));
        base.mapping = base.mapping.with_dirty_pages(&totals);
        Self { base, totals }
    }
    /// A filled folio; one that drops behind if `fate` says so.
    fn filled(&self, index: u64, order: u8, fate: FolioLifetime) -> NewFolio {
        let folio = self.folio(index, order);
        let shape = FolioShape { fate, ..FolioShape::of(Orders::PAGES) };
        let added = self.mapping.add_folio_watched(folio, shape, LockWait::Wait, &mut || {});
        assert!(matches!(added, AddedFolio::Added { .. }), "{added:?}");
        self.complete(folio);
        folio
    }
    fn plain(&self, index: u64, order: u8) -> NewFolio {
        self.filled(index, order, FolioLifetime::Stays)
    }
    /// Folios of single pages, whose frames follow each other.
    fn row(&self, index: u64, count: u32) -> FillRun {
        let run = self.run(index, count);
        let shape = FolioShape::of(Orders::PAGES);
        let added = self.mapping.add_folio_range(run, shape, LockWait::Wait, &mut |_, _| {}).unwrap();
        assert_eq!(added.pages, count);
        for nth in 0..count {
            self.arena.view().own(run.frame.plus(nth)).complete();
        }
        run
    }
    /// Marks pages, folio by folio; returns how many were not dirty.
    fn mark(&self, range: Range<u64>) -> u32 {
        let (mut at, mut newly) = (range.start, 0);
        while at < range.end {
            let held = self.mapping.try_hold(page(at)).expect("a folio is there");
            let end = range.end.min(held.first().0 + u64::from(held.order().pages()));
            let dirty = self.mapping.is_dirty(&held, pages(at..end));
            let marked = self.mapping.lock().mark_dirty(&held, pages(at..end), NOW);
            match marked {
                MarkOutcome::Done { newly: more } => {
                    assert_eq!(dirty, more == 0, "the look without the lock says the same");
                    newly += more;
                }
                MarkOutcome::Left => panic!("page {at} has left"),
            }
            at = end;
        }
        newly
    }
    fn begin(&self, range: Range<u64>, which: TakeFilter, max: u32) -> (TakeEnd, Vec<WritebackRun>) {
        let mut runs = Vec::new();
        let begun = self.mapping.lock().begin_writeback(pages(range), which, max, &mut runs);
        (begun, runs)
    }
    fn take_all(&self) -> Vec<WritebackRun> {
        let (begun, runs) = self.begin(0..u64::MAX >> 12, TakeFilter::Dirty, u32::MAX);
        assert_eq!(begun, TakeEnd::Done);
        runs
    }
    fn end(&self, run: WritebackRun, outcome: WritebackOutcome) -> WritebackEnd {
        let ended = self.mapping.lock().end_writeback(run, outcome, NOW);
        self.check();
        ended
    }
    fn end_all(&self, runs: impl IntoIterator<Item = WritebackRun>) {
        for run in runs {
            self.end(run, WritebackOutcome::Written);
        }
    }
    fn evict(&self, folio: NewFolio) -> bool {
        self.mapping.lock().evict(folio.index, folio.frame, |_| Replacement::Nothing).is_some()
    }
    fn counts(&self) -> (u64, u64, u64) {
        let of = |pages: &DirtyPages| (pages.dirty(), pages.writeback(), pages.drop_behind());
        assert_eq!(of(&self.totals), of(self.mapping.writeback().dirty_pages()));
        of(&self.totals)
    }
    fn has(&self, folio: NewFolio, flag: u64) -> bool {
        self.word(folio.frame).has(flag)
    }
    fn drop_behind(&self, range: Range<u64>) -> u64 {
        let before = self.pages();
        let mut at = page(range.start);
        while at < page(range.end) {
            let pages = at..page(range.end);
            at = self.mapping.drop_behind(pages, DropReason::LeftOver, LockWait::Wait).unwrap().next;
        }
        before - self.pages()
    }
    #[track_caller]
    fn finish(&self) {
        self.base.finish();
        assert_eq!((self.counts(), self.mapping.writeback().detached_pages()), ((0, 0, 0), 0));
        assert_eq!(self.mapping.writeback().dirty_since(), None);
    }
}

fn run(folio: NewFolio, from: u32, pages: u32) -> WritebackRun {
    let index = folio.index.plus(u64::from(from));
    WritebackRun { index, frame: folio.frame.plus(from), pages }
}

#[test]
fn one_changed_page_of_a_large_folio_is_one_page_to_write() {
    let fixture = Fixture::new();
    let folio = fixture.plain(512, 9);
    assert_eq!((fixture.mark(600..601), fixture.mark(600..601)), (1, 0));
    assert_eq!(fixture.counts(), (1, 0, 0));
    assert!(fixture.has(folio, Flags::DIRTY) && !fixture.has(folio, Flags::WRITEBACK));
    assert_eq!(fixture.mapping.writeback().dirty_since(), Some(NOW));
    assert_eq!(fixture.take_all(), [run(folio, 88, 1)]);
    assert_eq!(fixture.counts(), (0, 1, 0));
    assert!(!fixture.has(folio, Flags::DIRTY) && fixture.has(folio, Flags::WRITEBACK));
    assert_eq!(fixture.mapping.writeback().dirty_since(), None);
    assert_eq!(fixture.mapping.lock().next_writeback(pages(0..700)), Some(page(600)));
    assert_eq!(fixture.end(run(folio, 88, 1), WritebackOutcome::Written), WritebackEnd::default());
    assert_eq!((fixture.counts(), fixture.word(folio.frame).holds()), ((0, 0, 0), 0));
    fixture.finish();
}

#[test]
fn pages_that_are_not_in_the_file_yet_are_not_evicted() {
    let fixture = Fixture::new();
    let folio = fixture.plain(8, 2);
    fixture.mark(9..10);
    assert!(!fixture.evict(folio));
    let runs = fixture.take_all();
    assert!(!fixture.evict(folio));
    fixture.mark(10..11);
    fixture.end(runs[0], WritebackOutcome::Written);
    assert!(!fixture.evict(folio), "another page of it was changed meanwhile");
    fixture.end_all(fixture.take_all());
    assert!(fixture.evict(folio));
    fixture.free(folio);
    fixture.finish();
}

#[test]
fn runs_go_over_folios_that_follow_each_other_in_file_and_memory_up_to_their_length() {
    let fixture = Fixture::new();
    let row = fixture.row(100, 400);
    fixture.mark(100..500);
    let (begun, runs) = fixture.begin(0..1000, TakeFilter::Dirty, 300);
    assert_eq!(begun, TakeEnd::More(page(400)));
    let expected = |from: u32, pages| WritebackRun {
        index: row.index.plus(u64::from(from)),
        frame: row.frame.plus(from),
        pages,
    };
    assert_eq!(runs, [expected(0, RUN_PAGES_MAX), expected(256, 44)]);
    let (begun, rest) = fixture.begin(400..450, TakeFilter::Dirty, 300);
    assert_eq!((begun, &rest[..]), (TakeEnd::Done, &[expected(300, 50)][..]));
    assert_eq!(fixture.counts(), (50, 350, 0));
    fixture.end_all(runs.into_iter().chain(rest));
    fixture.finish();
}

#[test]
fn a_run_may_end_in_parts_and_failed_pages_are_dirty_again() {
    let fixture = Fixture::new();
    let folio = fixture.plain(0, 4);
    fixture.mark(2..12);
    assert_eq!(fixture.take_all(), [run(folio, 2, 10)]);
    assert_eq!(fixture.end(run(folio, 2, 3), WritebackOutcome::Written), WritebackEnd::default());
    assert!(fixture.has(folio, Flags::WRITEBACK));
    let later = Millis(99);
    let ended = fixture.mapping.lock().end_writeback(run(folio, 5, 7), WritebackOutcome::Failed, later);
    assert_eq!(ended, WritebackEnd { failed: 7, ..WritebackEnd::default() });
    assert_eq!((fixture.counts(), fixture.mapping.writeback().dirty_since()), ((7, 0, 0), Some(later)));
    assert_eq!(fixture.take_all(), [run(folio, 5, 7)], "it is tried again");
    fixture.end(run(folio, 5, 7), WritebackOutcome::Written);
    fixture.finish();
}

#[test]
fn a_page_changed_under_writeback_is_written_again_and_not_twice_at_a_time() {
    let fixture = Fixture::new();
    let folio = fixture.plain(0, 2);
    fixture.mark(0..2);
    let first = fixture.take_all();
    assert_eq!((fixture.mark(1..3), fixture.counts()), (2, (2, 2, 0)));
    assert_eq!(fixture.take_all(), [run(folio, 2, 1)], "the page that is being written waits for its turn");
    // Both at once are under way; each ends for itself.
    fixture.end(run(folio, 2, 1), WritebackOutcome::Written);
    assert!(fixture.has(folio, Flags::WRITEBACK));
    assert_eq!(fixture.end(first[0], WritebackOutcome::Failed).failed, 1, "the other one was dirty already");
    assert_eq!(fixture.take_all(), [run(folio, 0, 2)]);
    fixture.end(run(folio, 0, 2), WritebackOutcome::Written);
    fixture.finish();
}

#[test]
fn a_folio_filled_by_its_writer_is_dirty_before_it_is_unlocked() {
    let fixture = Fixture::new();
    let run_in = fixture.run(3, 6); // folios at 3, 4..8 and 8
    let shape = FolioShape::of(Orders { min: Order(0), max: Order(2) });
    fixture.mapping.add_folio_range(run_in, shape, LockWait::Wait, &mut |_, _| {}).unwrap();
    assert_eq!(fixture.mapping.lock().mark_run_dirty(run_in, NOW), MarkOutcome::Done { newly: 6 });
    fixture.check();
    for nth in 0..6 {
        let head = fixture.arena.view().own(run_in.frame.plus(nth));
        if head.word().has(Flags::LOCKED) {
            head.complete();
        }
    }
    fixture.check();
    let runs = fixture.take_all();
    assert_eq!(runs.iter().map(|run| run.pages).sum::<u32>(), 6);
    fixture.end_all(runs);
    fixture.finish();
}

#[test]
fn a_mark_on_a_folio_that_has_left_says_so() {
    let fixture = Fixture::new();
    fixture.plain(0, 0);
    let held = fixture.mapping.try_hold(page(0)).unwrap();
    fixture.mapping.lock().remove_all();
    assert!(!fixture.mapping.is_dirty(&held, pages(0..1)));
    assert_eq!(fixture.mapping.lock().mark_dirty(&held, pages(0..1), NOW), MarkOutcome::Left);
    assert_eq!(fixture.counts(), (0, 0, 0));
    drop(held);
    fixture.finish();
}

#[test]
fn write_back_holds_a_folio_that_has_all_the_holds_others_can_have() {
    let fixture = Fixture::new();
    let folio = fixture.plain(0, 0);
    fixture.mark(0..1);
    let held: Vec<_> = (0..HOLDS_MAX).map(|_| fixture.mapping.try_hold(page(0)).unwrap()).collect();
    let runs = fixture.take_all();
    assert_eq!(fixture.word(folio.frame).holds(), HOLDS_MAX + 1);
    assert!(fixture.mapping.try_hold(page(0)).is_err());
    fixture.mapping.lock().remove_all();
    drop(held);
    assert_eq!(fixture.end(runs[0], WritebackOutcome::Written).left, 1);
    fixture.finish();
}

// ---- leaving ------------------------------------------------------------------------------------------

/// T09: write-back skips a folio that has left the index. The frames of one that is being written are freed when the
/// device has ended.
#[test]
fn t09_a_folio_out_of_the_index_is_not_written_and_its_frames_wait_for_the_device() {
    let fixture = Fixture::new();
    fixture.free(fixture.folio(0, 9)); // the arena has grown
    let free = fixture.free_pages();
    let folio = fixture.plain(0, 3);
    fixture.mark(0..8);
    let (_, runs) = fixture.begin(2..4, TakeFilter::Dirty, 100);
    assert_eq!(fixture.mapping.lock().remove_all(), 8);
    assert_eq!((fixture.counts(), fixture.mapping.writeback().detached_pages()), ((0, 2, 0), 2));
    assert_eq!(fixture.take_all(), []);
    assert_eq!(fixture.mapping.lock().next_writeback(pages(0..100)), None);
    assert!(fixture.free_pages() < free, "the device reads the frames");
    // The same pages come again, and are other folios'.
    let anew = fixture.plain(0, 3);
    assert_ne!(anew.frame, folio.frame);
    fixture.mark(2..3);
    assert_eq!(
        fixture.end(runs[0], WritebackOutcome::Failed),
        WritebackEnd { left: 2, ..WritebackEnd::default() }
    );
    assert_eq!(
        (fixture.counts(), fixture.mapping.writeback().detached_pages()),
        ((1, 0, 0), 0),
        "nothing is dirty again"
    );
    fixture.finish();
    assert_eq!(fixture.free_pages(), free);
}

#[test]
fn pages_that_are_forgotten_are_not_written() {
    let fixture = Fixture::new();
    let folio = fixture.plain(64, 6);
    fixture.mark(64..128);
    fixture.mapping.lock().tag_to_write(pages(0..1000));
    assert_eq!(fixture.mapping.lock().forget_dirty(pages(70..1000)), 58);
    fixture.check();
    assert_eq!(fixture.begin(0..1000, TakeFilter::ToWrite, 100).1, [run(folio, 0, 6)]);
    fixture.mark(100..101);
    assert_eq!(fixture.mapping.lock().forget_dirty(pages(0..1000)), 1, "what is being written goes on");
    fixture.check();
    assert!(!fixture.has(folio, Flags::DIRTY));
    fixture.end(run(folio, 0, 6), WritebackOutcome::Written);
    fixture.finish();
}

// ---- drop-behind ----------------------------------------------------------------------------------------

/// D06: a flagged folio that is dirty or under write-back is not dropped, and keeps its flag until it is written.
#[test]
fn d06_a_dirty_folio_or_one_under_writeback_is_not_dropped_and_stays_flagged() {
    let fixture = Fixture::new();
    let folio = fixture.filled(0, 2, FolioLifetime::DropsBehind);
    fixture.filled(4, 2, FolioLifetime::DropsBehind);
    fixture.mark(1..2);
    assert_eq!((fixture.drop_behind(0..100), fixture.counts()), (4, (1, 0, 1)), "the clean one goes");
    let runs = fixture.take_all();
    assert_eq!((fixture.drop_behind(0..100), fixture.counts()), (0, (0, 1, 0)));
    assert!(fixture.has(folio, Flags::DROPBEHIND));
    let ended = fixture.end(runs[0], WritebackOutcome::Written);
    assert_eq!(ended.behind, Some(pages(0..4)));
    assert_eq!(fixture.drop_behind(0..4), 4);
    fixture.finish();
}

/// D07: a flagged folio that is dirtied between a reader's check and the reader's lock is not dropped.
///
/// 1. a reader has passed a flagged folio, and sees that it is clean;
/// 2. a writer changes it and marks it;
/// 3. the reader locks the tree and drops what it has passed.
#[test]
fn d07_a_folio_dirtied_between_a_readers_look_and_its_lock_is_not_dropped() {
    let fixture = Fixture::new();
    fixture.filled(0, 0, FolioLifetime::DropsBehind);
    assert_eq!(fixture.mapping.index().find_behind(page(0)), Some((page(0), Order(0))));
    fixture.mark(0..1);
    assert_eq!(fixture.drop_behind(0..1), 0);
    assert_eq!(fixture.counts(), (1, 0, 1));
    fixture.finish();
}

/// D07: a page that a writer was told is dirty is there until it is written, while another thread drops and evicts it.
#[test]
fn d07_no_dirty_page_is_lost_to_threads_that_drop_and_evict() {
    /// Reports when it is dropped.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let fixture = Fixture::new();
    let over = AtomicBool::new(false);
    let rounds = if cfg!(miri) { 20 } else { 2000 };
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                fixture.mapping.drop_behind(pages(0..1), DropReason::LeftOver, LockWait::Wait);
                let folio = fixture.mapping.try_hold(page(0)).map(|held| held.frame());
                if let Ok(frame) = folio
                    && fixture.mapping.lock().evict(page(0), frame, |_| Replacement::Nothing).is_some()
                {
                    fixture.arena.free(frame, Order(0));
                }
            }
        });
        let over = Over(&over);
        let (mut written, mut left) = (0, 0);
        for _ in 0..rounds {
            let Ok(held) = fixture.mapping.try_hold(page(0)) else {
                fixture.filled(0, 0, FolioLifetime::DropsBehind);
                continue;
            };
            let marked = fixture.mapping.lock().mark_dirty(&held, pages(0..1), NOW);
            match marked {
                MarkOutcome::Left => left += 1,
                MarkOutcome::Done { newly } => {
                    assert_eq!(newly, 1);
                    let frame = held.frame();
                    drop(held);
                    std::thread::yield_now();
                    let runs = fixture.take_all();
                    assert_eq!(runs, [WritebackRun { index: page(0), frame, pages: 1 }]);
                    assert!(fixture.mapping.try_hold(page(0)).is_ok());
                    fixture.mapping.lock().end_writeback(runs[0], WritebackOutcome::Written, NOW);
                    written += 1;
                }
            }
        }
        drop(over);
        assert!(written > 0, "{written} written, {left} had left");
    });
    fixture.finish();
}

/// D08: a flagged folio leaves the index though other readers hold it. They end their copies from the same memory, the
/// next one finds no folio, and the frames are freed once, with the last of them.
#[test]
fn d08_a_folio_dropped_under_other_readers_is_theirs_until_the_last_of_them_is_done() {
    let fixture = Fixture::new();
    fixture.free(fixture.folio(0, 9)); // the arena has grown
    let free = fixture.free_pages();
    let folio = fixture.filled(4, 2, FolioLifetime::DropsBehind);
    let [second, third] = [4, 6].map(|at| fixture.mapping.try_hold(page(at)).unwrap());
    let mut bytes = [0; 4 * PAGE_SIZE];
    let (begun, rest) = bytes.split_at_mut(5000);
    assert_eq!(second.copy_out(4 * PAGE_SIZE as u64, begun), 5000);
    assert_eq!(fixture.drop_behind(4..8), 4, "the first reader has passed it");
    assert!((4..8).all(|at| fixture.load(at).is_empty() && fixture.mapping.try_hold(page(at)).is_err()));
    // The device is read again, into other frames.
    let anew = fixture.plain(4, 2);
    assert_ne!(anew.frame, folio.frame);
    assert_eq!(second.copy_out(4 * PAGE_SIZE as u64 + 5000, rest), rest.len());
    for (at, words) in (4..).zip(bytes.chunks(PAGE_SIZE)) {
        assert!(words.chunks(8).all(|word| word == u64::to_le_bytes(at)), "page {at}");
    }
    drop(second);
    assert_eq!(fixture.free_pages(), free - 8, "one reader has it still");
    drop(third);
    assert_eq!(fixture.free_pages(), free - 4);
    fixture.finish();
    assert_eq!(fixture.free_pages(), free);
}

/// D14: as far as the mapping goes, a failed write keeps the folio, flagged and dirty; the last good one lets it go.
#[test]
fn d14_a_folio_is_offered_to_be_dropped_after_its_last_good_write_only() {
    let fixture = Fixture::new();
    let folio = fixture.filled(0, 1, FolioLifetime::DropsBehind);
    fixture.mark(0..2);
    let runs = fixture.take_all();
    assert_eq!(fixture.end(runs[0], WritebackOutcome::Failed).behind, None);
    assert_eq!((fixture.drop_behind(0..2), fixture.counts()), (0, (2, 0, 2)));
    fixture.take_all();
    fixture.mark(1..2);
    assert_eq!(fixture.end(run(folio, 0, 2), WritebackOutcome::Written).behind, None, "it is dirty again");
    fixture.take_all();
    assert_eq!(fixture.end(run(folio, 1, 1), WritebackOutcome::Written).behind, Some(pages(0..2)));
    assert_eq!(fixture.drop_behind(0..2), 2);
    fixture.finish();
}

/// D15: a flagged dirty folio that a plain write adopts before its write-back stays cached after it.
#[test]
fn d15_a_folio_adopted_by_a_plain_write_stays_after_its_write_back() {
    let fixture = Fixture::new();
    fixture.filled(0, 2, FolioLifetime::DropsBehind);
    fixture.mark(0..3);
    assert_eq!(fixture.counts(), (3, 0, 3));
    let held = fixture.mapping.try_hold(page(1)).unwrap();
    fixture.mapping.lock().adopt(&held);
    drop(held);
    assert_eq!(fixture.counts(), (3, 0, 0));
    let runs = fixture.take_all();
    assert_eq!(fixture.end(runs[0], WritebackOutcome::Written).behind, None);
    assert_eq!(fixture.drop_behind(0..4), 0);
    fixture.finish();
}

/// Something after which a folio's pages are not dirty, or do not drop behind.
type EndsBeingDirty = fn(&Fixture, NewFolio);

/// D16: the counter of flagged dirty pages returns to 0 however they stop being dirty or flagged: by write-back,
/// truncation, a change from outside, a plain overwrite, a plain read or deletion. Splits are in `split_folio.rs`.
#[test]
fn d16_the_counter_of_flagged_dirty_pages_returns_to_nothing() {
    let ends: [(&str, EndsBeingDirty); 8] = [
        ("write-back", |fixture, _| {
            fixture.take_all();
        }),
        ("truncation of the folio", |fixture, _| {
            assert_eq!(fixture.mapping.remove_range(pages(0..4), RemoveFilter::All), 4);
        }),
        ("truncation within the folio", |fixture, _| {
            assert_eq!(fixture.mapping.lock().forget_dirty(pages(1..4)), 1);
            assert_eq!(fixture.counts(), (1, 0, 1), "the page before the new end is dirty still");
            fixture.take_all();
        }),
        // The pages that are nowhere else stay, and are written.
        ("a change from outside", |fixture, _| {
            assert_eq!(fixture.mapping.invalidate().unwrap(), 0);
            assert_eq!(fixture.counts(), (2, 0, 2));
            fixture.take_all();
        }),
        ("the end of the file", |fixture, _| {
            fixture.mapping.lock().remove_all();
        }),
        ("a plain overwrite", |fixture, _| {
            let held = fixture.mapping.try_hold(page(0)).unwrap();
            fixture.mapping.lock().adopt(&held);
        }),
        ("a plain read, met by who drops", |fixture, folio| {
            let byte = fixture.arena.view().referenced(folio.frame).unwrap();
            byte.store(1, Ordering::Relaxed);
            fixture.drop_behind(0..4);
        }),
        ("deletion", |_, _| {}),
    ];
    for (name, end) in ends {
        let fixture = Fixture::new();
        let folio = fixture.filled(0, 2, FolioLifetime::DropsBehind);
        fixture.mark(0..2);
        assert_eq!(fixture.counts(), (2, 0, 2), "{name}");
        end(&fixture, folio);
        fixture.check();
        let Fixture { base, totals } = fixture;
        drop(base); // the mapping dies; where it had its folio still, that was the end
        assert_eq!((totals.dirty(), totals.drop_behind()), (0, 0), "{name}");
    }
}

// ---- tags -----------------------------------------------------------------------------------------------

/// Writes what is tagged, as a sync does, and calls `meanwhile` before each take; returns the written pages.
fn sync(fixture: &Fixture, mut meanwhile: impl FnMut(usize)) -> Vec<u64> {
    let (all, mut at, mut written) = (0..1 << 30, page(0), Vec::new());
    loop {
        let next = fixture.mapping.lock().tag_to_write(at..page(all.end));
        if next == page(all.end) {
            break;
        }
        at = next;
    }
    let mut from = 0;
    for round in 0.. {
        meanwhile(round);
        let (begun, runs) = fixture.begin(from..all.end, TakeFilter::ToWrite, 16);
        for run in runs {
            written.extend(run.index.0..run.end().0);
            fixture.mapping.lock().end_writeback(run, WritebackOutcome::Written, NOW);
        }
        match begun {
            TakeEnd::Done => break,
            TakeEnd::More(next) | TakeEnd::Busy(next) => from = next.0,
        }
    }
    written
}

#[test]
fn a_sync_is_not_prolonged_by_pages_dirtied_after_its_tags() {
    let fixture = Fixture::new();
    fixture.row(0, 500);
    fixture.mark(0..100);
    // A writer ahead of the sync, faster than it takes: of pages that were clean, and behind it of what it has written.
    let written = sync(&fixture, |round| {
        let round = round as u64;
        fixture.mark(100 + 40 * round..(140 + 40 * round).min(500));
        fixture.mark(0..16 * round.min(5));
    });
    assert_eq!(written, (0..100).collect::<Vec<_>>());
    assert!(fixture.counts().0 > 0, "what came later is dirty still");
    fixture.finish();
}

#[test]
fn tags_are_set_4096_entries_a_hold() {
    let fixture = Fixture::of(64 << 20);
    let count = TAGGED_MAX as u64 + 100;
    for at in (0..count).step_by(512) {
        fixture.row(at, 512.min(count - at) as u32);
    }
    fixture.mark(0..count);
    let tag = |from: u64| fixture.mapping.lock().tag_to_write(pages(from..count));
    assert_eq!(tag(0), page(4096));
    assert_eq!(fixture.begin(4096..count, TakeFilter::ToWrite, 1), (TakeEnd::Done, vec![]), "not tagged yet");
    assert_eq!(tag(4096), page(count));
    let (_, last) = fixture.begin(count - 1..count, TakeFilter::ToWrite, 1);
    fixture.end(last[0], WritebackOutcome::Written);
    fixture.finish();
}

#[test]
fn a_page_that_is_tagged_and_being_written_is_waited_for() {
    let fixture = Fixture::new();
    let row = fixture.row(0, 4);
    fixture.mark(0..4);
    let (_, background) = fixture.begin(2..3, TakeFilter::Dirty, 9);
    fixture.mark(2..3);
    fixture.mapping.lock().tag_to_write(pages(0..4));
    let (begun, mut runs) = fixture.begin(0..4, TakeFilter::ToWrite, 9);
    assert_eq!((begun, runs.len(), runs[0].pages), (TakeEnd::Busy(page(2)), 1, 2));
    assert_eq!(fixture.begin(2..4, TakeFilter::ToWrite, 9), (TakeEnd::Busy(page(2)), vec![]));
    fixture.end(background[0], WritebackOutcome::Written);
    let (begun, more) = fixture.begin(2..4, TakeFilter::ToWrite, 9);
    assert_eq!((begun, more[0].frame), (TakeEnd::Done, row.frame.plus(2)));
    runs.extend(more);
    fixture.end_all(runs);
    fixture.finish();
}

/// 1 S, a sync, tags a dirty folio that is pinned.
/// 2 W, who writes to the pinned bytes, puts copies of its dirty pages in the folio's place.
/// 3 S finds nothing that is tagged, has the device synced, and returns `Ok`: the copies are not in the file.
#[test]
fn copies_of_a_pinned_folio_are_written_by_the_sync_that_tagged_it() {
    for unit in [0, 1] {
        let fixture = Fixture::new();
        fixture.plain(0, 2);
        fixture.mark(1..3);
        let held = fixture.mapping.try_hold(page(0)).unwrap();
        fixture.mapping.lock().tag_to_write(pages(0..16));
        let copied = fixture.mapping.detach_copy(&held, pages(0..0), Order(unit));
        assert!(matches!(copied, DetachOutcome::Done { .. }), "{copied:?}");
        drop(held);
        fixture.check();
        let (_, runs) = fixture.begin(0..16, TakeFilter::ToWrite, 9);
        let written: Vec<_> = runs.iter().flat_map(|run| run.index.0..run.end().0).collect();
        assert_eq!(written, [1, 2], "copies of order {unit}");
        fixture.end_all(runs);
        // A folio that no sync has tagged leaves copies that none has tagged.
        fixture.mark(1..2);
        let held = fixture.mapping.try_hold(page(1)).unwrap();
        let copied = fixture.mapping.detach_copy(&held, pages(0..0), Order(0));
        assert_eq!(copied, DetachOutcome::Done { pages: 1 });
        drop(held);
        assert_eq!(fixture.begin(0..16, TakeFilter::ToWrite, 9), (TakeEnd::Done, vec![]));
        fixture.mapping.lock().remove_all();
        fixture.finish();
    }
}

/// A to-write mark may only be removed by the thread that clears dirty for I/O: a background round takes a tagged page,
/// and the sync, who does not find it, finds it under write-back.
#[test]
fn a_tag_goes_with_the_last_dirty_page_and_not_before() {
    let fixture = Fixture::new();
    let folio = fixture.plain(0, 4);
    fixture.mark(0..8);
    fixture.mapping.lock().tag_to_write(pages(0..4)); // a sync of the first pages: the folio is tagged
    let (_, first) = fixture.begin(0..4, TakeFilter::ToWrite, 9);
    assert_eq!(first, [run(folio, 0, 4)]);
    // Another sync, of others, had tagged it as well: it must not find it untagged.
    let (_, others) = fixture.begin(4..6, TakeFilter::ToWrite, 9);
    assert_eq!(others, [run(folio, 4, 2)]);
    let (_, background) = fixture.begin(0..16, TakeFilter::Dirty, 9);
    assert_eq!(background, [run(folio, 6, 2)]);
    assert_eq!(fixture.begin(0..16, TakeFilter::ToWrite, 9), (TakeEnd::Done, vec![]));
    assert_eq!(
        fixture.mapping.lock().next_writeback(pages(6..16)),
        Some(page(6)),
        "so the sync waits for it"
    );
    // Dirty again, it is not tagged: it came after the sync.
    fixture.mark(10..11);
    assert_eq!(fixture.begin(0..16, TakeFilter::ToWrite, 9), (TakeEnd::Done, vec![]));
    fixture.end_all([first, others, background].concat());
    fixture.finish();
}

#[test]
fn a_round_says_how_old_dirty_pages_can_be() {
    let fixture = Fixture::new();
    fixture.row(0, 2);
    fixture.mark(0..1);
    fixture.mapping.lock().note_round(Millis(5));
    assert_eq!(
        fixture.mapping.writeback().dirty_since(),
        Some(NOW),
        "a round that began before says nothing"
    );
    fixture.mark(1..2);
    fixture.begin(0..1, TakeFilter::Dirty, 1);
    fixture.mapping.lock().note_round(Millis(20));
    assert_eq!(fixture.mapping.writeback().dirty_since(), Some(Millis(20)));
    fixture.begin(0..2, TakeFilter::Dirty, 1);
    fixture.mapping.lock().note_round(Millis(30));
    assert_eq!(fixture.mapping.writeback().dirty_since(), None);
    let runs = [0, 1].map(|nth| {
        let frame = fixture.mapping.try_hold(page(nth)).unwrap().frame();
        WritebackRun { index: page(nth), frame, pages: 1 }
    });
    fixture.end_all(runs);
    fixture.finish();
}
