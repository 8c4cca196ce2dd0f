//! Opened: the calls that make descriptors.
//!
//! Opening for reading only makes a candidate. A descriptor that can write keeps its offset with the kernel: only
//! positional reads may be served. An open that may write is told to an owner that has the file (`written.rs`).
//!
//! A duplicate shares its offset, and a descriptor from a message may: positional reads of them are served still.

use core::ffi::{c_char, c_int, c_uint, c_void};

use quinion_view::arena::control::Reason;

use crate::messages::{Message, Messages, descriptors_in};
use crate::new_descriptors::appeared;
use crate::process::count_reason as count;
use crate::table::{self, FdState};
use crate::watches::{accesses_are_watched, is_for_accesses};
use crate::wrap::{call_real, names};
use crate::written::is_for_lease;
use crate::{
    descriptors, faults, fork_counts, forks, kernel, new_descriptors, patch, process, real, written,
};

fn opened(fd: c_int, flags: c_int, forks: u64) -> c_int {
    if fd >= 0 && process::is_on() {
        classify(fd, flags, forks);
    }
    fd
}

fn opening(at: c_int, path: *const c_char, flags: c_int, call: impl Fn() -> c_int) -> c_int {
    let before = fork_counts::forks();
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
        new_descriptors::opened_for_kernel(fd, FdState::Unknown);
    } else if flags & NOT_SERVED != 0 {
        new_descriptors::opened_for_kernel(fd, FdState::Kernel);
        count(Reason::Flags);
    } else if fd as usize >= table::DESCRIPTORS {
        count(Reason::Number);
    } else if fd < table::FIRST {
        new_descriptors::adopt(fd);
    } else if !reads_only {
        new_descriptors::adopt_counted(fd);
        count(Reason::Writable);
    } else {
        new_descriptors::opened(fd, forks);
    }
}

