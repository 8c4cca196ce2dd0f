//! Guest memory: memory that virtual machines map, in the memory of a cache.
//!
//! ```text
//!   Cache::guest_memory(bytes) --> GuestMemory   a machine's own: map its descriptor shared
//!   Image::from_snapshot(&cache, path) --> Image --clone--> Image      one image, many machines: map its descriptor
//!                                            |                         privately, and have faults answered after
//!                                            `- ensure(range)          `ensure`, or `populate` it first
//! ```
//!
//! Both count against the cache's bound in full until the last handle is dropped. They are one file each, in one
//! piece, and are not evicted. `quinion/src/guest.rs` has the steps of a request.
//!
//! Invariants:
//!  1. A range that [`Image::ensure`] has said `Ok` of reads as the snapshot did when it was opened, for as long as the
//!     image lives, here and in every unwritten mapping of its descriptor. A change of the snapshot meanwhile is
//!     detected by its size and its time of modification, and by these alone.
//!  2. No call of a forked child reaches the arena or a lock.

use std::fmt;
use std::io::{self, Read, Write as _};
use std::ops::{ControlFlow, Range};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use crate::backend::{Attributes, Backend};
use crate::error::{Error, Repr, Result};
use crate::guest::{GuestSlice, ImageMemory, MachineMemory, Snapshot};
use crate::units::{PAGE_SIZE, PageIndex, pages_of_bytes};

use super::kernel_cache::use_kernel_cache_if_warm;
use super::{Cache, CacheInner, File};

/// A part of a processor's own cache; no slice of guest memory is lent, because machines may be writing there.
const BUFFER_BYTES: usize = 128 << 10;
/// Bytes of a file that are lent at a time to be copied.
const COPIED: u64 = 1 << 20;

/// An image: a snapshot in memory that many virtual machines map at once, each page brought when it is first wanted,
/// and all of it frozen. Clones are handles of the same image; after the last its memory goes back to the cache. All
/// of it takes `&self`, and may be done by many threads at once.
///
/// A machine maps [`Image::fd`] with `MAP_PRIVATE`: it shares all pages that it does not write. It must not see
/// pages that are not resident yet: either register the mapping with userfaultfd, for missing *and* minor faults, and
/// answer each by `UFFDIO_CONTINUE` after [`Image::ensure`] of its range; or call [`Image::populate`] before the
/// machine starts. (Without that, the kernel shows zeros or incomplete bytes there.)
///
/// **The snapshot must not be written while it is served.** A change is detected by the file's size and modification
/// time, before the bytes that were read are shown: the read fails, and no further page is filled. Not detected are a
/// writer that sets the modification time back, a store through a shared mapping until the kernel updates the time, and
/// any change of a block device. Renaming or removing the snapshot, or replacing it by a rename, does not change it.
///
/// Memory that virtual machines have mapped stays theirs when the last handle is dropped, but no longer counts against
/// the cache's bound. So keep a handle as long as there are machines.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = std::env::temp_dir().join(format!("quinion-image-{}", std::process::id()));
/// # std::fs::write(&path, vec![7; 1 << 20])?;
/// use quinion::{Cache, Image};
///
/// let cache = Cache::builder().memory(64 << 20).build()?;
/// let image = Image::from_snapshot(&cache, &path)?;
/// image.ensure(4096..16384)?;
/// assert_eq!(image.stats().resident_bytes, 12288);
/// image.populate()?;
/// assert!(image.is_resident(0..image.len()));
/// # std::fs::remove_file(&path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Image {
    frozen: Arc<ImageMemory>,
    // Last: the cache outlives its memory.
    shared: Arc<CacheInner>,
}

/// Numbers of an image, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct ImageStats {
    /// The snapshot's size.
    pub bytes: u64,
    /// Memory that counts against the cache's bound: whole 2 MiB.
    pub memory_bytes: u64,
    /// The part of that with memory of the machine so far.
    pub backed_bytes: u64,
    /// The part of `backed_bytes` in pages of 2 MiB.
    pub huge_bytes: u64,
    /// Resident bytes: read, and found to be the snapshot's. Whole pages.
    pub resident_bytes: u64,
}

