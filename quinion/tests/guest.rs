//! Guest memory and images, by their promises: the bytes are the snapshot's, all used memory counts, and machines that
//! map an image share it and change nothing of it.
//!
//! A machine is played by a mapping of the descriptor, private or shared, in this process. The snapshot is a file, or a
//! device that answers late, out of order and with errors. A machine's own memory has a vector for its twin.

#![allow(unsafe_code, reason = "mappings, and a fork")]

use std::fs::File as Plain;
use std::io::{Seek, SeekFrom, Write};
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use quinion::backend::{Attributes, Backend, Fill, ReapMode, ReapOutcome, WaitQueue};
use quinion::{Cache, ErrorKind, GuestMemory, Image};
use quinion_testing::doubles::{CompletionOrder, CompletionPoint, FailureCount, Faults, SimulatedBackend};
use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const EXTENT: u64 = 2 << 20;

fn cache(memory: u64) -> Cache {
    Cache::builder().memory(memory).build().unwrap()
}

fn byte(seed: u64, at: u64) -> u8 {
    let word = (at / 8 + seed * 0x1000_0001).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> (at % 8 * 7)) as u8 | 1
}
fn bytes(seed: u64, range: Range<u64>) -> Vec<u8> {
    range.map(|at| byte(seed, at)).collect()
}

/// A folder with a snapshot of `len` bytes, which was written some time ago.
fn snapshot(len: u64) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("memory");
    std::fs::write(&path, bytes(1, 0..len)).unwrap();
    let then = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    Plain::options().write(true).open(&path).unwrap().set_modified(then).unwrap();
    (folder, path)
}

fn device(pages: u64, seed: u64) -> Arc<SimulatedBackend> {
    let page = |file, page: u64, to: &mut [u8]| {
        to.iter_mut().zip(page * PAGE..).for_each(|(to, at)| *to = byte(file, at));
    };
    let faults = Faults {
        seed,
        delay_max: 3,
        sequence: CompletionOrder::Shuffled,
        completing: CompletionPoint::WhenReaped,
        ..Faults::default()
    };
    Arc::new(SimulatedBackend::generated(1, pages * PAGE, page, faults))
}

/// A guest's file, mapped as a machine maps it.
struct Mapped {
    at: *mut u8,
    len: usize,
}

impl Mapped {
    fn new(file: BorrowedFd<'_>, how: MapFlags) -> Self {
        let len = fstat(file).unwrap().st_size as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let at = unsafe { mmap(null_mut(), len, access, how, file, 0) }.unwrap();
        Self { at: at.cast(), len }
    }
    fn private(image: &Image) -> Self {
        Self::new(image.fd(), MapFlags::PRIVATE)
    }
    fn get(&self, range: Range<u64>) -> Vec<u8> {
        assert!(range.end <= self.len as u64);
        // SAFETY: the range is mapped, and not written meanwhile.
        unsafe {
            std::slice::from_raw_parts(self.at.add(range.start as usize), (range.end - range.start) as usize)
        }
        .to_vec()
    }
    fn put(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.len as u64);
        // SAFETY: the range is mapped, and not read meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.add(at as usize), bytes.len()) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this test's mapping, to which there is no reference.
        unsafe { munmap(self.at.cast(), self.len) }.unwrap();
    }
}

/// Memory behind a file, in bytes.
fn taken(file: BorrowedFd<'_>) -> u64 {
    fstat(file).unwrap().st_blocks as u64 * 512
}

fn image_of(cache: &Cache, device: &Arc<SimulatedBackend>) -> Image {
    Image::from_backend(cache, Arc::clone(device) as Arc<dyn Backend>, "device").unwrap()
}

fn outcomes(image: &Image, range: Range<u64>) -> Vec<(u64, Option<ErrorKind>)> {
    let mut told = Vec::new();
    image
        .ensure_each(range, |part, came| {
            let kind = came.err().map(|error| error.kind());
            told.extend((part.start / PAGE..part.end / PAGE).map(|page| (page, kind)));
            ControlFlow::Continue(())
        })
        .unwrap();
    told
}

// ---- what an image is -----------------------------------------------------------------------------

