//! Units: the numbers of this crate, each with a type of its own.
//!
//! ```text
//!   bytes   u64          a position or length in a file
//!   index   PageIndex    a position in pages of 4 KiB      index * 4096 = bytes
//!   frame   Frame        a 4 KiB page of the arena         frame * 4096 = offset in the arena
//!   order   Order        log2 of a number of pages         order 9 = 512 pages = 2 MiB
//!   count   u32, u64     a number of pages, named `pages`
//!   file    FileId       a device, and the number of an inode there
//!   time    Millis       a moment, by a thread that has a clock; those who decide are handed it
//! ```
//!
//! Confusing two of them is a type error here and a corrupted file elsewhere.
//!
//! Invariants, checked when the crate compiles: `PAGE_SIZE` and `EXTENT_SIZE` are powers of two and an extent is one
//! folio of the largest order.

use core::fmt;

/// Bytes in a page: the unit of caching, 4096 on every machine.
pub const PAGE_SIZE: usize = 4096;
/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in an extent, the unit in which the arena grows: 2 MiB, one huge page.
pub const EXTENT_SIZE: usize = 2 << 20;
/// Pages in an extent: 512.
pub const EXTENT_PAGES: u32 = (EXTENT_SIZE / PAGE_SIZE) as u32;
/// The largest file size, in bytes, that can be read: the largest the kernel's `loff_t` holds.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;

const _: () = assert!(PAGE_SIZE == 1 << PAGE_SHIFT);
const _: () = assert!(EXTENT_PAGES == 1 << Order::MAX.0);

/// A file's numbers in the system.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FileId {
    /// The device that it lies on.
    pub device: u64,
    /// The inode number on that device.
    pub inode: u64,
}

/// A position in a file, in pages of 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// The page that holds byte `position` of a file.
    #[inline]
    pub const fn of_byte(position: u64) -> Self {
        Self(position >> PAGE_SHIFT)
    }
    /// The position, in bytes, of the first byte of this page.
    #[inline]
    pub const fn first_byte(self) -> u64 {
        self.0 << PAGE_SHIFT
    }
    /// The index `pages` further on.
    #[inline]
    pub const fn plus(self, pages: u64) -> Self {
        Self(self.0 + pages)
    }
    /// The start of the naturally aligned run of `order` that covers this index.
    #[inline]
    pub const fn align_down(self, order: Order) -> Self {
        Self(self.0 & !(order.pages() as u64 - 1))
    }
    /// The index itself, or the next one at which a folio of `order` may start.
    #[inline]
    pub const fn align_up(self, order: Order) -> Self {
        Self(self.0.next_multiple_of(order.pages() as u64))
    }
    /// Whether a folio of `order` may start here.
    #[inline]
    pub const fn is_aligned(self, order: Order) -> bool {
        self.0 & (order.pages() as u64 - 1) == 0
    }
}

impl fmt::Debug for PageIndex {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

/// Number of pages a file of `bytes` bytes spans, its last partial page included.
#[inline]
pub const fn pages_of_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_SIZE as u64)
}

/// Whether a read from byte `position` on that wants more than its `done` bytes came to the end of the file: each of
/// its steps that ends within a page has ended there.
#[inline]
pub const fn met_end_within_page(position: u64, done: usize) -> bool {
    done > 0 && !(position + done as u64).is_multiple_of(PAGE_SIZE as u64)
}

/// A 4 KiB page of the arena, by number. Frame 0 holds the arena's header and is never data.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame(pub u32);

impl Frame {
    /// The offset, in bytes, of this frame in the arena.
    #[inline]
    pub const fn offset(self) -> usize {
        (self.0 as usize) << PAGE_SHIFT
    }
    /// The frame `pages` further on.
    #[inline]
    pub const fn plus(self, pages: u32) -> Self {
        Self(self.0 + pages)
    }
    /// The extent this frame lies in.
    #[inline]
    pub const fn extent(self) -> u32 {
        self.0 / EXTENT_PAGES
    }
}

impl fmt::Debug for Frame {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frame {}", self.0)
    }
}

/// log2 of a number of pages, 0 to 9 for folios (4 KiB to 2 MiB).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Order(pub u8);

impl Order {
    /// One page.
    pub const ZERO: Order = Order(0);
    /// The largest order a folio may have: 9, an extent of 2 MiB.
    pub const MAX: Order = Order(9);

    /// Pages in a run of this order.
    #[inline]
    pub const fn pages(self) -> u32 {
        1 << self.0
    }
    /// Bytes in a run of this order.
    #[inline]
    pub const fn bytes(self) -> usize {
        PAGE_SIZE << self.0
    }
    /// The largest order whose run fits in `pages`, at most [`Order::MAX`]; `pages` is at least 1.
    #[inline]
    pub const fn fitting(pages: u32) -> Self {
        let order = pages.ilog2() as u8;
        if order > Self::MAX.0 { Self::MAX } else { Self(order) }
    }
}

/// Between which orders folios are to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Orders {
    /// No smaller ones: every folio starts at a multiple of so many pages.
    pub min: Order,
    /// No larger ones; at least `min`.
    pub max: Order,
}

impl Orders {
    /// Single pages only.
    pub const PAGES: Orders = Orders { min: Order::ZERO, max: Order::ZERO };
}

impl fmt::Debug for Order {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "order {}", self.0)
    }
}

/// A moment, in milliseconds since one that the caller chose and keeps to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Millis(pub u64);

/// How many pools a cache has at most, the default pool among them.
pub const POOLS_MAX: usize = 16;

/// The number of a pool, below [`POOLS_MAX`]; the default pool's is 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PoolNumber(pub u8);

impl PoolNumber {
    /// The pool of files that are opened without one.
    pub const DEFAULT: PoolNumber = PoolNumber(0);
}

impl fmt::Debug for PoolNumber {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {}", self.0)
    }
}

/// The number of a mapping. Never 0, and never used again while a folio or a handle carries it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MappingId(pub u32);

impl MappingId {
    /// The id in a descriptor that belongs to no mapping.
    pub const NONE: MappingId = MappingId(0);
}

impl fmt::Debug for MappingId {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mapping {}", self.0)
    }
}
