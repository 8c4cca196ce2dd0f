//! The copy on x86-64: a vector loop for little, `rep movsb` for much.
//!
//! Every block tells the story of [`super::portable`]. None is declared `pure` or `nomem`, so each is also a barrier to
//! the compiler.
//!
//! The vector loops move 64 bytes (32, 16) a step and finish with one step that ends exactly at the last byte and
//! overlaps the one before it; lengths below one step go by `rep movsb` or, below 16 bytes, by words.
//!
//! In a viewer's process either end of a copy may be memory that is not there: the program may pass any address. So
//! each block of a build without the standard library, which is a viewer's, notes in a section of its own where its
//! accesses begin and end, and where to continue if one of them faults: at its end, with the bytes copied until then.
//! The handler of the signal calls [`resume_after_fault`].

use core::arch::asm;
use core::sync::atomic::{AtomicU8, Ordering};

/// Notes that a fault between labels 20 and 21 goes on at 21: three distances, each from where it stands.
#[cfg(feature = "copy-faults")]
macro_rules! may_fault {
    () => {
        concat!(
            ".pushsection quinion_faults, \"aR\", @progbits\n",
            ".long 20b - .\n",
            ".long 21b - .\n",
            ".popsection"
        )
    };
}
/// Where the caller guarantees both ends there is nothing to note.
#[cfg(not(feature = "copy-faults"))]
macro_rules! may_fault {
    () => {
        ""
    };
}

#[cfg(feature = "copy-faults")]
#[repr(C)]
struct MayFault {
    /// From this field to the first instruction that may fault.
    begin: i32,
    /// From this field to the first behind those that may, where it goes on.
    end: i32,
}

#[cfg(feature = "copy-faults")]
impl MayFault {
    fn address(field: &i32) -> usize {
        core::ptr::from_ref(field).addr().wrapping_add_signed(*field as isize)
    }
}

// The linker's names for the section's ends are hidden from other objects.
#[cfg(feature = "copy-faults")]
core::arch::global_asm!(".hidden __start_quinion_faults", ".hidden __stop_quinion_faults");

/// Where a copy that faulted at the instruction `at` is to go on; `None` if no copy's instruction is there.
#[cfg(feature = "copy-faults")]
pub fn resume_after_fault(at: usize) -> Option<usize> {
    unsafe extern "C" {
        static __start_quinion_faults: MayFault;
        static __stop_quinion_faults: MayFault;
    }
    let (first, end) = (&raw const __start_quinion_faults, &raw const __stop_quinion_faults);
    let count = (end.addr() - first.addr()) / size_of::<MayFault>();
    // SAFETY: between the two lie the notes of all blocks and nothing else; they are never written.
    let all = unsafe { core::slice::from_raw_parts(first, count) };
    let hit = all.iter().find(|it| (MayFault::address(&it.begin)..MayFault::address(&it.end)).contains(&at));
    hit.map(|it| MayFault::address(&it.end))
}
/// Always `None`: without the feature no block is noted.
#[cfg(not(feature = "copy-faults"))]
pub fn resume_after_fault(_: usize) -> Option<usize> {
    None
}

/// The most bytes a vector loop is used for.
pub const VECTOR_BYTES_MAX: usize = 1024;

#[cfg(test)]
type CopyFn = unsafe fn(*const u8, *mut u8, usize);

/// # Safety
/// That of [`super::copy_out`].
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise, handed on; the level's features were found at run time.
    unsafe {
        if len > VECTOR_BYTES_MAX {
            return string(from, to, len);
        }
        match if len >= 32 { level() } else { SSE2 } {
            AVX512 if len >= 64 => avx512(from, to, len),
            AVX512 | AVX2 => avx2(from, to, len),
            _ => sse2(from, to, len),
        }
    }
}

const UNKNOWN: u8 = 0;
const SSE2: u8 = 1;
const AVX2: u8 = 2;
const AVX512: u8 = 3;
static LEVEL: AtomicU8 = AtomicU8::new(UNKNOWN);

#[inline]
fn level() -> u8 {
    match LEVEL.load(Ordering::Relaxed) {
        UNKNOWN => find_level(),
        known => known,
    }
}

#[cold]
fn find_level() -> u8 {
    let found = detect();
    LEVEL.store(found, Ordering::Relaxed);
    found
}

/// Asks the processor, and the system whether it saves the wide registers. Needs no standard library.
fn detect() -> u8 {
    use core::arch::x86_64::{__cpuid_count, _xgetbv};
    #[allow(unused_unsafe, reason = "the intrinsic became safe after the oldest compiler we build with")]
    fn cpuid(leaf: u32) -> core::arch::x86_64::CpuidResult {
        // SAFETY: every 64-bit x86 processor has the instruction.
        unsafe { __cpuid_count(leaf, 0) }
    }
    #[target_feature(enable = "xsave")]
    fn saved_state() -> u64 {
        // SAFETY: the caller has seen OSXSAVE, so the instruction exists.
        unsafe { _xgetbv(0) }
    }
    let (leaf1, most) = (cpuid(1), cpuid(0).eax);
    let osxsave = leaf1.ecx & (1 << 27) != 0;
    let avx = leaf1.ecx & (1 << 28) != 0;
    if most < 7 || !osxsave || !avx {
        return SSE2;
    }
    // SAFETY: OSXSAVE is set, so `xgetbv` may be executed.
    let saved = unsafe { saved_state() };
    let leaf7 = cpuid(7);
    let avx2 = leaf7.ebx & (1 << 5) != 0 && saved & 0b110 == 0b110;
    let avx512 = leaf7.ebx & (1 << 16) != 0 && saved & 0b1110_0110 == 0b1110_0110;
    match (avx2, avx512) {
        (true, true) => AVX512,
        (true, false) => AVX2,
        _ => SSE2,
    }
}

