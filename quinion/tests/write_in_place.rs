//! Pages are changed in place while others read them: each page is read whole, whoever reads it and however.
//!
//! ```text
//!   writers   overwrite pages with contents of rising generation; now and then refill a folio    over and over
//!   readers   hits, groups of hits, holds, pins, hits through a second mapping that is read-only
//! ```
//!
//! The model (`model_hit.rs`) proves the protocol on two words; this runs it on real pages with the real copy, and
//! shows what its users rely on: a writer that is stopped in the middle blocks only readers and writers of its page.
//!
//! What is checked of each read in the storm:
//!  1. Every page of it is whole: of the right file and place, of one generation.
//!  2. No page is older than what its writer had finished before the read began.
//!  3. What a pin lends does not change while it is lent.
#![cfg(not(quinion_model))]
#![allow(unsafe_code, reason = "a second mapping of the arena, and pinned bytes by address")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use proptest::prelude::*;
use quinion::internals::arena::{ReadableState, View, WriteRefused};
use quinion::internals::filemap::{
    BatchedRead, FileView, GROUP_MAX, HitStop, Hits, read_group, read_hits_into,
};
use quinion::internals::folio::{WriteOutcome, unpin};
use quinion::internals::units::{PAGE_SIZE, PageIndex};
use quinion_testing::content::{Dice, LINE, fill_content, generations, page_content, verify};
use quinion_testing::fixtures::batch::{BatchFixture, FILE, State};

const PAGE: u64 = PAGE_SIZE as u64;

/// The result of a reader without holds.
fn hit(fixture: &BatchFixture, view: &View, position: u64, to: &mut [u8]) -> Hits {
    let (cell, id) = (fixture.mapping.index().cell(), fixture.mapping.id());
    read_hits_into(FileView { view, cell, id }, position, to, |_, _| ())
}

fn hit_pages(fixture: &BatchFixture, page: u64, pages: usize) -> (usize, HitStop) {
    let mut bytes = vec![0; pages * PAGE_SIZE];
    let hits = hit(fixture, fixture.arena.view(), page * PAGE, &mut bytes);
    verify(&bytes[..hits.bytes], FILE, page * PAGE).unwrap();
    (hits.bytes / PAGE_SIZE, hits.stopped)
}

fn group(fixture: &BatchFixture, pages: &[u64]) -> Vec<u64> {
    let mut buffers = vec![[0u8; PAGE_SIZE]; pages.len()];
    let (cell, id) = (fixture.mapping.index().cell(), fixture.mapping.id());
    let wanted = buffers.iter_mut().zip(pages);
    let mut wanted: Vec<_> =
        wanted.map(|(buffer, page)| BatchedRead::new(cell, id, page * PAGE, buffer)).collect();
    let served = read_group(fixture.arena.view(), &mut wanted, |_, _| ());
    drop(wanted);
    let got = pages.iter().zip(&buffers).enumerate().filter(|(nth, _)| served.has(*nth));
    got.map(|(_, (&page, buffer))| {
        verify(buffer, FILE, page * PAGE).unwrap();
        page
    })
    .collect()
}

fn write(fixture: &BatchFixture, page: u64, pages: usize, generation: u32) -> WriteOutcome {
    let mut content = vec![0; pages * PAGE_SIZE];
    fill_content(&mut content, FILE, page * PAGE, generation);
    let held = fixture.mapping.try_hold(PageIndex(page)).unwrap();
    held.writer().unwrap().write(page * PAGE, &content)
}

/// As `write`, a line at a time, so that the writer is in each page for long.
fn write_slowly(fixture: &BatchFixture, page: u64, pages: usize, generation: u32) -> WriteOutcome {
    let held = fixture.mapping.try_hold(PageIndex(page)).unwrap();
    for nth in 0..pages {
        let index = page + nth as u64;
        match held.writer().unwrap().page((index - held.first().0) as u32) {
            Ok(mut writer) => (0..PAGE_SIZE).step_by(LINE).for_each(|at| {
                let mut line = [0; LINE];
                fill_content(&mut line, FILE, index * PAGE + at as u64, generation);
                writer.copy_in(at, &line);
            }),
            Err(refused) => return WriteOutcome { bytes: nth * PAGE_SIZE, refused: Some(refused) },
        }
    }
    all(pages * PAGE_SIZE)
}

fn generation(fixture: &BatchFixture, page: u64) -> u32 {
    let mut bytes = [0; PAGE_SIZE];
    assert_eq!(hit(fixture, fixture.arena.view(), page * PAGE, &mut bytes).stopped, HitStop::Full);
    *generations(&bytes, FILE, page * PAGE).unwrap().unwrap().start()
}

