//! A B-tree engine on Quinion: redb, with a cached file as its storage, is byte for byte the database that it is on a
//! plain file.
//!
//! The adapter is the whole of what an engine needs: `read_exact_at`, `write_all_at`, `set_len`, `metadata`,
//! `sync_data` and a lock. docs/library.md has it as well.
#![cfg(not(quinion_model))]

use std::io;
use std::path::Path;

use quinion::{Cache, File, OpenOptions, Stats};
use redb::{Builder, Database, Durability, ReadableTable, StorageBackend, TableDefinition};

/// redb's storage on a file of a cache.
#[derive(Debug)]
struct Cached(File);

impl Cached {
    fn open(cache: &Cache, path: &Path) -> io::Result<Self> {
        let file = cache.open_with(path, OpenOptions::new().write(true).create(true))?;
        if !file.try_lock()? {
            return Err(io::ErrorKind::WouldBlock.into()); // another process has the database open
        }
        Ok(Self(file))
    }
}

impl StorageBackend for Cached {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        Ok(self.0.set_len(len)?)
    }
    fn sync_data(&self, _eventual: bool) -> io::Result<()> {
        Ok(self.0.sync_data()?)
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        Ok(self.0.write_all_at(data, offset)?)
    }
}

const TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("rows");

fn work(database: &Database) {
    let mut x = 0x2545_f491_4f6c_dd1d_u64;
    for round in 0..12_u64 {
        let mut transaction = database.begin_write().unwrap();
        transaction.set_durability(if round.is_multiple_of(3) {
            Durability::Immediate
        } else {
            Durability::None
        });
        {
            let mut table = transaction.open_table(TABLE).unwrap();
            for _ in 0..400 {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                let (key, len) = (x % 3000, (x >> 20) as usize % 3000);
                if x.is_multiple_of(5) {
                    table.remove(key).unwrap();
                } else {
                    table.insert(key, vec![(x >> 8) as u8; len].as_slice()).unwrap();
                }
            }
        }
        if round == 7 { transaction.abort().unwrap() } else { transaction.commit().unwrap() }
    }
}

fn rows(database: &Database) -> Vec<(u64, Vec<u8>)> {
    let transaction = database.begin_read().unwrap();
    let table = transaction.open_table(TABLE).unwrap();
    let rows = table.iter().unwrap();
    rows.map(|row| row.map(|(key, value)| (key.value(), value.value().to_vec())).unwrap()).collect()
}

#[test]
fn a_database_on_a_cached_file_is_the_one_on_a_plain_file() {
    let folder = tempfile::tempdir().unwrap();
    let [plain_path, cached_path] = ["plain", "cached"].map(|name| folder.path().join(name));
    // A small cache of redb's own, so that most of its reads come to the storage.
    let redb = || {
        let mut builder = Builder::new();
        builder.set_cache_size(1 << 20);
        builder
    };
    let plain = redb().create(&plain_path).unwrap();
    work(&plain);
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let backend = Cached::open(&cache, &cached_path).unwrap();
    assert!(Cached::open(&cache, &cached_path).is_err(), "a second one is kept out");
    let cached = redb().create_with_backend(backend).unwrap();
    work(&cached);
    assert_eq!(rows(&cached), rows(&plain));
    drop((plain, cached));
    cache.sync_all().unwrap();
    let [plain, cached] = [&plain_path, &cached_path].map(|path| std::fs::read(path).unwrap());
    let differ = plain.iter().zip(&cached).enumerate().filter(|(_, (a, b))| a != b).map(|(at, _)| at);
    let first: Vec<usize> = differ.take(20).collect();
    assert!(plain == cached, "the files differ: {} and {} bytes, at {first:?}", plain.len(), cached.len());
    // redb itself opens what was written through the cache, and the other way round.
    let mut again = Builder::new().open(&cached_path).unwrap();
    assert!(again.check_integrity().unwrap());
    let theirs = Builder::new().create_with_backend(Cached::open(&cache, &plain_path).unwrap()).unwrap();
    assert_eq!(rows(&theirs), rows(&again));
    let Stats { hits, device_errors, .. } = cache.stats();
    assert!(hits > 0 && device_errors == 0);
}

/// A database that another process made longer is as long here, too, without a read that meets its end.
#[test]
fn growth_by_another_process_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("database");
    drop(Builder::new().create(&path).unwrap());
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let reader = Cached(cache.open(&path).unwrap());
    let before = reader.len().unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(before + 4096).unwrap();
    assert_eq!(reader.len().unwrap(), before + 4096);
}
