//! Files: calls that ask about files and descriptors, read them, open them and close them.
//!
//! ```text
//!   fstat, stat, stat_at   what a file is --> Stat: which one, how large, and when it was changed
//!   pread, pread_nowait    its bytes at a position; no descriptor's offset moves
//!   lseek, fcntl           what a descriptor is, and where it stands
//!   open, close            the library's own descriptors, for a moment
//! ```
//!
//! A path is a string that ends with a zero. A program's is handed on as it is: the kernel reports an address that
//! cannot be read as an error.

use quinion_view::units::FileId;
use quinion_view::viewer::sys::{Errno, call, result};

use super::number;

pub const O_ACCMODE: i32 = 3;
pub const O_RDWR: i32 = 2;
pub const O_WRONLY: i32 = 1;
pub const O_CREAT: i32 = 0o100;
pub const O_EXCL: i32 = 0o200;
pub const O_TRUNC: i32 = 0o1000;
pub const O_APPEND: i32 = 0o2000;
pub const O_DIRECT: i32 = 0o40000;
pub const O_DIRECTORY: i32 = 0o200000;
pub const O_CLOEXEC: i32 = 0o2000000;
pub const O_NOCTTY: i32 = 0o400;
pub const O_NONBLOCK: i32 = 0o4000;
pub const O_PATH: i32 = 0o10000000;
pub const O_TMPFILE_BIT: i32 = 0o20000000;
pub const AT_FDCWD: i32 = -100;
pub const SEEK_SET: i32 = 0;
pub const SEEK_CUR: i32 = 1;
pub const F_GETFL: usize = 3;
pub const ENFILE: i32 = 23;
pub const EMFILE: i32 = 24;
pub const F_GET_SEALS: usize = 1034;
pub const F_SEAL_SHRINK: usize = 2;

#[derive(Clone, Copy)]
pub struct Stat {
    pub id: FileId,
    pub links: u64,
    pub mode: u32,
    pub size: i64,
    /// When it was last written, and when anything of it was last changed: seconds and nanoseconds.
    pub times: [i64; 4],
}

impl Stat {
    /// The file's times and size in one word that is not 0; two that differ have one word once in 2^64 times.
    pub fn digest(&self) -> u64 {
        let [a, b, c, d] = self.times;
        let digest = [self.size, a, b, c, d].iter().fold(0x9e37_79b9_7f4a_7c15u64, |sum, &part| {
            let mixed = (sum ^ part as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
            mixed ^ (mixed >> 32)
        });
        digest | 1
    }

    /// Whether its last change is so long ago that a change from now on has other times. `false` if that is in the
    /// future.
    pub fn is_settled(&self) -> bool {
        /// Longer than a step of the kernel's coarse clock, from which files get their times.
        const STEP: i64 = 50_000_000;
        /// Like `STEP`, for file systems that keep whole seconds, or two of them.
        const STEP_OF_SECONDS: i64 = 2_500_000_000;
        let [written, written_part, _, changed_part] = self.times;
        let step = if changed_part == 0 { STEP_OF_SECONDS } else { STEP };
        let last = nanos([written, written_part]).max(self.changed_nanos());
        now_nanos().is_some_and(|now| now.saturating_sub(last) > step)
    }

    /// When its bytes or what is said of it last changed, in nanoseconds since 1970.
    pub fn changed_nanos(&self) -> i64 {
        let [.., seconds, part] = self.times;
        nanos([seconds, part])
    }
    pub fn is_regular(&self) -> bool {
        self.mode & 0o170000 == 0o100000
    }
}

#[repr(C)]
struct RawStat {
    device: u64,
    inode: u64,
    links: u64,
    mode: u32,
    user: u32,
    group: u32,
    pad: u32,
    special: u64,
    size: i64,
    blocks: [u64; 2],
    accessed: [i64; 2],
    times: [i64; 4],
    rest: [u64; 3],
}

const _: () = assert!(size_of::<RawStat>() == 144);

fn stat_by(ask: impl FnOnce(usize) -> isize) -> Option<Stat> {
    let mut raw = core::mem::MaybeUninit::<RawStat>::zeroed();
    result(ask(raw.as_mut_ptr() as usize)).ok()?;
    // SAFETY: zeroed and then filled; every pattern is a value.
    let raw = unsafe { raw.assume_init() };
    let RawStat { device, inode, links, mode, size, times, .. } = raw;
    Some(Stat { id: FileId { device, inode }, links, mode, size, times })
}

pub fn now_nanos() -> Option<i64> {
    const CLOCK_REALTIME_COARSE: usize = 5;
    let mut now = [0i64; 2];
    // SAFETY: the kernel's structure is two numbers of 64 bits.
    let answer = unsafe {
        call(number::CLOCK_GETTIME, [CLOCK_REALTIME_COARSE, now.as_mut_ptr() as usize, 0, 0, 0, 0])
    };
    result(answer).ok().map(|_| nanos(now))
}

fn nanos([seconds, part]: [i64; 2]) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(part)
}

/// Flag of `preadv2`: what it would have to wait for is not read.
pub const RWF_NOWAIT: i32 = 8;