#[test]
fn an_image_is_its_snapshot_and_zeros_behind() {
    let len = 5 * MIB + 4097;
    let (_folder, path) = snapshot(len);
    let cache = cache(64 * MIB);
    let image = Image::from_snapshot(&cache, &path).unwrap();
    assert_eq!((image.len(), image.memory_len()), (len, 3 * EXTENT));
    assert_eq!((image.stats().resident_bytes, cache.stats().device_bytes), (0, 0), "nothing is read yet");
    image.ensure(MIB + 1..MIB + 2).unwrap();
    assert_eq!(image.stats().resident_bytes, PAGE);
    assert_eq!(image.next_absent(MIB..len), Some(MIB + PAGE..(len.div_ceil(PAGE)) * PAGE));
    assert!(image.is_resident(MIB..MIB + PAGE) && !image.is_resident(MIB - 1..MIB + 1));
    image.populate().unwrap();
    assert!(image.is_resident(0..u64::MAX) && image.next_absent(0..len).is_none());
    assert_eq!(cache.stats().device_bytes, len, "each byte once");

    let mapped = Mapped::private(&image);
    assert!(mapped.get(0..len) == bytes(1, 0..len));
    assert!(mapped.get(len..3 * EXTENT).iter().all(|byte| *byte == 0));
    let mut buffer = vec![0; 10_000];
    assert_eq!(image.read_at(&mut buffer, len - 5000).unwrap(), 5000);
    assert!(buffer[..5000] == bytes(1, len - 5000..len));
    assert_eq!(image.read_at(&mut buffer, len).unwrap(), 0);
    cache.check().unwrap();
}

#[test]
fn machines_share_it_and_change_nothing_of_it() {
    let (_folder, path) = snapshot(4 * MIB);
    let cache = cache(64 * MIB);
    let image = Image::from_snapshot(&cache, &path).unwrap();
    image.populate().unwrap();
    let (one, two) = (Mapped::private(&image), Mapped::private(&image));
    one.put(MIB, b"changed");
    assert!(one.get(MIB..MIB + 7) == b"changed" && two.get(0..4 * MIB) == bytes(1, 0..4 * MIB));
    let mut buffer = [0; 7];
    image.read_at(&mut buffer, MIB).unwrap();
    assert!(buffer[..] == bytes(1, MIB..MIB + 7));
    // It can be neither mapped shared for writing nor written by its descriptor.
    let shared = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, if it were made.
    let refused = unsafe { mmap(null_mut(), 4096, shared, MapFlags::SHARED, image.fd(), 0) };
    assert!(refused.is_err() && rustix::io::pwrite(image.fd(), b"x", 0).is_err());
    // A machine that maps it keeps what it has when the image is dropped.
    drop(image);
    assert!(two.get(0..4 * MIB) == bytes(1, 0..4 * MIB) && one.get(MIB..MIB + 7) == b"changed");
}

#[test]
fn threads_that_want_the_same_pages_read_each_once() {
    let pages = 3 * 512 + 100;
    for seed in 0..4 {
        let (cache, device) = (cache(64 * MIB), device(pages, seed));
        let image = image_of(&cache, &device);
        std::thread::scope(|scope| {
            for thread in 0..6u64 {
                let image = image.clone();
                scope.spawn(move || {
                    let mapped = Mapped::private(&image);
                    let mut random = (seed * 6 + thread + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    for _ in 0..40 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let first = random % pages;
                        let end = (first + 1 + random / pages % 60).min(pages);
                        image.ensure(first * PAGE..end * PAGE).unwrap();
                        assert!(mapped.get(first * PAGE..end * PAGE) == bytes(1, first * PAGE..end * PAGE));
                    }
                    image.populate().unwrap();
                });
            }
        });
        assert_eq!(device.read_bytes(), pages * PAGE, "each page once");
        assert_eq!(image.stats().resident_bytes, pages * PAGE);
        cache.check().unwrap();
    }
}

