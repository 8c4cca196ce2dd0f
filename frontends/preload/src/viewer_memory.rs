//! Viewer memory: what only a viewer has, the arena and its own page; and what takes its place afterwards.
//!
//! ```text
//!   nothing --hold--> mapped --cover--> zeros that take no memory --> given up: a fault there is fixed up with zeros
//!                       |
//!                       '--fork--> a child has neither; a read that the fork interrupted finds zeros
//! ```
//!
//! A read may be under way in another thread, or under the handler that has them go. So zeros take the place in one
//! step: it finds the descriptor of nothing, and asks the kernel. Where the addresses have to go, and in a forked
//! child, the handler of faults maps zeros under an instruction of the library's that looks there ([`fix_up_fault`]).
//!
//! One thread at a time changes them ([`take_memory`]), with its signals held back.
//!
//! Invariants:
//!  1. [`MEMORY`] is of the process in [`MEMORY_OF`], and of no other.
//!  2. A forked child has no mapping of its parent's; what it has in these places is its own.
//!
//! Not an invariant: that a fault is [fixed up](fix_up_fault) by a thread that is counted: a hit may fault long after
//! the addresses went back and the ban came.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use quinion_view::arena::{Header, OWNER_ENDED};
use quinion_view::viewer::Mapped;

use crate::kernel::{self, Access, SignalsHeld};

pub const PAGE: usize = 4096;

#[derive(Clone, Copy)]
pub struct ViewerMappings(pub [Mapped; 2]);

struct Mappings(UnsafeCell<MaybeUninit<ViewerMappings>>);
// SAFETY: written while no process has them, before `MEMORY_OF` says with Release that one has: by the constructor, or
// by the one thread of a forked child that made the switch BUSY.
unsafe impl Sync for Mappings {}
static MEMORY: Mappings = Mappings(UnsafeCell::new(MaybeUninit::uninit()));

/// The process that has what is written in [`MEMORY`]; 0 if none has. With [`TAKEN`] while a thread of it changes that.
static MEMORY_OF: AtomicU32 = AtomicU32::new(0);

const TAKEN: u32 = 1 << 31;

static IS_COVERED: AtomicBool = AtomicBool::new(false);

/// Where the memory is, or was, and where that of the process this one was forked from was. Each time the arena first;
/// its first byte's address, and its bytes.
static PLACES: [[AtomicUsize; 2]; 4] = [const { [const { AtomicUsize::new(0) }; 2] }; 4];

pub fn hold(memory: ViewerMappings, process: u32) {
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

pub fn is_held() -> bool {
    MEMORY_OF.load(Ordering::Relaxed) != 0
}

/// The mappings that were given last. Only if [`MEMORY_OF`] has said that there are some.
fn memory() -> [Mapped; 2] {
    // SAFETY: the thread that said that there is some has written it before.
    let ViewerMappings(memory) = unsafe { (*MEMORY.0.get()).assume_init() };
    memory
}

/// The viewer's mappings, for the caller alone until the claim is dropped or [given up](MappingsClaim::give_up). A
/// child of `vfork` has its parent's, which goes on; and a forked one has not inherited them, even if the word says so:
/// its parent's thread that took them is not here to give them back.
pub fn take_memory() -> Option<(MappingsClaim, [Mapped; 2])> {
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

pub struct MappingsClaim {
    of: u32,
    _held: SignalsHeld,
}

impl MappingsClaim {
    pub fn give_up(mut self) {
        self.of = 0;
    }
}

impl Drop for MappingsClaim {
    fn drop(&mut self) {
        MEMORY_OF.store(self.of, Ordering::Release); // partner: `take_memory`
    }
}

/// Puts zeros in the place of the memory, if that was not done before; whether they are there. Another thread's read
/// finds the descriptor of nothing there, and asks the kernel; its request is given up.
pub fn cover([arena, own]: [Mapped; 2]) -> bool {
    if !IS_COVERED.load(Ordering::Relaxed) {
        let covered = [(arena, Access::Read), (own, Access::ReadWrite)]
            .map(|(map, access)| kernel::cover(map.base, map.bytes as usize, access));
        IS_COVERED.store(covered == [true; 2], Ordering::Relaxed); // ordered by `MEMORY_OF`
    }
    IS_COVERED.load(Ordering::Relaxed)
}

pub fn is_covered() -> bool {
    IS_COVERED.load(Ordering::Relaxed)
}

/// If `is_unsettled`, this process was forked from one with zeros in the place of its memory and has inherited these as
/// its own. One that was forked while a thread changed the memory leaves it as it is.
pub fn inherit_zeros(is_unsettled: impl FnOnce() -> bool) {
    let of = MEMORY_OF.load(Ordering::Acquire); // partner: as in `take_memory`
    if of & TAKEN == 0 && IS_COVERED.load(Ordering::Relaxed) && is_unsettled() {
        // Acquire, partner: as in `take_memory`.
        let _ = MEMORY_OF.compare_exchange(of, kernel::process(), Ordering::Acquire, Ordering::Relaxed);
    }
}

/// In a forked child, by its only thread that looks: it has not inherited the memory. A read that the fork interrupted,
/// in a handler, goes on later. Memory that it looks at with its signals held back, or stores to, has to be there;
/// [`fix_up_fault`] answers its other reads. `is_held_back`: the fault would not reach the library.
pub fn settle_child(is_held_back: bool) {
    if MEMORY_OF.swap(0, Ordering::Relaxed) != 0 {
        let [arena, own] = memory();
        let bytes = if is_held_back { arena.bytes as usize } else { PAGE };
        map_zeros_at_arena(arena.base.as_ptr() as usize, bytes);
        let _ = kernel::map_where_nothing_is(own.base.as_ptr() as usize, own.bytes as usize);
    }
}

pub fn mark_owner_dead(page: NonNull<u8>) {
    // SAFETY: a page of the library's that may be written, aligned; a header is atomics only.
    let header = unsafe { page.cast::<Header>().as_ref() };
    header.owner_lives.store(OWNER_ENDED, Ordering::SeqCst); // partner: `View::owner_has_ended`
}

/// Whether an instruction of the library's that faulted at an address where nothing is runs again. So it does where it
/// looked at this process's memory, which was given back, or at that of the process it was forked from, in a handler.
/// The page is zeros then, if nothing is there by now; the arena's first page says that there is no owner. The read
/// that finds them ends, and the kernel answers it, as after each fault.
pub fn fix_up_fault(address: usize) -> bool {
    for (at, [start, bytes]) in PLACES.iter().enumerate() {
        let (start, bytes) = (start.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed)); // as in `hold`
        if address.wrapping_sub(start) < bytes {
            let page = address & !(PAGE - 1);
            return match at % 2 == 0 && page == start {
                true => map_zeros_at_arena(page, PAGE),
                false => kernel::map_where_nothing_is(page, PAGE).is_ok(),
            };
        }
    }
    false
}

/// Maps zeros where the first pages of an arena were that is gone; the first says that there is no owner. `true` if
/// something is there now.
fn map_zeros_at_arena(page: usize, bytes: usize) -> bool {
    let mapped = kernel::map_where_nothing_is(page, bytes);
    if let Ok(Some(page)) = mapped {
        mark_owner_dead(page);
    }
    mapped.is_ok()
}
