//! Hung looks: a file system that answers no look at a file's times, as one of a network does whose server is gone,
//! holds up the users of its own files, and no other thread.
//!
//! ```text
//!   who looks at a file               for whom                          what may hang with it
//!     a sync, a cut                   its own caller                    its own caller
//!     the background of write-back    all files                         a thread of the file's device
//!     a thread short of memory        itself, by any file               the same
//!     the leader of a ring            whoever waits there               the same
//! ```
//!
//! The file systems here are files in memory, or of a folder, whose attributes are kept back for as long as a test
//! wants. Each test names a thread that would hang if it looked itself, and waits for it with a bound.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use quinion::backend::{
    Attributes, Backend, Creation, Engine, EngineOptions, Fill, Flush, Identity, InitialContent, MemoryFile,
    ReapMode, ReapOutcome, SyncKind, WaitQueue, WriteOptions,
};
use quinion::internals::mapping::writeback_state::SyncRange;
use quinion::internals::writeback::WritebackOptions;
use quinion::{Cache, OpenOptions};
use quinion_testing::doubles::{Faults, SimulatedBackend};
use quinion_testing::stages::writeback::{ALL, Opened, Stage};

const PAGE: usize = 4096;
/// No step takes so long where nothing hangs.
const BOUND: Duration = Duration::from_secs(10);
/// Longer than any step that does not hang.
const LONGER: Duration = Duration::from_millis(300);
/// Longer than a look may take that counts.
const TOO_LONG: Duration = Duration::from_millis(1200);

/// A file whose attributes are kept back while it hangs. Its bytes come and go all the same.
#[derive(Debug)]
struct HangingLooks<B> {
    inner: B,
    device: u64,
    is_hung: AtomicBool,
    /// Looks that are kept back.
    looks: AtomicU64,
}

impl<B> HangingLooks<B> {
    fn new(inner: B, device: u64) -> Arc<Self> {
        Arc::new(Self { inner, device, is_hung: AtomicBool::new(false), looks: AtomicU64::new(0) })
    }
    fn hang(&self) {
        self.is_hung.store(true, Ordering::Relaxed);
    }
    fn answer(&self) {
        self.is_hung.store(false, Ordering::Relaxed);
    }
    fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }
}

impl<B: Backend> Backend for HangingLooks<B> {
    fn name(&self) -> &'static str {
        "hanging looks"
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.inner.attach(wait_queue);
    }
    fn attributes(&self) -> io::Result<Attributes> {
        if self.is_hung.load(Ordering::Relaxed) {
            self.looks.fetch_add(1, Ordering::Relaxed);
            until("an answer", Duration::MAX, || !self.is_hung.load(Ordering::Relaxed));
        }
        let known = self.inner.attributes()?;
        Ok(Attributes { identity: Identity { device: self.device, ..known.identity }, ..known })
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.inner.submit(fills);
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.inner.reap(how, done)
    }
    fn wants_leader(&self) -> bool {
        self.inner.wants_leader()
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        self.inner.flush(flushes);
    }
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        self.inner.sync(kind, range)
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.inner.set_size(bytes)
    }
}

fn until(what: &str, bound: Duration, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < bound, "{what} did not come");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Has a thread do `work`, and says whether it ended in time. What hangs is let go of by `release` then.
fn ends_in_time(work: impl FnOnce() + Send, release: impl FnOnce()) -> bool {
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || {
            work();
            let _ = tell.send(());
        });
        let is_over = told.recv_timeout(BOUND).is_ok();
        release();
        is_over
    })
}

fn by_hand() -> WritebackOptions {
    let long = Duration::from_secs(60);
    WritebackOptions::new().background_share(80).throttle_share(80).expire(long).interval(long).wait_max(long)
}

fn memory(pages: usize) -> MemoryFile {
    MemoryFile::new(vec![0; pages * PAGE])
}

const EVERYTHING: SyncRange<'static> = SyncRange { kind: SyncKind::Data, pages: &ALL };

fn sync(file: &Opened<'_>) {
    file.stage.writeback.sync(&file.mapping, EVERYTHING, &file.handle()).unwrap();
}

