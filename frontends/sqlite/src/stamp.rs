//! Stamp: what tells whether the bytes of a database may have been changed by another process.
//!
//! ```text
//!   rollback journal   bytes 16..40 of the file, read under the SHARED lock: page size, modes, change counter, pages
//!   write-ahead log    words of the wal-index, read under a read lock: salts, and how far frames were copied back
//!   the log is idle    bytes 16..40 and the times of the file, read under the read lock 0 or the lock of checkpoints
//! ```
//!
//! *Rollback.* A commit changes the change counter (bytes 24 to 27 of the file) while it holds the EXCLUSIVE lock, and
//! nothing is written to the file without that lock. A transaction that is rolled back, by its own process or by
//! another after a crash, leaves the bytes as they were. So two stamps that are equal, both taken under a SHARED lock,
//! have the same bytes behind them. It is what SQLite itself compares before it uses its own page cache again
//! (<https://www.sqlite.org/fileformat2.html#file_change_counter>). It holds while the header names no write-ahead log:
//! a commit to the log leaves the counter as it is, and so does the checkpoint that copies it into the file. So the
//! stamp of a header that names a log is compared with no other ([`Stamp::is_rollback`]).
//!
//! *Write-ahead log.* The file is written by checkpoints alone. A reader takes a page from the file only if the page
//! has no frame in the log behind `nBackfill`, as that was when its transaction began; and a checkpoint copies frames
//! behind `nBackfill` alone. So no page is written that a reader takes from the file while its transaction lasts. If
//! a later transaction takes a page from the file and an earlier one did not, it has been copied meanwhile, and
//! `nBackfill` or the salts, which are new with each restart of the log, tell so
//! (<https://www.sqlite.org/walformat.html>, sections 2.3 and 2.4). Both are set when the copy is done;
//! `nBackfillAttempted`, which is set before, is compared too. A reader reads `nBackfill` after it has its lock, so
//! the stamp is taken later still, when it first reads a page: a stamp of before would let it use pages of before the
//! copy.
//!
//! The words are of one moment. A process that restarts the log writes the second copy of the header, the first, and
//! then zero to `nBackfill`. New salts with the old `nBackfill` would be a stamp that the new log has once more; old
//! salts with the new `nBackfill`, one that the old log had before. So the first copy is read, what was copied back,
//! and then the second copy: if it is the same, all is of before or all of after, but for an `nBackfill` that is above
//! the number of frames, which is not taken.
//!
//! *Idle.* A log that its last connection has deleted, and that readers alone have opened since, has no frame. Its
//! wal-index was made from nothing: it has no salts and no size of pages, and would be the same again after any number
//! of commits, checkpoints and deletions. So the stamp is made of the file. A reader of such a log has the read lock 0
//! (`walTryBeginRead`), and a checkpoint has it alone while it writes to the file (`walCheckpoint`); a process that
//! writes to it without locks of the wal-index has the EXCLUSIVE lock, and the reader has SHARED. So the file's bytes
//! are fixed while the stamp is made. The first write after that gives the file other times, since they are settled
//! (`clock.rs`). And no log is deleted, truncated or begun anew before all of it was copied, which ends with a
//! truncation of the file (`walCheckpoint` again), and a truncation sets the times also if it cuts off nothing: by that
//! they tell even of writes through a map (`SQLITE_MMAP_READWRITE`). The header is compared for the sake of commits by
//! such a map with a rollback journal, which change the change counter.
//!
//! Invariant: a stamp is only made under the lock that is named above.

use crate::clock::Settled;

/// The part of a database's header that is looked at, in bytes: its place and its length.
pub const HEADER_AT: u64 = 16;
pub const HEADER_BYTES: usize = 24;

/// Bytes of a page of the cache. Smaller ones of a database would share it with their neighbours, which may be written
/// meanwhile.
pub const PAGE_LEAST: u32 = 4096;
const PAGE_LARGEST: u32 = 65536;

