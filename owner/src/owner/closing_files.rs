//! Closing files: files that no viewer has any more and whose descriptors this process has still.
//!
//! ```text
//!   viewers let go of a file --> it lingers, or readahead in it has not ended --> note: it counts as attached
//!   its descriptor is closed --> settle: it does not
//! ```
//!
//! The space of a removed file is free when its last descriptor is closed, and a program that removes a file expects
//! that at once. It asks the owner to close the file only if the file counts as attached. Therefore a file counts as
//! attached until it *is* closed: it lingers for a second where the number of its file system may be given to another
//! (`ServedCache::forget_lingering`), and is open while its readahead is on its way, which [`ClosingFiles::settle`]
//! also fetches.

use std::collections::BTreeMap;

use quinion::internals::arena::control::Control;
use quinion::internals::backend::{Backend, ParkedBackend, ReapMode};
use quinion::internals::serving::is_same_open;
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::units::FileId;

#[derive(Debug)]
pub(super) struct ClosingFiles {
    files: RankedMutex<BTreeMap<FileId, CountedFile>>,
}

#[derive(Debug)]
struct CountedFile {
    place: usize,
    /// One for each open that is not known to be closed.
    opens: Vec<ParkedBackend>,
}

impl ClosingFiles {
    pub(super) fn new() -> Self {
        Self { files: RankedMutex::new(Rank::Viewer, BTreeMap::new()) }
    }

    /// A viewer has let go of it. Called before the file stops counting for that viewer.
    pub(super) fn note(&self, control: &Control, id: FileId, open: ParkedBackend) {
        if open.is_closed() {
            return;
        }
        let mut files = self.files.lock();
        let file =
            files.entry(id).or_insert_with(|| CountedFile { place: control.enter(id), opens: Vec::new() });
        file.opens.retain(|known| !known.is_closed() && !is_same_open(known, &open));
        file.opens.push(open);
    }

    pub(super) fn settle(&self, control: &Control) {
        let opens: Vec<_> = self.files.lock().values().flat_map(|file| file.opens.clone()).collect();
        for open in opens {
            let _ = open.reap(ReapMode::Ready, &mut || false);
        }
        self.files.lock().retain(|_, file| {
            file.opens.retain(|open| !open.is_closed());
            let is_open = !file.opens.is_empty();
            if !is_open {
                control.leave(file.place);
            }
            is_open
        });
    }
}
