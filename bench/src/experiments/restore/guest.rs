//! Guest: the other side of a restore, as simple as it can be: memory, and a thread that touches it.
//!
//! ```text
//!   region  --touch each page, in order or scattered-->  compared with the snapshot
//!      '-- its faults: answered by a thread here (`Handler`), by the server (`vmm`), or by the kernel alone
//! ```

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::fixtures::pages::{PAGE, shuffled};
use crate::fixtures::scratch::word_at;
use crate::harness::Unmeasured;
use crate::sys::{Region, Uffd, Waiting};

/// The first word of a page of the snapshot holds its place; a region with another word was restored wrongly.
fn expect(wrong: u64) -> Result<(), Unmeasured> {
    if wrong == 0 {
        return Ok(());
    }
    Err(Unmeasured::Failed(
        "what the guest found in its memory is not what its snapshot has there".to_owned(),
    ))
}

pub fn touch_all(region: &Region) -> Result<(), Unmeasured> {
    let wrong = (0..region.len()).step_by(PAGE).map(|at| region.word(at) ^ word_at(at as u64));
    expect(wrong.fold(0, |all, one| all | one))
}

/// The part of its memory that a guest reads, page by page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touched {
    All,
    /// A fifth of it, in runs of [`RUN`] bytes that lie anywhere.
    Runs,
    /// A fifth of its pages, anywhere.
    Scattered,
}

const RUN: usize = 256 << 10;

impl Touched {
    pub fn touch(self, region: &Region) -> Result<(), Unmeasured> {
        let run = match self {
            Self::All => return touch_all(region),
            Self::Runs => RUN,
            Self::Scattered => PAGE,
        };
        let bits = (region.len() / run).ilog2();
        let mut wrong = 0;
        for nth in 0..(1 << bits) / 5 {
            let begin = shuffled(nth, bits) as usize * run;
            for at in (begin..begin + run).step_by(PAGE) {
                wrong |= region.word(at) ^ word_at(at as u64);
            }
        }
        expect(wrong)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    Read,
    Write,
}

/// Touches of `count` places that lie scattered, each in its own stretch of `stretch` bytes. A word that is read is the
/// one that `content` has there.
#[derive(Clone, Copy, Debug)]
pub struct ScatteredTouches {
    pub stretch: usize,
    pub count: usize,
    pub touch: Touch,
    pub content: Content,
}

impl ScatteredTouches {
    /// Touches the places of `region`, and returns how many microseconds each of them took.
    pub fn run(self, region: &mut Region) -> Result<Vec<f64>, Unmeasured> {
        let Self { stretch, count, touch, content } = self;
        let bits = (region.len() / stretch).ilog2();
        let count = count.min(1 << bits);
        let (mut taken, mut wrong) = (Vec::with_capacity(count), 0);
        for nth in 0..count as u64 {
            let at = shuffled(nth, bits) as usize * stretch;
            let start = Instant::now();
            match touch {
                Touch::Read => {
                    let word = region.word(at);
                    taken.push(start.elapsed().as_nanos() as f64 / 1e3);
                    wrong |= word ^ content.word(at);
                }
                Touch::Write => {
                    region.set_word(at, 1);
                    taken.push(start.elapsed().as_nanos() as f64 / 1e3);
                }
            }
        }
        expect(wrong)?;
        Ok(taken)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Each word holds its place.
    Snapshot,
    /// The snapshot's first bytes, repeated in this length.
    Repeated(usize),
}

impl Content {
    fn word(self, at: usize) -> u64 {
        match self {
            Self::Snapshot => word_at(at as u64),
            Self::Repeated(bytes) => word_at((at % bytes) as u64),
        }
    }
}

/// Runs `guest` while a thread answers the faults of its region, one at a time, by `answer`, which gets the place of
/// the page.
pub fn handled<T: Send>(
    uffd: &Uffd,
    waiting: Waiting,
    answer: impl Fn(&Uffd, usize) -> io::Result<()> + Sync,
    guest: impl FnOnce() -> Result<T, Unmeasured>,
) -> Result<T, Unmeasured> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let handler = scope.spawn(|| {
            // Relaxed: it hands nothing over; a late load costs a moment.
            while !is_over.load(Ordering::Relaxed) {
                let faults = uffd.faults(waiting).expect("the region is there as long as its guest");
                for at in faults {
                    if let Err(error) = answer(uffd, at / PAGE * PAGE) {
                        // The thread that waits for the page would wait for ever, and this one for it.
                        eprintln!("quinion: the page at byte {at} of a guest cannot be brought: {error}");
                        std::process::exit(1);
                    }
                }
            }
        });
        let ended = guest();
        is_over.store(true, Ordering::Relaxed);
        handler.join().expect("it does not panic");
        ended
    })
}
