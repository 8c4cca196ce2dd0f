//! Tests of the owner: files that thrash, truncations during and after an attach, and leases without a watch.
//!
//! [`BeforeNoted`] acts between the open of a file and its entry in the table of attached files, which no test could
//! meet by luck.

use super::*;
use quinion::internals::filemap::{FileView, read_hits_into};
use quinion::{Coherence, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;

type Act = Box<dyn FnOnce(&CacheOwner) + Send>;

#[derive(Default)]
pub(super) struct BeforeNoted(std::sync::Mutex<Option<Act>>);

impl BeforeNoted {
    pub(super) fn act(&self, owner: &CacheOwner) {
        let act = self.0.lock().expect("nobody panics").take();
        act.into_iter().for_each(|act| act(owner));
    }
}

impl std::fmt::Debug for BeforeNoted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BeforeNoted")
    }
}

/// 1. Files that do not fit into the memory together are attached, and read over and over.
/// 2. Each read evicts pages that the next one needs, and all of them wait for the device.
#[test]
fn files_that_thrash_are_left_to_the_kernel_until_the_others_fit() {
    const BYTES: u64 = 5 << 20;
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache")).attach_lazily();
    let attach = |file: u64| attach_by_path(&owner, &folder.path().join(file.to_string())).1;
    let handles: Vec<u64> = (0..3)
        .map(|file| {
            let mut new = std::fs::File::create(folder.path().join(file.to_string())).expect("a file");
            new.write_all(&vec![file as u8; BYTES as usize]).expect("it has room");
            drop(new);
            attach(file).expect("nobody has it open for writing").handle
        })
        .collect();
    let mut totals = ViewerTotals::default();
    let mut windows = 0;
    while owner.shortage() == Shortage::default() {
        for &handle in &handles {
            for position in (0..BYTES).step_by(PAGE_SIZE) {
                owner.fill(handle, position, 1, Caching::Cached).expect("it is served");
                (totals.reads, totals.misses) = (totals.reads + 1, totals.misses + 1);
            }
        }
        owner.window_ended(&totals);
        windows += 1;
        assert!(windows < 10, "nothing is left to the kernel: {:?}", owner.cache().stats());
    }
    let Shortage { files, bytes, memory } = owner.shortage();
    assert_eq!((files, bytes, memory), (1, BYTES, thrash::memory_for(3 * BYTES)), "two fit");
    let refused = |handle: &&u64| owner.fill(**handle, 0, 1, Caching::Cached) == Err(Errno(libc::ENOMEM));
    assert_eq!(handles.iter().filter(refused).count(), 1);
    let file = handles.iter().position(|handle| refused(&handle)).expect("one of them");
    assert_eq!(attach(file as u64), Err(Errno(libc::ENOMEM)), "it is not attached again");
    assert!(thrash::capacity_of(memory) >= 3 * BYTES && memory < 32 << 20, "as much as is said would do");
}

/// A lease does not tell of a file that is cut by being opened to read only.
#[test]
fn a_truncation_while_a_file_is_being_attached_is_noticed() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    let mut file = std::fs::File::create(&path).expect("a file");
    file.write_all(&[7; 100_000]).expect("it has room");
    drop(file);
    let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
    let attach = || attach_by_path(&owner, &path);
    let (id, attached) = attach();
    let handle = attached.expect("nobody has it open for writing").handle;
    assert!(owner.valid_file(handle).is_ok());
    owner.detach(handle);
    let cut = path.clone();
    *owner.before_noted.0.lock().expect("nobody panics") = Some(Box::new(move |owner| {
        owner.writer_opened(id, WriterAccess::Truncate);
        let options = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&cut);
        assert_eq!(options.expect("it is cut").metadata().expect("it is there").len(), 0);
        owner.writer_opened(id, WriterAccess::Truncate);
    }));
    let (_, attached) = attach();
    assert!(attached.is_err_and(|errno| errno == Errno::TXTBSY), "the old bytes would be believed");
    let (_, attached) = attach();
    if let Ok(attached) = attached {
        assert_eq!(owner.files.file(attached.handle).expect("it is attached").len(), 0);
    }
}

fn small_owner() -> CacheOwner {
    CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"))
}

fn named_file(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, vec![7; 100_000]).expect("it has room");
    path
}

