//! File: an object, or a local file, that a client has open.
//!
//! ```text
//!   read_at   object   is the record valid?  no: the server has ended --> the same at the next server, or by GETs of
//!                                                                         the client's store (`direct.rs`), or error
//!                      what is cached is copied; the rest is asked for, and copied when it is there
//!             file     is the record valid?  no, or something goes wrong on the way ----------> pread
//!   .._async           what is cached is copied at once; the rest is read by a thread of the client's (`threads.rs`)
//! ```
//!
//! The walk and its looks are those of every viewer (`viewer` of `quinion-view`). An object's record says that it
//! never changes; when the server has ended it is read no more, and the object is opened again where another server
//! listens, if it is of the same version (`open_file.rs`).
//!
//! This process keeps a local file's descriptor, so the kernel can read it whatever happens to the server. The server
//! serves it while it has a lease on it.
//!
//! Invariant: a read of an object returns all that was asked for and that the object has, or an error.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::Attributes;
use quinion::backend::Identity;
use quinion::internals::arena::control::{Advice, Counter, Operation, SENT, TO_BE_SENT};
use quinion::internals::arena::{LAYOUT_VERSION, Validation};
use quinion::internals::system_files::identity_of;
use quinion_owner::internals::viewer::handshake::DescriptorOffer;
use quinion_owner::internals::viewer::{self, ReadEnd, RequestError, Viewer};

use crate::connection::{Connection, DEADLINE, RetryDeadline};
use crate::error::{Error, ErrorKind, Result};
use crate::open_file::{ObjectOpening, OpenFile, Reopened, Source, Viewed};
use crate::pin::PinnedBytes;
use crate::ranges::{RangeRead, spans_of};
use crate::stores::ObjectMetadata;

/// How long the server is waited for on the way to a local file, before the kernel reads.
const FILE_MAX: Duration = Duration::from_millis(50);
/// Bytes that a thread reads at a time for an async caller, beside its buffer.
const ASYNC_BYTES: usize = 8 << 20;
/// How often bytes that were made ready may be gone again before they are copied.
const FRUITLESS_MAX: u32 = 16;

/// An object or a local file, open for reading through a server's cache. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ClientFile {
    pub(crate) inner: Arc<OpenFile>,
}

impl ClientFile {
    pub(crate) fn open_object(connection: &Arc<Connection>, opening: ObjectOpening<'_>) -> Result<Self> {
        OpenFile::object(connection, opening).map(|inner| Self { inner })
    }

