//! Handshake: the two messages by which a process becomes a viewer.
//!
//! ```text
//!   process                                      owner, at a Unix socket (SOCK_SEQPACKET)
//!     connects
//!     Hello { version, token, run, plan }  --->  which process, by the kernel's word? of the owner's domain?
//!                                          <---  Welcome, with descriptors: arena, control, its page, a plan or none
//!     maps all, closes all                       or a refusal, without
//! ```
//!
//! The owner knows who asks by the socket alone (`SO_PEERCRED`, `SO_PEERPIDFD`), and trusts nothing in the message. The
//! process makes sure in the same way that the listener is its own user. Both close the connection after that.
//!
//! By the same socket, and a connection of its own, a viewer **sends** a descriptor that the system forbids the owner
//! to duplicate (Yama, a seccomp filter): `Offer { version, token }`, with the descriptor. The answer is a
//! [`JoinReply`] without descriptors, whose number is the ticket for [`SENT`](crate::arena::control::SENT).
//!
//! In the same way a viewer sends a **name** to open: `Name { version, token }`, followed by the name's bytes, and no
//! descriptor. It gets a ticket for [`OpenNamed`](crate::arena::control::Operation::OpenNamed), and the connection then
//! brings a [`NameReply`], with text behind it.
//!
//! Numbers are little-endian, and a message of another length is none.

const HELLO: u64 = u64::from_le_bytes(*b"QUINHELO");
const OFFER: u64 = u64::from_le_bytes(*b"QUINOFFR");
const WELCOME: u64 = u64::from_le_bytes(*b"QUINWELC");

const NAME: u64 = u64::from_le_bytes(*b"QUINNAME");
const NAMED: u64 = u64::from_le_bytes(*b"QUINNMED");

/// In [`JoinRequest::token`]: any cache.
pub const ANY_CACHE: u64 = 0;
/// Bytes of a name at most.
pub const NAME_MAX: usize = 4096;
/// Bytes of the longest message that a process sends.
pub const MESSAGE_MAX: usize = HELLO_BYTES + NAME_MAX;
/// Bytes of the text behind a [`NameReply`] at most.
pub const NAME_TEXT_MAX: usize = 16 << 10;

/// Bytes of a [`JoinRequest`].
pub const HELLO_BYTES: usize = 32;
/// Bytes of a [`JoinReply`].
pub const WELCOME_BYTES: usize = 16;
/// Descriptors that come with a [`JoinReply`] at most: the arena, the control file, the page, the plan.
pub const DESCRIPTORS_MAX: usize = 4;
/// In [`JoinRequest::plan`]: none is wanted.
pub const NO_PLAN: u32 = u32::MAX;

/// The message of a process that wants to become a viewer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JoinRequest {
    /// [`LAYOUT_VERSION`](crate::arena::LAYOUT_VERSION).
    pub version: u32,
    /// Which of the plans that runs have brought it wants; [`NO_PLAN`] for none.
    pub plan: u32,
    /// The token of the cache that it is meant to view.
    pub token: u64,
    /// The run that it counts for; 0 for none.
    pub run: u64,
}

impl JoinRequest {
    /// As it is sent.
    pub fn bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        let numbers = [HELLO, u64::from(self.version) | u64::from(self.plan) << 32, self.token, self.run];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// The request in a message; `None` if that is none.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO_BYTES] = bytes.try_into().ok()?;
        let [magic, numbers, token, run] = words(bytes);
        let (version, plan) = (numbers as u32, (numbers >> 32) as u32);
        (magic == HELLO).then_some(Self { version, plan, token, run })
    }
}

/// The message that comes with a descriptor that a viewer sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DescriptorOffer {
    /// [`LAYOUT_VERSION`](crate::arena::LAYOUT_VERSION).
    pub version: u32,
    /// The token of the cache.
    pub token: u64,
}

impl DescriptorOffer {
    /// As it is sent; as long as a [`JoinRequest`].
    pub fn bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        let numbers = [OFFER, u64::from(self.version), self.token];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// The offer in a message; `None` if that is none.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO_BYTES] = bytes.try_into().ok()?;
        let [magic, version, token, zero] = words(bytes);
        let version = u32::try_from(version).ok()?;
        (magic == OFFER && zero == 0).then_some(Self { version, token })
    }
}

/// The head of a message with a name that a viewer sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameOffer {
    /// [`LAYOUT_VERSION`](crate::arena::LAYOUT_VERSION).
    pub version: u32,
    /// The token of the cache.
    pub token: u64,
}

