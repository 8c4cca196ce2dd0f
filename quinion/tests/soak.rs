//! Soak: real files, real threads, real processes, and no byte may be wrong.
//!
//! ```text
//!   file        who changes it                   what every read of it must give
//!   still       no process                       the one content there is, to the exact last byte
//!   replaced    rename over it, all the time     one generation for each handle, whichever was there at its open
//!   rewritten   truncate and write, in place     after an open that follows the writer's close: the new content
//!   growing     append, all the time             the right bytes as far as it gives any; never a zero
//! ```
//!
//! The files together are several times the memory, so folios are evicted, split and reused all the while; most reads
//! go to a few moving hot spots, so that hits, and hits that lose their folio under the copy, are the rule. Contents
//! describe themselves (`common`): a byte of another file, page or generation is found wherever it lands.
//!
//! Reads that overlap a rewrite in place are promised nothing but an end, so they are made (they leave fills in flight
//! behind) and not checked.
//!
//! Other processes take part: this test starts itself again, as a viewer of the cache or as an owner that is to be
//! killed.
//!
//! `QUINION_SOAK=1 cargo test --release --test soak -- --nocapture` reads ten million times.

#![allow(unsafe_code, reason = "viewers map the arena and read to addresses")]

use std::fs::{self, File as Plain, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use quinion::backend::Mechanism;
use quinion::internals::arena::control::Operation;
use quinion::internals::arena::{CellNumber, LAYOUT_VERSION};
use quinion::internals::serving::ServedCache;
use quinion::internals::units::MappingId;
use quinion::{Cache, ErrorKind, File, Pinned, ReadOptions};
use quinion_owner::internals::serve::{Owner, Service, ServiceOptions, WORKERS, listen};
use quinion_owner::internals::viewer::handshake::{JoinRequest, NO_PLAN};
use quinion_owner::internals::viewer::{self, ReadEnd, RequestError, ViewedFile, Viewer, WantedBytes};
use quinion_owner::{CacheOwner, ServeRules, WithoutLease};

use quinion_testing::content::{Dice, fill_content, generations};

// ---- the files ----------------------------------------------------------------------------------------

/// How long all slots of a viewer may be in use: a slot that is lost stays lost.
const NO_SLOT_MAX: Duration = Duration::from_secs(60);
/// Sizes of the still files, five times the least memory in all, none a multiple of a page.
const STILL: [u64; 4] = [(33 << 20) + 4095, (23 << 20) + 17, (13 << 20) + 513, (11 << 20) + 1];
const REPLACED: u32 = 10;
const REWRITTEN: u32 = 20;
const GROWING: u32 = 30;
const LEN_MAX: u64 = 300 << 10;
/// The growing file is begun anew when it is longer.
const GROWN_MAX: u64 = 6 << 20;

/// The size of a generation of a file that changes: up to 4 MiB, never a multiple of a page.
fn size_of(generation: u32) -> u64 {
    Dice::new(u64::from(generation)).below(4 << 20) / 4096 * 4096 + 1 + u64::from(generation) % 4095
}

fn content(file: u32, position: u64, len: u64, generation: u32) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fill_content(&mut bytes, file, position, generation);
    bytes
}

struct Fixture {
    folder: PathBuf,
    /// The generation that the replaced file had at least, before and after an open.
    replaced: AtomicU32,
    /// Held alone while the file is being rewritten; the generation it has.
    rewritten: RwLock<u32>,
    stop: AtomicBool,
    checked: AtomicU64,
    changes: AtomicU64,
}

impl Fixture {
    fn new(folder: &Path) -> Self {
        let fixture = Self {
            folder: folder.to_owned(),
            replaced: AtomicU32::new(0),
            rewritten: RwLock::new(0),
            stop: AtomicBool::new(false),
            checked: AtomicU64::new(0),
            changes: AtomicU64::new(0),
        };
        for (file, size) in STILL.iter().enumerate() {
            fs::write(fixture.still(file), content(file as u32, 0, *size, 1)).unwrap();
        }
        fixture.replace();
        fixture.rewrite();
        fs::write(fixture.growing(), content(GROWING, 0, 100, 1)).unwrap();
        fixture
    }
    fn still(&self, file: usize) -> PathBuf {
        self.folder.join(format!("still-{file}"))
    }
    fn replaced(&self) -> PathBuf {
        self.folder.join("replaced")
    }
    fn rewritten(&self) -> PathBuf {
        self.folder.join("rewritten")
    }
    fn growing(&self) -> PathBuf {
        self.folder.join("growing")
    }
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn replace(&self) {
        let generation = self.replaced.load(Ordering::SeqCst) + 1;
        let next = self.folder.join("next");
        fs::write(&next, content(REPLACED, 0, size_of(generation), generation)).unwrap();
        fs::rename(&next, self.replaced()).unwrap();
        self.replaced.store(generation, Ordering::SeqCst);
    }

