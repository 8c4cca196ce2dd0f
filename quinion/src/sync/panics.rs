//! Panics: code of a user's is called, and its panic ends there.
//!
//! ```text
//!   contained(|| backend.sync(..))    Some(result), or None: it panicked, and the panic hook has told of it
//! ```
//!
//! Invariant: nothing unwinds out of [`contained`], not even the drop of a panic's payload, which is the user's code
//! as well: a payload is forgotten.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of `call`; `None` if it panicked. Values that it shares with the caller are as the panic has left them.
pub fn contained<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).map_err(std::mem::forget).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::panic_any;

    struct PanicsAgain;

    impl Drop for PanicsAgain {
        fn drop(&mut self) {
            panic!("its drop");
        }
    }

    #[test]
    fn a_payload_whose_drop_panics_is_contained_too() {
        assert_eq!(contained(|| 7), Some(7));
        assert_eq!(contained(|| panic_any(PanicsAgain)), None::<()>);
    }
}
