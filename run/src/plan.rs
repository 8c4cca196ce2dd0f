//! Plan: how the functions of a C library are led to the interposer's wrappers.
//!
//! ```text
//!   the object's wrappers --+
//!                           +--> functions to patch --> first instructions, decoded --> moved elsewhere --> plan
//!   the C library's file ---+         |                        |
//!                                     `--> left: composed      `--> left: too short, jumped into, ...
//! ```
//!
//! A function is patched by a jump over its first instructions. These have to work at another address, so each
//! distance from their own is written down as a *fix* for the object to fill in. A function that cannot be
//! moved with certainty is left alone: then only calls by name are served, as without a plan. The object checks the
//! library's build-id and the very bytes, so a plan made of the wrong file does nothing.
//!
//! Some functions are essential: they make, move and release descriptors inside the C library. If one of them cannot be
//! patched, there is no plan at all: a stream's descriptor might be served whose end the object does not see.
//!
//! Invariants:
//!  1. Nothing but straight instructions, one jump or a conditional one, and system calls is moved: no call, whose
//!     return address would lie in the object.
//!  2. No branch that can be seen, and no other symbol, leads between the bytes that are replaced.
//!  3. A plan depends on the two files alone.
//!
//! Cost: one read of the library (2 MB) and one pass over its code, some milliseconds, once for each library: see
//! `planned`. The decoder is the crate `iced-x86`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};

use memchr::memchr3_iter;

use crate::elf::{Elf, Symbol, SymbolKind};

#[path = "../../frontends/preload/src/plan.rs"]
mod form;

use form::{ENTRIES_MAX, Entry, FIXES_MAX, Fix, Header, JUMP_BYTES, MAGIC, MOVED_MAX, ORIGINAL_MAX};

/// Functions that the C library makes of others which are patched: patching them would have no use, and some of their
/// wrappers exist only because the others could not be patched.
const COMPOSED: &[&str] = &[
    "_IO_fclose",
    "_IO_fdopen",
    "daemon",
    "endmntent",
    "execl",
    "execle",
    "execlp",
    "execv",
    "execvp",
    "execvpe",
    "fclose",
    "fcloseall",
    "fdopen",
    "fopen",
    "fopen64",
    "forkpty",
    "freopen",
    "freopen64",
    "login_tty",
    "mkostemp",
    "mkostemp64",
    "mkostemps",
    "mkostemps64",
    "mkstemp",
    "mkstemp64",
    "mkstemps",
    "mkstemps64",
    "popen",
    "shm_open",
    "system",
    "wordexp",
];

/// Functions without which nothing may be patched: the C library itself calls them on descriptors that it opened.
const ESSENTIAL: &[&str] = &[
    "_Fork",
    "__close_nocancel",
    "__open64_nocancel",
    "__open_nocancel",
    "__read_nocancel",
    "close",
    "close_range",
    "dup",
    "dup2",
    "dup3",
    "fcntl",
    "fork",
    "lseek",
    "mmap",
    "open",
    "openat",
    "pidfd_spawn",
    "pidfd_spawnp",
    "posix_spawn",
    "posix_spawnp",
    "pread64",
    "preadv2",
    "read",
    "readv",
    "truncate",
];

/// Internal functions of the library. Without these, its streams would open and close descriptors unseen.
const INNER: &[&str] = &["__close_nocancel", "__open_nocancel", "__read_nocancel"];

/// A plan for one C library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    build_id: Vec<u8>,
    entries: Vec<Entry>,
    /// The names of each patched function, with the name of its wrapper.
    pub functions: Vec<String>,
    /// Functions with a wrapper that are not patched, and why.
    pub left: Vec<UnpatchedFunction>,
}

/// A function that is not patched.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnpatchedFunction {
    /// The function's name.
    pub name: String,
    /// The reason.
    pub why: PatchRefused,
}

/// Why a function cannot be patched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PatchRefused {
    /// The function's code is chosen at start among several.
    Chosen,
    /// The function is too short for a jump.
    Short,
    /// The function's first instructions cannot be run elsewhere.
    Unmovable,
    /// Something jumps between its first bytes.
    JumpedInto,
    /// There are more functions than a plan has room for.
    PlanFull,
}

