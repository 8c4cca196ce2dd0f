//! Markdown: all rows of a recorded run as the tables of BENCHMARKS.md, an experiment after the other.
//!
//! ```text
//!   | case | what | ours | peer | at least | ratio [quartiles] |
//! ```
//!
//! BENCHMARKS.md has, between two marks in the section of an experiment, the rows that have a goal.
//!
//! In the tables no row is left out; those of [`hit_ratios`](super::hit_ratios) are not either, which are read as a
//! table of their own.

use quinion_run::report::digits;

use super::recorded::RecordedRow;

const HEAD: &str =
    "| case | what | ours | peer | at least | ratio [quartiles] |\n|---|---|---|---|---|---|\n";

/// The marks around the rows of an experiment that have a goal; its name stands between these two.
const GOALS_BEGIN: [&str; 2] =
    ["<!-- goals of ", ": begin; written by `cargo xtask bench --record DIR` -->\n"];
const GOALS_END: &str = "<!-- goals: end -->";

/// `text` with the rows that have a goal between each pair of marks. `None` if a begin has no end, or names an
/// experiment that has no such row.
pub fn goals_replaced(text: &str, rows: &[RecordedRow]) -> Option<String> {
    let [before_name, behind_name] = GOALS_BEGIN;
    let (mut new, mut rest) = (String::with_capacity(text.len()), text);
    while let Some((before, from)) = rest.split_once(before_name) {
        let (name, from) = from.split_once(behind_name)?;
        let (_, behind) = from.split_once(GOALS_END)?;
        let of_goal = |row: &&RecordedRow| row.experiment == name && row.goal.is_some();
        let lines: String = rows.iter().filter(of_goal).map(line).collect();
        if lines.is_empty() {
            return None;
        }
        new.push_str(&format!("{before}{before_name}{name}{behind_name}\n{HEAD}{lines}\n{GOALS_END}"));
        rest = behind;
    }
    Some(new + rest)
}

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

    fn row(experiment: &str, is_steady: bool, is_met: Option<bool>) -> RecordedRow {
        RecordedRow {
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
            repetitions: 3,
        }
    }

    #[test]
    fn rows_with_a_goal_stand_between_the_marks_of_their_experiment() {
        let [before_name, behind_name] = GOALS_BEGIN;
        let section = |name: &str| format!("{before_name}{name}{behind_name}old\n{GOALS_END}\n");
        let text = format!("a\n{}b\n{}c\n", section("insert"), section("split"));
        let rows = [
            row("insert", true, Some(true)),
            row("split", true, Some(false)),
            RecordedRow { goal: None, case: "without".to_owned(), ..row("split", true, None) },
        ];
        let new = goals_replaced(&text, &rows).expect("both have a row");
        assert!(new.starts_with("a\n") && new.ends_with("c\n") && !new.contains("old"), "{new}");
        assert!(new.find("met**") < new.find("\nb\n") && new.find("\nb\n") < new.find("missed**"), "{new}");
        assert!(!new.contains("without"), "{new}");
        assert_eq!(goals_replaced(&new, &rows).as_deref(), Some(new.as_str()), "again it is the same");
        assert_eq!(goals_replaced(&section("hit"), &rows), None, "no row of it has a goal");
        assert_eq!(goals_replaced(&format!("{before_name}split{behind_name}"), &rows), None, "it has no end");
    }

    #[test]
    fn every_row_is_a_line_with_its_verdict() {
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
