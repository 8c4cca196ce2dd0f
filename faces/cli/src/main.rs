//! The command `quinion`: cat, stat, bench, run and restore through a page cache you own.
//!
//! ```text
//!   quinion cat  [--memory SIZE] FILE...
//!   quinion stat [--json] FILE...
//!   quinion bench [EXPERIMENT...] [--quick] [--json] [--repeat N] [--scratch DIR]
//!   quinion run  [--memory SIZE] [--tuning CHOICES] [--attach auto|at-once] [--report text|json|none]
//!                [--report-file FILE] [--live] -- PROGRAM [ARGUMENTS]
//!   quinion restore --snapshot FILE --socket PATH [--record FILE] [--replay FILE] [--metrics FILE|ADDRESS] ..
//!   quinion man [VERB] [--out DIR]          quinion completions SHELL
//! ```
//!
//! This face holds no policy. It turns words into calls of the library, and
//! answers into lines.
//!
//! | exit code | means |
//! |---|---|
//! | 0 | all went well |
//! | 1 | a file could not be read, or a cache not be built; standard error says why |
//! | 2 | the command line was not understood |
//! | 141 | whoever read standard output went away (128 + the number of SIGPIPE, as a shell says it) |
//!
//! `run` ends with its program's code instead: 127 if there is no such program,
//! 126 if it cannot be run, 128 + n if signal n ended it.

mod bench;
mod cat;
mod manual;
mod progress;
mod restore;
mod stat;
mod sys;
mod tuning;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use quinion_cli::report::{self, Form};
use quinion_cli::run::{Numbers, OwnerNumbers, RunOptions};
use quinion_cli::size::{self, Size};

/// A file, or the command as a whole, did not succeed.
const EXIT_FAILED: u8 = 1;
/// Nobody reads what is written: 128 + SIGPIPE.
const EXIT_READER_GONE: u8 = 141;

const AFTER_HELP: &str = "\
Environment:
  QUINION_IO  `threads` reads without io_uring, `ring` with it where the system lets us

Exit codes:
  0    all went well
  1    a file could not be read, or a cache not be built
  2    the command line was not understood
  141  nobody reads the output any more
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
    Bench(bench::Arguments),
    Run(RunArguments),
    Restore(restore::Arguments),
    Man(manual::ManArguments),
    Completions(manual::CompletionsArguments),
    /// Give a terminal's last rows back when standard input ends.
    #[command(name = quinion_cli::run::MEND, hide = true)]
    MendTerminal,
}

/// Run a program, unmodified, with its file reads served from a cache.
#[derive(clap::Args, Debug)]
#[command(override_usage = "quinion run [OPTIONS] -- PROGRAM [ARGUMENTS]...")]
struct RunArguments {
    /// Memory the cache may use in all, such as 256M, 1.5G or 25%; at least 16M, and a quarter of the
    /// machine's if not given.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// How the cache works inside, for who asks what that is worth: insertion=batched or one-by-one,
    /// descent=single or naive; with commas between them.
    #[arg(long, value_name = "CHOICES", value_parser = tuning::parse, default_value = "insertion=batched")]
    tuning: quinion::Tuning,
    /// Which files are taken over from the kernel: those for which that pays, or each at its first read.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    attach: Attach,
    /// How to say at the end what was served, and what was left to the kernel and why.
    #[arg(long, value_enum, value_name = "FORM", default_value_t)]
    report: RunReport,
    /// Where to write that; standard error if not given.
    #[arg(long, value_name = "FILE")]
    report_file: Option<PathBuf>,
    /// Show in the terminal's last rows, while the program runs, what the cache does for it: hits, throughput, memory
    /// and the files that are read most. The program's output scrolls above. Nothing is shown if standard error is no
    /// terminal.
    #[arg(long)]
    live: bool,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// When `run` takes a file over from the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum Attach {
    /// When they are read again and again: what is read once or twice the kernel reads as fast.
    #[default]
    Auto,
    /// Every file at its first read.
    AtOnce,
}

