//! Populate: many bytes into a memory file at once, straight into the frames that will be its folios.
//!
//! ```text
//!   2 MiB at a time   1 grab      what is not there: the largest folios that fit, locked, not visible to readers
//!                     2 put       the source's bytes into them, in order; nothing is zeroed that is written
//!                     3 commit    folio by folio, as each is full: up to date, unlocked, readers woken
//!                     4 the last  of which only a part came: zeros behind it
//!                     5 aside     what a user has pinned is written as any write would, when nothing is locked
//! ```
//!
//! Where the file has bytes already they are written over in place, as by any write; the folio lock keeps other
//! populates away meanwhile. Several threads may populate one file side by side.
//!
//! If a source ends, fails or panics, the bytes that came before stay: the last page is filled up with zeros, and so is
//! its folio; whole folios of which nothing came are holes again.
//!
//! Invariants:
//!  1. No ranked lock is held while the source is asked. Folios are: a reader that wants their bytes waits for the
//!     source.
//!  2. A byte that was put is in the file when the call returns, or another thread has cut or punched it since.
//!
//! Not an invariant: that readers see the bytes in order. Nor that a source may use the file that it fills: where its
//! own pages are locked it would wait for itself, and elsewhere for a caller that cuts the file and waits for these
//! pages.
//!
//! Cost: a copy, and for 2 MiB one hold each of the locks of pool, arena and tree. A slice of a frame is not lent,
//! because late readers of the frame's former folio may be looking ([`copy`](crate::folio::copy)): so there is a
//! buffer.

use std::io::{self, Read, Write};
use std::ops::Range;

use crate::arena::WriteRefused;
use crate::error::{Error, Repr};
use crate::filemap::WriteContext;
use crate::folio::LockedFolio;
use crate::mapping::Grabbed;

use super::Shmem;

/// Bytes of the buffer between a reader and the folios: a part of a processor's own cache.
const BUFFER_BYTES: usize = 128 << 10;

/// A piece of a memory file that is being populated: bytes are put into it in order, by [`Write`]. The populate ends
/// where a slice was not filled when it was given back.
#[derive(Debug)]
pub struct PopulateSlice<'s> {
    grabbed: Grabbed<'s>,
    /// The position in the file of the next byte.
    at: u64,
    end: u64,
    /// Bytes that could not be put in place, because users have pinned it.
    aside: Vec<(u64, Vec<u8>)>,
}

impl PopulateSlice<'_> {
    /// The position in the file, in bytes, of the next byte that is put.
    pub fn position(&self) -> u64 {
        self.at
    }
    /// How many bytes it takes before it is full.
    pub fn left(&self) -> usize {
        (self.end - self.at) as usize
    }
    /// Puts `bytes`, as many as it takes; how many. Folios that are full then can be read. May wait for others that
    /// write in the same page, where the file had bytes before.
    pub fn put(&mut self, bytes: &[u8]) -> usize {
        let len = bytes.len().min(self.left());
        let put = |folio: &mut LockedFolio<'_>, at: Range<usize>, position| folio.write(position, &bytes[at]);
        self.put_with(len, put, |at| bytes[at].to_vec());
        len
    }
    /// Puts `len` zeros, or as many as it takes; how many. As [`PopulateSlice::put`].
    pub fn put_zeros(&mut self, len: usize) -> usize {
        let len = len.min(self.left());
        let put = |folio: &mut LockedFolio<'_>, at: Range<usize>, position| folio.zero(position, at.len());
        self.put_with(len, put, |at| vec![0; at.len()]);
        len
    }

    /// Bytes for pinned pages are kept for later, as `keep` has them; folios that have left the index are skipped.
    fn put_with(
        &mut self,
        len: usize,
        put: impl Fn(&mut LockedFolio<'_>, Range<usize>, u64) -> Result<(), (usize, WriteRefused)>,
        keep: impl Fn(Range<usize>) -> Vec<u8>,
    ) {
        let (mut done, mut full) = (0, 0);
        while done < len {
            let folio = self.grabbed.folio_mut(full).expect("its folios cover it");
            let ends = folio.end().first_byte();
            let part = ((ends - self.at) as usize).min(len - done);
            if let Err((some, WriteRefused::Pinned)) = put(folio, done..done + part, self.at) {
                self.aside.push((self.at + some as u64, keep(done + some..done + part)));
            }
            (done, self.at) = (done + part, self.at + part as u64);
            full += usize::from(self.at == ends);
        }
        if full > 0 {
            self.grabbed.commit_first(full);
        }
    }
}

