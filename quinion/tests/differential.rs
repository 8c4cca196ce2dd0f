//! Differential: each operation on a file through the cache has the same effect as the kernel's on a twin.
//!
//! ```text
//!   seed -> bytes -> operations --run on a pair--> nothing to say         (what is compared: `twins::cache`)
//!                                     '----------> a complaint --shrink--> a short list that still fails, printed
//! ```
//!
//! The pairs live on a disk, which is written past the kernel's page cache, and in memory, where it is not; with folios
//! of a page and with large ones; by io_uring and by threads; some caches end after a sync and some without one.
//!
//! A list that was printed can be run again: put it into a test that calls [`check`] with the setting beside it.
//! (What hangs on the moment at which a thread in the background writes may not come again the same way.)
//!
//! Then several threads change and read one file at once, each its own part of it. Contents that hold their owner show
//! whether each page was read whole.
//!
//! `QUINION_SOAK=1 cargo test --release --test differential -- --nocapture` does a million operations.

use quinion_testing::shrinking;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use quinion::backend::{Attributes, Backend, Fill, Flush, ReapMode, ReapOutcome, SyncKind, WaitQueue};
use quinion::{Cache, File, Mechanism, OpenOptions, WriteOptions};
use quinion_testing::content::{Dice, PAGE, fill_content, generations, page_content};
use quinion_testing::doubles::{CrashDisk, Faults, SimulatedBackend};
use quinion_testing::shrinking::shrunk;
use quinion_testing::twins::cache::{At, Bytes, Ending, Op, Reading, Setting, Syncing, Writing, run};
use tempfile::TempDir;

const OPS: u64 = 50_000;
const OPS_SOAK: u64 = 1_000_000;
const BYTES: usize = 1000;
/// How often a shorter list is tried: some fail only now and then.
const TRIES: u32 = 3;

fn is_soak() -> bool {
    std::env::var_os("QUINION_SOAK").is_some()
}

fn disk() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

fn memory() -> PathBuf {
    PathBuf::from("/dev/shm")
}

// ---- one file and its twin ----------------------------------------------------------------------------

fn complaint(setting: &Setting, ops: &[Op]) -> Option<String> {
    let (setting, ops) = (setting.clone(), ops.to_vec());
    shrinking::complaint(move || run(&setting, &ops))
}

/// Operations of the same kind of which less can be said.
fn simpler(op: Op) -> Vec<Op> {
    let start = |at| match at {
        At::Byte(byte) => At::Byte(byte / PAGE as u64 * PAGE as u64),
        at @ At::End(_) => at,
    };
    match op {
        Op::Write { by, at, len, .. } => {
            let plain = |at, len| Op::Write { by, at, len, how: Writing::Plain };
            vec![plain(at, len), plain(start(at), PAGE as u32), plain(at, 1)]
        }
        Op::Read { by, at, len, .. } => {
            let plain = |at, len| Op::Read { by, at, len, how: Reading::Plain };
            vec![plain(at, len), plain(start(at), PAGE as u32)]
        }
        Op::Pin { by, at, .. } => vec![Op::Pin { by, at: start(at), len: PAGE as u32 }],
        Op::Punch { by, at, .. } => vec![Op::Punch { by, at: start(at), len: PAGE as u32 }],
        Op::Append { by, .. } => vec![Op::Append { by, len: 1 }],
        Op::Sync { by, .. } => vec![Op::Sync { by, how: Syncing::All }],
        _ => Vec::new(),
    }
}

#[track_caller]
fn check(setting: &Setting, ops: &[Op]) {
    let Some(why) = complaint(setting, ops) else { return };
    eprintln!("a run of {} operations failed: {why}\nlooking for a shorter one", ops.len());
    let (ops, why) =
        shrunk(ops.to_vec(), why, simpler, |ops| (0..TRIES).find_map(|_| complaint(setting, ops)));
    let list: String = ops.iter().map(|op| format!("    Op::{op:?},\n")).collect();
    panic!("{why}\nwith {setting:?}\nafter these operations:\nvec![\n{list}]");
}

fn differ(folder: PathBuf, orders: [u8; 2], seed: u64) {
    let wanted = if is_soak() { OPS_SOAK } else { OPS } / 4;
    let (mut done, mut dice) = (0, Dice::new(seed));
    while done < wanted {
        let setting = Setting {
            folder: folder.clone(),
            mechanism: if dice.below(2) == 0 { Mechanism::Ring } else { Mechanism::Threads },
            orders,
            ending: if dice.below(2) == 0 { Ending::Synced } else { Ending::Dropped },
        };
        let bytes: Vec<u8> = (0..BYTES).map(|_| dice.roll() as u8).collect();
        let ops: Vec<Op> = Bytes(&bytes).collect();
        check(&setting, &ops);
        done += ops.len() as u64;
    }
    println!("{done} operations with folios of orders {orders:?} in {}", folder.display());
}

