//! Handshake: what a process asks of an owner, to become a viewer or to have it take a descriptor.
//!
//! ```text
//!   connect --> is the listener its own user? --Hello--> Welcome, and descriptors --> map them, close them
//! ```
//!
//! The owner decides by what the kernel says of this process. It sends the arena and what all viewers see, read-only,
//! and a page that no other process has. A child inherits neither the arena nor the page (`MADV_DONTFORK`); a core has
//! neither.
//!
//! `process.rs` says whether this process is a viewer, once it was given what is answered here. The constructor joins
//! (`start.rs`), and so does a forked child (`join.rs`), which notes here when its owner was too late.

use core::ffi::c_int;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use quinion_view::arena::LAYOUT_VERSION;
use quinion_view::viewer::handshake::{DescriptorOffer, JoinRequest, NO_PLAN};
use quinion_view::viewer::{ANSWER_MILLIS_MAX, Mapped, Viewer};

use crate::kernel::{self, Access, JoinError};
use crate::viewer_memory::ViewerMappings;

/// How long this process waits to become a viewer that is served, in milliseconds.
pub const WELCOME_MILLIS: u32 = 100;

const SOCKET_MAX: usize = 108;

#[derive(Clone, Copy)]
pub struct CacheLocation {
    token: u64,
    pub plan: u32,
    run: u64,
    /// How long an answer is waited for, in milliseconds, if the user said that.
    wait: Option<u32>,
    /// The path of its owner's socket, and zeros.
    socket: [u8; SOCKET_MAX],
}

impl CacheLocation {
    /// Reads the environment's `TOKEN:PLAN:SOCKET`.
    pub fn parse(value: &[u8]) -> Option<Self> {
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

    pub fn of_run(self, run: u64, wait: Option<u32>) -> Self {
        Self { run, wait, ..self }
    }
}

pub fn number(digits: &[u8], radix: u32) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |sum, &digit| {
        sum.checked_mul(u64::from(radix))?.checked_add(u64::from((digit as char).to_digit(radix)?))
    })
}

/// Whether this process can be a viewer: the owner finds it by the number that it gives itself, and no limit makes it
/// miss the arena's addresses.
pub fn may_attach() -> bool {
    is_known_by_number() && !kernel::are_addresses_limited()
}

/// Whether `/proc` shows the name space of this process's own number.
fn is_known_by_number() -> bool {
    let mut digits = [0; 16];
    let length = kernel::digits_in_proc(&mut digits);
    number(&digits[..length], 10) == Some(u64::from(kernel::process()))
}

pub struct Joined {
    pub viewer: Viewer,
    /// Mappings that go when the process is no viewer any more.
    pub memory: ViewerMappings,
    /// The plan for the C library, mapped.
    pub plan: Option<Mapped>,
}

/// In a forked child, by a thread that holds its signals back: the same again, without a plan.
pub fn join_as_child(place: &CacheLocation, millis: u32) -> Result<Joined, JoinError> {
    if may_attach() { join(place, NO_PLAN, millis) } else { Err(JoinError::Refused) }
}

pub fn join(place: &CacheLocation, plan: u32, millis: u32) -> Result<Joined, JoinError> {
    let hello = JoinRequest { version: LAYOUT_VERSION, plan, token: place.token, run: place.run };
    let millis = place.wait.unwrap_or(millis);
    let (_, files) = kernel::send_hello(&place.socket, &hello.bytes(), None, millis)?;
    let [arena, control, page, plan_file] = files.all();
    let all = arena.zip(control).zip(page);
    let viewed = all.and_then(|((arena, control), page)| view(place, arena, control, page));
    let (viewer, memory) = viewed.ok_or(JoinError::Refused)?;
    let plan = plan_file.and_then(|file| map_sealed(file, Access::Read));
    drop(files); // what is mapped stays so
    Ok(Joined { viewer, memory, plan })
}

pub fn send(place: &CacheLocation, descriptor: c_int) -> Option<u32> {
    let offer = DescriptorOffer { version: LAYOUT_VERSION, token: place.token };
    let millis = place.wait.unwrap_or(ANSWER_MILLIS_MAX);
    kernel::send_hello(&place.socket, &offer.bytes(), Some(descriptor), millis)
        .ok()
        .map(|(reply, _)| reply.viewer)
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

fn map_sealed(fd: c_int, access: Access) -> Option<Mapped> {
    let seals = kernel::fcntl(fd, kernel::F_GET_SEALS).ok()?;
    let stat = kernel::fstat(fd)?;
    if seals & kernel::F_SEAL_SHRINK == 0 || !stat.is_regular() || stat.size < 4096 {
        return None;
    }
    let base: NonNull<u8> = kernel::map_file(fd, stat.size as usize, access)?;
    Some(Mapped { base, bytes: stat.size as u64 })
}

/// With [`LATE`], the owner's heartbeat at which a child waited for it in vain.
static LATE_AT: AtomicU64 = AtomicU64::new(0);

const LATE: u64 = 1 << 32;

pub fn was_late() -> bool {
    LATE_AT.load(Ordering::Relaxed) != 0
}

pub fn was_late_at(beat: u32) -> bool {
    LATE_AT.load(Ordering::Relaxed) == LATE | u64::from(beat)
}

/// Notes that, at this heartbeat; whether that is the first time.
pub fn note_late(beat: u32) -> bool {
    LATE_AT.swap(LATE | u64::from(beat), Ordering::Relaxed) == 0 // one word
}

pub fn settle_child() {
    LATE_AT.store(0, Ordering::Relaxed);
}
