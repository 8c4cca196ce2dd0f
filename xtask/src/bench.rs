//! Bench: builds the benchmark with the command that it measures beside it, and runs it.
//!
//! ```text
//!   cargo xtask bench hit --quick
//!     cargo build --release -p quinion-cli -p quinion-bench --features quinion-bench/peers
//!     target/release/quinion-bench hit --quick
//! ```
//!
//! One of the peers wants a newer compiler than the rest ([`PEERS_SINCE`]). With an older one they are left out, which
//! the benchmark says of each row that misses them.

use std::process::Command;

use crate::step::Failure;
use crate::tools::{cargo, rustc_line, target_folder};

/// The oldest compiler that builds the peers: its second number.
const PEERS_SINCE: u32 = 91;
/// What the tests set so that programs wait for the cache's owner on a busy machine; no measurement wants it.
const WAIT: &str = "QUINION_WAIT_MS";

/// Builds both, and runs the benchmark with `words`.
pub fn run(words: &[String]) -> Result<(), Failure> {
    let mut build = build();
    let built = build.status().map_err(|error| Failure::new(format!("cargo cannot be run: {error}")))?;
    if !built.success() {
        return Err(Failure::new(format!("the benchmark does not build: {built}; see above")));
    }
    let program = target_folder().join("release/quinion-bench");
    let ended = Command::new(&program).args(words).env_remove(WAIT).status();
    match ended {
        Ok(ended) if ended.success() => Ok(()),
        Ok(ended) => Err(Failure::new(format!("the benchmark ended with {ended}"))),
        Err(error) => Err(Failure::new(format!("{} cannot be run: {error}", program.display()))),
    }
}

/// The benchmark, and the command beside it, as releases.
pub fn build() -> Command {
    let mut build = cargo("build --release -p quinion-cli -p quinion-bench");
    if has_peers(&rustc_line("--version", "rustc ").unwrap_or_default()) {
        build.args(["--features", "quinion-bench/peers"]);
    }
    build
}

/// Whether a compiler of this version builds the peers.
fn has_peers(version: &str) -> bool {
    let second = version.split('.').nth(1).and_then(|second| second.parse::<u32>().ok());
    second.is_some_and(|second| second >= PEERS_SINCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_built_by_compilers_that_can() {
        assert!(has_peers("1.91.0 (abc 2025-10-30)") && has_peers("1.104.1"));
        assert!(!has_peers("1.88.0") && !has_peers(""));
    }
}