#[test]
fn pages_on_a_disk_are_as_the_kernels() {
    differ(disk(), [0, 0], 1);
}

#[test]
fn large_folios_on_a_disk_are_as_the_kernels() {
    differ(disk(), [0, 9], 2);
}

#[test]
fn pages_in_memory_are_as_the_kernels() {
    differ(memory(), [0, 0], 3);
}

#[test]
fn large_folios_in_memory_are_as_the_kernels() {
    differ(memory(), [2, 9], 4);
}

#[test]
fn a_failing_list_becomes_short() {
    let mut dice = Dice::new(0);
    let bytes: Vec<u8> = (0..BYTES).map(|_| dice.roll() as u8).collect();
    let ops: Vec<Op> = Bytes(&bytes).collect();
    assert!(ops.len() > 100, "an operation takes few bytes");
    let kinds: BTreeSet<String> =
        ops.iter().map(|op| format!("{op:?}").split(' ').next().unwrap_or_default().to_owned()).collect();
    assert!(kinds.len() > 12, "{kinds:?}");
    // It fails if an append comes after a punch.
    let fails = |ops: &[Op]| {
        let punch = ops.iter().position(|op| matches!(op, Op::Punch { .. }))?;
        ops[punch..].iter().any(|op| matches!(op, Op::Append { .. })).then(|| "so it is".to_owned())
    };
    let (short, why) = shrunk(ops, String::new(), simpler, fails);
    assert!(matches!(short[..], [Op::Punch { .. }, Op::Append { len: 1, .. }]), "{short:?}");
    assert_eq!(why, "so it is");
}

/// Another program writes to pages that the cache has not changed, while it has changed others: those stay, and the new
/// ones are seen at the next check.
#[test]
fn other_programs_writes_elsewhere_are_seen_and_our_own_are_kept() {
    for folder in [disk(), memory()] {
        let folder = TempDir::new_in(folder).unwrap();
        let path = folder.path().join("file");
        fs::write(&path, [1; 20 * PAGE]).unwrap();
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let file = cache.open_with(&path, OpenOptions::new().write(true)).unwrap();
        let mut bytes = vec![0; 20 * PAGE];
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
        file.write_all_at(&[2; PAGE], 3 * PAGE as u64).unwrap();
        let external = fs::OpenOptions::new().write(true).open(&path).unwrap();
        external.write_all_at(&[3; PAGE], 10 * PAGE as u64).unwrap();
        assert!(file.revalidate().unwrap(), "the file has changed");
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
        let pages: Vec<u8> = bytes.chunks(PAGE).map(|page| page[0]).collect();
        let mut wanted = [1; 20];
        (wanted[3], wanted[10]) = (2, 3);
        assert_eq!(pages, wanted);
        file.sync_all().unwrap();
        assert!(fs::read(&path).unwrap() == bytes, "the file has both");
    }
}

/// A device that holds its writes until the file's size was asked for so many times, and ends them just after the
/// answer. Its times say nothing.
#[derive(Debug)]
struct Slow {
    inner: SimulatedBackend,
    questions: AtomicU32,
}

impl Backend for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.inner.attach(wait_queue);
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let mut told = self.inner.attributes()?;
        told.version.settled = false;
        let less = |left: u32| left.checked_sub(1);
        if self.questions.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) == Ok(1) {
            self.inner.resume();
            while self.inner.held() > 0 {
                self.inner.reap(ReapMode::Ready, &mut || false);
            }
        }
        Ok(told)
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
}

/// 1. A file is made longer, and its new end is on its way to the device.
/// 2. A second handle opens it, and asks the device how long it is: as long as before.
/// 3. The flush ends: its pages are clean.
/// 4. The second handle keeps what is dirty, which is nothing, and takes the file for as long as the device said.
#[test]
fn a_file_that_grows_while_it_is_opened_keeps_its_new_end() {
    let disk = Arc::new(CrashDisk::new(vec![1; 3 * PAGE]));
    let slow = Slow {
        inner: SimulatedBackend::of_crash_disk(disk, Faults::default()),
        questions: AtomicU32::new(0),
    };
    let slow = Arc::new(slow);
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let open = || {
        let backend = Arc::clone(&slow) as Arc<dyn Backend>;
        cache.open_backend_with(backend, OpenOptions::new().write(true)).unwrap()
    };
    let file = open();
    for round in 1..20 {
        slow.inner.pause();
        file.append(&[2; 2 * PAGE]).unwrap();
        file.write_back().unwrap();
        slow.questions.store(2, Ordering::Relaxed); // one to open it, and one to forget what is cached
        let other = open();
        slow.inner.resume();
        let mut bytes = vec![0; (3 + 2 * round) * PAGE];
        assert_eq!((file.len(), other.len()), (bytes.len() as u64, bytes.len() as u64));
        other.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes[3 * PAGE..].iter().all(|&byte| byte == 2));
    }
}

