//! Opened: the calls that make descriptors, and the calls that make children.
//!
//! Opening for reading only makes a candidate. What can write as well keeps its
//! offset with the kernel, so only positional reads may be served.
//! Before an open that may write, the owner is told if it has the file (`written.rs`).
//!
//! A fork leaves every offset to the kernel first: the child has it too. So it
//! is with a duplicate, and with a descriptor that arrives in a message: positional
//! reads are served still.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::offset_of;

use quinion_view::arena::control::Reason;

use crate::real::{self, Real};
use crate::served::{call_real, names};
use crate::table::{self, State};
use crate::{faults, kernel, passthrough, patch, process, written};

/// A call that opens is over: what came of it.
fn opened(fd: c_int, flags: c_int, forks: u64) -> c_int {
    if fd >= 0 && process::is_on() {
        classify(fd, flags, forks);
    }
    fd
}

/// Runs a call that opens what a path names.
fn opening(at: c_int, path: *const c_char, flags: c_int, call: impl Fn() -> c_int) -> c_int {
    let before = process::forks();
    let fd = written::opening(at, path as usize, flags, call);
    opened(fd, flags, before)
}

fn classify(fd: c_int, flags: c_int, forks: u64) {
    const UNREADABLE: c_int = kernel::O_TRUNC | kernel::O_TMPFILE_BIT; // or empty, and about to be written
    const LEFT_ALONE: c_int = kernel::O_DIRECTORY | kernel::O_PATH;
    const NOT_SERVED: c_int = kernel::O_DIRECT | kernel::O_APPEND;
    written::after_open(fd, flags);
    let (reads_only, access) = (flags & kernel::O_ACCMODE == 0, flags & kernel::O_ACCMODE);
    let reads = (reads_only || access == kernel::O_RDWR) && flags & UNREADABLE == 0;
    // O_TMPFILE includes O_DIRECTORY, and O_PATH makes the kernel ignore what else is asked.
    if flags & LEFT_ALONE != 0 || !reads {
        table::opened_for_kernel(fd, State::Unknown);
    } else if flags & NOT_SERVED != 0 {
        table::opened_for_kernel(fd, State::Kernel);
        count(Reason::Flags);
    } else if fd as usize >= table::DESCRIPTORS {
        count(Reason::Number);
    } else if fd < table::FIRST {
        table::adopt(fd, false);
    } else if !reads_only {
        table::adopt(fd, true);
        count(Reason::Writable);
    } else {
        table::opened(fd, forks);
    }
}

fn count(reason: Reason) {
    if let Some(viewer) = process::viewer() {
        viewer.count_reason(reason);
    }
}

/// A descriptor has appeared that another process may have too, and of which only the kernel knows what it can do.
pub fn appeared(fd: c_int) {
    let Some(_inside) = process::enter() else { return };
    let flags = kernel::fcntl(fd, kernel::F_GETFL).unwrap_or(0) as c_int;
    if flags & (kernel::O_PATH | kernel::O_WRONLY) != 0 {
        table::opened_for_kernel(fd, State::Unknown);
    } else {
        table::adopt(fd, false);
    }
}

/// What a stream's mode asks for, as far as it may change the file.
fn before_stream(path: *const c_char, mode: *const c_char) {
    /// No more of it is looked at by the C library.
    const MODE_MAX: usize = 7;
    if !process::is_on() {
        return;
    }
    let mut letters = [0; MODE_MAX];
    for (at, letter) in letters.chunks_mut(1).enumerate() {
        // What cannot be read is a fault in the C library, if it looks so far.
        if !faults::read(mode as usize + at, letter) || letter[0] == 0 {
            break;
        }
    }
    let flags = match letters[0] {
        b'w' => kernel::O_RDWR | kernel::O_TRUNC,
        b'a' => kernel::O_RDWR,
        _ if letters.contains(&b'+') => kernel::O_RDWR,
        _ => 0,
    };
    written::before_open(kernel::AT_FDCWD, path as usize, flags);
}

/// Runs a call that makes a second number for `fd`'s description.
fn duplicating(fd: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if !process::is_on() {
        return call();
    }
    table::share(fd, Reason::Duplicated);
    let made = call();
    if made >= 0 {
        duplicated(fd, made);
    }
    made
}

