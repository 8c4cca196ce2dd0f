//! Layout: where each part of an arena lies, as numbers that can be checked.
//!
//! A viewer need not be built from the same source: it checks the header's numbers once against each other and against
//! the size of its mapping.
//!
//! Invariants: the tables follow the header in the order of [`Layout`]'s fields, do not overlap, and end where the
//! first extent of data begins.

use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::units::{EXTENT_PAGES, EXTENT_SIZE, PAGE_SIZE};

/// The first eight bytes of an arena.
pub const MAGIC: u64 = u64::from_le_bytes(*b"QUINION\0");
/// The version of everything in this file, in `view.rs` and of a descriptor's word; a viewer of another version is
/// refused. 2: the pages of a folio may be written in place, so an older reader would read torn pages. 3: a table of
/// pages under write-back. 4: a viewer's page names its run; the control file says when files are asked for, which are
/// attached, and how patching ended; a record says how far it is trusted. 5: the control file counts opens. 6: it says
/// until when leases are trusted. 7: each viewer's page is a memory file of its own, and the rest is read-only. 9: a
/// viewer's page is as large as its content. 10: names that an owner opens may say how fresh the object is to be. 11: a
/// viewer's page counts calls of `execve`.
pub const LAYOUT_VERSION: u32 = 11;

/// Where the tables of an arena lie. All offsets are in bytes from the arena's first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Layout {
    /// Frames the arena can ever have, the header's and the tables' included; a multiple of an extent.
    pub frames_max: u32,
    /// Frames taken by the header and the tables; a multiple of an extent.
    pub frames_meta: u32,
    /// The descriptors, 32 bytes a frame.
    pub descriptors: u64,
    /// The referenced bytes, one a frame.
    pub referenced: u64,
    /// The write sequences, 4 bytes a frame; see `written.rs`.
    pub write_sequences: u64,
    /// The up-to-date bits, one a frame.
    pub uptodate: u64,
    /// The dirty bits, one a frame; see `dirty.rs`, as for the next.
    pub dirty: u64,
    /// The write-back bits, one a frame.
    pub writeback: u64,
}

/// Why an arena cannot be viewed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LayoutError {
    /// The magic number is missing: this is not an arena.
    NotAnArena,
    /// The arena has another layout version (theirs).
    Version(u32),
    /// The numbers in the header contradict each other or the size of the mapping.
    Inconsistent,
}

impl Layout {
    /// The layout of an arena that can grow to `bytes` bytes, rounded down to whole extents. `None` if not even the
    /// tables and one extent of data would fit, or at more frames than an index slot can number (4 TiB).
    pub fn new(bytes: u64) -> Option<Self> {
        let frames = bytes / EXTENT_SIZE as u64 * u64::from(EXTENT_PAGES);
        if frames > 1 << 30 {
            return None;
        }
        let table = |offset: u64, bytes: u64| (offset, (offset + bytes).next_multiple_of(64));
        let (descriptors, end) = table(PAGE_SIZE as u64, frames * 32);
        let (referenced, end) = table(end, frames);
        let (write_sequences, end) = table(end, frames * 4);
        let (uptodate, end) = table(end, frames / 8);
        let (dirty, end) = table(end, frames / 8);
        let (writeback, end) = table(end, frames / 8);
        let meta = end.div_ceil(EXTENT_SIZE as u64) * u64::from(EXTENT_PAGES);
        (meta < frames).then_some(Self {
            frames_max: frames as u32,
            frames_meta: meta as u32,
            descriptors,
            referenced,
            write_sequences,
            uptodate,
            dirty,
            writeback,
        })
    }

    /// Where the entries of `frames` lie in each table, in bytes. `frames` begins and ends with whole extents.
    #[inline]
    pub fn entries(&self, frames: &Range<u32>) -> [Range<u64>; 6] {
        let (first, end) = (u64::from(frames.start), u64::from(frames.end));
        let of = |table: u64, bits: u64| table + first * bits / 8..table + end * bits / 8;
        [
            of(self.descriptors, 32 * 8),
            of(self.referenced, 8),
            of(self.write_sequences, 4 * 8),
            of(self.uptodate, 1),
            of(self.dirty, 1),
            of(self.writeback, 1),
        ]
    }

    /// Bytes of address space the arena reserves.
    #[inline]
    pub fn bytes_max(&self) -> u64 {
        u64::from(self.frames_max) * PAGE_SIZE as u64
    }
}

/// The first page of an arena.
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    /// [`MAGIC`], stored last when the arena is built.
    pub magic: AtomicU64,
    /// [`LAYOUT_VERSION`].
    pub version: AtomicU32,
    /// Features a viewer must know; 0 in this version. A viewer refuses bits it does not know.
    pub features: AtomicU32,
    /// Drawn at random when the arena is built; a viewer that was sent here knows it.
    pub token: AtomicU64,
    /// The owner's process.
    pub owner: AtomicU32,
    /// Unused.
    pub spare: AtomicU32,
    /// The layout as numbers, in the order of [`Layout`]'s fields.
    pub layout: [AtomicU64; 8],
    /// Unused: keeps the words that every hit reads away from the beginning of the page. The processor takes a load for
    /// a reader of an earlier store at the same place in its page, and small copies go to page-aligned buffers.
    pub apart: [AtomicU64; HEADER_APART],
    /// Frames that exist: a number at or above it must not be followed. It only rises: punched frames keep their
    /// numbers, and have odd descriptors.
    pub frames_grown: AtomicU32,
    /// The number of a thread of the owner's while it answers viewers; [`OWNER_ENDED`] when it has ended, in whatever
    /// way: records are not trusted from then on. 0 before.
    pub owner_lives: AtomicU32,
}

