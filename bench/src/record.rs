//! Record: the run that the repository keeps, and what BENCHMARKS.md says by it.
//!
//! ```text
//!   DIR                       the repository
//!   rows.jsonl, series.jsonl  -> bench/recorded/
//!   machine.txt               -> bench/recorded/
//!   their scoreboard          -> BENCHMARKS.md, between two marks, as are rows with a goal and hit ratios
//!   their tables              -> bench/recorded/TABLES.md
//!   their plots               -> docs/plots/
//! ```
//!
//! The repository is the one in which this program was built.

use std::fs;
use std::path::Path;

use crate::harness::charts::{Ground, svg};
use crate::harness::recorded::{LINES, MACHINE, RecordedRun, SERIES};
use crate::harness::{hit_ratios, markdown, plots, scoreboard};

/// Has the repository keep the run of `folder`.
///
/// # Errors
/// There is no run in it, or no repository any more.
pub fn record(folder: &Path) -> Result<(), String> {
    let run = RecordedRun::read(folder)?;
    let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in [LINES, SERIES, MACHINE] {
        copy(&folder.join(name), &bench.join("recorded").join(name))?;
    }
    let path = bench.join("../BENCHMARKS.md");
    let text = fs::read_to_string(&path).map_err(|error| wrong(&path, &error))?;
    let text = scoreboard::replaced(&text, &run.rows)
        .ok_or_else(|| format!("{} has no marks between which the scoreboard stands", path.display()))?;
    let text = markdown::goals_replaced(&text, &run.rows)
        .ok_or_else(|| format!("{} has marks for goals of an experiment that has none", path.display()))?;
    let text = hit_ratios::replaced(&text, &run.rows)
        .ok_or_else(|| format!("{} has no marks between which the hit ratios stand", path.display()))?;
    fs::write(&path, text).map_err(|error| wrong(&path, &error))?;
    let path = bench.join("recorded/TABLES.md");
    fs::write(&path, markdown::file(&run.rows)).map_err(|error| wrong(&path, &error))?;
    record_plots(&run, &bench.join("../docs/plots"))
}

/// Writes the plots, and removes those of an older run that this one has not.
fn record_plots(run: &RecordedRun, folder: &Path) -> Result<(), String> {
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(|error| wrong(folder, &error))?;
    }
    for (name, chart) in plots::plots(run) {
        fs::create_dir_all(folder).map_err(|error| wrong(folder, &error))?;
        let path = folder.join(name);
        fs::write(&path, svg(&chart, Ground::Paper)).map_err(|error| wrong(&path, &error))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let is_same = |a: &Path, b: &Path| a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    if is_same(from, to) {
        return Ok(()); // what is recorded already: only the scoreboard is made again
    }
    fs::copy(from, to).map(drop).map_err(|error| format!("{} to {}: {error}", from.display(), to.display()))
}

fn wrong(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}
