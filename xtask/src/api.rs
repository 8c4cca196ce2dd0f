//! Api: the library's public interface, beside what is recorded of it.
//!
//! ```text
//!   cargo doc --features restore,tokio --target-dir target/api
//!     struct.File.html    its declaration, the headers of its methods, the traits that it implements
//!   quinion/public-api.txt     a line for each, which a change of the interface has to change too
//! ```
//!
//! What rustdoc shows is what is public, so its pages are what is read. They look
//! different with another compiler: the record names the one it is of, and with
//! another the step is skipped.

use std::fs;
use std::path::{Path, PathBuf};

use crate::step::{Action, Failure, Step};
use crate::tools::{cargo, repository, rustc_line};

const HEAD: &str = "\
# The public interface of the library: `cargo xtask record-api` writes this file, `cargo xtask test api` compares.
# As the documentation of this compiler shows it:
";
const FOLDER: &str = "target/api";
/// Kinds of pages that show something of the interface, by how their names begin.
const KINDS: [&str; 8] = ["struct.", "enum.", "trait.", "fn.", "type.", "constant.", "macro.", "union."];

/// The step that compares.
pub fn step() -> Step {
    let step = |action| Step::new("api", action);
    let recorded = fs::read_to_string(file()).unwrap_or_default();
    let of = recorded.lines().nth(2).unwrap_or_default();
    if of == compiler() {
        return step(Action::Call(compare));
    }
    step(Action::Skip(format!("the interface was recorded with {of}, and this is {}", compiler())))
}

/// Writes the file anew.
pub fn record() -> Result<(), Failure> {
    let text = interface()?;
    fs::write(file(), text).map_err(|error| failed(&file(), &error))
}

fn compare() -> Result<(), Failure> {
    let recorded = fs::read_to_string(file()).map_err(|error| failed(&file(), &error))?;
    let now = interface()?;
    let changes = changes(&recorded, &now);
    if changes.is_empty() {
        return Ok(());
    }
    for change in &changes {
        println!("{change}");
    }
    Err(Failure::new(format!(
        "the public interface has changed in {} lines; if that is meant, `cargo xtask record-api`, and tell users in \
         CHANGELOG.md",
        changes.len()
    )))
}

/// Lines that went, and lines that came.
fn changes(recorded: &str, now: &str) -> Vec<String> {
    let missing = |from: &str, sign: char, other: &str| -> Vec<String> {
        let is_new = |line: &&str| !other.lines().any(|known| known == *line);
        from.lines().filter(is_new).map(|line| format!("{sign} {line}")).collect()
    };
    [missing(recorded, '-', now), missing(now, '+', recorded)].concat()
}

fn file() -> PathBuf {
    repository().join("quinion/public-api.txt")
}

fn compiler() -> String {
    let line = rustc_line("--version", "").unwrap_or_default();
    line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("{}: {error}", path.display()))
}

/// The interface as lines, below the compiler's name.
fn interface() -> Result<String, Failure> {
    let root = repository().join(FOLDER).join("doc/quinion");
    // Pages of what is public no more would be read, too.
    let _ = fs::remove_dir_all(&root);
    let mut command =
        cargo("doc --quiet --no-deps -p quinion --lib --features restore,tokio --target-dir target/api");
    let status = command.status().map_err(|error| Failure::new(format!("cargo cannot be run: {error}")))?;
    if !status.success() {
        return Err(Failure::new(format!("the documentation cannot be built: {status}")));
    }
    let mut text = format!("{HEAD}{}\n", compiler());
    for path in pages(&root)? {
        let page = fs::read_to_string(&path).map_err(|error| failed(&path, &error))?;
        let inside = path.strip_prefix(&root).unwrap_or(&path).with_extension("");
        let name = inside.to_string_lossy().replace('/', "::");
        for line in lines_of(&page) {
            text.push_str(&format!("{name}: {line}\n"));
        }
    }
    Ok(text)
}

/// The pages of what is public, in the order of their names; not those of modules, and none of the hidden one.
fn pages(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).map_err(|error| failed(folder, &error))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "internals" {
            found.extend(pages(&path)?);
        } else if KINDS.iter().any(|kind| name.starts_with(kind)) && name.ends_with(".html") {
            found.push(path);
        }
    }
    Ok(found)
}

/// What a page declares: the item, what belongs to it, and which traits it implements.
fn lines_of(page: &str) -> Vec<String> {
    // What every type has comes behind these.
    let ends = ["id=\"synthetic-implementations-list\"", "id=\"blanket-implementations-list\""];
    let end = ends.iter().filter_map(|end| page.find(end)).min().unwrap_or(page.len());
    let page = &page[..end];
    let traits = page.find("id=\"trait-implementations-list\"").unwrap_or(page.len());
    let (own, traits) = page.split_at(traits);
    let mut lines: Vec<String> =
        between(own, "<pre class=\"rust item-decl\"><code>", "</code></pre>").map(plain).collect();
    let is_wanted = |header: &str| !header.starts_with("impl");
    lines.extend(
        between(own, "<h4 class=\"code-header\">", "</h4>").map(plain).filter(|header| is_wanted(header)),
    );
    lines.extend(between(own, "class=\"variant\">", "</h3>").map(|part| format!("variant {}", plain(part))));
    lines.extend(between(own, "class=\"structfield section-header\">", "</span>").map(plain));
    lines.extend(between(traits, "<h3 class=\"code-header\">", "</h3>").map(plain));
    lines
}

/// The parts of `text` that stand between `begin` and the next `end`.
fn between<'a>(text: &'a str, begin: &'a str, end: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(begin).skip(1).map(move |part| part.split(end).next().unwrap_or_default())
}

/// HTML as text in one line.
fn plain(html: &str) -> String {
    let mut text = String::new();
    for part in html.split('<') {
        let shown = part.split_once('>').map_or(part, |(_, shown)| shown);
        text.push_str(shown);
    }
    for (name, letter) in [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")] {
        text = text.replace(name, letter);
    }
    text.replace('\u{a7}', "").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_methods_and_traits_are_read_from_a_page() {
        let page = "<pre class=\"rust item-decl\"><code><div>#[x]</div>pub struct <b>A</b> {\n  pub a: u8,\n}</code>\
                    </pre>\
                    <div id=\"implementations-list\"><h3 class=\"code-header\">impl A</h3>\
                    <h4 class=\"code-header\">pub fn <a>f</a>(&amp;self) -&gt; <a>B</a>&lt;C&gt;</h4></div>\
                    <div id=\"trait-implementations-list\"><h3 class=\"code-header\">impl Read for A</h3>\
                    <h4 class=\"code-header\">fn read(..)</h4></div>\
                    <div id=\"blanket-implementations-list\"><h3 class=\"code-header\">impl Any for T</h3></div>";
        let expected = ["#[x]pub struct A { pub a: u8, }", "pub fn f(&self) -> B<C>", "impl Read for A"];
        assert_eq!(lines_of(page), expected);
    }

    #[test]
    fn what_went_and_what_came_is_told() {
        assert_eq!(changes("a\nb\n", "a\nc\n"), ["- b", "+ c"]);
        assert!(changes("a\n", "a\n").is_empty());
    }
}
