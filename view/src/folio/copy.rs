//! Copy: moving bytes that another thread may be overwriting.
//!
//! A reader copies a folio's bytes while the owner may be giving the frame to another file, and throws its copy away
//! then. But the copying itself must not be a data race in the eyes of the compiler. So:
//!
//! * On x86-64 the copy is inline assembly. The Rust code it stands for, its
//!   *story*, is [`portable`]: a loop of relaxed atomic loads from the arena
//!   into a buffer that is the caller's alone. An assembly block may do
//!   anything that some legal Rust code with the same effect could do.
//! * Elsewhere, under the model checker's cfg and under Miri, it is that loop.
//!
//! Sizes: up to 1 KiB a vector loop (AVX-512 or AVX2, found at run time, else SSE2), above it `rep movsb`, the fastest
//! way to move 4 KiB and more on machines with fast string operations. No non-temporal store is used: such stores pass
//! the fences that the hit protocol relies on.

#[cfg(all(target_arch = "x86_64", not(any(quinion_model, quinion_portable, miri))))]
mod x86;

#[cfg(all(target_arch = "x86_64", not(any(quinion_model, quinion_portable, miri))))]
pub use x86::resume_after_fault;
/// Where a copy that faulted goes on: nowhere, where there is no assembly.
#[cfg(not(all(target_arch = "x86_64", not(any(quinion_model, quinion_portable, miri)))))]
#[inline]
pub fn resume_after_fault(_: usize) -> Option<usize> {
    None
}

/// Number of copies that have faulted; see [`faults`].
#[cfg(feature = "copy-faults")]
static FAULTS: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);

/// How many copies of this process have ended early because one of their ends was not there.
///
/// A copy of several parts checks after each, and ends: nothing may be written behind the first byte that could not be.
/// It may say then that it has copied all. If this count has changed over a copy, perhaps by another thread's fault,
/// the caller knows nothing of its buffer.
#[inline]
pub fn faults() -> u64 {
    #[cfg(feature = "copy-faults")]
    {
        use core::sync::atomic::{Ordering, compiler_fence};
        // The handler runs in this thread, between two instructions of the copy; no other thread's count matters.
        compiler_fence(Ordering::SeqCst); // partner: the instruction that faults, which the compiler is not to pass
        let faults = FAULTS.load(Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst); // as above
        faults
    }
    #[cfg(not(feature = "copy-faults"))]
    0
}

/// Counts a fault. For the signal handler, before the copy continues.
#[cfg(feature = "copy-faults")]
#[inline]
pub fn note_fault() {
    FAULTS.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
}

/// Copies `len` bytes out of the arena.
///
/// # Safety
/// * `from..from + len` lies in a mapped arena. Others may be writing there.
/// * `to..to + len` is valid for writes and no other thread touches it.
/// * The two ranges do not overlap.
#[inline]
pub unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(any(quinion_model, quinion_portable, miri))))]
    // SAFETY: the caller's promise is this function's.
    unsafe {
        x86::copy(from, to, len);
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(quinion_model, quinion_portable, miri)))))]
    // SAFETY: the caller's promise is this function's.
    unsafe {
        portable::copy_out(from, to, len);
    }
}

/// Copies `len` bytes into the arena, or zeroes them if `from` is `None`.
///
/// # Safety
/// * `to..to + len` lies in a mapped arena and its frames are owned by the caller: a locked folio. Readers that came by
///   a stale hint may be looking; they throw their copies away.
/// * `from..from + len` is valid for reads and no thread writes it meanwhile.
/// * The two ranges do not overlap.
#[inline]
pub unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
    crate::arena::before_bytes();
    #[cfg(all(target_arch = "x86_64", not(any(quinion_model, quinion_portable, miri))))]
    // SAFETY: the caller's promise is this function's.
    unsafe {
        x86::copy(from, to, len);
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(quinion_model, quinion_portable, miri)))))]
    // SAFETY: the caller's promise is this function's.
    unsafe {
        portable::copy_in(from, to, len);
    }
}

