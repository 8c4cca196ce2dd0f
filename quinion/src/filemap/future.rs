//! Future: a read that waits without a thread.
//!
//! ```text
//!   poll   1 what was waited for: still pending?                     -> Pending
//!          2 read what is there, start what is not                   -> all of it: Ready
//!          3 the page that stops it is being filled: register        -> Pending
//!            it is not there and could not be started: a task        -> Pending
//! ```
//!
//! Bytes land in the cache's frames, and a poll copies them to the caller's buffer. So a dropped future leaves
//! nothing behind but a fill that ends in the cache. A poll does nothing that may block: for memory that is short, a
//! page whose fill failed and a look at the file's end there are **tasks**, which a thread for blocking calls does and
//! wakes the future.
//!
//! Invariants:
//!  1. A pending future is registered or has a task under way, each with the waker of its last poll.
//!  2. A page that did not come is sought by a task, which finds out why: no future polls for ever.
//!  3. Bytes that were read before an error are returned; the error comes with the next read.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use crate::arena::NotReady;
use crate::backend::{PageKey, Registered, RegisteredWaiter};
use crate::blocking_threads::{CallKind, CallQueue};
use crate::error::{Error, ErrorKind, Repr};
use crate::mapping::Mapping;
use crate::sync::LockWait;
use crate::sync::contained;
use crate::units::PageIndex;

use super::read::ReadProgress;
use super::shared::Filemap;
use super::uncached::{ReadCall, Reader};
use super::wait_policy::WaitPolicy;

#[derive(Debug, Default)]
pub(crate) struct PendingRead {
    read: ReadProgress,
    waited: WaitingFor,
    end: EndCheck,
    /// Whether it only waits for a page, for a read that will be counted.
    is_probe: bool,
}

#[derive(Debug, Default)]
enum WaitingFor {
    #[default]
    Nothing,
    Page {
        position: u64,
        waiter: Option<RegisteredWaiter>,
    },
    Task(Arc<Mutex<TaskOutcome>>),
}

#[derive(Debug)]
enum TaskOutcome {
    Pending(Waker),
    Done(Option<Error>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum EndCheck {
    #[default]
    AsKnown,
    Revalidated,
}

#[derive(Clone, Copy)]
pub(crate) struct PolledRead<'p> {
    pub mapping: &'p Arc<Mapping>,
    pub reader: Reader<'p>,
    pub waker: &'p Waker,
}

enum PollBlocked {
    End,
    Page(u64),
}

impl PendingRead {
    /// One that waits for bytes of which another call is the read: it counts as none.
    pub(crate) fn probe() -> Self {
        Self { is_probe: true, ..Self::default() }
    }

    /// Whether it counts as no read.
    pub(crate) fn is_probe(&self) -> bool {
        self.is_probe
    }

