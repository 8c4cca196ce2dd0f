//! Api: the libraries' public interfaces, beside what is recorded of them.
//!
//! ```text
//!   cargo doc --no-deps -p quinion .. --features tokio,http,pack        the libraries' documentation, without warnings
//!     struct.File.html    its declaration, the headers of its methods, the traits that it implements
//!   quinion/public-api.txt     a line for each, which a change of the interface has to change too
//! ```
//!
//! What rustdoc shows is what is public, so its pages are read. They look different with another compiler: the record
//! names its compiler, and with another the step is skipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::step::{Action, Failure, Step};
use crate::tools::{cargo, repository, rustc_line, target_folder, with};

struct Library {
    package: &'static str,
    name: &'static str,
    folder: &'static str,
}

const LIBRARIES: [Library; 6] = [
    Library { package: "quinion", name: "quinion", folder: "quinion" },
    Library { package: "quinion-owner", name: "quinion_owner", folder: "owner" },
    Library { package: "quinion-disk", name: "quinion_disk", folder: "disk" },
    Library { package: "quinion-object", name: "quinion_object", folder: "object" },
    Library { package: "quinion-service", name: "quinion_service", folder: "service" },
    Library { package: "quinion-vm", name: "quinion_vm", folder: "vm" },
];
/// Documents these, and what else is used as a library.
const DOCUMENT: &str = "doc --no-deps -p quinion -p quinion-view -p quinion-disk -p quinion-owner -p quinion-object \
                        -p quinion-service -p quinion-vm -p quinion-run --lib \
                        --features tokio,http,pack";

const HEAD: &str = "\
# The public interface of this library: `cargo xtask record-api` writes this file, `cargo xtask test api` compares.
# As the documentation of this compiler shows it:
";
/// Kinds of pages that show something of the interface, by their prefixes.
const KINDS: [&str; 8] = ["struct.", "enum.", "trait.", "fn.", "type.", "constant.", "macro.", "union."];

pub fn step() -> Step {
    let step = |action| Step::new("api", action);
    let recorded = |library: &Library| fs::read_to_string(library.record()).unwrap_or_default();
    let by_another = |library: &Library| {
        let by = recorded(library).lines().nth(2).unwrap_or_default().to_owned();
        (by != compiler()).then_some(by)
    };
    match LIBRARIES.iter().find_map(by_another) {
        None => step(Action::Call(compare)),
        Some(by) => {
            step(Action::Skip(format!("an interface was recorded with {by}, and this is {}", compiler())))
        }
    }
}

/// Builds the documentation anew, once in a run of this program.
pub fn document() -> Result<(), Failure> {
    static IS_DONE: OnceLock<()> = OnceLock::new();
    if IS_DONE.get().is_some() {
        return Ok(());
    }
    // Else pages of what is no longer public would be read, too.
    for library in &LIBRARIES {
        let _ = fs::remove_dir_all(library.pages());
    }
    let status = with("RUSTDOCFLAGS", "-D warnings", cargo(DOCUMENT)).status();
    let status = status.map_err(|error| Failure::new(format!("cargo cannot be run: {error}")))?;
    if !status.success() {
        return Err(Failure::new(format!("the documentation cannot be built: {status}")));
    }
    let _ = IS_DONE.set(());
    Ok(())
}

pub fn record() -> Result<(), Failure> {
    document()?;
    for library in &LIBRARIES {
        let (text, file) = (library.interface()?, library.record());
        fs::write(&file, text).map_err(|error| failed(&file, &error))?;
    }
    Ok(())
}

fn compare() -> Result<(), Failure> {
    document()?;
    let mut changed = 0;
    for library in &LIBRARIES {
        let file = library.record();
        let recorded = fs::read_to_string(&file).map_err(|error| failed(&file, &error))?;
        for change in changes(&recorded, &library.interface()?) {
            println!("{}: {change}", library.package);
            changed += 1;
        }
    }
    if changed == 0 {
        return Ok(());
    }
    Err(Failure::new(format!(
        "a public interface has changed in {changed} lines; if that is meant, `cargo xtask record-api`, and tell \
         users in CHANGELOG.md"
    )))
}

/// Lines that were removed, and lines that were added.
fn changes(recorded: &str, now: &str) -> Vec<String> {
    let missing = |from: &str, sign: char, other: &str| -> Vec<String> {
        let is_new = |line: &&str| !other.lines().any(|known| known == *line);
        from.lines().filter(is_new).map(|line| format!("{sign} {line}")).collect()
    };
    [missing(recorded, '-', now), missing(now, '+', recorded)].concat()
}

fn compiler() -> String {
    let line = rustc_line("--version", "").unwrap_or_default();
    line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("{}: {error}", path.display()))
}

impl Library {
    fn record(&self) -> PathBuf {
        repository().join(self.folder).join("public-api.txt")
    }

    fn pages(&self) -> PathBuf {
        target_folder().join("doc").join(self.name)
    }

    fn interface(&self) -> Result<String, Failure> {
        let root = self.pages();
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

/// The declarations of a page: the item, its members, and the traits that it implements.
fn lines_of(page: &str) -> Vec<String> {
    // Implementations that every type has follow these.
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

fn between<'a>(text: &'a str, begin: &'a str, end: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(begin).skip(1).map(move |part| part.split(end).next().unwrap_or_default())
}

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
    fn removed_and_added_items_are_reported() {
        assert_eq!(changes("a\nb\n", "a\nc\n"), ["- b", "+ c"]);
        assert!(changes("a\n", "a\n").is_empty());
    }
}
