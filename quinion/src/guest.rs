//! Guest: memory that virtual machines map, and images from which many of them start.
//!
//! ```text
//!   memory     [ a guest's extents, one file of their own ]      a machine's own: it maps the file shared, and writes
//!                 ^ write, read, punch: copies to and from an address, which the machine may be writing
//!
//!   image      snapshot file --fills--> [ extents = folios ]     frozen: machines map the file privately, so they
//!                                         |  |  |                share what none of them has written
//!                 ready    1 1 1 1 . . 1 1 1 . . . .             a bit for each page: it came, and came from the
//!                                                                snapshot as it was opened
//! ```
//!
//! [`ImageMemory`] is the image: a mapping whose backend is the snapshot and whose pages have their places in a guest's
//! extents (`arena/guest.rs`), so that a fill reads straight into the memory that the machines map. A caller that wants
//! a range makes it **ready** first ([`ImageMemory::bring`]); pages that are ready stay with the image, unchanged.
//!
//! **A page is ready when the snapshot was checked after the page was read.** If another process writes, cuts or
//! replaces the snapshot in place, the file's times or size change before its new bytes can be read. So the pages
//! become ready only if it is still the file that was opened. If not, the image is **broken**: pages that are ready
//! stay right, and a thread that wants others gets an error. If the last change of a file is so recent that another
//! change could carry the same time, opening it waits. A new name or a removal changes the inode, and breaks nothing.
//!
//! **Undetected changes.** The time of the inode's last change is therefore not looked at, and so two are not seen: a
//! program that writes in place and then sets the time of modification back; and a thread that stores through a mapping
//! of the snapshot, until the kernel notes the time, which may be after its bytes can be read. A device's content has
//! no times at all, and that of a [`Backend`] of the user's as many as it gives it. In all of these, ready pages stay
//! unchanged, and pages that are read later have the bytes that the file has then.
//!
//! **A process that maps the file must not access pages that are not ready**: such a page may be a hole,
//! which reads as zeros, or bytes that are being read. Therefore either userfaultfd answers a machine's
//! faults, each after the pages were made ready, or the machine is started when all of the image is ready.
//!
//! [`MachineMemory`] is a machine's own. Its bytes are whatever the machine leaves there, so no page of it is cached: a
//! caller that reads or writes it copies from or to its address. The library gives it memory before it touches it, by a
//! call that answers an error where a touch alone would be a signal.
//!
//! Invariants:
//!  1. A page that is ready holds the bytes that the snapshot had there when it was opened (but for what is not found
//!     out, above), zeros behind its end.
//!  2. No page of an image leaves, and none that is ready is written, as long as it lives.
//!  3. No call touches a page of a guest that was not given memory.
//!
//! Not an invariant: that a read of [`MachineMemory`] is of one moment, even of one byte after another.
//!
//! Locks: none of its own but the one that keeps readers and writers of a [`MachineMemory`] out of a punch. Cost of a
//! range that is ready: a load for each 64 pages.

use std::fmt;
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use crate::arena::{ArenaError, GuestExtents, GuestUse};
use crate::backend::{Attributes, Backend};
use crate::error::{Error, Repr};
use crate::filemap::{Filemap, FillUrgency};
use crate::folio::copy;
use crate::mapping::{Mapping, NewMapping};
use crate::sync::{Rank, RankedRwLock};
use crate::sys::fork::ForkGuard;
use crate::units::{EXTENT_PAGES, EXTENT_SIZE, MappingId, PAGE_SIZE, PageIndex, pages_of_bytes};

/// Pages that are brought, and looked at, at a time.
const PIECE: u64 = EXTENT_PAGES as u64;
/// Pages on their way beyond the piece that is waited for, where all of a range is wanted.
const AHEAD: u64 = 3 * PIECE;
/// How long a snapshot that was just written may take until a later change is sure to show.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// Time between two checks whether that is so.
const SETTLE_POLL: Duration = Duration::from_millis(5);
const WORD: u64 = u64::BITS as u64;

