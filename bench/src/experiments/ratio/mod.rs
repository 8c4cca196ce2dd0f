//! Ratio: how many reads does a cache answer, under which policy, on recorded workloads?
//!
//! ```text
//!   trace   the references: files of two formats          synthetic   a made-up trace, where there is none
//!   ours    the cache's policy code over rings like its own   peers       others, as they are described
//!   lists   pages in order, for the peers                     real        one row through a cache
//!   two_list  Linux's two lists, by the interface of Quinion's policies
//!   published the peers beside published crates (a test; feature `peers`)
//!   families  made-up workloads of one difficulty each, also of the phases that follow each other
//!   table   traces down, policies across; the page of `--out` draws the same (`page/curves.rs`)
//! ```
//!
//! Nothing is timed: a reference is a hit or a miss, and every run of one trace gives the same result. Sizes are shares
//! of the distinct pages of a trace; each case is one trace at one size. Every alternative gets the same references in
//! the same order and starts with an empty cache; first reads count as misses.
//!
//! Loops stand beside the traces: a file larger than the cache, read from end to end again and again. No cache can hit
//! more than its size in each round, and LRU hits nothing.
//!
//! Not modelled: folios of several pages, readahead, writes.

mod families;
mod lists;
mod ours;
mod peers;
#[cfg(all(test, feature = "peers"))]
mod published;
mod real;
mod synthetic;
mod trace;
mod two_list;

use std::cell::OnceCell;
use std::path::PathBuf;
use std::rc::Rc;

use quinion::internals::policy::{DEFAULT_POLICY, FetchOrigin, NewPolicy};

use crate::harness::hit_ratios::{AT, OPTIMUM, OURS, POINTS_BEHIND_MAX};
use crate::harness::{Alternative, Case, Extent, Metric, Settings, Unmeasured};
use families::Family;
use ours::Ours;
use peers::{Arc, Fifo, Linux, Lirs, Lru, S3Fifo, Sieve, Simulated, TinyLfu};
use trace::Trace;
use two_list::TWO_LISTS;

const LINUX: &str = "Linux";
const S3_FIFO: &str = "S3-FIFO";
const CLIMBING: &str = "W-TinyLFU, climbing";
const REAL: &str = "real cache";
const SIMULATED: &str = "simulated";
const RATIO: &str = "hit ratio";
const METRICS: [Metric; 1] = [Metric::gain(RATIO, "%")];

/// Percentage points by which the real cache may differ from its simulation.
const POINTS_APART_MAX: f64 = 0.3;
/// Policies that know nothing of later references, each of which Quinion stands beside.
const ONLINE: [&str; 9] =
    [S3_FIFO, "FIFO", "LRU", "ARC", "LIRS", "SIEVE", "W-TinyLFU", CLIMBING, "two lists"];
/// The traces and sizes that a real cache runs, too, in per cent; of a made-up trace the first size.
const REAL_TRACES: [(&str, f64); 4] =
    [("cloudPhysicsIO", 10.0), ("cloudPhysicsIO", 20.0), ("OLTP", 5.0), ("c2k-web07", 20.0)];
/// Likewise of the families, in pages.
const REAL_FAMILIES: [(&str, usize); 2] = [("random loop of 2", 4096), ("window of 4000", 2000)];
/// Pages of the cache of the loop cases, and the rounds of a loop.
const LOOP_CACHE_PAGES: usize = 4096;
const LOOP_ROUNDS: usize = 10;
const LOOPS: [f64; 3] = [1.25, 2.0, 5.0];

/// The traces and the sizes, if the command line gives them.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Traces of ratio")]
#[group(id = "ratio")]
pub struct Options {
    /// A folder of block traces: *.csv of libCacheSim, *.lis of ARC, plain or with .zst. Without it a small
    /// trace is made up.
    #[arg(long, value_name = "DIR")]
    traces: Option<PathBuf>,
    /// Sizes of the caches, in per cent of the pages a trace asks for; 1,5,10,20 if not given.
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', value_parser = percent)]
    sizes: Vec<f64>,
}

fn percent(text: &str) -> Result<f64, String> {
    let percent =
        text.trim_end_matches('%').parse().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0);
    percent.ok_or_else(|| "a size is a number of per cent above 0 and up to 100".to_owned())
}

impl Options {
    pub fn is_given(&self) -> bool {
        self.traces.is_some() || !self.sizes.is_empty()
    }

    fn percents(&self) -> Vec<f64> {
        if self.sizes.is_empty() { vec![1.0, 5.0, 10.0, 20.0] } else { self.sizes.clone() }
    }
}

