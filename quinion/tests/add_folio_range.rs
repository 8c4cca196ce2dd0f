//! A run of folios into a mapping, and windows through the whole cache.
//!
//! ```text
//!   run       F0 F1 .. F63 | F64 ..            one node at a time: the nodes run out at each bar,
//!   tree      [  node      ] [ node ...        the lock is let go, and here the test steps in
//!
//!   window    gaps --> frames for all of them, or what there is --> runs under one lock --> device
//! ```
//!
//! The letters are those of the specification's statements; B01 and B03 to B07 are the tree's as well
//! (`xarray_insert_range.rs`), B14 and B17 are in `read.rs`. B11 is shown by invalidation, which takes the same lock as
//! truncation; for a punched hole it is in `truncate.rs`. B20, whether a window met shadows of its own working set, is
//! checked in `shadows.rs`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use quinion::backend::{Attributes, Backend, Fill, FillRun, MemoryFile, WaitQueue};
use quinion::internals::arena::{Arena, ArenaOptions};
use quinion::internals::filemap::{Filemap, Reader, WaitPolicy};
use quinion::internals::mapping::{
    AddedFolio, FolioShape, IndexHooks, Mapping, NewFolio, NewMapping, Replacement, RunOutcome, SPARE_MAX,
};
use quinion::internals::readahead::{Config, Readahead};
use quinion::internals::reclaim::NODE_BYTES;
use quinion::internals::serving::ServedCache;
use quinion::internals::sync::{LockWait, Rank, RankedMutex};
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{Frame, MappingId, Order, Orders};
use quinion::internals::xarray::{Kind, RangeStop, Value};
use quinion::{Cache, File, ReadOptions};
use quinion_testing::ablations::{self, NodesAtMost, OneByOne};
use quinion_testing::device::{Device, verify};
use quinion_testing::fixtures::mapping::{MappingFixture, is_folio, page};

const PAGE: u64 = 4096;
const PAGES: FolioShape = FolioShape::of(Orders::PAGES);

fn orders(min: u8, max: u8) -> FolioShape {
    FolioShape::of(Orders { min: Order(min), max: Order(max) })
}
fn short(nodes: u32) -> MappingFixture {
    MappingFixture::new().with_hooks(NodesAtMost::hooks(nodes))
}
fn no_shadow(frame: Frame, value: Value) {
    panic!("{value:?} came from nowhere to {frame:?}");
}
fn add(fixture: &MappingFixture, run: FillRun, shape: FolioShape) -> RunOutcome {
    fixture.mapping.add_folio_range(run, shape, LockWait::Wait, &mut no_shadow).unwrap()
}
fn complete(fixture: &MappingFixture, run: FillRun, order: u8) {
    for at in (0..run.pages).step_by(1 << order) {
        let (index, frame) = (run.index.plus(u64::from(at)), run.frame.plus(at));
        fixture.complete(NewFolio { index, frame, order: Order(order) });
    }
}
fn free_rest(fixture: &MappingFixture, run: FillRun, added: u32) {
    if added < run.pages {
        fixture.arena.free_run(run.frame.plus(added), run.pages - added);
    }
}

/// B01: a window without runs inserts nothing, is no error, and fetches no node; a run of no pages does nothing either.
#[test]
fn b01_a_window_of_nothing_does_nothing() {
    let fixture = MappingFixture::new();
    let before = (fixture.dump(), fixture.arena.stats().cells_used, fixture.free_pages());
    let got = fixture.mapping.add_window(&[], PAGES, LockWait::Wait, &mut no_shadow).unwrap();
    assert_eq!((got.inserted.len(), got.left.len(), got.stop), (0, 0, RangeStop::All));
    let run = FillRun { index: page(17), frame: Frame(0), pages: 0 };
    assert_eq!(add(&fixture, run, PAGES), RunOutcome { pages: 0, stop: RangeStop::All });
    assert_eq!((fixture.dump(), fixture.arena.stats().cells_used, fixture.free_pages()), before);
    assert_eq!(fixture.pages(), 0);
    fixture.finish();
}

