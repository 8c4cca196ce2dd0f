//! Mountinfo: the kernel's table of mounts, line by line.
//!
//! `/proc/PID/mountinfo` says what is mounted where, as the process sees it; see proc_pid_mountinfo(5). Reading it asks
//! no file system. A line that cannot be understood is left out.

/// A line: `id parent major:minor root point options [fields] - kind source superblock-options`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Line<'a> {
    /// The number of the mount, which means the same in all processes. It may be given again once the mount is gone.
    pub id: u64,
    /// The device of its file system, as `stat` has it of most files there (btrfs says others).
    pub device: u64,
    /// Which part of the file system is mounted.
    pub root: String,
    /// Where, below the process's root.
    pub point: String,
    /// The type of the file system.
    pub kind: &'a str,
    /// The options of the file system itself.
    pub options: &'a str,
}

impl<'a> Line<'a> {
    /// Takes a line apart; `None` if it is none.
    pub fn parse(line: &'a str) -> Option<Self> {
        let (mount, system) = line.split_once(" - ")?;
        let mut words = mount.split(' ');
        let id = words.next()?.parse().ok()?;
        let (major, minor) = words.nth(1)?.split_once(':')?;
        let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
        let (root, point) = (unescape(words.next()?), unescape(words.next()?));
        let mut system = system.split(' ');
        Some(Self { id, device, root, point, kind: system.next()?, options: system.nth(1)? })
    }
}

/// Undoes the octal escapes (`\040` for a space).
fn unescape(field: &str) -> String {
    let mut parts = field.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
            Some(byte) if byte.is_ascii() => {
                plain.push(char::from(byte));
                plain.push_str(&part[3..]);
            }
            _ => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_apart() {
        let text =
            "36 35 98:4 /part /mnt\\0402 rw,noatime master:1 shared:7 - ext4 /dev/sda1 rw,errors=continue";
        let line = Line::parse(text).unwrap();
        assert_eq!((line.id, line.device), (36, rustix::fs::makedev(98, 4)));
        assert_eq!((line.root.as_str(), line.point.as_str()), ("/part", "/mnt 2"));
        assert_eq!((line.kind, line.options), ("ext4", "rw,errors=continue"));
        for nothing in [
            "",
            "nothing of the kind",
            "1 2 3 4 5 - ext4 x y",
            "1 2 3:4 / - ext4 x y",
            "1 2 3:4 / /m rw - ext4",
        ] {
            assert_eq!(Line::parse(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn escapes_are_undone_and_other_backslashes_stay() {
        assert_eq!(unescape(r"a\040b\134"), r"a b\");
        for plain in ["", r"a\04", r"a\b\13\377"] {
            assert_eq!(unescape(plain), plain);
        }
    }
}
