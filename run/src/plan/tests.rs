//! Tests of plans: made-up instructions are moved one by one. Then this machine's whole C library is planned for, as it
//! is and with some of its bytes changed.
//!
//! `tests/patched.rs` and `tests/rules.rs` run the plans.

use super::*;
use crate::PRELOAD;

fn object() -> Elf {
    Elf::parse(PRELOAD.to_vec()).unwrap()
}

fn library() -> Elf {
    let us = Elf::open(&std::env::current_exe().unwrap()).unwrap();
    let linker = us.interpreter().unwrap();
    Elf::open(&library_of(Path::new(&linker)).unwrap()).unwrap()
}

/// The bytes that were taken, their moved form, and each fix: where, up to where, and to what.
type Moved = (usize, Vec<u8>, Vec<(u8, u8, u32)>);

fn move_bytes(code: &[u8]) -> Result<Moved, PatchRefused> {
    let mut moving = Moving { bytes: Vec::new(), fixes: Vec::new() };
    let taken = move_instructions(code, 0x1000, 0, &mut moving)?;
    Ok((taken, moving.bytes, moving.fixes.iter().map(|fix| (fix.at, fix.end, fix.target)).collect()))
}

#[test]
fn straight_instructions_are_copied_and_jumped_back_from() {
    // push %rbp; mov %rsp, %rbp; sub $16, %rsp; and more
    let code = [0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x10, 0x90];
    let (taken, bytes, fixes) = move_bytes(&code).unwrap();
    assert_eq!(taken, 8);
    assert_eq!(bytes, [0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x10, 0xe9, 0, 0, 0, 0]);
    assert_eq!(fixes, [(9, 13, 0x1008)]);
}

#[test]
fn an_operand_relative_to_its_instruction_is_fixed() {
    // cmpb $0, 0x10(%rip): the distance is not at the end of the instruction
    let (taken, bytes, fixes) = move_bytes(&[0x80, 0x3d, 0x10, 0, 0, 0, 0, 0xc3]).unwrap();
    assert_eq!((taken, bytes.len()), (7, 12));
    assert_eq!(fixes, [(2, 7, 0x1017), (8, 12, 0x1007)]);
}

#[test]
fn short_jumps_become_long_ones() {
    // xor %eax, %eax; jne +4; mov $5, %eax
    let (taken, bytes, fixes) = move_bytes(&[0x31, 0xc0, 0x75, 4, 0xb8, 5, 0, 0, 0]).unwrap();
    assert_eq!(taken, 9);
    assert_eq!(bytes[2..8], [0x0f, 0x85, 0, 0, 0, 0]);
    assert_eq!(fixes, [(4, 8, 0x1008), (14, 18, 0x1009)]);
    // xor %r9d, %r9d; jmp -32: nothing follows it
    let (taken, bytes, fixes) = move_bytes(&[0x45, 0x31, 0xc9, 0xeb, 0xe0]).unwrap();
    assert_eq!((taken, bytes.len()), (5, 8));
    assert_eq!(fixes, [(4, 8, 0x1000 + 5 - 32)]);
    // ja, with four bytes of distance
    let (_, bytes, fixes) = move_bytes(&[0x0f, 0x87, 0, 1, 0, 0]).unwrap();
    assert_eq!((&bytes[..2], fixes[0]), (&[0x0f, 0x87][..], (2, 6, 0x1106)));
}

#[test]
fn instructions_that_cannot_be_moved_are_not_patched() {
    for (what, code, why) in [
        ("a call", &[0xe8, 0, 0, 0, 0, 0xc3][..], PatchRefused::Unmovable),
        ("a call through a register", &[0xff, 0xd0, 0x90, 0x90, 0x90], PatchRefused::Unmovable),
        ("a jump through a register", &[0xff, 0xe0, 0x90, 0x90, 0x90], PatchRefused::Unmovable),
        ("a jump through memory", &[0xff, 0x25, 0, 0, 0, 0], PatchRefused::Unmovable),
        ("a loop", &[0xe2, 0xfe, 0x90, 0x90, 0x90], PatchRefused::Unmovable),
        ("a trap", &[0xcc, 0x90, 0x90, 0x90, 0x90], PatchRefused::Unmovable),
        ("no instruction", &[0x06, 0x90, 0x90, 0x90, 0x90], PatchRefused::Unmovable),
        ("an early end", &[0x31, 0xc0, 0xc3, 0x90, 0x90, 0x90], PatchRefused::Short),
        ("an early jump", &[0xeb, 0x10, 0x90, 0x90, 0x90, 0x90], PatchRefused::Short),
        ("too few bytes", &[0x31, 0xc0, 0x90], PatchRefused::Short),
    ] {
        assert_eq!(move_bytes(code).map(drop), Err(why), "{what}");
    }
}

