//! By C: a file in a cache, by the functions of `quinion.h`.
//!
//! They are called by pointers that the compiler does not know, as those of a shared library are: nothing of them
//! becomes a part of the caller.

use std::ffi::{CStr, CString, c_void};
use std::hint::black_box;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use quinion_capi::{
    qn_cache, qn_cache_close, qn_cache_open, qn_cache_options, qn_close, qn_error_message, qn_file, qn_open,
    qn_pread,
};

type Pread = unsafe extern "C" fn(*const qn_file, *mut c_void, usize, u64) -> i64;

/// A file that is open to be read, and the cache that has it.
pub struct FileByC {
    cache: *mut qn_cache,
    file: *mut qn_file,
    pread: Pread,
}

impl FileByC {
    /// Opens the file at `path` in a cache of its own, of `memory` bytes, all else as it is by default.
    pub fn open(path: &Path, memory: u64) -> io::Result<Self> {
        // SAFETY: all bytes being zero is a value of it, and stands for the defaults.
        let mut options: qn_cache_options = unsafe { std::mem::zeroed() };
        (options.size, options.memory) = (size_of::<qn_cache_options>(), memory);
        let path = CString::new(path.as_os_str().as_bytes())?;
        let mut opened = Self { cache: ptr::null_mut(), file: ptr::null_mut(), pread: black_box(qn_pread) };
        // SAFETY: a struct that says its size, without texts; and a place for the answer.
        checked(unsafe { qn_cache_open(&raw const options, &raw mut opened.cache) }.into())?;
        // SAFETY: an open cache, a text that ends with 0, no options, a place for the answer.
        checked(unsafe { qn_open(opened.cache, path.as_ptr(), ptr::null(), &raw mut opened.file) }.into())?;
        Ok(opened)
    }

    /// Reads at byte `position`, and returns how many bytes came: fewer than asked for only at the end of the file.
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        // SAFETY: an open file, and room for as many bytes as the call is told of.
        checked(unsafe { (self.pread)(self.file, buffer.as_mut_ptr().cast(), buffer.len(), position) })
    }
}

impl Drop for FileByC {
    fn drop(&mut self) {
        // Of a file that did not open there is no handle. Nothing was written that a close could lose.
        if !self.file.is_null() {
            // SAFETY: open, and not used any more.
            unsafe { qn_close(self.file) };
        }
        if !self.cache.is_null() {
            // SAFETY: as above.
            unsafe { qn_cache_close(self.cache) };
        }
    }
}

fn checked(answer: i64) -> io::Result<usize> {
    usize::try_from(answer).map_err(|_| {
        // SAFETY: a text that ends with 0, of this thread, until its next call.
        let text = unsafe { CStr::from_ptr(qn_error_message()) };
        io::Error::other(text.to_string_lossy().into_owned())
    })
}