fn all(bytes: usize) -> WriteOutcome {
    WriteOutcome { bytes, refused: None }
}

// ---- one at a time ------------------------------------------------------------------------------------------

#[test]
fn written_bytes_are_read_by_all_readers() {
    let fixture = BatchFixture::new();
    fixture.add(0, 4, State::Ready);
    assert_eq!(write(&fixture, 3, 2, 7), all(2 * PAGE_SIZE));
    assert_eq!([2, 3, 4, 5].map(|page| generation(&fixture, page)), [1, 7, 7, 1]);
    assert_eq!(hit_pages(&fixture, 0, 16), (16, HitStop::Full));
    assert_eq!(group(&fixture, &[0, 3, 4, 15]), [0, 3, 4, 15]);
    let (_, batch) = fixture.batch(0, 15);
    let mut bytes = vec![0; 16 * PAGE_SIZE];
    assert_eq!(batch.last().unwrap().copy_out(0, &mut bytes), bytes.len());
    assert_eq!(generations(&bytes, FILE, 0), Ok(Some(1..=7)));
    drop(batch);
    fixture.check();
}

/// The first write steps the folio's sequence; an earlier holder is not told that it has left.
#[test]
fn a_holder_sees_its_folio_written_and_still_there() {
    let fixture = BatchFixture::new();
    let frame = fixture.add(0, 1, State::Filling);
    let held = fixture.mapping.try_hold(PageIndex(0)).unwrap();
    assert_eq!(held.writer().unwrap_err(), WriteRefused::Filling);
    fixture.complete(frame);
    assert_eq!(write(&fixture, 0, 1, 2), all(PAGE_SIZE));
    assert_eq!(held.is_readable(), ReadableState::Yes);
    fixture.let_all_go();
    assert_eq!(held.is_readable(), ReadableState::Never);
    assert_eq!(held.writer().unwrap_err(), WriteRefused::Left);
    let mut bytes = [0; 2 * PAGE_SIZE];
    assert_eq!(held.copy_out(0, &mut bytes), bytes.len(), "its bytes are kept all the same");
    assert_eq!(generations(&bytes, FILE, 0), Ok(Some(1..=2)));
    drop(held);
    fixture.check();
}

/// The frames of a written folio head another one: that is steady, whatever the sequences of its pages are.
#[test]
fn the_next_folio_of_the_frames_is_steady() {
    let fixture = BatchFixture::new();
    let first = fixture.add(0, 0, State::Ready);
    assert_eq!(write(&fixture, 0, 1, 2), all(PAGE_SIZE));
    assert!(fixture.arena.view().own(first).word().is_written());
    assert!(fixture.evict(0, first));
    let next = fixture.add(5, 0, State::Ready);
    assert_eq!(next, first, "what was freed last is given first");
    assert!(!fixture.arena.view().own(next).word().is_written());
    assert_eq!(generation(&fixture, 5), 1);
}

#[test]
fn a_pinned_folio_is_not_written() {
    let fixture = BatchFixture::new();
    fixture.add(0, 2, State::Ready);
    assert_eq!(write(&fixture, 0, 1, 2), all(PAGE_SIZE));
    let (frame, _) = fixture.mapping.try_hold(PageIndex(3)).unwrap().into_pin();
    let pinned = WriteOutcome { bytes: 0, refused: Some(WriteRefused::Pinned) };
    assert_eq!(write(&fixture, 0, 4, 3), pinned);
    let held = fixture.mapping.try_hold(PageIndex(0)).unwrap();
    assert_eq!(held.writer().unwrap().zero(PAGE, 10), pinned);
    assert_eq!(held.writer().unwrap().page(1).unwrap_err(), WriteRefused::Pinned);
    drop(held);
    assert_eq!([0, 1, 2, 3].map(|page| generation(&fixture, page)), [2, 1, 1, 1]);
    unpin(&fixture.arena, frame);
    assert_eq!(write(&fixture, 0, 4, 3), all(4 * PAGE_SIZE));
    assert_eq!([0, 1, 2, 3].map(|page| generation(&fixture, page)), [3; 4]);
}

// ---- a writer that is stopped ---------------------------------------------------------------------------------

fn copy_three(fixture: &BatchFixture) {
    let held = fixture.mapping.try_hold(PageIndex(4)).unwrap();
    let mut bytes = vec![0; 3 * PAGE_SIZE];
    assert_eq!(held.copy_out(4 * PAGE, &mut bytes), bytes.len());
    verify(&bytes, FILE, 4 * PAGE).unwrap();
}

