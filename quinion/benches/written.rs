//! What does a reader pay when a folio is written in place?
//!
//! Two questions. A hot read of a folio that was written once, against one that never was: CPU time of the same
//! hits, in turn, ratio of medians. And reads of random pages of a folio of 2 MiB while another thread writes
//! random pages of it at several rates: how many reads had to try again, and how many went for the page's lock.
//!
//! Run: `cargo bench --bench written`. Answers recorded: BENCHMARKS.md.

#![allow(unsafe_code, reason = "pages are copied by address")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quinion::backend::{Backend, FillRun, MemoryFile};
use quinion::internals::arena::{Arena, ArenaOptions};
use quinion::internals::filemap::{FileView, HitStop, read_hits_into};
use quinion::internals::folio::written::{copy_page, try_copy_page};
use quinion::internals::mapping::{FolioShape, Mapping, NewMapping};
use quinion::internals::sync::LockWait;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{Frame, MappingId, Order, Orders, PAGE_SIZE, PageIndex};

const PAGES: u64 = 512;
const REPEATS: usize = 15;
const READS: u64 = 200_000;

/// A cache of one file: a folio of 512 pages, and one of a single page behind it.
struct Fixture {
    arena: Arc<Arena>,
    mapping: Arc<Mapping>,
    head: Frame,
}

impl Fixture {
    fn new() -> Self {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 64 << 20 }).expect("64 MiB"));
        let backend: Arc<dyn Backend> = Arc::new(MemoryFile::new(vec![0; (PAGES as usize + 1) * PAGE_SIZE]));
        let known = backend.attributes().expect("memory has attributes");
        let (id, process) = (MappingId(1), ForkGuard::new());
        let new = NewMapping { arena: &arena, id, backend, attributes: &known, process };
        let mapping = Arc::new(Mapping::new(new).expect("cells"));
        let head = Self::add(&arena, &mapping, 0, 9);
        Self::add(&arena, &mapping, PAGES, 0);
        Self { arena, mapping, head }
    }
    fn add(arena: &Arena, mapping: &Mapping, first: u64, order: u8) -> Frame {
        let pages = 1 << order;
        let run = arena.alloc_run(pages, LockWait::Wait).expect("there is room");
        assert_eq!(run.pages, pages);
        let fill = FillRun { index: PageIndex(first), frame: run.frame, pages };
        let shape = FolioShape::of(Orders { min: Order::ZERO, max: Order(order) });
        mapping.add_folio_range(fill, shape, LockWait::Wait, &mut |_, _| {}).expect("nodes");
        arena.view().own(run.frame).complete();
        run.frame
    }
    fn write(&self, page: u64, content: &[u8; PAGE_SIZE]) {
        let held = self.mapping.try_hold(PageIndex(page)).expect("it is there");
        let wrote = held.writer().expect("it is filled").write(page * PAGE_SIZE as u64, content);
        assert_eq!(wrote.bytes, PAGE_SIZE);
    }
    fn read(&self, position: u64, to: &mut [u8]) {
        let (view, cell, id) = (self.arena.view(), self.mapping.index().cell(), self.mapping.id());
        let hits = read_hits_into(FileView { view, cell, id }, position, to, |_, _| ());
        assert_eq!(hits.stopped, HitStop::Full);
    }
}

fn cpu_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// CPU nanoseconds of a hot read of `bytes` at `position`.
fn hot(fixture: &Fixture, position: u64, bytes: usize) -> f64 {
    let mut buffer = vec![0; bytes];
    let begin = cpu_ns();
    for _ in 0..READS {
        fixture.read(std::hint::black_box(position), &mut buffer);
        std::hint::black_box(&buffer);
    }
    (cpu_ns() - begin) as f64 / READS as f64
}

fn hot_reads() {
    println!("hot reads                 steady ns  written ns  written/steady");
    let [steady, written] = [(); 2].map(|()| Fixture::new());
    [0, PAGES].iter().for_each(|&page| written.write(page, &[1; PAGE_SIZE]));
    for (name, position, bytes) in [
        ("64 B of order 0", PAGES * PAGE_SIZE as u64, 64),
        ("4 KiB of order 0", PAGES * PAGE_SIZE as u64, PAGE_SIZE),
        ("4 KiB of order 9", 0, PAGE_SIZE),
        ("64 KiB of order 9", 0, 16 * PAGE_SIZE),
    ] {
        let mut times = [vec![], vec![]];
        for _ in 0..REPEATS {
            times[0].push(hot(&steady, position, bytes));
            times[1].push(hot(&written, position, bytes));
        }
        let [steady, written] = times.map(median);
        println!("{name:<24} {steady:10.1}  {written:10.1}  {:14.2}", written / steady);
    }
}

/// Reads for `time` while another thread writes with `pause` between: reads, those that had to try again, those that
/// went for the lock, writes.
fn against_a_writer(fixture: &Fixture, pause: Duration, time: Duration) -> [u64; 4] {
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    let view = fixture.arena.view();
    std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            let mut state = 1u64;
            while !stop.load(Ordering::Relaxed) {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                fixture.write((state >> 33) % PAGES, &[state as u8; PAGE_SIZE]);
                writes.fetch_add(1, Ordering::Relaxed);
                let next = Instant::now() + pause;
                while pause > Duration::ZERO && Instant::now() < next {
                    std::hint::spin_loop();
                }
            }
        });
        let (mut state, mut buffer) = (7u64, [0u8; PAGE_SIZE]);
        let [mut reads, mut retries, mut locked] = [0, 0, 0];
        let end = Instant::now() + time;
        while Instant::now() < end {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let page = (state >> 33) % PAGES;
            let frame = fixture.head.plus(page as u32);
            let (sequence, from) = (view.own_write_sequence(frame), view.bytes(frame).expect("it exists"));
            // SAFETY: the page exists and the sequence is its; the buffer is a slice of this function.
            if !unsafe { try_copy_page(sequence, from, buffer.as_mut_ptr(), PAGE_SIZE) } {
                retries += 1;
                // SAFETY: as above.
                if !unsafe { copy_page(sequence, from, buffer.as_mut_ptr(), PAGE_SIZE) } {
                    locked += 1;
                    let held = fixture.mapping.try_hold(PageIndex(page)).expect("it is there");
                    held.copy_out(page * PAGE_SIZE as u64, &mut buffer);
                }
            }
            assert!(buffer.iter().all(|&byte| byte == buffer[0]), "a page is read whole");
            reads += 1;
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().expect("the writer ends");
        [reads, retries, locked, writes.load(Ordering::Relaxed)]
    })
}

fn retries() {
    println!("reads of one folio of 2 MiB against a writer of it, 4 KiB each at random");
    println!("writes/s     reads/s   tried again   went for the lock");
    let fixture = Fixture::new();
    let time = Duration::from_secs(2);
    for pause in [0, 1, 10, 100].map(Duration::from_micros) {
        let [reads, retries, locked, writes] = against_a_writer(&fixture, pause, time);
        let second = time.as_secs();
        let [again, lock] = [retries, locked].map(|count| count as f64 / reads as f64);
        println!("{:8}  {:10}  {again:12.6}  {lock:18.6}", writes / second, reads / second);
    }
}

fn main() {
    hot_reads();
    retries();
}
