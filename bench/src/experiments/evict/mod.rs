//! Evict: what does it cost to put a new page into a full cache, data included?
//!
//! ```text
//!   quinion              read 64 bytes of a page that was not read: a folio is evicted, a frame is filled, a folio
//!                        is inserted. The bytes come from a backend in Rust, out of memory that is near
//!   quick_cache, foyer,  a page is allocated and filled from the same memory, and inserted under its number: another
//!   moka                 is evicted and freed
//!   alloc, fill, free    the page without a cache: the bound
//! ```
//!
//! All may hold the same: the peers so many bytes of values, Quinion so many bytes in all, with index and history, so
//! that it holds a little less. All are full before they are measured. No page comes twice, in an order that looks
//! random or one after the other, and each thread has pages of its own, in one file.
//!
//! Quinion reads as for a program that gives no hint: random pages come alone, those in sequence by windows that
//! readahead decides, in large folios. To a peer the order of numbers is nothing. The 64 bytes that Quinion also copies
//! count.
//!
//! CPU time is that of the whole process, since some work is done by threads in the background.
//!
//! Not an invariant: that an insertion of a peer evicts at once. Some evict in batches; over a run it evens out.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use quinion::{Cache, File};

use crate::fixtures::pages::{PAGE, Pages, shuffled, word_of, write_page};
#[cfg(feature = "peers")]
use crate::fixtures::values::peers::{Peer, foyer, moka, quick_cache};
use crate::fixtures::values::{ARE_BUILT, NAMES, not_built};
use crate::harness::timing::{process_cpu_ns, together_ready};
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const METRICS: [Metric; 2] = [Metric::cost("cpu", "ns/page"), Metric::cost("time", "ns/page")];
const OURS: &str = "quinion";
const BARE: &str = "alloc, fill, free";
const GOALS: [f64; 3] = [2.0, 8.0, 10.0];
/// log2 of the pages of the file: more than are ever inserted.
const FILE_PAGES_LOG2: u32 = 22;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    Random,
    Sequential,
}

#[derive(Clone, Copy)]
struct Load {
    order: Order,
    threads: u64,
    pages: u64,
    memory: u64,
}

impl Load {
    fn name(self) -> String {
        let order = match self.order {
            Order::Random => "random",
            Order::Sequential => "sequential",
        };
        let threads =
            if self.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", self.threads) };
        format!("{order} new 4 KiB pages, {threads}")
    }

    fn page(self, thread: u64, n: u64) -> u64 {
        match self.order {
            Order::Random => shuffled(n * self.threads + thread, FILE_PAGES_LOG2),
            Order::Sequential => thread * ((1 << FILE_PAGES_LOG2) / self.threads) + n,
        }
    }

    /// Pages of each thread after which every cache is full.
    fn full(self) -> u64 {
        self.memory / PAGE as u64 * 3 / 2 / self.threads
    }
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let (pages, memory) = (settings.pick(4 << 10, 64 << 10), settings.pick(Cache::MEMORY_MIN, 256 << 20));
    let load = |(order, threads)| Load { order, threads, pages: pages / threads, memory };
    let loads =
        [(Order::Random, 1), (Order::Random, 2), (Order::Sequential, 1), (Order::Sequential, 2)].map(load);
    loads.into_iter().map(case).chain(not_built(&METRICS)).collect()
}

fn case(load: Load) -> Case {
    let case = Case::new(load.name(), &METRICS, move || {
        let mut ways =
            vec![alternative(OURS, Ours::new(load.memory)?, load)?, alternative(BARE, Bare, load)?];
        ways.extend(peers(load)?);
        Ok(ways)
    });
    let beside = |case: Case, (peer, goal): (&'static str, f64)| {
        case.compare("cpu", OURS, peer).goal(goal).compare("time", OURS, peer)
    };
    let peers = NAMES.into_iter().zip(GOALS).filter(|_| ARE_BUILT);
    peers.fold(case, beside).bound("cpu", OURS, BARE).bound("time", OURS, BARE)
}

#[cfg(feature = "peers")]
fn peers(load: Load) -> Result<Vec<Alternative>, Unmeasured> {
    let [first, second, third] = NAMES;
    Ok(vec![
        alternative(first, quick_cache(load.memory), load)?,
        alternative(second, foyer(load.memory), load)?,
        alternative(third, moka(load.memory), load)?,
    ])
}

#[cfg(not(feature = "peers"))]
fn peers(_load: Load) -> Result<Vec<Alternative>, Unmeasured> {
    Ok(Vec::new())
}

