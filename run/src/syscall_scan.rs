//! System call scan: the system calls that an object makes by instructions of its own.
//!
//! ```text
//!   code of an object    .. 0f 05 .. 0f 05 .. cd 80 ..      1 pairs of bytes that could be one
//!   its functions        [start, end) by its unwind table   2 decoded from the start: is it an instruction?
//!                        mov eax, 426 .. syscall            3 which number, if only one can be meant
//! ```
//!
//! The interposer sees calls through the C library. An object that enters the kernel by itself may close a descriptor
//! and open another file under its number unnoticed. So each object of a process is scanned before the process is
//! served, and the result decides how its descriptors are served: see [`SyscallAudit`].
//!
//! Code cannot be told from data for certain, so the scan errs to one side. A pair of bytes is taken for a system call
//! unless it lies inside another instruction of a function in the unwind table. A number is used only if it is set a
//! few instructions before, nothing sets it again, and no branch of the object leads in between.
//!
//! Not an invariant: that nothing is missed. The scan does not see code that a program generates, nor a jump into the
//! middle of an instruction.
//!
//! Cost: a pass over the code for the pairs, and the decoding of the few functions that have one; a megabyte a
//! millisecond, or faster.

use std::cell::RefCell;
use std::collections::HashMap;

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};
use object::LittleEndian;
use object::elf::{FileHeader64, PF_X, PT_GNU_EH_FRAME, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};
use quinion::internals::arena::control::SyscallAudit;

#[path = "../../frontends/preload/src/harmless_syscalls.rs"]
mod harmless_syscalls;

pub use harmless_syscalls::is_harmless;

/// One place from which an object enters the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    /// The site's address in the object.
    pub address: u64,
    /// The system call's number, if only one can be meant.
    pub number: Option<u32>,
}

/// The result of these sites of one object.
pub fn audit_of(sites: &[Site]) -> SyscallAudit {
    match sites {
        [] => SyscallAudit::Clean,
        sites if sites.iter().all(|site| site.number.is_some_and(is_harmless)) => SyscallAudit::Harmless,
        _ => SyscallAudit::Restricted,
    }
}

/// Names of calls, for a report: all that are harmless, and the commonest others.
const NAMES: &[(u32, &str)] = &[
    (0, "read"),
    (1, "write"),
    (2, "open"),
    (3, "close"),
    (8, "lseek"),
    (9, "mmap"),
    (10, "mprotect"),
    (11, "munmap"),
    (12, "brk"),
    (13, "rt_sigaction"),
    (14, "rt_sigprocmask"),
    (15, "rt_sigreturn"),
    (16, "ioctl"),
    (17, "pread64"),
    (18, "pwrite64"),
    (24, "sched_yield"),
    (25, "mremap"),
    (27, "mincore"),
    (28, "madvise"),
    (32, "dup"),
    (33, "dup2"),
    (35, "nanosleep"),
    (39, "getpid"),
    (56, "clone"),
    (57, "fork"),
    (59, "execve"),
    (60, "exit"),
    (62, "kill"),
    (63, "uname"),
    (72, "fcntl"),
    (96, "gettimeofday"),
    (97, "getrlimit"),
    (98, "getrusage"),
    (99, "sysinfo"),
    (102, "getuid"),
    (104, "getgid"),
    (107, "geteuid"),
    (108, "getegid"),
    (110, "getppid"),
    (131, "sigaltstack"),
    (157, "prctl"),
    (158, "arch_prctl"),
    (186, "gettid"),
    (200, "tkill"),
    (201, "time"),
    (202, "futex"),
    (203, "sched_setaffinity"),
    (204, "sched_getaffinity"),
    (206, "io_setup"),
    (207, "io_destroy"),
    (208, "io_getevents"),
    (209, "io_submit"),
    (210, "io_cancel"),
    (218, "set_tid_address"),
    (228, "clock_gettime"),
    (229, "clock_getres"),
    (230, "clock_nanosleep"),
    (231, "exit_group"),
    (232, "epoll_wait"),
    (234, "tgkill"),
    (237, "mbind"),
    (238, "set_mempolicy"),
    (239, "get_mempolicy"),
    (251, "ioprio_set"),
    (252, "ioprio_get"),
    (257, "openat"),
    (279, "move_pages"),
    (281, "epoll_pwait"),
    (292, "dup3"),
    (309, "getcpu"),
    (314, "sched_setattr"),
    (315, "sched_getattr"),
    (317, "seccomp"),
    (318, "getrandom"),
    (324, "membarrier"),
    (332, "statx"),
    (333, "io_pgetevents"),
    (334, "rseq"),
    (425, "io_uring_setup"),
    (426, "io_uring_enter"),
    (427, "io_uring_register"),
    (435, "clone3"),
    (436, "close_range"),
];