impl Image {
    /// An image of the file at `path`, in the memory of `cache`. Nothing of it is read yet. Where the cache has no
    /// contiguous room, it empties some, which takes as long as [`Cache::resize`]; where the file was written a
    /// moment ago, it waits until a later change would show, some milliseconds on local file systems. If the kernel's
    /// page cache holds half of the file or more, it is read from there.
    ///
    /// # Errors
    /// [`ErrorKind::Open`](crate::ErrorKind::Open) as for [`Cache::open`];
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): the file is empty, or is being written;
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): the cache has no room for it in one piece, or a limit of
    /// the process is in the way (the size of files, `ulimit -f`, is one).
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn from_snapshot(cache: &Cache, path: impl AsRef<Path>) -> Result<Self> {
        cache.check_process()?;
        let path = path.as_ref();
        let backend = cache.shared.engine.open(path);
        let backend = backend.map_err(|e| Repr::Open { path: path.to_owned(), source: Box::new(e) })?;
        let bytes = backend.attributes().map_err(Repr::Attributes)?.size;
        use_kernel_cache_if_warm(&backend, bytes);
        Self::from_backend(cache, Arc::new(backend), &path.display().to_string())
    }

    /// As [`Image::from_snapshot`], of the file behind `backend`; errors call it `name`.
    ///
    /// # Errors
    /// As there.
    pub fn from_backend(cache: &Cache, backend: Arc<dyn Backend>, name: &str) -> Result<Self> {
        cache.check_process()?;
        let shared = &cache.shared;
        backend.attach(&shared.filemap.wait_queue);
        // The number is taken when the mapping is made known, which may come late: room is made before.
        let id = shared.table.lock().next_id(&shared.filemap);
        let snapshot = Snapshot { backend, name: Arc::from(name) };
        let frozen = ImageMemory::new(&shared.filemap, id, snapshot, shared.process)?;
        Ok(Self { frozen: Arc::new(frozen), shared: Arc::clone(shared) })
    }

    fn check_process(&self) -> Result<()> {
        if self.shared.process.is_forked() { Err(Repr::Forked.into()) } else { Ok(()) }
    }

    /// The snapshot's size in bytes; at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.frozen.len()
    }
    /// The size of the memory, and of the file behind [`Image::fd`], in bytes: whole 2 MiB, zeros at the end.
    pub fn memory_len(&self) -> u64 {
        u64::from(self.frozen.places().pages()) * PAGE_SIZE as u64
    }
    /// The snapshot's attributes when it was opened.
    pub fn snapshot(&self) -> &Attributes {
        self.frozen.opened()
    }
    /// The file behind the image, for machines to map: open for reading only, sealed against any other size and, where
    /// the kernel knows that (5.1), against new writers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.frozen.reader()
    }
    /// The address of its first byte in this process. Resident pages may be read there; nothing may be written.
    pub fn address(&self) -> *const u8 {
        self.frozen.places().address().as_ptr()
    }

    /// Makes all pages of `range`, in bytes, resident. Waits for the device; a range that is resident costs a load for
    /// each 64 pages. Cut short where the snapshot ends.
    ///
    /// # Errors
    /// Of the first page that cannot be had; the others may be resident. [`ErrorKind::Io`](crate::ErrorKind::Io): the
    /// device cannot read it; a later call tries again. [`ErrorKind::Changed`](crate::ErrorKind::Changed): the snapshot
    /// has changed, or is shorter than it was. Resident pages are right and stay; nothing more will be.
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): the machine has no memory for it.
    pub fn ensure(&self, range: Range<u64>) -> Result<()> {
        let mut outcome = Ok(());
        self.ensure_each(range, |_, came| match came {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                outcome = Err(error);
                ControlFlow::Break(())
            }
        })?;
        outcome
    }

    /// As [`Image::ensure`], and calls `tell` with the result of each part of the range, in rising order, in whole
    /// pages: where a page cannot be read, the others are made resident all the same. It says whether to go on.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there. All others go to `tell`.
    pub fn ensure_each(
        &self,
        range: Range<u64>,
        mut tell: impl FnMut(Range<u64>, Result<()>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.check_process()?;
        self.frozen.bring(self.pages(range), &mut |pages, came| {
            tell(pages.start.first_byte()..pages.end.first_byte(), came)
        });
        Ok(())
    }

    /// Makes all of it resident, several requests of 2 MiB at a time.
    ///
    /// # Errors
    /// As [`Image::ensure`].
    pub fn populate(&self) -> Result<()> {
        self.ensure(0..self.len())
    }

    /// Starts reading all pages of `range`, in bytes, that are not resident, and waits for none of them;
    /// the next [`Image::ensure`] returns the errors.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn prefetch(&self, range: Range<u64>) -> Result<()> {
        self.check_process()?;
        self.frozen.start(self.pages(range));
        Ok(())
    }

    /// Gives all of the image its memory, so that mappings of [`Image::fd`] have minor faults only, and answering
    /// these is enough. The kernel clears 2 MiB at a time.
    ///
    /// # Errors
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): the machine has none.
    pub fn allocate(&self) -> Result<()> {
        self.check_process()?;
        let (places, bytes) = (self.frozen.places(), self.memory_len());
        let given = places.give_memory(PageIndex(0), places.pages());
        given.map_err(|source| Repr::Guest { bytes, source: Box::new(source) }.into())
    }

    /// Whether all pages of `range`, in bytes, are resident.
    pub fn is_resident(&self, range: Range<u64>) -> bool {
        let pages = self.pages(range);
        self.frozen.first_missing(pages.start, pages.end) == pages.end
    }

    /// The first row of pages in `range` that is not resident, in bytes; `None` if all of it is.
    pub fn next_absent(&self, range: Range<u64>) -> Option<Range<u64>> {
        let pages = self.pages(range);
        let first = self.frozen.first_missing(pages.start, pages.end);
        let end = self.frozen.first_ready(first, pages.end);
        (first < end).then(|| first.first_byte()..end.first_byte())
    }

    /// Reads up to `buffer.len()` bytes at byte `position`, making them resident first; fewer where the snapshot ends.
    ///
    /// # Errors
    /// As [`Image::ensure`].
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.check_process()?;
        self.frozen.read(position, buffer)
    }

    /// Whether the snapshot was found changed, by a call that wanted more of it.
    pub fn has_changed(&self) -> bool {
        self.frozen.is_broken()
    }

    /// Numbers of the image now; in a forked child all of them are 0.
    pub fn stats(&self) -> ImageStats {
        if self.check_process().is_err() {
            return ImageStats::default();
        }
        let (huge, backed) = self.frozen.places().extents();
        let extent = crate::units::EXTENT_SIZE as u64;
        ImageStats {
            bytes: self.len(),
            memory_bytes: self.memory_len(),
            backed_bytes: backed * extent,
            huge_bytes: huge * extent,
            resident_bytes: self.frozen.ready_pages() * PAGE_SIZE as u64,
        }
    }

    fn pages(&self, range: Range<u64>) -> Range<PageIndex> {
        let end = PageIndex(pages_of_bytes(range.end.min(self.len())));
        PageIndex::of_byte(range.start).min(end)..end
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Image");
        text.field("name", self.frozen.name()).field("bytes", &self.len()).finish_non_exhaustive()
    }
}

