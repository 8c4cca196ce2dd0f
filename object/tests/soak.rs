//! Soak: reads under faults. Threads read objects in all ways while the objects are replaced, requests fail in every
//! way that the server knows, and the cache is too small for the data. Each byte is checked.
//!
//! ```text
//!   a read by a handle      is of the version that the handle says, or an error
//!   a get by the trait      is of the version that its answer says, or an error
//!   get_ranges              is of one version
//!   all of them             of none older than what any answer has told before the read began
//! ```
//!
//! `QUINION_SOAK=1 cargo test --release -p quinion-object --test soak -- --nocapture` reads ten million times and tells
//! how far it is; `QUINION_SOAK_READS` says another number.

use std::io::IsTerminal;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use object_store::path::Path;
use object_store::{GetOptions, ObjectStore};
use quinion::{Cache, Pinned};
use quinion_object::{CachedStore, Error, Freshness, ObjectCache, ObjectFile, Options, cached_with};
use quinion_testing_s3::{Checker, FaultPlan, Server, version_of};

const READS: u64 = 20_000;
const READS_SOAK: u64 = 10_000_000;
const READERS: usize = 3;
/// Size of each object. Each has versions of its own, so that bytes of another object are wrong as well.
const SIZES: [usize; 3] = [300_001, 2 << 20, 3_000_007];
const VERSIONS: u32 = 1 << 24;
/// An object is replaced after so many reads, besides what faults replace.
const READS_OF_A_VERSION: u64 = 700;
const FAULTS: FaultPlan = FaultPlan { seed: 20_261_125, per_mille: 120, bytes_max: 400_000 };

fn reads_wanted() -> u64 {
    let said = std::env::var("QUINION_SOAK_READS").ok().and_then(|reads| reads.parse().ok());
    said.unwrap_or(if std::env::var_os("QUINION_SOAK").is_some() { READS_SOAK } else { READS })
}

struct Subject {
    path: Path,
    checker: Checker,
    told: AtomicU32,
}

#[derive(Default)]
struct Counts {
    reads: AtomicU64,
    bytes: AtomicU64,
    changed: AtomicU64,
    failed: AtomicU64,
    done: AtomicBool,
}

struct Fixture {
    server: Server,
    store: CachedStore,
    subjects: Vec<Subject>,
    counts: Counts,
    wanted: u64,
}

fn random(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % below.max(1)
}

fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

impl Fixture {
    fn new() -> Self {
        let server = Server::new();
        let subjects = SIZES.iter().enumerate().map(|(at, &len)| {
            let key = format!("object-{at}");
            let first = at as u32 * VERSIONS + 1;
            server.control.put_version(&key, len, first);
            Subject { path: Path::from(key), checker: Checker::new(len), told: AtomicU32::new(first) }
        });
        let subjects = subjects.collect();
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let options = Options::new()
            .backoff(Duration::from_millis(1), Duration::from_millis(8))
            .stall_max(Duration::from_millis(400))
            .deadline(Duration::from_secs(20))
            .attempts_max(6)
            .failure_pause(Duration::from_millis(1))
            .request_max(1 << 20)
            .whole_max(400_000)
            .fill_min(16 << 10)
            .hedge_slower_than(95);
        let objects = ObjectCache::new(cache, server.store(), options).unwrap();
        let store = cached_with(objects, Freshness::Always);
        server.control.set_plan(Some(FAULTS));
        Self { server, store, subjects, counts: Counts::default(), wanted: reads_wanted() }
    }

    fn goes_on(&self) -> bool {
        self.counts.reads.load(Ordering::Relaxed) < self.wanted && !self.counts.done.load(Ordering::Relaxed)
    }

    fn note_read(&self, bytes: usize) {
        add(&self.counts.reads, 1);
        add(&self.counts.bytes, bytes as u64);
    }

    /// `true` if the object is to be opened again.
    fn note_error(&self, error: &Error) -> bool {
        let is_change = error.is_change();
        let is_expected = matches!(error, Error::Changed(_) | Error::Fetch(_) | Error::Open { .. });
        // The cache is small, and what is pinned or on its way has its bound.
        let is_full =
            matches!(error, Error::Cache { source, .. } if source.kind() == quinion::ErrorKind::NoMemory);
        assert!(is_expected || is_full, "{error:?}");
        add(if is_change { &self.counts.changed } else { &self.counts.failed }, 1);
        is_change
    }
}