/// A trace that is read when the first case needs it, and dropped with the last.
#[derive(Clone)]
struct Source {
    name: String,
    path: Option<PathBuf>,
    extent: Extent,
    read: Rc<OnceCell<Result<Rc<Trace>, String>>>,
}

impl Source {
    fn new(name: String, path: Option<PathBuf>, settings: &Settings) -> Self {
        Self { name, path, extent: settings.extent, read: Rc::default() }
    }

    fn trace(&self) -> Result<Rc<Trace>, Unmeasured> {
        let read = || match &self.path {
            Some(path) => Trace::read(path).map(Rc::new),
            None => Ok(Rc::new(synthetic::trace(self.extent))),
        };
        self.read.get_or_init(read).clone().map_err(Unmeasured::Failed)
    }
}

pub fn cases(settings: &Settings, options: &Options) -> Vec<Case> {
    let sources = match sources(settings, options) {
        Ok(sources) => sources,
        Err(why) => return vec![Case::new("traces", &METRICS, || Err(Unmeasured::Failed(why))).once()],
    };
    let percents = options.percents();
    let pairs = sources.iter().flat_map(|source| percents.iter().map(move |percent| (source, *percent)));
    let mut cases: Vec<Case> = pairs.map(|(source, percent)| at_size(source.clone(), percent)).collect();
    cases.extend(LOOPS.map(round_and_round));
    let families = families::all(settings.extent);
    cases.extend(families.iter().cloned().flat_map(of_family));
    cases.extend(confirmations(&sources, &families));
    cases
}

fn sources(settings: &Settings, options: &Options) -> Result<Vec<Source>, String> {
    let Some(dir) = &options.traces else {
        return Ok(vec![Source::new(synthetic::NAME.to_owned(), None, settings)]);
    };
    let paths = trace::found_in(dir)?;
    if paths.is_empty() {
        return Err(format!("{}: no trace is there; their names end with .csv, .lis or .zst", dir.display()));
    }
    let named = |path: PathBuf| Source::new(trace::name_of(&path).unwrap_or_default(), Some(path), settings);
    Ok(paths.into_iter().map(named).collect())
}

fn at_size(source: Source, percent: f64) -> Case {
    let case = Case::new(format!("{}{AT}{percent} %", source.name), &METRICS, move || {
        let trace = source.trace()?;
        let pages = trace.cache_pages(percent);
        Ok(all_policies(&trace, pages, FetchOrigin::Asked))
    });
    compared(case)
}

fn round_and_round(larger: f64) -> Case {
    let case = Case::new(format!("loop of {larger} caches"), &METRICS, move || {
        let trace = Rc::new(synthetic::around((LOOP_CACHE_PAGES as f64 * larger) as u64, LOOP_ROUNDS));
        Ok(all_policies(&trace, LOOP_CACHE_PAGES, FetchOrigin::Stream))
    });
    compared(case)
}

fn of_family(family: Family) -> Vec<Case> {
    let read = Rc::new(OnceCell::new());
    let at = |pages: &usize| {
        let (family, read, pages) = (family.clone(), Rc::clone(&read), *pages);
        let case = Case::new(format!("{}{AT}{pages} pages", family.name), &METRICS, move || {
            let trace = read.get_or_init(|| Rc::new(family.trace()));
            Ok(all_policies(trace, pages, FetchOrigin::Asked))
        });
        beside_others(case.once().compare(RATIO, OURS, LINUX).behind_at_most(POINTS_BEHIND_MAX))
    };
    family.caches.iter().map(at).collect()
}

fn compared(case: Case) -> Case {
    beside_others(case.once().compare(RATIO, OURS, LINUX).goal(1.0))
}

/// Near each of the others, and so near the best of them.
fn beside_others(case: Case) -> Case {
    let near = |case: Case, other| case.compare(RATIO, OURS, other).behind_at_most(POINTS_BEHIND_MAX);
    ONLINE.into_iter().fold(case, near).bound(RATIO, OURS, OPTIMUM)
}

