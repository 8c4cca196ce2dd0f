//! Hooks: functions for this repository's other crates, benchmarks and tests, by way of `quinion::internals` alone.
//!
//! ```text
//!   with_...       a builder whose caches differ in one part, and in nothing else
//!   the others     numbers and parts of public types that the public interface does not show
//! ```

use std::path::Path;

use crate::error::Error;
use crate::mapping::{IndexHooks, TreeCounts};
use crate::policy::NewPolicy;
use crate::pressure::{Pressure, PressureSource};

use super::{Builder, File, MemFile};

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

/// Returns `pressure`, which looks at the files of `source`, not at those of this process's control groups and of the
/// machine.
#[must_use]
pub fn with_pressure_source(pressure: Pressure, source: PressureSource) -> Pressure {
    pressure.with_source(source)
}

/// Counts of the index of `file` since the cache knows the file. Waits for nothing.
#[must_use]
pub fn tree_counts(file: &File) -> TreeCounts {
    file.tree_counts()
}

/// Counts of the index of `file`. Waits for nothing.
#[must_use]
pub fn mem_tree_counts(file: &MemFile) -> TreeCounts {
    file.tree_counts()
}

/// The error that the file at `path` cannot be opened, or that nothing can be made there.
pub fn cannot_open(path: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::cannot_open(path, source)
}

/// The error that an argument is out of its range; the text says what was asked, what is wrong and what to do.
pub fn invalid_input(text: impl Into<String>) -> Error {
    Error::invalid_input(text)
}
