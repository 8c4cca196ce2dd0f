//! Plan: the steps of `test` and of `nightly`, as data.
//!
//! Each step is a command line that its output shows and that can be typed by hand. Builds with a cfg of their own have
//! a target folder of their own, so that they do not replace each other's files.
//!
//! The README's commands are run as the README prints them: [`readme_says`] fails when it prints something else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::step::{Action, Failure, Step};
use crate::tools::{cargo, flagged, is_installed, repository, rustc_line, target_folder, with};
use crate::{api, capi, dependencies, instructions, package, page, python, suites};

/// How many cases a property test tries in the nightly run: 20 times the usual 256.
const NIGHTLY_CASES: &str = "5120";
/// The oldest compiler the project promises to build with.
const MSRV: &str = "1.88";
/// The programs that the tests call, and that scripts/setup installs.
const PROGRAMS: [&str; 14] = [
    "cc",
    "c++",
    "pkg-config",
    "groff",
    "sqlite3",
    "python3",
    "valgrind",
    "fsx",
    "git",
    "rg",
    "tar",
    "gzip",
    "fio",
    "db_bench",
];
/// A header of SQLite's, with which the crash tests of its extension build a VFS.
const SQLITE_HEADER: &str = "/usr/include/sqlite3ext.h";
/// Files in the target folder that show what scripts/setup has installed there.
const TOOLS: [(&str, &str); 5] = [
    ("azurite", "tools/azurite-3.35.0/complete"),
    ("duckdb", "tools/duckdb-2.0.0/complete"),
    ("fake-gcs-server", "tools/fake-gcs-server-1.56.1/complete"),
    ("moto", "tools/moto-5.2.5/complete"),
    ("versitygw", "tools/versitygw-1.8.0/complete"),
];
/// Makes the compiler count which edges of the code a run takes, and record what was compared: the fuzzer steers by
/// that. These are options of LLVM's, so any compiler takes them.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
const CHAOS: &str = "test --release -p quinion-cli --test chaos -- --nocapture";
const CHAOS_SECONDS_NIGHTLY: &str = "3600";
/// Programs wait for the cache's owner as long as they do by default. `.cargo/config.toml` has tests wait longer, where
/// the variable is not set.
const WAIT_MS_BY_DEFAULT: &str = "";
const FUZZ_SECONDS: u32 = 20;
const FUZZ_SECONDS_NIGHTLY: u32 = 3600;
/// The folder of inputs that failed.
const FUZZ_FAILURES: &str = "target/fuzz/failures/";

/// Tests in which threads meet.
const TSAN_TESTS: &str = "--test xarray_walk --test churn --test add_folio --test shadows --test read --test files \
    --test soak --test starvation --test drop_behind --test write --test writeback --test spill --test pools \
    --test async_read --test background --test resize --test disk_tier --test hung_devices";
/// Reports of ThreadSanitizer that are no races, with reasons.
const TSAN_SUPPRESSIONS: &str = "tsan.suppressions";

const README_RUN: &str = "cargo run --release -- run --attach at-once -- grep -c the FILE";
const README_HELLO: &str = "cargo run --release -p quinion --example hello -- FILE";
const README_TEST: &str = "cargo xtask test";

/// All that must pass before a change is merged.
pub fn test() -> Vec<Step> {
    vec![
        Step::new("format", Action::Run(cargo("fmt --all --check"))),
        // Every feature is compiled once, here and in `tests`; the benchmark without its peers is only checked.
        Step::new(
            "clippy",
            Action::Run(cargo(
                "clippy --workspace --all-targets --features quinion-bench/peers,quinion/tokio -- -D warnings",
            )),
        ),
        Step::new("without-peers", Action::Run(cargo("clippy -p quinion-bench -- -D warnings"))),
        apart("preload-fmt", "frontends/preload", "fmt --check"),
        apart("preload", "frontends/preload", "clippy --release -- -D warnings"),
        apart("fuzz-fmt", "fuzz", "fmt --check"),
        apart("python-fmt", "frontends/python", "fmt --check"),
        apart("sqlite-fmt", "frontends/sqlite", "fmt --check"),
        apart("sqlite", "frontends/sqlite", "clippy --all-targets -- -D warnings"),
        apart("sqlite-tests", "frontends/sqlite", "test --no-fail-fast")
            .leaving(repository().join("frontends/sqlite/target")),
        Step::new("docs", Action::Call(api::document)),
        api::step(),
        Step::new("no-std", Action::Run(cargo("check -p quinion-view"))),
        Step::new("no-pack", Action::Run(cargo("clippy -p quinion-vm -- -D warnings"))),
        Step::new(
            "tests",
            Action::Run(with_servers(cargo(
                "test --workspace --features quinion-bench/peers,quinion/tokio --no-fail-fast",
            ))),
        )
        .leaving(target_folder().join("debug")),
        Step::new(
            "portable",
            Action::Run(portable("test -p quinion -p quinion-view --lib folio --target-dir target/portable")),
        )
        .leaving(repository().join("target/portable")),
        Step::new(
            "model",
            Action::Run(model(
                "test -p quinion --release --test model_hit --test model_descriptor --test xarray_model \
                 --test errseq_model --test doorbells_model --target-dir target/model",
            )),
        )
        .leaving(repository().join("target/model")),
        fuzz("fuzz", "xarray_ops", FUZZ_SECONDS),
        fuzz("fuzz-cache", "cache_ops", FUZZ_SECONDS),
        fuzz("fuzz-capi", "capi_ops", FUZZ_SECONDS),
        fuzz("fuzz-serve", "serve", FUZZ_SECONDS),
        fuzz("fuzz-restore", "restore", FUZZ_SECONDS),
        fuzz_builds().into_iter().fold(fuzz("fuzz-pack", "pack", FUZZ_SECONDS), Step::leaving),
        Step::new("readme", Action::Call(readme_says_what_is_run)),
        hello(),
        grep(),
        python::step().leaving(target_folder().join("python")),
        capi::step(),
        instructions::step(),
    ]
}

