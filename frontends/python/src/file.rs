//! File: a client and what it or a cache has open, as the Python half of the package uses them.
//!
//! Whatever may wait releases the GIL. A read is copied at once if all of it is cached; else it goes on in pieces, and
//! Ctrl-C ends it, between two pieces and within one ([`interruptible`]).
//!
//! Nothing here survives a fork; the Python half connects and opens again, or says that it cannot.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use quinion::backend::Identity;
use quinion_service::{Client, Freshness, ServerTotals};

use crate::error::{Failure, Result};
use crate::memory::{Pin, with_buffer};
use crate::source::{Kind, ServedFile, ServedObject, Source, allocate, read_fully};
use crate::target::Target;
use crate::wait::{Detached, interruptible, is_main_thread};
use crate::waiter::{Answer, RawWaiter};

/// Bytes that are read between two checks of signals.
const PIECE_BYTES: usize = 4 << 20;
/// Bytes requested from a local file at least, whatever size the kernel gives: of files in /proc it says 0.
const LOCAL_BYTES_MIN: u64 = 64 << 10;

/// Reads by files of one cache or client.
#[derive(Default)]
pub(crate) struct ReadCounters {
    pub(crate) reads: AtomicU64,
    /// Reads that waited for nothing.
    pub(crate) hits: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

impl ReadCounters {
    fn count(&self, hits: u64, bytes: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.hits.fetch_add(hits, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Parses Python's text for a freshness; `None`: the store's own.
pub(crate) fn freshness_of(text: Option<&str>) -> Result<Option<Freshness>> {
    text.map(|text| text.parse().map_err(Failure::invalid)).transpose()
}

/// A server's numbers by their names.
pub(crate) fn dict_of(py: Python<'_>, totals: ServerTotals) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    totals.entries().try_for_each(|(name, value)| dict.set_item(name, value))?;
    Ok(dict)
}

/// A connection to a server's cache, of this very process.
#[pyclass(frozen, module = "quinion._quinion")]
pub(crate) struct RawClient(Detached<Client>);

impl RawClient {
    /// A job that opens `url`, on any thread.
    fn opening(
        &self,
        target: Target,
        freshness: Option<String>,
    ) -> impl FnOnce() -> Result<OpenedFile> + Send + 'static {
        let client = Client::clone(&self.0);
        move || {
            let client = match freshness_of(freshness.as_deref())? {
                Some(freshness) => client.with_freshness(freshness),
                None => client,
            };
            let opened = match &target {
                Target::Url(url) => client.open(url),
                Target::Path(_) => client.open_path(target.path()),
            };
            let file = opened.map_err(|error| Failure::from(error).of_open(&target))?;
            let source: Arc<dyn Source> = match target {
                Target::Url(_) => Arc::new(ServedObject(file)),
                Target::Path(_) => Arc::new(ServedFile::new(file)),
            };
            Ok(OpenedFile { source, counters: Arc::default() })
        }
    }
}

#[pymethods]
impl RawClient {
    #[new]
    fn new(py: Python<'_>, name: &str) -> PyResult<Self> {
        let client = py.detach(|| Client::connect(name)).map_err(Failure::from)?;
        Ok(Self(client.into()))
    }

    fn open(&self, py: Python<'_>, target: Target, freshness: Option<String>) -> PyResult<RawFile> {
        interruptible(py, self.opening(target, freshness)).map(RawFile::from)
    }

    fn start_open(
        &self,
        waiter: &RawWaiter,
        number: u64,
        target: Target,
        freshness: Option<String>,
    ) -> PyResult<()> {
        let opening = self.opening(target, freshness);
        waiter.start(number, move || opening().map(OpenedFile::into_answer))
    }

    /// The server's numbers, which are waited for so many seconds at most.
    fn stats<'py>(&self, py: Python<'py>, seconds: f64) -> PyResult<Bound<'py, PyDict>> {
        let timeout =
            Duration::try_from_secs_f64(seconds).map_err(|error| Failure::invalid(error.to_string()))?;
        let client = Client::clone(&self.0);
        dict_of(py, interruptible(py, move || Ok(client.server_totals(timeout)?))?)
    }

    // A server that has ended may have a successor, which is connected to.
    fn owner_is_dead(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| self.0.owner_is_dead()).map_err(Failure::from)?)
    }
}

/// An object or file that a job opened, on any thread.
pub(crate) struct OpenedFile {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) counters: Arc<ReadCounters>,
}

impl OpenedFile {
    /// The answer of that job.
    pub(crate) fn into_answer(self) -> Answer {
        Answer::Object(Box::new(move |py| Ok(Py::new(py, RawFile::from(self))?.into_any())))
    }
}

/// An object or file that is open, in this very process.
#[pyclass(frozen, module = "quinion._quinion")]
pub(crate) struct RawFile {
    /// The source of the bytes; its end closes a file, or gives a handle back.
    source: Detached<Arc<dyn Source>>,
    counters: Arc<ReadCounters>,
}

