//! Memory files, statement by statement: what is not there is zeros, and what is there stays.

use quinion::{Cache, MemFile, MemFileOptions};

const PAGE: u64 = 4096;

fn cache(mib: u64) -> Cache {
    Cache::builder().memory(mib << 20).build().unwrap()
}

fn file(cache: &Cache) -> MemFile {
    cache.mem_file(MemFileOptions::new()).unwrap()
}

fn read(file: &MemFile, position: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    let read = file.read_at(&mut bytes, position).unwrap();
    bytes.truncate(read);
    bytes
}

#[test]
fn what_was_written_is_read_and_what_lies_between_is_zeros() {
    let cache = cache(16);
    let file = file(&cache);
    assert_eq!(file.write_at(b"hello", 10_000).unwrap(), 5);
    assert_eq!(file.len(), 10_005);
    assert_eq!(read(&file, 0, 20_000), [&[0; 10_000][..], b"hello"].concat());
    assert_eq!(file.write_at(&[7; 5 * 4096], 3 * PAGE + 100).unwrap(), 5 * 4096);
    assert_eq!(read(&file, 3 * PAGE, 101), [&[0; 100][..], &[7]].concat());
    assert_eq!(read(&file, 8 * PAGE + 90, 20), [7; 10]);
    assert_eq!(file.append(b"end").unwrap(), 8 * PAGE + 100);
    cache.check().unwrap();
}