impl fmt::Display for PatchRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PatchRefused::Chosen => "it is chosen at start among several",
            PatchRefused::Short => "it is too short for a jump",
            PatchRefused::Unmovable => "its first instructions work only where they are",
            PatchRefused::JumpedInto => "something jumps between its first bytes",
            PatchRefused::PlanFull => "a plan has no room for more functions",
        })
    }
}

/// Why there is no plan for a library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NoPlan {
    /// The library does not say which build it is.
    NoBuildId,
    /// An essential function cannot be patched.
    Essential(UnpatchedFunction),
    /// The library has no function of this name, and makes calls without the name that must be seen.
    Hidden(&'static str),
}

impl fmt::Display for NoPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoPlan::NoBuildId => f.write_str("it has no build-id, by which it could be known again"),
            NoPlan::Essential(left) => {
                write!(f, "its function {} cannot be patched: {}", left.name, left.why)
            }
            NoPlan::Hidden(name) => write!(f, "it has no {name}, so it opens and closes files unseen"),
        }
    }
}

impl std::error::Error for NoPlan {}

/// The C library that a program with this dynamic linker loads: both are built and installed together. The object
/// checks that.
pub fn library_of(linker: &Path) -> Option<PathBuf> {
    let library = std::fs::canonicalize(linker).ok()?.with_file_name("libc.so.6");
    library.is_file().then_some(library)
}

impl Plan {
    /// Plans how to lead the functions of `library` to the wrappers of `object`.
    ///
    /// # Errors
    /// If the library cannot be patched in a way that is right; see [`NoPlan`].
    pub fn make(library: &Elf, object: &Elf) -> Result<Self, NoPlan> {
        let build_id = library.build_id().filter(|id| (1..=form::BUILD_ID_MAX).contains(&id.len()));
        let mut plan = Self {
            build_id: build_id.ok_or(NoPlan::NoBuildId)?,
            entries: Vec::new(),
            functions: Vec::new(),
            left: Vec::new(),
        };
        let symbols = library.symbols();
        let functions = functions(&symbols, object);
        let has = |name: &str| functions.iter().any(|function| function.names.contains(&name));
        if let Some(hidden) = INNER.iter().find(|name| !has(name)) {
            return Err(NoPlan::Hidden(hidden));
        }
        let starts = Starts::new(&symbols);
        let mut candidates: Vec<(&Function<'_>, Entry)> = Vec::new();
        for function in &functions {
            match moved(library, function, &starts) {
                Ok(entry) if candidates.len() < ENTRIES_MAX => candidates.push((function, entry)),
                Ok(_) => plan.leave(function, PatchRefused::PlanFull)?,
                Err(why) => plan.leave(function, why)?,
            }
        }
        let jumped_into = jumped_into(library, &starts, candidates.iter().map(|(_, entry)| entry));
        for (function, entry) in candidates {
            if jumped_into.contains(&entry.offset) {
                plan.leave(function, PatchRefused::JumpedInto)?;
            } else {
                plan.entries.push(entry);
                plan.functions.extend(function.names.iter().map(ToString::to_string));
            }
        }
        Ok(plan)
    }

    fn leave(&mut self, function: &Function<'_>, why: PatchRefused) -> Result<(), NoPlan> {
        let left = UnpatchedFunction { name: function.names[0].to_owned(), why };
        if function.is_essential() {
            return Err(NoPlan::Essential(left));
        }
        self.left.push(left);
        Ok(())
    }

    /// The plan in the object's format: whole pages.
    pub fn bytes(&self) -> Vec<u8> {
        const PAGE: usize = 4096;
        let mut build_id = [0; form::BUILD_ID_MAX];
        build_id[..self.build_id.len()].copy_from_slice(&self.build_id);
        let header = Header {
            magic: MAGIC,
            entries: self.entries.len() as u32,
            build_id_len: self.build_id.len() as u32,
            build_id,
            rest: [0; 4],
        };
        let mut bytes = header_bytes(&header);
        self.entries.iter().for_each(|entry| entry_bytes(entry, &mut bytes));
        bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
        bytes
    }
}

fn header_bytes(header: &Header) -> Vec<u8> {
    let mut bytes = header.magic.to_vec();
    bytes.extend(header.entries.to_le_bytes());
    bytes.extend(header.build_id_len.to_le_bytes());
    bytes.extend(header.build_id);
    bytes.extend(header.rest.map(u32::to_le_bytes).as_flattened());
    debug_assert_eq!(bytes.len(), size_of::<Header>());
    bytes
}

fn entry_bytes(entry: &Entry, bytes: &mut Vec<u8>) {
    let before = bytes.len();
    bytes.extend(entry.offset.to_le_bytes());
    bytes.extend([entry.skip, entry.original_len, entry.moved_len, entry.fixes_len, entry.is_essential]);
    bytes.extend(entry.rest);
    bytes.extend(entry.original);
    bytes.extend(entry.moved);
    for fix in entry.fixes {
        bytes.extend([fix.at, fix.end]);
        bytes.extend(fix.rest.to_le_bytes());
        bytes.extend(fix.target.to_le_bytes());
    }
    debug_assert_eq!(bytes.len() - before, size_of::<Entry>());
}

struct Function<'a> {
    names: Vec<&'a str>,
    address: u64,
    bytes: u64,
    kind: SymbolKind,
}

