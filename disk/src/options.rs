//! Options: where the store is, how large, and how much memory it may use for pages on their way.
//!
//! They are checked when the store is opened, so that a mistake is an error and not a store of another size.

use std::path::PathBuf;
use std::time::Duration;

use crate::device::IN_USE_MAX;
use crate::error::DiskError;
use crate::layout::{BYTES_MAX, BYTES_MIN, SEGMENT_BYTES};

const BUFFERS_MIN: usize = 3;
/// A disk that is well answers within some milliseconds, and one that recovers from an error within a second or two.
const ANSWER_MAX: Duration = Duration::from_secs(5);
const REST: Duration = Duration::from_secs(60);

/// A store on a local disk.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DiskOptions {
    /// The folder for its file, `quinion.disk`; it is made if it is not there. One process at a time uses it; another
    /// waits for that to end, for [`DiskOptions::in_use_max`].
    pub folder: PathBuf,
    /// The size of the file in bytes, 16 MiB to 64 TiB; rounded down to MiB. The space is taken at once.
    pub bytes: u64,
    /// Memory for segments that are being filled or written, in bytes: 3 MiB at least. Without room nothing is put.
    pub buffer_bytes: usize,
    /// How long a request to the disk is waited for before the disk is left alone.
    pub(crate) answer_max: Duration,
    /// Time limit for an answer while the store is opened.
    pub(crate) opening_answer_max: Duration,
    /// How long a disk that fails is left alone at first.
    pub(crate) rest: Duration,
    pub(crate) in_use_max: Duration,
}

impl DiskOptions {
    /// A store of `bytes` bytes in `folder`, with 8 MiB of memory for pages on their way.
    pub fn new(folder: impl Into<PathBuf>, bytes: u64) -> Self {
        Self {
            folder: folder.into(),
            bytes,
            buffer_bytes: 8 << 20,
            answer_max: ANSWER_MAX,
            opening_answer_max: ANSWER_MAX,
            rest: REST,
            in_use_max: IN_USE_MAX,
        }
    }

    /// Sets the memory for segments that are being filled or written, in bytes.
    #[must_use]
    pub fn buffer_bytes(mut self, bytes: usize) -> Self {
        self.buffer_bytes = bytes;
        self
    }

    /// Sets how long an open waits while another process uses the folder: a process that is about to end, and has a
    /// successor, writes first. By default 2 seconds.
    #[must_use]
    pub fn in_use_max(mut self, time: Duration) -> Self {
        self.in_use_max = time;
        self
    }

    pub(crate) fn check(&self) -> Result<(), DiskError> {
        let can_be = (BYTES_MIN..=BYTES_MAX).contains(&self.bytes);
        if can_be { Ok(()) } else { Err(DiskError::Size { bytes: self.bytes }) }
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        (u64::from(self.segments()) + 1) * SEGMENT_BYTES as u64
    }

    /// The superblock has the first MiB.
    pub(crate) fn segments(&self) -> u32 {
        (self.bytes / SEGMENT_BYTES as u64 - 1) as u32
    }

    pub(crate) fn buffers(&self) -> usize {
        (self.buffer_bytes / SEGMENT_BYTES).max(BUFFERS_MIN)
    }
}

/// Times that tests set; each stays as it is if not given.
#[derive(Clone, Copy, Default, Debug)]
pub struct TestTimes {
    /// How long a request to the disk is waited for before the disk is left alone.
    pub answer_max: Option<Duration>,
    /// How long each answer of the disk is waited for when it is opened.
    pub opening_answer_max: Option<Duration>,
    /// How long a disk that fails is left alone at first.
    pub rest: Option<Duration>,
}

/// Returns `options` with these times.
#[must_use]
pub fn with_times(mut options: DiskOptions, times: TestTimes) -> DiskOptions {
    options.answer_max = times.answer_max.unwrap_or(options.answer_max);
    options.opening_answer_max = times.opening_answer_max.unwrap_or(options.opening_answer_max);
    options.rest = times.rest.unwrap_or(options.rest);
    options
}
