//! Trace: which pages somebody asked for, one after another.
//!
//! ```text
//!   name.csv        version,time,op,size,lbn         size in bytes, lbn in sectors of 512 bytes (libCacheSim)
//!   name.lis        start count zero request         pages start .. start + count (ARC); `#`: nothing
//!   *.zst           either, compressed
//! ```
//!
//! Pages are numbered anew, in the order of their places, so that what simulates
//! a cache can keep an array of them; the place is kept, because shadows share nodes
//! with their neighbours. Every page of a request is a reference.
//!
//! ARC's traces are of N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
//! FAST 2003. libCacheSim's is of CloudPhysics.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

const SECTOR_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;
/// Pages of one request at most: more is a damaged line, and not a reason to run out of memory.
const REQUEST_PAGES_MAX: u64 = 1 << 20;

/// What was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trace {
    /// What it is called.
    pub name: String,
    /// The pages asked for, in their order; each below `places.len()`.
    pub references: Vec<u32>,
    /// Where each page is, in pages; rising.
    pub places: Vec<u64>,
}

impl Trace {
    /// The references to pages at `asked`.
    pub fn new(name: impl Into<String>, asked: &[u64]) -> Self {
        let unique: HashSet<u64> = asked.iter().copied().collect();
        let mut places: Vec<u64> = unique.into_iter().collect();
        places.sort_unstable();
        assert!(u32::try_from(places.len()).is_ok(), "a trace has fewer than 2^32 pages");
        let number = |place: &u64| places.binary_search(place).expect("each place is listed") as u32;
        let references = asked.iter().map(number).collect();
        Self { name: name.into(), references, places }
    }

    /// How many different pages are asked for.
    pub fn unique(&self) -> usize {
        self.places.len()
    }

    /// Pages of a cache of `percent` % of the pages there are; at least one.
    pub fn cache_pages(&self, percent: f64) -> usize {
        ((self.unique() as f64 * percent / 100.0) as usize).max(1)
    }

    /// Reads the trace in the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read, or a line of it is not understood; which one, and what is expected there.
    pub fn read(path: &Path) -> Result<Self, String> {
        let wrong = |why: String| format!("{}: {why}", path.display());
        let (name, format, is_compressed) = named(path).ok_or_else(|| {
            wrong("is no trace by its name; it should end with .csv or .lis, and perhaps .zst".to_owned())
        })?;
        let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
        let text: Box<dyn Read> = if is_compressed {
            let decoder = ruzstd::decoding::StreamingDecoder::new(BufReader::new(file));
            Box::new(decoder.map_err(|error| wrong(format!("is not compressed by zstd: {error}")))?)
        } else {
            Box::new(file)
        };
        let asked = parse(format, BufReader::new(text)).map_err(wrong)?;
        if asked.is_empty() {
            return Err(wrong("asks for nothing; a trace has at least one request".to_owned()));
        }
        Ok(Self::new(name, &asked))
    }
}

/// The traces in the folder `dir`, by their names; other files are passed over.
///
/// # Errors
/// The folder cannot be read.
pub fn found_in(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let wrong = |error: std::io::Error| format!("{}: {error}", dir.display());
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        if named(&path).is_some() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// What the trace at `path` is called.
pub fn name_of(path: &Path) -> Option<String> {
    named(path).map(|(name, ..)| name)
}

/// How the lines of a trace are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    /// libCacheSim's.
    Csv,
    /// ARC's.
    Lis,
}

/// Name, format and whether it is compressed, by the name of the file.
fn named(path: &Path) -> Option<(String, Format, bool)> {
    let file = path.file_name()?.to_str()?;
    let (plain, is_compressed) = file.strip_suffix(".zst").map_or((file, false), |plain| (plain, true));
    let of = |suffix, format| plain.strip_suffix(suffix).map(|name| (name.to_owned(), format, is_compressed));
    of(".csv", Format::Csv).or_else(|| of(".lis", Format::Lis))
}

/// The pages that the lines of `text` ask for.
fn parse(format: Format, text: impl BufRead) -> Result<Vec<u64>, String> {
    let mut asked = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.map_err(|error| format!("line {}: {error}", number + 1))?;
        let pages = match format {
            Format::Csv if number == 0 && line.starts_with("version") => continue,
            Format::Csv => csv_line(&line),
            Format::Lis => lis_line(&line),
        };
        let (first, count) = pages.map_err(|why| format!("line {}: `{line}`: {why}", number + 1))?;
        asked.extend(first..first + count);
    }
    Ok(asked)
}

/// First page and number of pages of a line of libCacheSim's.
fn csv_line(line: &str) -> Result<(u64, u64), String> {
    if line.trim().is_empty() {
        return Ok((0, 0));
    }
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [_version, _time, _op, size, sector] = fields[..] else {
        return Err(format!("{} fields, but version,time,op,size,lbn are expected", fields.len()));
    };
    let (size, sector) = (field("size", size)?, field("lbn", sector)?);
    let first = sector.checked_mul(SECTOR_BYTES).ok_or("lbn is beyond the end of any disk")?;
    if size == 0 {
        return Ok((0, 0));
    }
    let last = first.checked_add(size - 1).ok_or("size leads beyond the end of any disk")?;
    bounded(first / PAGE_BYTES, last / PAGE_BYTES - first / PAGE_BYTES + 1)
}

/// First page and number of pages of a line of ARC's.
fn lis_line(line: &str) -> Result<(u64, u64), String> {
    if line.trim().is_empty() || line.starts_with('#') {
        return Ok((0, 0));
    }
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [start, count, ..] = fields[..] else {
        return Err("one field, but start count 0 request are expected".to_owned());
    };
    bounded(field("start", start)?, field("count", count)?)
}

fn field(name: &str, text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{name} is `{text}`, but a whole number is expected"))
}

fn bounded(first: u64, pages: u64) -> Result<(u64, u64), String> {
    let fits = pages <= REQUEST_PAGES_MAX && first.checked_add(pages).is_some();
    if fits { Ok((first, pages)) } else { Err(format!("{pages} pages from {first} are more than one request")) }
}
