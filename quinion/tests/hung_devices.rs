//! Hung devices: a device that is given reads and writes, and ends none, holds up its own users and no others.
//!
//! ```text
//!   the hung device has                          who goes on                 because
//!     more dirty pages than the ceiling allows     writers of other devices    its pages do not count for them
//!     a read or a write in flight, and all         a need of memory            it is told so after one wait, and the
//!     other memory is pinned                                                   needs after it at once
//! ```
//!
//! A device here keeps what it is given until a test has it answer. Where a call could wait for ever, it is waited for
//! with a bound, and the device answers before anything is asserted. `hung_revalidations.rs` has file systems that
//! answer no look at a file; `starvation.rs` has devices that end nothing while there is memory elsewhere.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use quinion::backend::{Attributes, Backend, Fill, Flush, FlushError, Identity, MemoryFile, SyncKind};
use quinion::internals::filemap::{OnPinned, Truncation};
use quinion::internals::writeback::WritebackOptions;
use quinion::{Cache, ErrorKind, File, OpenOptions, Pool, PoolOptions};
use quinion_testing::fixtures::writeback::{ALL, WritebackFixture};

const PAGE: usize = 4096;
/// No step takes so long where nothing hangs.
const BOUND: Duration = Duration::from_secs(60);
const EIO: i32 = libc::EIO;

/// A file of a device with a number, which keeps what it is given while it hangs.
struct Device {
    file: MemoryFile,
    number: u64,
    kept: Mutex<KeptRequests>,
}

#[derive(Default)]
struct KeptRequests {
    is_hung: bool,
    fills: Vec<Fill>,
    flushes: Vec<Flush>,
}

impl Device {
    fn new(number: u64, pages: usize) -> Arc<Self> {
        Arc::new(Self { file: MemoryFile::new(vec![7; pages * PAGE]), number, kept: Mutex::default() })
    }
    fn lock(&self) -> MutexGuard<'_, KeptRequests> {
        self.kept.lock().unwrap()
    }
    fn hang(&self) {
        self.lock().is_hung = true;
    }
    /// Ends all that it has kept, and all that comes.
    fn answer(&self) {
        let KeptRequests { fills, flushes, .. } = std::mem::take(&mut *self.lock());
        self.file.submit(fills);
        self.file.flush(flushes);
    }
    /// Ends the oldest flush that it has kept: takes it, or fails.
    fn end_flush(&self, failure: Option<i32>) {
        let flush = self.lock().flushes.remove(0);
        match failure {
            None => self.file.flush(vec![flush]),
            Some(errno) => {
                let error = io::Error::from_raw_os_error(errno);
                flush.complete(Err(FlushError { written: 0, error }));
            }
        }
    }
    fn flushes(&self) -> usize {
        self.lock().flushes.len()
    }
    fn requests(&self) -> usize {
        let kept = self.lock();
        kept.fills.len() + kept.flushes.len()
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.number)
    }
}

impl Backend for Device {
    fn name(&self) -> &'static str {
        "keeping"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let known = self.file.attributes()?;
        Ok(Attributes { identity: Identity { device: self.number, ..known.identity }, ..known })
    }
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn submit(&self, fills: Vec<Fill>) {
        let mut kept = self.lock();
        if kept.is_hung {
            return kept.fills.extend(fills);
        }
        drop(kept);
        self.file.submit(fills);
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        let mut kept = self.lock();
        if kept.is_hung {
            return kept.flushes.extend(flushes);
        }
        drop(kept);
        self.file.flush(flushes);
    }
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        self.file.sync(kind, range)
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        Backend::set_size(&self.file, bytes)
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < BOUND, "{what} did not come");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Has a thread do `work`, and says whether it ended in time; if it did not, `release` lets it go on.
fn ends_in_time(work: impl FnOnce() + Send, release: impl FnOnce()) -> bool {
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || {
            // Dropped at its end, also by a panic: then the scope has the panic.
            let _tell = tell;
            work();
        });
        let is_over = told.recv_timeout(BOUND) == Err::<(), _>(mpsc::RecvTimeoutError::Disconnected);
        if !is_over {
            release();
        }
        is_over
    })
}

