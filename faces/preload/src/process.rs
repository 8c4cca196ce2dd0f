//! Process: whether this process is served now, and what forks do to it.
//!
//! The switch lies in a page that the kernel clears in every forked child,
//! however it was forked. So a child finds out by itself that it is one, at the
//! first call of ours that it makes, and needs no handler for that.
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
//! | STOPPING | something happened that we cannot follow: all descriptors go back, no new ones are served |
//! | FORKED | a forked child that has made no call yet: what the tables say was its parent's |
//! | CHILD | a forked child: the tables are its own, and it is not a viewer yet |
//! | BUSY | a thread is on its way from FORKED to CHILD, or from CHILD on; or sends a descriptor to the owner |
//! | LEFT | as INERT, for good |
//!
//! When all have gone back, the switch is the constant again: the process is not attached, nor are those that are
//! forked from it, and no wrapper makes a system call of its own.
//!
//! A child is **settled** in one pass over the table: whatever it inherited has
//! an offset that its parent has too, so it is served only where the reader
//! says the position ([`table::settle_child`]). It claims a viewer's page only
//! when it is about to attach a file: most children open nothing but a program.
//! From then on a hit costs what it costs anywhere.
//!
//! A child of `vfork` is different: it runs in our memory with descriptors of
//! its own. It must write nothing and believe nothing. While one may be alive,
//! every wrapper compares process numbers. What the C library's `posix_spawn`
//! does in its child is the same, so it counts as a `vfork`.
//!
//! **Before system calls are forbidden** to the process no thread of it may be in the middle of one of ours: a filter
//! may be set for all threads by one of them. So a thread that may make one is counted ([`enter`]), and looks at the
//! switch after that; a thread that is about to forbid them stops, and then waits until no call is counted any more
//! ([`confine`]). The count lies in the page of the switch, so a child begins with none. A hit makes no system call and
//! is not counted.
//!
//! Invariants:
//!  1. The thread that is BUSY has its signals held back and waits for the owner and for forks, for a bounded time,
//!     so waiting for it ends.
//!  2. A child that shares our memory never settles, joins or changes the table.
//!  3. A forked child has no handle of its parent's, and neither the arena nor its parent's page; what it still has
//!     mapped is what the owner tells all viewers.
//!  4. A process whose credentials may have changed has neither, and is no owner's viewer for good.
//!  5. Our system calls are made by threads that are counted, in a wrapper, or before the constructor has ended.
//!  6. What a read brought that was under way when the memory it reads went, by a fork or given back, is thrown away:
//!     its descriptor is not what it was then.
//!
//! Not an invariant: that a fault is [mended](mend) by a thread that is counted: a hit may fault long after the
//! addresses went back and the ban came. Nor that a thread that is counted comes back: a handler may jump out of our
//! code, and the wait for it ends by the clock; so does that for a read of the kernel's own that takes longer than any
//! answer of the owner's.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use quinion_view::arena::control::{AttachPolicy, Reason};
use quinion_view::arena::{Header, OWNER_ENDED};
use quinion_view::viewer::sys::clock_millis;
use quinion_view::viewer::{LONG_MILLIS_MAX, Mapped, Viewer};

use crate::kernel::{self, Access, NoWelcome, SignalsHeld};
use crate::start::{CacheLocation, ViewerMappings};
use crate::thread_list::BlockedBy;
use crate::{deferred_detach, faults, patch, start, table, written};

/// In the page: a forked child. In its constant, before there is a page: not attached.
const INERT: u32 = 0;
const SERVING: u32 = 1;
const STOPPING: u32 = 2;
const CHILD: u32 = 3;
const BUSY: u32 = 4;
const LEFT: u32 = 5;

static OFF: AtomicU32 = AtomicU32::new(INERT);
/// Where the switch is: at first a constant, then a page of its own.
static SWITCH: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const OFF).cast_mut());
/// The process that attached, or was settled.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Whether this process or one that it was forked from has stopped: its children may be under the same ban.
static STOPPED: AtomicBool = AtomicBool::new(false);
/// How many forks lie between the process that attached and this one, as far as they were settled.
static DEPTH: AtomicU32 = AtomicU32::new(0);
/// How many threads are inside `vfork`, each suspended until its child has left our memory.
static VFORKS: AtomicU32 = AtomicU32::new(0);
/// The threads inside `posix_spawn`, 0 where there is none. Each looks for itself alone, so no order is needed.
static SPAWNERS: [AtomicU32; 16] = [const { AtomicU32::new(0) }; 16];
/// Forks and execs that were begun (high half) and of these the ones under way (low half).
static FORKS: AtomicU64 = AtomicU64::new(0);
const BEGUN: u64 = 1 << 32;
/// Threads in the very call that copies the process, or in one that gives a descriptor a number that is chosen.
static COPYING: AtomicU32 = AtomicU32::new(0);

