//! `quinion-bench`: what Quinion does on this machine, beside its peers, and where it loses.
//!
//! ```text
//!   quinion-bench [EXPERIMENT...] [--quick] [--json] [--repeat N] [--out DIR] [--scratch DIR]
//!
//!   main          the command: which experiments, in which form
//!   experiments   the questions, with what stands beside       -> fixtures, harness
//!   fixtures      what experiments are made of                 -> harness, sys
//!   harness       cases, turns, ratios, tables and pages
//!   record        the run that the repository keeps                -> harness
//!   sys           system calls that measurements need
//! ```
//!
//! `cargo xtask bench` builds it with the command `quinion` beside it, and with its peers.
//!
//! Invariants:
//!  1. Nothing but results goes to standard output; in JSON, nothing but rows.
//!  2. A run that is interrupted leaves no file: those of the experiments have no name, or are swept away.
//!  3. A case that could not be measured is reported on standard error, with a remedy.

mod experiments;
mod fixtures;
mod harness;
mod record;
mod sys;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use clap::builder::PossibleValuesParser;
use quinion_cli::output::{EXIT_FAILED, EXIT_NOT_UNDERSTOOD, complain, print};
use quinion_run::report::Form;

use fixtures::caches::Drops;
use fixtures::tuned::TunedRun;
use fixtures::{callgrind, counted, limit, shared_lines, tuned, worker};
use harness::bar::Bar;
use harness::page::Section;
use harness::recorded::RecordedRun;
use harness::rows::{self, Row};
use harness::saved_run::Kept;
use harness::{
    CacheStart, Experiment, ExperimentDescription, Extent, MissingRuns, Repeat, Settings, Unmeasured, folder,
    hit_ratios, machine, markdown, scoreboard, sentences,
};

/// Repetitions that are counted by default. An experiment whose repetition takes long says that fewer will do: two of
/// the long ones of `programs`, one of `restore` and of `stream`. By the numbers below a full run takes some 55 minutes
/// on two cores.
const REPEAT_QUICK: usize = 3;
const REPEAT_FULL: usize = 5;

/// Measure Quinion beside its peers, on this machine.
#[derive(Parser, Debug)]
#[command(name = "quinion-bench", version, max_term_width = 100)]
struct Arguments {
    /// Seconds instead of minutes: whether it runs, and an order of magnitude.
    #[arg(long)]
    quick: bool,
    /// Print one object of JSON a line for each row; a ratio above 1 means that Quinion is better.
    #[arg(long)]
    json: bool,
    /// Counted repetitions of each case; 5 if not given, 1 to 3 where one takes long, 3 in a quick run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    repeat: Option<u16>,
    /// Only the cases that have this text in their names, as the tables print them.
    #[arg(long, value_name = "TEXT", conflicts_with = "out")]
    case: Option<String>,
    /// Keep the run in this folder, which is made if it is not there: the lines of --json as rows.jsonl, how streams
    /// went as series.jsonl, the machine as machine.txt, and index.html, one page with bars and curves that needs no
    /// other file and no network. An older run in there is replaced as a whole, when this one is over, by what this
    /// one measured.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the scoreboard of the run that is kept in this folder: the originals' claims and Quinion's.
    #[arg(long, exclusive = true, value_name = "DIR")]
    scoreboard: Option<PathBuf>,
    /// Print all rows of the run that is kept in this folder as the tables of BENCHMARKS.md.
    #[arg(long, exclusive = true, value_name = "DIR")]
    tables: Option<PathBuf>,
    /// Have the repository record the run that is kept in this folder: its rows in bench/recorded, and the scoreboard
    /// of BENCHMARKS.md made of them.
    #[arg(long, exclusive = true, value_name = "DIR")]
    record: Option<PathBuf>,
    /// Where experiments make their files, which are gone when this ends, however it ends.
    #[arg(long, alias = "dir", value_name = "DIR", default_value = ".")]
    scratch: PathBuf,
    /// Remove this folder when standard input ends.
    #[arg(long, hide = true, exclusive = true, value_name = "DIR")]
    sweep: Option<PathBuf>,
    /// Remove these folders when standard input ends, if they are empty.
    #[arg(long, hide = true, exclusive = true, value_name = "DIR", num_args = 1..)]
    sweep_empty: Vec<PathBuf>,
    /// Count the instructions of the recorded snippets, for `cargo xtask`.
    #[arg(long, hide = true, exclusive = true)]
    count: bool,
    /// Count the cache lines that two threads take from each other with each operation: what does not grow with the
    /// number of processors. Needs valgrind, not a quiet machine; some minutes.
    #[arg(long, conflicts_with_all = ["quick", "repeat", "out", "experiments"])]
    lines: bool,
    /// Let two threads take turns at this operation, inside lackey.
    #[arg(long, hide = true, exclusive = true, value_name = "OPERATION")]
    lines_inside: Option<String>,
    /// Run this snippet, inside callgrind.
    #[arg(long, hide = true, exclusive = true, value_name = "SNIPPET")]
    inside: Option<String>,
    /// Do this piece of work, in a process of its own.
    #[arg(long, hide = true, exclusive = true, value_name = "TASK")]
    worker: Option<String>,
    /// Run a program by a cache without some of its mechanisms.
    #[arg(long, hide = true, value_name = "CHOICES", requires = "program")]
    tuned: Option<String>,
    /// Memory that the cache may use, in bytes.
    #[arg(long, hide = true, requires = "tuned")]
    memory: Option<u64>,
    /// Which experiments; all if not given.
    #[arg(value_name = "EXPERIMENT",
          value_parser = PossibleValuesParser::new(experiments::ABOUT.map(|about| about.name)))]
    experiments: Vec<String>,
    /// The program.
    #[arg(last = true, hide = true, requires_all = ["tuned", "memory"])]
    program: Vec<OsString>,
    #[command(flatten)]
    options: experiments::Options,
}

