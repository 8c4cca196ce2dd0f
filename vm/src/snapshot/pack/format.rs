//! Format: the header and the index of a pack, as bytes and as numbers that were checked. Pure.
//!
//! ```text
//!   header, 128 --> version, sizes in their bounds, identity right --> how long the index is
//!   index       --> digest right --> each name and each entry right --> where each chunk lies
//! ```
//!
//! The essay of `pack.rs` has the layout. All of it may come from an attacker, so a number is used only after it was
//! compared: a length is never more than the file has, and none is allocated that the file could choose.
//!
//! Invariants:
//!  1. A chunk of a checked index lies between the index and the end magic of its file, and is stored in
//!     [`Header::chunk_bytes`] bytes at most.
//!  2. A name of a checked index is one file's in a folder: no other folder's, and not the folder's own.

use std::ffi::OsStr;
use std::fmt;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

use sha2::{Digest, Sha256};

use super::super::recognition::{END_MAGIC, MAGIC};

pub(super) const VERSION: u32 = 1;
pub(super) const HEADER_BYTES: usize = 128;
pub(super) const NAME_BYTES: usize = 288;
pub(super) const ENTRY_BYTES: usize = 48;
pub(super) const END_BYTES: u64 = END_MAGIC.len() as u64;
/// Bytes of a chunk: a power of two in this range.
pub(super) const CHUNK_BYTES: std::ops::RangeInclusive<u32> = 64 << 10..=4 << 20;
/// Chunks of a snapshot at most. Their entries take 192 MiB.
pub(super) const CHUNKS_MAX: u64 = 1 << 22;
/// Packs that a pack refers to, at most: each is looked at whenever a VM is answered.
pub(super) const PACKS_MAX: u32 = 64;
/// Where the identity begins, which covers all of the header before it.
const IDENTITY_AT: usize = 96;

pub(super) type ChunkDigest = [u8; 32];

/// Which pack a file is: the SHA-256 of the head of its header, and so of its index with the digests of all chunks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackIdentity(pub [u8; 32]);

/// In hexadecimal digits.
impl fmt::Display for PackIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PackIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A header whose numbers are in their bounds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub chunk_bytes: u32,
    /// The snapshot's size.
    pub bytes: u64,
    /// The pack's own size.
    pub file_bytes: u64,
    pub packs: u32,
    pub index_digest: [u8; 32],
    pub identity: PackIdentity,
}

/// Another pack, by its name in the folder and its identity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PackName {
    pub identity: PackIdentity,
    pub name: Vec<u8>,
}

/// How a chunk is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChunkForm {
    Raw,
    Zstd,
}

/// A chunk that is not zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StoredChunk {
    /// The pack that it lies in: 0 is this one, and n the nth name.
    pub pack: u16,
    pub form: ChunkForm,
    /// Length of the stored chunk in bytes.
    pub bytes: u32,
    /// Where they begin in the pack's file.
    pub offset: u64,
    /// SHA-256 of the chunk itself.
    pub digest: ChunkDigest,
}

/// A header with its names and entries, all of them checked.
pub(super) struct Index {
    pub header: Header,
    pub packs: Vec<PackName>,
    entries: Vec<u8>,
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index")
            .field("header", &self.header)
            .field("packs", &self.packs)
            .finish_non_exhaustive()
    }
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn digest_at(bytes: &[u8], at: usize) -> [u8; 32] {
    bytes[at..at + 32].try_into().expect("32 bytes")
}

