//! What is fetched, how often, and what becomes of it when the network or the store fails: against a server of the
//! tests' own that counts and misbehaves.
//!
//! Bytes tell their version and position, so every read here is checked byte by byte.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use object_store::path::Path;
use quinion::{Cache, Hint};
use quinion_object::{Error, FetchFailure, ObjectCache, ObjectFile, Options};

use quinion_testing_s3::{Fault, Server, check};

const MIB: u64 = 1 << 20;

/// Without pauses. A server that is slow because the machine is busy does not count as one that hangs.
fn quick() -> Options {
    Options::new()
        .backoff(Duration::from_millis(1), Duration::from_millis(8))
        .stall_max(Duration::from_secs(60))
        .deadline(Duration::from_secs(120))
        .failure_pause(Duration::from_millis(200))
}

fn objects(server: &Server, options: Options) -> ObjectCache {
    let cache = Cache::builder().memory(128 << 20).build().unwrap();
    ObjectCache::new(cache, server.store(), options).unwrap()
}

fn open(objects: &ObjectCache) -> ObjectFile {
    objects.open(&Path::from("object")).unwrap()
}

#[track_caller]
fn read(file: &ObjectFile, offset: u64, len: usize) {
    let mut buffer = vec![0; len];
    assert_eq!(file.read_at(&mut buffer, offset).unwrap(), len);
    check(1, offset, &buffer);
}

/// A gap costs less than a GET: it is fetched and thrown away, and stays absent.
#[test]
fn ranges_that_are_needed_together_are_joined_over_their_gaps() {
    let server = Server::with_object(16 << 20);
    let objects = objects(&server, quick().gap_max(256 << 10));
    let file = open(&objects);
    let page = |at: u64| at..at + 4096;
    // Four in a row, one far from them, two more.
    let ranges = [0, 100_000, 300_000, 500_000, 5 * MIB, 5 * MIB + 200_000].map(|at| page(at / 4096 * 4096));
    let ranges: Vec<_> = ranges.into_iter().chain(std::iter::once(9 * MIB..9 * MIB + 8192)).collect();
    file.file().will_need_ranges(&ranges).unwrap();
    for range in &ranges {
        read(&file, range.start, 4096);
    }
    assert_eq!(server.control.gets(), 3);
    assert!(objects.stats().gap_bytes > 300_000, "{:?}", objects.stats());
    assert_eq!(objects.cache().stats().cached_pages, 8, "gaps are not kept");
}

/// How long a store takes whose first answer comes when all threads of a test have asked, on a busy machine, too.
const SLOW: Duration = Duration::from_millis(300);

/// A thread that holds its part of the requests back for longer than 20 ms, as on a busy machine, may send one more;
/// but no byte is asked for twice.
#[test]
fn eight_threads_that_read_one_cold_range_cause_the_gets_of_one() {
    let gets_of = |threads: usize, offset: u64, len: usize| {
        let server = Server::with_object(16 << 20);
        server.control.set_latency(SLOW);
        let objects = objects(&server, quick());
        let start = Barrier::new(threads);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let file = open(&objects);
                    start.wait();
                    read(&file, offset, len);
                });
            }
        });
        (server.control.gets(), objects.stats().bytes)
    };
    for (offset, len, gets) in [(5 * MIB, 64 << 10, 1), (4 * MIB, 4 << 20, 1), (0, 16 << 20, 2)] {
        let (one, eight) = (gets_of(1, offset, len), gets_of(8, offset, len));
        assert_eq!((one.0, one.1), (gets, eight.1), "8 MiB are a GET");
        assert!(eight.0 <= gets + 1, "{} GETs", eight.0);
    }
}

#[test]
fn a_scan_takes_few_gets_and_a_second_one_none() {
    for (piece, most) in [(64 << 10, 24), (1 << 20, 24), (8 << 20, 8)] {
        let server = Server::with_object(48 << 20);
        server.control.set_latency(Duration::from_millis(2));
        let objects = objects(&server, quick());
        let file = open(&objects);
        (0..48 * MIB).step_by(piece).for_each(|at| read(&file, at, piece));
        let gets = server.control.gets();
        println!("48 MiB in pieces of {piece}: {gets} GETs {:?}", server.control.ranges());
        assert!(gets <= most, "{gets} GETs for pieces of {piece}");
        assert_eq!(objects.stats().bytes, 48 * MIB, "each byte came once");
        let again = open(&objects);
        (0..48 * MIB).step_by(piece).for_each(|at| read(&again, at, piece));
        assert_eq!((server.control.gets(), server.control.heads()), (gets, 2));
    }
}

