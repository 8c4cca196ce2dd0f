//! Pin: a range of a file held in the cache, folio by folio.
//!
//! ```text
//!   from `position` on, batch by batch
//!     1 hold     the folios that are ready; if the first is not, the way of a miss, and wait
//!     2 touch    their referenced bytes; a marker starts the next window, as for a read
//!     3 pin      each hold becomes a pin: from now on these bytes do not change
//!     4 size     looked at after that, so that no byte past the end is lent; and what is of another file than this is
//!                now is given back and sought anew
//!     5 lend     the bytes join the last piece if they lie behind it
//!   if it is an uncached one, what it met goes when it is unpinned, or when its stream has passed, if that is later
//! ```
//!
//! A pin counts as a read, and as a hit if no folio had to be waited for. Pinned memory is bounded, so that readers
//! have memory: a pin that would exceed that fails at once. A folio counts whole, and once.
//!
//! Invariants:
//!  1. The pinned bytes are one range without a hole, from `position` on.
//!  2. On an error nothing stays pinned: the pins gathered are dropped on the way out.
//!
//! Not an invariant: that a pin which fits succeeds while others pin too: two that want the last of the share may both
//! be refused. Nor that the whole range is of one version of the file: each folio is as it was when it was filled.

use std::ops::Range;
use std::sync::Arc;

use crate::arena::{HoldRefused, ReadableState};
use crate::error::Error;
use crate::folio::{HeldFolio, Pinned};
use crate::mapping::{BatchEnd, Mapping, ReadBatch};
use crate::sync::LockWait;
use crate::sys::fork::ForkGuard;
use crate::units::{Frame, PAGE_SIZE, PageIndex, met_end_within_page};

use super::hint::missing_pages;
use super::read::{FirstPage, ReadProgress};
use super::shared::Filemap;
use super::uncached::{ReadCall, Reader};
use super::wait_policy::WaitPolicy;

/// Folios that are looked at under one hold of the tree lock.
const CHECKED_FOLIOS_MAX: usize = 512;

/// A request for [`Filemap::pin`].
#[derive(Clone, Copy, Debug)]
pub struct PinRequest {
    /// The first byte.
    pub position: u64,
    /// Bytes, fewer where the file ends.
    pub len: usize,
    /// If it may not wait, the error says where the missing bytes begin; their fills start as the policy allows.
    pub wait_policy: WaitPolicy,
    /// The process that pins.
    pub process: ForkGuard,
    /// Whether its caller has had some of the bytes fetched: then the pin is no hit.
    pub was_missing: bool,
}

enum ReadyFolios<'m> {
    One(HeldFolio<'m>),
    Batch,
    None(FirstPage<'m>),
}

/// Uses `batch` for more than a page: to set up a batch takes longer than to look one page up.
#[inline]
fn hold_ready<'m>(
    mapping: &'m Mapping,
    index: PageIndex,
    last: PageIndex,
    batch: &mut ReadBatch<'m>,
) -> ReadyFolios<'m> {
    if index == last {
        return match mapping.try_hold(index) {
            Ok(held) if held.is_readable_at(index) == ReadableState::Yes => ReadyFolios::One(held),
            Ok(held) => ReadyFolios::None(FirstPage::Held(held)),
            Err(HoldRefused::Mismatch) => ReadyFolios::None(FirstPage::Absent),
            // It is asked once more, and refused with its reason.
            Err(_) => ReadyFolios::None(FirstPage::Unknown),
        };
    }
    match mapping.get_read_batch(index, last, batch) {
        BatchEnd::FirstNotReady => ReadyFolios::None(batch.pop().into()),
        _ if batch.is_empty() => ReadyFolios::None(FirstPage::Unknown),
        _ => ReadyFolios::Batch,
    }
}

/// Bytes that the file had before they were held, when so many renewals of it had been seen.
struct PinnedByteRange<'p> {
    call: &'p ReadCall<'p>,
    bytes: Range<u64>,
    renewals: u64,
}

impl Filemap {
    /// Pins the bytes of `request`; waits, if it may, until all of them are in the cache.
    pub fn pin(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        reader: Reader<'_>,
        request: PinRequest,
    ) -> Result<Pinned, Error> {
        let call = ReadCall { mapping, reader, wait_policy: request.wait_policy };
        let pinned = self.pin_known(&call, request)?;
        // Nothing there: as for a read, the file is looked at again, once.
        let may_revalidate = request.wait_policy == WaitPolicy::Wait && !reader.skips_size_check();
        if pinned.is_empty() && request.len > 0 && may_revalidate && self.revalidate_at_end(mapping)? {
            return self.pin_known(&call, request);
        }
        Ok(pinned)
    }

    /// Whether a pin of `bytes` fits beside the pins that there are, before anything is fetched for it. Returns how
    /// many pages are missing: no other pin can have these.
    pub fn check_pin(&self, mapping: &Mapping, bytes: Range<u64>) -> Result<u64, Error> {
        let pages_max = self.bound().pinned_pages_max();
        let reach = bytes.end.min(mapping.size()).saturating_sub(bytes.start);
        let is_larger = reach > pages_max * PAGE_SIZE as u64;
        let missing = if is_larger { pages_max } else { missing_pages(mapping, bytes) };
        if is_larger || self.arena.pinned_pages() + missing > pages_max {
            return Err(self.bound().too_much_pinned(reach));
        }
        Ok(missing)
    }

