//! Passthrough: the calls that go to the real function, after a hook has brought the tables up to date.
//!
//! Each is a trampoline of a few instructions: save the registers that carry arguments, call the hook with the first
//! six of them, put the registers back, jump. So any arguments reach the real function exactly as they were, and
//! whatever it does with its frame (unwinding, never coming back) does not matter here.
//!
//! A thread that is about to use or share the kernel's offset finds it right, because it went back to the kernel for
//! good. Where only the offset is used, the descriptor is **shared**: positional reads are served still. Where the file
//! itself is read another way from then on, or may be closed unseen, it is **left** to the kernel altogether. Writes
//! need no hook: no descriptor that can write has a private offset, and no file is served by a lease while it is open
//! for writing (`written.rs`).

use core::arch::naked_asm;
use core::ffi::c_int;

use quinion_view::arena::control::Reason;
use quinion_view::viewer::sys::call;

use crate::harmless_syscalls::is_harmless;
use crate::kernel::{self, number};
use crate::messages::{Messages, descriptors_in};
use crate::real::{self, find_for_trampoline};
use crate::watches::{accesses_are_watched, is_for_accesses, marks, unmounts, watches};
use crate::written::is_for_lease;
use crate::{
    confinement, descriptors, exec, faults, forks, ld_preload, loading, patch, process, sigaction, stop,
    written,
};

/// Trampolines: `name => hook`, or `alias = real => hook`.
macro_rules! before {
    ($($(#[$doc:meta])* $name:ident = $real:ident => $hook:path;)*) => { $(
        $(#[$doc])*
        /// # Safety
        /// That of the C library's function of this name.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "call {hook}",
                "mov rax, qword ptr [rip + {real}]",
                "test rax, rax",
                "jnz 2f",
                "lea rdi, [rip + {real}]",
                "call {find}",
                "2:",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                hook = sym $hook, real = sym real::$real, find = sym find_for_trampoline,
            )
        }
    )* };
}

before! {
    ioctl = ioctl => io_controlled;
    /// Reads at the offset unless told where.
    sendfile = sendfile => sent_file;
    sendfile64 = sendfile64 => sent_file;
    /// Reads at the offset unless told where.
    splice = splice => spliced;
    copy_file_range = copy_file_range => spliced;
    /// Reads of the kernel's page cache follow.
    mmap = mmap => mapped;
    mmap64 = mmap64 => mapped;
    /// The C library reads from now on, unseen if it is not patched.
    fdopen = fdopen => streamed;
    _IO_fdopen = fdopen => streamed;
    lockf = lockf => locked;
    lockf64 = lockf64 => locked;
    sendmsg = sendmsg => sent_message;
    sendmmsg = sendmmsg => sent_messages;
    /// Changes a file without opening it.
    truncate = truncate => truncated;
    truncate64 = truncate64 => truncated;
    /// Frees the space of a file that no process has open. (`remove` calls it, or `rmdir`.)
    unlink = unlink => removed;
    unlinkat = unlinkat => removed_at;
    rename = rename => replaced;
    renameat = renameat => replaced_at;
    renameat2 = renameat2 => replaced_at;
    fcloseall = fcloseall => on_detach_all;
    /// The streams of the C library become a terminal's.
    login_tty = login_tty => terminal_taken;
    close_range = close_range => closed_range;
    closefrom = closefrom => closed_from;
    /// Makes a child with the program's own choice of what is shared.
    clone = clone => cloned;
    __clone = clone => cloned;
    /// May split the table of descriptors, or change name spaces.
    unshare = unshare => unshared;
    /// Files that are open keep it busy, the owner's among them.
    umount = umount => unmounts;
    umount2 = umount2 => unmounts;
    inotify_add_watch = inotify_add_watch => watches;
    fanotify_mark = fanotify_mark => marks;
    setns = setns => leaves_domain;
    chroot = chroot => leaves_domain;
    setuid = setuid => leaves_domain;
    seteuid = seteuid => leaves_domain;
    setreuid = setreuid => leaves_domain;
    setresuid = setresuid => leaves_domain;
    setgid = setgid => leaves_domain;
    setegid = setegid => leaves_domain;
    setregid = setregid => leaves_domain;
    setresgid = setresgid => leaves_domain;
    setgroups = setgroups => leaves_domain;
    initgroups = initgroups => leaves_domain;
    setfsuid = setfsuid => leaves_domain;
    setfsgid = setfsgid => leaves_domain;
    capset = capset => leaves_domain;
    setrlimit = setrlimit => limited;
    setrlimit64 = setrlimit64 => limited;
    prlimit = prlimit => limited_of;
    prlimit64 = prlimit64 => limited_of;
    mlockall = mlockall => all_locked;
    /// May forbid the library's system calls.
    prctl = prctl => confined;
    /// Takes a descriptor out of some process, perhaps this one.
    pidfd_getfd = pidfd_getfd => on_share_all;
    sigset = sigset => sigaction::changes_unseen;
    sigignore = sigignore => sigaction::changes_unseen;
    siginterrupt = siginterrupt => sigaction::changes_unseen;
    /// A ring reads and closes descriptors past all hooks.
    io_uring_queue_init = io_uring_queue_init => no_more;
    io_uring_queue_init_params = io_uring_queue_init_params => no_more;
    io_uring_queue_init_mem = io_uring_queue_init_mem => no_more;
    io_uring_setup = io_uring_setup => no_more;
}

