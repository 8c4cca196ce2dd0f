//! Start: becoming a viewer, before the program's `main`.
//!
//! The environment says where the owner listens: `QUINION_VIEW=TOKEN:PLAN:SOCKET`: a number in hexadecimal that the
//! owner's files have, the number of the plan to patch the C library by, or `-`, and a socket's path.
//! `QUINION_WAIT_MS=NUMBER` is how long the owner is waited for, each time: for tests on busy machines. If the owner
//! serves more than one run, `QUINION_RUN=NUMBER` says which this is. `QUINION_FILTERS=NUMBER` says under how many
//! filters of system calls the run was: a process under more makes no call of the library's, since that may end it.
//!
//! `handshake.rs` makes it a viewer. The wait for the owner is bounded, and some numbers of descriptors are in use
//! meanwhile; the program does not run yet.

use core::ffi::{CStr, c_char, c_int};

use quinion_view::arena::control::Reason;
use quinion_view::viewer::handshake::NO_PLAN;

use crate::handshake::{CacheLocation, Joined, WELCOME_MILLIS, join, may_attach, number};
use crate::viewer_memory::ViewerMappings;
use crate::{faults, kernel, ld_preload, loaded, loading, new_descriptors, patch, process, real, stop};

const WAIT_MILLIS_MAX: u64 = 60_000;

#[used]
#[unsafe(link_section = ".init_array")]
static START: unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

/// Called by the dynamic linker with the program's arguments and environment.
unsafe extern "C" fn start(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    real::resolve();
    if !real::is_library_gnus() {
        return; // there is no environment, and nothing is known of that library
    }
    // SAFETY: the dynamic linker hands over the environment.
    let (place, run) = unsafe { (find(environment, b"QUINION_VIEW="), find(environment, b"QUINION_RUN=")) };
    // SAFETY: as above.
    let wait = unsafe { find(environment, b"QUINION_WAIT_MS=") };
    let Some(place) = place.and_then(CacheLocation::parse) else { return };
    // SAFETY: as above.
    let filters = unsafe { find(environment, b"QUINION_FILTERS=") };
    if is_under_filter(filters.and_then(|filters| number(filters, 10))) {
        return;
    }
    // SAFETY: as above.
    ld_preload::remember(unsafe { find(environment, b"LD_PRELOAD=") });
    if !may_attach() {
        return;
    }
    let (run, wait) = (run.and_then(|run| number(run, 10)), wait.and_then(|wait| number(wait, 10)));
    let wait = wait.map(|wait| wait.clamp(1, WAIT_MILLIS_MAX) as u32);
    let place = place.of_run(run.unwrap_or(0), wait);
    let Ok(joined) = join(&place, place.plan, WELCOME_MILLIS) else { return };
    if loaded::another_object_wraps() {
        return leave_to_wrapper(&joined);
    }
    if let Some(plan) = joined.plan {
        patch::apply(&plan);
        kernel::unmap(plan.base, plan.bytes as usize);
    }
    patch::count(&joined.viewer);
    if place.plan != NO_PLAN && !patch::is_patched() {
        loading::restrict_to_positional_reads();
    }
    if process::start(joined.viewer, place, joined.memory, kernel::process()).is_some() {
        if !faults::install() {
            return stop::stop(Reason::Passed);
        }
        adopt_inherited();
    }
}

/// Counts that this process is served nothing because another object wraps the functions that would be.
fn leave_to_wrapper(joined: &Joined) {
    patch::leave_to_wrapper();
    patch::count(&joined.viewer);
    joined.viewer.count_reason(Reason::Wrapped);
    let ViewerMappings(memory) = joined.memory;
    memory.iter().chain(&joined.plan).for_each(|map| kernel::unmap(map.base, map.bytes as usize));
}

/// Whether this process is, or may be, under a filter of system calls that the run was not under: then the library's
/// calls may end it. `filters`: how many the run was under. Until that is known the only calls are those by which the
/// dynamic linker has just loaded this object: it opens a file, reads it and closes it.
fn is_under_filter(filters: Option<u64>) -> bool {
    let mut status = [0; kernel::STATUS_MAX];
    match kernel::status(&mut status).map(filters_of) {
        Some(Filters::Known(count)) => filters != Some(count),
        Some(Filters::Unknown) | None => true,
    }
}

enum Filters {
    Known(u64),
    /// There are some, and an older kernel (before 5.9) does not say how many.
    Unknown,
}

fn filters_of(status: &[u8]) -> Filters {
    let value = |name: &[u8]| {
        let line = status.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(name))?;
        number(line.trim_ascii(), 10)
    };
    match (value(b"Seccomp:"), value(b"Seccomp_filters:")) {
        (_, Some(count)) => Filters::Known(count),
        // A kernel that is built without filters says nothing of them.
        (None | Some(0), None) => Filters::Known(0),
        (Some(_), None) => Filters::Unknown,
    }
}

/// The value of the variable; `prefix` is its name and `=`.
///
/// # Safety
/// `environment` is null or a list of strings that ends with null.
unsafe fn find(environment: *const *const c_char, prefix: &[u8]) -> Option<&'static [u8]> {
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

/// Descriptors the program was born with: another process may have them too, and the files of those that may write are
/// not served.
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
                new_descriptors::appeared(fd as c_int);
            }
        });
    }
    kernel::close(directory);
}