/// With [`LATE`], the owner's heartbeat at which a child waited for it in vain.
static LATE_AT: AtomicU64 = AtomicU64::new(0);
const LATE: u64 = 1 << 32;

/// In place of the page's count before there is a page.
static NO_COUNT: AtomicU32 = AtomicU32::new(0);
/// How many threads are inside code of ours that may make system calls.
static INSIDE: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const NO_COUNT).cast_mut());
const PAGE: usize = 4096;

struct Cell<T>(UnsafeCell<MaybeUninit<T>>);
// SAFETY: written before the switch says SERVING, with Release: by the constructor, or by the one thread of a forked
// child that made the switch BUSY.
unsafe impl<T> Sync for Cell<T> {}
static VIEWER: Cell<Viewer> = Cell(UnsafeCell::new(MaybeUninit::uninit()));
static PLACE: Cell<CacheLocation> = Cell(UnsafeCell::new(MaybeUninit::uninit()));
static MEMORY: Cell<ViewerMappings> = Cell(UnsafeCell::new(MaybeUninit::uninit()));
/// The process that has what is written there; 0 if none has. With [`TAKEN`] while a thread of it changes that.
static MEMORY_OF: AtomicU32 = AtomicU32::new(0);
/// No process has so large a number.
const TAKEN: u32 = 1 << 31;
/// Whether there are zeros in its place.
static IS_COVERED: AtomicBool = AtomicBool::new(false);
/// Where what is written there is, or was, and where the same was before: that of the process this one was forked from.
/// The arena first, each time; its first byte's address, and its bytes.
static PLACES: [[AtomicUsize; 2]; 4] = [const { [const { AtomicUsize::new(0) }; 2] }; 4];
/// Whether system calls that are not the program's own may be forbidden.
static IS_CONFINED: AtomicBool = AtomicBool::new(false);

#[inline]
fn switch() -> &'static AtomicU32 {
    // SAFETY: it points to a static, or to a page that is never unmapped. SeqCst, partners: the Release in `start`, and
    // `leave`, against `Inside::count`.
    unsafe { &*SWITCH.load(Ordering::SeqCst) }
}

