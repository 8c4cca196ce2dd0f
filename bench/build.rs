//! Tells the benchmark what it was built by and of, for the page of a run: the compiler's version, and the commit.
//!
//! A build that is no clone of the repository has no commit, and the page says so.

use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rustc-env=QUINION_COMPILER={}", compiler());
    println!("cargo::rustc-env=QUINION_COMMIT={}", commit().unwrap_or_default());
    println!("cargo::rerun-if-changed=build.rs");
}

/// The compiler's name and version, for reports of measurements.
fn compiler() -> String {
    let output = Command::new(variable("RUSTC")).arg("--version").output();
    output.map_or_else(
        |_| "unknown".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

/// The commit that is built, for reports of measurements, marked if files differ from it; `None` if this is no clone of
/// the repository.
fn commit() -> Option<String> {
    let git = |words: &[&str]| {
        let mut git = Command::new("git");
        let output = git.arg("-C").arg(variable("CARGO_MANIFEST_DIR")).args(words).output().ok()?;
        let said = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| said.trim().to_owned())
    };
    // It may lie unpacked inside of some other repository.
    let top = fs::canonicalize(git(&["rev-parse", "--show-toplevel"])?).ok()?;
    let here = fs::canonicalize(variable("CARGO_MANIFEST_DIR")).ok()?;
    if top.join("bench") != here {
        return None;
    }
    // Each commit, checkout and reset adds a line there.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    // The code that is measured.
    for watched in [
        "quinion",
        "view",
        "owner",
        "disk",
        "vm",
        "run",
        "size",
        "frontends/cli",
        "frontends/preload",
        "testing",
        "bench",
    ] {
        println!("cargo::rerun-if-changed={}", top.join(watched).join("src").display());
    }
    git(&["describe", "--always", "--dirty=, changed", "--abbrev=12", "--exclude=*"])
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name} for build scripts"))
}
