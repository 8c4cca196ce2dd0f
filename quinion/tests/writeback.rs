//! Writeback: what is dirty reaches the file, in runs and no further than its end; what a sync has promised is there;
//! and a handle that cannot be promised durability is told, once.
//! Files of a small cache whose pages are written by the test itself, over memory, devices with faults, disks that
//! remember, and files.

use quinion_testing::hazard;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use quinion::OnPinned;
use quinion::backend::{Backend, Mechanism, MemoryFile, SyncKind, WaitQueue};
use quinion::internals::filemap::Truncation;
use quinion::internals::mapping::FolioLifetime;
use quinion::internals::mapping::writeback_state::SyncRange;
use quinion::internals::readahead::{Config, Readahead};
use quinion::internals::stats::Count;
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::system_files::{Creation, Engine, EngineOptions, InitialContent, OpenForWrite};
use quinion::internals::units::PAGE_SIZE;
use quinion::internals::writeback::WritebackOptions;
use quinion_testing::doubles::{
    CompletionOrder, CrashDisk, FailureCount, Faults, SimulatedBackend, WriteFaults,
};
use quinion_testing::fixtures::writeback::{
    ALL, Early, Opened, RecordingBackend, WritebackFixture, content, generation_in, pages,
};

const EIO: i32 = libc::EIO;
const ENOSPC: i32 = libc::ENOSPC;
const LONG: Duration = Duration::from_secs(60);
const PAGE: u64 = PAGE_SIZE as u64;
const EVERYTHING: SyncRange<'static> = SyncRange { kind: SyncKind::Data, pages: &ALL };

fn by_hand() -> WritebackOptions {
    WritebackOptions::new().background_share(80).throttle_share(80).expire(LONG).interval(LONG).wait_max(LONG)
}

fn memory(pages: u64) -> Arc<MemoryFile> {
    Arc::new(MemoryFile::new(vec![0; (pages * PAGE) as usize]))
}

fn simulated(disk: &Arc<CrashDisk>, faults: Faults) -> Arc<SimulatedBackend> {
    Arc::new(SimulatedBackend::of_crash_disk(Arc::clone(disk), faults))
}

fn disk(pages: u64) -> Arc<CrashDisk> {
    Arc::new(CrashDisk::new(vec![0; (pages * PAGE) as usize]))
}

fn bytes_of(file: &MemoryFile) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.change(|content| bytes.clone_from(content));
    bytes
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LONG, "{what} never came");
        std::thread::yield_now();
    }
}

#[test]
fn runs_follow_each_other_and_are_a_megabyte_at_most() {
    let fixture = WritebackFixture::new(by_hand());
    let device = RecordingBackend::new(memory(1000));
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    // One by one from the back, so that frames do not follow each other by luck alone.
    for page in (0..600).rev() {
        file.write(page..page + 1, 1);
    }
    file.write(700..701, 1);
    file.sync(&file.handle()).unwrap();
    let mut flushes = device.take_flushes();
    flushes.sort_unstable();
    let mut at = 0;
    for &(position, len) in &flushes {
        assert!(len <= 1 << 20 && len.is_multiple_of(PAGE_SIZE), "{len} bytes");
        assert!(position == at || position == 700 * PAGE, "each page once, and no other: {position}");
        at = position + len as u64;
    }
    assert_eq!((at, file.dirty(), file.under_way()), (701 * PAGE, 0, 0));
    file.mapping.check().unwrap();
    // And what follows each other in memory goes together.
    let run = fixture.open(2, Arc::clone(&device) as Arc<dyn Backend>);
    run.write(0..512, 1);
    run.sync(&run.handle()).unwrap();
    assert!(device.take_flushes().len() <= 16, "fresh frames come in a row");
}

#[test]
fn no_byte_is_written_behind_the_end() {
    let fixture = WritebackFixture::new(by_hand());
    let inner = Arc::new(MemoryFile::new(Vec::new()));
    let device = RecordingBackend::new(Arc::clone(&inner) as Arc<dyn Backend>);
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    file.set_size(2 * PAGE + 100);
    file.write(0..5, 3);
    file.sync(&file.handle()).unwrap();
    let bytes = bytes_of(&inner);
    assert_eq!(bytes.len() as u64, 2 * PAGE + 100);
    assert_eq!(bytes[2 * PAGE_SIZE..], content(2, 3)[..100]);
    assert_eq!(file.mapping.writeback().size_on_device(), 2 * PAGE + 100);
    assert_eq!(file.dirty(), 2, "what lies behind the end waits until it does not");
    file.set_size(5 * PAGE);
    file.write(2..3, 4); // who extends the file writes to its last page
    file.sync(&file.handle()).unwrap();
    let bytes = bytes_of(&inner);
    assert_eq!((0..5).map(|page| generation_in(&bytes, page)).collect::<Vec<_>>(), [3, 3, 4, 3, 3].map(Some));
}

#[test]
fn later_dirtying_does_not_prolong_a_sync() {
    let fixture = Arc::new(WritebackFixture::new(by_hand()));
    let device = RecordingBackend::new(memory(2000));
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    file.write(0..300, 1);
    let (theirs, mapping, generation) = (Arc::clone(&fixture), Arc::clone(&file.mapping), AtomicU32::new(2));
    device.before_flush(move || {
        // A writer continues, before and behind the sync's place, each time it writes something.
        let file = Opened { fixture: &theirs, mapping: Arc::clone(&mapping) };
        let generation = generation.fetch_add(1, Ordering::Relaxed);
        file.write(0..400, generation);
    });
    file.sync(&file.handle()).unwrap();
    let written: u64 = device.take_flushes().iter().map(|(_, len)| *len as u64 / PAGE).sum();
    assert_eq!(written, 300, "each page that was dirty, once");
    assert_eq!(file.dirty(), 400, "and what came later is the next one's");
    file.mapping.check().unwrap();
}

