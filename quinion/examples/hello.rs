//! Reads a file twice through a cache of 64 MiB and says where the bytes came from.
use quinion::Cache;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or("Cargo.toml".into());
    let cache = Cache::builder().memory(64 << 20).build()?;
    let file = cache.open(&path)?;
    let (mut buffer, mut before) = ([0; 4096], cache.stats());
    for round in ["cold", "warm"] {
        let bytes = file.read_at(&mut buffer, 0)?;
        let now = cache.stats();
        println!("{round}: {bytes} bytes of {path}, {} from the device", now.since(&before).device_bytes);
        before = now;
    }
    let pinned = file.pin(0, 1 << 20)?;
    let lines = pinned.chunks().flatten().filter(|&&byte| byte == b'\n').count();
    println!("{lines} lines in the first {} bytes, counted without a copy", pinned.len());
    Ok(())
}
