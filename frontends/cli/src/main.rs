//! The command `quinion`: cat, stat, run and restore through a page cache you own.
//!
//! ```text
//!   quinion cat  [--memory SIZE] [--server NAME [--freshness HOW]] FILE|URL...
//!   quinion stat [--json] [--server NAME [--freshness HOW]] FILE|URL...
//!   quinion doctor [--json] [--folder DIR]... [PROGRAM]
//!   quinion run  [--memory SIZE] [--intercept auto|plt|off] [--attach auto|at-once]
//!                [--coherence leases|times] [--immutable FOLDER]... [--file-systems local|all]
//!                [--report text|json|none] [--report-file FILE] [--live] [--keep[=NAME] [--idle TIME]]
//!                -- PROGRAM [ARGUMENTS]
//!   quinion stop [NAME...] [--all]          quinion keeps [--json]
//!   quinion restore --snapshot FILE [--diff FILE].. --socket PATH [--record FILE] [--replay FILE] ..
//!   quinion pack --snapshot FILE [--diff FILE].. [--against PACK].. --out PACK      quinion pack --verify PACK
//!   quinion serve ..    quinion s3 ..       `quinion-serve`, `quinion-s3 serve`
//!   quinion top [--json] [ADDRESS]          what a running `quinion serve` does
//!   quinion man [VERB] [--out DIR]          quinion completions SHELL
//! ```
//!
//! This front end holds no policy: it translates arguments into calls of the library, and results into lines.
//!
//! | exit code | means |
//! |---|---|
//! | 0 | all went well |
//! | 1 | a file could not be read, or the cache could not be built; standard error says why |
//! | 2 | the command line was not understood |
//! | 3 | `doctor`: nothing of the program can be served |
//! | 141 | the reader of standard output has closed it (128 + the number of SIGPIPE, as a shell says it) |
//!
//! `run` ends with its program's code instead: 127 if there is no such program, 126 if it cannot be run, 128 + n if
//! signal n ended it.

mod cat;
mod doctor;
mod keeps;
mod manual;
mod other_program;
mod pack;
mod progress;
mod restore;
mod rules;
mod stat;
mod stop;
mod top_command;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use quinion::Pressure;
use quinion_cli::output::{EXIT_FAILED, EXIT_NOT_SERVED, complain, complain_only, print};
use quinion_run::keep::{self, CacheRequest, Idle, KeepOptions, Name};
use quinion_run::report::{self, Form};
use quinion_run::{
    Intercept, OwnerNumbers, OwnerNumbersSource, Planning, RunEnd, RunOptions, group, open_files,
};
use quinion_size::{self as size, Size};

const AFTER_HELP: &str = "\
Environment:
  QUINION_IO  `threads` reads without io_uring, `ring` with it where the system allows it

Exit codes:
  0    all went well
  1    a file could not be read, or the cache could not be built
  2    the command line was not understood
  3    doctor: nothing of the program can be served
  141  the reader of standard output ended (SIGPIPE)
`run` ends with its program's code instead: 127 if there is no such program,
126 if it cannot be run, 128 + n if signal n ended it.";

/// A page cache you own: read files through it, look at them, run programs on it, restore VMs from it.
#[derive(Parser, Debug)]
#[command(name = "quinion", version, max_term_width = 100, arg_required_else_help = true, after_help = AFTER_HELP)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Cat(cat::Arguments),
    Stat(stat::Arguments),
    Doctor(doctor::Arguments),
    Run(RunArguments),
    Stop(stop::Arguments),
    Keeps(keeps::Arguments),
    #[command(hide = true)]
    KeepOwner(KeepArguments),
    Restore(restore::Arguments),
    Pack(pack::Arguments),
    /// Serve objects of stores from one cache to this user's processes: starts `quinion-serve`.
    Serve(other_program::Arguments),
    /// Answer clients of S3 from the cache: starts `quinion-s3 serve`.
    S3(other_program::Arguments),
    Top(top_command::Arguments),
    Man(manual::ManArguments),
    Completions(manual::CompletionsArguments),
    /// Give a terminal's last rows back when standard input ends.
    #[command(name = quinion_run::REPAIR_VERB, hide = true)]
    RepairTerminal,
    /// Continue the process that starts this one, once a program is not stopped any more.
    #[command(name = quinion_run::WATCH_STOP_VERB, hide = true)]
    WatchStop {
        /// The number of that process.
        run: u32,
        /// The program's number.
        program: u32,
    },
}

