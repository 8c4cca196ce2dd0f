//! Counted: small pieces of work of which instructions are counted.
//!
//! ```text
//!   quinion bench --count               each snippet under callgrind, a line for each
//!     valgrind .. quinion bench --inside "hit 64 B"
//!                  prepare              not counted
//!                  counted_region       counted: the snippet, so and so many times
//! ```
//!
//! A snippet is prepared, run once so that nothing is done for the first time
//! when it counts, and then run inside [`counted_region`], the one function that callgrind
//! is told to look at. Instructions vary with the compiler and with
//! what the processor offers (the copy of 64 bytes takes vectors where there
//! are any), not with how busy the machine is: so they can be compared with
//! recorded ones, which `cargo xtask test instructions` does.
//!
//! A copy of 4 KiB is one instruction to the processor, `rep movsb`, and to
//! valgrind an instruction and a branch for each byte. These are taken off again, so that
//! two in a hundred of the rest are seen.

use std::sync::Arc;

use quinion::backend::MemoryFile;
use quinion::xarray::{Inserted, RangeStop};
use quinion::{Cache, OpenOptions};

use super::harness::Unmeasured;
use super::index::{Index, made_up};
use super::pages::{PAGE, Pages, shuffled};
use super::ready::Ready;

/// What is counted, by its name.
pub struct Snippet {
    /// What it is called.
    pub name: &'static str,
    /// How often a call of what was prepared does it.
    pub times: u64,
    /// Bytes that it moves each time by a string instruction.
    pub moved: u64,
    prepare: fn() -> Result<Work, Unmeasured>,
}

/// The work itself: all of it is done again by each call.
pub type Work = Box<dyn FnMut()>;

const PAGES: u64 = 256;
const READS: u64 = 1 << 12;
const BATCHES: u64 = 1 << 10;
const FOLIOS: u64 = 1 << 12;
/// log2 of the pages of a file that is read at random: there are some 64 for each that is cached, a leaf of the tree
/// for each folio.
const SPARSE_LOG2: u32 = 19;

/// All that is counted.
pub const SNIPPETS: [Snippet; 15] = [
    snippet("hit 64 B", READS, || hits(64)),
    snippet("hit 4 KiB", READS, || hits(4096)).moving(4096),
    snippet("miss of 64 B, evicting", READS, misses).moving(4096),
    snippet("overwrite 64 B", READS, || overwrites(64)),
    snippet("overwrite 4 KiB", READS, || overwrites(4096)).moving(4096),
    snippet("single insert", FOLIOS, || inserts(1)),
    snippet("batch insert of 32, each", FOLIOS, || inserts(32)),
    snippet("batch read of 1", BATCHES, || batches(1, Ready::batch)),
    snippet("batch read of 4", BATCHES, || batches(4, Ready::batch)),
    snippet("batch read of 31", BATCHES, || batches(31, Ready::batch)),
    snippet("batch read of 1, a step more", BATCHES, || batches(1, Ready::batch_and_a_step)),
    snippet("batch read of 4, a step more", BATCHES, || batches(4, Ready::batch_and_a_step)),
    snippet("batch read of 31, a step more", BATCHES, || batches(31, Ready::batch_and_a_step)),
    snippet("batch read of 1, copied", BATCHES, || batches(1, Ready::batch_and_copy)).moving(4096),
    snippet("plain lookup and copy", BATCHES, || batches(1, Ready::lookup_and_copy)).moving(4096),
];

/// What may not become dearer unnoticed.
const RECORDED: [&str; 10] = [
    "hit 64 B",
    "hit 4 KiB",
    "miss of 64 B, evicting",
    "overwrite 64 B",
    "overwrite 4 KiB",
    "batch read of 1",
    "batch read of 4",
    "batch read of 31",
    "single insert",
    "batch insert of 32, each",
];

const fn snippet(name: &'static str, times: u64, prepare: fn() -> Result<Work, Unmeasured>) -> Snippet {
    Snippet { name, times, moved: 0, prepare }
}

impl Snippet {
    /// It moves `bytes` by a string instruction, where there is one.
    const fn moving(self, bytes: u64) -> Self {
        Self { moved: if cfg!(target_arch = "x86_64") { bytes } else { 0 }, ..self }
    }

