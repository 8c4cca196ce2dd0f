//! Files: whatever is done to a file, its handles read what `std::fs` reads.
//!
//! A random sequence of operations is applied to a file and, after each, what the cache gives is held against a plain
//! read of the same file. The sizes sit on and around the edges of blocks and pages. Two handles take part: a fresh
//! one, from an open after the last change, which must give the file as it is; and an old one, which must do so once it
//! has been told to look again.

use std::fs::{self, File as Plain, OpenOptions};
use std::io::ErrorKind::{AlreadyExists, InvalidInput, NotFound, PermissionDenied};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use quinion::backend::Mechanism;
use quinion::{Cache, ErrorKind, File, PoolOptions};

use quinion_testing::content::fill_content;

const SIZES: [u64; 9] = [0, 1, 511, 512, 513, 4095, 4096, 4097, (1 << 20) + 17];

#[derive(Clone, Copy, Debug)]
enum Step {
    ReadAt {
        position: u64,
        len: u64,
    },
    Pin {
        position: u64,
        len: u64,
    },
    SeekAndRead {
        position: u64,
        len: u64,
    },
    SeekFromEnd {
        back: u64,
        len: u64,
    },
    /// Another handle appends; then a read at the old end sees it.
    Append {
        len: u64,
    },
    /// Another handle cuts it off; then this one checks the file again.
    Truncate {
        to: u64,
    },
    /// Another file takes its name; then it is opened.
    Replace {
        size: u64,
    },
    /// Another handle writes over some of it; then it is opened.
    Overwrite {
        position: u64,
        len: u64,
    },
    /// All of it goes, and new bytes come in the same inode; then it is opened.
    Rewrite {
        size: u64,
    },
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![prop::sample::select(&SIZES[..]), 0u64..20_000, 0u64..1_200_000]
}

fn positions() -> impl Strategy<Value = u64> {
    prop_oneof![sizes(), (sizes(), 0u64..3).prop_map(|(at, back)| at.saturating_sub(back)), Just(1u64 << 40)]
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (positions(), sizes()).prop_map(|(position, len)| Step::ReadAt { position, len }),
        3 => (positions(), sizes()).prop_map(|(position, len)| Step::Pin { position, len }),
        2 => (positions(), sizes()).prop_map(|(position, len)| Step::SeekAndRead { position, len }),
        1 => (sizes(), sizes()).prop_map(|(back, len)| Step::SeekFromEnd { back, len }),
        3 => sizes().prop_map(|len| Step::Append { len }),
        2 => sizes().prop_map(|to| Step::Truncate { to }),
        2 => sizes().prop_map(|size| Step::Replace { size }),
        1 => (sizes(), sizes()).prop_map(|(position, len)| Step::Overwrite { position, len }),
        1 => sizes().prop_map(|size| Step::Rewrite { size }),
    ]
}

struct Story {
    cache: Cache,
    path: PathBuf,
    fresh: File,
    /// The file that `fresh` is of, read plainly.
    plain: Plain,
    generation: u32,
}

impl Story {
    fn new(folder: &Path, mechanism: Mechanism, order: u8, size: u64) -> Self {
        let path = folder.join("file");
        fs::write(&path, bytes(0, size, 1)).unwrap();
        let builder = Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(order);
        let cache = builder.mechanism(mechanism).build().unwrap();
        let fresh = cache.open(&path).unwrap();
        let plain = Plain::open(&path).unwrap();
        Self { cache, path, fresh, plain, generation: 1 }
    }

    fn tell(&mut self, step: Step) {
        self.generation += 1;
        let generation = self.generation;
        match step {
            Step::ReadAt { position, len } => self.read_at(position, len),
            Step::Pin { position, len } => self.pin(position, len),
            Step::SeekAndRead { position, len } => self.seek_and_read(SeekFrom::Start(position), len),
            Step::SeekFromEnd { back, len } => {
                let back = back.min(self.size()) as i64;
                self.seek_and_read(SeekFrom::End(-back), len);
            }
            Step::Append { len } => {
                let end = self.size();
                let mut other = OpenOptions::new().append(true).open(&self.path).unwrap();
                other.write_all(&bytes(end, len, generation)).unwrap();
                self.read_at(end, len + 10); // meets the end it knew, and looks again
            }
            Step::Truncate { to } => {
                let to = to.min(self.size());
                OpenOptions::new().write(true).open(&self.path).unwrap().set_len(to).unwrap();
                self.fresh.revalidate().unwrap();
                assert_eq!(self.fresh.len(), to);
            }
            Step::Replace { size } => {
                let next = self.path.with_extension("next");
                fs::write(&next, bytes(0, size, generation)).unwrap();
                fs::rename(&next, &self.path).unwrap();
                self.open();
            }
            Step::Overwrite { position, len } => {
                let position = position.min(self.size());
                let other = OpenOptions::new().write(true).open(&self.path).unwrap();
                other.write_all_at(&bytes(position, len, generation), position).unwrap();
                drop(other);
                self.open();
            }
            Step::Rewrite { size } => {
                fs::write(&self.path, bytes(0, size, generation)).unwrap();
                self.open();
            }
        }
        self.read_at(self.size().saturating_sub(1), 5000);
    }

