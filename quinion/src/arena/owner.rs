//! Owner: the arena as the process that owns it sees it.
//!
//! ```text
//!   extents   0         1      2       3         4      5              max
//!           | meta    | data | cells | punched | data |  not yet | guest |
//!                       |       |                 |                       bound >= grown extents + control file
//!                     buddy   cells             growth: populate, then publish, then hand out
//!                       `---stock---'
//! ```
//!
//! The first extents hold the header and the tables (`tables.rs`). All others come one after
//! the other, when somebody asks and nothing is free, and go to the buddy as
//! data or are cut into cells. Cells and data trade whole extents afterwards.
//! An extent of data can be emptied and given back to the machine (`shrink.rs`);
//! such a punched one is the first to be grown again.
//!
//! Tables and address space are made for `memory_max`; what may be grown is the
//! bound, which can be changed between them.
//!
//! A **reserve** of extents is kept for cells, so that a cache full of data can
//! still index it: one in 64, and at least one. Cells may take more, like data,
//! where there is more. `None` is the whole answer to a shortage: the path that
//! asked calls reclaim and asks again. Nothing here calls up.
//!
//! Invariants (the first five asserted by [`Arena::check`]):
//!  1. The two files together are never larger than `memory_max`; they are sealed to that. Extents are grown while
//!     they and the control file are within the bound, and none while a lowered bound has not been reached.
//!  2. Every extent that is grown is exactly one of: meta, data, cells, a guest's (`guest.rs`). Some of data are being
//!     emptied.
//!  3. A frame that no folio heads has an odd descriptor, from before it was published.
//!  4. Extents that may be grown, and those of cells, are together at least the reserve, but for extents that a lowered
//!     bound wants emptied.
//!  5. Frames below `frames_grown` have memory, or had it and are punched; nobody touches one at or above it.
//!  6. A cell is all zeros when it is handed out.
//!
//! Not an invariant: that an allocation succeeds while there is memory below
//! the bound. The machine may have none; that is counted and answered `None`.
//!
//! Locks: `Rank::Growth` around growing, which may take milliseconds, and
//! `Rank::Arena` around the lists, for a few steps. Populating happens under
//! the first only, so a thread that finds something free never waits for the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::buddy::{Buddy, FrameRun, FreeLinks};
use super::cells::{CELL_EXTENTS_MAX, CellFreed, CellLinks, Cells};
use super::control::{COMMON_BYTES, CONTROL_BYTES, ControlView, VIEWER_BYTES, page_offset};
use super::dirty::BitTable;
use super::guests::Guests;
use super::limits::process_limit;
use super::page_locks::PageLocks;
use super::returned_frames::ReturnedFrames;
use super::segment::{PageSize, Segment, Sharing, create_sized, seal};
use super::tables::Tables;
use super::view::{CellNumber, View};
use super::{Flags, Layout, NodeHead};
use crate::sync::{LockWait, Rank, RankedMutex};
use crate::units::{EXTENT_PAGES, EXTENT_SIZE, Frame, Order, Orders, PAGE_SIZE, PageIndex};

/// The most memory an arena can be built with, in bytes: 256 GiB, as far as cells can be numbered, and
/// the control file.
pub(super) const MEMORY_MAX: u64 = CELL_EXTENTS_MAX as u64 * EXTENT_SIZE as u64 + CONTROL_BYTES as u64;
/// Extents that an arena has at least beside its tables.
const EXTENTS_MIN: u64 = 6;
/// After the machine refused memory, as many further wishes to grow are refused without asking it.
const WISHES_REFUSED: u32 = 64;

/// What an arena is built with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaOptions {
    /// The bound, in bytes: the arena and the control file together never take more. At least
    /// [`Arena::MEMORY_MIN`]; what is not a whole number of extents (2 MiB) is not used.
    pub memory: u64,
}

/// How far an arena can be resized, and whether the system may swap it out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reservation {
    /// The largest bound it can be given, in bytes: what its address space and tables are made for. At least the
    /// bound it is built with.
    pub memory_max: u64,
    /// Whether its memory is locked.
    pub swap: Swap,
}

/// Whether the system may write an arena's memory to its swap space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Swap {
    /// It may, if it has any.
    #[default]
    Allowed,
    /// It may not: each page is locked from the moment it is there.
    Locked,
}

/// Why an arena could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The bound is below the least with which a cache works.
    #[error("{asked} bytes of memory are too few for a cache: give it at least {min}")]
    TooSmall {
        /// The bound asked for, in bytes.
        asked: u64,
        /// The least, in bytes.
        min: u64,
    },
    /// The bound is above what this machine, container or version allows.
    #[error("{asked} bytes of memory are more than this process may use: give the cache at most {max}")]
    TooLarge {
        /// The bound asked for, in bytes.
        asked: u64,
        /// The most, in bytes.
        max: u64,
    },
    /// The most to which it could grow is less than the bound.
    #[error("memory_max is {max} bytes and memory is {asked}: give memory_max at least as much")]
    MaxBelowMemory {
        /// The bound asked for, in bytes.
        asked: u64,
        /// The most, in bytes.
        max: u64,
    },
    /// The bound is above what the arena was built for.
    #[error(
        "{asked} bytes are more than the {max} this cache was built for: build it with a larger memory_max"
    )]
    AboveMax {
        /// The bound asked for, in bytes.
        asked: u64,
        /// The most, in bytes.
        max: u64,
    },
    /// The system does not let this process lock so much memory.
    #[error(
        "cannot lock {bytes} bytes of memory ({source}): this process may lock {}; raise RLIMIT_MEMLOCK \
         (ulimit -l, LimitMEMLOCK= of systemd) above that and what else it locks, give it CAP_IPC_LOCK, lower \
         memory_max, or build the cache without lock_memory",
        limit.map_or("any amount".into(), |limit| format!("{limit} bytes"))
    )]
    Locked {
        /// What was to be locked, in bytes.
        bytes: u64,
        /// `RLIMIT_MEMLOCK` in bytes; `None` for no limit.
        limit: Option<u64>,
        /// What the system answered.
        source: std::io::Error,
    },
    /// The system refused something an arena needs.
    #[error(
        "no memory for a cache: {call} failed ({source}); ask for less memory, or raise the limit it met"
    )]
    System {
        /// The call that failed.
        call: &'static str,
        /// What it answered.
        source: std::io::Error,
    },
}

/// Numbers of an arena at one moment. Bytes and pages are of the machine's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArenaStats {
    /// The bound in force.
    pub bound_bytes: u64,
    /// The largest bound it can be given.
    pub max_bytes: u64,
    /// Memory taken so far, the control file not included: `meta_bytes + cell_bytes + data_bytes + guest_bytes`.
    pub grown_bytes: u64,
    /// The header's and the tables' part of it. All of it counts from the start, though some has no memory until the
    /// frames come that need it.
    pub meta_bytes: u64,
    /// The part that is cut into cells, for index nodes and mapping records.
    pub cell_bytes: u64,
    /// Cells handed out.
    pub cells_used: u64,
    /// The part that is for data, free or not.
    pub data_bytes: u64,
    /// The part that is guests', all of it, whether their pages have memory yet or not.
    pub guest_bytes: u64,
    /// Pages of `data_bytes` that nobody has.
    pub free_pages: u64,
    /// The same, of extents that are being emptied: nobody gets them.
    pub leaving_pages: u64,
    /// Extents that are one page of 2 MiB.
    pub extents_huge: u64,
    /// Extents that are pages of 4 KiB, because the kernel had no larger one.
    pub extents_small: u64,
    /// The control file's size, all of which counts against the bound.
    pub control_bytes: u64,
    /// How often the machine had no memory for an extent that the bound would have allowed.
    pub growth_failures: u64,
    /// What is still to be given back so that the arena is within its bound.
    pub slack_bytes: u64,
    /// What has been given back to the machine so far.
    pub returned_bytes: u64,
    /// What users' pins keep: their folios, each counted once.
    pub pinned_bytes: u64,
}

/// The memory of one cache: frames, cells and what viewers share. Built once, used by all threads.
///
/// A forked child has no arena: its mappings are not inherited, and touching one is a fault.
#[derive(Debug)]
pub struct Arena {
    pub(super) view: View,
    control: ControlView,
    /// The bound in force, in bytes. Changed under the growth lock and the stock's.
    pub(super) bound: AtomicU64,
    memory_max: u64,
    token: u64,
    /// Pages of the folios that have users' pins.
    pinned_pages: AtomicU64,
    /// Pages of guests, claimed or not. Changed under the growth lock.
    pub(super) guest_pages: AtomicU64,
    pub(super) growth: RankedMutex<GrowthParams>,
    pub(super) stock: RankedMutex<FrameStock>,
    page_locks: PageLocks,
    // The views above are used by nobody once these are dropped.
    pub(super) arena_segment: Segment,
    control_segment: Segment,
}

/// What of an arena is shared with viewers: its files, its control file's parts and its numbers, and nothing
/// by which a frame could be freed or a folio changed.
#[derive(Clone, Copy, Debug)]
pub struct ArenaShare<'a>(&'a Arena);

impl<'a> ArenaShare<'a> {
    /// See [`Arena::arena_fd`].
    pub fn arena_fd(self) -> BorrowedFd<'a> {
        self.0.arena_fd()
    }
    /// See [`Arena::control_fd`].
    pub fn control_fd(self) -> BorrowedFd<'a> {
        self.0.control_fd()
    }
    /// See [`Arena::control`].
    pub fn control(self) -> &'a ControlView {
        self.0.control()
    }
    /// See [`Arena::populate_control`].
    pub fn populate_control(self) -> Result<(), ArenaError> {
        self.0.populate_control()
    }
    /// See [`Arena::make_viewer_page`].
    pub fn make_viewer_page(self, number: usize) -> Result<OwnedFd, ArenaError> {
        self.0.make_viewer_page(number)
    }
    /// See [`Arena::token`].
    pub fn token(self) -> u64 {
        self.0.token()
    }
    /// See [`Arena::stats`].
    pub fn stats(self) -> ArenaStats {
        self.0.stats()
    }
    /// See [`Arena::check`].
    pub fn check(self) -> Result<(), String> {
        self.0.check()
    }
    /// See [`Header::owner_lives`](super::Header::owner_lives).
    pub fn owner_lives(self) -> &'a std::sync::atomic::AtomicU32 {
        &self.0.view().header().owner_lives
    }
    /// Whether `frame` exists and is no part of the tables.
    pub fn has_data(self, frame: Frame) -> bool {
        let view = self.0.view();
        (view.layout().frames_meta..view.frames_grown()).contains(&frame.0)
    }
}

