//! Disk: a cache with a disk tier, started anew, reads objects of before without a GET.
//!
//! What it must never do is to show bytes of another version, or of another store: an object that changed has another
//! ETag, stores have names, and a store without a name takes no part.

use std::sync::Arc;

use object_store::path::Path;
use quinion::{Cache, DiskOptions};
use quinion_object::{ObjectCache, Options};
use quinion_testing_s3::{Server, check};

const LEN: usize = (5 << 20) + 321;

fn node(server: &Server, folder: &std::path::Path, name: Option<&str>) -> ObjectCache {
    let disk = DiskOptions::new(folder, 64 << 20);
    let cache = Cache::builder().memory(32 << 20).disk(disk).build().unwrap();
    let options = match name {
        Some(name) => Options::default().store_name(name),
        None => Options::default(),
    };
    ObjectCache::new(cache, Arc::clone(&server.store()) as Arc<_>, options).unwrap()
}

fn read_all(objects: &ObjectCache, version: u32) {
    let file = objects.open(&Path::from("object")).unwrap();
    let mut buffer = vec![0; LEN];
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), LEN);
    check(version, 0, &buffer);
}

#[test]
fn a_restart_reads_without_a_get_until_the_object_changes() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::with_object(LEN);
    read_all(&node(&server, folder.path(), Some("s3://bucket")), 1);
    let gets = server.control.gets();
    assert!(gets > 0);
    for _ in 0..2 {
        read_all(&node(&server, folder.path(), Some("s3://bucket")), 1);
        assert_eq!(server.control.gets(), gets, "the disk has it");
    }
    let version = server.control.change("object");
    read_all(&node(&server, folder.path(), Some("s3://bucket")), version);
    assert!(server.control.gets() > gets);
}

#[test]
fn stores_of_two_names_have_nothing_in_common() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::with_object(LEN);
    read_all(&node(&server, folder.path(), Some("s3://a")), 1);
    let gets = server.control.gets();
    read_all(&node(&server, folder.path(), Some("s3://b")), 1);
    assert!(server.control.gets() > gets, "the other store may have other bytes under that ETag");
}

#[test]
fn a_store_without_a_name_is_not_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::with_object(LEN);
    let objects = node(&server, folder.path(), None);
    read_all(&objects, 1);
    assert_eq!(objects.cache().disk_stats().unwrap().put_pages, 0);
}
