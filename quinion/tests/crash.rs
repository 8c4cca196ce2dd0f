//! Crash: the bytes that a successful sync has promised are there, wherever power fails afterwards; and no byte is
//! there that was never written.
//!
//! ```text
//!   operations --through a cache--> a disk that remembers  --each prefix of its log, some samples-->  states
//!       |                                                                                                |
//!       '--> images: what the file was after each operation; promises: which bytes a sync was Ok for     |
//!                                     '---------------- check each byte of each state -------------------'
//! ```
//!
//! The checker knows nothing of pages, folios or flushes. A byte of a state is right if it is what some image has
//! there, and no image older than the last promise of this byte. The same goes for the size: while something is
//! unsynced, the file may have any size between the least and the largest since then, since it grows by pieces.
//! A sync of a range promises its bytes: where the file ends before, it promised zeros.
//!
//! The states are those of `CrashDisk` in `quinion-testing`: all that was done, only what is durable, some of the
//! writes, some of their sectors. So writes are reordered, torn and left out there, and their log is the cache's.
//!
//! A second story has a device that fails: flushes and syncs end in errors. Changed bytes stay changed, are read as
//! they were written, and a later sync that says `Ok` promises all of them.

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use quinion::backend::{Attributes, Backend, Fill, Flush, Identity, MemoryFile, SyncKind};
use quinion::{Cache, Durability, File, OpenOptions, WriteOptions};
use quinion_testing::doubles::{CompletionOrder, CrashDisk, CrashLog, Faults, SimulatedBackend, WriteFaults};

const PAGE: usize = 4096;
/// No file becomes longer.
const BYTES_MAX: usize = 30 * PAGE;
const SAMPLES: u64 = 6;
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
enum Op {
    Write { at: usize, len: usize },
    WriteDurably { at: usize, len: usize },
    WriteUncached { at: usize, len: usize },
    Append { len: usize },
    SetLen(usize),
    Punch { at: usize, len: usize },
    SyncData,
    SyncAll,
    SyncRange { at: usize, len: usize },
    WriteBack,
    DontNeed,
    Read { at: usize, len: usize },
}

fn places() -> impl Strategy<Value = usize> {
    prop_oneof![
        3 => (0..BYTES_MAX / PAGE).prop_map(|page| page * PAGE),
        3 => 0..BYTES_MAX,
        2 => 0..3 * PAGE,
    ]
}

fn lens() -> impl Strategy<Value = usize> {
    prop_oneof![Just(PAGE), Just(1), Just(SECTOR), 1..3 * PAGE, 1..12 * PAGE]
}

fn ops() -> impl Strategy<Value = Op> {
    let range = || (places(), lens());
    prop_oneof![
        8 => range().prop_map(|(at, len)| Op::Write { at, len }),
        1 => range().prop_map(|(at, len)| Op::WriteDurably { at, len }),
        1 => range().prop_map(|(at, len)| Op::WriteUncached { at, len }),
        2 => lens().prop_map(|len| Op::Append { len }),
        2 => places().prop_map(Op::SetLen),
        2 => range().prop_map(|(at, len)| Op::Punch { at, len }),
        2 => Just(Op::SyncData),
        1 => Just(Op::SyncAll),
        2 => range().prop_map(|(at, len)| Op::SyncRange { at, len }),
        2 => Just(Op::WriteBack),
        1 => Just(Op::DontNeed),
        2 => range().prop_map(|(at, len)| Op::Read { at, len }),
    ]
}

/// Bytes that differ from those of other generations and neighbours, and are never 0.
fn content(generation: usize, at: usize, len: usize) -> Vec<u8> {
    (at..at + len).map(|byte| (byte * 7 + generation * 31 + byte / PAGE) as u8 | 1).collect()
}

#[derive(Clone, Debug)]
struct SyncPoint {
    events: usize,
    image: usize,
    range: Range<usize>,
}

struct Story {
    disk: Arc<CrashDisk>,
    cache: Cache,
    file: File,
    images: Vec<Vec<u8>>,
    events: Vec<usize>,
    sync_points: Vec<SyncPoint>,
    is_faulty: bool,
}

const EVERYTHING: Range<usize> = 0..usize::MAX;

