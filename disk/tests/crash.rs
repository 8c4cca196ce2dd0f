//! Crash: the power fails at any moment. What is found afterwards has its own bytes, and only the last of it is
//! missing. Bits flip, too, and a disk may hold noise: that is a miss like any other.
//!
//! `QUINION_DISK_ROUNDS` is how many seeds each test tries, 40 without it.

mod common;

use common::{Disk, Random, content, key, read_checked};
use quinion_disk::internals::{DATA_PAGES, EXTENT_PAGES_MAX, SEGMENT_BYTES};

const EXTENT: u64 = EXTENT_PAGES_MAX as u64;
const CONTENTS: u64 = 40;
const PAGES: u64 = 256;

fn seeds() -> std::ops::Range<u64> {
    let rounds =
        std::env::var("QUINION_DISK_ROUNDS").map_or(40, |rounds| rounds.parse().expect("a number of rounds"));
    0..rounds
}

fn read_everything(store: &quinion_disk::DiskStore) -> u64 {
    let all = (0..CONTENTS).flat_map(|of| (0..PAGES / EXTENT).map(move |extent| (of, extent * EXTENT)));
    all.map(|(of, page)| u64::from(read_checked(store, of, page, 16)) * EXTENT).sum()
}

#[test]
fn a_power_cut_at_any_write_leaves_no_wrong_byte() {
    for seed in seeds() {
        let (mut random, options) = (Random(seed), Disk::options(16));
        let mut disk = Disk::of(&options);
        for _ in 0..3 {
            let store = disk.open(&options);
            disk.cut_after(1 + random.below(30));
            for _ in 0..random.below(900) {
                let (of, page) = (random.below(CONTENTS), random.below(PAGES));
                let pages = 1 + random.below((PAGES - page).min(24));
                store.put(&key(of), page, &content(of, page, pages));
                if random.below(4) == 0 {
                    read_checked(
                        &store,
                        random.below(CONTENTS),
                        random.below(PAGES - 16),
                        1 + random.below(16) as u32,
                    );
                }
                if random.below(300) == 0 {
                    store.flush();
                }
            }
            let after = disk.after_power_cut(&mut random);
            drop(store);
            disk = after;
            let store = disk.open(&options);
            store.check().unwrap();
            read_everything(&store);
        }
    }
}

#[test]
fn flushed_pages_survive_a_power_cut() {
    for seed in seeds() {
        let (mut random, options) = (Random(seed), Disk::options(16));
        let disk = Disk::of(&options);
        let store = disk.open(&options);
        let flushed = 1 + random.below(100);
        for of in 0..flushed {
            assert_eq!(store.put(&key(of), 0, &content(of, 0, EXTENT)), EXTENT);
            if of % 10 == 9 {
                store.flush();
            }
        }
        store.flush();
        let more = random.below(DATA_PAGES as u64 / EXTENT * 3);
        for of in flushed..flushed + more {
            store.put(&key(of), 0, &content(of, 0, EXTENT));
        }
        let disk = disk.after_power_cut(&mut random);
        let after = disk.open(&options);
        // Less than a lap of the ring was written, so nothing of it was written over.
        for of in 0..flushed {
            assert!(read_checked(&after, of, 0, 16), "seed {seed}: {of} of {flushed}");
        }
    }
}

#[test]
fn a_disk_full_of_noise_opens_as_an_empty_store() {
    for seed in seeds() {
        let (mut random, options) = (Random(seed), Disk::options(16));
        let disk = Disk::of(&options);
        drop(disk.open(&options)); // a superblock
        disk.bytes_mut(|bytes| {
            for word in bytes[SEGMENT_BYTES..].chunks_exact_mut(8) {
                word.copy_from_slice(&random.next().to_le_bytes());
            }
        });
        let store = disk.open(&options);
        assert_eq!(store.stats().pages, 0);
        assert_eq!(store.put(&key(1), 0, &content(1, 0, EXTENT)), EXTENT);
        assert!(read_checked(&store, 1, 0, 16));
    }
}

#[test]
fn flipped_bits_anywhere_leave_no_wrong_byte() {
    for seed in seeds() {
        let (mut random, options) = (Random(seed), Disk::options(16));
        let disk = Disk::of(&options);
        let store = disk.open(&options);
        for of in 0..CONTENTS {
            store.put(&key(of), 0, &content(of, 0, 64));
            store.flush();
        }
        drop(store);
        disk.bytes_mut(|bytes| {
            for _ in 0..100 {
                let at = SEGMENT_BYTES + random.below((bytes.len() - SEGMENT_BYTES) as u64) as usize;
                bytes[at] ^= 1 << random.below(8);
            }
        });
        let store = disk.open(&options);
        assert!(read_everything(&store) > 0);
        store.check().unwrap();
    }
}
