//! Recorded: rows as a run has left them, read again.
//!
//! ```text
//!   DIR/rows.jsonl   a line each, as `rows` writes them      bench/recorded/   those of the run that is in the
//!   DIR/series.jsonl how streams went                                          repository, with the machine
//! ```
//!
//! What is made of them (the scoreboard, the plots) is made of these lines and of nothing else, so that it can be made
//! again, and a test sees that it was.

use std::path::Path;

use serde_json::Value;

use super::rows::Row;

/// What the files of a run are called: its rows, how its streams went, and what it was made on.
pub const LINES: &str = "rows.jsonl";
pub const SERIES: &str = "series.jsonl";
pub const MACHINE: &str = "machine.txt";

/// A row that was measured some time ago.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RecordedRow {
    /// Which experiment.
    pub experiment: String,
    /// Which situation, and which of our ways.
    pub case: String,
    /// What was measured.
    pub metric: String,
    /// In what.
    pub unit: String,
    /// Ours.
    pub quinion: Option<f64>,
    /// The other's.
    pub peer: Option<f64>,
    /// What the other is.
    pub peer_name: Option<String>,
    /// Above 1: ours is better.
    pub ratio: Option<f64>,
    /// The quartiles of the ratio.
    pub spread: Option<[f64; 2]>,
    /// The ratio that is wanted at least.
    pub goal: Option<f64>,
    /// Whether it is reached; not known of what is not steady.
    pub is_met: Option<bool>,
    /// Whether a number can stand for its repetitions; not known without another.
    pub is_steady: Option<bool>,
}

impl RecordedRow {
    /// The row of a line; what is wrong with it if it is none.
    pub fn of(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| format!("{error} in {line}"))?;
        let text = |key: &str| value[key].as_str().map(str::to_owned);
        let known = |key: &str| text(key).ok_or_else(|| format!("there is no `{key}` in {line}"));
        let spread = value["spread"].as_array().and_then(|ends| Some([ends.first()?, ends.get(1)?]));
        Ok(Self {
            experiment: known("experiment")?,
            case: known("case")?,
            metric: known("metric")?,
            unit: known("unit")?,
            quinion: value["quinion"].as_f64(),
            peer: value["peer"].as_f64(),
            peer_name: text("peer_name"),
            ratio: value["ratio"].as_f64(),
            spread: spread.and_then(|[low, high]| Some([low.as_f64()?, high.as_f64()?])),
            goal: value["goal"].as_f64(),
            is_met: value["met"].as_bool(),
            is_steady: value["steady"].as_bool(),
        })
    }

    /// The case without our way, and our way.
    pub fn situation(&self) -> (&str, &str) {
        self.case.rsplit_once(": ").unwrap_or((&self.case, "quinion"))
    }
}

impl From<&Row> for RecordedRow {
    fn from(row: &Row) -> Self {
        Self::of(&row.json()).expect("a row is written as one is read")
    }
}

/// How a repetition went, interval by interval.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RecordedSeries {
    /// Which situation, and which way.
    pub case: String,
    /// In what the values are.
    pub unit: String,
    /// When each interval ended.
    pub seconds: Vec<f64>,
    /// What was measured in it.
    pub values: Vec<f64>,
}

impl RecordedSeries {
    fn of(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| format!("{error} in {line}"))?;
        let list =
            |key: &str| value[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        Ok(Self { case: text("case"), unit: text("unit"), seconds: list("seconds"), values: list("values") })
    }
}

/// A run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RecordedRun {
    /// Its rows.
    pub rows: Vec<RecordedRow>,
    /// Its series.
    pub series: Vec<RecordedSeries>,
}

impl RecordedRun {
    /// The run that `--out` has left in `folder`.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn read(folder: &Path) -> Result<Self, String> {
        let text = |name: &str| {
            let path = folder.join(name);
            std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let rows = text(LINES)?.lines().map(RecordedRow::of).collect::<Result<_, _>>()?;
        let series = text(SERIES)?.lines().map(RecordedSeries::of).collect::<Result<_, _>>()?;
        Ok(Self { rows, series })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let line = "{\"experiment\":\"split\",\"case\":\"a \\\"b\\\": c\",\"metric\":\"time\",\"unit\":\"ns\",\
                    \"quinion\":10.0,\"peer\":null,\"peer_name\":\"x\",\"ratio\":2.5,\"spread\":[2.0,3.0],\
                    \"goal\":null,\"met\":null,\"steady\":false,\"judged_by\":\"median\",\"quinion_runs\":[10.0],\
                    \"peer_runs\":[]}";
        let row = RecordedRow::of(line).expect("it is a row");
        assert_eq!((row.quinion, row.peer, row.ratio), (Some(10.0), None, Some(2.5)));
        assert_eq!((row.spread, row.is_steady), (Some([2.0, 3.0]), Some(false)));
        assert_eq!(row.situation(), ("a \"b\"", "c"));
        assert!(RecordedRow::of("{\"experiment\":\"split\"}").is_err_and(|why| why.contains("case")));
        assert!(RecordedRow::of("half a li").is_err());
    }

    #[test]
    fn the_recorded_run_can_be_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recorded");
        let run = RecordedRun::read(&folder).expect("it is there");
        assert!(!run.rows.is_empty());
    }
}
