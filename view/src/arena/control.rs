//! Control: how the owner and its viewers talk.
//!
//! The owner publishes one [`Control`] for all viewers, which they map read-only. Each viewing process shares one
//! [`ViewerPage`] with the owner: a memory file of its own, which the owner creates for it and hands over when the
//! process joins, and which no other process is given. So a viewer can write nothing that another viewer reads.
//!
//! ```text
//!   owner's mapping    | Control | ViewerPage 0 (20 KiB) | ViewerPage 1 | ...  99 |     group 0
//!                           |              |                    `- a memory file of its own, and so on
//!                           |      | ViewerPage 100        | ViewerPage 101 | .. 199 |   group 1, when it is needed
//!   a viewer maps      read-only    read-write, one of them
//!
//!   viewer thread                              owner
//!   slot FREE -> CLAIMED, writes arguments
//!   slot -> PENDING, changes its futex        wakes, slot -> TAKEN, works
//!   sleeps on the slot's state, for a bounded  writes answer, slot -> DONE, wakes it
//!   time; reads the answer, slot -> FREE
//!   too late:  PENDING -> FREE, nothing was done
//!              TAKEN -> GIVEN_UP               takes the answer back, slot -> FREE
//! ```
//!
//! The owner trusts nothing in a viewer's page: it checks every number, and nonsense in a futex word or an access ring
//! costs a little time and nothing else. The next viewer in a dead one's place is given another page.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::layout::{LAYOUT_VERSION, LayoutError};
use crate::units::FileId;

/// The first eight bytes of a control file.
pub const CONTROL_MAGIC: u64 = u64::from_le_bytes(*b"QUINCTL\0");
/// How many processes may view a cache at a time, whatever the options say.
pub const VIEWERS_MAX: usize = 4096;
/// Viewers whose pages lie in one extent of the owner's memory: no more than whose futexes one thread can wait for.
pub const GROUP_VIEWERS: usize = 100;
/// Groups of viewers at most.
pub const GROUPS_MAX: usize = VIEWERS_MAX.div_ceil(GROUP_VIEWERS);
/// Requests one viewer can have open at a time.
pub const REQUEST_SLOTS: usize = 32;
/// Entries of an access ring; older ones are overwritten.
pub const RING_ENTRIES: usize = 4096;
/// Bytes of a viewer's page.
pub const VIEWER_BYTES: usize = 20 << 10;
/// Bytes of the owner's control mapping, with the pages of the first group of viewers: one extent. They count against
/// the cache's bound, as does one extent for each further group.
pub const CONTROL_BYTES: usize = 2 << 20;
/// Bytes of the part that all viewers map, read-only.
pub const COMMON_BYTES: usize = size_of::<Control>();
/// Entries of a viewer's ring of large files that it opened; older ones are overwritten.
pub const OPENED_ENTRIES: usize = 64;

/// The owner's state that all viewers see. Only the owner writes it.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Control {
    /// [`CONTROL_MAGIC`], stored last.
    pub magic: AtomicU64,
    /// [`super::LAYOUT_VERSION`].
    pub version: AtomicU32,
    /// The owner's process.
    pub owner: AtomicU32,
    /// The arena's token, so that the two files are known to belong together.
    pub token: AtomicU64,
    /// 1 once the owner serves no more.
    pub closed: AtomicU32,
    /// Rises about ten times a second while the owner is well.
    pub heartbeat: AtomicU32,
    /// How many of the owner's threads sleep on these futexes, or are about to.
    pub sleepers: AtomicU32,
    /// The numbers of [`AttachPolicy`], in the order of its fields.
    pub attach_policy: [AtomicU64; 3],
    /// Until when viewers may trust records that say [`Validation::Leased`](super::Validation::Leased), by the clock of
    /// [`ticks`](crate::viewer::sys::ticks); 0 at first. The owner extends it with each heartbeat. A stopped owner does
    /// not, and may have missed news of its leases: viewers then read through the kernel.
    pub leases_valid_until: AtomicU64,
    /// A bit for each file that was taken over. Files may share a bit: a set one is a reason to ask, a clear one is
    /// not.
    pub taken: [AtomicU64; TAKEN_BITS / 64],
    /// Hints: large files that viewers opened and read lately; the hash of the identity, and how often in the lowest
    /// byte. Two that share a place displace each other. The owner adds up [`ViewerPage::opened`].
    pub openings: [AtomicU64; OPENINGS_PLACES],
    /// How many files are attached, by any viewer.
    pub attached_files: AtomicU32,
    /// Attached files by place: each counts at its [`place_of`].
    pub attached: [SaturatingCount; ATTACHED_PLACES],
}

