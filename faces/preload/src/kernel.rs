//! Kernel: the system calls the interposer makes for itself, past the C library and past its own wrappers.
//!
//! None of them touches `errno`: a call that is served must leave it as it was.

use quinion_view::units::EXTENT_SIZE;
use quinion_view::viewer::handshake::{DESCRIPTORS_MAX, JoinReply, WELCOME_BYTES};
pub use quinion_view::viewer::sys::SignalsHeld;
use quinion_view::viewer::sys::{Errno, call, clock_millis, result};

use crate::thread_list::{BlockedBy, ThreadList, blocked_by};

/// Numbers of system calls, on x86-64.
#[allow(missing_docs, reason = "the kernel's names")]
pub mod number {
    pub const READ: usize = 0;
    pub const OPEN: usize = 2;
    pub const CLOSE: usize = 3;
    pub const STAT: usize = 4;
    pub const FSTAT: usize = 5;
    pub const LSEEK: usize = 8;
    pub const MMAP: usize = 9;
    pub const MPROTECT: usize = 10;
    pub const MUNMAP: usize = 11;
    pub const RT_SIGACTION: usize = 13;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const IOCTL: usize = 16;
    pub const PREAD64: usize = 17;
    pub const READV: usize = 19;
    pub const SCHED_YIELD: usize = 24;
    pub const MADVISE: usize = 28;
    pub const DUP: usize = 32;
    pub const DUP2: usize = 33;
    pub const NANOSLEEP: usize = 35;
    pub const GETPID: usize = 39;
    pub const SENDFILE: usize = 40;
    pub const POLL: usize = 7;
    pub const SOCKET: usize = 41;
    pub const CONNECT: usize = 42;
    pub const GETSOCKOPT: usize = 55;
    pub const SENDMSG: usize = 46;
    pub const RECVMSG: usize = 47;
    pub const CLONE: usize = 56;
    pub const FORK: usize = 57;
    pub const VFORK: usize = 58;
    pub const EXECVE: usize = 59;
    pub const FCNTL: usize = 72;
    pub const FLOCK: usize = 73;
    pub const READLINK: usize = 89;
    pub const UNLINK: usize = 87;
    pub const UNLINKAT: usize = 263;
    pub const RENAME: usize = 82;
    pub const RENAMEAT: usize = 264;
    pub const RENAMEAT2: usize = 316;
    pub const TRUNCATE: usize = 76;
    pub const CREAT: usize = 85;
    pub const GETTID: usize = 186;
    pub const IO_SUBMIT: usize = 209;
    pub const GETDENTS64: usize = 217;
    pub const CLOCK_GETTIME: usize = 228;
    pub const OPENAT: usize = 257;
    pub const UNSHARE: usize = 272;
    pub const PRCTL: usize = 157;
    pub const SECCOMP: usize = 317;
    pub const SPLICE: usize = 275;
    pub const DUP3: usize = 292;
    pub const PREADV: usize = 295;
    pub const PREADV2: usize = 327;
    pub const NEWFSTATAT: usize = 262;
    pub const PRLIMIT64: usize = 302;
    pub const MLOCKALL: usize = 151;
    pub const SETRLIMIT: usize = 160;
    pub const OPEN_BY_HANDLE_AT: usize = 304;
    pub const SENDMMSG: usize = 307;
    pub const EXECVEAT: usize = 322;
    pub const RT_TGSIGQUEUEINFO: usize = 297;
    pub const PROCESS_VM_READV: usize = 310;
    pub const PROCESS_VM_WRITEV: usize = 311;
    pub const COPY_FILE_RANGE: usize = 326;
    pub const IO_URING_SETUP: usize = 425;
    pub const CLONE3: usize = 435;
    pub const CLOSE_RANGE: usize = 436;
    pub const OPENAT2: usize = 437;
    pub const PIDFD_GETFD: usize = 438;
    pub const FSTATFS: usize = 138;
    pub const GETEUID: usize = 107;
    pub const UMOUNT2: usize = 166;
    pub const INOTIFY_INIT: usize = 253;
    pub const INOTIFY_INIT1: usize = 294;
    pub const INOTIFY_ADD_WATCH: usize = 254;
    pub const FANOTIFY_INIT: usize = 300;
    pub const FANOTIFY_MARK: usize = 301;
    pub const SETUID: usize = 105;
    pub const SETGID: usize = 106;
    pub const SETREUID: usize = 113;
    pub const SETREGID: usize = 114;
    pub const SETGROUPS: usize = 116;
    pub const SETRESUID: usize = 117;
    pub const SETRESGID: usize = 119;
    pub const SETFSUID: usize = 122;
    pub const SETFSGID: usize = 123;
    pub const CAPSET: usize = 126;
    pub const PIVOT_ROOT: usize = 155;
    pub const CHROOT: usize = 161;
    pub const SETNS: usize = 308;
    pub const LANDLOCK_RESTRICT_SELF: usize = 446;
}

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

