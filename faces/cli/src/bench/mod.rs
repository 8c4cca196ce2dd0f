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
//!   limit        a group with a memory limit, or count  disk      files on a disk in memory
//!   worker       work in a process of its own           pages     a file that is nowhere
//!   kept         what --out keeps: lines, and           page      one page that shows them
//!   places       numbers that look random           store     files in memory, as the kernel has them
//!   values       caches of values, our peers
//!   bar          how far it is, for a caller that watches
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

mod bar;
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

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::EXIT_FAILED;
use crate::report::Form;
use bar::Bar;
use caches::Drops;
use clap::builder::PossibleValuesParser;
use harness::{
    CacheStart, Estimate, Experiment, Extent, NotMeasured, Repeat, Settings, Unmeasured, sentences,
};
use kept::Kept;
use page::Section;
use rows::Row;

/// All experiments, in the order in which they run.
const EXPERIMENTS: [Experiment; 15] = [
    Experiment {
        name: "hit",
        question: "hit: what does a read of cached data cost, beside the kernel's own and caches of values?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [1.5, 1.5], full: [15.0, 33.0] },
        cases: hit::cases,
    },
    Experiment {
        name: "insert",
        question: "insert: what does it cost to put a folio into the index, alone and in batches?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.1, 0.1], full: [1.0, 1.3] },
        cases: insert::cases,
    },
    Experiment {
        name: "split",
        question: "split: what does it cost to insert into a larger shadow?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.02, 0.03], full: [0.2, 0.4] },
        cases: split::cases,
    },
    Experiment {
        name: "readbatch",
        question: "readbatch: what does it cost to find a few cached folios, and to look one too far?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [11.0, 0.8], full: [11.0, 0.8] },
        cases: readbatch::cases,
    },
    Experiment {
        name: "cold",
        question: "cold: how fast is a file read that nobody has cached, beside the kernel?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [1.0, 4.0], full: [10.0, 55.0] },
        cases: cold::cases,
    },
    Experiment {
        name: "readseq",
        question: "readseq: how fast does RocksDB, unmodified, read its databases from end to end?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [1.0, 1.3], full: [110.0, 65.0] },
        cases: readseq::cases,
    },
    Experiment {
        name: "programs",
        question: "programs: how fast are programs that people have, cold and warm, by `quinion run`?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [8.0, 13.0], full: [60.0, 90.0] },
        cases: programs::cases,
    },
    Experiment {
        name: "evict",
        question: "evict: what does it cost to put a new page into a full cache, data included?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.1, 0.1], full: [2.5, 0.3] },
        cases: evict::cases,
    },
    Experiment {
        name: "thrash",
        question: "thrash: what is left of a cache when the file is twice as large as it?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.3, 1.1], full: [10.0, 45.0] },
        cases: thrash::cases,
    },
    Experiment {
        name: "stream",
        question: "stream: what does it cost to read a large file once, and what is left of what was hot?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [0.6, 3.0], full: [20.0, 300.0] },
        cases: stream::cases,
    },
    Experiment {
        name: "write",
        question: "write: what does a buffered write cost, and one that is synced, beside the kernel's own?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.2, 1.5], full: [7.0, 12.0] },
        cases: write::cases,
    },
    Experiment {
        name: "memfile",
        question: "memfile: what does a read of a file in memory cost, beside tmpfs?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.1, 0.4], full: [2.0, 4.0] },
        cases: memfile::cases,
    },
    Experiment {
        name: "populate",
        question: "populate: how fast is a virtual machine's memory filled, beside all ways that the kernel has?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.5, 4.0], full: [10.0, 45.0] },
        cases: populate::cases,
    },
    Experiment {
        name: "restore",
        question: "restore: how soon has a virtual machine the memory of its snapshot?",
        starts: CacheStart::Cold,
        // Less than a repetition takes: the cases that take long are repeated least.
        takes: Estimate { quick: [2.0, 6.5], full: [30.0, 95.0] },
        cases: restore::cases,
    },
    Experiment {
        name: ratio::NAME,
        question: "ratio: how many reads does a cache answer, by which rules, on what people asked for?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.1, 0.4], full: [5.0, 15.0] },
        cases: ratio::cases,
    },
];

/// Repetitions that are counted, if not told otherwise. Where a repetition takes long, the experiment says that fewer
/// will do: two of the long ones of `programs`, one of `restore` and of `stream`. By the numbers below a full run takes
/// some 38 minutes on two cores.
const REPEAT_QUICK: usize = 3;
const REPEAT_FULL: usize = 5;

/// Measure Quinion beside its peers, on this machine.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Seconds instead of minutes: whether it runs, and an order of magnitude.
    #[arg(long)]
    quick: bool,
    /// Print one object of JSON a line for each row; a ratio above 1 means that Quinion is better.
    #[arg(long)]
    json: bool,
    /// Counted repetitions of each case; 5 if not given, 1 to 3 where one takes long, 3 in a quick run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    repeat: Option<u16>,
    /// Keep the run in this folder, which is made if it is not there: the lines of --json as rows.jsonl, how streams
    /// went as series.jsonl, the machine as machine.txt, and index.html, one page with bars and curves that needs no
    /// other file and no network. An older run in there is replaced as a whole, when this one is over, by what this
    /// one measured.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
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
    if !arguments.sweep_empty.is_empty() {
        let swept = folder::sweep_empty(&arguments.sweep_empty);
        return swept.map_or_else(|why| crate::complain(&why), |()| ExitCode::SUCCESS);
    }
    if let Some(task) = &arguments.worker {
        return crate::print(&worker::main(task)).map_or_else(|code| code, |()| ExitCode::SUCCESS);
    }
    if arguments.count {
        return count();
    }
    if let Err(why) = arguments.programs.check().and_then(|()| check_use(&arguments)) {
        crate::complain(&why);
        return ExitCode::from(crate::EXIT_NOT_UNDERSTOOD);
    }
    if let Err(why) = check_scratch(&arguments.scratch) {
        return crate::complain(&why);
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

/// That there is such a folder: else every experiment would say that there is none.
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
            Err(why) => return crate::complain(&why),
        }
    }
    crate::print(&text).map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

