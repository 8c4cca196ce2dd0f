//! Confinement: a process that is about to have less than it was started with gives up the cache before.
//!
//! | about to | what goes before |
//! |---|---|
//! | have other credentials or name spaces | the descriptors, and the cache's memory: it is another's from then on |
//! | be forbidden system calls | the descriptors; and no thread is in the middle of a call of the library's |
//! | have its addresses limited, or its memory locked | the descriptors, and the addresses that no thread needs |
//!
//! One thread may set a filter of system calls for all threads of the process (`SECCOMP_FILTER_FLAG_TSYNC`). So threads
//! that may make one of the library's system calls are counted (`process.rs`), and the count is waited for.
//!
//! Invariant: a process whose credentials may have changed has neither the arena nor a page, and is no owner's viewer,
//! for good.

use core::sync::atomic::{AtomicBool, Ordering};

use quinion_view::arena::control::Reason;
use quinion_view::viewer::sys::clock_millis;
use quinion_view::viewer::{LONG_MILLIS_MAX, Viewer};

use crate::kernel::{self, Access, SIGSEGV};
use crate::process::{INERT, Inside, LEFT, counted_inside, is_on, is_vfork_child, viewer};
use crate::stop::{Actions, stop, stop_with};
use crate::thread_list::BlockedBy;
use crate::viewer_memory::{PAGE, cover, mark_owner_dead, take_memory};
use crate::{faults, process, viewer_memory};

/// Whether the library's system calls may be forbidden.
static IS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Before a change of credentials or name spaces: gives all descriptors and the cache's memory back, here and for
/// children made from now on.
pub fn leave_domain() {
    if is_on() {
        stop(Reason::Domain);
    }
    let _inside = Inside::count();
    // The system calls for it may be forbidden; it has been done before, then.
    if IS_CONFINED.load(Ordering::Relaxed) && viewer_memory::is_covered() {
        return;
    }
    // One that has stopped before still has it.
    if let Some((_taken, memory)) = take_memory()
        && !cover(memory)
    {
        kernel::end_process(); // better than to go on with another's memory
    }
}

/// Before system calls are forbidden: gives all descriptors back, and returns when no thread is or will be inside code
/// of the library's that may make one.
pub fn confine() {
    /// More than the steps that do not wait for the owner take.
    const MARGIN_MILLIS: u32 = 500;
    static HAS_WAITED: AtomicBool = AtomicBool::new(false);
    if is_vfork_child() {
        return; // it forbids them to itself alone, and nothing here is its own
    }
    let millis = viewer().map_or(LONG_MILLIS_MAX, Viewer::waits_at_most) + MARGIN_MILLIS;
    stop(Reason::Passed);
    // A thread that asks again may not even look at the clock any more.
    if !HAS_WAITED.swap(true, Ordering::Relaxed) {
        wait_for_others(millis);
        // As `leave_domain` would later, when that may be forbidden. If it fails now, it is tried then.
        if let Some((_taken, memory)) = take_memory() {
            let _ = cover(memory);
        }
        // One that had given its addresses back still had the actions, and so have its children.
        faults::put_back();
    }
    IS_CONFINED.store(true, Ordering::Relaxed); // read by this thread, or by one that may be confined or not
}

fn wait_for_others(millis: u32) {
    let (mut until, mut turn) = (None, 0);
    while counted_inside() != 0 {
        let now = clock_millis();
        if now > *until.get_or_insert(now + u64::from(millis)) {
            return;
        }
        kernel::wait(turn);
        turn = turn.saturating_add(1);
    }
}

/// Before a limit of addresses, or a lock of all memory: gives all descriptors back, and the addresses of the cache, so
/// that neither counts them.
///
/// A read may be under way, in another thread, or in this one under a handler that calls this. Its copy is thrown
/// away, as its descriptor has gone back. Its faults find zeros ([`viewer_memory::fix_up_fault`]). So while a thread
/// blocks that signal, the addresses stay, with zeros there; that is looked at for a short time. Two things stay for
/// threads in which the library holds it back: the arena's first page, which says that there is no owner, and the
/// process's own page.
pub fn give_addresses_back() {
    /// For threads that sleep: longer than a request that gets no answer.
    const SLEEPERS_MILLIS_MAX: u64 = 150;
    /// For threads that run, where they outnumber the processors: a new one blocks all signals until its first turn.
    const RUNNERS_MILLIS_MAX: u64 = 2_000;
    if is_on() {
        stop_with(Reason::Limited, Actions::Stay);
    }
    let _inside = Inside::count();
    // The system calls for it may be forbidden.
    if IS_CONFINED.load(Ordering::Relaxed) || !viewer_memory::is_held() {
        return;
    }
    inherit_zeros();
    let is_held_here = kernel::holds_back(SIGSEGV);
    let Some((taken, memory)) = take_memory() else { return };
    if !cover(memory) {
        return; // there is no memory even for that: the addresses count
    }
    let [arena, _] = memory;
    if is_held_here || !faults::stay_installed() || !kernel::cover(arena.base, PAGE, Access::ReadWrite) {
        return;
    }
    mark_owner_dead(arena.base);
    let begun = clock_millis();
    let (mut turn, mut asleep_since) = (0, begun);
    loop {
        let now = clock_millis();
        match kernel::other_threads_that_block(SIGSEGV) {
            BlockedBy::None => break,
            BlockedBy::Sleepers if now < asleep_since + SLEEPERS_MILLIS_MAX => {}
            // One in the library's code is done soon, unless it waits for a processor.
            BlockedBy::Sleepers if counted_inside() > 1 && now < begun + RUNNERS_MILLIS_MAX => {}
            BlockedBy::Runner if now < begun + RUNNERS_MILLIS_MAX => asleep_since = now,
            _ => return,
        }
        kernel::wait(turn);
        turn += 1;
    }
    // SAFETY: inside the mapping, which is larger than a page.
    kernel::unmap(unsafe { arena.base.add(PAGE) }, arena.bytes as usize - PAGE);
    taken.give_up();
}

/// A process that was forked from one with zeros in the place of its memory keeps these as its own. The wiped page of
/// the switch tells it from a child of `vfork`.
fn inherit_zeros() {
    let page = process::page();
    viewer_memory::inherit_zeros(|| {
        page.is_some_and(|page| {
            page.compare_exchange(INERT, LEFT, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    });
}
