//! Segment: one sealed memory file and its mapping.
//!
//! ```text
//!   reserved    |......|==========================================|....|     address space only
//!                      ^ aligned to 2 MiB
//!   the file            | populated |  not yet (no memory)  |
//! ```
//!
//! The file has its full size from the start and is sealed against any other, so it can never hold more bytes than
//! that: the size *is* the largest bound. Memory is taken by [`Segment::populate`] and [`Segment::populate_bytes`], and
//! given back by [`Segment::punch`], which the seals allow (one against writing would forbid it). A byte that was not
//! populated must not be touched: that would take memory, and end in SIGBUS instead of an error. (A late reader of a
//! punched extent does touch it; see `shrink.rs`.)
//!
//! Invariants:
//!  1. The mapping stays where it is, in full, until the segment is dropped. Another file may lie over a part of it
//!     for a while ([`Segment::map_over`]).
//!  2. The file's size never changes; a viewer that maps all of it never meets its end.
//!  3. A forked child does not inherit the mapping, and the child's drop leaves its address space alone:
//!     something else may live there by then.
//!
//! Not invariants: that an extent is one 2 MiB page; it is where the kernel had one to give, and [`PageSize`] says so.
//! That a shortage always ends in an error: a kernel that is out of memory, or a control group at its limit, may first
//! kill a process of its choice. So the bound is held against the limits beforehand.

use std::ffi::CStr;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MlockFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use super::ArenaError;
use crate::units::EXTENT_SIZE;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageSize {
    Huge,
    Small,
}

/// Which processes may open the file behind a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Viewers read it: mode 0400, memory in pages of 2 MiB where there are any.
    ReadOnly,
    /// Viewers read it: mode 0400, memory page by page. No other mapping of it can be written.
    Common,
    /// One viewer writes it: mode 0600, memory page by page.
    ReadWrite,
}

/// Where in a file the memory of a part of the segment is.
#[derive(Clone, Copy, Debug)]
pub struct FileBacking<'f> {
    pub file: BorrowedFd<'f>,
    /// In bytes, of its beginning.
    pub at: u64,
}

/// A memory file and its mapping in this process.
#[derive(Debug)]
pub struct Segment {
    file: OwnedFd,
    reserved: (NonNull<u8>, usize),
    base: NonNull<u8>,
    bytes: usize,
    sharing: Sharing,
    process: u32,
    is_locked: AtomicBool,
}

// SAFETY: a segment owns its mapping as a box owns its bytes; it hands out only an address.
unsafe impl Send for Segment {}
// SAFETY: as above; no method changes the segment.
unsafe impl Sync for Segment {}

