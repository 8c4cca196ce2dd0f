//! The promises of every mechanism, tested on real files.
//!
//! Each test runs by io_uring and by threads, on a disk, where reads are direct, and in memory, where they are not;
//! where a system has no ring, by threads twice. Byte `at` of every file is `byte(at)`, so a byte from a wrong place is
//! seen. Tests that change their process (forbid a call, fork) run in one of their own.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use tempfile::TempDir;

use super::doubles::{Faults, Request, SimulatedBackend};
use super::engine::ChosenMechanism;
use super::local_file::LocalFile;
use super::open_file::{IoMode, NotAFileKind};
use super::*;

const SIZES: [usize; 9] = [0, 1, 511, 512, 513, 4095, 4096, 4097, (1 << 20) + 17];

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn content(from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64).map(byte).collect()
}

/// A folder on a disk, where direct I/O can be had, and one in memory, where it cannot.
fn folders() -> [TempDir; 2] {
    let program = std::env::current_exe().unwrap();
    let disk = TempDir::new_in(program.parent().unwrap()).unwrap();
    let memory = TempDir::new_in("/dev/shm").unwrap();
    [disk, memory]
}

fn file_of(folder: &Path, size: usize) -> PathBuf {
    let path = folder.join(format!("file-{size}"));
    fs::write(&path, content(0, size)).unwrap();
    path
}

fn engine(mechanism: Mechanism, queue_depth: usize, io_bytes_max: usize) -> (Arc<WaitQueue>, Engine) {
    let wait_queue = Arc::new(WaitQueue::new());
    let options = EngineOptions { mechanism, queue_depth, io_bytes_max, ..EngineOptions::default() };
    let engine = Engine::new(Arc::clone(&wait_queue), options);
    if mechanism == Mechanism::Ring {
        // Where the system has no ring the tests still run, by threads.
        assert!(matches!(engine.mechanism(), ChosenMechanism::Ring | ChosenMechanism::Fallback(_)));
    }
    (wait_queue, engine)
}

const MECHANISMS: [Mechanism; 2] = [Mechanism::Ring, Mechanism::Threads];

fn check(wait_queue: &Arc<WaitQueue>, file: &LocalFile, size: usize, page: u64, pages: u32) {
    let (fill, request) = Request::new(wait_queue, page, pages);
    file.submit(vec![fill]);
    let got = request.wait(file).unwrap();
    let wanted = (size as u64).saturating_sub(page * 4096).min(u64::from(pages) * 4096);
    assert_eq!(got, content(page * 4096, wanted as usize), "{size} bytes, {pages} pages from page {page}");
}

#[test]
fn files_of_every_size_are_read_to_their_end() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 8, 64 << 10);
            for size in SIZES {
                let file = engine.open(file_of(folder.path(), size)).unwrap();
                assert_eq!(file.attributes().unwrap().size, size as u64);
                for (page, pages) in [(0, 1), (0, 2), (1, 1), (0, 300), (3, 40), (200, 100), (5000, 1)] {
                    check(&wait_queue, &file, size, page, pages);
                }
            }
        }
    }
}

#[test]
fn a_disk_file_is_read_directly_where_the_file_system_says_so() {
    let [disk, memory] = folders();
    let (_, engine) = engine(Mechanism::Ring, 8, 64 << 10);
    assert_eq!(engine.open(file_of(memory.path(), 4096)).unwrap().way(), IoMode::Buffered);
    let path = file_of(disk.path(), 4096);
    let stat = rustix::fs::statx(
        rustix::fs::CWD,
        &path,
        rustix::fs::AtFlags::empty(),
        rustix::fs::StatxFlags::from_bits_retain(0x2000),
    )
    .unwrap();
    let says = stat.stx_mask & 0x2000 != 0 && (1..=4096).contains(&stat.stx_dio_offset_align);
    let wanted = if says { IoMode::Direct } else { IoMode::Buffered };
    assert_eq!(engine.open(path).unwrap().way(), wanted);
}

#[test]
fn a_refused_direct_read_turns_to_the_kernels_cache_for_good() {
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 8, 8192);
        let size = (1 << 20) + 17;
        let file = engine.open(file_of(disk.path(), size)).unwrap();
        if file.way() == IoMode::Buffered {
            return;
        }
        // A buffer that is not aligned is refused by direct I/O; nothing else makes a file system refuse.
        let (fill, request) = Request::new(&wait_queue, 0, 9);
        let run = FillRun { pages: 8, ..fill.run() };
        let crooked = std::ptr::NonNull::new(fill.as_ptr().wrapping_add(1)).unwrap();
        let sink: Arc<dyn FillSink> =
            Arc::new(Crooked(Arc::clone(&request), std::sync::Mutex::new(Some(fill))));
        // SAFETY: eight pages from the second byte of nine; the sink keeps the memory.
        file.submit(vec![unsafe { Fill::new(run, crooked, sink) }]);
        let got = request.wait(&file).unwrap();
        assert_eq!(got[1..], content(0, 8 * 4096));
        assert_eq!(file.way(), IoMode::Buffered);
        check(&wait_queue, &file, size, 0, 300);
    }
}

