//! Hit ratios: the rows of an experiment on traces as a table, traces and sizes down and policies across.
//!
//! ```text
//!   hit ratio, %            quinion*   Linux   S3-FIFO   ..   optimum   best online
//!   OLTP at 1 %                46.5     43.5      46.5   ..      59.8   S3-FIFO 46.5
//! ```
//!
//! It has what the rows have. The star marks Quinion, and the last column is what comes nearest to the optimum without
//! knowledge of later references. BENCHMARKS.md has the same of the recorded rows between two marks.

use std::fmt::Write;

use super::recorded::RecordedRow;
use super::rows::Row;

/// The name of an experiment whose rows are shown so.
pub const NAME: &str = "ratio";
pub const OURS: &str = "quinion";
/// The bound on every policy.
pub const OPTIMUM: &str = "optimum";
/// Between a trace's name and its size, in a case's name.
pub const AT: &str = " at ";
/// Percentage points by which Quinion may be behind the best online policy.
pub const POINTS_BEHIND_MAX: f64 = 1.0;

const BEGIN: &str = "<!-- hit ratios: begin; written by `cargo xtask bench --record DIR` -->\n";
const END: &str = "<!-- hit ratios: end -->";

#[derive(Clone, PartialEq, Debug)]
pub struct Line<'a> {
    pub case: &'a str,
    /// Each name and its hit ratio in per cent; Quinion's first.
    pub ratios: Vec<(&'a str, f64)>,
}

impl<'a> Line<'a> {
    pub fn place(&self) -> Option<(&'a str, f64)> {
        let (trace, size) = self.case.rsplit_once(AT)?;
        Some((trace, size.strip_suffix(" %")?.parse().ok()?))
    }

    fn of(&self, name: &str) -> Option<f64> {
        self.ratios.iter().find(|(other, _)| *other == name).map(|(_, ratio)| *ratio)
    }

    /// How many points Quinion is behind the best online policy; 0 if it is that.
    fn behind(&self) -> f64 {
        self.best_online().zip(self.of(OURS)).map_or(0.0, |((_, best), ours)| best - ours)
    }

    fn best_online(&self) -> Option<(&'a str, f64)> {
        let online = self.ratios.iter().filter(|(name, _)| *name != OPTIMUM);
        // The first of equals, which is Quinion's if it is among them.
        online.copied().reduce(|best, other| if other.1 > best.1 { other } else { best })
    }
}

pub fn lines(rows: &[Row]) -> Vec<Line<'_>> {
    let cells = |row: &'_ Row| (row.quinion, row.peer_name.zip(row.peer));
    lines_of(rows.iter().map(|row| (row.case.as_str(), cells(row))))
}

/// Lines of rows, each given by its case, Quinion's ratio, and the peer's.
fn lines_of<'a>(
    rows: impl Iterator<Item = (&'a str, (Option<f64>, Option<(&'a str, f64)>))>,
) -> Vec<Line<'a>> {
    let mut lines: Vec<Line> = Vec::new();
    for (case, (quinion, peer)) in rows {
        let Some((case, ours)) = case.rsplit_once(": ") else { continue };
        if lines.last().is_none_or(|line| line.case != case) {
            lines.push(Line { case, ratios: quinion.map(|ratio| (ours, ratio)).into_iter().collect() });
        }
        lines.last_mut().expect("one was put there").ratios.extend(peer);
    }
    lines
}

/// `text` with the table of the recorded rows between the marks; `None` if these are not there.
pub fn replaced(text: &str, rows: &[RecordedRow]) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{}\n{END}{after}", markdown(rows)))
}

/// The table of BENCHMARKS.md, and below it what it comes to.
fn markdown(rows: &[RecordedRow]) -> String {
    let of_traces = rows.iter().filter(|row| row.experiment == NAME).map(|row| {
        let peer = row.peer_name.as_deref().zip(row.peer);
        (row.case.as_str(), (row.quinion, peer))
    });
    let mut lines = lines_of(of_traces);
    lines.retain(|line| line.ratios.first().is_some_and(|(name, _)| *name == OURS));
    let names = ["Linux", "S3-FIFO", "W-TinyLFU", "LIRS", "ARC", "LRU", "SIEVE"];
    let mut text = format!("| trace, cache | ours | {} | best online |\n|", names.join(" | "));
    text.push_str(&"---|".repeat(names.len() + 3));
    for line in &lines {
        let others = names.map(|name| line.of(name).map_or("-".to_owned(), |ratio| format!("{ratio:.1}")));
        let ours = line.of(OURS).unwrap_or(0.0);
        let best = match line.best_online() {
            Some((name, ratio)) if name != OURS => format!("{name} {ratio:.1}"),
            _ => "ours".to_owned(),
        };
        let ours =
            if line.behind() > POINTS_BEHIND_MAX { format!("{ours:.1}") } else { format!("**{ours:.1}**") };
        let _ = write!(text, "\n| {} | {ours} | {} | {best} |", line.case, others.join(" | "));
    }
    text.push_str("\n\n");
    text + &summary(&lines)
}

