//! Async file: tokio's traits on a file of the cache give what a plain file gives.
//!
//! The runtime has one thread, so that a poll that blocks for another task's work is a test that hangs.

use std::future::{Future, poll_fn};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use quinion::backend::MemoryFile;
use quinion::{AsyncFile, Cache, OpenOptions};
use tokio::io::{AsyncReadExt, AsyncSeek, AsyncSeekExt, AsyncWrite, AsyncWriteExt};

use quinion_testing::device::{Device, verify};
use quinion_testing::doubles::{FailureCount, Faults, SimulatedBackend};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime of one thread")
}

fn small() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).build().expect("a small cache")
}

fn poll_once<F: Future>(future: &mut Pin<&mut F>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_file_is_read_to_its_end_while_another_task_runs() {
    let (cache, device) = (small(), Device::new(3 * 4096 + 77));
    let file = cache.open_backend(device.clone() as _).expect("the device opens");
    device.hold();
    let bytes = runtime().block_on(async {
        let mut reader = AsyncFile::from(file);
        let read = async {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).await.map(|_| bytes)
        };
        // Runs only if the reader's polls return while the device says nothing.
        let release = async { device.release() };
        let (bytes, ()) = tokio::join!(read, release);
        bytes.expect("it is readable")
    });
    assert_eq!(bytes.len(), 3 * 4096 + 77);
    verify(&bytes, &device, 0);
}

/// 1. A read finds its page missing, the task waits for it, and reads it then.
/// 2. That counts as a miss and a hit, or as three reads: no hit ratio is below a half.
#[test]
fn a_read_that_waits_counts_as_one_miss() {
    const PAGES: u64 = 8;
    let (cache, device) = (small(), Device::new(PAGES * 4096));
    let file = cache.open_backend(device as _).expect("the device opens");
    file.advise(quinion::Hint::Random).expect("advice is taken");
    let before = cache.stats();
    runtime().block_on(async {
        let mut reader = AsyncFile::from(file);
        for _ in 0..PAGES {
            reader.read_exact(&mut [0; 4096]).await.expect("it is readable");
        }
    });
    let counted = cache.stats().since(&before);
    assert_eq!((counted.reads, counted.hits, counted.misses), (PAGES, 0, PAGES));
    assert_eq!(counted.read_bytes, PAGES * 4096);
}

const TIME_MAX: Duration = Duration::from_secs(60);

/// All bytes of `file` from its position on, read by another thread. `None`: the read does not end.
fn read_to_end(file: quinion::File) -> Option<Vec<u8>> {
    let (sender, read) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = runtime().block_on(AsyncFile::from(file).read_to_end(&mut bytes)).map(|_| bytes);
        sender.send(read.expect("it is readable"))
    });
    read.recv_timeout(TIME_MAX).ok()
}

/// 1. A read on an uncached handle waits for the file's last page, by a read of one byte. That is all of the page.
/// 2. The stream has passed the page, so it goes. The read finds it missing, and waits for it: for ever.
#[test]
fn the_last_byte_of_an_uncached_file_is_read() {
    for size in [1, 4097, 10] {
        let (cache, device) = (small(), Device::new(size));
        let file = cache.open_backend(device.clone() as _).expect("the device opens");
        file.set_uncached(true).expect("the device has uncached reads");
        file.advise(quinion::Hint::Random).expect("advice is taken");
        device.hold();
        let (ends, answering) = (Arc::new(AtomicBool::new(false)), device.clone());
        let over = ends.clone();
        // It answers a little later each time, never inside the call that asks.
        let answers = std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
                answering.release();
                answering.hold();
            }
            answering.release();
        });
        let bytes = read_to_end(file);
        ends.store(true, Ordering::Relaxed);
        answers.join().expect("the answers end");
        let bytes = bytes.expect("the read ends");
        assert_eq!(bytes.len() as u64, size);
        verify(&bytes, &device, 0);
        assert!(device.reads().len() <= 4, "{:?}", device.reads());
    }
}

/// 1. Another process writes a file without end.
/// 2. A reader whose handle looks at the file for each read waits for a page, which the next look forgets, for ever.
#[test]
fn a_file_that_is_written_without_end_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("changing");
    std::fs::write(&path, vec![1; 64 << 10]).expect("it is written");
    let cache = small();
    let every = quinion::Coherence::CheckEvery(Duration::ZERO);
    let open = || cache.open_with(&path, OpenOptions::new().coherence(every)).expect("it opens");
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let writer = std::fs::OpenOptions::new().write(true).open(&path).expect("it opens");
            while !ends.load(Ordering::Relaxed) {
                writer.write_all_at(&[1], 5).expect("it is written");
            }
        });
        let (plain, uncached) = (open(), open());
        uncached.set_uncached(true).expect("files have uncached reads");
        let read = [plain, uncached].map(read_to_end);
        ends.store(true, Ordering::Relaxed);
        assert!(
            read.iter().all(|read| read.as_ref().is_some_and(|bytes| *bytes == [1; 64 << 10])),
            "{read:?}"
        );
    });
}

