//! Ring: reads and writes by io_uring, reaped by the threads that wait.
//!
//! ```text
//!   submit --> backlogs of jobs --cut--> parts, at most `queue_depth` --> queue --claimed--> kernel
//!                   ^                                                                        |
//!                   | refilled by the thread that reaps                                      v
//!   Work::complete <-- job, when its last part has ended <-------- leader <------------ completions
//! ```
//!
//! A **job** is one fill or one flush of one file. It is cut into **parts** of at most
//! `io_bytes_max` bytes, each one request in the kernel's hands. Parts end in
//! any order; the job ends with its last part. Bytes of a part that came before that have *arrived*: their readers
//! are woken, and keep them whatever becomes of the other parts. Reads and writes of a device stand in one backlog, in
//! one order.
//!
//! `submit` never waits for the device. Requests that do not fit into the queue stay in the backlog, from which a
//! thread that reaps refills it. The backlog needs no bound of its own: each fill in it holds frames of the arena.
//!
//! **Shares.** A device may have one more part only while it has fewer than [`SHARE`] times the places that are free:
//! four fifths of all if it is alone, and a second one four fifths of the rest. So one that hangs leaves places to
//! others, and no place is set aside that a device which needs it could not have; but none has all places, which
//! of four or fewer would be its share. The rule is that of A. K. Choudhury
//! and E. L. Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998. Devices take turns.
//!
//! **Claims.** A part is pushed into the queue under the lock. The kernel is entered without the lock, because that
//! takes long, and the leader would wait for the lock meanwhile. So the thread that pushed takes a [`SubmitClaim`] to
//! the queued entries, and enters the kernel with it. A thread that submits and waits at once
//! ([`RingDriver::submit_with_reap`]) leaves the entries unclaimed: a leader claims them, and one system call is both.
//!
//! **Large reads** are not merged. The kernel would make one request of many parts that follow each other, if it is
//! told of them in one system call, and a reader that has caught up with its stream would wait for 4 MiB in place of
//! 512 KiB. So it is told of two at a time. The device is as fast with several parts of half a MiB (`bench readseq`).
//!
//! A kernel that refuses a claim takes nothing more, from any thread. But others may be on their way into it with
//! claims, and it takes the oldest entries first: so the last to come back knows which parts it never took.
//!
//! **Leader and followers.** Completions are fetched by the threads that wait for them. One at a time is the *leader*:
//! it holds the [`LeaderLock`], which gives it the completion half of the ring. It fetches, ends parts and jobs, and if
//! its own event has not come, waits in the kernel for one more completion. The others sleep in the [`WaitQueue`] on
//! the predicate `done() || wants_leader()`, where `wants_leader()` is "the leader is free and something is in flight
//! or unclaimed".
//!
//! No wake-up is lost, because every change that can make that predicate true
//! is followed by a check of the wait queue by the thread that made it:
//!  * `done()` becomes true when a fill completes: the sink wakes the wait queue.
//!  * The leader's place becomes free: [`LeaderLock::leave`] is followed by `wake`, also when the leader unwinds.
//!  * Something comes in flight while there is no leader: a thread that has entered and does not lead raises the
//!    count, passes a full fence and reads the leader's place. If it reads it free it wakes the wait queue. If it reads
//!    it taken, then the leader's leaving comes later in the order of fences than the count, so the threads that the
//!    leader's own `wake` wakes see the count.
//!  * Something is left unclaimed: by a thread that reaps next, and leads or finds a leader; it claims either way.
//!
//! And no leader waits for nothing: parts are counted in flight only when the kernel has them, and only the leader
//! takes completions out. So a count above zero means that a completion is there or will come. (A completion may come
//! before it is counted: then a leader may leave too early, and the thread that counts looks at the leader afterwards.)
//!
//! Invariants:
//!  1. The completion queue is touched only by the leader, the submission queue only under the lock; at most
//!     `queue_depth` parts exist, which is not more than the completion queue holds, and half of what the submission
//!     queue holds: a part may end before its place there is free.
//!  2. No lock is held when a fill is completed.
//!  3. A part's buffer and file live until its completion has been fetched: its job owns both.
//!  4. While a backlog is not empty, parts of its device are in flight or about to be, or all places are taken: a
//!     thread that waits makes it move.
//!  5. A claim is carried to the kernel by the thread that took it, whatever else it does.
//!
//! Neither buffers nor files are registered with the kernel. Measured with parts of 1 MiB, that would save 3 ms of
//! processor time for each GiB, of which the copy to the reader alone takes 95, and it would lock the arena in memory.
//!
//! `fake_kernel.rs` runs this against a kernel that takes every liberty it has.
//!
//! Not an invariant: that a thread leads while something is in flight. If no thread waits, none needs to. Nor that many
//! devices which hang leave a place: of 128 the first has 103, the next 20, then 4, then the last. Nor that the leader
//! asks a file for its end: where that may wait for another machine, a second read finds it.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering, fence};
use std::time::Duration;

use super::open_file::{IoMode, OpenFile};
use super::slab::{Key, Slab};
use super::threads::Source;
use super::transfer::{Transfer, TransferStep};
use super::work::{TransferDirection, Work};
use super::{FlushError, PagesRead, ReapMode, ReapOutcome, WaitQueue};
use crate::sync::contained;
use crate::sync::{Rank, RankedGuard, RankedMutex};
use crate::sys::ring::{
    Completion, CompletionWait, EnterRefused, Entries, Gate, ReapHalf, Request, RequestBuffer, RingRefused,
    SENT_AT_ONCE, SubmitHalf,
};

