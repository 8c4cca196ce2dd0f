//! Flush: what is written is what the file holds, and not a byte more.
//!
//! Random flushes, sizes, holes and reads are applied to a backend and to a vector, and after each step a plain read of
//! the file by the kernel is compared with the vector. Each kind of backend has its turn: files by io_uring and by
//! threads, on a disk, where they are written directly, and in memory, where they are not; bytes in memory; a user's
//! source; a device with faults; a disk that remembers.

use quinion_testing::hazard;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use quinion::backend::{
    Attributes, Backend, Identity, Mechanism, MemoryFile, ReadAt, SyncKind, Version, WaitQueue, WriteAt,
};
use quinion::internals::system_files::{
    Creation, Engine, EngineOptions, InitialContent, IoMode, LocalFile, OpenError, OpenForWrite,
};
use quinion_testing::doubles::{
    CompletionOrder, CompletionPoint, CrashDisk, FailureCount, Faults, SimulatedBackend, WriteFaults,
};
use quinion_testing::fixtures::transfers::{PAGE, POISON, Run, read, write};
use tempfile::TempDir;

const MECHANISMS: [Mechanism; 2] = [Mechanism::Ring, Mechanism::Threads];
const ALL: Range<u64> = 0..u64::MAX;
const PAGES: usize = 40;

fn disk() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn folders() -> [TempDir; 2] {
    [disk(), TempDir::new_in("/dev/shm").unwrap()]
}

fn engine(mechanism: Mechanism, queue_depth: usize, io_bytes_max: usize) -> (Arc<WaitQueue>, Engine) {
    let wait_queue = Arc::new(WaitQueue::new());
    let options = EngineOptions { mechanism, queue_depth, io_bytes_max, ..EngineOptions::default() };
    (Arc::clone(&wait_queue), Engine::new(wait_queue, options))
}

const NEW: OpenForWrite =
    OpenForWrite { creation: Creation::MustBeNew, start: InitialContent::Kept, mode: 0o644 };

fn bytes(generation: u32, len: usize) -> Vec<u8> {
    let byte = |at: usize| {
        (at as u32).wrapping_mul(0x9e37_79b9).wrapping_add(generation.wrapping_mul(0x85eb_ca6b)) >> 24
    };
    (0..len).map(|at| byte(at) as u8).map(|byte| if byte == POISON || byte == 0 { 1 } else { byte }).collect()
}

#[derive(Clone, Debug)]
enum Step {
    /// Runs of (page, bytes), at once; those that overlap an earlier one are left out.
    Flush(Vec<(usize, usize)>),
    SetSize(usize),
    Punch(usize, usize),
    Sync(SyncKind),
    Read(usize, usize),
}

fn lens() -> impl Strategy<Value = usize> {
    prop_oneof![
        prop::sample::select(vec![1, 511, 512, 513, 4095, 4096, 4097, 4608, 8192, 12_289, 40_000]),
        1..60_000usize
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    let sizes = prop_oneof![(0..PAGES).prop_map(|page| page * PAGE), 0..PAGES * PAGE];
    prop_oneof![
        8 => prop::collection::vec((0..PAGES, lens()), 1..5).prop_map(Step::Flush),
        2 => sizes.clone().prop_map(Step::SetSize),
        2 => (sizes, lens()).prop_map(|(at, len)| Step::Punch(at, len)),
        1 => prop::sample::select(vec![SyncKind::Data, SyncKind::All]).prop_map(Step::Sync),
        4 => (0..PAGES, 1..20usize).prop_map(|(page, pages)| Step::Read(page, pages)),
    ]
}

struct Story<'a> {
    wait_queue: Arc<WaitQueue>,
    backend: &'a dyn Backend,
    twin: Vec<u8>,
    look: &'a dyn Fn() -> Vec<u8>,
    generation: u32,
}

impl<'a> Story<'a> {
    fn new(wait_queue: &Arc<WaitQueue>, backend: &'a dyn Backend, look: &'a dyn Fn() -> Vec<u8>) -> Self {
        assert!(backend.can_write());
        Self { wait_queue: Arc::clone(wait_queue), backend, twin: Vec::new(), look, generation: 0 }
    }

    fn tell(&mut self, step: &Step) {
        self.generation += 1;
        match step {
            Step::Flush(runs) => self.flush(runs),
            &Step::SetSize(size) => {
                self.backend.set_size(size as u64).unwrap();
                self.twin.resize(size, 0);
            }
            &Step::Punch(at, len) => {
                self.backend.punch(at as u64..(at + len) as u64).unwrap();
                let end = (at + len).min(self.twin.len());
                self.twin[at.min(end)..end].fill(0);
            }
            &Step::Sync(kind) => self.backend.sync(kind, ALL).unwrap(),
            &Step::Read(page, pages) => {
                let wanted = &self.twin[self.twin.len().min(page * PAGE)..];
                let wanted = &wanted[..wanted.len().min(pages * PAGE)];
                assert!(
                    read(&self.wait_queue, self.backend, page as u64, pages) == wanted,
                    "a read of {pages} from {page}"
                );
            }
        }
        let size = self.backend.attributes().unwrap().size;
        assert_eq!(size, self.twin.len() as u64, "after {step:?}");
        let found = (self.look)();
        let wrong = found.iter().zip(&self.twin).position(|(found, wanted)| found != wanted);
        assert_eq!((found.len(), wrong), (self.twin.len(), None), "after {step:?}");
    }

