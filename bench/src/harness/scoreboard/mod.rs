//! Scoreboard: what the originals of the five mechanisms claimed, what Quinion reaches on the same work, and why it
//! differs.
//!
//! ```text
//!   claims     what was announced, and which rows ask the same
//!   lines      a line for each situation that has such a row, and one for a claim of which there is none
//!   markdown   the table of BENCHMARKS.md, between two marks; always generated, and a test compares
//!   put        the same on the page of a run
//! ```
//!
//! Each original is a change of the Linux kernel, measured by its author against the kernel without it, on a large
//! machine. Quinion's is measured against Quinion without it where that can be chosen, and on this machine.
//!
//! | verdict | the ratio |
//! |---|---|
//! | reached | is what was claimed, or more |
//! | less | is less than what was claimed, and more than 1 if more was claimed |
//! | not seen | is not more than 1 where more was claimed |
//! | not steady | stands for repetitions that are too far apart |
//! | shown | is of something that was not announced: there is no claim |
//! | not measured | is not in the run |

mod claims;

use super::escape::escaped;
use super::recorded::RecordedRow;
use super::verdict::SWING_MAX;
use quinion_run::report::digits;

use claims::{Baseline, CLAIMS, Claim};

/// The marks around the table.
pub const BEGIN: &str =
    "<!-- scoreboard: begin; written by `cargo xtask bench --record DIR`, not by hand -->";
pub const END: &str = "<!-- scoreboard: end -->";

/// Comparisons of a run that may be not steady.
const UNSTEADY_PERCENT_MAX: f64 = 5.0;

const HEADINGS: [&str; 7] = [
    "original",
    "its claim",
    "the same work here, with",
    "without the mechanism",
    "beside the kernel",
    "verdict",
    "cause",
];

fn lines(rows: &[RecordedRow]) -> Vec<[String; 7]> {
    CLAIMS.iter().flat_map(|claim| lines_of(claim, rows)).collect()
}

fn lines_of(claim: &Claim, rows: &[RecordedRow]) -> Vec<[String; 7]> {
    let mut cases: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| claim.is_of(row)) {
        if !cases.contains(&row.case.as_str()) {
            cases.push(&row.case);
        }
    }
    if cases.is_empty() {
        let nothing = || "-".to_owned();
        let (original, claimed) = (claim.original.to_owned(), claim.claim.to_owned());
        let verdict = "not measured".to_owned();
        return vec![[original, claimed, nothing(), nothing(), nothing(), verdict, String::new()]];
    }
    cases.into_iter().map(|case| line(claim, case, rows)).collect()
}

fn line(claim: &Claim, case: &str, rows: &[RecordedRow]) -> [String; 7] {
    let of_case = || rows.iter().filter(|row| claim.is_of(row) && row.case == case);
    let beside = |peer: Option<&str>| {
        let peer = peer?;
        of_case().find(|row| row.peer_name.as_deref() == Some(peer))
    };
    let without = beside(claim.without);
    let kernel = beside(claim.kernel);
    let elsewhere = claim.elsewhere.and_then(|elsewhere| rows.iter().find(|row| elsewhere.is(row)));
    let measured = match claim.baseline {
        Baseline::Without => without,
        Baseline::Kernel => kernel,
    };
    let verdict = verdict(claim, measured);
    let cause = match verdict {
        Verdict::Less | Verdict::NotSeen => claim.cause.to_owned(),
        Verdict::NotSteady => {
            format!("its repetitions differ by more than {SWING_MAX:.0}x; {}", claim.unsteady)
        }
        _ => String::new(),
    };
    let with = of_case().next().map_or("-".to_owned(), |row| {
        let ours = row.quinion.map_or("-".to_owned(), digits);
        format!("{}: {} {ours} {}", row.situation().0, row.metric, row.unit)
    });
    let cell = |row: Option<&RecordedRow>| row.map_or("-".to_owned(), other);
    let kernel = kernel.map_or_else(
        || elsewhere.map_or("-".to_owned(), |row| format!("{}: {}", row.case, other(row))),
        other,
    );
    [
        claim.original.to_owned(),
        claim.claim.to_owned(),
        with,
        cell(without),
        kernel,
        verdict.words().to_owned(),
        cause,
    ]
}