/// 1. While a file is being attached, a viewer wants to be alone with another one: the attach does not fail.
/// 2. So many files are revoked meanwhile that it is not known whether this one is: the viewer may ask again.
/// 3. A program begins to watch all files meanwhile, and none is attached yet: this one is not attached either.
#[test]
fn a_revocation_fails_attaches_of_its_own_file_alone() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = named_file(folder.path(), "file");
    let owner = small_owner();
    let attach_during = |act: Act| {
        *owner.before_noted.0.lock().expect("no test panics in it") = Some(act);
        attach_by_path(&owner, &path).1
    };
    let other = |inode| FileId { device: 1, inode };
    let attached = attach_during(Box::new(move |owner| owner.revoke(other(1)))).expect("it was not revoked");
    assert!(owner.valid_file(attached.handle).is_ok());
    owner.detach(attached.handle);
    let many =
        Box::new(move |owner: &CacheOwner| (0..2000).for_each(|inode| owner.files.revoke(other(inode))));
    assert_eq!(attach_during(many), Err(Errno::AGAIN));
    let attach_later = || loop {
        match attach_by_path(&owner, &path).1 {
            Err(Errno::TXTBSY) => sleep(Duration::from_millis(5)), // its record is trusted again after a while
            answer => return answer,
        }
    };
    owner.detach(attach_later().expect("it may be asked for again").handle);
    let watcher = Sleeper::start();
    let process = watcher.process.clone();
    let watches = Box::new(move |owner: &CacheOwner| owner.watched(ALL_FILES, &process));
    assert!(attach_during(watches).is_err(), "its reads would not be reported");
}

/// A process that does nothing.
struct Sleeper {
    child: std::process::Child,
    process: WatchingProcess,
}

impl Sleeper {
    fn start() -> Self {
        let child = std::process::Command::new("sleep").arg("1000").spawn().expect("it is on each machine");
        let number = rustix::process::Pid::from_child(&child);
        let descriptor = rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty());
        let alive = Arc::new(descriptor.expect("it is there"));
        let name = quinion::internals::sys::peer::ProcessName::of(child.id(), &*alive);
        Self { child, process: WatchingProcess { name, alive } }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it is ours");
    }
}

/// 1. Processes watch a file, more files than are noted of one, and a folder: files are refused.
/// 2. They end one by one: what the others watch is refused still, and nothing more.
#[test]
fn watches_end_with_their_process() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let [file, other] = ["file", "other"].map(|name| named_file(folder.path(), name));
    let owner = small_owner();
    let attach = |path: &Path| loop {
        let (id, answer) = attach_by_path(&owner, path);
        match answer {
            Err(Errno::TXTBSY) => sleep(Duration::from_millis(5)), // its record is trusted again after a while
            Err(error) => return (id, Err(error)),
            Ok(attached) => {
                owner.detach(attached.handle);
                return (id, Ok(()));
            }
        }
    };
    let (id, _) = attach(&file);
    let [one, many, all] = [(), (), ()].map(|()| Sleeper::start());
    owner.watched(id, &one.process);
    assert_eq!((attach(&file).1, attach(&other).1), (Err(Errno::BUSY), Ok(())));
    for inode in 0..5000 {
        owner.admission.add_watched(FileId { device: 1, inode }, &many.process);
    }
    owner.watched(ALL_FILES, &all.process);
    assert_eq!(attach(&other).1, Err(Errno::BUSY));
    drop(many);
    assert_eq!(attach(&other).1, Err(Errno::BUSY), "another one watches the folder");
    drop(all);
    assert_eq!((attach(&file).1, attach(&other).1), (Err(Errno::BUSY), Ok(())));
    drop(one);
    owner.window_ended(&ViewerTotals::default());
    assert_eq!(attach(&file).1, Ok(()));
}

