//! Python: the wheel of `faces/python`, built, and tested as a user has it.
//!
//! A fresh environment gets the builder, the wheel that it builds, and what the tests need, by pip. The tests import
//! the package from there: nothing of the source folder is on their path. `scripts/setup` leaves the S3 server in the
//! target folder.
//!
//! Clippy checks the compiled half here, as it is a workspace of its own and shares the build's target folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::step::{Action, Failure, Step, execute};
use crate::tools::{cargo, repository, target_folder};

/// The builder and the packages of its tests, of these versions or later compatible ones.
const PACKAGES: [&str; 6] = [
    "fsspec>=2025.9",
    "maturin>=1.9,<2",
    "mypy>=1.11,<3",
    "numpy>=2,<3",
    "pytest>=8,<10",
    "typing_extensions>=4.6,<5",
];

/// Engines that read through the package. One may be missing: its tests say `SKIPPED` then.
const ENGINES: [&str; 9] = [
    "pyarrow==26.0.1",
    "pandas==3.1.1",
    "duckdb==2.0.1",
    "polars==2.1.0",
    "s3fs==2026.9.0",
    "zarr==3.1.6",
    "xarray==2026.9.0",
    "distributed==2026.8.0",
    "tqdm>=4.66,<5",
];

/// Engines of the night: torch's wheel brings six gigabytes of drivers.
const NIGHTLY_ENGINES: [&str; 2] = ["ray==2.60.0", "torch==2.15.0"];

pub fn step() -> Step {
    Step::new("python", Action::Call(|| build_and_test(&[])))
}

/// The same with the heavy engines; by day their tests say `SKIPPED`.
pub fn nightly_step() -> Step {
    Step::new("python-heavy", Action::Call(|| build_and_test(&NIGHTLY_ENGINES)))
}

fn build_and_test(more: &[&str]) -> Result<(), Failure> {
    let folder = target_folder().join("python");
    let (environment, wheels) = (folder.join("environment"), folder.join("wheels"));
    for old in [&environment, &wheels] {
        if old.exists() {
            fs::remove_dir_all(old).map_err(|error| Failure::of(old, &error))?;
        }
    }
    execute(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    let python = environment.join("bin/python");
    execute(pip(&python).args(PACKAGES))?;
    let engines = [&ENGINES, more].concat();
    if execute(pip(&python).args(&engines)).is_err() {
        // If one of them cannot be installed, the others may.
        for engine in engines {
            if execute(pip(&python).arg(engine)).is_err() {
                println!("SKIPPED: {engine} cannot be installed here, so its tests are not run");
            }
        }
    }
    let manifest = repository().join("faces/python/Cargo.toml");
    let mut clippy = cargo("clippy --release --locked --all-targets --manifest-path");
    clippy.arg(&manifest).arg("--target-dir").arg(&folder).args(["--", "-D", "warnings"]);
    execute(&mut clippy)?;
    let mut build = Command::new(environment.join("bin/maturin"));
    build.args(["build", "--release", "--locked", "--manifest-path"]).arg(manifest);
    execute(build.arg("--target-dir").arg(&folder).arg("--out").arg(&wheels))?;
    execute(pip(&python).arg("--no-deps").arg(wheel(&wheels)?))?;
    let (tests, report) = (repository().join("faces/python/tests"), folder.join("results.xml"));
    let ran = execute(
        Command::new(&python)
            .args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--junitxml"])
            .args([&report, &tests])
            .env("QUINION_TOOLS", target_folder().join("tools"))
            .current_dir(&folder),
    );
    // Repeated at the end of a run, where users look.
    ran.map_err(|failure| match failed_tests(&fs::read_to_string(&report).unwrap_or_default()) {
        failed if failed.is_empty() => failure,
        failed => Failure::new(format!("tests failed: {}", failed.join(", "))),
    })
}

/// The tests that failed, by pytest's report: `<testcase classname=".." name=".." ..>` with a failure or error inside.
fn failed_tests(report: &str) -> Vec<&str> {
    let cases = report.split("<testcase ").skip(1);
    let failed = cases.filter(|case| case.contains("<failure") || case.contains("<error"));
    failed.filter_map(|case| case.split(" name=\"").nth(1)?.split('"').next()).collect()
}

fn pip(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
    command
}

fn wheel(folder: &Path) -> Result<PathBuf, Failure> {
    let files = fs::read_dir(folder).map_err(|error| Failure::of(folder, &error))?;
    let mut wheels =
        files.flatten().map(|file| file.path()).filter(|path| path.extension() == Some("whl".as_ref()));
    match (wheels.next(), wheels.next()) {
        (Some(wheel), None) => Ok(wheel),
        _ => Err(Failure::new(format!("there is not one wheel in {}", folder.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_are_named_as_the_report_names_them() {
        let report = r#"<testsuite name="pytest"><testcase classname="a" name="test_one[x]" time="1" />
            <testcase classname="a" name="test_two" time="2"><failure message="no">..</failure></testcase>
            <testcase classname="b" name="test_three[y]" time="0"><error message="no">..</error></testcase>
            <testcase classname="b" name="test_four" time="0"><skipped>..</skipped></testcase></testsuite>"#;
        assert_eq!(failed_tests(report), ["test_two", "test_three[y]"]);
        assert_eq!(failed_tests(""), [""; 0]);
    }
}