impl Segment {
    /// A memory file of `bytes` bytes (whole pages), named `name` in `/proc`, mapped for reading and
    /// writing. It takes address space, and no memory yet. The size is below `ulimit -f`, or a signal
    /// (SIGXFSZ) ends the process: [`super::process_limit`] counts it.
    pub fn create(name: &CStr, bytes: usize, sharing: Sharing) -> Result<Self, ArenaError> {
        let file = create_sized(name, bytes, sharing)?;
        let reserved_bytes = bytes + EXTENT_SIZE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(
                null_mut(),
                reserved_bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let reserved =
            NonNull::new(reserved.map_err(system("mmap"))?.cast::<u8>()).expect("not at address 0");
        let base = align_up(reserved);
        // From here on the drop undoes the reservation.
        let (reserved, process) = ((reserved, reserved_bytes), std::process::id());
        let is_locked = AtomicBool::new(false);
        let segment = Self { file, reserved, base, bytes, sharing, process, is_locked };
        segment.map(0, bytes, segment.file.as_fd(), 0).map_err(system("mmap"))?;
        segment.advise(0, bytes).map_err(system("madvise"))?;
        // Sealed once its own mapping is in place: no process can make another writable mapping of the file.
        if sharing == Sharing::Common {
            let _before_5_1 = rustix::fs::fcntl_add_seals(&segment.file, SealFlags::FUTURE_WRITE);
        }
        seal(&segment.file, SealFlags::SEAL)?;
        Ok(segment)
    }

    /// A multiple of 2 MiB.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether this process has the mapping: not a forked child of the one that made it.
    pub fn is_here(&self) -> bool {
        std::process::id() == self.process
    }

    /// May take half a millisecond, or some where a virtual machine has to fetch the memory first. An error (ENOMEM,
    /// EFAULT, EHWPOISON) if there is not enough; some of it may have been taken then, which a later try uses.
    pub fn populate(&self, extent: u32) -> io::Result<PageSize> {
        let at = u64::from(extent) * EXTENT_SIZE as u64;
        self.populate_extent(extent, FileBacking { file: self.file.as_fd(), at })
    }

    /// As [`Segment::populate`], of extents that follow each other, in one step where the kernel has pages of 2 MiB:
    /// for each request it has all processors give up the pages that they set aside. Returns the page size of each;
    /// fewer than asked for, and at least one, where memory ran out.
    ///
    /// # Errors
    /// As [`Segment::populate`], for the first.
    pub fn populate_many(&self, extents: Range<u32>) -> io::Result<Vec<PageSize>> {
        if extents.len() > 1 && self.populate_at_once(extents.clone()).is_ok() {
            return Ok(vec![PageSize::Huge; extents.len()]);
        }
        let mut sizes = Vec::with_capacity(extents.len());
        for extent in extents {
            match self.populate(extent) {
                Ok(size) => sizes.push(size),
                Err(error) if sizes.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(sizes)
    }

    fn populate_at_once(&self, extents: Range<u32>) -> io::Result<()> {
        for extent in extents.clone() {
            self.populate_bytes(extent as usize * EXTENT_SIZE, crate::units::PAGE_SIZE)?;
        }
        let bytes = extents.len() * EXTENT_SIZE;
        self.collapse(extents.start as usize * EXTENT_SIZE, bytes)
    }

    /// As [`Segment::populate`], of an extent that `backing` lies over.
    pub fn populate_extent(&self, extent: u32, backing: FileBacking<'_>) -> io::Result<PageSize> {
        let offset = extent as usize * EXTENT_SIZE;
        assert!(offset + EXTENT_SIZE <= self.bytes, "extent {extent} is beyond the segment");
        // An extent without any page cannot be collapsed, so it gets one first.
        self.populate_pages(offset, crate::units::PAGE_SIZE, backing)?;
        if self.collapse(offset, EXTENT_SIZE).is_ok() {
            return Ok(PageSize::Huge);
        }
        self.populate_pages(offset, EXTENT_SIZE, backing)?;
        Ok(PageSize::Small)
    }

    /// Gives `bytes` bytes at `offset` (whole pages) their memory, in pages of any size.
    pub fn populate_bytes(&self, offset: usize, bytes: usize) -> io::Result<()> {
        self.populate_pages(offset, bytes, FileBacking { file: self.file.as_fd(), at: offset as u64 })
    }

    /// As [`Segment::populate_bytes`], of pages that `backing` lies over.
    pub fn populate_pages(&self, offset: usize, bytes: usize, backing: FileBacking<'_>) -> io::Result<()> {
        let FileBacking { file, at } = backing;
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "beyond the segment");
        match self.madvise(offset, bytes, Advice::LinuxPopulateWrite) {
            // A kernel before 5.14 does not know the advice; the file system can do most of it.
            // Unlike the advice, that ends early where the thread has a signal to handle.
            Err(Errno::INVAL) => Ok(rustix::io::retry_on_intr(|| {
                rustix::fs::fallocate(file, FallocateFlags::empty(), at, bytes as u64)
            })?),
            done => Ok(done?),
        }
    }

    /// Puts `file`, of `bytes` bytes, over that part of the segment, for reading and writing, with the same advice and
    /// lock. The addresses are never without a mapping: the kernel changes it in one step.
    ///
    /// # Errors
    /// The system refuses; the content there is arbitrary then, and the caller maps something else over it or keeps it
    /// from being touched.
    pub fn map_over(&self, offset: usize, bytes: usize, file: BorrowedFd<'_>) -> io::Result<()> {
        self.map(offset, bytes, file, 0)?;
        self.settle_in(offset, bytes)
    }

    /// Puts the segment's own file back where another lay; not for [`Sharing::Common`]. See [`Segment::map_over`].
    pub fn restore_mapping(&self, offset: usize, bytes: usize) -> io::Result<()> {
        self.map(offset, bytes, self.file.as_fd(), offset as u64)?;
        self.settle_in(offset, bytes)
    }

    fn settle_in(&self, offset: usize, bytes: usize) -> io::Result<()> {
        self.advise(offset, bytes)?;
        if self.is_locked.load(Ordering::Relaxed) {
            self.lock_bytes(offset, bytes)?;
        }
        Ok(())
    }

    /// A thread that reads there afterwards finds zeros, and takes a page for each page it reads.
    pub fn punch(&self, extent: u32) -> io::Result<()> {
        let offset = extent as usize * EXTENT_SIZE;
        assert!(offset + EXTENT_SIZE <= self.bytes, "extent {extent} is beyond the segment");
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, offset as u64, EXTENT_SIZE as u64)?)
    }