/// The version of the wal-index that is understood, which all releases of SQLite since 3.7 have.
const WAL_INDEX_VERSION: u32 = 3_007_000;
/// Words of the wal-index that are read: two copies of its header, and what checkpoints keep.
pub const WAL_INDEX_WORDS: usize = 34;
const WAL_HEADER_WORDS: usize = 12;
const FRAMES: usize = 4;
const SALTS: usize = 8;
const BACKFILLED: usize = 24;
const ATTEMPTED: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    pub page_bytes: u32,
    content: Content,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    Rollback([u8; HEADER_BYTES]),
    Wal { salts: [u32; 2], backfilled: u32, attempted: u32 },
    Idle([u8; HEADER_BYTES], Settled),
}

impl Stamp {
    /// The stamp from the header's bytes at [`HEADER_AT`]. `None` if pages of this size are not cached.
    pub fn of_header(bytes: [u8; HEADER_BYTES]) -> Option<Self> {
        let page_bytes = page_bytes(u16::from_be_bytes([bytes[0], bytes[1]]))?;
        Some(Self { page_bytes, content: Content::Rollback(bytes) })
    }

    /// The stamp from the words of the wal-index, which other processes may be writing. `None` if pages of this size
    /// are not cached, if the wal-index has another version, or if a process is just restarting the log.
    pub fn of_wal_index(word: impl Fn(usize) -> u32) -> Option<Self> {
        let WalIndex { page, salts, backfilled, attempted, .. } = WalIndex::read(word)?;
        let page_bytes = page_bytes(page)?;
        Some(Self { page_bytes, content: Content::Wal { salts, backfilled, attempted } })
    }

    /// The stamp for a log that [`is_idle`], from the header's bytes at [`HEADER_AT`] and the file's times. `None` if
    /// pages of this size are not cached.
    pub fn of_idle(bytes: [u8; HEADER_BYTES], times: Settled) -> Option<Self> {
        let Self { page_bytes, .. } = Self::of_header(bytes)?;
        Some(Self { page_bytes, content: Content::Idle(bytes, times) })
    }

    /// Whether, by the header, the database has no write-ahead log.
    pub fn is_rollback(&self) -> bool {
        matches!(self.content, Content::Rollback(bytes) if bytes[2] == 1 && bytes[3] == 1)
    }

    /// All of it in bytes, at most 29: equal for equal stamps alone, the times of an idle log apart.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.page_bytes.to_le_bytes().to_vec();
        match self.content {
            Content::Rollback(header) => {
                bytes.push(b'r');
                bytes.extend(header);
            }
            Content::Wal { salts, backfilled, attempted } => {
                bytes.push(b'w');
                bytes.extend(
                    [salts[0], salts[1], backfilled, attempted].iter().flat_map(|word| word.to_le_bytes()),
                );
            }
            Content::Idle(header, _) => {
                bytes.push(b'i');
                bytes.extend(header);
            }
        }
        bytes
    }

    /// The order of a folio that is one page of the database.
    pub fn order(&self) -> u8 {
        (self.page_bytes / PAGE_LEAST).trailing_zeros() as u8
    }
}

/// Whether, by the words of the wal-index, no frame was committed to the log since the wal-index was made.
pub fn is_idle(word: impl Fn(usize) -> u32) -> bool {
    // A commit notes the size of its pages, and it stays when the log begins anew.
    WalIndex::read(word).is_some_and(|index| index.frames == 0 && index.page == 0)
}

struct WalIndex {
    /// Bytes of a page, as two bytes say it.
    page: u16,
    frames: u32,
    salts: [u32; 2],
    backfilled: u32,
    attempted: u32,
}

impl WalIndex {
    /// `None` if it has another version, or if a process is just restarting the log.
    fn read(word: impl Fn(usize) -> u32) -> Option<Self> {
        let header: [u32; WAL_HEADER_WORDS] = std::array::from_fn(&word);
        let (backfilled, attempted) = (word(BACKFILLED), word(ATTEMPTED));
        let second: [u32; WAL_HEADER_WORDS] = std::array::from_fn(|at| word(WAL_HEADER_WORDS + at));
        if header != second || header[0] != WAL_INDEX_VERSION {
            return None;
        }
        if backfilled.max(attempted) > header[FRAMES] {
            return None;
        }
        // Byte 12: whether it is initialized, the order of bytes in checksums, and two bytes of the page's size.
        let [_, _, low, high] = header[3].to_ne_bytes();
        let page = u16::from_ne_bytes([low, high]);
        let salts = [header[SALTS], header[SALTS + 1]];
        Some(Self { page, frames: header[FRAMES], salts, backfilled, attempted })
    }
}