/// A thread that may make system calls of ours, until this is dropped. Not to be kept over the program's own call.
pub struct Inside(&'static AtomicU32);

impl Inside {
    /// Counts the calling thread. Whether it still may make calls is to be looked at after that.
    pub fn count() -> Self {
        // SAFETY: it points to a static, or to a page that is never unmapped. Acquire, partner: `start`.
        let place = unsafe { &*INSIDE.load(Ordering::Acquire) };
        // SeqCst, partner: `confine`, which turns the switch off and then looks here. Either it sees us, or we see that
        // it is off.
        place.fetch_add(1, Ordering::SeqCst);
        Self(place)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // A child that was forked by a handler inside was not counted. SeqCst, partner: `confine`.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
    }
}

/// Counts the calling thread if the table is to be kept ([`is_on`]). Else there is nothing to do: all that was served
/// has gone back, and no system call of ours may be made.
pub fn enter() -> Option<Inside> {
    let inside = Inside::count();
    is_on().then_some(inside)
}

/// Whether we are a child of `vfork`, or of `posix_spawn` before its program: nothing may be believed or written.
#[inline]
fn is_vfork_child() -> bool {
    VFORKS.load(Ordering::Relaxed) != 0 && is_other_process()
}

#[cold]
fn is_other_process() -> bool {
    let _inside = Inside::count();
    if core::ptr::eq(switch(), &OFF) {
        return true; // nothing is believed any more
    }
    kernel::process() != PROCESS.load(Ordering::Relaxed)
}

/// The switch; INERT if nothing is to be done, never FORKED or BUSY.
#[inline]
fn mode() -> u32 {
    // SeqCst, partner: the store in `stop`, against `table::publish` (its head argues).
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

/// What the switch says that is not plainly attached.
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
            // A guest does not wait for a thread of the process it is in.
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
fn busy(page: &AtomicU32, from: u32, work: impl FnOnce() -> u32) {
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

/// Waits until no thread is in the middle of a fork, some milliseconds at most: its child would keep descriptors that
/// are ours for a moment. Called while BUSY, which keeps further forks from beginning. A thread in the very call that
/// makes the child, or that duplicates a descriptor onto a number, waits for nothing of ours. So it is waited for
/// longer: it may have no processor.
fn wait_for_forks() {
    /// About 10 ms. A child of `vfork` counts until it has its program; its descriptors were copied long before. And a
    /// thread that forks may be in a handler of the program's (`pthread_atfork`), which may wait for us; where the C
    /// library is patched it comes by here once more after that.
    const TURNS_MAX: u32 = 200;
    const COPYING_MILLIS_MAX: u64 = 1_000;
    // SeqCst twice, partner: the additions in `begin`.
    (0..TURNS_MAX).take_while(|_| FORKS.load(Ordering::SeqCst) as u32 != 0).for_each(kernel::wait);
    let mut until = None;
    while COPYING.load(Ordering::SeqCst) != 0 {
        let now = clock_millis();
        if now >= *until.get_or_insert(now + COPYING_MILLIS_MAX) {
            return;
        }
        kernel::wait(TURNS_MAX);
    }
}

/// The first call in a forked child: its tables become its own.
#[cold]
fn settle(page: &AtomicU32) {
    let is_held = kernel::holds_back(kernel::SIGSEGV);
    busy(page, INERT, || {
        PROCESS.store(kernel::process(), Ordering::Relaxed);
        // What other threads of the parent were in the middle of is not under way here.
        VFORKS.store(0, Ordering::Relaxed);
        FORKS.store(0, Ordering::Relaxed);
        COPYING.store(0, Ordering::Relaxed);
        LATE_AT.store(0, Ordering::Relaxed);
        SPAWNERS.iter().for_each(|place| place.store(0, Ordering::Relaxed));
        DEPTH.fetch_add(1, Ordering::Relaxed);
        table::settle_child();
        written::settle_child();
        // A read that the fork interrupted, in a handler, goes on when that returns. What it looks at with its signals
        // held back, or stores to, has to be there; what else it reads of the arena `mend` answers.
        if MEMORY_OF.swap(0, Ordering::Relaxed) != 0 {
            let [arena, own] = memory();
            // All of it, if the fault would not come to us.
            let bytes = if is_held { arena.bytes as usize } else { PAGE };
            mend_pages(arena.base.as_ptr() as usize, bytes, true);
            let _ = kernel::map_where_nothing_is(own.base.as_ptr() as usize, own.bytes as usize);
        }
        if STOPPED.load(Ordering::Relaxed) { LEFT } else { CHILD }
    });
}

/// The viewer, if this process has one.
#[inline]
pub fn viewer() -> Option<&'static Viewer> {
    match mode() {
        // SAFETY: the switch is on, so a thread that turned it on has written the viewer before, with Release; the
        // Acquire is in the load of `mode` or in `switch`.
        SERVING | STOPPING => Some(unsafe { (*VIEWER.0.get()).assume_init_ref() }),
        _ => None,
    }
}

/// The viewer, which a forked child becomes now if it is none yet: it is about to do something of which the owner has
/// to be told.
pub fn join() -> Option<&'static Viewer> {
    join_if(LONG_MILLIS_MAX, || true)
}

/// As [`join`], to be served reads. A child that has other threads by now is served none: they would notice the
/// descriptors by which it becomes a viewer. Nor is one that has waited in vain: it would at each file.
pub fn join_to_read() -> Option<&'static Viewer> {
    let was_late = LATE_AT.load(Ordering::Relaxed) != 0;
    if was_late { viewer() } else { join_if(start::WELCOME_MILLIS, kernel::is_only_thread) }
}

/// `millis`: how long the owner is waited for. A child that it refuses is no viewer for good. One for which it was too
/// late may have something to tell when its heartbeat has risen; that is tried once.
fn join_if(millis: u32, may_join: impl FnOnce() -> bool) -> Option<&'static Viewer> {
    if mode() == CHILD && !was_late_at(heartbeat()) {
        busy(switch(), CHILD, || {
            let beat = heartbeat();
            if !may_join() || was_late_at(beat) {
                return CHILD;
            }
            wait_for_forks();
            // SAFETY: the page exists, so the constructor has written the place.
            let place = unsafe { (*PLACE.0.get()).assume_init() };
            let joined = match start::join_as_child(&place, millis) {
                Ok(joined) => joined,
                Err(NoWelcome::Refused) => return LEFT,
                Err(NoWelcome::Late) => {
                    let is_first = LATE_AT.swap(LATE | u64::from(beat), Ordering::Relaxed) == 0; // one word
                    return if is_first { CHILD } else { LEFT };
                }
            };
            patch::count(&joined.viewer);
            // SAFETY: no thread reads the viewer of a process that has none, and no other thread is BUSY.
            unsafe { (*VIEWER.0.get()).write(joined.viewer) };
            hold(joined.memory, PROCESS.load(Ordering::Relaxed));
            SERVING
        });
    }
    viewer()
}

