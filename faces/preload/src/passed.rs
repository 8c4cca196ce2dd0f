//! Passed: the calls that go to the real function, after a word from us.
//!
//! Each is a trampoline of a few instructions: save the registers that carry
//! arguments, call the hook with the first six of them, put the registers back,
//! jump. So a call with any arguments, however many, reaches the real function
//! exactly as it was made, and whatever that does with its frame, unwinding for
//! a cancelled thread or never coming back, is not our business.
//!
//! The hooks do one thing: whoever is about to use or share the kernel's offset
//! finds it right, because it went back to the kernel for good. Where only the
//! offset is used, the descriptor is **shared**: reads that say where they
//! begin are served still. Where the file itself is read another way from then
//! on, or may be closed unseen, it is **left** to the kernel altogether. Writes
//! need no word: no descriptor that can write has an offset of ours, and no file
//! is served by a lease while it is open for writing (`written.rs`).

use core::arch::naked_asm;
use core::ffi::c_int;

use quinion::arena::control::{Operation, Reason};
use quinion::viewer::sys::call;

use crate::harmless::is_harmless;
use crate::kernel::{self, number};
use crate::opened::{Messages, descriptors_in, is_for_lease};
use crate::real::{self, find_for_trampoline};
use crate::{careful, faults, gone, patch, process, table, written};

