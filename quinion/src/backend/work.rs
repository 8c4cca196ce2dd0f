//! Work: a fill or a flush, for mechanisms that treat both alike.
//!
//! A ring and a pool queue, cut, count and complete requests whichever way the
//! bytes go. The differences are here, and nowhere else but where the kernel is called.
//!
//! Invariant: work ends once, because a [`Fill`] and a [`Flush`] do.

use std::io;
use std::ops::Range;

use super::{Fill, Flush, FlushError, PagesRead};

#[derive(Debug)]
pub(super) enum Work {
    Fill(Fill),
    Flush(Flush),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TransferDirection {
    Read,
    Write,
}

impl Work {
    pub(super) fn direction(&self) -> TransferDirection {
        match self {
            Self::Fill(_) => TransferDirection::Read,
            Self::Flush(_) => TransferDirection::Write,
        }
    }
    pub(super) fn position(&self) -> u64 {
        match self {
            Self::Fill(fill) => fill.position(),
            Self::Flush(flush) => flush.position(),
        }
    }
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Fill(fill) => fill.len(),
            Self::Flush(flush) => flush.len(),
        }
    }
    /// See [`Fill::pages_were_read`]; no thread waits for a part of a write. May be called under a lock.
    pub(super) fn note_pages_read(&mut self, bytes: Range<usize>) -> Option<PagesRead> {
        match self {
            Self::Fill(fill) => fill.note_pages_read(bytes),
            Self::Flush(_) => None,
        }
    }
    /// Ends it: so many bytes there were before the file's end, or it failed after some.
    pub(super) fn complete(self, outcome: Result<usize, FlushError>) {
        match self {
            Self::Fill(fill) => fill.complete(outcome.map_err(io::Error::from)),
            Self::Flush(flush) => {
                let outcome = outcome.and_then(|written| {
                    if written == flush.len() { Ok(()) } else { Err(FlushError::stuck(written)) }
                });
                flush.complete(outcome);
            }
        }
    }
}
