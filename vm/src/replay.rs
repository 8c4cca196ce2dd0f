//! Replay: a record as a plan: the pages that are read, in which order, and those of them that are supplied.
//!
//! ```text
//!   record     9 512 3 4 700 | 1 8 8192 5 ..              pages in the order of their first touch
//!   batches    3 4 9 512 700 | 1 5 8 8192 ..              256 pages, then 512, .. , 8,192 (an object: then 1,024, ..
//!                                                         65,536): each sorted
//!   pieces     [3 4 9] [512 700] | [1 5 8] [8192] ..      what of a batch lies in the same 2 MiB of the image
//!   reads      3--9    512   700                          small gaps are read with what lies around them
//!   supplied   3 4  9  512   700                          exactly the pages of the record, if they are what they were
//! ```
//!
//! **Reads.** A gap of 16 KiB costs a local disk less than another request. A store's requests cost 20 ms, and the disk
//! tier reads and compares 64 KiB at once ([`ReplayReads::REMOTE`]). Bytes that are read beyond the record's pages stay
//! in the cache, where later batches find them. So an object whose pages lie scattered is fetched once, if it fits:
//! gaps are left out if all that is read would be more than half of the cache ([`ReplayReads::REMOTE_SPARSE`]). Each 64
//! KiB is a range of its own, because the tier has a range whole or not at all; the store's backend joins them. Pages
//! that lie alone are read alone.
//!
//! Large sorted reads are what a device is fast at; the order of touch is what a VM waits for. So the record is sorted
//! in batches: small at first, since the VM begins with them, and large later, when the replay is ahead. Pieces do not
//! cross 2 MiB of the image, so that the cache's folios are whole and its memory is not cut up.
//!
//! **Stale.** Each page is compared with its digest before it is supplied. One that differs is left to its fault. When
//! of the pages compared, [`COMPARED_MIN`] at least, more than half differ, the record is of another snapshot, and no
//! further page of it is read ([`Replay::note`]).
//!
//! Shared by all VMs; where a VM is in it is the VM's own ([`ReplayCursor`]). Pure, but for two counters.
//!
//! Invariant: each page of the record is in one piece.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use quinion::internals::units::PAGE_SIZE;

use super::fault_record::{FaultRecord, RecordedPage};

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages of the first batch.
const BATCH_PAGES: usize = 256;
/// Bytes whose reads are started by one call, at most, beside those of the last piece.
const WARM_BYTES_EACH: u64 = 8 << 20;
/// Pages of the image in which a piece lies: 2 MiB.
const PIECE_PAGES: u32 = 512;
/// Pages that are compared before a record may be found stale.
const COMPARED_MIN: u64 = 256;

/// How the pages of a record are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplayReads {
    /// Reads begin and end at multiples of so many pages of the image: a power of two, 64 at most.
    pub(super) unit_pages: u32,
    /// The longest gap that is read with what lies around it, in pages.
    pub(super) gap_pages_max: u32,
    /// A batch has so many times the pages of the one before, up to `batch_pages_max`.
    pub(super) batch_growth: usize,
    pub(super) batch_pages_max: usize,
    /// Whether each unit is read by itself, also where neighbours are read with it.
    pub(super) splits_units: bool,
}

impl ReplayReads {
    pub(super) const LOCAL: Self =
        Self { unit_pages: 1, gap_pages_max: 4, batch_growth: 2, batch_pages_max: 8192, splits_units: false };
    /// Units are extents of the disk tier. Gaps: of a store that answers 32 requests at a time, each after 20 ms, at 1
    /// GB/s, what one of them could bring in its time.
    pub(super) const REMOTE: Self = Self {
        unit_pages: 16,
        gap_pages_max: 128,
        batch_growth: 4,
        batch_pages_max: 1 << 16,
        splits_units: true,
    };
    pub(super) const REMOTE_SPARSE: Self = Self { gap_pages_max: 16, ..Self::REMOTE };

    /// For an object, of which `record` is replayed through a cache of `memory_bytes`.
    pub(super) fn remote(record: &FaultRecord, memory_bytes: u64) -> Self {
        let mut entries = record.entries().to_vec();
        entries.sort_unstable_by_key(|entry| entry.page);
        let read = bytes_of(Self::REMOTE.of_pages(&entries, &named_pages(&entries)));
        if read <= memory_bytes / 2 { Self::REMOTE } else { Self::REMOTE_SPARSE }
    }