/// The name of a call, or its number.
pub fn call_name(number: u32) -> String {
    let known = NAMES.iter().find(|&&(known, _)| known == number);
    known.map_or_else(|| number.to_string(), |(_, name)| (*name).to_owned())
}

/// Every place in an object from which it enters the kernel, by address.
///
/// # Errors
/// If the bytes are not those of a 64-bit ELF file, in words.
pub fn scan(object: &[u8]) -> Result<Vec<Site>, String> {
    let code = Code64::of(object)?;
    let mut sites = Vec::new();
    for (address, bytes) in &code.segments {
        for at in pairs(bytes) {
            sites.extend(code.site_at(address + at as u64));
        }
    }
    sites.sort_by_key(|site| site.address);
    code.doubt_numbers_that_branches_bypass(&mut sites);
    Ok(sites.into_iter().map(|site| site.site).collect())
}

/// Whether unknown bytes could enter the kernel.
pub fn may_enter_kernel(bytes: &[u8]) -> bool {
    pairs(bytes).next().is_some()
}

fn pairs(bytes: &[u8]) -> impl Iterator<Item = usize> {
    /// Most pieces have no pair, which vectorized steps show.
    const PIECE_BYTES: usize = 256;
    let is_pair = |first: u8, second: u8| {
        (first == 0x0f) & ((second == 0x05) | (second == 0x34)) | (first == 0xcd) & (second == 0x80)
    };
    let pieces = (0..bytes.len().saturating_sub(1)).step_by(PIECE_BYTES);
    pieces.flat_map(move |start| {
        let end = (start + PIECE_BYTES + 1).min(bytes.len());
        let (firsts, seconds) = (&bytes[start..end - 1], &bytes[start + 1..end]);
        let each = firsts.iter().zip(seconds);
        let has_any = each.clone().fold(false, |any, (&first, &second)| any | is_pair(first, second));
        let here = if has_any { firsts.len() } else { 0 };
        (0..here).filter(move |&at| is_pair(firsts[at], seconds[at])).map(move |at| start + at)
    })
}

struct Code64<'a> {
    segments: Vec<(u64, &'a [u8])>,
    functions: Functions<'a>,
}

/// A site while its number is still being doubted.
struct DoubtfulSite {
    site: Site,
    address: u64,
    set_at: u64,
}

impl<'a> Code64<'a> {
    fn of(object: &'a [u8]) -> Result<Self, String> {
        let wrong = |error: object::Error| format!("it is not a 64-bit ELF file: {error}");
        let header = FileHeader64::<LittleEndian>::parse(object).map_err(wrong)?;
        let endian = header.endian().map_err(wrong)?;
        let headers = header.program_headers(endian, object).map_err(wrong)?;
        let mut loaded = Vec::new();
        let mut frames = None;
        for header in headers {
            let bytes =
                || header.data(endian, object).map_err(|()| "a segment lies outside the file".to_owned());
            match header.p_type(endian) {
                PT_LOAD => {
                    let is_code = header.p_flags(endian).0 & PF_X.0 != 0;
                    loaded.push(LoadedSegment { at: header.p_vaddr(endian), bytes: bytes()?, is_code });
                }
                PT_GNU_EH_FRAME => frames = Some((header.p_vaddr(endian), bytes()?)),
                _ => {}
            }
        }
        let segments = loaded.iter().filter(|part| part.is_code).map(|part| (part.at, part.bytes)).collect();
        Ok(Self { segments, functions: Functions::of(frames, loaded) })
    }

