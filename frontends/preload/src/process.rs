//! Process: whether this process is served now, and by which view of the cache.
//!
//! The switch lies in a page that the kernel clears in every forked child, however it was forked. So a child finds out
//! by itself that it is one, at the first call of a wrapper, and needs no handler for that.
//!
//! ```text
//!                attach                     stop
//!   INERT -----------------> SERVING -----------------> STOPPING ---> INERT, for good
//!   (the page of a              ^
//!    forked child)              | join: a page of its own, at the first read it could be served
//!   FORKED --settle--> CHILD ---+----> LEFT   it was refused a page, or its parent had stopped
//! ```
//!
//! | switch | meaning |
//! |---|---|
//! | INERT | not attached: wrappers only pass on |
//! | SERVING | attached |
//! | STOPPING | something happened that cannot be followed: all descriptors go back, no new ones are served |
//! | FORKED | a forked child that has made no call yet: what the tables say was its parent's |
//! | CHILD | a forked child: the tables are its own, and it is not a viewer yet |
//! | BUSY | a thread is on its way from FORKED to CHILD, or from CHILD on; or sends a descriptor to the owner |
//! | LEFT | as INERT, for good |
//!
//! When all have gone back, the switch is the constant again: this process and its children are not attached, and no
//! wrapper makes a system call of its own.
//!
//! A child is **settled** in one pass over the table: its parent has whatever it inherited, too, so it is served only
//! where the reader says the position ([`table::settle_child`]). It claims a viewer's page only when it is about to
//! attach a file (`join.rs`): most children open nothing but a program.
//!
//! A child of `vfork` runs in this memory with descriptors of its own: it must write nothing and trust nothing. While
//! one may be alive, every wrapper compares process numbers. The child of the C library's `posix_spawn` counts as such.
//!
//! **Before system calls are forbidden** to the process no thread of it may be in the middle of one of the library's.
//! So a thread that may make one is counted ([`enter`]), and then looks at the switch; a thread that is about to forbid
//! them stops the process, and then waits until no call is counted (`confinement.rs`). The count lies in the page of
//! the switch, so a child begins with none. A hit makes no system call and is not counted.
//!
//! This file is below all that makes a system call for a descriptor. It names only tables that a child begins anew
//! with. So the caller that changes the switch does what follows: one that stops gives the descriptors back
//! (`stop.rs`), as does one that forks (`forks.rs`).
//!
//! Invariants:
//!  1. The thread that is BUSY has its signals held back and waits for the owner and for forks, for a bounded time,
//!     so waiting for it ends.
//!  2. A child that shares this memory never settles, joins or changes the table.
//!  3. A forked child has no handle of its parent's, and neither the arena nor its parent's page; what it still has
//!     mapped is what the owner tells all viewers.
//!  4. The library's system calls are made by threads that are counted, in a wrapper, or before the constructor has
//!     ended.
//!  5. A read under way when its memory went, by a fork or given back, is thrown away: its descriptor is not what it
//!     was then.
//!
//! Not an invariant: that a counted thread comes back. A handler may jump out of the library's code, and a kernel's
//! read may outlast any answer of the owner's: the wait ends by the clock.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use quinion_view::arena::control::{AttachPolicy, Reason};
use quinion_view::units::FileId;
use quinion_view::viewer::Viewer;

use crate::handshake::{self, CacheLocation};
use crate::kernel::{self, SignalsHeld};
use crate::viewer_memory::{self, ViewerMappings};
use crate::{deferred_handles, fork_counts, marked_files, table};

/// Not attached, in the constant `OFF` before there is a page; in the page: a forked child.
pub const INERT: u32 = 0;

pub const SERVING: u32 = 1;

/// All descriptors go back.
pub const STOPPING: u32 = 2;

/// A forked child that is no viewer yet.
pub const CHILD: u32 = 3;

pub const BUSY: u32 = 4;

pub const LEFT: u32 = 5;

static OFF: AtomicU32 = AtomicU32::new(INERT);

/// Where the switch is: at first a constant, then a page of its own.
static SWITCH: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const OFF).cast_mut());

static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Whether this process or one that it was forked from has stopped: its children may be under the same ban.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// How many forks lie between the process that attached and this one, as far as they were settled.
static DEPTH: AtomicU32 = AtomicU32::new(0);

static NO_COUNT: AtomicU32 = AtomicU32::new(0);

/// How many threads are inside code of the library's that may make system calls.
static INSIDE: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const NO_COUNT).cast_mut());

struct Cell<T>(UnsafeCell<MaybeUninit<T>>);
// SAFETY: written before the switch says SERVING, with Release: by the constructor, or by the one thread of a forked
// child that made the switch BUSY.
unsafe impl<T> Sync for Cell<T> {}

static VIEWER: Cell<Viewer> = Cell(UnsafeCell::new(MaybeUninit::uninit()));
static PLACE: Cell<CacheLocation> = Cell(UnsafeCell::new(MaybeUninit::uninit()));

