//! Starvation: no call fails for want of memory because other threads were faster, or because what it wants is in the
//! hands of one that waits.
//!
//! ```text
//!   taken by            what takes long                    the call that wants memory, and waits for it
//!   a charge in hand    set_size, of the file that the     a page of another file of the same pool
//!                       charge is for
//!   other threads       nothing                            everything, in pools of a few folios
//!   cached pages        nothing                            the record of a file that is opened
//!   a future's pins     its fill, which the thread that    a page of a file that is written
//!                       waits for memory has ended
//! ```
//!
//! What is really pinned is an error in `pools.rs` and `async_read.rs`.

use std::io;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use quinion::backend::{
    Attributes, Backend, BlockingSource, Fill, Flush, Identity, MemoryFile, ReadAt, SyncKind, ThreadPool,
    WaitQueue,
};
use quinion::{
    BatchRead, Cache, File, MemFileOptions, OpenOptions, PoolOptions, ReadOptions, WritebackOptions,
};
use quinion_testing::content::{Dice, fill_content, generations};
use quinion_testing::device::{Device, verify};
use quinion_testing::doubles::{Faults, SimulatedBackend};

const PAGE: u64 = 4096;
/// Longer than memory is looked for that is not in flight.
const LONGER: Duration = Duration::from_millis(300);

fn cache() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().expect("a small cache")
}

fn read(file: &File, device: &Device, position: u64, len: usize) {
    let mut buffer = vec![0; len];
    assert_eq!(file.read_at(&mut buffer, position).unwrap(), len);
    verify(&buffer, device, position);
}

/// A cache that is full of pages gives some up for the records of files that are opened.
#[test]
fn files_are_opened_in_a_cache_that_is_full() {
    let (cache, device) = (cache(), Device::new(4 * Cache::MEMORY_MIN));
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    (0..4 * Cache::MEMORY_MIN).step_by(64 << 10).for_each(|at| read(&file, &device, at, 64 << 10));
    let files: Vec<_> = (0..20_000).map(|_| cache.mem_file(MemFileOptions::new()).unwrap()).collect();
    read(&file, &device, 0, 64 << 10);
    drop(files);
    cache.check().unwrap();
}

/// A file that takes long to be cut.
#[derive(Debug)]
struct SlowCut {
    file: MemoryFile,
    is_cutting: AtomicBool,
    may_end: AtomicBool,
}

impl Backend for SlowCut {
    fn name(&self) -> &'static str {
        "slow cut"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.file.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.file.submit(fills);
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        self.file.flush(flushes);
    }
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        self.file.sync(kind, range)
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.is_cutting.store(true, Ordering::Relaxed);
        until(|| self.may_end.load(Ordering::Relaxed));
        Backend::set_size(&self.file, bytes)
    }
}

fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// 1 A thread cuts a file, and its device takes long.
/// 2 A second reads that file, is charged for a page, all that their pool may have, and waits for the cut.
/// 3 A third reads another file of the pool. It waits for the second.
#[test]
fn a_charge_in_the_hands_of_a_thread_that_waits_is_waited_for() {
    let cache = cache();
    let pool = cache.add_pool("small", PoolOptions::new().limit(PAGE)).unwrap();
    let (file, no) = (MemoryFile::new(vec![7; 64 << 10]), || AtomicBool::new(false));
    let slow = Arc::new(SlowCut { file, is_cutting: no(), may_end: no() });
    let write = OpenOptions::new().write(true).to_owned();
    let cut = pool.open_backend_with(Arc::clone(&slow) as _, &write).unwrap();
    let device = Device::new(1 << 20);
    let file = pool.open_backend(Arc::clone(&device) as _).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| cut.set_len(32 << 10).unwrap());
        until(|| slow.is_cutting.load(Ordering::Relaxed));
        scope.spawn(|| {
            let mut byte = [0];
            assert_eq!((cut.read_at(&mut byte, 0).unwrap(), byte), (1, [7]));
        });
        until(|| pool.stats().used_pages == 1);
        let late = scope.spawn(|| read(&file, &device, 0, 100));
        thread::sleep(LONGER);
        let early = late.is_finished();
        slow.may_end.store(true, Ordering::Relaxed);
        assert!(!early, "{:?}", late.join());
    });
    cache.check().unwrap();
}

struct Calls<F>(F);