/// Any system call: as the others, unless the hook has made the call.
///
/// # Safety
/// That of the C library's function of this name.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall() {
    naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
        "call {hook}",
        "test rdx, rdx",
        "jnz 3f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jnz 2f",
        "lea rdi, [rip + {real}]",
        "call {find}",
        "2:",
        "mov r11, rax",
        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "jmp r11",
        "3:",
        "add rsp, 56",
        "ret",
        hook = sym called, real = sym real::syscall, find = sym find_for_trampoline,
    )
}

#[repr(C)]
struct SyscallResult {
    answer: isize,
    is_made: usize,
}

/// The child of `vfork` runs on this very stack, so there is no frame to come back to. The return address is kept in a
/// register over the call, and child and parent return from it one after the other.
///
/// # Safety
/// That of the C library's function of this name.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn vfork() -> c_int {
    naked_asm!(
        "sub rsp, 8",
        "call {begin}",
        "add rsp, 8",
        "pop rdi",
        "mov eax, {number}",
        "syscall",
        "push rdi",
        "test rax, rax",
        "jz 2f",
        "sub rsp, 8",
        "mov rdi, rax",
        "call {end}",
        "add rsp, 8",
        "2:",
        "ret",
        begin = sym forks::begin_vfork, end = sym forks::end_vfork, number = const number::VFORK,
    )
}

/// `vfork` by its other name.
///
/// # Safety
/// As `vfork`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn __vfork() -> c_int {
    naked_asm!("jmp {vfork}", vfork = sym vfork)
}

// ---- the hooks ------------------------------------------------------------------------------------------

#[inline]
fn share(fd: usize, reason: Reason) {
    if process::is_on() {
        descriptors::share(fd as c_int, reason);
    }
}

#[inline]
fn leave(fd: usize, reason: Reason) {
    if process::is_on() {
        descriptors::detach(fd as c_int, reason);
    }
}

extern "C" fn io_controlled(fd: usize, command: usize) {
    /// Requests of terminals, and others that do not touch the offset: isatty, the window's size, close-on-exec.
    const HARMLESS: [usize; 5] = [0x5401, 0x5413, 0x5450, 0x5451, 0x5421];
    if !HARMLESS.contains(&(command & 0xffff_ffff)) {
        share(fd, Reason::Passed);
    }
}

extern "C" fn sent_file(_to: usize, from: usize, position: usize) {
    if position == 0 {
        share(from, Reason::Passed);
    }
}

extern "C" fn spliced(from: usize, position: usize) {
    if position == 0 {
        share(from, Reason::Passed);
    }
}

