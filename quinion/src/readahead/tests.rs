//! Tests of both policies, through a naive cache around them.
//!
//! The vectors V1 to V12 were measured on Linux 6.18 with windows of 32 pages; the statements Q01 to Q12 hold for the
//! default policy, and where it does better than the kernel the test says so.

use proptest::prelude::*;

use super::simulator::Simulator;
use super::*;

const FILE: u64 = 100_000;

fn kernel(order_max: u8) -> Simulator {
    Simulator::new(Config::kernel_like(32, 320, Order(order_max)), FILE)
}

fn ours(pages_max: u32, file_pages: u64) -> Simulator {
    Simulator::new(Config::new(pages_max).orders(Order::ZERO, Order::ZERO), file_pages)
}

fn read_each(simulator: &mut Simulator, pages: impl IntoIterator<Item = u64>) -> String {
    pages.into_iter().for_each(|page| simulator.read(page, 1));
    simulator.log()
}

fn read_steps(simulator: &mut Simulator, first: u64, pages: u64, reads: u64) -> String {
    (0..reads).for_each(|i| simulator.read(first + i * pages, pages));
    simulator.log()
}

/// Q01, V01: with folios of one page, the windows of a sequential scan by single pages are those of the kernel.
#[test]
fn q01_v01_small_folios_one_page_at_a_time() {
    let log = read_each(&mut kernel(0), 0..93);
    assert_eq!(log, "0+4(3) 4+8(8) 12+16(16) 28+32(32) 60+32(32) 92+32(32) 124+32(32)");
}

/// Q01, V02: with folios of one page, the windows of a sequential scan by four pages are those of the kernel, eight
/// first.
#[test]
fn q01_v02_small_folios_four_pages_at_a_time() {
    let log = read_steps(&mut kernel(0), 0, 4, 15);
    assert_eq!(log, "0+8(4) 8+16(16) 24+32(32) 56+32(32) 88+32(32)");
}

/// Q01, V03: with large folios, the windows of a sequential scan end at aligned pages and grow more slowly, as the
/// kernel's do; so do the folios in them.
#[test]
fn q01_v03_large_folios_trim_the_ramp() {
    let mut simulator = kernel(9);
    let log = read_each(&mut simulator, 0..65);
    let expected = "0+4(3) 4+8(8) 12+4(4) 16+8(8) 24+8(8) 32+16(16) 48+16(16) 64+32(32) 96+32(32)";
    assert_eq!(log, expected);
    assert_eq!(simulator.folios_log(), "4xo0 3xo2 2xo3 2xo4 2xo5");
}

/// Q01, V04: a scan that begins in the middle of a file reads one page alone, and its windows then grow as the
/// kernel's.
#[test]
fn q01_v04_large_folios_from_the_middle() {
    let mut simulator = kernel(9);
    let log = read_each(&mut simulator, 1000..1089);
    let expected = "1000+1 1001+4(3) 1005+7(7) 1012+12(12) 1024+24(24) 1048+8(8) 1056+16(16) 1072+16(16) \
                    1088+32(32) 1120+32(32)";
    assert_eq!(log, expected);
    let folios = simulator.folios_log();
    assert!(folios.starts_with("6xo0 1xo1 2xo2 1xo3 1xo4 2xo3"), "{folios}");
}

/// Q01, V05: a scan by sixteen pages begins with the largest window, and its folios grow from window to window.
#[test]
fn q01_v05_sixteen_pages_at_a_time() {
    let mut simulator = kernel(9);
    assert_eq!(read_steps(&mut simulator, 0, 16, 5), "0+32(16) 32+32(32) 64+32(32) 96+32(32)");
    assert_eq!(simulator.folios_log(), "32xo0 8xo2 2xo4 1xo5");
}

/// Q01, V06: a read larger than the largest window is fetched whole, and meets its own marker, which fetches as much
/// again.
#[test]
fn q01_v06_a_read_larger_than_the_window() {
    let mut simulator = kernel(9);
    simulator.read(0, 256);
    assert_eq!(simulator.log(), "0+256(128) 256+256(256)");
    assert_eq!(simulator.folios_log(), "256xo0 64xo2");
}