struct Crooked(Arc<Request>, std::sync::Mutex<Option<Fill>>);
impl FillSink for Crooked {
    fn fill_completed(&self, _: FillRun, result: io::Result<usize>) {
        let fill = self.1.lock().unwrap().take().unwrap();
        fill.complete(result.map(|bytes| bytes + 1));
        assert!(self.0.is_done());
    }
}

#[test]
fn a_block_device_has_a_size_and_an_identity_of_its_own() {
    let Some(device) =
        ["/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0"].iter().find(|d| File::open(d).is_ok())
    else {
        return;
    };
    let (wait_queue, engine) = engine(Mechanism::Auto, 8, 64 << 10);
    let file = engine.open(device).unwrap();
    let attributes = file.attributes().unwrap();
    let sectors = fs::read_to_string(format!("/sys/block/{}/size", &device[5..])).unwrap();
    assert_eq!(attributes.size, sectors.trim().parse::<u64>().unwrap() * 512);
    assert!(!attributes.version.settled, "a device's times say nothing about its bytes");
    let on_it =
        engine.open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap().attributes().unwrap();
    assert_ne!(attributes.identity, on_it.identity);
    if attributes.size >= 1 << 20 {
        let (fill, request) = Request::new(&wait_queue, 0, 2);
        file.submit(vec![fill]);
        assert_eq!(request.wait(&file).unwrap().len(), 8192);
    }
}

#[test]
fn files_that_cannot_be_cached_are_refused_in_words() {
    let [disk, _] = folders();
    let (_, engine) = engine(Mechanism::Auto, 8, 64 << 10);
    let fifo = disk.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(disk.path().join("socket")).unwrap();
    let refusal = |path: &Path| engine.open(path).unwrap_err();
    let kind = |path: &Path| match refusal(path) {
        OpenError::NotAFile { kind } => Some(kind),
        _ => None,
    };
    assert_eq!(kind(&fifo), Some(NotAFileKind::Pipe));
    assert_eq!(kind(&disk.path().join("socket")), Some(NotAFileKind::Socket));
    assert_eq!(kind(Path::new("/dev/null")), Some(NotAFileKind::CharacterDevice));
    assert!(matches!(refusal(disk.path()), OpenError::IsDirectory));
    let missing = disk.path().join("missing");
    assert!(matches!(refusal(&missing), OpenError::Io(e) if e.kind() == io::ErrorKind::NotFound));
    assert!(matches!(refusal(Path::new("/proc/self/stat")), OpenError::PseudoFile { file_system: "procfs" }));
    assert!(matches!(refusal(Path::new("/sys/kernel/mm")), OpenError::IsDirectory));
    for path in ["/proc/version", "/sys/kernel/notes", "/dev/zero"] {
        let words = refusal(Path::new(path)).to_string();
        assert!(words.contains("read it without the cache"), "no remedy in {words:?}");
    }
}

#[test]
fn an_adopted_descriptor_keeps_its_offset_and_flags() {
    let [disk, _] = folders();
    let (wait_queue, engine) = engine(Mechanism::Auto, 8, 64 << 10);
    let path = file_of(disk.path(), 10_000);
    let theirs = File::open(&path).unwrap();
    std::io::Seek::seek(&mut &theirs, std::io::SeekFrom::Start(77)).unwrap();
    let flags = rustix::fs::fcntl_getfl(&theirs).unwrap();
    fs::remove_file(&path).unwrap();
    let file = engine.adopt(OwnedFd::from(theirs.try_clone().unwrap())).unwrap();
    check(&wait_queue, &file, 10_000, 0, 3);
    assert_eq!(std::io::Seek::stream_position(&mut &theirs).unwrap(), 77);
    assert_eq!(rustix::fs::fcntl_getfl(&theirs).unwrap(), flags);
    let pipe = std::io::pipe().unwrap().0;
    assert!(matches!(
        engine.adopt(OwnedFd::from(pipe)),
        Err(OpenError::NotAFile { kind: NotAFileKind::Pipe })
    ));
}

#[test]
fn two_opens_agree_on_identity_and_a_successor_differs() {
    let [disk, _] = folders();
    let (_, engine) = engine(Mechanism::Auto, 8, 64 << 10);
    let path = file_of(disk.path(), 100);
    let first = engine.open(&path).unwrap().attributes().unwrap();
    assert_eq!(engine.open(&path).unwrap().attributes().unwrap().identity, first.identity);
    fs::remove_file(&path).unwrap();
    file_of(disk.path(), 100);
    assert_ne!(engine.open(&path).unwrap().attributes().unwrap().identity, first.identity);
}

