//! Desk: where those leave word who wait without a thread, and the one thread that waits for all of them.
//!
//! ```text
//!   future --leave word: page, wish, waker--> desk <--a fill ended: asked for its pages--: granted? wake()
//!                                         |
//!                                         +--> the poller: leads a backend that has words and no leader;
//!                                              runs errands, which may block
//! ```
//!
//! A **word** is a page, a wish and a waker: a thread that ends a fill of the page asks
//! the wish, and if it has come true takes the word away and calls the waker,
//! once. A future may go before that; dropping the word takes it away. Words lie
//! in the order of their pages, so a fill asks those whom it concerns and passes
//! over the rest: with ten thousand words that is a tenth of the processor's time
//! and less.
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
//!  3. While there is a word, `words` is not 0; so every wake of the room comes here. A wish comes true only
//!     by a fill of its page that ends.
//!  4. The poller sleeps only after it saw, with the desk locked, that no word's backend wants a leader.
//!  5. A stranger that panics, waker or errand, takes neither the poller nor anybody else's wake-up with it.
//!  6. No waker is called by a thread while it lives through a [`DeferredWakes`]: then it holds locks, and a backend
//!     that completes inside `submit` would have strangers called under them.
//!  7. A stranger that lets the last of a cache go while a fill's end wakes it can be told from others
//!     ([`is_waking`]): that fill counts as under way until the waker returns, so its end cannot be waited for there.
//!
//! Not an invariant: that the wish of a word that was granted is still true when its future looks.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, PoisonError};
use std::task::Waker;

use super::wait_queue::{WaitQueue, WakeCondition};
use super::{Backend, ReapMode};
use crate::sync::lock::{Condvar, Mutex, MutexGuard};
use crate::sys::fork::ForkGuard;
use crate::units::{MappingId, PageIndex};

/// Something that may block, done by the poller.
pub type BlockingTask = Box<dyn FnOnce() + Send>;

/// The words of one room, and its poller.
#[derive(Default)]
pub(super) struct WakerRegistry {
    book: Mutex<RegistryState>,
    words: AtomicUsize,
    bell: Condvar,
}

#[derive(Default)]
struct RegistryState {
    last: u64,
    words: BTreeMap<WaiterId, Waiter>,
    /// The backends of all words, by address, and how many words wait for each.
    backends: BTreeMap<usize, (Arc<dyn Backend>, usize)>,
    errands: VecDeque<BlockingTask>,
    poller: Poller,
    /// Whether the poller sleeps, and nobody has rung for it yet.
    is_asleep: bool,
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

/// A page that somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PageKey {
    /// Which file's.
    pub mapping: MappingId,
    /// Which page.
    pub page: PageIndex,
}

/// Which word: in the order of pages, then of coming.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct WaiterId {
    place: PageKey,
    turn: u64,
}

struct Waiter {
    wish: Box<WakeCondition<'static>>,
    backend: Arc<dyn Backend>,
    waker: Waker,
}

/// What the poller does next.
enum Task {
    Lead(Arc<dyn Backend>),
    Run(BlockingTask),
}

/// What became of a wish.
#[derive(Debug)]
pub enum Registered {
    /// It is true already; nobody will be woken.
    Granted,
    /// The waker will be called when it has come true, unless this is dropped before.
    Word(RegisteredWaiter),
}

/// A word at the desk; dropping it takes it away.
#[derive(Debug)]
pub struct RegisteredWaiter {
    room: Arc<WaitQueue>,
    number: WaiterId,
    process: ForkGuard,
}

impl Drop for RegisteredWaiter {
    fn drop(&mut self) {
        // In a fork the desk may be locked by a thread that is not there.
        if !self.process.is_forked() {
            drop(self.room.waker_registry().take_away(self.number));
        }
    }
}

impl WaitQueue {
    /// Leaves word for a future: `waker` is called once when `wish` has come true, which is looked at after
    /// every [`WaitQueue::wake_filled`] that covers `place`. `backend` is the one that makes it true; the poller
    /// leads it if nobody else does. Does not wait.
    ///
    /// # Errors
    /// The system has no thread for the poller.
    pub fn register(
        self: &Arc<Self>,
        backend: &Arc<dyn Backend>,
        place: PageKey,
        wish: Box<WakeCondition<'static>>,
        waker: Waker,
    ) -> io::Result<Registered> {
        let word = Waiter { wish, backend: Arc::clone(backend), waker };
        let Some(number) = self.waker_registry().leave(place, word) else { return Ok(Registered::Granted) };
        let word = RegisteredWaiter { room: Arc::clone(self), number, process: ForkGuard::new() };
        self.start_poller()?;
        Ok(Registered::Word(word))
    }

    /// Has the poller run `errand`, after those that came before. Does not wait.
    ///
    /// # Errors
    /// The system has no thread for the poller.
    pub fn send(self: &Arc<Self>, task: BlockingTask) -> io::Result<()> {
        self.start_poller()?;
        let mut book = self.waker_registry().lock();
        book.errands.push_back(task);
        self.waker_registry().ring(book);
        Ok(())
    }

