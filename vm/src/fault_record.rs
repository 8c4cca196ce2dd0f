//! FaultRecord: which pages of an image VMs touched first, in their order, to have them ready next time.
//!
//! ```text
//!   bytes 0        8           12       16              24             32        40         48
//!        [ qnfaults | version 2 | 4096   | image's bytes | fingerprint | pages n | checksum | blocks .. ]
//!                     u32         u32      u64             u64           u64       u64 of bytes 0 to 39
//!
//!   a block, 4096 bytes, the last as long as it needs to be:
//!        [ number | entries | bytes | checksum | entries ..          | zeros ]      checksum: of bytes 16 to 31 of the
//!          u32      u16       u16     u64        `bytes` bytes                      file, then the block without it
//!
//!   an entry: the page's distance from the page behind the last one, zigzag, 7 bits a byte; and a digest, u16
//! ```
//!
//! All numbers are little-endian; the checksums are FNV-1a with 64 bits (Fowler, Noll and Vo): enough against
//! accidents. A page is named once, where it was wanted first. A page that follows the one before it takes three bytes.
//!
//! **Stale pages.** The **digest** is 16 bits of a hash of the page's bytes when it was recorded. A replay supplies no
//! page that differs from it: so a record of an earlier snapshot of the same VM is of use for the pages that both have
//! in common. The **fingerprint** tells whether it is such a one: a hash of the image's size and of 32 of its pages,
//! evenly spread, which all copies of the image share. A wrong entry only wastes: the bytes supplied are always the
//! image's.
//!
//! **Damaged blocks.** Each block has a checksum of its own, into which the image's identity goes too. One that is
//! damaged, cut off or from another file is left out ([`FaultRecord::lost_pages`]). A damaged head loses the whole
//! record, because nothing says then what the rest is of.
//!
//! The file is written beside the target and moved over it, durable before that: a reader finds a whole one or none.
//! It replaces a record or an empty file, and nothing else: a snapshot that was named by mistake stays. This is looked
//! at just before the move, and not in one step with it.
//!
//! Not an invariant: that an image with the same fingerprint is the same. A digest of 16 bits takes one of 65,536
//! changed pages for an unchanged one.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use quinion::internals::units::PAGE_SIZE;

const MAGIC: &[u8; 8] = b"qnfaults";
const VERSION: u32 = 2;
const HEAD_BYTES: usize = 48;
const HEAD_SUM: usize = 40;
const IDENTITY: std::ops::Range<usize> = 16..32;
const BLOCK_BYTES: usize = 4096;
const BLOCK_HEAD: usize = 16;
/// The longest entry: five bytes of a distance (33 bits), two of a digest.
const ENTRY_BYTES_MAX: usize = 7;

/// Which image a record is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImageIdentity {
    /// The image's size in bytes.
    pub bytes: u64,
    /// A hash of its size and of some of its pages.
    pub fingerprint: u64,
}

impl ImageIdentity {
    /// The image's whole pages, 2^32 at most.
    pub(super) fn pages(self) -> u64 {
        (self.bytes / PAGE_SIZE as u64).min(1 << 32)
    }
}

/// A page that was wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordedPage {
    /// The page's number in the image.
    pub page: u32,
    /// [`digest`] of its bytes.
    pub digest: u16,
}

/// The order in which pages of an image were wanted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FaultRecord {
    image: ImageIdentity,
    entries: Vec<RecordedPage>,
    lost_pages: u64,
}

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each is said by its message")]
#[non_exhaustive]
pub enum FaultRecordError {
    #[error("cannot read the record: {0}")]
    Read(#[source] io::Error),
    #[error("cannot write the record: {0}")]
    Write(#[source] io::Error),
    #[error("this is not a record of page faults; name a file that `--record` wrote")]
    NotARecord,
    #[error("the record has version {0}, and this release reads version {VERSION}; record again")]
    Version(u32),
    #[error("the record's header is damaged; record again")]
    Damaged,
    #[error(
        "the record would replace a file that is there and is no record of page faults; name another, or remove it"
    )]
    Occupied,
}