/// Trampolines: `name => hook`, or `alias = real => hook`.
macro_rules! before {
    ($($(#[$doc:meta])* $name:ident = $real:ident => $hook:path;)*) => { $(
        $(#[$doc])*
        ///
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
    /// May ask how much is left to read.
    ioctl = ioctl => io_controlled;
    /// Reads at the offset unless told where.
    sendfile = sendfile => sent_file;
    /// As `sendfile`.
    sendfile64 = sendfile64 => sent_file;
    /// Reads at the offset unless told where.
    splice = splice => spliced;
    /// Reads at the offset unless told where.
    copy_file_range = copy_file_range => spliced;
    /// The kernel's page cache is read from now on.
    mmap = mmap => mapped;
    /// As `mmap`.
    mmap64 = mmap64 => mapped;
    /// The C library reads from now on, past us if it is not patched.
    fdopen = fdopen => streamed;
    /// As `fdopen`.
    _IO_fdopen = fdopen => streamed;
    /// Locks from the offset on.
    lockf = lockf => locked;
    /// As `lockf`.
    lockf64 = lockf64 => locked;
    /// Descriptors may be sent away.
    sendmsg = sendmsg => sent_message;
    /// As `sendmsg`.
    sendmmsg = sendmmsg => sent_messages;
    /// Changes a file without opening it.
    truncate = truncate => truncated;
    /// As `truncate`.
    truncate64 = truncate64 => truncated;
    /// Closes all streams.
    fcloseall = fcloseall => everything_left;
    /// The streams of the C library become a terminal's.
    login_tty = login_tty => terminal_taken;
    /// Closes many.
    close_range = close_range => closed_range;
    /// Closes many.
    closefrom = closefrom => closed_from;
    /// The new program inherits what is not closed.
    execve = execve => inherited_by;
    /// As `execve`.
    execv = execv => inherited_with_ours;
    /// As `execve`.
    execvp = execvp => inherited_with_ours;
    /// As `execve`.
    execvpe = execvpe => inherited_by;
    /// As `execve`.
    execl = execl => inherited_with_ours;
    /// As `execve`.
    execlp = execlp => inherited_with_ours;
    /// As `execve`.
    execle = execle => inherited;
    /// As `execve`.
    fexecve = fexecve => inherited_by;
    /// As `execve`.
    execveat = execveat => inherited_at_by;
    /// Makes a child with the program's own choice of what is shared.
    clone = clone => cloned;
    /// As `clone`.
    __clone = clone => cloned;
    /// May split the table of descriptors, or change name spaces.
    unshare = unshare => unshared;
    /// Files that are open keep it busy, the owner's among them.
    umount = umount => unmounts;
    /// As `umount`.
    umount2 = umount2 => unmounts;
    /// Wants to hear what is done to files.
    inotify_init = inotify_init => watches;
    /// As `inotify_init`.
    inotify_init1 = inotify_init1 => watches;
    /// As `inotify_init`.
    fanotify_init = fanotify_init => watches;
    /// Changes name spaces.
    setns = setns => leaves_domain;
    /// Changes what files there are.
    chroot = chroot => leaves_domain;
    /// Changes who the process is.
    setuid = setuid => leaves_domain;
    /// As `setuid`.
    seteuid = seteuid => leaves_domain;
    /// As `setuid`.
    setreuid = setreuid => leaves_domain;
    /// As `setuid`.
    setresuid = setresuid => leaves_domain;
    /// As `setuid`.
    setgid = setgid => leaves_domain;
    /// As `setuid`.
    setegid = setegid => leaves_domain;
    /// As `setuid`.
    setregid = setregid => leaves_domain;
    /// As `setuid`.
    setresgid = setresgid => leaves_domain;
    /// As `setuid`.
    setgroups = setgroups => leaves_domain;
    /// As `setuid`.
    initgroups = initgroups => leaves_domain;
    /// As `setuid`.
    setfsuid = setfsuid => leaves_domain;
    /// As `setuid`.
    setfsgid = setfsgid => leaves_domain;
    /// As `setuid`.
    capset = capset => leaves_domain;
    /// Limits what addresses there are, among other things.
    setrlimit = setrlimit => limited;
    /// As `setrlimit`.
    setrlimit64 = setrlimit64 => limited;
    /// As `setrlimit`, perhaps of another process.
    prlimit = prlimit => limited_of;
    /// As `prlimit`.
    prlimit64 = prlimit64 => limited_of;
    /// Locks all memory, and all that comes.
    mlockall = mlockall => all_locked;
    /// May forbid the system calls that we make besides the program's own.
    prctl = prctl => confined;
    /// Takes a descriptor out of some process, perhaps this one.
    pidfd_getfd = pidfd_getfd => everything_passed;
    /// Changes what a signal does inside the C library.
    sigset = sigset => faults::changes_unseen;
    /// As `sigset`.
    sigignore = sigignore => faults::changes_unseen;
    /// As `sigset`.
    siginterrupt = siginterrupt => faults::changes_unseen;
    /// A ring reads and closes descriptors past everybody.
    io_uring_queue_init = io_uring_queue_init => no_more;
    /// As above.
    io_uring_queue_init_params = io_uring_queue_init_params => no_more;
    /// As above.
    io_uring_queue_init_mem = io_uring_queue_init_mem => no_more;
    /// As above.
    io_uring_setup = io_uring_setup => no_more;
}

/// Any system call: a trampoline as above, but for a call that the hook says is made by [`cut_by_call`].
///
/// # Safety
/// That of the C library's function of this name.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall() {
    naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
        "call {hook}",
        "lea r11, [rip + {ours}]",
        "test al, al",
        "jnz 3f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jnz 2f",
        "lea rdi, [rip + {real}]",
        "call {find}",
        "2:",
        "mov r11, rax",
        "3:",
        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "jmp r11",
        hook = sym called, ours = sym cut_by_call, real = sym real::syscall, find = sym find_for_trampoline,
    )
}

/// `vfork`: the child runs on this very stack, so there is no frame to come back to. The return address
/// is kept in a register over the call, and the child and the parent return from it one after the other.
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
        begin = sym process::begin_vfork, end = sym process::end_vfork, number = const number::VFORK,
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

/// The offset is the kernel's from now on.
#[inline]
fn share(fd: usize, reason: Reason) {
    if process::is_on() {
        table::share(fd as c_int, reason);
    }
}

/// The descriptor is the kernel's from now on.
#[inline]
fn leave(fd: usize, reason: Reason) {
    if process::is_on() {
        table::detach(fd as c_int, reason);
    }
}

extern "C" fn io_controlled(fd: usize, command: usize) {
    /// What terminals are asked, and what does not touch the offset: isatty, the window's size, close-on-exec.
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
            careful::insist(); // a loader of its own
        }
        if flags & MAP_SHARED != 0 && process::is_on() {
            written::maps(fd as c_int);
        }
        leave(fd, Reason::Mapped);
    }
}

/// The C library's streams read past us, unless it is patched.
extern "C" fn streamed(fd: usize) {
    if !patch::is_patched() {
        leave(fd, Reason::Passed);
    }
}

/// The lock may begin at the offset.
extern "C" fn locked(fd: usize) {
    if process::is_on() {
        table::show_offset(fd as c_int);
    }
}

fn passed_on(fd: c_int) {
    table::share(fd, Reason::Passed);
}

extern "C" fn sent_message(_socket: usize, message: usize) {
    if process::is_on() && descriptors_in(message, passed_on).is_none() {
        everything_passed();
    }
}

extern "C" fn sent_messages(_socket: usize, messages: usize, count: usize) {
    if !process::is_on() {
        return;
    }
    for i in 0..(count as u32).min(1024) as usize {
        if descriptors_in(messages.wrapping_add(i * size_of::<Messages>()), passed_on).is_none() {
            return everything_passed(); // as far as the kernel gets with them
        }
    }
}

extern "C" fn truncated(path: usize) {
    if process::is_on() {
        written::before_truncate(path);
    }
}

