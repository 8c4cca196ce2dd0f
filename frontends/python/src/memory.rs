//! Memory: bytes lent to Python, and bytes written into its buffers.
//!
//! A [`Pin`] lends its bytes by the buffer protocol. Each view counts as a reference to the `Pin`, so the bytes stay
//! pinned until the last view, and every object made of it, is gone.
//!
//! A buffer is one range of addresses, and pinned bytes may lie in several pieces of the cache's memory. Long pieces
//! are mapped a second time, side by side ([`Pinned::mapped`]); short ones are copied, and not pinned any more.
//!
//! Invariants:
//!  1. Lent bytes do not move or change while a view of them exists, and are read-only.
//!  2. A forked child is lent nothing anew. A view that it has from its parent must not be read there: the memory is
//!     not mapped in the child. The guide says so to users.
#![allow(unsafe_code, reason = "the buffer protocol is pointers")]

use std::ffi::{c_int, c_void};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::{PyErr, ffi};
use quinion::Pinned;
use quinion_service::PinnedBytes;

use crate::wait::Detached;

/// A range of an object or file, as a read-only buffer. Its end gives back what a server has pinned, or the last of a
/// cache.
#[pyclass(frozen, module = "quinion")]
pub(crate) struct Pin(Detached<Held>);

/// Where the bytes of a pin are.
pub(crate) enum Held {
    /// In a server's memory, which this process maps.
    Served(PinnedBytes),
    /// In this process's cache: the second is the process's number.
    Cached(Pinned, u32),
    Copied(Box<[u8]>),
}

impl Held {
    /// Contiguous or mappable bytes are lent; others are copied and unpinned.
    pub(crate) fn of_server(bytes: PinnedBytes) -> Self {
        match bytes.mapped() {
            Some(_) => Held::Served(bytes),
            None => Held::Copied(bytes.to_vec().into()),
        }
    }

    /// Like `of_server`, for a pin of this process's cache.
    pub(crate) fn of_cache(bytes: Pinned) -> Self {
        match bytes.mapped() {
            Some(_) => Held::Cached(bytes, std::process::id()),
            None => Held::Copied(bytes.to_vec().into()),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Held::Served(bytes) => bytes.len(),
            Held::Cached(bytes, _) => bytes.len(),
            Held::Copied(bytes) => bytes.len(),
        }
    }

    /// `None`: they are the parent's.
    fn slice(&self) -> Option<&[u8]> {
        match self {
            Held::Served(bytes) => bytes.mapped(),
            Held::Cached(bytes, process) if *process == std::process::id() => bytes.mapped(),
            Held::Cached(..) => None,
            Held::Copied(bytes) => Some(bytes),
        }
    }
}

impl From<Held> for Pin {
    fn from(held: Held) -> Self {
        Self(held.into())
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
        match &*self.0 {
            Held::Served(bytes) => bytes.is_copied(),
            Held::Cached(..) => false,
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
    // `readinto`: it changes which bytes the caller sees, and nothing else, since they are not read here.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) };
    fill(bytes)
}
