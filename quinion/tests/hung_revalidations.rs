//! Hung revalidations: a file system that answers no look at a file's times, as one of a network does whose server is
//! gone, holds up the users of its own files, and no other thread.
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
    Attributes, Backend, Fill, Flush, Identity, MemoryFile, ReapMode, ReapOutcome, SyncKind, WaitQueue,
};
use quinion::internals::filemap::{OnPinned, Truncation};
use quinion::internals::mapping::writeback_state::SyncRange;
use quinion::internals::system_files::{Creation, Engine, EngineOptions, InitialContent, OpenForWrite};
use quinion::internals::writeback::WritebackOptions;
use quinion::{Cache, ErrorKind, OpenOptions, PoolOptions};
use quinion_testing::doubles::{Faults, SimulatedBackend};
use quinion_testing::fixtures::writeback::{ALL, Opened, WritebackFixture};

const PAGE: usize = 4096;
/// No step takes so long where nothing hangs.
const BOUND: Duration = Duration::from_secs(10);
/// The most revalidations before flushes that may be queued for one device.
const REVALIDATIONS_BEFORE_MAX: u64 = 64;

/// A file whose attributes are kept back while it hangs. Its bytes come and go all the same.
#[derive(Debug)]
struct HangingRevalidations<B> {
    inner: B,
    device: u64,
    is_hung: AtomicBool,
    /// Whether the call that hands it flushes waits, too.
    is_stuck: AtomicBool,
    /// Revalidations that are kept back.
    revalidations: AtomicU64,
}

impl<B> HangingRevalidations<B> {
    fn new(inner: B, device: u64) -> Arc<Self> {
        let [is_hung, is_stuck] = [false, false].map(AtomicBool::new);
        Arc::new(Self { inner, device, is_hung, is_stuck, revalidations: AtomicU64::new(0) })
    }
    fn hang(&self) {
        self.is_hung.store(true, Ordering::Relaxed);
    }
    fn answer(&self) {
        self.is_hung.store(false, Ordering::Relaxed);
        self.is_stuck.store(false, Ordering::Relaxed);
    }
    fn revalidations(&self) -> u64 {
        self.revalidations.load(Ordering::Relaxed)
    }
}

impl<B: Backend> Backend for HangingRevalidations<B> {
    fn name(&self) -> &'static str {
        "hanging looks"
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.inner.attach(wait_queue);
    }
    fn attributes(&self) -> io::Result<Attributes> {
        if self.is_hung.load(Ordering::Relaxed) {
            self.revalidations.fetch_add(1, Ordering::Relaxed);
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
        until("an answer", Duration::MAX, || !self.is_stuck.load(Ordering::Relaxed));
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
    ends_within(BOUND, work, release)
}

fn ends_within(bound: Duration, work: impl FnOnce() + Send, release: impl FnOnce()) -> bool {
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || {
            work();
            let _ = tell.send(());
        });
        let is_over = told.recv_timeout(bound).is_ok();
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
    file.fixture.writeback.sync(&file.mapping, EVERYTHING, &file.handle()).unwrap();
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
        let device = HangingRevalidations::new(memory(64), device);
        let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
        (device, file)
    });
    let healthy = Arc::new(SimulatedBackend::of_memory(Arc::new(memory(64)), Faults::default()));
    let healthy_file = cache.open_backend_with(Arc::clone(&healthy) as _, &write).unwrap();
    for (device, file) in &hung_files {
        device.hang();
        file.write_all_at(&[8; 3 * PAGE], 0).unwrap();
    }
    until("a look", BOUND, || hung_files.iter().any(|(device, _)| device.revalidations() > 0));
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
    let fixture = WritebackFixture::new(by_hand());
    let hung = HangingRevalidations::new(memory(64), 1000);
    let file = fixture.open(1, Arc::clone(&hung) as _);
    file.write(0..4, 1);
    hung.hang();
    let start = || {
        fixture.writeback.write_for_reclaim();
        fixture.writeback.start(&file.mapping, ALL);
        fixture.writeback.write_for_reclaim();
        assert_eq!(file.dirty(), 4, "nothing is written without a look");
        assert_eq!(fixture.writeback.revalidations_before(), 1, "memory may come of it");
    };
    assert!(ends_in_time(start, || hung.answer()), "it waits for a look");
    until("its write-back", BOUND, || {
        file.dirty() + file.under_way() == 0 && fixture.writeback.revalidations_before() == 0
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
    let fixture = WritebackFixture::with_wait_queue(wait_queue, by_hand());
    let new = OpenForWrite { creation: Creation::MustBeNew, start: InitialContent::Kept, mode: 0o644 };
    let open = |name: &str| engine.open_for_writing(folder.path().join(name), new).unwrap();
    let hung = HangingRevalidations::new(open("hung"), 1000);
    let file = fixture.open(1, Arc::clone(&hung) as _);
    let healthy = fixture.open(2, Arc::new(open("healthy")));
    [&file, &healthy].iter().for_each(|file| file.set_size(64 * PAGE as u64));
    fixture.writeback.close(); // no other thread reaps
    file.write(0..4, 1);
    fixture.writeback.start_all(); // by this thread
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

/// A look counts, however long it took.
fn patient() -> WritebackFixture {
    let fixture = WritebackFixture::new(by_hand());
    fixture.writeback.set_revalidation_max(Duration::MAX);
    fixture
}

/// A file with pages on their way to a device that is paused, and their look before over.
struct FlushedFile<'s> {
    device: Arc<HangingRevalidations<SimulatedBackend>>,
    content: Arc<MemoryFile>,
    file: Opened<'s>,
}

fn flushed(fixture: &WritebackFixture, number: u32) -> FlushedFile<'_> {
    let content = Arc::new(memory(64));
    let simulated = SimulatedBackend::of_memory(Arc::clone(&content), Faults::default());
    let device = HangingRevalidations::new(simulated, 1000);
    let file = fixture.open(number, Arc::clone(&device) as _);
    device.inner.pause();
    file.write(0..4, 1);
    fixture.writeback.start(&file.mapping, ALL);
    until("a flush", BOUND, || device.inner.held() > 0);
    FlushedFile { device, content, file }
}

