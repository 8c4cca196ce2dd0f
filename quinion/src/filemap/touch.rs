//! Touch: a folio's referenced byte, by which reclaim knows that it was read.
//!
//! Every read path notes it, the hit without a lock among them.

use crate::arena::{GrownView, referenced};
use crate::units::Frame;

/// Notes that a folio was read, in its referenced byte, if that does not say so.
#[inline]
pub fn touch(grown: GrownView<'_>, frame: Frame) {
    if let Some(byte) = grown.referenced(frame) {
        referenced::touch(byte);
    }
}
