//! What an owner leaves to the kernel, and for how long: each decision by itself, without viewers or threads.
//!
//! ```text
//!   a file, held by the kernel or not --leaves_to_kernel--> so many bytes, or none: attach
//!                                     --prepare-----------> copied, if that was requested
//! ```
//!
//! Where the kernel does not drop a file (it lies in memory), tests of cold files are left out, and say so.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use quinion::Cache;
use quinion::internals::units::FileId;
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::{AttachReason, Caching, Owner, ServiceHandle, ViewerTotals, file_id};

const BYTES: u64 = 1 << 20;

fn owner() -> CacheOwner {
    CacheOwner::new(Cache::builder().memory(64 << 20).build().unwrap()).attach_lazily()
}

/// A file, all of it in the kernel's cache and written back; on a file system with a device, if the tests' folder is.
fn file(folder: &Path, bytes: u64) -> File {
    let path = folder.join("file");
    std::fs::write(&path, vec![7; bytes as usize]).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    std::fs::read(&path).unwrap();
    // A file that changed a moment ago is read anew when it is attached again.
    std::thread::sleep(Duration::from_millis(200));
    File::open(path).unwrap()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn ask(owner: &CacheOwner, file: &File, reason: AttachReason) -> Option<u64> {
    owner.leaves_to_kernel(file.as_fd(), file_id(file).unwrap(), reason)
}

fn forget(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

struct Alone;

impl ServiceHandle for Alone {
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

#[test]
fn an_owner_that_attaches_at_once_leaves_no_file_to_the_kernel() {
    let (folder, cache) = (folder(), Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap());
    let owner = CacheOwner::new(cache);
    assert_eq!(owner.attach_policy(), Default::default());
    assert_eq!(ask(&owner, &file(folder.path(), BYTES), AttachReason::Read), None);
}

/// 1. The kernel holds a file: it reads it twice.
/// 2. The viewer asks again later: the file is copied when no viewer waits, and the kernel serves it until then.
/// 3. The copy is there: it is taken over, and all of it is in the cache.
#[test]
fn a_file_that_the_kernel_holds_is_copied_after_some_readings() {
    let (folder, owner) = (folder(), owner());
    let file = file(folder.path(), BYTES);
    assert_eq!(ask(&owner, &file, AttachReason::Read), Some(2 * BYTES));
    owner.prepare(&Alone);
    assert_eq!(owner.cache().stats().device_bytes, 0, "no copy was requested");
    assert_eq!(ask(&owner, &file, AttachReason::CreditSpent), Some(BYTES));
    assert_eq!(ask(&owner, &file, AttachReason::CreditSpent), Some(BYTES), "one request is enough");
    owner.prepare(&Alone);
    assert_eq!(owner.cache().stats().device_bytes, BYTES);
    let id = file_id(&file).unwrap();
    assert!(owner.arena().control().control().is_taken(id), "viewers see that it pays to ask");
    assert_eq!(ask(&owner, &file, AttachReason::CreditSpent), None);
    let attached = owner.attach(file.try_clone().unwrap().into(), id).unwrap();
    owner.fill(attached.handle, 0, BYTES, Caching::Cached).unwrap();
    assert_eq!(owner.cache().stats().device_bytes, BYTES, "it is there");
    owner.detach(attached.handle);
}

/// Viewers ask for a large file only when the kernel has read it twice, or at the third open of any process.
#[test]
fn a_large_file_that_the_kernel_holds_is_copied_at_once() {
    let (folder, owner) = (folder(), owner());
    let file = file(folder.path(), 4 << 20);
    assert_eq!(ask(&owner, &file, AttachReason::Read), Some(4 << 20));
    owner.prepare(&Alone);
    assert_eq!(owner.cache().stats().device_bytes, 4 << 20);
    assert_eq!(ask(&owner, &file, AttachReason::Read), None);
}

/// A service with a viewer, which counts how often it was asked for viewers.
#[derive(Default)]
struct Busy(Cell<u32>);

impl ServiceHandle for Busy {
    fn is_running(&self) -> bool {
        true
    }
    fn has_viewers(&self) -> bool {
        self.0.set(self.0.get() + 1);
        true
    }
    fn while_attached(&self, _: FileId, work: &mut dyn FnMut()) {
        work();
    }
}

/// While programs may be running, a copy rests after each step, and is completed all the same.
#[test]
fn a_copy_looks_after_each_step_whether_a_program_runs() {
    let (folder, owner) = (folder(), owner());
    let file = file(folder.path(), 4 << 20);
    assert_eq!(ask(&owner, &file, AttachReason::Read), Some(4 << 20));
    let service = Busy::default();
    owner.prepare(&service);
    assert_eq!((service.0.get(), owner.cache().stats().device_bytes), (4, 4 << 20));
    assert_eq!(ask(&owner, &file, AttachReason::Read), None);
}

/// A program that opens a file again and again and reads it through has it taken over in the end, too.
#[test]
fn openings_count_as_readings() {
    let (folder, owner) = (folder(), owner());
    let file = file(folder.path(), BYTES);
    let left = (0..).take_while(|_| ask(&owner, &file, AttachReason::Read) == Some(2 * BYTES)).count();
    assert_eq!(left, 2);
}

#[test]
fn a_file_that_does_not_fit_stays_the_kernels() {
    let (folder, owner) = (folder(), owner());
    let file = file(folder.path(), 20 << 20);
    let first = [AttachReason::Read];
    for reason in first.into_iter().chain([AttachReason::CreditSpent; 3]) {
        assert_eq!(ask(&owner, &file, reason), Some(40 << 20));
        owner.prepare(&Alone);
    }
    assert_eq!(owner.cache().stats().device_bytes, 0);
}

/// Only the kernel's memory has bytes that were just written: to read them from the device would mean to write them
/// first.
#[test]
fn a_file_that_is_not_written_back_is_left_to_the_kernel() {
    let (folder, owner) = (folder(), owner());
    let path = folder.path().join("file");
    let part = File::create(&path).unwrap();
    part.set_len(BYTES).unwrap();
    rustix::io::pwrite(&part, &[1; 4096], 8192).unwrap();
    let left = ask(&owner, &File::open(&path).unwrap(), AttachReason::Read);
    // There is only one page of it; a file system without write-back has written that by now.
    assert!(left == Some(2 * BYTES) || left == Some(BYTES));
}

/// 1. The kernel holds nothing of a file: it is to read it once, and again, until it does.
/// 2. It holds it: it is to read it twice.
/// 3. It is copied then, and taken over.
#[test]
fn an_uncached_file_is_read_by_the_kernel_first() {
    let (folder, owner) = (folder(), owner());
    let file = file(folder.path(), BYTES);
    forget(&file);
    let first = ask(&owner, &file, AttachReason::Read);
    if first == Some(2 * BYTES) {
        return println!("left out: the kernel does not let go of files here");
    }
    assert_eq!((first, ask(&owner, &file, AttachReason::CreditSpent)), (Some(BYTES), Some(BYTES)));
    owner.prepare(&Alone);
    assert_eq!(owner.cache().stats().device_bytes, 0, "no copy was requested");
    rustix::io::pread(&file, &mut vec![0; BYTES as usize], 0).unwrap();
    assert_eq!(ask(&owner, &file, AttachReason::CreditSpent), Some(2 * BYTES));
    assert_eq!(ask(&owner, &file, AttachReason::CreditSpent), Some(BYTES));
    owner.prepare(&Alone);
    assert_eq!(owner.cache().stats().device_bytes, BYTES);
    assert_eq!(ask(&owner, &file, AttachReason::Read), None);
    let id = file_id(&file).unwrap();
    let attached = owner.attach(file.try_clone().unwrap().into(), id).unwrap();
    let open = owner.cache().open(folder.path().join("file")).unwrap();
    assert!(!open.is_direct(), "it is filled through the kernel's page cache");
    owner.detach(attached.handle);
}

/// Another file may have taken the number by the time the owner looks.
#[test]
fn a_descriptor_that_is_another_file_by_now_is_the_attachings_matter() {
    let (folder, owner) = (folder(), owner());
    let file = file(folder.path(), BYTES);
    let id = file_id(&file).unwrap();
    let elsewhere = FileId { inode: id.inode + 1, ..id };
    assert_eq!(owner.leaves_to_kernel(file.as_fd(), elsewhere, AttachReason::Read), None);
    assert!(owner.attach(file.try_clone().unwrap().into(), elsewhere).is_err());
}

fn descriptors_of(path: &Path) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    entries
        .filter(|entry| std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|it| it == path))
        .count()
}

/// 1. A file waits to be copied, and the owner has it open; then a program asks to unmount its file system.
/// 2. It is closed. It is copied when it is asked for again.
#[test]
fn a_file_that_waits_to_be_copied_is_closed_for_an_unmount() {
    let (folder, owner) = (folder(), owner());
    let (file, path) = (file(folder.path(), 4 << 20), folder.path().join("file"));
    for _ in 0..2 {
        assert_eq!(ask(&owner, &file, AttachReason::Read), Some(4 << 20));
        assert_eq!(descriptors_of(&path), 2);
        owner.release_idle();
        assert_eq!(descriptors_of(&path), 1, "our own");
    }
    assert_eq!(ask(&owner, &file, AttachReason::Read), Some(4 << 20));
    owner.prepare(&Alone);
    assert_eq!((descriptors_of(&path), ask(&owner, &file, AttachReason::Read)), (1, None));
    assert_eq!(owner.cache().stats().device_bytes, 4 << 20);
}

/// An owner to which an unmount is announced after the first step of a copy. On the thread that copies, so that it is
/// sure to be before the next step; the announcer waits for the end of the copy in vain.
struct Unmounting<'a>(&'a CacheOwner, Cell<u32>);

