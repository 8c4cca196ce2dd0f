//! Fsync errors: a write that fails is told once to every handle, and is not lost meanwhile.
//!
//! ```text
//!   handle 0..9   write       |  the device fails     |  sync    sync      |  sync
//!                 (dirty)     |  (no call waits)      |  Err, each once    |  Ok: it is durable now
//! ```
//!
//! The background is the finding of 2018 that a database which repeated a failed fsync got a success, though the kernel
//! had marked the pages clean and discarded their bytes. Here a page that could not be written stays dirty and
//! readable, every handle reports each error, and the sync that returns `Ok` afterwards has written it.
//!
//! The device is a disk that remembers, which tells after a crash what is durable.

use std::sync::Arc;
use std::thread;

use quinion::backend::Backend;
use quinion::{Cache, Durability, Error, ErrorKind, File, OpenOptions, WriteOptions};
use quinion_testing::content::{Dice, PAGE, fill_content, verify};
use quinion_testing::doubles::{CrashDisk, FailureCount, Faults, SimulatedBackend};

const HANDLES: usize = 10;
const PAGES: usize = 20;
const FILE: u32 = 3;

struct Fixture {
    disk: Arc<CrashDisk>,
    device: Arc<SimulatedBackend>,
    cache: Cache,
}

fn generation_of(generation: u32) -> Vec<u8> {
    let mut bytes = vec![0; PAGES * PAGE];
    fill_content(&mut bytes, FILE, 0, generation);
    bytes
}

impl Fixture {
    fn new() -> Self {
        let disk = Arc::new(CrashDisk::new(generation_of(1)));
        let device = Arc::new(SimulatedBackend::of_crash_disk(Arc::clone(&disk), Faults::default()));
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        Self { disk, device, cache }
    }

    fn open(&self) -> File {
        let device = Arc::clone(&self.device) as Arc<dyn Backend>;
        self.cache.open_backend_with(device, OpenOptions::new().write(true)).unwrap()
    }

    fn open_all(&self) -> Vec<File> {
        (0..HANDLES).map(|_| self.open()).collect()
    }

    fn write_back(&self, file: &File) {
        file.write_back().unwrap();
        // Any thread that waits reaps completions: this one reads a page that is not cached.
        file.dont_need(0, PAGE as u64).unwrap();
        while self.device.held() > 0 {
            let mut page = [0; PAGE];
            file.dont_need((PAGES - 1) as u64 * PAGE as u64, PAGE as u64).unwrap();
            file.read_exact_at(&mut page, (PAGES - 1) as u64 * PAGE as u64).unwrap();
            thread::yield_now();
        }
    }

    /// Checks that all states that a crash may leave now hold these bytes.
    #[track_caller]
    fn is_durable(&self, bytes: &[u8]) {
        let log = self.disk.log();
        for seed in 0..200 {
            assert!(log.state(log.len(), seed) == bytes, "a crash may take it away (seed {seed})");
        }
    }

    #[track_caller]
    fn is_read(file: &File, bytes: &[u8]) {
        let mut found = vec![0; bytes.len()];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == bytes, "what was written is not what is read");
    }
}

#[track_caller]
fn errno_of(told: quinion::error::Result<()>) -> Option<i32> {
    let error: Error = told.err()?;
    let kind = match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => ErrorKind::NoSpace,
        Some(libc::EROFS) => ErrorKind::ReadOnly,
        _ => ErrorKind::Sync,
    };
    assert_eq!(error.kind(), kind, "{error}");
    Some(error.raw_os_error().unwrap_or_else(|| panic!("{error} has no number")))
}

/// 1. One handle writes, and what it wrote is written back.
/// 2. Another, which can only read, syncs the file. It is told that all is well, and nothing was made durable.
#[test]
fn a_read_only_handle_syncs_others_writes_and_reports_their_errors() {
    let fixture = Fixture::new();
    let device = || Arc::clone(&fixture.device) as Arc<dyn Backend>;
    let (writer, reader) = (fixture.open(), fixture.cache.open_backend(device()).unwrap());
    for generation in [2, 3] {
        let now = change(&writer, generation);
        if generation == 2 {
            fixture.write_back(&writer);
        }
        assert_eq!(errno_of(reader.sync_data()), None);
        fixture.is_durable(&now);
    }
    let now = change(&writer, 4);
    fixture.device.fail_write(0, libc::EIO);
    assert_eq!(errno_of(reader.sync_data()), Some(libc::EIO));
    fixture.device.mend();
    assert_eq!(errno_of(reader.sync_data()), None);
    fixture.is_durable(&now);
}

