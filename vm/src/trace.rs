//! Trace: which parts of an image VMs wanted first, in their order, to have them ready next time.
//!
//! ```text
//!   bytes 0        8          12         16              24             32         40
//!        [ qnfaults | version 1 | 4096    | image's bytes | fingerprint  | runs n   | runs ..  | checksum ]
//!                     u32         u32       u64             u64            u64        8 n bytes   u64
//!
//!   a run: first page u32, pages u32        all numbers little-endian        checksum: FNV-1a of all before it
//! ```
//!
//! A run is what one fault was answered with, and follows the one before it in time; runs that follow each other in
//! the image too are one. No page is in two of them, so a trace has as many runs as the image has pages at most, and
//! what is read is bounded by that.
//!
//! **Whose trace.** The **fingerprint** is a hash of the image's size and of 32 of its pages, evenly spread; so a copy
//! of the image has the same, on another machine too. A trace of another image is refused. It could do no harm but
//! waste: what is read by it is the image's.
//!
//! Written to a file beside the target and moved over it, durable before that: a reader of it finds a whole one or
//! none.
//!
//! Not an invariant: that an image with the same fingerprint is the same. 32 pages are 32 pages.
//!
//! The hash is FNV-1a with 64 bits (Fowler, Noll and Vo): enough against accidents.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use quinion::internals::units::PAGE_SIZE;

const MAGIC: &[u8; 8] = b"qnfaults";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 40;
const RUN_BYTES: usize = 8;
const SUM_BYTES: usize = 8;

/// Which image a trace is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImageIdentity {
    /// The image's size in bytes.
    pub bytes: u64,
    /// A hash of parts of it; see the head of this file.
    pub fingerprint: u64,
}

/// Pages of an image that follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImageRun {
    /// The first, by its number.
    pub first: u32,
    /// How many; one at least.
    pub pages: u32,
}

/// The order in which parts of an image were wanted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trace {
    image: ImageIdentity,
    runs: Vec<ImageRun>,
}

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each is said by its message")]
#[non_exhaustive]
pub enum TraceError {
    #[error("cannot read the trace: {0}")]
    Read(#[source] io::Error),
    #[error("cannot write the trace: {0}")]
    Write(#[source] io::Error),
    #[error("this is no trace of page faults; name a file that was written by --record")]
    NotATrace,
    #[error("the trace is of version {0}, and {VERSION} is known here; record it anew")]
    Version(u32),
    #[error("the trace is damaged: {0}; record it anew")]
    Damaged(&'static str),
    #[error(
        "the trace is of another image ({theirs} bytes, this one has {ours}, or other contents); \
         record one of this image"
    )]
    OtherImage { theirs: u64, ours: u64 },
}

impl Trace {
    /// Which image it is of.
    pub fn image(&self) -> ImageIdentity {
        self.image
    }

    /// The runs in their order; no page is in two of them.
    pub fn runs(&self) -> &[ImageRun] {
        &self.runs
    }

