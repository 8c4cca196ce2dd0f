//! What users of the standard library's files expect of Quinion's: shapes, kinds of errors, locks, and what a drop
//! swallows.
//!
//! An engine that is moved from `std::fs::File` to `quinion::File` should need no adapter for any of this. Each test is
//! named by what such an engine relies on.

use std::error::Error as _;
use std::fs;
use std::io::{self, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::sync::Arc;

use quinion::backend::MemoryFile;
use quinion::{Cache, Error, ErrorKind, File, OpenOptions, ReadOptions};
use quinion_testing::doubles::{Faults, SimulatedBackend};

fn cache() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).build().expect("there is memory")
}

fn file_of(content: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, content).unwrap();
    (folder, path)
}

#[test]
fn open_options_are_set_by_reference() {
    let (_folder, path) = file_of(b"content");
    let mut options = OpenOptions::new();
    options.write(true);
    options.truncate(false);
    let file = cache().open_with(&path, &options).unwrap();
    assert!(file.is_writable());
    assert_eq!(file.path(), Some(path.as_path()));
}

#[test]
fn a_reference_reads_seeks_and_writes() {
    let (_folder, path) = file_of(b"0123456789");
    let file = cache().open_with(&path, OpenOptions::new().write(true)).unwrap();
    let mut by_reference = &file;
    let mut four = [0; 4];
    by_reference.read_exact(&mut four).unwrap();
    assert_eq!(&four, b"0123");
    by_reference.write_all(b"xy").unwrap();
    assert_eq!(by_reference.stream_position().unwrap(), 6);
    by_reference.seek(SeekFrom::Start(3)).unwrap();
    let mut rest = String::new();
    by_reference.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "3xy6789");
}

#[test]
fn a_vectored_read_fills_buffer_after_buffer_and_ends_with_the_file() {
    let content: Vec<u8> = (0..10_000_u32).map(|at| (at % 251) as u8).collect();
    let (_folder, path) = file_of(&content);
    let file = cache().open(&path).unwrap();
    let (mut first, mut second, mut third) = ([0; 5000], [0; 4096], [0; 4096]);
    let mut buffers =
        [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second), IoSliceMut::new(&mut third)];
    assert_eq!(file.read_vectored_at(&mut buffers, 100).unwrap(), 9_900);
    let read: Vec<u8> = [&first[..], &second[..], &third[..]].concat();
    assert_eq!(read[..9_900], content[100..]);
    assert_eq!(file.read_vectored_at(&mut [], 0).unwrap(), 0);
}

#[test]
fn errors_convert_to_the_kinds_of_std() {
    let (folder, path) = file_of(b"0123456789");
    let cache = cache();
    let file = cache.open(&path).unwrap();
    let past = file.read_exact_at(&mut [0; 11], 0).unwrap_err();
    assert_eq!(past.kind(), ErrorKind::UnexpectedEof);
    assert_eq!(io::Error::from(past).kind(), io::ErrorKind::UnexpectedEof);
    let directory = cache.open(folder.path()).unwrap_err();
    assert_eq!(io::Error::from(directory).kind(), io::ErrorKind::IsADirectory);
    let missing = cache.open(folder.path().join("none")).unwrap_err();
    assert_eq!(io::Error::from(missing).kind(), io::ErrorKind::NotFound);
}

#[test]
fn debug_of_an_error_is_readable_and_an_error_is_static() {
    fn is_static<E: std::error::Error + Send + Sync + 'static>(_: &E) {}
    let error: Error = cache().open("/no/such/file").unwrap_err();
    is_static(&error);
    let shown = format!("{error:?}");
    assert!(shown.starts_with("cannot open /no/such/file: No such file"), "{shown}");
    assert!(shown.ends_with("(Open)"), "{shown}");
    assert!(error.source().is_some());
}

#[test]
fn metadata_shows_growth_by_another_process() {
    let (_folder, path) = file_of(b"0123456789");
    let file = cache().open(&path).unwrap();
    let mut other = fs::OpenOptions::new().append(true).open(&path).unwrap();
    other.write_all(b"more").unwrap();
    let metadata = file.metadata().unwrap();
    let known = fs::metadata(&path).unwrap();
    assert_eq!(metadata.len(), 14);
    assert_eq!(file.len(), 14, "it is known from now on");
    assert_eq!(metadata.modified(), known.modified().unwrap());
    assert_eq!(metadata.ino(), std::os::unix::fs::MetadataExt::ino(&known));
}

