//! Fetch: range GETs of one version of an object, until its bytes are there or it is certain that they will not be.
//!
//! ```text
//!   run      wait for a turn --> attempt --> all there: done
//!              ^                   |
//!              |  pause            +-- passes: 429, 5xx, reset, time-out, short body, other range
//!              +-------------------+      and again, from the first byte that has not come
//!                                  |
//!                                  +-- does not, or too often, or too late: what has not come fails
//!
//!   attempt  GET with a condition --> its answer is of this version? --> chunks --> fills, page by page
//! ```
//!
//! A fill is told of its pages as they come, so a reader waits for its page only. Bytes that came before a failure
//! are kept, and not asked for again.
//!
//! The threads that do this are a runtime of the crate's own: the library has none, and a caller's may be blocked by
//! that same caller's wait. None of them waits for a fill.
//!
//! Invariants:
//!  1. A byte goes into a fill only from an answer that said to be of the version that was opened; of a file of a
//!     folder, once that has been found true after the bytes were read.
//!  2. No turn is held during a pause.
//!  3. No attempt and no pause outlasts the deadline. Until a fetch has its turn, its time begins anew with each byte
//!     that the store brings to others: a long queue is no failure, and a dead store fails all that wait for it.
//!  4. A store that panics fails the fetch, and takes no turn and no thread with it.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::{Either, select};
use futures_util::{FutureExt, StreamExt};
use object_store::{
    Error as StoreError, GetOptions, GetResult, GetResultPayload, ObjectMeta, ObjectStore, ObjectStoreExt,
    path::Path,
};
use quinion::backend::Fill;
use quinion::internals::units::PAGE_SIZE;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::error::{Error, FetchError, FetchFailure, FetchReport, Result};
use crate::options::Options;
use crate::retry::{Backoff, is_refused, is_transient};
use crate::retry_after::{Advice, RetryAdvice};
use crate::runtime::start;
use crate::stats::{Counters, add};
use crate::version;

/// How long an open asks at an address where no process listens, if no process ever answered there. A store that did is
/// waited for until the deadline: it may start again.
const REFUSED_MAX: Duration = Duration::from_secs(3);
/// Longer than a step of the clock that file systems take their times from.
const FILE_TIME_SETTLING: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Fetcher {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) options: Options,
    /// The counters of the store, whichever fetcher it has.
    pub(crate) counters: Arc<Counters>,
    requests: Semaphore,
    /// Bytes that GETs may ask for, in pages.
    pages: Semaphore,
    begun: Instant,
    /// When a byte came last, in microseconds since `begun`.
    last_byte: AtomicU64,
    /// `None` only while the fetcher is being dropped.
    runtime: Option<Runtime>,
    process: u32,
}

/// The fetcher of new fetches. A fetch under way keeps the one that it began with.
#[derive(Debug)]
pub(crate) struct FetcherSlot(RwLock<Arc<Fetcher>>);

impl FetcherSlot {
    pub(crate) fn new(fetcher: Arc<Fetcher>) -> Self {
        Self(RwLock::new(fetcher))
    }

    pub(crate) fn get(&self) -> Arc<Fetcher> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set(&self, fetcher: Arc<Fetcher>) {
        let mut slot = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *slot, fetcher);
        drop(slot);
        drop(before); // not under the lock: its threads may end with it
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if self.process == std::process::id() {
            // Not by waiting: the last to let go may be a task of a runtime, which must not block.
            runtime.shutdown_background();
        } else {
            // A forked child has none of the threads, and perhaps a lock that one of them held.
            std::mem::forget(runtime);
        }
    }
}

/// Fills of an object that are to be fetched.
pub(crate) struct FetchJob<'m> {
    pub(crate) meta: &'m ObjectMeta,
    /// Sorted, and inside the object.
    pub(crate) fills: Vec<Fill>,
    /// The answer to the first GET, if it was made before.
    pub(crate) answered: Option<GetResult>,
}

