//! Tests of packs, beside the flat memory that they were made of; and of bytes that no writer made.
//!
//! ```text
//!   memory, by dice --pack--> a pack --read_at--> bytes, the same
//!                                |
//!                                '--each byte damaged, each cut, impossible numbers--> an error, or the same
//! ```

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use quinion::backend::{
    Attributes, BlockingSource, Identity, MemoryFile, ReadAt, ThreadPool, Version, WaitQueue,
};
use quinion::{Cache, ReadOptions};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::super::FileIdentity;
use super::format::{
    CHUNK_BYTES, ChunkForm, END_BYTES, ENTRY_BYTES, HEADER_BYTES, Header, NAME_BYTES, PackName, StoredChunk,
    front, is_file_name, seal,
};
use super::open::open_local;
use super::reader::{Pack, read_made_up};
use super::source::{CachedPack, PackSource, uncached_handle};
use super::*;
use crate::snapshot::recognition::END_MAGIC;
use crate::snapshot::{Snapshot, SnapshotChanged, UNNAMED};

const CHUNK: usize = *CHUNK_BYTES.start() as usize;

fn noise(bytes: &mut [u8], mut seed: u64) {
    for byte in bytes {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = (seed >> 56) as u8;
    }
}

/// A folder with snapshots and packs of them.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn flat(&self, name: &str, bytes: &[u8]) -> PathBuf {
        fs::write(self.path(name), bytes).expect("room for a snapshot");
        self.path(name)
    }
    fn request(&self, flat: &Path, name: &str) -> PackRequest {
        let mut request = PackRequest::new(vec![flat.to_owned()], self.path(name));
        request.chunk_bytes = Some(CHUNK as u32);
        request
    }
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).expect("a folder");
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name().into_string();
        let mut names: Vec<String> = entries.map(|entry| name(entry).expect("a name")).collect();
        names.sort();
        names
    }
}

fn packed(request: &PackRequest) -> PackReport {
    pack(request, &mut |_| ControlFlow::Continue(())).expect("it can be packed")
}

fn refusal(request: &PackRequest) -> String {
    pack(request, &mut |_| ControlFlow::Continue(())).expect_err("it is refused").to_string()
}

fn verified(path: &Path) -> VerifyReport {
    verify(path, &mut |_| ControlFlow::Continue(())).expect("a pack")
}

fn all_of(source: &impl ReadAt, bytes: usize) -> io::Result<Vec<u8>> {
    let (mut all, mut done) = (vec![0; bytes], 0);
    while done < bytes {
        match source.read_at(&mut all[done..], done as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => done += read,
        }
    }
    Ok(all)
}

fn opened(bytes: &[u8]) -> Result<Pack, String> {
    Pack::open(Arc::new(bytes.to_owned()), &mut |_| Err("there is none".to_owned()))
}

