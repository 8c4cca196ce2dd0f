//! Python: the wheel of `frontends/python`, built, and tested as a user has it.
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

/// Engines that read through the package. A step that cannot install them fails, unless `QUINION_TEST_WITHOUT` has
/// `engines` among its words: then none is installed, and their tests say `SKIPPED`.
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

/// As README.md and docs/python.md tell users to build the wheel.
const BUILD: &str = "maturin build --release";

pub fn step() -> Step {
    Step::new("python", Action::Call(|| build_and_test(Length::Day)))
}

/// Like `step`, with the heavy engines, whose tests say `SKIPPED` by day, and a million operations where that does
/// some thousands.
pub fn nightly_step() -> Step {
    Step::new("python-heavy", Action::Call(|| build_and_test(Length::Night)))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Length {
    Day,
    Night,
}

impl Length {
    fn engines(self) -> Vec<&'static str> {
        let without = std::env::var("QUINION_TEST_WITHOUT").unwrap_or_default();
        match self {
            _ if without.split(',').any(|word| word == "engines") => Vec::new(),
            Self::Day => ENGINES.to_vec(),
            Self::Night => [&ENGINES[..], &NIGHTLY_ENGINES[..]].concat(),
        }
    }
}

fn build_and_test(length: Length) -> Result<(), Failure> {
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
    let engines = length.engines();
    if engines.is_empty() {
        println!("SKIPPED: no engine is installed, so their tests are not run; QUINION_TEST_WITHOUT says so");
    } else if let Err(failure) = execute(pip(&python).args(&engines)) {
        let text = "QUINION_TEST_WITHOUT=engines tests the package without them";
        return Err(Failure::new(format!("the engines cannot be installed: {failure}; {text}")));
    }
    let manifest = repository().join("frontends/python/Cargo.toml");
    let mut clippy = cargo("clippy --release --locked --all-targets --manifest-path");
    clippy.arg(&manifest).arg("--target-dir").arg(&folder).args(["--", "-D", "warnings"]);
    execute(&mut clippy)?;
    let mut words = BUILD.split(' ');
    let mut build = Command::new(environment.join("bin").join(words.next().unwrap_or_default()));
    build.args(words).args(["--locked", "--manifest-path"]).arg(manifest);
    execute(build.arg("--target-dir").arg(&folder).arg("--out").arg(&wheels))?;
    execute(pip(&python).arg("--no-deps").arg(wheel(&wheels)?))?;
    let (tests, report) = (repository().join("frontends/python/tests"), folder.join("results.xml"));
    let mut run = Command::new(&python);
    run.args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--junitxml"]).args([&report, &tests]);
    run.env("QUINION_TOOLS", target_folder().join("tools")).current_dir(&folder);
    run.env(
        "QUINION_TEST_ENGINES",
        engines.iter().map(|engine| module(engine)).collect::<Vec<_>>().join(","),
    );
    if length == Length::Night {
        run.env("QUINION_SOAK", "1");
    }
    let ran = execute(&mut run);
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

/// The module of a requirement such as `tqdm>=4.66,<5`.
fn module(requirement: &str) -> &str {
    requirement.split(['=', '>', '<']).next().unwrap_or(requirement)
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
    fn users_are_told_the_command_that_builds_the_tested_wheel() {
        for (page, text) in [
            ("README.md", format!("`{BUILD}` in `frontends/python`")),
            ("docs/python.md", format!("`pip install maturin`, `{BUILD}`, `pip install")),
        ] {
            let page = fs::read_to_string(repository().join(page)).unwrap().replace('\n', " ");
            assert!(page.contains(&text), "{text}");
        }
    }

    #[test]
    fn an_engine_is_imported_by_the_name_of_its_requirement() {
        let engines = [&ENGINES[..], &NIGHTLY_ENGINES[..]].concat();
        let modules: Vec<_> = engines.iter().map(|engine| module(engine)).collect();
        assert!(modules.contains(&"tqdm") && modules.contains(&"pyarrow") && modules.contains(&"ray"));
        assert!(
            modules.iter().all(|name| name.bytes().all(|byte| byte.is_ascii_alphanumeric())),
            "{modules:?}"
        );
    }

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