impl ServiceHandle for Unmounting<'_> {
    fn is_running(&self) -> bool {
        true
    }
    fn has_viewers(&self) -> bool {
        self.1.set(self.1.get() + 1);
        if self.1.get() == 1 {
            self.0.release_idle();
        }
        false
    }
    fn while_attached(&self, _: FileId, work: &mut dyn FnMut()) {
        work();
    }
}

/// What was copied until then stays, and the rest comes when the file is asked for again.
#[test]
fn a_copy_ends_for_an_unmount() {
    let (folder, owner) = (folder(), owner());
    let (file, path) = (file(folder.path(), 8 << 20), folder.path().join("file"));
    assert_eq!(ask(&owner, &file, AttachReason::Read), Some(8 << 20));
    let service = Unmounting(&owner, Cell::new(0));
    owner.prepare(&service);
    assert_eq!(service.1.get(), 1, "it was called off after a step");
    assert_eq!(descriptors_of(&path), 1, "our own");
    let copied = owner.cache().stats().device_bytes;
    assert!(copied < 8 << 20, "{copied}");
    assert_eq!(ask(&owner, &file, AttachReason::Read), Some(8 << 20));
    owner.prepare(&Alone);
    assert_eq!((descriptors_of(&path), ask(&owner, &file, AttachReason::Read)), (1, None));
}

/// The viewer that asked may have closed it long ago.
#[test]
fn a_file_waits_to_be_copied_for_some_seconds_at_most() {
    let (folder, owner) = (folder(), owner());
    let (file, path) = (file(folder.path(), 4 << 20), folder.path().join("file"));
    assert_eq!(ask(&owner, &file, AttachReason::Read), Some(4 << 20));
    owner.window_ended(&ViewerTotals::default());
    assert_eq!(descriptors_of(&path), 2);
    std::thread::sleep(Duration::from_millis(3100));
    owner.window_ended(&ViewerTotals::default());
    assert_eq!(descriptors_of(&path), 1, "our own");
}
