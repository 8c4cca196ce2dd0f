//! Way: by what a stream is read, and what is hot beside it.
//!
//! A stream opens its file anew for each part, so that every part is a stream of its own, to the kernel and to Quinion.

use std::fs::File as KernelFile;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use quinion::{Cache, File};
use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::fixtures::caches::kept_bytes;
use crate::fixtures::pages::PAGE;
use crate::fixtures::scratch::FirstWords;
use crate::harness::Unmeasured;
use crate::sys::{HugeMemory, RawReader};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    Ours,
    Plain,
    Pinned,
    Buffered,
    DontCache,
    Direct,
}

/// `RWF_DONTCACHE`, from Linux 6.14 on.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
const DIRECT_BYTES: usize = 512 << 10;

impl Way {
    /// Quinion's first.
    pub const ALL: [Self; 6] =
        [Self::Ours, Self::Plain, Self::Pinned, Self::Buffered, Self::DontCache, Self::Direct];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Ours => "quinion uncached",
            Self::Plain => "quinion plain",
            Self::Pinned => "quinion uncached, pinned",
            Self::Buffered => "kernel buffered",
            Self::DontCache => "kernel DONTCACHE",
            Self::Direct => "O_DIRECT io_uring",
        }
    }

    pub fn is_ours(self) -> bool {
        matches!(self, Self::Ours | Self::Plain | Self::Pinned)
    }

    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|way| way.name() == name)
    }
}

pub struct Streams {
    way: Way,
    pub cache: Option<Cache>,
    block: usize,
    depth: usize,
}

impl Streams {
    /// A stream by `way`, in reads of `block` bytes: Quinion's with a cache of `memory` bytes, the way without a cache
    /// with `depth` reads in flight.
    pub fn new(way: Way, block: usize, memory: u64, depth: usize) -> Result<Self, Unmeasured> {
        let cache = way.is_ours().then(|| Cache::builder().memory(memory).build()).transpose()?;
        Ok(Self { way, cache, block, depth })
    }

    pub fn read(&self, path: &Path, range: Range<u64>, seen: impl Fn(u64)) -> Result<(), Unmeasured> {
        let mut first_words = FirstWords::default();
        match self.way {
            Way::Ours | Way::Plain => {
                let file = self.opened(path)?;
                let read = |buffer: &mut [u8], at| Ok(file.read_at(buffer, at)?);
                self.in_blocks(range.clone(), read, |bytes, at| {
                    first_words.at(bytes, at);
                    seen(bytes.len() as u64);
                })?;
            }
            Way::Pinned => {
                let file = self.opened(path)?;
                let Range { start: mut at, end } = range;
                while at < end {
                    let pinned = file.pin(at, self.block.min((end - at) as usize))?;
                    for chunk in pinned.chunks() {
                        first_words.at(chunk, at);
                        at += chunk.len() as u64;
                        seen(chunk.len() as u64);
                    }
                    if pinned.is_empty() {
                        return Err(ended(at, end));
                    }
                }
            }
            Way::Buffered | Way::DontCache => {
                let file = KernelFile::open(path)?;
                let flags = if self.way == Way::DontCache { DONTCACHE } else { ReadWriteFlags::empty() };
                let read = |buffer: &mut [u8], at| kernel_read(&file, buffer, at, flags);
                self.in_blocks(range.clone(), read, |bytes, at| {
                    first_words.at(bytes, at);
                    seen(bytes.len() as u64);
                })?;
            }
            Way::Direct => {
                let flags = OFlags::DIRECT.bits() as i32;
                let file = KernelFile::options().read(true).custom_flags(flags).open(path)?;
                let raw = RawReader::new(&file, DIRECT_BYTES, self.depth).map_err(no_ring)?;
                let mut places = range.clone().step_by(DIRECT_BYTES);
                raw.read_all(
                    || places.next(),
                    |bytes, at| {
                        first_words.at(bytes, at);
                        seen(bytes.len() as u64);
                    },
                )?;
            }
        }
        first_words.expect(range.end - range.start)
    }

    /// The file for one of Quinion's ways: uncached, but for a plain stream.
    fn opened(&self, path: &Path) -> Result<File, Unmeasured> {
        let file = self.cache.as_ref().expect("we have one").open(path)?;
        file.set_uncached(self.way != Way::Plain)?;
        Ok(file)
    }

    fn in_blocks(
        &self,
        range: Range<u64>,
        read: impl Fn(&mut [u8], u64) -> Result<usize, Unmeasured>,
        mut seen: impl FnMut(&[u8], u64),
    ) -> Result<(), Unmeasured> {
        let Range { start: mut at, end } = range;
        let mut buffer = HugeMemory::new(self.block)?;
        while at < end {
            let wanted = self.block.min((end - at) as usize);
            let bytes = read(&mut buffer[..wanted], at)?;
            if bytes == 0 {
                return Err(ended(at, end));
            }
            seen(&buffer[..bytes], at);
            at += bytes as u64;
        }
        Ok(())
    }

    /// The hot file, as it is read beside this stream: through Quinion's cache if the way is Quinion's, else by the
    /// kernel.
    pub fn hot(&self, path: &Path) -> Result<HotFile, Unmeasured> {
        match &self.cache {
            Some(cache) => Ok(HotFile::Ours(Box::new(cache.open(path)?))),
            None => Ok(HotFile::Kernel(KernelFile::open(path)?)),
        }
    }
}

fn ended(at: u64, end: u64) -> Unmeasured {
    Unmeasured::Failed(format!("the file ends at {at}, before {end}"))
}

fn no_ring(error: std::io::Error) -> Unmeasured {
    Unmeasured::Missing(format!(
        "io_uring with registered buffers is refused: {error}; allow it, and as much locked memory (ulimit -l)"
    ))
}

fn kernel_read(
    file: &KernelFile,
    buffer: &mut [u8],
    at: u64,
    flags: ReadWriteFlags,
) -> Result<usize, Unmeasured> {
    match preadv2(file, &mut [IoSliceMut::new(buffer)], at, flags) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) if flags == DONTCACHE => Err(Unmeasured::Missing(
            "the kernel or the file system has no RWF_DONTCACHE; it takes Linux 6.14 and ext4, xfs or btrfs".to_owned(),
        )),
        result => Ok(result.map_err(std::io::Error::from)?),
    }
}

pub enum HotFile {
    Ours(Box<File>),
    Kernel(KernelFile),
}

impl HotFile {
    pub fn read(&self, buffer: &mut [u8], at: u64) -> Result<(), Unmeasured> {
        use std::os::unix::fs::FileExt;
        match self {
            Self::Ours(file) => Ok(file.read_exact_at(buffer, at)?),
            Self::Kernel(file) => Ok(file.read_exact_at(buffer, at)?),
        }
    }

    pub fn len(&self) -> Result<u64, Unmeasured> {
        match self {
            Self::Ours(file) => Ok(file.len()),
            Self::Kernel(file) => Ok(file.metadata()?.len()),
        }
    }

    pub fn kept(&self) -> Result<u64, Unmeasured> {
        match self {
            Self::Ours(file) => Ok(file.cached_pages() * PAGE as u64),
            Self::Kernel(file) => kept_bytes(std::slice::from_ref(file)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_known_by_its_name() {
        assert!(Way::ALL.into_iter().all(|way| Way::of(way.name()) == Some(way)));
        assert_eq!(Way::of("by heart"), None);
    }
}