    /// Pages in all runs.
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.pages)).sum()
    }

    /// Whether nothing was wanted.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The file's bytes.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.runs.len() * RUN_BYTES + SUM_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(PAGE_SIZE as u32).to_le_bytes());
        for number in [self.image.bytes, self.image.fingerprint, self.runs.len() as u64] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for run in &self.runs {
            bytes.extend_from_slice(&run.first.to_le_bytes());
            bytes.extend_from_slice(&run.pages.to_le_bytes());
        }
        let sum = Fingerprint::of(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// What a file's bytes say, if they are of `image`.
    fn decode(bytes: &[u8], image: ImageIdentity) -> Result<Self, TraceError> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if bytes.len() < HEAD_BYTES + SUM_BYTES || &bytes[..8] != MAGIC {
            return Err(TraceError::NotATrace);
        }
        if half(8) != VERSION {
            return Err(TraceError::Version(half(8)));
        }
        let (body, end) = (&bytes[HEAD_BYTES..bytes.len() - SUM_BYTES], bytes.len() - SUM_BYTES);
        if half(12) != PAGE_SIZE as u32 || word(32).checked_mul(RUN_BYTES as u64) != Some(body.len() as u64) {
            return Err(TraceError::Damaged("its length is not what it says"));
        }
        if word(end) != Fingerprint::of(&bytes[..end]) {
            return Err(TraceError::Damaged("its checksum is wrong"));
        }
        let theirs = ImageIdentity { bytes: word(16), fingerprint: word(24) };
        if theirs != image {
            return Err(TraceError::OtherImage { theirs: theirs.bytes, ours: image.bytes });
        }
        let run = |at: usize| ImageRun { first: half(at), pages: half(at + 4) };
        let runs: Vec<ImageRun> =
            (0..body.len() / RUN_BYTES).map(|i| run(HEAD_BYTES + i * RUN_BYTES)).collect();
        let mut seen = PageSet::new(image);
        for run in &runs {
            let end = u64::from(run.first) + u64::from(run.pages);
            let pages = u64::from(run.first)..end;
            if run.pages == 0 || end > seen.pages || pages.into_iter().any(|page| !seen.take(page)) {
                return Err(TraceError::Damaged("a run is empty, outside the image, or there twice"));
            }
        }
        Ok(Self { image, runs })
    }

    /// Reads the trace at `path`, which must be of `image`.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or is of another image.
    pub fn read(path: &Path, image: ImageIdentity) -> Result<Self, TraceError> {
        let bytes_max =
            HEAD_BYTES as u64 + image.bytes.div_ceil(PAGE_SIZE as u64) * RUN_BYTES as u64 + SUM_BYTES as u64;
        let file = File::open(path).map_err(TraceError::Read)?;
        let mut bytes = Vec::new();
        // One more than may be, so that a longer one is seen to be too long.
        file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(TraceError::Read)?;
        Self::decode(&bytes, image)
    }

    /// Writes the trace to `path`, over what is there; readers find the old one or this one.
    ///
    /// # Errors
    /// It cannot be written; what is at `path` is what it was.
    pub fn write(&self, path: &Path) -> Result<(), TraceError> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.new", std::process::id()));
        let beside = path.with_file_name(name);
        let written = || {
            let mut file = File::create(&beside)?;
            file.write_all(&self.encode())?;
            file.sync_all()?;
            fs::rename(&beside, path)
        };
        written().map_err(|error| {
            let _ = fs::remove_file(&beside);
            TraceError::Write(error)
        })
    }
}

/// A bit for each page of an image.
#[derive(Debug)]
struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    fn new(image: ImageIdentity) -> Self {
        let pages = (image.bytes / PAGE_SIZE as u64).min(1 << 32);
        Self { words: vec![0; pages.div_ceil(64) as usize], pages }
    }

    /// Whether it was not wanted before.
    fn take(&mut self, page: u64) -> bool {
        let (word, bit) = (&mut self.words[(page / 64) as usize], 1 << (page % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

/// A trace that is being made.
#[derive(Debug)]
pub struct Recorder {
    wanted: PageSet,
    trace: Trace,
}

impl Recorder {
    /// One in which nothing was wanted yet.
    pub fn new(image: ImageIdentity) -> Self {
        Self { wanted: PageSet::new(image), trace: Trace { image, runs: Vec::new() } }
    }

    /// Notes that `bytes` bytes at `offset` were wanted; what was wanted before is not noted again. Whole pages, in
    /// the image.
    pub fn note(&mut self, offset: u64, bytes: u64) {
        let (first, pages) = (offset / PAGE_SIZE as u64, bytes / PAGE_SIZE as u64);
        for page in first..(first + pages).min(self.wanted.pages) {
            if !self.wanted.take(page) {
                continue;
            }
            match self.trace.runs.last_mut() {
                Some(run) if u64::from(run.first) + u64::from(run.pages) == page => run.pages += 1,
                _ => self.trace.runs.push(ImageRun { first: page as u32, pages: 1 }),
            }
        }
    }

    /// What was noted so far.
    pub fn trace(&self) -> Trace {
        self.trace.clone()
    }
}

/// A hash that bytes are added to; see the head of this file.
#[derive(Clone, Copy, Debug)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// Of nothing.
    pub fn new() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }

    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }

    /// The number.
    pub fn value(self) -> u64 {
        self.0
    }

    fn of(bytes: &[u8]) -> u64 {
        let mut sum = Self::new();
        sum.add(bytes);
        sum.value()
    }
}

impl Default for Fingerprint {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IMAGE: ImageIdentity = ImageIdentity { bytes: 1 << 20, fingerprint: 7 };

