//! File: a client and what it has open, as the Python half of the package uses them.
//!
//! Whatever may wait lets the GIL go. Long reads go on in pieces, and between two of them Python runs its signal
//! handlers: so Ctrl-C ends a long read. A piece itself is waited for, up to the client's deadline.
//!
//! Nothing here survives a fork; the Python half connects and opens again.

use std::time::UNIX_EPOCH;

use pyo3::exceptions::{PyEOFError, PyMemoryError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quinion_service::{Client, ClientFile, RangeRead};

use crate::error::python;
use crate::memory::{Pin, with_buffer};

/// As much is read before signals are looked at.
const PIECE_BYTES: usize = 4 << 20;
/// As much is asked of a local file, whatever the kernel says of its size: of files in /proc it says 0.
const LOCAL_BYTES_MIN: u64 = 64 << 10;

/// A connection to a server's cache, of this very process.
#[pyclass(frozen, module = "quinion._quinion")]
pub(crate) struct RawClient(Client);

#[pymethods]
impl RawClient {
    #[new]
    fn new(py: Python<'_>, name: &str) -> PyResult<Self> {
        py.detach(|| Client::connect(name)).map(Self).map_err(python)
    }

    fn open(&self, py: Python<'_>, url: &str) -> PyResult<RawFile> {
        let file = py.detach(|| self.0.open(url)).map_err(python)?;
        let source = match url.split_once("://") {
            Some(("file", _)) | None => Source::Local,
            Some(_) => Source::Object,
        };
        Ok(RawFile { file, source })
    }

    fn owner_is_dead(&self) -> PyResult<bool> {
        self.0.owner_is_dead().map_err(python)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Of a size and a version that do not change.
    Object,
    Local,
}

/// An object or file that is open, in this very process.
#[pyclass(frozen, module = "quinion._quinion")]
pub(crate) struct RawFile {
    file: ClientFile,
    source: Source,
}

impl RawFile {
    /// How many of `len` bytes at `offset` are worth memory.
    fn clamp(&self, offset: u64, len: u64) -> usize {
        let left = self.file.len().saturating_sub(offset);
        let left = if self.source == Source::Local { left.max(LOCAL_BYTES_MIN) } else { left };
        left.min(len).min(isize::MAX as u64) as usize
    }

    fn read(&self, py: Python<'_>, buffer: &mut [u8], offset: u64) -> PyResult<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let end = (done + PIECE_BYTES).min(buffer.len());
            let piece = &mut buffer[done..end];
            let read = py.detach(|| self.file.read_at(piece, offset + done as u64)).map_err(python)?;
            done += read;
            if done < end {
                break;
            }
            py.check_signals()?;
        }
        Ok(done)
    }
}

#[pymethods]
impl RawFile {
    #[getter]
    fn size(&self) -> u64 {
        self.file.len()
    }
    #[getter]
    fn etag(&self) -> Option<&str> {
        self.file.e_tag()
    }
    #[getter]
    fn version(&self) -> Option<&str> {
        self.file.version()
    }
    /// When the object was put, in nanoseconds since 1970, if its store told that.
    #[getter]
    fn modified_ns(&self) -> Option<u128> {
        let since = self.file.modified()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
        (since > 0).then_some(since)
    }
    #[getter]
    fn is_object(&self) -> bool {
        self.source == Source::Object
    }

    fn read_at<'py>(&self, py: Python<'py>, offset: u64, length: u64) -> PyResult<Bound<'py, PyBytes>> {
        let (len, mut read) = (self.clamp(offset, length), 0);
        let bytes = PyBytes::new_with(py, len, |buffer| {
            read = self.read(py, buffer, offset)?;
            Ok(())
        })?;
        Ok(if read == len { bytes } else { PyBytes::new(py, &bytes.as_bytes()[..read]) })
    }

    fn read_into(&self, py: Python<'_>, offset: u64, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        with_buffer(buffer, |buffer| self.read(py, buffer, offset))
    }

    fn read_ranges<'py>(
        &self,
        py: Python<'py>,
        ranges: Vec<(u64, u64)>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let mut buffers =
            ranges.iter().map(|&(offset, len)| self.buffer(offset, len)).collect::<PyResult<Vec<_>>>()?;
        let buffers_of = ranges.iter().zip(&mut buffers);
        let mut reads: Vec<_> =
            buffers_of.map(|(&(offset, _), buffer)| RangeRead { offset, buffer }).collect();
        py.detach(|| self.file.read_ranges(&mut reads)).map_err(python)?;
        py.check_signals()?;
        Ok(buffers.iter().map(|buffer| PyBytes::new(py, buffer)).collect())
    }

    fn pin(&self, py: Python<'_>, offset: u64, length: u64) -> PyResult<Pin> {
        let range = offset..offset.saturating_add(length);
        let pinned = py.detach(|| self.file.pin(range).map(Pin::new)).map_err(python)?;
        py.check_signals()?;
        Ok(pinned)
    }
}

impl RawFile {
    /// Room for a range that lies within.
    fn buffer(&self, offset: u64, len: u64) -> PyResult<Vec<u8>> {
        let (name, size) = (self.file.name(), self.file.len());
        if offset.checked_add(len).is_none_or(|end| end > size) {
            let text = format!("cannot read {len} bytes at {offset} of {name}: it has {size} bytes");
            return Err(PyEOFError::new_err(text));
        }
        let mut buffer = Vec::new();
        let no_memory = |_| PyMemoryError::new_err(format!("no memory for {len} bytes of {name}"));
        buffer.try_reserve_exact(len as usize).map_err(no_memory)?;
        buffer.resize(len as usize, 0);
        Ok(buffer)
    }
}
