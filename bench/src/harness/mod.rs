//! Harness: cases, their alternatives, and the order in which they are run.
//!
//! ```text
//!   experiment   one question
//!     case       one situation: a size, an order, a number of threads
//!       alternative   a way to do the same work: Quinion's, or a peer's
//!       metric        a number that each run of an alternative returns
//!       comparison    two alternatives and a metric: a row of the result
//!
//!   repetition 0 (not counted)   A B C
//!   repetition 1                 B A C            the first changes, and the order does: no
//!   repetition 2                 C A B            alternative always finds a cold cache, or
//!   repetition 3                 A C B            what the same other one left behind
//! ```
//!
//! ```text
//!   rows         lines and tables             statistics   medians and quartiles
//!   verdict      met, missed or not steady
//!   hit_ratios   a table of policies          timing       elapsed and CPU time, of threads together
//!   machine      what numbers depend on       bar          how far it is, for a caller that watches
//!   kept         what --out keeps: lines, and a page that shows them (page)
//!   folder       a folder that other programs may write into, and its sweeper
//!   charts       lines in a frame, as SVG            plots        those of a recorded run
//!   escape       text from outside, in a page         markdown     all of its rows
//!   recorded     a run that was kept, read again       scoreboard   the originals' claims beside it
//! ```
//!
//! No module here depends on an experiment: they are values of [`Experiment`].
//!
//! A case is prepared when its turn comes, and its data is dropped with it: experiments need not fit into memory
//! together.
//!
//! Invariants:
//!  1. All alternatives of a case run in every repetition, one after another.
//!  2. A ratio above 1 means that the first of a comparison is better, whatever the metric.
//!
//! Not an invariant: that every alternative gives every metric. A value that could not be measured is not a number, and
//! is shown as such. If some repetitions lack it, the others count, and [`MissingRuns`] says how many were left out.

use std::cell::RefCell;
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;

pub mod bar;
pub mod charts;
pub mod escape;
pub mod folder;
pub mod hit_ratios;
pub mod saved_run;
pub mod machine;
pub mod markdown;
pub mod page;
pub mod plots;
pub mod recorded;
pub mod rows;
pub mod scoreboard;
pub mod statistics;
pub mod timing;
pub mod verdict;

use rows::{PeerKind, Row, Series};
use statistics::Quartiles;
use verdict::Estimator;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// Seconds for an experiment, and an order of magnitude.
    Quick,
    /// As much as a recorded run takes.
    Full,
}

#[derive(Clone, Debug)]
pub struct Settings {
    pub extent: Extent,
    pub repeat: Repeat,
    pub folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeat {
    /// The usual number of repetitions; a case may have fewer where one takes minutes.
    Usual(usize),
    Fixed(usize),
}

impl Settings {
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        match self.extent {
            Extent::Quick => quick,
            Extent::Full => full,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unmeasured {
    /// Not possible on this machine or in this build; the text says what would help.
    Missing(String),
    Failed(String),
}

impl fmt::Display for Unmeasured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(why) | Self::Failed(why) => f.write_str(why),
        }
    }
}

