//! File systems: of which of them files may be served, by the magic number that `statfs` tells, or by the name of the
//! type in a table of mounts.
//!
//! A viewer looks before it asks; the owner looks again before it opens anything. The one list here names file systems
//! whose leases were examined. Files of all others are read through the kernel, since a lease may not keep other
//! writers out there.
//!
//! Overlayfs is not local here: its lower files can be changed past it, and a lease on the file in front does not
//! notice. FUSE and network file systems are not: their files change elsewhere, and their reads may never end.

/// The kind of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileSystem {
    /// The files are answers, made anew at each read. They are never served.
    NoContent,
    /// The file system cannot be written.
    ReadOnly,
    /// The files change through this kernel alone, and a read lease keeps others from changing them.
    Local,
    /// An unknown file system.
    Other,
}

type FileSystemRow = (FileSystem, &'static str, u32);

/// (NTFS by FUSE is called fuseblk, and is none of these.)
const KNOWN: [FileSystemRow; 46] = {
    use FileSystem::{Local, NoContent, ReadOnly};
    [
        (Local, "ext4", 0xef53),
        (Local, "ext3", 0xef53),
        (Local, "ext2", 0xef53),
        (Local, "xfs", 0x5846_5342),
        (Local, "btrfs", 0x9123_683e),
        (Local, "f2fs", 0xf2f5_2010),
        (Local, "bcachefs", 0xca45_1a4e),
        (Local, "tmpfs", 0x0102_1994),
        (Local, "devtmpfs", 0x0102_1994),
        (Local, "ramfs", 0x8584_58f6),
        (Local, "rootfs", 0x8584_58f6),
        (Local, "vfat", 0x4d44),
        (Local, "msdos", 0x4d44),
        (Local, "exfat", 0x2011_bab0),
        (Local, "ntfs3", 0x7366_746e),
        (Local, "udf", 0x1501_3346),
        (Local, "jfs", 0x3153_464a),
        (Local, "nilfs2", 0x3434),
        (Local, "zfs", 0x2fc1_2fc1),
        (Local, "ubifs", 0x2405_1905),
        (ReadOnly, "squashfs", 0x7371_7368),
        (ReadOnly, "erofs", 0xe0f5_e1e2),
        (ReadOnly, "iso9660", 0x9660),
        (ReadOnly, "cramfs", 0x28cd_3d45),
        (ReadOnly, "cramfs", 0x453d_cd28), // the other byte order
        (ReadOnly, "romfs", 0x7275),
        (NoContent, "proc", 0x9fa0),
        (NoContent, "sysfs", 0x6265_6572),
        (NoContent, "cgroup", 0x0027_e0eb),
        (NoContent, "cgroup2", 0x6367_7270),
        (NoContent, "debugfs", 0x6462_6720),
        (NoContent, "tracefs", 0x7472_6163),
        (NoContent, "securityfs", 0x7363_6673),
        (NoContent, "selinuxfs", 0xf97c_ff8c),
        (NoContent, "smackfs", 0x4341_5d53),
        (NoContent, "bpf", 0xcafe_4a11),
        (NoContent, "pstore", 0x6165_676c),
        (NoContent, "efivarfs", 0xde5e_81e4),
        (NoContent, "configfs", 0x6265_6570),
        (NoContent, "devpts", 0x1cd1),
        (NoContent, "binfmt_misc", 0x4249_4e4d),
        (NoContent, "nsfs", 0x6e73_6673),
        (NoContent, "mqueue", 0x1980_0202),
        (NoContent, "resctrl", 0x0765_5821),
        (NoContent, "fusectl", 0x6573_5543),
        (NoContent, "binder", 0x6c6f_6f70),
    ]
};

impl FileSystem {
    /// Looks up the number that `statfs` tells, of which 32 bits count.
    #[inline]
    pub fn of(magic: u64) -> Self {
        Self::find(|&(_, _, known)| known == magic as u32)
    }

    /// Looks up the type that a table of mounts names.
    #[inline]
    pub fn named(name: &str) -> Self {
        Self::find(|&(_, known, _)| known == name)
    }

    #[inline]
    fn find(is_it: impl Fn(&FileSystemRow) -> bool) -> Self {
        KNOWN.iter().find(|known| is_it(known)).map_or(Self::Other, |&(found, _, _)| found)
    }

    /// Whether its files may be served at all; `any`: also those of unknown file systems.
    #[inline]
    pub fn may_be_served(self, any: bool) -> bool {
        match self {
            Self::NoContent => false,
            Self::ReadOnly | Self::Local => true,
            Self::Other => any,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_file_systems_are_served_on_request_and_pseudo_ones_never() {
        const OVERLAY: u64 = 0x794c_7630;
        const FUSE: u64 = 0x6573_5546;
        const NFS: u64 = 0x6969;
        for magic in [OVERLAY, FUSE, NFS, 0] {
            let found = FileSystem::of(magic);
            assert_eq!((found.may_be_served(false), found.may_be_served(true)), (false, true), "{magic:#x}");
        }
        assert!(!FileSystem::of(0x9fa0).may_be_served(true));
        assert_eq!(FileSystem::of(0xef53), FileSystem::Local);
        // A 32-bit number may come with its sign.
        assert_eq!(FileSystem::of(0x9123_683e_u32 as i32 as u64), FileSystem::Local);
        assert_eq!(FileSystem::of(0xe0f5_e1e2), FileSystem::ReadOnly);
    }
}