impl Function<'_> {
    fn is_essential(&self) -> bool {
        self.names.iter().any(|name| ESSENTIAL.contains(name))
    }
}

/// The library's functions whose names the object has too, each address once.
fn functions<'a>(library: &[Symbol<'a>], object: &Elf) -> Vec<Function<'a>> {
    let wrappers: BTreeSet<&str> =
        object.symbols().iter().filter(|symbol| symbol.is_defined).map(|symbol| symbol.name).collect();
    let mut functions: BTreeMap<u64, Function<'a>> = BTreeMap::new();
    for symbol in library {
        let is_code = matches!(symbol.kind, SymbolKind::Function | SymbolKind::Chooser);
        let is_wanted = symbol.is_defined && symbol.is_default && is_code;
        if is_wanted && wrappers.contains(symbol.name) && !COMPOSED.contains(&symbol.name) {
            let (address, bytes, kind) = (symbol.address, symbol.bytes, symbol.kind);
            let new = || Function { names: Vec::new(), address, bytes, kind };
            let function = functions.entry(address).or_insert_with(new);
            function.names.push(symbol.name);
            function.names.sort_unstable();
        }
    }
    functions.into_values().collect()
}

/// The addresses of the library's named functions, in order.
struct Starts(Vec<u64>);

impl Starts {
    fn new(library: &[Symbol<'_>]) -> Self {
        let defined = library.iter().filter(|symbol| symbol.is_defined);
        let mut starts: Vec<u64> = defined.map(|symbol| symbol.address).collect();
        starts.sort_unstable();
        Self(starts)
    }

    /// Whether a function begins in `range`.
    fn is_in(&self, range: &Range<u64>) -> bool {
        let first = self.0.partition_point(|&start| start < range.start);
        self.0.get(first).is_some_and(|start| range.contains(start))
    }

    /// The last beginning at or before `address`.
    fn last_until(&self, address: u64) -> Option<u64> {
        let after = self.0.partition_point(|&start| start <= address);
        self.0[..after].last().copied()
    }
}

const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
const JUMP: u8 = 0xe9;

struct Moving {
    bytes: Vec<u8>,
    fixes: Vec<Fix>,
}

impl Moving {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Notes that the four bytes at `at` are the distance from `end` to `target`.
    fn fix(&mut self, at: usize, end: usize, target: u64) -> Result<(), PatchRefused> {
        let target = u32::try_from(target).map_err(|_| PatchRefused::Unmovable)?;
        self.fixes.push(Fix { at: at as u8, end: end as u8, rest: 0, target });
        Ok(())
    }