impl Story {
    fn new(start: Vec<u8>, order: u8, seed: u64, write_faults: WriteFaults) -> Self {
        let disk = Arc::new(CrashDisk::new(start.clone()));
        let faults = Faults { seed, delay_max: 3, sequence: CompletionOrder::Shuffled, ..Faults::default() };
        let device =
            SimulatedBackend::of_crash_disk(Arc::clone(&disk), faults).with_write_faults(write_faults);
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(order).build().unwrap();
        let options = *OpenOptions::new().write(true);
        let file = cache.open_backend_with(Arc::new(device), &options).unwrap();
        let synced = SyncPoint { events: 0, image: 0, range: EVERYTHING };
        Self {
            disk,
            cache,
            file,
            images: vec![start],
            events: vec![0],
            sync_points: vec![synced],
            is_faulty: write_faults != WriteFaults::default(),
        }
    }

    fn now(&self) -> &Vec<u8> {
        self.images.last().expect("there is the start")
    }

    fn is_ok<T>(&self, told: quinion::error::Result<T>) -> bool {
        match told {
            Ok(_) => true,
            Err(error) if self.is_faulty => {
                assert!(matches!(error.raw_os_error(), Some(libc::EIO | libc::ENOSPC) | None), "{error}");
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn tell(&mut self, op: &Op) {
        let mut image = self.now().clone();
        let generation = self.images.len();
        let mut synced = None;
        match *op {
            Op::Write { at, len } => self.write(&mut image, at, len, WriteOptions::new()),
            Op::WriteUncached { at, len } => {
                self.write(&mut image, at, len, WriteOptions::new().uncached(!self.is_faulty));
            }
            Op::WriteDurably { at, len } => {
                let bytes = cut(content(generation, at, len), at);
                let options = WriteOptions::new().durability(Durability::Data);
                let told = self.file.write_at_with(&bytes, at as u64, options);
                put(&mut image, at, &bytes);
                synced = self.is_ok(told).then_some(at..at + bytes.len());
            }
            Op::Append { len } => {
                let at = image.len();
                let bytes = cut(content(generation, at, len), at);
                assert_eq!(self.file.append(&bytes).unwrap(), at as u64);
                put(&mut image, at, &bytes);
            }
            Op::SetLen(len) => {
                self.file.set_len(len as u64).unwrap();
                image.resize(len, 0);
            }
            Op::Punch { at, len } => {
                self.file.punch_hole(at as u64, len as u64).unwrap();
                let end = (at + len).min(image.len());
                image[at.min(end)..end].fill(0);
            }
            Op::SyncData => synced = self.is_ok(self.file.sync_data()).then_some(EVERYTHING),
            Op::SyncAll => synced = self.is_ok(self.file.sync_all()).then_some(EVERYTHING),
            Op::SyncRange { at, len } => {
                let told = self.file.sync_range(at as u64, len as u64);
                synced = self.is_ok(told).then_some(at..at + len);
            }
            Op::WriteBack => self.file.write_back().unwrap(),
            // What a device has lost cannot be read from it again: then nothing is dropped, nor behind a write.
            Op::DontNeed if self.is_faulty => {}
            Op::DontNeed => drop(self.file.dont_need(0, u64::MAX).unwrap()),
            Op::Read { at, len } => self.read(at, len),
        }
        self.images.push(image);
        let events = self.disk.log().len();
        self.events.push(events);
        if let Some(range) = synced {
            self.sync_points.push(SyncPoint { events, image: self.images.len() - 1, range });
        }
        assert_eq!(self.file.len(), self.now().len() as u64);
    }

    fn write(&self, image: &mut Vec<u8>, at: usize, len: usize, options: WriteOptions) {
        let bytes = cut(content(self.images.len(), at, len), at);
        assert_eq!(self.file.write_at_with(&bytes, at as u64, options).unwrap(), bytes.len());
        put(image, at, &bytes);
    }

    fn read(&self, at: usize, len: usize) {
        let mut found = vec![0xee; len];
        let bytes = self.file.read_at(&mut found, at as u64).unwrap();
        let image = self.now();
        let should = &image[at.min(image.len())..(at + len).min(image.len())];
        let wrong = found[..bytes].iter().zip(should).position(|(is, should)| is != should);
        assert_eq!((bytes, wrong), (should.len(), None), "a read of {len} bytes at {at}");
    }

    /// How many pages of the file are read otherwise than they were written.
    fn wrong_pages(&self) -> usize {
        let mut found = vec![0xee; BYTES_MAX];
        let bytes = self.file.read_at(&mut found, 0).unwrap();
        assert_eq!(bytes, self.now().len());
        found[..bytes].chunks(PAGE).zip(self.now().chunks(PAGE)).filter(|(is, should)| is != should).count()
    }

    fn end(mut self, samples: u64, seed: u64) -> Result<(), String> {
        let (disk, images) = (Arc::clone(&self.disk), std::mem::take(&mut self.images));
        let checker = CrashChecker { images: &images, events: &self.events, sync_points: &self.sync_points };
        let log = disk.log();
        checker.check_all(&log, samples, seed)?;
        self.cache.check()?;
        let is_faulty = self.is_faulty;
        drop((self.file, self.cache));
        // The end of the cache writes back what is left, though it promises nothing.
        let last = images.last().expect("there is the start");
        if !is_faulty && disk.content() != *last {
            return Err("the end of the cache lost something".to_owned());
        }
        Ok(())
    }
}

fn cut(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
    bytes.truncate(BYTES_MAX.saturating_sub(at));
    bytes
}

fn put(image: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        image.resize(image.len().max(at + bytes.len()), 0);
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

// ---- the checker ----------------------------------------------------------------------------------------

struct CrashChecker<'s> {
    images: &'s [Vec<u8>],
    events: &'s [usize],
    sync_points: &'s [SyncPoint],
}

impl CrashChecker<'_> {
    fn check_all(&self, log: &CrashLog, samples: u64, seed: u64) -> Result<(), String> {
        for (events, state) in log.states(samples, seed) {
            self.check(events, &state)
                .map_err(|wrong| format!("after a crash at event {events} of {}: {wrong}", log.len()))?;
        }
        Ok(())
    }

    fn check(&self, events: usize, state: &[u8]) -> Result<(), String> {
        // The operation that was under way, or the last that had ended.
        let last = self.events.iter().position(|&after| after >= events).unwrap_or(self.images.len() - 1);
        let sync_points: Vec<&SyncPoint> =
            self.sync_points.iter().filter(|sync_point| sync_point.events <= events).collect();
        self.check_size(&sync_points, last, state.len())?;
        for sync_point in sync_points.iter().filter(|sync_point| sync_point.range != EVERYTHING) {
            let mut behind = state.len().max(sync_point.range.start)..sync_point.range.end;
            behind.end = behind.end.min(self.images[sync_point.image].len());
            behind.into_iter().try_for_each(|at| self.check_byte(&sync_points, last, at, 0))?;
        }
        for (sector, bytes) in state.chunks(SECTOR).enumerate() {
            let at = sector * SECTOR;
            let lowest = sync_points
                .iter()
                .filter(|sync_point| sync_point.range.start < at + SECTOR && at < sync_point.range.end);
            let lowest = lowest.map(|sync_point| sync_point.image).max().unwrap_or(0);
            // Nearly always a sector is the newest, or the oldest that may be.
            if self.has(last, at, bytes)
                || self.is_synced_whole(&sync_points, lowest, at) && self.has(lowest, at, bytes)
            {
                continue;
            }
            (at..).zip(bytes).try_for_each(|(at, &byte)| self.check_byte(&sync_points, last, at, byte))?;
        }
        Ok(())
    }

    fn check_size(&self, sync_points: &[&SyncPoint], last: usize, size: usize) -> Result<(), String> {
        let whole = sync_points
            .iter()
            .filter(|sync_point| sync_point.range == EVERYTHING)
            .map(|sync_point| sync_point.image)
            .max();
        let least = whole.and_then(|whole| self.images[whole..=last].iter().map(Vec::len).min()).unwrap_or(0);
        let most = self.images[whole.unwrap_or(0)..=last].iter().map(Vec::len).max().unwrap_or(0);
        if (least..=most).contains(&size) {
            return Ok(());
        }
        Err(format!("the file is {size} bytes long, and between {least} and {most} was possible"))
    }

    fn has(&self, image: usize, at: usize, bytes: &[u8]) -> bool {
        self.images[image].get(at..at + bytes.len()) == Some(bytes)
    }

    fn is_synced_whole(&self, sync_points: &[&SyncPoint], image: usize, at: usize) -> bool {
        let of = sync_points.iter().find(|sync_point| sync_point.image == image);
        of.is_some_and(|sync_point| sync_point.range.start <= at && at + SECTOR <= sync_point.range.end)
    }

    fn check_byte(&self, sync_points: &[&SyncPoint], last: usize, at: usize, byte: u8) -> Result<(), String> {
        let lowest = sync_points.iter().filter(|sync_point| sync_point.range.contains(&at));
        let lowest = lowest.map(|sync_point| sync_point.image).max().unwrap_or(0);
        // Where an image ends before it, the file had nothing, or zeros once it was longer.
        let was = |image: &Vec<u8>| image.get(at).copied().unwrap_or(0);
        if self.images[lowest..=last].iter().any(|image| was(image) == byte) {
            return Ok(());
        }
        let whose = self.images.iter().rposition(|image| was(image) == byte);
        let synced = was(&self.images[lowest]);
        Err(format!(
            "byte {at} (page {}) is {byte}, of {}; operation {lowest} promised {synced}, and operation {last} is \
             the last that may be seen",
            at / PAGE,
            whose.map_or("nobody".to_owned(), |image| format!("operation {image}")),
        ))
    }
}

// ---- the tests ----------------------------------------------------------------------------------------

fn starts() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![Just(0), Just(5 * PAGE + 100), 0..BYTES_MAX].prop_map(|len| vec![9; len])
}

fn config(cases: u32) -> ProptestConfig {
    let cases = if std::env::var_os("QUINION_SOAK").is_some() { cases * 50 } else { cases };
    ProptestConfig { cases, max_shrink_iters: 2000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn synced_bytes_are_there_after_a_crash(
        start in starts(), order in prop::sample::select(vec![0u8, 2, 4]), seed: u64,
        ops in prop::collection::vec(ops(), 1..40),
    ) {
        let mut story = Story::new(start, order, seed, WriteFaults::default());
        ops.iter().for_each(|op| story.tell(op));
        let told = story.end(SAMPLES, seed);
        prop_assert!(told.is_ok(), "{}", told.unwrap_err());
    }

    #[test]
    fn a_sync_that_is_ok_after_others_failed_promises_everything(
        start in starts(), order in prop::sample::select(vec![0u8, 4]), seed: u64,
        errors in 0..300u32, full in 0..200u32, sync_errors in 0..400u32,
        ops in prop::collection::vec(ops(), 1..40),
    ) {
        let faults = WriteFaults { errors, full, sync_errors, drops: errors / 4 };
        let mut story = Story::new(start, order, seed, faults);
        ops.iter().for_each(|op| story.tell(op));
        // What is in memory is right, whatever the device did. But after a flush that failed, a change of the file's
        // times may be another's, and clean pages are dropped. If the device then loses them in a sync that fails, the
        // sync says of how many, and no later one makes up for that.
        let lost = story.cache.stats().lost_pages;
        prop_assert!(story.wrong_pages() as u64 <= lost);
        if lost > 0 {
            return Ok(());
        }
        let told = story.end(SAMPLES, seed);
        prop_assert!(told.is_ok(), "{}", told.unwrap_err());
    }
}

/// The checker sees what is wrong.
#[test]
fn a_lost_an_old_and_an_invented_byte_are_found() {
    let images = [vec![1; 600], vec![2; 600], vec![3; 700]];
    let sync_point = |events, image, range| SyncPoint { events, image, range };
    let sync_points = [sync_point(0, 0, EVERYTHING), sync_point(5, 1, 0..100)];
    let checker = CrashChecker { images: &images, events: &[0, 5, 9], sync_points: &sync_points };
    let with = |changes: &[(usize, u8)], len: usize| {
        let mut state = vec![2; len];
        changes.iter().for_each(|&(at, byte)| state[at] = byte);
        state
    };
    assert_eq!(checker.check(9, &with(&[(3, 3), (500, 1)], 600)), Ok(()));
    assert_eq!(checker.check(4, &with(&[(3, 1)], 600)), Ok(()), "not yet promised");
    let wrong = checker.check(9, &with(&[(3, 1)], 600)).unwrap_err();
    assert!(wrong.contains("byte 3") && wrong.contains("operation 1 promised 2"), "{wrong}");
    let wrong = checker.check(9, &with(&[(550, 7)], 600)).unwrap_err();
    assert!(wrong.contains("byte 550") && wrong.contains("of nobody"), "{wrong}");
    assert!(checker.check(4, &with(&[(3, 3)], 600)).is_err(), "from the future");
    assert!(checker.check(9, &with(&[], 599)).is_err() && checker.check(9, &with(&[], 701)).is_err());
}

// ---- files that were closed, and forgotten ------------------------------------------------------------------

/// How a file comes to differ from its durable state before it is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Written,
    WrittenUncached,
    Cut,
    Punched,
    Emptied,
}

/// A file of another device, whose syncs are counted, or panic.
#[derive(Debug)]
struct OtherDevice {
    file: MemoryFile,
    panics: bool,
    syncs: AtomicU64,
}

impl OtherDevice {
    fn new(panics: bool) -> Arc<Self> {
        Arc::new(Self { file: MemoryFile::new(vec![7; 2 * PAGE]), panics, syncs: AtomicU64::new(0) })
    }
}

impl Backend for OtherDevice {
    fn name(&self) -> &'static str {
        "counting"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let known = self.file.attributes()?;
        Ok(Attributes { identity: Identity { device: 77, ..known.identity }, ..known })
    }
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.file.submit(fills);
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        self.file.flush(flushes);
    }
    fn sync(&self, _kind: SyncKind, _range: Range<u64>) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        if self.panics { panic!("this device panics") } else { Ok(()) }
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        Backend::set_size(&self.file, bytes)
    }
}