extern "C" fn closed_range(first: usize, last: usize, flags: usize) {
    const UNSHARE: c_int = 2;
    const CLOEXEC: c_int = 4;
    if !process::is_on() {
        return;
    }
    match flags as c_int {
        0 if first as u32 <= last as u32 => table::forget_range(first as u32, last as u32),
        0 | CLOEXEC => {}
        flags if flags & UNSHARE != 0 => process::stop(Reason::Passed),
        _ => table::detach_all(Reason::Passed),
    }
}

extern "C" fn closed_from(first: usize) {
    if process::is_on() {
        table::forget_range((first as c_int).max(0) as u32, u32::MAX);
    }
}

extern "C" fn inherited() {
    if process::is_on() {
        table::share_all(Reason::Forked);
    }
}

/// The new program has the environment that the C library says is this one's. Where that is not patched, as in a
/// program that was started when the owner had ended, `execve` is called inside of it and does not come by here.
extern "C" fn inherited_with_ours() {
    inherited();
    gone::forget_in(real::environment() as usize);
}

/// The new program has this environment.
extern "C" fn inherited_by(_: usize, _: usize, environment: usize) {
    inherited();
    gone::forget_in(environment);
}

extern "C" fn inherited_at_by(_: usize, _: usize, _: usize, environment: usize) {
    inherited_by(0, 0, environment);
}

extern "C" fn everything_passed() {
    if process::is_on() {
        table::share_all(Reason::Passed);
    }
}

extern "C" fn everything_left() {
    if process::is_on() {
        table::detach_all(Reason::Passed);
    }
}

extern "C" fn terminal_taken() {
    (0..3).for_each(|fd| leave(fd, Reason::Passed));
}

extern "C" fn no_more() {
    process::stop(Reason::Passed);
}

const CLONE_THREAD_LIKE: usize = 0x0001_0500; // CLONE_THREAD, CLONE_FILES, CLONE_VM

/// Not `fork` and not a thread: something of the two is shared, and we cannot follow it. But for the child of a
/// `posix_spawn`, which has been counted: the C library makes it so where the kernel has no `clone3`, or a container
/// hides that, and comes by here if it is patched.
extern "C" fn cloned(_function: usize, _stack: usize, flags: usize) {
    const EXIT_SIGNAL: usize = 0xff;
    const CLONE_VM_VFORK: usize = 0x4100;
    if flags & !EXIT_SIGNAL == CLONE_VM_VFORK && process::is_spawning() {
        return;
    }
    if flags & CLONE_THREAD_LIKE != CLONE_THREAD_LIKE {
        process::stop(Reason::Forked);
    }
}

/// What an `unshare` of the thread's own descriptors, or of name spaces that say who and where a process is, is about
/// to do: `CLONE_FILES`, `CLONE_NEWUSER`, `CLONE_NEWPID`.
extern "C" fn unshared(flags: usize) {
    const CLONE_FILES: usize = 0x400;
    const NEW_DOMAIN: usize = 0x1000_0000 | 0x2000_0000;
    if flags & NEW_DOMAIN != 0 {
        process::leave_domain();
    } else if flags & CLONE_FILES != 0 {
        process::stop(Reason::Passed);
    }
}

/// The process is about to unmount something: the owner, once it has heard which files were closed, closes all that
/// nobody has open.
extern "C" fn unmounts() {
    const SETTLED_MILLIS_MAX: u32 = 100;
    if process::is_on()
        && let Some(viewer) = process::join()
    {
        viewer.settle(SETTLED_MILLIS_MAX);
        let _ = viewer.request_long(Operation::Release, [0; 3]);
    }
}

/// The process is about to watch files. It would hear of what the owner does to them, and not of its own reads that are
/// served: so none is, from here on. What the owner was told before it has done when this returns, or it is late.
extern "C" fn watches() {
    const SETTLED_MILLIS_MAX: u32 = 100;
    if let Some(viewer) = process::viewer() {
        table::detach_all(Reason::Watched);
        viewer.settle(SETTLED_MILLIS_MAX);
    }
    process::stop(Reason::Watched);
}

/// The process is about to have other rights, or to mean other things by the same names.
extern "C" fn leaves_domain() {
    process::leave_domain();
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
    process::give_addresses_back();
}

/// Of another process nothing is done: it has to do that itself, and may be none of ours.
extern "C" fn limited_of(of: usize, resource: usize, limits: usize) {
    let is_own = || of as u32 == 0 || of as u32 == kernel::process();
    if limits != 0 && resource as u32 as usize == kernel::RLIMIT_AS && is_own() {
        limited(resource, limits);
    }
}

/// The addresses of the cache would be locked, and get memory.
extern "C" fn all_locked() {
    process::give_addresses_back();
}

