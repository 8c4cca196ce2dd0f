//! Batch: many reads in one call.
//!
//! Reads of the files of caches go to the library together, cache by cache: hits are looked up side by side, and the
//! missing pages of all are on their way before the first is waited for. Of a server's files all ranges are asked for
//! first, too; reads of memory files are copies.
//!
//! Buffers that overlap would give Rust two exclusive references to one byte, so they are refused. The check looks at
//! each neighbour once if the buffers rise, as they mostly do.

use std::ffi::{c_int, c_void};

use quinion::{BatchRead, File, ReadOptions};
use quinion_service::ClientFile;

use crate::args;
use crate::ffi::{Failure, Result, ffi_call};
use crate::file::{Source, qn_file, read_options};

/// One read of a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_read {
    /// From which file.
    pub file: *const qn_file,
    /// Where to; it may be NULL if length is 0.
    pub buffer: *mut c_void,
    /// How many bytes at most.
    pub length: usize,
    /// From which byte of the file on.
    pub offset: u64,
    /// Set by the call: what qn_pread() would have returned, so many bytes or a negative errno.
    pub result: i64,
}

struct BatchRequest<'a> {
    file: &'a qn_file,
    buffer: &'a mut [u8],
    offset: u64,
}

/// Makes count reads, of one file or several: as many calls of qn_pread() would, but side by side. flags are
/// QN_READ_..., for all of them.
///
/// Each read has its own result, and one that fails does not stop others. Returns 0 if all succeeded; else the first
/// error, whose message is kept. Buffers must not overlap. Reads of ascending offsets let neighbouring missing pages be
/// read as one. Blocks as qn_pread() does.
///
/// Errors: -EINVAL (also buffers that overlap; nothing was read then, and each result is -EINVAL); those of qn_pread()
/// and qn_pread_with().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pread_batch(reads: *mut qn_read, count: usize, flags: u32) -> c_int {
    ffi_call(|| {
        if count == 0 {
            return Ok(0);
        }
        if reads.is_null() || count > isize::MAX as usize / size_of::<qn_read>() {
            return Err(Failure::invalid(format!(
                "{count} reads at {reads:?} cannot be; pass an array of them"
            )));
        }
        // SAFETY: the caller's contract: so many structs, used by this call alone.
        let reads = unsafe { std::slice::from_raw_parts_mut(reads, count) };
        // SAFETY: the caller's contract, for each of them.
        let all = read_options(flags).and_then(|options| Ok((unsafe { wanted(reads) }?, options)));
        let (wanted, options) = match all {
            Ok(all) => all,
            Err(failure) => {
                reads.iter_mut().for_each(|read| read.result = -i64::from(libc::EINVAL));
                return Err(failure);
            }
        };
        let mut first = Ok(0);
        answer(wanted, options, |place, result| {
            reads[place].result = match result {
                Ok(bytes) => bytes,
                Err(failure) => {
                    let errno = failure.errno();
                    if first.is_ok() {
                        first = Err(failure);
                    }
                    -i64::from(errno)
                }
            };
        });
        first
    })
}

/// The reads, if all can be made as they are. They do not borrow the structs, whose results are set beside them.
unsafe fn wanted<'a>(reads: &[qn_read]) -> Result<Vec<BatchRequest<'a>>> {
    check_apart(reads)?;
    let wanted = reads.iter().map(|read| {
        // SAFETY: as the caller's; the buffers do not overlap.
        unsafe {
            let file = args::handle(read.file, "the file of a read")?;
            let buffer = args::buffer(read.buffer, read.length, read.offset)?;
            Ok(BatchRequest { file, buffer, offset: read.offset })
        }
    });
    wanted.collect()
}

fn check_apart(reads: &[qn_read]) -> Result<()> {
    let range = |read: &qn_read| (read.buffer.addr(), read.buffer.addr().saturating_add(read.length));
    let is_apart = |pair: &[(usize, usize)]| pair[0].1 <= pair[1].0;
    let mut ranges: Vec<_> = reads.iter().filter(|read| read.length > 0).map(range).collect();
    if !ranges.windows(2).all(is_apart) {
        ranges.sort_unstable();
        if !ranges.windows(2).all(is_apart) {
            let text = "buffers of the batch overlap; give each read a buffer of its own";
            return Err(Failure::invalid(text));
        }
    }
    Ok(())
}

/// Makes the reads, and tells the result of each, in their order.
fn answer(wanted: Vec<BatchRequest<'_>>, options: ReadOptions, mut tell: impl FnMut(usize, Result<i64>)) {
    let mut results: Vec<Option<Result<i64>>> = Vec::new();
    results.resize_with(wanted.len(), || None);
    let (mut batch, mut places) = (Vec::<(&File, BatchRead<'_>)>::new(), Vec::new());
    let (mut rest, mut cache) = (Vec::new(), None);
    for (place, BatchRequest { file, buffer, offset }) in wanted.into_iter().enumerate() {
        match &file.source {
            Source::Cached(cached) => {
                cache = cache.or(file.cache.as_ref());
                batch.push((cached, BatchRead::new(buffer, offset)));
                places.push(place);
            }
            Source::Served(served) if is_ready(served, buffer, offset) => {
                results[place] = Some(Ok(buffer.len() as i64))
            }
            _ => rest.push((place, BatchRequest { file, buffer, offset })),
        }
    }
    if let Some(cache) = cache {
        cache.read_batch_with(&mut batch, options);
    }
    for (place, (_, read)) in places.into_iter().zip(batch) {
        results[place] = Some(read.into_result().map(|bytes| bytes as i64).map_err(Failure::from));
    }
    for (place, BatchRequest { file, buffer, offset }) in rest {
        results[place] = Some(file.read_with(buffer, offset, options));
    }
    for (place, result) in results.into_iter().enumerate() {
        tell(place, result.expect("each read was made above"));
    }
}

/// Reads what a server has in memory. Else the server is asked to fetch it, while the other reads are made.
fn is_ready(file: &ClientFile, buffer: &mut [u8], offset: u64) -> bool {
    let is_ready = file.read_ready(buffer, offset).unwrap_or(false);
    if !is_ready {
        // A hint that cannot be given is a read that waits.
        let _ = file.prefetch(offset..offset + buffer.len() as u64);
    }
    is_ready
}