impl Fetcher {
    /// `options` are checked. It goes on counting in `counters`.
    pub(crate) fn new(
        store: Arc<dyn ObjectStore>,
        options: Options,
        counters: Arc<Counters>,
    ) -> Result<Arc<Self>> {
        let mut runtime = Builder::new_multi_thread();
        runtime.worker_threads(options.threads).thread_name("quinion-object").enable_all();
        let runtime = start(&mut runtime).map_err(Error::Runtime)?;
        Ok(Arc::new(Self {
            store,
            counters,
            requests: Semaphore::new(options.requests_max),
            pages: Semaphore::new(pages(options.in_flight_max) as usize),
            options,
            begun: Instant::now(),
            last_byte: AtomicU64::new(0),
            runtime: Some(runtime),
            process: std::process::id(),
        }))
    }

    /// In a forked child, which has no threads for it, `task` is dropped.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Option<JoinHandle<T>> {
        let runtime = self.runtime.as_ref().filter(|_| self.process == std::process::id())?;
        Some(runtime.spawn(task))
    }

    /// Until when an open that begins now may take, with all its requests.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.options.deadline
    }

    /// Asks what the object is now, under the conditions of `options`; again, if the store fails for the moment.
    pub(crate) async fn head(
        &self,
        path: &Path,
        options: &GetOptions,
        deadline: Instant,
    ) -> std::result::Result<GetResult, StoreError> {
        let (first, longest) = self.options.backoff;
        let mut backoff = Backoff::new(first, longest);
        let (mut attempts, mut refused) = (1, None);
        let (advice, mut options) = (RetryAdvice::default(), options.clone().with_head(true));
        options.extensions.insert(advice.clone());
        loop {
            add(&self.counters.heads, 1);
            let answer = self.store.get_opts(path, options.clone());
            let asked = Instant::now();
            let until = deadline.min(asked + self.options.stall_max);
            let error = match timeout_at(until, caught(answer)).await {
                Ok(Ok(Ok(result))) => {
                    self.note_answer();
                    return Ok(result);
                }
                Ok(Ok(Err(error))) => error,
                Ok(Err(panic)) => return Err(of_ours(panic)),
                Err(_) => of_ours(FetchFailure::Stalled(self.silence(asked, until))),
            };
            let advice = advice.take();
            let pause = advice.pause(backoff.pause(), deadline - Instant::now());
            let elapsed = (Instant::now() + self.options.deadline).saturating_duration_since(deadline);
            refused = is_refused(&error).then(|| refused.unwrap_or(asked));
            let is_absent = attempts > 1
                && refused.is_some_and(|since: Instant| since.elapsed() > REFUSED_MAX)
                && !self.counters.has_answered.load(Ordering::Relaxed);
            let is_late = Instant::now() + pause >= deadline;
            let is_last = attempts == self.options.attempts_max || is_absent || is_late;
            let is_for_good = !is_transient(&error);
            if is_for_good {
                self.note_answer();
            }
            if is_last || is_for_good || advice.is_for_good(&error) {
                return Err(after(attempts, elapsed, error));
            }
            attempts += 1;
            self.pause(pause, advice).await;
        }
    }

    /// Asks for the first bytes of an object that nothing is known of, in place of a HEAD. Once: after an error the
    /// caller asks by a HEAD, which is tried again until the same deadline.
    pub(crate) async fn open_get(
        &self,
        path: &Path,
        mut options: GetOptions,
        deadline: Instant,
    ) -> std::result::Result<GetResult, StoreError> {
        add(&self.counters.gets, 1);
        let advice = RetryAdvice::default();
        options.extensions.insert(advice.clone());
        let asked = Instant::now();
        let until = deadline.min(asked + self.options.stall_max);
        let answer = timeout_at(until, caught(self.store.get_opts(path, options)));
        match answer.await {
            Ok(Ok(Err(error))) => {
                if !is_transient(&error) {
                    self.note_answer();
                }
                let advice = advice.take();
                if advice.after.is_some() {
                    // With a random part: openers that were refused together do not come back together.
                    let (first, longest) = self.options.backoff;
                    let backoff = Backoff::new(first, longest).pause();
                    self.pause(advice.pause(backoff, deadline - Instant::now()), advice).await;
                }
                Err(error)
            }
            Ok(Ok(answer)) => {
                self.note_answer();
                answer
            }
            Ok(Err(panic)) => Err(of_ours(panic)),
            Err(_) => Err(of_ours(FetchFailure::Stalled(self.silence(asked, until)))),
        }
    }

    fn note_answer(&self) {
        self.counters.has_answered.store(true, Ordering::Relaxed); // a hint: it orders nothing
    }

    /// How long an open has waited for an answer. A HEAD that follows a silent GET may have no time of its own.
    fn silence(&self, asked: Instant, until: Instant) -> Duration {
        let waited = until.saturating_duration_since(asked);
        if waited.is_zero() { self.options.deadline.min(self.options.stall_max) } else { waited }
    }

    /// Completes the fills of `job` by one GET after another, or until none may follow. `on_failure` is told of the
    /// error before their readers are.
    pub(crate) async fn run(&self, job: FetchJob<'_>, on_failure: impl FnOnce(FetchError) + Send) {
        let FetchJob { meta, fills, mut answered } = job;
        let begun = Instant::now();
        let mut deadline = begun + self.options.deadline;
        let mut delivery = Delivery::new(fills, meta.size);
        let (first, longest) = self.options.backoff;
        let mut backoff = Backoff::new(first, longest);
        let (mut attempts, mut in_vain) = (0, 0);
        let (mut failure, advice) = (FetchFailure::Deadline, RetryAdvice::default());
        loop {
            let before = delivery.skip_gap();
            let asked = Instant::now();
            let Some(turn) = self.turn(delivery.rest(), deadline).await else { break };
            deadline += asked.elapsed();
            attempts += 1;
            let answered = answered.take().filter(|result| result.range.start == before);
            let answered_end = answered.as_ref().map(|result| result.range.end);
            let attempt = timeout_at(
                deadline,
                caught(self.attempt(meta, &mut delivery, Request { answered, advice: &advice })),
            )
            .await;
            drop(turn);
            match attempt {
                Ok(Ok(Ok(()))) => return,
                Ok(Ok(Err(_))) if Some(delivery.at) == answered_end => continue,
                Ok(Ok(Err(met)) | Err(met)) => failure = met,
                Err(_) => break,
            }
            in_vain += 1;
            if delivery.at > before {
                in_vain = 1;
                backoff.reset();
            }
            let advice = advice.take();
            let pause = advice.pause(backoff.pause(), deadline - Instant::now());
            let is_last = in_vain >= self.options.attempts_max || Instant::now() + pause >= deadline;
            let is_for_good = matches!(&failure, FetchFailure::Store(error) if advice.is_for_good(error));
            if is_last || is_for_good || !failure.is_transient() {
                break;
            }
            self.pause(pause, advice).await;
        }
        let (path, range, elapsed) = (meta.location.clone(), delivery.rest(), begun.elapsed());
        let error = FetchError::new(FetchReport { path, range, attempts, elapsed, failure });
        self.counters.add_failure(&error);
        on_failure(error.clone());
        delivery.fail(&error);
    }

    /// Before a request is sent again, in which no turn is held.
    async fn pause(&self, pause: Duration, advice: Advice) {
        add(&self.counters.retries, 1);
        add(&self.counters.advised, u64::from(advice.after.is_some()));
        sleep(pause).await;
    }

    async fn attempt(
        &self,
        meta: &ObjectMeta,
        delivery: &mut Delivery,
        request: Request<'_>,
    ) -> std::result::Result<(), FetchFailure> {
        let Request { answered, advice } = request;
        let asked = delivery.rest();
        let is_answered = answered.is_some();
        let result = match answered {
            Some(result) => result,
            None => self.ask(meta, asked.clone(), advice).await?,
        };
        if !version::is_same(meta, &result.meta) {
            let (known, found) = (version::describe(meta), version::describe(&result.meta));
            return Err(FetchFailure::Changed { known, found });
        }
        if result.range != asked && !is_answered {
            return Err(FetchFailure::OtherRange(result.range));
        }
        match &result.payload {
            GetResultPayload::Stream(_) => self.receive(meta, delivery, result).await?,
            #[allow(unreachable_patterns, reason = "stores of folders are a feature of `object_store`")]
            _ => self.receive_file(meta, delivery, result).await?,
        }
        let (got, asked) = (delivery.at - asked.start, asked.end - asked.start);
        if got < asked { Err(FetchFailure::Short { got, asked }) } else { Ok(()) }
    }

    /// Twice, if the answer is late and the options say so.
    async fn ask(
        &self,
        meta: &ObjectMeta,
        asked: Range<u64>,
        advice: &RetryAdvice,
    ) -> std::result::Result<GetResult, FetchFailure> {
        let mut first = pin!(self.ask_once(meta, asked.clone(), advice));
        let percent = self.options.hedge_percent;
        let Some(late) = percent.and_then(|percent| self.counters.first_byte.quantile(percent)) else {
            return first.await;
        };
        if let Ok(answer) = timeout(late, &mut first).await {
            return answer;
        }
        let Ok(_turn) = self.requests.try_acquire() else { return first.await };
        add(&self.counters.hedges, 1);
        let second = pin!(self.ask_once(meta, asked, advice));
        match select(first, second).await {
            Either::Left((Ok(answer), _)) => Ok(answer),
            Either::Left((Err(_), second)) => second.await.inspect(|_| add(&self.counters.hedges_won, 1)),
            Either::Right((Ok(answer), _)) => {
                add(&self.counters.hedges_won, 1);
                Ok(answer)
            }
            Either::Right((Err(_), first)) => first.await,
        }
    }

    async fn ask_once(
        &self,
        meta: &ObjectMeta,
        asked: Range<u64>,
        advice: &RetryAdvice,
    ) -> std::result::Result<GetResult, FetchFailure> {
        add(&self.counters.gets, 1);
        let mut options = version::conditions(meta).with_range(Some(asked));
        options.extensions.insert(advice.clone());
        let (stall_max, sent) = (self.options.stall_max, Instant::now());
        let answer = timeout(stall_max, self.store.get_opts(&meta.location, options)).await;
        let result = answer.map_err(|_| FetchFailure::Stalled(stall_max))?;
        let time = sent.elapsed();
        self.counters.first_byte.record(time);
        self.counters.answer_times.record(time);
        if result.is_ok() {
            self.note_answer();
            advice.take(); // of an earlier answer, or of one beside this: what fails from now on, fails after this one
        }
        result.map_err(|error| of_store(meta, error))
    }

    async fn receive(
        &self,
        meta: &ObjectMeta,
        delivery: &mut Delivery,
        result: GetResult,
    ) -> std::result::Result<(), FetchFailure> {
        let stall_max = self.options.stall_max;
        let end = result.range.end;
        let mut body = result.into_stream();
        while !delivery.is_done() && delivery.at < end {
            let chunk =
                timeout(stall_max, body.next()).await.map_err(|_| FetchFailure::Stalled(stall_max))?;
            let Some(chunk) = chunk else { break };
            self.deliver(delivery, chunk.map_err(|error| of_store(meta, error))?, end);
        }
        Ok(())
    }

    /// Like `receive`, for a file of a folder, which programs may write to in place. The store says how the file was
    /// when it opened it, and reads its bytes later; it gives empty pieces without end where the file was cut
    /// meanwhile. So bytes are delivered once the file is found unchanged, and are read when a write would leave
    /// another time than the one that it has.
    ///
    /// Two changes may not be found:
    ///  - A store to a shared mapping leaves a time when it makes its page dirty. Further ones leave none until the
    ///    kernel has written the page back, half a minute later by default.
    ///  - A file server takes times from its own clock. If that is ahead of this one, or behind it, a time that is new
    ///    may not be waited for; a second write within the same step of the server's clock leaves the same time.
    async fn receive_file(
        &self,
        meta: &ObjectMeta,
        delivery: &mut Delivery,
        result: GetResult,
    ) -> std::result::Result<(), FetchFailure> {
        let stalled = |_| FetchFailure::Stalled(self.options.stall_max);
        let (modified, end) = (result.meta.last_modified, result.range.end);
        // 1 A time that is older than the clock's step.
        let age = SystemTime::from(modified).elapsed().unwrap_or(FILE_TIME_SETTLING);
        sleep(FILE_TIME_SETTLING.saturating_sub(age)).await;
        // 2 All bytes.
        let mut missing = end.saturating_sub(result.range.start);
        let (mut body, mut chunks) = (result.into_stream(), Vec::new());
        while missing > 0 {
            let chunk = timeout(self.options.stall_max, body.next()).await.map_err(stalled)?;
            let chunk = chunk.transpose().map_err(|error| of_store(meta, error))?.unwrap_or_default();
            if chunk.is_empty() {
                break;
            }
            missing = missing.saturating_sub(chunk.len() as u64);
            chunks.push(chunk);
        }
        // 3 Is it the file that was opened?
        let found =
            timeout(self.options.stall_max, self.store.head(&meta.location)).await.map_err(stalled)?;
        let found = found.map_err(|error| of_store(meta, error))?;
        if !version::is_same(meta, &found) || found.last_modified != modified {
            let (known, found) = (version::describe(meta), version::describe(&found));
            return Err(FetchFailure::Changed { known, found });
        }
        chunks.into_iter().for_each(|chunk| self.deliver(delivery, chunk, end));
        Ok(())
    }

    /// Gives the next bytes of an answer, whose range ends at byte `end`, to those that wait for them.
    fn deliver(&self, delivery: &mut Delivery, mut chunk: Bytes, end: u64) {
        // Bytes behind the range that the answer announced belong to no request.
        chunk.truncate(usize::try_from(end.saturating_sub(delivery.at)).unwrap_or(usize::MAX));
        self.last_byte.store(self.begun.elapsed().as_micros() as u64, Ordering::Relaxed);
        add(&self.counters.bytes, chunk.len() as u64);
        add(&self.counters.gap_bytes, delivery.accept(&chunk));
    }

    /// Not beyond `deadline`, or as long after the last byte that came.
    async fn turn(
        &self,
        range: Range<u64>,
        deadline: Instant,
    ) -> Option<(SemaphorePermit<'_>, SemaphorePermit<'_>)> {
        let most = pages(self.options.in_flight_max);
        let mut turn = pin!(async {
            // Always in this order, so that none waits for the second with another's first in its hand.
            let pages = self.pages.acquire_many(pages(range.end - range.start).min(most)).await;
            let request = self.requests.acquire().await;
            // They are never closed.
            pages.and_then(|pages| request.map(|request| (pages, request))).ok()
        });
        loop {
            let last_byte = self.begun + Duration::from_micros(self.last_byte.load(Ordering::Relaxed));
            let until = deadline.max(last_byte + self.options.deadline);
            match timeout_at(until, &mut turn).await {
                Ok(turn) => return turn,
                Err(_)
                    if self.begun + Duration::from_micros(self.last_byte.load(Ordering::Relaxed))
                        > last_byte => {}
                Err(_) => return None,
            }
        }
    }
}