const ABOUT_KEEPING: &str = "\
A cache that stays (--keep):
  quinion run --keep -- PROGRAM          the first run starts the cache `default`, and leaves it behind
  quinion run --keep -- PROGRAM          the next runs find what is in it
  quinion run --keep=db --memory 2G --idle never -- PROGRAM        another one, with its own memory
  quinion keeps                          show the caches, and what they hold
  quinion stop [NAME...] [--all]         end them; programs that use them go on without
There is one of each name for each user, a process of its own, found in the user's folder, which
`quinion man run` names. It has no terminal and no files of the run that started it; it has that run's mounts,
limits and control group. It has no file open that every program has closed for some seconds.
--memory and --idle are given when the cache is started; a run with other values is refused.";

/// Run a program, unmodified, with its file reads served from a cache.
#[derive(clap::Args, Debug)]
#[command(override_usage = "quinion run [OPTIONS] -- PROGRAM [ARGUMENTS]...", after_help = ABOUT_KEEPING)]
struct RunArguments {
    /// Memory the cache may use in all, such as 256M, 1.5G or 25%; at least 16M, at most half of what the control
    /// group may use, and a quarter of the machine's if not given. It uses less while programs are short of memory.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// How the program's calls reach the cache: auto patches its C library too where that is safe, plt goes by names
    /// alone, off leaves the program as it is.
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    intercept: RunIntercept,
    /// Which files are served: those that are read again and again (auto, the default), or each from its first read
    /// (at-once).
    #[arg(long, value_enum, value_name = "WHEN")]
    attach: Option<Attach>,
    #[command(flatten)]
    rules: rules::Arguments,
    /// Use a cache that stays for the next run, and start it if it is not there; `default` if no name is given.
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = "default")]
    keep: Option<Name>,
    /// How long that cache stays when it is not used, such as 90s, 30m or 2h, or `never` if it is to stay until it is
    /// stopped; 30m if not given.
    #[arg(long, value_name = "TIME", requires = "keep")]
    idle: Option<Idle>,
    /// How to say at the end what was served, and what was left to the kernel and why.
    #[arg(long, value_enum, value_name = "FORM", default_value_t)]
    report: RunReport,
    /// Where to write the report, `-` for standard output; standard error if not given.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    report_file: Option<PathBuf>,
    /// Show in the terminal's last rows, while the program runs, what the cache does for it: hits, throughput, memory
    /// and the files that are read most. The program's output scrolls above. Nothing is shown if standard error is no
    /// terminal.
    #[arg(long)]
    live: bool,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM",
          value_hint = clap::ValueHint::CommandWithArguments)]
    program: Vec<OsString>,
}

/// How a program's calls reach the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum RunIntercept {
    /// Intercept calls by symbol name, and patch the C library where that is safe.
    #[default]
    Auto,
    /// Intercept calls by symbol name alone.
    Plt,
    /// Intercept no calls: the program runs as it would alone.
    Off,
}

/// When `run` takes a file over from the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum Attach {
    /// Files that are read again and again, by one program or several, are copied from the kernel's page cache in the
    /// background: one of 4 MiB or more when it is read after it was opened for the third time, or when reads by one
    /// descriptor have come to twice its size; a smaller one when these have come to 256 KiB and to more than its
    /// size, and then to twice its size, or to the former by a third descriptor. A read counts for 16 KiB at most.
    #[default]
    Auto,
    /// Every file at its first read. It costs some 0.3 ms for each open, and misses of random reads go to the device
    /// one by one: for programs that open few files and read them long.
    AtOnce,
}

impl Attach {
    fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::AtOnce => "at-once",
        }
    }

    /// An owner that does so.
    fn owner(
        self,
        cache: &quinion::Cache,
        rules: quinion_owner::ServeRules,
    ) -> Arc<quinion_owner::CacheOwner> {
        let owner = quinion_owner::CacheOwner::new(cache.clone()).with_rules(rules);
        Arc::new(match self {
            Self::Auto => owner.attach_lazily(),
            Self::AtOnce => owner,
        })
    }
}

/// Be the owner of a cache that stays; started by `run --keep`.
#[derive(clap::Args, Debug)]
struct KeepArguments {
    #[arg(long)]
    folder: PathBuf,
    #[arg(long)]
    name: Name,
    #[arg(long)]
    memory: Option<u64>,
    #[arg(long)]
    idle: Option<Idle>,
    #[arg(long, value_enum, default_value_t)]
    attach: Attach,
    #[command(flatten)]
    rules: rules::Arguments,
}