/// Zeroes `len` bytes of the arena.
///
/// # Safety
/// As for the destination of [`copy_in`].
#[inline]
pub unsafe fn zero(to: *mut u8, len: usize) {
    static ZEROES: [u8; 4096] = [0; 4096];
    let mut done = 0;
    while done < len {
        let step = (len - done).min(ZEROES.len());
        // SAFETY: the destination is inside the caller's range; the source is a constant.
        unsafe { copy_in(ZEROES.as_ptr(), to.add(done), step) };
        done += step;
    }
}

/// The story, and the copy wherever there is no assembly.
pub mod portable {
    use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

    const WORD: usize = size_of::<u64>();

    /// [`super::copy_out`] as relaxed atomic loads.
    ///
    /// # Safety
    /// That of [`super::copy_out`].
    #[inline]
    pub unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
        let head = from.align_offset(WORD).min(len);
        let words = (len - head) / WORD;
        for at in (0..head).chain(head + words * WORD..len) {
            // SAFETY: `at < len`; the source is only ever accessed atomically or from outside.
            unsafe { to.add(at).write(AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed)) };
        }
        for word in 0..words {
            let at = head + word * WORD;
            // SAFETY: as above, and `from + head` is aligned to a word.
            unsafe {
                let value = AtomicU64::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
                to.add(at).cast::<u64>().write_unaligned(value);
            }
        }
    }

    /// [`super::copy_in`] as relaxed atomic stores.
    ///
    /// # Safety
    /// That of [`super::copy_in`].
    #[inline]
    pub unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
        let head = to.align_offset(WORD).min(len);
        let words = (len - head) / WORD;
        for at in (0..head).chain(head + words * WORD..len) {
            // SAFETY: `at < len`; the destination is only ever accessed atomically or from outside.
            unsafe { AtomicU8::from_ptr(to.add(at)).store(from.add(at).read(), Ordering::Relaxed) };
        }
        for word in 0..words {
            let at = head + word * WORD;
            // SAFETY: as above, and `to + head` is aligned to a word.
            unsafe {
                let value = from.add(at).cast::<u64>().read_unaligned();
                AtomicU64::from_ptr(to.add(at).cast()).store(value, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(all(test, not(quinion_model)))]
mod tests {
    use proptest::prelude::*;

    type CopyFn = unsafe fn(*const u8, *mut u8, usize);

    fn check(copy: CopyFn, seed: u8, at: usize, to: usize, len: usize) {
        let source: Vec<u8> = (0..at + len + 64).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect();
        let mut target = vec![0xa5u8; to + len + 64];
        // SAFETY: both ranges lie in their vectors, which are not shared.
        unsafe { copy(source.as_ptr().add(at), target.as_mut_ptr().add(to), len) };
        assert_eq!(target[to..to + len], source[at..at + len]);
        assert!(
            target[..to].iter().chain(&target[to + len..]).all(|&b| b == 0xa5),
            "wrote outside its range"
        );
    }

    proptest! {
        #[test]
        fn every_copy_moves_its_range_and_nothing_else(
            seed: u8, at in 0usize..80, to in 0usize..80,
            len in prop_oneof![0usize..300, 900usize..1200, 4000usize..4200, 0usize..70_000],
        ) {
            check(super::copy_out, seed, at, to, len);
            check(super::copy_in, seed, at, to, len);
            check(super::portable::copy_out, seed, at, to, len);
            check(super::portable::copy_in, seed, at, to, len);
            #[cfg(all(target_arch = "x86_64", not(any(quinion_portable, miri))))]
            for vector in super::x86::vectors() {
                if len <= super::x86::VECTOR_BYTES_MAX {
                    check(vector, seed, at, to, len);
                }
            }
        }
    }

    #[test]
    fn zero_zeroes_its_range_and_nothing_else() {
        let mut target = vec![7u8; 10_000];
        // SAFETY: the range lies in the vector.
        unsafe { super::zero(target.as_mut_ptr().add(5), 9_000) };
        assert!(target[5..9_005].iter().all(|&b| b == 0));
        assert!(target[..5].iter().chain(&target[9_005..]).all(|&b| b == 7));
    }
}
