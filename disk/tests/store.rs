//! Store: what is put can be read, now and after a restart; its bound; its disk's failures.
//!
//! Tests of the file use a folder, and those of failures the device of `common`. A process of its own is killed while
//! it writes: that test starts this program again, with `kill_victim` as its only test.

mod common;

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::{Disk, Random, content, key, read_checked};
use quinion_disk::internals::{
    DATA_PAGES, EXTENT_PAGES_MAX, PAGE_BYTES, TestTimes, segment_start, with_times,
};
use quinion_disk::{ContentKey, Device, DiskError, DiskOptions, DiskStore, Missed};

const EXTENT: u64 = EXTENT_PAGES_MAX as u64;

fn put(store: &DiskStore, of: u64, page: u64, pages: u64) -> u64 {
    store.put(&key(of), page, &content(of, page, pages))
}

fn put_extent(store: &DiskStore, of: u64, page: u64) {
    while put(store, of, page, EXTENT) < EXTENT {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn stored_pages_are_read_at_once_and_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions::new(folder.path(), 16 << 20);
    let store = DiskStore::open(&options).unwrap();
    assert_eq!(put(&store, 1, 3, 40), 40);
    assert!(read_checked(&store, 1, 3, 40), "from memory");
    store.flush();
    assert!(read_checked(&store, 1, 5, 20), "from the disk");
    assert!(!read_checked(&store, 1, 2, 2), "a page that was not put");
    assert!(!read_checked(&store, 2, 3, 1), "another content");
    drop(store);
    let store = DiskStore::open(&options).unwrap();
    assert!(read_checked(&store, 1, 3, 40), "after a restart");
    assert_eq!(store.stats().pages, 40);
}

#[test]
fn an_orderly_end_keeps_pages_that_were_only_in_memory() {
    let options = Disk::options(16);
    let disk = Disk::of(&options);
    let store = disk.open(&options);
    put(&store, 1, 0, 5);
    drop(store);
    assert!(read_checked(&disk.open(&options), 1, 0, 5));
}

/// 1 A store is full, and some of each of its segments has been read.
/// 2 One extent is put, and the store is flushed or ends: one segment is written, and what was read of its place is
///   kept in one more.
/// 3 An end that keeps also what was read of that one's place goes round the whole ring, and forgets most of the store.
#[test]
fn a_flush_and_the_end_of_a_full_store_write_two_segments_at_most() {
    let options = Disk::options(64);
    let disk = Disk::of(&options);
    let mut store = disk.open(&options);
    let extents = 64 * DATA_PAGES as u64 / EXTENT * 5 / 4;
    (0..extents).for_each(|of| put_extent(&store, of, 0));
    store.flush();
    for (turn, ends) in [false, true, false, true].into_iter().enumerate() {
        let reads =
            (0..extents).filter(|of| of % 3 == 0 && read_checked(&store, *of, 0, EXTENT as u32)).count();
        assert!(reads > 200, "{reads} extents are read");
        let before = store.stats();
        put_extent(&store, extents + turn as u64, 0);
        store.flush();
        let after = store.stats();
        assert!(after.written_bytes - before.written_bytes <= 2 << 20, "{before:?} {after:?}");
        assert!(after.kept_pages > before.kept_pages, "{before:?} {after:?}");
        assert!(after.pages + 2 * DATA_PAGES as u64 >= before.pages, "{before:?} {after:?}");
        if ends {
            put_extent(&store, 2 * extents + turn as u64, 0);
            drop(store);
            store = disk.open(&options);
            assert!(store.stats().pages + 2 * DATA_PAGES as u64 >= after.pages, "{after:?} {store:?}");
            assert!(read_checked(&store, 2 * extents + turn as u64, 0, EXTENT as u32));
        }
        assert!(read_checked(&store, extents + turn as u64, 0, EXTENT as u32));
    }
}

/// 1 A process replaces another, which writes and syncs for longer than 2 seconds before it ends. 2 The new one found
/// the folder in use and ended too, so none was left.
#[test]
fn a_store_whose_process_takes_long_to_end_is_waited_for_if_the_options_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions::new(folder.path(), 16 << 20);
    let first = DiskStore::open(&options).unwrap();
    let end = thread::spawn(move || {
        thread::sleep(Duration::from_millis(2500));
        drop(first);
    });
    DiskStore::open(&options.in_use_max(LONG)).unwrap();
    end.join().unwrap();
}

