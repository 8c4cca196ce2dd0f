//! Cat: files to standard output, through the cache.
//!
//! ```text
//!   for each file   open -> pin a piece -> write it -> ... -> end of file
//!                     |         |            |
//!                     '- say why, next file  '- reader gone: end as a signal would; else: say why, end
//! ```
//!
//! Files are written in their order and byte by byte, without a copy in this process: pieces are pinned in the cache
//! and written from there. A file that cannot be read is named on standard error and the next is tried. Standard output
//! that cannot be written ends the command, because every file would fail the same way. `quinion-object` writes a URL
//! among the files (see `other_program.rs`).

use std::fs;
use std::io::{self, Write, stdout};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use quinion::Cache;

use crate::other_program::{AskedServer, ObjectVerb, is_url};
use crate::progress::{BarPlace, Progress};
use crate::size::Size;
use crate::{EXIT_FAILED, build_cache, complain};
use quinion_cli::output::{EXIT_BROKEN_PIPE, EXIT_NOT_UNDERSTOOD};

const PIECE_BYTES: usize = 1 << 20;

/// Write files to standard output, read through the cache.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Memory the cache may use in all, such as 256M, 1.5G or 25%; at least 16M, and a quarter of the
    /// machine's if not given.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Keep no page in the cache that was written out: of several files, or of one named twice, none takes room
    /// from another.
    #[arg(long)]
    uncached: bool,
    #[command(flatten)]
    server: AskedServer,
    /// The files, in the order in which they are written; also URLs of objects, such as s3://BUCKET/KEY.
    #[arg(required = true, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<PathBuf>,
}

enum CatError {
    File(String),
    Output(io::Error),
}

pub fn main(arguments: Arguments) -> ExitCode {
    let words: &[&str] = &["cat"];
    let memory = arguments.memory.map(|size| size.bytes(quinion::process_limit()));
    let objects = ObjectVerb { words, server: &arguments.server, memory };
    if let Err(wrong) = objects.check(&arguments.files) {
        complain(&wrong);
        return ExitCode::from(EXIT_NOT_UNDERSTOOD);
    }
    let result = build_cache(arguments.memory).and_then(|cache| Ok((cache, Output::new()?)));
    let (cache, mut output) = match result {
        Ok(ready) => ready,
        Err(error) => return complain(&error),
    };
    let mut code = ExitCode::SUCCESS;
    for path in &arguments.files {
        if is_url(path) {
            match objects.done_with(path) {
                Ok(()) => {}
                Err(ended) if ended == ExitCode::from(EXIT_BROKEN_PIPE) => return ended,
                Err(ended) => code = ended,
            }
            continue;
        }
        match cat(&cache, path, arguments.uncached, &mut output) {
            Ok(()) => {}
            Err(CatError::File(wrong)) => {
                eprintln!("quinion: {wrong}");
                code = ExitCode::from(EXIT_FAILED);
            }
            Err(CatError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                return ExitCode::from(EXIT_BROKEN_PIPE);
            }
            Err(CatError::Output(error)) => {
                return complain(&format!("cannot write to standard output: {error}"));
            }
        }
    }
    code
}

fn cat(cache: &Cache, path: &Path, uncached: bool, output: &mut Output) -> Result<(), CatError> {
    if path == Path::new("-") {
        let wrong = "`-`: standard input is a stream and has no pages to cache; name a file, \
                     or write ./- for a file of that name";
        return Err(CatError::File(wrong.to_owned()));
    }
    let file = cache.open(path).map_err(|error| CatError::File(error.to_string()))?;
    file.set_uncached(uncached).map_err(|error| CatError::File(format!("{}: {error}", path.display())))?;
    if output.is(path) {
        let wrong = format!("{}: this file is standard output itself; write to another one", path.display());
        return Err(CatError::File(wrong));
    }
    let progress = Progress::new(output.watched, path, file.len());
    copy(&file, path, output, &progress)
}

/// Writes all of `file` to `output`, a piece at a time, straight from the cache's memory.
fn copy(file: &quinion::File, path: &Path, output: &mut Output, progress: &Progress) -> Result<(), CatError> {
    let named = |error: quinion::Error| CatError::File(format!("{}: {error}", path.display()));
    let mut position = 0;
    loop {
        let piece = file.pin(position, PIECE_BYTES).map_err(named)?;
        if piece.is_empty() {
            return Ok(());
        }
        for chunk in piece.chunks() {
            output.file.write_all(chunk).map_err(CatError::Output)?;
        }
        position += piece.len() as u64;
        progress.at(position);
    }
}

/// Standard output without the line buffer of the standard library.
struct Output {
    file: fs::File,
    /// Device and inode, if it is a regular file.
    identity: Option<(u64, u64)>,
    watched: BarPlace,
}

impl Output {
    fn new() -> Result<Self, String> {
        let wrong = |error: io::Error| format!("standard output cannot be used: {error}; is it closed?");
        let file = fs::File::from(stdout().as_fd().try_clone_to_owned().map_err(wrong)?);
        let identity = identity(&file.metadata().map_err(wrong)?);
        Ok(Self { file, identity, watched: BarPlace::now() })
    }

    /// Whether this is the regular file at `path`, which would then never end.
    fn is(&self, path: &Path) -> bool {
        self.identity.is_some() && fs::metadata(path).ok().as_ref().and_then(identity) == self.identity
    }
}

fn identity(metadata: &fs::Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    metadata.is_file().then(|| (metadata.dev(), metadata.ino()))
}
