//! Cuts: files that are cut in a way that no lease tells of.
//!
//! ```text
//!   attach:       watch(file) -> open it, look at it -> arm: was it cut since it is watched? given up -> take a lease
//!   any process:  open(O_RDONLY | O_TRUNC) --inotify--> our thread: no viewer believes what was cached, and it goes
//!   the file is closed, or was cut: it is watched no more
//! ```
//!
//! An open with `O_RDONLY | O_TRUNC` changes a file, and the kernel breaks no lease for it. A viewer tells the owner of
//! its own, before and after. But it may find the owner too late for that and end, or be killed in between; and a
//! process that is no viewer tells nothing. Old bytes would be shown for good then. So each file that is attached is
//! watched for changes: while there is a lease on it, a cut is the only one that there can be.
//!
//! The notice comes a moment after the cut, when the open that cuts may have returned. Therefore a viewer tells us all
//! the same: what it waits for leaves no such moment. While this process is stopped the kernel keeps the notices, and
//! they are read as soon as it goes on.
//!
//! A watch is for one notice, as what writers do after a lease is of no interest: their writes would wake us without
//! end. A viewer that attaches the file after that has it watched anew; until then there is no lease, which would be
//! blind for cuts. The watch is kept by what the file's handles have in common (`CoherenceState::keep_watch`), as a
//! viewer that attached it before believes that, too.
//!
//! **One number, many guards.** The kernel has one watch for each file. Its number is not used again, so an entry
//! stands for one watch. A thread that adds one and finds that some watch ended meanwhile, by a notice or with its last
//! guard, may have been given that one, and tries again: the count of ended watches tells.
//!
//! Invariants:
//!  1. A file that is attached and may change is watched from before it was looked at, until its last handle for
//!     viewers is closed or a notice came. One for which no watch can be had is not attached: the system bounds how
//!     many a user may have, and we take one in eight of them.
//!  2. No lock of this module is held while the kernel is given a path, or what was cached is forgotten.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use crate::cache::CoherenceState;
use crate::sync::lock::{Mutex, MutexGuard};
use crate::sys::fork::ForkGuard;

/// Where the system says how many watches a user may have.
const WATCHES_OF_USER: &str = "/proc/sys/fs/inotify/max_user_watches";
/// The part of these that is ours at most, one in so many.
const SHARE: usize = 8;
/// The same where the system does not say.
const WATCHES_UNKNOWN: usize = 1024;
/// How often a thread tries to add a watch while others end.
const TRIES: u32 = 100;

/// The watches of one owner, and the thread that gets the notices; started with the first.
#[derive(Default)]
pub(super) struct Cuts {
    watcher: OnceLock<Option<Watcher>>,
}

struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    inotify: OwnedFd,
    /// Written to when the thread is to end.
    end: OwnedFd,
    files_max: usize,
    process: ForkGuard,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By the number of the watch.
    files: HashMap<i32, WatchedFile>,
    /// How many watches have ended.
    ended: u64,
}

#[derive(Default)]
struct WatchedFile {
    guards: usize,
    /// What its viewers believe, once it is attached: of the cache's file of that number, and of one that it has still
    /// from before.
    states: Vec<Weak<CoherenceState>>,
}

/// A part in the watch of a file.
pub(super) struct CutWatch {
    shared: Arc<Shared>,
    number: i32,
}

/// What has become of a file since it is watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SinceWatched {
    Untouched,
    Cut,
}

impl Cuts {
    /// Watches the file behind `path` from here on; `None` if that cannot be.
    pub(super) fn watch(&self, path: &str) -> Option<CutWatch> {
        let watcher = self.watcher.get_or_init(|| Watcher::start().ok()).as_ref()?;
        watcher.shared.watch(path)
    }

    /// How many files are watched.
    pub(super) fn files(&self) -> usize {
        self.watcher.get().and_then(Option::as_ref).map_or(0, |known| known.shared.lock().files.len())
    }
}

impl std::fmt::Debug for Cuts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuts").field("files", &self.files()).finish_non_exhaustive()
    }
}

impl Watcher {
    fn start() -> std::io::Result<Self> {
        let said = std::fs::read_to_string(WATCHES_OF_USER).ok().and_then(|text| text.trim().parse().ok());
        let shared = Arc::new(Shared {
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            end: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            files_max: said.map_or(WATCHES_UNKNOWN, |watches: usize| watches / SHARE),
            process: ForkGuard::new(),
            table: Mutex::default(),
        });
        let heard = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("quinion-cuts".into()).spawn(move || {
            crate::sys::signal::block_all();
            heard.listen();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if self.shared.process.is_forked() {
            return; // the thread is the parent's
        }
        let _ = rustix::io::write(&self.shared.end, &1u64.to_ne_bytes()); // full: it is to end already
        let thread = self.thread.take().filter(|it| it.thread().id() != std::thread::current().id());
        thread.into_iter().for_each(|thread| drop(thread.join())); // it catches what is thrown
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(self: &Arc<Self>, path: &str) -> Option<CutWatch> {
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
                return Some(CutWatch { shared: Arc::clone(self), number });
            }
        }
        None
    }

    /// The thread's life.
    fn listen(&self) {
        loop {
            let mut fds = [PollFd::new(&self.end, PollFlags::IN), PollFd::new(&self.inotify, PollFlags::IN)];
            let is_ready = poll(&mut fds, None).is_ok(); // else a signal: once more
            if is_ready && !fds[0].revents().is_empty() {
                return;
            }
            self.read_events();
        }
    }

    /// Does what is to be done about all notices that there are.
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

    /// The file has changed, or its watch has ended in another way.
    fn drop_watched(&self, number: i32) {
        let mut table = self.lock();
        let Some(known) = table.files.remove(&number) else { return }; // one that we ended ourselves
        let _ = inotify::remove_watch(&self.inotify, number); // if some notice was lost, it is there still
        table.ended += 1;
        drop(table);
        let states = known.states.iter().filter_map(Weak::upgrade);
        let _ = catch_unwind(AssertUnwindSafe(|| states.for_each(|state| state.note_change())));
    }
}

impl CutWatch {
    /// From here on `state` is told of a cut of the file; it keeps the watch. If it was cut since it is watched, what
    /// was read of it may be of before, and `state` was told so.
    pub(super) fn arm(self, state: &Arc<CoherenceState>) -> SinceWatched {
        let (shared, number) = (Arc::clone(&self.shared), self.number);
        // First: a notice that comes now finds no entry for it, and a later one finds `state` in the entry.
        state.keep_watch(Box::new(self));
        let mut table = shared.lock();
        let Some(known) = table.files.get_mut(&number) else {
            drop(table);
            state.note_change();
            return SinceWatched::Cut;
        };
        known
            .states
            .retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), &raw const **state));
        known.states.push(Arc::downgrade(state));
        SinceWatched::Untouched
    }
}

impl Drop for CutWatch {
    fn drop(&mut self) {
        if self.shared.process.is_forked() {
            return; // the parent's
        }
        let mut table = self.shared.lock();
        let Some(known) = table.files.get_mut(&self.number) else { return }; // it was cut
        known.guards -= 1;
        if known.guards == 0 {
            // Under the lock: a thread that adds a watch now sees that this one has ended. The file is open still.
            let _ = inotify::remove_watch(&self.shared.inotify, self.number);
            table.files.remove(&self.number);
            table.ended += 1;
        }
    }
}

impl std::fmt::Debug for CutWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CutWatch").field("number", &self.number).finish_non_exhaustive()
    }
}