    pub(crate) fn open_local(connection: &Arc<Connection>, path: &Path) -> Result<Self> {
        let viewer = connection.viewer()?;
        let failed = |error| Error::of_io(ErrorKind::Open, format!("cannot open {}", path.display()), error);
        check_kind(path).map_err(failed)?;
        let file = File::open(path).map_err(failed)?;
        let data = file.metadata().map_err(failed)?;
        let answer = if data.is_file() { attach(connection, viewer, &file, &data) } else { None };
        let inner = OpenFile {
            connection: Arc::clone(connection),
            name: path.to_string_lossy().into(),
            viewed: answer.map(Viewed::of),
            source: Source::Local(file),
            direct: None,
            reopened: Reopened::not_yet(Duration::ZERO),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// At the server that is there now, if the object's has ended.
    #[inline]
    fn with_server<T>(&self, mut read: impl FnMut(&Self) -> Result<T>) -> Result<T> {
        let answer = match self.inner.newest()? {
            Some(inner) => read(&Self { inner }),
            None => read(self),
        };
        match answer {
            Err(error) if error.kind() == ErrorKind::OwnerDead => {
                self.inner.read_elsewhere(error, |inner| read(&Self { inner: Arc::clone(inner) }))
            }
            answer => answer,
        }
    }

    /// The URL or path that it was opened by. Bytes of a path that are not UTF-8 are replaced.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The size in bytes: an object's when it was opened, a file's now, 0 if the kernel does not say.
    pub fn len(&self) -> u64 {
        match &self.inner.source {
            Source::Object(metadata) => metadata.size,
            Source::Local(file) => file.metadata().map_or(0, |data| data.len()),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The object's ETag, if its store told one.
    pub fn e_tag(&self) -> Option<&str> {
        self.metadata().and_then(|metadata| metadata.e_tag.as_deref())
    }

    /// The object's version id, if its store told one.
    pub fn version(&self) -> Option<&str> {
        self.metadata().and_then(|metadata| metadata.version.as_deref())
    }

    /// When the object was put, or the file written last.
    pub fn modified(&self) -> Option<SystemTime> {
        match &self.inner.source {
            Source::Object(metadata) => SystemTime::UNIX_EPOCH.checked_add(metadata.modified),
            Source::Local(file) => file.metadata().and_then(|data| data.modified()).ok(),
        }
    }

    /// The identity of a local file, to tell it from another one that its path may lead to by now, also from one that
    /// has its inode number since it was deleted. `None` of an object, or if the kernel does not say. Asks the kernel,
    /// and may wait for a file system that hangs.
    pub fn identity(&self) -> Option<Identity> {
        match &self.inner.source {
            Source::Object(_) => None,
            Source::Local(file) => identity_of(file).ok(),
        }
    }

    /// Whether the server serves it. The kernel reads a local file without a lease, or whose server has ended. Of an
    /// object whose server has ended: whether it was opened at another since.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn is_served(&self) -> Result<bool> {
        self.with_server(|file| Ok(file.valid()?.is_some()))
    }

    /// Where the server has it, if that is valid.
    fn valid(&self) -> Result<Option<(&Viewer, &Viewed)>> {
        let viewer = self.inner.connection.viewer()?;
        Ok(self
            .inner
            .viewed
            .as_ref()
            .filter(|viewed| is_valid(viewer, viewed))
            .map(|viewed| (viewer, viewed)))
    }

    pub(crate) fn attributes(&self) -> Attributes {
        self.metadata().map(|metadata| metadata.attributes.clone()).unwrap_or_default()
    }

    pub(crate) fn ahead_max(&self) -> u64 {
        self.metadata().map_or(0, |metadata| metadata.ahead)
    }

    /// Whether both are one object of one version, as far as the store tells.
    pub(crate) fn is_same_object(&self, other: &Self) -> bool {
        match (self.metadata(), other.metadata()) {
            (Some(own), Some(other)) => own.version_attributes() == other.version_attributes(),
            _ => false,
        }
    }

    /// `None` of a local file.
    pub(crate) fn metadata(&self) -> Option<&ObjectMetadata> {
        match &self.inner.source {
            Source::Object(metadata) => Some(metadata),
            Source::Local(_) => None,
        }
    }

    /// Reads up to `buffer.len()` bytes at byte `offset`, and returns how many: fewer only at the end. Cached bytes
    /// are copied without a system call.
    ///
    /// # Errors
    /// [`ErrorKind::Changed`], [`ErrorKind::Fetch`], [`ErrorKind::OwnerDead`], [`ErrorKind::TimedOut`],
    /// [`ErrorKind::Full`], [`ErrorKind::Forked`]. The buffer may have been written to.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.with_server(|file| file.read_here(buffer, offset))
    }

    #[inline]
    fn read_here(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let viewer = self.inner.connection.viewer()?;
        match (&self.inner.source, &self.inner.viewed) {
            (Source::Object(metadata), Some(viewed)) => {
                let len = metadata.size.saturating_sub(offset).min(buffer.len() as u64) as usize;
                self.read_object(ServedFile { viewer, viewed }, &mut buffer[..len], offset)
            }
            (Source::Local(file), viewed) => {
                let viewed = viewed.as_ref().filter(|viewed| is_valid(viewer, viewed));
                let served = viewed.map(|viewed| ServedFile { viewer, viewed });
                let done = served.map_or(0, |served| served.read(&self.inner.connection, buffer, offset));
                Ok(done + self.read_by_kernel(file, &mut buffer[done..], offset + done as u64)?)
            }
            (Source::Object(metadata), None) => {
                let len = metadata.size.saturating_sub(offset).min(buffer.len() as u64) as usize;
                self.read_direct(&mut [RangeRead { offset, buffer: &mut buffer[..len] }])?;
                Ok(len)
            }
        }
    }

    /// From the client's own store. The ranges lie within the object.
    fn read_direct(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        let direct = self.inner.direct.as_ref().ok_or_else(|| Error::owner_dead(self.name()))?;
        direct.read(self.inner.connection.threads()?, self.name(), ranges)
    }

    /// Fills the buffer from byte `offset` on.
    ///
    /// # Errors
    /// [`ErrorKind::EndOfFile`]; and those of [`ClientFile::read_at`].
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.with_server(|file| file.read_exact_here(buffer, offset))
    }

    #[inline]
    fn read_exact_here(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let read = self.read_here(buffer, offset)?;
        self.check_whole(read, buffer.len(), offset)
    }

    #[inline]
    fn check_whole(&self, read: usize, len: usize, offset: u64) -> Result<()> {
        if read == len {
            return Ok(());
        }
        let text = format!(
            "cannot read {len} bytes at {offset} of {}: it ends after {read} of them; ask for fewer, or use read_at",
            self.name()
        );
        Err(Error::new(ErrorKind::EndOfFile, text))
    }

    /// Fills all buffers. Missing ranges are asked for together, so that their fetches are under way side by side.
    ///
    /// # Errors
    /// As [`ClientFile::read_exact_at`], of the first range that failed; buffers may have been written to.
    pub fn read_ranges(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        self.with_server(|file| file.read_ranges_here(ranges))
    }

    fn read_ranges_here(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        let viewer = self.inner.connection.viewer()?;
        if let (Source::Object(metadata), None) = (&self.inner.source, &self.inner.viewed) {
            let is_inside = |range: &RangeRead<'_>| {
                let end = range.offset.checked_add(range.buffer.len() as u64);
                end.is_some_and(|end| end <= metadata.size)
            };
            if ranges.iter().all(is_inside) {
                return self.read_direct(ranges); // else the range that is not tells so
            }
        }
        let viewed = self.inner.viewed.as_ref().filter(|viewed| is_valid(viewer, viewed));
        let mut missing = Vec::new();
        for (place, range) in ranges.iter_mut().enumerate() {
            let read = viewed.and_then(|v| viewer.read_ready_into(&v.file(), range.offset, range.buffer));
            match read {
                Some(read) if read.bytes == range.buffer.len() => note(viewer, read.bytes, 0),
                _ => missing.push(place),
            }
        }
        if let (Some(viewed), [_, _, ..]) = (viewed, &missing[..]) {
            // Each is told before the first is waited for; a hint that waits for no answer may be forgotten.
            for span in spans_of(missing.iter().map(|&place| &ranges[place])) {
                viewer.advise(&viewed.file(), Advice::WillNeed, span.start, span.end - span.start);
            }
        }
        missing.into_iter().try_for_each(|place| {
            let RangeRead { offset, buffer } = &mut ranges[place];
            self.read_exact_here(buffer, *offset)
        })
    }

