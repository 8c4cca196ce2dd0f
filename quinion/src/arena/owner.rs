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
//! The first extents hold the header and the tables (`tables.rs`). The others are taken one after the other, when an
//! allocation finds nothing free, and go to the buddy allocator as data or are cut into cells; cells and data trade
//! whole extents afterwards. Tables and address space are made for `memory_max`; the arena grows up to the bound only.
//!
//! A **reserve** of extents is kept for cells, so that a cache full of data can still index it: one in 64, and at least
//! one. Cells may take more, like data, where there is more. `None` is the whole answer to a shortage: the path that
//! asked calls reclaim and asks again. Nothing here calls up.
//!
//! Invariants (the first five asserted by [`Arena::check`]):
//!  1. The two files together are never larger than `memory_max`; they are sealed to that. Extents are grown while
//!     they and the control file are within the bound, and none while a lowered bound has not been reached.
//!  2. Every extent that is grown is exactly one of: meta, data (some being emptied), cells, a guest's (`guest.rs`).
//!  3. A frame that no folio heads has an odd descriptor, from before it was published.
//!  4. Extents that may be grown, and those of cells, are together at least the reserve, but for extents that a lowered
//!     bound wants emptied.
//!  5. Frames below `frames_grown` have memory, or had it and are punched; no thread touches one at or above it.
//!  6. A cell is all zeros when it is handed out.
//!
//! Not an invariant: that an allocation succeeds while there is memory below
//! the bound. The machine may have none; that is counted and answered `None`.
//!
//! Locks: `Rank::Growth` around growing, which may take milliseconds, and `Rank::Arena` around the lists, for a few
//! steps. Populating happens under the first only, so a thread that finds something free never waits for the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::buddy::Buddy;
use super::cells::Cells;
use super::guests::Guests;
use super::options::{
    ArenaError, ArenaOptions, ArenaStats, MEMORY_MIN, Reservation, Swap, extents_within, layout_for,
    memory_min, no_memory,
};
use super::page_locks::PageLocks;
use super::segment::{FileBacking, PageSize, Segment, Sharing, create_sized, seal};
use super::stock::{FrameStock, GrowthParams, is_unclaimed};
use super::tables::Tables;
use crate::sync::{Rank, RankedMutex};
use crate::units::{EXTENT_PAGES, EXTENT_SIZE, Frame, PAGE_SIZE};
use quinion_view::arena::View;
use quinion_view::arena::control::{
    COMMON_BYTES, CONTROL_BYTES, ControlView, GROUP_VIEWERS, GROUPS_MAX, VIEWER_BYTES, page_offset,
};
use quinion_view::arena::dirty::BitTable;

/// The memory of one cache: frames, cells and the pages shared with viewers. A forked child has no arena: touching one
/// is a fault.
#[derive(Debug)]
pub struct Arena {
    pub(super) view: View,
    control: ControlView,
    /// The bound in force, in bytes. Changed under the growth lock and the stock's.
    pub(super) bound: AtomicU64,
    memory_max: u64,
    token: u64,
    /// Whether a service has it, or had: its control file says for ever that the service has ended.
    is_served: AtomicBool,
    pinned_pages: AtomicU64,
    /// Pages of guests, claimed or not. Changed under the growth lock.
    pub(super) guest_pages: AtomicU64,
    /// But for the control mapping. Changed under the growth lock and the stock's.
    viewer_extents: AtomicU32,
    pub(super) growth: RankedMutex<GrowthParams>,
    /// Threads that are about to take the growth lock. No memory access is ordered by it.
    pub(super) growth_waiters: AtomicU32,
    pub(super) stock: RankedMutex<FrameStock>,
    page_locks: PageLocks,
    // The views above are not used once these are dropped.
    pub(super) arena_segment: Segment,
    control_segment: Segment,
    /// Where the pages of further groups of viewers lie: that of group 1 first.
    viewer_segments: Box<[OnceLock<Segment>]>,
}