    /// Lets the poller end when it has nothing to do. Nobody leaves word after this.
    pub fn close(&self) {
        let mut book = self.waker_registry().lock();
        if book.poller == Poller::Running {
            book.poller = Poller::Ending;
        }
        self.waker_registry().ring(book);
    }

    fn start_poller(self: &Arc<Self>) -> io::Result<()> {
        let mut book = self.waker_registry().lock();
        if book.poller == Poller::None {
            let room = Arc::clone(self);
            std::thread::Builder::new()
                .name("quinion-poller".into())
                .spawn(move || room.waker_registry().poll())?;
            book.poller = Poller::Running;
        }
        Ok(())
    }
}

impl WakerRegistry {
    /// Whether somebody left word. Asked after a full fence by a thread that made a change.
    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        self.words.load(Ordering::Relaxed) > 0
    }

    /// Calls the wakers of those who wait for one of `pages` pages from `first` on and whose wishes have come
    /// true, and the poller if a backend wants a leader.
    pub(super) fn rouse(&self, first: PageKey, pages: u32) {
        let mut book = self.lock();
        let granted = book.take_granted(first, pages);
        self.ring_to_lead(book);
        self.words.fetch_sub(granted.len(), Ordering::Relaxed);
        granted.into_iter().for_each(Waiter::grant);
    }

    /// Calls the poller if a backend wants a leader.
    pub(super) fn seek_leader(&self) {
        self.ring_to_lead(self.lock());
    }

    /// Wakes the poller, unless it is awake: then it looks at the book before it sleeps. A bell costs a system
    /// call, also where nobody hears it.
    fn ring(&self, mut book: MutexGuard<'_, RegistryState>) {
        let is_asleep = std::mem::take(&mut book.is_asleep);
        drop(book);
        if is_asleep {
            self.bell.notify_one();
        }
    }

    fn ring_to_lead(&self, book: MutexGuard<'_, RegistryState>) {
        if book.is_asleep && book.leaderless().is_some() {
            self.ring(book);
        }
    }

    /// Writes a word down, unless its wish is true already; its number then.
    fn leave(&self, place: PageKey, mut word: Waiter) -> Option<WaiterId> {
        let counted = WaiterCount::new(&self.words);
        // Partner: the fence in `WaitQueue::wake_filled`. Either the waker sees us counted and asks for our
        // wish, or its change came first and we see it now.
        fence(Ordering::SeqCst);
        let mut book = self.lock();
        if (word.wish)() {
            drop(book); // before the word goes
            return None;
        }
        counted.keep();
        let is_needed = word.backend.wants_leader();
        let number = book.put(place, word);
        if is_needed {
            self.ring(book);
        }
        Some(number)
    }

    /// Takes a word away, if it is still there.
    fn take_away(&self, number: WaiterId) -> Option<Waiter> {
        let word = self.lock().take(number)?;
        self.words.fetch_sub(1, Ordering::Relaxed);
        Some(word)
    }

    /// The poller's life.
    fn poll(&self) {
        crate::sys::signal::block_all();
        while let Some(task) = self.next_task() {
            // A user's backend or waker that panics has said so; the others go on.
            let _ = catch_unwind(AssertUnwindSafe(|| match task {
                Task::Lead(backend) => self.lead(&*backend),
                Task::Run(task) => task(),
            }));
        }
    }

    /// Leads until there is no word, or something else to do; in that case not before a completion has
    /// come, so that two backends with words are not turned to and fro between for nothing.
    fn lead(&self, backend: &dyn Backend) {
        let mut has_looked = false;
        backend.reap(ReapMode::Wait, &mut || {
            let (book, is_first_look) = (self.lock(), !std::mem::replace(&mut has_looked, true));
            book.words.is_empty() || !is_first_look && book.has_other_work()
        });
    }

    fn next_task(&self) -> Option<Task> {
        let mut book = self.lock();
        loop {
            if let Some(task) = book.errands.pop_front() {
                return Some(Task::Run(task));
            }
            if let Some(backend) = book.leaderless() {
                return Some(Task::Lead(backend));
            }
            if book.poller == Poller::Ending && book.words.is_empty() {
                return None;
            }
            book.is_asleep = true;
            book = self.bell.wait(book).unwrap_or_else(PoisonError::into_inner);
            book.is_asleep = false;
        }
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    /// Calls the waker, or has the thread call it when it may.
    fn grant(self) {
        let mut word = Some(self);
        if HOLDERS.get() > 0 {
            // A thread that is ending may be without the list, and still read: in a destructor of a stranger's.
            let _ = HELD_BACK.try_with(|words| words.borrow_mut().extend(word.take()));
        }
        word.into_iter().for_each(Waiter::wake);
    }

    /// Calls the waker; what it does and how it ends is a stranger's affair.
    fn wake(self) {
        let _waking = WakingGuard::new();
        let _ = catch_unwind(AssertUnwindSafe(|| {
            let word = self;
            word.waker.wake_by_ref();
        }));
    }
}

