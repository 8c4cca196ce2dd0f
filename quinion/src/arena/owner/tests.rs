//! Tests of the arena: what it grows by, what it hands out, what it gives back, and what others may do to its files.
//!
//! A twin keeps account of the holder of each frame and cell under random operations; each passes [`Arena::check`].
//!
//! Invariant: no frame and no cell is ever two holders'.

use super::*;
use crate::arena::CellNumber;
use crate::arena::allocate::{AllocRequest, GrowOutcome, GrowRequest, pages_of};
use crate::arena::buddy::FrameRun;
use crate::arena::control::{GROUP_VIEWERS, GROUPS_MAX, ViewerControl};
use crate::arena::options::MEMORY_MAX;
use crate::arena::stock::{
    AllocAmount, ExtentPurpose, FrameAlignment, GROWTHS_REFUSED, Gap, STEP_EXTENTS_MAX,
};
use crate::arena::{ClaimOutcome, GuestExtents, GuestRefused, GuestUse};
use crate::sync::LockWait;
use crate::units::{Order, Orders, PageIndex};
use proptest::prelude::*;
use rustix::fd::AsRawFd;
use rustix::fs::{Mode, OFlags, fstat, ftruncate};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};
use std::collections::HashMap;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

const SMALL: u64 = Arena::MEMORY_MIN;

fn arena(memory: u64) -> Arena {
    Arena::build(ArenaOptions { memory }).unwrap()
}

fn resizable(memory: u64, memory_max: u64) -> Arena {
    Arena::build_within(ArenaOptions { memory }, Reservation { memory_max, swap: Swap::Allowed }).unwrap()
}

fn taken(arena: &Arena) -> u64 {
    [arena.arena_fd(), arena.control_fd()].iter().map(|fd| fstat(fd).unwrap().st_blocks as u64 * 512).sum()
}

fn take(
    arena: &Arena,
    (pages, sizes): (u32, Orders),
    amount: AllocAmount,
    locks: LockWait,
    runs: &mut Vec<FrameRun>,
) -> u32 {
    let (gaps, fit) = ([Gap { first: PageIndex(0), pages }], FrameAlignment::anywhere(sizes));
    arena.alloc_runs(AllocRequest { gaps: &gaps, fit, amount, locks }, runs)
}

fn take_less(arena: &Arena, gap: Gap, fit: FrameAlignment, runs: &mut Vec<FrameRun>) -> u32 {
    let (amount, locks) = (AllocAmount::Less, LockWait::Wait);
    arena.alloc_runs(AllocRequest { gaps: &[gap], fit, amount, locks }, runs)
}

fn drain(arena: &Arena, order: Order) -> Vec<(Frame, Order)> {
    std::iter::from_fn(|| arena.alloc(order)).map(|frame| (frame, order)).collect()
}

#[test]
fn a_bound_out_of_range_is_refused_with_the_range() {
    let build = |memory| Arena::build(ArenaOptions { memory });
    let small = build(SMALL - 1).unwrap_err();
    assert!(matches!(small, ArenaError::TooSmall { min: SMALL, .. }));
    assert!(small.to_string().contains("16777216"), "{small}");
    assert!(matches!(build(u64::MAX), Err(ArenaError::TooLarge { max, .. }) if max <= MEMORY_MAX));
}

#[test]
fn a_large_arena_takes_little_before_it_is_used() {
    let arena = arena(8 << 30);
    let (at_first, meta) = (taken(&arena), arena.stats().meta_bytes);
    assert!(at_first < 2 << 20 && meta > 70 << 20, "{at_first} bytes taken, {meta} set aside");
    let frame = arena.alloc(Order(0)).unwrap();
    let grown = taken(&arena) - at_first;
    assert!(grown < 16 << 20, "{grown} bytes for one frame and its entries");
    let stats = arena.stats();
    let backed = stats.extents_huge + stats.extents_small;
    assert!(backed * EXTENT_SIZE as u64 <= 16 << 20, "{backed} extents are said to have memory");
    arena.free(frame, Order(0));
    arena.check().unwrap();
}

#[test]
fn the_arena_grows_to_its_bound_and_not_a_byte_further() {
    // The second is no whole number of extents, nor of pages.
    for memory in [SMALL, (40 << 20) + 4097] {
        let arena = arena(memory);
        assert!(taken(&arena) < 5 << 20, "only the tables are there at first");
        let mut runs = drain(&arena, Order(4));
        assert!(
            !runs.is_empty()
                && arena.alloc(Order(0)).is_none()
                && arena.alloc_run(512, LockWait::Wait).is_none()
        );
        let mut cells = Vec::new();
        assert_eq!(
            arena.alloc_cells(usize::MAX / 2, &mut cells, LockWait::Wait),
            6144,
            "the reserve is one extent"
        );
        arena.populate_control().unwrap();
        let stats = arena.stats();
        assert_eq!(stats.grown_bytes + stats.control_bytes, memory & !(EXTENT_SIZE as u64 - 1));
        // The pages of viewers are counted, and made when there are any.
        assert_eq!(stats.grown_bytes, taken(&arena) - COMMON_BYTES as u64, "what is counted is there");
        assert_eq!(stats.data_bytes / 65536, runs.len() as u64);
        assert_eq!(stats.grown_bytes, stats.meta_bytes + stats.cell_bytes + stats.data_bytes);
        assert_eq!((stats.free_pages, stats.cells_used, stats.growth_failures), (0, 6144, 0));
        assert!(taken(&arena) <= memory);
        arena.check().unwrap();
        runs.reverse();
        arena.free_all(&runs);
        assert_eq!(drain(&arena, Order::MAX).len() as u64, stats.data_bytes / EXTENT_SIZE as u64);
        arena.check().unwrap();
    }
}

