//! Threads: reads by `pread`, where the system refuses a ring.
//!
//! Four threads take requests from one queue, in order. They start with the
//! first request and end with the pool. Completions come by themselves, on
//! these threads; nobody needs to reap.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::sys::read::read_at;

use super::Fill;
use super::file::{Answer, Source};

const THREADS: usize = 4;

#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Rung when a request comes, the pool ends, or the last request has been answered.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(Arc<Source>, Fill)>,
    /// Requests taken and not answered.
    at_work: usize,
    ending: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    pub(super) fn new() -> Self {
        Self { shared: Arc::default(), threads: Mutex::default() }
    }

    pub(super) fn submit(&self, source: &Arc<Source>, fills: Vec<Fill>) {
        self.start();
        self.shared.lock().waiting.extend(fills.into_iter().map(|fill| (Arc::clone(source), fill)));
        self.shared.changed.notify_all();
    }

    /// Waits until every request has been answered.
    pub(super) fn drain(&self) {
        let mut queue = self.shared.lock();
        while !queue.waiting.is_empty() || queue.at_work > 0 {
            queue = self.shared.wait(queue);
        }
    }

    fn start(&self) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        while threads.len() < THREADS {
            let shared = Arc::clone(&self.shared);
            let name = format!("quinion-read-{}", threads.len());
            match std::thread::Builder::new().name(name).spawn(move || work(&shared)) {
                Ok(thread) => threads.push(thread),
                // With no thread at all a request would never be answered; with one, they take turns.
                Err(error) => {
                    assert!(!threads.is_empty(), "no thread can be started to read files with: {error}");
                    return;
                }
            }
        }
    }
}

fn work(shared: &Shared) {
    let mut queue = shared.lock();
    loop {
        if let Some((source, fill)) = queue.waiting.pop_front() {
            queue.at_work += 1;
            drop(queue);
            read(&source, fill);
            queue = shared.lock();
            queue.at_work -= 1;
            shared.changed.notify_all();
        } else if queue.ending {
            return;
        } else {
            queue = shared.wait(queue);
        }
    }
}

fn read(source: &Source, fill: Fill) {
    let mut done = 0;
    let end = loop {
        let (position, len) = (fill.position() + done as u64, fill.len() - done);
        // SAFETY: the rest of the fill's buffer, which is this fill's alone.
        let answer = unsafe { read_at(source.file(), fill.as_ptr().add(done), len, position) };
        match source.judge(answer, done, fill.len()) {
            Answer::Done(bytes) => break Ok(bytes),
            Answer::Failed(error) => break Err(error),
            Answer::Again(so_far) => done = so_far,
        }
    };
    fill.complete(end);
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().ending = true;
        self.shared.changed.notify_all();
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            // The last owner may be a completion on one of these threads: nobody can wait for itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
