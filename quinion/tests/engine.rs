//! Engine: real files and devices at their edges, by every mechanism.
//!
//! Sectors of 512 and of 4096 bytes, whole devices and file systems on them; a file that grows under its readers; files
//! in memory, where direct reads cannot be had, and under an overlay; and threads that are interrupted all the time.
//!
//! Tests that need root and a loop device are skipped without these, and print a line that begins with `SKIPPED`.

use quinion_testing::content;
use quinion_testing::hazard;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use quinion::backend::Mechanism;
use quinion::{Cache, File};
use quinion_testing::block_on::block_on;
use quinion_testing::hazard::Target;

const PAGE: u64 = 4096;
const MECHANISMS: [Mechanism; 2] = [Mechanism::Ring, Mechanism::Threads];
/// Around sectors, pages and requests of 256 KiB.
const SIZES: [u64; 16] =
    [0, 1, 511, 512, 513, 1024, 3584, 4095, 4096, 4097, 4608, 8191, 262_143, 262_144, 262_145, 1_049_088];

fn cache(mechanism: Mechanism) -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).mechanism(mechanism).build().unwrap()
}

fn bytes(len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    content::fill_content(&mut bytes, 1, 0, 0);
    bytes
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn read_and_check(file: &File, way: u64, position: u64, len: usize) -> usize {
    let mut buffer = vec![0xee; len];
    let bytes = match way % 3 {
        0 => file.read_at(&mut buffer, position).unwrap(),
        1 => block_on(file.read_at_async(&mut buffer, position)).unwrap(),
        _ => {
            let pin = file.pin(position, len).unwrap();
            let got: Vec<u8> = pin.chunks().flatten().copied().collect();
            buffer[..got.len()].copy_from_slice(&got);
            got.len()
        }
    };
    content::verify(&buffer[..bytes], 1, position).unwrap();
    bytes
}

fn check_ends(file: &File, size: u64) {
    assert_eq!(file.len(), size);
    for way in 0..3 {
        file.dont_need(0, size + PAGE).unwrap();
        let mut at = 0;
        while at < size {
            let bytes = read_and_check(file, way, at, (size - at) as usize + 1);
            assert!(bytes > 0, "byte {at} of {size}");
            at += bytes as u64;
        }
        assert_eq!(read_and_check(file, way, size, 10), 0);
        for back in [1, 511, 512, 513, 4096, 4097] {
            file.dont_need(0, size + PAGE).unwrap();
            let at = size.saturating_sub(back);
            assert_eq!(read_and_check(file, way, at, 10_000), (size - at) as usize);
        }
    }
}

fn check_files(folder: &Path) -> Vec<bool> {
    let mut direct = Vec::new();
    for mechanism in MECHANISMS {
        let cache = cache(mechanism);
        for size in SIZES {
            let path = folder.join(size.to_string());
            fs::write(&path, bytes(size)).unwrap();
            let file = cache.open(&path).unwrap();
            check_ends(&file, size);
            direct.push(file.is_direct());
        }
        cache.check().unwrap();
    }
    direct
}

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let run = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    if run.status.success() {
        Ok(out.trim().to_owned())
    } else {
        Err(format!("{program} {}: {}", arguments.join(" "), err.trim()))
    }
}

/// A block device over a file, detached when this is dropped.
struct Loop {
    device: String,
}

impl Loop {
    fn over(file: &Path, sector: u32) -> Result<Self, String> {
        let sector = sector.to_string();
        let file = file.to_str().expect("a path in words");
        let device = run("losetup", &["--find", "--show", "--sector-size", &sector, file])?;
        Ok(Self { device })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run("losetup", &["--detach", &self.device]);
    }
}

/// A mounted file system, unmounted when this is dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(arguments: &[&str], at: &Path) -> Result<Self, String> {
        fs::create_dir_all(at).map_err(|e| e.to_string())?;
        let at = at.to_str().expect("a path in words");
        run("mount", &[arguments, &[at]].concat())?;
        Ok(Self(at.into()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = run("umount", &[self.0.to_str().expect("a path in words")]);
    }
}

fn check_sectors(sector: u32) -> Result<(), String> {
    let folder = folder();
    let image = folder.path().join("image");
    // Not a multiple of a page, where sectors are smaller.
    let size = (1 << 20) + u64::from(sector);
    fs::write(&image, bytes(size)).unwrap();
    {
        let device = Loop::over(&image, sector)?;
        for mechanism in MECHANISMS {
            let cache = cache(mechanism);
            let file = cache.open(&device.device).unwrap();
            check_ends(&file, size);
            println!("{} of {sector}-byte sectors, direct: {}", device.device, file.is_direct());
            cache.check().unwrap();
        }
    }
    fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let device = Loop::over(&image, sector)?;
    run("mkfs.ext4", &["-q", "-F", &device.device])?;
    let mounted = Mount::new(&[&device.device], &folder.path().join("mounted"))?;
    let direct = check_files(&mounted.0);
    println!("ext4 on {sector}-byte sectors, direct: {}", direct.iter().all(|direct| *direct));
    Ok(())
}

