//! Layers: a snapshot in several files: a base, and diffs that each hold the pages that changed since the one below.
//!
//! ```text
//!   diff 2     . . 2 2 . . . .      data wins over what lies below, holes show it
//!   diff 1     . 1 1 . . 1 . .
//!   base       0 0 0 0 0 0 0 0
//!              ---------------
//!   stretches  0 1 2 2 0 1 0 0      sorted; each begins where the one before it ends
//! ```
//!
//! A diff is a sparse file of the base's size, as Firecracker writes it. Which parts of it are data the file system
//! tells (`SEEK_DATA`), once, when the snapshot is opened. All files are checked for changes whenever bytes are
//! supplied (`snapshot.rs`), so a change during that look or after it is found before a VM has a byte of it.
//!
//! **Zeros that are data, and holes.** A page that a VM filled with zeros is data; a page that it did not write is a
//! hole. Where it can be seen that this difference may be lost, the diff is refused: a file without any hole (its file
//! system may not tell of holes, or a copy has filled them); a file system that reports blocks of more than a page, so
//! that zeros around a page count as data; data that does not begin and end with pages. A copy that made holes of whole
//! pages of zeros (`cp --sparse=always`, `rsync -S`, `fallocate -d`) cannot be seen: such a VM reads what lies below
//! (docs/vms.md).
//!
//! **Reading.** As the cache reads files: past the kernel's page cache, unless that holds half of a layer's part or
//! more. Stretches of one layer that lie close together are one read.
//!
//! Invariants:
//!  1. Stretches cover the snapshot, in order, and two in a row are of different layers.
//!  2. A read returns all bytes that were asked for up to the end, or an error: a layer that is cut meanwhile is none.
//!
//! Not an invariant: that a diff belongs to this base. Both have the same size, and nothing else tells.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use quinion::backend::{Attributes, BlockingSource, Identity, ReadAt, ThreadPool, Version, WaitQueue};
use quinion::error::{Error, Result};
use quinion::internals::hooks::{cannot_open, invalid_input};
use quinion::internals::sys::io::kernel_holds;
use quinion::internals::units::PAGE_SIZE;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::{Assembled, FileIdentity, SnapshotVersion, copy_held, file_version, is_packed, open_if, settled};

const PAGE: u64 = PAGE_SIZE as u64;
/// The base and its diffs, at most: each is looked at whenever a VM is answered.
pub(super) const LAYERS_MAX: usize = 64;
/// The longest gap between two stretches of a layer that is read with them.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Reads of layers under way at a time.
const THREADS_MAX: usize = 16;
/// Reads that wait for these.
const QUEUE_MAX: usize = 256;

static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

/// A snapshot in layers, as a backend of the cache.
pub(super) type LayersBackend = BlockingSource<Layers>;

#[derive(Debug)]
pub(super) struct Layers {
    files: Vec<LayerFile>,
    extents: Vec<LayerExtent>,
    bytes: u64,
    number: u64,
}

/// From `start` up to the next stretch, the bytes are those of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct LayerExtent {
    start: u64,
    layer: u32,
}

/// A part of a read that one layer has.
#[derive(Clone, PartialEq, Eq, Debug)]
struct LayerPart {
    layer: u32,
    range: Range<u64>,
}

#[derive(Debug)]
pub(super) struct LayerFile {
    path: PathBuf,
    file: fs::File,
    opened: SnapshotVersion,
    /// The file, read past the kernel's page cache; `None` where that is not possible, or the kernel holds it.
    direct: Option<fs::File>,
    direct_works: AtomicBool,
    is_held: AtomicBool,
}

/// Opens the base and the diffs above it, each above those before.
pub(super) fn open(paths: &[PathBuf]) -> Result<Arc<LayersBackend>> {
    let layers = Layers::open(paths)?;
    let pool = ThreadPool::new(Arc::new(WaitQueue::new()), THREADS_MAX, QUEUE_MAX);
    Ok(Arc::new(BlockingSource::new(layers, Arc::new(pool))))
}

fn refused(path: &Path, why: &str) -> Error {
    invalid_input(format!("{}: {why}", path.display()))
}

