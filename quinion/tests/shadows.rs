//! Shadows: what an eviction leaves, and its effect when the page returns.
//!
//! ```text
//!   H   a few pages that are wanted again     S   a scan of more than the memory
//!
//!   read H ... S ... until H is evicted ... read H: activated ... S ... until what was new then is evicted: H is there
//! ```
//!
//! Tests named with a letter and a number hold the statement of that name: W of the working set, B of batched
//! insertion. W01, W02 and W06 are beside the policies. W03 speaks of groups of memory, of which there are none here;
//! the nearest is a mapping that the cache has dropped.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use quinion::backend::{Backend, FillRun, MemoryFile};
use quinion::internals::arena::{Arena, ArenaOptions, FrameRun};
use quinion::internals::mapping::{FolioShape, Mapping, NewMapping, RemoveFilter, Replacement, find};
use quinion::internals::policy::FetchOrigin;
use quinion::internals::reclaim::{NODE_BYTES, Reclaim};
use quinion::internals::stats::{Count, Counters};
use quinion::internals::sync::LockWait;
use quinion::internals::units::{Frame, MappingId, Order, Orders, PageIndex};
use quinion::internals::xarray::{Kind, Value};
use quinion::{Cache, File, OpenOptions, PageState, ReadOptions, Stats};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;
const NODE: u64 = 64;
/// Folios that an eviction takes out at a time.
const BATCH: u64 = 64;

// ---- a mapping by itself ------------------------------------------------------------------------------

fn arena() -> Arc<Arena> {
    Arc::new(Arena::build(ArenaOptions { memory: Cache::MEMORY_MIN }).unwrap())
}

fn mapping(arena: &Arc<Arena>, id: u32) -> Mapping {
    let (device, process) =
        (Device::with_number(u64::from(id), PAGE), quinion::internals::sys::fork::ForkGuard::new());
    let known = device.attributes().unwrap();
    let id = MappingId(id);
    Mapping::new(NewMapping { arena, id, backend: device, attributes: &known, process }).unwrap()
}

/// Adds folios of at most `order` over `pages` pages from `index` on, filled; returns what they consumed.
fn add(mapping: &Mapping, index: u64, pages: u32, order: u8) -> Vec<(Frame, Value)> {
    let (mut consumed, mut done) = (Vec::new(), 0);
    while done < pages {
        let run = mapping.arena().alloc_run(pages - done, LockWait::Wait).unwrap();
        add_run(mapping, PageIndex(index + u64::from(done)), run, Order(order), &mut consumed);
        done += run.pages;
    }
    consumed
}

fn add_run(
    mapping: &Mapping,
    index: PageIndex,
    run: FrameRun,
    order: Order,
    consumed: &mut Vec<(Frame, Value)>,
) {
    let mut told = |frame, shadow| consumed.push((frame, shadow));
    let fill = FillRun { index, frame: run.frame, pages: run.pages };
    let shape = FolioShape::of(Orders { min: Order::ZERO, max: order });
    let added = mapping.add_folio_range(fill, shape, LockWait::Wait, &mut told).unwrap();
    assert_eq!(added.pages, run.pages);
    let mut page = 0;
    while page < run.pages {
        let descriptor = mapping.arena().view().own(run.frame.plus(page));
        page += descriptor.word().order().pages();
        descriptor.complete();
    }
}

fn evict(mapping: &Mapping, index: u64, leave: Replacement) -> Order {
    let frame = mapping.try_hold(PageIndex(index)).unwrap().frame();
    let order = mapping.lock().evict(PageIndex(index), frame, |_| leave).unwrap();
    mapping.arena().free(frame, order);
    mapping.check().unwrap();
    order
}

