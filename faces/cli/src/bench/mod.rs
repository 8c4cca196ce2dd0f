//! Bench: what Quinion does on this machine, beside its peers, and where it loses.
//!
//! ```text
//!   mod          the command: which experiments, in which form
//!   harness      cases, alternatives in turn, ratios            rows      lines and tables
//!   timing       elapsed and CPU time, of threads together      machine   what the numbers depend on
//!   statistics   medians and quartiles                          scratch   files without a name
//!   folder       a folder that others may write into           db_bench  RocksDB's benchmark as a program
//!   shared       what the cases of an experiment share
//!   caches       what the kernel keeps of files, dropped and looked at
//!   index        a tree by itself                       stage     a mapping by itself
//!   ready        such a mapping, filled
//!   counted      pieces of work                         callgrind counts their instructions
//!   limit        a group with a memory limit            disk      files on a disk in memory
//!   worker       work in a process of its own           pages     a file that is nowhere
//!   kept         what --out keeps: lines, and           page      one page that shows them
//!   places       numbers that look random           store     files in memory, as the kernel has them
//!   values       caches of values, our peers
//!   hit  insert  split  readbatch  cold  readseq                                             the experiments
//!   programs  evict  thrash  stream  write  memfile  populate  restore  ratio
//! ```
//!
//! To add an experiment: a file with its essay and a function that lists its
//! cases, and a line in [`EXPERIMENTS`]. The tests run every experiment quickly.
//!
//! Invariants:
//!  1. Nothing but results goes to standard output; in JSON, nothing but rows.
//!  2. A run that is interrupted leaves no file: those of the experiments have no name, or are swept away.
//!  3. What could not be measured is said on standard error, with what would help.

mod caches;
mod callgrind;
mod cold;
mod counted;
mod db_bench;
mod disk;
mod evict;
mod folder;
mod harness;
mod hit;
mod index;
mod insert;
mod kept;
mod limit;
mod machine;
mod memfile;
mod page;
mod pages;
mod places;
mod populate;
mod programs;
mod ratio;
mod readbatch;
mod readseq;
mod ready;
mod restore;
mod rows;
mod scratch;
mod shared;
mod split;
mod stage;
mod statistics;
mod store;
mod stream;
mod thrash;
mod timing;
mod values;
mod worker;
mod write;

use std::io::{IsTerminal, stderr};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::EXIT_FAILED;
use crate::report::Form;
use caches::Drops;
use harness::{Experiment, Extent, Repeat, Settings, Starts, Unmeasured};
use kept::Kept;
use page::Section;
use rows::Row;

/// All experiments, in the order in which they run.
const EXPERIMENTS: [Experiment; 15] = [
    Experiment {
        name: "hit",
        question: "hit: what does a read of cached data cost, beside the kernel's own and caches of values?",
        starts: Starts::Anyhow,
        cases: hit::cases,
    },
    Experiment {
        name: "insert",
        question: "insert: what does it cost to put a folio into the index, alone and in batches?",
        starts: Starts::Anyhow,
        cases: insert::cases,
    },
    Experiment {
        name: "split",
        question: "split: what does it cost to insert into a larger shadow?",
        starts: Starts::Anyhow,
        cases: split::cases,
    },
    Experiment {
        name: "readbatch",
        question: "readbatch: what does it cost to find a few cached folios, and to look one too far?",
        starts: Starts::Anyhow,
        cases: readbatch::cases,
    },
    Experiment {
        name: "cold",
        question: "cold: how fast is a file read that nobody has cached, beside the kernel?",
        starts: Starts::Cold,
        cases: cold::cases,
    },
    Experiment {
        name: "readseq",
        question: "readseq: how fast does RocksDB, unmodified, read its databases from end to end?",
        starts: Starts::Cold,
        cases: readseq::cases,
    },
    Experiment {
        name: "programs",
        question: "programs: how fast are programs that people have, cold and warm, by `quinion run`?",
        starts: Starts::Cold,
        cases: programs::cases,
    },
    Experiment {
        name: "evict",
        question: "evict: what does it cost to put a new page into a full cache, data included?",
        starts: Starts::Anyhow,
        cases: evict::cases,
    },
    Experiment {
        name: "thrash",
        question: "thrash: what is left of a cache when the file is twice as large as it?",
        starts: Starts::Anyhow,
        cases: thrash::cases,
    },
    Experiment {
        name: "stream",
        question: "stream: what does it cost to read a large file once, and what is left of what was hot?",
        starts: Starts::Cold,
        cases: stream::cases,
    },
    Experiment {
        name: "write",
        question: "write: what does a buffered write cost, and one that is synced, beside the kernel's own?",
        starts: Starts::Anyhow,
        cases: write::cases,
    },
    Experiment {
        name: "memfile",
        question: "memfile: what does a read of a file in memory cost, beside tmpfs?",
        starts: Starts::Anyhow,
        cases: memfile::cases,
    },
    Experiment {
        name: "populate",
        question: "populate: how fast is a virtual machine's memory filled, beside all ways that the kernel has?",
        starts: Starts::Anyhow,
        cases: populate::cases,
    },
    Experiment {
        name: "restore",
        question: "restore: how soon has a virtual machine the memory of its snapshot?",
        starts: Starts::Cold,
        cases: restore::cases,
    },
    Experiment {
        name: ratio::NAME,
        question: "ratio: how many reads does a cache answer, by which rules, on what people asked for?",
        starts: Starts::Anyhow,
        cases: ratio::cases,
    },
];

