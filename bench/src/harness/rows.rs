//! Rows: what was measured, as lines for programs and as a table for people.
//!
//! ```text
//!   {"experiment":"insert","case":"index alone, order 0, 1 thread: batches of 32","metric":"time",
//!    "unit":"ns/folio","quinion":7.1,"peer":31.2,"peer_name":"one at a time","ratio":4.4,
//!    "spread":[4.3,4.5],"goal":4.0,"met":true,"steady":true,"judged_by":"median",
//!    "quinion_runs":[7.0,7.1,7.3],"peer_runs":[31.0,31.2,31.9]}
//!
//!   {"experiment":"stream","case":"64 KiB, 1 job, hot read once before: kernel buffered","metric":"throughput",
//!    "unit":"MB/s","seconds":[0.5,1.0,1.5],"values":[812.4,790.1,805.9]}
//! ```
//!
//! | key | is |
//! |---|---|
//! | `quinion`, `peer` | medians over the repetitions; null if it could not be measured |
//! | `ratio` | the median of the repetitions' ratios; above 1 Quinion is better, whatever the metric |
//! | `spread` | the quartiles of these ratios, or of the values where there is no peer |
//! | `goal`, `met` | the ratio that is wanted, and whether it is reached; null without a goal, and if not steady |
//! | `steady` | whether the repetitions lie within a factor of 2, see `verdict`; null without a peer |
//! | `judged_by` | `median`, or `lower quartile`: then all three numbers are by each side's better quartile |
//! | `quinion_runs`, `peer_runs` | all repetitions, in their order |
//!
//! The second kind is [`Series`]: how the last repetition went, interval by interval, each with the second at which it
//! ended, in a unit of its own. They are not among the rows, but beside them, in a file that `--out` makes.
//!
//! Invariant: the table has the rows that the lines have, and says nothing else but the machine and, at the end, where
//! Quinion loses.

use std::fmt::Write;

use quinion_run::report::{Form, Report, Value, digits};

use super::verdict::{Estimator, Steadiness};

/// The kind of an alternative that Quinion is compared with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerKind {
    /// Another way to the same end: to be behind it is to lose.
    Peer,
    /// A limit that nothing can be better than, or no comparison at all.
    Bound,
}

/// How a repetition went, interval by interval.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Series {
    /// The unit of the values, which need not be the row's.
    pub unit: &'static str,
    /// When each interval ended, in seconds from the beginning.
    pub seconds: Vec<f64>,
    pub values: Vec<f64>,
}

/// One number beside another.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    pub experiment: &'static str,
    /// The situation, and which of Quinion's ways.
    pub case: String,
    pub metric: &'static str,
    pub unit: &'static str,
    pub quinion: Option<f64>,
    /// Quartiles of Quinion's values. Not in the lines, nor in the table: they tell those of the ratio.
    pub quinion_spread: Option<[f64; 2]>,
    pub quinion_runs: Vec<f64>,
    pub peer: Option<f64>,
    /// Quartiles of the peer's values, as above.
    pub peer_spread: Option<[f64; 2]>,
    /// Empty if there is no peer.
    pub peer_runs: Vec<f64>,
    pub peer_name: Option<&'static str>,
    /// Not in the JSON: a goal says what is wanted of a bound.
    pub standing: PeerKind,
    pub estimator: Estimator,
    /// Above 1: Quinion is better.
    pub ratio: Option<f64>,
    /// The quartiles of the ratio; of Quinion's values if there is no peer.
    pub spread: Option<[f64; 2]>,
    pub goal: Option<f64>,
    /// Whether a number can stand for the repetitions; `None` if there is no peer.
    pub steadiness: Option<Steadiness>,
    /// Whether the goal is reached; not known of what is not steady.
    pub met: Option<bool>,
    /// How the last repetition went. Neither in the lines nor in the table.
    pub series: Option<Series>,
    /// Which alternative could not be measured, and why. In the page only; standard error has said it.
    pub not_measured: Vec<(&'static str, String)>,
}

impl Row {
    /// The case without Quinion's way, and that way.
    pub fn situation(&self) -> (&str, &str) {
        self.case.rsplit_once(": ").unwrap_or((&self.case, "quinion"))
    }

    pub fn json(&self) -> String {
        let number = |number: Option<f64>| number.map_or(Value::Unknown, Value::Real);
        let text = |text: &str| Value::Text(text.to_owned());
        let spread = |spread: [f64; 2]| Value::List(spread.map(Value::Real).to_vec());
        let runs = |runs: &[f64]| Value::List(runs.iter().copied().map(Value::Real).collect());
        let steady = self.steadiness.map_or(Value::Unknown, |of| Value::Truth(of == Steadiness::Steady));
        let mut line = Report::new();
        line.add("experiment", "experiment", text(self.experiment))
            .add("case", "case", text(&self.case))
            .add("metric", "metric", text(self.metric))
            .add("unit", "unit", text(self.unit))
            .add("quinion", "quinion", number(self.quinion))
            .add("peer", "peer", number(self.peer))
            .add("peer_name", "peer's name", self.peer_name.map_or(Value::Unknown, text))
            .add("ratio", "ratio", number(self.ratio))
            .add("spread", "spread", self.spread.map_or(Value::Unknown, spread))
            .add("goal", "goal", number(self.goal))
            .add("met", "met", self.met.map_or(Value::Unknown, Value::Truth))
            .add("steady", "steady", steady)
            .add("judged_by", "judged by", text(self.estimator.name()))
            .add("quinion_runs", "quinion's runs", runs(&self.quinion_runs))
            .add("peer_runs", "peer's runs", runs(&self.peer_runs));
        line.printed(Form::Json)
    }

