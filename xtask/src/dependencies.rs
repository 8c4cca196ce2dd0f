//! Dependencies: what is linked into Quinion, checked against `deny.toml`, and that the libraries can be published.
//!
//! ```text
//!   cargo xtask nightly deny       licences, forbidden crates and sources of each lock file, by cargo-deny
//!   cargo xtask nightly publish    each library is packed, and built from what was packed
//!   cargo xtask nightly sbom       target/sbom/NAME.cdx.json: what is linked into each thing that users install, as a
//!                                  software bill of materials (CycloneDX 1.5), by cargo-cyclonedx
//!   target/tools/cargo/bin         cargo-deny and cargo-cyclonedx, installed when they are first needed
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::step::{Action, Failure, Step, execute};
use crate::tools::{cargo, commit_time, repository, target_folder};

/// The versions with which these steps were tested.
const DENY: &str = "0.20.2";
const CYCLONEDX: &str = "0.5.9";

/// The workspaces, each with a lock file of its own.
const MANIFESTS: [&str; 5] = [
    "Cargo.toml",
    "frontends/preload/Cargo.toml",
    "frontends/python/Cargo.toml",
    "frontends/sqlite/Cargo.toml",
    "fuzz/Cargo.toml",
];

/// The libraries for Rust, in the order in which they need each other. All else is published as packages, wheels or
/// images.
const LIBRARIES: [&str; 7] = [
    "quinion-view",
    "quinion-disk",
    "quinion",
    "quinion-owner",
    "quinion-object",
    "quinion-service",
    "quinion-vm",
];

/// Packages that users install, which have a bill of materials: workspace, folder and package.
const INSTALLED: [[&str; 3]; 7] = [
    ["Cargo.toml", "frontends/cli", "quinion-cli"],
    ["Cargo.toml", "frontends/serve", "quinion-serve"],
    ["Cargo.toml", "frontends/s3", "quinion-s3"],
    ["Cargo.toml", "frontends/capi", "quinion-capi"],
    ["frontends/preload/Cargo.toml", "frontends/preload", "quinion-preload"],
    ["frontends/python/Cargo.toml", "frontends/python", "quinion-python"],
    ["frontends/sqlite/Cargo.toml", "frontends/sqlite", "quinion-sqlite"],
];

pub fn deny() -> Step {
    Step::new("deny", Action::Call(check))
}

pub fn publish() -> Step {
    if let Some(wrong) = LIBRARIES.iter().find_map(|name| undescribed(name, &manifest(name))) {
        return Step::new("publish", Action::Fail(Failure::new(wrong)));
    }
    let packages = LIBRARIES.map(|name| format!("-p {name}")).join(" ");
    Step::new("publish", Action::Run(cargo(&format!("package --locked --allow-dirty {packages}"))))
}

pub fn sbom() -> Step {
    Step::new("sbom", Action::Call(bills))
}

fn check() -> Result<(), Failure> {
    let program = installed("cargo-deny", DENY)?;
    MANIFESTS.iter().try_for_each(|manifest| {
        let mut deny = Command::new(&program);
        deny.current_dir(repository()).args([
            "--locked",
            "--config",
            "deny.toml",
            "--manifest-path",
            manifest,
        ]);
        // The list of known holes comes from the network: it is checked at a release (CONTRIBUTING.md).
        execute(deny.args(["check", "--hide-inclusion-graph", "licenses", "bans", "sources"]))
    })
}

/// The manifest of a library for Rust.
fn manifest(name: &str) -> String {
    let folder = name.strip_prefix("quinion-").unwrap_or(name);
    fs::read_to_string(repository().join(folder).join("Cargo.toml")).unwrap_or_default()
}

/// Keywords and categories that the registry takes at most, and bytes of a keyword.
const WORDS_MAX: usize = 5;
const KEYWORD_BYTES_MAX: usize = 20;

/// The first thing that this manifest lacks for the library's page in the registry and for its documentation.
fn undescribed(name: &str, manifest: &str) -> Option<String> {
    let lacks = |what: String| Some(format!("{name}: its Cargo.toml {what}"));
    let documentation = format!("documentation = \"https://docs.rs/{name}\"");
    let lines = [
        "license.workspace = true",
        "repository.workspace = true",
        "readme.workspace = true",
        &documentation,
    ];
    if let Some(line) = lines.into_iter().find(|line| !manifest.lines().any(|known| known == *line)) {
        return lacks(format!("lacks `{line}`"));
    }
    let list = |key: &str| {
        let line = manifest.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "))?;
        Some(line.split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>())
    };
    let is_keyword = |word: &String| {
        let is_of_one = |c: char| c.is_ascii_alphanumeric() || "-_+".contains(c);
        word.len() <= KEYWORD_BYTES_MAX
            && word.starts_with(|c: char| c.is_ascii_alphabetic())
            && word.chars().all(is_of_one)
    };
    for key in ["keywords", "categories"] {
        let words = list(key).unwrap_or_default();
        if words.is_empty() || words.len() > WORDS_MAX || !words.iter().all(is_keyword) {
            return lacks(format!(
                "needs one to {WORDS_MAX} {key}, of {KEYWORD_BYTES_MAX} letters at most each"
            ));
        }
    }
    if !manifest.contains("description = \"") {
        return lacks("lacks a description".to_owned());
    }
    // A library is for Linux alone, so that it does not compile for the other targets.
    let metadata = "[package.metadata.docs.rs]\n";
    if !manifest.contains(metadata)
        || list("targets").is_none_or(|targets| targets.iter().any(|t| !t.contains("linux")))
    {
        return lacks("needs [package.metadata.docs.rs] with `targets`, each a Linux".to_owned());
    }
    let shown = list("features").unwrap_or_default();
    let hidden = features(manifest).into_iter().find(|feature| !shown.contains(feature));
    hidden.and_then(|feature| lacks(format!("has a feature `{feature}` that docs.rs would not show")))
}