extern "C" fn mapped(_address: usize, _len: usize, protection: usize, flags: usize, fd: usize) {
    const MAP_SHARED: usize = 1; // a bit of MAP_SHARED_VALIDATE, too
    const MAP_ANONYMOUS: usize = 0x20;
    const PROT_EXEC: usize = 4;
    if flags & MAP_ANONYMOUS == 0 {
        if protection & PROT_EXEC != 0 && process::is_on() {
            loading::restrict_to_positional_reads(); // a loader of its own
        }
        if flags & MAP_SHARED != 0 && process::is_on() {
            written::maps(fd as c_int);
        }
        leave(fd, Reason::Mapped);
    }
}

/// The C library's streams read unseen, unless it is patched.
extern "C" fn streamed(fd: usize) {
    if !patch::is_patched() {
        leave(fd, Reason::Passed);
    }
}

extern "C" fn locked(fd: usize) {
    if process::is_on() {
        descriptors::show_offset(fd as c_int);
    }
}

fn passed_on(fd: c_int) {
    descriptors::share(fd, Reason::Passed);
}

extern "C" fn sent_message(_socket: usize, message: usize) {
    if process::is_on() && descriptors_in(message, passed_on).is_none() {
        on_share_all();
    }
}

extern "C" fn sent_messages(_socket: usize, messages: usize, count: usize) {
    if !process::is_on() {
        return;
    }
    for i in 0..(count as u32).min(1024) as usize {
        if descriptors_in(messages.wrapping_add(i * size_of::<Messages>()), passed_on).is_none() {
            return on_share_all(); // as far as the kernel gets with them
        }
    }
}

extern "C" fn truncated(path: usize) {
    if process::is_on() {
        written::before_truncate(path);
    }
}

extern "C" fn removed(path: usize) {
    written::before_removal(kernel::AT_FDCWD, path);
}

extern "C" fn removed_at(at: c_int, path: usize) {
    written::before_removal(at, path);
}

extern "C" fn replaced(_: usize, to: usize) {
    written::before_removal(kernel::AT_FDCWD, to);
}

extern "C" fn replaced_at(_: c_int, _: usize, at: c_int, to: usize) {
    written::before_removal(at, to);
}

extern "C" fn closed_range(first: usize, last: usize, flags: usize) {
    const UNSHARE: c_int = 2;
    const CLOEXEC: c_int = 4;
    if !process::is_on() {
        return;
    }
    match flags as c_int {
        0 if first as u32 <= last as u32 => descriptors::forget_range(first as u32, last as u32),
        0 | CLOEXEC => {}
        flags if flags & UNSHARE != 0 => stop::stop(Reason::Passed),
        _ => descriptors::detach_all(Reason::Passed),
    }
}

extern "C" fn closed_from(first: usize) {
    if process::is_on() {
        descriptors::forget_range((first as c_int).max(0) as u32, u32::MAX);
    }
}

extern "C" fn on_share_all() {
    if process::is_on() {
        descriptors::share_all(Reason::Passed);
    }
}

extern "C" fn on_detach_all() {
    if process::is_on() {
        descriptors::detach_all(Reason::Passed);
    }
}

extern "C" fn terminal_taken() {
    (0..3).for_each(|fd| leave(fd, Reason::Passed));
}

extern "C" fn no_more() {
    stop::stop(Reason::Passed);
}

const CLONE_THREAD_LIKE: usize = 0x0001_0500; // CLONE_THREAD, CLONE_FILES, CLONE_VM

/// Something is shared with a child that is neither by `fork` nor a thread, and cannot be followed. Not the child of a
/// `posix_spawn`, which has been counted: where the kernel has no `clone3`, or a container hides that, a patched C
/// library makes it so and comes by here.
extern "C" fn cloned(_function: usize, _stack: usize, flags: usize) {
    const EXIT_SIGNAL: usize = 0xff;
    const CLONE_PIDFD: usize = 0x1000; // by `pidfd_spawn`
    const CLONE_VM_VFORK: usize = 0x4100;
    if flags & !(EXIT_SIGNAL | CLONE_PIDFD) == CLONE_VM_VFORK && forks::is_spawning() {
        return;
    }
    if flags & CLONE_THREAD_LIKE != CLONE_THREAD_LIKE {
        stop::stop(Reason::Forked);
    }
}

