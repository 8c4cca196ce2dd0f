//! Values: what does a hit cost, beside caches of values that programs are built with?
//!
//! ```text
//!   quinion              File::read_at of a page, folios of up to 2 MiB
//!   quick_cache, foyer,  a lookup by the page's number, a copy of the value, and its release
//!   moka
//!   bare copy            the same bytes from memory in 2 MiB pages, without looking anything up: the bound
//! ```
//!
//! All hold as many bytes; every read is a hit, is copied out and holds its place. Pages are asked for uniformly, or by
//! Zipf's law (s = 0.99), the popular ones scattered over the file. Which thread reads what is drawn before the clock
//! runs: a draw by that law costs as much as a hit.
//!
//! The peers have twice the memory that their values take, so that none of them evicts: how they divide it among their
//! parts is not the question.

use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::{Aligned, Files, METRICS};
use crate::fixtures::pages::{PAGE, shuffled};
use crate::fixtures::places::{Places, ThreadRun, Zipf};
use crate::fixtures::scratch::is_from;
#[cfg(feature = "peers")]
use crate::fixtures::scratch::word_at;
use crate::fixtures::shared::Shared;
#[cfg(feature = "peers")]
use crate::fixtures::values::peers::{Foyer, Moka, Page, QuickCache, foyer, moka, quick_cache};
use crate::fixtures::values::{ARE_BUILT, NAMES, not_built};
#[cfg(feature = "peers")]
use crate::harness::machine::check_memory;
use crate::harness::timing::together_ready;
use crate::harness::{Alternative, Case, Settings, Unmeasured};

const OURS: &str = "quinion";
const COPY: &str = "bare copy";
const GOALS: [f64; 3] = [1.7, 3.0, 3.5];
/// A hit may cost 1.3 bare copies.
const COPY_GOAL: f64 = 1.0 / 1.3;
const EXPONENT: f64 = 0.99;

#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    is_zipf: bool,
    threads: usize,
    reads: usize,
}

const LOADS: [Load; 4] = [
    Load { name: "4 KiB uniform, 1 thread", is_zipf: false, threads: 1, reads: 200_000 },
    Load { name: "4 KiB uniform, 2 threads", is_zipf: false, threads: 2, reads: 100_000 },
    Load { name: "4 KiB Zipf, 1 thread", is_zipf: true, threads: 1, reads: 200_000 },
    Load { name: "4 KiB Zipf, 2 threads", is_zipf: true, threads: 2, reads: 100_000 },
];

pub fn cases(settings: &Settings, files: &Shared<Files>) -> Vec<Case> {
    let peers = Shared::new(settings, Peers::new);
    let fewer = settings.pick(20, 1);
    let case = |load: Load| case(files, &peers, Load { reads: load.reads / fewer, ..load });
    LOADS.into_iter().map(case).chain(not_built(&METRICS)).collect()
}

fn case(files: &Shared<Files>, peers: &Shared<Peers>, load: Load) -> Case {
    let (files, peers) = (files.clone(), peers.clone());
    let case = Case::new(load.name, &METRICS, move || {
        let (files, peers) = (files.get()?, peers.get()?);
        let pages = files.bytes / PAGE as u64;
        let asked = Rc::new(PageSequence::new(pages, load));
        let of = |(name, copy)| {
            let (files, peers, asked) = (Rc::clone(&files), Rc::clone(&peers), Rc::clone(&asked));
            Alternative::new(name, move |repetition| {
                let held = CachedPages { files: &files, peers: &peers };
                cpu_ns(&held, &asked, copy, repetition)
            })
        };
        Ok([(OURS, ours as CopyPage), (COPY, bare_copy)].into_iter().chain(Peers::all()).map(of).collect())
    });
    let peers = NAMES.into_iter().zip(GOALS).filter(|_| ARE_BUILT);
    let case = peers.fold(case, |case, (peer, goal)| case.compare("cpu", OURS, peer).goal(goal));
    case.bound("cpu", OURS, COPY).goal(COPY_GOAL)
}

struct CachedPages<'h> {
    files: &'h Files,
    #[cfg_attr(not(feature = "peers"), expect(dead_code, reason = "there are none to be asked"))]
    peers: &'h Peers,
}

