//! Memory: bytes lent to Python, and bytes written into its buffers.
//!
//! A [`Pin`] lends its bytes by the buffer protocol. Each view counts as a reference to the `Pin`, so the bytes stay
//! pinned until the last view, and whatever was made of it, is gone.
//!
//! A buffer is one range of addresses, and pinned bytes may lie in several pieces of the cache's memory. Short ones are
//! copied. Of long ones the pieces are mapped a second time, in order:
//!
//! ```text
//!   the cache's memory    [ ... 0-2 MiB ... | other files | 2-4 MiB ... ]     mapped once, shared by all processes
//!   the view              [ 0-2 MiB | 2-4 MiB ]                               the same frames, by mremap(2)
//! ```
//!
//! Invariants:
//!  1. What is lent does not move or change while a view of it exists, and is read-only.
//!  2. A forked child is lent nothing anew. A view that it has from its parent must not be read there: the memory is
//!     not mapped in the child. The guide says so to users.
//!  3. A second mapping ends before the pin that it shows, and only in the process that made it: in a forked child
//!     other memory may be at its addresses.
#![allow(unsafe_code, reason = "the buffer protocol is pointers")]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::{PyErr, ffi};
use quinion::Pinned;
use quinion_service::PinnedBytes;
use rustix::mm::{
    MapFlags, MprotectFlags, MremapFlags, ProtFlags, mmap_anonymous, mprotect, mremap_fixed, munmap,
};

/// A range of an object or file, as a read-only buffer.
#[pyclass(frozen, module = "quinion")]
pub(crate) struct Pin(Held);

/// What comes in fewer pieces' worth of bytes is copied: a system call for each piece would cost as much.
const MAPPED_PIECE_MIN: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;
/// Large pages begin at multiples of this.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Where the bytes of a pin are.
pub(crate) enum Held {
    /// In a server's memory, which this process maps.
    Served(PinnedBytes),
    /// In this process's cache: the second is the process's number.
    Cached(Pinned, u32),
    /// In pieces of either; the mapping ends first.
    Mapped(Mapping, #[allow(dead_code, reason = "it keeps the bytes where they are")] Pieces),
    Copied(Box<[u8]>),
}

/// What keeps pieces where they are.
pub(crate) enum Pieces {
    Served(#[allow(dead_code, reason = "held for its end")] PinnedBytes),
    Cached(#[allow(dead_code, reason = "held for its end")] Pinned),
}

/// Pieces of pinned memory, mapped once more so that they lie together.
pub(crate) struct Mapping {
    /// What was reserved, which is longer.
    base: *mut c_void,
    reserved: usize,
    first: *const u8,
    len: usize,
    process: u32,
}

// SAFETY: the mapping is read-only, and of memory that no thread changes (invariant 1).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: the range is this value's own, and nothing looks at it any more.
            let _ = unsafe { munmap(self.base, self.reserved) };
        }
    }
}

impl Mapping {
    /// Maps pieces that the caller keeps pinned as long as the mapping. `None`: they are too short for it, or the
    /// kernel does not map them a second time.
    fn of<'p>(chunks: impl Iterator<Item = &'p [u8]>) -> Option<Self> {
        let mut pieces: Vec<(*const u8, usize)> = Vec::new();
        for chunk in chunks {
            match pieces.last_mut() {
                Some((first, len)) if std::ptr::eq(first.wrapping_add(*len), chunk.as_ptr()) => {
                    *len += chunk.len()
                }
                _ => pieces.push((chunk.as_ptr(), chunk.len())),
            }
        }
        let len: usize = pieces.iter().map(|(_, len)| len).sum();
        let (&(first, _), inner) = pieces.split_first()?;
        // All but the ends are whole pages: the bytes of a file lie in its pages.
        let are_pages = inner.iter().all(|(first, _)| first.addr() % PAGE_BYTES == 0);
        let ends = pieces.iter().rev().skip(1).all(|(first, len)| (first.addr() + len) % PAGE_BYTES == 0);
        if len / pieces.len() < MAPPED_PIECE_MIN || !are_pages || !ends {
            return None;
        }
        let inside = first.addr() % PAGE_BYTES;
        let reserved = (inside + len).next_multiple_of(PAGE_BYTES) + LARGE_PAGE_BYTES;
        // SAFETY: fresh address space, of the kernel's choice.
        let base =
            unsafe { mmap_anonymous(null_mut(), reserved, ProtFlags::empty(), MapFlags::PRIVATE) }.ok()?;
        // The same place in a large page as most bytes have, so that these can be mapped as such.
        let (mut before, mut most, mut phase) = (0, 0, first.addr());
        for &(piece, len) in &pieces {
            if len > most {
                (most, phase) = (len, piece.addr().wrapping_sub(before));
            }
            before += len;
        }
        let place = phase.wrapping_sub(inside).wrapping_sub(base.addr()) % LARGE_PAGE_BYTES;
        let first = base.wrapping_byte_add(place + inside).cast::<u8>().cast_const();
        let made = Self { base, reserved, first, len, process: std::process::id() };
        let mut to = base.wrapping_byte_add(place);
        for &(piece, len) in &pieces {
            let from = piece.wrapping_sub(piece.addr() % PAGE_BYTES).cast_mut().cast::<c_void>();
            let bytes = (piece.addr() % PAGE_BYTES + len).next_multiple_of(PAGE_BYTES);
            // SAFETY: of a length of 0, `mremap` leaves what is mapped at `from` and maps it at `to` as well, which is
            // part of what was reserved above. Then that is made read-only, as it is lent.
            unsafe {
                mremap_fixed(from, 0, bytes, MremapFlags::MAYMOVE, to).ok()?;
                mprotect(to, bytes, MprotectFlags::READ).ok()?;
            }
            to = to.wrapping_byte_add(bytes);
        }
        Some(made)
    }

    fn slice(&self) -> Option<&[u8]> {
        // SAFETY: mapped above as long as `self` lives, of bytes that are pinned meanwhile (invariants 1 and 3).
        let bytes = || unsafe { std::slice::from_raw_parts(self.first, self.len) };
        (self.process == std::process::id()).then(bytes)
    }
}