/// Before an `unshare` of the thread's own descriptors, or of name spaces that say who and where a process is:
/// `CLONE_FILES`, `CLONE_NEWUSER`, `CLONE_NEWPID`.
extern "C" fn unshared(flags: usize) {
    const CLONE_FILES: usize = 0x400;
    const NEW_DOMAIN: usize = 0x1000_0000 | 0x2000_0000;
    if flags & NEW_DOMAIN != 0 {
        confinement::leave_domain();
    } else if flags & CLONE_FILES != 0 {
        stop::stop(Reason::Passed);
    }
}

extern "C" fn leaves_domain() {
    confinement::leave_domain();
}

/// The addresses of the cache would be counted.
extern "C" fn limited(resource: usize, limits: usize) {
    const UNLIMITED: u64 = u64::MAX;
    if resource as u32 as usize != kernel::RLIMIT_AS {
        return;
    }
    if process::is_on() {
        let mut soft = [0; 8];
        if !faults::read(limits, &mut soft) || u64::from_ne_bytes(soft) == UNLIMITED {
            return; // what is no address the kernel complains of
        }
    }
    confinement::give_addresses_back();
}

/// Limits of another process are not handled here: that process has to do it.
extern "C" fn limited_of(of: usize, resource: usize, limits: usize) {
    let is_own = || of as u32 == 0 || of as u32 == kernel::process();
    if limits != 0 && resource as u32 as usize == kernel::RLIMIT_AS && is_own() {
        limited(resource, limits);
    }
}

extern "C" fn all_locked() {
    confinement::give_addresses_back();
}

/// A program that is about to forbid itself system calls, or to have them caught, gets all its descriptors back before.
extern "C" fn confined(option: usize) {
    const SET_SECCOMP: u32 = 22;
    const SET_TIME_STAMP_COUNTER: u32 = 26; // which `ticks` reads
    const SET_SYSCALL_USER_DISPATCH: u32 = 59;
    // The kernel takes the lower half of the register for the option.
    if matches!(option as u32, SET_SECCOMP | SET_TIME_STAMP_COUNTER | SET_SYSCALL_USER_DISPATCH) {
        forbidden();
    }
}

/// The library's system calls may be forbidden from now on, to this program and to those that it becomes: these are to
/// be without the object, as far as they get the environment that this one was given.
fn forbidden() {
    ld_preload::withdraw();
    ld_preload::stop_checks();
    confinement::confine();
}

/// `syscall(number, a, b, c, ..)`: does as the function of that name. Calls that come back only if they fail, and those
/// with something to do after them, are made here.
extern "C" fn called(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize) -> SyscallResult {
    // The kernel takes the lower half of the register for the number.
    let number = number as u32 as usize;
    if matches!(number, number::EXECVE | number::EXECVEAT) && process::is_on() {
        return SyscallResult { answer: exec::by_number(number, [a, b, c, d, e]), is_made: 1 };
    }
    before_call(number, [a, b, c, d, e]);
    if process::is_on() && flags_of_open(number, b, c).is_some_and(written::truncates_unnoticed) {
        return SyscallResult { answer: cut_by_call(number, [a, b, c, d]), is_made: 1 };
    }
    SyscallResult { answer: 0, is_made: 0 }
}

fn flags_of_open(number: usize, b: usize, c: usize) -> Option<c_int> {
    match number {
        number::OPEN => Some(b as c_int),
        number::OPENAT | number::OPEN_BY_HANDLE_AT => Some(c as c_int),
        number::OPENAT2 => {
            // The first of `struct open_how`; the kernel complains of what cannot be read.
            let mut flags = [0; 8];
            faults::read(c, &mut flags).then(|| u64::from_ne_bytes(flags) as c_int)
        }
        _ => None,
    }
}

