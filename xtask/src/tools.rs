//! Tools: cargo and other programs, as the steps and tasks call them.
//!
//! All run in the repository, whatever folder the caller is in, and build where `CARGO_TARGET_DIR` says.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::step::Failure;

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository").to_owned()
}

/// Where cargo builds, as scripts/setup has it.
pub fn target_folder() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from)
}

pub fn cargo(arguments: &str) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments.split_whitespace()).current_dir(repository());
    command
}

pub fn with(name: &str, value: &str, mut command: Command) -> Command {
    command.env(name, value);
    command
}

pub fn flagged(flags: &str, arguments: &str) -> Command {
    let outer = env::var("RUSTFLAGS").unwrap_or_default();
    with("RUSTFLAGS", format!("{outer} {flags}").trim(), cargo(arguments))
}

pub fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// The first line that `rustc` prints and that begins with `prefix`, without it.
pub fn rustc_line(argument: &str, prefix: &str) -> Option<String> {
    let output = Command::new("rustc").arg(argument).output().ok()?;
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    output.lines().find_map(|line| line.strip_prefix(prefix)).map(str::to_owned)
}

pub fn output(command: &mut Command) -> Result<Vec<u8>, Failure> {
    let output =
        command.output().map_err(|error| Failure::new(format!("{command:?} cannot be run: {error}")))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::new(format!("{command:?} ended with {}: {told}", output.status)))
}

/// The time of the last commit, in seconds since 1970. Built files have that time, so that the same tree gives the
/// same bytes.
pub fn commit_time() -> Result<String, Failure> {
    let time = output(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(repository()))?;
    Ok(String::from_utf8_lossy(&time).trim().to_owned())
}