fn extents_for(bytes: u64) -> Result<u32, Error> {
    let extents = bytes.div_ceil(EXTENT_SIZE as u64);
    // More than any arena has: `take_guest` would refuse it, if it could be said.
    u32::try_from(extents).ok().filter(|extents| *extents > 0 && *extents < 1 << 20).ok_or_else(|| {
        let text = format!("cannot have {bytes} bytes of guest memory: ask for 1 byte to 2 TiB");
        Repr::InvalidInput(text).into()
    })
}

/// An image: the pages of a snapshot in a guest's extents, read on demand.
pub struct ImageMemory {
    filemap: Arc<Filemap>,
    mapping: Arc<Mapping>,
    places: Arc<GuestExtents>,
    reader: OwnedFd,
    name: Arc<str>,
    opened: Attributes,
    ready: Box<[AtomicU64]>,
    ready_pages: AtomicU64,
    is_broken: AtomicBool,
    process: ForkGuard,
}

/// Callback with the outcome for pages: in rising order, each page once. It may end the work by `Break`.
pub type PageObserver<'t> = &'t mut dyn FnMut(Range<PageIndex>, Result<(), Error>) -> ControlFlow<()>;

/// The source of an image.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The backend that reads the image.
    pub backend: Arc<dyn Backend>,
    /// Name of the snapshot in errors.
    pub name: Arc<str>,
}

impl ImageMemory {
    /// An image of a snapshot, known to reclaim under the unique number `id`. Nothing is read yet. Waits a moment if
    /// the file was just written.
    ///
    /// # Errors
    /// The file is empty, cannot be looked at, or is being written; there is no room for it; no cell for its record.
    pub fn new(
        filemap: &Arc<Filemap>,
        id: MappingId,
        Snapshot { backend, name }: Snapshot,
        process: ForkGuard,
    ) -> Result<Self, Error> {
        let opened = settled(&*backend, &name)?;
        if opened.size == 0 {
            let text = format!(
                "cannot make an image of the snapshot {name}: it is empty; name a file with the memory of a VM"
            );
            return Err(Repr::InvalidInput(text).into());
        }
        let extents = extents_for(opened.size)?;
        let places = filemap.bound().take_guest(extents, c"quinion-image", GuestUse::Frozen)?;
        let reader = reopened(&places, opened.size)?;
        let arena = &filemap.arena;
        let new = NewMapping { arena, id, backend, attributes: &opened, process };
        let Some(mapping) = Mapping::new(new) else {
            return Err(Repr::NoMemory { position: 0, pages: filemap.arena.pages_max() }.into());
        };
        let mapping = mapping.with_shadow_nodes(filemap.reclaim().shadow_nodes());
        let mapping = mapping.with_counters(&filemap.counters).with_hooks(filemap.hooks);
        let mapping = mapping.with_places(Arc::clone(&places));
        let mapping = Arc::new(mapping);
        filemap.reclaim().add_mapping(Arc::clone(&mapping));
        let words = u64::from(places.pages()) / WORD;
        Ok(Self {
            filemap: Arc::clone(filemap),
            mapping,
            places,
            reader,
            name,
            opened,
            ready: (0..words).map(|_| AtomicU64::new(0)).collect(),
            ready_pages: AtomicU64::new(0),
            is_broken: AtomicBool::new(false),
            process,
        })
    }

