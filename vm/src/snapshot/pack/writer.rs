//! Writer: a pack is made of a snapshot: each chunk is zeros, or known, or compressed and written.
//!
//! ```text
//!   batch of chunks --> workers   read, zeros?  digest  known in an older pack? look whether it is right there
//!                                               known in this pack?   else compress
//!                   --> in order  entry; bytes behind those before
//!   at the end          end magic, header and index in front, sync; nothing changed meanwhile? rename
//! ```
//!
//! The index stands before the chunks, and its length is known before the first one: entries have one length, and so
//! have the names of all packs that may be referred to. Names that were not needed leave a gap.
//!
//! **A chunk that another pack has is read there** and compared before it is referred to: a damaged older pack makes a
//! new one larger, and never loses what the snapshot still has.
//!
//! A pack is at most as readable as each file whose bytes it has: it has the memory of a VM.
//!
//! Invariants: a pack is published only if the snapshot and all packs that it refers to are, after the last read, what
//! they were before the first. And none of its inputs, and none of the names that it refers to, is the file that it
//! replaces.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use quinion::backend::ReadAt;
use sha2::{Digest, Sha256};
use zstd::bulk::Compressor;

use super::super::layers::Layers;
use super::super::recognition::END_MAGIC;
use super::format::{
    CHUNK_BYTES, CHUNKS_MAX, ChunkDigest, ChunkForm, END_BYTES, ENTRY_BYTES, Header, PACKS_MAX, PackIdentity,
    PackName, StoredChunk, front, front_bytes, is_file_name,
};
use super::open::{is_pack_at, open_local};
use super::output::{Output, folder_of};
use super::reader::Pack;
use super::request::{PackError, PackProgress, PackReport, PackRequest};
use super::workers::{batches, each_chunk, workers_of_machine};

/// The part of a chunk, as 1 / so many, that compression has to save: less is not worth the time of each read.
const SAVED_MIN: usize = 16;

/// The snapshot that is packed.
enum Input {
    Layers(Layers),
    /// Another pack, which is packed anew.
    Pack(Pack),
}

/// The permissions that each file has whose bytes the pack will have, and the groups of these files.
struct Readers {
    mode: u32,
    groups: HashSet<u32>,
}

impl Readers {
    /// A file that cannot be asked has its owner's permissions alone.
    fn of(request: &PackRequest, input: &Input) -> Self {
        let mut all = Self { mode: 0o666, groups: HashSet::new() };
        for path in input_files(request, input) {
            match fs::metadata(path) {
                Ok(file) => {
                    all.mode &= file.mode();
                    all.groups.insert(file.gid());
                }
                Err(_) => all.mode &= 0o600,
            }
        }
        all
    }

    /// The permissions of a pack of a group. If that is not the one of all files, its members and all others may do
    /// what the files' groups and all others may.
    fn mode_for(&self, group: u32) -> u32 {
        if self.groups.iter().all(|other| *other == group) {
            return self.mode;
        }
        let shared = self.mode & (self.mode >> 3) & 0o006;
        self.mode & 0o600 | shared << 3 | shared
    }
}

impl Input {
    fn open(layers: &[PathBuf]) -> Result<Self, PackError> {
        match layers {
            [one] if is_pack_at(one)? => Ok(Self::Pack(open_local(one)?)),
            _ => Ok(Self::Layers(Layers::open(layers)?)),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Layers(layers) => layers.bytes(),
            Self::Pack(pack) => pack.bytes(),
        }
    }

    fn source(&self) -> &dyn ReadAt {
        match self {
            Self::Layers(layers) => layers,
            Self::Pack(pack) => pack,
        }
    }

    fn changed(&self) -> Option<PathBuf> {
        match self {
            Self::Layers(layers) => layers.changed().map(Path::to_owned),
            Self::Pack(pack) => pack.changed().map(PathBuf::from),
        }
    }