/// Pages from the second on, which is where everything here is changed.
fn change(file: &File, generation: u32) -> Vec<u8> {
    let bytes = generation_of(generation);
    file.write_all_at(&bytes[PAGE..(PAGES - 1) * PAGE], PAGE as u64).unwrap();
    let mut now = generation_of(1);
    now[PAGE..(PAGES - 1) * PAGE].copy_from_slice(&bytes[PAGE..(PAGES - 1) * PAGE]);
    now
}

#[test]
fn each_of_ten_handles_hears_of_an_error_in_the_background_once() {
    for errno in [libc::EIO, libc::ENOSPC, libc::EDQUOT] {
        let fixture = Fixture::new();
        let files = fixture.open_all();
        let now = change(&files[0], 2);
        for nth in 0..100 {
            fixture.device.fail_write(nth, errno);
        }
        fixture.write_back(&files[1]);
        assert!(fixture.device.writes() > 0, "the device was asked");
        fixture.device.mend();
        // (A device says of some pages that they were written before it failed. Others are still to be.)
        assert!(files[0].dirty_bytes().unwrap() > 0, "what failed is not taken for written");
        Fixture::is_read(&files[3], &now);
        for (nth, file) in files.iter().enumerate() {
            assert_eq!(errno_of(file.sync_data()), Some(errno), "handle {nth}, which had not heard of it");
            assert_eq!(errno_of(file.sync_data()), None, "handle {nth}, which had");
        }
        assert_eq!(files[0].dirty_bytes().unwrap(), 0);
        fixture.is_durable(&now);
    }
}

#[test]
fn each_handle_hears_of_a_sync_that_failed_though_another_one_asked() {
    let fixture = Fixture::new();
    let files = fixture.open_all();
    let now = change(&files[0], 2);
    fixture.device.fail_sync(0, libc::EIO);
    assert_eq!(errno_of(files[4].sync_all()), Some(libc::EIO));
    // What the device had taken and not made durable is to be written again.
    Fixture::is_read(&files[0], &now);
    for (nth, file) in files.iter().enumerate() {
        let expected = (nth != 4).then_some(libc::EIO);
        assert_eq!(errno_of(file.sync_all()), expected, "handle {nth}");
        assert_eq!(errno_of(file.sync_all()), None, "handle {nth}");
    }
    fixture.is_durable(&now);
}

/// 1. A sync fails, and the device forgets what it could not make durable.
/// 2. The pages count as written.
/// 3. The next sync has nothing to do, and says that all is well.
#[test]
fn a_sync_that_is_ok_after_one_that_failed_has_written_everything_again() {
    let fixture = Fixture::new();
    let file = fixture.open();
    let now = change(&file, 2);
    for round in 0..5 {
        fixture.device.fail_sync(0, libc::EIO);
        assert_eq!(errno_of(file.sync_data()), Some(libc::EIO), "round {round}");
    }
    assert_eq!(errno_of(file.sync_data()), None);
    fixture.is_durable(&now);
    // With nothing changed, once more: it stays so.
    assert_eq!(errno_of(file.sync_data()), None);
    fixture.is_durable(&now);
}

#[test]
fn a_sync_continues_after_an_error_and_writes_the_other_pages() {
    let fixture = Fixture::new();
    let file = fixture.open();
    let now = change(&file, 2);
    let bad = (5 * PAGE) as u64;
    fixture.device.fail_writes_at(bad..bad + 1, FailureCount::Always);
    // Three parts with a clean page between them, so that one of them is bad and two are not.
    assert_eq!(errno_of(file.sync_data()), Some(libc::EIO));
    assert!(file.dirty_bytes().unwrap() >= PAGE as u64, "the bad page is still to be written");
    assert_eq!(errno_of(file.sync_data()), Some(libc::EIO), "it was tried again, and failed again");
    Fixture::is_read(&file, &now);
    fixture.device.mend();
    assert_eq!(errno_of(file.sync_data()), None);
    fixture.is_durable(&now);
}

