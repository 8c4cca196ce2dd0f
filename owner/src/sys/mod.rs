//! Sys: the system calls for serving other processes, besides those of the library (`sys` of `quinion`).
//!
//! A process that views a cache shares memory with the owner. So the owner has to know whose that process is, and the
//! process has to learn that the owner is gone, even if it was killed. Closing a file that a process sent may hang.
//!
//! | file | what |
//! |---|---|
//! | [`domain`] | whether another process has the credentials of this one |
//! | [`death_notice`] | a mark in shared memory that the kernel makes if this process is killed |
//! | [`serial_queues`] | threads for calls that may block as long as another process likes |

pub mod processes;
pub mod domain;
#[allow(unsafe_code, reason = "the kernel is told of a list in shared memory")]
pub mod death_notice;
pub mod serial_queues;
