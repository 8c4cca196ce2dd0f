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
