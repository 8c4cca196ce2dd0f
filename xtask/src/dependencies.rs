//! Dependencies: what is linked into Quinion, checked against `deny.toml`, and that the libraries can be published.
//!
//! ```text
//!   cargo xtask nightly deny       licences, forbidden crates and sources of each lock file, by cargo-deny
//!   cargo xtask nightly publish    each library is packed, and built from what was packed
//!   target/tools/cargo/bin         cargo-deny, installed when it is first needed
//! ```

use std::path::PathBuf;
use std::process::Command;

use crate::step::{Action, Failure, Step, execute};
use crate::tools::{cargo, repository, target_folder};

/// The version whose answers were read.
const DENY: &str = "0.20.2";

/// The workspaces, each with a lock file of its own.
const MANIFESTS: [&str; 5] = [
    "Cargo.toml",
    "faces/preload/Cargo.toml",
    "faces/python/Cargo.toml",
    "faces/sqlite/Cargo.toml",
    "fuzz/Cargo.toml",
];

/// The libraries for Rust, in the order in which they need each other; all else is in packages, wheels and images.
const LIBRARIES: [&str; 6] =
    ["quinion-view", "quinion", "quinion-disk", "quinion-object", "quinion-service", "quinion-vm"];

pub fn deny() -> Step {
    Step::new("deny", Action::Call(check))
}

pub fn publish() -> Step {
    let packages = LIBRARIES.map(|name| format!("-p {name}")).join(" ");
    Step::new("publish", Action::Run(cargo(&format!("package --locked --allow-dirty {packages}"))))
}

fn check() -> Result<(), Failure> {
    let program = installed()?;
    MANIFESTS.iter().try_for_each(|manifest| {
        let mut deny = Command::new(&program);
        deny.current_dir(repository()).args([
            "--locked",
            "--config",
            "deny.toml",
            "--manifest-path",
            manifest,
        ]);
        // The list of known holes comes from the network: it is asked for at a release (CONTRIBUTING.md).
        execute(deny.args(["check", "--hide-inclusion-graph", "licenses", "bans", "sources"]))
    })
}

/// The program, which is built if it is not there.
fn installed() -> Result<PathBuf, Failure> {
    let root = target_folder().join("tools/cargo");
    let program = root.join("bin/cargo-deny");
    if !program.exists() {
        println!("cargo-deny is missing; it is built in some minutes");
        execute(cargo("install --locked --root").arg(&root).arg(format!("cargo-deny@{DENY}")))?;
    }
    Ok(program)
}
