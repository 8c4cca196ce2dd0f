//! Version: which bytes an object has, told by what a store says of it.
//!
//! ```text
//!   the store tells        a GET's condition           and of the answer is compared
//!     a strong ETag          If-Match                    size, ETag, version id
//!     a version id           that version                size, version id
//!     neither                If-Unmodified-Since         size, last modification
//!     no time either         it is not read by GETs that have to be of one version
//! ```
//!
//! A web server may tell nothing that changes with the bytes; the crate `object_store` then says that the object is of
//! 1970. Two answers about it, even with the same size, may be of two versions. So no two are the same, and the object
//! is not cached: a cache would mix its versions, and give old bytes for new ones. A weak ETag does not make up for a
//! time.
//!
//! The answer is compared although the request had a condition: some stores, and caches before stores, ignore
//! conditions. A weak ETag (`W/`) does not say that contents are equal, and `If-Match` never holds of it; so it is
//! compared, and the last modification is the condition.
//!
//! Some stores tell one ETag with quotes in a header and without in a list, or leave it out of lists. So quotes are not
//! compared, and a version that was told without an ETag is compared by its times.
//!
//! The version id `null` names no version: S3 gives it to each object that is written while versions are not kept.
//!
//! A version id is not asked for where an ETag will do: reading by id needs another permission at S3.

use object_store::{GetOptions, ObjectMeta};
use quinion::backend::{Attributes, ContentKey, Identity, Version};
use sha2::{Digest, Sha256};

fn strong_e_tag(meta: &ObjectMeta) -> Option<&str> {
    meta.e_tag.as_deref().filter(|tag| !tag.is_empty() && !tag.starts_with("W/"))
}

/// The id that this version has, and no other.
fn version_id(meta: &ObjectMeta) -> Option<&str> {
    meta.version.as_deref().filter(|version| !version.is_empty() && *version != "null")
}

/// Whether the ETag is weak, and its text without the quotes, which not every answer has.
fn compared_tag(meta: &ObjectMeta) -> Option<(bool, &str)> {
    let tag = meta.e_tag.as_deref().filter(|tag| !tag.is_empty())?;
    let (is_weak, tag) = tag.strip_prefix("W/").map_or((false, tag), |tag| (true, tag));
    let inside = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"'));
    Some((is_weak, inside.unwrap_or(tag)))
}

fn is_versioned_by_times(meta: &ObjectMeta) -> bool {
    strong_e_tag(meta).is_none() && version_id(meta).is_none()
}

/// Whether a store tells nothing by which two versions of equal size can be told apart.
pub(crate) fn is_untold(meta: &ObjectMeta) -> bool {
    is_versioned_by_times(meta) && meta.last_modified.timestamp_nanos_opt() == Some(0)
}

pub(crate) fn conditions(meta: &ObjectMeta) -> GetOptions {
    let options = GetOptions::new();
    match (strong_e_tag(meta), version_id(meta)) {
        (Some(tag), _) => options.with_if_match(Some(tag)),
        (None, Some(version)) => options.with_version(Some(version)),
        (None, None) => options.with_if_unmodified_since(Some(meta.last_modified)),
    }
}

/// Not even the same answer twice, if nothing tells versions apart.
pub(crate) fn is_same(known: &ObjectMeta, found: &ObjectMeta) -> bool {
    let known_tag = compared_tag(known);
    let is_versioned = version_id(known).is_some() && version_id(found).is_some();
    let needs_times = strong_e_tag(known).is_none() && !is_versioned;
    !is_untold(known)
        && known.size == found.size
        && (known_tag.is_none() || known_tag == compared_tag(found))
        && (!is_versioned || version_id(known) == version_id(found))
        && (!needs_times || known.last_modified == found.last_modified)
}

