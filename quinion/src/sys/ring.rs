//! Ring: an io_uring instance as two halves.
//!
//! ```text
//!   SubmitHalf (one holder)  --entries-->  kernel  --completions-->  ReapHalf (one holder)
//! ```
//!
//! The kernel serialises the two sides' system calls; our side of the shared
//! memory is split so that the submission queue is touched through
//! [`SubmitHalf`] only and the completion queue through [`ReapHalf`] only. Each
//! method takes its half by `&mut`, so the types keep two threads from touching
//! one queue at a time.
//!
//! Invariants:
//!  1. Every entry pushed is submitted before the submission half is given to somebody else, or the half
//!     says that the kernel refused it and is never used again.
//!  2. No more requests are in flight than the completion queue has places, so it never overflows: the
//!     caller's promise, which needs [`ReapHalf::capacity`]. The ring is set up without deferred task
//!     work. So a completion that exists is in the queue, and looking there needs no system call.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use io_uring::{EnterFlags, IoUring, Probe, opcode, types};

/// The half that starts reads.
pub struct SubmitHalf {
    ring: Arc<IoUring>,
}

/// The half that learns how reads ended.
pub struct ReapHalf {
    ring: Arc<IoUring>,
}

/// How one request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Landed {
    /// What the request was pushed with.
    pub key: u64,
    /// Bytes read, or the negated error number.
    pub result: i32,
}

/// One read to be pushed.
#[derive(Clone, Copy, Debug)]
pub struct ReadRequest {
    /// Where in the file, in bytes.
    pub position: u64,
    /// Where the bytes go.
    pub buffer: *mut u8,
    /// How many bytes, at most `i32::MAX`.
    pub len: u32,
    /// What [`Landed::key`] will say.
    pub key: u64,
}

/// Why there is no ring.
#[derive(Debug, thiserror::Error)]
pub enum RingRefused {
    /// The kernel, a sandbox or a limit refuses the system call.
    #[error("io_uring_setup: {0}; allow io_uring in the sandbox or set kernel.io_uring_disabled=0 to use it")]
    Setup(#[source] io::Error),
    /// The kernel is older than 5.6.
    #[error("this kernel's io_uring cannot read; it can from Linux 5.6 on")]
    NoRead,
}

/// The kernel took not all that was pushed, and will take no more.
#[derive(Debug)]
pub struct SubmitRefused {
    /// How many of the entries pushed last were not taken. They stay in the queue, and must never be taken:
    /// this half may not be used again.
    pub left: usize,
    /// Why.
    pub error: io::Error,
}

/// Makes a ring that holds `entries` requests, at least 1.
///
/// # Errors
/// Why there is none.
pub fn ring(entries: u32) -> Result<(SubmitHalf, ReapHalf), RingRefused> {
    let ring: IoUring =
        IoUring::builder().dontfork().setup_clamp().build(entries).map_err(RingRefused::Setup)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|_| RingRefused::NoRead)?;
    if !probe.is_supported(opcode::Read::CODE) {
        return Err(RingRefused::NoRead);
    }
    let ring = Arc::new(ring);
    Ok((SubmitHalf { ring: Arc::clone(&ring) }, ReapHalf { ring }))
}

impl SubmitHalf {
    /// How many requests fit between two submissions.
    pub fn capacity(&self) -> usize {
        self.ring.params().sq_entries() as usize
    }

    /// Queues a read of `file`. The kernel learns of it with [`SubmitHalf::submit`].
    ///
    /// # Panics
    /// If more are pushed between two submissions than [`SubmitHalf::capacity`].
    ///
    /// # Safety
    /// The buffer is valid for `request.len` bytes of writes, and `file` stays open, until the request has
    /// landed. Nobody relies on the buffer's content meanwhile.
    pub unsafe fn push(&mut self, file: BorrowedFd<'_>, request: ReadRequest) {
        let ReadRequest { position, buffer, len, key } = request;
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer, len)
            .offset(position)
            .build()
            .user_data(key);
        // SAFETY: this half is the only one that makes submission queues, and it is borrowed mutably. The
        // entry's parameters are the caller's promise.
        unsafe { self.ring.submission_shared().push(&entry) }
            .expect("the queue is emptied by each submission");
    }

    /// Hands the `pushed` entries pushed last to the kernel.
    ///
    /// # Errors
    /// The kernel refuses for good, for instance because a sandbox now forbids the system call.
    pub fn submit(&mut self, pushed: usize) -> Result<(), SubmitRefused> {
        let mut left = pushed;
        while left > 0 {
            // SAFETY: the arguments are a count of entries that are in the queue, and no pointer.
            let taken = unsafe { self.ring.submitter().enter::<()>(left as u32, 0, 0, None) };
            match taken {
                Ok(taken) => left -= taken,
                Err(error) if is_passing(&error) => std::thread::yield_now(),
                Err(error) => return Err(SubmitRefused { left, error }),
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

    /// Waits until a completion is there; a signal may end the wait early.
    ///
    /// # Errors
    /// The kernel refuses to let us wait.
    pub fn wait(&mut self) -> io::Result<()> {
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: the arguments are a count and flags, and no pointer.
        match unsafe { self.ring.submitter().enter::<()>(0, 1, flags, None) } {
            Ok(_) => Ok(()),
            Err(error) if is_passing(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Moves what has landed to `landed`, without a system call.
    pub fn drain(&mut self, landed: &mut Vec<Landed>) {
        // SAFETY: this half is the only one that makes completion queues, and it is borrowed mutably.
        let queue = unsafe { self.ring.completion_shared() };
        landed.extend(queue.map(|entry| Landed { key: entry.user_data(), result: entry.result() }));
    }
}

/// Whether trying again is all there is to do.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

impl std::fmt::Debug for SubmitHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SubmitHalf").field("capacity", &self.capacity()).finish()
    }
}

impl std::fmt::Debug for ReapHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReapHalf").field("capacity", &self.capacity()).finish()
    }
}