/// Files of the device of [`flushed`] whose looks after their flushes hang, one on each thread for such looks.
fn with_hung_revalidations_after(fixture: &WritebackFixture) -> Vec<FlushedFile<'_>> {
    let hung: Vec<_> = (100..104).map(|number| flushed(fixture, number)).collect();
    for FlushedFile { device, file, .. } in &hung {
        device.hang();
        device.inner.resume();
        fixture.wait_queue.wait(&**device, &mut || file.under_way() == 0);
    }
    until("their looks", BOUND, || hung.iter().all(|hung| hung.device.revalidations() > 0));
    hung
}

fn answer_all(files: &[FlushedFile<'_>]) {
    files.iter().for_each(|file| file.device.answer());
}

fn is_known(FlushedFile { device, file, .. }: &FlushedFile<'_>) -> bool {
    let probe = file.mapping.begin_revalidation();
    file.mapping.is_as_in(probe, &device.attributes().unwrap())
}

fn is_revalidated(file: &Opened<'_>) -> bool {
    let state = file.mapping.writeback();
    state.not_revalidated().is_none() && state.flushes_if_revalidated().is_some()
}

/// 1 A sync waits for a file's pages; when these are written, the look after that hangs.
/// 2 The sync looks itself, and does not return before it has.
/// 3 When it has returned another program writes the file: that is no change of the cache's own.
#[test]
fn a_sync_returns_after_the_look_and_a_later_change_is_others() {
    let fixture = patient();
    let flushed = flushed(&fixture, 1);
    let FlushedFile { device, content, file } = &flushed;
    thread::scope(|scope| {
        device.hang();
        let syncs = scope.spawn(|| sync(file));
        device.inner.resume();
        let began = Instant::now();
        while device.revalidations() < 2 && began.elapsed() < BOUND {
            thread::sleep(Duration::from_millis(1));
        }
        let (revalidations, early) = (device.revalidations(), syncs.is_finished());
        device.answer();
        assert!(!early, "what others change from here on would be taken for the cache's own");
        assert_eq!(revalidations, 2, "the sync does not look");
    });
    assert!(is_known(&flushed), "nobody else is there");
    content.change(|bytes| bytes[0] = 77);
    assert!(!is_known(&flushed), "that was somebody else");
}

/// Every thread that looks after flushes of the device hangs, in looks at other files. A sync of a file whose file
/// system answers is held up by none of them.
#[test]
fn a_sync_waits_for_no_look_at_another_file() {
    let fixture = patient();
    let healthy = flushed(&fixture, 1);
    let hung = with_hung_revalidations_after(&fixture);
    healthy.device.inner.resume();
    let is_over = ends_in_time(|| sync(&healthy.file), || answer_all(&hung));
    assert!(is_over, "it waits for the looks at other files");
    assert!(is_known(&healthy));
}

/// More looks before flushes hang than there are threads for them. The look after the flush of another file of the
/// device is had; and no more than a few of the looks before are queued, while the files beyond those come later.
#[test]
fn looks_before_flushes_are_bounded_and_hold_up_no_look_after() {
    let fixture = patient();
    let healthy = flushed(&fixture, 1);
    let files = 2..=REVALIDATIONS_BEFORE_MAX as u32 + 20;
    let hung: Vec<_> = files
        .map(|number| {
            let device = HangingRevalidations::new(memory(64), 1000);
            let file = fixture.open(number, Arc::clone(&device) as _);
            device.hang();
            file.write(0..2, 1);
            fixture.writeback.start(&file.mapping, ALL);
            (device, file)
        })
        .collect();
    until("a look", BOUND, || hung.iter().any(|(device, _)| device.revalidations() > 0));
    let queued = fixture.writeback.revalidations_before();
    healthy.device.inner.resume();
    fixture.wait_queue.wait(&*healthy.device, &mut || healthy.file.under_way() == 0);
    let began = Instant::now();
    while !is_revalidated(&healthy.file) && began.elapsed() < BOUND {
        thread::sleep(Duration::from_millis(1));
    }
    let is_revalidated = is_revalidated(&healthy.file);
    hung.iter().for_each(|(device, _)| device.answer());
    assert!(is_revalidated, "its look waits for those of others before their flushes");
    // The background asks beside this thread, and both may have found the last place free.
    assert!(
        (REVALIDATIONS_BEFORE_MAX..=REVALIDATIONS_BEFORE_MAX + 1).contains(&queued),
        "{queued} looks are queued"
    );
    until("the write-back of all", BOUND, || hung.iter().all(|(_, file)| file.dirty() == 0));
}

/// 1 A flush has ended, and the look after it is not over.
/// 2 Another program changes the file, and this one cuts it.
/// 3 The change is not taken for the cut's, nor for the flush's: neither at once nor when the look is over.
#[test]
fn a_cut_beside_a_look_that_is_due_hides_no_change_of_others() {
    let fixture = patient();
    let flushed = flushed(&fixture, 1);
    let hung = with_hung_revalidations_after(&fixture);
    let FlushedFile { device, content, file } = &flushed;
    device.inner.resume();
    fixture.wait_queue.wait(&**device, &mut || file.under_way() == 0);
    content.change(|bytes| bytes[0] = 77);
    Truncation::of(&fixture.filemap, &file.mapping).cut(2 * PAGE as u64, OnPinned::Detach).unwrap();
    let probe = file.mapping.begin_revalidation();
    let is_revalidated_early = file.mapping.writeback().not_revalidated().is_none();
    let is_known_early = is_revalidated_early && file.mapping.is_as_in(probe, &device.attributes().unwrap());
    answer_all(&hung);
    until("the look", BOUND, || is_revalidated(file));
    assert!(!is_known_early && !is_known(&flushed), "its clean pages are old");
}

/// 1 Another program changes a file that has dirty pages.
/// 2 A thread has the file for itself, to forget pages of it, and waits for its device.
/// 3 A sync begins, and waits for that thread: no flush begins without a look, which comes first.
#[test]
fn a_sync_that_waits_for_the_file_to_be_free_looks_at_it_before_it_flushes() {
    let fixture = WritebackFixture::new(by_hand());
    let device = HangingRevalidations::new(memory(64), 1000);
    let file = fixture.open(1, Arc::clone(&device) as _);
    file.write(0..4, 1);
    device.inner.change(|bytes| bytes[40 * PAGE] = 77);
    let alone = file.mapping.invalidate_alone();
    thread::scope(|scope| {
        let syncs = scope.spawn(|| sync(&file));
        // It is before the lock, or soon there: it passes when the lock is free, and the test holds in any order.
        thread::sleep(Duration::from_millis(50));
        drop(alone);
        syncs.join().unwrap();
    });
    assert_eq!(file.dirty(), 0);
    let probe = file.mapping.begin_revalidation();
    let is_known = file.mapping.is_as_in(probe, &device.attributes().unwrap());
    assert!(!is_known, "its clean pages are old");
}

/// 1 A file is dirty, and another thread has it for itself.
/// 2 The background comes to it: it flushes nothing, and does not look. When the file is free it does both.
#[test]
fn a_round_leaves_a_file_that_a_thread_has_for_itself_to_the_next() {
    let fixture = WritebackFixture::new(by_hand());
    let device = HangingRevalidations::new(memory(64), 1000);
    let file = fixture.open(1, Arc::clone(&device) as _);
    file.write(0..4, 1);
    device.inner.change(|bytes| bytes[40 * PAGE] = 77);
    let alone = file.mapping.invalidate_alone();
    fixture.writeback.write_for_reclaim();
    assert_eq!((file.dirty(), fixture.writeback.revalidations_before()), (4, 0));
    drop(alone);
    fixture.writeback.write_for_reclaim();
    until("its write-back", BOUND, || file.dirty() + file.under_way() == 0 && is_revalidated(&file));
    let probe = file.mapping.begin_revalidation();
    assert!(!file.mapping.is_as_in(probe, &device.attributes().unwrap()), "its clean pages are old");
}

/// A look that took long may have seen what others did meanwhile.
#[test]
fn a_look_that_comes_late_counts_as_not_had() {
    let fixture = patient();
    let flushed = flushed(&fixture, 1);
    let FlushedFile { device, content, file } = &flushed;
    device.hang();
    device.inner.resume();
    until("the look", BOUND, || device.revalidations() > 0);
    content.change(|bytes| bytes[0] = 77);
    fixture.writeback.set_revalidation_max(Duration::ZERO);
    device.answer();
    until("the end of the look", BOUND, || is_revalidated(file));
    assert!(!is_known(&flushed), "its clean pages may be old");
}

/// All memory is dirty, of a file whose file system answers no look. A thread that needs some is told so, as where a
/// device takes nothing.
#[test]
fn a_need_of_memory_that_a_hung_look_has_is_told() {
    let options = by_hand().wait_max(Duration::from_millis(20));
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).writeback(options).build().unwrap();
    let bytes = 2 * Cache::MEMORY_MIN as usize;
    let device = HangingRevalidations::new(memory(bytes / PAGE), 1000);
    let write = OpenOptions::new().write(true).to_owned();
    let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
    let other = cache.open_backend(Arc::new(memory(64))).unwrap();
    device.hang();
    let fill_memory = || {
        let mut pieces = (0..bytes).step_by(256 << 10);
        let refused = pieces.find_map(|at| file.write_all_at(&[8; 256 << 10], at as u64).err());
        assert_eq!(refused.expect("there is no room for all of it").kind(), ErrorKind::NoMemory);
        let error = other.read_exact_at(&mut [0; PAGE], 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoMemory);
    };
    assert!(ends_in_time(fill_memory, || device.answer()), "it waits for a look");
    file.sync_data().unwrap();
    other.read_exact_at(&mut [0; PAGE], 0).unwrap();
}

