//! Totals that a server tells its clients, and the part of its memory that each may pin.
//!
//! Server and client are one process, with a store in memory: so the server's own numbers are at hand, and no other
//! process counts among them.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::{ObjectStoreExt, PutPayload};
use quinion::Cache;
use quinion_object::Options;
use quinion_service::{Builder, Client, ErrorKind, Server};

const URL: &str = "mem://t/object";
const MEMORY: u64 = 64 << 20;
const LEN: usize = 40 << 20;
/// Longer than an answer takes on a machine that is busy with other tests.
const LONG: Duration = Duration::from_secs(60);

fn start(folder: &FilePath, settle: impl FnOnce(Builder) -> Builder) -> (Server, Client) {
    let store = Arc::new(InMemory::new());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.put(&"object".into(), PutPayload::from(vec![7; LEN]))).unwrap();
    let cache = Cache::builder().memory(MEMORY).build().unwrap();
    let server = settle(Server::builder(cache).store("mem://t", store, Options::new()));
    let server = server.start(folder.join("q/s.sock").to_str().unwrap()).unwrap();
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    (server, client)
}

/// 1. The server's own process opens an object that a client has read: it finds the pages, and sends no GET.
/// 2. It opens what clients can open, and nothing else.
#[test]
fn the_process_of_a_server_opens_objects_in_the_cache_of_its_clients() {
    let folder = tempfile::tempdir().unwrap();
    let (server, client) = start(folder.path(), |server| server);
    let opener = server.opener();
    client.open(URL).unwrap().read_exact_at(&mut vec![0; LEN], 0).unwrap();
    let gets = server.totals().gets;
    let object = opener.open(URL).unwrap();
    let mut bytes = vec![0; LEN];
    assert_eq!(object.read_at(&mut bytes, 0).unwrap(), LEN);
    assert!(bytes.iter().all(|&byte| byte == 7));
    assert_eq!(server.totals().gets, gets, "the client's pages are there");
    for (url, why) in [("mem://other/object", "has no store for it"), ("mem://t/none", "mem://t/none")] {
        let error = opener.open(url).unwrap_err();
        assert!(error.kind() == ErrorKind::Open && error.to_string().contains(why), "{error}");
    }
}

#[test]
fn a_client_is_told_the_servers_numbers_and_its_question_is_none_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let (server, client) = start(folder.path(), |server| server);
    let before = client.server_totals(LONG).unwrap();
    assert_eq!((before.clients, before.open_files, before.reads, before.heads), (1, 0, 0, 0));
    assert_eq!(before.memory_bytes, MEMORY);
    let file = client.open(URL).unwrap();
    let mut buffer = vec![0; 1 << 20];
    for _ in 0..3 {
        file.read_exact_at(&mut buffer, 0).unwrap();
    }
    let pin = file.pin(0..1 << 20).unwrap();
    let totals = client.server_totals(LONG).unwrap();
    // Reads ahead go on meanwhile.
    let mut later = server.totals();
    for (number, later) in [
        (totals.gets, &mut later.gets),
        (totals.fetched_bytes, &mut later.fetched_bytes),
        (totals.cached_bytes, &mut later.cached_bytes),
    ] {
        assert!(number <= *later, "{totals:?}, and then {later}");
        *later = number;
    }
    assert_eq!(totals, later);
    assert_eq!((totals.open_files, totals.pins, totals.heads), (1, 1, 1));
    assert_eq!((totals.reads, totals.bytes), (3, 3 << 20));
    assert!(
        (1..3).contains(&totals.asked) && totals.gets >= 1 && totals.fetched_bytes >= 1 << 20,
        "{totals:?}"
    );
    assert!(totals.cached_bytes >= 1 << 20 && totals.pinned_bytes >= 1 << 20, "{totals:?}");
    drop((pin, file));
    drop(server);
    assert_eq!(client.server_totals(LONG).unwrap_err().kind(), ErrorKind::OwnerDead);
}

/// 1. A client pins single bytes, each in a folio of its own, which is larger and is kept whole.
/// 2. Its share counts the bytes, so it keeps as much memory as all pins of the cache may.
/// 3. Another reader of the cache pins a byte, and is refused.
#[test]
fn a_client_that_pins_single_bytes_has_no_more_than_its_share_of_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (server, client) = start(folder.path(), |server| server);
    let file = client.open(URL).unwrap();
    file.read_exact_at(&mut vec![0; LEN], 0).unwrap();
    let step = LEN / 1000;
    let pins: Vec<_> = (0..1000)
        .map_while(|n| {
            let at = (n * step) as u64;
            file.pin(at..at + 1)
                .inspect_err(|error| assert_eq!(error.kind(), ErrorKind::Full, "{error}"))
                .ok()
        })
        .collect();
    let kept = server.cache().stats().pinned_bytes;
    assert!(kept <= MEMORY / 4, "{} pins keep {kept} bytes", pins.len());
    assert!(pins.len() < 1000 && kept > MEMORY / 8, "{} pins keep {kept} bytes", pins.len());
    let other = server.opener().open(URL).unwrap();
    let other_pin = other.pin(LEN as u64 - 1..LEN as u64).unwrap();
    drop(pins);
    // A folio counts once, by however many pins it is kept.
    let again: Vec<_> = (0..1000).map(|at| file.pin(at * 7..at * 7 + 1).unwrap()).collect();
    drop((again, other_pin));
}

#[test]
fn a_client_pins_a_quarter_of_the_memory_unless_the_server_says_otherwise() {
    for (percent, expected) in
        [(None, 16 << 20), (Some(10), 6 << 20), (Some(50), 32 << 20), (Some(99), 32 << 20)]
    {
        let folder = tempfile::tempdir().unwrap();
        let (_server, client) =
            start(folder.path(), |server| percent.into_iter().fold(server, Builder::pin_percent));
        let file = client.open(URL).unwrap();
        let pin = |bytes: u64| file.pin(0..bytes).map(|pin| pin.len() as u64);
        // Of half of the memory the cache itself needs some for pins of others.
        let fits = expected - if expected == MEMORY / 2 { 4 << 20 } else { 0 };
        assert_eq!(pin(fits).unwrap(), fits, "{percent:?}");
        assert_eq!(pin(expected + (1 << 20)).unwrap_err().kind(), ErrorKind::Full, "{percent:?}");
    }
}
