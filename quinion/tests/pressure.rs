//! Pressure: ten thousand futures, and many threads, over a cache that holds a fraction of what they ask for.
//!
//! Most of the futures find no memory when they are first polled, and blocking tasks help them; some are dropped on the
//! way. No read has a thread of its own, no future is woken much more often than it can make progress, and all bytes
//! are right.

use quinion_testing::content;
use quinion_testing::hazard;
use std::future::Future;
use std::io::Write;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake};
use std::thread;
use std::time::Instant;

use quinion::backend::Mechanism;
use quinion::error::Result;
use quinion::{Cache, File, Hint};
use quinion_testing::content::Dice;

const PAGE: u64 = 4096;
const FILE_PAGES: u64 = 16 << 10;

fn content(folder: &tempfile::TempDir) -> PathBuf {
    let path = folder.path().join("content");
    let mut plain = std::fs::File::create(&path).unwrap();
    let mut piece = vec![0; 1 << 20];
    for number in 0..(FILE_PAGES * PAGE) >> 20 {
        content::fill_content(&mut piece, 1, number << 20, 0);
        plain.write_all(&piece).unwrap();
    }
    plain.sync_all().unwrap();
    path
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[derive(Default)]
struct Queue {
    woken: Mutex<Vec<usize>>,
    wakeup: Condvar,
    wakes: AtomicUsize,
}

struct Waker {
    number: usize,
    queue: Arc<Queue>,
}

impl Wake for Waker {
    fn wake(self: Arc<Self>) {
        self.queue.wakes.fetch_add(1, Ordering::Relaxed);
        self.queue.woken.lock().unwrap().push(self.number);
        self.queue.wakeup.notify_one();
    }
}

impl Queue {
    fn next(&self) -> Vec<usize> {
        let mut woken = self.woken.lock().unwrap();
        while woken.is_empty() {
            woken = self.wakeup.wait(woken).unwrap();
        }
        std::mem::take(&mut *woken)
    }
}

struct Task {
    file: File,
    position: u64,
    bytes: usize,
}

impl Task {
    async fn run(self) -> Result<()> {
        let (mut buffer, mut done) = (vec![0; self.bytes], 0);
        while done < self.bytes {
            let bytes = self.file.read_at_async(&mut buffer[done..], self.position + done as u64).await?;
            assert!(bytes > 0, "the file does not end here");
            done += bytes;
        }
        content::verify(&buffer, 1, self.position).unwrap();
        Ok(())
    }
}

type Running = Pin<Box<dyn Future<Output = Result<()>>>>;

/// The memory is for a fraction of the requests, so that blocking tasks run; or for all, so that all wait at a time.
fn ten_thousand_at_once(mechanism: Mechanism, memory: u64) {
    const READS: usize = 10_000;
    let folder = folder();
    let path = content(&folder);
    let cache = Cache::builder().memory(memory).mechanism(mechanism).build().unwrap();
    let file = cache.open(&path).unwrap();
    file.advise(Hint::Random).unwrap();
    let (mut dice, queue) = (Dice::new(7), Arc::new(Queue::default()));
    let begin = Instant::now();
    let mut tasks: Vec<Option<Running>> = Vec::new();
    for _ in 0..READS {
        let position = dice.below((FILE_PAGES - 2) * PAGE);
        let task = Task { file: file.clone(), position, bytes: 1 + dice.below(5000) as usize };
        tasks.push(Some(Box::pin(task.run())));
    }
    queue.woken.lock().unwrap().extend(0..READS);
    let (mut polls, mut open, mut threads) = (0, READS, 0);
    while open > 0 {
        for number in queue.next() {
            let Some(task) = &mut tasks[number] else { continue };
            let waker = Arc::new(Waker { number, queue: Arc::clone(&queue) }).into();
            polls += 1;
            let poll = task.as_mut().poll(&mut Context::from_waker(&waker));
            // Some are dropped: at their first poll, or later.
            let is_dropped = number % 7 == 3 || number % 11 == 5 && polls > READS;
            if let Poll::Ready(outcome) = &poll {
                outcome.as_ref().unwrap();
            }
            if poll.is_ready() || is_dropped {
                tasks[number] = None;
                open -= 1;
            }
            if polls % 1000 == 0 {
                threads = threads.max(hazard::threads("quinion"));
            }
        }
    }
    let wakes = queue.wakes.load(Ordering::Relaxed);
    println!(
        "{mechanism:?}: {READS} futures, {polls} polls, {wakes} wakes, {threads} threads, {:?}",
        begin.elapsed()
    );
    // The pool's four, the one that polls, the one that works in the background, and four for blocking calls.
    assert!(threads <= 10, "{threads} threads: none of them is a request's own");
    assert!(polls <= wakes + READS, "who is polled was woken");
    assert!(wakes <= 8 * READS, "{wakes} wakes for {READS} reads");
    cache.check().unwrap();
}

#[test]
fn ten_thousand_futures_over_a_ring_need_no_thread_each() {
    if hazard::in_a_process_of_its_own("ten_thousand_futures_over_a_ring_need_no_thread_each") {
        ten_thousand_at_once(Mechanism::Ring, 16 << 20);
        ten_thousand_at_once(Mechanism::Ring, 128 << 20);
    }
}

#[test]
fn ten_thousand_futures_over_a_pool_need_no_thread_each() {
    if hazard::in_a_process_of_its_own("ten_thousand_futures_over_a_pool_need_no_thread_each") {
        ten_thousand_at_once(Mechanism::Threads, 16 << 20);
        ten_thousand_at_once(Mechanism::Threads, 128 << 20);
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Files {
    OneForAll,
    OneEach,
}

/// 32 threads read all of one file, or of a 32nd of it each, cold, over and over.
fn many_waiters(mechanism: Mechanism, files: Files) {
    const THREADS: u64 = 32;
    const READS: u64 = 200;
    let folder = folder();
    let path = content(&folder);
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).mechanism(mechanism).build().unwrap();
    let opened: Vec<_> = (0..THREADS)
        .map(|number| {
            let own = folder.path().join(number.to_string());
            if files == Files::OneEach {
                let mut bytes = vec![0; (READS * PAGE) as usize];
                content::fill_content(&mut bytes, 1, 0, 0);
                std::fs::write(&own, bytes).unwrap();
            }
            let file = cache.open(if files == Files::OneForAll { &path } else { &own }).unwrap();
            file.advise(Hint::Random).unwrap();
            file
        })
        .collect();
    let (before, begin) = (hazard::waits(), Instant::now());
    thread::scope(|scope| {
        for (number, file) in opened.iter().enumerate() {
            scope.spawn(move || {
                let mut buffer = [0; 1000];
                for step in 0..READS {
                    let page = match files {
                        Files::OneForAll => (step * 32 + number as u64) * 104_729 % FILE_PAGES,
                        Files::OneEach => step,
                    };
                    let position = page * PAGE + 24;
                    file.read_exact_at(&mut buffer, position).unwrap();
                    content::verify(&buffer, 1, position).unwrap();
                }
            });
        }
    });
    let waits = (hazard::waits() - before) as f64 / (THREADS * READS) as f64;
    println!("{mechanism:?}, {files:?}: {waits:.2} waits a read, {:?}", begin.elapsed());
    assert!(waits < 5.0, "{waits} waits a read: sleepers are woken whom it does not concern");
    cache.check().unwrap();
}

#[test]
fn threads_that_wait_for_a_ring_are_woken_for_their_own_pages() {
    if hazard::in_a_process_of_its_own("threads_that_wait_for_a_ring_are_woken_for_their_own_pages") {
        many_waiters(Mechanism::Ring, Files::OneForAll);
        many_waiters(Mechanism::Ring, Files::OneEach);
    }
}

#[test]
fn threads_that_wait_for_a_pool_are_woken_for_their_own_pages() {
    if hazard::in_a_process_of_its_own("threads_that_wait_for_a_pool_are_woken_for_their_own_pages") {
        many_waiters(Mechanism::Threads, Files::OneForAll);
        many_waiters(Mechanism::Threads, Files::OneEach);
    }
}
