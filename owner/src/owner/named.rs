//! Named: what viewers open by a name, for an owner that was given an opener of names.
//!
//! ```text
//!   serve: a name --> CacheOwner --> NameOpener (quinion-service: URL --> store) --> NamedObject: a File, text, plans
//!                        |                                                               |
//!                        '-- notes it as attached, as any file --------------------------'
//! ```
//!
//! An object never changes: another version of it is another file. So its record says so from its first open on, and
//! a viewer asks nothing before it reads. Only what never changes can be pinned for a viewer, which finds the pages
//! by the index; so a folio that is still being filled is not, because it leaves the index if the fill fails.
//!
//! Invariant: an opener opens what all processes of the owner's domain may read, and nothing else.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Attachment, CacheOwner, errno};
use crate::serve::{Attached, NAMED_DEVICE, NameRefusal, NamedAttachment};
use crate::viewer::sys::Errno;
use quinion::File;
use quinion::internals::arena::Validation;
use quinion::internals::error::Error;
use quinion::internals::folio::Pinned;
use quinion::internals::serving::ServedFile;
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::units::FileId;

/// Opens names for viewers. Called by several threads at a time; each call may wait.
pub trait NameOpener: Send + Sync + fmt::Debug {
    /// A number for the store of that name: the requests to one store that may be under way are bounded, as those to a
    /// file system are. Does not wait.
    ///
    /// # Errors
    /// There is no such store.
    fn place(&self, name: &[u8]) -> Result<u64, NameRefusal>;
    /// Opens what has that name, through the owner's cache, as a file that never changes. May wait for the store.
    ///
    /// # Errors
    /// It cannot be opened: the error for the program, and a text for people.
    fn open(&self, name: &[u8]) -> Result<Arc<dyn NamedObject>, NameRefusal>;
}

/// One open of one version of an object.
pub trait NamedObject: Send + Sync + fmt::Debug {
    /// The cache's file.
    fn file(&self) -> &File;
    /// What the viewer is told of it.
    fn text(&self) -> String;
    /// A viewer is about to wait for up to `len` bytes at `position`: what is missing may be asked for in one plan.
    fn announce(&self, position: u64, len: u64);
    /// Starts to fetch what is missing of a range, and waits for none of it.
    fn will_need(&self, position: u64, len: u64);
    /// How a viewer is told of that error.
    fn errno(&self, error: Error) -> Errno;
}

/// What viewers have open and pinned: see [`CacheOwner::attachments`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct AttachmentCounts {
    /// Files and objects, once for each viewer that has it open and each time.
    pub open_files: usize,
    /// Ranges that stay in memory until their viewers give them back.
    pub pinned_ranges: usize,
}

pub(super) type Pins = Arc<RankedMutex<HashMap<u64, Pinned>>>;

pub(super) fn no_pins() -> Pins {
    Arc::new(RankedMutex::new(Rank::Viewer, HashMap::new()))
}

impl CacheOwner {
    /// The same, which has `opener` open names for viewers.
    #[must_use]
    pub fn with_opener(mut self, opener: Arc<dyn NameOpener>) -> Self {
        self.opener = Some(opener);
        self
    }

    /// What viewers have open and pinned now.
    pub fn attachments(&self) -> AttachmentCounts {
        let pins: Vec<Pins> = self.files.lock().values().map(|known| Arc::clone(&known.pins)).collect();
        let pinned_ranges = pins.iter().map(|pins| pins.lock().len()).sum();
        AttachmentCounts { open_files: pins.len(), pinned_ranges }
    }

    fn opener(&self) -> Result<&Arc<dyn NameOpener>, NameRefusal> {
        let none = || NameRefusal {
            error: Errno::OPNOTSUPP,
            text: "this cache serves files alone; start one that was given stores".into(),
        };
        self.opener.as_ref().ok_or_else(none)
    }

    pub(super) fn place_of_name(&self, name: &[u8]) -> Result<u64, NameRefusal> {
        Ok(self.opener()?.place(name)? | NAMED_DEVICE)
    }

    pub(super) fn open_by_name(&self, name: &[u8]) -> Result<NamedAttachment, NameRefusal> {
        let device = self.place_of_name(name)?;
        let object = self.opener()?.open(name)?;
        let file = Arc::new(object.file().clone());
        let failed = |error: Error| NameRefusal { error: errno(&error), text: error.to_string() };
        file.admit(Validation::Immutable).map_err(failed)?;
        let (cell, mapping) = file.record();
        let id = FileId { device, inode: u64::from(mapping.0) };
        let path = PathBuf::from(String::from_utf8_lossy(name).into_owned());
        self.accesses.attached(mapping, path.clone());
        let text = object.text();
        let known = Attachment { file, id, path, fills: 0, object: Some(object), pins: no_pins() };
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.files.lock().insert(handle, known);
        Ok(NamedAttachment { attached: Attached { handle, cell, id: mapping }, id, text })
    }

    pub(super) fn object(&self, handle: u64) -> Option<Arc<dyn NamedObject>> {
        self.files.lock().get(&handle).and_then(|known| known.object.clone())
    }

    pub(super) fn pin_for(&self, handle: u64, position: u64, len: u64) -> Result<(u64, u64), Errno> {
        let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
        let known = self.files.lock().get(&handle).cloned().ok_or(Errno::BADF)?;
        let object = known.object.ok_or(Errno::OPNOTSUPP)?;
        object.announce(position, len as u64);
        let pinned = known.file.pin(position, len).map_err(|error| object.errno(error))?;
        // Else its viewer would find another folio there: it asks again when all has come.
        if !known.file.stands_in_index(&pinned) {
            return Err(Errno::AGAIN);
        }
        let bytes = pinned.len() as u64;
        let pin = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        known.pins.lock().insert(pin, pinned);
        Ok((pin, bytes))
    }

    pub(super) fn unpin_for(&self, handle: u64, pin: u64) {
        let Some(pins) = self.files.lock().get(&handle).map(|known| Arc::clone(&known.pins)) else { return };
        let pinned = pins.lock().remove(&pin);
        drop(pinned); // outside the lock
    }

    pub(super) fn leave_pins_of(&self, handle: u64) {
        let Some(pins) = self.files.lock().get(&handle).map(|known| Arc::clone(&known.pins)) else { return };
        let left = std::mem::take(&mut *pins.lock());
        // A viewer looks at them without end: no frame of them is used again in this process.
        std::mem::forget(left);
    }
}