// ---- the switch, and threads that may make calls ---------------------------------------------------------------

#[inline]
pub fn switch() -> &'static AtomicU32 {
    // SAFETY: it points to a static, or to a page that is never unmapped. SeqCst, partners: the Release in `start`, and
    // `leave`, against `Inside::count`.
    unsafe { &*SWITCH.load(Ordering::SeqCst) }
}

/// A thread that may make the library's system calls, until this is dropped. Not kept over the program's own call.
pub struct Inside(&'static AtomicU32);

impl Inside {
    /// Counts the calling thread, which looks afterwards whether it still may make calls.
    pub fn count() -> Self {
        // SAFETY: it points to a static, or to a page that is never unmapped. Acquire, partner: `start`.
        let place = unsafe { &*INSIDE.load(Ordering::Acquire) };
        // SeqCst, partner: `confinement::confine`, which turns the switch off and then looks here. Either it sees this
        // thread, or this thread sees that it is off.
        place.fetch_add(1, Ordering::SeqCst);
        Self(place)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // A child that was forked by a handler inside was not counted. SeqCst, partner: `confinement::confine`.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
    }
}

/// Counts the calling thread if the table is to be kept ([`is_on`]). Else all that was served has gone back, and no
/// system call of the library's may be made.
pub fn enter() -> Option<Inside> {
    let inside = Inside::count();
    is_on().then_some(inside)
}

/// How many are counted in this process; a thread twice that is in a handler of its own.
pub fn counted_inside() -> u32 {
    // SAFETY: as in `Inside::count`, and the partner.
    let place = unsafe { &*INSIDE.load(Ordering::Acquire) };
    place.load(Ordering::SeqCst) // partner: `Inside`
}

/// Whether this is a child of `vfork`, or of `posix_spawn` before its program: nothing may be trusted or written.
#[inline]
pub fn is_vfork_child() -> bool {
    fork_counts::has_vforks() && is_other_process()
}

#[cold]
fn is_other_process() -> bool {
    let _inside = Inside::count();
    if core::ptr::eq(switch(), &OFF) {
        return true; // nothing is trusted any more
    }
    kernel::process() != PROCESS.load(Ordering::Relaxed)
}

/// The switch; INERT if nothing is to be done, never FORKED or BUSY.
#[inline]
pub fn mode() -> u32 {
    // SeqCst, partner: the exchange in `stop.rs`, against `descriptors::publish` (its head argues).
    let mode = switch().load(Ordering::SeqCst);
    match mode {
        SERVING | STOPPING => {
            if is_vfork_child() {
                INERT
            } else {
                mode
            }
        }
        _ => mode_of_child(mode),
    }
}

#[cold]
fn mode_of_child(mut mode: u32) -> u32 {
    let _inside = Inside::count();
    let page = switch();
    if core::ptr::eq(page, &OFF) {
        return INERT;
    }
    let mut turn = 0u32;
    loop {
        match mode {
            INERT => settle(page),
            LEFT => return INERT,
            // A child of `vfork` does not wait for a thread of its parent.
            _ if is_vfork_child() => return INERT,
            BUSY => {
                kernel::wait(turn);
                turn = turn.saturating_add(1);
            }
            settled => return settled,
        }
        mode = page.load(Ordering::SeqCst); // partner: as in `mode`
    }
}

/// Takes the switch from `from` to BUSY, does `work` with signals held back, and goes on to what it answers.
pub fn busy(page: &AtomicU32, from: u32, work: impl FnOnce() -> u32) {
    let _inside = Inside::count();
    if core::ptr::eq(switch(), &OFF) {
        return;
    }
    // Before the exchange: a handler that ran after it, in this thread, would wait for itself.
    let _held = SignalsHeld::new();
    // SeqCst, partner: `mode`.
    if page.compare_exchange(from, BUSY, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
        // SeqCst, partner: `mode`; also the Release for what `work` wrote.
        page.store(work(), Ordering::SeqCst);
    }
}

/// Whether the table is to be kept: this process is a viewer, or may become one.
#[inline]
pub fn is_on() -> bool {
    mode() != INERT
}

/// Whether descriptors that are opened now may be served.
#[inline]
pub fn may_serve_more() -> bool {
    matches!(mode(), SERVING | CHILD)
}

// ---- the viewer ------------------------------------------------------------------------------------------

#[inline]
pub fn viewer() -> Option<&'static Viewer> {
    match mode() {
        // SAFETY: the switch is on, so a thread that turned it on has written the viewer before, with Release; the
        // Acquire is in the load of `mode` or in `switch`.
        SERVING | STOPPING => Some(unsafe { (*VIEWER.0.get()).assume_init_ref() }),
        _ => None,
    }
}

