//! Flush: a run of folios on its way to the file.
//!
//! The twin of a [`Fill`](super::Fill): the backend reads the frames and completes the flush once. It begins at a
//! page of the file and is of whole pages, but for a last one where the file ends: there it ends at the byte, and
//! nothing is ever written behind that.
//!
//! ```text
//!   write-back --flush(Flush, ..)--> backend --device, pool, memory--> Flush::complete --> FlushSink
//!
//!   | page | page | page | pa       bytes of the run; the rest of the last frame is not looked at
//!   |<------ written ---->| error   of a flush that failed this much was written, in any case
//! ```
//!
//! Invariants:
//!  1. A flush ends once, by [`Flush::complete`] or, if it is dropped, as failed: the type sees to it.
//!  2. [`FlushError::written`] is a lower bound. Bytes behind it may be on the device, or not, or in part.
//!
//! Not an invariant: that the frames hold still. A thread that stores to them while they are written has to flush
//! them again; until then the device may hold a mixture of both. A file system that checks sums of its own (Btrfs)
//! may refuse to read such a mixture, so a thread that can keep the frames still does.
//!
//! A flush that has ended well is not yet durable: see [`Backend::sync`](super::Backend::sync).

use std::fmt;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::units::{Frame, PAGE_SIZE, PageIndex};

const ZERO_BYTES: usize = 256 << 10;

/// Which bytes a flush is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushRun {
    /// The first page.
    pub index: PageIndex,
    /// The frame of the first page; the others follow.
    pub frame: Frame,
    /// How many bytes; not a multiple of 4096 only if the file ends there.
    pub bytes: usize,
}

impl FlushRun {
    /// How many pages it touches.
    pub fn pages(&self) -> u32 {
        self.bytes.div_ceil(PAGE_SIZE) as u32
    }
}

/// How a flush failed.
#[derive(Debug, thiserror::Error)]
#[error("{error} (after {written} bytes of the run)")]
pub struct FlushError {
    /// Number of bytes written, from the start of the run.
    pub written: usize,
    /// The error that ended the flush.
    #[source]
    pub error: io::Error,
}

impl FlushError {
    /// The device took no byte and gave no reason.
    pub(super) fn stuck(written: usize) -> Self {
        let error = io::Error::new(
            io::ErrorKind::WriteZero,
            "the device takes no more bytes and does not say why; look at the system's log",
        );
        Self { written, error }
    }
}

impl From<FlushError> for io::Error {
    fn from(failed: FlushError) -> Self {
        failed.error
    }
}

/// Receiver of the outcome of a flush. Handed down by the write-back path.
pub trait FlushSink: Send + Sync {
    /// The run was written, or a part of it. Called once for each flush, on any thread, with no lock held.
    fn flush_completed(&self, run: FlushRun, outcome: Result<(), FlushError>);
}

/// The error of a call that would change the file, from a backend named `name` that only reads.
pub(super) fn read_only(name: &str) -> io::Error {
    let words = format!(
        "this file is only read (by {name}); open it for writing, or give the cache a backend that can write"
    );
    io::Error::new(io::ErrorKind::Unsupported, words)
}

