//! Coherence: another process changes a file under a cache, and no read that begins later is stale.
//!
//! ```text
//!   test                                another process
//!     reads by a lease
//!     "open"    ---- line by line --->    open(2) for writing, which waits for the lease to be given up
//!               <--------------------     "@ done"
//!     "write"   --------------------->    generation 7 of the file's bytes
//!               <--------------------     "@ done":  a read that begins from here on finds generation 7
//! ```
//!
//! Each page holds its generation (`common`), and readers note, before they begin, the least one that they may expect.

use quinion_testing::hazard;
use std::fs::{self, File as Plain, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use quinion::backend::{Attributes, Backend, Fill, Leasable, WaitQueue};
use quinion::internals::system_files::{Engine, EngineOptions, LocalFile};
use quinion::{BatchRead, Cache, Coherence, ErrorKind, File, NoLease, OpenOptions as Opening};
use quinion_testing::content::{fill_content, generations};
use tempfile::TempDir;

const PAGE: usize = 4096;
const PAGES: usize = 64;
const ROLE: &str = "QUINION_TEST_OUTSIDE";
const LONG: Duration = Duration::from_secs(60);

fn content(pages: usize, generation: u32) -> Vec<u8> {
    let mut bytes = vec![0; pages * PAGE];
    fill_content(&mut bytes, 1, 0, generation);
    bytes
}

fn folders() -> [TempDir; 2] {
    [TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), TempDir::new_in("/dev/shm").unwrap()]
}

fn folder() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn file_in(folder: &TempDir, pages: usize) -> PathBuf {
    let path = folder.path().join("file");
    fs::write(&path, content(pages, 0)).unwrap();
    path
}

fn cache() -> Cache {
    Cache::builder().memory(64 << 20).build().unwrap()
}

fn leasing() -> Opening {
    *Opening::new().coherence(Coherence::Lease)
}

fn leased(cache: &Cache, path: &Path) -> File {
    until_leased(|| cache.open_with(path, &leasing()).unwrap())
}

/// Opens until there is a lease. There is none while a child of another test has not executed its program: until then
/// the child has this process's descriptors that are open for writing.
fn until_leased(open: impl Fn() -> File) -> File {
    let begun = Instant::now();
    loop {
        let file = open();
        let coherence = file.coherence().unwrap();
        if coherence.in_force == Coherence::Lease {
            return file;
        }
        let passes = coherence.no_lease == Some(NoLease::OpenForWriting);
        assert!(passes && begun.elapsed() < LONG, "{coherence:?}");
        drop(file);
        thread::sleep(Duration::from_millis(1));
    }
}

fn in_force(file: &File) -> Coherence {
    file.coherence().unwrap().in_force
}

fn generation(file: &File, page: usize) -> u32 {
    let mut bytes = vec![0; PAGE];
    let position = (page * PAGE) as u64;
    file.read_exact_at(&mut bytes, position).unwrap();
    let met = generations(&bytes, 1, position).unwrap().expect("a page tells its generation");
    *met.start()
}