/// Whether this child has waited in vain for the owner at this heartbeat.
fn was_late_at(beat: u32) -> bool {
    LATE_AT.load(Ordering::Relaxed) == LATE | u64::from(beat)
}

/// Sends a descriptor to the owner; the ticket for it. While the connection is open the number that it has is ours, so
/// all that open, duplicate or close descriptors wait. `None`: the owner did not take it in time.
pub fn send(descriptor: c_int) -> Option<u32> {
    /// How often a thread that finds another one sending tries again.
    const TURNS_MAX: u32 = 4;
    let (mut ticket, mut has_tried) = (None, false);
    for _ in 0..TURNS_MAX {
        if has_tried || mode() != SERVING {
            break;
        }
        busy(switch(), SERVING, || {
            wait_for_forks();
            // SAFETY: the page exists, so the constructor has written the place.
            ticket = start::send(&unsafe { (*PLACE.0.get()).assume_init() }, descriptor);
            has_tried = true;
            SERVING
        });
    }
    ticket
}

/// How readily files are taken over. Only while [`is_on`].
pub fn attach_policy() -> AttachPolicy {
    // SAFETY: the switch is on or was, in the process that this one was forked from, so the viewer was written; what is
    // asked is the same for all viewers. A child's thread that joins meanwhile writes the same words over it, but for
    // the viewer's number, which is not asked for.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.attach_policy()
}

/// Whether any viewer has attached a file. Only while [`is_on`].
pub fn has_attached_files() -> bool {
    // SAFETY: as in `attach_policy`.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.has_attached_files()
}

/// Whether a viewer has attached that file, or one that looks like it. Only while [`is_on`].
pub fn is_attached(device: u64, inode: u64) -> bool {
    // SAFETY: as in `attach_policy`.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.is_attached(device, inode)
}

/// The owner's heartbeat: how often it has counted. Only while [`is_on`].
fn heartbeat() -> u32 {
    // SAFETY: as in `attach_policy`; each viewer of the cache sees the same heartbeat.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.heartbeat()
}

/// Whether a file was taken over, or looks like one that was. Only while [`is_on`].
pub fn is_taken(device: u64, inode: u64) -> bool {
    // SAFETY: as in `attach_policy`.
    unsafe { (*VIEWER.0.get()).assume_init_ref() }.is_taken(device, inode)
}

/// Counts the opening of a large file, for all processes of the cache; how many there were before. 0 if this process is
/// no viewer yet.
pub fn openings_before(device: u64, inode: u64) -> u64 {
    viewer().map_or(0, |viewer| viewer.openings_before(device, inode))
}

