//! Readbatch: what does it cost to find a few cached folios, and to look up one too many?
//!
//! A read that knows its last index can stop right after the folio that covers it. A reader that steps on and finds out
//! there pays a lookup for nothing, which for one folio is half of its work. Callgrind counts instructions and
//! branches, which do not depend on how busy the machine is; the time beside them does.
//!
//! And a read of one folio, the most frequent one, should not pay for being a batch. `File::read_at` of a page
//! therefore takes none; it stands beside a plain lookup, which holds the folio, and the same copy. The cost of a batch
//! of one stands there too.
//!
//! A read of many folios of a page, as the original asks of files and of memory files, has three ways: the hit path,
//! which copies folio by folio without holding one, batches of up to 31 folios that are held together, and a lookup of
//! each. A read uses the first, which should be the best of the three.

use crate::fixtures::callgrind;
use crate::fixtures::counted::{Snippet, counted_region};
use crate::harness::timing::alone;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const COUNTS: [Metric; 2] = [Metric::cost("instructions", "per read"), Metric::cost("branches", "per read")];
const TIMES: [Metric; 1] = [Metric::cost("time", "ns/read")];

/// Names of snippets: Quinion's, and its peer; and the ratio that is wanted.
type Pair = (&'static str, &'static str, &'static str, Option<f64>);
const PAIRS: [Pair; 13] = [
    ("1 folio", "batch read of 1", "batch read of 1, a step more", Some(1.0)),
    ("4 folios", "batch read of 4", "batch read of 4, a step more", Some(1.0)),
    ("31 folios", "batch read of 31", "batch read of 31, a step more", Some(1.0)),
    ("1 folio and its bytes", "hit 4 KiB", "plain lookup and copy", Some(1.0)),
    ("1 folio and its bytes", "batch read of 1, copied", "plain lookup and copy", None),
    ("64 KiB of a file, order 0", "file 64 KiB, hit path", "file 64 KiB, batch", Some(1.0)),
    ("64 KiB of a file, order 0", "file 64 KiB, hit path", "file 64 KiB, single lookups", Some(1.0)),
    ("1 MiB of a file, order 0", "file 1 MiB, hit path", "file 1 MiB, batch", Some(1.0)),
    ("1 MiB of a file, order 0", "file 1 MiB, hit path", "file 1 MiB, single lookups", Some(1.0)),
    (
        "64 KiB of a memory file, order 0",
        "memory file 64 KiB, hit path",
        "memory file 64 KiB, batch",
        Some(1.0),
    ),
    (
        "64 KiB of a memory file, order 0",
        "memory file 64 KiB, hit path",
        "memory file 64 KiB, single lookups",
        Some(1.0),
    ),
    ("1 MiB of a memory file, order 0", "memory file 1 MiB, hit path", "memory file 1 MiB, batch", Some(1.0)),
    (
        "1 MiB of a memory file, order 0",
        "memory file 1 MiB, hit path",
        "memory file 1 MiB, single lookups",
        Some(1.0),
    ),
];

pub fn cases(settings: &Settings) -> Vec<Case> {
    let rounds = settings.pick(4, 64);
    PAIRS.into_iter().map(counted).chain(PAIRS.into_iter().map(|pair| timed(pair, rounds))).collect()
}

fn counted((name, ours, peer, goal): Pair) -> Case {
    let case = Case::new(name, &COUNTS, move || Ok(vec![counting(ours), counting(peer)]));
    case.once().compare("instructions", ours, peer).goal(goal).compare("branches", ours, peer).goal(goal)
}

fn counting(name: &'static str) -> Alternative {
    Alternative::new(name, move |_| {
        let counted = callgrind::count(snippet(name))?;
        Ok(vec![counted.instructions, counted.branches])
    })
}

fn timed((name, ours, peer, _): Pair, rounds: u64) -> Case {
    let case = Case::new(name, &TIMES, move || Ok(vec![timing(ours, rounds)?, timing(peer, rounds)?]));
    case.compare("time", ours, peer)
}

fn timing(name: &'static str, rounds: u64) -> Result<Alternative, Unmeasured> {
    let mut work = snippet(name).prepare()?;
    let reads = (snippet(name).times * rounds) as usize;
    Ok(Alternative::new(name, move |_| {
        let spent = alone(|| (0..rounds).for_each(|_| counted_region(&mut work)));
        Ok(vec![spent.each(reads)[0]])
    }))
}

fn snippet(name: &str) -> &'static Snippet {
    Snippet::of(name).expect("the names above are those of snippets")
}
