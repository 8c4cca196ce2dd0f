//! Host: our side of a restore: a snapshot in a file, a cache for it, and a page-fault server.
//!
//! A cold one is made for each restore, cache and server. A warm one keeps its cache, and where the image is
//! mapped also the server, whose image it is; only the guest is new then.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use quinion::{Cache, File};
use quinion_vm::{OnFailure, RestoreOptions, Server, Trace};

use super::guest::touch_all;
use super::vmm::Guest;
use crate::fixtures::scratch::Scratch;
use crate::harness::folder::ScratchFolder;
use crate::harness::{Settings, Unmeasured};
use crate::sys::Region;

/// Bytes that are read at a time.
const STEP: usize = 2 << 20;

/// A snapshot, and where its server is met.
pub struct Host {
    pub scratch: Scratch,
    /// A cache in which all of it is, once somebody wanted one, and what keeps it there: the file has no name, and what
    /// is cached of such a one goes with its last handle.
    warm: OnceCell<(Cache, File)>,
    /// A server whose image is all there, once somebody wanted one.
    resident: OnceCell<(Server, PathBuf)>,
    folder: ScratchFolder,
}

/// How a guest is made that a server at a path fills.
pub type NewGuest = fn(&Path, usize) -> Result<Guest, Unmeasured>;

/// A server's options by which its image can be mapped.
pub fn handing_out_the_image() -> RestoreOptions {
    let mut options = RestoreOptions::new();
    options.minor = true;
    options
}

impl Host {
    /// One of a snapshot of `bytes` bytes.
    pub fn new(settings: &Settings, bytes: u64) -> Result<Self, Unmeasured> {
        let scratch = Scratch::new(&settings.folder, bytes)?;
        // The path of a socket is short.
        let folder = ScratchFolder::new(&std::env::temp_dir())?;
        Ok(Self { scratch, warm: OnceCell::new(), resident: OnceCell::new(), folder })
    }

    /// How long the snapshot is, and the guest's memory.
    pub fn len(&self) -> usize {
        self.scratch.bytes() as usize
    }

    /// A cache in which there is room for all of it and nothing else, with nothing in it.
    pub fn cache(&self) -> Result<Cache, Unmeasured> {
        // An image is memory of the cache in one piece, and what is read for it goes straight there.
        let bytes = self.scratch.bytes();
        Ok(Cache::builder().memory(bytes + bytes / 8 + (64 << 20)).build()?)
    }

    /// One that has all of it.
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

    /// A server over `cache` with these options, until a guest that is made so has done its work; and the order
    /// in which that wanted its memory, if the options want that.
    pub fn serve<T>(
        &self,
        cache: &Cache,
        options: RestoreOptions,
        guest: NewGuest,
        work: impl FnOnce(&mut Region) -> Result<T, Unmeasured>,
    ) -> Result<(T, Option<Trace>), Unmeasured> {
        let (server, socket) = self.start(cache, options, "socket")?;
        let mut guest = guest(&socket, self.len())?;
        let done = work(&mut guest.region)?;
        drop(guest);
        let trace = server.trace();
        server.stop();
        Ok((done, trace))
    }

    /// A guest that maps the image of a server that has all of it: another guest has touched it before. The first call
    /// decides what a fault is answered with.
    pub fn serve_resident<T>(
        &self,
        options: RestoreOptions,
        work: impl FnOnce(&mut Region) -> Result<T, Unmeasured>,
    ) -> Result<T, Unmeasured> {
        if self.resident.get().is_none() {
            let (server, socket) = self.start(&self.cache()?, options, "resident")?;
            touch_all(&Guest::mapped(&socket, self.len())?.region)?;
            self.resident.get_or_init(|| (server, socket));
        }
        let (_, socket) = self.resident.get().expect("it was just made");
        work(&mut Guest::mapped(socket, self.len())?.region)
    }

    fn start(
        &self,
        cache: &Cache,
        mut options: RestoreOptions,
        name: &str,
    ) -> Result<(Server, PathBuf), Unmeasured> {
        // The guest is this process.
        options.on_failure = OnFailure::Leave;
        let socket = self.folder.path().join(name);
        Ok((Server::start(cache, &self.scratch.path(), &socket, options)?, socket))
    }
}
