//! Domain: whose processes may see the bytes of a cache.
//!
//! A process that maps the arena can read all that is cached there, for whichever process it was cached. So only
//! processes may map it that could have read all of it themselves: those with the very credentials of the owner. That
//! is the same users and groups, real, effective, saved and for file systems, the same supplementary groups, the same
//! permitted and effective capabilities, and the same user and process name spaces, in which these mean the same. A
//! process with less than that could read less; the owner cannot check one with more; so they have to be equal.
//!
//! The kernel reports them in `/proc/PID/status` and `/proc/PID/ns`. A **member** is a process that was compared
//! once. Its status file stays open, and is that process's and no other's, however numbers are used again; so it can
//! be compared again later, when its credentials may have changed.
//!
//! Only the process's first thread is compared. A program whose threads have credentials of their own, by system
//! calls past the C library, is not detected.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};

/// The lines of a process's status that are compared.
const LINES: [&str; 5] = ["Uid:", "Gid:", "Groups:", "CapPrm:", "CapEff:"];
/// The name spaces of a process that are compared.
const NAME_SPACES: [&str; 2] = ["user", "pid"];
/// Bytes of a status that are read: more than any has but for very many groups, which are read as well.
const STATUS_BYTES: usize = 8 << 10;
const STATUS_BYTES_MAX: usize = 1 << 20;

/// Whose processes may see the bytes of a cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Domain {
    credentials: Vec<String>,
    name_spaces: [(u64, u64); NAME_SPACES.len()],
}

/// A process that was of the domain when it was looked at.
#[derive(Debug)]
pub struct Member {
    number: u32,
    status: File,
}

impl Domain {
    /// The domain of this process, as it is now.
    ///
    /// # Errors
    /// There is no `/proc`, or another process's.
    pub fn of_this_process() -> io::Result<Self> {
        let number = std::process::id();
        let status = File::open("/proc/self/status")?;
        Ok(Self { credentials: credentials(&status)?, name_spaces: name_spaces(number)? })
    }

    /// The process `number`, if it is of this domain.
    ///
    /// # Errors
    /// It is not (`PermissionDenied`), or cannot be looked at.
    pub fn member(&self, number: u32) -> io::Result<Member> {
        let member = Member { number, status: File::open(format!("/proc/{number}/status"))? };
        if self.has(&member) { Ok(member) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    /// Whether a process still is of this domain. One that cannot be looked at is not.
    pub fn has(&self, member: &Member) -> bool {
        // The status last: if that can be read the number was this process's until then.
        name_spaces(member.number).is_ok_and(|found| found == self.name_spaces)
            && credentials(&member.status).is_ok_and(|found| found == self.credentials)
    }
}

fn credentials(status: &File) -> io::Result<Vec<String>> {
    let mut bytes = vec![0; STATUS_BYTES];
    let mut count = status.read_at(&mut bytes, 0)?;
    while count == bytes.len() && count < STATUS_BYTES_MAX {
        bytes.resize(2 * bytes.len(), 0);
        count = status.read_at(&mut bytes, 0)?;
    }
    let mut text = String::new();
    (&bytes[..count]).read_to_string(&mut text)?;
    let line = |name: &&str| {
        let found = text.lines().find(|line| line.starts_with(name));
        found.map(str::to_owned).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    };
    LINES.iter().map(line).collect()
}

/// Device and number of each name space.
fn name_spaces(process: u32) -> io::Result<[(u64, u64); NAME_SPACES.len()]> {
    let mut found = [(0, 0); NAME_SPACES.len()];
    for (place, name) in found.iter_mut().zip(NAME_SPACES) {
        let data = std::fs::metadata(format!("/proc/{process}/ns/{name}"))?;
        *place = (data.dev(), data.ino());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_of_ours_is_a_member_until_it_has_ended() {
        let ours = Domain::of_this_process().unwrap();
        assert_eq!(ours, Domain::of_this_process().unwrap());
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let member = ours.member(child.id()).unwrap();
        assert!(ours.has(&member));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!ours.has(&member));
        assert!(ours.member(child.id()).is_err());
    }

    /// 1. A process of root's gives a right away, or becomes another user.
    /// 2. It is taken for one of this domain, and reads all that root's have cached.
    #[test]
    fn a_process_with_other_rights_is_none() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: only root can start a process with other rights");
            return;
        }
        let ours = Domain::of_this_process().unwrap();
        let changed = |change: fn(&mut Command)| {
            let mut command = Command::new("sleep");
            change(command.arg("1000"));
            let mut child = command.spawn().unwrap();
            let error = ours.member(child.id()).map(drop).map_err(|error| error.kind());
            child.kill().unwrap();
            child.wait().unwrap();
            error
        };
        assert_eq!(changed(|_| ()), Ok(()));
        assert_eq!(changed(|command| _ = command.uid(65534)), Err(io::ErrorKind::PermissionDenied));
        assert_eq!(changed(|command| _ = command.gid(65534)), Err(io::ErrorKind::PermissionDenied));
    }
}