/// The bit that says so, which the kernel sets for a process that could not (`FUTEX_OWNER_DIED`).
pub const OWNER_ENDED: u32 = 1 << 30;

/// Words between a header's beginning and those that every hit reads: `frames_grown` lies at byte 3072.
const HEADER_APART: usize = (192 - 96) / 8;
const _: () = assert!(core::mem::offset_of!(Header, frames_grown) == 192);

impl Header {
    /// Writes a header; the magic number last.
    pub fn publish(&self, layout: &Layout, token: u64, owner: u32) {
        let numbers = [
            u64::from(layout.frames_max),
            u64::from(layout.frames_meta),
            layout.descriptors,
            layout.referenced,
            layout.write_sequences,
            layout.uptodate,
            layout.dirty,
            layout.writeback,
        ];
        for (place, number) in self.layout.iter().zip(numbers) {
            place.store(number, Ordering::Relaxed);
        }
        self.version.store(LAYOUT_VERSION, Ordering::Relaxed);
        self.features.store(0, Ordering::Relaxed);
        self.token.store(token, Ordering::Relaxed);
        self.owner.store(owner, Ordering::Relaxed);
        self.frames_grown.store(layout.frames_meta, Ordering::Relaxed);
        // Release, partner: the Acquire in `read`: a thread that sees the magic sees all the rest.
        self.magic.store(MAGIC, Ordering::Release);
    }

    /// Reads and checks a header that another process wrote, of an arena mapped with `mapped` bytes.
    pub fn read(&self, mapped: u64) -> Result<Layout, LayoutError> {
        // Acquire, partner: the Release in `publish`.
        if self.magic.load(Ordering::Acquire) != MAGIC {
            return Err(LayoutError::NotAnArena);
        }
        let version = self.version.load(Ordering::Relaxed);
        if version != LAYOUT_VERSION || self.features.load(Ordering::Relaxed) != 0 {
            return Err(LayoutError::Version(version));
        }
        // The layout follows from its size alone, so the header is trusted only where it agrees.
        let frames = self.layout[0].load(Ordering::Relaxed);
        let bytes = frames.checked_mul(PAGE_SIZE as u64).ok_or(LayoutError::Inconsistent)?;
        let layout = Layout::new(bytes).ok_or(LayoutError::Inconsistent)?;
        let numbers = [
            u64::from(layout.frames_max),
            u64::from(layout.frames_meta),
            layout.descriptors,
            layout.referenced,
            layout.write_sequences,
            layout.uptodate,
            layout.dirty,
            layout.writeback,
        ];
        let agrees =
            self.layout.iter().zip(numbers).all(|(place, number)| place.load(Ordering::Relaxed) == number);
        if agrees && layout.bytes_max() <= mapped { Ok(layout) } else { Err(LayoutError::Inconsistent) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        // SAFETY: every field is an atomic number, for which zero is a value.
        #[allow(unsafe_code)]
        unsafe {
            std::mem::zeroed()
        }
    }

    #[test]
    fn tables_do_not_overlap_and_fit_before_the_data() {
        for mib in [4u64, 6, 16, 64, 256, 1000, 1 << 20] {
            let l = Layout::new(mib << 20).unwrap();
            let frames = u64::from(l.frames_max);
            let ends = [
                (l.descriptors, frames * 32),
                (l.referenced, frames),
                (l.write_sequences, frames * 4),
                (l.uptodate, frames / 8),
                (l.dirty, frames / 8),
                (l.writeback, frames / 8),
            ];
            let mut end = PAGE_SIZE as u64;
            for (offset, bytes) in ends {
                assert!(offset >= end && offset % 64 == 0);
                end = offset + bytes;
            }
            assert!(end <= u64::from(l.frames_meta) * PAGE_SIZE as u64);
            assert_eq!(l.frames_meta % EXTENT_PAGES, 0);
        }
    }

    #[test]
    fn too_small_and_too_large_are_refused() {
        assert_eq!(Layout::new(2 << 20), None);
        assert_eq!(Layout::new((4 << 40) + (2 << 20)), None);
        assert!(Layout::new(4 << 40).is_some());
    }

    #[test]
    fn a_header_is_believed_only_when_all_of_it_agrees() {
        let layout = Layout::new(64 << 20).unwrap();
        let h = header();
        assert_eq!(h.read(64 << 20), Err(LayoutError::NotAnArena));
        h.publish(&layout, 1, 2);
        assert_eq!(h.read(64 << 20), Ok(layout));
        assert_eq!(h.read(62 << 20), Err(LayoutError::Inconsistent), "mapped too little of it");
        for field in 0..8 {
            let h = header();
            h.publish(&layout, 1, 2);
            h.layout[field].fetch_add(64, Ordering::Relaxed);
            assert!(h.read(64 << 20).is_err(), "field {field} was not checked");
        }
        let h = header();
        h.publish(&layout, 1, 2);
        h.version.store(99, Ordering::Relaxed);
        assert_eq!(h.read(64 << 20), Err(LayoutError::Version(99)));
    }
}
