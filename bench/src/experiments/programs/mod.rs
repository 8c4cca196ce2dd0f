//! Programs: common programs, unmodified, by `quinion run` and by the kernel.
//!
//! ```text
//!   list   the programs and their words    data   what they read, made once    turn   one of them, run and measured
//!
//!   cold       nothing of the files is in memory                       quinion run -- PROGRAM   beside   PROGRAM
//!              the start of `quinion run` and its end are in it
//!   resident   the kernel has all of the files already                 quinion run -- bench: PROGRAM
//!              "bench" is this command again, which measures from inside
//!   warm       it has run five times before, by the same cache,       quinion run -- bench: PROGRAM x 6
//!              which finished its background work each time
//! ```
//!
//! A user who types `quinion run` does not know which of the three states applies, and in none may it cost more than a
//! twentieth. Cold, the whole command is measured, as its user sees it. Warm and resident, the program alone is
//! measured, since a warm cache was started before. The cost of a start shows in the row `true`, cold, which reads
//! nothing.
//!
//! The kernel serves files that are read once or twice; the owner copies a file that is read more often, in the
//! background. The cold and resident states show that this costs nothing; the warm state shows what it gains.
//!
//! CPU seconds are those of all started processes, the owner's included. "Served" is a share of the bytes that the
//! program reads by calls: the kernel counts them in a run without Quinion, and the calls that still reach the kernel
//! with it; in the cold state the report tells. Bytes that programs map, or read by a queue, count in neither.
//!
//! Memory is the most that all of these processes held, with the kernel's page cache for them (`limit`), and "device"
//! what they read from devices, both of the cold command as a whole. Warm and resident, only Quinion's memory is told:
//! the kernel's page cache was filled before.
//!
//! Invariant: both ways print the same, or the case fails. Where a program prints times, all else is compared.

mod data;
mod list;
mod turn;

use std::cell::{Cell, OnceCell};
use std::process::Command;
use std::rc::Rc;

use crate::fixtures::command;
use crate::fixtures::limit::{MEMORY, peak_of};
use crate::fixtures::shared::Shared;
use crate::fixtures::worker::WorkerTask;
use crate::harness::machine::{passed, process_bytes};
use crate::harness::{Alternative, Case, Extent, Metric, Settings, Unmeasured};
use data::Data;
use list::{PROGRAMS, Program};
pub use turn::{JOB, work};
use turn::{OutputCheck, ProgramRun, run_and_parse};

const OPERATIONS: &str = "operations";
const TIME: &str = "time";
const CPU: &str = "cpu";
const SERVED: &str = "served";
const DEVICE: &str = "device (process)";
const METRICS: [Metric; 6] = [
    Metric::gain(OPERATIONS, "1000/s"),
    Metric::cost(TIME, "ms"),
    Metric::cost(CPU, "ms"),
    Metric::cost(MEMORY, "MiB"),
    Metric::cost(DEVICE, "MiB"),
    Metric::gain(SERVED, "bytes per byte"),
];

const OURS: &str = "quinion run";
const KERNEL: &str = "kernel";

const NOT_WORSE: f64 = 1.0 / 1.05;
/// The ratio wanted of the operations of db_bench whose files are copied while it runs.
const COPIED_GOAL: f64 = 0.97;
/// The ratios wanted of a program that does nothing: it shows the cost of a start, not of a program's reads.
const START_COLD_GOAL: f64 = 0.5;
const START_WARM_GOAL: f64 = 0.8;
/// Counted repetitions of a full run: few, since there are many cases; and of programs that take seconds.
const REPEAT: usize = 5;
const REPEAT_LONG: usize = 2;

const ALL: &str = "all";

/// Which programs.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Choice of programs")]
#[group(id = "choice-of-programs")]
pub struct Options {
    /// Only programs whose names contain one of these words, such as `fio` or `git`; or `all` of them. One of each kind
    /// if not given. A whole name is one word, commas and all.
    #[arg(long, value_name = "WORDS", value_parser = Words::of)]
    only: Vec<Words>,
}

/// The value of one `--only`: a name as a whole, or words between commas.
#[derive(Clone, Debug)]
struct Words(Vec<String>);

impl Words {
    fn of(said: &str) -> Result<Self, std::convert::Infallible> {
        let is_name = PROGRAMS.iter().any(|program| program.name == said);
        let words = if is_name { vec![said] } else { said.split(',').map(str::trim).collect() };
        Ok(Self(words.into_iter().map(str::to_owned).collect()))
    }
}

impl Options {
    fn words(&self) -> impl Iterator<Item = &str> {
        self.only.iter().flat_map(|Words(words)| words.iter().map(String::as_str))
    }