impl Held {
    /// Bytes that lie together, or can be made to, are lent; others are copied and given back.
    pub(crate) fn of_server(bytes: PinnedBytes) -> Self {
        if bytes.as_slice().is_some() {
            return Held::Served(bytes);
        }
        match Mapping::of(bytes.chunks()) {
            Some(mapping) => Held::Mapped(mapping, Pieces::Served(bytes)),
            None => Held::Copied(bytes.to_vec().into()),
        }
    }

    /// The same of a pin of this process.
    pub(crate) fn of_cache(bytes: Pinned) -> Self {
        if bytes.as_slice().is_some() {
            return Held::Cached(bytes, std::process::id());
        }
        match Mapping::of(bytes.chunks()) {
            Some(mapping) => Held::Mapped(mapping, Pieces::Cached(bytes)),
            None => Held::Copied(bytes.to_vec().into()),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Held::Served(bytes) => bytes.len(),
            Held::Cached(bytes, _) => bytes.len(),
            Held::Mapped(mapping, _) => mapping.len,
            Held::Copied(bytes) => bytes.len(),
        }
    }

    /// `None`: they are the parent's.
    fn slice(&self) -> Option<&[u8]> {
        match self {
            Held::Served(bytes) => bytes.as_slice(),
            Held::Cached(bytes, process) if *process == std::process::id() => bytes.as_slice(),
            Held::Cached(..) => None,
            Held::Mapped(mapping, _) => mapping.slice(),
            Held::Copied(bytes) => Some(bytes),
        }
    }
}

impl From<Held> for Pin {
    fn from(held: Held) -> Self {
        Self(held)
    }
}

#[pymethods]
impl Pin {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// Whether the bytes were copied: a server's of local files, and short ones that lie in several pieces.
    #[getter]
    fn is_copied(&self) -> bool {
        match &self.0 {
            Held::Served(bytes) => bytes.is_copied(),
            Held::Cached(..) | Held::Mapped(..) => false,
            Held::Copied(_) => true,
        }
    }

    fn __repr__(&self) -> String {
        let how = if self.is_copied() { "copied" } else { "pinned" };
        format!("<quinion.Pin: {} bytes, {how}>", self.__len__())
    }

    /// # Safety
    /// Python calls this with a view that it may fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill"));
        }
        // SAFETY: Python lends the view for this call. It has no owner if this fails.
        unsafe { (*view).obj = std::ptr::null_mut() };
        let Some(bytes) = slf.get().0.slice() else {
            let text = "these bytes were pinned by the parent of this process; pin them again here";
            return Err(PyBufferError::new_err(text));
        };
        let first = bytes.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: the bytes stay where they are as long as this `Pin` lives (head of this file); the view takes a
        // reference to it, and is read-only, so nothing is written through the pointer.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), first, bytes.len() as ffi::Py_ssize_t, 1, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Has `fill` write into a buffer of Python's, which is not moved or freed meanwhile.
pub(crate) fn with_buffer<R>(
    buffer: &Bound<'_, PyAny>,
    fill: impl FnOnce(&mut [u8]) -> PyResult<R>,
) -> PyResult<R> {
    let buffer = PyBuffer::<u8>::get(buffer)?;
    if buffer.readonly() || !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the buffer must be writable and lie together in memory"));
    }
    if buffer.len_bytes() == 0 {
        return fill(&mut []);
    }
    // SAFETY: the buffer is writable, contiguous and as long as it says, and Python neither moves nor frees it while
    // `buffer` lives. A thread of the caller's that writes to it meanwhile has a race of its own, as with every
    // `readinto`: it changes which bytes the caller sees, and nothing else, as we do not read them.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) };
    fill(bytes)
}
