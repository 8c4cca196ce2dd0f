//! Instructions: the hot paths take no more of them than was recorded.
//!
//! ```text
//!   cargo xtask test instructions   counts, compares with xtask/instructions.txt: above +2 % it fails
//!   cargo xtask record              counts, and writes that file anew
//! ```
//!
//! `quinion-bench --count` counts them under callgrind, which does not depend on how busy the machine is, so that the
//! smallest runner of continuous integration will do. It does depend on the compiler: with another than the recorded
//! one the step is skipped and says so.
//!
//! A count that fell by more is no failure, but the record should follow it: a gain can otherwise be lost again
//! unnoticed.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::step::{Action, Failure, Step};
use crate::tools::{cargo, repository, rustc_line};

/// A count may grow by this share of the recorded one.
const TOLERANCE: f64 = 0.02;

const HEAD: &str = "\
# Instructions and branches of one operation on the hot paths, as callgrind counts them.
# `cargo xtask record` writes this file; `cargo xtask test instructions` compares with it.
# They are those of this compiler on x86-64 with AVX2:
";

#[derive(Clone, PartialEq, Debug)]
struct Counted {
    name: String,
    instructions: f64,
    branches: f64,
}

#[derive(Clone, PartialEq, Debug)]
struct Record {
    compiler: String,
    counts: Vec<Counted>,
}

impl Record {
    /// Parses the output of `quinion-bench --count`, or the file: the compiler, then a line for each count.
    fn parse(text: &str) -> Result<Self, Failure> {
        let mut lines = text.lines().filter(|line| !line.starts_with('#'));
        let compiler = lines.next().map(|line| first_words(line, 2)).unwrap_or_default();
        let counts = lines.map(Counted::parse).collect::<Result<Vec<_>, _>>()?;
        if counts.is_empty() {
            return Err(Failure::new("there are no counts"));
        }
        Ok(Self { compiler, counts })
    }

    fn shown(&self) -> String {
        let line =
            |count: &Counted| format!("{:8.1} {:8.1}  {}\n", count.instructions, count.branches, count.name);
        format!("{HEAD}{}\n{}", self.compiler, self.counts.iter().map(line).collect::<String>())
    }
}

impl Counted {
    fn parse(line: &str) -> Result<Self, Failure> {
        let mut words = line.split_whitespace();
        let mut number = || words.next().and_then(|word| word.parse::<f64>().ok());
        match (number(), number()) {
            (Some(instructions), Some(branches)) => {
                let name = words.collect::<Vec<_>>().join(" ");
                Ok(Self { name, instructions, branches })
            }
            _ => Err(Failure::new(format!("`{line}` is not a count: instructions, branches, name"))),
        }
    }
}

fn first_words(line: &str, words: usize) -> String {
    line.split_whitespace().take(words).collect::<Vec<_>>().join(" ")
}

pub fn step() -> Step {
    let step = |action| Step::new("instructions", action);
    let recorded = match recorded() {
        Ok(record) => record.compiler,
        Err(failure) => return step(Action::Fail(failure)),
    };
    let ours = rustc_line("--version", "").map(|line| first_words(&line, 2)).unwrap_or_default();
    if ours == recorded {
        return step(Action::Call(compare));
    }
    step(Action::Skip(format!("counts were recorded with {recorded}, and this is {ours}")))
}

pub fn record() -> Result<(), Failure> {
    let record = counted()?;
    fs::write(file(), record.shown())
        .map_err(|error| Failure::new(format!("{} cannot be written: {error}", file().display())))?;
    print!("{}", record.shown());
    Ok(())
}

fn compare() -> Result<(), Failure> {
    let (recorded, now) = (recorded()?, counted()?);
    let comparison = compare_counts(&recorded.counts, &now.counts);
    for line in &comparison.lines {
        println!("{line}");
    }
    if comparison.wrong.is_empty() {
        return Ok(());
    }
    let wrong = comparison.wrong.join(", ");
    Err(Failure::new(format!(
        "{wrong}; find out why, or, if it is meant, `cargo xtask record` and say why in the commit"
    )))
}

struct Comparison {
    lines: Vec<String>,
    wrong: Vec<String>,
}

fn compare_counts(recorded: &[Counted], now: &[Counted]) -> Comparison {
    let mut comparison = Comparison { lines: Vec::new(), wrong: Vec::new() };
    for before in recorded {
        let Some(after) = now.iter().find(|count| count.name == before.name) else {
            comparison.wrong.push(format!("`{}` is recorded and was not counted", before.name));
            continue;
        };
        let change = after.instructions / before.instructions - 1.0;
        let remark = if change < -TOLERANCE { "  fell: `cargo xtask record` keeps it" } else { "" };
        let (was, is, percent) = (before.instructions, after.instructions, change * 100.0);
        comparison.lines.push(format!("{:<26} {was:8.1} -> {is:8.1}  {percent:+6.2} %{remark}", before.name));
        if change > TOLERANCE {
            comparison.wrong.push(format!("`{}` takes {is:.1} instructions, {percent:+.2} %", before.name));
        }
    }
    for new in now.iter().filter(|new| recorded.iter().all(|old| old.name != new.name)) {
        comparison.wrong.push(format!("`{}` is counted and not recorded", new.name));
    }
    comparison
}

fn file() -> PathBuf {
    repository().join("xtask/instructions.txt")
}

fn recorded() -> Result<Record, Failure> {
    let text = fs::read_to_string(file())
        .map_err(|error| Failure::new(format!("{} cannot be read: {error}", file().display())))?;
    Record::parse(&text)
}

fn counted() -> Result<Record, Failure> {
    let mut command: Command = cargo("run --quiet --release -p quinion-bench -- --count");
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| Failure::new(format!("it cannot be started: {error}")))?;
    if !output.status.success() {
        return Err(Failure::new(format!("`quinion-bench --count` ended with {}", output.status)));
    }
    Record::parse(&String::from_utf8_lossy(&output.stdout))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(name: &str, instructions: f64) -> Counted {
        Counted { name: name.to_owned(), instructions, branches: 1.0 }
    }

    #[test]
    fn recorded_counts_are_read_back() {
        let record = Record { compiler: "rustc 1.95.0".to_owned(), counts: vec![count("hit 64 B", 235.0)] };
        assert_eq!(Record::parse(&record.shown()).unwrap(), record);
        let printed = "rustc 1.95.0 (59807616e 2026-04-14)\n   235.0      1.0  hit 64 B\n";
        assert_eq!(Record::parse(printed).unwrap(), record);
        assert!(Record::parse("rustc 1.95.0\n").is_err());
        assert!(Record::parse("rustc 1.95.0\nmany hit\n").is_err());
    }

    #[test]
    fn more_than_a_little_more_is_wrong() {
        let before = [count("a", 100.0), count("b", 100.0), count("c", 100.0)];
        let after = [count("a", 101.9), count("b", 102.1), count("c", 50.0)];
        let comparison = compare_counts(&before, &after);
        assert_eq!(comparison.wrong, ["`b` takes 102.1 instructions, +2.10 %"]);
        assert!(comparison.lines[2].ends_with("keeps it"), "{:?}", comparison.lines);
    }

    #[test]
    fn a_count_on_one_side_only_is_wrong() {
        let comparison = compare_counts(&[count("a", 1.0)], &[count("b", 1.0)]);
        assert_eq!(comparison.wrong.len(), 2, "{:?}", comparison.wrong);
    }
}