struct ClosedFile {
    disk: Arc<CrashDisk>,
    device: Arc<SimulatedBackend>,
}

impl ClosedFile {
    /// A file of six pages that was changed by a handle of `cache`, which was closed.
    fn new(cache: &Cache, change: Change) -> Self {
        let disk = Arc::new(CrashDisk::new(content(0, 0, 6 * PAGE)));
        let device = Arc::new(SimulatedBackend::of_crash_disk(Arc::clone(&disk), Faults::default()));
        let options = *OpenOptions::new().write(true).truncate(change == Change::Emptied);
        let file = cache.open_backend_with(Arc::clone(&device) as _, &options).unwrap();
        match change {
            Change::Written => drop(file.write_at(&content(1, 0, 2 * PAGE), 0).unwrap()),
            Change::WrittenUncached => {
                let uncached = WriteOptions::new().uncached(true);
                assert_eq!(file.write_at_with(&content(1, 0, 2 * PAGE), 0, uncached).unwrap(), 2 * PAGE);
            }
            Change::Cut => file.set_len(PAGE as u64 + 5).unwrap(),
            Change::Punched => file.punch_hole(0, PAGE as u64).unwrap(),
            Change::Emptied => assert!(file.is_empty()),
        }
        // Flushed, and not durable: only so may it be forgotten.
        file.write_back().unwrap();
        let begun = std::time::Instant::now();
        while cache.stats().dirty_pages + cache.stats().writeback_pages > 0 {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{:?}", cache.stats());
            std::thread::yield_now();
        }
        Self { disk, device }
    }