    pub fn is_given(&self) -> bool {
        !self.only.is_empty()
    }

    pub fn check(&self) -> Result<(), String> {
        let is_known = |word: &str| word == ALL || PROGRAMS.iter().any(|program| program.name.contains(word));
        match self.words().find(|word| !is_known(word)) {
            None => Ok(()),
            Some(word) => {
                let names = PROGRAMS.each_ref().map(|program| program.name).join("; ");
                Err(format!(
                    "--only {word}: no program's name has that in it; there are: {names}; or `{ALL}`"
                ))
            }
        }
    }

    fn wants(&self, program: &Program, extent: Extent) -> bool {
        if self.only.is_empty() {
            return program.stands.is_some_and(|stands| stands == Extent::Quick || stands == extent);
        }
        self.words().any(|word| word == ALL || program.name.contains(word))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Cold,
    Warm,
    Resident,
}

impl State {
    const ALL: [Self; 3] = [Self::Cold, Self::Warm, Self::Resident];

    fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
            Self::Resident => "resident",
        }
    }

    fn turns_before(self) -> u64 {
        if self == Self::Warm { 5 } else { 0 }
    }
}

pub fn cases(settings: &Settings, options: &Options) -> Vec<Case> {
    let data = Shared::new(settings, Data::new);
    let wanted = PROGRAMS.iter().filter(|program| options.wants(program, settings.extent));
    wanted.flat_map(|program| State::ALL.map(|state| case(&data, program, state))).collect()
}

fn case(data: &Shared<Data>, program: &'static Program, state: State) -> Case {
    let data = data.clone();
    let case = Case::new(format!("{}, {}", program.name, state.name()), &METRICS, move || {
        let plan = Rc::new(Plan::new(data.get()?, program, state)?);
        let of = |name, run: fn(&Plan) -> Result<Vec<f64>, Unmeasured>| {
            let plan = Rc::clone(&plan);
            Alternative::new(name, move |_| run(&plan))
        };
        Ok(vec![of(OURS, Plan::ours), of(KERNEL, Plan::kernel)])
    });
    let case = match program.output_check {
        OutputCheck::Output => case,
        OutputCheck::Fio | OutputCheck::DbBench(_) => {
            case.compare(OPERATIONS, OURS, KERNEL).goal(program.goal(state))
        }
    };
    let case = case.compare(TIME, OURS, KERNEL).goal(program.time_goal(state)).compare(CPU, OURS, KERNEL);
    let case = match state {
        State::Cold => case.compare(MEMORY, OURS, KERNEL).compare(DEVICE, OURS, KERNEL),
        State::Warm | State::Resident => case.report(MEMORY, OURS),
    };
    case.report(SERVED, OURS).without_warm_up().usually(program.repeat)
}

impl Program {
    fn goal(&self, state: State) -> f64 {
        match state {
            State::Warm => self.warm_goal,
            State::Cold => self.cold_goal,
            State::Resident if matches!(self.output_check, OutputCheck::DbBench(_)) => COPIED_GOAL,
            State::Resident => NOT_WORSE,
        }
    }

    fn time_goal(&self, state: State) -> Option<f64> {
        match state {
            _ if self.name != list::NOTHING => Some(NOT_WORSE),
            State::Cold => Some(START_COLD_GOAL),
            State::Warm => Some(START_WARM_GOAL),
            State::Resident => None,
        }
    }
}

struct Plan {
    data: Rc<Data>,
    program: &'static Program,
    state: State,
    words: Vec<String>,
    /// Bytes that it reads by calls, without Quinion; `None` if the kernel does not count them.
    read_bytes: Cell<Option<u64>>,
    /// The checksum of its first output, which each later output has to match.
    checksum: OnceCell<u64>,
}

