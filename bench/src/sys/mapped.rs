//! Mapped: a file in our address space, as the kernel's mmap gives it.
//!
//! It is the peer at its best: the kernel is told that the mapping will be read from its first byte to its
//! last, or anywhere, as it cannot be told by touching pages.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// The first bytes of a file, mapped.
pub struct Mapped {
    start: NonNull<u8>,
    len: usize,
}

impl Mapped {
    /// Maps `len` bytes of `file`, at least one, which nobody changes or cuts off while this lives, to be read from
    /// the first to the last.
    pub fn new(file: &File, len: usize) -> io::Result<Self> {
        Self::advised(file, len, Advice::Sequential)
    }

    /// The same, to be read anywhere: what is not asked for is not read.
    pub fn at_random(file: &File, len: usize) -> io::Result<Self> {
        Self::advised(file, len, Advice::Random)
    }

    fn advised(file: &File, len: usize, advice: Advice) -> io::Result<Self> {
        // SAFETY: the kernel chooses an address that is free.
        let start = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file.as_fd(), 0)?
        };
        // SAFETY: a hint about a mapping that is ours.
        let _ = unsafe { rustix::mm::madvise(start, len, advice) };
        Ok(Self { start: NonNull::new(start.cast()).expect("nothing is mapped at 0"), len })
    }
}

impl Deref for Mapped {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes from there are mapped, and of a file that does not change.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and what was lent of it is given back.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

// SAFETY: what is mapped belongs to the value alone, and is only read.
unsafe impl Send for Mapped {}
// SAFETY: as above; reads by several threads do not disturb each other.
unsafe impl Sync for Mapped {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_is_in_the_file_is_in_the_mapping() {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(&[7; 5000]).expect("room for it");
        assert_eq!(*Mapped::new(&file, 5000).expect("it is mapped"), [7; 5000]);
        assert_eq!(*Mapped::at_random(&file, 5000).expect("it is mapped"), [7; 5000]);
        assert!(Mapped::new(&file, 0).is_err());
    }
}
