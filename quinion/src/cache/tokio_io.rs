//! Tokio: a file as tokio's `AsyncRead`, `AsyncWrite` and `AsyncSeek`.
//!
//! ```text
//!   poll_read    what is cached, copied into the caller's buffer; if nothing is, the page there is waited for
//!                as a future's read waits, without a thread
//!   poll_write   over what is cached at once; else a copy of the bytes goes to a thread of the cache, and the
//!                call returns: the next call on the file waits for it and tells its error
//!   poll_seek    behind the write that was handed over; the end of a file is looked for by a thread of the cache
//! ```
//!
//! Only tokio's traits are used, so this works on any runtime that knows them. As with tokio's own files, an error of
//! a write comes with the next call: call `flush` before you drop the file, or [`AsyncFile::sync_data`] for durability.
//!
//! Invariants:
//!  1. Reads, writes and `poll_complete` first end the write and the seek that were begun before them. So bytes stand
//!     where the calls before them lead, also if nothing waited for these.
//!  2. A seek that `poll_complete` says has failed is not made later, also if it was the write before it that failed.
//!  3. Flushes and syncs wait for the write, and leave the seek alone.

use std::future::{Future, poll_fn};
use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncSeek, AsyncWrite, ReadBuf};

use crate::error::ErrorKind;

use super::blocking::BlockingCall;
use super::future::PagePresence;
use super::write::WriteOptions;
use super::{File, ReadOptions};

const COPIED_MAX: usize = 1 << 20;
/// An answer that took longer may have lain there for a read that was dropped: the file is looked at again. A device
/// that takes longer than this is given a multiple of it the next time.
const ANSWER_AGE_MAX: Duration = Duration::from_secs(1);
const ANSWER_AGE_GROWTH: u32 = 8;

/// A [`File`] for code that wants tokio's [`AsyncRead`], [`AsyncWrite`] and [`AsyncSeek`], with the feature `tokio`.
///
/// A read that is dropped while it waits leaves its wait to the next one at the same position. The bytes of that may be
/// a second older than the file's coherence promises, and as old as the device takes if that is longer.
#[derive(Debug)]
pub struct AsyncFile {
    missing: Option<AwaitedPage>, // dropped first: no wait outlives the file
    file: File,
    /// How long the next wait may last for its answer to be of now.
    answer_age_max: Duration,
    writing: Option<Writing>,
    /// A seek that was begun while a write was under way: that says where the file ends, or where the position is.
    pending_seek: Option<SeekFrom>,
    /// A seek that waits for the file's size, and the offset in bytes that is added to that.
    seeking: Option<(BlockingCall<u64>, i64)>,
}

/// A wait for the page at a position. The read that began it may have been dropped: then another read finds it, later
/// or at another position.
#[derive(Debug)]
struct AwaitedPage {
    position: u64,
    begun: Instant,
    presence: PagePresence,
}

#[derive(Debug)]
enum Writing {
    At(BlockingCall<()>),
    /// An append of this many bytes, which end at the new position.
    Appends(BlockingCall<u64>, usize),
}

impl AsyncFile {
    /// `file`, at its position.
    pub fn new(file: File) -> Self {
        let answer_age_max = ANSWER_AGE_MAX;
        Self { missing: None, file, answer_age_max, writing: None, pending_seek: None, seeking: None }
    }

    /// The file.
    pub fn get_ref(&self) -> &File {
        &self.file
    }

    /// As [`File::sync_data`], of all that was written by this value: waits for a write that was handed over first.
    /// (A sync by [`AsyncFile::get_ref`] does not.) Dropped before it is ready, it may have begun.
    ///
    /// # Errors
    /// As [`File::sync_data`]; or that of the write before, and nothing was made durable.
    pub async fn sync_data(&mut self) -> io::Result<()> {
        poll_fn(|context| self.poll_written(context)).await?;
        Ok(self.file.sync_data_async().await?)
    }

    /// As [`AsyncFile::sync_data`], with [`File::sync_all`].
    ///
    /// # Errors
    /// As there.
    pub async fn sync_all(&mut self) -> io::Result<()> {
        poll_fn(|context| self.poll_written(context)).await?;
        Ok(self.file.sync_all_async().await?)
    }

    /// A write that was handed over goes on, and its error is lost.
    pub fn into_inner(self) -> File {
        self.file
    }

    fn position(&self) -> u64 {
        self.file.position.load(Ordering::Relaxed)
    }

    fn advance(&self, bytes: usize) {
        self.file.position.store(self.position() + bytes as u64, Ordering::Relaxed);
    }

