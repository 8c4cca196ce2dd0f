//! Patch: the C library's own functions lead to the wrappers, for callers that no name leads there.
//!
//! ```text
//!   before                                after
//!   read:  cmpb $0, single_threaded       read:  jmp slot                      fread, aio threads, libraries that were
//!          je   ...                              (2 bytes of the old rest)     bound to the C library itself
//!   back:  xor  %eax, %eax                back:  xor %eax, %eax  <----------------.
//!          syscall ...                           syscall ...                      |
//!                                         slot:  jmp *wrapper --> the `read` here |
//!                                         moved: cmpb $0, single_threaded         | `real::read`
//!                                                je   ...                         |
//!                                                jmp  back -----------------------'
//! ```
//!
//! The command has decoded the library and written a plan: which bytes go, and what they become elsewhere. Here bytes
//! are compared and copied and distances filled in; only the jump is known as an instruction.
//!
//! Invariants:
//!  1. All or nothing of what is essential: if one of those functions is not as the plan says, none is patched.
//!  2. No page is writable and executable at any moment, and no thread but this one exists when bytes change.
//!  3. While the library's pages are not executable no function of it is called: no copy, no fill, no `errno`.
//!  4. A function that another object stands in front of is not patched: that object would be bypassed, or called in a
//!     circle.
//!
//! Not an invariant: that any function is patched. Without, a caller that looks a function up by itself, or is bound to
//! the library more closely than by name, closes, moves or replaces descriptors unseen. So where patching was wanted
//! and failed, only positional reads are served, each after a look at its descriptor (`audit.rs`). By names alone a
//! program is served that the user says has no such caller.
//!
//! Cost: two jumps a call, one of them indirect; it does not show beside the rest of a start.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicUsize, Ordering};

use quinion_view::arena::control::Patching;
use quinion_view::viewer::{Mapped, Viewer};

use crate::kernel::{self, SignalsHeld};
use crate::loaded::{self, Code};
use crate::plan::{
    BUILD_ID_MAX, ENTRIES_MAX, Entry, FIXES_MAX, Header, JUMP_BYTES, MAGIC, MOVED_MAX, ORIGINAL_MAX,
};
use crate::real::{self, Wrapped};

/// Bytes of a slot: the jump to the wrapper, its address, and the moved bytes.
const SLOT_BYTES: usize = 64;
const MOVED_AT: usize = 16;
const _: () = assert!(MOVED_AT + MOVED_MAX <= SLOT_BYTES);
/// `jmp *0(%rip)`: the address follows.
const JUMP_TO_NEXT: [u8; 6] = [0xff, 0x25, 0, 0, 0, 0];
const JUMP: u8 = 0xe9;
const PAGE: usize = 4096;

/// Slots that lie in this object, so the dynamic linker has put them near the C library.
#[repr(C, align(4096))]
struct Slots(UnsafeCell<[[u8; SLOT_BYTES]; ENTRIES_MAX]>);
// SAFETY: written by the constructor alone, and only read, as code, from then on.
unsafe impl Sync for Slots {}
static SLOTS: Slots = Slots(UnsafeCell::new([[0; SLOT_BYTES]; ENTRIES_MAX]));
const _: () = assert!(size_of::<Slots>().is_multiple_of(PAGE));

/// The outcome of patching, as the number of a [`Patching`].
static OUTCOME: AtomicUsize = AtomicUsize::new(Patching::NoPlan as usize);

/// Whether the C library's own calls reach the wrappers.
#[inline]
pub fn is_patched() -> bool {
    OUTCOME.load(Ordering::Relaxed) == Patching::Patched as usize // written before the process has a second thread
}

/// Counts the outcome, once for each process that becomes a viewer.
pub fn count(viewer: &Viewer) {
    let outcome = OUTCOME.load(Ordering::Relaxed); // as above
    if let Some(&outcome) = Patching::ALL.get(outcome) {
        viewer.count_patching(outcome);
    }
}

struct Plan<'a> {
    build_id: &'a [u8],
    entries: &'a [Entry],
}

#[derive(Clone, Copy)]
struct Step {
    wrapped: Option<&'static Wrapped>,
}

/// Patches by the plan in `file`, if everything is as it says. For the constructor.
pub fn apply(file: &Mapped) {
    let outcome = apply_all(file).err().unwrap_or(Patching::Patched);
    OUTCOME.store(outcome as usize, Ordering::Relaxed); // as in `is_patched`
}

/// Patches nothing, for another object wraps what would be. For the constructor.
pub fn leave_to_wrapper() {
    OUTCOME.store(Patching::Interposed as usize, Ordering::Relaxed); // as in `is_patched`
}