/// A file system that answers no look has more dirty pages than the ceiling allows, and none of them is under way. Its
/// writer is refused, and one of another device is not.
#[test]
fn a_writer_is_not_refused_for_the_pages_of_a_device_whose_looks_hang() {
    const PIECE: usize = 256 << 10;
    let options = WritebackOptions::new().background_share(5).throttle_share(10);
    let options = options.wait_max(Duration::from_millis(100));
    let cache = Cache::builder().memory(64 << 20).writeback(options).build().unwrap();
    let write = OpenOptions::new().write(true).to_owned();
    let device = HangingRevalidations::new(memory(8192), 1000);
    let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
    let healthy = cache.open_backend_with(Arc::new(memory(1000)), &write).unwrap();
    device.hang();
    let (mut pieces, mut refused, mut throttled) = (0, None, 0);
    let write = || {
        while file.write_all_at(&[8; PIECE], (pieces * PIECE) as u64).is_ok() {
            pieces += 1;
        }
        let before = cache.stats().throttled_us;
        let mut pages = (0..1000).map(|page| healthy.write_all_at(&[9; PAGE], page * PAGE as u64));
        refused = pages.find_map(Result::err);
        throttled = cache.stats().throttled_us - before;
    };
    assert!(ends_within(6 * BOUND, write, || device.answer()), "a writer waits for ever");
    assert!(refused.is_none(), "{refused:?}");
    assert_eq!(throttled, 0, "microseconds of a writer that has not a tenth of memory dirty");
    assert!(pieces * PIECE > (64 << 20) / 6, "{pieces} pieces are dirty");
    file.sync_data().unwrap();
    device.inner.change(|bytes| assert!(bytes[..pieces * PIECE].iter().all(|byte| *byte == 8)));
}

