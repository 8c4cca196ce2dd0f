//! Lease: no other process changes a file of the cache before the cache was notified.
//!
//! ```text
//!   another process          kernel                     fetcher          worker                  holder
//!     open for writing -----> breaks the read lease --> signal, fd --.
//!     sleeps                                             notes fd    '-> wakes --check()------> trusts it no more
//!        .                                                                                      forgets the bytes
//!        .                <------------------------------------------------------------------   gives it up
//!     goes on, writes
//! ```
//!
//! The kernel grants a read lease on a file that no process has open for writing. A later `open` for writing, or a
//! truncation, blocks until the holder, which the kernel notifies, gives the lease up, or until
//! `/proc/sys/fs/lease-break-time` is over (45 seconds by default): then the kernel revokes it. (An `open` with
//! `O_NONBLOCK` fails with `EAGAIN`; the holder is notified all the same.)
//!
//! This module takes leases, and tells their **holders** to look at them ([`LeaseHolder::check`]).
//!
//! **Two threads**, started with the first lease and ended with the cache. The *fetcher* waits for the signal, which
//! comes to it alone, and notes its lease (`sys/lease.rs` tells why it does nothing else). The *worker* has the
//! holders look. The program's signals are untouched: no handler, no mask, no number it can use.
//!
//! **How long a lease is trusted.** A process or machine that was stopped may resume when the time is over and the
//! writer at work, and its readers may run before the fetcher does. So a lease is trusted for three quarters of the
//! break time after it was last seen to stand, by the same clock.
//!
//! ```text
//!   seen to stand at t:  no break had begun before t  =>  no writer continues before t + break time
//!   trusted until t + 3/4 break time;  seen again each 1/4 of it;  a later reader checks it itself
//! ```
//!
//! The same look finds breaks of which the signal was lost.
//!
//! Invariants:
//!  1. A lease is in the table before the kernel knows of it, and leaves it before it is given up: every signal finds
//!     its lease, unless that is given up anyway.
//!  2. [`Leases::are_seen_at`] is true only at a time up to which no lease can have been revoked unseen by its holder.
//!  3. No lock of this module is held while a holder looks.
//!  4. A forked child gives up no lease: it would be the parent's.
//!
//! Not an invariant: that a look finds something. One is enough for many signals, and a signal may be about a lease
//! that was given up, or about the one that has its descriptor's number now.
//!
//! Cost: taking a lease is four system calls, and giving one up is one; a look is one, of a fifth of a microsecond.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::backend::Backend;
use crate::sync::contained;
use crate::sys::fork::ForkGuard;
use crate::sys::lease::{self, LeaseSignal, ThreadNumber, WaitEnd};

/// The longest wait of the fetcher, lest a lost call keep a cache from ending.
const FETCH: Duration = Duration::from_secs(10);
const BREAK_TIME: &str = "/proc/sys/fs/lease-break-time";

/// Why there is no lease on a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoLease {
    /// No caller asked for one, or not yet.
    #[error("no lease was asked for; open the file with Coherence::Lease to have one")]
    NotAsked,
    /// Another open file description can write to it.
    #[error(
        "another process has the file open for writing; a lease can be had when all writers have closed it"
    )]
    OpenForWriting,
    /// The cache itself has the file open for writing.
    #[error("this cache has the file open for writing itself; read it by a cache that does not write it")]
    WrittenHere,
    /// The lease was given up, because another process wants to write.
    #[error(
        "the lease was given up because another process opened the file for writing; it is asked for again at the \
         next read"
    )]
    GivenUp,
    /// The file is another user's, and this process has no `CAP_LEASE`.
    #[error("the file is another user's; run as its owner, or with CAP_LEASE")]
    NotPermitted,
    /// The file is not a regular one, its file system has no leases, or others than this kernel may write it.
    #[error(
        "there are no leases on such a file: it is not a regular file of a local file system that has them"
    )]
    NotSupported,
    /// The system has no thread to wait with.
    #[error("no thread can be started that waits for the lease's end; allow this process two more")]
    NoThread,
    /// The system refused for another reason, by this error number.
    #[error("the system refused a lease on it: {}; see the kernel's log", io::Error::from_raw_os_error(*.0))]
    System(i32),
}

