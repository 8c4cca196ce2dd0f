//! Future: a read as a value that is polled.
//!
//! The work is in the fill path's `future.rs`; this is its face. A
//! [`ReadFuture`] borrows its file and its buffer, so it cannot outlive either;
//! to hand a read to a task of its own, give the task a clone of the file and a
//! buffer.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::error::Result;
use crate::filemap::PendingRead;

use super::{File, ReadOptions};

/// A read that is under way or has not begun; see [`File::read_at_async`]. May be polled again after it is
/// ready: it then reads once more.
#[derive(Debug)]
#[must_use = "a future does nothing until it is polled"]
pub struct ReadFuture<'a> {
    file: &'a File,
    buffer: &'a mut [u8],
    position: u64,
    options: ReadOptions,
    progress: PendingRead,
}

impl<'a> ReadFuture<'a> {
    pub(super) fn new(file: &'a File, buffer: &'a mut [u8], position: u64, options: ReadOptions) -> Self {
        Self { file, buffer, position, options, progress: PendingRead::default() }
    }
}

impl Future for ReadFuture<'_> {
    type Output = Result<usize>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { file, buffer, position, options, progress } = self.get_mut();
        file.poll_read(progress, buffer, (*position, *options), context)
    }
}
