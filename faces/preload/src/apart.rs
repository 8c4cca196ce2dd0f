//! Apart: work with descriptors of its own.
//!
//! ```text
//!   the calling thread                       a helper thread: the same memory
//!     clone ------------------------------->   close_range(.., UNSHARE): a table of descriptors of its own
//!                                              connects, receives descriptors, maps files
//!     sleeps                                   ends, and its table with it
//!     goes on  <---------- the kernel clears the word and wakes it
//! ```
//!
//! A connection and what comes by it take numbers of descriptors. In a process with threads any of them may close such a
//! number meanwhile, by `close_range` or by mistake, and what it opens then under that number is closed by us. So where
//! the program may have threads, work that takes numbers is done by a thread with a table of its own. What the program
//! has open is not in it, or the thread's end would flush it, which tells errors of writing that are the program's; but
//! for descriptors below the one that is sent.
//!
//! Invariants:
//!  1. One call at a time: the caller is the thread that has made the switch BUSY (`process.rs`), with its signals held
//!     back, which the helper inherits.
//!  2. The caller sleeps until the helper has ended, so what the helper borrows lives.
//!
//! Not an invariant: that there can be a helper. A process that may have no more threads is told so, and goes without.
//! Nor, before Linux 5.9, that its table is its own: then a number is taken for a moment, as it was always.
//!
//! Cost: a clone, some ten microseconds.

use core::arch::naked_asm;
use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};

use quinion_view::viewer::sys::{call, futex_wait};

use crate::kernel::number;

const STACK_BYTES: usize = 64 << 10;

#[repr(C, align(16))]
struct Stack(UnsafeCell<[u8; STACK_BYTES]>);
// SAFETY: only the helper uses it, and there is one at a time.
unsafe impl Sync for Stack {}
static STACK: Stack = Stack(UnsafeCell::new([0; STACK_BYTES]));

const CLONE_VM: usize = 0x100;
const CLONE_FS: usize = 0x200;
const CLONE_FILES: usize = 0x400;
const CLONE_SIGHAND: usize = 0x800;
const CLONE_THREAD: usize = 0x1_0000;
const CLONE_SYSVSEM: usize = 0x4_0000;
const CLONE_CHILD_CLEARTID: usize = 0x20_0000;
/// A thread of this process.
const FLAGS: usize =
    CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;

/// How long it is slept at a time, in milliseconds: the kernel wakes the caller.
const NAP_MILLIS: u32 = 1000;

/// Does `work` on a thread with descriptors of its own, and waits for it. Those of the program below `below` are there,
/// too. `None`: there can be no such thread.
///
/// The caller is the thread that is BUSY, and `work` takes no locks and waits for a bounded time.
pub fn apart<T>(below: u32, work: impl FnOnce() -> T) -> Option<T> {
    let work = || {
        have_own_descriptors(below);
        work()
    };
    let mut job = Job { work: Some(work), result: None };
    let running = AtomicU32::new(1);
    // SAFETY: the stack is free, as there is one helper at a time; the job and the word live until it has ended, which
    // is waited for below.
    let answer = unsafe {
        let top = STACK.0.get().cast::<u8>().add(STACK_BYTES);
        clone_and_run(FLAGS, top, running.as_ptr(), run_job(&job), (&raw mut job).cast())
    };
    if answer < 0 {
        return None;
    }
    // Acquire, partner: the kernel's clearing of the word, after all that the helper has done.
    while running.load(Ordering::Acquire) != 0 {
        futex_wait(&running, 1, NAP_MILLIS);
    }
    job.result
}

/// Gives the calling thread a table of its own, with the descriptors below `below`.
fn have_own_descriptors(below: u32) {
    const CLOSE_RANGE_UNSHARE: usize = 2;
    // SAFETY: the helper's own table; where the call fails, which it does before Linux 5.9, nothing has changed.
    let _ = unsafe {
        call(number::CLOSE_RANGE, [below as usize, u32::MAX as usize, CLOSE_RANGE_UNSHARE, 0, 0, 0])
    };
}

struct Job<W, T> {
    work: Option<W>,
    result: Option<T>,
}

type Run = unsafe extern "C" fn(job: *mut c_void);

/// What does a job of that type.
fn run_job<W: FnOnce() -> T, T>(_: &Job<W, T>) -> Run {
    unsafe extern "C" fn run<W: FnOnce() -> T, T>(job: *mut c_void) {
        // SAFETY: `apart` hands over its job, and sleeps.
        let job = unsafe { &mut *job.cast::<Job<W, T>>() };
        job.result = job.work.take().map(|work| work());
    }
    run::<W, T>
}

/// Begins a thread that calls `run` with `job` and ends. The kernel clears `running` when it has. Returns its number, or
/// the negated error.
///
/// # Safety
/// `stack` is the end of memory that the thread alone uses; that memory, `running` and `job` live until it has ended.
#[unsafe(naked)]
unsafe extern "C" fn clone_and_run(
    flags: usize,
    stack: *mut u8,
    running: *mut u32,
    run: Run,
    job: *mut c_void,
) -> isize {
    naked_asm!(
        "mov r10, rdx", // cleared when it ends
        "mov r9, rcx",  // the system call changes rcx and r11
        "xor edx, edx",
        "mov eax, 56", // clone
        "syscall",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2:", // the thread, on its own stack
        "xor ebp, ebp",
        "mov rdi, r8",
        "call r9",
        "xor edi, edi",
        "mov eax, 60", // exit: of this thread
        "syscall",
        "ud2",
    )
}
