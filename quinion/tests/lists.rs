//! Lists: the rings of folios, and what becomes of a hot set, of a scan and of small reads.
//!
//! ```text
//!   hot   a few hundred pages, read some times      scan   ten times the memory, each page once
//!
//!   read hot three times ... scan ...  hot is there          (S3-FIFO's point)
//!   read hot once        ... scan ...  hot is gone           (it was a scan as well)
//!   read a file by 64 bytes ... scan ...  it is gone         (one access for each folio)
//! ```

use std::sync::{Arc, Barrier};

use quinion::backend::{Backend, FillRun};
use quinion::internals::arena::{Arena, ArenaOptions};
use quinion::internals::mapping::{
    FolioLifetime, FolioShape, Mapping, MarkOutcome, NewMapping, TakeFilter, WritebackOutcome,
};
use quinion::internals::policy::{Class, FetchOrigin};
use quinion::internals::reclaim::{Protection, Reclaim};
use quinion::internals::stats::{Count, Counters};
use quinion::internals::sync::LockWait;
use quinion::internals::units::{Frame, MappingId, Millis, Order, Orders, PageIndex};
use quinion::{Cache, File};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;
const HOT: u64 = 256;

// ---- a whole cache ------------------------------------------------------------------------------------

fn cache(readahead: u64) -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(readahead).build().unwrap()
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).unwrap()
}

fn read(file: &File, device: &Device, position: u64, len: u64, piece: u64) {
    let mut buffer = vec![0; piece as usize];
    for at in (position..position + len).step_by(piece as usize) {
        assert_eq!(file.read_at(&mut buffer, at).unwrap(), buffer.len());
        verify(&buffer, device, at);
    }
}

fn scan(cache: &Cache) {
    let pages = 10 * Cache::MEMORY_MIN / PAGE;
    let device = Device::with_number(99, pages * 7 * PAGE);
    let file = open(cache, &device);
    // 7 is prime to the number of pages, and a step of 4801 leaves no two neighbours.
    (0..pages).for_each(|i| read(&file, &device, i * 4801 % pages * 7 * PAGE, PAGE, PAGE));
    assert!(cache.stats().evicted_pages > pages / 2);
}

/// The share of a file that is left after a scan, when it was read `times` times in pieces of `piece` bytes.
fn left_after_scan(readahead: u64, times: u32, piece: u64) -> u64 {
    let (cache, device) = (cache(readahead), Device::with_number(1, HOT * PAGE));
    let file = open(&cache, &device);
    (0..times).for_each(|_| read(&file, &device, 0, HOT * PAGE, piece));
    assert_eq!(file.cached_pages(), HOT);
    scan(&cache);
    cache.check().unwrap();
    let left = file.cached_pages();
    assert_eq!(device.times_read(), [1; HOT as usize], "what was there was not asked for again");
    left
}

#[test]
fn a_hot_set_outlives_a_scan_of_ten_times_the_memory() {
    assert_eq!(left_after_scan(0, 3, PAGE), HOT);
    assert_eq!(left_after_scan(1 << 20, 3, PAGE), HOT, "fetched ahead or not");
}

#[test]
fn pages_read_once_or_twice_are_no_hot_set() {
    assert_eq!(left_after_scan(0, 1, PAGE), 0);
    assert_eq!(left_after_scan(1 << 20, 2, PAGE), 0);
}

/// D11: a scan promotes nothing, plain reads of 64 bytes included: the reads of one pass over a folio are one access.
#[test]
fn d11_a_scan_by_64_byte_reads_promotes_nothing() {
    assert_eq!(left_after_scan(0, 1, 64), 0, "a miss and 63 hits in each folio");
    assert_eq!(left_after_scan(1 << 20, 1, 64), 0, "large folios, most of them fetched ahead");
    assert_eq!(left_after_scan(0, 3, 64), HOT, "three such scans are three accesses");
}

#[test]
fn a_folio_that_is_pinned_stays_and_one_that_is_not_goes_for_it() {
    let (cache, device) = (cache(0), Device::with_number(1, HOT * PAGE));
    let file = open(&cache, &device);
    let pinned = file.pin(0, (HOT * PAGE) as usize).unwrap();
    scan(&cache);
    cache.check().unwrap();
    assert_eq!(file.cached_pages(), HOT);
    verify(&pinned.chunks().flatten().copied().collect::<Vec<u8>>(), &device, 0);
    drop(pinned);
    scan(&cache);
    assert_eq!(file.cached_pages(), 0);
}