fn all_generations(file: &File, pages: usize) -> (u32, u32) {
    let mut bytes = vec![0; pages * PAGE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let met = generations(&bytes, 1, 0).unwrap().expect("pages tell their generation");
    (*met.start(), *met.end())
}

/// The least generation in `bytes`, which may have been read during a write: then the kernel itself returns pages of
/// which a part is old and the rest new, but never half a word.
fn least_word(bytes: &[u8], position: usize) -> u32 {
    let words = bytes.chunks(8).enumerate();
    let told = words.filter_map(|(nth, word)| generations(word, 1, (position + nth * 8) as u64).unwrap());
    told.map(|met| *met.start()).min().expect("bytes tell their generation")
}

fn wait_for_lease(file: &File) {
    wait_until("there is no lease again", || {
        generation(file, 0);
        in_force(file) == Coherence::Lease
    });
}

fn wait_until(never: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG, "{never}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The kernel's count of this process's leases on the file at `path`. Not by `/proc/locks`: a reader of that list may
/// miss an entry while other processes take leases and give them up.
fn leases_on(path: &Path) -> usize {
    use std::os::unix::fs::MetadataExt;
    let inode = format!(":{} ", fs::metadata(path).unwrap().ino());
    let is_lease =
        |line: &&str| line.starts_with("lock:") && line.contains(" LEASE ") && line.contains(&inode);
    // A descriptor that is closed meanwhile holds no lease.
    let descriptors = fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    let told = descriptors.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    told.map(|text| text.lines().filter(is_lease).count()).sum()
}

// ---- another process ------------------------------------------------------------------------

struct Other {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Other {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", "another_process_follows_its_commands"]).env(ROLE, "other");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, orders, answers }
    }

    fn send(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        while !line.contains('@') {
            line.clear();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "the other process is gone");
        }
        line[line.find('@').unwrap() + 1..].trim().to_owned()
    }

    fn tell(&mut self, order: &str) -> String {
        self.send(order);
        self.answer()
    }

    fn has(&mut self, order: &str) {
        assert_eq!(self.tell(order), "done", "{order}");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.orders = None; // its end
        let _ = self.child.wait();
    }
}

/// The other process's part, if this is the other process.
fn obey() {
    let (mut open, mut lines) = (None, std::io::stdin().lines());
    while let Some(Ok(line)) = lines.next() {
        let words: Vec<&str> = line.split(' ').collect();
        let done = obey_one(&words, &mut open);
        println!("@ {}", done.map_or_else(|error| format!("{error:?}"), |()| "done".to_owned()));
    }
}

fn obey_one(words: &[&str], open: &mut Option<Plain>) -> std::io::Result<()> {
    match words {
        ["open", path] => *open = Some(OpenOptions::new().write(true).open(path)?),
        ["hasty", path] => {
            *open = Some(OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path)?);
        }
        ["write", pages, generation] => {
            let bytes = content(pages.parse().unwrap(), generation.parse().unwrap());
            open.as_ref().unwrap().write_all_at(&bytes, 0)?;
        }
        ["page", page, generation] => {
            let (page, mut bytes) = (page.parse::<u64>().unwrap() * PAGE as u64, vec![0; PAGE]);
            fill_content(&mut bytes, 1, page, generation.parse().unwrap());
            open.as_ref().unwrap().write_all_at(&bytes, page)?;
        }
        ["close"] => *open = None,
        ["truncate", path, bytes] => truncate(path, bytes.parse().unwrap())?,
        _ => panic!("{words:?} is no order"),
    }
    Ok(())
}