/// Has a device answer at the end of a test, also of one that fails: no thread that waits for it is left.
struct AnswersAtEnd<'d>(&'d Device);

impl Drop for AnswersAtEnd<'_> {
    fn drop(&mut self) {
        self.0.answer();
    }
}

fn throttled(wait_max: Duration) -> WritebackOptions {
    WritebackOptions::new().background_share(5).throttle_share(10).wait_max(wait_max)
}

fn open(cache: &Cache, number: u64, pages: usize) -> (Arc<Device>, File) {
    let device = Device::new(number, pages);
    let write = OpenOptions::new().write(true).to_owned();
    let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
    (device, file)
}

fn dirty_pages(cache: &Cache) -> u64 {
    let stats = cache.stats();
    stats.dirty_pages + stats.writeback_pages
}

/// 1 A hung device has more dirty pages than the ceiling allows: its writer is refused.
/// 2 A file of another device is written to, far beyond the throttle, while it hangs. A page of the hung device is
///   refused as before.
/// 3 The device answers, and all that was taken is in the files.
#[test]
fn a_hung_device_above_the_ceiling_refuses_its_own_writers_and_no_others() {
    const PIECE: usize = 256 << 10;
    let (memory, pages) = (64 << 20, (64 << 20) / PAGE);
    let options = throttled(Duration::from_millis(100));
    let cache = Cache::builder().memory(memory).writeback(options).build().unwrap();
    let ((hung, hung_file), (healthy, healthy_file)) = (open(&cache, 1000, pages), open(&cache, 1001, pages));
    hung.hang();
    let (mut taken, mut results) = (0, Vec::new());
    let (mut is_refused, mut throttled) = (false, 0);
    let write_both = || {
        while hung_file.write_all_at(&[8; PIECE], taken as u64).is_ok() {
            taken += PIECE;
        }
        let mut write = |bytes: Range<usize>| {
            let pages = bytes.step_by(PAGE).map(|at| healthy_file.write_all_at(&[9; PAGE], at as u64));
            results.extend(pages);
        };
        let before = cache.stats().throttled_us;
        write(0..4 << 20);
        throttled = cache.stats().throttled_us - before;
        write(4 << 20..memory as usize / 4);
        is_refused = hung_file.write_all_at(&[1; PAGE], (memory as usize - PAGE) as u64).is_err();
    };
    let is_over = ends_in_time(write_both, || hung.answer());
    hung.answer();
    assert!(is_over, "a writer waits for ever");
    assert!(taken > memory as usize / 6 && taken < memory as usize / 4, "the hung device has {taken} bytes");
    let refused = results.iter().position(Result::is_err);
    assert_eq!(refused, None, "a page of the healthy device: {:?}", refused.map(|nth| &results[nth]));
    assert_eq!(throttled, 0, "microseconds of a writer that has not a tenth of memory dirty");
    assert!(is_refused, "the hung device has more than before");
    hung_file.sync_data().unwrap();
    healthy_file.sync_data().unwrap();
    hung.file.change(|bytes| assert!(bytes[..taken].iter().all(|&byte| byte == 8)));
    healthy.file.change(|bytes| assert!(bytes[..memory as usize / 4].iter().all(|&byte| byte == 9)));
    hung_file.write_all_at(&[1; PAGE], 0).unwrap();
    cache.check().unwrap();
}