fn memory() -> impl Strategy<Value = Vec<u8>> {
    let part = (1..150_000_usize, 0..4_u8, any::<u64>());
    prop::collection::vec(part, 1..12).prop_map(|parts| {
        let mut all = Vec::new();
        for (len, kind, seed) in parts {
            let from = all.len();
            match kind {
                0 => all.resize(from + len, 0),
                1 => all.resize(from + len, seed as u8),
                // Whole chunks of it are equal.
                2 => all.resize((from + len).next_multiple_of(CHUNK) + 2 * CHUNK, 7),
                _ => {
                    all.resize(from + len, 0);
                    noise(&mut all[from..], seed);
                }
            }
        }
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reads_of_a_pack_are_those_of_the_flat_snapshot(
        flat in memory(),
        reads in prop::collection::vec((any::<prop::sample::Index>(), 0..200_000_usize), 1..40),
        level in 1..6,
        chunk_order in 16..20_u32,
    ) {
        let folder = Folder::new();
        let mut request = folder.request(&folder.flat("flat", &flat), "pack");
        (request.level, request.chunk_bytes) = (level, Some(1 << chunk_order));
        let report = packed(&request);
        let PackReport { bytes, zero_bytes, shared_bytes, repeated_bytes, file_bytes, .. } = report;
        prop_assert_eq!((bytes, shared_bytes), (flat.len() as u64, 0));
        prop_assert!(zero_bytes + repeated_bytes <= bytes);
        prop_assert_eq!(file_bytes, fs::metadata(&request.out).expect("a pack").len());
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().expect("a small cache");
        let pack = open_local(&request.out).expect("a pack");
        let snapshot = Snapshot::open(&cache, &request.out).expect("a snapshot");
        let (file, mut buffer) = (snapshot.file(), Vec::new());
        for (at, len) in reads {
            let at = at.index(flat.len() + 10);
            buffer.resize(len, 0);
            let wanted = &flat[at.min(flat.len())..(at + len).min(flat.len())];
            let mut done = 0;
            while done < wanted.len() {
                let read = pack.read_at(&mut buffer[done..], (at + done) as u64).expect("it can be read");
                prop_assert!(read > 0);
                done += read;
            }
            prop_assert_eq!(done, wanted.len());
            prop_assert!(buffer[..done] == *wanted, "{} bytes at {}", len, at);
            buffer.fill(1);
            let read = file.read_at(&mut buffer, at as u64).expect("the cache reads it");
            prop_assert!(buffer[..read] == *wanted, "{} bytes at {} by the cache", len, at);
        }
        prop_assert!(verified(&request.out).damaged_chunks == 0);
    }

    /// A second snapshot, of which a few chunks changed, and a third one, each against those before.
    #[test]
    fn a_pack_against_older_ones_costs_its_changes_and_reads_the_same(
        flat in memory(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>()), 0..3),
    ) {
        let folder = Folder::new();
        let mut flats = vec![flat];
        for (at, seed) in changes {
            let mut next = flats[flats.len() - 1].clone();
            let at = at.index(next.len());
            let end = next.len().min(at + 5000);
            noise(&mut next[at..end], seed);
            flats.push(next);
        }
        for (number, flat) in flats.iter().enumerate() {
            let path = folder.flat(&format!("flat-{number}"), flat);
            let mut request = folder.request(&path, &format!("pack-{number}"));
            // Against the last one alone: of the others it has what the last one has of them.
            request.against.extend(number.checked_sub(1).map(|older| folder.path(&format!("pack-{older}"))));
            let report = packed(&request);
            if number > 0 {
                prop_assert!(report.stored_bytes <= 2 * (CHUNK as u64 + 100), "{report:?}");
            }
            let pack = open_local(&request.out).expect("a pack");
            prop_assert!(all_of(&pack, flat.len()).expect("it can be read") == *flat);
        }
    }
}

/// A pack of 1,500 bytes with a zstd chunk, one of zeros, and a short raw one; and its memory.
fn small() -> (Vec<u8>, Vec<u8>) {
    let folder = Folder::new();
    let mut flat = vec![0; 2 * CHUNK + 700];
    flat[..CHUNK].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 997) as u8);
    noise(&mut flat[2 * CHUNK..], 1);
    let request = folder.request(&folder.flat("flat", &flat), "pack");
    let report = packed(&request);
    assert_eq!((report.zero_bytes, report.repeated_bytes), (CHUNK as u64, 0));
    let bytes = fs::read(&request.out).expect("a pack");
    assert!(bytes.len() < 3000, "{}", bytes.len());
    let pack = opened(&bytes).expect("it is whole");
    let forms: Vec<_> = (0..3).map(|chunk| pack.chunk(chunk).map(|stored| stored.form)).collect();
    assert_eq!(forms, [Some(ChunkForm::Zstd), None, Some(ChunkForm::Raw)]);
    (bytes, flat)
}

/// Right bytes of each chunk, or an error.
fn check_damaged(bytes: &[u8], flat: &[u8], place: &str) {
    let Ok(pack) = opened(bytes) else { return };
    assert_eq!(pack.bytes(), flat.len() as u64, "{place}");
    for (number, right) in flat.chunks(CHUNK).enumerate() {
        let mut found = vec![0xAA; right.len()];
        if pack.read_chunk(number as u64, &mut found).is_ok() {
            assert!(found == right, "{place}: chunk {number} is wrong");
        }
        let position = (number * CHUNK) as u64 + 100;
        if pack.read_at(&mut found[..50], position).is_ok() {
            assert!(found[..50] == right[100..150], "{place}: a part of chunk {number} is wrong");
        }
    }
}

#[test]
fn each_damaged_byte_of_a_pack_is_an_error_or_harmless() {
    let (bytes, flat) = small();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            check_damaged(&damaged, &flat, &format!("bit {bit} of byte {at}"));
        }
    }
    // And every one of header and index is found at once.
    let front = HEADER_BYTES + 3 * ENTRY_BYTES;
    for at in 0..front {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        opened(&damaged).expect_err("it is damaged");
    }
}

#[test]
fn a_pack_that_is_cut_or_has_grown_is_refused_in_words() {
    let (bytes, _) = small();
    for len in 0..bytes.len() {
        let why = opened(&bytes[..len]).expect_err("it is cut");
        assert!(why.contains("cut") && why.contains("copy"), "{why}");
    }
    let longer = [&bytes[..], b"x"].concat();
    assert!(opened(&longer).expect_err("it has grown").contains("copy it again"));
}