    /// The snapshot's size in bytes.
    pub fn len(&self) -> u64 {
        self.opened.size
    }
    /// Never true: an image has at least a byte.
    pub fn is_empty(&self) -> bool {
        false
    }
    /// The snapshot's size in pages.
    pub fn pages(&self) -> u64 {
        pages_of_bytes(self.opened.size)
    }
    /// The snapshot's attributes when it was opened.
    pub fn opened(&self) -> &Attributes {
        &self.opened
    }
    /// The snapshot's name in errors.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }
    /// Where its memory is.
    pub fn places(&self) -> &GuestExtents {
        &self.places
    }
    /// The file of the image's memory, open for reading only.
    pub fn reader(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.reader.as_fd()
    }
    pub fn ready_pages(&self) -> u64 {
        self.ready_pages.load(Ordering::Relaxed)
    }
    /// Whether the snapshot was found changed.
    pub fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// The first page from `from` on that is not ready, or `end`.
    pub fn first_missing(&self, from: PageIndex, end: PageIndex) -> PageIndex {
        self.first_page(from, end, |ready| !ready)
    }
    /// The first page from `from` on that is ready, or `end`.
    pub fn first_ready(&self, from: PageIndex, end: PageIndex) -> PageIndex {
        self.first_page(from, end, |ready| ready)
    }
    /// The first page from `from` on whose bit is set after `select` has mapped the words of ready pages, or `end`.
    fn first_page(&self, from: PageIndex, end: PageIndex, select: impl Fn(u64) -> u64) -> PageIndex {
        let mut at = from.0;
        while at < end.0 {
            // Acquire, partner: the Release in `make_ready`: a thread that sees the bit sees the page's bytes.
            let word = self.ready[(at / WORD) as usize].load(Ordering::Acquire);
            let selected = select(word) >> (at % WORD);
            if selected != 0 {
                return PageIndex((at + u64::from(selected.trailing_zeros())).min(end.0));
            }
            at = (at / WORD + 1) * WORD;
        }
        end.max(from)
    }

    /// Starts bringing those of `pages` that are not on their way, and waits for none of them. An error is another's to
    /// find.
    pub fn start(&self, pages: Range<PageIndex>) {
        let mut at = self.first_missing(pages.start, pages.end);
        while at < pages.end && !self.is_broken() {
            let end = self.first_ready(at, piece_end(at, pages.end));
            if self.filemap.start_bringing(&self.mapping, at..end, FillUrgency::Ahead).is_err() {
                return;
            }
            at = self.first_missing(end, pages.end);
        }
    }

    /// Makes `pages`, which the snapshot has, ready, and reports the outcome of each: a piece at a time, while some
    /// more of them are on their way. Waits for the device. Where a page cannot be read, the others are.
    pub fn bring(&self, pages: Range<PageIndex>, tell: PageObserver<'_>) {
        let (mut at, mut started) = (pages.start, pages.start);
        while at < pages.end {
            // 1 Ready pages are reported.
            let ready = self.first_missing(at, pages.end);
            if ready > at {
                if tell(at..ready, Ok(())).is_break() {
                    return;
                }
                at = ready;
                continue;
            }
            // 2 A piece of the others, which is waited for; and more behind it.
            let piece = at..self.first_ready(at, piece_end(at, pages.end));
            let told = match self.start_piece(&piece, pages.end, &mut started) {
                Ok(()) => self.bring_piece(piece.clone(), tell),
                Err(error) => tell(piece.clone(), Err(error)),
            };
            if told.is_break() {
                return;
            }
            at = piece.end;
        }
    }

    /// Starts `piece`, and some of the pages that follow it up to `end`; `started` is how far that was done.
    fn start_piece(
        &self,
        piece: &Range<PageIndex>,
        end: PageIndex,
        started: &mut PageIndex,
    ) -> Result<(), Error> {
        if self.is_broken() {
            return Err(self.changed(piece.start));
        }
        if *started < piece.end {
            self.filemap.start_bringing(&self.mapping, piece.clone(), FillUrgency::Asked)?;
            *started = piece.end;
        }
        let far = end.min(piece.end.plus(AHEAD));
        while *started < far {
            let next = piece_end(*started, far);
            self.start(*started..next);
            *started = next;
        }
        Ok(())
    }

    fn bring_piece(&self, piece: Range<PageIndex>, tell: PageObserver<'_>) -> ControlFlow<()> {
        let brought = self.filemap.bring(&self.mapping, piece.clone());
        // After all of it came: pages that came from another content show by now.
        if let Err(error) = self.revalidate(brought.ended.is_some(), piece.start) {
            return tell(piece, Err(error));
        }
        let there = brought.there.into_iter().map(|pages| (pages.start..pages.end.min(piece.end), None));
        let failed = brought.failed.into_iter().map(|(pages, error)| (pages, Some(error)));
        let mut outcomes: Vec<(Range<PageIndex>, Option<Error>)> = there.chain(failed).collect();
        outcomes.sort_by_key(|(pages, _)| pages.start);
        for (pages, error) in outcomes {
            let told = match error {
                None => {
                    self.make_ready(pages.clone());
                    tell(pages, Ok(()))
                }
                Some(error) => tell(pages, Err(error)),
            };
            if told.is_break() {
                return told;
            }
        }
        ControlFlow::Continue(())
    }

