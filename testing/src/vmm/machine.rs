//! Machine: a guest of a few instructions under KVM, by the kernel's own calls.
//!
//! ```text
//!   guest memory   0 .. end of the image, at the address of its offset
//!   page 1         the program: 32-bit, flat, no paging, no interrupts; part of the snapshot, so it is faulted in too
//!   registers      what it is to do, set from outside, as a monitor sets those of a snapshot
//!   port 16        its answer
//! ```
//!
//! It can sum words of each line of a range of pages, in a way that depends on their order; and write eight bytes to
//! the head of each page of one.

#![allow(unsafe_code, reason = "system calls, and what the kernel shares")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::PAGE;
use super::kernel::checked;
use super::memory::{Of, guest_sum, map};

/// esi: address; ecx: pages; edi: 0 to sum, else to write ebp:ebx.
pub const PROGRAM: [u8; 49] = [
    0x85, 0xff, //                          test edi, edi
    0x75, 0x1b, //                          jnz  write
    0xc1, 0xe1, 0x06, //                    shl  ecx, 6         lines of 64 bytes
    0x31, 0xc0, //                          xor  eax, eax
    0xd1, 0xc0, //                    next: rol  eax, 1
    0x03, 0x06, //                          add  eax, [esi]
    0x03, 0x46, 0x18, //                    add  eax, [esi + 24]
    0x83, 0xc6, 0x40, //                    add  esi, 64
    0x49, //                                dec  ecx
    0x75, 0xf3, //                          jnz  next
    0xba, 0x10, 0x00, 0x00, 0x00, //  tell: mov  edx, 16
    0xef, //                                out  dx, eax
    0xf4, //                                hlt
    0xeb, 0xfd, //                          jmp  to the hlt
    0x89, 0x1e, //                   write: mov  [esi], ebx
    0x89, 0x6e, 0x04, //                    mov  [esi + 4], ebp
    0x81, 0xc6, 0x00, 0x10, 0x00, 0x00, //  add  esi, 4096
    0x49, //                                dec  ecx
    0x75, 0xf2, //                          jnz  write
    0x31, 0xc0, //                          xor  eax, eax
    0xeb, 0xe5, //                          jmp  tell
];

const CREATE_VM: libc::c_ulong = 0xae01;
const GET_RUN_BYTES: libc::c_ulong = 0xae04;
const CREATE_CPU: libc::c_ulong = 0xae41;
const SET_MEMORY: libc::c_ulong = 0x4020_ae46;
const RUN: libc::c_ulong = 0xae80;
const SET_REGISTERS: libc::c_ulong = 0x4090_ae82;
const GET_SPECIAL: libc::c_ulong = 0x8138_ae83;
const SET_SPECIAL: libc::c_ulong = 0x4138_ae84;
const SET_TASK_ADDRESS: libc::c_ulong = 0xae47;

const EXIT_IO: u32 = 2;
const EXIT_HALT: u32 = 5;

/// A guest's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    Sum { first: u64, pages: u64 },
    Write { first: u64, pages: u64, value: u64 },
}

/// Checks that KVM runs a guest in ordinary memory.
pub fn check() -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("the guest's program is for x86-64".into());
    }
    let image = super::Image::new(1, 4);
    let address = map(&Of::Anonymous, 0, image.bytes()).map_err(|error| error.to_string())?;
    for page in 0..image.pages {
        let bytes = image.page(page);
        // SAFETY: a page of this machine's mapping.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                (address as *mut u8).add(page as usize * PAGE),
                PAGE,
            )
        };
    }
    let machine = Machine::new(&[(0, address, image.bytes())]).map_err(|error| format!("/dev/kvm: {error}"));
    let answer = machine.and_then(|machine| machine.run(Work::Sum { first: 0, pages: image.pages }));
    // SAFETY: the machine is gone, and nothing else refers to it.
    unsafe { libc::munmap(address as *mut _, image.bytes() as usize) };
    let expected = (0..image.pages).fold(0, |so_far, page| guest_sum(so_far, &image.page(page)));
    assert_eq!(answer.clone().unwrap_or(expected), expected, "a guest that runs, runs right");
    answer.map(drop)
}

/// A range of guest memory: the guest's address, this process's address, bytes.
pub type Slot = (u64, u64, u64);

/// A machine with one processor.
pub struct Machine {
    _kvm: File,
    _machine: OwnedFd,
    cpu: OwnedFd,
    run: *mut u8,
    run_bytes: usize,
}

