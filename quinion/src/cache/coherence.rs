//! Coherence: other processes may change a file that is cached; how a handle wants to notice it, and how it does.
//!
//! ```text
//!   policy of a handle   before each read                               at an open       another process writes
//!     Immutable          nothing                                        nothing          is not seen
//!     Check              nothing                                        look, forget     seen at the next open, ..
//!     CheckEvery(time)   was the last look longer ago? look, forget     look, forget     seen after that time
//!     Lease              is there a lease? nothing                      ask for one      waits until all is forgotten
//!                        is there none? look, forget; ask for one
//! ```
//!
//! A **look**, or revalidation, is a stat that finds out whether the file has changed since its pages were cached: if
//! its size and times are not those of the cached pages, or too young to be conclusive, all of its pages are
//! forgotten. A **lease** (`lease.rs`) needs no look: the file
//! does not change while it stands. A file has one if any of its handles wants one, and it serves all of them. Where
//! none can be had, a handle that wants one looks before each read. A look is not enough on tmpfs, whose times do not
//! tell of stores to mapped memory: there such a handle forgets all pages of the file before each read. If this cache
//! writes the file, there is nothing to look for, and it is as `Check`.
//!
//! **Never stale under a lease.** A read that begins after a writer's `open` has returned shows no byte from before
//! it, unless that byte is still the file's. The order that makes it so:
//!
//! ```text
//!     begin     1 the kernel grants the lease: no process has the file open for writing, and one that opens it waits
//!             2 the cached pages are forgotten, unless the file is known to be as it was when the last lease ended
//!             3 the lease is trusted
//!   end       1 it is trusted no more
//!             2 the cached pages are forgotten
//!             3 the lease is given up: only now does the writer's open return
//! ```
//!
//! Both go under one lock of the file, so they do not mix. And so:
//!  - *A hit in the middle of its copy* at end.2: its folio is retired, the sequence is odd, the copy is thrown away,
//!    and the page is sought anew. A copy that ended before has begun before the writer's open returned.
//!  - *A fill in flight* at end.2, or at begin.2: its folio is taken out of the tree while its fill holds it, so no
//!    reader finds it; a thread that waits for it sees that, and asks the device again. The invalidate lock ensures
//!    that no fill is between tree and device.
//!  - *A fill submitted between end.2 and end.3* reads the file as it is then, and may end long after the writer began.
//!    From end.1 on no handle reads by this policy without a look; and begin.2 forgets it, whether it has ended or not.
//!  - *A pin* keeps its bytes; they are off the tree, and no read finds them.
//!
//! Times are not enough for begin.2: a long write changes them when it begins, and a store to mapped memory perhaps
//! never, so a page that was read meanwhile may be older than its file's times. Pages that were read under a lease
//! are not. So cached pages are kept only if the file's times are still those at the end of the last lease, and
//! were old enough then for a later change to carry others; and if all changes carry times there, which tmpfs does not
//! promise.
//!
//! **Viewers** in other processes hit without a message to the owner, so the extent of their trust stands in the file's
//! record ([`Validation`]), and is changed under the same lock: it says `Leased` only while there is a lease, and
//! says otherwise before end.2. A viewer's process that is about to open the file for writing notifies the owner, if
//! it can: the owner gives the lease up by itself, the opener need not wait, and the cached pages stay. The kernel
//! makes any other process wait.
//!
//! ```text
//!   of a file that is attached                   lease   trust              the cached pages
//!     a lease was had                            yes     Leased             as begin.2 says
//!     a viewer is about to open it for writing   no      Kernel, CheckTimes stay, if the file is as it was
//!     another process opens it for writing       no      Kernel             are forgotten
//!     a process cuts it, and opens it to read    no      Kernel             are forgotten
//!     there is no lease                          no      Kernel, CheckTimes stay, if the file is as it was
//!     it was declared immutable                  any     Immutable          stay, if the file is as it was
//! ```
//!
//! `CheckTimes` is set only if the owner was asked to serve files by a look at their times. `Leased` is said at an
//! attach alone, as a lease does not tell of each cut: an owner that attaches a file has it watched for these first.
//!
//! After a lease was given up it is not asked for again for a second, so that a process that got `EAGAIN` finds the
//! file open when it tries again. While another process writes, it is asked for fifty times a second at most.
//!
//! Invariants:
//!  1. `is_leased` is true only while the lease is there, and every cached page of the file was read under it, or the
//!     file is known to be as it was at the end of the last one.
//!  2. There is a lease only while a handle is open that wants one.
//!  3. No lock is held while the kernel is asked to open a file: it may make the opener wait for this process.
//!  4. While a handle reads for viewers, no lease begins that no watch of cuts goes with; and one that began before is
//!     ended if the file was cut before it was watched.
//!  5. The record says `Leased` only while a handle reads for viewers, and so only while there is a watch.
//!
//! Not an invariant: that a look sees each change. Times have limits; see above.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::arena::Validation;
use crate::backend::{Attributes, FileTimes, Version, is_memory_file};
use crate::error::{Error, Repr, Result};
use crate::filemap::Filemap;
use crate::lease::{Lease, LeaseHolder, Leases, NoLease, now};
use crate::mapping::Mapping;
use crate::stats::Count;
use crate::sync::{Rank, RankedGuard, RankedMutex};

