//! Populate: how fast is a virtual machine's memory filled, beside every way that the kernel offers?
//!
//! ```text
//!   ours     a memory file is populated: by one thread and by two in a cache that is built for it, and in one that had
//!            as much memory before
//!   peers    write, mmap and memcpy, userfaultfd: each fills as many bytes, in memory that it gets for that
//!   grabs    Quinion's, by other ways to find and create folios
//! ```
//!
//! One thread works unless a name says two. The memory is new in each repetition, and freeing it is not timed. It is
//! new to the process, not to the machine: before each run as much memory is made resident as the run takes, so that no
//! run pays for memory that the host reclaimed from the run before. The order changes from repetition to repetition,
//! there are seven, all are printed, and each side is compared by its lower quartile: what remains of the host's
//! influence makes a run slower and never faster. Peers that no goal names are repeated fewer times, in a case of their
//! own. Elapsed time is measured, since a virtual machine waits for it; the CPU time beside it is that of the working
//! threads.

mod grabs;
mod ours;
mod peers;

use std::rc::Rc;

use crate::fixtures::resident::make_resident;
use crate::fixtures::shared::Shared;
use crate::harness::machine::check_memory;
use crate::harness::timing::Spent;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use ours::Way;
use peers::{BEST, BEST_BY_TWO, PEERS, Peer, PopulateFixture, UFFD_COPY};

pub use ours::{cache, file};
pub use peers::{faults_of, timed};

const METRICS: [Metric; 2] = [Metric::cost("time", "ms"), Metric::cost("cpu", "ms")];
/// A full run's repetitions of cases with goals, and of the others, of which one takes most of a minute.
const REPEAT: usize = 7;
const REPEAT_REST: usize = 3;

/// The least ratios wanted beside the kernel's best: in a cache that has just been built, by one thread and by two, and
/// in one that had as much memory before.
const GOALS: [(&str, f64); 4] =
    [(ours::ONE, 0.75), (ours::TWO, 1.0), (ours::GROWN, 1.3), (ours::WRITE, 0.75)];
/// The least ratio wanted of all of them beside the copies of page-fault servers.
const COPY_GOAL: f64 = 1.5;

pub fn cases(settings: &Settings) -> Vec<Case> {
    let fixture = Shared::new(settings, fixture);
    let cases = [with_goals(settings, &fixture), rest(settings, &fixture)];
    cases.into_iter().chain(grabs::cases(settings)).collect()
}

const NAMED: [&str; 3] = [BEST, BEST_BY_TWO, UFFD_COPY];

fn with_goals(settings: &Settings, fixture: &Shared<PopulateFixture>) -> Case {
    let case = of(settings, fixture, "", |fixture| {
        let grown = ours::Grown::new();
        let ours = [
            alternative(fixture, ours::ONE, |fixture| ours::fresh(fixture, Way::Populate { threads: 1 })),
            alternative(fixture, ours::TWO, |fixture| ours::fresh(fixture, Way::Populate { threads: 2 })),
            alternative(fixture, ours::WRITE, |fixture| ours::fresh(fixture, Way::Write { chunk: 1 << 20 })),
            alternative(fixture, ours::GROWN, move |fixture| grown.again(fixture)),
        ];
        ours.into_iter().chain(peers(fixture, |peer| NAMED.contains(&peer.name))).collect()
    });
    let case = GOALS.into_iter().fold(case.at_least(REPEAT), |case, (ours, goal)| {
        case.compare("time", ours, BEST).goal(goal).compare("time", ours, UFFD_COPY).goal(COPY_GOAL)
    });
    case.compare("time", ours::TWO, BEST_BY_TWO)
        .compare("time", ours::ONE, BEST_BY_TWO)
        .compare("cpu", ours::ONE, BEST)
        .compare("cpu", ours::TWO, BEST)
        .compare("cpu", ours::GROWN, BEST)
        .compare("cpu", ours::WRITE, BEST)
}

fn rest(settings: &Settings, fixture: &Shared<PopulateFixture>) -> Case {
    let case = of(settings, fixture, ", the rest", |fixture| {
        let ours =
            alternative(fixture, ours::ONE, |fixture| ours::fresh(fixture, Way::Populate { threads: 1 }));
        std::iter::once(ours).chain(peers(fixture, |peer| !NAMED.contains(&peer.name))).collect()
    });
    let others = PEERS.iter().filter(|peer| !NAMED.contains(&peer.name));
    // Peers that only map filled memory copy nothing: they show how much of the work the copy is.
    others.fold(case.usually(REPEAT_REST), |case, peer| match peer.copies() {
        true => case.compare("time", ours::ONE, peer.name),
        false => case.bound("time", ours::ONE, peer.name),
    })
}

fn of(
    settings: &Settings,
    fixture: &Shared<PopulateFixture>,
    which: &str,
    alternatives: impl FnOnce(&Rc<PopulateFixture>) -> Vec<Alternative> + 'static,
) -> Case {
    let (fixture, bytes) = (fixture.clone(), bytes(settings));
    let case = Case::new(format!("{} MiB{which}", bytes >> 20), &METRICS, move || {
        let fixture = fixture.get()?;
        Ok(alternatives(&fixture))
    });
    case.without_warm_up().by_lower_quartile().before_each(move || make_resident(bytes))
}

fn peers(fixture: &Rc<PopulateFixture>, is_wanted: impl Fn(&Peer) -> bool) -> Vec<Alternative> {
    let wanted = PEERS.iter().filter(|peer| is_wanted(peer));
    wanted.map(|peer| alternative(fixture, peer.name, |fixture| fixture.fill(peer))).collect()
}

/// Bytes to fill. A build with checks measures nothing, and only shows that all of this runs.
fn bytes(settings: &Settings) -> u64 {
    settings.pick(if cfg!(debug_assertions) { 16 << 20 } else { 256 << 20 }, 3 << 30)
}

fn fixture(settings: &Settings) -> Result<PopulateFixture, Unmeasured> {
    let bytes = bytes(settings);
    // The source file, a file that is filled or made resident, a cache that has grown, and memory that is being freed.
    check_memory(5 * bytes + (512 << 20))?;
    PopulateFixture::new(bytes)
}

fn alternative(
    fixture: &Rc<PopulateFixture>,
    name: &'static str,
    fill: impl Fn(&PopulateFixture) -> Result<Spent, Unmeasured> + 'static,
) -> Alternative {
    let fixture = Rc::clone(fixture);
    Alternative::new(name, move |_| fill(&fixture).map(in_ms)).excused(METRICS.len())
}

fn in_ms(spent: Spent) -> Vec<f64> {
    vec![spent.elapsed_ns / 1e6, spent.cpu_ns / 1e6]
}