struct Reader<'s> {
    fixture: &'s Fixture,
    state: u64,
    runtime: tokio::runtime::Runtime,
    files: Vec<Option<(ObjectFile, u32)>>,
    pins: Vec<(usize, u32, u64, Pinned)>,
}

impl Reader<'_> {
    fn below(&mut self, end: u64) -> u64 {
        random(&mut self.state, end)
    }

    fn range(&mut self, at: usize) -> Range<u64> {
        let size = SIZES[at] as u64;
        let most = if self.below(24) == 0 { 200_000 } else { 6000 };
        let start = self.below(size);
        start..(start + 1 + self.below(most)).min(size)
    }

    fn file(&mut self, at: usize) -> Option<(ObjectFile, u32)> {
        if self.files[at].is_none() || self.below(2000) == 0 {
            let subject = &self.fixture.subjects[at];
            let least = subject.told.load(Ordering::SeqCst);
            match self.fixture.store.objects().open(&subject.path) {
                Ok(file) => {
                    let version = version_of(file.meta().e_tag.as_deref().unwrap()).unwrap();
                    assert!(version >= least, "version {version}, and {least} was told before");
                    subject.told.fetch_max(version, Ordering::SeqCst);
                    self.files[at] = Some((file, version));
                }
                Err(error) => drop(self.fixture.note_error(&error)),
            }
        }
        self.files[at].clone()
    }

    fn failed(&mut self, at: usize, error: &Error) {
        if self.fixture.note_error(error) {
            self.files[at] = None;
        }
    }

    #[track_caller]
    fn check(&self, at: usize, version: u32, offset: u64, bytes: &[u8]) {
        let is_right = self.fixture.subjects[at].checker.is_of(version, offset, bytes);
        assert!(is_right, "{} bytes at {offset} of object {at} are not of version {version}", bytes.len());
        self.fixture.note_read(bytes.len());
    }

    fn step(&mut self) {
        let at = self.below(SIZES.len() as u64) as usize;
        match self.below(1000) {
            0..30 => self.get_by_the_trait(at),
            30..40 => self.get_ranges_by_the_trait(at),
            40..120 => self.read_ranges(at),
            120..180 => self.pin(at),
            _ => self.read_at(at),
        }
    }

    fn read_at(&mut self, at: usize) {
        let Some((file, version)) = self.file(at) else { return };
        let range = self.range(at);
        let mut buffer = vec![0; (range.end - range.start) as usize];
        match file.read_at(&mut buffer, range.start) {
            Ok(read) => {
                assert!(read > 0, "nothing at {range:?}");
                self.check(at, version, range.start, &buffer[..read]);
            }
            Err(error) => self.failed(at, &error),
        }
    }

    fn read_ranges(&mut self, at: usize) {
        let Some((file, version)) = self.file(at) else { return };
        let ranges = [self.range(at), self.range(at), self.range(at)];
        match file.read_ranges(&ranges) {
            Ok(all) => {
                for (range, bytes) in ranges.iter().zip(&all) {
                    assert_eq!(bytes.len() as u64, range.end - range.start);
                    self.check(at, version, range.start, bytes);
                }
            }
            Err(error) => self.failed(at, &error),
        }
    }

    /// Pins are kept for a while, and are then what they were.
    fn pin(&mut self, at: usize) {
        let Some((file, version)) = self.file(at) else { return };
        let range = self.range(at);
        match file.pin(range.clone()) {
            Ok(pinned) => {
                self.check(at, version, range.start, &pinned.to_vec());
                self.pins.push((at, version, range.start, pinned));
            }
            Err(error) => self.failed(at, &error),
        }
        if self.pins.len() > 6 {
            let place = self.below(self.pins.len() as u64) as usize;
            let (at, version, offset, pinned) = self.pins.swap_remove(place);
            self.check(at, version, offset, &pinned.to_vec());
        }
    }

    fn get_by_the_trait(&mut self, at: usize) {
        let range = self.range(at);
        let subject = &self.fixture.subjects[at];
        let least = subject.told.load(Ordering::SeqCst);
        let options = GetOptions::new().with_range(Some(range.clone()));
        let got = self.runtime.block_on(async {
            let result = self.fixture.store.get_opts(&subject.path, options).await?;
            let version = version_of(result.meta.e_tag.as_deref().unwrap()).unwrap();
            assert!(version >= least, "version {version}, and {least} was told before");
            subject.told.fetch_max(version, Ordering::SeqCst);
            result.bytes().await.map(|bytes| (version, bytes))
        });
        match got {
            Ok((version, bytes)) => {
                assert_eq!(bytes.len() as u64, range.end - range.start);
                self.check(at, version, range.start, &bytes);
            }
            Err(error) => self.note_store_error(&error),
        }
    }

    fn get_ranges_by_the_trait(&mut self, at: usize) {
        let ranges = [self.range(at), self.range(at)];
        let subject = &self.fixture.subjects[at];
        let least = subject.told.load(Ordering::SeqCst);
        match self.runtime.block_on(self.fixture.store.get_ranges(&subject.path, &ranges)) {
            Ok(all) => {
                let most = self.fixture.server.control.version(subject.path.as_ref()).unwrap();
                let parts: Vec<_> =
                    ranges.iter().zip(&all).map(|(range, bytes)| (range.start, &bytes[..])).collect();
                let lens = ranges
                    .iter()
                    .zip(&all)
                    .all(|(range, bytes)| bytes.len() as u64 == range.end - range.start);
                let version = subject.checker.version_of_all(least..=most, &parts);
                assert!(lens && version.is_some(), "of none of {least}..={most}: {ranges:?}");
                all.iter().for_each(|bytes| self.fixture.note_read(bytes.len()));
            }
            Err(error) => self.note_store_error(&error),
        }
    }

    fn note_store_error(&self, error: &object_store::Error) {
        use object_store::Error as E;
        let is_change = matches!(error, E::Precondition { .. });
        assert!(is_change || matches!(error, E::Generic { .. }), "{error:?}");
        add(if is_change { &self.fixture.counts.changed } else { &self.fixture.counts.failed }, 1);
    }
}

