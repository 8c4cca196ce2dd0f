//! Saved run: what a run leaves in the folder of `--out`.
//!
//! ```text
//!   DIR/rows.jsonl     the lines of `--json`, of all experiments
//!   DIR/series.jsonl   how repetitions went, interval by interval; empty if no experiment of the run tells
//!   DIR/machine.txt    what the numbers depend on besides the code
//!   DIR/index.html     the same as one page
//! ```
//!
//! They are written when all is measured, each under another name first: a run that is interrupted leaves the older
//! files, and a reader never sees a part of one. Before anything is measured, a file in the folder shows that the
//! folder can be made and has room. Folders that were made for a run that leaves nothing in them are removed by the
//! sweeper of `folder.rs`, which removes what is empty and nothing else.
//!
//! Not an invariant: that there is still room when all is measured.

use std::fs;
use std::path::{Path, PathBuf};

use super::folder::EmptyFolders;
use super::page::{Section, page};
use super::recorded::{LINES, MACHINE, SERIES};
use super::rows::Row;

const PAGE: &str = "index.html";
/// A file that shows whether there is room, larger than what most runs leave.
const PROBE: &str = "probe";
const PROBE_BYTES: usize = 1 << 20;

/// A folder, and what is to be kept in it.
#[derive(Debug)]
pub struct Kept {
    folder: PathBuf,
    sections: Vec<Section>,
    _made: EmptyFolders,
}

impl Kept {
    /// In `folder`, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made, or not be written into, or there is no room in it.
    pub fn new(folder: &Path) -> Result<Self, String> {
        let made = EmptyFolders::make(folder).map_err(|error| wrong(folder, &error))?;
        let kept = Self { folder: folder.to_owned(), sections: Vec::new(), _made: made };
        let probe = folder.join(format!(".{PROBE}.{}", std::process::id()));
        let written = fs::write(&probe, vec![7; PROBE_BYTES]);
        let removed = fs::remove_file(&probe);
        written.and(removed).map_err(|error| wrong(folder, &error))?;
        Ok(kept)
    }

    pub fn add(&mut self, section: Section) {
        self.sections.push(section);
    }

    /// Writes the lines and the page, and returns the page's path.
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
