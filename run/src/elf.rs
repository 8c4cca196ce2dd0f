//! Elf: the contents of a program's or library's file, read without running it.
//!
//! ```text
//!   file --Elf::open--> bytes ---> build id, interpreter, needed libraries     what it is, what it loads
//!                             ---> dynamic symbols, with their versions        what it offers, what it asks for
//!                             ---> loaded segments                             bytes by their address
//! ```
//!
//! Its users are `run`, which plans how to patch a C library's functions, and the commands that tell what
//! `run` will do with a program.
//!
//! Invariants:
//!  1. Only 64-bit little-endian files for x86-64 are read; anything else is an error that says so.
//!  2. A file may be damaged or hostile: every number in it is checked by the parser, and what cannot be read
//!     is absent, never a panic.
//!
//! The whole file is read into memory: a C library has 2 MB.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use object::elf::{
    DT_NEEDED, DT_RPATH, DT_RUNPATH, DT_SONAME, ELF_NOTE_GNU, EM_X86_64, FileHeader64, NT_GNU_BUILD_ID, PF_X,
    PT_INTERP, PT_LOAD, STT_FUNC, STT_GNU_IFUNC,
};
use object::read::elf::{Dyn, ElfFile64, FileHeader, ProgramHeader, Sym};
use object::{LittleEndian, Object};

type Parsed<'a> = ElfFile64<'a, LittleEndian>;
const LITTLE: LittleEndian = LittleEndian;

/// A file that was parsed once without a complaint.
#[derive(Clone, Debug)]
pub struct Elf {
    bytes: Vec<u8>,
    segments: Vec<Segment>,
}

/// Bytes of the file that are loaded to an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Where they are loaded, relative to where the file is.
    pub address: u64,
    /// Where in the file they are.
    pub range: Range<usize>,
    /// Whether they may be executed.
    pub is_code: bool,
}

/// A name that a file offers to others, or needs from them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Symbol<'a> {
    /// The name without its version.
    pub name: &'a str,
    /// The version; `None` if the file has no versions, or this symbol has none.
    pub version: Option<&'a str>,
    /// Whether an unversioned question for the name finds this one.
    pub is_default: bool,
    /// The address, relative to where the file is loaded; 0 if the file asks for it.
    pub address: u64,
    /// The length in bytes, as the file says.
    pub bytes: u64,
    /// Whether the file offers it; otherwise it asks for it.
    pub is_defined: bool,
    /// The symbol's kind.
    pub kind: SymbolKind,
}

/// The kind of a symbol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SymbolKind {
    /// A function.
    Function,
    /// A function that chooses, at start, which function is meant.
    Chooser,
    /// Data, or anything else.
    Other,
}

/// Why a file cannot be used here.
#[derive(Debug)]
pub enum ElfError {
    /// The file cannot be read.
    Io(io::Error),
    /// The file is no ELF file, or one of another class or byte order, or a damaged one.
    Malformed(object::read::Error),
    /// The file is made for another machine.
    Machine(u16),
}

impl fmt::Display for ElfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ElfError::Io(error) => write!(f, "it cannot be read: {error}"),
            ElfError::Malformed(error) => {
                write!(f, "it is not a 64-bit ELF file, or a damaged one ({error})")
            }
            ElfError::Machine(number) => {
                write!(f, "it is made for ELF machine {number}; only x86-64 (62) is supported")
            }
        }
    }
}

impl std::error::Error for ElfError {}

/// The linker's identifier of this build, if it is in the file's first page, where linkers put it. Reads no more than
/// that, and moves no offset.
pub fn build_id_of(file: &File) -> Option<Vec<u8>> {
    let mut page = [0; 4096];
    let bytes = file.read_at(&mut page, 0).ok()?;
    let page = &page[..bytes];
    let header = FileHeader64::<LittleEndian>::parse(page).ok()?;
    let segments = header.program_headers(LITTLE, page).ok()?;
    let mut all = segments.iter().filter_map(|segment| segment.notes(LITTLE, page).ok().flatten());
    all.find_map(|mut notes| {
        while let Ok(Some(note)) = notes.next() {
            if note.name() == ELF_NOTE_GNU && note.n_type(LITTLE) == NT_GNU_BUILD_ID {
                return Some(note.desc().to_vec());
            }
        }
        None
    })
}

impl Elf {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// If it cannot be read, or is not what this module reads.
    pub fn open(path: &Path) -> Result<Self, ElfError> {
        Self::parse(std::fs::read(path).map_err(ElfError::Io)?)
    }