/// B03, B04: a run that a folio stops, at its first page or further on, leaves the frames from there on as they were,
/// and they are the caller's. A second run from there inserts nothing and says why.
#[test]
fn b03_b04_frames_behind_the_stop_are_as_before_and_the_callers() {
    for at in [0u64, 1, 63, 64, 100] {
        let fixture = MappingFixture::new();
        let there = fixture.folio(at, 0);
        fixture.add(there);
        let run = fixture.run(0, 128);
        let words =
            |run: FillRun| (0..run.pages).map(|nth| fixture.word(run.frame.plus(nth))).collect::<Vec<_>>();
        let before = words(run);
        let RunOutcome { pages, stop: RangeStop::Present(found) } = add(&fixture, run, PAGES) else {
            panic!("a folio is in the way")
        };
        assert_eq!((u64::from(pages), fixture.pages()), (at, at + 1));
        assert!(is_folio(found, there.frame));
        assert_eq!(words(run)[pages as usize..], before[pages as usize..], "as if nothing had been tried");
        let rest = FillRun { index: page(at), frame: run.frame.plus(pages), pages: run.pages - pages };
        assert_eq!(add(&fixture, rest, PAGES), RunOutcome { pages: 0, stop: RangeStop::Present(found) });
        assert_eq!(words(rest), before[pages as usize..]);
        assert!(fixture.load(at + 1).is_empty());
        free_rest(&fixture, run, pages);
        complete(&fixture, FillRun { pages, ..run }, 0);
        fixture.complete(there);
        fixture.finish();
    }
}

/// B02: a run over an empty range goes in whole: each page finds its frame, and the count of pages grows by the run's.
#[test]
fn b02_every_frame_of_a_run_stands_at_its_page() {
    for (start, pages, min) in
        [(0u64, 512u32, 0u8), (100, 300, 0), (1 << 30, 512, 2), (64, 448, 6), (1024, 512, 9)]
    {
        let fixture = MappingFixture::new();
        let run = fixture.run(start, pages);
        let free = fixture.free_pages();
        assert_eq!(add(&fixture, run, orders(min, min)), RunOutcome { pages, stop: RangeStop::All });
        for nth in 0..pages {
            let head = run.frame.plus(nth & !((1 << min) - 1));
            assert!(is_folio(fixture.walk(start + u64::from(nth)), head), "page {nth} of {pages} at {start}");
        }
        assert_eq!((fixture.pages(), fixture.free_pages()), (u64::from(pages), free));
        complete(&fixture, run, min);
        fixture.finish();
    }
}

/// B05: each folio of a run reports one shadow, that at the highest index of those it replaces.
#[test]
fn b05_a_folio_hears_once_of_its_shadows_of_the_highest() {
    let fixture = MappingFixture::new();
    for (index, payload) in [(0, 1), (3, 2), (8, 3), (9, 4), (15, 5), (63, 6), (64, 7)] {
        fixture.put_shadow(index, 0, payload);
    }
    fixture.put_shadow(128, 7, 8);
    let run = fixture.run(0, 256);
    let mut heard = Vec::new();
    let got = fixture.mapping.add_folio_range(run, orders(2, 2), LockWait::Wait, &mut |frame, value| {
        heard.push((frame.0 - run.frame.0, value.payload()));
    });
    assert_eq!(got.unwrap(), RunOutcome { pages: 256, stop: RangeStop::All });
    let mut want = vec![(0, 2), (8, 4), (12, 5), (60, 6), (64, 7)];
    want.extend((128..256).step_by(4).map(|at| (at, 8)));
    assert_eq!(heard, want);
    complete(&fixture, run, 2);
    fixture.finish();
}

/// B08: a run for which nodes are fetched in its middle is completed, and what is in before can be found meanwhile.
#[test]
fn b08_a_run_whose_nodes_run_out_is_completed_all_the_same() {
    for reserve in 1..4 {
        let (fixture, start) = (short(reserve), 1u64 << 24);
        let run = fixture.run(start, 500);
        let mut seen = Vec::new();
        let got =
            fixture.mapping.add_folio_range_watched(run, PAGES, LockWait::Wait, &mut no_shadow, &mut || {
                let inside = (0..500)
                    .take_while(|nth| is_folio(fixture.walk(start + nth), run.frame.plus(*nth as u32)));
                seen.push((inside.count() as u64, fixture.pages()));
            });
        assert_eq!(got.unwrap(), RunOutcome { pages: 500, stop: RangeStop::All });
        assert!(seen.len() as u32 >= 8 / reserve, "{seen:?}");
        assert!(
            seen.iter().all(|(visible, counted)| visible == counted),
            "{seen:?}: what is in can be found"
        );
        assert!(seen.is_sorted() && seen.iter().any(|(visible, _)| *visible > 0), "{seen:?}");
        complete(&fixture, run, 0);
        fixture.finish();
    }
}

