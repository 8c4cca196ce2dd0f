//! Plots: the parts of a recorded run that are better seen than read, as files for the guides.
//!
//! | file | shows |
//! |---|---|
//! | `latency.svg` | how long operations of RocksDB take that is short of memory, from the middle one to the slowest |
//! | `throughput.svg` | a stream of a file that is read once, interval by interval |
//! | `memory.svg` | random reads, with more and less memory than the file has bytes |
//! | `hit-ratio.svg` | what caches of several sizes answer of a trace, by each policy |
//!
//! A plot of which the run has no rows is not made.

use super::charts::{Chart, Curve, Kind, Scale};
use super::hit_ratios::{AT, NAME as RATIO, OPTIMUM, OURS};
use super::recorded::{RecordedRow, RecordedRun};

pub fn plots(run: &RecordedRun) -> Vec<(&'static str, Chart)> {
    let named = [
        ("latency.svg", latency(&run.rows)),
        ("throughput.svg", throughput(run)),
        ("memory.svg", memory(&run.rows)),
        ("hit-ratio.svg", hit_ratio(&run.rows)),
    ];
    named.into_iter().filter_map(|(name, chart)| Some((name, chart?))).collect()
}

/// Lines through places, of rows that belong to each: Quinion's first, and each peer.
fn through<'r>(places: &[Vec<&'r RecordedRow>], is_bound: impl Fn(&str) -> bool) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    let mut note = |at: usize, name: &'r str, kind: Kind, value: Option<f64>| {
        if curves.iter().all(|curve| curve.name != name) {
            curves.push(Curve::at_places(name, vec![f64::NAN; places.len()], kind));
        }
        let curve = curves.iter_mut().find(|curve| curve.name == name).expect("it was put there");
        curve.values[at] = value.unwrap_or(f64::NAN);
    };
    for (at, rows) in places.iter().enumerate() {
        for row in rows {
            note(at, row.situation().1, Kind::Ours, row.quinion);
            if let Some(peer) = &row.peer_name {
                note(at, peer, if is_bound(peer) { Kind::Bound } else { Kind::Peer }, row.peer);
            }
        }
    }
    curves
}

fn latency(rows: &[RecordedRow]) -> Option<Chart> {
    const SHARES: [&str; 4] = ["P50", "P75", "P99", "P99.9"];
    let is_it = |row: &&RecordedRow| {
        row.experiment == "readseq" && row.case.starts_with("short of memory") && row.case.contains("default")
    };
    let of = |share: &str| rows.iter().filter(is_it).filter(|row| row.metric == share).collect::<Vec<_>>();
    let places = SHARES.map(of);
    places.iter().any(|rows| !rows.is_empty()).then(|| Chart {
        title: "RocksDB readseq, 32 threads, a cache of half the data: latency".to_owned(),
        places: SHARES.map(str::to_owned).to_vec(),
        x_name: "share of the operations that are not slower",
        y_name: "us".to_owned(),
        scale: Scale::Powers,
        curves: through(&places, |_| false),
    })
}

fn throughput(run: &RecordedRun) -> Option<Chart> {
    const SITUATION: &str = "64 KiB, 1 job, hot read once before: ";
    let told = run.series.iter().filter(|series| !series.values.is_empty());
    let told: Vec<_> =
        told.filter_map(|series| Some((series.case.strip_prefix(SITUATION)?, series))).collect();
    let (_, first) = *told.first()?;
    let curve = |(name, series): &(&str, &super::recorded::RecordedSeries)| Curve {
        name: (*name).to_owned(),
        seconds: series.seconds.clone(),
        values: series.values.clone(),
        kind: if name.starts_with("quinion") { Kind::Ours } else { Kind::Peer },
    };
    Some(Chart {
        title: "A file four times as large as memory, read once".to_owned(),
        places: Vec::new(),
        x_name: "seconds from the beginning",
        y_name: first.unit.clone(),
        scale: Scale::Linear,
        curves: told.iter().map(curve).collect(),
    })
}

/// Situations of random reads, the one with least memory first.
pub const MEMORIES: [&str; 3] = ["4 times", "twice", "1.25 times"];

fn memory(rows: &[RecordedRow]) -> Option<Chart> {
    let is_it = |row: &&RecordedRow| row.experiment == "thrash" && row.metric == "rate";
    let is_shown = |row: &&RecordedRow| {
        row.peer_name.as_deref().is_some_and(|peer| peer.starts_with("kernel"))
            && row.situation().1 == "quinion"
    };
    let of = |times: &str| {
        let case = format!("random 4 KiB of {times} the limit");
        rows.iter()
            .filter(is_it)
            .filter(is_shown)
            .filter(|row| row.case.starts_with(&case))
            .collect::<Vec<_>>()
    };
    let places = MEMORIES.map(of);
    (places.iter().filter(|rows| !rows.is_empty()).count() > 1).then(|| Chart {
        title: "Random reads of 4 KiB by 16 threads, over the memory there is".to_owned(),
        places: ["1/4", "1/2", "4/5"].map(|share| format!("{share} of the file")).to_vec(),
        x_name: "memory that any program may use",
        y_name: "1000 reads/s".to_owned(),
        scale: Scale::Linear,
        curves: through(&places, |_| false),
    })
}