/// What is under way may have been read by the device before the page was changed.
#[test]
fn a_page_that_changed_while_it_was_written_is_written_again_by_a_sync() {
    let fixture = WritebackFixture::new(by_hand());
    fixture.writeback.close(); // no other thread reaps
    let file_bytes = memory(64);
    let file = fixture.open(1, Early::new(Arc::clone(&file_bytes)));
    file.write(0..8, 1);
    fixture.writeback.start(&file.mapping, ALL);
    assert_eq!((file.dirty(), file.under_way()), (0, 8));
    file.write(3..4, 2);
    assert_eq!((file.dirty(), file.under_way()), (1, 8));
    file.sync(&file.handle()).unwrap();
    let bytes = bytes_of(&file_bytes);
    for page in 0..8 {
        assert_eq!(generation_in(&bytes, page), Some(if page == 3 { 2 } else { 1 }), "page {page}");
    }
    assert_eq!((file.dirty(), file.under_way()), (0, 0));
}

/// E01 and E05 through files; by the rules of `errseq`.
#[test]
fn ten_handles_report_once_each_and_then_all_is_well() {
    let fixture = WritebackFixture::new(by_hand());
    let disk = disk(100);
    let device = simulated(&disk, Faults::default());
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let handles: Vec<_> = (0..10).map(|_| file.handle()).collect();
    device.fail_writes_at(3 * PAGE..4 * PAGE, FailureCount::First(1));
    file.write(0..8, 1);
    let before = file.dirty();
    assert_eq!(file.sync(&handles[0]), Err(EIO));
    assert!(file.dirty() > 0 && file.dirty() <= before, "what failed is dirty, and what was written is not");
    for handle in &handles[1..] {
        assert_eq!(file.sync(handle), Err(EIO), "each once");
    }
    assert_eq!(file.dirty(), 0, "it was tried again");
    for handle in &handles {
        assert_eq!(file.sync(handle), Ok(()), "and once only");
    }
    assert_eq!(file.sync(&file.handle()), Ok(()), "who opens it now has missed nothing");
    assert_eq!((0..8).map(|page| generation_in(&disk.content(), page)).collect::<Vec<_>>(), [Some(1); 8]);
    device.fail_write(0, ENOSPC);
    file.write(0..1, 2);
    assert_eq!(file.sync(&handles[4]), Err(ENOSPC), "another error is another report");
    assert_eq!((file.sync(&handles[4]), file.sync(&handles[5])), (Ok(()), Err(ENOSPC)));
}

/// E07: no handle synced, and the next open of the file reports the error.
#[test]
fn an_error_of_the_background_is_reported_to_the_next_open() {
    let options = by_hand().expire(Duration::ZERO).interval(Duration::from_millis(1));
    let fixture = WritebackFixture::new(options);
    let device = simulated(&disk(10), Faults::default());
    device.fail_writes_at(0..PAGE, FailureCount::First(1));
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let _closed_again = file.handle();
    file.write(0..1, 1);
    wait_until("the failure", || file.mapping.writeback().failures().count > 0);
    let (late, later) = (file.handle(), file.handle());
    assert_eq!(file.sync(&late), Err(EIO));
    assert_eq!((file.sync(&late), file.sync(&later)), (Ok(()), Err(EIO)));
    assert_eq!(file.sync(&file.handle()), Ok(()));
}

#[test]
fn no_sync_succeeds_while_pages_cannot_be_written() {
    let fixture = WritebackFixture::new(by_hand());
    let device = simulated(&disk(10), Faults::default());
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    device.fail_writes_at(0..PAGE, FailureCount::Always);
    let handle = file.handle();
    file.write(0..1, 1);
    for _ in 0..5 {
        assert_eq!(file.sync(&handle), Err(EIO));
        assert_eq!(file.dirty(), 1);
    }
    file.write(1..2, 1);
    assert_eq!(file.sync_range(pages(1..2), &handle), Ok(()), "of other pages it may");
    device.mend();
    assert_eq!((file.sync(&handle), file.dirty()), (Ok(()), 0));
}

/// The kernel reports a sync that failed once, and drops what it could not write.
#[test]
fn a_sync_that_succeeds_after_a_failed_device_sync_is_true() {
    for seed in 0..20 {
        let fixture = WritebackFixture::new(by_hand());
        let disk = disk(64);
        let device = simulated(&disk, Faults { seed, ..Faults::default() });
        let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
        let (one, other) = (file.handle(), file.handle());
        file.write(0..32, 1);
        assert_eq!(file.sync(&one), Ok(()));
        file.write(8..40, 2);
        device.fail_sync(0, EIO);
        assert_eq!(file.sync(&one), Err(EIO));
        assert_eq!(file.dirty(), 32, "all that was flushed for it is dirty again, and nothing else");
        assert_eq!(file.sync(&other), Err(EIO), "each handle hears of it");
        assert_eq!((file.sync(&one), file.dirty()), (Ok(()), 0));
        let log = disk.log();
        for sample in 0..20 {
            let state = log.state(log.len(), sample);
            for page in 0..40 {
                let wanted = if page < 8 { 1 } else { 2 };
                assert_eq!(
                    generation_in(&state, page),
                    Some(wanted),
                    "page {page} after a crash, seed {seed}"
                );
            }
        }
    }
}

#[test]
fn pages_that_left_the_cache_before_the_sync_failed_are_reported_lost() {
    let fixture = WritebackFixture::new(by_hand());
    let device = simulated(&disk(64), Faults::default());
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let handle = file.handle();
    file.write(0..16, 1);
    fixture.writeback.write_out(&file.mapping).unwrap(); // in the file, and not durable
    assert_eq!(file.evict_all(), 16);
    file.write(8..12, 2);
    device.fail_sync(0, EIO);
    let failed = fixture.writeback.sync(&file.mapping, EVERYTHING, &handle).unwrap_err();
    assert_eq!((failed.error.raw_os_error(), failed.lost_pages), (Some(EIO), 12));
    assert!(failed.to_string().contains("write them again"), "{failed}");
    assert_eq!(fixture.filemap.count(Count::LostPages), 12);
    assert_eq!(file.dirty(), 4);
    assert_eq!(file.sync(&handle), Ok(()), "later ones speak of the rest");
}