/// Places of [`Control::openings`].
pub const OPENINGS_PLACES: usize = 256;
/// Places of [`Control::attached`].
pub const ATTACHED_PLACES: usize = 2048;

/// Which of `places` a file counts at. Two files may have one: a request about the one may be answered of the other.
#[inline]
pub fn place_of(id: FileId, places: usize) -> usize {
    // One step of a well-known generator: a good enough mix of all bits.
    let x = (id.inode ^ id.device.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) as usize % places
}

/// A small count that stays full once it is full, so that nothing is counted as gone by mistake.
///
/// A file's count is raised before a lease is asked for, and a viewer looks at it before it opens the file for writing,
/// in SeqCst steps. In their one order, either the viewer sees that there may be a lease, or the lease is asked for
/// while the file is being opened, which the kernel settles.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SaturatingCount(AtomicU8);

impl SaturatingCount {
    /// Adds one.
    #[inline]
    pub fn raise(&self) {
        let more = |count: u8| count.checked_add(1);
        // SeqCst, partner: `is_zero`; the head of this type argues.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
    }
    /// Takes one away.
    #[inline]
    pub fn lower(&self) {
        let less = |count: u8| (count != u8::MAX).then(|| count.saturating_sub(1));
        // SeqCst, partner: `is_zero`.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
    /// Whether there is none.
    #[inline]
    pub fn is_zero(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0 // partner: `raise`
    }
}

const CHECKS_TIMES: u64 = 1;
const ANY_FILE_SYSTEM: u64 = 2;
const PASS_IS_KERNELS: u64 = 4;

const TAKEN_BITS: usize = 8192;

/// One step of a well-known multiplicative hash, of which the upper bits are the good ones.
#[inline]
fn hash_of(id: FileId) -> u64 {
    (id.inode ^ id.device.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

const OPENINGS_COUNT: u64 = 0xff;

/// The hash of a file's opening that a viewer notes in [`ViewerPage::opened`]; never 0.
#[inline]
pub fn opening_of(id: FileId) -> u64 {
    hash_of(id) & !OPENINGS_COUNT | 1
}

#[inline]
fn taken_bit(id: FileId) -> (usize, u64) {
    let place = hash_of(id) >> 51;
    (place as usize / 64, 1 << (place % 64))
}
const _: () = assert!(TAKEN_BITS == 1 << (64 - 51));

/// When a viewer asks for a file. Attaching costs as much as some dozens of reads by the kernel, so a file that is read
/// once, in a few calls, is better left to it. The default asks at the first read of any file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AttachPolicy {
    /// A file of so many bytes or more is asked for at its first read if it was taken over before ([`Control::taken`]),
    /// else when reads of a descriptor, as [`AttachPolicy::credit_of`] counts them, have come to twice its size.
    pub large_bytes: u64,
    /// A smaller one when they have come to so many bytes.
    pub credit_bytes: u64,
    /// Whether they have to come to more than a smaller file's size, too. One pass over it gains nothing, however often
    /// it is opened for another: to ask costs more than all of the reads.
    pub pass_is_kernels: bool,
    /// Whether files without a lease are served, with a look at their times before each read. If not, a descriptor that
    /// can write is not asked for: its file can have no lease while it is open.
    pub checks_times: bool,
    /// Whether files are served of whatever file system; else those of the list in [`super::file_systems`].
    pub any_file_system: bool,
}

impl AttachPolicy {
    /// The most that one read counts for: the kernel's fixed cost matters for small reads only.
    pub const READ_BYTES_MAX: u64 = 16 << 10;

    /// The credit that a file of `bytes` bytes begins with, when it is not asked for at its first read.
    pub const fn first_credit(&self, bytes: u64) -> u64 {
        if bytes >= self.large_bytes {
            return bytes.saturating_mul(2);
        }
        // With the read that finds the end.
        let pass = if self.pass_is_kernels { bytes.saturating_add(Self::READ_BYTES_MAX) } else { 0 };
        if pass > self.credit_bytes { pass } else { self.credit_bytes }
    }

    /// The credit that a read of `len` bytes takes, in bytes.
    #[inline]
    pub const fn credit_of(len: u64) -> u64 {
        if len < Self::READ_BYTES_MAX { len } else { Self::READ_BYTES_MAX }
    }
}

impl Control {
    /// When viewers are to ask for files.
    #[inline]
    pub fn attach_policy(&self) -> AttachPolicy {
        let [large_bytes, credit_bytes, rules] =
            self.attach_policy.each_ref().map(|word| word.load(Ordering::Relaxed));
        AttachPolicy {
            large_bytes,
            credit_bytes,
            pass_is_kernels: rules & PASS_IS_KERNELS != 0,
            checks_times: rules & CHECKS_TIMES != 0,
            any_file_system: rules & ANY_FILE_SYSTEM != 0,
        }
    }

    /// Notes that a file was taken over.
    #[inline]
    pub fn note_taken(&self, id: FileId) {
        let (word, bit) = taken_bit(id);
        self.taken[word].fetch_or(bit, Ordering::Relaxed);
    }

    /// Whether a file was taken over, or looks like one that was.
    #[inline]
    pub fn is_taken(&self, id: FileId) -> bool {
        let (word, bit) = taken_bit(id);
        self.taken[word].load(Ordering::Relaxed) & bit != 0
    }

    /// How often a large file was opened, as far as the owner has heard; up to 255.
    #[inline]
    pub fn openings(&self, id: FileId) -> u64 {
        let hash = opening_of(id);
        let known = self.opening_place(hash).load(Ordering::Relaxed);
        if (known ^ hash) & !OPENINGS_COUNT == 0 { known & OPENINGS_COUNT } else { 0 }
    }

    /// Counts an opening that a viewer noted, as the number that [`opening_of`] gave for the file.
    #[inline]
    pub fn count_opening(&self, hash: u64) {
        let (hash, place) = (hash & !OPENINGS_COUNT, self.opening_place(hash));
        let known = place.load(Ordering::Relaxed);
        let before = if (known ^ hash) & !OPENINGS_COUNT == 0 { known & OPENINGS_COUNT } else { 0 };
        place.store(hash | (before + 1).min(OPENINGS_COUNT), Ordering::Relaxed);
    }

    #[inline]
    fn opening_place(&self, hash: u64) -> &AtomicU64 {
        &self.openings[(hash >> 56) as usize % OPENINGS_PLACES]
    }

    /// Says when viewers are to ask for files; they look at it each time.
    #[inline]
    pub fn set_attach_policy(&self, attach_policy: AttachPolicy) {
        let AttachPolicy { large_bytes, credit_bytes, pass_is_kernels, checks_times, any_file_system } =
            attach_policy;
        let rules = [
            (pass_is_kernels, PASS_IS_KERNELS),
            (checks_times, CHECKS_TIMES),
            (any_file_system, ANY_FILE_SYSTEM),
        ];
        let rules = rules.iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| bit).sum();
        let numbers = [large_bytes, credit_bytes, rules];
        for (place, number) in self.attach_policy.iter().zip(numbers) {
            place.store(number, Ordering::Relaxed);
        }
    }

    /// Counts a file as attached, for viewers that are about to write or remove it. Returns its place.
    #[inline]
    pub fn enter(&self, id: FileId) -> usize {
        let place = place_of(id, ATTACHED_PLACES);
        self.attached_files.fetch_add(1, Ordering::Relaxed);
        self.attached[place].raise();
        place
    }

    /// Takes back the count of [`Control::enter`] at that place.
    #[inline]
    pub fn leave(&self, place: usize) {
        self.attached[place].lower();
        self.attached_files.fetch_sub(1, Ordering::Relaxed);
    }

    /// Writes the first page of a control file; the magic number last.
    #[inline]
    pub fn publish(&self, token: u64, owner: u32) {
        self.version.store(LAYOUT_VERSION, Ordering::Relaxed);
        self.owner.store(owner, Ordering::Relaxed);
        self.token.store(token, Ordering::Relaxed);
        // Release, partner: the Acquire in `ControlView::attach`: a thread that sees the magic sees the rest.
        self.magic.store(CONTROL_MAGIC, Ordering::Release);
    }
}

/// The owner's control mapping, by its parts. All are atomics, and a viewer may write its page at any moment: a number
/// read from a page is checked before it is used.
#[derive(Debug)]
pub struct ControlView {
    base: NonNull<u8>,
    /// Where the pages of each group lie; null for a group that no viewer was in yet.
    groups: [AtomicPtr<ViewerPages>; GROUPS_MAX],
}

/// The pages of a group: never looked at as a whole.
type ViewerPages = u8;

// SAFETY: all that it hands out are shared references to atomics.
unsafe impl Send for ControlView {}
// SAFETY: as above.
unsafe impl Sync for ControlView {}

/// Where the page of viewer `number` lies in the mapping of its group, in bytes; the first group's is the control
/// mapping.
#[inline]
pub const fn page_offset(number: usize) -> usize {
    let before = if number < GROUP_VIEWERS { size_of::<Control>() } else { 0 };
    before + number % GROUP_VIEWERS * VIEWER_BYTES
}

impl ControlView {
    /// A view of a control mapping that this process made, and has yet to [`Control::publish`].
    ///
    /// # Safety
    /// `base` is the start of a writable mapping of [`CONTROL_BYTES`] bytes, aligned to a page, that
    /// stays mapped as long as the view or anything it handed out is used.
    #[inline]
    pub unsafe fn new(base: NonNull<u8>) -> Self {
        let groups = core::array::from_fn(|group| {
            AtomicPtr::new(if group == 0 { base.as_ptr() } else { core::ptr::null_mut() })
        });
        Self { base, groups }
    }