    /// The bytes of `range`, or as many as there are. An object's are not copied: the server keeps them in place as
    /// long as this value lives, or this process does. Those of a local file, which may change, are copied; and so are
    /// those of an object that is read without a server, or, rarely, whose place in the cache could not be found.
    ///
    /// # Errors
    /// [`ErrorKind::Full`]: this process has pinned as much as it may; and those of [`ClientFile::read_at`].
    pub fn pin(&self, range: Range<u64>) -> Result<PinnedBytes> {
        self.with_server(|file| file.pin_here(range.clone()))
    }

    fn pin_here(&self, range: Range<u64>) -> Result<PinnedBytes> {
        let viewer = self.inner.connection.viewer()?;
        let len = range.end.min(self.len()).saturating_sub(range.start);
        let viewed = match (&self.inner.source, &self.inner.viewed) {
            (Source::Object(_), Some(viewed)) if len > 0 => viewed,
            _ => return self.copied(range.start, len),
        };
        if !is_valid(viewer, viewed) {
            return Err(Error::owner_dead(self.name()));
        }
        let arguments = [viewed.handle, range.start, len];
        let answer = self.inner.connection.ask(Operation::Pin, arguments, DEADLINE);
        let [pin, bytes] = answer.map_err(|error| Error::of_request(self.name(), error))?;
        let pinned = PinnedBytes::new(&self.inner, [viewed.handle, pin, 0]);
        let is_whole = bytes == len;
        match pinned.locate(viewer, &viewed.file(), range.start..range.start + len).filter(|_| is_whole) {
            Some(pinned) => Ok(pinned),
            // The index changed beside each look.
            None => self.copied(range.start, len),
        }
    }

