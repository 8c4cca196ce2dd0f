//! Children: the calls that make them.
//!
//! Every offset is left to the kernel first, since the child has it too (`forks.rs`). A call that runs a program in the
//! child by itself, as `system` and `posix_spawn` do, is the same: what is inherited is not closed by all.
//!
//! A C library before version 2.39 has no `pidfd_spawn`. A program that looks for it by name finds the wrapper, so
//! there the wrapper spawns by number and opens a descriptor of that process.

use core::ffi::{c_char, c_int, c_void};

use crate::wrap::{call_real, names};
use crate::{forks, kernel, real};

names! {
    fork | __fork () -> c_int {
        forking(|| call_real!(fork() -> c_int))
    }
    _Fork() -> c_int {
        let copy = forks::begin_copy();
        let answer = call_real!(_Fork() -> c_int);
        if let Some(copy) = copy {
            forks::end_fork(copy);
        }
        answer
    }
    daemon(directory: c_int, streams: c_int) -> c_int {
        forking(|| call_real!(daemon(directory => c_int, streams => c_int) -> c_int))
    }
    forkpty(terminal: *mut c_int, name: *mut c_char, settings: *const c_void, size: *const c_void) -> c_int {
        forking(|| call_real!(forkpty(
            terminal => *mut c_int, name => *mut c_char, settings => *const c_void, size => *const c_void
        ) -> c_int))
    }
    system(command: *const c_char) -> c_int {
        forking(|| call_real!(system(command => *const c_char) -> c_int))
    }
    popen(command: *const c_char, mode: *const c_char) -> *mut c_void {
        forking(|| call_real!(popen(command => *const c_char, mode => *const c_char) -> *mut c_void))
    }
    wordexp(words: *const c_char, result: *mut c_void, flags: c_int) -> c_int {
        forking(|| call_real!(wordexp(words => *const c_char, result => *mut c_void, flags => c_int) -> c_int))
    }
    posix_spawn(
        process: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int {
        spawning(|| call_real!(posix_spawn(
            process => *mut c_int, path => *const c_char, actions => *const c_void, attributes => *const c_void,
            arguments => *const *mut c_char, environment => *const *mut c_char
        ) -> c_int))
    }
    posix_spawnp(
        process: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int {
        spawning(|| call_real!(posix_spawnp(
            process => *mut c_int, path => *const c_char, actions => *const c_void, attributes => *const c_void,
            arguments => *const *mut c_char, environment => *const *mut c_char
        ) -> c_int))
    }
    pidfd_spawn(
        process: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int {
        if !real::is_there(&real::pidfd_spawn) {
            // SAFETY: the program's arguments.
            return described(process, |number| unsafe {
                posix_spawn(number, path, actions, attributes, arguments, environment)
            });
        }
        spawning(|| call_real!(pidfd_spawn(
            process => *mut c_int, path => *const c_char, actions => *const c_void, attributes => *const c_void,
            arguments => *const *mut c_char, environment => *const *mut c_char
        ) -> c_int))
    }
    pidfd_spawnp(
        process: *mut c_int, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int {
        if !real::is_there(&real::pidfd_spawnp) {
            // SAFETY: the program's arguments.
            return described(process, |number| unsafe {
                posix_spawnp(number, path, actions, attributes, arguments, environment)
            });
        }
        spawning(|| call_real!(pidfd_spawnp(
            process => *mut c_int, path => *const c_char, actions => *const c_void, attributes => *const c_void,
            arguments => *const *mut c_char, environment => *const *mut c_char
        ) -> c_int))
    }
}

/// Spawns a process by `spawn`, which stores its number, and stores a descriptor of it in `process`. Returns the error
/// number; a process without a descriptor is ended, since its parent would not know of it.
fn described(process: *mut c_int, spawn: impl FnOnce(*mut c_int) -> c_int) -> c_int {
    let mut number = 0;
    let error = spawn(&raw mut number);
    if error != 0 {
        return error;
    }
    match kernel::open_process(number) {
        Ok(descriptor) => {
            // SAFETY: the program's place for it.
            unsafe { process.write(descriptor) };
            0
        }
        Err(error) => {
            kernel::end_child(number);
            error.0
        }
    }
}

#[inline]
fn forking<T>(call: impl FnOnce() -> T) -> T {
    let fork = forks::begin_fork();
    let answer = call();
    if let Some(fork) = fork {
        forks::end_fork(fork);
    }
    answer
}

/// Runs a call that makes a child which runs in this process's memory for a while.
#[inline]
fn spawning(call: impl FnOnce() -> c_int) -> c_int {
    let spawn = forks::begin_spawn();
    let answer = call();
    if let Some(spawn) = spawn {
        forks::end_spawn(spawn);
    }
    answer
}
