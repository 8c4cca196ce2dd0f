//! Harmless system calls: the kernel's calls that leave all alone that the interposer relies on.
//!
//! They neither open, close or duplicate descriptors, nor move offsets, nor write files by themselves. Shared maps and
//! rings were seen when they were made, if by a call of the C library.
//!
//! Compiled twice: into the object, for calls that a program makes by `syscall`; and into the command, for those that
//! stand in a program's own code.

/// The numbers of the harmless system calls, in order.
pub const HARMLESS: &[u32] = &[
    10, 11, 12, 13, 14, 15, 24, 25, 27, 28, 35, 39, 60, 62, 63, 96, 97, 98, 99, 102, 104, 107, 108, 110, 131,
    158, 186, 200, 201, 202, 203, 204, 206, 207, 208, 210, 218, 228, 229, 230, 231, 232, 234, 237, 238, 239,
    251, 252, 279, 281, 309, 314, 315, 318, 324, 332, 333, 334, 426, 427,
];

const _: () = {
    let mut at = 1;
    while at < HARMLESS.len() {
        assert!(HARMLESS[at - 1] < HARMLESS[at]);
        at += 1;
    }
};

/// Whether a call leaves all alone.
pub fn is_harmless(number: u32) -> bool {
    HARMLESS.binary_search(&number).is_ok()
}
