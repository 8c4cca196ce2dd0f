//! Remote: a snapshot that is an object of a store: how soon has a guest its working set, on a node that restores it
//! again?
//!
//! ```text
//!   the store         an S3 server on loopback: 20 ms to the first byte of each answer
//!
//!   warm disk tier    Quinion's: a new cache whose disk tier has what an earlier one fetched; a server of page faults,
//!                     which replays the record of the working set
//!   cold              the same without a disk tier: all of it comes from the store
//!   download first    20 ms, and the object's bytes at 1 GB/s, are waited out; then the file, which the kernel has
//!                     cached by then, is mapped (MAP_PRIVATE)
//! ```
//!
//! Downloaded bytes are not written and take no processor time, which is more than any network does. The guest
//! touches a fifth of its pages, anywhere. The time begins before the cache is built, and so has the disk tier's index
//! in it.

use std::cell::OnceCell;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinion::{Cache, DiskOptions};
use quinion_object::{ObjectCache, ObjectFile, Options};
use quinion_testing_s3::Server as Store;
use quinion_vm::{FaultRecord, RestoreOptions};

use super::guest::Touched;
use super::host::Host;
use super::vmm::Guest;
use super::{REPEAT, pick};
use crate::fixtures::pages::PAGE;
use crate::fixtures::shared::Shared;
use crate::harness::folder::ScratchFolder;
use crate::harness::machine::check_memory;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{Mapped, Region};

const METRICS: [Metric; 2] = [Metric::cost("time", "s"), Metric::cost("GETs", "requests")];

const WARM: &str = "server, warm disk tier";
const COLD: &str = "server, cold";
const DOWNLOAD: &str = "download first, MAP_PRIVATE";

const KEY: &str = "vm.mem";
const LATENCY: Duration = Duration::from_millis(20);
/// Bytes that a node's network brings in a second.
const BYTES_A_SECOND: f64 = 1e9;
const STEP: usize = 2 << 20;
/// How often the tier is given pages that it has refused, and how long it has for them each time.
const TIER_TRIES: u32 = 5;
const TIER_TIME: Duration = Duration::from_secs(30);

struct Remote {
    store: Store,
    host: Host,
    tier: ScratchFolder,
    record: OnceCell<FaultRecord>,
}

fn bytes(settings: &Settings) -> u64 {
    pick(settings, 8 << 20, 128 << 20, 1 << 30)
}

pub fn case(settings: &Settings) -> Case {
    let remote = Shared::new(settings, Remote::new);
    let name = format!("object of {} MiB, 20 % scattered, recorded", bytes(settings) >> 20);
    let case = Case::new(name, &METRICS, move || {
        let remote = remote.get()?;
        Ok(WAYS.map(|(name, run)| alternative(&remote, name, run)).into())
    });
    let case = case.compare("time", WARM, DOWNLOAD).goal(5.0).compare("time", COLD, DOWNLOAD);
    case.usually(REPEAT).without_warm_up()
}

type Run = fn(&Remote) -> Result<(), Unmeasured>;

const WAYS: [(&str, Run); 3] = [
    (WARM, |remote| remote.restored(&remote.cache(Some(remote.tier.path()))?)),
    (COLD, |remote| remote.restored(&remote.cache(None)?)),
    (DOWNLOAD, Remote::downloaded),
];

fn alternative(remote: &Rc<Remote>, name: &'static str, run: Run) -> Alternative {
    let remote = Rc::clone(remote);
    let run = move |_| {
        remote.prepare()?;
        let (gets, start) = (remote.store.control.gets(), Instant::now());
        run(&remote)?;
        let seconds = start.elapsed().as_secs_f64();
        let gets = remote.store.control.gets() - gets;
        if name == WARM && gets > 0 {
            return Err(Unmeasured::Failed(format!(
                "the disk tier had not all of it: {gets} GETs were sent"
            )));
        }
        Ok(vec![seconds, gets as f64])
    };
    Alternative::new(name, run).excused(METRICS.len())
}