/// B09: when no more nodes can be had the prefix stays, and the frames of the rest are as before and still the
/// caller's.
#[test]
fn b09_a_run_for_which_there_are_no_nodes_leaves_a_prefix_and_the_frames_of_the_rest() {
    let fixture = MappingFixture::new();
    let run = fixture.run(0, 512);
    while fixture.arena.alloc(Order::MAX).is_some() {}
    let mut all = Vec::new();
    fixture.arena.alloc_cells(usize::MAX / 2, &mut all, LockWait::Wait);
    for nodes in [0, 1, 2, 5] {
        fixture.arena.free_cells(all.drain(..nodes));
        let got = add(&fixture, run, PAGES);
        // Page 0 needs no node, the first node is for 64 pages, and the second is the one above it.
        let pages = [1, 64, 64, 4 * 64][[0, 1, 2, 5].iter().position(|n| *n == nodes).unwrap()];
        assert_eq!(got, RunOutcome { pages, stop: RangeStop::NoNode }, "with {nodes} nodes");
        assert_eq!((fixture.mapping.index().spare_nodes(), fixture.pages()), (0, u64::from(pages)));
        for nth in pages..512 {
            let word = fixture.word(run.frame.plus(nth));
            assert!(!word.is_live() && word.holds() == 0, "frame {nth} was not given back as it was");
        }
        complete(&fixture, FillRun { pages, ..run }, 0);
        let removed: Vec<_> =
            (0..pages).map(|nth| (run.index.plus(u64::from(nth)), run.frame.plus(nth))).collect();
        let mut guard = fixture.mapping.lock();
        for (index, frame) in removed {
            assert!(guard.evict(index, frame, |_| Replacement::Nothing).is_some());
        }
        drop(guard);
        fixture.arena.alloc_cells(usize::MAX / 2, &mut all, LockWait::Wait);
    }
    fixture.arena.free_run(run.frame, run.pages);
    fixture.arena.free_cells(all);
    fixture.finish();
}

/// B10: a folio that another thread inserts while nodes are fetched ends the prefix there, and is not touched.
#[test]
fn b10_a_folio_that_comes_while_nodes_are_fetched_ends_the_prefix() {
    let (fixture, start) = (short(1), 1u64 << 24);
    let (run, winner) = (fixture.run(start, 300), fixture.folio(start + 150, 0));
    let mut come = false;
    let got =
        fixture.mapping.add_folio_range_watched(run, PAGES, LockWait::Wait, &mut no_shadow, &mut || {
            if !come && fixture.pages() > 0 {
                come = true;
                assert_eq!(fixture.add(winner), AddedFolio::Added { shadow: None });
            }
        });
    let RunOutcome { pages: 150, stop: RangeStop::Present(found) } = got.unwrap() else { panic!("{got:?}") };
    assert!(come && is_folio(found, winner.frame) && is_folio(fixture.walk(start + 150), winner.frame));
    assert!(fixture.load(start + 151).is_empty());
    free_rest(&fixture, run, 150);
    complete(&fixture, FillRun { pages: 150, ..run }, 0);
    fixture.complete(winner);
    fixture.finish();
}

/// B15: of the folios of a run, the one that has the marked page carries the marker, and no other.
#[test]
fn b15_exactly_the_folio_of_the_marked_page_carries_the_marker() {
    for marker in [0u64, 1, 63, 64, 130] {
        let fixture = MappingFixture::new();
        let run = fixture.run(0, 131 & !1);
        let shape = FolioShape { marker: Some(page(marker)), ..orders(1, 1) };
        assert_eq!(add(&fixture, run, shape).pages, 130);
        let marked: Vec<u64> = (0..130)
            .step_by(2)
            .filter(|at| fixture.mapping.try_hold(page(*at)).unwrap().has_marker())
            .collect();
        assert_eq!(marked, if marker < 130 { vec![marker & !1] } else { vec![] });
        complete(&fixture, run, 1);
        fixture.finish();
    }
}

