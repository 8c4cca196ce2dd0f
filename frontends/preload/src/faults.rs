//! Faults: reads into memory that the program does not have, which are the kernel's to answer.
//!
//! ```text
//!   read(fd, bad, n) --served--> copy --fault--> SIGSEGV or SIGBUS --> `decide`: in a copy?
//!                                  ^                                     | yes: counted, the copy ends early
//!                                  '-------------------------------------'
//!                    the count has changed --> the real read: EFAULT, or how many bytes there was room for
//! ```
//!
//! The kernel copies to a bad address and notices. The library cannot ask before without a system call for each hit, so
//! it notices by the fault. The blocks that copy have noted where they begin and end ([`resume_after_fault`]); a fault
//! there is counted ([`seen`]) and ends all of the read: nothing is written behind the first bad byte. If the count has
//! changed over a read, perhaps by another thread's fault, the reader leaves the call to the kernel.
//!
//! So the two signals have a handler of the library's, and the program must not see that:
//!
//! ```text
//!   sigaction(SIGSEGV, {H, flags})  -->  kernel: {entry i, flags | SA_SIGINFO}    ENTRIES[i] = {H, flags}
//!   sigaction(SIGSEGV, NULL, &old)  <--  the same, translated back
//!   signal, not of a copy           -->  entry i: `decide`, and a jump to H as if the kernel had called it
//! ```
//!
//! Each entry is a few instructions that know their own number, and stands for one action for good. So the kernel's
//! table is the only one that changes: threads that set an action at once, a forked child, or a child of `vfork` need
//! no rule. The default action has an entry, too: for a fault outside a copy it restores the default action and sends
//! the signal once more, to arrive where the instruction stands. Masks, other stacks and the other flags are the
//! kernel's.
//!
//! The cache's own memory may be gone under a read: in a child that was forked in a handler, or because the process
//! gave its addresses back. An instruction of the library's that faults there finds zeros and goes on, and the kernel
//! answers its read, too ([`viewer_memory::fix_up_fault`]).
//!
//! The calls by which a program sets them are in `sigaction.rs`.
//!
//! Invariants:
//!  1. An entry that was given away never means another action.
//!  2. After [`uninstall`] the kernel's actions are the program's own. A process that has given the cache's addresses
//!     back keeps the library's, as long as nothing is forbidden to it.
//!
//! Not an invariant: that a fault of a copy reaches the library. It ends a thread that blocks the signal, and goes to a
//! handler that the program sets by instructions of its own.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use quinion_view::folio::copy::{copy_out, note_fault, resume_after_fault};

use crate::kernel::{self, SIGSEGV};
use crate::wrap::call_real;
use crate::{process, viewer_memory};

const SIGBUS: c_int = 7;
const SIGNALS: [c_int; 2] = [SIGBUS, SIGSEGV];
const SIG_DFL: usize = 0;

pub const SIG_IGN: usize = 1;

const SA_SIGINFO: u32 = 4;
const SA_RESTORER: u32 = 0x0400_0000;
const SA_ONSTACK: u32 = 0x0800_0000;
const SA_NODEFER: u32 = 0x4000_0000;
const SA_RESETHAND: u32 = 0x8000_0000;

/// The flags that may differ between the program's action and the kernel's.
const OURS: u32 = SA_SIGINFO | SA_RESTORER | SA_ONSTACK | SA_NODEFER | SA_RESETHAND;

// ---- the count, and reading what may not be there --------------------------------------------------------

pub use quinion_view::folio::copy::faults as seen;

/// Copies `to.len()` bytes from an address of the program's; whether they could be read. Only while
/// [`process::is_on`].
pub fn read(from: usize, to: &mut [u8]) -> bool {
    let before = seen();
    // SAFETY: the target is the library's; what of the source is not there, or is being changed, is as the essay says.
    unsafe { copy_out(from as *const u8, to.as_mut_ptr(), to.len()) };
    seen() == before
}

// ---- the entries -----------------------------------------------------------------------------------------

const ENTRIES: usize = 32;
const ENTRY_BYTES: usize = 16;

/// A program's action that an entry stands for.
struct SavedAction {
    state: AtomicU32,
    handler: AtomicUsize,
    flags: AtomicU32,
}

const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const GIVEN: u32 = 2;

static ACTIONS: [SavedAction; ENTRIES] = [const {
    SavedAction { state: AtomicU32::new(FREE), handler: AtomicUsize::new(0), flags: AtomicU32::new(0) }
}; ENTRIES];