/// How often a part that the kernel cannot serve now is asked for again before it counts as failed.
const TRIES_MAX: u32 = 1000;
/// The longest wait of the leader before it looks whether it is done: what it waits for may be done by a thread, as the
/// last page of a file is, while no request of the ring ends.
const LEADER_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// The parts that a device may have for each place that is free.
const SHARE: usize = 4;
/// While others have many jobs, a device may have so many, as 1 / so many of the queue's depth, before it is busy.
const LEAST_CAPACITY: usize = 4;
/// Places in the submission queue for each part that may exist. The kernel frees the places of the entries that it
/// takes in one call together: by then some of their parts may have ended, and others been pushed.
pub(super) const PLACES_PER_PART: usize = 2;
/// A read is a large one if it is at least so large a part of the largest request: 128 KiB by default.
pub(super) const LARGE_SHARE: usize = 4;
/// How long a leader pauses when the kernel does not let it wait.
const REFUSED_PAUSE: Duration = Duration::from_millis(1);

/// The kernel's interface, as far as the driver needs it. Tests have one that delays, reorders and refuses.
pub(super) trait Kernel: fmt::Debug {
    type Submit: fmt::Debug + Send;
    type Gate: fmt::Debug + Send + Sync;
    type Reap: fmt::Debug + Send;

    fn submit_places(half: &Self::Submit) -> usize;
    fn reap_places(half: &Self::Reap) -> usize;
    fn queued(half: &mut Self::Submit) -> usize;
    /// See [`SubmitHalf::push`].
    ///
    /// # Safety
    /// As there.
    unsafe fn push(half: &mut Self::Submit, file: BorrowedFd<'_>, request: Request);
    fn enter(gate: &Self::Gate, entries: Entries, wait: CompletionWait) -> Result<(), EnterRefused>;
    fn drain(half: &mut Self::Reap, completed: &mut Vec<Completion>);
}

#[derive(Debug)]
pub(super) struct Uring;

impl Kernel for Uring {
    type Submit = SubmitHalf;
    type Gate = Gate;
    type Reap = ReapHalf;

    fn submit_places(half: &SubmitHalf) -> usize {
        half.capacity()
    }
    fn reap_places(half: &ReapHalf) -> usize {
        half.capacity()
    }
    fn queued(half: &mut SubmitHalf) -> usize {
        half.queued()
    }
    unsafe fn push(half: &mut SubmitHalf, file: BorrowedFd<'_>, request: Request) {
        // SAFETY: the caller's promise.
        unsafe { half.push(file, request) };
    }
    fn enter(gate: &Gate, entries: Entries, wait: CompletionWait) -> Result<(), EnterRefused> {
        gate.enter(entries, wait)
    }
    fn drain(half: &mut ReapHalf, completed: &mut Vec<Completion>) {
        half.drain(completed);
    }
}

#[derive(Debug)]
pub(super) struct RingDriver<K: Kernel = Uring> {
    submission: RankedMutex<SubmissionState<K>>,
    gate: K::Gate,
    leader: LeaderLock<K>,
    /// Parts that the kernel has taken and that were not fetched. Below 0 if one was fetched before it was counted.
    in_flight: AtomicIsize,
    /// Parts in the queue that are unclaimed; changed under the lock.
    unclaimed: AtomicUsize,
    /// Parts claimed by threads that have not come back from the kernel.
    claimed: AtomicUsize,
    outstanding: AtomicUsize,
    is_refused: AtomicBool,
    wait_queue: Arc<WaitQueue>,
    queue_depth: usize,
}

/// The two halves of a ring, and the way into the kernel.
pub(super) struct RingParts<K: Kernel> {
    pub half: K::Submit,
    pub gate: K::Gate,
    pub reap: K::Reap,
}

impl RingDriver<Uring> {
    pub(super) fn new(
        wait_queue: Arc<WaitQueue>,
        queue_depth: usize,
        io_bytes_max: usize,
    ) -> Result<Self, RingRefused> {
        let (half, gate, reap) = crate::sys::ring::ring((queue_depth * PLACES_PER_PART) as u32)?;
        Ok(Self::over(wait_queue, RingParts { half, gate, reap }, queue_depth, io_bytes_max))
    }
}

impl<K: Kernel> RingDriver<K> {
    pub(super) fn over(
        wait_queue: Arc<WaitQueue>,
        parts: RingParts<K>,
        queue_depth: usize,
        io_bytes_max: usize,
    ) -> Self {
        let RingParts { half, gate, reap } = parts;
        let queue_depth =
            queue_depth.min(K::submit_places(&half) / PLACES_PER_PART).min(K::reap_places(&reap));
        let submission = SubmissionState {
            half: Some(half),
            pushed: VecDeque::with_capacity(queue_depth),
            refusal: None,
            parts: Slab::new(),
            jobs: Slab::new(),
            shares: Vec::new(),
            turn: 0,
            large_reads: 0,
            queue_depth,
            io_bytes_max,
            news: Vec::new(),
        };
        Self {
            submission: RankedMutex::new(Rank::Submit, submission),
            gate,
            leader: LeaderLock {
                is_taken: AtomicBool::new(false),
                state: UnsafeCell::new(LeaderState::new(reap)),
            },
            in_flight: AtomicIsize::new(0),
            unclaimed: AtomicUsize::new(0),
            claimed: AtomicUsize::new(0),
            outstanding: AtomicUsize::new(0),
            is_refused: AtomicBool::new(false),
            wait_queue,
            queue_depth,
        }
    }

    pub(super) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    pub(super) fn wakes(&self, wait_queue: &Arc<WaitQueue>) -> bool {
        Arc::ptr_eq(&self.wait_queue, wait_queue)
    }

    /// Whether `fills` more of that device are no burden: few are under way in all, or, while others have many, of it.
    pub(super) fn has_capacity(&self, device: u64, fills: usize) -> bool {
        let in_flight = usize::try_from(self.in_flight.load(Ordering::Relaxed)).unwrap_or(0);
        self.outstanding.load(Ordering::Relaxed).max(in_flight) + fills <= self.queue_depth
            || self.submission.lock().jobs_of(device) + fills <= self.queue_depth / LEAST_CAPACITY
    }

