//! Futures: reads that wait without a thread give what reads that wait give.
//!
//! The runtime here is a loop that polls what was woken and sleeps when nothing was, so that a wake-up that is lost is
//! a test that hangs.

use quinion_testing::content;
use std::collections::BTreeSet;
use std::future::Future;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use quinion::backend::{Attributes, Backend, Fill, Mechanism, MemoryFile};
use quinion::error::Result;
use quinion::{BatchRead, Cache, ErrorKind, File, OpenOptions};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;

/// Wakes a thread, and notes which of its futures to poll.
struct Ready {
    number: usize,
    ready: Arc<Mutex<BTreeSet<usize>>>,
    thread: Thread,
}

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        self.ready.lock().unwrap().insert(self.number);
        self.thread.unpark();
    }
}

/// Polls all futures until they are ready, each only when it was woken; returns their results, and the number of polls.
fn join_all<F: Future + Unpin>(futures: Vec<F>) -> (Vec<F::Output>, usize) {
    let ready: Arc<Mutex<BTreeSet<usize>>> = Arc::new(Mutex::new((0..futures.len()).collect()));
    let (mut outputs, mut polls): (Vec<Option<F::Output>>, _) = (futures.iter().map(|_| None).collect(), 0);
    let mut futures: Vec<Option<F>> = futures.into_iter().map(Some).collect();
    while outputs.iter().any(Option::is_none) {
        let next = ready.lock().unwrap().pop_first();
        let Some(number) = next else {
            thread::park();
            continue;
        };
        let Some(future) = &mut futures[number] else { continue };
        let waker: Waker =
            Arc::new(Ready { number, ready: Arc::clone(&ready), thread: thread::current() }).into();
        polls += 1;
        if let Poll::Ready(output) = Pin::new(future).poll(&mut Context::from_waker(&waker)) {
            outputs[number] = Some(output);
            futures[number] = None;
        }
    }
    (outputs.into_iter().flatten().collect(), polls)
}

fn block_on<F: Future + Unpin>(future: F) -> F::Output {
    join_all(vec![future]).0.remove(0)
}

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn exact() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().expect("a small cache")
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).expect("the device opens")
}

fn read(file: &File, device: &Device, position: u64, len: usize) -> Result<usize> {
    let mut buffer = vec![0; len];
    let bytes = block_on(file.read_at_async(&mut buffer, position))?;
    verify(&buffer[..bytes], device, position);
    Ok(bytes)
}

#[test]
fn a_hit_is_ready_at_the_first_poll() {
    let (cache, device) = (exact(), Device::new(100 * PAGE));
    let file = open(&cache, &device);
    file.read_exact_at(&mut [0; 3 * PAGE as usize], PAGE).unwrap();
    let mut buffer = [0; 5000];
    let Poll::Ready(bytes) = poll_once(&mut file.read_at_async(&mut buffer, PAGE + 10)) else {
        panic!("a hit does not wait")
    };
    assert_eq!(bytes.unwrap(), 5000);
    verify(&buffer, &device, PAGE + 10);
}

#[test]
fn one_thread_has_many_reads_at_the_device_at_a_time() {
    const READS: usize = 500;
    let (cache, device) = (exact(), Device::new(8 * READS as u64 * PAGE));
    let file = open(&cache, &device);
    device.hold();
    let mut buffers = vec![[0; 100]; READS];
    let position = |read: usize| (read * 7 % READS) as u64 * 8 * PAGE + 4000;
    let mut futures: Vec<_> = buffers
        .iter_mut()
        .enumerate()
        .map(|(read, buffer)| file.read_at_async(buffer, position(read)))
        .collect();
    for future in &mut futures {
        assert!(poll_once(future).is_pending());
    }
    assert_eq!(device.reads().len(), READS, "all of them are there before anybody waits");
    let released = Arc::clone(&device);
    let releaser = thread::spawn(move || released.release());
    let (bytes, polls) = join_all(futures);
    releaser.join().unwrap();
    assert!(bytes.into_iter().all(|bytes| bytes.unwrap() == 100));
    for (read, buffer) in buffers.iter().enumerate() {
        verify(buffer, &device, position(read));
    }
    // Each reaches into the next page: two fills, and a poll after each, and one before.
    assert!(polls <= 3 * READS, "{polls} polls of {READS} reads: somebody is woken for nothing");
    assert!(device.times_read().iter().all(|&times| times <= 1));
    cache.check().unwrap();
}