/// Writes zeros by `write`, which returns how many bytes it took: for backends that can have no holes.
pub(super) fn zero_by(
    range: Range<u64>,
    mut write: impl FnMut(&[u8], u64) -> io::Result<usize>,
) -> io::Result<()> {
    let zeros =
        vec![0; ZERO_BYTES.min(usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(ZERO_BYTES))];
    let mut at = range.start;
    while at < range.end {
        let asked = usize::try_from(range.end - at).map_or(zeros.len(), |left| left.min(zeros.len()));
        match write(&zeros[..asked], at) {
            Ok(0) => return Err(FlushError::stuck(0).error),
            Ok(bytes) => at += bytes.min(asked) as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A run of folios whose bytes are to be written to the file.
pub struct Flush {
    run: FlushRun,
    /// Where in the run it begins, in bytes: 0, but for the second piece of one that was split.
    from: usize,
    len: usize,
    buffer: NonNull<u8>,
    sink: Option<Arc<dyn FlushSink>>,
}

// SAFETY: the buffer is only read, in ways that allow for concurrent writers; the sink is Send and Sync.
unsafe impl Send for Flush {}
// SAFETY: a shared flush gives out numbers, an address, and copies of bytes.
unsafe impl Sync for Flush {}

impl Flush {
    /// A flush of `run`, whose frames' bytes begin at `buffer`.
    ///
    /// # Panics
    /// If the run has no bytes.
    ///
    /// # Safety
    /// `buffer` is valid for `run.bytes` bytes of reads until the flush has been completed, and aligned to a
    /// page. Others may store there meanwhile, if they do so as [`copy_in`](crate::folio::copy::copy_in) does.
    pub unsafe fn new(run: FlushRun, buffer: NonNull<u8>, sink: Arc<dyn FlushSink>) -> Self {
        assert!(run.bytes > 0, "a flush is of at least one byte");
        Self { run, from: 0, len: run.bytes, buffer, sink: Some(sink) }
    }
    /// Where in the file it begins, in bytes; a multiple of 4096.
    pub fn position(&self) -> u64 {
        self.run.index.first_byte() + self.from as u64
    }
    /// How many bytes are to be written.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Never true: a flush is of at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
    /// Which bytes it is of.
    pub fn run(&self) -> FlushRun {
        self.run
    }
    /// Where the bytes are, for a device or a system call: valid for [`Flush::len`] bytes of reads until the flush is
    /// completed; aligned to 4096. Others may be storing to these bytes, so no Rust reference to them may be made.
    pub fn as_ptr(&self) -> *const u8 {
        self.buffer.as_ptr().wrapping_add(self.from)
    }
    /// Copies its bytes from byte `at` on to `bytes`.
    ///
    /// # Panics
    /// If it has not so many.
    pub fn read(&self, at: usize, bytes: &mut [u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at, "a flush is read within its length");
        // SAFETY: inside the buffer by the assertion; the destination is the caller's alone.
        unsafe {
            crate::folio::copy::copy_out(self.as_ptr().wrapping_add(at), bytes.as_mut_ptr(), bytes.len());
        }
    }
    /// Ends the flush: all its bytes were written, or it failed.
    pub fn complete(mut self, outcome: Result<(), FlushError>) {
        self.end(outcome);
    }
    fn end(&mut self, outcome: Result<(), FlushError>) {
        if let Some(sink) = self.sink.take() {
            sink.flush_completed(self.run, outcome);
        }
    }
    /// At byte `at`, a page's first. The second piece is handed to `then` once the first was written, and else not.
    pub(super) fn split(mut self, at: usize, then: impl FnOnce(Self) + Send + 'static) -> Self {
        debug_assert!(self.from == 0 && 0 < at && at < self.len && at.is_multiple_of(PAGE_SIZE));
        let whole = Self { sink: self.sink.take(), ..self };
        let second = SecondHalf { whole: Mutex::new(Some((whole, Box::new(then)))), at };
        Self { run: self.run, from: 0, len: at, buffer: self.buffer, sink: Some(Arc::new(second)) }
    }
}

struct SecondHalf {
    whole: Mutex<Option<(Flush, Box<Then>)>>,
    at: usize,
}

type Then = dyn FnOnce(Flush) + Send;

struct WholeFlush {
    sink: Arc<dyn FlushSink>,
    at: usize,
}

impl FlushSink for SecondHalf {
    fn flush_completed(&self, run: FlushRun, outcome: Result<(), FlushError>) {
        let whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((mut whole, then)) = whole else { return };
        if outcome.is_err() {
            return whole.complete(outcome);
        }
        let sink =
            whole.sink.take().map(|sink| Arc::new(WholeFlush { sink, at: self.at }) as Arc<dyn FlushSink>);
        then(Flush { run, from: self.at, len: whole.len - self.at, buffer: whole.buffer, sink });
    }
}

impl FlushSink for WholeFlush {
    fn flush_completed(&self, run: FlushRun, outcome: Result<(), FlushError>) {
        let outcome =
            outcome.map_err(|FlushError { written, error }| FlushError { written: self.at + written, error });
        self.sink.flush_completed(run, outcome);
    }
}

impl Drop for Flush {
    fn drop(&mut self) {
        let error = || io::Error::other("the backend dropped the request");
        if self.sink.is_some() {
            self.end(Err(FlushError { written: 0, error: error() }));
        }
    }
}

impl fmt::Debug for Flush {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flush").field("run", &self.run).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Ended = Result<(), (usize, io::ErrorKind)>;

    struct Recording {
        bytes: Vec<u8>,
        outcomes: Mutex<Vec<Ended>>,
    }

    impl FlushSink for Recording {
        fn flush_completed(&self, run: FlushRun, outcome: Result<(), FlushError>) {
            assert_eq!(run.bytes, self.bytes.len(), "the run is the whole one's");
            self.outcomes
                .lock()
                .unwrap()
                .push(outcome.map_err(|failed| (failed.written, failed.error.kind())));
        }
    }

    fn flush(bytes: usize) -> (Flush, Arc<Recording>) {
        let bytes = (0..bytes).map(|at| (at / 7) as u8).collect();
        let told = Arc::new(Recording { bytes, outcomes: Mutex::default() });
        let run = FlushRun { index: PageIndex(5), frame: Frame(1), bytes: told.bytes.len() };
        let start = NonNull::from(&told.bytes[..]).cast();
        // SAFETY: the sink, which the flush holds until it is completed, keeps the bytes.
        (unsafe { Flush::new(run, start, Arc::clone(&told) as Arc<dyn FlushSink>) }, told)
    }

    fn failed(written: usize) -> Result<(), FlushError> {
        Err(FlushError { written, error: io::ErrorKind::StorageFull.into() })
    }

    #[test]
    fn a_flush_ends_once_also_if_it_is_dropped() {
        let (dropped, told) = flush(100);
        drop(dropped);
        assert_eq!(*told.outcomes.lock().unwrap(), [Err((0, io::ErrorKind::Other))]);
        let (completed, told) = flush(100);
        completed.complete(failed(7));
        assert_eq!(*told.outcomes.lock().unwrap(), [Err((7, io::ErrorKind::StorageFull))]);
    }

    #[test]
    fn a_second_piece_follows_the_first_and_its_failure_is_the_wholes() {
        type End = fn(Flush);
        let full = io::ErrorKind::StorageFull;
        let cases: [(End, End, usize, Ended); 5] = [
            (|first| first.complete(Ok(())), |second| second.complete(Ok(())), 1, Ok(())),
            (|first| first.complete(failed(512)), |_| unreachable!(), 0, Err((512, full))),
            (|first| first.complete(Ok(())), |second| second.complete(failed(3)), 1, Err((8195, full))),
            (drop, |_| unreachable!(), 0, Err((0, io::ErrorKind::Other))),
            (|first| first.complete(Ok(())), drop, 1, Err((8192, io::ErrorKind::Other))),
        ];
        for (end_first, end_second, seconds, wanted) in cases {
            let (whole, told) = flush(8292);
            let count = Arc::new(Mutex::new(0));
            let (seen, bytes) = (Arc::clone(&count), told.bytes.clone());
            let first = whole.split(8192, move |second| {
                let mut there = vec![0; second.len()];
                second.read(0, &mut there);
                assert_eq!((second.position(), &there[..]), (5 * 4096 + 8192, &bytes[8192..]));
                *seen.lock().unwrap() += 1;
                end_second(second);
            });
            assert_eq!((first.position(), first.len()), (5 * 4096, 8192));
            assert!(told.outcomes.lock().unwrap().is_empty());
            end_first(first);
            assert_eq!(*told.outcomes.lock().unwrap(), [wanted]);
            assert_eq!(*count.lock().unwrap(), seconds);
        }
    }

    #[test]
    fn zeros_go_on_where_they_fell_short() {
        let mut bytes = vec![1; 1 << 20];
        let mut calls = 0;
        zero_by(100..900_000, |zeros, position| {
            calls += 1;
            if calls % 3 == 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let taken = zeros.len().min(70_000);
            bytes[position as usize..position as usize + taken].copy_from_slice(&zeros[..taken]);
            Ok(taken)
        })
        .unwrap();
        assert!(bytes[..100].iter().chain(&bytes[900_000..]).all(|&byte| byte == 1));
        assert!(bytes[100..900_000].iter().all(|&byte| byte == 0));
        assert_eq!(zero_by(0..10, |_, _| Ok(0)).unwrap_err().kind(), io::ErrorKind::WriteZero);
    }
}