/// 1 A sync is with the device. 2 Another one of the same pages, and of the same handle, comes. 3 The device tells the
/// first of an error, and so the handle. 4 The second one's own sync of the device goes well, because errors are told
/// once; and the handle has been told.
#[test]
fn two_syncs_at_once_hear_of_one_failure_both() {
    for fails in [false, true] {
        let fixture = WritebackFixture::new(by_hand());
        let inner = simulated(&disk(64), Faults::default());
        let device = RecordingBackend::new(Arc::clone(&inner) as Arc<dyn Backend>);
        let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
        let one = file.handle();
        file.write(0..4, 1);
        let (is_in, may_go) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let (theirs, first) = ((Arc::clone(&is_in), Arc::clone(&may_go)), AtomicBool::new(true));
        device.before_sync(move || {
            if first.swap(false, Ordering::Relaxed) {
                theirs.0.wait();
                theirs.1.wait();
            }
        });
        if fails {
            inner.fail_sync(0, EIO);
        }
        std::thread::scope(|scope| {
            let early = scope.spawn(|| file.sync(&one));
            is_in.wait();
            let late = scope.spawn(|| file.sync(&one));
            // It has nothing to flush, and waits for the first to end. (If it comes later than that, it is told, too.)
            wait_until("the second call", || fixture.filemap.count(Count::Syncs) == 2);
            may_go.wait();
            let wanted = if fails { Err(EIO) } else { Ok(()) };
            assert_eq!((early.join().unwrap(), late.join().unwrap()), (wanted, wanted));
        });
        assert_eq!((file.sync(&one), file.dirty()), (Ok(()), 0));
    }
}

/// The user's backend panics: what it was to make durable is not, and the next sync has its turn.
#[test]
fn a_device_that_panics_in_a_sync_does_not_prevent_the_next() {
    let fixture = WritebackFixture::new(by_hand());
    let device = RecordingBackend::new(memory(64));
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let (one, other) = (file.handle(), file.handle());
    file.write(0..4, 1);
    let first = AtomicBool::new(true);
    device.before_sync(move || assert!(!first.swap(false, Ordering::Relaxed), "the first one panics"));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| file.sync(&one)));
    assert!(panicked.is_err(), "it is not kept from who called");
    assert!(!file.mapping.writeback().is_syncing(), "nobody waits for it");
    assert_eq!(file.dirty(), 4, "nothing of it is durable");
    assert_eq!(file.sync(&other), Err(EIO), "each handle hears of it");
    assert_eq!((file.sync(&one), file.dirty()), (Err(EIO), 0));
    assert_eq!((file.sync(&one), file.sync(&other)), (Ok(()), Ok(())));
}

/// 1 A flush of one page is under way. 2 A sync of another page fails, and the handle is told. 3 The handle syncs all:
/// the flush from before ends while it waits, and does not count. `Ok` is of that page, too.
#[test]
fn ok_is_of_pages_whose_flush_was_under_way_when_a_sync_failed() {
    let fixture = WritebackFixture::new(by_hand());
    let early = Early::new(memory(64));
    let device = RecordingBackend::new(Arc::clone(&early) as Arc<dyn Backend>);
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let handle = file.handle();
    fixture.writeback.close(); // it would fetch what ends
    file.write(0..1, 1);
    fixture.writeback.start(&file.mapping, pages(0..1));
    assert_eq!(file.under_way(), 1);
    early.fail_sync(EIO);
    assert_eq!(file.sync_range(pages(8..9), &handle), Err(EIO));
    assert_eq!((file.under_way(), file.dirty()), (1, 0), "nobody has fetched its end");
    assert_eq!(file.sync(&handle), Ok(()));
    let flushes = device.take_flushes();
    assert_eq!((file.dirty(), flushes), (0, vec![(0, PAGE_SIZE); 2]), "it was written anew, and then synced");
    file.mapping.check().unwrap();
}

#[test]
fn many_syncs_at_once_share_the_devices_syncs() {
    const THREADS: u64 = 8;
    let fixture = WritebackFixture::new(by_hand());
    let inner = memory(64);
    let device = RecordingBackend::new(inner);
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    // The first sync of the device in a round lasts until all threads have called, and for a moment more.
    let counted = Arc::clone(&fixture.filemap);
    device.before_sync(move || {
        let all = counted.count(Count::Syncs).next_multiple_of(THREADS);
        wait_until("the other threads", || counted.count(Count::Syncs) == all);
        std::thread::sleep(Duration::from_millis(2));
    });
    let round = Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (file, round) = (&file, &round);
            scope.spawn(move || {
                let handle = file.handle();
                for generation in 1..=10 {
                    round.wait();
                    file.write(thread..thread + 1, generation);
                    file.sync_range(pages(0..64), &handle).unwrap();
                }
            });
        }
    });
    let (calls, syncs) = (fixture.filemap.count(Count::Syncs), fixture.filemap.count(Count::DeviceSyncs));
    assert_eq!(calls, 10 * THREADS);
    assert!(syncs <= calls * 3 / 4, "{syncs} syncs of the device for {calls} calls");
}