// ---- rings of some folios -----------------------------------------------------------------------------

struct Rings {
    arena: Arc<Arena>,
    reclaim: Reclaim,
    mapping: Arc<Mapping>,
    counters: Arc<Counters>,
}

impl Rings {
    fn new() -> Self {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: Cache::MEMORY_MIN }).unwrap());
        let counters = Arc::new(Counters::default());
        let reclaim = Reclaim::new(Arc::clone(&arena), Arc::clone(&counters));
        let (device, process) = (Device::new(PAGE), quinion::internals::sys::fork::ForkGuard::new());
        let known = device.attributes().unwrap();
        let id = MappingId(1);
        let new = NewMapping { arena: &arena, id, backend: device, attributes: &known, process };
        let mapping = Arc::new(Mapping::new(new).unwrap().with_lists(reclaim.lists()));
        reclaim.add_mapping(Arc::clone(&mapping));
        Self { arena, reclaim, mapping, counters }
    }

    fn insert(&self, index: u64, order: u8) -> Frame {
        self.insert_as(index, order, FolioLifetime::Stays)
    }
    fn insert_as(&self, index: u64, order: u8, fate: FolioLifetime) -> Frame {
        let frame = self.arena.alloc(Order(order)).unwrap();
        let run = FillRun { index: PageIndex(index), frame, pages: 1 << order };
        let shape = FolioShape { fate, ..FolioShape::of(Orders { min: Order::ZERO, max: Order(order) }) };
        let added = self.mapping.add_folio_range(run, shape, LockWait::Wait, &mut |_, _| {}).unwrap();
        assert_eq!(added.pages, 1 << order);
        self.arena.view().own(frame).complete();
        frame
    }
    fn list(&self, frame: Frame, came: FetchOrigin) {
        let reservation = self.reclaim.lists().reserve(1, LockWait::Wait).unwrap();
        self.reclaim.list([(frame, came)], reservation);
    }
    fn add(&self, index: u64, order: u8, came: FetchOrigin) -> Frame {
        let fate =
            if came == FetchOrigin::Uncached { FolioLifetime::DropsBehind } else { FolioLifetime::Stays };
        let frame = self.insert_as(index, order, fate);
        self.list(frame, came);
        frame
    }
    fn pages(&self, class: Class) -> u64 {
        self.check();
        self.reclaim.weights().of(class)
    }
    fn check(&self) {
        self.mapping.check().unwrap();
        self.reclaim.check().unwrap();
        self.arena.check().unwrap();
    }
    fn frame(&self, index: u64) -> Frame {
        self.mapping.try_hold(PageIndex(index)).unwrap().frame()
    }
    fn reclaim(&self, pages: u32) -> u32 {
        self.reclaim.reclaim(pages, LockWait::Wait)
    }
}

#[test]
fn folios_weigh_their_pages() {
    let rings = Rings::new();
    rings.add(0, 9, FetchOrigin::Asked);
    rings.add(512, 0, FetchOrigin::Ahead);
    rings.add(1024, 7, FetchOrigin::Stream);
    rings.add(1152, 2, FetchOrigin::Uncached);
    assert_eq!(Class::ALL.map(|class| rings.pages(class)), [4, 128, 513, 0]);
    // What is not to be kept goes first, then a stream's above an eighth. It is asked once whether its reader has come.
    assert_eq!(rings.reclaim(1), 4);
    assert_eq!(rings.reclaim(1), 128);
    assert_eq!(rings.counters.sum(Count::Shadows), 128, "what was not to be kept is not remembered");
    assert_eq!(rings.reclaim(1), 512);
    assert_eq!(Class::ALL.map(|class| rings.pages(class)), [0, 0, 1, 0]);
    assert_eq!(rings.reclaim(1000), 1);
    assert_eq!(rings.reclaim(1000), 0);
}