fn hit_ratio(rows: &[RecordedRow]) -> Option<Chart> {
    let is_it =
        |row: &&RecordedRow| row.experiment == RATIO && row.situation().1 == OURS && row.case.contains(AT);
    let place = |row: &RecordedRow| {
        let (trace, size) = row.situation().0.rsplit_once(AT)?;
        Some((trace.to_owned(), size.to_owned()))
    };
    let (trace, _) = rows.iter().find(is_it).and_then(place)?;
    let mut sizes: Vec<(String, Vec<&RecordedRow>)> = Vec::new();
    for row in rows.iter().filter(is_it) {
        let Some((of, size)) = place(row).filter(|(of, _)| *of == trace) else { continue };
        debug_assert_eq!(of, trace);
        match sizes.iter_mut().find(|(known, _)| *known == size) {
            Some((_, rows)) => rows.push(row),
            None => sizes.push((size, vec![row])),
        }
    }
    let (names, places): (Vec<String>, Vec<Vec<&RecordedRow>>) = sizes.into_iter().unzip();
    Some(Chart {
        title: format!("{trace}: hit ratio"),
        places: names,
        x_name: "cache, of the pages asked for",
        y_name: "%".to_owned(),
        scale: Scale::Linear,
        curves: through(&places, |peer| peer == OPTIMUM),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::charts::{Ground, svg};
    use super::super::recorded::RecordedSeries;
    use super::*;

    fn row(experiment: &str, case: &str, metric: &str, peer: &str) -> RecordedRow {
        RecordedRow {
            experiment: experiment.to_owned(),
            case: case.to_owned(),
            metric: metric.to_owned(),
            quinion: Some(2.0),
            peer: Some(1.0),
            peer_name: Some(peer.to_owned()),
            ..RecordedRow::default()
        }
    }

    #[test]
    fn each_plot_has_its_lines_and_places() {
        let random = |times| format!("random 4 KiB of {times} the limit, 16 threads: quinion");
        let rows = vec![
            row("readseq", "short of memory, 32 threads, default orders: quinion run", "P50", "kernel"),
            row("readseq", "short of memory, 32 threads, default orders: quinion run", "P99", "one by one"),
            row("thrash", &random(MEMORIES[0]), "rate", "kernel mmap"),
            row("thrash", &random(MEMORIES[1]), "rate", "kernel mmap"),
            row("ratio", "OLTP at 1 %: quinion", "hit ratio", "Linux"),
            row("ratio", "OLTP at 5 %: quinion", "hit ratio", OPTIMUM),
            row("ratio", "P3 at 5 %: quinion", "hit ratio", "Linux"),
        ];
        let told = |way: &str| RecordedSeries {
            case: format!("64 KiB, 1 job, hot read once before: {way}"),
            unit: "MB/s".to_owned(),
            seconds: vec![0.1, 0.2],
            values: vec![1.0, 2.0],
        };
        let run = RecordedRun { rows, series: vec![told("quinion uncached"), told("kernel buffered")] };
        let made = plots(&run);
        let told: Vec<_> =
            made.iter().map(|(name, chart)| (*name, chart.places.len(), chart.curves.len())).collect();
        let expected =
            [("latency.svg", 4, 3), ("throughput.svg", 0, 2), ("memory.svg", 3, 2), ("hit-ratio.svg", 2, 3)];
        assert_eq!(told, expected);
        assert_eq!(made[0].1.curves[1].points(Scale::Powers), [(0.0, 0.0)], "the kernel's P99 is not there");
        assert!(plots(&RecordedRun::default()).is_empty());
    }

    #[test]
    fn the_plots_of_the_guides_are_those_of_the_recorded_run() {
        let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
        let run = RecordedRun::read(&bench.join("recorded")).expect("it is there");
        let folder = bench.join("../docs/plots");
        let made = plots(&run);
        for (name, chart) in &made {
            let text = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
            assert!(text == svg(chart, Ground::Paper), "{name}: call `cargo xtask bench --record DIR`");
        }
        let there = std::fs::read_dir(&folder).into_iter().flatten().count();
        assert_eq!(there, made.len(), "a plot of no recorded row is in {}", folder.display());
    }
}
