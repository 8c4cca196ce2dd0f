//! Bench: builds the benchmark with the programs that it measures beside it, and runs it.
//!
//! ```text
//!   cargo xtask bench hit --quick
//!     cargo build --release -p quinion-cli -p quinion-bench --features quinion-bench/peers -p quinion-s3
//!     target/release/quinion-bench hit --quick
//! ```
//!
//! One of the peers, and the endpoint, need a newer compiler than the rest ([`PEERS_SINCE`], [`ENDPOINT_SINCE`]). With
//! an older one they are left out, and the benchmark says so of each row that lacks them.

use std::process::Command;

use crate::step::Failure;
use crate::tools::{cargo, rustc_line, target_folder};

/// The oldest compiler that builds the peers: its second number.
const PEERS_SINCE: u32 = 91;
/// The oldest compiler that builds `quinion-s3`: its second number.
const ENDPOINT_SINCE: u32 = 92;
/// The tests set it so that programs wait for the cache's owner on a busy machine; no measurement should.
const WAIT: &str = "QUINION_WAIT_MS";

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

pub fn build() -> Command {
    let mut build = cargo("build --release -p quinion-cli -p quinion-bench");
    let version = rustc_line("--version", "rustc ").unwrap_or_default();
    if is_since(&version, PEERS_SINCE) {
        build.args(["--features", "quinion-bench/peers"]);
    }
    if is_since(&version, ENDPOINT_SINCE) {
        build.args(["-p", "quinion-s3"]);
    }
    build
}

fn is_since(version: &str, since: u32) -> bool {
    let second = version.split('.').nth(1).and_then(|second| second.parse::<u32>().ok());
    second.is_some_and(|second| second >= since)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_compiler_builds_the_packages_that_need_one() {
        assert!(is_since("1.91.0 (abc 2025-10-30)", PEERS_SINCE) && is_since("1.104.1", ENDPOINT_SINCE));
        assert!(!is_since("1.88.0", PEERS_SINCE) && !is_since("1.91.0", ENDPOINT_SINCE));
        assert!(!is_since("", PEERS_SINCE));
    }
}