/// One call that writes, or appends, as much as memory is, to a device that hangs, is throttled on its way.
#[test]
fn one_call_does_not_have_all_of_memory_for_a_hung_device() {
    for is_append in [false, true] {
        let memory = 64 << 20;
        let options = throttled(Duration::from_millis(100));
        let cache = Cache::builder().memory(memory).writeback(options).build().unwrap();
        let (hung, file) = open(&cache, 1000, 1);
        hung.hang();
        let bytes = vec![8; memory as usize];
        let (mut is_written, mut dirty) = (false, 0);
        let write = || {
            is_written = match is_append {
                true => file.append(&bytes).is_ok(),
                false => file.write_at(&bytes, PAGE as u64).is_ok_and(|written| written == bytes.len()),
            };
            dirty = dirty_pages(&cache) as usize * PAGE;
        };
        let is_over = ends_in_time(write, || hung.answer());
        hung.answer();
        assert!(is_over, "it waits for ever");
        // A fifth is the ceiling. A call looks again after a megabyte, which pieces of two exceed.
        let ceiling = memory as usize / 5;
        assert!(dirty > ceiling / 2 && dirty <= ceiling + (4 << 20), "{dirty} bytes, append: {is_append}");
        assert!(!is_written, "all of it is in the cache, append: {is_append}");
        file.sync_data().unwrap();
        let written = file.len() as usize - PAGE;
        assert!(written >= dirty - PAGE && written <= ceiling + (4 << 20), "{written} bytes");
        hung.file.change(|content| {
            assert_eq!(content.len(), PAGE + written);
            assert!(content[PAGE..].iter().all(|&byte| byte == 8));
        });
        // Nothing hangs any more.
        match is_append {
            true => assert_eq!(file.append(&bytes).unwrap() as usize, PAGE + written),
            false => assert_eq!(file.write_at(&bytes, 0).unwrap(), bytes.len()),
        }
        cache.check().unwrap();
    }
}

/// Many small files of several hung devices: no file has much, and all of them together do not have all of memory. A
/// healthy device's small files go on.
#[test]
fn small_files_of_hung_devices_are_refused_and_those_of_a_healthy_one_are_not() {
    const DEVICES: u64 = 4;
    let fixture = WritebackFixture::new(throttled(Duration::from_millis(2)));
    let limits = fixture.writeback.limits();
    let (mut hung, mut files, mut refused) = (Vec::new(), Vec::new(), BTreeSet::new());
    while refused.len() < DEVICES as usize && files.len() < 1000 {
        let number = 1000 + files.len() as u64 % DEVICES;
        let device = Device::new(number, 4);
        device.hang();
        let file = fixture.open(1 + files.len() as u32, Arc::clone(&device) as _);
        match fixture.writeback.throttle(&file.mapping, 4) {
            Ok(()) => file.write(0..4, 1),
            Err(_) => {
                refused.insert(number);
            }
        }
        hung.push(device);
        files.push(file);
    }
    let total = fixture.writeback.totals().total();
    let mut healthy = Vec::new();
    for nth in 0..50 {
        let file = fixture.open(2000 + nth, Device::new(2000, 4));
        healthy.push(fixture.writeback.throttle(&file.mapping, 4));
        file.write(0..4, 1);
    }
    hung.iter().for_each(|device| device.answer());
    assert_eq!(refused.len(), DEVICES as usize, "{total} pages are dirty, and {refused:?} are refused");
    assert!(total <= limits.most && total > limits.ceiling, "{total} pages are dirty, of {limits:?}");
    assert!(healthy.iter().all(Result::is_ok), "{healthy:?}");
    until("the write-back of all", || {
        files.iter().for_each(|file| fixture.writeback.start(&file.mapping, ALL));
        files.iter().all(|file| file.dirty() + file.under_way() == 0)
    });
}