    /// The pages of another group of viewers.
    ///
    /// # Safety
    /// As for [`ControlView::new`], and `group` is not the first, and is told once.
    #[inline]
    pub unsafe fn add_group(&self, group: usize, base: NonNull<u8>) {
        // Release, partner: the Acquire in `viewer_page`: a thread that sees the address sees the mapping there.
        self.groups[group].store(base.as_ptr(), Ordering::Release);
    }

    /// The state that all viewers see.
    #[inline]
    pub fn control(&self) -> &Control {
        // SAFETY: the first pages are mapped and aligned, and all of them are atomics.
        unsafe { self.base.cast::<Control>().as_ref() }
    }

    /// The page of viewer `number`; `None` if there was never a viewer in its group.
    #[inline]
    pub fn viewer_page(&self, number: usize) -> Option<&ViewerPage> {
        // Acquire, partner: the Release in `add_group`.
        let pages = NonNull::new(self.groups.get(number / GROUP_VIEWERS)?.load(Ordering::Acquire))?;
        // SAFETY: the offset is that of a whole page of a viewer, below CONTROL_BYTES (asserted below)
        // and aligned as the page's type asks; all of it is atomics.
        Some(unsafe { pages.add(page_offset(number)).cast::<ViewerPage>().as_ref() })
    }
}

/// The owner's state for all viewers, and the viewer's own page.
#[derive(Debug)]
pub struct ViewerControl {
    common: NonNull<Control>,
    page: NonNull<ViewerPage>,
}

// SAFETY: all that it hands out are shared references to atomics.
unsafe impl Send for ViewerControl {}
// SAFETY: as above.
unsafe impl Sync for ViewerControl {}

impl ViewerControl {
    /// Checks the part that all viewers see, `common_bytes` bytes mapped at `common`, and takes `page_bytes` bytes at
    /// `page`.
    ///
    /// # Safety
    /// Both are the starts of mappings of so many bytes, aligned to a page, the second one writable, that stay mapped
    /// as long as this or anything it handed out is used.
    pub unsafe fn attach(
        (common, common_bytes): (NonNull<u8>, u64),
        (page, page_bytes): (NonNull<u8>, u64),
    ) -> Result<Self, LayoutError> {
        if common_bytes < COMMON_BYTES as u64 || page_bytes < VIEWER_BYTES as u64 {
            return Err(LayoutError::Inconsistent);
        }
        let view = Self { common: common.cast(), page: page.cast() };
        let control = view.control();
        // Acquire, partner: the Release in `Control::publish`.
        if control.magic.load(Ordering::Acquire) != CONTROL_MAGIC {
            return Err(LayoutError::NotAnArena);
        }
        match control.version.load(Ordering::Relaxed) {
            LAYOUT_VERSION => Ok(view),
            other => Err(LayoutError::Version(other)),
        }
    }