/// The features that a manifest declares, but for the default ones.
fn features(manifest: &str) -> Vec<String> {
    let section = manifest.lines().skip_while(|line| *line != "[features]").skip(1);
    let lines = section.take_while(|line| !line.starts_with('['));
    let names = lines
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()));
    names.filter(|name| name != "default").collect()
}

fn bills() -> Result<(), Failure> {
    let folder = target_folder().join("sbom");
    fs::create_dir_all(&folder).map_err(|error| Failure::of(&folder, &error))?;
    let program = installed("cargo-cyclonedx", CYCLONEDX)?;
    let mut manifests = INSTALLED.map(|[manifest, ..]| manifest).to_vec();
    manifests.dedup();
    for manifest in manifests {
        let mut write = Command::new(&program);
        write.current_dir(repository()).args(["cyclonedx", "--quiet", "--manifest-path", manifest]);
        write.args(["--format", "json", "--spec-version", "1.5", "--no-build-deps"]);
        // Without a time of its own, so that the same tree gives the same bill.
        execute(write.env("SOURCE_DATE_EPOCH", commit_time()?))?;
    }
    for [_, place, name] in INSTALLED {
        let written = repository().join(place).join(format!("{name}.cdx.json"));
        let bill = fs::read_to_string(&written).map_err(|error| Failure::of(&written, &error))?;
        let to = folder.join(format!("{name}.cdx.json"));
        fs::write(&to, without_folder(&bill, &repository())).map_err(|error| Failure::of(&to, &error))?;
        println!("{}: {} components", to.display(), components(&bill));
    }
    remove_bills(&repository())
}

/// The bill without the folder that it was made in: packages of the repository are named by their place in it.
fn without_folder(bill: &str, repository: &Path) -> String {
    bill.replace(&format!("file://{}/", repository.display()), "file:///")
}

fn components(bill: &str) -> usize {
    bill.matches("\"purl\": ").count()
}

/// The program writes a bill beside each manifest of a workspace, wanted or not.
fn remove_bills(folder: &Path) -> Result<(), Failure> {
    let entries = fs::read_dir(folder).map_err(|error| Failure::of(folder, &error))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !path.is_symlink() && name != "target" && !name.starts_with('.') {
            remove_bills(&path)?;
        } else if name.ends_with(".cdx.json") {
            fs::remove_file(&path).map_err(|error| Failure::of(&path, &error))?;
        }
    }
    Ok(())
}

/// A program of cargo's, which is built if it is missing or of another version.
fn installed(name: &str, version: &str) -> Result<PathBuf, Failure> {
    let root = target_folder().join("tools/cargo");
    let program = root.join("bin").join(name);
    let says = Command::new(&program).arg("--version").output();
    let is_there = says.is_ok_and(|says| String::from_utf8_lossy(&says.stdout).contains(version));
    if !is_there {
        println!("{name} {version} is missing; it is built in some minutes");
        execute(cargo("install --locked --root").arg(&root).arg(format!("{name}@{version}")))?;
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bills_name_no_folder_of_the_machine() {
        let bill = "\"bom-ref\": \"path+file:///src/of/quinion/view#quinion-view@0.1.0\", \
            \"purl\": \"pkg:cargo/quinion-view@0.1.0?download_url=file:///src/of/quinion/view\"";
        let bill = without_folder(bill, Path::new("/src/of/quinion"));
        assert!(bill.starts_with("\"bom-ref\": \"path+file:///view#quinion-view@0.1.0\""), "{bill}");
        assert!(!bill.contains("/src/of"), "{bill}");
        assert_eq!(components(&bill), 1);
    }

    #[test]
    fn each_library_says_what_the_registry_and_its_documentation_show() {
        for name in LIBRARIES {
            assert_eq!(undescribed(name, &manifest(name)), None);
        }
    }

    #[test]
    fn a_manifest_that_lacks_something_is_reported() {
        let whole = manifest("quinion");
        for line in whole.lines().filter(|line| {
            let keys =
                ["description", "license", "repository", "readme", "documentation", "keywords", "categories"];
            let more = ["[package.metadata", "features =", "targets ="];
            keys.iter().chain(&more).any(|key| line.starts_with(key))
        }) {
            let lacking = whole.replacen(&format!("{line}\n"), "", 1);
            assert!(undescribed("quinion", &lacking).is_some(), "{line}");
        }
        for (one, other) in [
            ("\"page-cache\"", "\"the-page-cache-of-a-kernel\""),
            ("\"storage\"", "\"storage\", \"disk\""),
            ("linux", "windows"),
            ("tokio = [", "smol = []\ntokio = ["),
        ] {
            assert!(undescribed("quinion", &whole.replace(one, other)).is_some(), "{one}");
        }
    }

    #[test]
    fn installed_packages_are_in_their_folders() {
        for [manifest, folder, name] in INSTALLED {
            assert!(repository().join(manifest).exists());
            let text = fs::read_to_string(repository().join(folder).join("Cargo.toml")).unwrap();
            assert!(text.contains(&format!("name = \"{name}\"")), "{folder}");
        }
    }
}
