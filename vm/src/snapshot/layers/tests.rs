//! Tests of layers, beside a twin that keeps every page in memory and merges them one by one.
//!
//! ```text
//!   pages of each layer, by dice --written--> files --read_at, copy_held--> bytes
//!                                '--merged--> a vector                       the same
//! ```
//!
//! The files lie on the disk with the temporary files and in memory, and are read in every way that there is.

use std::collections::BTreeMap;
use std::io::Write;
use std::slice::from_ref;

use proptest::prelude::*;
use quinion::Cache;
use tempfile::TempDir;

use super::*;
use crate::snapshot::{Snapshot, SnapshotChanged};

/// Pages of a snapshot whose last page is cut.
const PAGES: u64 = 97;
const BYTES: u64 = PAGES * PAGE - 1000;

/// The pages that a layer has as data, and the byte that fills each.
type LayerPages = BTreeMap<u64, u8>;

fn page_end(page: u64, bytes: u64) -> u64 {
    ((page + 1) * PAGE).min(bytes)
}

fn write_layer(path: &Path, pages: &LayerPages, bytes: u64) {
    let file = fs::File::create(path).expect("room for a layer");
    file.set_len(bytes).expect("room for a layer");
    for (&page, &byte) in pages {
        let content = vec![byte; (page_end(page, bytes) - page * PAGE) as usize];
        file.write_all_at(&content, page * PAGE).expect("room for a layer");
    }
    file.sync_all().expect("a layer on its disk");
}

fn merged(layers: &[LayerPages], bytes: u64) -> Vec<u8> {
    let mut all = vec![0; bytes as usize];
    for pages in layers {
        for (&page, &byte) in pages {
            all[(page * PAGE) as usize..page_end(page, bytes) as usize].fill(byte);
        }
    }
    all
}

/// Layers in a folder of a file system, if diffs can lie there.
struct Folder {
    folder: TempDir,
}

impl Folder {
    /// On the disk with the temporary files, and in memory.
    fn all() -> Vec<Self> {
        let folders = [tempfile::tempdir().ok(), TempDir::new_in("/dev/shm").ok()];
        let folders: Vec<Self> = folders.into_iter().flatten().map(|folder| Self { folder }).collect();
        assert!(!folders.is_empty(), "there is a place for files");
        folders
    }

    fn write(&self, layers: &[LayerPages]) -> Vec<PathBuf> {
        let paths = (0..layers.len()).map(|number| self.folder.path().join(format!("layer-{number}")));
        let paths: Vec<PathBuf> = paths.collect();
        paths.iter().zip(layers).for_each(|(path, pages)| write_layer(path, pages, BYTES));
        paths
    }
}

fn base() -> LayerPages {
    (0..PAGES).map(|page| (page, 100 + (page % 100) as u8)).collect()
}

fn refusal(paths: &[PathBuf]) -> String {
    Layers::open(paths).expect_err("these layers are refused").to_string()
}

fn layer() -> impl Strategy<Value = LayerPages> {
    // Zeros that a VM wrote are data, too. The last page of the file is left a hole now and then.
    prop::collection::btree_map(0..PAGES, 0..4_u8, 0..40)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// As the layers themselves choose.
    Chosen,
    Direct,
    Held,
}