struct Request<'r> {
    /// The answer, if the request was sent before.
    answered: Option<GetResult>,
    advice: &'r RetryAdvice,
}

fn of_ours(failure: FetchFailure) -> StoreError {
    StoreError::Generic { store: "Quinion", source: Box::new(failure) }
}

/// The error of the last of several HEADs.
#[derive(Debug, thiserror::Error)]
#[error("after {attempts} requests in {:.1} s: {source}", elapsed.as_secs_f64())]
struct RepeatedHead {
    attempts: u32,
    /// Since the open began.
    elapsed: Duration,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// An error that says how often was asked, and for how long: the store's own client speaks of its last attempt.
fn after(attempts: u32, elapsed: Duration, error: StoreError) -> StoreError {
    match error {
        StoreError::Generic { store, source } if attempts > 1 => {
            StoreError::Generic { store, source: Box::new(RepeatedHead { attempts, elapsed, source }) }
        }
        error => error,
    }
}

async fn caught<T>(call: impl Future<Output = T>) -> std::result::Result<T, FetchFailure> {
    // A panic leaves behind a store's own state, and fills that are known to be incomplete.
    AssertUnwindSafe(call).catch_unwind().await.map_err(|panic| {
        let words = panic.downcast_ref::<&str>().map(|words| (*words).to_owned());
        FetchFailure::Panicked(words.or_else(|| panic.downcast_ref().cloned()).unwrap_or_default())
    })
}

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(PAGE_SIZE as u64)).unwrap_or(u32::MAX)
}

