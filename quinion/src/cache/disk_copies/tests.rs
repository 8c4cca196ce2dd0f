//! A disk slower than the backend: pages that it refused are there later, and never with other bytes than those that
//! arrived.
//!
//! The disk is a device in memory whose writes can be held back. All bytes follow from the content's number
//! and the place, so each page that is found on the disk is compared.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use quinion_disk::internals::{TestTimes, with_times};
use quinion_disk::{Device, DiskOptions, DiskStats, DiskStore};

use crate::backend::CopyOutcome;
use crate::backend::{
    Attributes, BlockingSource, ContentKey, Identity, ReadAt, SyncKind, ThreadPool, Version, WaitQueue,
    WriteAt,
};
use crate::{Builder, Cache, File, OpenOptions};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
const PIECE: u64 = 64 << 10;
const LONG: Duration = Duration::from_secs(60);

/// Returns `options` of a store that waits for an answer no longer than `answer_max`.
fn answered_within(options: DiskOptions, answer_max: Duration) -> DiskOptions {
    with_times(options, TestTimes { answer_max: Some(answer_max), ..TestTimes::default() })
}

#[derive(Clone, Debug)]
struct SlowDisk(Arc<SlowDiskState>);

#[derive(Debug)]
struct SlowDiskState {
    bytes: Mutex<Vec<u8>>,
    holds: (Mutex<bool>, Condvar),
    reads_held: (Mutex<bool>, Condvar),
    fails: AtomicBool,
}

impl SlowDisk {
    fn new(mib: u64) -> (Self, DiskOptions) {
        let bytes = Mutex::new(vec![0; (mib * MIB) as usize]);
        let (holds, reads_held, fails) = (Default::default(), Default::default(), AtomicBool::new(false));
        let state = SlowDiskState { bytes, holds, reads_held, fails };
        // A disk that is held is slow here, and does not hang.
        let options = DiskOptions::new("", mib * MIB).buffer_bytes(3 << 20);
        (Self(Arc::new(state)), answered_within(options, LONG))
    }
    fn hold(&self, holds: bool) {
        *self.0.holds.0.lock().unwrap() = holds;
        self.0.holds.1.notify_all();
    }
    fn hold_reads(&self, holds: bool) {
        *self.0.reads_held.0.lock().unwrap() = holds;
        self.0.reads_held.1.notify_all();
    }
}

