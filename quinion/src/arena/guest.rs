//! Guest: extents with a file of their own, for memory that others map as a whole.
//!
//! ```text
//!   frames      0       512 ...                                    top - n          top
//!   arena       | meta  | data | cells | punched | not yet .....   | n extents      |
//!   behind them   the arena's file --------------------------------| guest's file   |      mmap(MAP_FIXED)
//!
//!   take    room for n extents within the bound, side by side, with no memory  ->  a sealed memfd over them
//!   claim   page i of the guest is frame `first + i`, claimed by one thread at a time; its memory, if it has none yet
//!   free    as any frame: it is unclaimed, and is never given to another
//!   drop    no handle, and every frame unclaimed  ->  the arena's file over them again; they are punched extents
//! ```
//!
//! Guest memory has to lie in one piece: a virtual machine maps it with one call, by one descriptor. So it is made of
//! whole extents that follow each other, behind which a memory file of its own lies. Their frames are frames like
//! others; only their allocation differs: the buddy never has them. Each has its one **place**, and a thread that wants
//! a page of the guest **claims** the frame at its place. Of two that want one absent page the other looks again.
//!
//! **What counts.** All n extents count as grown as long as they are taken, whether their pages have memory yet or not.
//! So the bound holds whatever the processes do that map the file.
//!
//! **Why the change of mapping harms no reader.** Before a guest is taken, its extents were never grown, or are
//! punched: only a reader that is past its first look is there (`shrink.rs`), and it throws its copy away. When it is
//! given back every folio there was retired, and a fence lies between that and the change; again the second look tells.
//! The kernel puts the one mapping in the other's place under its own lock, so that a thread that touches the range
//! finds either. A device writes there only for a fill or a hold, which keeps its frames claimed.
//!
//! **Viewers** map the arena's file alone and find holes where guests are. Nothing leads them there: a guest's mapping
//! is told to no viewer, and a stale number ends at a descriptor of another mapping.
//!
//! **What a late reader costs** is a page of the arena's file, until the next sweep, or of the guest's, which counts.
//!
//! **What others keep.** When a guest is given back its file is closed here. A process that still maps it keeps its
//! memory, which does not count any more. (Emptying the file would hand it zeros.)
//!
//! Invariants (asserted by [`Arena::check`]):
//!  1. No frame of a guest is in the buddy, none of its extents is data, cells or punched, and each counts as grown.
//!  2. A frame that heads or belongs to a folio is claimed. An unclaimed frame has no user.
//!  3. A frame is claimed once until it is freed, and freed once until it is claimed.
//!  4. Guests do not overlap.
//!
//! Not an invariant: that the pages of a guest have memory: they get it when they are claimed. Nor that taking succeeds
//! while the bound has room: other extents may lie in the way. [`Arena::demand_guest`] chooses which of them to empty;
//! extents of cells cannot be.
//!
//! Locks: Growth around taking and giving back, Arena for claims; and a leaf for each extent around giving it memory.
#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FallocateFlags, SealFlags};
use rustix::process::{Resource, getrlimit};

use super::guests::{Guest, WORD, clear, is_set, set};
use super::options::{ArenaError, no_memory};
use super::owner::Arena;
use super::segment::{FileBacking, PageSize, Sharing, create_sized, seal};
use super::shrink::{EmptyingCost, is_pinned};
use super::stock::FrameStock;
use crate::sync::LockWait;
use crate::units::{EXTENT_PAGES, EXTENT_SIZE, Frame, PAGE_SIZE, PageIndex};
use quinion_view::arena::before_bytes;

/// The processes that may write the memory of a guest, besides the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GuestUse {
    /// Any that is given the descriptor: a virtual machine's own memory.
    Shared,
    /// No process but the owner: others map it privately, or to read. Sealed, where the kernel knows that seal (5.1).
    Frozen,
}

/// Why there is no guest.
#[derive(Debug)]
pub enum GuestRefused {
    /// No place for the guest is free now: consecutive extents without memory, within the bound.
    NoSpace,
    /// The system, or a limit, refuses.
    Failed(ArenaError),
}

impl From<ArenaError> for GuestRefused {
    fn from(error: ArenaError) -> Self {
        GuestRefused::Failed(error)
    }
}

/// The result of a request for frames at their places.
#[derive(Debug)]
pub enum ClaimOutcome {
    /// The first so many of the pages, at least one, are the caller's now, and have memory. They are freed as any.
    Pages(u32),
    /// The first of them is taken: by a folio that is there or about to be, or one that has left and is still held.
    Taken,
    /// The lock of the lists is busy, and the caller does not wait.
    Busy,
    /// The machine has no memory for the first of them.
    NoMemory(std::io::Error),
}

/// Extents of a guest. Given back when this is dropped and every frame of it is unclaimed.
pub struct GuestExtents {
    arena: Arc<Arena>,
    first: Frame,
    pages: u32,
    file: OwnedFd,
    /// Which pages of each extent have memory.
    backing: Box<[Mutex<ExtentBacking>]>,
}

#[derive(Debug)]
enum ExtentBacking {
    Nothing,
    All(PageSize),
    But(Box<Bitmap>),
}

type Bitmap = [u64; EXTENT_PAGES as usize / WORD as usize];

