//! Open: a pack and the packs that it refers to, by a path or in a cache.
//!
//! ```text
//!   by a path       the others lie in the same folder, by their names
//!   in a cache      the others were given; the identity tells which is which
//! ```
//!
//! A name leads to no other folder (`format`), and a file that is there is used only if it has the identity that the
//! referring pack names: a hash over all of its index. And no chunk is supplied but one with the digest that the
//! referring pack names. So a pack that an attacker has made, or a VM whose memory looks like one, reads nothing of
//! another VM's memory that it does not know already.

use std::path::Path;
use std::sync::Arc;

use quinion::File;
use quinion::backend::{BlockingSource, ThreadPool, WaitQueue};
use quinion::error::Result;
use quinion::internals::hooks::{cannot_open, invalid_input};

use super::super::{is_packed, open_if};
use super::output::folder_of;
use super::reader::{Pack, PackBackend, read_header};
use super::source::{CachedPack, LocalPack, PackSource, uncached_handle};

/// Threads that read and decompress at a time: where the bytes come from this machine's devices, and where they come
/// from afar and are mostly waited for.
const LOCAL_THREADS_MAX: usize = 16;
const CACHED_THREADS_MAX: usize = 32;
/// Fills that wait for these threads before others are held up.
const QUEUE_MAX: usize = 64;

/// The pack at `path`, as a backend of a cache.
pub(in super::super) fn open(path: &Path) -> Result<Arc<PackBackend>> {
    open_local(path).map(|pack| backend(pack, LOCAL_THREADS_MAX))
}

/// A pack in files of a cache, as a backend of that cache.
pub(in super::super) struct PackInCache {
    pub backend: Arc<PackBackend>,
    /// The handles by which it is read, as long as they are there.
    pub files: Vec<Arc<File>>,
}

/// The pack that `file` is, and that refers to some of `packs`.
pub(in super::super) fn open_file(file: &File, packs: &[File]) -> Result<PackInCache> {
    let files: Vec<Arc<File>> = std::iter::once(file).chain(packs).map(uncached_handle).collect();
    let sources: Vec<Arc<dyn PackSource>> =
        files.iter().map(|file| Arc::new(CachedPack::new(file)) as Arc<dyn PackSource>).collect();
    let opened = Pack::open(Arc::clone(&sources[0]), &mut |wanted| {
        let mut missing = "it is none of those that were given; give it, too (`packs`)".to_owned();
        for other in &sources[1..] {
            match read_header(&**other) {
                Ok(header) if header.identity == wanted.identity => return Ok(Arc::clone(other)),
                Ok(_) => {}
                Err(why) => missing.push_str(&format!("; {} could not be looked at: {why}", other.name())),
            }
        }
        Err(missing)
    });
    let pack = opened.map_err(|why| invalid_input(format!("{}: {why}", sources[0].name())))?;
    Ok(PackInCache { backend: backend(pack, CACHED_THREADS_MAX), files })
}

fn backend(pack: Pack, threads_max: usize) -> Arc<PackBackend> {
    let pool = ThreadPool::new(Arc::new(WaitQueue::new()), threads_max, QUEUE_MAX);
    Arc::new(BlockingSource::new(pack, Arc::new(pool)))
}

pub(super) fn open_local(path: &Path) -> Result<Pack> {
    let source: Arc<dyn PackSource> = Arc::new(LocalPack::open(path)?);
    let folder = folder_of(path);
    let opened = Pack::open(source, &mut |name| {
        let there = LocalPack::open(&folder.join(name.as_os_str()));
        let there = there.map_err(|error| format!("{error}; put that pack into the folder of this one"))?;
        Ok(Arc::new(there))
    });
    opened.map_err(|why| invalid_input(format!("{}: {why}", path.display())))
}

/// Whether the file at `path` is a pack, or is meant to be one.
pub(super) fn is_pack_at(path: &Path) -> Result<bool> {
    let wrong = |source| cannot_open(path, source);
    match open_if(path, |kind| kind.is_file()).map_err(wrong)? {
        Some(file) => is_packed(&file).map_err(wrong),
        None => Ok(false),
    }
}
