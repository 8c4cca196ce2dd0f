//! Start: becoming a viewer, before the program's `main`; and again in a forked child.
//!
//! The environment says where the owner listens: `QUINION_VIEW=TOKEN:PLAN:SOCKET`, a number in hexadecimal that both of
//! the owner's files have, the number of the plan by which the C library is to be patched, or `-` for none, and the
//! path of a socket. `QUINION_WAIT_MS=NUMBER` says how long the owner is waited for, each time, in milliseconds: for
//! tests on machines that are busy with something else. If the owner serves more than one run, `QUINION_RUN=NUMBER`
//! says which this is; it is counted for that one. `QUINION_FILTERS=NUMBER` says under how many filters of system calls
//! the run was: a process that is under more makes no call of ours, since that may end it.
//!
//! ```text
//!   connect --> is it our own user who listens? --Hello--> Welcome, and descriptors --> map them, close them
//! ```
//!
//! The owner decides by what the kernel says of this process whether it may view the cache. It sends the arena and what
//! all viewers see, both for reading alone, and a page that no other process has. A child inherits neither the arena
//! nor the page (`MADV_DONTFORK`); a core has neither. It is waited for the owner for [`WELCOME_MILLIS`] at most, or
//! longer by a child that has something to tell it. One for which it was too late joins once more, to tell, when the
//! owner's heartbeat has risen.
//!
//! For that time some numbers of descriptors are ours. The constructor runs before the program does. A child joins to
//! be served reads while it has no other thread, or not at all: a thread could close such a number, or open something
//! and get another number than without us. To tell the owner that it cuts, removes, locks or watches a file, or
//! unmounts, it joins with the threads that it has: that would be wrong, fail or keep space else. The calls that close
//! descriptors wait meanwhile (`process.rs`, BUSY). So they do while a descriptor is sent to an owner that may not
//! duplicate it ([`send`]); that takes a connection for a moment, and none is kept.

use core::ffi::{CStr, c_char, c_int};
use core::ptr::NonNull;

use quinion_view::arena::LAYOUT_VERSION;
use quinion_view::arena::control::Reason;
use quinion_view::viewer::handshake::{DescriptorOffer, JoinRequest, NO_PLAN};
use quinion_view::viewer::{ANSWER_MILLIS_MAX, Mapped, Viewer};

use crate::kernel::{Access, NoWelcome};
use crate::{audit, faults, kernel, ld_preload, loaded, opened, patch, process, real};

/// How long it is waited for the owner to make this process a viewer that is to be served, in milliseconds.
pub const WELCOME_MILLIS: u32 = 100;
/// The longest time that may be said by `QUINION_WAIT_MS`.
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
    let place = CacheLocation { run: run.unwrap_or(0), wait, ..place };
    let Ok(joined) = join(&place, place.plan, WELCOME_MILLIS) else { return };
    if loaded::another_object_wraps() {
        return leave_to_wrapper(&joined);
    }
    if let Some(plan) = joined.plan {
        patch::apply(&plan);
        kernel::unmap(plan.base, plan.bytes as usize);
    }
    patch::count(&joined.viewer);
    // Also where the plan did not arrive, as when few descriptors are left.
    if place.plan != NO_PLAN && !patch::is_patched() {
        audit::insist();
    }
    if process::start(joined.viewer, place, joined.memory, kernel::process()).is_some() {
        if !faults::install() {
            return process::stop(Reason::Passed);
        }
        adopt_inherited();
    }
}

/// Says why this process is served nothing: another object wraps the functions that would be, and has to be called as
/// it is without us.
fn leave_to_wrapper(joined: &Joined) {
    patch::leave_to_wrapper();
    patch::count(&joined.viewer);
    joined.viewer.count_reason(Reason::Wrapped);
    let ViewerMappings(memory) = joined.memory;
    memory.iter().chain(&joined.plan).for_each(|map| kernel::unmap(map.base, map.bytes as usize));
}

/// Whether this process is under a filter of system calls that the run was not under, or may be: then those that we
/// make may end it. `filters` is under how many the run was. Until that is known no call is made but the ones by which
/// the dynamic linker has just loaded this object: it opens a file, reads it and closes it.
fn is_under_filter(filters: Option<u64>) -> bool {
    let mut status = [0; kernel::STATUS_MAX];
    match kernel::status(&mut status).map(filters_of) {
        Some(Filters::Known(count)) => filters != Some(count),
        Some(Filters::Unknown) | None => true,
    }
}