/// S04: a read that is given up while it waits for the device, which for a future is to be dropped, leaves no lock, no
/// hold and no memory behind: its page comes, and can be evicted.
#[test]
fn s04_a_dropped_future_leaves_nothing_but_a_page_in_the_cache() {
    let (cache, device) = (exact(), Device::new(100 * PAGE));
    let file = open(&cache, &device);
    device.hold();
    let mut buffer = [0; 8];
    let mut future = file.read_at_async(&mut buffer, 10 * PAGE);
    assert!(poll_once(&mut future).is_pending());
    drop(future);
    device.release();
    assert_eq!((cache.stats().in_flight, file.cached_pages()), (0, 1));
    cache.check().unwrap();
    assert_eq!(read(&file, &device, 10 * PAGE, 8).unwrap(), 8);
    assert_eq!(device.reads().len(), 1);
    assert_eq!((file.dont_need(0, u64::MAX).unwrap(), file.cached_pages()), (1, 0), "it is not held");
    let stats = cache.stats();
    assert_eq!(stats.free_bytes, stats.data_bytes);
}

#[test]
fn the_waker_of_the_last_poll_is_the_one_that_is_called() {
    struct Counted(AtomicUsize);
    impl Wake for Counted {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let (cache, device) = (exact(), Device::new(100 * PAGE));
    let file = open(&cache, &device);
    device.hold();
    let mut buffer = [0; 8];
    let mut future = pin!(file.read_at_async(&mut buffer, 0));
    let wakers = [(); 3].map(|()| Arc::new(Counted(AtomicUsize::new(0))));
    for waker in &wakers {
        let waker = Arc::clone(waker).into();
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    device.release();
    assert_eq!(wakers.map(|waker| waker.0.load(Ordering::Relaxed)), [0, 0, 1]);
    assert!(matches!(poll_once(&mut future), Poll::Ready(Ok(8))));
}

#[test]
fn a_page_that_cannot_be_read_fails_its_own_reads_and_not_for_ever() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let device = Device::new(100 * PAGE);
    let file = open(&cache, &device);
    device.fail(3);
    // What came before the bad page is returned; the next read tells why it ended there.
    assert_eq!(read(&file, &device, 0, 8 * PAGE as usize).unwrap(), 3 * PAGE as usize);
    let error = read(&file, &device, 3 * PAGE, 100).unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Io, Some(5)));
    let report = file.readahead_report().unwrap();
    assert!(report.failures >= 1, "windows shrink after a failed read: {report:?}");
    assert!(device.times_read()[3] < 10, "{} tries", device.times_read()[3]);
    assert_eq!(read(&file, &device, 4 * PAGE, 100).unwrap(), 100);
    device.mend(3);
    assert_eq!(read(&file, &device, 3 * PAGE, 100).unwrap(), 100);
    cache.check().unwrap();
}

#[test]
fn a_read_at_the_end_looks_at_the_file_again() {
    let (cache, device) = (exact(), Device::new(10_000));
    let file = open(&cache, &device);
    assert_eq!(read(&file, &device, 9_000, 5_000).unwrap(), 1_000);
    assert_eq!(read(&file, &device, 10_000, 5_000).unwrap(), 0);
    device.size.store(20_000, Ordering::Relaxed);
    assert_eq!(read(&file, &device, 10_000, 5_000).unwrap(), 5_000);
    assert_eq!(read(&file, &device, u64::MAX, 10).unwrap(), 0);
    assert_eq!(read(&file, &device, 0, 0).unwrap(), 0);
}

