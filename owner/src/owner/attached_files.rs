//! Attached files: the table of the files that viewers have open, by handle.
//!
//! ```text
//!   handle 1 --> File, id, path, pins     two handles of one file: two entries
//!   handle 2 --> File, id, path, pins
//! ```
//!
//! The table has one lock, under which no file is opened, read or closed: a removed file is returned, and the caller
//! drops it outside the lock. The lock of one entry's pins is never taken under it.
//!
//! Invariant: a handle is given once, and is above 0. An entry that [`AttachedFiles::insert_if_unrevoked`] inserts was
//! opened after every revocation of its file that did not find it in the table.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::admission::ALL_FILES;
use super::named::NamedObject;
use super::thrash::Candidate;
use crate::viewer::sys::Errno;
use quinion::File;
use quinion::internals::folio::{KeptMemory, Pinned};
use quinion::internals::serving::{ServedFile, kept_memory};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::units::{FileId, MappingId};

/// Counts of open files and pins: see [`CacheOwner::attachments`](crate::CacheOwner::attachments).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct AttachmentCounts {
    /// Files and objects, once for each viewer that has it open and each time.
    pub open_files: usize,
    /// Ranges that stay in memory until their viewers give them back.
    pub pinned_ranges: usize,
}

type Pins = Arc<RankedMutex<HashMap<u64, Pinned>>>;

#[derive(Clone, Debug)]
pub(super) struct Attachment {
    pub(super) file: Arc<File>,
    pub(super) id: FileId,
    pub(super) path: PathBuf,
    fills: u64,
    object: Option<Arc<dyn NamedObject>>,
    pins: Pins,
}

impl Attachment {
    pub(super) fn new(file: Arc<File>, id: FileId, path: PathBuf) -> Self {
        let pins = Arc::new(RankedMutex::new(Rank::Viewer, HashMap::new()));
        Self { file, id, path, fills: 0, object: None, pins }
    }

    pub(super) fn with_object(self, object: Arc<dyn NamedObject>) -> Self {
        Self { object: Some(object), ..self }
    }
}

#[derive(Debug)]
pub(super) struct AttachedFiles {
    by_handle: RankedMutex<HashMap<u64, Attachment>>,
    /// The last number that was given to a handle or a pin.
    last_number: AtomicU64,
    /// The files of which viewers said that they may not be trusted any more.
    revocations: RankedMutex<Revocations>,
}

/// The last revocations, oldest first.
#[derive(Debug, Default)]
struct Revocations {
    last: VecDeque<FileId>,
    count: u64,
}

/// How many revocations there were when a file was about to be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RevocationCount(u64);

/// Whether a file was revoked while it was being opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Revocation {
    None,
    /// The lease of this file was revoked.
    OfFile,
    /// More files were revoked than are remembered, so it is not known.
    Unknown,
}

impl Revocations {
    /// More than one attach ever meets, but for one that waits for a file system.
    const KEPT_MAX: usize = 1024;

    fn add(&mut self, id: FileId) {
        if self.last.len() == Self::KEPT_MAX {
            self.last.pop_front();
        }
        self.last.push_back(id);
        self.count += 1;
    }

    fn since(&self, before: RevocationCount, id: FileId) -> Revocation {
        let count = self.count - before.0;
        let mut last = self.last.iter().rev().take(usize::try_from(count).unwrap_or(usize::MAX));
        if last.any(|&revoked| revoked == id || revoked == ALL_FILES) {
            Revocation::OfFile
        } else if count > self.last.len() as u64 {
            Revocation::Unknown
        } else {
            Revocation::None
        }
    }
}

impl AttachedFiles {
    pub(super) fn new() -> Self {
        Self {
            by_handle: RankedMutex::new(Rank::Viewer, HashMap::new()),
            last_number: AtomicU64::new(0),
            revocations: RankedMutex::new(Rank::Viewer, Revocations::default()),
        }
    }

    fn next_number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn insert(&self, attachment: Attachment) -> u64 {
        let handle = self.next_number();
        self.by_handle.lock().insert(handle, attachment);
        handle
    }

    /// To be called before that file, or each for [`ALL_FILES`], is looked for, which may not be trusted any more.
    pub(super) fn revoke(&self, id: FileId) {
        self.revocations.lock().add(id);
    }

    pub(super) fn revocations(&self) -> RevocationCount {
        RevocationCount(self.revocations.lock().count)
    }