fn other(row: &RecordedRow) -> String {
    let peer = row.peer.map_or("-".to_owned(), digits);
    let ratio = row.ratio.map_or(String::new(), |ratio| format!(": {ratio:.2}x"));
    let spread = row.spread.map_or(String::new(), |[low, high]| format!(" [{low:.2} {high:.2}]"));
    format!("{peer} ({}){ratio}{spread}", row.peer_name.as_deref().unwrap_or("-"))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Reached,
    Less,
    NotSeen,
    NotSteady,
    Shown,
    NotMeasured,
}

impl Verdict {
    fn words(self) -> &'static str {
        match self {
            Self::Reached => "reached",
            Self::Less => "less",
            Self::NotSeen => "not seen",
            Self::NotSteady => "not steady",
            Self::Shown => "shown",
            Self::NotMeasured => "not measured",
        }
    }
}

fn verdict(claim: &Claim, row: Option<&RecordedRow>) -> Verdict {
    /// A ratio that is printed as 1.00 is level.
    const LEVEL: f64 = 1.005;
    let Some((row, ratio)) = row.and_then(|row| Some((row, row.ratio?))) else { return Verdict::NotMeasured };
    match claim.ratio {
        _ if row.is_steady == Some(false) => Verdict::NotSteady,
        None => Verdict::Shown,
        Some(claimed) if ratio >= claimed => Verdict::Reached,
        Some(claimed) if ratio >= LEVEL || claimed < 1.0 => Verdict::Less,
        Some(_) => Verdict::NotSeen,
    }
}

pub fn markdown(rows: &[RecordedRow]) -> String {
    let line = |cells: [String; 7]| format!("| {} |\n", cells.map(|cell| cell.replace('|', "/")).join(" | "));
    let head = format!("{}|{}\n", line(HEADINGS.map(str::to_owned)), "---|".repeat(HEADINGS.len()));
    head + &lines(rows).into_iter().map(line).collect::<String>()
}

/// How many of the comparisons that were repeated are not steady, beside what is wanted.
fn steadiness(rows: &[RecordedRow]) -> String {
    let repeated: Vec<_> = rows.iter().filter(|row| row.repetitions > 1 && row.ratio.is_some()).collect();
    let wild = repeated.iter().filter(|row| row.is_steady == Some(false)).count();
    let percent = wild as f64 / repeated.len().max(1) as f64 * 100.0;
    let verdict = if percent <= UNSTEADY_PERCENT_MAX { "met" } else { "missed" };
    format!(
        "Of its {} comparisons of several repetitions {wild} ({percent:.1} %) are not steady, where at most \
         {UNSTEADY_PERCENT_MAX:.0} % are wanted: **{verdict}**.\n",
        repeated.len()
    )
}

/// `text` with the table of `rows` between the marks; `None` if they are not there.
pub fn replaced(text: &str, rows: &[RecordedRow]) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{}\n{}\n{END}{after}", markdown(rows), steadiness(rows)))
}

