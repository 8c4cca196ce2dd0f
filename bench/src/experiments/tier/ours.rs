//! Ours: Quinion's disk tier, `quinion-disk`, by itself, by the calls that the cache makes.
//!
//! A put that is refused is tried again when the disk has had time; the cache would drop it, since its bytes are also
//! elsewhere. Readers copy to memory of their own.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use quinion_disk::{ContentKey, DiskOptions, DiskStore, Missed};

use super::{BUFFER_BYTES, CONTENTS, ENTRY_BYTES, Tier, contents, is_entry, wrong};
use crate::harness::Unmeasured;

const PAGES: u64 = (ENTRY_BYTES / 4096) as u64;
/// How long the writer waits that was refused: a fraction of what the disk needs for what is in memory.
const PAUSE: Duration = Duration::from_millis(2);
/// All entries are neighbours in one content, as the parts of an object are.
const KEY: ContentKey = ContentKey([7; 32]);

struct Ours {
    store: DiskStore,
    contents: Vec<Vec<u8>>,
}

pub fn open(folder: &Path, bytes: u64) -> Result<Box<dyn Tier>, Unmeasured> {
    let options = DiskOptions::new(folder, bytes).buffer_bytes(BUFFER_BYTES);
    let store = DiskStore::open(&options).map_err(|error| Unmeasured::Failed(error.to_string()))?;
    Ok(Box::new(Ours { store, contents: contents() }))
}

impl Ours {
    fn content(&self, number: u64) -> &[u8] {
        &self.contents[(number % CONTENTS) as usize]
    }

    fn read_one(&self, number: u64, buffer: &mut [u8]) -> Result<(), Unmeasured> {
        let read = self.store.read(&KEY, number * PAGES, PAGES as u32, &mut |at, bytes| {
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
        });
        let missed = |missed: Missed| wrong(number, &format!("{missed:?}"));
        read.map_err(missed)?;
        if is_entry(buffer, self.content(number)) { Ok(()) } else { Err(wrong(number, &"other bytes")) }
    }
}

impl Tier for Ours {
    fn write(&self, numbers: Range<u64>) -> Result<(), Unmeasured> {
        for number in numbers.clone() {
            while self.store.put(&KEY, number * PAGES, self.content(number)) < PAGES {
                if let Some(trouble) = self.store.trouble() {
                    return Err(wrong(number, &trouble));
                }
                std::thread::sleep(PAUSE);
            }
        }
        self.store.flush();
        match numbers.clone().find(|number| !self.store.has(&KEY, number * PAGES, PAGES as u32)) {
            None => Ok(()),
            Some(number) => Err(wrong(number, &"it is not there")),
        }
    }

    fn read(&self, numbers: &[u64], at_a_time: usize) -> Result<(), Unmeasured> {
        let share = |first: usize| {
            let mut buffer = vec![0; ENTRY_BYTES];
            numbers
                .iter()
                .skip(first)
                .step_by(at_a_time)
                .try_for_each(|&number| self.read_one(number, &mut buffer))
        };
        if at_a_time == 1 {
            return share(0);
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..at_a_time).map(|first| scope.spawn(move || share(first))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
        })
    }
}
