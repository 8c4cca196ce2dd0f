//! Retry: which errors pass, and how long to wait before the next attempt.
//!
//! The crate `object_store` has a variant for what is wrong with a request, and one variant, `Generic`, for the rest:
//! 429, 5xx, resets, time-outs, and also 400. So `Generic` is tried again, a bounded number of times.
//!
//! Such an error has none of the answer's headers: a `Retry-After`, and a 400 that says that it is for good, come by
//! another way (`retry_after.rs`).
//!
//! Half of each pause is random: clients that a store turned away together do not come back together.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::time::Duration;

use crate::store_text::causes;

/// Whether the same request may succeed later.
pub(crate) fn is_transient(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    match error {
        E::NotFound { .. }
        | E::InvalidPath { .. }
        | E::NotSupported { .. }
        | E::AlreadyExists { .. }
        | E::Precondition { .. }
        | E::NotModified { .. }
        | E::NotImplemented { .. }
        | E::PermissionDenied { .. }
        | E::Unauthenticated { .. }
        | E::UnknownConfigurationKey { .. } => false,
        // And what joins of tasks, and later versions of that crate, may tell.
        _ => true,
    }
}

/// Whether no process listens at the store's address.
pub(crate) fn is_refused(error: &object_store::Error) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::ConnectionRefused)
}

#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first.min(longest) }
    }
    pub(crate) fn reset(&mut self) {
        self.next = self.first.min(self.longest);
    }
    pub(crate) fn pause(&mut self) -> Duration {
        let full = self.next;
        self.next = full.saturating_mul(2).min(self.longest);
        let half = full / 2;
        // A hash under a random key is as random as spreading clients needs.
        let random = RandomState::new().hash_one(0_u8) >> 40;
        half + half.mul_f64(random as f64 / (1_u64 << 24) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_half_of_each_is_random() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_millis(1000));
        let mut drawn = Vec::new();
        for full in [100, 200, 400, 800, 1000, 1000] {
            let pause = backoff.pause();
            assert!((full / 2..=full).contains(&(pause.as_millis() as u64)), "{full}: {pause:?}");
            drawn.push(pause.as_secs_f64() / full as f64);
        }
        drawn.dedup();
        assert!(drawn.len() > 1, "not all are the same share of the full pause");
        backoff.reset();
        assert!(backoff.pause() <= Duration::from_millis(100));
    }

    #[test]
    fn permanent_errors_are_not_retried() {
        let source = || -> Box<dyn std::error::Error + Send + Sync> { "x".into() };
        let path = || "p".to_owned();
        assert!(is_transient(&object_store::Error::Generic { store: "s", source: source() }));
        assert!(!is_transient(&object_store::Error::NotFound { path: path(), source: source() }));
        assert!(!is_transient(&object_store::Error::Precondition { path: path(), source: source() }));
        assert!(!is_transient(&object_store::Error::PermissionDenied { path: path(), source: source() }));
    }
}