    fn pin_known(self: &Arc<Self>, call: &ReadCall<'_>, request: PinRequest) -> Result<Pinned, Error> {
        let &ReadCall { mapping, reader, wait_policy } = call;
        let PinRequest { position, len, process, was_missing, .. } = request;
        let pages_max = self.bound().pinned_pages_max();
        let reach = (len as u64).min(mapping.size().saturating_sub(position));
        if reach > pages_max * PAGE_SIZE as u64 {
            return Err(self.bound().too_much_pinned(reach));
        }
        let mut pinned = Pinned::new(Arc::clone(&self.arena), process);
        let mut batch = ReadBatch::new();
        // The check waits for the mapping's lock.
        let (mut hit, mut is_checked) = (!was_missing, was_missing || wait_policy.locks() != LockWait::Wait);
        while pinned.len() < len {
            let (at, rest) = (position + pinned.len() as u64, len - pinned.len());
            // The size, before the data is held; see `read_held`.
            let renewals = mapping.renewals();
            let size = mapping.size();
            // A pin that has met the end of the file within a page is over, as a read is.
            if size <= at || met_end_within_page(position, pinned.len()) {
                break;
            }
            // 1
            let last = PageIndex::of_byte(at.saturating_add(rest as u64 - 1));
            let one = match hold_ready(mapping, PageIndex::of_byte(at), last, &mut batch) {
                ReadyFolios::Batch => None,
                ReadyFolios::One(held) => Some(held),
                ReadyFolios::None(first) => {
                    hit = false;
                    // Pages fetched now are not counted as pinned yet.
                    let fits = match std::mem::replace(&mut is_checked, true) {
                        true => self.arena.pinned_pages() < pages_max,
                        false => self.check_pin(mapping, at..at.saturating_add(rest as u64)).is_ok(),
                    };
                    if !fits {
                        drop(pinned); // the error counts the pins of others
                        return Err(self.bound().too_much_pinned(reach));
                    }
                    let held = self.hold_folio(call, at, rest, first)?;
                    if held.is_none() {
                        break;
                    }
                    held
                }
            };
            // 2 to 5
            let end = position.saturating_add(len as u64).min(size);
            let asked = PinnedByteRange { call, bytes: position..end, renewals };
            let marked = match one {
                Some(held) => self.pin_folio(&asked, &mut pinned, held).marked,
                None => self.pin_batch(&asked, &mut pinned, &mut batch),
            };
            if let Some(page) = marked {
                self.advance(call, page);
            }
            if pinned.count_pages() > pages_max {
                drop(pinned); // as above
                return Err(self.bound().too_much_pinned(reach));
            }
        }
        self.count_read(ReadProgress { done: pinned.len(), hit, stopped: None });
        if let Some((behind, pages)) = reader.flagged() {
            pinned.notify_on_drop(behind, pages);
        }
        reader.end_drop_behind(position, pinned.len(), wait_policy.locks());
        Ok(pinned)
    }

    /// Whether each pinned folio is in the index with all of its pages read: if the file never changes, readers find
    /// it there as long as it is pinned. A folio being filled, or dropped before it was pinned, may have left.
    pub fn is_indexed(&self, mapping: &Mapping, pinned: &Pinned) -> bool {
        pinned.frames().chunks(CHECKED_FOLIOS_MAX).all(|frames| {
            // Folios leave the index, and are checked for pins before that, under this lock.
            let _tree = mapping.lock();
            let stands = |frame: &Frame| {
                let descriptor = self.arena.view().own(*frame);
                descriptor.is_filled() && descriptor.word().is_live()
            };
            frames.iter().all(stands)
        })
    }

    /// Pins the rest of `asked` as far as held folios have it, up to the end or the first that is of an older file.
    /// Returns the first page of the one with the marker.
    fn pin_batch(
        &self,
        asked: &PinnedByteRange<'_>,
        pinned: &mut Pinned,
        batch: &mut ReadBatch<'_>,
    ) -> Option<PageIndex> {
        let mut marked = None;
        for held in batch.drain() {
            let step = self.pin_folio(asked, pinned, held);
            marked = step.marked.or(marked);
            if !step.is_whole {
                break; // what follows does not lie behind what there is
            }
        }
        marked
    }

    #[inline]
    fn pin_folio(
        &self,
        PinnedByteRange { call, bytes: asked, renewals }: &PinnedByteRange<'_>,
        pinned: &mut Pinned,
        held: HeldFolio<'_>,
    ) -> PinStep {
        let &&ReadCall { mapping, reader, .. } = call;
        let marked = held.has_marker().then(|| held.first());
        let at = asked.start + pinned.len() as u64;
        let left = || {
            let left = mapping.left_since(*renewals, at).unwrap_or(0);
            left.min(asked.end.saturating_sub(at)) as usize
        };
        let behind = held.first().plus(u64::from(held.order().pages())).first_byte();
        reader.touch(self.arena.view().grown(), held.frame());
        let is_whole = at + (pinned.add(held, at, left) as u64) >= behind;
        PinStep { marked, is_whole }
    }
}

struct PinStep {
    marked: Option<PageIndex>,
    is_whole: bool,
}
