//! LD_PRELOAD: programs that are started where the library's object cannot be reached any more.
//!
//! `LD_PRELOAD` names the object, a file in a folder that its user alone may enter. Programs inherit that for as long
//! as they like; once its owner has ended the object does nothing. But a program may become another user, or have
//! another root, or the folder may be gone. Then the linker would complain on the program's standard error, for each
//! such program, or would load what lies there. So a process that is about to become another program checks whether the
//! name still leads to the very file that it has loaded, as the same user, and if not, takes the name out of the
//! environment that it hands on.
//!
//! ```text
//!   LD_PRELOAD=/usr/lib/other.so:/run/user/7/quinion/libquinion-HASH.so
//!   LD_PRELOAD=/usr/lib/other.so::::::::::::::::::::::::::::::::::::::::
//! ```
//!
//! The name is overwritten where it stands, since nothing here allocates: by a call of the kernel that fails, and does
//! not end the process, if those bytes may not be written. A child in its parent's memory changes the parent's
//! environment, too; that costs the parent's later children the cache.
//!
//! The environment may be anything, and the process a child in its parent's memory that has put the signals' handlers
//! back: so it is read, too, by a call of the kernel. Where that is forbidden, nothing is taken out. A handler of a
//! crash may run on a stack of a few KiB: so it is read in small pieces, and compared while it is read.
//!
//! Not seen: programs that are started by ones that are not served, or by the C library itself where it is not patched.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::kernel;
use crate::process::Inside;

const PREFIX: &[u8] = b"libquinion-";
const SUFFIX: &[u8] = b".so";

/// The longest name: of a folder that has room for sockets, a hash, and what is around it.
const NAME_MAX: usize = 80 + 1 + PREFIX.len() + 32 + SUFFIX.len();

const NOTHING: [u8; NAME_MAX] = [b':'; NAME_MAX];

struct Name(UnsafeCell<[u8; NAME_MAX + 1]>);
// SAFETY: written before its length is, with Release, by the constructor; read after that.
unsafe impl Sync for Name {}
/// The object's name and a zero.
static NAME: Name = Name(UnsafeCell::new([0; NAME_MAX + 1]));
/// Bytes of the object's name where it stands in the environment; 0 if it is not known.
static LENGTH: AtomicUsize = AtomicUsize::new(0);

/// Address of the object's name in the program's environment.
static PLACE: AtomicUsize = AtomicUsize::new(0);

/// The user by whose rights this process could load it.
static USER: AtomicU32 = AtomicU32::new(0);

/// Device and inode; zeros if the file was not there.
static FILE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Notes the object's name: the first in the value of `LD_PRELOAD` that fits. Called once, at the start.
pub fn remember(preload: Option<&[u8]>) {
    let is_ours = |name: &&[u8]| name.len() <= NAME_MAX && is_object(name);
    let first = preload.and_then(|value| value.split(|byte| is_separator(*byte)).find(is_ours));
    let Some(first) = first else { return };
    // SAFETY: it is not read before the length is there.
    unsafe { (&mut (*NAME.0.get()))[..first.len()].copy_from_slice(first) };
    let file = kernel::stat(NAME.0.get() as usize).map_or([0; 2], |file| [file.id.device, file.id.inode]);
    FILE.iter().zip(file).for_each(|(to, value)| to.store(value, Ordering::Relaxed)); // the length orders it
    USER.store(kernel::effective_user(), Ordering::Relaxed);
    PLACE.store(first.as_ptr() as usize, Ordering::Relaxed); // read with the length, which orders it
    LENGTH.store(first.len(), Ordering::Release); // partner: the Acquire in `name`
}

/// Takes the object's name out of the program's environment, reachable or not, for programs that it becomes from now
/// on. Titles that some programs write there stay.
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

/// Looks at nothing any more: the calls that it takes may be forbidden from now on.
pub fn stop_checks() {
    LENGTH.store(0, Ordering::SeqCst); // partner: `name`, which a counted thread calls; it is waited for
}

fn name() -> Option<&'static [u8]> {
    let length = LENGTH.load(Ordering::SeqCst); // partners: the Release in `remember`, and `stop_checks`
    // SAFETY: it is not written any more.
    (length > 0).then(|| unsafe { &(&(*NAME.0.get()))[..=length] })
}

