//! Writes a file through a cache: records behind each other, a header in place, and what makes them last.
//!
//! Run: `cargo run --example write -- FILE`

use std::error::Error;

use quinion::{Cache, Durability, OpenOptions, WriteOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("name a file; it is made, or emptied")?;
    let cache = Cache::builder().memory(64 << 20).build()?;
    let options = *OpenOptions::new().write(true).create(true).truncate(true);
    let file = cache.open_with(&path, &options)?;

    // Into the cache: no system call, and every reader of the cache sees it.
    file.write_all_at(b"records: 0000\n", 0)?;
    for number in 0..1000 {
        let position = file.append(format!("record {number}\n").as_bytes())?;
        assert!(position >= 14, "each has its place to itself");
    }
    println!("{} bytes, of which {} are in the cache alone", file.len(), file.dirty_bytes()?);

    // To the medium: first the records, then the header that says so, in this order and no other.
    file.sync_data()?;
    file.write_all_at(b"records: 1000\n", 0)?;
    file.sync_range(0, 14)?;

    // One write that is on the medium when it returns, and one that leaves nothing in the cache.
    file.write_at_with(b"R", 0, WriteOptions::new().durability(Durability::Data))?;
    file.write_at_with(&[b'.'; 1 << 16], 1 << 20, WriteOptions::new().uncached(true))?;
    file.punch_hole(1 << 20, 4096)?;
    file.set_len((1 << 20) + 8192)?;
    file.sync_all()?;

    // Another handle of the same cache reads the same pages.
    let mut line = [0; 14];
    cache.open(&path)?.read_exact_at(&mut line, 0)?;
    print!("{}", String::from_utf8_lossy(&line));
    Ok(())
}