/// 1 A file's pages are dirty, and its file system answers no look.
/// 2 All other memory, or all of a pool, is pinned. The first need that fails waits for the look; those after it say so
///   at once, though the look still hangs.
/// 3 The file system answers, and there is memory.
#[test]
fn each_hang_is_waited_for_once_and_not_by_each_need() {
    const NEEDS: u64 = 30;
    let options = by_hand().wait_max(Duration::from_secs(2));
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).writeback(options).build().unwrap();
    let pool = cache.add_pool("pool", PoolOptions::new().limit(1 << 20)).unwrap();
    let bytes = 2 * Cache::MEMORY_MIN as usize;
    let device = HangingRevalidations::new(memory(bytes / PAGE), 1000);
    let write = OpenOptions::new().write(true).to_owned();
    let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
    let other = cache.open_backend(Arc::new(memory(bytes / PAGE))).unwrap();
    let of_pool = pool.open_backend(Arc::new(memory(bytes / PAGE))).unwrap();
    device.hang();
    let pinned: Vec<_> = (0..256).map_while(|page| of_pool.pin(page * PAGE as u64, PAGE).ok()).collect();
    let fill_memory_and_want_more = || {
        let mut pieces = (0..bytes).step_by(256 << 10);
        let refused = pieces.find_map(|at| file.write_all_at(&[8; 256 << 10], at as u64).err());
        assert_eq!(refused.expect("there is no room for all of it").kind(), ErrorKind::NoMemory);
        for at in 0..NEEDS {
            let error = other.read_exact_at(&mut [0; PAGE], at * PAGE as u64).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoMemory);
            let error = of_pool.read_exact_at(&mut [0; PAGE], (1000 + at) * PAGE as u64).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoMemory);
        }
    };
    // Two seconds each would be two minutes.
    let is_over = ends_within(6 * BOUND, fill_memory_and_want_more, || device.answer());
    assert!(is_over, "each of them waits for the look");
    drop(pinned);
    file.sync_data().unwrap();
    other.read_exact_at(&mut [0; PAGE], 0).unwrap();
    of_pool.read_exact_at(&mut [0; PAGE], 0).unwrap();
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
        let device = HangingRevalidations::new(simulated, number);
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
    let fixture = WritebackFixture::new(by_hand());
    let devices = [1000, 1001, 1002].map(|number| HangingRevalidations::new(memory(64), number));
    let files = [0, 1, 2].map(|at| fixture.open(at as u32 + 1, Arc::clone(&devices[at]) as _));
    files.iter().for_each(|file| file.write(0..4, 1));
    [&devices[0], &devices[2]].iter().for_each(|device| device.hang());
    thread::scope(|scope| {
        let end = scope.spawn(|| fixture.writeback.write_out_all());
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

/// 1 Threads are at the submission of two devices' pages, which does not return.
/// 2 The cache ends: the pages of a third device are written all the same.
#[test]
fn the_end_of_a_cache_writes_healthy_files_beside_stuck_submissions() {
    let fixture = WritebackFixture::new(by_hand());
    let devices = [1000, 1001, 1002].map(|number| HangingRevalidations::new(memory(64), number));
    let files = [0, 1, 2].map(|at| fixture.open(at as u32 + 1, Arc::clone(&devices[at]) as _));
    files.iter().for_each(|file| file.write(0..4, 1));
    for at in [0, 2] {
        devices[at].is_stuck.store(true, Ordering::Relaxed);
        fixture.writeback.start(&files[at].mapping, ALL);
        until("a submission", BOUND, || files[at].under_way() > 0);
    }
    thread::scope(|scope| {
        let end = scope.spawn(|| fixture.writeback.write_out_all());
        let began = Instant::now();
        while files[1].dirty() + files[1].under_way() > 0 && began.elapsed() < BOUND {
            thread::sleep(Duration::from_millis(1));
        }
        let left = files[1].dirty() + files[1].under_way();
        devices.iter().for_each(|device| device.answer());
        assert_eq!(left, 0, "pages of the healthy file");
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
    let device = HangingRevalidations::new(simulated, 1000);
    let write = OpenOptions::new().write(true).to_owned();
    let file = cache.open_backend_with(Arc::clone(&device) as _, &write).unwrap();
    device.inner.pause();
    file.write_all_at(&[8; 3 * PAGE], 0).unwrap();
    until("a flush", BOUND, || device.inner.held() > 0);
    device.hang();
    device.inner.resume();
    until("the look", BOUND, || device.revalidations() > 0);
    let end = || {
        drop(file);
        drop(cache);
    };
    assert!(ends_in_time(end, || device.answer()), "the end waits for a look");
    content.change(|bytes| assert!(bytes[..3 * PAGE].iter().all(|byte| *byte == 8)));
}