    fn code(&self, start: u64, end: u64) -> Option<&'a [u8]> {
        self.segments.iter().find_map(|(address, bytes)| {
            let at = usize::try_from(start.checked_sub(*address)?).ok()?;
            bytes.get(at..at.checked_add(usize::try_from(end.checked_sub(start)?).ok()?)?)
        })
    }

    fn code_before(&self, address: u64, most: usize) -> Option<&'a [u8]> {
        self.segments.iter().find_map(|(start, bytes)| {
            let at = usize::try_from(address.checked_sub(*start)?).ok()?;
            bytes.get(at.saturating_sub(most)..at)
        })
    }

    /// A pair of bytes at `address`: `None` if it lies inside another instruction.
    fn site_at(&self, address: u64) -> Option<DoubtfulSite> {
        let unknown = DoubtfulSite { site: Site { address, number: None }, address, set_at: address };
        let Some((start, end)) = self.functions.around(address) else {
            return self.is_plausible_between_functions(address).then_some(unknown);
        };
        let Some(code) = self.code(start, end) else { return Some(unknown) };
        let mut number = Number { set: None, writes: InstructionInfoFactory::new() };
        let mut is_site = false;
        for instruction in instructions(code, start) {
            if instruction.code() == Code::INVALID {
                return Some(unknown);
            }
            if instruction.next_ip() <= address {
                number.pass(&instruction);
                continue;
            }
            // It contains the pair: behind prefixes, if it is a call with prefixes, or as a part of something else.
            match instruction.mnemonic() {
                Mnemonic::Syscall => is_site = true,
                Mnemonic::Sysenter | Mnemonic::Int => {
                    (is_site, number.set) = (true, None); // the numbers of these ways in are others
                }
                _ => {}
            }
            break;
        }
        if !is_site {
            return None;
        }
        Some(match number.set {
            Some((number, set_at)) => {
                DoubtfulSite { site: Site { address, number: Some(number) }, address, set_at }
            }
            None => unknown,
        })
    }

    /// Whether a pair of bytes in no known function looks like a system call: some way of decoding the bytes before
    /// leads to it, and, in an object with a list of functions, from an instruction that sets the number. Between
    /// functions lie the tables of hand-written ciphers, in which every pair of bytes occurs.
    fn is_plausible_between_functions(&self, address: u64) -> bool {
        /// Code that sets six arguments after the number is shorter.
        const BEFORE: usize = 32;
        let Some(before) = self.code_before(address, BEFORE) else { return true };
        let prefixes = before.iter().rev().take_while(|&&byte| is_prefix(byte)).count();
        (0..=prefixes).any(|prefixes| self.leads_to(address, &before[..before.len() - prefixes], prefixes))
    }

    /// Whether some way of decoding `before` ends where so many prefixes of what is at `address` begin.
    fn leads_to(&self, address: u64, before: &[u8], prefixes: usize) -> bool {
        let address = address - prefixes as u64;
        let start = address - before.len() as u64;
        if before.is_empty() {
            return true; // code begins with it: nothing says that it is none
        }
        (0..before.len()).any(|skipped| {
            let mut way = instructions(&before[skipped..], start + skipped as u64);
            let Some(first) = way.next() else { return false };
            let sets = self.functions.is_empty() || sets_number(&first, &before[..skipped]);
            let goes_on = |one: &Instruction| {
                one.code() != Code::INVALID
                    && matches!(one.flow_control(), FlowControl::Next | FlowControl::ConditionalBranch)
            };
            let mut end = first.next_ip();
            sets && goes_on(&first)
                && way.all(|one| {
                    end = one.next_ip();
                    goes_on(&one)
                })
                && end == address
        })
    }

    fn doubt_numbers_that_branches_bypass(&self, sites: &mut [DoubtfulSite]) {
        if sites.iter().all(|site| site.site.number.is_none()) {
            return;
        }
        for (start, end) in self.functions.all() {
            let Some(code) = self.code(start, end) else { continue };
            for instruction in instructions(code, start) {
                match instruction.flow_control() {
                    FlowControl::UnconditionalBranch
                    | FlowControl::ConditionalBranch
                    | FlowControl::Call
                    | FlowControl::XbeginXabortXend => {
                        let target = instruction.near_branch_target();
                        doubt(sites, |site| site.set_at < target && target <= site.address);
                    }
                    // It may lead to any place of its own function.
                    FlowControl::IndirectBranch => doubt(sites, |site| (start..end).contains(&site.address)),
                    _ => {}
                }
            }
        }
    }
}