fn of_store(meta: &ObjectMeta, error: StoreError) -> FetchFailure {
    match error {
        StoreError::Precondition { .. } => {
            let found = "another".to_owned();
            FetchFailure::Changed { known: version::describe(meta), found }
        }
        StoreError::NotFound { .. } => FetchFailure::Deleted,
        error => FetchFailure::Store(error),
    }
}

struct Delivery {
    fills: VecDeque<Fill>,
    at: u64,
    end: u64,
    size: u64,
}

impl Delivery {
    fn new(fills: Vec<Fill>, size: u64) -> Self {
        let end = fills.last().map_or(0, |fill| (fill.position() + fill.len() as u64).min(size));
        let at = fills.first().map_or(end, Fill::position);
        Self { fills: fills.into(), at, end, size }
    }

    fn is_done(&self) -> bool {
        self.fills.is_empty()
    }

    fn rest(&self) -> Range<u64> {
        self.at..self.end
    }

    /// Leaves out a gap that is next, before a GET.
    fn skip_gap(&mut self) -> u64 {
        self.at = self.at.max(self.fills.front().map_or(self.end, Fill::position));
        self.at
    }

    /// Takes the next bytes. Returns how many of them no request wanted.
    fn accept(&mut self, mut bytes: &[u8]) -> u64 {
        let mut unwanted = 0;
        while let Some(fill) = self.fills.front_mut()
            && !bytes.is_empty()
        {
            let position = fill.position();
            if self.at < position {
                let gap = (position - self.at).min(bytes.len() as u64);
                bytes = &bytes[gap as usize..];
                (self.at, unwanted) = (self.at + gap, unwanted + gap);
                continue;
            }
            let inside = (self.at - position) as usize;
            let wanted = (fill.len() as u64).min(self.size - position) as usize;
            let (now, later) = bytes.split_at(bytes.len().min(wanted - inside));
            fill.write(inside, now);
            (bytes, self.at) = (later, self.at + now.len() as u64);
            if inside + now.len() < wanted {
                fill.pages_were_read(inside / PAGE_SIZE * PAGE_SIZE..inside + now.len());
            } else if let Some(fill) = self.fills.pop_front() {
                fill.complete(Ok(wanted));
            }
        }
        unwanted + bytes.len() as u64
    }