/// A program that is about to forbid itself system calls, or to have them caught, gets all its descriptors back before.
extern "C" fn confined(option: usize) {
    const SET_SECCOMP: u32 = 22;
    const SET_TIME_STAMP_COUNTER: u32 = 26; // which we read
    const SET_SYSCALL_USER_DISPATCH: u32 = 59;
    // The kernel takes the lower half of the register for the option.
    if matches!(option as u32, SET_SECCOMP | SET_TIME_STAMP_COUNTER | SET_SYSCALL_USER_DISPATCH) {
        forbidden();
    }
}

/// The calls that we make besides the program's own may be forbidden from now on, to this program and to those that it
/// becomes: they are to be without us, as far as it hands on the environment that it was given.
fn forbidden() {
    gone::withdraw();
    gone::look_no_more();
    process::confine();
}

/// `syscall(number, a, b, c, ..)`: what the function of that name would have said. Whether it is an open that cuts and
/// is not said to be one for writing: then there is something to do after it, too.
extern "C" fn called(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize) -> bool {
    before_call(number, a, b, c, d, e);
    process::is_on() && flags_of_open(number, b, c).is_some_and(written::cuts_unheard)
}

/// With which flags a system call opens a file, if it does.
fn flags_of_open(number: usize, b: usize, c: usize) -> Option<c_int> {
    match number as u32 as usize {
        number::OPEN => Some(b as c_int),
        number::OPENAT | number::OPEN_BY_HANDLE_AT => Some(c as c_int),
        number::OPENAT2 => {
            // The first of `struct open_how`; what cannot be read the kernel complains of.
            let mut flags = [0; 8];
            faults::read(c, &mut flags).then(|| u64::from_ne_bytes(flags) as c_int)
        }
        _ => None,
    }
}

/// Opens a file, and cuts it.
extern "C" fn cut_by_call(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
    // SAFETY: the call is the program's.
    let answer = unsafe { call(number as u32 as usize, [a, b, c, d, 0, 0]) };
    if answer >= 0 && process::is_on() {
        written::after_open(answer as c_int, kernel::O_TRUNC);
    }
    real::answer(answer)
}

/// Before a system call by number.
fn before_call(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize) {
    // The kernel takes the lower half of the register for the number.
    let number = number as u32 as usize;
    match number {
        // Also of a process that is not served.
        number::PRCTL => return confined(a),
        number::SECCOMP => return forbidden(),
        number::SETRLIMIT => return limited(a, b),
        number::PRLIMIT64 => return limited_of(a, b, c),
        number::MLOCKALL => return all_locked(),
        _ if !process::is_on() => return,
        _ => {}
    }
    match number {
        number::RT_SIGACTION => faults::changes_unseen(a),
        number if is_harmless(number as u32) => {}
        number::IO_SUBMIT | number::FLOCK => {}
        number::CLOSE => table::forget(a as c_int),
        number::CLOSE_RANGE => closed_range(a, b, c),
        number::EXECVE => inherited_by(a, b, c),
        number::EXECVEAT => inherited_at_by(a, b, c, d),
        // A descriptor that we do not see opened is not in the table, so it is the kernel's.
        number::OPEN => written::before_open(kernel::AT_FDCWD, a, b as c_int),
        number::OPENAT => written::before_open(a as c_int, b, c as c_int),
        number::CREAT => written::before_open(kernel::AT_FDCWD, a, kernel::O_WRONLY | kernel::O_TRUNC),
        number::OPENAT2 => {
            if let Some(flags) = flags_of_open(number, b, c) {
                written::before_open(a as c_int, b, flags);
            }
        }
        number::OPEN_BY_HANDLE_AT => {}
        number::FCNTL if is_for_lease(b, c) => {
            written::wants_lease(a as c_int);
            leave(a, Reason::Unguaranteed);
        }
        number::CLONE => cloned(0, 0, a),
        number::CLONE3 | number::FORK | number::VFORK => process::stop(Reason::Forked),
        number::UNSHARE => unshared(a),
        number::UMOUNT2 => unmounts(),
        number::INOTIFY_INIT | number::INOTIFY_INIT1 | number::FANOTIFY_INIT => watches(),
        number if CHANGES_DOMAIN.contains(&number) => leaves_domain(),
        number::PIDFD_GETFD => everything_passed(),
        number::IO_URING_SETUP => process::stop(Reason::Passed),
        number::SENDMSG => sent_message(a, b),
        number::SENDMMSG => sent_messages(a, b, c),
        number::MMAP => mapped(a, b, c, d, e),
        number::TRUNCATE => truncated(a),
        // Anything else that might name a served descriptor takes it back. A number that only looks like
        // one costs that descriptor its speed.
        _ => [a, b, c, d, e].into_iter().for_each(|argument| {
            leave(argument, Reason::Passed);
        }),
    }
}

/// The system calls by which a process gets other rights, or other name spaces: those of the functions above, and
/// `landlock_restrict_self`.
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
