//! Kernel cache: a file that the kernel's page cache holds is read from there, and any other past it.
//!
//! ```text
//!   written just now, half of it or more in memory --> read(2)        dropped from memory --> O_DIRECT
//! ```

use std::fs::File;
use std::path::Path;

use quinion::{Cache, Image};
use rustix::fs::{Advice, fadvise};

const BYTES: usize = 8 << 20;

fn content() -> Vec<u8> {
    (0..BYTES).map(|at| (at / 4096 * 31 + at % 251) as u8).collect()
}

/// A file on a disk, of which the kernel's page cache has the first `kept` bytes.
fn file(folder: &Path, name: &str, kept: usize) -> std::path::PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content()).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    fadvise(&file, kept as u64, None, Advice::DontNeed).unwrap();
    path
}

#[test]
fn a_file_that_the_kernel_has_in_memory_is_read_from_there_and_any_other_is_not() {
    let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    for (name, kept, is_warm) in [("all", BYTES, true), ("half", BYTES / 2, true), ("none", 0, false)] {
        let path = file(folder.path(), name, kept);
        let opened = cache.open(&path).unwrap();
        if !opened.is_direct() {
            eprintln!("SKIPPED: {name}: this file system is never read past the kernel's page cache");
            return;
        }
        assert_eq!(opened.use_kernel_cache_if_warm().unwrap(), is_warm, "{name}");
        assert_eq!(opened.is_direct(), !is_warm, "{name}");
        let mut bytes = vec![0; BYTES];
        opened.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == content(), "{name}");
        let image = Image::from_snapshot(&cache, &path).unwrap();
        image.read_at(&mut bytes, 0).unwrap();
        assert!(bytes == content(), "{name}: the image");
    }
    // A file that is written here stays as it is.
    let path = file(folder.path(), "written", BYTES);
    let mut options = quinion::OpenOptions::new();
    let opened = cache.open_with(&path, options.write(true)).unwrap();
    assert_eq!(opened.use_kernel_cache_if_warm().unwrap(), !opened.is_direct());
}