/// 1 A device is given pages, and ends nothing: it is stuck.
/// 2 It fails, and fails again when it is tried again: it is stuck still, also while nothing is under way to it.
/// 3 It takes the pages: it is not stuck, and its pages count again.
#[test]
fn a_device_is_stuck_until_it_takes_pages_and_failures_are_no_progress() {
    let fixture = WritebackFixture::new(throttled(Duration::from_millis(40)));
    let device = Device::new(1000, 64);
    let file = fixture.open(1, Arc::clone(&device) as _);
    fixture.writeback.close(); // no other thread writes
    assert!(fixture.writeback.stuck_devices().is_empty());
    device.hang();
    for round in 1..=2 {
        (0..3).for_each(|nth| file.write(2 * nth..2 * nth + 1, round));
        fixture.writeback.start(&file.mapping, ALL);
        assert_eq!(device.flushes(), 3, "each is a run of its own");
        until("the stuck state", || fixture.writeback.stuck_devices() == BTreeSet::from([1000]));
        for left in (0..3).rev() {
            device.end_flush(Some(EIO));
            assert_eq!((device.flushes(), file.dirty()), (left, 3 - left as u64));
            assert_eq!(fixture.writeback.stuck_devices(), BTreeSet::from([1000]), "round {round}");
        }
    }
    fixture.writeback.start(&file.mapping, ALL);
    (0..3).for_each(|_| device.end_flush(None));
    assert_eq!((fixture.writeback.stuck_devices(), file.dirty()), (BTreeSet::new(), 0));
}

/// A device fails, and its only file is cut: nothing of it is dirty, and its number is not kept.
#[test]
fn a_device_without_dirty_pages_is_not_stuck() {
    let options =
        throttled(Duration::from_millis(4)).expire(Duration::ZERO).interval(Duration::from_millis(1));
    let fixture = WritebackFixture::new(options);
    let device = Device::new(1000, 64);
    let file = fixture.open(1, Arc::clone(&device) as _);
    device.hang();
    file.write(0..1, 1);
    until("a flush", || device.flushes() > 0);
    device.end_flush(Some(EIO));
    until("the stuck state", || fixture.writeback.stuck_devices() == BTreeSet::from([1000]));
    device.answer();
    Truncation::of(&fixture.filemap, &file.mapping).cut(0, OnPinned::Detach).unwrap();
    until("the end of the stuck state", || fixture.writeback.stuck_devices().is_empty());
}

/// A device that is slow and not stuck has more dirty pages than the ceiling allows. A writer of another device, which
/// has none, is held up for as long as a writer is at most, and goes on.
#[test]
fn a_slow_device_above_the_ceiling_refuses_no_writer_of_another() {
    let fixture = WritebackFixture::new(throttled(Duration::from_secs(2)));
    let limits = fixture.writeback.limits();
    let slow = Device::new(1000, 4000);
    let file = fixture.open(1, Arc::clone(&slow) as _);
    slow.hang();
    (0..limits.ceiling + 300).for_each(|nth| file.write(2 * nth..2 * nth + 1, 1));
    fixture.writeback.start(&file.mapping, ALL);
    let other = fixture.open(2, Device::new(1001, 64));
    let is_over = AtomicBool::new(false);
    let throttled = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                slow.end_flush(None);
                thread::sleep(Duration::from_millis(40));
            }
        });
        let throttled = fixture.writeback.throttle(&other.mapping, 10_000);
        is_over.store(true, Ordering::Relaxed);
        throttled
    });
    let total = fixture.writeback.totals().total();
    slow.answer();
    assert!(total > limits.ceiling, "{total} pages are dirty, of {limits:?}");
    throttled.unwrap();
}

/// A small cache whose memory may all be pinned, a pool of it, with that limit if there is one, and a file of a device
/// that hangs, with a request in flight for as long as the call of `test` takes.
fn with_request_in_flight(limit: Option<u64>, is_written: bool, test: impl FnOnce(&Pool, &Device, &File)) {
    let all = Cache::MEMORY_MIN;
    let options = WritebackOptions::new().wait_max(Duration::from_secs(2));
    let builder = Cache::builder().memory(all).pinned_max(all).readahead(0).writeback(options);
    let cache = builder.build().expect("a small cache");
    let options = limit.map_or_else(PoolOptions::new, |pages| PoolOptions::new().limit(pages * PAGE as u64));
    let pool = cache.add_pool("pool", options).unwrap();
    let hung = Device::new(1000, 256);
    let write = OpenOptions::new().write(true).to_owned();
    let never = pool.open_backend_with(Arc::clone(&hung) as _, &write).unwrap();
    hung.hang();
    thread::scope(|scope| {
        let _answers = AnswersAtEnd(&hung);
        scope.spawn(|| match is_written {
            true => {
                never.write_all_at(&[8; PAGE], 0).unwrap();
                never.sync_data().unwrap();
            }
            false => never.read_exact_at(&mut [0; 100], 0).unwrap(),
        });
        until("a request", || hung.requests() > 0);
        test(&pool, &hung, &never);
    });
    cache.check().unwrap();
}

