//! Request errors: what an error of the owner's means for a descriptor.
//!
//! Some pass: the kernel reads for once, and a later read asks again. The others leave the descriptor to the kernel.

use quinion_view::arena::control::Reason;
use quinion_view::viewer::RequestError;
use quinion_view::viewer::sys::Errno;

/// Whether the owner may be able to help the next time: the kernel is to read for once. Slots for requests, too, become
/// free again soon where more threads ask at once than there are slots.
pub fn is_passing(error: &RequestError) -> bool {
    matches!(error, RequestError::Late | RequestError::NoSlot)
        || *error == RequestError::Errno(Errno::AGAIN.0)
}

pub fn why(error: &RequestError) -> Reason {
    match error {
        RequestError::Errno(error) if *error == Errno::TXTBSY.0 => Reason::Writable,
        RequestError::Errno(error) if *error == Errno::BUSY.0 => Reason::Watched,
        RequestError::Errno(error) if *error == Errno::OPNOTSUPP.0 => Reason::Unguaranteed,
        // The service ended before the answer.
        RequestError::Errno(error) if *error == Errno::SRCH.0 => Reason::NoOwner,
        RequestError::Errno(_) | RequestError::Fruitless => Reason::Refused,
        RequestError::OwnerDead | RequestError::NoSlot | RequestError::Late => Reason::NoOwner,
    }
}