#[test]
fn an_object_that_is_read_from_its_start_is_opened_by_its_first_get() {
    let server = Server::with_object(20 << 20);
    let objects = objects(&server, quick());
    let open = || objects.open_first(&Path::from("object"), u64::MAX).unwrap().0;
    let requests = || (server.control.heads(), server.control.gets());
    let first = open();
    read(&first, 0, 8 << 20);
    assert_eq!((requests(), server.control.ranges()), ((0, 1), vec![(0, 8 * MIB)]));
    // What is known may be cached, so it is asked for by a HEAD; also when it was replaced.
    read(&open(), 0, 8 << 20);
    assert_eq!(requests(), (1, 1));
    server.control.change("object");
    let new = open();
    let mut buffer = vec![0; 4 << 20];
    assert_eq!(new.read_at(&mut buffer, 0).unwrap(), 4 << 20);
    check(2, 0, &buffer);
    assert_eq!(requests().0, 2);
    // A GET that fails, and one of no bytes, are a HEAD at last.
    server.control.put("other", 3 << 20);
    server.control.put("empty", 0);
    server.control.trouble([Fault::Status(503)]);
    let other = objects.open_first(&Path::from("other"), 10).unwrap().0;
    read(&other, 0, 3 << 20);
    assert_eq!(objects.open_first(&Path::from("empty"), 10).unwrap().0.len(), 0);
    assert_eq!(requests().0, 4);
    let error = objects.open_first(&Path::from("none"), 10).unwrap_err();
    assert!(matches!(error, Error::Open { .. }), "{error}");
    assert_eq!(requests().0, 4, "it is certain");
}

#[test]
fn threads_that_open_an_object_at_its_start_at_the_same_time_fetch_each_byte_once() {
    let server = Server::with_object(6 << 20);
    server.control.set_latency(SLOW);
    let objects = objects(&server, quick());
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                let file = objects.open_first(&Path::from("object"), u64::MAX).unwrap().0;
                read(&file, 0, 6 << 20);
            });
        }
    });
    assert_eq!(objects.stats().bytes, 6 * MIB);
    assert!(server.control.gets() <= 2, "{:?}", server.control.ranges());
}

#[test]
fn a_small_object_comes_whole_and_a_footer_with_the_bytes_that_tell_its_length() {
    let server = Server::with_object(900_000);
    let objects = objects(&server, quick());
    let file = open(&objects);
    read(&file, 899_992, 8);
    read(&file, 0, 900_000);
    assert_eq!(server.control.gets(), 1);

    server.control.put("table", 30_000_003);
    let table = objects.open(&Path::from("table")).unwrap();
    let before = server.control.gets();
    read(&table, 30_000_003 - 8, 8);
    read(&table, 30_000_003 - 200_000, 199_992);
    assert_eq!(server.control.gets() - before, 1, "{:?}", &server.control.ranges()[1..]);
}

#[test]
fn ranges_that_are_close_come_together_and_warm_ones_cause_nothing() {
    let server = Server::with_object(32 << 20);
    let objects = objects(&server, quick());
    let file = open(&objects);
    let near: Vec<_> = (0..32).map(|at| at * 200_000..at * 200_000 + 65_536).collect();
    for (range, bytes) in near.iter().zip(file.read_ranges(&near).unwrap()) {
        assert_eq!(bytes.len() as u64, range.end - range.start);
        check(1, range.start, &bytes);
    }
    assert_eq!(server.control.gets(), 1, "{:?}", server.control.ranges());
    let far: Vec<_> = [8, 30, 12, 20, 12].map(|at| at * MIB + 5..at * MIB + 70_000).into();
    for (range, bytes) in far.iter().zip(file.read_ranges(&far).unwrap()) {
        check(1, range.start, &bytes);
    }
    assert_eq!(server.control.gets(), 5, "four places, one of them twice");
    file.read_ranges(&far).unwrap();
    file.read_ranges(&near).unwrap();
    assert_eq!(server.control.gets(), 5);
    assert!(file.read_ranges(&[]).unwrap().is_empty());
    let error = file.read_ranges(&[0..1, 5..40 * MIB]).unwrap_err();
    assert!(matches!(error, Error::Range { .. }), "{error}");
    #[allow(clippy::reversed_empty_ranges)]
    let error = file.bytes(9..5).unwrap_err();
    assert!(matches!(error, Error::Range { .. }), "{error}");
    assert!(file.bytes(32 * MIB..32 * MIB).unwrap().is_empty());
}