/// B15: when the marked page is cached already, no folio carries the marker.
#[test]
fn b15_a_page_that_is_there_already_gets_no_marker() {
    let fixture = MappingFixture::new();
    let there = fixture.folio(5, 0);
    fixture.add(there);
    fixture.complete(there);
    let run = fixture.run(0, 16);
    let shape = FolioShape { marker: Some(page(5)), ..PAGES };
    let nothing = fixture.mapping.add_window(&[], shape, LockWait::Wait, &mut no_shadow).unwrap();
    assert_eq!((nothing.inserted.len(), nothing.left.len(), nothing.stop), (0, 0, RangeStop::All));
    let got = fixture.mapping.add_window(&[run], shape, LockWait::Wait, &mut no_shadow).unwrap();
    let parts: Vec<_> = got.inserted.iter().map(|run| (run.index.0, run.pages)).collect();
    assert_eq!(parts, [(0, 5), (6, 10)], "it goes on behind what is there");
    assert_eq!(got.left.iter().map(|run| (run.index.0, run.pages)).collect::<Vec<_>>(), [(5, 1)]);
    assert!((0..16).all(|at| !fixture.mapping.try_hold(page(at)).unwrap().has_marker()));
    got.left.iter().for_each(|run| fixture.arena.free_run(run.frame, run.pages));
    got.inserted.iter().for_each(|run| complete(&fixture, *run, 0));
    fixture.finish();
}

/// B18: a reader without a lock beside the insertion of a run sees the folio of its page or none, and never another's.
#[test]
fn b18_a_reader_of_a_growing_run_sees_a_page_or_none_and_never_another() {
    let (fixture, stop, seen) = (MappingFixture::new(), AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let _finish = AtEnd(&stop);
        for seed in 0..2u64 {
            let (fixture, stop, seen) = (&fixture, &stop, &seen);
            scope.spawn(move || {
                let mut at = seed;
                while !stop.load(Ordering::Relaxed) {
                    at = (at * 29 + 11) % 400;
                    let Ok(held) = fixture.mapping.try_hold(page(at)) else { continue };
                    let covered = held.first().0..held.first().0 + u64::from(held.order().pages());
                    if !covered.contains(&at) {
                        stop.store(true, Ordering::Relaxed);
                        panic!("a folio of {covered:?} for page {at}");
                    }
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Until the readers have found folios, however late they begin.
        for round in (0u64..).take_while(|round| *round < 400 || seen.load(Ordering::Relaxed) < 100) {
            assert!(!stop.load(Ordering::Relaxed), "a reader found something wrong");
            // Frames come back at other places each time, in folios of other sizes.
            let order = (round % 4) as u8;
            let run = fixture.run(round % 3 * 8, 384);
            let got = add(&fixture, run, orders(0, order));
            assert_eq!(got.stop, RangeStop::All);
            fixture.mapping.lock().remove_all();
            let mut at = 0;
            while at < run.pages {
                let descriptor = fixture.arena.view().own(run.frame.plus(at));
                let pages = descriptor.word().order().pages();
                match descriptor.complete_empty() {
                    quinion::internals::arena::FillEnd::Detached(
                        quinion::internals::arena::PutOutcome::Last(order),
                    ) => {
                        fixture.arena.free(run.frame.plus(at), order);
                    }
                    quinion::internals::arena::FillEnd::Detached(
                        quinion::internals::arena::PutOutcome::Kept,
                    ) => {}
                    quinion::internals::arena::FillEnd::Attached => panic!("it was removed"),
                }
                at += pages;
            }
        }
    });
    fixture.finish();
}

struct AtEnd<'a>(&'a AtomicBool);
impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn nodes_come_only_out_of_the_stock_under_the_lock() {
    let fixture = MappingFixture::new();
    let (folio, run) = (fixture.folio(77, 0), fixture.run(1 << 24, 300));
    // The arena has plenty, the stock has none.
    let mut guard = fixture.mapping.lock();
    assert_eq!(guard.add_folio(folio, PAGES), AddedFolio::NoNode);
    assert_eq!(
        guard.add_folio_range(run, PAGES, &mut no_shadow),
        RunOutcome { pages: 0, stop: RangeStop::NoNode }
    );
    drop(guard);
    // The stock has enough, the arena has none.
    let mut guard = fixture.mapping.lock_to_add(run.index, 300, LockWait::Wait).unwrap();
    while fixture.arena.alloc(Order::MAX).is_some() {}
    let mut all = Vec::new();
    fixture.arena.alloc_cells(usize::MAX / 2, &mut all, LockWait::Wait);
    assert_eq!(
        guard.add_folio_range(run, PAGES, &mut no_shadow),
        RunOutcome { pages: 300, stop: RangeStop::All }
    );
    drop(guard);
    fixture.arena.free_cells(all);
    complete(&fixture, run, 0);
    fixture.free(folio);
    fixture.finish();
}

#[test]
fn nodes_take_less_than_a_hundredth_of_the_pages_they_find() {
    let fixture = MappingFixture::new();
    let mut pages = 0;
    for start in [0, 512, 5000] {
        let run = fixture.run(start, 512);
        assert_eq!(add(&fixture, run, PAGES).stop, RangeStop::All);
        complete(&fixture, run, 0);
        pages += 512;
        let bytes = fixture.arena.stats().cells_used * NODE_BYTES;
        assert!(bytes * 100 < pages * PAGE, "{bytes} bytes of nodes, spare ones too, for {pages} pages");
    }
    fixture.finish();
}

#[test]
fn a_stock_is_bounded_and_goes_back() {
    let fixture = MappingFixture::new();
    for window in 0..40u64 {
        let run = fixture.run(window * 5000, 512);
        assert_eq!(add(&fixture, run, PAGES).stop, RangeStop::All);
        complete(&fixture, run, 0);
        assert!(fixture.mapping.index().spare_nodes() <= SPARE_MAX);
        fixture.check();
        if window % 4 == 3 {
            fixture.mapping.lock().remove_all();
            assert_eq!(fixture.mapping.index().spare_nodes(), 0, "a mapping without folios keeps nothing");
        }
    }
    fixture.finish();
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).expect("the device opens")
}
fn read(file: &File, device: &Device, position: u64, len: usize) -> usize {
    let mut buffer = vec![0; len];
    let bytes = file.read_at(&mut buffer, position).expect("a read");
    verify(&buffer[..bytes], device, position);
    bytes
}
fn small() -> quinion::Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().unwrap()
}