fn or_skipped(test: &str, outcome: Result<(), String>) {
    if let Err(why) = outcome {
        println!("SKIPPED: {test}: {why}");
        eprintln!("SKIPPED: {test}: {why}");
    }
}

#[test]
fn sectors_of_512_bytes_where_loop_devices_can_be_made() {
    or_skipped("sectors of 512 bytes", check_sectors(512));
}

#[test]
fn sectors_of_4096_bytes_where_loop_devices_can_be_made() {
    or_skipped("sectors of 4096 bytes", check_sectors(4096));
}

#[test]
fn files_of_every_end_on_a_disk() {
    check_files(folder().path());
}

#[test]
fn files_of_every_end_in_memory_where_there_is_such_a_folder() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return or_skipped("files in memory", Err("no /dev/shm to write to".into()));
    };
    check_files(folder.path());
}

/// Mounts an empty overlay: its lower folder, and the mount.
fn overlay(folder: &Path) -> Result<(PathBuf, Mount), String> {
    let [lower, upper, work, merged] = ["lower", "upper", "work", "merged"].map(|name| folder.join(name));
    for made in [&lower, &upper, &work] {
        fs::create_dir(made).unwrap();
    }
    let [under, over, beside] = [&lower, &upper, &work].map(|path| path.display());
    let options = format!("lowerdir={under},upperdir={over},workdir={beside}");
    let mounted = Mount::new(&["-t", "overlay", "overlay", "-o", &options], &merged)?;
    Ok((lower, mounted))
}

#[test]
fn files_under_an_overlay_where_one_can_be_mounted() {
    let folder = folder();
    let (lower, mounted) = match overlay(folder.path()) {
        Ok(mounted) => mounted,
        Err(why) => return or_skipped("overlay", Err(why)),
    };
    // The files are of the lower folder first; once written to, they are of the upper one.
    for size in SIZES {
        fs::write(lower.join(format!("below-{size}")), bytes(size)).unwrap();
    }
    for mechanism in MECHANISMS {
        let cache = cache(mechanism);
        for size in SIZES {
            let path = mounted.0.join(format!("below-{size}"));
            check_ends(&cache.open(&path).unwrap(), size);
        }
        cache.check().unwrap();
    }
    check_files(&mounted.0);
}

/// 1. A handle reads a file of an overlay's lower folder.
/// 2. Another handle of the cache is opened for writing: the kernel copies the file to the upper folder, where it is
///    born again. The cache takes it for another file.
/// 3. The second handle writes. The first reads the bytes from before, which are cached, for as long as they are.
#[test]
fn a_file_of_an_overlay_is_one_file_when_it_was_copied_up() {
    let folder = folder();
    let (lower, mounted) = match overlay(folder.path()) {
        Ok(mounted) => mounted,
        Err(why) => return or_skipped("copies in an overlay", Err(why)),
    };
    let size = 3 * PAGE as usize;
    for name in ["ring", "threads"] {
        fs::write(lower.join(name), vec![1; size]).unwrap();
    }
    for (mechanism, name) in MECHANISMS.into_iter().zip(["ring", "threads"]) {
        let (cache, path) = (cache(mechanism), mounted.0.join(name));
        let (reader, mut found) = (cache.open(&path).unwrap(), vec![0; size]);
        reader.read_exact_at(&mut found, 0).unwrap();
        let writer = cache.open_with(&path, quinion::OpenOptions::new().write(true)).unwrap();
        let mut right = vec![1; size];
        for at in [PAGE as usize, 0] {
            right[at..at + 100].fill(2);
            writer.write_all_at(&right[at..at + 100], at as u64).unwrap();
            reader.read_exact_at(&mut found, 0).unwrap();
            assert!(found == right, "{name}, byte {at} is {}", found[at]);
            writer.sync_all().unwrap();
            reader.dont_need(0, u64::MAX >> 12).unwrap();
            reader.read_exact_at(&mut found, 0).unwrap();
            assert!(found == right, "{name}, byte {at} is {} when it was synced", found[at]);
        }
        cache.check().unwrap();
    }
}