#[test]
fn a_handle_opened_later_reports_unreported_errors_and_no_others() {
    let fixture = Fixture::new();
    let first = fixture.open();
    let fail = |generation| {
        change(&first, generation);
        (0..100).for_each(|nth| fixture.device.fail_write(nth, libc::EIO));
        fixture.write_back(&first);
        fixture.device.mend();
    };
    // No handle has reported it: the next open does, and no later one.
    fail(2);
    let second = fixture.open();
    assert_eq!(errno_of(second.sync_data()), Some(libc::EIO));
    let third = fixture.open();
    assert_eq!(errno_of(third.sync_data()), None);
    // The first one had it open all the time.
    assert_eq!(errno_of(first.sync_data()), Some(libc::EIO));
    // A handle changed a page and was closed without a sync: the next open reports the error.
    {
        let writer = fixture.open();
        change(&writer, 3);
        (0..100).for_each(|nth| fixture.device.fail_write(nth, libc::EIO));
        fixture.write_back(&writer);
        fixture.device.mend();
    }
    let fourth = fixture.open();
    assert_eq!(errno_of(fourth.sync_data()), Some(libc::EIO));
    assert_eq!(errno_of(fourth.sync_data()), None);
    for file in [&first, &second, &third] {
        assert_eq!(errno_of(file.sync_data()), Some(libc::EIO));
        assert_eq!(errno_of(file.sync_data()), None);
    }
}

#[test]
fn unreported_errors_are_one_report_of_the_last() {
    let fixture = Fixture::new();
    let (first, second) = (fixture.open(), fixture.open());
    let fail = |generation, errno| {
        change(&first, generation);
        (0..100).for_each(|nth| fixture.device.fail_write(nth, errno));
        fixture.write_back(&first);
        fixture.device.mend();
    };
    fail(2, libc::EIO);
    fail(3, libc::EIO);
    assert_eq!(errno_of(first.sync_data()), Some(libc::EIO), "twice the same is told once");
    assert_eq!(errno_of(first.sync_data()), None);
    // A handle has reported it, so the next error is a new one, of the same number or not.
    fail(4, libc::EIO);
    assert_eq!(errno_of(first.sync_data()), Some(libc::EIO));
    fail(5, libc::EIO);
    fail(6, libc::ENOSPC);
    assert_eq!(errno_of(first.sync_data()), Some(libc::ENOSPC), "the last one counts");
    assert_eq!(errno_of(second.sync_data()), Some(libc::ENOSPC));
    assert_eq!([errno_of(first.sync_data()), errno_of(second.sync_data())], [None; 2]);
}

#[test]
fn a_clone_is_the_same_open_file_and_reports_for_both() {
    let fixture = Fixture::new();
    let (file, other) = (fixture.open(), fixture.open());
    let clone = file.clone();
    change(&file, 2);
    fixture.device.fail_sync(0, libc::EIO);
    assert_eq!(errno_of(other.sync_data()), Some(libc::EIO));
    assert_eq!(errno_of(clone.sync_data()), Some(libc::EIO));
    assert_eq!([errno_of(file.sync_data()), errno_of(clone.sync_data())], [None; 2]);
}

#[test]
fn a_file_system_that_became_read_only_loses_nothing_that_memory_can_keep() {
    let fixture = Fixture::new();
    let files = fixture.open_all();
    let mut now = generation_of(1);
    for generation in 2..6 {
        now = change(&files[generation % HANDLES], generation as u32);
        (0..1000).for_each(|nth| fixture.device.fail_write(nth, libc::EROFS));
        (0..1000).for_each(|nth| fixture.device.fail_sync(nth, libc::EROFS));
        for file in &files {
            assert_eq!(errno_of(file.sync_all()), Some(libc::EROFS));
        }
        Fixture::is_read(&files[0], &now);
        assert!(files[0].dirty_bytes().unwrap() > 0, "nothing is given up");
        fixture.device.mend();
    }
    // It is mounted for writing again. All handles have reported the last error.
    for file in &files {
        let _ = errno_of(file.sync_all());
        assert_eq!(errno_of(file.sync_all()), None);
    }
    fixture.is_durable(&now);
}