impl Write for PopulateSlice<'_> {
    /// As [`PopulateSlice::put`]; 0 if it is full.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.put(bytes))
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The outcome of one slice.
struct Populated {
    bytes: u64,
    /// Whether these are all that the slice takes.
    is_whole: bool,
    outcome: Result<(), Error>,
}

impl Populated {
    fn nothing(outcome: Result<(), Error>) -> Self {
        Self { bytes: 0, is_whole: false, outcome }
    }
}

impl Shmem {
    /// Fills `range`, in bytes, with what `source` puts into each [`PopulateSlice`] of it, one after the other. Returns
    /// how many bytes came before the source ended or failed, or memory did.
    ///
    /// # Errors
    /// The source's, or that there is no memory, if no byte came.
    pub(crate) fn populate(
        &self,
        writer: WriteContext<'_>,
        range: Range<u64>,
        source: &mut dyn FnMut(&mut PopulateSlice<'_>) -> io::Result<()>,
    ) -> Result<u64, Error> {
        let mut at = range.start;
        while at < range.end {
            let Populated { bytes, is_whole, outcome } = self.populate_some(writer, at..range.end, source);
            at += bytes;
            match outcome {
                Err(error) if at == range.start => return Err(error),
                Err(_) => break,
                Ok(()) if !is_whole => break,
                Ok(()) => {}
            }
        }
        Ok(at - range.start)
    }

    /// Steps 1 to 5 for one slice.
    fn populate_some(
        &self,
        writer: WriteContext<'_>,
        range: Range<u64>,
        source: &mut dyn FnMut(&mut PopulateSlice<'_>) -> io::Result<()>,
    ) -> Populated {
        // 1
        let grabbed = match self.grab_some(writer.mapping(), writer.pool(), range.clone()) {
            Ok(grabbed) => grabbed,
            Err(error) => return Populated::nothing(Err(error)),
        };
        let Some(end) = grabbed.end() else { return Populated::nothing(Ok(())) }; // others have cut the file
        let end = end.first_byte().min(range.end);
        let mut slice = PopulateSlice { grabbed, at: range.start, end, aside: Vec::new() };
        // 2, 3
        let outcome = source(&mut slice);
        // 4
        let PopulateSlice { grabbed, at, aside, .. } = slice;
        grabbed.commit();
        // 5
        let outcome = outcome.map_err(|source| {
            let len = (range.end - at) as usize;
            Error::from(Repr::Populate { position: at, len, source })
        });
        match self.put_aside(writer, aside) {
            Ok(()) => Populated { bytes: at - range.start, is_whole: at == end, outcome },
            Err((position, error)) => {
                Populated { bytes: position - range.start, is_whole: false, outcome: Err(error) }
            }
        }
    }

    /// Writes the bytes that could not be put in place. If that fails, where.
    fn put_aside(&self, writer: WriteContext<'_>, aside: Vec<(u64, Vec<u8>)>) -> Result<(), (u64, Error)> {
        for (position, bytes) in aside {
            let mut done = 0;
            while done < bytes.len() {
                let at = position + done as u64;
                if at >= writer.mapping().size() {
                    break; // cut off meanwhile: a populate makes no file longer
                }
                let written = self.filemap.write(writer, at, &bytes[done..]);
                done += written.map_err(|error| (at, error))?;
            }
        }
        Ok(())
    }

    /// As [`Shmem::populate`], with the bytes of `reader`, through a buffer.
    pub(crate) fn populate_from_reader(
        &self,
        writer: WriteContext<'_>,
        range: Range<u64>,
        reader: &mut dyn Read,
    ) -> Result<u64, Error> {
        let mut buffer = vec![0; BUFFER_BYTES];
        self.populate(writer, range, &mut |slice| {
            while slice.left() > 0 {
                let wanted = slice.left().min(buffer.len());
                match reader.read(&mut buffer[..wanted]) {
                    Ok(0) => break,
                    Ok(bytes) => slice.write_all(&buffer[..bytes])?,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    }
}