#[test]
fn prefetched_pages_are_found() {
    let (cache, device) = (cache(64 * MIB), device(1024, 7));
    let image = image_of(&cache, &device);
    image.prefetch(MIB..2 * MIB).unwrap();
    assert_eq!(image.stats().resident_bytes, 0, "nobody has looked at it yet");
    image.ensure(MIB..2 * MIB).unwrap();
    assert_eq!(device.read_bytes(), MIB);
    image.allocate().unwrap();
    assert_eq!(taken(image.fd()), 2 * EXTENT, "all of its memory, and of its bytes what was wanted");
    assert_eq!(image.stats().resident_bytes, MIB);
}

// ---- what goes wrong ------------------------------------------------------------------------------

#[test]
fn a_page_that_cannot_be_read_takes_no_other_with_it() {
    let (cache, device) = (cache(64 * MIB), device(1024, 3));
    device.fail_at(700 * PAGE + 17..700 * PAGE + 18, FailureCount::Always);
    device.fail_at(3 * PAGE..5 * PAGE, FailureCount::Always);
    let image = image_of(&cache, &device);
    let bad = [3, 4, 700];
    for _ in 0..2 {
        let told = outcomes(&image, 0..1024 * PAGE);
        assert_eq!(told.iter().map(|(page, _)| *page).collect::<Vec<_>>(), (0..1024).collect::<Vec<_>>());
        for (page, kind) in told {
            assert_eq!(kind, bad.contains(&page).then_some(ErrorKind::Io), "page {page}");
        }
        assert_eq!(image.stats().resident_bytes, 1021 * PAGE);
        assert_eq!(image.next_absent(0..1024 * PAGE), Some(3 * PAGE..5 * PAGE));
    }
    assert_eq!(image.populate().unwrap_err().kind(), ErrorKind::Io);
    assert!(!image.has_changed());
    device.mend();
    image.populate().unwrap();
    assert!(Mapped::private(&image).get(0..1024 * PAGE) == bytes(1, 0..1024 * PAGE));
    cache.check().unwrap();
}

#[test]
fn a_snapshot_that_changes_is_served_no_further() {
    let damages: [fn(&PathBuf); 3] = [
        |path| {
            let mut file = Plain::options().write(true).open(path).unwrap();
            file.seek(SeekFrom::Start(3 * MIB)).unwrap();
            file.write_all(b"foreign").unwrap();
        },
        |path| Plain::options().write(true).open(path).unwrap().set_len(3 * MIB).unwrap(),
        |path| Plain::options().write(true).open(path).unwrap().set_len(5 * MIB).unwrap(),
    ];
    for damage in damages {
        let (_folder, path) = snapshot(4 * MIB);
        let cache = cache(64 * MIB);
        let image = Image::from_snapshot(&cache, &path).unwrap();
        image.ensure(0..MIB).unwrap();
        damage(&path);
        for range in [3 * MIB..4 * MIB, MIB..2 * MIB] {
            let error = image.ensure(range).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
            assert!(error.to_string().contains("memory"), "it names the file: {error}");
        }
        assert!(image.has_changed());
        // What was there is right, and stays.
        assert_eq!(image.stats().resident_bytes, MIB);
        image.ensure(0..MIB).unwrap();
        assert!(Mapped::private(&image).get(0..MIB) == bytes(1, 0..MIB));
        drop(image);
        cache.check().unwrap();
    }
}