    /// Takes the bytes of a file.
    ///
    /// # Errors
    /// If they are not what this module reads.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, ElfError> {
        let file = Parsed::parse(bytes.as_slice()).map_err(ElfError::Malformed)?;
        let machine = file.elf_header().e_machine(LITTLE);
        if machine != EM_X86_64 {
            return Err(ElfError::Machine(machine.0));
        }
        let segments = segments(&file, bytes.len());
        Ok(Self { bytes, segments })
    }

    fn file(&self) -> Parsed<'_> {
        Parsed::parse(self.bytes.as_slice()).expect("the same bytes were parsed before")
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The linker's identifier of this build; `None` if there is none.
    pub fn build_id(&self) -> Option<Vec<u8>> {
        self.file().build_id().ok().flatten().map(<[u8]>::to_vec)
    }

    /// The dynamic linker it asks for; `None` for a static program and for most libraries.
    pub fn interpreter(&self) -> Option<String> {
        let file = self.file();
        let header = file.elf_program_headers().iter().find(|header| header.p_type(LITTLE) == PT_INTERP)?;
        let name = header.interpreter(LITTLE, self.bytes.as_slice()).ok().flatten()?;
        String::from_utf8(name.to_vec()).ok()
    }

    /// The name by which others ask for it; `None` for most programs.
    pub fn soname(&self) -> Option<String> {
        self.dynamic_strings(&[DT_SONAME]).pop()
    }

    /// The libraries it asks for, by the names it uses.
    pub fn needed(&self) -> Vec<String> {
        self.dynamic_strings(&[DT_NEEDED])
    }

    /// The folders of its libraries as it names them, with `$ORIGIN` unresolved.
    pub fn search_paths(&self) -> Vec<String> {
        self.dynamic_strings(&[DT_RPATH, DT_RUNPATH])
    }

    fn dynamic_strings(&self, tags: &[object::elf::DynamicTag]) -> Vec<String> {
        let file = self.file();
        let sections = file.elf_section_table();
        let Ok(Some((entries, link))) = sections.dynamic(LITTLE, self.bytes.as_slice()) else {
            return vec![];
        };
        let Ok(strings) = sections.strings(LITTLE, self.bytes.as_slice(), link) else { return vec![] };
        entries
            .iter()
            .filter(|entry| tags.contains(&entry.tag(LITTLE)))
            .filter_map(|entry| entry.string(LITTLE, strings).ok())
            .filter_map(|name| String::from_utf8(name.to_vec()).ok())
            .collect()
    }

    /// The dynamic symbols: those that the file offers and those that it needs. Names that are not UTF-8 are left out.
    pub fn symbols(&self) -> Vec<Symbol<'_>> {
        let file = self.file();
        let versions = file.elf_section_table().versions(LITTLE, self.bytes.as_slice()).ok().flatten();
        let table = file.elf_dynamic_symbol_table();
        let mut symbols = Vec::new();
        for (index, symbol) in table.enumerate() {
            let name = table.strings().get(symbol.st_name.get(LITTLE)).ok();
            let Some(name) = name.and_then(|name| std::str::from_utf8(name).ok()) else { continue };
            let place = versions.as_ref().map(|versions| versions.version_index(LITTLE, index));
            let version = versions.as_ref().zip(place).and_then(|(versions, place)| {
                versions
                    .version(place.index())
                    .ok()
                    .flatten()
                    .and_then(|version| std::str::from_utf8(version.name()).ok())
            });
            symbols.push(Symbol {
                name,
                version,
                is_default: place.is_none_or(|place| !place.is_hidden()),
                address: symbol.st_value.get(LITTLE),
                bytes: symbol.st_size.get(LITTLE),
                is_defined: !symbol.is_undefined(LITTLE),
                kind: kind(symbol.st_type()),
            });
        }
        symbols
    }

    /// How much memory it takes when it is loaded, up to the end of a page; 0 if nothing of it is loaded.
    pub fn memory_bytes(&self) -> u64 {
        const PAGE: u64 = 4096;
        let file = self.file();
        let loaded = file.elf_program_headers().iter().filter(|header| header.p_type(LITTLE) == PT_LOAD);
        let ends = loaded.map(|header| header.p_vaddr(LITTLE).saturating_add(header.p_memsz(LITTLE)));
        ends.max().map_or(0, |end| end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX))
    }

    /// The segments that are loaded, in the order of the file.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The bytes that are loaded to `address`, up to the end of their segment's bytes in the file.
    pub fn from(&self, address: u64) -> Option<&[u8]> {
        let found = self.segments.iter().find(|segment| {
            address >= segment.address && address - segment.address < segment.range.len() as u64
        })?;
        Some(&self.bytes[found.range.start + (address - found.address) as usize..found.range.end])
    }

    /// The `len` bytes that are loaded to `address`; `None` unless the file has them all.
    pub fn at(&self, address: u64, len: usize) -> Option<&[u8]> {
        self.from(address)?.get(..len)
    }

    /// The loaded bytes that may be executed: where they are loaded, and they.
    pub fn code(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let code = self.segments.iter().filter(|segment| segment.is_code);
        code.map(|segment| (segment.address, &self.bytes[segment.range.clone()]))
    }
}