use super::File;
use super::open::OpenMode;

/// How long a lease that was given up is not asked for.
const LEFT_ALONE: Duration = Duration::from_secs(1);
/// How long a lease that was refused is not asked for.
const ASKED_AGAIN: Duration = Duration::from_millis(20);

/// How a handle notices changes of the file that are not made through this cache.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Coherence {
    /// Close-to-open: the file's size and times are checked when it is opened, when a read meets its end, and by
    /// [`File::revalidate`]. If they changed, its cached pages are dropped.
    #[default]
    Check,
    /// As [`Coherence::Check`], and before a read if the last check is older than this: in steps of the kernel's coarse
    /// clock, some milliseconds; before each read if it is zero. A check is a system call. It compares the file's
    /// times, so it may miss a write in progress or a store through a shared mapping.
    CheckEvery(Duration),
    /// A read lease of the kernel (`F_SETLEASE`): a process that opens the file for writing, or truncates it, waits
    /// until the cached pages are dropped, some milliseconds; one that opens it with `O_NONBLOCK` gets `EAGAIN` and may
    /// try again. While the lease stands, a read costs no system call and is never stale. (An open with
    /// `O_RDONLY | O_TRUNC` changes a file without asking for the lease.)
    ///
    /// A lease needs a regular file of a local file system, which this process's user owns (or `CAP_LEASE`), and
    /// which is not open for writing; another cache that has written it keeps it open so for as long as it knows the
    /// file ([`Builder::idle_files_max`](crate::Builder::idle_files_max)). Without one, reads are as with
    /// `CheckEvery` zero, `nowait` reads wait for locks and the file system, and the lease is asked for again;
    /// [`File::coherence`] reports the state and the reason. On tmpfs, whose times do not tell of stores to mapped
    /// memory, nothing is read from the cache then. A file that this cache has open for writing has no
    /// lease, and reads are as with [`Coherence::Check`].
    ///
    /// In a forked child without `exec` the descriptor stays open: if the parent is killed, writers wait until
    /// `/proc/sys/fs/lease-break-time` is over.
    Lease,
    /// The file never changes. Only [`File::revalidate`] checks it; if it changes, reads return old or new bytes. Other
    /// handles of the file, with other modes, check it as they do, and drop its pages for all.
    Immutable,
}

impl Coherence {
    pub(super) fn needs_revalidation(self) -> bool {
        matches!(self, Self::CheckEvery(_) | Self::Lease)
    }
}

/// How a handle deals with changes by others, and why; see [`File::coherence`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CoherenceInForce {
    /// The mode that the handle was opened with.
    pub wanted: Coherence,
    /// The mode now. [`Coherence::Lease`] for any handle of a file that has a lease, unless it was opened with
    /// [`Coherence::Immutable`].
    pub in_force: Coherence,
    /// Why there is no lease, if there is none.
    pub no_lease: Option<NoLease>,
}