/// Whether a path is one that the object may have.
fn is_object(path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    path.first() == Some(&b'/') && name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

fn is_separator(byte: u8) -> bool {
    byte == b':' || byte == b' '
}

const PAGE: usize = 4096;
const VARIABLE: [u8; 11] = *b"LD_PRELOAD=";

/// How many strings are looked at together, and how many bytes of a value: a handler on a small stack may become
/// another program.
const STRINGS: usize = 16;
const PIECE: usize = 256;

/// Reads up to the end of a page, or less; 0 if nothing can be read.
fn read_piece(at: usize, to: &mut [u8]) -> usize {
    let len = to.len().min(PAGE - at % PAGE);
    let bytes = &mut to[..len];
    if kernel::read_memory(&[[at, len]], bytes) == len { len } else { 0 }
}

/// Whether a string begins with the name of the variable, which may lie on two pages.
fn begins_with_variable(at: usize) -> bool {
    let mut bytes = [0; VARIABLE.len()];
    let first = read_piece(at, &mut bytes);
    if first > 0 && first < bytes.len() {
        read_piece(at.wrapping_add(first), &mut bytes[first..]);
    }
    bytes == VARIABLE
}

/// The address of the value of `LD_PRELOAD` in an environment, which may be anything: the kernel checks what can be
/// read, in a few calls of which each reads much.
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
            return Some(found + VARIABLE.len());
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
            *part = [string, VARIABLE.len()];
        }
        let mut bytes = [0u8; STRINGS * VARIABLE.len()];
        let left = strings.len() - at;
        let read = kernel::read_memory(&parts[..left], &mut bytes) / VARIABLE.len();
        let is_it = |string: &[u8]| string == VARIABLE;
        if let Some(found) = bytes[..read * VARIABLE.len()].chunks(VARIABLE.len()).position(is_it) {
            return Some(strings[at + found]);
        }
        at += read;
        if read < left {
            if begins_with_variable(strings[at]) {
                return Some(strings[at]);
            }
            at += 1;
        }
    }
    None
}

/// How much of the value is read: as much as the kernel lets a string have.
const VALUE_MAX: usize = 128 << 10;

/// A name in a value, as far as it has been compared with the object's.
struct PartialName {
    begin: usize,
    is_same: bool,
}

/// Takes the object's name out of an environment that is about to be handed on, if the object cannot be reached. The
/// address is the program's, and may be anything.
pub fn forget_in(environment: usize) {
    let _inside = Inside::count();
    let Some(name) = name() else { return };
    let Some(place) = find_value(environment) else { return };
    let wanted = &name[..name.len() - 1];
    let mut part = PartialName { begin: 0, is_same: true };
    let mut at = 0;
    while at < VALUE_MAX {
        let mut bytes = [0; PIECE];
        let read = read_piece(place.wrapping_add(at), &mut bytes);
        // Memory that cannot be read ends it, as a zero does.
        for &byte in if read == 0 { &[0][..] } else { &bytes[..read] } {
            let done = at - part.begin;
            if byte != 0 && !is_separator(byte) {
                part.is_same &= wanted.get(done) == Some(&byte);
                at += 1;
                continue;
            }
            if part.is_same && done == wanted.len() && !is_reachable(name) {
                kernel::overwrite((place + part.begin) as *const u8, &NOTHING[..wanted.len()]);
            }
            if byte == 0 {
                return;
            }
            at += 1;
            part = PartialName { begin: at, is_same: true };
        }
    }
}

/// Whether a program that is started now would load the object: the user is the same, and the name leads to the same
/// file, which may be read. Taken as true where that cannot be told. Another user may have kept rights that the program
/// will not have; and is not to load what this user can write, not even as root.
fn is_reachable(name: &[u8]) -> bool {
    if kernel::effective_user() != USER.load(Ordering::Relaxed) {
        return false;
    }
    // If it is something else by now, opening it must not wait or give the process a terminal.
    match kernel::open(name, kernel::O_NONBLOCK | kernel::O_NOCTTY) {
        Ok(fd) => {
            let known = [0, 1].map(|part: usize| FILE[part].load(Ordering::Relaxed)); // ordered by the length's Acquire
            let file = kernel::fstat(fd).filter(|file| file.is_regular());
            kernel::close(fd);
            file.is_some_and(|file| [file.id.device, file.id.inode] == known)
        }
        Err(error) => error.0 == kernel::EMFILE || error.0 == kernel::ENFILE,
    }
}