    /// Whether a crash now leaves the file as it is.
    fn is_durable(&self) -> bool {
        let (log, now) = (self.disk.log(), self.disk.content());
        (0..20).all(|seed| log.state(log.len(), seed) == now)
    }
}

/// More files than may stay known were changed and closed. The cache forgot those that were flushed, and did not sync
/// them any more.
#[test]
fn a_sync_of_the_cache_covers_files_that_were_closed_and_forgotten() {
    use Change::{Cut, Emptied, Punched, Written, WrittenUncached};
    for change in [Written, WrittenUncached, Cut, Punched, Emptied] {
        for idle_files_max in [0, 3, 1024] {
            let builder = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(idle_files_max);
            let cache = builder.build().unwrap();
            let files: Vec<_> = (0..10).map(|_| ClosedFile::new(&cache, change)).collect();
            let before = files.iter().filter(|file| !file.is_durable()).count();
            assert!(before <= idle_files_max.max(1), "{change:?}, {idle_files_max} files: {before}");
            cache.sync_all().unwrap();
            let wrong = files.iter().position(|file| !file.is_durable());
            assert_eq!(wrong, None, "{change:?}, {idle_files_max} files without handles");
            // Those that were forgotten are closed.
            let kept = files.iter().filter(|file| Arc::strong_count(&file.device) > 1).count();
            assert!(kept <= idle_files_max, "{change:?}, {idle_files_max} files: {kept}");
        }
    }
}