/// B05: each folio of a run reports one shadow, the one at the highest index that it replaces, and consumes all of
/// them.
#[test]
fn b05_a_refault_is_reported_once_per_folio_through_the_mapping() {
    let arena = arena();
    let mapping = mapping(&arena, 1);
    assert_eq!(add(&mapping, 0, 16, 0), []);
    // Shadows on some pages of each folio to come: of several the one at the highest index is told.
    for page in [0, 1, 2, 5, 12, 15] {
        evict(&mapping, page, Replacement::Shadow(100 + page as u32));
    }
    for page in [3, 4, 6, 7, 8, 9, 10, 11, 13, 14] {
        evict(&mapping, page, Replacement::Nothing);
    }
    let consumed = add(&mapping, 0, 16, 2);
    let payloads: Vec<u32> = consumed.iter().map(|(_, shadow)| shadow.payload()).collect();
    assert_eq!(payloads, [102, 105, 115]);
    for (frame, _) in consumed {
        assert_eq!(arena.view().own(frame).word().order(), Order(2), "a folio's own first frame is told");
    }
    mapping.check().unwrap();
    assert_eq!(evict(&mapping, 4, Replacement::Nothing), Order(2));
    assert_eq!(add(&mapping, 4, 4, 0), [], "they are consumed");
}

#[test]
fn a_large_folio_leaves_one_large_shadow_and_takes_no_node_for_it() {
    let arena = arena();
    let mapping = mapping(&arena, 1);
    add(&mapping, 0, 64, 6);
    let before = arena.stats().cells_used;
    assert_eq!(evict(&mapping, 0, Replacement::Shadow(7)), Order(6));
    assert!(arena.stats().cells_used <= before);
    assert_eq!(add(&mapping, 40, 1, 0).iter().map(|(_, shadow)| shadow.payload()).collect::<Vec<_>>(), [7]);
    for (index, pages) in [(0, 32), (32, 8), (41, 1), (42, 2), (44, 4), (48, 16)] {
        assert_eq!(add(&mapping, index, pages, 6).len(), 1, "what is left of it at {index} says the same");
    }
    mapping.check().unwrap();
}

#[test]
fn a_mapping_of_one_evicted_page_remembers_it_without_a_node() {
    let arena = arena();
    let mapping = mapping(&arena, 1);
    add(&mapping, 0, 1, 0);
    evict(&mapping, 0, Replacement::Shadow(3));
    assert_eq!(arena.stats().cells_used, 1, "its record's");
    assert_eq!(add(&mapping, 0, 1, 0).len(), 1);
}

/// W03: a shadow of what no longer exists counts for nothing: a mapping that the cache let go has none and leaves none.
#[test]
fn w03_a_mapping_that_was_let_go_has_no_shadows_and_leaves_none() {
    let arena = arena();
    let reclaim = Reclaim::new(Arc::clone(&arena), Arc::new(Counters::default()));
    let nodes = Arc::clone(reclaim.shadow_nodes());
    let kept = Arc::new(mapping(&arena, 1).with_shadow_nodes(&nodes));
    reclaim.add_mapping(Arc::clone(&kept));
    (0..3).for_each(|i| drop(add(&kept, i * NODE, 1, 0)));
    evict(&kept, 0, Replacement::Shadow(1));
    evict(&kept, NODE, Replacement::Shadow(1));
    assert_eq!(nodes.count(), 2);
    reclaim.remove_mapping(MappingId(1)); // while a handle still has it
    assert_eq!(nodes.count(), 0);
    evict(&kept, 2 * NODE, Replacement::Shadow(1));
    assert_eq!(nodes.count(), 0, "nobody could forget it");
    assert_eq!(add(&kept, 0, 1, 0), []);
    drop(kept);
    assert_eq!(arena.stats().cells_used, 0);
}

#[test]
fn the_oldest_nodes_of_several_mappings_are_forgotten_first_and_locked_ones_are_passed_over() {
    let arena = arena();
    let reclaim = Reclaim::new(Arc::clone(&arena), Arc::new(Counters::default()));
    let nodes = Arc::clone(reclaim.shadow_nodes());
    let two: Vec<Arc<Mapping>> =
        [1, 2].map(|id| Arc::new(mapping(&arena, id).with_shadow_nodes(&nodes))).into_iter().collect();
    two.iter().for_each(|mapping| reclaim.add_mapping(Arc::clone(mapping)));
    for i in 0..8 {
        for mapping in &two {
            add(mapping, i * NODE, 1, 0);
        }
    }
    // 1:0 2:0 2:1 1:1 1:2 2:2 ...
    let order = [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2), (1, 3), (0, 3)];
    for (which, i) in order {
        evict(&two[which], i * NODE, Replacement::Shadow(i as u32));
    }
    let left = |which: usize| (0..4).filter(|i| is_remembered(&two[which], i * NODE)).collect::<Vec<u64>>();
    assert_eq!(reclaim.forget_nodes(3, LockWait::Wait), 3);
    assert_eq!((left(0), left(1)), (vec![1, 2, 3], vec![2, 3]));
    let guard = two[0].lock();
    thread::scope(|scope| {
        // Another thread reclaims: it passes over a lock that is held, one node at a time.
        scope.spawn(|| assert_eq!(reclaim.forget_nodes(1, LockWait::Try), 1));
    });
    drop(guard);
    assert_eq!((left(0), left(1)), (vec![1, 2, 3], vec![3]));
    assert_eq!(reclaim.forget_nodes(100, LockWait::Try), 4);
    assert_eq!((left(0), left(1)), (vec![], vec![]));
    assert_eq!(nodes.count(), 0);
    two.iter().for_each(|mapping| mapping.check().unwrap());
}

