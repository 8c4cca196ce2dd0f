//! Recorded: rows as a run has left them, read again.
//!
//! ```text
//!   DIR/rows.jsonl   a line each, as `rows` writes them      bench/recorded/   those of the run that is in the
//!   DIR/series.jsonl how streams went                                          repository, with the machine
//! ```
//!
//! The scoreboard and the plots are made of these lines and of nothing else, so that a test can make them again.

use std::path::Path;

use serde_json::Value;

use super::rows::Row;

/// The files of a run: its rows, its series, and its machine.
pub const LINES: &str = "rows.jsonl";
pub const SERIES: &str = "series.jsonl";
pub const MACHINE: &str = "machine.txt";

/// A row that was measured some time ago.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RecordedRow {
    pub experiment: String,
    /// The situation, and which of Quinion's ways.
    pub case: String,
    pub metric: String,
    pub unit: String,
    pub quinion: Option<f64>,
    pub peer: Option<f64>,
    pub peer_name: Option<String>,
    /// Above 1: Quinion is better.
    pub ratio: Option<f64>,
    pub spread: Option<[f64; 2]>,
    pub goal: Option<f64>,
    /// `None` for a row that is not steady.
    pub is_met: Option<bool>,
    /// `None` for a row without a peer.
    pub is_steady: Option<bool>,
    /// How often Quinion's was measured.
    pub repetitions: usize,
}

impl RecordedRow {
    /// Parses a line; the error says what is wrong with it.
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
            repetitions: value["quinion_runs"].as_array().map_or(0, Vec::len),
        })
    }

    /// The case without Quinion's way, and that way.
    pub fn situation(&self) -> (&str, &str) {
        self.case.rsplit_once(": ").unwrap_or((&self.case, "quinion"))
    }
}

impl From<&Row> for RecordedRow {
    fn from(row: &Row) -> Self {
        Self::of(&row.json()).expect("a row is written as one is read")
    }
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct RecordedSeries {
    pub case: String,
    pub unit: String,
    /// When each interval ended, in seconds from the beginning.
    pub seconds: Vec<f64>,
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

#[derive(Clone, PartialEq, Debug, Default)]
pub struct RecordedRun {
    pub rows: Vec<RecordedRow>,
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
        assert_eq!(row.repetitions, 1);
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
