//! Region: memory as a virtual machine has it, whose pages a page-fault handler may supply one by one, slowly.
//!
//! ```text
//!   reserved    |....[ 2 MiB | 2 MiB | 2 MiB ]......|     the mapping begins where a large page may
//!                     ^ anonymous, or a file's: shared, or private and copied where it is written
//! ```
//!
//! No slice of it is ever borrowed: a fault handler supplies absent pages (`uffd`), and the contents of a file may
//! change through another mapping. So each access is a copy, or one volatile word.
//!
//! Not an invariant: that an access returns soon. An access to a page that is never supplied waits for ever.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::HUGE_BYTES;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageKind {
    Small,
    /// 2 MiB, where the kernel has such pages.
    Huge,
}

/// Memory that begins at a multiple of 2 MiB.
pub struct Region {
    reserved: NonNull<libc::c_void>,
    start: NonNull<u8>,
    len: usize,
}

impl Region {
    /// `len` private bytes, zeros at first.
    pub fn anonymous(len: usize, pages: PageKind) -> io::Result<Self> {
        let region = Self::reserved(len)?;
        let (flags, protection) = (MapFlags::PRIVATE | MapFlags::FIXED, ProtFlags::READ | ProtFlags::WRITE);
        let at = region.start.as_ptr().cast();
        // SAFETY: this value reserved the range, and has not given its address to any other code yet.
        unsafe { rustix::mm::mmap_anonymous(at, len, protection, flags)? };
        region.advise(match pages {
            PageKind::Small => Advice::LinuxNoHugepage,
            PageKind::Huge => Advice::LinuxHugepage,
        });
        Ok(region)
    }

    /// The first `len` bytes of `file`, shared with all its mappings.
    pub fn shared(file: impl AsFd, len: usize) -> io::Result<Self> {
        Self::mapped(file, len, MapFlags::SHARED)
    }

    /// The first `len` bytes of `file`; writes stay private.
    pub fn private(file: impl AsFd, len: usize) -> io::Result<Self> {
        Self::mapped(file, len, MapFlags::PRIVATE)
    }

    fn mapped(file: impl AsFd, len: usize, kind: MapFlags) -> io::Result<Self> {
        let region = Self::reserved(len)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let at = region.start.as_ptr().cast();
        // SAFETY: this value reserved the range, and has not given its address to any other code yet.
        unsafe { rustix::mm::mmap(at, len, protection, kind | MapFlags::FIXED, file.as_fd(), 0)? };
        Ok(region)
    }

    fn reserved(len: usize) -> io::Result<Self> {
        let whole = len + HUGE_BYTES;
        // SAFETY: the kernel chooses an unused address.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE)?
        };
        let reserved = NonNull::new(reserved).expect("nothing is mapped at 0");
        let bytes = reserved.cast::<u8>();
        // SAFETY: `len` bytes and a large page are reserved, and less than a large page is skipped.
        let start = unsafe { bytes.add(bytes.as_ptr().align_offset(HUGE_BYTES)) };
        Ok(Self { reserved, start, len })
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: a hint about memory of this region; a kernel that ignores it uses other pages.
        let _ = unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len, advice) };
    }

    /// Each fault reads only its own page, and no neighbours.
    pub fn read_anywhere(&self) {
        self.advise(Advice::Random);
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Address of the region, for the fault handler.
    pub fn address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{at} is outside of {}", self.len);
        // SAFETY: it lies inside the mapping.
        unsafe { self.start.as_ptr().add(at) }
    }

    pub fn fill(&mut self, at: usize, bytes: &[u8]) {
        let to = self.at(at, bytes.len());
        // SAFETY: as many bytes are mapped there, and no reference to them exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// The word at `at`, a multiple of 8.
    #[inline]
    pub fn word(&self, at: usize) -> u64 {
        assert!(at.is_multiple_of(8));
        let from = self.at(at, 8).cast::<u64>();
        // SAFETY: 8 aligned bytes are mapped there; any bytes are a valid number.
        unsafe { from.read_volatile() }
    }

    /// Writes a word to `at`, a multiple of 8.
    #[inline]
    pub fn set_word(&mut self, at: usize, word: u64) {
        assert!(at.is_multiple_of(8));
        let to = self.at(at, 8).cast::<u64>();
        // SAFETY: 8 aligned bytes are mapped there, and no reference to them exists.
        unsafe { to.write_volatile(word) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this is the reserved range, and no reference to the memory in it exists.
        let unmapped = unsafe { rustix::mm::munmap(self.reserved.as_ptr(), self.len + HUGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

// SAFETY: the value owns the mapping alone.
unsafe impl Send for Region {}
// SAFETY: through a shared reference it is only read, a word at a time.
unsafe impl Sync for Region {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_shared_region_is_its_file_and_a_private_one_is_until_it_is_written() {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(&[7; 8192]).expect("room for it");
        let mut private = Region::private(&file, 8192).expect("it is mapped");
        let mut shared = Region::shared(&file, 8192).expect("it is mapped");
        assert!(shared.address().is_multiple_of(HUGE_BYTES));
        private.set_word(0, 1);
        shared.fill(4096, &[9; 4096]);
        assert_eq!([private.word(0), shared.word(0)], [1, u64::from_ne_bytes([7; 8])]);
        assert_eq!([private.word(4096), shared.word(8184)], [u64::from_ne_bytes([9; 8]); 2]);
        let mut bytes = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut bytes)).expect("it is read");
        assert_eq!(bytes, [[7; 4096], [9; 4096]].concat());
    }

    #[test]
    fn anonymous_memory_is_zero_and_has_an_end() {
        let mut region = Region::anonymous(3 << 20, PageKind::Huge).expect("there is memory");
        region.set_word((3 << 20) - 8, 5);
        assert_eq!([region.word(0), region.word((3 << 20) - 8)], [0, 5]);
        let past = std::panic::catch_unwind(|| region.word(3 << 20));
        assert!(past.is_err());
    }
}
