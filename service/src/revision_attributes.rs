//! Revision attributes: a file as a server found it, and the text by which it says so.
//!
//! ```text
//!   revision DEVICE INODE SIZE MODIFIED CHANGED
//! ```
//!
//! A client compares them with its own look at the file.

use quinion::backend::Attributes;

/// A file as the server found it when it opened a revision of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RevisionAttributes {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
    /// In bytes.
    pub size: u64,
    /// When its bytes were changed last, in nanoseconds since 1970.
    pub modified: i64,
    /// When anything of it was changed last, in nanoseconds since 1970.
    pub changed: i64,
}

impl RevisionAttributes {
    pub(crate) fn of(file: &Attributes) -> Self {
        let Attributes { identity, version, size } = *file;
        let (device, inode) = (identity.device, identity.inode);
        Self { device, inode, size, modified: version.modified, changed: version.changed }
    }

    /// As the server tells it.
    pub(crate) fn text(&self) -> String {
        let Self { device, inode, size, modified, changed } = self;
        format!("revision {device} {inode} {size} {modified} {changed}")
    }

    /// `None` if the text is none of these.
    pub(crate) fn of_text(text: &str) -> Option<Self> {
        let mut words = text.strip_prefix("revision ")?.split(' ');
        let mut number = || words.next()?.parse().ok();
        let (device, inode, size) = (number()?, number()?, number()?);
        let mut time = || words.next()?.parse().ok();
        let (modified, changed) = (time()?, time()?);
        words.next().is_none().then_some(Self { device, inode, size, modified, changed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_arrive_as_they_were_told_and_other_texts_are_none() {
        let told =
            RevisionAttributes { device: 2049, inode: 1 << 40, size: 8192, modified: -1, changed: i64::MAX };
        assert_eq!(RevisionAttributes::of_text(&told.text()), Some(told));
        for wrong in [
            "",
            "size 5",
            "revision 1 2 3 4",
            "revision 1 2 3 4 5 6",
            "revision 1 2 3 4 x",
            "revision -1 2 3 4 5",
        ] {
            assert_eq!(RevisionAttributes::of_text(wrong), None, "{wrong}");
        }
    }
}