    /// Returns the handle, if the file was not revoked since `before`. A revocation is noted first and looks for its
    /// file then; here the file is inserted first, and the notes are looked at then. The locks of both tables order
    /// these steps: one of the two finds the other.
    pub(super) fn insert_if_unrevoked(
        &self,
        attachment: Attachment,
        before: RevocationCount,
    ) -> Result<u64, Revocation> {
        let id = attachment.id;
        let handle = self.insert(attachment);
        let revocation = self.revocations.lock().since(before, id);
        if revocation == Revocation::None {
            return Ok(handle);
        }
        drop(self.remove(handle)); // it may have been taken by the revocation
        Err(revocation)
    }

    pub(super) fn remove(&self, handle: u64) -> Option<Attachment> {
        self.by_handle.lock().remove(&handle)
    }

    /// All handles of that file.
    pub(super) fn remove_file(&self, id: FileId) -> Vec<Attachment> {
        self.by_handle.lock().extract_if(|_, known| known.id == id).map(|(_, known)| known).collect()
    }

    fn get(&self, handle: u64) -> Option<Attachment> {
        self.by_handle.lock().get(&handle).cloned()
    }

    pub(super) fn file(&self, handle: u64) -> Result<Arc<File>, Errno> {
        self.by_handle.lock().get(&handle).map(|known| Arc::clone(&known.file)).ok_or(Errno::BADF)
    }

    pub(super) fn id_of(&self, handle: u64) -> FileId {
        self.by_handle.lock().get(&handle).map(|known| known.id).unwrap_or_default()
    }

    pub(super) fn object(&self, handle: u64) -> Option<Arc<dyn NamedObject>> {
        self.by_handle.lock().get(&handle).and_then(|known| known.object.clone())
    }

    fn pins_of(&self, handle: u64) -> Option<Pins> {
        self.by_handle.lock().get(&handle).map(|known| Arc::clone(&known.pins))
    }

    pub(super) fn counts(&self) -> AttachmentCounts {
        let pins: Vec<Pins> = self.by_handle.lock().values().map(|known| Arc::clone(&known.pins)).collect();
        let pinned_ranges = pins.iter().map(|pins| pins.lock().len()).sum();
        AttachmentCounts { open_files: pins.len(), pinned_ranges }
    }

    pub(super) fn count_fill(&self, handle: u64) {
        if let Some(known) = self.by_handle.lock().get_mut(&handle) {
            known.fills += 1;
        }
    }

    pub(super) fn with_id(&self, id: FileId) -> Option<Arc<File>> {
        let files = self.by_handle.lock();
        files.values().find(|known| known.id == id).map(|known| Arc::clone(&known.file))
    }

    pub(super) fn with_mapping(&self, mapping: MappingId) -> Option<Arc<File>> {
        let files = self.by_handle.lock();
        files.values().map(|known| &known.file).find(|file| file.record().1 == mapping).cloned()
    }

    pub(super) fn ids(&self) -> BTreeSet<FileId> {
        self.by_handle.lock().values().map(|known| known.id).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_handle.lock().is_empty()
    }

    /// The attached files, with their bytes and how often viewers asked for some.
    pub(super) fn candidates(&self) -> HashMap<FileId, Candidate> {
        let mut found = HashMap::new();
        for Attachment { file, id, fills, .. } in self.by_handle.lock().values() {
            let candidate = Candidate { id: *id, bytes: file.len(), fills: 0 };
            found.entry(*id).or_insert(candidate).fills += fills;
        }
        found
    }

    pub(super) fn pin(&self, handle: u64, position: u64, len: u64) -> Result<(u64, u64), Errno> {
        let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
        let known = self.get(handle).ok_or(Errno::BADF)?;
        let object = known.object.ok_or(Errno::OPNOTSUPP)?;
        object.announce(position, len as u64);
        let pinned = known.file.pin(position, len).map_err(|error| object.errno(error))?;
        // Else its viewer would find another folio there: it asks again when all has come.
        if !known.file.is_indexed(&pinned) {
            return Err(Errno::AGAIN);
        }
        let bytes = pinned.len() as u64;
        let pin = self.next_number();
        known.pins.lock().insert(pin, pinned);
        Ok((pin, bytes))
    }

    pub(super) fn kept_by(&self, handle: u64, pin: u64) -> Option<KeptMemory> {
        let pins = self.pins_of(handle)?;
        pins.lock().get(&pin).map(kept_memory)
    }

    pub(super) fn unpin(&self, handle: u64, pin: u64) {
        let Some(pins) = self.pins_of(handle) else { return };
        let pinned = pins.lock().remove(&pin);
        drop(pinned); // outside the lock
    }

    pub(super) fn leave_pins(&self, handle: u64) {
        let Some(pins) = self.pins_of(handle) else { return };
        let left = std::mem::take(&mut *pins.lock());
        // A viewer looks at them without end: no frame of them is used again in this process.
        std::mem::forget(left);
    }
}