/// In which form `run` reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum RunReport {
    /// Lines for people.
    #[default]
    Text,
    /// One line of JSON for programs.
    Json,
    /// No report.
    None,
}

fn main() -> ExitCode {
    match CommandLine::parse().command {
        Command::Cat(arguments) => cat::main(arguments),
        Command::Stat(arguments) => stat::main(arguments),
        Command::Doctor(arguments) => doctor::main(arguments),
        Command::Run(arguments) => run(arguments),
        Command::Stop(arguments) => stop::main(&arguments),
        Command::Keeps(arguments) => keeps::main(&arguments),
        Command::KeepOwner(arguments) => keep_owner(arguments),
        Command::Restore(arguments) => restore::main(arguments),
        Command::Pack(arguments) => pack::main(&arguments),
        Command::Serve(arguments) => {
            other_program::become_program("quinion-serve", "frontends/serve", &[], &arguments)
        }
        Command::S3(arguments) => {
            let arguments = arguments.without_first("serve"); // as the program's own usage has it
            other_program::become_program("quinion-s3", "frontends/s3", &["serve"], &arguments)
        }
        Command::Top(arguments) => top_command::main(&arguments),
        Command::Man(arguments) => manual::man(arguments),
        Command::Completions(arguments) => manual::completions(arguments),
        Command::WatchStop { run, program } => {
            quinion_run::watch_stop([run, program]);
            ExitCode::SUCCESS
        }
        Command::RepairTerminal => {
            quinion_run::repair_terminal().map_or_else(|error| complain(&error), |()| ExitCode::SUCCESS)
        }
    }
}

fn run(arguments: RunArguments) -> ExitCode {
    let options = RunOptions {
        report: match arguments.report {
            RunReport::Text => Some(Form::Text),
            RunReport::Json => Some(Form::Json),
            RunReport::None => None,
        },
        report_file: arguments.report_file,
        intercept: match arguments.intercept {
            RunIntercept::Auto => Intercept::Auto,
            RunIntercept::Plt => Intercept::Plt,
            RunIntercept::Off => Intercept::Off,
        },
        live: arguments.live,
        program: arguments.program,
    };
    let rules = match arguments.rules.settled() {
        Ok(rules) => rules,
        Err(error) => return complain(&error),
    };
    let asked = arguments.memory.map(|size| size.bytes(quinion::process_limit()));
    let memory = asked.map(|asked| {
        let (memory, said) = group::fit(asked, group::limit());
        said.iter().for_each(|said| complain_only(said));
        memory
    });
    let ended = match arguments.keep {
        Some(name) => {
            let attach = arguments.attach.map(|attach| attach.word().to_owned());
            run_kept(
                &options,
                &CacheRequest { name, memory, idle: arguments.idle, attach, rules: rules.words() },
            )
        }
        None => {
            let attach = arguments.attach.unwrap_or_default();
            run_alone(&options, memory, attach, rules.into_rules())
        }
    };
    match ended {
        Ok(ended) => ended.leave(),
        Err(error) => complain(&error),
    }
}

fn run_alone(
    options: &RunOptions,
    memory: Option<u64>,
    attach: Attach,
    rules: quinion_owner::ServeRules,
) -> Result<RunEnd, String> {
    if let Err(ended) = quinion_run::check_startable(options) {
        return Ok(ended);
    }
    let planning = Planning::begin(options).map_err(|error| error.to_string())?;
    let builder = shrinking(builder(memory.map(Size::Bytes))?);
    let owner = attach.owner(&build(builder)?, rules);
    let numbers = OwnerStats(Arc::clone(&owner));
    let ended = quinion_run::run(options, planning, owner, &numbers);
    ended.map_err(|error| open_files::describe(&error, error.raw_os_error()))
}

struct OwnerStats(Arc<quinion_owner::CacheOwner>);

impl OwnerNumbersSource for OwnerStats {
    fn numbers(&self) -> OwnerNumbers {
        OwnerNumbers::of(&self.0)
    }
    fn hottest(&self, most: usize) -> Vec<quinion_owner::HotFile> {
        self.0.hottest(most)
    }
}

fn run_kept(options: &RunOptions, wanted: &CacheRequest) -> Result<RunEnd, String> {
    quinion_run::run_kept(options, wanted).map_err(|error| error.to_string())
}

