//! An S3 server on loopback for tests and benchmarks: objects in memory, counts, a set speed, and faults on request.
//!
//! ```text
//!   AmazonS3 of object_store --HTTP--> server.rs   counts, latency, bandwidth; draws the fault of each request
//!     client.rs                          |         faults that HTTP can show: statuses, cut and stalled bodies, ..
//!                                        v
//!                                      s3s         the protocol: parses requests, writes answers and errors
//!                                        |
//!                                        v
//!                                      objects.rs  objects in memory; their conditions
//! ```
//!
//! The protocol is the crate `s3s`'s, so the server was not written by the authors of the tests. Faults of networks
//! and stores are added around it. They come from a script (the next GETs, one after the other), or from a seed.
//!
//! An object's bytes follow from a version and a position ([`byte`]), so that a test can check each byte it reads, and
//! its version. Versions of one object only rise.
//!
//! Not here: bytes that are wrong although the answer says that all is well, as no client could notice them.

mod content;
mod checker;
mod fault;
mod objects;
mod client;
mod server;

pub use checker::Checker;
pub use client::{Connector, store_at};
pub use content::{byte, check, content, version_of};
pub use fault::{Fault, FaultPlan};
pub use server::{Control, Requests, Server};
