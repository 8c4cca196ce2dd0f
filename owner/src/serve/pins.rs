//! Pins: ranges of files that stay where they are in memory while a viewer looks at them.
//!
//! A viewer that wants bytes without a copy asks for a pin; the owner holds it, and the viewer finds the pages by the
//! same walk as a read does. A viewer's pins are bounded in number, and in the memory that they keep: a folio is kept
//! whole, however few of its bytes are pinned. A pin ends by a request, with its handle, or when the viewer ends.
//!
//! A pin never ends while its viewer may look at the bytes and does not know:
//!  - A process that has pins is not let in again, as another program or from another part of the same: no viewer
//!    would have these.
//!  - When the service ends and the viewer does not, its pinned pages stay in memory as long as this process does.
//!
//! Invariant: each pin in a viewer slot's list is the owner's, of a handle in the same list of handles.

use std::sync::Arc;

use super::viewer_slot::{PinnedRange, ViewerJob};
use super::viewer_table::ViewerTable;
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::Operation;
use quinion::internals::folio::KeptMemory;
use quinion::internals::sync::contained;
use quinion::internals::units::Order;

const PINS_MAX: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct PinRequest {
    position: u64,
    len: u64,
}

impl PinRequest {
    /// The least memory that it adds, however it is cached: folios at its ends may be kept by other pins.
    fn added_min(&self) -> u64 {
        self.len.saturating_sub(2 * Order::MAX.bytes() as u64)
    }
}

pub(super) struct ViewerPins {
    viewers: Arc<ViewerTable>,
    /// The part of the cache's memory that one viewer may pin, in percent.
    share: u64,
}

impl ViewerPins {
    pub(super) fn new(viewers: Arc<ViewerTable>, share: u64) -> Self {
        Self { viewers, share }
    }

    pub(super) fn answer(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        let [handle, second, len] = job.arguments;
        if job.operation == Operation::Pin as u32 {
            return self.pin(job.viewer, handle, PinRequest { position: second, len });
        }
        self.unpin(job.viewer, handle, second);
        Ok([0, 0])
    }

    fn pin(&self, viewer: usize, handle: u64, range: PinRequest) -> Result<[u64; 2], Errno> {
        let most = self.viewers.owner.arena().stats().bound_bytes * self.share / 100;
        if range.len > most || !self.may_fit(viewer, range, most) {
            return Err(Errno(libc::ENOBUFS));
        }
        let (pin, bytes) = self.viewers.owner.pin(handle, range.position, range.len)?;
        let kept = self.viewers.owner.kept_by(handle, pin).unwrap_or_else(|| KeptMemory::of_bytes(bytes));
        let mut viewer_slot = self.viewers.slot(viewer).lock();
        // The viewer may have pinned more, or given the handle back, meanwhile.
        let is_valid = viewer_slot.handles.contains_key(&handle) && !viewer_slot.is_replaced;
        if is_valid && viewer_slot.pins.len() < PINS_MAX && viewer_slot.kept_bytes_with(&kept) <= most {
            viewer_slot.pins.insert(pin, PinnedRange { handle, kept });
            return Ok([pin, bytes]);
        }
        drop(viewer_slot);
        self.unpin_in_cache(handle, pin);
        Err(Errno(libc::ENOBUFS))
    }

    /// `false`: the pin would be refused once it is made, after its bytes were fetched.
    fn may_fit(&self, viewer: usize, range: PinRequest, most: u64) -> bool {
        let (viewer_slot, added) = (self.viewers.slot(viewer).lock(), range.added_min());
        viewer_slot.pins.len() < PINS_MAX
            && (added == 0 || viewer_slot.kept_bytes_with(&KeptMemory::of_bytes(added)) <= most)
    }

    pub(super) fn unpin(&self, viewer: usize, handle: u64, pin: u64) {
        let mut viewer_slot = self.viewers.slot(viewer).lock();
        if viewer_slot.pins.get(&pin).is_some_and(|known| known.handle == handle) {
            viewer_slot.pins.remove(&pin);
            drop(viewer_slot);
            self.unpin_in_cache(handle, pin);
        }
    }

    fn unpin_in_cache(&self, handle: u64, pin: u64) {
        contained(|| self.viewers.owner.unpin(handle, pin));
    }
}

#[cfg(test)]
mod tests {
    use super::super::viewer_slot::Handle;
    use super::*;
    use crate::{CacheOwner, NameOpener, NameRefusal, NamedObject, RevisionRequest};
    use quinion::backend::MemoryFile;
    use quinion::internals::arena::control::GROUP_VIEWERS;
    use quinion::{Cache, Coherence, Error, File, OpenOptions};

    const MEMORY: u64 = 64 << 20;
    const LEN: usize = 40 << 20;
    const SHARE_PERCENT: u64 = 25;
    const VIEWER: usize = 0;

    #[derive(Clone, Debug)]
    struct Object(File);