#[test]
fn memory_that_is_short_is_waited_for_elsewhere_and_then_said_to_be_so() {
    let small = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0);
    let cache = small.pinned_max(Cache::MEMORY_MIN).build().expect("a small cache");
    let device = Device::new(2 * Cache::MEMORY_MIN);
    let file = open(&cache, &device);
    let mut pins = Vec::new();
    let error = loop {
        match file.pin(pins.len() as u64 * 64 * PAGE, 64 * PAGE as usize) {
            Ok(pin) => pins.push(pin),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    let far = 2 * Cache::MEMORY_MIN - 64 * PAGE;
    let mut buffer = vec![0; 63 * PAGE as usize];
    loop {
        match block_on(file.read_at_async(&mut buffer, far)) {
            Ok(bytes) if bytes == buffer.len() => pins.push(file.pin(far, bytes).unwrap()),
            Ok(_) => continue, // the last free pages: the rest comes with the next call
            Err(error) => break assert_eq!(error.kind(), ErrorKind::NoMemory, "{error}"),
        }
        break;
    }
    pins.clear();
    assert_eq!(read(&file, &device, far, 63 * PAGE as usize).unwrap(), 63 * PAGE as usize);
    cache.check().unwrap();
}

fn content() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("content");
    let mut plain = std::fs::File::create(&path).unwrap();
    let mut piece = vec![0; 1 << 20];
    for number in 0..64 {
        content::fill_content(&mut piece, 1, number << 20, 0);
        plain.write_all(&piece).unwrap();
    }
    plain.sync_all().unwrap();
    (folder, path)
}

fn beside_blocking_readers(mechanism: Mechanism) {
    let (_folder, path) = content();
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).mechanism(mechanism).build().unwrap();
    let file = cache.open(&path).unwrap();
    let plain = std::fs::File::open(&path).unwrap();
    thread::scope(|scope| {
        for reader in 0..2u64 {
            let (file, plain) = (file.clone(), &plain);
            scope.spawn(move || {
                for step in 0..300u64 {
                    let position = (step * 7919 + reader * 31) % 16_000 * PAGE;
                    let (mut ours, mut theirs) = (vec![0; 9000], vec![0; 9000]);
                    let bytes = file.read_at(&mut ours, position).unwrap();
                    plain.read_exact_at(&mut theirs[..bytes], position).unwrap();
                    assert!(ours[..bytes] == theirs[..bytes]);
                }
            });
        }
        for round in 0..20u64 {
            let mut buffers = vec![vec![0; 3000]; 64];
            let place = |read: u64| (read * 104_729 + round * 7) % 16_000 * PAGE + 2000;
            let futures: Vec<_> = buffers
                .iter_mut()
                .zip(0..)
                .map(|(buffer, read)| file.read_at_async(buffer, place(read)))
                .collect();
            assert!(join_all(futures).0.into_iter().all(|bytes| bytes.unwrap() == 3000));
            for (buffer, read) in buffers.iter().zip(0..) {
                content::verify(buffer, 1, place(read)).unwrap();
            }
        }
    });
    cache.check().unwrap();
    drop((file, cache));
    // The thread that waited for all of them ends with the cache.
    while has_poller() {
        thread::yield_now();
    }
}

