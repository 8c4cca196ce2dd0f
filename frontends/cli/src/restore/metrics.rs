//! Metrics: the server's numbers for Prometheus, in a file or by HTTP.
//!
//! ```text
//!   a file      written anew every second, beside itself and moved over: a process that reads it finds a whole one;
//!               a file of something else is not replaced
//!   an address  GET / or /metrics -> the text, HTTP/1.0, one request for each connection
//! ```
//!
//! The thread that waits for signals answers one client at a time. One that takes more than a second to send its
//! request, or as long again to take the answer, or that sends more than 8 KiB, is closed. Only the end of the command
//! has to wait for that.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use quinion_vm::RestoreStats;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use quinion_cli::sys::EndSignals;

const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// The beginning of the numbers, as files of them have it.
const NUMBERS_BEGIN: &[u8] = b"# HELP quinion_restore_";

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MetricsTarget {
    File(PathBuf),
    Address(SocketAddr),
}

impl FromStr for MetricsTarget {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(address) => Ok(Self::Address(address)),
            Err(_) if text.is_empty() => Err("name a file, or an address such as 127.0.0.1:9100".to_owned()),
            // `localhost:9100`, `:9100` and `9100` are not meant as files, nor is a port that cannot exist.
            Err(_) if !text.contains('/') && ends_in_a_port(text) => Err(format!(
                "this is not an address; write one in numbers, such as 127.0.0.1:9100, or ./{text} for a file"
            )),
            Err(_) => Ok(Self::File(text.into())),
        }
    }
}

fn ends_in_a_port(text: &str) -> bool {
    let port = text.rsplit(':').next().unwrap_or_default();
    !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit())
}

/// A place where the numbers are to be had.
#[derive(Debug)]
pub enum Metrics {
    File(PathBuf),
    Asked(TcpListener),
}

impl Metrics {
    pub fn start(place: &MetricsTarget) -> Result<Self, String> {
        match place {
            MetricsTarget::File(path) => {
                write(path, "").map_err(|error| {
                    let path = path.display();
                    format!(
                        "cannot write metrics to {path}: {error}; name another file, in a folder that you may write to"
                    )
                })?;
                Ok(Self::File(path.clone()))
            }
            MetricsTarget::Address(address) => {
                let listening = TcpListener::bind(address).and_then(|listener| {
                    listener.set_nonblocking(true)?;
                    Ok(listener)
                });
                listening.map(Self::Asked).map_err(|error| {
                    format!(
                        "cannot listen at {address} for metrics: {error}; name an address of this machine \
                         whose port is free, such as 127.0.0.1:0"
                    )
                })
            }
        }
    }

    /// Writes the numbers, if they go to a file. A failure is no reason to end; the next second may be better.
    pub fn keep(&self, stats: &RestoreStats) {
        if let Self::File(path) = self {
            let _ = write(path, &stats.prometheus());
        }
    }

    pub fn answer(&self, stats: impl Fn() -> RestoreStats) {
        let Self::Asked(listener) = self else { return };
        // Only one: a signal may have come meanwhile, and the next turn finds further clients.
        if let Ok((asker, _)) = listener.accept() {
            // Errors here concern the client alone.
            let _ = answer(asker, &stats);
        }
    }

    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::File(_) => None,
            Self::Asked(listener) => listener.local_addr().ok(),
        }
    }
}

/// Waits for a signal, for a client, or for so long. Returns whether it was a signal.
pub fn wait(ending: &EndSignals, metrics: Option<&Metrics>, at_most: Duration) -> bool {
    let mut fds = vec![PollFd::new(ending, PollFlags::IN)];
    if let Some(Metrics::Asked(listener)) = metrics {
        fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
    }
    let at_most =
        Timespec { tv_sec: at_most.as_secs().cast_signed(), tv_nsec: at_most.subsec_nanos().into() };
    match poll(&mut fds, Some(&at_most)) {
        Ok(_) => !fds[0].revents().is_empty(),
        Err(_) => false,
    }
}