/// Notes an open by a stream's mode, as far as it may change the file.
fn before_stream(path: *const c_char, mode: *const c_char) {
    /// The C library reads no more of it.
    const MODE_MAX: usize = 7;
    if !process::is_on() {
        return;
    }
    let mut letters = [0; MODE_MAX];
    for (at, letter) in letters.chunks_mut(1).enumerate() {
        // A mode that cannot be read is a fault in the C library, if it looks so far.
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

fn duplicating(fd: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if !process::is_on() {
        return call();
    }
    descriptors::share(fd, Reason::Duplicated);
    let made = call();
    if made >= 0 {
        duplicated(fd, made);
    }
    made
}

fn duplicating_onto(fd: c_int, onto: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if onto == fd || !process::is_on() {
        return call();
    }
    descriptors::share(fd, Reason::Duplicated);
    // Not forgotten: the call may fail, and then it stays open. And not only shared: a handler that reads it when the
    // call is over must not find what it was before.
    descriptors::detach(onto, Reason::Duplicated);
    let renumbering = forks::begin_renumbering(onto);
    let made = call();
    drop(renumbering);
    if made >= 0 {
        duplicated(fd, made);
    }
    made
}

fn duplicated(fd: c_int, made: c_int) {
    match table::peek(fd).map(|word| word.state()) {
        Some(FdState::Positioned | FdState::Shared) => new_descriptors::adopt_counted(made),
        _ => new_descriptors::opened_for_kernel(made, FdState::Unknown),
    }
}

fn cut(fd: c_int) -> c_int {
    opened(fd, kernel::O_WRONLY | kernel::O_TRUNC, 0)
}

/// A stream's descriptor is about to be used unseen, unless the C library is patched.
fn stream_is_taken(stream: *mut c_void) {
    if process::is_on() && !patch::is_patched() {
        descriptors::detach(real::stream_fd(stream), Reason::Passed);
    }
}

fn temporary(fd: c_int) -> c_int {
    opened(fd, kernel::O_RDWR | kernel::O_TMPFILE_BIT, 0)
}

names! {
    open | __open (path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        opening(kernel::AT_FDCWD, path, flags, || {
            call_real!(open(path => *const c_char, flags => c_int, mode => c_uint) -> c_int)
        })
    }
    open64 | __open64 (path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        opening(kernel::AT_FDCWD, path, flags, || {
            call_real!(open64(path => *const c_char, flags => c_int, mode => c_uint) -> c_int)
        })
    }
    /// The C library's own `open`, which is no cancellation point.
    __open_nocancel(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        let forks = fork_counts::forks();
        let fd = call_real!(__open_nocancel(path => *const c_char, flags => c_int, mode => c_uint) -> c_int);
        opened(fd, flags, forks)
    }
    __open64_nocancel(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        let forks = fork_counts::forks();
        let fd = call_real!(__open64_nocancel(path => *const c_char, flags => c_int, mode => c_uint) -> c_int);
        opened(fd, flags, forks)
    }
    openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        opening(at, path, flags, || {
            call_real!(openat(at => c_int, path => *const c_char, flags => c_int, mode => c_uint) -> c_int)
        })
    }
    openat64(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        opening(at, path, flags, || {
            call_real!(openat64(at => c_int, path => *const c_char, flags => c_int, mode => c_uint) -> c_int)
        })
    }
    __open_2(path: *const c_char, flags: c_int) -> c_int {
        opening(kernel::AT_FDCWD, path, flags, || call_real!(__open_2(path => *const c_char, flags => c_int) -> c_int))
    }
    __open64_2(path: *const c_char, flags: c_int) -> c_int {
        opening(kernel::AT_FDCWD, path, flags, || {
            call_real!(__open64_2(path => *const c_char, flags => c_int) -> c_int)
        })
    }
    __openat_2(at: c_int, path: *const c_char, flags: c_int) -> c_int {
        opening(at, path, flags, || call_real!(__openat_2(at => c_int, path => *const c_char, flags => c_int) -> c_int))
    }
    __openat64_2(at: c_int, path: *const c_char, flags: c_int) -> c_int {
        opening(at, path, flags, || {
            call_real!(__openat64_2(at => c_int, path => *const c_char, flags => c_int) -> c_int)
        })
    }
    creat(path: *const c_char, mode: c_uint) -> c_int {
        written::before_open(kernel::AT_FDCWD, path as usize, kernel::O_WRONLY | kernel::O_TRUNC);
        cut(call_real!(creat(path => *const c_char, mode => c_uint) -> c_int))
    }
    creat64(path: *const c_char, mode: c_uint) -> c_int {
        written::before_open(kernel::AT_FDCWD, path as usize, kernel::O_WRONLY | kernel::O_TRUNC);
        cut(call_real!(creat64(path => *const c_char, mode => c_uint) -> c_int))
    }
    open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int {
        let forks = fork_counts::forks();
        let fd = call_real!(open_by_handle_at(mount => c_int, handle => *mut c_void, flags => c_int) -> c_int);
        opened(fd, flags, forks)
    }
    shm_open(name: *const c_char, flags: c_int, mode: c_uint) -> c_int {
        let forks = fork_counts::forks();
        opened(call_real!(shm_open(name => *const c_char, flags => c_int, mode => c_uint) -> c_int), flags, forks)
    }
    /// Makes a file in memory, which can be opened again by its number.
    memfd_create(name: *const c_char, flags: c_uint) -> c_int {
        temporary(call_real!(memfd_create(name => *const c_char, flags => c_uint) -> c_int))
    }

    mkstemp(path: *mut c_char) -> c_int {
        temporary(call_real!(mkstemp(path => *mut c_char) -> c_int))
    }
    mkstemp64(path: *mut c_char) -> c_int {
        temporary(call_real!(mkstemp64(path => *mut c_char) -> c_int))
    }
    mkostemp(path: *mut c_char, flags: c_int) -> c_int {
        temporary(call_real!(mkostemp(path => *mut c_char, flags => c_int) -> c_int))
    }
    mkostemp64(path: *mut c_char, flags: c_int) -> c_int {
        temporary(call_real!(mkostemp64(path => *mut c_char, flags => c_int) -> c_int))
    }
    mkstemps(path: *mut c_char, suffix: c_int) -> c_int {
        temporary(call_real!(mkstemps(path => *mut c_char, suffix => c_int) -> c_int))
    }
    mkstemps64(path: *mut c_char, suffix: c_int) -> c_int {
        temporary(call_real!(mkstemps64(path => *mut c_char, suffix => c_int) -> c_int))
    }
    mkostemps(path: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
        temporary(call_real!(mkostemps(path => *mut c_char, suffix => c_int, flags => c_int) -> c_int))
    }
    mkostemps64(path: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
        temporary(call_real!(mkostemps64(path => *mut c_char, suffix => c_int, flags => c_int) -> c_int))
    }

    /// Unless patched the C library reads the stream unseen, and then only writing matters.
    fopen(path: *const c_char, mode: *const c_char) -> *mut c_void {
        before_stream(path, mode);
        call_real!(fopen(path => *const c_char, mode => *const c_char) -> *mut c_void)
    }
    fopen64(path: *const c_char, mode: *const c_char) -> *mut c_void {
        before_stream(path, mode);
        call_real!(fopen64(path => *const c_char, mode => *const c_char) -> *mut c_void)
    }
    /// The stream's old descriptor goes back first, if it was served.
    freopen(path: *const c_char, mode: *const c_char, old: *mut c_void) -> *mut c_void {
        stream_is_taken(old);
        before_stream(path, mode);
        call_real!(freopen(path => *const c_char, mode => *const c_char, old => *mut c_void) -> *mut c_void)
    }
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

    dup(fd: c_int) -> c_int {
        duplicating(fd, || call_real!(dup(fd => c_int) -> c_int))
    }
    dup2 | __dup2 (fd: c_int, onto: c_int) -> c_int {
        duplicating_onto(fd, onto, || call_real!(dup2(fd => c_int, onto => c_int) -> c_int))
    }
    dup3(fd: c_int, onto: c_int, flags: c_int) -> c_int {
        duplicating_onto(fd, onto, || call_real!(dup3(fd => c_int, onto => c_int, flags => c_int) -> c_int))
    }
    /// May duplicate, lock from the offset on, change flags, or ask for a lease.
    fcntl | __fcntl (fd: c_int, command: c_int, argument: usize) -> c_int {
        let call = || call_real!(fcntl(fd => c_int, command => c_int, argument => usize) -> c_int);
        controlled(fd, command, argument, call)
    }
    fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
        let call = || call_real!(fcntl64(fd => c_int, command => c_int, argument => usize) -> c_int);
        controlled(fd, command, argument, call)
    }
    fclose | _IO_fclose (stream: *mut c_void) -> c_int {
        forget_stream(stream);
        call_real!(fclose(stream => *mut c_void) -> c_int)
    }
    endmntent(stream: *mut c_void) -> c_int {
        forget_stream(stream);
        call_real!(endmntent(stream => *mut c_void) -> c_int)
    }
}

/// A stream is about to be closed. Where the C library is patched, its call of `close` reaches the library after the
/// stream has written the rest, at the descriptor's private offset.
fn forget_stream(stream: *mut c_void) {
    if process::is_on() && !patch::is_patched() && !stream.is_null() {
        descriptors::forget(real::stream_fd(stream));
    }
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
        F_SETFL if process::is_on() => descriptors::detach(fd, Reason::Flags),
        // The lock may begin at the offset.
        F_GETLK..=F_SETLKW | F_OFD_GETLK..=F_OFD_SETLKW if process::is_on() => descriptors::show_offset(fd),
        _ if is_for_lease(command as usize, argument) && process::is_on() => written::wants_lease(fd),
        _ if is_for_accesses(command as usize, argument) => accesses_are_watched(),
        _ => {}
    }
    call()
}