impl Layers {
    pub(super) fn open(paths: &[PathBuf]) -> Result<Self> {
        if paths.len() > LAYERS_MAX {
            let text =
                format!("{} layers, and at most {LAYERS_MAX} are served; merge some diffs", paths.len());
            return Err(invalid_input(text));
        }
        let mut files: Vec<LayerFile> = Vec::with_capacity(paths.len());
        for path in paths {
            let file = LayerFile::open(path)?;
            if is_packed(&file.file).map_err(|source| cannot_open(path, source))? {
                let why = "this layer is a pack, and diffs lie above flat files; make one pack of the base and its \
                           diffs (quinion pack)";
                return Err(refused(path, why));
            }
            if files.iter().any(|other| other.is_same_file(&file)) {
                return Err(refused(path, "this file is named twice among the layers; name each once"));
            }
            files.push(file);
        }
        let Some(base) = files.first() else {
            return Err(invalid_input("no snapshot is named; name the file with the VM's memory"));
        };
        let bytes = base.opened.bytes();
        let mut extents = vec![LayerExtent { start: 0, layer: 0 }];
        for (layer, file) in (1..).zip(&files[1..]) {
            extents = overlaid(&extents, &file.diff_data(bytes)?, layer, bytes);
        }
        let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut layers = Self { files, extents, bytes, number };
        layers.choose_ways();
        match layers.changed() {
            Some(path) => {
                Err(refused(path, "the file was changed while it was opened; open it when it is complete"))
            }
            None => Ok(layers),
        }
    }

    /// Layers that the kernel's page cache holds are read from there, and the others past it.
    fn choose_ways(&mut self) {
        let mut shown = vec![0; self.files.len()];
        for part in self.parts(0..self.bytes) {
            shown[part.layer as usize] += part.range.end - part.range.start;
        }
        for (file, shown) in self.files.iter_mut().zip(shown) {
            file.choose_way(self.bytes, shown);
        }
    }

    /// Where bytes of diffs are seen, in order.
    pub(super) fn diff_parts(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.parts(0..self.bytes).filter(|part| part.layer > 0).map(|part| part.range)
    }

    /// The snapshot's size.
    #[cfg(feature = "pack")]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A file that is not what it was when it was opened.
    pub(super) fn changed(&self) -> Option<&Path> {
        self.files.iter().find(|file| file.has_changed()).map(LayerFile::path)
    }

    fn parts(&self, range: Range<u64>) -> impl Iterator<Item = LayerPart> + '_ {
        let first = self.extents.partition_point(|stretch| stretch.start <= range.start) - 1;
        let nexts = self.extents[first + 1..].iter().map(|next| next.start).chain([self.bytes]);
        self.extents[first..].iter().zip(nexts).map_while(move |(stretch, next)| {
            let part = stretch.start.max(range.start)..next.min(range.end);
            (!part.is_empty()).then_some(LayerPart { layer: stretch.layer, range: part })
        })
    }

    fn clamped(&self, len: usize, position: u64) -> Range<u64> {
        let position = position.min(self.bytes);
        position..position + (len as u64).min(self.bytes - position)
    }

    /// As `copy_held` of one file: all of it from the kernel's page cache, or `false`.
    fn copy_held(&self, into: &mut [u8], offset: u64) -> bool {
        let range = self.clamped(into.len(), offset);
        range.end - range.start == into.len() as u64
            && self.parts(range).all(|LayerPart { layer, range }| {
                let inside = (range.start - offset) as usize..(range.end - offset) as usize;
                let file = &self.files[layer as usize];
                copy_held(&file.file, &file.is_held, &mut into[inside], range.start)
            })
    }
}

/// `below` with a layer above it that has data in `data`, which is sorted.
fn overlaid(below: &[LayerExtent], data: &[Range<u64>], layer: u32, bytes: u64) -> Vec<LayerExtent> {
    let mut above: Vec<LayerExtent> = Vec::with_capacity(below.len() + 2 * data.len());
    let mut push = |start, layer| {
        if above.last().is_none_or(|last| last.layer != layer) {
            above.push(LayerExtent { start, layer });
        }
    };
    let (mut at, mut first) = (0, 0);
    for part in data.iter().cloned().chain(std::iter::once(bytes..bytes)) {
        // Below the hole before it.
        while at < part.start {
            while below.get(first + 1).is_some_and(|next| next.start <= at) {
                first += 1;
            }
            push(at, below[first].layer);
            at = below.get(first + 1).map_or(bytes, |next| next.start).min(part.start);
        }
        if !part.is_empty() {
            push(part.start, layer);
            at = part.end;
        }
    }
    above
}