    /// The ranges to be read for `entries`, which are in the image's order, of a record that names the pages `named`.
    fn of_pages<'e>(
        self,
        entries: &'e [RecordedPage],
        named: &'e [u64],
    ) -> impl Iterator<Item = Range<u64>> + 'e {
        let unit = u64::from(self.unit_pages);
        let runs = entries.chunk_by(move |a, b| b.page - a.page <= self.gap_pages_max + 1);
        runs.flat_map(move |run| {
            let (first, last) = (u64::from(run[0].page), u64::from(run[run.len() - 1].page));
            // Of pages that lie alone in the record no others are read.
            let of_unit =
                named[(first / 64) as usize] >> (first / unit * unit % 64) & (u64::MAX >> (64 - unit));
            let is_alone = first / unit == last / unit && of_unit.count_ones() as usize == run.len();
            let (begin, end) =
                if is_alone { (first, last + 1) } else { (first / unit * unit, (last / unit + 1) * unit) };
            let step = if self.splits_units && !is_alone { unit } else { end - begin };
            let read = move |from| from * PAGE..end.min(from + step) * PAGE;
            (begin..end).step_by(step as usize).map(read)
        })
    }
}

/// Gaps are as long as a unit, or two runs could share one, which would be read twice.
const _: () = assert!(ReplayReads::REMOTE_SPARSE.gap_pages_max >= ReplayReads::REMOTE_SPARSE.unit_pages);

/// A bit for each page of the image that `entries` name.
fn named_pages(entries: &[RecordedPage]) -> Vec<u64> {
    let mut named = vec![0; entries.iter().map(|entry| entry.page as usize / 64 + 1).max().unwrap_or(0)];
    entries.iter().for_each(|entry| named[entry.page as usize / 64] |= 1 << (entry.page % 64));
    named
}

fn bytes_of(reads: impl Iterator<Item = Range<u64>>) -> u64 {
    reads.map(|read| read.end - read.start).sum()
}

#[derive(Debug)]
pub(super) struct Replay {
    reads: ReplayReads,
    entries: Vec<RecordedPage>,
    /// Which entries each piece has, and how many bytes the pieces before it read.
    pieces: Vec<(Range<usize>, u64)>,
    /// A bit for each page of the image that it names.
    named: Vec<u64>,
    compared: AtomicU64,
    differing: AtomicU64,
    is_stale: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ReplayCursor {
    /// The piece that is supplied now.
    piece: usize,
    done: usize,
    /// The first piece whose reads were not started.
    warm: usize,
}

impl Replay {
    pub(super) fn new(record: &FaultRecord, reads: ReplayReads) -> Self {
        let (mut entries, mut pieces) = (record.entries().to_vec(), Vec::new());
        let named = named_pages(&entries);
        let (mut begin, mut batch, mut read) = (0, BATCH_PAGES, 0);
        while begin < entries.len() {
            let end = entries.len().min(begin + batch);
            entries[begin..end].sort_unstable_by_key(|entry| entry.page);
            for piece in entries[begin..end].chunk_by(|a, b| a.page / PIECE_PAGES == b.page / PIECE_PAGES) {
                pieces.push((begin..begin + piece.len(), read));
                read += bytes_of(reads.of_pages(piece, &named));
                begin += piece.len();
            }
            batch = (reads.batch_growth * batch).min(reads.batch_pages_max);
        }
        let (compared, differing) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { reads, entries, pieces, named, compared, differing, is_stale: AtomicBool::new(false) }
    }

    pub(super) fn names(&self, offset: u64) -> bool {
        let page = (offset / PAGE) as usize;
        self.named.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    fn is_stale(&self) -> bool {
        self.is_stale.load(Ordering::Relaxed) // a VM that finds out late has read some more
    }

    /// Notes that `compared` pages were compared, and `differing` of them differ. If that has made the record stale: of
    /// how many pages, once.
    pub(super) fn note(&self, compared: u64, differing: u64) -> Option<(u64, u64)> {
        // Relaxed: numbers that add up, in whatever order they come.
        let compared = compared + self.compared.fetch_add(compared, Ordering::Relaxed);
        let differing = differing + self.differing.fetch_add(differing, Ordering::Relaxed);
        let is_stale = compared >= COMPARED_MIN && 2 * differing > compared;
        (is_stale && !self.is_stale.swap(true, Ordering::Relaxed)).then_some((differing, compared))
    }
}

impl ReplayCursor {
    pub(super) fn has_more(&self, replay: &Replay) -> bool {
        self.piece < replay.pieces.len() && !replay.is_stale()
    }

