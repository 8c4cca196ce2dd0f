//! Client: the files and objects of a server, whose cache several processes share.
//!
//! A URL is opened by the server, with its stores and credentials; a path by this process. Bytes of the server's
//! cache are copied, or pinned, out of memory that both map. The files are read only.

use std::ffi::{c_char, c_int};

use quinion::internals::sys::fork::ForkGuard;
use quinion_service::Client;

use crate::args::{self, Handle, VersionedStruct};
use crate::ffi::{Failure, ffi_call};
use crate::file::{Source, qn_file};

/// A connection to a server, made by qn_connect().
pub struct qn_client {
    client: Client,
    process: ForkGuard,
}

impl Handle for qn_client {
    fn process(&self) -> ForkGuard {
        self.process
    }
}

/// qn_connect_options.reconnect_ms: wait for no other server.
pub const QN_NO_RECONNECT: u64 = u64::MAX;

/// How to connect. All zero but the size are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_connect_options {
    /// sizeof(struct qn_connect_options).
    pub size: usize,
    /// How long opens and reads wait for another server in the place of one that has ended, in milliseconds.
    /// 0: 5 seconds. QN_NO_RECONNECT: not at all.
    pub reconnect_ms: u64,
}

// SAFETY: numbers without padding.
unsafe impl VersionedStruct for qn_connect_options {
    const NAME: &'static str = "qn_connect_options";
}

/// Connects to the server of that name, as `quinion serve --name` gave it; a name with a slash is the path of its
/// socket.
///
/// options may be NULL. *client is yours until qn_client_close(). All clients of one server in a process are one
/// connection. Blocks for ten seconds at most.
///
/// Errors: -ECONNREFUSED (there is no such server), -EACCES and other numbers of the system, -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_connect(
    server: *const c_char,
    options: *const qn_connect_options,
    client: *mut *mut qn_client,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (place, server) = unsafe { (args::out(client)?, args::utf8(server, "the server's name")?) };
        // SAFETY: the caller's contract.
        let options = unsafe { args::options(options) }?;
        let mut client = Client::connect(server)?;
        client = match options.reconnect_ms {
            0 => client,
            QN_NO_RECONNECT => client.with_reconnect_timeout(args::milliseconds(0)),
            other => client.with_reconnect_timeout(args::milliseconds(other)),
        };
        args::give_handle(place, qn_client { client, process: ForkGuard::new() });
        Ok(0)
    })
}

/// Opens an object by its URL, as "s3://bucket/key", by the server's stores; or a local file by its path.
///
/// name is UTF-8, and the key of a URL percent-encoded. *file is yours until qn_close(), and reads one version of the
/// object. It may outlive the client. Blocks for the store.
///
/// Errors: -ENOENT, -EACCES and other numbers that the server tells with words; -ECONNRESET (the server has ended),
/// -ETIMEDOUT, -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_client_open(
    client: *const qn_client,
    name: *const c_char,
    file: *mut *mut qn_file,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (place, client) = unsafe { (args::out(file)?, args::handle(client, "the client")?) };
        // SAFETY: the caller's contract.
        let name = unsafe { args::utf8(name, "the URL or path") }?;
        if name.is_empty() {
            return Err(Failure::invalid("the URL or path is empty; pass one, as s3://bucket/key"));
        }
        let file = client.client.open(name)?;
        args::give_handle(place, qn_file::from(Source::Served(file)));
        Ok(0)
    })
}

/// Whether the server runs, or another in its place: 1 or 0. Does not block while the server runs.
///
/// If it has ended, another is connected to that listens in its place. That blocks for 0.2 s at most, if one listens
/// and does not answer.
///
/// Errors: -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_client_is_connected(client: *const qn_client) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let client = unsafe { args::handle(client, "the client") }?;
        Ok(c_int::from(!client.client.owner_is_dead()?))
    })
}

/// Gives a client back. Files that it opened stay open. The process stays connected until it ends.
///
/// Errors: -EINVAL. In a forked child 0 is returned and nothing is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_client_close(client: *mut qn_client) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        drop(unsafe { args::take_handle(client, "the client") }?);
        Ok(0)
    })
}
