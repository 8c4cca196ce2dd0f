//! Outputs: files that the command writes, which are none of those that it reads, and nothing else that is there.
//!
//! ```text
//!   --record, --metrics, --socket    the file of --snapshot, --diff or --replay? of each other?       refused
//!                                    a file of another kind, a pack that is referred to, for example?  refused
//! ```
//!
//! Before anything is written. A file is told by its device and number, whatever name it is given by; one that is not
//! there yet by its folder and its name. `--record` and `--replay` may be one file: that merges records. The file is
//! looked at again just before it is written.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use quinion_vm::{FaultRecord, FaultRecordError};

use super::metrics::{MetricsTarget, check_replaced};
use super::{Arguments, named};

/// A file of the command line.
struct NamedFile<'a> {
    option: &'static str,
    path: &'a Path,
}

fn of<'a>(option: &'static str, path: &'a Path) -> NamedFile<'a> {
    NamedFile { option, path }
}

/// Which file a path leads to.
#[derive(PartialEq, Eq)]
enum FileKey {
    Inode(u64, u64),
    /// The file is not there: its folder, and its name in that.
    Name(PathBuf),
}

impl FileKey {
    fn of(path: &Path) -> Self {
        if let Ok(found) = fs::metadata(path) {
            return Self::Inode(found.dev(), found.ino());
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        Self::Name(folder.join(path.file_name().unwrap_or_default()))
    }
}

/// Checks all files that this command would write.
///
/// # Errors
/// One is an input or another output, may not be replaced, or cannot be written.
pub fn check(arguments: &Arguments) -> Result<(), String> {
    let metrics = match &arguments.metrics {
        Some(MetricsTarget::File(path)) => Some(path),
        _ => None,
    };
    let mut others = vec![of("--snapshot", &arguments.snapshot)];
    others.extend(arguments.diff.iter().map(|path| of("--diff", path)));
    if let Some(path) = &arguments.record {
        refuse_any(&of("--record", path), &others)?;
    }
    others.extend(arguments.replay.iter().map(|path| of("--replay", path)));
    others.push(of("--socket", &arguments.socket));
    if let Some(path) = metrics {
        refuse_any(&of("--metrics", path), &others)?;
    }
    if let Some(path) = &arguments.record {
        refuse_any(&of("--record", path), &others[others.len() - 1..])?;
        let outputs: Vec<_> = metrics.into_iter().map(|path| of("--metrics", path)).collect();
        refuse_any(&of("--record", path), &outputs)?;
        check_record(path)?;
    }
    let Some(path) = metrics else { return Ok(()) };
    check_replaced(path)
        .map_err(|error| format!("cannot write metrics to {}: {error}; name another file", path.display()))
}

fn refuse_any(output: &NamedFile<'_>, others: &[NamedFile<'_>]) -> Result<(), String> {
    let key = FileKey::of(output.path);
    match others.iter().find(|other| FileKey::of(other.path) == key) {
        None => Ok(()),
        Some(NamedFile { option: other, .. }) => Err(format!(
            "{} {}: this is the file of {other}, too, which would be lost; name another file",
            output.option,
            output.path.display()
        )),
    }
}

fn check_record(path: &Path) -> Result<(), String> {
    FaultRecord::check_target(path).map_err(|error| {
        let remedy = match &error {
            FaultRecordError::Write(_) => "; name a file in a folder that you may write to",
            _ => "",
        };
        named(path, &format_args!("{error}{remedy}"))
    })
}