    /// Starts filling and flushing. Never waits for the device.
    pub(super) fn submit(&self, file: &Arc<OpenFile>, work: impl ExactSizeIterator<Item = Work>) {
        let mut finished = Vec::new();
        let mut submission = self.add(file, work, &mut finished);
        let claim = self.claim(&mut submission);
        drop(submission);
        self.hand_over(claim);
        if self.complete(&mut finished) > 0 {
            self.wait_queue.wake();
        }
    }

    /// Has the kernel take the claimed entries, for a thread that does not lead, and ensures that one does.
    fn hand_over(&self, claim: SubmitClaim) {
        if claim.is_empty() {
            return;
        }
        self.enter(claim, CompletionWait::NotAwaited);
        // Partner: the fence in `WaitQueue::wake`, which follows each release of the leader's place.
        fence(Ordering::SeqCst);
        if self.wants_leader() {
            self.wait_queue.wake();
        }
    }

    /// As [`RingDriver::submit`], by a caller of [`RingDriver::reap`] next, with [`ReapMode::Wait`].
    pub(super) fn submit_with_reap(&self, file: &Arc<OpenFile>, work: impl ExactSizeIterator<Item = Work>) {
        let mut finished = Vec::new();
        drop(self.add(file, work, &mut finished));
        if self.complete(&mut finished) > 0 {
            self.wait_queue.wake();
        }
    }

    fn add(
        &self,
        file: &Arc<OpenFile>,
        work: impl ExactSizeIterator<Item = Work>,
        finished: &mut Vec<RingJob>,
    ) -> RankedGuard<'_, SubmissionState<K>> {
        self.outstanding.fetch_add(work.len(), Ordering::Relaxed);
        let mut submission = self.submission.lock();
        for work in work {
            submission.add(work, Arc::clone(file));
        }
        self.pump(&mut submission, &[], finished);
        submission
    }

    /// Whether there is no leader and there is something to be fetched or claimed. Takes no lock.
    pub(super) fn wants_leader(&self) -> bool {
        !self.leader.is_taken() && (self.in_flight.load(Ordering::Relaxed) > 0 || self.has_unclaimed())
    }

    fn has_unclaimed(&self) -> bool {
        self.unclaimed.load(Ordering::Relaxed) > 0
    }

    /// See [`Backend::reap`](super::Backend::reap). The caller leads until it is done or nothing is in flight.
    pub(super) fn reap(&self, mut how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        let Some(mut leader) = LeaderGuard::take(self) else {
            self.hand_over(self.claim_left());
            return ReapOutcome::Busy;
        };
        let mut fills = 0;
        loop {
            fills += leader.fetch();
            if !how.waits() || done() {
                self.enter(self.claim_left(), CompletionWait::NotAwaited);
                return ReapOutcome::Some(fills);
            }
            let claim = self.claim_left();
            if claim.is_empty() && self.in_flight.load(Ordering::Relaxed) <= 0 {
                return if fills > 0 { ReapOutcome::Some(fills) } else { ReapOutcome::Elsewhere };
            }
            match how {
                ReapMode::WaitFor(time) => {
                    self.enter(claim, CompletionWait::AwaitedFor(time));
                    how = ReapMode::Ready; // one wait
                }
                _ => self.enter(claim, CompletionWait::AwaitedFor(LEADER_CHECK_INTERVAL)),
            }
        }
    }