/// Counts why a descriptor is not served, if this process is a viewer.
pub fn count_reason(reason: Reason) {
    if let Some(viewer) = viewer() {
        viewer.count_reason(reason);
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
    hold(memory, process);
    PROCESS.store(process, Ordering::Relaxed);
    let page: NonNull<AtomicU32> = page.cast();
    // SAFETY: the page has room for more than two such words.
    INSIDE.store(unsafe { page.add(1) }.as_ptr(), Ordering::Release); // partner: `Inside::count`
    // SAFETY: a fresh page, zeroed and aligned. Release, partner: the load in `switch`.
    unsafe { page.as_ref().store(SERVING, Ordering::Release) };
    SWITCH.store(page.as_ptr(), Ordering::Release); // as above
    Some(())
}

/// From now on `process` has this memory, and no other.
fn hold(memory: ViewerMappings, process: u32) {
    let place = |Mapped { base, bytes }: Mapped| [base.as_ptr() as usize, bytes as usize];
    let before = [0, 1].map(|at: usize| [0, 1].map(|word: usize| PLACES[at][word].load(Ordering::Relaxed)));
    let places = [place(memory.0[0]), place(memory.0[1]), before[0], before[1]];
    for (to, from) in PLACES.iter().zip(places) {
        // Read by the handler of a thread that reads what lies there, after what made it a reader.
        to.iter().zip(from).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
    }
    // SAFETY: no thread reads what no process has, and one thread is about to have it: the constructor, or the
    // thread that is BUSY.
    unsafe { (*MEMORY.0.get()).write(memory) };
    IS_COVERED.store(false, Ordering::Relaxed); // the next orders it
    MEMORY_OF.store(process, Ordering::Release); // partner: `take_memory`
}

/// What was given last. Only if [`MEMORY_OF`] has said that there is some.
fn memory() -> [Mapped; 2] {
    // SAFETY: the thread that said that there is some has written it before.
    let ViewerMappings(memory) = unsafe { (*MEMORY.0.get()).assume_init() };
    memory
}

/// The memory of this process, for the caller alone until the first of the two is dropped: then there is none any more,
/// unless it is said to stay. A child of `vfork` has its parent's, which goes on; and a forked one has not inherited
/// it, whatever the word says: its parent's thread that took it is not here to give it back.
fn take_memory() -> Option<(MappingsClaim, [Mapped; 2])> {
    let mut turn = 0;
    loop {
        let of = MEMORY_OF.load(Ordering::Acquire); // partner: the Release of the thread that joined, or took it before
        if of == 0 || of & !TAKEN != kernel::process() {
            return None;
        }
        if of & TAKEN != 0 {
            kernel::wait(turn); // the thread that has taken it has its signals held back, and waits for none for long
            turn = turn.saturating_add(1);
            continue;
        }
        let held = SignalsHeld::new();
        // Acquire, partner: as above.
        if MEMORY_OF.compare_exchange(of, of | TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return Some((MappingsClaim { of, _held: held }, memory()));
        }
    }
}

/// A process's memory that is being changed.
struct MappingsClaim {
    /// Whose it is then.
    of: u32,
    _held: SignalsHeld,
}

impl Drop for MappingsClaim {
    fn drop(&mut self) {
        MEMORY_OF.store(self.of, Ordering::Release); // partner: `take_memory`
    }
}

/// Puts zeros in the place of the memory, if that was not done before; whether they are there. Another thread may be in
/// the middle of a read: it finds zeros there, which are the descriptor of nothing, and asks the kernel; or of a
/// question, which it gives up.
fn cover([arena, own]: [Mapped; 2]) -> bool {
    if !IS_COVERED.load(Ordering::Relaxed) {
        let covered = [(arena, Access::Read), (own, Access::ReadWrite)]
            .map(|(map, access)| kernel::cover(map.base, map.bytes as usize, access));
        IS_COVERED.store(covered == [true; 2], Ordering::Relaxed); // ordered by `MEMORY_OF`
    }
    IS_COVERED.load(Ordering::Relaxed)
}

/// What becomes of the two signals' actions when a process is served no more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Actions {
    /// The kernel has the program's own again.
    Back,
    /// They stay ours: what a read under way looks at may be gone.
    Stay,
}

/// Gives all descriptors back to the kernel, for good, and serves no new ones.
pub fn stop(reason: Reason) {
    stop_with(reason, Actions::Back);
}

fn stop_with(reason: Reason, actions: Actions) {
    let _inside = Inside::count();
    match mode() {
        from @ (SERVING | STOPPING) => {
            STOPPED.store(true, Ordering::Relaxed); // read by children, who have a copy
            // SeqCst, partner: `mode`. If it is BUSY meanwhile, SERVING would come back; if it is the constant, another
            // thread has stopped before.
            let stops = switch().compare_exchange(from, STOPPING, Ordering::SeqCst, Ordering::SeqCst);
            if stops.is_err() {
                return stop_with(reason, actions);
            }
            table::detach_all(reason);
            tell_what_is_owed();
            leave(actions);
        }
        CHILD => {
            STOPPED.store(true, Ordering::Relaxed);
            busy(switch(), CHILD, || LEFT);
            if is_on() {
                return stop_with(reason, actions); // it joined meanwhile
            }
            leave(actions);
        }
        _ => {}
    }
}

/// Waits some milliseconds until the owner has heard which handles were given back: a process that has stopped tells it
/// no more.
fn tell_what_is_owed() {
    const TURNS_MAX: u32 = 100;
    for turn in 0..TURNS_MAX {
        deferred_detach::pay();
        if !deferred_detach::is_owing() {
            return;
        }
        kernel::wait(turn);
    }
}