    /// A run is of whole pages, but where the file ends, before or after it.
    fn flush(&mut self, runs: &[(usize, usize)]) {
        let mut runs = runs.to_vec();
        runs.sort_unstable();
        let mut end = 0;
        runs.retain(|&(page, len)| {
            let is_apart = page * PAGE >= end;
            end = if is_apart { page * PAGE + len.next_multiple_of(PAGE) } else { end };
            is_apart
        });
        let last = runs.len() - 1;
        let mut given = Vec::new();
        for (number, &(page, len)) in runs.iter().enumerate() {
            let (at, size) = (page * PAGE, self.twin.len());
            let whole = len.next_multiple_of(PAGE);
            let len = match at + len {
                end if number == last && end >= size => len,
                _ if at < size && size < at + whole && number == last => size - at,
                _ => whole,
            };
            let bytes = bytes(self.generation * 10 + number as u32, len);
            self.twin.resize(size.max(at + len), 0);
            self.twin[at..at + len].copy_from_slice(&bytes);
            given.push(Run::flush(&self.wait_queue, page as u64, &bytes));
        }
        let (flushes, ends): (Vec<_>, Vec<_>) = given.into_iter().unzip();
        self.backend.flush(flushes);
        for run in ends.iter().rev() {
            run.wait(self.backend).unwrap();
        }
    }
}

fn tell_file(folder: &Path, mechanism: Mechanism, queue_depth: usize, io_pages: usize, steps: &[Step]) {
    let folder = TempDir::new_in(folder).unwrap();
    let path = folder.path().join("file");
    let (wait_queue, engine) = engine(mechanism, queue_depth, io_pages * PAGE);
    let file = engine.open_for_writing(&path, NEW).unwrap();
    let look = || fs::read(&path).unwrap();
    let mut story = Story::new(&wait_queue, &file, &look);
    steps.iter().for_each(|step| story.tell(step));
    // A new open with direct reads finds the same bytes.
    let again = engine.open(&path).unwrap();
    let pages = story.twin.len().div_ceil(PAGE).max(1);
    assert!(read(&wait_queue, &again, 0, pages) == story.twin);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_file_holds_the_bytes_of_its_vector(
        ring: bool, on_disk: bool, queue_depth in 1..5usize, io_pages in 1..6usize,
        steps in prop::collection::vec(steps(), 1..25),
    ) {
        let mechanism = if ring { Mechanism::Ring } else { Mechanism::Threads };
        tell_file(folders()[usize::from(!on_disk)].path(), mechanism, queue_depth, io_pages, &steps);
    }

    #[test]
    fn memory_holds_the_bytes_of_its_vector(steps in prop::collection::vec(steps(), 1..25)) {
        let wait_queue = Arc::new(WaitQueue::new());
        let file = MemoryFile::new([]);
        let look = || read(&wait_queue, &file, 0, 2 * PAGES);
        let mut story = Story::new(&wait_queue, &file, &look);
        steps.iter().for_each(|step| story.tell(step));
    }

    #[test]
    fn a_users_source_holds_the_bytes_of_its_vector(steps in prop::collection::vec(steps(), 1..25)) {
        let (wait_queue, engine) = engine(Mechanism::Threads, 8, 64 << 10);
        let file = engine.serve_for_writing(ShortWrites::default());
        let look = || file.source().bytes.lock().unwrap().clone();
        let mut story = Story::new(&wait_queue, &file, &look);
        steps.iter().for_each(|step| story.tell(step));
    }

    #[test]
    fn a_device_that_delays_and_shuffles_holds_the_bytes_of_its_vector(
        steps in prop::collection::vec(steps(), 1..25), seed: u64, remembers: bool,
    ) {
        let wait_queue = Arc::new(WaitQueue::new());
        let faults = Faults { seed, delay_max: 5, sequence: CompletionOrder::Shuffled, ..Faults::default() };
        let disk = Arc::new(CrashDisk::new([]));
        let device = match remembers {
            true => SimulatedBackend::of_crash_disk(Arc::clone(&disk), faults),
            false => SimulatedBackend::of_memory(Arc::new(MemoryFile::new([])), faults),
        };
        device.attach(&wait_queue);
        let look = || match remembers {
            true => disk.content(),
            false => read(&wait_queue, &device, 0, 2 * PAGES),
        };
        let mut story = Story::new(&wait_queue, &device, &look);
        steps.iter().for_each(|step| story.tell(step));
    }
}