impl GuestExtents {
    /// The frames of it, in the order of its pages.
    pub fn frames(&self) -> Range<Frame> {
        self.first..self.first.plus(self.pages)
    }
    /// How many pages it has: whole extents.
    pub fn pages(&self) -> u32 {
        self.pages
    }
    /// The frame that page `index` has, claimed or not; `None` behind the end.
    pub fn place(&self, index: PageIndex) -> Option<Frame> {
        (index.0 < u64::from(self.pages)).then(|| self.first.plus(index.0 as u32))
    }
    /// The guest's file, open for reading and writing.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
    /// Where its first byte is mapped in this process, for as long as this lives.
    pub fn address(&self) -> NonNull<u8> {
        let at = self.arena.view().bytes(self.first).expect("frames of ours exist");
        NonNull::new(at).expect("no frame is at address 0")
    }
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Claims as many of `pages` pages (at least one) from `index` on as follow each other unclaimed, and gives them
    /// memory: which may take half a millisecond for each 2 MiB that have none yet.
    ///
    /// # Panics
    /// If some of them are behind the end.
    pub fn claim(&self, index: PageIndex, pages: u32, locks: LockWait) -> ClaimOutcome {
        let first = self.place(index).expect("a page of the guest");
        assert!(
            pages > 0 && index.0 + u64::from(pages) <= u64::from(self.pages),
            "{pages} pages from {index:?}"
        );
        let claimed = {
            let Some(mut stock) = self.arena.stock.lock_as(locks) else { return ClaimOutcome::Busy };
            let (_, guest) = stock.guests.of_mut(first.extent()).expect("a guest of ours is in stock");
            guest.claim(first, pages)
        };
        if claimed == 0 {
            return ClaimOutcome::Taken;
        }
        match self.back(first, claimed) {
            (0, Some(error)) => {
                self.arena.free_run(first, claimed);
                ClaimOutcome::NoMemory(error)
            }
            (backed, _) => {
                if backed < claimed {
                    self.arena.free_run(first.plus(backed), claimed - backed);
                }
                ClaimOutcome::Pages(backed)
            }
        }
    }

    pub fn claimed_pages(&self) -> u64 {
        let stock = self.arena.stock.lock();
        stock.guests.of(self.first.extent()).map_or(0, |(_, guest)| u64::from(guest.claimed_pages))
    }

    /// Gives the memory of `pages` pages from `index` on back to the machine, in every process that maps the file; it
    /// reads as zeros there. It counts against the bound all the same, and comes back with the next claim. Claimed
    /// pages are left alone: returns how many were not.
    ///
    /// # Errors
    /// The system refuses; some of the memory may be gone.
    pub fn punch(&self, index: PageIndex, pages: u32) -> std::io::Result<u32> {
        let (mut done, mut at) = (0, 0);
        while at < pages {
            let page = index.plus(u64::from(at));
            let frame = self.place(page).expect("a page of the guest");
            let rest = (pages - at).min(EXTENT_PAGES - frame.0 % EXTENT_PAGES);
            let claimed = {
                let mut stock = self.arena.stock.lock();
                let (_, guest) = stock.guests.of_mut(frame.extent()).expect("a guest of ours is in stock");
                guest.claim(frame, rest)
            };
            if claimed == 0 {
                at += 1;
                continue;
            }
            let punched = self.unback(page, claimed);
            self.arena.free_run(frame, claimed);
            punched?;
            (done, at) = (done + claimed, at + claimed);
        }
        Ok(done)
    }

    /// Extents of it that are one page of 2 MiB, and extents that have some memory.
    pub fn extents(&self) -> (u64, u64) {
        self.backing.iter().fold((0, 0), |(huge, some), backing| {
            match &*backing.lock().unwrap_or_else(PoisonError::into_inner) {
                ExtentBacking::Nothing => (huge, some),
                ExtentBacking::All(PageSize::Huge) => (huge + 1, some + 1),
                ExtentBacking::All(PageSize::Small) | ExtentBacking::But(_) => (huge, some + 1),
            }
        })
    }

    /// Sees to it that `pages` pages from `index` on have memory, whichever has them: for a caller that uses the
    /// guest's memory without claiming it. As [`GuestExtents::claim`].
    ///
    /// # Errors
    /// The machine has no memory; some of them may have some.
    ///
    /// # Panics
    /// If some of them are behind the end.
    pub fn give_memory(&self, index: PageIndex, pages: u32) -> std::io::Result<()> {
        assert!(index.0 + u64::from(pages) <= u64::from(self.pages), "{pages} pages from {index:?}");
        let first = self.first.plus(index.0 as u32);
        if let (_, Some(why)) = self.back(first, pages) {
            return Err(why);
        }
        // A thread that has the file open for writing may have made holes in it since.
        let (bytes, at) = (pages as usize * PAGE_SIZE, index.first_byte());
        self.arena.arena_segment.populate_pages(
            first.offset(),
            bytes,
            FileBacking { file: self.file.as_fd(), at },
        )
    }

    /// Gives `pages` claimed frames from `first` on memory; how many from the first on have some, and why not all.
    fn back(&self, first: Frame, pages: u32) -> (u32, Option<std::io::Error>) {
        let mut done = 0;
        while done < pages {
            let frame = first.plus(done);
            let rest = (pages - done).min(EXTENT_PAGES - frame.0 % EXTENT_PAGES);
            if let Err(error) = self.back_in_extent(frame, rest) {
                return (done, Some(error));
            }
            done += rest;
        }
        (done, None)
    }