    fn recorded(wanted: &[(u64, u64)]) -> Trace {
        let mut recorder = Recorder::new(IMAGE);
        wanted.iter().for_each(|&(page, pages)| recorder.note(page * 4096, pages * 4096));
        recorder.trace()
    }

    #[test]
    fn the_hash_is_the_one_that_is_published() {
        assert_eq!(Fingerprint::of(b""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(Fingerprint::of(b"foobar"), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn the_bytes_are_as_they_are_documented() {
        let trace = recorded(&[(16, 4), (20, 1), (3, 1), (15, 3)]);
        let runs = [(16, 5), (3, 1), (15, 1)].map(|(first, pages)| ImageRun { first, pages });
        assert_eq!(trace.runs(), runs);
        let bytes = trace.encode();
        let head = [&b"qnfaults"[..], &[1, 0, 0, 0, 0, 16, 0, 0], &[0, 0, 16, 0, 0, 0, 0, 0]].concat();
        let rest = [[7, 0, 0, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0], [16, 0, 0, 0, 5, 0, 0, 0]].concat();
        assert_eq!(bytes[..48], [head, rest].concat());
        assert_eq!(bytes.len(), 40 + 3 * 8 + 8);
    }

    #[test]
    fn a_file_is_written_whole_and_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trace");
        let trace = recorded(&[(9, 3), (1, 1)]);
        trace.write(&path).expect("room for it");
        trace.write(&path).expect("over the old one");
        assert_eq!(Trace::read(&path, IMAGE).expect("a trace"), trace);
        let names = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(names, 1, "nothing is left beside it");
        let wrong = Trace::read(&folder.path().join("none"), IMAGE).expect_err("there is none");
        assert!(matches!(wrong, TraceError::Read(_)));
        assert!(matches!(trace.write(&folder.path().join("no/such/folder")), Err(TraceError::Write(_))));
    }

    #[test]
    fn a_file_that_is_no_trace_of_this_image_is_refused() {
        let (trace, other) = (recorded(&[(9, 3)]), ImageIdentity { fingerprint: 8, ..IMAGE });
        let bytes = trace.encode();
        let refused = |bytes: &[u8]| Trace::decode(bytes, IMAGE).expect_err("not to be used");
        assert!(matches!(Trace::decode(&bytes, other), Err(TraceError::OtherImage { .. })));
        assert!(matches!(refused(b"qnfaults"), TraceError::NotATrace));
        assert!(matches!(refused(&[0; 100]), TraceError::NotATrace));
        for at in 16..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert!(matches!(refused(&bytes), TraceError::Damaged(_)), "byte {at}");
        }
        let mut newer = bytes.clone();
        newer[8] = 2;
        assert!(matches!(refused(&newer), TraceError::Version(2)));
        let twice = Trace {
            image: IMAGE,
            runs: vec![ImageRun { first: 9, pages: 3 }, ImageRun { first: 11, pages: 1 }],
        };
        let outside = Trace { image: IMAGE, runs: vec![ImageRun { first: u32::MAX, pages: u32::MAX }] };
        let empty = Trace { image: IMAGE, runs: vec![ImageRun { first: 9, pages: 0 }] };
        for wrong in [twice, outside, empty] {
            assert!(matches!(refused(&wrong.encode()), TraceError::Damaged(_)));
        }
    }

    proptest! {
        #[test]
        fn each_page_is_noted_once_in_the_order_of_the_first_time(
            wanted in prop::collection::vec((0..300_u64, 1..40_u64), 0..30),
        ) {
            let trace = recorded(&wanted);
            let mut naive: Vec<u64> = Vec::new();
            for page in wanted.iter().flat_map(|&(page, pages)| page..page + pages) {
                if page < 256 && !naive.contains(&page) {
                    naive.push(page);
                }
            }
            let of_run = |run: &ImageRun| u64::from(run.first)..u64::from(run.first + run.pages);
            prop_assert_eq!(trace.runs().iter().flat_map(of_run).collect::<Vec<_>>(), naive);
            prop_assert_eq!(Trace::decode(&trace.encode(), IMAGE).expect("ours"), trace);
        }

        #[test]
        fn no_bytes_lead_to_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..120), keeps_magic in any::<bool>()) {
            let mut bytes = bytes;
            if keeps_magic && bytes.len() >= 16 {
                bytes[..16].copy_from_slice(&recorded(&[]).encode()[..16]);
            }
            let _ = Trace::decode(&bytes, IMAGE);
        }
    }
}
