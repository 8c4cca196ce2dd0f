//! Arguments: what C passes, looked at before it is used.
//!
//! ```text
//!   NULL where something has to be           -EINVAL
//!   a struct of size 0, or smaller than that of the first release     -EINVAL
//!   a smaller struct of an older release     what it lacks is 0, which is the default of every field
//!   a larger struct of a newer release       taken if all that this release does not know is 0; else -EINVAL
//!   offset + length beyond 2^63 - 1          -EINVAL
//!   a flag or number that is not known       -EINVAL
//! ```
//!
//! What cannot be seen is left to the caller's contract, at the head of lib.rs.

use std::ffi::{CStr, c_char, c_void};
use std::mem::{MaybeUninit, size_of};
use std::time::Duration;

use quinion::internals::sys::fork::ForkGuard;

use crate::ffi::{Failure, Result};

/// No struct of any release is larger: a larger size was never set.
const STRUCT_BYTES_MAX: usize = 4096;

/// A struct of C's that begins with its size.
///
/// # Safety
/// It is `repr(C)`, its first field is a `usize`, it has no padding that would hold something else than zeros of a
/// caller that set all to zero, and all bytes being zero is a value of it.
pub(crate) unsafe trait VersionedStruct: Copy {
    const NAME: &'static str;
    /// The bytes of the first release that had it.
    const BYTES_MIN: usize = size_of::<Self>();
}

pub(crate) unsafe fn handle<'a, T>(pointer: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: the caller's contract: a pointer that is not NULL is of a handle that is open.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

pub(crate) fn not_null<T>(pointer: *const T, what: &str) -> Result<()> {
    if pointer.is_null() { Err(null(what)) } else { Ok(()) }
}

#[cold]
fn null(what: &str) -> Failure {
    Failure::invalid(format!("{what} is NULL; pass what an open of this library gave, or an address"))
}

/// A handle on its way out: NULL until the call has succeeded.
pub(crate) unsafe fn out<'a, T>(pointer: *mut *mut T) -> Result<&'a mut *mut T> {
    // SAFETY: the caller's contract: a place for a pointer, which may hold anything.
    let place = unsafe { pointer.as_mut() };
    let place = place.ok_or_else(|| null("the address for the new handle"))?;
    *place = std::ptr::null_mut();
    Ok(place)
}

pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a CStr> {
    not_null(pointer, what)?;
    // SAFETY: the caller's contract: a text that ends with a 0.
    Ok(unsafe { CStr::from_ptr(pointer) })
}

pub(crate) unsafe fn utf8<'a>(pointer: *const c_char, what: &str) -> Result<&'a str> {
    // SAFETY: as the caller's.
    let text = unsafe { text(pointer, what) }?;
    text.to_str().map_err(|_| Failure::invalid(format!("{what} {text:?} is not UTF-8; write it so")))
}

unsafe fn size_of_struct<T: VersionedStruct>(pointer: *const T) -> Result<usize> {
    // SAFETY: the caller's contract: at least its first field is there.
    let size = unsafe { pointer.cast::<usize>().read() };
    if (T::BYTES_MIN..=STRUCT_BYTES_MAX).contains(&size) {
        return Ok(size);
    }
    let (name, least) = (T::NAME, T::BYTES_MIN);
    Err(Failure::invalid(format!(
        "the size of a struct {name} is {size}, and not {least} or more; set its field size to sizeof(struct {name})"
    )))
}

/// The options that a struct holds; NULL stands for the defaults.
pub(crate) unsafe fn options<T: VersionedStruct>(pointer: *const T) -> Result<T> {
    let mut options = MaybeUninit::<T>::zeroed();
    if pointer.is_null() {
        // SAFETY: all bytes being zero is a value (contract of `VersionedStruct`).
        return Ok(unsafe { options.assume_init() });
    }
    // SAFETY: as the caller's.
    let size = unsafe { size_of_struct(pointer) }?;
    let known = size.min(size_of::<T>());
    let bytes = pointer.cast::<u8>();
    // SAFETY: the struct has `size` bytes by the caller's contract, and `options` has room for those that are known.
    unsafe { bytes.copy_to_nonoverlapping(options.as_mut_ptr().cast(), known) };
    // SAFETY: as before, of the bytes behind those that are known.
    let is_zero = |at: usize| unsafe { bytes.add(at).read() } == 0;
    if !(known..size).all(is_zero) {
        let name = T::NAME;
        return Err(Failure::invalid(format!(
            "a struct {name} of {size} bytes asks for something that this release does not know, whose struct has \
             {known} bytes; use a newer library, or leave the fields that it does not know at 0"
        )));
    }
    // SAFETY: bytes of a struct of that type, the missing ones zero (contract of `VersionedStruct`).
    Ok(unsafe { options.assume_init() })
}