#[test]
fn a_lock_keeps_out_other_handles_and_std() {
    let (_folder, path) = file_of(b"0123456789");
    let cache = cache();
    let (one, two) = (cache.open(&path).unwrap(), cache.open(&path).unwrap());
    one.lock().unwrap();
    assert!(!two.try_lock().unwrap() && !two.try_lock_shared().unwrap());
    assert!(one.clone().try_lock().unwrap(), "a clone has the lock of its handle");
    one.unlock().unwrap();
    assert!(two.try_lock_shared().unwrap() && one.try_lock_shared().unwrap());
    assert!(!one.try_lock().unwrap());
    drop(two);
    assert!(one.try_lock().unwrap(), "the end of a handle gives its lock back");
    let backend = cache.open_backend(Arc::new(MemoryFile::new(vec![0; 10]))).unwrap();
    assert_eq!(backend.lock().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_descriptor_is_adopted_for_writing() {
    let (_folder, path) = file_of(b"0123456789");
    let theirs = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let cache = cache();
    let reads = cache.adopt(theirs.as_fd()).unwrap();
    assert_eq!(reads.write_at(b"x", 0).unwrap_err().kind(), ErrorKind::ReadOnly);
    let writes = cache.adopt_with(theirs.as_fd(), OpenOptions::new().write(true)).unwrap();
    writes.write_all_at(b"xyz", 1).unwrap();
    writes.sync_data().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"0xyz456789");
    assert_eq!(writes.path(), None);
}

#[test]
fn syncing_the_cache_makes_closed_files_durable_and_reports_failures() {
    let memory = Arc::new(MemoryFile::new(vec![0; 8192]));
    let disk = Arc::new(SimulatedBackend::of_memory(Arc::clone(&memory), Faults::default()));
    let cache = cache();
    let (_folder, path) = file_of(b"0123456789");
    let good = cache.open_with(&path, OpenOptions::new().write(true)).unwrap();
    let bad = cache.open_backend_with(Arc::clone(&disk) as _, OpenOptions::new().write(true)).unwrap();
    good.write_all_at(b"ab", 0).unwrap();
    bad.write_all_at(b"cd", 0).unwrap();
    drop((good, bad));
    disk.fail_sync(0, 5); // EIO
    let failed = cache.sync_all().unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Sync);
    assert_eq!(&fs::read(&path).unwrap()[..2], b"ab", "the others are tried all the same");
    cache.close().expect("what failed was tried again");
}

#[test]
fn stats_show_themselves_and_the_difference_of_an_interval() {
    let (_folder, path) = file_of(&vec![7; 64 << 10]);
    let cache = cache();
    assert_eq!(cache.stats().hit_ratio(), None);
    let file = cache.open(&path).unwrap();
    file.read_exact_at(&mut [0; 4096], 0).unwrap();
    let before = cache.stats();
    for _ in 0..3 {
        file.read_exact_at(&mut [0; 4096], 0).unwrap();
    }
    let interval = cache.stats().since(&before);
    assert_eq!((interval.reads, interval.hits, interval.misses), (3, 3, 0));
    assert_eq!(interval.hit_ratio(), Some(1.0));
    assert_eq!(interval.cached_pages, cache.stats().cached_pages, "a gauge is not subtracted");
    let shown = cache.stats().to_string();
    assert!(shown.contains("reads   4 calls") && shown.contains("75.0 % hits"), "{shown}");
    let names: std::collections::HashSet<_> = cache.stats().numbers().map(|(name, _)| name).into();
    assert_eq!(names.len(), cache.stats().numbers().len(), "each number has a name of its own");
    let described = quinion::Stats::describe();
    assert!(described.iter().zip(cache.stats().numbers()).all(|(about, (name, _))| about.name == name));
    let about = |name| *described.iter().find(|about| about.name == name).unwrap();
    assert_eq!((about("reads").is_count, about("reads").help), (true, "Read calls."));
    // A monitor shows one number without those beside it, and no links.
    for about in &described {
        let refers =
            about.help.contains("](") || about.help.contains("Of these") || about.help.contains("[`");
        assert!(!refers && about.help.ends_with('.') && !about.help.contains(". "), "{about:?}");
    }
    assert!(
        !about("memory_bytes").is_count && about("failed_pages").help.contains("failed to read them; each")
    );
}

#[test]
fn pins_are_slices_iterators_and_clones() {
    let content: Vec<u8> = (0..300_000_u32).map(|at| (at % 241) as u8).collect();
    let (_folder, path) = file_of(&content);
    let cache = cache();
    let file: File = cache.open(&path).unwrap();
    let pinned = file.pin(5, 100).unwrap();
    assert_eq!(pinned.as_slice(), Some(&content[5..105]));
    // Folios of one page each, read backwards, hardly lie in a row.
    file.set_folio_orders(0, 0).unwrap();
    for page in (10..60).rev() {
        file.read_at(&mut [0; 1], page * 4096).unwrap();
    }
    let wide = file.pin(40_960, 200_000).unwrap();
    let clone = wide.clone();
    drop(wide);
    assert!(cache.stats().pinned_bytes >= 200_000, "the clone keeps the pins");
    let gathered: Vec<u8> = (&clone).into_iter().flatten().copied().collect();
    assert_eq!(gathered, content[40_960..240_960]);
    assert_eq!(clone.as_ref(), &content[40_960..240_960]);
    assert_eq!(clone.to_vec(), gathered);
    drop((clone, pinned));
    assert_eq!(cache.stats().pinned_bytes, 0);
}

