//! Store: where a peer's file in memory lies: the kernel's own, in pages of either size.
//!
//! ```text
//!   4K        tmpfs, huge=never       2M   tmpfs, huge=always      neither is mounted in any folder: the process that
//!   has the
//!                                                                  mount's descriptor makes files in it
//!   hugetlb   2 MiB pages that somebody has reserved
//! ```
//!
//! A mount that is in no folder is seen by nobody, and goes with its last file. It takes root; where it is refused
//! a memfd stands in for the small pages (it is the same code of the kernel), and for large ones there is nothing.
//! A reservation of large pages is the machine's, so we use one that is there and make none.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};

use super::harness::Unmeasured;

/// Files in memory, with pages of one size.
pub struct Store {
    mount: Option<OwnedFd>,
    flags: MemfdFlags,
}

impl Store {
    /// A tmpfs of pages of 4 KiB; the kernel's own one if none may be mounted.
    pub fn small() -> Self {
        match tmpfs("never") {
            Ok(mount) => Self { mount: Some(mount), flags: MemfdFlags::CLOEXEC },
            Err(error) => {
                eprintln!(
                    "quinion: no tmpfs can be mounted ({error}; it takes root): a memfd stands in for the one \
                     of 4 KiB pages"
                );
                Self::memfd()
            }
        }
    }

    /// The tmpfs that the kernel has for itself.
    pub fn memfd() -> Self {
        Self { mount: None, flags: MemfdFlags::CLOEXEC }
    }

    /// A tmpfs of pages of 2 MiB.
    pub fn huge() -> Result<Self, Unmeasured> {
        let mount = tmpfs("always").map_err(|error| {
            Unmeasured::Missing(format!("no tmpfs with huge=always can be mounted: {error}; it takes root"))
        })?;
        Ok(Self { mount: Some(mount), flags: MemfdFlags::CLOEXEC })
    }

    /// Pages of 2 MiB that are reserved for this.
    pub fn hugetlb() -> Self {
        Self { mount: None, flags: MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB }
    }

    /// A file without a name, `bytes` long, of which nothing is there yet.
    pub fn file(&self, bytes: u64) -> io::Result<File> {
        let file = match &self.mount {
            Some(mount) => {
                let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
                File::from(openat(mount.as_fd(), ".", flags, Mode::RUSR | Mode::WUSR)?)
            }
            None => File::from(memfd_create("quinion-bench", self.flags)?),
        };
        file.set_len(bytes)?;
        Ok(file)
    }
}

/// A tmpfs with this choice of pages, in no folder.
fn tmpfs(huge: &str) -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("huge", huge), ("size", "100%"), ("mode", "0700")] {
        fsconfig_set_string(context.as_fd(), key, value)?;
    }
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// How many 2 MiB pages are reserved and used by nobody.
pub fn free_hugetlb_pages() -> u64 {
    let text = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_file_of_each_store_is_sparse_and_keeps_what_is_written() {
        let stores = [Some(Store::memfd()), Some(Store::small()), Store::huge().ok()];
        for store in stores.iter().flatten() {
            let file = store.file(8 << 20).expect("there is memory");
            assert_eq!(file.metadata().expect("it is ours").blocks(), 0);
            file.write_all_at(&[7; 4096], 4 << 20).expect("it is as long");
            let mut bytes = [0; 4096];
            file.read_exact_at(&mut bytes, 4 << 20).expect("it is as long");
            let blocks = file.metadata().expect("it is ours").blocks() * 512;
            assert!(bytes == [7; 4096] && (4096..=2 << 20).contains(&blocks), "{blocks}");
        }
    }

    #[test]
    fn a_tmpfs_of_large_pages_has_large_pages() {
        let store = match Store::huge() {
            Ok(store) => store,
            Err(why) => return eprintln!("not tested: {why}"),
        };
        let file = store.file(4 << 20).expect("there is memory");
        file.write_all_at(&[7; 4096], 0).expect("it is as long");
        let bytes = file.metadata().expect("it is ours").blocks() * 512;
        // Memory in which no large page is free any more gives small ones.
        assert!(bytes == 2 << 20 || bytes == 4096, "{bytes}");
    }
}