    pub(super) fn drain(&self) {
        // Partner: the release in `complete`; the stores of a sink are visible to a caller that has drained.
        let mut is_idle = || self.outstanding.load(Ordering::Acquire) == 0;
        while !is_idle() {
            match self.reap(ReapMode::Wait, &mut is_idle) {
                ReapOutcome::Some(_) => {}
                ReapOutcome::Busy | ReapOutcome::Elsewhere => {
                    self.wait_queue.sleep(&mut || is_idle() || self.wants_leader());
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn check_idle(&self) {
        let submission = self.submission.lock();
        assert_eq!((submission.parts.len(), submission.jobs.len(), submission.news.len()), (0, 0, 0));
        assert_eq!(self.in_flight.load(Ordering::Relaxed), 0);
        let counts = [&self.unclaimed, &self.claimed, &self.outstanding].map(|n| n.load(Ordering::Relaxed));
        assert_eq!(counts, [0; 3], "unclaimed, claimed, outstanding");
        assert!(!self.leader.is_taken());
    }

    fn pump(&self, submission: &mut SubmissionState<K>, again: &[Key], finished: &mut Vec<RingJob>) {
        let pushed = submission.pump(again, finished);
        let before = self.unclaimed.load(Ordering::Relaxed);
        self.unclaimed.store(before + pushed, Ordering::Relaxed);
    }

    /// Empty once the kernel has refused: the last thread to return its claim fails the parts that were not taken.
    fn claim(&self, submission: &mut SubmissionState<K>) -> SubmitClaim {
        if submission.refusal.is_some() {
            return SubmitClaim::NOTHING;
        }
        let parts = self.unclaimed.load(Ordering::Relaxed);
        self.unclaimed.store(0, Ordering::Relaxed);
        self.claimed.fetch_add(parts, Ordering::Relaxed);
        SubmitClaim { parts, large_reads: std::mem::take(&mut submission.large_reads) }
    }

    /// As [`RingDriver::claim`], for callers that have pushed nothing just now. Mostly takes no lock.
    fn claim_left(&self) -> SubmitClaim {
        if self.has_unclaimed() { self.claim(&mut self.submission.lock()) } else { SubmitClaim::NOTHING }
    }

    /// Has the kernel take the claimed entries, and waits for a completion if `wait` says so. Holds no lock.
    fn enter(&self, claim: SubmitClaim, wait: CompletionWait) {
        let SubmitClaim { parts, large_reads } = claim;
        // For many small requests, one system call costs less than several.
        let at_a_time = if 2 * large_reads > parts { SENT_AT_ONCE } else { usize::MAX };
        let refused = K::enter(&self.gate, Entries { count: parts, at_a_time }, wait).err();
        let left = refused.as_ref().map_or(0, |refused| refused.left);
        self.in_flight.fetch_add((parts - left) as isize, Ordering::Relaxed);
        match refused {
            Some(EnterRefused { left: 1.., error }) => {
                self.submission.lock().refusal = Some(error);
                self.is_refused.store(true, Ordering::Relaxed);
            }
            // The kernel does not let this thread wait, so completions, which still come, are looked for now and then.
            Some(_) => std::thread::sleep(REFUSED_PAUSE),
            None => {}
        }
        // AcqRel; partner: the same line of the others: the last to come back sees every refusal, and the kernel
        // takes nothing after it.
        if parts > 0 && self.claimed.fetch_sub(parts, Ordering::AcqRel) == parts && self.is_refused() {
            self.give_up();
        }
    }

    /// The kernel has refused, and no thread is on the way into it with a claim: it never takes the queued entries.
    fn give_up(&self) {
        let mut finished = Vec::new();
        let mut submission = self.submission.lock();
        submission.fail_pushed(&mut finished);
        self.unclaimed.store(0, Ordering::Relaxed);
        drop(submission);
        self.complete(&mut finished);
        self.wait_queue.wake();
    }

    /// Ends the work of `finished`. Holds no lock.
    fn complete(&self, finished: &mut Vec<RingJob>) -> usize {
        let fills = finished.len();
        for job in finished.drain(..) {
            let (work, outcome) = job.outcome();
            // A sink that panics must take neither the other work with it nor a reader that leads for others.
            contained(|| work.complete(outcome));
            // Partner: the acquire in `drain`.
            self.outstanding.fetch_sub(1, Ordering::Release);
        }
        fills
    }
}

#[derive(Debug)]
#[must_use = "no other thread will tell the kernel of these parts"]
struct SubmitClaim {
    parts: usize,
    /// The kernel takes the oldest entries first, so those of another claim may go as this says.
    large_reads: usize,
}

impl SubmitClaim {
    const NOTHING: Self = Self { parts: 0, large_reads: 0 };

    fn is_empty(&self) -> bool {
        self.parts == 0
    }
}

#[derive(Debug)]
struct LeaderLock<K: Kernel> {
    is_taken: AtomicBool,
    state: UnsafeCell<LeaderState<K>>,
}

/// State that only the leader touches. The lists are empty between two fetches.
#[derive(Debug)]
struct LeaderState<K: Kernel> {
    half: K::Reap,
    completed: Vec<Completion>,
    finished: Vec<RingJob>,
}

impl<K: Kernel> LeaderState<K> {
    fn new(half: K::Reap) -> Self {
        Self { half, completed: Vec::new(), finished: Vec::new() }
    }
}

// SAFETY: `state` is reached only through a `LeaderGuard`, of which there is one at a time.
unsafe impl<K: Kernel> Sync for LeaderLock<K> {}

impl<K: Kernel> LeaderLock<K> {
    fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::Relaxed)
    }
    fn try_take(&self) -> bool {
        // Acquire; partner: the release in `leave`. The new leader sees all changes of the last one to the queue.
        self.is_taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
    fn leave(&self) {
        // Partner: the acquire in `try_take`.
        self.is_taken.store(false, Ordering::Release);
    }
}

/// The leader's place, held. Dropping it wakes the wait queue, so that a follower can take over.
struct LeaderGuard<'a, K: Kernel> {
    driver: &'a RingDriver<K>,
}

impl<'a, K: Kernel> LeaderGuard<'a, K> {
    fn take(driver: &'a RingDriver<K>) -> Option<Self> {
        driver.leader.try_take().then(|| Self { driver })
    }

    fn state(&mut self) -> &mut LeaderState<K> {
        // SAFETY: this thread is the leader, so this is the only `LeaderGuard`, borrowed as long as the reference.
        unsafe { &mut *self.driver.leader.state.get() }
    }

    fn fetch(&mut self) -> usize {
        let driver = self.driver;
        let LeaderState { half, completed, finished } = self.state();
        K::drain(half, completed);
        if completed.is_empty() {
            return 0;
        }
        driver.in_flight.fetch_sub(completed.len() as isize, Ordering::Relaxed);
        let (mut doubtful, mut news) = (Vec::new(), Vec::new());
        // 1 Parts that came whole: nearly all.
        let mut submission = driver.submission.lock();
        for completed in completed.drain(..) {
            doubtful.extend(submission.land(completed, finished));
        }
        driver.pump(&mut submission, &[], finished);
        news.append(&mut submission.news);
        let mut claim = driver.claim(&mut submission);
        drop(submission);
        // 2 Parts that fell short: the file may have to be asked for its size, so without the lock.
        if !doubtful.is_empty() {
            driver.enter(claim, CompletionWait::NotAwaited);
            let verdicts: Vec<_> = doubtful.into_iter().map(ShortCompletion::resolve).collect();
            let mut submission = driver.submission.lock();
            let again =
                verdicts.into_iter().filter_map(|(key, verdict)| submission.apply(key, verdict, finished));
            let again: Vec<_> = again.collect();
            driver.pump(&mut submission, &again, finished);
            news.append(&mut submission.news);
            claim = driver.claim(&mut submission);
        }
        driver.enter(claim, CompletionWait::NotAwaited);
        // 3 Up to the cache, with no lock held.
        news.into_iter().for_each(PagesRead::wake);
        driver.complete(finished)
    }
}

impl<K: Kernel> Drop for LeaderGuard<'_, K> {
    fn drop(&mut self) {
        self.driver.leader.leave();
        self.driver.wait_queue.wake();
    }
}

#[derive(Debug)]
struct RingJob {
    work: Work,
    file: Arc<OpenFile>,
    cut: usize,
    parts: usize,
    end: usize,
    /// The first byte that failed, and how.
    failure: Option<(usize, io::Error)>,
}

impl RingJob {
    fn is_cut(&self) -> bool {
        self.cut == self.work.len()
    }
    fn is_finished(&self) -> bool {
        self.is_cut() && self.parts == 0
    }
    fn end_at(&mut self, end: usize) {
        self.end = self.end.min(end);
        self.cut = self.work.len();
    }
    /// A part failed at byte `at`; the first failure in the file's order is the one that is told.
    fn fail_at(&mut self, at: usize, error: io::Error) {
        if self.failure.as_ref().is_none_or(|&(first, _)| at < first) {
            self.failure = Some((at, error));
        }
        self.cut = self.work.len();
    }
    /// The work, and how it ended. A failure behind the file's end is none.
    fn outcome(self) -> (Work, Result<usize, FlushError>) {
        let outcome = match self.failure {
            Some((written, error)) if written < self.end => Err(FlushError { written, error }),
            _ => Ok(self.end),
        };
        (self.work, outcome)
    }
}

#[derive(Clone, Copy, Debug)]
struct RingRequest {
    job: Key,
    at: usize,
    transfer: Transfer,
    way: IoMode,
    tries: u32,
}

#[derive(Debug)]
enum CompletionVerdict {
    Complete,
    Ended(usize),
    Again(RingRequest),
    Failed(usize, io::Error),
}

#[derive(Debug)]
struct ShortCompletion {
    key: Key,
    part: RingRequest,
    file: Arc<OpenFile>,
    position: u64,
    direction: TransferDirection,
    result: i32,
}

impl ShortCompletion {
    fn resolve(self) -> (Key, CompletionVerdict) {
        let Self { key, mut part, file, position, direction, result } = self;
        // A write has no end of the file to meet. Where the file's size may keep a thread waiting, and not only for its
        // own users, another read finds the end.
        let asks = direction == TransferDirection::Read && !file.revalidation_may_wait();
        let is_end = |at| asks && file.ends_by(position + at as u64);
        let verdict = if let Ok(bytes) = usize::try_from(result) {
            match part.transfer.advance(bytes, is_end) {
                TransferStep::Complete => CompletionVerdict::Complete,
                TransferStep::Ended(bytes) if direction == TransferDirection::Write => {
                    CompletionVerdict::Failed(bytes, FlushError::stuck(bytes).error)
                }
                TransferStep::Ended(bytes) => CompletionVerdict::Ended(bytes),
                TransferStep::Again => CompletionVerdict::Again(RingRequest { tries: 0, ..part }),
            }
        } else {
            error_verdict(part, &file, io::Error::from_raw_os_error(-result))
        };
        (key, verdict)
    }
}

fn error_verdict(part: RingRequest, file: &OpenFile, error: io::Error) -> CompletionVerdict {
    match error.raw_os_error() {
        // Cancelled: the thread that submitted it has exited, and with it the kernel's helpers of that thread.
        Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED) if part.tries < TRIES_MAX => {
            CompletionVerdict::Again(RingRequest { tries: part.tries + 1, ..part })
        }
        Some(libc::EINVAL | libc::EOPNOTSUPP) if part.way == IoMode::Direct => {
            let way = file.fall_back();
            CompletionVerdict::Again(RingRequest {
                way,
                transfer: part.transfer.restart(file.align(way)),
                ..part
            })
        }
        _ => CompletionVerdict::Failed(part.transfer.rest().0, error),
    }
}