core::arch::global_asm!(
    ".pushsection .text.quinion_entries, \"ax\", @progbits",
    ".balign 16",
    ".hidden quinion_entries",
    ".globl quinion_entries",
    "quinion_entries:",
    ".rept {entries}",
    "lea rax, [rip]", // which entry it is
    "jmp 2f",
    ".balign 16",
    ".endr",
    "2:",
    "push rdi",
    "push rsi",
    "push rdx",
    "mov rcx, rax",
    "call {decide}",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "test rax, rax",
    "jz 3f",
    "mov r11, rax",
    "xor eax, eax", // as the kernel calls a handler
    "jmp r11",
    "3:",
    "ret",
    ".popsection",
    entries = const ENTRIES,
    decide = sym decide,
);

fn first_entry() -> usize {
    unsafe extern "C" {
        static quinion_entries: u8;
    }
    (&raw const quinion_entries).addr()
}

fn entry_at(address: usize) -> Option<&'static SavedAction> {
    let entry = ACTIONS.get(address.wrapping_sub(first_entry()) / ENTRY_BYTES)?;
    (entry.state.load(Ordering::Acquire) == GIVEN).then_some(entry) // partner: the Release in `entry_for`
}

fn entry_for(handler: usize, flags: u32) -> Option<usize> {
    let flags = flags & OURS;
    for (number, entry) in ACTIONS.iter().enumerate() {
        // A handler that interrupts this thread while it has one claimed takes the next.
        // Acquire, partner: the Release below.
        let claim = entry.state.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Acquire);
        if claim.is_ok() {
            entry.handler.store(handler, Ordering::Relaxed);
            entry.flags.store(flags, Ordering::Relaxed);
            entry.state.store(GIVEN, Ordering::Release); // partner: the Acquire above, and in `entry_at`
        }
        let is_it = claim != Err(CLAIMED)
            && entry.handler.load(Ordering::Relaxed) == handler
            && entry.flags.load(Ordering::Relaxed) == flags;
        if is_it {
            return Some(first_entry() + number * ENTRY_BYTES);
        }
    }
    None
}

// ---- when a signal comes ---------------------------------------------------------------------------------

/// The address to continue at; 0: where the signal interrupted the thread.
extern "C" fn decide(signal: c_int, info: *const c_void, context: *mut u8, at: usize) -> usize {
    /// Byte offsets of `si_code` in `siginfo_t`, and of the saved instruction pointer in `ucontext_t`.
    const CODE_AT: usize = 8;
    const NEXT_AT: usize = 168;
    /// Byte offset of `si_addr`, the address that faulted, in `siginfo_t`.
    const ADDRESS_AT: usize = 16;
    const SEGV_MAPERR: i32 = 1;
    /// Memory that failed before it was accessed.
    const BUS_MCEERR_AO: i32 = 5;
    if !info.is_null() && !context.is_null() {
        // SAFETY: with SA_SIGINFO the kernel gives both, and the context may be changed.
        let (code, next) = unsafe {
            (info.byte_add(CODE_AT).cast::<i32>().read(), &mut *context.add(NEXT_AT).cast::<usize>())
        };
        let is_fault = code > 0 && (signal, code) != (SIGBUS, BUS_MCEERR_AO);
        if is_fault && let Some(resume) = resume_after_fault(*next) {
            note_fault();
            *next = resume;
            return 0;
        }
        // SAFETY: as above.
        let address = unsafe { info.byte_add(ADDRESS_AT).cast::<usize>().read() };
        if (signal, code) == (SIGSEGV, SEGV_MAPERR)
            && is_our_code(*next)
            && viewer_memory::fix_up_fault(address)
        {
            note_fault();
            return 0;
        }
    }
    let Some(entry) = entry_at(at) else { return 0 };
    let (handler, flags) = (entry.handler.load(Ordering::Relaxed), entry.flags.load(Ordering::Relaxed));
    if handler == SIG_DFL {
        kernel::set_signal_action(signal, &kernel::SignalAction::default());
        kernel::send_to_this_thread(signal, info);
        return 0;
    }
    if flags & SA_RESETHAND != 0 {
        reset(signal, flags);
    }
    handler
}

fn is_our_code(at: usize) -> bool {
    unsafe extern "C" {
        // The linker's.
        static __ehdr_start: u8;
        static etext: u8;
    }
    ((&raw const __ehdr_start).addr()..(&raw const etext).addr()).contains(&at)
}

core::arch::global_asm!(".hidden __ehdr_start", ".hidden etext");

fn reset(signal: c_int, flags: u32) {
    let Some(_inside) = process::enter() else { return };
    if let Some(mut action) = kernel::signal_action(signal) {
        let entry = entry_for(SIG_DFL, flags);
        action.handler = entry.unwrap_or(SIG_DFL);
        action.flags = u64::from(reported_flags(SIG_DFL, action.flags as u32));
        kernel::set_signal_action(signal, &action);
    }
}

fn reported_flags(handler: usize, flags: u32) -> u32 {
    match handler {
        SIG_DFL => flags & !(SA_RESETHAND | SA_NODEFER) | SA_SIGINFO | SA_ONSTACK,
        _ => flags & !SA_RESETHAND | SA_SIGINFO,
    }
}

