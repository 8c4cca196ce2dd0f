//! Socket: where a server listens and clients find it.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/quinion/NAME.sock     or /tmp/quinion-UID/NAME.sock, where there is no such folder
//!   $XDG_RUNTIME_DIR/quinion/NAME.lock     held by the server that listens, which may remove a socket left behind;
//!                                          has its process number and start, if it ends in order at SIGTERM
//! ```
//!
//! A newer server **replaces** the one that listens: it sends SIGTERM to the process whose number is in the lock file
//! and waits until the lock is free. Clients that connect from then on wait in the new socket's queue.
//!
//! A service manager may have made the socket and keep it while servers come and go (socket activation). It removes the
//! socket then, and no server does.
//!
//! The folder is the user's alone (mode 0700), as the server makes sure. The kernel tells the server who connects, and
//! the client whose process listens; so a wrong folder costs service and shows nothing.
//!
//! Invariant: a socket is removed by the process alone that took its lock, and by no fork of it.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::FileId;
use quinion_owner::internals::serve::{LISTEN_MAX, listen};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, FdFlags, fcntl_setfd, ioctl_fionbio};
use rustix::net::sockopt::{socket_acceptconn, socket_peercred, socket_type};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, getsockname, socket_with,
};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::{Error, ErrorKind, Result};

/// Longer names make paths that no socket can have.
const NAME_BYTES_MAX: usize = 48;
/// No socket has a longer path: `sun_path` of unix(7), less the zero at its end.
const PATH_BYTES_MAX: usize = 107;
const PAUSE: Duration = Duration::from_millis(2);
/// How long a server that has just taken the lock may need until it says that it may be replaced.
const SAYS_SO_MAX: Duration = Duration::from_secs(2);

/// A path, if `name` has a slash, else one in the user's folder. It leads to the same socket when the process has
/// another working directory, unless it is too long for that.
///
/// # Errors
/// It is no name; a relative path, and the working directory is gone.
pub(crate) fn path_of(name: &str) -> io::Result<PathBuf> {
    if name.contains('/') {
        let path = std::path::absolute(name)?;
        let is_short = path.as_os_str().len() <= PATH_BYTES_MAX;
        return Ok(if is_short { path } else { name.into() });
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.starts_with('.') || !name.bytes().all(is_plain)
    {
        let text = "a server's name has 1 to 48 letters, digits, '-', '_' and '.', and begins with no '.'";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(folder().join(format!("{name}.sock")))
}

fn folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute()) {
        Some(folder) => folder.join("quinion"),
        None => format!("/tmp/quinion-{}", rustix::process::geteuid().as_raw()).into(),
    }
}

/// A socket at which a server is going to answer, or does ([`Builder::start_at`](crate::Builder::start_at)). Clients
/// wait for the server for ten seconds. The socket is removed when this, or the server, is dropped.
#[derive(Debug)]
pub struct Socket {
    listening: Listening,
    socket: OwnedFd,
}

impl Socket {
    /// Listens under a name, or at a path, if it has a slash. The folder is made, if there is none, and must be this
    /// user's alone. Files that an ended server has left there are removed.
    ///
    /// # Errors
    /// [`ErrorKind::Start`]: another server listens there; the folder is not this user's alone; the system refuses.
    pub fn bind(name: &str) -> Result<Self> {
        Self::take(name, |_| Ok(()))
    }

    /// Sends the server that listens there SIGTERM, and listens when it has ended. It must be one that may be replaced
    /// ([`Socket::replaceable`]), and end within `timeout`. Without such a server it is [`Socket::bind`].
    ///
    /// # Errors
    /// Those of [`Socket::bind`]; the server does not end in time.
    pub fn replace(name: &str, timeout: Duration) -> Result<Self> {
        Self::take(name, |lock| end_the_holder(lock, timeout))
    }

    fn take(name: &str, before: impl FnOnce(&File) -> io::Result<()>) -> Result<Self> {
        let at = |path: PathBuf| {
            let lock = open_lock(&path)?;
            before(&lock)?;
            Listening::at(&path, lock)
        };
        let taken = path_of(name).and_then(at);
        let (listening, socket) = taken.map_err(|error| cannot_serve(name, error))?;
        Ok(Self { listening, socket })
    }

    /// A socket that a service manager listens at: of type `SOCK_SEQPACKET`, with a path, of this user alone (mode
    /// 0600). It is not removed.
    ///
    /// # Errors
    /// [`ErrorKind::Start`]: it is no such socket; another server has its name.
    pub fn adopt(socket: OwnedFd) -> Result<Self> {
        let adopted = Listening::of(&socket);
        let listening = adopted.map_err(|error| cannot_serve("the socket that was given", error))?;
        Ok(Self { listening, socket })
    }