fn pin_and_check(fixture: &BatchFixture) {
    let held = fixture.mapping.try_hold(PageIndex(0)).unwrap();
    let (address, len) = (held.bytes(), held.order().bytes());
    let (frame, _) = held.into_pin();
    // SAFETY: pinned bytes are kept and not changed.
    let lent = unsafe { std::slice::from_raw_parts(address, len) }.to_vec();
    unpin(&fixture.arena, frame);
    verify(&lent, FILE, 0).unwrap();
}

/// A writer is in the middle of page 5. A reader without holds gives up on that page after its tries, and reads all
/// others; one with locks waits, and gets the page whole.
#[test]
fn a_stopped_writer_stops_only_threads_that_want_its_page() {
    let fixture = BatchFixture::new();
    fixture.add(0, 4, State::Ready);
    let held = fixture.mapping.try_hold(PageIndex(0)).unwrap();
    let content = page_content(FILE, 5, 2);
    let mut page = held.writer().unwrap().page(5).unwrap();
    page.copy_in(0, &content[..2048]);

    assert_eq!(hit_pages(&fixture, 5, 1), (0, HitStop::Writing));
    assert_eq!(hit_pages(&fixture, 5, 4), (0, HitStop::Writing));
    assert_eq!(hit_pages(&fixture, 0, 16), (5, HitStop::Writing));
    assert_eq!(hit_pages(&fixture, 6, 10), (10, HitStop::Full));
    let mut part = [0; 100];
    assert_eq!(hit(&fixture, fixture.arena.view(), 5 * PAGE + 4000, &mut part).stopped, HitStop::Writing);
    assert_eq!(group(&fixture, &[4, 5, 6]), [4, 6]);

    let (done, told) = mpsc::channel();
    thread::scope(|scope| {
        let fixture = &fixture;
        let (copied, pinned, wrote, other) = (done.clone(), done.clone(), done.clone(), done);
        scope.spawn(move || {
            copy_three(fixture);
            copied.send("copied").unwrap();
        });
        scope.spawn(move || {
            pin_and_check(fixture);
            pinned.send("pinned").unwrap();
        });
        scope.spawn(move || {
            // A pin may exist when its turn comes.
            while write(fixture, 5, 1, 3) != all(PAGE_SIZE) {
                thread::yield_now();
            }
            wrote.send("wrote").unwrap();
        });
        scope.spawn(move || {
            // A write of another page: the pin may refuse it, but it never waits.
            write(fixture, 9, 1, 3);
            other.send("other").unwrap();
        });
        assert_eq!(told.recv().unwrap(), "other", "the others wait for the page");
        // Time to do what they must not do. If it is not enough this test shows less; it cannot fail by that.
        (0..10_000).for_each(|_| thread::yield_now());
        page.copy_in(2048, &content[2048..]);
        assert!(told.try_recv().is_err(), "the page is whole, and has not been given back");
        drop(page);
        let mut rest: Vec<_> = told.iter().collect();
        rest.sort_unstable();
        assert_eq!(rest, ["copied", "pinned", "wrote"]);
    });
    assert_eq!(generation(&fixture, 5), 3);
    drop(held);
    fixture.check();
}

/// A second mapping of the arena, as another process has it: read-only.
fn other_view(fixture: &BatchFixture) -> View {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let file = fixture.arena.arena_fd();
    let bytes = rustix::fs::fstat(file).unwrap().st_size as usize;
    // SAFETY: a new mapping at an address of the kernel's choice; it is never unmapped.
    let base =
        unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, 0).unwrap() };
    // SAFETY: the mapping stays.
    unsafe { View::attach(NonNull::new(base.cast()).unwrap(), bytes as u64) }.unwrap()
}

#[test]
fn a_viewer_sees_the_writer_by_the_same_table() {
    let fixture = BatchFixture::new();
    fixture.add(0, 3, State::Ready);
    let view = other_view(&fixture);
    let held = fixture.mapping.try_hold(PageIndex(0)).unwrap();
    let writer = held.writer().unwrap();
    let page = writer.page(2).unwrap();
    let mut bytes = [0; PAGE_SIZE];
    assert_eq!(hit(&fixture, &view, 2 * PAGE, &mut bytes).stopped, HitStop::Writing);
    assert_eq!(hit(&fixture, &view, 3 * PAGE, &mut bytes).stopped, HitStop::Full);
    drop(page);
    assert_eq!(writer.write(2 * PAGE, &page_content(FILE, 2, 6)), all(PAGE_SIZE));
    assert_eq!(hit(&fixture, &view, 2 * PAGE, &mut bytes).stopped, HitStop::Full);
    assert_eq!(bytes, page_content(FILE, 2, 6));
}