// ---- actions ---------------------------------------------------------------------------------------------

/// Whether the signals' actions are the library's.
static IS_ON: AtomicBool = AtomicBool::new(false);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Action {
    pub handler: usize,
    mask: [u64; 16],
    flags: u32,
    restorer: usize,
}

impl Action {
    pub fn new(handler: usize, mask: u64, flags: u32) -> Self {
        let mut action = Self { handler, mask: [0; 16], flags, restorer: 0 };
        action.mask[0] = mask;
        action
    }

    /// The action that the kernel is to have in its place, if the program sets it; `None` if it cannot be.
    pub fn kernel_action_if_set(&self) -> Option<Self> {
        self.kernel_action(SA_RESTORER)
    }

    /// The action that the kernel is to have in its place; `None` if it cannot be.
    fn kernel_action(&self, restorer: u32) -> Option<Self> {
        let handler = entry_for(self.handler, self.flags & !SA_RESTORER | restorer)?;
        Some(Self { handler, flags: reported_flags(self.handler, self.flags), ..*self })
    }

    /// The action that the program has set, of the one that the kernel has in its place.
    pub fn program_action(&self) -> Self {
        let Some(entry) = entry_at(self.handler) else { return *self };
        let flags = entry.flags.load(Ordering::Relaxed);
        // A restorer that was never set is not reported either.
        let restorer = if flags & SA_RESTORER != 0 { self.restorer } else { 0 };
        let handler = entry.handler.load(Ordering::Relaxed);
        Self { handler, flags: self.flags & !OURS | flags, restorer, ..*self }
    }
}

pub fn real_action(signal: c_int, action: *const Action, old: *mut Action) -> c_int {
    call_real!(sigaction(signal => c_int, action => *const Action, old => *mut Action) -> c_int)
}

/// Takes the two signals over, for the constructor, and for a thread that has stopped and needs them again. Where one
/// is ignored, or they cannot be taken, nothing may be served.
#[must_use]
pub fn install() -> bool {
    IS_ON.store(true, Ordering::Relaxed); // before any other thread, or before this one looks
    SIGNALS.into_iter().all(|signal| {
        let mut old = Action::new(SIG_DFL, 0, 0);
        if real_action(signal, core::ptr::null(), &raw mut old) != 0 {
            return false;
        }
        loop {
            if entry_at(old.handler).is_some() {
                return true;
            }
            let Some(new) =
                (old.handler != SIG_IGN).then(|| old.kernel_action(old.flags & SA_RESTORER)).flatten()
            else {
                return false;
            };
            // An action that another thread set between the look and the change goes in again.
            let mut out = old;
            if real_action(signal, &raw const new, &raw mut out) != 0 {
                return false;
            }
            if out.handler == old.handler {
                return true;
            }
            old = out;
            if entry_at(old.handler).is_some()
                && real_action(signal, &raw const old, core::ptr::null_mut()) != 0
            {
                return false;
            }
        }
    })
}

/// Whether the library gets the faults of its own instructions from here on, though the process is served no more.
#[must_use]
pub fn stay_installed() -> bool {
    let is_ours = |signal| kernel::signal_action(signal).is_some_and(|it| entry_at(it.handler).is_some());
    IS_ON.load(Ordering::Relaxed) && is_ours(SIGSEGV) || install() && is_ours(SIGSEGV)
}

pub fn uninstall() {
    if IS_ON.swap(false, Ordering::Relaxed) {
        put_back_all();
    }
}

/// [`uninstall`], of a process that stopped without; those that it was forked from keep theirs.
pub fn put_back() {
    if IS_ON.load(Ordering::Relaxed) {
        put_back_all();
    }
}

fn put_back_all() {
    for signal in SIGNALS {
        let Some(mut there) = kernel::signal_action(signal).filter(|it| entry_at(it.handler).is_some())
        else {
            continue;
        };
        let mut next = own_action(there);
        while let Some(out) = kernel::set_signal_action(signal, &next) {
            if out.handler == there.handler {
                break;
            }
            (there, next) = (next, own_action(out));
        }
    }
}

fn own_action(found: kernel::SignalAction) -> kernel::SignalAction {
    let Some(entry) = entry_at(found.handler) else { return found };
    let handler = entry.handler.load(Ordering::Relaxed);
    let flags = found.flags & !u64::from(OURS) | u64::from(entry.flags.load(Ordering::Relaxed));
    kernel::SignalAction { handler, flags, ..found }
}

/// Whether it is one of the two signals, and its action the library's.
pub fn is_ours(signal: c_int) -> bool {
    SIGNALS.contains(&signal) && IS_ON.load(Ordering::Relaxed)
}