    /// `has_ended`: the snapshot was found to end early.
    fn revalidate(&self, has_ended: bool, at: PageIndex) -> Result<(), Error> {
        let now = self.mapping.backend().attributes().map_err(Repr::Attributes)?;
        if has_ended || !is_same(&self.opened, &now) {
            self.is_broken.store(true, Ordering::Relaxed); // each look finds out by itself
        }
        if self.is_broken() { Err(self.changed(at)) } else { Ok(()) }
    }

    fn changed(&self, at: PageIndex) -> Error {
        Repr::SnapshotChanged { name: Arc::clone(&self.name), position: at.first_byte() }.into()
    }

    fn make_ready(&self, pages: Range<PageIndex>) {
        let (mut at, mut newly) = (pages.start.0, 0);
        while at < pages.end.0 {
            let next = ((at / WORD + 1) * WORD).min(pages.end.0);
            let mask = (u64::MAX >> (WORD - (next - at))) << (at % WORD);
            // Release, partner: the Acquire in `first_page`. The thread that brought the pages saw that they came.
            let before = self.ready[(at / WORD) as usize].fetch_or(mask, Ordering::Release);
            newly += u64::from((mask & !before).count_ones());
            at = next;
        }
        self.ready_pages.fetch_add(newly, Ordering::Relaxed);
    }

    /// Copies up to `to.len()` bytes from byte `position` on, making them ready first; fewer where the snapshot ends.
    ///
    /// # Errors
    /// As [`ImageMemory::bring`] reports of any of them.
    pub fn read(&self, position: u64, to: &mut [u8]) -> Result<usize, Error> {
        let left = self.len().saturating_sub(position).min(to.len() as u64);
        if left == 0 {
            return Ok(0);
        }
        let mut outcome = Ok(());
        let pages = PageIndex::of_byte(position)..PageIndex(pages_of_bytes(position + left));
        self.bring(pages, &mut |_, came| match came {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                outcome = Err(error);
                ControlFlow::Break(())
            }
        });
        outcome?;
        // Not by the index: a fill that meets the end of a snapshot that was cut makes the mapping smaller.
        let from = self.places.address().as_ptr().wrapping_add(position as usize);
        // SAFETY: these bytes lie in pages that are ready, which `bring` has said: they have memory, which is mapped as
        // long as the image lives, and no thread writes there. The destination is the caller's slice, and none of them.
        unsafe { copy::copy_out(from, to.as_mut_ptr(), left as usize) };
        Ok(left as usize)
    }
}

impl Drop for ImageMemory {
    fn drop(&mut self) {
        if !self.process.is_forked() {
            self.filemap.reclaim().remove_mapping(self.mapping.id());
        }
    }
}

impl fmt::Debug for ImageMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frozen")
            .field("name", &self.name)
            .field("opened", &self.opened)
            .finish_non_exhaustive()
    }
}

fn piece_end(at: PageIndex, end: PageIndex) -> PageIndex {
    PageIndex((at.0 / PIECE + 1) * PIECE).min(end)
}

/// A name or the permissions may have changed.
fn is_same(opened: &Attributes, now: &Attributes) -> bool {
    let content = |it: &Attributes| (it.identity, it.size, it.version.modified);
    content(opened) == content(now)
}