/// A user's source that takes less than it is given, and is interrupted.
#[derive(Debug, Default)]
struct ShortWrites {
    bytes: Mutex<Vec<u8>>,
    calls: AtomicU64,
    /// Writes from this call on do this.
    write_fault: Mutex<Option<(u64, WriteFault)>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriteFault {
    TakesNothing,
    Exaggerates,
    Fails,
    Panics,
}

impl ReadAt for ShortWrites {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let bytes = self.bytes.lock().unwrap();
        let there = bytes.get(position as usize..).unwrap_or(&[]);
        let taken = there.len().min(buffer.len());
        buffer[..taken].copy_from_slice(&there[..taken]);
        Ok(taken)
    }
    fn attributes(&self) -> io::Result<Attributes> {
        Ok(Attributes {
            identity: Identity { device: 1, inode: 1, born: 0 },
            version: Version { modified: 0, changed: 0, settled: false, steps: false },
            size: self.bytes.lock().unwrap().len() as u64,
        })
    }
}

impl WriteAt for ShortWrites {
    fn write_at(&self, given: &[u8], position: u64) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match *self.write_fault.lock().unwrap() {
            Some((first, write_fault)) if call >= first => match write_fault {
                WriteFault::TakesNothing => return Ok(0),
                WriteFault::Exaggerates => return Ok(given.len() + 1),
                WriteFault::Fails => return Err(io::Error::from_raw_os_error(libc::EDQUOT)),
                WriteFault::Panics => panic!("a source that panics"),
            },
            _ if call % 5 == 3 => return Err(io::ErrorKind::Interrupted.into()),
            _ => {}
        }
        let taken = given.len().min(1 + call as usize * 977 % 9000);
        let mut bytes = self.bytes.lock().unwrap();
        let end = position as usize + taken;
        let size = bytes.len().max(end);
        bytes.resize(size, 0);
        bytes[end - taken..end].copy_from_slice(&given[..taken]);
        Ok(taken)
    }
    fn sync(&self, _: SyncKind, _: Range<u64>) -> io::Result<()> {
        Ok(())
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.bytes.lock().unwrap().resize(bytes as usize, 0);
        Ok(())
    }
}

#[test]
fn a_source_that_misbehaves_fails_its_flush_and_says_how_far_it_came() {
    let (wait_queue, engine) = engine(Mechanism::Threads, 8, 64 << 10);
    for (write_fault, words) in [
        (WriteFault::TakesNothing, "takes no more bytes"),
        (WriteFault::Exaggerates, "more than it was given"),
        (WriteFault::Fails, "os error 122"),
        (WriteFault::Panics, "panicked"),
    ] {
        let file = engine.serve_for_writing(ShortWrites::default());
        *file.source().write_fault.lock().unwrap() = Some((3, write_fault));
        let content = bytes(1, 50_000);
        let failed = write(&wait_queue, &file, 0, &content).unwrap_err();
        assert!(failed.to_string().contains(words), "{failed}");
        // Three calls took 1, 978 and 1955 bytes; a call that panics cannot say so.
        let taken = 1 + 978 + 1955;
        assert_eq!(
            failed.written,
            if write_fault == WriteFault::Panics { 0 } else { taken },
            "{write_fault:?}"
        );
        assert_eq!(*file.source().bytes.lock().unwrap(), content[..taken]);
    }
}

// The end of a file.

#[test]
fn no_byte_is_written_behind_the_end() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 4, 16 << 10);
            for size in [1, 511, 512, 513, 4095, 4096, 4097, 5000, 8191, 70_000, 131_072, 131_073] {
                let path = folder.path().join(size.to_string());
                let file = engine.open_for_writing(&path, NEW).unwrap();
                let content = bytes(size as u32, size);
                assert_eq!(write(&wait_queue, &file, 0, &content).unwrap(), size);
                assert!(fs::read(&path).unwrap() == content, "{size} bytes, and not one more");
                // What comes into view when it grows is zeros, not what lay behind in the frame.
                file.set_size(size as u64 + 5000).unwrap();
                let grown = read(&wait_queue, &file, 0, (size + 5000).div_ceil(PAGE));
                assert!(
                    grown[..size] == content && grown[size..].iter().all(|&byte| byte == 0),
                    "{size} bytes"
                );
                file.sync(SyncKind::Data, ALL).unwrap();
                assert_eq!(fs::metadata(&path).unwrap().len(), size as u64 + 5000);
            }
        }
    }
}

/// Writes as the next sync does: what is better made here is made here, and has ended then.
fn write_here(wait_queue: &Arc<WaitQueue>, file: &LocalFile, page: u64, bytes: &[u8]) {
    let (flush, run) = Run::flush(wait_queue, page, bytes);
    let is_here = file.flushes_here(&flush);
    assert_eq!(
        is_here,
        file.way() == IoMode::Direct && bytes.len() < PAGE,
        "a part of a page, and nothing else"
    );
    if is_here {
        file.flush_here(flush);
        assert!(run.is_done(), "nobody else was needed");
    } else {
        file.flush(vec![flush]);
    }
    assert_eq!(run.wait(file).unwrap(), bytes.len());
}

