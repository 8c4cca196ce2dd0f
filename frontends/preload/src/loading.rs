//! Loading: code that comes into a process while it is served: by `dlopen`, or by a loader of the program's own.
//!
//! Every offset goes back to the kernel before such code may run, since it may enter the kernel by itself. `audit.rs`
//! has the owner's verdict on it.
//!
//! `dlopen` looks at its caller (for the folders to search), so a wrapper that called it would change what it does. It
//! is entered by a jump, and comes back by way of a `ret` in its caller's own page of code to the library, and from
//! here to the caller:
//!
//! ```text
//!   stack at its entry    [ a `ret` in the caller's code | after_loading | the true way back ]
//! ```

use core::arch::naked_asm;

use crate::real::{self, find_for_trampoline};
use crate::{audit, descriptors, process};

/// The program loads code in a way of its own, or the C library could not be patched, so that calls may go unseen:
/// restricted from now on.
#[cold]
pub fn restrict_to_positional_reads() {
    audit::restrict();
    descriptors::pause_all();
}

/// Before an object is loaded: all offsets go back. The address of a `ret` near `back`, where the caller goes on, or 0
/// if nothing is to be done afterwards.
extern "C" fn begin_loading(back: usize) -> usize {
    if audit::is_restricted() {
        return 0;
    }
    let Some(_inside) = process::enter() else { return 0 };
    audit::begin_loading();
    descriptors::pause_all();
    // Without a way back this load is under way for ever: restricted from now on.
    if has_shadow_stack() { 0 } else { find_return(back).unwrap_or(0) }
}

extern "C" fn end_loading() {
    if process::is_on() {
        audit::end_loading();
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

macro_rules! loads {
    ($($(#[$doc:meta])* $name:ident;)*) => { $(
        $(#[$doc])*
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
    dlopen;
    dlmopen;
}

/// Runs when `dlopen` returns, by way of a `ret` in its caller's code; returns to the caller.
#[unsafe(naked)]
unsafe extern "C" fn after_loading() {
    naked_asm!("push rax", "call {end}", "pop rax", "ret", end = sym end_loading)
}
