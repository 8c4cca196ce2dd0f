//! Process: what all connections of a process share, which is one cache, its bound, and the databases that are open.
//!
//! A forked child begins anew: it does not have the cache's memory, and a lock may be held by a thread that it lacks.
//! It never uses the parent's.

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use libsqlite3_sys::SQLITE_WARNING;
use quinion::Cache;

use crate::clock::Clock;
use crate::database::Database;
use crate::ffi::log;
use crate::node::{LentFiles, NodeDatabase};
use crate::place::{Inode, Place};

/// The default bound of the cache, in bytes.
const MEMORY: u64 = 256 << 20;
/// The least bound, in bytes.
const MEMORY_LEAST: u64 = 16 << 20;
/// The bound, for a process that cannot give it by a URI.
const MEMORY_VARIABLE: &str = "QUINION_SQLITE_MEMORY";
/// The most that the bound can be raised to while the cache is in use, for such a process.
const MEMORY_MAX_VARIABLE: &str = "QUINION_SQLITE_MEMORY_MAX";
/// The largest bound, as a multiple of the bound, by default. Its tables take 0.9 % of it, so 4 % of the bound.
const MEMORY_MAX_TIMES: u64 = 4;

#[derive(Debug, Default)]
pub struct Process {
    pid: u32,
    clock: Clock,
    lent: LentFiles,
    shared: Mutex<Shared>,
    nodes: Mutex<HashMap<NodeKey, Weak<NodeDatabase>>>,
}

/// Reads of databases that went past the cache.
pub static DIRECT_READS: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Default)]
struct Shared {
    cache: Option<Cache>,
    databases: HashMap<Key, Weak<Database>>,
}

/// Connections with this in common share pages: the file, and whether by the URI no process changes it. If that is
/// wrong, only connections with the same URI option read old bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    pub inode: Inode,
    pub is_immutable: bool,
}

/// A database at a server, by its name or its socket.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NodeKey {
    pub inode: Inode,
    pub server: CString,
}

/// The bounds of a cache that may have to be made, as a URI gives them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MemoryBounds {
    /// The bound, in bytes.
    pub memory: Option<u64>,
    /// The most that it can be raised to.
    pub memory_max: Option<u64>,
}

impl MemoryBounds {
    /// The bounds that are set, or else those of the environment, or else the defaults.
    fn in_full(self) -> Result<(u64, u64), String> {
        let memory = self.memory.map_or_else(|| by_variable(MEMORY_VARIABLE), |memory| Ok(Some(memory)))?;
        let memory = memory.unwrap_or(MEMORY);
        let max = self.memory_max.map_or_else(|| by_variable(MEMORY_MAX_VARIABLE), |max| Ok(Some(max)))?;
        Ok((memory, max.unwrap_or(memory.saturating_mul(MEMORY_MAX_TIMES)).max(memory)))
    }
}