    /// As [`GuestExtents::back`], in one extent. A thread that finds another at it waits for that.
    fn back_in_extent(&self, frame: Frame, pages: u32) -> std::io::Result<()> {
        let segment = &self.arena.arena_segment;
        let extent = frame.extent();
        let nth = extent - self.first.extent();
        let mut backing = self.backing[nth as usize].lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *backing {
            ExtentBacking::All(_) => {}
            ExtentBacking::Nothing => {
                let at = u64::from(nth) * EXTENT_SIZE as u64;
                *backing = ExtentBacking::All(
                    segment.populate_extent(extent, FileBacking { file: self.file.as_fd(), at })?,
                );
            }
            ExtentBacking::But(missing) => {
                let inside = frame.0 % EXTENT_PAGES;
                if (inside..inside + pages).any(|page| is_set(&missing[..], page)) {
                    let at = u64::from(frame.0 - self.first.0) * PAGE_SIZE as u64;
                    let bytes = pages as usize * PAGE_SIZE;
                    segment.populate_pages(
                        frame.offset(),
                        bytes,
                        FileBacking { file: self.file.as_fd(), at },
                    )?;
                    (inside..inside + pages).for_each(|page| clear(&mut missing[..], page));
                }
            }
        }
        Ok(())
    }

    fn unback(&self, index: PageIndex, pages: u32) -> std::io::Result<()> {
        let nth = index.0 as usize / EXTENT_PAGES as usize;
        let mut backing = self.backing[nth].lock().unwrap_or_else(PoisonError::into_inner);
        // Also if the punch fails: a page marked as without memory is given some before it is used.
        *backing = match std::mem::replace(&mut *backing, ExtentBacking::Nothing) {
            // None that is known: a process that has the file open may have touched it.
            ExtentBacking::Nothing => ExtentBacking::Nothing,
            some => {
                let mut missing = match some {
                    ExtentBacking::But(missing) => missing,
                    _ => Box::new([0; EXTENT_PAGES as usize / WORD as usize]),
                };
                let inside = index.0 as u32 % EXTENT_PAGES;
                (inside..inside + pages).for_each(|page| set(&mut missing[..], page));
                ExtentBacking::But(missing)
            }
        };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = u64::from(pages) * PAGE_SIZE as u64;
        Ok(rustix::fs::fallocate(&self.file, flags, index.first_byte(), bytes)?)
    }
}

impl fmt::Debug for GuestExtents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestExtents")
            .field("first", &self.first)
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

impl Drop for GuestExtents {
    fn drop(&mut self) {
        if !self.arena.arena_segment.is_here() {
            return; // a forked child: the arena is not mapped here, and something else may be
        }
        let ended = {
            let mut stock = self.arena.stock.lock();
            let (_, guest) = stock.guests.of_mut(self.first.extent()).expect("a guest of ours is in stock");
            guest.is_closing = true;
            guest.claimed_pages == 0
        };
        // Otherwise the thread that frees the last of its frames ends it.
        if ended {
            self.arena.end_guests();
        }
    }
}

impl Arena {
    /// Takes `extents` extents that follow each other for a guest, named `name` in `/proc`. They count as grown from
    /// now on; their pages get their memory when they are claimed. Locks: Growth, Arena.
    ///
    /// # Errors
    /// There is no room for them, at once or within the bound; or the system refuses, or the file would be larger than
    /// this process may make one (`RLIMIT_FSIZE`).
    pub fn take_guest(
        self: &Arc<Self>,
        extents: u32,
        name: &CStr,
        usage: GuestUse,
    ) -> Result<GuestExtents, GuestRefused> {
        let bytes = extents as usize * EXTENT_SIZE;
        // 1 room
        let mut growth = self.wait_for_growth();
        let first =
            self.stock.lock().place_for_guest(self.extents_meta(), extents).ok_or(GuestRefused::NoSpace)?;
        // 2 a file; for a length above the limit of files the kernel sends a signal, in place of an error
        if let Some(max) = getrlimit(Resource::Fsize).current.filter(|max| *max < bytes as u64) {
            return Err(ArenaError::TooLarge { asked: bytes as u64, max }.into());
        }
        let sharing = match usage {
            GuestUse::Shared => Sharing::ReadWrite,
            GuestUse::Frozen => Sharing::ReadOnly,
        };
        let file = create_sized(name, bytes, sharing)?;
        let fresh = self.view.frames_grown()..(first + extents) * EXTENT_PAGES;
        self.make_entries(&mut growth.tables, fresh).map_err(no_memory)?;
        // 3 over the extents. A reader that is past its first look there throws its copy away (head of this file).
        let offset = first as usize * EXTENT_SIZE;
        if let Err(source) = self.arena_segment.map_over(offset, bytes, file.as_fd()) {
            self.restore_mapping(first, extents);
            return Err(ArenaError::System { call: "mmap", source }.into());
        }
        let sealed = seal_for(&file, usage);
        if let Err(error) = sealed {
            self.restore_mapping(first, extents);
            return Err(error.into());
        }
        // 4 known to viewers
        let first = Frame(first * EXTENT_PAGES);
        let mut stock = self.stock.lock();
        stock.add_guest(first, extents);
        // As in `grow`: a thread that sees the new number finds memory, or a hole, and odd descriptors.
        self.publish(&stock);
        drop((stock, growth));
        let pages = u64::from(extents) * u64::from(EXTENT_PAGES);
        self.guest_pages.fetch_add(pages, Ordering::Relaxed); // a number for reports and bounds
        let backing = (0..extents).map(|_| Mutex::new(ExtentBacking::Nothing)).collect();
        Ok(GuestExtents { arena: Arc::clone(self), first, pages: extents * EXTENT_PAGES, file, backing })
    }