type CopyPage = fn(&CachedPages<'_>, u64, &mut [u8; PAGE]) -> bool;

fn ours(held: &CachedPages<'_>, page: u64, to: &mut [u8; PAGE]) -> bool {
    held.files.order_9.read_at(to, page * PAGE as u64).is_ok_and(|bytes| bytes == PAGE)
}

fn bare_copy(held: &CachedPages<'_>, page: u64, to: &mut [u8; PAGE]) -> bool {
    to.copy_from_slice(&held.files.copy[page as usize * PAGE..][..PAGE]);
    true
}

#[cfg(feature = "peers")]
struct Peers {
    quick_cache: QuickCache,
    foyer: Foyer,
    moka: Moka,
}

#[cfg(feature = "peers")]
impl Peers {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = Files::bytes_in(settings);
        check_memory(8 * bytes)?; // the files and copies that Quinion and the kernel have, and these
        let peers =
            Self { quick_cache: quick_cache(2 * bytes), foyer: foyer(2 * bytes), moka: moka(2 * bytes) };
        // One after another: each has its pages as near to one another as if it were alone.
        let pages = || (0..bytes / PAGE as u64).map(|number| (number, page(number)));
        pages().for_each(|(number, page)| peers.quick_cache.insert(number, page));
        pages().for_each(|(number, page)| peers.foyer.insert(number, page));
        pages().for_each(|(number, page)| peers.moka.insert(number, page));
        Ok(peers)
    }

    fn all() -> impl Iterator<Item = (&'static str, CopyPage)> {
        let copies: [CopyPage; 3] = [
            |held, page, to| held.peers.quick_cache.copy(page, to),
            |held, page, to| held.peers.foyer.copy(page, to),
            |held, page, to| held.peers.moka.copy(page, to),
        ];
        NAMES.into_iter().zip(copies)
    }
}

/// A page that holds its place, as those of the file do.
#[cfg(feature = "peers")]
fn page(number: u64) -> Page {
    let mut page = Page::new([0x51; PAGE]);
    let first = Page::get_mut(&mut page).expect("the only reference");
    first[..8].copy_from_slice(&word_at(number * PAGE as u64).to_le_bytes());
    page
}

#[cfg(not(feature = "peers"))]
struct Peers;

#[cfg(not(feature = "peers"))]
impl Peers {
    #[expect(clippy::unnecessary_wraps, reason = "those that are built may find no memory")]
    fn new(_settings: &Settings) -> Result<Self, Unmeasured> {
        Ok(Self)
    }

    fn all() -> impl Iterator<Item = (&'static str, CopyPage)> {
        std::iter::empty()
    }
}

struct PageSequence {
    pages: u64,
    zipf: Option<Zipf>,
    load: Load,
}

impl PageSequence {
    fn new(pages: u64, load: Load) -> Self {
        Self { pages, zipf: load.is_zipf.then(|| Zipf::new(pages, EXPONENT)), load }
    }

    fn draw(&self, places: &mut Places) -> Vec<u64> {
        let bits = self.pages.ilog2();
        let one = |_| match &self.zipf {
            Some(zipf) => shuffled(zipf.next(places), bits),
            None => places.next(self.pages),
        };
        (0..self.load.reads).map(one).collect()
    }
}

struct Reader {
    pages: Vec<u64>,
    page: Box<Aligned>,
    right: usize,
}

fn cpu_ns(
    held: &CachedPages<'_>,
    asked: &PageSequence,
    copy: CopyPage,
    repetition: u64,
) -> Result<Vec<f64>, Unmeasured> {
    let load = asked.load;
    let ready = |thread| {
        let mut places = ThreadRun { thread, repetition }.places();
        Reader { pages: asked.draw(&mut places), page: Box::new(Aligned([1; PAGE])), right: 0 }
    };
    let read_all = |Reader { pages, page, right }: &mut Reader| {
        for &number in &*pages {
            let is_there = copy(held, number, &mut page.0);
            *right += usize::from(is_there && is_from(&page.0, number * PAGE as u64));
        }
    };
    let right = AtomicUsize::new(0);
    let count = |reader: &mut Reader| {
        right.fetch_add(reader.right, Relaxed);
    };
    let spent = together_ready(load.threads, ready, read_all, count);
    let all = load.threads * load.reads;
    match right.into_inner() {
        right if right == all => Ok(vec![spent.cpu_ns / all as f64]),
        right => {
            Err(Unmeasured::Failed(format!("{right} of {all} pages were found, and were the right ones")))
        }
    }
}
