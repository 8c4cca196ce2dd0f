//! The surface: `quinion.h` equals the source, and all lists of functions are complete.
//!
//! ```text
//!   src/*.rs --cbindgen--> include/quinion.h       compared; QUINION_RECORD=1 writes it
//!   the functions of src/  = quinion.map           the symbols of the shared library
//!                          = ffi_call(..)            each body is one call of it
//!                          < tests/c/calls.c       each is called there, under sanitizers and valgrind
//! ```
//!
//! Only the source is read here; `cargo xtask test capi` builds the libraries and runs C.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const FILES: [&str; 11] =
    ["ffi", "cache", "pool", "file", "batch", "pin", "memory", "backend", "client", "stats", "args"];

/// Functions that cannot fail, and have no number that could say so.
const WITHOUT_BORDER: [&str; 2] = ["qn_error_message", "qn_version"];

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(package().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn source(file: &str) -> PathBuf {
    package().join("src").join(file).with_extension("rs")
}

fn header() -> String {
    let config = cbindgen::Config::from_root_or_default(package());
    let builder = cbindgen::Builder::new().with_config(config);
    let builder = FILES.iter().fold(builder, |builder, file| builder.with_src(source(file)));
    let mut text = Vec::new();
    builder.generate().expect("cbindgen understands the source").write(&mut text);
    String::from_utf8(text).expect("it is ASCII")
}

struct Function {
    name: String,
    body: String,
}

fn functions() -> Vec<Function> {
    let mut functions = Vec::new();
    for file in FILES {
        let text = fs::read_to_string(source(file)).unwrap();
        for part in text.split("extern \"C\" fn ").skip(1) {
            let (name, rest) = part.split_once('(').expect("a function has parameters");
            let (_, body) = rest.split_once("{\n").expect("a function has a body");
            let body = body.split("\n}\n").next().expect("it ends");
            functions.push(Function { name: name.to_owned(), body: body.to_owned() });
        }
    }
    assert!(functions.len() > 30, "only {} functions are found", functions.len());
    functions
}

#[test]
fn the_header_is_generated_from_the_source() {
    let (now, path) = (header(), package().join("include/quinion.h"));
    if std::env::var_os("QUINION_RECORD").is_some() {
        fs::write(&path, &now).unwrap();
    }
    let recorded = fs::read_to_string(&path).unwrap_or_default();
    let differs = now.lines().zip(recorded.lines()).find(|(now, recorded)| now != recorded);
    assert!(
        now == recorded,
        "include/quinion.h is not what the source says, first at {differs:?}; write it anew by \
         QUINION_RECORD=1 cargo test -p quinion-capi --test surface"
    );
}

#[test]
fn every_function_is_one_call_of_the_border() {
    for Function { name, body } in functions() {
        let lines = body.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        let code: String = lines.collect::<Vec<_>>().join("\n");
        let is_behind = code.starts_with("ffi_call(") && code.ends_with(')');
        assert!(
            is_behind || WITHOUT_BORDER.contains(&&*name),
            "{name} does more than call `ffi_call`:\n{code}"
        );
    }
}

#[test]
fn the_map_has_each_function_and_no_other() {
    let map = read("quinion.map");
    let words = map.split(|c: char| !c.is_alphanumeric() && c != '_');
    let mapped: BTreeSet<String> = words.filter(|word| word.starts_with("qn_")).map(str::to_owned).collect();
    let functions: BTreeSet<String> = functions().into_iter().map(|function| function.name).collect();
    assert_eq!(mapped, functions, "quinion.map (left) and src (right) name different functions");
}

#[test]
fn every_function_is_called_from_c() {
    let calls = read("tests/c/calls.c");
    for Function { name, .. } in functions() {
        assert!(calls.contains(&format!("{name}(")), "tests/c/calls.c does not call {name}");
    }
}

#[test]
fn the_guide_shows_the_example_that_is_compiled() {
    let guide = fs::read_to_string(package().join("../../docs/c.md")).unwrap();
    let (_, shown) = guide.split_once("```c\n").expect("the guide has an example in C");
    let (shown, _) = shown.split_once("```").expect("it ends");
    assert_eq!(shown, read("examples/hello.c"));
    assert!(shown.lines().count() <= 20, "{} lines", shown.lines().count());
}

#[test]
fn every_function_says_what_it_returns_when_it_fails() {
    let header = read("include/quinion.h");
    for Function { name, .. } in functions() {
        let declared = header.replace(&format!("{name}()"), "");
        let (before, _) = declared.split_once(&format!("{name}(")).expect("the header has it");
        let (_, comment) = before.rsplit_once("/*").expect("it has a comment");
        let is_told = comment.contains("Errors:") || WITHOUT_BORDER.contains(&&*name);
        assert!(is_told, "the comment of {name} does not tell its errors");
    }
}