/// Pins pages of `file` until that is refused.
fn pin_all(file: &File, pins: &mut Vec<quinion::Pinned>) {
    let mut pages = (0..2 * Cache::MEMORY_MIN).step_by(PAGE);
    let refused = pages.find_map(|at| file.pin(at, PAGE).map(|pin| pins.push(pin)).err());
    assert_eq!(refused.expect("memory ends").kind(), ErrorKind::NoMemory);
}

/// 1 A read of a device that hangs, or a write to it, is in flight. All other memory of the cache, or of the pool, is
///   pinned: the first need of memory is told after one wait, and those after it without that wait.
/// 2 The pins are dropped: there is memory, though the device still hangs.
#[test]
fn a_need_of_memory_is_told_of_a_hung_device_and_each_hang_is_waited_for_once() {
    // Two seconds for each would be more than the bound.
    const NEEDS: u64 = 40;
    for (limit, is_written) in [(None, false), (None, true), (Some(8), false), (Some(8), true)] {
        with_request_in_flight(limit, is_written, |pool, hung, _| {
            let file = pool.open_backend(Device::new(1001, 2 * Cache::MEMORY_MIN as usize / PAGE)).unwrap();
            let needs = || {
                let mut pins = Vec::new();
                pin_all(&file, &mut pins);
                for nth in 0..NEEDS {
                    let at = 2 * Cache::MEMORY_MIN - (1 + nth) * PAGE as u64;
                    let error = file.read_exact_at(&mut [0; PAGE], at).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::NoMemory);
                }
                drop(pins);
                let mut byte = [0];
                file.read_exact_at(&mut byte, 2 * Cache::MEMORY_MIN - 1).unwrap();
                assert_eq!(byte, [7]);
            };
            let is_over = ends_in_time(needs, || hung.answer());
            assert!(is_over, "limit {limit:?}, written {is_written}: a need waits for the hung device");
        });
    }
}

/// 1 A read of a device that is late is in flight, and all other memory is pinned.
/// 2 A second reader of that device waits: it would wait for the device in any case. Readers of another device are
///   told that there is no memory.
/// 3 The device answers, and the second reader has its page in the memory of the first.
#[test]
fn a_reader_of_a_late_device_waits_for_it_and_gets_no_error() {
    for limit in [None, Some(8)] {
        with_request_in_flight(limit, false, |pool, late, file| {
            let other = pool.open_backend(Device::new(1001, 2 * Cache::MEMORY_MIN as usize / PAGE)).unwrap();
            let mut pins = Vec::new();
            let mut is_early = false;
            let read = thread::scope(|scope| {
                // From here on each wait in vain ends soon.
                let is_told = ends_in_time(|| pin_all(&other, &mut pins), || late.answer());
                let second = scope.spawn(|| {
                    let mut byte = [0];
                    file.read_exact_at(&mut byte, 100 * PAGE as u64).map(|()| byte)
                });
                // Each of these takes as long as the second would if it were told, too.
                let told = (0..10).filter(|nth| {
                    let at = 2 * Cache::MEMORY_MIN - (1 + nth) * PAGE as u64;
                    other.read_exact_at(&mut [0; PAGE], at).is_err()
                });
                let told = told.count();
                is_early = second.is_finished();
                late.answer();
                assert!(is_told && told == 10, "{told} of 10 needs of other devices are told");
                second.join().unwrap()
            });
            assert!(!is_early, "limit {limit:?}: the second reader has not waited: {read:?}");
            assert_eq!(read.unwrap(), [7]);
        });
    }
}