fn apply_all(file: &Mapped) -> Result<(), Patching> {
    let plan = read(file).ok_or(Patching::NoPlan)?;
    let library = Library::find(plan.build_id).ok_or(Patching::OtherLibrary)?;
    let steps = steps(&plan, &library)?;
    if !kernel::is_single_threaded() {
        return Err(Patching::Threads);
    }
    // SAFETY: the constructor runs once, and no other thread knows the slots.
    let slots = unsafe { &mut *SLOTS.0.get() };
    for (slot, (entry, step)) in slots.iter_mut().zip(plan.entries.iter().zip(&steps)) {
        if let Some(wrapped) = step.wrapped {
            fill(slot, entry, &library, wrapped).ok_or(Patching::TooFar)?;
        }
    }
    let slots = SLOTS.0.get() as usize;
    kernel::protect(slots, size_of::<Slots>(), kernel::READ_EXECUTE).map_err(|_| Patching::Denied)?;
    divert(&plan, &library, &steps, slots)
}

fn read(file: &Mapped) -> Option<Plan<'_>> {
    let bytes = file.bytes as usize;
    if bytes < size_of::<Header>() {
        return None;
    }
    // SAFETY: the file is mapped for reading, starts at a page and cannot change; every pattern is a value.
    let header = unsafe { file.base.cast::<Header>().as_ref() };
    let (entries, build_id) = (header.entries as usize, header.build_id_len as usize);
    let is_whole = header.magic == MAGIC
        && (1..=ENTRIES_MAX).contains(&entries)
        && (1..=BUILD_ID_MAX).contains(&build_id)
        && size_of::<Header>() + entries * size_of::<Entry>() <= bytes;
    if !is_whole {
        return None;
    }
    // SAFETY: as above; the entries follow the header, which keeps their alignment.
    let entries =
        unsafe { core::slice::from_raw_parts(file.base.cast::<Header>().add(1).cast().as_ptr(), entries) };
    entries.iter().all(Entry::is_sane).then_some(Plan { build_id: &header.build_id[..build_id], entries })
}

impl Entry {
    fn is_sane(&self) -> bool {
        let (original, moved) = (usize::from(self.original_len), usize::from(self.moved_len));
        let fixes = usize::from(self.fixes_len);
        original <= ORIGINAL_MAX
            && usize::from(self.skip) + JUMP_BYTES <= original
            && (1..=MOVED_MAX).contains(&moved)
            && fixes <= FIXES_MAX
            && self.fixes[..fixes.min(FIXES_MAX)].iter().all(|fix| {
                let (at, end) = (usize::from(fix.at), usize::from(fix.end));
                at + 4 <= end && end <= moved
            })
    }
    fn original(&self) -> &[u8] {
        &self.original[..usize::from(self.original_len)]
    }
}

// ---- the library ------------------------------------------------------------------------------------------

struct Library {
    base: usize,
    code: Code,
    name: *const c_char,
}

impl Library {
    fn find(id: &[u8]) -> Option<Self> {
        let mut library = None;
        loaded::each(&mut |object| {
            if object.notes().any(|note| build_id(note) == Some(id)) {
                library = object.code().map(|code| Self { base: object.base, code, name: object.name });
            }
            library.is_some()
        });
        library
    }

    fn has(&self, offset: usize, len: usize) -> bool {
        let (at, code) = (self.base.wrapping_add(offset), &self.code);
        at >= code.at && at - code.at <= code.bytes.saturating_sub(len) && len <= code.bytes
    }
}

fn build_id(mut notes: &[u8]) -> Option<&[u8]> {
    const BUILD_ID: u32 = 3;
    const HEADER: usize = 12;
    while notes.len() > HEADER {
        let number = |at: usize| u32::from_le_bytes([notes[at], notes[at + 1], notes[at + 2], notes[at + 3]]);
        let (name, bytes, kind) = (number(0) as usize, number(4) as usize, number(8));
        let start = HEADER + name.next_multiple_of(4);
        let rest = notes.get(start..)?;
        if kind == BUILD_ID && notes[HEADER..].starts_with(b"GNU\0") {
            return rest.get(..bytes);
        }
        notes = rest.get(bytes.next_multiple_of(4)..)?;
    }
    None
}

// ---- deciding, filling, diverting -----------------------------------------------------------------------------

/// The step for each entry: its wrapper, if its bytes are as planned and no other object stands in front.
fn steps(plan: &Plan<'_>, library: &Library) -> Result<[Step; ENTRIES_MAX], Patching> {
    let mut steps = [Step { wrapped: None }; ENTRIES_MAX];
    for (step, entry) in steps.iter_mut().zip(plan.entries) {
        let (offset, original) = (entry.offset as usize, entry.original());
        if !library.has(offset, original.len()) {
            return Err(Patching::OtherLibrary);
        }
        let at = library.base + offset;
        // SAFETY: the bytes lie in the library's code, which is readable as long as it is loaded.
        if unsafe { core::slice::from_raw_parts(at as *const u8, original.len()) } != original {
            return Err(Patching::OtherLibrary);
        }
        step.wrapped = real::wrapped_at(at);
        if step.wrapped.is_none() && entry.is_essential != 0 {
            return Err(Patching::Interposed);
        }
    }
    Ok(steps)
}