/// B11: an invalidation waits for an insertion that is under way, and leaves no folio of it.
#[test]
fn b11_an_invalidation_waits_for_an_insertion_and_leaves_nothing_of_it() {
    let (fixture, entered) = (MappingFixture::new(), AtomicBool::new(false));
    thread::scope(|scope| {
        let held_off = fixture.mapping.hold_off_invalidation();
        let invalidation = scope.spawn(|| {
            entered.store(true, Ordering::Relaxed);
            fixture.mapping.invalidate().unwrap()
        });
        while !entered.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        (0..1000).for_each(|_| thread::yield_now()); // time enough, if it did not wait
        let run = fixture.run(0, 8);
        let added = fixture.mapping.add_folio_range(run, PAGES, LockWait::Wait, &mut no_shadow).unwrap();
        assert_eq!(added.pages, 8);
        for nth in 0..8 {
            let (index, frame) = (page(u64::from(nth)), run.frame.plus(nth));
            fixture.complete(NewFolio { index, frame, order: Order::ZERO });
        }
        drop(held_off);
        assert_eq!(invalidation.join().unwrap(), 8, "it came after all of the window");
    });
    assert_eq!(fixture.pages(), 0);
    fixture.finish();
}

/// A device that lets a test act inside the call by which a run is submitted, once.
struct Submitted {
    device: Arc<Device>,
    act: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl std::fmt::Debug for Submitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Submitted").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Backend for Submitted {
    fn name(&self) -> &'static str {
        "submitted"
    }
    fn attributes(&self) -> std::io::Result<Attributes> {
        self.device.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        if let Some(act) = self.act.lock().unwrap().take() {
            act();
        }
        self.device.submit(fills);
    }
}

