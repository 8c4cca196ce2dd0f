//! Python: the wheel of `faces/python`, built, and tested as a user has it.
//!
//! A fresh environment gets the builder, the wheel that it builds, and what the tests need, by pip. The tests import
//! the package from there: nothing of the source folder is on their path.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::step::{Action, Failure, Step};
use crate::tools::{repository, target_folder};

/// What builds the wheel and what its tests use, of these versions or later ones that keep their promises.
const PACKAGES: [&str; 6] = [
    "fsspec>=2025.9",
    "maturin>=1.9,<2",
    "mypy>=1.11,<3",
    "numpy>=2,<3",
    "pytest>=8,<10",
    "typing_extensions>=4.6,<5",
];

pub fn step() -> Step {
    Step::new("python", Action::Call(build_and_test))
}

fn build_and_test() -> Result<(), Failure> {
    let folder = target_folder().join("python");
    let (environment, wheels) = (folder.join("environment"), folder.join("wheels"));
    for old in [&environment, &wheels] {
        if old.exists() {
            fs::remove_dir_all(old).map_err(|error| failure_of(old, &error))?;
        }
    }
    run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    let python = environment.join("bin/python");
    run(pip(&python).args(PACKAGES))?;
    let manifest = repository().join("faces/python/Cargo.toml");
    let mut build = Command::new(environment.join("bin/maturin"));
    build.args(["build", "--release", "--locked", "--manifest-path"]).arg(manifest);
    run(build.arg("--target-dir").arg(&folder).arg("--out").arg(&wheels))?;
    run(pip(&python).arg("--no-deps").arg(wheel(&wheels)?))?;
    let tests = repository().join("faces/python/tests");
    run(Command::new(&python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .arg(&tests)
        .current_dir(&folder))
}

fn pip(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
    command
}

/// The one wheel that was built.
fn wheel(folder: &Path) -> Result<PathBuf, Failure> {
    let files = fs::read_dir(folder).map_err(|error| failure_of(folder, &error))?;
    let mut wheels =
        files.flatten().map(|file| file.path()).filter(|path| path.extension() == Some("whl".as_ref()));
    match (wheels.next(), wheels.next()) {
        (Some(wheel), None) => Ok(wheel),
        _ => Err(Failure::new(format!("there is not one wheel in {}", folder.display()))),
    }
}

fn failure_of(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("{}: {error}", path.display()))
}

fn run(command: &mut Command) -> Result<(), Failure> {
    println!("{command:?}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => {
            Err(Failure::new(format!("{command:?} ended with {status}; its output above says why")))
        }
        Err(error) => Err(Failure::new(format!("{command:?} cannot be run: {error}"))),
    }
}
