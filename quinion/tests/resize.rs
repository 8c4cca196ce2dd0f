//! Resize: memory goes back to the machine, from a cache in use, and readers see nothing but misses.
//!
//! The system's numbers of the file and of its mapping are read from outside, as in `bound.rs`. Readers are threads of
//! this process and a viewer in another one, at work all the time; each byte they get is checked.

#![allow(unsafe_code, reason = "a viewer maps files")]

use quinion_testing::device;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use quinion::internals::arena::control::Operation;
use quinion::internals::arena::{CellNumber, LAYOUT_VERSION};
use quinion::internals::hooks;
use quinion::internals::pressure::PressureSource;
use quinion::internals::serving::ServedCache;
use quinion::internals::units::MappingId;
use quinion::{Cache, ErrorKind, File, Pressure};
use quinion_owner::internals::serve::{Service, ServiceOptions, listen};
use quinion_owner::internals::viewer::handshake::{JoinRequest, NO_PLAN};
use quinion_owner::internals::viewer::{self, ReadEnd, RequestError, ViewedFile, WantedBytes};
use quinion_owner::{CacheOwner, ServeRules, WithoutLease};

use quinion_testing::content::{Dice, fill_content, verify};
use quinion_testing::device::Device;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 80 * MIB;
const LARGE: u64 = 64 * MIB;
const SMALL: u64 = 24 * MIB;
const PAGE: u64 = 4096;

fn content() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    let mut bytes = vec![0; SIZE as usize];
    fill_content(&mut bytes, 1, 0, 1);
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn taken(cache: &Cache) -> u64 {
    let arena = cache.arena().share();
    let blocks =
        [arena.arena_fd(), arena.control_fd()].map(|file| rustix::fs::fstat(file).unwrap().st_blocks);
    blocks.iter().sum::<i64>() as u64 * 512
}

/// `Rss` of the arena's mapping in this process, in bytes.
fn resident(cache: &Cache) -> u64 {
    let inode = rustix::fs::fstat(cache.arena().share().arena_fd()).unwrap().st_ino.to_string();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| line.split_whitespace().nth(4) != Some(&inode));
    let rss = lines.find_map(|line| line.strip_prefix("Rss:")).expect("the arena is mapped here");
    rss.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

fn eventually(what: &str, happened: impl Fn() -> bool) {
    for _ in 0..6000 {
        if happened() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("a minute has passed: {what}");
}

fn read_about(file: &File, seed: u64, stop: &AtomicBool) -> u64 {
    let (mut dice, mut buffer, mut reads) = (Dice::new(seed), vec![0; 200_000], 0);
    while !stop.load(Ordering::Relaxed) {
        let (position, len) = (dice.below(SIZE), 1 + dice.below(200_000) as usize);
        let bytes = file.read_at(&mut buffer[..len], position).unwrap();
        assert_eq!(bytes as u64, (SIZE - position).min(len as u64));
        verify(&buffer[..bytes], 1, position).unwrap();
        reads += 1;
    }
    reads
}

/// The second process: started by the test below as the same program, with what it needs in its environment.
#[test]
fn viewer_process() {
    let Ok(told) = std::env::var("QUINION_RESIZE_VIEWER") else { return };
    let told: Vec<&str> = told.split(' ').collect();
    let hello =
        JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: told[1].parse().unwrap(), run: 0 };
    let viewer = viewer::connect(told[0].as_ref(), &hello).unwrap().waiting_at_most(60_000);
    let file = fs::File::open(told[2]).unwrap();
    let data = file.metadata().unwrap();
    let question = [file.as_fd().as_raw_fd() as u64, data.dev(), data.ino()];
    let [handle, place] = viewer.request(Operation::Attach, question).unwrap();
    let (marker, touched) = (AtomicU64::new(0), AtomicU64::new(0));
    let (stop, mut reads) = (AtomicBool::new(false), 0u64);
    thread::scope(|scope| {
        scope.spawn(|| {
            // This process's standard input ends when the test does, or says that it is over.
            let _ = std::io::stdin().read(&mut [0]);
            stop.store(true, Ordering::Relaxed);
        });
        let (mut dice, mut buffer) = (Dice::new(77), vec![0; 200_000]);
        while reads == 0 || !stop.load(Ordering::Relaxed) {
            let (position, len) = (dice.below(SIZE), 1 + dice.below(200_000) as usize);
            let file = ViewedFile {
                handle,
                cell: CellNumber(place as u32),
                id: MappingId((place >> 32) as u32),
                marker_reported: &marker,
                touched: &touched,
            };
            let wanted = WantedBytes::of_slice(position, &mut buffer[..len]);
            // SAFETY: the buffer is a slice.
            let outcome = unsafe { viewer.read(&file, wanted) };
            let fine = match outcome.end {
                ReadEnd::Full | ReadEnd::EndOfFile(_) => true,
                ReadEnd::Failed(error) => {
                    matches!(error, RequestError::Fruitless | RequestError::NoSlot | RequestError::Late)
                }
                _ => false,
            };
            assert!(fine, "{outcome:?}");
            verify(&buffer[..outcome.bytes], 1, position).unwrap();
            reads += u64::from(outcome.bytes > 0);
        }
    });
    println!("viewer read {reads} times");
}

