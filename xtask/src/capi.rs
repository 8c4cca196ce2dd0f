//! The C library: built, installed below a prefix, and tested as a user in C has it.
//!
//! ```text
//!   cargo xtask capi [--prefix DIR]    builds and installs; the prefix is target/capi/installed if none is said
//!     lib/libquinion.a                 the static library, of cargo
//!     lib/libquinion.so.0.1.0          the same, linked by cc: a soname, and the symbols of quinion.map with a version
//!     lib/pkgconfig/quinion.pc
//!     include/quinion.h, quinion.hpp
//!     share/man/man3/                  a page for each function and struct, made of quinion.h
//!   cargo xtask test capi              the same, then all of frontends/capi/tests/c and examples
//! ```
//!
//! Rust's own way to a shared library exports its functions without versions and takes no second version script, so cc
//! links the static one. `cargo-c` would do the same with more to install.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::step::{Action, Failure, Step, execute};
use crate::tools::{cargo, repository, target_folder};

mod checks;
mod manual;

/// The release of the workspace, as the soname has it: releases 0.x promise nothing to each other.
const RELEASE: &str = "0.1.0";
const SONAME: &str = "libquinion.so.0.1";
/// Libraries of the system that Rust's standard library is linked with.
const SYSTEM_LIBRARIES: &[&str] = &["-lgcc_s", "-lpthread", "-ldl", "-lm", "-lc"];

pub fn step() -> Step {
    Step::new("capi", Action::Call(|| checks::all(&build()?)))
}

/// `cargo xtask capi`: `words` are what follows.
pub fn run(words: &[String]) -> Result<(), Failure> {
    let prefix = match words {
        [] => default_prefix(),
        [option, folder] if option == "--prefix" => PathBuf::from(folder),
        _ => return Err(Failure::new("cargo xtask capi takes nothing but --prefix DIR")),
    };
    let prefix = std::path::absolute(&prefix).map_err(|error| Failure::of(&prefix, &error))?;
    install(&prefix, &prefix, "lib")?;
    println!("installed in {}; PKG_CONFIG_PATH={0}/lib/pkgconfig", prefix.display());
    Ok(())
}

fn default_prefix() -> PathBuf {
    target_folder().join("capi/installed")
}

/// Installs where the tests look.
fn build() -> Result<PathBuf, Failure> {
    let prefix = default_prefix();
    if prefix.exists() {
        fs::remove_dir_all(&prefix).map_err(|error| Failure::of(&prefix, &error))?;
    }
    let prefix = std::path::absolute(&prefix).map_err(|error| Failure::of(&prefix, &error))?;
    install(&prefix, &prefix, "lib")?;
    Ok(prefix)
}

fn package() -> PathBuf {
    repository().join("frontends/capi")
}

/// Builds the library into `root`, for use at `prefix`: the same, or where a package has it. `libraries` is the folder
/// of libraries below both.
pub fn install(root: &Path, prefix: &Path, libraries: &str) -> Result<(), Failure> {
    execute(&mut cargo("rustc --release --locked -p quinion-capi --lib --crate-type staticlib"))?;
    let (lib, include) = (root.join(libraries), root.join("include"));
    for folder in [&lib.join("pkgconfig"), &include] {
        fs::create_dir_all(folder).map_err(|error| Failure::of(folder, &error))?;
    }
    let archive = lib.join("libquinion.a");
    let built = target_folder().join("release/libquinion_capi.a");
    execute(Command::new("strip").arg("--strip-debug").arg(built).arg("-o").arg(&archive))?;
    link(&lib, &archive)?;
    for header in ["quinion.h", "quinion.hpp"] {
        copy(&package().join("include").join(header), &include.join(header))?;
    }
    write(&lib.join("pkgconfig/quinion.pc"), &pkg_config(prefix, libraries))?;
    let header =
        fs::read_to_string(include.join("quinion.h")).map_err(|error| Failure::of(&include, &error))?;
    let manual = root.join("share/man/man3");
    fs::create_dir_all(&manual).map_err(|error| Failure::of(&manual, &error))?;
    for page in manual::pages(&header) {
        write(&manual.join(format!("{}.3", page.name)), &page.text)?;
    }
    Ok(())
}

/// The shared library of the static one, and its other names.
fn link(lib: &Path, archive: &Path) -> Result<(), Failure> {
    let file = format!("libquinion.so.{RELEASE}");
    let mut cc = Command::new("cc");
    cc.arg("-shared").arg("-o").arg(lib.join(&file)).arg(format!("-Wl,-soname,{SONAME}"));
    cc.arg(format!("-Wl,--version-script={}", package().join("quinion.map").display()));
    cc.arg("-Wl,--whole-archive").arg(archive).arg("-Wl,--no-whole-archive");
    cc.args(["-Wl,--gc-sections", "-Wl,-z,relro,-z,now", "-Wl,--no-undefined"]).args(SYSTEM_LIBRARIES);
    execute(&mut cc)?;
    for name in [SONAME, "libquinion.so"] {
        let link = lib.join(name);
        let _ = fs::remove_file(&link); // of an earlier installation
        std::os::unix::fs::symlink(&file, &link).map_err(|error| Failure::of(&link, &error))?;
    }
    Ok(())
}

fn pkg_config(prefix: &Path, libraries: &str) -> String {
    format!(
        "prefix={}\nlibdir=${{prefix}}/{libraries}\nincludedir=${{prefix}}/include\n\n\
         Name: quinion\nDescription: a page cache in user space\nVersion: {RELEASE}\n\
         Cflags: -I${{includedir}}\nLibs: -L${{libdir}} -lquinion\nLibs.private: {}\n",
        prefix.display(),
        SYSTEM_LIBRARIES.join(" ")
    )
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    fs::copy(from, to).map(|_| ()).map_err(|error| Failure::of(to, &error))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| Failure::of(path, &error))
}

fn printed(command: &mut Command) -> Result<String, Failure> {
    println!("{command:?}");
    let output =
        command.output().map_err(|error| Failure::new(format!("{command:?} cannot be run: {error}")))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        return Ok(text + &errors);
    }
    Err(Failure::new(format!("{command:?} ended with {}:\n{text}{errors}", output.status)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soname_and_the_release_are_those_of_the_workspace() {
        let manifest = fs::read_to_string(repository().join("Cargo.toml")).unwrap();
        assert!(manifest.contains(&format!("\nversion = \"{RELEASE}\"\n")));
        assert!(format!("libquinion.so.{RELEASE}").starts_with(SONAME));
    }
}
