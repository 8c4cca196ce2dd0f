//! Builds the interposer and leaves it in `OUT_DIR`, where `lib.rs` embeds it.
//!
//! It is a package of its own with its own settings, so it takes a cargo of its own. That one works in a target folder
//! inside `OUT_DIR`: the lock of the outer one is not needed, so neither waits for the other. It sees none of the outer
//! build's flags and wrappers, which are meant for other code.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Variables that the outer cargo, or its caller, set for the outer build.
const NOT_INHERITED: [&str; 12] = [
    "RUSTFLAGS",
    "CARGO_ENCODED_RUSTFLAGS",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "CARGO_BUILD_TARGET",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_TARGET_DIR",
    "CARGO_BUILD_TARGET_DIR",
    "CARGO_BUILD_BUILD_DIR",
    "CARGO_MAKEFLAGS",
    "MAKEFLAGS",
    "CLIPPY_ARGS",
];

fn main() {
    assert!(
        variable("CARGO_CFG_TARGET_OS") == "linux",
        "the command is for Linux: it is made of the kernel's own calls, and there are no others it could use; build \
         it on or for Linux (--target x86_64-unknown-linux-gnu)"
    );
    let out = PathBuf::from(variable("OUT_DIR"));
    let object = out.join("preload.so");
    if is_supported() {
        build(&out, &object);
    } else {
        fs::write(&object, []).expect("OUT_DIR can be written");
    }
    let bytes = fs::read(&object).expect("it was written just now");
    println!("cargo::rustc-env=QUINION_OBJECT={:032x}", hash(&bytes));
}

/// A hash that tells two objects apart: FNV-1a of 128 bits, by Fowler, Noll and Vo. It protects nothing.
fn hash(bytes: &[u8]) -> u128 {
    let mix = |hash: u128, &byte: &u8| (hash ^ u128::from(byte)).wrapping_mul(0x100_0000_0000_0000_0000_013b);
    bytes.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, mix)
}

/// The interposer knows one machine and one C library; elsewhere `run` says so.
fn is_supported() -> bool {
    let is = |name: &str, value: &str| variable(name) == value;
    is("CARGO_CFG_TARGET_ARCH", "x86_64")
        && is("CARGO_CFG_TARGET_OS", "linux")
        && is("CARGO_CFG_TARGET_ENV", "gnu")
}

fn build(out: &Path, object: &Path) {
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let preload = here.join("../frontends/preload");
    let library = here.join("../view");
    assert!(
        preload.join("Cargo.toml").exists(),
        "{} is missing: `quinion run` carries an object that is built from it; build from the whole repository \
         (`cargo install --locked --path frontends/cli` in a clone of it), not from this package alone",
        preload.display()
    );
    for watched in ["src", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", preload.join(watched).display());
    }
    for watched in ["src", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", library.join(watched).display());
    }
    println!("cargo::rerun-if-changed=build.rs");

    let target = variable("TARGET");
    let folder = out.join("preload");
    let mut cargo = Command::new(variable("CARGO"));
    cargo.args(["build", "--release", "--locked", "--target", &target]).arg("--target-dir").arg(&folder);
    cargo.arg("--manifest-path").arg(preload.join("Cargo.toml"));
    if env::var_os("CARGO_NET_OFFLINE").is_some() {
        cargo.arg("--offline");
    }
    for name in NOT_INHERITED {
        cargo.env_remove(name);
    }
    let status = cargo.status().expect("cargo, which called this script, can be called");
    assert!(status.success(), "the interposer in frontends/preload does not build: see above");
    let built = folder.join(&target).join("release/libquinion_preload.so");
    fs::copy(&built, object).expect("cargo leaves the object where it always does");
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name} for build scripts"))
}
