//! Desk: where those leave word who wait without a thread, and the one thread that waits for all of them.
//!
//! ```text
//!   future --leave word: wish, waker--> desk <--asked by every wake of the room--: granted? waker.wake()
//!                                         |
//!                                         +--> the poller: leads a backend that has words and no leader;
//!                                              runs errands, which may block
//! ```
//!
//! A **word** is a wish and a waker: whoever wakes the room asks the wish, and
//! if it has come true takes the word away and calls the waker, once. A
//! future may go before that; dropping the word takes it away.
//!
//! Completions of a ring must be fetched by somebody. The **poller** is a
//! thread that starts with the first word of a cache and does that, for all
//! words together, when no waiting reader does. It sleeps while there are
//! none, and ends with the cache. An **errand** is something that a future
//! must not do itself because it may block: the poller does it.
//!
//! Invariants:
//!  1. A waker is called, and what a word holds is dropped, with the desk unlocked: both are strangers' code.
//!  2. Between the look at a wish and the leaving of the word the desk stays locked.
//!  3. While there is a word, `words` is not 0; so every wake of the room comes here.
//!  4. The poller sleeps only after it saw, with the desk locked, that no word's backend wants a leader.
//!
//! Not an invariant: that the wish of a word that was granted is still true when its future looks.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, PoisonError};
use std::task::Waker;

use super::room::{WaitRoom, Wish};
use super::{Backend, Reap};
use crate::sync::lock::{Condvar, Mutex, MutexGuard};
use crate::sys::fork::ForkGuard;

/// Something that may block, done by the poller.
pub type Errand = Box<dyn FnOnce() + Send>;

/// The words of one room, and its poller.
#[derive(Default)]
pub(super) struct Desk {
    book: Mutex<Book>,
    words: AtomicUsize,
    bell: Condvar,
}

#[derive(Default)]
struct Book {
    last: u64,
    words: VecDeque<Word>,
    errands: VecDeque<Errand>,
    poller: Poller,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Poller {
    /// It has not been needed yet.
    #[default]
    None,
    Running,
    /// The room is closed: it ends when nothing is left to do.
    Ending,
}

struct Word {
    number: u64,
    wish: Box<Wish<'static>>,
    backend: Arc<dyn Backend>,
    waker: Waker,
}

/// What the poller does next.
enum Task {
    Lead(Arc<dyn Backend>),
    Run(Errand),
}

/// What became of a wish.
#[derive(Debug)]
pub enum Left {
    /// It is true already; nobody will be woken.
    Granted,
    /// The waker will be called when it has come true, unless this is dropped before.
    Word(WordLeft),
}

/// A word at the desk; dropping it takes it away.
#[derive(Debug)]
pub struct WordLeft {
    room: Arc<WaitRoom>,
    number: u64,
    process: ForkGuard,
}

impl Drop for WordLeft {
    fn drop(&mut self) {
        // In a fork the desk may be locked by a thread that is not there.
        if !self.process.is_forked() {
            drop(self.room.desk().take_away(self.number));
        }
    }
}

impl WaitRoom {
    /// Leaves word for a future: `waker` is called once when `wish` has come true, which is looked at after
    /// every [`WaitRoom::wake`]. `backend` is the one that makes it true; the poller leads it if nobody
    /// else does. Does not wait.
    ///
    /// # Errors
    /// The system has no thread for the poller.
    pub fn leave_word(
        self: &Arc<Self>,
        backend: &Arc<dyn Backend>,
        wish: Box<Wish<'static>>,
        waker: Waker,
    ) -> io::Result<Left> {
        let word = Word { number: 0, wish, backend: Arc::clone(backend), waker };
        let left = self.desk().leave(word)?;
        let Some(number) = left else { return Ok(Left::Granted) };
        let word = WordLeft { room: Arc::clone(self), number, process: ForkGuard::new() };
        self.start_poller()?;
        Ok(Left::Word(word))
    }

    /// Has the poller run `errand`, after those that came before. Does not wait.
    ///
    /// # Errors
    /// The system has no thread for the poller.
    pub fn send(self: &Arc<Self>, errand: Errand) -> io::Result<()> {
        self.start_poller()?;
        self.desk().lock().errands.push_back(errand);
        self.desk().bell.notify_one();
        Ok(())
    }

