//! Viewed: a file in the cache of another process, read by mappings of that process's memory.
//!
//! ```text
//!   owner's socket --> the arena       mapped to be read        where the bytes are
//!                      this process's page   mapped to be written   where requests go
//! ```
//!
//! It does what the preloaded library does once it knows that a descriptor still refers to the same file: only the
//! read. The mappings stay until the process ends.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use quinion::internals::arena::control::Operation;
use quinion::internals::arena::{CellNumber, LAYOUT_VERSION};
use quinion::internals::units::MappingId;
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::{Owner, Service, ServiceOptions, listen};
use quinion_owner::internals::viewer::handshake::{JoinRequest, NO_PLAN};
use quinion_owner::internals::viewer::{self, ReadEnd, ViewedFile, Viewer, WantedBytes};

/// Serves other processes of this program by one thread, and returns the word by which [`Viewed::attach`] finds it. The
/// socket lies in `folder`.
pub fn serve(owner: Arc<CacheOwner>, folder: &Path) -> io::Result<(Service, String)> {
    let (path, token) = (folder.join("view.socket"), owner.arena().token());
    let options = ServiceOptions { workers: 1, listener: Some(listen(&path)?), ..ServiceOptions::default() };
    let service = Service::start_with(owner, options)?;
    Ok((service, format!("{token}:{}", path.display())))
}

pub struct Viewed {
    viewer: Viewer,
    handle: u64,
    cell: CellNumber,
    id: MappingId,
    marker_reported: AtomicU64,
    touched: AtomicU64,
    /// Kept open, since the owner identifies the file by it.
    _file: File,
}

impl Viewed {
    pub fn attach(place: &str, path: &Path) -> io::Result<Self> {
        let known = place.split_once(':').and_then(|(token, socket)| Some((token.parse().ok()?, socket)));
        let Some((token, socket)) = known else {
            return Err(io::Error::other(format!("`{place}` is no place of a cache")));
        };
        let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token, run: 0 };
        let viewer = viewer::connect(socket.as_ref(), &hello)?;
        let file = File::open(path)?;
        let known = file.metadata()?;
        let question = [file.as_raw_fd() as u64, known.dev(), known.ino()];
        let answer = viewer.request(Operation::Attach, question);
        let [handle, place] =
            answer.map_err(|why| io::Error::other(format!("no view of the file: {why:?}")))?;
        let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
        let (marker_reported, touched) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { viewer, handle, cell, id, marker_reported, touched, _file: file })
    }

    #[inline]
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let Self { handle, cell, id, ref marker_reported, ref touched, .. } = *self;
        let file = ViewedFile { handle, cell, id, marker_reported, touched };
        // SAFETY: the buffer is borrowed mutably, and does not overlap the arena, which is only read here.
        let outcome = unsafe { self.viewer.read(&file, WantedBytes::of_slice(position, buffer)) };
        match outcome.end {
            ReadEnd::Full | ReadEnd::EndOfFile(_) => Ok(outcome.bytes),
            end => Err(io::Error::other(format!("the cache's owner gave no bytes at {position}: {end:?}"))),
        }
    }
}