#[test]
fn a_lone_writer_needs_no_other_thread_to_sync() {
    for mechanism in [Mechanism::Ring, Mechanism::Threads] {
        let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let wait_queue = Arc::new(WaitQueue::new());
        let options = EngineOptions { mechanism, queue_depth: 4, ..EngineOptions::default() };
        let engine = Engine::new(Arc::clone(&wait_queue), options);
        let fixture = WritebackFixture::with_wait_queue(wait_queue, by_hand());
        let new = OpenForWrite { creation: Creation::MustBeNew, start: InitialContent::Kept, mode: 0o644 };
        let path = folder.path().join("file");
        let file = fixture.open(1, Arc::new(engine.open_for_writing(&path, new).unwrap()));
        fixture.writeback.close(); // the background's thread
        file.set_size(1000 * PAGE + 17);
        file.write(0..1001, 1);
        file.sync(&file.handle()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, 1000 * PAGE + 17);
        assert!((0..1000).all(|page| generation_in(&bytes, page) == Some(1)));
        assert_eq!(bytes[1000 * PAGE_SIZE..], content(1000, 1)[..17]);
        assert_eq!((file.dirty(), file.under_way()), (0, 0));
        engine.drain();
    }
}

/// The last partial page goes by calls that block, and the sync makes them itself.
#[test]
fn a_small_append_is_written_by_its_sync() {
    if !hazard::in_a_process_of_its_own("a_small_append_is_written_by_its_sync") {
        return;
    }
    let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    let wait_queue = Arc::new(WaitQueue::new());
    let engine = Engine::new(Arc::clone(&wait_queue), EngineOptions::default());
    let fixture = WritebackFixture::with_wait_queue(wait_queue, by_hand());
    let new = OpenForWrite { creation: Creation::MustBeNew, start: InitialContent::Kept, mode: 0o644 };
    let local = engine.open_for_writing(&path, new).unwrap();
    if !local.is_direct() {
        return println!("SKIPPED: no direct I/O here");
    }
    let file = fixture.open(1, Arc::new(local));
    let handle = file.handle();
    for generation in 1..=50u32 {
        let size = u64::from(generation) * 70;
        file.set_size(size);
        file.write(0..1, generation);
        file.sync(&handle).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), content(0, generation)[..size as usize]);
        assert_eq!((file.dirty(), file.under_way()), (0, 0));
    }
    assert_eq!(hazard::threads("quinion-io"), 0, "nothing went by the pool");
    file.mapping.check().unwrap();
}

#[test]
fn the_background_writes_old_pages_and_forgets_the_file() {
    let options = by_hand().expire(Duration::from_millis(20)).interval(Duration::from_millis(5));
    let fixture = WritebackFixture::new(options);
    let (memories, devices): (Vec<_>, Vec<_>) = (0..5)
        .map(|_| {
            let memory = memory(64);
            let device = SimulatedBackend::of_memory(
                Arc::clone(&memory),
                Faults { delay_max: 3, ..Faults::default() },
            );
            (memory, Arc::new(device))
        })
        .unzip();
    let files: Vec<_> =
        (0..5).map(|n| fixture.open(n + 1, Arc::clone(&devices[n as usize]) as Arc<dyn Backend>)).collect();
    files.iter().for_each(|file| file.write(0..30, 1));
    wait_until("clean files", || fixture.writeback.totals().total() == 0);
    for memory in &memories {
        let bytes = bytes_of(memory);
        assert!((0..30).all(|page| generation_in(&bytes, page) == Some(1)));
    }
    wait_until("an empty list", || fixture.writeback.files_listed() == 0);
    files[2].write(3..4, 2);
    wait_until("the page", || generation_in(&bytes_of(&memories[2]), 3) == Some(2));
}

#[test]
fn the_background_writes_when_too_much_is_dirty_and_every_file_has_its_turn() {
    // 16 MiB, of which a fiftieth is some 70 pages.
    let options = by_hand().background_share(2);
    let fixture = WritebackFixture::new(options);
    let memories: Vec<_> = (0..4).map(|_| memory(200)).collect();
    let files: Vec<_> =
        (0..4).map(|n| fixture.open(n + 1, Arc::clone(&memories[n as usize]) as Arc<dyn Backend>)).collect();
    let limits = fixture.writeback.limits();
    files.iter().for_each(|file| file.write(0..limits.background / 8, 1));
    assert_eq!(fixture.writeback.totals().total(), limits.background / 8 * 4, "so much may be dirty");
    files.iter().for_each(|file| file.write(0..200, 2));
    wait_until("calm", || fixture.writeback.totals().total() <= limits.background);
    assert!(files.iter().all(|file| file.dirty() < 200), "of each file something was written");
}

#[test]
fn a_file_that_fails_is_left_alone_for_a_while_and_others_are_not() {
    let options = by_hand().expire(Duration::ZERO).interval(Duration::from_millis(1));
    let fixture = WritebackFixture::new(options);
    let platter = disk(64);
    let bad = simulated(&platter, Faults::default());
    bad.fail_writes_at(0..64 * PAGE, FailureCount::Always);
    let (ill, well) = (fixture.open(1, Arc::clone(&bad) as Arc<dyn Backend>), fixture.open(2, memory(64)));
    ill.write(0..64, 1);
    wait_until("the failure", || ill.mapping.writeback().failures().count > 0);
    well.write(0..64, 1);
    wait_until("the other file", || well.mapping.writeback().dirty_pages().total() == 0);
    let tried = bad.writes();
    std::thread::sleep(Duration::from_millis(100));
    assert!(bad.writes() <= tried + 64, "{} attempts in a tenth of a second", bad.writes() - tried);
    assert!(ill.dirty() > 0 && (0..64).all(|page| ill.is_cached(page)), "nothing is lost");
    bad.mend();
    let handle = ill.handle();
    assert_eq!((ill.sync(&handle), ill.sync(&handle), ill.dirty()), (Err(EIO), Ok(()), 0));
    assert!((0..64).all(|page| generation_in(&platter.content(), page) == Some(1)));
}

fn throttled(wait_max: Duration) -> WritebackOptions {
    by_hand().background_share(5).throttle_share(10).wait_max(wait_max)
}

/// Writes every other page, over and over, throttled, until it is refused; returns how often. No run has more than a
/// page, so a failing device takes none.
fn write_until_refused(file: &Opened<'_>, calls: u32) -> Result<u32, (u32, std::io::Error)> {
    for call in 0..calls {
        file.fixture.writeback.throttle(&file.mapping, 8).map_err(|error| (call, error))?;
        for nth in 0..8 {
            let at = u64::from(call * 8 + nth) * 2 % 4000;
            file.write(at..at + 1, call + 1);
        }
    }
    Ok(calls)
}