    /// The first extent from `extent` on that has some memory; `None` if there is none.
    pub fn next_data(&self, extent: u32) -> Option<u32> {
        let offset = u64::from(extent) * EXTENT_SIZE as u64;
        // It moves the file's own position, which is not used.
        let found = rustix::fs::seek(&self.file, SeekFrom::Data(offset)).ok()?;
        Some((found / EXTENT_SIZE as u64) as u32)
    }

    /// Has the system keep every page of it in memory from the moment it is there.
    pub fn lock(&self) -> Result<(), ArenaError> {
        let locked = self.lock_bytes(0, self.bytes);
        let limit = getrlimit(Resource::Memlock).current;
        locked.map_err(|errno| ArenaError::Locked {
            bytes: self.bytes as u64,
            limit,
            source: errno.into(),
        })?;
        self.is_locked.store(true, Ordering::Relaxed); // asked by those who were handed the segment after this
        Ok(())
    }

    pub fn is_locked(&self) -> bool {
        self.is_locked.load(Ordering::Relaxed)
    }

    fn lock_bytes(&self, offset: usize, bytes: usize) -> rustix::io::Result<()> {
        debug_assert!(offset + bytes <= self.bytes);
        // SAFETY: the range is the segment's mapping; locking it changes no byte.
        unsafe {
            let at = self.base.as_ptr().add(offset);
            rustix::mm::mlock_with(at.cast(), bytes, MlockFlags::ONFAULT)
        }
    }