// ---- many threads -------------------------------------------------------------------------------------

/// Pages of each writer of whole pages, and between the writers' parts, where both write in part.
const WHOLE: u64 = 700;
const WRITERS: u64 = 2;
/// Bytes of each owner of a part that begins and ends within a page.
const RAGGED: u64 = 60_000 + 123;
/// The file's number in contents.
const FILE: u32 = 7;

/// ```text
///   | whole pages of writer 0 | of writer 1 | ragged 0 | ragged 1 | what is appended
///                                            '-- these meet within a page --'
/// ```
fn ragged_start(owner: u64) -> u64 {
    WRITERS * WHOLE * PAGE as u64 + owner * RAGGED
}

struct Fixture {
    file: File,
    stop: AtomicBool,
    checked: AtomicU64,
    rounds: u64,
}

fn write_whole(fixture: &Fixture, writer: u64) -> Vec<u32> {
    let (mut dice, first) = (Dice::new(writer + 10), writer * WHOLE);
    let mut now = vec![1; WHOLE as usize];
    for generation in 2..fixture.rounds as u32 {
        let page = dice.below(WHOLE);
        let pages = (1 + dice.below(8)).min(WHOLE - page);
        let at = (first + page) * PAGE as u64;
        let mut bytes = vec![0; pages as usize * PAGE];
        fill_content(&mut bytes, FILE, at, generation);
        let told = match dice.below(20) {
            0 => fixture.file.punch_hole(at, bytes.len() as u64).map(|()| 0),
            1 => {
                let options = WriteOptions::new().uncached(true);
                fixture.file.write_at_with(&bytes, at, options).map(|_| generation)
            }
            _ => fixture.file.write_all_at(&bytes, at).map(|()| generation),
        };
        now[page as usize..(page + pages) as usize].fill(told.unwrap());
    }
    now
}

fn write_ragged(fixture: &Fixture, owner: u64) -> Vec<u8> {
    let (mut dice, start) = (Dice::new(owner + 20), ragged_start(owner));
    let mut mine = vec![0; RAGGED as usize];
    let mut found = vec![0; RAGGED as usize];
    for round in 0..fixture.rounds {
        let at = dice.below(RAGGED);
        let len = (1 + dice.below(9000)).min(RAGGED - at) as usize;
        let bytes: Vec<u8> = (0..len).map(|_| dice.roll() as u8).collect();
        fixture.file.write_all_at(&bytes, start + at).unwrap();
        mine[at as usize..at as usize + len].copy_from_slice(&bytes);
        let at = dice.below(RAGGED) as usize;
        let len = dice.below(9000).min((RAGGED as usize - at) as u64) as usize;
        fixture.file.read_exact_at(&mut found[at..at + len], start + at as u64).unwrap();
        assert!(found[at..at + len] == mine[at..at + len], "round {round} of {owner}: {len} bytes at {at}");
    }
    mine
}

fn read_whole(fixture: &Fixture, reader: u64) {
    let mut dice = Dice::new(reader + 30);
    let mut buffer = vec![0; 20 * PAGE];
    while !fixture.stop.load(Ordering::Relaxed) {
        let page = dice.below(WRITERS * WHOLE);
        let pages = (1 + dice.below(20)).min(WRITERS * WHOLE - page) as usize;
        let buffer = &mut buffer[..pages * PAGE];
        if dice.below(10) == 0 {
            let pinned = fixture.file.pin(page * PAGE as u64, buffer.len()).unwrap();
            let bytes: Vec<u8> = pinned.chunks().flatten().copied().collect();
            buffer.copy_from_slice(&bytes);
        } else {
            fixture.file.read_exact_at(buffer, page * PAGE as u64).unwrap();
        }
        for (page, bytes) in (page..).zip(buffer.chunks(PAGE)) {
            if bytes.iter().any(|&byte| byte != 0) {
                generations(bytes, FILE, page * PAGE as u64).unwrap();
            }
        }
        fixture.checked.fetch_add(pages as u64, Ordering::Relaxed);
    }
}

fn tend(fixture: &Fixture, cache: &Cache) -> Vec<u8> {
    let mut dice = Dice::new(40);
    let mut appended = Vec::new();
    while !fixture.stop.load(Ordering::Relaxed) {
        match dice.below(8) {
            0 => fixture.file.sync_data().unwrap(),
            1 => fixture.file.sync_range(dice.below(WHOLE) * PAGE as u64, 1 << 20).unwrap(),
            2 => fixture.file.write_back().unwrap(),
            3 => drop(fixture.file.dont_need(0, u64::MAX).unwrap()),
            4 => drop(cache.resize((17 + dice.below(7)) << 20).unwrap()),
            _ if appended.len() < 1 << 20 => {
                let bytes: Vec<u8> = (0..dice.below(5000)).map(|_| dice.roll() as u8).collect();
                let at = fixture.file.append(&bytes).unwrap();
                assert_eq!(at, ragged_start(WRITERS) + appended.len() as u64);
                appended.extend(bytes);
            }
            _ => thread::yield_now(),
        }
    }
    appended
}