#[test]
fn writers_are_held_up_as_little_as_needed_and_dirty_pages_stay_bounded() {
    let fixture = WritebackFixture::new(throttled(LONG));
    let devices: Vec<_> = (0..2)
        .map(|seed| {
            SimulatedBackend::of_memory(memory(2000), Faults { seed, delay_max: 2, ..Faults::default() })
        })
        .map(Arc::new)
        .collect();
    let files: Vec<_> =
        (0..2).map(|n| fixture.open(n + 1, Arc::clone(&devices[n as usize]) as Arc<dyn Backend>)).collect();
    let (limits, most) = (fixture.writeback.limits(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for file in &files {
            let (most, fixture) = (&most, &fixture);
            scope.spawn(move || {
                for call in 0..500u64 {
                    fixture.writeback.throttle(&file.mapping, 8).unwrap();
                    file.write(call * 8 % 1000..call * 8 % 1000 + 8, 1);
                    most.fetch_max(fixture.writeback.totals().total(), Ordering::Relaxed);
                }
            });
        }
    });
    let most = most.load(Ordering::Relaxed);
    // A file of which little is dirty may go on: a quarter for all of them.
    assert!(most <= limits.throttle * 5 / 4 + 4 * 8, "{most} pages were dirty, of {limits:?}");
    assert!(fixture.filemap.count(Count::WrittenPages) > 0);
    files.iter().for_each(|file| file.sync(&file.handle()).unwrap());
}

#[test]
fn a_stuck_device_does_not_hold_up_its_writers_for_ever() {
    let fixture = WritebackFixture::new(throttled(Duration::from_millis(2)));
    let device = Arc::new(SimulatedBackend::of_memory(memory(4000), Faults::default()));
    device.pause();
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let other = fixture.open(2, memory(64));
    let limits = fixture.writeback.limits();
    let (calls, error) = write_until_refused(&file, 1000).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    assert!(
        u64::from(calls) * 8 > limits.throttle
            && file.mapping.writeback().dirty_pages().total() > limits.ceiling
    );
    assert!(fixture.filemap.count(Count::ThrottledMicros) > 0);
    device.resume();
    file.sync(&file.handle()).unwrap();
    assert_eq!(write_until_refused(&file, 100).unwrap(), 100);
    assert_eq!(write_until_refused(&other, 4).unwrap(), 4);
}

#[test]
fn a_throttled_writer_hears_that_its_file_fails() {
    let fixture = WritebackFixture::new(throttled(LONG));
    let device = simulated(&disk(4000), Faults::default());
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let handle = file.handle();
    device.fail_writes_at(0..u64::MAX, FailureCount::Always);
    // Full, as far as the first call above the throttle can see.
    let (calls, error) = write_until_refused(&file, 1000).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(EIO));
    assert!(u64::from(calls) * 8 >= fixture.writeback.limits().throttle);
    assert!(fixture.writeback.throttle(&file.mapping, 1).is_err(), "and again, as long as it does");
    device.mend();
    assert_eq!(file.sync(&handle), Err(EIO), "a sync still tells of it");
    assert_eq!((file.sync(&handle), file.dirty()), (Ok(()), 0));
    assert!(fixture.writeback.throttle(&file.mapping, 1).is_ok());
}

/// D14: pages of an uncached write are dropped after a good write only. One whose write failed stays until it is
/// written, and the failure is reported by a sync.
#[test]
fn d14_pages_of_an_uncached_writer_alone_leave_when_they_were_written_and_not_before() {
    let fixture = WritebackFixture::new(by_hand());
    let disk = disk(64);
    let device = simulated(&disk, Faults::default());
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let handle = file.handle();
    file.write(20..21, 1);
    file.write_fated(0..10, 1, FolioLifetime::DropsBehind);
    assert_eq!(fixture.writeback.totals().drop_behind(), 10);
    device.fail_writes_at(4 * PAGE..5 * PAGE, FailureCount::First(1));
    fixture.writeback.request_writeback(&file.mapping);
    wait_until("the failure", || file.mapping.writeback().failures().count > 0 && file.under_way() == 0);
    assert!(file.is_cached(4), "what failed stays");
    assert_eq!(file.sync(&handle), Err(EIO), "and is told");
    assert_eq!(file.sync(&handle), Ok(()));
    // The thread that reaps a flush drops behind it, and a sync that had nothing to flush does not wait for that.
    wait_until("that what was written leaves", || (0..10).all(|page| !file.is_cached(page)));
    assert!(file.is_cached(20));
    assert_eq!((fixture.writeback.totals().drop_behind(), fixture.writeback.totals().total()), (0, 0), "D16");
    assert!((0..10).all(|page| generation_in(&disk.content(), page) == Some(1)));
    fixture.arena.check().unwrap();
}

/// D16: pages of an uncached writer are counted no longer when they are cut off, or a hole takes them.
#[test]
fn d16_pages_of_an_uncached_writer_that_are_cut_off_or_punched_are_not_counted() {
    let fixture = WritebackFixture::new(by_hand());
    let counted = || fixture.writeback.totals().drop_behind();
    for nth in 0..2 {
        let file = fixture.open(nth + 1, memory(64) as Arc<dyn Backend>);
        file.write_fated(0..10, 1, FolioLifetime::DropsBehind);
        assert_eq!(counted(), 10);
        let (detach, change) = (OnPinned::Detach, || Truncation::of(&fixture.filemap, &file.mapping));
        match nth {
            0 => {
                change().cut(4 * PAGE + 100, detach).unwrap();
                assert_eq!(counted(), 5, "the page of the new end is to be written still");
                change().cut(0, detach).unwrap();
            }
            _ => {
                change().punch(2 * PAGE..6 * PAGE, detach).unwrap();
                assert_eq!(counted(), 6);
                change().punch(0..64 * PAGE, detach).unwrap();
            }
        }
        assert_eq!((counted(), fixture.writeback.totals().total()), (0, 0), "{nth}");
    }
    fixture.arena.check().unwrap();
}