    /// The state that all viewers see, read-only.
    #[inline]
    pub fn control(&self) -> &Control {
        // SAFETY: it is mapped and aligned, and all of it is atomics.
        unsafe { self.common.as_ref() }
    }

    /// The viewer's page.
    #[inline]
    pub fn page(&self) -> &ViewerPage {
        // SAFETY: as above.
        unsafe { self.page.as_ref() }
    }
}

/// Memory that one viewing process shares with the owner.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct ViewerPage {
    /// Changed by the viewer when a request is pending; the owner's threads sleep on it.
    pub request_futex: AtomicU32,
    /// Next place in `ring`, counted without end.
    pub ring_head: AtomicU32,
    /// Next place in `opened`, counted without end.
    pub opened_head: AtomicU32,
    /// Up to where the owner has added `opened` up.
    pub opened_tail: AtomicU32,
    /// For which run of programs it counts; 0 for none. See `Service::begin_run` of crate `quinion-owner`.
    pub run: AtomicU64,
    /// Numbers for the report; see [`Counter`].
    pub counters: [AtomicU64; 48],
    /// Requests and answers.
    pub requests: [Request; REQUEST_SLOTS],
    /// Frames that were read, a lossy memory.
    pub ring: [AtomicU32; RING_ENTRIES],
    /// Large files that were opened and read: numbers of [`opening_of`]. A lossy memory.
    pub opened: [AtomicU64; OPENED_ENTRIES],
}