/// A task without a runtime: the waker alone keeps it, and with it the future, the file and the cache.
struct Abandoned(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl Wake for Abandoned {
    fn wake(self: Arc<Self>) {}
}

/// Drops the last handle of a cache inside the end of the fill that wakes: that fill cannot be waited for there.
fn a_waker_lets_the_cache_go(mechanism: Mechanism) {
    let (_folder, path) = content();
    for round in 0..20 {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).mechanism(mechanism).build().unwrap();
        let file = cache.open(&path).unwrap();
        let (held, gone) = std::sync::mpsc::channel::<()>();
        let read = async move {
            let _held = held; // dropped last, whether the read ends or not
            let (cache, file) = (cache, file);
            let mut buffer = vec![0; 1 << 20];
            file.read_at_async(&mut buffer, round << 20).await.unwrap();
            drop(cache);
        };
        let task = Arc::new(Abandoned(Mutex::new(None)));
        *task.0.lock().unwrap() = Some(Box::pin(read));
        let waker = Waker::from(Arc::clone(&task));
        // Whether it is pending depends on the device; of twenty one is.
        let _ = task.0.lock().unwrap().as_mut().unwrap().as_mut().poll(&mut Context::from_waker(&waker));
        drop((waker, task));
        assert!(gone.recv().is_err(), "nobody sends");
    }
    while has_poller() {
        thread::yield_now();
    }
}

#[test]
fn a_waker_that_holds_the_last_of_a_cache_may_go_where_a_ring_is_reaped() {
    a_waker_lets_the_cache_go(Mechanism::Ring);
}

#[test]
fn a_waker_that_holds_the_last_of_a_cache_may_go_on_a_thread_of_the_pool() {
    a_waker_lets_the_cache_go(Mechanism::Threads);
}

/// What is dirty then goes to the file all the same, by an existing thread.
#[test]
fn a_waker_that_lets_the_last_of_a_cache_go_loses_nothing_that_was_written() {
    let (_folder, path) = content();
    let place = |round: u64| round * 3 * 4096 + (20 << 20);
    for round in 0..20 {
        let writing = *quinion::OpenOptions::new().write(true);
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let file = cache.open_with(&path, &writing).unwrap();
        file.write_all_at(&[0xa0 + round as u8; 4096], place(round)).unwrap();
        let read = async move {
            let (cache, file) = (cache, file);
            let mut buffer = vec![0; 1 << 20];
            file.read_at_async(&mut buffer, round << 20).await.unwrap();
            drop(cache);
        };
        let task = Arc::new(Abandoned(Mutex::new(None)));
        *task.0.lock().unwrap() = Some(Box::pin(read));
        let waker = Waker::from(Arc::clone(&task));
        let _ = task.0.lock().unwrap().as_mut().unwrap().as_mut().poll(&mut Context::from_waker(&waker));
        drop((waker, task));
        let began = std::time::Instant::now();
        let is_there = || {
            let bytes = std::fs::read(&path).unwrap();
            bytes
                .get(place(round) as usize..)
                .is_some_and(|bytes| bytes.starts_with(&[0xa0 + round as u8; 4096]))
        };
        while !is_there() {
            assert!(began.elapsed().as_secs() < 60, "round {round} is lost");
            thread::yield_now();
        }
    }
}

/// Keeps the first fill, and completes all inside the second submission.
#[derive(Debug)]
struct Tardy {
    memory: MemoryFile,
    kept: Mutex<Vec<Fill>>,
    submissions: AtomicUsize,
}

impl Backend for Tardy {
    fn name(&self) -> &'static str {
        "tardy"
    }
    fn attributes(&self) -> std::io::Result<Attributes> {
        self.memory.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        let mut kept = self.kept.lock().unwrap();
        if self.submissions.fetch_add(1, Ordering::Relaxed) == 0 {
            *kept = fills;
            return;
        }
        let all: Vec<Fill> = kept.drain(..).chain(fills).collect();
        drop(kept);
        self.memory.submit(all);
    }
}

/// Has its file checked again, which waits for a thread that is between insertion and submission.
struct Revalidates {
    file: File,
    outcome: Mutex<Option<Result<bool>>>,
}

impl Wake for Revalidates {
    fn wake(self: Arc<Self>) {
        *self.outcome.lock().unwrap() = Some(self.file.revalidate());
    }
}