/// Quinion and all others, with `pages` pages each. Only Quinion's policy is told how pages were fetched (`came`).
fn all_policies(trace: &Rc<Trace>, pages: usize, came: FetchOrigin) -> Vec<Alternative> {
    let ours = move |policy: NewPolicy| {
        move |trace: &Trace| percent_of(trace, Ours::new(&trace.places, pages, policy(), came))
    };
    let of = |name, ask: fn(&Trace, usize) -> f64| alternative(trace, name, move |trace| ask(trace, pages));
    vec![
        alternative(trace, OURS, ours(DEFAULT_POLICY)),
        alternative(trace, "two lists", ours(TWO_LISTS)),
        of(LINUX, |trace, pages| percent_of(trace, Linux::new(trace.unique(), pages))),
        of(S3_FIFO, |trace, pages| percent_of(trace, S3Fifo::new(trace.unique(), pages))),
        of("FIFO", |trace, pages| percent_of(trace, Fifo::new(trace.unique(), pages))),
        of("LRU", |trace, pages| percent_of(trace, Lru::new(trace.unique(), pages))),
        of("ARC", |trace, pages| percent_of(trace, Arc::new(trace.unique(), pages))),
        of("LIRS", |trace, pages| percent_of(trace, Lirs::new(trace.unique(), pages))),
        of("SIEVE", |trace, pages| percent_of(trace, Sieve::new(trace.unique(), pages))),
        of("W-TinyLFU", |trace, pages| percent_of(trace, TinyLfu::new(trace.unique(), pages))),
        of(CLIMBING, |trace, pages| percent_of(trace, TinyLfu::climbing(trace.unique(), pages))),
        of(OPTIMUM, |trace, pages| share(peers::optimum(&trace.references, trace.unique(), pages), trace)),
    ]
}

fn alternative(trace: &Rc<Trace>, name: &'static str, ask: impl Fn(&Trace) -> f64 + 'static) -> Alternative {
    let trace = Rc::clone(trace);
    Alternative::new(name, move |_| Ok(vec![ask(&trace)]))
}

fn percent_of(trace: &Trace, mut cache: impl Simulated) -> f64 {
    let hits = trace.references.iter().filter(|page| cache.ask(**page)).count();
    debug_assert!(cache.held() <= trace.unique(), "no page is held twice");
    share(hits as u64, trace)
}

fn share(hits: u64, trace: &Trace) -> f64 {
    hits as f64 / trace.references.len() as f64 * 100.0
}

fn confirmations(sources: &[Source], families: &[Family]) -> Vec<Case> {
    let by_name = |name: &str| sources.iter().find(|source| source.name == name);
    let of_trace = |source: &Source, percent: f64| {
        let (name, source) = (format!("{}{AT}{percent} %", source.name), source.clone());
        confirmed_by_a_cache(&name, move || source.trace().map(|trace| (trace.cache_pages(percent), trace)))
    };
    let known = REAL_TRACES.iter().filter_map(|(name, percent)| Some(of_trace(by_name(name)?, *percent)));
    let mut cases: Vec<Case> = known.collect();
    if cases.is_empty() {
        cases.extend(sources.first().map(|source| of_trace(source, REAL_TRACES[0].1)));
    }
    let of_family = |(name, pages): &(&str, usize)| {
        let family = families.iter().find(|family| family.name == *name).expect("it is one of them").clone();
        let name = format!("{name}{AT}{pages} pages");
        let pages = *pages;
        confirmed_by_a_cache(&name, move || Ok((pages, Rc::new(family.trace()))))
    };
    cases.extend(REAL_FAMILIES.iter().map(of_family));
    cases
}