impl Plan {
    /// Runs the program once, to see whether it is installed, and what it reads.
    fn new(data: Rc<Data>, program: &'static Program, state: State) -> Result<Self, Unmeasured> {
        let words = (program.words)(&data, state != State::Cold)?;
        let plan =
            Self { data, program, state, words, read_bytes: Cell::default(), checksum: OnceCell::new() };
        let turn = plan.whole(plan.command())?;
        plan.read_bytes.set(turn.read_bytes);
        Ok(plan)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).current_dir(self.data.path());
        turn::plain(&mut command);
        command
    }

    fn kernel(&self) -> Result<Vec<f64>, Unmeasured> {
        self.bring_about()?;
        let taken = CostedRun::of(|| match self.state {
            State::Cold => self.whole(self.command()),
            State::Warm | State::Resident => self.inside(&[], 0),
        })?;
        Ok(taken.numbers(f64::NAN))
    }

    fn ours(&self) -> Result<Vec<f64>, Unmeasured> {
        self.bring_about()?;
        let report = self.data.path().join("report.json");
        let memory = self.data.memory().to_string();
        let path = report.display().to_string();
        let run =
            ["run", "--memory", &memory, "--report", "json", "--report-file", &path, "--"].map(str::to_owned);
        let read = self.read_bytes.get().map_or(f64::NAN, |bytes| bytes as f64);
        if self.state != State::Cold {
            let taken = CostedRun::of(|| self.inside(&run, 1))?;
            let by_kernel = taken.turn.read_bytes.map_or(f64::NAN, |bytes| bytes as f64);
            return Ok(taken.numbers((1.0 - by_kernel / read).clamp(0.0, 1.0)));
        }
        let mut command = Command::new(command::quinion()?);
        command.args(&run).args(&self.words).current_dir(self.data.path());
        turn::plain(&mut command);
        let taken = CostedRun::of(|| self.whole(command))?;
        Ok(taken.numbers(command::served_bytes(&std::fs::read_to_string(&report)?) / read))
    }

    fn bring_about(&self) -> Result<(), Unmeasured> {
        match self.state {
            State::Cold => self.data.make_cold(),
            State::Warm | State::Resident => self.whole(self.command()).map(|_| ()),
        }
    }

    fn whole(&self, command: Command) -> Result<ProgramRun, Unmeasured> {
        let turn = run_and_parse(command, self.program.output_check)?;
        self.check(turn)
    }

    /// Measured by this command in another process. `run` starts that process if `run` has words; then the parent
    /// process is the owner, whose CPU time counts.
    fn inside(&self, run: &[String], owners: u64) -> Result<ProgramRun, Unmeasured> {
        let task = WorkerTask::new(JOB)
            .with(turn::OWNERS, owners)
            .with(turn::FOLDER, self.data.path().display())
            .with(turn::SAYS, self.program.output_check.written())
            .with(turn::BEFORE, self.state.turns_before())
            .with(turn::WORDS, turn::joined(&self.words));
        let turn = ProgramRun::of(&task.run_by(run)?);
        self.check(turn)
    }

    fn check(&self, turn: ProgramRun) -> Result<ProgramRun, Unmeasured> {
        if *self.checksum.get_or_init(|| turn.checksum) == turn.checksum {
            return Ok(turn);
        }
        let words = self.words.join(" ");
        Err(Unmeasured::Failed(format!("{words}: it did not say the same as before; the tests say more")))
    }
}

/// A turn with its costs beside time; not a number where the kernel does not count them.
struct CostedRun {
    turn: ProgramRun,
    memory_bytes: f64,
    device_bytes: f64,
}

impl CostedRun {
    fn of(turn: impl FnOnce() -> Result<ProgramRun, Unmeasured>) -> Result<Self, Unmeasured> {
        let before = process_bytes();
        let (turn, memory_bytes) = peak_of(turn)?;
        Ok(Self { turn, memory_bytes, device_bytes: passed(before, process_bytes()) })
    }

    fn numbers(&self, served: f64) -> Vec<f64> {
        let ProgramRun { operations, seconds, cpu_seconds, .. } = self.turn;
        let [memory, device] = [self.memory_bytes, self.device_bytes].map(|bytes| bytes / f64::from(1 << 20));
        vec![operations / 1e3, seconds * 1e3, cpu_seconds * 1e3, memory, device, served]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_given_once_and_a_word_finds_its_programs() {
        for (at, program) in PROGRAMS.iter().enumerate() {
            assert!(PROGRAMS[..at].iter().all(|other| other.name != program.name), "{}", program.name);
        }
        let words = |word: &&str| Words::of(word).expect("all words are words");
        let options = |only: &[&str]| Options { only: only.iter().map(words).collect() };
        let count = |options: Options, extent| PROGRAMS.iter().filter(|p| options.wants(p, extent)).count();
        for said in [&["fio", "git"][..], &["fio,git"], &["fio, git"]] {
            assert_eq!(count(options(said), Extent::Quick), 12, "{said:?}");
        }
        assert_eq!(count(options(&["fio randread, psync"]), Extent::Quick), 1, "a whole name");
        assert_eq!(count(options(&[ALL]), Extent::Quick), PROGRAMS.len());
        assert!([&["fio", ALL][..], &[]].map(options).iter().all(|options| options.check().is_ok()));
        let wrong = options(&["fio", "zzz"]).check().expect_err("there is none");
        assert!(PROGRAMS.iter().all(|program| wrong.contains(program.name)), "{wrong}");
        let (quick, full) = (count(options(&[]), Extent::Quick), count(options(&[]), Extent::Full));
        assert!((6..12).contains(&quick) && (quick + 1..16).contains(&full), "{quick}, {full}");
    }
}