impl NoLease {
    fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Self::OpenForWriting,
            Some(libc::EACCES | libc::EPERM) => Self::NotPermitted,
            Some(libc::EINVAL | libc::ENOTTY | libc::EOPNOTSUPP | libc::ENOSYS) => Self::NotSupported,
            code => Self::System(code.unwrap_or(libc::EIO)),
        }
    }

    /// Whether this may change soon by itself.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::OpenForWriting | Self::GivenUp)
    }
}

/// The holder of a lease.
pub trait LeaseHolder: Send + Sync {
    /// Checks whether the lease still stands ([`Lease::stands`]). If not: first stops trusting it, then forgets the
    /// pages that were read under it, and then drops it. May wait for locks; a writer in another process waits for this
    /// call.
    fn check(&self);
    /// Gives the lease up, because it will not be checked for a while. Pages that were read under it must not be
    /// trusted until the file was checked or there is a lease again.
    fn give_up(&self);
}

/// The leases of one cache.
pub struct Leases {
    shared: Arc<LeaseShared>,
    process: ForkGuard,
}

/// A read lease; dropping it gives it up.
pub struct Lease {
    shared: Arc<LeaseShared>,
    process: ForkGuard,
    /// Keeps the descriptor's number.
    on: Arc<dyn Backend>,
}

#[derive(Default)]
struct LeaseShared {
    /// Until when leases are trusted without a check, by [`now`].
    seen_until: AtomicU64,
    table: Mutex<LeaseTable>,
    wakeup: Condvar,
}

#[derive(Default)]
struct LeaseTable {
    holders: HashMap<RawFd, Weak<dyn LeaseHolder>>,
    signalled: Vec<RawFd>,
    threads: Threads,
    is_closed: bool,
}

#[derive(Default)]
enum Threads {
    #[default]
    None,
    Running {
        fetcher: JoinHandle<()>,
        worker: JoinHandle<()>,
        signalled: ThreadNumber,
    },
    /// Closed, or the system has none.
    Never,
}

enum WorkerStep {
    Some(Vec<Weak<dyn LeaseHolder>>),
    /// All holders, the time of their look, and how long from then on the kernel waits before it revokes a lease.
    All(Vec<Weak<dyn LeaseHolder>>, u64, Duration),
    End,
}

impl Leases {
    /// No leases yet, and no thread.
    pub fn new() -> Self {
        Self { shared: Arc::default(), process: ForkGuard::new() }
    }

    /// Takes a lease on the file that `on` reads; `holder` checks it, at any time, on another thread. Does not block.
    ///
    /// # Errors
    /// There can be none, for this reason.
    pub fn take(&self, on: &Arc<dyn Backend>, holder: Weak<dyn LeaseHolder>) -> Result<Lease, NoLease> {
        let Some(leasable) = on.leasable().filter(|_| !self.process.is_forked()) else {
            return Err(NoLease::NotSupported);
        };
        let signalled = self.shared.ensure_threads().ok_or(NoLease::NoThread)?;
        let number = leasable.descriptor.as_raw_fd();
        self.shared.enter(number, holder);
        match lease::take(leasable.descriptor, signalled) {
            Ok(()) => {
                Ok(Lease { shared: Arc::clone(&self.shared), process: self.process, on: Arc::clone(on) })
            }
            Err(error) => {
                self.shared.lock().holders.remove(&number);
                Err(NoLease::of(&error))
            }
        }
    }

    /// Whether leases that their holders trust may be trusted at `now`, without another look.
    #[inline]
    pub fn are_seen_at(&self, now: u64) -> bool {
        now < self.shared.seen_until.load(Ordering::Relaxed)
    }

    /// How long leases may be trusted from now on; there is room for a step of the clock.
    pub fn seen_for(&self) -> Duration {
        // Acquire, partner: `see`: a thread that reads a time also sees all stores of holders before it.
        Duration::from_nanos(self.shared.seen_until.load(Ordering::Acquire).saturating_sub(now()))
    }

    /// Has every holder give its lease up.
    pub fn give_up_all(&self) {
        let holders: Vec<_> = self.shared.lock().holders.values().cloned().collect();
        holders.iter().filter_map(Weak::upgrade).for_each(|holder| holder.give_up());
    }