impl ReadAt for Layers {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let range = self.clamped(buffer.len(), position);
        let mut parts: Vec<LayerPart> = self.parts(range.clone()).collect();
        parts.sort_by_key(|part| part.layer);
        let is_near =
            |a: &LayerPart, b: &LayerPart| a.layer == b.layer && b.range.start - a.range.end <= GAP_BYTES_MAX;
        for near in parts.chunk_by(is_near) {
            self.files[near[0].layer as usize].read_parts(near, buffer, position)?;
        }
        Ok((range.end - range.start) as usize)
    }

    /// A name of its own: no other file has its pages. A change shows as another time.
    fn attributes(&self) -> io::Result<Attributes> {
        let mut digest = *b"quinion snapshot        ";
        digest[16..].copy_from_slice(&self.number.to_le_bytes());
        let time = if self.changed().is_none() { 1 } else { 2 };
        let version = Version { modified: time, changed: time, settled: true, steps: true };
        Ok(Attributes { identity: Identity::of_digest(digest), version, size: self.bytes })
    }
}

impl Assembled for LayersBackend {
    fn files(&self) -> Option<Vec<FileIdentity>> {
        self.source().files.iter().map(LayerFile::identity).collect()
    }
    fn changed(&self) -> Option<String> {
        self.source().changed().map(|path| path.display().to_string())
    }
    fn copy_held(&self, into: &mut [u8], offset: u64) -> bool {
        self.source().copy_held(into, offset)
    }
}

impl LayerFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let wrong = |source: io::Error| cannot_open(path, source);
        let file = open_if(path, |kind| kind.is_file()).map_err(wrong)?;
        let not_a_file =
            || refused(path, "a snapshot with diffs, or in packs, consists of files, and this is none");
        let file = file.ok_or_else(not_a_file)?;
        let opened = settled(&file).map_err(wrong)?;
        if opened.bytes() == 0 {
            return Err(refused(path, "the snapshot is empty; name the file with the VM's memory"));
        }
        let path = path.to_owned();
        let (direct_works, is_held) = (AtomicBool::new(true), AtomicBool::new(false));
        Ok(Self { path, file, opened, direct: None, direct_works, is_held })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's size in bytes when it was opened.
    #[cfg(feature = "pack")]
    pub(super) fn bytes(&self) -> u64 {
        self.opened.bytes()
    }

    pub(super) fn identity(&self) -> Option<FileIdentity> {
        FileIdentity::of(&self.file, self.opened).ok()
    }

    /// Whether it is not what it was when it was opened.
    pub(super) fn has_changed(&self) -> bool {
        file_version(&self.file).ok() != Some(self.opened)
    }

    /// Chooses the way to read a file of which all bytes may be wanted.
    #[cfg(feature = "pack")]
    pub(super) fn choose_way_of_all(&mut self) {
        self.choose_way(self.bytes(), self.bytes());
    }

    /// Fills `into` from `position` on.
    #[cfg(feature = "pack")]
    pub(super) fn read_exact(&self, into: &mut [u8], position: u64) -> io::Result<()> {
        let range = position..position + into.len() as u64;
        self.read_parts(&[LayerPart { layer: 0, range }], into, position)
    }

    fn is_same_file(&self, other: &Self) -> bool {
        let identity = |it: &Self| it.file.metadata().map(|it| (it.dev(), it.ino())).ok();
        identity(self) == identity(other)
    }

    /// Where it has data, if it is a diff above a base of `bytes` bytes.
    fn diff_data(&self, bytes: u64) -> Result<Vec<Range<u64>>> {
        let wrong = |source: io::Error| cannot_open(&self.path, source);
        if self.opened.bytes() != bytes {
            let theirs = self.opened.bytes();
            let why = format!(
                "this diff has {theirs} bytes and the base has {bytes}; name diffs of this base, whole: \
                 each has the size of the VM's memory"
            );
            return Err(refused(&self.path, &why));
        }
        let block = self.file.metadata().map_err(wrong)?.blksize();
        if block > PAGE {
            let why = format!(
                "its file system reports blocks of {block} bytes, so zeros beside a page of this diff may count as \
                 data; have the diff written to a file system with blocks of {PAGE} bytes or less, such as ext4 or XFS"
            );
            return Err(refused(&self.path, &why));
        }
        let data = data_of(&self.file, bytes).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS) => {
                let why = "its file system does not tell which parts of a file are holes (SEEK_DATA), so this diff \
                           cannot be read there; have it written to another file system, such as ext4 or XFS";
                refused(&self.path, why)
            }
            _ => wrong(error),
        })?;
        checked_diff(&data, bytes).map_err(|why| refused(&self.path, &why))?;
        Ok(data)
    }

    /// `shown` bytes of it are seen in the snapshot.
    fn choose_way(&mut self, bytes: u64, shown: u64) {
        let held = kernel_holds(self.file.as_fd(), bytes).map_or(0, |held| held.pages * PAGE);
        let is_held = shown > 0 && 2 * held >= shown;
        self.is_held = AtomicBool::new(is_held);
        if !is_held {
            let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            let direct = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
            self.direct = direct.ok();
        }
    }

    /// Reads parts of this layer that lie close together into their places in `buffer`, which begins at `position`.
    fn read_parts(&self, parts: &[LayerPart], buffer: &mut [u8], position: u64) -> io::Result<()> {
        let span = parts[0].range.start..parts[parts.len() - 1].range.end;
        let mut whole = Vec::new();
        let direct = self.read_direct(span.clone(), &mut whole)?;
        for LayerPart { range, .. } in parts {
            let into = &mut buffer[(range.start - position) as usize..(range.end - position) as usize];
            match &direct {
                Some(bytes) => {
                    let inside = (range.start - span.start) as usize..(range.end - span.start) as usize;
                    into.copy_from_slice(&bytes[inside]);
                }
                None => {
                    self.file.read_exact_at(into, range.start).map_err(|error| self.read_failed(error))?
                }
            }
        }
        Ok(())
    }

    /// The bytes of `span`, past the kernel's page cache; `None` if this file is not read so.
    fn read_direct<'b>(&self, span: Range<u64>, whole: &'b mut Vec<u8>) -> io::Result<Option<&'b [u8]>> {
        // Relaxed: a thread that finds out late makes a call too many.
        let Some(file) = self.direct.as_ref().filter(|_| self.direct_works.load(Ordering::Relaxed)) else {
            return Ok(None);
        };
        let start = span.start / PAGE * PAGE;
        let len = (span.end.next_multiple_of(PAGE) - start) as usize;
        whole.resize(len + PAGE_SIZE, 0);
        let skipped = whole.as_ptr().align_offset(PAGE_SIZE);
        let aligned = &mut whole[skipped..skipped + len];
        let wanted = (span.end - start) as usize;
        let mut done = 0;
        while done < wanted {
            match file.read_at(&mut aligned[done..], start + done as u64) {
                // It is at an end within a page, or there is no more: the other way to read tells which.
                Ok(read) if done + read < wanted && (read == 0 || !read.is_multiple_of(PAGE_SIZE)) => {
                    return Ok(None);
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    self.direct_works.store(false, Ordering::Relaxed);
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(&whole[skipped + (span.start - start) as usize..skipped + wanted]))
    }

    /// A device's error keeps its number.
    fn read_failed(&self, error: io::Error) -> io::Error {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                io::Error::other(format!("{} was cut while it was served", self.path.display()))
            }
            _ => error,
        }
    }
}