    /// Says that this process ends in order at SIGTERM, so that a later [`Socket::replace`] may send it.
    ///
    /// # Errors
    /// [`ErrorKind::Start`]: the lock file cannot be written.
    pub fn replaceable(self) -> Result<Self> {
        let own = identity_of(rustix::process::getpid());
        let own =
            own.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "/proc does not show this process"));
        let said = own.and_then(|own| (&self.listening.lock).write_all(own.as_bytes()));
        said.map_err(|error| cannot_serve(&self.path().display().to_string(), error))?;
        Ok(self)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.listening.path()
    }

    pub(crate) fn into_parts(self) -> (Listening, OwnedFd) {
        (self.listening, self.socket)
    }
}

fn cannot_serve(name: &str, error: io::Error) -> Error {
    let remedy = match error.raw_os_error() {
        Some(libc::ENAMETOOLONG) => Some("the path of a socket has 107 bytes at most; name a shorter one"),
        Some(libc::ENOENT) => Some("only the last folder of the path is made; make those before it"),
        Some(libc::EACCES | libc::EROFS) => Some("name a path in a folder that you can write"),
        Some(libc::EMFILE | libc::ENFILE) => Some("raise the limit of open files (`ulimit -n`)"),
        Some(libc::EISDIR | libc::ENOTDIR) => Some("name the path of a socket in a folder of its own"),
        _ if error.kind() == io::ErrorKind::AddrInUse => None, // its text says what to do
        _ => Some("name a socket in a folder that belongs to this user alone"),
    };
    let error = Error::of_io(ErrorKind::Start, format!("cannot serve as {name:?}"), error);
    remedy.into_iter().fold(error, Error::with_hint)
}

/// The lock file of the socket at `path`, in a folder of this user alone.
fn open_lock(path: &Path) -> io::Result<File> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    make_private(parent)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path.with_extension("lock"))
}

/// Connects without waiting.
fn connect_to(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let end = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&end, &SocketAddrUnix::new(path)?)?;
    Ok(end)
}

fn id_of(data: &Metadata) -> FileId {
    FileId { device: data.dev(), inode: data.ino() }
}

fn is_taken(lock: &File) -> bool {
    flock(lock, FlockOperation::NonBlockingLockExclusive).is_err()
}

/// In the kernel's ticks since the machine began: with its number, what no other process has.
fn start_of(process: Pid) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Its name, which is in parentheses, may have spaces and parentheses.
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// As it is in the lock file.
fn identity_of(process: Pid) -> Option<String> {
    start_of(process).map(|start| format!("{process} {start}\n"))
}

/// The process that has said in the lock file that it may be ended.
fn holder(lock: &File) -> io::Result<Option<(Pid, OwnedFd)>> {
    let (mut text, mut lock) = (Vec::new(), lock);
    lock.seek(io::SeekFrom::Start(0))?;
    lock.take(64).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let number =
        text.split(' ').next().and_then(|number| number.parse().ok()).filter(|&number: &i32| number > 0);
    let number = number.and_then(Pid::from_raw);
    let opened = number.and_then(|number| Some((number, pidfd_open(number, PidfdFlags::empty()).ok()?)));
    // After it was opened: a number may have become another process's.
    Ok(opened.filter(|(number, _)| identity_of(*number).as_ref() == Some(&text)))
}

/// Has the process that holds the lock end, and takes the lock.
fn end_the_holder(lock: &File, timeout: Duration) -> io::Result<()> {
    let failed = |text: &str| io::Error::new(io::ErrorKind::AddrInUse, text);
    let begun = Instant::now();
    let mut told = None;
    while is_taken(lock) {
        match holder(lock)? {
            Some((number, process)) if told != Some(number) => {
                send_sigterm(&process)?;
                told = Some(number);
            }
            Some(_) => {}
            // It has ended just now; or it has the lock just now, and says so next; or it never does.
            None if told.is_none() && begun.elapsed() >= timeout.min(SAYS_SO_MAX) => {
                return Err(failed(
                    "the server of that name cannot be replaced; end the program that has it",
                ));
            }
            None => {}
        }
        if told.is_some() && begun.elapsed() >= timeout {
            return Err(failed("the server of that name was told to end, and has not ended in time; end it"));
        }
        sleep(PAUSE);
    }
    Ok(())
}