/// Repetitions that are counted, if not told otherwise.
const REPEAT_QUICK: usize = 3;
const REPEAT_FULL: usize = 9;

/// Measure Quinion beside its peers, on this machine.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Seconds instead of minutes: whether it runs, and an order of magnitude.
    #[arg(long)]
    quick: bool,
    /// Print one object of JSON a line for each row; a ratio above 1 means that Quinion is better.
    #[arg(long)]
    json: bool,
    /// Counted repetitions of each case; 9 if not given, 3 or 5 where one takes long, 3 in a quick run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    repeat: Option<u16>,
    /// Keep the run in this folder, which is made if it is not there: the lines of --json as rows.jsonl, the
    /// machine as machine.txt, and index.html, one page with bars and curves that needs no other file and no network.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Where experiments make their files, which are gone when this ends, however it ends.
    #[arg(long, alias = "dir", value_name = "DIR", default_value = ".")]
    scratch: PathBuf,
    /// Remove this folder when standard input ends.
    #[arg(long, hide = true, exclusive = true, value_name = "DIR")]
    sweep: Option<PathBuf>,
    /// Count the instructions of the recorded snippets, for `cargo xtask`.
    #[arg(long, hide = true, exclusive = true)]
    count: bool,
    /// Run this snippet, inside callgrind.
    #[arg(long, hide = true, exclusive = true, value_name = "SNIPPET")]
    inside: Option<String>,
    /// Do this piece of work, in a process of its own.
    #[arg(long, hide = true, exclusive = true, value_name = "ERRAND")]
    worker: Option<String>,
    /// Which experiments; all if not given.
    #[arg(value_name = "EXPERIMENT", value_parser = PossibleValuesParser::new(EXPERIMENTS.map(|e| e.name)))]
    experiments: Vec<String>,
    #[command(flatten)]
    db_bench: db_bench::Options,
    #[command(flatten)]
    ratio: ratio::Options,
    #[command(flatten)]
    programs: programs::Options,
}

/// Runs the command.
pub fn main(arguments: Arguments) -> ExitCode {
    if let Some(name) = &arguments.inside {
        return callgrind::inside(name).map_or_else(|why| crate::complain(&why), |()| ExitCode::SUCCESS);
    }
    if let Some(folder) = &arguments.sweep {
        return folder::sweep(folder).map_or_else(|why| crate::complain(&why), |()| ExitCode::SUCCESS);
    }
    if let Some(errand) = &arguments.worker {
        return crate::print(&worker::main(errand)).map_or_else(|code| code, |()| ExitCode::SUCCESS);
    }
    if arguments.count {
        return count();
    }
    let settings = settings(&arguments);
    let wanted = |experiment: &&Experiment| {
        arguments.experiments.is_empty() || arguments.experiments.iter().any(|name| name == experiment.name)
    };
    let experiments: Vec<&Experiment> = EXPERIMENTS.iter().filter(wanted).collect();
    let kept = match arguments.out.as_deref().map(Kept::new).transpose() {
        Ok(kept) => kept,
        Err(why) => return crate::complain(&why),
    };
    let form = if arguments.json { Form::Json } else { Form::Text };
    let mut bench = Bench::new(&experiments, settings, form, kept);
    match bench.run(&experiments) {
        Ok(()) => bench.code,
        Err(code) => code,
    }
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
            Err(why) => return crate::complain(&why),
        }
    }
    crate::print(&text).map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

