//! Region: memory as a virtual machine has it, of which pages come one by one, from somebody who may be slow.
//!
//! ```text
//!   reserved    |....[ 2 MiB | 2 MiB | 2 MiB ]......|     the mapping begins where a large page may
//!                     ^ anonymous, or a file's: shared, or private and copied where it is written
//! ```
//!
//! No slice of it is ever lent: a page that is absent is brought by the one that answers for it (`uffd`), and what a
//! file holds may be changed through another mapping. So each access is a copy, or one word that is read or written
//! for what it says and not for what the compiler would make of it.
//!
//! Not an invariant: that an access returns soon. One of a page that nobody brings waits for ever.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::HUGE_BYTES;

/// In which pages the kernel is asked to keep memory that is no file's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageKind {
    /// Of 4 KiB.
    Small,
    /// Of 2 MiB, where it has such.
    Huge,
}

/// Memory that begins at a multiple of 2 MiB.
pub struct Region {
    reserved: NonNull<libc::c_void>,
    start: NonNull<u8>,
    len: usize,
}

impl Region {
    /// `len` bytes that are nobody else's, zeros at first.
    pub fn anonymous(len: usize, pages: PageKind) -> io::Result<Self> {
        let region = Self::reserved(len)?;
        let (flags, protection) = (MapFlags::PRIVATE | MapFlags::FIXED, ProtFlags::READ | ProtFlags::WRITE);
        let at = region.start.as_ptr().cast();
        // SAFETY: the range is reserved by us, and nobody was given its address yet.
        unsafe { rustix::mm::mmap_anonymous(at, len, protection, flags)? };
        region.advise(match pages {
            PageKind::Small => Advice::LinuxNoHugepage,
            PageKind::Huge => Advice::LinuxHugepage,
        });
        Ok(region)
    }

    /// The first `len` bytes of `file`, as everybody who maps it has them.
    pub fn shared(file: impl AsFd, len: usize) -> io::Result<Self> {
        Self::mapped(file, len, MapFlags::SHARED)
    }

    /// The same, but for what is written here.
    pub fn private(file: impl AsFd, len: usize) -> io::Result<Self> {
        Self::mapped(file, len, MapFlags::PRIVATE)
    }

    fn mapped(file: impl AsFd, len: usize, kind: MapFlags) -> io::Result<Self> {
        let region = Self::reserved(len)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let at = region.start.as_ptr().cast();
        // SAFETY: the range is reserved by us, and nobody was given its address yet.
        unsafe { rustix::mm::mmap(at, len, protection, kind | MapFlags::FIXED, file.as_fd(), 0)? };
        Ok(region)
    }

    /// Addresses, and nothing behind them.
    fn reserved(len: usize) -> io::Result<Self> {
        let whole = len + HUGE_BYTES;
        // SAFETY: the kernel chooses an address that is free.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE)?
        };
        let reserved = NonNull::new(reserved).expect("nothing is mapped at 0");
        let bytes = reserved.cast::<u8>();
        // SAFETY: so many bytes and a large page are reserved, and less than one is skipped.
        let start = unsafe { bytes.add(bytes.as_ptr().align_offset(HUGE_BYTES)) };
        Ok(Self { reserved, start, len })
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: a hint about memory that is ours; a kernel that cannot heed it gives other pages.
        let _ = unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len, advice) };
    }

    /// Each fault brings the page that was asked for, and no neighbours.
    pub fn read_anywhere(&self) {
        self.advise(Advice::Random);
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where it begins, for the one that answers for its pages.
    pub fn address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{at} is outside of {}", self.len);
        // SAFETY: it lies inside of what is mapped.
        unsafe { self.start.as_ptr().add(at) }
    }

    /// Writes `bytes` to `at`.
    pub fn fill(&mut self, at: usize, bytes: &[u8]) {
        let to = self.at(at, bytes.len());
        // SAFETY: so many bytes are mapped there, which nobody borrows.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// The word at `at`, a multiple of 8.
    #[inline]
    pub fn word(&self, at: usize) -> u64 {
        assert!(at.is_multiple_of(8));
        let from = self.at(at, 8).cast::<u64>();
        // SAFETY: 8 aligned bytes are mapped there; whatever they are is a number.
        unsafe { from.read_volatile() }
    }

    /// Writes a word to `at`, a multiple of 8.
    #[inline]
    pub fn set_word(&mut self, at: usize, word: u64) {
        assert!(at.is_multiple_of(8));
        let to = self.at(at, 8).cast::<u64>();
        // SAFETY: 8 aligned bytes are mapped there, which nobody borrows.
        unsafe { to.write_volatile(word) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this is what was reserved, and what is mapped in it was lent to nobody.
        let unmapped = unsafe { rustix::mm::munmap(self.reserved.as_ptr(), self.len + HUGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

// SAFETY: what is mapped belongs to the value alone.
unsafe impl Send for Region {}
// SAFETY: shared, it is only read, a word at a time.
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