#[test]
fn handed_out_frames_have_odd_descriptors_too() {
    let arena = arena(SMALL);
    let run = arena.alloc_run(100, LockWait::Wait).unwrap();
    assert_eq!((run.pages, run.frame.0 % 64), (64, 0));
    for frame in (0..arena.view().frames_grown()).map(Frame) {
        let word = arena.view().own(frame).word();
        assert!(!word.is_live(), "{frame:?}: {word:?}");
    }
    assert!(arena.view().descriptor(Frame(arena.view().frames_grown())).is_none());
    arena.free_run(run.frame, run.pages);
    arena.check().unwrap();
}

#[test]
fn check_sees_a_folio_among_the_free_frames() {
    let arena = arena(SMALL);
    let frame = arena.alloc(Order(3)).unwrap();
    arena.free(frame, Order(3));
    arena.check().unwrap();
    let inner = arena.view().own(frame.plus(5));
    inner.prepare(crate::units::MappingId(1), crate::units::PageIndex(0), Order(0));
    assert!(arena.check().is_err());
}

#[test]
fn a_run_is_allocated_by_growing_before_it_is_broken_into_pieces() {
    let arena = arena(SMALL);
    let one = arena.alloc(Order(0)).unwrap();
    assert_eq!(
        arena.alloc_run(512, LockWait::Wait).unwrap().pages,
        512,
        "the first extent is broken, the second is not"
    );
    let rest = drain(&arena, Order::MAX);
    let mut runs = Vec::new();
    assert_eq!(take(&arena, (1000, FrameStock::ANY), AllocAmount::Less, LockWait::Wait, &mut runs), 511);
    assert_eq!(runs.iter().map(|run| run.pages).collect::<Vec<_>>(), [256, 128, 64, 32, 16, 8, 4, 2, 1]);
    assert_eq!(take(&arena, (1, FrameStock::ANY), AllocAmount::Less, LockWait::Wait, &mut Vec::new()), 0);
    arena.free_all(&rest);
    assert_eq!(take(&arena, (600, FrameStock::ANY), AllocAmount::All, LockWait::Wait, &mut Vec::new()), 600);
    arena.free(one, Order(0));
    arena.check().unwrap();
}

#[test]
fn a_cell_is_all_zeros_after_other_content() {
    let arena = arena(SMALL);
    // Two extents, so that one that data used is cut next.
    let scribble = drain(&arena, Order::MAX);
    for &(frame, order) in &scribble {
        let bytes = arena.view().bytes(frame).unwrap();
        // SAFETY: the frames are this test's, and are not read.
        unsafe { bytes.write_bytes(0xa5, order.bytes()) };
    }
    arena.free_all(&scribble);
    let cells: Vec<_> = std::iter::repeat_with(|| arena.alloc_cell().unwrap()).take(8000).collect();
    for &cell in &cells {
        let zero = |number: &std::sync::atomic::AtomicU32| number.load(Ordering::Relaxed) == 0;
        assert!(arena.view().slots(cell).unwrap().iter().all(zero), "{cell:?}");
        let head = arena.view().head(cell).unwrap();
        assert!(head.words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }
    arena.check().unwrap();
}

#[test]
fn cells_and_data_trade_extents() {
    let arena = arena(SMALL);
    let extents = (arena.stats().bound_bytes - arena.stats().control_bytes - arena.stats().meta_bytes)
        / EXTENT_SIZE as u64;
    let mut cells = Vec::new();
    let all = arena.alloc_cells(usize::MAX / 2, &mut cells, LockWait::Wait);
    assert_eq!(all as u64, extents * 6144, "cells may have all there is");
    assert!(arena.alloc(Order(0)).is_none());
    cells.drain(..).for_each(|cell| arena.free_cell(cell));
    arena.check().unwrap();
    assert_eq!(arena.stats().cell_bytes, EXTENT_SIZE as u64, "all but the reserve went back");
    assert_eq!(drain(&arena, Order::MAX).len() as u64, extents - 1);
    arena.check().unwrap();
}

#[test]
fn cells_are_cut_out_of_free_data_when_the_machine_has_no_more() {
    let arena = arena(SMALL);
    let frame = arena.alloc(Order(0)).unwrap();
    arena.free(frame, Order(0));
    arena.growth.lock().refuse = u32::MAX;
    assert_eq!(arena.alloc_cells(7000, &mut Vec::new(), LockWait::Wait), 6144);
    assert_eq!((arena.stats().data_bytes, arena.alloc(Order(0))), (0, None));
    arena.check().unwrap();
}

#[test]
fn a_thread_that_waited_for_growth_does_not_grow_again() {
    let arena = arena(SMALL);
    let seen = arena.stock.lock().growths;
    assert_eq!(arena.grow(ExtentPurpose::Data, seen, LockWait::Wait), GrowOutcome::Yes);
    assert_eq!(arena.grow(ExtentPurpose::Data, seen, LockWait::Wait), GrowOutcome::Yes);
    assert_eq!(arena.stock.lock().growths, seen + 1);
}

/// The background thread grows step by step, and lets any thread that wants the growth lock go first.
#[test]
fn a_thread_that_waits_for_the_growth_lock_is_seen() {
    let arena = arena(8 * EXTENT_SIZE as u64);
    let growing = arena.growth.lock();
    assert!(!arena.is_growth_awaited());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| arena.set_bound(arena.bound()));
        let began = std::time::Instant::now();
        while !arena.is_growth_awaited() {
            assert!(began.elapsed() < std::time::Duration::from_secs(20), "it is not counted");
            std::thread::yield_now();
        }
        drop(growing);
        waiting.join().unwrap().unwrap();
    });
    assert!(!arena.is_growth_awaited());
}