impl Machine {
    pub fn new(slots: &[Slot]) -> io::Result<Self> {
        let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm")?;
        let machine = make(&kvm, CREATE_VM, 0)?;
        // Some processors want a place for a structure of their own; the others refuse to be told.
        let _ = make_nothing(&machine, SET_TASK_ADDRESS, 0xfffb_d000);
        for (number, (guest, host, bytes)) in slots.iter().enumerate() {
            let words = [number as u64, *guest, *bytes, *host];
            make_nothing(&machine, SET_MEMORY, words.as_ptr() as u64)?;
        }
        let cpu = make(&machine, CREATE_CPU, 0)?;
        // SAFETY: the request takes no argument.
        let run_bytes = checked(unsafe { libc::ioctl(kvm.as_raw_fd(), GET_RUN_BYTES, 0) })? as usize;
        // SAFETY: a mapping of the kernel's choice of place, which ends with the machine.
        let run = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), run_bytes, protection, libc::MAP_SHARED, cpu.as_raw_fd(), 0)
        };
        if run == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let this = Self { _kvm: kvm, _machine: machine, cpu, run: run.cast(), run_bytes };
        this.make_flat()?;
        Ok(this)
    }

    /// Protected mode with segments that are all of memory.
    fn make_flat(&self) -> io::Result<()> {
        // cs ds es fs gs ss: 24 bytes each; then tr, ldt, two tables of 16 bytes, and cr0.
        let mut special = [0u8; 312];
        make_nothing(&self.cpu, GET_SPECIAL, special.as_mut_ptr() as u64)?;
        for segment in 0..6 {
            let at = segment * 24;
            let is_code = segment == 0;
            special[at..at + 8].fill(0);
            special[at + 8..at + 12].fill(0xff);
            let selector: u16 = if is_code { 8 } else { 16 };
            special[at + 12..at + 14].copy_from_slice(&selector.to_le_bytes());
            // type, present, dpl, db, s, l, g, avl
            let kind = if is_code { 11 } else { 3 };
            special[at + 14..at + 22].copy_from_slice(&[kind, 1, 0, 1, 1, 0, 1, 0]);
        }
        let cr0 = 24 * 8 + 16 * 2;
        special[cr0] |= 1;
        make_nothing(&self.cpu, SET_SPECIAL, special.as_ptr() as u64)
    }

    /// Runs the guest to its end, and returns its answer.
    pub fn run(&self, work: Work) -> Result<u32, String> {
        self.set_registers(work).map_err(|error| format!("the guest's registers: {error}"))?;
        let mut answer = None;
        loop {
            if let Err(error) = make_nothing(&self.cpu, RUN, 0) {
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return Err(format!("the guest stopped: {error}"));
            }
            match self.word(8) {
                EXIT_IO => {
                    let data = u64::from(self.word(40)) | u64::from(self.word(44)) << 32;
                    answer = Some(self.word(data as usize));
                }
                EXIT_HALT => return answer.ok_or_else(|| "the guest halted and said nothing".to_owned()),
                reason => return Err(format!("the guest left for reason {reason}")),
            }
        }
    }

    fn set_registers(&self, work: Work) -> io::Result<()> {
        // rax rbx rcx rdx rsi rdi rsp rbp r8..r15 rip rflags
        let mut registers = [0u64; 18];
        let (first, pages) = match work {
            Work::Sum { first, pages } => (first, pages),
            Work::Write { first, pages, value } => {
                registers[1] = value & 0xffff_ffff;
                registers[7] = value >> 32;
                registers[5] = 1;
                (first, pages)
            }
        };
        registers[2] = pages;
        registers[4] = first * PAGE as u64;
        registers[16] = super::PROGRAM_PAGE * PAGE as u64;
        registers[17] = 2;
        make_nothing(&self.cpu, SET_REGISTERS, registers.as_ptr() as u64)
    }

    fn word(&self, at: usize) -> u32 {
        assert!(at + 4 <= self.run_bytes, "the kernel points outside of what it shares");
        // SAFETY: inside the mapping, which lives as long as `self`; no other thread runs this processor.
        unsafe { self.run.add(at).cast::<u32>().read_unaligned() }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // SAFETY: it was mapped so, and there is no reference into it.
        unsafe { libc::munmap(self.run.cast(), self.run_bytes) };
    }
}

fn make(on: &impl AsRawFd, request: libc::c_ulong, argument: u64) -> io::Result<OwnedFd> {
    // SAFETY: the request takes a number, and answers with a descriptor.
    let made = checked(unsafe { libc::ioctl(on.as_raw_fd(), request, argument) })?;
    // SAFETY: the kernel has just given it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

fn make_nothing(on: &impl AsRawFd, request: libc::c_ulong, argument: u64) -> io::Result<()> {
    // SAFETY: the argument is a number, or the address of a structure of the size that the request names.
    checked(unsafe { libc::ioctl(on.as_raw_fd(), request, argument) }).map(drop)
}