/// What the kernel says of a file.
#[derive(Clone, Copy)]
pub struct Stat {
    pub device: u64,
    pub inode: u64,
    pub links: u64,
    pub mode: u32,
    pub size: i64,
    /// When it was last written, and when anything of it was last changed: seconds and nanoseconds.
    pub times: [i64; 4],
}

impl Stat {
    /// Its times and size in one word that is not 0: two that differ have two words, but for once in 2^64 times.
    pub fn digest(&self) -> u64 {
        let [a, b, c, d] = self.times;
        let digest = [self.size, a, b, c, d].iter().fold(0x9e37_79b9_7f4a_7c15u64, |sum, &part| {
            let mixed = (sum ^ part as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
            mixed ^ (mixed >> 32)
        });
        digest | 1
    }

    /// Whether it is so long since it was changed that a change from now on has other times. `false` if the clock
    /// says it was changed in the future.
    pub fn is_settled(&self) -> bool {
        /// Longer than a step of the kernel's coarse clock, from which files get their times.
        const STEP: i64 = 50_000_000;
        /// The same for file systems that keep whole seconds, or two of them.
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
    /// Whether it is a regular file.
    pub fn is_regular(&self) -> bool {
        self.mode & 0o170000 == 0o100000
    }
}

/// The kernel's `struct stat` on x86-64.
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
    Some(Stat { device, inode, links, mode, size, times })
}

/// The time by which files are dated, as of its last step, in nanoseconds since 1970.
pub fn now_nanos() -> Option<i64> {
    const CLOCK_REALTIME_COARSE: usize = 5;
    let mut now = [0i64; 2];
    // SAFETY: the kernel's structure is two numbers of 64 bits.
    let answer = unsafe {
        call(number::CLOCK_GETTIME, [CLOCK_REALTIME_COARSE, now.as_mut_ptr() as usize, 0, 0, 0, 0])
    };
    result(answer).ok().map(|_| nanos(now))
}

/// Seconds and nanoseconds, in nanoseconds.
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

/// What is behind `fd`.
pub fn fstat(fd: i32) -> Option<Stat> {
    // SAFETY: the kernel fills the buffer, which has its size.
    stat_by(|to| unsafe { call(number::FSTAT, [fd as usize, to, 0, 0, 0, 0]) })
}
/// What `path` names, links followed. A path that cannot be read is an error of the kernel's, no fault.
pub fn stat(path: usize) -> Option<Stat> {
    // SAFETY: as above.
    stat_by(|to| unsafe { call(number::STAT, [path, to, 0, 0, 0, 0]) })
}
/// As [`stat`], of a path that begins at the folder `at`.
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

/// The magic number of the file system `fd` lies in.
pub fn file_system(fd: i32) -> Option<u64> {
    let mut raw = [0u64; 15];
    // SAFETY: the kernel's structure has 120 bytes here, which is what `raw` has.
    result(unsafe { call(number::FSTATFS, [fd as usize, raw.as_mut_ptr() as usize, 0, 0, 0, 0]) }).ok()?;
    Some(raw[0])
}

/// The kernel's offset of `fd` is moved; where it is now.
pub fn lseek(fd: i32, offset: i64, whence: i32) -> Result<i64, Errno> {
    // SAFETY: numbers only.
    result(unsafe { call(number::LSEEK, [fd as usize, offset as usize, whence as usize, 0, 0, 0]) })
        .map(|n| n as i64)
}

/// A question to `fcntl` that takes no argument.
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

/// Bytes that are read of a process's status, more than it has before and with what it says of filters. The lists in
/// it (groups, processors) may be long.
pub const STATUS_MAX: usize = 16384;

/// What `/proc` says of this process. `None` if that cannot be read, or not all of it.
pub fn status(to: &mut [u8; STATUS_MAX]) -> Option<&[u8]> {
    let fd = open(b"/proc/self/status\0", 0).ok()?;
    let mut len = 0;
    let is_read = loop {
        let args = [fd as usize, to[len..].as_mut_ptr() as usize, to.len() - len, 0, 0, 0];
        // SAFETY: the kernel writes at most the bytes that are left.
        match result(unsafe { call(number::READ, args) }) {
            Ok(0) => break true,
            Ok(count) => len += count,
            Err(_) => break false,
        }
    };
    close(fd);
    (is_read && len < to.len()).then_some(&to[..len])
}

/// Overwrites memory of this process, which other code may use: if it cannot be written nothing happens.
pub fn overwrite(at: *const u8, bytes: &[u8]) {
    let (ours, theirs) = ([bytes.as_ptr() as usize, bytes.len()], [at as usize, bytes.len()]);
    let [ours, theirs] = [&ours, &theirs].map(|part| core::ptr::from_ref(part) as usize);
    // SAFETY: the kernel copies from what was lent, and looks whether it may write where.
    let _ = unsafe { call(number::PROCESS_VM_WRITEV, [process() as usize, ours, 1, theirs, 1, 0]) };
}

/// Reads memory of this process, which other code may use: how much of it from the first byte on. `parts` are addresses
/// and lengths; one that cannot be read whole is not read at all.
pub fn read_memory(parts: &[[usize; 2]], to: &mut [u8]) -> usize {
    let ours = [to.as_mut_ptr() as usize, to.len()];
    let args = [process() as usize, (&raw const ours) as usize, 1, parts.as_ptr() as usize, parts.len(), 0];
    // SAFETY: the kernel copies to what was lent, and looks whether it may read from where.
    result(unsafe { call(number::PROCESS_VM_READV, args) }).unwrap_or(0)
}

/// What the kernel does with a signal: its `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct SignalAction {
    /// An address, or what stands for one.
    pub handler: usize,
    /// How.
    pub flags: u64,
    /// The way back from the handler.
    pub restorer: usize,
    /// What is held back meanwhile.
    pub mask: u64,
}