fn many_threads(folder: &Path, orders: [u8; 2]) {
    let folder = TempDir::new_in(folder).unwrap();
    let path = folder.path().join("file");
    let whole: Vec<u8> = (0..WRITERS * WHOLE).flat_map(|page| page_content(FILE, page, 1)).collect();
    fs::write(&path, [whole, vec![0; (WRITERS * RAGGED) as usize]].concat()).unwrap();
    let cache = Cache::builder().memory(16 << 20).memory_max(24 << 20);
    let cache = cache.folio_order_max(orders[1]).folio_order_min(orders[0]).build().unwrap();
    let file = cache.open_with(&path, OpenOptions::new().write(true)).unwrap();
    let rounds = if is_soak() { 100_000 } else { 1500 };
    let fixture = Fixture { file, stop: AtomicBool::new(false), checked: AtomicU64::new(0), rounds };
    let fixture = &fixture;
    let (whole, ragged, appended) = thread::scope(|scope| {
        let cache = &cache;
        let tended = scope.spawn(move || tend(fixture, cache));
        let readers: Vec<_> = (0..2).map(|nth| scope.spawn(move || read_whole(fixture, nth))).collect();
        let whole: Vec<_> = (0..WRITERS).map(|nth| scope.spawn(move || write_whole(fixture, nth))).collect();
        let ragged: Vec<_> =
            (0..WRITERS).map(|nth| scope.spawn(move || write_ragged(fixture, nth))).collect();
        let whole: Vec<_> = whole.into_iter().map(thread::ScopedJoinHandle::join).collect();
        let ragged: Vec<_> = ragged.into_iter().map(thread::ScopedJoinHandle::join).collect();
        // Also when one has failed, so that the others end.
        fixture.stop.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let appended = tended.join().unwrap();
        let whole: Vec<u32> = whole.into_iter().flat_map(Result::unwrap).collect();
        (whole, ragged.into_iter().flat_map(Result::unwrap).collect::<Vec<u8>>(), appended)
    });
    assert!(fixture.checked.load(Ordering::Relaxed) > 0, "the readers read");
    cache.check().unwrap();
    fixture.file.sync_all().unwrap();
    assert_eq!(fixture.file.dirty_bytes().unwrap(), 0);
    let found = fs::read(&path).unwrap();
    for (page, (&generation, bytes)) in (0..).zip(whole.iter().zip(found.chunks(PAGE))) {
        let wanted = if generation == 0 { [0; PAGE] } else { page_content(FILE, page, generation) };
        assert!(bytes == wanted, "page {page} is not of generation {generation}");
    }
    assert!(found[ragged_start(0) as usize..] == [ragged, appended].concat(), "the parts of parts of pages");
}

#[test]
fn threads_that_write_their_own_parts_find_them_and_no_reader_sees_half_a_page() {
    many_threads(&disk(), [0, 0]);
    many_threads(&disk(), [0, 9]);
    many_threads(&memory(), [0, 4]);
}

#[test]
fn appends_of_two_threads_do_not_mix() {
    let folder = TempDir::new_in(disk()).unwrap();
    let path = folder.path().join("file");
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let file = cache.open_with(&path, OpenOptions::new().append(true).create(true)).unwrap();
    let barrier = Barrier::new(2);
    let append = |thread: u8| {
        barrier.wait();
        let lens = |nth: u64| 1 + (nth * 7919) % 5000;
        (0..300)
            .map(|nth| (file.append(&vec![thread; lens(nth) as usize]).unwrap(), lens(nth)))
            .collect::<Vec<_>>()
    };
    let append = &append;
    let places: Vec<Vec<(u64, u64)>> = thread::scope(|scope| {
        let threads = [1, 2].map(|thread| scope.spawn(move || append(thread)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    file.sync_all().unwrap();
    let found = fs::read(&path).unwrap();
    let mut all: Vec<(u64, u64, u8)> = (1..)
        .zip(places)
        .flat_map(|(of, places)| places.into_iter().map(move |(at, len)| (at, len, of)))
        .collect();
    all.sort_unstable();
    let mut end = 0;
    for (at, len, of) in all {
        assert_eq!(at, end, "they follow each other without a gap");
        end = at + len;
        assert!(
            found[at as usize..end as usize].iter().all(|&byte| byte == of),
            "{len} bytes of {of} at {at}"
        );
    }
    assert_eq!(found.len() as u64, end);
}