#[allow(unsafe_code, reason = "the standard library cuts files that are open only")]
fn truncate(path: &str, bytes: i64) -> std::io::Result<()> {
    let path = std::ffi::CString::new(path).unwrap();
    // SAFETY: a string that ends, and a number.
    if unsafe { libc::truncate(path.as_ptr(), bytes) } == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

#[test]
fn another_process_follows_its_commands() {
    if std::env::var(ROLE).is_ok() {
        return obey();
    }
    let (folder, mut other) = (folder(), Other::start());
    let path = file_in(&folder, 2);
    other.has(&format!("open {}", path.display()));
    other.has("write 2 5");
    other.has("close");
    other.has(&format!("truncate {} 5000", path.display()));
    assert_eq!(fs::read(&path).unwrap(), content(2, 5)[..5000]);
}

// ---- never stale ----------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq)]
enum PagesRead {
    Cached,
    Cold,
}

/// Readers of single pages, of all, of pins and batches read on while another process writes; each expects what was
/// there when it began.
fn read_while_written(folder: &TempDir, rounds: u32, pages: PagesRead) {
    let path = file_in(folder, PAGES);
    let (cache, mut other) = (cache(), Other::start());
    let file = leased(&cache, &path);
    let (least, ended) = (AtomicU32::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let read = |nth: usize, file: File| {
            let mut page = nth;
            while !ended.load(Ordering::Relaxed) {
                page = (page + 13) % PAGES;
                if pages == PagesRead::Cold {
                    file.dont_need(0, u64::MAX).unwrap();
                }
                let expected = least.load(Ordering::SeqCst); // partner: the store when the other has written
                let mut bytes = vec![0; if nth == 1 { PAGES * PAGE } else { PAGE }];
                let position = if nth == 1 { 0 } else { page * PAGE };
                match nth {
                    0 | 1 => file.read_exact_at(&mut bytes, position as u64).unwrap(),
                    2 => {
                        let pinned = file.pin(position as u64, PAGE).unwrap();
                        bytes = pinned.chunks().flatten().copied().collect();
                    }
                    _ => {
                        let mut batch = [BatchRead::new(&mut bytes, position as u64)];
                        file.read_batch(&mut batch);
                        assert_eq!(batch[0].result().unwrap(), PAGE);
                    }
                }
                let met = least_word(&bytes, position);
                assert!(
                    met >= expected,
                    "reader {nth} was shown generation {met}, and {expected} was written"
                );
            }
        };
        let readers: Vec<_> = (0..4).map(|nth| (nth, file.clone())).collect();
        let readers: Vec<_> =
            readers.into_iter().map(|(nth, file)| scope.spawn(move || read(nth, file))).collect();
        for round in 1..=rounds {
            if round <= 2 {
                wait_for_lease(&file);
            }
            other.has(&format!("open {}", path.display()));
            other.has(&format!("write {PAGES} {round}"));
            least.store(round, Ordering::SeqCst); // partner: the load before a read
            other.has("close");
        }
        ended.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(all_generations(&file, PAGES), (rounds, rounds));
    cache.check().unwrap();
}

#[test]
fn no_read_that_begins_after_a_write_is_stale() {
    folders().iter().for_each(|folder| read_while_written(folder, 200, PagesRead::Cached));
}

#[test]
fn no_read_is_stale_that_meets_fills_in_flight() {
    folders().iter().for_each(|folder| read_while_written(folder, 100, PagesRead::Cold));
}

#[test]
fn a_writer_waits_for_moments_only_and_the_lease_comes_back() {
    for folder in folders() {
        let (path, cache, mut other) = (file_in(&folder, PAGES), cache(), Other::start());
        let file = leased(&cache, &path);
        assert_eq!(all_generations(&file, PAGES), (0, 0));
        let begun = Instant::now();
        other.has(&format!("open {}", path.display()));
        assert!(
            begun.elapsed() < Duration::from_secs(40),
            "he did not wait until the kernel lost its patience, which takes 45 seconds"
        );
        assert_eq!(file.cached_pages(), 0, "nothing from before is there when the open has returned");
        assert_eq!(in_force(&file), Coherence::CheckEvery(Duration::ZERO));
        assert_eq!(file.coherence().unwrap().no_lease, Some(NoLease::GivenUp));
        // While the other process writes, each read checks the file.
        for generation_now in 1..50 {
            other.has(&format!("page 7 {generation_now}"));
            assert_eq!(generation(&file, 7), generation_now);
        }
        other.has("close");
        wait_for_lease(&file);
        assert_eq!((generation(&file, 7), generation(&file, 8)), (49, 0));
        assert_eq!(file.coherence().unwrap().no_lease, None);
    }
}

#[test]
fn a_truncation_by_another_process_waits_too() {
    for folder in folders() {
        let (path, cache, mut other) = (file_in(&folder, PAGES), cache(), Other::start());
        let file = leased(&cache, &path);
        all_generations(&file, PAGES);
        other.has(&format!("truncate {} 5000", path.display()));
        let mut bytes = vec![0; 2 * PAGE];
        assert_eq!(file.read_at(&mut bytes, 8192).unwrap(), 0, "what is cut off is not read");
        assert_eq!(file.read_at(&mut bytes, 4096).unwrap(), 5000 - 4096);
        assert_eq!(file.len(), 5000);
        other.has(&format!("truncate {} 8192", path.display()));
        assert_eq!(file.read_at(&mut bytes, 4096).unwrap(), PAGE);
        assert!(bytes[904..PAGE].iter().all(|&byte| byte == 0), "what comes back is zeros");
    }
}

#[test]
fn another_file_in_its_place_is_another_file() {
    let (folder, cache) = (folder(), cache());
    let path = file_in(&folder, PAGES);
    let old = leased(&cache, &path);
    all_generations(&old, PAGES);
    let beside = folder.path().join("beside");
    fs::write(&beside, content(PAGES, 9)).unwrap();
    fs::rename(&beside, &path).unwrap();
    let new = leased(&cache, &path);
    assert_eq!(all_generations(&old, PAGES), (0, 0), "an open file stays what it is");
    assert_eq!(in_force(&old), Coherence::Lease);
    assert_eq!(all_generations(&new, PAGES), (9, 9));
}

#[test]
fn pinned_bytes_outlive_a_break_and_are_not_read_again() {
    for folder in folders() {
        let (path, cache, mut other) = (file_in(&folder, PAGES), cache(), Other::start());
        let file = leased(&cache, &path);
        let pinned = file.pin(0, PAGES * PAGE).unwrap();
        other.has(&format!("open {}", path.display()));
        other.has(&format!("write {PAGES} 1"));
        assert_eq!(all_generations(&file, PAGES), (1, 1));
        let bytes: Vec<u8> = pinned.chunks().flatten().copied().collect();
        assert!(bytes == content(PAGES, 0), "what is pinned does not change");
        drop(pinned);
        cache.check().unwrap();
    }
}

/// A file whose fills can be held back, with the bytes that the device gave when they were submitted.
#[derive(Debug)]
struct Slow {
    file: Arc<dyn Backend>,
    bytes: Plain,
    holds: AtomicBool,
    held: Mutex<Vec<(Fill, Vec<u8>)>>,
}

impl Slow {
    fn release(&self) {
        self.holds.store(false, Ordering::Relaxed);
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        held.into_iter().for_each(|(fill, bytes)| Self::land(fill, &bytes));
    }
    fn land(mut fill: Fill, bytes: &[u8]) {
        fill.write(0, bytes);
        fill.complete(Ok(bytes.len()));
    }
}

impl Backend for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }
    fn leasable(&self) -> Option<Leasable<'_>> {
        self.file.leasable()
    }
    fn attributes(&self) -> std::io::Result<Attributes> {
        self.file.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        for fill in fills {
            let mut bytes = vec![0; fill.len()];
            let got = self.bytes.read_at(&mut bytes, fill.position()).unwrap();
            bytes.truncate(got);
            if self.holds.load(Ordering::Relaxed) {
                self.held.lock().unwrap().push((fill, bytes));
            } else {
                Self::land(fill, &bytes);
            }
        }
    }
}