    /// As [`ClientFile::read_at`], without blocking. Needs no particular runtime. Cached bytes are copied by the first
    /// poll; for others a thread of the client's waits, of which there are 64 for all clients of a server. Dropping the
    /// future does not end the thread's read, whose bytes go to the server's cache.
    ///
    /// # Errors
    /// As [`ClientFile::read_at`]; and [`ErrorKind::Start`]: the system gives no threads.
    pub async fn read_at_async(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let len = match &self.inner.source {
            Source::Object(metadata) => {
                metadata.size.saturating_sub(offset).min(buffer.len() as u64) as usize
            }
            Source::Local(_) => buffer.len(),
        };
        let buffer = &mut buffer[..len];
        if buffer.is_empty() || self.read_ready(buffer, offset)? {
            return Ok(len);
        }
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(ASYNC_BYTES);
            let at = offset.saturating_add(done as u64);
            let file = self.clone();
            let read = move || {
                let mut bytes = vec![0; piece];
                let read = file.read_at(&mut bytes, at)?;
                bytes.truncate(read);
                Ok(bytes)
            };
            let bytes = self.inner.connection.threads()?.run(read).await?;
            buffer[done..done + bytes.len()].copy_from_slice(&bytes);
            done += bytes.len();
            if bytes.len() < piece {
                break;
            }
        }
        Ok(done)
    }

    /// As [`ClientFile::read_exact_at`], without blocking: see [`ClientFile::read_at_async`].
    ///
    /// # Errors
    /// As [`ClientFile::read_exact_at`]; and [`ErrorKind::Start`].
    pub async fn read_exact_at_async(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let read = self.read_at_async(buffer, offset).await?;
        self.check_whole(read, buffer.len(), offset)
    }

    /// As [`ClientFile::read_ranges`], without blocking: see [`ClientFile::read_at_async`]. The ranges that are not
    /// cached take as much memory again while they are read.
    ///
    /// # Errors
    /// As [`ClientFile::read_ranges`]; and [`ErrorKind::Start`].
    pub async fn read_ranges_async(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        let mut missing = Vec::new();
        for range in ranges {
            if !self.read_ready(range.buffer, range.offset)? {
                missing.push(range);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let file = self.clone();
        let asked: Vec<_> = missing.iter().map(|range| (range.offset, range.buffer.len())).collect();
        let read = move || {
            let mut all: Vec<_> = asked.iter().map(|&(_, len)| vec![0; len]).collect();
            let reads = asked.iter().zip(&mut all);
            let mut reads: Vec<_> =
                reads.map(|(&(offset, _), buffer)| RangeRead { offset, buffer }).collect();
            file.read_ranges(&mut reads)?;
            Ok(all)
        };
        let all = self.inner.connection.threads()?.run(read).await?;
        missing.into_iter().zip(all).for_each(|(range, bytes)| range.buffer.copy_from_slice(&bytes));
        Ok(())
    }

    /// As [`ClientFile::pin`], without blocking: a thread of the client's waits for the server, also for cached bytes.
    ///
    /// # Errors
    /// As [`ClientFile::pin`]; and [`ErrorKind::Start`].
    pub async fn pin_async(&self, range: Range<u64>) -> Result<PinnedBytes> {
        let file = self.clone();
        self.inner.connection.threads()?.run(move || file.pin(range)).await
    }

    /// Fills the buffer from byte `offset` on, if all of that is cached; no system call is made, and no server asked.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn read_ready(&self, buffer: &mut [u8], offset: u64) -> Result<bool> {
        let file = self.newest()?;
        let Some((viewer, viewed)) = file.valid()? else { return Ok(false) };
        let read = viewer.read_ready_into(&viewed.file(), offset, buffer);
        let is_whole = read.is_some_and(|read| read.bytes == buffer.len());
        if is_whole {
            note(viewer, buffer.len(), 0);
        }
        Ok(is_whole)
    }

    /// Asks for the part of a range that is not cached, and waits for nothing. If no fetch can be started (many
    /// requests of this process are open), the read fetches. Of a local file it is the server's readahead.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn prefetch(&self, range: Range<u64>) -> Result<()> {
        if let Some((viewer, viewed)) = self.newest()?.valid()? {
            let len = range.end.saturating_sub(range.start);
            viewer.suggest(&viewed.file(), Advice::WillNeed, range.start, len);
        }
        Ok(())
    }

    /// Which bytes of a range are cached, without a request to the server, or a note of the look. The ranges rise, and
    /// no two of them touch. A hint: cached bytes may be evicted, and others fetched, meanwhile. Nothing of a file that
    /// no server serves.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn residents(&self, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        let (file, mut found) = (self.newest()?, Vec::<Range<u64>>::new());
        let Some((viewer, viewed)) = file.valid()? else { return Ok(found) };
        let range = range.start..range.end.min(file.len());
        viewer.resident(&viewed.file(), range, |part| match found.last_mut() {
            Some(last) if last.end == part.start => last.end = part.end,
            _ => found.push(part),
        });
        Ok(found)
    }

    /// The newest handle that a reconnect has made of this object. No server is asked.
    fn newest(&self) -> Result<Self> {
        Ok(self.inner.newest()?.map_or_else(|| self.clone(), |inner| Self { inner }))
    }

    fn copied(&self, offset: u64, len: u64) -> Result<PinnedBytes> {
        let mut bytes = Vec::new();
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        bytes.try_reserve_exact(len).map_err(|_| {
            let text = format!("cannot copy {len} bytes of {}", self.name());
            Error::of_io(ErrorKind::Other, text, std::io::ErrorKind::OutOfMemory.into())
                .with_hint("read or pin fewer bytes at a time")
        })?;
        bytes.resize(len, 0);
        let read = self.read_here(&mut bytes, offset)?;
        bytes.truncate(read);
        Ok(PinnedBytes::copied(&self.inner, bytes))
    }

    /// `buffer` lies within the object.
    #[inline]
    fn read_object(&self, served: ServedFile<'_>, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let ServedFile { viewer, viewed } = served;
        if !is_valid(viewer, viewed) {
            return Err(Error::owner_dead(self.name()));
        }
        let found = viewer.read_ready_into(&viewed.file(), offset, buffer);
        if found.is_some_and(|found| found.bytes == buffer.len()) {
            note(viewer, buffer.len(), 0);
            return Ok(buffer.len());
        }
        self.read_asking(served, buffer, offset)
    }

    #[cold]
    fn read_asking(&self, served: ServedFile<'_>, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let ServedFile { viewer, viewed } = served;
        let (file, mut done, mut asked, mut fruitless) = (viewed.file(), 0, 0, 0);
        let mut retry = RetryDeadline::new(DEADLINE);
        while done < buffer.len() {
            let arguments = [viewed.handle, offset + done as u64, (buffer.len() - done) as u64];
            let answer = self.inner.connection.ask(Operation::Fill, arguments, DEADLINE);
            answer.map_err(|error| Error::of_request(self.name(), error))?;
            asked += 1;
            if !is_valid(viewer, viewed) {
                return Err(Error::owner_dead(self.name()));
            }
            let found = viewer.read_ready_into(&file, offset + done as u64, &mut buffer[done..]);
            match found.map(|found| (found.bytes, found.end)) {
                Some((bytes, ReadEnd::Full)) => (done, fruitless) = (done + bytes, 0),
                Some(_) => {
                    let text =
                        format!("cannot read {}: the server has another file in its place", self.name());
                    return Err(Error::new(ErrorKind::Other, text));
                }
                None if fruitless == FRUITLESS_MAX && !retry.pause() => {
                    return Err(Error::of_request(self.name(), RequestError::Fruitless));
                }
                None => fruitless = (fruitless + 1).min(FRUITLESS_MAX),
            }
        }
        note(viewer, done, asked);
        Ok(done)
    }

    fn read_by_kernel(&self, file: &File, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(bytes) => done += bytes,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let text = format!("cannot read {} at {}", self.name(), offset + done as u64);
                    return Err(Error::of_io(ErrorKind::Other, text, error)
                        .with_hint("see the kernel's log, and read again"));
                }
            }
        }
        Ok(done)
    }
}