/// A folio is filled and written at once, over and over, while a reader copies all of it: if it found the folio
/// steady, it must notice the first writer.
fn first_writes(read: impl Fn(&BatchFixture, &mut [u8]) -> usize + Sync) {
    let fixture = BatchFixture::new();
    let mut frame = fixture.add(0, 4, State::Ready);
    let stop = AtomicBool::new(false);
    thread::scope(|threads| {
        let _stop = StopAtEnd(&stop);
        let (fixture, stop, read) = (&fixture, &stop, &read);
        let reader = threads.spawn(move || {
            let mut bytes = vec![0; 16 * PAGE_SIZE];
            while !stop.load(Ordering::Relaxed) {
                let done = read(fixture, &mut bytes);
                verify(&bytes[..done], FILE, 0).unwrap();
                thread::yield_now(); // and hold nothing meanwhile
            }
        });
        for generation in 1..3_000 {
            write_slowly(fixture, dice_page(generation), 1, generation * 2);
            while !fixture.evict(0, frame) && !reader.is_finished() {
                thread::yield_now();
            }
            if reader.is_finished() {
                break;
            }
            frame = fixture.add_generation(0, 4, generation * 2 + 1).unwrap();
        }
    });
    fixture.check();
}

fn dice_page(generation: u32) -> u64 {
    Dice::new(generation.into()).below(16)
}

#[test]
fn a_reader_that_found_a_folio_steady_notices_its_first_writer() {
    first_writes(|fixture, bytes| hit(fixture, fixture.arena.view(), 0, bytes).bytes);
}

#[test]
fn a_holder_of_a_steady_folio_notices_its_first_writer() {
    first_writes(|fixture, bytes| match fixture.mapping.try_hold(PageIndex(0)) {
        Ok(held) if held.is_readable() == ReadableState::Yes => held.copy_out(0, bytes),
        _ => 0,
    });
}

// ---- a naive twin -----------------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Op {
    Write { at: usize, len: usize, seed: u8 },
    Zero { at: usize, len: usize },
    Hit { at: usize, len: usize },
    Hold { at: usize, len: usize },
}

const TWIN_BYTES: usize = 8 * PAGE_SIZE;

fn range() -> impl Strategy<Value = (usize, usize)> {
    let len = prop_oneof![0usize..100, 4000usize..5000, 0..TWIN_BYTES];
    (0..TWIN_BYTES, len).prop_map(|(at, len)| (at, len.min(TWIN_BYTES - at)))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (range(), any::<u8>()).prop_map(|((at, len), seed)| Op::Write { at, len, seed }),
        range().prop_map(|(at, len)| Op::Zero { at, len }),
        range().prop_map(|(at, len)| Op::Hit { at, len }),
        range().prop_map(|(at, len)| Op::Hold { at, len }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 64, ..ProptestConfig::default()
    })]

    #[test]
    fn a_folio_is_the_bytes_that_were_written_to_it(ops in prop::collection::vec(op(), 1..40)) {
        let fixture = BatchFixture::new();
        fixture.add(8, 3, State::Ready);
        let start = 8 * PAGE;
        let mut twin = vec![0; TWIN_BYTES];
        fill_content(&mut twin, FILE, start, 1);
        let held = fixture.mapping.try_hold(PageIndex(8)).unwrap();
        for op in ops {
            match op {
                Op::Write { at, len, seed } => {
                    let bytes: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(29) ^ seed).collect();
                    twin[at..at + len].copy_from_slice(&bytes);
                    prop_assert_eq!(held.writer().unwrap().write(start + at as u64, &bytes), all(len));
                }
                Op::Zero { at, len } => {
                    twin[at..at + len].fill(0);
                    prop_assert_eq!(held.writer().unwrap().zero(start + at as u64, len), all(len));
                }
                Op::Hit { at, len } => {
                    let mut bytes = vec![0xa5; len];
                    let hits = hit(&fixture, fixture.arena.view(), start + at as u64, &mut bytes);
                    prop_assert_eq!((hits.bytes, hits.stopped), (len, HitStop::Full));
                    prop_assert_eq!(&bytes[..], &twin[at..at + len]);
                }
                Op::Hold { at, len } => {
                    let mut bytes = vec![0xa5; len];
                    prop_assert_eq!(held.copy_out(start + at as u64, &mut bytes), len);
                    prop_assert_eq!(&bytes[..], &twin[at..at + len]);
                }
            }
        }
    }
}