/// 1. A future waits for page 0.
/// 2. A read of page 5 is inserted, holds invalidation off and submits.
/// 3. The backend completes page 0 inside that call, and the future's waker wants to invalidate.
#[test]
fn a_waker_is_called_without_the_lock_that_its_thread_had_for_the_submission() {
    let cache = exact();
    let memory = MemoryFile::new(vec![7; 16 * PAGE as usize]);
    let tardy = Arc::new(Tardy { memory, kept: Mutex::default(), submissions: AtomicUsize::new(0) });
    let file = cache.open_backend(Arc::clone(&tardy) as Arc<dyn Backend>).unwrap();
    let waker = Arc::new(Revalidates { file: file.clone(), outcome: Mutex::default() });
    let mut buffer = [0; PAGE as usize];
    let mut future = pin!(file.read_at_async(&mut buffer, 0));
    let wakes = Waker::from(Arc::clone(&waker));
    assert!(future.as_mut().poll(&mut Context::from_waker(&wakes)).is_pending());
    tardy.memory.set_version(1);
    tardy.kept.lock().unwrap().first().expect("page 0 is under way");
    let mut other = [0; PAGE as usize];
    assert_eq!(file.read_at(&mut other, 5 * PAGE).unwrap(), PAGE as usize);
    assert_eq!(other, [7; PAGE as usize]);
    let outcome = waker.outcome.lock().unwrap().take();
    assert!(outcome.expect("the waker has done what it wanted").unwrap(), "the file had changed");
}

fn has_poller() -> bool {
    std::fs::read_dir("/proc/self/task").unwrap().flatten().any(|thread| {
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        name.starts_with("quinion-poller")
    })
}

#[test]
fn futures_and_waiting_readers_share_a_ring() {
    beside_blocking_readers(Mechanism::Ring);
}

#[test]
fn futures_and_waiting_readers_share_a_pool() {
    beside_blocking_readers(Mechanism::Threads);
}

fn pinned(file: &File, device: &Device, position: u64, len: usize) -> Result<usize> {
    let pinned = block_on(file.pin_async(position, len))?;
    let bytes: Vec<u8> = pinned.chunks().flatten().copied().collect();
    verify(&bytes, device, position);
    Ok(bytes.len())
}

#[test]
fn a_pin_of_cached_pages_is_ready_at_the_first_poll_and_ends_where_the_file_does() {
    let (cache, device) = (exact(), Device::new(10 * PAGE + 5));
    let file = open(&cache, &device);
    file.read_exact_at(&mut [0; 4 * PAGE as usize], 0).unwrap();
    let ready = poll_once(&mut file.pin_async(100, 2 * PAGE as usize));
    assert!(matches!(ready, Poll::Ready(Ok(pinned)) if pinned.len() == 2 * PAGE as usize));
    assert_eq!(pinned(&file, &device, 9 * PAGE, 5 * PAGE as usize).unwrap(), PAGE as usize + 5);
    assert_eq!(pinned(&file, &device, 20 * PAGE, 8).unwrap(), 0);
    assert_eq!(pinned(&file, &device, 0, 0).unwrap(), 0);
    // The file grows beyond its known size: a pin there checks it again.
    device.size.store(30 * PAGE, Ordering::Relaxed);
    assert_eq!(pinned(&file, &device, 20 * PAGE, 8).unwrap(), 8);
}

/// 1. A pin finds its pages missing, waits for each as a read does, and pins them then.
/// 2. Each of these counts as a read, the last one as a hit: no hit ratio is below a half.
#[test]
fn a_pin_that_waits_counts_as_one_miss() {
    const PINS: u64 = 10;
    let (cache, device) = (exact(), Device::new(100 * PAGE));
    let file = open(&cache, &device);
    let before = cache.stats();
    for number in 0..PINS {
        assert_eq!(
            pinned(&file, &device, number * 10 * PAGE + 5, 3 * PAGE as usize).unwrap(),
            3 * PAGE as usize
        );
    }
    let counted = cache.stats().since(&before);
    assert_eq!((counted.reads, counted.hits, counted.misses), (PINS, 0, PINS));
    assert_eq!(counted.read_bytes, PINS * 3 * PAGE);
    assert_eq!(pinned(&file, &device, 5, 3 * PAGE as usize).unwrap(), 3 * PAGE as usize);
    assert_eq!(cache.stats().since(&before).hits, 1);
}