impl Arguments {
    fn runs(&self, experiment: &str) -> bool {
        self.experiments.is_empty() || self.experiments.iter().any(|name| name == experiment)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(ended) = for_ourselves(&arguments) {
        return ended;
    }
    if let Err(why) = arguments.options.check(|name| arguments.runs(name)) {
        complain(&why);
        return ExitCode::from(EXIT_NOT_UNDERSTOOD);
    }
    if let Err(why) = check_scratch(&arguments.scratch) {
        return complain(&why);
    }
    let settings = settings(&arguments);
    let mut experiments = experiments::all(&arguments.options);
    experiments.retain(|experiment| arguments.runs(experiment.about.name));
    let kept = match arguments.out.as_deref().map(Kept::new).transpose() {
        Ok(kept) => kept,
        Err(why) => return complain(&why),
    };
    let form = if arguments.json { Form::Json } else { Form::Text };
    let mut bench = Bench::new(&experiments, settings, form, kept);
    bench.wanted = arguments.case.unwrap_or_default();
    match bench.run(&experiments) {
        Ok(()) => bench.code,
        Err(code) => code,
    }
}

/// The modes in which this program starts itself, by options that no user needs.
fn for_ourselves(arguments: &Arguments) -> Option<ExitCode> {
    let ended = |done: Result<(), Unmeasured>| done.map_or_else(|why| complain(&why), |()| ExitCode::SUCCESS);
    if let Some(name) = &arguments.inside {
        return Some(ended(callgrind::inside(name)));
    }
    if let Some(name) = &arguments.lines_inside {
        return Some(ended(shared_lines::inside(name)));
    }
    let told =
        [(&arguments.scoreboard, scoreboard::markdown as fn(&_) -> _), (&arguments.tables, markdown::tables)];
    if let Some((folder, text)) = told.into_iter().find_map(|(folder, text)| Some((folder.as_ref()?, text))) {
        let run = RecordedRun::read(folder);
        let printed = run.map_err(|why| complain(&why)).and_then(|run| print(&text(&run.rows)));
        return Some(printed.map_or_else(|code| code, |()| ExitCode::SUCCESS));
    }
    if let Some(folder) = &arguments.record {
        return Some(record::record(folder).map_or_else(|why| complain(&why), |()| ExitCode::SUCCESS));
    }
    if let Some(folder) = &arguments.sweep {
        return Some(ended(folder::sweep(folder)));
    }
    if !arguments.sweep_empty.is_empty() {
        return Some(ended(folder::sweep_empty(&arguments.sweep_empty)));
    }
    if let Some(task) = &arguments.worker {
        let answer = worker::main(task, &experiments::JOBS);
        return Some(print(&answer).map_or_else(|code| code, |()| ExitCode::SUCCESS));
    }
    if let (Some(choices), Some(memory)) = (&arguments.tuned, arguments.memory) {
        let run = TunedRun { choices: choices.clone(), memory, program: arguments.program.clone() };
        return Some(tuned::main(run));
    }
    if arguments.lines {
        return Some(lines(arguments.json));
    }
    arguments.count.then(count)
}

fn check_scratch(folder: &Path) -> Result<(), String> {
    let found = std::fs::metadata(folder).and_then(|found| {
        if found.is_dir() { Ok(()) } else { Err(std::io::ErrorKind::NotADirectory.into()) }
    });
    found.map_err(|error| {
        format!("{}: {error}; make it, or name a folder that is there by --scratch", folder.display())
    })
}

/// Prints the instructions and branches of each recorded snippet, below the compiler's name.
fn count() -> ExitCode {
    let mut text = format!("{}\n", env!("QUINION_COMPILER"));
    for snippet in counted::SNIPPETS.iter().filter(|snippet| snippet.is_recorded()) {
        match callgrind::count(snippet) {
            Ok(counted) => {
                text.push_str(&format!(
                    "{:8.1} {:8.1}  {}\n",
                    counted.instructions, counted.branches, snippet.name
                ));
            }
            Err(why) => return complain(&why),
        }
    }
    print(&text).map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

/// Prints how many lines each operation shares and touches, each when it is known.
fn lines(json: bool) -> ExitCode {
    let head = "  shared  touched  cache lines of 64 bytes, of each operation of two threads in turn\n";
    let of = |operation: &shared_lines::Shared| {
        let (name, counted) = (operation.name, shared_lines::count(operation.name));
        let shared_lines::Lines { shared, touched } = counted.map_err(|why| complain(&why))?;
        print(&match json {
            true => format!("{{\"operation\":\"{name}\",\"shared\":{shared},\"touched\":{touched}}}\n"),
            false => format!("{shared:8} {touched:8}  {name}\n"),
        })
    };
    let begun = if json { Ok(()) } else { print(head) };
    let printed = begun.and_then(|()| shared_lines::OPERATIONS.iter().try_for_each(of));
    printed.map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

fn settings(arguments: &Arguments) -> Settings {
    let extent = if arguments.quick { Extent::Quick } else { Extent::Full };
    let usual = if arguments.quick { REPEAT_QUICK } else { REPEAT_FULL };
    let repeat = arguments.repeat.map_or(Repeat::Usual(usual), |told| Repeat::Fixed(usize::from(told)));
    Settings { extent, repeat, folder: arguments.scratch.clone() }
}

struct Bench {
    settings: Settings,
    form: Form,
    kept: Option<Kept>,
    /// The text by which cases are selected: it is in their names.
    wanted: String,
    bar: Bar,
    lost: String,
    unsteady: String,
    has_measured: bool,
    code: ExitCode,
}

impl Bench {
    fn new(experiments: &[Experiment], settings: Settings, form: Form, kept: Option<Kept>) -> Self {
        let bar = Bar::new(experiments.iter().map(|experiment| experiment.expected(&settings)).sum());
        Self {
            settings,
            form,
            kept,
            wanted: String::new(),
            bar,
            lost: String::new(),
            unsteady: String::new(),
            has_measured: false,
            code: ExitCode::SUCCESS,
        }
    }

    fn run(&mut self, experiments: &[Experiment]) -> Result<(), ExitCode> {
        let is_cold = experiments.iter().any(|experiment| experiment.about.starts == CacheStart::Cold);
        if let Some(note) = Drops::of(&self.settings).note(&self.settings).filter(|_| is_cold) {
            self.bar.aside(|| eprintln!("quinion: {note}"));
        }
        if let Some(why) = is_cold.then(limit::why_no_peak).flatten() {
            self.bar.aside(|| eprintln!("quinion: the most memory that was held is not told: {why}"));
        }
        let machine = machine::described(&self.settings);
        if self.form == Form::Text {
            self.bar.aside(|| print(&machine))?;
        }
        for experiment in experiments {
            let section = self.measure(experiment);
            self.bar.aside(|| self.print(experiment, &section.rows))?;
            self.lost.push_str(&rows::losses(&section.rows));
            self.unsteady.push_str(&rows::unsteady(&section.rows));
            self.has_measured |= section.rows.iter().any(|row| row.quinion.or(row.peer).is_some());
            if let Some(kept) = &mut self.kept {
                kept.add(section);
            }
        }
        self.bar.finish();
        if let Some(kept) = &self.kept {
            let page = kept.write(&machine).map_err(|why| complain(&why))?;
            eprintln!("quinion: the page is {}", page.display());
        }
        if self.form == Form::Text && !self.lost.is_empty() {
            print(&format!("\nwhere we lose:\n{}", self.lost))?;
        }
        if self.form == Form::Text && !self.unsteady.is_empty() {
            print(&format!("\nnot steady, and so neither won nor lost:\n{}", self.unsteady))?;
        }
        if !self.has_measured {
            let why = match self.wanted.as_str() {
                "" => "nothing was measured: what would help is said above".to_owned(),
                text => format!("nothing was measured: no case that could be has `{text}` in its name"),
            };
            return Err(complain(&why));
        }
        Ok(())
    }

    /// The rows of all cases that could be measured, and the cases that could not.
    fn measure(&mut self, experiment: &Experiment) -> Section {
        let ExperimentDescription { name, question, .. } = *experiment.about;
        let mut section = Section { name, question, rows: Vec::new(), unmeasured: Vec::new() };
        let cases = (experiment.cases)(&self.settings);
        let [mut ready, each] = experiment.takes_of(&self.settings, cases.len());
        for case in cases {
            let (case_name, mut expected) = (case.name().to_owned(), case.repetitions(&self.settings));
            if !case_name.contains(&self.wanted) {
                self.bar.skipped(each * expected as f64);
                continue;
            }
            self.bar.set_message(format!("{name}: {case_name}"));
            let ended = case.measure(name, &self.settings, || {
                expected -= 1;
                self.bar.passed(each + std::mem::take(&mut ready));
            });
            self.bar.skipped(each * expected as f64);
            match ended {
                Ok((measured, missing)) => {
                    self.report_missing(experiment, &case_name, &missing);
                    section.rows.extend(measured);
                }
                Err(why) => {
                    self.complain(experiment, &case_name, &why);
                    section.unmeasured.push((case_name, why.to_string()));
                }
            }
        }
        section
    }

    /// Reports which ways of a case are missing, or missing in a part.
    fn report_missing(&self, experiment: &Experiment, case: &str, missing: &[MissingRuns]) {
        for sentence in sentences(missing) {
            self.bar.aside(|| eprintln!("quinion: {}: {case}: {sentence}", experiment.about.name));
        }
    }

    fn complain(&mut self, experiment: &Experiment, case: &str, why: &Unmeasured) {
        let what = match why {
            Unmeasured::Missing(_) => "was not measured",
            Unmeasured::Failed(_) => "failed",
        };
        self.bar.aside(|| eprintln!("quinion: {}: {case} {what}: {why}", experiment.about.name));
        if matches!(why, Unmeasured::Failed(_)) {
            self.code = ExitCode::from(EXIT_FAILED);
        }
    }

    fn print(&self, experiment: &Experiment, rows: &[Row]) -> Result<(), ExitCode> {
        match self.form {
            Form::Text if experiment.about.name == hit_ratios::NAME => {
                print(&format!("\n{}", hit_ratios::table(experiment.about.question, rows)))
            }
            Form::Text => print(&format!("\n{}", rows::table(experiment.about.question, rows))),
            Form::Json => rows.iter().try_for_each(|row| print(&row.json())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_has_no_contradictions() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_full_run_is_expected_to_take_less_than_an_hour() {
        let settings =
            Settings { extent: Extent::Full, repeat: Repeat::Usual(REPEAT_FULL), folder: ".".into() };
        let of = |experiment: &Experiment| (experiment.about.name, experiment.expected(&settings) / 60.0);
        let minutes = experiments::all(&experiments::Options::default()).iter().map(of).collect::<Vec<_>>();
        let all: f64 = minutes.iter().map(|(_, minutes)| minutes).sum();
        assert!((30.0..60.0).contains(&all), "{all} minutes: {minutes:?}");
        // `--repeat` holds for all cases.
        let told = Settings { repeat: Repeat::Fixed(9), ..settings };
        let experiments = experiments::all(&experiments::Options::default());
        let stream =
            experiments.iter().find(|experiment| experiment.about.name == "stream").expect("it is there");
        assert!((stream.cases)(&told).iter().all(|case| case.repetitions(&told) == 9));
    }
}