/// In which form `run` reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum RunReport {
    /// Lines for people.
    #[default]
    Text,
    /// One line of JSON for programs.
    Json,
    /// Not at all.
    None,
}

fn main() -> ExitCode {
    match CommandLine::parse().command {
        Command::Cat(arguments) => cat::main(arguments),
        Command::Stat(arguments) => stat::main(arguments),
        Command::Bench(arguments) => bench::main(arguments),
        Command::Run(arguments) => run(arguments),
        Command::Restore(arguments) => restore::main(arguments),
        Command::Man(arguments) => manual::man(arguments),
        Command::Completions(arguments) => manual::completions(arguments),
        Command::MendTerminal => {
            quinion_cli::run::mend().map_or_else(|error| complain(&error), |()| ExitCode::SUCCESS)
        }
    }
}

/// Runs the program with a cache of ours as the owner, and ends as it does.
fn run(arguments: RunArguments) -> ExitCode {
    let cache = match build_tuned(arguments.memory, arguments.tuning) {
        Ok(cache) => cache,
        Err(error) => return complain(&error),
    };
    let owner = quinion::CacheOwner::new(cache);
    let owner = Arc::new(match arguments.attach {
        Attach::Auto => owner.polite(),
        Attach::AtOnce => owner,
    });
    let options = RunOptions {
        report: match arguments.report {
            RunReport::Text => Some(Form::Text),
            RunReport::Json => Some(Form::Json),
            RunReport::None => None,
        },
        report_file: arguments.report_file,
        live: arguments.live,
        program: arguments.program,
    };
    let numbers = Watched(Arc::clone(&owner));
    match quinion_cli::run::run(&options, owner, &numbers) {
        Ok(ended) => ended.leave(),
        Err(error) => complain(&error),
    }
}

/// A cache of ours, as `run` asks about it.
struct Watched(Arc<quinion::CacheOwner>);

impl Numbers for Watched {
    fn numbers(&self) -> OwnerNumbers {
        let cache = self.0.cache();
        let stats = cache.stats();
        OwnerNumbers {
            readahead: cache.readahead_use(),
            device_reads: stats.device_reads,
            device_bytes: stats.device_bytes,
            evicted_pages: stats.evicted_pages,
            refaulted_pages: stats.refaulted_pages,
            activated_pages: stats.activated_pages,
            workingset_windows: stats.workingset_windows,
        }
    }
    fn hottest(&self, most: usize) -> Vec<quinion::HotFile> {
        self.0.hottest(most)
    }
}

/// A cache of `memory`, or of the library's default.
fn build_cache(memory: Option<Size>) -> Result<quinion::Cache, String> {
    build_tuned(memory, quinion::Tuning::default())
}

/// One that works as `tuning` says.
fn build_tuned(memory: Option<Size>, tuning: quinion::Tuning) -> Result<quinion::Cache, String> {
    let builder = quinion::Cache::builder().tuning(tuning);
    let builder = match memory {
        Some(size) => builder.memory(size.bytes(quinion::process_limit())),
        None => builder,
    };
    builder.build().map_err(|error| error.to_string())
}

/// Says what is wrong and how the command ends for it.
fn complain(wrong: &dyn Display) -> ExitCode {
    complain_only(wrong);
    ExitCode::from(EXIT_FAILED)
}

/// Says something on standard error; that nobody reads it is no reason to panic.
fn complain_only(wrong: &dyn Display) {
    let _ = writeln!(io::stderr(), "quinion: {wrong}");
}

/// Prints to standard output; a reader that went away is no reason to panic.
fn print(text: &str) -> Result<(), ExitCode> {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ExitCode::from(EXIT_READER_GONE)),
        Err(error) => Err(complain(&format!("cannot write to standard output: {error}"))),
    }
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
    fn what_is_not_understood_is_refused() {
        for words in
            [&["cat"][..], &["run"], &["run", "--"], &["cat", "--memory", "64MB", "x"], &["dog"], &[]]
        {
            assert!(CommandLine::try_parse_from(["quinion"].iter().chain(words)).is_err(), "{words:?}");
        }
    }
}