    /// Opens anew. The handle so far, told to look again, reads the file that it is of, whatever is called so now.
    fn open(&mut self) {
        let now = (self.cache.open(&self.path).unwrap(), Plain::open(&self.path).unwrap());
        let old = std::mem::replace(&mut self.plain, now.1);
        let before = std::mem::replace(&mut self.fresh, now.0);
        before.revalidate().unwrap();
        compare(&before, &old, 0, 6000);
        compare(&before, &old, 4090, 2_000_000);
        assert_eq!(self.fresh.len(), self.size());
    }

    fn size(&self) -> u64 {
        fs::metadata(&self.path).unwrap().len()
    }

    fn read_at(&self, position: u64, len: u64) {
        compare(&self.fresh, &Plain::open(&self.path).unwrap(), position, len);
    }

    fn pin(&self, position: u64, len: u64) {
        let pin = self.fresh.pin(position, len as usize).unwrap();
        let got: Vec<u8> = pin.chunks().flatten().copied().collect();
        same(&got, &plain_read(&Plain::open(&self.path).unwrap(), position, len), position);
    }

    fn seek_and_read(&mut self, to: SeekFrom, len: u64) {
        let mut plain = Plain::open(&self.path).unwrap();
        let position = plain.seek(to).unwrap();
        assert_eq!(self.fresh.seek(to).unwrap(), position);
        let mut got = Vec::new();
        (&mut self.fresh).take(len).read_to_end(&mut got).unwrap();
        same(&got, &plain_read(&plain, position, len), position);
        assert_eq!(self.fresh.stream_position().unwrap(), position + got.len() as u64);
    }
}

fn bytes(position: u64, len: u64, generation: u32) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fill_content(&mut bytes, 1, position, generation);
    bytes
}

fn plain_read(plain: &Plain, position: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    let mut done = 0;
    while done < bytes.len() {
        match plain.read_at(&mut bytes[done..], position + done as u64).unwrap() {
            0 => break,
            more => done += more,
        }
    }
    bytes.truncate(done);
    bytes
}

fn compare(file: &File, plain: &Plain, position: u64, len: u64) {
    let mut got = vec![0xee; len as usize];
    let bytes = file.read_at(&mut got, position).unwrap();
    assert!(got[bytes..].iter().all(|&byte| byte == 0xee), "bytes beyond what was read were written");
    same(&got[..bytes], &plain_read(plain, position, len), position);
}

fn same(got: &[u8], want: &[u8], position: u64) {
    assert_eq!(got.len(), want.len(), "bytes read at {position}");
    let wrong = got.iter().zip(want).position(|(got, want)| got != want);
    assert_eq!(wrong, None, "the first wrong byte of {} at {position}", got.len());
}

fn tell(folder: &Path, mechanism: Mechanism, order: u8, size: u64, steps: &[Step]) {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let mut story = Story::new(folder.path(), mechanism, order, size);
    story.read_at(0, size + 1);
    steps.iter().for_each(|step| story.tell(*step));
    story.cache.check().unwrap();
}

fn disk() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}
fn memory() -> Option<&'static Path> {
    Some(Path::new("/dev/shm")).filter(|folder| folder.is_dir())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_file_on_a_disk_reads_as_std_reads_it(
        ring in any::<bool>(), order in prop::sample::select(vec![0u8, 2, 9]),
        size in prop::sample::select(&SIZES[..]), steps in prop::collection::vec(steps(), 1..25),
    ) {
        let mechanism = if ring { Mechanism::Ring } else { Mechanism::Threads };
        tell(disk(), mechanism, order, size, &steps);
    }

    #[test]
    fn a_file_in_memory_reads_as_std_reads_it(
        ring in any::<bool>(), order in prop::sample::select(vec![0u8, 2, 9]),
        size in prop::sample::select(&SIZES[..]), steps in prop::collection::vec(steps(), 1..25),
    ) {
        let Some(folder) = memory() else { return Ok(()) };
        let mechanism = if ring { Mechanism::Ring } else { Mechanism::Threads };
        tell(folder, mechanism, order, size, &steps);
    }
}