fn kind(symbol: object::elf::SymbolType) -> SymbolKind {
    match symbol {
        STT_FUNC => SymbolKind::Function,
        STT_GNU_IFUNC => SymbolKind::Chooser,
        _ => SymbolKind::Other,
    }
}

fn segments(file: &Parsed<'_>, file_bytes: usize) -> Vec<Segment> {
    let headers: &[<FileHeader64<LittleEndian> as FileHeader>::ProgramHeader] = file.elf_program_headers();
    let mut segments = Vec::new();
    for header in headers.iter().filter(|header| header.p_type(LITTLE) == PT_LOAD) {
        let (start, len) = header.file_range(LITTLE);
        let Some(end) = start.checked_add(len).filter(|&end| end <= file_bytes as u64) else { continue };
        segments.push(Segment {
            address: header.p_vaddr.get(LITTLE),
            range: start as usize..end as usize,
            is_code: header.p_flags(LITTLE).0 & PF_X.0 != 0,
        });
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn ourselves() -> Elf {
        Elf::open(&std::env::current_exe().unwrap()).unwrap()
    }

    #[test]
    fn a_program_says_what_it_loads() {
        let elf = ourselves();
        assert!(elf.interpreter().unwrap().ends_with("ld-linux-x86-64.so.2"), "{:?}", elf.interpreter());
        assert!(elf.needed().iter().any(|name| name == "libc.so.6"), "{:?}", elf.needed());
        let asked = elf.symbols();
        let read = asked.iter().find(|symbol| symbol.name == "read").expect("tests read files");
        assert!(!read.is_defined && read.version.is_some_and(|version| version.starts_with("GLIBC_")));
    }

    /// Functions have the addresses that `nm` prints, for all that a C library offers.
    #[test]
    fn a_library_offers_the_symbols_that_another_reader_lists() {
        let interpreter = ourselves().interpreter().unwrap();
        let library = std::fs::canonicalize(interpreter).unwrap().with_file_name("libc.so.6");
        let elf = Elf::open(&library).unwrap();
        assert!(elf.build_id().is_none_or(|id| (8..=32).contains(&id.len())));
        let output = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().expect("nm");
        let mut theirs: Vec<String> =
            String::from_utf8(output.stdout).unwrap().lines().map(Into::into).collect();
        theirs.retain(|line| matches!(line.split(' ').nth(1), Some("T" | "W")));
        let mut ours: Vec<String> = Vec::new();
        for symbol in elf.symbols() {
            if symbol.is_defined && symbol.kind == SymbolKind::Function {
                let at = if symbol.is_default { "@@" } else { "@" };
                let version = symbol.version.map(|version| format!("{at}{version}")).unwrap_or_default();
                ours.push(format!("{:016x} {}{version}", symbol.address, symbol.name));
                assert!(elf.at(symbol.address, symbol.bytes as usize).is_some(), "{symbol:?}");
            }
        }
        let mut theirs: Vec<String> =
            theirs.iter().map(|line| format!("{} {}", &line[..16], &line[19..])).collect();
        ours.sort();
        theirs.sort();
        assert!(ours.len() > 1000);
        assert_eq!(ours, theirs);
    }

    #[test]
    fn a_file_that_is_no_program_of_this_machine_is_an_error_and_never_a_panic() {
        assert!(matches!(Elf::parse(b"#!/bin/sh\n".to_vec()), Err(ElfError::Malformed(_))));
        assert!(matches!(Elf::open(Path::new("/no/such/file")), Err(ElfError::Io(_))));
        let whole = std::fs::read("/bin/true").unwrap();
        let mut arm = whole.clone();
        arm[18] = 183;
        assert!(matches!(Elf::parse(arm), Err(ElfError::Machine(183))));
        for cut in [1, 10, 64, 100, 1000, whole.len() / 2, whole.len() - 100] {
            exercise(whole[..cut].to_vec());
        }
        let mut state = 1u64;
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            for _ in 0..4 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let headers = if state & 1 == 0 { 1024 } else { bytes.len() };
                let at = (state >> 33) as usize % headers;
                bytes[at] = (state >> 24) as u8;
            }
            exercise(bytes);
        }
    }

    /// Calls everything for a file that may be nonsense.
    fn exercise(bytes: Vec<u8>) {
        let Ok(elf) = Elf::parse(bytes) else { return };
        let _ = (elf.build_id(), elf.interpreter(), elf.needed(), elf.search_paths(), elf.code().count());
        for symbol in elf.symbols() {
            let _ = elf.at(symbol.address, symbol.bytes as usize);
        }
    }
}
