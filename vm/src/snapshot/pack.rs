//! Pack: a snapshot as compressed chunks with checksums, each stored once, in one file or in several.
//!
//! ```text
//!   monday.pack    [ header | index           | chunks a, b, c, d  | end ]
//!                             |a|b|0|c|a|d|
//!   tuesday.pack   [ header | index           | chunk e | end ]            made --against monday.pack
//!                             |a|e|0|c|a|d|     a, c and d lie in monday.pack
//! ```
//!
//! The memory of a VM is cut into chunks of one size. A chunk of zeros takes no room; any other is stored once, as it
//! is or compressed by zstd, and named by its SHA-256. A pack made **against** older ones refers to their chunks. The
//! index stands in front, so that opening a pack, which may be an object of a store, takes three reads: of the header,
//! of the index, and of the last bytes. An entry says at once in which file its chunk lies, so no reference leads to
//! another, and none in a circle.
//!
//! # The format, version 1
//!
//! All numbers are little-endian. Lengths and offsets are in bytes. A file is a pack as far as `recognition.rs` says.
//!
//! | at | bytes | header |
//! |---|---|---|
//! | 0 | 16 | `quinion vm pack` and a line feed |
//! | 16 | 4 | the version: 1. A reader refuses every other |
//! | 20 | 4 | bytes of a chunk: a power of two from 64 KiB to 4 MiB |
//! | 24 | 8 | the snapshot's size B: at least 1. It has C = B / chunk, rounded up, at most 2^22 chunks; the last one may be shorter |
//! | 32 | 8 | the size of this file |
//! | 40 | 4 | N, the packs that it refers to: at most 64 |
//! | 44 | 4 | zeros |
//! | 48 | 32 | SHA-256 of the index: of N names and C entries |
//! | 80 | 16 | zeros |
//! | 96 | 32 | **the identity**: SHA-256 of the 96 bytes before it |
//! | 128 | 288 N | the names |
//! | 128 + 288 N | 48 C | the entries, in the order of the chunks |
//!
//! | at | bytes | name |
//! |---|---|---|
//! | 0 | 32 | the identity of the pack that is referred to |
//! | 32 | 1 | the length of its name, 1 to 255 |
//! | 33 | 255 | the name of its file, then zeros: no slash, no zero byte, not `.`, not `..` |
//!
//! | at | bytes | entry |
//! |---|---|---|
//! | 0 | 1 | the form: 0 zeros, and all of the entry is zeros; 1 raw; 2 zstd |
//! | 1 | 1 | zero |
//! | 2 | 2 | the pack: 0 is this file, n the nth name |
//! | 4 | 4 | stored bytes: raw, those of the chunk; zstd, at least 1 and fewer than those of the chunk |
//! | 8 | 8 | where they begin in that pack's file |
//! | 16 | 32 | SHA-256 of the chunk, decompressed |
//!
//! The chunks lie between the entries and the last 16 bytes of their file, which are a line feed, `end of vm pack` and
//! a line feed. Chunks may lie in any order, several entries may name the same bytes, and bytes that no entry names
//! mean nothing. A zstd chunk is a sequence of zstd frames (RFC 8878) without a dictionary, which decompress to the
//! chunk.
//!
//! Equal identities mean equal snapshots: the identity covers the index, and the index all chunks by their digests.
//!
//! **Hostile packs.** Everything that is read of a pack may be an attacker's: numbers are compared with their bounds
//! and the file's size before they are used (`format.rs`), memory is taken for a chunk and for the index and for
//! nothing else, and a chunk is supplied only if it has its digest (`reader.rs`). A damaged chunk is an error of its
//! pages, as an unreadable sector is; a damaged header or index, or another file in place of a pack that is referred
//! to, is refused when the snapshot is opened (`open.rs`).
//!
//! | file | what |
//! |---|---|
//! | `format` | bytes and numbers of header and index; pure |
//! | `source` | where a pack's bytes are: a local file, or a cache's |
//! | `reader` | the snapshot's bytes out of chunks |
//! | `open` | a pack, and those that it refers to |
//! | `request` | what a caller asks, and gets |
//! | `workers` | chunks on several threads, in order |
//! | `output` | a file that appears when it is whole |
//! | `writer` | a pack is made |
//! | `verify` | a pack is read as a whole |
//!
//! Not an invariant: that a pack stays readable. One that refers to others needs them, unchanged, in its folder.

mod format;
mod open;
mod output;
pub(crate) mod reader;
mod request;
mod source;
mod verify;
mod workers;
mod writer;

pub use format::PackIdentity;
pub use request::{DamagedChunk, PackError, PackProgress, PackReport, PackRequest, VerifyReport};
pub use verify::verify;
pub use writer::pack;

pub(super) use open::{PackInCache, open, open_file};

#[cfg(test)]
mod tests;