std::thread_local! {
    /// How many wakers the thread is calling, one inside the other, on behalf of fills that end.
    static WAKING: Cell<u32> = const { Cell::new(0) };
}

std::thread_local! {
    /// How many [`DeferredWakes`] the thread lives through.
    static HOLDERS: Cell<u32> = const { Cell::new(0) };
    /// What it has granted meanwhile.
    static HELD_BACK: RefCell<Vec<Waiter>> = const { RefCell::new(Vec::new()) };
}

/// Holds back the wakers that the thread would call, for as long as it lives, and calls them then. To be
/// let go after the locks for whose sake it was made.
#[derive(Debug)]
pub(crate) struct DeferredWakes(PhantomData<*const ()>);

impl DeferredWakes {
    /// From now on.
    pub(crate) fn new() -> Self {
        HOLDERS.set(HOLDERS.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for DeferredWakes {
    fn drop(&mut self) {
        HOLDERS.set(HOLDERS.get() - 1);
        if HOLDERS.get() == 0 {
            let words = HELD_BACK.try_with(RefCell::take).unwrap_or_default();
            if !words.is_empty() {
                words.into_iter().for_each(Waiter::grant);
            }
        }
    }
}

/// Whether the caller is called by a waker of a word, and so inside the end of a fill.
pub(crate) fn is_waking() -> bool {
    WAKING.get() > 0
}

/// Notes that the thread calls a waker, for as long as it lives.
struct WakingGuard;

impl WakingGuard {
    fn new() -> Self {
        WAKING.set(WAKING.get() + 1);
        Self
    }
}

impl Drop for WakingGuard {
    fn drop(&mut self) {
        WAKING.set(WAKING.get() - 1);
    }
}

impl RegistryState {
    fn put(&mut self, place: PageKey, word: Waiter) -> WaiterId {
        let backend = || (Arc::clone(&word.backend), 0);
        self.backends.entry(address(&word.backend)).or_insert_with(backend).1 += 1;
        self.last += 1;
        let number = WaiterId { place, turn: self.last };
        self.words.insert(number, word);
        number
    }

    /// Takes a word out. It still holds its backend, so nothing of a stranger's is dropped here.
    fn take(&mut self, number: WaiterId) -> Option<Waiter> {
        let word = self.words.remove(&number)?;
        let address = address(&word.backend);
        let (_, words) = self.backends.get_mut(&address).expect("a word's backend is counted");
        *words -= 1;
        if *words == 0 {
            self.backends.remove(&address);
        }
        Some(word)
    }

    /// Takes those words out for `pages` pages from `first` on whose wishes have come true.
    fn take_granted(&mut self, first: PageKey, pages: u32) -> Vec<Waiter> {
        let end = PageKey { page: first.page.plus(u64::from(pages)), ..first };
        let [first, end] = [first, end].map(|place| WaiterId { place, turn: 0 });
        let asked = self.words.range_mut(first..end);
        let granted: Vec<_> = asked.filter_map(|(number, word)| (word.wish)().then_some(*number)).collect();
        granted.into_iter().filter_map(|number| self.take(number)).collect()
    }

    /// A backend that somebody's word waits for and nobody leads.
    fn leaderless(&self) -> Option<Arc<dyn Backend>> {
        let (backend, _) = self.backends.values().find(|(backend, _)| backend.wants_leader())?;
        Some(Arc::clone(backend))
    }

    /// Whether somebody who leads for all words should turn to something else. (The backends that share
    /// what is being led do not want a leader then.)
    fn has_other_work(&self) -> bool {
        !self.errands.is_empty() || self.leaderless().is_some()
    }
}

/// What tells backends apart.
fn address(backend: &Arc<dyn Backend>) -> usize {
    Arc::as_ptr(backend).cast::<()>().addr()
}

/// Counts a word while it is being written down, or for good.
struct WaiterCount<'a>(&'a AtomicUsize);

impl<'a> WaiterCount<'a> {
    fn new(words: &'a AtomicUsize) -> Self {
        words.fetch_add(1, Ordering::Relaxed);
        Self(words)
    }
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for WaiterCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for WakerRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("words", &self.words.load(Ordering::Relaxed)).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// What a stranger does at the end of a thread: a read, which fills.
    struct AtTheEnd(mpsc::Sender<()>);

    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            drop(DeferredWakes::new());
            self.0.send(()).unwrap();
        }
    }

    std::thread_local! {
        static EARLY: RefCell<Option<AtTheEnd>> = const { RefCell::new(None) };
        static LATE: RefCell<Option<AtTheEnd>> = const { RefCell::new(None) };
    }

    #[test]
    fn a_thread_may_read_when_it_ends() {
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            EARLY.set(Some(AtTheEnd(tell.clone())));
            drop(DeferredWakes::new());
            LATE.set(Some(AtTheEnd(tell)));
        });
        assert_eq!(told.iter().count(), 2);
    }
}
