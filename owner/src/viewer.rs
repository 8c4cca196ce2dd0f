//! Viewer, with the standard library: the viewer of [`quinion_view::viewer`], and how a program becomes one.
//!
//! The viewer itself is there, without the standard library, because the object that `quinion run` puts into programs
//! links it. Here stands [`connect()`], for programs that know the library.

mod connect;

pub use connect::{NameRequest, SentName, connect, connect_within, of_files, send_descriptor, send_name};
pub use quinion_view::viewer::*;
