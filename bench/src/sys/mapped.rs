//! Mapped: a file in this process's address space, as the kernel's mmap gives it.
//!
//! It is the peer at its best: `madvise` tells the kernel that the mapping will be read from its first byte to its
//! last, or at random, which touching pages cannot tell.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

pub struct Mapped {
    start: NonNull<u8>,
    len: usize,
}

impl Mapped {
    /// Maps `len` bytes of `file`, at least one, to be read from the first to the last. No process may change or
    /// truncate them while this value lives.
    pub fn new(file: &File, len: usize) -> io::Result<Self> {
        Self::advised(file, len, Advice::Sequential)
    }

    /// As [`Self::new`], but to be read at random: the kernel reads nothing ahead.
    pub fn at_random(file: &File, len: usize) -> io::Result<Self> {
        Self::advised(file, len, Advice::Random)
    }

    fn advised(file: &File, len: usize, advice: Advice) -> io::Result<Self> {
        // SAFETY: the kernel chooses an unused address.
        let start = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file.as_fd(), 0)?
        };
        // SAFETY: a hint about a mapping of this process.
        let _ = unsafe { rustix::mm::madvise(start, len, advice) };
        Ok(Self { start: NonNull::new(start.cast()).expect("nothing is mapped at 0"), len })
    }
}

impl Deref for Mapped {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped there, of a file that does not change.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and all borrows of it have ended.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

// SAFETY: the value owns the mapping alone, and only reads it.
unsafe impl Send for Mapped {}
// SAFETY: as above; several threads may read at the same time.
unsafe impl Sync for Mapped {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_mapping_has_the_bytes_of_the_file() {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(&[7; 5000]).expect("room for it");
        assert_eq!(*Mapped::new(&file, 5000).expect("it is mapped"), [7; 5000]);
        assert_eq!(*Mapped::at_random(&file, 5000).expect("it is mapped"), [7; 5000]);
        assert!(Mapped::new(&file, 0).is_err());
    }
}