#[test]
fn every_range_around_every_edge_of_every_size() {
    let folder = tempfile::tempdir_in(disk()).unwrap();
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    for size in SIZES {
        let path = folder.path().join(size.to_string());
        fs::write(&path, bytes(0, size, 1)).unwrap();
        let (file, plain) = (cache.open(&path).unwrap(), Plain::open(&path).unwrap());
        for position in SIZES.iter().flat_map(|edge| edge.saturating_sub(2)..edge + 3) {
            for len in SIZES {
                compare(&file, &plain, position, len);
            }
        }
    }
    cache.check().unwrap();
}

#[test]
fn debug_output_is_a_line_and_not_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, [7; 5000]).unwrap();
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let pool = cache.add_pool("some", PoolOptions::default()).unwrap();
    let file = pool.open(&path).unwrap();
    let pinned = file.pin(0, 100).unwrap();
    let said = format!("{cache:?} {pool:?} {file:?} {pinned:?} {:?}", file.read_at_async(&mut [0; 10], 0));
    assert!(said.len() < 1000, "{} bytes", said.len());
    assert!(said.contains("len: 5000") && said.contains("16777216") && said.contains("\"some\""), "{said}");
}

#[test]
fn a_file_that_was_removed_is_let_go_and_its_space_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(format!("table {number}"));
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    // A log-structured store: tables are written, read, closed, and removed.
    for number in 0..20 {
        let options = *quinion::OpenOptions::new().write(true).create_new(true);
        let table = cache.open_with(path(number), &options).unwrap();
        table.write_all_at(&[7; 50_000], 0).unwrap();
        table.sync_data().unwrap();
    }
    let kept = cache.open(path(19)).unwrap();
    assert_eq!(cache.stats().files, 20, "what nobody has open is known for its pages");
    let is_open = |link: PathBuf| fs::read_link(link).is_ok_and(|name| name.ends_with("table 3 (deleted)"));
    let any_open = || fs::read_dir("/proc/self/fd").unwrap().any(|entry| is_open(entry.unwrap().path()));
    for number in 0..20 {
        fs::remove_file(path(number)).unwrap();
    }
    assert!(any_open());
    fs::write(folder.path().join("other"), "other").unwrap();
    for _ in 0..5 {
        cache.open(folder.path().join("other")).unwrap();
    }
    assert!(!any_open(), "nobody has it open, so it takes no space");
    assert_eq!(cache.stats().files, 1, "the one that somebody has open");
    let mut bytes = [0; 10];
    kept.read_exact_at(&mut bytes, 49_990).unwrap();
    assert_eq!(bytes, [7; 10]);
    drop(kept);
    cache.check().unwrap();
    assert_eq!(cache.stats().files, 0, "its last handle is gone, too");
}

#[test]
fn removed_files_are_released_some_at_a_time_by_a_call_for_that_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(format!("file {number}"));
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    for number in 0..10 {
        fs::write(path(number), [number as u8; 5000]).unwrap();
        cache.open(path(number)).unwrap().read_exact_at(&mut [0; 10], 0).unwrap();
    }
    (0..10).step_by(2).for_each(|number| fs::remove_file(path(number)).unwrap());
    assert_eq!(cache.stats().files, 10);
    cache.release_removed_files(0);
    cache.release_removed_files(3);
    assert_eq!(cache.stats().files, 8, "of the first three, the first and the third");
    cache.release_removed_files(3);
    assert_eq!(cache.stats().files, 7, "then it went on: of the next three, the second");
    (0..3).for_each(|_| cache.release_removed_files(3));
    assert_eq!(cache.stats().files, 5, "and began anew");
    cache.release_removed_files(100);
    assert_eq!(cache.stats().files, 5, "what is there stays");
    cache.check().unwrap();
}

#[test]
fn an_error_is_of_the_kind_that_std_would_say() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "content").unwrap();
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let kind = |error: quinion::Error| std::io::Error::from(error).kind();
    let writes = *quinion::OpenOptions::new().write(true);
    let anew = *quinion::OpenOptions::new().write(true).create_new(true);
    let refused = cache.open(&path).unwrap().write_at(b"x", 0).unwrap_err();
    assert_eq!((refused.kind(), kind(refused)), (ErrorKind::ReadOnly, PermissionDenied));
    assert_eq!(kind(cache.open_with(&path, &anew).unwrap_err()), AlreadyExists);
    assert_eq!(kind(cache.open_with(folder.path().join("none"), &writes).unwrap_err()), NotFound);
    let file = cache.open_with(&path, &writes).unwrap();
    let too_long = file.set_len(u64::MAX).unwrap_err();
    assert!(too_long.to_string().starts_with("a file cannot have 18446744073709551615 bytes"), "{too_long}");
    assert_eq!(kind(too_long), InvalidInput);
}
