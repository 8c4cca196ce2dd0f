//! Ring: an io_uring instance as two halves, and the way into the kernel.
//!
//! ```text
//!   SubmitHalf (one holder)  --entries-->  queue  --Gate (shared)-->  kernel  --completions-->  ReapHalf (one holder)
//! ```
//!
//! The kernel serializes the system calls; each method takes its half by `&mut`, so the types keep two threads from
//! touching one queue at a time. A [`Gate`] touches no queue, so a thread that goes through it needs no lock: a
//! submission takes the kernel as long as the device's driver wants.
//!
//! Invariants:
//!  1. The kernel takes entries in the order in which they were pushed, as many for each call as it was told of. All
//!     calls together tell it of each entry once: the callers' promise. So whose entries a call takes does not matter,
//!     and each call finds as many as it names. It frees their places when it has taken all that a call named, or as
//!     many as it will; requests of these may have arrived before that.
//!  2. No more requests are in flight than the completion queue has places, so it never overflows: the
//!     caller's promise, which needs [`ReapHalf::capacity`]. The ring is set up without deferred task
//!     work. So a completion that exists is in the queue, and looking there needs no system call.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, Probe, opcode, types};

/// The half that queues reads and writes.
pub struct SubmitHalf {
    ring: Arc<IoUring>,
}

/// The half that learns how they ended.
pub struct ReapHalf {
    ring: Arc<IoUring>,
}

/// The way into the kernel, for a caller that holds neither half.
pub struct Gate {
    ring: Arc<IoUring>,
}

/// Whether a call waits for a completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionWait {
    /// The call does not wait.
    NotAwaited,
    /// The call returns when a completion is there, or, from Linux 5.11 on, after so long; a signal may end it early.
    AwaitedFor(Duration),
}

/// The argument of an `io_uring_enter` that waits for a bounded time (`struct io_uring_getevents_arg` of the kernel's
/// interface).
#[repr(C)]
struct WaitArgument {
    signals: u64,
    signals_size: u32,
    padding: u32,
    /// The address of the longest wait.
    time: u64,
}

/// How one request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The key that the request was pushed with.
    pub key: u64,
    /// Bytes read or written, or the negated error number.
    pub result: i32,
}

/// One read or write to be pushed.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Where in the file, in bytes.
    pub position: u64,
    /// Where the bytes go or are.
    pub buffer: RequestBuffer,
    /// How many bytes, at most `i32::MAX`.
    pub len: u32,
    /// The key for [`Completion::key`].
    pub key: u64,
}

/// The memory of a request, and by that which way the bytes go.
#[derive(Clone, Copy, Debug)]
pub enum RequestBuffer {
    /// A read puts them here.
    Into(*mut u8),
    /// A write takes them from here.
    From(*const u8),
}

/// Why there is no ring.
#[derive(Debug, thiserror::Error)]
pub enum RingRefused {
    /// The kernel, a sandbox or a limit refuses the system call.
    #[error("io_uring_setup: {0}; allow io_uring in the sandbox or set kernel.io_uring_disabled=0 to use it")]
    Setup(#[source] io::Error),
    /// The kernel is older than 5.6.
    #[error("this kernel's io_uring cannot read and write; it can from Linux 5.6 on")]
    NoRead,
}

/// Entries of the queue to be submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entries {
    /// How many entries of the queue.
    pub count: usize,
    /// Entries of one system call at most; at least 1. Up to [`SENT_AT_ONCE`] go to the device one by one; more are
    /// held back until the kernel has looked at all, and those that follow each other become one large request.
    pub at_a_time: usize,
}

/// Up to so many entries of one system call go to the device one by one (`IO_PLUG_THRESHOLD` of Linux's io_uring).
pub const SENT_AT_ONCE: usize = 2;

/// The kernel took not all that it was told of, or does not let the caller wait.
#[derive(Debug)]
pub struct EnterRefused {
    /// How many entries it did not take. If any, it will take no more: it must not be entered for one again.
    pub left: usize,
    /// Why.
    pub error: io::Error,
}

/// Makes a ring that holds `entries` requests, at least 1.
///
/// # Errors
/// Why there is none.
pub fn ring(entries: u32) -> Result<(SubmitHalf, Gate, ReapHalf), RingRefused> {
    let ring: IoUring =
        IoUring::builder().dontfork().setup_clamp().build(entries).map_err(RingRefused::Setup)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|_| RingRefused::NoRead)?;
    if !(probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::Write::CODE)) {
        return Err(RingRefused::NoRead);
    }
    let ring = Arc::new(ring);
    Ok((SubmitHalf { ring: Arc::clone(&ring) }, Gate { ring: Arc::clone(&ring) }, ReapHalf { ring }))
}