/// 1. Two viewers attach a file, and one of them lets go of it.
/// 2. A process that tells nothing cuts it, and the kernel tells no lease.
/// 3. The cached pages are trusted no more. The next viewer that attaches it finds it watched again.
#[test]
fn a_cut_that_no_viewer_tells_of_is_heard() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
    let attach = || loop {
        match attach_by_path(&owner, &path).1 {
            Ok(attached) => return attached.handle,
            // For a second after it was cut.
            Err(errno) => assert_eq!(errno, Errno::TXTBSY),
        }
        sleep(Duration::from_millis(5));
    };
    for _ in 0..2 {
        std::fs::write(&path, vec![7; 100_000]).expect("it has room");
        let (handle, other) = (attach(), attach());
        owner.detach(handle);
        owner.fill(other, 0, 4096, Caching::Cached).expect("it is there");
        assert_eq!(owner.admission.truncations.files(), 1);
        let cut = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path);
        assert_eq!(cut.expect("it is cut").metadata().expect("it is there").len(), 0);
        while owner.valid_file(other).is_ok() {
            sleep(Duration::from_millis(1));
        }
        assert_eq!(owner.admission.truncations.files(), 0, "one notice is enough");
        owner.detach(other);
    }
    std::fs::write(&path, vec![7; 100_000]).expect("it has room");
    owner.detach(attach());
    assert_eq!(owner.admission.truncations.files(), 0, "what is closed is watched no more");
}

/// 1. A viewer attaches a file, which is watched, and a process writes to it: the notice ends the watch.
/// 2. A read of the owner's, for a viewer that looks at times, finds no lease, and no process that writes.
/// 3. A process cuts the file in a way of which a lease does not tell: the next read finds the end.
#[test]
fn a_read_takes_no_lease_that_no_watch_goes_with() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 100_000]).expect("it has room");
    let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
    let handle = attach_by_path(&owner, &path).1.expect("no process has it open for writing").handle;
    let file = owner.files.file(handle).expect("it is attached");
    let mut writer = std::fs::OpenOptions::new().write(true).open(&path).expect("it can be written");
    writer.write_all(&[8]).expect("it has room");
    drop(writer);
    while owner.admission.truncations.files() > 0 {
        sleep(Duration::from_millis(1));
    }
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_millis(1300) {
        // A lease that was given up to a writer is asked for again after a second.
        sleep(Duration::from_millis(1));
        assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 10);
        assert_ne!(file.coherence().expect("it is open").in_force, Coherence::Lease, "it is blind for cuts");
    }
    let cut = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path);
    drop(cut.expect("it is cut"));
    assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 0, "old bytes");
    owner.detach(handle);
}

fn open_leased(owner: &CacheOwner, path: &Path) -> Arc<File> {
    let options = *OpenOptions::new().coherence(Coherence::Lease);
    Arc::new(owner.cache.open_with(path, &options).expect("it is there"))
}

/// 1. A viewer attaches a file, and a process writes to it: the notice ends the watch.
/// 2. The program that serves it opens it, and reads: no lease is taken as long as the viewer has it.
/// 3. The viewer is gone: the program has a lease again.
#[test]
fn an_open_takes_no_lease_while_a_viewer_has_the_file_and_no_watch() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 100_000]).expect("it has room");
    let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
    let handle = attach_by_path(&owner, &path).1.expect("no process has it open for writing").handle;
    std::fs::write(&path, vec![8; 100_000]).expect("it has room");
    while owner.admission.truncations.files() > 0 {
        sleep(Duration::from_millis(1));
    }
    let leased = |file: &File| file.coherence().expect("it is open").in_force == Coherence::Lease;
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_millis(1300) {
        // A lease that was given up to a writer is asked for again after a second.
        sleep(Duration::from_millis(10));
        assert!(!leased(&open_leased(&owner, &path)), "it is blind for cuts");
    }
    let file = open_leased(&owner, &path);
    owner.detach(handle);
    while !leased(&file) {
        assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 10);
        sleep(Duration::from_millis(1));
    }
}

/// 1. The program that serves a file has a lease on it, and has read it.
/// 2. A process cuts it in a way of which a lease does not tell.
/// 3. A viewer attaches it after that, and is shown no old byte.
#[test]
fn a_cut_before_the_watch_is_seen_by_the_attach() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 100_000]).expect("it has room");
    let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
    let file = open_leased(&owner, &path);
    while file.coherence().expect("it is open").in_force != Coherence::Lease {
        // As long as a child of another test starts it may have the file open for writing.
        assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 10);
        sleep(Duration::from_millis(5));
    }
    file.read_exact_at(&mut [0; 100_000], 0).expect("it can be read");
    let cut = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path);
    drop(cut.expect("it is cut"));
    if let Ok(attached) = attach_by_path(&owner, &path).1 {
        let file = owner.files.file(attached.handle).expect("it is attached");
        assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 0, "old bytes");
        owner.detach(attached.handle);
    }
    assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 0, "old bytes");
}

