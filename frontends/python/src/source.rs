//! Source: bytes that Python's files read, wherever they are cached.
//!
//! | source | cached by | misses wait for | what is ready waits for |
//! |---|---|---|---|
//! | [`ServedObject`] | a server | the store | nothing; a pin for the server |
//! | [`ServedFile`] | a server, or the kernel | the disk | the disk |
//! | [`CachedObject`] | this process | the store | nothing |
//! | [`CachedFile`] | this process | the disk | nothing |
//! | [`KernelFile`] | the kernel: of devices, and of what it makes anew at each read | the disk | the disk |
//!
//! What is ready is tried first; the rest is for a thread that may wait. An event loop, which may not wait for a disk
//! either, tries only what waits for nothing ([`Readiness`]).
//!
//! Invariant: `read` returns 0 only at the end.

use std::fs::File as StdFile;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use quinion::backend::Identity;
use quinion::{BatchRead, ErrorKind, File, PageState, ReadOptions};
use quinion_object::ObjectFile;
use quinion_service::{ClientFile, RangeRead};

use crate::error::{Failure, Result};
use crate::memory::Held;

/// Whether a source may change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// An object: its size and version do not change, and reads of it may wait.
    Object,
    Local,
}

/// Whether what is ready can be had without waiting for anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Readiness {
    pub(crate) reads: bool,
    pub(crate) pins: bool,
}

/// The identity of an object's version.
#[derive(Clone, Debug, Default)]
pub(crate) struct Version {
    pub(crate) e_tag: Option<String>,
    pub(crate) version: Option<String>,
    pub(crate) modified: Option<SystemTime>,
}

impl Version {
    /// When it was put, in nanoseconds since 1970, if its store told that.
    pub(crate) fn modified_ns(&self) -> Option<u128> {
        let since = self.modified?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
        (since > 0).then_some(since)
    }
}

pub(crate) trait Source: Send + Sync + 'static {
    fn kind(&self) -> Kind;
    fn name(&self) -> &str;
    fn size(&self) -> u64;
    fn version(&self) -> Version;
    /// The identity of a file that another process may open again.
    fn identity(&self) -> Option<Identity> {
        None
    }
    fn readiness(&self) -> Readiness;
    /// Announces reads of a range, in pieces.
    fn announce(&self, _range: Range<u64>) {}
    /// Copies what is there without waiting, from the beginning of the buffer on; returns how much.
    fn read_ready(&self, buffer: &mut [u8], offset: u64) -> Result<usize>;
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize>;
    /// The bytes of `ranges`, which lie within the source.
    fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>>;
    /// `None`: it would have to be waited for.
    fn pin_ready(&self, range: Range<u64>) -> Result<Option<Held>>;
    fn pin(&self, range: Range<u64>) -> Result<Held>;
    /// Which bytes of a range are cached, as far as can be told without waiting.
    fn residents(&self, range: Range<u64>) -> Result<Vec<Range<u64>>>;
    /// Starts to fetch what is not.
    fn prefetch(&self, range: Range<u64>) -> Result<()>;
}

/// Fills the buffer, but for what is behind the end.
pub(crate) fn read_fully(source: &dyn Source, buffer: &mut [u8], offset: u64) -> Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match source.read(&mut buffer[done..], offset + done as u64)? {
            0 => break,
            bytes => done += bytes,
        }
    }
    Ok(done)
}

/// Allocates memory; fails if there is not enough.
pub(crate) fn allocate(len: u64, name: &str) -> Result<Vec<u8>> {
    let no_memory = || {
        Failure::no_memory(format!(
            "no memory for {len} bytes of {name}; ask for less, or give this process more"
        ))
    };
    let len = usize::try_from(len).map_err(|_| no_memory())?;
    let mut room = Vec::new();
    room.try_reserve_exact(len).map_err(|_| no_memory())?;
    room.resize(len, 0);
    Ok(room)
}

fn read_each(source: &dyn Source, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
    let read = |range: &Range<u64>| {
        let mut buffer = allocate(range.end - range.start, source.name())?;
        let read = read_fully(source, &mut buffer, range.start)?;
        if read < buffer.len() {
            return Err(ends_early(source.name(), range));
        }
        Ok(buffer.into())
    };
    ranges.iter().map(read).collect()
}

fn ends_early(name: &str, range: &Range<u64>) -> Failure {
    let len = range.end - range.start;
    Failure::EndOfFile(format!("cannot read {len} bytes at {} of {name}: it ends before", range.start))
}

/// A copy of the bytes of `range` that exist.
fn copied(source: &dyn Source, range: Range<u64>) -> Result<Held> {
    let len = range.end.min(source.size()).saturating_sub(range.start);
    let mut buffer = allocate(len, source.name())?;
    let read = read_fully(source, &mut buffer, range.start)?;
    buffer.truncate(read);
    Ok(Held::Copied(buffer.into()))
}

fn cached_only() -> ReadOptions {
    ReadOptions::new().cached_only(true)
}

/// An object of a server's.
pub(crate) struct ServedObject(pub(crate) ClientFile);

