//! Config: the server's options, from a file and from the command line.
//!
//! ```toml
//! name = "node"
//! memory = "8G"
//! populate = true
//! clients = 1024
//! pin_percent = 25
//! metrics = "127.0.0.1:9464"
//!
//! [disk]
//! folder = "/var/cache/quinion"
//! size = "200G"
//!
//! [price]
//! gets_1000 = 0.0004
//! gigabyte = 0.09
//!
//! [[store]]
//! prefix = "s3://bucket"
//! endpoint = "http://127.0.0.1:9000"
//! region = "us-east-1"
//! ca_certificates = "/etc/ssl/own.pem"
//! freshness = "30"
//! deadline = 30          # and others, for how it is fetched (`fetching.rs`)
//!
//! [[restore]]
//! snapshot = "s3://bucket/vm.mem"
//! socket = "/run/vm.sock"
//! replay = "/var/lib/quinion/boot.record"   # and others (`RestoreConfig`)
//! ```
//!
//! The command line wins over the file. An unknown key is an error, which names file, line and key. Credentials are in
//! neither: they come from the environment (`stores.rs`).

use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use quinion_object::Freshness;
use quinion_vm::{Fill, OnFailure, SocketMode, SocketOwner};
use serde::{Deserialize, Deserializer};

use crate::fetching::{BytesInFlight, Deadline, GetsInFlight, Hedge};
use crate::price::Price;

/// A configuration file.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The server's name, or the path of its socket.
    pub name: Option<String>,
    /// Memory of the cache.
    pub memory: Option<Bytes>,
    /// Whether all of it is taken from the machine at the start.
    #[serde(default)]
    pub populate: bool,
    /// How many processes may be connected at a time.
    pub clients: Option<usize>,
    /// How many percent of the memory one process may pin.
    pub pin_percent: Option<PinPercent>,
    /// The disk tier.
    pub disk: Option<Disk>,
    /// Address at which the server answers HTTP requests of monitors.
    pub metrics: Option<SocketAddr>,
    /// The stores' prices of GETs and bytes.
    pub price: Option<Price>,
    /// The stores.
    #[serde(default, rename = "store")]
    pub stores: Vec<StoreConfig>,
    /// The snapshots of VMs that are served.
    #[serde(default, rename = "restore")]
    pub restores: Vec<RestoreConfig>,
}

/// The disk tier.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The folder of the disk tier.
    pub folder: PathBuf,
    /// The size of the disk tier.
    pub size: Bytes,
}

/// One store.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreConfig {
    /// The prefix of its URLs, such as `s3://bucket`.
    pub prefix: String,
    /// Where it answers, if that is not the provider's own place.
    pub endpoint: Option<String>,
    /// The store's region.
    pub region: Option<String>,
    /// A file in PEM with certificates of authorities that are trusted for it, beside the system's.
    pub ca_certificates: Option<PathBuf>,
    /// How old what is known of its objects may be, unless a client says otherwise.
    pub freshness: Option<StoreFreshness>,
    /// When a second GET is sent beside a late one.
    pub hedge: Option<Hedge>,
    /// How long a fetch may take.
    pub deadline: Option<Deadline>,
    /// How many GETs may be under way.
    pub gets_in_flight: Option<GetsInFlight>,
    /// How many bytes these may have asked for.
    pub bytes_in_flight: Option<BytesInFlight>,
}

/// A snapshot whose VMs have their page faults answered at a socket.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoreConfig {
    /// The URL of an object below a store's prefix, or the path of a file.
    pub snapshot: String,
    /// The diffs above a file, the oldest first.
    #[serde(default)]
    pub diff: Vec<PathBuf>,
    /// The URLs of the packs that an object refers to, if it is a pack. Those of a file lie in its folder.
    #[serde(default)]
    pub packs: Vec<String>,
    /// Where VMMs connect.
    pub socket: PathBuf,
    /// The socket's permissions, octal.
    #[serde(default, deserialize_with = "parsed")]
    pub socket_mode: Option<SocketMode>,
    /// The user that the socket is given to, and its group.
    #[serde(default, deserialize_with = "parsed")]
    pub socket_owner: Option<SocketOwner>,
    /// Where the pages that VMs touched are written at the end.
    pub record: Option<PathBuf>,
    /// A record whose pages VMs get before they ask.
    pub replay: Option<PathBuf>,
    /// Pages that VMs get before they ask.
    #[serde(default, deserialize_with = "parsed")]
    pub fill: Option<Fill>,
    /// Whether VMMs may map the memory of a file.
    #[serde(default)]
    pub minor: bool,
    /// Treatment of a VM that cannot be served.
    #[serde(default, deserialize_with = "parsed")]
    pub on_failure: Option<OnFailure>,
    /// VMs at a time.
    pub vms_max: Option<usize>,
    /// Number of threads that answer page faults.
    pub workers: Option<usize>,
    /// How long a fault may wait for a store whose GETs fail.
    pub deadline: Option<Deadline>,
}