/// What the kernel does with `signal`.
pub fn signal_action(signal: i32) -> Option<SignalAction> {
    let mut action = SignalAction::default();
    // SAFETY: nothing is set, and the structure is the kernel's.
    let asked =
        unsafe { call(number::RT_SIGACTION, [signal as usize, 0, (&raw mut action) as usize, 8, 0, 0]) };
    result(asked).ok().map(|_| action)
}

/// Sets what the kernel does with `signal`; what it did before.
pub fn set_signal_action(signal: i32, action: &SignalAction) -> Option<SignalAction> {
    let mut old = SignalAction::default();
    let addresses = [core::ptr::from_ref(action) as usize, (&raw mut old) as usize];
    // SAFETY: the structures are the kernel's; a handler in the first is one that was there, or none.
    let answer =
        unsafe { call(number::RT_SIGACTION, [signal as usize, addresses[0], addresses[1], 8, 0, 0]) };
    result(answer).ok().map(|_| old)
}

/// Sends the calling thread a signal with what is known of it.
pub fn send_to_this_thread(signal: i32, info: *const core::ffi::c_void) {
    let args = [process() as usize, thread() as usize, signal as usize, info as usize, 0, 0];
    // SAFETY: the kernel reads what it made itself, or complains.
    let _ = unsafe { call(number::RT_TGSIGQUEUEINFO, args) };
}