#[test]
fn a_thread_without_memory_because_all_is_dirty_has_it_written() {
    let fixture = WritebackFixture::new(by_hand());
    let device =
        Arc::new(SimulatedBackend::of_memory(memory(5000), Faults { delay_max: 2, ..Faults::default() }));
    // It is listed where reclaim looks, unlike the other files of this test.
    let known = device.attributes().unwrap();
    device.attach(&fixture.wait_queue);
    let writer = Arc::clone(&device) as Arc<dyn Backend>;
    let mapping = quinion::internals::mapping::Mapping::new(quinion::internals::mapping::NewMapping {
        arena: &fixture.arena,
        id: quinion::internals::units::MappingId(7),
        backend: Arc::clone(&writer),
        attributes: &known,
        process: quinion::internals::sys::fork::ForkGuard::new(),
    });
    let lists = fixture.filemap.reclaim().lists();
    let mapping = mapping.unwrap().with_dirty_pages(fixture.writeback.totals()).with_lists(lists);
    mapping.writeback().set_writer(writer);
    let file = Opened { fixture: &fixture, mapping: Arc::new(mapping) };
    fixture.filemap.reclaim().add_mapping(Arc::clone(&file.mapping));
    fixture.writeback.close(); // the background does not
    // All of memory, by the read path, then dirty.
    let readahead = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(1)));
    let reader = quinion::internals::filemap::Reader::plain(&readahead);
    let mut bytes = vec![0; PAGE_SIZE];
    let mut read = |page: u64| {
        let wait_policy = quinion::internals::filemap::WaitPolicy::Wait;
        fixture.filemap.read(&reader.call(&file.mapping, wait_policy), page * PAGE, &mut bytes).unwrap()
    };
    let mut page = 0;
    while fixture.arena.available_pages(quinion::internals::sync::LockWait::Wait).is_some_and(|free| free > 0)
    {
        assert_eq!(read(page), PAGE_SIZE);
        file.write(page..page + 1, 1);
        page += 1;
    }
    assert!(page > 2000 && file.dirty() >= page - 1, "{page} pages, {} of them dirty", file.dirty());
    for more in 0..500 {
        assert_eq!(read(4000 + more), PAGE_SIZE, "with {} dirty", file.dirty());
        file.write(4000 + more..4001 + more, 1);
    }
    file.mapping.check().unwrap();
}

#[test]
fn a_cache_that_is_made_smaller_writes_dirty_pages_in_the_way() {
    let device = Arc::new(MemoryFile::new(vec![0; 18 << 20]));
    let cache = quinion::Cache::builder().memory(32 << 20).writeback(by_hand()).build().unwrap();
    let file = cache
        .open_backend_with(Arc::clone(&device) as Arc<dyn Backend>, quinion::OpenOptions::new().write(true))
        .unwrap();
    let pages = (18 << 20) / PAGE;
    for page in 0..pages {
        file.write_all_at(&content(page, 1), page * PAGE).unwrap();
    }
    assert_eq!(cache.stats().dirty_pages, pages);
    let resized = cache.resize(16 << 20).unwrap();
    assert_eq!(resized.slack_bytes, 0, "{resized:?}");
    cache.check().unwrap();
    let stats = cache.stats();
    assert!(stats.written_pages > 0 && stats.dirty_pages < pages, "{stats:?}");
    let mut bytes = vec![0; PAGE_SIZE];
    for page in 0..pages {
        assert_eq!(file.read_at(&mut bytes, page * PAGE).unwrap(), PAGE_SIZE);
        assert!(bytes == content(page, 1), "page {page}");
    }
    // Far less may be dirty now.
    for page in 0..pages {
        file.write_all_at(&content(page, 2), page * PAGE).unwrap();
        assert!(cache.stats().dirty_pages <= (16 << 20) / PAGE * 80 / 100 + 1);
    }
    drop((file, cache));
    let bytes = bytes_of(&device);
    assert!((0..pages).all(|page| generation_in(&bytes, page) == Some(2)));
}

#[test]
fn a_pool_that_is_full_of_dirty_pages_has_them_written() {
    let bytes = memory(4096);
    let device =
        SimulatedBackend::of_memory(Arc::clone(&bytes), Faults { delay_max: 2, ..Faults::default() });
    let cache = quinion::Cache::builder().memory(64 << 20).writeback(by_hand()).build().unwrap();
    let pool = cache.add_pool("small", quinion::PoolOptions::new().limit(2 << 20)).unwrap();
    let file = pool.open_backend_with(Arc::new(device), quinion::OpenOptions::new().write(true)).unwrap();
    for page in 0..4096 {
        file.write_all_at(&content(page, 1), page * PAGE).unwrap();
    }
    let stats = cache.stats();
    assert!(stats.written_pages >= 4096 - 512 && stats.cached_pages <= 512, "{stats:?}");
    cache.check().unwrap();
    file.sync_data().unwrap();
    let bytes = bytes_of(&bytes);
    assert!((0..4096).all(|page| generation_in(&bytes, page) == Some(1)));
}

