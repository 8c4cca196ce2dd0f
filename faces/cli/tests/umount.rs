//! A file system that was read from under `run` can be unmounted when its files are closed, as without: the owner
//! closes
//! all files that no program has open before the call goes on. Each turn mounts a fresh one, reads from it until that
//! is served, and unmounts it.
#![cfg(target_os = "linux")]

use std::process::Command;

mod disk;
use disk::{plain, quinion, scratch};

/// Reads files of a fresh file system until they are served, closes them, and unmounts it, some times: by itself, and
/// by programs that it starts.
const PROGRAM: &str = "
import ctypes, os, subprocess, sys
libc, place = ctypes.CDLL(None, use_errno=True), sys.argv[1]
def call(answer):
    assert answer == 0, os.strerror(ctypes.get_errno())
for turn in range(5):
    call(libc.mount(b'none', place.encode(), b'tmpfs', 0, b'size=16m'))
    path = place + '/file'
    with open(path, 'wb') as file: file.write(os.urandom(1 << 20))
    for _ in range(4):
        file = os.open(path, os.O_RDONLY)
        for at in range(0, 1 << 20, 4096): os.pread(file, 4096, at)
        os.close(file)
    if turn % 2: subprocess.run(['cat', path], stdout=subprocess.DEVNULL, check=True)
    if turn < 3: call(libc.umount2(place.encode(), 0))
    else: subprocess.run(['umount', place], check=True)
print('unmounted')
";

#[test]
fn umount_after_close() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can mount");
        return;
    }
    let folder = scratch();
    let place = folder.path().join("place");
    std::fs::create_dir(&place).expect("the disk has room");
    let apart = |command: &mut Command| {
        command.args(["unshare", "-m", "python3", "-c", PROGRAM]).arg(&place);
        command.output().expect("it starts")
    };
    let without = apart(plain("env").arg("-u").arg("LD_PRELOAD"));
    if !without.status.success() {
        println!("SKIPPED: nothing can be mounted here: {without:?}");
        return;
    }
    for attach in ["auto", "at-once"] {
        let mut command = quinion();
        command.args(["run", "--attach", attach, "--memory", "64M", "--report", "none", "--"]);
        let with = apart(&mut command);
        assert_eq!(String::from_utf8_lossy(&with.stdout), "unmounted\n", "{attach}: {with:?}");
    }
}