    pub fn series_json(&self) -> Option<String> {
        let Series { unit, seconds, values } = self.series.as_ref()?;
        let text = |text: &str| Value::Text(text.to_owned());
        let list = |numbers: &[f64]| Value::List(numbers.iter().copied().map(Value::Real).collect());
        let mut line = Report::new();
        line.add("experiment", "experiment", text(self.experiment))
            .add("case", "case", text(&self.case))
            .add("metric", "metric", text(self.metric))
            .add("unit", "unit", text(unit))
            .add("seconds", "seconds", list(seconds))
            .add("values", "values", list(values));
        Some(line.printed(Form::Json))
    }

    /// Whether the peer is better, or a goal is missed.
    pub fn is_lost(&self) -> bool {
        match self.met {
            Some(met) => !met,
            None => self.standing == PeerKind::Peer && self.is_steady() && self.is_behind(),
        }
    }

    /// Whether a number can stand for its repetitions, as far as is known.
    pub fn is_steady(&self) -> bool {
        self.steadiness != Some(Steadiness::NotSteady)
    }

    /// Whether the peer was better in three repetitions of four: a median below 1 alone may be noise. A ratio that is
    /// printed as 1.00 is level.
    fn is_behind(&self) -> bool {
        const LEVEL: f64 = 0.995;
        let high = self.spread.map_or(self.ratio, |[_, high]| Some(high));
        self.ratio.is_some_and(|ratio| ratio < LEVEL) && high.is_some_and(|high| high < LEVEL)
    }

    pub fn cells(&self) -> [String; 7] {
        let number = |number: Option<f64>| number.map_or("-".to_owned(), digits);
        let peer = self.peer_name.map_or("-".to_owned(), |name| format!("{} ({name})", number(self.peer)));
        let spread = self.spread.filter(|_| self.peer.is_some());
        let spread = spread.map_or(String::new(), |[low, high]| format!(" [{low:.2} {high:.2}]"));
        let ratio = self.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}x{spread}"));
        let goal = self.goal.map_or("-".to_owned(), |goal| format!("{goal:.2}x"));
        let verdict = match (self.met, self.is_lost()) {
            _ if !self.is_steady() => NOT_STEADY,
            (Some(true), _) => "met",
            (Some(false), _) => "MISSED",
            (None, true) => "worse",
            (None, false) if self.standing == PeerKind::Bound && self.peer.is_some() => "(bound)",
            (None, false) => "",
        };
        let metric = format!("{} {}", self.metric, self.unit);
        [self.case.clone(), metric, number(self.quinion), peer, ratio, goal, verdict.to_owned()]
    }
}

/// The note on a row that is not steady.
pub const NOT_STEADY: &str = "not steady";
const HEADINGS: [&str; 7] = ["case", "metric", "quinion", "peer", "ratio [quartiles]", "goal", ""];

