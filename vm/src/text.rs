//! Text: what people and configurations read and write of a server: its events, and its options as words.
//!
//! | written | is |
//! |---|---|
//! | `none`, `recorded`, `all` | a [`Fill`] |
//! | `kill`, `leave` | an [`OnFailure`] |
//! | `660` | a [`SocketMode`], octal |
//! | `1000`, `1000:1000` | a [`SocketOwner`], by numbers |
//!
//! Programs that serve VMs share these, so that one word means the same in all of them. Pure.

use std::fmt;
use std::str::FromStr;

use crate::{Event, Fill, OnFailure};

/// Permissions of a socket, written in octal: `660`. For [`RestoreOptions::socket_mode`].
///
/// [`RestoreOptions::socket_mode`]: crate::RestoreOptions::socket_mode
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SocketMode(pub u32);

/// The user of a socket, and its group if one is named: `1000` or `1000:1000`. For [`RestoreOptions::socket_owner`] and
/// [`RestoreOptions::socket_group`].
///
/// [`RestoreOptions::socket_owner`]: crate::RestoreOptions::socket_owner
/// [`RestoreOptions::socket_group`]: crate::RestoreOptions::socket_group
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SocketOwner {
    /// The number of the user.
    pub user: u32,
    /// The number of the group.
    pub group: Option<u32>,
}

impl FromStr for SocketMode {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
        mode.map(Self).ok_or_else(|| format!("{text:?} are no permissions; give them in octal, such as 660"))
    }
}

impl FromStr for SocketOwner {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user.parse().ok(), Some(group.parse().ok())),
            None => (text.parse().ok(), None),
        };
        match (user, group) {
            (Some(user), None) => Ok(Self { user, group: None }),
            (Some(user), Some(Some(group))) => Ok(Self { user, group: Some(group) }),
            _ => Err(format!("{text:?} is no owner; give numbers, such as 1000 or 1000:1000")),
        }
    }
}

impl FromStr for Fill {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::Nothing),
            "recorded" => Ok(Self::Recorded),
            "all" => Ok(Self::All),
            _ => Err(format!("{text:?} cannot be filled; write none, recorded or all")),
        }
    }
}

impl FromStr for OnFailure {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "kill" => Ok(Self::Kill),
            "leave" => Ok(Self::Leave),
            _ => Err(format!("{text:?} is no treatment of a VM; write kill or leave")),
        }
    }
}

/// An amount of bytes, in MiB with one place.
struct Mib(u64);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MiB", self.0 as f64 / f64::from(1 << 20))
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fate = |killed: bool| if killed { "its process was killed" } else { "its process was left" };
        match self {
            Self::Begun { vm, process, bytes } => {
                write!(f, "vm {vm} (process {process}): serving {}", Mib(*bytes))
            }
            Self::SnapshotLarger { vm, process, used_bytes, image_bytes } => write!(
                f,
                "vm {vm} (process {process}) uses the first {} of the snapshot, which has {}: \
                 is it the snapshot of this VM?",
                Mib(*used_bytes),
                Mib(*image_bytes)
            ),
            Self::Refused { process, why } => write!(f, "process {process} was refused: {why}"),
            Self::GivenUp { vm, process, why, killed } => {
                write!(f, "vm {vm} (process {process}) was given up: {why}; {}", fate(*killed))
            }
            Self::Ended { vm, process, counters } => {
                let (faults, supplied) = (counters.faults, Mib(counters.demand_bytes + counters.ahead_bytes));
                write!(f, "vm {vm} (process {process}) has ended: {faults} faults, {supplied} supplied")?;
                match counters.poisoned_bytes {
                    0 => Ok(()),
                    bytes => write!(f, ", {bytes} bytes could not be read"),
                }
            }
            Self::Poisoned { vm, process, snapshot, range, why } => write!(
                f,
                "vm {vm} (process {process}): bytes {} to {} of {snapshot} cannot be read: {why}; a touch of them \
                 is SIGBUS in the VM",
                range.start, range.end
            ),
            Self::Dropped { vm, process, killed } => {
                write!(f, "vm {vm} (process {process}) was still there at the end: {}", fate(*killed))
            }
            Self::TakenOver { vm, process, bytes } => {
                write!(f, "vm {vm} (process {process}): taken over, serving {}", Mib(*bytes))
            }
            Self::HandedOver { vm, process } => {
                write!(f, "vm {vm} (process {process}) was handed over to another server")
            }
            Self::NotTakenOver(why) => write!(f, "VMs were not taken over: {why}"),
            Self::ReplayStale { differing, compared } => write!(
                f,
                "the record is stale: of {compared} pages compared {differing} differ; the rest of it is ignored; \
                 record again"
            ),
            Self::CannotAccept(error) => write!(f, "cannot accept connections for a moment: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PeerError;

    #[test]
    fn options_are_read_from_words_and_others_are_refused_with_those_that_are_known() {
        assert_eq!("660".parse(), Ok(SocketMode(0o660)));
        assert_eq!("1000".parse(), Ok(SocketOwner { user: 1000, group: None }));
        assert_eq!("1000:5".parse(), Ok(SocketOwner { user: 1000, group: Some(5) }));
        assert_eq!(
            ["none", "recorded", "all"].map(str::parse),
            [Ok(Fill::Nothing), Ok(Fill::Recorded), Ok(Fill::All)]
        );
        assert_eq!(["kill", "leave"].map(str::parse), [Ok(OnFailure::Kill), Ok(OnFailure::Leave)]);
        let refused = [
            "1777".parse::<SocketMode>().map(drop),
            "rw".parse::<SocketMode>().map(drop),
            "me".parse::<SocketOwner>().map(drop),
            "1:".parse::<SocketOwner>().map(drop),
            "some".parse::<Fill>().map(drop),
            "keep".parse::<OnFailure>().map(drop),
        ];
        for refusal in refused {
            let text = refusal.unwrap_err();
            assert!(text.contains("; give") || text.contains("; write"), "{text}");
        }
    }

    #[test]
    fn an_event_is_a_line_with_the_vm_and_the_reason() {
        let why = PeerError::SnapshotChanged { name: "s3://bucket/vm.mem".into() };
        let text = Event::GivenUp { vm: 3, process: 4711, why, killed: true }.to_string();
        for part in ["vm 3 (process 4711)", "s3://bucket/vm.mem was changed", "its process was killed"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let why = quinion::internals::hooks::invalid_input("its checksum differs".to_owned());
        let poisoned =
            Event::Poisoned { vm: 1, process: 2, snapshot: "a.pack".into(), range: 4096..8192, why };
        let text = poisoned.to_string();
        assert!(text.contains("bytes 4096 to 8192 of a.pack cannot be read: its checksum differs"), "{text}");
        let larger = Event::SnapshotLarger { vm: 1, process: 2, used_bytes: 3 << 19, image_bytes: 2 << 20 };
        assert!(larger.to_string().contains("the first 1.5 MiB of the snapshot, which has 2.0 MiB"));
    }
}