/// The same for a call that gives it the number `onto`, closing what had it.
fn duplicating_onto(fd: c_int, onto: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if onto == fd || !process::is_on() {
        return call();
    }
    table::share(fd, Reason::Duplicated);
    // Not forgotten: the call may fail, and then it stays open. And not only shared: a handler that reads it when
    // the call is over must not find what it was before.
    table::detach(onto, Reason::Duplicated);
    let renumbering = process::begin_renumbering(onto);
    let made = call();
    drop(renumbering);
    if made >= 0 {
        duplicated(fd, made);
    }
    made
}

/// `made` is a duplicate of `fd` now.
fn duplicated(fd: c_int, made: c_int) {
    match table::look(fd).map(|word| word.state()) {
        Some(State::Positioned | State::Shared) => table::adopt(made, true),
        _ => table::opened_for_kernel(made, State::Unknown),
    }
}

fn cut(fd: c_int) -> c_int {
    opened(fd, kernel::O_WRONLY | kernel::O_TRUNC, 0)
}

/// A stream's descriptor is about to be used in ways we do not see, unless the C library is patched.
fn stream_is_taken(stream: *mut c_void) {
    if process::is_on() && !patch::is_patched() {
        table::detach(real::stream_fd(stream), Reason::Passed);
    }
}

fn temporary(fd: c_int) -> c_int {
    opened(fd, kernel::O_RDWR | kernel::O_TMPFILE_BIT, 0)
}