#[test]
fn an_eviction_that_may_not_wait_to_prune_leaves_no_shadow() {
    let (arena, counters) = (arena(), Arc::new(Counters::default()));
    let reclaim = Reclaim::new(Arc::clone(&arena), Arc::clone(&counters));
    let nodes = Arc::clone(reclaim.shadow_nodes());
    let listed = |id| mapping(&arena, id).with_shadow_nodes(&nodes).with_lists(reclaim.lists());
    let [old, new] = [1, 2].map(|id| Arc::new(listed(id)));
    [&old, &new].into_iter().for_each(|mapping| reclaim.add_mapping(Arc::clone(mapping)));
    for i in 0..reclaim.shadow_nodes_max() {
        add(&old, i * NODE, 1, 0);
        let frame = old.try_hold(PageIndex(i * NODE)).unwrap().frame();
        let order = old.lock().evict(PageIndex(i * NODE), frame, |_| Replacement::Shadow(1)).unwrap();
        arena.free(frame, order);
    }
    (0..100).for_each(|i| drop(add(&new, i * NODE, 1, 0)));
    let reservation = reclaim.lists().reserve(100, LockWait::Wait).unwrap();
    let frames = (0..100).map(|i| new.try_hold(PageIndex(i * NODE)).unwrap().frame());
    reclaim.list(frames.map(|frame| (frame, FetchOrigin::Asked)), reservation);
    let guard = old.lock();
    thread::scope(|scope| {
        scope.spawn(|| assert!(reclaim.reclaim(50, LockWait::Try) >= 50));
    });
    drop(guard);
    assert_eq!((counters.sum(Count::Shadows), nodes.count()), (0, reclaim.shadow_nodes_max()));
    let freed = reclaim.reclaim(1, LockWait::Try);
    assert!(freed > 0);
    assert_eq!(counters.sum(Count::Shadows), u64::from(freed));
    assert!(
        nodes.count() <= reclaim.shadow_nodes_max()
            && is_remembered(&old, (reclaim.shadow_nodes_max() - 1) * NODE)
    );
    [old, new].iter().for_each(|mapping| mapping.check().unwrap());
}

fn is_remembered(mapping: &Mapping, index: u64) -> bool {
    let record = mapping.arena().view().record(mapping.index().cell()).unwrap();
    let entry = find(&mapping.arena().view().grown(), record, PageIndex(index));
    matches!(entry.kind(), Kind::Value(_))
}

// ---- two mappings against a twin ----------------------------------------------------------------------

/// What a page is to the twin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    Folio,
    Shadow(u32),
}

#[derive(Clone, Debug)]
enum Op {
    /// Folios of at most this order over so many pages, if none is there.
    Add(usize, u64, u32, u8),
    /// The folio that covers the page goes and leaves a shadow, or nothing.
    Evict(usize, u64, Option<u32>),
    /// The oldest nodes that only remember.
    Forget(u64),
    Invalidate(usize),
    /// Pages that are cut off or punched: the mapping, the first page, and how many.
    Remove(usize, u64, u64),
}