const _: () = assert!(size_of::<ViewerPage>() <= VIEWER_BYTES);
const _: () = assert!(page_offset(GROUP_VIEWERS - 1) + VIEWER_BYTES <= CONTROL_BYTES);
const _: () = assert!(page_offset(2 * GROUP_VIEWERS - 1) + VIEWER_BYTES <= CONTROL_BYTES);
const _: () = assert!(size_of::<Control>().is_multiple_of(align_of::<ViewerPage>()));
const _: () = assert!(VIEWER_BYTES.is_multiple_of(align_of::<ViewerPage>()));

/// One request and its answer.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Request {
    /// One of [`state`]; a viewer sleeps on it.
    pub state: AtomicU32,
    /// One of [`Operation`].
    pub operation: AtomicU32,
    /// The operation's arguments; see [`Operation`].
    pub arguments: [AtomicU64; 3],
    /// 0, or the error number.
    pub error: AtomicU32,
    /// 1 once the viewer sleeps on `state`, or is about to.
    pub sleeper: AtomicU32,
    /// The operation's answers; see [`Operation`].
    pub answers: [AtomicU64; 2],
}

/// The states of a [`Request`].
pub mod state {
    /// Unclaimed.
    pub const FREE: u32 = 0;
    /// A viewer's thread is writing its request.
    pub const CLAIMED: u32 = 1;
    /// The owner should look.
    pub const PENDING: u32 = 2;
    /// The owner is at work.
    pub const TAKEN: u32 = 3;
    /// The answer stands.
    pub const DONE: u32 = 4;
    /// As PENDING, but no thread waits for the answer: the owner frees the slot itself.
    pub const PENDING_UNATTENDED: u32 = 5;
    /// The owner is at work, and the thread that asked has stopped waiting: the owner undoes its answer and frees the
    /// slot itself.
    pub const GIVEN_UP: u32 = 6;
}

/// Added to the descriptor of an [`Operation::Attach`] by a viewer that has spent the owner's credit for it.
pub const CREDIT_SPENT: u64 = 1 << 32;
/// Added to the ticket that an [`Operation::Attach`] has in the place of a descriptor: it was sent, see
/// [`DescriptorOffer`](crate::viewer::handshake::DescriptorOffer).
pub const SENT: u64 = 1 << 33;
/// The error number (`ENOTCONN`) of an [`Operation::Attach`] whose descriptor the owner may not duplicate by itself:
/// it is to be sent.
pub const TO_BE_SENT: i32 = 107;
/// Added to the length of an [`Operation::Fill`] and the page of an [`Operation::Advance`] by a viewer that needs the
/// pages only until it has read them; it then says [`Advice::Passed`].
pub const UNCACHED: u64 = 1 << 63;

/// Advice of an [`Operation::Hint`] on a handle, or on a range of its file. The numbers are part of the layout; all
/// but the last are those of `posix_fadvise`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Advice {
    /// No more is known of how the file will be read.
    Normal = 0,
    /// The file will be read at scattered positions.
    Random = 1,
    /// The file will be read forward.
    Sequential = 2,
    /// The range will be read soon.
    WillNeed = 3,
    /// The range will not be read soon.
    DontNeed = 4,
    /// The file will be read once.
    NoReuse = 5,
    /// An uncached read of the range has ended.
    Passed = 6,
}