/// A [`View`] together with a share of its arena.
#[derive(Debug)]
pub struct OwnedView {
    view: View,
    arena: Arc<Arena>,
}

impl OwnedView {
    /// The arena it keeps.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

impl std::ops::Deref for OwnedView {
    type Target = View;
    #[inline]
    fn deref(&self) -> &View {
        &self.view
    }
}

/// What growing needs to know.
#[derive(Debug)]
pub(super) struct GrowthParams {
    pub(super) tables: Tables,
    failures: u64,
    /// Wishes to refuse before the machine is asked again.
    refuse: u32,
    /// Bytes given back to the machine.
    pub(super) returned: u64,
}

/// All that is grown, and which of it is free.
#[derive(Debug)]
pub(super) struct FrameStock {
    /// Extents that may be grown: the bound without the control file.
    pub(super) extents_max: u32,
    /// Extents that have memory, and those of guests, which count as if all of them had.
    pub(super) extents_grown: u32,
    /// The first extent above all that ever had memory or were a guest's.
    pub(super) extents_reached: u32,
    /// Extents of the header and the tables, the lowest.
    extents_meta: u32,
    /// Extents that have a number.
    pub(super) extents_all: u32,
    /// How often an extent was grown.
    growths: u64,
    pub(super) buddy: Buddy<{ Order::MAX.0 }>,
    pub(super) cells: Cells,
    /// Extents that are one page of 2 MiB.
    pub(super) huge: BTreeSet<u32>,
    /// Extents below `extents_reached` that have no memory.
    pub(super) punched: BTreeSet<u32>,
    /// Extents with files of their own.
    pub(super) guests: Guests,
    /// Extents of data that are to be given back, and which of their frames have come back so far.
    pub(super) emptying: BTreeMap<u32, ReturnedFrames>,
    /// Whether the bound was lowered below what is grown, and has not been reached since.
    pub(super) is_lowered: bool,
}

/// What an extent is wanted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ExtentPurpose {
    Data,
    Cells,
}

/// How much of what was asked for is worth having.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AllocAmount {
    /// All of it, or nothing is taken.
    All,
    /// Less, if there is no more.
    Less,
}

/// How frames are to lie for the pages of a file.
///
/// ```text
///   pages    5 6 7 | 8 ............ 15 | 16 ...          align: order 3
///   block    x x x x x 5 6 7 | 8 ............ 15 |        a block holds the pages at their places in it,
///            `-- back ---'                                and what it has besides goes back at once
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameAlignment {
    /// No run is longer than the larger of these; every run begins at a multiple of the smaller one, in pages
    /// and in frames, and is one long.
    pub runs: Orders,
    /// A page and its frame agree modulo so many pages, so that folios up to this order can be made of a run.
    /// At most the larger of `runs`.
    pub align: Order,
}

impl FrameAlignment {
    /// Runs of these sizes, wherever their frames lie.
    pub const fn anywhere(runs: Orders) -> Self {
        Self { runs, align: runs.min }
    }

    /// What of `pages` pages from `at` on a block of `order` takes: how many of its frames come before them, and
    /// how many they are.
    fn place(self, (at, pages): (PageIndex, u32), order: Order) -> (u32, u32) {
        let before = (at.0 & u64::from(order.min(self.align).pages() - 1)) as u32;
        (before, pages.min(order.pages() - before))
    }

    /// The smallest block that takes as many of `pages` pages from `at` on as the largest would.
    fn block(self, wanted: (PageIndex, u32)) -> Order {
        let (_, most) = self.place(wanted, self.runs.max);
        let mut orders = (self.runs.min.0..self.runs.max.0).map(Order);
        orders.find(|&order| self.place(wanted, order).1 == most).unwrap_or(self.runs.max)
    }
}

/// The first page of `gaps`, as (first page, pages), that has no frame if `got` pages have one; and how many
/// follow it in its gap, itself included.
fn next_wanted(gaps: &[(PageIndex, u32)], mut got: u32) -> Option<(PageIndex, u32)> {
    gaps.iter().find_map(|&(first, pages)| {
        let wanted = (got < pages).then(|| (first.plus(u64::from(got)), pages - got));
        got = got.saturating_sub(pages);
        wanted
    })
}

/// With what somebody who wants frames is content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AllocPolicy {
    /// What was asked for.
    Whole,
    /// Less, if there is no more.
    Pieces,
}

fn wanted_pages(gaps: &[(PageIndex, u32)]) -> u32 {
    gaps.iter().map(|(_, pages)| pages).sum()
}

fn pages_of(runs: &[FrameRun]) -> u32 {
    runs.iter().map(|run| run.pages).sum()
}

/// Whether it is worth looking again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum GrowOutcome {
    /// There is an extent more than there was.
    Yes,
    /// The bound, the reserve or the machine forbids it.
    No,
}

impl Arena {
    /// The least bound, in bytes.
    pub const MEMORY_MIN: u64 = 16 << 20;

    /// Builds an arena. Sets aside for its tables 0.9 % of the bound, in whole extents, and takes memory
    /// when it is needed: at first some extents of the tables. May wait for the machine to find it.
    pub fn build(options: ArenaOptions) -> Result<Self, ArenaError> {
        Self::build_within(options, Reservation { memory_max: options.memory, swap: Swap::Allowed })
    }

    /// As [`Arena::build`], for bounds up to `reservation.memory_max`, of which the tables take their 0.9 %.
    pub fn build_within(options: ArenaOptions, reservation: Reservation) -> Result<Self, ArenaError> {
        let layout = layout_for(options.memory, reservation.memory_max)?;
        let arena_segment =
            Segment::create(c"quinion-arena", layout.bytes_max() as usize, Sharing::ReadOnly)?;
        let control_segment = Segment::create(c"quinion-control", CONTROL_BYTES, Sharing::Common)?;
        if reservation.swap == Swap::Locked {
            arena_segment.lock()?;
            control_segment.lock()?;
        }
        let extents_grown = layout.frames_meta / EXTENT_PAGES;
        control_segment.populate_bytes(0, PAGE_SIZE).map_err(no_memory)?;
        // SAFETY: the segment maps `bytes_max` bytes and is dropped with the view, in `Arena`.
        let view = unsafe { View::new(arena_segment.base(), layout) };
        // SAFETY: the segment maps CONTROL_BYTES bytes and is dropped with the view, in `Arena`.
        let control = unsafe { ControlView::new(control_segment.base()) };
        let (token, owner) = (random(), std::process::id());
        let stock = FrameStock {
            extents_max: extents_within(options.memory),
            extents_grown,
            extents_reached: extents_grown,
            extents_meta: extents_grown,
            extents_all: layout.frames_max / EXTENT_PAGES,
            growths: 0,
            buddy: Buddy::new(),
            cells: Cells::new(),
            huge: BTreeSet::new(),
            punched: BTreeSet::new(),
            guests: Guests::default(),
            emptying: BTreeMap::new(),
            is_lowered: false,
        };
        let growth = GrowthParams { tables: Tables::new(extents_grown), failures: 0, refuse: 0, returned: 0 };
        let arena = Self {
            view,
            control,
            bound: AtomicU64::new(options.memory),
            memory_max: reservation.memory_max,
            token,
            pinned_pages: AtomicU64::new(0),
            guest_pages: AtomicU64::new(0),
            growth: RankedMutex::new(Rank::Growth, growth),
            stock: RankedMutex::new(Rank::Arena, stock),
            page_locks: PageLocks::new(),
            arena_segment,
            control_segment,
        };
        arena.make_first_entries().map_err(no_memory)?;
        arena.view.header().publish(&layout, token, owner);
        arena.control.control().publish(token, owner);
        Ok(arena)
    }

    /// As [`Arena::make_entries`], for the frames of the header and the tables, which will be no folio's: pages will
    /// do for them, and extents come when the first frame is grown.
    fn make_first_entries(&self) -> std::io::Result<()> {
        let (layout, page) = (self.view.layout(), PAGE_SIZE as u64);
        let frames = 0..layout.frames_meta;
        let header = 0..page;
        for bytes in layout.entries(&frames).into_iter().chain([header]) {
            let from = bytes.start / page * page;
            let len = (bytes.end - from).next_multiple_of(page);
            self.arena_segment.populate_bytes(from as usize, len as usize)?;
        }
        self.make_odd(frames);
        Ok(())
    }

    /// Gives the tables' entries of `frames`, which nobody knows of yet, their memory, and every frame of them a
    /// descriptor that names nothing: a zero is an even sequence.
    /// Locks: Arena.
    pub(super) fn make_entries(&self, tables: &mut Tables, frames: Range<u32>) -> std::io::Result<()> {
        while let Some(extent) = tables.next_wanted(self.view.layout(), &frames) {
            if self.arena_segment.populate(extent)? == PageSize::Huge {
                self.stock.lock().huge.insert(extent);
            }
            tables.add(extent);
        }
        self.make_odd(frames);
        Ok(())
    }

    fn make_odd(&self, frames: Range<u32>) {
        let grown = self.view.grown_to(frames.end);
        for frame in frames.map(Frame) {
            grown.descriptor(frame).expect("it is below `frames_max`").set_free(None);
        }
    }