/// Turns the switch on, in a page of its own.
pub fn start(viewer: Viewer, place: CacheLocation, memory: ViewerMappings, process: u32) -> Option<()> {
    let page = kernel::map_private(4096)?;
    if kernel::wipe_on_fork(page, 4096).is_err() {
        kernel::unmap(page, 4096);
        return None; // a kernel before 4.14: forked children could not be told
    }
    // SAFETY: the constructor runs once and no thread reads before the switch is on.
    unsafe { (*VIEWER.0.get()).write(viewer) };
    // SAFETY: as above.
    unsafe { (*PLACE.0.get()).write(place) };
    viewer_memory::hold(memory, process);
    PROCESS.store(process, Ordering::Relaxed);
    let page: NonNull<AtomicU32> = page.cast();
    // SAFETY: the page has room for more than two such words.
    INSIDE.store(unsafe { page.add(1) }.as_ptr(), Ordering::Release); // partner: `Inside::count`
    // SAFETY: a fresh page, zeroed and aligned. Release, partner: the load in `switch`.
    unsafe { page.as_ref().store(SERVING, Ordering::Release) };
    SWITCH.store(page.as_ptr(), Ordering::Release); // as above
    Some(())
}

/// # Safety
/// The calling thread is the one that is BUSY, in a process that was CHILD before.
pub unsafe fn become_viewer(joined: handshake::Joined) {
    // SAFETY: no thread reads the viewer of a process that has none, and no other thread is BUSY.
    unsafe { (*VIEWER.0.get()).write(joined.viewer) };
    viewer_memory::hold(joined.memory, PROCESS.load(Ordering::Relaxed));
}

/// Where the cache is. Only while [`is_on`].
pub fn place() -> CacheLocation {
    // SAFETY: the page exists, so the constructor has written the place.
    unsafe { (*PLACE.0.get()).assume_init() }
}

pub fn attach_policy() -> AttachPolicy {
    // SAFETY: the switch is on or was, in the process that this one was forked from, so the viewer was written; the
    // policy is the same for all viewers. A child's thread that joins meanwhile writes the same words over it, but for
    // the viewer's number, which is not read.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.attach_policy()
}

/// Whether any viewer has attached a file. Only while [`is_on`].
pub fn has_attached_files() -> bool {
    // SAFETY: as in `attach_policy`.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.has_attached_files()
}

/// Whether a viewer has attached that file, or one that looks like it. Only while [`is_on`].
pub fn is_attached(id: FileId) -> bool {
    // SAFETY: as in `attach_policy`.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.is_attached(id)
}

/// Whether a file was taken over, or looks like one that was. Only while [`is_on`].
pub fn is_taken(id: FileId) -> bool {
    // SAFETY: as in `attach_policy`.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.is_taken(id)
}

/// The owner's heartbeat count. Only while [`is_on`].
pub fn heartbeat() -> u32 {
    // SAFETY: as in `attach_policy`; each viewer of the cache sees the same heartbeat.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.heartbeat()
}

/// Counts the opening of a large file, for all processes of the cache; how many there were before. 0 if this process is
/// no viewer yet.
pub fn openings_before(id: FileId) -> u64 {
    viewer().map_or(0, |viewer| viewer.openings_before(id))
}

/// Counts why a descriptor is not served, if this process is a viewer.
pub fn count_reason(reason: Reason) {
    if let Some(viewer) = viewer() {
        viewer.count_reason(reason);
    }
}

// ---- forks, and the end --------------------------------------------------------------------------------------

#[cold]
fn settle(page: &AtomicU32) {
    let is_held = kernel::holds_back(kernel::SIGSEGV);
    busy(page, INERT, || {
        PROCESS.store(kernel::process(), Ordering::Relaxed);
        fork_counts::settle_child();
        handshake::settle_child();
        DEPTH.fetch_add(1, Ordering::Relaxed);
        deferred_handles::forget();
        table::settle_child();
        marked_files::settle_child();
        viewer_memory::settle_child(is_held);
        if STOPPED.load(Ordering::Relaxed) { LEFT } else { CHILD }
    });
}

/// How many forks lie between the process that attached and this one, as far as they were settled.
pub fn depth() -> u32 {
    DEPTH.load(Ordering::Relaxed)
}

/// Children that are forked from here on are to be no viewers.
pub fn note_stopped() {
    STOPPED.store(true, Ordering::Relaxed); // read by children, who have a copy
}

/// Everything went back. From here on no wrapper begins a system call of its own, in this process and its children: it
/// may be forbidden to them. A thread in the middle of one finds all that it looks at where it was, and is waited for
/// where that matters (`confinement.rs`).
pub fn leave() {
    SWITCH.store((&raw const OFF).cast_mut(), Ordering::SeqCst); // partners: `switch`, and `Inside::count`
}

/// The page that a forked child finds cleared, if this process or one that it was forked from ever was a viewer; a
/// child of `vfork` finds it as it was.
pub fn page() -> Option<&'static AtomicU32> {
    let inside = INSIDE.load(Ordering::Acquire); // partner: `start`
    if core::ptr::eq(inside, &raw const NO_COUNT) {
        return None;
    }
    // SAFETY: it is the second word of the page of the switch, which is never unmapped.
    Some(unsafe { &*inside.sub(1) })
}