#[test]
fn a_file_written_just_now_is_not_settled() {
    let [disk, _] = folders();
    let (_, engine) = engine(Mechanism::Auto, 8, 64 << 10);
    let path = file_of(disk.path(), 100);
    let future = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
    File::options().write(true).open(&path).unwrap().set_modified(future).unwrap();
    let file = engine.open(&path).unwrap();
    assert!(!file.attributes().unwrap().version.settled);
}

/// One that has looked at a file whose times step sees every change after that, however soon it comes.
#[test]
fn a_change_after_a_look_at_coarse_times_has_another_time() {
    for folder in &folders() {
        let (_, engine) = engine(Mechanism::Auto, 8, 64 << 10);
        let path = file_of(folder.path(), 8192);
        let (file, writer) = (engine.open(&path).unwrap(), File::options().write(true).open(&path).unwrap());
        let mut seen = file.attributes().unwrap().version;
        if !seen.steps {
            eprintln!("not tested: times of {} do not step before Linux 6.13", path.display());
            continue;
        }
        for n in 0..500 {
            writer.write_all_at(&[n as u8], n).unwrap();
            let now = file.attributes().unwrap().version;
            assert_ne!((now.modified, now.changed), (seen.modified, seen.changed), "write {n}");
            seen = now;
        }
    }
}

#[test]
fn an_empty_file_is_settled() {
    let [disk, _] = folders();
    let (_, engine) = engine(Mechanism::Auto, 8, 64 << 10);
    let path = disk.path().join("empty");
    File::create(&path).unwrap();
    assert!(engine.open(&path).unwrap().attributes().unwrap().version.settled);
}

#[test]
fn many_fills_pass_a_short_queue() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 2, 8192);
            let size = (1 << 20) + 17;
            let file = engine.open(file_of(folder.path(), size)).unwrap();
            let (fills, requests): (Vec<_>, Vec<_>) =
                (0..100).map(|n| Request::new(&wait_queue, n * 3, 1 + n as u32 % 7)).unzip();
            file.submit(fills);
            for (n, request) in requests.iter().enumerate().rev() {
                let from = n as u64 * 3 * 4096;
                let wanted = (size as u64).saturating_sub(from).min((1 + n as u64 % 7) * 4096);
                assert_eq!(request.wait(&file).unwrap(), content(from, wanted as usize));
            }
        }
    }
}

#[test]
fn a_thread_that_waits_only_for_its_own_fill_does_not_hang() {
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 4, 16 << 10);
        let size = (1 << 20) + 17;
        let path = file_of(disk.path(), size);
        let file = engine.open(&path).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (wait_queue, file) = (&wait_queue, &file);
                scope.spawn(move || {
                    for round in 0..150u64 {
                        let page = (thread * 31 + round * 7) % 250;
                        check(wait_queue, file, size, page, 1 + (round % 9) as u32);
                    }
                });
            }
        });
    }
}

#[test]
fn a_follower_is_woken_by_a_submitter_that_does_not_wait() {
    let [disk, _] = folders();
    let (wait_queue, engine) = engine(Mechanism::Ring, 4, 16 << 10);
    let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
    for round in 0..300u64 {
        let (fill, request) = Request::new(&wait_queue, round % 250, 2);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| request.wait(&file).unwrap());
            file.submit(vec![fill]);
            assert_eq!(waiter.join().unwrap(), content(round % 250 * 4096, 8192));
        });
    }
}

#[test]
fn a_file_cut_under_us_ends_early_and_is_not_an_error() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 4, 16 << 10);
            let path = file_of(folder.path(), 1 << 20);
            let file = engine.open(&path).unwrap();
            let other = File::options().write(true).open(&path).unwrap();
            other.set_len(5000).unwrap();
            check(&wait_queue, &file, 5000, 0, 100);
            check(&wait_queue, &file, 5000, 20, 10);
            // And while it is read: the end may be anywhere, the bytes before it are the file's or zeros.
            let is_over = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut size = 5000;
                    while !is_over.load(Ordering::Relaxed) {
                        size = (size * 7 + 1111) % (1 << 20);
                        other.set_len(size).unwrap();
                    }
                });
                for _ in 0..200 {
                    let (fill, request) = Request::new(&wait_queue, 0, 256);
                    file.submit(vec![fill]);
                    let got = request.wait(&file).unwrap();
                    assert!(got.iter().enumerate().all(|(at, &b)| b == byte(at as u64) || b == 0));
                }
                is_over.store(true, Ordering::Relaxed);
            });
        }
    }
}

#[test]
fn a_file_that_grows_is_read_to_its_new_end() {
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 4, 16 << 10);
        let path = file_of(disk.path(), 100);
        let file = engine.open(&path).unwrap();
        check(&wait_queue, &file, 100, 0, 4);
        let other = File::options().write(true).open(&path).unwrap();
        other.write_all_at(&content(100, 9_000), 100).unwrap();
        check(&wait_queue, &file, 9_100, 0, 4);
    }
}

