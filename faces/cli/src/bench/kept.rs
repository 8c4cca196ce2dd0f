//! Kept: what a run leaves in the folder of `--out`.
//!
//! ```text
//!   DIR/rows.jsonl     the lines of `--json`, of all experiments
//!   DIR/series.jsonl   how repetitions went, interval by interval; empty if no experiment of the run tells
//!   DIR/machine.txt    what the numbers depend on besides the code
//!   DIR/index.html     the same as one page
//! ```
//!
//! They are written when all is measured, each under another name first: a run that is interrupted leaves what was
//! there before, and whoever reads a file meanwhile reads a whole one. That the folder can be written is found out
//! before anything is measured.

use std::fs;
use std::path::{Path, PathBuf};

use super::page::{Section, page};
use super::rows::Row;

const LINES: &str = "rows.jsonl";
const SERIES: &str = "series.jsonl";
const MACHINE: &str = "machine.txt";
const PAGE: &str = "index.html";

/// A folder, and what is to be kept in it.
#[derive(Debug)]
pub struct Kept {
    folder: PathBuf,
    sections: Vec<Section>,
}

impl Kept {
    /// In `folder`, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made, or not be written into.
    pub fn new(folder: &Path) -> Result<Self, String> {
        let made = fs::create_dir_all(folder).and_then(|()| {
            Ok(rustix::fs::access(folder, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)?)
        });
        made.map_err(|error| wrong(folder, &error))?;
        Ok(Self { folder: folder.to_owned(), sections: Vec::new() })
    }

    /// One more experiment is over.
    pub fn add(&mut self, section: Section) {
        self.sections.push(section);
    }

    /// Writes the lines and the page; where the page is.
    ///
    /// # Errors
    /// One of them cannot be written.
    pub fn write(&self, machine: &str) -> Result<PathBuf, String> {
        let rows = || self.sections.iter().flat_map(|section| &section.rows);
        self.write_file(LINES, &rows().map(Row::json).collect::<String>())?;
        self.write_file(SERIES, &rows().filter_map(Row::series_json).collect::<String>())?;
        self.write_file(MACHINE, machine)?;
        self.write_file(PAGE, &page(machine, &self.sections))
    }

    fn write_file(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let (path, other) =
            (self.folder.join(name), self.folder.join(format!(".{name}.{}", std::process::id())));
        let written = fs::write(&other, text).and_then(|()| fs::rename(&other, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&other); // it may not even be there
            wrong(&path, &error)
        })?;
        Ok(path)
    }
}

fn wrong(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}; name another folder by --out", path.display())
}