names! {
    /// Opens; a candidate if it can only read.
    open | __open (path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        opening(kernel::AT_FDCWD, path, flags, || {
            call_real!(open(path => *const c_char, flags => c_int, mode => c_uint) -> c_int)
        })
    }
    /// As `open`.
    open64 | __open64 (path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        opening(kernel::AT_FDCWD, path, flags, || {
            call_real!(open64(path => *const c_char, flags => c_int, mode => c_uint) -> c_int)
        })
    }
    /// The C library's own `open`, which is no cancellation point.
    __open_nocancel(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        let forks = process::forks();
        let fd = call_real!(__open_nocancel(path => *const c_char, flags => c_int, mode => c_uint) -> c_int);
        opened(fd, flags, forks)
    }
    /// As `__open_nocancel`.
    __open64_nocancel(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        let forks = process::forks();
        let fd = call_real!(__open64_nocancel(path => *const c_char, flags => c_int, mode => c_uint) -> c_int);
        opened(fd, flags, forks)
    }
    /// Opens; a candidate if it can only read.
    openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        opening(at, path, flags, || {
            call_real!(openat(at => c_int, path => *const c_char, flags => c_int, mode => c_uint) -> c_int)
        })
    }
    /// Opens; a candidate if it can only read.
    openat64(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        opening(at, path, flags, || {
            call_real!(openat64(at => c_int, path => *const c_char, flags => c_int, mode => c_uint) -> c_int)
        })
    }
    /// Opens; a candidate if it can only read.
    __open_2(path: *const c_char, flags: c_int) -> c_int {
        opening(kernel::AT_FDCWD, path, flags, || call_real!(__open_2(path => *const c_char, flags => c_int) -> c_int))
    }
    /// Opens; a candidate if it can only read.
    __open64_2(path: *const c_char, flags: c_int) -> c_int {
        opening(kernel::AT_FDCWD, path, flags, || {
            call_real!(__open64_2(path => *const c_char, flags => c_int) -> c_int)
        })
    }
    /// Opens; a candidate if it can only read.
    __openat_2(at: c_int, path: *const c_char, flags: c_int) -> c_int {
        opening(at, path, flags, || call_real!(__openat_2(at => c_int, path => *const c_char, flags => c_int) -> c_int))
    }
    /// Opens; a candidate if it can only read.
    __openat64_2(at: c_int, path: *const c_char, flags: c_int) -> c_int {
        opening(at, path, flags, || {
            call_real!(__openat64_2(at => c_int, path => *const c_char, flags => c_int) -> c_int)
        })
    }
    /// Opens for writing.
    creat(path: *const c_char, mode: c_uint) -> c_int {
        written::before_open(kernel::AT_FDCWD, path as usize, kernel::O_WRONLY | kernel::O_TRUNC);
        cut(call_real!(creat(path => *const c_char, mode => c_uint) -> c_int))
    }
    /// Opens for writing.
    creat64(path: *const c_char, mode: c_uint) -> c_int {
        written::before_open(kernel::AT_FDCWD, path as usize, kernel::O_WRONLY | kernel::O_TRUNC);
        cut(call_real!(creat64(path => *const c_char, mode => c_uint) -> c_int))
    }
    /// Opens what a handle names.
    open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int {
        let forks = process::forks();
        let fd = call_real!(open_by_handle_at(mount => c_int, handle => *mut c_void, flags => c_int) -> c_int);
        opened(fd, flags, forks)
    }
    /// Opens shared memory.
    shm_open(name: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        let forks = process::forks();
        opened(call_real!(shm_open(name => *const c_char, flags => c_int, mode => c_uint) -> c_int), flags, forks)
    }
    /// Makes a file in memory, which can be opened again by its number.
    memfd_create(name: *const c_char, flags: c_uint) -> c_int {
        temporary(call_real!(memfd_create(name => *const c_char, flags => c_uint) -> c_int))
    }

    /// Opens for writing.
    mkstemp(path: *mut c_char) -> c_int {
        temporary(call_real!(mkstemp(path => *mut c_char) -> c_int))
    }
    /// Opens for writing.
    mkstemp64(path: *mut c_char) -> c_int {
        temporary(call_real!(mkstemp64(path => *mut c_char) -> c_int))
    }
    /// Opens for writing.
    mkostemp(path: *mut c_char, flags: c_int) -> c_int {
        temporary(call_real!(mkostemp(path => *mut c_char, flags => c_int) -> c_int))
    }
    /// Opens for writing.
    mkostemp64(path: *mut c_char, flags: c_int) -> c_int {
        temporary(call_real!(mkostemp64(path => *mut c_char, flags => c_int) -> c_int))
    }
    /// Opens for writing.
    mkstemps(path: *mut c_char, suffix: c_int) -> c_int {
        temporary(call_real!(mkstemps(path => *mut c_char, suffix => c_int) -> c_int))
    }
    /// Opens for writing.
    mkstemps64(path: *mut c_char, suffix: c_int) -> c_int {
        temporary(call_real!(mkstemps64(path => *mut c_char, suffix => c_int) -> c_int))
    }
    /// Opens for writing.
    mkostemps(path: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
        temporary(call_real!(mkostemps(path => *mut c_char, suffix => c_int, flags => c_int) -> c_int))
    }
    /// Opens for writing.
    mkostemps64(path: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
        temporary(call_real!(mkostemps64(path => *mut c_char, suffix => c_int, flags => c_int) -> c_int))
    }

    /// A stream: unless patched the C library reads it past us, and then only writing matters.
    fopen(path: *const c_char, mode: *const c_char) -> *mut c_void {
        before_stream(path, mode);
        call_real!(fopen(path => *const c_char, mode => *const c_char) -> *mut c_void)
    }
    /// As `fopen`.
    fopen64(path: *const c_char, mode: *const c_char) -> *mut c_void {
        before_stream(path, mode);
        call_real!(fopen64(path => *const c_char, mode => *const c_char) -> *mut c_void)
    }
    /// As `fopen`; the stream's old descriptor goes back first, if it was served.
    freopen(path: *const c_char, mode: *const c_char, old: *mut c_void) -> *mut c_void {
        stream_is_taken(old);
        before_stream(path, mode);
        call_real!(freopen(path => *const c_char, mode => *const c_char, old => *mut c_void) -> *mut c_void)
    }
    /// As `freopen`.
    freopen64(path: *const c_char, mode: *const c_char, old: *mut c_void) -> *mut c_void {
        stream_is_taken(old);
        before_stream(path, mode);
        call_real!(freopen64(path => *const c_char, mode => *const c_char, old => *mut c_void) -> *mut c_void)
    }

    /// Descriptors may arrive, and some of them may write.
    recvmsg(socket: c_int, message: *mut Message, flags: c_int) -> isize {
        let answer = call_real!(recvmsg(socket => c_int, message => *mut Message, flags => c_int) -> isize);
        if answer >= 0 && process::is_on() {
            descriptors_in(message as usize, appeared);
        }
        answer
    }
    /// Descriptors may arrive, and some of them may write.
    recvmmsg(socket: c_int, messages: *mut Messages, count: c_uint, flags: c_int, time: *mut c_void) -> c_int {
        let answer = call_real!(recvmmsg(
            socket => c_int, messages => *mut Messages, count => c_uint, flags => c_int, time => *mut c_void
        ) -> c_int);
        if answer > 0 && process::is_on() {
            for i in 0..answer as usize {
                descriptors_in(messages.wrapping_add(i) as usize, appeared);
            }
        }
        answer
    }

    /// The two share their offset.
    dup(fd: c_int) -> c_int {
        duplicating(fd, || call_real!(dup(fd => c_int) -> c_int))
    }
    /// The two share their offset; the second is closed first.
    dup2 | __dup2 (fd: c_int, onto: c_int) -> c_int {
        duplicating_onto(fd, onto, || call_real!(dup2(fd => c_int, onto => c_int) -> c_int))
    }
    /// As `dup2`.
    dup3(fd: c_int, onto: c_int, flags: c_int) -> c_int {
        duplicating_onto(fd, onto, || call_real!(dup3(fd => c_int, onto => c_int, flags => c_int) -> c_int))
    }
    /// May duplicate, lock from the offset on, change flags, or ask for a lease.
    fcntl | __fcntl (fd: c_int, command: c_int, argument: usize) -> c_int {
        let call = || call_real!(fcntl(fd => c_int, command => c_int, argument => usize) -> c_int);
        controlled(fd, command, argument, call)
    }
    /// As `fcntl`.
    fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
        let call = || call_real!(fcntl64(fd => c_int, command => c_int, argument => usize) -> c_int);
        controlled(fd, command, argument, call)
    }
    /// Closes a descriptor past `close`.
    fclose | _IO_fclose (stream: *mut c_void) -> c_int {
        forget_stream(stream);
        call_real!(fclose(stream => *mut c_void) -> c_int)
    }
    /// As `fclose`.
    endmntent(stream: *mut c_void) -> c_int {
        forget_stream(stream);
        call_real!(endmntent(stream => *mut c_void) -> c_int)
    }

    /// Leaves every offset to the kernel, then forks.
    fork | __fork () -> c_int {
        forking(|| call_real!(fork() -> c_int))
    }
    /// Leaves every offset to the kernel, then forks.
    _Fork() -> c_int {
        let copy = process::begin_copy();
        let answer = call_real!(_Fork() -> c_int);
        if let Some(copy) = copy {
            process::end_fork(copy);
        }
        answer
    }
    /// Leaves every offset to the kernel, then forks and goes on in the child.
    daemon(directory: c_int, streams: c_int) -> c_int {
        forking(|| call_real!(daemon(directory => c_int, streams => c_int) -> c_int))
    }
    /// Leaves every offset to the kernel, then forks.
    forkpty(terminal: *mut c_int, name: *mut c_char, settings: *const c_void, size: *const c_void) -> c_int {
        forking(|| call_real!(forkpty(
            terminal => *mut c_int, name => *mut c_char, settings => *const c_void, size => *const c_void
        ) -> c_int))
    }
    /// Leaves every offset to the kernel, then runs a program.
    system(command: *const c_char) -> c_int {
        forking(|| call_real!(system(command => *const c_char) -> c_int))
    }
    /// Leaves every offset to the kernel, then runs a program.
    popen(command: *const c_char, mode: *const c_char) -> *mut c_void {
        forking(|| call_real!(popen(command => *const c_char, mode => *const c_char) -> *mut c_void))
    }
    /// Leaves every offset to the kernel, then runs a program.
    wordexp(words: *const c_char, result: *mut c_void, flags: c_int) -> c_int {
        forking(|| call_real!(wordexp(words => *const c_char, result => *mut c_void, flags => c_int) -> c_int))
    }
    /// Leaves every offset to the kernel, then runs a program.
    posix_spawn(
        process: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int {
        spawning(|| call_real!(posix_spawn(
            process => *mut c_int, path => *const c_char, actions => *const c_void, attributes => *const c_void,
            arguments => *const *mut c_char, environment => *const *mut c_char
        ) -> c_int))
    }
    /// Leaves every offset to the kernel, then runs a program.
    posix_spawnp(
        process: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int {
        spawning(|| call_real!(posix_spawnp(
            process => *mut c_int, path => *const c_char, actions => *const c_void, attributes => *const c_void,
            arguments => *const *mut c_char, environment => *const *mut c_char
        ) -> c_int))
    }
}

/// A stream is about to be closed. Where the C library is patched, its call of `close` tells us, when the stream has
/// written what it still holds: that goes where the descriptor's offset says, which is ours to know until then.
fn forget_stream(stream: *mut c_void) {
    if process::is_on() && !patch::is_patched() && !stream.is_null() {
        table::forget(real::stream_fd(stream));
    }
}

/// Whether a call of `fcntl` asks for a lease.
pub fn is_for_lease(command: usize, argument: usize) -> bool {
    const F_SETLEASE: c_int = 1024;
    const F_UNLCK: c_int = 2;
    // The kernel takes the lower half of the register for either.
    command as c_int == F_SETLEASE && argument as c_int != F_UNLCK
}

/// Whether a call of `fcntl` asks for a signal at each access to a file of a folder (dnotify).
pub fn is_for_accesses(command: usize, argument: usize) -> bool {
    const F_NOTIFY: c_int = 1026;
    const DN_ACCESS: c_int = 1;
    command as c_int == F_NOTIFY && argument as c_int & DN_ACCESS != 0 // the lower halves, as above
}

fn controlled(fd: c_int, command: c_int, argument: usize, call: impl FnOnce() -> c_int) -> c_int {
    const F_DUPFD: c_int = 0;
    const F_SETFL: c_int = 4;
    const F_GETLK: c_int = 5;
    const F_SETLKW: c_int = 7;
    const F_OFD_GETLK: c_int = 36;
    const F_OFD_SETLKW: c_int = 38;
    const F_DUPFD_CLOEXEC: c_int = 1030;
    match command {
        F_DUPFD | F_DUPFD_CLOEXEC => return duplicating(fd, call),
        F_SETFL if process::is_on() => table::detach(fd, Reason::Flags),
        // The lock may begin at the offset.
        F_GETLK..=F_SETLKW | F_OFD_GETLK..=F_OFD_SETLKW if process::is_on() => table::show_offset(fd),
        _ if is_for_lease(command as usize, argument) && process::is_on() => written::wants_lease(fd),
        _ if is_for_accesses(command as usize, argument) => passthrough::accesses_are_watched(),
        _ => {}
    }
    call()
}

/// Runs a call that makes a child.
#[inline]
fn forking<T>(call: impl FnOnce() -> T) -> T {
    let fork = process::begin_fork();
    let answer = call();
    if let Some(fork) = fork {
        process::end_fork(fork);
    }
    answer
}

/// Runs a call that makes a child which runs in our memory for a while.
#[inline]
fn spawning(call: impl FnOnce() -> c_int) -> c_int {
    let spawn = process::begin_spawn();
    let answer = call();
    if let Some(spawn) = spawn {
        process::end_spawn(spawn);
    }
    answer
}

/// The C library's `struct msghdr`.
#[repr(C)]
pub struct Message {
    name: *mut c_void,
    name_len: u32,
    parts: *mut c_void,
    parts_len: usize,
    control: *mut u8,
    control_len: usize,
    flags: c_int,
}

/// The C library's `struct mmsghdr`.
#[repr(C)]
pub struct Messages {
    /// The message.
    pub message: Message,
    len: c_uint,
}

/// Calls `tell` for each descriptor in the control data of the message at an address; `None` if some of that could not
/// be read. Only while [`process::is_on`].
pub fn descriptors_in(message: usize, tell: fn(c_int)) -> Option<()> {
    const HEADER: usize = 16;
    const SOL_SOCKET_RIGHTS: [u8; 8] = [1, 0, 0, 0, 1, 0, 0, 0];
    let word = |at: usize| {
        let mut bytes = [0; 8];
        faults::read(at, &mut bytes).then(|| usize::from_ne_bytes(bytes))
    };
    let control = word(message.wrapping_add(offset_of!(Message, control)))?;
    let len = word(message.wrapping_add(offset_of!(Message, control_len)))?;
    let mut at = 0;
    while control != 0 && len - at >= HEADER {
        let header = control.wrapping_add(at);
        let (bytes, kind) = (word(header)?, word(header.wrapping_add(8))?);
        if bytes < HEADER || bytes > len - at {
            break;
        }
        if kind.to_ne_bytes() == SOL_SOCKET_RIGHTS {
            for i in 0..(bytes - HEADER) / 4 {
                let mut fd = [0; 4];
                if !faults::read(header.wrapping_add(HEADER + 4 * i), &mut fd) {
                    return None;
                }
                tell(c_int::from_ne_bytes(fd));
            }
        }
        at = (at + bytes.next_multiple_of(8)).min(len);
    }
    Some(())
}