fn slow(path: &Path) -> Arc<Slow> {
    let engine = Engine::new(Arc::new(WaitQueue::new()), EngineOptions::default());
    let (file, bytes) = (Arc::new(engine.open(path).unwrap()), Plain::open(path).unwrap());
    Arc::new(Slow { file, bytes, holds: AtomicBool::new(false), held: Mutex::default() })
}

/// 1 A reader's fill is at the device, which has read the old bytes.
/// 2 A writer opens the file: the lease is given up, though the fill is on its way. Then it writes.
/// 3 The fill lands.
#[test]
fn a_fill_submitted_before_a_break_goes_to_a_detached_folio() {
    let (folder, cache, mut other) = (folder(), cache(), Other::start());
    let path = file_in(&folder, PAGES);
    let slow = slow(&path);
    let file = until_leased(|| cache.open_backend_with(Arc::clone(&slow) as _, &leasing()).unwrap());
    slow.holds.store(true, Ordering::Relaxed);
    thread::scope(|scope| {
        let early = scope.spawn(|| generation(&file, 3));
        wait_until("no fill comes", || !slow.held.lock().unwrap().is_empty());
        other.has(&format!("open {}", path.display()));
        other.has(&format!("write {PAGES} 1"));
        slow.release();
        assert_eq!(generation(&file, 3), 1);
        assert!(early.join().unwrap() <= 1);
    });
    assert_eq!(all_generations(&file, PAGES), (1, 1));
    cache.check().unwrap();
}

/// 1 Without a lease, during a write of another process, a fill is at the device, which has read the old bytes.
/// 2 The writer writes, and is through. The lease is had.
/// 3 The fill lands.
#[test]
fn a_fill_that_was_submitted_before_the_lease_is_not_read_under_it() {
    let (folder, cache, mut other) = (folder(), cache(), Other::start());
    let path = file_in(&folder, PAGES);
    let slow = slow(&path);
    other.has(&format!("open {}", path.display()));
    let file = cache.open_backend_with(Arc::clone(&slow) as _, &leasing()).unwrap();
    assert_eq!(file.coherence().unwrap().no_lease, Some(NoLease::OpenForWriting));
    slow.holds.store(true, Ordering::Relaxed);
    thread::scope(|scope| {
        let early = scope.spawn(|| generation(&file, 3));
        wait_until("no fill comes", || !slow.held.lock().unwrap().is_empty());
        other.has(&format!("write {PAGES} 1"));
        other.has("close");
        // A second handle asks, when it is time to ask again, so that no read looks before the lease is held; the first
        // one's reader waits for the device.
        thread::sleep(Duration::from_millis(50));
        wait_until("there is no lease", || {
            let asks = cache.open_backend_with(Arc::clone(&slow) as _, &leasing()).unwrap();
            in_force(&asks) == Coherence::Lease
        });
        slow.release();
        assert_eq!(generation(&file, 3), 1);
        assert!(early.join().unwrap() <= 1);
    });
    assert_eq!(all_generations(&file, PAGES), (1, 1));
}

// ---- where there is none --------------------------------------------------------------------

#[test]
fn a_file_open_for_writing_has_no_lease_and_each_read_looks() {
    for folder in folders() {
        let (path, cache, mut other) = (file_in(&folder, PAGES), cache(), Other::start());
        other.has(&format!("open {}", path.display()));
        let file = cache.open_with(&path, &leasing()).unwrap();
        assert_eq!(in_force(&file), Coherence::CheckEvery(Duration::ZERO));
        assert_eq!(file.coherence().unwrap().no_lease, Some(NoLease::OpenForWriting));
        for round in 1..50 {
            other.has(&format!("write {PAGES} {round}"));
            assert_eq!(all_generations(&file, PAGES), (round, round));
        }
        other.has("close");
        wait_for_lease(&file);
    }
}