    /// The snippet of that name.
    pub fn of(name: &str) -> Option<&'static Snippet> {
        const ALL: &[Snippet] = &SNIPPETS;
        ALL.iter().find(|snippet| snippet.name == name)
    }

    /// Whether its count is kept in the repository; the others are for comparing with these.
    pub fn is_recorded(&self) -> bool {
        RECORDED.contains(&self.name)
    }

    /// The work, ready and warm.
    pub fn prepare(&self) -> Result<Work, Unmeasured> {
        let mut work = (self.prepare)()?;
        work();
        Ok(work)
    }
}

/// Does the work: the one function that is counted.
#[inline(never)]
pub fn counted_region(work: &mut dyn FnMut()) {
    work();
    std::hint::black_box(());
}

/// Writes of `bytes` at a page after the other of a file that is cached and dirty.
fn overwrites(bytes: usize) -> Result<Work, Unmeasured> {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build()?;
    let memory = Arc::new(MemoryFile::new(vec![1; PAGES as usize * 4096]));
    let file = cache.open_backend_with(memory, OpenOptions::new().write(true))?;
    let buffer = vec![2; bytes];
    Ok(Box::new(move || {
        for write in 0..READS {
            let wrote = file.write_at(&buffer, write % PAGES * 4096).expect("it is cached");
            assert_eq!(wrote, bytes);
        }
    }))
}

/// Reads of `bytes` at a page after the other of a file that is cached.
fn hits(bytes: usize) -> Result<Work, Unmeasured> {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build()?;
    let file = cache.open_backend(Arc::new(MemoryFile::new(vec![1; PAGES as usize * 4096])))?;
    let mut buffer = vec![0; bytes];
    Ok(Box::new(move || {
        for read in 0..READS {
            let got = file.read_at(&mut buffer, read % PAGES * 4096).expect("it is cached");
            assert_eq!(got, bytes);
        }
        std::hint::black_box(&buffer);
    }))
}

/// Reads of 64 bytes, each of a page that nobody has read, in a full cache: so small a one evicts on the reader's own
/// thread, which is the one that is counted.
fn misses() -> Result<Work, Unmeasured> {
    let memory = 2 * Cache::MEMORY_MIN;
    let cache = Cache::builder().memory(memory).build()?;
    let file = cache.open_backend(Arc::new(Pages(1 << SPARSE_LOG2)))?;
    let (mut next, mut buffer) = (0, [0; 64]);
    let mut read = move |pages: u64| {
        for page in next..next + pages {
            let got =
                file.read_at(&mut buffer, shuffled(page, SPARSE_LOG2) * PAGE as u64).expect("it is memory");
            assert_eq!(got, buffer.len());
        }
        next += pages;
    };
    read(memory / PAGE as u64 * 3 / 2); // full, and with as much history as there may be
    Ok(Box::new(move || read(READS)))
}

/// Insertions into an index, and their removal, in batches of `batch`.
fn inserts(batch: usize) -> Result<Work, Unmeasured> {
    let index = Index::new(0, 32 << 20)?;
    let mut from = 0;
    Ok(Box::new(move || {
        let nodes = index.nodes();
        for count in (0..FOLIOS as usize).step_by(batch) {
            let lock = index.lock();
            let (mut tree, at) = (index.tree(&nodes, &lock), from + count as u64);
            if batch == 1 {
                assert!(matches!(tree.insert(at, 0, made_up(count)), Inserted::Done { .. }));
            } else {
                let folios = (count..count + batch).map(|count| (0, made_up(count)));
                assert_eq!(tree.insert_range(at, folios, |_, _| {}).stop, RangeStop::All);
            }
        }
        from += FOLIOS; // beside what is there: taking it out again would be counted too
    }))
}

/// Batches of `folios` from one place after the other.
fn batches(folios: u64, read: fn(&mut Ready, u64, u64)) -> Result<Work, Unmeasured> {
    let mut ready = Ready::new(PAGES as u32)?;
    Ok(Box::new(move || {
        for batch in 0..BATCHES {
            read(&mut ready, batch * 7 % (PAGES - folios), folios);
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_snippet_runs_again_and_again() {
        for snippet in &SNIPPETS {
            let mut work = snippet.prepare().expect(snippet.name);
            counted_region(&mut work);
            assert!(Snippet::of(snippet.name).is_some_and(|found| found.times == snippet.times));
        }
        assert!(Snippet::of("no such").is_none());
        assert!(RECORDED.iter().all(|name| Snippet::of(name).is_some()));
    }
}