    /// Waits for the write that was handed over.
    fn poll_written(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(writing) = &mut self.writing else { return Poll::Ready(Ok(())) };
        let written = match writing {
            Writing::At(call) => ready!(Pin::new(call).poll(context)),
            Writing::Appends(call, bytes) => ready!(Pin::new(call).poll(context)).map(|position| {
                self.file.position.store(position + *bytes as u64, Ordering::Relaxed);
            }),
        };
        self.writing = None;
        Poll::Ready(written.map_err(io::Error::from))
    }

    /// Waits for the write that was handed over, and for the seek that was begun: the position is known then.
    fn poll_placed(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_written(context))?;
        if let Some(to) = self.pending_seek.take() {
            self.begin_seek(to)?;
        }
        if let Some((end, offset)) = &mut self.seeking {
            let (end, offset) = (ready!(Pin::new(end).poll(context)), *offset);
            self.seeking = None;
            let (end, before) = (SeekFrom::Start(end?), self.position());
            io::Seek::seek(&mut &self.file, end)?;
            if let Err(error) = io::Seek::seek(&mut &self.file, SeekFrom::Current(offset)) {
                self.file.position.store(before, Ordering::Relaxed);
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(()))
    }

    fn begin_seek(&mut self, to: SeekFrom) -> io::Result<()> {
        if let SeekFrom::End(offset) = to {
            let end = self.file.blocking_call(|file| {
                file.revalidate()?;
                Ok(file.len())
            });
            self.seeking = Some((end, offset));
            return Ok(());
        }
        io::Seek::seek(&mut &self.file, to).map(drop)
    }

    fn poll_read_into(&mut self, buffer: &mut [u8], context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let position = self.position();
        let mut is_brought = false;
        loop {
            self.missing.take_if(|awaited| awaited.position != position);
            if let Some(awaited) = &mut self.missing {
                let came = ready!(awaited.presence.poll(&self.file, position, context));
                let is_of_now = awaited.begun.elapsed() < self.answer_age_max;
                self.missing = None;
                is_brought = is_of_now && came?;
                if !is_brought && is_of_now {
                    return Poll::Ready(Ok(0));
                }
                if !is_of_now {
                    self.answer_age_max = self.answer_age_max.saturating_mul(ANSWER_AGE_GROWTH);
                }
            }
            let read = match is_brought {
                true => self.file.read_prefetched(buffer, position),
                false => self.file.read_at_with(buffer, position, ReadOptions::new().nowait(true)),
            };
            match read {
                Ok(0) => {} // the end, or the file has grown
                Ok(bytes) => {
                    self.answer_age_max = ANSWER_AGE_MAX;
                    return Poll::Ready(Ok(bytes));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
            self.missing =
                Some(AwaitedPage { position, begun: Instant::now(), presence: PagePresence::default() });
        }
    }
}

impl From<File> for AsyncFile {
    fn from(file: File) -> Self {
        Self::new(file)
    }
}

impl AsyncRead for AsyncFile {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_placed(context))?;
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let bytes = ready!(this.poll_read_into(buffer.initialize_unfilled(), context))?;
        this.advance(bytes);
        buffer.advance(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AsyncFile {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_placed(context))?;
        this.missing = None; // of what was to be read at the old position
        let position = this.position();
        if this.file.handle.access.appends {
            let bytes = bytes[..bytes.len().min(COPIED_MAX)].to_vec();
            let len = bytes.len();
            this.writing = Some(Writing::Appends(this.file.append_async(bytes), len));
            return Poll::Ready(Ok(len));
        }
        if let Some(written) = this.file.write_at_once(bytes, position, WriteOptions::default()) {
            let written = written?;
            this.advance(written);
            return Poll::Ready(Ok(written));
        }
        let bytes = bytes[..bytes.len().min(COPIED_MAX)].to_vec();
        let len = bytes.len();
        let call = this.file.blocking_call(move |file| file.write_all_at(&bytes, position));
        this.writing = Some(Writing::At(call));
        this.advance(len);
        Poll::Ready(Ok(len))
    }

    /// Returns the error of the write before. Makes nothing durable.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_written(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_written(context)
    }
}

impl AsyncSeek for AsyncFile {
    fn start_seek(self: Pin<&mut Self>, to: SeekFrom) -> io::Result<()> {
        let this = self.get_mut();
        this.missing = None;
        this.seeking = None;
        this.pending_seek = this.writing.is_some().then_some(to);
        if this.pending_seek.is_some() { Ok(()) } else { this.begin_seek(to) }
    }

    fn poll_complete(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<u64>> {
        let this = self.get_mut();
        let placed = ready!(this.poll_placed(context));
        this.pending_seek = None; // it was made, or this call says that it was not
        Poll::Ready(placed.map(|()| this.position()))
    }
}