#[test]
fn an_arena_that_is_used_up_grows_ahead() {
    const EXTENTS: u64 = 256;
    let arena = arena(EXTENTS * EXTENT_SIZE as u64);
    let is_due = || arena.available(LockWait::Wait).unwrap().is_growth_due;
    assert!(!arena.grow_ahead() && !is_due(), "a small one is grown as it is needed");
    let (mut frames, mut steps) = (Vec::new(), Vec::new());
    while let Some(frame) = arena.alloc(Order::MAX) {
        frames.push(frame);
        let grown = || arena.stats().grown_bytes / EXTENT_SIZE as u64;
        let free = || arena.stats().free_pages / u64::from(EXTENT_PAGES);
        let (before, free_before, due) = (grown(), free(), is_due());
        arena.growth.lock().extent_time = Duration::ZERO; // whatever the machine's host takes
        if arena.grow_ahead() {
            let step = grown() - before;
            steps.push(step);
            let wanted = (before / 8).min(16);
            assert!(due && free_before <= wanted / 2, "{free_before} of {before}: {steps:?}");
            let room = EXTENTS - 1 - u64::from(arena.stock.lock().reserve()) - before;
            // Fewer where those that follow are not to be had together.
            assert!(
                step == (wanted - free_before).min(8) || before + 2 * wanted > EXTENTS,
                "{before}: {steps:?}"
            );
            assert!(step <= room && free() <= wanted, "{before}: {steps:?}");
        } else {
            assert!(!due, "{before}: {steps:?}");
        }
        arena.check().unwrap();
    }
    assert!(steps.starts_with(&[1]) && steps.contains(&8), "{steps:?}");
    assert!(!arena.grow_ahead() && !is_due(), "the bound is reached");
    frames.into_iter().for_each(|frame| arena.free(frame, Order::MAX));
    arena.check().unwrap();
}

/// 1 The host of a virtual machine takes 5 milliseconds for an extent. 2 The background thread grows by eight of them.
/// 3 A reader that needs one waits for the growth lock, for 40 milliseconds.
#[test]
fn a_step_is_short_where_the_machine_is_slow() {
    let arena = arena(64 * EXTENT_SIZE as u64);
    let step = |extent_time: Duration| {
        let before = arena.stats().grown_bytes;
        let seen = arena.stock.lock().growths;
        arena.growth.lock().extent_time = extent_time;
        let request = GrowRequest { wanted: ExtentPurpose::Data, seen, locks: LockWait::Wait };
        assert_eq!(arena.grow_by(STEP_EXTENTS_MAX, request), GrowOutcome::Yes);
        assert_ne!(arena.growth.lock().extent_time, extent_time, "each step is measured");
        (arena.stats().grown_bytes - before) / EXTENT_SIZE as u64
    };
    let millis = Duration::from_millis;
    assert_eq!([millis(0), millis(1), millis(5), millis(9000)].map(step), [8, 4, 1, 1]);
    arena.check().unwrap();
}

/// The ends of files leave parts of extents, of which no large folio is made.
#[test]
fn parts_of_extents_are_no_reason_not_to_grow_ahead() {
    let arena = arena(64 * EXTENT_SIZE as u64);
    let halves: Vec<_> =
        (0..32).map(|_| (arena.alloc(Order(8)).unwrap(), arena.alloc(Order(8)).unwrap())).collect();
    while arena.grow_ahead() {}
    while arena.stock.lock().buddy.whole_extents() > 1 {
        arena.alloc(Order::MAX).unwrap();
    }
    halves.iter().for_each(|(first, _)| arena.free(*first, Order(8)));
    assert!(arena.stats().free_pages > u64::from(8 * EXTENT_PAGES));
    // A machine that has no memory is not asked again until an allocation has had to.
    let is_due = || arena.available(LockWait::Wait).unwrap().is_growth_due;
    arena.growth.lock().refuse = 1;
    assert!(is_due() && !arena.grow_ahead() && !is_due() && !arena.grow_ahead());
    while !is_due() {
        arena.alloc(Order::MAX).unwrap();
    }
    assert!(arena.grow_ahead());
    arena.check().unwrap();
}

#[test]
fn all_or_nothing_takes_nothing_when_it_is_not_all() {
    let arena = arena(SMALL);
    let all = drain(&arena, Order::MAX);
    let mut runs = Vec::new();
    arena.free_run(all[0].0, 100);
    assert_eq!(take(&arena, (101, FrameStock::ANY), AllocAmount::All, LockWait::Wait, &mut runs), 0);
    assert_eq!(take(&arena, (101, FrameStock::ANY), AllocAmount::All, LockWait::Try, &mut runs), 0);
    assert_eq!((runs.len(), arena.stats().free_pages), (0, 100), "what was begun went back");
    assert_eq!(take(&arena, (101, FrameStock::ANY), AllocAmount::Less, LockWait::Try, &mut runs), 100);
    arena.free_all(&runs.drain(..).map(|r| (r.frame, Order::fitting(r.pages))).collect::<Vec<_>>());
    assert_eq!(take(&arena, (100, FrameStock::ANY), AllocAmount::All, LockWait::Wait, &mut runs), 100);
    arena.check().unwrap();
}

#[test]
fn runs_are_of_the_sizes_that_were_asked_for() {
    let arena = arena(SMALL);
    let all = drain(&arena, Order::MAX);
    let sizes = Orders { min: Order(2), max: Order(4) };
    // 512 pages of which every eighth is in use: pieces of 4, 2 and 1 are free.
    for (at, pages) in (0..512).step_by(8).map(|at| (at, 7)) {
        arena.free_run(all[0].0.plus(at), pages);
    }
    let mut runs = Vec::new();
    assert_eq!(
        take(&arena, (512, sizes), AllocAmount::All, LockWait::Wait, &mut runs),
        0,
        "there are as many, but not such"
    );
    assert_eq!(arena.stats().free_pages, 448);
    assert_eq!(take(&arena, (512, sizes), AllocAmount::Less, LockWait::Wait, &mut runs), 256);
    assert!(runs.iter().all(|run| run.pages == 4 && run.frame.0 % 4 == 0));
    arena.free_run(all[1].0, 512);
    runs.clear();
    assert_eq!(take(&arena, (132, sizes), AllocAmount::All, LockWait::Wait, &mut runs), 132);
    assert_eq!(runs.iter().map(|run| run.pages).collect::<Vec<_>>(), [16, 16, 16, 16, 16, 16, 16, 16, 4]);
    arena.check().unwrap();
}

