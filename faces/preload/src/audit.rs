//! Audit: processes with code that enters the kernel by itself.
//!
//! Such code may close a descriptor and open another file under its number,
//! move its offset, or write, and no wrapper of ours is called for it. The owner can see
//! whether there is such code ([`Operation::Examine`]); it is asked before the
//! first file is attached, and again after an object was loaded.
//!
//! ```text
//!   UNKNOWN --ask--> CLEAN      as everywhere else in this object
//!      ^    `------> RESTRICTED only positional reads, each after a check of its descriptor; for good. So is a
//!                               process whose C library could not be patched: its own calls need not come to us
//!      |
//!      `-- dlopen: every offset goes back to the kernel first; while it is under way nothing is attached,
//!                  and what is attached is looked at before each read
//! ```
//!
//! A look is `fstat` and `F_GETFL`: the same file, unchanged since it was
//! attached, by a description that reads it plainly. A file that changed a moment ago is not attached, because one
//! that changes again within a tick of the file system's clock looks unchanged. What is read after the look is
//! what the descriptor was at the moment of the look; a thread that closes it in
//! another thread meanwhile cannot tell that from a read that was a little earlier.
//!
//! `dlopen` looks at who called it (for the folders to search), so a wrapper
//! that called it would change what it does. It is entered by a jump, and comes
//! back by way of a `ret` in its caller's own page of code to us, and from here to the caller:
//!
//! ```text
//!   stack at its entry    [ a `ret` in the caller's code | after_loading | the true way back ]
//! ```
//!
//! Invariants:
//!  1. A descriptor is SERVED only if the state was CLEAN after that was said, or it is given back at once.
//!  2. RESTRICTED is for good.
//!
//! Not an invariant: that code which a program writes for itself is seen. It is looked at as it is
//! when the owner is asked.

use core::arch::naked_asm;
use core::sync::atomic::{AtomicU64, Ordering};

use quinion_view::arena::control::{Operation, SyscallAudit};
use quinion_view::viewer::Viewer;

use crate::attach::is_passing;
use crate::kernel::{self, Stat};
use crate::real::{self, find_for_trampoline};
use crate::{process, table};

/// Loads that were begun (high half), loads under way, and the verdict (lowest bits).
static STATE: AtomicU64 = AtomicU64::new(UNKNOWN);
const UNKNOWN: u64 = 0;
const CLEAN: u64 = 1;
const RESTRICTED: u64 = 2;
const VERDICT: u64 = 3;
const UNDER_WAY: u64 = 1 << 8;
const BEGUN: u64 = 1 << 32;

#[inline]
fn loads_under_way(state: u64) -> bool {
    state as u32 >= UNDER_WAY as u32
}

/// Whether descriptors may be served at private offsets, and without looking at them again.
#[inline]
pub fn is_clean() -> bool {
    // SeqCst, partner: `begin_loading`, against `table::publish`: a thread that has published a descriptor and is free
    // here is seen by the load that begins later.
    let state = STATE.load(Ordering::SeqCst);
    state & VERDICT == CLEAN && !loads_under_way(state)
}

/// Whether it is known that code of the program's own may do anything.
pub fn is_restricted() -> bool {
    STATE.load(Ordering::Relaxed) & VERDICT == RESTRICTED
}