fn start_viewer(cache: &Cache, socket: &Path, path: &Path) -> std::process::Child {
    let told = format!("{} {} {}", socket.display(), cache.arena().share().token(), path.display());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "viewer_process", "--nocapture"]).env("QUINION_RESIZE_VIEWER", told);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn memory_goes_back_while_threads_and_another_process_read() {
    let (_folder, path) = content();
    let cache = Cache::builder().memory(LARGE).folio_order_max(4).build().unwrap();
    let owner = Arc::new(CacheOwner::new(cache.clone()).with_rules(by_times()));
    let socket = path.with_extension("socket");
    let options =
        ServiceOptions { workers: 2, listener: Some(listen(&socket).unwrap()), ..Default::default() };
    let service = Service::start_with(owner, options).unwrap();
    let file = cache.open(&path).unwrap();
    let mut viewer = start_viewer(&cache, &socket, &path);
    let stop = AtomicBool::new(false);
    let reads: u64 = thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|seed| {
                let (file, stop) = (file.clone(), &stop);
                scope.spawn(move || read_about(&file, seed, stop))
            })
            .collect();
        for round in 0..4 {
            eventually("the cache grows to its bound", || taken(&cache) > LARGE - 8 * MIB);
            let before = (taken(&cache), resident(&cache));
            let resized = cache.resize(SMALL).unwrap();
            assert_eq!(resized.memory_bytes, SMALL);
            assert!(resized.returned_bytes + resized.slack_bytes >= before.0 - SMALL, "{resized:?}");
            eventually("slack goes", || cache.stats().slack_bytes == 0);
            eventually("late readers' pages go", || taken(&cache) <= SMALL);
            let after = (taken(&cache), resident(&cache));
            println!("round {round}: taken and resident {before:?} -> {after:?}, {resized:?}");
            assert!(after.1 <= SMALL && before.1 > LARGE / 2, "{before:?} {after:?}");
            assert!(cache.stats().grown_bytes <= SMALL, "{:?}", cache.stats());
            cache.arena().share().check().unwrap();
            cache.resize(LARGE).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().unwrap()).sum()
    });
    viewer.stdin.take().unwrap().write_all(b".").unwrap();
    let output = viewer.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    let theirs = said.lines().find_map(|line| line.strip_prefix("viewer read ")).expect("it says how often");
    println!("{reads} reads here, the viewer {theirs}");
    assert!(reads > 100 && !theirs.starts_with("0 "), "somebody did not read");
    drop(service);
    cache.check().unwrap();
}