    fn read_exact(&self, into: &mut [u8], position: u64) -> Result<(), PackError> {
        let (source, mut done) = (self.source(), 0);
        while done < into.len() {
            let offset = position + done as u64;
            match source.read_at(&mut into[done..], offset) {
                Ok(0) => return Err(PackError::Read { offset, source: io::ErrorKind::UnexpectedEof.into() }),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(PackError::Read { offset, source }),
            }
        }
        Ok(())
    }
}

/// An older pack, whose chunks need not be stored again.
struct OlderPack {
    pack: Pack,
    path: PathBuf,
}

impl OlderPack {
    /// The pack in which a chunk of it lies.
    fn name_of(&self, stored: &StoredChunk) -> PackName {
        match usize::from(stored.pack).checked_sub(1) {
            Some(nth) => self.pack.names()[nth].clone(),
            None => self.own_name(),
        }
    }

    fn own_name(&self) -> PackName {
        let name = self.path.file_name().unwrap_or_default().as_bytes().to_owned();
        PackName { identity: self.pack.identity(), name }
    }
}

/// A chunk of an older pack.
#[derive(Clone, Copy)]
struct OlderChunk {
    older: usize,
    chunk: u64,
}

/// The snapshot and the older packs, which the workers share and do not change.
struct PackPlan {
    input: Input,
    olders: Vec<OlderPack>,
    known: HashMap<ChunkDigest, OlderChunk>,
    chunk_bytes: u32,
}

/// The outcome of a worker for one chunk.
enum PreparedChunk {
    Zeros,
    /// The new pack has the chunk already.
    Written(ChunkDigest),
    Older(ChunkDigest, OlderChunk),
    New(ChunkDigest, ChunkForm, Vec<u8>),
}

struct PackWorker {
    compressor: Compressor<'static>,
    chunk: Vec<u8>,
}

/// A pack that is being written.
struct PackWriter<'r> {
    request: &'r PackRequest,
    plan: PackPlan,
    workers: Vec<PackWorker>,
    output: Output,
    written: HashMap<ChunkDigest, StoredChunk>,
    names: Vec<PackName>,
    entries: Vec<u8>,
    end: u64,
    report: PackReport,
}

