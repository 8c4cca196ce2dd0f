//! Memory: calls that map, change and unmap this process's memory, or copy to it and from it.
//!
//! Mappings of files are shared and never larger than the file. A cover takes the place of what is mapped in one step,
//! so that a thread that reads there finds either. Copies by the kernel ([`read_memory`], [`overwrite`]) are for memory
//! that other code may use, change or unmap: they fail where a load would fault.

use core::ptr::NonNull;

use quinion_view::units::EXTENT_SIZE;
use quinion_view::viewer::sys::{Errno, call, result};

use super::files::{close, open};
use super::identity::process;
use super::number;

/// The kernel's PROT bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read = 1,
    ReadWrite = 3,
}

pub const READ_WRITE: usize = 3;

pub const READ_EXECUTE: usize = 5;

const SHARED: usize = 1;
const PRIVATE: usize = 2;
const FIXED: usize = 0x10;
const ANONYMOUS: usize = 0x20;
const NORESERVE: usize = 0x4000;

pub fn map_private(bytes: usize) -> Option<NonNull<u8>> {
    map_at(None, bytes, READ_WRITE, PRIVATE | ANONYMOUS, None)
}

/// Maps all `bytes` bytes of `fd`, shared; large ones at a multiple of 2 MiB, where the kernel can use large pages.
pub fn map_file(fd: i32, bytes: usize, access: Access) -> Option<NonNull<u8>> {
    if bytes < EXTENT_SIZE {
        return map_at(None, bytes, access as usize, SHARED, Some(fd));
    }
    let reserved = map_at(None, bytes + EXTENT_SIZE, 0, PRIVATE | ANONYMOUS | NORESERVE, None)?;
    let (start, end) = (reserved.as_ptr() as usize, reserved.as_ptr() as usize + bytes + EXTENT_SIZE);
    let base = start.next_multiple_of(EXTENT_SIZE);
    let mapped = map_at(Some(base), bytes, access as usize, SHARED | FIXED, Some(fd));
    if mapped.is_none() {
        unmap(reserved, bytes + EXTENT_SIZE);
        return None;
    }
    for (from, to) in [(start, base), ((base + bytes).next_multiple_of(4096), end)] {
        if from < to {
            unmap(NonNull::new(from as *mut u8)?, to - from);
        }
    }
    mapped
}

fn map_at(
    at: Option<usize>,
    bytes: usize,
    protection: usize,
    flags: usize,
    fd: Option<i32>,
) -> Option<NonNull<u8>> {
    let args = [at.unwrap_or(0), bytes, protection, flags, fd.unwrap_or(-1) as usize, 0];
    // SAFETY: a new mapping at an address of the kernel's choice, or over a reservation of the caller's.
    let address = result(unsafe { call(number::MMAP, args) }).ok()?;
    NonNull::new(address as *mut u8)
}

/// Puts zeros that take no memory in the place of what is mapped there, in one step.
pub fn cover(base: NonNull<u8>, bytes: usize, access: Access) -> bool {
    let flags = PRIVATE | ANONYMOUS | FIXED | NORESERVE;
    map_at(Some(base.as_ptr() as usize), bytes, access as usize, flags, None).is_some()
}

pub fn map_where_nothing_is(address: usize, bytes: usize) -> Result<Option<NonNull<u8>>, Errno> {
    const FIXED_NOREPLACE: usize = 0x10_0000;
    const EXIST: Errno = Errno(17);
    let flags = PRIVATE | ANONYMOUS | NORESERVE | FIXED_NOREPLACE;
    let args = [address, bytes, READ_WRITE, flags, usize::MAX, 0];
    // SAFETY: a new mapping where there is none.
    match result(unsafe { call(number::MMAP, args) }) {
        Ok(mapped) if mapped == address => Ok(NonNull::new(address as *mut u8)),
        // A kernel before 4.17 takes the address for a hint.
        Ok(elsewhere) => {
            NonNull::new(elsewhere as *mut u8).into_iter().for_each(|base| unmap(base, bytes));
            Ok(None)
        }
        Err(EXIST) => Ok(None),
        Err(error) => Err(error),
    }
}

pub fn map_code_again(address: usize, bytes: usize, path: &[u8], in_file: u64) -> bool {
    let Ok(fd) = open(path, 0) else { return false };
    let args = [address, bytes, READ_EXECUTE, PRIVATE | FIXED, fd as usize, in_file as usize];
    // SAFETY: the same file's same bytes were mapped there before.
    let mapped = result(unsafe { call(number::MMAP, args) }).is_ok();
    close(fd);
    mapped
}

pub fn protect(address: usize, bytes: usize, protection: usize) -> Result<(), Errno> {
    // SAFETY: the bytes stay; the caller guarantees that they are not used in another way meanwhile.
    result(unsafe { call(number::MPROTECT, [address, bytes, protection, 0, 0, 0]) }).map(drop)
}

pub fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller is the only one who knew the mapping.
    let _ = unsafe { call(number::MUNMAP, [base.as_ptr() as usize, bytes, 0, 0, 0, 0]) };
}

pub fn keep_from_children(base: NonNull<u8>, bytes: usize) -> Result<(), Errno> {
    const MADV_DONTFORK: usize = 10;
    // SAFETY: the library's own memory.
    result(unsafe { call(number::MADVISE, [base.as_ptr() as usize, bytes, MADV_DONTFORK, 0, 0, 0]) })
        .map(drop)
}

pub fn keep_from_cores(base: NonNull<u8>, bytes: usize) {
    const MADV_DONTDUMP: usize = 16;
    // SAFETY: the library's own memory.
    let _ = unsafe { call(number::MADVISE, [base.as_ptr() as usize, bytes, MADV_DONTDUMP, 0, 0, 0]) };
}

pub fn wipe_on_fork(base: NonNull<u8>, bytes: usize) -> Result<(), Errno> {
    const MADV_WIPEONFORK: usize = 18;
    // SAFETY: the library's own private memory.
    result(unsafe { call(number::MADVISE, [base.as_ptr() as usize, bytes, MADV_WIPEONFORK, 0, 0, 0]) })
        .map(drop)
}

/// Overwrites memory of this process, which other code may use: if it cannot be written nothing happens.
pub fn overwrite(at: *const u8, bytes: &[u8]) {
    let (ours, theirs) = ([bytes.as_ptr() as usize, bytes.len()], [at as usize, bytes.len()]);
    let [ours, theirs] = [&ours, &theirs].map(|part| core::ptr::from_ref(part) as usize);
    // SAFETY: the kernel copies from what was lent, and looks whether it may write where.
    let _ = unsafe { call(number::PROCESS_VM_WRITEV, [process() as usize, ours, 1, theirs, 1, 0]) };
}

/// Reads memory of this process, which other code may use: how much from the first byte on. `parts` are addresses and
/// lengths; one that cannot be read whole is not read at all.
pub fn read_memory(parts: &[[usize; 2]], to: &mut [u8]) -> usize {
    let ours = [to.as_mut_ptr() as usize, to.len()];
    let args = [process() as usize, (&raw const ours) as usize, 1, parts.as_ptr() as usize, parts.len(), 0];
    // SAFETY: the kernel copies to what was lent, and looks whether it may read from where.
    result(unsafe { call(number::PROCESS_VM_READV, args) }).unwrap_or(0)
}
