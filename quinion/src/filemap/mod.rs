//! Filemap: what happens to a request for a file's bytes.
//!
//! ```text
//!   range --> hit --all there----------------------------> bytes      no lock, no system call
//!              |
//!              '--the rest--> miss: fill, wait, copy ----> bytes      locks, I/O
//! ```
//!
//! A hit never decides that bytes do not exist; whatever it is not sure of it
//! leaves to the slow path, which holds the locks that make the answer true.

mod hit;
pub use hit::{Hits, Stopped, read_hits};
