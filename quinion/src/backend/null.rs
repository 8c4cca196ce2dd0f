//! Null: the backend of a memory file, which has no device.
//!
//! There is no device to read the pages of a memory file from, and none to write them to: these calls have nothing to
//! add and succeed. No fill or flush is submitted here; one that comes all the same fails.

use std::io;
use std::ops::Range;

use super::flush::read_only;
use super::{Attributes, Backend, Fill, Identity, SyncKind, Version};

/// [`Identity::device`] of null files: no device has this number.
const DEVICE: u64 = u64::MAX - 1;

/// No device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NullBackend {
    /// A number of the memory file's own.
    pub number: u64,
}

impl Backend for NullBackend {
    fn name(&self) -> &'static str {
        "nothing"
    }
    /// A file of no bytes that never changes: how long it is, its mapping says.
    fn attributes(&self) -> io::Result<Attributes> {
        let identity = Identity { device: DEVICE, inode: self.number, born: 0 };
        let version = Version { modified: 0, changed: 0, settled: true, steps: true };
        Ok(Attributes { identity, version, size: 0 })
    }
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn submit(&self, fills: Vec<Fill>) {
        for fill in fills {
            fill.complete(Err(read_only(self.name())));
        }
    }
    fn can_drop_behind(&self) -> bool {
        false
    }
    fn sync(&self, _kind: SyncKind, _range: Range<u64>) -> io::Result<()> {
        Ok(())
    }
    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn punch(&self, _range: Range<u64>) -> io::Result<()> {
        Ok(())
    }
}