#[test]
fn pages_that_are_there_are_not_written_again() {
    let options = Disk::options(16);
    let store = Disk::of(&options).open(&options);
    assert_eq!(put(&store, 1, 0, 8), 8);
    assert_eq!(put(&store, 1, 4, 8), 8);
    assert_eq!(store.stats().put_pages, 12);
    assert!(read_checked(&store, 1, 0, 12));
}

#[test]
fn the_bound_is_the_size_of_the_file_and_the_oldest_goes_first() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions::new(folder.path(), (16 << 20) + 12345);
    let store = DiskStore::open(&options).unwrap();
    let segments = 15;
    let rounds = DATA_PAGES as u64 / EXTENT * segments * 2;
    for round in 0..rounds {
        put_extent(&store, round, 0);
    }
    store.flush();
    assert_eq!(std::fs::metadata(folder.path().join("quinion.disk")).unwrap().len(), 16 << 20);
    assert!(store.stats().pages <= segments * DATA_PAGES as u64);
    assert!(store.stats().pages >= (segments - 1) * (DATA_PAGES as u64 - EXTENT));
    assert!(!read_checked(&store, 0, 0, 16), "the oldest went");
    assert!(read_checked(&store, rounds - 1, 0, 16));
    store.check().unwrap();
}

/// Pages are kept if a buffer is free when their segment is written over. On a busy machine puts may have all of them:
/// then again.
#[test]
fn pages_that_are_read_outlive_pages_that_are_not() {
    let is_kept = |_| {
        let options = Disk::options(16);
        let store = Disk::of(&options).open(&options);
        for round in 0..DATA_PAGES as u64 * 4 {
            put_extent(&store, round, 0);
            if round % 10 == 0 {
                read_checked(&store, 7, 0, 16);
            }
        }
        store.flush();
        assert!(!read_checked(&store, 8, 0, 16), "it was not read");
        store.check().unwrap();
        read_checked(&store, 7, 0, 16) && store.stats().kept_pages >= EXTENT
    };
    assert!((0..10).any(is_kept), "it was read all the time");
}

#[test]
fn a_flipped_bit_is_a_miss_and_is_forgotten() {
    let options = Disk::options(16);
    let disk = Disk::of(&options);
    let store = disk.open(&options);
    put(&store, 1, 0, 32);
    store.flush();
    let at = segment_start(0) as usize + 5 * PAGE_BYTES;
    disk.bytes_mut(|bytes| bytes[at] ^= 4);
    let read = |page| store.read(&key(1), page, 1, &mut |_, _| {});
    assert!(matches!(read(0), Err(Missed::Corrupt)), "the checksum is the extent's");
    assert!(matches!(read(0), Err(Missed::NotThere)));
    assert!(read(16).is_ok(), "another extent");
    assert_eq!(store.stats().corrupt_extents, 1);
    assert_eq!(put(&store, 1, 0, 16), 16);
    assert!(read_checked(&store, 1, 0, 32), "it came back");
}

#[test]
fn a_disk_that_is_behind_refuses_and_does_not_hold_up() {
    let options = Disk::options(64);
    let disk = Disk::of(&options);
    let store = disk.open(&options);
    disk.hold(true);
    let (told, ended) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let data = content(1, 0, EXTENT);
            for of in 0..1000 {
                store.put(&key(of), 0, &data);
            }
            told.send(()).unwrap();
        });
        // Not one segment of 63 is written before the last extent was put.
        let outcome = ended.recv_timeout(Duration::from_secs(60));
        disk.hold(false);
        outcome.expect("a put waits for the disk");
    });
    assert!(store.stats().refused_pages > 0);
    store.check().unwrap();
}