impl Remote {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = bytes(settings);
        // The object, while it arrives twice; the file in the kernel's memory; the guest's, and the cache.
        check_memory(5 * bytes + (512 << 20))?;
        let store = Store::new();
        let host = Host::new(settings, bytes)?;
        put(&store.address(), &host.scratch.path())?;
        let tier = ScratchFolder::new(&settings.folder)?;
        Ok(Self { store, host, tier, record: OnceCell::new() })
    }

    fn cache(&self, tier: Option<&Path>) -> Result<Cache, Unmeasured> {
        let bytes = self.host.len() as u64;
        let builder = Cache::builder().memory(bytes + bytes / 8 + (64 << 20));
        let disk = |folder: &Path| DiskOptions::new(folder, 2 * bytes + (64 << 20));
        let builder = tier.into_iter().fold(builder, |builder, folder| builder.disk(disk(folder)));
        Ok(builder.build()?)
    }

    fn open(&self, cache: &Cache) -> Result<ObjectFile, Unmeasured> {
        let failed = |error: quinion_object::Error| Unmeasured::Failed(error.to_string());
        let options = Options::new().store_name("the store of this benchmark");
        let store = Arc::clone(&self.store.store()) as Arc<_>;
        let objects = ObjectCache::new(cache.clone(), store, options).map_err(failed)?;
        objects.open(&KEY.into()).map_err(failed)
    }

    /// Records the working set, and has the disk tier and the kernel's page cache warm.
    fn prepare(&self) -> Result<(), Unmeasured> {
        if self.record.get().is_none() {
            let cache = self.cache(None)?;
            let mut options = RestoreOptions::new();
            options.record = true;
            let server = self.host.start_file(&cache, self.open(&cache)?.file(), options)?;
            let (_, record) = server.run(Guest::copied, |region| Touched::Scattered.touch(region))?;
            let record = record.ok_or_else(|| Unmeasured::Failed("nothing was recorded".to_owned()))?;
            self.record.get_or_init(|| record);
            self.warm_tier()?;
            self.store.control.set_latency(LATENCY);
        }
        let file = File::open(self.host.scratch.path())?;
        let mapped = Mapped::new(&file, self.host.len())?;
        let sum = mapped.iter().step_by(PAGE).fold(0_u64, |sum, &byte| sum + u64::from(byte));
        std::hint::black_box(sum);
        Ok(())
    }

    /// Pages that come faster than the disk writes are refused: the object is read until the tier has all of it.
    fn warm_tier(&self) -> Result<(), Unmeasured> {
        let pages = self.host.len() as u64 / PAGE as u64;
        for _ in 0..TIER_TRIES {
            let cache = self.cache(Some(self.tier.path()))?;
            let (object, mut buffer) = (self.open(&cache)?, vec![0; STEP]);
            for position in (0..self.host.len() as u64).step_by(STEP) {
                object.file().read_at(&mut buffer, position)?;
            }
            let stats = || cache.disk_stats().unwrap_or_default();
            let begun = Instant::now();
            while stats().pending_pages > 0 && begun.elapsed() < TIER_TIME {
                std::thread::sleep(Duration::from_millis(10));
            }
            if stats().pages >= pages {
                return Ok(());
            }
        }
        Err(Unmeasured::Failed("the disk tier does not take all of the object".to_owned()))
    }

    fn restored(&self, cache: &Cache) -> Result<(), Unmeasured> {
        let mut options = RestoreOptions::new();
        options.replay = self.record.get().cloned();
        let object = self.open(cache)?;
        let server = self.host.start_file(cache, object.file(), options)?;
        server.run(Guest::copied, |region| Touched::Scattered.touch(region)).map(drop)
    }

    fn downloaded(&self) -> Result<(), Unmeasured> {
        std::thread::sleep(LATENCY + Duration::from_secs_f64(self.host.len() as f64 / BYTES_A_SECOND));
        let file = File::open(self.host.scratch.path())?;
        Touched::Scattered.touch(&Region::private(&file, self.host.len())?)
    }
}

/// Puts the file at `path` into the store, by a request without a client: it is answered when the object is there.
fn put(address: &str, path: &Path) -> Result<(), Unmeasured> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut stream = TcpStream::connect(address)?;
    write!(
        stream,
        "PUT /bucket/{KEY} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n"
    )?;
    std::io::copy(&mut file, &mut stream)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.starts_with("HTTP/1.1 200") {
        return Ok(());
    }
    Err(Unmeasured::Failed(format!("the store does not take the snapshot: {answer}")))
}