/// Closes one of our own descriptors.
pub fn close(fd: i32) {
    // SAFETY: a number only.
    let _ = unsafe { call(number::CLOSE, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// By whose rights the calling thread acts.
pub fn effective_user() -> u32 {
    // SAFETY: it takes nothing and cannot fail.
    unsafe { call(number::GETEUID, [0; 6]) as u32 }
}

/// The calling process, as the kernel sees it now: the child's own number in a child of `vfork`.
pub fn process() -> u32 {
    // SAFETY: no argument.
    unsafe { call(number::GETPID, [0; 6]) as u32 }
}

/// The digits by which `/proc` shows this process; how many, 0 if it does not.
pub fn digits_in_proc(to: &mut [u8; 16]) -> usize {
    let args = [c"/proc/self".as_ptr() as usize, to.as_mut_ptr() as usize, to.len(), 0, 0, 0];
    // SAFETY: the path is a string that ends, and the kernel writes at most the size it is told of.
    result(unsafe { call(number::READLINK, args) }).unwrap_or(0)
}

/// The limit of addresses, among those that processes have.
pub const RLIMIT_AS: usize = 9;

/// Whether the addresses that this process may use are limited; if that cannot be told they are not.
pub fn are_addresses_limited() -> bool {
    let mut limits = [u64::MAX; 2];
    // SAFETY: no new limit is given, and the kernel's structure is two numbers of 64 bits.
    let asked = unsafe { call(number::PRLIMIT64, [0, RLIMIT_AS, 0, limits.as_mut_ptr() as usize, 0, 0]) };
    result(asked).is_ok() && limits[0] != u64::MAX
}

/// The calling thread.
pub fn thread() -> u32 {
    // SAFETY: no argument.
    unsafe { call(number::GETTID, [0; 6]) as u32 }
}

/// Lets the thread run that the caller waits for; `turn` is how often the caller has waited for it already.
///
/// After a few turns it sleeps. A thread of a real-time class that only yields goes on before any thread of a lower
/// class or priority, so one of those, if it is to run on the same processor, never comes to end what is waited for.
pub fn wait(turn: u32) {
    /// What is waited for takes a few system calls: on another processor it is over before that.
    const YIELDS: u32 = 16;
    const NANOS: i64 = 50_000;
    if turn < YIELDS {
        // SAFETY: no argument.
        let _ = unsafe { call(number::SCHED_YIELD, [0; 6]) };
    } else {
        let time = [0i64, NANOS];
        // SAFETY: the kernel's structure is two numbers of 64 bits; the rest of the time is not asked for.
        let _ = unsafe { call(number::NANOSLEEP, [time.as_ptr() as usize, 0, 0, 0, 0, 0]) };
    }
}

/// Private memory, all zeros.
pub fn map_private(bytes: usize) -> Option<core::ptr::NonNull<u8>> {
    map_at(None, bytes, READ_WRITE, PRIVATE | ANONYMOUS, None)
}

/// Maps all `bytes` bytes of `fd`, shared; if it has so many, at a multiple of 2 MiB: only there can the kernel use the
/// large pages that the file's memory is in.
pub fn map_file(fd: i32, bytes: usize, access: Access) -> Option<core::ptr::NonNull<u8>> {
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
            unmap(core::ptr::NonNull::new(from as *mut u8)?, to - from);
        }
    }
    mapped
}

/// What may be done with mapped bytes: the kernel's PROT bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read = 1,
    ReadWrite = 3,
}

const SHARED: usize = 1;
const PRIVATE: usize = 2;
const FIXED: usize = 0x10;
const ANONYMOUS: usize = 0x20;
const NORESERVE: usize = 0x4000;

fn map_at(
    at: Option<usize>,
    bytes: usize,
    protection: usize,
    flags: usize,
    fd: Option<i32>,
) -> Option<core::ptr::NonNull<u8>> {
    let args = [at.unwrap_or(0), bytes, protection, flags, fd.unwrap_or(-1) as usize, 0];
    // SAFETY: a new mapping at an address of the kernel's choice, or over a reservation of ours.
    let address = result(unsafe { call(number::MMAP, args) }).ok()?;
    core::ptr::NonNull::new(address as *mut u8)
}

/// What may be done with changed bytes while they are changed.
pub const READ_WRITE: usize = 3;
/// What may be done with code.
pub const READ_EXECUTE: usize = 5;

/// Changes what may be done with whole pages of this process.
pub fn protect(address: usize, bytes: usize, protection: usize) -> Result<(), Errno> {
    // SAFETY: the bytes stay; the caller guarantees that they are not used in another way meanwhile.
    result(unsafe { call(number::MPROTECT, [address, bytes, protection, 0, 0, 0]) }).map(drop)
}

