//! Boto: the SDK for Python, as a process that is told when to begin.
//!
//! It writes the objects, signs URLs of them for the bare client, and reads them: it says "ready" when its threads run
//! and each has read once, begins at a line from this process, and says how many seconds all reads took.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::servers::{At, BUCKET, KEY, OBJECT_BYTES, OBJECTS, SECRET, Servers};
use super::{Gets, Measured};
use crate::harness::Unmeasured;

const PROGRAM: &str = include_str!("boto.py");

struct Client(Child);

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

fn start(python: &Path, address: SocketAddr, words: &[String]) -> Result<Client, Unmeasured> {
    let mut command = Command::new(python);
    command.args(["-c", PROGRAM, &format!("http://{address}"), BUCKET]);
    command.args([OBJECTS.to_string(), OBJECT_BYTES.to_string()]).args(words);
    command.env("AWS_ACCESS_KEY_ID", KEY).env("AWS_SECRET_ACCESS_KEY", SECRET);
    command.env("AWS_DEFAULT_REGION", "us-east-1").env("AWS_EC2_METADATA_DISABLED", "true");
    command.env("AWS_CONFIG_FILE", "/dev/null").env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    Ok(Client(command.spawn()?))
}

fn all_lines(mut client: Client) -> Result<Vec<String>, Unmeasured> {
    let out = BufReader::new(client.0.stdout.take().expect("it is a pipe"));
    let lines = out.lines().collect::<Result<Vec<_>, _>>()?;
    let ended = client.0.wait()?;
    let failed = || Unmeasured::Failed(format!("the client in Python ended with {ended}"));
    if ended.success() { Ok(lines) } else { Err(failed()) }
}

pub fn write(python: &Path, address: SocketAddr) -> Result<(), Unmeasured> {
    all_lines(start(python, address, &["put".to_owned()])?).map(drop)
}

pub fn urls(python: &Path, address: SocketAddr) -> Result<Vec<String>, Unmeasured> {
    let urls = all_lines(start(python, address, &["urls".to_owned()])?)?;
    if urls.len() == OBJECTS { Ok(urls) } else { Err(Unmeasured::Failed("there are URLs missing".into())) }
}

/// Reads objects, after it has read all of them once.
pub fn read(servers: &Servers, at: At, gets: Gets) -> Result<Measured, Unmeasured> {
    let words = ["get".to_owned(), gets.gets.to_string(), gets.connections.to_string()];
    let mut client = start(&servers.python, servers.address(at), &words)?;
    let mut out = BufReader::new(client.0.stdout.take().expect("it is a pipe"));
    let mut line = String::new();
    let mut next = |line: &mut String| {
        line.clear();
        out.read_line(line).map(drop)
    };
    next(&mut line)?;
    if line != "ready\n" {
        return Err(Unmeasured::Failed("the client in Python does not read; see above".into()));
    }
    let before = servers.cpu_seconds();
    client.0.stdin.take().expect("it is a pipe").write_all(b"go\n")?;
    next(&mut line)?;
    let cpu_seconds = servers.cpu_seconds() - before;
    let seconds = line.trim().parse();
    let seconds =
        seconds.map_err(|_| Unmeasured::Failed("the client in Python has failed; see above".into()))?;
    Ok(Measured { seconds, cpu_seconds })
}
