//! Grabs: what is it worth to look up, and to insert, a hundred folios at a time?
//!
//! ```text
//!   batched          looked up together, and inserted under one hold of the index lock
//!   lookup batched   looked up together, and inserted each under a hold of its own
//!   one by one       each alone
//! ```
//!
//! The kernel's patch that did this for guests gained a tenth of the whole, and no measurable part by the lookup alone.
//! Quinion's are measured in folios of a page, of which there are most, and of 2 MiB: preallocated, where the index is
//! most of the work; and filled, where the copy is. In memory that the cache had before, of as many bytes as the
//! kernel's patch was measured with.

use std::cell::OnceCell;
use std::rc::Rc;

use quinion::MemFile;
use quinion::internals::hooks;
use quinion::internals::mapping::IndexHooks;
use quinion_testing::ablations::OneByOne;

use super::ours::{cache, empty, file, populate};
use super::peers::{PopulateFixture, SOURCE_BYTES};
use crate::fixtures::pages::PAGE;
use crate::fixtures::shared::Shared;
use crate::harness::machine::check_memory;
use crate::harness::timing::alone;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const METRICS: [Metric; 2] = [Metric::cost("cpu", "ns/page"), Metric::cost("locks", "per page")];

const BATCHED: &str = "batched";
const LOOKUP: &str = "lookup batched";
const SINGLE: &str = "one by one";

const WAYS: [(&str, Option<&'static dyn IndexHooks>); 3] =
    [(BATCHED, None), (LOOKUP, OneByOne::GRABS), (SINGLE, OneByOne::GRABS_AND_LOOKUPS)];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Done {
    Preallocated,
    Populated,
}

/// The gain of the patch on the whole, and the goal where each page is filled.
const GOAL: f64 = 1.10;

const CASES: [(&str, u8, Done); 4] = [
    ("grab alone, folios of 4 KiB", 0, Done::Preallocated),
    ("grab and fill, folios of 4 KiB", 0, Done::Populated),
    ("grab alone, folios of 2 MiB", 9, Done::Preallocated),
    ("grab and fill, folios of 2 MiB", 9, Done::Populated),
];

struct Files {
    fixture: PopulateFixture,
    order: u8,
    files: [OnceCell<MemFile>; 3],
}

fn bytes(settings: &Settings) -> u64 {
    settings.pick(if cfg!(debug_assertions) { 8 << 20 } else { 64 << 20 }, 3 << 30)
}

fn fixture(settings: &Settings, order: u8) -> Result<Files, Unmeasured> {
    // Three caches, a sixteenth more of each, and the file that others copy from.
    check_memory(9 * bytes(settings) / 2 + (1 << 30))?;
    Ok(Files { fixture: PopulateFixture::new(bytes(settings))?, order, files: Default::default() })
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let pages = Shared::new(settings, |settings| fixture(settings, 0));
    let large = Shared::new(settings, |settings| fixture(settings, 9));
    CASES
        .into_iter()
        .map(|(name, order, done)| case(if order == 0 { &pages } else { &large }, name, done))
        .collect()
}

fn case(files: &Shared<Files>, name: &'static str, done: Done) -> Case {
    let files = files.clone();
    let goal = (done == Done::Populated).then_some(GOAL);
    let case = Case::new(name, &METRICS, move || {
        let files = files.get()?;
        Ok((0..WAYS.len()).map(|way| alternative(&files, way, done)).collect())
    });
    let rows = |case: Case, (ours, goal)| {
        case.compare("cpu", ours, SINGLE).goal(goal).compare("locks", ours, SINGLE)
    };
    [(BATCHED, goal), (LOOKUP, None)].into_iter().fold(case, rows)
}

fn alternative(files: &Rc<Files>, way: usize, done: Done) -> Alternative {
    let (files, (name, hooks)) = (Rc::clone(files), WAYS[way]);
    Alternative::new(name, move |_| {
        let fixture = &files.fixture;
        if files.files[way].get().is_none() {
            let new = file(&cache(fixture.bytes, files.order, hooks)?, fixture.bytes)?;
            populate(fixture, &new, 0, fixture.bytes);
            files.files[way].get_or_init(|| new);
        }
        let file = files.files[way].get().expect("it was just made");
        empty(file)?;
        let locks = hooks::mem_tree_counts(file).locks;
        let mut given = Ok(());
        let spent = alone(|| match done {
            Done::Preallocated => {
                let mut steps = (0..fixture.bytes).step_by(SOURCE_BYTES);
                given = steps.try_for_each(|at| file.preallocate(at, SOURCE_BYTES as u64));
            }
            Done::Populated => populate(fixture, file, 0, fixture.bytes),
        });
        given?;
        let pages = (fixture.bytes / PAGE as u64) as f64;
        Ok(vec![spent.cpu_ns / pages, (hooks::mem_tree_counts(file).locks - locks) as f64 / pages])
    })
}