#[test]
fn a_disk_that_fails_is_left_alone() {
    let options = Disk::options(16);
    let disk = Disk::of(&options);
    let store = disk.open(&options);
    put(&store, 1, 0, 16);
    store.flush();
    assert!(store.trouble().is_none());
    disk.fail_writes(true);
    put(&store, 2, 0, 16);
    store.flush();
    let words = store.trouble().unwrap().to_string();
    assert!(words.contains("no such device") && words.contains("nothing is lost"), "{words}");
    assert_eq!((store.stats().pages, store.stats().extents, store.stats().errors), (0, 0, 1));
    assert!(!read_checked(&store, 1, 0, 16));
    assert_eq!(put(&store, 3, 0, 16), 0);
    disk.fail_writes(false);
    drop(store);
    assert!(read_checked(&disk.open(&options), 1, 0, 16), "what was written before is there after a restart");
}

#[test]
fn a_bad_sector_is_forgotten_and_many_switch_the_disk_off() {
    let options = Disk::options(16);
    let disk = Disk::of(&options);
    let store = disk.open(&options);
    for of in 0..40 {
        put(&store, of, 0, 16);
    }
    store.flush();
    disk.fail_reads(true);
    assert!(matches!(store.read(&key(0), 0, 1, &mut |_, _| {}), Err(Missed::Failed(_))));
    disk.fail_reads(false);
    assert!(!store.has(&key(0), 0, 1), "it is not asked for again");
    assert!(read_checked(&store, 1, 0, 16), "one bad sector is not the end");
    disk.fail_reads(true);
    for of in 2..40 {
        read_checked(&store, of, 0, 1);
    }
    assert!(store.trouble().unwrap().to_string().contains("a bad sector"));
}

#[test]
fn another_size_keeps_the_pages_that_fit() {
    let folder = tempfile::tempdir().unwrap();
    let open = |mib: u64| DiskStore::open(&DiskOptions::new(folder.path(), mib << 20)).unwrap();
    put(&open(16), 1, 0, 16);
    let larger = open(64);
    assert!(read_checked(&larger, 1, 0, 16));
    for of in 2..400 {
        put_extent(&larger, of, 0);
    }
    drop(larger);
    let smaller = open(16);
    smaller.check().unwrap();
    assert!(read_checked(&smaller, 1, 0, 16));
    assert!(!read_checked(&smaller, 399, 0, 16));
    put(&smaller, 500, 0, 16);
    assert!(read_checked(&smaller, 500, 0, 16));
}

#[test]
fn a_size_that_cannot_be_is_refused_in_words() {
    for bytes in [0, (16 << 20) - 1, u64::MAX] {
        let error = DiskStore::open(&DiskOptions::new("/nowhere", bytes)).unwrap_err();
        assert!(matches!(error, DiskError::Size { .. }), "{error}");
        assert!(error.to_string().contains("give it 16 MiB or more, and 64 TiB at most"), "{error}");
    }
}

#[test]
fn a_disk_without_the_space_says_so_and_keeps_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let error = DiskStore::open(&DiskOptions::new(folder.path(), 1 << 45)).unwrap_err();
    assert!(matches!(error, DiskError::NoSpace { .. }), "{error}");
    assert_eq!(std::fs::metadata(folder.path().join("quinion.disk")).unwrap().len(), 0);
}

#[test]
fn threads_that_put_and_read_the_same_pages_agree() {
    let options = Disk::options(16);
    let store = Disk::of(&options).open(&options);
    thread::scope(|scope| {
        for thread in 0..4 {
            let store = &store;
            scope.spawn(move || {
                let mut random = Random(thread);
                for _ in 0..4000 {
                    let (of, page) = (random.below(60), random.below(64));
                    let pages = 1 + random.below(64 - page);
                    if random.below(2) == 0 {
                        put(store, of, page, pages);
                    } else {
                        read_checked(store, of, page, pages as u32);
                    }
                }
            });
        }
    });
    assert!(store.stats().hit_pages > 0);
    assert_eq!(store.stats().corrupt_extents, 0, "a segment written over is a miss, not a corrupt one");
    store.check().unwrap();
}