/// Q01, V07: random reads of one page and of eight fetch exactly those pages.
#[test]
fn q01_v07_random_reads() {
    let mut simulator = kernel(9);
    assert_eq!(read_each(&mut simulator, [7000, 300, 52_000, 9_001]), "7000+1 300+1 52000+1 9001+1");
    simulator.read(80_000, 8);
    simulator.read(40_004, 8);
    assert_eq!(simulator.log(), "80000+8 40004+8");
}

/// Q01, V08: a scan backwards by single pages fetches one page at a time.
#[test]
fn q01_v08_backward() {
    assert_eq!(read_each(&mut kernel(9), (96..=100).rev()), "100+1 99+1 98+1 97+1 96+1");
}

/// Q01, V09: reads of every second page pass for sequential, and each miss fetches a window of four pages.
#[test]
fn q01_v09_every_second_page_looks_like_a_stream() {
    let log = read_each(&mut kernel(0), (5000..5012).step_by(2));
    assert_eq!(log, "5000+1 5002+4(3) 5006+4(3) 5010+4(3)");
}

/// Q01, V10: two streams that take turns on one handle fetch two single pages each, and then windows each.
#[test]
fn q01_v10_two_streams_that_take_turns() {
    let log = read_each(&mut kernel(9), (0..6).flat_map(|i| [2000 + i, 8000 + i]));
    let expected = "2000+1 8000+1 2001+1 8001+1 2002+3(1) 8002+3(1) 2005+3(3) 8005+3(3) 2008+8(8) 8008+8(8)";
    assert_eq!(log, expected);
}

/// Q01, V11: under the hint for random access, reads of any length fetch exactly what they ask for.
#[test]
fn q01_v11_the_hint_random() {
    let mut simulator = kernel(9);
    simulator.state.set_hint(Hint::Random);
    for (first, pages) in [(100, 1), (104, 4), (2000, 64)] {
        simulator.read(first, pages);
    }
    assert_eq!(simulator.log(), "100+1 104+4 2000+64");
}

/// Q01, V12: page faults fetch 32 pages around the page, one page under the hint for random access, and 32 from the
/// page on under that for sequential access.
#[test]
fn q01_v12_page_faults() {
    let log = |hint: Hint, pages: &[u64]| {
        let mut simulator = kernel(9);
        pages.iter().for_each(|&page| simulator.fault(page, hint));
        simulator.log()
    };
    let scan: Vec<u64> = (100..=160).collect();
    assert_eq!(log(Hint::Normal, &scan), "84+32(8) 116+32(32) 148+28(28) 176+16(16)");
    assert_eq!(log(Hint::Normal, &[5000, 9000]), "4984+32(8) 8984+32(8)");
    assert_eq!(log(Hint::Random, &[5000, 9000]), "5000+1 9000+1");
    assert_eq!(log(Hint::Sequential, &[100]), "100+32");
}

#[test]
fn page_faults_that_keep_missing_get_no_windows_any_more() {
    let mut simulator = kernel(9);
    (0..150).for_each(|i| simulator.fault(50 + i * 100, Hint::Normal));
    let alone = simulator.log.iter().filter(|window| window.pages == 1).count();
    assert_eq!(alone, 50);
}

/// Q02: no window reaches past the page of the file's last byte, which a scan to the end does fetch.
#[test]
fn q02_windows_end_with_the_file() {
    for (config, name) in [(Config::new(64), "ours"), (Config::kernel_like(32, 320, Order(9)), "kernel")] {
        for file_pages in [1, 2, 3, 5, 8, 61, 100] {
            let mut simulator = Simulator::new(config, file_pages);
            read_each(&mut simulator, 0..file_pages + 3);
            let last = simulator.fetched.keys().next_back().copied();
            assert_eq!(last, Some(file_pages - 1), "{name}, {file_pages} pages");
        }
    }
}

/// Q02: no window starts at the end of the file, neither for a miss nor for a marker.
#[test]
fn q02_no_window_starts_at_the_end() {
    let mut simulator = ours(64, 16);
    assert_eq!(read_each(&mut simulator, 0..16), "0+4(3) 4+8(8) 12+4");
    let asked = ReadRequest { index: PageIndex(16), pages: 1, file_pages: 16 };
    assert!(simulator.state.on_miss(asked, &simulator.pages).is_empty());
    assert!(simulator.state.on_marker(asked, &simulator.pages).is_empty());
}