#[test]
fn a_folio_is_listed_once_and_one_that_is_not_is_seen() {
    let rings = Rings::new();
    let frame = rings.insert(0, 4);
    assert!(rings.mapping.check().unwrap_err().contains("stand in no ring"));
    rings.list(frame, FetchOrigin::Asked);
    rings.list(frame, FetchOrigin::Stream);
    assert_eq!((rings.pages(Class::Probation), rings.pages(Class::Stream)), (16, 0));
}

#[test]
fn folios_removed_without_reclaim_are_taken_off_the_lists() {
    let rings = Rings::new();
    for round in 0..20 {
        (0..500).for_each(|index| _ = rings.add(index, 0, FetchOrigin::Asked));
        let held = rings.mapping.try_hold(PageIndex(7)).unwrap();
        match round % 3 {
            0 => assert_eq!(rings.mapping.lock().remove_all(), 500),
            1 => {
                assert_eq!(rings.mapping.lock().drop_range(PageIndex(0), PageIndex(500), PageIndex(500)), 499)
            }
            _ => assert_eq!(rings.reclaim(1000), 499),
        }
        assert_eq!(rings.pages(Class::Probation), u64::from(round % 3 != 0));
        drop(held);
        rings.mapping.lock().remove_all();
        assert_eq!(rings.pages(Class::Probation), 0);
    }
}

#[test]
fn victims_of_a_tree_that_is_locked_join_their_rings_again() {
    let rings = Rings::new();
    (0..100).for_each(|index| _ = rings.add(index, 0, FetchOrigin::Asked));
    let [locked, done] = [(); 2].map(|()| Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _tree = rings.mapping.lock();
            locked.wait();
            done.wait();
        });
        locked.wait();
        let freed = rings.reclaim.reclaim(10, LockWait::Try);
        done.wait();
        assert_eq!(freed, 0);
    });
    assert_eq!(rings.pages(Class::Probation), 100);
    assert_eq!(rings.reclaim(1000), 100);
}

fn write_back(rings: &Rings) {
    let mut runs = Vec::new();
    let everything = PageIndex(0)..PageIndex(1 << 20);
    rings.mapping.lock().begin_writeback(everything, TakeFilter::Dirty, u32::MAX, &mut runs);
    for run in runs {
        rings.mapping.lock().end_writeback(run, WritebackOutcome::Written, Millis(1));
    }
}

fn dirty(rings: &Rings, index: u64) {
    let held = rings.mapping.try_hold(PageIndex(index)).unwrap();
    let page = PageIndex(index)..PageIndex(index + 1);
    let marked = rings.mapping.lock().mark_dirty(&held, page, Millis(1));
    assert_ne!(marked, MarkOutcome::Left);
}

#[test]
fn dirty_folios_stay_in_their_ring_and_reclaim_ends() {
    let rings = Rings::new();
    (0..300).for_each(|index| _ = rings.add(index, 0, FetchOrigin::Asked));
    (0..300).filter(|index| index % 3 != 0).for_each(|index| dirty(&rings, index));
    assert_eq!(rings.reclaim(1000), 100, "the clean ones, wherever they stand");
    assert_eq!(rings.pages(Class::Probation), 200);
    assert_eq!(rings.reclaim(10), 0, "all that is left is dirty");
    assert_eq!(rings.reclaim.evict_extent(rings.frame(1).extent(), Protection::Ignored), 0);
    // What is being written stays, too, and what was written and is held is another matter.
    let mut runs = Vec::new();
    let one = PageIndex(1)..PageIndex(2);
    rings.mapping.lock().begin_writeback(one, TakeFilter::Dirty, 1, &mut runs);
    assert_eq!(rings.reclaim(10), 0);
    rings.mapping.lock().end_writeback(runs[0], WritebackOutcome::Written, Millis(1));
    assert_eq!(rings.reclaim(10), 1);
    write_back(&rings);
    let held: Vec<_> = (0..300).filter_map(|index| rings.mapping.try_hold(PageIndex(index)).ok()).collect();
    assert_eq!((held.len(), rings.reclaim(10)), (199, 0), "held, not dirty");
    drop(held);
    assert_eq!(rings.reclaim(1000), 199);
    rings.check();
}

