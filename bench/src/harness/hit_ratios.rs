//! Hit ratios: the rows of an experiment on traces as a table, traces and sizes down and policies across.
//!
//! ```text
//!   hit ratio, %            quinion*   Linux   S3-FIFO   ..   optimum   best online
//!   OLTP at 1 %                46.5     43.5      46.5   ..      59.8   S3-FIFO 46.5
//! ```
//!
//! It has what the rows have. The star marks Quinion, and the last column is what comes nearest to the optimum without
//! knowledge of later references.

use std::fmt::Write;

use super::rows::Row;

/// The name of an experiment whose rows are shown so.
pub const NAME: &str = "ratio";
pub const OURS: &str = "quinion";
/// The bound on every policy.
pub const OPTIMUM: &str = "optimum";
/// Between a trace's name and its size, in a case's name.
pub const AT: &str = " at ";

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

    fn best_online(&self) -> Option<(&'a str, f64)> {
        let online = self.ratios.iter().filter(|(name, _)| *name != OPTIMUM);
        // The first of equals, which is Quinion's if it is among them.
        online.copied().reduce(|best, other| if other.1 > best.1 { other } else { best })
    }
}

pub fn lines(rows: &[Row]) -> Vec<Line<'_>> {
    let mut lines: Vec<Line> = Vec::new();
    for row in rows {
        let Some((case, ours)) = row.case.rsplit_once(": ") else { continue };
        if lines.last().is_none_or(|line| line.case != case) {
            lines.push(Line { case, ratios: row.quinion.map(|ratio| (ours, ratio)).into_iter().collect() });
        }
        let line = lines.last_mut().expect("one was put there");
        line.ratios.extend(row.peer_name.zip(row.peer));
    }
    lines
}

/// The rows as a table for people; those that stand beside something else than policies come below it.
pub fn table(question: &str, rows: &[Row]) -> String {
    let lines = lines(rows);
    let is_ours = |line: &&Line| line.ratios.first().is_some_and(|(name, _)| *name == OURS);
    let mut text = format!("{question}\n  hit ratio in %; * is ours\n\n");
    let Some(first) = lines.iter().find(is_ours) else { return text };
    let names: Vec<&str> = first.ratios.iter().map(|(name, _)| *name).collect();
    let mut cells = vec![heading(&names)];
    cells.extend(lines.iter().filter(is_ours).map(|line| told(line, &names)));
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

fn told(line: &Line, names: &[&str]) -> Vec<String> {
    let of = |name: &&str| {
        let found = line.ratios.iter().find(|(other, _)| other == name);
        found.map_or("-".to_owned(), |(_, ratio)| format!("{ratio:.1}"))
    };
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