    /// Adds an instruction that ends with a distance of four bytes: a jump of some kind.
    fn add_jump(&mut self, opcode: &[u8], target: u64) -> Result<(), PatchRefused> {
        self.add(opcode);
        let at = self.bytes.len();
        self.add(&[0; 4]);
        self.fix(at, at + 4, target)
    }
}

fn moved(library: &Elf, function: &Function<'_>, starts: &Starts) -> Result<Entry, PatchRefused> {
    if function.kind == SymbolKind::Chooser {
        return Err(PatchRefused::Chosen);
    }
    let code = library.at(function.address, function.bytes as usize).ok_or(PatchRefused::Unmovable)?;
    let skip = if code.starts_with(&ENDBR64) { ENDBR64.len() } else { 0 };
    let mut moving = Moving { bytes: code[..skip].to_vec(), fixes: Vec::new() };
    let taken = move_instructions(code, function.address, skip, &mut moving)?;
    let replaced = function.address + (skip + 1) as u64..function.address + taken as u64;
    if starts.is_in(&replaced) || branches_into(code, function.address, &replaced) {
        return Err(PatchRefused::JumpedInto);
    }
    entry(function, code, skip, taken, &moving)
}

/// Moves instructions until a jump has room; returns the number of the original's bytes.
fn move_instructions(
    code: &[u8],
    address: u64,
    skip: usize,
    moving: &mut Moving,
) -> Result<usize, PatchRefused> {
    let mut decoder = decoder(code, address);
    decoder.set_position(skip).map_err(|_| PatchRefused::Short)?;
    decoder.set_ip(address + skip as u64);
    let mut taken = skip;
    let mut falls_through = true;
    while taken < skip + JUMP_BYTES {
        if !falls_through || !decoder.can_decode() {
            return Err(PatchRefused::Short);
        }
        let instruction = decoder.decode();
        let bytes = &code[taken..taken + instruction.len()];
        falls_through = move_one(&decoder, &instruction, bytes, moving)?;
        taken += instruction.len();
    }
    if falls_through {
        moving.add_jump(&[JUMP], address + taken as u64)?;
    }
    Ok(taken)
}

/// Moves one instruction; returns whether the next one may run after it.
fn move_one(
    decoder: &Decoder<'_>,
    instruction: &Instruction,
    bytes: &[u8],
    moving: &mut Moving,
) -> Result<bool, PatchRefused> {
    /// A jump on a condition over four bytes of distance is this and the condition's number.
    const JUMP_IF: [u8; 2] = [0x0f, 0x80];
    match instruction.flow_control() {
        FlowControl::ConditionalBranch if instruction.is_jcc_short_or_near() => {
            let condition = bytes
                .iter()
                .rev()
                .nth(instruction_distance_bytes(instruction))
                .ok_or(PatchRefused::Unmovable)?;
            let target = instruction.near_branch_target();
            moving.add_jump(&[JUMP_IF[0], JUMP_IF[1] | (condition & 0xf)], target)?;
            Ok(true)
        }
        FlowControl::UnconditionalBranch if instruction.is_jmp_short_or_near() => {
            moving.add_jump(&[JUMP], instruction.near_branch_target())?;
            Ok(false)
        }
        FlowControl::Return => {
            moving.add(bytes);
            Ok(false)
        }
        FlowControl::Call if instruction.mnemonic() == Mnemonic::Syscall => {
            moving.add(bytes);
            Ok(true)
        }
        FlowControl::Next if instruction.is_ip_rel_memory_operand() => {
            let places = decoder.get_constant_offsets(instruction);
            if places.displacement_size() != 4 {
                return Err(PatchRefused::Unmovable);
            }
            let start = moving.bytes.len();
            moving.add(bytes);
            let target = instruction.ip_rel_memory_address();
            moving.fix(start + places.displacement_offset(), start + bytes.len(), target)?;
            Ok(true)
        }
        FlowControl::Next => {
            moving.add(bytes);
            Ok(true)
        }
        _ => Err(PatchRefused::Unmovable),
    }
}

/// The length of a jump's distance: the condition is in the byte before.
fn instruction_distance_bytes(instruction: &Instruction) -> usize {
    if instruction.is_jcc_short() { 1 } else { 4 }
}

fn decoder(code: &[u8], address: u64) -> Decoder<'_> {
    Decoder::with_ip(64, code, address, DecoderOptions::NONE)
}

