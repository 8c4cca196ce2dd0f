//! Hooks: a cache of which a benchmark or a test replaces a part. Programs have no way to it: it is reached through
//! `quinion::internals` alone.
//!
//! Each function takes a builder as programs have it, and returns one whose caches differ in that part and in nothing
//! else.

use crate::mapping::IndexHooks;
use crate::policy::NewPolicy;

use super::Builder;

/// The same, some steps of whose indexes `hooks` takes over.
#[must_use]
pub fn with_index_hooks(mut builder: Builder, hooks: &'static dyn IndexHooks) -> Builder {
    builder.index_hooks = Some(hooks);
    builder
}

/// The same, which evicts by `policy`: each pool by one of its own.
#[must_use]
pub fn with_policy(mut builder: Builder, policy: NewPolicy) -> Builder {
    builder.policy = policy;
    builder
}