impl Device for SlowDisk {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let held = &self.0.reads_held;
        drop(held.1.wait_while(held.0.lock().unwrap(), |holds| *holds).unwrap());
        buffer.copy_from_slice(&self.0.bytes.lock().unwrap()[offset as usize..][..buffer.len()]);
        Ok(())
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        drop(self.0.holds.1.wait_while(self.0.holds.0.lock().unwrap(), |holds| *holds).unwrap());
        if self.0.fails.load(Ordering::Relaxed) {
            return Err(io::Error::other("no such device"));
        }
        self.0.bytes.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct Content {
    number: u64,
    size: u64,
    is_named: bool,
    fetched: Arc<AtomicU64>,
}

fn word(number: u64, at: u64) -> [u8; 8] {
    ((at + 1) ^ number << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

fn content(number: u64, from: u64, len: usize) -> Vec<u8> {
    let (first, end) = (from / 8, (from + len as u64).div_ceil(8));
    let bytes: Vec<u8> = (first..end).flat_map(|at| word(number, at)).collect();
    bytes[(from - first * 8) as usize..][..len].to_vec()
}

fn key(number: u64) -> ContentKey {
    let mut key = [9; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    ContentKey(key)
}

impl ReadAt for Content {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let bytes = self.size.saturating_sub(position).min(buffer.len() as u64) as usize;
        buffer[..bytes].copy_from_slice(&content(self.number, position, bytes));
        self.fetched.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let version = Version { modified: 0, changed: 0, settled: true, steps: true };
        let mut digest = [7; 24];
        digest[..8].copy_from_slice(&self.number.to_le_bytes());
        Ok(Attributes { identity: Identity::of_digest(digest), version, size: self.size })
    }
    fn content_key(&self) -> Option<ContentKey> {
        self.is_named.then(|| key(self.number))
    }
}

impl WriteAt for Content {
    fn write_at(&self, bytes: &[u8], _position: u64) -> io::Result<usize> {
        Ok(bytes.len())
    }
    fn sync(&self, _kind: SyncKind, _range: std::ops::Range<u64>) -> io::Result<()> {
        Ok(())
    }
    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }
}

struct Node {
    cache: Cache,
    pool: Arc<ThreadPool>,
    fetched: Arc<AtomicU64>,
    disk: SlowDisk,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.disk.hold(false);
        self.disk.hold_reads(false);
    }
}

impl Node {
    fn new(memory_mib: u64, disk: &SlowDisk, options: &DiskOptions) -> Self {
        Self::built(Cache::builder().memory(memory_mib * MIB), disk, options)
    }
    fn built(builder: Builder, disk: &SlowDisk, options: &DiskOptions) -> Self {
        let device = Box::new(disk.clone());
        let store = Box::new(|options: &DiskOptions| DiskStore::open_on(device, options));
        let cache = builder.disk(options.clone()).build_with(store).expect("a cache");
        let pool = Arc::new(ThreadPool::new(Arc::new(WaitQueue::new()), 2, 64));
        Self { cache, pool, fetched: Arc::default(), disk: disk.clone() }
    }
    fn content(&self, number: u64, size: u64) -> Content {
        Content { number, size, is_named: true, fetched: Arc::clone(&self.fetched) }
    }
    fn open(&self, number: u64, size: u64) -> File {
        let source = BlockingSource::new(self.content(number, size), Arc::clone(&self.pool));
        self.cache.open_backend(Arc::new(source)).expect("it opens")
    }
    fn open_unnamed(&self, number: u64, size: u64) -> File {
        let content = Content { is_named: false, ..self.content(number, size) };
        let source = BlockingSource::new(content, Arc::clone(&self.pool));
        self.cache.open_backend(Arc::new(source)).expect("it opens")
    }
    fn open_for_writing(&self, number: u64, size: u64) -> File {
        let source = BlockingSource::for_writing(self.content(number, size), Arc::clone(&self.pool));
        let options = *OpenOptions::new().write(true);
        self.cache.open_backend_with(Arc::new(source), &options).expect("it opens")
    }
    fn stats(&self) -> DiskStats {
        self.cache.disk_stats().unwrap()
    }
    fn wait_until_paid(&self) -> DiskStats {
        let begun = Instant::now();
        while self.stats().pending_pages > 0 {
            assert!(begun.elapsed() < LONG, "{:?}", self.stats());
            thread::sleep(Duration::from_millis(1));
        }
        self.cache.shared.disk.as_ref().unwrap().thread.close();
        self.stats()
    }
}

fn read_checked(file: &File, number: u64, from: u64, len: usize) {
    let mut buffer = vec![0; len];
    let bytes = file.read_at(&mut buffer, from).expect("it is read");
    assert_eq!(bytes as u64, file.len().saturating_sub(from).min(len as u64));
    assert!(buffer[..bytes] == content(number, from, bytes), "content {number} from byte {from}");
}

fn read_all(file: &File, number: u64) {
    for from in (0..file.len()).step_by(MIB as usize) {
        read_checked(file, number, from, MIB as usize);
    }
}

fn check_disk(store: &DiskStore, number: u64, size: u64) -> u64 {
    let is_right = |page: u64| {
        let mut got = Vec::new();
        store.read(&key(number), page, 1, &mut |_, bytes| got.extend_from_slice(bytes)).ok()?;
        let mut wanted = content(number, page * PAGE, (size - page * PAGE).min(PAGE) as usize);
        wanted.resize(PAGE as usize, 0);
        assert!(got == wanted, "content {number}: page {page} has bytes of something else");
        Some(())
    };
    (0..size.div_ceil(PAGE)).filter_map(is_right).count() as u64
}

#[test]
fn pages_that_a_slow_disk_refused_are_copied_later_and_a_restart_asks_for_nothing() {
    let (disk, options) = SlowDisk::new(64);
    let node = Node::new(64, &disk, &options);
    let size = 20 * MIB + 4095;
    disk.hold(true);
    let file = node.open(1, size);
    read_all(&file, 1);
    let stats = node.stats();
    assert!(stats.refused_pages > 1000, "{stats:?}");
    assert!(stats.pending_pages > 1000 && stats.late_pages + stats.missed_pages == 0, "{stats:?}");
    drop(file);
    disk.hold(false);
    let stats = node.wait_until_paid();
    assert_eq!((stats.pages, stats.missed_pages), (20 * 256 + 1, 0), "{stats:?}");
    assert!(stats.late_pages > 1000, "{stats:?}");
    drop(node);
    let node = Node::new(64, &disk, &options);
    read_all(&node.open(1, size), 1);
    assert_eq!(node.fetched.load(Ordering::Relaxed), 0);
}

#[test]
fn pages_that_have_left_memory_are_missed_and_others_in_their_frames_are_not_taken_for_them() {
    let (disk, options) = SlowDisk::new(128);
    let node = Node::new(16, &disk, &options);
    disk.hold(true);
    read_all(&node.open(1, 10 * MIB), 1);
    let pending = node.stats().pending_pages;
    assert!(pending > 1000);
    // In another order than the file's, and twice: as a stream it would evict itself.
    let file = node.open_unnamed(2, 40 * MIB);
    let pieces = 40 * MIB / PIECE;
    (0..2 * pieces).for_each(|at| read_checked(&file, 2, at * 7 % pieces * PIECE, PIECE as usize));
    disk.hold(false);
    let stats = node.wait_until_paid();
    assert_eq!(stats.late_pages + stats.missed_pages, pending, "{stats:?}");
    assert!(stats.missed_pages > 1000, "{stats:?}");
    drop(node);
    let store = DiskStore::open_on(Box::new(disk), &options).unwrap();
    assert_eq!(check_disk(&store, 1, 10 * MIB), 10 * 256 - stats.missed_pages);
}

/// The pages are cached, up to date and of the same file, and not the content's.
#[test]
fn pages_that_were_written_or_cut_meanwhile_are_not_copied() {
    let (disk, options) = SlowDisk::new(64);
    let node = Node::new(64, &disk, &options);
    let size = 16 * MIB;
    disk.hold(true);
    let file = node.open(1, size);
    read_all(&file, 1);
    assert!(node.stats().pending_pages > 2000);
    let writer = node.open_for_writing(1, size);
    for page in (0..size / PAGE).step_by(3) {
        writer.write_all_at(b"not the content's", page * PAGE + 100).unwrap();
    }
    writer.set_len(12 * MIB).unwrap();
    writer.set_len(size).unwrap();
    writer.write_all_at(&vec![1; MIB as usize], 14 * MIB).unwrap();
    writer.sync_all().unwrap();
    disk.hold(false);
    node.wait_until_paid();
    drop((file, writer, node));
    let store = DiskStore::open_on(Box::new(disk), &options).unwrap();
    assert!(check_disk(&store, 1, size) < 3000);
}

#[test]
fn pages_that_were_let_go_and_fetched_again_are_not_copied_twice() {
    let (disk, options) = SlowDisk::new(64);
    let node = Node::new(64, &disk, &options);
    let size = 16 * MIB;
    disk.hold(true);
    let file = node.open(1, size);
    read_all(&file, 1);
    let first = node.stats().pending_pages;
    file.dont_need(0, size).unwrap();
    read_all(&file, 1);
    let both = node.stats().pending_pages;
    assert!(both > first, "they arrived again");
    disk.hold(false);
    let stats = node.wait_until_paid();
    assert_eq!((stats.pages, stats.missed_pages), (16 * 256, first), "{stats:?}");
}

#[derive(Clone, Copy, PartialEq)]
enum Copies {
    Made,
    Pending,
}

#[derive(PartialEq, Debug)]
struct Outcome {
    /// Position and pages of each range that is still cached.
    left: Vec<(u64, u64)>,
    counted: [u64; 6],
}

/// The ranges in memory after some reading and evicting, and the counters.
fn outcome_of(copies: Copies) -> Outcome {
    let (disk, options) = SlowDisk::new(64);
    let builder = Cache::builder().memory(16 * MIB).background_reclaim(false).readahead(0);
    let node = Node::built(builder, &disk, &options);
    disk.hold(true);
    let file = node.open(1, 60 * MIB);
    let mut state = 1_u64;
    let mut read = |pages: u64, reads: u64| {
        for _ in 0..reads {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            read_checked(&file, 1, (state >> 33) % pages * PAGE, 64);
        }
    };
    read(2500, 6000);
    assert!(node.stats().pending_pages > 1000, "{:?}", node.stats());
    if copies == Copies::Made {
        disk.hold(false);
        let stats = node.wait_until_paid();
        assert!(stats.late_pages > 1000, "{stats:?}");
    }
    // From here on nothing comes from the disk: reads are of cached pages, or of pages that were not read yet.
    let all: Vec<_> =
        file.residents(0, u64::MAX).unwrap().map(|range| (range.bytes.start, range.pages)).collect();
    for (round, fresh) in (5000..8000).enumerate() {
        let (at, _) = all[round % (all.len() / 3)];
        if file.residency(at, 1).unwrap().cached_pages == 1 {
            read_checked(&file, 1, at, 64);
        }
        read_checked(&file, 1, fresh * PAGE, 64);
    }
    let left = file.residents(0, u64::MAX).unwrap().map(|range| (range.bytes.start, range.pages)).collect();
    let stats = node.cache.stats();
    disk.hold(false);
    let counted = [
        stats.reads,
        stats.hits,
        stats.misses,
        stats.evicted_pages,
        stats.activated_pages,
        stats.cached_pages,
    ];
    Outcome { left, counted }
}

#[test]
fn late_copies_change_neither_evictions_nor_counts() {
    assert_eq!(outcome_of(Copies::Made), outcome_of(Copies::Pending));
}

#[test]
fn a_disk_that_fails_owes_nothing_any_more() {
    let (disk, options) = SlowDisk::new(64);
    let node = Node::new(64, &disk, &options);
    disk.hold(true);
    let file = node.open(1, 16 * MIB);
    read_all(&file, 1);
    let pending = node.stats().pending_pages;
    assert!(pending > 2000);
    disk.0.fails.store(true, Ordering::Relaxed);
    disk.hold(false);
    let stats = node.wait_until_paid();
    assert!(node.cache.disk_trouble().is_some());
    assert_eq!(stats.late_pages + stats.missed_pages, pending);
    file.dont_need(0, 16 * MIB).unwrap();
    read_all(&file, 1);
    assert_eq!(node.stats().pending_pages, 0);
}

#[test]
fn the_end_makes_pending_copies_and_does_not_wait_for_a_disk_that_hangs() {
    let (disk, options) = SlowDisk::new(64);
    let node = Node::new(64, &disk, &options);
    disk.hold(true);
    read_all(&node.open(1, 16 * MIB), 1);
    let copies = Arc::clone(node.cache.shared.disk.as_ref().unwrap());
    assert!(copies.stats().pending_pages > 2000);
    copies.end(Duration::ZERO);
    assert!(copies.stats().pending_pages > 2000, "there was no time, and no room");
    disk.hold(false);
    copies.end(LONG);
    assert_eq!((copies.stats().pending_pages, copies.stats().missed_pages), (0, 0));
    drop((copies, node));
    let store = DiskStore::open_on(Box::new(disk), &options).unwrap();
    assert_eq!(check_disk(&store, 1, 16 * MIB), 16 * 256);
}

/// 1 Pages are on the disk and not in memory. 2 The disk stops to answer, without an error. 3 Reads of them wait for
/// it for ever, and so does the end of the cache, while the backend has the pages.
#[test]
fn pages_on_a_disk_that_does_not_answer_are_read_from_the_backend_and_the_cache_ends() {
    let (disk, options) = SlowDisk::new(64);
    // A busy machine may be too slow for some pages at a time, which the next round reads and copies.
    let is_copied = (0..20).any(|_| {
        let node = Node::new(64, &disk, &options);
        read_all(&node.open(1, 16 * MIB), 1);
        node.wait_until_paid().missed_pages == 0
    });
    assert!(is_copied);
    // It is waited for briefly only from here on: a disk that is well may take longer on a busy machine.
    let mut node = Node::new(64, &disk, &answered_within(options, Duration::from_millis(100)));
    disk.hold_reads(true);
    disk.hold(true);
    let file = node.open(1, 16 * MIB);
    let (sender, steps) = mpsc::channel();
    thread::spawn(move || {
        read_all(&file, 1);
        let read = (node.fetched.load(Ordering::Relaxed), node.cache.disk_trouble());
        sender.send(Some(read)).unwrap();
        let other = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        drop(file);
        drop(std::mem::replace(&mut node.cache, other));
        sender.send(None).unwrap();
    });
    let (fetched, trouble) = steps.recv_timeout(LONG).expect("reads return").unwrap();
    assert!(fetched > 0);
    let trouble = trouble.expect("the disk is left alone");
    assert!(trouble.contains("no answer"), "{trouble}");
    assert!(steps.recv_timeout(LONG).expect("the cache ends").is_none());
}

#[test]
fn a_disk_that_takes_nothing_is_asked_less_and_less_often() {
    let mut pause = super::CopyBackoff::default();
    let pauses: Vec<_> = (0..8).map(|_| pause.next().as_millis()).collect();
    assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 100, 100]);
    let last = [pause.next_after_progress(), pause.next(), pause.next_after_progress()];
    assert_eq!(last.map(|pause| pause.as_millis()), [2, 4, 2]);
}

