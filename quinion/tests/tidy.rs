//! Tidy: the habits of this repository, as a test.
//!
//! Each rule is a pure function from the text of a file to complaints, and a
//! complaint says where, what is wrong and what to do. The rules run over the
//! repository below, and over small wrong texts at the end of this file, so
//! that a rule which has gone blind fails too.
//!
//! ```text
//!   layers      a module names only modules that lib.rs declares before it
//!   imports     no files of a package name each other in a circle
//!   essays      every file opens by saying what it is
//!   unsafe      only in the named files, each block with its argument
//!   orderings   each one stronger than Relaxed names the site it works with
//!   text        line length, tabs, trailing blanks, ASCII, words and paths that do not belong here
//!   ratchet     long functions do not become more, nor long lists of parameters, and tuples among them, nor the
//!               share of comments in a package's lines
//!   names       a lettered test name is given once; a test's name has a subject; a type, a variant of an enum and an
//!               alias have names of the field; one name is one type in a package
//!   openings    the first line of an item's documentation names its subject
//!   statements  the comment of a lettered test begins with its letter and the statement that it tests
//!   subjects    no clause "who ..." without its noun, in comments, behind code and in tables; in the product and in
//!               its documents no sentence begins with such a "What"
//!   prose       a comment names the one that acts, in plain words and sentences that end; messages and helps of the
//!               product have the same words
//!   readme      its example is the example that is compiled; it is short, and its lines are
//!   tables      ARCHITECTURE.md lists the modules and the lock order there are
//!   orphans     every file of the library is some module's
//! ```
//!
//! Not a rule: anything that rustfmt or clippy already says.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

#[path = "tidy/comments.rs"]
mod comments;
#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/names.rs"]
mod names;
#[path = "tidy/prose.rs"]
mod prose;
#[path = "tidy/signatures.rs"]
mod signatures;
#[path = "tidy/source.rs"]
mod source;
use source::Source;

/// Functions longer than [`FUNCTION_LINES_MAX`] that the repository has. It may only fall.
const LONG_FUNCTIONS_MAX: usize = 0;
const FUNCTION_LINES_MAX: usize = 70;
/// A function with as many parameters, `self` included, is counted in [`PACKAGES`].
const PARAMETERS_MANY: usize = 5;
const LINE_CHARACTERS_MAX: usize = 120;
/// Lines above an ordering or an unsafe block in which its comment is looked for.
const COMMENT_REACH: usize = 6;
const ESSAY_LINES_MIN: usize = 3;
const WORDS_MAX: usize = 40;
const README_LINES_MAX: usize = 150;
/// The `mod.rs` of a module explains the module.
const MODULE_ESSAY_LINES_MIN: usize = 10;

/// Where `unsafe` may stand: files, and folders with all that is in them.
const UNSAFE_FILES: &[&str] = &[
    "quinion/src/sys/",
    "quinion/src/arena/",
    "quinion/src/folio/",
    "quinion/src/backend/",
    "quinion/src/spill/transfer.rs",
    "quinion/src/reclaim/spill.rs",
    "quinion/src/writeback/run.rs",
    "quinion/src/filemap/spill_in.rs",
    "quinion/src/filemap/fill.rs",
    "quinion/src/filemap/write.rs",
    "quinion/src/guest.rs",
    "owner/src/sys/death_notice.rs",
    "owner/src/viewer/",
    "owner/tests/",
    "owner/benches/",
    "quinion/tests/",
    "quinion/benches/",
    "frontends/capi/",
    "frontends/preload/",
    "frontends/python/src/memory.rs",
    "frontends/sqlite/",
    "frontends/cli/src/sys.rs",
    "frontends/cli/src/sys/",
    "bench/src/sys/",
    "bench/tests/",
    "run/src/keep/sys.rs",
    "run/src/signals.rs",
    "frontends/cli/tests/",
    "fuzz/fuzz_targets/capi_ops.rs",
    "fuzz/fuzz_targets/serve.rs",
    "service/src/pin.rs",
    "frontends/serve/src/activation.rs",
    "service/tests/",
    "testing/src/",
    "view/src/arena/",
    "view/src/folio/",
    "view/src/hit/",
    "view/src/viewer/",
    "vm/src/uffd.rs",
    "vm/tests/",
];

/// The documents of the product beside the guides in `docs`.
const DOCUMENTS: [&str; 5] =
    ["README.md", "ARCHITECTURE.md", "BENCHMARKS.md", "CONTRIBUTING.md", "SECURITY.md"];

#[derive(Clone, PartialEq, Eq)]
struct Complaint {
    place: String,
    line: usize,
    wrong: String,
    remedy: &'static str,
}

impl fmt::Debug for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}; {}", self.place, self.line, self.wrong, self.remedy)
    }
}

fn complaint(source: &Source, line: usize, wrong: String, remedy: &'static str) -> Complaint {
    Complaint { place: source.path.clone(), line, wrong, remedy }
}

/// The modules of the library from the ground up, and which of them each name at the crate's root is of.
struct Layers {
    modules: Vec<String>,
    exports: BTreeMap<String, String>,
}

impl Layers {
    fn of(lib: &Source) -> Self {
        let modules =
            (0..lib.tokens.len()).filter_map(|at| declared_at(lib, at)).map(str::to_owned).collect();
        let mut layers = Self { modules, exports: BTreeMap::new() };
        for at in (0..lib.tokens.len()).filter(|&at| lib.word(at) == "use") {
            layers.note_exports(lib, at + 1);
        }
        layers
    }

    /// Notes what one `use` of lib.rs brings to the root: `use crate::error::{Error, Kind as ErrorKind};`
    fn note_exports(&mut self, lib: &Source, at: usize) {
        let words: Vec<&str> =
            (at..).map(|at| lib.word(at)).take_while(|word| !matches!(*word, ";" | "")).collect();
        let Some(module) = words.iter().find(|word| self.height(word).is_some()) else { return };
        for (i, word) in words.iter().enumerate() {
            let is_leaf = is_name(word) && words.get(i + 1) != Some(&"::") && word != module;
            if is_leaf {
                self.exports.insert((*word).to_owned(), (*module).to_owned());
            }
        }
    }

    fn height(&self, module: &str) -> Option<usize> {
        self.modules.iter().position(|name| name == module)
    }

    /// The height of what `name` is at the crate's root.
    fn height_of_root_name(&self, name: &str) -> Option<usize> {
        self.height(name).or_else(|| self.height(self.exports.get(name)?))
    }
}

/// The module that lib.rs declares at `at`: one of its own, or one of the crate below that it shows as its own.
fn declared_at(lib: &Source, at: usize) -> Option<&str> {
    let name = match lib.word(at) {
        "mod" => at + 1,
        "use" if lib.is_at(at + 1, &["quinion_view", "::"]) => at + 3,
        _ => return None,
    };
    (lib.word(name + 1) == ";").then(|| lib.word(name))
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// A name at the crate's root that a file uses, and where.
#[derive(PartialEq, Eq, Debug)]
struct RootName {
    name: String,
    line: usize,
}

/// The libraries that have layers: their packages' folders.
const LAYERED: [&str; 4] = ["quinion", "view", "owner", "frontends/preload"];

/// The module path of a file of a library: `view/src/arena/view.rs` is `["arena", "view"]`.
fn module_path(path: &str) -> Vec<String> {
    let inside = path.split_once("/src/").map_or(path, |(_, inside)| inside).trim_end_matches(".rs");
    let inside = inside.trim_end_matches("/mod");
    inside.split('/').map(str::to_owned).collect()
}

/// All that a file, outside its tests, names at the crate's root by `crate::` or by enough `super::`.
fn root_names(source: &Source) -> Vec<RootName> {
    let tests = source.test_ranges();
    let mut names = Vec::new();
    let mut depth = module_path(&source.path).len();
    let mut modules_end = Vec::new();
    for at in 0..source.tokens.len() {
        if source.word(at) == "mod" && source.word(at + 2) == "{" {
            modules_end.push(source.closing(at + 2));
            depth += 1;
        }
        depth -= modules_end.iter().filter(|end| **end == at).count();
        if tests.iter().any(|range| range.contains(&at)) {
            continue;
        }
        if let Some(head) = root_path_at(source, at, depth) {
            names.extend(heads(source, head));
        }
    }
    names
}

/// If a path that leads to the crate's root begins at `at`, where it goes on from there.
fn root_path_at(source: &Source, at: usize, depth: usize) -> Option<usize> {
    if source.is_at(at, &["crate", "::"]) {
        return Some(at + 2);
    }
    let begins = source.word(at) == "super" && !(at >= 2 && source.is_at(at - 2, &["super", "::"]));
    if !begins {
        return None;
    }
    let supers = (0..).take_while(|i| source.is_at(at + 2 * i, &["super", "::"])).count();
    (supers >= depth).then_some(at + 2 * supers)
}

/// The first names of what stands at `at`: one, or one for each member of a `{..}`.
fn heads(source: &Source, at: usize) -> Vec<RootName> {
    let name_at = |at: usize| RootName { name: source.word(at).to_owned(), line: source.tokens[at].line };
    if source.word(at) != "{" {
        let is_macro = source.word(at + 1) == "!";
        return if is_macro { Vec::new() } else { vec![name_at(at)] };
    }
    let (end, mut names, mut depth) = (source.closing(at), Vec::new(), 0);
    for inside in at + 1..end {
        match source.word(inside) {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ if depth == 0 && matches!(source.word(inside - 1), "{" | ",") => names.push(name_at(inside)),
            _ => {}
        }
    }
    names
}

fn check_layers(layers: &Layers, source: &Source) -> Vec<Complaint> {
    if source.path.ends_with("/src/lib.rs") || source.is_test_file() {
        return Vec::new();
    }
    let module = module_path(&source.path).remove(0);
    let Some(own) = layers.height(&module) else {
        let wrong = format!("lib.rs declares no module `{module}`");
        return vec![complaint(source, 1, wrong, "declare it there, in its layer")];
    };
    let mut complaints = Vec::new();
    for RootName { name, line } in root_names(source) {
        match layers.height_of_root_name(&name) {
            Some(height) if height <= own => {}
            Some(height) => complaints.push(complaint(
                source,
                line,
                format!("`{module}` names `{name}`, of the layer `{}` above it", layers.modules[height]),
                "hand it down as a trait or an argument, or move the code up; calls go down only",
            )),
            None => complaints.push(complaint(
                source,
                line,
                format!("`{name}` is not a module of lib.rs nor exported there by name"),
                "name the module it is in, so that its layer can be seen",
            )),
        }
    }
    complaints
}

/// Counts of a package that may only fall.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Ratchet {
    /// Functions of [`PARAMETERS_MANY`] parameters or more.
    many: usize,
    /// Parameters that are tuples.
    tuples: usize,
}