/// Q04: a failed read cuts the largest window to a quarter. The default's never falls below four pages, and reads that
/// succeed let it grow again, which the kernel's does not.
#[test]
fn q04_windows_shrink_to_a_quarter_after_a_failed_read_and_grow_again() {
    for (config, later) in [(Config::new(1024), 1024), (Config::kernel_like(1024, 1024, Order::ZERO), 16)] {
        let mut simulator = Simulator::new(config, 1 << 20);
        for pages_max in [256, 64, 16] {
            simulator.state.on_failure();
            assert_eq!(simulator.state.report().pages_max, pages_max);
        }
        read_each(&mut simulator, 0..100);
        let largest = simulator.log.iter().map(|window| window.pages).max();
        assert_eq!(largest, Some(16), "what was said of windows is done: {config:?}");
        read_each(&mut simulator, 100..30_000);
        assert_eq!(simulator.state.report().pages_max, later, "{config:?}");
        assert_eq!(simulator.state.report().failures, 3);
    }
    let mut off = Readahead::new(Config::kernel_like(2, 2, Order::ZERO));
    off.on_failure();
    assert_eq!(off.report().pages_max, 0);
    let mut least = Readahead::new(Config::new(1024));
    (0..10).for_each(|_| least.on_failure());
    assert_eq!(least.report().pages_max, 4);
}

/// Q05, Q06: a sequential scan fetches each page once, has at most two misses, and none behind its second read.
#[test]
fn q05_q06_a_forward_scan_misses_at_its_start_only_and_fetches_each_page_once() {
    for pages in [1, 2, 4, 16, 32, 256, 1000, 1024, 3000] {
        let mut simulator = ours(1024, 20_000);
        read_steps(&mut simulator, 0, pages, 20_000 / pages + 1);
        assert!(simulator.misses.len() <= 2, "{pages} at a time: {:?}", simulator.misses);
        assert_eq!(simulator.late_miss(0, pages), None, "{pages} at a time");
        assert!(simulator.fetched.values().all(|&times| times == 1) && simulator.fetched.len() == 20_000);
        assert_eq!(simulator.state.report().pattern, AccessPattern::Sequential);
    }
}

/// Q06: the windows of a sequential scan grow to the largest, and each but the first is fetched ahead as a whole.
#[test]
fn q06_the_ramp() {
    let mut simulator = ours(1024, 1 << 20);
    let log = read_each(&mut simulator, 0..2000);
    assert_eq!(
        log,
        "0+4(3) 4+16(16) 20+64(64) 84+128(128) 212+256(256) 468+512(512) 980+1024(1024) 2004+1024(1024)"
    );
}

/// Q07: random reads fetch the pages they ask for, and no others.
#[test]
fn q07_random_reads_fetch_only_the_asked_pages() {
    let mut simulator = ours(1024, 1 << 30);
    let mut page = 12_345_u64;
    for i in 0..2000 {
        page = page.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (first, pages) = ((page >> 34) & !7, 1 + i % 8);
        simulator.read(first, pages);
        assert_eq!(simulator.log(), format!("{first}+{pages}"));
    }
    assert_eq!(simulator.state.report().pattern, AccessPattern::Random);
    assert_eq!(simulator.state.report().prefetched_pages, 0);
}

/// Q07: a random read longer than the largest window is fetched in pieces, and ends where it was asked to.
#[test]
fn q07_a_long_random_read_is_read_in_pieces_and_no_further() {
    for hint in [Hint::Normal, Hint::Random] {
        let mut simulator = ours(1024, 1 << 20);
        simulator.state.set_hint(hint);
        simulator.read(50_000, 3000);
        assert_eq!(simulator.log(), "50000+1024(768) 51024+1024(1024) 52048+952", "{hint:?}");
        assert_eq!(simulator.misses, [50_000], "the pieces are fetched ahead of the copy");
    }
}