/// The longer runs, for a machine that is idle at night.
pub fn nightly() -> Vec<Step> {
    vec![
        Step::new(
            "properties",
            Action::Run(with_servers(with(
                "PROPTEST_CASES",
                NIGHTLY_CASES,
                cargo("test --workspace --release"),
            ))),
        ),
        Step::new(
            "soak",
            Action::Run(with_servers(with("QUINION_SOAK", "1", cargo("test --workspace --release")))),
        ),
        Step::new("chaos", Action::Run(with("QUINION_CHAOS_SECONDS", CHAOS_SECONDS_NIGHTLY, cargo(CHAOS)))),
        // With the default, answers come too late now and then; the longer wait of tests hides the consequences.
        Step::new(
            "chaos-late",
            Action::Run(with(
                "QUINION_WAIT_MS",
                WAIT_MS_BY_DEFAULT,
                with("QUINION_CHAOS_SECONDS", CHAOS_SECONDS_NIGHTLY, cargo(CHAOS)),
            )),
        ),
        suites::step(),
        python::nightly_step(),
        fuzz("fuzz-hour", "xarray_ops", FUZZ_SECONDS_NIGHTLY),
        fuzz("fuzz-cache-hour", "cache_ops", FUZZ_SECONDS_NIGHTLY),
        fuzz("fuzz-capi-hour", "capi_ops", FUZZ_SECONDS_NIGHTLY),
        fuzz("fuzz-serve-hour", "serve", FUZZ_SECONDS_NIGHTLY),
        fuzz("fuzz-restore-hour", "restore", FUZZ_SECONDS_NIGHTLY),
        fuzz("fuzz-pack-hour", "pack", FUZZ_SECONDS_NIGHTLY),
        thread_sanitizer(),
        oldest_compiler(),
        Step::new(
            "install",
            Action::Run(cargo("install --locked --path frontends/cli --root target/installed --force")),
        ),
        Step::new("package", Action::Call(package::build)),
        dependencies::deny(),
        dependencies::publish(),
        dependencies::sbom(),
        page::step(),
    ]
}

pub fn setup() -> Result<(), Failure> {
    let status = Command::new(repository().join("scripts/setup")).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => {
            Err(Failure::new(format!("scripts/setup ended with {status}; its output above says why")))
        }
        Err(error) => Err(Failure::new(format!("scripts/setup cannot be run: {error}"))),
    }
}

/// Calls [`setup`] if a program that the tests call is missing.
pub fn setup_if_needed() -> Result<(), Failure> {
    let mut missing: Vec<&str> = PROGRAMS.into_iter().filter(|program| !is_installed(program)).collect();
    let has_tool = |path: &str| target_folder().join(path).exists();
    missing.extend((!Path::new(SQLITE_HEADER).exists()).then_some("libsqlite3-dev"));
    missing.extend(TOOLS.into_iter().filter(|(_, path)| !has_tool(path)).map(|(name, _)| name));
    if missing.is_empty() {
        return Ok(());
    }
    println!("missing: {}; calling scripts/setup", missing.join(", "));
    setup()
}

/// Has tests fail whose server is missing, since scripts/setup installs them all. A machine that cannot have one says
/// so by `QUINION_TEST_WITHOUT`.
fn with_servers(command: Command) -> Command {
    with("QUINION_TEST_SERVERS", "required", command)
}