/// Makes a pack of a snapshot. Reads all of it, once, on several threads; `progress` is called after some MiB each
/// time, and may end it. The pack appears under its name when it is whole and durable.
///
/// # Errors
/// See [`PackError`]; no file is left behind.
pub fn pack(
    request: &PackRequest,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<PackReport, PackError> {
    check(request)?;
    let mut writer = PackWriter::begin(request, PackPlan::new(request)?)?;
    let (bytes, chunk_bytes) = (writer.plan.input.bytes(), writer.plan.chunk_bytes);
    for batch in batches(writer.plan.chunks(), chunk_bytes, writer.workers.len()) {
        let done_bytes = bytes.min(batch.end * u64::from(chunk_bytes));
        for prepared in writer.prepare(batch)? {
            writer.add(prepared)?;
        }
        if progress(PackProgress { done_bytes, bytes }).is_break() {
            return Err(PackError::Interrupted);
        }
    }
    writer.finish()
}

fn check(request: &PackRequest) -> Result<(), PackError> {
    let PackRequest { out, level, chunk_bytes, replace, .. } = request;
    if let Some(bytes) = chunk_bytes.filter(|bytes| !bytes.is_power_of_two() || !CHUNK_BYTES.contains(bytes))
    {
        let text = format!("chunks of {bytes} bytes: choose a power of two from 65536 to 4194304");
        return Err(PackError::Request(text));
    }
    if !(1..=19).contains(level) {
        return Err(PackError::Request(format!("compression of level {level}: choose 1 to 19")));
    }
    if !out.file_name().is_some_and(|name| is_file_name(name.as_bytes())) {
        let text = format!(
            "{}: this is no name of a file; name the file that the pack is written to",
            out.display()
        );
        return Err(PackError::Request(text));
    }
    match fs::symlink_metadata(out) {
        Ok(_) if !replace => Err(PackError::Exists(out.clone())),
        _ => Ok(()),
    }
}

impl PackPlan {
    fn new(request: &PackRequest) -> Result<Self, PackError> {
        let input = Input::open(&request.layers)?;
        check_input(request, &input)?;
        let olders = request.against.iter().map(|path| {
            let pack = open_local(path)?;
            check_folder(path, &request.out)?;
            Ok(OlderPack { pack, path: path.clone() })
        });
        let olders: Vec<OlderPack> = olders.collect::<Result<_, PackError>>()?;
        let chunk_bytes = chunk_bytes_of(request, &olders)?;
        if input.bytes().div_ceil(u64::from(chunk_bytes)) > CHUNKS_MAX {
            let text = format!(
                "a snapshot of {} bytes has too many chunks of {chunk_bytes} bytes; choose larger ones",
                input.bytes()
            );
            return Err(PackError::Request(text));
        }
        let mut known = HashMap::new();
        for (older, OlderPack { pack, .. }) in olders.iter().enumerate() {
            let stored = (0..pack.chunks()).filter_map(|chunk| Some((chunk, pack.chunk(chunk)?)));
            stored.for_each(|(chunk, stored)| {
                known.entry(stored.digest).or_insert(OlderChunk { older, chunk });
            });
        }
        Ok(Self { input, olders, known, chunk_bytes })
    }

    fn chunks(&self) -> u64 {
        self.input.bytes().div_ceil(u64::from(self.chunk_bytes))
    }

    /// All packs that the new one may refer to. Several may be the same, by different names.
    fn candidates(&self) -> Vec<PackName> {
        let names = self
            .olders
            .iter()
            .flat_map(|older| older.pack.names().iter().cloned().chain(std::iter::once(older.own_name())));
        names.collect()
    }

    /// Whether the chunk is right where it lies; `scratch` is of its length.
    fn is_right(&self, older: OlderChunk, scratch: &mut [u8]) -> bool {
        let pack = &self.olders[older.older].pack;
        pack.chunk_len(older.chunk) == scratch.len() && pack.read_chunk(older.chunk, scratch).is_ok()
    }
}

fn check_folder(older: &Path, out: &Path) -> Result<(), PackError> {
    let folder = |path: &Path| fs::canonicalize(folder_of(path)).ok();
    if folder(older).is_some_and(|folder_of_older| Some(folder_of_older) == folder(out)) {
        return Ok(());
    }
    Err(PackError::Request(format!(
        "{}: a pack refers to others by their names in its own folder, and this one is not in that of {}; write the \
         pack beside it",
        older.display(),
        out.display()
    )))
}

/// Refuses names that lead to the file at `out`: it is replaced, and the chunks that it has would be gone. A name may
/// be another for the same file: a link, or one that differs in case.
fn check_names(names: &[PackName], out: &Path) -> Result<(), PackError> {
    let file = |path: &Path| fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
    let (replaced, folder) = (file(out), folder_of(out));
    let is_out = |name: &PackName| {
        let name = OsStr::from_bytes(&name.name);
        Some(name) == out.file_name() || (replaced.is_some() && file(&folder.join(name)) == replaced)
    };
    if names.iter().any(is_out) {
        let text = format!(
            "{}: the new pack would refer to this one and replace it; write it under another name",
            out.display()
        );
        return Err(PackError::Request(text));
    }
    Ok(())
}

/// Refuses to replace a file that the pack is made of: a snapshot, a diff, or a pack whose chunks it takes.
fn check_input(request: &PackRequest, input: &Input) -> Result<(), PackError> {
    let file = |path: &Path| fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
    let Some(replaced) = file(&request.out) else { return Ok(()) };
    if input_files(request, input).any(|path| file(&path) == Some(replaced)) {
        return Err(PackError::Request(format!(
            "{}: the pack would replace a file that it is made of; write it under another name",
            request.out.display()
        )));
    }
    Ok(())
}

/// The files that the snapshot is in; of a pack, those that it refers to as well.
fn input_files(request: &PackRequest, input: &Input) -> impl Iterator<Item = PathBuf> {
    let names = match input {
        Input::Pack(pack) => pack.names(),
        Input::Layers(_) => &[],
    };
    let beside = request.layers.first().map_or(Path::new("."), |first| folder_of(first));
    let others = names.iter().map(move |name| beside.join(OsStr::from_bytes(&name.name)));
    request.layers.iter().cloned().chain(others)
}

fn chunk_bytes_of(request: &PackRequest, olders: &[OlderPack]) -> Result<u32, PackError> {
    let first = olders.first().map(|older| older.pack.chunk_bytes());
    let wanted = request.chunk_bytes.or(first).unwrap_or(PackRequest::CHUNK_BYTES);
    match olders.iter().find(|older| older.pack.chunk_bytes() != wanted) {
        Some(OlderPack { pack, path }) => Err(PackError::Request(format!(
            "{}: this pack has chunks of {} bytes, and chunks of {wanted} bytes have none in common with it; choose \
             its size, or leave it out",
            path.display(),
            pack.chunk_bytes()
        ))),
        None => Ok(wanted),
    }
}

impl PackWorker {
    fn prepare(
        &mut self,
        chunk: u64,
        plan: &PackPlan,
        written: &HashMap<ChunkDigest, StoredChunk>,
    ) -> Result<PreparedChunk, PackError> {
        let position = chunk * u64::from(plan.chunk_bytes);
        let len = (plan.input.bytes() - position).min(u64::from(plan.chunk_bytes)) as usize;
        self.chunk.resize(len, 0);
        plan.input.read_exact(&mut self.chunk, position)?;
        if is_zeros(&self.chunk) {
            return Ok(PreparedChunk::Zeros);
        }
        let digest: ChunkDigest = Sha256::digest(&self.chunk).into();
        if written.contains_key(&digest) {
            return Ok(PreparedChunk::Written(digest));
        }
        if let Some(&older) = plan.known.get(&digest) {
            let mut scratch = vec![0; len];
            if plan.is_right(older, &mut scratch) {
                return Ok(PreparedChunk::Older(digest, older));
            }
        }
        let packed = self.compressor.compress(&self.chunk).map_err(PackError::Compress)?;
        Ok(if packed.len() < len - len / SAVED_MIN {
            PreparedChunk::New(digest, ChunkForm::Zstd, packed)
        } else {
            PreparedChunk::New(digest, ChunkForm::Raw, self.chunk.clone())
        })
    }
}

/// Most chunks that are not zeros differ in their first bytes.
fn is_zeros(bytes: &[u8]) -> bool {
    bytes.chunks(256).all(|some| some.iter().fold(0, |all, byte| all | byte) == 0)
}

impl<'r> PackWriter<'r> {
    fn begin(request: &'r PackRequest, plan: PackPlan) -> Result<Self, PackError> {
        let candidates = plan.candidates();
        let identities: HashSet<PackIdentity> = candidates.iter().map(|name| name.identity).collect();
        let packs = u32::try_from(identities.len()).ok().filter(|packs| *packs <= PACKS_MAX);
        let Some(packs) = packs else {
            return Err(PackError::Request(format!(
                "{} packs would be referred to, and {PACKS_MAX} may be; pack this snapshot against fewer, or whole",
                identities.len()
            )));
        };
        check_names(&candidates, &request.out)?;
        let write_failed = |source| PackError::Write { path: request.out.clone(), source };
        let readers = Readers::of(request, &plan.input);
        let worker = |_| {
            let compressor = Compressor::new(request.level).map_err(PackError::Compress)?;
            Ok(PackWorker { compressor, chunk: Vec::new() })
        };
        let mut writer = Self {
            request,
            workers: (0..workers_of_machine()).map(worker).collect::<Result<_, PackError>>()?,
            output: Output::create(&request.out, |group| readers.mode_for(group)).map_err(write_failed)?,
            written: HashMap::new(),
            names: Vec::new(),
            entries: Vec::new(),
            end: 0,
            report: PackReport::new(plan.input.bytes(), plan.chunk_bytes),
            plan,
        };
        writer.end = front_bytes(packs, writer.plan.chunks());
        Ok(writer)
    }

    /// The chunks of `batch` in their order, each made by one of the workers.
    fn prepare(&mut self, batch: Range<u64>) -> Result<Vec<PreparedChunk>, PackError> {
        let (plan, written) = (&self.plan, &self.written);
        each_chunk(&mut self.workers, batch, |worker, chunk| worker.prepare(chunk, plan, written))
    }

    /// Adds the next chunk.
    fn add(&mut self, prepared: PreparedChunk) -> Result<(), PackError> {
        let chunk = (self.entries.len() / ENTRY_BYTES) as u64;
        let first = chunk * u64::from(self.plan.chunk_bytes);
        let bytes = (self.plan.input.bytes() - first).min(u64::from(self.plan.chunk_bytes));
        let stored = match prepared {
            PreparedChunk::Zeros => {
                self.report.zero_bytes += bytes;
                self.entries.extend_from_slice(&[0; ENTRY_BYTES]);
                return Ok(());
            }
            PreparedChunk::Older(digest, older) => {
                self.report.shared_bytes += bytes;
                self.refer(digest, older)
            }
            PreparedChunk::Written(digest) => {
                self.report.repeated_bytes += bytes;
                self.written[&digest]
            }
            PreparedChunk::New(digest, form, packed) => match self.written.get(&digest) {
                // Another of the same batch.
                Some(stored) => {
                    self.report.repeated_bytes += bytes;
                    *stored
                }
                None => self.store(digest, form, &packed)?,
            },
        };
        self.entries.extend_from_slice(&stored.encode());
        Ok(())
    }

    fn store(
        &mut self,
        digest: ChunkDigest,
        form: ChunkForm,
        packed: &[u8],
    ) -> Result<StoredChunk, PackError> {
        let stored = StoredChunk { pack: 0, form, bytes: packed.len() as u32, offset: self.end, digest };
        let written = self.output.write(packed, self.end);
        written.map_err(|source| self.write_failed(source))?;
        self.end += packed.len() as u64;
        self.report.stored_bytes += packed.len() as u64;
        self.written.insert(digest, stored);
        Ok(stored)
    }

    fn refer(&mut self, digest: ChunkDigest, older: OlderChunk) -> StoredChunk {
        let OlderPack { pack, .. } = &self.plan.olders[older.older];
        let there = pack.chunk(older.chunk).expect("zeros are not known by a digest");
        let name = self.plan.olders[older.older].name_of(&there);
        let nth = self.names.iter().position(|known| known.identity == name.identity);
        let nth = nth.unwrap_or_else(|| {
            self.names.push(name);
            self.names.len() - 1
        });
        StoredChunk { pack: nth as u16 + 1, digest, ..there }
    }

    fn write_failed(&self, source: io::Error) -> PackError {
        PackError::Write { path: self.request.out.clone(), source }
    }

    fn finish(mut self) -> Result<PackReport, PackError> {
        let header = Header {
            chunk_bytes: self.plan.chunk_bytes,
            bytes: self.plan.input.bytes(),
            file_bytes: self.end + END_BYTES,
            packs: self.names.len() as u32,
            index_digest: [0; 32],
            identity: PackIdentity([0; 32]),
        };
        let front = front(&header, &self.names, &self.entries);
        let written = self.output.write(&END_MAGIC, self.end).and_then(|()| self.output.write(&front, 0));
        written.map_err(|source| self.write_failed(source))?;
        let mut olders = self.plan.olders.iter();
        let older = || olders.find_map(|older| older.pack.changed().map(PathBuf::from));
        if let Some(changed) = self.plan.input.changed().or_else(older) {
            return Err(PackError::Changed(changed));
        }
        // Again: hours may have passed since it was looked at first.
        check_names(&self.names, &self.request.out)?;
        check_input(self.request, &self.plan.input)?;
        self.report.file_bytes = header.file_bytes;
        self.report.packs = self.names.iter().map(|name| PathBuf::from(name.as_os_str())).collect();
        let Self { request, output, report, .. } = self;
        match output.publish(request.replace) {
            Ok(()) => Ok(report),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(PackError::Exists(request.out.clone()))
            }
            Err(source) => Err(PackError::Write { path: request.out.clone(), source }),
        }
    }
}
