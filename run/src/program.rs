//! Program: whether a program can be served, checked before it is started.
//!
//! An environment variable tells the dynamic linker of the interposer. A program without a linker does not see it, a
//! set-uid program ignores it, and a program of another machine or C library would only complain. A script is
//! classified by its interpreter; one that is run by `env NAME`, by the program NAME.
//!
//! Obstacles to starting it at all are found here too, before anything is set up for it.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use rustix::io::Errno;

use super::{CANNOT_START, NOT_FOUND, open_files};

/// The kind of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Dynamically linked, by a linker that loads the interposer.
    Served,
    /// Has no dynamic linker.
    Static(PathBuf),
    /// Runs with another user's or group's rights.
    SetId(PathBuf),
    /// For another machine, or linked by another linker (named here).
    Foreign(PathBuf, String),
    /// The program could not be examined.
    Unknown,
}

impl Kind {
    /// Whether the environment may name the interposer without an error message of the loader.
    pub fn may_be_intercepted(&self) -> bool {
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

/// Classifies the program that `name` means.
pub fn classify(name: &OsStr) -> Kind {
    chain_of(name).pop().map_or(Kind::Unknown, classify_file)
}

/// The dynamic linker of the program that `name` means, or of its interpreter's.
pub fn linker_of(name: &OsStr) -> Option<PathBuf> {
    linker_of_file(&chain_of(name).pop()?)
}

fn linker_of_file(path: &Path) -> Option<PathBuf> {
    let (file, start) = open(path)?;
    match is_ours(&start).then(|| linking(&file, &start))? {
        Linking::By(linker) => Some(linker.into()),
        Linking::Static | Linking::Broken => None,
    }
}

/// Why a program cannot be started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Obstacle {
    /// The status of the process that was to start it.
    pub status: i32,
    /// The error.
    pub wrong: String,
    /// The remedy.
    pub remedy: Cow<'static, str>,
}

impl Obstacle {
    /// The obstacle that the kernel's `error` at the start of `program` shows.
    pub fn of(program: &[OsString], error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOENT) => not_there(program),
            Some(libc::ENOEXEC) => Self::new(
                CANNOT_START,
                "it is neither a program for this machine nor a script with a `#!` line",
                "name its interpreter first, as in `quinion run -- sh SCRIPT`, or begin the script with `#!/bin/sh`",
            ),
            code => {
                let remedy =
                    open_files::remedy(code).map_or("check that it may be executed".into(), Cow::from);
                Self::new(CANNOT_START, error.to_string(), remedy)
            }
        }
    }

    fn new(status: i32, wrong: impl Into<String>, remedy: impl Into<Cow<'static, str>>) -> Self {
        Self { status, wrong: wrong.into(), remedy: remedy.into() }
    }
}

/// The reason why `program`, a name and its arguments, cannot be started, as far as that is seen before. The process
/// that tries reports the rest.
pub fn obstacle(program: &[OsString]) -> Option<Obstacle> {
    let name = program.first()?;
    let Some(path) = find(name) else {
        let is_there = candidates(name).any(|path| path.is_file());
        return Some(if is_there { not_executable() } else { not_there(program) });
    };
    match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Some(not_there(program)),
        Err(error) => {
            let remedy = "check the path and the permissions of its folders";
            return Some(Obstacle::new(CANNOT_START, error.to_string(), remedy));
        }
        Ok(data) if data.is_dir() => {
            return Some(Obstacle::new(CANNOT_START, "it is a folder", "name a program in it"));
        }
        Ok(_) => {}
    }
    if rustix::fs::access(&path, Access::EXEC_OK) == Err(Errno::ACCESS) {
        return Some(not_executable());
    }
    missing(&chain_of(name))
}

fn not_there(program: &[OsString]) -> Obstacle {
    if let [name, ..] = program
        && is_file_here(name)
    {
        let here = Path::new(".").join(name);
        let remedy = format!("{} is a file here: name it so", shown(&here));
        return Obstacle::new(NOT_FOUND, "there is no such program in PATH", remedy);
    }
    let remedy = match program {
        // An unknown option is taken for the program.
        [name, ..] if name.as_bytes().starts_with(b"-") => {
            "it is not an option of `quinion run` either; see `quinion run --help`"
        }
        [_, next, ..] if next == "--" => {
            "the program comes after `--`; an option's value may need a `=`, as in --keep=NAME"
        }
        [name, ..] if name.is_empty() => {
            "its name is empty; perhaps a variable that was to name it is not set"
        }
        _ => "check the name, or give its path",
    };
    Obstacle::new(NOT_FOUND, "there is no such program", remedy)
}

/// Whether a name without a slash, which is searched in PATH alone, names a file in the working folder.
fn is_file_here(name: &OsStr) -> bool {
    !name.is_empty() && !name.as_bytes().contains(&b'/') && Path::new(name).is_file()
}

fn not_executable() -> Obstacle {
    let remedy =
        "make it executable (chmod +x), on a file system without noexec, or name its interpreter first";
    Obstacle::new(CANNOT_START, "it may not be executed", remedy)
}

