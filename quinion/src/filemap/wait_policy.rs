//! Wait policy: how far a read may go for bytes that are not in the cache.
//!
//! All paths that may have to wait take one: for the device, for memory, for a lock.

use crate::sync::LockWait;

/// The I/O and the waits that a read may use to get bytes that are not cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WaitPolicy {
    /// The read waits for everything it needs.
    #[default]
    Wait,
    /// For futures: starts the fills it can and waits only for locks, whose holders wait for no device or memory.
    Start,
    /// Starts the fills it can and waits for no device, no memory and no lock.
    Now,
    /// The read takes cached pages and starts nothing.
    CacheOnly,
}

impl WaitPolicy {
    pub(crate) fn locks(self) -> LockWait {
        match self {
            WaitPolicy::Wait | WaitPolicy::Start => LockWait::Wait,
            WaitPolicy::Now | WaitPolicy::CacheOnly => LockWait::Try,
        }
    }
}