/// Whether a byte may stand before an instruction and leave it the same: sizes, segments, repetitions, a lock.
fn is_prefix(byte: u8) -> bool {
    matches!(byte, 0x40..=0x4f | 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
}

fn doubt(sites: &mut [DoubtfulSite], is_reached: impl Fn(&DoubtfulSite) -> bool) {
    sites.iter_mut().filter(|site| is_reached(site)).for_each(|site| site.site.number = None);
}

fn instructions(code: &[u8], address: u64) -> impl Iterator<Item = Instruction> {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    std::iter::from_fn(move || decoder.can_decode().then(|| decoder.decode()))
}

/// The value of the register with a call's number, as far as the last instructions show.
struct Number {
    set: Option<(u32, u64)>,
    writes: InstructionInfoFactory,
}

impl Number {
    fn pass(&mut self, instruction: &Instruction) {
        let is_rax = |register: Register| register.full_register() == Register::RAX;
        match instruction.flow_control() {
            FlowControl::Next | FlowControl::ConditionalBranch => {}
            // The called function may change it, and code behind a jump or a return is reached from elsewhere.
            _ => return self.set = None,
        }
        let whole = instruction.op_count() == 2
            && instruction.op0_kind() == OpKind::Register
            && matches!(instruction.op0_register(), Register::EAX | Register::RAX);
        if whole && instruction.mnemonic() == Mnemonic::Mov && is_immediate(instruction.op1_kind()) {
            self.set = u32::try_from(instruction.immediate(1)).ok().map(|number| (number, instruction.ip()));
        } else if whole
            && instruction.mnemonic() == Mnemonic::Xor
            && instruction.op1_kind() == OpKind::Register
            && instruction.op0_register() == instruction.op1_register()
        {
            self.set = Some((0, instruction.ip()));
        } else if self.writes.info(instruction).used_registers().iter().any(|used| {
            is_rax(used.register())
                && !matches!(used.access(), OpAccess::Read | OpAccess::CondRead | OpAccess::None)
        }) {
            self.set = None;
        }
    }
}

/// Whether an instruction, with `before` before it, sets a call's number as compilers do.
fn sets_number(instruction: &Instruction, before: &[u8]) -> bool {
    const NUMBERS: u64 = 1024;
    let into = instruction.op_count() > 0
        && instruction.op0_kind() == OpKind::Register
        && matches!(instruction.op0_register(), Register::EAX | Register::RAX);
    into && match instruction.mnemonic() {
        Mnemonic::Mov if is_immediate(instruction.op1_kind()) => instruction.immediate(1) < NUMBERS,
        Mnemonic::Mov | Mnemonic::Movzx | Mnemonic::Movsxd | Mnemonic::Lea => true,
        Mnemonic::Xor | Mnemonic::Sub => {
            instruction.op1_kind() == OpKind::Register
                && instruction.op0_register() == instruction.op1_register()
        }
        // After a `push` of a number.
        Mnemonic::Pop => {
            before.ends_with(&[0, 0, 0]) || before.len() >= 2 && before[before.len() - 2] == 0x6a
        }
        _ => false,
    }
}

fn is_immediate(kind: OpKind) -> bool {
    matches!(kind, OpKind::Immediate32 | OpKind::Immediate32to64 | OpKind::Immediate64)
}

/// A part of an object that is loaded.
struct LoadedSegment<'a> {
    /// The address at which it is loaded.
    at: u64,
    bytes: &'a [u8],
    is_code: bool,
}

/// The functions in an object's unwind table: the table's header lists them by address, each with its entry, which has
/// its length. An entry in a form that compilers do not use is left out: all pairs of bytes in its function are then
/// taken for system calls.
#[derive(Default)]
struct Functions<'a> {
    /// The loaded address of the table's header, to which its list is relative.
    at: u64,
    /// Start and entry of each function, in eight bytes, by start.
    list: &'a [u8],
    loaded: Vec<LoadedSegment<'a>>,
    /// Whether the entries with this common part have the usual form.
    forms: RefCell<HashMap<u64, bool>>,
}

impl<'a> Functions<'a> {
    const PAIR: usize = 8;

    fn of(frames: Option<(u64, &'a [u8])>, loaded: Vec<LoadedSegment<'a>>) -> Self {
        /// Version 1; the pointer to the entries in any form of four bytes; the count as four bytes; the list as
        /// signed differences of four bytes to the table's start.
        const COUNT_PLAIN: u8 = 0x03;
        const LIST_SORTED: u8 = 0x3b;
        const LIST_AT: usize = 12;
        let known = frames.filter(|(_, table)| {
            table.len() >= LIST_AT && table[0] == 1 && table[2] == COUNT_PLAIN && table[3] == LIST_SORTED
        });
        let (at, list) = known.map_or((0, &[][..]), |(at, table)| {
            let count = word(table, 8).map_or(0, |count| count as u32 as usize);
            let list = &table[LIST_AT..];
            (at, &list[..count.saturating_mul(Self::PAIR).min(list.len() / Self::PAIR * Self::PAIR)])
        });
        Self { at, list, loaded, forms: RefCell::default() }
    }

    fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    fn len(&self) -> usize {
        self.list.len() / Self::PAIR
    }

    fn start(&self, number: usize) -> u64 {
        let start = word(self.list, number * Self::PAIR).expect("the list has whole pairs");
        self.at.wrapping_add_signed(i64::from(start))
    }

    /// `[start, end)` of one of them; `None` if its entry has no usual form.
    fn get(&self, number: usize) -> Option<(u64, u64)> {
        let start = self.start(number);
        let entry = self.at.checked_add_signed(i64::from(word(self.list, number * Self::PAIR + 4)?))?;
        let length = length(start, entry, &self.loaded, &mut self.forms.borrow_mut())?;
        Some((start, start.checked_add(length)?))
    }

    fn all(&self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.len()).filter_map(|number| self.get(number))
    }

