//! Truncation watch: files that are truncated in a way that no lease tells of.
//!
//! ```text
//!   attach:       watch(file) -> open it, look at it -> arm: truncated since it is watched? given up -> take a lease
//!   any process:  open(O_RDONLY | O_TRUNC) --inotify--> the thread: no viewer trusts what was cached, and it goes
//!   the file is closed, or was truncated: it is watched no more
//! ```
//!
//! The kernel breaks no lease for an open with `O_RDONLY | O_TRUNC`. A viewer tells the owner of its own, before and
//! after; but it may end in between, and other processes tell nothing. So each attached file is watched for changes:
//! while there is a lease on it, a truncation is the only one that there can be.
//!
//! The notice comes a moment after the truncation, when the open that truncates may have returned; a viewer that
//! waits for the owner leaves no such moment. The kernel keeps the notices for a stopped process.
//!
//! A watch is for one notice: further writes would wake the thread without end. The next attach has the file watched
//! anew; until then there is no lease, which would not notice truncations. The file's handles share the watch
//! (`CoherenceState::keep_watch`), as a viewer that attached it before relies on it, too.
//!
//! **One number, many guards.** The kernel has one watch for each file, and does not use its number again. A thread
//! that adds one while some watch ended may have been given that one, and tries again (a count tells).
//!
//! Invariants:
//!  1. A file that is attached and may change is watched from before it was looked at, until its last handle for
//!     viewers is closed or a notice came. One for which no watch can be had is not attached: the system bounds how
//!     many a user may have, and the owner takes one in eight of them.
//!  2. No lock of this module is held while the kernel is given a path, or cached pages are forgotten.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use quinion::internals::serving::CoherenceState;
use quinion::internals::sync::contained;
use quinion::internals::sys::fork::ForkGuard;

const WATCHES_OF_USER: &str = "/proc/sys/fs/inotify/max_user_watches";
const SHARE: usize = 8;
const WATCHES_UNKNOWN: usize = 1024;
const TRIES: u32 = 100;

#[derive(Default)]
pub(super) struct TruncationWatcher {
    watcher: OnceLock<Option<WatcherThread>>,
}

struct WatcherThread {
    shared: Arc<WatchTable>,
    thread: Option<JoinHandle<()>>,
}

struct WatchTable {
    inotify: OwnedFd,
    end: OwnedFd,
    files_max: usize,
    process: ForkGuard,
    table: Mutex<InotifyWatches>,
}

#[derive(Default)]
struct InotifyWatches {
    files: HashMap<i32, WatchedFile>,
    ended: u64,
}

#[derive(Default)]
struct WatchedFile {
    guards: usize,
    /// The states of the cache's file of that number, and of one that it has still from before.
    states: Vec<Weak<CoherenceState>>,
}

pub(super) struct TruncationWatch {
    shared: Arc<WatchTable>,
    number: i32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TruncationCheck {
    Intact,
    Truncated,
}

impl TruncationWatcher {
    pub(super) fn watch(&self, path: &str) -> Option<TruncationWatch> {
        let watcher = self.watcher.get_or_init(|| WatcherThread::start().ok()).as_ref()?;
        watcher.shared.watch(path)
    }

    pub(super) fn files(&self) -> usize {
        self.watcher.get().and_then(Option::as_ref).map_or(0, |known| known.shared.lock().files.len())
    }
}

impl std::fmt::Debug for TruncationWatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TruncationWatcher").field("files", &self.files()).finish_non_exhaustive()
    }
}

