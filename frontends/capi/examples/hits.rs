//! Reads one page that is cached so many times: what a hit costs in Rust. `tests/c/hits.c` is its twin.

use quinion::Cache;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, reads, bytes] = &arguments[..] else { return Err("hits FILE READS BYTES".into()) };
    let (reads, bytes): (u64, usize) = (reads.parse()?, bytes.parse()?);
    let cache = Cache::builder().memory(16 << 20).build()?;
    let (file, mut buffer) = (cache.open(path)?, [0; 4096]);
    let buffer = &mut buffer[..bytes];
    file.read_exact_at(buffer, 8192)?;
    for _ in 0..reads {
        assert_eq!(file.read_at(buffer, 8192)?, bytes);
    }
    std::process::exit(0); // as the twin ends, which closes nothing
}