/// A record that was read for a replay ([`FaultRecord::for_replay`]).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ReplayRecord {
    /// The record, as far as it is of use; `None` if it is of none.
    pub record: Option<FaultRecord>,
    /// Faults that were found in it, each a line for people that begins with the file's name.
    pub remarks: Vec<String>,
}

impl FaultRecord {
    /// Bytes of a record's head, by which it is known.
    pub(super) const HEAD_BYTES: usize = HEAD_BYTES;

    /// Which image it is of.
    pub fn image(&self) -> ImageIdentity {
        self.image
    }

    /// The pages in their order, each once.
    pub fn entries(&self) -> &[RecordedPage] {
        &self.entries
    }

    /// How many pages it names.
    pub fn pages(&self) -> u64 {
        self.entries.len() as u64
    }

    /// How many more it named when it was written: they stood in parts that are damaged.
    pub fn lost_pages(&self) -> u64 {
        self.lost_pages
    }

    /// Whether no page was wanted.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The record's bytes, as a file has them.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.entries.len() * 4 + BLOCK_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(PAGE_SIZE as u32).to_le_bytes());
        for number in [self.image.bytes, self.image.fingerprint, self.pages()] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        let sum = Fingerprint::of(&[&bytes]);
        bytes.extend_from_slice(&sum.to_le_bytes());
        let (mut rest, mut number) = (&self.entries[..], 0_u32);
        while !rest.is_empty() {
            bytes.resize(HEAD_BYTES + number as usize * BLOCK_BYTES, 0);
            let block = encode_block(&mut rest, number, &bytes[IDENTITY]);
            bytes.extend_from_slice(&block);
            number += 1;
        }
        bytes
    }

    /// The record that these bytes are, with `pages_max` different pages at most.
    pub(super) fn decode(bytes: &[u8], pages_max: u64) -> Result<Self, FaultRecordError> {
        if bytes.len() < 12 || &bytes[..8] != MAGIC {
            return Err(FaultRecordError::NotARecord);
        }
        if half(bytes, 8) != VERSION {
            return Err(FaultRecordError::Version(half(bytes, 8)));
        }
        if bytes.len() < HEAD_BYTES
            || word(bytes, HEAD_SUM) != Fingerprint::of(&[&bytes[..HEAD_SUM]])
            || half(bytes, 12) != PAGE_SIZE as u32
        {
            return Err(FaultRecordError::Damaged);
        }
        let image = ImageIdentity { bytes: word(bytes, 16), fingerprint: word(bytes, 24) };
        let mut seen = PageSet::new(image.pages().min(pages_max));
        let (mut entries, mut found_pages) = (Vec::new(), 0);
        for (number, block) in bytes[HEAD_BYTES..].chunks(BLOCK_BYTES).enumerate() {
            let found = decode_block(block, number as u32, &bytes[IDENTITY]).unwrap_or_default();
            found_pages += found.len() as u64;
            entries.extend(found.into_iter().filter(|entry| seen.take(u64::from(entry.page))));
        }
        let lost_pages = word(bytes, 32).saturating_sub(found_pages);
        Ok(Self { image, entries, lost_pages })
    }

    /// Reads the record at `path`, as much of it as a record of `image` can have. It may be of another image: compare
    /// [`FaultRecord::image`]. Damaged parts are left out, see [`FaultRecord::lost_pages`].
    ///
    /// # Errors
    /// It cannot be read, is no record, or of another version; or its head is damaged.
    pub fn read(path: &Path, image: ImageIdentity) -> Result<Self, FaultRecordError> {
        let in_block = (BLOCK_BYTES - BLOCK_HEAD - ENTRY_BYTES_MAX) / ENTRY_BYTES_MAX;
        let blocks = image.pages().div_ceil(in_block as u64);
        let mut file = File::open(path).map_err(FaultRecordError::Read)?;
        let mut bytes = Vec::new();
        let mut read = |at_most: u64, bytes: &mut Vec<u8>| {
            (&mut file).take(at_most).read_to_end(bytes).map_err(FaultRecordError::Read)
        };
        // The head first: what was named by mistake, the snapshot perhaps, may be as long as a record of it can be.
        read(HEAD_BYTES as u64, &mut bytes)?;
        Self::decode(&bytes, 0)?;
        read(blocks * BLOCK_BYTES as u64, &mut bytes)?;
        Self::decode(&bytes, image.pages())
    }

    /// As [`FaultRecord::read`], for a replay: a record that is damaged, stale or none is no error, since VMs can be
    /// served without it. The remarks say what is wrong with it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn for_replay(path: &Path, image: ImageIdentity) -> Result<ReplayRecord, FaultRecordError> {
        let record = match Self::read(path, image) {
            Ok(record) => record,
            Err(error @ FaultRecordError::Read(_)) => return Err(error),
            Err(error) => {
                let remarks = vec![format!("{}: {error}. It is ignored", path.display())];
                return Ok(ReplayRecord { record: None, remarks });
            }
        };
        let mut remarks = Vec::new();
        let (lost, left) = (record.lost_pages(), record.pages());
        if lost > 0 {
            remarks.push(format!(
                "{}: parts of the record are damaged: {lost} pages are lost, and {left} are replayed",
                path.display()
            ));
        }
        if record.image() != image {
            let (theirs, ours) = (record.image().bytes, image.bytes);
            let how = if theirs == ours {
                "of the same size, with other contents".to_owned()
            } else {
                format!("of {theirs} bytes, and this one has {ours}")
            };
            remarks.push(format!(
                "{}: the record is of another snapshot, {how}: pages that differ are ignored",
                path.display()
            ));
        }
        Ok(ReplayRecord { record: Some(record), remarks })
    }

    /// Checks that a record can be written to `path`, as far as that can be known before: no file is left behind.
    ///
    /// # Errors
    /// It cannot be written, or a file is there that is no record, and not empty.
    pub fn check_target(path: &Path) -> Result<(), FaultRecordError> {
        Replaceable::at(path)?;
        let beside = beside(path);
        let made = create_new(&beside).and_then(|_| fs::remove_file(&beside));
        made.map_err(FaultRecordError::Write)
    }

    /// Writes the record to `path`, over a record or an empty file that is there; readers find the old one or this
    /// one. A record without any page leaves one that is there.
    ///
    /// # Errors
    /// It cannot be written, or a file is there that is no record, and not empty; the file at `path` is unchanged.
    pub fn write(&self, path: &Path) -> Result<(), FaultRecordError> {
        if Replaceable::at(path)? == Replaceable::Record && self.is_empty() {
            return Ok(());
        }
        let beside = beside(path);
        let written = || {
            let mut file = create_new(&beside).map_err(FaultRecordError::Write)?;
            file.write_all(&self.encode()).and_then(|()| file.sync_all()).map_err(FaultRecordError::Write)?;
            // Again: the sync may have taken long.
            Replaceable::at(path)?;
            fs::rename(&beside, path).map_err(FaultRecordError::Write)
        };
        written().inspect_err(|_| {
            let _ = fs::remove_file(&beside);
        })
    }

    /// As [`FaultRecord::write`], unless the file at `path` is a record of the same image with all of these pages: one
    /// that a server has written which went on from this record ([`RestoreOptions::replace`]).
    ///
    /// [`RestoreOptions::replace`]: crate::RestoreOptions::replace
    ///
    /// # Errors
    /// As [`FaultRecord::write`].
    pub fn write_unless_contained(&self, path: &Path) -> Result<(), FaultRecordError> {
        let there = Self::read(path, self.image).ok().filter(|there| there.image == self.image);
        let pages: HashSet<u32> = there.iter().flat_map(|there| &there.entries).map(|it| it.page).collect();
        if there.is_some() && self.entries.iter().all(|entry| pages.contains(&entry.page)) {
            return Ok(());
        }
        self.write(path)
    }
}

