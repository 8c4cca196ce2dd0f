//! Random: pages of the file in an unpredictable order, each page once.
//!
//! No page is read twice, so a cache cannot help, and the device should read exactly what was asked for. Readahead that
//! guesses shows as excess.

use std::os::unix::fs::FileExt;
use std::rc::Rc;

use super::sequential::no_ring;
use super::target::{Cost, Target};
use super::{ASKED, CACHE, DISK, PROCESS, device_rows, per_byte, tasks};
use crate::fixtures::pages::PAGE;
use crate::fixtures::places;
use crate::fixtures::scratch::FirstWords;
use crate::fixtures::shared::Shared;
use crate::harness::timing::process_cpu_ns;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{HugeMemory, RawReader};

const METRICS: [Metric; 5] = [
    Metric::gain("rate", "1000 reads/s"),
    Metric::cost("cpu", "us/read"),
    per_byte(DISK),
    per_byte(PROCESS),
    per_byte(CACHE),
];

const DEPTH: usize = 32;
const FUTURES: &str = "futures, 32 at once";
const READ_AT: &str = "read_at, 1 at once";
const RAW: &str = "raw io_uring, 32 at once";
const PREAD: &str = "O_DIRECT pread, 1 at once";
/// The least ratios wanted of futures beside the raw ring.
const RAW_RATE_GOAL: f64 = 0.95;
const RAW_CPU_GOAL: f64 = 1.0 / 1.8;
/// Bytes of the cache: fewer than are read, so that pages are evicted, too.
const MEMORY: u64 = 64 << 20;

type Run = fn(&Target, Places) -> Result<Option<u64>, Unmeasured>;

pub fn case(source: &Shared<Target>, settings: &Settings) -> Case {
    let (source, reads) = (source.clone(), settings.pick(8 << 10, 32 << 10));
    let case = Case::new("random 4 KiB", &METRICS, move || {
        let target = source.get()?;
        let of = |name, run: Run| alternative(&target, name, reads, run);
        Ok(vec![
            of(FUTURES, futures),
            of(RAW, raw),
            of(READ_AT, read_at),
            of(PREAD, pread),
            requested_bytes(),
        ])
    });
    let case = case
        .without_warm_up()
        .bound("rate", FUTURES, RAW)
        .goal(RAW_RATE_GOAL)
        .bound("cpu", FUTURES, RAW)
        .goal(RAW_CPU_GOAL)
        .compare("rate", FUTURES, PREAD)
        .compare("cpu", FUTURES, PREAD)
        .bound("rate", READ_AT, PREAD)
        .bound("cpu", READ_AT, PREAD);
    [FUTURES, READ_AT].into_iter().fold(case, device_rows)
}

fn alternative(target: &Rc<Target>, name: &'static str, reads: usize, run: Run) -> Alternative {
    let target = Rc::clone(target);
    Alternative::new(name, move |repetition| {
        let places = Places::new(target.scratch.bytes() / PAGE as u64, reads, repetition);
        let cost = target.measure(process_cpu_ns, || run(&target, places))?;
        let Cost { seconds, cpu_seconds, device_bytes, .. } = cost;
        let (reads, bytes) = (reads as f64, (reads * PAGE) as f64);
        let device = device_bytes.map(|device| device / bytes);
        Ok([reads / 1e3 / seconds, cpu_seconds * 1e6 / reads].into_iter().chain(device).collect())
    })
    .excused(METRICS.len())
}

/// The bytes asked for, each once, in no time: the reference for the device rows.
fn requested_bytes() -> Alternative {
    Alternative::new(ASKED, |_| Ok(vec![f64::NAN, f64::NAN, 1.0, 1.0, 1.0]))
}

fn futures(target: &Target, places: Places) -> Result<Option<u64>, Unmeasured> {
    let cached = target.cached(MEMORY)?;
    let (bytes, state) = (places.bytes(), std::cell::RefCell::new((places, FirstWords::default())));
    let reader = || async {
        let mut buffer = [0; PAGE];
        loop {
            let Some(place) = state.borrow_mut().0.next() else { return Ok(()) };
            let bytes = cached.file.read_at_async(&mut buffer, place).await?;
            state.borrow_mut().1.at(&buffer[..bytes], place);
        }
    };
    let ended: Result<(), quinion::Error> =
        tasks::run_all((0..DEPTH).map(|_| reader())).into_iter().collect();
    ended?;
    state.into_inner().1.expect(bytes)?;
    Ok(cached.device_bytes())
}

fn read_at(target: &Target, places: Places) -> Result<Option<u64>, Unmeasured> {
    let cached = target.cached(MEMORY)?;
    one_by_one(places, |buffer, place| Ok(cached.file.read_at(buffer, place)?))?;
    Ok(cached.device_bytes())
}

fn pread(target: &Target, places: Places) -> Result<Option<u64>, Unmeasured> {
    let file = target.scratch.open_direct()?;
    one_by_one(places, |buffer, place| Ok(file.read_at(buffer, place)?))?;
    Ok(None)
}

fn one_by_one(
    places: Places,
    read: impl Fn(&mut [u8], u64) -> Result<usize, Unmeasured>,
) -> Result<(), Unmeasured> {
    let (bytes, mut first_words, mut buffer) =
        (places.bytes(), FirstWords::default(), HugeMemory::new(PAGE)?);
    for place in places {
        let bytes = read(&mut buffer, place)?;
        first_words.at(&buffer[..bytes], place);
    }
    first_words.expect(bytes)
}

fn raw(target: &Target, mut places: Places) -> Result<Option<u64>, Unmeasured> {
    let (bytes, mut first_words) = (places.bytes(), FirstWords::default());
    let file = target.scratch.open_direct()?;
    let reader = RawReader::new(&file, PAGE, DEPTH).map_err(|error| no_ring(&error))?;
    reader.read_all(|| places.next(), |bytes, place| first_words.at(bytes, place))?;
    first_words.expect(bytes)?;
    Ok(None)
}

struct Places(std::vec::IntoIter<u32>);

impl Places {
    fn new(pages: u64, reads: usize, seed: u64) -> Self {
        let (mut all, mut random): (Vec<u32>, _) =
            ((0..pages as u32).collect(), places::Places(seed.wrapping_add(1)));
        for at in 0..reads {
            let left = (all.len() - at) as u64;
            all.swap(at, at + random.next(left) as usize);
        }
        all.truncate(reads);
        Self(all.into_iter())
    }

    fn bytes(&self) -> u64 {
        (self.0.len() * PAGE) as u64
    }
}

impl Iterator for Places {
    type Item = u64;
    fn next(&mut self) -> Option<u64> {
        self.0.next().map(|page| u64::from(page) * PAGE as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_place_comes_twice_and_a_seed_is_an_order() {
        let places = |seed| Places::new(100, 60, seed).collect::<Vec<u64>>();
        let pages: BTreeSet<u64> = places(1).into_iter().collect();
        assert_eq!((pages.len(), Places::new(100, 60, 1).bytes()), (60, 60 * 4096));
        assert!(pages.iter().all(|&place| place % 4096 == 0 && place < 100 * 4096));
        assert!(places(1) == places(1) && places(1) != places(2));
        assert_eq!(Places::new(8, 8, 0).map(|place| place / 4096).sum::<u64>(), 28);
    }
}