#[test]
fn branches_into_the_replaced_bytes_are_seen() {
    // nop; nop (2..); ...; jmp back to 0x1002
    let code = [0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0xeb, 0xfa];
    assert!(branches_into(&code, 0x1000, &(0x1001..0x1006)));
    assert!(!branches_into(&code, 0x1000, &(0x1003..0x1006)));
    assert!(!branches_into(&code, 0x1000, &(0x1001..0x1002)));
}

/// Every function that must be patched is, every other wrapped one of the library too or with a reason, and
/// moved bytes decode to as many instructions as the original ones with at most a jump more.
#[test]
fn this_machines_library_can_be_planned_for() {
    let (library, object) = (library(), object());
    let plan = Plan::make(&library, &object).unwrap();
    assert!(plan.left.is_empty(), "{:?}", plan.left);
    // An old name that is no longer linked against stands for the function of another, which is planned for.
    let is_offered = |symbol: &&Symbol| symbol.is_defined && symbol.is_default;
    let offered: BTreeSet<_> = library.symbols().iter().filter(is_offered).map(|s| s.name).collect();
    let wrapped: Vec<_> = object.symbols().iter().filter(|s| s.is_defined).map(|s| s.name).collect();
    for name in wrapped {
        let is_planned = plan.functions.iter().any(|planned| planned == name);
        assert_eq!(is_planned, offered.contains(name) && !COMPOSED.contains(&name), "{name}");
    }
    for entry in &plan.entries {
        let original = instructions(&entry.original[..entry.original_len.into()], entry.offset);
        let moved = instructions(&entry.moved[..entry.moved_len.into()], 0);
        assert!(moved.len() - original.len() <= 1, "{entry:?}");
        for (before, after) in original.iter().zip(&moved) {
            assert_eq!(before.mnemonic(), after.mnemonic(), "{entry:?}");
            assert_eq!(before.op_count(), after.op_count(), "{entry:?}");
        }
    }
    let bytes = plan.bytes();
    assert!(bytes.len().is_multiple_of(4096) && bytes.starts_with(&MAGIC));
}

fn instructions(code: &[u8], offset: u32) -> Vec<Instruction> {
    decoder(code, offset.into()).iter().collect()
}

fn changed(name: &str, with: &[u8]) -> Elf {
    let us = Elf::open(&std::env::current_exe().unwrap()).unwrap();
    let path = library_of(Path::new(&us.interpreter().unwrap())).unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    let library = library();
    let address = library.symbols().iter().find(|s| s.name == name && s.is_defined).unwrap().address;
    let segment = library.segments().iter().find(|s| s.is_code).unwrap();
    let at = segment.range.start + (address - segment.address) as usize;
    bytes[at..at + with.len()].copy_from_slice(with);
    Elf::parse(bytes).unwrap()
}

#[test]
fn an_unpatchable_function_is_left_alone_and_an_essential_one_forbids_all() {
    let call = [0xe8, 0, 0, 0, 0];
    let plan = Plan::make(&changed("readahead", &call), &object()).unwrap();
    assert_eq!(plan.left, [UnpatchedFunction { name: "readahead".into(), why: PatchRefused::Unmovable }]);
    assert!(!plan.functions.iter().any(|name| name == "readahead"));
    let left = UnpatchedFunction { name: "__read".into(), why: PatchRefused::Unmovable };
    assert_eq!(Plan::make(&changed("read", &call), &object()), Err(NoPlan::Essential(left)));
}

#[test]
fn a_far_jump_between_the_first_bytes_of_a_function_is_seen() {
    let library = library();
    let address = |name: &str| {
        library.symbols().iter().find(|s| s.name == name && s.is_defined).expect("it is there").address
    };
    // From another function's second instruction to the middle of readahead's first.
    let from = address("flock");
    let distance = (address("readahead") + 2).wrapping_sub(from + 11) as u32;
    let mut code = vec![0xb8, 73, 0, 0, 0, 0xe9];
    code.extend(distance.to_le_bytes());
    let plan = Plan::make(&changed("flock", &code), &object()).unwrap();
    assert_eq!(plan.left, [UnpatchedFunction { name: "readahead".into(), why: PatchRefused::JumpedInto }]);
}