#[test]
fn dropping_an_engine_waits_for_requests_in_flight() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 2, 8192);
            let file = engine.open(file_of(folder.path(), 1 << 20)).unwrap();
            let (fills, requests): (Vec<_>, Vec<_>) =
                (0..50).map(|n| Request::new(&wait_queue, n, 2)).unzip();
            file.submit(fills);
            drop(engine);
            drop(file);
            for (n, request) in requests.iter().enumerate() {
                assert_eq!(request.take().unwrap(), content(n as u64 * 4096, 8192));
            }
        }
    }
}

#[test]
fn draining_an_engine_ends_all_and_leaves_it_usable() {
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 2, 8192);
        let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
        let (fills, requests): (Vec<_>, Vec<_>) = (0..50).map(|n| Request::new(&wait_queue, n, 2)).unzip();
        file.submit(fills);
        engine.drain();
        assert!(requests.iter().all(|request| request.is_done()));
        check(&wait_queue, &file, 1 << 20, 0, 10);
    }
}

#[test]
fn fills_left_to_a_reap_go_with_the_next_caller() {
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 4, 8192);
        let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
        let left = |page: u64| {
            let (fills, requests): (Vec<_>, Vec<_>) =
                (page..page + 6).map(|n| Request::new(&wait_queue, n, 1)).unzip();
            file.submit_with_reap(fills);
            assert!(mechanism == Mechanism::Threads || file.wants_leader());
            requests
        };
        let all_right = |page: u64, requests: &[Arc<Request>]| {
            for (n, request) in (page..).zip(requests) {
                assert_eq!(request.wait(&file).unwrap(), content(n * 4096, 4096));
            }
        };
        // One that waits for them, one that submits, one that only checks, one that drains.
        all_right(0, &left(0));
        let requests = left(10);
        check(&wait_queue, &file, 1 << 20, 100, 1);
        all_right(10, &requests);
        let requests = left(20);
        file.reap(ReapMode::Ready, &mut || false);
        all_right(20, &requests);
        let requests = left(30);
        engine.drain();
        assert!(requests.iter().all(|request| request.is_done()));
        all_right(30, &requests);
    }
}

#[test]
fn a_small_fill_is_made_on_the_readers_thread_and_leaves_nothing_to_do() {
    for mechanism in MECHANISMS {
        for folder in &folders() {
            let (wait_queue, engine) = engine(mechanism, 4, 4 << 20);
            let bytes = (1 << 20) + 700;
            let file = engine.open(file_of(folder.path(), bytes)).unwrap();
            for (page, pages) in [(0, 1), (7, 16), (255, 2), (256, 1), (300, 1)] {
                let (fill, request) = Request::new(&wait_queue, page, pages);
                assert!(file.fills_here(fill.len()));
                file.fill_here(fill);
                assert!(request.is_done() && !file.wants_leader());
                let there = bytes.saturating_sub(page as usize * 4096).min(pages as usize * 4096);
                assert_eq!(request.wait(&file).unwrap(), content(page * 4096, there));
            }
            assert!(!file.fills_here(17 * 4096));
        }
    }
}

/// Readers that submit and wait at once, on few places in the queue, beside some that only check.
#[test]
fn threads_that_submit_and_wait_at_once_share_a_ring_with_others() {
    let [disk, _] = folders();
    let (wait_queue, engine) = engine(Mechanism::Ring, 3, 4096);
    let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4u64)
            .map(|reader| {
                let (wait_queue, file) = (&wait_queue, &file);
                scope.spawn(move || {
                    for round in 0..500 {
                        let page = (reader * 61 + round * 7) % 250;
                        let (fill, request) = Request::new(wait_queue, page, 2);
                        match round % 3 {
                            0 => file.submit(vec![fill]),
                            _ => file.submit_with_reap(vec![fill]),
                        }
                        assert_eq!(request.wait(file).unwrap(), content(page * 4096, 8192));
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                file.reap(ReapMode::Ready, &mut || false);
                std::thread::yield_now();
            }
        });
        let ended: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
    });
}

#[test]
fn a_completion_may_drop_the_engine() {
    struct Last(std::sync::Mutex<Option<(Fill, LocalFile)>>);
    impl FillSink for Last {
        fn fill_completed(&self, _: FillRun, result: io::Result<usize>) {
            let (fill, file) = self.0.lock().unwrap().take().unwrap();
            drop(file);
            fill.complete(result);
        }
    }
    let [disk, _] = folders();
    let (wait_queue, engine) = engine(Mechanism::Threads, 2, 8192);
    let file = engine.open(file_of(disk.path(), 8192)).unwrap();
    let (inner, request) = Request::new(&wait_queue, 0, 2);
    let (run, buffer) = (inner.run(), std::ptr::NonNull::new(inner.as_ptr()).unwrap());
    let sink = Arc::new(Last(std::sync::Mutex::new(None)));
    // SAFETY: the memory is the inner fill's, which the sink keeps.
    let fill = unsafe { Fill::new(run, buffer, Arc::clone(&sink) as Arc<dyn FillSink>) };
    let submitter = engine.open(file_of(disk.path(), 8192)).unwrap();
    *sink.0.lock().unwrap() = Some((inner, file));
    drop(engine);
    submitter.submit(vec![fill]);
    drop(submitter);
    wait_queue.sleep(&mut || request.is_done());
    assert_eq!(request.take().unwrap(), content(0, 8192));
}