fn is_zeros(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

fn to_be_copied_again(what: &str) -> String {
    format!("{what} is damaged: its checksum differs; copy the pack again, or pack the snapshot anew")
}

fn impossible(what: impl fmt::Display) -> String {
    format!("{what}, which no pack has; name a file that `quinion pack` wrote, or pack the snapshot anew")
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..16].copy_from_slice(&MAGIC);
        bytes[16..20].copy_from_slice(&VERSION.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.chunk_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.file_bytes.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.packs.to_le_bytes());
        bytes[48..80].copy_from_slice(&self.index_digest);
        let identity = identity_of(&bytes);
        bytes[IDENTITY_AT..].copy_from_slice(&identity.0);
        bytes
    }

    /// The header of a pack of `file_bytes` bytes; if it is none, why.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES], file_bytes: u64) -> Result<Self, String> {
        if bytes[..16] != MAGIC {
            let why = "this is no pack, or one that is damaged in its first bytes; name a file that `quinion pack` \
                       wrote, or copy it again";
            return Err(why.to_owned());
        }
        let version = half(bytes, 16);
        if version != VERSION {
            return Err(format!(
                "the pack has version {version}, and this release reads version {VERSION}; use the release that \
                 wrote it, or pack the snapshot anew"
            ));
        }
        let identity = PackIdentity(digest_at(bytes, IDENTITY_AT));
        if identity != identity_of(bytes) {
            return Err(to_be_copied_again("the pack's header"));
        }
        let header = Self {
            chunk_bytes: half(bytes, 20),
            bytes: word(bytes, 24),
            file_bytes: word(bytes, 32),
            packs: half(bytes, 40),
            index_digest: digest_at(bytes, 48),
            identity,
        };
        if !is_zeros(&bytes[44..48]) || !is_zeros(&bytes[80..IDENTITY_AT]) {
            return Err(impossible("the pack's header has bytes other than zeros where version 1 has none"));
        }
        header.check(file_bytes).map(|()| header)
    }

    fn check(&self, file_bytes: u64) -> Result<(), String> {
        let Self { chunk_bytes, bytes, packs, .. } = *self;
        if !chunk_bytes.is_power_of_two() || !CHUNK_BYTES.contains(&chunk_bytes) {
            return Err(impossible(format_args!("the pack's chunks have {chunk_bytes} bytes")));
        }
        if bytes == 0 || self.chunks() > CHUNKS_MAX {
            return Err(impossible(format_args!("the pack's snapshot has {bytes} bytes")));
        }
        if packs > PACKS_MAX {
            return Err(impossible(format_args!("the pack refers to {packs} others")));
        }
        if self.file_bytes != file_bytes {
            return Err(format!(
                "the pack has {file_bytes} bytes, and its header says {}: it is cut, or not all of it was copied; \
                 copy it again",
                self.file_bytes
            ));
        }
        // 64 names and 2^22 entries: no sum of these overflows.
        if self.front_bytes() + END_BYTES > file_bytes {
            return Err(impossible("the pack's index is longer than its file"));
        }
        Ok(())
    }

    pub(super) fn chunks(&self) -> u64 {
        self.bytes.div_ceil(u64::from(self.chunk_bytes))
    }

    /// Bytes of a chunk: the last one is shorter if the snapshot is no multiple.
    pub(super) fn chunk_len(&self, chunk: u64) -> usize {
        let (first, chunk_bytes) = (chunk * u64::from(self.chunk_bytes), u64::from(self.chunk_bytes));
        self.bytes.saturating_sub(first).min(chunk_bytes) as usize
    }

    /// Bytes of header, names and entries.
    pub(super) fn front_bytes(&self) -> u64 {
        front_bytes(self.packs, self.chunks())
    }

    /// Where chunks may lie in the file.
    fn data(&self) -> Range<u64> {
        self.front_bytes()..self.file_bytes - END_BYTES
    }
}

/// The identity of a header is over its bytes before it.
fn identity_of(bytes: &[u8; HEADER_BYTES]) -> PackIdentity {
    PackIdentity(Sha256::digest(&bytes[..IDENTITY_AT]).into())
}

pub(super) fn front_bytes(packs: u32, chunks: u64) -> u64 {
    HEADER_BYTES as u64 + u64::from(packs) * NAME_BYTES as u64 + chunks * ENTRY_BYTES as u64
}

impl PackName {
    pub(super) fn as_os_str(&self) -> &OsStr {
        OsStr::from_bytes(&self.name)
    }

    pub(super) fn encode(&self) -> [u8; NAME_BYTES] {
        let mut bytes = [0; NAME_BYTES];
        bytes[..32].copy_from_slice(&self.identity.0);
        bytes[32] = self.name.len() as u8;
        bytes[33..33 + self.name.len()].copy_from_slice(&self.name);
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let len = usize::from(bytes[32]);
        let (name, rest) = bytes[33..].split_at(len);
        if !is_file_name(name) || !is_zeros(rest) {
            let shown = String::from_utf8_lossy(name);
            return Err(impossible(format_args!("the pack refers to {shown:?}, which is no name of a file")));
        }
        Ok(Self { identity: PackIdentity(digest_at(bytes, 0)), name: name.to_owned() })
    }
}

impl fmt::Display for PackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.as_os_str().display())
    }
}

/// Whether `name` is that of a file in a folder, and leads nowhere else.
pub(super) fn is_file_name(name: &[u8]) -> bool {
    (1..=255).contains(&name.len())
        && !matches!(name, b"." | b"..")
        && !name.iter().any(|byte| matches!(byte, b'/' | 0))
}

impl StoredChunk {
    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[0] = match self.form {
            ChunkForm::Raw => 1,
            ChunkForm::Zstd => 2,
        };
        bytes[2..4].copy_from_slice(&self.pack.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..].copy_from_slice(&self.digest);
        bytes
    }

    /// The chunk of an entry that was checked; `None` is zeros.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let form = match bytes[0] {
            0 => return None,
            1 => ChunkForm::Raw,
            _ => ChunkForm::Zstd,
        };
        Some(Self {
            pack: u16::from_le_bytes([bytes[2], bytes[3]]),
            form,
            bytes: half(bytes, 4),
            offset: word(bytes, 8),
            digest: digest_at(bytes, 16),
        })
    }

    fn is_inside(&self, data: &Range<u64>) -> bool {
        let end = self.offset.checked_add(u64::from(self.bytes));
        self.offset >= data.start && end.is_some_and(|end| end <= data.end)
    }

    /// Whether a chunk of `len` bytes may be stored so.
    fn has_length_of(&self, len: usize) -> bool {
        match self.form {
            ChunkForm::Raw => self.bytes as usize == len,
            ChunkForm::Zstd => self.bytes > 0 && (self.bytes as usize) < len,
        }
    }
}