#[derive(Debug)]
struct DeviceShare {
    device: u64,
    jobs: usize,
    parts: usize,
    /// Jobs not wholly cut, oldest first. May name jobs that have ended.
    backlog: VecDeque<Key>,
}

#[derive(Debug)]
struct SubmissionState<K: Kernel> {
    /// `None` once the kernel has refused and no thread is on the way into it.
    half: Option<K::Submit>,
    /// Parts in the queue, in their order; the first of them may have been taken by the kernel already, and even have
    /// ended, and stand at the end once more.
    pushed: VecDeque<Key>,
    refusal: Option<io::Error>,
    parts: Slab<RingRequest>,
    jobs: Slab<RingJob>,
    /// A share for each device that has jobs.
    shares: Vec<DeviceShare>,
    /// The share that was cut from last.
    turn: usize,
    large_reads: usize,
    queue_depth: usize,
    io_bytes_max: usize,
    /// Pages read of jobs that continue, not reported yet.
    news: Vec<PagesRead>,
}

impl<K: Kernel> SubmissionState<K> {
    fn add(&mut self, work: Work, file: Arc<OpenFile>) {
        let (end, device) = (work.len(), file.device());
        let job = self.jobs.insert(RingJob { work, file, cut: 0, parts: 0, end, failure: None });
        let known = self.shares.iter().position(|share| share.device == device);
        let at = known.unwrap_or_else(|| {
            self.shares.push(DeviceShare { device, jobs: 0, parts: 0, backlog: VecDeque::new() });
            self.shares.len() - 1
        });
        self.shares[at].jobs += 1;
        self.shares[at].backlog.push_back(job);
    }

    fn jobs_of(&self, device: u64) -> usize {
        self.shares.iter().find(|share| share.device == device).map_or(0, |share| share.jobs)
    }

    /// One more part of the device whose turn it is, or of the next that may have one.
    fn cut(&mut self) -> Option<Key> {
        let (devices, turn) = (self.shares.len(), self.turn);
        (1..=devices).map(|step| (turn + step) % devices).find_map(|at| {
            let key = self.cut_of(at)?;
            self.turn = at;
            Some(key)
        })
    }