#[test]
fn a_sink_that_panics_takes_no_other_fill_with_it() {
    struct Flawed(std::sync::Mutex<Option<Fill>>);
    impl FillSink for Flawed {
        fn fill_completed(&self, _: FillRun, result: io::Result<usize>) {
            self.0.lock().unwrap().take().unwrap().complete(result);
            panic!("a sink that panics");
        }
    }
    let flawed = |inner: Fill| {
        let (run, buffer) = (inner.run(), std::ptr::NonNull::new(inner.as_ptr()).unwrap());
        let sink = Arc::new(Flawed(std::sync::Mutex::new(Some(inner))));
        // SAFETY: the memory is the inner fill's, which the sink keeps.
        unsafe { Fill::new(run, buffer, sink) }
    };
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 32, 8192);
        let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
        let (fills, requests): (Vec<_>, Vec<_>) = (0..20).map(|n| Request::new(&wait_queue, n, 2)).unzip();
        let fills = fills.into_iter().enumerate();
        let fills = fills.map(|(n, fill)| if n % 9 == 0 { flawed(fill) } else { fill }).collect();
        file.submit(fills);
        engine.drain();
        for (n, request) in requests.iter().enumerate() {
            assert_eq!(request.take().unwrap(), content(n as u64 * 4096, 8192));
        }
        check(&wait_queue, &file, 1 << 20, 100, 10);
    }
}

#[test]
fn a_leader_that_panics_leaves_its_seat() {
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 4, 8192);
        let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
        let (fill, request) = Request::new(&wait_queue, 3, 200);
        file.submit(vec![fill]);
        let leader = std::thread::scope(|scope| {
            scope.spawn(|| file.reap(ReapMode::Wait, &mut || panic!("a leader that panics"))).join()
        });
        assert_eq!(leader.is_err(), matches!(engine.mechanism(), ChosenMechanism::Ring));
        assert_eq!(request.wait(&file).unwrap(), content(3 * 4096, 200 * 4096));
    }
}

#[test]
fn signals_cost_a_reader_nothing_but_time() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing, and the signal is used only here. Without SA_RESTART, so that system calls
    // are interrupted.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        assert_eq!(libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()), 0);
    }
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 2, 8192);
        let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
        let is_done = std::sync::atomic::AtomicBool::new(false);
        let reader = std::sync::OnceLock::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: it asks for a number.
                reader.set(unsafe { libc::pthread_self() }).unwrap();
                (0..100).for_each(|page| check(&wait_queue, &file, 1 << 20, page, 100));
                is_done.store(true, Ordering::Relaxed);
                // The number is a thread's until the main thread has seen that the reader is done.
                while is_done.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
            });
            let reader = *reader.wait();
            while !is_done.load(Ordering::Relaxed) {
                // SAFETY: the thread is there: it waits for this one.
                unsafe { libc::pthread_kill(reader, libc::SIGUSR2) };
                std::thread::sleep(std::time::Duration::from_micros(20));
            }
            is_done.store(false, Ordering::Relaxed);
        });
    }
}

#[derive(Debug)]
struct Stepwise {
    size: u64,
    calls: AtomicU64,
}

impl ReadAt for Stepwise {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match (call % 5, position) {
            (0, _) => return Err(io::ErrorKind::Interrupted.into()),
            (_, 40_960..45_056) => return Err(io::Error::other("a bad spot")),
            (_, 81_920..86_016) => panic!("a source that panics"),
            _ => {}
        }
        let len =
            self.size.saturating_sub(position).min(buffer.len() as u64).min(1 + call * 777 % 5000) as usize;
        buffer[..len].copy_from_slice(&content(position, len));
        Ok(len)
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let identity = Identity { device: u64::MAX - 7, inode: 1, born: 0 };
        Ok(Attributes {
            identity,
            version: Version { modified: 0, changed: 0, settled: true, steps: true },
            size: self.size,
        })
    }
}

#[test]
fn a_users_source_may_fall_short_fail_and_panic() {
    let (wait_queue, engine) = engine(Mechanism::Auto, 8, 64 << 10);
    let source = engine.serve(Stepwise { size: 200_000, calls: AtomicU64::new(0) });
    let (fills, requests): (Vec<_>, Vec<_>) = (0..60).map(|page| Request::new(&wait_queue, page, 1)).unzip();
    source.submit(fills);
    for (page, request) in requests.iter().enumerate() {
        let outcome = request.wait(&source);
        match page {
            10 => assert_eq!(outcome.unwrap_err().to_string(), "a bad spot"),
            20 => assert_eq!(outcome.unwrap_err().to_string(), "the source panicked"),
            _ => {
                let wanted = 200_000usize.saturating_sub(page * 4096).min(4096);
                assert_eq!(outcome.unwrap(), content(page as u64 * 4096, wanted));
            }
        }
    }
}

