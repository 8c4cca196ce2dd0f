//! Parked: a file that is not open has no descriptor, and pages that are kept of it are the file's, or are not shown.
//!
//! A cache that parks idle files is compared with plain reads of the same files, over all changes of a closed file; and
//! its process's descriptors are counted.

#![allow(unsafe_code, reason = "maps files, as other programs do")]

use std::fs::{self, File as Plain, OpenOptions as PlainOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use proptest::prelude::*;
use quinion::backend::{Attributes, Backend, Fill, Leasable, ParkedBackend, WaitQueue};
use quinion::internals::system_files::{Engine, EngineOptions, LocalFile};
use quinion::{Cache, Coherence, File, OpenOptions};
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::{Owner, ViewerTotals};

const BYTES: usize = 300_000;
/// Longer than the resolution of a file's times.
const SETTLED: Duration = Duration::from_millis(40);

/// The tests here count the process's descriptors, so one runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A cache that reads on behalf of other programs: that is what parks.
struct Parking(CacheOwner);

impl std::ops::Deref for Parking {
    type Target = Cache;
    fn deref(&self) -> &Cache {
        self.0.cache()
    }
}

impl Parking {
    fn release_idle(&self) {
        self.0.release_idle();
    }
}

fn cache() -> Parking {
    Parking(CacheOwner::new(Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap()))
}

fn content(seed: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at / 7 % 251) as u8 ^ seed).collect()
}

/// A folder of a file system whose times change with each write: not the temporary one, which may be tmpfs.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn write_settled(path: &Path, seed: u8) {
    fs::write(path, content(seed)).unwrap();
    sleep(SETTLED);
}

fn read_all(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; BYTES * 2];
    let (mut done, mut more) = (0, 1);
    while more > 0 {
        more = file.read_at(&mut bytes[done..], done as u64).unwrap();
        done += more;
    }
    bytes.truncate(done);
    bytes
}

fn descriptors_of(path: &Path) -> usize {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link.starts_with(path)).count()
}

/// Whether this machine can keep pages: the kernel must give the mount by which a file was opened.
fn keeps(cache: &Parking, path: &Path) -> bool {
    read_all(&cache.open(path).unwrap());
    cache.release_idle();
    let keeps = cache.stats().cached_pages > 0;
    if !keeps {
        println!(
            "SKIPPED: nothing is kept here (a kernel before 6.8, or a file system whose times do not tell)"
        );
    }
    keeps
}

/// Reads the file by a handle with `coherence`, which is closed then; returns the bytes, and how many came from the
/// device.
fn read_by(cache: &Parking, path: &Path, coherence: Coherence) -> (Vec<u8>, u64) {
    let before = cache.stats().device_bytes;
    let bytes = read_all(&cache.open_with(path, OpenOptions::new().coherence(coherence)).unwrap());
    cache.release_idle();
    (bytes, cache.stats().device_bytes - before)
}

const POLICIES: [Coherence; 3] = [Coherence::Check, Coherence::Lease, Coherence::CheckEvery(Duration::ZERO)];

#[test]
fn pages_of_an_unchanged_file_survive_its_descriptor() {
    let _alone = alone();
    let (folder, cache) = (folder(), cache());
    let path = folder.path().join("file");
    write_settled(&path, 1);
    if !keeps(&cache, &path) {
        return;
    }
    for coherence in POLICIES {
        read_by(&cache, &path, coherence);
        let (bytes, from_device) = read_by(&cache, &path, coherence);
        assert!(bytes == content(1), "{coherence:?}");
        assert_eq!(from_device, 0, "{coherence:?}: it was cached");
        assert_eq!(descriptors_of(folder.path()), 0, "{coherence:?}");
    }
    cache.check().unwrap();
}

#[test]
fn a_closed_file_has_no_descriptor_wherever_it_is() {
    let _alone = alone();
    let (folder, shm, cache) = (folder(), tempfile::tempdir_in("/dev/shm").unwrap(), cache());
    for folder in [folder.path(), shm.path()] {
        let path = folder.join("file");
        write_settled(&path, 2);
        for coherence in POLICIES {
            let open = cache.open_with(&path, OpenOptions::new().coherence(coherence)).unwrap();
            assert_eq!(open.read_at(&mut [0; 10], 0).unwrap(), 10);
            assert_eq!(descriptors_of(folder), 1);
            let other = cache.open(&path).unwrap();
            drop(open);
            assert!(descriptors_of(folder) >= 1, "somebody has it open");
            assert!(read_all(&other) == content(2));
            drop(other);
            cache.release_idle();
            assert_eq!(descriptors_of(folder), 0);
        }
        // What was written has gone to the file, and then its descriptors go.
        let writer = cache.open_with(&path, OpenOptions::new().write(true)).unwrap();
        writer.write_at(b"written", 0).unwrap();
        writer.sync_all().unwrap();
        drop(writer);
        // What is being written back stays open for that long.
        for _ in 0..6000 {
            cache.release_idle();
            if descriptors_of(folder) == 0 {
                break;
            }
            sleep(Duration::from_millis(10));
        }
        assert_eq!(descriptors_of(folder), 0);
        assert_eq!(&read_all(&cache.open(&path).unwrap())[..7], b"written");
    }
    cache.check().unwrap();
}