impl SubmitHalf {
    /// How many requests fit.
    pub fn capacity(&self) -> usize {
        self.ring.params().sq_entries() as usize
    }

    /// How many of the entries pushed the kernel has not taken: the last ones.
    pub fn queued(&mut self) -> usize {
        // SAFETY: this half is the only one that makes submission queues, and it is borrowed mutably.
        unsafe { self.ring.submission_shared() }.len()
    }

    /// Queues a read or a write of `file`. The kernel learns of it at the [`Gate`].
    ///
    /// # Panics
    /// If [`SubmitHalf::capacity`] are queued already.
    ///
    /// # Safety
    /// The buffer is valid for `request.len` bytes, of writes if it is a read's and of reads if it is a write's, and
    /// `file` stays open, until the request has arrived. The content of a read's buffer is not relied on meanwhile.
    pub unsafe fn push(&mut self, file: BorrowedFd<'_>, request: Request) {
        let Request { position, buffer, len, key } = request;
        let file = types::Fd(file.as_raw_fd());
        let entry = match buffer {
            RequestBuffer::Into(buffer) => opcode::Read::new(file, buffer, len).offset(position).build(),
            RequestBuffer::From(buffer) => opcode::Write::new(file, buffer, len).offset(position).build(),
        };
        let entry = entry.user_data(key);
        // SAFETY: this half is the only one that makes submission queues, and it is borrowed mutably. The
        // entry's parameters are the caller's promise.
        unsafe { self.ring.submission_shared().push(&entry) }.expect("no more are pushed than fit");
    }
}

impl Gate {
    /// Has the kernel take `entries` of the queue, and waits for a completion in the last system call if `wait`.
    ///
    /// # Errors
    /// The kernel refuses for good, for instance because a sandbox now forbids the system call.
    pub fn enter(&self, entries: Entries, wait: CompletionWait) -> Result<(), EnterRefused> {
        let can_bound = self.ring.params().is_feature_ext_arg();
        let (least, flags, time) = match wait {
            CompletionWait::NotAwaited => (0, 0, None),
            CompletionWait::AwaitedFor(_) if !can_bound => (1, EnterFlags::GETEVENTS.bits(), None),
            CompletionWait::AwaitedFor(time) => {
                let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
                (1, flags.bits(), Some(types::Timespec::from(time)))
            }
        };
        let address = time.as_ref().map(|time| std::ptr::from_ref(time).expose_provenance() as u64);
        let argument = address.map(|time| WaitArgument { signals: 0, signals_size: 0, padding: 0, time });
        let mut left = entries.count;
        while left > 0 || least > 0 {
            let now = left.min(entries.at_a_time);
            let is_last = now == left;
            let (least, flags) = if is_last { (least, flags) } else { (0, 0) };
            let argument = argument.as_ref().filter(|_| is_last);
            // SAFETY: the other arguments are counts and flags. With `EXT_ARG`, the argument is as the kernel's
            // interface says, and the time that it points to lives until this function returns.
            match unsafe { self.ring.submitter().enter(now as u32, least, flags, argument) } {
                // It does not wait if it did not take all.
                Ok(taken) if taken < left => left -= taken,
                Ok(_) => break,
                Err(error) if is_passing(&error) && left == 0 => break,
                Err(error) if is_passing(&error) => std::thread::yield_now(),
                Err(error) => return Err(EnterRefused { left, error }),
            }
        }
        Ok(())
    }
}

impl ReapHalf {
    /// How many completions fit.
    pub fn capacity(&self) -> usize {
        self.ring.params().cq_entries() as usize
    }

    /// Moves what has arrived to `arrived`, without a system call.
    pub fn drain(&mut self, completed: &mut Vec<Completion>) {
        // SAFETY: this half is the only one that makes completion queues, and it is borrowed mutably.
        let queue = unsafe { self.ring.completion_shared() };
        completed.extend(queue.map(|entry| Completion { key: entry.user_data(), result: entry.result() }));
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME))
}

impl std::fmt::Debug for SubmitHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SubmitHalf").field("capacity", &self.capacity()).finish()
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ReapHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReapHalf").field("capacity", &self.capacity()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// With no request under way no completion comes.
    #[test]
    fn a_bounded_wait_for_a_completion_ends() {
        let Ok((_submit, gate, _reap)) = ring(4) else {
            return eprintln!("SKIPPED: this system has no io_uring");
        };
        if !gate.ring.params().is_feature_ext_arg() {
            return eprintln!("SKIPPED: this kernel's waits have no bound");
        }
        let begun = Instant::now();
        for _ in 0..3 {
            let wait = CompletionWait::AwaitedFor(Duration::from_millis(5));
            gate.enter(Entries { count: 0, at_a_time: 1 }, wait).expect("a wait that ends is no refusal");
        }
        assert!(begun.elapsed() >= Duration::from_millis(15));
    }
}
