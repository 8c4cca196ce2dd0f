//! Stores: which store a URL leads to, and the objects that were opened for clients.
//!
//! ```text
//!   "s3://bucket/table/part-0"   longest prefix that ends at a slash: "s3://bucket"   key: "table/part-0"
//! ```
//!
//! A client gives a name and nothing else, and gets what the server's own store can read. So a prefix says what all
//! clients may read; a URL without one is refused. A prefix does not name its store beyond this server, since another
//! server may have another endpoint for it: a disk tier that is to be warm after a restart wants a name in the store's
//! options.
//!
//! Behind the URL a client says in lines what else it wants: `\nfirst 1048576`, if it is about to read an object's
//! first bytes; `\nfreshness 30`, how old what the server knows of the object may be. A URL has no line break, so
//! that no other name looks so. A line that is not understood is an error.
//!
//! The name `\ntotals`, which is no URL, asks for the server's numbers (`totals.rs`).
//!
//! A client is told of an object in lines, each a word and a value.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use object_store::{Attribute, Attributes, ObjectStore, path::Path};
use percent_encoding::percent_decode_str;
use quinion::backend::{Attributes as FileAttributes, Identity};
use quinion::internals::serving::ServedCache;
use quinion::internals::units::PAGE_SIZE;
use quinion::{Cache, File};
use quinion_object::{
    AnswerTimes, FetchError, FetchStats, FirstByte, Freshness, ObjectCache, ObjectFile, Options,
};
use quinion_owner::internals::serve::NameRefusal;
use quinion_owner::internals::viewer::handshake::NAME_TEXT_MAX;
use quinion_owner::internals::viewer::sys::Errno;
use quinion_owner::{NameOpener, NamedObject, RevisionRequest};
use sha2::{Digest, Sha256};

use crate::clock_steps::BackwardClockSteps;
use crate::error::{CHANGED, FETCH};
use crate::revision_attributes::RevisionAttributes;
use crate::totals::{ClientCounts, ServerTotals, TOTALS, TOTALS_NAME, TOTALS_PLACE};

const UNKNOWN_OPTION: &str =
    "the client asks for an option that this server does not have; use the same version for both";

pub(crate) struct StoreRequest {
    pub(crate) prefix: String,
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) options: Options,
}

#[derive(Debug)]
pub(crate) struct Stores {
    cache: Cache,
    /// The longest prefixes first. The lock is held for looks and changes alone, and no store is asked under it.
    stores: RwLock<Vec<StoreEntry>>,
    count: AtomicU64,
    /// `None`: no revisions of files are opened.
    revisions: Option<BackwardClockSteps>,
    /// Set when the service has been started.
    clients: OnceLock<ClientCounts>,
}

#[derive(Clone, Debug)]
struct StoreEntry {
    prefix: String,
    number: u64,
    objects: ObjectCache,
    /// A digest of its name: clients are told it.
    name: Option<String>,
}