/// 1. A process maps a file of tmpfs to write it, so there is no lease.
/// 2. The file's times have settled, and its bytes are read.
/// 3. The process stores to the mapped memory, which leaves the times as they are, and another read begins.
#[test]
#[allow(unsafe_code, reason = "stores to a mapped file")]
fn stores_to_mapped_memory_of_tmpfs_are_seen_by_each_read_without_a_lease() {
    for is_leasable in [true, false] {
        stores_are_seen(is_leasable);
    }
}

/// A file by whose descriptor there is no lease, as by one that another party shares.
#[derive(Debug)]
struct Unleasable(LocalFile);

impl Backend for Unleasable {
    fn name(&self) -> &'static str {
        "unleasable"
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.0.descriptor()
    }
    fn attributes(&self) -> std::io::Result<Attributes> {
        self.0.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        fills.into_iter().for_each(|fill| self.0.fill_here(fill));
    }
}

#[allow(unsafe_code, reason = "stores to a mapped file")]
fn stores_are_seen(is_leasable: bool) {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let (path, cache) = (file_in(&folder, 1), cache());
    let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, writer.as_raw_fd());
    // SAFETY: the kernel chooses the place.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, libc::MAP_SHARED, fd, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    let unleasable = || {
        let engine = Engine::new(Arc::new(WaitQueue::new()), EngineOptions::default());
        let file = Unleasable(engine.open(&path).unwrap());
        cache.open_backend_with(Arc::new(file), &leasing()).unwrap()
    };
    let (file, why) = match is_leasable {
        true => (cache.open_with(&path, &leasing()).unwrap(), NoLease::OpenForWriting),
        false => (unleasable(), NoLease::NotSupported),
    };
    assert_eq!(file.coherence().unwrap().no_lease, Some(why));
    let (begun, mut stored) = (Instant::now(), 0_u8);
    // The times settle meanwhile.
    while begun.elapsed() < Duration::from_millis(500) {
        stored = stored.wrapping_add(1);
        // SAFETY: the page is mapped, to be written.
        unsafe { mapped.cast::<u8>().write_volatile(stored) };
        let mut read = [0; 1];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read[0], stored);
    }
    // SAFETY: it was mapped above, and no reference to it is left.
    unsafe { libc::munmap(mapped, PAGE) };
}

/// A memfd, which another process would open by the number of the first one's descriptor. The kernel does not count
/// that as one that can write, and would give a lease.
#[test]
fn memory_without_a_name_has_no_lease_and_its_stores_are_seen() {
    let (memory, cache) = (rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap(), cache());
    let memory = Plain::from(memory);
    memory.write_all_at(&[1; PAGE], 0).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let file = cache.open_with(path, &leasing()).unwrap();
    assert_eq!(file.coherence().unwrap().no_lease, Some(NoLease::NotSupported));
    for stored in 2..20 {
        memory.write_all_at(&[stored; PAGE], 0).unwrap();
        let mut read = [0; PAGE];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, [stored; PAGE]);
    }
}

#[test]
fn an_open_that_does_not_wait_is_refused_and_may_be_repeated() {
    let (folder, cache, mut other) = (folder(), cache(), Other::start());
    let path = file_in(&folder, 2);
    let file = leased(&cache, &path);
    let refused = other.tell(&format!("hasty {}", path.display()));
    assert!(refused.contains("WouldBlock"), "{refused}");
    wait_until("it is not given up", || in_force(&file) != Coherence::Lease);
    other.has(&format!("hasty {}", path.display()));
}

#[test]
#[allow(unsafe_code, reason = "system calls that no library wraps")]
fn another_users_file_has_no_lease() {
    const CAP_LEASE: u32 = 28;
    let folder = folder();
    let path = file_in(&folder, PAGES);
    // SAFETY: a number is asked for.
    let is_root = unsafe { libc::geteuid() } == 0;
    let path = if is_root {
        std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
        // Version 3 of the call: two words of each set; for this thread only.
        let mut header = [0x2008_0522_u32, 0];
        let mut sets = [[0u32; 3]; 2];
        // SAFETY: the kernel reads and writes two words, and six.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()), 0);
            sets[0][0] &= !(1 << CAP_LEASE);
            assert_eq!(libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_ptr()), 0);
        }
        path
    } else {
        PathBuf::from("/etc/passwd")
    };
    let file = cache().open_with(&path, &leasing()).unwrap();
    assert_eq!(in_force(&file), Coherence::CheckEvery(Duration::ZERO));
    assert_eq!(file.coherence().unwrap().no_lease, Some(NoLease::NotPermitted));
    assert!(NoLease::NotPermitted.to_string().contains("CAP_LEASE"), "it says what to do");
    if is_root {
        fs::write(&path, content(PAGES, 1)).unwrap();
        assert_eq!(all_generations(&file, PAGES), (1, 1), "each read looks");
    }
}