impl Advice {
    /// Where the advice stands in the third argument of an [`Operation::Hint`], above the length.
    const SHIFT: u32 = 56;

    /// The advice of this number.
    #[inline]
    pub fn of(number: u64) -> Option<Self> {
        use Advice::*;
        [Normal, Random, Sequential, WillNeed, DontNeed, NoReuse, Passed].into_iter().nth(number as usize)
    }
    /// Whether it speaks of all that the handle will read, and not of a range.
    #[inline]
    pub fn is_of_handle(self) -> bool {
        matches!(self, Advice::Normal | Advice::Random | Advice::Sequential | Advice::NoReuse)
    }
    /// With the length of the range in bytes, as one argument; a length that does not fit reaches to the end of any
    /// file.
    #[inline]
    pub fn with_length(self, bytes: u64) -> u64 {
        (self as u64) << Self::SHIFT | bytes.min((1 << Self::SHIFT) - 1)
    }
    /// Undoes [`Advice::with_length`]; `None` if it is no advice.
    #[inline]
    pub fn and_length(argument: u64) -> Option<(Self, u64)> {
        Some((Self::of(argument >> Self::SHIFT)?, argument & ((1 << Self::SHIFT) - 1)))
    }
}

/// A viewer's request. The numbers are part of the layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Operation {
    /// Attach the file behind a descriptor of the viewer's process. Arguments: the descriptor, or the ticket of a sent
    /// one plus [`SENT`], plus [`CREDIT_SPENT`] if a credit was spent; its device; its inode. `ETXTBSY`: it is open for
    /// writing. `EOPNOTSUPP`: nothing guarantees that it stays as it is. Answers: the handle's number; the record's
    /// cell number (low half) and mapping number (high half). Or 0, where the kernel serves it as well for now, and
    /// after how many bytes to ask again (see [`AttachPolicy::credit_of`]).
    Attach = 1,
    /// Make a range ready, or at least its first page. Arguments: the handle, the position and the length in bytes,
    /// with [`UNCACHED`] added or not.
    Fill = 2,
    /// A marker was met: start the next window. No thread waits for an answer. Arguments: the handle, the page index of
    /// the marked folio's first page, with [`UNCACHED`] added or not.
    Advance = 3,
    /// Look at the file's size and times again. Arguments: the handle. Answers: the size in bytes.
    Revalidate = 4,
    /// Give a handle back. No thread waits for an answer. Arguments: the handle.
    Detach = 5,
    /// The viewer is about to open a file for writing: the owner gives its lease up before the kernel asks for it. Or
    /// it is about to cut a file, or has cut it, by opening it to read only, which breaks no lease. After the answer no
    /// viewer is shown the old pages. Arguments: the device, the inode, 1 if it is a cut.
    WriterOpened = 6,
    /// The viewer wants a lease of its own, which the kernel gives only for a file that no other process has open: the
    /// owner closes the file. Or the viewer is about to watch it, and must hear of all reads: the owner never opens it
    /// again. Arguments: the device, the inode, 1 if it is to be watched; the first two are 0 then for all files.
    LetGo = 8,
    /// Close all files that no viewer has open, before something is unmounted.
    Release = 11,
    /// Close that file, unless a viewer has it open, before it is removed, so that its space is freed. Arguments: the
    /// device, the inode.
    Removes = 12,
    /// The program's advice on how it will read. Arguments: the handle, the position in bytes,
    /// [`Advice::with_length`].
    Hint = 9,
    /// Check whether code that the viewer's process has loaded enters the kernel by itself. Answers: a
    /// [`SyscallAudit`].
    Examine = 10,
    /// Open an object of a store by its name, sent before ([`NameOffer`](crate::viewer::handshake::NameOffer)).
    /// Arguments: the ticket of the name. The owner's description of the object, or its refusal, comes by the
    /// connection of the name. Answers: those of [`Operation::Attach`].
    OpenNamed = 13,
    /// Keep a range of a file where it is in memory. Arguments: the handle, the position in bytes, the length in bytes.
    /// Answers: the pin's number; how many bytes are pinned, fewer at the file's end.
    Pin = 14,
    /// Give a pin back; no thread waits for an answer. Arguments: the handle, the pin's number.
    Unpin = 15,
}