/// A file that grows by some bytes at a time, each of its last pages written several times, by turns here and there.
#[test]
fn appends_of_a_few_bytes_with_a_sync_each() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 4, 16 << 10);
            let path = folder.path().join("log");
            let file = engine.open_for_writing(&path, NEW).unwrap();
            let content = bytes(7, 20_000);
            let mut size = 0;
            for (nth, step) in (0..).map(|n| (n, 1 + n * 131 % 1500)) {
                let first = size / PAGE * PAGE;
                size = (size + step).min(content.len());
                let (page, new) = ((first / PAGE) as u64, &content[first..size]);
                if nth % 2 == 0 {
                    write_here(&wait_queue, &file, page, new);
                } else {
                    assert_eq!(write(&wait_queue, &file, page, new).unwrap(), new.len());
                }
                file.sync(SyncKind::Data, ALL).unwrap();
                assert!(fs::read(&path).unwrap() == content[..size], "{size} bytes");
                assert!(
                    read(&wait_queue, &file, 0, size.div_ceil(PAGE)) == content[..size],
                    "{size} bytes, read directly"
                );
                if size == content.len() {
                    break;
                }
            }
        }
    }
}

/// How many pages of a file the kernel's page cache holds; `None` before Linux 6.5.
fn cached_by_the_kernel(file: &LocalFile) -> Option<u64> {
    use std::os::fd::{AsFd, AsRawFd};
    const CACHESTAT: libc::c_long = 451;
    let (range, mut stat) = ([0u64, 0], [0u64; 5]);
    let descriptor = file.as_fd().as_raw_fd();
    // SAFETY: the call reads two numbers and writes five.
    #[allow(unsafe_code, reason = "a system call that no library wraps")]
    let done = unsafe { libc::syscall(CACHESTAT, descriptor, range.as_ptr(), stat.as_mut_ptr(), 0) };
    (done == 0).then_some(stat[0])
}

#[test]
fn a_file_that_is_written_directly_leaves_its_last_partial_page_in_the_kernels_cache() {
    for mechanism in MECHANISMS {
        let folder = disk();
        let (wait_queue, engine) = engine(mechanism, 4, 16 << 10);
        let file = engine.open_for_writing(folder.path().join("file"), NEW).unwrap();
        if file.way() == IoMode::Buffered || cached_by_the_kernel(&file).is_none() {
            return println!("SKIPPED: no direct I/O here, or no way to ask the kernel");
        }
        for size in [100, 4096, 5000, 70_001] {
            write(&wait_queue, &file, 0, &bytes(1, size)).unwrap();
            let most = u64::from(!size.is_multiple_of(4096));
            assert!(cached_by_the_kernel(&file) <= Some(most), "{size} bytes");
            assert_eq!(file.way(), IoMode::Direct);
        }
    }
}

/// Threads that write and read, each its own pages, by one engine with few places.
#[test]
fn flushes_and_fills_share_an_engine() {
    const THREADS: usize = 6;
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 3, 8192);
            let file = engine.open_for_writing(folder.path().join("file"), NEW).unwrap();
            file.set_size((THREADS * 16 * PAGE) as u64).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (wait_queue, file) = (&wait_queue, &file);
                    scope.spawn(move || story_of_a_thread(wait_queue, file, thread * 16));
                }
            });
        }
    }
}

fn story_of_a_thread(wait_queue: &Arc<WaitQueue>, file: &LocalFile, first: usize) {
    let mut twin = vec![0; 16 * PAGE];
    for round in 0..80 {
        let (page, pages) = (round * 7 % 16, 1 + round % 5);
        let pages = pages.min(16 - page);
        let content = bytes((first + round) as u32, pages * PAGE);
        twin[page * PAGE..(page + pages) * PAGE].copy_from_slice(&content);
        let (flush, written) = Run::flush(wait_queue, (first + page) as u64, &content);
        // A read of pages that are not being written goes at the same time.
        let other = if page >= 8 { 0..page } else { page + pages..16 };
        let (fill, filled) = Run::fill(wait_queue, (first + other.start) as u64, other.len().max(1));
        file.flush(vec![flush]);
        if round % 3 == 0 {
            file.submit_with_reap(vec![fill]);
        } else {
            file.submit(vec![fill]);
        }
        if !other.is_empty() {
            assert!(filled.bytes(file) == twin[other.start * PAGE..other.end * PAGE], "round {round}");
        } else {
            filled.wait(file).unwrap();
        }
        assert_eq!(written.wait(file).unwrap(), content.len());
        assert!(read(wait_queue, file, first as u64, 16) == twin, "round {round}");
    }
}

fn many(wait_queue: &Arc<WaitQueue>) -> (Vec<u8>, Vec<quinion::backend::Flush>, Vec<Arc<Run>>) {
    let content = bytes(3, 50 * 2 * PAGE + 77);
    let runs = (0..51).map(|n| {
        let from = n * 2 * PAGE;
        Run::flush(wait_queue, (n * 2) as u64, &content[from..content.len().min(from + 2 * PAGE)])
    });
    let (flushes, runs) = runs.unzip();
    (content, flushes, runs)
}