#[test]
fn a_memory_file_shows_the_bytes_it_has_now() {
    let wait_queue = Arc::new(WaitQueue::new());
    let file = MemoryFile::new(content(0, 10_000));
    let before = file.attributes().unwrap();
    let read = |page, pages| {
        let (fill, request) = Request::new(&wait_queue, page, pages);
        file.submit(vec![fill]);
        request.take().unwrap()
    };
    assert_eq!(read(0, 4), content(0, 10_000));
    assert_eq!(read(2, 1), content(8192, 1808));
    assert!(read(3, 1).is_empty());
    file.set_size(12_288);
    assert_eq!(read(2, 1), [content(8192, 1808), vec![0; 2288]].concat());
    let after = file.attributes().unwrap();
    assert_eq!((before.identity, after.size), (after.identity, 12_288));
    assert_ne!(before.version, after.version);
    assert_eq!((file.reads(), file.read_bytes()), (4, 10_000 + 1808 + 4096));
    assert_ne!(MemoryFile::new([]).attributes().unwrap().identity, after.identity);
}

#[test]
fn the_environment_decides_what_is_left_open() {
    if let Some(name) = role() {
        let (_, engine) = engine(Mechanism::Auto, 8, 64 << 10);
        let chosen = engine.mechanism();
        assert!(chosen.name() == name || matches!(chosen, ChosenMechanism::Fallback(_)), "{chosen}");
        let asked = EngineOptions { mechanism: Mechanism::Threads, ..EngineOptions::default() };
        assert_eq!(Engine::new(Arc::default(), asked).mechanism().name(), "threads", "only Auto is open");
        return;
    }
    for (requested, name) in [("threads", "threads"), ("ring", "io_uring"), ("nonsense", "io_uring")] {
        in_a_process_of_its_own("the_environment_decides_what_is_left_open", name, Some(requested));
    }
}

#[derive(Default)]
struct Outcome(std::sync::Mutex<Option<io::Result<usize>>>, Arc<WaitQueue>);
impl FillSink for Outcome {
    fn fill_completed(&self, _: FillRun, result: io::Result<usize>) {
        assert!(self.0.lock().unwrap().replace(result).is_none(), "a fill ends once");
        self.1.wake();
    }
}

#[test]
fn an_error_of_the_system_is_an_error_of_the_whole_fill() {
    for mechanism in MECHANISMS {
        for folder in folders() {
            let (wait_queue, engine) = engine(mechanism, 2, 4096);
            let size = 1 << 20;
            let file = engine.open(file_of(folder.path(), size)).unwrap();
            // SAFETY: a new mapping that disturbs nothing; it is the test's alone.
            let memory = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                libc::mmap(std::ptr::null_mut(), 8 * 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
            };
            assert_ne!(memory, libc::MAP_FAILED);
            // SAFETY: inside the mapping; from its fifth page on nothing may be written.
            let hidden = unsafe { libc::mprotect(memory.byte_add(4 * 4096), 4 * 4096, libc::PROT_NONE) };
            assert_eq!(hidden, 0);
            let sink = Arc::new(Outcome(std::sync::Mutex::default(), Arc::clone(&wait_queue)));
            let run = FillRun { index: PageIndex(3), frame: Frame(1), pages: 8 };
            let buffer = std::ptr::NonNull::new(memory.cast()).unwrap();
            // SAFETY: a fill that fails is written by the system only, which looks before it writes.
            file.submit(vec![unsafe { Fill::new(run, buffer, Arc::clone(&sink) as Arc<dyn FillSink>) }]);
            wait_queue.wait(&file, &mut || sink.0.lock().unwrap().is_some());
            let outcome = sink.0.lock().unwrap().take().unwrap();
            assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EFAULT));
            // The engine and the file are none the worse.
            check(&wait_queue, &file, size, 0, 256);
            // SAFETY: the mapping is not used any more.
            unsafe { libc::munmap(memory, 8 * 4096) };
        }
    }
}

/// A leader gets its own completion and returns. Its follower, asleep, must take over, for no other thread will.
fn check_takeover(wait_queue: &Arc<WaitQueue>, backend: &dyn Backend) {
    let (fill, request) = Request::new(wait_queue, 0, 200);
    backend.submit(vec![fill]);
    let looks = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let mut follower = None;
        backend.reap(ReapMode::Wait, &mut || {
            // As the leader: the follower starts, finds the lead taken and falls asleep. Its first look is before
            // it tries to lead, the second before it sleeps.
            follower.get_or_insert_with(|| {
                scope.spawn(|| {
                    wait_queue.wait(backend, &mut || {
                        looks.fetch_add(1, Ordering::Relaxed);
                        request.is_done()
                    });
                })
            });
            while looks.load(Ordering::Relaxed) < 2 {
                std::thread::yield_now();
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
            true
        });
        assert!(follower.is_some(), "a leader that is done goes, though more is in flight");
    });
    assert!(request.take().is_ok());
}