/// This process is about to change its credentials, or to have other name spaces: it gives all descriptors back to the
/// kernel, and what it had of the cache is gone before it goes on. So it is with children that it makes from here on.
pub fn leave_domain() {
    if is_on() {
        stop(Reason::Domain);
    }
    let _inside = Inside::count();
    // What it takes may be forbidden; and it has been done then.
    if IS_CONFINED.load(Ordering::Relaxed) && IS_COVERED.load(Ordering::Relaxed) {
        return;
    }
    // One that has stopped before still has it.
    if let Some((_taken, memory)) = take_memory()
        && !cover(memory)
    {
        kernel::end_process(); // better than to go on with another's memory
    }
}

/// System calls of ours are about to be forbidden to this process: it gives all descriptors back, and when this returns
/// no thread is inside our code any more that may make one, and none will be.
pub fn confine() {
    /// More than the steps that are no wait for the owner take.
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
        // As `leave_domain` would later, when that may be forbidden. If it cannot be done now, it is tried then.
        if let Some((_taken, memory)) = take_memory() {
            let _ = cover(memory);
        }
        // One that had given its addresses back still had the actions, and so have its children.
        faults::put_back();
    }
    IS_CONFINED.store(true, Ordering::Relaxed); // read by this thread, or by one that may be confined or not
}

/// How many are counted in this process; a thread twice that is in a handler of its own.
fn counted_inside() -> u32 {
    // SAFETY: as in `Inside::count`, and the partner.
    let place = unsafe { &*INSIDE.load(Ordering::Acquire) };
    place.load(Ordering::SeqCst) // partner: `Inside`
}

/// Waits until no call is counted, for so long at most.
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

/// This process is about to limit what addresses it has, or to lock all its memory: it gives all descriptors back to
/// the kernel, and the addresses of the cache, that neither counts them.
///
/// A read may be under way, in another thread, or in this one under a handler that calls this. What it copies is thrown
/// away, as its descriptor has gone back. What it looks at faults if nothing is there, and our handler lets it find
/// zeros ([`mend`]). So as long as a thread holds that signal back, the addresses stay, with zeros there; that is
/// looked at for a short time. What a thread looks at that holds it back in our own name stays: the first page of the
/// arena, which says that there is no owner, and the process's own page.
pub fn give_addresses_back() {
    /// For threads that sleep: longer than a question takes whose answer does not come.
    const SLEEPERS_MILLIS_MAX: u64 = 150;
    /// For threads that run, on a machine with more of them than processors: a new one blocks all signals until it is
    /// given its first turn.
    const RUNNERS_MILLIS_MAX: u64 = 2_000;
    if is_on() {
        stop_with(Reason::Limited, Actions::Stay);
    }
    let _inside = Inside::count();
    // What it takes may be forbidden.
    if IS_CONFINED.load(Ordering::Relaxed) || MEMORY_OF.load(Ordering::Relaxed) == 0 {
        return;
    }
    inherit_zeros();
    let is_held_here = kernel::holds_back(kernel::SIGSEGV);
    let Some((mut taken, memory)) = take_memory() else { return };
    if !cover(memory) {
        return; // there is no memory even for that: the addresses count
    }
    let [arena, _] = memory;
    if is_held_here || !faults::stay_installed() || !kernel::cover(arena.base, PAGE, Access::ReadWrite) {
        return;
    }
    say_there_is_no_owner(arena.base);
    let begun = clock_millis();
    let (mut turn, mut asleep_since) = (0, begun);
    loop {
        let now = clock_millis();
        match kernel::other_threads_that_block(kernel::SIGSEGV) {
            BlockedBy::None => break,
            BlockedBy::Sleepers if now < asleep_since + SLEEPERS_MILLIS_MAX => {}
            // One that is in our code is done soon, unless it waits for a processor.
            BlockedBy::Sleepers if counted_inside() > 1 && now < begun + RUNNERS_MILLIS_MAX => {}
            BlockedBy::Runner if now < begun + RUNNERS_MILLIS_MAX => asleep_since = now,
            _ => return,
        }
        kernel::wait(turn);
        turn += 1;
    }
    // SAFETY: inside the mapping, which is larger than a page.
    kernel::unmap(unsafe { arena.base.add(PAGE) }, arena.bytes as usize - PAGE);
    taken.of = 0;
}