#[test]
fn kill_victim() {
    let Some(folder) = std::env::var_os("QUINION_DISK_VICTIM") else { return };
    let store = DiskStore::open(&DiskOptions::new(folder, 24 << 20)).unwrap();
    for of in 0.. {
        put_extent(&store, of % 1000, of / 1000 * EXTENT);
        if of == 2000 {
            println!("two laps are written");
        }
    }
}

#[test]
fn a_process_that_is_killed_leaves_no_wrong_byte_and_most_of_its_pages() {
    use std::io::{BufRead, BufReader};
    let folder = tempfile::tempdir().unwrap();
    for round in 0..4 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["kill_victim", "--exact", "--nocapture"])
            .env("QUINION_DISK_VICTIM", folder.path())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
        while !lines.next().unwrap().unwrap().contains("two laps") {}
        thread::sleep(Duration::from_millis(37 * round));
        victim.kill().unwrap();
        assert_eq!(victim.wait().unwrap().signal(), Some(9));
        let store = DiskStore::open(&DiskOptions::new(folder.path(), 24 << 20)).unwrap();
        store.check().unwrap();
        let pages = store.stats().pages;
        assert!(pages > 20 * (DATA_PAGES as u64 - EXTENT), "{pages} pages are left of 23 segments");
        let mut right = 0;
        for of in 0..1000 {
            for extent in 0..100 {
                right += u64::from(
                    store.has(&key(of), extent * EXTENT, 16) && read_checked(&store, of, extent * EXTENT, 16),
                );
            }
        }
        assert!(right * EXTENT + DATA_PAGES as u64 >= pages, "{right} extents of {pages} pages are right");
    }
}

#[test]
fn a_content_of_any_key_and_page_number_is_taken() {
    let options = Disk::options(16);
    let store = Disk::of(&options).open(&options);
    let bytes = content(0, 0, 1);
    for page in [0, 1 << 40, (u64::MAX >> 12) - 1] {
        assert_eq!(store.put(&ContentKey([0xff; 32]), page, &bytes), 1);
        assert!(store.has(&ContentKey([0xff; 32]), page, 1));
    }
    assert!(!store.has(&ContentKey([0xff; 32]), u64::MAX, u32::MAX));
}

const LONG: Duration = Duration::from_secs(60);
/// How long stores wait for a disk that hangs. One that is well may take longer on a busy machine, so stores are filled
/// with the default.
const ANSWER_MAX: Duration = Duration::from_millis(100);

/// Returns `options` of a store that waits no longer than [`ANSWER_MAX`] for an answer.
fn impatient(options: DiskOptions) -> DiskOptions {
    with_times(options, TestTimes { answer_max: Some(ANSWER_MAX), ..TestTimes::default() })
}

/// As [`impatient`], of a store that uses its disk again at once when it answers.
fn soon_used_again(options: DiskOptions) -> DiskOptions {
    let rest = Some(Duration::from_millis(1));
    with_times(options, TestTimes { answer_max: Some(ANSWER_MAX), rest, ..TestTimes::default() })
}

/// What `call` returns, on a thread of its own. `None`: it does not return.
fn returned<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(call()));
    receiver.recv_timeout(LONG).ok()
}

/// 1 A disk stops to answer, without an error. 2 A page on it is read. 3 The reader waits for the disk for ever, while
/// the store behind has the page.
#[test]
fn a_disk_that_does_not_answer_is_left_alone_and_its_late_answer_is_ignored() {
    let options = Disk::options(16);
    let disk = Disk::of(&options);
    let store = disk.open(&options);
    put(&store, 1, 0, 40);
    store.flush();
    assert!(read_checked(&store, 1, 0, 40), "the disk is well");
    drop(store);
    let store = Arc::new(disk.open(&impatient(options.clone())));
    disk.hold_reads(true);
    let readers = (0..20).map(|_| {
        let store = Arc::clone(&store);
        thread::spawn(move || {
            let mut given = 0;
            let answer = store.read(&key(1), 0, 40, &mut |_, bytes| given += bytes.len());
            (answer, given)
        })
    });
    let readers: Vec<_> = readers.collect();
    let answers = returned(|| readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>());
    for (answer, given) in answers.expect("reads of a disk that hangs return") {
        assert!(matches!(answer, Err(Missed::Failed(_) | Missed::NotThere)), "{answer:?}");
        assert_eq!(given, 0);
    }
    let trouble = store.trouble().expect("the disk is left alone").to_string();
    assert!(trouble.contains("failed to read: no answer"), "{trouble}");
    assert_eq!((store.has(&key(1), 0, 1), put(&store, 2, 0, 1)), (false, 0));
    disk.hold_reads(false);
    assert!(matches!(store.read(&key(1), 0, 1, &mut |_, _| unreachable!()), Err(Missed::NotThere)));
    assert!(returned(move || drop(store)).is_some());
    assert!(read_checked(&disk.open(&options), 1, 0, 40), "after a restart");
}