    /// The arena by numbers, as viewers have it too.
    #[inline]
    pub fn view(&self) -> &View {
        &self.view
    }
    /// A view that keeps the arena: what a handle looks through, so that a hit makes no detour.
    pub fn owned_view(self: &Arc<Self>) -> OwnedView {
        // SAFETY: the arena, and with it its mapping, lives as long as the value that has both.
        OwnedView { view: unsafe { self.view.duplicate() }, arena: Arc::clone(self) }
    }
    /// The locks of those who change pages in place.
    pub fn page_locks(&self) -> &PageLocks {
        &self.page_locks
    }
    /// The control file by its parts.
    #[inline]
    pub fn control(&self) -> &ControlView {
        &self.control
    }
    /// The arena's file, for viewers to map read-only. Its mode is 0400: a viewer opens it anew for
    /// reading (`/proc/self/fd`) and passes that on; this descriptor itself can write.
    pub fn arena_fd(&self) -> BorrowedFd<'_> {
        self.arena_segment.file()
    }
    /// The control file, of which viewers map the first [`COMMON_BYTES`] bytes read-only. Its mode is 0400, as the
    /// arena's.
    pub fn control_fd(&self) -> BorrowedFd<'_> {
        self.control_segment.file()
    }
    /// What of it is shared with viewers.
    pub fn share(&self) -> ArenaShare<'_> {
        ArenaShare(self)
    }
    /// The random number that stands in both files; never 0.
    pub fn token(&self) -> u64 {
        self.token
    }
    /// The bound in force, in bytes.
    pub fn bound(&self) -> u64 {
        self.bound.load(Ordering::Relaxed)
    }
    /// The largest bound it can be given, in bytes.
    pub fn memory_max(&self) -> u64 {
        self.memory_max
    }
    /// The least bound it can be given now, in bytes: with it there are still some extents of data beside its guests.
    pub fn memory_min(&self) -> u64 {
        memory_min(self.view.layout()) + self.guest_pages() * PAGE_SIZE as u64
    }
    /// Pages that folios and cells can have within the bound, but for those of guests.
    pub fn pages_max(&self) -> u64 {
        let extents = u64::from(extents_within(self.bound())) * u64::from(EXTENT_PAGES);
        extents.saturating_sub(u64::from(self.view.layout().frames_meta) + self.guest_pages())
    }
    /// Pages of guests, claimed or not.
    pub fn guest_pages(&self) -> u64 {
        self.guest_pages.load(Ordering::Relaxed)
    }

    /// The least bound, in bytes, with which the arena can hold so many pages of data.
    pub fn bound_for(&self, pages: u64) -> u64 {
        let pages = pages + u64::from(self.view.layout().frames_meta) + self.guest_pages();
        let extents = pages.div_ceil(u64::from(EXTENT_PAGES));
        CONTROL_BYTES as u64 + extents * EXTENT_SIZE as u64
    }

    /// Counts `pages` pages more as kept by users' pins, and says how many there are now.
    pub fn add_pinned(&self, pages: u64) -> u64 {
        self.pinned_pages.fetch_add(pages, Ordering::Relaxed) + pages
    }
    /// Counts `pages` pages less.
    pub fn sub_pinned(&self, pages: u64) {
        self.pinned_pages.fetch_sub(pages, Ordering::Relaxed);
    }
    /// Pages that users' pins keep.
    pub fn pinned_pages(&self) -> u64 {
        self.pinned_pages.load(Ordering::Relaxed)
    }

    /// Takes the memory of what all viewers see, of which [`Arena::build`] takes the first page only. To be
    /// called before a viewer is given the file.
    pub fn populate_control(&self) -> Result<(), ArenaError> {
        self.control_segment.populate_bytes(0, COMMON_BYTES).map_err(no_memory)
    }

    /// Makes a fresh page for viewer `number`, all zeros, and puts it into the control mapping in place of the one that
    /// was there: its file, for that viewer alone. Nobody is at work there.
    pub fn make_viewer_page(&self, number: usize) -> Result<OwnedFd, ArenaError> {
        let file = create_sized(c"quinion-viewer", VIEWER_BYTES, Sharing::ReadWrite)?;
        seal(&file, rustix::fs::SealFlags::SEAL)?;
        let offset = page_offset(number);
        self.control_segment.lay_over(offset, VIEWER_BYTES, file.as_fd()).map_err(no_memory)?;
        // Memory that is there is not missing when somebody touches it.
        self.control_segment.populate_pages(offset, VIEWER_BYTES, (file.as_fd(), 0)).map_err(no_memory)?;
        Ok(file)
    }

    // ---- frames ---------------------------------------------------------------------------------

    /// Takes a naturally aligned run of `order` (at most 9). Its bytes are arbitrary, its descriptors odd.
    /// `None`: nothing is free and the arena may not grow; reclaim and ask again.
    /// Locks: Growth, Arena. May wait while an extent is grown: half a millisecond, or some where a
    /// virtual machine has to fetch the memory first.
    pub fn alloc(&self, order: Order) -> Option<Frame> {
        assert!(order <= Order::MAX, "{order:?} is larger than an extent");
        self.alloc_growing(LockWait::Wait, |stock, _| stock.buddy.alloc(&self.view, order))
    }

    /// Takes the largest naturally aligned run of at most `pages` pages (1 to 512) that can be had: the
    /// power of two that fits if there is one or the arena may grow, else less. Use it as one folio or as
    /// many. Otherwise as [`Arena::alloc`].
    ///
    /// With [`LockWait::Try`] it does not wait for a lock, and answers `None` also when somebody has one. It grows the
    /// arena by an extent where nobody else is doing so, which is half a millisecond of computing (or some,
    /// where a virtual machine has to fetch the memory first); otherwise whoever must not wait could never
    /// begin. While it publishes what is grown it takes the lock of the lists, which others hold for a few steps.
    pub fn alloc_run(&self, pages: u32, locks: LockWait) -> Option<FrameRun> {
        debug_assert!((1..=EXTENT_PAGES).contains(&pages), "a run has 1 to 512 pages");
        let (fit, wanted) =
            (FrameAlignment::anywhere(FrameStock::ANY), (PageIndex(0), Order::fitting(pages).pages()));
        self.alloc_growing(locks, |stock, wish| stock.take_run(&self.view, wanted, fit, wish))
    }

    /// Takes a frame for every page of `gaps`, as (first page, pages), in as few runs as can be had that `fit`.
    /// Appends the runs to `runs`, which begins with those for the first of the pages, if some have frames
    /// already. Says how many pages more have one now: all, or with [`AllocAmount::Less`] fewer where there are no
    /// more. No run reaches over the end of a gap.
    /// One hold of the arena's lock, and one more for each extent that is grown. Otherwise as [`Arena::alloc`], or with
    /// [`LockWait::Try`] as [`Arena::alloc_run`]; to give back what was not enough it takes the lock of the lists.
    pub fn alloc_runs(
        &self,
        gaps: &[(PageIndex, u32)],
        fit: FrameAlignment,
        amount: AllocAmount,
        locks: LockWait,
        runs: &mut Vec<FrameRun>,
    ) -> u32 {
        let (before, had) = (runs.len(), pages_of(runs));
        let (wanted, mut got) = (wanted_pages(gaps) - had, had);
        self.alloc_growing(locks, |stock, wish| {
            if wish == AllocPolicy::Pieces && !stock.has_for(had + wanted - got, amount) {
                return None;
            }
            while let Some(next) = next_wanted(gaps, got) {
                let run = stock.take_run(&self.view, next, fit, wish)?;
                got += run.pages;
                runs.push(run);
            }
            Some(())
        });
        self.all_or(amount, got - had, wanted, before, runs)
    }

    /// Gives `got` of `pages` pages back if that is not enough; how many there are then.
    fn all_or(
        &self,
        amount: AllocAmount,
        got: u32,
        pages: u32,
        before: usize,
        runs: &mut Vec<FrameRun>,
    ) -> u32 {
        if got == pages || amount == AllocAmount::Less {
            return got;
        }
        runs.drain(before..).for_each(|run| self.free_run(run.frame, run.pages));
        0
    }

    /// Pages that can be had without evicting anything: free ones, and those by which the arena may still grow.
    /// `None` if the lock of the lists is busy and `locks` does not wait. A hint, as others take and give back.
    pub fn room_pages(&self, locks: LockWait) -> Option<u64> {
        let stock = self.stock.lock_as(locks)?;
        let growable = u64::from(stock.growable(ExtentPurpose::Data)) * u64::from(EXTENT_PAGES);
        Some(stock.buddy.free_pages() + growable)
    }

    /// The first extent of data at or after `from`, or else the first of all; `None` if there is none.
    pub fn next_data_extent(&self, from: u32) -> Option<u32> {
        let stock = self.stock.lock();
        let meta = self.view.layout().frames_meta / EXTENT_PAGES;
        let from = from.clamp(meta, stock.extents_reached);
        (from..stock.extents_reached).chain(meta..from).find(|extent| stock.is_data(*extent))
    }

    /// Gives a run back, as [`Arena::alloc`] gave it or as a naturally aligned part of it. The caller owns
    /// all its frames alone: their folios are retired and not held.
    /// Locks: Arena. Panics if the frames are no data frames of this arena, or free already.
    pub fn free(&self, frame: Frame, order: Order) {
        self.free_all(&[(frame, order)]);
    }

    /// Gives `pages` frames from `frame` on back, whatever their alignment; as [`Arena::free`].
    pub fn free_run(&self, frame: Frame, pages: u32) {
        let mut stock = self.stock.lock();
        self.assert_ours(&stock, frame, pages);
        let ended = stock.give_back(&self.view, frame, pages);
        drop(stock);
        if ended {
            self.end_guests();
        }
    }

    /// Gives many runs back under one lock; as [`Arena::free`].
    pub fn free_all(&self, runs: &[(Frame, Order)]) {
        if runs.is_empty() {
            return;
        }
        runs.iter().for_each(|&(frame, order)| self.forget_landed(frame, order));
        let mut stock = self.stock.lock();
        let mut ended = false;
        for &(frame, order) in runs {
            self.assert_ours(&stock, frame, order.pages());
            if stock.emptying.is_empty() && stock.guests.is_empty() {
                stock.buddy.free(&self.view, frame, order);
            } else {
                ended |= stock.give_back(&self.view, frame, order.pages());
            }
        }
        drop(stock);
        if ended {
            self.end_guests();
        }
    }

    /// What has arrived in the frames of a folio is forgotten with it; see `pages_read.rs`.
    fn forget_landed(&self, frame: Frame, order: Order) {
        if self.view.descriptor(frame).is_some_and(|folio| folio.word().has(Flags::LANDED)) {
            self.view.clear_pages_read(frame, order.pages());
        }
    }

    /// Asks `take` for the whole wish, again after each extent that could be grown, and for pieces in the end.
    /// Growing goes before pieces: frames that follow each other make large requests. `None` also where a lock
    /// is busy and `locks` does not wait.
    fn alloc_growing<T>(
        &self,
        locks: LockWait,
        mut take: impl FnMut(&mut FrameStock, AllocPolicy) -> Option<T>,
    ) -> Option<T> {
        loop {
            let seen = {
                let mut stock = self.stock.lock_as(locks)?;
                let taken = take(&mut stock, AllocPolicy::Whole);
                if taken.is_some() {
                    return taken;
                }
                if stock.growable(ExtentPurpose::Data) == 0 {
                    return take(&mut stock, AllocPolicy::Pieces); // the usual way of a full arena: one lock
                }
                stock.growths
            };
            if self.grow(ExtentPurpose::Data, seen, locks) == GrowOutcome::No {
                return take(&mut *self.stock.lock_as(locks)?, AllocPolicy::Pieces);
            }
        }
    }

    fn assert_ours(&self, stock: &FrameStock, frame: Frame, pages: u32) {
        let end = u64::from(frame.0) + u64::from(pages);
        let inside = frame.0 >= self.view.layout().frames_meta && end <= u64::from(stock.frames_reached());
        assert!(inside, "{frame:?} and {pages} pages are no data of this arena");
        debug_assert!(!stock.cells.has_extent(frame.extent()), "{frame:?} holds cells");
        debug_assert!(!stock.punched.contains(&frame.extent()), "{frame:?} has no memory");
        debug_assert!(
            (frame.0..frame.0 + pages).map(|f| self.view.own(Frame(f)).word()).all(is_nobodys),
            "a folio at {frame:?} is freed while it lives or is held"
        );
    }

    // ---- cells ----------------------------------------------------------------------------------

    /// Takes a cell: its slots and its node head are all zeros. `None` as for [`Arena::alloc`].
    /// Locks: Growth, Arena. May wait while an extent is grown: half a millisecond, or some where a
    /// virtual machine has to fetch the memory first.
    pub fn alloc_cell(&self) -> Option<CellNumber> {
        let mut one = Vec::with_capacity(1);
        self.alloc_cells(1, &mut one, LockWait::Wait);
        one.pop().inspect(|&cell| self.clear(cell))
    }

    /// Takes up to `wanted` cells, appends them to `cells` and says how many; as [`Arena::alloc_cell`], or with
    /// [`LockWait::Try`] as [`Arena::alloc_run`]. What is in them is arbitrary: nodes and chunks are made empty by who
    /// makes them.
    pub fn alloc_cells(&self, wanted: usize, cells: &mut Vec<CellNumber>, locks: LockWait) -> usize {
        let first = cells.len();
        let cut_free = || self.stock.lock_as(locks).is_some_and(|mut stock| stock.cut_free(&self.view));
        // 1 what is there, free data extents included once the reserve is used up
        while let Some(seen) = self.take_cells(first + wanted, cells, locks) {
            // 2 more, or else what is free of the data after all
            if cells.len() == first + wanted
                || (self.grow(ExtentPurpose::Cells, seen, locks) == GrowOutcome::No && !cut_free())
            {
                break;
            }
        }
        cells.len() - first
    }

    /// Gives a cell back that nobody can reach any more but readers who are late.
    /// Locks: Arena. Panics if it was not handed out, as far as that can be seen.
    pub fn free_cell(&self, cell: CellNumber) {
        self.free_cells([cell]);
    }

    /// Gives many cells back under one lock; as [`Arena::free_cell`].
    pub fn free_cells(&self, cells: impl IntoIterator<Item = CellNumber>) {
        let mut stock = self.stock.lock();
        for cell in cells {
            if let CellFreed::ExtentEmpty(extent) = stock.cells.free(&self.view, cell)
                && stock.cells.extents() > stock.reserve()
            {
                stock.cells.remove_extent(extent);
                stock.buddy.add_extent(&self.view, Frame(extent * EXTENT_PAGES));
            }
        }
    }

    /// Fills `cells` up to `len` as far as that needs no growing. Returns how often the arena had grown, or
    /// nothing if the lock is busy and `locks` does not wait.
    fn take_cells(&self, len: usize, cells: &mut Vec<CellNumber>, locks: LockWait) -> Option<u64> {
        let mut stock = self.stock.lock_as(locks)?;
        while cells.len() < len {
            match stock.cells.alloc(&self.view) {
                Some(cell) => cells.push(cell),
                None if stock.cells.extents() >= stock.reserve() && stock.cut_free(&self.view) => {}
                None => break,
            }
        }
        Some(stock.growths)
    }

    /// Makes a cell all zeros. Late readers may look on: zero is the empty entry, and no mapping's number.
    fn clear(&self, cell: CellNumber) {
        let slots = self.view.slots(cell).expect("a cell of our own arena exists");
        slots.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
        let head: &NodeHead = self.view.head(cell).expect("a cell of our own arena exists");
        head.clear();
    }

    // ---- growing --------------------------------------------------------------------------------

    /// Grows by an extent for `wanted`, unless it has grown since it had `seen` times. A thread that must not
    /// wait does not grow while another does.
    fn grow(&self, wanted: ExtentPurpose, seen: u64, locks: LockWait) -> GrowOutcome {
        // 1 one at a time; a thread that waited here may find it done
        let Some(mut growth) = self.growth.lock_as(locks) else { return GrowOutcome::No };
        let extent = {
            let Some(stock) = self.stock.lock_as(locks) else { return GrowOutcome::No };
            if stock.growths != seen {
                return GrowOutcome::Yes;
            }
            if stock.growable(wanted) == 0 {
                return GrowOutcome::No;
            }
            stock.next_extent(wanted).expect("it may grow")
        };
        // 2 memory, while others go on allocating
        let fresh = self.view.frames_grown()..(extent + 1) * EXTENT_PAGES;
        let size = growth.ask(|tables| {
            self.make_entries(tables, fresh)?;
            self.arena_segment.populate(extent)
        });
        let Some(size) = size else { return GrowOutcome::No };
        // 3 known to viewers, then handed out
        let mut stock = self.stock.lock();
        stock.add_grown(extent, size);
        // A reader that sees the new number finds memory there, which the kernel gave above, and
        // descriptors that have been odd since before. Where a punched extent is grown
        // again the number stays as it is, and a reader is led there by its descriptors alone.
        self.view.publish_frames(stock.frames_reached());
        match wanted {
            ExtentPurpose::Data => stock.buddy.add_extent(&self.view, Frame(extent * EXTENT_PAGES)),
            ExtentPurpose::Cells => stock.cells.add_extent(extent),
        }
        GrowOutcome::Yes
    }

    // ---- looking at it --------------------------------------------------------------------------

    /// The arena's numbers now. Locks: Growth, Arena.
    pub fn stats(&self) -> ArenaStats {
        let growth = self.growth.lock();
        let stock = self.stock.lock();
        let bytes = |extents: u32| u64::from(extents) * EXTENT_SIZE as u64;
        let meta = self.view.layout().frames_meta / EXTENT_PAGES;
        ArenaStats {
            bound_bytes: self.bound(),
            max_bytes: self.memory_max,
            grown_bytes: bytes(stock.extents_grown),
            meta_bytes: bytes(meta),
            cell_bytes: bytes(stock.cells.extents()),
            cells_used: stock.cells.used(),
            data_bytes: bytes(stock.extents_data(meta)),
            guest_bytes: bytes(stock.guests.extents()),
            free_pages: stock.buddy.free_pages(),
            leaving_pages: stock.returned_pages(),
            extents_huge: stock.huge.len() as u64,
            extents_small: u64::from(stock.extents_grown - stock.guests.extents() - growth.tables.missing())
                - stock.huge.len() as u64,
            control_bytes: CONTROL_BYTES as u64,
            growth_failures: growth.failures,
            slack_bytes: bytes(stock.excess()),
            returned_bytes: growth.returned,
            pinned_bytes: self.pinned_pages() * PAGE_SIZE as u64,
        }
    }

    /// What is wrong with the arena, if anything; for bug reports and tests. Looks at every frame.
    /// Locks: Arena, for as long as that takes.
    pub fn check(&self) -> Result<(), String> {
        let stock = self.stock.lock();
        let layout = self.view.layout();
        if layout.bytes_max() + CONTROL_BYTES as u64 > self.memory_max {
            return Err("the files are larger than the largest bound".into());
        }
        if self.view.frames_grown() != stock.frames_reached() {
            return Err("the header tells another size than the stock".into());
        }
        stock.check_extents(layout.frames_meta / EXTENT_PAGES)?;
        self.check_guests(&stock)?;
        stock.buddy.check(&self.view, layout.frames_meta..stock.frames_reached())?;
        stock.cells.check(&self.view)?;
        self.check_frames(&stock)
    }

    /// Every frame that must not be a folio's: the tables', the cells', and all of every free run.
    fn check_frames(&self, stock: &FrameStock) -> Result<(), String> {
        let meta = self.view.layout().frames_meta;
        let mut free_until = 0;
        for frame in (0..stock.frames_reached()).map(Frame) {
            let word = self.view.own(frame).word();
            let taken = frame.0 < meta
                || stock.cells.has_extent(frame.extent())
                || stock.is_going(frame)
                || stock.guests.is_unclaimed(frame);
            if let Some(order) = self.view.own(frame).free_order() {
                if taken || stock.emptying.contains_key(&frame.extent()) {
                    return Err(format!("{frame:?} is no data, or going, and yet free"));
                }
                free_until = frame.0 + order.pages();
            }
            if (taken || frame.0 < free_until) && !is_nobodys(word) {
                return Err(format!("{frame:?} is no folio's, and its descriptor says {word:?}"));
            }
            if (taken || frame.0 < free_until) && self.view.is_page_read(frame) {
                return Err(format!("{frame:?} is no folio's, and its page is said to have landed"));
            }
            let marked = |bits| self.view.count_bits(bits, frame, 1) > 0;
            if (taken || frame.0 < free_until) && (marked(BitTable::Dirty) || marked(BitTable::Writeback)) {
                return Err(format!("{frame:?} is no folio's, and its page is said to be dirty or written"));
            }
        }
        Ok(())
    }
}