/// Reads at `position`; the descriptor's offset stays.
///
/// # Safety
/// `to` is valid for writes of `len` bytes.
pub unsafe fn pread(fd: i32, to: *mut u8, len: usize, position: u64) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    result(unsafe { call(number::PREAD64, [fd as usize, to as usize, len, position as usize, 0, 0]) })
}

/// As [`pread`], of what can be had without waiting; `Errno::AGAIN` if that is nothing. The kernel begins to read what
/// is missing.
///
/// # Safety
/// As [`pread`].
pub unsafe fn pread_nowait(fd: i32, to: *mut u8, len: usize, position: u64) -> Result<usize, Errno> {
    let part = [to as usize, len];
    let args = [fd as usize, part.as_ptr() as usize, 1, position as usize, 0, RWF_NOWAIT as usize];
    // SAFETY: the caller's promise; the part lives longer than the call.
    result(unsafe { call(number::PREADV2, args) })
}

/// Whether a read of `fd` may have these flags: the kernel is asked for a byte behind all that files may have.
pub fn accepts_flags(fd: i32, flags: i32) -> bool {
    const BEHIND: usize = (i64::MAX - 4096) as usize;
    let mut byte = 0u8;
    let part = [&raw mut byte as usize, 1];
    let args = [fd as usize, part.as_ptr() as usize, 1, BEHIND, 0, flags as usize];
    // SAFETY: one byte, which may be written.
    let answer = result(unsafe { call(number::PREADV2, args) });
    matches!(answer, Ok(_) | Err(Errno::AGAIN))
}

pub fn fstat(fd: i32) -> Option<Stat> {
    // SAFETY: the kernel fills the buffer, which has its size.
    stat_by(|to| unsafe { call(number::FSTAT, [fd as usize, to, 0, 0, 0, 0]) })
}

pub fn stat(path: usize) -> Option<Stat> {
    // SAFETY: as above.
    stat_by(|to| unsafe { call(number::STAT, [path, to, 0, 0, 0, 0]) })
}

pub fn stat_at(at: i32, path: usize) -> Option<Stat> {
    // SAFETY: as above.
    stat_by(|to| unsafe { call(number::NEWFSTATAT, [at as usize, path, to, 0, 0, 0]) })
}

/// As [`stat_at`], of a link itself.
pub fn stat_at_itself(at: i32, path: usize) -> Option<Stat> {
    const NOFOLLOW: usize = 0x100;
    // SAFETY: as above.
    stat_by(|to| unsafe { call(number::NEWFSTATAT, [at as usize, path, to, NOFOLLOW, 0, 0]) })
}

pub fn file_system(fd: i32) -> Option<u64> {
    let mut raw = [0u64; 15];
    // SAFETY: the kernel's structure has 120 bytes here, which is what `raw` has.
    result(unsafe { call(number::FSTATFS, [fd as usize, raw.as_mut_ptr() as usize, 0, 0, 0, 0]) }).ok()?;
    Some(raw[0])
}

/// Moves the kernel's offset of `fd`; where it is now.
pub fn lseek(fd: i32, offset: i64, whence: i32) -> Result<i64, Errno> {
    // SAFETY: numbers only.
    result(unsafe { call(number::LSEEK, [fd as usize, offset as usize, whence as usize, 0, 0, 0]) })
        .map(|n| n as i64)
}

pub fn fcntl(fd: i32, command: usize) -> Result<usize, Errno> {
    // SAFETY: numbers only.
    result(unsafe { call(number::FCNTL, [fd as usize, command, 0, 0, 0, 0]) })
}

/// Opens `path`, which ends with a zero.
pub fn open(path: &[u8], flags: i32) -> Result<i32, Errno> {
    debug_assert!(path.last() == Some(&0));
    let args = [AT_FDCWD as usize, path.as_ptr() as usize, (flags | O_CLOEXEC) as usize, 0, 0, 0];
    // SAFETY: the path is a string that ends.
    result(unsafe { call(number::OPENAT, args) }).map(|n| n as i32)
}

pub fn close(fd: i32) {
    // SAFETY: a number only.
    let _ = unsafe { call(number::CLOSE, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// The bytes of entries that were read, 0 at the end or on an error.
pub fn directory_entries(directory: i32, to: &mut [u64; 128]) -> usize {
    let args = [directory as usize, to.as_mut_ptr() as usize, size_of_val(to), 0, 0, 0];
    // SAFETY: the kernel writes at most the size it is told of.
    result(unsafe { call(number::GETDENTS64, args) }).unwrap_or(0)
}

pub fn entry_names(entries: &[u64; 128], bytes: usize, mut tell: impl FnMut(&[u8])) {
    const LENGTH_AT: usize = 16;
    const NAME_AT: usize = 19;
    // SAFETY: the same memory, as bytes.
    let all = unsafe { core::slice::from_raw_parts(entries.as_ptr().cast::<u8>(), size_of_val(entries)) };
    let mut rest = &all[..bytes.min(all.len())];
    while rest.len() > NAME_AT {
        let length = usize::from(u16::from_ne_bytes([rest[LENGTH_AT], rest[LENGTH_AT + 1]]));
        if length <= NAME_AT || length > rest.len() {
            return;
        }
        let name = &rest[NAME_AT..length];
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        tell(&name[..end]);
        rest = &rest[length..];
    }
}
