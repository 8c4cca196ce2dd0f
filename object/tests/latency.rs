//! What latency costs: the cached store beside the bare one, against the tests' own store with 20 ms to the first byte.
//!
//! Not a test: `cargo test -p quinion-object --test latency -- --ignored --nocapture` prints a table of medians (of
//! `QUINION_ROUNDS`, of the row that has `QUINION_ROW` in its name). Both sides use the same client and server, in one
//! process, so what is compared is how many requests are made, and when.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use quinion::Cache;
use quinion_object::{Freshness, ObjectCache, Options, cached_with};

use quinion_testing_s3::Server;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 128 * MIB;

/// In no order and with no step that readahead could see.
fn scattered() -> Vec<std::ops::Range<u64>> {
    let mut places: Vec<u64> = (0..SIZE / 65_536).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for at in (1..places.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        places.swap(at, (state % (at as u64 + 1)) as usize);
    }
    places[..512].iter().map(|at| at * 65_536..(at + 1) * 65_536).collect()
}

async fn scan(store: Arc<dyn ObjectStore>, at_a_time: usize, piece: u64) {
    let reads = futures_util::stream::iter((0..SIZE / piece).map(|at| {
        let store = Arc::clone(&store);
        async move { store.get_range(&Path::from("object"), at * piece..(at + 1) * piece).await.unwrap() }
    }));
    let bytes: Vec<Bytes> = reads.buffered(at_a_time).collect().await;
    assert_eq!(bytes.iter().map(|bytes| bytes.len() as u64).sum::<u64>(), SIZE);
}

async fn stream(store: Arc<dyn ObjectStore>) {
    let mut parts = store.get(&Path::from("object")).await.unwrap().into_stream();
    let mut bytes = 0;
    while let Some(part) = parts.next().await {
        bytes += part.unwrap().len() as u64;
    }
    assert_eq!(bytes, SIZE);
}

async fn scatter(store: Arc<dyn ObjectStore>) {
    let reads = scattered().into_iter().map(|range| {
        let store = Arc::clone(&store);
        async move { store.get_range(&Path::from("object"), range).await.unwrap() }
    });
    let bytes: Vec<Bytes> = futures_util::stream::iter(reads).buffer_unordered(32).collect().await;
    assert_eq!(bytes.len(), 512);
}

async fn lists(store: Arc<dyn ObjectStore>) {
    for ranges in scattered().chunks(32) {
        store.get_ranges(&Path::from("object"), ranges).await.unwrap();
    }
}

fn row<F: Future<Output = ()>>(name: &str, server: &Server, run: impl Fn(Arc<dyn ObjectStore>) -> F) {
    if std::env::var("QUINION_ROW").is_ok_and(|wanted| !name.contains(&wanted)) {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let timed = |store: Arc<dyn ObjectStore>| {
        let (begun, gets) = (Instant::now(), server.control.gets());
        runtime.block_on(run(store));
        (begun.elapsed().as_secs_f64() * 1e3, server.control.gets() - gets)
    };
    let rounds = std::env::var("QUINION_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(5);
    let mut all = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        let cache = Cache::builder().memory(1 << 30).build().unwrap();
        let objects = ObjectCache::new(cache, server.store(), Options::new()).unwrap();
        if std::env::var_os("QUINION_GROWN").is_some() {
            // The cache has had other data before, so its memory is there.
            let other = objects.open(&Path::from("other")).unwrap();
            for at in 0..SIZE / MIB {
                other.bytes(at * MIB..(at + 1) * MIB).unwrap();
            }
            other.file().dont_need(0, SIZE).unwrap();
        }
        let cached = Arc::new(cached_with(objects, Freshness::Immutable));
        let measured = [timed(server.store()), timed(cached.clone()), timed(cached)];
        for (all, measured) in all.iter_mut().zip(measured) {
            all.push(measured);
        }
    }
    let [bare, cold, warm] = all.map(|mut all: Vec<(f64, u64)>| {
        all.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
        all[all.len() / 2]
    });
    let ratio = bare.0 / cold.0;
    let shown = |(ms, gets)| format!("{ms:8.1} ms {gets:4}");
    println!("{name:34} {} {} = {ratio:5.2}x {}", shown(bare), shown(cold), shown(warm));
}

#[test]
#[ignore = "it measures"]
fn latency() {
    let server = Server::with_object(SIZE as usize);
    server.control.put("other", SIZE as usize);
    server.control.set_latency(Duration::from_millis(20));
    println!("{:34} {:>16} {:>16} {:>7} {:>16}", "medians and GETs", "bare", "cold", "", "warm");
    row("scan, 64 KiB after another, 16 MiB", &server, |store| async move {
        for at in 0..256_u64 {
            store.get_range(&Path::from("object"), at * 65_536..(at + 1) * 65_536).await.unwrap();
        }
    });
    row("scan, 1 MiB after another", &server, |store| scan(store, 1, MIB));
    row("scan, 8 MiB after another", &server, |store| scan(store, 1, 8 * MIB));
    row("scan, 4 MiB, 8 at a time", &server, |store| scan(store, 8, 4 * MIB));
    row("get of 128 MiB as a stream", &server, stream);
    row("512 of 64 KiB, 32 at a time", &server, scatter);
    row("16 get_ranges of 32 x 64 KiB", &server, lists);
}