    fn restore_mapping(&self, first: u32, extents: u32) -> bool {
        let (offset, bytes) = (first as usize * EXTENT_SIZE, extents as usize * EXTENT_SIZE);
        self.arena_segment.restore_mapping(offset, bytes).is_ok()
    }

    /// Gives back the extents of guests whose handles are gone and whose frames have all come back. Where the system
    /// refuses they go on counting, and the next call tries again. Locks: Growth, Arena.
    pub fn end_guests(&self) {
        let mut growth = self.wait_for_growth();
        let ended: Vec<(u32, u32)> = {
            let stock = self.stock.lock();
            let ended =
                stock.guests.by_first.values().filter(|guest| guest.is_closing && guest.claimed_pages == 0);
            ended.map(|guest| (guest.first.extent(), guest.extents)).collect()
        };
        // Partner: the Acquire fence in `end_read`. A reader of bytes that are not the folio's sees that it was
        // retired.
        before_bytes();
        for (first, extents) in ended {
            // No other thread has it: one that takes or gives back has the growth lock, and claims are not possible.
            if self.restore_mapping(first, extents) {
                self.stock.lock().remove_guest(first);
                growth.returned += u64::from(extents) * EXTENT_SIZE as u64;
                self.guest_pages.fetch_sub(u64::from(extents) * u64::from(EXTENT_PAGES), Ordering::Relaxed);
            }
        }
    }

    /// Chooses where a guest of `extents` extents could be: the extents in the way are emptied from now on, and as many
    /// others as the bound needs; see [`Arena::choose_emptying`]. No growth takes the extents meanwhile. `false`:
    /// nowhere. One demand at a time, by a thread that has the lock of resizing; [`Arena::end_demand`] takes it back.
    /// Locks: Growth, Arena. Cost: a look at each frame's descriptor, outside the locks.
    pub fn demand_guest(&self, extents: u32) -> bool {
        let meta = self.extents_meta();
        let end = self.view.layout().frames_max / EXTENT_PAGES;
        let data: Vec<u32> = {
            let stock = self.stock.lock();
            (meta..end)
                .filter(|extent| stock.is_data(*extent) || stock.emptying.contains_key(extent))
                .collect()
        };
        let costs: BTreeMap<u32, (bool, EmptyingCost)> = data
            .into_iter()
            .map(|extent| (extent, (is_pinned(&self.view, extent), EmptyingCost::of(&self.view, extent))))
            .collect();
        let _growth = self.wait_for_growth();
        let mut stock = self.stock.lock();
        // Within the bound, with an extent or two of data left, what of the rest does not matter?
        let kept = meta + stock.cells.extents() + stock.guests.extents() + stock.reserve_left() + 2;
        if extents == 0 || u64::from(kept) + u64::from(extents) > u64::from(stock.extents_max) {
            return false;
        }
        let Some(first) = cheapest_window(meta..end, extents, |extent| match costs.get(&extent) {
            _ if stock.has_no_memory(extent) => Some(EmptyingCost::NOTHING),
            Some((false, cost)) => Some(*cost),
            _ => None,
        }) else {
            return false;
        };
        stock.guests.demand = Some(first..first + extents);
        for extent in first..first + extents {
            if stock.is_data(extent) {
                stock.close(&self.view, extent);
            }
        }
        true
    }

    /// Ends a demand, met or given up: extents that are still being emptied for it become data again.
    pub fn end_demand(&self) {
        let _growth = self.wait_for_growth();
        let mut stock = self.stock.lock();
        stock.guests.demand = None;
        stock.reopen_surplus(&self.view, self.extents_meta());
    }

    pub(super) fn check_guests(&self, stock: &FrameStock) -> Result<(), String> {
        let mut end = self.extents_meta();
        for (first, guest) in &stock.guests.by_first {
            if *first < end || guest.end() > stock.extents_reached {
                return Err(format!("the guest at extent {first} overlaps another, or lies outside"));
            }
            end = guest.end();
            let elsewhere = |extent: &u32| {
                stock.punched.contains(extent)
                    || stock.emptying.contains_key(extent)
                    || stock.huge.contains(extent)
                    || stock.cells.has_extent(*extent)
            };
            if let Some(extent) = (*first..end).find(elsewhere) {
                return Err(format!("extent {extent} is a guest's, and something else"));
            }
            let claimed: u32 = guest.claimed.iter().map(|word| word.count_ones()).sum();
            if claimed != guest.claimed_pages {
                return Err(format!(
                    "a guest counts {} claimed pages and has {claimed}",
                    guest.claimed_pages
                ));
            }
            let frames = (first * EXTENT_PAGES..end * EXTENT_PAGES).map(Frame);
            frames
                .filter(|frame| self.view.own(*frame).free_order().is_some())
                .try_for_each(|frame| Err(format!("{frame:?} is a guest's, and in the buddy")))?;
        }
        let extents: u32 = stock.guests.by_first.values().map(|guest| guest.extents).sum();
        if extents == stock.guests.extents {
            Ok(())
        } else {
            Err(format!("guests have {extents} extents, {} are counted", stock.guests.extents))
        }
    }
}