#[test]
fn one_version_opened_twice_is_one_mapping_also_by_another_name_of_the_store() {
    let server = Server::with_object(4 << 20);
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    let named =
        |name: &str| ObjectCache::new(cache.clone(), server.store(), quick().store_name(name)).unwrap();
    let (one, two, other) = (named("a"), named("a"), named("b"));
    let files = [open(&one), open(&one), open(&two)];
    assert_eq!(cache.stats().files, 1);
    files.iter().for_each(|file| read(file, 0, 4 << 20));
    assert_eq!(server.control.gets(), 1);
    let stranger = open(&other);
    read(&stranger, 0, 4 << 20);
    assert_eq!((server.control.gets(), cache.stats().files), (2, 2), "another name is another store");
    let unnamed = [(); 2].map(|()| ObjectCache::new(cache.clone(), server.store(), quick()).unwrap());
    unnamed.iter().for_each(|objects| read(&open(objects), 0, 4 << 20));
    assert_eq!(cache.stats().files, 4, "what has no name shares with none");
    cache.check().unwrap();
}

#[test]
fn bytes_are_the_caches_own_and_keep_their_version() {
    let server = Server::with_object(4 << 20);
    let objects = objects(&server, quick());
    let file = open(&objects);
    read(&file, 0, 4 << 20);
    let pinned = file.pin(MIB..MIB + 65_536).unwrap();
    let bytes = file.bytes(MIB..MIB + 65_536).unwrap();
    assert_eq!(Some(bytes.as_ptr()), pinned.as_slice().map(<[u8]>::as_ptr), "not a copy");
    drop(pinned);
    assert!(objects.cache().stats().pinned_bytes >= 65_536);
    server.control.change("object");
    let new = open(&objects);
    let mut buffer = vec![0; 65_536];
    new.read_at(&mut buffer, MIB).unwrap();
    check(2, MIB, &buffer);
    check(1, MIB, &bytes);
    read(&file, 0, 4 << 20); // cached, so it can still be read
    drop((bytes, file));
    assert_eq!(objects.cache().stats().pinned_bytes, 0);
}

#[test]
fn transient_errors_are_retried_and_no_byte_comes_twice() {
    for fault in [
        Fault::Status(503),
        Fault::Status(429),
        Fault::Status(500),
        Fault::Cut(0),
        Fault::Cut(300_001),
        Fault::Short(100_000),
        Fault::Stall(200_000),
        Fault::OtherRange,
    ] {
        let server = Server::with_object(2 << 20);
        let stall_max = Duration::from_secs(if matches!(fault, Fault::Stall(_)) { 2 } else { 60 });
        let objects = objects(&server, quick().stall_max(stall_max));
        let file = open(&objects);
        server.control.trouble([fault, fault]);
        read(&file, 0, 2 << 20);
        let stats = objects.stats();
        assert_eq!((server.control.gets(), stats.retries, stats.failures), (3, 2, 0), "{fault:?}");
        assert_eq!(stats.bytes, 2 * MIB, "{fault:?}: it went on where it had ended");
        objects.cache().check().unwrap();
    }
}