/// Fills a slot: the jump to the wrapper, and the moved bytes with their distances.
fn fill(slot: &mut [u8; SLOT_BYTES], entry: &Entry, library: &Library, wrapped: &Wrapped) -> Option<()> {
    let moved_at = slot.as_ptr() as usize + MOVED_AT;
    let (jump, address) = (JUMP_TO_NEXT.len(), size_of::<usize>());
    slot[..jump].copy_from_slice(&JUMP_TO_NEXT);
    slot[jump..jump + address].copy_from_slice(&(wrapped.wrapper as usize).to_ne_bytes());
    let moved = &mut slot[MOVED_AT..MOVED_AT + usize::from(entry.moved_len)];
    moved.copy_from_slice(&entry.moved[..usize::from(entry.moved_len)]);
    for fix in &entry.fixes[..usize::from(entry.fixes_len)] {
        let end = moved_at + usize::from(fix.end);
        let distance = distance(end, library.base + fix.target as usize)?;
        moved[usize::from(fix.at)..][..4].copy_from_slice(&distance.to_ne_bytes());
    }
    // The jump into the slot has to reach it too.
    distance(library.base + entry.offset as usize, slot.as_ptr() as usize).map(drop)
}

/// How far it is, if four bytes can say it; with a margin, so that callers need not be exact.
fn distance(from: usize, to: usize) -> Option<i32> {
    const KEPT_BACK: i64 = 4096;
    let distance = to as i64 - from as i64;
    i32::try_from(distance).ok().filter(|_| distance.abs() < i64::from(i32::MAX) - KEPT_BACK)
}

/// Puts the jumps in. From the first change of the protection to the last, no function of the C library is called.
#[inline(never)]
fn divert(
    plan: &Plan<'_>,
    library: &Library,
    steps: &[Step; ENTRIES_MAX],
    slots: usize,
) -> Result<(), Patching> {
    let steps = || plan.entries.iter().zip(steps).zip(0usize..);
    let (mut first, mut end) = (usize::MAX, 0);
    for ((entry, step), _) in steps() {
        if step.wrapped.is_some() {
            let at = library.base + entry.offset as usize;
            first = first.min(at & !(PAGE - 1));
            end = end.max((at + ORIGINAL_MAX).next_multiple_of(PAGE));
        }
    }
    if first >= end {
        return Err(Patching::Interposed);
    }
    let end = end.min((library.code.at + library.code.bytes).next_multiple_of(PAGE));
    let _held = SignalsHeld::new();
    kernel::protect(first, end - first, kernel::READ_WRITE).map_err(|_| Patching::Denied)?;
    for ((entry, step), number) in steps() {
        if step.wrapped.is_some() {
            let at = library.base + entry.offset as usize + usize::from(entry.skip);
            // SAFETY: the bytes are code of the library, writable now, and no thread runs it.
            unsafe { write_jump(at, slots + number * SLOT_BYTES) };
        }
    }
    if kernel::protect(first, end - first, kernel::READ_EXECUTE).is_err() {
        restore(library);
        return Err(Patching::Denied);
    }
    for ((_, step), number) in steps() {
        if let Some(wrapped) = step.wrapped {
            let at = wrapped.real.resolved_address();
            real::move_all(at, slots + number * SLOT_BYTES + MOVED_AT);
        }
    }
    Ok(())
}

/// Writes a jump from `at` to `to`, byte by byte: a copy might call into the very pages that are being changed.
///
/// # Safety
/// The five bytes at `at` can be written, and are not being executed.
unsafe fn write_jump(at: usize, to: usize) {
    let distance = (to.wrapping_sub(at + JUMP_BYTES) as u32).to_le_bytes();
    let bytes = [JUMP, distance[0], distance[1], distance[2], distance[3]];
    let mut i = 0;
    while i < JUMP_BYTES {
        // SAFETY: the caller's promise.
        unsafe { ((at + i) as *mut u8).write_volatile(bytes[i]) };
        i += 1;
    }
}

/// Maps the library's code from its file again: some kernels let nothing be executed that was written. Without that
/// code this process cannot go on, and cannot say so.
#[cold]
fn restore(library: &Library) {
    // SAFETY: the dynamic linker's name of a loaded object is a string.
    let name = unsafe { CStr::from_ptr(library.name) };
    let start = library.code.at & !(PAGE - 1);
    let in_file = library.code.in_file & !(PAGE as u64 - 1);
    let bytes = library.code.at + library.code.bytes - start;
    if !kernel::map_code_again(start, bytes, name.to_bytes_with_nul(), in_file) {
        // SAFETY: an instruction that ends the process.
        unsafe { core::arch::asm!("ud2", options(noreturn)) }
    }
}
