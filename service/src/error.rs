//! Errors: what was asked, what is wrong, what to do.
//!
//! The server tells a client of a failure by an error number, and of a refused open also by words. Here numbers become
//! kinds again, by which a program decides.

use std::fmt;
use std::io;

use quinion_owner::internals::viewer::RequestError;
use quinion_owner::internals::viewer::sys::Errno;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no server of that name, or it does not admit this process.
    Connect,
    /// The server could not be started.
    Start,
    /// There is no such object or file, or it cannot be opened.
    Open,
    /// The object was replaced or deleted since it was opened: open it again.
    Changed,
    /// Bytes could not be fetched from the store.
    Fetch,
    /// The server has ended: connect again when there is one.
    OwnerDead,
    /// There was no answer in time.
    TimedOut,
    /// Memory, pins or handles have reached their bound.
    Full,
    /// The process is a fork of the one that connected: connect again.
    Forked,
    /// The object or file has fewer bytes than were asked for.
    EndOfFile,
    /// The server, or the kernel, says something else.
    Other,
}

/// An error: of which name, and what to do.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    text: String,
    source: Option<io::Error>,
    errno: Option<i32>,
    /// The remedy, said behind the source.
    hint: Option<&'static str>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), source: None, errno: None, hint: None }
    }

    pub(crate) fn of_io(kind: ErrorKind, text: impl Into<String>, source: io::Error) -> Self {
        Self { kind, text: text.into(), source: Some(source), errno: None, hint: None }
    }

    pub(crate) fn with_hint(self, hint: &'static str) -> Self {
        Self { hint: Some(hint), ..self }
    }

    pub(crate) fn of_refusal(text: &str, number: i32) -> Self {
        let source = io::Error::from_raw_os_error(number);
        let error = Self::of_io(ErrorKind::Open, format!("cannot open {text}"), source);
        Self { errno: Some(number), ..error }
    }

    /// The error number that the server told, if this is a refusal.
    pub(crate) fn errno(&self) -> Option<i32> {
        self.errno
    }

    /// Whether the server could not be asked.
    pub(crate) fn is_unasked(&self) -> bool {
        matches!(self.kind, ErrorKind::Connect | ErrorKind::TimedOut) && self.source.is_some()
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(crate) fn forked() -> Self {
        let text =
            "this process is a fork of the one that connected, and has nothing of it; connect in the child";
        Self::new(ErrorKind::Forked, text)
    }

    /// Whether this process is not admitted: by a server, or by a socket of another kind. A lack of descriptors or
    /// memory may be this process's own, and says nothing of a server.
    pub(crate) fn is_refused(&self) -> bool {
        let errno = self.source.as_ref().and_then(io::Error::raw_os_error);
        self.is_refused_for_good() || errno == Some(libc::EUSERS)
    }

    /// Whether asking again is of no use: other credentials, another version, another kind of socket.
    pub(crate) fn is_refused_for_good(&self) -> bool {
        let errno = self.source.as_ref().and_then(io::Error::raw_os_error);
        errno
            .is_some_and(|errno| [libc::EACCES, libc::EPERM, libc::EPROTO, libc::EPROTOTYPE].contains(&errno))
    }

    pub(crate) fn owner_dead(name: &str) -> Self {
        let text =
            format!("cannot read {name}: the server of the cache has ended; start one and connect again");
        Self::new(ErrorKind::OwnerDead, text)
    }

    pub(crate) fn changed(name: &str) -> Self {
        let text =
            format!("cannot read {name}: it was replaced or deleted since it was opened; open it again");
        Self::new(ErrorKind::Changed, text)
    }

    pub(crate) fn of_request(name: &str, error: RequestError) -> Self {
        let kind = match error {
            RequestError::OwnerDead => return Self::owner_dead(name),
            RequestError::Errno(libc::ESTALE) => return Self::changed(name),
            RequestError::Late | RequestError::NoSlot => ErrorKind::TimedOut,
            RequestError::Fruitless => ErrorKind::Full,
            RequestError::Errno(number) => kind_of(number),
        };
        let why = match kind {
            ErrorKind::Fetch => {
                "its store did not give the bytes, after retries; see the server's log, and read again".into()
            }
            ErrorKind::TimedOut => {
                "there was no answer in time: the store or the server is too slow; read again later".into()
            }
            ErrorKind::Full => {
                "the cache has no room for it; give the server more memory, or for pins a larger share of it \
                 (--pin-percent; in Rust Builder::pin_percent), or hold fewer pins"
                    .into()
            }
            _ => match error {
                RequestError::Errno(number) => io::Error::from_raw_os_error(number).to_string(),
                error => format!("{error:?}"),
            },
        };
        Self::new(kind, format!("cannot read {name}: {why}"))
    }
}

pub(crate) const CHANGED: Errno = Errno(libc::ESTALE);
pub(crate) const FETCH: Errno = Errno(libc::EREMOTEIO);

fn kind_of(number: i32) -> ErrorKind {
    match number {
        libc::EREMOTEIO => ErrorKind::Fetch,
        libc::EAGAIN => ErrorKind::TimedOut,
        libc::ENOMEM | libc::ENOBUFS | libc::EMFILE => ErrorKind::Full,
        _ => ErrorKind::Other,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        self.source.iter().try_for_each(|source| write!(f, ": {source}"))?;
        self.hint.iter().try_for_each(|hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match error.kind {
            ErrorKind::EndOfFile => io::ErrorKind::UnexpectedEof,
            ErrorKind::TimedOut => io::ErrorKind::TimedOut,
            // An object that could not be opened may be there: only an answer that says so makes it none.
            ErrorKind::Open => error.source.as_ref().map_or(io::ErrorKind::Other, io::Error::kind),
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