#[test]
fn a_thread_that_must_not_wait_grows_the_arena_unless_another_does() {
    let arena = arena(SMALL);
    let try_cell = || {
        let mut cells = Vec::new();
        arena.alloc_cells(1, &mut cells, LockWait::Try);
        cells.pop()
    };
    let growing = arena.growth.lock();
    assert_eq!((arena.alloc_run(8, LockWait::Try), try_cell()), (None, None), "nothing is grown");
    drop(growing);
    assert_eq!(arena.alloc_run(8, LockWait::Try).unwrap().pages, 8);
    let cell = try_cell().unwrap();
    let growing = arena.growth.lock();
    assert_eq!(arena.alloc_run(8, LockWait::Try).unwrap().pages, 8, "out of what is grown");
    assert_ne!(try_cell().unwrap(), cell);
    drop(growing);
    let locked = arena.stock.lock();
    assert_eq!((arena.alloc_run(8, LockWait::Try), try_cell()), (None, None));
    drop(locked);
    let mut runs = Vec::new();
    let max = arena.view().layout().frames_max;
    let got = take(&arena, (max, FrameStock::ANY), AllocAmount::Less, LockWait::Try, &mut runs);
    assert!(arena.alloc(Order::ZERO).is_none(), "it went to the bound: {got}");
    arena.check().unwrap();
}

#[test]
fn emptied_extents_go_back_to_the_machine_and_grow_again() {
    let large = SMALL + 20 * EXTENT_SIZE as u64;
    let arena = resizable(large, large);
    let all = drain(&arena, Order(4));
    let before = taken(&arena);
    arena.set_bound(SMALL).unwrap();
    assert_eq!((arena.choose_emptying().len(), arena.punch_empty()), (20, 0), "all of it is in use");
    assert_eq!(arena.stats().slack_bytes, 20 * EXTENT_SIZE as u64);
    arena.check().unwrap();
    // Half of each extent comes back, then all.
    let (first, second): (Vec<_>, Vec<_>) = all.iter().partition(|(frame, _)| frame.0 % 32 == 0);
    arena.free_all(&first);
    assert_eq!((arena.choose_emptying().len(), arena.punch_empty()), (20, 0));
    arena.check().unwrap();
    arena.free_all(&second);
    assert_eq!(arena.punch_empty(), 20);
    assert_eq!(taken(&arena), before - 20 * EXTENT_SIZE as u64);
    let stats = arena.stats();
    assert_eq!((stats.slack_bytes, stats.returned_bytes), (0, 20 * EXTENT_SIZE as u64));
    assert_eq!(stats.grown_bytes + stats.control_bytes, SMALL - EXTENT_SIZE as u64, "but for the reserve");
    arena.check().unwrap();
    assert_eq!(drain(&arena, Order(9)).len(), 5, "it does not grow beyond the bound");
    arena.set_bound(large).unwrap();
    assert_eq!(drain(&arena, Order(9)).len(), 20);
    assert_eq!(taken(&arena), before);
    arena.check().unwrap();
}

#[test]
fn a_bound_that_is_raised_again_gives_back_emptied_extents() {
    let large = SMALL + 4 * EXTENT_SIZE as u64;
    let arena = resizable(large, large);
    let mut all = drain(&arena, Order(0));
    arena.set_bound(SMALL).unwrap();
    assert_eq!(arena.choose_emptying().len(), 4);
    let (frame, order) = all.pop().unwrap();
    arena.free(frame, order);
    assert_eq!((arena.alloc(Order(0)), arena.stats().leaving_pages), (None, 1), "nobody gets it");
    arena.check().unwrap();
    arena.set_bound(large).unwrap();
    assert_eq!((arena.alloc(Order(0)), arena.stats().slack_bytes), (Some(frame), 0));
    arena.check().unwrap();
}

#[test]
fn the_cheapest_extents_go_and_a_pinned_one_is_exchanged() {
    let large = SMALL + 2 * EXTENT_SIZE as u64;
    let arena = resizable(large, large);
    let mut all = drain(&arena, Order(9));
    all.sort_unstable_by_key(|(frame, _)| frame.0);
    let name = |(frame, order): (Frame, Order), at: u64| {
        let descriptor = arena.view().own(frame);
        descriptor.prepare(crate::units::MappingId(1), crate::units::PageIndex(at * 512), order);
        descriptor.complete();
        descriptor
    };
    // All are folios that were read, but two; of these one is held.
    for (at, &folio) in all.iter().enumerate() {
        name(folio, at as u64);
        arena.view().referenced(folio.0).unwrap().store(u8::from(at != 2 && at != 4), Ordering::Relaxed);
    }
    let held = arena.view().own(all[4].0);
    held.try_hold(crate::units::MappingId(1), crate::units::PageIndex(4 * 512)).unwrap();
    arena.set_bound(SMALL + EXTENT_SIZE as u64).unwrap();
    let cold = all[2].0.extent();
    assert_eq!(arena.choose_emptying(), [cold]);
    let pinned = arena.view().own(all[2].0);
    pinned.try_hold(crate::units::MappingId(1), crate::units::PageIndex(2 * 512)).unwrap();
    assert_eq!(arena.choose_emptying(), [cold], "a hold is short");
    pinned.pin();
    let top = all.last().unwrap().0.extent();
    assert_eq!(arena.choose_emptying(), [top], "the highest of those that cost the same");
    arena.check().unwrap();
}

#[test]
fn memory_taken_by_a_late_reader_is_given_back_by_a_sweep() {
    let large = SMALL + 4 * EXTENT_SIZE as u64;
    let arena = resizable(large, large);
    let all = drain(&arena, Order(9));
    arena.free_all(&all);
    arena.set_bound(SMALL).unwrap();
    arena.choose_emptying();
    assert_eq!((arena.punch_empty(), arena.sweep()), (4, 0));
    let before = taken(&arena);
    let late = *arena.stock.lock().punched.first().unwrap();
    let never = arena.view().layout().frames_max / EXTENT_PAGES;
    assert!(late < never);
    let bytes = arena.view().bytes(Frame(late * EXTENT_PAGES + 7)).unwrap();
    // SAFETY: all of the file is mapped; nothing writes there.
    assert_eq!(unsafe { bytes.read_volatile() }, 0);
    assert!(taken(&arena) > before, "a read in a hole takes a page");
    assert_eq!((arena.sweep(), taken(&arena)), (1, before));
    arena.check().unwrap();
}

