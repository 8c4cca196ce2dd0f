//! Disk tier: content with a lasting name is on a local disk as well, and no byte of it is ever another's.
//!
//! The store behind is a source whose bytes follow from the content's number and the offset, so that each byte that is
//! read is compared; it counts what is fetched from it. A process that is killed is this program again, with
//! `kill_victim` as its only test.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use quinion::backend::{
    Attributes, BlockingSource, ContentKey, Identity, ReadAt, SyncKind, ThreadPool, Version, WaitQueue,
    WriteAt,
};
use quinion::{Cache, DiskOptions, ErrorKind, File, OpenOptions};

const MIB: u64 = 1 << 20;

#[derive(Default, Debug)]
struct Remote {
    reads: AtomicU64,
    bytes: AtomicU64,
    is_down: AtomicBool,
}

#[derive(Debug)]
struct Content {
    remote: Arc<Remote>,
    number: u64,
    size: u64,
    is_named: bool,
}

fn byte(number: u64, at: u64) -> u8 {
    let mixed = (at ^ number << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8 ^ number as u8
}

impl ReadAt for Content {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        if self.remote.is_down.load(Ordering::Relaxed) {
            return Err(io::Error::other("the store is down"));
        }
        let bytes = self.size.saturating_sub(position).min(buffer.len() as u64) as usize;
        for (at, to) in buffer[..bytes].iter_mut().enumerate() {
            *to = byte(self.number, position + at as u64);
        }
        self.remote.reads.fetch_add(1, Ordering::Relaxed);
        self.remote.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let version = Version { modified: 0, changed: 0, settled: true, steps: true };
        let mut digest = [7; 24];
        digest[..8].copy_from_slice(&self.number.to_le_bytes());
        Ok(Attributes { identity: Identity::of_digest(digest), version, size: self.size })
    }
    fn content_key(&self) -> Option<ContentKey> {
        let mut key = [9; 32];
        key[..8].copy_from_slice(&self.number.to_le_bytes());
        self.is_named.then_some(ContentKey(key))
    }
}

struct Node {
    cache: Cache,
    remote: Arc<Remote>,
    pool: Arc<ThreadPool>,
}

impl Node {
    fn new(folder: &Path, disk_mib: u64) -> Self {
        let disk = DiskOptions::new(folder, disk_mib * MIB);
        let cache = Cache::builder().memory(16 * MIB).disk(disk).build().expect("a cache");
        let pool = Arc::new(ThreadPool::new(Arc::new(WaitQueue::new()), 2, 64));
        Self { cache, remote: Arc::default(), pool }
    }
    fn open(&self, number: u64, size: u64) -> File {
        self.open_as(number, size, true)
    }
    fn open_nameless(&self, number: u64, size: u64) -> File {
        self.open_as(number, size, false)
    }
    fn open_as(&self, number: u64, size: u64, is_named: bool) -> File {
        let content = Content { remote: Arc::clone(&self.remote), number, size, is_named };
        let backend = BlockingSource::new(content, Arc::clone(&self.pool));
        self.cache.open_backend(Arc::new(backend)).expect("it opens")
    }
    fn bytes_fetched(&self) -> u64 {
        self.remote.bytes.load(Ordering::Relaxed)
    }
    /// Waits until so much has been written, tables included.
    fn wait_for_written(&self, bytes: u64) {
        let began = Instant::now();
        while self.cache.disk_stats().unwrap().written_bytes < bytes {
            assert!(began.elapsed() < Duration::from_secs(60), "{:?}", self.cache.disk_stats());
            thread::sleep(Duration::from_millis(1));
        }
    }
    /// Waits until the disk has so many pages: what arrives is put when its fill ends, before its reader goes on, but
    /// for readahead.
    fn wait_for_pages(&self, pages: u64) {
        assert!(self.has_pages_within(pages, Duration::from_secs(60)), "{:?}", self.cache.disk_stats());
    }
    fn has_pages_within(&self, pages: u64, time: Duration) -> bool {
        let began = Instant::now();
        while self.cache.disk_stats().unwrap().pages < pages {
            if began.elapsed() > time {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        true
    }
    /// Reads the file until the disk has so many pages of it: a disk that is slower than the reader refuses some, and
    /// keeps them when they arrive again.
    fn read_until_kept(&self, file: &File, number: u64, pages: u64) {
        let has_all = |_| {
            read_all(file, number);
            self.has_pages_within(pages, Duration::from_secs(5))
        };
        assert!((0..12).any(has_all), "{:?}", self.cache.disk_stats());
    }
}

fn read_checked(file: &File, number: u64, from: u64, len: usize) {
    let mut buffer = vec![0; len];
    let bytes = file.read_at(&mut buffer, from).expect("it is read");
    assert_eq!(bytes as u64, file.len().saturating_sub(from).min(len as u64));
    let wrong = buffer[..bytes].iter().enumerate().find(|&(at, &is)| is != byte(number, from + at as u64));
    assert_eq!(wrong, None, "content {number} from byte {from}");
}

fn read_all(file: &File, number: u64) {
    for from in (0..file.len()).step_by(MIB as usize) {
        read_checked(file, number, from, MIB as usize);
    }
}

#[test]
fn pages_evicted_from_memory_come_back_from_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path(), 128);
    let file = node.open(1, 40 * MIB + 17);
    node.read_until_kept(&file, 1, 40 * 256 + 1);
    let fetched = node.bytes_fetched();
    assert!(fetched >= 40 * MIB + 17);
    read_all(&file, 1);
    read_all(&file, 1);
    assert_eq!(
        node.bytes_fetched(),
        fetched,
        "memory holds less than half of it, and the store was not asked"
    );
    assert!(node.cache.disk_stats().unwrap().hit_pages > 10_000);
    assert_eq!(node.cache.disk_stats().unwrap().corrupt_extents, 0);
}