/// Reads a byte of each page of the arena by a mapping of its own, holes included, which take pages by that.
fn touch_all(cache: &Cache) {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let file = cache.arena().share().arena_fd();
    let bytes = rustix::fs::fstat(file).unwrap().st_size as usize;
    // SAFETY: a new mapping at an address of the kernel's choice, which is known here only; it is read within its
    // bounds, by volatile loads of bytes that others may change, and unmapped when that is over.
    unsafe {
        let base = mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, 0).unwrap();
        (0..bytes).step_by(PAGE as usize).for_each(|at| _ = base.cast::<u8>().add(at).read_volatile());
        munmap(base, bytes).unwrap();
    }
}

#[test]
fn memory_taken_by_a_very_late_reader_goes_with_the_next_resize() {
    let cache = Cache::builder().memory(LARGE).readahead(0).build().unwrap();
    let device = Device::new(2 * LARGE);
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let mut buffer = vec![0; 1 << 20];
    for position in (0..2 * LARGE).step_by(1 << 20) {
        assert_eq!(file.read_at(&mut buffer, position).unwrap(), buffer.len());
    }
    cache.resize(SMALL).unwrap();
    eventually("all of it goes", || taken(&cache) <= SMALL && cache.stats().slack_bytes == 0);
    // When the background thread has looked, found nothing and stopped looking.
    eventually("what is read in a hole is taken, and stays", || {
        touch_all(&cache);
        taken(&cache) > LARGE / 2
    });
    let resized = cache.resize(SMALL).unwrap();
    assert_eq!(resized.returned_bytes, 0, "it was returned before");
    assert!(taken(&cache) <= SMALL, "{} bytes", taken(&cache));
    cache.check().unwrap();
}

/// Pins a page in every 32, so that no extent is without one; the device has a byte for each.
fn pin_everywhere(file: &File) -> Vec<quinion::Pinned> {
    (0..LARGE / PAGE / 32)
        .map_while(|nth| file.pin(nth * 32 * PAGE, 32 * 4096).ok().map(|all| (nth, all)))
        .map(|(nth, all)| {
            let one = file.pin(nth * 32 * PAGE, 1).unwrap();
            drop(all);
            one
        })
        .collect()
}

#[test]
fn pins_are_slack_that_is_reported_and_goes_with_them() {
    let device = Device::new(2 * LARGE);
    let cache = Cache::builder().memory(LARGE).readahead(0).folio_order_max(0).build().unwrap();
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let pins = pin_everywhere(&file);
    let resized = cache.resize(SMALL).unwrap();
    assert!(resized.slack_bytes > 0 && resized.pinned_bytes > 0, "{resized:?}");
    assert_eq!(resized.pinned_bytes, pins.len() as u64 * PAGE);
    assert_eq!(resized.grown_bytes, cache.stats().grown_bytes);
    // The smaller cache works, pins and all, and nothing is grown.
    let mut buffer = vec![0; 100_000];
    for position in (0..LARGE).step_by(100_000) {
        assert_eq!(file.read_at(&mut buffer, position).unwrap(), buffer.len());
        device::verify(&buffer, &device, position);
    }
    assert!(taken(&cache) <= resized.grown_bytes);
    for (nth, pin) in pins.iter().enumerate() {
        let bytes: Vec<u8> = pin.chunks().flatten().copied().collect();
        device::verify(&bytes, &device, nth as u64 * 32 * PAGE);
    }
    cache.check().unwrap();
    drop(pins);
    eventually("what pins kept goes by itself", || cache.stats().slack_bytes == 0);
    assert!(taken(&cache) <= SMALL, "{} bytes", taken(&cache));
    cache.check().unwrap();
}

#[test]
fn fills_in_flight_are_waited_for_but_not_for_ever() {
    let device = Device::new(2 * LARGE);
    let cache = Cache::builder().memory(LARGE).readahead(0).folio_order_min(9).build().unwrap();
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let mut buffer = vec![0; 100];
    device.hold();
    // Every extent is being read into.
    let asked = file.will_need(0, LARGE).unwrap();
    assert!(asked.started_pages > 0);
    let large = cache.stats().grown_bytes;
    let resized = cache.resize(Cache::MEMORY_MIN).unwrap();
    assert!(resized.slack_bytes > 0 && resized.returned_bytes == 0, "{resized:?}, {large} before");
    device.release();
    eventually("it goes when its read has ended", || cache.stats().slack_bytes == 0);
    assert!(taken(&cache) <= Cache::MEMORY_MIN);
    for position in (0..LARGE).step_by(3 << 20) {
        assert_eq!(file.read_at(&mut buffer, position).unwrap(), 100);
        device::verify(&buffer, &device, position);
    }
    cache.check().unwrap();
}