fn send_sigterm(process: &OwnedFd) -> io::Result<()> {
    match pidfd_send_signal(process, Signal::TERM) {
        Err(Errno::SRCH) | Ok(()) => Ok(()), // it has ended meanwhile
        Err(error) => Err(error.into()),
    }
}

#[derive(Debug)]
pub(crate) struct Listening {
    path: PathBuf,
    lock: File,
    /// The socket that is removed with this: not a manager's, nor a server's that came after the lock file was removed.
    own: Option<FileId>,
    process: ForkGuard,
}

impl Listening {
    fn at(path: &Path, lock: File) -> io::Result<(Self, OwnedFd)> {
        let mut listening = Self::holding(path, lock)?;
        // This process has the lock, so no server listens there; a service manager may.
        match connect_to(path) {
            Ok(_) | Err(Errno::AGAIN) => {
                let text =
                    "a service manager listens there; restart its unit, or give this server another name";
                return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
            }
            Err(_) => {}
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = listen(path)?;
        listening.own = Some(id_of(&std::fs::symlink_metadata(path)?));
        Ok((listening, socket))
    }

    fn of(socket: &OwnedFd) -> io::Result<Self> {
        let wrong = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if socket_type(socket)? != SocketType::SEQPACKET || !socket_acceptconn(socket)? {
            return Err(wrong(
                "it must be a listening socket of type SOCK_SEQPACKET (ListenSequentialPacket=)",
            ));
        }
        let address = SocketAddrUnix::try_from(getsockname(socket)?).ok();
        let path =
            address.as_ref().and_then(SocketAddrUnix::path).map(|path| path.to_string_lossy().into_owned());
        let path = PathBuf::from(path.ok_or_else(|| wrong("it must be a local socket with a path"))?);
        let data = std::fs::symlink_metadata(&path)?;
        if data.uid() != rustix::process::geteuid().as_raw() || data.mode() & 0o077 != 0 {
            return Err(wrong("it must be of this user alone (SocketMode=0600)"));
        }
        fcntl_setfd(socket, FdFlags::CLOEXEC)?;
        ioctl_fionbio(socket, true)?;
        // Again, by this process: to clients the one that listens is the one that answers.
        rustix::net::listen(socket, LISTEN_MAX)?;
        Self::holding(&path, open_lock(&path)?)
    }

    fn holding(path: &Path, lock: File) -> io::Result<Self> {
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let text = "another server has that name; give this one another name, or have it take the place of that \
                        one (`quinion serve --replace`)";
            io::Error::new(io::ErrorKind::AddrInUse, text)
        })?;
        let is_there = std::fs::metadata(path.with_extension("lock")).map(|data| id_of(&data));
        if is_there.ok() != Some(id_of(&lock.metadata()?)) {
            return Err(io::Error::other("the lock file was removed meanwhile; start the server again"));
        }
        // Its content is of a server before; see `Socket::replaceable`.
        lock.set_len(0)?;
        (&lock).seek(io::SeekFrom::Start(0))?;
        Ok(Self { path: path.into(), lock, own: None, process: ForkGuard::new() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn is_reachable(&self) -> bool {
        let peer = connect_to(&self.path).and_then(|end| socket_peercred(&end));
        peer.is_ok_and(|peer| peer.pid == rustix::process::getpid())
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let is_there = std::fs::symlink_metadata(&self.path).map(|data| id_of(&data)).ok();
        if self.process.is_forked() || self.own.is_none() || self.own != is_there {
            return; // the server that listens there is the parent, or another
        }
        let _ = std::fs::remove_file(&self.path); // gone already: as well
    }
}

/// Makes the folder, if there is none, and checks that it is of this user alone.
fn make_private(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let data = std::fs::symlink_metadata(folder)?;
    let is_ours =
        data.is_dir() && data.uid() == rustix::process::geteuid().as_raw() && data.mode() & 0o077 == 0;
    if is_ours {
        return Ok(());
    }
    let text = format!(
        "{} must be a folder of this user with mode 0700; make it so, or name another",
        folder.display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_name_that_leads_elsewhere_is_none() {
        for name in ["", ".", "..", ".x", "a b", "a\n", &"x".repeat(49)] {
            assert!(path_of(name).is_err(), "{name:?}");
        }
        assert_eq!(path_of("/a/b").unwrap(), Path::new("/a/b"));
        // From another working directory it would lead to another socket.
        assert_eq!(path_of("./a/b").unwrap(), std::env::current_dir().unwrap().join("a/b"));
        let long = format!("./{}", "x".repeat(105));
        assert_eq!(path_of(&long).unwrap(), Path::new(&long), "in full no socket can have it");
        assert!(path_of("tables-1.x_y").unwrap().ends_with("tables-1.x_y.sock"));
    }

    #[test]
    fn a_path_where_no_socket_can_be_is_refused_with_advice() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("q/folder")).unwrap();
        std::fs::set_permissions(folder.path().join("q"), std::fs::Permissions::from_mode(0o700)).unwrap();
        let long = format!("q/{}.sock", "x".repeat(200));
        for (path, words) in
            [(long.as_str(), "a shorter one"), ("no/no/s.sock", "make those"), ("q/folder", "name the")]
        {
            let error = Socket::bind(folder.path().join(path).to_str().unwrap()).unwrap_err();
            assert!(error.to_string().contains(words), "{path}: {error}");
        }
    }

    #[test]
    fn one_server_has_a_name_at_a_time_and_files_of_a_dead_one_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q/s.sock");
        let at = |path: &Path| Listening::at(path, open_lock(path)?);
        let (listening, socket) = at(&path).unwrap();
        assert_eq!(at(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists(), "a server that was refused has removed the socket of the other");
        // As if it were killed: the lock goes, the socket stays.
        let lock = path.with_extension("lock");
        std::mem::forget(listening);
        std::fs::remove_file(&lock).unwrap();
        drop(socket);
        let (listening, _socket) = at(&path).unwrap();
        assert_eq!(listening.path(), path);
        drop(listening);
        assert!(!path.exists());
    }

    #[test]
    fn a_server_that_never_said_so_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q/s.sock");
        let name = path.to_str().unwrap();
        let first = Socket::bind(name).unwrap();
        // The number of a process that is there, with the start of another: one that ended long ago had it.
        for text in
            ["", "x", "-1 5\n", "0 0\n", "1 1\n", &format!("{} 1\n", std::process::id()), "99999999999 5\n"]
        {
            std::fs::write(path.with_extension("lock"), text).unwrap();
            let error = Socket::replace(name, Duration::from_millis(20)).unwrap_err();
            assert!(error.to_string().contains("cannot be replaced"), "{text:?}: {error}");
        }
        let error = Socket::replace(name, Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains("cannot be replaced"), "{error}");
        drop(first);
        drop(Socket::replace(name, Duration::ZERO).unwrap().replaceable().unwrap());
    }