fn pages() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..200u64, 1 => (0..40u64).prop_map(|page| NODE.pow(3) + 5 * page)]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let which = 0..2usize;
    let op = prop_oneof![
        4 => (which.clone(), pages(), 1..70u32, 0..7u8).prop_map(|(w, at, n, order)| Op::Add(w, at, n, order)),
        6 => (which.clone(), pages(), prop::option::weighted(0.8, 0..1000u32))
            .prop_map(|(w, at, left)| Op::Evict(w, at, left)),
        1 => (1..4u64).prop_map(Op::Forget),
        1 => which.clone().prop_map(Op::Invalidate),
        2 => (which, pages(), 1..100u64).prop_map(|(w, at, pages)| Op::Remove(w, at, pages)),
    ];
    prop::collection::vec(op, 1..60)
}

/// Each page by itself; of folios only what it needs to know which shadow a folio took.
type Twin = BTreeMap<u64, Page>;

fn pages_of(mapping: &Mapping) -> Twin {
    let view = mapping.arena().view();
    let record = view.record(mapping.index().cell()).unwrap();
    let page = |index: u64| match find(&view.grown(), record, PageIndex(index)).kind() {
        Kind::Folio(_) => Some((index, Page::Folio)),
        Kind::Value(shadow) => Some((index, Page::Shadow(shadow.payload()))),
        _ => None,
    };
    (0..300).chain(NODE.pow(3)..NODE.pow(3) + 300).filter_map(page).collect()
}

/// Checks that inserting folios over `range` consumed the twin's shadows there: of each folio the last one.
fn check_consumed(mapping: &Mapping, twin: &Twin, range: Range<u64>, consumed: &[(Frame, Value)]) {
    let mut told = consumed.iter();
    let mut at = range.start;
    while at < range.end {
        let held = mapping.try_hold(PageIndex(at)).unwrap();
        let end = at + u64::from(held.order().pages());
        if let Some((_, Page::Shadow(payload))) = twin.range(at..end).next_back() {
            let (frame, shadow) = told.next().expect("a shadow is told of");
            assert_eq!((*frame, shadow.payload()), (held.frame(), *payload));
        }
        at = end;
    }
    assert_eq!(told.next(), None);
}

fn step(op: Op, two: &[Arc<Mapping>], twins: &mut [Twin], reclaim: &Reclaim) {
    match op {
        Op::Add(w, at, pages, order) => {
            let range = at..at + u64::from(pages);
            if twins[w].range(range.clone()).all(|(_, page)| *page != Page::Folio) {
                let consumed = add(&two[w], at, pages, order);
                check_consumed(&two[w], &twins[w], range.clone(), &consumed);
                twins[w].extend(range.map(|index| (index, Page::Folio)));
            }
        }
        Op::Evict(w, at, left) => {
            if twins[w].get(&at) == Some(&Page::Folio) {
                let first = two[w].try_hold(PageIndex(at)).unwrap().first().0;
                let leave = left.map_or(Replacement::Nothing, Replacement::Shadow);
                let order = evict(&two[w], first, leave);
                for index in first..first + u64::from(order.pages()) {
                    match left {
                        Some(payload) => twins[w].insert(index, Page::Shadow(payload)),
                        None => twins[w].remove(&index),
                    };
                }
            }
        }
        Op::Forget(nodes) => {
            let before = reclaim.shadow_nodes().count();
            assert_eq!(reclaim.forget_nodes(nodes, LockWait::Wait), nodes.min(before));
            for (mapping, twin) in two.iter().zip(twins) {
                let left = pages_of(mapping);
                assert!(left.iter().all(|(index, page)| twin.get(index) == Some(page)));
                twin.retain(|index, page| *page == Page::Folio || left.contains_key(index));
            }
        }
        Op::Invalidate(w) => {
            let folios = twins[w].values().filter(|page| **page == Page::Folio).count();
            assert_eq!(two[w].invalidate().unwrap(), folios as u64);
            twins[w].clear();
        }
        Op::Remove(w, at, pages) => remove(&two[w], &mut twins[w], at..at + pages),
    }
}