/// The small pack with other bytes at a place, and right digests.
fn changed(at: usize, with: &[u8]) -> Result<Pack, String> {
    let (mut bytes, _) = small();
    bytes[at..at + with.len()].copy_from_slice(with);
    seal(&mut bytes);
    opened(&bytes)
}

#[test]
fn impossible_headers_are_refused_in_words() {
    let told = |at: usize, with: &[u8], words: &str| {
        let why = changed(at, with).expect_err(words);
        assert!(why.contains(words), "{words}: {why}");
    };
    told(16, &2_u32.to_le_bytes(), "version 2, and this release reads version 1");
    for chunk_bytes in [0, 1, 4096, 65537, 98304, 8 << 20, u32::MAX] {
        told(20, &u32::to_le_bytes(chunk_bytes), "chunks have");
    }
    for bytes in [0, (CHUNK as u64) * (1 << 22) + 1, u64::MAX] {
        told(24, &u64::to_le_bytes(bytes), "snapshot has");
    }
    // More entries than the file has room for.
    told(24, &(CHUNK as u64 * 1000).to_le_bytes(), "longer than its file");
    told(32, &u64::MAX.to_le_bytes(), "its header says");
    told(40, &65_u32.to_le_bytes(), "refers to 65");
    told(40, &u32::MAX.to_le_bytes(), "refers to");
    told(40, &64_u32.to_le_bytes(), "longer than its file");
    told(44, &[1], "other than zeros");
    told(95, &[1], "other than zeros");
}

#[test]
fn impossible_entries_are_refused_in_words() {
    let entry = |chunk: usize| HEADER_BYTES + chunk * ENTRY_BYTES;
    let told = |at: usize, with: &[u8], words: &str| {
        let why = changed(at, with).expect_err(words);
        assert!(why.contains(words) && why.contains("of the snapshot on"), "{words}: {why}");
    };
    told(entry(0), &[3], "unknown form");
    told(entry(2), &[255], "unknown form");
    told(entry(0) + 1, &[1], "unknown form");
    told(entry(0), &[0], "zeros and lies somewhere");
    told(entry(1) + 47, &[1], "zeros and lies somewhere");
    told(entry(0) + 2, &1_u16.to_le_bytes(), "not named");
    told(entry(0) + 2, &u16::MAX.to_le_bytes(), "not named");
    for stored in [0, CHUNK as u32, u32::MAX] {
        told(entry(0) + 4, &u32::to_le_bytes(stored), "wrong number of bytes");
    }
    told(entry(0), &[1], "wrong number of bytes");
    told(entry(2), &[2], "wrong number of bytes");
    told(entry(2) + 4, &699_u32.to_le_bytes(), "wrong number of bytes");
    for offset in [0, 100, entry(3) as u64 - 1, u64::MAX, u64::MAX - 10] {
        told(entry(0) + 8, &u64::to_le_bytes(offset), "outside the pack");
    }
    let (bytes, _) = small();
    told(entry(2) + 8, &(bytes.len() as u64 - END_BYTES - 699).to_le_bytes(), "outside the pack");
}

/// A pack of one chunk that is stored so.
fn of_one_chunk(stored: &[u8], digest: [u8; 32]) -> Vec<u8> {
    let offset = (HEADER_BYTES + ENTRY_BYTES) as u64;
    let chunk = StoredChunk { pack: 0, form: ChunkForm::Zstd, bytes: stored.len() as u32, offset, digest };
    let header = Header {
        chunk_bytes: CHUNK as u32,
        bytes: CHUNK as u64,
        file_bytes: offset + stored.len() as u64 + END_BYTES,
        packs: 0,
        index_digest: [0; 32],
        identity: PackIdentity([0; 32]),
    };
    [&front(&header, &[], &chunk.encode())[..], stored, &END_MAGIC].concat()
}

#[test]
fn a_chunk_that_becomes_longer_or_shorter_or_another_is_an_error() {
    let compressed = |bytes: &[u8]| zstd::bulk::compress(bytes, 3).expect("it can be compressed");
    let right = vec![5; CHUNK];
    let digest = Sha256::digest(&right).into();
    let read = |stored: &[u8]| {
        let pack = opened(&of_one_chunk(stored, digest)).expect("its index is right");
        let mut found = vec![0; CHUNK];
        pack.read_chunk(0, &mut found).map(|()| found)
    };
    assert!(read(&compressed(&right)).expect("this one is right") == right);
    // 64 MiB in some kilobytes.
    let bomb = compressed(&vec![5; 64 << 20]);
    assert!(bomb.len() < CHUNK);
    for wrong in [&bomb[..], &compressed(&right[1..]), &compressed(&vec![6; CHUNK]), b"no frame", &[0; 9]] {
        let error = read(wrong).expect_err("it is another");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("damaged") && error.to_string().contains("copy"), "{error}");
    }
}