pub fn table(question: &str, rows: &[Row]) -> String {
    let headings = HEADINGS.map(str::to_owned);
    let lines: Vec<[String; 7]> = std::iter::once(headings).chain(rows.iter().map(Row::cells)).collect();
    let width = |column: usize| lines.iter().map(|cells| cells[column].len()).max().unwrap_or(0);
    let widths: [usize; 7] = std::array::from_fn(width);
    let mut text = format!("{question}\n");
    for cells in &lines {
        let mut line = String::from(" ");
        for (cell, width) in cells.iter().zip(widths) {
            let _ = write!(line, " {cell:width$} ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text + &repetitions(rows)
}

/// All repetitions of the ways whose median does not say enough: compared by another number, or not steady.
fn repetitions(rows: &[Row]) -> String {
    let told = rows.iter().filter(|row| row.estimator == Estimator::LowerQuartile || !row.is_steady());
    let mut lines: Vec<String> = Vec::new();
    for row in told {
        let (situation, way) = row.situation();
        let sides = [(Some(way), &row.quinion_runs), (row.peer_name, &row.peer_runs)];
        for (name, runs) in sides.into_iter().filter_map(|(name, runs)| Some((name?, runs))) {
            let runs: Vec<String> = runs.iter().copied().map(digits).collect();
            let line = format!("    {situation}: {name}, {} {}: {}\n", row.metric, row.unit, runs.join(" "));
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
    }
    if lines.is_empty() { String::new() } else { format!("  all repetitions:\n{}", lines.concat()) }
}

/// Where the peer is better or a goal is missed, in a few words a line; empty if nowhere.
pub fn losses(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows.iter().filter(|row| row.is_lost()) {
        let peer = row.peer_name.unwrap_or("the goal");
        let ratio = row.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}x"));
        let goal = row.goal.map_or(String::new(), |goal| format!(", {goal:.2}x is wanted"));
        let _ = writeln!(text, "  {} {}, {}: {ratio} of {peer}{goal}", row.experiment, row.case, row.metric);
    }
    text
}

/// The rows that are not steady, and so neither won nor lost, in a few words a line; empty if none.
pub fn unsteady(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows.iter().filter(|row| !row.is_steady()) {
        let peer = row.peer_name.unwrap_or("-");
        let spread = row.spread.map_or(String::new(), |[low, high]| format!("{low:.2}x to {high:.2}x of "));
        let _ = writeln!(text, "  {} {}, {}: {spread}{peer}", row.experiment, row.case, row.metric);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ratio: f64, goal: Option<f64>) -> Row {
        Row {
            experiment: "insert",
            case: "one thread: batches".to_owned(),
            metric: "time",
            unit: "ns/folio",
            quinion: Some(10.0),
            quinion_spread: None,
            quinion_runs: vec![10.0],
            peer: Some(10.0 * ratio),
            peer_spread: None,
            peer_runs: vec![10.0 * ratio],
            peer_name: Some("one at a time"),
            standing: PeerKind::Peer,
            estimator: Estimator::Median,
            ratio: Some(ratio),
            spread: Some([ratio, ratio]),
            goal,
            steadiness: Some(Steadiness::Steady),
            met: goal.map(|goal| ratio >= goal),
            series: None,
            not_measured: Vec::new(),
        }
    }

    #[test]
    fn a_line_has_its_keys_in_their_order() {
        let expected = "{\"experiment\":\"insert\",\"case\":\"one thread: batches\",\"metric\":\"time\",\
                        \"unit\":\"ns/folio\",\"quinion\":10.00,\"peer\":50.00,\
                        \"peer_name\":\"one at a time\",\"ratio\":5.000,\"spread\":[5.000,5.000],\
                        \"goal\":4.000,\"met\":true,\"steady\":true,\"judged_by\":\"median\",\
                        \"quinion_runs\":[10.00],\"peer_runs\":[50.00]}\n";
        assert_eq!(row(5.0, Some(4.0)).json(), expected);
    }

    #[test]
    fn missing_values_are_null() {
        let nothing = Row { peer_name: None, peer: None, ratio: None, spread: None, ..row(1.0, None) };
        let line = nothing.json();
        assert!(line.contains("\"peer\":null,\"peer_name\":null,\"ratio\":null,\"spread\":null"), "{line}");
        assert!(line.contains("\"goal\":null,\"met\":null,"), "{line}");
    }

    #[test]
    fn a_series_is_a_line_of_its_own_with_its_own_unit() {
        let series = Series { unit: "MB/s", seconds: vec![0.5, 1.0], values: vec![1.0, 2.5] };
        let row = Row { series: Some(series), ..row(1.0, None) };
        assert!(!row.json().contains("MB/s") && !row.json().contains("series"), "{}", row.json());
        let expected = "{\"experiment\":\"insert\",\"case\":\"one thread: batches\",\"metric\":\"time\",\
                        \"unit\":\"MB/s\",\"seconds\":[0.5000,1.000],\"values\":[1.000,2.500]}\n";
        assert_eq!(row.series_json().as_deref(), Some(expected));
        assert_eq!(Row { series: None, ..row }.series_json(), None);
    }

    #[test]
    fn losses_are_listed() {
        let rows = [row(5.0, Some(4.0)), row(3.0, Some(4.0)), row(0.5, None)];
        let lost = losses(&rows);
        assert_eq!(lost.lines().count(), 2, "{lost}");
        assert!(lost.contains("3.00x of one at a time, 4.00x is wanted"), "{lost}");
        assert!(losses(&rows[..1]).is_empty());
        assert!(losses(&[Row { standing: PeerKind::Bound, ..row(0.5, None) }]).is_empty());
        assert!(losses(&[Row { spread: Some([0.8, 1.1]), ..row(0.9, None) }]).is_empty(), "noise is no loss");
        let table = table("How dear?", &rows);
        assert!(table.contains("MISSED") && table.contains("worse") && table.contains("met"), "{table}");
        assert!(!table.contains("repetitions"), "{table}");
    }

    #[test]
    fn an_unsteady_row_is_neither_met_nor_lost_and_shows_all_its_repetitions() {
        let mut wild = Row { steadiness: Some(Steadiness::NotSteady), met: None, ..row(0.5, Some(4.0)) };
        wild.quinion_runs = vec![10.0, 30.0];
        let rows = [wild, row(5.0, Some(4.0))];
        assert_eq!((losses(&rows).as_str(), unsteady(&rows).lines().count()), ("", 1));
        let table = table("How dear?", &rows);
        for words in [NOT_STEADY, "all repetitions", "one thread: batches, time ns/folio: 10.00 30.00\n"] {
            assert!(table.contains(words), "{words} is not in {table}");
        }
        assert!(!table.contains("MISSED"), "{table}");
        assert!(rows[0].json().contains("\"met\":null,\"steady\":false"), "{}", rows[0].json());
    }
}
