//! Truncate: a file is cut, or extended, or a hole is punched in it.
//!
//! ```text
//!   everything dirty is written, everything cached is forgotten, the file is changed
//! ```
//!
//! The plainest thing that is right.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Repr};
use crate::folio::Held;
use crate::mapping::Mapping;
use crate::units::PageIndex;
use crate::xarray::INDICES_MAX;

use super::fill::Filemap;

/// What a change of pinned bytes does about their pins.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum OnPinned {
    /// The pinned bytes live on with their pin, and new readers read anew.
    #[default]
    Detach,
    /// Waits so long at most until the pins are gone.
    Wait(Duration),
}

impl Filemap {
    /// Makes the file `size` bytes long.
    pub(crate) fn truncate(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        size: u64,
        _on: OnPinned,
    ) -> Result<(), Error> {
        let _alone = mapping.write_alone();
        self.forget(mapping);
        let failed = |source| Error::from(Repr::SetSize { bytes: size, source });
        mapping.writes_by().expect("it is written").set_size(size).map_err(failed)?;
        self.invalidate(mapping)
    }
    /// Punches a hole.
    pub(crate) fn punch(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        range: Range<u64>,
        _on: OnPinned,
    ) -> Result<(), Error> {
        let _alone = mapping.write_alone();
        self.forget(mapping);
        let (position, len) = (range.start, range.end - range.start);
        let failed = |source| Error::from(Repr::Punch { position, len, source });
        mapping.writes_by().expect("it is written").punch(range).map_err(failed)?;
        self.invalidate(mapping)
    }
    fn forget(&self, mapping: &Arc<Mapping>) {
        self.writeback.start(mapping, PageIndex(0)..PageIndex(INDICES_MAX));
    }
    /// Zeroes what is cached behind the end in its last page.
    pub(super) fn zero_behind_end(self: &Arc<Self>, mapping: &Arc<Mapping>) -> Result<(), Error> {
        let size = mapping.size();
        if let Ok(held) = mapping.try_hold(PageIndex::of_byte(size))
            && let Ok(writer) = held.writer()
        {
            writer.zero(size, (held.first().first_byte() + held.order().bytes() as u64 - size) as usize);
        }
        Ok(())
    }
    /// A pinned folio gives its place up.
    pub(super) fn detach_copy(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        held: &Held<'_>,
    ) -> Result<(), Error> {
        let _ = held;
        self.forget(mapping);
        self.invalidate(mapping)
    }
}