pub(crate) fn describe(meta: &ObjectMeta) -> String {
    let size = meta.size;
    match (&meta.e_tag, version_id(meta)) {
        (Some(tag), _) => format!("{size} bytes with ETag {tag}"),
        (None, Some(version)) => format!("{size} bytes, version {version}"),
        (None, None) => format!("{size} bytes of {}", meta.last_modified),
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct VersionNames {
    /// While this process runs: a file of its own that never changes.
    pub attributes: Attributes,
    /// For ever. `None`: the store has no lasting name, or only times tell versions apart, and two changes in one
    /// second have one time.
    pub content_key: Option<ContentKey>,
}

/// `lasts`: whether the store's name does.
pub(crate) fn names(store_name: &[u8], lasts: bool, meta: &ObjectMeta) -> VersionNames {
    let modified = meta.last_modified.timestamp_nanos_opt().unwrap_or(0);
    let digest = digest(store_name, meta);
    VersionNames {
        attributes: Attributes {
            identity: identity(&digest),
            version: Version { modified, changed: modified, settled: true, steps: true },
            size: meta.size,
        },
        content_key: (lasts && !is_versioned_by_times(meta)).then_some(ContentKey(digest)),
    }
}

fn identity(digest: &[u8; 32]) -> Identity {
    Identity::of_digest(std::array::from_fn(|at| digest[at]))
}

fn digest(store_name: &[u8], meta: &ObjectMeta) -> [u8; 32] {
    let mut hasher = Sha256::new_with_prefix(b"quinion object 1");
    // Each with its length, so that no two lists of parts run into the same bytes.
    let mut add = |part: Option<&[u8]>| {
        hasher.update(part.map_or(u64::MAX, |part| part.len() as u64).to_le_bytes());
        hasher.update(part.unwrap_or_default());
    };
    add(Some(store_name));
    add(Some(meta.location.as_ref().as_bytes()));
    let tag = compared_tag(meta);
    add(tag.map(|(_, tag)| tag.as_bytes()));
    add(tag.map(|(is_weak, _)| if is_weak { &b"weak"[..] } else { b"strong" }));
    add(version_id(meta).map(str::as_bytes));
    add(Some(&meta.size.to_le_bytes()));
    let time = (meta.last_modified.timestamp(), meta.last_modified.timestamp_subsec_nanos());
    let time = [time.0.to_le_bytes(), u64::from(time.1).to_le_bytes()].concat();
    add(is_versioned_by_times(meta).then_some(&time));
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::path::Path;

    fn meta(key: &str, size: u64, e_tag: Option<&str>, version: Option<&str>, seconds: i64) -> ObjectMeta {
        let last_modified = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds as u64);
        ObjectMeta {
            location: Path::from(key),
            last_modified: last_modified.into(),
            size,
            e_tag: e_tag.map(str::to_owned),
            version: version.map(str::to_owned),
        }
    }

    fn identity_of(store_name: &[u8], meta: &ObjectMeta) -> Identity {
        names(store_name, true, meta).attributes.identity
    }

    #[test]
    fn a_name_lasts_if_the_stores_does_and_more_than_times_tell_versions_apart() {
        let key = |lasts, meta| names(b"s", lasts, &meta).content_key;
        assert!(key(true, meta("a", 1, Some("\"x\""), None, 5)).is_some());
        assert!(key(true, meta("a", 1, None, Some("v"), 5)).is_some());
        assert_eq!(key(false, meta("a", 1, Some("\"x\""), None, 5)), None);
        assert_eq!(key(true, meta("a", 1, None, None, 5)), None);
        assert_eq!(key(true, meta("a", 1, Some("W/\"x\""), None, 5)), None);
        assert_eq!(key(true, meta("a", 1, None, Some("null"), 5)), None);
    }

    #[test]
    fn each_part_of_a_version_makes_another_identity() {
        let all = [
            identity_of(b"s", &meta("a", 1, Some("\"x\""), None, 5)),
            identity_of(b"t", &meta("a", 1, Some("\"x\""), None, 5)),
            identity_of(b"s", &meta("b", 1, Some("\"x\""), None, 5)),
            identity_of(b"s", &meta("a", 2, Some("\"x\""), None, 5)),
            identity_of(b"s", &meta("a", 1, Some("\"y\""), None, 5)),
            identity_of(b"s", &meta("a", 1, Some("\"x\""), Some("1"), 5)),
            identity_of(b"s", &meta("a", 1, None, None, 5)),
            identity_of(b"s", &meta("a", 1, None, None, 6)),
            identity_of(b"sa", &meta("", 1, Some("\"x\""), None, 5)),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|other| other != one), "{at}");
        }
        let unversioned = |seconds| identity_of(b"s", &meta("a", 1, None, Some("null"), seconds));
        assert_ne!(unversioned(5), unversioned(6), "each of them has that id");
        let later = identity_of(b"s", &meta("a", 1, Some("\"x\""), None, 9));
        assert_eq!(all[0], later, "the same bytes put again, by the word of a strong ETag");
    }

    #[test]
    fn conditions_are_the_strongest_that_there_are() {
        let by_tag = conditions(&meta("a", 1, Some("\"x\""), Some("v"), 5));
        assert_eq!((by_tag.if_match.as_deref(), by_tag.version), (Some("\"x\""), None));
        let by_version = conditions(&meta("a", 1, Some("W/\"x\""), Some("v"), 5));
        assert_eq!((by_version.if_match, by_version.version.as_deref()), (None, Some("v")));
        let by_time = conditions(&meta("a", 1, Some("W/\"x\""), None, 5));
        assert!(by_time.if_match.is_none() && by_time.if_unmodified_since.is_some());
        let unversioned = conditions(&meta("a", 1, None, Some("null"), 5));
        assert!(unversioned.version.is_none() && unversioned.if_unmodified_since.is_some());
    }

    #[test]
    fn an_answer_of_another_version_is_an_error() {
        let known = meta("a", 10, Some("\"x\""), None, 5);
        assert!(is_same(&known, &meta("a", 10, Some("\"x\""), Some("v"), 7)));
        for other in [
            meta("a", 11, Some("\"x\""), None, 5),
            meta("a", 10, Some("\"y\""), None, 5),
            meta("a", 10, None, None, 5),
        ] {
            assert!(!is_same(&known, &other), "{other:?}");
        }
        let by_time = meta("a", 10, None, None, 5);
        assert!(is_same(&by_time, &meta("a", 10, None, None, 5)));
        assert!(!is_same(&by_time, &meta("a", 10, None, None, 6)));
        let weak = meta("a", 10, Some("W/\"x\""), None, 5);
        assert!(is_same(&weak, &meta("a", 10, Some("W/\"x\""), None, 5)));
        assert!(
            !is_same(&weak, &meta("a", 10, Some("W/\"x\""), None, 6)),
            "as good as each other, not equal"
        );
        assert!(!is_same(&known, &meta("a", 10, Some("W/\"x\""), None, 5)));
        let by_version = meta("a", 10, None, Some("v"), 5);
        assert!(is_same(&by_version, &meta("a", 10, None, Some("v"), 6)));
        assert!(!is_same(&by_version, &meta("a", 10, None, Some("w"), 5)));
        assert!(!is_same(&by_version, &meta("a", 10, None, None, 6)), "the answer tells no version id");
        let unversioned = meta("a", 10, None, Some("null"), 5);
        assert!(is_same(&unversioned, &meta("a", 10, None, Some("null"), 5)));
        assert!(!is_same(&unversioned, &meta("a", 10, None, Some("null"), 6)), "written over");
    }

    #[test]
    fn two_answers_without_a_tag_an_id_and_a_time_are_never_of_one_version() {
        for (e_tag, version, seconds, is_told) in [
            (None, None, 0, false),
            (Some(""), None, 0, false),
            (Some("W/\"x\""), None, 0, false),
            (Some("\"x\""), None, 0, true),
            (None, Some("v"), 0, true),
            (None, None, 1, true),
        ] {
            let meta = meta("a", 10, e_tag, version, seconds);
            assert_eq!((!is_untold(&meta), is_same(&meta, &meta)), (is_told, is_told), "{meta:?}");
        }
    }

    #[test]
    fn lists_and_heads_that_write_one_etag_in_two_ways_tell_one_version() {
        let (head, list) = (meta("a", 10, Some("\"x\""), None, 5), meta("a", 10, Some("x"), None, 5));
        assert!(is_same(&list, &head) && is_same(&head, &list));
        assert_eq!(identity_of(b"s", &list), identity_of(b"s", &head));
        let without = meta("a", 10, None, None, 5);
        assert!(is_same(&without, &head), "a list without ETags");
        assert!(!is_same(&without, &meta("a", 10, Some("\"x\""), None, 6)));
        for odd in ["\"", "\"x", "x\"", "W/", "W/x"] {
            let odd = meta("a", 10, Some(odd), None, 5);
            assert!(is_same(&odd, &odd) && !is_same(&head, &odd));
        }
    }
}
