//! Trace: the pages that a workload referenced, in order.
//!
//! ```text
//!   name.csv        version,time,op,size,lbn         size in bytes, lbn in sectors of 512 bytes (libCacheSim)
//!   name.lis        start count zero request         pages start .. start + count (ARC); `#`: nothing
//!   *.zst           either, compressed
//! ```
//!
//! Pages are renumbered in the order of their positions, so that a simulated cache can index an array by them. The
//! position is kept, since shadows share nodes with their neighbours. Every page of a request is a reference.
//!
//! ARC's traces are of N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
//! FAST 2003. libCacheSim's is of CloudPhysics.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

const SECTOR_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;
/// Pages of one request at most: a larger number is a damaged line, and must not exhaust memory.
const REQUEST_PAGES_MAX: u64 = 1 << 20;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trace {
    pub name: String,
    /// The pages referenced, in order; each below `places.len()`.
    pub references: Vec<u32>,
    /// The position of each page, in pages; rising.
    pub places: Vec<u64>,
}

impl Trace {
    pub fn new(name: impl Into<String>, asked: &[u64]) -> Self {
        let unique: HashSet<u64> = asked.iter().copied().collect();
        let mut places: Vec<u64> = unique.into_iter().collect();
        places.sort_unstable();
        assert!(u32::try_from(places.len()).is_ok(), "a trace has fewer than 2^32 pages");
        let number = |place: &u64| places.binary_search(place).expect("each place is listed") as u32;
        let references = asked.iter().map(number).collect();
        Self { name: name.into(), references, places }
    }

    pub fn unique(&self) -> usize {
        self.places.len()
    }

    /// Pages of a cache of `percent` % of the distinct pages; at least one.
    pub fn cache_pages(&self, percent: f64) -> usize {
        ((self.unique() as f64 * percent / 100.0) as usize).max(1)
    }

    /// Reads the trace in the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read, or a line of it cannot be parsed; the text says which one, and what is expected there.
    pub fn read(path: &Path) -> Result<Self, String> {
        let wrong = |why: String| format!("{}: {why}", path.display());
        let TraceFile { name, format, is_compressed } = named(path).ok_or_else(|| {
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

/// The traces in the folder `dir`, sorted by name; other files are skipped.
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

pub fn name_of(path: &Path) -> Option<String> {
    named(path).map(|file| file.name)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Csv,
    Lis,
}

/// The trace in a file, as far as the file's name tells.
struct TraceFile {
    name: String,
    format: Format,
    is_compressed: bool,
}

fn named(path: &Path) -> Option<TraceFile> {
    let file = path.file_name()?.to_str()?;
    let (plain, is_compressed) = file.strip_suffix(".zst").map_or((file, false), |plain| (plain, true));
    let of = |suffix, format| {
        let name = plain.strip_suffix(suffix)?.to_owned();
        Some(TraceFile { name, format, is_compressed })
    };
    of(".csv", Format::Csv).or_else(|| of(".lis", Format::Lis))
}

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
    if fits {
        Ok((first, pages))
    } else {
        Err(format!("{pages} pages from {first} are more than one request"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn csv(text: &str) -> Result<Vec<u64>, String> {
        parse(Format::Csv, text.as_bytes())
    }

    fn lis(text: &str) -> Result<Vec<u64>, String> {
        parse(Format::Lis, text.as_bytes())
    }

    #[test]
    fn libcachesims_lines_are_ranges_of_bytes_in_pages() {
        let text = "version,time,op,size,lbn\n1,5633898,2a,512,8\n1,5633898,2a,4096,8\n1,0,2a,4096,12\n1,0,28,0,3\n\n";
        assert_eq!(csv(text), Ok(vec![1, 1, 1, 2]));
        assert_eq!(csv("1,5633898,2a,6656,40409911\n"), Ok(vec![5051238, 5051239, 5051240]));
    }

    #[test]
    fn arcs_lines_are_ranges_of_pages() {
        assert_eq!(lis("# a trace\n230027 3 0 0\n7 1\n5 0 0 2\n"), Ok(vec![230027, 230028, 230029, 7]));
    }

    #[test]
    fn a_bad_line_is_reported_with_its_number_and_the_expected_form() {
        let wrong = |parsed: Result<Vec<u64>, String>| parsed.expect_err("it is wrong");
        let few = wrong(csv("version,time,op,size,lbn\n1,2,3,512,8\n1,2,3\n"));
        assert!(
            few.starts_with("line 3: `1,2,3`: 3 fields") && few.contains("version,time,op,size,lbn"),
            "{few}"
        );
        let words = wrong(csv("1,2,3,many,8\n"));
        assert!(words.contains("line 1") && words.contains("size is `many`"), "{words}");
        assert!(wrong(csv("1,2,3,512,18446744073709551615\n")).contains("beyond the end"));
        assert!(wrong(lis("1 2 0 0\n17\n")).starts_with("line 2: `17`: one field"));
        assert!(wrong(lis("-1 2 0 0\n")).contains("start is `-1`"));
        assert!(wrong(lis("1 99999999999 0 0\n")).contains("more than one request"));
        assert!(wrong(lis("18446744073709551615 1 0 0\n")).contains("more than one request"));
    }

    #[test]
    fn pages_are_numbered_by_their_places() {
        let trace = Trace::new("x", &[900, 5, 900, 70]);
        assert_eq!(
            (trace.references.as_slice(), trace.places.as_slice()),
            (&[2, 0, 2, 1][..], &[5, 70, 900][..])
        );
        assert_eq!([1.0, 50.0, 100.0].map(|percent| trace.cache_pages(percent)), [1, 1, 3]);
    }

    #[test]
    fn traces_are_found_by_their_names_and_read() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(folder.path().join(name), bytes).expect("it is written")
        };
        // "1 2 0 0\n" as a frame of zstd: a raw block of 8 bytes.
        let frame =
            [0x28, 0xb5, 0x2f, 0xfd, 0x20, 0x08, 0x41, 0, 0, b'1', b' ', b'2', b' ', b'0', b' ', b'0', b'\n'];
        write("b.lis.zst", &frame);
        write("a.csv", b"1,2,3,512,8\n");
        write("empty.lis", b"");
        write("notes.md", b"?");
        write("torn.lis.zst", &frame[..11]);
        let found = found_in(folder.path()).expect("it is a folder");
        let names: Vec<_> = found.iter().filter_map(|path| name_of(path)).collect();
        assert_eq!(names, ["a", "b", "empty", "torn"]);
        let read: Vec<_> = found.iter().map(|path| Trace::read(path)).collect();
        assert_eq!(read[0].as_ref().map(|trace| trace.places.clone()), Ok(vec![1]));
        assert_eq!(read[1].as_ref().map(|trace| trace.places.clone()), Ok(vec![1, 2]));
        assert!(read[2].as_ref().is_err_and(|why| why.contains("asks for nothing")), "{:?}", read[2]);
        assert!(read[3].as_ref().is_err_and(|why| why.contains("torn.lis.zst")), "{:?}", read[3]);
        assert!(found_in(&folder.path().join("none")).is_err());
    }
}
