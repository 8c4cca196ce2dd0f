//! Takeover: the messages by which a running server hands its VMs to its successor, and whether they can be so.
//!
//! ```text
//!   successor -> running   TakeoverRequest      which snapshot it has open, how many VMs it takes
//!   running -> successor   TakeoverOffer        how many VMs there are; and DOOR_DESCRIPTORS descriptors
//!                          bytes                the record that is being made, if there is one
//!                          then, for each VM:
//!                          VmHead               its process; its connection, its process descriptor, its userfaultfds
//!                          bytes                its regions, and the state of each page
//!   successor -> running   TakeoverAnswer::Taken
//!
//!   either, at any time    TakeoverAnswer::Refused, and the end
//! ```
//!
//! Each is a packet of [`PACKET_BYTES`] at most (`SOCK_SEQPACKET`), so descriptors belong to the packet that they came
//! with. Bytes come in as many packets as they need. The words are JSON, and each has the version: a server refuses the
//! words of another version. Numbers of the pages' states are little-endian words of 64 bits:
//!
//! ```text
//!   for each space   unit | regions | then each region: base | offset | pages | states, two bits a page, 32 in a word
//! ```
//!
//! The peer is a process of the same user. It is read as if it were hostile all the same: an error here is a VM that
//! reads wrong bytes. Pure.
//!
//! Invariant: pages that were read lie in the image, their regions do not overlap, and each has a state that there is.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::fault_record::ImageIdentity;
use super::message::UNITS;
use super::pages::{PIECES_MAX, Pages, RegionStates};
use super::snapshot::FileIdentity;

/// The version of these messages and of what follows from them.
pub const VERSION: u64 = 1;
/// The longest packet.
pub const PACKET_BYTES: usize = 64 << 10;
/// Descriptors of an offer: the socket of VMMs and that of successors, the running server's process, and the event by
/// which it says that it goes on serving.
pub const LISTENER_DESCRIPTORS: usize = 4;
/// A VM's address spaces at most.
pub const SPACES_MAX: usize = 8;
/// Descriptors of a VM at most: its connection, its process, its spaces.
pub const VM_DESCRIPTORS_MAX: usize = 2 + SPACES_MAX;
/// Pages whose states are in a word.
const IN_WORD: u64 = 32;
const WORD: usize = 8;
/// The bits of a word that are the lower ones of a page's two.
const LOWER_BITS: u64 = u64::MAX / 3;
/// The longest record and the longest states of a VM, whatever the image: more is no memory that there is.
const BYTES_MAX: u64 = 1 << 40;

/// The request of a successor.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TakeoverRequest {
    quinion_takeover: u64,
    image_bytes: u64,
    fingerprint: u64,
    /// The files that its snapshot is read from.
    files: Vec<FileIdentity>,
    /// How many VMs it serves at most.
    pub vms_max: u64,
}

/// The answer of the running server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TakeoverOffer {
    quinion_takeover: u64,
    /// How many VMs follow.
    pub vms: u64,
    /// The number of the socket's file, and of that for successors.
    pub inodes: [u64; 2],
    /// Bytes of the record that follows; 0 if there is none.
    pub record_bytes: u64,
}

/// A VM whose states follow.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmHead {
    quinion_takeover: u64,
    /// The number of its process, 0 if that is not known.
    pub process: u32,
    /// Whether a descriptor of its process came, behind that of its connection.
    pub has_process: bool,
    /// How many userfaultfds came, behind these.
    pub spaces: usize,
    /// Bytes that follow.
    pub bytes: u64,
}

/// How a takeover ends.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TakeoverAnswer {
    /// The successor has all, and all is its own.
    Taken,
    /// The successor serves the VMs.
    Serving,
    /// The other side does not go on, and why.
    Refused(String),
}

#[derive(Serialize, Deserialize)]
struct Versioned {
    quinion_takeover: u64,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    quinion_takeover: u64,
    answer: TakeoverAnswer,
}

/// Why a takeover does not take place.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each is said by its message")]
#[non_exhaustive]
pub enum TakeoverError {
    #[error("the other server's message cannot be read: {0}; use servers of one version")]
    BadMessage(String),
    #[error(
        "the other server hands VMs over by version {0}, and this one by version {VERSION}; use servers of one \
         version, or end the running one"
    )]
    Version(u64),
    #[error("the other server refuses: {0}")]
    Refused(String),
    #[error("the other server belongs to user {0}, and this one to user {1}; run both as one user")]
    OtherUser(u32, u32),
    #[error(
        "the running server serves another snapshot than this one, or another version of it; name the very same \
         file, and its diffs in the same order"
    )]
    OtherSnapshot,
    #[error(
        "the snapshot is no file of this machine, so it cannot be compared with the other server's; end the \
         running server"
    )]
    NoFiles,
    #[error("the running server has {vms} VMs, and this one takes {vms_max}; raise the most that are served")]
    TooManyVms { vms: u64, vms_max: u64 },
    #[error(
        "a VM has mapped the running server's memory (`--minor`), which ends with that server; it goes on until \
         that VM has ended: try again then"
    )]
    MappedVm,
    #[error("a VM or a peer was busy for too long; the running server goes on: try again")]
    Busy,
    #[error("the other server was asked, and did not answer in time; try again, or end it")]
    Late,
    #[error("the other server was asked, and has ended or hung up; start this one again")]
    HungUp,
    #[error("the VMs of this server were asked for, and it ends; start the new server again")]
    Ending,
    #[error("the other server was asked, and the connection failed: {0}; start this one again")]
    Socket(#[source] std::io::Error),
    #[error(
        "the running server ended in the middle of it: {taken} of its {vms} VMs are served by this one; end the \
         others, which nothing serves"
    )]
    Incomplete { taken: u64, vms: u64 },
}

