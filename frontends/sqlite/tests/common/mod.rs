//! Common: the parts of the tests that run other programs with the extension.
//!
//! ```text
//!   extension    built with the test        python    one whose module loads extensions
//!   Folder       removed at its end         server    shares pages of databases, at a socket in a folder
//! ```

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use quinion_service::Server;

/// The extension that was built with this test.
pub fn extension() -> PathBuf {
    let built = std::env::current_exe().unwrap().with_file_name("libquinion_vfs.so");
    assert!(built.exists(), "{} is not there; build the package first", built.display());
    built
}

/// A Python whose module can load extensions.
pub fn python() -> &'static str {
    let can = |python: &&str| {
        let program = "import sqlite3; sqlite3.connect(':memory:').enable_load_extension(True)";
        let tried = Command::new(python).args(["-c", program]).output();
        tried.is_ok_and(|tried| tried.status.success())
    };
    let found = ["python3", "/usr/bin/python3"].into_iter().find(can);
    found.expect("no python3 whose sqlite3 can load extensions; install Debian's python3 (scripts/setup)")
}

pub struct Folder(pub PathBuf);

impl Folder {
    pub fn below(parent: &Path, name: &str) -> Self {
        let folder = parent.join(format!("quinion-{name}-{}", std::process::id()));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server, in a folder that a socket's path may have, and the socket.
pub fn server(folder: &Folder, memory: u64) -> (Server, PathBuf) {
    let socket = folder.0.join("server.sock");
    let cache = quinion::Cache::builder().memory(memory).build().unwrap();
    let server = Server::builder(cache).revisions(true).start(socket.to_str().unwrap()).unwrap();
    (server, socket)
}