impl FrameStock {
    /// Whether `extent` has no memory: it never had some, or is punched.
    pub(super) fn has_no_memory(&self, extent: u32) -> bool {
        extent >= self.extents_reached || self.punched.contains(&extent)
    }

    /// The highest place for `extents` extents in a row without memory, within the bound; or that of the demand.
    fn place_for_guest(&self, meta: u32, extents: u32) -> Option<u32> {
        let capacity = self.extents_max.saturating_sub(self.extents_grown + self.reserve_left());
        if extents == 0 || capacity < extents {
            return None;
        }
        if let Some(range) = self.guests.demand() {
            return range.clone().all(|extent| self.has_no_memory(extent)).then_some(range.start);
        }
        let mut free = 0;
        for extent in (meta..self.extents_all).rev() {
            free = if self.has_no_memory(extent) { free + 1 } else { 0 };
            if free == extents {
                return Some(extent);
            }
        }
        None
    }

    /// Extents between those grown before and these never had memory, and count as punched.
    fn add_guest(&mut self, first: Frame, extents: u32) {
        let (from, end) = (first.extent(), first.extent() + extents);
        (self.extents_reached..from).for_each(|extent| {
            self.punched.insert(extent);
        });
        (from..end).for_each(|extent| {
            self.punched.remove(&extent);
        });
        self.extents_reached = self.extents_reached.max(end);
        self.extents_grown += extents;
        self.guests.extents += extents;
        self.guests.demand = None;
        self.guests.by_first.insert(from, Guest::new(first, extents));
    }

    fn remove_guest(&mut self, first: u32) {
        let guest = self.guests.by_first.remove(&first).expect("it is a guest");
        debug_assert!(
            guest.is_closing && guest.claimed_pages == 0,
            "a guest ends when no process has any of it"
        );
        self.punched.extend(first..guest.end());
        self.guests.extents -= guest.extents;
        self.extents_grown -= guest.extents;
        self.note_lowered();
    }
}

fn seal_for(file: &OwnedFd, usage: GuestUse) -> Result<(), ArenaError> {
    if usage == GuestUse::Frozen {
        // The mapping that is there may write on; a kernel that does not know it has only the file's mode.
        let _before_5_1 = rustix::fs::fcntl_add_seals(file, SealFlags::FUTURE_WRITE);
    }
    seal(file, SealFlags::SEAL)
}

/// The highest of the windows of `extents` extents in `all` that cost least; `cost` is `None` where none can be had.
fn cheapest_window(all: Range<u32>, extents: u32, cost: impl Fn(u32) -> Option<EmptyingCost>) -> Option<u32> {
    let costs: Vec<Option<EmptyingCost>> = all.clone().map(cost).collect();
    let (mut blocked, mut held, mut evicted) = (0u32, 0u64, 0u64);
    let mut best: Option<((u64, u64), u32)> = None;
    for (at, added) in costs.iter().enumerate() {
        let left = at.checked_sub(extents as usize).map(|at| costs[at]);
        for (cost, sign) in [(Some(*added), 1i64), (left, -1)] {
            match cost {
                Some(Some(cost)) => {
                    held = held.wrapping_add_signed(sign * i64::from(cost.held_pages));
                    evicted = evicted.wrapping_add_signed(sign * i64::from(cost.evicted_pages));
                }
                Some(None) => blocked = blocked.wrapping_add_signed(sign as i32),
                None => {}
            }
        }
        let is_whole = at + 1 >= extents as usize;
        if is_whole && blocked == 0 && best.is_none_or(|(least, _)| (held, evicted) <= least) {
            best = Some(((held, evicted), all.start + at as u32 + 1 - extents));
        }
    }
    best.map(|(_, first)| first)
}

#[cfg(test)]
mod tests {
    use super::super::{ArenaOptions, Reservation, Swap};
    use super::*;
    use crate::units::{MappingId, Order};
    use rustix::fs::fstat;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::AtomicU32;

    const SMALL: u64 = Arena::MEMORY_MIN;
    const EXTENT: u64 = EXTENT_SIZE as u64;

    fn arena(memory: u64) -> Arc<Arena> {
        Arc::new(Arena::build(ArenaOptions { memory }).unwrap())
    }
    fn guest(arena: &Arc<Arena>, extents: u32) -> GuestExtents {
        arena.take_guest(extents, c"quinion-guest-test", GuestUse::Shared).unwrap()
    }
    fn page(index: u64) -> PageIndex {
        PageIndex(index)
    }
    fn claim(guest: &GuestExtents, first: u64, pages: u32) -> u32 {
        match guest.claim(page(first), pages, LockWait::Wait) {
            ClaimOutcome::Pages(pages) => pages,
            ClaimOutcome::Taken => 0,
            refused => panic!("{refused:?}"),
        }
    }
    fn taken(file: BorrowedFd<'_>) -> u64 {
        fstat(file).unwrap().st_blocks as u64 * 512
    }
    fn no_space(refused: Result<GuestExtents, GuestRefused>) -> bool {
        matches!(refused, Err(GuestRefused::NoSpace))
    }
    fn drain(arena: &Arena, order: Order) -> Vec<(Frame, Order)> {
        std::iter::from_fn(|| arena.alloc(order)).map(|frame| (frame, order)).collect()
    }