impl Process {
    pub fn get() -> &'static Self {
        static PRESENT: AtomicPtr<Process> = AtomicPtr::new(null_mut());
        let pid = std::process::id();
        loop {
            // Acquire, partner: the exchange below, which has made what it points to.
            let present = PRESENT.load(Ordering::Acquire);
            // SAFETY: it is null, or was leaked by an exchange below.
            if let Some(process) = unsafe { present.as_ref() }.filter(|process| process.pid == pid) {
                return process;
            }
            let new = Box::into_raw(Box::new(Self { pid, ..Self::default() }));
            // Release, partner: the load above. In a child the parent's is left where it is: its locks may be held.
            if PRESENT.compare_exchange(present, new, Ordering::Release, Ordering::Relaxed).is_err() {
                // SAFETY: it was not published: no other thread has it.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }

    /// The database of this key, which is made if no connection has it. A cache that is made gets these bounds.
    ///
    /// # Errors
    /// The bound is none, in words.
    pub fn database(&self, key: Key, bounds: MemoryBounds) -> Result<Arc<Database>, String> {
        let mut shared = self.shared();
        if let Some(database) = shared.databases.get(&key).and_then(Weak::upgrade) {
            return Ok(database);
        }
        let database = Arc::new(Database::new(shared.cache(bounds)?));
        shared.databases.retain(|_, database| database.strong_count() > 0);
        shared.databases.insert(key, Arc::downgrade(&database));
        Ok(database)
    }

    /// A database for one connection alone, since its file is not known. Writes by other connections are seen like
    /// those of other processes.
    ///
    /// # Errors
    /// As [`Process::database`].
    pub fn lone_database(&self, bounds: MemoryBounds) -> Result<Arc<Database>, String> {
        Ok(Arc::new(Database::new(self.shared().cache(bounds)?)))
    }

    /// The database of this key at its server. `None`, which is logged: it cannot be shared.
    pub fn node_database(&self, key: NodeKey, place: &Place) -> Option<Arc<NodeDatabase>> {
        let mut nodes = self.nodes();
        if let Some(known) = nodes.get(&key).and_then(Weak::upgrade) {
            return Some(known);
        }
        let server = key.server.to_string_lossy().into_owned();
        let new = Arc::new(NodeDatabase::new(server, place, &self.lent)?);
        nodes.retain(|_, known| known.strong_count() > 0);
        nodes.insert(key, Arc::downgrade(&new));
        Some(new)
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<NodeKey, Weak<NodeDatabase>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    pub fn cache(&self) -> Option<Cache> {
        self.shared().cache.clone()
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// The cache, which is made with these bounds if there is none. `None`: the system refuses it, and databases are
    /// read without. A cache whose tables for the largest bound cannot be had keeps the bound that it is made with.
    ///
    /// # Errors
    /// The bound is none, in words.
    fn cache(&mut self, bounds: MemoryBounds) -> Result<Option<Cache>, String> {
        if self.cache.is_none() {
            let (memory, memory_max) = bounds.in_full()?;
            let builder = || Cache::builder().memory(memory);
            let built = builder().memory_max(memory_max).build().or_else(|error| {
                let text = format!("the cache's bound of {memory} bytes cannot be raised later: {error}");
                log(SQLITE_WARNING, &text);
                builder().build()
            });
            self.cache = built
                .inspect_err(|error| {
                    log(SQLITE_WARNING, &format!("databases are read without a cache: {error}"))
                })
                .ok();
        }
        Ok(self.cache.clone())
    }
}

fn by_variable(name: &str) -> Result<Option<u64>, String> {
    let said = std::env::var(name).ok();
    said.map(|text| memory_of_text(&text).map_err(|wrong| format!("{name}: {wrong}"))).transpose()
}

/// Gives the cache another bound.
///
/// # Errors
/// It is none of this cache, in words.
pub fn set_memory(cache: &Cache, bytes: u64) -> Result<(), String> {
    let max = cache.stats().memory_max_bytes;
    if bytes > max {
        return Err(format!(
            "the cache's bound can be {max} bytes at most, and not {bytes}; to raise it further, give \
             quinion_memory_max in the URI of the process's first connection, or {MEMORY_MAX_VARIABLE}"
        ));
    }
    cache.resize(bytes).map(drop).map_err(|error| error.to_string())
}

/// A bound of the cache, in bytes.
///
/// # Errors
/// It is none, in words.
pub fn memory_of_text(text: &str) -> Result<u64, String> {
    let memory = quinion_size::bytes_of(text).map_err(|error| error.to_string())?;
    let too_few = || format!("a cache of {memory} bytes is too small; give at least {MEMORY_LEAST}");
    (memory >= MEMORY_LEAST).then_some(memory).ok_or_else(too_few)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_everywhere() {
        assert_eq!((memory_of_text("64MB"), memory_of_text("1.5G")), (Ok(64_000_000), Ok(3 << 29)));
        for wrong in ["", "M", "-1", "25%"] {
            assert!(memory_of_text(wrong).is_err_and(|why| why.contains("such as 256M")), "{wrong}");
        }
        for wrong in ["0", "1X", "99999999999999999999", "99999999999G"] {
            assert!(memory_of_text(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_bound_below_the_least_is_none() {
        assert_eq!(memory_of_text("16M"), Ok(MEMORY_LEAST));
        assert!(memory_of_text("16777215").is_err_and(|why| why.contains("too small")));
        assert!(memory_of_text("much").is_err_and(|why| why.contains("such as 256M")));
    }

    #[test]
    fn a_bound_can_be_raised_to_four_times_itself_or_as_far_as_is_said() {
        let bounds = |memory, memory_max| MemoryBounds { memory, memory_max }.in_full();
        assert_eq!(bounds(None, None), Ok((MEMORY, 4 * MEMORY)));
        assert_eq!(bounds(Some(64 << 20), None), Ok((64 << 20, 256 << 20)));
        assert_eq!(bounds(Some(64 << 20), Some(65 << 20)), Ok((64 << 20, 65 << 20)));
        assert_eq!(bounds(Some(64 << 20), Some(32 << 20)), Ok((64 << 20, 64 << 20)));
        assert_eq!(bounds(Some(u64::MAX), None), Ok((u64::MAX, u64::MAX)));
    }

    #[test]
    fn connections_of_one_file_share_its_pages() {
        let process = Process { pid: 0, ..Process::default() };
        let (given, bounds) =
            (MemoryBounds { memory: Some(16 << 20), memory_max: None }, MemoryBounds::default());
        let key = |number, is_immutable| Key { inode: (1, number), is_immutable };
        let one = process.database(key(1, false), given).unwrap();
        let same = process.database(key(1, false), bounds).unwrap();
        assert!(Arc::ptr_eq(&one, &same));
        let other = process.database(key(2, false), bounds).unwrap();
        assert!(!Arc::ptr_eq(&one, &other));
        let immutable = process.database(key(1, true), bounds).unwrap();
        assert!(!Arc::ptr_eq(&one, &immutable));
        drop((one, same));
        let again = process.database(key(1, false), bounds).unwrap();
        assert_eq!(Arc::strong_count(&again), 1);
    }
}