/// Maps code from the file `path` names over `bytes` bytes at `address`; whether that worked.
pub fn map_code_again(address: usize, bytes: usize, path: &[u8], in_file: u64) -> bool {
    let Ok(fd) = open(path, 0) else { return false };
    let args = [address, bytes, READ_EXECUTE, PRIVATE | FIXED, fd as usize, in_file as usize];
    // SAFETY: the same file's same bytes were mapped there before.
    let mapped = result(unsafe { call(number::MMAP, args) }).is_ok();
    close(fd);
    mapped
}

/// Ends the process at once.
pub fn end_process() -> ! {
    // SAFETY: an instruction that ends the process.
    unsafe { core::arch::asm!("ud2", options(noreturn)) }
}

/// Whether this process has this one thread alone, as far as the kernel tells.
pub fn is_single_threaded() -> bool {
    threads() == Some(1)
}

/// Whether the calling thread is the only one of its process; asked without a descriptor, which is what the question is
/// about, and by a call that no filter of system calls forbids. `false` also where the kernel does not tell.
pub fn is_only_thread() -> bool {
    /// A folder has two links of its own, and one for each folder in it.
    const ONE_FOLDER: u64 = 3;
    stat(c"/proc/self/task".as_ptr() as usize).is_some_and(|threads| threads.links == ONE_FOLDER)
}

/// How many threads this process has; `None` if that cannot be told.
fn threads() -> Option<u64> {
    let mut line = [0u8; 1024];
    stat_field(stat_line(b"/proc/self/stat\0", &mut line)?, NUM_THREADS)
}

/// Whether the calling thread holds `signal` back.
pub fn holds_back(signal: i32) -> bool {
    const SIG_BLOCK: usize = 0;
    let mut mask = u64::MAX;
    // SAFETY: no new mask is given, and the kernel's is eight bytes.
    let _ = unsafe { call(number::RT_SIGPROCMASK, [SIG_BLOCK, 0, &raw mut mask as usize, 8, 0, 0]) };
    mask >> (signal - 1) & 1 != 0
}

/// Which other threads of this process block `signal`, one of the first 31. If that cannot be told, sleepers do.
pub fn other_threads_that_block(signal: i32) -> BlockedBy {
    blocked_by(|| list_threads(signal), threads)
}

/// Lists the threads once; `None` if they cannot be listed.
fn list_threads(signal: i32) -> Option<ThreadList> {
    let directory = open(b"/proc/self/task\0", O_DIRECTORY).ok()?;
    let own = thread();
    let mut entries = [0u64; 128];
    let mut list = ThreadList::EMPTY;
    loop {
        let bytes = directory_entries(directory, &mut entries);
        if bytes == 0 {
            break;
        }
        entry_names(&entries, bytes, |name| {
            let number = core::str::from_utf8(name).ok().and_then(|name| name.parse::<u32>().ok());
            let Some(number) = number else { return };
            let blocks = |other: &ThreadSignals| other.blocked >> (signal - 1) & 1 != 0;
            let other = if number == own { None } else { signals_of(name).filter(blocks) };
            list.add(
                number,
                match other {
                    None => BlockedBy::None,
                    Some(other) if other.sleeps => BlockedBy::Sleepers,
                    Some(_) => BlockedBy::Runner,
                },
            );
        });
    }
    close(directory);
    Some(list)
}

/// What the kernel says of a thread.
struct ThreadSignals {
    /// It waits for something other than a processor.
    sleeps: bool,
    /// The set of the first 31 signals that it blocks.
    blocked: u64,
}

/// The signals of a thread of this process; `None` if it has ended. One of which nothing can be told sleeps and blocks
/// all.
fn signals_of(thread: &[u8]) -> Option<ThreadSignals> {
    let mut path = [0u8; 48];
    let parts: [&[u8]; 3] = [b"/proc/self/task/", thread, b"/stat"];
    let mut length = 0;
    for part in parts {
        path.get_mut(length..length + part.len())?.copy_from_slice(part);
        length += part.len();
    }
    path.get(length)?; // the zero
    let mut line = [0u8; 1024];
    let fields = stat_line(&path, &mut line)?;
    // D: in the middle of a system call.
    let runs =
        fields.split(|&byte| byte == b' ').nth(STATE).is_some_and(|state| matches!(state, b"R" | b"D"));
    Some(ThreadSignals { sleeps: !runs, blocked: stat_field(fields, BLOCKED).unwrap_or(u64::MAX) })
}