/// B11: a read holds off invalidation from the insertion of a run until the device has it, and no folio of it is left
/// when the invalidation ends.
/// 1 R has inserted a run, and is inside the call that submits it.
/// 2 I begins to invalidate the file.
/// 3 R comes out of the call, and I goes on.
#[test]
fn b11_an_invalidation_that_comes_while_a_run_is_submitted_waits_for_that() {
    let (cache, device) = (small(), Device::new(64 * PAGE));
    let submitted = Arc::new(Submitted { device: Arc::clone(&device), act: Mutex::new(None) });
    let file = cache.open_backend(Arc::clone(&submitted) as _).unwrap();
    let other = file.clone();
    let (ended, early) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (sender, invalidation) = std::sync::mpsc::channel();
    let (ends, seen) = (Arc::clone(&ended), Arc::clone(&early));
    *submitted.act.lock().unwrap() = Some(Box::new(move || {
        let (begins, begun) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            begins.send(()).unwrap();
            other.revalidate().unwrap();
            ends.store(true, Ordering::Relaxed);
        });
        begun.recv().unwrap();
        (0..1000).for_each(|_| thread::yield_now()); // time enough, if it did not wait
        seen.store(ended.load(Ordering::Relaxed), Ordering::Relaxed);
        sender.send(thread).unwrap();
    }));
    device.generation.fetch_add(1, Ordering::Relaxed); // there is something to forget
    device.hold();
    let nowait = ReadOptions::new().nowait(true);
    assert!(file.read_at_with(&mut [0; 8 * 4096], 0, nowait).is_err(), "its run is on its way");
    invalidation.recv().unwrap().join().unwrap();
    assert!(!early.load(Ordering::Relaxed), "it came between insertion and submission");
    // The read may have looked again and asked anew, when its folio had gone.
    let reads = device.reads();
    let asked_anew: u32 = reads[1..].iter().map(|(_, pages)| pages).sum();
    assert_eq!(reads[0], (0, 8));
    assert!(file.cached_pages() <= u64::from(asked_anew) && asked_anew < 8, "something of the run is left");
    device.release();
    assert_eq!(read(&file, &device, 0, 8 * 4096), 8 * 4096);
    cache.check().unwrap();
}

/// B12: a read under memory pressure fetches as many pages at a time as memory allows, and each once.
#[test]
fn b12_a_window_under_memory_pressure_reads_as_much_as_memory_allows() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).pinned_max(Cache::MEMORY_MIN);
    let cache = cache.build().unwrap();
    let (full, device) = (Device::new(64 << 20), Device::with_number(2, 1 << 20));
    let (large, file) = (open(&cache, &full), open(&cache, &device));
    // Every frame is pinned but a few: nothing of it can be reclaimed.
    let mut pins = Vec::new();
    while let Ok(pin) = large.pin(pins.len() as u64 * PAGE, PAGE as usize) {
        pins.push(pin);
    }
    for free in [1usize, 3, 10, 40] {
        assert_eq!(cache.stats().free_bytes, 0);
        pins.truncate(pins.len() - free);
        file.revalidate().unwrap();
        device.generation.fetch_add(1, Ordering::Relaxed);
        file.revalidate().unwrap();
        let asked = device.reads().len();
        assert_eq!(read(&file, &device, 0, 100 * 4096), 100 * 4096, "with {free} frames");
        let reads = device.reads().split_off(asked);
        assert!(reads.iter().all(|(_, pages)| *pages as usize <= free), "{reads:?}");
        assert_eq!(reads.iter().map(|(_, pages)| pages).sum::<u32>(), 100, "each page once: {reads:?}");
        cache.check().unwrap();
        while let Ok(pin) = large.pin(pins.len() as u64 * PAGE, PAGE as usize) {
            pins.push(pin);
        }
    }
    drop(pins);
    cache.check().unwrap();
}