/// A process that was forked from one that had zeros in the place of its memory has inherited these, and they are its
/// own from here on. The page of the switch tells it from a child of `vfork`: it is wiped. One that was forked while a
/// thread changed the memory leaves it as it is.
fn inherit_zeros() {
    let inside = INSIDE.load(Ordering::Acquire); // partner: `start`
    let of = MEMORY_OF.load(Ordering::Acquire); // partner: as in `take_memory`
    if core::ptr::eq(inside, &raw const NO_COUNT) || of & TAKEN != 0 || !IS_COVERED.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: it is the second word of the page of the switch, which is never unmapped.
    let page = unsafe { &*inside.sub(1) };
    if page.compare_exchange(INERT, LEFT, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        // Acquire, partner: as in `take_memory`.
        let _ = MEMORY_OF.compare_exchange(of, kernel::process(), Ordering::Acquire, Ordering::Relaxed);
    }
}

/// `page` is in the place of an arena's first page.
fn say_there_is_no_owner(page: NonNull<u8>) {
    // SAFETY: a page of ours that may be written, aligned; a header is atomics only.
    let header = unsafe { page.cast::<Header>().as_ref() };
    header.owner_lives.store(OWNER_ENDED, Ordering::SeqCst); // partner: `View::owner_has_ended`
}

/// An instruction of ours faulted at an address where nothing is: whether it is to be tried again. That is so where
/// what it looked at is gone: it was this process's, which gave it back, or belongs to the one that this was forked
/// from, in a handler. Then there are zeros from now on, in that page and only if nothing is there by now; the arena's
/// first page says that there is no owner. The read that finds them ends, and is the kernel's to answer, as its
/// descriptor is by then, and as after each fault.
pub fn mend(address: usize) -> bool {
    for (at, [start, bytes]) in PLACES.iter().enumerate() {
        let (start, bytes) = (start.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed)); // as in `hold`
        if address.wrapping_sub(start) < bytes {
            let page = address & !(PAGE - 1);
            return mend_pages(page, PAGE, at % 2 == 0 && page == start);
        }
    }
    false
}

/// Maps zeros where pages of memory were that is gone; an arena's first says that there is no owner. `true` if
/// something is there now.
fn mend_pages(page: usize, bytes: usize, is_arenas_first: bool) -> bool {
    let mapped = kernel::map_where_nothing_is(page, bytes);
    if is_arenas_first && let Ok(Some(page)) = mapped {
        say_there_is_no_owner(page);
    }
    mapped.is_ok()
}

/// Everything went back. From here on no wrapper begins a system call of its own, in this process and in those that are
/// forked from it: what it takes may be forbidden to them. A thread that still is in the middle of one finds all that
/// it looks at where it was, and is waited for where that matters ([`confine`]).
fn leave(actions: Actions) {
    if actions == Actions::Back {
        faults::uninstall();
    }
    SWITCH.store((&raw const OFF).cast_mut(), Ordering::SeqCst); // partners: `switch`, and `Inside::count`
}

/// The number that [`forked_since`] compares with.
#[inline]
pub fn forks() -> u64 {
    FORKS.load(Ordering::SeqCst) // partner: `begin`
}

/// Whether some thread forked, or is about to, since `before` was read: a descriptor opened meanwhile may be
/// a child's too.
pub fn forked_since(before: u64) -> bool {
    // SeqCst, partner: `begin`, which counts first and then looks at the descriptors. A thread that has
    // published a descriptor and sees no fork here is seen by the fork that comes later.
    before as u32 != 0 || FORKS.load(Ordering::SeqCst) != before
}

/// A fork that was begun, or an exec, in this process or in the one it was forked from.
#[derive(Clone, Copy)]
pub struct Fork {
    depth: u32,
    /// How often it is counted in [`COPYING`].
    copies: u32,
}

/// Gives all offsets back because a child, or the next program, is about to share them. `None` if there was nothing to
/// do.
pub fn begin_fork() -> Option<Fork> {
    begin(0)
}

/// As [`begin_fork`], before the very call that makes a child that goes on with this program's code: nothing of the
/// program's runs in between.
pub fn begin_copy() -> Option<Fork> {
    begin(1)
}

fn begin(copies: u32) -> Option<Fork> {
    loop {
        if !is_on() {
            return None;
        }
        COPYING.fetch_add(copies, Ordering::SeqCst); // partner: `wait_for_forks`
        FORKS.fetch_add(BEGUN + 1, Ordering::SeqCst); // partners: `forked_since`, `wait_for_forks`
        // SeqCst, partner: the exchange in `busy`, whose thread looks for forks after it. One of both sees the other.
        if switch().load(Ordering::SeqCst) != BUSY {
            break;
        }
        uncount_fork(copies); // the child would keep descriptors of ours
    }
    table::share_all(Reason::Forked);
    Some(Fork { depth: DEPTH.load(Ordering::Relaxed), copies })
}

