//! Libraries: which files a program's dynamic linker would load for it.
//!
//! ```text
//!   program --asks for names--> where?  the folders that the asker names ($ORIGIN is its own)
//!                                       LD_LIBRARY_PATH
//!                                       the linker's own folder, and the system's
//!   each of them asks for more names, until nothing is new
//! ```
//!
//! The linker's cache is not read: its files lie in the folders that its configuration lists, and these are searched.

use std::collections::{HashSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use quinion_run::elf::Elf;

pub struct Loaded {
    pub path: PathBuf,
    pub elf: Elf,
}

/// The files that a program loads at its start.
pub struct Libraries {
    /// The program's libraries in the order in which they are found; the program is not among them.
    pub found: Vec<Loaded>,
    /// Names of which no file was found.
    pub missing: Vec<String>,
}

/// The libraries of the program `elf` at `path`, whose linker is `linker`.
pub fn of(path: &Path, elf: &Elf, linker: &Path) -> Libraries {
    let system = system_folders(linker);
    let mut libraries = Libraries { found: Vec::new(), missing: Vec::new() };
    let mut seen = HashSet::new();
    let mut asked: VecDeque<(String, Vec<PathBuf>)> = wants(path, elf).into();
    while let Some((name, folders)) = asked.pop_front() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let found = folders.iter().chain(&system).map(|folder| folder.join(&name)).find_map(|path| {
            let elf = Elf::open(&path).ok()?;
            Some(Loaded { path: fs::canonicalize(&path).unwrap_or(path), elf })
        });
        match found {
            Some(loaded) => {
                asked.extend(wants(&loaded.path, &loaded.elf));
                libraries.found.push(loaded);
            }
            None => libraries.missing.push(name),
        }
    }
    libraries
}

/// The names a file needs, each with the folders that the file names for it.
fn wants(path: &Path, elf: &Elf) -> Vec<(String, Vec<PathBuf>)> {
    let origin =
        fs::canonicalize(path).ok().and_then(|path| Some(path.parent()?.to_owned())).unwrap_or_default();
    let folders: Vec<PathBuf> = elf
        .search_paths()
        .iter()
        .flat_map(|paths| paths.split(':'))
        .map(|folder| {
            let origin = origin.to_string_lossy();
            PathBuf::from(folder.replace("$ORIGIN", &origin).replace("${ORIGIN}", &origin))
        })
        .collect();
    elf.needed().into_iter().map(|name| (name, folders.clone())).collect()
}

fn system_folders(linker: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os("LD_LIBRARY_PATH")
        .map(|paths| std::env::split_paths(&paths).collect())
        .unwrap_or_default();
    folders.extend(fs::canonicalize(linker).ok().and_then(|path| Some(path.parent()?.to_owned())));
    folders.extend(configured());
    folders.extend(["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"].map(PathBuf::from));
    folders
}

fn configured() -> Vec<PathBuf> {
    let files = fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten().map(|entry| entry.path());
    let lines: Vec<String> = files
        .chain([PathBuf::from("/etc/ld.so.conf")])
        .filter_map(|file| fs::read_to_string(file).ok())
        .flat_map(|text| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>())
        .collect();
    lines.iter().filter(|line| line.starts_with('/')).map(PathBuf::from).collect()
}