/// 1 A disk stops to answer writes, and is asked for no page. 2 Pages that arrive are put. 3 The disk was said to be
/// well, and each page that arrived was kept in mind for it, until the end of the store.
#[test]
fn a_disk_that_does_not_answer_writes_is_left_alone_by_the_puts_that_it_refuses() {
    let options = Disk::options(16);
    let disk = Disk::of(&options);
    drop(disk.open(&options)); // its first page is written
    let store = Arc::new(disk.open(&impatient(options)));
    disk.hold(true);
    let putting = Arc::clone(&store);
    let trouble = returned(move || {
        (0..).find_map(|of| {
            put(&putting, of, 0, EXTENT);
            thread::sleep(Duration::from_millis(1));
            putting.trouble().map(|trouble| trouble.to_string())
        })
    });
    let trouble = trouble.flatten().expect("the disk is left alone");
    assert!(trouble.contains("failed to write: no answer"), "{trouble}");
    assert_eq!((store.stats().pages, store.stats().errors), (0, 1), "its numbers tell of it, too");
    assert!(!store.has(&key(0), 0, 1));
    assert!(returned(move || drop(store)).is_some(), "a store ends without its disk");
    disk.hold(false);
}

/// 1 A disk does not answer for a while, as one that is busy with another program's writes. 2 It answers again. 3 The
/// store stays off until its process is started anew. Also: 4 segments in memory, and their buffers, are lost each
/// time.
#[test]
fn a_disk_that_answers_again_is_used_again() {
    let options = Disk::options(16);
    let disk = Disk::of(&options);
    let store = disk.open(&options);
    put(&store, 1, 0, 40);
    drop(store);
    let store = Arc::new(disk.open(&soon_used_again(options)));
    let eventually = |is_so: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < LONG, "{store:?}");
            thread::sleep(Duration::from_millis(1));
        }
    };
    for round in 0..4 {
        disk.hold(true);
        disk.hold_reads(round % 2 == 1);
        let of = AtomicU64::new(100 * (round + 1));
        eventually(&|| {
            put(&store, of.fetch_add(1, Ordering::Relaxed), 0, EXTENT);
            let _ = round % 2 == 1 && read_checked(&store, 1, 0, 40);
            store.is_off()
        });
        let trouble = store.trouble().expect("the disk is left alone").to_string();
        assert!(trouble.contains("no answer") && trouble.contains("tried again"), "{trouble}");
        assert!(!store.has(&key(1), 0, 1));
        disk.hold(false);
        disk.hold_reads(false);
        eventually(&|| !store.is_off());
        if round == 0 {
            eventually(&|| read_checked(&store, 1, 0, 40));
        }
        store.check().unwrap();
        // No buffer is lost.
        eventually(&|| {
            store.flush();
            store.free_segments() >= 3
        });
        eventually(&|| {
            put(&store, 2 + round, 0, EXTENT);
            store.flush();
            read_checked(&store, 2 + round, 0, EXTENT as u32)
        });
        assert_eq!(store.stats().corrupt_extents, 0);
    }
    // The segment whose write was refused is not looked for later.
    disk.fail_writes(true);
    put(&store, 50, 0, EXTENT);
    store.flush();
    assert!(store.stats().errors > 0);
    disk.fail_writes(false);
    eventually(&|| !store.is_off());
    assert!(!store.has(&key(50), 0, 1));
    assert_eq!(store.stats().corrupt_extents, 0);
}