/// The parts of `file` that are data, up to `bytes`.
fn data_of(file: &fs::File, bytes: u64) -> io::Result<Vec<Range<u64>>> {
    let (mut data, mut at) = (Vec::new(), 0);
    while at < bytes {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Nothing but a hole up to the end.
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
        if start < at || end <= start {
            return Err(io::Error::other("the file system tells of data that is before the place asked for"));
        }
        if start < bytes {
            data.push(start..end.min(bytes));
        }
        at = end;
    }
    Ok(data)
}

/// Whether a diff of `bytes` bytes may have these parts; if not, why.
fn checked_diff(data: &[Range<u64>], bytes: u64) -> std::result::Result<(), String> {
    if data.iter().map(|part| part.end - part.start).sum::<u64>() == bytes {
        let why = "this diff has no holes: either a copy has filled them, or its file system does not tell of them, \
                   or all pages were written. If it is whole, serve it alone as the snapshot; if not, take the diff \
                   as it was written, or a copy of it by `cp --sparse=auto`";
        return Err(why.to_owned());
    }
    let is_of_pages = |at: u64| at.is_multiple_of(PAGE) || at == bytes;
    match data.iter().find(|part| !is_of_pages(part.start) || !is_of_pages(part.end)) {
        Some(part) => Err(format!(
            "this diff has data from byte {} to byte {}, which is not in whole pages of {PAGE} bytes: the rest of a \
             page is lost, or was a hole made of zeros; take the diff as it was written",
            part.start, part.end
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