#[test]
fn a_follower_takes_over_when_the_leader_goes() {
    let [disk, _] = folders();
    let (wait_queue, engine) = engine(Mechanism::Ring, 2, 4096);
    let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
    let device =
        SimulatedBackend::of_memory(Arc::new(MemoryFile::new(content(0, 1 << 20))), Faults::default());
    device.attach(&wait_queue);
    for _ in 0..20 {
        check_takeover(&wait_queue, &device);
        if engine.mechanism().name() == "io_uring" {
            check_takeover(&wait_queue, &file);
        }
    }
}

/// The kernel cancels some of a thread's requests when the thread exits.
#[test]
fn a_submitter_may_exit_before_its_reads_have_ended() {
    for folder in folders() {
        let (wait_queue, engine) = engine(Mechanism::Ring, 16, 16 << 10);
        let size = (1 << 20) + 17;
        let file = engine.open(file_of(folder.path(), size)).unwrap();
        for round in 0..100u64 {
            let (fills, requests): (Vec<_>, Vec<_>) =
                (0..8).map(|n| Request::new(&wait_queue, (round * 8 + n) % 250, 4)).unzip();
            std::thread::scope(|scope| scope.spawn(|| file.submit(fills)).join().unwrap());
            for (n, request) in requests.iter().enumerate() {
                let page = (round * 8 + n as u64) % 250;
                assert_eq!(request.wait(&file).unwrap(), content(page * 4096, 4 * 4096));
            }
        }
    }
}

/// Runs this very test once more in a process of its own, with `role` to be found by [`role`].
fn in_a_process_of_its_own(test: &str, role: &str, requested: Option<&str>) {
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", &format!("internals::backend::tests::{test}")])
        .env("QUINION_TEST_ROLE", role)
        .envs(requested.map(|requested| ("QUINION_IO", requested)))
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{test} as {role}: {out}{err}");
    assert!(out.contains("1 passed"), "{test} is this test's name");
}

fn role() -> Option<String> {
    std::env::var("QUINION_TEST_ROLE").ok()
}

/// From now on `call` is refused with `EPERM` to this thread and those it starts.
fn forbid(call: libc::c_long) {
    let statement = |code: u32, k: u32, jump_true, jump_false| libc::sock_filter {
        code: code as u16,
        jt: jump_true,
        jf: jump_false,
        k,
    };
    let mut program = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the call, which copies it; it forbids one system call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

#[test]
fn a_sandbox_without_io_uring_gets_threads_and_a_reason() {
    if role().is_none() {
        return in_a_process_of_its_own(
            "a_sandbox_without_io_uring_gets_threads_and_a_reason",
            "sandboxed",
            None,
        );
    }
    forbid(libc::SYS_io_uring_setup);
    let [disk, _] = folders();
    let (wait_queue, engine) = engine(Mechanism::Ring, 8, 64 << 10);
    assert_eq!(engine.mechanism().name(), "threads");
    let words = engine.mechanism().to_string();
    assert!(words.contains("not permitted") && words.contains("sandbox"), "{words}");
    let file = engine.open(file_of(disk.path(), 10_000)).unwrap();
    check(&wait_queue, &file, 10_000, 0, 3);
}

#[test]
fn a_sandbox_that_takes_the_ring_away_costs_some_reads_and_no_more() {
    if role().is_none() {
        let test = "a_sandbox_that_takes_the_ring_away_costs_some_reads_and_no_more";
        return in_a_process_of_its_own(test, "sandboxed", None);
    }
    let [disk, _] = folders();
    let (wait_queue, engine) = engine(Mechanism::Ring, 4, 16 << 10);
    if engine.mechanism().name() == "threads" {
        return;
    }
    let size = 1 << 20;
    let file = engine.open(file_of(disk.path(), size)).unwrap();
    let (before, requests): (Vec<_>, Vec<_>) = (0..10).map(|n| Request::new(&wait_queue, n, 8)).unzip();
    file.submit(before);
    forbid(libc::SYS_io_uring_enter);
    // Requests that the kernel has are completed; those that it was not given fail, once.
    for (n, request) in requests.iter().enumerate() {
        match request.wait(&file) {
            Ok(got) => assert_eq!(got, content(n as u64 * 4096, 8 * 4096)),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM)),
        }
    }
    let (fill, request) = Request::new(&wait_queue, 0, 1);
    file.submit(vec![fill]);
    let _ = request.wait(&file);
    check(&wait_queue, &file, size, 0, 256);
}

