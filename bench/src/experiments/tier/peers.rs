//! Peers: foyer's hybrid cache with next to nothing in memory, so that its disk tier answers.
//!
//! Entries are written to the disk tier alone, and loaded from it past the cache in memory. Values are `Bytes`, which
//! foyer takes over without a copy.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, IoEngineConfig, Load,
    PsyncIoEngineConfig, RecoverMode, UringIoEngineConfig,
};

use super::{BUFFER_BYTES, CONTENTS, ENTRY_BYTES, Tier, contents, is_entry, wrong};
use crate::harness::Unmeasured;

/// After so many bytes the writer waits for the disk: what exceeds its queue would be dropped.
const WAIT_BYTES: usize = BUFFER_BYTES / 2;

/// The cache is dropped before the runtime on which it closes.
struct Foyer {
    cache: HybridCache<u64, Bytes>,
    contents: Arc<Vec<Bytes>>,
    runtime: tokio::runtime::Runtime,
}

/// A foyer whose I/O are calls that block, on threads of a runtime: its default.
pub fn open(folder: &Path, bytes: u64) -> Result<Box<dyn Tier>, Unmeasured> {
    with(folder, bytes, PsyncIoEngineConfig::new().boxed())
}

pub fn open_ring(folder: &Path, bytes: u64) -> Result<Box<dyn Tier>, Unmeasured> {
    with(folder, bytes, UringIoEngineConfig::new().boxed())
}

fn failed(error: impl std::fmt::Display) -> Unmeasured {
    Unmeasured::Failed(format!("foyer: {error}"))
}

fn with(folder: &Path, bytes: u64, io: Box<dyn IoEngineConfig>) -> Result<Box<dyn Tier>, Unmeasured> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let device = FsDeviceBuilder::new(folder).with_capacity(bytes as usize).with_direct(true);
    let device = device.build().map_err(failed)?;
    let engine = BlockEngineConfig::new(device)
        .with_buffer_pool_size(BUFFER_BYTES)
        .with_submit_queue_size_threshold(2 * BUFFER_BYTES);
    let builder =
        HybridCacheBuilder::new().memory(1 << 20).with_weighter(|_, value: &Bytes| value.len()).storage();
    let builder =
        builder.with_io_engine_config(io).with_engine_config(engine).with_recover_mode(RecoverMode::None);
    let cache = runtime.block_on(builder.build()).map_err(failed)?;
    let contents = Arc::new(contents().into_iter().map(Bytes::from).collect());
    Ok(Box::new(Foyer { runtime, cache, contents }))
}

async fn read_one(
    cache: &HybridCache<u64, Bytes>,
    contents: &[Bytes],
    number: u64,
) -> Result<(), Unmeasured> {
    let content = &contents[(number % CONTENTS) as usize];
    match cache.storage().load(&number).await.map_err(failed)? {
        Load::Entry { value, .. } if is_entry(&value, content) => Ok(()),
        Load::Entry { .. } => Err(wrong(number, &"other bytes")),
        Load::Piece { .. } => Err(wrong(number, &"it came from memory")),
        _ => Err(wrong(number, &"it is not there")),
    }
}

impl Tier for Foyer {
    fn write(&self, numbers: Range<u64>) -> Result<(), Unmeasured> {
        self.runtime.block_on(async {
            let mut waiting = 0;
            for number in numbers.clone() {
                let value = self.contents[(number % CONTENTS) as usize].clone();
                self.cache.storage_writer(number).force().insert(value);
                waiting += ENTRY_BYTES;
                if waiting >= WAIT_BYTES {
                    self.cache.storage().wait().await;
                    waiting = 0;
                }
            }
            self.cache.storage().wait().await;
            match numbers.clone().find(|number| !self.cache.storage().may_contains(number)) {
                None => Ok(()),
                Some(number) => Err(wrong(number, &"it is not there")),
            }
        })
    }

    fn read(&self, numbers: &[u64], at_a_time: usize) -> Result<(), Unmeasured> {
        if at_a_time == 1 {
            return self.runtime.block_on(async {
                for &number in numbers {
                    read_one(&self.cache, &self.contents, number).await?;
                }
                Ok(())
            });
        }
        let tasks: Vec<_> = (0..at_a_time)
            .map(|first| {
                let share: Vec<u64> = numbers.iter().copied().skip(first).step_by(at_a_time).collect();
                let (cache, contents) = (self.cache.clone(), Arc::clone(&self.contents));
                self.runtime.spawn(async move {
                    for number in share {
                        read_one(&cache, &contents, number).await?;
                    }
                    Ok::<_, Unmeasured>(())
                })
            })
            .collect();
        self.runtime.block_on(async {
            for task in tasks {
                task.await.map_err(failed)??;
            }
            Ok(())
        })
    }
}