#[test]
fn names_that_lead_out_of_the_folder_are_refused() {
    let with_name = |name: &[u8]| {
        let names = [PackName { identity: PackIdentity([1; 32]), name: name.to_owned() }];
        let (bytes, _) = small();
        let (data, packs) = (bytes[HEADER_BYTES + 3 * ENTRY_BYTES..].to_vec(), 1);
        let header = Header {
            chunk_bytes: CHUNK as u32,
            bytes: 2 * CHUNK as u64 + 700,
            file_bytes: (bytes.len() + NAME_BYTES) as u64,
            packs,
            index_digest: [0; 32],
            identity: PackIdentity([0; 32]),
        };
        let zeros = [0; 3 * ENTRY_BYTES];
        let bytes = [&front(&header, &names, &zeros)[..], &data].concat();
        let mut asked = Vec::new();
        let opened = Pack::open(Arc::new(bytes), &mut |name| {
            asked.push(name.name.clone());
            Err("it is not there".to_owned())
        });
        (opened.expect_err("it is refused"), asked)
    };
    let wrong: [&[u8]; 7] = [b"", b".", b"..", b"../other", b"/etc/passwd", b"a/b", b"a\0b"];
    for name in wrong {
        let (why, asked) = with_name(name);
        assert!(why.contains("no name of a file") && asked.is_empty(), "{name:?}: {why}");
        assert!(!is_file_name(name));
    }
    let (why, asked) = with_name(b"older.pack");
    assert!(why.contains("`older.pack`") && why.contains("not there"), "{why}");
    assert_eq!(asked, [b"older.pack"]);
}

/// Two snapshots in a folder, the second packed against the first.
fn two_packs() -> (Folder, Vec<u8>) {
    let folder = Folder::new();
    let mut flat = vec![0; 5 * CHUNK + 300];
    noise(&mut flat, 3);
    packed(&folder.request(&folder.flat("flat", &flat), "older"));
    noise(&mut flat[CHUNK..CHUNK + 9], 4);
    let mut request = folder.request(&folder.flat("flat", &flat), "newer");
    request.against = vec![folder.path("older")];
    let report = packed(&request);
    assert_eq!(report.packs, [PathBuf::from("older")]);
    assert_eq!(report.shared_bytes, (4 * CHUNK + 300) as u64);
    assert_eq!(report.stored_bytes, CHUNK as u64);
    (folder, flat)
}

#[test]
fn a_missing_or_exchanged_pack_is_refused_in_words_and_a_damaged_one_is_an_error_of_its_chunks() {
    let (folder, flat) = two_packs();
    let (older, newer) = (folder.path("older"), folder.path("newer"));
    let right = all_of(&open_local(&newer).expect("both are there"), flat.len()).expect("it can be read");
    assert!(right == flat);
    let whole = fs::read(&older).expect("a pack");

    fs::remove_file(&older).expect("it was there");
    let why = open_local(&newer).expect_err("one is missing").to_string();
    assert!(why.contains("refers to the pack `older`") && why.contains("folder of this one"), "{why}");
    assert!(why.contains(&*newer.to_string_lossy()), "{why}");

    // The newest snapshot under the older one's name.
    fs::copy(&newer, &older).expect("room for it");
    let why = open_local(&newer).expect_err("it is another").to_string();
    assert!(why.contains("the one of that name is another"), "{why}");
    fs::write(&older, b"something else").expect("room for it");
    let why = open_local(&newer).expect_err("it is no pack").to_string();
    assert!(why.contains("`older`"), "{why}");

    let mut damaged = whole.clone();
    let at = damaged.len() - 400;
    damaged[at] ^= 1;
    fs::write(&older, &damaged).expect("room for it");
    let pack = open_local(&newer).expect("the index is right");
    let error = all_of(&pack, flat.len()).expect_err("a chunk is damaged");
    assert!(error.to_string().contains("older") && error.to_string().contains("damaged"), "{error}");
    let mut found = vec![0; CHUNK];
    pack.read_chunk(1, &mut found).expect("this one is its own");
    assert!(found == flat[CHUNK..2 * CHUNK]);
    let report = verified(&newer);
    assert_eq!((report.damaged_chunks, report.chunks), (1, 6));
    assert!(flat.len() as u64 - report.damaged[0].range.start <= 2 * CHUNK as u64, "{report:?}");
}

