//! System calls without a C library.
//!
//! A viewer lives inside another program, where the C library's functions may be this library's wrappers and `errno` is
//! the program's. So it makes system calls by the machine's own instruction. No function here touches `errno`,
//! allocates, or is a cancellation point.

use core::sync::atomic::AtomicU32;
use core::time::Duration;

/// The number of an error, as the kernel gave it (`EINVAL` is 22).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl Errno {
    /// "Bad file descriptor": a handle that was not given to the viewer that uses it.
    pub const BADF: Errno = Errno(9);
    /// A process writes the file.
    pub const TXTBSY: Errno = Errno(26);
    /// A program watches the file.
    pub const BUSY: Errno = Errno(16);
    /// The file cannot be served.
    pub const OPNOTSUPP: Errno = Errno(95);
    /// The call would have to wait.
    pub const AGAIN: Errno = Errno(11);
    /// "Input/output error".
    pub const IO: Errno = Errno(5);
    /// "Invalid argument".
    pub const INVAL: Errno = Errno(22);
    /// "Interrupted system call".
    pub const INTR: Errno = Errno(4);
    /// "No such process".
    pub const SRCH: Errno = Errno(3);
    /// "Operation not permitted".
    pub const PERM: Errno = Errno(1);
    /// "Permission denied".
    pub const ACCES: Errno = Errno(13);
    /// "Function not implemented".
    pub const NOSYS: Errno = Errno(38);
    /// "Protocol error".
    pub const PROTO: Errno = Errno(71);
    /// "Too many users".
    pub const USERS: Errno = Errno(87);
}

/// The numbers of the system calls this module makes.
#[cfg(target_arch = "x86_64")]
pub mod number {
    #![allow(missing_docs, reason = "the kernel's names")]
    pub const MMAP: usize = 9;
    pub const MUNMAP: usize = 11;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const FUTEX: usize = 202;
    pub const CLOCK_GETTIME: usize = 228;
    pub const FUTEX_WAITV: usize = 449;
}
/// The numbers of the system calls this module makes.
#[cfg(target_arch = "aarch64")]
pub mod number {
    #![allow(missing_docs, reason = "the kernel's names")]
    pub const MMAP: usize = 222;
    pub const MUNMAP: usize = 215;
    pub const RT_SIGPROCMASK: usize = 135;
    pub const FUTEX: usize = 98;
    pub const CLOCK_GETTIME: usize = 113;
    pub const FUTEX_WAITV: usize = 449;
}

/// Makes system call `number`. The answer is the kernel's: an error is its number, negated.
///
/// # Safety
/// The arguments mean to the kernel what the caller intends.
#[cfg(target_arch = "x86_64")]
#[inline]
pub unsafe fn call(number: usize, args: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the kernel clobbers what is declared here; the rest is the caller's promise.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number => answer,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// Makes system call `number`. The answer is the kernel's: an error is its number, negated.
///
/// # Safety
/// The arguments mean to the kernel what the caller intends.
#[cfg(target_arch = "aarch64")]
#[inline]
pub unsafe fn call(number: usize, args: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the kernel clobbers what is declared here; the rest is the caller's promise.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") number, inlateout("x0") args[0] => answer,
            in("x1") args[1], in("x2") args[2], in("x3") args[3], in("x4") args[4], in("x5") args[5],
            options(nostack),
        );
    }
    answer
}

/// An answer of [`call`] taken apart.
#[inline]
pub fn result(answer: isize) -> Result<usize, Errno> {
    if (-4095..0).contains(&answer) { Err(Errno(-answer as i32)) } else { Ok(answer as usize) }
}

const FUTEX_WAIT: usize = 0;
const FUTEX_WAKE: usize = 1;

/// Sleeps until a wake of `word`, a value of it other than `expected`, a signal, or `millis` milliseconds. Which it
/// was, the caller finds out by looking. Works across processes.
pub fn futex_wait(word: &AtomicU32, expected: u32, millis: u32) {
    let time = [i64::from(millis / 1000), i64::from(millis % 1000) * 1_000_000];
    let address = core::ptr::from_ref(word) as usize;
    // SAFETY: the word and the time outlive the call; the kernel writes neither.
    let _ = unsafe {
        call(number::FUTEX, [address, FUTEX_WAIT, expected as usize, time.as_ptr() as usize, 0, 0])
    };
}

/// The most words that [`futex_wait_any`] waits on.
pub const FUTEXES_MAX: usize = 128;

/// One of the words that [`futex_wait_any`] waits on: the kernel's `struct futex_waitv`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FutexWait<'a> {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
    _word: core::marker::PhantomData<&'a AtomicU32>,
}