/// Whether the instructions of a function branch to `replaced`, as far as they show it.
fn branches_into(code: &[u8], address: u64, replaced: &Range<u64>) -> bool {
    decoder(code, address).iter().any(|instruction| {
        let is_near = matches!(
            instruction.flow_control(),
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch | FlowControl::Call
        ) && instruction.mnemonic() != Mnemonic::Syscall;
        is_near && replaced.contains(&instruction.near_branch_target())
    })
}

fn entry(
    function: &Function<'_>,
    code: &[u8],
    skip: usize,
    taken: usize,
    moving: &Moving,
) -> Result<Entry, PatchRefused> {
    if taken > ORIGINAL_MAX || moving.bytes.len() > MOVED_MAX || moving.fixes.len() > FIXES_MAX {
        return Err(PatchRefused::Unmovable);
    }
    let mut entry = Entry {
        offset: u32::try_from(function.address).map_err(|_| PatchRefused::Unmovable)?,
        skip: skip as u8,
        original_len: taken as u8,
        moved_len: moving.bytes.len() as u8,
        fixes_len: moving.fixes.len() as u8,
        is_essential: u8::from(function.is_essential()),
        rest: [0; 15],
        original: [0; ORIGINAL_MAX],
        moved: [0; MOVED_MAX],
        fixes: [Fix::default(); FIXES_MAX],
    };
    entry.original[..taken].copy_from_slice(&code[..taken]);
    entry.moved[..moving.bytes.len()].copy_from_slice(&moving.bytes);
    entry.fixes[..moving.fixes.len()].copy_from_slice(&moving.fixes);
    Ok(entry)
}

/// The offsets of entries into whose replaced bytes something in the library jumps from far: parts of a function may
/// lie elsewhere. First every byte is taken for a jump, which is quick and finds too many; then the instructions before
/// the rest are decoded, from the last named function.
fn jumped_into<'a>(
    library: &Elf,
    starts: &Starts,
    entries: impl Iterator<Item = &'a Entry>,
) -> BTreeSet<u32> {
    let mut places: Vec<(u64, u32)> = Vec::new(); // each replaced byte but the first, and whose it is
    for entry in entries {
        let replaced = u64::from(entry.skip) + 1..u64::from(entry.original_len);
        places.extend(replaced.map(|at| (u64::from(entry.offset) + at, entry.offset)));
    }
    places.sort_unstable();
    let (Some(&(first, _)), Some(&(last, _))) = (places.first(), places.last()) else {
        return BTreeSet::new();
    };
    let mut found = BTreeSet::new();
    for (address, code) in library.code() {
        for (at, distance) in jumps(code) {
            let target = (address + at as u64 + 5).wrapping_add_signed(i64::from(distance));
            if (first..=last).contains(&target)
                && let Ok(place) = places.binary_search_by_key(&target, |&(place, _)| place)
                && jumps_to(library, starts, address + at as u64, target)
            {
                found.insert(places[place].1);
            }
        }
    }
    found
}

/// Bytes that would be a call, a jump or a conditional jump over four bytes of distance if an instruction ended
/// there: the offset of the byte before the distance, and the distance.
fn jumps(code: &[u8]) -> impl Iterator<Item = (usize, i32)> {
    const CALL: u8 = 0xe8;
    const IF: u8 = 0x0f;
    memchr3_iter(CALL, JUMP, IF, code).filter_map(|at| {
        let at = if code[at] == IF { at + 1 } else { at };
        let window = code.get(at..at + JUMP_BYTES)?;
        let is_jump = matches!(window[0], CALL | JUMP | 0x80..=0x8f);
        is_jump.then(|| (at, i32::from_le_bytes([window[1], window[2], window[3], window[4]])))
    })
}

/// Whether an instruction that ends with the distance behind `at` is a jump to `target`.
fn jumps_to(library: &Elf, starts: &Starts, at: u64, target: u64) -> bool {
    let Some(start) = starts.last_until(at) else { return true };
    let Some(code) = library.from(start) else { return true };
    let end = at + JUMP_BYTES as u64;
    decoder(code, start)
        .iter()
        .take_while(|instruction| instruction.ip() < end)
        .any(|instruction| instruction.next_ip() == end && instruction.near_branch_target() == target)
}

#[cfg(test)]
mod tests;
