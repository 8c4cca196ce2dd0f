//! Large folios: made where windows allow, read page by page as they land; a failed page costs no other page that was
//! asked for.
//!
//! ```text
//!   a window from page 5 on     [5 .. 511][512 ...... 1023][1024 ..     requests
//!                                1 2 8 16 ... 256   order 9              folios: page and frame agree modulo 512
//! ```
//!
//! The device here is a double whose parts land and fail as a test says. Where it runs by itself it cuts each request
//! into parts, lands them last part first, and fails the parts with a bad page, writing rubbish there.

use quinion_testing::content;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::thread;

use quinion::internals::filemap::{PinRequest, Reader, WaitPolicy};
use quinion::internals::readahead::{Config, Readahead};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{Order, Orders, PageIndex};
use quinion::{Cache, ErrorKind, ReadOptions};
use quinion_testing::content::{Dice, page_content};
use quinion_testing::device::Device;
use quinion_testing::doubles::{FailureCount, Faults, SimulatedBackend};
use quinion_testing::fixtures::parts::{Parts, PartsFixture, PartsFixtureOptions, land};

const PAGE: u64 = 4096;

// ---- which folios are made ------------------------------------------------------------------------------------

fn pin_of(position: u64, len: usize) -> PinRequest {
    PinRequest { position, len, wait_policy: WaitPolicy::Wait, process: ForkGuard::new(), was_missing: false }
}

/// A fixture whose handle asks for folios of one order.
fn folios_of(order: Order, device: Arc<Parts>) -> PartsFixture {
    PartsFixture::new(
        device,
        PartsFixtureOptions { handle: Orders { min: order, max: order }, ..PartsFixtureOptions::default() },
    )
}

#[test]
fn each_order_is_made_for_a_handle_that_asks_for_it() {
    for order in (0..=9).map(Order) {
        let fixture = folios_of(order, Parts::new(2000, 64));
        fixture.read(700, 1);
        let first = PageIndex(700).align_down(order).0;
        assert_eq!(fixture.device.requests(), [(first, order.pages())], "one request, and no page more");
        assert_eq!(fixture.order(700), Some(order.0));
        assert_eq!(fixture.mapping.lock().pages(), u64::from(order.pages()));
        fixture.read(first, u64::from(order.pages()));
        assert_eq!(fixture.device.requests(), []);
        fixture.finish();
    }
}

#[test]
fn a_handles_smallest_folio_goes_around_folios_that_others_cached() {
    let fixture = folios_of(Order(4), Parts::new(2000, 64));
    let plain = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(0)));
    let mut page = [0; PAGE as usize];
    let call = Reader::plain(&plain).call(&fixture.mapping, WaitPolicy::Wait);
    fixture.filemap.read(&call, 37 * PAGE, &mut page).unwrap();
    assert_eq!(fixture.order(37), Some(0));
    fixture.read(33, 1);
    assert_eq!(fixture.device.requests(), [(37, 1), (32, 5), (38, 10)]);
    assert_eq!(fixture.order(37), Some(0));
    fixture.finish();
}

#[test]
fn a_long_read_from_an_unaligned_page_makes_the_largest_folios_in_few_requests() {
    let fixture = PartsFixture::large(Parts::new(8192, 64), 1024);
    fixture.read(5, 1024);
    assert_eq!(fixture.device.requests()[..3], [(5, 507), (512, 512), (1024, 5)], "cut where folios begin");
    let counts = fixture.pages_by_order(1024);
    assert_eq!(counts[&9], 512, "{counts:?}");
    let head: Vec<_> = [5, 6, 8, 16, 32, 64, 128, 256].map(|page| fixture.order(page).unwrap()).into();
    assert_eq!(head, [0, 1, 3, 4, 5, 6, 7, 8], "the head rises to the boundary");
    fixture.finish();
}