impl From<OpenedFile> for RawFile {
    fn from(opened: OpenedFile) -> Self {
        Self { source: opened.source.into(), counters: opened.counters }
    }
}

impl RawFile {
    /// How many of `len` bytes at `offset` are worth memory.
    fn clamp(&self, py: Python<'_>, offset: u64, len: u64) -> usize {
        if self.source.kind() == Kind::Local && len <= LOCAL_BYTES_MIN {
            return len as usize; // the kernel need not be asked for the size
        }
        let left = self.size(py).saturating_sub(offset);
        let left = if self.source.kind() == Kind::Local { left.max(LOCAL_BYTES_MIN) } else { left };
        left.min(len).min(isize::MAX as u64) as usize
    }

    /// Copies what is there without waiting; `announce` was called before.
    fn read_ready(&self, py: Python<'_>, buffer: &mut [u8], offset: u64) -> PyResult<usize> {
        let range = offset..offset.saturating_add(buffer.len() as u64);
        let read = py.detach(|| {
            self.source.announce(range);
            self.source.read_ready(buffer, offset)
        });
        Ok(read?)
    }

    fn read(&self, py: Python<'_>, buffer: &mut [u8], offset: u64) -> PyResult<usize> {
        let len = self.clamp(py, offset, buffer.len() as u64);
        let buffer = &mut buffer[..len];
        let mut done = self.read_ready(py, buffer, offset)?;
        let is_hit = done == buffer.len();
        while done < buffer.len() {
            let end = (done + PIECE_BYTES).min(buffer.len());
            let read = self.read_piece(py, &mut buffer[done..end], offset + done as u64)?;
            done += read;
            if done < end {
                break;
            }
            py.check_signals()?;
        }
        self.counters.count(is_hit.into(), done);
        Ok(done)
    }

    /// Fills the buffer, but for what is behind the end.
    fn read_piece(&self, py: Python<'_>, buffer: &mut [u8], offset: u64) -> PyResult<usize> {
        if self.source.kind() == Kind::Local || !is_main_thread(py)? {
            return Ok(py.detach(|| read_fully(&**self.source, buffer, offset))?);
        }
        let bytes = interruptible(py, self.reading(offset, buffer.len()))?;
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    /// A job that reads into its own memory, on any thread.
    fn reading(&self, offset: u64, len: usize) -> impl FnOnce() -> Result<Vec<u8>> + Send + 'static {
        let source = Arc::clone(&self.source);
        move || {
            let mut bytes = allocate(len as u64, source.name())?;
            let read = read_fully(&*source, &mut bytes, offset)?;
            bytes.truncate(read);
            Ok(bytes)
        }
    }

    /// Checks that the ranges lie within the file.
    fn check(&self, py: Python<'_>, ranges: &[(u64, u64)]) -> Result<Vec<Range<u64>>> {
        let (name, size) = (self.source.name(), self.size(py));
        let check = |&(offset, len): &(u64, u64)| match offset.checked_add(len) {
            Some(end) if end <= size => Ok(offset..end),
            _ => {
                let text = format!("cannot read {len} bytes at {offset} of {name}: it has {size} bytes");
                Err(Failure::EndOfFile(text))
            }
        };
        ranges.iter().map(check).collect()
    }

    /// The bytes of those `ranges` that can be read without waiting.
    fn ready_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Option<Bytes>>> {
        let read = |range: &Range<u64>| {
            let mut bytes = allocate(range.end - range.start, self.source.name())?;
            let read = self.source.read_ready(&mut bytes, range.start)?;
            Ok((read == bytes.len()).then(|| bytes.into()))
        };
        ranges.iter().map(read).collect()
    }

    /// The range of a pin, as far as the file goes.
    fn pin_range(&self, offset: u64, length: u64) -> Range<u64> {
        let end = offset.saturating_add(length);
        let end = if self.source.kind() == Kind::Object { end.min(self.source.size()) } else { end };
        offset.min(end)..end
    }
}

/// All of `ranges`: those that were there, and the others in their order.
fn merged(ready: Vec<Option<Bytes>>, others: Vec<Bytes>) -> Vec<Bytes> {
    let mut others = others.into_iter();
    ready.into_iter().filter_map(|bytes| bytes.or_else(|| others.next())).collect()
}

/// The `ranges` that were not there.
fn missing(ranges: &[Range<u64>], ready: &[Option<Bytes>]) -> Vec<Range<u64>> {
    ranges.iter().zip(ready).filter(|(_, bytes)| bytes.is_none()).map(|(range, _)| range.clone()).collect()
}