/// 1 A file is dirty, and its file system answers no look.
/// 2 The background comes to it, and is to come to a healthy file's page in its time.
/// 3 The file system answers again, and what was dirty is written.
#[test]
fn a_hung_look_holds_up_no_write_back_of_others() {
    let options =
        WritebackOptions::new().expire(Duration::from_millis(10)).interval(Duration::from_millis(10));
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).writeback(options).build().unwrap();
    let write = OpenOptions::new().write(true).to_owned();
    let hung_files = [1000, 1000, 1000, 1001].map(|device| {
        let device = HangingLooks::new(memory(64), device);
        let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
        (device, file)
    });
    let healthy = Arc::new(SimulatedBackend::of_memory(Arc::new(memory(64)), Faults::default()));
    let healthy_file = cache.open_backend_with(Arc::clone(&healthy) as _, &write).unwrap();
    for (device, file) in &hung_files {
        device.hang();
        file.write_all_at(&[8; 3 * PAGE], 0).unwrap();
    }
    until("a look", BOUND, || hung_files.iter().any(|(device, _)| device.looks() > 0));
    healthy_file.write_all_at(&[9; 100], 0).unwrap();
    let began = Instant::now();
    while healthy.writes() == 0 && began.elapsed() < BOUND {
        thread::sleep(Duration::from_millis(1));
    }
    let writes = healthy.writes();
    hung_files.iter().for_each(|(device, _)| device.answer());
    assert!(writes > 0, "a healthy file's page was not written");
    until("the write-back of the others", BOUND, || {
        hung_files.iter().all(|(_, file)| file.dirty_bytes().unwrap() == 0)
    });
    for (device, file) in &hung_files {
        file.sync_data().unwrap();
        device.inner.change(|bytes| assert!(bytes[..3 * PAGE].iter().all(|byte| *byte == 8)));
    }
    cache.check().unwrap();
}

/// A thread that wants memory starts write-back of any file, and so does a writer above the throttle, a handle that is
/// closed, and one who asks for write-back: none of them waits for a look.
#[test]
fn a_thread_that_starts_write_back_waits_for_no_look() {
    let stage = Stage::new(by_hand());
    let hung = HangingLooks::new(memory(64), 1000);
    let file = stage.open(1, Arc::clone(&hung) as _);
    file.write(0..4, 1);
    hung.hang();
    let start = || {
        stage.writeback.write_for_reclaim();
        stage.writeback.start(&file.mapping, ALL);
        stage.writeback.write_for_reclaim();
        assert_eq!(file.dirty(), 4, "nothing is written without a look");
        assert_eq!(stage.writeback.under_way().0, 1, "memory may come of it");
    };
    assert!(ends_in_time(start, || hung.answer()), "it waits for a look");
    until("its write-back", BOUND, || {
        file.dirty() + file.under_way() == 0 && stage.writeback.under_way().0 == 0
    });
    file.mapping.check().unwrap();
}

/// 1 A flush of a file has ended in the kernel, and its file system answers no look.
/// 2 A thread that waits for another file of the same ring leads, and ends that flush.
#[test]
fn the_leader_of_a_ring_waits_for_no_look() {
    let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let wait_queue = Arc::new(WaitQueue::new());
    let engine = Engine::new(Arc::clone(&wait_queue), EngineOptions::default());
    let stage = Stage::with_wait_queue(wait_queue, by_hand());
    let new = WriteOptions { creation: Creation::MustBeNew, start: InitialContent::Kept, mode: 0o644 };
    let open = |name: &str| engine.open_for_writing(folder.path().join(name), new).unwrap();
    let hung = HangingLooks::new(open("hung"), 1000);
    let file = stage.open(1, Arc::clone(&hung) as _);
    let healthy = stage.open(2, Arc::new(open("healthy")));
    [&file, &healthy].iter().for_each(|file| file.set_size(64 * PAGE as u64));
    stage.writeback.close(); // no other thread reaps, and looks are this thread's
    file.write(0..4, 1);
    stage.writeback.start(&file.mapping, ALL);
    hung.hang();
    let lead = || {
        let mut generation = 1;
        while file.under_way() > 0 {
            healthy.write(0..1, generation);
            sync(&healthy);
            generation += 1;
        }
    };
    assert!(ends_in_time(lead, || hung.answer()), "the leader waits for a look");
    sync(&file);
    engine.drain();
}

/// A file with pages on their way to a device that is paused, and their look before over.
fn flushed(stage: &Stage) -> (Arc<HangingLooks<SimulatedBackend>>, Arc<MemoryFile>, Opened<'_>) {
    let content = Arc::new(memory(64));
    let simulated = SimulatedBackend::of_memory(Arc::clone(&content), Faults::default());
    let device = HangingLooks::new(simulated, 1000);
    let file = stage.open(1, Arc::clone(&device) as _);
    device.inner.pause();
    file.write(0..4, 1);
    stage.writeback.start(&file.mapping, ALL);
    until("a flush", BOUND, || device.inner.held() > 0);
    (device, content, file)
}

fn is_known(file: &Opened<'_>, device: &dyn Backend) -> bool {
    let look = file.mapping.begin_look();
    file.mapping.is_as_in(look, &device.attributes().unwrap())
}

