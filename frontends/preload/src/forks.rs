//! Forks: what is done before a child is made, or another program takes this one's place, and after that.
//!
//! A child has its parent's descriptors and offsets: so every offset is the kernel's before, and no descriptor gets a
//! private one until the child is there. Threads count as forking (`fork_counts.rs`) before they look at the
//! descriptors. Nothing of the library runs in the child: it finds out by itself what it is (`process.rs`).
//!
//! A child of `vfork` runs in this memory: nothing that it calls again here may change a count. So does the child of
//! the C library's `posix_spawn` and `pidfd_spawn`, which count as a `vfork`.

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use quinion_view::arena::control::Reason;

use crate::fork_counts::{self, Renumbering, Spawner};
use crate::process::{self, BUSY, INERT, enter, is_on, switch};
use crate::{descriptors, kernel, real};

/// A fork or exec that was begun, in this process or in the one it was forked from.
#[derive(Clone, Copy)]
pub struct Fork {
    depth: u32,
    copies: u32,
}

/// Gives all offsets back before a child, or the next program, shares them. `None` if there was nothing to do.
pub fn begin_fork() -> Option<Fork> {
    begin(0)
}

/// As [`begin_fork`], before the very call that makes a child with this program's code: nothing of the program's runs
/// in between.
pub fn begin_copy() -> Option<Fork> {
    begin(1)
}

fn begin(copies: u32) -> Option<Fork> {
    loop {
        if !is_on() {
            return None;
        }
        fork_counts::begin_fork(copies);
        // SeqCst, partner: the exchange in `process::busy`, whose thread looks for forks after it. One of both sees the
        // other.
        if switch().load(Ordering::SeqCst) != BUSY {
            break;
        }
        fork_counts::end_fork(copies); // the child would keep the library's descriptors
    }
    descriptors::share_all(Reason::Forked);
    Some(Fork { depth: process::depth(), copies })
}

/// Begins a renumbering; `None` if there is nothing to do. A number that the program has open is not the library's, and
/// the call that closes what had it may take long.
pub fn begin_renumbering(onto: c_int) -> Option<Renumbering> {
    const F_GETFD: usize = 1;
    loop {
        if !is_on() {
            return None;
        }
        let renumbering = Renumbering::count();
        // SeqCst, partner: as in `begin`.
        if switch().load(Ordering::SeqCst) != BUSY {
            let inside = enter();
            let is_free = inside.is_some() && kernel::fcntl(onto, F_GETFD).is_err();
            return is_free.then_some(renumbering);
        }
    }
}

/// In the child nothing is under way, but for a read that the fork interrupted, if a handler forked; what that copied
/// must not be used, so the child is settled.
pub fn end_fork(fork: Fork) {
    // A child that made no call yet has a cleared switch, and one that did is one deeper.
    if switch().load(Ordering::Relaxed) == INERT {
        is_on();
    } else if process::depth() == fork.depth {
        fork_counts::end_fork(fork.copies);
    }
}

/// As [`begin_fork`], before a child that will run in this memory.
fn begin_vfork_child() -> Option<Fork> {
    let fork = begin_fork()?;
    fork_counts::begin_vfork(); // before the child exists
    Some(fork)
}

/// A child that ran in this memory has left it.
fn end_vfork_child(fork: Fork) {
    fork_counts::end_vfork();
    end_fork(fork);
}

#[derive(Clone, Copy)]
pub struct Spawn {
    fork: Fork,
    noted: Spawner,
}

/// As [`begin_vfork_child`], before a `posix_spawn` or `pidfd_spawn` of this thread.
pub fn begin_spawn() -> Option<Spawn> {
    let fork = begin_vfork_child()?;
    let inside = enter();
    let thread = if inside.is_some() { kernel::thread() } else { 0 };
    Some(Spawn { fork, noted: Spawner::note(thread) })
}

pub fn end_spawn(spawn: Spawn) {
    spawn.noted.end();
    end_vfork_child(spawn.fork);
}

/// `false` of some threads, if very many are.
pub fn is_spawning() -> bool {
    let Some(_inside) = enter() else { return false };
    Spawner::is_noted(kernel::thread())
}

/// Before a `vfork`.
pub extern "C" fn begin_vfork() {
    let _ = begin_vfork_child(); // `end_vfork` finds out again
}

/// After a `vfork`, in the parent only. `answer` is the kernel's.
pub extern "C" fn end_vfork(answer: isize) -> isize {
    // Counted only if the switch was on: a child of `vfork` that calls this again has not counted. This memory was not
    // forked meanwhile, so the depth is the same.
    if is_on() {
        end_vfork_child(Fork { depth: process::depth(), copies: 0 });
    }
    real::answer(answer)
}