impl RestoreConfig {
    /// Whether the snapshot is an object of a store.
    pub fn is_url(&self) -> bool {
        self.snapshot.contains("://")
    }
}

impl std::str::FromStr for RestoreConfig {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        // The last of them: a key may have some, too.
        let parts =
            text.rsplit_once('=').filter(|(snapshot, socket)| !snapshot.is_empty() && !socket.is_empty());
        let (snapshot, socket) = parts.ok_or_else(|| {
            format!(
                "{text:?} has no socket; write it as SNAPSHOT=SOCKET, such as s3://bucket/vm.mem=/run/vm.sock"
            )
        })?;
        Ok(Self {
            snapshot: snapshot.into(),
            diff: Vec::new(),
            packs: Vec::new(),
            socket: socket.into(),
            socket_mode: None,
            socket_owner: None,
            record: None,
            replay: None,
            fill: None,
            minor: false,
            on_failure: None,
            vms_max: None,
            workers: None,
            deadline: None,
        })
    }
}

/// A value that is written as text.
fn parsed<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: std::str::FromStr<Err = String>,
{
    String::deserialize(deserializer)?.parse().map(Some).map_err(serde::de::Error::custom)
}

impl StoreConfig {
    /// Takes what the file does not say of this store from `others`, the options of the command line.
    pub fn complete_by(&mut self, others: &StoreDefaults) {
        self.ca_certificates = self.ca_certificates.take().or_else(|| others.ca_certificates.clone());
        self.freshness = self.freshness.or(others.freshness);
        self.hedge = self.hedge.or(others.hedge);
        self.deadline = self.deadline.or(others.deadline);
        self.gets_in_flight = self.gets_in_flight.or(others.gets_in_flight);
        self.bytes_in_flight = self.bytes_in_flight.or(others.bytes_in_flight);
    }
}

/// Options of a command line for stores of which the configuration file says nothing else.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct StoreDefaults {
    /// Trust the authorities whose certificates are in this file, in PEM, beside the system's: for stores behind HTTPS
    /// that have no other file in the configuration.
    #[arg(long, value_name = "FILE")]
    pub ca_certificates: Option<PathBuf>,
    /// How old what is known of an object may be: `always` asks the store by a HEAD each time, a number of seconds
    /// lets an answer serve for so long, `immutable` for ever. For stores that have no other in the configuration;
    /// `always` if not given.
    #[arg(long, value_name = "HOW")]
    pub freshness: Option<StoreFreshness>,
    /// Send a second GET beside one whose answer has not begun when this many of 100 have, 50 to 99, such as 95. Off if
    /// not given.
    #[arg(long, value_name = "PERCENT")]
    pub hedge: Option<Hedge>,
    /// For how many seconds a fetch may go on with all its attempts, before its readers get an error.
    #[arg(long, value_name = "SECONDS")]
    pub deadline: Option<Deadline>,
    /// How many GETs of a store may be under way at a time; 32 if not given.
    #[arg(long, value_name = "NUMBER")]
    pub gets_in_flight: Option<GetsInFlight>,
    /// How many bytes the GETs of a store that are under way may have asked for; 64M if not given.
    #[arg(long, value_name = "SIZE")]
    pub bytes_in_flight: Option<BytesInFlight>,
}

/// A [`Freshness`], written as `always`, `immutable`, or seconds such as `0.5`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
pub struct StoreFreshness(pub Freshness);

impl TryFrom<String> for StoreFreshness {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl std::str::FromStr for StoreFreshness {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self)
    }
}

/// The part of the cache's memory that one process may pin, in percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "u64")]
pub struct PinPercent(pub u64);

impl TryFrom<u64> for PinPercent {
    type Error = String;
    fn try_from(percent: u64) -> Result<Self, String> {
        let is_one = (1..=50).contains(&percent);
        is_one.then_some(Self(percent)).ok_or_else(|| {
            format!(
                "a process cannot pin {percent} percent of the memory; give 1 to 50, for all pins have half"
            )
        })
    }
}

impl std::str::FromStr for PinPercent {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<u64>().map_err(|error| error.to_string())?.try_into()
    }
}

/// An amount of bytes, as `quinion-size` reads it: `8G`, `1.5G`, `64MB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Bytes(pub u64);