#[test]
fn a_bound_out_of_reach_is_refused() {
    let arena = resizable(SMALL, 2 * SMALL);
    assert!(
        matches!(arena.set_bound(2 * SMALL + 1), Err(ArenaError::AboveMax { max, .. }) if max == 2 * SMALL)
    );
    assert!(matches!(arena.set_bound(SMALL - 1), Err(ArenaError::TooSmall { min: SMALL, .. })));
    let below = Reservation { memory_max: SMALL, swap: Swap::Allowed };
    let refused = Arena::build_within(ArenaOptions { memory: 2 * SMALL }, below).unwrap_err();
    assert!(matches!(refused, ArenaError::MaxBelowMemory { .. }), "{refused}");
    // The tables of a large one take more than the least.
    let tables = Reservation { memory_max: 4 << 30, swap: Swap::Allowed };
    let refused = Arena::build_within(ArenaOptions { memory: SMALL }, tables).unwrap_err();
    let ArenaError::TooSmall { min, .. } = refused else { panic!("{refused}") };
    let arena = Arena::build_within(ArenaOptions { memory: min }, tables).unwrap();
    assert!(drain(&arena, Order(9)).len() >= 4);
    assert!(taken(&arena) <= min);
}

#[derive(Clone, Debug)]
enum Op {
    Alloc(u8),
    Grow(u32),
    Runs(u32),
    Free(usize),
    Cells(usize),
    FreeCells(usize, usize),
    /// Sets the bound, in extents above the least, and empties the extents to be removed as far as they are free.
    Resize(u64),
    /// As after reclaim: each frame that is freed now may complete an extent that is being emptied.
    Punch,
    Guest(u32),
    Claim(usize, u32, u32),
    DropGuest(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        3 => (0..=9u8).prop_map(Op::Alloc),
        1 => (1..9u32).prop_map(Op::Grow),
        2 => (1..1500u32).prop_map(Op::Runs),
        4 => any::<usize>().prop_map(Op::Free),
        1 => prop_oneof![1..30usize, 4000..9000usize].prop_map(Op::Cells),
        1 => (any::<usize>(), prop_oneof![1..30usize, 4000..9000usize]).prop_map(|(a, b)| Op::FreeCells(a, b)),
        2 => (0..=6u64).prop_map(Op::Resize),
        1 => Just(Op::Punch),
        2 => (1..4u32).prop_map(Op::Guest),
        4 => (any::<usize>(), any::<u32>(), 1..1500u32).prop_map(|(which, at, pages)| Op::Claim(which, at, pages)),
        2 => any::<usize>().prop_map(Op::DropGuest),
    ];
    prop::collection::vec(op, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// The twin: an owner for each frame. No request is refused that could be met.
    #[test]
    fn no_frame_is_handed_out_twice(ops in ops()) {
        let arena = Arc::new(resizable(SMALL, SMALL + 6 * EXTENT_SIZE as u64));
        let (mut runs, mut cells) = (Vec::<FrameRun>::new(), Vec::<CellNumber>::new());
        let mut guests = Vec::<GuestExtents>::new();
        let mut most_grown = 0;
        for op in ops {
            match op {
                Op::Alloc(order) => match arena.alloc(Order(order)) {
                    Some(frame) => runs.push(FrameRun { frame, pages: 1 << order }),
                    None => prop_assert!(order > 0 || arena.stats().free_pages == 0),
                },
                Op::Grow(extents) => prop_assert_eq!(grow(&arena, extents), Ok(())),
                Op::Runs(pages) => {
                    // An odd place, and a shift: no frame more than are wanted is lost.
                    let (first, mut new) = (PageIndex(u64::from(pages) * 7), Vec::new());
                    let fit = FrameAlignment { runs: FrameStock::ANY, align: Order((pages % 10) as u8) };
                    let got = take_less(&arena, Gap { first, pages }, fit, &mut new);
                    prop_assert_eq!(pages_of(&new), got);
                    prop_assert!(got == pages || arena.stats().free_pages == 0);
                    prop_assert_eq!(check_places(first, fit.align, &new), Ok(()));
                    runs.append(&mut new);
                }
                Op::Free(which) if !runs.is_empty() => {
                    let run = runs.swap_remove(which % runs.len());
                    arena.free_run(run.frame, run.pages);
                }
                Op::Cells(wanted) => {
                    let got = arena.alloc_cells(wanted, &mut cells, LockWait::Wait);
                    let stats = arena.stats();
                    let full = stats.cells_used * EXTENT_SIZE as u64 == stats.cell_bytes * 6144;
                    prop_assert!(got == wanted || full);
                }
                Op::FreeCells(from, many) => for _ in 0..many.min(cells.len()) {
                    let cell = cells.swap_remove(from % cells.len());
                    arena.free_cell(cell);
                },
                Op::Guest(extents) => {
                    guests.extend(take_guest(&arena, extents).map_err(TestCaseError::fail)?);
                }
                Op::Claim(which, at, pages) if !guests.is_empty() => {
                    let guest = &guests[which % guests.len()];
                    runs.extend(claim(guest, at, pages).map_err(TestCaseError::fail)?);
                }
                Op::DropGuest(which) if !guests.is_empty() => {
                    drop(guests.swap_remove(which % guests.len()));
                    most_grown = 0;
                }
                Op::Free(_) | Op::Claim(..) | Op::DropGuest(_) => {}
                Op::Resize(extents) => {
                    let grown = arena.stats().grown_bytes;
                    let bound = SMALL + extents * EXTENT_SIZE as u64;
                    let set = arena.set_bound(bound);
                    prop_assert_eq!(set.is_ok(), bound >= arena.memory_min());
                    let chosen = arena.choose_emptying().len() as u32;
                    prop_assert!(chosen <= arena.excess_extents());
                    prop_assert_eq!(arena.stats().grown_bytes, grown, "nothing goes before its hole is made");
                    most_grown = 0;
                    arena.punch_empty();
                }
                Op::Punch => {
                    arena.choose_emptying();
                    arena.punch_empty();
                }
            }
            prop_assert_eq!(arena.check(), Ok(()));
            prop_assert_eq!(check_taken(&arena, &mut most_grown), Ok(()));
            prop_assert_eq!(check_owners(&arena, &runs, &cells), Ok(()));
        }
    }
}

fn grow(arena: &Arena, extents: u32) -> Result<(), String> {
    let (seen, growable) = {
        let stock = arena.stock.lock();
        (stock.growths, stock.growable(ExtentPurpose::Data))
    };
    let request = GrowRequest { wanted: ExtentPurpose::Data, seen, locks: LockWait::Wait };
    let outcome = arena.grow_by(extents, request);
    let grown = arena.stock.lock().growths - seen;
    match outcome {
        GrowOutcome::Yes if (1..=u64::from(extents.min(growable))).contains(&grown) => Ok(()),
        GrowOutcome::No if growable == 0 && grown == 0 => Ok(()),
        _ => Err(format!("{outcome:?}: by {grown} of {extents}, and of {growable} that the bound allows")),
    }
}

fn take_guest(arena: &Arc<Arena>, extents: u32) -> Result<Option<GuestExtents>, String> {
    let take = || arena.take_guest(extents, c"quinion-test", GuestUse::Frozen);
    let before = arena.stats();
    let mut taken = take();
    if matches!(taken, Err(GuestRefused::NoSpace)) && arena.demand_guest(extents) {
        arena.choose_emptying();
        arena.punch_empty();
        taken = take();
        arena.end_demand();
    }
    let capacity = before.bound_bytes - before.control_bytes - before.meta_bytes;
    let is_empty = before.data_bytes + before.cell_bytes + before.guest_bytes == 0;
    match taken {
        Ok(guest) => Ok(Some(guest)),
        Err(GuestRefused::NoSpace) if !is_empty || u64::from(extents + 1) * EXTENT_SIZE as u64 > capacity => {
            Ok(None)
        }
        refused => Err(format!("{refused:?}, and there is room: {before:?}")),
    }
}

fn claim(guest: &GuestExtents, at: u32, pages: u32) -> Result<Option<FrameRun>, String> {
    let at = at % guest.pages();
    let (index, pages) = (PageIndex(u64::from(at)), pages.min(guest.pages() - at));
    match guest.claim(index, pages, LockWait::Wait) {
        ClaimOutcome::Pages(got) if (1..=pages).contains(&got) => {
            Ok(Some(FrameRun { frame: guest.place(index).unwrap(), pages: got }))
        }
        ClaimOutcome::Taken => Ok(None),
        other => Err(format!("{other:?}")),
    }
}

/// Within the bound, or falling towards it. (Guests' memory is behind other files.)
fn check_taken(arena: &Arena, most_grown: &mut u64) -> Result<(), String> {
    let stats = arena.stats();
    let (taken, counted) = (taken(arena), stats.grown_bytes - stats.guest_bytes + PAGE_SIZE as u64);
    // Tables that have no memory yet may have some pages of it.
    let missing = u64::from(arena.growth.lock().tables.missing()) * EXTENT_SIZE as u64;
    if taken > counted || taken < counted - missing || missing > 0 && taken == counted {
        return Err(format!("{taken} bytes are taken, {counted} counted: {stats:?}"));
    }
    if stats.grown_bytes + stats.control_bytes > stats.bound_bytes {
        if *most_grown > 0 && stats.grown_bytes > *most_grown {
            return Err(format!("it grew above its bound: {stats:?}"));
        }
        *most_grown = stats.grown_bytes;
    }
    Ok(())
}

fn check_places(mut at: PageIndex, align: Order, runs: &[FrameRun]) -> Result<(), String> {
    for run in runs {
        let mut page = 0;
        while page < run.pages {
            let index = at.plus(u64::from(page));
            let order = Order(index.0.trailing_zeros().min(u32::from(align.0)) as u8);
            let order = order.min(Order::fitting(run.pages - page));
            if (run.frame.0 + page) & (order.pages() - 1) != 0 {
                return Err(format!("{run:?} for {at:?}: {index:?} could head a folio of {order:?}"));
            }
            page += order.pages();
        }
        at = at.plus(u64::from(run.pages));
    }
    Ok(())
}

fn check_owners(arena: &Arena, runs: &[FrameRun], cells: &[CellNumber]) -> Result<(), String> {
    let mut owners = HashMap::new();
    for (number, run) in runs.iter().enumerate() {
        for frame in run.frame.0..run.frame.0 + run.pages {
            let punched = arena.stock.lock().punched.contains(&Frame(frame).extent());
            if frame >= arena.view().frames_grown() || punched {
                return Err(format!("{run:?} is no run"));
            }
            if owners.insert(frame, number).is_some() {
                return Err(format!("frame {frame} is handed out twice"));
            }
        }
    }
    let mut distinct: Vec<u32> = cells.iter().map(|cell| cell.0).collect();
    distinct.sort_unstable();
    distinct.dedup();
    if distinct.len() != cells.len() || cells.iter().any(|cell| owners.contains_key(&cell.frame().0)) {
        return Err("a cell is handed out twice, or lies in a run".into());
    }
    let stats = arena.stats();
    let is_data = |frame: &&u32| !arena.stock.lock().guests.has(Frame(**frame).extent());
    let owned = owners.keys().filter(is_data).count() as u64;
    let pages = stats.free_pages + stats.leaving_pages + owned;
    if pages * PAGE_SIZE as u64 != stats.data_bytes || stats.cells_used != cells.len() as u64 {
        return Err(format!("frames or cells got lost: {stats:?}"));
    }
    Ok(())
}

#[test]
fn four_threads_at_once() {
    let arena = arena(24 << 20);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let arena = &arena;
            scope.spawn(move || churn(arena, thread));
        }
    });
    arena.check().unwrap();
    let stats = arena.stats();
    assert_eq!(stats.free_pages * PAGE_SIZE as u64, stats.data_bytes, "all came back");
    assert_eq!(stats.cells_used, 0);
}