    fn fail(&mut self, error: &FetchError) {
        for fill in self.fills.drain(..) {
            fill.complete(Err(error.clone().into_io()));
        }
    }
}

/// `None` if the threads are gone.
pub(crate) fn wait_for<T: Send + 'static>(
    fetcher: &Fetcher,
    task: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    // Not by `block_on`, which a thread of another runtime may not call.
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    fetcher.spawn(async move {
        // A caller that is gone wants no answer.
        let _ = sender.send(task.await);
    })?;
    receiver.recv().ok()
}

#[cfg(test)]
mod tests {
    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;

    use super::*;

    /// 1. A GET is late, and another is sent beside it.
    /// 2. The first is answered 503, with a `Retry-After`; the second is answered.
    /// 3. The body of the second breaks off. The fetch waited for as long as the first answer had said.
    #[test]
    fn the_advice_of_a_refused_get_ends_with_the_answer_to_the_one_beside_it() {
        let (store, path) = (Arc::new(InMemory::new()), Path::from("a"));
        let fetcher = Fetcher::new(store.clone(), Options::new(), Arc::default()).unwrap();
        let advice = RetryAdvice::default();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            store.put(&path, "content".into()).await.unwrap();
            let meta = store.head(&path).await.unwrap();
            advice.note(503, Some("30"), None);
            fetcher.ask_once(&meta, 0..7, &advice).await.unwrap();
            assert_eq!(advice.take(), Advice::default());
            store.delete(&path).await.unwrap();
            advice.note(503, Some("30"), None);
            fetcher.ask_once(&meta, 0..7, &advice).await.unwrap_err();
            assert_eq!(advice.take().after, Some(Duration::from_secs(30)), "an error leaves it");
        });
    }
}