    fn rewrite(&self) {
        let mut generation = self.rewritten.write().unwrap();
        *generation += 1;
        let mut file =
            OpenOptions::new().create(true).write(true).truncate(true).open(self.rewritten()).unwrap();
        for piece in content(REWRITTEN, 0, size_of(*generation), *generation).chunks(100_000) {
            file.write_all(piece).unwrap();
        }
    }

    /// Appends to the growing file, or, when it is long enough, replaces it by a short one.
    fn grow(&self, by: u64) {
        let size = fs::metadata(self.growing()).unwrap().len();
        if size > GROWN_MAX {
            let next = self.folder.join("sprout");
            fs::write(&next, content(GROWING, 0, 100, 1)).unwrap();
            fs::rename(&next, self.growing()).unwrap();
            return;
        }
        let mut file = OpenOptions::new().append(true).open(self.growing()).unwrap();
        file.write_all(&content(GROWING, size, by, 1)).unwrap();
    }

    fn change(&self) {
        let mut dice = Dice::new(77);
        while !self.stopped() {
            match dice.below(8) {
                0 => self.replace(),
                1 => self.rewrite(),
                _ => self.grow(1 + dice.below(20_000)),
            }
            self.changes.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(dice.below(20)));
        }
    }
}

// ---- the checker ----------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug)]
struct Expected {
    file: u32,
    least: u32,
    most: u32,
    /// The file's size; `None` if it may be any.
    size: Option<u64>,
}

impl Expected {
    fn still(file: usize) -> Self {
        Self { file: file as u32, least: 1, most: 1, size: Some(STILL[file]) }
    }
    fn of(file: u32, generation: u32) -> Self {
        Self { file, least: generation, most: generation, size: Some(size_of(generation)) }
    }
    fn growing() -> Self {
        Self { file: GROWING, least: 1, most: 1, size: None }
    }

    fn check(&self, bytes: &[u8], position: u64) {
        match generations(bytes, self.file, position) {
            Err(wrong) => panic!("{} bytes at {position}: {wrong} ({self:?})", bytes.len()),
            Ok(Some(met)) => assert!(
                *met.start() >= self.least && *met.end() <= self.most,
                "{} bytes at {position} are of generations {met:?}; {self:?}",
                bytes.len()
            ),
            Ok(None) => {}
        }
    }

    /// Checks a read of `wanted` bytes that waited and may be short only at the end.
    fn check_all(&self, bytes: &[u8], position: u64, wanted: usize) {
        self.check(bytes, position);
        if let Some(size) = self.size {
            let right = size.saturating_sub(position).min(wanted as u64);
            assert_eq!(bytes.len() as u64, right, "bytes at {position}, of {wanted} wanted; {self:?}");
        }
    }

    fn span(&self) -> u64 {
        self.size.unwrap_or(GROWN_MAX)
    }
}

/// Where one reader reads: mostly near a hot spot that moves.
struct ReadPattern {
    dice: Dice,
    hot: u64,
}

impl ReadPattern {
    fn new(seed: u64) -> Self {
        Self { dice: Dice::new(seed), hot: 0 }
    }
    fn range(&mut self, size: u64) -> (u64, usize) {
        if self.dice.below(512) == 0 {
            self.hot = self.dice.roll();
        }
        let position = match self.dice.below(24) {
            0 => self.dice.below(size + 10_000),
            1 => size.saturating_sub(self.dice.below(10_000)),
            _ => self.hot % size + self.dice.below(256 << 10),
        };
        let len = match self.dice.below(64) {
            0 => self.dice.below(LEN_MAX),
            1..6 => self.dice.below(30_000),
            6..16 => return (position / 4096 * 4096, 4096),
            16..24 => 4096 + self.dice.below(4096),
            _ => self.dice.below(2000),
        };
        (position, len as usize + 1)
    }
}

// ---- threads of the owner -----------------------------------------------------------------------------

struct Reader<'a> {
    fixture: &'a Fixture,
    cache: &'a Cache,
    pattern: ReadPattern,
    buffer: Vec<u8>,
    /// Pins kept for a while, with what they must hold and where they begin.
    pins: Vec<(Pinned, Expected, u64)>,
    checked: u64,
}