#[test]
fn a_body_that_ends_in_a_gap_is_continued_behind_it() {
    const PART: u64 = 65_536;
    for (fault, bytes) in
        [(Fault::Cut(80_000), 80_000), (Fault::Short(80_000), 80_000), (Fault::Cut(65_536), 65_536)]
    {
        let server = Server::with_object(4 << 20);
        let objects = objects(&server, quick());
        let file = open(&objects);
        read(&file, 2 * MIB + PART, PART as usize);
        server.control.trouble([fault, Fault::Cut(0)]);
        let ranges = [2 * MIB..2 * MIB + PART, 2 * MIB + 2 * PART..2 * MIB + 3 * PART];
        for (range, bytes) in ranges.iter().zip(file.read_ranges(&ranges).unwrap()) {
            check(1, range.start, &bytes);
        }
        let asked = server.control.ranges()[1..].to_vec();
        let behind = (ranges[1].start, ranges[1].end);
        assert_eq!(asked, [(ranges[0].start, ranges[1].end), behind, behind], "{fault:?}");
        assert_eq!(objects.stats().bytes, 2 * PART + bytes);
    }
}

#[test]
fn an_object_that_was_replaced_is_an_error_and_opened_again_it_is_the_new_one() {
    for fault in [Fault::ChangedBefore, Fault::ChangedAfter(400_000), Fault::Unconditional] {
        let server = Server::with_object(2 << 20);
        let objects = objects(&server, quick());
        let file = open(&objects);
        server.control.trouble([fault]);
        let error = file.bytes(MIB..2 * MIB).unwrap_err();
        assert!(error.is_change(), "{fault:?}: {error}");
        assert!(error.to_string().contains("open it again"), "{error}");
        let (is_conditional, refused) = (fault != Fault::Unconditional, server.control.refused());
        assert_eq!(refused, u64::from(is_conditional), "a GET says which version it wants");
        // The whole pages of the old version that had come are there, and nothing of the new one.
        let mut buffer = vec![0; 2 << 20];
        for at in (0..2 * MIB).step_by(4096) {
            if let Ok(bytes) = file.read_at(&mut buffer[..4096], at) {
                check(1, at, &buffer[..bytes]);
            }
        }
        let new = open(&objects);
        assert_eq!(new.read_at(&mut buffer, 0).unwrap(), 2 << 20);
        check(2, 0, &buffer);
        assert!(file.read_at(&mut buffer[..4096], 2 * MIB - 4096).unwrap_err().is_change());
    }
    let server = Server::with_object(2 << 20);
    let objects = objects(&server, quick());
    let file = open(&objects);
    server.control.delete("object");
    let Err(Error::Changed(error)) = file.bytes(0..100_000) else { panic!("it is gone") };
    assert!(matches!(error.failure(), FetchFailure::Deleted), "{error}");
    let error = objects.open(&Path::from("object")).unwrap_err();
    let is_not_found = |error: &object_store::Error| matches!(error, object_store::Error::NotFound { .. });
    assert!(matches!(&error, Error::Open { source, .. } if is_not_found(source)), "{error}");
}

#[test]
fn a_store_that_is_down_is_an_error_before_the_deadline_for_all_readers() {
    let server = Server::with_object(4 << 20);
    let objects = objects(&server, quick().attempts_max(3).failure_pause(Duration::from_secs(600)));
    let file = open(&objects);
    server.control.trouble([Fault::Status(503); 3]);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let Err(Error::Fetch(error)) = file.bytes(0..65_536) else { panic!("it cannot be had") };
                assert_eq!(error.attempts(), 3);
                assert!(error.to_string().contains("after 3 GETs"), "{error}");
                assert!(!matches!(error.failure(), FetchFailure::Deadline), "{error}");
            });
        }
    });
    assert_eq!(server.control.gets(), 3, "the readers of one fetch are told by one fetch");
    read(&file, 2 * MIB, 65_536); // other ranges are not concerned
    let error = file.bytes(4096..65_536).unwrap_err();
    assert!(matches!(error, Error::Fetch(_)), "{error}");
    assert_eq!((server.control.gets(), objects.stats().refused > 0), (4, true), "not so soon again");
    open(&objects); // says that the store is there again
    read(&file, 0, 65_536);

    let objects = self::objects(&server, quick().deadline(Duration::from_millis(1500)));
    let file = open(&objects);
    server.control.trouble([Fault::Stall(0); 8]);
    let Err(Error::Fetch(error)) = file.bytes(0..65_536) else { panic!("it does not come") };
    assert!(matches!(error.failure(), FetchFailure::Deadline), "{error}: no byte came, and that is later");
}

