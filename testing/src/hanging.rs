//! Hanging: a file system in user space that can be told to hang.
//!
//! Its server is a small program (`fuse.py`), which answers until it is told to stop. A program that asks then waits in
//! the kernel, and cannot even be killed, until the server has ended. So the server is killed first at the end of a
//! test, even of one that fails.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// A file system whose server is killed at the end, so that no process hangs for ever.
pub struct Hanging {
    folder: tempfile::TempDir,
    server: Child,
    /// The mounted file, once it was requested. It is closed after the server has ended: before, no close is answered.
    file: OnceLock<File>,
}

impl Hanging {
    /// `None`, and a message, where none can be mounted.
    pub fn new() -> Option<Self> {
        Self::hanging_at(&[])
    }
    /// As [`Self::new`], but when told to hang, it leaves only the closes of a file (`flush`) unanswered. A `path` with
    /// a number behind it, up to 99, is another file.
    #[allow(dead_code, reason = "not every test that includes this needs it")]
    pub fn in_flush() -> Option<Self> {
        Self::hanging_at(&["25"])
    }
    fn hanging_at(operations: &[&str]) -> Option<Self> {
        let is_root =
            std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
        if !is_root || !std::path::Path::new("/dev/fuse").exists() {
            println!("SKIPPED: it takes root and /dev/fuse to mount a file system in user space");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let (point, stop) = (folder.path().join("point"), folder.path().join("stop"));
        std::fs::create_dir(&point).expect("the disk has room");
        let mut command = Command::new("python3");
        command.args(["-c", include_str!("fuse.py")]).args([&point, &stop]).args(operations);
        let mut server = command.stdout(Stdio::piped()).spawn().expect("python3");
        let mut said = String::new();
        BufReader::new(server.stdout.take().expect("it is piped"))
            .read_line(&mut said)
            .expect("it says something");
        assert_eq!(said, "mounted\n");
        Some(Self { folder, server, file: OnceLock::new() })
    }
    /// Path of the file, which is a mebibyte of zeros.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("point/file")
    }
    /// The file, open for reading. A process that has it open when it hangs can start no other: the child closes it
    /// before it becomes another program, and no close is answered.
    pub fn file(&self) -> &File {
        self.file.get_or_init(|| File::open(self.path()).expect("it answers"))
    }
    /// From now on no question is answered.
    pub fn hang(&self) {
        std::fs::write(self.folder.path().join("stop"), "").expect("the disk has room");
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        // With its server the connection ends, and a waiting request gets an error; only then is the thread joined.
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = Command::new("umount").arg("-l").arg(self.folder.path().join("point")).status();
    }
}