/// Pages become dirty between a scan and an eviction: those victims join their rings again.
#[test]
fn writers_and_reclaim_leave_every_folio_in_one_ring_and_no_dirty_one_is_lost() {
    let rings = Rings::new();
    (0..200).for_each(|index| _ = rings.add(index, 0, FetchOrigin::Asked));
    let rounds = 60;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                rings.reclaim(20);
            }
        });
        for round in 0..rounds {
            let mut marked = Vec::new();
            for index in (0..200).filter(|index| (index + round) % 5 == 0) {
                let Ok(held) = rings.mapping.try_hold(PageIndex(index)) else { continue };
                let page = PageIndex(index)..PageIndex(index + 1);
                let done = rings.mapping.lock().mark_dirty(&held, page, Millis(1));
                marked.extend((done != MarkOutcome::Left).then_some(index));
            }
            for &index in &marked {
                assert!(rings.mapping.try_hold(PageIndex(index)).is_ok(), "page {index} is dirty and gone");
            }
            write_back(&rings);
        }
    });
    rings.check();
    assert_eq!(rings.reclaim.weights().total(), rings.mapping.lock().pages());
    while rings.reclaim(1000) > 0 {}
    assert_eq!(rings.mapping.lock().pages(), 0);
    rings.check();
}

#[test]
fn threads_that_list_reclaim_and_empty_leave_every_folio_in_one_ring() {
    let rings = Rings::new();
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let rings = &rings;
            scope.spawn(move || {
                for round in 0..40 {
                    for index in 0..60 {
                        // A reservation first, as a fill has: what is inserted and not listed yet is accounted for.
                        let reservation = rings.reclaim.lists().reserve(1, LockWait::Wait).unwrap();
                        let frame = rings.insert((thread * 1000 + round) * 64 + index, 0);
                        rings.reclaim.list([(frame, FetchOrigin::Asked)], reservation);
                    }
                    match (thread + round) % 4 {
                        0 => drop(rings.reclaim(50)),
                        1 => drop(rings.mapping.lock().remove_all()),
                        2 => {
                            rings.reclaim.reclaim_extent(Protection::Kept);
                        }
                        _ => rings.mapping.check().unwrap(),
                    }
                }
            });
        }
    });
    rings.check();
    let pages = rings.mapping.lock().pages();
    assert_eq!(rings.reclaim.weights().total(), pages);
    while rings.reclaim(1000) > 0 {}
    assert_eq!((rings.reclaim.weights().total(), rings.mapping.lock().pages()), (0, 0));
    assert_eq!(rings.reclaim.lists().lock().reserved(), 0, "all reservations were used or given back");
    rings.reclaim.lists().give_back();
    rings.check();
}

/// D12: a folio of an uncached read leaves no shadow when a cache that shrinks evicts it; a folio of a plain read does.
#[test]
fn d12_a_folio_of_an_uncached_read_leaves_no_shadow_when_the_cache_shrinks_either() {
    let rings = Rings::new();
    let [made, kept] = [rings.add(0, 2, FetchOrigin::Uncached), rings.add(4, 2, FetchOrigin::Asked)];
    assert_eq!(made.extent(), kept.extent());
    assert_eq!(rings.reclaim.evict_extent(made.extent(), Protection::Ignored), 8);
    assert_eq!(rings.counters.sum(Count::Shadows), 4);
    let remembered = rings.mapping.lock().next_entry(PageIndex(0), PageIndex(8));
    assert_eq!(remembered, Some(PageIndex(4)), "the other one is remembered");
    rings.check();
}

#[test]
fn a_folio_of_an_uncached_read_that_another_has_read_is_new_like_others() {
    let rings = Rings::new();
    let adopted = rings.add(0, 2, FetchOrigin::Uncached);
    rings.add(4, 2, FetchOrigin::Uncached);
    quinion::internals::arena::referenced::touch(rings.arena.view().referenced(adopted).unwrap());
    assert_eq!(rings.reclaim(1), 4);
    assert_eq!(Class::ALL.map(|class| rings.pages(class)), [0, 0, 4, 0]);
    assert_eq!(rings.counters.sum(Count::Adopted), 4);
    assert_eq!(rings.counters.sum(Count::Shadows), 0);
}