/// Removes folios that lie in `range`, and all shadows there; a shadow that reaches over an edge goes as a whole.
fn remove(mapping: &Mapping, twin: &mut Twin, range: Range<u64>) {
    let lies_inside = |index: u64| {
        let held = mapping.try_hold(PageIndex(index)).unwrap();
        range.start <= held.first().0 && held.first().0 + u64::from(held.order().pages()) <= range.end
    };
    let goes = |(index, page): (&u64, &Page)| match page {
        Page::Folio => range.contains(index) && lies_inside(*index),
        Page::Shadow(_) => range.contains(index),
    };
    let gone: Vec<u64> = twin.iter().filter(|entry| goes(*entry)).map(|(index, _)| *index).collect();
    let pages = PageIndex(range.start)..PageIndex(range.end);
    mapping.remove_range(pages, RemoveFilter::All);
    let left = pages_of(mapping);
    assert!(gone.iter().all(|index| !left.contains_key(index)), "{range:?} is remembered");
    twin.retain(|index, page| *page == Page::Folio && !gone.contains(index) || left.contains_key(index));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn two_mappings_and_their_list_agree_with_a_map_of_pages(ops in ops()) {
        let arena = arena();
        let reclaim = Reclaim::new(Arc::clone(&arena), Arc::new(Counters::default()));
        let known = |id| Arc::new(mapping(&arena, id).with_shadow_nodes(reclaim.shadow_nodes()));
        let two = [known(1), known(2)];
        two.iter().for_each(|mapping| reclaim.add_mapping(Arc::clone(mapping)));
        let mut twins = [Twin::new(), Twin::new()];
        for op in ops {
            step(op, &two, &mut twins, &reclaim);
            for (mapping, twin) in two.iter().zip(&twins) {
                mapping.check().unwrap();
                prop_assert_eq!(&pages_of(mapping), twin);
            }
        }
        reclaim.forget_nodes(u64::MAX, LockWait::Wait);
        prop_assert_eq!(reclaim.shadow_nodes().count(), 0);
    }
}

// ---- a whole cache ------------------------------------------------------------------------------------

fn cache() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().unwrap()
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).unwrap()
}

fn read(file: &File, device: &Device, page: u64, pages: u64) {
    let mut buffer = vec![0; (pages * PAGE) as usize];
    assert_eq!(file.read_at(&mut buffer, page * PAGE).unwrap(), buffer.len());
    verify(&buffer, device, page * PAGE);
}

struct Scan {
    device: Arc<Device>,
    file: File,
    next: u64,
}

impl Scan {
    fn of(cache: &Cache) -> Self {
        let device = Device::with_number(99, 1 << 40);
        let file = open(cache, &device);
        Self { device, file, next: 0 }
    }
    fn step(&mut self, pages: u64) {
        read(&self.file, &self.device, self.next, pages);
        self.next += pages;
    }
    /// Reads pages three times each, until the ring Main is full of them and has gone round once: from then on a page
    /// that comes back after a long time counts as a new one.
    fn fill_main(&mut self) {
        for _ in 0..4 * Cache::MEMORY_MIN / PAGE / 16 {
            (0..3).for_each(|_| read(&self.file, &self.device, self.next, 16));
            self.next += 16;
        }
    }
    /// Reads each page once until nothing of `file`, which is not read again, is cached.
    fn until_evicted(&mut self, file: &File) {
        self.until_evicted_reading(file, 1);
    }
    /// As `until_evicted`, for a file whose pages are in the ring Main, since they were read again: pages that are read
    /// once do not evict them, pages that are read three times do.
    fn until_driven_out(&mut self, file: &File) {
        self.until_evicted_reading(file, 3);
    }
    fn until_evicted_reading(&mut self, file: &File, times: u32) {
        let before = self.next;
        while file.cached_pages() > 0 {
            (0..times).for_each(|_| read(&self.file, &self.device, self.next, 16));
            self.next += 16;
            assert!(self.next - before < 20_000, "{} pages stay", file.cached_pages());
        }
    }
}

/// W04: a hot set that a scan evicted is activated when it refaults, and outlives pages that are new beside it.
#[test]
fn w04_a_hot_set_that_refaults_outlives_new_pages_beside_it() {
    let cache = cache();
    let (hot, new) = (Device::with_number(1, 64 * PAGE), Device::with_number(2, 64 * PAGE));
    let (hot_file, new_file) = (open(&cache, &hot), open(&cache, &new));
    let mut scan = Scan::of(&cache);
    read(&hot_file, &hot, 0, 64);
    scan.until_evicted(&hot_file);
    read(&hot_file, &hot, 0, 64);
    read(&new_file, &new, 0, 64);
    let stats = cache.stats();
    assert_eq!((stats.refaulted_pages, stats.activated_pages), (64, 64), "{stats:?}");
    scan.until_evicted(&new_file);
    assert_eq!(hot_file.cached_pages(), 64);
    // It does not stay for ever if it is not read, and other pages are.
    scan.until_driven_out(&hot_file);
    cache.check().unwrap();
}

