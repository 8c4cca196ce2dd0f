//! Client: the way in for programs.
//!
//! A name says what it leads to: a URL is opened by the server, with its stores; a path by this process itself. From
//! then on both are a [`ClientFile`]. A process is connected from its first client on until it ends, and counts as
//! one, however many clients it has.

use std::sync::Arc;

use crate::connection::Connection;
use crate::error::{Error, ErrorKind, Result};
use crate::file::ClientFile;
use crate::socket::path_of;

/// A connection to a server's cache. Cheap to clone; all clients of one server in a process are one connection.
///
/// When the server has ended and another listens in its place, what is opened next is that one's. What was open before
/// stays with the old one: its reads fail, or are the kernel's.
#[derive(Clone, Debug)]
pub struct Client {
    connection: Arc<Connection>,
}

impl Client {
    /// Connects to the server of that name; a name with a slash is the path of its socket. Waits ten seconds at most.
    ///
    /// Connect again after a fork, in the child: what the parent has is not the child's.
    ///
    /// # Errors
    /// [`ErrorKind::Connect`]: there is no such server, or it does not admit this process.
    pub fn connect(server: &str) -> Result<Self> {
        let failed = |error| Error::of_io(ErrorKind::Connect, format!("cannot connect to {server:?}"), error);
        let socket = path_of(server).map_err(failed)?;
        Ok(Self { connection: Connection::to(&socket)? })
    }

    /// Opens an object by its URL, as `s3://bucket/key`, by the stores that the server has; or a local file by its
    /// path. The URL's key is percent-decoded. Waits for the store's answer.
    ///
    /// # Errors
    /// [`ErrorKind::Open`], with the server's words; [`ErrorKind::OwnerGone`]; [`ErrorKind::TimedOut`];
    /// [`ErrorKind::Forked`].
    pub fn open(&self, name: &str) -> Result<ClientFile> {
        let connection = &self.current()?;
        match name.split_once("://") {
            Some(("file", path)) => ClientFile::open_local(connection, path),
            Some(_) => ClientFile::open_object(connection, name),
            None => ClientFile::open_local(connection, name),
        }
    }

    /// The connection to the server that is there now; the old one, if there is none.
    fn current(&self) -> Result<Arc<Connection>> {
        let old = &self.connection;
        let new = old.viewer()?.owner_is_gone().then(|| Connection::to(old.socket()).ok()).flatten();
        Ok(new.unwrap_or_else(|| Arc::clone(old)))
    }

    /// Whether the server has ended, however it ended, and no other listens in its place.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn owner_is_gone(&self) -> Result<bool> {
        Ok(self.current()?.viewer()?.owner_is_gone())
    }
}
