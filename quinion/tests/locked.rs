//! Locked: the system's flags of the cache's memory.
//!
//! One test, because a limit on locked memory is the whole process's.

use std::fs;

use quinion::internals::serving::ServedCache;
use quinion::{Cache, ErrorKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// The flags of the mapping of the cache's file, as in `/proc/self/smaps`.
fn flags(cache: &Cache, arena: bool) -> Vec<String> {
    let share = cache.arena().share();
    let file = if arena { share.arena_fd() } else { share.control_fd() };
    let inode = rustix::fs::fstat(file).unwrap().st_ino.to_string();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| line.split_whitespace().nth(4) != Some(&inode));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).expect("it is mapped here");
    flags.split_whitespace().map(String::from).collect()
}

fn has(cache: &Cache, flag: &str) -> [bool; 2] {
    [true, false].map(|arena| flags(cache, arena).iter().any(|f| f == flag))
}

#[test]
fn memory_is_left_out_of_dumps_and_children_and_locked_if_asked() {
    let small = || Cache::builder().memory(Cache::MEMORY_MIN);
    let cache = small().build().unwrap();
    assert_eq!(has(&cache, "dd"), [true; 2], "left out of core dumps");
    assert_eq!(has(&cache, "dc"), [true; 2], "left out of forked children");
    assert_eq!(has(&cache, "lo"), [false; 2]);
    match small().lock_memory(true).build() {
        Ok(locked) => {
            assert_eq!(has(&locked, "lo"), [true; 2]);
            assert_eq!(has(&locked, "dd"), [true; 2]);
            reads_and_resizes(&locked);
        }
        Err(error) => assert!(is_limited() && error.to_string().contains("RLIMIT_MEMLOCK"), "{error}"),
    }
    // Without the capability and with a limit too low, it is refused by name and number.
    let limit = Rlimit { current: Some(3 << 20), maximum: getrlimit(Resource::Memlock).maximum };
    setrlimit(Resource::Memlock, limit).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::IPC_LOCK);
            set_capabilities(None, CapabilitySets { ..sets }).unwrap();
            let error = small().lock_memory(true).build().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Build);
            let said = error.to_string();
            assert!(said.contains("RLIMIT_MEMLOCK") && said.contains("3145728 bytes"), "{said}");
            assert!(said.contains("lock_memory"), "{said}");
            println!("{said}");
            small().build().unwrap();
        });
    });
}

fn is_limited() -> bool {
    let may = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    !may && getrlimit(Resource::Memlock).current.is_some_and(|bytes| bytes < Cache::MEMORY_MIN)
}

/// A locked cache grows, and gives back what it is asked to, like any other.
fn reads_and_resizes(cache: &Cache) {
    let large = Cache::builder().memory(2 * Cache::MEMORY_MIN).lock_memory(true).build().unwrap();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    fs::write(&path, vec![7; 40 << 20]).unwrap();
    for cache in [cache, &large] {
        let file = cache.open(&path).unwrap();
        let mut buffer = vec![0; 1 << 20];
        for position in (0..40).map(|mib| mib << 20) {
            assert_eq!(file.read_at(&mut buffer, position).unwrap(), buffer.len());
            assert!(buffer.iter().all(|byte| *byte == 7));
        }
    }
    let taken = || rustix::fs::fstat(large.arena().share().arena_fd()).unwrap().st_blocks as u64 * 512;
    let before = taken();
    let resized = large.resize(Cache::MEMORY_MIN).unwrap();
    assert!(resized.returned_bytes > 0 && resized.slack_bytes == 0, "{resized:?}");
    assert_eq!(taken(), before - resized.returned_bytes, "locked pages go back too");
    large.check().unwrap();
}