/// The reads before a damaged chunk, in one call with it, are not lost.
#[test]
fn a_read_ends_before_a_damaged_chunk() {
    let (mut bytes, flat) = small();
    let at = opened(&bytes).expect("a pack").chunk(2).expect("it is stored").offset as usize;
    bytes[at] ^= 1;
    let pack = opened(&bytes).expect("its index is right");
    let mut found = vec![0; flat.len()];
    assert_eq!(pack.read_at(&mut found, 0).expect("two chunks are right"), 2 * CHUNK);
    assert!(found[..2 * CHUNK] == flat[..2 * CHUNK]);
    pack.read_at(&mut found, 2 * CHUNK as u64).expect_err("it is damaged");
    pack.read_at(&mut found[..10], 2 * CHUNK as u64 + 5).expect_err("it is damaged");
}

#[test]
fn a_damaged_older_pack_loses_nothing_of_a_new_one() {
    let folder = Folder::new();
    let mut flat = vec![0; 3 * CHUNK];
    noise(&mut flat, 5);
    let source = folder.flat("flat", &flat);
    packed(&folder.request(&source, "older"));
    let older = folder.path("older");
    let file = fs::OpenOptions::new().write(true).open(&older).expect("a pack");
    let first = open_local(&older).expect("a pack").chunk(0).expect("it is stored");
    file.write_all_at(b"damage", first.offset + 77).expect("room for it");
    let mut request = folder.request(&source, "newer");
    request.against = vec![older];
    let report = packed(&request);
    assert_eq!((report.shared_bytes, report.stored_bytes), (2 * CHUNK as u64, CHUNK as u64));
    let pack = open_local(&request.out).expect("a pack");
    assert!(all_of(&pack, flat.len()).expect("it can be read") == flat);
}

#[test]
fn layers_and_packs_are_packed_as_their_bytes() {
    let folder = Folder::new();
    let mut flat = vec![0; 40 * 4096];
    noise(&mut flat, 6);
    let base = folder.flat("base", &flat);
    let diff = folder.path("diff");
    let file = fs::File::create(&diff).expect("room for a diff");
    file.set_len(flat.len() as u64).expect("room for a diff");
    file.write_all_at(&[9; 4096], 7 * 4096).expect("room for a page");
    file.sync_all().expect("a diff on its disk");
    flat[7 * 4096..8 * 4096].fill(9);
    let mut request = folder.request(&base, "pack");
    request.layers.push(diff);
    packed(&request);
    let again = folder.request(&request.out, "again");
    packed(&again);
    for path in [&request.out, &again.out] {
        let pack = open_local(path).expect("a pack");
        assert!(all_of(&pack, flat.len()).expect("it can be read") == flat);
    }
    // A pack is no layer: its bytes are no memory.
    let mut wrong = folder.request(&request.out, "wrong");
    wrong.layers.push(base);
    assert!(refusal(&wrong).contains("this layer is a pack"));
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().expect("a small cache");
    let why = Snapshot::open_layers(&cache, &wrong.layers).expect_err("a pack is no layer").to_string();
    assert!(why.contains("this layer is a pack"), "{why}");
}

#[test]
fn wrong_requests_are_refused_in_words_and_leave_nothing() {
    let folder = Folder::new();
    let flat = folder.flat("flat", &[1; 70_000]);
    let request = folder.request(&flat, "pack");
    packed(&request);
    fs::copy(folder.path("pack"), folder.path("copy")).expect("room for it");
    std::os::unix::fs::symlink("pack", folder.path("link")).expect("it is new");
    let names = folder.names();
    assert!(refusal(&request).contains("there already"));
    let told = |change: &dyn Fn(&mut PackRequest), words: &str| {
        let mut wrong = folder.request(&flat, "wrong");
        change(&mut wrong);
        let why = refusal(&wrong);
        assert!(why.contains(words), "{words}: {why}");
    };
    told(&|r| r.chunk_bytes = Some(100_000), "power of two");
    told(&|r| r.chunk_bytes = Some(8 << 20), "power of two");
    told(&|r| r.level = 0, "1 to 19");
    told(&|r| r.level = 20, "1 to 19");
    told(&|r| r.out = PathBuf::from("/"), "no name of a file");
    told(&|r| r.layers.clear(), "no snapshot is named");
    told(&|r| r.layers[0] = folder.path("missing"), "missing");
    told(&|r| r.against = vec![flat.clone()], "flat");
    told(&|r| r.against = vec![folder.path("missing")], "missing");
    told(&|r| r.out = folder.path("no folder/pack"), "cannot be written");
    let against = |r: &mut PackRequest| r.against = vec![folder.path("pack")];
    let other_chunks = |r: &mut PackRequest| {
        against(r);
        r.chunk_bytes = Some(1 << 20);
    };
    told(&other_chunks, "none in common");
    let itself = |r: &mut PackRequest| {
        against(r);
        (r.out, r.replace) = (folder.path("pack"), true);
    };
    told(&itself, "would refer to this one");
    // A copy has the identity of its original: the pack would refer to the one of the two that is named first.
    let as_a_copy = |r: &mut PackRequest| {
        r.against = vec![folder.path("copy"), folder.path("pack")];
        (r.out, r.replace) = (folder.path("copy"), true);
    };
    told(&as_a_copy, "would refer to this one");
    let by_a_link = |r: &mut PackRequest| {
        r.against = vec![folder.path("link")];
        (r.out, r.replace) = (folder.path("pack"), true);
    };
    told(&by_a_link, "would refer to this one");
    let the_link = |r: &mut PackRequest| {
        (r.against, r.replace) = (vec![folder.path("pack")], true);
        r.out = folder.path("link");
    };
    told(&the_link, "would refer to this one");
    let elsewhere = tempfile::tempdir().expect("a folder");
    let in_another_folder = |r: &mut PackRequest| {
        against(r);
        r.out = elsewhere.path().join("pack");
    };
    told(&in_another_folder, "not in that of");
    assert_eq!(folder.names(), names, "nothing is left");
    // Without a size of its own it takes that of the older pack.
    let mut next = PackRequest::new(vec![flat], folder.path("next"));
    against(&mut next);
    assert_eq!(packed(&next).chunk_bytes, CHUNK as u32);
}