#[test]
fn an_unaligned_stream_makes_mostly_large_folios() {
    const PAGES: u64 = 8192;
    for start in [0, 1, 5, 300] {
        let fixture = PartsFixture::large(Parts::new(PAGES, 64), 1024);
        for page in (start..PAGES).step_by(16) {
            fixture.try_read(page, 16).unwrap();
        }
        let counts = fixture.pages_by_order(PAGES);
        let from = |order| counts.range(order..).map(|(_, pages)| pages).sum::<u64>();
        assert_eq!(from(0), PAGES - start);
        assert!(from(4) * 100 >= (PAGES - start) * 97, "from {start} on: {counts:?}");
        assert!(from(9) * 100 >= (PAGES - start) * 75, "from {start} on: {counts:?}");
        let requests = fixture.device.requests();
        assert!(requests.len() < 64, "from {start} on: {requests:?}");
        assert_eq!(requests.iter().map(|&(_, pages)| u64::from(pages)).sum::<u64>(), PAGES - start);
        fixture.finish();
    }
}

#[test]
fn memory_in_pieces_makes_smaller_folios_and_all_of_them() {
    let fixture = PartsFixture::large(Parts::new(100_000, 64), 0);
    // Every fourth page of the arena is taken: nothing larger than a pair can be had.
    let mut taken = Vec::new();
    while let Some(frame) = fixture.arena.alloc(Order(2)) {
        fixture.arena.free(frame.plus(2), Order(1));
        taken.push(frame);
    }
    fixture.read(600, 64);
    assert_eq!(fixture.pages_by_order(700), BTreeMap::from([(1, 64)]));
    assert_eq!(fixture.device.requests().len(), 32);
    taken.into_iter().for_each(|frame| fixture.arena.free(frame, Order(1)));
    fixture.finish();
}

/// A window of 512 pages over the end of the file, of which 3 are the file's, where there is memory for 4.
#[test]
fn nothing_is_evicted_for_pages_behind_the_end_of_the_file() {
    let fixture = folios_of(Order(9), Parts::new(1024 + 3, 64));
    fixture.read(0, 1);
    let mut taken: Vec<_> = std::iter::from_fn(|| fixture.arena.alloc(Order(2))).collect();
    fixture.arena.free(taken.pop().unwrap(), Order(2));
    fixture.read(1024, 1);
    assert_eq!(fixture.device.requests(), [(0, 512), (1024, 3)]);
    assert_eq!(fixture.mapping.lock().pages(), 512 + 3, "nothing was evicted");
    taken.into_iter().for_each(|frame| fixture.arena.free(frame, Order(2)));
    fixture.finish();
}