/// The process of a kept cache. Errors were reported to the run that started it.
fn keep_owner(arguments: KeepArguments) -> ExitCode {
    let KeepArguments { folder, name, memory, idle, attach, rules } = arguments;
    let (attach_word, rule_words) = (attach.word().to_owned(), rules.words());
    let idle = idle.unwrap_or_default();
    let keeping = KeepOptions { folder, name, idle, attach: attach_word, rules: rule_words };
    let build_kept = || {
        let memory = memory.map(Size::Bytes);
        let builder = shrinking(builder(memory)?);
        let cache = build(builder.idle_files_max(keep::files_max()))?;
        let owner = attach.owner(&cache, rules.into_rules());
        let numbers = Box::new(OwnerStats(Arc::clone(&owner)));
        let tidy = Box::new(move || cache.release_removed_files(keep::REMOVED_FILES_CHECKED_MAX));
        Ok(keep::Cache { owner, numbers, tidy })
    };
    match keep::keep(&keeping, build_kept) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(EXIT_FAILED),
    }
}

fn build_cache(memory: Option<Size>) -> Result<quinion::Cache, String> {
    build(builder(memory)?)
}

fn build(builder: quinion::Builder) -> Result<quinion::Cache, String> {
    builder.build().map_err(|error| open_files::describe(&error, error.raw_os_error()))
}

/// Adds that the cache shrinks while programs are short of memory.
fn shrinking(builder: quinion::Builder) -> quinion::Builder {
    builder.pressure(Pressure::shrink_to(quinion::Cache::MEMORY_MIN))
}

/// A builder with that bound. The library checks it as well; here it is refused in the units in which it was given.
fn builder(memory: Option<Size>) -> Result<quinion::Builder, String> {
    let builder = quinion::Cache::builder();
    let Some(size) = memory else { return Ok(builder) };
    let (bytes, min, max) =
        (size.bytes(quinion::process_limit()), quinion::Cache::MEMORY_MIN, quinion::process_limit());
    if bytes < 1 << 10 {
        return Err(format!(
            "--memory is {} and too small: a cache needs at least {}; a number without a unit is in bytes, so write a \
             unit, such as 256M",
            if bytes == 1 { "1 byte".to_owned() } else { format!("{bytes} bytes") },
            size.rounded_up(min)
        ));
    }
    if bytes < min {
        return Err(format!("--memory {size} is too small: a cache needs at least {}", size.rounded_up(min)));
    }
    if bytes > max {
        return Err(format!(
            "--memory {size} is more than this process may use ({}); give {} or less",
            size::shown(max),
            size.rounded_down(max)
        ));
    }
    Ok(builder.memory(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn run_arguments(words: &[&str]) -> RunArguments {
        match CommandLine::try_parse_from(["quinion", "run"].iter().chain(words)) {
            Ok(CommandLine { command: Command::Run(arguments) }) => arguments,
            other => panic!("{words:?} is {other:?}"),
        }
    }

    #[test]
    fn too_much_memory_is_refused_in_the_units_that_were_typed() {
        for (typed, unit) in [("900001GB", "MB or less"), ("900000G", "M or less"), ("800T", "M or less")] {
            let error = builder(typed.parse().ok()).expect_err("no machine has so much");
            assert!(
                error.starts_with(&format!("--memory {typed} is more")) && error.ends_with(unit),
                "{error}"
            );
        }
    }

    #[test]
    fn the_command_line_has_no_contradictions() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn a_programs_options_are_its_own() {
        for words in [
            &["--memory", "64M", "--", "grep", "--memory", "-c"][..],
            &["--memory=64M", "grep", "--memory", "-c"],
        ] {
            let arguments = run_arguments(words);
            assert_eq!(arguments.memory, Some(Size::Bytes(64 << 20)));
            assert_eq!(arguments.program, ["grep", "--memory", "-c"]);
            assert_eq!((arguments.report, arguments.report_file), (RunReport::Text, None));
        }
    }

    #[test]
    fn arguments_that_are_not_understood_are_refused() {
        for words in
            [&["cat"][..], &["run"], &["run", "--"], &["cat", "--memory", "64XB", "x"], &["dog"], &[]]
        {
            assert!(CommandLine::try_parse_from(["quinion"].iter().chain(words)).is_err(), "{words:?}");
        }
    }
}