impl<'a> Reader<'a> {
    fn new(fixture: &'a Fixture, cache: &'a Cache, seed: u64) -> Self {
        let buffer = vec![0xa5; LEN_MAX as usize + 5000];
        Self { fixture, cache, pattern: ReadPattern::new(seed), buffer, pins: Vec::new(), checked: 0 }
    }

    fn run(mut self, reads: u64) {
        while self.checked < reads {
            let burst = 50 + self.pattern.dice.below(400);
            match self.pattern.dice.below(16) {
                0 | 1 => self.replaced(burst),
                2 | 3 => self.rewritten(burst),
                4 | 5 => self.growing(burst),
                6 => self.overlap(),
                _ => {
                    let file = self.pattern.dice.below(STILL.len() as u64) as usize;
                    let open = self.cache.open(self.fixture.still(file)).unwrap();
                    self.burst(open, Expected::still(file), burst);
                }
            }
            if self.pattern.dice.below(4) == 0 {
                self.check_pins();
            }
        }
        self.check_pins();
        self.fixture.checked.fetch_add(self.checked, Ordering::Relaxed);
    }

    fn replaced(&mut self, reads: u64) {
        let least = self.fixture.replaced.load(Ordering::SeqCst);
        let open = self.cache.open(self.fixture.replaced()).unwrap();
        let (line, expected) = (&mut [0; 64], Expected { file: REPLACED, least, most: u32::MAX, size: None });
        let bytes = open.read_at(line, 0).unwrap();
        expected.check(&line[..bytes], 0);
        let generation = generations(&line[..bytes], REPLACED, 0).unwrap();
        let Some(generation) = generation.map(|met| *met.start()) else { return }; // too short to tell
        // It may have been renamed and not yet counted.
        assert!(generation <= self.fixture.replaced.load(Ordering::SeqCst) + 1, "a generation to come");
        self.burst(open, Expected::of(REPLACED, generation), reads);
    }

    fn rewritten(&mut self, reads: u64) {
        let fixture = self.fixture;
        let generation = fixture.rewritten.read().unwrap(); // the writer has closed, and does not open
        let open = self.cache.open(fixture.rewritten()).unwrap();
        let expected = Expected::of(REWRITTEN, *generation);
        assert_eq!(open.len(), expected.span());
        self.burst(open, expected, reads.min(60));
    }

    fn growing(&mut self, reads: u64) {
        let open = self.cache.open(self.fixture.growing()).unwrap();
        let before = open.len();
        let mut tail = vec![0; 30_000];
        for _ in 0..reads / 8 {
            let position = open.len().saturating_sub(self.pattern.dice.below(9000));
            let bytes = open.read_at(&mut tail, position).unwrap();
            Expected::growing().check(&tail[..bytes], position);
            let pin = open.pin(position, 5000).unwrap();
            check_pin(&pin, Expected::growing(), position);
            if self.pattern.dice.below(4) == 0 {
                open.revalidate().unwrap();
            }
            self.checked += 2;
        }
        assert!(open.len() >= before, "it only grows");
        self.burst(open, Expected::growing(), reads / 2);
    }

    /// Reads while the file may be being rewritten: not checked, and the cause of much that is.
    fn overlap(&mut self) {
        let open = self.cache.open(self.fixture.rewritten()).unwrap();
        for _ in 0..20 {
            let (position, len) = self.pattern.range(4 << 20);
            let _ = open.read_at(&mut self.buffer[..len], position).unwrap();
            let _ = open.read_at_with(&mut self.buffer[..len], position, ReadOptions::new().nowait(true));
        }
    }

    fn burst(&mut self, mut open: File, expected: Expected, reads: u64) {
        let size = expected.span();
        let mut left = reads;
        while left > 0 {
            left -= 1;
            let (position, len) = self.pattern.range(size);
            match self.pattern.dice.below(32) {
                0 => self.pin(&open, expected, position, len),
                1 => self.try_read(&open, expected, position, len, ReadOptions::new().nowait(true)),
                2 => self.try_read(&open, expected, position, len, ReadOptions::new().cached_only(true)),
                3 => self.seek_and_read(&mut open, expected, position, len),
                4 => {
                    let steps = self.pattern.dice.below(20);
                    self.walk(&open, expected, position, len, steps);
                    left = left.saturating_sub(steps);
                }
                5 => open = open.clone(),
                6 if self.pattern.dice.below(8) == 0 => {
                    open.revalidate().unwrap();
                }
                _ => self.read(&open, expected, position, len),
            }
        }
    }