/// The policy's tests say after which distance a page that comes back counts as a new one.
#[test]
fn a_page_that_comes_back_late_is_kept_where_nothing_has_proved_itself() {
    let cache = cache();
    let hot = Device::with_number(1, 64 * PAGE);
    let hot_file = open(&cache, &hot);
    let mut scan = Scan::of(&cache);
    read(&hot_file, &hot, 0, 64);
    scan.until_evicted(&hot_file);
    (0..2 * Cache::MEMORY_MIN / PAGE / 64).for_each(|_| scan.step(64));
    read(&hot_file, &hot, 0, 64);
    let stats = cache.stats();
    assert_eq!((stats.refaulted_pages, stats.activated_pages), (64, 64), "{stats:?}");
    assert_eq!(stats.shadowed_pages, stats.evicted_pages, "nothing here leaves without");
}

/// B20: a window remembers that a folio of it was of the working set, and a wait for such a window counts as a stall
/// for memory.
#[test]
fn b20_a_window_remembers_that_a_folio_of_it_was_of_the_working_set() {
    let cache = cache();
    let hot = Device::with_number(1, 64 * PAGE);
    let hot_file = open(&cache, &hot);
    let mut scan = Scan::of(&cache);
    scan.fill_main();
    let mut windows = Vec::new();
    for _ in 0..3 {
        read(&hot_file, &hot, 7, 3);
        windows.push(cache.stats().workingset_windows);
        scan.until_driven_out(&hot_file);
    }
    assert_eq!(windows, [0, 0, 1], "once it was new, once it came back, once it had come back before");
    // Now it is new again. Among pages that are new it is one window; of a stranger's pages, none.
    read(&hot_file, &hot, 7, 3);
    scan.until_driven_out(&hot_file);
    assert_eq!(cache.stats().workingset_windows, 1);
    read(&hot_file, &hot, 0, 64);
    assert_eq!(cache.stats().workingset_windows, 2);
    // A reader that waits for such a window waits for memory. (The device may answer before the wait begins; not each
    // time.)
    let mut windows = 2;
    while cache.stats().memory_stall_us == 0 {
        assert!(windows < 100, "the wait for such a window is not counted");
        scan.until_driven_out(&hot_file);
        read(&hot_file, &hot, 7, 1); // as a new one that came back
        scan.until_driven_out(&hot_file);
        hot.hold();
        let reads = hot.reads().len();
        thread::scope(|scope| {
            scope.spawn(|| read(&hot_file, &hot, 7, 1));
            hot.wait_for_fills(reads + 1);
            thread::sleep(Duration::from_millis(1));
            hot.release();
        });
        windows += 1;
        assert_eq!(cache.stats().workingset_windows, windows);
    }
    read(&scan.file, &scan.device, 0, 1);
    assert_eq!(cache.stats().workingset_windows, windows);
}

/// Reads one page of each of `nodes` leaves, `apart` pages from one to the next.
fn read_sparsely(file: &File, device: &Device, apart: u64, nodes: std::ops::Range<u64>) {
    nodes.for_each(|node| read(file, device, node * apart, 1));
}

fn shadow_bytes_max(stats: &Stats) -> u64 {
    stats.memory_bytes * 18 / 1000
}

/// W05: the memory of shadows is bounded, and the nodes that have had nothing but shadows for longest are freed first.
#[test]
fn w05_shadow_memory_is_bounded_and_the_oldest_is_forgotten() {
    let cache = cache();
    let device = Device::with_number(1, 1 << 50);
    let file = open(&cache, &device);
    let mut most = 0;
    for step in 0..80 {
        read_sparsely(&file, &device, NODE, step * 100..(step + 1) * 100);
        let stats = cache.stats();
        assert!(stats.shadow_bytes <= shadow_bytes_max(&stats), "{stats:?}");
        most = most.max(stats.shadow_bytes);
    }
    let stats = cache.stats();
    assert!(
        most + 65 * NODE_BYTES > shadow_bytes_max(&stats),
        "{most} bytes at most: the bound was never met"
    );
    assert_eq!(stats.shadowed_pages, stats.evicted_pages);
    cache.check().unwrap();
    // What left first is forgotten, what left last is remembered.
    let returns = |node: u64| {
        let before = cache.stats().refaulted_pages;
        read(&file, &device, node * NODE, 1);
        cache.stats().refaulted_pages - before
    };
    assert_eq!(returns(0), 0);
    assert_eq!(returns(100), 0);
    let last = (0..8000).rev().find(|node| cached(&file, node * NODE) == 0).unwrap();
    assert_eq!(returns(last), 1);
}

