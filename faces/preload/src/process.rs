//! Process: whether this process is served now, and what forks do to it.
//!
//! The switch lies in a page that the kernel clears in every forked child,
//! however it was forked. So a child that shares nothing with us but copies of
//! our tables finds itself switched off, and all its calls go to the kernel.
//! It needs no handler for that, and no call of ours in the child.
//!
//! A child of `vfork` is different: it runs in our memory with descriptors of
//! its own. It must write nothing and believe nothing. While one may be alive,
//! every wrapper compares process numbers.
//!
//! ```text
//!   INERT     the beginning, and every forked child: wrappers only pass on
//!   SERVING   attached
//!   STOPPING  something happened that we cannot follow: all descriptors went back, no new ones are served
//! ```

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use quinion::arena::control::Reason;
use quinion::viewer::Viewer;

use crate::{kernel, table, written};

const INERT: u32 = 0;
const SERVING: u32 = 1;
const STOPPING: u32 = 2;

static OFF: AtomicU32 = AtomicU32::new(INERT);
/// Where the switch is: at first a constant, then a page of its own.
static SWITCH: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const OFF).cast_mut());
/// The process that attached.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// How many threads are inside `vfork`, each suspended until its child has left our memory.
static VFORKS: AtomicU32 = AtomicU32::new(0);
/// Forks that were begun (high half) and of these the ones under way (low half).
static FORKS: AtomicU64 = AtomicU64::new(0);
const BEGUN: u64 = 1 << 32;

struct Place(UnsafeCell<MaybeUninit<Viewer>>);
// SAFETY: written once, by the constructor, before the switch is turned on with Release.
unsafe impl Sync for Place {}
static VIEWER: Place = Place(UnsafeCell::new(MaybeUninit::uninit()));

#[inline]
fn switch() -> &'static AtomicU32 {
    // SAFETY: it points to a static, or to a page that is never unmapped. Acquire, partner: `start`.
    unsafe { &*SWITCH.load(Ordering::Acquire) }
}

#[inline]
fn mode() -> u32 {
    // SeqCst, partner: the store in `stop`, against `table::publish` (its head argues).
    let mode = switch().load(Ordering::SeqCst);
    if mode != INERT && VFORKS.load(Ordering::Relaxed) != 0 && is_other_process() { INERT } else { mode }
}

#[cold]
fn is_other_process() -> bool {
    kernel::process() != PROCESS.load(Ordering::Relaxed)
}

/// The viewer, if descriptors of this process may be served.
#[inline]
pub fn viewer() -> Option<&'static Viewer> {
    // SAFETY: the switch is on, so the constructor has written the viewer; the Acquire is in `switch`'s
    // load or in that of the mode, the Release in `start`.
    (mode() != INERT).then(|| unsafe { (*VIEWER.0.get()).assume_init_ref() })
}

/// Whether descriptors that are opened now may be served.
#[inline]
pub fn may_serve_more() -> bool {
    mode() == SERVING
}

/// Turns the switch on, in a page of its own.
pub fn start(viewer: Viewer, process: u32) -> Option<()> {
    let page = kernel::map_private(4096)?;
    if kernel::wipe_on_fork(page, 4096).is_err() {
        kernel::unmap(page, 4096);
        return None; // a kernel before 4.14: forked children could not be told
    }
    // SAFETY: the constructor runs once and nobody reads before the switch is on.
    unsafe { (*VIEWER.0.get()).write(viewer) };
    PROCESS.store(process, Ordering::Relaxed);
    let page: NonNull<AtomicU32> = page.cast();
    // SAFETY: a fresh page, zeroed and aligned. Release, partner: the Acquire in `switch`.
    unsafe { page.as_ref().store(SERVING, Ordering::Release) };
    SWITCH.store(page.as_ptr(), Ordering::Release); // as above
    Some(())
}

/// Gives all descriptors back to the kernel, for good, and serves no new ones.
pub fn stop(reason: Reason) {
    if viewer().is_some() {
        switch().store(STOPPING, Ordering::SeqCst); // partner: `mode`
        written::shared_all();
        table::detach_all(reason);
    }
}

/// The number that [`forked_since`] compares with.
#[inline]
pub fn forks() -> u64 {
    FORKS.load(Ordering::SeqCst) // partner: `begin_fork`
}

/// Whether some thread forked, or is about to, since `before` was read: a descriptor opened meanwhile may be
/// a child's too.
pub fn forked_since(before: u64) -> bool {
    // SeqCst, partner: `begin_fork`, which counts first and then looks at the descriptors. Who has
    // published a descriptor and sees no fork here is seen by the fork that comes later.
    before as u32 != 0 || FORKS.load(Ordering::SeqCst) != before
}

/// Gives all descriptors back because a child is about to share them. `false` if there was nothing to do, and
/// [`end_fork`] must not be called.
pub fn begin_fork() -> bool {
    if viewer().is_none() {
        return false;
    }
    FORKS.fetch_add(BEGUN + 1, Ordering::SeqCst); // partner: `forked_since`
    written::shared_all();
    table::detach_all(Reason::Forked);
    true
}

/// The fork is done, in the parent. In a child the count does not matter: it is switched off.
pub fn end_fork() {
    FORKS.fetch_sub(1, Ordering::SeqCst); // partner: `forked_since`
}

/// As [`begin_fork`], before a `vfork`.
pub extern "C" fn begin_vfork() {
    if begin_fork() {
        VFORKS.fetch_add(1, Ordering::SeqCst); // before the child exists; partner: `mode`
    }
}

/// After a `vfork`, in the parent only. `answer` is the kernel's.
pub extern "C" fn end_vfork(answer: isize) -> isize {
    // Only who is switched on counted: a child of `vfork` that calls it again did not.
    if viewer().is_some() {
        VFORKS.fetch_sub(1, Ordering::SeqCst); // partner: `mode`
        end_fork();
    }
    crate::real::answer(answer)
}