/// The sync at the end of a handle fails, and its pages are no longer cached: no handle is left to tell.
#[test]
fn a_sync_of_the_cache_tells_the_error_of_a_file_that_was_forgotten() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(0).build().unwrap();
    let disk = Arc::new(CrashDisk::new(content(0, 0, PAGE)));
    let device = SimulatedBackend::of_crash_disk(Arc::clone(&disk), Faults::default());
    let device =
        Arc::new(device.with_write_faults(WriteFaults { sync_errors: 1000, ..WriteFaults::default() }));
    let file = cache.open_backend_with(Arc::clone(&device) as _, OpenOptions::new().write(true)).unwrap();
    let uncached = WriteOptions::new().uncached(true);
    file.write_at_with(&content(1, 0, PAGE), 0, uncached).unwrap();
    file.write_back().unwrap();
    while cache.stats().dirty_pages + cache.stats().writeback_pages > 0 {
        std::thread::yield_now();
    }
    file.dont_need(0, PAGE as u64).unwrap();
    drop(file);
    let error = cache.sync_all().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
    device.mend();
    cache.sync_all().unwrap();
    cache.check().unwrap();
}

/// A sync of the file covers its cut: the end of its last handle has nothing to sync, and does not keep the file.
#[test]
fn a_file_that_was_cut_and_synced_is_closed_without_another_sync() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(0).build().unwrap();
    let disk = Arc::new(CrashDisk::new(content(0, 0, 6 * PAGE)));
    let device = Arc::new(SimulatedBackend::of_crash_disk(Arc::clone(&disk), Faults::default()));
    let options = *OpenOptions::new().write(true).truncate(true);
    let file = cache.open_backend_with(Arc::clone(&device) as _, &options).unwrap();
    file.write_all_at(&content(1, 0, PAGE), 0).unwrap();
    file.sync_all().unwrap();
    let syncs = device.syncs();
    drop(file);
    // Write-back has it in a list until it looks there.
    let begun = std::time::Instant::now();
    while Arc::strong_count(&device) > 1 {
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "it is kept");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(device.syncs(), syncs);
}

