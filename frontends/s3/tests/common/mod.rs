//! Common: the program as a process over versitygw, for the test programs of this folder.
//!
//! Dropping the value ends the process and removes the folder of its keys. Its standard error is read all the time, and
//! kept.

// Each test program has a part of it.
#![allow(dead_code)]

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path as FilePath;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, spawn};

use object_store::aws::AmazonS3;
use quinion_testing_s3 as s3;

use crate::real::{self, Server, or_skipped};

/// The access key by which clients sign.
pub const KEY: &str = "endpoint-key";
pub const SECRET: &str = "endpoint-secret";

pub struct Endpoint {
    pub process: Child,
    pub address: SocketAddr,
    /// Standard error of the process so far.
    pub said: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// The program over such a server, with keys.
pub fn command(server: &Server, folder: &FilePath, arguments: &[&str]) -> Command {
    let mut command = command_alone(folder, arguments);
    command.env("AWS_ACCESS_KEY_ID", real::KEY).env("AWS_SECRET_ACCESS_KEY", real::SECRET);
    command.env("AWS_REGION", "us-east-1").env("AWS_ENDPOINT_URL_S3", server.endpoint());
    command
}

/// The program with keys of its own, and neither a store nor credentials of this process's environment.
fn command_alone(folder: &FilePath, arguments: &[&str]) -> Command {
    let keys = folder.join("keys");
    std::fs::write(&keys, format!("{KEY} {SECRET}\n")).unwrap();
    std::fs::set_permissions(&keys, Permissions::from_mode(0o600)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-s3"));
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.to_string_lossy().starts_with("AWS_")).for_each(|name| {
        command.env_remove(name);
    });
    command.env_remove("NOTIFY_SOCKET").args(["serve", "--listen", "127.0.0.1:0", "--key-file"]).arg(keys);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

impl Endpoint {
    /// Starts it, and waits until it listens.
    pub fn start(server: &Server, arguments: &[&str]) -> Self {
        Self::start_with(server, arguments, |_| {})
    }

    /// Like `start`, with a change to the command.
    pub fn start_with(server: &Server, arguments: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = command(server, folder.path(), arguments);
        change(&mut command);
        Self::of(command, folder)
    }

    /// Starts it without a store's address, and without credentials.
    pub fn start_alone(arguments: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = command_alone(folder.path(), arguments);
        change(&mut command);
        Self::of(command, folder)
    }

    fn of(mut command: Command, folder: tempfile::TempDir) -> Self {
        let mut process = command.spawn().unwrap();
        let mut events = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        events.read_line(&mut line).unwrap();
        let address =
            line.split("http://").nth(1).expect(&line).trim_end_matches(['"', '}', '\n']).parse().unwrap();
        let said = Arc::new(Mutex::new(line));
        let (said_there, mut line) = (Arc::clone(&said), String::new());
        let reader = spawn(move || {
            while events.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                said_there.lock().unwrap().push_str(&line);
                line.clear();
            }
        });
        Self { process, address, said, reader: Some(reader), _folder: folder }
    }

    /// A client of a bucket there.
    pub fn bucket(&self, name: &str) -> AmazonS3 {
        let builder =
            real::builder(self.address, name).with_access_key_id(KEY).with_secret_access_key(SECRET);
        builder.with_http_connector(s3::Connector).build().unwrap()
    }

    /// The answer to a raw request.
    pub fn raw(&self, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// The answer to an unsigned GET with these header lines.
    pub fn get(&self, target: &str, lines: &str) -> String {
        let host = self.address;
        self.raw(
            format!("GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{lines}\r\n").as_bytes(),
        )
    }
}

/// versitygw; without it, a line says that the test is skipped.
pub fn versitygw(test: &str) -> Option<Server> {
    or_skipped(Server::versitygw(), test, "versitygw")
}

/// A client of a new bucket of the server's own.
pub fn below(server: &Server, name: &str) -> AmazonS3 {
    server.bucket_builder(name).with_http_connector(s3::Connector).build().unwrap()
}

/// A runtime of this thread's.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}