struct EndOnPanic<'s>(&'s Counts);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.done.store(true, Ordering::Relaxed);
        }
    }
}

fn read(fixture: &Fixture, seed: u64) {
    let _end = EndOnPanic(&fixture.counts);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let files = SIZES.iter().map(|_| None).collect();
    let mut reader = Reader { fixture, state: seed | 1, runtime, files, pins: Vec::new() };
    while fixture.goes_on() {
        reader.step();
    }
}

fn replace(fixture: &Fixture) {
    let (mut state, mut next) = (77, 0);
    while fixture.goes_on() {
        if fixture.counts.reads.load(Ordering::Relaxed) < next {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        next += READS_OF_A_VERSION;
        let at = random(&mut state, SIZES.len() as u64) as usize;
        fixture.server.control.change(fixture.subjects[at].path.as_ref());
    }
}

fn tell(fixture: &Fixture) {
    let begun = Instant::now();
    let mut told = begun;
    while fixture.goes_on() {
        std::thread::sleep(Duration::from_millis(20));
        if told.elapsed() > Duration::from_secs(10) && std::io::stderr().is_terminal() {
            let reads = fixture.counts.reads.load(Ordering::Relaxed);
            eprintln!("{reads} of {} reads in {:?}", fixture.wanted, begun.elapsed());
            told = Instant::now();
        }
    }
}

#[test]
fn reads_under_faults_are_of_one_version_and_none_older_than_the_last_told() {
    let fixture = &Fixture::new();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        (0..READERS)
            .for_each(|reader| drop(scope.spawn(move || read(fixture, 0x9e37_79b9 * (reader as u64 + 1)))));
        scope.spawn(|| replace(fixture));
        scope.spawn(|| tell(fixture));
    });
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let Counts { reads, bytes, changed, failed, .. } = &fixture.counts;
    println!(
        "{} reads of {} bytes in {:?}, {} of a replaced object, {} failed",
        of(reads),
        of(bytes),
        begun.elapsed(),
        of(changed),
        of(failed)
    );
    println!("{:?}\n{:?}", fixture.server.control.faults(), fixture.store.objects().stats());
    assert!(of(reads) >= fixture.wanted && of(changed) > 0);
    assert!(of(failed) < of(reads) / 10, "most reads bring bytes");
    let kinds = fixture.server.control.faults().len();
    assert!(kinds >= 10, "{kinds} kinds of faults");
    fixture.store.objects().cache().check().unwrap();
}