impl Source for ServedObject {
    fn kind(&self) -> Kind {
        Kind::Object
    }
    fn name(&self) -> &str {
        self.0.name()
    }
    fn size(&self) -> u64 {
        self.0.len()
    }
    fn version(&self) -> Version {
        version_of(&self.0)
    }
    fn readiness(&self) -> Readiness {
        Readiness { reads: true, pins: false }
    }
    fn read_ready(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        Ok(if self.0.read_ready(buffer, offset)? { buffer.len() } else { 0 })
    }
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        Ok(self.0.read_at(buffer, offset)?)
    }
    fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let room_of = |range: &Range<u64>| allocate(range.end - range.start, self.name());
        let mut buffers = ranges.iter().map(room_of).collect::<Result<Vec<_>>>()?;
        let reads = ranges.iter().zip(&mut buffers);
        let mut reads: Vec<_> =
            reads.map(|(range, buffer)| RangeRead { offset: range.start, buffer }).collect();
        self.0.read_ranges(&mut reads)?;
        Ok(buffers.into_iter().map(Bytes::from).collect())
    }
    fn pin_ready(&self, range: Range<u64>) -> Result<Option<Held>> {
        // The server is asked for the pin all the same, but need not wait for the store.
        if self.0.residents(range.clone())? == [range.clone()] { self.pin(range).map(Some) } else { Ok(None) }
    }
    fn pin(&self, range: Range<u64>) -> Result<Held> {
        Ok(Held::of_server(self.0.pin(range)?))
    }
    fn residents(&self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        Ok(self.0.residents(range)?)
    }
    fn prefetch(&self, range: Range<u64>) -> Result<()> {
        Ok(self.0.prefetch(range)?)
    }
}

/// A local file, through a server.
pub(crate) struct ServedFile {
    file: ClientFile,
    identity: Option<Identity>,
}

impl ServedFile {
    /// Wraps `file` and asks for its identity, on a thread that may wait for the disk.
    pub(crate) fn new(file: ClientFile) -> Self {
        Self { identity: file.identity(), file }
    }
}

impl Source for ServedFile {
    fn kind(&self) -> Kind {
        Kind::Local
    }
    fn name(&self) -> &str {
        self.file.name()
    }
    fn size(&self) -> u64 {
        self.file.len()
    }
    fn version(&self) -> Version {
        version_of(&self.file)
    }
    fn identity(&self) -> Option<Identity> {
        self.identity
    }
    fn readiness(&self) -> Readiness {
        Readiness { reads: false, pins: false }
    }
    fn read_ready(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.read(buffer, offset)
    }
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        Ok(self.file.read_at(buffer, offset)?)
    }
    fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        read_each(self, ranges)
    }
    fn pin_ready(&self, range: Range<u64>) -> Result<Option<Held>> {
        self.pin(range).map(Some)
    }
    fn pin(&self, range: Range<u64>) -> Result<Held> {
        Ok(Held::of_server(self.file.pin(range)?))
    }
    fn residents(&self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        Ok(self.file.residents(range)?)
    }
    fn prefetch(&self, range: Range<u64>) -> Result<()> {
        Ok(self.file.prefetch(range)?)
    }
}

fn version_of(file: &ClientFile) -> Version {
    let owned = |text: Option<&str>| text.map(str::to_owned);
    Version { e_tag: owned(file.e_tag()), version: owned(file.version()), modified: file.modified() }
}

/// An object of this process's cache.
pub(crate) struct CachedObject {
    pub(crate) url: String,
    pub(crate) object: ObjectFile,
}

impl CachedObject {
    fn failed(&self, error: quinion::Error) -> Failure {
        self.object.error_of(error).into()
    }
}

impl Source for CachedObject {
    fn kind(&self) -> Kind {
        Kind::Object
    }
    fn name(&self) -> &str {
        &self.url
    }
    fn size(&self) -> u64 {
        self.object.len()
    }
    fn version(&self) -> Version {
        let meta = self.object.meta();
        let modified = Some(SystemTime::from(meta.last_modified));
        Version { e_tag: meta.e_tag.clone(), version: meta.version.clone(), modified }
    }
    fn readiness(&self) -> Readiness {
        Readiness { reads: true, pins: true }
    }
    fn announce(&self, range: Range<u64>) {
        self.object.announce(range);
    }
    fn read_ready(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        match self.object.file().read_at_with(buffer, offset, cached_only()) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            answer => answer.map_err(|error| self.failed(error)),
        }
    }
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.object.file().read_at(buffer, offset).map_err(|error| self.failed(error))
    }
    fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        Ok(self.object.read_ranges(ranges)?)
    }
    fn pin_ready(&self, range: Range<u64>) -> Result<Option<Held>> {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        match self.object.file().pin_with(range.start, len, cached_only()) {
            Ok(pinned) => Ok(Some(Held::of_cache(pinned))),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(self.failed(error)),
        }
    }
    fn pin(&self, range: Range<u64>) -> Result<Held> {
        Ok(Held::of_cache(self.object.pin(range)?))
    }
    fn residents(&self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        residents_of(self.object.file(), range).map_err(|error| self.failed(error))
    }
    fn prefetch(&self, range: Range<u64>) -> Result<()> {
        Ok(self.object.prefetch(range).map(drop)?)
    }
}