    /// The next pages to be supplied, which follow each other in the image: `bytes_max` bytes at most.
    pub(super) fn next<'r>(&self, replay: &'r Replay, bytes_max: u64) -> Option<&'r [RecordedPage]> {
        let (piece, _) = replay.pieces.get(self.piece).filter(|_| !replay.is_stale())?;
        let entries = &replay.entries[piece.start + self.done..piece.end];
        let run = entries.chunk_by(|a, b| a.page + 1 == b.page).next()?;
        Some(&run[..run.len().min((bytes_max / PAGE).max(1) as usize)])
    }

    /// Moves on by `pages` pages, which were supplied, or left out.
    pub(super) fn pass(&mut self, replay: &Replay, pages: usize) {
        self.done += pages;
        if self.done >= replay.pieces[self.piece].0.len() {
            (self.piece, self.done) = (self.piece + 1, 0);
        }
        self.warm = self.warm.max(self.piece);
    }

    /// The ranges to be read now, so that `bytes_max` bytes are on their way at most, or one piece. Calls that follow
    /// have more of them: the caller's thread serves faults in between.
    pub(super) fn warm(&mut self, replay: &Replay, bytes_max: u64) -> Vec<Range<u64>> {
        let (mut reads, first) = (Vec::new(), replay.pieces.get(self.warm).map_or(0, |(_, before)| *before));
        while self.has_more(replay)
            && let Some((piece, before)) = replay.pieces.get(self.warm)
            && (self.warm == self.piece || before - replay.pieces[self.piece].1 < bytes_max)
            && before - first < WARM_BYTES_EACH
        {
            reads.extend(replay.reads.of_pages(&replay.entries[piece.clone()], &replay.named));
            self.warm += 1;
        }
        reads
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fault_record::{ImageIdentity, Recorder, digest};

    fn traced(pages: &[u32]) -> FaultRecord {
        let mut recorder = Recorder::new(ImageIdentity { bytes: 1 << 30, fingerprint: 1 });
        pages.iter().for_each(|&page| recorder.note(u64::from(page) * PAGE, &[page as u8; PAGE_SIZE]));
        recorder.record()
    }

    fn replayed(replay: &Replay, bytes_max: u64, ahead_bytes: u64) -> (Vec<u32>, Vec<Range<u64>>) {
        let (mut cursor, mut pages, mut reads) = (ReplayCursor::default(), Vec::new(), Vec::new());
        while cursor.has_more(replay) {
            reads.append(&mut cursor.warm(replay, ahead_bytes));
            let next = cursor.next(replay, bytes_max).expect("there is more");
            assert!(!next.is_empty() && next.len() as u64 * PAGE <= bytes_max.max(PAGE));
            assert!(next.windows(2).all(|pair| pair[0].page + 1 == pair[1].page));
            for entry in next {
                let at = u64::from(entry.page) * PAGE;
                assert!(reads.iter().any(|read| read.contains(&at)), "page {} was not read", entry.page);
                assert_eq!(entry.digest, digest(&[entry.page as u8; PAGE_SIZE]));
                pages.push(entry.page);
            }
            cursor.pass(replay, next.len());
        }
        (pages, reads)
    }

    #[test]
    fn a_batch_is_read_in_the_order_of_the_image_and_small_gaps_with_it() {
        let replay = Replay::new(&traced(&[700, 9, 3, 512, 4, 1023]), ReplayReads::LOCAL);
        let (pages, reads) = replayed(&replay, 1 << 20, 1 << 20);
        assert_eq!(pages, [3, 4, 9, 512, 700, 1023]);
        let bytes = |first: u64, last: u64| first * PAGE..(last + 1) * PAGE;
        assert_eq!(reads, [bytes(3, 9), bytes(512, 512), bytes(700, 700), bytes(1023, 1023)]);
    }

    #[test]
    fn an_object_is_read_by_extents_of_the_disk_tier_and_over_gaps_that_a_request_spans() {
        let replay = Replay::new(&traced(&[130, 70, 17, 3, 511, 512]), ReplayReads::REMOTE);
        let (pages, reads) = replayed(&replay, 1 << 20, 1 << 20);
        assert_eq!(pages, [3, 17, 70, 130, 511, 512]);
        let unit = |number: u64| 16 * number * PAGE..16 * (number + 1) * PAGE;
        let alone = |page: u64| page * PAGE..(page + 1) * PAGE;
        let read: Vec<_> = (0..9).map(unit).chain([511, 512].map(alone)).collect();
        assert_eq!(reads, read);
    }

    #[test]
    fn gaps_are_left_out_where_all_that_is_read_does_not_fit() {
        let record = traced(&(0..1000).map(|nth| nth * 100).collect::<Vec<_>>());
        let named = named_pages(record.entries());
        let read = |memory| bytes_of(ReplayReads::remote(&record, memory).of_pages(record.entries(), &named));
        let all = 1000 * 100 * PAGE;
        assert!((all - 100 * PAGE..=all).contains(&read(4 * all)), "{}", read(4 * all));
        assert_eq!(read(all), 1000 * PAGE);
    }

    #[test]
    fn the_last_page_that_a_record_can_name_is_read() {
        let entries = [u32::MAX - 40, u32::MAX].map(|page| RecordedPage { page, digest: 0 });
        let named = named_pages(&entries);
        for kind in [ReplayReads::LOCAL, ReplayReads::REMOTE, ReplayReads::REMOTE_SPARSE] {
            let end = kind.of_pages(&entries, &named).map(|read| read.end).max();
            assert_eq!(end, Some((u64::from(u32::MAX) + 1) * PAGE), "{kind:?}");
        }
    }

    #[test]
    fn a_trace_names_its_pages_and_no_others() {
        let replay = Replay::new(&traced(&[64, 0, 63, 700]), ReplayReads::LOCAL);
        let named = (0..1000).filter(|&page| replay.names(page * PAGE + page % PAGE));
        assert_eq!(Vec::from_iter(named), [0, 63, 64, 700]);
        assert!(!Replay::new(&traced(&[]), ReplayReads::LOCAL).names(0));
    }

    #[test]
    fn pages_of_the_beginning_come_before_those_of_the_end_wherever_they_lie() {
        let order: Vec<u32> = (0..2000).map(|i| 5000 - i).collect();
        let (pages, _) = replayed(&Replay::new(&traced(&order), ReplayReads::LOCAL), 1 << 20, 1 << 20);
        let first: Vec<u32> = pages[..256].to_vec();
        assert!(first.iter().all(|page| order[..256].contains(page)));
        assert!(first.is_sorted());
    }

    #[test]
    fn a_trace_of_another_snapshot_is_given_up_once_and_one_of_this_is_not() {
        let replay = Replay::new(&traced(&(0..1000).collect::<Vec<_>>()), ReplayReads::LOCAL);
        assert_eq!(replay.note(COMPARED_MIN - 1, COMPARED_MIN - 1), None, "too few to say so");
        assert_eq!(replay.note(COMPARED_MIN + 1, 0), None, "half of them are right");
        assert!(ReplayCursor::default().has_more(&replay));
        assert_eq!(replay.note(4, 4), Some((259, 516)));
        assert_eq!(replay.note(2, 2), None, "it was said");
        assert!(!ReplayCursor::default().has_more(&replay));
        assert_eq!(ReplayCursor::default().next(&replay, PAGE), None);
    }

    proptest! {
        #[test]
        fn each_page_is_read_and_supplied_once(
            pages in prop::collection::vec(0..20_000_u32, 0..3000),
            bytes_max in 1..600_u64,
            ahead_bytes in 0..4_000_000_u64,
            is_remote in any::<bool>(),
        ) {
            let record = traced(&pages);
            let kind = if is_remote { ReplayReads::REMOTE } else { ReplayReads::LOCAL };
            let replay = Replay::new(&record, kind);
            let (mut found, reads) = replayed(&replay, bytes_max * PAGE, ahead_bytes);
            found.sort_unstable();
            let mut wanted: Vec<u32> = record.entries().iter().map(|entry| entry.page).collect();
            wanted.sort_unstable();
            prop_assert_eq!(found, wanted);
            let piece = u64::from(PIECE_PAGES) * PAGE;
            prop_assert!(reads.iter().all(|read| read.start / piece == (read.end - 1) / piece));
        }
    }
}