#[test]
fn a_restart_finds_everything_and_asks_the_store_for_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path(), 64);
    read_all(&node.open(1, 9 * MIB + 4095), 1);
    node.wait_for_pages(9 * 256 + 1);
    drop(node);
    let node = Node::new(folder.path(), 64);
    node.remote.is_down.store(true, Ordering::Relaxed);
    read_all(&node.open(1, 9 * MIB + 4095), 1);
    assert_eq!(node.bytes_fetched(), 0);
}

#[test]
fn a_file_without_a_lasting_name_is_not_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path(), 64);
    read_all(&node.open_nameless(1, 4 * MIB), 1);
    assert_eq!(node.cache.disk_stats().unwrap().put_pages, 0);
}

impl WriteAt for Content {
    fn write_at(&self, bytes: &[u8], _position: u64) -> io::Result<usize> {
        Ok(bytes.len())
    }
    fn sync(&self, _kind: SyncKind, _range: std::ops::Range<u64>) -> io::Result<()> {
        Ok(())
    }
    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_writable_file_is_not_on_the_disk_and_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path(), 64);
    let content = Content { remote: Arc::clone(&node.remote), number: 1, size: MIB, is_named: true };
    let backend = Arc::new(BlockingSource::for_writing(content, Arc::clone(&node.pool)));
    let file = node.cache.open_backend_with(backend, OpenOptions::new().write(true)).expect("it opens");
    read_all(&file, 1);
    file.write_all_at(&[1; 4096], 0).expect("it is written");
    file.sync_all().expect("and durable");
    assert_eq!(node.cache.disk_stats().unwrap().put_pages, 0);
}

#[test]
fn bits_that_rot_on_the_disk_are_read_from_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path(), 64);
    read_all(&node.open(1, 8 * MIB), 1);
    node.wait_for_pages(8 * 256);
    drop(node);
    let disk = std::fs::OpenOptions::new().write(true).open(folder.path().join("quinion.disk")).unwrap();
    for segment in 1..9 {
        disk.write_all_at(&[0xa5; 100], segment * MIB + 300_000 + segment * 4096).unwrap();
    }
    let node = Node::new(folder.path(), 64);
    read_all(&node.open(1, 8 * MIB), 1);
    assert!(node.bytes_fetched() > 0, "what rotted was fetched");
    assert!(node.bytes_fetched() <= 8 * MIB);
    assert!(node.cache.disk_stats().unwrap().corrupt_extents > 0);
}