/// The memory of one virtual machine: one file, in one piece of whole 2 MiB, all zeros at first. The machine maps
/// [`GuestMemory::as_fd`] with `MAP_SHARED`. It is not evicted, and goes back to the cache when this is dropped; a
/// machine that still maps it keeps it, and it does not count against the cache's bound any more.
///
/// Reads and writes here copy between a buffer and the machine's memory at that moment: nothing is cached, and
/// nothing is promised of bytes that the machine writes meanwhile.
///
/// ```
/// # fn main() -> quinion::error::Result<()> {
/// use quinion::Cache;
///
/// let cache = Cache::builder().memory(64 << 20).build()?;
/// let memory = cache.guest_memory(8 << 20)?;
/// memory.write_at(b"kernel", 1 << 20)?;
/// let mut bytes = [0; 8];
/// memory.read_at(&mut bytes, 1 << 20)?;
/// assert_eq!(&bytes, b"kernel\0\0");
/// # Ok(())
/// # }
/// ```
pub struct GuestMemory {
    memory: MachineMemory,
    // Last: the cache outlives its memory.
    shared: Arc<CacheInner>,
}

impl Cache {
    /// Guest memory of `bytes` bytes, rounded up to whole 2 MiB in memory. It counts against the cache's bound at
    /// once, and takes memory of the machine where it is touched. Makes room as [`Image::from_snapshot`] does.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): it is to have no byte, or more than any cache has;
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): the cache has no room for it in one piece, or a limit of
    /// the process is in the way. [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn guest_memory(&self, bytes: u64) -> Result<GuestMemory> {
        self.check_process()?;
        let memory = MachineMemory::new(&self.shared.filemap, bytes)?;
        Ok(GuestMemory { memory, shared: Arc::clone(&self.shared) })
    }
}

impl GuestMemory {
    fn check_process(&self) -> Result<()> {
        if self.shared.process.is_forked() { Err(Repr::Forked.into()) } else { Ok(()) }
    }