#[pymethods]
impl RawFile {
    // A local file's are the file system's to tell, which may be slow, or wait for a thread of this interpreter.
    #[getter]
    fn size(&self, py: Python<'_>) -> u64 {
        match self.source.kind() {
            Kind::Object => self.source.size(),
            Kind::Local => py.detach(|| self.source.size()),
        }
    }
    #[getter]
    fn etag(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| self.source.version()).e_tag
    }
    #[getter]
    fn version(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| self.source.version()).version
    }
    #[getter]
    fn modified_ns(&self, py: Python<'_>) -> Option<u128> {
        py.detach(|| self.source.version()).modified_ns()
    }
    /// Identity of a local file: device and inode number, and when it was born, 0 where that is unknown.
    #[getter]
    fn identity(&self) -> Option<(u64, u64, i64)> {
        self.source.identity().map(|Identity { device, inode, born }| (device, inode, born))
    }
    #[getter]
    fn is_object(&self) -> bool {
        self.source.kind() == Kind::Object
    }

    fn read_at<'py>(&self, py: Python<'py>, offset: u64, length: u64) -> PyResult<Bound<'py, PyBytes>> {
        let (len, mut read) = (self.clamp(py, offset, length), 0);
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
        let ranges = self.check(py, &ranges)?;
        let ready = py.detach(|| self.ready_ranges(&ranges))?;
        let missing = missing(&ranges, &ready);
        let is_hit = missing.is_empty();
        let source = Arc::clone(&self.source);
        let others =
            if is_hit { Vec::new() } else { interruptible(py, move || source.read_ranges(&missing))? };
        let all = merged(ready, others);
        self.counters.count(is_hit.into(), all.iter().map(Bytes::len).sum());
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    fn pin(&self, py: Python<'_>, offset: u64, length: u64) -> PyResult<Pin> {
        let range = self.pin_range(offset, length);
        let ready = py.detach(|| self.source.pin_ready(range.clone()))?;
        let (is_hit, source) = (ready.is_some(), Arc::clone(&self.source));
        let held = match ready {
            Some(held) => held,
            None => interruptible(py, move || source.pin(range))?,
        };
        self.counters.count(is_hit.into(), held.len());
        Ok(held.into())
    }

    /// The parts of a range that are cached, as offset and length.
    fn residents(&self, py: Python<'_>, offset: u64, length: u64) -> PyResult<Vec<(u64, u64)>> {
        let range = offset..offset.saturating_add(length);
        let found = py.detach(|| self.source.residents(range))?;
        Ok(found.into_iter().map(|part| (part.start, part.end - part.start)).collect())
    }

    fn prefetch(&self, py: Python<'_>, offset: u64, length: u64) -> PyResult<()> {
        Ok(py.detach(|| self.source.prefetch(offset..offset.saturating_add(length)))?)
    }

    /// The bytes, if they are there; else `None`, and the waiter gets an answer with the number in `asked`.
    fn start_read<'py>(
        &self,
        py: Python<'py>,
        asked: (Bound<'_, RawWaiter>, u64),
        range: (u64, u64),
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let ((waiter, number), (offset, length)) = (asked, range);
        let (len, mut ready) = (self.clamp(py, offset, length), 0);
        let bytes = PyBytes::new_with(py, len, |buffer| {
            if self.source.readiness().reads {
                ready = self.read_ready(py, buffer, offset)?;
            }
            Ok(())
        })?;
        let is_hit = ready == len;
        self.counters.count(is_hit.into(), len);
        if !is_hit {
            let reading = self.reading(offset, len);
            waiter.get().start(number, move || reading().map(Answer::Bytes))?;
        }
        Ok(is_hit.then_some(bytes))
    }

    /// As `start_read`, for several ranges.
    fn start_ranges<'py>(
        &self,
        py: Python<'py>,
        asked: (Bound<'_, RawWaiter>, u64),
        ranges: Vec<(u64, u64)>,
    ) -> PyResult<Option<Vec<Bound<'py, PyBytes>>>> {
        let (waiter, number) = asked;
        let ranges = self.check(py, &ranges)?;
        let ready = py.detach(|| self.ready_ranges(&ranges))?;
        let missing = missing(&ranges, &ready);
        let is_hit = missing.is_empty();
        self.counters
            .count(is_hit.into(), ranges.iter().map(|range| (range.end - range.start) as usize).sum());
        if is_hit {
            return Ok(Some(ready.iter().flatten().map(|bytes| PyBytes::new(py, bytes)).collect()));
        }
        let source = Arc::clone(&self.source);
        let read = move || Ok(Answer::Ranges(merged(ready, source.read_ranges(&missing)?)));
        waiter.get().start(number, read)?;
        Ok(None)
    }

    /// As `start_read`, for a pin of a range.
    fn start_pin(
        &self,
        py: Python<'_>,
        asked: (Bound<'_, RawWaiter>, u64),
        range: (u64, u64),
    ) -> PyResult<Option<Pin>> {
        let ((waiter, number), (offset, length)) = (asked, range);
        let range = self.pin_range(offset, length);
        let ready = match self.source.readiness().pins {
            true => py.detach(|| self.source.pin_ready(range.clone()))?,
            false => None,
        };
        self.counters.count(ready.is_some().into(), (range.end - range.start) as usize);
        if ready.is_none() {
            let source = Arc::clone(&self.source);
            waiter.get().start(number, move || source.pin(range).map(Answer::Pin))?;
        }
        Ok(ready.map(Pin::from))
    }
}