pub fn put(html: &mut String, rows: &[RecordedRow]) {
    html.push_str("<h2 id=\"scoreboard\">The originals' claims, and ours</h2>\n");
    html.push_str(
        "<p class=\"dim\">Each original is a change of the Linux kernel, measured by its author against the kernel \
         without it. Ours is measured here, against Quinion without it where that can be chosen.</p>\n",
    );
    html.push_str("<table class=\"scoreboard\"><thead><tr>");
    html.push_str(&HEADINGS.map(|heading| format!("<th>{heading}</th>")).concat());
    html.push_str("</tr></thead><tbody>\n");
    for cells in lines(rows) {
        let cells = cells.map(|cell| format!("<td>{}</td>", escaped(&cell)));
        html.push_str(&format!("<tr>{}</tr>\n", cells.concat()));
    }
    html.push_str("</tbody></table>\n");
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::recorded::RecordedRun;
    use super::*;

    fn row(metric: &str, ratio: f64, peer: &str) -> RecordedRow {
        RecordedRow {
            experiment: "readseq".to_owned(),
            case: "short of memory, 32 threads, order 0: quinion run".to_owned(),
            metric: metric.to_owned(),
            unit: "us".to_owned(),
            quinion: Some(10.0),
            peer: Some(10.0 * ratio),
            peer_name: Some(peer.to_owned()),
            ratio: Some(ratio),
            spread: Some([ratio, ratio]),
            is_steady: Some(true),
            ..RecordedRow::default()
        }
    }

    fn verdict_of(metric: &str, ratio: f64, change: impl Fn(&mut RecordedRow)) -> [String; 7] {
        let mut row = row(metric, ratio, "one by one");
        change(&mut row);
        let kernel = RecordedRow { peer_name: Some("kernel".to_owned()), ratio: Some(7.0), ..row.clone() };
        lines(&[row, kernel]).into_iter().find(|line| line[2] != "-").expect("one claim asks for it")
    }

    #[test]
    fn a_claim_is_reached_or_less_or_not_seen_and_then_says_why() {
        let reached = verdict_of("throughput", 1.6, |_| {});
        assert_eq!((reached[5].as_str(), reached[6].as_str()), ("reached", ""));
        assert_eq!(reached[3], "16.00 (one by one): 1.60x [1.60 1.60]");
        assert!(reached[4].contains("7.00x"), "{reached:?}");
        for (ratio, verdict) in [(1.3, "less"), (0.97, "not seen")] {
            let line = verdict_of("throughput", ratio, |_| {});
            assert!(line[5] == verdict && !line[6].is_empty(), "{line:?}");
        }
        let wild = verdict_of("throughput", 1.6, |row| row.is_steady = Some(false));
        assert_eq!(wild[5], "not steady");
        assert!(wild[6].starts_with("its repetitions differ by more than 2x; "), "{wild:?}");
        let nothing = verdict_of("throughput", 1.6, |row| row.ratio = None);
        assert_eq!(nothing[5], "not measured");
    }

    #[test]
    fn a_claim_without_a_row_is_not_left_out() {
        let all = lines(&[]);
        assert_eq!(all.len(), CLAIMS.len());
        assert!(all.iter().all(|line| line[5] == "not measured"));
    }

    #[test]
    fn comparisons_of_one_repetition_say_nothing_of_steadiness() {
        let of = |repetitions, is_steady| RecordedRow {
            repetitions,
            is_steady: Some(is_steady),
            ..row("throughput", 1.0, "kernel")
        };
        let mut rows = vec![of(1, true); 900];
        rows.extend(vec![of(3, true); 19]);
        rows.push(of(3, false));
        let text = steadiness(&rows);
        assert!(
            text.contains("20 comparisons") && text.contains(" 1 (5.0 %)") && text.contains("met"),
            "{text}"
        );
        rows.push(of(3, false));
        let text = steadiness(&rows);
        assert!(text.contains(" 2 (9.5 %)") && text.contains("missed"), "{text}");
    }

    #[test]
    fn the_table_is_put_between_the_marks_and_nowhere_else() {
        let text = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let new = replaced(&text, &[]).expect("the marks are there");
        assert!(new.starts_with("before\n") && new.ends_with("\nafter\n") && !new.contains("old"), "{new}");
        assert_eq!(replaced(&new, &[]).as_deref(), Some(new.as_str()), "again it is the same");
        assert_eq!(replaced("nothing\n", &[]), None);
    }

    /// The file is generated: its table equals that of the recorded rows.
    #[test]
    fn the_tables_in_the_file_are_those_of_the_recorded_rows() {
        let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
        let run = RecordedRun::read(&bench.join("recorded")).expect("there is a recorded run");
        let text = std::fs::read_to_string(bench.join("recorded/TABLES.md")).expect("it is there");
        assert!(
            text == crate::harness::markdown::file(&run.rows),
            "write it anew: cargo xtask bench --record bench/recorded"
        );
    }

    #[test]
    fn the_tables_of_the_text_are_those_of_the_recorded_rows() {
        let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
        let run = RecordedRun::read(&bench.join("recorded")).expect("it is there");
        let text = std::fs::read_to_string(bench.join("../BENCHMARKS.md")).expect("it is there");
        let wanted = replaced(&text, &run.rows).expect("the marks are there");
        let wanted = crate::harness::markdown::goals_replaced(&wanted, &run.rows).expect("they have rows");
        let wanted = crate::harness::hit_ratios::replaced(&wanted, &run.rows).expect("the marks are there");
        assert!(text == wanted, "call `cargo xtask bench --record DIR`, with the folder of a run");
    }
}