/// Whether objects in a process enter the kernel past the C library. The numbers are part of the layout.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u64)]
pub enum SyscallAudit {
    /// No object enters the kernel by itself.
    Clean = 0,
    /// Objects enter the kernel only for calls that leave descriptors and their offsets alone.
    Harmless = 1,
    /// A thread may do anything, or that is not known: only positional reads are served, each after a look at its
    /// descriptor.
    Restricted = 2,
}

/// Places in [`ViewerPage::counters`]. The numbers are part of the layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Counter {
    /// Read calls served from the cache, wholly or in part.
    Reads = 0,
    /// Bytes served from the cache.
    Bytes = 1,
    /// Read calls that had to ask the owner.
    Asked = 2,
    /// Requests to the owner for bytes.
    Misses = 3,
    /// Files attached.
    Files = 4,
    /// Read calls left to the kernel on descriptors that had been served or might have been.
    KernelReads = 5,
    /// Bytes of these.
    KernelBytes = 6,
    /// The first of the reasons why a file or descriptor was left to the kernel; see [`Reason`].
    FirstReason = 8,
    /// The first of the outcomes of patching the C library; see [`Patching`].
    FirstPatching = 32,
    /// Threads that are about to become another program, or have; see [`Viewer::begin_exec`].
    ///
    /// [`Viewer::begin_exec`]: crate::viewer::Viewer::begin_exec
    Execs = 40,
}

/// The outcome of patching the C library of a viewer's process; counted at [`Counter::FirstPatching`] plus this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Patching {
    /// The library's own calls are served too.
    Patched = 0,
    /// There was no plan, because none was wanted or because the library cannot be planned for.
    NoPlan = 1,
    /// The process has another C library than the plan is for.
    OtherLibrary = 2,
    /// Another object stands in front of a function that is essential, or wraps it.
    Interposed = 3,
    /// The process had threads before the library was loaded.
    Threads = 4,
    /// The object and the library lie too far apart.
    TooFar = 5,
    /// The kernel does not let code be changed.
    Denied = 6,
}

impl Patching {
    /// All outcomes, in the order of their numbers.
    pub const ALL: [Patching; 7] = [
        Patching::Patched,
        Patching::NoPlan,
        Patching::OtherLibrary,
        Patching::Interposed,
        Patching::Threads,
        Patching::TooFar,
        Patching::Denied,
    ];
}

/// Why a descriptor is left to the kernel; counted at [`Counter::FirstReason`] plus this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Reason {
    /// Not a regular file, or one of a file system whose files have no fixed content.
    NotRegular = 0,
    /// The file is open for writing somewhere in the process.
    Writable = 1,
    /// Opened with flags that ask for something else (O_DIRECT, O_PATH and so on).
    Flags = 2,
    /// The descriptor was duplicated.
    Duplicated = 3,
    /// The description is shared with a child.
    Forked = 4,
    /// The file is mapped.
    Mapped = 5,
    /// The descriptor was passed to another process or to a call that uses its offset in the kernel.
    Passed = 6,
    /// The descriptor's number is beyond the table.
    Number = 7,
    /// The owner refused the file, or answered with an error.
    Refused = 8,
    /// The owner is gone, or did not answer.
    NoOwner = 9,
    /// The file changed while it was open.
    Changed = 10,
    /// The descriptor was inherited or received, so its offset is not this process's alone.
    Foreign = 11,
    /// The file is not guaranteed to stay as it is: there is no lease on it, or none that means anything.
    Unguaranteed = 12,
    /// Left to the kernel for a while, which served it as well; it may be served since.
    Left = 13,
    /// An object in the process may use descriptors unseen.
    Restricted = 14,
    /// The process has changed its credentials or name spaces.
    Domain = 15,
    /// The process watches files, and must be notified of its own reads and of no others.
    Watched = 16,
    /// The process has limited its addresses, or locked all its memory.
    Limited = 17,
    /// Another object of the program replaces functions that are served: the whole process is left to the kernel.
    Wrapped = 18,
}