#[test]
fn draining_an_engine_ends_its_flushes() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 2, 8192);
            let path = folder.path().join("file");
            let file = engine.open_for_writing(&path, NEW).unwrap();
            let (content, flushes, runs) = many(&wait_queue);
            file.flush(flushes);
            engine.drain();
            assert!(runs.iter().all(|run| run.is_done()));
            assert!(fs::read(&path).unwrap() == content);
        }
    }
}

/// The last piece of a flush is handed on when the first is written; the engine waits for that, too.
#[test]
fn dropping_an_engine_waits_for_its_flushes() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            for _ in 0..5 {
                let (wait_queue, engine) = engine(mechanism, 2, 8192);
                let path = folder.path().join("file");
                let options = OpenForWrite {
                    creation: Creation::IfMissing,
                    start: InitialContent::Emptied,
                    mode: 0o600,
                };
                let file = engine.open_for_writing(&path, options).unwrap();
                let content = bytes(9, 3 * PAGE + 100);
                let (flush, run) = Run::flush(&wait_queue, 0, &content);
                file.flush(vec![flush]);
                drop(engine);
                drop(file);
                assert!(run.is_done());
                assert_eq!(run.outcome().unwrap(), content.len());
                assert!(fs::read(&path).unwrap() == content);
            }
        }
    }
}

#[test]
fn a_ring_that_is_taken_away_costs_some_flushes_and_no_more() {
    if !hazard::in_a_process_of_its_own("a_ring_that_is_taken_away_costs_some_flushes_and_no_more") {
        return;
    }
    let folder = disk();
    let (wait_queue, engine) = engine(Mechanism::Ring, 2, 8192);
    if engine.name() != "io_uring" {
        return println!("SKIPPED: this system has no io_uring to be taken away");
    }
    let path = folder.path().join("file");
    let file = engine.open_for_writing(&path, NEW).unwrap();
    let (content, flushes, runs) = many(&wait_queue);
    file.flush(flushes);
    hazard::refuse(libc::SYS_io_uring_enter, libc::EPERM, hazard::Scope::Process);
    let mut failed = 0;
    for run in &runs {
        if let Err(refused) = run.wait(&file) {
            assert_eq!((refused.error.raw_os_error(), refused.written), (Some(libc::EPERM), 0));
            failed += 1;
        }
    }
    assert!(failed > 0, "more were given than the kernel had places for");
    assert_eq!(engine.name(), "threads");
    write(&wait_queue, &file, 0, &content).unwrap();
    assert!(fs::read(&path).unwrap() == content);
}

#[test]
fn a_backend_opened_for_reading_refuses_writes_and_says_how_to_write() {
    let folder = disk();
    let path = folder.path().join("file");
    fs::write(&path, bytes(1, 5000)).unwrap();
    let (wait_queue, engine) = engine(Mechanism::Auto, 4, 8192);
    let source = engine.serve(ShortWrites::default());
    for backend in [&engine.open(&path).unwrap() as &dyn Backend, &source] {
        assert!(!backend.can_write());
        let refusals = [
            write(&wait_queue, backend, 0, &[1; 100]).unwrap_err().error,
            backend.sync(SyncKind::Data, ALL).unwrap_err(),
            backend.set_size(0).unwrap_err(),
            backend.punch(0..10).unwrap_err(),
        ];
        for refusal in refusals {
            assert_eq!(refusal.kind(), io::ErrorKind::Unsupported, "{backend:?}: {refusal}");
            assert!(refusal.to_string().contains("open it for writing"), "{refusal}");
        }
    }
    assert!(fs::read(&path).unwrap() == bytes(1, 5000));
}

#[test]
fn options_say_whether_a_file_may_be_new_and_begins_empty() {
    use std::os::unix::fs::PermissionsExt;
    let folder = disk();
    let path = folder.path().join("file");
    let (wait_queue, engine) = engine(Mechanism::Auto, 4, 8192);
    let open =
        |creation, start| engine.open_for_writing(&path, OpenForWrite { creation, start, mode: 0o640 });
    let is = |result: Result<LocalFile, OpenError>, wanted: io::ErrorKind| {
        assert!(matches!(result, Err(OpenError::Io(error)) if error.kind() == wanted));
    };
    is(open(Creation::MustExist, InitialContent::Kept), io::ErrorKind::NotFound);
    let file = open(Creation::MustBeNew, InitialContent::Kept).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777 & !0o640, 0);
    write(&wait_queue, &file, 0, &bytes(1, 5000)).unwrap();
    is(open(Creation::MustBeNew, InitialContent::Kept), io::ErrorKind::AlreadyExists);
    assert_eq!(open(Creation::IfMissing, InitialContent::Kept).unwrap().attributes().unwrap().size, 5000);
    assert_eq!(open(Creation::MustExist, InitialContent::Emptied).unwrap().attributes().unwrap().size, 0);
    assert_eq!(file.attributes().unwrap().size, 0, "it is one file");
    let refused = engine.open_for_writing(folder.path(), OpenForWrite::default());
    assert!(matches!(refused, Err(OpenError::IsDirectory)));
    let refused = engine.open_for_writing("/proc/self/comm", OpenForWrite::default());
    assert!(matches!(refused, Err(OpenError::PseudoFile { .. })));
}