fn churn(arena: &Arena, thread: u32) {
    let mut random = 0x9e37_79b9u32.wrapping_mul(thread + 1);
    let mut runs = Vec::new();
    let mut cells = Vec::new();
    for round in 0..3000u32 {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        match arena.alloc_run(1 << (random % 8), LockWait::Wait) {
            Some(run) => {
                let mark = arena.view().own(run.frame);
                mark.set_link(0, thread);
                runs.push((run, thread));
            }
            None => runs.drain(..).for_each(|(run, _)| give_back(arena, run, thread)),
        }
        if random.is_multiple_of(3) && !runs.is_empty() {
            let (run, _) = runs.swap_remove(random as usize % runs.len());
            give_back(arena, run, thread);
        }
        if round % 64 < 32 {
            let first = cells.len();
            arena.alloc_cells(40, &mut cells, LockWait::Wait);
            for &cell in &cells[first..] {
                arena.view().slots(cell).unwrap()[9].store(thread, Ordering::Relaxed);
            }
        } else {
            for cell in cells.drain(cells.len().saturating_sub(50)..) {
                assert_eq!(arena.view().slots(cell).unwrap()[9].load(Ordering::Relaxed), thread);
                arena.free_cell(cell);
            }
        }
    }
    runs.into_iter().for_each(|(run, _)| give_back(arena, run, thread));
    cells.into_iter().for_each(|cell| arena.free_cell(cell));
}