fn bad(why: impl std::fmt::Display) -> TakeoverError {
    TakeoverError::BadMessage(why.to_string())
}

fn text(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("numbers and words")
}

/// A message of this version; a refusal is an error.
fn read<T: DeserializeOwned>(packet: &[u8]) -> Result<T, TakeoverError> {
    let Versioned { quinion_takeover } = serde_json::from_slice(packet).map_err(bad)?;
    if quinion_takeover != VERSION {
        return Err(TakeoverError::Version(quinion_takeover));
    }
    if let Ok(Answer { answer: TakeoverAnswer::Refused(why), .. }) = serde_json::from_slice(packet) {
        return Err(TakeoverError::Refused(why.chars().take(1000).collect()));
    }
    serde_json::from_slice(packet).map_err(bad)
}

impl TakeoverRequest {
    pub fn new(image: ImageIdentity, files: Vec<FileIdentity>, vms_max: u64) -> Self {
        let ImageIdentity { bytes: image_bytes, fingerprint } = image;
        Self { quinion_takeover: VERSION, image_bytes, fingerprint, files, vms_max }
    }

    pub fn packet(&self) -> Vec<u8> {
        text(self)
    }

    /// # Errors
    /// It is none, or of another version.
    pub fn parse(packet: &[u8]) -> Result<Self, TakeoverError> {
        read(packet)
    }

    /// Whether it is of this image, read from the same files in the same versions.
    pub fn is_of(&self, image: ImageIdentity, files: &[FileIdentity]) -> bool {
        (self.image_bytes, self.fingerprint) == (image.bytes, image.fingerprint) && self.files == files
    }
}

impl TakeoverOffer {
    pub fn new(vms: u64, inodes: [u64; 2], record_bytes: u64) -> Self {
        Self { quinion_takeover: VERSION, vms, inodes, record_bytes }
    }

    pub fn packet(&self) -> Vec<u8> {
        text(self)
    }

    /// # Errors
    /// It is none, or of another version, or a refusal; another number of descriptors came than it has; or there are
    /// more VMs than `vms_max`.
    pub fn parse(packet: &[u8], descriptors: usize, vms_max: u64) -> Result<Self, TakeoverError> {
        let offer: Self = read(packet)?;
        if descriptors != LISTENER_DESCRIPTORS {
            return Err(bad(format_args!(
                "{descriptors} descriptors with an offer, which has {LISTENER_DESCRIPTORS}"
            )));
        }
        let vms = offer.vms;
        if vms > vms_max {
            return Err(TakeoverError::TooManyVms { vms, vms_max });
        }
        if offer.record_bytes > BYTES_MAX {
            return Err(bad(format_args!("a record of {} bytes", offer.record_bytes)));
        }
        Ok(offer)
    }
}

impl VmHead {
    pub fn new(process: u32, has_process: bool, spaces: usize, bytes: u64) -> Self {
        Self { quinion_takeover: VERSION, process, has_process, spaces, bytes }
    }

    pub fn packet(&self) -> Vec<u8> {
        text(self)
    }

    /// # Errors
    /// It is none, or a refusal; another number of descriptors came than it has; or its states would be longer than
    /// those of a VM of `image_bytes` can be.
    pub fn parse(packet: &[u8], descriptors: usize, image_bytes: u64) -> Result<Self, TakeoverError> {
        let head: Self = read(packet)?;
        let Self { has_process, spaces, bytes, .. } = head;
        if !(1..=SPACES_MAX).contains(&spaces) {
            return Err(bad(format_args!("{spaces} spaces of a VM, which has 1 to {SPACES_MAX}")));
        }
        let expected = 1 + usize::from(has_process) + spaces;
        if descriptors != expected {
            return Err(bad(format_args!("{descriptors} descriptors with a VM that has {expected}")));
        }
        let each = 2 + PIECES_MAX as u64 * 4 + image_bytes / UNITS[0] / IN_WORD;
        if bytes > spaces as u64 * each * WORD as u64 || bytes > BYTES_MAX {
            return Err(bad(format_args!("{bytes} bytes of states of an image of {image_bytes}")));
        }
        Ok(head)
    }
}