/// Q08: a stream whose marked folio was evicted before use misses there, and is a stream again after three misses at
/// most.
#[test]
fn q08_a_marker_that_was_evicted_costs_a_miss_and_the_stream_goes_on() {
    for config in [Config::new(256), Config::kernel_like(32, 320, Order::ZERO)] {
        let mut simulator = Simulator::new(config, 1 << 20);
        read_each(&mut simulator, 0..40);
        let marked = simulator.newest_marker();
        simulator.evict(marked);
        let misses = simulator.misses.len();
        read_each(&mut simulator, 40..5000);
        let missed = &simulator.misses[misses..];
        assert!(missed.len() <= 3, "{config:?}: {missed:?}");
        assert_eq!(missed[0], marked);
    }
}

/// Q08: a window evicted before use is fetched again, and halves the largest window.
#[test]
fn q08_a_window_evicted_before_it_is_read_makes_windows_smaller() {
    let mut simulator = ours(1024, 1 << 20);
    read_each(&mut simulator, 0..5000);
    let ahead: Vec<u64> = simulator.pages.all().filter(|page| *page >= 5000).collect();
    assert!(ahead.len() > 1000);
    ahead.into_iter().for_each(|page| simulator.evict(page));
    let log = read_each(&mut simulator, 5000..5003);
    assert_eq!(log, "5000+512(511) 5512+512(512)");
    assert_eq!((simulator.state.report().pages_max, simulator.state.report().lost_windows), (512, 1));
}

/// Q09: two streams on one handle each get a window by their third read, and then grow to the largest window.
#[test]
fn q09_two_streams_on_one_handle_both_reach_full_windows() {
    let mut simulator = ours(256, 1 << 20);
    let log = read_each(&mut simulator, [2000, 8000, 2001, 8001, 2002, 8002]);
    assert_eq!(log, "2000+1 8000+1 2001+4(3) 8001+4(3) 2005+16(16) 8005+16(16)");
    read_each(&mut simulator, (3..3000).flat_map(|i| [2000 + i, 8000 + i]));
    assert_eq!(simulator.misses, [2000, 8000, 2001, 8001], "no page is skipped, ever");
    let full =
        |from: u64| simulator.log.iter().any(|w| w.pages == 256 && (from..from + 3000).contains(&w.start.0));
    assert!(full(2000) && full(8000));
}

/// Q09: eight streams on one handle, with random reads between them, have sixteen misses at most.
#[test]
fn q09_eight_streams_with_random_reads_between_them() {
    let mut simulator = ours(256, 1 << 30);
    let starts: Vec<u64> = (0..8).map(|i| i * 3000 + 17 * i * i).collect();
    for i in 0..2000 {
        starts.iter().for_each(|start| simulator.read(start + i, 1));
        simulator.read((1 << 20) + i * i * 31 % 1_000_003 * 7, 1);
    }
    let stream_misses = simulator.misses.iter().filter(|page| **page < 1 << 20).count();
    assert!(stream_misses <= 8 * 2, "{stream_misses}");
}

/// Q10: with a largest window of no pages, nothing is fetched ahead: the kernel's way reads page by page, the default
/// as many pages as a read asks for.
#[test]
fn q10_only_the_pages_asked_for_are_read_without_windows() {
    let mut kernel = Simulator::new(Config::kernel_like(0, 320, Order::ZERO), FILE);
    kernel.read(100, 3);
    assert_eq!(kernel.log(), "100+1 101+1 102+1");
    let mut simulator = ours(0, FILE);
    simulator.read(0, 3);
    simulator.read(3, 4);
    simulator.read(7, 600);
    assert_eq!(simulator.log(), "0+3 3+4 7+256(192) 263+256(256) 519+88");
    assert_eq!(simulator.state.report().prefetched_pages, 0);
}

/// Q11, Q12: a page of a window that is cached already is not read again, and does not get the marker.
#[test]
fn q11_q12_cached_pages_are_not_read_again_and_get_no_marker() {
    let mut simulator = ours(64, FILE);
    [1, 2, 10, 11, 40].into_iter().for_each(|page| simulator.put(page));
    let log = read_each(&mut simulator, 0..64);
    assert_eq!(log, "0+4(1) 4+8(8) 12+16(16) 28+32(32) 60+64(64) 124+64(64)");
    assert!(simulator.fetched.iter().all(|(page, &times)| times == 1 && ![1, 2, 10, 11, 40].contains(page)));
    assert_eq!(simulator.misses, [0]);
}