impl WatcherThread {
    fn start() -> std::io::Result<Self> {
        let limit = std::fs::read_to_string(WATCHES_OF_USER).ok().and_then(|text| text.trim().parse().ok());
        let shared = Arc::new(WatchTable {
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            end: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            files_max: limit.map_or(WATCHES_UNKNOWN, |watches: usize| watches / SHARE),
            process: ForkGuard::new(),
            table: Mutex::default(),
        });
        let watching = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("quinion-inotify".into()).spawn(move || {
            quinion::internals::sys::signal::block_all();
            watching.run();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for WatcherThread {
    fn drop(&mut self) {
        if self.shared.process.is_forked() {
            return; // the thread is the parent's
        }
        let _ = rustix::io::write(&self.shared.end, &1u64.to_ne_bytes()); // full: it is to end already
        let thread = self.thread.take().filter(|it| it.thread().id() != std::thread::current().id());
        thread.into_iter().for_each(|thread| drop(thread.join())); // it catches what is thrown
    }
}

impl WatchTable {
    fn lock(&self) -> MutexGuard<'_, InotifyWatches> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(self: &Arc<Self>, path: &str) -> Option<TruncationWatch> {
        if self.process.is_forked() {
            return None;
        }
        for _ in 0..TRIES {
            let ended = self.lock().ended;
            let number =
                inotify::add_watch(&self.inotify, path, WatchFlags::MODIFY | WatchFlags::ONESHOT).ok()?;
            let mut table = self.lock();
            if table.files.len() >= self.files_max && !table.files.contains_key(&number) {
                let _ = inotify::remove_watch(&self.inotify, number);
                table.ended += 1; // another thread may have been given it
                return None;
            }
            if table.ended == ended {
                table.files.entry(number).or_default().guards += 1;
                return Some(TruncationWatch { shared: Arc::clone(self), number });
            }
        }
        None
    }

    fn run(&self) {
        loop {
            let mut fds = [PollFd::new(&self.end, PollFlags::IN), PollFd::new(&self.inotify, PollFlags::IN)];
            let is_ready = poll(&mut fds, None).is_ok(); // else a signal: once more
            if is_ready && !fds[0].revents().is_empty() {
                return;
            }
            self.read_events();
        }
    }

    fn read_events(&self) {
        let mut room = [MaybeUninit::uninit(); 4096];
        let mut notices = inotify::Reader::new(&self.inotify, &mut room);
        while let Ok(notice) = notices.next() {
            if notice.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                let all: Vec<i32> = self.lock().files.keys().copied().collect();
                all.into_iter().for_each(|number| self.drop_watched(number));
            } else {
                self.drop_watched(notice.wd());
            }
        }
    }

    fn drop_watched(&self, number: i32) {
        let mut table = self.lock();
        let Some(known) = table.files.remove(&number) else { return }; // one that this process ended
        let _ = inotify::remove_watch(&self.inotify, number); // if some notice was lost, it is there still
        table.ended += 1;
        drop(table);
        let states = known.states.iter().filter_map(Weak::upgrade);
        contained(|| states.for_each(|state| state.note_change()));
    }
}

impl TruncationWatch {
    /// `state` is told of truncations from here on, and keeps the watch. Data read before may be older than a
    /// truncation since the watch began.
    pub(super) fn arm(self, state: &Arc<CoherenceState>) -> TruncationCheck {
        let (shared, number) = (Arc::clone(&self.shared), self.number);
        // First: a notice that comes now finds no entry for it, and a later one finds `state` in the entry.
        state.keep_watch(Box::new(self));
        let mut table = shared.lock();
        let Some(known) = table.files.get_mut(&number) else {
            drop(table);
            state.note_change();
            return TruncationCheck::Truncated;
        };
        known
            .states
            .retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), &raw const **state));
        known.states.push(Arc::downgrade(state));
        TruncationCheck::Intact
    }
}

impl Drop for TruncationWatch {
    fn drop(&mut self) {
        if self.shared.process.is_forked() {
            return; // the parent's
        }
        let mut table = self.shared.lock();
        let Some(known) = table.files.get_mut(&self.number) else { return }; // it was truncated
        known.guards -= 1;
        if known.guards == 0 {
            // Under the lock: a thread that adds a watch now sees that this one has ended.
            let _ = inotify::remove_watch(&self.shared.inotify, self.number);
            table.files.remove(&self.number);
            table.ended += 1;
        }
    }
}

impl std::fmt::Debug for TruncationWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TruncationWatch").field("number", &self.number).finish_non_exhaustive()
    }
}