#[derive(Debug)]
pub struct CoherenceState {
    mapping: Arc<Mapping>,
    filemap: Arc<Filemap>,
    leases: Arc<Leases>,
    is_leased: AtomicBool,
    /// When the file was last revalidated, by the clock of leases.
    revalidated: AtomicU64,
    state: RankedMutex<LeaseState>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ObservedTimes {
    modified: i64,
    changed: i64,
    size: u64,
}

impl ObservedTimes {
    fn new(version: Version, size: u64) -> Self {
        Self { modified: version.modified, changed: version.changed, size }
    }
    pub(super) fn of(mapping: &Mapping) -> Self {
        Self::new(mapping.version(), mapping.size())
    }
    pub(super) fn by(file: &Attributes) -> Self {
        Self::new(file.version, file.size)
    }
}

#[derive(Debug)]
struct LeaseState {
    /// How many handles want a lease.
    wanted: usize,
    lease: Option<Lease>,
    no_lease: NoLease,
    /// When a lease may be asked for again, by that clock.
    again: u64,
    /// The file at the end of the last lease, if the pages cached then are still cached where it is unchanged.
    left: Option<Attributes>,
    /// Whether viewers were told to trust nothing, and a fill since may have brought pages of no known time.
    doubtful: bool,
    for_viewers: usize,
    watch: Option<Box<dyn std::fmt::Debug + Send>>,
    /// There are viewers, and the watch has ended with a notice: no lease is asked for until there is another.
    is_unwatched: bool,
}

impl CoherenceState {
    pub(super) fn new(mapping: &Arc<Mapping>, filemap: &Arc<Filemap>, leases: &Arc<Leases>) -> Arc<Self> {
        let state = LeaseState {
            wanted: 0,
            lease: None,
            no_lease: NoLease::NotAsked,
            again: 0,
            left: None,
            doubtful: false,
            for_viewers: 0,
            watch: None,
            is_unwatched: false,
        };
        Arc::new(Self {
            mapping: Arc::clone(mapping),
            filemap: Arc::clone(filemap),
            leases: Arc::clone(leases),
            is_leased: AtomicBool::new(false),
            revalidated: AtomicU64::new(0),
            state: RankedMutex::new(Rank::Lease, state),
        })
    }

    /// A handle is opened that may do `access`; the file was as in `found` a moment ago. One that reads for viewers
    /// has a lease or a look only when its watch is in force: [`CoherenceState::enter_watched`].
    pub(super) fn enter(self: &Arc<Self>, access: OpenMode, found: &Attributes) -> Result<()> {
        if access.coherence == Coherence::Lease {
            let mut state = self.state.lock();
            state.wanted += 1;
            if access.for_viewer {
                state.for_viewers += 1;
                // A cut of before the watch is the only change that there can be under a lease, and leaves no byte.
                if state.lease.is_some() && found.size != self.mapping.size() {
                    self.end(&mut state);
                }
                return Ok(());
            }
            self.ask_at_open(&mut state);
        }
        if access.coherence == Coherence::Immutable || self.holds_lease() {
            return Ok(());
        }
        self.revalidated.store(now(), Ordering::Relaxed);
        self.filemap.renew(&self.mapping, found)
    }

    /// The last handle that wanted a lease ends it, and the last that read for viewers ends the watch.
    pub(super) fn leave(&self, access: OpenMode) {
        if access.coherence != Coherence::Lease {
            return;
        }
        let mut state = self.state.lock();
        state.wanted -= 1;
        if state.wanted == 0 && self.confirm(&mut state) {
            self.release_lease(&mut state, Validation::Kernel);
            state.no_lease = NoLease::NotAsked;
        }
        state.for_viewers -= usize::from(access.for_viewer);
        let mut ended = None;
        if state.for_viewers == 0 {
            // Before the watch ends: a viewer from which its handle was taken may look at the record still, and a
            // lease that another handle keeps does not notice cuts from here on.
            if self.mapping.record().validation() == Validation::Leased {
                self.mapping.record().set_validation(Validation::Kernel);
            }
            state.is_unwatched = false;
            ended = state.watch.take();
        }
        drop(state);
        drop(ended); // without the lock
    }

    /// Keeps a watch that notices cuts, in place of the one before, until the last handle that reads for viewers is
    /// closed. If it has ended by now, [`CoherenceState::note_change`] is called after this.
    pub fn keep_watch(&self, watch: Box<dyn std::fmt::Debug + Send>) {
        let mut state = self.state.lock();
        let before = state.watch.replace(watch);
        state.is_unwatched = false;
        drop(state);
        drop(before); // without the lock
    }

    pub fn enter_watched(self: &Arc<Self>) -> Result<()> {
        self.ask_at_open(&mut self.state.lock());
        if self.holds_lease() { Ok(()) } else { self.revalidate() }
    }