#[test]
fn a_window_that_could_not_be_filled_is_planned_again() {
    let mut simulator = ours(256, FILE);
    read_each(&mut simulator, 0..1000);
    let edge = simulator.log.last().unwrap().end();
    let asked = ReadRequest { index: edge, pages: 1, file_pages: FILE };
    for _ in 0..3 {
        let windows = simulator.state.on_miss(asked, &NothingCached);
        assert_eq!((windows[0].start, windows[0].pages), (edge, 256));
        simulator.state.on_refused(edge);
    }
    assert_eq!(simulator.state.report().lost_windows, 0);
}

#[test]
fn a_small_file_that_is_read_again_is_no_trouble() {
    let mut simulator = ours(256, 20);
    for _ in 0..5 {
        read_each(&mut simulator, 0..20);
        (0..20).for_each(|page| simulator.evict(page));
    }
    let report = simulator.state.report();
    assert_eq!((report.pattern, report.lost_windows, report.pages_max), (AccessPattern::Looping, 0, 256));
    assert_eq!(simulator.misses, [0; 5]);
}

#[test]
fn every_second_page_is_fetched_and_no_other() {
    let mut simulator = ours(1024, FILE);
    let log = read_each(&mut simulator, (5000..5060).step_by(2));
    assert!(
        log.starts_with(
            "5000+1 5002+1 5004+1 5006+1 5008+1(1) 5010+1 5012+1(1) 5014+1 5016+1 5018+1 5020+1(1)"
        ),
        "{log}"
    );
    assert!(simulator.fetched.keys().all(|page| page % 2 == 0));
    assert_eq!(simulator.misses, [5000, 5002, 5004, 5006]);
    assert_eq!(simulator.state.report().pattern, AccessPattern::Strided);
}

#[test]
fn steps_backward_and_steps_of_several_pages() {
    for (first, distance, pages) in [(50_000, -300, 1), (100, 64, 16), (90_000, -5, 2), (7, 1000, 3)] {
        let mut simulator = ours(1024, FILE);
        for i in 0..80 {
            simulator.read((first + distance * i) as u64, pages);
        }
        assert_eq!(simulator.misses.len(), 4, "{distance}: {:?}", simulator.misses);
        let wanted = |page: &u64| (*page as i64 - first).rem_euclid(distance) < pages as i64;
        assert!(simulator.fetched.keys().all(wanted), "{distance}: {:?}", simulator.fetched);
    }
}

#[test]
fn backward_streams_have_windows() {
    for pages in [1, 2, 4, 16] {
        let mut simulator = ours(256, FILE);
        for i in 1..=(5000 / pages) {
            simulator.read(20_000 - i * pages, pages);
        }
        assert_eq!(simulator.misses.len(), 2, "{pages} at a time: {:?}", simulator.misses);
        assert!(simulator.log.iter().any(|window| window.pages == 256));
        assert!(simulator.fetched.values().all(|&times| times == 1));
        assert_eq!(simulator.state.report().pattern, AccessPattern::Backward);
    }
    let log = read_each(&mut ours(64, FILE), (80..=100).rev());
    assert_eq!(log, "100+1 99+1 96+3(1) 88+8(1) 72+16(1) 40+32(1)");
    let log = read_each(&mut ours(64, FILE), (0..=10).rev());
    assert_eq!(log, "10+1 9+1 6+3(1) 0+6", "no marker where nothing is left");
}

#[test]
fn a_loop_is_recognised() {
    let mut simulator = ours(64, 3000);
    for lap in 0..3 {
        read_each(&mut simulator, 0..3000);
        let expected = if lap == 0 { AccessPattern::Sequential } else { AccessPattern::Looping };
        assert_eq!(simulator.state.report().pattern, expected, "lap {lap}");
        assert_eq!(simulator.misses.len(), lap + 1, "{:?}", simulator.misses);
        (0..3000).for_each(|page| simulator.evict(page));
    }
}

