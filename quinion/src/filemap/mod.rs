//! Filemap: what happens to a request for a file's bytes.

mod hit;
pub use hit::{Hits, Stopped, read_hits};