/// A process that reads for itself knows what it has open.
#[test]
fn a_cache_that_reads_for_itself_keeps_its_descriptors() {
    let _alone = alone();
    let (folder, cache) = (folder(), Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap());
    let path = folder.path().join("file");
    write_settled(&path, 3);
    read_all(&cache.open(&path).unwrap());
    assert_eq!(descriptors_of(folder.path()), 1);
    let owner = CacheOwner::new(cache);
    owner.release_idle();
    assert_eq!(descriptors_of(folder.path()), 0);
    assert!(read_all(&owner.cache().open(&path).unwrap()) == content(3));
}

/// A file as a kernel shows it that does not say by which mount it was opened.
#[derive(Debug)]
struct WithoutMount(LocalFile);

impl Backend for WithoutMount {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn leasable(&self) -> Option<Leasable<'_>> {
        self.0.leasable()
    }
    fn parked(&self) -> Option<ParkedBackend> {
        self.0.parked()
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.0.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        fills.into_iter().for_each(|fill| self.0.fill_here(fill));
    }
}

/// The file is open a second longer, and warm for an open meanwhile; then it is forgotten.
#[test]
fn a_file_of_a_mount_without_a_number_is_closed_a_second_later() {
    let _alone = alone();
    let (folder, cache) = (folder(), cache());
    let path = folder.path().join("file");
    write_settled(&path, 8);
    let engine = Engine::new(Arc::new(WaitQueue::new()), EngineOptions::default());
    let read = || {
        let before = cache.stats().device_bytes;
        let backend = Arc::new(WithoutMount(engine.open(&path).unwrap()));
        let file = cache.open_backend_with(backend, OpenOptions::new().coherence(Coherence::Lease)).unwrap();
        assert!(read_all(&file) == content(8));
        cache.stats().device_bytes - before
    };
    assert!(read() > 0);
    assert_eq!(descriptors_of(folder.path()), 1);
    cache.0.window_ended(&ViewerTotals::default());
    assert_eq!(read(), 0, "it was there");
    sleep(Duration::from_millis(1100));
    cache.0.window_ended(&ViewerTotals::default());
    assert_eq!(descriptors_of(folder.path()), 0);
    assert!(read() > 0, "it was forgotten");
    cache.release_idle();
    assert_eq!(descriptors_of(folder.path()), 0);
    cache.check().unwrap();
}

/// Changes by others to a file that is not open here.
#[derive(Clone, Copy, Debug)]
enum Change {
    Write,
    /// A store by a mapping that was made for it.
    Store,
    /// Cut to nothing and written to the same size, with the same time of modification.
    Rewrite,
    /// Another file takes its name.
    Replace,
    /// The file is removed, and others are made until one has its inode.
    Reuse,
    Cut,
}

const CHANGES: [Change; 6] =
    [Change::Write, Change::Store, Change::Rewrite, Change::Replace, Change::Reuse, Change::Cut];

fn set_modified(path: &Path, to: std::time::SystemTime) {
    Plain::options().write(true).open(path).unwrap().set_modified(to).unwrap();
}

fn store(path: &Path, at: usize, byte: u8) {
    let file = PlainOptions::new().read(true).write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    if at >= len {
        return;
    }
    // SAFETY: a new mapping of a file that is `len` bytes long; nothing else is at its address.
    unsafe {
        use std::os::fd::AsRawFd;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let map = libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(map, libc::MAP_FAILED);
        map.cast::<u8>().add(at).write_volatile(byte);
        assert_eq!(libc::munmap(map, len), 0);
    }
}