/// Whether a descriptor may be served at a private offset from now on; the owner is asked if that is not known. `None`:
/// it has not answered in time.
pub fn permits_offsets(viewer: &Viewer) -> Option<bool> {
    loop {
        let state = STATE.load(Ordering::SeqCst); // partner: `begin_loading`, as in `is_clean`
        if state & VERDICT != UNKNOWN || loads_under_way(state) {
            return Some(state & VERDICT == CLEAN && !loads_under_way(state));
        }
        let verdict = ask(viewer)?;
        // Partner: `begin_loading`. A thread that began to load meanwhile has changed the state, and we ask again.
        let _ = STATE.compare_exchange(state, state | verdict, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// The program loads code in a way of its own, or the C library could not be patched, so that calls of its functions
/// need not come to us: restricted from now on.
#[cold]
pub fn insist() {
    let restricted = |state| Some(state & !VERDICT | RESTRICTED);
    // SeqCst, partner: `is_clean`, as in `begin_loading`.
    let _ = STATE.fetch_update(Ordering::SeqCst, Ordering::SeqCst, restricted);
    table::pause_all();
}

fn ask(viewer: &Viewer) -> Option<u64> {
    match viewer.request_long(Operation::Examine, [0; 3]) {
        Ok([audit, _]) if audit == SyscallAudit::Clean as u64 || audit == SyscallAudit::Harmless as u64 => {
            Some(CLEAN)
        }
        Err(error) if is_passing(&error) => None,
        _ => Some(RESTRICTED),
    }
}

// ---- looking at a descriptor ------------------------------------------------------------------------------

/// Whether a file was left alone for so long that a change from now on has another time than the last one.
pub fn is_settled(stat: &Stat) -> bool {
    /// The kernel's clock for files moves by some milliseconds; file systems of coarser times say whole seconds.
    const NANOS_MIN: i64 = 2_000_000_000;
    kernel::now_nanos().is_some_and(|now| now.saturating_sub(stat.changed_nanos()) > NANOS_MIN)
}

/// Whether `fd` still is a plain description of the file, as it was when that was attached.
pub fn is_still(fd: i32, device: u64, inode: u64, changed_nanos: i64) -> bool {
    // What is attached is what may be found here (`attach.rs`, `look_over`), or it would be attached without end.
    const LEFT_ALONE: i32 = kernel::O_WRONLY | kernel::O_DIRECT | kernel::O_PATH;
    kernel::fstat(fd).is_some_and(|now| {
        now.device == device && now.inode == inode && now.changed_nanos() == changed_nanos && now.is_regular()
    }) && kernel::fcntl(fd, kernel::F_GETFL).is_ok_and(|flags| flags as i32 & LEFT_ALONE == 0)
}

// ---- loading ------------------------------------------------------------------------------------------------

/// Before an object is loaded: all offsets go back. The address of a `ret` near `back`, where the caller goes on, or
/// 0 if there is nothing to do afterwards.
extern "C" fn begin_loading(back: usize) -> usize {
    if is_restricted() {
        return 0;
    }
    let Some(_inside) = process::enter() else { return 0 };
    // SeqCst, partner: `is_clean`. The verdict is unknown from here on, in one step with the count.
    let mut state = STATE.load(Ordering::Relaxed);
    while let Err(now) = STATE.compare_exchange(
        state,
        (state & !(if state & VERDICT == CLEAN { VERDICT } else { 0 })).wrapping_add(BEGUN + UNDER_WAY),
        Ordering::SeqCst,
        Ordering::SeqCst,
    ) {
        state = now;
    }
    table::pause_all();
    // Without a way back this load is under way for ever: restricted from now on.
    if has_shadow_stack() { 0 } else { find_return(back).unwrap_or(0) }
}

/// The object is there.
extern "C" fn end_loading() {
    if process::is_on() {
        STATE.fetch_sub(UNDER_WAY, Ordering::SeqCst); // partner: `is_clean`
    }
}

/// A `ret` in the page of code around `back`.
fn find_return(back: usize) -> Option<usize> {
    const RET: u8 = 0xc3;
    const PAGE: usize = 4096;
    let first = back & !(PAGE - 1);
    // SAFETY: the caller's code goes on at `back`, so this page is mapped, and code on x86-64 Linux can be read.
    let page = unsafe { core::slice::from_raw_parts(first as *const u8, PAGE) };
    let from = back - first;
    let after = page[from..].iter().position(|&byte| byte == RET).map(|at| from + at);
    after.or_else(|| page[..from].iter().rposition(|&byte| byte == RET)).map(|at| first + at)
}

/// Whether the processor compares return addresses with a stack of its own.
fn has_shadow_stack() -> bool {
    let pointer: u64;
    // SAFETY: without a shadow stack the instruction does nothing.
    unsafe {
        core::arch::asm!(
            "xor eax, eax",
            ".byte 0xf3, 0x48, 0x0f, 0x1e, 0xc8", // rdsspq rax
            out("rax") pointer,
            options(nomem, nostack)
        );
    }
    pointer != 0
}

/// Trampolines: `name = real`.
macro_rules! loads {
    ($($(#[$doc:meta])* $name:ident;)*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// That of the C library's function of this name.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "push rdi", "push rsi", "push rdx",
                "mov rdi, qword ptr [rsp + 24]",
                "call {begin}",
                "push rax", "sub rsp, 8",
                "mov rax, qword ptr [rip + {real}]",
                "test rax, rax",
                "jnz 2f",
                "lea rdi, [rip + {real}]",
                "call {find}",
                "2:",
                "mov r11, rax",
                "add rsp, 8", "pop rax", "pop rdx", "pop rsi", "pop rdi",
                "test rax, rax",
                "jz 3f",
                "lea r10, [rip + {after}]",
                "push r10",
                "push rax",
                "3:",
                "jmp r11",
                begin = sym begin_loading, real = sym real::$name, find = sym find_for_trampoline,
                after = sym after_loading,
            )
        }
    )* };
}

loads! {
    /// Loads an object, whose code is looked at before anything else is served.
    dlopen;
    /// As `dlopen`.
    dlmopen;
}

/// Where `dlopen` returns to by way of its caller's `ret`.
#[unsafe(naked)]
unsafe extern "C" fn after_loading() {
    naked_asm!("push rax", "call {end}", "pop rax", "ret", end = sym end_loading)
}
