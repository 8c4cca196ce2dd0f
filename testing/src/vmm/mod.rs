//! Vmm: the other side of a page-fault server: a process that plays a machine monitor, whose memory is a snapshot's.
//!
//! ```text
//!   the test                      itself again, as a machine monitor            a page-fault server
//!     |--- begin ----------------> maps memory, has its faults told,
//!     |                            sends regions and descriptor --------------> serves
//!     |--- touch 0 512 4 --------> 4 threads read 512 pages  ~~~ faults ~~~~~~> copies
//!     |<-- done, or what is wrong- compares each with what it has to be
//! ```
//!
//! The monitor is a process of its own, so that it can die at any moment and its death be seen. It speaks the protocol
//! as Firecracker does: anonymous memory, MISSING faults, one message with the regions as JSON and the descriptor
//! beside it, and then silence. The bytes of each page of an [`Image`] follow from its number, so no copy of it is
//! needed. The monitor keeps a model of its memory: a page is the snapshot's until the balloon took it, then zeros; and
//! either with eight bytes over it that the monitor wrote. So every command that reads also checks.
//!
//! ```text
//!   kernel.rs       userfaultfd and descriptors over sockets, written anew, to validate the server's
//!   memory.rs       the monitor's memory and its model
//!   monitor.rs      the process: commands in, answers out; and the test's handle of it
//!   machine.rs      a guest of a few instructions under KVM, in the monitor
//!   firecracker.rs  a real monitor, if the environment names one
//!   hung.rs         a file system whose files cannot be closed
//!   naive.rs        a page-fault server of a few lines, page by page; and ways in which one may be wrong
//! ```
//!
//! Where the system has no userfaultfd, or no KVM, or forbids them, a test prints one line that begins with `SKIPPED`
//! and ends. `QUINION_TEST_WITHOUT=userfaultfd,kvm` has the same effect on any system.

use std::fs;
use std::io::Write;
use std::path::Path;

pub mod firecracker;
pub mod hung;
pub mod kernel;
pub mod machine;
pub mod memory;
pub mod monitor;
pub mod naive;

pub use monitor::{Backing, Monitor, Plan};

use crate::content::fill_content;

pub const PAGE: usize = 4096;
/// The page of an image in which a guest's program is.
pub const PROGRAM_PAGE: u64 = 1;

/// A snapshot, or a guest's memory as it should be: the bytes of each page follow from these numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Image {
    /// Images of different numbers have no page in common, but zeros.
    pub number: u32,
    pub pages: u64,
    /// The version of the image.
    pub generation: u32,
    /// The last of so many pages is zeros; 0 for none.
    pub zero_every: u64,
}

impl Image {
    pub fn new(number: u32, pages: u64) -> Self {
        Self { number, pages, generation: 1, zero_every: 7 }
    }

    pub fn bytes(&self) -> u64 {
        self.pages * PAGE as u64
    }

    pub fn is_zero(&self, page: u64) -> bool {
        self.zero_every != 0 && page % self.zero_every == self.zero_every - 1
    }

    /// The bytes of page `page`.
    pub fn page(&self, page: u64) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        if !self.is_zero(page) {
            fill_content(&mut bytes, self.number, page * PAGE as u64, self.generation);
        }
        if page == PROGRAM_PAGE {
            bytes[..machine::PROGRAM.len()].copy_from_slice(&machine::PROGRAM);
        }
        bytes
    }

    /// Writes all of it to the file that a server gets.
    pub fn write(&self, path: &Path) {
        let mut file = std::io::BufWriter::new(fs::File::create(path).expect("room for a snapshot"));
        for page in 0..self.pages {
            file.write_all(&self.page(page)).expect("room for a snapshot");
        }
        file.into_inner().expect("room for a snapshot").sync_all().expect("a snapshot on its disk");
    }
}

/// Evicts `len` bytes of a file from the kernel's page cache, or all from `at` on.
pub fn evict(file: &Path, at: u64, len: Option<u64>) {
    let file = fs::File::open(file).expect("it is there");
    file.sync_all().expect("it is on its disk");
    let len = len.and_then(std::num::NonZeroU64::new);
    rustix::fs::fadvise(&file, at, len, rustix::fs::Advice::DontNeed).expect("the kernel takes the advice");
}

/// Prints that a test was skipped, in a line that the harness does not capture.
pub fn skipped(test: &str, why: &str) {
    let line = format!("SKIPPED: {test}: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("a server listens");
}

/// Whether the system has what a test needs; prints why if not.
pub fn has(test: &str, needs: &[Need]) -> bool {
    for need in needs {
        if let Err(why) = need.check() {
            skipped(test, &why);
            return false;
        }
    }
    true
}

/// A feature that not every system has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// Faults told to another process, with so many features (`UFFD_FEATURE_*`).
    Userfault(u64),
    Kvm,
}

impl Need {
    /// Returns why the system lacks it, if it does.
    pub fn check(self) -> Result<(), String> {
        let (name, there) = match self {
            Self::Userfault(features) => {
                ("userfaultfd", kernel::Userfault::open(features).map(drop).map_err(|e| e.to_string()))
            }
            Self::Kvm => ("kvm", machine::check()),
        };
        let without = std::env::var("QUINION_TEST_WITHOUT").unwrap_or_default();
        if without.split(',').any(|word| word == name) {
            return Err(format!("{name} is switched off by QUINION_TEST_WITHOUT"));
        }
        there.map_err(|why| format!("{name} is not to be had here: {why}"))
    }
}