fn change(path: &Path, change: Change, seed: u8) {
    match change {
        Change::Write => {
            Plain::options().write(true).open(path).unwrap().write_all_at(&[seed; 5000], 1000).unwrap();
        }
        Change::Store => store(path, 5000, seed),
        Change::Rewrite => {
            let modified = fs::metadata(path).unwrap().modified().unwrap();
            fs::write(path, content(seed)).unwrap();
            set_modified(path, modified);
        }
        Change::Replace => {
            let (modified, other) =
                (fs::metadata(path).unwrap().modified().unwrap(), path.with_extension("new"));
            fs::write(&other, content(seed)).unwrap();
            set_modified(&other, modified);
            fs::rename(other, path).unwrap();
        }
        Change::Reuse => {
            let known = fs::metadata(path).unwrap();
            fs::remove_file(path).unwrap();
            for attempt in 0..50 {
                let other = path.with_extension(format!("reuse{attempt}"));
                fs::write(&other, content(seed)).unwrap();
                if fs::metadata(&other).unwrap().ino() == known.ino() || attempt == 49 {
                    set_modified(&other, known.modified().unwrap());
                    fs::rename(other, path).unwrap();
                    break;
                }
            }
        }
        Change::Cut => Plain::options().write(true).open(path).unwrap().set_len(4097).unwrap(),
    }
}

#[test]
fn a_file_changed_while_no_handle_was_open_is_read_anew() {
    let _alone = alone();
    for place in [folder(), tempfile::tempdir_in("/dev/shm").unwrap()] {
        for (number, (coherence, what)) in
            POLICIES.iter().flat_map(|coherence| CHANGES.map(|what| (*coherence, what))).enumerate()
        {
            let (cache, path) = (cache(), place.path().join(format!("file{number}")));
            write_settled(&path, 4);
            // Known and parked, after up to two other handles.
            assert!(read_by(&cache, &path, coherence).0 == content(4));
            assert!(read_by(&cache, &path, coherence).0 == content(4));
            change(&path, what, 0x55);
            for _ in 0..2 {
                let read = read_by(&cache, &path, coherence).0;
                assert!(
                    read == fs::read(&path).unwrap(),
                    "{what:?} {coherence:?} at {}",
                    place.path().display()
                );
            }
            // And what was told at its end is not told of another content.
            change(&path, Change::Write, 0x56);
            assert!(
                read_by(&cache, &path, Coherence::Immutable).0 == fs::read(&path).unwrap(),
                "{what:?} {coherence:?}"
            );
            cache.check().unwrap();
        }
    }
}

/// The first store to a mapped page changes the file's times, and a second one does not.
#[test]
fn a_mappings_second_store_is_read_without_a_lease() {
    let _alone = alone();
    for place in [folder(), tempfile::tempdir_in("/dev/shm").unwrap()] {
        let (cache, path) = (cache(), place.path().join("file"));
        write_settled(&path, 5);
        let file = PlainOptions::new().read(true).write(true).open(&path).unwrap();
        // SAFETY: a new mapping of a file that is so long; nothing else is at its address.
        let map = unsafe {
            use std::os::fd::AsRawFd;
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), BYTES, prot, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(map, libc::MAP_FAILED);
        // SAFETY: inside the mapping, which is used here only.
        unsafe { map.cast::<u8>().write_volatile(1) };
        sleep(SETTLED);
        let cached = cache.open_with(&path, OpenOptions::new().coherence(Coherence::Lease)).unwrap();
        assert_eq!(read_all(&cached)[0], 1);
        // SAFETY: as above; then it is given back, once.
        unsafe { map.cast::<u8>().write_volatile(2) };
        drop(cached);
        // SAFETY: it is what was mapped.
        assert_eq!(unsafe { libc::munmap(map, BYTES) }, 0);
        drop(file);
        // A handle that goes by times alone must not find what was read without a lease, either.
        for coherence in [Coherence::Check, Coherence::Lease, Coherence::Lease] {
            let (bytes, _) = read_by(&cache, &path, coherence);
            assert_eq!(bytes[0], 2, "{coherence:?} at {}", place.path().display());
        }
    }
}