#[test]
fn a_cache_gives_way_when_the_machine_is_short_of_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let meminfo = folder.path().join("meminfo");
    let say = |free: u64| {
        fs::write(&meminfo, format!("MemTotal: {} kB\nMemAvailable: {} kB\n", MIB, free * 1024)).unwrap()
    };
    say(1000);
    let gauge = PressureSource { meminfo: Some(meminfo.clone()), ..PressureSource::default() };
    let pressure = hooks::with_pressure_source(Pressure::shrink_to(SMALL), gauge);
    let cache = Cache::builder().memory(LARGE).readahead(0).pressure(pressure).build().unwrap();
    let device = Device::new(2 * LARGE);
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let read_all = || {
        let mut buffer = vec![0; 1 << 20];
        for position in (0..2 * LARGE).step_by(1 << 20) {
            assert_eq!(file.read_at(&mut buffer, position).unwrap(), buffer.len());
            device::verify(&buffer, &device, position);
        }
    };
    read_all();
    let large = taken(&cache);
    assert!(large > LARGE - 8 * MIB && cache.stats().memory_bytes == LARGE);
    // A 64th of the machine is left: the cache shrinks step by step, down to its configured least.
    say(16);
    eventually("it gives way", || taken(&cache) <= SMALL && cache.stats().slack_bytes == 0);
    assert_eq!(cache.stats().memory_bytes, SMALL);
    read_all();
    assert!(taken(&cache) <= SMALL);
    cache.check().unwrap();
    // What the user says is in force at once.
    say(1000);
    assert_eq!(cache.resize(LARGE - MIB).unwrap().memory_bytes, LARGE - MIB);
    read_all();
    assert!(taken(&cache) > SMALL);
    cache.check().unwrap();
}

#[test]
fn up_to_memory_max_and_no_further() {
    let cache = Cache::builder().memory(SMALL).memory_max(LARGE).readahead(0).build().unwrap();
    let device = Device::new(2 * LARGE);
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let read_all = || {
        let mut buffer = vec![0; 1 << 20];
        for position in (0..2 * LARGE).step_by(1 << 20) {
            assert_eq!(file.read_at(&mut buffer, position).unwrap(), buffer.len());
            device::verify(&buffer, &device, position);
            assert!(taken(&cache) <= cache.stats().memory_bytes);
        }
        taken(&cache)
    };
    assert_eq!((cache.stats().memory_bytes, cache.stats().memory_max_bytes), (SMALL, LARGE));
    assert!(read_all() <= SMALL);
    for wrong in [LARGE + 1, Cache::MEMORY_MIN - 1, 0, u64::MAX] {
        let error = cache.resize(wrong).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(&wrong.to_string()), "{error}");
    }
    assert_eq!(cache.stats().memory_bytes, SMALL);
    let up = cache.resize(LARGE).unwrap();
    assert_eq!((up.memory_bytes, up.returned_bytes, up.slack_bytes), (LARGE, 0, 0));
    let large = read_all();
    assert!(large > LARGE - 8 * MIB, "{large}");
    let down = cache.resize(SMALL).unwrap();
    assert_eq!((down.slack_bytes, down.grown_bytes <= SMALL), (0, true), "nobody reads: {down:?}");
    assert_eq!(taken(&cache) + down.returned_bytes, large);
    assert!(read_all() <= SMALL);
    let error = Cache::builder().memory(LARGE).memory_max(SMALL).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Build);
    assert!(error.to_string().contains("memory_max"), "{error}");
    cache.check().unwrap();
}

/// Rules by which a file is served that this very process has open for writing.
fn by_times() -> ServeRules {
    ServeRules { coherence: WithoutLease::CheckTimes, ..ServeRules::default() }
}