fn settings(arguments: &Arguments) -> Settings {
    let extent = if arguments.quick { Extent::Quick } else { Extent::Full };
    let usual = if arguments.quick { REPEAT_QUICK } else { REPEAT_FULL };
    let repeat = arguments.repeat.map_or(Repeat::Usual(usual), |told| Repeat::Told(usize::from(told)));
    let (folder, db_bench) = (arguments.scratch.clone(), arguments.db_bench.clone());
    let (ratio, programs) = (arguments.ratio.clone(), arguments.programs.clone());
    Settings { extent, repeat, folder, db_bench, ratio, programs }
}

/// A run of experiments.
struct Bench {
    settings: Settings,
    form: Form,
    kept: Option<Kept>,
    bar: ProgressBar,
    lost: String,
    code: ExitCode,
}

impl Bench {
    fn new(experiments: &[&Experiment], settings: Settings, form: Form, kept: Option<Kept>) -> Self {
        let cases = experiments.iter().flat_map(|experiment| (experiment.cases)(&settings));
        let repetitions: usize = cases.map(|case| case.repetitions(&settings)).sum();
        let bar = bar(repetitions as u64);
        Self { settings, form, kept, bar, lost: String::new(), code: ExitCode::SUCCESS }
    }

    fn run(&mut self, experiments: &[&Experiment]) -> Result<(), ExitCode> {
        let is_cold = experiments.iter().any(|experiment| experiment.starts == Starts::Cold);
        if let Some(note) = Drops::of(&self.settings).note(&self.settings).filter(|_| is_cold) {
            eprintln!("quinion: {note}");
        }
        let machine = machine::described(&self.settings);
        if self.form == Form::Text {
            crate::print(&machine)?;
        }
        for experiment in experiments {
            let section = self.measure(experiment);
            self.bar.suspend(|| self.print(experiment, &section.rows))?;
            self.lost.push_str(&rows::losses(&section.rows));
            if let Some(kept) = &mut self.kept {
                kept.add(section);
            }
        }
        self.bar.finish_and_clear();
        if let Some(kept) = &self.kept {
            let page = kept.write(&machine).map_err(|why| crate::complain(&why))?;
            eprintln!("quinion: the page is {}", page.display());
        }
        if self.form == Form::Text && !self.lost.is_empty() {
            crate::print(&format!("\nwhere we lose:\n{}", self.lost))?;
        }
        Ok(())
    }

    /// The rows of all cases that could be measured, and the cases that could not.
    fn measure(&mut self, experiment: &Experiment) -> Section {
        let Experiment { name, question, .. } = *experiment;
        let mut section = Section { name, question, rows: Vec::new(), unmeasured: Vec::new() };
        for case in (experiment.cases)(&self.settings) {
            let name = case.name().to_owned();
            self.bar.set_message(format!("{}: {name}", experiment.name));
            match case.measure(experiment.name, &self.settings, || self.bar.inc(1)) {
                Ok(measured) => section.rows.extend(measured),
                Err(why) => {
                    self.complain(experiment, &name, &why);
                    section.unmeasured.push((name, why.to_string()));
                }
            }
        }
        section
    }

    fn complain(&mut self, experiment: &Experiment, case: &str, why: &Unmeasured) {
        let what = match why {
            Unmeasured::Missing(_) => "was not measured",
            Unmeasured::Failed(_) => "failed",
        };
        self.bar.suspend(|| eprintln!("quinion: {}: {case} {what}: {why}", experiment.name));
        if matches!(why, Unmeasured::Failed(_)) {
            self.code = ExitCode::from(EXIT_FAILED);
        }
    }

    fn print(&self, experiment: &Experiment, rows: &[Row]) -> Result<(), ExitCode> {
        match self.form {
            Form::Text if experiment.name == ratio::NAME => {
                crate::print(&format!("\n{}", ratio::table(experiment.question, rows)))
            }
            Form::Text => crate::print(&format!("\n{}", rows::table(experiment.question, rows))),
            Form::Json => rows.iter().try_for_each(|row| crate::print(&row.json())),
        }
    }
}

/// How far it is and how long it takes yet, for who watches standard error.
fn bar(repetitions: u64) -> ProgressBar {
    let target =
        if stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let template = "[{bar:30}]  {elapsed} gone, {eta} left  {msg}";
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    ProgressBar::with_draw_target(Some(repetitions), target).with_style(style.progress_chars("=> "))
}