/// A local file in this process's cache.
pub(crate) struct CachedFile {
    pub(crate) path: String,
    pub(crate) file: File,
}

impl CachedFile {
    fn failed(&self, error: &quinion::Error) -> Failure {
        Failure::of_cache(&self.path, error)
    }
}

impl Source for CachedFile {
    fn kind(&self) -> Kind {
        Kind::Local
    }
    fn name(&self) -> &str {
        &self.path
    }
    /// The file's size now, by the kernel.
    fn size(&self) -> u64 {
        self.file.metadata().map_or_else(|_| self.file.len(), |data| data.len())
    }
    fn version(&self) -> Version {
        Version { modified: self.file.metadata().ok().map(|data| data.modified()), ..Version::default() }
    }
    fn readiness(&self) -> Readiness {
        Readiness { reads: true, pins: true }
    }
    fn read_ready(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        match self.file.read_at_with(buffer, offset, cached_only()) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            answer => answer.map_err(|error| self.failed(&error)),
        }
    }
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.file.read_at(buffer, offset).map_err(|error| self.failed(&error))
    }
    fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let room_of = |range: &Range<u64>| allocate(range.end - range.start, &self.path);
        let mut buffers = ranges.iter().map(room_of).collect::<Result<Vec<_>>>()?;
        let reads = ranges.iter().zip(&mut buffers);
        let mut reads: Vec<_> = reads.map(|(range, buffer)| BatchRead::new(buffer, range.start)).collect();
        self.file.read_batch(&mut reads);
        let answers: Vec<_> = reads.into_iter().map(BatchRead::into_result).collect();
        for ((range, buffer), answer) in ranges.iter().zip(&mut buffers).zip(answers) {
            let done = answer.map_err(|error| self.failed(&error))?;
            let rest = read_fully(self, &mut buffer[done..], range.start + done as u64)?;
            if done + rest < buffer.len() {
                return Err(ends_early(&self.path, range));
            }
        }
        Ok(buffers.into_iter().map(Bytes::from).collect())
    }
    fn pin_ready(&self, range: Range<u64>) -> Result<Option<Held>> {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        match self.file.pin_with(range.start, len, cached_only()) {
            Ok(pinned) => Ok(Some(Held::of_cache(pinned))),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(self.failed(&error)),
        }
    }
    fn pin(&self, range: Range<u64>) -> Result<Held> {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        self.file.pin(range.start, len).map(Held::of_cache).map_err(|error| self.failed(&error))
    }
    fn residents(&self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        residents_of(&self.file, range).map_err(|error| self.failed(&error))
    }
    fn prefetch(&self, range: Range<u64>) -> Result<()> {
        let len = range.end.saturating_sub(range.start);
        self.file.will_need(range.start, len).map(drop).map_err(|error| self.failed(&error))
    }
}

/// The cached parts of a range of a file of this process's cache.
fn residents_of(file: &File, range: Range<u64>) -> std::result::Result<Vec<Range<u64>>, quinion::Error> {
    let all = file.residents(range.start, range.end.saturating_sub(range.start))?;
    let cached = all.filter(|resident| resident.state == PageState::Cached);
    // Whole pages, of which the range may want parts.
    Ok(cached.map(|part| part.bytes.start.max(range.start)..part.bytes.end.min(range.end)).collect())
}

/// A file that no cache can have.
pub(crate) struct KernelFile {
    pub(crate) path: String,
    pub(crate) file: StdFile,
}

impl Source for KernelFile {
    fn kind(&self) -> Kind {
        Kind::Local
    }
    fn name(&self) -> &str {
        &self.path
    }
    fn size(&self) -> u64 {
        self.file.metadata().map_or(0, |data| data.len())
    }
    fn version(&self) -> Version {
        let modified = self.file.metadata().and_then(|data| data.modified()).ok();
        Version { modified, ..Version::default() }
    }
    fn readiness(&self) -> Readiness {
        Readiness { reads: false, pins: false }
    }
    fn read_ready(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.read(buffer, offset)
    }
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        loop {
            match self.file.read_at(buffer, offset) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                answer => {
                    let text = || format!("cannot read {} at {offset}", self.path);
                    return answer.map_err(|error| Failure::of_kernel(&text(), &error));
                }
            }
        }
    }
    fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        read_each(self, ranges)
    }
    fn pin_ready(&self, range: Range<u64>) -> Result<Option<Held>> {
        self.pin(range).map(Some)
    }
    fn pin(&self, range: Range<u64>) -> Result<Held> {
        copied(self, range)
    }
    fn residents(&self, _range: Range<u64>) -> Result<Vec<Range<u64>>> {
        Ok(Vec::new())
    }
    fn prefetch(&self, _range: Range<u64>) -> Result<()> {
        Ok(())
    }
}