impl TryFrom<String> for Bytes {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl std::str::FromStr for Bytes {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        quinion_size::bytes_of(text).map(Self).map_err(|error| error.to_string())
    }
}

impl std::str::FromStr for Disk {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once(':').filter(|(folder, _)| !folder.is_empty());
        let (folder, size) = parts.ok_or_else(|| {
            format!("{text:?} has no size; write it as FOLDER:SIZE, such as /srv/tier:200G")
        })?;
        Ok(Self { folder: folder.into(), size: size.parse()? })
    }
}

/// The changes between two configurations, while a server runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// Stores that are gone or changed.
    pub removed: Vec<StoreConfig>,
    /// Stores that are new or changed.
    pub added: Vec<StoreConfig>,
    /// Memory, if it changed.
    pub memory: Option<Bytes>,
    /// Changed options that take effect at a restart.
    pub at_restart: Vec<&'static str>,
}

impl Changes {
    /// From one configuration to another.
    pub fn between(old: &Config, new: &Config) -> Self {
        let without = |all: &[StoreConfig], others: &[StoreConfig]| -> Vec<StoreConfig> {
            all.iter().filter(|store| !others.contains(store)).cloned().collect()
        };
        let other = [
            ("name", old.name != new.name),
            ("populate", old.populate != new.populate),
            ("clients", old.clients != new.clients),
            ("pin_percent", old.pin_percent != new.pin_percent),
            ("disk", old.disk != new.disk),
            ("metrics", old.metrics != new.metrics),
            ("price", old.price != new.price),
            ("restore", old.restores != new.restores),
            ("memory", old.memory.is_some() && new.memory.is_none()),
        ];
        Self {
            removed: without(&old.stores, &new.stores),
            added: without(&new.stores, &old.stores),
            memory: new.memory.filter(|_| old.memory != new.memory),
            at_restart: other.into_iter().filter_map(|(what, is_other)| is_other.then_some(what)).collect(),
        }
    }
}

/// The longest file of options or certificates: a device or a file of data is not read to its end.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The bytes of such a file.
///
/// # Errors
/// Those of the system; it is longer.
pub fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 {
        0..=FILE_BYTES_MAX => Ok(bytes),
        _ => Err(std::io::Error::other("it is longer than 16 MiB")),
    }
}