/// B13: a window of which every page is cached makes no I/O, inserts nothing and keeps no memory.
#[test]
fn b13_a_window_of_which_all_is_cached_asks_for_nothing() {
    for hooks in [None, OneByOne::WINDOWS] {
        let cache = ablations::builder(hooks).memory(Cache::MEMORY_MIN).build().unwrap();
        let device = Device::new(512 * PAGE);
        let (stream, random) = (open(&cache, &device), open(&cache, &device));
        assert_eq!(read(&stream, &device, 0, 4096), 4096);
        // Backwards, so that nothing is read ahead.
        for at in (0..512).rev() {
            assert_eq!(read(&random, &device, at * PAGE, 1), 1);
        }
        let (reads, before) = (device.reads().len(), cache.stats());
        for at in 1..512 {
            assert_eq!(
                read(&stream, &device, at * PAGE, 4096),
                4096,
                "its markers start windows that are there"
            );
        }
        let after = cache.stats();
        assert_eq!((device.reads().len(), after.inserted_pages), (reads, 512));
        assert_eq!(after.free_bytes, before.free_bytes);
        assert_eq!(device.times_read(), vec![1; 512]);
        cache.check().unwrap();
    }
}

/// B16: with a smallest folio order, what is read is rounded to whole folios, and a cached one is skipped whole.
#[test]
fn b16_a_smallest_folio_rounds_reads_to_itself() {
    for hooks in [None, OneByOne::WINDOWS] {
        let builder = ablations::builder(hooks).memory(Cache::MEMORY_MIN).readahead(0);
        let cache = builder.folio_order_min(2).build().unwrap();
        let device = Device::new(103 * PAGE + 77);
        let file = open(&cache, &device);
        assert_eq!(read(&file, &device, 5 * PAGE + 3, 10), 10);
        assert_eq!(device.reads(), [(4, 4)], "aligned down, and a whole folio");
        assert_eq!(read(&file, &device, 2 * PAGE, 10 * 4096), 10 * 4096);
        assert_eq!(device.reads()[1..], [(0, 4), (8, 4)], "what is there is skipped as a whole");
        assert_eq!(read(&file, &device, 102 * PAGE, 8192), 4096 + 77, "the last folio reaches over the end");
        assert_eq!(device.reads()[3..], [(100, 4)]);
        assert_eq!(file.cached_pages() % 4, 0);
        let mut all = vec![0; 104 * 4096];
        assert_eq!(file.read_at(&mut all, 0).unwrap() as u64, 103 * PAGE + 77);
        cache.check().unwrap();
    }
}

/// B16: a sequential scan with a smallest folio order reads each page once, in aligned requests.
#[test]
fn b16_a_stream_of_smallest_folios_reads_each_page_once() {
    for (min, max) in [(1, 1), (2, 5), (4, 9), (9, 9)] {
        let cache =
            Cache::builder().memory(48 << 20).folio_order_max(max).folio_order_min(min).build().unwrap();
        let device = Device::new(1200 * PAGE + 5);
        let file = open(&cache, &device);
        let mut position = 0;
        while position < 1200 * PAGE + 5 {
            position += read(&file, &device, position, 10_000) as u64;
        }
        let asked: u32 = device.reads().iter().map(|(_, pages)| pages).sum();
        assert_eq!(u64::from(asked), 1201u64.next_multiple_of(1 << min), "orders {min} to {max}");
        assert!(
            device
                .reads()
                .iter()
                .all(|(first, pages)| (first | u64::from(*pages)).trailing_zeros() >= u32::from(min))
        );
        cache.check().unwrap();
    }
}

/// B16: random reads with a smallest folio order and an eviction between them return the right bytes.
#[test]
fn b16_smallest_folios_are_evicted_and_found_again() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).folio_order_min(3).build().unwrap();
    let device = Device::new(3 * Cache::MEMORY_MIN + 100);
    let file = open(&cache, &device);
    let mut at = 1u64;
    for _ in 0..3000 {
        at = (at * 48_271) % (3 * Cache::MEMORY_MIN);
        assert!(read(&file, &device, at, 5000) > 0);
    }
    assert!(cache.stats().evicted_pages > 0);
    cache.check().unwrap();
}