impl TakeoverAnswer {
    pub fn packet(self) -> Vec<u8> {
        text(&Answer { quinion_takeover: VERSION, answer: self })
    }

    /// Checks that the successor says that it has taken all.
    ///
    /// # Errors
    /// The packet is no answer, or of another version, or a refusal.
    pub fn parse(packet: &[u8]) -> Result<(), TakeoverError> {
        match read::<Answer>(packet)?.answer {
            TakeoverAnswer::Taken => Ok(()),
            _ => Err(bad("an answer that is out of turn")),
        }
    }

    /// Whether it says that all are served.
    pub fn is_serving(packet: &[u8]) -> bool {
        matches!(read::<Answer>(packet), Ok(Answer { answer: TakeoverAnswer::Serving, .. }))
    }
}

/// The states of a VM's spaces, as bytes.
pub fn states_bytes<'a>(spaces: impl Iterator<Item = &'a Pages>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut add = |word: u64| bytes.extend_from_slice(&word.to_le_bytes());
    for pages in spaces {
        add(pages.unit());
        add(pages.states().count() as u64);
        for RegionStates { base, offset, pages, words } in pages.states() {
            [base, offset, pages].into_iter().chain(words).for_each(&mut add);
        }
    }
    bytes
}

/// Words that have not been read yet.
struct WordReader<'a>(&'a [u8]);

impl WordReader<'_> {
    fn next(&mut self) -> Result<u64, TakeoverError> {
        let (word, rest) = self.0.split_first_chunk().ok_or_else(|| bad("states that are cut"))?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*word))
    }

    /// Reads `count` words; no room is made for more than there are.
    fn take(&mut self, count: u64) -> Result<Vec<u64>, TakeoverError> {
        if count > (self.0.len() / WORD) as u64 {
            return Err(bad("states that are cut"));
        }
        (0..count).map(|_| self.next()).collect()
    }
}

/// The pages of `spaces` spaces of a VM of an image of `image_bytes` bytes.
///
/// # Errors
/// The states are malformed.
pub fn parse_states(bytes: &[u8], spaces: usize, image_bytes: u64) -> Result<Vec<Pages>, TakeoverError> {
    let mut words = WordReader(bytes);
    let mut found: Vec<Pages> = Vec::new();
    for _ in 0..spaces {
        let pages = parse_space(&mut words, image_bytes)?;
        if found.first().is_some_and(|first| first.unit() != pages.unit()) {
            return Err(bad("spaces of one VM with pages of different sizes"));
        }
        found.push(pages);
    }
    if words.0.is_empty() { Ok(found) } else { Err(bad("something behind the states")) }
}

fn parse_space(words: &mut WordReader<'_>, image_bytes: u64) -> Result<Pages, TakeoverError> {
    let (unit, count) = (words.next()?, words.next()?);
    if !UNITS.contains(&unit) {
        return Err(bad(format_args!("pages of {unit} bytes")));
    }
    if count > PIECES_MAX as u64 {
        return Err(bad(format_args!("{count} regions")));
    }
    let (mut regions, mut end, mut bytes) = (Vec::new(), 0, 0_u64);
    for _ in 0..count {
        let region = parse_region(words, unit, image_bytes)?;
        if region.base < end {
            return Err(bad("regions that overlap, or are not in the order of their addresses"));
        }
        // No sum here overflows: the region lies in the image, and ends before the last address.
        let len = region.pages * unit;
        (end, bytes) = (region.base + len, bytes + len);
        if bytes > image_bytes {
            return Err(bad("more memory than the image has"));
        }
        regions.push(region);
    }
    Ok(Pages::of_states(unit, regions))
}

fn parse_region(
    words: &mut WordReader<'_>,
    unit: u64,
    image_bytes: u64,
) -> Result<RegionStates, TakeoverError> {
    let (base, offset, pages) = (words.next()?, words.next()?, words.next()?);
    let bytes = pages.checked_mul(unit).filter(|bytes| *bytes > 0);
    let in_image = bytes.and_then(|bytes| offset.checked_add(bytes)).is_some_and(|end| end <= image_bytes);
    let in_memory = bytes.is_some_and(|bytes| base.checked_add(bytes).is_some());
    if !in_image || !in_memory || !(base | offset).is_multiple_of(unit) {
        return Err(bad(format_args!(
            "a region of {pages} pages at {base:#x}, at byte {offset} of the image"
        )));
    }
    let words = words.take(pages.div_ceil(IN_WORD))?;
    let behind = match pages % IN_WORD {
        0 => 0,
        used => words.last().map_or(0, |last| last >> (2 * used)),
    };
    let is_unknown = |word: &u64| word & (word >> 1) & LOWER_BITS != 0;
    if behind != 0 || words.iter().any(is_unknown) {
        return Err(bad("a page in a state that there is not"));
    }
    Ok(RegionStates { base, offset, pages, words })
}

#[cfg(test)]
mod tests;