impl Config {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// It cannot be read, or has something that is not understood.
    pub fn read(path: &Path) -> Result<Self, String> {
        let cannot = |error: &dyn std::fmt::Display| {
            format!(
                "cannot read the configuration {}: {error}; name a file of text that can be read",
                path.display()
            )
        };
        let bytes = read_file(path).map_err(|error| cannot(&error))?;
        let text = String::from_utf8(bytes).map_err(|error| cannot(&error))?;
        toml::from_str(&text).map_err(|error| {
            // Not its own text, which has several lines: an event has one.
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            let message = error.message().trim_end();
            format!(
                "cannot use the configuration {}: line {line}: {message}; correct that line or remove it",
                path.display()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        Config::read(file.path()).map_err(|error| error.replace(file.path().to_str().unwrap(), "FILE"))
    }

    #[test]
    fn a_file_says_all_that_there_is() {
        let text = "name='n'\nmemory='2G'\npopulate=true\npin_percent=50\nmetrics='[::1]:80'\n\
             [disk]\nfolder='/d'\nsize='1T'\n[price]\ngets_1000=1\n\
             [[store]]\nprefix='s3://b'\nregion='r'\nfreshness='0.5'\n\
             [[restore]]\nsnapshot='s3://b/m'\nsocket='/s'\nsocket_mode='660'\nsocket_owner='1:2'\n\
             fill='all'\non_failure='leave'\ndeadline=5";
        let config = read(text).unwrap();
        assert_eq!((config.memory, config.populate), (Some(Bytes(2 << 30)), true));
        assert_eq!(config.pin_percent, Some(PinPercent(50)));
        assert_eq!(config.disk, "/d:1T".parse().ok());
        assert_eq!(config.metrics, "[::1]:80".parse().ok());
        assert_eq!(config.price.map(|price| price.of(1000, 1000)), Some(1.0));
        let freshness = Some(StoreFreshness(Freshness::For(std::time::Duration::from_millis(500))));
        let (prefix, region) = ("s3://b".into(), Some("r".into()));
        assert_eq!(config.stores, [StoreConfig { prefix, region, freshness, ..Default::default() }]);
        let wanted: RestoreConfig = "s3://b/m=/s".parse().unwrap();
        let wanted = RestoreConfig {
            socket_mode: Some(SocketMode(0o660)),
            socket_owner: Some(SocketOwner { user: 1, group: Some(2) }),
            fill: Some(Fill::All),
            on_failure: Some(OnFailure::Leave),
            deadline: "5".parse().ok(),
            ..wanted
        };
        assert_eq!(config.restores, [wanted]);
    }

    #[test]
    fn a_snapshot_of_the_command_line_has_a_socket_behind_its_last_sign_of_equality() {
        let restore: RestoreConfig = "s3://b/day=1/vm.mem=/run/vm.sock".parse().unwrap();
        assert_eq!((&*restore.snapshot, restore.is_url()), ("s3://b/day=1/vm.mem", true));
        assert_eq!(restore.socket, Path::new("/run/vm.sock"));
        assert!(!"vm.mem=/s".parse::<RestoreConfig>().unwrap().is_url());
        for text in ["vm.mem", "=/s", "vm.mem=", ""] {
            assert!(text.parse::<RestoreConfig>().unwrap_err().contains("SNAPSHOT=SOCKET"), "{text:?}");
        }
    }

    #[test]
    fn settings_that_change_at_once_are_reported_apart_from_those_that_need_a_restart() {
        let config = |text: &str| read(text).unwrap();
        let old = config("name='n'\nmemory='2G'\n[[store]]\nprefix='s3://a'\n[[store]]\nprefix='s3://b'");
        assert_eq!(Changes::between(&old, &old), Changes::default());
        let new = config(
            "memory='3G'\npin_percent=1\nmetrics='127.0.0.1:1'\n[[store]]\nprefix='s3://b'\nregion='x'\n\
             [[store]]\nprefix='s3://c'",
        );
        let changes = Changes::between(&old, &new);
        let prefixes =
            |stores: &[StoreConfig]| stores.iter().map(|store| store.prefix.clone()).collect::<Vec<_>>();
        assert_eq!(prefixes(&changes.removed), ["s3://a", "s3://b"]);
        assert_eq!(prefixes(&changes.added), ["s3://b", "s3://c"]);
        assert_eq!(
            (changes.memory, changes.at_restart),
            (Some(Bytes(3 << 30)), vec!["name", "pin_percent", "metrics"])
        );
        assert_eq!(Changes::between(&old, &Config::default()).at_restart, ["name", "memory"]);
    }

    #[test]
    fn an_unknown_setting_is_reported_with_file_line_and_key() {
        for (text, line, key) in [
            ("name='n'\nmemry='2G'", "line 2", "memry"),
            ("memory='lots'", "line 1", "such as 256M"),
            ("\n\n[[store]]\nprefix='s3://b'\nregoin='r'", "line 5", "regoin"),
            ("[disk]\nfolder='/d'", "line 1", "size"),
            ("[price]\ngigabyte=-1", "line 2", "from 0 on"),
            ("pin_percent=51", "line 1", "1 to 50"),
            ("pin_percent=0", "line 1", "1 to 50"),
            ("[[restore]]\nsnapshot='s3://b/m'", "line 1", "socket"),
            ("[[restore]]\nsnapshot='s3://b/m'\nsocket='/s'\nfill='some'", "line 4", "recorded or all"),
            ("[[restore]]\nsnapshot='s3://b/m'\nsocket='/s'\nsocket_mode='rw'", "line 4", "octal"),
            ("[[store]]\nprefix='s3://b'\nfreshness='never'", "line 3", "`immutable`"),
        ] {
            let error = read(text).unwrap_err();
            for part in ["FILE", line, key, "correct that line"] {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn a_file_without_an_end_and_one_of_other_bytes_are_refused() {
        let error = Config::read(Path::new("/dev/zero")).unwrap_err();
        assert!(error.contains("longer than 16 MiB"), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, b"name = '\xff'").unwrap();
        let error = Config::read(file.path()).unwrap_err();
        assert!(error.to_lowercase().contains("utf-8"), "{error}");
    }

    #[test]
    fn sizes_that_are_none_or_too_large_are_refused() {
        for text in ["", "G", "-1", "8X", "25%", "99999999T", "1 000"] {
            assert!(text.parse::<Bytes>().is_err(), "{text:?}");
        }
        assert_eq!("16M".parse(), Ok(Bytes(16 << 20)));
        assert_eq!(
            ["2GiB", "64MB"].map(|text| text.parse().ok()),
            [Some(Bytes(2 << 30)), Some(Bytes(64_000_000))]
        );
        assert!(":1G".parse::<Disk>().is_err() && "/d".parse::<Disk>().is_err());
    }
}
