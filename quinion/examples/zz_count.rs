//! Scratch.
use quinion::backend::MemoryFile;
use quinion::{Cache, OpenOptions};
use std::sync::Arc;
#[inline(never)]
fn counted_region(work: &mut dyn FnMut()) {
    work();
    std::hint::black_box(());
}
fn main() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let memory = Arc::new(MemoryFile::new(vec![1; 256 * 4096]));
    let file = cache.open_backend_with(memory, OpenOptions::new().write(true)).unwrap();
    let buffer = vec![2; std::env::var("BYTES").map_or(64, |n| n.parse().unwrap())];
    let clean = std::env::var("CLEAN").is_ok();
    let mut work = || {
        for write in 0..256u64 {
            assert_eq!(file.write_at(&buffer, write % 256 * 4096).unwrap(), buffer.len());
        }
    };
    work();
    if clean {
        file.sync_data().unwrap();
    }
    counted_region(&mut work);
}