    /// Ends the threads, and waits for them; a call by one of them does not wait for it.
    pub fn close(&self) {
        if self.process.is_forked() {
            return;
        }
        let mut table = self.shared.lock();
        table.is_closed = true;
        let threads = std::mem::replace(&mut table.threads, Threads::Never);
        if let Threads::Running { signalled, .. } = threads {
            // Under the lock that the fetcher takes before it ends: it is there, and its number is no other thread's.
            lease::call(signalled);
        }
        drop(table);
        self.shared.wakeup.notify_all();
        let Threads::Running { fetcher, worker, .. } = threads else { return };
        for thread in [fetcher, worker] {
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join(); // it catches holders' panics
            }
        }
    }
}

impl Default for Leases {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        self.close();
    }
}

impl Lease {
    /// Whether it stands: one system call, which does not block.
    pub fn stands(&self) -> bool {
        self.on.leasable().is_some_and(|leasable| lease::stands(leasable.descriptor))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return; // the parent has it, by the same description
        }
        if let Some(leasable) = self.on.leasable() {
            self.shared.lock().holders.remove(&leasable.descriptor.as_raw_fd());
            // An error says that the kernel has taken it away.
            let _ = lease::give_up(leasable.descriptor);
        }
    }
}

/// In nanoseconds, by a clock that is read without a system call and steps by some milliseconds.
#[inline]
pub fn now() -> u64 {
    crate::sys::coarse_nanoseconds()
}

/// How long the kernel waits before it revokes a lease; if it does not say, the least it can be told.
fn break_time() -> Duration {
    let said = std::fs::read_to_string(BREAK_TIME).ok().and_then(|text| text.trim().parse().ok());
    match said {
        Some(0) => Duration::from_secs(3600), // it never does
        Some(seconds) => Duration::from_secs(seconds),
        None => Duration::from_secs(1),
    }
}