impl Index {
    /// The index whose bytes, behind `header`, are `bytes`; if it is none, why.
    pub(super) fn decode(header: Header, mut bytes: Vec<u8>) -> Result<Self, String> {
        if Sha256::digest(&bytes)[..] != header.index_digest {
            return Err(to_be_copied_again("the pack's index"));
        }
        let entries = bytes.split_off(header.packs as usize * NAME_BYTES);
        let packs = bytes.chunks(NAME_BYTES).map(PackName::decode).collect::<Result<_, _>>()?;
        let index = Self { header, packs, entries };
        for chunk in 0..index.header.chunks() {
            index.check_entry(chunk).map_err(|why| {
                let from = chunk * u64::from(index.header.chunk_bytes);
                impossible(format_args!("the chunk from byte {from} of the snapshot on {why}"))
            })?;
        }
        Ok(index)
    }

    fn entry(&self, chunk: u64) -> &[u8] {
        let at = chunk as usize * ENTRY_BYTES;
        &self.entries[at..at + ENTRY_BYTES]
    }

    fn check_entry(&self, chunk: u64) -> Result<(), &'static str> {
        let entry = self.entry(chunk);
        if entry[0] > 2 || entry[1] != 0 {
            return Err("is stored in an unknown form");
        }
        let Some(stored) = StoredChunk::decode(entry) else {
            return if is_zeros(entry) { Ok(()) } else { Err("is zeros and lies somewhere") };
        };
        if !stored.has_length_of(self.header.chunk_len(chunk)) {
            return Err("is stored in a wrong number of bytes");
        }
        if usize::from(stored.pack) > self.packs.len() {
            return Err("lies in a pack that is not named");
        }
        if stored.pack == 0 && !stored.is_inside(&self.header.data()) {
            return Err("lies outside the pack");
        }
        Ok(())
    }

    /// Whether all chunks that lie in other packs lie inside these: `others` are the packs' headers, in the order of
    /// the names.
    pub(super) fn check_places(&self, others: &[Header]) -> Result<(), String> {
        let data: Vec<Range<u64>> = others.iter().map(Header::data).collect();
        let outside = (0..self.header.chunks()).filter_map(|chunk| self.chunk(chunk)).find(|stored| {
            let other = usize::from(stored.pack).checked_sub(1).map(|nth| &data[nth]);
            other.is_some_and(|data| !stored.is_inside(data))
        });
        match outside {
            Some(stored) => {
                let name = &self.packs[usize::from(stored.pack) - 1];
                Err(impossible(format_args!("the pack refers to bytes outside the pack {name}")))
            }
            None => Ok(()),
        }
    }

    /// `None` if the chunk is zeros.
    pub(super) fn chunk(&self, chunk: u64) -> Option<StoredChunk> {
        StoredChunk::decode(self.entry(chunk))
    }
}

/// Header, names and entries of a pack, whose header is right but for its digests.
pub(super) fn front(header: &Header, packs: &[PackName], entries: &[u8]) -> Vec<u8> {
    let mut index = Vec::with_capacity(packs.len() * NAME_BYTES + entries.len());
    packs.iter().for_each(|name| index.extend_from_slice(&name.encode()));
    index.extend_from_slice(entries);
    let header = Header { index_digest: Sha256::digest(&index).into(), ..header.clone() };
    [&header.encode()[..], &index].concat()
}

/// Corrects the digests of made-up bytes of a pack, as far as their sizes allow that: for tests and the fuzzer, whose
/// inputs would fail at the digests.
pub(super) fn seal(pack: &mut [u8]) {
    let Some((header, rest)) = pack.split_first_chunk_mut::<HEADER_BYTES>() else { return };
    let chunks = word(header, 24).checked_div(u64::from(half(header, 20))).unwrap_or(0);
    let is_cut = half(header, 20) != 0 && !word(header, 24).is_multiple_of(u64::from(half(header, 20)));
    let chunks = (chunks + u64::from(is_cut)).min(CHUNKS_MAX);
    let index = front_bytes(half(header, 40).min(PACKS_MAX), chunks) as usize - HEADER_BYTES;
    let digest = Sha256::digest(&rest[..index.min(rest.len())]);
    header[48..80].copy_from_slice(&digest);
    let identity = identity_of(header);
    header[IDENTITY_AT..].copy_from_slice(&identity.0);
    if let Some((_, end)) = rest.split_last_chunk_mut() {
        *end = END_MAGIC;
    }
}