impl<'a> FutexWait<'a> {
    /// To wait until a thread wakes `word`, if it is `expected`.
    pub fn new(word: &'a AtomicU32, expected: u32) -> Self {
        const FUTEX2_SIZE_U32: u32 = 2;
        let address = core::ptr::from_ref(word) as usize as u64;
        let (value, flags) = (u64::from(expected), FUTEX2_SIZE_U32);
        Self { value, address, flags, reserved: 0, _word: core::marker::PhantomData }
    }
}

/// Sleeps as [`futex_wait`] on any of `words`, at most [`FUTEXES_MAX`]. `false`: the kernel cannot do that (before
/// 5.16), or may not.
#[must_use]
pub fn futex_wait_any(words: &[FutexWait<'_>], millis: u32) -> bool {
    const CLOCK_MONOTONIC: usize = 1;
    let until = clock_millis() + u64::from(millis);
    let until = [(until / 1000) as i64, (until % 1000) as i64 * 1_000_000];
    let (address, time) = (words.as_ptr() as usize, until.as_ptr() as usize);
    // SAFETY: the words and the time outlive the call; the kernel writes none of them.
    let answer = unsafe { call(number::FUTEX_WAITV, [address, words.len(), 0, time, CLOCK_MONOTONIC, 0]) };
    !matches!(result(answer), Err(Errno::NOSYS | Errno::PERM))
}

/// Wakes up to `sleepers` threads that sleep on `word`, in any process.
pub fn futex_wake(word: &AtomicU32, sleepers: u32) {
    let address = core::ptr::from_ref(word) as usize;
    // SAFETY: the kernel only uses the address as a name.
    let _ = unsafe { call(number::FUTEX, [address, FUTEX_WAKE, sleepers as usize, 0, 0, 0]) };
}

/// All of this thread's signals held back, until this is dropped: for the few steps that a handler must neither run
/// between, as it would wait for the thread it interrupted, nor leave for ever, as a handler that jumps does.
#[derive(Debug)]
pub struct SignalsHeld(u64);

impl SignalsHeld {
    const SET: usize = 2;

    /// Holds them back.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it does something")]
    pub fn new() -> Self {
        let (all, mut before) = (u64::MAX, 0u64);
        let addresses = [&raw const all as usize, &raw mut before as usize];
        // SAFETY: both masks have the eight bytes the kernel is told of.
        let _ = unsafe { call(number::RT_SIGPROCMASK, [Self::SET, addresses[0], addresses[1], 8, 0, 0]) };
        Self(before)
    }
}

impl Drop for SignalsHeld {
    fn drop(&mut self) {
        let address = &raw const self.0 as usize;
        // SAFETY: the mask has eight bytes.
        let _ = unsafe { call(number::RT_SIGPROCMASK, [Self::SET, address, 0, 8, 0, 0]) };
    }
}

/// A counter of the machine, read without a system call, and alike in every process if the cores' counters agree, as
/// they do where the kernel keeps time by them. [`ticks_within`] says how fast it rises.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn ticks() -> u64 {
    // SAFETY: it reads a register.
    unsafe { core::arch::x86_64::_rdtsc() }
}
/// A counter of the machine, as on x86-64: read without a system call, and alike in every process.
#[cfg(target_arch = "aarch64")]
#[inline]
pub fn ticks() -> u64 {
    let ticks: u64;
    // SAFETY: it reads a register, which Linux lets programs read.
    unsafe {
        core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nostack, nomem, preserves_flags))
    };
    ticks
}

/// At most the [`ticks`] in `time`, if that is not so long that it does not matter.
#[cfg(target_arch = "x86_64")]
pub fn ticks_within(time: Duration) -> u64 {
    /// No processor with 64 bits counts slower.
    const PER_MICROSECOND: u128 = 500;
    u64::try_from(time.as_micros().saturating_mul(PER_MICROSECOND)).unwrap_or(u64::MAX)
}
/// At most the [`ticks`] in `time`, if that is not so long that it does not matter.
#[cfg(target_arch = "aarch64")]
pub fn ticks_within(time: Duration) -> u64 {
    let per_second: u64;
    // SAFETY: as in `ticks`.
    unsafe {
        core::arch::asm!("mrs {}, cntfrq_el0", out(reg) per_second, options(nostack, nomem, preserves_flags))
    };
    u64::try_from(time.as_micros().saturating_mul(u128::from(per_second)) / 1_000_000).unwrap_or(u64::MAX)
}

/// Milliseconds since some moment; never falls.
pub fn clock_millis() -> u64 {
    const CLOCK_MONOTONIC: usize = 1;
    let mut time = [0i64; 2];
    // SAFETY: the kernel writes two words, the size of `time`.
    let _ = unsafe { call(number::CLOCK_GETTIME, [CLOCK_MONOTONIC, time.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    time[0] as u64 * 1000 + time[1] as u64 / 1_000_000
}