/// Files whose device refuses each sync are the oldest. They were synced in vain at the end of each handle, and those
/// behind them never.
#[test]
fn files_that_cannot_be_synced_hold_up_no_others() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(4).build().unwrap();
    let faults = WriteFaults { sync_errors: 1000, ..WriteFaults::default() };
    for _ in 0..100 {
        let disk = Arc::new(CrashDisk::new(content(0, 0, 2 * PAGE)));
        let device = SimulatedBackend::of_crash_disk(disk, Faults::default()).with_write_faults(faults);
        let file = cache.open_backend_with(Arc::new(device), OpenOptions::new().write(true)).unwrap();
        file.set_len(5).unwrap();
    }
    let files: Vec<_> = (0..100).map(|_| ClosedFile::new(&cache, Change::Cut)).collect();
    let kept = files.iter().filter(|file| Arc::strong_count(&file.device) > 1).count();
    assert!(kept <= 4, "{kept}");
    assert!(cache.sync_all().is_err(), "it tells of one of the first");
    assert!(files.iter().all(ClosedFile::is_durable));
}

/// The device takes no page of the oldest files. Their pages stay dirty, and at the end of each handle the same ones
/// were looked at: those behind them were never synced, and so never closed.
#[test]
fn files_that_cannot_be_written_hold_up_no_others() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(4).build().unwrap();
    let open = |faults| {
        let disk = Arc::new(CrashDisk::new(content(0, 0, 2 * PAGE)));
        let device =
            Arc::new(SimulatedBackend::of_crash_disk(disk, Faults::default()).with_write_faults(faults));
        let opened = cache.open_backend_with(Arc::clone(&device) as _, OpenOptions::new().write(true));
        (device, opened.unwrap())
    };
    let full: Vec<_> = (0..100)
        .map(|_| {
            let (device, file) = open(WriteFaults { full: 1000, ..WriteFaults::default() });
            file.write_at(&content(1, 0, PAGE), 0).unwrap();
            device
        })
        .collect();
    let cut: Vec<_> = (0..100)
        .map(|_| {
            let (device, file) = open(WriteFaults::default());
            file.set_len(5).unwrap();
            device
        })
        .collect();
    let kept = cut.iter().filter(|device| Arc::strong_count(device) > 1).count();
    assert!(kept <= 8, "{kept} of 100 files that were cut are open still");
    assert_eq!(cache.sync_all().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert!(full.iter().all(|device| Arc::strong_count(device) > 1), "what is dirty is kept");
    cache.check().unwrap();
}