/// A store's name may have its address, its account, and all else that an operator has put there. Clients compare it,
/// and need not read it.
fn digest_of_name(name: &str) -> String {
    let digest = Sha256::new_with_prefix(b"quinion store 1").chain_update(name).finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Stores {
    /// # Errors
    /// A prefix is there twice; those of [`Stores::set`].
    pub(crate) fn new(cache: &Cache, requests: Vec<StoreRequest>) -> Result<Self, String> {
        let stores = Self {
            cache: cache.clone(),
            stores: RwLock::default(),
            count: AtomicU64::new(0),
            revisions: None,
            clients: OnceLock::new(),
        };
        for request in requests {
            let prefix = trimmed(&request.prefix).to_owned();
            if stores.set(request)? {
                return Err(format!("there are two stores for {prefix}; give each a prefix of its own"));
            }
        }
        Ok(stores)
    }

    pub(crate) fn with_revisions(self) -> Self {
        Self { revisions: Some(BackwardClockSteps::default()), ..self }
    }

    /// Adds a store in the place of that of the same prefix; whether there was one. If that had the same name of its
    /// own, it is the same store, and the new one fetches open objects.
    ///
    /// # Errors
    /// The prefix is no URL; what [`ObjectCache::new`] says.
    pub(crate) fn set(&self, request: StoreRequest) -> Result<bool, String> {
        let StoreRequest { prefix, store, options } = request;
        let prefix = trimmed(&prefix).to_owned();
        if prefix.split_once("://").is_none_or(|(scheme, _)| scheme.is_empty()) {
            return Err(format!("{prefix:?} is not a URL prefix; name a store as s3://bucket"));
        }
        let name = options.name().map(digest_of_name);
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(same) = self.all().into_iter().find(|other| other.prefix == prefix && other.name == name)
            && name.is_some()
        {
            same.objects.set_store(store, options).map_err(|error| error.to_string())?;
            let mut stores = self.stores.write().unwrap_or_else(PoisonError::into_inner);
            // A store that hangs holds up no request to the one in its place.
            stores.iter_mut().filter(|other| other.prefix == prefix).for_each(|other| other.number = number);
            return Ok(true);
        }
        let objects =
            ObjectCache::new(self.cache.clone(), store, options).map_err(|error| error.to_string())?;
        let mut stores = self.stores.write().unwrap_or_else(PoisonError::into_inner);
        let old = stores.iter().position(|other| other.prefix == prefix);
        let old = old.map(|place| stores.remove(place));
        stores.push(StoreEntry { prefix, number, objects, name });
        stores.sort_by_key(|store| std::cmp::Reverse(store.prefix.len()));
        drop(stores);
        Ok(old.is_some())
    }

    /// Whether there was a store of that prefix. Open objects stay open.
    pub(crate) fn remove(&self, prefix: &str) -> bool {
        let mut stores = self.stores.write().unwrap_or_else(PoisonError::into_inner);
        let place = stores.iter().position(|store| store.prefix == trimmed(prefix));
        let removed = place.map(|place| stores.remove(place));
        drop(stores);
        removed.is_some()
    }

    fn all(&self) -> Vec<StoreEntry> {
        self.stores.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn stats(&self) -> Vec<(String, FetchStats)> {
        self.all().into_iter().map(|store| (store.prefix, store.objects.stats())).collect()
    }

    pub(crate) fn take_failures(&self) -> Vec<(String, FetchError)> {
        let failures =
            self.all().into_iter().map(|store| Some((store.prefix, store.objects.take_failure()?)));
        failures.flatten().collect()
    }

    pub(crate) fn count_clients_by(&self, clients: ClientCounts) {
        self.clients.set(clients).expect("a server is started once");
    }

    /// `None`: the server is about to start, or has ended.
    pub(crate) fn totals(&self) -> Option<ServerTotals> {
        let (clients, cache) = (self.clients.get()?.now()?, self.cache.stats());
        let fetched = self.stats();
        let sum = |of: fn(&FetchStats) -> u64| fetched.iter().map(|(_, stats)| of(stats)).sum();
        Some(ServerTotals {
            heads: sum(|stats| stats.heads),
            gets: sum(|stats| stats.gets),
            fetched_bytes: sum(|stats| stats.bytes),
            memory_bytes: cache.memory_bytes,
            cached_bytes: cache.cached_pages * PAGE_SIZE as u64,
            pinned_bytes: cache.pinned_bytes,
            ..clients
        })
    }

    fn totals_reply(&self) -> NameRefusal {
        match self.totals() {
            Some(totals) => refusal(TOTALS, totals.text()),
            None => refusal(Errno::AGAIN, "the server is about to start".into()),
        }
    }

    pub(crate) fn first_bytes(&self) -> Vec<(String, FirstByte)> {
        let times = self.all().into_iter().map(|store| Some((store.prefix, store.objects.first_byte()?)));
        times.flatten().collect()
    }

    pub(crate) fn answer_times(&self) -> Vec<(String, AnswerTimes)> {
        self.all().into_iter().map(|store| (store.prefix, store.objects.answer_times())).collect()
    }

    fn find<'n>(&self, name: &'n [u8]) -> Result<(StoreEntry, &'n str), NameRefusal> {
        let url = std::str::from_utf8(name).map_err(|_| refusal(Errno::INVAL, "a URL is UTF-8".into()))?;
        let key_of = |prefix: &str| url.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/'));
        let stores = self.stores.read().unwrap_or_else(PoisonError::into_inner);
        let found = stores.iter().find_map(|store| key_of(&store.prefix).map(|key| (store.clone(), key)));
        found.ok_or_else(|| {
            let prefixes: Vec<_> = stores.iter().map(|store| store.prefix.as_str()).collect();
            let text = format!("{url}: the server has no store for it; it has [{}]", prefixes.join(", "));
            // Not the error of a missing object: there may be one.
            refusal(Errno(libc::ENODEV), text)
        })
    }

    /// Opens the object at a URL; `name` has that alone. Waits for the store.
    pub(crate) fn open_object(&self, name: &[u8], request: OpenRequest) -> Result<OpenedObject, NameRefusal> {
        let (StoreEntry { mut objects, name: store, .. }, key) = self.find(name)?;
        let failed = |error: Errno, text: &dyn fmt::Display| {
            refusal(error, format!("{}: {text}", String::from_utf8_lossy(name)))
        };
        let key = percent_decode_str(key).decode_utf8().map_err(|error| failed(Errno::INVAL, &error))?;
        let path = Path::parse(&key).map_err(|error| failed(Errno::INVAL, &error))?;
        if path.as_ref() != key {
            return Err(failed(
                Errno::INVAL,
                &"a key that begins or ends with a slash cannot be opened; leave the slash out",
            ));
        }
        if let Some(freshness) = request.freshness {
            objects = objects.with_freshness(freshness);
        }
        let opened = match request.first {
            Some(len) => objects.open_first(&path, len),
            None => objects.open_with_attributes(&path),
        };
        let (file, attributes) = opened.map_err(|error| failed(errno_of_open(&error), &error))?;
        Ok(OpenedObject { file, attributes, store, ahead: objects.ahead_max() })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct OpenRequest {
    /// How many of the first bytes are about to be read, if that is said.
    pub(crate) first: Option<u64>,
    /// In place of the store's options.
    pub(crate) freshness: Option<Freshness>,
}

impl OpenRequest {
    pub(crate) fn name(self, url: &str) -> String {
        let mut name = url.to_owned();
        if let Some(len) = self.first {
            name += &format!("\nfirst {len}");
        }
        if let Some(freshness) = self.freshness {
            name += &format!("\nfreshness {freshness}");
        }
        name
    }

    /// `None` if they are not understood.
    fn of<'l>(lines: impl Iterator<Item = &'l [u8]>) -> Option<Self> {
        let mut request = Self::default();
        for line in lines {
            match std::str::from_utf8(line).ok()?.split_once(' ')? {
                ("first", len) => request.first = Some(len.parse().ok()?),
                ("freshness", freshness) => request.freshness = Some(freshness.parse().ok()?),
                _ => return None,
            }
        }
        Some(request)
    }
}

fn url_of(name: &[u8]) -> &[u8] {
    name.split(|&byte| byte == b'\n').next().unwrap_or(name)
}

fn trimmed(prefix: &str) -> &str {
    prefix.trim_end_matches('/')
}

fn refusal(error: Errno, text: String) -> NameRefusal {
    NameRefusal { error, text }
}

impl NameOpener for Stores {
    fn place(&self, name: &[u8]) -> Result<u64, NameRefusal> {
        if name == TOTALS_NAME {
            return Ok(TOTALS_PLACE);
        }
        self.find(url_of(name)).map(|(store, _)| store.number)
    }

    fn open(&self, name: &[u8]) -> Result<Arc<dyn NamedObject>, NameRefusal> {
        if name == TOTALS_NAME {
            return Err(self.totals_reply());
        }
        let (name, lines) = (url_of(name), name.split(|&byte| byte == b'\n').skip(1));
        let unknown =
            || refusal(Errno::INVAL, format!("{}: {UNKNOWN_OPTION}", String::from_utf8_lossy(name)));
        let request = OpenRequest::of(lines).ok_or_else(unknown)?;
        Ok(Arc::new(self.open_object(name, request)?))
    }

    fn opens_revisions(&self) -> bool {
        self.revisions.is_some()
    }

    fn open_revision(&self, request: RevisionRequest<'_>) -> Result<Arc<dyn NamedObject>, NameRefusal> {
        let none = || refusal(Errno::OPNOTSUPP, "this server opens no revisions of local files".into());
        let clock_steps = self.revisions.as_ref().ok_or_else(none)?;
        Ok(Arc::new(OpenedRevision::open(&self.cache, clock_steps.count(), request)?))
    }
}

#[derive(Debug)]
struct OpenedRevision {
    file: File,
    attributes: RevisionAttributes,
}

impl OpenedRevision {
    fn open(cache: &Cache, clock_steps: u64, request: RevisionRequest<'_>) -> Result<Self, NameRefusal> {
        let RevisionRequest { name, file } = request;
        let name = [&clock_steps.to_le_bytes()[..], name].concat();
        let mut attributes = RevisionAttributes::default();
        let opened = cache.open_revision(file, |now| {
            attributes = RevisionAttributes::of(now);
            identity_of_revision(&name, now)
        });
        let file = opened.map_err(|error| {
            let number = error.raw_os_error().unwrap_or(libc::EIO);
            refusal(Errno(number), format!("a revision of a file: {error}"))
        })?;
        Ok(Self { file, attributes })
    }
}

impl NamedObject for OpenedRevision {
    fn file(&self) -> &File {
        &self.file
    }

    fn text(&self) -> String {
        self.attributes.text()
    }

    fn announce(&self, _position: u64, _len: u64) {}

    fn will_need(&self, position: u64, len: u64) {
        let _ = self.file.will_need(position, len); // what cannot be is read later
    }

    fn errno(&self, error: quinion::Error) -> Errno {
        match error.kind() {
            quinion::ErrorKind::NoMemory => Errno(libc::ENOMEM),
            _ => error.raw_os_error().map_or(Errno::IO, Errno),
        }
    }
}

/// Another for another file, another size, other times, and another name.
fn identity_of_revision(name: &[u8], now: &FileAttributes) -> Identity {
    let mut hasher = Sha256::new_with_prefix(b"quinion revision 1");
    let Identity { device, inode, born } = now.identity;
    let numbers =
        [device, inode, born as u64, now.size, now.version.modified as u64, now.version.changed as u64];
    numbers.iter().for_each(|number| hasher.update(number.to_le_bytes()));
    hasher.update(name);
    let digest = hasher.finalize();
    Identity::of_digest(std::array::from_fn(|at| digest[at]))
}

fn errno_of_open(error: &quinion_object::Error) -> Errno {
    use object_store::Error as StoreError;
    match error {
        quinion_object::Error::Open { source, .. } => match source {
            StoreError::NotFound { .. } => Errno(libc::ENOENT),
            StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => Errno::ACCES,
            _ => FETCH,
        },
        quinion_object::Error::Cache { .. } => Errno(libc::ENOMEM),
        _ => Errno::IO,
    }
}

#[derive(Debug)]
pub(crate) struct OpenedObject {
    pub(crate) file: ObjectFile,
    attributes: Attributes,
    store: Option<String>,
    ahead: u64,
}

impl NamedObject for OpenedObject {
    fn file(&self) -> &File {
        self.file.file()
    }

    fn text(&self) -> String {
        let meta = self.file.meta();
        let time = SystemTime::from(meta.last_modified);
        let time = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let e_tag = meta.e_tag.clone();
        let (version, attributes) = (meta.version.clone(), self.attributes.clone());
        let store = self.store.clone();
        let (size, ahead) = (meta.size, self.ahead);
        let metadata = ObjectMetadata { size, modified: time, e_tag, version, store, ahead, attributes };
        metadata.text()
    }

    fn announce(&self, position: u64, len: u64) {
        self.file.announce(position..position.saturating_add(len));
    }

    fn will_need(&self, position: u64, len: u64) {
        let _ = self.file.prefetch(position..position.saturating_add(len)); // what cannot be is read later
    }

    fn errno(&self, error: quinion::Error) -> Errno {
        match self.file.error_of(error) {
            quinion_object::Error::Changed(_) => CHANGED,
            quinion_object::Error::Fetch(_) => FETCH,
            quinion_object::Error::Cache { source, .. } if source.kind() == quinion::ErrorKind::NoMemory => {
                Errno(libc::ENOMEM)
            }
            _ => Errno::IO,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ObjectMetadata {
    pub(crate) size: u64,
    /// Since 1970.
    pub(crate) modified: Duration,
    pub(crate) e_tag: Option<String>,
    pub(crate) version: Option<String>,
    /// The store: an object of another store with the same path and version may have other bytes.
    pub(crate) store: Option<String>,
    pub(crate) ahead: u64,
    pub(crate) attributes: Attributes,
}

impl ObjectMetadata {
    /// Whether a strong ETag or a version id names the version.
    pub(crate) fn names_its_version(&self) -> bool {
        let is_strong = |tag: &String| !tag.is_empty() && !tag.starts_with("W/");
        // S3 calls each object `null` that is written while versions are not kept.
        self.version.as_ref().is_some_and(|version| version != "null")
            || self.e_tag.as_ref().is_some_and(is_strong)
    }

    /// The time counts as well: a store in memory begins its ETags anew.
    pub(crate) fn is_same_version(&self, other: &Self) -> bool {
        self.version_attributes() == other.version_attributes() && self.names_its_version()
    }

    /// The attributes of the version, to be compared.
    pub(crate) fn version_attributes(&self) -> impl PartialEq + '_ {
        (self.size, self.modified, &self.e_tag, &self.version, &self.store)
    }

    fn text(&self) -> String {
        let one_line = |value: &&String| !value.contains('\n');
        let mut lines = vec![
            format!("size {}", self.size),
            format!("modified {} {}", self.modified.as_secs(), self.modified.subsec_nanos()),
            format!("ahead {}", self.ahead),
        ];
        lines.extend(self.e_tag.iter().filter(one_line).map(|tag| format!("etag {tag}")));
        lines.extend(self.version.iter().filter(one_line).map(|version| format!("version {version}")));
        lines.extend(self.store.iter().map(|store| format!("store {store}")));
        let attributes = self.attributes.iter().filter_map(|(kind, value)| attribute_line(kind, value));
        let attributes: Vec<_> = attributes.collect();
        // All of them, or none: a value that is cut off would be another value.
        let len = |lines: &[String]| lines.iter().map(|line| line.len() + 1).sum::<usize>();
        if len(&lines) + len(&attributes) <= NAME_TEXT_MAX {
            lines.extend(attributes);
        }
        lines.join("\n")
    }

    pub(crate) fn of(text: &str) -> Option<Self> {
        let value = |word: &str| {
            text.split('\n').find_map(|line| line.strip_prefix(word).and_then(|rest| rest.strip_prefix(' ')))
        };
        let (seconds, nanos) = value("modified")?.split_once(' ')?;
        let modified =
            Duration::new(seconds.parse().ok()?, nanos.parse().ok().filter(|&n| n < 1_000_000_000)?);
        let attributes = text.split('\n').filter_map(|line| line.strip_prefix("attribute "));
        let own = |word| value(word).map(str::to_owned);
        Some(Self {
            size: value("size")?.parse().ok()?,
            modified,
            e_tag: own("etag"),
            version: own("version"),
            store: own("store"),
            ahead: value("ahead")?.parse().ok()?,
            attributes: attributes.filter_map(attribute_of).collect(),
        })
    }
}

static ATTRIBUTES: [(Attribute, &str); 6] = [
    (Attribute::ContentDisposition, "disposition"),
    (Attribute::ContentEncoding, "encoding"),
    (Attribute::ContentLanguage, "language"),
    (Attribute::ContentType, "type"),
    (Attribute::CacheControl, "cache-control"),
    (Attribute::StorageClass, "class"),
];

/// `None` of one that is no line, or of an unknown kind.
fn attribute_line(kind: &Attribute, value: &str) -> Option<String> {
    let word = ATTRIBUTES.iter().find(|(other, _)| other == kind).map(|(_, word)| (*word).to_owned());
    let word = word.or_else(|| match kind {
        // With the length of the name, which may have spaces.
        Attribute::Metadata(name) => Some(format!("metadata {} {name}", name.len())),
        _ => None,
    })?;
    Some(format!("attribute {word} {value}")).filter(|line| !line.contains('\n'))
}

fn attribute_of(line: &str) -> Option<(Attribute, String)> {
    let (word, rest) = line.split_once(' ')?;
    if let Some((kind, _)) = ATTRIBUTES.iter().find(|(_, other)| *other == word) {
        return Some((kind.clone(), rest.to_owned()));
    }
    let (len, rest) = rest.split_once(' ').filter(|_| word == "metadata")?;
    let (name, value) = rest.split_at_checked(len.parse().ok()?)?;
    Some((Attribute::Metadata(name.to_owned().into()), value.strip_prefix(' ')?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;
    use quinion::internals::arena::LAYOUT_VERSION;

    fn stores(prefixes: &[&str]) -> Result<Stores, String> {
        let cache = Cache::builder().memory(16 << 20).build().unwrap();
        let request = |prefix: &&str| StoreRequest {
            prefix: prefix.to_string(),
            store: Arc::new(InMemory::new()),
            options: Options::new(),
        };
        Stores::new(&cache, prefixes.iter().map(request).collect())
    }

    /// Sides of one version of the layout understand each other's lines: another line needs another version, as the
    /// tables of `quinion-view` do (`view/layouts`).
    #[test]
    fn names_and_answers_are_those_of_this_version_of_the_layout() {
        let request =
            |freshness| OpenRequest { first: Some(64), freshness: Some(freshness) }.name("s3://b/k");
        let metadata = ObjectMetadata {
            size: 5,
            modified: Duration::new(7, 8),
            e_tag: Some("\"tag\"".to_owned()),
            version: Some("v1".to_owned()),
            store: Some("s".to_owned()),
            ahead: 9,
            attributes: [(Attribute::ContentType, "text/plain"), (Attribute::Metadata("a b".into()), "c d")]
                .into_iter()
                .collect(),
        };
        let mut lines: Vec<_> = metadata.text().split('\n').map(str::to_owned).collect();
        lines.sort(); // attributes have no order
        let text = lines.join("\n");
        let (always, time) = (request(Freshness::Always), request(Freshness::For(Duration::new(1, 2))));
        let known = (
            11,
            "s3://b/k\nfirst 64\nfreshness always",
            "s3://b/k\nfirst 64\nfreshness 1.000000002",
            "s3://b/k\nfirst 64\nfreshness immutable",
            "ahead 9\nattribute metadata 3 a b c d\nattribute type text/plain\netag \"tag\"\nmodified 7 8\nsize 5\n\
             store s\nversion v1",
        );
        let present = (LAYOUT_VERSION, &*always, &*time, &*request(Freshness::Immutable), &*text);
        assert_eq!(present, known, "raise LAYOUT_VERSION with a change of these, and this test");
    }

    #[test]
    fn the_longest_prefix_up_to_a_slash_has_a_url() {
        let stores = stores(&["s3://b", "s3://b/deep/", "s3://bb"]).unwrap();
        let found =
            |url: &str| stores.find(url.as_bytes()).map(|(store, key)| (store.prefix, key.to_owned())).ok();
        let is = |prefix: &str, key: &str| Some((prefix.to_owned(), key.to_owned()));
        assert_eq!(found("s3://b/x/y"), is("s3://b", "x/y"));
        assert_eq!(found("s3://b/deep/y"), is("s3://b/deep", "y"));
        assert_eq!(found("s3://b/deeper/y"), is("s3://b", "deeper/y"));
        assert_eq!(found("s3://bb/y"), is("s3://bb", "y"));
        for url in ["s3://bbb/y", "s3://b", "gs://b/x", "", "/etc/passwd"] {
            assert_eq!(found(url), None, "{url}");
        }
        assert!(stores.find(b"s3://b/\xff").is_err());
        // A prefix that is taken away uncovers the shorter one, and each store has a number of its own.
        let number = |url: &str| stores.place(url.as_bytes()).unwrap();
        let before = number("s3://b/deep/y");
        assert!(stores.remove("s3://b/deep/") && !stores.remove("s3://b/deep") && !stores.remove("s3://x"));
        assert_eq!(found("s3://b/deep/y"), is("s3://b", "deep/y"));
        let again = StoreRequest {
            prefix: "s3://b/deep".into(),
            store: Arc::new(InMemory::new()),
            options: Options::new(),
        };
        assert_eq!(stores.set(again), Ok(false));
        assert_eq!(found("s3://b/deep/y"), is("s3://b/deep", "y"));
        assert!(![before, number("s3://b/x"), number("s3://bb/x")].contains(&number("s3://b/deep/y")));
    }

    #[test]
    fn a_name_may_say_what_is_read_first_and_how_fresh_the_object_is_to_be() {
        let of = |name: &str| OpenRequest::of(name.as_bytes().split(|&byte| byte == b'\n').skip(1));
        let times = [Duration::from_nanos(1), Duration::from_millis(1500), Duration::from_secs(1 << 40)];
        let freshness =
            [Freshness::Always, Freshness::Immutable].into_iter().chain(times.map(Freshness::For));
        for freshness in freshness.map(Some).chain([None]) {
            for first in [None, Some(0), Some(u64::MAX)] {
                let request = OpenRequest { first, freshness };
                let name = request.name("s3://b/x");
                assert_eq!(of(&name), Some(request), "{name:?}");
                assert_eq!(url_of(name.as_bytes()), b"s3://b/x");
            }
        }
        assert_eq!(OpenRequest::default().name("s3://b/x"), "s3://b/x");
        for odd in ["first", "first x", "first 1 ", "freshness", "freshness never", "other 1", "", " "] {
            assert_eq!(of(&format!("s3://b/x\n{odd}")), None, "{odd:?}");
        }
        let error = stores(&["s3://b"]).unwrap().open(b"s3://b/x\nother 1").unwrap_err();
        assert!(error.text.contains("does not have"), "{}", error.text);
    }

    #[test]
    fn prefixes_that_are_none_or_there_twice_are_refused() {
        assert!(stores(&["bucket"]).is_err() && stores(&["://x"]).is_err());
        assert!(stores(&["s3://b", "s3://b/"]).unwrap_err().contains("two stores"));
    }

    #[test]
    fn versions_are_the_same_only_if_all_says_so() {
        let metadata = |size, modified, e_tag: Option<&str>, version: Option<&str>| ObjectMetadata {
            size,
            modified: Duration::from_nanos(modified),
            e_tag: e_tag.map(str::to_owned),
            version: version.map(str::to_owned),
            store: Some("s".into()),
            ahead: 1,
            attributes: Attributes::new(),
        };
        for same in [
            metadata(7, 1, Some("a"), None),
            metadata(7, 1, None, Some("a")),
            metadata(7, 1, Some("W/a"), Some("a")),
        ] {
            assert!(same.is_same_version(&same.clone()));
            for other in [
                ObjectMetadata { size: 8, ..same.clone() },
                ObjectMetadata { modified: Duration::from_nanos(2), ..same.clone() },
                ObjectMetadata { e_tag: Some("b".into()), ..same.clone() },
                ObjectMetadata { version: Some("b".into()), ..same.clone() },
                ObjectMetadata { version: None, e_tag: None, ..same.clone() },
                ObjectMetadata { store: Some("t".into()), ..same.clone() },
                ObjectMetadata { store: None, ..same.clone() },
            ] {
                assert!(!same.is_same_version(&other), "{same:?} {other:?}");
            }
        }
        for unnamed in
            [metadata(7, 1, None, None), metadata(7, 1, Some("W/a"), None), metadata(7, 1, Some(""), None)]
        {
            assert!(!unnamed.is_same_version(&unnamed.clone()), "{unnamed:?}");
        }
    }

    #[test]
    fn clients_are_told_a_stores_name_by_its_digest() {
        let named = |name: &str| StoreRequest {
            prefix: format!("s3://{name}"),
            store: Arc::new(InMemory::new()),
            options: Options::new().store_name(format!("at https://user:word@{name}")),
        };
        let cache = Cache::builder().memory(16 << 20).build().unwrap();
        let stores = Stores::new(&cache, ["a", "b"].map(named).into()).unwrap();
        let told = stores.all().into_iter().map(|store| store.name.unwrap()).collect::<Vec<_>>();
        assert!(
            told[0] != told[1] && told.iter().all(|name| !name.contains("word") && name.len() == 64),
            "{told:?}"
        );
        assert_eq!(digest_of_name("x"), digest_of_name("x"));
    }

    #[test]
    fn an_objects_description_arrives() {
        let some = ObjectMetadata {
            size: 7,
            modified: Duration::new(5, 999_999_999),
            e_tag: Some("\"a b\"".into()),
            version: Some("v 1".into()),
            store: Some("s%20x".into()),
            ahead: 1 << 40,
            attributes: Attributes::from_iter([
                (Attribute::ContentType, "text/plain; charset=utf-8"),
                (Attribute::StorageClass, ""),
                (Attribute::Metadata("a name ".into()), " 1 2 "),
            ]),
        };
        let none =
            ObjectMetadata { e_tag: None, version: None, attributes: Attributes::new(), ..some.clone() };
        for metadata in [some, none] {
            assert_eq!(ObjectMetadata::of(&metadata.text()), Some(metadata));
        }
        for text in [
            "",
            "size 1",
            "size 1\nmodified 1 1",
            "size x\nmodified 1 1\nahead 1",
            "size 1\nmodified 1 1000000000\nahead 1",
            "modified 1 1\nahead 1",
        ] {
            assert_eq!(ObjectMetadata::of(text), None, "{text:?}");
        }
        let attributes = Attributes::from_iter([(Attribute::ContentType, "x\nsize 9")]);
        let (e_tag, modified) = (Some("x\nsize 9".into()), Duration::ZERO);
        let forged =
            ObjectMetadata { size: 1, modified, e_tag, version: None, store: None, ahead: 0, attributes };
        let arrived = ObjectMetadata::of(&forged.text()).unwrap();
        assert_eq!((arrived.size, arrived.attributes.len()), (1, 0));
        let long = Attributes::from_iter([(Attribute::ContentType, "x".repeat(NAME_TEXT_MAX))]);
        let long = ObjectMetadata { attributes: long, ..forged }.text();
        assert!(long.len() < 100, "what would be cut off is not sent");
    }
}