fn portable(arguments: &str) -> Command {
    flagged("--cfg quinion_portable", arguments)
}

fn model(arguments: &str) -> Command {
    flagged("--cfg quinion_model", arguments)
}

/// A step on a package that is no part of the workspace.
fn apart(name: &'static str, folder: &str, arguments: &str) -> Step {
    let path = repository().join(folder);
    if !path.join("Cargo.toml").exists() {
        return Step::new(name, Action::Skip(format!("there is no {folder} in this tree")));
    }
    let mut command = cargo(arguments);
    command.current_dir(path);
    Step::new(name, Action::Run(command))
}

/// The commands that the plan runs stand in the README, each on a line of its own.
fn readme_says_what_is_run() -> Result<(), Failure> {
    let readme = fs::read_to_string(repository().join("README.md"))
        .map_err(|error| Failure::new(format!("README.md cannot be read: {error}")))?;
    [README_RUN, README_HELLO, README_TEST].into_iter().try_for_each(|command| readme_says(&readme, command))
}

fn readme_says(readme: &str, command: &str) -> Result<(), Failure> {
    if readme.lines().any(|line| line.split('#').next().unwrap_or_default().trim() == command) {
        return Ok(());
    }
    Err(Failure::new(format!("README.md has no line `{command}`; change it and xtask/src/plan.rs together")))
}

/// A command of the README with `file` in place of FILE.
fn as_typed(command: &str, file: &Path) -> Command {
    let mut words = command.split_whitespace();
    assert_eq!(words.next(), Some("cargo"));
    let mut typed = cargo("");
    for word in words {
        typed.arg(if word == "FILE" { file.as_os_str() } else { word.as_ref() });
    }
    typed
}

fn hello() -> Step {
    let step = |action| Step::new("hello", action);
    match sample() {
        Ok(file) => step(Action::Run(as_typed(README_HELLO, &file))),
        Err(failure) => step(Action::Fail(failure)),
    }
}

fn grep() -> Step {
    let step = |action| Step::new("grep", action);
    match sample() {
        Ok(file) => step(Action::Expect(as_typed(README_RUN, &file), format!("{SAMPLE_THES}\n"))),
        Err(failure) => step(Action::Fail(failure)),
    }
}

/// Lines of the sample, and those of them with a "the".
const SAMPLE_LINES: usize = 50_000;
const SAMPLE_THES: usize = SAMPLE_LINES / 4 + 1;

/// A text of about 2 MiB that does not end at a page's end, whose number of matches is known.
fn sample() -> Result<PathBuf, Failure> {
    let folder = repository().join("target/xtask");
    let path = folder.join("sample.txt");
    let mut text = String::new();
    for line in 0..SAMPLE_LINES {
        let word = if line % 4 == 0 { "the" } else { "one" };
        text.push_str(&format!("line {line} of {word} sample has some words\n"));
    }
    text.push_str("and the last");
    fs::create_dir_all(&folder)
        .and_then(|()| fs::write(&path, text))
        .map_err(|error| Failure::new(format!("{} cannot be written: {error}", path.display())))?;
    Ok(path)
}

/// The stress tests under ThreadSanitizer, which comes with the stable compiler for some targets: with the portable
/// copy, and with a standard library that is compiled for it as well, since else it does not see what a lock of that
/// library orders. Tests run one by one, as each has threads enough. One test is left out: a long scan by a single
/// thread.
///
/// It checks plain memory: what locks guard and what crosses from thread to thread. The tree's slots and the hit
/// protocol are atomics and fences: those the `model` step checks.
fn thread_sanitizer() -> Step {
    let step = |action| Step::new("tsan", action);
    let host = match tsan_host() {
        Ok(host) => host,
        Err(why) => return step(Action::Skip(why)),
    };
    let arguments = format!(
        "test -Zbuild-std -p quinion -p quinion-owner --lib {TSAN_TESTS} --no-fail-fast --target {host} \
         --target-dir target/tsan -- --test-threads=1 --skip a_scan_of_many_times_the_memory"
    );
    let options = format!("suppressions={}", repository().join(TSAN_SUPPRESSIONS).display());
    let flags = "-Zsanitizer=thread --cfg quinion_portable";
    let command = with("RUSTC_BOOTSTRAP", "1", flagged(flags, &arguments));
    step(Action::Run(with("TSAN_OPTIONS", &options, command)))
}

