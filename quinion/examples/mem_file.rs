//! A file of memory: sparse, shared by its handles, lent without a copy, and free when it is punched.
use std::io::{Seek, Write};

use quinion::{Cache, MemFileOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cache = Cache::builder().memory(64 << 20).build()?;
    let mut table = cache.mem_file(MemFileOptions::new().name("table").size(1 << 40))?;
    table.write_all_at(b"a row in the middle of a terabyte", 1 << 39)?;
    table.write_all(b"a row at the beginning")?;
    println!("at byte {}: {:?}", table.stream_position()?, table.stats()?);

    // Ranges that were never written read as zeros and take no memory.
    let mut buffer = vec![1; 16 << 20];
    let read = table.read_at(&mut buffer, 1 << 30)?;
    println!("{read} bytes, of which {} are not zero", buffer.iter().filter(|&&byte| byte != 0).count());

    // `seek` finds the written ranges without reading the holes.
    let row = table.seek_data(4096)?.ok_or("there is a second row")?;
    let pinned = table.pin(row, 33)?;
    table.punch_hole(row, 4096)?;
    println!(
        "{:?}, lent and punched",
        String::from_utf8_lossy(&pinned.chunks().flatten().copied().collect::<Vec<_>>())
    );
    println!("{:?}", table.stats()?);
    Ok(())
}