/// All missing pages are requested before the first wait, and no thread waits.
#[test]
fn a_pin_asks_for_its_whole_range_at_once() {
    let (cache, device) = (exact(), Device::new(100 * PAGE));
    let file = open(&cache, &device);
    device.hold();
    let mut pin = file.pin_async(3 * PAGE, 20 * PAGE as usize);
    assert!(poll_once(&mut pin).is_pending());
    assert_eq!(device.reads(), [(3, 20)]);
    device.release();
    assert_eq!(block_on(pin).unwrap().len(), 20 * PAGE as usize);
    assert_eq!(file.cached_pages(), 20);
}

#[test]
fn a_pin_that_fails_says_why_and_pins_nothing() {
    let (cache, device) = (exact(), Device::new(100 * PAGE));
    let file = open(&cache, &device);
    device.fail(7);
    let error = pinned(&file, &device, 5 * PAGE, 5 * PAGE as usize).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert_eq!(cache.stats().pinned_bytes, 0);
    // More than pins may keep.
    let (large, all) = (Device::with_number(2, 4 * Cache::MEMORY_MIN), 4 * Cache::MEMORY_MIN as usize);
    let error = pinned(&open(&cache, &large), &large, 0, all).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert_eq!(cache.stats().pinned_bytes, 0);
}

/// 1. A pin of more than pins may keep is asked for.
/// 2. Half a cache of it is fetched, and others' pages go. Then it fails.
#[test]
fn a_pin_that_is_refused_fetches_no_page() {
    let (cache, device) = (exact(), Device::new(4 * Cache::MEMORY_MIN));
    let file = open(&cache, &device);
    let all = 4 * Cache::MEMORY_MIN as usize;
    assert_eq!(pinned(&file, &device, 0, all).unwrap_err().kind(), ErrorKind::NoMemory);
    assert_eq!(device.reads(), []);
    // Beside other pins, where there is room for half of it.
    let len = 64 * PAGE as usize;
    let mut held: Vec<_> = (0..).map_while(|number| file.pin(number * 64 * PAGE, len).ok()).collect();
    held.pop();
    let (before, behind) = (device.reads(), 3 * Cache::MEMORY_MIN);
    for refused in [file.pin(behind, 2 * len), block_on(file.pin_async(behind, 2 * len))] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoMemory);
    }
    assert_eq!(device.reads(), before);
    assert_eq!(file.pin(behind, len).unwrap().len(), len, "there is room for that");
}

/// D10: a folio pinned by an uncached handle is dropped when the pin is gone and the stream has passed it; also one
/// that a future has pinned.
#[test]
fn d10_a_future_of_an_uncached_pin_leaves_nothing() {
    let (cache, device) = (exact(), Device::new(256 * PAGE));
    let file = open(&cache, &device);
    file.set_uncached(true).unwrap();
    for at in [0, 100 * PAGE, 255 * PAGE] {
        let len = (8 * 4096).min(256 * PAGE - at);
        assert_eq!(pinned(&file, &device, at, len as usize).unwrap() as u64, len);
        assert_eq!(file.cached_pages(), 0, "pages from byte {at} on");
    }
    cache.check().unwrap();
}