/// 1. A read waits for a page, and is dropped; the page arrives. Then another process writes the file.
/// 2. The next read takes the page for the one that it waits for, and gives bytes of before the write.
#[test]
fn a_read_that_was_dropped_leaves_no_bytes_to_a_later_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("changing");
    std::fs::write(&path, [1; 4096]).expect("it is written");
    let cache = small();
    let every = quinion::Coherence::CheckEvery(Duration::ZERO);
    let file = cache.open_with(&path, OpenOptions::new().coherence(every)).expect("it opens");
    let mut reader = AsyncFile::from(file.clone());
    let mut first = [0; 100];
    {
        let read = std::pin::pin!(reader.read(&mut first));
        let mut read = read;
        if poll_once(&mut read.as_mut()).is_ready() {
            return; // the disk was faster than the poll: there is nothing to be left
        }
    }
    let begun = Instant::now();
    while file.cached_pages() == 0 {
        assert!(begun.elapsed() < TIME_MAX, "the page arrives");
        std::thread::yield_now();
    }
    std::fs::write(&path, [2; 4096]).expect("it is written");
    std::thread::sleep(Duration::from_millis(1500)); // longer than an answer is taken for one of now
    let mut later = [0; 100];
    let read = runtime().block_on(reader.read(&mut later)).expect("it is readable");
    assert_eq!(&later[..read], [2; 100]);
    assert_eq!(read, 100);
}

/// Also at another position: that is not the page that was waited for.
#[test]
fn a_read_that_was_dropped_does_not_make_one_elsewhere_wait() {
    let (cache, device) = (small(), Device::new(40 * 4096));
    let file = cache.open_backend(device.clone() as _).expect("the device opens");
    file.advise(quinion::Hint::Random).expect("advice is taken");
    file.read_exact_at(&mut [0; 4096], 20 * 4096).expect("it is readable");
    device.hold();
    let mut reader = AsyncFile::from(file);
    {
        let mut buffer = [0; 100];
        let mut read = std::pin::pin!(reader.read(&mut buffer));
        assert!(poll_once(&mut read.as_mut()).is_pending());
    }
    (&mut reader.get_ref()).seek(SeekFrom::Start(20 * 4096)).expect("there is such a place");
    let mut buffer = [0; 100];
    {
        let mut read = std::pin::pin!(reader.read(&mut buffer));
        assert!(matches!(poll_once(&mut read.as_mut()), Poll::Ready(Ok(100))));
    }
    verify(&buffer, &device, 20 * 4096);
    device.release();
}

#[test]
fn appended_bytes_stand_at_the_end_and_their_error_comes_with_the_flush() {
    let (cache, folder) = (small(), tempfile::tempdir().expect("a folder"));
    let path = folder.path().join("log");
    let log = cache.open_with(&path, OpenOptions::new().append(true).create(true)).expect("it opens");
    let read_only = cache.open(&path).expect("it opens");
    runtime().block_on(async {
        let mut log = AsyncFile::new(log);
        for line in ["one\n", "two\n"] {
            log.write_all(line.as_bytes()).await.expect("it is appended");
        }
        log.flush().await.expect("it is written");
        assert_eq!(log.stream_position().await.expect("it has one"), 8);
        log.get_ref().sync_all_async().await.expect("it is durable");
        let mut refused = AsyncFile::new(read_only);
        let error = match refused.write_all(b"x").await {
            Ok(()) => refused.flush().await.expect_err("it reads only"),
            Err(error) => error,
        };
        assert!(error.to_string().contains("for reading only"), "{error}");
    });
    assert_eq!(std::fs::read_to_string(&path).expect("it is there"), "one\ntwo\n");
}

/// 1 bytes are handed over to be appended. 2 A seek is begun, and nothing was waited for. 3 Both end: the file is where
/// the seek said, which was asked for last.
#[test]
fn a_seek_that_is_begun_while_bytes_are_appended_is_made_behind_them() {
    let (cache, folder) = (small(), tempfile::tempdir().expect("a folder"));
    let path = folder.path().join("log");
    let seeks = [(SeekFrom::Start(2), 2), (SeekFrom::Current(-1), 9), (SeekFrom::End(-3), 12)];
    for (to, place) in seeks {
        let log = cache.open_with(&path, OpenOptions::new().append(true).create(true)).expect("it opens");
        let mut log = AsyncFile::new(log);
        runtime().block_on(async {
            let written = poll_fn(|context| Pin::new(&mut log).poll_write(context, b"bytes")).await;
            assert_eq!(written.expect("it is handed over"), 5);
            Pin::new(&mut log).start_seek(to).expect("it is begun");
            let position = poll_fn(|context| Pin::new(&mut log).poll_complete(context)).await;
            assert_eq!(position.expect("it is inside"), place, "{to:?}");
            assert_eq!(log.stream_position().await.expect("it has one"), place, "{to:?}");
        });
    }
}