/// What a process's status says of its filters of system calls.
enum Filters {
    /// So many.
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

/// Whether this process can be a viewer: the owner finds it by the number that it gives itself, and the addresses that
/// the arena takes are not missed.
fn may_attach() -> bool {
    is_known_by_number() && !kernel::are_addresses_limited()
}

/// Whether the name space of processes is the one that `/proc` shows: one that names this process by its number means
/// it.
pub fn is_known_by_number() -> bool {
    let mut digits = [0; 16];
    let length = kernel::digits_in_proc(&mut digits);
    number(&digits[..length], 10) == Some(u64::from(kernel::process()))
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

/// The longest path of a socket, with the zero at its end.
const SOCKET_MAX: usize = 108;

/// Where a cache is to be found.
#[derive(Clone, Copy)]
pub struct CacheLocation {
    /// What both of its files say.
    token: u64,
    /// The number of the plan by which the C library is to be patched.
    plan: u32,
    /// The run that is counted for.
    run: u64,
    /// For how long an answer is waited for, in milliseconds, if the user said that.
    wait: Option<u32>,
    /// The path of its owner's socket, and zeros.
    socket: [u8; SOCKET_MAX],
}

impl CacheLocation {
    fn parse(value: &[u8]) -> Option<Self> {
        let mut fields = value.splitn(3, |&byte| byte == b':');
        let token = number(fields.next()?, 16)?;
        let plan = match fields.next()? {
            b"-" => NO_PLAN,
            plan => u32::try_from(number(plan, 10)?).ok()?,
        };
        let path = fields.next().filter(|path| path.len() < SOCKET_MAX && !path.is_empty())?;
        let mut socket = [0; SOCKET_MAX];
        socket[..path.len()].copy_from_slice(path);
        Some(Self { token, plan, run: 0, wait: None, socket })
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

/// What was given to this process.
pub struct Joined {
    /// By which it views the cache.
    pub viewer: Viewer,
    /// What of it is to go when the process is no viewer any more.
    pub memory: ViewerMappings,
    /// What the C library is to be patched by, mapped.
    plan: Option<Mapped>,
}

/// What only a viewer has: the arena, and its own page.
#[derive(Clone, Copy)]
pub struct ViewerMappings(pub [Mapped; 2]);

/// In a forked child that can be a viewer, by a thread that holds its signals back: the same again, without a plan.
pub fn join_as_child(place: &CacheLocation, millis: u32) -> Result<Joined, NoWelcome> {
    if may_attach() { join(place, NO_PLAN, millis) } else { Err(NoWelcome::Refused) }
}

/// Has the owner make this process a viewer.
fn join(place: &CacheLocation, plan: u32, millis: u32) -> Result<Joined, NoWelcome> {
    let hello = JoinRequest { version: LAYOUT_VERSION, plan, token: place.token, run: place.run };
    let millis = place.wait.unwrap_or(millis);
    let (_, files) = kernel::greet(&place.socket, &hello.bytes(), None, millis)?;
    let [arena, control, page, plan_file] = files.all();
    let all = arena.zip(control).zip(page);
    let viewed = all.and_then(|((arena, control), page)| view(place, arena, control, page));
    let (viewer, memory) = viewed.ok_or(NoWelcome::Refused)?;
    let plan = plan_file.and_then(|file| map_sealed(file, Access::Read));
    drop(files); // what is mapped stays so
    Ok(Joined { viewer, memory, plan })
}

/// Sends a descriptor to the owner of the cache that this process views; the ticket for it.
pub fn send(place: &CacheLocation, descriptor: c_int) -> Option<u32> {
    let offer = DescriptorOffer { version: LAYOUT_VERSION, token: place.token };
    let millis = place.wait.unwrap_or(ANSWER_MILLIS_MAX);
    kernel::greet(&place.socket, &offer.bytes(), Some(descriptor), millis).ok().map(|(reply, _)| reply.viewer)
}

fn view(
    place: &CacheLocation,
    arena: c_int,
    control: c_int,
    page: c_int,
) -> Option<(Viewer, ViewerMappings)> {
    let arena = Guard(map_sealed(arena, Access::Read)?);
    let control = Guard(map_sealed(control, Access::Read)?);
    let page = Guard(map_sealed(page, Access::ReadWrite)?);
    for map in [&arena, &page] {
        kernel::keep_from_children(map.0.base, map.0.bytes as usize).ok()?;
        kernel::keep_from_cores(map.0.base, map.0.bytes as usize);
    }
    // SAFETY: all three were mapped just now and stay mapped if this succeeds.
    let viewer = unsafe { Viewer::attach(arena.0, control.0, page.0, place.token) }.ok()?;
    let viewer = viewer.waiting_at_most(place.wait.unwrap_or(ANSWER_MILLIS_MAX));
    viewer.count_for(place.run);
    let memory = ViewerMappings([arena.keep(), page.keep()]);
    control.keep();
    Some((viewer, memory))
}

/// Unmaps what turns out to be of no use.
struct Guard(Mapped);

impl Guard {
    fn keep(self) -> Mapped {
        core::mem::ManuallyDrop::new(self).0
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        kernel::unmap(self.0.base, self.0.bytes as usize);
    }
}

/// Maps all of a file, if it is one whose size cannot change.
fn map_sealed(fd: c_int, access: Access) -> Option<Mapped> {
    let seals = kernel::fcntl(fd, kernel::F_GET_SEALS).ok()?;
    let stat = kernel::fstat(fd)?;
    if seals & kernel::F_SEAL_SHRINK == 0 || !stat.is_regular() || stat.size < 4096 {
        return None;
    }
    let base: NonNull<u8> = kernel::map_file(fd, stat.size as usize, access)?;
    Some(Mapped { base, bytes: stat.size as u64 })
}

/// Descriptors the program was born with: another process may have them too, and the files of those that may write
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