/// A pool is full of pages that its device refuses, and the device is slow to say so.
#[test]
fn a_file_that_takes_nothing_for_ever_keeps_no_reader_no_other_file_and_no_end() {
    let (bad_bytes, good_bytes) = (memory(2048), memory(64));
    let bad = Early::new(Arc::clone(&bad_bytes));
    bad.set_full(true);
    let wait_max = Duration::from_millis(100);
    let options = by_hand().wait_max(wait_max);
    let cache = quinion::Cache::builder().memory(64 << 20).writeback(options).build().unwrap();
    let pool = cache.add_pool("small", quinion::PoolOptions::new().limit(2 << 20)).unwrap();
    let writing = *quinion::OpenOptions::new().write(true);
    let (told, heard) = std::sync::mpsc::channel();
    let story = std::thread::spawn(move || {
        let file = pool.open_backend_with(Arc::clone(&bad) as Arc<dyn Backend>, &writing).unwrap();
        let full =
            (0..2048).map(|page| file.write_all_at(&content(page, 1), page * PAGE)).position(|w| w.is_err());
        let full = full.expect("the pool is full one day") as u64;
        assert!((256..=512).contains(&full), "{full} pages");
        let other = cache.open_backend_with(Arc::clone(&good_bytes) as Arc<dyn Backend>, &writing).unwrap();
        other.write_all_at(&content(0, 1), 0).unwrap();
        other.sync_data().unwrap();
        assert!(file.sync_data().is_err() && cache.stats().dirty_pages == full, "all of it is there");
        cache.check().unwrap();
        bad.set_full(false);
        file.sync_data().unwrap();
        let bytes = bytes_of(&bad_bytes);
        assert!((0..full).all(|page| generation_in(&bytes, page) == Some(1)));
        bad.set_full(true);
        file.write_all_at(&content(0, 2), 0).unwrap();
        drop((file, other, pool, cache));
        told.send(()).unwrap();
    });
    let ended = heard.recv_timeout(LONG);
    assert!(ended.is_ok() || story.is_finished(), "it goes on for ever");
    story.join().unwrap();
}

/// Between a flush and the check after it, or before and after a flush, the only change is the cache's own.
#[test]
fn our_own_flushes_are_not_taken_for_others_changes() {
    let fixture = WritebackFixture::new(by_hand());
    let device = RecordingBackend::new(memory(64));
    let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
    let looks = Arc::new(AtomicU32::new(0));
    let (mapping, inner, seen) = (Arc::clone(&file.mapping), Arc::clone(&device.inner), Arc::clone(&looks));
    let known = file.mapping.version();
    device.before_attributes(move || {
        let (probe, now) = (mapping.begin_revalidation(), inner.attributes().unwrap());
        assert!(mapping.is_as_known(known, probe, &now), "nobody else is there");
        seen.fetch_add(1, Ordering::Relaxed);
    });
    for generation in 1..4 {
        let probe = file.mapping.begin_revalidation();
        let early = device.inner.attributes().unwrap();
        file.write(0..2, generation);
        file.sync(&file.handle()).unwrap();
        assert!(file.mapping.is_as_in(probe, &early), "it was so before a flush of ours");
        let (probe, now) = (file.mapping.begin_revalidation(), device.inner.attributes().unwrap());
        assert!(file.mapping.is_as_in(probe, &now), "and is so after it");
    }
    assert!(looks.load(Ordering::Relaxed) >= 6, "before flushes and after them");
    device.inner.set_size(70 * PAGE).unwrap();
    let (probe, now) = (file.mapping.begin_revalidation(), device.inner.attributes().unwrap());
    assert!(!file.mapping.is_as_in(probe, &now), "that was somebody else");
}

#[test]
fn a_device_that_panics_does_not_keep_the_background_from_other_files() {
    let options = by_hand().expire(Duration::from_millis(20)).interval(Duration::from_millis(5));
    let fixture = WritebackFixture::new(options);
    let bytes = memory(64);
    let bad = RecordingBackend::new(memory(64));
    bad.before_flush(|| panic!("this device panics once"));
    let files = [
        fixture.open(1, Arc::clone(&bad) as Arc<dyn Backend>),
        fixture.open(2, Arc::clone(&bytes) as Arc<dyn Backend>),
    ];
    files.iter().for_each(|file| file.write(0..30, 1));
    wait_until("the other file", || (0..30).all(|page| generation_in(&bytes_of(&bytes), page) == Some(1)));
    wait_until("its own next try", || files[0].dirty() == 0);
}

#[test]
fn a_device_that_panics_keeps_no_other_file_from_the_end_of_the_cache() {
    let fixture = WritebackFixture::new(by_hand());
    let bytes = memory(64);
    let bad = RecordingBackend::new(memory(64));
    bad.before_flush(|| panic!("this device panics once"));
    let files = [
        fixture.open(1, Arc::clone(&bad) as Arc<dyn Backend>),
        fixture.open(2, Arc::clone(&bytes) as Arc<dyn Backend>),
    ];
    fixture.writeback.close();
    files.iter().for_each(|file| file.write(0..4, 1));
    assert_eq!(fixture.writeback.write_out_all(), 0, "it is tried once more");
    assert!((0..4).all(|page| generation_in(&bytes_of(&bytes), page) == Some(1)));
}

/// The last that is done for a file is not left to a flush that began before.
#[test]
fn a_flush_that_fails_when_the_cache_ends_is_tried_once_more() {
    let fixture = WritebackFixture::new(by_hand());
    let bytes = memory(64);
    let device =
        SimulatedBackend::of_memory(Arc::clone(&bytes), Faults { delay_max: 2, ..Faults::default() });
    device.fail_write(0, EIO);
    let file = fixture.open(1, Arc::new(device));
    fixture.writeback.close(); // it would fetch what ends
    file.write(0..4, 1);
    fixture.writeback.start(&file.mapping, ALL);
    assert_eq!((file.dirty(), file.under_way()), (0, 4));
    assert_eq!((fixture.writeback.write_out_all(), file.dirty()), (0, 0));
    assert!((0..4).all(|page| generation_in(&bytes_of(&bytes), page) == Some(1)));
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64),
    Sync(usize),
    SyncRange(u64, u64),
    Start,
    Settle,
    Evict,
    FailWrite(u64, i32),
    FailSync,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..48u64, 1..16u64).prop_map(|(at, len)| Step::Write(at, len)),
        3 => (0..3usize).prop_map(Step::Sync),
        1 => (0..48u64, 1..16u64).prop_map(|(at, len)| Step::SyncRange(at, len)),
        2 => Just(Step::Start),
        2 => Just(Step::Settle),
        1 => Just(Step::Evict),
        1 => (0..3u64, prop::sample::select(vec![EIO, ENOSPC])).prop_map(|(nth, errno)| Step::FailWrite(nth, errno)),
        1 => Just(Step::FailSync),
    ]
}