#[test]
fn a_pin_becomes_bytes_without_a_copy() {
    let (_folder, path) = file_of(&[7; 10_000]);
    let cache = cache();
    let pinned = cache.open(&path).unwrap().pin(100, 4096).unwrap();
    let first = pinned.as_slice().map(<[u8]>::as_ptr);
    let bytes = bytes::Bytes::from_owner(pinned);
    assert_eq!(Some(bytes.as_ptr()), first, "the bytes are the cache's own");
    let (head, tail) = (bytes.slice(..1000), bytes.slice(1000..));
    drop(bytes);
    assert_eq!((head.len(), tail.len()), (1000, 3096));
    assert!(cache.stats().pinned_bytes >= 4096, "the slices keep the pin");
    drop((head, tail));
    assert_eq!(cache.stats().pinned_bytes, 0);
}

#[test]
fn a_pin_that_may_not_wait_is_of_all_or_nothing() {
    let content: Vec<u8> = (0..64_000_u32).map(|at| (at % 239) as u8).collect();
    let (_folder, path) = file_of(&content);
    let cache = cache();
    let file = cache.open(&path).unwrap();
    file.set_folio_orders(0, 0).unwrap();
    file.advise(quinion::Hint::Random).unwrap();
    let cached_only = ReadOptions::new().cached_only(true);
    file.read_exact_at(&mut [0; 4096], 8192).unwrap();
    let error = file.pin_with(4096, 8192, cached_only).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
    let error = file.pin_with(8192, 8192, cached_only).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock, "the first page was there, and is not pinned: {error}");
    assert_eq!((cache.stats().pinned_bytes, file.cached_pages()), (0, 1));
    let pinned = file.pin_with(8192, 4096, cached_only).unwrap();
    assert_eq!(pinned.as_ref(), &content[8192..12_288]);
    // With `nowait` the read is under way, and the next read that waits finds it.
    let nowait = ReadOptions::new().nowait(true);
    let error = file.pin_with(40_960, 4096, nowait).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
    let before = cache.stats().device_reads;
    assert_eq!(file.pin(40_960, 4096).unwrap().as_ref(), &content[40_960..45_056]);
    assert!(cache.stats().device_reads <= before + 1, "it was not read twice");
    assert!(file.pin_with(64_000, 10, cached_only).unwrap().is_empty(), "nothing is there to wait for");
}

/// What an engine that read a mapping of its file expects: one slice of a range as long as it likes, without a copy.
#[test]
fn a_long_pin_in_pieces_is_one_slice_without_a_copy() {
    let content: Vec<u8> = (0..6_000_000_u32).map(|at| (at / 4096 % 241 + at % 11) as u8).collect();
    let (_folder, path) = file_of(&content);
    let (_other_folder, other) = file_of(&content);
    let cache = cache();
    let (file, other) = (cache.open(&path).unwrap(), cache.open(&other).unwrap());
    // In turn, so that no two pieces of one file follow each other in memory.
    for at in (0..4 << 20).step_by(128 << 10) {
        for file in [&file, &other] {
            file.set_folio_orders(5, 5).unwrap();
            file.advise(quinion::Hint::Random).unwrap();
            drop(file.pin(at, 128 << 10).unwrap());
        }
    }
    let range = 5000..3_000_017;
    let pinned = file.pin(range.start as u64, range.len()).unwrap();
    assert!(pinned.chunks().count() > 10 && pinned.as_slice().is_none(), "it lies in pieces");
    let bytes = pinned.mapped().expect("its pieces are long");
    assert!(bytes == &content[range.clone()]);
    assert_eq!(bytes.as_ptr(), pinned.as_ref().as_ptr(), "it is mapped once");
    let lies_in_the_arena = |bytes: &[u8]| {
        let at = bytes.as_ptr().addr();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let is_there = |line: &&str| {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let hex = |text| usize::from_str_radix(text, 16).unwrap();
            (hex(from)..hex(to)).contains(&at)
        };
        let line = maps.lines().find(is_there).expect("it is mapped").to_owned();
        assert!(!line.contains("memfd") || line.contains(" r--s "), "nobody may write there: {line}");
        line.contains("memfd:quinion")
    };
    assert!(lies_in_the_arena(bytes), "it is the cache's memory, and no copy");
    // It stays what it was, whatever becomes of the file and the cache.
    fs::write(&path, vec![0; 6_000_000]).unwrap();
    let mut new = [1; 100];
    cache.open(&path).unwrap().read_exact_at(&mut new, 5000).unwrap();
    assert_eq!(new, [0; 100]);
    drop((file, other, cache));
    assert!(bytes == &content[range.clone()]);
    // Short pieces are copied.
    let cache = self::cache();
    fs::write(&path, &content).unwrap();
    let file = cache.open(&path).unwrap();
    file.set_folio_orders(0, 0).unwrap();
    file.advise(quinion::Hint::Random).unwrap();
    for at in [3, 1, 0, 2] {
        drop(file.pin(at * 4096, 4096).unwrap());
    }
    let short = file.pin(0, 16_384).unwrap();
    assert!(short.mapped().is_none() && !lies_in_the_arena(short.as_ref()));
    assert_eq!(short.as_ref(), &content[..16_384]);
}
