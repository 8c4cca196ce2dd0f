//! Report: named values, printed for people or for programs.
//!
//! ```text
//!   text                                     json
//!   size          1.5 MiB (1572864 bytes)    {"size_bytes":1572864,
//!   kernel
//!     resident    50.0 % (192 of 384)          "kernel":{"resident":0.5000,..}}
//! ```
//!
//! A report is data; its users fill it. The names in JSON are a promise: they carry their unit and do not change their
//! meaning. All JSON that the command writes is written here.
//!
//! Invariant: text and JSON of one report say the same, and JSON is one line.

use std::fmt::{self, Write};

use quinion_size as size;

/// How a report is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum Form {
    /// Lines for people.
    #[default]
    Text,
    /// One line of JSON for programs.
    Json,
}

/// The value of one line of a report.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// A number of something.
    Number(u64),
    /// A number of bytes.
    Bytes(u64),
    /// `part` of `whole`; of nothing it is no number.
    Share {
        /// How many of them.
        part: u64,
        /// The whole, which `part` is of.
        whole: u64,
    },
    /// A measured number, of which four digits are printed; unknown if it is not finite.
    Real(f64),
    /// Yes or no.
    Truth(bool),
    /// A text.
    Text(String),
    /// Several of the same.
    List(Vec<Value>),
    /// Sentences: in text a line each.
    Lines(Vec<String>),
    /// A value that is not known.
    Unknown,
    /// Lines of its own.
    Group(Report),
}

/// Named values in the order in which they are printed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Report {
    lines: Vec<Line>,
}

#[derive(Clone, PartialEq, Debug)]
struct Line {
    key: &'static str,
    label: &'static str,
    value: Value,
}

impl Report {
    /// A report that says nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value: `key` names it in JSON, unit last, and `label` in text.
    pub fn add(&mut self, key: &'static str, label: &'static str, value: Value) -> &mut Self {
        debug_assert!(self.lines.iter().all(|line| line.key != key), "`{key}` is in the report twice");
        self.lines.push(Line { key, label, value });
        self
    }

    /// The report in `form`, with a newline at its end.
    pub fn printed(&self, form: Form) -> String {
        let mut printed = String::new();
        let result = match form {
            Form::Text => self.write_text(&mut printed, 0),
            Form::Json => self.write_json(&mut printed).and_then(|()| printed.write_char('\n')),
        };
        result.expect("a string takes all that is written");
        printed
    }

    fn label_width(&self, indent: usize) -> usize {
        let width = |line: &Line| match &line.value {
            Value::Group(group) => group.label_width(indent + INDENT),
            Value::List(values) if is_groups(values) => {
                groups(values).map(|group| group.label_width(indent + INDENT)).max().unwrap_or(0)
            }
            _ => indent + line.label.len(),
        };
        self.lines.iter().map(width).max().unwrap_or(0)
    }

    fn write_text(&self, out: &mut String, indent: usize) -> fmt::Result {
        let width = self.label_width(indent);
        self.write_lines(out, indent, width)
    }

    fn write_lines(&self, out: &mut String, indent: usize, width: usize) -> fmt::Result {
        for Line { label, value, .. } in &self.lines {
            let pad = width - indent;
            match value {
                Value::Group(group) => {
                    writeln!(out, "{:indent$}{label}", "")?;
                    group.write_lines(out, indent + INDENT, width)?;
                }
                Value::List(values) if is_groups(values) => {
                    for group in groups(values) {
                        writeln!(out, "{:indent$}{label}", "")?;
                        group.write_lines(out, indent + INDENT, width)?;
                    }
                }
                Value::Lines(lines) => {
                    for (number, line) in lines.iter().enumerate() {
                        let label = if number == 0 { label } else { "" };
                        writeln!(out, "{:indent$}{label:pad$}  {}", "", Shown(&Value::Text(line.clone())))?;
                    }
                }
                _ => writeln!(out, "{:indent$}{label:pad$}  {}", "", Shown(value))?,
            }
        }
        Ok(())
    }

    fn write_json(&self, out: &mut String) -> fmt::Result {
        out.write_char('{')?;
        for (number, Line { key, value, .. }) in self.lines.iter().enumerate() {
            if number > 0 {
                out.write_char(',')?;
            }
            write!(out, "\"{key}\":")?;
            write_json_value(out, value)?;
        }
        out.write_char('}')
    }
}

const INDENT: usize = 2;

/// Whether a list is one of groups.
fn is_groups(values: &[Value]) -> bool {
    !values.is_empty() && groups(values).count() == values.len()
}

fn groups(values: &[Value]) -> impl Iterator<Item = &Report> {
    values.iter().filter_map(|value| match value {
        Value::Group(group) => Some(group),
        _ => None,
    })
}