/// Streams of 32 threads, each through a file of its own: how often the trees' locks were taken.
fn locks_of_streams(hooks: Option<&'static dyn IndexHooks>) -> (u64, u64) {
    const FILES: u32 = 32;
    const FILE_PAGES: usize = 256;
    let arena = Arc::new(Arena::build(ArenaOptions { memory: 64 << 20 }).unwrap());
    let filemap = Filemap::new(Arc::clone(&arena), Arc::new(WaitQueue::new()), Orders::PAGES);
    let (filemap, process) = (Arc::new(filemap), ForkGuard::new());
    let mappings: Vec<Arc<Mapping>> = (1..=FILES)
        .map(|id| {
            let file = Arc::new(MemoryFile::new(vec![id as u8; FILE_PAGES * 4096]));
            let known = file.attributes().unwrap();
            let (id, backend) = (MappingId(id), file);
            let new = NewMapping { arena: &arena, id, backend, attributes: &known, process };
            let mapping = Mapping::new(new).unwrap();
            Arc::new(mapping.with_hooks(hooks))
        })
        .collect();
    thread::scope(|scope| {
        for mapping in &mappings {
            let filemap = &filemap;
            scope.spawn(move || {
                let readahead = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(64)));
                let call = Reader::plain(&readahead).call(mapping, WaitPolicy::Wait);
                let mut page = [0; 4096];
                for at in 0..FILE_PAGES as u64 {
                    let read = filemap.read(&call, at * PAGE, &mut page);
                    assert_eq!((read.unwrap(), page[0]), (4096, mapping.id().0 as u8));
                }
            });
        }
    });
    let locks = mappings.iter().map(|mapping| mapping.index().tree_counts().locks).sum();
    mappings.iter().for_each(|mapping| mapping.check().unwrap());
    (locks, u64::from(FILES) * FILE_PAGES as u64)
}

/// B19: 32 threads that scan a file each take the tree's lock for each window and not for each page.
#[test]
fn b19_locks_are_taken_for_windows_and_not_for_pages() {
    let (batched, pages) = locks_of_streams(None);
    let (single, _) = locks_of_streams(OneByOne::WINDOWS);
    // 4, 8, 16, 32, then 64 pages at a time: 8 windows, each with a look for gaps and an insertion.
    assert_eq!(batched, 32 * 8 * 2);
    assert_eq!(single, 32 * 8 * 2 + pages, "one by one: the same for each window, and a lock for each page");
}

#[test]
fn a_shortage_of_nodes_is_not_seen_by_readers() {
    let cache = ablations::builder(NodesAtMost::hooks(1)).memory(Cache::MEMORY_MIN).build().unwrap();
    let device = Device::new(2 * Cache::MEMORY_MIN);
    let file = open(&cache, &device);
    let mut position = 0;
    while position < 2 * Cache::MEMORY_MIN {
        position += read(&file, &device, position, 100_000) as u64;
    }
    cache.check().unwrap();
}

#[test]
fn a_file_without_handles_keeps_no_spare_nodes() {
    let (cache, device) = (small(), Device::new(4 * PAGE));
    // What the cache has for itself comes with the first file.
    let other = Device::with_number(2, 4 * PAGE);
    assert_eq!(read(&open(&cache, &other), &other, 0, 4 * 4096), 4 * 4096);
    let before = cache.arena().share().stats().cells_used;
    let file = open(&cache, &device);
    assert_eq!(read(&file, &device, 0, 4 * 4096), 4 * 4096);
    assert!(cache.arena().share().stats().cells_used > before + 2);
    drop(file);
    assert_eq!(cache.arena().share().stats().cells_used, before + 2, "its record and its node");
    assert_eq!(read(&open(&cache, &device), &device, 0, 4 * 4096), 4 * 4096);
    assert_eq!(device.reads().len(), 1);
}

#[test]
fn a_walked_tree_shows_the_entries_put_in() {
    let fixture = MappingFixture::new();
    fixture.put_shadow(0, 9, 4);
    let run = fixture.run(77, 3);
    let mut heard = 0;
    let got = fixture.mapping.add_folio_range(run, PAGES, LockWait::Wait, &mut |_, value| {
        assert_eq!(value, Value::shadow(0, 4));
        heard += 1;
    });
    assert_eq!((got.unwrap().pages, heard), (3, 3));
    for index in 0..512 {
        match fixture.walk(index).kind() {
            Kind::Folio(frame) => assert_eq!(u64::from(frame - run.frame.0), index - 77),
            Kind::Value(value) => assert!(value.payload() == 4 && !(77..80).contains(&index)),
            lost => panic!("{lost:?} at {index}"),
        }
    }
    complete(&fixture, run, 0);
    fixture.finish();
}