#[test]
fn a_fork_leaves_its_parents_engine_alone() {
    if role().is_none() {
        return in_a_process_of_its_own("a_fork_leaves_its_parents_engine_alone", "parent", None);
    }
    for mechanism in MECHANISMS {
        let [disk, _] = folders();
        let (wait_queue, engine) = engine(mechanism, 2, 8192);
        let file = engine.open(file_of(disk.path(), 1 << 20)).unwrap();
        let (fills, requests): (Vec<_>, Vec<_>) = (0..20).map(|n| Request::new(&wait_queue, n, 4)).unzip();
        file.submit(fills);
        // SAFETY: the child drops the engine, which takes no lock and allocates nothing there, and exits.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            drop((engine, file));
            // SAFETY: ends the child without running the test harness's end.
            unsafe { libc::_exit(17) };
        }
        for (n, request) in requests.iter().enumerate() {
            assert_eq!(request.wait(&file).unwrap(), content(n as u64 * 4096, 4 * 4096));
        }
        let mut status = 0;
        // SAFETY: waits for this process's child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 17);
    }
}

#[test]
#[should_panic(expected = "the cache whose engine opened it")]
fn a_file_of_another_engine_is_refused() {
    let [disk, _] = folders();
    let (_, engine) = engine(Mechanism::Ring, 2, 8192);
    if engine.mechanism().name() == "threads" {
        panic!("threads wake any room, the cache whose engine opened it included");
    }
    engine.open(file_of(disk.path(), 1)).unwrap().attach(&Arc::new(WaitQueue::new()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_fills_deliver_the_files_bytes(
        size in 0usize..200_000,
        fills in prop::collection::vec((0u64..60, 1u32..20), 1..20),
        queue_depth in 1usize..5,
        io_pages in 1usize..6,
        by_ring: bool, on_disk: bool,
    ) {
        let mechanism = if by_ring { Mechanism::Ring } else { Mechanism::Threads };
        let folder = &folders()[usize::from(!on_disk)];
        let (wait_queue, engine) = engine(mechanism, queue_depth, io_pages * 4096);
        let file = engine.open(file_of(folder.path(), size)).unwrap();
        let (given, requests): (Vec<_>, Vec<_>) =
            fills.iter().map(|&(page, pages)| Request::new(&wait_queue, page, pages)).unzip();
        file.submit(given);
        for (&(page, pages), request) in fills.iter().zip(&requests).rev() {
            let wanted = (size as u64).saturating_sub(page * 4096).min(u64::from(pages) * 4096);
            prop_assert_eq!(request.wait(&file).unwrap(), content(page * 4096, wanted as usize));
        }
    }
}

/// A writer that appends a little again and again finds the last page in the kernel's cache, and nothing stays of it.
#[test]
fn one_page_of_a_written_file_stays_in_the_kernels_cache_while_it_is_open() {
    let folder = &folders()[0];
    let path = folder.path().join("appended");
    let cache = crate::Cache::builder().memory(crate::Cache::MEMORY_MIN).build().unwrap();
    let file = cache.open_with(&path, crate::OpenOptions::new().write(true).create(true)).unwrap();
    if !file.is_direct() {
        return println!("SKIPPED: files beside the test program are not written directly");
    }
    let held = || {
        let kernels = File::open(&path).unwrap();
        crate::sys::io::kernel_holds(kernels.as_fd(), 1 << 20).unwrap()
    };
    let (piece, mut written, mut found) = (content(0, 100), 0, 0);
    while written < 3 * PAGE_SIZE {
        file.append(&piece).unwrap();
        file.sync_data().unwrap();
        written += piece.len();
        let held = held();
        assert!(held.pages <= 1 && held.unwritten == 0, "{held:?} at {written}");
        found += held.pages;
    }
    // The kernel may take it at any time, but not each time.
    assert!(found > 0, "nothing stays");
    assert_eq!(fs::read(&path).unwrap(), piece.repeat(written / piece.len()));
    // Pages that this made the kernel read go again.
    let kernels = File::open(&path).unwrap();
    rustix::fs::fadvise(kernels, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    file.append(&piece).unwrap();
    file.sync_data().unwrap();
    drop((file, cache));
    assert_eq!(held().pages, 0, "the end of the backend takes it along");
}

#[test]
fn an_identity_of_a_digest_is_of_no_device_and_tells_digests_apart() {
    use super::Identity;
    let digest: [u8; 24] = std::array::from_fn(|at| at as u8 + 1);
    let of_digest = Identity::of_digest(digest);
    assert_eq!(of_digest, Identity::of_digest(digest));
    // The kernel has 12 bits for the major number and 20 for the minor one.
    assert!(
        of_digest.device > rustix::fs::makedev(0xfff, 0xf_ffff),
        "no device of the system has its number"
    );
    for byte in 0..24 {
        for bit in 0..8 {
            let mut other = digest;
            other[byte] ^= 1 << bit;
            let is_lost = byte == 7 && bit == 7; // the bit that says that it is of a digest
            assert_eq!(Identity::of_digest(other) == of_digest, is_lost, "byte {byte}, bit {bit}");
        }
    }
}