impl<F: Fn() + Send + Sync> Wake for Calls<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

fn poll(
    future: Pin<&mut impl Future<Output = quinion::error::Result<usize>>>,
    waker: &Waker,
) -> Option<usize> {
    match future.poll(&mut Context::from_waker(waker)) {
        Poll::Ready(bytes) => Some(bytes.unwrap()),
        Poll::Pending => None,
    }
}

/// 1 A task has pinned all memory of its pool and awaits one more read, of
///   memory outside of it, after which it lets go. The poller is busy.
/// 2 A writer waits for memory, with its locks. It is the thread that ends that read's fill.
#[test]
fn a_thread_that_waits_for_memory_wakes_the_future_whose_fill_it_ends() {
    let cache = cache();
    let simulated = |bytes: u64| {
        let file = Arc::new(MemoryFile::new(vec![7; bytes as usize]));
        Arc::new(SimulatedBackend::of_memory(file, Faults::default()))
    };
    let pool = cache.add_pool("small", PoolOptions::new().limit(4 * PAGE)).unwrap();
    let [pinned, device, other, written] = [1 << 20; 4].map(simulated);
    let write = OpenOptions::new().write(true).to_owned();
    let written = pool.open_backend_with(written as _, &write).unwrap();
    let pinned = pool.open_backend(pinned as _).unwrap();
    let read = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let busy = cache.open_backend(Arc::clone(&other) as _).unwrap();
    // 1
    let (mut bytes, mut blocks_poller) = ([0; 100], [0; 100]);
    other.pause();
    let mut early = pin!(busy.read_at_async(&mut blocks_poller, 0));
    let (is_blocked, may_end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (blocked, end) = (Arc::clone(&is_blocked), Arc::clone(&may_end));
    let blocks = Waker::from(Arc::new(Calls(move || {
        blocked.store(true, Ordering::Relaxed);
        until(|| end.load(Ordering::Relaxed));
    })));
    assert_eq!(poll(early.as_mut(), &blocks), None);
    other.resume();
    until(|| is_blocked.load(Ordering::Relaxed));
    let pins = [0, 1, 2, 3].map(|page| pinned.pin(page * PAGE, PAGE as usize).unwrap());
    device.pause();
    let mut last = pin!(read.read_at_async(&mut bytes, 9 * PAGE));
    let is_woken = Arc::new(AtomicBool::new(false));
    let tells = Arc::clone(&is_woken);
    let waker = Waker::from(Arc::new(Calls(move || tells.store(true, Ordering::Relaxed))));
    assert_eq!(poll(last.as_mut(), &waker), None);
    device.resume();
    // 2
    let (written, read) = thread::scope(|scope| {
        let writer = scope.spawn(|| written.write_at(&[1; 100], 0));
        until(|| is_woken.load(Ordering::Relaxed) || writer.is_finished());
        let read = poll(last.as_mut(), &waker);
        drop(pins);
        (writer.join().unwrap(), read)
    });
    may_end.store(true, Ordering::Relaxed);
    assert_eq!((written.unwrap(), read), (100, Some(100)));
    assert_eq!(bytes, [7; 100]);
    cache.check().unwrap();
}

const THREADS: u64 = 24;
const WRITTEN: u32 = 9;
/// Pages of the file that is written: each thread has some of its own, in fours.
const PAGES: u64 = 2048;

struct Contender<'c> {
    dice: Dice,
    me: u64,
    device: &'c Device,
    read: File,
    written: File,
    /// What it has written last, by the first page of the four.
    known: Vec<u32>,
}