    /// The version of which all cached pages are when the last handle, which wanted `policy`, goes, and which any
    /// later change ends; `None` if there is none. Asks no file system. It stays true whichever handles are opened
    /// meanwhile: pages cached later of a file with the same times were read of the same bytes.
    pub(super) fn observed_times(&self, policy: Coherence) -> Option<ObservedTimes> {
        match policy {
            // A store to mapped memory may have happened both before and after a page was read, and times report only
            // the first. So a lease was seen, or the pages go.
            Coherence::Lease => self
                .state
                .lock()
                .left
                .filter(|left| left.version.settled)
                .map(|left| ObservedTimes::by(&left)),
            // Times are what such a handle goes by while it is open, and so they do after that.
            Coherence::Check | Coherence::CheckEvery(_) | Coherence::Immutable => {
                self.mapping.is_settled().then(|| ObservedTimes::of(&self.mapping))
            }
        }
    }

    fn release_lease(&self, state: &mut RankedGuard<'_, LeaseState>, validation: Validation) {
        self.mapping.record().set_validation(validation);
        state.doubtful |= validation == Validation::Kernel;
        // The attributes of the file while it cannot change. The lease is checked again afterwards: if this thread
        // was delayed in between, the kernel may have revoked the lease, and the attributes may be of any time.
        let attributes = self.mapping.backend().attributes().ok().filter(|_| self.times_tell());
        // A file of another size was cut under the lease.
        let attributes = attributes.filter(|file| file.size == self.mapping.size());
        state.left = attributes.filter(|_| state.lease.as_ref().is_some_and(Lease::stands));
        self.is_leased.store(false, Ordering::SeqCst); // partner: see `end`
        state.lease = None;
    }

    // ---- for viewers ----------------------------------------------------------------------------

    /// A viewer's descriptor is attached: says in the record how far viewers may trust cached pages, and why there
    /// is no lease. `without_lease` is for where there is none; [`Validation::Immutable`] holds in any case.
    pub fn admit(&self, without_lease: Validation) -> Result<(Validation, NoLease)> {
        let mut state = self.state.lock();
        let is_leased = self.confirm(&mut state);
        let validation = if is_leased && without_lease != Validation::Immutable {
            Validation::Leased
        } else {
            without_lease
        };
        if state.doubtful && !is_leased && validation != Validation::Kernel {
            self.filemap.invalidate(&self.mapping)?;
            state.doubtful = false;
        }
        self.mapping.record().set_validation(validation);
        Ok((validation, state.no_lease))
    }

    /// A viewer is about to open the file for writing: it need not wait for the lease.
    pub fn expect_writer(&self, without_lease: Validation) {
        let mut state = self.state.lock();
        if self.confirm(&mut state) {
            self.release_lease(&mut state, without_lease);
            (state.no_lease, state.again) = (NoLease::OpenForWriting, 0);
        }
    }

    /// A viewer cuts the file in a way that breaks no lease: no reader gets the pages cached before when this returns.
    pub fn invalidate_for_cut(&self) {
        let mut state = self.state.lock();
        self.end(&mut state);
        state.left = None;
    }

    /// The file has changed a moment ago. Under a lease, that was a cut which does not break it, and no reader gets the
    /// pages cached before when this returns. Without one, a process writes that waited for its end, or cut the file
    /// before that.
    pub fn note_change(&self) {
        let mut state = self.state.lock();
        if state.lease.is_some() {
            self.end(&mut state);
        }
        state.left = None;
        state.is_unwatched = state.for_viewers > 0;
    }

    /// Whether the file has not changed since its cached pages were read, and cannot. No system call.
    #[inline]
    pub(super) fn holds_lease(&self) -> bool {
        // Acquire, partner: the Release in `begin`: pages forgotten there are not found by a thread that sees this.
        self.is_leased.load(Ordering::Acquire) && self.leases.are_seen_at(now())
    }

    #[inline]
    pub(super) fn assure(self: &Arc<Self>, policy: Coherence) -> Result<()> {
        match policy {
            Coherence::Check | Coherence::Immutable => Ok(()),
            _ if self.holds_lease() => Ok(()),
            Coherence::Lease if self.is_writer() => Ok(()),
            Coherence::Lease if self.has_lease_or_revalidates()? => Ok(()),
            Coherence::Lease if self.times_miss_stores() => self.filemap.invalidate(&self.mapping).map(drop),
            Coherence::Lease => Ok(()),
            Coherence::CheckEvery(time) => self.revalidate_if_older(time),
        }
    }

    /// As [`Self::assure`], for a viewer, whose own reads go by the file's times: no pages are forgotten, which would
    /// be those of its request before.
    pub(super) fn assure_for_viewer(self: &Arc<Self>, policy: Coherence) -> Result<()> {
        let is_by_lease = policy == Coherence::Lease && !self.holds_lease() && !self.is_writer();
        if is_by_lease { self.has_lease_or_revalidates().map(drop) } else { self.assure(policy) }
    }