/// The page size that its two bytes in the header mean, if pages of that size are cached.
fn page_bytes(written: u16) -> Option<u32> {
    let bytes = if written == 1 { PAGE_LARGEST } else { written.into() };
    (bytes.is_power_of_two() && bytes >= PAGE_LEAST).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Times;

    fn header(page: u16, mode: u8, counter: u32) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&page.to_be_bytes());
        bytes[2..4].fill(mode);
        bytes[8..12].copy_from_slice(&counter.to_be_bytes());
        bytes
    }

    fn wal_index(page: u16) -> [u32; WAL_INDEX_WORDS] {
        let mut words = [7; WAL_INDEX_WORDS];
        let [low, high] = page.to_ne_bytes();
        for header in words[..2 * WAL_HEADER_WORDS].chunks_mut(WAL_HEADER_WORDS) {
            (header[0], header[3]) = (WAL_INDEX_VERSION, u32::from_ne_bytes([1, 0, low, high]));
            header[FRAMES] = 9;
        }
        words
    }

    fn of_words(words: [u32; WAL_INDEX_WORDS]) -> Option<Stamp> {
        Stamp::of_wal_index(|at| words[at])
    }

    #[test]
    fn a_commit_changes_the_stamp() {
        let before = Stamp::of_header(header(4096, 1, 7)).unwrap();
        assert!(before.is_rollback());
        assert_eq!((before.page_bytes, before.order()), (4096, 0));
        assert_ne!(Stamp::of_header(header(4096, 1, 8)), Some(before));
        assert_ne!(Stamp::of_header(header(8192, 1, 7)), Some(before));
        assert!(!Stamp::of_header(header(4096, 2, 7)).unwrap().is_rollback());
    }

    #[test]
    fn pages_that_share_one_of_the_caches_have_no_stamp() {
        assert_eq!(Stamp::of_header(header(2048, 1, 7)), None);
        assert_eq!(Stamp::of_header(header(0, 1, 7)), None);
        assert_eq!(Stamp::of_header(header(4097, 1, 7)), None);
        assert_eq!(of_words(wal_index(1024)), None);
        let largest = Stamp::of_header(header(1, 1, 7)).unwrap();
        assert_eq!((largest.page_bytes, largest.order()), (65536, 4));
    }

    #[test]
    fn a_checkpoint_and_a_restart_of_the_log_change_the_stamp() {
        let words = wal_index(4096);
        let before = of_words(words).unwrap();
        assert!(!before.is_rollback());
        assert_eq!(before.page_bytes, 4096);
        let add = |at: &[usize]| {
            let mut after = words;
            at.iter().for_each(|&at| after[at] += 1);
            of_words(after)
        };
        for at in [[SALTS, SALTS + WAL_HEADER_WORDS], [SALTS + 1, SALTS + 1 + WAL_HEADER_WORDS]] {
            assert!(add(&at).is_some_and(|after| after != before), "words {at:?}");
        }
        for at in [BACKFILLED, ATTEMPTED] {
            assert!(add(&[at]).is_some_and(|after| after != before), "word {at}");
        }
        // Frames that are appended change nothing in the file.
        assert_eq!(add(&[FRAMES, FRAMES + WAL_HEADER_WORDS]), Some(before));
        assert_eq!(of_words([1; WAL_INDEX_WORDS]), None);
    }

    #[test]
    fn a_log_without_frames_is_idle_until_the_first_commit() {
        // As a recovery from nothing leaves it.
        let mut words = [0; WAL_INDEX_WORDS];
        for first in [0, WAL_HEADER_WORDS] {
            (words[first], words[first + 3]) = (WAL_INDEX_VERSION, u32::from_ne_bytes([1, 0, 0, 0]));
        }
        let is_idle = |words: [u32; WAL_INDEX_WORDS]| super::is_idle(|at| words[at]);
        assert!(is_idle(words));
        assert_eq!(of_words(words), None, "it says nothing of the file");
        assert!(!is_idle(wal_index(4096)) && !is_idle(wal_index(1024)));
        assert!(!is_idle([0; WAL_INDEX_WORDS]), "it is not made yet");
        let set = |at: &[usize], word: u32| {
            let mut words = words;
            at.iter().for_each(|&at| words[at] = word);
            is_idle(words)
        };
        assert!(!set(&[FRAMES, FRAMES + WAL_HEADER_WORDS], 1), "it has a frame");
        assert!(!set(&[FRAMES], 1) && !set(&[FRAMES + WAL_HEADER_WORDS], 1), "it is just written");
        assert!(!set(&[BACKFILLED], 1) && !set(&[ATTEMPTED], 1), "frames were copied");
        let page = u32::from_ne_bytes([1, 0, 0, 16]);
        assert!(!set(&[3, 3 + WAL_HEADER_WORDS], page), "it had frames");
    }

    #[test]
    fn the_stamp_of_an_idle_log_is_the_header_and_the_times() {
        let times = |at| Settled::of_times(Times::of_change((at, 5)));
        let before = Stamp::of_idle(header(4096, 2, 7), times(1000)).unwrap();
        assert_eq!(before.page_bytes, 4096);
        assert!(!before.is_rollback());
        assert_eq!(Stamp::of_idle(header(4096, 2, 7), times(1000)), Some(before));
        assert_ne!(Stamp::of_idle(header(4096, 2, 7), times(1001)), Some(before));
        assert_ne!(Stamp::of_idle(header(4096, 2, 8), times(1000)), Some(before));
        assert_ne!(Stamp::of_header(header(4096, 2, 7)), Some(before));
        assert_eq!(Stamp::of_idle(header(1024, 2, 7), times(1000)), None);
    }

    #[test]
    fn stamps_that_differ_have_other_bytes() {
        let times = Settled::of_times(Times::of_change((1000, 5)));
        let words = wal_index(4096);
        let add = |at: &[usize]| {
            let mut words = words;
            at.iter().for_each(|&at| words[at] += 1);
            of_words(words).unwrap()
        };
        let stamps = [
            Stamp::of_header(header(4096, 1, 7)).unwrap(),
            Stamp::of_header(header(4096, 1, 8)).unwrap(),
            Stamp::of_header(header(8192, 1, 7)).unwrap(),
            Stamp::of_idle(header(4096, 1, 7), times).unwrap(),
            of_words(words).unwrap(),
            add(&[SALTS, SALTS + WAL_HEADER_WORDS]),
            add(&[SALTS + 1, SALTS + 1 + WAL_HEADER_WORDS]),
            add(&[BACKFILLED]),
            add(&[ATTEMPTED]),
        ];
        let bytes: std::collections::HashSet<_> = stamps.iter().map(Stamp::bytes).collect();
        assert_eq!(bytes.len(), stamps.len());
        assert!(bytes.iter().all(|bytes| bytes.len() <= 29));
        assert_eq!(of_words(words).unwrap().bytes(), stamps[4].bytes());
    }

    #[test]
    fn a_log_that_is_just_restarted_has_no_stamp() {
        let old = wal_index(4096);
        // In the order in which SQLite writes: the second copy of the header, the first, what was copied back.
        let mut new = old;
        for first in [WAL_HEADER_WORDS, 0] {
            (new[first + FRAMES], new[first + SALTS]) = (0, 8);
            assert_eq!(of_words(new), None, "the copy at {first} is written");
        }
        new[BACKFILLED] = 0;
        new[ATTEMPTED] = 0;
        assert!(of_words(new).is_some_and(|stamp| Some(stamp) != of_words(old)));
        // A reader of the words that is overtaken after any number of them.
        for overtaken in 0..=WAL_INDEX_WORDS {
            let read = std::cell::Cell::new(0);
            let word = |at: usize| {
                read.set(read.get() + 1);
                if read.get() > overtaken { new[at] } else { old[at] }
            };
            let stamp = Stamp::of_wal_index(word);
            assert!(
                stamp.is_none() || stamp == of_words(old) || stamp == of_words(new),
                "{overtaken}: {stamp:?}"
            );
        }
    }
}