/// 1 A disk stalls twice, with many readers. 2 Later it refuses one read. 3 The stalls counted as refused reads, and
/// the one sector was too many.
#[test]
fn reads_without_an_answer_do_not_count_as_bad_sectors() {
    let options = Disk::options(16);
    let disk = Disk::of(&options);
    let store = disk.open(&options);
    put(&store, 1, 0, 40);
    drop(store);
    let store = disk.open(&soon_used_again(options));
    let begun = Instant::now();
    // Each time it is there anew: a page whose read got no answer is forgotten.
    let write = || {
        while !store.has(&key(1), 0, 40) {
            assert!(begun.elapsed() < LONG, "{store:?}");
            put(&store, 1, 0, 40);
            store.flush();
        }
    };
    while store.stats().errors < 16 {
        write();
        disk.hold_reads(true);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| read_checked(&store, 1, 0, 40));
            }
        });
        disk.hold_reads(false);
    }
    write();
    disk.fail_reads(true);
    assert!(!read_checked(&store, 1, 0, 1));
    disk.fail_reads(false);
    assert!(!store.is_off(), "one bad sector is none too many");
}

/// A disk that something happens to after some reads.
#[derive(Debug)]
struct ChangingDisk {
    disk: Disk,
    reads: AtomicU64,
    after: u64,
    change: fn(&Disk),
}

impl Device for ChangingDisk {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if self.reads.fetch_add(1, Ordering::Relaxed) == self.after {
            (self.change)(&self.disk);
        }
        self.disk.read_at(buffer, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.disk.write_at(bytes, offset)
    }
    fn sync(&self) -> io::Result<()> {
        self.disk.sync()
    }
}

/// 1 A disk hangs, or refuses each read. 2 A service is started with a store on it. 3 The start waits for ever, or for
/// as long as it takes to be refused once for each segment.
#[test]
fn a_disk_that_does_not_answer_or_refuses_is_not_opened() {
    let options = Disk::options(64);
    let disk = Disk::of(&options);
    drop(disk.open(&options)); // its first page is written
    let hang: fn(&Disk) = |disk| disk.hold_reads(true);
    let refuse: fn(&Disk) = |disk| disk.fail_reads(true);
    let opening = TestTimes { opening_answer_max: Some(ANSWER_MAX), ..TestTimes::default() };
    for (after, change, options, words) in [
        (0, hang, with_times(options.clone(), opening), ["the start of", "no answer"]),
        (5, hang, with_times(options.clone(), opening), ["the tables of", "no answer"]),
        (5, refuse, options.clone(), ["the tables of", "a bad sector"]),
    ] {
        let device = ChangingDisk { disk: disk.clone(), reads: AtomicU64::new(0), after, change };
        let opened = returned(move || DiskStore::open_on(Box::new(device), &options));
        let error = opened.expect("an opening ends").expect_err("the disk cannot be read").to_string();
        assert!(words.iter().all(|words| error.contains(words)), "{error}");
        disk.hold_reads(false);
        disk.fail_reads(false);
    }
    drop(disk.open(&options));
}

/// 1 A disk stops to answer a write. 2 The store is dropped. 3 The end waits for the writer, which waits for the disk.
#[test]
fn the_end_of_a_store_does_not_wait_for_a_disk_that_does_not_answer() {
    let options = Disk::options(16);
    for reads_hang in [false, true] {
        let disk = Disk::of(&options);
        let store = disk.open(&options);
        put(&store, 1, 0, 40);
        drop(store);
        let store = disk.open(&impatient(options.clone()));
        disk.hold(true);
        disk.hold_reads(reads_hang);
        put(&store, 2, 0, 40);
        if reads_hang {
            assert!(returned(move || store.read(&key(1), 0, 1, &mut |_, _| ()).is_err()).is_some());
        } else {
            assert!(returned(move || drop(store)).is_some(), "a store ends without its disk");
        }
        disk.hold(false);
        disk.hold_reads(false);
    }
}
