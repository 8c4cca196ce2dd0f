//! File systems: of which of them files may be served, by the magic number that `statfs` tells.
//!
//! A viewer looks before it asks, so that no file of another kind is asked for; the owner looks again before it opens
//! anything. Both go by the one list here. It names what is known: of a file system that it does not name nobody has
//! looked whether a lease keeps others out, so its files are the kernel's.
//!
//! Overlayfs is not among the local ones: its lower files can be changed past it, and a lease on the file in front does
//! not hear of that. Neither are FUSE and the file systems of networks, whose files change elsewhere, and whose reads
//! may never end.

/// What is known of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileSystem {
    /// Its files are answers, made anew at each read. They are never served.
    NoContent,
    /// It cannot be written by anybody.
    ReadOnly,
    /// Its files change through this kernel alone, and a read lease keeps others from changing them.
    Local,
    /// Nothing.
    Other,
}

/// squashfs, EROFS, ISO 9660, cramfs in both byte orders, romfs.
const READ_ONLY: [u32; 6] = [0x7371_7368, 0xe0f5_e1e2, 0x9660, 0x28cd_3d45, 0x453d_cd28, 0x7275];

/// ext2 to ext4, XFS, Btrfs, F2FS, bcachefs, tmpfs, ramfs, FAT, exFAT, NTFS, UDF, JFS, NILFS2, ZFS, UBIFS.
const LOCAL: [u32; 15] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x0102_1994,
    0x8584_58f6,
    0x4d44,
    0x2011_bab0,
    0x7366_746e,
    0x1501_3346,
    0x3153_464a,
    0x3434,
    0x2fc1_2fc1,
    0x2405_1905,
];

/// procfs, sysfs, cgroup 1 and 2, debugfs, tracefs, securityfs, SELinux, Smack, bpf, pstore, efivarfs, configfs,
/// devpts, binfmt_misc, nsfs, mqueue, resctrl, fusectl, binderfs.
const NO_CONTENT: [u32; 20] = [
    0x9fa0,
    0x6265_6572,
    0x0027_e0eb,
    0x6367_7270,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xf97c_ff8c,
    0x4341_5d53,
    0xcafe_4a11,
    0x6165_676c,
    0xde5e_81e4,
    0x6265_6570,
    0x1cd1,
    0x4249_4e4d,
    0x6e73_6673,
    0x1980_0202,
    0x0765_5821,
    0x6573_5543,
    0x6c6f_6f70,
];

/// What the tables of mounts call the local ones, and those that cannot be written. (NTFS by FUSE is called fuseblk.)
#[cfg(feature = "std")]
const LOCAL_NAMES: [&str; 20] = [
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "tmpfs", "devtmpfs", "ramfs", "rootfs",
    "vfat", "msdos", "exfat", "ntfs3", "udf", "jfs", "nilfs2", "zfs", "ubifs",
];
#[cfg(feature = "std")]
const READ_ONLY_NAMES: [&str; 5] = ["squashfs", "erofs", "iso9660", "cramfs", "romfs"];
/// And those whose files are made anew at each read.
#[cfg(feature = "std")]
const NO_CONTENT_NAMES: [&str; 20] = [
    "proc",
    "sysfs",
    "cgroup",
    "cgroup2",
    "debugfs",
    "tracefs",
    "securityfs",
    "selinuxfs",
    "smackfs",
    "bpf",
    "pstore",
    "efivarfs",
    "configfs",
    "devpts",
    "binfmt_misc",
    "nsfs",
    "mqueue",
    "resctrl",
    "fusectl",
    "binder",
];

impl FileSystem {
    /// Of the type that a table of mounts names.
    #[cfg(feature = "std")]
    pub fn named(name: &str) -> Self {
        if LOCAL_NAMES.contains(&name) {
            Self::Local
        } else if READ_ONLY_NAMES.contains(&name) {
            Self::ReadOnly
        } else if NO_CONTENT_NAMES.contains(&name) {
            Self::NoContent
        } else {
            Self::Other
        }
    }

    /// Of that magic number, of which 32 bits count.
    pub fn of(magic: u64) -> Self {
        let magic = magic as u32;
        if LOCAL.contains(&magic) {
            Self::Local
        } else if READ_ONLY.contains(&magic) {
            Self::ReadOnly
        } else if NO_CONTENT.contains(&magic) {
            Self::NoContent
        } else {
            Self::Other
        }
    }

    /// Whether its files may be served at all; `any` if those of which nothing is known are wanted, too.
    pub fn may_be_served(self, any: bool) -> bool {
        match self {
            Self::NoContent => false,
            Self::ReadOnly | Self::Local => true,
            Self::Other => any,
        }
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn what_changes_elsewhere_is_served_to_who_wants_it_and_what_has_no_content_never() {
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
