//! Program: whether a program can be told of the cache, seen before it is started.
//!
//! The dynamic linker is told by an environment variable. A program without one
//! is not told; a set-uid program is not allowed to listen; a program of
//! another machine or C library would only complain. A script is judged by its
//! interpreter.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What kind of program it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Dynamically linked, by a linker that loads our object.
    Served,
    /// Has no dynamic linker.
    Static(PathBuf),
    /// Runs with another user's or group's rights.
    SetId(PathBuf),
    /// For another machine, or linked by another linker (named here).
    Foreign(PathBuf, String),
    /// Could not be looked at.
    Unknown,
}

impl Kind {
    /// Whether the environment may name our object: nobody will complain about it.
    pub fn may_be_told(&self) -> bool {
        !matches!(self, Kind::Foreign(..))
    }

    /// Why nothing is served, if that is certain.
    pub fn note(&self) -> Option<String> {
        let name = |path: &Path| path.display().to_string();
        match self {
            Kind::Served | Kind::Unknown => None,
            Kind::Static(path) => Some(format!("nothing was served: {} is statically linked", name(path))),
            Kind::SetId(path) => Some(format!(
                "nothing was served: {} is set-uid or set-gid, and such programs load nothing from outside",
                name(path)
            )),
            Kind::Foreign(path, what) => Some(format!("nothing was served: {} is {what}", name(path))),
        }
    }
}

/// How many interpreters of interpreters are followed, as in the kernel.
const SCRIPTS_MAX: u32 = 5;

/// Looks at the program that `name` means.
pub fn look_at(name: &OsStr) -> Kind {
    find(name).map_or(Kind::Unknown, |path| look_at_file(path, SCRIPTS_MAX))
}

/// The dynamic linker of the program that `name` means, or of its interpreter's.
pub fn linker_of(name: &OsStr) -> Option<PathBuf> {
    let mut path = find(name)?;
    for _ in 0..=SCRIPTS_MAX {
        let file = File::open(&path).ok()?;
        let mut start = Vec::new();
        (&file).take(4096).read_to_end(&mut start).ok()?;
        match start.strip_prefix(b"#!") {
            Some(line) => path = interpreter(line),
            None if start.starts_with(b"\x7fELF") && start.len() >= 64 => {
                return dynamic_linker(&file, &start).map(PathBuf::from);
            }
            None => return None,
        }
    }
    None
}

/// The file a name means: a path, or the first match in PATH.
fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    let folders = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/bin:/usr/bin"));
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| is_executable(path))
}