impl Arena {
    /// The least bound, in bytes.
    pub const MEMORY_MIN: u64 = MEMORY_MIN;

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
            is_refused: false,
            buddy: Buddy::new(),
            cells: Cells::new(),
            huge: BTreeSet::new(),
            punched: BTreeSet::new(),
            guests: Guests::default(),
            emptying: BTreeMap::new(),
            is_lowered: false,
        };
        let growth = GrowthParams::new(Tables::new(extents_grown));
        let arena = Self {
            view,
            control,
            bound: AtomicU64::new(options.memory),
            memory_max: reservation.memory_max,
            token,
            is_served: AtomicBool::new(false),
            pinned_pages: AtomicU64::new(0),
            guest_pages: AtomicU64::new(0),
            viewer_extents: AtomicU32::new(0),
            growth: RankedMutex::new(Rank::Growth, growth),
            growth_waiters: AtomicU32::new(0),
            stock: RankedMutex::new(Rank::Arena, stock),
            page_locks: PageLocks::new(),
            arena_segment,
            control_segment,
            viewer_segments: (1..GROUPS_MAX).map(|_| OnceLock::new()).collect(),
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

    /// Gives the tables' entries of `frames`, which are not published yet, their memory, and every frame of them a
    /// descriptor that names nothing: a zero is an even sequence. Locks: Arena.
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
        // SAFETY: the caller has given memory to the entries of these frames.
        let grown = unsafe { self.view.grown_to(frames.end) };
        for frame in frames.map(Frame) {
            grown.descriptor(frame).expect("it is below `frames_max`").set_free(None);
        }
    }

    pub(super) fn publish(&self, stock: &FrameStock) {
        // SAFETY: this is the owner, and all frames in the stock have memory, as have their entries.
        unsafe { self.view.publish_frames(stock.frames_reached()) };
    }

    /// The arena by numbers, as viewers have it too.
    #[inline]
    pub fn view(&self) -> &View {
        &self.view
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
    /// The control file, of which viewers map the first [`COMMON_BYTES`] bytes read-only. Its mode is 0400, too.
    pub fn control_fd(&self) -> BorrowedFd<'_> {
        self.control_segment.file()
    }
    /// Whether the caller is the first that serves it to viewers, and so may.
    pub fn claim_service(&self) -> bool {
        !self.is_served.swap(true, Ordering::Relaxed)
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
    /// The least bound it can be given now, in bytes: with it there are still some extents of data beside its guests
    /// and the pages of viewers.
    pub fn memory_min(&self) -> u64 {
        let viewers = u64::from(self.viewer_extents()) * EXTENT_SIZE as u64;
        memory_min(self.view.layout()) + viewers + self.guest_pages() * PAGE_SIZE as u64
    }
    pub(super) fn viewer_extents(&self) -> u32 {
        self.viewer_extents.load(Ordering::Relaxed)
    }
    /// Pages that folios and cells can have within the bound, but for those of guests.
    pub fn pages_max(&self) -> u64 {
        let extents = extents_within(self.bound()).saturating_sub(self.viewer_extents());
        let extents = u64::from(extents) * u64::from(EXTENT_PAGES);
        extents.saturating_sub(u64::from(self.view.layout().frames_meta) + self.guest_pages())
    }
    /// Pages of guests, claimed or not.
    pub fn guest_pages(&self) -> u64 {
        self.guest_pages.load(Ordering::Relaxed)
    }

    /// The least bound, in bytes, with which the arena can hold so many pages of data.
    pub fn bound_for(&self, pages: u64) -> u64 {
        let pages = pages + u64::from(self.view.layout().frames_meta) + self.guest_pages();
        let extents = pages.div_ceil(u64::from(EXTENT_PAGES)) + u64::from(self.viewer_extents());
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

    /// Takes the memory of the pages that all viewers see, before the first viewer is given the file.
    pub fn populate_control(&self) -> Result<(), ArenaError> {
        self.control_segment.populate_bytes(0, COMMON_BYTES).map_err(no_memory)
    }

    /// Sets an extent of the bound aside for each of the first `groups` groups of viewers but the first, where that is
    /// not done yet. Nothing grows into it from now on; extents that are grown there go as after [`Arena::set_bound`].
    /// Locks: Growth, Arena.
    ///
    /// # Errors
    /// With the extents that it needs at least, the bound has no room for that.
    pub fn reserve_viewers(&self, groups: usize) -> Result<(), ArenaError> {
        let _growth = self.wait_for_growth();
        let more = self.viewer_bytes_missing(groups);
        let min = self.memory_min() + more;
        if min > self.bound() {
            return Err(ArenaError::TooSmall { asked: self.bound(), min });
        }
        let (mut stock, extents) = (self.stock.lock(), (more / EXTENT_SIZE as u64) as u32);
        self.viewer_extents.fetch_add(extents, Ordering::Relaxed);
        stock.extents_max -= extents;
        if extents > 0 {
            stock.note_lowered();
        }
        Ok(())
    }

    /// Gives back the extents that were set aside for groups of viewers beyond the first `groups`, with the memory of
    /// their pages: no viewer is in them, and none is given a page there meanwhile. An extent that the system does not
    /// empty stays set aside, as do all while the arena grows: to be called again. Locks: Growth, if it is free; Arena.
    pub fn release_viewers(&self, groups: usize) {
        let wanted = groups.clamp(1, GROUPS_MAX) as u32 - 1;
        if self.viewer_extents() <= wanted {
            return; // nearly always
        }
        let Some(_growth) = self.growth.try_lock() else { return };
        while self.viewer_extents() > wanted {
            let last = self.viewer_extents() - 1;
            // The files of its pages go with their mappings. A thread that is late for a viewer that was there reads
            // the segment's own file, and takes memory for its reads, until the next call.
            let is_empty = self.viewer_segments[last as usize].get().is_none_or(|segment| {
                segment.restore_mapping(0, EXTENT_SIZE).and_then(|()| segment.punch(0)).is_ok()
            });
            if !is_empty {
                return;
            }
            let mut stock = self.stock.lock();
            self.viewer_extents.store(last, Ordering::Relaxed);
            stock.extents_max += 1;
            stock.note_lowered();
            stock.reopen_surplus(&self.view, self.extents_meta());
        }
    }

    /// Bytes still to be set aside for so many groups of viewers.
    pub fn viewer_bytes_missing(&self, groups: usize) -> u64 {
        let wanted = groups.clamp(1, GROUPS_MAX) as u32 - 1;
        u64::from(wanted.saturating_sub(self.viewer_extents())) * EXTENT_SIZE as u64
    }

    /// Maps room for the pages of a group of viewers, for which an extent was set aside: it has no memory yet.
    ///
    /// # Errors
    /// The system refuses.
    pub fn map_viewers(&self, group: usize) -> Result<(), ArenaError> {
        let Some(place) = group.checked_sub(1).map(|place| &self.viewer_segments[place]) else {
            return Ok(()); // the control mapping
        };
        if place.get().is_some() {
            return Ok(());
        }
        debug_assert!(group as u32 <= self.viewer_extents(), "an extent was set aside");
        // No viewer is given this file. Its mapping is made a second time in `release_viewers`, so it is not `Common`.
        let segment = Segment::create(c"quinion-viewers", EXTENT_SIZE, Sharing::ReadWrite)?;
        if self.control_segment.is_locked() {
            segment.lock()?;
        }
        // Where two threads do this at once one of them is heard.
        if place.set(segment).is_ok() {
            let base = place.get().expect("it was set just now").base();
            // SAFETY: the segment maps an extent, writable, and is dropped with the view, in `Arena`.
            unsafe { self.control.add_group(group, base) };
        }
        Ok(())
    }

    /// Makes a fresh page for viewer `number`, all zeros, and puts it into the mapping of its group in place of the one
    /// that was there: its file. No viewer uses that number meanwhile.
    ///
    /// # Errors
    /// The system refuses.
    ///
    /// # Panics
    /// If the group is not mapped ([`Arena::map_viewers`]).
    pub fn make_viewer_page(&self, number: usize) -> Result<OwnedFd, ArenaError> {
        let file = create_sized(c"quinion-viewer", VIEWER_BYTES, Sharing::ReadWrite)?;
        seal(&file, rustix::fs::SealFlags::SEAL)?;
        let segment = match number / GROUP_VIEWERS {
            0 => &self.control_segment,
            group => self.viewer_segments[group - 1].get().expect("the group is mapped"),
        };
        let offset = page_offset(number);
        segment.map_over(offset, VIEWER_BYTES, file.as_fd()).map_err(no_memory)?;
        // Memory that is there is not missing when it is touched.
        segment
            .populate_pages(offset, VIEWER_BYTES, FileBacking { file: file.as_fd(), at: 0 })
            .map_err(no_memory)?;
        Ok(file)
    }

    /// The arena's numbers now. Locks: Growth, Arena.
    pub fn stats(&self) -> ArenaStats {
        let growth = self.wait_for_growth();
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
            control_bytes: CONTROL_BYTES as u64 + bytes(self.viewer_extents()),
            growth_failures: growth.failures,
            slack_bytes: bytes(stock.excess()),
            returned_bytes: growth.returned,
            pinned_bytes: self.pinned_pages() * PAGE_SIZE as u64,
        }
    }

    /// Checks the arena. Looks at every frame. Locks: Arena, for as long as that takes.
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
        let recent: BTreeSet<u32> = stock.buddy.recent().iter().copied().collect();
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
            let is_recent = recent.contains(&frame.0);
            if is_recent && (taken || stock.emptying.contains_key(&frame.extent())) {
                return Err(format!("{frame:?} is no data, or going, and yet free"));
            }
            let is_unused = taken || is_recent || frame.0 < free_until;
            if is_unused && !is_unclaimed(word) {
                return Err(format!("{frame:?} is no folio's, and its descriptor says {word:?}"));
            }
            if is_unused && self.view.is_page_read(frame) {
                return Err(format!("{frame:?} is no folio's, and its page is said to have been read"));
            }
            let marked = |bits| self.view.count_bits(bits, frame, 1) > 0;
            if is_unused && (marked(BitTable::Dirty) || marked(BitTable::Writeback)) {
                return Err(format!("{frame:?} is no folio's, and its page is said to be dirty or written"));
            }
        }
        Ok(())
    }
}

/// Never 0.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()).max(1)
}

#[cfg(test)]
mod tests;