/// The place of a record, if one may be written there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Replaceable {
    /// No file, or an empty one.
    Free,
    Record,
}

impl Replaceable {
    /// The place at `path`, links followed; only a regular file is opened.
    fn at(path: &Path) -> Result<Self, FaultRecordError> {
        let found = match fs::metadata(path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::Free),
            Err(error) => return Err(FaultRecordError::Write(error)),
        };
        if found.is_dir() {
            return Err(FaultRecordError::Write(io::ErrorKind::IsADirectory.into()));
        }
        if !found.is_file() {
            return Err(FaultRecordError::Occupied);
        }
        let mut head = Vec::new();
        let read = File::open(path).and_then(|file| file.take(MAGIC.len() as u64).read_to_end(&mut head));
        match read.map_err(FaultRecordError::Write)? {
            0 => Ok(Self::Free),
            _ if head == MAGIC => Ok(Self::Record),
            _ => Err(FaultRecordError::Occupied),
        }
    }
}

/// A new file, in the place of one that was left there. The name can be guessed: a link that another user has put there
/// is not followed.
fn create_new(path: &Path) -> io::Result<File> {
    let _ = fs::remove_file(path);
    File::create_new(path)
}

/// Where a record is written before it is moved to `path`.
fn beside(path: &Path) -> std::path::PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn quarter(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

/// Takes as many of `entries` as a block has room for.
fn encode_block(entries: &mut &[RecordedPage], number: u32, identity: &[u8]) -> Vec<u8> {
    let (mut block, mut behind, mut count) = (vec![0; BLOCK_HEAD], 0_u64, 0_u16);
    while let Some((entry, rest)) = entries.split_first() {
        if block.len() + ENTRY_BYTES_MAX > BLOCK_BYTES {
            break;
        }
        let distance = u64::from(entry.page).wrapping_sub(behind).cast_signed();
        let mut zigzag = ((distance << 1) ^ (distance >> 63)).cast_unsigned();
        while zigzag > 0x7F {
            block.push(zigzag as u8 | 0x80);
            zigzag >>= 7;
        }
        block.push(zigzag as u8);
        block.extend_from_slice(&entry.digest.to_le_bytes());
        (behind, count, *entries) = (u64::from(entry.page) + 1, count + 1, rest);
    }
    let bytes = (block.len() - BLOCK_HEAD) as u16;
    block[..4].copy_from_slice(&number.to_le_bytes());
    block[4..6].copy_from_slice(&count.to_le_bytes());
    block[6..8].copy_from_slice(&bytes.to_le_bytes());
    let sum = Fingerprint::of(&[identity, &block[..8], &block[BLOCK_HEAD..]]);
    block[8..BLOCK_HEAD].copy_from_slice(&sum.to_le_bytes());
    block
}

/// `None` if it is damaged.
fn decode_block(block: &[u8], number: u32, identity: &[u8]) -> Option<Vec<RecordedPage>> {
    if block.len() < BLOCK_HEAD || half(block, 0) != number {
        return None;
    }
    let mut rest = block.get(BLOCK_HEAD..BLOCK_HEAD + usize::from(quarter(block, 6)))?;
    if word(block, 8) != Fingerprint::of(&[identity, &block[..8], rest]) {
        return None;
    }
    let (mut entries, mut behind) = (Vec::new(), 0_i64);
    for _ in 0..quarter(block, 4) {
        let (mut zigzag, mut shift) = (0_u64, 0);
        loop {
            let (&byte, more) = rest.split_first()?;
            (rest, zigzag) = (more, zigzag | u64::from(byte & 0x7F) << shift);
            shift += 7;
            if byte < 0x80 {
                break;
            }
            if shift > 28 {
                return None;
            }
        }
        let distance = (zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed();
        let page = u32::try_from(behind.checked_add(distance)?).ok()?;
        let digest = quarter(rest.get(..2)?, 0);
        rest = &rest[2..];
        entries.push(RecordedPage { page, digest });
        behind = i64::from(page) + 1;
    }
    Some(entries)
}

#[derive(Debug)]
struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    fn new(pages: u64) -> Self {
        Self { words: vec![0; pages.div_ceil(64) as usize], pages }
    }

    /// Whether the image has it, and it was not taken before.
    fn take(&mut self, page: u64) -> bool {
        if page >= self.pages {
            return false;
        }
        let (word, bit) = (&mut self.words[(page / 64) as usize], 1 << (page % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

/// A record that is being made.
#[derive(Debug)]
pub struct Recorder {
    wanted: PageSet,
    record: FaultRecord,
    /// Pages taken over from an earlier record and not seen since, and where in the new one they stand.
    unseen: HashMap<u32, usize>,
}

impl Recorder {
    /// One of `image` in which nothing was wanted yet.
    pub fn new(image: ImageIdentity) -> Self {
        Self {
            wanted: PageSet::new(image.pages()),
            record: FaultRecord { image, entries: Vec::new(), lost_pages: 0 },
            unseen: HashMap::new(),
        }
    }

    /// One that goes on from `earlier`, if that is of the same image. Of another image nothing is taken over: its pages
    /// are noted when they are replayed unchanged.
    pub fn merging(image: ImageIdentity, earlier: &FaultRecord) -> Self {
        let mut recorder = Self::new(image);
        if earlier.image == image {
            earlier.entries.iter().for_each(|entry| recorder.add(*entry));
            recorder.unseen =
                (0..).zip(&recorder.record.entries).map(|(at, entry)| (entry.page, at)).collect();
        }
        recorder
    }

    /// Adds the pages of a record of the same image that another server has made, behind those that are noted already.
    pub(super) fn append(&mut self, other: &FaultRecord) {
        other.entries.iter().for_each(|entry| self.add(*entry));
    }

    /// Notes that the pages at `offset`, whose bytes those are, were wanted; not those wanted before, nor what is no
    /// whole page of the image.
    pub fn note(&mut self, offset: u64, bytes: &[u8]) {
        for (page, bytes) in (offset / PAGE_SIZE as u64..).zip(bytes.chunks_exact(PAGE_SIZE)) {
            if let Ok(page) = u32::try_from(page) {
                self.add(RecordedPage { page, digest: digest(bytes) });
            }
        }
    }

    pub(super) fn add(&mut self, entry: RecordedPage) {
        if self.wanted.take(u64::from(entry.page)) {
            self.record.entries.push(entry);
        } else if let Some(at) = self.unseen.remove(&entry.page) {
            self.record.entries[at] = entry; // with the digest that it has now
        }
    }

    /// The record so far.
    pub fn record(&self) -> FaultRecord {
        self.record.clone()
    }
}

/// The digest of a page's content in a record. Four lanes take the page's words in turn, each by a step of
/// multiplication and rotation, so that a processor works on all four at once.
pub fn digest(page: &[u8]) -> u16 {
    let mut lanes = [1_u64, 2, 3, 4].map(|lane| lane.wrapping_mul(FNV_BASIS));
    for words in page.chunks_exact(32) {
        for (number, lane) in lanes.iter_mut().enumerate() {
            *lane = (*lane ^ word(words, 8 * number)).wrapping_mul(DIGEST_FACTOR).rotate_left(29);
        }
    }
    let all = lanes
        .into_iter()
        .fold(FNV_BASIS, |all, lane| (all ^ lane).wrapping_mul(DIGEST_FACTOR).rotate_left(29));
    (all.wrapping_mul(DIGEST_FACTOR) >> 48) as u16
}

const FNV_BASIS: u64 = 0xCBF2_9CE4_8422_2325;
/// Two to the 64th over the golden ratio, odd.
const DIGEST_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// A hash that bytes are added to; see the head of this file.
#[derive(Clone, Copy, Debug)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// The hash of no bytes.
    pub fn new() -> Self {
        Self(FNV_BASIS)
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

    fn of(parts: &[&[u8]]) -> u64 {
        let mut sum = Self::new();
        parts.iter().for_each(|part| sum.add(part));
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

    const IMAGE: ImageIdentity = ImageIdentity { bytes: 64 << 20, fingerprint: 7 };

    fn page(number: u64) -> Vec<u8> {
        number.to_le_bytes().repeat(PAGE_SIZE / 8)
    }

    fn recorded(wanted: impl IntoIterator<Item = u64>) -> FaultRecord {
        let mut recorder = Recorder::new(IMAGE);
        wanted.into_iter().for_each(|number| recorder.note(number * 4096, &page(number)));
        recorder.record()
    }

    fn decoded(bytes: &[u8]) -> Result<FaultRecord, FaultRecordError> {
        FaultRecord::decode(bytes, 16384)
    }

    fn numbers(record: &FaultRecord) -> Vec<u64> {
        record.entries().iter().map(|entry| u64::from(entry.page)).collect()
    }

    fn scattered() -> FaultRecord {
        recorded((0..3000).map(|i| i * 7919 % 16384))
    }

    #[test]
    fn the_hash_is_the_one_that_is_published() {
        assert_eq!(Fingerprint::of(&[b""]), 0xCBF2_9CE4_8422_2325);
        assert_eq!(Fingerprint::of(&[b"foo", b"bar"]), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn the_digest_is_the_one_that_was_worked_out_by_hand() {
        assert_eq!(digest(&[0; PAGE_SIZE]), 0x55);
        let counting: Vec<u8> = (0..512_u64).flat_map(u64::to_le_bytes).collect();
        assert_eq!(digest(&counting), 0xF49);
    }

    #[test]
    fn the_bytes_are_as_they_are_documented() {
        let record = recorded([16, 17, 3, 300]);
        let bytes = record.encode();
        let head = [&b"qnfaults"[..], &[2, 0, 0, 0, 0, 16, 0, 0], &[0, 0, 0, 4, 0, 0, 0, 0]].concat();
        assert_eq!(bytes[..32], [head, vec![7, 0, 0, 0, 0, 0, 0, 0]].concat());
        assert_eq!(bytes[32..40], [4, 0, 0, 0, 0, 0, 0, 0]);
        // Distances 16, 0, -15 and 296, zigzag: 32, 0, 29 and 592.
        assert_eq!(bytes[48..56], [0, 0, 0, 0, 4, 0, 13, 0]);
        let at = |number: usize| bytes[64 + number];
        assert_eq!([at(0), at(3), at(6), at(9), at(10)], [32, 0, 29, 0xD0, 0x04]);
        assert_eq!(bytes.len(), 48 + 16 + 13);
        let all = recorded(0..16384);
        assert!(all.encode().len() as u64 <= 48 + 13 * 4096, "three bytes a page that follows another");
    }

    #[test]
    fn a_file_is_written_whole_and_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("record");
        for record in [recorded([]), recorded([9, 1]), scattered()] {
            record.write(&path).expect("room for it");
            record.write(&path).expect("over the old one");
            assert_eq!(FaultRecord::read(&path, IMAGE).expect("a record"), record);
        }
        let names = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(names, 1, "nothing is left beside it");
        let wrong = FaultRecord::read(&folder.path().join("none"), IMAGE).expect_err("there is none");
        assert!(matches!(wrong, FaultRecordError::Read(_)));
        let nowhere = recorded([1]).write(&folder.path().join("no/such/folder"));
        assert!(matches!(nowhere, Err(FaultRecordError::Write(_))));
    }

    #[test]
    fn a_planted_link_is_not_written_through() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, other) = (folder.path().join("record"), folder.path().join("other"));
        fs::write(&other, "mine").expect("room for it");
        let plant = || std::os::unix::fs::symlink(&other, beside(&path)).expect("nothing is there");
        plant();
        FaultRecord::check_target(&path).expect("it can be written");
        assert_eq!(fs::read(&other).expect("it is there"), b"mine");
        plant();
        recorded([1]).write(&path).expect("room for it");
        assert_eq!(fs::read(&other).expect("it is there"), b"mine");
        assert!(fs::symlink_metadata(&path).expect("it is there").is_file());
    }

    #[test]
    fn a_record_that_another_went_on_from_is_not_written_over_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("record");
        let read = || FaultRecord::read(&path, IMAGE).expect("a record");
        let (short, longer) = (recorded([4, 9]), recorded([7, 4, 9, 2]));
        short.write_unless_contained(&path).expect("there is none yet");
        assert_eq!(read(), short);
        longer.write_unless_contained(&path).expect("room for it");
        assert_eq!(read(), longer);
        short.write_unless_contained(&path).expect("nothing is to be done");
        assert_eq!(read(), longer);
        // Of a page that the file has not, and of another image.
        let more = recorded([4, 5]);
        more.write_unless_contained(&path).expect("room for it");
        assert_eq!(read(), more);
        let other = FaultRecord { image: ImageIdentity { fingerprint: 8, ..IMAGE }, ..recorded([4]) };
        other.write_unless_contained(&path).expect("room for it");
        assert_eq!(read().image(), other.image());
    }

    #[test]
    fn only_a_record_is_replaced_and_by_one_with_pages_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("record");
        recorded([]).write(&path).expect("there is none yet");
        recorded([4]).write(&path).expect("over one without pages");
        recorded([]).write(&path).expect("nothing is to be done");
        assert_eq!(FaultRecord::read(&path, IMAGE).expect("a record"), recorded([4]));
        fs::write(&path, "").expect("room for it");
        FaultRecord::check_target(&path).expect("an empty file is of no use");
        recorded([4]).write(&path).expect("over an empty file");
        for other in [&b"no record"[..], b"q", b"qnfault"] {
            fs::write(&path, other).expect("room for it");
            let refused = [
                FaultRecord::check_target(&path),
                recorded([4]).write(&path),
                recorded([4]).write_unless_contained(&path),
            ];
            for refused in refused {
                assert!(matches!(refused, Err(FaultRecordError::Occupied)), "{refused:?}");
            }
            assert_eq!(fs::read(&path).expect("it is there"), other);
        }
        let null = FaultRecord::check_target(Path::new("/dev/null"));
        assert!(matches!(null, Err(FaultRecordError::Occupied)), "{null:?}");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_file_with_a_damaged_head_or_none_is_refused() {
        let bytes = scattered().encode();
        let refused = |bytes: &[u8]| decoded(bytes).expect_err("not to be used");
        assert!(matches!(refused(b"qnfault"), FaultRecordError::NotARecord));
        assert!(matches!(refused(&[0; 100]), FaultRecordError::NotARecord));
        assert!(matches!(refused(&bytes[..47]), FaultRecordError::Damaged));
        for at in 12..48 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert!(matches!(refused(&bytes), FaultRecordError::Damaged), "byte {at}");
        }
        for version in [1, 3] {
            let mut other = bytes.clone();
            other[8] = version;
            assert!(
                matches!(refused(&other), FaultRecordError::Version(found) if found == u32::from(version))
            );
        }
    }

    /// A pipe whose writer says so much, and then nothing.
    #[test]
    fn a_file_that_is_no_record_is_not_read_to_its_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).expect("it is new");
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let to = pipe.clone();
        let writer = std::thread::spawn(move || {
            let mut pipe = File::options().write(true).open(to).expect("it is there");
            pipe.write_all(&[1; HEAD_BYTES]).expect("it has a reader");
            let _ = ended.recv();
        });
        let wrong = FaultRecord::read(&pipe, IMAGE).expect_err("no record");
        assert!(matches!(wrong, FaultRecordError::NotARecord), "{wrong}");
        drop(end);
        writer.join().expect("it has written");
    }

    #[test]
    fn a_damaged_block_is_left_out_and_the_others_are_used() {
        let (record, bytes) = (scattered(), scattered().encode());
        let blocks = (bytes.len() - HEAD_BYTES).div_ceil(BLOCK_BYTES);
        assert!(blocks >= 3, "{blocks}");
        let whole: Vec<usize> = (0..blocks)
            .map(|number| usize::from(quarter(&bytes, HEAD_BYTES + number * BLOCK_BYTES + 4)))
            .collect();
        for damaged in 0..blocks {
            let begin = HEAD_BYTES + damaged * BLOCK_BYTES;
            let used = BLOCK_HEAD + usize::from(quarter(&bytes, begin + 6));
            for at in [0, 4, 6, 8, BLOCK_HEAD, used / 2, used - 1] {
                let mut bytes = bytes.clone();
                bytes[begin + at] ^= 0x10;
                let read = decoded(&bytes).expect("its head is whole");
                let before: usize = whole[..damaged].iter().sum();
                let expected =
                    [&record.entries()[..before], &record.entries()[before + whole[damaged]..]].concat();
                assert_eq!(read.entries(), expected, "block {damaged}, byte {at}");
                assert_eq!(read.lost_pages(), whole[damaged] as u64);
            }
        }
        // It is cut off, and a block of another image stands in it.
        let cut = decoded(&bytes[..HEAD_BYTES + BLOCK_BYTES + 100]).expect("its head is whole");
        assert_eq!(cut.entries(), &record.entries()[..whole[0]]);
        let other = ImageIdentity { fingerprint: 8, ..IMAGE };
        let mut mixed = FaultRecord { image: other, ..record.clone() }.encode();
        mixed[HEAD_BYTES..HEAD_BYTES + BLOCK_BYTES]
            .copy_from_slice(&bytes[HEAD_BYTES..HEAD_BYTES + BLOCK_BYTES]);
        let mixed = decoded(&mixed).expect("its head is whole");
        assert_eq!(mixed.entries(), &record.entries()[whole[0]..]);
    }

    #[test]
    fn pages_twice_or_outside_the_image_are_left_out() {
        let entry = |page| RecordedPage { page, digest: 1 };
        let entries = [5, 5, 16384, u32::MAX, 6].map(entry).to_vec();
        let read = decoded(&FaultRecord { image: IMAGE, entries, lost_pages: 0 }.encode()).expect("whole");
        assert_eq!((numbers(&read), read.lost_pages()), (vec![5, 6], 0));
    }

    #[test]
    fn a_recorder_goes_on_from_an_earlier_trace_of_the_same_image_alone() {
        let earlier = recorded([4, 9]);
        let mut merged = Recorder::merging(IMAGE, &earlier);
        [9, 2].into_iter().for_each(|number| merged.note(number * 4096, &page(number)));
        assert_eq!(numbers(&merged.record()), [4, 9, 2]);
        let other = ImageIdentity { fingerprint: 8, ..IMAGE };
        assert!(Recorder::merging(other, &earlier).record().is_empty());
        // A page that holds something else by now has the new digest, in its old place, and once.
        merged.note(4 * 4096, &page(5));
        merged.note(4 * 4096, &page(6));
        let merged = merged.record();
        assert_eq!(merged.entries()[0], RecordedPage { page: 4, digest: digest(&page(5)) });
        assert_eq!(merged.pages(), 3);
    }

    #[test]
    fn a_digest_differs_where_any_byte_does() {
        let before = page(77);
        for at in (0..PAGE_SIZE).step_by(61) {
            let mut changed = before.clone();
            changed[at] ^= 0x80;
            assert_ne!(digest(&changed), digest(&before), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn each_page_is_noted_once_in_the_order_of_the_first_time(
            wanted in prop::collection::vec((0..20_000_u64, 1..40_u64), 0..60),
        ) {
            let mut recorder = Recorder::new(IMAGE);
            let mut naive: Vec<u64> = Vec::new();
            for &(first, pages) in &wanted {
                let bytes: Vec<u8> = (first..first + pages).flat_map(page).collect();
                recorder.note(first * 4096, &bytes);
                for number in first..first + pages {
                    if number < 16384 && !naive.contains(&number) {
                        naive.push(number);
                    }
                }
            }
            let record = recorder.record();
            prop_assert_eq!(numbers(&record), naive);
            prop_assert_eq!(decoded(&record.encode()).expect("ours"), record);
        }

        #[test]
        fn no_bytes_lead_to_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), keeps in 0..3_u8) {
            let (mut bytes, whole) = (bytes, recorded([3, 1, 2]).encode());
            let kept = [0, 16, HEAD_BYTES][usize::from(keeps)].min(bytes.len());
            bytes[..kept].copy_from_slice(&whole[..kept]);
            let _ = decoded(&bytes);
        }

        #[test]
        fn no_entries_lead_to_a_panic(body in prop::collection::vec(any::<u8>(), 0..64), count in 0..40_u16) {
            // With a right checksum, as a hostile file would have it.
            let mut block = vec![0; BLOCK_HEAD];
            block[4..6].copy_from_slice(&count.to_le_bytes());
            block[6..8].copy_from_slice(&(body.len() as u16).to_le_bytes());
            block.extend_from_slice(&body);
            let sum = Fingerprint::of(&[&[1; 16], &block[..8], &body]);
            block[8..BLOCK_HEAD].copy_from_slice(&sum.to_le_bytes());
            let _ = decode_block(&block, 0, &[1; 16]);
        }
    }
}
