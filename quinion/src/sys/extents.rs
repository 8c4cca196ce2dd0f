//! Extents: whether a file has room on its device that nothing was written to.
//!
//! Such a part (`fallocate`) reads as zeros, and whether it is a hole or data to `SEEK_HOLE` and `SEEK_DATA` depends on
//! what the kernel's page cache holds of it. A program that reads the file past that cache is told otherwise than one
//! that does not.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{SeekFrom, seek};

/// Extents that one question is about.
const EXTENTS: usize = 64;
/// Questions about one file. A file of more extents than this is taken for one that has such a part.
const QUESTIONS: usize = 64;
const UNWRITTEN: u32 = 0x800;
const LAST: u32 = 1;

/// The kernel's `struct fiemap`, with the extents behind it.
#[repr(C)]
struct Map {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    capacity: u32,
    reserved: u32,
    extents: [Extent; EXTENTS],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    rest: [u32; 3],
}

const _: () = assert!(size_of::<Extent>() == 56 && size_of::<Map>() == 32 + EXTENTS * 56);

/// Whether `file`, of `bytes` bytes, has such a part. Moves the offset of `file`'s description.
///
/// # Errors
/// The file system does not say.
pub fn has_unwritten(file: BorrowedFd<'_>, bytes: u64) -> io::Result<bool> {
    if bytes == 0 || seek(file, SeekFrom::Hole(0))? >= bytes {
        return Ok(false);
    }
    let mut start = 0;
    for _ in 0..QUESTIONS {
        let map = ask(file, start, bytes - start)?;
        let extents = &map.extents[..(map.mapped as usize).min(EXTENTS)];
        if extents.iter().any(|extent| extent.flags & UNWRITTEN != 0) {
            return Ok(true);
        }
        let Some(last) = extents.last() else { return Ok(false) };
        let end = last.logical.saturating_add(last.length);
        if last.flags & LAST != 0 || end >= bytes || end <= start {
            return Ok(false);
        }
        start = end;
    }
    Ok(true)
}

fn ask(file: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<Map> {
    const REQUEST: libc::c_ulong = 0xc020_660b;
    let extents = [Extent::default(); EXTENTS];
    let mut map = Map { start, length, flags: 0, mapped: 0, capacity: EXTENTS as u32, reserved: 0, extents };
    // SAFETY: the kernel reads the head and writes it and at most `capacity` extents, which are there.
    match unsafe { libc::ioctl(file.as_raw_fd(), REQUEST as _, &raw mut map) } {
        0 => Ok(map),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_part_that_was_only_allocated_is_found_and_a_hole_is_none() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        assert!(!has_unwritten(file.as_fd(), 1 << 20).unwrap_or(false), "a hole");
        if let Err(error) =
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 1 << 16, 1 << 16)
        {
            println!("SKIPPED: nothing can be allocated here: {error}");
            return;
        }
        match has_unwritten(file.as_fd(), 1 << 20) {
            Ok(found) => assert!(found),
            Err(error) => println!("SKIPPED: the file system does not say: {error}"),
        }
    }
}