/// Memory that is not aligned is refused by direct I/O; nothing else here makes a file system refuse.
#[test]
fn a_refused_direct_write_turns_to_the_kernels_cache_for_good() {
    for mechanism in MECHANISMS {
        let folder = disk();
        let (wait_queue, engine) = engine(mechanism, 4, 8192);
        let path = folder.path().join("file");
        let file = engine.open_for_writing(&path, NEW).unwrap();
        if file.way() == IoMode::Buffered {
            return;
        }
        let content = bytes(4, 9 * PAGE + 5);
        let (flush, run) = Run::flush_from(&wait_queue, 0, &content, 1);
        file.flush(vec![flush]);
        run.wait(&file).unwrap();
        assert_eq!(file.way(), IoMode::Buffered);
        assert!(fs::read(&path).unwrap() == content);
        write(&wait_queue, &file, 3, &bytes(5, 3 * PAGE)).unwrap();
        assert!(fs::read(&path).unwrap()[3 * PAGE..6 * PAGE] == bytes(5, 3 * PAGE));
    }
}

#[test]
fn a_limit_that_is_met_says_how_much_was_written() {
    if !hazard::in_a_process_of_its_own("a_limit_that_is_met_says_how_much_was_written") {
        return;
    }
    const LIMIT: u64 = 100_000;
    let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
    // SAFETY: a signal that is ignored from now on, and a number that the kernel copies.
    #[allow(unsafe_code, reason = "system calls that no library wraps")]
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 2, 16 << 10);
            let path = folder.path().join("file");
            let file = engine.open_for_writing(&path, NEW).unwrap();
            let content = bytes(1, 150_001);
            let failed = write(&wait_queue, &file, 0, &content).unwrap_err();
            assert_eq!(failed.error.raw_os_error(), Some(libc::EFBIG), "{failed}");
            let found = fs::read(&path).unwrap();
            assert!(failed.written as u64 <= LIMIT && failed.written >= 16 << 10, "{failed}");
            assert!(found.len() >= failed.written && content.starts_with(&found), "{} bytes", found.len());
            assert!(file.set_size(LIMIT + 1).is_err());
        }
    }
}

#[test]
fn a_hole_that_cannot_be_punched_is_zeros() {
    if !hazard::in_a_process_of_its_own("a_hole_that_cannot_be_punched_is_zeros") {
        return;
    }
    hazard::refuse(libc::SYS_fallocate, libc::EOPNOTSUPP, hazard::Scope::Caller);
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 2, 16 << 10);
            let path = folder.path().join("file");
            let file = engine.open_for_writing(&path, NEW).unwrap();
            let mut content = bytes(1, 700_001);
            write(&wait_queue, &file, 0, &content).unwrap();
            for range in [100..101, 5000..600_000, 650_000..900_000, 800_000..900_000] {
                file.punch(range.clone()).unwrap();
                let end = content.len().min(range.end as usize);
                content[end.min(range.start as usize)..end].fill(0);
                assert!(fs::read(&path).unwrap() == content, "after {range:?}");
                assert!(read(&wait_queue, &file, 0, 171) == content, "after {range:?}, read directly");
            }
            assert_eq!(file.allocate(0..PAGE as u64).unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
        }
    }
}

