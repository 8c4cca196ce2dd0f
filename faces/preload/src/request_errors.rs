//! Request errors: what an error of the owner's means for a descriptor.
//!
//! Some pass: the kernel reads for once, and the owner is asked again at a later read. The others have the descriptor
//! left to the kernel, for a reason that is counted.

use quinion_view::arena::control::Reason;
use quinion_view::viewer::RequestError;
use quinion_view::viewer::sys::Errno;

/// Whether the owner could not help, and may be able to the next time: the kernel is to read for once.
///
/// All slots for requests are taken where more threads ask at once than there are slots, and have slots again soon.
pub fn is_passing(error: &RequestError) -> bool {
    matches!(error, RequestError::Late | RequestError::NoSlot)
        || *error == RequestError::Errno(Errno::AGAIN.0)
}

/// Why the descriptor is left to the kernel after this error.
pub fn why(error: &RequestError) -> Reason {
    match error {
        RequestError::Errno(error) if *error == Errno::TXTBSY.0 => Reason::Writable,
        RequestError::Errno(error) if *error == Errno::BUSY.0 => Reason::Watched,
        RequestError::Errno(error) if *error == Errno::OPNOTSUPP.0 => Reason::Unguaranteed,
        RequestError::Errno(_) | RequestError::Fruitless => Reason::Refused,
        RequestError::OwnerDead | RequestError::NoSlot | RequestError::Late => Reason::NoOwner,
    }
}