/// A test that is not root's has no other group to give a file to, and says so.
#[test]
fn a_pack_is_readable_for_no_group_that_could_not_read_the_snapshot() {
    let folder = Folder::new();
    let flat = folder.flat("flat", &[1; 70_000]);
    if std::os::unix::fs::chown(&flat, None, Some(12_345)).is_err() {
        return println!("SKIPPED: a file cannot be given to another group");
    }
    let mode_of = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    let mut request = folder.request(&flat, "pack");
    request.replace = true;
    // The umask may take away more.
    for (mode, most) in [(0o640, 0o600), (0o644, 0o644), (0o604, 0o600), (0o600, 0o600)] {
        fs::set_permissions(&flat, fs::Permissions::from_mode(mode)).expect("it is ours");
        packed(&request);
        let found = mode_of(&request.out);
        assert_eq!((found & !most, found & 0o600), (0, 0o600), "{mode:o} became {found:o}");
    }
    // In a folder that gives its group to its files the pack has the snapshot's.
    std::os::unix::fs::chown(folder.0.path(), None, Some(12_345)).expect("it is ours");
    fs::set_permissions(folder.0.path(), fs::Permissions::from_mode(0o2750)).expect("it is ours");
    fs::set_permissions(&flat, fs::Permissions::from_mode(0o640)).expect("it is ours");
    packed(&request);
    let found = mode_of(&request.out);
    assert_eq!(found & !0o640, 0, "{found:o}");
    // A pack of that pack, in a folder of another group.
    let elsewhere = tempfile::tempdir().expect("a folder");
    let again = PackRequest::new(vec![request.out.clone()], elsewhere.path().join("again"));
    packed(&again);
    assert_eq!(mode_of(&again.out) & 0o077, 0);
    assert_eq!(folder.names(), ["flat", "pack"]);
}

/// 1. Nothing is at the new pack's name when packing begins.
/// 2. Meanwhile the older pack gets that name, and a link its own.
#[test]
fn an_older_pack_that_moves_to_the_new_ones_name_meanwhile_is_not_replaced() {
    let (folder, _) = two_packs();
    let mut request = folder.request(&folder.path("flat"), "third");
    (request.against, request.replace) = (vec![folder.path("newer")], true);
    let before = fs::read(folder.path("newer")).expect("a pack");
    let refused = pack(&request, &mut |_| {
        if !request.out.exists() {
            fs::rename(folder.path("newer"), &request.out).expect("the folder is ours");
            std::os::unix::fs::symlink("third", folder.path("newer")).expect("it is new");
        }
        ControlFlow::Continue(())
    });
    let why = refused.expect_err("it would refer to itself").to_string();
    assert!(why.contains("would refer to this one"), "{why}");
    assert!(fs::read(&request.out).expect("the older pack") == before);
}

#[test]
fn a_snapshot_that_changes_while_it_is_packed_is_an_error() {
    let folder = Folder::new();
    let flat = folder.flat("flat", &vec![1; 3 << 20]);
    let request = folder.request(&flat, "pack");
    let file = fs::OpenOptions::new().write(true).open(&flat).expect("it is there");
    let changed = pack(&request, &mut |_| {
        file.write_all_at(b"x", 5).expect("room for it");
        ControlFlow::Continue(())
    });
    let why = changed.expect_err("it was changed").to_string();
    assert!(why.contains("changed while it was packed") && why.contains("flat"), "{why}");
    let stopped = pack(&request, &mut |progress| {
        assert_eq!(progress.bytes, 3 << 20);
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(PackError::Interrupted)), "{stopped:?}");
    assert_eq!(folder.names(), ["flat"]);
}