/// A row by a real cache, beside the simulation with as many pages as that cache turned out to hold.
fn confirmed_by_a_cache(
    name: &str,
    asked: impl Fn() -> Result<(usize, Rc<Trace>), Unmeasured> + 'static,
) -> Case {
    let case = Case::new(format!("{name}, through a cache"), &METRICS, move || {
        let (pages, trace) = asked()?;
        let held = Rc::new(OnceCell::new());
        let (asked_trace, counted) = (Rc::clone(&trace), Rc::clone(&held));
        let real = Alternative::new(REAL, move |_| {
            let answered = real::answered(&asked_trace, pages, DEFAULT_POLICY)?;
            counted.get_or_init(|| answered.pages_held);
            Ok(vec![share(answered.hits, &asked_trace)])
        });
        let simulated = Alternative::new(SIMULATED, move |_| {
            let pages = *held.get().expect("the cache was asked before");
            let ours = Ours::new(&trace.places, pages, DEFAULT_POLICY(), FetchOrigin::Asked);
            Ok(vec![percent_of(&trace, ours)])
        });
        Ok(vec![real, simulated])
    });
    case.once().compare(RATIO, REAL, SIMULATED).apart_at_most(POINTS_APART_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reached(asked: &[u64], pages: usize) -> Vec<(&'static str, f64)> {
        let trace = Rc::new(Trace::new("x", asked));
        let names = [
            OURS,
            "two lists",
            LINUX,
            S3_FIFO,
            "FIFO",
            "LRU",
            "ARC",
            "LIRS",
            "SIEVE",
            "W-TinyLFU",
            CLIMBING,
            OPTIMUM,
        ];
        let all = all_policies(&trace, pages, FetchOrigin::Asked);
        let hits = |mut one: Alternative| one.run_once(0).expect("it runs")[0] * asked.len() as f64 / 100.0;
        names.into_iter().zip(all.into_iter().map(hits)).collect()
    }

    fn of(reached: &[(&str, f64)], name: &str) -> f64 {
        let found = reached.iter().find(|(other, _)| *other == name).expect("it is there").1;
        (found * 1e6).round() / 1e6
    }

    #[test]
    fn few_pages_by_hand() {
        // Belady's own example for FIFO, which is worse with four pages than with three.
        let asked = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5];
        let [three, four] = [3, 4].map(|pages| reached(&asked, pages));
        assert_eq!([&three, &four].map(|reached| of(reached, "FIFO")), [3.0, 2.0]);
        assert_eq!([&three, &four].map(|reached| of(reached, "LRU")), [2.0, 4.0]);
        assert_eq!([&three, &four].map(|reached| of(reached, OPTIMUM)), [5.0, 6.0]);
    }

    #[test]
    fn no_policy_beats_the_optimum_and_all_are_alike_where_all_pages_fit() {
        let trace = synthetic::trace(Extent::Quick);
        let asked: Vec<u64> = trace.references[..20_000].iter().map(|page| u64::from(page % 500)).collect();
        for pages in [1, 2, 7, 50, 499] {
            let reached = reached(&asked, pages);
            let optimum = of(&reached, OPTIMUM);
            assert!(reached.iter().all(|(_, hits)| *hits <= optimum + 1e-6), "{pages}: {reached:?}");
        }
        let unique = Trace::new("x", &asked).unique();
        let reached = reached(&asked, unique);
        let all = (asked.len() - unique) as f64;
        assert!(
            reached.iter().all(|(name, hits)| (hits - all).abs() < 1e-6 || name.starts_with("W-TinyLFU")),
            "{reached:?}"
        );
    }

    #[test]
    fn the_made_up_trace_answers_the_same_everywhere() {
        let trace = Rc::new(synthetic::trace(Extent::Quick));
        let pages = trace.cache_pages(10.0);
        let all = all_policies(&trace, pages, FetchOrigin::Asked);
        let ratios: Vec<_> = all.into_iter().map(|mut one| one.run_once(0).expect("it runs")[0]).collect();
        let shown: Vec<_> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
        assert_eq!(shown, EXPECTED);
    }

    /// Quinion, two lists, Linux, S3-FIFO, FIFO, LRU, ARC, LIRS, SIEVE, W-TinyLFU, the same climbing, the optimum.
    const EXPECTED: [&str; 12] = [
        "50.47", "48.31", "48.31", "48.12", "41.84", "44.76", "49.05", "52.67", "47.19", "49.79", "49.55",
        "60.83",
    ];

    #[test]
    fn a_looping_stream_hits_nearly_as_often_as_the_optimum() {
        for larger in LOOPS {
            let pages = (1000.0 * larger) as u64;
            let trace = synthetic::around(pages, LOOP_ROUNDS);
            let ours = Ours::new(&trace.places, 1000, DEFAULT_POLICY(), FetchOrigin::Stream);
            let bound = share(peers::optimum(&trace.references, trace.unique(), 1000), &trace);
            let reached = percent_of(&trace, ours);
            assert!(bound - reached < 0.5 && reached <= bound, "{larger}: {reached} of {bound}");
        }
    }

    #[test]
    fn a_folder_without_traces_is_said_to_be_one() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let ratio = Options { traces: Some(folder.path().to_owned()), ..Options::default() };
        let settings =
            Settings { extent: Extent::Quick, repeat: crate::harness::Repeat::Usual(1), folder: ".".into() };
        let case = cases(&settings, &ratio).pop().expect("there is one case");
        let why = case.measure("ratio", &settings, || {}).expect_err("there is nothing").to_string();
        assert!(why.contains("no trace is there") && why.contains(".lis"), "{why}");
    }

    #[test]
    fn sizes_are_shares() {
        assert_eq!(percent("10"), Ok(10.0));
        assert_eq!(percent("0.5%"), Ok(0.5));
        for wrong in ["0", "101", "-1", "ten", "NaN"] {
            assert!(percent(wrong).is_err(), "{wrong}");
        }
    }
}