#[test]
fn a_backend_that_is_no_file_of_the_system_has_no_lease() {
    let cache = cache();
    let file =
        cache.open_backend_with(Arc::new(quinion::backend::MemoryFile::new(vec![7; PAGE])), &leasing());
    let file = file.unwrap();
    let coherence = file.coherence().unwrap();
    assert_eq!(coherence.no_lease, Some(NoLease::NotSupported));
    assert_eq!(
        (coherence.wanted, coherence.in_force),
        (Coherence::Lease, Coherence::CheckEvery(Duration::ZERO))
    );
}

/// 1 A handle reads by a lease.
/// 2 The same cache opens the file for writing, which the kernel makes wait for the lease's end.
#[test]
fn a_file_that_we_write_ourselves_has_no_lease_and_is_not_looked_at() {
    for folder in folders() {
        let (path, cache) = (file_in(&folder, PAGES), cache());
        let reader = leased(&cache, &path);
        assert_eq!(generation(&reader, 3), 0);
        let writer = cache.open_with(&path, leasing().write(true)).unwrap();
        for file in [&reader, &writer] {
            let coherence = file.coherence().unwrap();
            assert_eq!(
                (coherence.in_force, coherence.no_lease),
                (Coherence::Check, Some(NoLease::WrittenHere))
            );
        }
        assert_eq!(leases_on(&path), 0);
        for round in 1..20 {
            writer.write_all_at(&content(PAGES, round), 0).unwrap();
            assert_eq!(all_generations(&reader, PAGES), (round, round));
        }
        writer.sync_all().unwrap();
        assert_eq!(fs::read(&path).unwrap(), content(PAGES, 19));
        assert_eq!(all_generations(&reader, PAGES), (19, 19));
    }
}

/// Another cache is another owner of leases, in another process or in this one.
#[test]
fn an_open_for_writing_waits_for_the_lease_of_another_cache() {
    let folder = folder();
    let (path, theirs, ours) = (file_in(&folder, PAGES), cache(), cache());
    let reader = leased(&theirs, &path);
    for round in 1..20 {
        assert_eq!(all_generations(&reader, PAGES), (round - 1, round - 1));
        let writer = ours.open_with(&path, Opening::new().write(true)).unwrap();
        writer.write_all_at(&content(PAGES, round), 0).unwrap();
        writer.sync_all().unwrap();
        assert_eq!(all_generations(&reader, PAGES), (round, round));
    }
}

// ---- other policies -------------------------------------------------------------------------

#[test]
fn each_coherence_mode_sees_the_changes_that_it_promises() {
    let (folder, cache) = (folder(), cache());
    let path = file_in(&folder, PAGES);
    let open = |coherence| cache.open_with(&path, Opening::new().coherence(coherence)).unwrap();
    let (immutable, check) = (open(Coherence::Immutable), open(Coherence::Check));
    let each = open(Coherence::CheckEvery(Duration::ZERO));
    let rarely = open(Coherence::CheckEvery(Duration::from_secs(1 << 30)));
    assert_eq!(all_generations(&immutable, PAGES), (0, 0));
    fs::write(&path, content(PAGES, 1)).unwrap();
    assert_eq!(generation(&open(Coherence::Immutable), 5), 0, "it is not looked at");
    assert_eq!(immutable.metadata().unwrap().len(), (PAGES * PAGE) as u64);
    assert_eq!(generation(&immutable, 5), 0, "its metadata is, and no page is forgotten");
    assert_eq!(generation(&check, 5), 0, "it was not opened again");
    assert_eq!(generation(&rarely, 5), 0, "it was looked at not long ago");
    assert_eq!(generation(&each, 5), 1);
    assert_eq!(generation(&check, 5), 1, "one file has one cache");
    fs::write(&path, content(PAGES, 2)).unwrap();
    assert_eq!(generation(&rarely, 5), 1);
    assert_eq!(generation(&open(Coherence::Check), 5), 2);
    // Longer by a page: a reader that takes the file for immutable does not see its new end.
    OpenOptions::new().append(true).open(&path).unwrap().write_all(&[7; PAGE]).unwrap();
    let mut byte = [0];
    assert_eq!(immutable.read_at(&mut byte, (PAGES * PAGE) as u64).unwrap(), 0);
    assert_eq!(check.read_at(&mut byte, (PAGES * PAGE) as u64).unwrap(), 1);
    assert_eq!(in_force(&immutable), Coherence::Immutable);
}