#[derive(Clone, Copy, Debug)]
struct Package {
    /// The folder of its sources.
    root: &'static str,
    known: Ratchet,
    /// The most lines in a hundred that may be comments.
    comments_max: usize,
}

/// The packages, with their recorded counts, to be lowered when one falls.
const PACKAGES: [Package; 20] = [
    Package { root: "quinion/src/", known: Ratchet { many: 66, tuples: 0 }, comments_max: 19 },
    Package { root: "owner/src/", known: Ratchet { many: 3, tuples: 0 }, comments_max: 17 },
    Package { root: "disk/src/", known: Ratchet { many: 1, tuples: 0 }, comments_max: 15 },
    Package { root: "frontends/capi/src/", known: Ratchet { many: 1, tuples: 0 }, comments_max: 25 },
    Package { root: "frontends/cli/src/", known: Ratchet { many: 1, tuples: 0 }, comments_max: 14 },
    Package { root: "frontends/s3/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 12 },
    Package { root: "frontends/serve/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 15 },
    Package { root: "frontends/python/src/", known: Ratchet { many: 4, tuples: 5 }, comments_max: 13 },
    Package { root: "frontends/preload/src/", known: Ratchet { many: 7, tuples: 0 }, comments_max: 19 },
    Package { root: "frontends/sqlite/src/", known: Ratchet { many: 2, tuples: 1 }, comments_max: 20 },
    Package { root: "bench/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 11 },
    Package { root: "object/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 18 },
    Package { root: "run/src/", known: Ratchet { many: 6, tuples: 0 }, comments_max: 15 },
    Package { root: "service/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 18 },
    Package { root: "size/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 11 },
    Package { root: "testing/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 13 },
    Package { root: "testing/s3/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 15 },
    Package { root: "view/src/", known: Ratchet { many: 11, tuples: 4 }, comments_max: 26 },
    Package { root: "vm/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 16 },
    Package { root: "xtask/src/", known: Ratchet { many: 0, tuples: 0 }, comments_max: 9 },
];

/// Complaints if the share of comments in a package's lines is above its ceiling, or so far below it that the ceiling
/// has to follow.
fn check_comment_share(package: Package, sources: &[Source]) -> Option<String> {
    let Package { root, comments_max, .. } = package;
    let share = comments::share(sources.iter().filter(|source| source.path.starts_with(root)));
    if share > comments_max {
        return Some(format!(
            "{share} % of the lines in {root} are comments, more than {comments_max} %; delete those that repeat \
             the code, and move history to the commit"
        ));
    }
    let is_low = share + comments::SLACK < comments_max;
    is_low.then(|| format!("{share} % of the lines in {root} are comments; lower its `comments_max`"))
}

fn measure<'s>(sources: impl Iterator<Item = &'s Source>) -> Ratchet {
    let mut found = Ratchet::default();
    for source in sources {
        let signatures = signatures::signatures(source);
        found.many += signatures.iter().filter(|signature| signature.parameters >= PARAMETERS_MANY).count();
        found.tuples += signatures.iter().map(|signature| signature.tuples).sum::<usize>();
    }
    found
}

fn check_imports(root: &str, sources: &[Source]) -> Vec<Complaint> {
    let told = |cycle: imports::Cycle| {
        let (path, line) = &cycle[0];
        let names: Vec<String> = cycle.iter().map(|(path, line)| format!("{path}:{line}")).collect();
        Complaint {
            place: path.clone(),
            line: *line,
            wrong: format!("{} files name each other in a circle: {}", cycle.len(), names.join(", ")),
            remedy: "put what several of them need into a file below them",
        }
    };
    imports::cycles(root, sources).into_iter().map(told).collect()
}

fn check_orphans(library: &[Source]) -> Vec<Complaint> {
    let is_root = |source: &Source| source.path.ends_with("/src/lib.rs");
    let declares = |parent: &[String], child: &str| {
        library.iter().any(|source| {
            let is_parent =
                if is_root(source) { parent.is_empty() } else { module_path(&source.path) == parent };
            is_parent && (0..source.tokens.len()).any(|at| source.is_at(at, &["mod", child, ";"]))
        })
    };
    let mut complaints = Vec::new();
    for source in library.iter().filter(|source| !is_root(source)) {
        let path = module_path(&source.path);
        let (child, parent) = path.split_last().expect("a file has a name");
        if !declares(parent, child) {
            let wrong = format!("no `mod {child};` leads to this file");
            complaints.push(complaint(source, 1, wrong, "declare it or delete it"));
        }
    }
    complaints
}

// What a file says of itself.

fn check_essay(source: &Source) -> Vec<Complaint> {
    // What says whether a file is compiled at all may stand before it.
    let essay = source.text.lines().skip_while(|line| line.starts_with("#!["));
    let lines = essay.take_while(|line| line.starts_with("//!")).count();
    let is_of_library = LAYERED.iter().any(|package| source.path.starts_with(&format!("{package}/src/")));
    let is_module_root = is_of_library && source.path.ends_with("/mod.rs");
    let min = if is_module_root {
        MODULE_ESSAY_LINES_MIN
    } else if source.path.contains("/examples/") {
        1
    } else {
        ESSAY_LINES_MIN
    };
    if lines >= min {
        return Vec::new();
    }
    let wrong = format!("the file opens with {lines} lines of `//!`, fewer than {min}");
    let remedy =
        "say the idea, draw it, number the invariants and name what is not one (see CONTRIBUTING.md)";
    vec![complaint(source, 1, wrong, remedy)]
}

/// An essay that begins with a name begins with that of its file: `//! Death notice: ...` in `death_notice.rs`.
fn check_title(source: &Source) -> Vec<Complaint> {
    let path: Vec<_> = source.path.trim_end_matches(".rs").split('/').collect();
    let [.., folder, stem] = path[..] else { return Vec::new() };
    let name = if stem == "mod" { folder } else { stem };
    let line = source.text.lines().find_map(|line| line.strip_prefix("//! ")).unwrap_or("");
    let Some((title, _)) = line.split_once(':') else { return Vec::new() };
    let is_sentence = title.starts_with(['`', '[']) || title.starts_with("The ") || title.starts_with("A ");
    if !source.path.contains("/src/")
        || source.is_test_file()
        || is_sentence
        || matches!(name, "lib" | "main")
    {
        return Vec::new();
    }
    let begin = |word: &str| word.chars().take(3).collect::<String>().to_lowercase();
    let words: Vec<_> = title.split([' ', '-', '_']).map(begin).collect();
    if name.split('_').any(|part| words.contains(&begin(part))) {
        return Vec::new();
    }
    let wrong = format!("the essay begins with `{title}`, and the file is named `{name}`");
    vec![complaint(source, 1, wrong, "begin with the file's name, or rename the file")]
}

fn may_hold_unsafe(path: &str) -> bool {
    UNSAFE_FILES.iter().any(|file| path == *file || (file.ends_with('/') && path.starts_with(file)))
}

fn check_unsafe(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for at in (0..source.tokens.len()).filter(|&at| source.word(at) == "unsafe") {
        let line = source.tokens[at].line;
        if !may_hold_unsafe(&source.path) {
            let wrong = "unsafe code outside the named files".to_owned();
            let remedy =
                "use a safe function of sys, arena, folio or backend, or argue for a new entry in tidy.rs";
            complaints.push(complaint(source, line, wrong, remedy));
        }
        let needs_argument = matches!(source.word(at + 1), "{" | "impl");
        if needs_argument && !source.has_comment_near(line, COMMENT_REACH, "SAFETY:") {
            let wrong = format!("`unsafe {}` without a SAFETY comment above it", source.word(at + 1));
            complaints.push(complaint(
                source,
                line,
                wrong,
                "argue why it is sound, in a `// SAFETY:` comment",
            ));
        }
    }
    complaints
}

/// What a comment on an ordering says: its partner, or that the file's essay has all pairs.
const PARTNER_WORDS: &[&str] = &["partner", "the head of this file", "the head of the file"];

/// An ordering stronger than Relaxed names its partner.
fn check_orderings(source: &Source) -> Vec<Complaint> {
    let tests = source.test_ranges();
    let mut complaints = Vec::new();
    for at in 0..source.tokens.len() {
        let is_strong = source.is_at(at, &["Ordering", "::"])
            && matches!(source.word(at + 2), "Acquire" | "Release" | "AcqRel" | "SeqCst" | "{" | "*");
        if !is_strong || source.is_test_file() || tests.iter().any(|range| range.contains(&at)) {
            continue;
        }
        let line = source.tokens[at].line;
        if matches!(source.word(at + 2), "{" | "*") {
            let wrong = "orderings imported by name".to_owned();
            complaints.push(complaint(
                source,
                line,
                wrong,
                "write `Ordering::` at each use, where a search finds it",
            ));
        } else if !PARTNER_WORDS.iter().any(|word| source.has_comment_near(line, COMMENT_REACH, word)) {
            let wrong = format!("`Ordering::{}` without a partner", source.word(at + 2));
            let remedy = "say in a comment above which site it works with: `// Acquire, partner: ...`, \
                          or `see the head of this file` if all pairs are told there";
            complaints.push(complaint(source, line, wrong, remedy));
        }
    }
    complaints
}

fn check_lines(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for (number, line) in source.text.lines().enumerate() {
        let mut wrong = |wrong: String, remedy| complaints.push(complaint(source, number + 1, wrong, remedy));
        let characters = line.chars().count();
        // A row of a table cannot be broken.
        let is_table = line.trim_start_matches(['/', '!', ' ']).starts_with('|');
        if characters > LINE_CHARACTERS_MAX && !is_table {
            let message = format!("{characters} characters in a line, more than {LINE_CHARACTERS_MAX}");
            wrong(message, "break it");
        }
        if line.contains('\t') {
            wrong("a tab".to_owned(), "indent with blanks");
        }
        if line.ends_with(' ') {
            wrong("a blank at the end of the line".to_owned(), "delete it");
        }
        if let Some(character) = line.chars().find(|c| !c.is_ascii()) {
            wrong(format!("the character {character:?} is not ASCII"), "write it in ASCII or escape it");
        }
    }
    complaints
}

/// Words that promise to be gone before a commit, and places that exist on one machine only.
/// Put together here so that this file does not contain them.
fn forbidden_words() -> [String; 5] {
    [["to", "do!"], ["unimple", "mented!"], ["db", "g!"], ["FIX", "ME"], ["XX", "X"]]
        .map(|halves| halves.concat())
}
fn forbidden_places() -> [String; 4] {
    ["root", "home", "work", "var/tmp"].map(|place| format!("/{place}"))
}

/// Complains of unfinished work, and of paths of a particular machine.
fn check_words(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for (number, line) in source.text.lines().enumerate() {
        for word in forbidden_words().iter().filter(|word| has_word(line, word)) {
            let remedy = "finish it, or write it up as an issue";
            complaints.push(complaint(source, number + 1, format!("`{word}` in the text"), remedy));
        }
        for place in forbidden_places().iter().filter(|place| has_place(line, place)) {
            let remedy = "take it from the environment, or make up a path that is nobody's";
            complaints.push(complaint(source, number + 1, format!("the path `{place}`"), remedy));
        }
    }
    complaints
}

/// Names of types that say nothing to a reader who does not know their essay: metaphors, and verbs used as nouns. The
/// field has terms for all of them; see the table of words in ARCHITECTURE.md.
const PRIVATE_NAMES: [&str; 74] = [
    "Asked",
    "Attendant",
    "Bed",
    "Beds",
    "Bell",
    "BellList",
    "Bounced",
    "BringBack",
    "Called",
    "Came",
    "Chair",
    "Coming",
    "Departed",
    "Departure",
    "Desk",
    "Doubtful",
    "Duty",
    "Errand",
    "Excuse",
    "Gaze",
    "GiveWay",
    "Heard",
    "Hunch",
    "Inlet",
    "Judge",
    "Judged",
    "Judges",
    "KeepingView",
    "Known",
    "Lack",
    "Landing",
    "LastWord",
    "LeaseRoom",
    "LeftBehind",
    "Leftovers",
    "Looked",
    "MakesRoom",
    "Manners",
    "Mended",
    "Mender",
    "Met",
    "Mood",
    "Moody",
    "Noted",
    "Parted",
    "Patience",
    "Polite",
    "Promise",
    "Room",
    "Said",
    "Saw",
    "Seen",
    "Shelf",
    "Skies",
    "Sought",
    "Summoned",
    "Summons",
    "Taken",
    "Talk",
    "Theirs",
    "Tidied",
    "Together",
    "Told",
    "Tour",
    "TourPlace",
    "Upkeep",
    "Visit",
    "WaitRoom",
    "Wanted",
    "Watched",
    "Weather",
    "Went",
    "Whims",
    "Whom",
];

/// Participles among the names above. They are no names of types; a variant may be one, since it is a state of the type
/// that its enum names: `FillUrgency::Asked`.
const STATES: [&str; 17] = [
    "Asked", "Bounced", "Called", "Departed", "Judged", "Known", "Looked", "Mended", "Noted", "Seen",
    "Sought", "Summoned", "Taken", "Tidied", "Told", "Wanted", "Watched",
];

/// The names that a file gives: to types, to the things it imports, and to the variants of its enums.
fn check_type_names(source: &Source) -> Vec<Complaint> {
    let defines =
        |at: &usize| matches!(source.word(*at), "struct" | "enum" | "trait" | "type" | "union" | "as");
    let named = (0..source.tokens.len().saturating_sub(1)).filter(defines).map(|at| at + 1);
    let variants = all_variants(source).into_iter().filter(|&at| !STATES.contains(&source.word(at)));
    let mut named: Vec<usize> = named.chain(variants).collect();
    named.sort_unstable();
    let private = named.into_iter().filter(|&at| PRIVATE_NAMES.contains(&source.word(at)));
    let complain = |at: usize| {
        let wrong = format!("`{}` is a name of our own making", source.word(at));
        complaint(
            source,
            source.tokens[at].line,
            wrong,
            "take the field's term, or a literal compound of two of them",
        )
    };
    private.map(complain).collect()
}

/// The names of all variants of all enums of a file.
fn all_variants(source: &Source) -> Vec<usize> {
    let enums = (0..source.tokens.len()).filter(|&at| source.word(at) == "enum");
    enums.flat_map(|at| variants_of(source, at)).collect()
}

/// The names of the variants of the enum that is declared at `at`.
fn variants_of(source: &Source, at: usize) -> Vec<usize> {
    let Some(open) = (at..source.item_end(at)).find(|&at| source.word(at) == "{") else { return Vec::new() };
    let (end, mut at, mut found) = (source.closing(open), open + 1, Vec::new());
    while at < end {
        match source.word(at) {
            "#" => at = source.closing(at + 1),
            "(" | "[" | "{" => at = source.closing(at),
            word if is_name(word) && matches!(source.word(at - 1), "{" | "," | "]") => found.push(at),
            _ => {}
        }
        at += 1;
    }
    found
}

/// A relative clause without the noun that it is of: "Who reads it waits", "for who asks".
fn check_headless_who(source: &Source) -> Vec<Complaint> {
    let is_headless = |line: &&str| {
        let whole = line.trim_start().strip_prefix("//");
        let Some(comment) = whole.or_else(|| line.split_once(" // ").map(|(_, behind)| behind)) else {
            return false;
        };
        // A table's cells are looked at one by one; an opening bracket hides no clause.
        let comment = comment.trim_start_matches(['/', '!']).trim_start();
        comment.split('|').any(|part| is_headless_part(part.trim().trim_start_matches(['(', '"'])))
    };
    let lines = source.text.lines().enumerate().filter(|(_, line)| is_headless(line));
    let complain = |(at, line): (usize, &str)| {
        let wrong = format!("nobody acts in `{}`", line.trim());
        complaint(source, at + 1, wrong, "name the thread, process, caller or part that does")
    };
    lines.map(complain).collect()
}

fn check_headless_what(source: &Source) -> Vec<Complaint> {
    let is_document = source.path.ends_with(".md");
    let found =
        if is_document { prose::headless_document(&source.text) } else { prose::headless(&source.text) };
    complaints_of(source, found)
}

/// The words of a file's strings, but for those of its tests: messages, reports, helps.
fn check_strings(source: &Source) -> Vec<Complaint> {
    let tests = source.test_ranges();
    let line_of = |at: usize| source.tokens.get(at).map_or(usize::MAX, |token| token.line);
    let is_test =
        |line: usize| tests.iter().any(|test| (line_of(test.start)..=line_of(test.end)).contains(&line));
    let strings = source.strings.iter().filter(|string| !source.is_test_file() && !is_test(string.line));
    complaints_of(source, strings.flat_map(|string| prose::check_string(string.line, &string.text)).collect())
}

fn complaints_of(source: &Source, faults: Vec<prose::Fault>) -> Vec<Complaint> {
    let told = |prose::Fault { line, wrong, remedy }| complaint(source, line, wrong, remedy);
    faults.into_iter().map(told).collect()
}

fn is_headless_part(comment: &str) -> bool {
    const AFTER: &[&str] = &[
        "but", "so", "for", "than", "by", "to", "from", "with", "of", "as", "and", "or", "if", "until",
        "because",
    ];
    let text = comment.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start_matches(['.', ' ']);
    let words: Vec<&str> = text.split(' ').collect();
    words.iter().enumerate().any(|(at, word)| {
        let begins = match at.checked_sub(1).map(|before| words[before]) {
            None => word.starts_with('W') || comment != text,
            Some(before) => {
                before.ends_with(['.', ':', ';']) || AFTER.contains(&before.to_lowercase().as_str())
            }
        };
        // Followed by a verb, and not in a table's or a drawing's column.
        let verb = words.get(at + 1).is_some_and(|next| next.starts_with(|c: char| c.is_ascii_lowercase()));
        matches!(*word, "Who" | "Whoever" | "who" | "whoever") && begins && verb
    })
}

fn is_word_character(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let after = &line[at + word.len()..];
        !line[..at].ends_with(is_word_character)
            && (word.ends_with('!') || !after.starts_with(is_word_character))
    })
}

/// Whether `line` contains the absolute path `place` or one below it.
fn has_place(line: &str, place: &str) -> bool {
    let begins_path =
        |before: &str| !before.ends_with(|c| is_word_character(c) || matches!(c, '.' | '}' | '/' | '>'));
    line.match_indices(place).any(|(at, _)| {
        let after = &line[at + place.len()..];
        begins_path(&line[..at]) && !after.starts_with(|c| is_word_character(c) || c == '-')
    })
}

/// The functions of a file: name, line, and how many lines from its `fn` to its closing bracket.
fn functions(source: &Source) -> Vec<(String, usize, usize)> {
    let is_function = |at: &usize| source.word(*at) == "fn" && is_name(source.word(at + 1));
    let measure = |at: usize| {
        let first = source.tokens[at].line;
        let last = source.tokens.get(source.item_end(at)).map_or(first, |token| token.line);
        (source.word(at + 1).to_owned(), first, last + 1 - first)
    };
    (0..source.tokens.len()).filter(is_function).map(measure).collect()
}

fn check_function_lengths(source: &Source) -> Vec<Complaint> {
    let long = |(name, line, lines)| {
        let wrong = format!("`{name}` has {lines} lines, more than {FUNCTION_LINES_MAX}");
        complaint(source, line, wrong, "give its steps names of their own")
    };
    functions(source).into_iter().filter(|(_, _, lines)| *lines > FUNCTION_LINES_MAX).map(long).collect()
}

/// Whether `name` is that of a test of a numbered statement: a letter, two digits, `_`.
fn is_lettered(name: &str) -> bool {
    let bytes = name.as_bytes();
    bytes.len() > 4
        && bytes[0].is_ascii_lowercase()
        && bytes[1..3].iter().all(u8::is_ascii_digit)
        && bytes[3] == b'_'
}

/// A statement's test is one test: its name is given once.
fn check_lettered_names(sources: &[Source]) -> Vec<Complaint> {
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    let mut complaints = Vec::new();
    for source in sources {
        for (name, line, _) in functions(source).into_iter().filter(|(name, _, _)| is_lettered(name)) {
            if let Some(first) = seen.get(&name) {
                let wrong = format!("`{name}` is the name of a test at {first} too");
                complaints.push(complaint(
                    source,
                    line,
                    wrong,
                    "say in the name what this one shows beyond the other",
                ));
            }
            seen.entry(name).or_insert_with(|| format!("{}:{line}", source.path));
        }
    }
    complaints
}

/// The letters and numbers that a test's name begins with, as its comment writes them, and the rest of the name:
/// `r12_t01_cuts_are_seen` is ("R12, T01", `cuts_are_seen`), and `r02_to_r05_reads` is ("R02 to R05", `reads`).
fn letters_of(name: &str) -> (String, &str) {
    let (mut letters, mut rest, mut between) = (String::new(), name, "");
    while is_lettered(rest) {
        letters += between;
        letters += &rest[..3].to_uppercase();
        rest = &rest[4..];
        between = match rest.strip_prefix("to_") {
            Some(last) if is_lettered(last) => {
                rest = last;
                " to "
            }
            _ => ", ",
        };
    }
    (letters, rest)
}

/// The first line of the `///` comment right above the item that the `fn` at `at` is of, or nothing if it has none.
fn first_doc_line(source: &Source, at: usize) -> String {
    let begins = (0..at).rev().find(|&at| matches!(source.word(at), "{" | "}" | ";")).map_or(0, |at| at + 1);
    let above: Vec<&str> = source.text.lines().take(source.tokens[begins].line - 1).collect();
    let doc = above.iter().rev().map_while(|line| line.trim_start().strip_prefix("///"));
    doc.last().unwrap_or_default().trim().to_owned()
}

/// The comment of a statement's test says the statement, behind its letter: its source is not in the repository.
fn check_statements(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for at in (0..source.tokens.len()).filter(|&at| source.word(at) == "fn" && is_test(source, at)) {
        let name = source.word(at + 1);
        let (letters, _) = letters_of(name);
        let first = first_doc_line(source, at);
        let has_statement = first.strip_prefix(&format!("{letters}: ")).is_some();
        if !letters.is_empty() && !has_statement {
            let wrong =
                format!("the comment of `{name}` does not begin with `{letters}: ` and the statement");
            let remedy = "say in one to three lines of `///`, right above its attributes, what the test holds to be so";
            complaints.push(complaint(source, source.tokens[at].line, wrong, remedy));
        }
    }
    complaints
}

/// Words that begin a clause where a noun should stand: a report of a failure has nothing but the name to say which
/// page, file or process it is of.
const HEADLESS: [&str; 6] = ["who", "what", "whoever", "whatever", "nobody", "somebody"];
/// Words behind which "what" and "who" are questions: "says what to do".
const ASKS: [&str; 5] = ["say", "says", "know", "told", "decides"];

/// Whether the function whose `fn` is at `at` has an attribute that makes it a test, of the standard library's kind or
/// of another (`#[tokio::test(...)]`).
fn is_test(source: &Source, at: usize) -> bool {
    let ends_before = |at: &usize| matches!(source.word(*at), "{" | "}" | ";");
    let attributes = (0..at).rev().take_while(|at| !ends_before(at));
    attributes.into_iter().any(|at| {
        source.word(at) == "test"
            && matches!(source.word(at + 1), "]" | "(")
            && at > 0
            && matches!(source.word(at - 1), "[" | "::")
    })
}

/// Whether a clause stands where a name should have a noun, as in "what_is_read_is_right" or "it_holds_what_it_had".
fn is_headless_name(sentence: &str) -> bool {
    let words: Vec<&str> = sentence.split('_').collect();
    words.iter().enumerate().any(|(at, word)| {
        let asks = at > 0 && ASKS.contains(&words[at - 1]);
        HEADLESS.contains(word) && !asks
    })
}

/// A test's name is a sentence with a subject, behind the letters of its statements.
fn check_test_subjects(source: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for at in (0..source.tokens.len()).filter(|&at| source.word(at) == "fn" && is_test(source, at)) {
        let (name, line) = (source.word(at + 1), source.tokens[at].line);
        let (_, sentence) = letters_of(name);
        if is_headless_name(sentence) {
            let wrong = format!("`{name}` has a clause where the name of a test should have a noun");
            let remedy = "name the handle, page, viewer, server ... that acts or is read";
            complaints.push(complaint(source, line, wrong, remedy));
        }
    }
    complaints
}

/// The README's first Rust example is `hello`, byte for byte.
fn check_readme(readme: &Source, hello: &Source) -> Vec<Complaint> {
    let remedy = "copy quinion/examples/hello.rs between ```rust and ```";
    let Some((before, rest)) = readme.text.split_once("```rust\n") else {
        return vec![complaint(readme, 1, "there is no Rust example".to_owned(), remedy)];
    };
    let example = rest.split_once("```").map_or(rest, |(example, _)| example);
    if example == hello.text {
        return Vec::new();
    }
    let same = example.lines().zip(hello.text.lines()).take_while(|(a, b)| a == b).count();
    let line = before.lines().count() + 2 + same;
    vec![complaint(readme, line, "the example differs from examples/hello.rs here".to_owned(), remedy)]
}

/// The README is read in a minute, also in a terminal: it is short, and so are its lines, but for tables and examples.
fn check_readme_size(readme: &Source) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    let lines = readme.text.lines().count();
    if lines > README_LINES_MAX {
        let wrong = format!("{lines} lines, more than {README_LINES_MAX}");
        complaints.push(complaint(readme, lines, wrong, "move what only some readers need to docs/"));
    }
    let mut is_fenced = false;
    for (at, line) in readme.text.lines().enumerate() {
        is_fenced ^= line.starts_with("```");
        let characters = line.chars().count();
        if characters > LINE_CHARACTERS_MAX && !is_fenced && !line.starts_with('|') {
            let wrong = format!("{characters} characters in a line, more than {LINE_CHARACTERS_MAX}");
            complaints.push(complaint(readme, at + 1, wrong, "break it"));
        }
    }
    complaints
}

/// The first words in backquotes of the rows of the table below `heading`.
fn table_keys(text: &str, heading: &str) -> Vec<String> {
    let section = text.lines().skip_while(|line| line.trim() != heading).skip(1);
    let rows =
        section.take_while(|line| !line.starts_with("## ")).filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split_once('`')).map(|(key, _)| key.to_owned()).collect()
}

fn variants(source: &Source, name: &str) -> Vec<String> {
    let Some(at) = (0..source.tokens.len()).find(|&at| source.is_at(at, &["enum", name])) else {
        return Vec::new();
    };
    let end = source.item_end(at);
    let is_variant = |at: &usize| matches!(source.word(at - 1), "{" | ",") && is_name(source.word(*at));
    (at + 3..end).filter(is_variant).map(|at| source.word(at).to_owned()).collect()
}

/// A table of ARCHITECTURE.md lists what there is, in the order in which it is.
fn check_table(architecture: &Source, heading: &str, expected: &[String]) -> Vec<Complaint> {
    let listed = table_keys(&architecture.text, heading);
    if listed == expected {
        return Vec::new();
    }
    let line = architecture.text.lines().take_while(|line| line.trim() != heading).count() + 1;
    let wrong = format!("the table `{heading}` lists {listed:?}, the code has {expected:?}");
    vec![complaint(architecture, line, wrong, "make the table say what the code does")]
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the library lies in the repository").to_owned()
}

fn files(folder: &str, endings: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders = vec![repository().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.map(|entry| entry.expect("a readable folder").path()) {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if entry.is_dir() && !name.starts_with("target") && name != ".git" {
                folders.push(entry);
            } else if entry.is_file() && endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(read(&entry));
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn read(path: &Path) -> Source {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let inside = path.strip_prefix(repository()).unwrap_or(path);
    Source::new(&inside.to_string_lossy(), &text)
}

fn rust_files() -> Vec<Source> {
    files("", &[".rs"])
}

fn library_files(package: &str) -> Vec<Source> {
    let sources = files(&format!("{package}/src"), &[".rs"]);
    let root = format!("{package}/src/lib.rs");
    assert!(sources.iter().any(|source| source.path == root), "the walk has lost its way");
    sources
}

#[track_caller]
fn expect_tidy(complaints: Vec<Complaint>) {
    let lines: Vec<String> = complaints.iter().map(|complaint| format!("{complaint:?}")).collect();
    assert!(lines.is_empty(), "{} untidy:\n{}\n", lines.len(), lines.join("\n"));
}

#[test]
fn modules_name_only_layers_below() {
    for package in LAYERED {
        let sources = library_files(package);
        let lib = sources.iter().find(|s| s.path.ends_with("/src/lib.rs")).expect("the library has a root");
        let layers = Layers::of(lib);
        expect_tidy(sources.iter().flat_map(|source| check_layers(&layers, source)).collect());
    }
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let sources = rust_files();
    for Package { root, .. } in PACKAGES {
        assert!(sources.iter().any(|source| source.path.starts_with(root)), "there is no {root}");
        expect_tidy(check_imports(root, &sources));
    }
}

#[test]
fn long_lists_of_parameters_and_tuples_become_less() {
    let sources = rust_files();
    let of = |root: &str| measure(sources.iter().filter(|source| source.path.starts_with(root)));
    let differ = PACKAGES.iter().filter(|package| of(package.root) != package.known);
    let told: Vec<String> = differ
        .map(|Package { root, known, .. }| format!("{root} has {:?}, and {known:?} is recorded", of(root)))
        .collect();
    assert!(
        told.is_empty(),
        "where it is more, make a request struct or a type; where it is less, lower it in PACKAGES: {told:#?}"
    );
}

#[test]
fn comments_have_no_larger_share_of_a_package() {
    let sources = rust_files();
    let told: Vec<String> =
        PACKAGES.into_iter().filter_map(|package| check_comment_share(package, &sources)).collect();
    assert!(told.is_empty(), "{told:#?}");
}

#[test]
fn every_library_file_is_a_module() {
    for package in LAYERED {
        expect_tidy(check_orphans(&library_files(package)));
    }
}

#[test]
fn every_file_opens_with_an_essay() {
    expect_tidy(rust_files().iter().flat_map(check_essay).collect());
    expect_tidy(rust_files().iter().flat_map(check_title).collect());
}

#[test]
fn unsafe_code_stays_in_its_files_and_is_argued() {
    expect_tidy(rust_files().iter().flat_map(check_unsafe).collect());
}

#[test]
fn every_ordering_names_its_partner() {
    expect_tidy(rust_files().iter().flat_map(check_orderings).collect());
}

#[test]
fn sources_are_plain_text() {
    let sources = files("", &[".rs", ".toml", ".sh"]);
    let scripts = ["scripts/setup", ".ci/run"].map(|script| read(&repository().join(script)));
    expect_tidy(sources.iter().chain(&scripts).flat_map(check_lines).collect());
}

#[test]
fn nothing_is_unfinished_or_of_one_machine() {
    let sources = files("", &[".rs", ".toml", ".sh", ".md", "setup", "run"]);
    expect_tidy(sources.iter().flat_map(check_words).collect());
}

#[test]
fn types_have_names_of_the_field() {
    expect_tidy(rust_files().iter().flat_map(check_type_names).collect());
}

#[test]
fn comments_name_the_one_that_acts() {
    // Not this rule's own wrong texts.
    let mut sources = rust_files();
    sources.retain(|source| source.path != "quinion/tests/tidy.rs");
    expect_tidy(sources.iter().flat_map(check_headless_who).collect());
}

#[test]
fn comments_name_the_thing_that_they_describe() {
    let sources = rust_files();
    let product = |source: &&Source| PACKAGES.iter().any(|package| source.path.starts_with(package.root));
    expect_tidy(sources.iter().filter(product).flat_map(check_headless_what).collect());
    let mut documents = files("docs", &[".md"]);
    documents.extend(DOCUMENTS.map(|path| read(&repository().join(path))));
    assert!(documents.len() > DOCUMENTS.len() + 5, "the guides are found");
    expect_tidy(documents.iter().flat_map(check_headless_what).collect());
}

#[test]
fn documentation_opens_with_its_subject() {
    let mut sources = rust_files();
    sources.retain(|source| source.path != "quinion/tests/tidy.rs"); // this rule's own wrong texts
    let complaints = |source: &Source| complaints_of(source, names::check_openings(&source.text));
    expect_tidy(sources.iter().flat_map(complaints).collect());
}

#[test]
fn hidden_items_are_of_the_gateway_alone() {
    let mut sources = rust_files();
    sources.retain(|source| !source.path.starts_with("quinion/tests/tidy")); // this rule's own wrong texts
    let complaints = |source: &Source| complaints_of(source, names::check_hidden(&source.text));
    expect_tidy(sources.iter().flat_map(complaints).collect());
}

/// The benchmark's experiments and the tests' doubles have names of their own kind again and again: `Reader`, `Load`.
#[test]
fn types_have_one_name_each() {
    let product = PACKAGES.iter().filter(|package| !["bench/src/", "testing/src/"].contains(&package.root));
    let found: Vec<_> =
        product.flat_map(|package| names::names_of_two(files(package.root, &[".rs"]).iter())).collect();
    assert!(found.is_empty(), "name these types by what sets them apart: {found:#?}");
}

#[test]
fn messages_have_plain_words() {
    let sources = rust_files();
    let product = |source: &&Source| PACKAGES.iter().any(|package| source.path.starts_with(package.root));
    let strings = sources.iter().filter(product).map(|source| source.strings.len()).sum::<usize>();
    assert!(strings > 1000, "the strings are found");
    expect_tidy(sources.iter().filter(product).flat_map(check_strings).collect());
}

#[test]
fn prose_is_plain() {
    let mut complaints = Vec::new();
    for source in rust_files().into_iter().chain(files("", &[".md"])) {
        let found = if source.path.ends_with(".rs") {
            prose::check_comments(&source.text)
        } else {
            prose::check_document(&source.text)
        };
        complaints.extend(complaints_of(&source, found));
    }
    expect_tidy(complaints);
}

/// Rows of ARCHITECTURE's table of words, but for its head.
fn words_in(architecture: &str) -> usize {
    let (_, section) = architecture.split_once("\n## Words\n").expect("the table is there");
    let section = section.split("\n## ").next().expect("it has a beginning");
    section.lines().filter(|line| line.starts_with("| ")).count() - 1
}

#[test]
fn the_table_of_words_is_short() {
    let architecture = read(&repository().join("ARCHITECTURE.md"));
    let rows = words_in(&architecture.text);
    assert!((1..=WORDS_MAX).contains(&rows), "{rows} rows; a word that the field has needs none");
}

#[test]
fn long_functions_do_not_become_more() {
    let long: Vec<Complaint> = rust_files().iter().flat_map(check_function_lengths).collect();
    let too_many = long.len().saturating_sub(LONG_FUNCTIONS_MAX);
    assert_eq!(
        too_many, 0,
        "{LONG_FUNCTIONS_MAX} long functions are allowed; shorten {too_many} of:
{long:#?}"
    );
}

#[test]
fn lettered_test_names_are_given_once() {
    expect_tidy(check_lettered_names(&rust_files()));
}

#[test]
fn comments_of_lettered_tests_say_the_statement() {
    expect_tidy(rust_files().iter().flat_map(check_statements).collect());
}

#[test]
fn test_names_have_a_subject() {
    let sources = rust_files();
    let tests = |source: &Source| {
        (0..source.tokens.len()).filter(|&at| source.word(at) == "fn" && is_test(source, at)).count()
    };
    assert!(sources.iter().map(tests).sum::<usize>() > 1000, "the tests are found");
    expect_tidy(sources.iter().flat_map(check_test_subjects).collect());
}

#[test]
fn the_architecture_lists_the_modules_and_the_lock_order() {
    let architecture = read(&repository().join("ARCHITECTURE.md"));
    let [lib, sync] =
        ["quinion/src/lib.rs", "quinion/src/sync.rs"].map(|path| read(&repository().join(path)));
    let [view, owner] = ["view/src/lib.rs", "owner/src/lib.rs"].map(|path| read(&repository().join(path)));
    let mut complaints = check_table(&architecture, "## Modules", &Layers::of(&lib).modules);
    complaints.extend(check_table(&architecture, "## What viewers share", &Layers::of(&view).modules));
    complaints.extend(check_table(&architecture, "## Owner and viewers", &Layers::of(&owner).modules));
    complaints.extend(check_table(&architecture, "## Lock order", &variants(&sync, "Rank")));
    expect_tidy(complaints);
}

#[test]
fn the_readme_shows_the_example_that_is_compiled() {
    let [readme, hello] =
        ["README.md", "quinion/examples/hello.rs"].map(|path| read(&repository().join(path)));
    expect_tidy(check_readme(&readme, &hello));
}

#[test]
fn the_readme_is_short() {
    expect_tidy(check_readme_size(&read(&repository().join("README.md"))));
}

/// The rules on texts that are wrong, so that a rule which sees nothing is seen.
mod a_rule_can_fail {
    use super::*;

    const LIB: &str = "//! x\npub use quinion_view::words;\npub mod units;\npub mod arena;\nmod cache;\n\
                       pub use cache::{Cache, Builder as CacheBuilder};\npub use crate::units::Frame;";

    /// The complaints of `check`, as (line, the start of what is wrong).
    #[track_caller]
    fn expect(complaints: Vec<Complaint>, expected: &[(usize, &str)]) {
        let is_expected = |(complaint, (line, wrong)): (&Complaint, &(usize, &str))| {
            complaint.line == *line && complaint.wrong.contains(wrong)
        };
        assert!(
            complaints.len() == expected.len() && complaints.iter().zip(expected).all(is_expected),
            "expected {expected:#?}\nfound {complaints:#?}"
        );
    }

    fn layers(path: &str, text: &str) -> Vec<Complaint> {
        check_layers(&Layers::of(&Source::new("quinion/src/lib.rs", LIB)), &Source::new(path, text))
    }

    #[test]
    fn words_are_counted() {
        let rows =
            |words: usize| (0..words).map(|word| format!("| `{word}` | a number |\n")).collect::<String>();
        let page = |words| {
            format!("# A\n\n## Words\n\n| word | meaning |\n|---|---|\n{}\n## B\n| x | y |\n", rows(words))
        };
        assert_eq!(words_in(&page(39)), 39);
        assert!(words_in(&page(WORDS_MAX + 1)) > WORDS_MAX, "one more than may be is seen");
    }

    #[test]
    fn layers_below_and_the_own_module_may_be_named() {
        let text = "use crate::units::Frame;\nuse super::layout;\n\
                    use crate::{units, arena::Layout};\nuse crate::Frame;";
        expect(layers("quinion/src/arena/view.rs", text), &[]);
        expect(layers("quinion/src/cache.rs", "use super::arena;\nuse crate::CacheBuilder;"), &[]);
    }

    #[test]
    fn layers_above_are_seen_however_they_are_named() {
        let text = "use crate::cache::Cache;\nuse super::super::cache;\nfn f() { crate::cache::f() }\n\
                    use crate::{units::Frame, cache::{Cache, Kind}};\ntype C = crate::Cache;\n\
                    type B = crate::CacheBuilder;\nmod inner { use super::super::super::cache; use super::super::x; }";
        let expected = [1, 2, 3, 4, 5, 6, 7].map(|line| (line, "of the layer `cache` above it"));
        expect(layers("quinion/src/arena/view.rs", text), &expected);
        expect(layers("quinion/src/units.rs", "use super::arena::View;"), &[(1, "`arena`")]);
        expect(layers("quinion/src/units.rs", "use super::words::Word;"), &[]);
    }

    #[test]
    fn names_without_a_layer_are_refused() {
        expect(
            layers("quinion/src/arena/mod.rs", "use crate::*;\nuse crate::Thing;"),
            &[(1, "`*`"), (2, "`Thing`")],
        );
        expect(layers("quinion/src/attic.rs", ""), &[(1, "no module `attic`")]);
    }

    #[test]
    fn comments_strings_tests_and_macros_may_name_anything() {
        let text = "//! crate::cache\n/* crate::cache /* */ crate::cache */\nconst S: &str = \"crate::cache\";\n\
                    const R: &str = r#\"\" crate::cache\"#;\nfn f<'a>(_: &'a str) -> char { '\"' }\ncrate::check!();\n\
                    #[cfg(test)]\nmod tests {\n    use crate::cache::Cache;\n}\n\
                    #[cfg(all(test, unix))]\nuse crate::{cache::Cache};";
        expect(layers("quinion/src/arena/mod.rs", text), &[]);
        expect(layers("quinion/src/arena/tests.rs", "use crate::cache::Cache;"), &[]);
        let after = format!("{text}\nuse crate::cache::Cache;");
        expect(layers("quinion/src/arena/mod.rs", &after), &[(13, "`cache`")]);
    }

    #[test]
    fn private_names_are_seen() {
        let check = |text| check_type_names(&Source::new("quinion/src/arena/view.rs", text));
        expect(check("struct WaitQueue;\nlet tour = Bed; // struct Bed"), &[]);
        expect(check("\nstruct Bed;\npub enum Weather {}"), &[(2, "`Bed`"), (3, "`Weather`")]);
        expect(check("use a::{B as Tour, C as D};\nuse a::X as Bed;"), &[(1, "`Tour`"), (2, "`Bed`")]);
        let variants = "enum A<T: X> {\n    /// Bed\n    #[error(\"Bed\")]\n    Bed,\n    B(Tour, Met),\n\
                        C { Talk: Met },\n    Met = 3,\n    Asked,\n}\nfn f(Tour: A) { A::Bed }";
        expect(check(variants), &[(4, "`Bed`"), (7, "`Met`")]);
    }

    #[test]
    fn comments_without_one_that_acts_are_seen() {
        let check = |text| check_headless_who(&Source::new("quinion/src/arena/view.rs", text));
        let right = "// A thread who waits is woken.\n//! | who | what |\n\
                     /// **Who waits for whom.** Writers.\nlet who = 1;";
        expect(check(right), &[]);
        let wrong = "\n// Who waits is woken.\n//! 1. It is freed: who holds it waits.\n\
                     /// It is for whoever asks.\n/// 3 who ends";
        expect(check(wrong), &[(2, "nobody"), (3, "nobody"), (4, "nobody"), (5, "nobody")]);
        let hidden =
            "f(); // it wakes so who waits\n//! (Who holds it waits.)\n//! | F | Who reads it waits |";
        expect(check(hidden), &[(1, "nobody"), (2, "nobody"), (3, "nobody")]);
    }

    #[test]
    fn openings_without_a_subject_are_seen() {
        let check =
            |text| names::check_openings(text).into_iter().map(|fault| fault.line).collect::<Vec<_>>();
        let right =
            "/// Isolates a page.\n/// It waits.\nfn f() {}\n// It is no documentation\n/// One-shot timer.";
        assert_eq!(check(right), []);
        let wrong =
            "/// The same, for writes.\nfn f() {}\n    /// None.\n    A,\n    /// So many\n//! It\n/// It's";
        assert_eq!(check(wrong), [1, 3, 5, 7]);
    }

    #[test]
    fn a_hidden_item_is_seen_wherever_it_is_and_the_gateway_is_none() {
        let lines_of =
            |text: &str| -> Vec<usize> { names::check_hidden(text).iter().map(|fault| fault.line).collect() };
        assert_eq!(lines_of("impl A {\n    #[doc(hidden)]\n    #[must_use]\n    pub fn a() {}\n}"), [2]);
        assert_eq!(lines_of("#[doc(hidden)]\npub use a::B;"), [1]);
        assert_eq!(lines_of("#[doc(hidden)]\n#[path = \".\"]\npub mod internals {}"), []);
    }

    #[test]
    fn a_name_of_two_types_is_seen() {
        let sources = [
            Source::new("view/src/a.rs", "pub struct Slot<T>(T);\nenum State {}\nenum Kind {}"),
            Source::new(
                "view/src/b.rs",
                "trait Slot {}\nenum State {}\n#[cfg(test)]\nmod tests {\n    enum Kind {}\n}",
            ),
            Source::new("view/src/c/tests.rs", "struct Kind;\nuse a::Slot;"),
        ];
        let found = names::names_of_two(sources.iter());
        let places = ["view/src/a.rs:1", "view/src/b.rs:1"].map(str::to_owned).to_vec();
        assert_eq!(found, [("Slot".to_owned(), places)]);
    }

    #[test]
    fn orphans_are_seen() {
        let sources = [
            Source::new("quinion/src/lib.rs", LIB),
            Source::new("quinion/src/units.rs", ""),
            Source::new("quinion/src/arena/mod.rs", "mod view;"),
            Source::new("quinion/src/arena/view.rs", ""),
            Source::new("quinion/src/arena/lost.rs", ""),
        ];
        expect(check_orphans(&sources), &[(1, "`mod lost;`")]);
    }

    #[test]
    fn circles_of_imports_are_seen() {
        let check = |files: &[(&str, &str)]| {
            let sources: Vec<Source> = files.iter().map(|(path, text)| Source::new(path, text)).collect();
            check_imports("p/src/", &sources)
        };
        let (lib, folder) = (("p/src/lib.rs", "mod a;\nmod b;\nuse a::X;"), "p/src/a/mod.rs");
        let one_way = [lib, ("p/src/a.rs", "use crate::b::{self, Y};"), ("p/src/b.rs", "use std::a::X;")];
        expect(check(&one_way), &[]);
        let both = [lib, ("p/src/a.rs", "use crate::b::Y;"), ("p/src/b.rs", "\nfn f(x: super::a::X) {}")];
        expect(check(&both), &[(1, "p/src/a.rs:1, p/src/b.rs:2")]);
        let nested = "use crate::{c, a::{d, e::E}};";
        let three = [(folder, "use crate::b::Y;"), ("p/src/a/e.rs", "use super::Z;"), ("p/src/b.rs", nested)];
        expect(check(&three), &[(1, "3 files")]);
        let parent = [(folder, "mod e;\nuse e::E;"), ("p/src/a/e.rs", "use super::Z;")];
        expect(check(&parent), &[]);
        let tests = "#[cfg(test)]\nmod tests {\n    use crate::a::X;\n}";
        expect(check(&[lib, ("p/src/a.rs", "use crate::b::Y;"), ("p/src/b.rs", tests)]), &[]);
    }

    #[test]
    fn long_lists_of_parameters_and_tuples_are_counted() {
        let text = "fn f(a: (u8, u8), b: u8, c: u8, d: u8) {}\n\
                    fn g(&self, a: u8, b: u8, c: u8, d: u8) {}";
        let sources = [Source::new("p/src/a.rs", text), Source::new("p/src/b.rs", text)];
        assert_eq!(measure(sources.iter()), Ratchet { many: 2, tuples: 2 });
    }

    #[test]
    fn sentences_that_name_nothing_are_seen() {
        let text =
            "//! One. What waits,\n//! sleeps. What is it? It is\n//! what it is.\nlet a = 1; // What b is.";
        expect(check_headless_what(&Source::new("p/src/a.rs", text)), &[(1, "noun"), (4, "noun")]);
        let document = "# What it is\n\nOne. What waits,\nsleeps. What is it?\n- **What waits.** A thread.\n\
                        | what | One. What waits. |\n```text\nWhat waits.\n```\n1. What\n   waits.\n\
                        [What it shows](a.svg).\nIt is what it is.";
        let lines = [3, 6, 10, 12].map(|line| (line, "noun"));
        expect(check_headless_what(&Source::new("docs/a.md", document)), &lines);
    }

    #[test]
    fn words_of_messages_are_seen() {
        let check = |path, text| check_strings(&Source::new(path, text));
        let right = "// It is for nobody.\nlet nobody = \"a page is nobodys\";\n\
                     #[cfg(test)]\nmod tests {\n    fn f() { format!(\"nobody waits\") }\n}";
        expect(check("p/src/a.rs", right), &[]);
        expect(check("p/src/a/tests.rs", "format!(\"nobody waits\")"), &[]);
        let wrong = "#[error(\"slot {0} is anybody's\")]\nA(u32),\nformat!(\"{a}: \\\"nobody\\\" reads\");\n\
                     #[arg(help = \"the page \\\n         gives \\\n         way\")]\nconst R: &str = r#\"Whom \
                     somebody \
                     asks\"#;";
        let words = [(1, "`anybody's`"), (3, "`nobody`"), (4, "`gives way`"), (7, "`somebody`")];
        expect(check("p/src/a.rs", wrong), &words);
    }

    #[test]
    fn more_comments_than_before_are_seen() {
        let text = |comments: usize, code: usize| {
            format!("{}{}", "    // why\n".repeat(comments), "f(); // a\n".repeat(code))
        };
        let check = |comments: usize, code: usize| {
            let package = Package { root: "p/src/", known: Ratchet::default(), comments_max: 10 };
            let sources = [
                Source::new("p/src/a.rs", &text(comments, code / 2)),
                Source::new("p/src/b.rs", &text(0, code - code / 2)),
                Source::new("q/src/a.rs", &text(100, 0)),
            ];
            check_comment_share(package, &sources)
        };
        assert_eq!((check(10, 90), check(9, 91)), (None, None));
        assert!(check(101, 899).expect("it is more").contains("11 % of the lines in p/src/"));
        assert!(check(5, 95).expect("it is less").contains("lower its `comments_max`"));
        assert!(check(10, 0).expect("it is all").contains("100 %"));
    }

    #[test]
    fn missing_and_short_essays_are_seen() {
        let check = |path, text| check_essay(&Source::new(path, text));
        expect(check("quinion/src/units.rs", "//! One\n//!\n//! three.\n"), &[]);
        expect(check("quinion/tests/x.rs", "#![cfg(x)]\n//! One\n//!\n//! three.\n"), &[]);
        expect(check("quinion/src/units.rs", "\n//! One\n//!\n//! three.\n"), &[(1, "0 lines")]);
        for module in ["quinion/src/arena/mod.rs", "view/src/arena/mod.rs"] {
            expect(check(module, "//! One\n//!\n//! three.\n"), &[(1, "3 lines")]);
        }
        expect(check("quinion/examples/hello.rs", "//! One.\n"), &[]);
    }

    #[test]
    fn essays_with_the_name_of_another_file_are_seen() {
        let check = |path, text| check_title(&Source::new(path, text));
        expect(check("p/src/death_notice.rs", "//! Death notice: x.\n"), &[]);
        expect(check("p/src/stats.rs", "//! Statistics: x.\n"), &[]);
        expect(check("p/src/arena/mod.rs", "//! Arena: x.\n"), &[]);
        expect(check("p/src/io.rs", "//! The shapes of the standard library: x.\n"), &[]);
        expect(check("p/src/main.rs", "//! Restore: x.\n"), &[]);
        expect(check("p/tests/rules.rs", "//! Never wrong: x.\n"), &[]);
        expect(check("p/src/death_notice.rs", "//! Last word: x.\n"), &[(1, "begins with `Last word`")]);
        expect(check("p/src/spill/mod.rs", "//! Carry: x.\n"), &[(1, "is named `spill`")]);
    }

    #[test]
    fn unsafe_code_is_seen() {
        let check = |path, text| check_unsafe(&Source::new(path, text));
        let (allowed, other) = ("quinion/src/arena/view.rs", "quinion/src/cache.rs");
        expect(check(allowed, "// SAFETY: it is.\nlet x = unsafe { *p };"), &[]);
        expect(check(allowed, "unsafe fn f();\nlet x = unsafe { *p };"), &[(2, "without a SAFETY")]);
        expect(check(allowed, "unsafe impl Send for X {}"), &[(1, "`unsafe impl`")]);
        expect(check(other, "// SAFETY: it is.\nlet x = unsafe { *p };"), &[(2, "named files")]);
        expect(check(other, "// unsafe\n#![deny(unsafe_code)]\nlet x = \"unsafe { }\";"), &[]);
    }

    #[test]
    fn orderings_without_a_partner_are_seen() {
        let check = |text| check_orderings(&Source::new("quinion/src/arena/view.rs", text));
        expect(check("x.load(Ordering::Relaxed);\na.cmp(&b) == Ordering::Less;"), &[]);
        expect(check("// Acquire, partner: the store in `f`.\nx.load(Ordering::Acquire);"), &[]);
        expect(check("x.load(Ordering::Acquire); // Partner: `f`"), &[]);
        expect(check("// SeqCst: see the head of this file.\nx.load(Ordering::SeqCst);"), &[]);
        expect(check("// Acquire, to be sure.\nx.load(Ordering::Acquire);"), &[(2, "`Ordering::Acquire`")]);
        expect(check("use Ordering::{Acquire, Release};"), &[(1, "imported by name")]);
        let far = format!("// partner: f\n{}x.load(Ordering::SeqCst);", "\n".repeat(COMMENT_REACH));
        expect(check(&far), &[(2 + COMMENT_REACH, "SeqCst")]);
    }

    #[test]
    fn untidy_lines_are_seen() {
        let check = |text: &str| check_lines(&Source::new("x.rs", text));
        let long = "x".repeat(LINE_CHARACTERS_MAX);
        expect(check(&format!("{long}\n{long}y\n//! | {long} |")), &[(2, "121 characters")]);
        expect(check("a\tb\nc \nd\u{e9}"), &[(1, "a tab"), (2, "a blank"), (3, "not ASCII")]);
    }

    #[test]
    fn forbidden_words_and_places_are_seen() {
        let check = |text: &str| check_words(&Source::new("x.rs", text));
        for word in forbidden_words() {
            expect(check(&format!("\n// {word} later")), &[(2, &word)]);
        }
        for place in forbidden_places() {
            expect(check(&format!("open(\"{place}/x\")")), &[(1, &place)]);
            expect(check(&format!("the {place}")), &[(1, &place)]);
            expect(check(&format!("tree{place}, ..{place}, {place}s, https://host.example{place}")), &[]);
        }
    }

    #[test]
    fn long_functions_are_measured() {
        let body = "    x();\n".repeat(FUNCTION_LINES_MAX - 2);
        let text = |body: &str| format!("fn f(a: [u8; 2]) -> u8\n{{\n{body}}}\nfn g();\ntype F = fn(u8);\n");
        let check = |text: &str| check_function_lengths(&Source::new("x.rs", text));
        expect(check(&text(&body[9..])), &[]);
        expect(check(&text(&body)), &[(1, "`f` has 71 lines")]);
    }

    #[test]
    fn lettered_names_given_twice_are_seen() {
        let sources = ["fn a01_one() {}\nfn a01_two() {}\nfn x() {}", "fn x() {}\nfn a01_one() {}"];
        let sources = sources.map(|text| Source::new("x.rs", text));
        expect(check_lettered_names(&sources), &[(2, "`a01_one`")]);
    }

    #[test]
    fn lettered_tests_without_their_statement_are_seen() {
        let check = |text| check_statements(&Source::new("quinion/tests/x.rs", text));
        let right = "fn a01_of_no_test() {}\n#[test]\nfn no_letter() {}\n/// A01: it is so.\n///\n/// 1. More.\n\
                     #[test]\n#[should_panic(expected = \"no\")]\nfn a01_one() {}\nproptest! {\n    \
                     /// Q02: it is so.\n    #[test]\n    fn q02_any(a: u8) {}\n}\n\
                     /// E04, E05: it is so.\n#[test]\nfn e04_e05_both() {}\n\
                     /// R02 to R05: it is so.\n#[tokio::test(flavor = \"x\")]\nasync fn r02_to_r05_all() {}";
        expect(check(right), &[]);
        let wrong = "#[test]\nfn a01_none() {}\n// A02: it is so.\n#[test]\nfn a02_plain() {}\n\
                     /// A03 it is so.\n#[test]\nfn a03_colon() {}\n/// A05: of another.\n#[test]\nfn a04_other() {}\n\
                     /// It is so.\n/// A06: late.\n#[test]\nfn a06_late() {}\n\
                     /// E04: one.\n#[test]\nfn e04_e05_both() {}\n\
                     /// B01: it is so.\n\n#[test]\nfn b01_apart() {}\n/// B02:\n#[test]\nfn b02_empty() {}";
        let lines = [(2, "A01"), (5, "A02"), (8, "A03"), (11, "A04"), (15, "A06"), (18, "E04, E05")];
        let expected: Vec<_> = lines.into_iter().chain([(22, "B01"), (25, "B02")]).collect();
        expect(check(wrong), &expected);
    }

    #[test]
    fn test_names_without_a_subject_are_seen() {
        let check = |text| check_test_subjects(&Source::new("quinion/tests/x.rs", text));
        let right = "fn who_asks() {}\n#[test]\nfn a_page_is_read() {}\nfn what_is_read() {}\n\
                     #[test]\n#[ignore]\nfn whole_pages_are_read() {}\n#[cfg(test)]\nfn what_is_known() {}\n\
                     #[test]\nfn an_error_says_what_to_do() {}";
        expect(check(right), &[]);
        let wrong = "#[test]\nfn who_asks_waits() {}\n\
                     proptest! {\n    #[test]\n    fn what_is_read_is_right(a: u8) {}\n}\n\
                     #[test]\n#[ignore]\nfn e02_e03_nobody_waits() {}\n\
                     #[tokio::test(flavor = \"x\")]\nasync fn whatever_is_read() {}\n\
                     #[test]\nfn a_file_holds_what_a_vector_holds() {}";
        let names = ["who_asks_waits", "what_is_read_is_right", "e02_e03_nobody_waits", "whatever_is_read"];
        let inside = "a_file_holds_what_a_vector_holds";
        expect(check(wrong), &[(2, names[0]), (5, names[1]), (9, names[2]), (11, names[3]), (13, inside)]);
    }

    #[test]
    fn a_table_that_differs_is_seen() {
        let text = "# A\n## Modules\n| room | |\n|---|---|\n| `units` | x |\n| `arena` | `y` |\n\n## More\n| `z` | |\n";
        let check = |expected: &[&str]| {
            let expected: Vec<String> = expected.iter().map(|name| name.to_string()).collect();
            check_table(&Source::new("A.md", text), "## Modules", &expected)
        };
        expect(check(&["units", "arena"]), &[]);
        expect(check(&["arena", "units"]), &[(2, "lists")]);
        expect(check(&["units", "arena", "cache"]), &[(2, "lists")]);
    }

    #[test]
    fn variants_are_read_from_their_enum() {
        let text =
            "enum Other { X }\n/// A rank.\npub enum Rank {\n    /// One.\n    Low = 1,\n    High = 2,\n}\n";
        assert_eq!(variants(&Source::new("x.rs", text), "Rank"), ["Low", "High"]);
    }

    #[test]
    fn a_readme_that_differs_is_seen() {
        let hello = Source::new("hello.rs", "fn main() {\n}\n");
        let check = |text| check_readme(&Source::new("README.md", text), &hello);
        expect(check("# Q\n```rust\nfn main() {\n}\n```\n"), &[]);
        expect(check("# Q\n```rust\nfn main() {\n} \n```\n"), &[(4, "differs")]);
        expect(check("# Q\n"), &[(1, "no Rust example")]);
    }

    #[test]
    fn a_long_readme_is_seen() {
        let check = |text: &str| check_readme_size(&Source::new("README.md", text));
        let wide = "x".repeat(LINE_CHARACTERS_MAX + 1);
        expect(check(&format!("{}\n| {wide} |\n```sh\n{wide}\n```\n", &wide[1..])), &[]);
        expect(
            check(&format!("a\n{wide}\n```\n```\n{wide}")),
            &[(2, "121 characters"), (5, "121 characters")],
        );
        expect(check(&"a\n".repeat(README_LINES_MAX)), &[]);
        expect(check(&"a\n".repeat(README_LINES_MAX + 1)), &[(151, "151 lines")]);
    }
}