/// Fields of a `stat` from the one behind the name, which ends with the last parenthesis: proc_pid_stat(5) has them as
/// the 3rd, the 20th and the 32nd.
const STATE: usize = 0;
const NUM_THREADS: usize = 17;
const BLOCKED: usize = 29;

/// The fields of a `stat` behind the name.
fn stat_line<'a>(path: &[u8], line: &'a mut [u8; 1024]) -> Option<&'a [u8]> {
    let fd = open(path, 0).ok()?;
    // SAFETY: the buffer is ours.
    let read = unsafe { pread(fd, line.as_mut_ptr(), line.len(), 0) };
    close(fd);
    let line = &line[..read.ok()?];
    let end = line.iter().rposition(|&byte| byte == b')')?;
    line.get(end + 2..)
}

fn stat_field(fields: &[u8], at: usize) -> Option<u64> {
    let digits = fields.split(|&byte| byte == b' ').nth(at)?;
    core::str::from_utf8(digits).ok()?.parse().ok()
}

/// Unmaps what a call above gave and is not used any more.
pub fn unmap(base: core::ptr::NonNull<u8>, bytes: usize) {
    // SAFETY: the caller is the only one who knew the mapping.
    let _ = unsafe { call(number::MUNMAP, [base.as_ptr() as usize, bytes, 0, 0, 0, 0]) };
}

/// Asks that a forked child not have this memory.
pub fn keep_from_children(base: core::ptr::NonNull<u8>, bytes: usize) -> Result<(), Errno> {
    const MADV_DONTFORK: usize = 10;
    // SAFETY: memory of ours.
    result(unsafe { call(number::MADVISE, [base.as_ptr() as usize, bytes, MADV_DONTFORK, 0, 0, 0]) })
        .map(drop)
}

/// Asks that a core not have this memory.
pub fn keep_from_cores(base: core::ptr::NonNull<u8>, bytes: usize) {
    const MADV_DONTDUMP: usize = 16;
    // SAFETY: memory of ours.
    let _ = unsafe { call(number::MADVISE, [base.as_ptr() as usize, bytes, MADV_DONTDUMP, 0, 0, 0]) };
}

/// Puts zeros that take no memory in the place of what is mapped there, in one step: a thread that is about to read
/// there reads zeros.
pub fn cover(base: core::ptr::NonNull<u8>, bytes: usize, access: Access) -> bool {
    let flags = PRIVATE | ANONYMOUS | FIXED | NORESERVE;
    map_at(Some(base.as_ptr() as usize), bytes, access as usize, flags, None).is_some()
}