#[test]
fn gets_under_way_are_bounded() {
    let server = Server::with_object(32 << 20);
    server.control.set_latency(Duration::from_millis(10));
    let objects = objects(&server, quick().requests_max(3).request_max(MIB));
    let file = open(&objects);
    read(&file, 0, 32 << 20);
    assert!(server.control.most_at_a_time() <= 3, "{}", server.control.most_at_a_time());
    assert_eq!(objects.stats().bytes, 32 * MIB);

    let objects = self::objects(&server, quick().in_flight_max(2 * MIB).request_max(MIB));
    let file = open(&objects);
    read(&file, 0, 32 << 20);
    assert_eq!(objects.stats().bytes, 32 * MIB);
}

/// The store answers when all are asked for, which the one thread of the runtime sees: so none of the reads waits for
/// another, and none keeps the thread.
#[test]
fn async_reads_wait_side_by_side_and_block_no_thread() {
    const READS: u64 = 16;
    let server = Server::with_object(64 << 20);
    let objects = objects(&server, quick());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let file = objects.open_async(&Path::from("object")).await.unwrap();
        server.control.hold();
        let reads = (0..READS).map(|at| {
            let file = file.clone();
            async move {
                let at = at * 4 * MIB + 1000;
                let bytes = file.bytes_async(at..at + 100_000).await.unwrap();
                check(1, at, &bytes);
                let mut buffer = [0; 5000];
                assert_eq!(file.read_at_async(&mut buffer, at + 2 * MIB).await.unwrap(), 5000);
                check(1, at + 2 * MIB, &buffer);
            }
        });
        let answers = async {
            while server.control.under_way() < READS {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            server.control.release();
        };
        futures_util::future::join(futures_util::future::join_all(reads), answers).await;
        let ranges = [5 * MIB..5 * MIB + 9, 50 * MIB..51 * MIB];
        for (range, bytes) in ranges.iter().zip(file.read_ranges_async(&ranges).await.unwrap()) {
            check(1, range.start, &bytes);
        }
        drop(objects); // and its threads, here in a task
    });
}

#[test]
fn a_cache_of_objects_that_ends_leaves_no_reader_behind() {
    let server = Server::with_object(8 << 20);
    server.control.set_latency(Duration::from_millis(50));
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    let objects = ObjectCache::new(cache.clone(), server.store(), quick()).unwrap();
    let file = open(&objects);
    drop(objects);
    read(&file, 0, 65_536); // the handle has what it needs
    file.prefetch(0..8 * MIB).unwrap();
    drop(file);
    drop(cache);
}

fn version(file: &ObjectFile) -> u32 {
    let tag = file.meta().e_tag.as_deref().expect("the server gives ETags");
    tag.trim_matches(['"', 'v']).parse().expect("of that form")
}

fn random(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % below
}

fn any_fault(state: &mut u64) -> Fault {
    let bytes = random(state, 700_000) as usize;
    match random(state, 12) {
        0 => Fault::Status(503),
        1 => Fault::Status(429),
        2 => Fault::Status(502),
        3..6 => Fault::Cut(bytes),
        6 | 7 => Fault::Short(bytes),
        8 => Fault::OtherRange,
        9 => Fault::ChangedAfter(bytes),
        10 => Fault::Unconditional,
        _ => Fault::ChangedBefore,
    }
}