/// 1. The program that serves a file has a lease on it, and has read it. A viewer attaches it, is to let go of it,
///    and does not look for a while.
/// 2. Another viewer attaches it, and lets go of it: nothing watches the file from then on.
/// 3. A process cuts it in a way of which a lease does not tell: the first viewer does not trust the cached pages.
#[test]
fn no_viewer_believes_a_lease_when_nothing_watches_the_file() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 100_000]).expect("it has room");
    let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
    let program = open_leased(&owner, &path);
    let attach = || loop {
        match attach_by_path(&owner, &path) {
            (id, Ok(attached)) => return (id, attached),
            (_, Err(errno)) => assert_eq!(errno, Errno::TXTBSY),
        }
        sleep(Duration::from_millis(5));
    };
    let (id, first) = attach();
    owner.revoke(id);
    assert_eq!(program.validation(), Validation::Kernel);
    let (_, other) = attach();
    program.read_exact_at(&mut [0; 100_000], 0).expect("it can be read");
    owner.detach(other.handle);
    assert_eq!(owner.admission.truncations.files(), 0, "nothing watches it");
    let cut = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path);
    drop(cut.expect("it is cut"));
    let file = FileView { view: owner.cache.arena().view(), cell: first.cell, id: first.id };
    let is_leased = program.validation() == Validation::Leased;
    let hits = read_hits_into(file, 0, &mut [0; 10], |_, _| {});
    assert!(!is_leased || hits.bytes == 0, "old bytes, for good: {hits:?}");
}

fn attach_by_path(owner: &CacheOwner, path: &Path) -> (FileId, Result<Attached, Errno>) {
    let file = std::fs::File::open(path).expect("it is there");
    let stat = file.metadata().expect("it can be looked at");
    let id = FileId { device: stat.dev(), inode: stat.ino() };
    (id, owner.attach(file.into(), id))
}

/// 1. A viewer lets go of a file that another handle in this process still has open.
/// 2. It counts as attached, so that a program that removes it asks; until it is closed.
#[test]
fn a_file_counts_as_attached_until_it_is_closed() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 100_000]).expect("it has room");
    let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
    let (id, attached) = attach_by_path(&owner, &path);
    let other = owner.cache().open(&path).expect("it is there");
    let place =
        quinion::internals::arena::control::place_of(id, quinion::internals::arena::control::ATTACHED_PLACES);
    let counts = || !owner.cache().arena().share().control().control().attached[place].is_zero();
    for _ in 0..3 {
        owner.detach(attached.as_ref().expect("nobody has it open for writing").handle);
        let (_, again) = attach_by_path(&owner, &path);
        owner.detach(again.expect("nobody has it open for writing").handle);
        owner.settle_closing();
        assert!(counts());
    }
    drop(other);
    owner.window_ended(&ViewerTotals::default());
    assert!(!counts(), "nobody would be told of it");
}

struct Undisturbed;

impl ServiceHandle for Undisturbed {
    fn is_running(&self) -> bool {
        true
    }
    fn has_viewers(&self) -> bool {
        false
    }
    fn while_attached(&self, _: FileId, work: &mut dyn FnMut()) {
        work();
    }
}

/// 1. A file that the kernel holds is to be copied, and the thread that copies it panics.
/// 2. The file is asked for again, which requests another copy: nothing waits for the first.
#[test]
fn a_copy_that_panics_does_not_hold_up_the_next() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 4 << 20]).expect("it has room");
    let cache = Cache::builder().memory(64 << 20).build().expect("a cache");
    let owner = CacheOwner::new(cache).attach_lazily();
    let file = std::fs::File::open(&path).expect("it is there");
    let stat = file.metadata().expect("it can be looked at");
    let id = FileId { device: stat.dev(), inode: stat.ino() };
    let is_left = || owner.leaves_to_kernel(file.as_fd(), id, AttachReason::CreditSpent).is_some();
    *owner.before_noted.0.lock().expect("no thread panics under it") = Some(Box::new(|_| panic!("meant")));
    assert!(is_left(), "the copy is requested");
    owner.prepare(&Undisturbed);
    assert!(owner.before_noted.0.lock().expect("no thread panics under it").is_none(), "it has panicked");
    while is_left() {
        // As long as a child of another test starts it may have the file open for writing.
        owner.prepare(&Undisturbed);
        sleep(Duration::from_millis(1));
    }
    assert_eq!(owner.attachments(), AttachmentCounts::default());
}
