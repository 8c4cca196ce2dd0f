//! Wake-ups: how other threads have a worker look: at everything, or at the VM of which a read has ended.
//!
//! ```text
//!   a read ends --> its waker: the VM's number is noted --> the event rings --> a worker silences it, takes a number
//!   the server ends, a VM has begun ---------------------------^                more of them? it rings again
//! ```
//!
//! A waker is called by the threads that read for the cache. It holds one lock for a moment, and keeps nothing of the
//! server alive but this list, so that no such thread is ever the one that drops a cache.
//!
//! Not an invariant: that a number is of a VM that is still there.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use rustix::event::{EventfdFlags, eventfd};

#[derive(Debug)]
pub(super) struct Wakeups {
    event: OwnedFd,
    numbers: Mutex<VecDeque<u64>>,
}

/// The waker of the reads of one VM.
struct ReadWaker {
    wakeups: Arc<Wakeups>,
    number: u64,
}

impl Wake for ReadWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut numbers = self.wakeups.numbers();
        if !numbers.contains(&self.number) {
            numbers.push_back(self.number);
        }
        drop(numbers);
        self.wakeups.ring();
    }
}

impl AsFd for Wakeups {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Wakeups {
    pub(super) fn new() -> rustix::io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, numbers: Mutex::default() })
    }

    /// A waker that has a worker look at the VM `number`.
    pub(super) fn waker(self: &Arc<Self>, number: u64) -> Waker {
        Waker::from(Arc::new(ReadWaker { wakeups: Arc::clone(self), number }))
    }

    pub(super) fn ring(&self) {
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    pub(super) fn silence(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    /// A VM to look at. If there are more, another worker is woken for them.
    pub(super) fn next(&self) -> Option<u64> {
        let mut numbers = self.numbers();
        let (number, is_last) = (numbers.pop_front(), numbers.is_empty());
        drop(numbers);
        if !is_last {
            self.ring();
        }
        number
    }

    fn numbers(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