    /// 1. A server takes the lock, and has not said yet that it may be replaced.
    /// 2. Another is to replace it, and finds no process that may be ended.
    /// 3. The first says so.
    #[test]
    fn a_server_that_has_just_begun_is_replaced_as_soon_as_it_says_that_it_may_be() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q/s.sock");
        let name = path.to_str().unwrap();
        let first = Socket::bind(name).unwrap();
        let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let replaced = std::thread::scope(|scope| {
            let replaced = scope.spawn(|| Socket::replace(name, Duration::from_secs(60)));
            sleep(Duration::from_millis(100));
            let number = Pid::from_child(&process);
            (&first.listening.lock).write_all(identity_of(number).unwrap().as_bytes()).unwrap();
            process.wait().unwrap(); // it was told to end
            drop(first);
            replaced.join().unwrap()
        });
        assert_eq!(replaced.unwrap().path(), path);
    }

    /// 1. A server's number is in the lock file, and the process is found.
    /// 2. It ends, and its parent has its status.
    /// 3. It is told to end.
    #[test]
    fn a_server_that_ended_before_it_was_told_to_is_no_error() {
        let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = pidfd_open(Pid::from_child(&process), PidfdFlags::empty()).unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        send_sigterm(&found).unwrap();
    }

    #[test]
    fn a_socket_that_was_given_is_looked_at_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let path = folder.path().join("s.sock");
        let stream = std::os::unix::net::UnixListener::bind(folder.path().join("stream")).unwrap();
        assert!(Socket::adopt(stream.into()).unwrap_err().to_string().contains("SOCK_SEQPACKET"));
        let socket = listen(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let error = Socket::adopt(socket.try_clone().unwrap()).unwrap_err();
        assert!(error.to_string().contains("SocketMode=0600"), "{error}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let adopted = Socket::adopt(socket.try_clone().unwrap()).unwrap();
        assert_eq!(adopted.path(), path);
        assert!(adopted.listening.is_reachable());
        let second = Socket::adopt(socket.try_clone().unwrap()).unwrap_err();
        assert!(second.to_string().contains("another server"), "{second}");
        drop(adopted);
        assert!(path.exists(), "it is the manager's");
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = open_lock(&folder.path().join("s.sock")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    }
}
