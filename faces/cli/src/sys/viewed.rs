//! Viewed: a file in the cache of another process of ours, read by maps of that process's memory.
//!
//! ```text
//!   owner     /proc/PID/fd/ARENA     mapped to be read        where the bytes are
//!             /proc/PID/fd/CONTROL   mapped to be written     where questions go
//! ```
//!
//! It does what the object in a program does once it knows that a descriptor is the file that it was: nothing but the
//! read. The maps stay until the process ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use quinion::CacheOwner;
use quinion::arena::CellNumber;
use quinion::arena::control::Operation;
use quinion::serve::Owner;
use quinion::units::MappingId;
use quinion::viewer::{Mapped, ReadEnd, ViewedFile, Viewer};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

use super::HUGE_BYTES;

/// Where another process finds the memory of `owner`, which is ours: in a word for [`Viewed::attach`].
pub fn place_of(owner: &CacheOwner) -> String {
    let arena = owner.arena();
    let [data, control] = [arena.arena_fd(), arena.control_fd()].map(|fd| fd.as_raw_fd());
    format!("{}:{data}:{control}:{}", std::process::id(), arena.token())
}

/// One file of a cache.
pub struct Viewed {
    viewer: Viewer,
    handle: u64,
    cell: CellNumber,
    id: MappingId,
    marker_told: AtomicU64,
    touched: AtomicU64,
    /// The owner knows the file by it.
    _file: File,
}

impl Viewed {
    /// The file at `path` in the cache at `place`.
    pub fn attach(place: &str, path: &Path) -> io::Result<Self> {
        let fields: Vec<u64> = place.split(':').flat_map(str::parse).collect();
        let [owner, data, control, token] = fields[..] else {
            return Err(io::Error::other(format!("`{place}` is no place of a cache")));
        };
        let map = |number, is_written| map(&format!("/proc/{owner}/fd/{number}"), is_written);
        // SAFETY: both are mapped as a whole, and nothing unmaps them.
        let viewer =
            unsafe { Viewer::attach(map(data, false)?, map(control, true)?, token, std::process::id()) };
        let viewer = viewer.map_err(|why| io::Error::other(format!("no view of the cache: {why:?}")))?;
        let file = File::open(path)?;
        let known = file.metadata()?;
        let question = [file.as_raw_fd() as u64, known.dev(), known.ino()];
        let answer = viewer.request(Operation::Attach, question);
        let [handle, place] =
            answer.map_err(|why| io::Error::other(format!("no view of the file: {why:?}")))?;
        let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
        let (marker_told, touched) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { viewer, handle, cell, id, marker_told, touched, _file: file })
    }

    /// Reads what stands at `position` into `buffer`.
    #[inline]
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let Self { handle, cell, id, ref marker_told, ref touched, .. } = *self;
        let file = ViewedFile { handle, cell, id, marker_told, touched };
        // SAFETY: nobody else has the buffer, and memory of ours is not in the arena, which is only read here.
        let outcome = unsafe { self.viewer.read(&file, position, buffer.as_mut_ptr(), buffer.len()) };
        match outcome.end {
            ReadEnd::Full | ReadEnd::EndOfFile(_) => Ok(outcome.bytes),
            end => Err(io::Error::other(format!("the cache's owner gave no bytes at {position}: {end:?}"))),
        }
    }
}

/// All of a file of the owner's, where large pages can be used.
fn map(path: &str, is_written: bool) -> io::Result<Mapped> {
    let file = OpenOptions::new().read(true).write(is_written).open(path)?;
    let bytes = file.metadata()?.len();
    let protection = if is_written { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    let room = bytes as usize + HUGE_BYTES;
    // SAFETY: the kernel chooses an address that is free.
    let reserved = unsafe { mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), MapFlags::PRIVATE)? };
    let start = reserved.wrapping_byte_add(reserved.cast::<u8>().align_offset(HUGE_BYTES));
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: so much from there lies in what was just reserved, and nobody was given its address.
    let base = unsafe { mmap(start, bytes as usize, protection, flags, &file, 0)? };
    Ok(Mapped { base: NonNull::new(base.cast()).expect("nothing is mapped at 0"), bytes })
}