#[test]
fn a_pack_has_the_identity_of_its_flat_snapshot_and_its_changes_are_seen() {
    let (folder, flat) = two_packs();
    let newer = folder.path("newer");
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().expect("a small cache");
    let open = |path: &Path| Snapshot::open(&cache, path).expect("a snapshot");
    assert_eq!(open(&newer).identity(), open(&folder.path("flat")).identity());
    for touched in ["older", "newer"] {
        let snapshot = open(&newer);
        assert_eq!(snapshot.assure(), Ok(()));
        let mut page = vec![0; 4096];
        assert!(!snapshot.copy_held(&mut page, 0));
        assert_eq!(snapshot.file().read_at(&mut page, 8192).expect("it can be read"), 4096);
        assert!(page == flat[8192..12288]);
        std::thread::sleep(Duration::from_millis(50));
        let file = fs::OpenOptions::new().write(true).open(folder.path(touched)).expect("it is there");
        file.set_modified(std::time::SystemTime::now()).expect("it is ours");
        let SnapshotChanged(name) = snapshot.assure().expect_err("it was touched");
        assert!(name.ends_with(touched), "{name}");
    }
}

/// As an object is: by a handle of the cache, and the packs that it refers to by others.
#[test]
fn a_pack_in_a_file_of_a_cache_reads_the_same() {
    let (folder, flat) = two_packs();
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().expect("a small cache");
    let [older, newer] = ["older", "newer"].map(|name| cache.open(folder.path(name)).expect("a file"));
    let flat_file = cache.open(folder.path("flat")).expect("a file");
    let snapshot = Snapshot::of_file(&cache, &newer, UNNAMED, &[flat_file.clone(), older.clone()])
        .expect("both are given");
    let mut found = vec![0; flat.len()];
    snapshot.file().read_exact_at(&mut found, 0).expect("it can be read");
    assert!(found == flat);
    assert_eq!(snapshot.assure(), Ok(()));
    let alone = Snapshot::of_file(&cache, &newer, UNNAMED, std::slice::from_ref(&flat_file))
        .expect_err("one is missing")
        .to_string();
    assert!(alone.contains("none of those that were given"), "{alone}");
    let flat_snapshot = Snapshot::of_file(&cache, &flat_file, UNNAMED, &[]).expect("it is no pack");
    assert_eq!(flat_snapshot.identity(), snapshot.identity());
}

#[test]
fn a_pack_in_a_cache_does_not_keep_that_cache() {
    let (bytes, flat) = small();
    let backend = Arc::new(MemoryFile::new(bytes));
    let left = Arc::downgrade(&backend);
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().expect("a small cache");
    let file = cache.open_backend(backend).expect("a file");
    let snapshot = Snapshot::of_file(&cache, &file, UNNAMED, &[]).expect("a pack");
    let mut found = vec![0; flat.len()];
    snapshot.file().read_exact_at(&mut found, 0).expect("it can be read");
    assert!(found == flat);
    drop((snapshot, file, cache));
    // A read ahead may be under way still.
    let began = Instant::now();
    while left.strong_count() > 0 {
        assert!(began.elapsed() < Duration::from_secs(30), "the cache and its files are there still");
        std::thread::yield_now();
    }
}

