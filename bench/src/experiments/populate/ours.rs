//! Ours: Quinion populates a memory file, 2 MiB at a time, directly into folios that no reader has seen yet.
//!
//! ```text
//!   fresh   the cache has just been built: its memory is taken from the machine meanwhile, and that is timed
//!   grown   the cache had as much before, and freed it into its own pool: frames are only reassigned
//! ```
//!
//! The source is the peers' large page that stays near the processor.

use std::cell::OnceCell;

use quinion::internals::mapping::IndexHooks;
use quinion::{Cache, MemFile, MemFileOptions};
use quinion_testing::ablations;

use super::peers::{PopulateFixture, SOURCE_BYTES};
use crate::harness::Unmeasured;
use crate::harness::timing::{Spent, alone, together};

pub const ONE: &str = "populate, one thread";
pub const TWO: &str = "populate, two threads";
pub const GROWN: &str = "populate, arena grown";
pub const WRITE: &str = "write 1M";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    Populate { threads: usize },
    Write { chunk: usize },
}

pub fn cache(bytes: u64, order: u8, hooks: Option<&'static dyn IndexHooks>) -> Result<Cache, Unmeasured> {
    let builder = ablations::builder(hooks).memory(bytes + bytes / 16 + (64 << 20));
    Ok(builder.folio_order_max(order).build()?)
}

pub fn file(cache: &Cache, bytes: u64) -> Result<MemFile, Unmeasured> {
    Ok(cache.mem_file(MemFileOptions::new().size(bytes).name("guest"))?)
}

pub fn fresh(fixture: &PopulateFixture, way: Way) -> Result<Spent, Unmeasured> {
    let file = file(&cache(fixture.bytes, 9, None)?, fixture.bytes)?;
    filled(fixture, &file, way)
}

pub struct Grown {
    file: OnceCell<MemFile>,
}

impl Grown {
    /// The file is made when it is first needed.
    pub fn new() -> Self {
        Self { file: OnceCell::new() }
    }

    pub fn again(&self, fixture: &PopulateFixture) -> Result<Spent, Unmeasured> {
        let way = Way::Populate { threads: 1 };
        if self.file.get().is_none() {
            let file = file(&cache(fixture.bytes, 9, None)?, fixture.bytes)?;
            filled(fixture, &file, way)?;
            self.file.get_or_init(|| file);
        }
        let file = self.file.get().expect("it was just made");
        empty(file)?;
        filled(fixture, file, way)
    }
}

pub fn empty(file: &MemFile) -> Result<(), Unmeasured> {
    file.punch_hole(0, file.len())?;
    match file.stats()?.memory_bytes() {
        0 => Ok(()),
        bytes => Err(Unmeasured::Failed(format!("{bytes} bytes stay in a file that was emptied"))),
    }
}

fn filled(fixture: &PopulateFixture, file: &MemFile, way: Way) -> Result<Spent, Unmeasured> {
    let spent = match way {
        Way::Populate { threads: 1 } => alone(|| populate(fixture, file, 0, fixture.bytes)),
        Way::Populate { threads } => {
            let share = fixture.bytes / threads as u64;
            let part = |thread: usize| {
                let from = thread as u64 * share;
                populate(fixture, file, from, from + share);
            };
            together(threads, 1, part, |_| {})
        }
        Way::Write { chunk } => alone(|| {
            for at in (0..fixture.bytes).step_by(chunk) {
                let start = at as usize % SOURCE_BYTES;
                file.write_all_at(&fixture.source[start..start + chunk], at).expect("there is memory for it");
            }
        }),
    };
    let mut word = [0; 8];
    fixture.check(|at| {
        file.read_exact_at(&mut word, at).expect("it is as long");
        u64::from_ne_bytes(word)
    })?;
    Ok(spent)
}

pub fn populate(fixture: &PopulateFixture, file: &MemFile, from: u64, to: u64) {
    let came = file.populate_with(from..to, |slice| {
        while slice.left() > 0 {
            let start = slice.position() as usize % SOURCE_BYTES;
            let len = slice.left().min(SOURCE_BYTES - start);
            slice.put(&fixture.source[start..start + len]);
        }
        Ok(())
    });
    assert_eq!(came.expect("there is memory for it"), to - from);
}