impl NameOffer {
    /// As it is sent, before the name; as long as a [`JoinRequest`].
    pub fn bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        let numbers = [NAME, u64::from(self.version), self.token];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// As it arrived, and the name; `None` if that is none. A name has a byte at least, and [`NAME_MAX`] at most.
    pub fn of(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, name) = bytes.split_first_chunk::<HELLO_BYTES>()?;
        let [magic, version, token, zero] = words(head);
        let version = u32::try_from(version).ok()?;
        let is_one = magic == NAME && zero == 0 && !name.is_empty() && name.len() <= NAME_MAX;
        is_one.then_some((Self { version, token }, name))
    }
}

/// The owner's answer to a name; text follows: of the object, or why it is not opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameReply {
    /// 0, or why not: an error number.
    pub error: u32,
}

impl NameReply {
    /// As it is sent, before the text.
    pub fn bytes(&self) -> [u8; WELCOME_BYTES] {
        let mut bytes = [0; WELCOME_BYTES];
        for (place, number) in bytes.chunks_exact_mut(8).zip([NAMED, u64::from(self.error)]) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// The reply in a message, and the text behind it; `None` if that is none.
    pub fn of(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, text) = bytes.split_first_chunk::<WELCOME_BYTES>()?;
        let [magic, error] = words(head);
        let error = u32::try_from(error).ok()?;
        (magic == NAMED && text.len() <= NAME_TEXT_MAX).then_some((Self { error }, text))
    }
}

/// The owner's answer to a [`JoinRequest`] or [`DescriptorOffer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JoinReply {
    /// 0, or why not: an error number. `EACCES`: the process is not of the owner's domain. `EPROTO`: another version,
    /// or another cache is meant. `EUSERS`: too many viewers. `EAGAIN`: too many descriptors sent and not asked for.
    /// Others: the owner lacks something.
    pub error: u32,
    /// The viewer's number; for messages, and nothing else. To an [`DescriptorOffer`]: the ticket.
    pub viewer: u32,
}

impl JoinReply {
    /// As it is sent.
    pub fn bytes(&self) -> [u8; WELCOME_BYTES] {
        let mut bytes = [0; WELCOME_BYTES];
        let numbers = [WELCOME, u64::from(self.error) | u64::from(self.viewer) << 32];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// The reply in a message; `None` if that is none.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; WELCOME_BYTES] = bytes.try_into().ok()?;
        let [magic, numbers] = words(bytes);
        (magic == WELCOME).then_some(Self { error: numbers as u32, viewer: (numbers >> 32) as u32 })
    }
}

fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent_and_others_are_none() {
        let hello = JoinRequest { version: 7, plan: NO_PLAN, token: u64::MAX - 1, run: 3 };
        assert_eq!(JoinRequest::of(&hello.bytes()), Some(hello));
        let offer = DescriptorOffer { version: 7, token: 9 };
        assert_eq!(DescriptorOffer::of(&offer.bytes()), Some(offer));
        assert_eq!((DescriptorOffer::of(&hello.bytes()), JoinRequest::of(&offer.bytes())), (None, None));
        let welcome = JoinReply { error: 13, viewer: 62 };
        assert_eq!(JoinReply::of(&welcome.bytes()), Some(welcome));
        assert_eq!((JoinRequest::of(&welcome.bytes()), JoinReply::of(&hello.bytes())), (None, None));
        assert_eq!(JoinRequest::of(&hello.bytes()[..31]), None);
        assert_eq!(JoinRequest::of(&[hello.bytes().as_slice(), &[0]].concat()), None);
        let name = NameOffer { version: 7, token: 9 };
        let sent = [&name.bytes()[..], b"s3://bucket/key"].concat();
        assert_eq!(NameOffer::of(&sent), Some((name, &b"s3://bucket/key"[..])));
        assert_eq!((NameOffer::of(&name.bytes()), NameOffer::of(&offer.bytes())), (None, None), "no name");
        assert_eq!(NameOffer::of(&[&name.bytes()[..], &[7; NAME_MAX + 1]].concat()), None);
        assert_eq!((JoinRequest::of(&sent), DescriptorOffer::of(&sent)), (None, None));
        let reply = NameReply { error: 2 };
        assert_eq!(NameReply::of(&[&reply.bytes()[..], b"why"].concat()), Some((reply, &b"why"[..])));
        assert_eq!((NameReply::of(&welcome.bytes()), NameReply::of(b"")), (None, None));
        let mut other = hello.bytes();
        other[0] ^= 1;
        assert_eq!((JoinRequest::of(&other), JoinRequest::of(&[])), (None, None));
    }
}
