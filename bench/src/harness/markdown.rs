//! Markdown: all rows of a recorded run as the tables of BENCHMARKS.md, an experiment after the other.
//!
//! ```text
//!   | case | what | ours | peer | at least | ratio [quartiles] |
//! ```
//!
//! No row is left out; those of [`hit_ratios`](super::hit_ratios) are not either, which are read as a table of their
//! own.

use quinion_cli::report::digits;

use super::recorded::RecordedRow;

const HEAD: &str =
    "| case | what | ours | peer | at least | ratio [quartiles] |\n|---|---|---|---|---|---|\n";

pub fn file(rows: &[RecordedRow]) -> String {
    format!(
        "# All rows of the recorded run\n\n\
         Written by `cargo xtask bench --record DIR`, not by hand. [BENCHMARKS.md](../../BENCHMARKS.md) says what\n\
         each experiment does and what its ratios mean, [machine.txt](machine.txt) on what they were measured.\n{}",
        tables(rows)
    )
}

pub fn tables(rows: &[RecordedRow]) -> String {
    let (mut text, mut last) = (String::new(), "");
    for row in rows {
        if row.experiment != last {
            last = &row.experiment;
            text.push_str(&format!("\n## `{last}`\n\n{HEAD}"));
        }
        text.push_str(&line(row));
    }
    text
}

fn line(row: &RecordedRow) -> String {
    let number = |number: Option<f64>| number.map_or("-".to_owned(), digits);
    let peer = row.peer_name.as_ref().map_or("-".to_owned(), |name| format!("{} ({name})", number(row.peer)));
    let goal = row.goal.map_or(String::new(), |goal| format!("{goal:.2}x"));
    let spread = row.spread.map_or(String::new(), |[low, high]| format!(" [{low:.2} {high:.2}]"));
    let ratio = row.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}x{spread}"));
    let ratio = match (row.is_steady, row.is_met) {
        (Some(false), _) => format!("{ratio}, not steady"),
        (_, Some(true)) => format!("**{ratio}, met**"),
        (_, Some(false)) => format!("**{ratio}, missed**"),
        _ => ratio,
    };
    let what = format!("{}, {}", row.metric, row.unit);
    format!("| {} | {what} | {} | {peer} | {goal} | {ratio} |\n", row.case, number(row.quinion))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_a_line_with_its_verdict() {
        let row = |experiment: &str, is_steady, is_met| RecordedRow {
            experiment: experiment.to_owned(),
            case: "one thread: batches".to_owned(),
            metric: "time".to_owned(),
            unit: "ns".to_owned(),
            quinion: Some(10.0),
            peer: Some(20.0),
            peer_name: Some("single".to_owned()),
            ratio: Some(2.0),
            spread: Some([1.9, 2.1]),
            goal: Some(1.5),
            is_steady: Some(is_steady),
            is_met,
        };
        let rows = [
            row("insert", true, Some(true)),
            row("insert", true, Some(false)),
            row("split", false, None),
            RecordedRow { peer_name: None, ratio: None, goal: None, ..row("split", true, None) },
        ];
        let text = tables(&rows);
        assert_eq!(text.matches(HEAD).count(), 2, "{text}");
        for words in
            ["**2.00x [1.90 2.10], met**", "missed**", "2.00x [1.90 2.10], not steady |", "| - |  | - |"]
        {
            assert!(text.contains(words), "{words} is not in {text}");
        }
    }
}