fn trusted_for(break_time: Duration) -> Duration {
    break_time / 4 * 3
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl LeaseShared {
    fn lock(&self) -> MutexGuard<'_, LeaseTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, number: RawFd, holder: Weak<dyn LeaseHolder>) {
        let mut table = self.lock();
        if table.holders.is_empty() {
            // There were none, and leases taken from now on are younger.
            self.see(now(), break_time());
            self.wakeup.notify_all();
        }
        table.holders.insert(number, holder);
    }

    fn see(&self, at: u64, break_time: Duration) {
        // Release, partner: `seen_for`.
        self.seen_until.fetch_max(at.saturating_add(nanoseconds(trusted_for(break_time))), Ordering::Release);
    }

    // ---- the threads ----------------------------------------------------------------------------

    fn ensure_threads(self: &Arc<Self>) -> Option<ThreadNumber> {
        let mut table = self.lock();
        if matches!(table.threads, Threads::None) {
            table.threads = self.start().unwrap_or(Threads::Never);
            // One of the two may run.
            table.is_closed |= matches!(table.threads, Threads::Never);
        }
        match table.threads {
            Threads::Running { signalled, .. } => Some(signalled),
            Threads::None | Threads::Never => None,
        }
    }

    fn start(self: &Arc<Self>) -> Option<Threads> {
        let named = |name: &str| std::thread::Builder::new().name(name.into());
        let (tell, told) = sync_channel(1);
        let shared = Arc::clone(self);
        let fetcher = named("quinion-summons").spawn(move || {
            crate::sys::signal::block_all();
            let summons = LeaseSignal::here().ok();
            let _ = tell.send(summons.as_ref().map(LeaseSignal::thread));
            summons.into_iter().for_each(|summons| shared.fetch(&summons));
        });
        let fetcher = fetcher.ok()?;
        let signalled = told.recv().ok()??;
        let shared = Arc::clone(self);
        let worker = named("quinion-lease").spawn(move || {
            crate::sys::signal::block_all();
            shared.work();
        });
        let worker = worker.ok()?;
        Some(Threads::Running { fetcher, worker, signalled })
    }

    /// The fetcher calls no foreign code.
    fn fetch(&self, summons: &LeaseSignal) {
        loop {
            let signalled = summons.wait(FETCH);
            let mut table = self.lock();
            if table.is_closed {
                return;
            }
            if let WaitEnd::For(number) = signalled {
                table.signalled.push(number);
                self.wakeup.notify_all();
            }
        }
    }

    fn work(&self) {
        let check = |holders: Vec<Weak<dyn LeaseHolder>>| {
            for holder in holders.into_iter().filter_map(|holder| holder.upgrade()) {
                contained(|| holder.check());
            }
        };
        let mut all_at = 0;
        loop {
            match self.begin_round(all_at) {
                WorkerStep::Some(holders) => check(holders),
                WorkerStep::All(holders, begun, break_time) => {
                    check(holders);
                    self.see(begun, break_time);
                    all_at = begun.saturating_add(nanoseconds(break_time / 4));
                }
                WorkerStep::End => return,
            }
        }
    }

    /// Sleeps until there was a signal, or all are to look at `all_at`.
    fn begin_round(&self, all_at: u64) -> WorkerStep {
        let mut table = self.lock();
        loop {
            if table.is_closed {
                return WorkerStep::End;
            }
            if !table.signalled.is_empty() {
                let signalled = std::mem::take(&mut table.signalled);
                return WorkerStep::Some(
                    signalled.iter().filter_map(|fd| table.holders.get(fd)).cloned().collect(),
                );
            }
            let (begun, is_empty) = (now(), table.holders.is_empty());
            if begun >= all_at && !is_empty {
                return WorkerStep::All(table.holders.values().cloned().collect(), begun, break_time());
            }
            table = if is_empty {
                self.wakeup.wait(table).unwrap_or_else(PoisonError::into_inner)
            } else {
                let left = Duration::from_nanos(all_at - begun);
                self.wakeup.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases").field("leases", &self.shared.lock().holders.len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("stands", &self.stands()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Engine, EngineOptions, WaitQueue};
    use std::fs::{self, OpenOptions};
    use std::path::Path;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(60);

    /// Notes for each look whether its lease stands, and gives it up if not.
    struct CheckReport {
        lease: Mutex<Option<Lease>>,
        checks: Mutex<Sender<bool>>,
        panics: bool,
    }

    impl LeaseHolder for CheckReport {
        fn check(&self) {
            let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
            let stands = lease.as_ref().is_some_and(Lease::stands);
            self.checks.lock().unwrap().send(stands).unwrap();
            assert!(!self.panics, "this holder always panics");
            if !stands {
                *lease = None;
            }
        }
        fn give_up(&self) {
            *self.lease.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    fn holder() -> (Arc<CheckReport>, Receiver<bool>) {
        holder_as(false)
    }

    fn panicking_holder() -> (Arc<CheckReport>, Receiver<bool>) {
        holder_as(true)
    }

    fn holder_as(panics: bool) -> (Arc<CheckReport>, Receiver<bool>) {
        let (checks, heard) = channel();
        (Arc::new(CheckReport { lease: Mutex::default(), checks: Mutex::new(checks), panics }), heard)
    }

    fn backend(path: &Path) -> Arc<dyn Backend> {
        fs::write(path, [7; 100]).unwrap();
        Arc::new(Engine::new(Arc::new(WaitQueue::new()), EngineOptions::default()).open(path).unwrap())
    }

    /// As [`take`], again: a process that another test starts has a writer's descriptor until it executes its
    /// program.
    fn take_at_last(leases: &Leases, on: &Arc<dyn Backend>, holder: &Arc<CheckReport>) {
        let begun = Instant::now();
        while let Err(why) = take(leases, on, holder) {
            assert!(why == NoLease::OpenForWriting && begun.elapsed() < LONG, "{why}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn take(leases: &Leases, on: &Arc<dyn Backend>, holder: &Arc<CheckReport>) -> Result<(), NoLease> {
        let weak: Weak<CheckReport> = Arc::downgrade(holder);
        let lease = leases.take(on, weak)?;
        // A holder that panics may have looked in between, with its lock held.
        *holder.lease.lock().unwrap_or_else(PoisonError::into_inner) = Some(lease);
        Ok(())
    }

    fn wait_for_end(heard: &Receiver<bool>) {
        while heard.recv_timeout(LONG).unwrap() {}
    }

    fn is_running(leases: &Leases) -> bool {
        matches!(leases.shared.lock().threads, Threads::Running { .. })
    }

    #[test]
    fn a_holder_looks_when_a_process_wants_to_write_which_goes_on_when_the_lease_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let (leases, on, (holder, heard)) = (Leases::new(), backend(&path), holder());
        assert!(!is_running(&leases), "no lease, no thread");
        for _ in 0..20 {
            take_at_last(&leases, &on, &holder);
            let writer = OpenOptions::new().write(true).open(&path).unwrap();
            wait_for_end(&heard);
            assert_eq!(take(&leases, &on, &holder), Err(NoLease::OpenForWriting));
            assert!(leases.shared.lock().holders.is_empty(), "what is given up or refused is in no book");
            drop(writer);
        }
        assert!(is_running(&leases));
        leases.close();
        assert_eq!(take(&leases, &on, &holder), Err(NoLease::NoThread));
    }

    #[test]
    fn a_holder_that_panics_is_no_matter_of_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let paths = [folder.path().join("bad"), folder.path().join("good")];
        let (leases, (bad, bad_heard), (good, good_heard)) = (Leases::new(), panicking_holder(), holder());
        take_at_last(&leases, &backend(&paths[0]), &bad);
        take_at_last(&leases, &backend(&paths[1]), &good);
        let bad_writer = std::thread::spawn({
            let path = paths[0].clone();
            move || OpenOptions::new().write(true).open(path).unwrap()
        });
        wait_for_end(&bad_heard);
        drop(OpenOptions::new().write(true).open(&paths[1]).unwrap());
        wait_for_end(&good_heard);
        *bad.lease.lock().unwrap_or_else(PoisonError::into_inner) = None;
        bad_writer.join().unwrap();
    }

    #[test]
    fn each_round_asks_the_signalled_holders_or_from_time_to_time_all() {
        let (shared, (one, _), (other, _)) = (LeaseShared::default(), holder(), holder());
        let weak = |holder: &Arc<CheckReport>| -> Weak<dyn LeaseHolder> {
            Arc::downgrade(holder) as Weak<CheckReport>
        };
        shared.enter(5, weak(&one));
        shared.enter(7, weak(&other));
        let is = |holders: &[Weak<dyn LeaseHolder>], expected: &[&Arc<CheckReport>]| {
            holders.len() == expected.len()
                && expected.iter().all(|one| holders.iter().any(|holder| holder.ptr_eq(&weak(one))))
        };
        let late = now() + nanoseconds(LONG);
        shared.lock().signalled.extend([7, 9]);
        assert!(matches!(shared.begin_round(late), WorkerStep::Some(holders) if is(&holders, &[&other])));
        // A signal that got lost is made up for when all look.
        let before = now();
        let WorkerStep::All(holders, begun, waits) = shared.begin_round(before) else {
            panic!("it is time for all")
        };
        assert!(is(&holders, &[&one, &other]) && begun >= before && waits == break_time());
        shared.lock().is_closed = true;
        assert!(matches!(shared.begin_round(0), WorkerStep::End));
    }

    #[test]
    fn a_lease_is_trusted_for_a_shorter_time_than_others_wait() {
        let folder = tempfile::tempdir().unwrap();
        let (leases, (holder, _heard)) = (Leases::new(), holder());
        assert!(!leases.are_seen_at(now()), "there is none");
        take_at_last(&leases, &backend(&folder.path().join("file")), &holder);
        let (taken, waits) = (now(), break_time());
        assert!(leases.are_seen_at(taken));
        assert!(!leases.are_seen_at(taken + nanoseconds(waits)), "somebody may have gone on by then");
        for seconds in 1..100 {
            let waits = Duration::from_secs(seconds);
            // The next look comes before leases expire, and in time for a step of the clock.
            assert!(
                trusted_for(waits) >= waits / 2 && waits - trusted_for(waits) >= Duration::from_millis(250)
            );
        }
    }

    #[test]
    fn the_thread_that_is_summoned_has_the_signal_blocked_and_ends_when_it_is_called() {
        let shared = Arc::new(LeaseShared::default());
        let signalled = shared.ensure_threads().unwrap();
        let threads = std::mem::take(&mut shared.lock().threads);
        let Threads::Running { fetcher, worker, .. } = threads else { panic!("they run") };
        for _ in 0..100 {
            assert!(lease::call(signalled), "a summons for nothing is nothing");
        }
        shared.lock().is_closed = true;
        shared.wakeup.notify_all();
        lease::call(signalled); // which may have seen by itself that it is over
        fetcher.join().unwrap();
        worker.join().unwrap();
    }
}