impl Reason {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Reason; 19] = [
        Reason::NotRegular,
        Reason::Writable,
        Reason::Flags,
        Reason::Duplicated,
        Reason::Forked,
        Reason::Mapped,
        Reason::Passed,
        Reason::Number,
        Reason::Refused,
        Reason::NoOwner,
        Reason::Changed,
        Reason::Foreign,
        Reason::Unguaranteed,
        Reason::Left,
        Reason::Restricted,
        Reason::Domain,
        Reason::Watched,
        Reason::Limited,
        Reason::Wrapped,
    ];
}

const _: () = assert!(Counter::FirstReason as usize + Reason::ALL.len() <= Counter::FirstPatching as usize);
const _: () = assert!(Counter::FirstPatching as usize + Patching::ALL.len() <= Counter::Execs as usize);

#[cfg(all(test, not(quinion_model)))]
mod tests {
    use super::*;

    fn file() -> NonNull<u8> {
        let layout = std::alloc::Layout::from_size_align(CONTROL_BYTES, 4096).unwrap();
        // SAFETY: the size is not 0.
        NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap()
    }

    #[test]
    fn a_control_file_is_believed_only_when_its_first_page_says_so() {
        let (base, page) = (file(), file());
        let (all, a_page) = (COMMON_BYTES as u64, VIEWER_BYTES as u64);
        // SAFETY: the memory is leaked, larger than both and aligned to a page.
        let attach = |common, own| unsafe { ViewerControl::attach((base, common), (page, own)) }.map(drop);
        // SAFETY: as above.
        let owner = unsafe { ControlView::new(base) };
        assert_eq!(attach(all, a_page), Err(LayoutError::NotAnArena));
        owner.control().publish(5, 6);
        assert_eq!(attach(all, a_page), Ok(()));
        assert_eq!(attach(all - 1, a_page), Err(LayoutError::Inconsistent));
        assert_eq!(attach(all, a_page - 1), Err(LayoutError::Inconsistent));
        owner.control().version.store(99, Ordering::Relaxed);
        assert_eq!(attach(all, a_page), Err(LayoutError::Version(99)));
    }

    #[test]
    fn openings_of_a_file_are_added_up_and_a_file_in_its_place_begins_anew() {
        // SAFETY: the memory is leaked, of the size of a control file and aligned to a page.
        let view = unsafe { ControlView::new(file()) };
        let control = view.control();
        let file = |inode| FileId { device: 1, inode };
        let (one, alike) = (file(7), |&id: &FileId| opening_of(id) >> 56 == opening_of(file(7)) >> 56);
        let other = (8..).map(file).find(alike).unwrap();
        for before in 0..300 {
            assert_eq!(control.openings(one), u64::min(before, 255));
            control.count_opening(opening_of(one));
        }
        assert_eq!(control.openings(other), 0);
        control.count_opening(opening_of(other));
        assert_eq!((control.openings(one), control.openings(other)), (0, 1));
    }

    #[test]
    fn an_advice_comes_back_with_its_length() {
        for number in 0..7 {
            let advice = Advice::of(number).unwrap();
            assert_eq!(advice as u64, number);
            for bytes in [0, 1, 4096, (1 << 56) - 1] {
                assert_eq!(Advice::and_length(advice.with_length(bytes)), Some((advice, bytes)));
            }
            assert_eq!(Advice::and_length(advice.with_length(u64::MAX)), Some((advice, (1 << 56) - 1)));
        }
        assert_eq!(Advice::of(7), None);
        assert_eq!(Advice::and_length(u64::MAX), None);
    }

    #[test]
    fn pages_do_not_overlap() {
        // SAFETY: the memory is leaked, of the size of a control file and aligned to a page.
        let view = unsafe { ControlView::new(file()) };
        let mut end = core::ptr::from_ref(view.control()).addr() + size_of::<Control>();
        let more = file();
        for number in 0..2 * GROUP_VIEWERS {
            if number == GROUP_VIEWERS {
                assert!(view.viewer_page(number).is_none(), "nothing was said of the group");
                // SAFETY: as above.
                unsafe { view.add_group(1, more) };
                end = more.addr().get();
            }
            let page = core::ptr::from_ref(view.viewer_page(number).unwrap()).addr();
            assert!(page >= end, "page {number}");
            end = page + size_of::<ViewerPage>();
        }
        for number in [2 * GROUP_VIEWERS, VIEWERS_MAX - 1, GROUPS_MAX * GROUP_VIEWERS, usize::MAX] {
            assert!(view.viewer_page(number).is_none(), "{number}");
        }
    }
}
