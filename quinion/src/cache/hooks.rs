//! Hooks: caches of which a benchmark or a test replaces a part, by way of `quinion::internals` alone.
//!
//! Each function returns a builder whose caches differ in that part and in nothing else.

use crate::mapping::IndexHooks;
use crate::policy::NewPolicy;

use super::Builder;

/// Returns `builder`, with `hooks` for some steps of the indexes.
#[must_use]
pub fn with_index_hooks(mut builder: Builder, hooks: &'static dyn IndexHooks) -> Builder {
    builder.index_hooks = Some(hooks);
    builder
}

/// Returns `builder`, whose cache evicts by `policy`: each pool by one of its own.
#[must_use]
pub fn with_policy(mut builder: Builder, policy: NewPolicy) -> Builder {
    builder.policy = policy;
    builder
}
