//! The interposer: what `quinion run` puts into a program.
//!
//! The dynamic linker loads this object before the C library, so that calls of `read` and its kin reach the wrappers
//! here. A wrapper that can answer from the cache does; every other passes the call on.
//!
//! ```text
//!   program --read(fd)--> served.rs --> serve_or_kernel.rs --served--> bytes.rs --hit--> out of the arena: no system
//!                                        |   |                          |               call
//!                                        |   |                          `--miss--> ask the owner, look again
//!                                        |   `--it is time--> attach.rs: ask the owner for the file
//!                                        `--not served--> real.rs --> the C library --> the kernel
//!   program --dup, fork, mmap, ...--> passthrough.rs, opened.rs, children.rs, exec.rs: give descriptors back first,
//!   then call the C library itself, and code that no name leads here from --> patch.rs --> the same wrappers
//! ```
//!
//! The rule above all others is **never wrong**. Descriptors are the kernel's own. Reads at a descriptor's offset are
//! served only while no other process can have that offset, and positional reads only while no process can put another
//! file behind the number unseen; neither while the file is open for writing here. Whatever leaves that narrow path
//! goes back to the kernel for good, with the kernel's offset put right before it can be seen.
//!
//! Not seen: system calls by the program's own instructions, for which `audit.rs` has a process served with care. And,
//! where the C library could not be patched, what that does inside itself, and libraries that are bound to it past the
//! object (`RTLD_DEEPBIND`): this never involves a served descriptor, as long as streams keep to descriptors they
//! opened or were given.
//!
//! Modules stand bottom up: plain tables and the process's state (`process.rs`), which calls nothing that watches it;
//! the steps that change both (`descriptors.rs`, `stop.rs`, `forks.rs`, `join.rs`); and the functions that the program
//! calls.
//!
//! Invariants:
//!  1. Nothing here allocates, takes a lock, or changes `errno` on a call that is served.
//!  2. If anything at the start is not as expected, the object does nothing at all.
//!  3. A forked child is a viewer of its own, as is a program it starts; a child that runs in its parent's memory is
//!     not served.
#![no_std]
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod plan;
mod harmless_syscalls;
mod thread_list;
mod loaded;
mod kernel;
mod real;
mod wrap;
mod patch;
mod request_errors;
mod read_request;
mod table;
mod deferred_handles;
mod marked_files;
mod fork_counts;
mod viewer_memory;
mod handshake;
mod process;
mod ld_preload;
mod audit;
mod deferred_detach;
mod descriptors;
mod faults;
mod stop;
mod forks;
mod join;
mod confinement;
mod loading;
mod new_descriptors;
mod written;
mod watches;
mod messages;
mod attach;
mod bytes;
mod serve_or_kernel;
mod served;
mod sigaction;
mod opened;
mod children;
mod exec;
mod passthrough;
mod start;

/// There is no caller to tell; the program must not go on with half a step done.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: an instruction that ends the process.
    unsafe { core::arch::asm!("ud2", options(noreturn)) }
}

// The C library of 2011 gave `memcpy` a new version; by the old one, which is `memmove`, the object loads everywhere.
core::arch::global_asm!(".symver memcpy, memcpy@GLIBC_2.2.5");

// The core library was built to unwind and names this function, which only the standard library has. Nothing here
// unwinds by itself; a cancelled thread's unwinding goes on to the next frame. Hidden, so that no other program's is
// replaced.
core::arch::global_asm!(
    ".hidden rust_eh_personality",
    ".globl rust_eh_personality",
    "rust_eh_personality:",
    "mov eax, 8", // _URC_CONTINUE_UNWIND
    "ret",
);