/// 1. A file is read under a lease, and closed: the lease and the descriptor are gone.
/// 2. A process maps it, and stores to a page that was cached, which moves its times; they settle.
/// 3. It is read while it is mapped, which is without a lease, and closed.
/// 4. The process stores to that page again, which moves no times, and unmaps it.
/// 5. It is read under a lease again.
#[test]
fn a_mappings_store_after_the_lease_ended_is_never_read_stale() {
    let _alone = alone();
    for place in [folder(), tempfile::tempdir_in("/dev/shm").unwrap()] {
        let (cache, path) = (cache(), place.path().join("file"));
        for round in 0..4_u8 {
            write_settled(&path, round);
            let first = content(round)[0];
            for _ in 0..2 {
                assert_eq!(read_by(&cache, &path, Coherence::Lease).0[0], first);
            }
            let file = PlainOptions::new().read(true).write(true).open(&path).unwrap();
            // SAFETY: a new mapping of a file that is so long; nothing else is at its address.
            let map = unsafe {
                use std::os::fd::AsRawFd;
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(std::ptr::null_mut(), BYTES, prot, libc::MAP_SHARED, file.as_raw_fd(), 0)
            };
            assert_ne!(map, libc::MAP_FAILED);
            drop(file);
            // SAFETY: inside the mapping, which is used here only.
            let store = |byte: u8| unsafe { map.cast::<u8>().write_volatile(byte) };
            if round % 2 == 0 {
                // It is read before the store, too, and parked as what it was.
                assert_eq!(read_by(&cache, &path, Coherence::Lease).0[0], first);
            }
            store(101);
            sleep(SETTLED);
            let open = cache.open_with(&path, OpenOptions::new().coherence(Coherence::Lease)).unwrap();
            assert_eq!(read_all(&open)[0], 101, "round {round} at {}", place.path().display());
            if round < 2 {
                store(102);
                drop(open);
            } else {
                drop(open);
                store(102);
            }
            // SAFETY: it is what was mapped.
            assert_eq!(unsafe { libc::munmap(map, BYTES) }, 0);
            for _ in 0..2 {
                let (bytes, _) = read_by(&cache, &path, Coherence::Lease);
                assert_eq!(bytes[0], 102, "round {round} at {}", place.path().display());
            }
        }
        cache.check().unwrap();
    }
}

/// Two threads that open, read and close one file, so that each parks what the other is about to open.
#[test]
fn an_open_while_another_handle_parks_reads_the_file() {
    let _alone = alone();
    let (folder, cache) = (folder(), Arc::new(cache()));
    let path: Arc<PathBuf> = Arc::new(folder.path().join("file"));
    write_settled(&path, 6);
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let (cache, path) = (Arc::clone(&cache), Arc::clone(&path));
            std::thread::spawn(move || {
                for round in 0..200 {
                    let coherence = POLICIES[(thread + round) % POLICIES.len()];
                    let file = cache.open_with(&*path, OpenOptions::new().coherence(coherence)).unwrap();
                    let (mut bytes, at) = ([0; 100], (round * 4099) % (BYTES - 100));
                    assert_eq!(file.read_at(&mut bytes, at as u64).unwrap(), 100);
                    assert!(bytes[..] == content(6)[at..at + 100]);
                    drop(file);
                    if round % 50 == 0 {
                        cache.release_idle();
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    cache.release_idle();
    assert_eq!(descriptors_of(folder.path()), 0);
    cache.check().unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Open(usize, u8),
    Close(usize),
    Change(Change, u8),
    Settle,
    Release,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0usize..2, 0u8..3).prop_map(|(handle, policy)| Step::Open(handle, policy)),
        3 => (0usize..2).prop_map(Step::Close),
        2 => (prop::sample::select(&CHANGES[..]), any::<u8>()).prop_map(|(what, seed)| Step::Change(what, seed)),
        1 => Just(Step::Settle),
        1 => Just(Step::Release),
    ];
    prop::collection::vec(step, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    /// The twin reads the file anew at each open.
    #[test]
    fn a_parking_cache_reads_as_a_twin_that_keeps_nothing(story in steps()) {
        let _alone = alone();
        let (folder, cache) = (folder(), cache());
        let path = folder.path().join("file");
        fs::write(&path, content(7)).unwrap();
        let mut handles = [None, None];
        for step in &story {
            match *step {
                Step::Open(handle, policy) => {
                    let mut options = OpenOptions::new();
                    options.coherence(POLICIES[usize::from(policy)]);
                    let file = cache.open_with(&path, &options).unwrap();
                    let twin = fs::read(&path).unwrap();
                    prop_assert!(read_all(&file) == twin, "{step:?} of {story:?}");
                    handles[handle] = Some(file);
                }
                Step::Close(handle) => handles[handle] = None,
                Step::Change(what, seed) => change(&path, what, seed),
                Step::Settle => sleep(SETTLED),
                Step::Release => cache.release_idle(),
            }
        }
        handles = [None, None];
        drop(handles);
        cache.release_idle();
        prop_assert_eq!(descriptors_of(folder.path()), 0);
        cache.check().unwrap();
    }
}