#[test]
fn space_that_is_kept_does_not_change_the_size() {
    use std::os::unix::fs::MetadataExt;
    let folder = disk();
    let (_, engine) = engine(Mechanism::Auto, 2, 16 << 10);
    let path = folder.path().join("file");
    let file = engine.open_for_writing(&path, NEW).unwrap();
    match file.allocate(0..1 << 20) {
        Ok(()) => assert!(fs::metadata(&path).unwrap().blocks() >= 2048),
        Err(error) => println!("SKIPPED: {error}"),
    }
    assert_eq!(file.attributes().unwrap().size, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Every flush ends once, whatever becomes of it; and what it says was written is there.
    #[test]
    fn every_flush_ends_once_and_tells_the_truth(
        seed: u64, remembers: bool, at_once: bool, runs in prop::collection::vec((0..20u64, lens()), 1..30),
    ) {
        let wait_queue = Arc::new(WaitQueue::new());
        let completing = if at_once { CompletionPoint::WhenSubmitted } else { CompletionPoint::WhenReaped };
        let sequence = CompletionOrder::Shuffled;
        let faults = Faults { seed, delay_max: 4, sequence, completing, ..Faults::default() };
        let device = match remembers {
            true => SimulatedBackend::of_crash_disk(Arc::new(CrashDisk::new([])), faults),
            false => SimulatedBackend::of_memory(Arc::new(MemoryFile::new([])), faults),
        };
        let device = device.with_write_faults(WriteFaults { errors: 150, full: 150, drops: 100, sync_errors: 200 });
        device.fail_writes_at(5 * 4096..6 * 4096, FailureCount::First(2));
        device.attach(&wait_queue);
        for (number, &(page, len)) in runs.iter().enumerate() {
            // One at a time, so that nothing else changes what it says it wrote.
            let content = bytes(number as u32 + 1, len);
            let written = match write(&wait_queue, &device, page, &content) {
                Ok(written) => {
                    prop_assert_eq!(written, len);
                    written
                }
                Err(failed) => failed.written,
            };
            prop_assert!(written <= len);
            if written > 0 {
                let found = read(&wait_queue, &device, page, len.div_ceil(PAGE));
                prop_assert!(found[..written] == content[..written]);
            }
            let _ = device.sync(SyncKind::Data, ALL);
        }
        let (flushes, ends): (Vec<_>, Vec<_>) =
            runs.iter().map(|&(page, len)| Run::flush(&wait_queue, page, &vec![1; len])).unzip();
        device.flush(flushes);
        prop_assert!(ends.iter().all(|run| run.wait(&device).is_ok() || run.is_done()));
        prop_assert_eq!((device.held(), device.writes()), (0, 2 * runs.len() as u64));
    }
}

#[test]
fn the_write_and_the_sync_that_were_named_fail() {
    let wait_queue = Arc::new(WaitQueue::new());
    let device =
        SimulatedBackend::of_crash_disk(Arc::new(CrashDisk::new(vec![0; 3 * PAGE])), Faults::default());
    device.attach(&wait_queue);
    device.fail_write(1, libc::ENOSPC);
    device.fail_sync(0, libc::EIO);
    let errno = |result: Result<usize, quinion::backend::FlushError>| {
        result.map_err(|failed| failed.error.raw_os_error())
    };
    assert_eq!(errno(write(&wait_queue, &device, 0, &[1; PAGE])), Ok(PAGE));
    assert_eq!(errno(write(&wait_queue, &device, 1, &[1; PAGE])), Err(Some(libc::ENOSPC)));
    assert_eq!(errno(write(&wait_queue, &device, 1, &[1; PAGE])), Ok(PAGE));
    assert_eq!(device.sync(SyncKind::All, ALL).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(device.sync(SyncKind::All, ALL).is_ok());
    assert_eq!((device.syncs(), device.writes()), (2, 3));
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Writer {
    /// Flushes again what was flushed since the last one that succeeded, as is asked of those above.
    Retrying,
    /// Asks once more, and relies on the answer.
    Careless,
}

/// Runs writes and syncs, of which some fail. Returns whether all that a sync promised is in every state that a crash
/// may leave, and how many pages of these were torn.
fn syncs_are_durable(writer: Writer, seed: u64) -> (bool, usize) {
    const FILE_PAGES: usize = 6;
    let disk = Arc::new(CrashDisk::new(vec![0; FILE_PAGES * PAGE]));
    let faults = Faults { seed, delay_max: 3, sequence: CompletionOrder::Shuffled, ..Faults::default() };
    let device = SimulatedBackend::of_crash_disk(Arc::clone(&disk), faults);
    let device = device.with_write_faults(WriteFaults { errors: 100, full: 50, drops: 50, sync_errors: 300 });
    let wait_queue = Arc::new(WaitQueue::new());
    device.attach(&wait_queue);
    let flush = |page: usize, generation: u8| {
        while write(&wait_queue, &device, page as u64, &[generation; PAGE]).is_err() {}
    };
    // The generation of each page in memory, and the log's length with what was promised by then.
    let (mut pages, mut sync_points) = ([0u8; FILE_PAGES], vec![(0, [0; FILE_PAGES])]);
    for generation in 1..30u8 {
        let page = (usize::from(generation) * 5 + seed as usize) % FILE_PAGES;
        pages[page] = generation;
        flush(page, generation);
        if generation % 4 == 0 {
            while device.sync(SyncKind::Data, ALL).is_err() {
                if writer == Writer::Retrying {
                    pages.iter().enumerate().for_each(|(page, &generation)| flush(page, generation));
                }
            }
            sync_points.push((disk.log().len(), pages));
        }
    }
    let (mut is_kept, mut torn) = (true, 0);
    for (events, state) in disk.log().states(8, seed) {
        let (_, synced) = sync_points.iter().rfind(|(at, _)| *at <= events).unwrap();
        for (found, &least) in state.chunks(PAGE).zip(synced) {
            is_kept &= found.iter().all(|&byte| byte >= least);
            torn += usize::from(found.iter().any(|&byte| byte != found[0]));
        }
    }
    (is_kept, torn)
}

#[test]
fn synced_bytes_are_in_every_state_that_follows() {
    for seed in 0..40 {
        let (is_kept, torn) = syncs_are_durable(Writer::Retrying, seed);
        assert!(is_kept, "seed {seed}");
        assert!(torn > 0, "pages come apart, or nothing was tried");
    }
}

#[test]
fn a_writer_that_believes_the_sync_after_a_failed_one_loses_bytes() {
    let found_out = (0..40).filter(|&seed| !syncs_are_durable(Writer::Careless, seed).0).count();
    assert!(found_out > 20, "only {found_out} of 40");
}

// Sectors of 512 bytes and of 4096, on a device of this test's own.

/// A file system on a file, mounted; it is undone when dropped. Only root can have one.
struct Mounted {
    folder: TempDir,
    device: String,
}

fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl Mounted {
    fn new(image: &Path, sector: &str) -> Option<Self> {
        fs::File::create(image).unwrap().set_len(24 << 20).unwrap();
        let image = image.to_str().unwrap();
        let device = run("losetup", &["--find", "--show", "--sector-size", sector, image])?;
        let mounted = Self { folder: disk(), device };
        run("mkfs.ext4", &["-q", "-b", "4096", &mounted.device])?;
        run("mount", &["-t", "ext4", &mounted.device, mounted.folder.path().to_str().unwrap()])?;
        Some(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &[self.folder.path().to_str().unwrap()]);
        run("losetup", &["--detach", &self.device]);
    }
}

fn some_story() -> Vec<Step> {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    prop::collection::vec(steps(), 60).new_tree(&mut runner).unwrap().current()
}

#[test]
fn sectors_of_either_size_hold_the_bytes_of_their_vector() {
    for sector in ["512", "4096"] {
        let images = disk();
        let Some(mounted) = Mounted::new(&images.path().join("image"), sector) else {
            return println!("SKIPPED: no loop device can be had here");
        };
        let folder = mounted.folder.path();
        for mechanism in MECHANISMS {
            tell_file(folder, mechanism, 3, 4, &some_story());
        }
        MECHANISMS.iter().for_each(|&mechanism| fill_up(folder, mechanism));
    }
}

/// Fills up a file system: what was written is there, and the rest is an error.
fn fill_up(folder: &Path, mechanism: Mechanism) {
    let (wait_queue, engine) = engine(mechanism, 4, 256 << 10);
    let path = folder.join("large");
    let file = engine.open_for_writing(&path, NEW).unwrap();
    assert_eq!(file.way(), IoMode::Direct);
    let content = bytes(1, 25 << 20);
    let failed = write(&wait_queue, &file, 0, &content).unwrap_err();
    assert_eq!(failed.error.raw_os_error(), Some(libc::ENOSPC), "{failed}");
    assert!(failed.written > 1 << 20, "{failed}");
    assert!(fs::read(&path).unwrap()[..failed.written] == content[..failed.written]);
    fs::remove_file(&path).unwrap();
}

#[test]
fn a_block_device_is_written_and_keeps_its_size() {
    for sector in ["512", "4096"] {
        let images = disk();
        let image: PathBuf = images.path().join("image");
        fs::write(&image, bytes(1, 1 << 20)).unwrap();
        let Some(device) =
            run("losetup", &["--find", "--show", "--sector-size", sector, image.to_str().unwrap()])
        else {
            return println!("SKIPPED: no loop device can be had here");
        };
        let detached = std::panic::catch_unwind(|| {
            let (wait_queue, engine) = engine(Mechanism::Auto, 4, 64 << 10);
            let file = engine.open_for_writing(&device, OpenForWrite::default()).unwrap();
            let mut content = bytes(1, 1 << 20);
            let new = bytes(2, 5 * PAGE);
            write(&wait_queue, &file, 3, &new).unwrap();
            content[3 * PAGE..8 * PAGE].copy_from_slice(&new);
            file.punch(100_000..200_001).unwrap();
            content[100_000..200_001].fill(0);
            assert!(read(&wait_queue, &file, 0, 256) == content);
            file.sync(SyncKind::All, ALL).unwrap();
            assert_eq!(file.set_size(4096).unwrap_err().kind(), io::ErrorKind::Unsupported);
            let full = write(&wait_queue, &file, 255, &bytes(3, 2 * PAGE)).unwrap_err();
            assert_eq!((full.error.raw_os_error(), full.written), (Some(libc::ENOSPC), PAGE));
        });
        run("losetup", &["--detach", &device]);
        detached.unwrap();
    }
}

/// A reader goes through the kernel all the while: no written byte returns to its old value.
#[test]
fn a_reader_of_the_kernels_cache_undoes_nothing() {
    let folder = disk();
    let (wait_queue, engine) = engine(Mechanism::Auto, 4, 64 << 10);
    let path = folder.path().join("file");
    let file = engine.open_for_writing(&path, NEW).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let _ = fs::read(&path).unwrap();
            }
        });
        let mut size = 0;
        for round in 0..300 {
            let content = bytes(round, 1 + round as usize * 613 % 30_000);
            if round % 10 == 9 {
                file.sync(SyncKind::Data, ALL).unwrap();
            }
            size = size.max(content.len());
            // Whole pages, or to the end.
            let len = if content.len() == size { size } else { content.len() / PAGE * PAGE };
            if len > 0 {
                write(&wait_queue, &file, 0, &content[..len]).unwrap();
                let found = read(&wait_queue, &file, 0, len.div_ceil(PAGE));
                assert!(found[..len] == content[..len], "round {round}");
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