    /// Lets the poller end when it has nothing to do. Nobody leaves word after this.
    pub fn close(&self) {
        let mut book = self.desk().lock();
        if book.poller == Poller::Running {
            book.poller = Poller::Ending;
        }
        drop(book);
        self.desk().bell.notify_one();
    }

    fn start_poller(self: &Arc<Self>) -> io::Result<()> {
        let mut book = self.desk().lock();
        if book.poller == Poller::None {
            let room = Arc::clone(self);
            std::thread::Builder::new().name("quinion-poller".into()).spawn(move || room.desk().poll())?;
            book.poller = Poller::Running;
        }
        Ok(())
    }
}

impl Desk {
    /// Whether somebody left word. Asked after a full fence by whoever made a change.
    #[inline]
    pub(super) fn has_words(&self) -> bool {
        self.words.load(Ordering::Relaxed) > 0
    }

    /// Calls the wakers of those whose wishes have come true, and the poller if a backend wants a leader.
    pub(super) fn rouse(&self) {
        let mut granted = Vec::new();
        let mut book = self.lock();
        for _ in 0..book.words.len() {
            let mut word = book.words.pop_front().expect("as many as there are");
            if (word.wish)() {
                granted.push(word);
            } else {
                book.words.push_back(word);
            }
        }
        let is_needed = book.leaderless().is_some();
        drop(book);
        self.words.fetch_sub(granted.len(), Ordering::Relaxed);
        if is_needed {
            self.bell.notify_one();
        }
        for word in granted {
            word.waker.wake_by_ref();
        }
    }

    /// Writes a word down, unless its wish is true already; its number then.
    fn leave(&self, mut word: Word) -> io::Result<Option<u64>> {
        let counted = Counted::new(&self.words);
        // Partner: the fence in `WaitRoom::wake`. Either the waker sees us counted and asks for our wish, or
        // its change came first and we see it now.
        fence(Ordering::SeqCst);
        let mut book = self.lock();
        if (word.wish)() {
            drop(book); // before the word goes
            return Ok(None);
        }
        counted.keep();
        book.last += 1;
        let number = book.last;
        word.number = number;
        let is_needed = word.backend.wants_leader();
        book.words.push_back(word);
        drop(book);
        if is_needed {
            self.bell.notify_one();
        }
        Ok(Some(number))
    }

    /// Takes a word away, if it is still there.
    fn take_away(&self, number: u64) -> Option<Word> {
        let mut book = self.lock();
        let place = book.words.iter().position(|word| word.number == number)?;
        let word = book.words.remove(place);
        drop(book);
        self.words.fetch_sub(1, Ordering::Relaxed);
        word
    }

    /// The poller's life.
    fn poll(&self) {
        crate::sys::signal::block_all();
        while let Some(task) = self.next_task() {
            match task {
                Task::Lead(backend) => self.lead(&*backend),
                Task::Run(errand) => errand(),
            }
        }
    }

    /// Leads until there is no word, or something else to do; in that case not before a completion has
    /// come, so that two backends with words are not turned to and fro between for nothing.
    fn lead(&self, backend: &dyn Backend) {
        let mut has_looked = false;
        backend.reap(Reap::Wait, &mut || {
            let (book, is_first_look) = (self.lock(), !std::mem::replace(&mut has_looked, true));
            book.words.is_empty() || !is_first_look && book.has_other_work()
        });
    }

    fn next_task(&self) -> Option<Task> {
        let mut book = self.lock();
        loop {
            if let Some(errand) = book.errands.pop_front() {
                return Some(Task::Run(errand));
            }
            if let Some(backend) = book.leaderless() {
                return Some(Task::Lead(backend));
            }
            if book.poller == Poller::Ending && book.words.is_empty() {
                return None;
            }
            book = self.bell.wait(book).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// A backend that somebody's word waits for and nobody leads.
    fn leaderless(&self) -> Option<Arc<dyn Backend>> {
        let word = self.words.iter().find(|word| word.backend.wants_leader())?;
        Some(Arc::clone(&word.backend))
    }

    /// Whether somebody who leads for all words should turn to something else. (The backends that share
    /// what is being led do not want a leader then.)
    fn has_other_work(&self) -> bool {
        !self.errands.is_empty() || self.leaderless().is_some()
    }
}

/// Counts a word while it is being written down, or for good.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(words: &'a AtomicUsize) -> Self {
        words.fetch_add(1, Ordering::Relaxed);
        Self(words)
    }
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("words", &self.words.load(Ordering::Relaxed)).finish_non_exhaustive()
    }
}