    impl NamedObject for Object {
        fn file(&self) -> &File {
            &self.0
        }
        fn text(&self) -> String {
            String::new()
        }
        fn announce(&self, _position: u64, _len: u64) {}
        fn will_need(&self, _position: u64, _len: u64) {}
        fn errno(&self, _error: Error) -> Errno {
            Errno(libc::EIO)
        }
    }

    impl NameOpener for Object {
        fn place(&self, _name: &[u8]) -> Result<u64, NameRefusal> {
            Ok(1)
        }
        fn open(&self, _name: &[u8]) -> Result<Arc<dyn NamedObject>, NameRefusal> {
            Ok(Arc::new(self.clone()))
        }
        fn opens_revisions(&self) -> bool {
            false
        }
        fn open_revision(&self, _request: RevisionRequest<'_>) -> Result<Arc<dyn NamedObject>, NameRefusal> {
            unreachable!("it opens none")
        }
    }

    fn fixture() -> (File, Cache, ViewerPins, u64) {
        fixture_with(LEN)
    }

    /// An object in a cache of large folios, which a viewer has open by the handle. Its first bytes are cached.
    fn fixture_with(cached: usize) -> (File, Cache, ViewerPins, u64) {
        let cache = Cache::builder().memory(MEMORY).folio_order_max(9).build().unwrap();
        let options = *OpenOptions::new().coherence(Coherence::Immutable);
        let file = cache.open_backend_with(Arc::new(MemoryFile::new(vec![7; LEN])), &options).unwrap();
        file.read_exact_at(&mut vec![0; cached], 0).unwrap();
        let owner = CacheOwner::new(cache.clone()).with_opener(Arc::new(Object(file.clone())));
        let viewers = Arc::new(ViewerTable::new(Arc::new(owner), GROUP_VIEWERS));
        viewers.slots.add(0);
        let handle = viewers.owner.open_named(b"object").unwrap().attached.handle;
        viewers.slot(VIEWER).lock().handles.insert(handle, Handle { place: 0, device: 1 });
        (file, cache, ViewerPins::new(viewers, SHARE_PERCENT), handle)
    }

    /// 1 A viewer pins single bytes, each in a folio of its own, which is larger and is kept whole. 2 Its share counted
    /// the bytes, so it kept as much memory as all pins of the cache may. 3 Another reader pins a byte, and is refused.
    #[test]
    fn a_viewer_that_pins_single_bytes_keeps_no_more_than_its_share_of_memory() {
        let (file, cache, pins, handle) = fixture();
        let pin = |at: usize| pins.pin(VIEWER, handle, PinRequest { position: at as u64, len: 1 });
        let made: Vec<_> = (0..1000).map_while(|n| pin(n * (LEN / 1000)).ok()).collect();
        let kept = cache.stats().pinned_bytes;
        assert!(kept <= MEMORY * SHARE_PERCENT / 100, "{} pins keep {kept} bytes", made.len());
        assert!(kept > MEMORY / 8, "{} pins keep {kept} bytes", made.len());
        assert_eq!(pin(LEN - 1).unwrap_err().0, libc::ENOBUFS);
        drop(file.pin(LEN as u64 - 1, 1).expect("others have their part"));
        for [number, bytes] in made {
            assert_eq!(bytes, 1);
            pins.unpin(VIEWER, handle, number);
        }
        assert_eq!(cache.stats().pinned_bytes, 0);
    }

    /// 1 A viewer's pins keep almost all of its share. 2 It asks for a long pin, and is refused, again and again. 3
    /// Each time the bytes were fetched first, and evicted those of others.
    #[test]
    fn a_pin_that_cannot_fit_into_the_share_is_refused_before_its_bytes_are_fetched() {
        let (_file, cache, pins, handle) = fixture_with(14 << 20);
        let pin = |position, len| pins.pin(VIEWER, handle, PinRequest { position, len });
        pin(0, 14 << 20).unwrap();
        let before = cache.stats().device_bytes;
        assert_eq!(pin(32 << 20, 8 << 20).unwrap_err().0, libc::ENOBUFS);
        assert_eq!(cache.stats().device_bytes, before);
        pin(38 << 20, 1 << 20).unwrap();
        assert!(cache.stats().device_bytes > before, "one that fits is fetched");
    }

    #[test]
    fn a_folio_counts_once_by_however_many_pins_it_is_kept_in_part() {
        let (_file, cache, pins, handle) = fixture();
        let pin = |position, len| pins.pin(VIEWER, handle, PinRequest { position, len });
        for n in 0..1000 {
            pin(n * 2000 + 5, 1990).unwrap();
        }
        let kept = cache.stats().pinned_bytes;
        assert!(kept < 3 << 20, "{kept} bytes");
        // A long range that begins and ends within folios.
        pin((4 << 20) + 5000, 8 << 20).unwrap();
        let kept = cache.stats().pinned_bytes;
        let fits = MEMORY * SHARE_PERCENT / 100 - kept;
        pin(24 << 20, fits / (2 << 20) * (2 << 20)).unwrap();
    }
}