// ---- the storm --------------------------------------------------------------------------------------------------

/// Pages of the storm: each writer has a half, in folios of several orders, and one page is both's.
const HALF: u64 = 24;
const SHARED: u64 = 2 * HALF;
const PAGES: usize = SHARED as usize + 1;
/// Folios of a half: first page and order.
const FOLIOS: [(u64, u8); 4] = [(0, 3), (8, 3), (16, 2), (20, 0)];

struct Storm {
    fixture: BatchFixture,
    other: View,
    /// The generation that a page's writer has finished last.
    finished: [AtomicU32; PAGES],
    stop: AtomicBool,
    counts: [AtomicU64; 5],
}

#[derive(Clone, Copy)]
enum ReadResult {
    Hit,
    Writing,
    Held,
    Pinned,
    Refused,
}

impl Storm {
    fn new() -> Self {
        let fixture = BatchFixture::new();
        for half in [0, HALF] {
            FOLIOS.iter().for_each(|&(first, order)| _ = fixture.add(half + first, order, State::Ready));
        }
        fixture.add(SHARED, 0, State::Ready);
        let other = other_view(&fixture);
        let finished = [const { AtomicU32::new(1) }; PAGES];
        Self { fixture, other, finished, stop: AtomicBool::new(false), counts: Default::default() }
    }
    fn count(&self, met: ReadResult) {
        self.counts[met as usize].fetch_add(1, Ordering::Relaxed);
    }
    fn counted(&self, met: ReadResult) -> u64 {
        self.counts[met as usize].load(Ordering::Relaxed)
    }
    /// The least generation of each page that a read which begins now may return.
    fn oldest(&self) -> [u32; PAGES] {
        // Acquire, partner: the Release in `finish`.
        std::array::from_fn(|page| self.finished[page].load(Ordering::Acquire))
    }
    fn finish(&self, page: u64, pages: u64, generation: u32) {
        for page in page..page + pages {
            self.finished[page as usize].store(generation, Ordering::Release); // partner: `oldest`
        }
    }
    fn check(&self, oldest: &[u32; PAGES], position: u64, bytes: &[u8]) {
        for (nth, part) in pages_of(position, bytes) {
            let at = position.max(nth * PAGE);
            let met = generations(part, FILE, at).unwrap_or_else(|wrong| panic!("{wrong}"));
            let Some(met) = met else { continue };
            let oldest = oldest[nth as usize];
            assert!(*met.start() >= oldest, "page {nth}: {met:?} was over, {oldest} is the oldest");
        }
    }

    fn write(&self, half: u64, generation: u32, dice: &mut Dice) {
        if dice.below(8) == 0 {
            write(&self.fixture, SHARED, 1, generation);
            return;
        }
        let (first, order) = FOLIOS[dice.below(FOLIOS.len() as u64) as usize];
        let (first, pages) = (half + first, 1u64 << order);
        if dice.below(64) == 0 && self.refill(first, order, generation) {
            return;
        }
        let page = first + dice.below(pages);
        let count = (dice.below(3) + 1).min(first + pages - page);
        let write = if dice.below(2) == 0 { write } else { write_slowly };
        let wrote = write(&self.fixture, page, count as usize, generation);
        self.finish(page, wrote.bytes as u64 / PAGE, generation);
        if wrote.refused.is_some() {
            self.count(ReadResult::Refused);
        }
    }
    fn refill(&self, first: u64, order: u8, generation: u32) -> bool {
        let frame = self.fixture.mapping.try_hold(PageIndex(first)).unwrap().frame();
        let evicted = self.fixture.evict(first, frame);
        if evicted {
            self.fixture.add_generation(first, order, generation).expect("it was there");
            self.finish(first, 1 << order, generation);
        }
        evicted
    }