/// That what was said of an experiment is said of one that is to run.
fn check_use(arguments: &Arguments) -> Result<(), String> {
    let runs = |name: &str| {
        arguments.experiments.is_empty() || arguments.experiments.iter().any(|asked| asked == name)
    };
    for (name, is_given, options) in [
        ("programs", arguments.programs.is_given(), "--only"),
        (ratio::NAME, arguments.ratio.is_given(), "--traces and --sizes"),
    ] {
        if is_given && !runs(name) {
            return Err(format!(
                "{options} is for `{name}`, which is not asked for; name it as well, or none"
            ));
        }
    }
    Ok(())
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
    bar: Bar,
    lost: String,
    /// Whether anything was measured at all.
    has_measured: bool,
    code: ExitCode,
}

impl Bench {
    fn new(experiments: &[&Experiment], settings: Settings, form: Form, kept: Option<Kept>) -> Self {
        let bar = Bar::new(experiments.iter().map(|experiment| experiment.expected(&settings)).sum());
        Self { settings, form, kept, bar, lost: String::new(), has_measured: false, code: ExitCode::SUCCESS }
    }

    fn run(&mut self, experiments: &[&Experiment]) -> Result<(), ExitCode> {
        let is_cold = experiments.iter().any(|experiment| experiment.starts == CacheStart::Cold);
        if let Some(note) = Drops::of(&self.settings).note(&self.settings).filter(|_| is_cold) {
            self.bar.aside(|| eprintln!("quinion: {note}"));
        }
        if let Some(why) = is_cold.then(limit::why_no_peak).flatten() {
            self.bar.aside(|| eprintln!("quinion: the most memory that was held is not told: {why}"));
        }
        let machine = machine::described(&self.settings);
        if self.form == Form::Text {
            self.bar.aside(|| crate::print(&machine))?;
        }
        for experiment in experiments {
            let section = self.measure(experiment);
            self.bar.aside(|| self.print(experiment, &section.rows))?;
            self.lost.push_str(&rows::losses(&section.rows));
            self.has_measured |= section.rows.iter().any(|row| row.quinion.or(row.peer).is_some());
            if let Some(kept) = &mut self.kept {
                kept.add(section);
            }
        }
        self.bar.finish();
        if let Some(kept) = &self.kept {
            let page = kept.write(&machine).map_err(|why| crate::complain(&why))?;
            eprintln!("quinion: the page is {}", page.display());
        }
        if self.form == Form::Text && !self.lost.is_empty() {
            crate::print(&format!("\nwhere we lose:\n{}", self.lost))?;
        }
        if !self.has_measured {
            return Err(crate::complain(&"nothing was measured: what would help is said above"));
        }
        Ok(())
    }

    /// The rows of all cases that could be measured, and the cases that could not.
    fn measure(&mut self, experiment: &Experiment) -> Section {
        let Experiment { name, question, .. } = *experiment;
        let mut section = Section { name, question, rows: Vec::new(), unmeasured: Vec::new() };
        let cases = (experiment.cases)(&self.settings);
        let [mut ready, each] = experiment.takes_of(&self.settings, cases.len());
        for case in cases {
            let (case_name, mut expected) = (case.name().to_owned(), case.repetitions(&self.settings));
            self.bar.tell(format!("{name}: {case_name}"));
            let ended = case.measure(name, &self.settings, || {
                expected -= 1;
                self.bar.passed(each + std::mem::take(&mut ready));
            });
            self.bar.skipped(each * expected as f64);
            match ended {
                Ok((measured, excuses)) => {
                    self.say(experiment, &case_name, &excuses);
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

    /// Which ways of a case are missing, or missing in a part.
    fn say(&self, experiment: &Experiment, case: &str, excuses: &[NotMeasured]) {
        for sentence in sentences(excuses) {
            self.bar.aside(|| eprintln!("quinion: {}: {case}: {sentence}", experiment.name));
        }
    }

    fn complain(&mut self, experiment: &Experiment, case: &str, why: &Unmeasured) {
        let what = match why {
            Unmeasured::Missing(_) => "was not measured",
            Unmeasured::Failed(_) => "failed",
        };
        self.bar.aside(|| eprintln!("quinion: {}: {case} {what}: {why}", experiment.name));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What a full run is expected to take, by the numbers of [`EXPERIMENTS`], is what its user has to wait.
    #[test]
    fn a_full_run_is_expected_to_take_less_than_forty_minutes() {
        let settings = Settings {
            extent: Extent::Full,
            repeat: Repeat::Usual(REPEAT_FULL),
            folder: ".".into(),
            db_bench: Default::default(),
            ratio: Default::default(),
            programs: Default::default(),
        };
        let of = |experiment: &Experiment| (experiment.name, experiment.expected(&settings) / 60.0);
        let minutes = EXPERIMENTS.each_ref().map(of);
        let all: f64 = minutes.iter().map(|(_, minutes)| minutes).sum();
        assert!((30.0..40.0).contains(&all), "{all} minutes: {minutes:?}");
        // What one asks for is what one gets.
        let told = Settings { repeat: Repeat::Told(9), ..settings };
        let repetitions = |case: harness::Case| case.repetitions(&told);
        assert!(stream::cases(&told).into_iter().map(repetitions).all(|repetitions| repetitions == 9));
    }
}