#[test]
fn one_handle_that_wants_a_lease_has_one_for_all() {
    let (folder, cache) = (folder(), cache());
    let path = file_in(&folder, PAGES);
    let plain = cache.open(&path).unwrap();
    assert_eq!((in_force(&plain), leases_on(&path)), (Coherence::Check, 0));
    let (first, second) = (leased(&cache, &path), leased(&cache, &path));
    assert_eq!((in_force(&plain), leases_on(&path)), (Coherence::Lease, 1));
    drop(first);
    assert_eq!((in_force(&second), leases_on(&path)), (Coherence::Lease, 1));
    drop(second);
    assert_eq!((in_force(&plain), leases_on(&path)), (Coherence::Check, 0));
}

#[test]
fn no_lease_is_left_when_the_last_is_closed_and_unchanged_bytes_are_kept() {
    let (folder, cache) = (folder(), cache());
    let path = file_in(&folder, PAGES);
    // Old enough that a later change cannot have its time.
    let born = fs::metadata(&path).unwrap().modified().unwrap();
    wait_until("time stands", || born.elapsed().is_ok_and(|age| age > Duration::from_millis(50)));
    let file = leased(&cache, &path);
    all_generations(&file, PAGES);
    drop(file);
    assert_eq!(leases_on(&path), 0);
    let file = leased(&cache, &path);
    assert_eq!(file.cached_pages(), PAGES as u64, "nobody has changed it since");
    drop(file);
    fs::write(&path, content(PAGES, 1)).unwrap();
    let file = leased(&cache, &path);
    assert_eq!(all_generations(&file, PAGES), (1, 1));
    drop(file);
    drop(cache);
    assert_eq!(leases_on(&path), 0);
}

/// 1. A file is cut by an open that breaks no lease.
/// 2. The last handle is closed. It is empty then, and so young that it may be no other.
/// 3. It is opened anew, and is empty still.
#[test]
fn a_cut_under_a_lease_is_seen_when_the_file_is_opened_anew() {
    for folder in folders() {
        let (path, cache) = (file_in(&folder, PAGES), cache());
        for is_open_meanwhile in [false, true] {
            fs::write(&path, content(PAGES, 0)).unwrap();
            let file = leased(&cache, &path);
            assert_eq!(all_generations(&file, PAGES), (0, 0));
            let cut = OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path).unwrap();
            drop(file);
            let _other = is_open_meanwhile.then_some(cut);
            let file = leased(&cache, &path);
            let mut byte = [1];
            assert_eq!(file.read_at(&mut byte, 5000).unwrap(), 0, "it is empty");
            assert_eq!(file.len(), 0);
        }
    }
}

// ---- the process ----------------------------------------------------------------------------

#[test]
fn a_thousand_leases_are_given_up_one_by_one() {
    const FILES: usize = 1000;
    let (folder, mut other) = (folder(), Other::start());
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let cache = cache();
    let paths: Vec<PathBuf> = (0..FILES).map(|nth| folder.path().join(nth.to_string())).collect();
    let files: Vec<File> = paths
        .iter()
        .map(|path| {
            fs::write(path, content(1, 0)).unwrap();
            leased(&cache, path)
        })
        .collect();
    assert!(files.iter().all(|file| generation(file, 0) == 0 && in_force(file) == Coherence::Lease));
    for path in &paths {
        other.send(&format!("open {}", path.display()));
        other.send("write 1 1");
    }
    (0..2 * FILES).for_each(|_| assert_eq!(other.answer(), "done"));
    assert!(files.iter().all(|file| generation(file, 0) == 1));
    drop(files);
    assert_eq!(paths.iter().map(|path| leases_on(path)).sum::<usize>(), 0);
}

#[test]
fn a_file_that_is_closed_while_its_lease_is_broken_is_closed() {
    let (folder, cache) = (folder(), cache());
    let path = file_in(&folder, PAGES);
    for round in 0..300 {
        let file = cache.open_with(&path, &leasing()).unwrap();
        generation(&file, round % PAGES);
        thread::scope(|scope| {
            let writer = scope.spawn(|| drop(OpenOptions::new().write(true).open(&path).unwrap()));
            if round % 2 == 0 {
                thread::yield_now();
            }
            drop(file);
            writer.join().unwrap();
        });
        assert_eq!(leases_on(&path), 0);
    }
    cache.check().unwrap();
}

#[test]
fn a_cache_may_end_while_a_lease_is_broken() {
    let folder = folder();
    let path = file_in(&folder, PAGES);
    for _ in 0..50 {
        let cache = cache();
        let file = leased(&cache, &path);
        generation(&file, 1);
        thread::scope(|scope| {
            let writer = scope.spawn(|| drop(OpenOptions::new().write(true).open(&path).unwrap()));
            drop((file, cache));
            writer.join().unwrap();
        });
    }
}

