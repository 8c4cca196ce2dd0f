//! Verify: each chunk of a pack, and of those that it refers to, is read and compared with its digest.
//!
//! A damaged header or index is an error of the whole, since nothing says then where a chunk lies. Damaged chunks are
//! counted, and the first of them reported: the rest of the pack may still be of use.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use super::open::open_local;
use super::reader::Pack;
use super::request::{DamagedChunk, PackError, PackProgress, VerifyReport};
use super::workers::{batches, each_chunk, workers_of_machine};

/// Damaged chunks that are reported one by one.
const REPORTED_MAX: usize = 64;

/// Reads all of the pack at `path`, and what it takes from others. `progress` is called after some MiB each time, and
/// may end it. Blocks.
///
/// # Errors
/// It is no pack, its header or index is damaged, a pack that it refers to is missing or another; or `progress` ends
/// it. A damaged chunk is no error: see [`VerifyReport::damaged_chunks`].
pub fn verify(
    path: &Path,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<VerifyReport, PackError> {
    let pack = open_local(path)?;
    let mut report = VerifyReport {
        identity: pack.identity(),
        bytes: pack.bytes(),
        file_bytes: pack.file_bytes(),
        chunks: pack.chunks(),
        damaged_chunks: 0,
        damaged: Vec::new(),
        packs: pack.names().iter().map(|name| PathBuf::from(name.as_os_str())).collect(),
    };
    let mut buffers = vec![Vec::new(); workers_of_machine()];
    for batch in batches(pack.chunks(), pack.chunk_bytes(), buffers.len()) {
        let done_bytes = pack.bytes().min(batch.end * u64::from(pack.chunk_bytes()));
        let found = each_chunk(&mut buffers, batch, |buffer, chunk| {
            Ok::<_, PackError>(damage_of(&pack, chunk, buffer))
        })?;
        for damaged in found.into_iter().flatten() {
            report.damaged_chunks += 1;
            if report.damaged.len() < REPORTED_MAX {
                report.damaged.push(damaged);
            }
        }
        if progress(PackProgress { done_bytes, bytes: pack.bytes() }).is_break() {
            return Err(PackError::Interrupted);
        }
    }
    Ok(report)
}

fn damage_of(pack: &Pack, chunk: u64, buffer: &mut Vec<u8>) -> Option<DamagedChunk> {
    let (from, len) = (chunk * u64::from(pack.chunk_bytes()), pack.chunk_len(chunk));
    buffer.resize(len, 0);
    let error = pack.read_chunk(chunk, buffer).err()?;
    Some(DamagedChunk::new(from..from + len as u64, error))
}