    fn around(&self, address: u64) -> Option<(u64, u64)> {
        let (mut before, mut after) = (0, self.len());
        while before < after {
            let middle = before.midpoint(after);
            if self.start(middle) <= address {
                before = middle + 1;
            } else {
                after = middle;
            }
        }
        self.get(before.checked_sub(1)?).filter(|&(_, end)| address < end)
    }
}

fn word(bytes: &[u8], at: usize) -> Option<i32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(i32::from_le_bytes)
}

/// The length of the function whose entry is at `entry`, if the entry says that it starts at `start`.
fn length(
    start: u64,
    entry: u64,
    loaded: &[LoadedSegment<'_>],
    forms: &mut HashMap<u64, bool>,
) -> Option<u64> {
    let word = |at: u64| word(bytes_at(loaded, at)?, 0).map(|word| word as u32);
    let (common_back, begin, length) =
        (word(entry.checked_add(4)?)?, word(entry.checked_add(8)?)?, word(entry.checked_add(12)?)?);
    let common = (entry + 4).checked_sub(u64::from(common_back))?;
    let is_usual = *forms.entry(common).or_insert_with(|| has_usual_form(common, loaded));
    let begins = (entry + 8).checked_add_signed(i64::from(begin as i32))?;
    (is_usual && begins == start).then_some(u64::from(length))
}

/// Whether the entries that share the part at `common` have starts and lengths of four bytes, the starts relative to
/// themselves: its augmentation is `zR` or longer, with the form that compilers use.
fn has_usual_form(common: u64, loaded: &[LoadedSegment<'_>]) -> bool {
    const RELATIVE_WORD: u8 = 0x1b;
    let Some(bytes) = bytes_at(loaded, common) else { return false };
    let Some(name) = bytes.get(9..).and_then(|rest| rest.split(|&byte| byte == 0).next()) else {
        return false;
    };
    // After the name: two numbers and a register, the length of what follows, then a value for each letter.
    let mut at = 9 + name.len() + 1;
    let mut skip_number = || {
        while bytes.get(at).is_some_and(|byte| byte & 0x80 != 0) {
            at += 1;
        }
        at += 1;
    };
    (0..4).for_each(|_| skip_number());
    for letter in name.iter().skip(1) {
        match letter {
            b'R' => return bytes.get(at) == Some(&RELATIVE_WORD),
            b'L' => at += 1,
            b'P' if bytes.get(at).is_some_and(|form| form & 0x0f == 0x0b || form & 0x0f == 0x03) => at += 5,
            b'S' | b'B' => {}
            _ => return false,
        }
    }
    false
}

fn bytes_at<'a>(loaded: &[LoadedSegment<'a>], address: u64) -> Option<&'a [u8]> {
    loaded.iter().find_map(|part| part.bytes.get(usize::try_from(address.checked_sub(part.at)?).ok()?..))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pairs_are_where_a_plain_search_finds_them(
            bytes in prop::collection::vec(prop::sample::select(vec![0x0f, 0x05, 0x34, 0xcd, 0x80, 0x90]), 0..700),
            quiet in 0..600usize,
        ) {
            let bytes = [vec![0x90; quiet], bytes].concat();
            let naive = bytes.windows(2).enumerate().filter(|(_, pair)| {
                matches!(pair, [0x0f, 0x05 | 0x34] | [0xcd, 0x80])
            });
            prop_assert_eq!(pairs(&bytes).collect::<Vec<_>>(), naive.map(|(at, _)| at).collect::<Vec<_>>());
        }
    }

    /// 1. An object's code begins with a system call, or with prefixes of one.
    /// 2. No code stands before it, so none is found that leads to it.
    /// 3. It is taken for data, and the object for clean.
    #[test]
    fn code_that_begins_with_a_call_has_one() {
        for code in [&[0x0f, 0x05, 0xc3][..], &[0x48, 0x0f, 0x05, 0xc3]] {
            let at = code.len() as u64 - 3;
            let object = Code64 { segments: vec![(0x1000, code)], functions: Functions::default() };
            assert_eq!(object.site_at(0x1000 + at).map(|found| found.site.number), Some(None), "{code:x?}");
        }
    }

    #[test]
    fn every_harmless_call_has_a_name() {
        let unnamed = harmless_syscalls::HARMLESS
            .iter()
            .filter(|number| NAMES.iter().all(|(known, _)| known != *number));
        assert_eq!(unnamed.count(), 0);
    }
}