/// A file whose reads end when they may.
#[derive(Debug, Default)]
struct GatedFile {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl GatedFile {
    fn open(&self) {
        *self.is_open.lock().expect("no test panicked") = true;
        self.opened.notify_all();
    }
}

#[derive(Debug)]
struct Gated(Arc<GatedFile>);

impl ReadAt for Gated {
    fn read_at(&self, buffer: &mut [u8], _: u64) -> io::Result<usize> {
        let is_open = self.0.is_open.lock().expect("no test panicked");
        drop(self.0.opened.wait_while(is_open, |is_open| !*is_open).expect("no test panicked"));
        buffer.fill(1);
        Ok(buffer.len())
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let version = Version { modified: 1, changed: 1, settled: true, steps: true };
        Ok(Attributes { identity: Identity::of_digest(*b"a file that can be gated"), version, size: 1 << 20 })
    }
}

/// A fill is under way and all other memory is pinned: a reader that waited for memory would wait for that fill, which
/// may be its own.
#[test]
fn a_read_of_a_pack_in_a_cache_without_free_memory_does_not_wait_for_a_fill() {
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).pinned_max(Cache::MEMORY_MIN);
    let cache = builder.build().expect("a small cache");
    let (bytes, _) = small();
    let pack = cache.open_backend(Arc::new(MemoryFile::new(bytes.clone()))).expect("a file");
    let gate = Arc::new(GatedFile::default());
    let pool = Arc::new(ThreadPool::new(Arc::new(WaitQueue::new()), 4, 4));
    let gated = BlockingSource::new(Gated(Arc::clone(&gate)), pool);
    let gated = cache.open_backend(Arc::new(gated)).expect("a file");
    assert!(gated.will_need(0, 64 << 10).expect("a hint").started_pages > 0);
    let large = cache.open_backend(Arc::new(MemoryFile::new(vec![2; 20 << 20]))).expect("a file");
    let (mut pins, mut at, mut refusals) = (Vec::new(), 0, 0);
    while refusals < 200 && at < large.len() {
        match large.pin_with(at, 4096, ReadOptions::new().nowait(true)) {
            Ok(pinned) => {
                pins.push(pinned);
                (at, refusals) = (at + 4096, 0);
            }
            Err(_) => refusals += 1,
        }
    }
    let handle = uncached_handle(&pack);
    let mut source = CachedPack::new(&handle);
    source.stall_max = Duration::from_millis(100);
    let (told, result) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut found = vec![0; 100];
        let first = source.read_exact(&mut found, 0).map_err(|error| error.kind());
        told.send((first, found)).expect("the test waits");
        source.stall_max = Duration::from_secs(60);
        let mut found = vec![0; 100];
        let second = source.read_exact(&mut found, 0).map_err(|error| error.kind());
        told.send((second, found)).expect("the test waits");
    });
    let (first, _) = result.recv_timeout(Duration::from_secs(30)).expect("it waits for no fill");
    assert_eq!(first, Err(io::ErrorKind::TimedOut));
    drop(pins);
    let (second, found) = result.recv_timeout(Duration::from_secs(90)).expect("there is memory now");
    assert_eq!(second, Ok(()));
    assert!(found == bytes[..100]);
    gate.open();
    drop((gated, handle));
}

#[test]
fn a_pack_that_lost_its_first_byte_is_refused_and_not_served_as_memory() {
    let (folder, _) = two_packs();
    let older = folder.path("older");
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().expect("a small cache");
    let file = fs::OpenOptions::new().write(true).open(&older).expect("it is there");
    file.write_all_at(b"X", 0).expect("room for it");
    let why = Snapshot::open(&cache, &older).expect_err("it is damaged").to_string();
    assert!(why.contains("damaged in its first bytes"), "{why}");
    let opened = cache.open(&older).expect("a file");
    Snapshot::of_file(&cache, &opened, UNNAMED, &[]).expect_err("it is damaged");
    file.write_all_at(&[0; 4096], 0).expect("room for it");
    Snapshot::open(&cache, &older).expect_err("it is damaged");
}

#[test]
fn made_up_bytes_are_read_without_harm() {
    let (bytes, _) = small();
    read_made_up(bytes.clone()).expect("it is a pack");
    for at in 0..HEADER_BYTES + 3 * ENTRY_BYTES {
        for with in [0, 1, 0x7F, 0xFF] {
            let mut made_up = bytes.clone();
            made_up[at] = with;
            let _ = read_made_up(made_up);
        }
    }
}

/// A source that counts its reads.
#[derive(Debug)]
struct CountedPack {
    bytes: Vec<u8>,
    reads: AtomicU64,
}

impl PackSource for CountedPack {
    fn bytes(&self) -> u64 {
        self.bytes.bytes()
    }
    fn read_exact(&self, into: &mut [u8], position: u64) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.read_exact(into, position)
    }
    fn has_changed(&self) -> bool {
        false
    }
    fn identity(&self) -> Option<FileIdentity> {
        None
    }
    fn name(&self) -> String {
        "the counted pack".to_owned()
    }
}

/// The header, the index, the last bytes, and the chunk: four reads.
#[test]
fn a_chunk_that_many_threads_read_in_parts_is_read_and_decompressed_once() {
    let (bytes, flat) = small();
    let source = Arc::new(CountedPack { bytes, reads: AtomicU64::new(0) });
    let pack = Pack::open(source.clone(), &mut |_| Err("there is none".to_owned())).expect("a pack");
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (pack, flat) = (&pack, &flat);
            scope.spawn(move || {
                for at in (thread * 100..CHUNK - 5000).step_by(4096) {
                    let mut found = vec![0; 4096];
                    assert_eq!(pack.read_at(&mut found, at as u64).expect("it can be read"), 4096);
                    assert!(found == flat[at..at + 4096]);
                }
            });
        }
    });
    assert_eq!(source.reads.load(Ordering::Relaxed), 4);
}