impl Contender<'_> {
    fn step(&mut self, step: u32) {
        let size = self.device.size.load(Ordering::Relaxed);
        let at = self.dice.below(size - (64 << 10));
        let len = 1 + self.dice.below(9000) as usize;
        match self.dice.below(6) {
            0 | 1 => read(&self.read, self.device, at, len),
            2 => {
                let options = ReadOptions::new().uncached(true);
                let mut buffer = vec![0; len];
                assert_eq!(self.read.read_at_with(&mut buffer, at, options).unwrap(), len);
                verify(&buffer, self.device, at);
            }
            3 => {
                let mut buffers = vec![[0; 3000]; 8];
                let places = buffers.iter_mut().zip(1..);
                let reads = places.map(|(buffer, nth)| BatchRead::new(buffer, at / 9 * nth));
                let mut reads: Vec<BatchRead<'_>> = reads.collect();
                self.read.read_batch(&mut reads);
                for read in &reads {
                    assert_eq!(read.result().unwrap(), 3000);
                    verify(read.bytes(), self.device, read.position());
                }
            }
            4 => (0..8).rev().for_each(|back| read(&self.read, self.device, at + back * PAGE, 100)),
            _ => self.write(step),
        }
    }

    fn write(&mut self, step: u32) {
        let four = self.dice.below(self.known.len() as u64);
        let (position, len) = ((four * THREADS + self.me) * 4 * PAGE, 4 * PAGE as usize);
        let mut bytes = vec![0; len];
        assert_eq!(self.written.read_at(&mut bytes, position).unwrap(), len);
        let known = self.known[four as usize];
        assert_eq!(generations(&bytes, WRITTEN, position).unwrap(), Some(known..=known));
        fill_content(&mut bytes, WRITTEN, position, step);
        self.written.write_all_at(&bytes, position).unwrap();
        self.known[four as usize] = step;
    }
}

/// Far more threads than a pool has folios, or than there are processors, and no pins: each call gets its page in the
/// end. Pools of two folios and of four, by threads that read and write in both.
#[test]
fn no_call_fails_because_others_were_faster() {
    for order in [0, 2, 4] {
        let builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(256 << 10);
        let cache = builder.folio_order_min(order).build().unwrap();
        let limit = |folios: u64| PoolOptions::new().limit((folios * PAGE) << order);
        let pools = [cache.add_pool("two", limit(2)).unwrap(), cache.add_pool("four", limit(4)).unwrap()];
        let device = Device::new(16 << 20);
        let mut bytes = vec![0; (PAGES * PAGE) as usize];
        fill_content(&mut bytes, WRITTEN, 0, 1);
        let backend = Arc::new(MemoryFile::new(bytes));
        let write = OpenOptions::new().write(true).to_owned();
        let failed = Mutex::new(());
        thread::scope(|scope| {
            for me in 0..THREADS {
                let pool = &pools[me as usize % 2];
                let mut contender = Contender {
                    dice: Dice::new(me),
                    me,
                    device: &device,
                    read: pool.open_backend(Arc::clone(&device) as _).unwrap(),
                    written: pool.open_backend_with(Arc::clone(&backend) as _, &write).unwrap(),
                    known: vec![1; (PAGES / 4 / THREADS) as usize],
                };
                let failed = &failed;
                scope.spawn(move || {
                    for step in 2..150 {
                        if failed.is_poisoned() {
                            return;
                        }
                        let outcome =
                            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| contender.step(step)));
                        if let Err(panic) = outcome {
                            let _poisons = failed.lock();
                            std::panic::resume_unwind(panic);
                        }
                    }
                });
            }
        });
        for pool in &pools {
            assert!(pool.stats().used_pages <= pool.stats().limit_bytes.unwrap() / PAGE);
        }
        cache.check().unwrap();
    }
}