/// 1. Two names of one file of an overlay's lower folder are opened, which have one inode number.
/// 2. Another program writes to the first: now it is a copy, for handles from before as well.
/// 3. What was opened reads its own file's bytes, whichever handle's descriptor the cache reads by.
///
/// So reading by a handle is refused; a handle for writing is one of the copy, which no other name shares.
#[test]
fn two_names_of_one_file_of_an_overlay_do_not_share_their_pages() {
    let folder = folder();
    let (lower, mounted) = match overlay(folder.path()) {
        Ok(mounted) => mounted,
        Err(why) => return or_skipped("names in an overlay", Err(why)),
    };
    for (mechanism, name) in MECHANISMS.into_iter().zip(["ring", "threads"]) {
        let names = ["first", "second"].map(|which| format!("{name}-{which}"));
        fs::write(lower.join(&names[0]), vec![1; PAGE as usize]).unwrap();
        fs::hard_link(lower.join(&names[0]), lower.join(&names[1])).unwrap();
        let (cache, paths) = (cache(mechanism), names.map(|name| mounted.0.join(name)));
        let opened = paths.each_ref().map(|path| cache.open(path));
        OpenOptions::new().write(true).open(&paths[0]).unwrap().write_all(&[2; 100]).unwrap();
        for (file, path) in opened.iter().zip(&paths) {
            let Ok(file) = file else { continue };
            let mut found = vec![0; PAGE as usize];
            file.read_exact_at(&mut found, 0).unwrap();
            assert!(found == fs::read(path).unwrap(), "{} begins with {}", path.display(), found[0]);
        }
        for refused in opened {
            let why = refused.expect_err("a handle of one of two names").to_string();
            assert!(why.contains("one of 2 names of a file of overlayfs"), "{why}");
        }
        let writer = cache.open_with(&paths[1], quinion::OpenOptions::new().write(true)).unwrap();
        writer.write_all_at(&[3; 10], 0).unwrap();
        writer.sync_all().unwrap();
        let mut found = vec![0; PAGE as usize];
        writer.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(
            (found[..11].to_vec(), found[PAGE as usize - 1]),
            ([[3; 10].to_vec(), vec![1]].concat(), 1)
        );
        assert_eq!(fs::read(&paths[1]).unwrap(), found);
        cache.check().unwrap();
    }
}

/// A writer appends pieces of odd sizes; readers follow it to the end, by every way.
#[test]
fn a_file_that_grows_is_followed_by_all_its_readers() {
    const END: u64 = 3_000_000;
    for mechanism in MECHANISMS {
        let (folder, cache) = (folder(), cache(mechanism));
        let path = folder.path().join("growing");
        let mut plain = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        let file = cache.open(&path).unwrap();
        thread::scope(|scope| {
            for way in 0..3 {
                let file = file.clone();
                scope.spawn(move || {
                    let mut at = 0;
                    while at < END {
                        at += read_and_check(&file, way, at, 70_000) as u64;
                    }
                    assert_eq!(at, END);
                });
            }
            let content = bytes(END);
            let (mut at, mut step) = (0, 0);
            while at < content.len() {
                step += 1;
                let piece = (step * 7919 % 20_000 + 1).min(content.len() - at);
                plain.write_all(&content[at..at + piece]).unwrap();
                at += piece;
                thread::yield_now();
            }
        });
        assert_eq!(file.len(), END);
        cache.check().unwrap();
    }
}

fn interrupted(mechanism: Mechanism) {
    const ROUNDS: u64 = 60;
    let (folder, cache) = (folder(), cache(mechanism));
    let size = 4 << 20;
    let path = folder.path().join("content");
    fs::write(&path, bytes(size)).unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    let file = cache.open(&path).unwrap();
    hazard::install_interruption();
    let (done, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    let (before, (tell, told)) = (hazard::signals_taken(), mpsc::channel());
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            tell.send(Target::me()).unwrap();
            let mut round = 0;
            while round < ROUNDS || hazard::signals_taken() - before < 500 {
                file.dont_need(0, size).unwrap();
                for way in 0..3 {
                    let at = (round * 104_729 + way * 1_000_003) % (size - 70_000);
                    assert_eq!(read_and_check(&file, way, at, 60_000), 60_000);
                    reads.fetch_add(1, Ordering::Relaxed);
                }
                round += 1;
            }
            done.store(true, Ordering::Relaxed);
        });
        let target = told.recv().unwrap();
        while !done.load(Ordering::Relaxed) && !reader.is_finished() {
            target.hit();
            thread::sleep(Duration::from_micros(50));
        }
    });
    assert!(hazard::signals_taken() - before >= 500);
    assert_eq!(cache.stats().device_errors, 0);
    cache.check().unwrap();
}

#[test]
fn a_reader_that_is_interrupted_all_the_time_reads_right() {
    if hazard::in_a_process_of_its_own("a_reader_that_is_interrupted_all_the_time_reads_right") {
        MECHANISMS.into_iter().for_each(interrupted);
    }
}