/// One device takes no page of many files. The files of another were synced at the end of each handle, since all files
/// that waited for a sync were too many.
#[test]
fn files_that_wait_for_a_sync_count_for_their_own_device() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(4).build().unwrap();
    for _ in 0..20 {
        let disk = Arc::new(CrashDisk::new(content(0, 0, 2 * PAGE)));
        let faults = WriteFaults { full: 1000, ..WriteFaults::default() };
        let device = SimulatedBackend::of_crash_disk(disk, Faults::default()).with_write_faults(faults);
        let file = cache.open_backend_with(Arc::new(device), OpenOptions::new().write(true)).unwrap();
        file.write_at(&content(1, 0, PAGE), 0).unwrap();
    }
    let others: Vec<_> = (0..4).map(|_| OtherDevice::new(false)).collect();
    for device in &others {
        let file = cache.open_backend_with(Arc::clone(device) as _, OpenOptions::new().write(true)).unwrap();
        file.set_len(5).unwrap();
    }
    assert_eq!(others.iter().map(|device| device.syncs.load(Ordering::Relaxed)).sum::<u64>(), 0);
}

/// A backend that panics in a sync of the cache keeps no other file from it.
#[test]
fn a_sync_of_the_cache_tries_all_files_also_if_one_panics() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let devices: Vec<_> = (0..8).map(|nth| OtherDevice::new(nth % 2 == 0)).collect();
    let files = devices.iter().map(|device| {
        let file = cache.open_backend_with(Arc::clone(device) as _, OpenOptions::new().write(true)).unwrap();
        file.write_all_at(b"new", 5).unwrap();
        file
    });
    let files: Vec<_> = files.collect();
    assert!(catch_unwind(AssertUnwindSafe(|| cache.sync_all())).is_err(), "the panic goes on");
    assert!(devices.iter().all(|device| device.syncs.load(Ordering::Relaxed) == 1));
    drop(files);
}

/// The sync at the end of a handle fails, and the file was cut. It was forgotten then, and no sync of the cache covered
/// the cut any more.
#[test]
fn a_cut_whose_sync_failed_is_synced_again() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(0).build().unwrap();
    let disk = Arc::new(CrashDisk::new(content(0, 0, 6 * PAGE)));
    let device = Arc::new(SimulatedBackend::of_crash_disk(Arc::clone(&disk), Faults::default()));
    device.fail_sync(0, libc::EIO);
    let file = cache.open_backend_with(Arc::clone(&device) as _, OpenOptions::new().write(true)).unwrap();
    file.set_len(PAGE as u64 + 5).unwrap();
    drop(file);
    assert_eq!(cache.sync_all().unwrap_err().raw_os_error(), Some(libc::EIO));
    cache.sync_all().unwrap();
    assert!(ClosedFile { disk, device }.is_durable());
}

/// Files of one device wait for a sync in any number; closed files of another stay cached all the same.
#[test]
fn files_that_wait_for_a_sync_take_no_places_of_those_that_do_not() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(8).build().unwrap();
    let files: Vec<_> = (0..8).map(|_| ClosedFile::new(&cache, Change::Cut)).collect();
    let disk = Arc::new(CrashDisk::new(content(3, 0, 4 * PAGE)));
    let device = Arc::new(SimulatedBackend::of_crash_disk(disk, Faults::default()));
    for _ in 0..2 {
        let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
        file.read_exact_at(&mut [0; 4 * PAGE], 0).unwrap();
    }
    assert_eq!(device.reads(), 1);
    drop(files);
}
