//! A server for the C tests: it has the object mem://t/a, says when it is ready, and ends with its standard input.

use std::io::Read;
use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use quinion_service::Server;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).ok_or("server NAME")?;
    let store = Arc::new(InMemory::new());
    let bytes: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(store.put(&Path::from("a"), PutPayload::from(bytes)))?;
    let cache = quinion::Cache::builder().memory(64 << 20).build()?;
    let _server = Server::builder(cache).store("mem://t", store, Default::default()).start(&name)?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