/// The first missing file of a script's chain. `env` itself reports what it does not find.
fn missing(chain: &[PathBuf]) -> Option<Obstacle> {
    let path = chain.iter().skip(1).find(|path| path.is_absolute() && is_missing(path))?;
    let remedy = match path.as_os_str().as_bytes() {
        [.., b'\r'] => "its lines end in CR LF: write them with LF",
        _ => "install that, or name another in the script's first line",
    };
    Some(Obstacle::new(CANNOT_START, format!("its interpreter {} is missing", shown(path)), remedy))
}

/// The obstacle of a missing dynamic linker. It is separate: of a program for another C library there is more to say.
pub fn linker_missing(program: &[OsString]) -> Option<Obstacle> {
    let linker = linker_of(program.first()?).filter(|linker| is_missing(linker))?;
    let remedy = "install the C library it is made for, or use a build for this one";
    Some(Obstacle::new(CANNOT_START, format!("its dynamic linker {} is missing", shown(&linker)), remedy))
}

fn is_missing(path: &Path) -> bool {
    path.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// A path with unprintable letters escaped.
fn shown(path: &Path) -> String {
    path.to_string_lossy().escape_debug().to_string()
}

/// A name as it stands in a message: in quotes, so that an empty one, or one with spaces, is seen to be a name.
pub fn quoted(name: impl AsRef<Path>) -> String {
    format!("`{}`", shown(name.as_ref()))
}

fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    candidates(name).find(|path| is_executable(path))
}

fn candidates(name: &OsStr) -> impl Iterator<Item = PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/bin:/usr/bin"));
    let folders: Vec<PathBuf> = std::env::split_paths(&folders).filter(|_| !name.is_empty()).collect();
    folders.into_iter().map(move |folder| folder.join(name))
}

/// The file that `name` means and, if it is a script, its interpreter, and so on. Empty if there is no such program.
pub fn chain_of(name: &OsStr) -> Vec<PathBuf> {
    let mut chain: Vec<PathBuf> = find(name).filter(|path| path.is_file()).into_iter().collect();
    while let Some(path) = chain.last().filter(|_| chain.len() <= SCRIPTS_MAX as usize) {
        let Some((_, start)) = open(path) else { break };
        let Some(line) = start.strip_prefix(b"#!") else { break };
        let (interpreter, argument) = first_line(line);
        let named = named_to_env(&interpreter, argument);
        chain.push(interpreter);
        let Some(named) = named else { continue };
        match find(&named) {
            Some(path) => chain.push(path),
            None => {
                chain.push(named.into());
                break;
            }
        }
    }
    chain
}

fn open(path: &Path) -> Option<(File, Vec<u8>)> {
    let file = File::open(path).ok()?;
    let mut start = Vec::with_capacity(4096);
    (&file).take(4096).read_to_end(&mut start).ok()?;
    Some((file, start))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok()
}

fn classify_file(path: PathBuf) -> Kind {
    open(&path).map_or(Kind::Unknown, |(file, start)| classify_elf(path, &file, &start))
}

fn first_line(line: &[u8]) -> (PathBuf, &[u8]) {
    let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii_start();
    let end = line.iter().position(|&byte| byte == b' ' || byte == b'\t').unwrap_or(line.len());
    (PathBuf::from(OsString::from_vec(line[..end].to_vec())), line[end..].trim_ascii())
}

/// The program that a script names to `env`, if that is its interpreter without other arguments: this program runs the
/// script. The kernel passes them as one word, unless `-S` splits them.
fn named_to_env(interpreter: &Path, argument: &[u8]) -> Option<OsString> {
    if interpreter.file_name()? != "env" {
        return None;
    }
    let named = match argument.strip_prefix(b"-S") {
        Some(words) => words.trim_ascii_start().split(u8::is_ascii_whitespace).next()?,
        None => argument,
    };
    let is_plain = !named.is_empty() && !named.starts_with(b"-") && !named.contains(&b'=');
    is_plain.then(|| OsString::from_vec(named.to_vec()))
}

/// Whether it begins as an ELF program for this machine: 64 bits, little-endian, x86-64.
fn is_ours(start: &[u8]) -> bool {
    is_elf(start) && start[4..6] == [2, 1] && start[18..20] == [62, 0]
}

fn is_elf(start: &[u8]) -> bool {
    start.starts_with(b"\x7fELF") && start.len() >= 64
}

fn classify_elf(path: PathBuf, file: &File, start: &[u8]) -> Kind {
    const SET_ID: u32 = 0o6000;
    if !is_elf(start) {
        return Kind::Unknown;
    }
    if !is_ours(start) {
        return Kind::Foreign(path, "made for another machine".into());
    }
    match linking(file, start) {
        Linking::Broken => Kind::Unknown,
        Linking::Static => Kind::Static(path),
        Linking::By(linker) if !linker.ends_with("/ld-linux-x86-64.so.2") => {
            Kind::Foreign(path, format!("linked by {linker}, which the preload object is not made for"))
        }
        Linking::By(_)
            if file.metadata().is_ok_and(|data| data.mode() & SET_ID != 0 && changes_rights(&data)) =>
        {
            Kind::SetId(path)
        }
        Linking::By(_) => Kind::Served,
    }
}