/// Many tasks pin, of a file that is larger than the cache: pages go while others are waited for.
#[test]
fn pins_under_pressure_are_all_answered() {
    let (cache, device) = (exact(), Device::new(4 * Cache::MEMORY_MIN));
    let file = open(&cache, &device);
    let mut rest = 200;
    while rest > 0 {
        let futures =
            (0..20).map(|n| file.pin_async((rest * 31 + n) * 17 * PAGE, 16 * PAGE as usize)).collect();
        let (results, _) = join_all(futures);
        for (n, result) in results.into_iter().enumerate() {
            let pinned = result.expect("there is room for all of them");
            let bytes: Vec<u8> = pinned.chunks().flatten().copied().collect();
            verify(&bytes, &device, (rest * 31 + n as u64) * 17 * PAGE);
        }
        rest -= 20;
    }
    cache.check().expect("it is sound");
}

#[test]
fn a_batch_asks_for_all_that_is_missing_and_answers_each_read() {
    let (cache, device) = (exact(), Device::new(100 * PAGE + 9));
    let file = open(&cache, &device);
    file.read_exact_at(&mut [0; PAGE as usize], 0).unwrap();
    device.fail(50);
    device.hold();
    let mut buffers = [[0_u8; 100]; 5];
    let places = [7, 30 * PAGE, 50 * PAGE, 100 * PAGE, 200 * PAGE];
    let mut reads: Vec<BatchRead<'_>> =
        buffers.iter_mut().zip(places).map(|(buffer, place)| BatchRead::new(buffer, place)).collect();
    {
        let mut batch = file.read_batch_async(&mut reads);
        assert!(poll_once(&mut batch).is_pending());
        assert_eq!(
            device.reads().len(),
            4,
            "one was cached, and all others are asked for: {:?}",
            device.reads()
        );
        device.release();
        block_on(batch);
    }
    let results: Vec<_> = reads.iter().map(|read| read.result().map_err(|error| error.kind())).collect();
    assert_eq!(results, [Ok(100), Ok(100), Err(ErrorKind::Io), Ok(9), Ok(0)]);
    for (read, place) in reads.iter().zip(places) {
        verify(read.bytes(), &device, place);
    }
}

#[test]
fn writes_and_syncs_are_awaited() {
    let (cache, folder) = (exact(), tempfile::tempdir().unwrap());
    let path = folder.path().join("file");
    let file = cache.open_with(&path, OpenOptions::new().write(true).create(true)).unwrap();
    assert_eq!(block_on(file.write_at_async(&[7; 5000], 100)).unwrap(), 5000);
    // Cached now, and overwritten at once.
    let again = poll_once(&mut file.write_at_async(&[8; 200], 300));
    assert!(matches!(again, Poll::Ready(Ok(200))), "{again:?}");
    assert_eq!(block_on(file.append_async(*b"end")).unwrap(), 5100);
    block_on(file.sync_data_async()).unwrap();
    let mut expected = vec![0; 100];
    expected.extend([7; 200]);
    expected.extend([8; 200]);
    expected.extend([7; 4600]);
    expected.extend(b"end");
    assert_eq!(std::fs::read(&path).unwrap(), expected);
    let reader = cache.open(&path).unwrap();
    let error = block_on(reader.write_at_async(b"x", 0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
}

/// A hundred syncs at once are made by some threads, and those end with the cache.
#[test]
fn more_calls_than_threads_are_all_made() {
    let (cache, folder) = (exact(), tempfile::tempdir().unwrap());
    let file =
        cache.open_with(folder.path().join("file"), OpenOptions::new().write(true).create(true)).unwrap();
    let calls: Vec<_> = (0..100_u64)
        .map(|n| {
            file.write_all_at(&n.to_le_bytes(), n * PAGE).unwrap();
            file.sync_all_async()
        })
        .collect();
    let (results, _) = join_all(calls);
    assert!(results.iter().all(std::result::Result::is_ok));
    assert_eq!(file.dirty_bytes().unwrap(), 0);
    // A task that was handed over runs although no caller waits for it.
    drop(file.append_async(vec![1; 10]));
    drop(file);
    cache.close().unwrap();
    while std::fs::metadata(folder.path().join("file")).unwrap().len() != 99 * PAGE + 8 + 10 {
        thread::yield_now();
    }
}