/// In words: the means, and in how many rows Quinion is near the best.
fn summary(lines: &[Line]) -> String {
    let near = lines.iter().filter(|line| line.behind() <= POINTS_BEHIND_MAX).count();
    let best = lines.iter().filter(|line| line.behind() <= 0.0).count();
    let mut means: Vec<(&str, f64)> = Vec::new();
    for (name, _) in lines.first().map_or(&[][..], |line| &line.ratios[..]) {
        let of: Vec<f64> = lines.iter().filter_map(|line| line.of(name)).collect();
        means.push((name, of.iter().sum::<f64>() / of.len() as f64));
    }
    let shown: Vec<String> = means.iter().map(|(name, mean)| format!("{name} {mean:.1}")).collect();
    format!(
        "Means over all {} rows: {}. Within {POINTS_BEHIND_MAX:.0} point of the best online policy: {near} rows \
         (bold); best of all: {best}.\n",
        lines.len(),
        shown.join(", ")
    )
}

/// The rows as a table for people; those that stand beside something else than policies come below it.
pub fn table(question: &str, rows: &[Row]) -> String {
    let lines = lines(rows);
    let is_ours = |line: &&Line| line.ratios.first().is_some_and(|(name, _)| *name == OURS);
    let mut text = format!("{question}\n  hit ratio in %; * is ours\n\n");
    let Some(first) = lines.iter().find(is_ours) else { return text };
    let names: Vec<&str> = first.ratios.iter().map(|(name, _)| *name).collect();
    let mut cells = vec![heading(&names)];
    cells.extend(lines.iter().filter(is_ours).map(|line| row_cells(line, &names)));
    write_aligned(&mut text, &cells);
    for line in lines.iter().filter(|line| !is_ours(line)) {
        let ratios: Vec<_> = line.ratios.iter().map(|(name, ratio)| format!("{name} {ratio:.2}")).collect();
        let _ = writeln!(text, "\n  {}: {}", line.case, ratios.join(", "));
    }
    text
}

fn heading(names: &[&str]) -> Vec<String> {
    let star = |name: &&str| if *name == OURS { format!("{name}*") } else { (*name).to_owned() };
    let mut cells = vec![String::new()];
    cells.extend(names.iter().map(star));
    cells.push("best online".to_owned());
    cells
}

fn row_cells(line: &Line, names: &[&str]) -> Vec<String> {
    let of = |name: &&str| line.of(name).map_or("-".to_owned(), |ratio| format!("{ratio:.1}"));
    let mut cells = vec![line.case.to_owned()];
    cells.extend(names.iter().map(of));
    cells.push(line.best_online().map_or(String::new(), |(name, ratio)| format!("{name} {ratio:.1}")));
    cells
}

/// The first and the last column begin, and the numbers end, below each other.
fn write_aligned(text: &mut String, lines: &[Vec<String>]) {
    let columns = lines[0].len();
    let width = |column: usize| lines.iter().map(|cells| cells[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for cells in lines {
        let mut line = format!("  {:width$}", cells[0], width = widths[0]);
        for column in 1..columns - 1 {
            let _ = write!(line, "  {:>width$}", cells[column], width = widths[column]);
        }
        let _ = write!(line, "  {}", cells[columns - 1]);
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(case: &str, quinion: f64, peer_name: &str, peer: f64) -> RecordedRow {
        RecordedRow {
            experiment: NAME.to_owned(),
            case: format!("{case}: {OURS}"),
            quinion: Some(quinion),
            peer: Some(peer),
            peer_name: Some(peer_name.to_owned()),
            ..RecordedRow::default()
        }
    }

    #[test]
    fn the_table_marks_rows_near_the_best_and_counts_them() {
        let rows = [
            row("a at 1 %", 40.0, "LRU", 30.0),
            row("a at 1 %", 40.0, "ARC", 40.9),
            row("b at 5 %", 10.0, "LRU", 11.1),
            row("b at 5 %", 10.0, "ARC", 5.0),
            row("b at 5 %", 10.0, OPTIMUM, 99.0),
            RecordedRow { experiment: "hit".to_owned(), ..row("c at 5 %", 1.0, "LRU", 2.0) },
        ];
        let text = replaced(&format!("x\n{BEGIN}earlier\n{END}\ny\n"), &rows).expect("the marks are there");
        assert!(text.starts_with("x\n") && text.ends_with("\ny\n") && !text.contains("earlier"), "{text}");
        assert!(text.contains("| a at 1 % | **40.0** |") && text.contains("| ARC 40.9 |"), "{text}");
        assert!(text.contains("| b at 5 % | 10.0 |") && text.contains("| LRU 11.1 |"), "{text}");
        assert!(text.contains("all 2 rows: quinion 25.0, LRU 20.6, ARC 22.9."), "{text}");
        assert!(text.contains("online policy: 1 rows (bold); best of all: 0."), "{text}");
        assert!(!text.contains("c at 5 %"), "{text}");
        assert_eq!(replaced(&text, &rows).as_deref(), Some(text.as_str()), "again it is the same");
        assert_eq!(replaced("nothing", &rows), None);
    }
}