/// A thread that is about to give a number of its own choice to a descriptor, until this is dropped. A number that is
/// free may be ours in a moment.
pub struct Renumbering(());

/// Begins that; `None` if there is nothing to do. A number that the program has open is not ours, and what had it is
/// closed by the call, which may take long.
pub fn begin_renumbering(onto: c_int) -> Option<Renumbering> {
    const F_GETFD: usize = 1;
    loop {
        if !is_on() {
            return None;
        }
        COPYING.fetch_add(1, Ordering::SeqCst); // partner: `wait_for_forks`
        let renumbering = Renumbering(());
        // SeqCst, partner: as in `begin`.
        if switch().load(Ordering::SeqCst) != BUSY {
            let inside = enter();
            let is_free = inside.is_some() && kernel::fcntl(onto, F_GETFD).is_err();
            return is_free.then_some(renumbering);
        }
    }
}

impl Drop for Renumbering {
    fn drop(&mut self) {
        let fewer = |copying: u32| copying.checked_sub(1);
        let _ = COPYING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer); // partner: `wait_for_forks`
    }
}

/// The fork is done. In the child nothing is under way, but for a read that the fork interrupted, if a handler forked;
/// what that copied must not be believed, so the child is settled.
pub fn end_fork(fork: Fork) {
    // A child that made no call yet has a cleared switch, and one that did is one deeper.
    if switch().load(Ordering::Relaxed) == INERT {
        is_on();
    } else if DEPTH.load(Ordering::Relaxed) == fork.depth {
        uncount_fork(fork.copies);
    }
}

/// A child that was forked by a handler between the two counts counts none.
fn uncount_fork(copies: u32) {
    let less = |forks: u64| (forks as u32 != 0).then(|| forks - 1);
    let _ = FORKS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less); // partner: `forked_since`
    let fewer = |copying: u32| copying.checked_sub(copies);
    let _ = COPYING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer); // partner: `wait_for_forks`
}

/// As [`begin_fork`], before a child that will run in our memory.
pub fn begin_vfork_child() -> Option<Fork> {
    let fork = begin_fork()?;
    VFORKS.fetch_add(1, Ordering::SeqCst); // before the child exists; partner: `mode`
    Some(fork)
}

/// That child has left our memory.
pub fn end_vfork_child(fork: Fork) {
    // As forks. SeqCst, partner: `mode`.
    let _ = VFORKS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
    end_fork(fork);
}

/// A `posix_spawn` under way.
#[derive(Clone, Copy)]
pub struct Spawn {
    fork: Fork,
    place: Option<&'static AtomicU32>,
}

/// As [`begin_vfork_child`], before a `posix_spawn` of this thread.
pub fn begin_spawn() -> Option<Spawn> {
    let fork = begin_vfork_child()?;
    let inside = enter();
    let thread = if inside.is_some() { kernel::thread() } else { 0 };
    let is_mine =
        |place: &&AtomicU32| place.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    Some(Spawn { fork, place: SPAWNERS.iter().find(is_mine) })
}

/// It is over.
pub fn end_spawn(spawn: Spawn) {
    if let Some(place) = spawn.place {
        place.store(0, Ordering::Relaxed); // as at `SPAWNERS`
    }
    end_vfork_child(spawn.fork);
}

/// Whether this thread is inside `posix_spawn`; `false` of some, if very many are.
pub fn is_spawning() -> bool {
    let Some(_inside) = enter() else { return false };
    let thread = kernel::thread();
    SPAWNERS.iter().any(|place| place.load(Ordering::Relaxed) == thread)
}

/// Before a `vfork`.
pub extern "C" fn begin_vfork() {
    let _ = begin_vfork_child(); // `end_vfork` finds out again
}

/// After a `vfork`, in the parent only. `answer` is the kernel's.
pub extern "C" fn end_vfork(answer: isize) -> isize {
    // Only who is switched on counted: a child of `vfork` that calls it again did not. Our memory was not
    // forked meanwhile, so the depth is the same.
    if is_on() {
        end_vfork_child(Fork { depth: DEPTH.load(Ordering::Relaxed), copies: 0 });
    }
    crate::real::answer(answer)
}
