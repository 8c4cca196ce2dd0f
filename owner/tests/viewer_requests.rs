//! What a viewer can ask of the cache itself besides plain reads: uncached ones, ones that must not wait, and hints.
//!
//! The viewer is a second mapping in this process. The owner's own file shows what the cache then holds, so no clock is
//! read here.
#![cfg(not(quinion_model))]
#![allow(unsafe_code, reason = "a viewer maps files")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use quinion::Cache;
use quinion::internals::arena::CellNumber;
use quinion::internals::arena::control::{Advice, CREDIT_SPENT, Operation};
use quinion::internals::units::MappingId;
use quinion_owner::internals::serve::Service;
use quinion_owner::internals::viewer::{ReadEnd, ReadOutcome, ViewedFile, Viewer, WantedBytes};
use quinion_owner::{CacheOwner, ServeRules, WithoutLease};

const PAGE: usize = 4096;
const PAGES: usize = 96;

/// A cache, a viewer of it, and a file that both have open.
struct Fixture {
    viewer: Viewer,
    /// The file as the owner has it open.
    owners: quinion::File,
    handle: u64,
    place: u64,
    marker: AtomicU64,
    touched: AtomicU64,
    content: Vec<u8>,
    // Dropped last.
    _service: Service,
    _file: tempfile::NamedTempFile,
}

