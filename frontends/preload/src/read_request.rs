//! Read request: what a program's read asks for, whichever call it is: where the bytes go, and how they may be had.
//!
//! Plain values. The file, and the place in it, are passed beside them.

/// The kernel's `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Part {
    pub base: *mut u8,
    pub len: usize,
}

#[derive(Clone, Copy)]
pub enum Target<'a> {
    One(Part),
    Many(&'a [Part]),
}

/// How a read is to be served.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ServeMode {
    /// Whatever it takes, and what was read stays cached.
    Plain,
    /// RWF_DONTCACHE: what was not cached before is not afterwards.
    Uncached,
    /// RWF_NOWAIT: only what is cached.
    Now,
}