#[test]
fn an_error_of_the_store_is_the_readers_and_nothing_is_kept_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path(), 64);
    let file = node.open(1, MIB);
    node.remote.is_down.store(true, Ordering::Relaxed);
    let error = file.read_at(&mut [0; 4096], 0).unwrap_err();
    assert!(error.to_string().contains("the store is down"), "{error}");
    assert_eq!(node.cache.disk_stats().unwrap().put_pages, 0);
    node.remote.is_down.store(false, Ordering::Relaxed);
    read_all(&file, 1);
}

#[test]
fn one_pass_over_much_does_not_push_out_stored_pages() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path(), 32);
    // More than 90 % of the disk: what comes later has to come twice.
    for number in 0..30 {
        read_all(&node.open(number, MIB), number);
        node.wait_for_written(number * MIB); // all but the segment that is being filled: the disk is not behind
    }
    node.wait_for_pages(29 * 256);
    let before = node.cache.disk_stats().unwrap().put_pages;
    for number in 100..200 {
        read_all(&node.open(number, MIB), number);
    }
    let after = node.cache.disk_stats().unwrap().put_pages;
    assert!(after - before < 256, "{} of 25,600 pages that came once were put", after - before);
    read_all(&node.open(199, MIB), 199);
}

#[test]
fn a_folder_in_use_is_an_error_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path(), 16);
    let second = Cache::builder().memory(16 * MIB).disk(DiskOptions::new(folder.path(), 16 * MIB)).build();
    let error = second.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Build);
    assert!(format!("{error:?} {error}").contains("in use by another process"), "{error}");
    assert_eq!(node.cache.disk_trouble(), None);
}

/// Random reads of random contents by several threads, memory and disk both too small; each byte is compared. Restarts
/// between.
#[test]
fn random_reads_agree_with_the_store() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let node = Node::new(folder.path(), 24);
        let files: Mutex<HashMap<u64, Arc<File>>> = Mutex::default();
        thread::scope(|scope| {
            for thread in 0..3 {
                let (node, files) = (&node, &files);
                scope.spawn(move || {
                    let mut state: u64 = round << 8 | thread | 1 << 20;
                    let mut random = move |end: u64| {
                        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                        (state >> 33) % end
                    };
                    for _ in 0..1500 {
                        let number = random(12);
                        let size = 3 * MIB + number * 1111;
                        let open = || Arc::new(node.open(number, size));
                        let file = Arc::clone(files.lock().unwrap().entry(number).or_insert_with(open));
                        read_checked(&file, number, random(size), 1 + random(200_000) as usize);
                        if random(50) == 0 {
                            files.lock().unwrap().remove(&number);
                        }
                    }
                });
            }
        });
        assert!(node.cache.disk_stats().unwrap().hit_pages > 0);
        node.cache.check().unwrap();
    }
}

/// The process that is killed: reads contents until it is.
#[test]
fn kill_victim() {
    let Some(folder) = std::env::var_os("QUINION_DISK_TIER_VICTIM") else { return };
    let node = Node::new(Path::new(&folder), 64);
    for number in (0..20).cycle() {
        read_all(&node.open(number, 2 * MIB + number), number);
        // A disk that was behind has the rest after another round; the segment that is being filled is in memory.
        if number == 19 && node.cache.disk_stats().unwrap().written_bytes >= 39 * MIB {
            println!("most is written");
        }
    }
}

#[test]
fn a_process_that_is_killed_leaves_a_warm_disk_and_no_wrong_byte() {
    use std::io::{BufRead, BufReader};
    let folder = tempfile::tempdir().unwrap();
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["kill_victim", "--exact", "--nocapture"])
        .env("QUINION_DISK_TIER_VICTIM", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    while !lines.next().unwrap().unwrap().contains("most is written") {}
    victim.kill().unwrap();
    assert_eq!(victim.wait().unwrap().signal(), Some(9));
    let node = Node::new(folder.path(), 64);
    for number in 0..20 {
        read_all(&node.open(number, 2 * MIB + number), number);
    }
    assert!(node.bytes_fetched() < 4 * MIB, "{} bytes of 40 MiB were fetched again", node.bytes_fetched());
}