impl From<quinion::Error> for Unmeasured {
    fn from(error: quinion::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<std::io::Error> for Unmeasured {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheStart {
    Anyhow,
    /// No page of the experiment's files is cached, at least in some cases.
    Cold,
}

pub type ListCases = Box<dyn Fn(&Settings) -> Vec<Case>>;

#[derive(Clone, Copy, Debug)]
pub struct ExperimentDescription {
    pub name: &'static str,
    pub question: &'static str,
    pub starts: CacheStart,
    pub takes: Estimate,
}

pub struct Experiment {
    pub about: &'static ExperimentDescription,
    pub cases: ListCases,
}

/// How long an experiment takes on a machine of two cores, in seconds: until it is ready, and for one repetition of all
/// its cases together. A rough estimate for the progress bar, and so is the assumption that all cases take equally
/// long.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    pub quick: [f64; 2],
    pub full: [f64; 2],
}

impl Experiment {
    /// Seconds until it is ready, and for one repetition of one of `cases` cases.
    pub fn takes_of(&self, settings: &Settings, cases: usize) -> [f64; 2] {
        let [ready, all] = settings.pick(self.about.takes.quick, self.about.takes.full);
        [ready, all / cases.max(1) as f64]
    }

    pub fn expected(&self, settings: &Settings) -> f64 {
        let cases = (self.cases)(settings);
        let [ready, each] = self.takes_of(settings, cases.len());
        let repetitions: usize = cases.iter().map(|case| case.repetitions(settings)).sum();
        ready + each * repetitions as f64
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Better {
    Less,
    More,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Metric {
    pub name: &'static str,
    pub unit: &'static str,
    pub better: Better,
}

impl Metric {
    pub const fn cost(name: &'static str, unit: &'static str) -> Self {
        Self { name, unit, better: Better::Less }
    }
    pub const fn gain(name: &'static str, unit: &'static str) -> Self {
        Self { name, unit, better: Better::More }
    }
}

/// One run of an alternative: it returns a value for each metric of the case, in their order.
pub type Run<'a> = Box<dyn FnMut(u64) -> Result<Vec<f64>, Unmeasured> + 'a>;

pub struct Alternative {
    name: &'static str,
    run: Run<'static>,
    series: Option<(&'static str, LastSeries)>,
    /// How many metrics are not numbers where this machine cannot run it; `None` if that fails the case.
    excused: Option<usize>,
}

/// The series of an alternative's last run. The run writes it.
pub type LastSeries = Rc<RefCell<Series>>;

impl Alternative {
    /// `run` gets the number of the repetition, as a seed for random numbers.
    pub fn new(name: &'static str, run: impl FnMut(u64) -> Result<Vec<f64>, Unmeasured> + 'static) -> Self {
        Self { name, run: Box::new(run), series: None, excused: None }
    }

    /// If this machine cannot run it, its `metrics` values are not numbers, the reason is reported, and the other
    /// alternatives of the case continue.
    pub fn excused(self, metrics: usize) -> Self {
        Self { excused: Some(metrics), ..self }
    }

    fn turn(&mut self, repetition: u64) -> Result<(Vec<f64>, Option<String>), Unmeasured> {
        match ((self.run)(repetition), self.excused) {
            (Err(Unmeasured::Missing(why)), Some(metrics)) => Ok((vec![f64::NAN; metrics], Some(why))),
            (ended, _) => Ok((ended?, None)),
        }
    }

    #[cfg(test)]
    pub fn run_once(&mut self, repetition: u64) -> Result<Vec<f64>, Unmeasured> {
        (self.run)(repetition)
    }

    /// The series of the last run in `metric`, which rows of that metric without a peer show.
    pub fn with_series(self, metric: &'static str, series: LastSeries) -> Self {
        Self { series: Some((metric, series)), ..self }
    }
}

/// A row of the result: how `ours` compares with `peer` by a metric.
#[derive(Clone, Copy, Debug)]
struct Comparison {
    metric: &'static str,
    ours: &'static str,
    peer: Option<&'static str>,
    standing: PeerKind,
    goal: Option<f64>,
    /// The most by which Quinion's may be less than the peer's.
    behind_max: Option<f64>,
    /// The most by which it may be more.
    ahead_max: Option<f64>,
}

type Prepare = Box<dyn FnOnce() -> Result<Vec<Alternative>, Unmeasured>>;
/// A step before each run of each alternative, not timed.
type BeforeEach = Box<dyn FnMut() -> Result<(), Unmeasured>>;

pub struct Case {
    name: String,
    metrics: Vec<Metric>,
    comparisons: Vec<Comparison>,
    warm_ups: usize,
    usual_max: usize,
    usual_min: usize,
    repeat_max: usize,
    estimator: Estimator,
    before_each: Option<BeforeEach>,
    prepare: Prepare,
}

impl Case {
    pub fn new(
        name: impl Into<String>,
        metrics: &[Metric],
        prepare: impl FnOnce() -> Result<Vec<Alternative>, Unmeasured> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            metrics: metrics.to_vec(),
            comparisons: Vec::new(),
            warm_ups: 1,
            usual_max: usize::MAX,
            usual_min: 0,
            repeat_max: usize::MAX,
            estimator: Estimator::Median,
            before_each: None,
            prepare: Box::new(prepare),
        }
    }

    /// Every repetition is counted: for runs that start from nothing in any case.
    pub fn without_warm_up(mut self) -> Self {
        self.warm_ups = 0;
        self
    }

    pub fn usually(self, repetitions: usize) -> Self {
        Self { usual_max: repetitions, ..self }
    }

    /// A full run needs at least `repetitions`, unless the command line says how many.
    pub fn at_least(self, repetitions: usize) -> Self {
        Self { usual_min: repetitions, ..self }
    }

    /// Each side is judged by its better quartile: where other processes can only make a run slower.
    pub fn by_lower_quartile(self) -> Self {
        Self { estimator: Estimator::LowerQuartile, ..self }
    }

    /// `before` runs before each run of each alternative, not timed: it removes the state that the one before left.
    pub fn before_each(self, before: impl FnMut() -> Result<(), Unmeasured> + 'static) -> Self {
        Self { before_each: Some(Box::new(before)), ..self }
    }

    /// One repetition is enough: for what is counted and not timed.
    pub fn once(self) -> Self {
        Self { repeat_max: 1, ..self.without_warm_up() }
    }

    /// A row: `metric` of `ours` beside that of `peer`.
    pub fn compare(self, metric: &'static str, ours: &'static str, peer: &'static str) -> Self {
        self.row(Comparison::new(metric, ours, Some(peer), PeerKind::Peer))
    }

    /// A row beside a bound, which nothing can beat: to be slower is no loss, unless by more than a goal.
    pub fn bound(self, metric: &'static str, ours: &'static str, bound: &'static str) -> Self {
        self.row(Comparison::new(metric, ours, Some(bound), PeerKind::Bound))
    }

    /// The least ratio that is wanted of the last row; `None`: it has no goal.
    pub fn goal(mut self, ratio: impl Into<Option<f64>>) -> Self {
        self.last_row().goal = ratio.into();
        self
    }

    /// In the last row Quinion's, a gain, may be at most `behind_max` of its unit behind the peer's. The goal that the
    /// row shows is the ratio that this amounts to.
    pub fn behind_at_most(mut self, behind_max: f64) -> Self {
        self.last_row().behind_max = Some(behind_max);
        self
    }

    /// In the last row Quinion's, a gain, may differ from the peer's by at most `apart_max` of its unit, either way.
    /// The goal that the row shows is the ratio of the lower end.
    pub fn apart_at_most(mut self, apart_max: f64) -> Self {
        self.last_row().ahead_max = Some(apart_max);
        self.behind_at_most(apart_max)
    }

    fn last_row(&mut self) -> &mut Comparison {
        self.comparisons.last_mut().expect("a goal follows its row")
    }

    /// A row without a peer: `metric` of `of`, and the series of its last run if it has one.
    pub fn report(self, metric: &'static str, of: &'static str) -> Self {
        self.row(Comparison::new(metric, of, None, PeerKind::Bound))
    }

    fn row(mut self, row: Comparison) -> Self {
        self.comparisons.push(row);
        self
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn repetitions(&self, settings: &Settings) -> usize {
        let counted = match settings.repeat {
            Repeat::Usual(repetitions) => {
                repetitions.min(self.usual_max).max(settings.pick(0, self.usual_min))
            }
            Repeat::Fixed(repetitions) => repetitions,
        };
        self.warm_ups + counted.min(self.repeat_max)
    }

    /// Prepares and runs the case, and calls `passed` after each repetition. Returns its rows, and the alternatives
    /// whose repetitions are missing in them.
    pub fn measure(
        self,
        experiment: &'static str,
        settings: &Settings,
        mut passed: impl FnMut(),
    ) -> Result<(Vec<Row>, Vec<MissingRuns>), Unmeasured> {
        let repetitions = self.repetitions(settings);
        let Self { name, metrics, comparisons, warm_ups, estimator, mut before_each, prepare, .. } = self;
        let mut taken: Vec<MeasuredRuns> = prepare()?.into_iter().map(MeasuredRuns::nothing).collect();
        for repetition in 0..repetitions {
            run_all(&mut taken, repetition, &mut before_each)?;
            if repetition + 1 == warm_ups {
                taken.iter_mut().for_each(MeasuredRuns::forget);
            }
            passed();
        }
        let row = |comparison: &Comparison| Row {
            experiment,
            case: format!("{name}: {}", comparison.ours),
            ..comparison.row(&metrics, &taken, estimator)
        };
        Ok((comparisons.iter().map(row).collect(), taken.iter().filter_map(MeasuredRuns::missing).collect()))
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingRuns {
    pub of: &'static str,
    pub missed: usize,
    pub repetitions: usize,
    pub why: String,
}

impl MissingRuns {
    /// The reason, and which part is missing if not all is.
    pub fn reason(&self) -> String {
        let Self { missed, repetitions, why, .. } = self;
        if missed == repetitions {
            return why.clone();
        }
        format!("{why} ({missed} of {repetitions} repetitions are left out of its numbers for that)")
    }
}

/// Missing runs as sentences, one for each reason, with all alternatives that have it.
pub fn sentences(missing: &[MissingRuns]) -> Vec<String> {
    let mut by_reason: Vec<(String, Vec<String>)> = Vec::new();
    for runs in missing {
        let (name, reason) = (format!("`{}`", runs.of), runs.reason());
        match by_reason.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, names)) => names.push(name),
            None => by_reason.push((reason, vec![name])),
        }
    }
    let verb = |names: &[String]| if names.len() == 1 { "was" } else { "were" };
    let sentence = |(reason, names): (String, Vec<String>)| {
        format!("{} {} not measured: {reason}", names.join(", "), verb(&names))
    };
    by_reason.into_iter().map(sentence).collect()
}

struct MeasuredRuns {
    alternative: Alternative,
    values: Vec<Vec<f64>>,
    whys: Vec<String>,
}

impl MeasuredRuns {
    fn nothing(alternative: Alternative) -> Self {
        Self { alternative, values: Vec::new(), whys: Vec::new() }
    }

    fn forget(&mut self) {
        self.values.clear();
        self.whys.clear();
    }

    fn is_one_of(&self, ours: &str, peer: Option<&str>) -> bool {
        self.alternative.name == ours || Some(self.alternative.name) == peer
    }

    fn missing(&self) -> Option<MissingRuns> {
        let why = self.whys.last()?.clone();
        let (missed, repetitions) = (self.whys.len(), self.values.len());
        Some(MissingRuns { of: self.alternative.name, missed, repetitions, why })
    }

    fn of(&self, metric: usize) -> Vec<f64> {
        self.values.iter().map(|values| values[metric]).collect()
    }
}

/// Runs each alternative once, beginning with another one in each repetition, forwards and backwards in turn.
fn run_all(
    taken: &mut [MeasuredRuns],
    repetition: usize,
    before_each: &mut Option<BeforeEach>,
) -> Result<(), Unmeasured> {
    let alternatives = taken.len();
    for turn in 0..alternatives {
        let step = if repetition.is_multiple_of(2) { turn } else { alternatives - turn };
        if let Some(before) = before_each {
            before()?;
        }
        let taken = &mut taken[(repetition + step) % alternatives];
        let (values, why) = taken.alternative.turn(repetition as u64)?;
        taken.values.push(values);
        taken.whys.extend(why);
    }
    Ok(())
}

impl Comparison {
    fn new(metric: &'static str, ours: &'static str, peer: Option<&'static str>, standing: PeerKind) -> Self {
        Self { metric, ours, peer, standing, goal: None, behind_max: None, ahead_max: None }
    }

    fn row(&self, metrics: &[Metric], taken: &[MeasuredRuns], estimator: Estimator) -> Row {
        let at =
            metrics.iter().position(|metric| metric.name == self.metric).expect("the case has the metric");
        let better = metrics[at].better;
        let values = |name: &str| {
            let taken = taken.iter().find(|taken| taken.alternative.name == name);
            taken.expect("the case has the alternative").of(at)
        };
        let ours = values(self.ours);
        let missing = taken
            .iter()
            .filter(|taken| taken.is_one_of(self.ours, self.peer))
            .filter_map(MeasuredRuns::missing);
        let not_measured = missing.map(|missing| (missing.of, missing.reason()));
        let series = || {
            let taken = taken.iter().find(|taken| taken.alternative.name == self.ours)?;
            let (metric, series) = taken.alternative.series.as_ref()?;
            (self.peer.is_none() && *metric == self.metric).then(|| series.borrow().clone())
        };
        let (of_ours, peers) = (numbers(&ours), self.peer.map(values).unwrap_or_default());
        let of_peer = numbers(&peers);
        let each = ratios(better, &ours, &peers);
        let of_ratios = Quartiles::of(&each);
        let sides = of_ours.zip(of_peer).map(|(ours, peer)| {
            ratio(better, estimator.number(ours, better), estimator.number(peer, better))
        });
        let ratio = match estimator {
            Estimator::Median => of_ratios.map(|ratios| ratios.median),
            Estimator::LowerQuartile => of_ratios.and(sides),
        };
        let ends = |quartiles: Quartiles| [quartiles.low, quartiles.high];
        let number = |of: Option<Quartiles>| of.map(|of| estimator.number(of, better));
        let (quinion, peer) = (number(of_ours), number(of_peer));
        let nearly =
            |behind: f64| peer.map(|peer| (peer - behind).max(0.0) / peer).filter(|goal| goal.is_finite());
        let goal = self.goal.or_else(|| self.behind_max.and_then(nearly));
        let steadiness = verdict::steadiness([&ours, &peers, &each]);
        let is_ahead =
            quinion.zip(peer).zip(self.ahead_max).is_some_and(|((ours, peer), max)| ours - peer > max);
        Row {
            experiment: "",
            case: String::new(),
            metric: self.metric,
            unit: metrics[at].unit,
            quinion,
            quinion_spread: of_ours.map(ends),
            quinion_runs: ours,
            peer,
            peer_spread: of_peer.map(ends),
            peer_runs: peers,
            peer_name: self.peer,
            standing: self.standing,
            estimator,
            ratio,
            spread: if self.peer.is_some() { of_ratios } else { of_ours }.map(ends),
            goal,
            steadiness: self.peer.map(|_| steadiness),
            met: verdict::met(ratio, goal, steadiness).map(|is_met| is_met && !is_ahead),
            series: series(),
            not_measured: not_measured.collect(),
        }
    }
}

/// How much better Quinion was than the peer in each repetition that has both values; above 1 if it was better.
fn ratios(better: Better, ours: &[f64], peer: &[f64]) -> Vec<f64> {
    let both = ours.iter().zip(peer).filter(|(ours, peer)| !ours.is_nan() && !peer.is_nan());
    both.map(|(ours, peer)| ratio(better, *ours, *peer)).collect()
}

fn ratio(better: Better, ours: f64, peer: f64) -> f64 {
    match better {
        Better::Less => peer / ours,
        Better::More => ours / peer,
    }
}

fn numbers(values: &[f64]) -> Option<Quartiles> {
    Quartiles::of(&values.iter().copied().filter(|value| !value.is_nan()).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(repeat: usize) -> Settings {
        let folder = PathBuf::from(".");
        Settings { extent: Extent::Quick, repeat: Repeat::Usual(repeat), folder }
    }

    const TIME: Metric = Metric::cost("time", "ns");
    const RATE: Metric = Metric::gain("rate", "GB/s");

    #[test]
    fn alternatives_take_turns_at_being_first_and_the_warm_up_is_not_counted() {
        let order = Rc::new(RefCell::new(String::new()));
        let seen = Rc::clone(&order);
        let case = Case::new("x", &[TIME], move || {
            let noting = |name: &'static str| {
                let order = Rc::clone(&order);
                Alternative::new(name, move |repetition| {
                    order.borrow_mut().push_str(name);
                    Ok(vec![if repetition == 0 { 1000.0 } else { 1.0 }])
                })
            };
            Ok(vec![noting("a"), noting("b"), noting("c")])
        });
        let mut passes = 0;
        let rows = case.compare("time", "a", "b").measure("e", &settings(3), || passes += 1);
        assert_eq!(*seen.borrow(), "abcbaccabacb");
        assert_eq!(passes, 4);
        assert_eq!(rows.expect("it runs").0[0].quinion, Some(1.0));
    }

    #[test]
    fn a_case_is_repeated_as_often_as_asked_or_as_will_do() {
        let case = || Case::new("x", &[TIME], || Ok(Vec::new())).usually(3);
        let told = Settings { repeat: Repeat::Fixed(7), ..settings(0) };
        assert_eq!([settings(2), settings(9), told.clone()].map(|s| case().repetitions(&s)), [3, 4, 8]);
        assert_eq!(case().once().repetitions(&told), 1);
    }

    #[test]
    fn above_one_is_better_for_costs_and_for_gains() {
        let case = Case::new("x", &[TIME, RATE], || {
            let fixed = |name, values: [f64; 2]| Alternative::new(name, move |_| Ok(values.to_vec()));
            Ok(vec![fixed("ours", [2.0, 6.0]), fixed("peer", [8.0, 3.0])])
        });
        let case = case.compare("time", "ours", "peer").goal(4.0).compare("rate", "ours", "peer").goal(2.5);
        let (rows, _) = case.measure("e", &settings(3), || {}).expect("it runs");
        let told: Vec<_> = rows.iter().map(|row| (row.ratio, row.met, row.peer)).collect();
        assert_eq!(told, [(Some(4.0), Some(true), Some(8.0)), (Some(2.0), Some(false), Some(3.0))]);
    }

    #[test]
    fn a_gain_may_be_so_far_behind_and_no_further() {
        let case = |ours: f64| {
            let case = Case::new("x", &[RATE], move || {
                let fixed = |name, value: f64| Alternative::new(name, move |_| Ok(vec![value]));
                Ok(vec![fixed("ours", ours), fixed("peer", 40.0), fixed("nothing", 0.0)])
            });
            let case = case
                .compare("rate", "ours", "peer")
                .behind_at_most(1.0)
                .compare("rate", "ours", "nothing")
                .behind_at_most(1.0);
            let (rows, _) = case.measure("e", &settings(1), || {}).expect("it runs");
            rows.iter().map(|row| (row.goal, row.met)).collect::<Vec<_>>()
        };
        assert_eq!(case(39.0), [(Some(0.975), Some(true)), (None, None)]);
        assert_eq!(case(38.9), [(Some(0.975), Some(false)), (None, None)]);
    }

    #[test]
    fn a_row_that_is_to_be_like_its_peer_misses_on_both_sides() {
        let is_met = |ours: f64| {
            let case = Case::new("x", &[RATE], move || {
                let fixed = |name, value: f64| Alternative::new(name, move |_| Ok(vec![value]));
                Ok(vec![fixed("ours", ours), fixed("peer", 40.0)])
            });
            let case = case.compare("rate", "ours", "peer").apart_at_most(0.5);
            case.measure("e", &settings(1), || {}).expect("it runs").0[0].met
        };
        assert_eq!([39.4, 39.5, 40.5, 40.6].map(is_met), [false, true, true, false].map(Some));
    }

    #[test]
    fn a_row_without_a_peer_shows_the_series_of_the_last_run() {
        let case = Case::new("x", &[RATE], || {
            let series = LastSeries::default();
            let seen = Rc::clone(&series);
            let run = move |repetition| {
                let (seconds, values) = (vec![0.5, 1.0], vec![repetition as f64; 2]);
                *seen.borrow_mut() = Series { unit: "MB/s", seconds, values };
                Ok(vec![6.0])
            };
            Ok(vec![Alternative::new("ours", run).with_series("rate", series)])
        });
        let (rows, _) = case.report("rate", "ours").measure("e", &settings(3), || {}).expect("it runs");
        assert_eq!((rows[0].quinion, rows[0].ratio), (Some(6.0), None));
        assert_eq!(rows[0].series.as_ref().map(|series| &series.values[..]), Some(&[3.0, 3.0][..]));
    }

    #[test]
    fn a_way_that_is_excused_is_no_number_and_one_that_failed_is_no_excuse() {
        let run = |why: Unmeasured| {
            let case = Case::new("x", &[TIME], move || {
                let peer = Alternative::new("peer", move |_| Err(why.clone())).excused(1);
                Ok(vec![Alternative::new("ours", |_| Ok(vec![2.0])), peer])
            });
            case.compare("time", "ours", "peer").measure("e", &settings(2), || {})
        };
        let (rows, missing) = run(Unmeasured::Missing("no such thing".to_owned())).expect("it is excused");
        assert_eq!((rows[0].quinion, rows[0].peer), (Some(2.0), None));
        assert_eq!(rows[0].not_measured, [("peer", "no such thing".to_owned())]);
        assert_eq!(sentences(&missing), ["`peer` was not measured: no such thing"]);
        assert!(run(Unmeasured::Failed("wrong".to_owned())).is_err());
    }

    #[test]
    fn a_repetition_without_a_number_is_left_out_and_that_is_said() {
        let case = Case::new("x", &[TIME], || {
            let missing = || Err(Unmeasured::Missing("not just now".to_owned()));
            let sometimes = move |repetition| if repetition == 2 { missing() } else { Ok(vec![6.0]) };
            let ours =
                Alternative::new("ours", |repetition| Ok(vec![if repetition == 2 { 9.0 } else { 2.0 }]));
            Ok(vec![ours, Alternative::new("peer", sometimes).excused(1)])
        });
        let case = case.compare("time", "ours", "peer");
        let (rows, missing) = case.measure("e", &settings(2), || {}).expect("it runs");
        assert_eq!((rows[0].quinion, rows[0].peer, rows[0].ratio), (Some(5.5), Some(6.0), Some(3.0)));
        assert_eq!((missing.len(), missing[0].missed, missing[0].repetitions), (1, 1, 2));
        assert!(rows[0].not_measured[0].1.contains("1 of 2 repetitions"), "{:?}", rows[0].not_measured);
    }

    #[test]
    fn a_reason_is_said_once_with_all_cases_that_have_it() {
        let runs = |of, missed, why: &str| MissingRuns { of, missed, repetitions: 3, why: why.to_owned() };
        let said = sentences(&[runs("a", 3, "no root"), runs("b", 3, "no disk"), runs("c", 3, "no root")]);
        assert_eq!(said, ["`a`, `c` were not measured: no root", "`b` was not measured: no disk"]);
        assert!(sentences(&[]).is_empty());
    }

    #[test]
    fn an_unmeasured_value_is_no_number() {
        let case = Case::new("x", &[TIME], || {
            let fixed = |name, value: f64| Alternative::new(name, move |_| Ok(vec![value]));
            Ok(vec![fixed("ours", 2.0), fixed("peer", f64::NAN)])
        });
        let rows = case.compare("time", "ours", "peer").goal(1.0).measure("e", &settings(2), || {});
        let row = &rows.expect("it runs").0[0];
        assert_eq!((row.quinion, row.peer, row.ratio, row.met), (Some(2.0), None, None, None));
    }

    /// A row from the values of three repetitions; the first is not counted.
    fn measured(ours: [f64; 3], peer: [f64; 3], change: impl Fn(Case) -> Case) -> Row {
        let case = Case::new("x", &[TIME], move || {
            let of = |name, values: [f64; 3]| {
                Alternative::new(name, move |repetition| Ok(vec![values[repetition as usize - 1]]))
            };
            let numbered = |alternative: Alternative| {
                let Alternative { name, mut run, .. } = alternative;
                Alternative::new(name, move |repetition| run(repetition.max(1)))
            };
            Ok(vec![numbered(of("ours", ours)), numbered(of("peer", peer))])
        });
        let case = change(case.compare("time", "ours", "peer").goal(1.5));
        case.measure("e", &settings(3), || {}).expect("it runs").0.remove(0)
    }

    #[test]
    fn a_row_whose_repetitions_differ_by_more_than_twice_is_neither_met_nor_missed() {
        let steady = measured([1.0, 1.1, 1.2], [3.0, 3.1, 3.2], |case| case);
        assert_eq!((steady.steadiness, steady.met), (Some(verdict::Steadiness::Steady), Some(true)));
        let wild = measured([1.0, 1.1, 2.5], [3.0, 3.1, 3.2], |case| case);
        assert_eq!((wild.steadiness, wild.met), (Some(verdict::Steadiness::NotSteady), None));
        assert_eq!((wild.quinion_runs, wild.peer_runs), (vec![1.0, 1.1, 2.5], vec![3.0, 3.1, 3.2]));
    }

    #[test]
    fn slow_repetitions_of_either_side_do_not_count_by_the_lower_quartile() {
        let row = measured([1.0, 1.9, 1.9], [3.0, 3.2, 5.0], Case::by_lower_quartile);
        assert_eq!((row.quinion, row.peer), (Some(1.45), Some(3.1)));
        assert_eq!(row.ratio, Some(3.1 / 1.45));
    }

    #[test]
    fn the_preparation_runs_before_every_run_of_every_alternative() {
        let order = Rc::new(RefCell::new(String::new()));
        let [before, runs] = [Rc::clone(&order), Rc::clone(&order)];
        let case = Case::new("x", &[TIME], move || {
            let noting = |name: &'static str| {
                let order = Rc::clone(&runs);
                Alternative::new(name, move |_| {
                    order.borrow_mut().push_str(name);
                    Ok(vec![1.0])
                })
            };
            Ok(vec![noting("a"), noting("b")])
        });
        let case = case.before_each(move || {
            before.borrow_mut().push('-');
            Ok(())
        });
        case.measure("e", &settings(1), || {}).expect("it runs");
        assert_eq!(*order.borrow(), "-a-b-b-a");
    }

    #[test]
    fn a_full_run_repeats_so_often_at_least() {
        let case = || Case::new("x", &[TIME], || Ok(Vec::new())).at_least(7).without_warm_up();
        let full = Settings { extent: Extent::Full, ..settings(5) };
        let told = Settings { repeat: Repeat::Fixed(2), ..full.clone() };
        assert_eq!([full, settings(3), told].map(|settings| case().repetitions(&settings)), [7, 3, 2]);
    }
}
