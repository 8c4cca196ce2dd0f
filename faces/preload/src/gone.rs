//! Gone: programs that are started where our object cannot be reached any more.
//!
//! The dynamic linker is told of the object by `LD_PRELOAD`, as `/proc/PROCESS/fd/NUMBER`. Programs inherit that, and
//! may be started when it leads nowhere: the owner has ended and they have not, somebody has become another user, or
//! has another root or sees other processes. The linker would say on the program's standard error that it cannot
//! load it, for each of them. So whoever is about to become another program looks whether he could open the object
//! himself, and if not, takes its name out of the environment that he hands on.
//!
//! ```text
//!   LD_PRELOAD=/proc/4711/fd/7:/usr/lib/other.so   becomes   LD_PRELOAD=::::::::::::::::/usr/lib/other.so
//! ```
//!
//! The name is overwritten where it stands, since nothing here allocates: by a call of the kernel that fails, and does
//! not end us, if those bytes may not be written. Then the linker says what it says. In a child that runs in its
//! parent's memory the parent hands it on no more either; that is right if the owner has ended, and else costs the
//! parent's later children the cache.
//!
//! The environment may be anything, and the process a child in its parent's memory that has put the signals' handlers
//! back: so it is read as it is written, by a call of the kernel. Where that is forbidden, nothing is taken out.
//!
//! What this does not see: programs that are started by ones that are not served, or by the C library itself where it
//! is not patched.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::{kernel, start};

/// The longest name: `/proc/`, ten digits, `/fd/`, ten digits.
const NAME_MAX: usize = 30;

/// What stands where it stood.
const NOTHING: [u8; NAME_MAX] = [b':'; NAME_MAX];

struct Name(UnsafeCell<[u8; NAME_MAX + 1]>);
// SAFETY: written before its length is, with Release, by the constructor; read after that.
unsafe impl Sync for Name {}
/// Our object's name and a zero.
static NAME: Name = Name(UnsafeCell::new([0; NAME_MAX + 1]));
/// How long it is; 0 if it is not known.
static LENGTH: AtomicUsize = AtomicUsize::new(0);

/// Where it stands in the environment that the program was given.
static PLACE: AtomicUsize = AtomicUsize::new(0);

/// By whose rights this process could load it.
static USER: AtomicU32 = AtomicU32::new(0);

/// Notes our object's name: the one in the value of `LD_PRELOAD` that is a descriptor of some process. Called
/// once, at the start.
pub fn remember(preload: Option<&[u8]>) {
    let is_ours = |name: &&[u8]| name.len() <= NAME_MAX && start::is_descriptor(name);
    let first = preload.and_then(|value| value.split(|byte| is_separator(*byte)).find(is_ours));
    let Some(first) = first else { return };
    // SAFETY: nobody reads it before the length is there.
    unsafe { (&mut (*NAME.0.get()))[..first.len()].copy_from_slice(first) };
    USER.store(kernel::effective_user(), Ordering::Relaxed);
    PLACE.store(first.as_ptr() as usize, Ordering::Relaxed); // read with the length, which orders it
    LENGTH.store(first.len(), Ordering::Release); // partner: the Acquire in `name`
}

/// Takes our object's name out of the environment that the program was given, whether it can be reached or not: the
/// programs that it becomes from now on are to be without it. Some programs write their titles there; those stay.
pub fn withdraw() {
    let Some(name) = name() else { return };
    let name = &name[..name.len() - 1];
    let place = PLACE.load(Ordering::Relaxed) as *const u8; // ordered by the length's Acquire
    // SAFETY: the environment that a program was given stays mapped; only this thread looks, and each byte is a value.
    let still = unsafe { core::slice::from_raw_parts(place, name.len()) };
    if still == name {
        kernel::overwrite(place, &NOTHING[..name.len()]);
    }
}

/// Nothing is looked at any more: the calls that it takes may be forbidden from now on.
pub fn look_no_more() {
    LENGTH.store(0, Ordering::Relaxed);
}

/// The name with its zero, if it is known.
fn name() -> Option<&'static [u8]> {
    let length = LENGTH.load(Ordering::Acquire); // partner: the Release in `remember`
    // SAFETY: it is not written any more.
    (length > 0).then(|| unsafe { &(&(*NAME.0.get()))[..=length] })
}

fn is_separator(byte: u8) -> bool {
    byte == b':' || byte == b' '
}

