//! Values: the caches of values that we stand beside, each as its documents say, with pages for values.
//!
//! A value is a page on the heap that the cache and a caller that looks it up share, as
//! a program would have it that reads pages through such a cache. A read is a look by number and a copy.
//!
//! They come with the feature `peers`, so that the ordinary build is light; without it their rows say so.

#[cfg(feature = "peers")]
pub mod peers;

use super::harness::{Case, Metric, Unmeasured};

/// How they are called, in the order of what they cost.
pub const NAMES: [&str; 3] = ["quick_cache", "foyer", "moka"];
/// Whether this build has them.
pub const ARE_BUILT: bool = cfg!(feature = "peers");

/// What stands in their place where a build does not have them.
pub fn not_built(metrics: &[Metric]) -> Option<Case> {
    let case = Case::new(format!("beside {}", NAMES.join(", ")), metrics, || {
        let why = "not built: cargo build --release --package quinion-cli --features peers";
        Err(Unmeasured::Missing(why.to_owned()))
    });
    (!ARE_BUILT).then_some(case)
}
