//! Keys: the endpoint's own pairs of access key and secret, by which requests are signed. Clients never see those of
//! the stores behind it.
//!
//! ```text
//!   # a line for each pair; comments and empty lines are skipped
//!   ACCESS-KEY SECRET
//! ```
//!
//! The file is read once, at the start. It must be this user's or root's, and closed to all others.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use s3s::auth::{S3Auth, SecretKey};
use s3s::{S3Error, S3ErrorCode, S3Result};

/// A larger file has no keys.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Default)]
pub struct Keys(HashMap<String, SecretKey>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("pairs", &self.0.len()).finish_non_exhaustive()
    }
}

impl Keys {
    /// The pairs in a file.
    ///
    /// # Errors
    /// It cannot be read, others can read it, or it has a line that is no pair. No error has a part of it.
    pub fn read(path: &Path) -> Result<Self, String> {
        let named = |why: &dyn fmt::Display| format!("the key file {}: {why}", path.display());
        let file = File::open(path).map_err(|error| named(&error))?;
        let about = file.metadata().map_err(|error| named(&error))?;
        if !about.is_file() || about.len() > FILE_BYTES_MAX {
            return Err(named(
                &"it is not a regular file of at most 1 MiB with \"ACCESS-KEY SECRET\" on each line",
            ));
        }
        let owner = about.uid();
        if owner != rustix::process::geteuid().as_raw() && owner != 0 {
            return Err(named(&"it is another user's; name one that is yours"));
        }
        if about.mode() & 0o077 != 0 {
            return Err(named(&format!(
                "other users have rights on it (mode {:o}); take them away by chmod 600",
                about.mode() & 0o777
            )));
        }
        let mut text = String::new();
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(|error| named(&error))?;
        let keys = Self::of(&text).map_err(|why| named(&why))?;
        if keys.0.is_empty() {
            Err(named(&"it has no line \"ACCESS-KEY SECRET\"; write one"))
        } else {
            Ok(keys)
        }
    }

    fn of(text: &str) -> Result<Self, String> {
        let mut keys = HashMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let mut words = line.split_ascii_whitespace();
            let (key, secret, more) = match (words.next(), words.next(), words.next()) {
                (None, ..) => continue,
                (Some(key), ..) if key.starts_with('#') => continue,
                (Some(key), secret, more) => (key, secret, more),
            };
            let is_key = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
            let (true, Some(secret), None) = (is_key, secret, more) else {
                return Err(format!("line {number} is not \"ACCESS-KEY SECRET\""));
            };
            if keys.insert(key.to_owned(), SecretKey::from(secret)).is_some() {
                return Err(format!("line {number} has an access key that is there already; give each once"));
            }
        }
        Ok(Self(keys))
    }
}

#[async_trait::async_trait]
impl S3Auth for Keys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        let unknown =
            || S3Error::with_message(S3ErrorCode::InvalidAccessKeyId, "The endpoint has no such access key.");
        self.0.get(access_key).cloned().ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    fn read(text: &str, mode: u32) -> Result<Keys, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        Keys::read(file.path())
    }

    #[test]
    fn a_file_of_pairs_is_read_if_it_is_closed_to_others() {
        let text = "# ours\n\none first-secret\n  two\tother/secret+  \n";
        let keys = read(text, 0o600).unwrap();
        assert_eq!((keys.0["one"].expose(), keys.0["two"].expose()), ("first-secret", "other/secret+"));
        assert!(read(text, 0o400).is_ok());
        for mode in [0o644, 0o640, 0o602, 0o610] {
            let error = read(text, mode).unwrap_err();
            assert!(error.contains("chmod 600"), "{mode:o}: {error}");
        }
    }

    #[test]
    fn a_line_that_is_no_pair_is_told_by_its_number_and_never_shown() {
        for (text, why) in [
            ("one secret\nhidden", "line 2"),
            ("one secret more-hidden", "line 1"),
            ("hid/den secret", "line 1"),
            ("one hidden\none other", "line 2"),
            ("# hidden", "it has no line"),
        ] {
            let error = read(text, 0o600).unwrap_err();
            assert!(error.contains(why) && !error.contains("hid"), "{error}");
        }
        assert!(Keys::read(Path::new("/")).unwrap_err().contains("not a regular file"));
    }

    #[test]
    fn text_for_people_has_no_secret() {
        assert_eq!(format!("{:?}", Keys::of("one secret").unwrap()), "Keys { pairs: 1, .. }");
    }
}