    fn read(&mut self, open: &File, expected: Expected, position: u64, len: usize) {
        let buffer = &mut self.buffer[..len];
        let bytes = open.read_at(buffer, position).unwrap();
        expected.check_all(&buffer[..bytes], position, len);
        self.checked += 1;
    }

    fn try_read(&mut self, open: &File, expected: Expected, position: u64, len: usize, options: ReadOptions) {
        let buffer = &mut self.buffer[..len];
        match open.read_at_with(buffer, position, options) {
            Ok(bytes) => expected.check(&buffer[..bytes], position),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        self.checked += 1;
    }

    fn seek_and_read(&mut self, open: &mut File, expected: Expected, position: u64, len: usize) {
        assert_eq!(open.seek(SeekFrom::Start(position)).unwrap(), position);
        let buffer = &mut self.buffer[..len];
        let bytes = open.read(buffer).unwrap();
        expected.check_all(&buffer[..bytes], position, len);
        assert_eq!(open.stream_position().unwrap(), position + bytes as u64);
        self.checked += 1;
    }

    fn walk(&mut self, open: &File, expected: Expected, position: u64, len: usize, steps: u64) {
        for step in 0..steps {
            self.read(open, expected, position + step * len as u64, len);
        }
    }

    fn pin(&mut self, open: &File, expected: Expected, position: u64, len: usize) {
        let pin = open.pin(position, len).unwrap();
        if let Some(size) = expected.size {
            assert_eq!(pin.len() as u64, size.saturating_sub(position).min(len as u64), "{expected:?}");
        }
        check_pin(&pin, expected, position);
        self.checked += 1;
        // Some stay until after the file has changed and the frames around them have been used again.
        if len < 9000 && self.pins.len() < 8 {
            self.pins.push((pin, expected, position));
        }
    }

    fn check_pins(&mut self) {
        for (pin, expected, position) in self.pins.drain(..) {
            check_pin(&pin, expected, position);
            self.checked += 1;
        }
    }
}

fn check_pin(pin: &Pinned, expected: Expected, position: u64) {
    let bytes: Vec<u8> = pin.chunks().flatten().copied().collect();
    assert_eq!(bytes.len(), pin.len());
    expected.check(&bytes, position);
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    order: u8,
    mechanism: Mechanism,
    memory: u64,
}

impl Setting {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for mechanism in [Mechanism::Ring, Mechanism::Threads] {
            for order in [0, 2, 9] {
                all.push(Self { order, mechanism, memory: Cache::MEMORY_MIN });
            }
        }
        all.push(Self { order: 2, mechanism: Mechanism::Ring, memory: 4 * Cache::MEMORY_MIN });
        all.push(Self { order: 9, mechanism: Mechanism::Threads, memory: 40 << 20 });
        all
    }
    fn build(self) -> Cache {
        let builder = Cache::builder().memory(self.memory).folio_order_max(self.order);
        builder.mechanism(self.mechanism).idle_files_max(20).build().unwrap()
    }
}