/// Maps zeros at an address if nothing is there; `None` if something is.
pub fn map_where_nothing_is(address: usize, bytes: usize) -> Result<Option<core::ptr::NonNull<u8>>, Errno> {
    const FIXED_NOREPLACE: usize = 0x10_0000;
    const EXIST: Errno = Errno(17);
    let flags = PRIVATE | ANONYMOUS | NORESERVE | FIXED_NOREPLACE;
    let args = [address, bytes, READ_WRITE, flags, usize::MAX, 0];
    // SAFETY: a new mapping where there is none.
    match result(unsafe { call(number::MMAP, args) }) {
        Ok(mapped) if mapped == address => Ok(core::ptr::NonNull::new(address as *mut u8)),
        // A kernel before 4.17 takes the address for a hint.
        Ok(elsewhere) => {
            core::ptr::NonNull::new(elsewhere as *mut u8).into_iter().for_each(|base| unmap(base, bytes));
            Ok(None)
        }
        Err(EXIST) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Asks that the page at `base` be all zeros in a forked child.
pub fn wipe_on_fork(base: core::ptr::NonNull<u8>, bytes: usize) -> Result<(), Errno> {
    const MADV_WIPEONFORK: usize = 18;
    // SAFETY: private memory of ours.
    result(unsafe { call(number::MADVISE, [base.as_ptr() as usize, bytes, MADV_WIPEONFORK, 0, 0, 0]) })
        .map(drop)
}

/// Reads entries of a directory; the bytes that were filled, 0 at the end or on an error.
pub fn directory_entries(directory: i32, to: &mut [u64; 128]) -> usize {
    let args = [directory as usize, to.as_mut_ptr() as usize, size_of_val(to), 0, 0, 0];
    // SAFETY: the kernel writes at most the size it is told of.
    result(unsafe { call(number::GETDENTS64, args) }).unwrap_or(0)
}

/// Calls `tell` with each name among `bytes` bytes of directory entries.
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

// ---- the owner's socket ---------------------------------------------------------------------------------

/// Descriptors that arrived; closed when this is dropped.
pub struct ReceivedDescriptors {
    numbers: [i32; DESCRIPTORS_MAX],
    count: usize,
}

impl ReceivedDescriptors {
    /// All there are.
    pub fn all(&self) -> [Option<i32>; DESCRIPTORS_MAX] {
        core::array::from_fn(|at| self.numbers[..self.count].get(at).copied())
    }
}

impl Drop for ReceivedDescriptors {
    fn drop(&mut self) {
        self.numbers[..self.count].iter().for_each(|&number| close(number));
    }
}

/// A descriptor of ours, closed when this is dropped.
struct OwnDescriptor(i32);

impl Drop for OwnDescriptor {
    fn drop(&mut self) {
        close(self.0);
    }
}

/// The kernel's `struct sockaddr_un`.
#[repr(C)]
struct Address {
    family: u16,
    path: [u8; 108],
}

/// The kernel's `struct ucred`.
#[repr(C)]
#[derive(Default)]
struct Credentials {
    process: i32,
    user: u32,
    group: u32,
}

/// The kernel's `struct msghdr`.
#[repr(C)]
struct MessageHeader {
    name: usize,
    name_len: u32,
    parts: usize,
    parts_len: usize,
    control: usize,
    control_len: usize,
    flags: i32,
}

impl MessageHeader {
    fn of(part: &[usize; 2]) -> Self {
        let parts = part.as_ptr() as usize;
        Self { name: 0, name_len: 0, parts, parts_len: 1, control: 0, control_len: 0, flags: 0 }
    }
}

/// The kernel's `struct cmsghdr`, and descriptors behind it.
#[repr(C)]
struct Control {
    len: usize,
    level: i32,
    kind: i32,
    descriptors: [i32; DESCRIPTORS_MAX],
}

impl Control {
    const EMPTY: Self = Self { len: 0, level: 0, kind: 0, descriptors: [-1; DESCRIPTORS_MAX] };
}

/// Why an owner did not do what a process asked of it at its socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoWelcome {
    /// It has not answered in time, or there is no descriptor to ask by: it may the next time.
    Late,
    /// It says no, or is not there.
    Refused,
}

/// Says `hello` to the process that listens at `socket`, a path that ends with a zero, if that is this process's own
/// user, and sends a descriptor with it, or none; what is answered, if that is no refusal, and the descriptors that
/// come with it. Waits
/// `millis` milliseconds at most, and no system call of it longer.
pub fn greet(
    socket: &[u8; 108],
    hello: &[u8],
    descriptor: Option<i32>,
    millis: u32,
) -> Result<(JoinReply, ReceivedDescriptors), NoWelcome> {
    const AF_UNIX: usize = 1;
    const SOCK_SEQPACKET: usize = 5;
    const FLAGS: usize = 0o2000000 | 0o4000; // SOCK_CLOEXEC, SOCK_NONBLOCK
    const SOL_SOCKET: i32 = 1;
    const SO_PEERCRED: usize = 17;
    const SCM_RIGHTS: i32 = 1;
    const MSG_NOSIGNAL: usize = 0x4000;
    const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
    // 1 connect; an owner that has no room for one more does not make us wait
    // SAFETY: numbers only.
    let end = result(unsafe { call(number::SOCKET, [AF_UNIX, SOCK_SEQPACKET | FLAGS, 0, 0, 0, 0]) });
    let end = OwnDescriptor(end.map_err(|_| NoWelcome::Late)? as i32);
    let fd = end.0 as usize;
    let address = Address { family: AF_UNIX as u16, path: *socket };
    let at = core::ptr::from_ref(&address) as usize;
    // SAFETY: the address has the size that the kernel is told of.
    let connected = result(unsafe { call(number::CONNECT, [fd, at, size_of::<Address>(), 0, 0, 0]) });
    connected.map_err(|error| if error == Errno::AGAIN { NoWelcome::Late } else { NoWelcome::Refused })?;
    // 2 is it our own user?
    let (mut peer, mut len) = (Credentials::default(), size_of::<Credentials>() as u32);
    let [to, length] = [&raw mut peer as usize, &raw mut len as usize];
    // SAFETY: the kernel writes at most the size that it is told of.
    result(unsafe { call(number::GETSOCKOPT, [fd, SOL_SOCKET as usize, SO_PEERCRED, to, length, 0]) })
        .map_err(|_| NoWelcome::Refused)?;
    if peer.user != effective_user() {
        return Err(NoWelcome::Refused);
    }
    // 3 say it, and wait
    let mut control =
        Control { len: HEADER_BYTES + 4, level: SOL_SOCKET, kind: SCM_RIGHTS, ..Control::EMPTY };
    control.descriptors[0] = descriptor.unwrap_or(-1);
    let part = [hello.as_ptr() as usize, hello.len()];
    let mut message = MessageHeader::of(&part);
    if descriptor.is_some() {
        // What one descriptor takes, as the kernel aligns it.
        (message.control, message.control_len) = (&raw const control as usize, HEADER_BYTES + 8);
    }
    // SAFETY: the kernel reads so many bytes, which are there.
    result(unsafe { call(number::SENDMSG, [fd, &raw const message as usize, MSG_NOSIGNAL, 0, 0, 0]) })
        .map_err(|_| NoWelcome::Refused)?;
    if !becomes_readable(end.0, millis) {
        return Err(NoWelcome::Late);
    }
    // 4 hear it
    let mut welcome = [0u8; WELCOME_BYTES + 1];
    control = Control::EMPTY;
    let part = [welcome.as_mut_ptr() as usize, welcome.len()];
    message = MessageHeader::of(&part);
    (message.control, message.control_len) = (&raw mut control as usize, size_of::<Control>());
    // SAFETY: the kernel writes at most the sizes that it is told of.
    let heard =
        result(unsafe { call(number::RECVMSG, [fd, &raw mut message as usize, MSG_CMSG_CLOEXEC, 0, 0, 0]) });
    let has_rights = message.control_len >= HEADER_BYTES
        && (control.level, control.kind) == (SOL_SOCKET, SCM_RIGHTS)
        && control.len > HEADER_BYTES;
    let count = if has_rights { (control.len - HEADER_BYTES) / 4 } else { 0 };
    let received = ReceivedDescriptors { numbers: control.descriptors, count: count.min(DESCRIPTORS_MAX) };
    let welcome = heard.ok().and_then(|bytes| JoinReply::of(&welcome[..bytes]));
    let welcome = welcome.filter(|welcome| welcome.error == 0).ok_or(NoWelcome::Refused)?;
    Ok((welcome, received))
}

const HEADER_BYTES: usize = core::mem::offset_of!(Control, descriptors);

/// Whether there is something to read of a descriptor within so many milliseconds.
fn becomes_readable(fd: i32, millis: u32) -> bool {
    const POLLIN: u64 = 1;
    /// The kernel's `struct pollfd` as one word.
    fn entry(fd: i32) -> u64 {
        u64::from(fd as u32) | POLLIN << 32
    }
    let until = clock_millis() + u64::from(millis);
    loop {
        let mut one = entry(fd);
        let left = until.saturating_sub(clock_millis()) as usize;
        // SAFETY: one entry, which the kernel fills.
        let answer = result(unsafe { call(number::POLL, [&raw mut one as usize, 1, left, 0, 0, 0]) });
        match answer {
            Ok(count) => return count == 1,
            Err(Errno::INTR) if clock_millis() < until => {}
            Err(_) => return false,
        }
    }
}
