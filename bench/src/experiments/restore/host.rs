//! Host: the server's side of a restore: a snapshot in a file, a cache for it, and a page-fault server.
//!
//! A cold host makes its cache and server for each restore. A warm one keeps its cache, and where the image is mapped
//! also the server, which owns the image; only the guest is new then.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use quinion::{Cache, File};
use quinion_vm::{FaultRecord, OnFailure, RestoreOptions, Server};

use super::guest::touch_all;
use super::vmm::Guest;
use crate::fixtures::scratch::Scratch;
use crate::harness::folder::ScratchFolder;
use crate::harness::{Settings, Unmeasured};
use crate::sys::Region;

const STEP: usize = 2 << 20;

pub struct Host {
    pub scratch: Scratch,
    /// A cache that holds the whole snapshot, and a handle that keeps it cached: the file has no name, and the pages of
    /// such a file are dropped with its last handle.
    warm: OnceCell<(Cache, File)>,
    /// A server whose image is fully resident.
    resident: OnceCell<RunningServer>,
    folder: ScratchFolder,
}

/// How to make a guest whose memory the server at a path fills.
pub type NewGuest = fn(&Path, usize) -> Result<Guest, Unmeasured>;

/// Options of a server that hands out its image for mapping.
pub fn handing_out_the_image() -> RestoreOptions {
    let mut options = RestoreOptions::new();
    options.minor = true;
    options
}

impl Host {
    pub fn new(settings: &Settings, bytes: u64) -> Result<Self, Unmeasured> {
        let scratch = Scratch::new(&settings.folder, bytes)?;
        // In the temporary folder, since the path of a socket has to be short.
        let folder = ScratchFolder::new(&std::env::temp_dir())?;
        Ok(Self { scratch, warm: OnceCell::new(), resident: OnceCell::new(), folder })
    }

    pub fn len(&self) -> usize {
        self.scratch.bytes() as usize
    }

    pub fn cache(&self) -> Result<Cache, Unmeasured> {
        // An image is one contiguous piece of the cache's memory, and is read directly into place.
        let bytes = self.scratch.bytes();
        Ok(Cache::builder().memory(bytes + bytes / 8 + (64 << 20)).build()?)
    }

    pub fn warm_cache(&self) -> Result<Cache, Unmeasured> {
        if let Some((cache, _)) = self.warm.get() {
            return Ok(cache.clone());
        }
        let cache = self.cache()?;
        let file = cache.open(self.scratch.path())?;
        let (mut buffer, mut position) = (vec![0; STEP], 0);
        while let bytes @ 1.. = file.read_at(&mut buffer, position)? {
            position += bytes as u64;
        }
        Ok(self.warm.get_or_init(|| (cache, file)).0.clone())
    }

    /// Starts a server over `cache` with these options, for one guest.
    pub fn start(&self, cache: &Cache, options: RestoreOptions) -> Result<RunningServer, Unmeasured> {
        self.start_at("socket", cache, options)
    }

    /// As [`Self::start`], for a snapshot that is open in the cache.
    pub fn start_file(
        &self,
        cache: &Cache,
        file: &File,
        mut options: RestoreOptions,
    ) -> Result<RunningServer, Unmeasured> {
        options.on_failure = OnFailure::Leave;
        let socket = self.folder.path().join("file");
        let server = Server::start_file(cache, file, &socket, options)?;
        Ok(RunningServer { server, socket, bytes: self.len() })
    }

    /// Maps the resident image of a server into a new guest; another guest has touched all of it before. The first call
    /// fixes how the server answers faults.
    pub fn serve_resident<T>(
        &self,
        options: RestoreOptions,
        work: impl FnOnce(&mut Region) -> Result<T, Unmeasured>,
    ) -> Result<T, Unmeasured> {
        if self.resident.get().is_none() {
            let resident = self.start_at("resident", &self.cache()?, options)?;
            touch_all(&resident.guest(Guest::mapped)?.region)?;
            self.resident.get_or_init(|| resident);
        }
        let resident = self.resident.get().expect("it was just made");
        work(&mut resident.guest(Guest::mapped)?.region)
    }

    fn start_at(
        &self,
        name: &str,
        cache: &Cache,
        mut options: RestoreOptions,
    ) -> Result<RunningServer, Unmeasured> {
        // The guest is this process.
        options.on_failure = OnFailure::Leave;
        let socket = self.folder.path().join(name);
        let server = Server::start(cache, &self.scratch.path(), &socket, options)?;
        Ok(RunningServer { server, socket, bytes: self.len() })
    }
}

/// A page-fault server of a host's snapshot.
pub struct RunningServer {
    server: Server,
    socket: PathBuf,
    bytes: usize,
}

impl RunningServer {
    fn guest(&self, guest: NewGuest) -> Result<Guest, Unmeasured> {
        guest(&self.socket, self.bytes)
    }

    /// Runs the server until a guest that `guest` makes has done its work. Returns the guest's result, and the record
    /// if the options ask for one.
    pub fn run<T>(
        self,
        guest: NewGuest,
        work: impl FnOnce(&mut Region) -> Result<T, Unmeasured>,
    ) -> Result<(T, Option<FaultRecord>), Unmeasured> {
        let mut guest = self.guest(guest)?;
        let done = work(&mut guest.region)?;
        drop(guest);
        let record = self.server.record();
        self.server.stop();
        Ok((done, record))
    }
}
