//! Fsx: the file system exerciser writes, truncates, punches, maps and reads a file at random, checks each read, and
//! finds no fault under `quinion run`; and another program reads from the cache what it wrote through the kernel.
//!
//! ```text
//!   quinion run -- fsx FILE                         a program that writes is left to the kernel as long as it does
//!   quinion run -- sh:  fsx FILE; cat FILE; ...     FILE is written by one program and read by another, again and
//!                                                   again, by one cache: the same sums as without it
//! ```
//!
//! Its operations follow from a seed, so the file is the same with the cache and without it. `fsx` is a crate, which
//! `scripts/setup` installs.

use std::fs;
use std::path::Path;

mod disk;
use disk::{MEMORY, plain, program, quinion, same_in, scratch};

/// All that it can do on Linux, on a file of up to a MiB.
const CONFIG: &str = "\
flen = 1048576
[opsize]
max = 100000
[weights]
close_open = 2
read = 10
write = 10
mapread = 5
mapwrite = 5
invalidate = 1
truncate = 4
fsync = 1
fdatasync = 1
posix_fallocate = 1
punch_hole = 3
sendfile = 2
posix_fadvise = 2
copy_file_range = 2
";

fn configure(folder: &Path) {
    fs::write(folder.join("fsx.toml"), CONFIG).expect("the folder is ours");
}

/// 3000 operations by each seed; 200,000 in a soak.
#[test]
fn fsx_finds_nothing_wrong() {
    let operations = if std::env::var_os("QUINION_SOAK").is_some() { "200000" } else { "3000" };
    for seed in ["1", "2", "3"] {
        let folder = scratch();
        configure(folder.path());
        let mut run = quinion();
        run.args(["run", "--attach", "at-once", "--memory", MEMORY, "--"]).arg(program("fsx"));
        run.args(["-f", "fsx.toml", "-N", operations, "-S", seed, "file"]);
        let output = run.current_dir(folder.path()).output().expect("our own command starts");
        assert!(output.status.success(), "seed {seed}: {output:?}");
    }
}

#[test]
fn fsx_finds_a_planted_error() {
    let folder = scratch();
    configure(folder.path());
    let finds = |step: u32| {
        let mut fsx = plain(program("fsx"));
        fsx.args(["-f", "fsx.toml", "-N", "3000", "-S", "1", "--inject", &step.to_string(), "file"]);
        let output = fsx.current_dir(folder.path()).output().expect("fsx starts");
        !output.status.success()
    };
    assert!((500..520).any(finds), "twenty operations were left out, and no run found one");
}

#[test]
fn a_file_that_fsx_wrote_is_read_right_by_another_program_of_the_cache() {
    let folder = scratch();
    configure(folder.path());
    let script = "
        for seed in 1 2 3 4 5 6 7 8; do
            fsx -f fsx.toml -N 200 -S $seed file || exit 9
            cat file | cksum
            cat file | cksum
            printf x | dd of=file bs=1 seek=$((seed * 50000)) conv=notrunc status=none
            cat file | cksum
        done
        wc -c < file";
    let report = same_in(folder.path(), &["sh", "-c", script]);
    assert!(report.served() > 0, "cat was served nothing, so this shows nothing: {report:?}");
}