    fn cut_of(&mut self, at: usize) -> Option<Key> {
        let (share, free) = (&mut self.shares[at], self.queue_depth.saturating_sub(self.parts.len()));
        // Of few places its share would be all.
        let is_last = share.parts + 1 >= self.queue_depth.max(2);
        if share.parts >= SHARE * free || is_last {
            return None;
        }
        while let Some(&key) = share.backlog.front() {
            let Some(job) = self.jobs.get_mut(key).filter(|job| !job.is_cut()) else {
                share.backlog.pop_front();
                continue;
            };
            let (at, len) = (job.cut, self.io_bytes_max.min(job.work.len() - job.cut));
            job.cut += len;
            job.parts += 1;
            share.parts += 1;
            let way = job.file.way();
            let transfer = Transfer::new(len, job.file.align(way));
            return Some(self.parts.insert(RingRequest { job: key, at, transfer, way, tries: 0 }));
        }
        None
    }

    /// Counts `parts` parts and `jobs` jobs of `device` as ended.
    fn note_ended(&mut self, device: u64, parts: usize, jobs: usize) {
        let at =
            self.shares.iter().position(|share| share.device == device).expect("a job's device is known");
        let share = &mut self.shares[at];
        share.parts -= parts;
        share.jobs -= jobs;
        if share.jobs == 0 {
            self.shares.swap_remove(at);
        }
    }

    fn pump(&mut self, again: &[Key], finished: &mut Vec<RingJob>) -> usize {
        if self.refusal.is_some() || self.half.is_none() {
            self.fail(again, finished);
            self.fail_backlog(finished);
            return 0;
        }
        let mut half = self.half.take().expect("it was looked for");
        let mut count = again.len();
        again.iter().for_each(|&key| self.push(&mut half, key));
        while let Some(key) = self.cut() {
            self.push(&mut half, key);
            count += 1;
        }
        let taken = self.pushed.len() - K::queued(&mut half);
        self.pushed.drain(..taken);
        self.half = Some(half);
        count
    }

    fn push(&mut self, half: &mut K::Submit, key: Key) {
        let part = *self.parts.get_mut(key).expect("a part to be pushed exists");
        let job = self.jobs.get_mut(part.job).expect("a part's job outlives it");
        let (from, len) = part.transfer.rest();
        let at = part.at + from;
        // Inside the work's buffer: `at + len` is at most the end of the part, which was cut from the work.
        let buffer = match &job.work {
            Work::Fill(fill) => RequestBuffer::Into(fill.as_ptr().wrapping_add(at)),
            Work::Flush(flush) => RequestBuffer::From(flush.as_ptr().wrapping_add(at)),
        };
        let is_large = part.transfer.len() >= self.io_bytes_max / LARGE_SHARE;
        self.large_reads += usize::from(is_large && job.work.direction() == TransferDirection::Read);
        let position = job.work.position() + at as u64;
        let request = Request { position, buffer, len: len as u32, key: key.0 };
        // SAFETY: the job owns the work and the file and is removed only when all its parts have ended.
        // `outstanding` keeps the ring's owner from going away before that.
        unsafe { K::push(half, job.file.descriptor(), request) };
        self.pushed.push_back(key);
    }

    /// Takes note of a completion. One that is short or failed is returned, to be resolved.
    fn land(&mut self, completed: Completion, finished: &mut Vec<RingJob>) -> Option<ShortCompletion> {
        let key = Key(completed.key);
        let Some(&mut part) = self.parts.get_mut(key) else {
            debug_assert!(false, "the kernel completes each request once");
            return None;
        };
        if usize::try_from(completed.result) == Ok(part.transfer.rest().1) {
            self.end(key, CompletionVerdict::Complete, finished);
            return None;
        }
        let job = self.jobs.get_mut(part.job).expect("a part's job outlives it");
        let (position, direction) = (job.work.position() + part.at as u64, job.work.direction());
        Some(ShortCompletion {
            key,
            part,
            file: Arc::clone(&job.file),
            position,
            direction,
            result: completed.result,
        })
    }

    /// Returns the part if it is to be pushed again.
    fn apply(&mut self, key: Key, verdict: CompletionVerdict, finished: &mut Vec<RingJob>) -> Option<Key> {
        if let CompletionVerdict::Again(part) = verdict {
            *self.parts.get_mut(key).expect("a resolved part keeps its place") = part;
            return Some(key);
        }
        self.end(key, verdict, finished);
        None
    }

    fn end(&mut self, key: Key, verdict: CompletionVerdict, finished: &mut Vec<RingJob>) {
        let part = self.parts.remove(key).expect("a part ends once");
        let job = self.jobs.get_mut(part.job).expect("a part's job outlives it");
        job.parts -= 1;
        let came = match &verdict {
            CompletionVerdict::Complete => part.transfer.len(),
            CompletionVerdict::Ended(bytes) | CompletionVerdict::Failed(bytes, _) => *bytes,
            CompletionVerdict::Again(_) => unreachable!("a part that goes on has not ended"),
        };
        match verdict {
            CompletionVerdict::Complete => {}
            CompletionVerdict::Ended(bytes) => job.end_at(part.at + bytes),
            CompletionVerdict::Failed(bytes, error) => job.fail_at(part.at + bytes, error),
            CompletionVerdict::Again(_) => {}
        }
        // Arrived pages are reported now, unless the job ends here and well: that reports all of them. Here, under the
        // lock, because without it another thread could end the job meanwhile.
        let ends_well = job.is_finished() && job.failure.is_none();
        if !ends_well {
            self.news.extend(job.work.note_pages_read(part.at..part.at + came));
        }
        let (device, is_finished) = (job.file.device(), job.is_finished());
        if is_finished {
            finished.extend(self.jobs.remove(part.job));
        }
        self.note_ended(device, 1, usize::from(is_finished));
    }