    fn read(&self, view: &View, dice: &mut Dice, buffer: &mut [u8]) {
        let position = dice.below(SHARED * PAGE);
        let bytes = [64, 300, PAGE_SIZE, 5 * PAGE_SIZE][dice.below(4) as usize];
        let oldest = self.oldest();
        let hits = hit(&self.fixture, view, position, &mut buffer[..bytes]);
        self.count(if hits.stopped == HitStop::Writing { ReadResult::Writing } else { ReadResult::Hit });
        self.check(&oldest, position, &buffer[..hits.bytes]);
    }
    fn read_group(&self, dice: &mut Dice) {
        let pages: Vec<u64> = (0..GROUP_MAX).map(|_| dice.below(PAGES as u64)).collect();
        group(&self.fixture, &pages);
    }
    fn hold(&self, dice: &mut Dice, buffer: &mut [u8]) {
        let position = dice.below(SHARED * PAGE);
        let oldest = self.oldest();
        let Ok(held) = self.fixture.mapping.try_hold(PageIndex::of_byte(position)) else { return };
        if held.is_readable() != ReadableState::Yes {
            return;
        }
        let bytes = held.copy_out(position, buffer);
        self.count(ReadResult::Held);
        self.check(&oldest, position, &buffer[..bytes]);
    }
    /// Takes what is lent twice, with time between.
    fn pin(&self, dice: &mut Dice) {
        let page = dice.below(PAGES as u64);
        let Ok(held) = self.fixture.mapping.try_hold(PageIndex(page)) else { return };
        if held.is_readable() != ReadableState::Yes {
            return;
        }
        let (first, len) = (held.first().first_byte(), held.order().bytes());
        let address = held.bytes();
        let (frame, _) = held.into_pin();
        // SAFETY: pinned bytes are kept and not changed.
        let lent = unsafe { std::slice::from_raw_parts(address, len) };
        let before = lent.to_vec();
        generations(&before, FILE, first).unwrap_or_else(|wrong| panic!("pinned: {wrong}"));
        thread::yield_now();
        assert!(lent == before, "pinned bytes have changed");
        unpin(&self.fixture.arena, frame);
        self.count(ReadResult::Pinned);
    }

    fn until_stopped(&self, seed: u64, mut act: impl FnMut(&mut Dice)) {
        let mut dice = Dice::new(seed);
        while !self.stop.load(Ordering::Relaxed) {
            act(&mut dice);
        }
    }
}

fn pages_of(position: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let (mut at, mut rest) = (position, bytes);
    std::iter::from_fn(move || {
        let (part, next) = rest.split_at(rest.len().min(PAGE_SIZE - at as usize % PAGE_SIZE));
        let page = at / PAGE;
        (at, rest) = (at + part.len() as u64, next);
        (!part.is_empty()).then_some((page, part))
    })
}

/// Stops the readers also when a writer panics.
struct StopAtEnd<'a>(&'a AtomicBool);
impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn every_page_is_whole_in_the_storm() {
    let rounds = if std::env::var_os("QUINION_SOAK").is_some() { 3_000_000 } else { 30_000 };
    let storm = Storm::new();
    thread::scope(|threads| {
        let storm = &storm;
        threads.spawn(move || {
            let mut buffer = vec![0; 5 * PAGE_SIZE];
            storm.until_stopped(1, |dice| storm.read(storm.fixture.arena.view(), dice, &mut buffer));
        });
        threads.spawn(move || {
            let mut buffer = vec![0; 5 * PAGE_SIZE];
            storm.until_stopped(2, |dice| {
                storm.read(&storm.other, dice, &mut buffer);
                storm.read_group(dice);
            });
        });
        threads.spawn(move || {
            let mut buffer = vec![0; 5 * PAGE_SIZE];
            storm.until_stopped(3, |dice| {
                (0..16).for_each(|_| storm.hold(dice, &mut buffer));
                storm.pin(dice);
            });
        });
        let _stop = StopAtEnd(&storm.stop);
        let writers = [0, HALF].map(|half| {
            threads.spawn(move || {
                let mut dice = Dice::new(10 + half);
                // Until the readers have been everywhere: on a busy machine they begin late.
                (2..)
                    .take_while(|&generation| {
                        generation < rounds + 2 || storm.counted(ReadResult::Pinned) == 0
                    })
                    .for_each(|generation| storm.write(half, generation, &mut dice));
            })
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    let [hits, writing, held] =
        [ReadResult::Hit, ReadResult::Writing, ReadResult::Held].map(|met| storm.counted(met));
    let [pinned, refused] = [ReadResult::Pinned, ReadResult::Refused].map(|met| storm.counted(met));
    println!("{hits} hits, {writing} gave up, {held} held, {pinned} pinned, {refused} refused for pins");
    assert!(hits > 0 && held > 0 && pinned > 0, "nobody read anything");
    assert!(writing <= hits, "most reads met a writer in their page: {writing} of {hits}");
    storm.fixture.check();
}
