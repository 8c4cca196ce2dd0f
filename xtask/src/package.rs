//! Package: a package for Debian and its like, with the manual pages and the shells' completions.
//!
//! ```text
//!   target/package/man, completions     written by the command itself
//!   target/package/quinion.deb          by cargo-deb, as faces/cli/Cargo.toml says
//!   target/package/root                 what is in it, unpacked, to see that it works
//! ```
//!
//! Nothing is installed, and root is not needed. Unpacked where it belongs (`sudo dpkg -i`), it needs the C library and
//! nothing else.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::step::{Failure, execute};
use crate::tools::{cargo, repository};

/// What must be in the package.
const WANTED: [&str; 9] = [
    "usr/bin/quinion",
    "usr/share/man/man1/quinion.1.gz",
    "usr/share/man/man1/quinion-run.1.gz",
    "usr/share/man/man1/quinion-restore.1.gz",
    "usr/share/bash-completion/completions/quinion",
    "usr/share/zsh/vendor-completions/_quinion",
    "usr/share/fish/vendor_completions.d/quinion.fish",
    "usr/share/doc/quinion/copyright",
    "usr/share/doc/quinion/LICENSE-APACHE",
];

/// Completions: the shell, and the name its file has.
const COMPLETIONS: [(&str, &str); 3] =
    [("bash", "quinion.bash"), ("zsh", "_quinion"), ("fish", "quinion.fish")];

/// Builds the package, unpacks it and runs what is in it.
pub fn build() -> Result<(), Failure> {
    output(cargo("deb --version")).map_err(|_| {
        Failure::new(
            "cargo-deb is missing; install it by `cargo install --locked cargo-deb` and call this again",
        )
    })?;
    let folder = repository().join("target/package");
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|error| Failure::of(&folder, &error))?;
    }
    // The target folder is named, so that the assets are where the package's description says.
    execute(&mut cargo("build --release --locked -p quinion-cli --target-dir target"))?;
    write_words(&folder)?;
    let package = folder.join("quinion.deb");
    let mut deb = cargo("deb --locked -p quinion-cli --no-build --output");
    deb.arg(&package).env("CARGO_TARGET_DIR", repository().join("target"));
    execute(&mut deb)?;
    try_out(&package, &folder.join("root"))?;
    println!("the package is {}; install it by `sudo dpkg -i`", package.display());
    Ok(())
}

/// The manual pages and completions.
fn write_words(folder: &Path) -> Result<(), Failure> {
    let quinion = || Command::new(repository().join("target/release/quinion"));
    let mut man = quinion();
    man.args(["man", "--out"]).arg(folder.join("man"));
    execute(&mut man)?;
    let completions = folder.join("completions");
    fs::create_dir_all(&completions).map_err(|error| Failure::of(&completions, &error))?;
    for (shell, name) in COMPLETIONS {
        let mut command = quinion();
        command.args(["completions", shell]);
        let path = completions.join(name);
        fs::write(&path, output(command)?).map_err(|error| Failure::of(&path, &error))?;
    }
    Ok(())
}

/// Unpacks the package into `root`, looks for all that must be there, and runs a program by it.
fn try_out(package: &Path, root: &Path) -> Result<(), Failure> {
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("--extract").arg(package).arg(root);
    execute(&mut unpack)?;
    if let Some(name) = missing(root) {
        return Err(Failure::new(format!(
            "{name} is not in the package; see the assets in faces/cli/Cargo.toml"
        )));
    }
    let quinion = root.join("usr/bin/quinion");
    let mut run = Command::new(&quinion);
    run.args(["run", "--memory=16M", "--report=none", "--", "cat", "LICENSE-MIT"]).current_dir(repository());
    let printed = output(run)?;
    let path = repository().join("LICENSE-MIT");
    let expected = fs::read(&path).map_err(|error| Failure::of(&path, &error))?;
    if printed != expected {
        return Err(Failure::new("what the package's command runs prints something else than it should"));
    }
    Ok(())
}

fn missing(root: &Path) -> Option<&'static str> {
    WANTED.into_iter().find(|name| !root.join(name).is_file())
}

/// What a command prints, if it succeeds.
fn output(mut command: Command) -> Result<Vec<u8>, Failure> {
    let output =
        command.output().map_err(|error| Failure::new(format!("{command:?} cannot be run: {error}")))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::new(format!("{command:?} ended with {}: {told}", output.status)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn required_files_are_among_the_packages_assets() {
        let manifest = fs::read_to_string(repository().join("faces/cli/Cargo.toml")).expect("it is there");
        for (_, name) in COMPLETIONS {
            assert!(manifest.contains(&format!("target/package/completions/{name}")), "{name}");
        }
        for name in WANTED.iter().filter(|name| !name.ends_with("copyright")) {
            let folder = &name[..name.rfind('/').unwrap()];
            assert!(manifest.contains(folder), "{name}");
        }
    }

    #[test]
    fn an_absent_file_is_reported_missing() {
        assert_eq!(missing(Path::new("/nowhere")), Some("usr/bin/quinion"));
    }
}