    /// Whether it was polled before.
    pub(crate) fn has_begun(&self) -> bool {
        self.read.done > 0 || self.end != EndCheck::AsKnown || !matches!(self.waited, WaitingFor::Nothing)
    }
}

impl Filemap {
    /// Ready with the result of [`Filemap::read`]. Waits for no device and no memory.
    pub(crate) fn poll_read(
        self: &Arc<Self>,
        poll: PolledRead<'_>,
        progress: &mut PendingRead,
        position: u64,
        to: &mut [u8],
    ) -> Poll<Result<usize, Error>> {
        let reader = poll.reader;
        let outcome = loop {
            // 1
            match self.poll_waited(poll, progress) {
                Ok(Poll::Pending) => return Poll::Pending,
                Ok(Poll::Ready(())) => {}
                Err(error) => {
                    if error.kind() == ErrorKind::Io {
                        reader.readahead().lock().on_failure(); // it was fetched in a window, and then alone
                    }
                    break Err(error);
                }
            }
            // 2
            match self.read_ready(poll, &mut progress.read, position, to) {
                // 3
                Ok(Some(PollBlocked::Page(position))) => {
                    progress.waited = WaitingFor::Page { position, waiter: None }
                }
                Ok(Some(PollBlocked::End))
                    if progress.read.done == 0
                        && progress.end == EndCheck::AsKnown
                        && !reader.skips_size_check() =>
                {
                    progress.end = EndCheck::Revalidated;
                    let sent = self.send(poll, progress, |filemap, mapping| {
                        filemap.revalidate_at_end(mapping).map(drop)
                    });
                    if let Err(error) = sent {
                        break Err(error);
                    }
                }
                Ok(Some(PollBlocked::End) | None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        let PendingRead { read, is_probe, .. } = std::mem::take(progress);
        if is_probe {
            // The stream has not passed the page: the call that it is for has not read it yet.
            return Poll::Ready(outcome.map(|()| read.done));
        }
        let read = self.end_read(read, outcome);
        reader.end_drop_behind(position, *read.as_ref().unwrap_or(&0), LockWait::Wait);
        Poll::Ready(read)
    }

    /// Whether it is there. If not, the future is registered or has a task.
    fn poll_waited(
        self: &Arc<Self>,
        poll: PolledRead<'_>,
        progress: &mut PendingRead,
    ) -> Result<Poll<()>, Error> {
        let PolledRead { mapping, reader, waker } = poll;
        match std::mem::take(&mut progress.waited) {
            WaitingFor::Nothing => Ok(Poll::Ready(())),
            WaitingFor::Page { position, waiter } => {
                drop(waiter); // it was woken, or this is not the waker it has
                match mapping.index().probe(PageIndex::of_byte(position)) {
                    Ok(()) | Err(NotReady::Written) => Ok(Poll::Ready(())),
                    Err(NotReady::Filling) => self.await_page(poll, progress, position),
                    // It was not startable, or its fill failed, or it is gone again.
                    Err(NotReady::Mismatch) => {
                        let (pool, behind) = (reader.pool(), reader.shared_behind().cloned());
                        let task = move |filemap: &Arc<Self>, mapping: &Arc<Mapping>| {
                            filemap.wait_for_page(mapping, position, pool, behind.as_ref())
                        };
                        self.send(poll, progress, task)?;
                        Ok(Poll::Pending)
                    }
                }
            }
            WaitingFor::Task(outcome) => {
                let own = waker.clone();
                let mut now = outcome.lock().unwrap_or_else(PoisonError::into_inner);
                match &mut *now {
                    TaskOutcome::Done(error) => error.take().map_or(Ok(Poll::Ready(())), Err),
                    TaskOutcome::Pending(known) => {
                        let before = std::mem::replace(known, own);
                        drop(now); // before the waker goes
                        drop(before);
                        progress.waited = WaitingFor::Task(outcome);
                        Ok(Poll::Pending)
                    }
                }
            }
        }
    }

    fn read_ready(
        self: &Arc<Self>,
        PolledRead { mapping, reader, .. }: PolledRead<'_>,
        read: &mut ReadProgress,
        position: u64,
        to: &mut [u8],
    ) -> Result<Option<PollBlocked>, Error> {
        let call = ReadCall { mapping, reader, wait_policy: WaitPolicy::Start };
        match self.read_on(&call, position, to, read) {
            Ok(()) if read.done == to.len() => Ok(None),
            Ok(()) => Ok(Some(PollBlocked::End)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                Ok(Some(PollBlocked::Page(position + read.done as u64)))
            }
            Err(error) => Err(error),
        }
    }

    fn await_page(
        self: &Arc<Self>,
        poll: PolledRead<'_>,
        progress: &mut PendingRead,
        position: u64,
    ) -> Result<Poll<()>, Error> {
        let mapping = poll.mapping;
        let (asked, index) = (Arc::clone(mapping), PageIndex::of_byte(position));
        let condition = Box::new(move || asked.index().probe(index) != Err(NotReady::Filling));
        let place = PageKey { mapping: mapping.id(), page: index };
        let registered = self.wait_queue.register(&mapping.backend(), place, condition, poll.waker.clone());
        let waiter = match registered.map_err(Repr::NoThread)? {
            Registered::Ready => None,
            Registered::Waiting(waiter) => Some(waiter),
        };
        let is_registered = waiter.is_some();
        progress.waited = WaitingFor::Page { position, waiter };
        if is_registered { Ok(Poll::Pending) } else { self.poll_waited(poll, progress) }
    }

    fn send(
        self: &Arc<Self>,
        PolledRead { mapping, waker, .. }: PolledRead<'_>,
        progress: &mut PendingRead,
        task: impl FnOnce(&Arc<Filemap>, &Arc<Mapping>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let outcome = Arc::new(Mutex::new(TaskOutcome::Pending(waker.clone())));
        let queue = CallQueue { device: mapping.identity().shared_device(), kind: CallKind::Read };
        let (filemap, mapping, told) = (Arc::clone(self), Arc::clone(mapping), Arc::clone(&outcome));
        let task = move || {
            let done = contained(|| task(&filemap, &mapping));
            // A user's source that panics fails only this request.
            let done = done.unwrap_or_else(|| Err(Repr::Panicked.into()));
            drop((filemap, mapping)); // before the future may go on and let go of the cache
            let done = TaskOutcome::Done(done.err());
            let before = std::mem::replace(&mut *told.lock().unwrap_or_else(PoisonError::into_inner), done);
            if let TaskOutcome::Pending(waker) = before {
                waker.wake();
            }
        };
        self.blocking_threads.run(queue, Box::new(task)).map_err(Repr::NoThread)?;
        progress.waited = WaitingFor::Task(outcome);
        Ok(())
    }
}
