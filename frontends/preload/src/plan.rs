//! Plan: the form in which a plan of patches is handed over. The command that writes it and the object that reads it
//! compile this very file.
//!
//! ```text
//!   | Header (64 bytes) | Entry (128 bytes) | Entry | ...       numbers little-endian, targets relative to the library
//!
//!   Entry, of a function that begins  48 83 ec 68 | 80 3d 31 33 0e 00 00 | 74 17 ...
//!     original   what must stand at `offset`: the bytes that go, `original_len` of them
//!     skip       of these, how many stay: an `endbr64` in front
//!     moved      the same instructions made to work elsewhere, and a jump back behind them
//!     fixes      the places in `moved` that depend on where it comes to lie
//! ```
//!
//! The planner knows instructions; the patcher copies bytes and adds numbers.

/// The first eight bytes of a plan; the last is the form's version.
pub const MAGIC: [u8; 8] = *b"QNPATCH\x01";
/// The most entries of a plan.
pub const ENTRIES_MAX: usize = 128;
/// The longest number by which a library is known, in bytes.
pub const BUILD_ID_MAX: usize = 32;
/// The most bytes that are taken from a function.
pub const ORIGINAL_MAX: usize = 24;
/// The most bytes these become elsewhere, the jump back included.
pub const MOVED_MAX: usize = 48;
/// The most places in them that depend on where they lie.
pub const FIXES_MAX: usize = 4;
/// The bytes of the jump that is put into a function: an opcode and a distance.
pub const JUMP_BYTES: usize = 5;

/// The first bytes of a plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// How many entries follow.
    pub entries: u32,
    /// How many bytes of `build_id` count.
    pub build_id_len: u32,
    /// The library this plan is for, and no other.
    pub build_id: [u8; BUILD_ID_MAX],
    /// Padding, all zeros.
    pub rest: [u32; 4],
}

/// A place in moved bytes that holds the distance from the end of its instruction to `target`: four bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Fix {
    /// Where the four bytes are, among the moved ones.
    pub at: u8,
    /// Where their instruction ends, among the moved bytes.
    pub end: u8,
    /// Padding, all zeros.
    pub rest: u16,
    /// The target address, relative to where the library is loaded.
    pub target: u32,
}

/// The patch of one function.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Where the function begins, relative to where the library is loaded.
    pub offset: u32,
    /// How many bytes at its beginning stay.
    pub skip: u8,
    /// How many bytes of `original` count, the ones that stay included.
    pub original_len: u8,
    /// How many bytes of `moved` count.
    pub moved_len: u8,
    /// How many of `fixes` count.
    pub fixes_len: u8,
    /// 1 if without this function nothing may be patched at all.
    pub is_essential: u8,
    /// Padding, all zeros.
    pub rest: [u8; 15],
    /// The bytes the function begins with.
    pub original: [u8; ORIGINAL_MAX],
    /// The instructions of `original`, for another place.
    pub moved: [u8; MOVED_MAX],
    /// Displacements to be filled in there.
    pub fixes: [Fix; FIXES_MAX],
}

const _: () = assert!(size_of::<Header>() == 64 && size_of::<Entry>() == 128);