fn for_any_thread<F: Send>(future: F) -> F {
    future
}

/// 1 bytes are handed over; the page that they change a part of is awaited. 2 A sync is begun. 3 The page comes.
#[test]
fn a_sync_waits_for_bytes_that_were_handed_over() {
    let (cache, memory) = (small(), Arc::new(MemoryFile::new(vec![1; 8192])));
    let device = Arc::new(SimulatedBackend::of_memory(Arc::clone(&memory), Faults::default()));
    let file = cache.open_backend_with(device.clone() as _, OpenOptions::new().write(true));
    let mut file = AsyncFile::new(file.expect("the device opens"));
    device.pause();
    runtime().block_on(async {
        file.seek(SeekFrom::Start(10)).await.expect("it is inside");
        file.write_all(b"bytes").await.expect("they are handed over");
        let other = file.get_ref().clone();
        let mut sync = std::pin::pin!(for_any_thread(file.sync_data()));
        for _ in 0..3 {
            assert!(poll_once(&mut sync).is_pending(), "the bytes are nowhere yet");
            other.sync_data_async().await.expect("nothing is dirty");
        }
        device.resume();
        sync.await.expect("the device takes them");
    });
    let mut around = [0; 7];
    assert_eq!(memory.read_at(&mut around, 9), 7);
    assert_eq!(around, *b"\x01bytes\x01");
}

/// 1 bytes are handed over. 2 A seek is begun behind them. 3 They cannot be written, and the seek ends with that error.
/// 4 Further bytes stand behind the first ones.
#[test]
fn a_seek_behind_a_write_that_fails_is_not_made_later() {
    for to in [SeekFrom::Start(0), SeekFrom::Current(-40), SeekFrom::End(0)] {
        let (cache, memory) = (small(), Arc::new(MemoryFile::new(vec![1; 8192])));
        let device = Arc::new(SimulatedBackend::of_memory(Arc::clone(&memory), Faults::default()));
        let file = cache.open_backend_with(device.clone() as _, OpenOptions::new().write(true));
        let mut file = AsyncFile::new(file.expect("the device opens"));
        device.fail_at(0..8192, FailureCount::Always);
        runtime().block_on(async {
            file.seek(SeekFrom::Start(50)).await.expect("it is inside");
            let written = poll_fn(|context| Pin::new(&mut file).poll_write(context, b"bytes")).await;
            assert_eq!(written.expect("they are handed over"), 5);
            Pin::new(&mut file).start_seek(to).expect("it is begun");
            let ended = poll_fn(|context| Pin::new(&mut file).poll_complete(context)).await;
            ended.expect_err("the page around the bytes cannot be read");
            device.mend();
            file.write_all(b"more").await.expect("it is handed over");
            file.flush().await.expect("the device takes it");
            assert_eq!(file.stream_position().await.expect("it has one"), 59, "{to:?}");
            file.sync_data().await.expect("the device takes it");
        });
        let mut around = [0; 60];
        assert_eq!(memory.read_at(&mut around, 0), 60);
        assert!(around[..55].iter().all(|&byte| byte == 1), "{to:?}: {around:?}");
        assert_eq!(around[55..], *b"more\x01", "{to:?}");
    }
}

/// The end of the file is looked for by a thread, which the next call waits for.
#[test]
fn bytes_behind_a_seek_that_was_only_begun_stand_where_it_leads() {
    let (cache, memory) = (small(), Arc::new(MemoryFile::new(vec![1; 100])));
    let device = Arc::new(SimulatedBackend::of_memory(Arc::clone(&memory), Faults::default()));
    let file = cache.open_backend_with(device as _, OpenOptions::new().write(true));
    let mut file = AsyncFile::new(file.expect("the device opens"));
    runtime().block_on(async {
        Pin::new(&mut file).start_seek(SeekFrom::End(-2)).expect("it is begun");
        let mut two = [0; 2];
        file.read_exact(&mut two).await.expect("the last two");
        assert_eq!(file.stream_position().await.expect("it has one"), 100);
        file.seek(SeekFrom::Start(10)).await.expect("it is inside");
        Pin::new(&mut file).start_seek(SeekFrom::End(-5)).expect("it is begun");
        file.write_all(b"bytes").await.expect("they are handed over");
        assert_eq!(file.stream_position().await.expect("it has one"), 100);
        file.sync_data().await.expect("the device takes them");
    });
    let mut bytes = [0; 100];
    assert_eq!(memory.read_at(&mut bytes, 0), 100);
    assert_eq!((bytes[10], &bytes[95..]), (1, &b"bytes"[..]));
}