const PAGE: usize = 4096;
const PREFIX: [u8; 11] = *b"LD_PRELOAD=";
/// So many strings are looked at in one step.
const STRINGS: usize = 64;

/// Reads a string's bytes up to its zero, as many as there is room for and can be read.
fn read_string(at: usize, to: &mut [u8]) -> &[u8] {
    let mut done = 0;
    while done < to.len() {
        let here = at.wrapping_add(done);
        let len = (to.len() - done).min(PAGE - here % PAGE).min(256);
        let bytes = &mut to[done..done + len];
        if kernel::read_memory(&[[here, len]], bytes) != len {
            break;
        }
        let end = bytes.iter().position(|&byte| byte == 0);
        done += end.unwrap_or(len);
        if end.is_some() {
            break;
        }
    }
    &to[..done]
}

/// The address of the value of `LD_PRELOAD` in an environment, which may be anything: what cannot be read the kernel
/// complains of. By some calls of the kernel, each of which reads much.
fn find_value(environment: usize) -> Option<usize> {
    let mut list = environment;
    loop {
        let mut strings = [0usize; STRINGS];
        let count = STRINGS.min((PAGE - list % PAGE) / size_of::<usize>()).max(1);
        // SAFETY: the same memory, as bytes.
        let bytes = unsafe {
            core::slice::from_raw_parts_mut(strings.as_mut_ptr().cast(), count * size_of::<usize>())
        };
        if kernel::read_memory(&[[list, bytes.len()]], bytes) != bytes.len() {
            return None;
        }
        let end = strings[..count].iter().position(|&string| string == 0);
        if let Some(found) = find_among(&strings[..end.unwrap_or(count)]) {
            return Some(found + PREFIX.len());
        }
        if end.is_some() {
            return None;
        }
        list = list.wrapping_add(count * size_of::<usize>());
    }
}

fn find_among(strings: &[usize]) -> Option<usize> {
    let mut at = 0;
    while at < strings.len() {
        let mut parts = [[0; 2]; STRINGS];
        for (part, &string) in parts.iter_mut().zip(&strings[at..]) {
            *part = [string, PREFIX.len()];
        }
        let mut bytes = [0u8; STRINGS * PREFIX.len()];
        let left = strings.len() - at;
        let read = kernel::read_memory(&parts[..left], &mut bytes) / PREFIX.len();
        let is_it = |string: &[u8]| string == PREFIX;
        if let Some(found) = bytes[..read * PREFIX.len()].chunks(PREFIX.len()).position(is_it) {
            return Some(strings[at + found]);
        }
        at += read;
        // One that is shorter, with nothing behind it, or is not there.
        if read < left {
            let mut one = [0; PREFIX.len()];
            if read_string(strings[at], &mut one) == PREFIX {
                return Some(strings[at]);
            }
            at += 1;
        }
    }
    None
}

/// Takes our object's name out of an environment that is about to be handed on, if the object cannot be reached. The
/// address is the program's, and may be anything; of the value the first bytes are looked at, where we stand.
pub fn forget_in(environment: usize) {
    let Some(name) = name() else { return };
    let Some(place) = find_value(environment) else { return };
    let mut room = [0; 1024];
    let value = read_string(place, &mut room);
    let mut at = 0;
    for part in value.split(|byte| is_separator(*byte)) {
        if part == &name[..name.len() - 1] && !is_reachable(name) {
            kernel::overwrite((place + at) as *const u8, &NOTHING[..part.len()]);
        }
        at += part.len() + 1;
    }
}

/// Whether a program that is started now could load the object: it is there, it may be read, and it is a file without a
/// name that nobody can change, as ours is, and not what another process has by that number. Where that cannot be
/// told it is taken to be so. Who has become another user may have kept rights to open it that the program will not
/// have.
fn is_reachable(name: &[u8]) -> bool {
    const ROOT: u32 = 0;
    let user = kernel::effective_user();
    if user != USER.load(Ordering::Relaxed) && user != ROOT {
        return false;
    }
    // If it is something else by now that is opened for nothing, that is not to wait, and gives nobody a terminal.
    match kernel::open(name, kernel::O_NONBLOCK | kernel::O_NOCTTY) {
        Ok(fd) => {
            let is_sealed = kernel::fcntl(fd, kernel::F_GET_SEALS).is_ok();
            kernel::close(fd);
            is_sealed
        }
        Err(error) => error.0 == kernel::EMFILE || error.0 == kernel::ENFILE,
    }
}