/// A folio of 2 MiB is more than a segment of the disk has.
#[test]
fn late_copies_leave_a_buffer_to_arriving_pages() {
    let (disk, options) = SlowDisk::new(64);
    let builder = Cache::builder().memory(64 * MIB).folio_order_min(9).folio_order_max(9);
    let node = Node::built(builder, &disk, &options);
    disk.hold(true);
    read_all(&node.open(1, 24 * MIB), 1);
    let copies = Arc::clone(node.cache.shared.disk.as_ref().unwrap());
    copies.thread.close();
    let pending = node.stats().pending_pages;
    assert!(pending > 2000);
    let mut buffer = Vec::new();
    // In turns: the disk writes all, then it hangs, and the copied pages leave a buffer.
    loop {
        disk.hold(false);
        let begun = Instant::now();
        while copies.tier.free_segments() < 2 {
            assert!(begun.elapsed() < LONG, "{:?}", node.stats());
            thread::sleep(Duration::from_millis(1));
        }
        disk.hold(true);
        let outcome = copies.tier.copy_pending(&mut buffer);
        assert!(copies.tier.free_segments() >= 1, "{outcome:?}");
        match outcome {
            CopyOutcome::Nothing => break,
            outcome => assert_eq!(outcome, CopyOutcome::Behind { took: true }),
        }
    }
    disk.hold(false);
    let stats = node.stats();
    assert_eq!((stats.late_pages, stats.missed_pages), (pending, 0), "{stats:?}");
    drop((copies, node));
    let store = DiskStore::open_on(Box::new(disk), &options).unwrap();
    assert_eq!(check_disk(&store, 1, 24 * MIB), 24 * 256);
}