#[test]
fn a_durable_write_says_itself_that_it_is_not() {
    let fixture = Fixture::new();
    let (file, other) = (fixture.open(), fixture.open());
    let durably = WriteOptions::new().durability(Durability::Data);
    let bytes = generation_of(2);
    fixture.device.fail_sync(0, libc::EIO);
    let error = file.write_at_with(&bytes[..PAGE], 0, durably).unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Sync, Some(libc::EIO)), "{error}");
    // Its bytes are in the cache all the same, and the next one makes them durable.
    let mut found = vec![0; PAGE];
    file.read_exact_at(&mut found, 0).unwrap();
    verify(&found, FILE, 0).unwrap();
    assert!(found == bytes[..PAGE]);
    assert_eq!(errno_of(other.sync_data()), Some(libc::EIO));
    assert_eq!(file.write_at_with(&bytes[PAGE..2 * PAGE], PAGE as u64, durably).unwrap(), PAGE);
    assert_eq!(errno_of(file.sync_data()), None);
    let now = [&bytes[..2 * PAGE], &generation_of(1)[2 * PAGE..]].concat();
    fixture.is_durable(&now);
}

/// The words of an error say what is to be done.
#[test]
fn errors_of_syncs_have_a_remedy() {
    for (errno, word) in [(libc::EIO, "sync"), (libc::ENOSPC, "space"), (libc::EROFS, "sync")] {
        let fixture = Fixture::new();
        let file = fixture.open();
        change(&file, 2);
        (0..100).for_each(|nth| fixture.device.fail_write(nth, errno));
        let words = file.sync_data().unwrap_err().to_string();
        assert!(words.contains(word) && words.len() > 40, "{words}");
    }
}

/// Ten handles, each with a thread, on a device that fails now and then: a handle that is told `Ok` has everything that
/// was written before durable; no error is told twice by one handle without a new failure.
#[test]
fn ten_handles_at_once_report_the_truth() {
    let fixture = Fixture::new();
    let files = fixture.open_all();
    let rounds = if std::env::var_os("QUINION_SOAK").is_some() { 2000 } else { 40 };
    let work = |nth: usize, file: &File| {
        let (page, mut told) = ((nth + 1) * PAGE, 0);
        for generation in 0..rounds as u32 {
            let mut bytes = [0; PAGE];
            fill_content(&mut bytes, FILE, page as u64, generation);
            file.write_all_at(&bytes, page as u64).unwrap();
            told += u32::from(errno_of(file.sync_data()).is_some());
            let mut found = [0; PAGE];
            file.read_exact_at(&mut found, page as u64).unwrap();
            assert!(found == bytes, "page {nth} in generation {generation}");
        }
        told
    };
    let errors = thread::scope(|scope| {
        let device = &fixture.device;
        scope.spawn(move || {
            let mut dice = Dice::new(5);
            for _ in 0..rounds {
                match dice.below(3) {
                    0 => device.fail_write(dice.below(4), libc::EIO),
                    1 => device.fail_sync(dice.below(4), libc::ENOSPC),
                    _ => thread::yield_now(),
                }
            }
        });
        let work = &work;
        let workers: Vec<_> =
            files.iter().enumerate().map(|(nth, file)| scope.spawn(move || work(nth, file))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum::<u32>()
    });
    println!("{errors} errors were told");
    fixture.device.mend();
    for file in &files {
        let _ = errno_of(file.sync_data());
        assert_eq!(errno_of(file.sync_data()), None);
    }
    let mut now = generation_of(1);
    for nth in 0..HANDLES {
        let page = (nth + 1) * PAGE;
        fill_content(&mut now[page..page + PAGE], FILE, page as u64, rounds as u32 - 1);
    }
    fixture.is_durable(&now);
}