/// The attributes of a file, once any later change is sure to show in them: waits, if it was changed just now.
fn settled(backend: &dyn Backend, name: &str) -> Result<Attributes, Error> {
    let began = Instant::now();
    let mut seen = backend.attributes().map_err(Repr::Attributes)?;
    // A device has no times that tell of its content.
    let has_times = seen.version.modified != 0;
    while has_times && !seen.version.settled {
        std::thread::sleep(SETTLE_POLL);
        let now = backend.attributes().map_err(Repr::Attributes)?;
        if began.elapsed() > SETTLE_MAX && !now.version.settled {
            let text = format!(
                "cannot open the snapshot {name}: it is being written, or its last change lies in the future; \
                 open it when it is complete, or copy it"
            );
            return Err(Repr::InvalidInput(text).into());
        }
        seen = now;
    }
    Ok(seen)
}

fn reopened(places: &GuestExtents, bytes: u64) -> Result<OwnedFd, Error> {
    let path = format!("/proc/self/fd/{}", places.file().as_raw_fd());
    let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    opened.map_err(|errno| {
        let source = ArenaError::System { call: "open(/proc/self/fd)", source: errno.into() };
        Repr::Guest { bytes, source: Box::new(source) }.into()
    })
}

/// A machine's own memory.
pub struct MachineMemory {
    extents: Arc<GuestExtents>,
    size: u64,
    /// Shared by threads that touch its pages, alone while some are taken away.
    touching: RankedRwLock<()>,
}

impl MachineMemory {
    /// Memory of `size` bytes, all zeros. It counts at once, and is taken when it is touched.
    ///
    /// # Errors
    /// There is no room for it, or the system refuses.
    pub fn new(filemap: &Filemap, size: u64) -> Result<Self, Error> {
        let extents = filemap.bound().take_guest(extents_for(size)?, c"quinion-guest", GuestUse::Shared)?;
        Ok(Self { extents, size, touching: RankedRwLock::new(Rank::Write, ()) })
    }

    /// Size of the memory in bytes, as it was asked for.
    pub fn size(&self) -> u64 {
        self.size
    }
    pub fn extents(&self) -> &GuestExtents {
        &self.extents
    }

    /// Gives `len` bytes from `position` on their memory.
    ///
    /// # Errors
    /// The machine has none.
    pub fn give_memory(&self, position: u64, len: u64) -> Result<(), Error> {
        let range = self.range(position, len)?;
        let _shared = self.touching.read();
        self.back(range)
    }

    fn back(&self, range: Range<u64>) -> Result<(), Error> {
        let (first, end) = (PageIndex::of_byte(range.start), pages_of_bytes(range.end));
        let given = self.extents.give_memory(first, (end - first.0) as u32);
        given
            .map_err(|source| Repr::Guest { bytes: range.end - range.start, source: Box::new(source) }.into())
    }

    /// Copies `bytes` to `position` on. A machine that writes there at the same time leaves a mixture.
    ///
    /// # Errors
    /// They do not lie inside; or the machine has no memory for them. Nothing was written.
    pub fn write(&self, position: u64, bytes: &[u8]) -> Result<(), Error> {
        let range = self.range(position, bytes.len() as u64)?;
        let _shared = self.touching.read();
        self.back(range.clone())?;
        // SAFETY: the range lies in the guest, whose frames have memory until the lock is given back. No folio is there
        // and no reference: others, and machines, store there as they like, for which the copy is made. The source is
        // the caller's slice, which is none of this memory: no references to it are given to others.
        unsafe { copy::copy_in(bytes.as_ptr(), self.at(range.start), bytes.len()) };
        Ok(())
    }

