//! Imports: which file of a package names which other, and where that goes round in a circle.
//!
//! ```text
//!   use crate::arena::owner::Arena;     src/arena/guest.rs -> src/arena/owner.rs
//!   use super::shrink::Cost;            src/arena/guest.rs -> src/arena/shrink.rs
//!   super::MAX                          src/arena/guest.rs -> src/arena/mod.rs
//!   mod guest; use guest::Guests;       a folder's own file may name what is in the folder: not counted
//! ```
//!
//! Files in a circle can only be understood together, and none of them can be taken out. Not counted are: paths from a
//! module to its own children, as in the last line, since they begin with neither `crate` nor `super`; what is compiled
//! for tests alone; macros; and methods of a type that another file adds.

use std::collections::{BTreeMap, BTreeSet};

use super::source::Source;

/// A file as a path of modules below its package's `src`.
type Module = Vec<String>;

/// Files that name each other in a circle, each with a line on which it does so.
pub type Cycle = Vec<(String, usize)>;

pub fn cycles(root: &str, sources: &[Source]) -> Vec<Cycle> {
    let files: BTreeMap<Module, &Source> = sources
        .iter()
        .filter(|source| source.path.starts_with(root) && !source.is_test_file())
        .map(|source| (module_of(root, &source.path), source))
        .collect();
    let edges: BTreeMap<&Module, BTreeMap<&Module, usize>> =
        files.iter().map(|(module, source)| (module, named_by(module, source, &files))).collect();
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        edges.keys().map(|module| (*module, reached_from(module, &edges))).collect();
    let mut cycles = Vec::new();
    let mut seen = BTreeSet::new();
    for (module, beyond) in &reached {
        if !beyond.contains(module) || !seen.insert(*module) {
            continue;
        }
        let all: Vec<&Module> =
            beyond.iter().filter(|other| reached[*other].contains(module)).copied().collect();
        seen.extend(all.iter().copied());
        let line_of = |of: &Module| {
            let inside = edges[of].iter().find(|(to, _)| all.contains(to));
            inside.map_or(1, |(_, line)| *line)
        };
        cycles.push(all.iter().map(|of| (files[*of].path.clone(), line_of(of))).collect());
    }
    cycles
}

/// `quinion/src/arena/mod.rs` is `[arena]`, and `lib.rs` nothing.
fn module_of(root: &str, path: &str) -> Module {
    let inside = path.trim_start_matches(root).trim_end_matches(".rs");
    let mut module: Module = inside.split('/').map(str::to_owned).collect();
    if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        module.pop();
    }
    module
}

fn named_by<'a>(
    module: &Module,
    source: &Source,
    files: &'a BTreeMap<Module, &Source>,
) -> BTreeMap<&'a Module, usize> {
    let tests = source.test_ranges();
    let mut named = BTreeMap::new();
    for at in 0..source.tokens.len() {
        if tests.iter().any(|range| range.contains(&at)) {
            continue;
        }
        let Some((base, next)) = path_at(module, source, at) else { continue };
        for path in paths(source, next, base) {
            let found = (1..=path.len()).rev().find_map(|len| files.get_key_value(&path[..len]));
            if let Some((file, _)) = found.filter(|(file, _)| *file != module) {
                named.entry(file).or_insert(source.tokens[at].line);
            }
        }
    }
    named
}

/// If a path of this package begins at `at`: what it begins from, and the token after its first `::`.
fn path_at(module: &Module, source: &Source, at: usize) -> Option<(Module, usize)> {
    let goes_on = at > 0 && source.word(at - 1) == "::";
    if goes_on || source.word(at + 1) != "::" {
        return None;
    }
    match source.word(at) {
        "crate" => Some((Vec::new(), at + 2)),
        "super" => {
            let supers = (0..).take_while(|i| source.is_at(at + 2 * i, &["super", "::"])).count();
            Some((module[..module.len().saturating_sub(supers)].to_vec(), at + 2 * supers))
        }
        _ => None,
    }
}

/// All paths that a path from `at` on stands for: more than one where it has `{..}`.
fn paths(source: &Source, at: usize, base: Module) -> Vec<Module> {
    match source.word(at) {
        "{" => {
            let (end, mut found, mut inside) = (source.closing(at), Vec::new(), at + 1);
            while inside < end {
                found.extend(paths(source, inside, base.clone()));
                inside = after_member(source, inside, end);
            }
            found
        }
        word => {
            let mut path = base;
            path.push(word.to_owned());
            if source.word(at + 1) == "::" { paths(source, at + 2, path) } else { vec![path] }
        }
    }
}

/// Where the next member of a `{..}` begins that ends at `end`.
fn after_member(source: &Source, mut at: usize, end: usize) -> usize {
    while at < end {
        match source.word(at) {
            "{" => at = source.closing(at) + 1,
            "," => return at + 1,
            _ => at += 1,
        }
    }
    end
}

fn reached_from<'a>(
    module: &'a Module,
    edges: &BTreeMap<&'a Module, BTreeMap<&'a Module, usize>>,
) -> BTreeSet<&'a Module> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![module]);
    while let Some(next) = open.pop() {
        open.extend(edges[next].keys().copied().filter(|to| reached.insert(*to)));
    }
    reached
}