fn cut_by_call(number: usize, [a, b, c, d]: [usize; 4]) -> isize {
    // SAFETY: the call is the program's.
    let answer = unsafe { call(number, [a, b, c, d, 0, 0]) };
    if answer >= 0 && process::is_on() {
        written::after_open(answer as c_int, kernel::O_TRUNC);
    }
    real::answer(answer)
}

fn opens(at: c_int, path: usize, flags: c_int) {
    let _ = written::before_open(at, path, flags); // if it fails because of the owner it is not tried again
}

fn before_call(number: usize, [a, b, c, d, e]: [usize; 5]) {
    match number {
        // Also of a process that is not served.
        number::PRCTL => return confined(a),
        number::SECCOMP => return forbidden(),
        number::SETRLIMIT => return limited(a, b),
        number::PRLIMIT64 => return limited_of(a, b, c),
        number::MLOCKALL => return all_locked(),
        // One that was served no more before still has what it mapped.
        number::UNSHARE => return unshared(a),
        number if CHANGES_DOMAIN.contains(&number) => return leaves_domain(),
        _ if !process::is_on() => return,
        _ => {}
    }
    match number {
        number::RT_SIGACTION => sigaction::changes_unseen(a),
        number if is_harmless(number as u32) => {}
        number::IO_SUBMIT | number::FLOCK => {}
        number::CLOSE => descriptors::forget(a as c_int),
        number::CLOSE_RANGE => closed_range(a, b, c),
        // A descriptor whose opening was not seen is not in the table, so it is the kernel's.
        number::OPEN => opens(kernel::AT_FDCWD, a, b as c_int),
        number::OPENAT => opens(a as c_int, b, c as c_int),
        number::CREAT => opens(kernel::AT_FDCWD, a, kernel::O_WRONLY | kernel::O_TRUNC),
        number::OPENAT2 => {
            if let Some(flags) = flags_of_open(number, b, c) {
                opens(a as c_int, b, flags);
            }
        }
        number::OPEN_BY_HANDLE_AT => {}
        number::FCNTL if is_for_lease(b, c) => {
            written::wants_lease(a as c_int);
            leave(a, Reason::Unguaranteed);
        }
        number::FCNTL if is_for_accesses(b, c) => accesses_are_watched(),
        number::CLONE => cloned(0, 0, a),
        number::CLONE3 | number::FORK | number::VFORK => stop::stop(Reason::Forked),
        number::UMOUNT2 => unmounts(),
        number::INOTIFY_INIT | number::INOTIFY_INIT1 | number::FANOTIFY_INIT => {}
        number::INOTIFY_ADD_WATCH => watches(a, b, c),
        number::FANOTIFY_MARK => marks(a, b, c, d, e),
        number::PIDFD_GETFD => on_share_all(),
        number::IO_URING_SETUP => stop::stop(Reason::Passed),
        number::SENDMSG => sent_message(a, b),
        number::SENDMMSG => sent_messages(a, b, c),
        number::MMAP => mapped(a, b, c, d, e),
        number::TRUNCATE => truncated(a),
        number::UNLINK => removed(a),
        number::UNLINKAT => removed_at(a as c_int, b),
        number::RENAME => replaced(a, b),
        number::RENAMEAT | number::RENAMEAT2 => replaced_at(a as c_int, b, c as c_int, d),
        // Anything else that might name a served descriptor takes it back. A number that only looks like one costs that
        // descriptor its speed.
        _ => [a, b, c, d, e].into_iter().for_each(|argument| {
            leave(argument, Reason::Passed);
        }),
    }
}

/// The system calls by which a process gets other rights or name spaces: those above, and `landlock_restrict_self`.
const CHANGES_DOMAIN: [usize; 14] = [
    number::SETUID,
    number::SETGID,
    number::SETREUID,
    number::SETREGID,
    number::SETGROUPS,
    number::SETRESUID,
    number::SETRESGID,
    number::SETFSUID,
    number::SETFSGID,
    number::CAPSET,
    number::CHROOT,
    number::SETNS,
    number::PIVOT_ROOT,
    number::LANDLOCK_RESTRICT_SELF,
];