/// A file that the server has open, and by what its pages are viewed.
#[derive(Clone, Copy)]
struct ServedFile<'f> {
    viewer: &'f Viewer,
    viewed: &'f Viewed,
}

impl ServedFile<'_> {
    /// Copies what the server has of a local file, and asks for the rest; how much was copied.
    fn read(self, connection: &Connection, buffer: &mut [u8], offset: u64) -> usize {
        let ServedFile { viewer, viewed } = self;
        let (file, mut done, mut asked) = (viewed.file(), 0, 0);
        while done < buffer.len() && asked <= FRUITLESS_MAX {
            let at = offset + done as u64;
            match viewer.read_ready_into(&file, at, &mut buffer[done..]) {
                Some(found) if found.end == ReadEnd::Full => done += found.bytes,
                Some(found) => {
                    done += if matches!(found.end, ReadEnd::EndOfFile(_)) { found.bytes } else { 0 };
                    break;
                }
                None => {}
            }
            if done < buffer.len() {
                asked += 1;
                let arguments = [viewed.handle, offset + done as u64, (buffer.len() - done) as u64];
                if connection.ask(Operation::Fill, arguments, FILE_MAX).is_err() {
                    break;
                }
            }
        }
        note(viewer, done, asked);
        done
    }
}

#[inline]
pub(crate) fn is_valid(viewer: &Viewer, viewed: &Viewed) -> bool {
    matches!(viewer.validation(&viewed.file()), Validation::Leased | Validation::Immutable)
}