    /// Fills `range`, in bytes, with what `source` writes into each [`GuestSlice`] of it, one after the other; how many
    /// bytes came before it ended or failed, or memory did.
    ///
    /// # Errors
    /// The range does not lie inside; or, if no byte came, `source`'s error, or that the machine has no memory.
    pub fn populate(
        &self,
        range: Range<u64>,
        source: &mut dyn FnMut(&mut GuestSlice<'_>) -> io::Result<()>,
    ) -> Result<u64, Error> {
        let mut at = range.start;
        let range = self.range(at, range.end.saturating_sub(at))?;
        while at < range.end {
            let end = (at / EXTENT_SIZE as u64 + 1).saturating_mul(EXTENT_SIZE as u64).min(range.end);
            let mut slice = GuestSlice { memory: self, at, end, failed: None };
            let outcome = match self.give_memory(at, end - at) {
                Ok(()) => source(&mut slice).map_err(|source| {
                    let (position, len) = (slice.at, (range.end - slice.at) as usize);
                    slice.failed.take().unwrap_or_else(|| Repr::Populate { position, len, source }.into())
                }),
                Err(error) => Err(error),
            };
            at = slice.at;
            match outcome {
                Err(error) if at == range.start => return Err(error),
                Ok(()) if at == end => {}
                _ => break,
            }
        }
        Ok(at - range.start)
    }

    /// Copies bytes from `position` on into `to`; as [`MachineMemory::write`].
    ///
    /// # Errors
    /// As there.
    pub fn read(&self, position: u64, to: &mut [u8]) -> Result<(), Error> {
        let range = self.range(position, to.len() as u64)?;
        let _shared = self.touching.read();
        self.back(range.clone())?;
        // SAFETY: as in `write`; the destination is the caller's slice.
        unsafe { copy::copy_out(self.at(range.start), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Makes `len` bytes from `position` on zeros, and gives the memory of whole pages back to the machine.
    ///
    /// # Errors
    /// They do not lie inside, or the system refuses; some of them may be zeros.
    pub fn punch(&self, position: u64, len: u64) -> Result<(), Error> {
        let range = self.range(position, len)?;
        let page = PAGE_SIZE as u64;
        let (first, end) = (range.start.next_multiple_of(page), range.end / page * page);
        // Bytes behind the last one are zeros, punched or not.
        let end = if range.end == self.size { range.end.next_multiple_of(page) } else { end };
        if first >= end {
            return self.zero(range);
        }
        self.zero(range.start..first)?;
        self.zero(end.min(range.end)..range.end)?;
        let _alone = self.touching.write();
        let punched = self.extents.punch(PageIndex(first / page), ((end - first) / page) as u32);
        let failed = |source| Repr::Punch { position, len, source }.into();
        punched.map(drop).map_err(failed)
    }

    fn zero(&self, range: Range<u64>) -> Result<(), Error> {
        if range.is_empty() {
            return Ok(());
        }
        let _shared = self.touching.read();
        self.back(range.clone())?;
        // SAFETY: as in `write`.
        unsafe { copy::zero(self.at(range.start), (range.end - range.start) as usize) };
        Ok(())
    }

    fn range(&self, position: u64, len: u64) -> Result<Range<u64>, Error> {
        match position.checked_add(len) {
            Some(end) if end <= self.size => Ok(position..end),
            _ => {
                let size = self.size;
                let text = format!(
                    "cannot use {len} bytes at byte {position}: guest memory has {size} bytes; ask for less"
                );
                Err(Repr::InvalidInput(text).into())
            }
        }
    }

    fn at(&self, position: u64) -> *mut u8 {
        debug_assert!(position <= self.size);
        let start: NonNull<u8> = self.extents.address();
        // SAFETY: the position lies in the guest's extents, which are mapped for as long as it lives.
        unsafe { start.as_ptr().add(position as usize) }
    }
}

/// A piece of guest memory that is being populated: bytes are put into it in order, by [`Write`](io::Write). The
/// populate ends where a slice was not filled when it was given back.
#[derive(Debug)]
pub struct GuestSlice<'m> {
    memory: &'m MachineMemory,
    at: u64,
    end: u64,
    failed: Option<Error>,
}

impl GuestSlice<'_> {
    /// The position in the guest memory, in bytes, of the next byte that is put.
    pub fn position(&self) -> u64 {
        self.at
    }
    /// How many bytes it takes before it is full.
    pub fn left(&self) -> usize {
        (self.end - self.at) as usize
    }
}

impl io::Write for GuestSlice<'_> {
    /// 0 if it is full. Fails if the machine has no memory, because another thread took away the memory given.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(self.left());
        if let Err(error) = self.memory.write(self.at, &bytes[..len]) {
            self.failed = Some(error);
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.at += len as u64;
        Ok(len)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for MachineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("size", &self.size).finish_non_exhaustive()
    }
}
