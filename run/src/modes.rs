//! Modes: the names of the ways to detect changes by other processes, in reports and in messages between processes.
//!
//! ```text
//!   a Validation --mode_name--> "lease" --message of a kept cache--> mode_of --> the same
//! ```

use quinion::internals::arena::Validation;

pub(super) const MODES: [Validation; 4] =
    [Validation::Leased, Validation::Immutable, Validation::CheckTimes, Validation::Kernel];

pub(super) fn mode_name(validation: Validation) -> &'static str {
    match validation {
        Validation::Leased => "lease",
        Validation::Immutable => "immutable",
        Validation::CheckTimes => "looked_at",
        Validation::Kernel | Validation::OwnerLate => "kernel",
    }
}

pub(super) fn mode_of(name: &str) -> Option<Validation> {
    MODES.into_iter().find(|validation| mode_name(*validation) == name)
}
