//! Start: attaching, before the program's `main`.
//!
//! The environment says where: `QUINION_VIEW=PROCESS:ARENA:CONTROL:TOKEN:PLAN`,
//! three descriptors of the owner's process, before the last a number in
//! hexadecimal. The files are opened by way of `/proc`, checked, mapped and
//! closed again. `-` stands for no plan: then the C library is not patched. If
//! the owner serves more than one run, `QUINION_RUN=NUMBER` says which this is;
//! it is counted for that one.

use core::ffi::{CStr, c_char, c_int};
use core::ptr::NonNull;

use quinion::arena::control::Reason;
use quinion::viewer::{Mapped, Viewer};

use crate::kernel::Access;
use crate::{faults, gone, kernel, opened, patch, process, real};

#[used]
#[unsafe(link_section = ".init_array")]
static START: unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

/// Called by the dynamic linker with the program's arguments and environment.
unsafe extern "C" fn start(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    real::resolve();
    // SAFETY: the dynamic linker hands over the environment.
    let (place, run) = unsafe { (find(environment, b"QUINION_VIEW="), find(environment, b"QUINION_RUN=")) };
    let Some(place) = place.and_then(Place::parse) else { return };
    // SAFETY: as above.
    gone::remember(unsafe { find(environment, b"LD_PRELOAD=") }, place.process);
    if !may_attach() {
        return;
    }
    let Some((viewer, mapped)) = attach(&place) else { return };
    viewer.count_for(run.and_then(|run| number(run, 10)).unwrap_or(0));
    patch_library(&place);
    patch::count(&viewer);
    if process::start(viewer, mapped, kernel::process()).is_some() {
        if !faults::install() {
            return process::stop(Reason::Passed);
        }
        adopt_inherited();
    }
}

/// Whether this process can be a viewer: the owner finds it by the number that it gives itself, and the addresses that
/// the arena takes are not missed.
fn may_attach() -> bool {
    is_known_by_number() && !kernel::are_addresses_limited()
}

/// Whether the name space of processes is the one that `/proc` shows: who names this process by its number means it.
pub fn is_known_by_number() -> bool {
    let mut digits = [0; 16];
    let length = kernel::digits_in_proc(&mut digits);
    number(&digits[..length], 10) == Some(u64::from(kernel::process()))
}

/// Patches the C library, if there is a plan for it.
fn patch_library(place: &Place) {
    if let Some(plan) = place.plan.and_then(|plan| map_file(place.process, plan, Access::Read)) {
        patch::apply(&plan);
        kernel::unmap(plan.base, plan.bytes as usize);
    }
}

/// The value of the variable whose name and `=` are `prefix`.
///
/// # Safety
/// `environment` is null or a list of strings that ends with null.
pub unsafe fn find(environment: *const *const c_char, prefix: &[u8]) -> Option<&'static [u8]> {
    if environment.is_null() {
        return None;
    }
    let mut at = environment;
    // SAFETY: the list ends with null, and each other entry is a string.
    unsafe {
        while !(*at).is_null() {
            if let Some(value) = CStr::from_ptr(*at).to_bytes().strip_prefix(prefix) {
                return Some(value);
            }
            at = at.add(1);
        }
    }
    None
}

/// Where a cache is to be found.
struct Place {
    process: u64,
    arena: u64,
    control: u64,
    token: u64,
    plan: Option<u64>,
}

impl Place {
    fn parse(value: &[u8]) -> Option<Self> {
        let mut fields = value.split(|&byte| byte == b':');
        let mut next = |radix| number(fields.next()?, radix);
        let (process, arena, control, token) = (next(10)?, next(10)?, next(10)?, next(16)?);
        let plan = match fields.next()? {
            b"-" => None,
            plan => Some(number(plan, 10)?),
        };
        fields.next().is_none().then_some(Self { process, arena, control, token, plan })
    }
}

fn number(digits: &[u8], radix: u32) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |sum, &digit| {
        sum.checked_mul(u64::from(radix))?.checked_add(u64::from((digit as char).to_digit(radix)?))
    })
}

fn attach(place: &Place) -> Option<(Viewer, process::Place)> {
    let arena = map_file(place.process, place.arena, Access::Read)?;
    let Some(control) = map_file(place.process, place.control, Access::ReadWrite) else {
        kernel::unmap(arena.base, arena.bytes as usize);
        return None;
    };
    // SAFETY: both were mapped just now and stay mapped if this succeeds.
    let viewer = unsafe { Viewer::attach(arena, control, place.token, kernel::process()) };
    if viewer.is_err() {
        kernel::unmap(arena.base, arena.bytes as usize);
        kernel::unmap(control.base, control.bytes as usize);
    }
    Some((viewer.ok()?, process::Place { arena, control, token: place.token }))
}

fn map_file(process: u64, descriptor: u64, access: Access) -> Option<Mapped> {
    let mut path = [0u8; 64];
    write_path(&mut path, process, descriptor);
    let flags = if access == Access::Read { 0 } else { kernel::O_RDWR };
    let fd = kernel::open(&path, flags).ok()?;
    let mapped = map_sealed(fd, access);
    kernel::close(fd);
    mapped
}

/// Maps all of a file, if it is one whose size nobody can take away under us.
fn map_sealed(fd: c_int, access: Access) -> Option<Mapped> {
    let seals = kernel::fcntl(fd, kernel::F_GET_SEALS).ok()?;
    let stat = kernel::fstat(fd)?;
    if seals & kernel::F_SEAL_SHRINK == 0 || !stat.is_regular() || stat.size < 4096 {
        return None;
    }
    let base: NonNull<u8> = kernel::map_file(fd, stat.size as usize, access)?;
    Some(Mapped { base, bytes: stat.size as u64 })
}

/// `/proc/PROCESS/fd/DESCRIPTOR` and a zero.
fn write_path(path: &mut [u8; 64], process: u64, descriptor: u64) {
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        for &byte in bytes {
            path[at] = byte;
            at += 1;
        }
    };
    put(b"/proc/");
    decimal(process, &mut put);
    put(b"/fd/");
    decimal(descriptor, &mut put);
}

/// Whether `path` is `/proc/PROCESS/fd/` and a number.
pub fn is_descriptor_of(path: &[u8], process: u64) -> bool {
    let Some(rest) = path.strip_prefix(b"/proc/") else { return false };
    let mut parts = rest.split(|&byte| byte == b'/');
    parts.next().and_then(|part| number(part, 10)) == Some(process)
        && parts.next() == Some(b"fd")
        && parts.next().and_then(|part| number(part, 10)).is_some()
        && parts.next().is_none()
}

fn decimal(value: u64, put: &mut impl FnMut(&[u8])) {
    let mut digits = [0u8; 20];
    let mut first = digits.len();
    let mut rest = value;
    loop {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    put(&digits[first..]);
}

/// Descriptors the program was born with: somebody else may have them too, and the files of those that may write
/// are not served.
fn adopt_inherited() {
    let Ok(directory) = kernel::open(b"/proc/self/fd\0", kernel::O_DIRECTORY) else { return };
    let mut entries = [0u64; 128];
    loop {
        let bytes = kernel::directory_entries(directory, &mut entries);
        if bytes == 0 {
            break;
        }
        kernel::entry_names(&entries, bytes, |name| {
            if let Some(fd) = number(name, 10)
                && fd != directory as u64
            {
                opened::appeared(fd as c_int);
            }
        });
    }
    kernel::close(directory);
}