trait Subject: Sync {
    type Handle<'s>
    where
        Self: 's;
    fn hand(&self) -> Self::Handle<'_>;
    fn insert(hand: &mut Self::Handle<'_>, page: u64);
    /// Whether pages have left, as far as that can be asked.
    fn has_evicted(&self) -> bool;
}

fn alternative<S: Subject + 'static>(
    name: &'static str,
    subject: S,
    load: Load,
) -> Result<Alternative, Unmeasured> {
    let (subject, next) = (Rc::new(subject), Rc::new(Cell::new(0)));
    let insert = move |pages: u64| {
        let subject: &S = &subject;
        let first = next.replace(next.get() + pages);
        let cpu = process_cpu_ns();
        let ready = |thread| (thread as u64, subject.hand());
        let work = |(thread, hand): &mut (u64, S::Handle<'_>)| {
            (first..first + pages).for_each(|n| S::insert(hand, load.page(*thread, n)));
        };
        let spent = together_ready(load.threads as usize, ready, work, |_| {});
        let all = (pages * load.threads) as f64;
        let each = vec![(process_cpu_ns() - cpu) / all, spent.elapsed_ns / all];
        if subject.has_evicted() {
            return Ok(each);
        }
        Err(Unmeasured::Failed("nothing has left, so the cache is not full".to_owned()))
    };
    insert(load.full())?;
    Ok(Alternative::new(name, move |_| insert(load.pages)))
}

struct Ours {
    cache: Cache,
    file: File,
}

impl Ours {
    fn new(memory: u64) -> Result<Self, Unmeasured> {
        let cache = Cache::builder().memory(memory).build()?;
        let file = cache.open_backend(Arc::new(Pages(1 << FILE_PAGES_LOG2)))?;
        Ok(Self { cache, file })
    }
}

impl Subject for Ours {
    type Handle<'s> = File;
    fn hand(&self) -> File {
        self.file.clone()
    }
    fn insert(file: &mut File, page: u64) {
        let mut first = [0; 64];
        let bytes = file.read_at(&mut first, page * PAGE as u64).expect("memory is there to be read");
        assert!(bytes == first.len() && first[..8] == word_of(page), "{bytes} bytes at page {page}");
    }
    fn has_evicted(&self) -> bool {
        self.cache.stats().evicted_pages > 0
    }
}

#[cfg(feature = "peers")]
impl<C: Sync> Subject for Peer<C> {
    type Handle<'s>
        = &'s Self
    where
        C: 's;
    fn hand(&self) -> &Self {
        self
    }
    fn insert(peer: &mut &Self, number: u64) {
        let mut page = Arc::new([0; PAGE]);
        write_page(Arc::get_mut(&mut page).expect("the only reference"), number);
        Peer::insert(peer, number, page);
    }
    fn has_evicted(&self) -> bool {
        Self::has_evicted(self)
    }
}

struct Bare;

impl Subject for Bare {
    type Handle<'s> = ();
    fn hand(&self) {}
    fn insert((): &mut (), page: u64) {
        let mut value = Box::new([0; PAGE]);
        write_page(&mut value, page);
        std::hint::black_box(&value);
    }
    fn has_evicted(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const LOAD: Load = Load { order: Order::Random, threads: 2, pages: 512, memory: Cache::MEMORY_MIN };

    #[test]
    fn no_page_comes_twice_in_any_order() {
        for order in [Order::Random, Order::Sequential] {
            let load = Load { order, ..LOAD };
            let page = |n: u64| load.page(n % 2, n / 2);
            let pages: BTreeSet<u64> = (0..20_000).map(page).collect();
            assert!(pages.len() == 20_000 && pages.last() < Some(&(1 << FILE_PAGES_LOG2)), "{order:?}");
        }
        let far = |page: &[u64]| page[0].abs_diff(page[1]) > 64;
        let pages: Vec<u64> = (0..1000).map(|n| LOAD.page(0, n)).collect();
        assert!(pages.windows(2).filter(|pair| far(pair)).count() > 990, "they look random");
    }

    #[test]
    fn every_page_is_inserted_and_as_many_leave() {
        for order in [Order::Random, Order::Sequential] {
            let load = Load { order, ..LOAD };
            let ours = Ours::new(load.memory).expect("there is memory");
            let cache = ours.cache.clone();
            let mut alternative = alternative(OURS, ours, load).expect("it gets full");
            assert!(alternative.run_once(1).expect("it runs").iter().all(|&value| value > 0.0));
            let (stats, asked) = (cache.stats(), (load.full() + load.pages) * load.threads);
            assert!(stats.inserted_pages >= asked, "{} of {asked}", stats.inserted_pages);
            assert_eq!(stats.inserted_pages - stats.evicted_pages, kept(&cache), "{order:?}");
        }
    }

    fn kept(cache: &Cache) -> u64 {
        let stats = cache.stats();
        (stats.data_bytes - stats.free_bytes) / PAGE as u64
    }
}