/// What a page may be on the disk: nothing older than was promised, and nothing that was never written.
#[derive(Clone, Copy, Default, Debug)]
struct PageHistory {
    now: u32,
    synced: u32,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn synced_pages_survive_a_crash(
        story in prop::collection::vec(steps(), 1..60), seed: u64, delay_max in 0..4u32,
    ) {
        let fixture = WritebackFixture::new(by_hand());
        let disk = disk(64);
        let faults = Faults { seed, delay_max, sequence: CompletionOrder::Shuffled, ..Faults::default() };
        let device = simulated(&disk, faults);
        let file = fixture.open(1, Arc::clone(&device) as Arc<dyn Backend>);
        let handles: Vec<_> = (0..3).map(|_| file.handle()).collect();
        let (mut known, mut generation, mut lost) = ([PageHistory::default(); 64], 0, false);
        for step in &story {
            match *step {
                Step::Write(at, len) => {
                    generation += 1;
                    file.write(at..at + len, generation);
                    known[at as usize..(at + len) as usize].iter_mut().for_each(|page| page.now = generation);
                }
                Step::Sync(handle) => {
                    let synced = fixture.writeback.sync(&file.mapping, EVERYTHING, &handles[handle]);
                    match synced {
                        Ok(()) => known.iter_mut().for_each(|page| page.synced = page.now),
                        Err(failed) => lost |= failed.lost_pages > 0,
                    }
                }
                Step::SyncRange(at, len) => {
                    let range = SyncRange { kind: SyncKind::Data, pages: &pages(at..at + len) };
                    let synced = fixture.writeback.sync(&file.mapping, range, &handles[0]);
                    match synced {
                        Ok(()) => known[at as usize..(at + len) as usize]
                            .iter_mut()
                            .for_each(|page| page.synced = page.now),
                        Err(failed) => lost |= failed.lost_pages > 0,
                    }
                }
                Step::Start => fixture.writeback.start(&file.mapping, ALL),
                Step::Settle => fixture.writeback.wait_for(&file.mapping, ALL),
                Step::Evict => drop(file.evict_all()),
                Step::FailWrite(nth, errno) => device.fail_write(nth, errno),
                Step::FailSync => device.fail_sync(0, EIO),
            }
            file.mapping.check().map_err(TestCaseError::fail)?;
            if lost {
                break; // and it was said
            }
        }
        if !lost {
            let log = disk.log();
            for sample in 0..8 {
                let state = log.state(log.len(), seed ^ sample);
                for (page, known) in known.iter().enumerate() {
                    prop_assert!(
                        is_right(&state, page, *known),
                        "page {page} is {:?}, and {known:?}", generation_in(&state, page as u64)
                    );
                }
            }
        }
        fixture.arena.check().map_err(TestCaseError::fail)?;
    }
}

/// Whether each byte of the page is of an allowed generation. (A failing device may leave half a word.)
fn is_right(state: &[u8], page: usize, known: PageHistory) -> bool {
    let number =
        |generation: u32| u64::from(generation) << 32 | if generation == 0 { 0 } else { page as u64 };
    let allowed: Vec<[u8; 8]> = (known.synced..=known.now).map(|of| number(of).to_le_bytes()).collect();
    let bytes = &state[page * PAGE_SIZE..(page + 1) * PAGE_SIZE];
    let is_allowed = |(at, byte): (usize, &u8)| allowed.iter().any(|number| number[at % 8] == *byte);
    bytes.iter().enumerate().all(is_allowed)
}

#[test]
fn synced_pages_survive_writers_syncs_and_faults_at_once() {
    let seconds = if std::env::var_os("QUINION_SOAK").is_some() { 30 } else { 1 };
    let began = Instant::now();
    for seed in 0.. {
        if began.elapsed() > Duration::from_secs(seconds) {
            break;
        }
        let options = throttled(Duration::from_millis(1));
        let options = options.expire(Duration::ZERO).interval(Duration::from_millis(1));
        let fixture = WritebackFixture::new(options);
        let disk = disk(128);
        let faults = Faults { seed, delay_max: 3, sequence: CompletionOrder::Shuffled, ..Faults::default() };
        let device = SimulatedBackend::of_crash_disk(Arc::clone(&disk), faults)
            .with_write_faults(WriteFaults { errors: 50, full: 50, drops: 20, sync_errors: 50 });
        let file = fixture.open(1, Arc::new(device));
        // For each writer's pages: the promise, and how far the disk's log was when it was given.
        let sync_points: Mutex<Vec<(usize, u64, u32)>> = Mutex::default();
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                let (file, sync_points, disk) = (&file, &sync_points, &disk);
                scope.spawn(move || {
                    let (handle, first) = (file.handle(), thread * 40);
                    for generation in 1..30u32 {
                        let _ = file.fixture.writeback.throttle(&file.mapping, 40);
                        file.write(first..first + 40, generation);
                        if generation % 3 == 0 && file.sync(&handle).is_ok() {
                            sync_points.lock().unwrap().push((disk.log().len(), first, generation));
                        }
                    }
                });
            }
        });
        let log = disk.log();
        for (events, first, generation) in sync_points.into_inner().unwrap() {
            for sample in 0..4 {
                let state = log.state(events, seed ^ sample);
                for page in first..first + 40 {
                    let known = PageHistory { now: 30, synced: generation };
                    assert!(is_right(&state, page as usize, known), "page {page}, {known:?}, seed {seed}");
                }
            }
        }
        file.mapping.check().unwrap();
        fixture.writeback.write_out_all();
    }
}