impl FrameStock {
    /// Frames below the first that never had memory.
    pub(super) fn frames_reached(&self) -> u32 {
        self.extents_reached * EXTENT_PAGES
    }

    /// Extents kept for cells.
    pub(super) fn reserve(&self) -> u32 {
        u32::max(1, self.extents_max / 64)
    }

    /// Extents of the reserve that are none of cells yet.
    pub(super) fn reserve_left(&self) -> u32 {
        self.reserve().saturating_sub(self.cells.extents())
    }

    /// Extents by which the bound, and for data the reserve, allow to grow.
    fn growable(&self, wanted: ExtentPurpose) -> u32 {
        let kept = match wanted {
            ExtentPurpose::Cells => 0,
            ExtentPurpose::Data => self.reserve_left(),
        };
        let kept = kept + self.guests.demanded();
        let within = self.extents_max.saturating_sub(self.extents_grown).saturating_sub(kept);
        // What a guest is to have is not grown into, and there may be no number left.
        if within > 0 && self.next_extent(wanted).is_some() { within } else { 0 }
    }

    /// The extent to be grown next: a punched one, or else the first that never had memory; none that a guest is to
    /// have. As many as the reserve, the lowest, are left to cells as long as there are others: cells stay where they
    /// are, and above them a guest finds room side by side.
    fn next_extent(&self, wanted: ExtentPurpose) -> Option<u32> {
        let is_kept = |extent: &u32| self.guests.demand().is_some_and(|range| range.contains(extent));
        let (fresh, above) = (self.extents_reached..self.extents_all, self.extents_meta + self.reserve());
        let next = |from: u32| {
            let fresh = fresh.start.max(from)..fresh.end;
            self.punched.range(from..).copied().chain(fresh).find(|extent| !is_kept(extent))
        };
        match wanted {
            ExtentPurpose::Cells => next(0),
            ExtentPurpose::Data => next(above).or_else(|| next(0)),
        }
    }

