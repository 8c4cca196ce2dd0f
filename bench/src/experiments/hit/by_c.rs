//! By C: what does a hit cost by the functions of `quinion.h`, beside the same by Rust?
//!
//! Two caches of the same file, with the options that both have by default. They are read at the same random places. Of
//! 64 bytes in one page a hit is little but the call; of 4 KiB all over the file, the call's stores to the stack wait
//! behind those of the last copy.

use std::fs::File as KernelFile;
use std::rc::Rc;

use quinion::{Cache, File};

use super::{Aligned, Files, METRICS, warm};
use crate::fixtures::pages::PAGE;
use crate::fixtures::places::Places;
use crate::fixtures::scratch::{FirstWords, is_from, write_content};
use crate::fixtures::shared::Shared;
use crate::harness::folder::ScratchFolder;
use crate::harness::machine::check_memory;
use crate::harness::timing::alone;
use crate::harness::{Alternative, Case, Settings, Unmeasured};
use crate::sys::FileByC;

const BY_C: &str = "qn_pread";
const BY_RUST: &str = "read_at";
/// A hit may be dearer by 10 ns than one by Rust, of 20 ns in one page, and of 450 ns at random places.
const GOALS: [f64; 2] = [20.0 / 30.0, 450.0 / 460.0];

#[derive(Clone, Copy)]
struct CallLoad {
    name: &'static str,
    bytes: usize,
    /// Bytes from the start in which positions lie; the whole file if `None`.
    span: Option<u64>,
    reads: usize,
    goal: f64,
}

const LOADS: [CallLoad; 2] = [
    CallLoad {
        name: "64 B, one page, by C",
        bytes: 64,
        span: Some(PAGE as u64),
        reads: 1_000_000,
        goal: GOALS[0],
    },
    CallLoad { name: "4 KiB random, DRAM, by C", bytes: PAGE, span: None, reads: 200_000, goal: GOALS[1] },
];

type Read = fn(&Both, &mut [u8], u64) -> Result<usize, Unmeasured>;

pub fn cases(settings: &Settings) -> [Case; 2] {
    let both = Shared::new(settings, Both::new);
    let fewer = settings.pick(20, 1);
    LOADS.map(|load| {
        let both = both.clone();
        let load = CallLoad { reads: load.reads / fewer, ..load };
        let case = Case::new(load.name, &METRICS, move || {
            let both = both.get()?;
            let of = |name, read: Read| {
                let both = Rc::clone(&both);
                Alternative::new(name, move |repetition| Ok(vec![both.cpu_ns(load, read, repetition)?]))
            };
            Ok(vec![of(BY_C, Both::by_c), of(BY_RUST, Both::by_rust)])
        });
        case.compare("cpu", BY_C, BY_RUST).goal(load.goal)
    })
}

struct Both {
    bytes: u64,
    c: FileByC,
    rust: File,
}

impl Both {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = Files::bytes_in(settings);
        let memory = bytes + bytes / 16 + (64 << 20);
        check_memory(4 * bytes + (512 << 20))?;
        let folder = ScratchFolder::new(&settings.folder)?;
        let path = folder.path().join("pages");
        write_content(&mut KernelFile::create_new(&path)?, bytes)?;
        let rust = warm(Cache::builder().memory(memory).build()?.open(&path)?)?;
        let c = FileByC::open(&path, memory)?;
        let (mut piece, mut words) = (vec![0; 1 << 20], FirstWords::default());
        for position in (0..bytes).step_by(piece.len()) {
            let came = c.read_at(&mut piece, position)?;
            words.at(&piece[..came], position);
        }
        words.expect(bytes)?;
        Ok(Self { bytes, c, rust })
    }

    fn by_c(&self, buffer: &mut [u8], position: u64) -> Result<usize, Unmeasured> {
        Ok(self.c.read_at(buffer, position)?)
    }

    fn by_rust(&self, buffer: &mut [u8], position: u64) -> Result<usize, Unmeasured> {
        Ok(self.rust.read_at(buffer, position)?)
    }

    fn cpu_ns(&self, load: CallLoad, read: Read, seed: u64) -> Result<f64, Unmeasured> {
        let (mut places, mut page, mut whole, mut position) =
            (Places(seed), Box::new(Aligned([1; PAGE])), 0, 0);
        let (buffer, step) = (&mut page.0[..load.bytes], load.bytes as u64);
        let span = load.span.unwrap_or(self.bytes);
        let spent = alone(|| {
            for _ in 0..load.reads {
                position = places.next(span / step) * step;
                whole += usize::from(read(self, buffer, position).is_ok_and(|bytes| bytes == load.bytes));
                std::hint::black_box(&buffer);
            }
        });
        if whole == load.reads && is_from(buffer, position) {
            return Ok(spent.cpu_ns / load.reads as f64);
        }
        let text = format!("{whole} of {} reads came whole, and the last one may be wrong", load.reads);
        Err(Unmeasured::Failed(text))
    }
}