/// Gives the caller the part of a struct that it has room for, and zeros for what it has more.
pub(crate) unsafe fn give<T: VersionedStruct>(pointer: *mut T, value: &T) -> Result<()> {
    if pointer.is_null() {
        return Err(null(&format!("the address of a struct {}", T::NAME)));
    }
    // SAFETY: as the caller's.
    let size = unsafe { size_of_struct(pointer.cast_const()) }?;
    let known = size.min(size_of::<T>());
    let head = size_of::<usize>();
    let (to, from) = (pointer.cast::<u8>(), std::ptr::from_ref(value).cast::<u8>());
    // SAFETY: the caller's struct has `size` bytes, and `value` has `known`; the field `size` stays as it is.
    unsafe {
        to.add(head).copy_from_nonoverlapping(from.add(head), known - head);
        to.add(known).write_bytes(0, size - known);
    }
    Ok(())
}

#[inline(always)]
pub(crate) unsafe fn buffer<'a>(pointer: *mut c_void, length: usize, offset: u64) -> Result<&'a mut [u8]> {
    if length == 0 {
        return Ok(&mut []);
    }
    check(pointer, length, offset)?;
    // SAFETY: the caller's contract: `length` bytes that no other uses during the call. They may be uninitialized; the
    // library only writes to them.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), length) })
}

pub(crate) unsafe fn bytes<'a>(pointer: *const c_void, length: usize, offset: u64) -> Result<&'a [u8]> {
    if length == 0 {
        return Ok(&[]);
    }
    check(pointer, length, offset)?;
    // SAFETY: the caller's contract: `length` bytes that are not changed during the call.
    Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), length) })
}

#[inline(always)]
fn check(pointer: *const c_void, length: usize, offset: u64) -> Result<()> {
    if pointer.is_null() {
        return Err(null("the buffer"));
    }
    check_range(offset, length as u64)
}

#[inline(always)]
pub(crate) fn check_range(offset: u64, length: u64) -> Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(too_far(offset, length)),
    }
}

#[cold]
fn too_far(offset: u64, length: u64) -> Failure {
    Failure::invalid(format!(
        "{length} bytes at byte {offset} end beyond 2^63 - 1, where no file has bytes; pass an offset and a length \
         whose sum is no more than that"
    ))
}

pub(crate) fn check_flags(flags: u32, known: u32, what: &str) -> Result<()> {
    if flags & !known == 0 {
        return Ok(());
    }
    let unknown = flags & !known;
    Err(Failure::invalid(format!(
        "{what} has the flags {unknown:#x}, which this release does not know; use those of its header"
    )))
}

#[cold]
pub(crate) fn unknown(what: &str, number: u32) -> Failure {
    Failure::invalid(format!("{what} {number} is not known to this release; use a constant of its header"))
}

pub(crate) fn milliseconds(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// Bytes as a C call returns them.
pub(crate) fn count(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

pub(crate) fn give_handle<T>(place: &mut *mut T, value: T) {
    *place = Box::into_raw(Box::new(value));
}

/// Takes a handle back. In a forked child it is left where it is: see the head of lib.rs, 4.
pub(crate) unsafe fn take_handle<T: Handle>(pointer: *mut T, what: &str) -> Result<Option<T>> {
    not_null(pointer, what)?;
    // SAFETY: the caller's contract: an open handle, which `give_handle` has made, and no call uses it any more.
    let process = unsafe { &*pointer }.process();
    if process.is_forked() {
        return Ok(None);
    }
    // SAFETY: as above.
    Ok(Some(*unsafe { Box::from_raw(pointer) }))
}

pub(crate) trait Handle: Send + Sync {
    fn process(&self) -> ForkGuard;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    struct Old {
        size: usize,
        one: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    struct New {
        size: usize,
        one: u64,
        two: u64,
    }

    // SAFETY: two numbers without padding.
    unsafe impl VersionedStruct for Old {
        const NAME: &'static str = "old";
    }
    // SAFETY: three numbers without padding.
    unsafe impl VersionedStruct for New {
        const NAME: &'static str = "new";
        const BYTES_MIN: usize = size_of::<Old>();
    }

    #[test]
    fn structs_of_older_releases_have_the_defaults_of_newer_fields() {
        let old = [16_usize, 5, 99];
        // SAFETY: a struct that says its size, of three words.
        let read = unsafe { options(old.as_ptr().cast::<New>()) }.unwrap();
        assert_eq!((read.one, read.two), (5, 0));
    }

    #[test]
    fn structs_of_newer_releases_are_taken_if_they_ask_for_nothing_new() {
        // SAFETY: structs that say their size, of three words.
        let read = |words: [usize; 3]| unsafe { options(words.as_ptr().cast::<Old>()) };
        assert_eq!(read([24, 5, 0]).unwrap().one, 5);
        assert!(read([24, 5, 1]).is_err());
        assert!(read([0, 5, 0]).is_err() && read([15, 5, 0]).is_err() && read([usize::MAX, 5, 0]).is_err());
    }

    #[test]
    fn callers_are_given_as_much_as_they_have_room_for() {
        let value = New { size: 24, one: 1, two: 2 };
        let mut words = [16_usize, 9, 9, 9];
        // SAFETY: a struct that says its size, of two words, then of four.
        unsafe { give(words.as_mut_ptr().cast::<New>(), &value) }.unwrap();
        assert_eq!(words, [16, 1, 9, 9]);
        words[0] = 32;
        // SAFETY: as above.
        unsafe { give(words.as_mut_ptr().cast::<New>(), &value) }.unwrap();
        assert_eq!(words, [32, 1, 2, 0]);
    }
}