    /// `extent` has memory now.
    fn add_grown(&mut self, extent: u32, size: PageSize) {
        self.growths += 1;
        self.extents_grown += 1;
        // What is stepped over, for the sake of cells or of a guest to come, never had memory.
        self.punched.extend(self.extents_reached..extent);
        self.extents_reached = self.extents_reached.max(extent + 1);
        self.punched.remove(&extent);
        if size == PageSize::Huge {
            self.huge.insert(extent);
        }
    }

    /// Runs of every size.
    const ANY: Orders = Orders { min: Order::ZERO, max: Order::MAX };

    /// Takes a run for the first of `wanted`, as (first page, pages): as many as a block can take, or with
    /// [`AllocPolicy::Pieces`] fewer.
    fn take_run(
        &mut self,
        view: &View,
        wanted: (PageIndex, u32),
        fit: FrameAlignment,
        wish: AllocPolicy,
    ) -> Option<FrameRun> {
        let largest = fit.block(wanted);
        let smallest = match wish {
            AllocPolicy::Whole => largest,
            AllocPolicy::Pieces => fit.runs.min,
        };
        (smallest.0..=largest.0).rev().map(Order).find_map(|order| {
            let block = self.buddy.alloc(view, order)?;
            let (before, pages) = fit.place(wanted, order);
            let end = before + pages;
            self.buddy.free_run(view, block, before);
            self.buddy.free_run(view, block.plus(end), order.pages() - end);
            Some(FrameRun { frame: block.plus(before), pages })
        })
    }

    /// Whether it is worth to begin taking `pages` frames.
    fn has_for(&self, pages: u32, amount: AllocAmount) -> bool {
        amount == AllocAmount::Less || self.buddy.free_pages() >= u64::from(pages)
    }

    /// Cuts a free extent of data into cells, and says whether there was one.
    fn cut_free(&mut self, view: &View) -> bool {
        let Some(frame) = self.buddy.alloc(view, Order::MAX) else { return false };
        self.cells.add_extent(frame.extent());
        true
    }
}

impl GrowthParams {
    /// Asks the machine for memory. After a refusal it is left alone for a number of wishes: asking is
    /// expensive where memory is short, and a thread that was told "none" is about to ask again.
    fn ask(&mut self, populate: impl FnOnce(&mut Tables) -> std::io::Result<PageSize>) -> Option<PageSize> {
        if self.refuse > 0 {
            self.refuse -= 1;
            return None;
        }
        match populate(&mut self.tables) {
            Ok(size) => Some(size),
            Err(_) => {
                self.failures += 1;
                self.refuse = WISHES_REFUSED;
                None
            }
        }
    }
}

impl FreeLinks for View {
    fn links(&self, frame: Frame) -> [u32; 2] {
        self.own(frame).links()
    }
    fn set_link(&self, frame: Frame, which: usize, to: u32) {
        self.own(frame).set_link(which, to);
    }
    fn free_order(&self, frame: Frame) -> Option<Order> {
        self.own(frame).free_order()
    }
    fn set_free(&self, frame: Frame, order: Option<Order>) {
        self.own(frame).set_free(order);
    }
}

impl CellLinks for View {
    fn link(&self, cell: CellNumber) -> u32 {
        self.slots(cell).map_or(0, |slots| slots[0].load(Ordering::Relaxed))
    }
    fn set_link(&self, cell: CellNumber, to: u32) {
        self.slots(cell).expect("a cell of our own arena exists")[0].store(to, Ordering::Relaxed);
    }
}

/// What a cache takes that was told nothing: a quarter of [`process_limit`] in bytes, in whole extents,
/// and at least the least an arena can be built with.
pub fn default_memory() -> u64 {
    let quarter = process_limit() / 4;
    let whole = quarter - quarter % EXTENT_SIZE as u64;
    whole.clamp(Arena::MEMORY_MIN, MEMORY_MAX)
}

/// Whether a descriptor's word is that of a frame no folio heads and nobody holds.
fn is_nobodys(word: super::DescriptorWord) -> bool {
    !word.is_live() && word.holds() == 0
}

/// Extents of an arena that a bound of `memory` bytes allows.
pub(super) fn extents_within(memory: u64) -> u32 {
    ((memory - CONTROL_BYTES as u64) / EXTENT_SIZE as u64) as u32
}

/// The least bound for an arena of this layout: its tables, the reserve, and data to work with.
fn memory_min(layout: &Layout) -> u64 {
    let extents = u64::from(layout.frames_meta / EXTENT_PAGES) + EXTENTS_MIN;
    CONTROL_BYTES as u64 + extents * EXTENT_SIZE as u64
}

/// The layout for bounds of `memory` to `memory_max` bytes, if these are bounds.
fn layout_for(memory: u64, memory_max: u64) -> Result<Layout, ArenaError> {
    if memory < Arena::MEMORY_MIN {
        return Err(ArenaError::TooSmall { asked: memory, min: Arena::MEMORY_MIN });
    }
    if memory_max < memory {
        return Err(ArenaError::MaxBelowMemory { asked: memory, max: memory_max });
    }
    let max = MEMORY_MAX.min(process_limit());
    if memory_max > max {
        return Err(ArenaError::TooLarge { asked: memory_max, max });
    }
    let layout = Layout::new(memory_max - CONTROL_BYTES as u64);
    let layout = layout.expect("the bound is between the least and the most");
    match memory_min(&layout) {
        min if memory < min => Err(ArenaError::TooSmall { asked: memory, min }),
        _ => Ok(layout),
    }
}

pub(super) fn no_memory(source: std::io::Error) -> ArenaError {
    ArenaError::System { call: "madvise(MADV_POPULATE_WRITE)", source }
}

/// A number that nobody can guess; never 0.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()).max(1)
}