    fn fail_pushed(&mut self, finished: &mut Vec<RingJob>) {
        // The half is dropped, and with it the right to submit the entries that the queue still holds.
        let Some(mut half) = self.half.take() else { return };
        let taken = self.pushed.len() - K::queued(&mut half);
        let left: Vec<_> = self.pushed.drain(..).skip(taken).collect();
        self.fail(&left, finished);
        self.fail_backlog(finished);
    }

    fn why(&self) -> io::Error {
        let gone = || io::Error::other("the kernel no longer takes requests");
        self.refusal.as_ref().map_or_else(gone, copy_of)
    }

    fn fail(&mut self, parts: &[Key], finished: &mut Vec<RingJob>) {
        for &key in parts {
            self.end(key, CompletionVerdict::Failed(0, self.why()), finished);
        }
    }

    fn fail_backlog(&mut self, finished: &mut Vec<RingJob>) {
        let error = self.why();
        let backlogs = self.shares.iter_mut().flat_map(|share| share.backlog.drain(..));
        for key in backlogs.collect::<Vec<_>>() {
            let Some(job) = self.jobs.get_mut(key).filter(|job| !job.is_cut()) else { continue };
            job.fail_at(job.cut, copy_of(&error));
            let (device, is_finished) = (job.file.device(), job.is_finished());
            if is_finished {
                finished.extend(self.jobs.remove(key));
                self.note_ended(device, 0, 1);
            }
        }
    }
}

