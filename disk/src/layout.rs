//! Layout: the bytes of the file, encoded and decoded. It does no input or output.
//!
//! ```text
//!   byte 0        superblock: magic, format, size, the store's number
//!   byte 1 MiB    segment 0 | segment 1 | ...           1 MiB each, written in turn, round and round
//!
//!   a segment     table, 4 pages                        | 252 pages of data
//!                 sequence, and an entry for each extent: content, first page, pages, where, checksum
//! ```
//!
//! A segment is written by one write, without a sync between its table and its data, so a power cut may leave any
//! mixture of an old and a new segment. The table has a checksum over itself, and each of its entries one over the
//! extent's bytes, seeded by what the extent is. So an extent that is torn, of another lap of the ring, or at another
//! place than its entry says is not there.
//!
//! All numbers are little-endian. A decoder trusts nothing: whatever the bytes are, it returns entries that lie in
//! their segment, or none.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// The smallest store, in bytes.
pub const BYTES_MIN: u64 = 16 << 20;
/// The largest: as many segments as a number of 32 bits can name, and far more than index memory should hold.
pub const BYTES_MAX: u64 = 1 << 46;
/// Bytes of a segment; the superblock has as many to itself.
pub const SEGMENT_BYTES: usize = 1 << 20;
/// Pages at the start of a segment that hold its table.
pub const TABLE_PAGES: usize = 4;
/// Pages of a segment that hold data.
pub const DATA_PAGES: usize = SEGMENT_BYTES / PAGE_BYTES - TABLE_PAGES;
/// The most pages of an extent: the unit that is checked as a whole, 64 KiB.
pub const EXTENT_PAGES_MAX: usize = 16;

const MAGIC: [u8; 8] = *b"qniodisk";
const TABLE_MAGIC: [u8; 8] = *b"qnioseg1";
const FORMAT: u32 = 1;
const TABLE_HEAD_BYTES: usize = 48;
const ENTRY_BYTES: usize = 56;
const _: () = assert!(TABLE_HEAD_BYTES + DATA_PAGES * ENTRY_BYTES <= TABLE_PAGES * PAGE_BYTES);

/// Names one content: whatever has the same key and page number has the same bytes, for as long as the key is used.
/// Make it of a cryptographic digest of all that tells the content apart from others, its version included.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ContentKey(pub [u8; 32]);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// Tells this store's segments from those of a store that was in the file before.
    pub store: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub key: ContentKey,
    pub page: u64,
    pub at: u16,
    /// 1 to [`EXTENT_PAGES_MAX`].
    pub pages: u16,
    pub checksum: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    /// Rises with each segment that the store writes.
    pub sequence: u64,
    pub entries: Vec<Entry>,
}

/// A checksum of the bytes, seeded by the key and the page that they belong to.
pub fn checksum(key: &ContentKey, page: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, xxh3_64_with_seed(&key.0, page))
}

/// Where a segment begins in the file, in bytes.
pub fn segment_start(segment: u32) -> u64 {
    (u64::from(segment) + 1) * SEGMENT_BYTES as u64
}

/// The bytes of a segment in which `pages` data pages from data page `at` on are.
pub fn data_bytes(at: u16, pages: u16) -> Range<usize> {
    let start = (TABLE_PAGES + usize::from(at)) * PAGE_BYTES;
    start..start + usize::from(pages) * PAGE_BYTES
}

impl Superblock {
    pub fn encode(&self, page: &mut [u8]) {
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        page[12..16].copy_from_slice(&(SEGMENT_BYTES as u32).to_le_bytes());
        page[16..24].copy_from_slice(&self.store.to_le_bytes());
        let sum = xxh3_64_with_seed(&page[..24], 0);
        page[24..32].copy_from_slice(&sum.to_le_bytes());
    }