fn go(layers: &mut Layers, way: Way) {
    for file in &mut layers.files {
        let direct = || {
            let path = format!("/proc/self/fd/{}", file.file.as_raw_fd());
            fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()
        };
        match way {
            Way::Chosen => {}
            Way::Direct => file.direct = direct(),
            Way::Held => file.direct = None,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Every read of every way returns what the twin has.
    #[test]
    fn layers_read_as_the_twin_that_merges_them_in_memory(
        diffs in prop::collection::vec(layer(), 1..5),
        reads in prop::collection::vec((0..BYTES, 1..200_000_usize), 8),
    ) {
        let mut all = vec![base()];
        all.extend(diffs);
        let twin = merged(&all, BYTES);
        for folder in Folder::all() {
            let mut layers = Layers::open(&folder.write(&all)).expect("they can be layers");
            for way in [Way::Chosen, Way::Direct, Way::Held] {
                go(&mut layers, way);
                for &(position, len) in &reads {
                    let mut buffer = vec![0xEE; len];
                    let read = layers.read_at(&mut buffer, position).expect("they can be read");
                    prop_assert_eq!(read, len.min((BYTES - position) as usize));
                    let wanted = &twin[position as usize..position as usize + read];
                    prop_assert!(buffer[..read] == *wanted, "{:?} {} {}", way, position, len);
                    prop_assert!(buffer[read..].iter().all(|&byte| byte == 0xEE));
                }
                prop_assert_eq!(layers.read_at(&mut [0; 10], BYTES).expect("the end"), 0);
            }
        }
    }

    /// Bytes that the kernel holds are the same, or are refused.
    #[test]
    fn held_layers_are_copied_as_the_twin_has_them(diffs in prop::collection::vec(layer(), 1..4)) {
        let mut all = vec![base()];
        all.extend(diffs);
        let twin = merged(&all, BYTES);
        let folder = Folder::all().pop().expect("a folder");
        let paths = folder.write(&all);
        paths.iter().for_each(|path| drop(fs::read(path).expect("it is ours")));
        let layers = Layers::open(&paths).expect("they can be layers");
        layers.files.iter().for_each(|file| file.is_held.store(true, Ordering::Relaxed));
        let mut buffer = vec![0; 300 << 10];
        if layers.copy_held(&mut buffer, 3 * PAGE) {
            prop_assert!(buffer == twin[3 * PAGE_SIZE..3 * PAGE_SIZE + buffer.len()]);
        }
        let mut over = vec![0; 2000];
        prop_assert!(!layers.copy_held(&mut over, BYTES - 1000), "it ends there");
    }

    /// Stretches are those of the twin that asks each page for its layer, and no two in a row are one.
    #[test]
    fn stretches_are_sorted_and_say_which_layer_is_on_top(
        layers in prop::collection::vec(prop::collection::vec((0..60_u64, 1..12_u64), 0..8), 1..6),
    ) {
        let bytes = 64;
        let (mut twin, mut extents) = (vec![0_u32; bytes], vec![LayerExtent { start: 0, layer: 0 }]);
        for (layer, parts) in (1..).zip(layers) {
            let mut here = vec![false; bytes];
            for (start, len) in parts {
                here[start as usize..bytes.min((start + len) as usize)].fill(true);
            }
            let mut data: Vec<Range<u64>> = Vec::new();
            for at in (0..bytes).filter(|&at| here[at]) {
                twin[at] = layer;
                match data.last_mut() {
                    Some(last) if last.end == at as u64 => last.end += 1,
                    _ => data.push(at as u64..at as u64 + 1),
                }
            }
            extents = overlaid(&extents, &data, layer, bytes as u64);
        }
        prop_assert_eq!(extents[0].start, 0);
        prop_assert!(extents.windows(2).all(|two| two[0].start < two[1].start && two[0].layer != two[1].layer));
        let layer_at = |at: u64| extents[extents.partition_point(|stretch| stretch.start <= at) - 1].layer;
        prop_assert_eq!((0..bytes as u64).map(layer_at).collect::<Vec<_>>(), twin);
    }
}

#[test]
fn diffs_of_another_size_are_refused_with_both_sizes() {
    let folder = Folder::all().remove(0);
    let diff = LayerPages::from([(3, 7)]);
    let paths = folder.write(&[base(), diff]);
    for bytes in [BYTES - 1, BYTES + 1, BYTES - PAGE, 2 * BYTES] {
        fs::OpenOptions::new()
            .write(true)
            .open(&paths[1])
            .and_then(|it| it.set_len(bytes))
            .expect("it is ours");
        let said = refusal(&paths);
        assert!(said.contains(&bytes.to_string()) && said.contains(&BYTES.to_string()), "{said}");
        assert!(said.contains("layer-1"), "{said}");
    }
    fs::OpenOptions::new().write(true).open(&paths[1]).and_then(|it| it.set_len(0)).expect("it is ours");
    assert!(refusal(&paths).contains("empty"));
}

#[test]
fn a_diff_without_holes_and_one_named_twice_are_refused() {
    let folder = Folder::all().remove(0);
    let paths = folder.write(&[base(), base()]);
    let said = refusal(&paths);
    assert!(said.contains("no holes") && said.contains("layer-1"), "{said}");
    let base_twice = [paths[0].clone(), paths[0].clone()];
    assert!(refusal(&base_twice).contains("named twice"));
    let link = folder.folder.path().join("link");
    std::os::unix::fs::symlink(&paths[0], &link).expect("it is ours");
    assert!(refusal(&[paths[0].clone(), link]).contains("named twice"));
    assert!(refusal(&vec![paths[0].clone(); LAYERS_MAX + 1]).contains("65 layers"));
    assert!(refusal(&[]).contains("no snapshot is named"));
    let folder_itself = folder.folder.path().to_owned();
    assert!(refusal(&[paths[0].clone(), folder_itself]).contains("this is none"));
    // Opened for reading, it would wait for a writer.
    let (pipe, mode) = (folder.folder.path().join("pipe"), rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).expect("it is new");
    assert!(refusal(&[paths[0].clone(), pipe]).contains("this is none"));
}

/// The data that a file system of 1 KiB blocks tells of a page of which a part was written, or a part dug out.
#[test]
fn data_that_is_not_of_whole_pages_is_refused_and_the_end_of_the_file_is_one() {
    let bytes = 5 * PAGE + 100;
    let wrong = |data: &[Range<u64>]| checked_diff(data, bytes).expect_err("no whole pages");
    assert!(wrong(from_ref(&(1024..PAGE))).contains("from byte 1024 to byte 4096"));
    assert!(wrong(&[0..PAGE, 2 * PAGE..2 * PAGE + 512]).contains("whole pages"));
    assert!(wrong(from_ref(&(0..bytes))).contains("no holes"));
    assert_eq!(checked_diff(&[PAGE..3 * PAGE, 4 * PAGE..bytes], bytes), Ok(()));
    assert_eq!(checked_diff(&[], bytes), Ok(()));
}

/// Memory of 2 MiB pages counts as data, 2 MiB at a time, whatever was written.
#[test]
fn a_file_system_that_reports_blocks_of_more_than_a_page_is_refused() {
    use rustix::fs::MemfdFlags;
    let file = rustix::fs::memfd_create("quinion-diff", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB);
    let file = file.map(fs::File::from).ok();
    let Some(file) = file.filter(|file| file.set_len(4 << 20).is_ok()) else {
        println!("SKIPPED: there are no files of 2 MiB pages here");
        return;
    };
    let folder = Folder::all().remove(0);
    let base = folder.folder.path().join("base");
    fs::write(&base, vec![1; 4 << 20]).expect("room for a base");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let said = refusal(&[base, path]);
    assert!(said.contains("reports blocks of 2097152 bytes"), "{said}");
}

#[test]
fn a_change_of_any_layer_is_seen_by_the_snapshot_and_by_its_attributes() {
    let cache = Cache::builder().memory(32 << 20).build().expect("a small cache");
    for changed in 0..3 {
        let folder = Folder::all().remove(0);
        let paths = folder.write(&[base(), LayerPages::from([(3, 7)]), LayerPages::from([(4, 8)])]);
        let snapshot = Snapshot::open_layers(&cache, &paths).expect("layers");
        let (layers, opened) = (snapshot.assembled.as_ref().expect("layers"), Layers::open(&paths));
        let opened = opened.expect("layers");
        let before = layers.attributes().expect("they are there");
        assert_eq!(snapshot.assure(), Ok(()));
        let file = fs::OpenOptions::new().write(true).open(&paths[changed]).expect("it is ours");
        // A hole that is filled is a change like another.
        file.write_all_at(b"x", 50 * PAGE).expect("inside");
        let named = SnapshotChanged(paths[changed].display().to_string());
        assert_eq!(snapshot.assure(), Err(named), "layer {changed}");
        assert_ne!(layers.attributes().expect("they are there").version, before.version);
        assert_eq!(layers.attributes().expect("they are there").identity, before.identity);
        file.set_len(PAGE).expect("it is ours");
        let mut buffer = vec![0; 3 * PAGE_SIZE];
        let read = opened.read_at(&mut buffer, 2 * PAGE);
        assert!(read.is_err() || snapshot.assure().is_err(), "a layer that was cut supplies nothing");
        let cut = opened.read_at(&mut vec![0; PAGE_SIZE], [60, 3, 4][changed] * PAGE);
        let said = cut.expect_err("these bytes were cut off").to_string();
        assert!(said.contains("was cut while it was served"), "{said}");
    }
}

#[test]
fn the_identity_covers_all_layers() {
    let cache = Cache::builder().memory(32 << 20).build().expect("a small cache");
    let folder = Folder::all().remove(0);
    // Pages 1 and 2 are none of those that a file's fingerprint looks at.
    let diffs = [LayerPages::from([(1, 7)]), LayerPages::from([(2, 8)])];
    let paths = folder.write(&[base(), diffs[0].clone(), diffs[1].clone()]);
    let of = |paths: &[PathBuf]| Snapshot::open_layers(&cache, paths).expect("layers").identity();
    let (alone, one, both) = (of(&paths[..1]), of(&paths[..2]), of(&paths));
    assert!(alone != one && one != both && alone != both);
    assert_eq!(both, of(&paths), "it is the same each time");
    let other = Folder::all().remove(0);
    assert_eq!(both, of(&other.write(&[base(), diffs[0].clone(), diffs[1].clone()])), "and of a copy");
    let changed = LayerPages::from([(2, 9)]);
    assert_ne!(both, of(&other.write(&[base(), diffs[0].clone(), changed])), "a diff's bytes count");
}

#[test]
fn holes_are_the_pages_that_were_not_written() {
    for folder in Folder::all() {
        let path = folder.folder.path().join("diff");
        let mut file = fs::File::create(&path).expect("room for a diff");
        file.set_len(20 * PAGE).expect("room for a diff");
        assert_eq!(data_of(&file, 20 * PAGE).expect("it tells"), []);
        file.write_all(&[0; 4096]).expect("room for a page");
        file.write_all_at(&[1; 8192], 7 * PAGE).expect("room for a page");
        let read = fs::File::open(&path).expect("it is there");
        assert_eq!(data_of(&read, 20 * PAGE).expect("it tells"), [0..PAGE, 7 * PAGE..9 * PAGE]);
    }
}