#[cfg(test)]
mod tests {
    use super::super::control::{VIEWERS_MAX, ViewerControl};
    use super::super::{ClaimOutcome, GuestExtents, GuestRefused, GuestUse};
    use super::*;
    use proptest::prelude::*;
    use rustix::fd::AsRawFd;
    use rustix::fs::{Mode, OFlags, fstat, ftruncate};
    use rustix::io::Errno;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};
    use std::collections::HashMap;
    use std::ptr::{NonNull, null_mut};

    const SMALL: u64 = Arena::MEMORY_MIN;

    fn arena(memory: u64) -> Arena {
        Arena::build(ArenaOptions { memory }).unwrap()
    }

    fn resizable(memory: u64, memory_max: u64) -> Arena {
        Arena::build_within(ArenaOptions { memory }, Reservation { memory_max, swap: Swap::Allowed }).unwrap()
    }

    /// Memory that both files have taken, in bytes.
    fn taken(arena: &Arena) -> u64 {
        [arena.arena_fd(), arena.control_fd()]
            .iter()
            .map(|fd| fstat(fd).unwrap().st_blocks as u64 * 512)
            .sum()
    }

    /// Frames for `pages` pages, wherever they lie; how many.
    fn take(
        arena: &Arena,
        (pages, sizes): (u32, Orders),
        amount: AllocAmount,
        locks: LockWait,
        runs: &mut Vec<FrameRun>,
    ) -> u32 {
        arena.alloc_runs(&[(PageIndex(0), pages)], FrameAlignment::anywhere(sizes), amount, locks, runs)
    }

    fn drain(arena: &Arena, order: Order) -> Vec<(Frame, Order)> {
        std::iter::from_fn(|| arena.alloc(order)).map(|frame| (frame, order)).collect()
    }

    #[test]
    fn a_bound_out_of_range_is_refused_with_the_range() {
        let build = |memory| Arena::build(ArenaOptions { memory });
        let small = build(SMALL - 1).unwrap_err();
        assert!(matches!(small, ArenaError::TooSmall { min: SMALL, .. }));
        assert!(small.to_string().contains("16777216"), "{small}");
        assert!(matches!(build(u64::MAX), Err(ArenaError::TooLarge { max, .. }) if max <= MEMORY_MAX));
    }

    /// The tables have entries for all frames there may be, and memory for those there are.
    #[test]
    fn a_large_arena_takes_little_before_it_is_used() {
        let arena = arena(8 << 30);
        let (at_first, meta) = (taken(&arena), arena.stats().meta_bytes);
        assert!(at_first < 2 << 20 && meta > 70 << 20, "{at_first} bytes taken, {meta} set aside");
        let frame = arena.alloc(Order(0)).unwrap();
        let grown = taken(&arena) - at_first;
        assert!(grown < 16 << 20, "{grown} bytes for one frame and its entries");
        let stats = arena.stats();
        let backed = stats.extents_huge + stats.extents_small;
        assert!(backed * EXTENT_SIZE as u64 <= 16 << 20, "{backed} extents are said to have memory");
        arena.free(frame, Order(0));
        arena.check().unwrap();
    }

    #[test]
    fn it_grows_to_its_bound_and_not_a_byte_further() {
        // The second is no whole number of extents, nor of pages.
        for memory in [SMALL, (40 << 20) + 4097] {
            let arena = arena(memory);
            assert!(taken(&arena) < 5 << 20, "only the tables are there at first");
            let mut runs = drain(&arena, Order(4));
            assert!(
                !runs.is_empty()
                    && arena.alloc(Order(0)).is_none()
                    && arena.alloc_run(512, LockWait::Wait).is_none()
            );
            let mut cells = Vec::new();
            assert_eq!(
                arena.alloc_cells(usize::MAX / 2, &mut cells, LockWait::Wait),
                6144,
                "the reserve is one extent"
            );
            arena.populate_control().unwrap();
            let stats = arena.stats();
            assert_eq!(stats.grown_bytes + stats.control_bytes, memory & !(EXTENT_SIZE as u64 - 1));
            // The pages of viewers are counted, and made when there are any.
            assert_eq!(stats.grown_bytes, taken(&arena) - COMMON_BYTES as u64, "what is counted is there");
            assert_eq!(stats.data_bytes / 65536, runs.len() as u64);
            assert_eq!(stats.grown_bytes, stats.meta_bytes + stats.cell_bytes + stats.data_bytes);
            assert_eq!((stats.free_pages, stats.cells_used, stats.growth_failures), (0, 6144, 0));
            assert!(taken(&arena) <= memory);
            arena.check().unwrap();
            // And all of it merges back into whole extents.
            runs.reverse();
            arena.free_all(&runs);
            assert_eq!(drain(&arena, Order::MAX).len() as u64, stats.data_bytes / EXTENT_SIZE as u64);
            arena.check().unwrap();
        }
    }

    #[test]
    fn handed_out_frames_have_odd_descriptors_too() {
        let arena = arena(SMALL);
        let run = arena.alloc_run(100, LockWait::Wait).unwrap();
        assert_eq!((run.pages, run.frame.0 % 64), (64, 0));
        for frame in (0..arena.view().frames_grown()).map(Frame) {
            let word = arena.view().own(frame).word();
            assert!(!word.is_live(), "{frame:?}: {word:?}");
        }
        assert!(arena.view().descriptor(Frame(arena.view().frames_grown())).is_none());
        arena.free_run(run.frame, run.pages);
        arena.check().unwrap();
    }

    #[test]
    fn check_sees_a_folio_among_the_free_frames() {
        let arena = arena(SMALL);
        let frame = arena.alloc(Order(3)).unwrap();
        arena.free(frame, Order(3));
        arena.check().unwrap();
        let inner = arena.view().own(frame.plus(5));
        inner.prepare(crate::units::MappingId(1), crate::units::PageIndex(0), Order(0), false);
        assert!(arena.check().is_err());
    }

    #[test]
    fn a_wish_is_met_by_growing_before_it_is_broken_into_pieces() {
        let arena = arena(SMALL);
        let one = arena.alloc(Order(0)).unwrap();
        assert_eq!(
            arena.alloc_run(512, LockWait::Wait).unwrap().pages,
            512,
            "the first extent is broken, the second is not"
        );
        let rest = drain(&arena, Order::MAX);
        let mut runs = Vec::new();
        assert_eq!(take(&arena, (1000, FrameStock::ANY), AllocAmount::Less, LockWait::Wait, &mut runs), 511);
        assert_eq!(runs.iter().map(|run| run.pages).collect::<Vec<_>>(), [256, 128, 64, 32, 16, 8, 4, 2, 1]);
        assert_eq!(take(&arena, (1, FrameStock::ANY), AllocAmount::Less, LockWait::Wait, &mut Vec::new()), 0);
        arena.free_all(&rest);
        assert_eq!(
            take(&arena, (600, FrameStock::ANY), AllocAmount::All, LockWait::Wait, &mut Vec::new()),
            600
        );
        arena.free(one, Order(0));
        arena.check().unwrap();
    }

    #[test]
    fn a_cell_is_all_zeros_whatever_was_there() {
        let arena = arena(SMALL);
        // Two extents, so that one that data used is cut next.
        let scribble = drain(&arena, Order::MAX);
        for &(frame, order) in &scribble {
            let bytes = arena.view().bytes(frame).unwrap();
            // SAFETY: the frames are ours, and nobody reads them.
            unsafe { bytes.write_bytes(0xa5, order.bytes()) };
        }
        arena.free_all(&scribble);
        let cells: Vec<_> = std::iter::repeat_with(|| arena.alloc_cell().unwrap()).take(8000).collect();
        for &cell in &cells {
            let zero = |number: &std::sync::atomic::AtomicU32| number.load(Ordering::Relaxed) == 0;
            assert!(arena.view().slots(cell).unwrap().iter().all(zero), "{cell:?}");
            let head = arena.view().head(cell).unwrap();
            assert!(head.words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
        }
        arena.check().unwrap();
    }

    #[test]
    fn cells_and_data_trade_extents() {
        let arena = arena(SMALL);
        let extents = (arena.stats().bound_bytes - arena.stats().control_bytes - arena.stats().meta_bytes)
            / EXTENT_SIZE as u64;
        let mut cells = Vec::new();
        let all = arena.alloc_cells(usize::MAX / 2, &mut cells, LockWait::Wait);
        assert_eq!(all as u64, extents * 6144, "cells may have all there is");
        assert!(arena.alloc(Order(0)).is_none());
        cells.drain(..).for_each(|cell| arena.free_cell(cell));
        arena.check().unwrap();
        assert_eq!(arena.stats().cell_bytes, EXTENT_SIZE as u64, "all but the reserve went back");
        assert_eq!(drain(&arena, Order::MAX).len() as u64, extents - 1);
        arena.check().unwrap();
    }

    #[test]
    fn cells_are_cut_out_of_free_data_when_the_machine_has_no_more() {
        let arena = arena(SMALL);
        let frame = arena.alloc(Order(0)).unwrap();
        arena.free(frame, Order(0));
        arena.growth.lock().refuse = u32::MAX;
        assert_eq!(arena.alloc_cells(7000, &mut Vec::new(), LockWait::Wait), 6144);
        assert_eq!((arena.stats().data_bytes, arena.alloc(Order(0))), (0, None));
        arena.check().unwrap();
    }

    #[test]
    fn who_waited_for_another_to_grow_does_not_grow_again() {
        let arena = arena(SMALL);
        let seen = arena.stock.lock().growths;
        assert_eq!(arena.grow(ExtentPurpose::Data, seen, LockWait::Wait), GrowOutcome::Yes);
        assert_eq!(arena.grow(ExtentPurpose::Data, seen, LockWait::Wait), GrowOutcome::Yes);
        assert_eq!(arena.stock.lock().growths, seen + 1);
    }

    #[test]
    fn all_or_nothing_takes_nothing_when_it_is_not_all() {
        let arena = arena(SMALL);
        let all = drain(&arena, Order::MAX);
        let mut runs = Vec::new();
        arena.free_run(all[0].0, 100);
        assert_eq!(take(&arena, (101, FrameStock::ANY), AllocAmount::All, LockWait::Wait, &mut runs), 0);
        assert_eq!(take(&arena, (101, FrameStock::ANY), AllocAmount::All, LockWait::Try, &mut runs), 0);
        assert_eq!((runs.len(), arena.stats().free_pages), (0, 100), "what was begun went back");
        assert_eq!(take(&arena, (101, FrameStock::ANY), AllocAmount::Less, LockWait::Try, &mut runs), 100);
        arena.free_all(&runs.drain(..).map(|r| (r.frame, Order::fitting(r.pages))).collect::<Vec<_>>());
        assert_eq!(take(&arena, (100, FrameStock::ANY), AllocAmount::All, LockWait::Wait, &mut runs), 100);
        arena.check().unwrap();
    }

    #[test]
    fn runs_are_of_the_sizes_that_were_asked_for() {
        let arena = arena(SMALL);
        let all = drain(&arena, Order::MAX);
        let sizes = Orders { min: Order(2), max: Order(4) };
        // 512 pages of which every eighth is in use: pieces of 4, 2 and 1 are free.
        for (at, pages) in (0..512).step_by(8).map(|at| (at, 7)) {
            arena.free_run(all[0].0.plus(at), pages);
        }
        let mut runs = Vec::new();
        assert_eq!(
            take(&arena, (512, sizes), AllocAmount::All, LockWait::Wait, &mut runs),
            0,
            "there are as many, but not such"
        );
        assert_eq!(arena.stats().free_pages, 448);
        assert_eq!(take(&arena, (512, sizes), AllocAmount::Less, LockWait::Wait, &mut runs), 256);
        assert!(runs.iter().all(|run| run.pages == 4 && run.frame.0 % 4 == 0));
        arena.free_run(all[1].0, 512);
        runs.clear();
        assert_eq!(take(&arena, (132, sizes), AllocAmount::All, LockWait::Wait, &mut runs), 132);
        assert_eq!(runs.iter().map(|run| run.pages).collect::<Vec<_>>(), [16, 16, 16, 16, 16, 16, 16, 16, 4]);
        arena.check().unwrap();
    }

    #[test]
    fn who_must_not_wait_grows_the_arena_unless_another_does() {
        let arena = arena(SMALL);
        let try_cell = || {
            let mut cells = Vec::new();
            arena.alloc_cells(1, &mut cells, LockWait::Try);
            cells.pop()
        };
        let growing = arena.growth.lock();
        assert_eq!((arena.alloc_run(8, LockWait::Try), try_cell()), (None, None), "nothing is grown");
        drop(growing);
        assert_eq!(arena.alloc_run(8, LockWait::Try).unwrap().pages, 8);
        let cell = try_cell().unwrap();
        let growing = arena.growth.lock();
        assert_eq!(arena.alloc_run(8, LockWait::Try).unwrap().pages, 8, "out of what is grown");
        assert_ne!(try_cell().unwrap(), cell);
        drop(growing);
        let locked = arena.stock.lock();
        assert_eq!((arena.alloc_run(8, LockWait::Try), try_cell()), (None, None));
        drop(locked);
        let mut runs = Vec::new();
        let max = arena.view().layout().frames_max;
        let got = take(&arena, (max, FrameStock::ANY), AllocAmount::Less, LockWait::Try, &mut runs);
        assert!(arena.alloc(Order::ZERO).is_none(), "it went to the bound: {got}");
        arena.check().unwrap();
    }

    #[test]
    fn what_is_emptied_goes_back_to_the_machine_and_grows_again() {
        let large = SMALL + 20 * EXTENT_SIZE as u64;
        let arena = resizable(large, large);
        let all = drain(&arena, Order(4));
        let before = taken(&arena);
        arena.set_bound(SMALL).unwrap();
        assert_eq!((arena.choose_emptying().len(), arena.punch_empty()), (20, 0), "all of it is in use");
        assert_eq!(arena.stats().slack_bytes, 20 * EXTENT_SIZE as u64);
        arena.check().unwrap();
        // Half of each extent comes back, then all.
        let (first, second): (Vec<_>, Vec<_>) = all.iter().partition(|(frame, _)| frame.0 % 32 == 0);
        arena.free_all(&first);
        assert_eq!((arena.choose_emptying().len(), arena.punch_empty()), (20, 0));
        arena.check().unwrap();
        arena.free_all(&second);
        assert_eq!(arena.punch_empty(), 20);
        assert_eq!(taken(&arena), before - 20 * EXTENT_SIZE as u64);
        let stats = arena.stats();
        assert_eq!((stats.slack_bytes, stats.returned_bytes), (0, 20 * EXTENT_SIZE as u64));
        assert_eq!(
            stats.grown_bytes + stats.control_bytes,
            SMALL - EXTENT_SIZE as u64,
            "but for the reserve"
        );
        arena.check().unwrap();
        assert_eq!(drain(&arena, Order(9)).len(), 5, "it does not grow beyond the bound");
        // And up again.
        arena.set_bound(large).unwrap();
        assert_eq!(drain(&arena, Order(9)).len(), 20);
        assert_eq!(taken(&arena), before);
        arena.check().unwrap();
    }

    #[test]
    fn a_bound_that_is_raised_again_gives_back_what_was_to_go() {
        let large = SMALL + 4 * EXTENT_SIZE as u64;
        let arena = resizable(large, large);
        let mut all = drain(&arena, Order(0));
        arena.set_bound(SMALL).unwrap();
        assert_eq!(arena.choose_emptying().len(), 4);
        let (frame, order) = all.pop().unwrap();
        arena.free(frame, order);
        assert_eq!((arena.alloc(Order(0)), arena.stats().leaving_pages), (None, 1), "nobody gets it");
        arena.check().unwrap();
        arena.set_bound(large).unwrap();
        assert_eq!((arena.alloc(Order(0)), arena.stats().slack_bytes), (Some(frame), 0));
        arena.check().unwrap();
    }

    #[test]
    fn the_cheapest_extents_go_and_a_pinned_one_is_exchanged() {
        let large = SMALL + 2 * EXTENT_SIZE as u64;
        let arena = resizable(large, large);
        let mut all = drain(&arena, Order(9));
        all.sort_unstable_by_key(|(frame, _)| frame.0);
        let name = |(frame, order): (Frame, Order), at: u64| {
            let descriptor = arena.view().own(frame);
            descriptor.prepare(crate::units::MappingId(1), crate::units::PageIndex(at * 512), order, false);
            descriptor.complete(true);
            descriptor
        };
        // All are folios that were read, but two; of these one is held.
        for (at, &folio) in all.iter().enumerate() {
            name(folio, at as u64);
            arena.view().referenced(folio.0).unwrap().store(u8::from(at != 2 && at != 4), Ordering::Relaxed);
        }
        let held = arena.view().own(all[4].0);
        held.try_hold(crate::units::MappingId(1), crate::units::PageIndex(4 * 512)).unwrap();
        arena.set_bound(SMALL + EXTENT_SIZE as u64).unwrap();
        let cold = all[2].0.extent();
        assert_eq!(arena.choose_emptying(), [cold]);
        let pinned = arena.view().own(all[2].0);
        pinned.try_hold(crate::units::MappingId(1), crate::units::PageIndex(2 * 512)).unwrap();
        assert_eq!(arena.choose_emptying(), [cold], "a hold is short");
        pinned.pin();
        let top = all.last().unwrap().0.extent();
        assert_eq!(arena.choose_emptying(), [top], "the highest of those that cost the same");
        arena.check().unwrap();
    }

    #[test]
    fn what_a_late_reader_takes_is_given_back_by_a_sweep() {
        let large = SMALL + 4 * EXTENT_SIZE as u64;
        let arena = resizable(large, large);
        let all = drain(&arena, Order(9));
        arena.free_all(&all);
        arena.set_bound(SMALL).unwrap();
        arena.choose_emptying();
        assert_eq!((arena.punch_empty(), arena.sweep()), (4, 0));
        let before = taken(&arena);
        let late = *arena.stock.lock().punched.first().unwrap();
        let never = arena.view().layout().frames_max / EXTENT_PAGES;
        assert!(late < never);
        let bytes = arena.view().bytes(Frame(late * EXTENT_PAGES + 7)).unwrap();
        // SAFETY: all of the file is mapped; nobody writes there.
        assert_eq!(unsafe { bytes.read_volatile() }, 0);
        assert!(taken(&arena) > before, "a read in a hole takes a page");
        assert_eq!((arena.sweep(), taken(&arena)), (1, before));
        arena.check().unwrap();
    }

    #[test]
    fn a_bound_out_of_reach_is_refused() {
        let arena = resizable(SMALL, 2 * SMALL);
        assert!(
            matches!(arena.set_bound(2 * SMALL + 1), Err(ArenaError::AboveMax { max, .. }) if max == 2 * SMALL)
        );
        assert!(matches!(arena.set_bound(SMALL - 1), Err(ArenaError::TooSmall { min: SMALL, .. })));
        let below = Reservation { memory_max: SMALL, swap: Swap::Allowed };
        let refused = Arena::build_within(ArenaOptions { memory: 2 * SMALL }, below).unwrap_err();
        assert!(matches!(refused, ArenaError::MaxBelowMemory { .. }), "{refused}");
        // The tables of a large one take more than the least.
        let tables = Reservation { memory_max: 4 << 30, swap: Swap::Allowed };
        let refused = Arena::build_within(ArenaOptions { memory: SMALL }, tables).unwrap_err();
        let ArenaError::TooSmall { min, .. } = refused else { panic!("{refused}") };
        let arena = Arena::build_within(ArenaOptions { memory: min }, tables).unwrap();
        assert!(drain(&arena, Order(9)).len() >= 4);
        assert!(taken(&arena) <= min);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Alloc(u8),
        Runs(u32),
        Free(usize),
        Cells(usize),
        FreeCells(usize, usize),
        /// Sets the bound, in extents above the least, and empties what is to go as far as it is free.
        Resize(u64),
        /// As if reclaim came: whatever is freed now may complete what was begun.
        Punch,
        /// Takes a guest of so many extents, by force if there is no room for it.
        Guest(u32),
        /// Claims pages of one of the guests; they are freed as any others.
        Claim(usize, u32, u32),
        /// Drops the handle of one of the guests.
        DropGuest(usize),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            3 => (0..=9u8).prop_map(Op::Alloc),
            2 => (1..1500u32).prop_map(Op::Runs),
            4 => any::<usize>().prop_map(Op::Free),
            1 => prop_oneof![1..30usize, 4000..9000usize].prop_map(Op::Cells),
            1 => (any::<usize>(), prop_oneof![1..30usize, 4000..9000usize]).prop_map(|(a, b)| Op::FreeCells(a, b)),
            2 => (0..=6u64).prop_map(Op::Resize),
            1 => Just(Op::Punch),
            2 => (1..4u32).prop_map(Op::Guest),
            4 => (any::<usize>(), any::<u32>(), 1..1500u32).prop_map(|(which, at, pages)| Op::Claim(which, at, pages)),
            2 => any::<usize>().prop_map(Op::DropGuest),
        ];
        prop::collection::vec(op, 1..60)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        /// The twin: an owner for each frame. Everything handed out is inside what is grown, aligned, and
        /// nobody else's; and nothing is refused that is free.
        #[test]
        fn nothing_is_handed_out_twice(ops in ops()) {
            let arena = Arc::new(resizable(SMALL, SMALL + 6 * EXTENT_SIZE as u64));
            let (mut runs, mut cells) = (Vec::<FrameRun>::new(), Vec::<CellNumber>::new());
            let mut guests = Vec::<GuestExtents>::new();
            let mut most_grown = 0;
            for op in ops {
                match op {
                    Op::Alloc(order) => match arena.alloc(Order(order)) {
                        Some(frame) => runs.push(FrameRun { frame, pages: 1 << order }),
                        None => prop_assert!(order > 0 || arena.stats().free_pages == 0),
                    },
                    Op::Runs(pages) => {
                        // An odd place, and a shift: no frame more than are wanted is lost.
                        let (gaps, mut new) = ([(PageIndex(u64::from(pages) * 7), pages)], Vec::new());
                        let fit = FrameAlignment { runs: FrameStock::ANY, align: Order((pages % 10) as u8) };
                        let got = arena.alloc_runs(&gaps, fit, AllocAmount::Less, LockWait::Wait, &mut new);
                        prop_assert_eq!(pages_of(&new), got);
                        prop_assert!(got == pages || arena.stats().free_pages == 0);
                        prop_assert_eq!(check_places(gaps[0].0, fit.align, &new), Ok(()));
                        runs.append(&mut new);
                    }
                    Op::Free(which) if !runs.is_empty() => {
                        let run = runs.swap_remove(which % runs.len());
                        arena.free_run(run.frame, run.pages);
                    }
                    Op::Cells(wanted) => {
                        let got = arena.alloc_cells(wanted, &mut cells, LockWait::Wait);
                        let stats = arena.stats();
                        let full = stats.cells_used * EXTENT_SIZE as u64 == stats.cell_bytes * 6144;
                        prop_assert!(got == wanted || full);
                    }
                    Op::FreeCells(from, many) => for _ in 0..many.min(cells.len()) {
                        let cell = cells.swap_remove(from % cells.len());
                        arena.free_cell(cell);
                    },
                    Op::Guest(extents) => {
                        guests.extend(take_guest(&arena, extents).map_err(TestCaseError::fail)?);
                    }
                    Op::Claim(which, at, pages) if !guests.is_empty() => {
                        let guest = &guests[which % guests.len()];
                        runs.extend(claim(guest, at, pages).map_err(TestCaseError::fail)?);
                    }
                    Op::DropGuest(which) if !guests.is_empty() => {
                        drop(guests.swap_remove(which % guests.len()));
                        most_grown = 0;
                    }
                    Op::Free(_) | Op::Claim(..) | Op::DropGuest(_) => {}
                    Op::Resize(extents) => {
                        let grown = arena.stats().grown_bytes;
                        let bound = SMALL + extents * EXTENT_SIZE as u64;
                        let set = arena.set_bound(bound);
                        prop_assert_eq!(set.is_ok(), bound >= arena.memory_min());
                        let chosen = arena.choose_emptying().len() as u32;
                        prop_assert!(chosen <= arena.excess_extents());
                        prop_assert_eq!(arena.stats().grown_bytes, grown, "nothing goes before its hole is made");
                        most_grown = 0;
                        arena.punch_empty();
                    }
                    Op::Punch => {
                        arena.choose_emptying();
                        arena.punch_empty();
                    }
                }
                prop_assert_eq!(arena.check(), Ok(()));
                prop_assert_eq!(check_taken(&arena, &mut most_grown), Ok(()));
                prop_assert_eq!(check_owners(&arena, &runs, &cells), Ok(()));
            }
        }
    }

    /// A guest of so many extents, by force if there is no room for it; none if there is none at all.
    fn take_guest(arena: &Arc<Arena>, extents: u32) -> Result<Option<GuestExtents>, String> {
        let take = || arena.take_guest(extents, c"quinion-test", GuestUse::Frozen);
        let before = arena.stats();
        let mut taken = take();
        if matches!(taken, Err(GuestRefused::NoRoom)) && arena.demand_guest(extents) {
            arena.choose_emptying();
            arena.punch_empty();
            taken = take();
            arena.end_demand();
        }
        let room = before.bound_bytes - before.control_bytes - before.meta_bytes;
        let is_empty = before.data_bytes + before.cell_bytes + before.guest_bytes == 0;
        match taken {
            Ok(guest) => Ok(Some(guest)),
            Err(GuestRefused::NoRoom) if !is_empty || u64::from(extents + 1) * EXTENT_SIZE as u64 > room => {
                Ok(None)
            }
            refused => Err(format!("{refused:?}, and there is room: {before:?}")),
        }
    }

    /// A run of the guest's pages from about `at` on, as far as nobody has them.
    fn claim(guest: &GuestExtents, at: u32, pages: u32) -> Result<Option<FrameRun>, String> {
        let at = at % guest.pages();
        let (index, pages) = (PageIndex(u64::from(at)), pages.min(guest.pages() - at));
        match guest.claim(index, pages, LockWait::Wait) {
            ClaimOutcome::Pages(got) if (1..=pages).contains(&got) => {
                Ok(Some(FrameRun { frame: guest.place(index).unwrap(), pages: got }))
            }
            ClaimOutcome::Taken => Ok(None),
            other => Err(format!("{other:?}")),
        }
    }

    /// What the system has given is what is counted, and within the bound or falling towards it. (What it has given
    /// guests is behind other files.)
    fn check_taken(arena: &Arena, most_grown: &mut u64) -> Result<(), String> {
        let stats = arena.stats();
        let (taken, counted) = (taken(arena), stats.grown_bytes - stats.guest_bytes + PAGE_SIZE as u64);
        // Tables that have no memory yet may have some pages of it.
        let missing = u64::from(arena.growth.lock().tables.missing()) * EXTENT_SIZE as u64;
        if taken > counted || taken < counted - missing || missing > 0 && taken == counted {
            return Err(format!("{taken} bytes are taken, {counted} counted: {stats:?}"));
        }
        if stats.grown_bytes + stats.control_bytes > stats.bound_bytes {
            if *most_grown > 0 && stats.grown_bytes > *most_grown {
                return Err(format!("it grew above its bound: {stats:?}"));
            }
            *most_grown = stats.grown_bytes;
        }
        Ok(())
    }

    /// Runs for the pages from `at` on: each page agrees with its frame, as far as folios of `align` need.
    fn check_places(mut at: PageIndex, align: Order, runs: &[FrameRun]) -> Result<(), String> {
        for run in runs {
            let mut page = 0;
            while page < run.pages {
                let index = at.plus(u64::from(page));
                let order = Order(index.0.trailing_zeros().min(u32::from(align.0)) as u8);
                let order = order.min(Order::fitting(run.pages - page));
                if (run.frame.0 + page) & (order.pages() - 1) != 0 {
                    return Err(format!("{run:?} for {at:?}: {index:?} could head a folio of {order:?}"));
                }
                page += order.pages();
            }
            at = at.plus(u64::from(run.pages));
        }
        Ok(())
    }

    fn check_owners(arena: &Arena, runs: &[FrameRun], cells: &[CellNumber]) -> Result<(), String> {
        let mut owners = HashMap::new();
        for (number, run) in runs.iter().enumerate() {
            for frame in run.frame.0..run.frame.0 + run.pages {
                let punched = arena.stock.lock().punched.contains(&Frame(frame).extent());
                if frame >= arena.view().frames_grown() || punched {
                    return Err(format!("{run:?} is no run"));
                }
                if owners.insert(frame, number).is_some() {
                    return Err(format!("frame {frame} is handed out twice"));
                }
            }
        }
        let mut distinct: Vec<u32> = cells.iter().map(|cell| cell.0).collect();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() != cells.len() || cells.iter().any(|cell| owners.contains_key(&cell.frame().0)) {
            return Err("a cell is handed out twice, or lies in a run".into());
        }
        let stats = arena.stats();
        let is_data = |frame: &&u32| !arena.stock.lock().guests.has(Frame(**frame).extent());
        let owned = owners.keys().filter(is_data).count() as u64;
        let pages = stats.free_pages + stats.leaving_pages + owned;
        if pages * PAGE_SIZE as u64 != stats.data_bytes || stats.cells_used != cells.len() as u64 {
            return Err(format!("frames or cells got lost: {stats:?}"));
        }
        Ok(())
    }

    #[test]
    fn four_threads_at_once() {
        let arena = arena(24 << 20);
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let arena = &arena;
                scope.spawn(move || churn(arena, thread));
            }
        });
        arena.check().unwrap();
        let stats = arena.stats();
        assert_eq!(stats.free_pages * PAGE_SIZE as u64, stats.data_bytes, "all came back");
        assert_eq!(stats.cells_used, 0);
    }

    /// Takes and gives back; what a thread has it writes its number on, and finds it there again.
    fn churn(arena: &Arena, thread: u32) {
        let mut random = 0x9e37_79b9u32.wrapping_mul(thread + 1);
        let mut runs = Vec::new();
        let mut cells = Vec::new();
        for round in 0..3000u32 {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            match arena.alloc_run(1 << (random % 8), LockWait::Wait) {
                Some(run) => {
                    let mark = arena.view().own(run.frame);
                    mark.set_link(0, thread);
                    runs.push((run, thread));
                }
                None => runs.drain(..).for_each(|(run, _)| give_back(arena, run, thread)),
            }
            if random.is_multiple_of(3) && !runs.is_empty() {
                let (run, _) = runs.swap_remove(random as usize % runs.len());
                give_back(arena, run, thread);
            }
            if round % 64 < 32 {
                let first = cells.len();
                arena.alloc_cells(40, &mut cells, LockWait::Wait);
                for &cell in &cells[first..] {
                    arena.view().slots(cell).unwrap()[9].store(thread, Ordering::Relaxed);
                }
            } else {
                for cell in cells.drain(cells.len().saturating_sub(50)..) {
                    assert_eq!(arena.view().slots(cell).unwrap()[9].load(Ordering::Relaxed), thread);
                    arena.free_cell(cell);
                }
            }
        }
        runs.into_iter().for_each(|(run, _)| give_back(arena, run, thread));
        cells.into_iter().for_each(|cell| arena.free_cell(cell));
    }

    fn give_back(arena: &Arena, run: FrameRun, thread: u32) {
        assert_eq!(arena.view().own(run.frame).links()[0], thread, "{run:?} was somebody else's too");
        arena.free_run(run.frame, run.pages);
    }

    #[test]
    fn a_machine_without_memory_is_asked_now_and_then() {
        let mut growth = GrowthParams { tables: Tables::new(0), failures: 0, refuse: 0, returned: 0 };
        let mut asked = 0;
        for _ in 0..3 * (WISHES_REFUSED + 1) {
            let refused = growth.ask(|_| {
                asked += 1;
                Err(Errno::NOMEM.into())
            });
            assert_eq!(refused, None);
        }
        assert_eq!((asked, growth.failures), (3, 3));
        assert_eq!(growth.ask(|_| Ok(PageSize::Small)), Some(PageSize::Small));
        assert_eq!(growth.ask(|_| Ok(PageSize::Huge)), Some(PageSize::Huge));
    }

    // ---- what others may do with the files ---------------------------------------------------------

    /// The arena's file as a viewer gets it.
    fn reopened(file: impl AsFd, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
    }

    fn map(file: &OwnedFd, bytes: usize, access: ProtFlags) -> rustix::io::Result<NonNull<u8>> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe { mmap(null_mut(), bytes, access, MapFlags::SHARED, file, 0) };
        mapped.map(|at| NonNull::new(at.cast()).unwrap())
    }

    #[test]
    fn nobody_can_resize_the_files() {
        let arena = arena(SMALL);
        for file in [arena.arena_fd(), arena.control_fd()] {
            let size = fstat(file).unwrap().st_size as u64;
            assert_eq!(ftruncate(file, size - 4096), Err(Errno::PERM));
            assert_eq!(ftruncate(file, size + 4096), Err(Errno::PERM));
            assert_eq!(ftruncate(file, 0), Err(Errno::PERM));
        }
    }

    #[test]
    fn a_viewer_maps_the_arena_for_reading_only() {
        let arena = arena(SMALL);
        let bytes = arena.view().layout().bytes_max() as usize;
        let file = reopened(arena.arena_fd(), OFlags::RDONLY).unwrap();
        assert_eq!(map(&file, bytes, ProtFlags::READ | ProtFlags::WRITE), Err(Errno::ACCESS));
        let base = map(&file, bytes, ProtFlags::READ).unwrap();
        // SAFETY: the mapping is ours; were it to succeed, nobody would use it.
        let made_writable = unsafe { mprotect(base.as_ptr().cast(), bytes, MprotectFlags::WRITE) };
        assert_eq!(made_writable, Err(Errno::ACCESS));
        if !rustix::process::geteuid().is_root() {
            assert_eq!(reopened(arena.arena_fd(), OFlags::RDWR).err(), Some(Errno::ACCESS));
        }

        // SAFETY: all of it is mapped until the end of this test.
        let view = unsafe { View::attach(base, bytes as u64) }.unwrap();
        assert_eq!(view.header().token.load(Ordering::Relaxed), arena.token());
        let before = view.frames_grown();
        let frame = arena.alloc(Order(0)).unwrap();
        assert!(view.frames_grown() >= before + EXTENT_PAGES, "growth is seen");
        assert_eq!(view.own(frame).word(), arena.view().own(frame).word());
        // SAFETY: the view is not used any more.
        unsafe { munmap(base.as_ptr().cast(), bytes) }.unwrap();
    }

    #[test]
    fn a_viewer_maps_its_own_page_for_writing_and_the_rest_for_reading_only() {
        let arena = arena(SMALL);
        arena.populate_control().unwrap();
        let file = reopened(arena.control_fd(), OFlags::RDONLY).unwrap();
        let write = ProtFlags::READ | ProtFlags::WRITE;
        assert_eq!(map(&file, COMMON_BYTES, write), Err(Errno::ACCESS));
        if !rustix::process::geteuid().is_root() {
            assert_eq!(reopened(arena.control_fd(), OFlags::RDWR).err(), Some(Errno::ACCESS));
        }
        let common = map(&file, COMMON_BYTES, ProtFlags::READ).unwrap();
        let last = VIEWERS_MAX - 1;
        let pages = [0, last].map(|number| arena.make_viewer_page(number).unwrap());
        let [first, page] = pages.map(|page| map(&page, VIEWER_BYTES, write).unwrap());
        let at = |base, bytes: usize| (base, bytes as u64);
        // SAFETY: all of it is mapped until the end of this test.
        let view =
            unsafe { ViewerControl::attach(at(common, COMMON_BYTES), at(page, VIEWER_BYTES)) }.unwrap();
        assert_eq!(view.control().token.load(Ordering::Relaxed), arena.token());
        view.page().ring[4095].store(7, Ordering::Relaxed);
        let seen = |number| arena.control().viewer_page(number).unwrap().ring[4095].load(Ordering::Relaxed);
        assert_eq!((seen(0), seen(last)), (0, 7));
        assert!(arena.control().viewer_page(VIEWERS_MAX).is_none());
        // The next in its place has another page.
        arena.make_viewer_page(last).unwrap();
        view.page().ring[4095].store(8, Ordering::Relaxed);
        assert_eq!(seen(last), 0);
        for (base, bytes) in [(common, COMMON_BYTES), (first, VIEWER_BYTES), (page, VIEWER_BYTES)] {
            // SAFETY: the views are not used any more.
            unsafe { munmap(base.as_ptr().cast(), bytes) }.unwrap();
        }
    }
}