    #[test]
    fn all_guest_memory_counts_at_once_and_goes_at_the_end() {
        let arena = arena(SMALL);
        let before = arena.stats();
        let guest = guest(&arena, 3);
        let stats = arena.stats();
        assert_eq!((stats.guest_bytes, stats.data_bytes), (3 * EXTENT, before.data_bytes));
        assert_eq!(stats.grown_bytes, before.grown_bytes + 3 * EXTENT);
        assert_eq!(taken(guest.file()), 0, "its memory comes with the claims");
        assert_eq!(claim(&guest, 600, 10), 10);
        assert_eq!(taken(guest.file()), EXTENT);
        assert_eq!(claim(&guest, 0, u32::try_from(3 * 512).unwrap()), 600, "up to what is claimed");
        assert_eq!(claim(&guest, 610, 512), 512);
        assert_eq!(taken(guest.file()), 3 * EXTENT);
        arena.check().unwrap();

        // The rest of the bound remains for others, to the byte.
        let data = drain(&arena, Order::MAX);
        let full = arena.stats();
        assert!(full.grown_bytes + full.control_bytes <= SMALL, "{full:?}");
        assert_eq!(
            data.len() as u64 + 3 + 1,
            (SMALL - full.control_bytes - full.meta_bytes) / EXTENT,
            "and the reserve"
        );
        arena.free_all(&data);

        let frame = |index| guest.place(page(index)).unwrap();
        arena.free_run(frame(0), 610);
        arena.free_run(frame(610), 512);
        assert_eq!(guest.claimed_pages(), 0);
        drop(guest);
        let stats = arena.stats();
        assert_eq!((stats.guest_bytes, stats.returned_bytes), (0, 3 * EXTENT));
        arena.check().unwrap();
        assert_eq!(drain(&arena, Order::MAX).len(), data.len() + 3, "others grow into it");
    }

