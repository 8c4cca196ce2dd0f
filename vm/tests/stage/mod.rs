//! Stage: a snapshot on a disk, a cache, and a place for a socket, for tests in which VMs are served.
//!
//! The folder of the snapshot is on a disk, so that the cache reads it directly; and the kernel's page cache is told to
//! drop it before a server starts, so that all reads go through this cache. Dropping the stage removes all of it.
//!
//! Invariant: the server starts only when a test asks for it.

use std::path::PathBuf;

use quinion::Cache;
use quinion_testing::vmm::{self, Image, Plan};
use quinion_vm::{RestoreOptions, Server};
use tempfile::TempDir;

pub fn options(choose: impl FnOnce(&mut RestoreOptions)) -> RestoreOptions {
    let mut options = RestoreOptions::default();
    choose(&mut options);
    options
}

pub struct Stage {
    sockets: TempDir,
    pub disk: TempDir,
    pub image: Image,
    pub cache: Cache,
}

impl Stage {
    pub fn new(image: Image) -> Self {
        let stage = Self {
            sockets: tempfile::tempdir().unwrap(),
            disk: TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
            image,
            cache: Cache::builder().memory(64 << 20).build().unwrap(),
        };
        image.write(&stage.snapshot());
        stage
    }
    pub fn snapshot(&self) -> PathBuf {
        self.disk.path().join("memory")
    }
    pub fn socket(&self) -> PathBuf {
        self.sockets.path().join("socket")
    }
    pub fn serve(&self, options: RestoreOptions) -> Server {
        vmm::evict(&self.snapshot(), 0, None);
        Server::start(&self.cache, &self.snapshot(), &self.socket(), options).unwrap()
    }
    pub fn plan(&self) -> Plan {
        Plan::new(self.socket(), self.image)
    }
}