/// 1 A sync waits for a file's pages; when these are written, the look after that hangs.
/// 2 The sync does not return before it.
/// 3 When it has returned another program writes the file: that is no change of the cache's own.
#[test]
fn a_sync_returns_after_the_look_and_a_later_change_is_others() {
    let stage = Stage::new(by_hand());
    let (device, content, file) = flushed(&stage);
    thread::scope(|scope| {
        device.hang();
        let syncs = scope.spawn(|| sync(&file));
        device.inner.resume();
        until("the look", BOUND, || device.looks() > 0);
        thread::sleep(LONGER);
        let early = syncs.is_finished();
        device.answer();
        assert!(!early, "what others change from here on would be taken for the cache's own");
    });
    assert!(is_known(&file, &*device), "nobody else is there");
    content.change(|bytes| bytes[0] = 77);
    assert!(!is_known(&file, &*device), "that was somebody else");
}

/// A look that took long may have seen what others did meanwhile.
#[test]
fn a_look_that_comes_late_counts_as_not_had() {
    let stage = Stage::new(by_hand());
    let (device, content, file) = flushed(&stage);
    device.hang();
    device.inner.resume();
    until("the look", BOUND, || device.looks() > 0);
    content.change(|bytes| bytes[0] = 77);
    thread::sleep(TOO_LONG);
    device.answer();
    sync(&file);
    assert!(!is_known(&file, &*device), "its clean pages may be old");
}

/// Six devices take writes and end none. Each has as much under way as the background gives one file, and not what
/// the others have left of a bound for all.
#[test]
fn devices_that_never_answer_leave_others_the_whole_of_their_bound() {
    const FILE_PAGES: u64 = 1024;
    let options =
        WritebackOptions::new().expire(Duration::from_millis(10)).interval(Duration::from_millis(10));
    let options = options.background_share(60).throttle_share(70);
    let cache = Cache::builder().memory(128 << 20).writeback(options).build().unwrap();
    let write = OpenOptions::new().write(true).to_owned();
    let files = [1000, 1001, 1002, 1003, 1004, 1005].map(|number| {
        let simulated = SimulatedBackend::of_memory(Arc::new(memory(2048)), Faults::default());
        let device = HangingLooks::new(simulated, number);
        device.inner.pause();
        let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
        file.write_all_at(&vec![8; 2048 * PAGE], 0).unwrap();
        (device, file)
    });
    let began = Instant::now();
    let under_way = || cache.stats().writeback_pages;
    while under_way() < 6 * FILE_PAGES && began.elapsed() < BOUND {
        thread::sleep(Duration::from_millis(1));
    }
    let most = under_way();
    files.iter().for_each(|(device, _)| device.inner.resume());
    assert_eq!(most, 6 * FILE_PAGES);
    files.iter().for_each(|(_, file)| file.sync_data().unwrap());
    cache.check().unwrap();
}

/// 1 Three devices have dirty pages. Two answer no look, which their pages need before they are written.
/// 2 The cache ends: it waits for these two, and writes the pages of the third.
#[test]
fn the_end_of_a_cache_writes_healthy_files_beside_hung_ones() {
    let stage = Stage::new(by_hand());
    let devices = [1000, 1001, 1002].map(|number| HangingLooks::new(memory(64), number));
    let files = [0, 1, 2].map(|at| stage.open(at as u32 + 1, Arc::clone(&devices[at]) as _));
    files.iter().for_each(|file| file.write(0..4, 1));
    [&devices[0], &devices[2]].iter().for_each(|device| device.hang());
    thread::scope(|scope| {
        let end = scope.spawn(|| stage.writeback.write_out_all());
        let began = Instant::now();
        while files[1].dirty() + files[1].under_way() > 0 && began.elapsed() < BOUND {
            thread::sleep(Duration::from_millis(1));
        }
        let (left, is_over) = (files[1].dirty() + files[1].under_way(), end.is_finished());
        devices.iter().for_each(|device| device.answer());
        assert!(left == 0 && !is_over, "{left} pages of the healthy file are left");
        assert_eq!(end.join().unwrap(), 0);
    });
    assert!(files.iter().all(|file| file.dirty() == 0));
}

/// All is written when the cache ends, and a look hangs.
#[test]
fn a_cache_ends_though_a_look_hangs() {
    let options =
        WritebackOptions::new().expire(Duration::from_millis(10)).interval(Duration::from_millis(10));
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).writeback(options).build().unwrap();
    let content = Arc::new(memory(64));
    let simulated = SimulatedBackend::of_memory(Arc::clone(&content), Faults::default());
    let device = HangingLooks::new(simulated, 1000);
    let write = OpenOptions::new().write(true).to_owned();
    let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
    device.inner.pause();
    file.write_all_at(&[8; 3 * PAGE], 0).unwrap();
    until("a flush", BOUND, || device.inner.held() > 0);
    device.hang();
    device.inner.resume();
    until("the look", BOUND, || device.looks() > 0);
    let end = || {
        drop(file);
        drop(cache);
    };
    assert!(ends_in_time(end, || device.answer()), "the end waits for a look");
    content.change(|bytes| assert!(bytes[..3 * PAGE].iter().all(|byte| *byte == 8)));
}