/// Checks that the file at `path` may be replaced by numbers: it is new, empty, or has such numbers. Only a
/// regular file is opened.
///
/// # Errors
/// It may not, in words; or it cannot be read.
pub fn check_replaced(path: &Path) -> io::Result<()> {
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let mut begin = Vec::new();
    if found.is_file() {
        fs::File::open(path)?.take(NUMBERS_BEGIN.len() as u64).read_to_end(&mut begin)?;
    }
    if found.is_file() && (begin.is_empty() || begin == NUMBERS_BEGIN) {
        return Ok(());
    }
    Err(io::Error::other("it is there already, and has no such numbers"))
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    check_replaced(path)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let beside = path.with_file_name(name);
    // The name can be guessed: a link that another user has put there is not followed.
    let _ = fs::remove_file(&beside);
    let written = fs::File::create_new(&beside)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

fn answer(mut asker: TcpStream, stats: &impl Fn() -> RestoreStats) -> io::Result<()> {
    asker.set_nonblocking(false)?;
    let request = request(&mut asker)?;
    let (status, text) = match request.split_ascii_whitespace().take(2).collect::<Vec<_>>()[..] {
        ["GET", "/" | "/metrics"] => ("200 OK", stats().prometheus()),
        ["GET", _] => ("404 Not Found", "the numbers are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET is known here\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\r\n",
        text.len()
    );
    send(&mut asker, (head + &text).as_bytes(), Instant::now())
}

/// Sends all of it within a second from `began` on, however slowly the client takes it.
fn send(asker: &mut TcpStream, mut bytes: &[u8], began: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let Some(rest) = time_left(began) else {
            return Err(io::Error::other("the client takes too long to read the answer"));
        };
        asker.set_write_timeout(Some(rest))?;
        match asker.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The rest of the time of a request or an answer, if there is any.
fn time_left(began: Instant) -> Option<Duration> {
    REQUEST_TIMEOUT.checked_sub(began.elapsed()).filter(|rest| !rest.is_zero())
}

/// The request's text up to its empty line.
fn request(asker: &mut TcpStream) -> io::Result<String> {
    let (mut bytes, mut piece) = (Vec::new(), [0; 1024]);
    let began = Instant::now();
    // All of it within a second, however small its pieces.
    while let Some(rest) = time_left(began) {
        asker.set_read_timeout(Some(rest))?;
        let read = asker.read(&mut piece)?;
        bytes.extend_from_slice(&piece[..read]);
        let is_whole =
            bytes.windows(4).any(|end| end == b"\r\n\r\n") || bytes.windows(2).any(|end| end == b"\n\n");
        if read == 0 || is_whole {
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        if bytes.len() > REQUEST_BYTES_MAX {
            break;
        }
    }
    Err(io::Error::other("the request is too long, or takes too long"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_distinguished_from_files() {
        assert_eq!("127.0.0.1:9100".parse(), Ok(MetricsTarget::Address(([127, 0, 0, 1], 9100).into())));
        assert_eq!("/run/q.prom".parse(), Ok(MetricsTarget::File("/run/q.prom".into())));
        assert_eq!("./9100".parse(), Ok(MetricsTarget::File("./9100".into())));
        assert_eq!("q.prom".parse(), Ok(MetricsTarget::File("q.prom".into())));
        for neither in ["", "9100", ":9100", "localhost:9100", "127.0.0.1:99999"] {
            assert!(neither.parse::<MetricsTarget>().is_err(), "{neither:?}");
        }
    }

    #[test]
    fn a_file_is_written_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("q.prom");
        let metrics = Metrics::start(&MetricsTarget::File(path.clone())).expect("it can be written");
        metrics.keep(&RestoreStats::default());
        assert!(fs::read_to_string(&path).expect("it is there").contains("quinion_restore_faults_total 0\n"));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
        assert!(Metrics::start(&MetricsTarget::File(folder.path().join("no/such"))).is_err());
    }

    #[test]
    fn a_planted_link_is_not_written_through() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, other) = (folder.path().join("q.prom"), folder.path().join("other"));
        fs::write(&other, "mine").expect("room for it");
        let beside = folder.path().join(format!("q.prom.{}.new", std::process::id()));
        std::os::unix::fs::symlink(&other, beside).expect("it is new");
        write(&path, "numbers").expect("it can be written");
        assert_eq!(fs::read(&other).expect("it is there"), b"mine");
        assert!(fs::symlink_metadata(&path).expect("it is there").is_file());
    }

    /// The connection is fine and takes all of it at once: only the time is up.
    #[test]
    fn an_answer_whose_time_is_up_is_not_sent_further() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
        let client = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it listens");
        let (mut asker, _) = listener.accept().expect("a client");
        let began = Instant::now().checked_sub(REQUEST_TIMEOUT).expect("the machine runs for longer");
        let said = send(&mut asker, b"late", began).expect_err("it is late").to_string();
        assert!(said.contains("takes too long"), "{said}");
        drop(asker);
        let mut sent = Vec::new();
        (&client).read_to_end(&mut sent).expect("it is closed");
        assert_eq!(sent, b"");
    }

    #[test]
    fn a_request_for_metrics_is_answered() {
        let any = MetricsTarget::Address(([127, 0, 0, 1], 0).into());
        let metrics = Metrics::start(&any).expect("a port is free");
        let Metrics::Asked(listener) = &metrics else { panic!("it is asked") };
        let address = listener.local_addr().expect("it is bound");
        let ask = |text: &str| {
            let mut asker = TcpStream::connect(address).expect("it listens");
            asker.write_all(text.as_bytes()).expect("it fits");
            metrics.answer(RestoreStats::default);
            let mut answer = String::new();
            asker.read_to_string(&mut answer).expect("text");
            answer
        };
        let answer = ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(
            answer.starts_with("HTTP/1.0 200 OK\r\n") && answer.contains("\nquinion_restore_vms 0\n"),
            "{answer}"
        );
        assert!(ask("GET /other HTTP/1.0\n\n").starts_with("HTTP/1.0 404 "));
        assert!(ask("POST / HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 405 "));
    }
}