/// The file that `name` means and, if it is a script, its interpreter, and so on. Empty if there is no such program.
pub fn chain_of(name: &OsStr) -> Vec<PathBuf> {
    let mut chain: Vec<PathBuf> = find(name).filter(|path| path.is_file()).into_iter().collect();
    while let Some(path) = chain.last().filter(|_| chain.len() <= SCRIPTS_MAX as usize) {
        let mut start = Vec::new();
        let read = File::open(path).and_then(|file| file.take(4096).read_to_end(&mut start));
        match start.strip_prefix(b"#!") {
            Some(line) if read.is_ok() => chain.push(interpreter(line)),
            _ => break,
        }
    }
    chain
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

fn look_at_file(path: PathBuf, scripts_left: u32) -> Kind {
    let Ok(file) = File::open(&path) else { return Kind::Unknown };
    let mut start = Vec::with_capacity(4096);
    if (&file).take(4096).read_to_end(&mut start).is_err() {
        return Kind::Unknown;
    }
    match start.strip_prefix(b"#!") {
        Some(line) if scripts_left > 0 => look_at_file(interpreter(line), scripts_left - 1),
        Some(_) => Kind::Unknown,
        None => look_at_elf(path, &file, &start),
    }
}

/// The interpreter in a script's first line.
fn interpreter(line: &[u8]) -> PathBuf {
    let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii_start();
    let end = line.iter().position(|&byte| byte == b' ' || byte == b'\t').unwrap_or(line.len());
    PathBuf::from(OsString::from_vec(line[..end].to_vec()))
}

fn look_at_elf(path: PathBuf, file: &File, start: &[u8]) -> Kind {
    const SET_ID: u32 = 0o6000;
    if !start.starts_with(b"\x7fELF") || start.len() < 64 {
        return Kind::Unknown;
    }
    // 64 bits, little-endian, x86-64.
    if start[4..6] != [2, 1] || start[18..20] != [62, 0] {
        return Kind::Foreign(path, "made for another machine".into());
    }
    match dynamic_linker(file, start) {
        None => Kind::Static(path),
        Some(linker) if !linker.ends_with("/ld-linux-x86-64.so.2") => {
            Kind::Foreign(path, format!("linked by {linker}, which our object is not made for"))
        }
        Some(_) if file.metadata().is_ok_and(|data| data.mode() & SET_ID != 0 && changes_rights(&data)) => {
            Kind::SetId(path)
        }
        Some(_) => Kind::Served,
    }
}

/// Whether set-id bits of a file make a difference to who we are.
fn changes_rights(data: &std::fs::Metadata) -> bool {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let bits = data.mode();
    (bits & 0o4000 != 0 && data.uid() != user) || (bits & 0o2000 != 0 && data.gid() != group)
}

/// The path in the program header that names a dynamic linker.
fn dynamic_linker(file: &File, start: &[u8]) -> Option<String> {
    const INTERPRETER: u32 = 3;
    const HEADERS_MAX: u64 = 128;
    let number =
        |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let short = |at: usize| u64::from(u16::from_le_bytes([start[at], start[at + 1]]));
    let (table, size, count) = (number(start, 32), short(54), short(56));
    for i in 0..count.min(HEADERS_MAX) {
        let mut header = [0u8; 56];
        file.read_exact_at(&mut header, table.checked_add(i * size)?).ok()?;
        if header[..4] == INTERPRETER.to_le_bytes() {
            let mut name = vec![0u8; number(&header, 32).min(4096) as usize];
            file.read_exact_at(&mut name, number(&header, 8)).ok()?;
            let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
            return String::from_utf8(name[..end].to_vec()).ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_judged_by_its_interpreter() {
        assert_eq!(interpreter(b" /bin/sh -e\nrest"), Path::new("/bin/sh"));
        assert_eq!(interpreter(b"/usr/bin/env python3\n"), Path::new("/usr/bin/env"));
        assert_eq!(interpreter(b"/bin/sh"), Path::new("/bin/sh"));
    }

    #[test]
    fn a_script_leads_to_what_runs_it() {
        let folder = tempfile::tempdir().unwrap();
        let [inner, outer] = ["inner", "outer"].map(|name| folder.path().join(name));
        std::fs::write(&inner, "#!/bin/sh\n").unwrap();
        std::fs::write(&outer, format!("#!{} -x\n", inner.display())).unwrap();
        assert_eq!(chain_of(outer.as_os_str()), [outer.clone(), inner, PathBuf::from("/bin/sh")]);
        std::fs::write(&outer, format!("#!{}\n", outer.display())).unwrap();
        assert_eq!(chain_of(outer.as_os_str()).len(), SCRIPTS_MAX as usize + 1);
        assert!(chain_of(OsStr::new("no-such-program-anywhere")).is_empty());
    }

    #[test]
    fn programs_of_this_machine_are_served_and_others_are_not() {
        assert_eq!(look_at(OsStr::new("cat")), Kind::Served);
        assert_eq!(look_at(OsStr::new("no-such-program-anywhere")), Kind::Unknown);
        assert_eq!(look_at(OsStr::new("/etc/passwd")), Kind::Unknown);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("arm");
        let mut elf = std::fs::read("/bin/cat").unwrap();
        elf[18] = 183;
        std::fs::write(&path, &elf).unwrap();
        assert!(!look_at(path.as_os_str()).may_be_told());
    }
}