    /// Whether there is a lease. If not, the file has been revalidated.
    #[cold]
    fn has_lease_or_revalidates(self: &Arc<Self>) -> Result<bool> {
        let mut state = self.state.lock();
        if self.confirm(&mut state) {
            return Ok(true); // not looked at for long, and it stands
        }
        self.ask(&mut state);
        if state.lease.is_some() {
            return Ok(true);
        }
        drop(state);
        self.revalidate().map(|()| false)
    }

    #[cold]
    fn revalidate_if_older(&self, time: Duration) -> Result<()> {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if now().saturating_sub(self.revalidated.load(Ordering::Relaxed)) < time {
            return Ok(());
        }
        self.revalidate()
    }

    fn revalidate(&self) -> Result<()> {
        self.revalidated.store(now(), Ordering::Relaxed);
        self.filemap.revalidate(&self.mapping).map(drop)
    }

    /// Whether this cache has the file open for writing; it keeps it open so for as long as it knows the file.
    fn is_writer(&self) -> bool {
        self.mapping.writeback().writer().is_some()
    }

    fn in_force(&self, wanted: Coherence) -> CoherenceInForce {
        let mut state = self.state.lock();
        let is_leased = self.confirm(&mut state);
        let why = if state.wanted > 0 && self.is_writer() { NoLease::WrittenHere } else { state.no_lease };
        let no_lease = (!is_leased).then_some(why);
        let in_force = match wanted {
            Coherence::Immutable => wanted,
            _ if is_leased => Coherence::Lease,
            Coherence::Lease if no_lease == Some(NoLease::WrittenHere) => Coherence::Check,
            Coherence::Lease => Coherence::CheckEvery(Duration::ZERO),
            Coherence::Check | Coherence::CheckEvery(_) => wanted,
        };
        CoherenceInForce { wanted, in_force, no_lease }
    }

    // ---- with the lock of the file's lease ------------------------------------------------------

    fn confirm(&self, state: &mut RankedGuard<'_, LeaseState>) -> bool {
        let stands = state.lease.as_ref().is_some_and(Lease::stands);
        if !stands && state.lease.is_some() {
            self.end(state);
        }
        stands
    }

    fn ask_at_open(self: &Arc<Self>, state: &mut RankedGuard<'_, LeaseState>) {
        if state.no_lease == NoLease::OpenForWriting {
            state.again = 0; // the process that had it open may have closed it just now
        }
        self.ask(state);
    }

    /// Asks for a lease, if there is none and it is time. There is none while the file is unwatched: such a lease
    /// does not notice cuts, and a viewer that looks at times would be given old bytes.
    fn ask(self: &Arc<Self>, state: &mut RankedGuard<'_, LeaseState>) {
        if state.lease.is_some() || state.is_unwatched || now() < state.again {
            return;
        }
        let holder: Weak<Self> = Arc::downgrade(self);
        let taken = match self.is_writer() {
            true => Err(NoLease::WrittenHere),
            false => self.leases.take(&self.mapping.backend(), holder),
        };
        match taken.and_then(|lease| self.begin(state, lease)) {
            Ok(()) => {}
            Err(why) => {
                state.no_lease = why;
                let pause = if why.is_transient() { ASKED_AGAIN } else { LEFT_ALONE };
                state.again = now().saturating_add(pause.as_nanos() as u64);
            }
        }
    }

    /// There is a lease, 1: the file does not change from here on.
    fn begin(
        &self,
        state: &mut RankedGuard<'_, LeaseState>,
        lease: Lease,
    ) -> std::result::Result<(), NoLease> {
        // 2
        if !self.is_as_left(state.left.take()) {
            let forgotten = self.filemap.invalidate(&self.mapping);
            forgotten.map_err(|error| NoLease::System(error.raw_os_error().unwrap_or(libc::EIO)))?;
        }
        state.doubtful = false;
        // 3
        state.lease = Some(lease);
        // Viewers that look at times do so until one attaches the file: it is watched from then on, see
        // `owner/truncation_watch.rs`.
        self.is_leased.store(true, Ordering::Release); // partner: the Acquire in `holds_lease`
        Ok(())
    }

    /// Whether the file is as it was at the end of the last lease, for sure.
    fn is_as_left(&self, left: Option<Attributes>) -> bool {
        let Some(left) = left.filter(|left| left.version.settled) else { return false };
        self.mapping
            .backend()
            .attributes()
            .is_ok_and(|file| ObservedTimes::by(&file) == ObservedTimes::by(&left))
    }