fn copy_of(error: &io::Error) -> io::Error {
    error
        .raw_os_error()
        .map_or_else(|| io::Error::new(error.kind(), error.to_string()), io::Error::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::super::FileTimes;
    use super::super::doubles::Request as Filled;
    use super::*;
    use crate::units::PAGE_SIZE;

    const PAGES: u32 = 6;

    fn job(part_pages: usize) -> (SubmissionState<Uring>, Vec<Key>) {
        let wait_queue = Arc::new(WaitQueue::new());
        let mut submission = SubmissionState {
            half: None,
            pushed: VecDeque::new(),
            refusal: None,
            parts: Slab::new(),
            jobs: Slab::new(),
            shares: Vec::new(),
            turn: 0,
            large_reads: 0,
            queue_depth: 100,
            io_bytes_max: part_pages * PAGE_SIZE,
            news: Vec::new(),
        };
        let file = OpenFile::open(&std::env::current_exe().unwrap()).unwrap();
        submission.add(Work::Fill(Filled::new(&wait_queue, 0, PAGES).0), Arc::new(file));
        let parts = std::iter::from_fn(|| submission.cut()).collect();
        (submission, parts)
    }

    fn outcome(verdicts: Vec<(usize, CompletionVerdict)>) -> Result<usize, i32> {
        let (mut submission, parts) = job(2);
        assert_eq!(parts.len(), 3);
        let mut finished = Vec::new();
        for (part, verdict) in verdicts {
            assert!(finished.is_empty(), "a job ends with its last part");
            submission.end(parts[part], verdict, &mut finished);
        }
        assert_eq!((submission.parts.len(), submission.jobs.len(), finished.len()), (0, 0, 1));
        finished.remove(0).outcome().1.map_err(|failed| failed.error.raw_os_error().unwrap())
    }

    fn fails(code: i32) -> CompletionVerdict {
        CompletionVerdict::Failed(0, io::Error::from_raw_os_error(code))
    }

    #[test]
    fn a_job_ends_as_its_parts_do() {
        use CompletionVerdict::{Complete, Ended};
        assert_eq!(outcome(vec![(2, Complete), (0, Complete), (1, Complete)]), Ok(6 * 4096));
        // The end of the file is the first that any part met.
        assert_eq!(outcome(vec![(2, Ended(0)), (0, Complete), (1, Ended(5))]), Ok(2 * 4096 + 5));
        // If two parts fail, the outcome is the error of the first in the file, whichever came first.
        assert_eq!(outcome(vec![(2, fails(5)), (1, fails(12)), (0, Complete)]), Err(12));
        assert_eq!(outcome(vec![(1, fails(12)), (2, fails(5)), (0, Complete)]), Err(12));
        // A failure behind the file's end is none; one before it is.
        assert_eq!(outcome(vec![(1, Ended(7)), (2, fails(5)), (0, Complete)]), Ok(2 * 4096 + 7));
        assert_eq!(outcome(vec![(0, fails(5)), (1, Ended(7)), (2, Ended(0))]), Err(5));
    }

    #[test]
    fn an_error_means_another_try_another_way_or_the_end() {
        let file = OpenFile::open(&std::env::current_exe().unwrap()).unwrap();
        let resolve = |way, tries, code| {
            let part = RingRequest { job: Key(0), at: 0, transfer: Transfer::new(8192, 512), way, tries };
            match error_verdict(part, &file, io::Error::from_raw_os_error(code)) {
                CompletionVerdict::Again(part) => Ok((part.way, part.tries)),
                CompletionVerdict::Failed(0, error) => Err(error.raw_os_error().unwrap()),
                other => panic!("{other:?}"),
            }
        };
        for passing in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
            assert_eq!(resolve(IoMode::Buffered, 0, passing), Ok((IoMode::Buffered, 1)));
            assert_eq!(resolve(IoMode::Buffered, TRIES_MAX, passing), Err(passing), "not for ever");
        }
        assert_eq!(resolve(IoMode::Direct, 0, libc::EIO), Err(libc::EIO));
        assert_eq!(resolve(IoMode::Buffered, 0, libc::EINVAL), Err(libc::EINVAL), "there is no third way");
        assert_eq!(resolve(IoMode::Direct, 7, libc::EINVAL), Ok((IoMode::Buffered, 7)));
    }

    #[test]
    fn a_write_that_falls_short_goes_on_and_one_that_stands_still_fails() {
        let open = |local| {
            let mut file = OpenFile::open(&std::env::current_exe().unwrap()).unwrap();
            file.clock.local = local;
            Arc::new(file)
        };
        let (file, remote) = (open(Some(FileTimes::ChangedByStores)), open(None));
        let resolve_of = |file: &Arc<OpenFile>, direction, align, calls: &[i32]| {
            let mut part = RingRequest {
                job: Key(0),
                at: 0,
                transfer: Transfer::new(8192, align),
                way: IoMode::Direct,
                tries: 0,
            };
            for (number, &result) in calls.iter().enumerate() {
                let file = Arc::clone(file);
                let doubtful =
                    ShortCompletion { key: Key(0), part, file, position: 1 << 40, direction, result };
                match doubtful.resolve().1 {
                    CompletionVerdict::Again(next) => part = next,
                    ended => return (number, ended),
                }
            }
            (calls.len(), CompletionVerdict::Again(part))
        };
        let resolve = |direction, align, calls: &[i32]| resolve_of(&file, direction, align, calls);
        let (_, short) = resolve(TransferDirection::Write, 512, &[1000]);
        assert!(matches!(short, CompletionVerdict::Again(part) if part.transfer.rest() == (512, 7680)));
        assert!(matches!(
            resolve(TransferDirection::Write, 1, &[1000, 7192]),
            (1, CompletionVerdict::Complete)
        ));
        let (_, stuck) = resolve(TransferDirection::Write, 1, &[1000, 0]);
        let is_stuck = |error: &io::Error| error.kind() == io::ErrorKind::WriteZero;
        assert!(matches!(stuck, CompletionVerdict::Failed(1000, error) if is_stuck(&error)));
        let (_, full) = resolve(TransferDirection::Write, 1, &[1000, -libc::EINTR, -libc::ENOSPC]);
        assert!(
            matches!(full, CompletionVerdict::Failed(1000, error) if error.raw_os_error() == Some(libc::ENOSPC))
        );
        // The same calls of a read are the end of the file.
        assert!(matches!(resolve(TransferDirection::Read, 1, &[1000]), (0, CompletionVerdict::Ended(1000))));
        // Where another machine would be asked for the end, the leader does not: a second read finds it.
        let remote = |calls: &[i32]| resolve_of(&remote, TransferDirection::Read, 1, calls);
        assert!(matches!(remote(&[1000]), (1, CompletionVerdict::Again(_))));
        assert!(matches!(remote(&[1000, 0]), (1, CompletionVerdict::Ended(1000))));
    }

    /// A device that hangs, with far more than the queue takes; then another, whose parts come and go.
    #[test]
    fn a_device_that_hangs_leaves_places_to_others() {
        for (depth, kept) in [(2, 1), (3, 2), (4, 3), (5, 4), (10, 8)] {
            leaves_places(depth, kept);
        }
    }

    /// Checks that a device that hangs keeps `kept` of `depth` places.
    fn leaves_places(depth: usize, kept: usize) {
        let (mut submission, _) = job(1);
        (submission.queue_depth, submission.parts, submission.jobs) = (depth, Slab::new(), Slab::new());
        submission.shares.clear();
        let wait_queue = Arc::new(WaitQueue::new());
        let on = |device| {
            let mut file = OpenFile::open(&std::env::current_exe().unwrap()).unwrap();
            file.device = device;
            Arc::new(file)
        };
        let (hung, healthy) = (on(1), on(2));
        for _ in 0..20 {
            submission.add(Work::Fill(Filled::new(&wait_queue, 0, PAGES).0), Arc::clone(&hung));
        }
        let cut = |submission: &mut SubmissionState<Uring>| std::iter::from_fn(|| submission.cut()).collect();
        let parts: Vec<_> = cut(&mut submission);
        assert_eq!((parts.len(), submission.jobs_of(1), submission.jobs_of(2)), (kept, 20, 0));
        submission.add(Work::Fill(Filled::new(&wait_queue, 0, PAGES).0), healthy);
        let (mut under_way, mut finished): (VecDeque<Key>, _) = (cut(&mut submission).into(), Vec::new());
        assert_eq!(under_way.len(), depth - kept);
        let mut ended = 0;
        while let Some(part) = under_way.pop_front() {
            submission.end(part, CompletionVerdict::Complete, &mut finished);
            under_way.extend::<Vec<_>>(cut(&mut submission));
            ended += 1;
        }
        assert_eq!((ended, finished.len()), (PAGES, 1), "the other device's parts get the places again");
        assert_eq!((submission.jobs_of(1), submission.jobs_of(2), submission.shares.len()), (20, 0, 1));
    }

    #[test]
    fn a_job_that_ends_early_is_not_cut_further() {
        let (mut submission, parts) = job(1);
        assert_eq!(parts.len(), PAGES as usize);
        let wait_queue = Arc::new(WaitQueue::new());
        submission.queue_depth = parts.len() + 3; // of which one is left to other devices
        let file = Arc::new(OpenFile::open(&std::env::current_exe().unwrap()).unwrap());
        submission.add(Work::Fill(Filled::new(&wait_queue, 0, PAGES).0), file);
        let cut: Vec<_> = std::iter::from_fn(|| submission.cut()).collect();
        assert_eq!(cut.len(), 2, "the queue is as deep as was said");
        let mut finished = Vec::new();
        submission.end(cut[0], CompletionVerdict::Complete, &mut finished);
        submission.end(cut[1], CompletionVerdict::Ended(1), &mut finished);
        assert_eq!(finished.pop().unwrap().outcome().1.unwrap(), 4097);
        assert!(submission.cut().is_none(), "its rest is not asked for");
    }
}