impl Fixture {
    fn new() -> Self {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let content: Vec<u8> = (0..PAGES * PAGE).map(|at| (at / PAGE * 31 + at % 251) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &content).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100)); // its times tell by now whether it is changed
        let owner = Arc::new(CacheOwner::new(cache.clone()).with_rules(by_times()));
        let service = Service::start(owner.clone(), 2).unwrap();
        let viewer = service.admit(std::process::id()).unwrap().view().unwrap().waiting_at_most(60_000);
        let opened = File::open(file.path()).unwrap();
        let data = opened.metadata().unwrap();
        let arguments = [opened.as_fd().as_raw_fd() as u64, data.dev(), data.ino()];
        let [handle, place] = viewer.request(Operation::Attach, arguments).unwrap();
        let owners = cache.open(file.path()).unwrap();
        let (marker, touched) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { viewer, owners, handle, place, marker, touched, content, _service: service, _file: file }
    }

    fn file(&self) -> ViewedFile<'_> {
        ViewedFile {
            handle: self.handle,
            cell: CellNumber(self.place as u32),
            id: MappingId((self.place >> 32) as u32),
            marker_reported: &self.marker,
            touched: &self.touched,
        }
    }

    fn check(&self, position: usize, to: &[u8], outcome: ReadOutcome) -> ReadOutcome {
        assert_eq!(to[..outcome.bytes], self.content[position..][..outcome.bytes], "at {position}");
        outcome
    }
    fn read(&self, position: usize, len: usize) -> ReadOutcome {
        let mut to = vec![0; len];
        let wanted = WantedBytes::of_slice(position as u64, &mut to);
        // SAFETY: the buffer is a vector's.
        let outcome = unsafe { self.viewer.read(&self.file(), wanted) };
        self.check(position, &to, outcome)
    }
    fn read_uncached(&self, position: usize, len: usize) -> ReadOutcome {
        let mut to = vec![0; len];
        let wanted = WantedBytes::of_slice(position as u64, &mut to);
        // SAFETY: the buffer is a vector's.
        let outcome = unsafe { self.viewer.read_uncached(&self.file(), wanted) };
        self.check(position, &to, outcome)
    }
    fn read_ready(&self, position: usize, len: usize) -> Option<ReadOutcome> {
        let mut to = vec![0; len];
        let wanted = WantedBytes::of_slice(position as u64, &mut to);
        // SAFETY: the buffer is a vector's.
        let outcome = unsafe { self.viewer.read_ready(&self.file(), wanted) };
        outcome.map(|outcome| self.check(position, &to, outcome))
    }

    fn cached_becomes(&self, pages: u64) {
        for _ in 0..12_000 {
            if self.owners.cached_pages() == pages {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{} pages are cached, not {pages}", self.owners.cached_pages());
    }
}

#[test]
fn an_uncached_read_leaves_nothing_behind() {
    let fixture = Fixture::new();
    for round in 0..3 {
        for position in (0..PAGES * PAGE).step_by(8 * PAGE) {
            let read = fixture.read_uncached(position, 8 * PAGE);
            assert_eq!((read.bytes, read.end), (8 * PAGE, ReadEnd::Full), "round {round}");
        }
        fixture.cached_becomes(0);
    }
}

#[test]
fn pages_cached_before_an_uncached_read_stay_and_are_used() {
    let fixture = Fixture::new();
    fixture.viewer.advise(&fixture.file(), Advice::Random, 0, u64::MAX);
    assert_eq!(fixture.read(16 * PAGE, 4 * PAGE).bytes, 4 * PAGE);
    fixture.cached_becomes(4);
    let read = fixture.read_uncached(16 * PAGE, 4 * PAGE);
    assert_eq!((read.bytes, read.asked), (4 * PAGE, 0), "the owner was asked for what was there");
    assert_eq!(fixture.read_uncached(0, PAGES * PAGE).bytes, PAGES * PAGE);
    fixture.cached_becomes(4);
    assert_eq!(fixture.read(16 * PAGE, 4 * PAGE).asked, 0);
}

#[test]
fn a_read_that_must_not_wait_takes_cached_bytes() {
    let fixture = Fixture::new();
    fixture.viewer.advise(&fixture.file(), Advice::Random, 0, u64::MAX);
    assert_eq!(fixture.read_ready(0, PAGE), None);
    assert_eq!(fixture.owners.cached_pages(), 0, "it started a fill");
    assert_eq!(fixture.read(0, 2 * PAGE).bytes, 2 * PAGE);
    let part = fixture.read_ready(100, 4 * PAGE).unwrap();
    assert_eq!((part.bytes, part.asked, part.end), (2 * PAGE - 100, 0, ReadEnd::Full));
    assert_eq!(fixture.read_ready(2 * PAGE, PAGE), None);
    let size = (PAGES * PAGE) as u64;
    assert_eq!(fixture.read_ready(PAGES * PAGE, 10).unwrap().end, ReadEnd::EndOfFile(size));
}

#[test]
fn hints_reach_the_handle_and_the_range() {
    let fixture = Fixture::new();
    let file = fixture.file();
    // A read at random brings what it asks for, and nothing beside it.
    fixture.viewer.advise(&file, Advice::Random, 0, u64::MAX);
    fixture.read(40 * PAGE, PAGE);
    fixture.cached_becomes(1);
    fixture.viewer.advise(&file, Advice::WillNeed, 0, 8 * PAGE as u64);
    fixture.cached_becomes(9);
    // Its readers wait until it has arrived, and fetch nothing more.
    assert_eq!(fixture.read(0, 8 * PAGE).bytes, 8 * PAGE);
    assert_eq!(fixture.owners.cached_pages(), 9);
    fixture.viewer.advise(&file, Advice::DontNeed, 0, 8 * PAGE as u64);
    fixture.cached_becomes(1);
    // A read from the start is the first of many again.
    fixture.viewer.advise(&file, Advice::DontNeed, 0, u64::MAX);
    fixture.cached_becomes(0);
    fixture.viewer.advise(&file, Advice::Normal, 0, u64::MAX);
    fixture.read(0, PAGE);
    assert!(fixture.owners.cached_pages() > 1, "nothing was read ahead");
}

#[test]
fn nonsense_is_refused() {
    let fixture = Fixture::new();
    let ask = |handle, third| fixture.viewer.request(Operation::Hint, [handle, 0, third]);
    assert!(ask(fixture.handle, 9 << 56).is_err(), "no such advice");
    assert!(ask(fixture.handle + 1, 0).is_err(), "no such handle");
    assert!(ask(fixture.handle, Advice::Passed.with_length(u64::MAX)).is_ok(), "nothing was passed");
}

/// 1. A file is open for writing; the owner, although asked for it often enough, does not copy it in the background: it
///    could not serve what it read now.
/// 2. The writer is through; then it does.
///
/// The one worker there is prepares before it answers again, so an answer tells that it has.
#[test]
fn a_file_open_for_writing_is_not_copied_out_of_the_kernels_cache() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let opened = File::open(&path).unwrap();
    opened.sync_all().unwrap();
    let owner = Arc::new(CacheOwner::new(Cache::builder().memory(64 << 20).build().unwrap()).attach_lazily());
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = service.admit(std::process::id()).unwrap().view().unwrap().waiting_at_most(60_000);
    let data = opened.metadata().unwrap();
    let ask = || {
        let arguments = [opened.as_raw_fd() as u64 | CREDIT_SPENT, data.dev(), data.ino()];
        let _ = viewer.request(Operation::Attach, arguments);
        viewer.request(Operation::Examine, [0; 3]).unwrap();
    };
    let writer = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    (0..4).for_each(|_| ask());
    assert_eq!(owner.cache().stats().device_bytes, 0);
    drop(writer);
    // A process that another test starts has this test's writing descriptor until it executes its program.
    let copied = |_: &u32| {
        ask();
        std::thread::sleep(Duration::from_millis(1));
        owner.cache().stats().device_bytes > 0
    };
    (0..10_000).find(copied).expect("it is copied when the writer is through");
    assert_eq!(owner.cache().stats().device_bytes, 1 << 20);
}

/// Rules by which a file is served that this very process has open for writing.
fn by_times() -> ServeRules {
    ServeRules { coherence: WithoutLease::CheckTimes, ..ServeRules::default() }
}