#[test]
fn a_loop_may_begin_and_end_anywhere() {
    let mut simulator = ours(64, 9000);
    for lap in 0..3 {
        read_each(&mut simulator, 1000..3000);
        assert_eq!(simulator.misses.len(), lap + 2, "{:?}", simulator.misses);
        (0..9000).for_each(|page| simulator.evict(page));
    }
    assert_eq!(simulator.state.report().pattern, AccessPattern::Looping);
}

#[test]
fn the_hint_sequential_starts_at_once_with_windows_twice_as_large() {
    let mut simulator = ours(256, FILE);
    simulator.state.set_hint(Hint::Sequential);
    simulator.read(5000, 1);
    assert_eq!(simulator.log(), "5000+4(3)");
    read_each(&mut simulator, 5001..9000);
    assert!(simulator.log.iter().any(|window| window.pages == 512));
    simulator.state.set_hint(Hint::Normal);
    assert_eq!(simulator.state.report().pages_max, 256);
}

#[test]
fn another_handles_marker_starts_the_window_of_its_stream() {
    let mut simulator = ours(64, FILE);
    read_each(&mut simulator, 0..30);
    simulator.state = Readahead::new(Config::new(64));
    read_each(&mut simulator, 0..3000);
    assert_eq!(simulator.misses, [0]);
}

#[test]
fn folios_grow_with_the_windows() {
    let mut simulator = Simulator::new(Config::new(1024).orders(Order::ZERO, Order(9)), FILE);
    read_each(&mut simulator, 0..9000);
    assert_eq!(simulator.misses, [0]);
    assert_eq!(simulator.folios.last().map(|folio| folio.1), Some(9));
    let small = simulator.folios.iter().filter(|folio| folio.1 == 0).count();
    assert_eq!(small, 4, "the first window");
}

#[derive(Clone, Debug)]
enum Step {
    Read(u64, u64),
    Evict(u64),
    Fail,
    Hint(Hint),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let hint = prop_oneof![Just(Hint::Normal), Just(Hint::Sequential), Just(Hint::Random)];
    let step = prop_oneof![
        12 => (0u64..400, 1u64..60).prop_map(|(first, pages)| Step::Read(first, pages)),
        3 => (0u64..400).prop_map(Step::Evict),
        1 => Just(Step::Fail),
        1 => hint.prop_map(Step::Hint),
    ];
    prop::collection::vec(step, 1..80)
}

fn configs() -> impl Strategy<Value = Config> {
    (0u32..600, 0u8..10, any::<bool>()).prop_map(|(pages_max, order, kernel)| match kernel {
        true => Config::kernel_like(pages_max, 64, Order(order)),
        false => Config::new(pages_max).orders(Order::ZERO, Order(order)),
    })
}

proptest! {
    /// Q02: in any sequence of reads, evictions, failures and hints, each window lies in the file, covers its marker
    /// and is bounded (the simulator asserts the first two); every read is served.
    #[test]
    fn q02_windows_hold_their_invariants(config in configs(), file_pages in 1u64..400, steps in steps()) {
        let mut simulator = Simulator::new(config, file_pages);
        for step in steps {
            match step {
                Step::Read(first, pages) => simulator.read(first % file_pages, pages),
                Step::Evict(page) => simulator.evict(page % file_pages),
                Step::Fail => simulator.state.on_failure(),
                Step::Hint(hint) => simulator.state.set_hint(hint),
            }
            let largest = config.pages_max.max(256) * 2;
            prop_assert!(simulator.windows.iter().all(|window| window.pages <= largest));
        }
    }

    /// Q05: a sequential scan of any step, start and largest window fetches each page once, with two misses at most,
    /// and none behind its second read.
    #[test]
    fn q05_a_pure_scan_fetches_each_page_once(
        pages in 1u64..300, first in 0u64..3000, file_pages in 3001u64..6000, pages_max in 8u32..2000,
        order in 0u8..10,
    ) {
        let mut simulator = Simulator::new(Config::new(pages_max).orders(Order::ZERO, Order(order)), file_pages);
        read_steps(&mut simulator, first, pages, (file_pages - first).div_ceil(pages));
        prop_assert!(simulator.fetched.values().all(|&times| times == 1));
        prop_assert_eq!(simulator.fetched.len() as u64, file_pages - first);
        prop_assert!(simulator.misses.len() <= 2, "{:?}", simulator.misses);
        prop_assert_eq!(simulator.late_miss(first, pages), None);
    }

    #[test]
    fn a_pure_backward_scan_fetches_each_page_once(
        pages in 1u64..100, first in 3000u64..6000, pages_max in 100u32..2000, order in 0u8..10,
    ) {
        let mut simulator = Simulator::new(Config::new(pages_max).orders(Order::ZERO, Order(order)), 6000);
        for i in 1..=first / pages {
            simulator.read(first - i * pages, pages);
        }
        prop_assert!(simulator.fetched.values().all(|&times| times == 1));
        prop_assert!(simulator.misses.len() <= 2, "{:?}", simulator.misses);
    }

    #[test]
    fn pure_steps_fetch_each_piece_once_and_nothing_else(
        pages in 1u64..10, gap in 1u64..200, first in 5u64..200, pages_max in 64u32..2000,
    ) {
        let mut simulator = ours(pages_max, 20_000);
        let mut wanted = std::collections::BTreeSet::new();
        let mut at = first;
        while at < 20_000 {
            wanted.extend(at..(at + pages).min(20_000));
            simulator.read(at, pages);
            at += pages + gap;
        }
        prop_assert!(simulator.fetched.iter().all(|(page, &times)| times == 1 && wanted.contains(page)));
        prop_assert!(simulator.misses.len() <= 4, "{:?}", simulator.misses);
    }
}

