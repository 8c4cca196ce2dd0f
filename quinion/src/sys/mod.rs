//! Sys: the system calls that cannot be made safely from outside.
//!
//! Everything here that is `unsafe` says in words what the caller must hold.
//! Calls that the `rustix` crate offers safely are made where they are needed
//! and are not wrapped a second time.
//!
//! | file | what |
//! |---|---|
//! | [`io`] | reading into memory that is an address and not a Rust reference; a device's size |
//! | [`ring`] | an io_uring instance, as two halves that different threads may hold |
//! | [`signal`] | keeping a program's signals away from our threads |

pub mod io;
pub mod ring;
pub mod signal;