/// 1 bytes are handed over. 2 A seek before the start of the file is begun. 3 A sync makes the bytes durable: the seek
/// is no matter of its own. 4 The seek fails, and the position is what it was.
#[test]
fn a_seek_that_cannot_be_made_keeps_no_bytes_from_a_sync_and_leaves_the_position() {
    for to in [SeekFrom::Current(-100), SeekFrom::End(-9000)] {
        let (cache, memory) = (small(), Arc::new(MemoryFile::new(vec![1; 8192])));
        let device = Arc::new(SimulatedBackend::of_memory(Arc::clone(&memory), Faults::default()));
        let file = cache.open_backend_with(device as _, OpenOptions::new().write(true));
        let mut file = AsyncFile::new(file.expect("the device opens"));
        runtime().block_on(async {
            let written = poll_fn(|context| Pin::new(&mut file).poll_write(context, b"bytes")).await;
            assert_eq!(written.expect("they are handed over"), 5);
            Pin::new(&mut file).start_seek(to).expect("it is begun");
            file.sync_data().await.expect("the bytes can be written");
            let ended = poll_fn(|context| Pin::new(&mut file).poll_complete(context)).await;
            let said = ended.expect_err("no byte is there").to_string();
            assert!(said.contains("cannot seek"), "{said}");
            assert_eq!(file.stream_position().await.expect("it has one"), 5, "{to:?}");
        });
        let mut first = [0; 6];
        assert_eq!(memory.read_at(&mut first, 0), 6);
        assert_eq!(first, *b"bytes\x01");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Read(usize),
    Write(usize, u8),
    Seek(u64),
    SeekBack(i64),
    SeekEnd(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..20_000_usize).prop_map(Step::Read),
        (0..20_000_usize, any::<u8>()).prop_map(|(len, byte)| Step::Write(len, byte)),
        (0..60_000_u64).prop_map(Step::Seek),
        (-5_000..5_000_i64).prop_map(Step::SeekBack),
        (-20_000..100_i64).prop_map(Step::SeekEnd),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The twin is a file of the kernel, by std's traits.
    #[test]
    fn random_programs_see_the_bytes_of_a_plain_file(steps in proptest::collection::vec(step(), 1..40)) {
        let (cache, folder) = (small(), tempfile::tempdir().expect("a folder"));
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true);
        let ours = cache.open_with(folder.path().join("ours"), options).expect("it opens");
        let mut twin = tempfile::tempfile().expect("a file");
        runtime().block_on(async {
            let mut ours = AsyncFile::new(ours);
            for step in steps {
                run(&step, &mut ours, &mut twin).await;
            }
            ours.flush().await.expect("what was written could be");
        });
    }
}

async fn run(step: &Step, ours: &mut AsyncFile, twin: &mut std::fs::File) {
    match *step {
        Step::Read(len) => {
            let (mut mine, mut its) = (Vec::new(), Vec::new());
            (&mut *ours).take(len as u64).read_to_end(&mut mine).await.expect("it is readable");
            twin.take(len as u64).read_to_end(&mut its).expect("it is readable");
            assert!(mine == its, "{step:?}: {} and {} bytes, or others", mine.len(), its.len());
        }
        Step::Write(len, byte) => {
            ours.write_all(&vec![byte; len]).await.expect("it is writable");
            twin.write_all(&vec![byte; len]).expect("it is writable");
        }
        Step::Seek(to) => seek(SeekFrom::Start(to), ours, twin).await,
        Step::SeekBack(by) => seek(SeekFrom::Current(by), ours, twin).await,
        Step::SeekEnd(by) => seek(SeekFrom::End(by), ours, twin).await,
    }
    let positions =
        (ours.stream_position().await.expect("it has one"), twin.stream_position().expect("it has one"));
    assert_eq!(positions.0, positions.1, "{step:?}");
}

async fn seek(to: SeekFrom, ours: &mut AsyncFile, twin: &mut std::fs::File) {
    // A write may be on its way, and tells its error here.
    ours.flush().await.expect("what was written could be");
    let (mine, its) = (ours.seek(to).await, twin.seek(to));
    match its {
        Ok(position) => assert_eq!(mine.expect("the twin can"), position, "{to:?}"),
        Err(_) => {
            mine.expect_err("the twin cannot");
            // Where it is then, std does not say.
            seek_to_start(ours, twin).await;
        }
    }
}

async fn seek_to_start(ours: &mut AsyncFile, twin: &mut std::fs::File) {
    ours.seek(SeekFrom::Start(0)).await.expect("the start is there");
    twin.seek(SeekFrom::Start(0)).expect("the start is there");
}
