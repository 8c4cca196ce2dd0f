//! Fork: noticing that this process is a child of the one that built a cache.
//!
//! A cache's memory is not inherited by a child, its ring must not be touched by one, and its locks may have been held
//! by threads that the child does not have. So every value of the library remembers the process's generation, and a
//! handler that runs in each forked child raises it: one relaxed load tells.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);
static HANDLER: Once = Once::new();

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// The process that made something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForkGuard {
    generation: u64,
}

impl ForkGuard {
    /// A guard that names this process.
    pub fn new() -> Self {
        HANDLER.call_once(|| {
            // SAFETY: the handler is a function of this program that does one atomic addition. If it cannot be
            // registered (out of memory) forks go unnoticed, which the return value would tell and nothing could mend.
            let registered = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            debug_assert_eq!(registered, 0);
        });
        Self { generation: GENERATION.load(Ordering::Relaxed) }
    }

    /// Whether this is a fork of that process.
    #[inline]
    pub fn is_forked(self) -> bool {
        GENERATION.load(Ordering::Relaxed) != self.generation
    }
}

impl Default for ForkGuard {
    fn default() -> Self {
        Self::new()
    }
}