struct Shown<'a>(&'a Value);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Value::Number(number) => write!(f, "{number}"),
            Value::Bytes(bytes) if *bytes < 1 << 10 => write!(f, "{bytes} bytes"),
            Value::Bytes(bytes) => write!(f, "{} ({bytes} bytes)", size::shown(*bytes)),
            Value::Share { whole: 0, .. } => f.write_str("-"),
            Value::Share { part, whole } => {
                write!(f, "{:.1} % ({part} of {whole})", *part as f64 / *whole as f64 * 100.0)
            }
            Value::Truth(truth) => f.write_str(if *truth { "yes" } else { "no" }),
            // A control character in a file's name must not break the line.
            Value::Text(text) => text.chars().try_for_each(|c| match c.is_control() {
                true => write!(f, "{}", c.escape_default()),
                false => f.write_char(c),
            }),
            Value::Real(number) if number.is_finite() => f.write_str(&digits(*number)),
            Value::List(values) => values.iter().enumerate().try_for_each(|(number, value)| {
                write!(f, "{}{}", if number > 0 { ", " } else { "" }, Shown(value))
            }),
            Value::Unknown | Value::Real(_) => f.write_str("unknown"),
            Value::Lines(lines) => f.write_str(&lines.join("; ")),
            Value::Group(_) => Ok(()),
        }
    }
}

fn write_json_value(out: &mut String, value: &Value) -> fmt::Result {
    match value {
        Value::Number(number) | Value::Bytes(number) => write!(out, "{number}"),
        Value::Share { part, whole } if *whole > 0 => write!(out, "{:.4}", *part as f64 / *whole as f64),
        Value::Truth(truth) => write!(out, "{truth}"),
        Value::Text(text) => write_json_text(out, text),
        Value::Real(number) if number.is_finite() => out.write_str(&digits(*number)),
        Value::List(values) => write_json_list(out, values),
        Value::Lines(lines) => {
            write_json_list(out, &lines.iter().map(|line| Value::Text(line.clone())).collect::<Vec<_>>())
        }
        Value::Group(group) => group.write_json(out),
        Value::Unknown | Value::Share { .. } | Value::Real(_) => out.write_str("null"),
    }
}

fn write_json_list(out: &mut String, values: &[Value]) -> fmt::Result {
    out.write_char('[')?;
    for (number, value) in values.iter().enumerate() {
        if number > 0 {
            out.write_char(',')?;
        }
        write_json_value(out, value)?;
    }
    out.write_char(']')
}

/// A finite number with four digits that count, or all of those before its point.
pub fn digits(number: f64) -> String {
    let whole = if number == 0.0 { 1 } else { number.abs().log10().floor() as i32 + 1 };
    format!("{number:.*}", (4 - whole).clamp(0, 12) as usize)
}

fn write_json_text(out: &mut String, text: &str) -> fmt::Result {
    out.write_char('"')?;
    for character in text.chars() {
        match character {
            '"' | '\\' => write!(out, "\\{character}")?,
            character if character < ' ' => write!(out, "\\u{:04x}", u32::from(character))?,
            character => out.write_char(character)?,
        }
    }
    out.write_char('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Report {
        let mut kernel = Report::new();
        kernel.add("resident", "resident", Value::Share { part: 192, whole: 384 });
        kernel.add("dirty_pages", "dirty", Value::Unknown);
        let mut report = Report::new();
        report.add("file", "file", Value::Text("a \"b\"\n\\c".to_owned()));
        report.add("size_bytes", "size", Value::Bytes(3 << 19));
        report.add("kernel", "in the kernel's page cache", Value::Group(kernel));
        report.add("files", "files", Value::Number(3));
        report.add("hits", "hits", Value::Share { part: 0, whole: 0 });
        report.add("ns", "time", Value::List(vec![Value::Real(7.25), Value::Real(f64::NAN)]));
        report
    }

    #[test]
    fn text_is_aligned_and_keeps_its_lines() {
        let expected = "\
file        a \"b\"\\n\\c
size        1.5 MiB (1572864 bytes)
in the kernel's page cache
  resident  50.0 % (192 of 384)
  dirty     unknown
files       3
hits        -
time        7.250, unknown
";
        assert_eq!(sample().printed(Form::Text), expected);
    }

    #[test]
    fn json_is_one_line_with_everything_escaped() {
        let expected = "{\"file\":\"a \\\"b\\\"\\u000a\\\\c\",\"size_bytes\":1572864,\
                        \"kernel\":{\"resident\":0.5000,\"dirty_pages\":null},\"files\":3,\"hits\":null,\
                        \"ns\":[7.250,null]}\n";
        assert_eq!(sample().printed(Form::Json), expected);
    }

    #[test]
    fn groups_in_a_list_and_sentences_have_lines_of_their_own() {
        let group = |name: &str| {
            let mut group = Report::new();
            group.add("name", "name", Value::Text(name.into()));
            Value::Group(group)
        };
        let mut report = Report::new();
        report.add("things", "thing", Value::List(vec![group("a"), group("b")]));
        report.add("says", "says", Value::Lines(vec!["one.".into(), "two.".into()]));
        let text = "thing\n  name  a\nthing\n  name  b\nsays    one.\n        two.\n";
        assert_eq!(report.printed(Form::Text), text);
        let json = "{\"things\":[{\"name\":\"a\"},{\"name\":\"b\"}],\"says\":[\"one.\",\"two.\"]}\n";
        assert_eq!(report.printed(Form::Json), json);
    }

    #[test]
    fn four_digits_count() {
        let shown = [0.0, 7.25, 31.0, 123456.7, 0.001234567, -2.0].map(digits);
        assert_eq!(shown, ["0.000", "7.250", "31.00", "123457", "0.001235", "-2.000"]);
    }

    #[test]
    fn an_empty_report_is_nothing_or_an_empty_object() {
        assert_eq!(Report::new().printed(Form::Text), "");
        assert_eq!(Report::new().printed(Form::Json), "{}\n");
    }
}