fn give_back(arena: &Arena, run: FrameRun, thread: u32) {
    assert_eq!(arena.view().own(run.frame).links()[0], thread, "{run:?} was somebody else's too");
    arena.free_run(run.frame, run.pages);
}

#[test]
fn a_machine_without_memory_is_asked_now_and_then() {
    let mut growth = GrowthParams::new(Tables::new(0));
    let mut asked = 0;
    for _ in 0..3 * (GROWTHS_REFUSED + 1) {
        let refused: Option<()> = growth.ask(|_| {
            asked += 1;
            Err(Errno::NOMEM.into())
        });
        assert_eq!(refused, None);
    }
    assert_eq!((asked, growth.failures), (3, 3));
    assert_eq!(growth.ask(|_| Ok(PageSize::Small)), Some(PageSize::Small));
    assert_eq!(growth.ask(|_| Ok(PageSize::Huge)), Some(PageSize::Huge));
}

fn reopened(file: impl AsFd, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
}

fn map(file: &OwnedFd, bytes: usize, access: ProtFlags) -> rustix::io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe { mmap(null_mut(), bytes, access, MapFlags::SHARED, file, 0) };
    mapped.map(|at| NonNull::new(at.cast()).unwrap())
}

#[test]
fn the_arenas_files_cannot_be_resized() {
    let arena = arena(SMALL);
    for file in [arena.arena_fd(), arena.control_fd()] {
        let size = fstat(file).unwrap().st_size as u64;
        assert_eq!(ftruncate(file, size - 4096), Err(Errno::PERM));
        assert_eq!(ftruncate(file, size + 4096), Err(Errno::PERM));
        assert_eq!(ftruncate(file, 0), Err(Errno::PERM));
    }
}

#[test]
fn a_viewer_maps_the_arena_for_reading_only() {
    let arena = arena(SMALL);
    let bytes = arena.view().layout().bytes_max() as usize;
    let file = reopened(arena.arena_fd(), OFlags::RDONLY).unwrap();
    assert_eq!(map(&file, bytes, ProtFlags::READ | ProtFlags::WRITE), Err(Errno::ACCESS));
    let base = map(&file, bytes, ProtFlags::READ).unwrap();
    // SAFETY: the mapping is this test's; were it to succeed, it would not be used.
    let made_writable = unsafe { mprotect(base.as_ptr().cast(), bytes, MprotectFlags::WRITE) };
    assert_eq!(made_writable, Err(Errno::ACCESS));
    if !rustix::process::geteuid().is_root() {
        assert_eq!(reopened(arena.arena_fd(), OFlags::RDWR).err(), Some(Errno::ACCESS));
    }

    // SAFETY: all of it is mapped until the end of this test.
    let view = unsafe { View::attach(base, bytes as u64) }.unwrap();
    assert_eq!(view.header().token.load(Ordering::Relaxed), arena.token());
    let before = view.frames_grown();
    let frame = arena.alloc(Order(0)).unwrap();
    assert!(view.frames_grown() >= before + EXTENT_PAGES, "growth is seen");
    assert_eq!(view.own(frame).word(), arena.view().own(frame).word());
    // SAFETY: the view is not used any more.
    unsafe { munmap(base.as_ptr().cast(), bytes) }.unwrap();
}