/// Reads page after page from `from` on, and says after each decision which pages each of its windows has passed.
fn passed_by(readahead: &mut Readahead, from: u64, pages: u64) -> Vec<(u64, Option<StreamProgress>)> {
    let (mut log, mut cached_to, mut marker) = (Vec::new(), from, None);
    for page in from..from + pages {
        let asked = ReadRequest { index: PageIndex(page), pages: 1, file_pages: FILE };
        let windows = if page >= cached_to {
            readahead.on_miss(asked, &NothingCached)
        } else if marker == Some(PageIndex(page)) {
            readahead.on_marker(asked, &NothingCached)
        } else {
            continue;
        };
        for window in windows.iter() {
            log.push((page, window.stream));
            cached_to = cached_to.max(window.end().0);
            marker = window.marker;
        }
    }
    log
}

#[test]
fn a_long_stream_reports_passed_pages_and_a_short_one_none() {
    let config = Config::new(64).orders(Order::ZERO, Order::ZERO);
    let log = passed_by(&mut Readahead::new(config), 0, 2000);
    let (short, long): (Vec<_>, Vec<_>) = log.into_iter().partition(|(_, stream)| stream.is_none());
    assert!(short.iter().all(|&(page, _)| page < 256), "{short:?}");
    assert!(long.len() > 20 && long.iter().all(|&(page, _)| page >= 256 - 2 * 64), "{long:?}");
    for (page, stream) in long {
        assert_eq!(stream, Some(StreamProgress { from: PageIndex(0), to: PageIndex(page) }));
    }
}

#[test]
fn a_handle_that_reads_once_is_a_stream_at_once_and_random_reads_are_none() {
    let config = Config::new(64).orders(Order::ZERO, Order::ZERO);
    for hint in [Hint::Sequential, Hint::NoReuse] {
        let mut readahead = Readahead::new(config);
        readahead.set_hint(hint);
        let log = passed_by(&mut readahead, 0, 20);
        assert!(!log.is_empty() && log.iter().all(|(_, stream)| stream.is_some()), "{hint:?} {log:?}");
    }
    let mut readahead = Readahead::new(config);
    for at in 0..500 {
        let index = PageIndex(at * 7919 % FILE);
        let windows = readahead.on_miss(ReadRequest { index, pages: 1, file_pages: FILE }, &NothingCached);
        assert!(windows.iter().all(|window| window.stream.is_none()), "{windows:?}");
    }
}

#[test]
fn the_second_lap_is_a_stream_from_its_first_window_on() {
    let mut readahead = Readahead::new(Config::new(64).orders(Order::ZERO, Order::ZERO));
    passed_by(&mut readahead, 0, 100);
    let log = passed_by(&mut readahead, 0, 100);
    assert!(!log.is_empty() && log.iter().all(|(_, stream)| stream.is_some()), "{log:?}");
}