fn cached(file: &File, page: u64) -> usize {
    let only = ReadOptions::new().cached_only(true);
    file.read_at_with(&mut [0; PAGE as usize], page * PAGE, only).unwrap_or(0)
}

/// W05: when nodes run short, those with nothing but shadows are freed before data is evicted for more of them.
#[test]
fn w05_nodes_that_only_remember_go_before_data_does() {
    let cache = cache();
    let (dense, sparse) = (Device::with_number(1, 1 << 40), Device::with_number(2, 1 << 55));
    let (dense_file, sparse_file) = (open(&cache, &dense), open(&cache, &sparse));
    // Each page of the one needs four nodes of its own: three thousand pages need more nodes than the one
    // extent has that is theirs, if what is remembered of others keeps its nodes.
    for i in 0..6000 {
        read(&dense_file, &dense, i, 1);
        read(&sparse_file, &sparse, i * NODE.pow(4), 1);
    }
    let stats = cache.stats();
    assert_eq!(stats.index_bytes, 2 << 20, "an extent of data was given away for history: {stats:?}");
    assert!(stats.shadow_bytes < shadow_bytes_max(&stats) / 2, "nodes were never short: {stats:?}");
    cache.check().unwrap();
}

/// W07: when all pages of a mapping are removed its shadows are removed too, and no page leaves one.
#[test]
fn w07_emptying_a_mapping_takes_the_shadows_and_leaves_none() {
    let cache = cache();
    let device = Device::with_number(1, 1 << 30);
    let file = open(&cache, &device);
    let mut scan = Scan::of(&cache);
    read_sparsely(&file, &device, NODE, 0..200);
    scan.until_evicted(&file);
    read(&file, &device, 5, 3);
    let pinned = file.pin(5 * PAGE, 100).unwrap();
    assert!(cache.stats().shadow_bytes >= 190 * NODE_BYTES);
    device.generation.fetch_add(1, Ordering::Relaxed);
    assert!(file.revalidate().unwrap());
    let before = cache.stats();
    read_sparsely(&file, &device, NODE, 0..200);
    read(&file, &device, 5, 3); // what was pinned is detached: no shadow of it either
    assert_eq!(cache.stats().refaulted_pages, before.refaulted_pages);
    drop(pinned);
    cache.check().unwrap();
}

/// A file of 64 pages that is written to, of which shadows of folios of `order` are left.
fn remembered_file(order: u8) -> (Cache, File) {
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0);
    let cache = builder.folio_order_max(order).folio_order_min(order).build().unwrap();
    let memory = Arc::new(MemoryFile::new(vec![1; 64 * PAGE as usize]));
    let file = cache.open_backend_with(memory, OpenOptions::new().write(true)).unwrap();
    file.read_exact_at(&mut vec![0; 64 * PAGE as usize], 0).unwrap();
    Scan::of(&cache).until_evicted(&file);
    (cache, file)
}

fn remembered(file: &File) -> Vec<u64> {
    let known = file.residents(0, 64 * PAGE).unwrap().filter(|range| range.state == PageState::Remembered);
    known.flat_map(|range| range.bytes.step_by(PAGE as usize).map(|at| at / PAGE)).collect()
}