/// Reads made by default, and if a soak is asked for, by threads and by each viewer.
fn budget(usual: u64, soak: u64) -> u64 {
    if std::env::var_os("QUINION_SOAK").is_some() { soak } else { usual }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn report(what: &str, reads: u64, began: Instant, cache: &Cache) {
    let (stats, seconds) = (cache.stats(), began.elapsed().as_secs_f64());
    println!(
        "{what}: {reads} reads verified in {seconds:.1} s, {:.0}/s; \
         {} hits, {} misses, {} device reads, {} evicted, {} invalidated, {}",
        reads as f64 / seconds,
        stats.hits,
        stats.misses,
        stats.device_reads,
        stats.evicted_pages,
        stats.invalidated_pages,
        stats.mechanism
    );
}

#[test]
fn threads_never_read_a_wrong_byte() {
    let folder = folder();
    let fixture = Fixture::new(folder.path());
    let settings = Setting::all();
    let each = budget(480_000, 6_400_000) / settings.len() as u64;
    for setting in settings {
        let (cache, began) = (setting.build(), Instant::now());
        let readers = 8;
        fixture.stop.store(false, Ordering::Relaxed);
        fixture.checked.store(0, Ordering::Relaxed);
        thread::scope(|scope| {
            let changer = scope.spawn(|| fixture.change());
            let threads: Vec<_> = (1..=readers)
                .map(|seed| {
                    scope.spawn({
                        let (fixture, cache) = (&fixture, &cache);
                        move || Reader::new(fixture, cache, seed).run(each / readers)
                    })
                })
                .collect();
            let results: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            fixture.stop.store(true, Ordering::Relaxed);
            changer.join().unwrap();
            results.into_iter().for_each(|result| result.expect("a reader read a wrong byte"));
        });
        cache.check().unwrap();
        assert!(cache.stats().evicted_pages > 0 || setting.memory > Cache::MEMORY_MIN);
        report(&format!("{setting:?}"), fixture.checked.load(Ordering::Relaxed), began, &cache);
    }
}

/// Reads `len` bytes that the cache may hold at `position`, over and over, checking the ends of each page only:
/// a folio that was lost under a copy shows there, and most of the time goes into copies.
fn race(fixture: &Fixture, open: &File, scanned: &AtomicU64, seed: u64) {
    let (mut dice, mut buffer, mut checked) = (Dice::new(seed), vec![0; 64 << 10], 0);
    let cached_only = ReadOptions::new().cached_only(true);
    while !fixture.stopped() {
        // What the hand comes to next was filled about a cacheful ago.
        let behind = (6 << 20) + dice.below(6 << 20);
        let position = (scanned.load(Ordering::Relaxed) + STILL[0] - behind) % STILL[0] / 4096 * 4096;
        if let Ok(bytes) = open.read_at_with(&mut buffer, position, cached_only) {
            for (page, bytes) in buffer[..bytes].chunks_exact(4096).enumerate() {
                let at = position + page as u64 * 4096;
                Expected::still(0).check(&bytes[..64], at);
                Expected::still(0).check(&bytes[4096 - 64..], at + 4096 - 64);
            }
            checked += 1;
        }
    }
    fixture.checked.fetch_add(checked, Ordering::Relaxed);
}

fn scan(fixture: &Fixture, open: &File, scanned: &AtomicU64) {
    let mut buffer = vec![0; 256 << 10];
    while !fixture.stopped() {
        let position = scanned.load(Ordering::Relaxed);
        open.read_at(&mut buffer, position).unwrap();
        scanned.store((position + buffer.len() as u64) % STILL[0], Ordering::Relaxed);
    }
}

#[test]
fn a_folio_lost_under_a_copy_is_noticed() {
    // In memory where there is such a place: then no device slows the reuse of frames down.
    let fast = Path::new("/dev/shm");
    let folder = if fast.is_dir() { tempfile::tempdir_in(fast).unwrap() } else { folder() };
    let fixture = Fixture::new(folder.path());
    for order in [0, 2, 9] {
        let setting = Setting { order, mechanism: Mechanism::Threads, memory: Cache::MEMORY_MIN };
        let (cache, began, scanned) = (setting.build(), Instant::now(), AtomicU64::new(0));
        let open = cache.open(fixture.still(0)).unwrap();
        fixture.stop.store(false, Ordering::Relaxed);
        fixture.checked.store(0, Ordering::Relaxed);
        let (fixture, scanned) = (&fixture, &scanned);
        thread::scope(|scope| {
            let scanner = open.clone();
            let mut threads = vec![scope.spawn(move || scan(fixture, &scanner, scanned))];
            for seed in 0..6 {
                let open = open.clone();
                threads.push(scope.spawn(move || race(fixture, &open, scanned, seed)));
            }
            let end = Duration::from_secs(budget(3, 20));
            while began.elapsed() < end && !threads.iter().any(|thread| thread.is_finished()) {
                thread::sleep(Duration::from_millis(10));
            }
            fixture.stop.store(true, Ordering::Relaxed);
            threads.into_iter().for_each(|thread| thread.join().expect("a wrong byte"));
        });
        cache.check().unwrap();
        report(&format!("races, {setting:?}"), fixture.checked.load(Ordering::Relaxed), began, &cache);
    }
}

// ---- other processes ----------------------------------------------------------------------------------

const ROLE: &str = "QUINION_SOAK_ROLE";
const VIEW: &str = "QUINION_SOAK_VIEW";
const FOLDER: &str = "QUINION_SOAK_FOLDER";
const READS: &str = "QUINION_SOAK_READS";
const SEED: &str = "QUINION_SOAK_SEED";

/// Not a test: what this program is when a test starts it again.
#[test]
fn another_process() {
    match std::env::var(ROLE).as_deref() {
        Ok("viewer") => Sight::attach().run(),
        Ok("owner") => own_until_killed(),
        _ => {}
    }
}

fn again(role: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "another_process", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env(FOLDER, folder).stdout(Stdio::piped());
    command
}

fn address(cache: &Cache, socket: &Path) -> String {
    format!("{}:{}", cache.arena().share().token(), socket.display())
}

fn serve(cache: &Cache, owner: Arc<dyn Owner>, folder: &Path) -> (Service, String) {
    let socket = folder.join("socket");
    let _ = std::fs::remove_file(&socket);
    let listener = Some(listen(&socket).unwrap());
    let options = ServiceOptions { workers: WORKERS, listener, ..Default::default() };
    (Service::start_with(owner, options).unwrap(), address(cache, &socket))
}

fn start_viewer(view: &str, folder: &Path, reads: u64, seed: u64) -> Child {
    let mut command = again("viewer", folder);
    command.env(VIEW, view).env(READS, reads.to_string()).env(SEED, seed.to_string());
    command.spawn().unwrap()
}

fn hear(lines: &mut impl BufRead, word: &str) -> Option<String> {
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap() > 0 {
        // The test harness leaves an unfinished line in front of the process's first one.
        if let Some((_, rest)) = line.split_once(word) {
            return Some(rest.trim().to_owned());
        }
        line.clear();
    }
    None
}

#[derive(Debug, Default)]
struct ViewerTally {
    reads: u64,
    asked: u64,
    unserved: u64,
    dead_after_millis: Option<u64>,
}

struct Sight {
    viewer: Viewer,
    folder: PathBuf,
    reads: u64,
    seed: u64,
}

struct Attached {
    file: Plain,
    handle: u64,
    cell: CellNumber,
    id: MappingId,
    marker_reported: AtomicU64,
    touched: AtomicU64,
}

impl Sight {
    fn attach() -> Self {
        let view = std::env::var(VIEW).unwrap();
        let (token, socket) = view.split_once(':').unwrap();
        let hello =
            JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: token.parse().unwrap(), run: 0 };
        let viewer = viewer::connect(socket.as_ref(), &hello).unwrap().waiting_at_most(10_000);
        let number = |name| std::env::var(name).unwrap().parse().unwrap();
        Self {
            viewer,
            folder: std::env::var(FOLDER).unwrap().into(),
            reads: number(READS),
            seed: number(SEED),
        }
    }

    fn run(self) {
        println!("viewing ");
        let seen: Vec<ViewerTally> = thread::scope(|scope| {
            let threads: Vec<_> = (0..2)
                .map(|thread| {
                    scope.spawn({
                        let me = &self;
                        move || me.look_around(me.seed * 100 + thread)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a viewer read a wrong byte")).collect()
        });
        let sum = |of: fn(&ViewerTally) -> u64| seen.iter().map(of).sum::<u64>();
        let gone = seen.iter().filter_map(|seen| seen.dead_after_millis).max();
        let gone = gone.map_or("no".to_owned(), |millis| millis.to_string());
        println!("seen {} {} {} {gone}", sum(|s| s.reads), sum(|s| s.asked), sum(|s| s.unserved));
    }

    fn open(&self, name: &str) -> Result<Attached, RequestError> {
        let file = Plain::open(self.folder.join(name)).unwrap();
        let known = file.metadata().unwrap();
        let question = [file.as_raw_fd() as u64, known.dev(), known.ino()];
        let [handle, place] = self.viewer.request(Operation::Attach, question)?;
        let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
        Ok(Attached {
            file,
            handle,
            cell,
            id,
            marker_reported: AtomicU64::new(0),
            touched: AtomicU64::new(0),
        })
    }

    fn look_around(&self, seed: u64) -> ViewerTally {
        let (mut pattern, mut seen) = (ReadPattern::new(seed), ViewerTally::default());
        let mut buffer = vec![0; LEN_MAX as usize + 5000];
        let mut heard = Instant::now();
        while seen.reads < self.reads / 2 {
            match self.burst(&mut pattern, &mut seen, &mut buffer, &mut heard) {
                Ok(()) => {}
                Err(RequestError::OwnerDead) => {
                    seen.dead_after_millis = Some(heard.elapsed().as_millis() as u64);
                    return seen;
                }
                // The owner is slower than this viewer, and has not handled its markers yet.
                Err(RequestError::NoSlot) if heard.elapsed() < NO_SLOT_MAX => std::thread::yield_now(),
                // The file is being written: the kernel serves it, for as long as its writer has no processor.
                Err(RequestError::Errno(libc::ETXTBSY | libc::EAGAIN)) => {
                    seen.unserved += 1;
                    thread::sleep(Duration::from_millis(10));
                }
                Err(error) => panic!("{error:?}"),
            }
        }
        seen
    }

    fn burst(
        &self,
        pattern: &mut ReadPattern,
        seen: &mut ViewerTally,
        buffer: &mut [u8],
        heard: &mut Instant,
    ) -> Result<(), RequestError> {
        let (attached, expected) = match pattern.dice.below(8) {
            0 => (self.open("growing")?, Expected::growing()),
            1 | 2 => {
                let attached = self.open("replaced")?;
                let mut line = [0; 64];
                let bytes = std::os::unix::fs::FileExt::read_at(&attached.file, &mut line, 0).unwrap();
                let generation = generations(&line[..bytes], REPLACED, 0).unwrap().map(|met| *met.start());
                let Some(generation) = generation else { return Ok(()) };
                (attached, Expected::of(REPLACED, generation))
            }
            _ => {
                let file = pattern.dice.below(STILL.len() as u64) as usize;
                (self.open(&format!("still-{file}"))?, Expected::still(file))
            }
        };
        *heard = Instant::now();
        for _ in 0..200 + pattern.dice.below(2000) {
            let (position, len) = pattern.range(expected.span());
            self.read(&attached, expected, position, &mut buffer[..len], seen)?;
            *heard = Instant::now();
        }
        self.viewer.notify(Operation::Detach, [attached.handle, 0, 0])
    }

    fn read(
        &self,
        attached: &Attached,
        expected: Expected,
        position: u64,
        buffer: &mut [u8],
        seen: &mut ViewerTally,
    ) -> Result<(), RequestError> {
        let &Attached { handle, cell, id, ref marker_reported, ref touched, .. } = attached;
        let file = ViewedFile { handle, cell, id, marker_reported, touched };
        // SAFETY: a unique slice is valid for writes of its length.
        let read = unsafe { self.viewer.read(&file, WantedBytes::of_slice(position, buffer)) };
        let bytes = &buffer[..read.bytes];
        static BEGUN: Once = Once::new();
        BEGUN.call_once(|| println!("reading "));
        seen.reads += 1;
        seen.asked += u64::from(read.asked);
        expected.check(bytes, position);
        match read.end {
            ReadEnd::Full => assert_eq!(bytes.len(), buffer.len()),
            ReadEnd::EndOfFile(_) if expected.size.is_some() => {
                expected.check_all(bytes, position, buffer.len());
            }
            ReadEnd::EndOfFile(_) => {
                let [size, _] = self.viewer.request(Operation::Revalidate, [handle, 0, 0])?;
                assert!(size <= attached.file.metadata().unwrap().len(), "the owner's size is the file's");
            }
            ReadEnd::Failed(RequestError::OwnerDead) => return Err(RequestError::OwnerDead),
            // The interposer would ask the kernel now.
            ReadEnd::Failed(
                RequestError::Fruitless
                | RequestError::NoSlot
                | RequestError::Late
                | RequestError::Errno(libc::ETXTBSY | libc::EAGAIN),
            ) => seen.unserved += 1,
            other => panic!("{other:?} at {position}; {expected:?}"),
        }
        Ok(())
    }
}

fn end_of(mut child: Child) -> ViewerTally {
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let said = hear(&mut lines, "seen ");
    let mut rest = Vec::new();
    lines.read_to_end(&mut rest).unwrap();
    assert!(child.wait().unwrap().success(), "the viewer failed; it says above what it saw");
    let said = said.expect("a viewer says what it did");
    let fields: Vec<_> = said.split(' ').collect();
    let number = |place: usize| fields[place].parse().unwrap();
    let (reads, asked, unserved) = (number(0), number(1), number(2));
    ViewerTally { reads, asked, unserved, dead_after_millis: fields[3].parse().ok() }
}

fn kill_one(view: &str, folder: &Path, seed: u64) {
    let mut child = start_viewer(view, folder, u64::MAX, seed);
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    hear(&mut lines, "viewing ").expect("it views");
    thread::sleep(Duration::from_millis(30 * seed));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn viewers_never_read_a_wrong_byte() {
    if std::env::var_os(ROLE).is_some() {
        return;
    }
    let folder = folder();
    let fixture = Fixture::new(folder.path());
    let settings = [
        Setting { order: 0, mechanism: Mechanism::Ring, memory: Cache::MEMORY_MIN },
        Setting { order: 2, mechanism: Mechanism::Ring, memory: Cache::MEMORY_MIN },
        Setting { order: 9, mechanism: Mechanism::Threads, memory: Cache::MEMORY_MIN },
    ];
    let each = budget(160_000, 1_600_000);
    for setting in settings {
        let (cache, began) = (setting.build(), Instant::now());
        let owner = Arc::new(CacheOwner::new(cache.clone()).with_rules(by_times()));
        let (service, view) = serve(&cache, owner, &fixture.folder);
        fixture.stop.store(false, Ordering::Relaxed);
        fixture.checked.store(0, Ordering::Relaxed);
        let seen = Mutex::new(Vec::new());
        thread::scope(|scope| {
            let changer = scope.spawn(|| fixture.change());
            let threads: Vec<_> = (1..=2)
                .map(|seed| {
                    scope.spawn({
                        let (fixture, cache) = (&fixture, &cache);
                        // As long as there are viewers, and a fifth of what they read at the least.
                        move || {
                            while !fixture.stopped() {
                                Reader::new(fixture, cache, seed).run(2000);
                            }
                        }
                    })
                })
                .collect();
            let body = || {
                for seed in 1..4 {
                    kill_one(&view, &fixture.folder, seed);
                }
                let first = start_viewer(&view, &fixture.folder, each / 2, 50);
                seen.lock().unwrap().push(end_of(first));
                let eight: Vec<_> =
                    (60..68).map(|seed| start_viewer(&view, &fixture.folder, each / 16, seed)).collect();
                seen.lock().unwrap().extend(eight.into_iter().map(end_of));
            };
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            fixture.stop.store(true, Ordering::Relaxed);
            let readers: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            changer.join().unwrap();
            result.expect("a viewer failed");
            readers.into_iter().for_each(|result| result.expect("a reader read a wrong byte"));
        });
        let totals = service.stop();
        assert_eq!(totals.viewers, 12, "each viewer, dead or alive, was counted once");
        cache.check().unwrap();
        let seen = seen.into_inner().unwrap();
        let sum = |of: fn(&ViewerTally) -> u64| seen.iter().map(of).sum::<u64>();
        let (reads, asked, unserved) = (sum(|s| s.reads), sum(|s| s.asked), sum(|s| s.unserved));
        assert!(unserved * 100 <= reads, "{unserved} of {reads} reads were not served");
        println!("viewers: {reads} reads, {asked} questions, {unserved} not served");
        report(
            &format!("viewers and threads, {setting:?}"),
            reads + fixture.checked.load(Ordering::Relaxed),
            began,
            &cache,
        );
    }
}

/// An owner that churns its cache until it is killed.
fn own_until_killed() {
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    let cache = Setting { order: 0, mechanism: Mechanism::Ring, memory: Cache::MEMORY_MIN }.build();
    let owner = Arc::new(CacheOwner::new(cache.clone()).with_rules(by_times()));
    let (_service, view) = serve(&cache, owner, &folder);
    println!("owning {view}");
    let (mut pattern, mut buffer) = (ReadPattern::new(5), vec![0; LEN_MAX as usize + 5000]);
    let open = cache.open(folder.join("still-0")).unwrap();
    loop {
        let (position, len) = pattern.range(STILL[0]);
        open.read_at(&mut buffer[..len], position).unwrap();
    }
}

#[test]
fn a_viewer_outlives_its_owner() {
    if std::env::var_os(ROLE).is_some() {
        return;
    }
    let folder = folder();
    let fixture = Fixture::new(folder.path());
    let mut owner = again("owner", &fixture.folder).spawn().unwrap();
    let mut lines = BufReader::new(owner.stdout.take().unwrap());
    let view = hear(&mut lines, "owning ").expect("it owns");
    let mut viewers: Vec<_> =
        (1..4).map(|seed| start_viewer(&view, &fixture.folder, u64::MAX, seed)).collect();
    for viewer in &mut viewers {
        // A byte at a time: later output is for the thread that waits for the end.
        let mut lines = BufReader::with_capacity(1, viewer.stdout.as_mut().unwrap());
        hear(&mut lines, "reading ").expect("it reads before its owner goes");
    }
    thread::sleep(Duration::from_millis(1500));
    owner.kill().unwrap();
    owner.wait().unwrap();
    for viewer in viewers {
        let seen = end_of(viewer);
        let millis = seen.dead_after_millis.expect("it saw that the owner is gone");
        println!("a viewer read {} times and gave its owner up after {millis} ms", seen.reads);
        assert!(seen.reads > 0);
        // Ten times what it promises: machines are slow at times.
        assert!(millis < 20_000, "{millis} ms");
    }
}

/// Rules by which a file is served that this very process has open for writing.
fn by_times() -> ServeRules {
    ServeRules { coherence: WithoutLease::CheckTimes, ..ServeRules::default() }
}