    /// Size of the memory in bytes, as it was asked for.
    pub fn size(&self) -> u64 {
        self.memory.size()
    }
    /// The size of its file in bytes: whole 2 MiB.
    pub fn memory_len(&self) -> u64 {
        u64::from(self.memory.extents().pages()) * PAGE_SIZE as u64
    }
    /// The memory's file, open for reading and writing and sealed against any other size, for the machine to map. Where
    /// the machine has no memory for a page that is touched first, that is a signal there, unless
    /// [`GuestMemory::allocate`] was called before.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.extents().file()
    }
    /// The address of its first byte in this process, for as long as this value lives: for a VM that runs in this
    /// process. The mapping is shared with every process that maps the file, and any of them may write at any moment.
    pub fn map_shared(&self) -> *mut u8 {
        self.memory.extents().address().as_ptr()
    }

    /// Gives `range`, in bytes, its memory now, in pages of 2 MiB where the kernel has them.
    ///
    /// # Errors
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): the machine has none;
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): it does not lie inside;
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn allocate(&self, range: Range<u64>) -> Result<()> {
        self.check_process()?;
        self.memory.give_memory(range.start, range.end.saturating_sub(range.start))
    }

    /// Writes all of `bytes` at byte `position`.
    ///
    /// # Errors
    /// As [`GuestMemory::allocate`]; nothing was written then.
    pub fn write_at(&self, bytes: &[u8], position: u64) -> Result<()> {
        self.check_process()?;
        self.memory.write(position, bytes)
    }

    /// Fills `buffer` from byte `position` on. Bytes that were not written are zeros, and take memory by being read.
    ///
    /// # Errors
    /// As [`GuestMemory::allocate`]; the buffer is as it was then.
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> Result<()> {
        self.check_process()?;
        self.memory.read(position, buffer)
    }

    /// Copies `len` bytes of `file` from its byte `from` on to byte `position` here, through the cache, without a
    /// buffer between. Threads may do so side by side.
    ///
    /// # Errors
    /// As [`GuestMemory::allocate`] and [`File::pin`]; [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if
    /// the file ends before. Some of it may have been copied then.
    pub fn populate_from_file(&self, position: u64, file: &File, from: u64, len: u64) -> Result<()> {
        self.check_process()?;
        let mut done = 0;
        while done < len {
            let pinned = file.pin(from + done, (len - done).min(COPIED) as usize)?;
            if pinned.is_empty() {
                let text = format!(
                    "cannot copy the file to guest memory: it ends at byte {}, and {} more were wanted; ask for less",
                    from + done,
                    len - done
                );
                return Err(Error::from(Repr::InvalidInput(text)));
            }
            for chunk in pinned.chunks() {
                self.memory.write(position + done, chunk)?;
                done += chunk.len() as u64;
            }
        }
        Ok(())
    }

    /// Fills `range`, in bytes, one [`GuestSlice`] of at most 2 MiB after the other, each written by `source`.
    /// Returns how many bytes came: all, or fewer if `source` left a slice before it was full, or failed, or
    /// memory ended (a next call returns that); bytes behind them are unchanged. No lock is held while `source`
    /// runs, so threads may fill different ranges side by side.
    ///
    /// # Errors
    /// As [`GuestMemory::allocate`], if no byte came; or [`ErrorKind::Write`](crate::ErrorKind::Write) with `source`'s
    /// error, if none did.
    pub fn populate_with(
        &self,
        range: Range<u64>,
        mut source: impl FnMut(&mut GuestSlice<'_>) -> io::Result<()>,
    ) -> Result<u64> {
        self.check_process()?;
        self.memory.populate(range, &mut source)
    }

    /// As [`GuestMemory::populate_with`], with the bytes of `reader`, until it ends.
    ///
    /// # Errors
    /// As there; `reader`'s, if it gave none.
    pub fn populate_from_reader(&self, range: Range<u64>, mut reader: impl Read) -> Result<u64> {
        let mut buffer = vec![0; BUFFER_BYTES];
        self.populate_with(range, |slice| {
            while slice.left() > 0 {
                let wanted = slice.left().min(buffer.len());
                match reader.read(&mut buffer[..wanted]) {
                    Ok(0) => break,
                    Ok(bytes) => slice.write_all(&buffer[..bytes])?,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    }

    /// Makes `range`, in bytes, zeros for every process that maps it, and gives the memory of whole pages back to the
    /// machine. It counts against the cache's bound all the same, and comes back where it is touched.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): it does not lie inside;
    /// [`ErrorKind::Write`](crate::ErrorKind::Write): the system refuses, and some of it may be zeros;
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): the machine has none for a page at an edge.
    pub fn punch(&self, range: Range<u64>) -> Result<()> {
        self.check_process()?;
        self.memory.punch(range.start, range.end.saturating_sub(range.start))
    }
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestMemory").field("bytes", &self.size()).finish_non_exhaustive()
    }
}