/// W07: a cut removes the shadows behind the new end of the file, and a hole those in it; the others stay, and a file
/// that is extended again remembers nothing of what was cut off.
#[test]
fn w07_a_cut_and_a_hole_take_their_shadows_and_leave_the_others() {
    for order in [0, 3] {
        let (cache, file) = remembered_file(order);
        assert_eq!(remembered(&file), (0..64).collect::<Vec<_>>(), "order {order}");
        file.set_len(40 * PAGE).unwrap();
        assert_eq!(remembered(&file), (0..40).collect::<Vec<_>>(), "order {order}");
        file.punch_hole(8 * PAGE, 16 * PAGE).unwrap();
        let left: Vec<u64> = (0..8).chain(24..40).collect();
        assert_eq!(remembered(&file), left, "order {order}");
        file.set_len(64 * PAGE).unwrap();
        assert_eq!(remembered(&file), left, "order {order}");
        let returns = |page: u64| {
            let before = cache.stats().refaulted_pages;
            file.read_exact_at(&mut [0], page * PAGE).unwrap();
            cache.stats().refaulted_pages - before
        };
        assert_eq!([50, 10, 30].map(returns), [0, 0, 1 << order]);
        cache.check().unwrap();
    }
}

/// A15: a page that a write brings back consumes its shadow, and neither counts as refaulted nor is activated; one that
/// a read brings back does both.
#[test]
fn a15_a_page_that_a_write_brings_back_is_not_activated() {
    let (cache, file) = remembered_file(0);
    let before = cache.stats();
    file.write_all_at(&vec![2; 32 * PAGE as usize], 0).unwrap();
    assert_eq!(remembered(&file), (32..64).collect::<Vec<_>>());
    let written = cache.stats();
    let counts = |stats: &Stats| (stats.refaulted_pages, stats.activated_pages);
    assert_eq!(counts(&written), counts(&before));
    file.read_exact_at(&mut vec![0; 32 * PAGE as usize], 32 * PAGE).unwrap();
    let read = cache.stats();
    assert_eq!(counts(&read), (before.refaulted_pages + 32, before.activated_pages + 32));
    cache.check().unwrap();
}

#[test]
fn a_file_of_which_only_shadows_are_left_goes_with_its_last_handle() {
    let cache = cache();
    let device = Device::with_number(1, 1 << 30);
    let file = open(&cache, &device);
    let mut scan = Scan::of(&cache);
    read_sparsely(&file, &device, NODE, 0..100);
    scan.until_evicted(&file);
    let before = cache.stats();
    drop(file);
    let after = cache.stats();
    assert_eq!(after.files, before.files - 1);
    assert!(after.shadow_bytes + 99 * NODE_BYTES <= before.shadow_bytes, "{before:?} {after:?}");
    cache.check().unwrap();
}

#[test]
fn threads_that_read_forget_change_and_close_leave_the_list_whole() {
    let cache =
        Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(2).folio_order_max(3).build().unwrap();
    let devices: Vec<_> = (1..=6).map(|number| Device::with_number(number, 1 << 34)).collect();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (1..=6u64)
            .map(|seed| {
                let (cache, devices) = (&cache, &devices);
                scope.spawn(move || wander(cache, devices, seed))
            })
            .collect();
        scope.spawn(|| {
            let file = open(&cache, &devices[0]);
            while !stop.load(Ordering::Relaxed) {
                file.revalidate().unwrap();
                let stats = cache.stats();
                // The evicting thread frees memory before and after, and is a batch ahead in between.
                let slack = 8 * BATCH * NODE_BYTES;
                assert!(stats.shadow_bytes <= shadow_bytes_max(&stats) + slack, "{stats:?}");
                cache.check().unwrap();
            }
        });
        let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.expect("a reader found nothing wrong"));
    });
    let stats = cache.stats();
    assert!(stats.refaulted_pages > 0 && stats.shadow_bytes > 0, "{stats:?}");
    assert!(stats.shadow_bytes <= shadow_bytes_max(&stats) + BATCH * NODE_BYTES, "{stats:?}");
    cache.check().unwrap();
}

fn wander(cache: &Cache, devices: &[Arc<Device>], seed: u64) {
    let mut state = seed;
    let mut dice = move |sides: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % sides
    };
    for _ in 0..100 {
        let device = &devices[dice(devices.len() as u64) as usize];
        let file = open(cache, device);
        for _ in 0..40 {
            let page = if dice(2) == 0 { dice(2000) } else { dice(20_000) * 64 };
            let nowait = ReadOptions::new().nowait(dice(4) == 0);
            let mut buffer = vec![0; 1 + dice(40_000) as usize];
            if let Ok(bytes) = file.read_at_with(&mut buffer, page * PAGE, nowait) {
                verify(&buffer[..bytes], device, page * PAGE);
            }
        }
    }
}