#[test]
fn nothing_that_is_pending_keeps_a_file_alive() {
    let (disk, options) = SlowDisk::new(64);
    let node = Node::built(Cache::builder().memory(64 * MIB).idle_files_max(0), &disk, &options);
    disk.hold(true);
    let file = node.open(1, 16 * MIB);
    read_all(&file, 1);
    let mapping = Arc::downgrade(&file.handle.mapping);
    drop(file);
    assert!(mapping.upgrade().is_none());
    disk.hold(false);
    let stats = node.wait_until_paid();
    assert!(stats.missed_pages > 2000 && stats.late_pages == 0, "{stats:?}");
}

/// An end that copies nothing would leave to the next cache only the pages that the disk took at once.
#[test]
fn the_last_handle_makes_pending_copies() {
    let (disk, options) = SlowDisk::new(64);
    let node = Node::new(64, &disk, &options);
    disk.hold(true);
    read_all(&node.open(1, 16 * MIB), 1);
    node.cache.shared.disk.as_ref().unwrap().thread.close();
    assert!(node.stats().pending_pages > 2000);
    drop(node);
    let store = DiskStore::open_on(Box::new(disk), &options).unwrap();
    assert_eq!(check_disk(&store, 1, 16 * MIB), 16 * 256);
}

/// Also after a failed test: else a thread that waits for the end never ends.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Threads read, write by second handles, let go and reopen; memory and disk are too small; the disk stops at times.
#[test]
fn a_storm_leaves_no_wrong_byte_on_the_disk() {
    let (disk, options) = SlowDisk::new(24);
    let size = |number: u64| 3 * MIB + number * 1111;
    let (mut late, mut missed) = (0, 0);
    for round in 0..3 {
        let node = Node::new(16, &disk, &options);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let ends = Ends(&is_over);
            let readers: Vec<_> = (0..3)
                .map(|thread| {
                    let node = &node;
                    scope.spawn(move || storm(node, round << 8 | thread | 1 << 20, size))
                })
                .collect();
            let switch = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    disk.hold(true);
                    let before = node.stats().refused_pages;
                    // However slow the threads are, something is refused.
                    while node.stats().refused_pages == before && !is_over.load(Ordering::Relaxed) {
                        thread::sleep(Duration::from_millis(1));
                    }
                    thread::sleep(Duration::from_millis(3));
                    disk.hold(false);
                    thread::sleep(Duration::from_millis(1));
                }
            });
            readers.into_iter().for_each(|reader| reader.join().unwrap());
            drop(ends);
            switch.join().unwrap();
        });
        let stats = node.wait_until_paid();
        (late, missed) = (late + stats.late_pages, missed + stats.missed_pages);
        node.cache.check().unwrap();
        drop(node);
        let store = DiskStore::open_on(Box::new(disk.clone()), &options).unwrap();
        let found: u64 = (0..12).map(|number| check_disk(&store, number, size(number))).sum();
        assert!(found > 0);
    }
    assert!(late > 0 && missed > 0, "{late} {missed}");
}

/// One thread. Contents from 8 on are written as well, so reads of them are not compared.
fn storm(node: &Node, seed: u64, size: impl Fn(u64) -> u64) {
    let mut state = seed;
    let mut random = move |end: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % end
    };
    for _ in 0..800 {
        let number = random(12);
        let (file, from, len) = (node.open(number, size(number)), random(size(number)), 1 + random(300_000));
        if number < 8 {
            read_checked(&file, number, from, len as usize);
        } else {
            file.read_at(&mut vec![0; len as usize], from).expect("it is read");
        }
        match random(10) {
            0 => drop(file.dont_need(from, len)),
            1 => drop(file.revalidate()),
            2 if number >= 8 => {
                let writer = node.open_for_writing(number, size(number));
                let bytes = vec![0xee; len.min(size(number) - from) as usize];
                writer.write_all_at(&bytes, from).expect("it is written");
            }
            _ => {}
        }
    }
}