/// Whether set-id bits of a file change this user's rights.
fn changes_rights(data: &std::fs::Metadata) -> bool {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let bits = data.mode();
    (bits & 0o4000 != 0 && data.uid() != user) || (bits & 0o2000 != 0 && data.gid() != group)
}

enum Linking {
    /// Linked dynamically, by the dynamic linker at this path.
    By(String),
    Static,
    /// The file's program headers are incomplete, or it has none.
    Broken,
}

fn linking(file: &File, start: &[u8]) -> Linking {
    const HEADERS_MAX: u64 = 128;
    let short = |at: usize| u64::from(u16::from_le_bytes([start[at], start[at + 1]]));
    let (table, size, count) = (number(start, 32), short(54), short(56));
    let at = |i: u64| table.checked_add(i * size);
    let mut headers = (0..count.min(HEADERS_MAX)).map(|i| interpreter(file, at(i)?));
    match headers.find(|named| !matches!(named, Some(None))) {
        Some(Some(Some(linker))) => Linking::By(linker),
        Some(_) => Linking::Broken,
        None if count == 0 => Linking::Broken,
        None => Linking::Static,
    }
}

/// The path in the program header at `at`, if it is the one that names a dynamic linker. `None` if it cannot be read.
fn interpreter(file: &File, at: u64) -> Option<Option<String>> {
    const INTERPRETER: u32 = 3;
    let mut header = [0u8; 56];
    file.read_exact_at(&mut header, at).ok()?;
    if header[..4] != INTERPRETER.to_le_bytes() {
        return Some(None);
    }
    let mut name = vec![0u8; number(&header, 32).min(4096) as usize];
    file.read_exact_at(&mut name, number(&header, 8)).ok()?;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    String::from_utf8(name[..end].to_vec()).ok().map(Some)
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_script_is_classified_by_its_interpreter() {
        let read = |line: &'static [u8]| first_line(line);
        assert_eq!(read(b" /bin/sh -e\nrest"), (PathBuf::from("/bin/sh"), &b"-e"[..]));
        assert_eq!(read(b"/usr/bin/env python3\n"), (PathBuf::from("/usr/bin/env"), &b"python3"[..]));
        assert_eq!(read(b"/bin/sh"), (PathBuf::from("/bin/sh"), &b""[..]));
    }

    #[test]
    fn the_program_named_to_env_is_run() {
        let named = |argument: &str| named_to_env(Path::new("/usr/bin/env"), argument.as_bytes());
        assert_eq!(named("python3"), Some("python3".into()));
        assert_eq!(named("-S python3 -u"), Some("python3".into()));
        assert_eq!(named("python3 -u"), Some("python3 -u".into()), "one word to the kernel");
        for argument in ["", "-i sh", "A=1 sh", "-S A=1 sh", "-S"] {
            assert_eq!(named(argument), None, "{argument}");
        }
        assert_eq!(named_to_env(Path::new("/bin/sh"), b"python3"), None);
    }

    #[test]
    fn a_program_that_cannot_be_started_is_reported_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        let told = |path: &Path| obstacle(&[path.into()]).map(|found| (found.status, found.wrong));
        assert_eq!(told(Path::new("cat")), None);
        assert_eq!(told(Path::new("no-such-program-anywhere")).unwrap().0, NOT_FOUND);
        assert_eq!(told(&path).unwrap().0, NOT_FOUND);
        assert!(told(folder.path()).unwrap().1.contains("a folder"));
        std::fs::write(&path, "#!/no/such/interpreter\n").unwrap();
        assert!(told(&path).unwrap().1.contains("may not be executed"));
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, executable).unwrap();
        assert_eq!(told(&path), Some((126, "its interpreter /no/such/interpreter is missing".into())));
        std::fs::write(&path, "#!/bin/sh\r\n").unwrap();
        assert!(obstacle(&[path.into()]).unwrap().remedy.contains("CR LF"));
    }

    #[test]
    fn a_script_leads_to_its_interpreter() {
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
        assert_eq!(classify(OsStr::new("cat")), Kind::Served);
        assert_eq!(classify(OsStr::new("no-such-program-anywhere")), Kind::Unknown);
        assert_eq!(classify(OsStr::new("/etc/passwd")), Kind::Unknown);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("arm");
        let mut elf = std::fs::read("/bin/cat").unwrap();
        elf[18] = 183;
        std::fs::write(&path, &elf).unwrap();
        assert!(!classify(path.as_os_str()).may_be_intercepted());
        elf[18] = 62;
        std::fs::write(&path, &elf[..100]).unwrap();
        assert_eq!(classify(path.as_os_str()), Kind::Unknown, "its headers are cut off");
    }
}