#[test]
fn a_viewer_maps_its_own_page_for_writing_and_the_rest_for_reading_only() {
    let arena = arena(2 * SMALL);
    arena.populate_control().unwrap();
    let file = reopened(arena.control_fd(), OFlags::RDONLY).unwrap();
    let write = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map(&file, COMMON_BYTES, write), Err(Errno::ACCESS));
    if !rustix::process::geteuid().is_root() {
        assert_eq!(reopened(arena.control_fd(), OFlags::RDWR).err(), Some(Errno::ACCESS));
    }
    let common = map(&file, COMMON_BYTES, ProtFlags::READ).unwrap();
    let last = 2 * GROUP_VIEWERS - 1;
    arena.reserve_viewers(2).unwrap();
    arena.map_viewers(1).unwrap();
    let pages = [0, last].map(|number| arena.make_viewer_page(number).unwrap());
    let [first, page] = pages.map(|page| map(&page, VIEWER_BYTES, write).unwrap());
    let at = |base, bytes: usize| (base, bytes as u64);
    // SAFETY: all of it is mapped until the end of this test.
    let view = unsafe { ViewerControl::attach(at(common, COMMON_BYTES), at(page, VIEWER_BYTES)) }.unwrap();
    assert_eq!(view.control().token.load(Ordering::Relaxed), arena.token());
    view.page().ring[4095].store(7, Ordering::Relaxed);
    let seen = |number| arena.control().viewer_page(number).unwrap().ring[4095].load(Ordering::Relaxed);
    assert_eq!((seen(0), seen(last)), (0, 7));
    assert!(arena.control().viewer_page(2 * GROUP_VIEWERS).is_none());
    // The next in its place has another page.
    arena.make_viewer_page(last).unwrap();
    view.page().ring[4095].store(8, Ordering::Relaxed);
    assert_eq!(seen(last), 0);
    for (base, bytes) in [(common, COMMON_BYTES), (first, VIEWER_BYTES), (page, VIEWER_BYTES)] {
        // SAFETY: the views are not used any more.
        unsafe { munmap(base.as_ptr().cast(), bytes) }.unwrap();
    }
}

/// 1. The pages of many viewers take memory beside the bound, or of what the cache cannot do without.
#[test]
fn pages_of_more_viewers_are_taken_from_the_bound_as_long_as_it_has_room() {
    let memory = 2 * SMALL;
    let arena = arena(memory);
    let before = arena.stats();
    let (all, least) = (arena.pages_max(), arena.memory_min());
    let room = ((memory - least) / EXTENT_SIZE as u64) as usize;
    assert!((1..GROUPS_MAX).contains(&room), "{room}");
    for groups in [0, 1, 2, 2] {
        arena.reserve_viewers(groups).unwrap();
    }
    let stats = arena.stats();
    assert_eq!(stats.control_bytes, before.control_bytes + EXTENT_SIZE as u64);
    assert_eq!(arena.pages_max(), all - u64::from(EXTENT_PAGES));
    assert_eq!(arena.memory_min(), least + EXTENT_SIZE as u64);
    // As many extents as are left are grown, and no more.
    let mut frames = Vec::new();
    while let Some(frame) = arena.alloc(Order::MAX) {
        frames.push(frame);
    }
    let full = arena.stats();
    assert!(full.grown_bytes + full.control_bytes <= memory && full.slack_bytes == 0, "{full:?}");
    arena.reserve_viewers(room + 1).unwrap();
    assert!(arena.stats().slack_bytes > 0, "what was grown there is to go");
    assert!(matches!(arena.reserve_viewers(room + 2), Err(ArenaError::TooSmall { .. })));
    assert_eq!(arena.stats().control_bytes, before.control_bytes + (room * EXTENT_SIZE) as u64);
    arena.set_bound(memory).unwrap();
    assert!(matches!(arena.set_bound(memory - EXTENT_SIZE as u64), Err(ArenaError::TooSmall { .. })));
    arena.check().unwrap();
    frames.into_iter().for_each(|frame| arena.free(frame, Order::MAX));
    arena.check().unwrap();
}

/// 1. The last groups have no viewers any more. Memory set aside for them is taken from the cache for ever, or is
///    given back while their pages keep their memory.
/// 2. A group is made again: its viewers have the pages of those before them.
#[test]
fn memory_for_the_pages_of_viewers_is_given_back_and_taken_again() {
    let arena = arena(4 * SMALL);
    let (bytes, pages_max) = (arena.stats().control_bytes, arena.pages_max());
    let blocks = || fstat(arena.viewer_segments[1].get().unwrap().file()).unwrap().st_blocks;
    let word = |viewer| &arena.control().viewer_page(viewer).unwrap().ring[0];
    let viewers = [GROUP_VIEWERS, 3 * GROUP_VIEWERS - 1];
    for _ in 0..3 {
        arena.reserve_viewers(3).unwrap();
        for (group, viewer) in [1, 2].into_iter().zip(viewers) {
            arena.map_viewers(group).unwrap();
            arena.make_viewer_page(viewer).unwrap();
            assert_eq!(word(viewer).swap(7, Ordering::Relaxed), 0, "another one was there before");
        }
        arena.release_viewers(2);
        assert_eq!(arena.stats().control_bytes, bytes + EXTENT_SIZE as u64);
        assert_eq!(arena.pages_max(), pages_max - u64::from(EXTENT_PAGES));
        assert_eq!(blocks(), 0);
        // The first viewer's page stays; a thread that is late for the other viewer finds nothing, and takes a page for
        // it.
        assert_eq!(viewers.map(|viewer| word(viewer).load(Ordering::Relaxed)), [7, 0]);
        assert!(blocks() > 0);
        arena.release_viewers(1);
        assert_eq!((arena.stats().control_bytes, arena.pages_max()), (bytes, pages_max));
        arena.check().unwrap();
    }
}

/// 1. The bound was reached when an extent was set aside for viewers: one of data is being emptied.
/// 2. The viewers go. The extent of data is emptied all the same, or none of its frames is given out again.
#[test]
fn an_extent_that_was_to_go_for_viewers_stays_when_they_have_gone() {
    let arena = arena(2 * SMALL);
    let mut frames = Vec::new();
    while let Some(frame) = arena.alloc(Order::MAX) {
        frames.push(frame);
    }
    arena.reserve_viewers(2).unwrap();
    assert!(arena.choose_emptying().len() == 1 && arena.stats().slack_bytes > 0);
    arena.release_viewers(1);
    assert_eq!((arena.excess_extents(), arena.stats().slack_bytes), (0, 0));
    let count = frames.len();
    frames.drain(..).for_each(|frame| arena.free(frame, Order::MAX));
    assert_eq!(arena.punch_empty(), 0);
    assert_eq!(std::iter::from_fn(|| arena.alloc(Order::MAX)).count(), count);
    arena.check().unwrap();
}