/// The vector loops this machine can run, for tests.
#[cfg(test)]
pub fn vectors() -> Vec<CopyFn> {
    let all: [(u8, CopyFn); 3] = [(SSE2, sse2), (AVX2, avx2_any), (AVX512, avx512_any)];
    all.into_iter().filter(|(needs, _)| level() >= *needs).map(|(_, copy)| copy).collect()
}
#[cfg(test)]
unsafe fn avx2_any(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise, handed on.
    unsafe { if len >= 32 { avx2(from, to, len) } else { sse2(from, to, len) } }
}
#[cfg(test)]
unsafe fn avx512_any(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise, handed on.
    unsafe { if len >= 64 { avx512(from, to, len) } else { sse2(from, to, len) } }
}

/// # Safety
/// That of [`super::copy_out`].
#[inline]
unsafe fn string(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: reads `len` bytes at `from`, writes them at `to`; the direction flag is clear by the ABI.
    unsafe {
        asm!(
            "20: rep movsb",
            "21:",
            may_fault!(),
            inout("rcx") len => _, inout("rsi") from => _, inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Uses a register above 15, so that the halves shared with older code stay clean and need no `vzeroupper`.
///
/// # Safety
/// That of [`super::copy_out`]; the machine has AVX-512F and `len >= 64`.
#[inline]
unsafe fn avx512(from: *const u8, to: *mut u8, len: usize) {
    debug_assert!(len >= 64);
    // SAFETY: every access is inside `0..len`: whole steps while one fits, then one that ends at `len`.
    unsafe {
        asm!(
            "20: lea {last}, [{len} - 64]",
            "xor {at:e}, {at:e}",
            "cmp {at}, {last}",
            "jae 3f",
            "2:",
            "vmovdqu64 zmm16, [{from} + {at}]",
            "vmovdqu64 [{to} + {at}], zmm16",
            "add {at}, 64",
            "cmp {at}, {last}",
            "jb 2b",
            "3:",
            "vmovdqu64 zmm16, [{from} + {last}]",
            "vmovdqu64 [{to} + {last}], zmm16",
            "21:",
            may_fault!(),
            from = in(reg) from, to = in(reg) to, len = in(reg) len,
            at = out(reg) _, last = out(reg) _, out("xmm16") _,
            options(nostack),
        );
    }
}

/// # Safety
/// That of [`super::copy_out`]; the machine has AVX2 and `len >= 32`.
#[inline]
unsafe fn avx2(from: *const u8, to: *mut u8, len: usize) {
    debug_assert!(len >= 32);
    // SAFETY: as in `avx512`, in steps of 32.
    unsafe {
        asm!(
            "20: lea {last}, [{len} - 32]",
            "xor {at:e}, {at:e}",
            "cmp {at}, {last}",
            "jae 3f",
            "2:",
            "vmovdqu ymm0, [{from} + {at}]",
            "vmovdqu [{to} + {at}], ymm0",
            "add {at}, 32",
            "cmp {at}, {last}",
            "jb 2b",
            "3:",
            "vmovdqu ymm0, [{from} + {last}]",
            "vmovdqu [{to} + {last}], ymm0",
            "21: vzeroupper",
            may_fault!(),
            from = in(reg) from, to = in(reg) to, len = in(reg) len,
            at = out(reg) _, last = out(reg) _,
            // `vzeroupper` clears the upper half of every one of these.
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            options(nostack),
        );
    }
}

/// # Safety
/// That of [`super::copy_out`].
#[inline]
unsafe fn sse2(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as in `avx512`, in steps of 16; below 16 bytes the two 8, 4, 2 or 1 byte moves cover
    // the range from both ends.
    unsafe {
        match len {
            16.. => asm!(
                "20: lea {last}, [{len} - 16]",
                "xor {at:e}, {at:e}",
                "cmp {at}, {last}",
                "jae 3f",
                "2:",
                "movdqu {v}, [{from} + {at}]",
                "movdqu [{to} + {at}], {v}",
                "add {at}, 16",
                "cmp {at}, {last}",
                "jb 2b",
                "3:",
                "movdqu {v}, [{from} + {last}]",
                "movdqu [{to} + {last}], {v}",
                "21:",
                may_fault!(),
                from = in(reg) from, to = in(reg) to, len = in(reg) len,
                at = out(reg) _, last = out(reg) _, v = out(xmm_reg) _,
                options(nostack),
            ),
            8..16 => asm!(
                "20: mov {a}, [{from}]",
                "mov {b}, [{from} + {len} - 8]",
                "mov [{to}], {a}",
                "mov [{to} + {len} - 8], {b}",
                "21:",
                may_fault!(),
                from = in(reg) from, to = in(reg) to, len = in(reg) len, a = out(reg) _, b = out(reg) _,
                options(nostack, preserves_flags),
            ),
            4..8 => asm!(
                "20: mov {a:e}, [{from}]",
                "mov {b:e}, [{from} + {len} - 4]",
                "mov [{to}], {a:e}",
                "mov [{to} + {len} - 4], {b:e}",
                "21:",
                may_fault!(),
                from = in(reg) from, to = in(reg) to, len = in(reg) len, a = out(reg) _, b = out(reg) _,
                options(nostack, preserves_flags),
            ),
            1..4 => string(from, to, len),
            0 => {}
        }
    }
}