    /// Makes extents that have at least one page each into pages of 2 MiB.
    fn collapse(&self, offset: usize, bytes: usize) -> io::Result<()> {
        /// Since Linux 6.1; older kernels answer EINVAL.
        const MADV_COLLAPSE: i32 = 25;
        // SAFETY: the range lies in the segment's mapping (`populate` checked); the bytes in it do not change.
        let result = unsafe { libc::madvise(self.base.as_ptr().add(offset).cast(), bytes, MADV_COLLAPSE) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn map(&self, offset: usize, bytes: usize, file: BorrowedFd<'_>, at: u64) -> rustix::io::Result<()> {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "beyond the segment");
        // SAFETY: the range lies inside the segment's reservation. Nothing lives in it yet, or only free frames: no
        // reference to them exists, and a thread that copies from one optimistically throws the copy away (`guest.rs`).
        // Or it has pages of viewers, which are atomics all over, and may be others from one look at them to the next.
        let mapped = unsafe {
            rustix::mm::mmap(
                self.base.as_ptr().add(offset).cast(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                file,
                at,
            )
        };
        mapped.map(drop)
    }

    /// Excludes the range from core dumps and forked children, or fails. Asks for huge pages, as a hint.
    fn advise(&self, offset: usize, bytes: usize) -> rustix::io::Result<()> {
        self.madvise(offset, bytes, Advice::LinuxDontDump)?;
        self.madvise(offset, bytes, Advice::LinuxDontFork)?;
        if self.sharing == Sharing::ReadOnly && bytes >= EXTENT_SIZE {
            let _hint = self.madvise(offset, bytes, Advice::LinuxHugepage);
        }
        Ok(())
    }

    fn madvise(&self, offset: usize, bytes: usize, advice: Advice) -> rustix::io::Result<()> {
        debug_assert!(offset + bytes <= self.bytes);
        // SAFETY: the range lies in the segment's mapping, and none of these advices changes the bytes in it.
        unsafe { rustix::mm::madvise(self.base.as_ptr().add(offset).cast(), bytes, advice) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if !self.is_here() {
            return; // invariant 3
        }
        let (start, bytes) = self.reserved;
        // SAFETY: the reservation is the segment's; every holder of a view of it promised not to use it any more.
        let unmapped = unsafe { rustix::mm::munmap(start.as_ptr().cast(), bytes) };
        debug_assert!(unmapped.is_ok(), "our own reservation can be unmapped");
    }
}

/// A memory file of its final size, to which [`seal`] may still add seals. See [`Segment::create`] for the size.
pub fn create_sized(name: &CStr, bytes: usize, sharing: Sharing) -> Result<OwnedFd, ArenaError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags).map_err(system("memfd_create"))?;
    let mode = match sharing {
        Sharing::ReadOnly | Sharing::Common => Mode::RUSR,
        Sharing::ReadWrite => Mode::RUSR | Mode::WUSR,
    };
    rustix::fs::fchmod(&file, mode).map_err(system("fchmod"))?;
    rustix::fs::ftruncate(&file, bytes as u64).map_err(system("ftruncate"))?;
    seal(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

pub fn seal(file: &OwnedFd, seals: SealFlags) -> Result<(), ArenaError> {
    rustix::fs::fcntl_add_seals(file, seals).map_err(system("fcntl(F_ADD_SEALS)"))
}

fn align_up(address: NonNull<u8>) -> NonNull<u8> {
    let missing = address.as_ptr().align_offset(EXTENT_SIZE);
    // SAFETY: the caller reserved an extent more than it needs, so the result lies inside.
    unsafe { address.add(missing) }
}

pub(super) fn system(call: &'static str) -> impl Fn(Errno) -> ArenaError {
    move |errno| ArenaError::System { call, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::PAGE_SIZE;
    use rustix::fs::fstat;

    fn segment() -> Segment {
        Segment::create(c"quinion-test", 2 * EXTENT_SIZE, Sharing::ReadOnly).unwrap()
    }
    fn taken(segment: &Segment) -> usize {
        fstat(segment.file()).unwrap().st_blocks as usize * 512
    }
    fn byte(segment: &Segment, offset: usize) -> *mut u8 {
        assert!(offset < segment.bytes);
        // SAFETY: the offset lies in the segment.
        unsafe { segment.base().as_ptr().add(offset) }
    }

    #[test]
    fn memory_is_taken_when_it_is_asked_for() {
        let segment = segment();
        assert_eq!(segment.base().as_ptr().align_offset(EXTENT_SIZE), 0);
        assert_eq!(taken(&segment), 0);
        segment.populate(1).unwrap();
        assert_eq!(taken(&segment), EXTENT_SIZE);
        segment.populate(1).unwrap();
        assert_eq!(taken(&segment), EXTENT_SIZE);
        let mode = fstat(segment.file()).unwrap().st_mode & 0o777;
        assert_eq!(mode, 0o400);
    }

    #[test]
    fn extents_are_populated_together_and_one_by_one() {
        let segment = Segment::create(c"quinion-many", 8 * EXTENT_SIZE, Sharing::ReadOnly).unwrap();
        let one = segment.populate(3).unwrap();
        assert_eq!(segment.populate_many(2..5).unwrap(), vec![one; 3], "the middle one was there");
        assert_eq!(taken(&segment), 3 * EXTENT_SIZE);
        segment.madvise(5 * EXTENT_SIZE, EXTENT_SIZE, Advice::LinuxNoHugepage).unwrap();
        assert_eq!(segment.populate_many(4..8).unwrap(), [one, PageSize::Small, one, one]);
        assert_eq!(taken(&segment), 6 * EXTENT_SIZE);
    }

    /// Root may open a file of mode 0400 for writing, and so may its user after an `fchmod`.
    #[test]
    fn a_segment_all_viewers_read_is_not_mapped_for_writing_a_second_time() {
        use rustix::fs::OFlags;
        let segment = Segment::create(c"quinion-common", EXTENT_SIZE, Sharing::Common).unwrap();
        segment.populate_bytes(0, PAGE_SIZE).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&segment.file()));
        rustix::fs::fchmod(segment.file(), Mode::RUSR | Mode::WUSR).unwrap();
        let again = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let map = |access| {
            // SAFETY: a new mapping at an address of the kernel's choice.
            unsafe { rustix::mm::mmap(null_mut(), PAGE_SIZE, access, MapFlags::SHARED, &again, 0) }
        };
        assert_eq!(map(ProtFlags::READ | ProtFlags::WRITE), Err(Errno::PERM));
        assert_eq!(rustix::io::pwrite(&again, b"x", 0), Err(Errno::PERM));
        let read = map(ProtFlags::READ).unwrap();
        // SAFETY: the page is mapped by the owner for writing, and by this process for reading.
        unsafe {
            byte(&segment, 0).write_volatile(7);
            assert_eq!(read.cast::<u8>().read_volatile(), 7);
            rustix::mm::munmap(read, PAGE_SIZE).unwrap();
        }
    }

    #[test]
    fn small_pages_serve_where_there_are_no_huge_ones() {
        let segment = segment();
        segment.madvise(0, segment.bytes, Advice::LinuxNoHugepage).unwrap();
        assert_eq!(segment.populate(0).unwrap(), PageSize::Small);
        assert_eq!(taken(&segment), EXTENT_SIZE);
    }

    #[test]
    fn the_file_is_allocated_where_the_advice_is_unknown() {
        let segment = segment();
        // The advice is unknown where nothing is to be advised of, too: an address that is none of a page.
        let (file, at) = (segment.file(), EXTENT_SIZE as u64);
        segment.populate_pages(EXTENT_SIZE + 1, 3 * PAGE_SIZE, FileBacking { file, at }).unwrap();
        assert_eq!(taken(&segment), 3 * PAGE_SIZE);
    }

    #[test]
    #[should_panic(expected = "beyond the segment")]
    fn memory_beyond_the_range_is_not_populated() {
        let _ = segment().populate(2);
    }

    /// The name in `/proc/self/maps` tells this mapping from whatever other tests map there meanwhile.
    #[test]
    fn a_dropped_segment_leaves_no_mapping() {
        let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("quinion-dropped");
        let segment = Segment::create(c"quinion-dropped", EXTENT_SIZE, Sharing::ReadWrite).unwrap();
        assert!(mapped());
        drop(segment);
        assert!(!mapped());
    }

    #[test]
    fn a_forked_child_drops_it_without_harm() {
        let segment = segment();
        segment.populate(0).unwrap();
        // SAFETY: the child makes system calls only, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the address is a free one in the child; the copy of the segment is dropped once.
            unsafe {
                let at = segment.base().as_ptr();
                let (access, how) =
                    (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                let fixed = how | libc::MAP_FIXED_NOREPLACE;
                let mapped = libc::mmap(at.cast(), PAGE_SIZE, access, fixed, -1, 0);
                if mapped != at.cast() {
                    libc::_exit(1); // the mapping was inherited
                }
                at.write_volatile(7);
                drop(std::ptr::read(&segment));
                let alive = libc::msync(at.cast(), PAGE_SIZE, libc::MS_ASYNC) == 0;
                libc::_exit(if alive && at.read_volatile() == 7 { 0 } else { 2 });
            }
        }
        let mut status = -1;
        // SAFETY: the child is this process's.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child's exit status");
        // SAFETY: the byte is populated and this test's.
        unsafe { byte(&segment, 5).write_volatile(9) };
    }
}