    #[test]
    fn a_page_is_claimed_by_one_at_a_time() {
        let arena = arena(SMALL);
        let guest = guest(&arena, 2);
        let (turns, most) = (AtomicU32::new(0), 4);
        let held: Vec<std::sync::atomic::AtomicBool> = (0..1024).map(|_| false.into()).collect();
        std::thread::scope(|scope| {
            for thread in 0..most {
                let (guest, held, turns, arena) = (&guest, &held, &turns, &arena);
                scope.spawn(move || {
                    let mut random = 0x9e37_79b9u32.wrapping_mul(thread + 1);
                    for _ in 0..2000 {
                        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        let (first, pages) = (u64::from(random >> 8) % 1000, 1 + random % 24);
                        let got = claim(guest, first, pages);
                        let mine = || held[first as usize..][..got as usize].iter();
                        assert!(mine().all(|held| !held.swap(true, Ordering::Relaxed)), "claimed twice");
                        mine().for_each(|held| held.store(false, Ordering::Relaxed));
                        if got > 0 {
                            turns.fetch_add(1, Ordering::Relaxed);
                            arena.free_run(guest.place(page(first)).unwrap(), got);
                        }
                    }
                });
            }
        });
        assert!(turns.load(Ordering::Relaxed) > 0);
        assert_eq!(guest.claimed_pages(), 0);
        arena.check().unwrap();
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_page_is_freed_once() {
        let arena = arena(SMALL);
        let guest = guest(&arena, 1);
        arena.free_run(guest.place(page(5)).unwrap(), 1);
    }

    /// A folio that is held when its guest's handle goes keeps its bytes, and the guest's memory, until it is put.
    #[test]
    fn held_pages_outlive_the_guests_handle() {
        let arena = arena(SMALL);
        let guest = guest(&arena, 2);
        assert_eq!(claim(&guest, 7, 1), 1);
        let frame = guest.place(page(7)).unwrap();
        let folio = arena.view().own(frame);
        folio.prepare(MappingId(1), page(7), Order(0));
        let bytes = arena.view().bytes(frame).unwrap();
        // SAFETY: the frame is this test's.
        #[allow(unsafe_code)]
        unsafe {
            bytes.write_volatile(42);
        }
        assert_eq!(folio.retire(), super::super::RetireOutcome::Held, "a folio begins with its fill's hold");
        drop(guest);
        assert_eq!(arena.stats().guest_bytes, 2 * EXTENT);
        arena.check().unwrap();
        // SAFETY: as above.
        #[allow(unsafe_code)]
        let there = unsafe { bytes.read_volatile() };
        assert_eq!(there, 42);
        match folio.complete() {
            super::super::FillEnd::Detached(super::super::PutOutcome::Last(order)) => {
                arena.free(frame, order)
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(arena.stats().guest_bytes, 0);
        arena.check().unwrap();
        // The arena's file lies there again, without memory; a reader that looks late finds zeros.
        let bare = taken(arena.arena_fd());
        // SAFETY: the address is mapped as long as the arena is.
        #[allow(unsafe_code)]
        let there = unsafe { bytes.read_volatile() };
        assert_eq!((there, taken(arena.arena_fd()) - bare), (0, 4096));
        assert_eq!((arena.sweep(), taken(arena.arena_fd())), (1, bare));
    }

    /// A late reader of an extent that became a guest's finds the guest's file there; the arena's stays empty.
    #[test]
    fn memory_below_a_guest_is_swept_too() {
        let arena = arena(SMALL);
        let guest = guest(&arena, 1);
        let offset = guest.place(page(0)).unwrap().offset() as u64;
        let before = taken(arena.arena_fd());
        // As a viewer does that maps the arena's file.
        rustix::io::pwrite(arena.arena_fd(), &[0; 8192], offset).unwrap();
        assert_eq!(arena.sweep(), 1);
        assert_eq!(taken(arena.arena_fd()), before);
        assert_eq!(claim(&guest, 0, 512), 512);
        assert_eq!((arena.sweep(), taken(guest.file())), (0, EXTENT), "and the guest's memory is its own");
    }

    #[test]
    fn memory_is_given_back_page_by_page_and_comes_again() {
        let arena = arena(SMALL);
        let guest = guest(&arena, 2);
        assert_eq!(claim(&guest, 0, 1024), 1024);
        let frame = |index| guest.place(page(index)).unwrap();
        arena.free_run(frame(100), 10);
        arena.free_run(frame(511), 2);
        assert_eq!(guest.punch(page(90), 500).unwrap(), 12, "what is claimed stays");
        assert_eq!(taken(guest.file()), 2 * EXTENT - 12 * 4096);
        assert_eq!(arena.stats().guest_bytes, 2 * EXTENT, "and it counts all the same");
        assert_eq!(claim(&guest, 511, 9), 2);
        assert_eq!(taken(guest.file()), 2 * EXTENT - 10 * 4096);
        assert_eq!(claim(&guest, 99, 9), 0);
        assert_eq!(claim(&guest, 100, 10), 10);
        assert_eq!(taken(guest.file()), 2 * EXTENT);
        arena.check().unwrap();
    }

    #[test]
    fn guests_fit_up_to_the_bound_and_no_further() {
        let arena = arena(SMALL);
        let stats = arena.stats();
        let all = ((SMALL - stats.control_bytes - stats.meta_bytes) / EXTENT) as u32;
        assert!(no_space(arena.take_guest(0, c"quinion-guest-test", GuestUse::Shared)));
        assert!(
            no_space(arena.take_guest(all, c"quinion-guest-test", GuestUse::Shared)),
            "the reserve for cells"
        );
        let most = guest(&arena, all - 1);
        assert!(arena.alloc(Order(0)).is_none() && arena.alloc_cell().is_some());
        arena.check().unwrap();
        assert!(no_space(arena.take_guest(1, c"quinion-guest-test", GuestUse::Shared)));
        drop(most);
        assert_eq!(guest(&arena, 1).pages(), 512);
    }

    #[test]
    fn room_is_made_side_by_side_in_a_full_arena() {
        let arena = arena(24 << 20);
        let cell = arena.alloc_cell().unwrap();
        let data = drain(&arena, Order::MAX);
        assert!(no_space(arena.take_guest(4, c"quinion-guest-test", GuestUse::Shared)));
        assert!(!arena.demand_guest(1000), "nowhere, whatever is emptied");
        // Two in the lower middle stay in use: pinned, as it were, so they are not chosen.
        let (kept, go): (Vec<_>, Vec<_>) = data.iter().copied().partition(|(frame, _)| *frame == data[1].0);
        for &(frame, order) in &kept {
            arena.view().own(frame).prepare(MappingId(1), page(0), order);
        }
        assert!(arena.demand_guest(4));
        let chosen = arena.choose_emptying();
        assert!(chosen.len() >= 4 && !chosen.contains(&kept[0].0.extent()), "{chosen:?}");
        assert_eq!(arena.punch_empty(), 0, "they are in use yet");
        assert!(no_space(arena.take_guest(4, c"quinion-guest-test", GuestUse::Shared)));
        arena.free_all(&go);
        assert!(
            arena.alloc(Order(0)).is_some_and(|frame| {
                arena.free(frame, Order(0));
                !chosen.contains(&frame.extent())
            }),
            "what is not in the way is free"
        );
        assert!(arena.punch_empty() >= 4);
        let guest = guest(&arena, 4);
        arena.end_demand();
        arena.check().unwrap();
        assert_eq!(claim(&guest, 0, 4 * 512), 4 * 512);
        let stats = arena.stats();
        assert!(stats.grown_bytes + stats.control_bytes <= 24 << 20, "{stats:?}");
        arena.free_cell(cell);
    }

    #[test]
    fn a_demand_that_is_given_up_leaves_nothing_behind() {
        let arena = arena(SMALL);
        let data = drain(&arena, Order::MAX);
        assert!(arena.demand_guest(2));
        assert_eq!(arena.choose_emptying().len(), 2);
        arena.end_demand();
        arena.free_all(&data);
        assert_eq!(arena.stats().leaving_pages, 0);
        arena.check().unwrap();
        assert_eq!(drain(&arena, Order::MAX).len(), data.len());
    }

    #[test]
    fn a_bound_below_the_memory_of_guests_is_refused() {
        let options = ArenaOptions { memory: 32 << 20 };
        let reservation = Reservation { memory_max: 32 << 20, swap: Swap::Allowed };
        let arena = Arc::new(Arena::build_within(options, reservation).unwrap());
        let guest = guest(&arena, 6);
        let refused = arena.set_bound(SMALL).unwrap_err();
        assert!(
            matches!(refused, ArenaError::TooSmall { min, .. } if min == SMALL + 6 * EXTENT),
            "{refused}"
        );
        arena.set_bound(SMALL + 6 * EXTENT).unwrap();
        drop(guest);
        arena.set_bound(SMALL).unwrap();
        arena.check().unwrap();
    }

    /// A file that is longer than `ulimit -f` would end the process by a signal; here it is an error. In a child, as
    /// the limit is the process's; nothing that it does touches the arena's memory.
    #[test]
    #[allow(unsafe_code)]
    fn a_limit_on_files_is_an_error_and_no_signal() {
        let arena = arena(SMALL);
        // SAFETY: the child sets its own limit, takes locks that are free, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
            // SAFETY: as above; the limit is read from a local.
            unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
            let refused = arena.take_guest(2, c"quinion-guest-test", GuestUse::Shared);
            let told = matches!(refused, Err(GuestRefused::Failed(ArenaError::TooLarge { max, .. })) if max == 1 << 20);
            // SAFETY: it ends the child and nothing else.
            unsafe { libc::_exit(i32::from(!told)) };
        }
        let mut status = -1;
        // SAFETY: the child is this process's.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child's exit status");
    }

    /// Memory that a thread that has the file open took away is given again before it is touched here.
    #[test]
    fn holes_that_others_make_are_filled_before_we_touch_them() {
        let arena = arena(SMALL);
        let guest = guest(&arena, 2);
        guest.give_memory(page(0), 1024).unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(guest.file(), flags, 10 * 4096, 600 * 4096).unwrap();
        guest.give_memory(page(500), 20).unwrap();
        assert_eq!(taken(guest.file()), 2 * EXTENT - 580 * 4096);
    }

    /// An arena that was filled page by page has its cells at the bottom, so that the extents above can be had in one
    /// piece.
    #[test]
    fn cells_do_not_stand_in_the_way() {
        let arena = arena(300 << 20);
        let (mut cells, mut data) = (Vec::new(), Vec::new());
        loop {
            // More cells than any cache needs: a page of them for each 64 pages.
            let more =
                std::iter::from_fn(|| arena.alloc(Order(0)).map(|frame| (frame, Order(0)))).take(64 * 64);
            let before = data.len();
            data.extend(more);
            if data.len() == before {
                break;
            }
            arena.alloc_cells(64 * 8, &mut cells, LockWait::Wait);
        }
        let extents = arena.stats().cell_bytes / EXTENT;
        assert_eq!(extents, 2, "as many as the reserve: {:?}", arena.stats());
        arena.free_all(&data);
        let most = (arena.stats().data_bytes / EXTENT) as u32 - 2;
        assert!(arena.demand_guest(most - 1), "{:?}", arena.stats());
        arena.choose_emptying();
        arena.punch_empty();
        let guest = guest(&arena, most - 1);
        arena.end_demand();
        arena.check().unwrap();
        drop(guest);
        arena.free_cells(cells);
    }

    #[test]
    fn a_frozen_guest_is_not_written_by_others_and_no_guest_is_resized() {
        let arena = arena(SMALL);
        for usage in [GuestUse::Frozen, GuestUse::Shared] {
            let guest = arena.take_guest(1, c"quinion-guest-test", usage).unwrap();
            assert_eq!(claim(&guest, 0, 1), 1, "we do");
            let again = format!("/proc/self/fd/{}", guest.file().as_raw_fd());
            let wrote = rustix::io::pwrite(guest.file(), &[1], 0);
            assert_eq!(wrote.is_ok(), usage == GuestUse::Shared, "{wrote:?}");
            for bytes in [0, EXTENT + 4096] {
                assert_eq!(rustix::fs::ftruncate(guest.file(), bytes), Err(rustix::io::Errno::PERM));
            }
            let reader = std::fs::File::open(again).unwrap();
            assert_eq!(reader.metadata().unwrap().len(), EXTENT);
        }
    }

    #[test]
    fn guest_memory_is_left_out_of_cores_and_children() {
        let arena = arena(SMALL);
        let guest = arena.take_guest(1, c"quinion-guest-smaps", GuestUse::Shared).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let at = maps.find("quinion-guest-smaps").expect("it is mapped");
        let flags = maps[at..].lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        for flag in [" dd", " dc"] {
            assert!(flags.contains(flag), "{flags}");
        }
        drop(guest);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        assert!(!maps.contains("quinion-guest-smaps"));
    }

    #[test]
    fn the_cheapest_window_is_the_highest_of_equals() {
        let cost = |held, evicted| {
            let mut cost = EmptyingCost::NOTHING;
            (cost.held_pages, cost.evicted_pages) = (held, evicted);
            Some(cost)
        };
        let costs =
            [cost(0, 5), cost(0, 1), cost(0, 1), None, cost(0, 0), cost(1, 0), cost(0, 1), cost(0, 1)];
        let window = |extents| cheapest_window(10..18, extents, |extent| costs[extent as usize - 10]);
        assert_eq!(window(1), Some(14));
        assert_eq!(window(2), Some(16), "the higher of two that cost 2");
        assert_eq!(window(3), Some(10), "pages that are held are worse than any evicted");
        assert_eq!(window(4), Some(14));
        assert_eq!(window(5), None);
    }
}