pub(crate) fn note(viewer: &Viewer, bytes: usize, asked: u32) {
    viewer.count(Counter::Reads, 1);
    viewer.count(Counter::Bytes, bytes as u64);
    if asked > 0 {
        viewer.count(Counter::Asked, 1);
        viewer.count(Counter::Misses, asked.into());
    }
}

/// Refuses what no read can be made of: the open of a pipe would wait for a writer, and a pipe has no positions.
fn check_kind(path: &Path) -> io::Result<()> {
    let kind = std::fs::metadata(path)?.file_type();
    if kind.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if kind.is_fifo() {
        return Err(io::Error::from_raw_os_error(libc::ESPIPE));
    }
    Ok(())
}

/// `None` if the kernel reads the file.
fn attach(
    connection: &Connection,
    viewer: &Viewer,
    file: &File,
    data: &std::fs::Metadata,
) -> Option<[u64; 2]> {
    let (device, inode) = (data.dev(), data.ino());
    let arguments = [file.as_raw_fd() as u64, device, inode];
    let answer = match viewer.request_long(Operation::Attach, arguments) {
        Err(RequestError::Errno(TO_BE_SENT)) => {
            let offer = DescriptorOffer { version: LAYOUT_VERSION, token: viewer.token() };
            let ticket = viewer::send_descriptor(connection.socket(), &offer, file.as_fd()).ok()?;
            viewer.request_long(Operation::Attach, [u64::from(ticket) | SENT, device, inode])
        }
        answer => answer,
    };
    viewer.count(Counter::Files, 1);
    answer.ok().filter(|[handle, _]| *handle != 0)
}