/// A device that does not answer holds up its own readers, and none that can have memory from elsewhere: one read of
/// it, or one write to it, is under way for ever, and all other memory of the pool, or of the cache, is pinned when
/// another thread asks for some. Then the pins are dropped.
#[test]
fn a_device_that_never_answers_holds_up_none_that_can_have_memory_from_elsewhere() {
    for (limit, is_written) in [(Some(4), false), (Some(4), true), (None, false), (None, true)] {
        let all = Cache::MEMORY_MIN;
        let builder = Cache::builder().memory(all).pinned_max(all).readahead(0);
        let cache = builder.build().expect("a small cache");
        let options = limit.map_or_else(PoolOptions::new, |pages| PoolOptions::new().limit(pages * PAGE));
        let pool = cache.add_pool("pool", options).unwrap();
        let hung = Arc::new(MemoryFile::new(vec![7; 1 << 20]));
        let hung = Arc::new(SimulatedBackend::of_memory(hung, Faults::default()));
        let device = Device::new(2 * all);
        let write = OpenOptions::new().write(true).to_owned();
        let never = pool.open_backend_with(Arc::clone(&hung) as _, &write).unwrap();
        let file = pool.open_backend(Arc::clone(&device) as _).unwrap();
        hung.pause();
        thread::scope(|scope| {
            scope.spawn(|| match is_written {
                true => {
                    never.write_all_at(&[8; 4096], 0).unwrap();
                    never.sync_data().unwrap();
                }
                false => assert_eq!(never.read_at(&mut [0; 100], 0).unwrap(), 100),
            });
            until(|| hung.held() > 0);
            let (sender, pins) = mpsc::channel();
            let pinner = scope.spawn(|| {
                let sender = sender;
                for at in (0..2 * all).step_by(PAGE as usize) {
                    sender.send(file.pin(at, PAGE as usize).unwrap()).unwrap();
                }
            });
            let mut pinned = Vec::new();
            while let Ok(pin) = pins.recv_timeout(LONGER) {
                pinned.push(pin);
            }
            let waits = !pinner.is_finished();
            let pins_before = pinned.len();
            drop(pinned);
            let next = pins.recv_timeout(Duration::from_secs(10));
            hung.resume();
            assert!(
                waits,
                "limit {limit:?}, written {is_written}: it does not wait after {pins_before} pins"
            );
            assert!(
                next.is_ok(),
                "limit {limit:?}, written {is_written}: {pins_before} pins are dropped, and it waits"
            );
            pins.iter().for_each(drop);
        });
        cache.check().unwrap();
    }
}

/// A file system of its own that hangs: no call of it that asks for something returns, until it is told to.
#[derive(Debug)]
struct HungFile {
    file: MemoryFile,
    is_hung: AtomicBool,
    calls: AtomicU64,
}

impl HungFile {
    fn hang(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        until(|| !self.is_hung.load(Ordering::Relaxed));
    }
}

impl Backend for HungFile {
    fn name(&self) -> &'static str {
        "hung file"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.hang();
        let Attributes { identity, .. } = self.file.attributes()?;
        let identity = Identity { device: 1000 + identity.inode, ..identity };
        Ok(Attributes { identity, ..self.file.attributes()? })
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.file.submit(fills);
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        self.file.flush(flushes);
    }
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        self.hang();
        self.file.sync(kind, range)
    }
}

/// Polls until it is ready, for ten seconds at most.
fn ends_in_time<T>(future: impl Future<Output = T>) -> Option<T> {
    let (mut future, until_then) = (pin!(future), Instant::now() + Duration::from_secs(10));
    let thread = thread::current();
    let waker = Waker::from(Arc::new(Calls(move || thread.unpark())));
    while Instant::now() < until_then {
        if let Poll::Ready(ended) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(ended);
        }
        thread::park_timeout(Duration::from_millis(100));
    }
    None
}

/// Many futures of a file that hangs wait in calls that only threads can make: looks at its end, and syncs. Those of
/// another file end.
#[test]
fn a_file_that_hangs_holds_up_no_future_of_another() {
    let cache = cache();
    let hung = |is_hung| {
        let (file, is_hung) = (MemoryFile::new(vec![7; 8192]), AtomicBool::new(is_hung));
        Arc::new(HungFile { file, is_hung, calls: AtomicU64::new(0) })
    };
    let (hung, healthy) = (hung(false), hung(false));
    let write = OpenOptions::new().write(true).to_owned();
    let [hung_file, healthy_file] =
        [&hung, &healthy].map(|file| cache.open_backend_with(Arc::clone(file) as _, &write).unwrap());
    hung.is_hung.store(true, Ordering::Relaxed);
    let calls = hung.calls.load(Ordering::Relaxed);
    let noop = &mut Context::from_waker(Waker::noop());
    let mut buffers = [[0; 10]; 20];
    let mut reads: Vec<_> =
        buffers.iter_mut().map(|buffer| Box::pin(hung_file.read_at_async(buffer, 8192))).collect();
    assert!(reads.iter_mut().all(|read| read.as_mut().poll(noop).is_pending()));
    let syncs: Vec<_> = (0..20).map(|_| hung_file.sync_data_async()).collect();
    until(|| hung.calls.load(Ordering::Relaxed) > calls + 1);
    let read = ends_in_time(healthy_file.read_at_async(&mut [0; 10], 8192));
    let sync = ends_in_time(healthy_file.sync_data_async());
    hung.is_hung.store(false, Ordering::Relaxed);
    assert!(read.is_some_and(|read| read.unwrap() == 0), "a read at the end of a healthy file waits");
    assert!(sync.is_some_and(|sync| sync.is_ok()), "a sync of a healthy file waits");
    drop(reads);
    syncs.into_iter().for_each(|sync| ends_in_time(sync).unwrap().unwrap());
    cache.check().unwrap();
}