#[test]
fn no_byte_is_wrong_under_any_trouble() {
    let rounds = std::env::var("QUINION_OBJECT_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
    let server = Server::with_object(6 << 20);
    let objects = objects(&server, quick().attempts_max(4).failure_pause(Duration::ZERO));
    let mut state = 0x1234_5678_9abc_def1_u64;
    let (mut reads, mut bytes, mut changes, mut failures) = (0, 0, 0, 0);
    for _ in 0..rounds {
        server.control.end_trouble();
        let mut file = open(&objects);
        let faults: Vec<_> = (0..random(&mut state, 16)).map(|_| any_fault(&mut state)).collect();
        server.control.trouble(faults);
        for _ in 0..100 {
            let (at, is_long) = (random(&mut state, 6 * MIB), random(&mut state, 16) == 0);
            let len = 1 + random(&mut state, if is_long { 2 << 20 } else { 20_000 });
            let mut buffer = vec![0; len as usize];
            match file.read_at(&mut buffer, at) {
                Ok(read) => {
                    check(version(&file), at, &buffer[..read]);
                    bytes += read;
                }
                Err(error) if error.is_change() => {
                    changes += 1;
                    file = open(&objects);
                }
                Err(_) => failures += 1,
            }
            reads += 1;
        }
        file.file().dont_need(0, 6 << 20).unwrap();
    }
    println!(
        "{reads} reads of {bytes} bytes; {changes} of a replaced object, {failures} failed; {:?}",
        objects.stats()
    );
    assert!(changes > 0 && failures < reads / 10 && objects.stats().retries > changes);
    objects.cache().check().unwrap();
}

#[test]
fn shared_handles_of_many_threads_read_right_under_memory_pressure() {
    let server = Server::with_object(48 << 20);
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let objects = Arc::new(ObjectCache::new(cache, server.store(), quick()).unwrap());
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let objects = Arc::clone(&objects);
            scope.spawn(move || {
                let file = open(&objects);
                for at in 0..60_u64 {
                    let at = (at * 7919 + thread * 104_729) * 4099 % (47 * MIB);
                    let range = at..at + 200_000;
                    check(1, at, &file.bytes(range.clone()).unwrap());
                    read(&file, range.start, 3000);
                }
            });
        }
    });
    objects.cache().check().unwrap();
}

fn open_at_random(objects: &ObjectCache) -> ObjectFile {
    let file = open(objects);
    file.file().advise(Hint::Random).unwrap();
    file
}

fn read_cold(file: &ObjectFile, nth: u64) {
    read(file, nth * MIB, 64 << 10);
}

#[test]
fn a_late_get_is_hedged_once_its_quantile_is_known() {
    let server = Server::with_object(64 << 20);
    server.control.set_latency(Duration::from_millis(2));
    // Without a second GET this read would fail by its deadline.
    let options = quick().stall_max(Duration::from_secs(60)).hedge_slower_than(95);
    let objects = objects(&server, options);
    let file = open_at_random(&objects);
    assert_eq!(objects.first_byte(), None);
    (0..32).for_each(|nth| read_cold(&file, nth));
    let known = objects.first_byte().unwrap();
    assert!(known.p50 >= Duration::from_millis(2) && known.p50 <= known.p95 && known.p95 <= known.p99);
    let before = objects.stats();
    server.control.trouble([Fault::Late(120_000)]);
    read_cold(&file, 33);
    let now = objects.stats();
    assert_eq!((now.hedges - before.hedges, now.hedges_won - before.hedges_won), (1, 1));
    assert_eq!((now.gets - before.gets, now.retries - before.retries), (2, 0));
    // One of the two fails while the other is under way, which one is the network's choice: the other's answer is used.
    server.control.trouble([Fault::Status(503)]);
    server.control.set_latency(Duration::from_millis(1500));
    read_cold(&file, 35);
    let last = objects.stats();
    assert_eq!((last.hedges - now.hedges, last.retries - now.retries, last.failures), (1, 0, 0), "{last:?}");
}

#[test]
fn no_get_is_hedged_unless_it_was_asked_for() {
    let server = Server::with_object(64 << 20);
    let objects = objects(&server, quick());
    let file = open_at_random(&objects);
    (0..40).for_each(|nth| read_cold(&file, nth));
    server.control.trouble([Fault::Late(300)]);
    read_cold(&file, 41);
    assert_eq!((objects.stats().hedges, objects.stats().gets), (0, 41));
}

#[test]
fn a_hedge_takes_no_turn_that_is_not_free() {
    let server = Server::with_object(64 << 20);
    let objects = objects(&server, quick().requests_max(1).hedge_slower_than(95));
    let file = open_at_random(&objects);
    (0..40).for_each(|nth| read_cold(&file, nth));
    let before = objects.stats().hedges;
    server.control.trouble([Fault::Late(500)]);
    read_cold(&file, 41);
    assert_eq!((before, objects.stats().hedges, server.control.most_at_a_time()), (0, 0, 1));
}