/// The host's target, if the compiler has a ThreadSanitizer and the sources of its standard library; else why not.
fn tsan_host() -> Result<String, String> {
    let (host, root) = (rustc_line("-vV", "host: "), rustc_line("--print=sysroot", ""));
    let (Some(host), Some(root)) = (host, root) else { return Err("rustc does not run".to_owned()) };
    let folder = Path::new(&root).join("lib/rustlib").join(&host).join("lib");
    let is_runtime = |file: fs::DirEntry| file.file_name().to_string_lossy().ends_with("_rt.tsan.a");
    let has_runtime = fs::read_dir(folder).is_ok_and(|files| files.flatten().any(is_runtime));
    if !has_runtime {
        return Err(format!("this compiler has no ThreadSanitizer for {host}"));
    }
    let sources = Path::new(&root).join("lib/rustlib/src/rust/library/Cargo.toml");
    if !sources.exists() {
        return Err(
            "the sources of the standard library are missing; `rustup component add rust-src`".to_owned()
        );
    }
    Ok(host)
}

/// Runs a fuzz target for so many seconds. Its corpus stays in target/fuzz/corpus for the next run; an input that fails
/// stays in target/fuzz/failures, and the output says how to run it again.
///
/// The host is named as the target, so that the counters stay out of build scripts.
fn fuzz(name: &'static str, target: &str, seconds: u32) -> Step {
    let step = |action| Step::new(name, action);
    let Some(host) = rustc_line("-vV", "host: ") else {
        return step(Action::Skip("rustc does not say what it runs on".to_owned()));
    };
    let corpus = &*format!("target/fuzz/corpus/{target}");
    for folder in [corpus, FUZZ_FAILURES] {
        if let Err(error) = fs::create_dir_all(repository().join(folder)) {
            return step(Action::Fail(Failure::new(format!("{folder} cannot be made: {error}"))));
        }
    }
    let arguments = format!(
        "run --release --locked --manifest-path fuzz/Cargo.toml --bin {target} --target {host} \
         --target-dir target/fuzz -- -max_total_time={seconds} -rss_limit_mb=1024 -verbosity=0 \
         -print_final_stats=1 -artifact_prefix={FUZZ_FAILURES} {corpus}"
    );
    step(Action::Run(flagged(COVERAGE, &arguments)))
}

/// The builds of the targets, without corpus and failed inputs.
fn fuzz_builds() -> Vec<PathBuf> {
    let folder = repository().join("target/fuzz");
    let host = rustc_line("-vV", "host: ").map(|host| folder.join(host));
    host.into_iter().chain([folder.join("release")]).collect()
}

fn oldest_compiler() -> Step {
    let step = |action| Step::new("msrv", action);
    let listed = Command::new("rustup").args(["toolchain", "list"]).output();
    let listed =
        listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let Some(toolchain) = listed.split_whitespace().find(|name| name.starts_with(MSRV)) else {
        let why = format!("Rust {MSRV} is not installed; `rustup toolchain install {MSRV}`");
        return step(Action::Skip(why));
    };
    let mut command = Command::new("rustup");
    command.args([
        "run",
        toolchain,
        "cargo",
        "check",
        "--workspace",
        // It has a `rust-version` of its own, which its manifest explains.
        "--exclude=quinion-s3",
        "--all-targets",
        "--target-dir",
        "target/msrv",
    ]);
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC").current_dir(repository());
    step(Action::Run(command))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_readme_without_a_command_is_seen() {
        assert!(readme_says("```\n    cargo xtask test    # all\n```", README_TEST).is_ok());
        assert!(readme_says("```\ncargo xtask tests\n```", README_TEST).is_err());
    }

    #[test]
    fn a_command_is_typed_with_the_file_it_is_about() {
        let typed = as_typed(README_RUN, Path::new("a b.txt"));
        let words: Vec<_> = typed.get_args().map(|word| word.to_string_lossy()).collect();
        assert_eq!(words.join("|"), "run|--release|--|run|--attach|at-once|--|grep|-c|the|a b.txt");
    }

    #[test]
    fn the_sample_has_the_lines_that_are_expected() {
        let text =
            fs::read_to_string(sample().expect("the target folder can be written")).expect("it was written");
        assert_eq!(text.lines().filter(|line| line.contains("the")).count(), SAMPLE_THES);
        assert_ne!(text.len() % 4096, 0);
    }

    #[test]
    fn inputs_that_failed_outlast_a_lean_run() {
        let failures = repository().join(FUZZ_FAILURES);
        for step in test() {
            let removed = step.leaves().iter().find(|folder| failures.starts_with(folder));
            assert_eq!(removed, None, "{}", step.name());
        }
        assert!(fuzz_builds().len() == 2, "nothing that was built is removed");
    }

    #[test]
    fn step_names_are_given_once() {
        let mut names: Vec<_> = test().iter().chain(&nightly()).map(Step::name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