/// Devices that never answer have all the writes under way that the background allows itself. A healthy file's dirty
/// page is written in its time all the same.
#[test]
fn devices_that_never_answer_hold_up_no_write_back_of_others() {
    let writeback = WritebackOptions::new().expire(Duration::from_millis(10));
    let writeback = writeback.interval(Duration::from_millis(10)).background_share(40).throttle_share(60);
    let cache = Cache::builder().memory(128 << 20).writeback(writeback).build().unwrap();
    let file = |bytes| {
        let device =
            SimulatedBackend::of_memory(Arc::new(MemoryFile::new(vec![7; bytes])), Faults::default());
        let (device, write) = (Arc::new(device), OpenOptions::new().write(true).to_owned());
        let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
        (device, file)
    };
    let hung = [8 << 20; 6].map(file);
    let (healthy, healthy_file) = file(8192);
    for (device, file) in &hung {
        device.pause();
        file.write_all_at(&vec![8; 8 << 20], 0).unwrap();
    }
    until(|| hung.iter().filter(|(device, _)| device.held() > 0).count() >= 4);
    thread::sleep(LONGER);
    healthy_file.write_all_at(&[9; 100], 0).unwrap();
    let until_then = Instant::now() + Duration::from_secs(10);
    while healthy.writes() == 0 && Instant::now() < until_then {
        thread::sleep(Duration::from_millis(1));
    }
    let writes = healthy.writes();
    hung.iter().for_each(|(device, _)| device.resume());
    assert!(writes > 0, "a healthy file's page was not written");
    hung.iter().for_each(|(_, file)| file.sync_data().unwrap());
    cache.check().unwrap();
}

/// A user's source whose reads hang, while it is told to.
#[derive(Debug)]
struct HungSource {
    content: MemoryFile,
    is_hung: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
}

impl ReadAt for HungSource {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        until(|| !self.is_hung.load(Ordering::Relaxed));
        let left = self.attributes()?.size.saturating_sub(position).min(buffer.len() as u64) as usize;
        buffer[..left].fill(7);
        Ok(left)
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.content.attributes()
    }
}

/// A source that hangs keeps the threads that one source may have; another of the same pool is read.
#[test]
fn a_source_that_hangs_holds_up_no_other_of_its_pool() {
    let cache = cache();
    let pool = Arc::new(ThreadPool::new(Arc::new(WaitQueue::new()), 2, 64));
    let source = |is_hung: bool| {
        let (is_hung, reads) = (Arc::new(AtomicBool::new(is_hung)), Arc::new(AtomicU64::new(0)));
        let content = MemoryFile::new(vec![7; 1 << 20]);
        let source = HungSource { content, is_hung: Arc::clone(&is_hung), reads: Arc::clone(&reads) };
        let file = cache.open_backend(Arc::new(BlockingSource::new(source, Arc::clone(&pool)))).unwrap();
        (file, is_hung, reads)
    };
    let ((hung, is_hung, reads), (healthy, ..)) = (source(true), source(false));
    let read = |file: &File, at: u64| {
        let mut byte = [0];
        assert_eq!((file.read_at(&mut byte, at).unwrap(), byte), (1, [7]));
    };
    thread::scope(|scope| {
        let (hung, read) = (&hung, &read);
        (0..10).for_each(|nth| drop(scope.spawn(move || read(hung, nth * 16 * PAGE))));
        until(|| reads.load(Ordering::Relaxed) >= 2);
        let healthy_read = scope.spawn(|| read(&healthy, 0));
        let until_then = Instant::now() + Duration::from_secs(10);
        while !healthy_read.is_finished() && Instant::now() < until_then {
            thread::sleep(Duration::from_millis(1));
        }
        let came = healthy_read.is_finished();
        let begun = reads.load(Ordering::Relaxed);
        is_hung.store(false, Ordering::Relaxed);
        assert!(came, "a healthy source is not read");
        assert_eq!(begun, 2, "it has no more threads than one source may have");
    });
    cache.check().unwrap();
}