/// 1. An image has byte 3 MiB of its snapshot.
/// 2. Another program cuts the snapshot to 2 MiB.
/// 3. A thread reads byte 2.5 MiB of the image. The fill finds that the file ends, which becomes the mapping's size.
/// 4. The thread reads byte 3 MiB: of a resident range, and it was told that the snapshot ends there.
#[test]
fn resident_bytes_of_a_snapshot_that_is_cut_are_read_on() {
    let (_folder, path) = snapshot(4 * MIB);
    let cache = cache(64 * MIB);
    let image = Image::from_snapshot(&cache, &path).unwrap();
    let resident = 3 * MIB..3 * MIB + 16 * PAGE;
    image.ensure(resident.clone()).unwrap();
    Plain::options().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
    let mut buffer = vec![0; 16 * PAGE as usize];
    let error = image.read_at(&mut buffer[..1], 5 * MIB / 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
    image.ensure(resident.clone()).unwrap();
    assert_eq!(image.read_at(&mut buffer, resident.start).unwrap(), buffer.len());
    assert!(buffer == bytes(1, resident));
    let error = image.read_at(&mut buffer, MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
}

#[test]
fn one_that_is_renamed_or_removed_is_served_on() {
    let (folder, path) = snapshot(4 * MIB);
    let cache = cache(64 * MIB);
    let image = Image::from_snapshot(&cache, &path).unwrap();
    std::fs::rename(&path, folder.path().join("other")).unwrap();
    image.ensure(0..MIB).unwrap();
    std::fs::write(&path, b"another file of that name").unwrap();
    std::fs::remove_file(folder.path().join("other")).unwrap();
    image.populate().unwrap();
    assert!(Mapped::private(&image).get(0..4 * MIB) == bytes(1, 0..4 * MIB));
}

/// A device whose file changes while the first fill is under way.
#[derive(Debug)]
struct Changing {
    device: Arc<SimulatedBackend>,
    has_changed: AtomicBool,
}

impl Backend for Changing {
    fn name(&self) -> &'static str {
        "changing"
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.device.attach(wait_queue);
    }
    fn attributes(&self) -> std::io::Result<Attributes> {
        let mut now = self.device.attributes()?;
        now.version.modified += i64::from(self.has_changed.load(Ordering::Relaxed));
        Ok(now)
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.has_changed.store(true, Ordering::Relaxed);
        self.device.submit(fills);
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.device.reap(how, done)
    }
    fn wants_leader(&self) -> bool {
        self.device.wants_leader()
    }
}

#[test]
fn bytes_that_came_while_it_changed_are_not_believed() {
    let cache = cache(64 * MIB);
    let changing = Changing { device: device(512, 1), has_changed: AtomicBool::new(false) };
    let image = Image::from_backend(&cache, Arc::new(changing), "changing").unwrap();
    let told = outcomes(&image, 0..512 * PAGE);
    assert!(told.iter().all(|(_, kind)| *kind == Some(ErrorKind::Changed)) && told.len() == 512);
    assert_eq!(image.stats().resident_bytes, 0);
    assert_eq!(image.read_at(&mut [0; 10], 0).unwrap_err().kind(), ErrorKind::Changed);
}

#[test]
fn a_file_that_is_no_image_is_refused_with_a_remedy() {
    let (folder, path) = snapshot(0);
    let cache = cache(32 * MIB);
    let refused = |path: &PathBuf| Image::from_snapshot(&cache, path).unwrap_err();
    assert_eq!(refused(&path).kind(), ErrorKind::InvalidInput);
    assert_eq!(refused(&folder.path().join("none")).kind(), ErrorKind::Open);
    assert_eq!(refused(&folder.path().to_owned()).kind(), ErrorKind::Open);
    Plain::options().write(true).open(&path).unwrap().set_len(40 * MIB).unwrap();
    let error = refused(&path);
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert!(error.to_string().contains("memory_max"), "{error}");
    for bytes in [0, u64::MAX] {
        assert_eq!(cache.guest_memory(bytes).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    cache.check().unwrap();
    assert_eq!(cache.guest_memory(MIB).unwrap().memory_len(), EXTENT, "nothing was kept");
}

// ---- what counts ----------------------------------------------------------------------------------

#[test]
fn guest_memory_counts_in_full_and_all_of_it_comes_back() {
    let cache = cache(32 * MIB);
    let before = cache.stats();
    let memory = cache.guest_memory(6 * MIB).unwrap();
    assert_eq!(cache.stats().guest_bytes, 6 * MIB);
    assert_eq!(cache.stats().grown_bytes, before.grown_bytes + 6 * MIB);
    assert_eq!(taken(memory.as_fd()), 0);
    memory.allocate(0..6 * MIB).unwrap();
    assert_eq!(taken(memory.as_fd()), 6 * MIB);
    drop(memory);
    let after = cache.stats();
    assert_eq!((after.guest_bytes, after.grown_bytes), (0, before.grown_bytes));
    cache.check().unwrap();
}

/// A cache full of a file makes room in one piece, and goes on with the file in the rest.
#[test]
fn room_is_made_in_a_full_cache_and_the_bound_is_held() {
    let memory = 48 * MIB;
    let (_folder, path) = snapshot(64 * MIB);
    let cache = cache(memory);
    let file = cache.open(&path).unwrap();
    let mut buffer = vec![0; MIB as usize];
    let mut read_all = |file: &quinion::File| {
        for at in (0..64).map(|mib| mib * MIB) {
            file.read_exact_at(&mut buffer, at).unwrap();
            assert_eq!((buffer[0], buffer[77_777]), (byte(1, at), byte(1, at + 77_777)));
        }
    };
    read_all(&file);
    assert!(cache.stats().grown_bytes > memory - 2 * EXTENT, "it is full");
    let (device, mut images) = (device(8 * 512, 5), Vec::new());
    for _ in 0..2 {
        let image = image_of(&cache, &device);
        image.populate().unwrap();
        images.push(image);
        read_all(&file);
        cache.check().unwrap();
        let stats = cache.stats();
        assert!(stats.grown_bytes <= memory, "{stats:?}");
    }
    // None of it was evicted, and it was not read again.
    for image in &images {
        assert!(image.is_resident(0..16 * MIB));
        assert!(Mapped::private(image).get(0..16 * MIB) == bytes(1, 0..16 * MIB));
    }
    assert_eq!(device.read_bytes(), 2 * 16 * MIB);
    assert_eq!(cache.guest_memory(16 * MIB).unwrap_err().kind(), ErrorKind::NoMemory);
    drop(images);
    assert_eq!(cache.stats().guest_bytes, 0);
    read_all(&file);
    assert!(cache.stats().grown_bytes <= memory);
    cache.check().unwrap();
}

#[test]
fn pins_in_the_way_are_an_error_and_not_a_wait() {
    let (_folder, path) = snapshot(48 * MIB);
    let cache = cache(32 * MIB);
    let file = cache.open(&path).unwrap();
    let mut pins = Vec::new();
    // A page here and there, so that nowhere is much room in one piece.
    let mut buffer = vec![0; MIB as usize];
    for at in (0..48).map(|mib| mib * MIB) {
        file.read_exact_at(&mut buffer, at).unwrap();
        pins.extend(file.pin(at, 1));
    }
    let error = cache.guest_memory(24 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert!(pins.iter().zip(0..).all(|(pin, at)| pin.chunks().next().unwrap()[0] == byte(1, at * MIB)));
    cache.check().unwrap();
    drop(pins);
    file.read_exact_at(&mut buffer, 0).unwrap();
    cache.guest_memory(16 * MIB).unwrap();
}

/// Half of what a guest leaves, not half of all: else the pins could have every page that there is to read into.
#[test]
fn pins_beside_a_guest_leave_room_to_read() {
    let (_folder, path) = snapshot(48 * MIB);
    let cache = cache(64 * MIB);
    let _memory = cache.guest_memory(40 * MIB).unwrap();
    let file = cache.open(&path).unwrap();
    let (mut pins, mut at) = (Vec::new(), 0);
    let refused = loop {
        match file.pin(at, MIB as usize) {
            Ok(pin) => pins.push(pin),
            Err(error) => break error,
        }
        at += MIB;
    };
    assert!((8..=12).contains(&pins.len()), "{} MiB: {refused}", pins.len());
    let mut buffer = vec![0; MIB as usize];
    for at in (0..48).map(|mib| mib * MIB) {
        file.read_exact_at(&mut buffer, at).unwrap();
        assert!(buffer[..100] == bytes(1, at..at + 100));
    }
    drop(pins);
    cache.check().unwrap();
}

#[test]
fn a_cache_is_not_resized_below_its_guests() {
    let cache = Cache::builder().memory(64 * MIB).memory_max(96 * MIB).build().unwrap();
    let memory = cache.guest_memory(40 * MIB).unwrap();
    assert_eq!(cache.resize(40 * MIB).unwrap_err().kind(), ErrorKind::InvalidInput);
    let resized = cache.resize(60 * MIB).unwrap();
    assert_eq!((resized.memory_bytes, resized.slack_bytes), (60 * MIB, 0));
    cache.resize(96 * MIB).unwrap();
    let more = cache.guest_memory(30 * MIB).unwrap();
    more.write_at(b"x", 30 * MIB - 1).unwrap();
    drop((memory, more));
    assert_eq!(cache.resize(32 * MIB).unwrap().slack_bytes, 0);
    cache.check().unwrap();
}

// ---- a machine's own ------------------------------------------------------------------------------

fn read(memory: &GuestMemory, range: Range<u64>) -> Vec<u8> {
    let mut buffer = vec![0xee; (range.end - range.start) as usize];
    memory.read_at(&mut buffer, range.start).unwrap();
    buffer
}

#[test]
fn a_machine_and_its_keeper_see_each_others_bytes() {
    let cache = cache(32 * MIB);
    let memory = cache.guest_memory(5 * MIB).unwrap();
    assert_eq!((memory.size(), memory.memory_len()), (5 * MIB, 6 * MIB));
    let machine = Mapped::new(memory.as_fd(), MapFlags::SHARED);
    memory.write_at(&bytes(2, 100..9000), 100).unwrap();
    assert!(machine.get(0..100) == [0; 100] && machine.get(100..9000) == bytes(2, 100..9000));
    machine.put(3 * MIB, b"from the machine");
    assert!(read(&memory, 3 * MIB..3 * MIB + 16) == b"from the machine");
    assert!(read(&memory, 5 * MIB - 10..5 * MIB) == [0; 10]);
    for (at, len) in [(5 * MIB - 1, 2), (u64::MAX, 1), (6 * MIB, 0)] {
        assert_eq!(memory.write_at(&vec![1; len], at).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(memory.read_at(&mut vec![1; len], at).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    memory.write_at(&[], 5 * MIB).unwrap();
    // SAFETY: the byte is the guest's, and is not written.
    assert_eq!(unsafe { memory.map_shared().add(100).read_volatile() }, byte(2, 100));
}

#[test]
fn punched_guest_pages_are_zeros_for_all_and_their_memory_is_given_back() {
    let cache = cache(32 * MIB);
    let memory = cache.guest_memory(4 * MIB + 100).unwrap();
    let machine = Mapped::new(memory.as_fd(), MapFlags::SHARED);
    memory.write_at(&vec![7; 4 * MIB as usize + 100], 0).unwrap();
    assert_eq!(taken(memory.as_fd()), 6 * MIB);
    memory.punch(5000..5000 + 4 * PAGE).unwrap();
    assert_eq!(taken(memory.as_fd()), 6 * MIB - 3 * PAGE, "whole pages");
    memory.punch(3 * MIB..4 * MIB + 100).unwrap();
    assert_eq!(taken(memory.as_fd()), 6 * MIB - (3 + 257) * PAGE);
    memory.punch(10..20).unwrap();
    let holes = [5000..5000 + 4 * PAGE, 3 * MIB..4 * MIB + 100, 10..20];
    let expected: Vec<u8> = (0..4 * MIB + 100)
        .map(|at| if holes.iter().any(|hole| hole.contains(&at)) { 0 } else { 7 })
        .collect();
    assert!(machine.get(0..4 * MIB + 100) == expected);
    assert!(read(&memory, 0..4 * MIB + 100) == expected);
    memory.write_at(b"again", 3 * MIB).unwrap();
    assert!(machine.get(3 * MIB..3 * MIB + 5) == b"again");
    assert_eq!(memory.punch(0..5 * MIB).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(cache.stats().guest_bytes, 6 * MIB);
    // Also where the machine alone has ever been.
    let other = cache.guest_memory(2 * MIB).unwrap();
    let machine = Mapped::new(other.as_fd(), MapFlags::SHARED);
    machine.put(MIB, &[7; 10_000]);
    other.punch(MIB..2 * MIB).unwrap();
    assert!(machine.get(MIB..MIB + 10_000) == [0; 10_000]);
}

#[test]
fn threads_fill_it_from_a_file_side_by_side() {
    let (_folder, path) = snapshot(12 * MIB);
    let cache = cache(64 * MIB);
    let (file, memory) = (cache.open(&path).unwrap(), cache.guest_memory(12 * MIB).unwrap());
    std::thread::scope(|scope| {
        for part in 0..3 {
            let (file, memory) = (&file, &memory);
            scope.spawn(move || {
                memory.populate_from_file(part * 4 * MIB, file, part * 4 * MIB, 4 * MIB).unwrap()
            });
        }
    });
    assert!(read(&memory, 0..12 * MIB) == bytes(1, 0..12 * MIB));
    let behind = memory.populate_from_file(0, &file, 12 * MIB - 10, 20).unwrap_err();
    assert_eq!(behind.kind(), ErrorKind::InvalidInput);
}

/// A reader that gives a few bytes at a time, and now and then is interrupted; at its end it fails, or not.
struct Dribble {
    at: u64,
    end: u64,
    fails: bool,
    calls: u32,
}

impl std::io::Read for Dribble {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.calls += 1;
        if self.calls.is_multiple_of(5) {
            return Err(std::io::ErrorKind::Interrupted.into());
        }
        if self.at == self.end && self.fails {
            return Err(std::io::Error::other("the pipe broke"));
        }
        let len = (self.end - self.at).min(buffer.len() as u64).min(70_001);
        buffer[..len as usize].copy_from_slice(&bytes(4, self.at..self.at + len));
        self.at += len;
        Ok(len as usize)
    }
}

#[test]
fn guest_memory_is_filled_from_a_reader_and_says_how_far() {
    let cache = cache(32 * MIB);
    let memory = cache.guest_memory(9 * MIB).unwrap();
    let dribble = |at, end, fails| Dribble { at, end, fails, calls: 0 };
    let machine = Mapped::new(memory.as_fd(), MapFlags::SHARED);
    machine.put(8 * MIB, b"the machine's");
    // It ends, fails, or has more than is wanted.
    let came = |range: Range<u64>, reader| memory.populate_from_reader(range, reader);
    assert_eq!(came(100..8 * MIB, dribble(100, 5 * MIB + 7, false)).unwrap(), 5 * MIB - 93);
    assert_eq!(came(5 * MIB + 7..8 * MIB, dribble(5 * MIB + 7, 6 * MIB, true)).unwrap(), MIB - 7);
    assert_eq!(came(6 * MIB..8 * MIB, dribble(6 * MIB, 9 * MIB, false)).unwrap(), 2 * MIB);
    assert!(machine.get(100..8 * MIB) == bytes(4, 100..8 * MIB), "as the machine sees it");
    assert!(read(&memory, 8 * MIB..8 * MIB + 13) == b"the machine's", "and nothing behind");
    let failed = came(0..10, dribble(0, 0, true)).unwrap_err();
    assert!(failed.kind() == ErrorKind::Write && failed.to_string().contains("the pipe broke"), "{failed}");
    let outside = came(9 * MIB..9 * MIB + 1, dribble(0, 9, false)).unwrap_err();
    assert_eq!(outside.kind(), ErrorKind::InvalidInput);

    // A closure may put anything into each piece.
    let mut pieces = Vec::new();
    let put = memory.populate_with(MIB..5 * MIB, |slice| {
        pieces.push((slice.position(), slice.left() as u64));
        slice.write_all(&vec![9; slice.left()])?;
        assert_eq!(slice.write(b"more")?, 0);
        Ok(())
    });
    assert_eq!(put.unwrap(), 4 * MIB);
    assert_eq!(pieces, [(MIB, MIB), (2 * MIB, 2 * MIB), (4 * MIB, MIB)]);
    assert!(read(&memory, MIB..5 * MIB).iter().all(|byte| *byte == 9));
}

/// A child that was forked has neither: its calls say so, and its drops leave its address space alone.
#[test]
fn a_forked_child_gets_an_error_that_says_so() {
    let (cache, device) = (cache(32 * MIB), device(512, 1));
    let (image, memory) = (image_of(&cache, &device), cache.guest_memory(MIB).unwrap());
    image.ensure(0..PAGE).unwrap();
    // SAFETY: the child makes calls of the library that are made for that, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |kind: Option<ErrorKind>| kind == Some(ErrorKind::Forked);
        let told = forked(image.ensure(0..PAGE).err().map(|e| e.kind()))
            && forked(image.read_at(&mut [0], 0).err().map(|e| e.kind()))
            && forked(image.prefetch(0..PAGE).err().map(|e| e.kind()))
            && forked(image.allocate().err().map(|e| e.kind()))
            && forked(memory.write_at(b"x", 0).err().map(|e| e.kind()))
            && forked(memory.read_at(&mut [0], 0).err().map(|e| e.kind()))
            && forked(memory.punch(0..10).err().map(|e| e.kind()))
            && forked(cache.guest_memory(MIB).err().map(|e| e.kind()))
            && image.stats() == quinion::ImageStats::default();
        drop((image, memory, cache));
        // SAFETY: it ends the child and nothing else.
        unsafe { libc::_exit(i32::from(!told)) };
    }
    let mut status = -1;
    // SAFETY: it is this process's child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's exit status");
    image.populate().unwrap();
    assert!(Mapped::private(&image).get(0..2 * MIB) == bytes(1, 0..2 * MIB));
    memory.write_at(b"x", 0).unwrap();
    cache.check().unwrap();
    let _ = image.fd().as_fd();
}

#[derive(Clone, Debug)]
enum Op {
    Write(u64, u64, u8),
    Read(u64, u64),
    Punch(u64, u64),
    Allocate(u64, u64),
    Put(u64, u64, u8),
    Hole(u64, u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let part = || (0..OWN, prop_oneof![1..200u64, 1..40_000u64, 1..3 * MIB]);
    let op = prop_oneof![
        3 => (part(), any::<u8>()).prop_map(|((at, len), byte)| Op::Write(at, len, byte)),
        3 => part().prop_map(|(at, len)| Op::Read(at, len)),
        2 => part().prop_map(|(at, len)| Op::Punch(at, len)),
        1 => part().prop_map(|(at, len)| Op::Allocate(at, len)),
        2 => (part(), any::<u8>()).prop_map(|((at, len), byte)| Op::Put(at, len, byte)),
        1 => part().prop_map(|(at, len)| Op::Hole(at, len)),
    ];
    prop::collection::vec(op, 1..30)
}

/// The size of the guest memory of the twin.
const OWN: u64 = 4 * MIB + 1000;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]
    /// The twin is a vector.
    #[test]
    fn a_machines_own_memory_is_a_vector(ops in ops()) {
        let cache = cache(32 * MIB);
        let memory = cache.guest_memory(OWN).unwrap();
        let machine = Mapped::new(memory.as_fd(), MapFlags::SHARED);
        let mut twin = vec![0u8; OWN as usize];
        let inside = |at: u64, len: u64| at as usize..(at + len).min(OWN) as usize;
        for op in ops {
            match op {
                Op::Write(at, len, byte) => {
                    twin[inside(at, len)].fill(byte);
                    memory.write_at(&twin[inside(at, len)], at).unwrap();
                }
                Op::Read(at, len) => {
                    let range = inside(at, len);
                    prop_assert!(read(&memory, range.start as u64..range.end as u64) == twin[range]);
                }
                Op::Punch(at, len) => {
                    let range = inside(at, len);
                    memory.punch(range.start as u64..range.end as u64).unwrap();
                    twin[range].fill(0);
                }
                Op::Allocate(at, len) => memory.allocate(at..(at + len).min(OWN)).unwrap(),
                Op::Put(at, len, byte) => {
                    twin[inside(at, len)].fill(byte);
                    machine.put(at, &twin[inside(at, len)]);
                }
                Op::Hole(at, len) => {
                    let range = inside(at, len);
                    let (first, end) = ((range.start as u64).next_multiple_of(PAGE), range.end as u64 / PAGE * PAGE);
                    if first < end {
                        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                        fallocate(memory.as_fd(), flags, first, end - first).unwrap();
                        twin[first as usize..end as usize].fill(0);
                    }
                }
            }
            prop_assert!(taken(memory.as_fd()) <= cache.stats().guest_bytes);
        }
        prop_assert!(machine.get(0..OWN) == twin);
        prop_assert!(read(&memory, 0..OWN) == twin);
    }
}
