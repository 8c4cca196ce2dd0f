//! Futures: a read and a pin as values that are polled.
//!
//! ```text
//!   ReadFuture        waits without a thread: see the fill path's `future.rs`
//!   PinFuture         waits as a read of one byte for each page that is missing, and then pins without waiting
//!   BatchReadFuture   (`batch.rs`) several reads; all that is missing is asked for by the first poll
//!   WriteFuture       (`write.rs`) made by the first poll if it can be; else by a thread of the cache (`blocking.rs`)
//! ```
//!
//! A future borrows its file and its buffers; give a task of its own a clone of the file and a buffer.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use crate::error::Result;
use crate::filemap::{PendingRead, PinRequest, WaitPolicy};
use crate::folio::Pinned;

use super::blocking::BlockingCall;
use super::{File, PositionedRead, ReadOptions};

/// A read that is under way or has not begun; see [`File::read_at_async`]. Polled after it is ready, it reads again.
#[derive(Debug)]
#[must_use = "a future does nothing until it is polled"]
pub struct ReadFuture<'a> {
    file: &'a File,
    buffer: &'a mut [u8],
    read: PositionedRead,
    progress: PendingRead,
}

impl<'a> ReadFuture<'a> {
    pub(super) fn new(file: &'a File, buffer: &'a mut [u8], position: u64, options: ReadOptions) -> Self {
        Self { file, buffer, read: PositionedRead { position, options }, progress: PendingRead::default() }
    }
}

impl Future for ReadFuture<'_> {
    type Output = Result<usize>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { file, buffer, read, progress } = self.get_mut();
        file.poll_read(progress, buffer, *read, context)
    }
}

/// Waits for a page, for a call that then reads or pins it.
#[derive(Debug)]
pub(crate) struct PagePresence {
    progress: PendingRead,
    byte: [u8; 1],
}

impl Default for PagePresence {
    fn default() -> Self {
        Self { progress: PendingRead::probe(), byte: [0] }
    }
}

impl PagePresence {
    /// Ready with whether the file has that byte.
    pub fn poll(&mut self, file: &File, position: u64, context: &Context<'_>) -> Poll<Result<bool>> {
        let read = PositionedRead { position, options: ReadOptions::default() };
        let read = ready!(file.poll_read(&mut self.progress, &mut self.byte, read, context));
        Poll::Ready(read.map(|bytes| bytes > 0))
    }
}

/// A pin that is under way or has not begun; see [`File::pin_async`].
#[derive(Debug)]
#[must_use = "a future does nothing until it is polled"]
pub struct PinFuture<'a> {
    file: &'a File,
    position: u64,
    len: usize,
    state: PinState,
    /// How often all pages were there in turn and not together.
    tries: u32,
    /// Whether some page was not there: then the pin is no hit.
    was_missing: bool,
}

#[derive(Debug)]
enum PinState {
    Begun,
    Waiting(u64, PagePresence),
    HandedOver(BlockingCall<Pinned>),
}

/// Tries of a pin until a thread makes it, because pages are evicted as fast as they come.
const PIN_TRIES_MAX: u32 = 1000;

impl<'a> PinFuture<'a> {
    pub(super) fn new(file: &'a File, position: u64, len: usize) -> Self {
        Self { file, position, len, state: PinState::Begun, tries: 0, was_missing: false }
    }

    fn attempt(&mut self) -> Option<Result<Pinned>> {
        let Self { file, position, len, .. } = *self;
        if self.tries == 0 {
            // All that is missing is on its way before the first of it is waited for.
            match file.start_pin(position, len) {
                Ok(missing) => self.was_missing = missing > 0,
                Err(error) => return Some(Err(error)),
            }
        }
        self.tries += 1;
        if self.tries > PIN_TRIES_MAX {
            let file = file.clone();
            let call = self.file.run_blocking(move || file.pin(position, len));
            self.state = PinState::HandedOver(call);
            return None;
        }
        let (wait_policy, process) = (WaitPolicy::Start, file.process);
        let request = PinRequest { position, len, wait_policy, process, was_missing: self.was_missing };
        match file.pin_assured(ReadOptions::default(), request) {
            Ok(pinned) if pinned.is_empty() && len > 0 && self.tries == 1 => {
                // Behind the end, as far as is known: a read finds out whether that is so.
                self.state = PinState::Waiting(position, PagePresence::default());
                None
            }
            Ok(pinned) => Some(Ok(pinned)),
            Err(error) => match error.would_block_at() {
                Some(missing) => {
                    self.was_missing = true;
                    self.state = PinState::Waiting(missing, PagePresence::default());
                    None
                }
                None => Some(Err(error)),
            },
        }
    }
}

impl Future for PinFuture<'_> {
    type Output = Result<Pinned>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            match &mut this.state {
                PinState::Begun => {}
                PinState::Waiting(position, presence) => {
                    if let Err(error) = ready!(presence.poll(this.file, *position, context)) {
                        return Poll::Ready(Err(error));
                    }
                    this.state = PinState::Begun;
                }
                PinState::HandedOver(call) => return Pin::new(call).poll(context),
            }
            if let Some(ended) = this.attempt() {
                return Poll::Ready(ended);
            }
        }
    }
}