    fn times_tell(&self) -> bool {
        let backend = self.mapping.backend();
        backend.leasable().is_some_and(|leasable| leasable.times == FileTimes::ChangedByStores)
    }

    /// Whether a process that has the file mapped may change it while its times stay as they are: where its pages are
    /// the file, and are never cleaned to be stored to anew.
    fn times_miss_stores(&self) -> bool {
        let backend = self.mapping.backend();
        // Not by the lease that might be had: there is none by a descriptor that others share.
        let descriptor =
            backend.descriptor().or_else(|| backend.leasable().map(|leasable| leasable.descriptor));
        descriptor.is_some_and(is_memory_file)
    }

    fn end(&self, state: &mut RankedGuard<'_, LeaseState>) {
        // 1: SeqCst, so that a thread that reads after the writer's open has returned sees it; the system call of step
        // 3, and that by which it learns of it, partner with it.
        self.is_leased.store(false, Ordering::SeqCst);
        self.mapping.record().set_validation(Validation::Kernel);
        state.doubtful = true;
        // 2
        let pages = self.mapping.invalidate_unsettled();
        self.filemap.counters.add(Count::Invalidated, pages);
        // 3
        state.no_lease = NoLease::GivenUp;
        state.again = now().saturating_add(LEFT_ALONE.as_nanos() as u64);
        state.lease = None;
    }
}

impl LeaseHolder for CoherenceState {
    fn check(&self) {
        self.confirm(&mut self.state.lock());
    }

    fn give_up(&self) {
        let mut state = self.state.lock();
        if self.confirm(&mut state) {
            // A thread that writes meanwhile may be any process, and times report its writes too late.
            self.release_lease(&mut state, Validation::Kernel);
            // Not before the opener has been stopped.
            state.again = now().saturating_add(LEFT_ALONE.as_nanos() as u64);
            state.no_lease = NoLease::GivenUp;
        }
    }
}

impl File {
    /// How this handle deals with changes by others now, and why. Asks the kernel; waits for a lease's end.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn coherence(&self) -> Result<CoherenceInForce> {
        if self.process.is_forked() {
            return Err(Error::from(Repr::Forked));
        }
        Ok(self.handle.watch.in_force(self.handle.access.coherence))
    }

    pub(super) fn holds_lease(&self) -> bool {
        self.handle.watch.holds_lease()
    }

    pub(super) fn is_size_guaranteed(&self) -> bool {
        match self.handle.access.coherence {
            Coherence::Immutable => true,
            Coherence::Check => false,
            Coherence::CheckEvery(_) | Coherence::Lease => self.handle.watch.holds_lease(),
        }
    }

    /// Before a read: looks at the file, if the handle's policy wants it. Not in a forked child.
    #[inline]
    pub(super) fn assure(&self) -> Result<()> {
        self.handle.watch.assure(self.handle.access.coherence)
    }

    /// As [`Self::assure`], for a viewer.
    pub(super) fn assure_for_viewer(&self) -> Result<()> {
        self.handle.watch.assure_for_viewer(self.handle.access.coherence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::serving::ServedFile;
    use crate::{Cache, OpenOptions};

    /// 1. A viewer is about to open a file for writing, and its lease is given up. The cached pages stay.
    /// 2. A notice of a change of the file comes, which may be a cut of before that.
    /// 3. At the next lease the cached pages are forgotten, though the file's times are as they were.
    #[test]
    fn pages_kept_beyond_a_lease_are_forgotten_after_a_notice_of_a_change() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 40_000]).expect("it has room");
        let cache = Cache::builder().memory(16 << 20).build().expect("a cache");
        let leased = || loop {
            let file =
                cache.open_with(&path, OpenOptions::new().coherence(Coherence::Lease)).expect("a file");
            let is_old = file.handle.mapping.backend().attributes().expect("it is there").version.settled;
            // As long as a child of another test starts it may have the file open for writing.
            if is_old && file.coherence().expect("it is asked").in_force == Coherence::Lease {
                return file;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        for is_notified in [false, true] {
            let file = leased();
            file.read_exact_at(&mut [0; 40_000], 0).expect("it is there");
            let cached = file.cached_pages();
            file.expect_writer(Validation::Kernel);
            if is_notified {
                file.coherence_state().note_change();
            }
            let again = leased();
            assert_eq!(again.cached_pages(), if is_notified { 0 } else { cached });
        }
    }
}
