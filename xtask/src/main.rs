//! The project's scripts, in Rust: `cargo xtask test`, `nightly`, `suites`, `bench`, `record`, `capi`, `package`
//! and `setup`.
//!
//! ```text
//!   main           what was asked for
//!   plan           which steps that is; each is a command line that can be typed by hand
//!   step           runs steps, counts, prints the summary        tools  cargo and other programs
//!   instructions   what the hot paths take, beside what is recorded
//!   api            the public interface, beside what is recorded
//!   suites         other projects' tests, with the cache and without
//!   bench          the benchmark, with the command that it measures beside it
//!   capi           the C library, built, installed and tested
//!   package        a package for Debian                   page   what a browser makes of a benchmark's page
//!   dependencies   what may be linked, and what is published
//! ```
//!
//! A plan is plain data, so that what continuous integration does can be read in one place. There are no dependencies:
//! a new clone of the repository waits for the project to compile and for nothing else.

mod api;
mod bench;
mod capi;
mod dependencies;
mod instructions;
mod package;
mod page;
mod plan;
mod python;
mod step;
mod suites;
mod tools;

use std::process::ExitCode;

use step::{BuildFiles, Failure, OnFailure};

const USAGE: &str = "\
cargo xtask test [--keep-going] [--lean] [STEP...]
                                               all that must pass before a change is merged
cargo xtask nightly [--keep-going] [--lean] [STEP...]
                                               the longer runs
cargo xtask suites [--json] [--quick] [SUITE...]
                                               other people's tests, with the cache and without
cargo xtask bench [ARGUMENT...]                builds and runs the benchmark; --help says what it takes
cargo xtask record                             counts the hot paths' instructions anew, and records them
cargo xtask record-api                         records the public interface anew
cargo xtask capi [--prefix DIR]                builds the C library, and installs it
cargo xtask package                            builds target/package/*.deb, and tries them
cargo xtask setup                              installs the system packages the tests use

STEP names a step of the plan, as the run announces it; without one, all run.
--keep-going goes on after a failure and fails at the end.
--lean removes what a step has built and no later step uses: for a machine with a small disk, and no second run.
Exit codes: 0 all passed, 1 a step failed, 2 the command line was not understood.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match Request::parse(&arguments) {
        Ok(Request::Help) => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        Ok(Request::Setup) => exit_code(plan::setup()),
        Ok(Request::Suites(words)) => exit_code(suites::run(&words)),
        Ok(Request::Bench(words)) => exit_code(bench::run(&words)),
        Ok(Request::Capi(words)) => exit_code(capi::run(&words)),
        Ok(Request::Package) => exit_code(package::build()),
        Ok(Request::Record) => exit_code(plan::setup_if_needed().and_then(|()| instructions::record())),
        Ok(Request::RecordApi) => exit_code(api::record()),
        Ok(Request::Run { plan, names, how }) => exit_code(run(plan, &names, how)),
        Err(wrong) => {
            eprintln!("{wrong}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn exit_code(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the steps of `plan` that `names` lists, or all of them.
fn run(plan: Plan, names: &[String], how: How) -> Result<(), Failure> {
    let all = match plan {
        Plan::Test => plan::test(),
        Plan::Nightly => plan::nightly(),
    };
    let unknown = names.iter().find(|name| all.iter().all(|step| step.name() != name.as_str()));
    if let Some(name) = unknown {
        let known: Vec<&str> = all.iter().map(|step| step.name()).collect();
        return Err(Failure::new(format!("there is no step `{name}`; there are {}", known.join(", "))));
    }
    plan::setup_if_needed()?;
    let is_wanted = |step: &step::Step| names.is_empty() || names.iter().any(|name| name == step.name());
    step::run_all(all.into_iter().filter(is_wanted).collect(), how.on_failure, how.build_files)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Plan {
    Test,
    Nightly,
}

#[derive(PartialEq, Eq, Debug)]
enum Request {
    Help,
    Setup,
    Record,
    RecordApi,
    Package,
    Suites(Vec<String>),
    Bench(Vec<String>),
    Capi(Vec<String>),
    Run { plan: Plan, names: Vec<String>, how: How },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct How {
    on_failure: OnFailure,
    build_files: BuildFiles,
}

impl Request {
    fn parse(arguments: &[String]) -> Result<Self, String> {
        let Some((verb, rest)) = arguments.split_first() else { return Ok(Self::Help) };
        let plan = match verb.as_str() {
            "help" | "--help" | "-h" => return Ok(Self::Help),
            "setup" => return Ok(Self::Setup),
            "record" => return Ok(Self::Record),
            "record-api" => return Ok(Self::RecordApi),
            "package" => return Ok(Self::Package),
            "suites" => return Ok(Self::Suites(rest.to_vec())),
            "bench" => return Ok(Self::Bench(rest.to_vec())),
            "capi" => return Ok(Self::Capi(rest.to_vec())),
            "test" => Plan::Test,
            "nightly" => Plan::Nightly,
            other => return Err(format!("`{other}` is not a task of this project")),
        };
        let (options, names): (Vec<&String>, Vec<&String>) =
            rest.iter().partition(|word| word.starts_with('-'));
        let mut how = How { on_failure: OnFailure::Stop, build_files: BuildFiles::Keep };
        for option in options {
            match option.as_str() {
                "--keep-going" => how.on_failure = OnFailure::GoOn,
                "--lean" => how.build_files = BuildFiles::Remove,
                _ => return Err(format!("`{option}` is not an option of `{verb}`")),
            }
        }
        Ok(Self::Run { plan, names: names.into_iter().cloned().collect(), how })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Request, String> {
        Request::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn requests_are_understood() {
        let run = |plan, names: &[&str], on_failure| {
            let names = names.iter().map(|name| name.to_string()).collect();
            Ok(Request::Run { plan, names, how: How { on_failure, build_files: BuildFiles::Keep } })
        };
        assert_eq!(parse(""), Ok(Request::Help));
        assert_eq!(parse("setup"), Ok(Request::Setup));
        assert_eq!(parse("record"), Ok(Request::Record));
        assert_eq!(parse("record-api"), Ok(Request::RecordApi));
        assert_eq!(parse("package"), Ok(Request::Package));
        assert_eq!(parse("suites git"), Ok(Request::Suites(vec!["git".to_owned()])));
        assert_eq!(parse("bench --quick"), Ok(Request::Bench(vec!["--quick".to_owned()])));
        assert_eq!(parse("capi --prefix x"), Ok(Request::Capi(vec!["--prefix".to_owned(), "x".to_owned()])));
        assert_eq!(parse("test"), run(Plan::Test, &[], OnFailure::Stop));
        assert_eq!(parse("test model --keep-going"), run(Plan::Test, &["model"], OnFailure::GoOn));
        let lean = How { on_failure: OnFailure::GoOn, build_files: BuildFiles::Remove };
        let names = Vec::new();
        assert_eq!(
            parse("test --lean --keep-going"),
            Ok(Request::Run { plan: Plan::Test, names, how: lean })
        );
        assert_eq!(parse("nightly soak"), run(Plan::Nightly, &["soak"], OnFailure::Stop));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        assert!(parse("tset").is_err_and(|wrong| wrong.contains("`tset`")));
        assert!(parse("test --fast").is_err_and(|wrong| wrong.contains("`--fast`")));
    }
}