#[test]
#[allow(unsafe_code, reason = "a child without exec")]
fn a_forked_child_keeps_no_lease_and_breaks_none() {
    if !hazard::in_a_process_of_its_own("a_forked_child_keeps_no_lease_and_breaks_none") {
        return;
    }
    let (folder, cache) = (folder(), cache());
    let path = file_in(&folder, PAGES);
    let mut file = Some(leased(&cache, &path));
    generation(file.as_ref().unwrap(), 0);
    let mut ends = [0; 2];
    // SAFETY: two numbers are written. The child calls what may be called there: it reads, drops, and ends.
    let child = unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        libc::fork()
    };
    if child == 0 {
        // SAFETY: a system call. A parent that fails leaves no child, which would keep its output open.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let refused = file.as_ref().unwrap().read_at(&mut [0; 10], 0).map_err(|error| error.kind());
        let told = file.as_ref().unwrap().coherence().map_err(|error| error.kind());
        let forked = refused == Err(ErrorKind::Forked) && told.is_err();
        drop(file); // of the child: the parent's lease is no business of its
        // SAFETY: as above.
        unsafe {
            libc::write(ends[1], [u8::from(forked)].as_ptr().cast(), 1);
            libc::pause();
            libc::_exit(1);
        }
    }
    let mut forked = [0u8];
    // SAFETY: one byte is written.
    assert_eq!(unsafe { libc::read(ends[0], forked.as_mut_ptr().cast(), 1) }, 1);
    assert_eq!(forked, [1], "a child is told that it is one");
    assert_eq!((in_force(file.as_ref().unwrap()), leases_on(&path)), (Coherence::Lease, 1));
    drop(OpenOptions::new().write(true).open(&path).unwrap());
    wait_for_lease(file.as_ref().unwrap());
    // The child has the description, too, and the lease ends all the same.
    drop(file.take());
    assert_eq!(leases_on(&path), 0);
    // SAFETY: this process's child, which waits for a signal.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}

#[test]
#[allow(unsafe_code, reason = "signals")]
fn the_programs_signals_are_the_programs() {
    const ROUNDS: i32 = 3;
    let name = "the_programs_signals_are_the_programs";
    if std::env::var(ROLE).is_err() {
        // All threads of that process have all signals blocked from the start.
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", name]).env(ROLE, "signals");
        // SAFETY: between fork and exec only the mask is set.
        unsafe {
            command.pre_exec(|| {
                let mut all: libc::sigset_t = std::mem::zeroed();
                libc::sigfillset(&raw mut all);
                libc::sigprocmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
                Ok(())
            });
        }
        let run = command.output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success() && out.contains("1 passed"), "{out}{err}");
        return;
    }
    let dispositions = || -> Vec<usize> {
        let of = |signal| {
            // SAFETY: an all-zero action is valid memory to be written.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: as above; nothing is set.
            unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
            action.sa_sigaction
        };
        (1..=64).map(of).collect()
    };
    let (before, folder, cache) = (dispositions(), folder(), cache());
    let path = file_in(&folder, PAGES);
    let file = leased(&cache, &path);
    // Real-time signals queue, and each is sent thrice to the process; the others are pending once.
    let signals: Vec<i32> =
        (libc::SIGRTMIN()..=libc::SIGRTMAX()).chain([libc::SIGIO, libc::SIGURG, libc::SIGUSR1]).collect();
    // SAFETY: numbers are sent to this process, in which they are blocked.
    let send =
        || signals.iter().for_each(|&signal| assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0));
    for _ in 0..ROUNDS {
        send();
        generation(&file, 3);
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        wait_for_lease(&file);
    }
    for signal in signals {
        let expected = if signal >= libc::SIGRTMIN() { ROUNDS } else { 1 };
        let mut got = 0;
        // SAFETY: a set of one signal, and no time to wait.
        while unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, signal);
            let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const at_once)
        } == signal
        {
            got += 1;
        }
        assert_eq!(got, expected, "signal {signal} was sent to the program");
    }
    assert_eq!(dispositions(), before, "no handler was set");
}

/// A lease is on a description, and the cache's is not the handed one.
#[test]
fn an_adopted_file_has_a_lease_of_its_own() {
    let (folder, cache) = (folder(), cache());
    let path = file_in(&folder, 2);
    let theirs = Plain::open(&path).unwrap();
    let file = leased(&cache, Path::new(&format!("/proc/self/fd/{}", theirs.as_raw_fd())));
    drop(theirs);
    assert_eq!((in_force(&file), leases_on(&path)), (Coherence::Lease, 1));
}