    pub fn decode(page: &[u8]) -> SuperblockState {
        let head = &page[..32];
        if head.iter().all(|&byte| byte == 0) {
            return SuperblockState::Empty;
        }
        if head[..8] != MAGIC {
            return SuperblockState::Foreign;
        }
        let is_whole = xxh3_64_with_seed(&head[..24], 0) == u64_at(head, 24);
        let is_ours = u32_at(head, 8) == FORMAT && u32_at(head, 12) as usize == SEGMENT_BYTES;
        if is_whole && is_ours {
            SuperblockState::Valid(Self { store: u64_at(head, 16) })
        } else {
            SuperblockState::Outdated
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SuperblockState {
    /// The superblock is zeros: no store was ever written there.
    Empty,
    /// A store that this code can read.
    Valid(Superblock),
    /// A store of another format, or one whose superblock is torn: its contents are lost, and it may be made anew.
    Outdated,
    /// No store: it must not be overwritten.
    Foreign,
}

impl Table {
    /// Writes it to the first [`TABLE_PAGES`] pages of a segment of the store.
    ///
    /// # Panics
    /// If there are more entries than a segment has data pages.
    pub fn encode(&self, store: u64, bytes: &mut [u8]) {
        assert!(self.entries.len() <= DATA_PAGES, "each entry has a page at least");
        bytes[..8].copy_from_slice(&TABLE_MAGIC);
        bytes[16..24].copy_from_slice(&store.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[32..40].copy_from_slice(&(self.entries.len() as u64).to_le_bytes());
        bytes[40..48].fill(0);
        for (entry, to) in self.entries.iter().zip(bytes[TABLE_HEAD_BYTES..].chunks_exact_mut(ENTRY_BYTES)) {
            to[..32].copy_from_slice(&entry.key.0);
            to[32..40].copy_from_slice(&entry.page.to_le_bytes());
            to[40..48].copy_from_slice(&entry.checksum.to_le_bytes());
            to[48..50].copy_from_slice(&entry.at.to_le_bytes());
            to[50..52].copy_from_slice(&entry.pages.to_le_bytes());
            to[52..56].fill(0);
        }
        let end = TABLE_HEAD_BYTES + self.entries.len() * ENTRY_BYTES;
        let sum = xxh3_64_with_seed(&bytes[16..end], 0);
        bytes[8..16].copy_from_slice(&sum.to_le_bytes());
    }

    /// How many bytes of a segment with that first page [`Table::decode`] looks at.
    pub fn bytes_of(first_page: &[u8]) -> usize {
        let entries = usize::try_from(u64_at(first_page, 32)).unwrap_or(usize::MAX).min(DATA_PAGES);
        (TABLE_HEAD_BYTES + entries * ENTRY_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Reads the first pages of a segment. `None`: it has no table, or one of another store, or a torn one.
    pub fn decode(store: u64, bytes: &[u8]) -> Option<Self> {
        let is_ours = bytes[..8] == TABLE_MAGIC && u64_at(bytes, 16) == store;
        let count =
            usize::try_from(u64_at(bytes, 32)).ok().filter(|&count| is_ours && count <= DATA_PAGES)?;
        let end = TABLE_HEAD_BYTES + count * ENTRY_BYTES;
        if xxh3_64_with_seed(bytes.get(16..end)?, 0) != u64_at(bytes, 8) {
            return None;
        }
        let mut entries = Vec::with_capacity(count);
        for from in bytes[TABLE_HEAD_BYTES..end].chunks_exact(ENTRY_BYTES) {
            entries.push(decode_entry(from)?);
        }
        Some(Self { sequence: u64_at(bytes, 24), entries })
    }
}

fn decode_entry(from: &[u8]) -> Option<Entry> {
    let (at, pages) = (u16_at(from, 48), u16_at(from, 50));
    let page = u64_at(from, 32);
    let in_segment = usize::from(at) + usize::from(pages) <= DATA_PAGES;
    let in_content = page.checked_add(u64::from(pages))? <= u64::MAX / PAGE_BYTES as u64;
    let is_sound = in_segment && in_content && (1..=EXTENT_PAGES_MAX).contains(&usize::from(pages));
    let key = ContentKey(from[..32].try_into().ok()?);
    is_sound.then_some(Entry { key, page, at, pages, checksum: u64_at(from, 40) })
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]))
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let entry = (any::<[u8; 32]>(), 0u64..1 << 40, 0u16..200, 1u16..=16, any::<u64>()).prop_map(
            |(key, page, at, pages, checksum)| Entry { key: ContentKey(key), page, at, pages, checksum },
        );
        prop::collection::vec(entry, 0..=DATA_PAGES)
    }

    proptest! {
        #[test]
        fn a_table_is_read_as_it_was_written(entries in entries(), sequence: u64, store: u64) {
            let mut bytes = vec![0xaa; TABLE_PAGES * PAGE_BYTES];
            let table = Table { sequence, entries };
            table.encode(store, &mut bytes);
            let len = Table::bytes_of(&bytes[..PAGE_BYTES]);
            prop_assert_eq!(Table::decode(store, &bytes[..len]), Some(table));
            prop_assert_eq!(Table::decode(store ^ 1, &bytes), None);
        }

        #[test]
        fn a_table_with_a_flipped_bit_is_none(entries in entries(), at: prop::sample::Index, bit in 0u8..8) {
            let mut bytes = vec![0; TABLE_PAGES * PAGE_BYTES];
            let end = TABLE_HEAD_BYTES + entries.len() * ENTRY_BYTES;
            Table { sequence: 7, entries }.encode(3, &mut bytes);
            bytes[at.index(end)] ^= 1 << bit;
            prop_assert_eq!(Table::decode(3, &bytes), None);
        }

        #[test]
        fn no_bytes_make_an_entry_that_leaves_its_segment(
            mut bytes in prop::collection::vec(any::<u8>(), PAGE_BYTES), count in 0u64..300,
        ) {
            bytes[..8].copy_from_slice(&TABLE_MAGIC);
            bytes[16..24].copy_from_slice(&3u64.to_le_bytes());
            bytes[32..40].copy_from_slice(&count.to_le_bytes());
            let end = (TABLE_HEAD_BYTES + count as usize * ENTRY_BYTES).min(PAGE_BYTES);
            let sum = xxh3_64_with_seed(&bytes[16..end], 0);
            bytes[8..16].copy_from_slice(&sum.to_le_bytes());
            for entry in Table::decode(3, &bytes).into_iter().flat_map(|table| table.entries) {
                prop_assert!(data_bytes(entry.at, entry.pages).end <= SEGMENT_BYTES);
                prop_assert!(usize::from(entry.pages) <= EXTENT_PAGES_MAX && entry.pages > 0);
            }
        }
    }

    #[test]
    fn a_superblock_says_what_is_in_the_file() {
        let mut page = vec![0; PAGE_BYTES];
        assert_eq!(Superblock::decode(&page), SuperblockState::Empty);
        Superblock { store: 9 }.encode(&mut page);
        assert_eq!(Superblock::decode(&page), SuperblockState::Valid(Superblock { store: 9 }));
        page[17] ^= 1;
        assert_eq!(Superblock::decode(&page), SuperblockState::Outdated);
        page[0] ^= 1;
        assert_eq!(Superblock::decode(&page), SuperblockState::Foreign);
    }

    #[test]
    fn a_checksum_is_of_the_place_as_well() {
        let (key, bytes) = (ContentKey([1; 32]), vec![5; PAGE_BYTES]);
        let sum = checksum(&key, 4, &bytes);
        assert_eq!(sum, checksum(&key, 4, &bytes));
        assert_ne!(sum, checksum(&key, 5, &bytes));
        assert_ne!(sum, checksum(&ContentKey([2; 32]), 4, &bytes));
    }
}
