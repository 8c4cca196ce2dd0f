//! Names: that each item's documentation names the item, and that a type's name means one type.
//!
//! ```text
//!   opening     "It ..", "The same ..", "None ..": the line does not say of which item it is
//!   two types   one package has two types of one name, each in a module of its own
//!   hidden      an item is public and hidden, and not of the one module that tests come in by
//! ```
//!
//! A list of items shows the first line of each alone: rustdoc, an editor's popup, a search.

use std::collections::BTreeMap;

use super::prose::Fault;
use super::source::Source;

/// Words that stand for a subject which another line names.
const OPENINGS: &[&str] = &[
    "All of them",
    "Both",
    "Else",
    "Is",
    "It",
    "Its",
    "None",
    "Nothing",
    "Of",
    "Others",
    "Same",
    "So",
    "Some",
    "Such",
    "That",
    "The same",
    "Their",
    "Them",
    "Then",
    "These",
    "They",
    "This",
    "Those",
];

/// Names that say what a type is inside its module, and nothing else: the part that threads share, the state under a
/// lock, a command's arguments.
const OF_A_MODULE: [&str; 3] = ["Arguments", "Shared", "State"];

/// Items whose documentation opens with a word for something else.
pub fn check_openings(text: &str) -> Vec<Fault> {
    let doc = |line: &'_ str| line.trim_start().strip_prefix("/// ").map(|doc| line.len() - doc.len());
    let (mut faults, mut was_doc) = (Vec::new(), false);
    for (at, line) in text.lines().enumerate() {
        let first = doc(line).filter(|_| !was_doc).map(|start| &line[start..]);
        was_doc = line.trim_start().starts_with("///");
        let opens = |first: &&str| {
            let is_one = |opening: &&str| {
                let rest = first.strip_prefix(*opening);
                rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '-'))
            };
            OPENINGS.iter().any(is_one)
        };
        faults.extend(first.filter(opens).map(|first| Fault {
            line: at + 1,
            wrong: format!("a doc comment whose first line names no subject: `{first}`"),
            remedy: "say of what it is, so that the line is understood alone",
        }));
    }
    faults
}

/// Public items that documentation hides, but for the module `internals` of a library.
pub fn check_hidden(text: &str) -> Vec<Fault> {
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let is_attribute = |line: &&&str| line.starts_with("#[");
    let hidden = |at: &usize| {
        let item = lines[at + 1..].iter().find(|line| !is_attribute(line)).unwrap_or(&"");
        lines[*at].starts_with("#[doc(hidden)") && !item.starts_with("pub mod internals")
    };
    let fault = |at: usize| Fault {
        line: at + 1,
        wrong: "a hidden item beside the gateway".to_owned(),
        remedy: "make it `pub(crate)`, and let `internals` have it if other crates want it",
    };
    (0..lines.len()).filter(hidden).map(fault).collect()
}

/// Names that two types of one package have: each with the places, as `path:line`.
pub fn names_of_two<'s>(sources: impl Iterator<Item = &'s Source>) -> Vec<(String, Vec<String>)> {
    let mut places: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for source in sources.filter(|source| !source.is_test_file()) {
        let tests = source.test_ranges();
        let defines = |at: &usize| {
            matches!(source.word(*at), "struct" | "enum" | "trait" | "union")
                && source.word(at + 1).starts_with(|c: char| c.is_ascii_uppercase())
                && !tests.iter().any(|test| test.contains(at))
        };
        for at in (0..source.tokens.len()).filter(defines) {
            let place = format!("{}:{}", source.path, source.tokens[at].line);
            places.entry(source.word(at + 1)).or_default().push(place);
        }
    }
    let is_of_two = |(name, places): &(&str, Vec<String>)| places.len() > 1 && !OF_A_MODULE.contains(name);
    places.into_iter().filter(is_of_two).map(|(name, places)| (name.to_owned(), places)).collect()
}