#[test]
fn a_cache_chooses_its_largest_folio_by_its_memory() {
    for (memory, order) in [(16 << 20, 4), (64 << 20, 6)] {
        let device = Device::new(8 << 20);
        let cache = Cache::builder().memory(memory).build().unwrap();
        let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
        // Least as large as can be: the request shows what that is.
        file.set_folio_orders(9, 9).unwrap();
        file.read_exact_at(&mut [0], 700 * PAGE).unwrap();
        let first = PageIndex(700).align_down(Order(order)).0;
        assert_eq!(device.reads()[0], (first, 1 << order), "{memory} bytes");
        assert_eq!(file.set_folio_orders(3, 2).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}

// ---- pages that land one by one ------------------------------------------------------------------------------

#[test]
fn readers_get_their_pages_of_a_2_mib_folio_as_these_land() {
    let fixture = folios_of(Order(9), Parts::new(512, 64));
    fixture.device.keep();
    thread::scope(|scope| {
        let first = scope.spawn(|| fixture.try_read(0, 1).unwrap());
        let mut fill = fixture.device.kept();
        let last = scope.spawn(|| fixture.try_read(511, 1).unwrap());
        let pair = scope.spawn(|| fixture.try_read(300, 4).unwrap());
        land(&mut fill, 0..64);
        assert_eq!(first.join().unwrap() as u64, PAGE);
        assert!(!last.is_finished() && !pair.is_finished());
        assert_eq!(fixture.try_read(3, 61).unwrap() as u64, 61 * PAGE, "all that has been read is there");
        land(&mut fill, 448..512);
        assert_eq!(last.join().unwrap() as u64, PAGE);
        land(&mut fill, 300..302);
        land(&mut fill, 302..304);
        assert_eq!(pair.join().unwrap() as u64, 4 * PAGE);
        let pin = fixture
            .filemap
            .pin(&fixture.mapping, Reader::plain(&fixture.readahead), pin_of(0, 64 * 4096))
            .unwrap();
        assert_eq!(pin.len(), 64 * 4096);
        land(&mut fill, 64..300);
        land(&mut fill, 304..448);
        fill.complete(Ok(512 * 4096));
        content::verify(pin.chunks().next().unwrap(), 1, 0).unwrap();
    });
    assert_eq!((fixture.device.requests(), fixture.order(0)), (vec![(0, 512)], Some(9)));
    fixture.read(0, 512);
    fixture.finish();
}

#[test]
fn a_reader_that_must_not_wait_gets_the_pages_already_read() {
    let fixture = folios_of(Order(9), Parts::new(512, 64));
    fixture.device.keep();
    let now = |page: u64| {
        let mut byte = [0];
        let call = Reader::plain(&fixture.readahead).call(&fixture.mapping, WaitPolicy::Start);
        let read = fixture.filemap.read(&call, page * PAGE, &mut byte);
        read.map_err(|error| error.kind())
    };
    assert_eq!(now(0), Err(ErrorKind::WouldBlock));
    let mut fill = fixture.device.kept();
    land(&mut fill, 5..7);
    assert_eq!((now(5), now(6)), (Ok(1), Ok(1)));
    assert_eq!((now(4), now(7)), (Err(ErrorKind::WouldBlock), Err(ErrorKind::WouldBlock)));
    fill.complete(Ok(0)); // the file was cut: nothing of it is there any more
    assert_eq!((now(5), fixture.mapping.lock().pages()), (Ok(0), 0));
    fixture.finish();
}

#[test]
fn a_failed_page_fails_its_own_reader_only() {
    let fixture = folios_of(Order(9), Parts::new(512, 64));
    fixture.device.keep();
    thread::scope(|scope| {
        let good = scope.spawn(|| fixture.try_read(70, 1));
        let mut fill = fixture.device.kept();
        land(&mut fill, 64..128);
        assert_eq!(good.join().unwrap().unwrap() as u64, PAGE);
        let held = fixture.mapping.try_hold(PageIndex(64)).unwrap();
        fixture.device.state.lock().unwrap().keeps = false;
        fixture.device.spoil(3);
        fill.complete(Err(io::Error::from_raw_os_error(5)));
        // A holder keeps the pages that have arrived; the index has removed the folio.
        let mut bytes = vec![0; 64 * 4096];
        assert_eq!(held.copy_out(64 * PAGE, &mut bytes), 64 * 4096);
        content::verify(&bytes, 1, 64 * PAGE).unwrap();
    });
    assert_eq!(fixture.mapping.lock().pages(), 0);
    // Its frames went with the hold.
    fixture.arena.check().unwrap();
    assert_eq!(fixture.try_read(3, 1).unwrap_err().kind(), ErrorKind::Io);
    for page in [2, 4, 70, 511] {
        fixture.read(page, 1);
    }
    fixture.device.mend();
    fixture.read(0, 512);
    fixture.finish();
}

#[test]
fn folios_already_read_of_a_failed_request_stay() {
    let fixture = PartsFixture::large(Parts::new(1024, 64), 0);
    fixture.device.spoil(300);
    // One request of pages 5 to 511: folios of 1, 2, 8, ..., 128 pages and one of 256, which has the bad page.
    assert!(fixture.try_read(5, 507).unwrap() > 0);
    assert_eq!((fixture.order(5), fixture.order(130), fixture.order(255)), (Some(0), Some(7), Some(7)));
    assert_eq!(fixture.order(300), None);
    assert_eq!(fixture.order(400), Some(7), "and of the next request, which tells the good pages apart");
    assert_eq!(fixture.try_read(300, 1).unwrap_err().kind(), ErrorKind::Io);
    fixture.read(301, 1);
    fixture.finish();
}

#[test]
fn pages_already_read_are_not_overwritten_when_the_file_was_truncated() {
    let fixture = folios_of(Order(9), Parts::new(512, 64));
    fixture.device.keep();
    thread::scope(|scope| {
        let reader = scope.spawn(|| fixture.try_read(200, 1).unwrap());
        let mut fill = fixture.device.kept();
        land(&mut fill, 200..210);
        assert_eq!(reader.join().unwrap() as u64, PAGE);
        let pin = fixture
            .filemap
            .pin(&fixture.mapping, Reader::plain(&fixture.readahead), pin_of(200 * PAGE, 8192))
            .unwrap();
        land(&mut fill, 0..100);
        fill.complete(Ok(100 * 4096));
        content::verify(pin.chunks().next().unwrap(), 1, 200 * PAGE).unwrap();
    });
    assert_eq!(fixture.mapping.size(), 100 * PAGE);
    assert_eq!(fixture.try_read(99, 2).unwrap() as u64, PAGE);
    fixture.finish();
}

#[test]
fn exactly_the_pages_of_bad_spots_of_a_device_fail() {
    const PAGES: u64 = 3000;
    let spots = [
        0..1,
        4097..4098,
        700 * PAGE..703 * PAGE,
        2048 * PAGE - 1..2048 * PAGE + 1,
        2999 * PAGE..2999 * PAGE + 5,
    ];
    let is_bad =
        |page: u64| spots.iter().any(|spot| spot.start < (page + 1) * PAGE && page * PAGE < spot.end);
    let content = |_: u64, page: u64, bytes: &mut [u8]| bytes.copy_from_slice(&page_content(1, page, 0));
    for (part, step) in [(1, 1), (16, 1), (64, 7), (64, 501)] {
        let device =
            SimulatedBackend::generated(1, PAGES * PAGE - 1000, content, Faults::default()).in_parts(part);
        spots.iter().for_each(|spot| device.fail_at(spot.clone(), FailureCount::Always));
        let cache = Cache::builder().memory(64 << 20).folio_order_max(9).build().unwrap();
        let file = cache.open_backend(Arc::new(device)).unwrap();
        let mut buffer = vec![0; 4096];
        for page in (0..PAGES).map(|number| number * step % PAGES) {
            match file.read_at(&mut buffer, page * PAGE) {
                Ok(bytes) => content::verify(&buffer[..bytes], 1, page * PAGE).unwrap(),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Io, "{error}"),
            }
            // A part of a page that was asked for by itself is that page.
            let failed =
                file.read_at_with(&mut buffer, page * PAGE, ReadOptions::new().cached_only(true)).is_err();
            assert_eq!(failed, is_bad(page), "page {page}, in parts of {part}");
        }
        cache.check().unwrap();
    }
}

// ---- all of it at once --------------------------------------------------------------------------------------

fn churn(seed: u64) {
    const PAGES: u64 = 12_000;
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(9).idle_files_max(0);
    let (cache, device) = (builder.build().unwrap(), Parts::new(PAGES, 16));
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let mut dice = Dice::new(seed);
    let bad: BTreeSet<u64> = (0..20).map(|_| dice.below(PAGES)).collect();
    bad.iter().for_each(|&page| device.spoil(page));
    thread::scope(|scope| {
        for reader in 0..3u64 {
            let (file, bad) = (file.clone(), &bad);
            scope.spawn(move || {
                file.set_folio_orders([0, 3, 9][reader as usize], 9).unwrap();
                let mut dice = Dice::new(seed ^ reader << 32);
                let mut buffer = vec![0; 600 * 4096];
                let mut at = 0;
                for _ in 0..150 {
                    at = if dice.below(4) == 0 { dice.below(PAGES * PAGE) } else { at };
                    let bits = dice.below(21);
                    let len = 1 + dice.below(1 << bits) as usize;
                    match file.read_at(&mut buffer[..len], at) {
                        Ok(bytes) => {
                            content::verify(&buffer[..bytes], 1, at).unwrap();
                            at = (at + bytes as u64) % (PAGES * PAGE);
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
                            assert!(bad.contains(&(at / PAGE)), "page {} is not bad: {error}", at / PAGE);
                            at = (at / PAGE + 1) * PAGE % (PAGES * PAGE);
                        }
                    }
                }
            });
        }
    });
    let stats = cache.stats();
    assert_eq!(stats.in_flight, 0);
    assert!(stats.evicted_pages > 0 && stats.device_errors > 0, "{stats:?}");
    cache.check().unwrap();
    drop(file);
    let stats = cache.stats();
    assert_eq!((stats.files, stats.free_bytes), (0, stats.data_bytes), "no frame is lost");
    cache.check().unwrap();
}

#[test]
fn a_churn_of_orders_fails_only_bad_pages_and_loses_no_frame() {
    let rounds = if std::env::var_os("QUINION_SOAK").is_some() { 300 } else { 4 };
    (0..rounds).for_each(churn);
}
