//! The program `quinion-object`: objects of stores to standard output, and what stores say of them.
//!
//! ```text
//!   quinion-object cat [--range FIRST..END] URL...     bytes, in order       by a running server (--server NAME),
//!   quinion-object stat [--json] URL...                size, version, time   or by the store itself
//!     --server NAME --freshness HOW                    by what that server knows, if it is not older
//! ```
//!
//! `quinion cat s3://..` and `quinion stat s3://..` start it, as they do not link an HTTP client. Without a server the
//! bytes come through a cache of this process, which fetches ahead and reports an object that was replaced meanwhile.
//!
//! | exit code | means |
//! |---|---|
//! | 0 | all objects were written or shown |
//! | 1 | at least one was not; standard error says which and why |
//! | 2 | the command line was not understood |
//! | 141 | the reader of standard output went away |

use std::io::{self, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use clap::{Parser, Subcommand};
use object_store::ObjectMeta;
use object_store::path::Path;
use quinion_object::{ObjectCache, ObjectFile};
use quinion_serve::config::{Bytes, StoreConfig, StoreFreshness};
use quinion_serve::{log, stores};
use quinion_service::{Client, ClientFile};

const EXIT_FAILED: u8 = 1;
const EXIT_BROKEN_PIPE: u8 = 141;
/// Bytes that are read and written at a time; as many are fetched ahead.
const PIECE_BYTES: u64 = 8 << 20;
/// Enough for the readahead of one reader.
const MEMORY: u64 = 128 << 20;

/// Objects of stores through Quinion's cache.
#[derive(Parser, Debug)]
#[command(name = "quinion-object", version, max_term_width = 100)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Cat(Cat),
    Stat(Stat),
}

/// Where objects are read.
#[derive(clap::Args, Debug)]
struct Place {
    /// Read by the cache of the quinion-serve of that name, which has the credentials. Without this the store is asked,
    /// with credentials from the environment.
    #[arg(long, value_name = "NAME")]
    server: Option<String>,
    /// How old what the server knows of an object may be: `always` has it ask the store, a number of seconds lets an
    /// answer serve for so long, `immutable` for ever. As the server was told for that store, if not given.
    #[arg(long, value_name = "HOW", requires = "server")]
    freshness: Option<StoreFreshness>,
}

/// Write objects to standard output.
#[derive(clap::Args, Debug)]
struct Cat {
    #[command(flatten)]
    place: Place,
    /// Memory of the cache in this process, such as 512M.
    #[arg(long, value_name = "SIZE", conflicts_with = "server")]
    memory: Option<Bytes>,
    /// Write these bytes of each object alone: from FIRST up to END, which is not written; either may be left out.
    #[arg(long, value_name = "FIRST..END", value_parser = range)]
    range: Option<Range<u64>>,
    /// The objects, as s3://BUCKET/KEY, gs://, az://, http:// or https://. Keys are percent-encoded as in URLs.
    #[arg(required = true, value_name = "URL")]
    urls: Vec<String>,
}

/// Show what stores say of objects: size, ETag, version, and when they were put.
#[derive(clap::Args, Debug)]
struct Stat {
    #[command(flatten)]
    place: Place,
    /// Print one line of JSON for each object.
    #[arg(long)]
    json: bool,
    /// The objects.
    #[arg(required = true, value_name = "URL")]
    urls: Vec<String>,
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let number = |text: &str, default: u64| match text {
        "" => Ok(default),
        text => text.parse::<u64>().map_err(|error| format!("{text:?}: {error}")),
    };
    let (first, end) = text.split_once("..").ok_or("write FIRST..END, such as 0..1000 or 4096..")?;
    let range = number(first, 0)?..number(end, u64::MAX)?;
    if range.start > range.end { Err("it ends before it begins".into()) } else { Ok(range) }
}

enum Object {
    Served(ClientFile),
    Own(ObjectFile),
}

impl Object {
    fn len(&self) -> u64 {
        match self {
            Self::Served(file) => file.len(),
            Self::Own(file) => file.len(),
        }
    }

    fn write(&self, range: Range<u64>, output: &mut impl Write) -> Result<(), Failure> {
        let mut at = range.start;
        let mut buffer = Vec::new();
        while at < range.end {
            let end = range.end.min(at + PIECE_BYTES);
            let ahead = end..range.end.min(end + PIECE_BYTES);
            match self {
                Self::Served(file) => {
                    // Only a hint: the read reports what cannot be fetched.
                    let _ = file.prefetch(ahead);
                    buffer.resize((end - at) as usize, 0);
                    file.read_exact_at(&mut buffer, at)
                        .map_err(|error| Failure::Object(error.to_string()))?;
                    output.write_all(&buffer).map_err(Failure::Output)?;
                }
                Self::Own(file) => {
                    let _ = file.prefetch(ahead);
                    let bytes = file.bytes(at..end).map_err(|error| Failure::Object(error.to_string()))?;
                    output.write_all(&bytes).map_err(Failure::Output)?;
                }
            }
            at = end;
        }
        Ok(())
    }

    fn meta(&self) -> ObjectMeta {
        match self {
            Self::Own(file) => file.meta().clone(),
            Self::Served(file) => ObjectMeta {
                location: Path::default(),
                last_modified: file.modified().unwrap_or(UNIX_EPOCH).into(),
                size: file.len(),
                e_tag: file.e_tag().map(str::to_owned),
                version: file.version().map(str::to_owned),
            },
        }
    }
}

/// Why an object was not written to its end.
enum Failure {
    Object(String),
    Output(io::Error),
}

/// The server or cache that opens objects.
enum Opener {
    Server(Client),
    /// A cache of this process.
    Own(quinion::Cache),
}

impl Opener {
    fn new(place: &Place, memory: u64) -> Result<Self, String> {
        match &place.server {
            Some(name) => {
                let client = Client::connect(name).map_err(|error| error.to_string())?;
                Ok(Self::Server(match place.freshness {
                    Some(StoreFreshness(freshness)) => client.with_freshness(freshness),
                    None => client,
                }))
            }
            None => {
                let cache = quinion::Cache::builder().memory(memory).build();
                cache.map(Self::Own).map_err(|error| error.to_string())
            }
        }
    }

    fn open(&self, url: &str) -> Result<Object, String> {
        match self {
            // Clients open local files as well, but `quinion cat` reads these by itself.
            Self::Server(client) if is_url(url) => {
                client.open(url).map(Object::Served).map_err(|error| error.to_string())
            }
            Self::Own(cache) if is_url(url) => open_own(cache, url).map(Object::Own),
            _ => Err(format!("{url} is not the URL of an object; write it as s3://BUCKET/KEY")),
        }
    }
}

fn is_url(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| !scheme.is_empty() && scheme != "file")
}

/// The object, by a store of its bucket alone.
fn open_own(cache: &quinion::Cache, url: &str) -> Result<ObjectFile, String> {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    // `Path` leaves these out, and a key without them is another object.
    if key.is_empty() || key.starts_with('/') || key.ends_with('/') || key.contains("//") {
        return Err(format!("{url}: the key is empty, or has an empty part; write it as s3://BUCKET/KEY"));
    }
    let path = Path::from_url_path(key).map_err(|error| format!("{url}: {error}"))?;
    let config = StoreConfig { prefix: format!("{scheme}://{bucket}"), ..StoreConfig::default() };
    stores::check_prefixes(std::slice::from_ref(&config))?;
    let (store, options) = stores::open(&config, &stores::environment())?;
    let objects = ObjectCache::new(cache.clone(), store, options).map_err(|error| error.to_string())?;
    objects.open(&path).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    // It fails only if there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match CommandLine::parse().command {
        Command::Cat(arguments) => cat(&arguments),
        Command::Stat(arguments) => stat(&arguments),
    }
}

fn complain(wrong: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "quinion-object: {wrong}");
    ExitCode::from(EXIT_FAILED)
}

fn output_failed(error: &io::Error) -> ExitCode {
    match error.kind() {
        io::ErrorKind::BrokenPipe => ExitCode::from(EXIT_BROKEN_PIPE),
        _ => complain(&format!("cannot write to standard output: {error}")),
    }
}

fn cat(arguments: &Cat) -> ExitCode {
    let memory = arguments.memory.map_or(MEMORY, |Bytes(memory)| memory);
    let opener = match Opener::new(&arguments.place, memory) {
        Ok(opener) => opener,
        Err(wrong) => return complain(&wrong),
    };
    let (mut code, mut output) = (ExitCode::SUCCESS, io::stdout().lock());
    for url in &arguments.urls {
        let written = opener.open(url).map_err(Failure::Object).and_then(|object| {
            let len = object.len();
            let range = arguments.range.clone().unwrap_or(0..len);
            if arguments.range.is_some() && range.start > len {
                let wrong = format!("{url}: it has {len} bytes, and the range begins at {}", range.start);
                return Err(Failure::Object(wrong));
            }
            object.write(range.start..range.end.min(len), &mut output)
        });
        match written {
            Ok(()) => {}
            Err(Failure::Object(wrong)) => code = complain(&wrong),
            Err(Failure::Output(error)) => return output_failed(&error),
        }
    }
    output.flush().map_or_else(|error| output_failed(&error), |()| code)
}

fn stat(arguments: &Stat) -> ExitCode {
    let opener = match Opener::new(&arguments.place, quinion::Cache::MEMORY_MIN) {
        Ok(opener) => opener,
        Err(wrong) => return complain(&wrong),
    };
    let read_by = match &arguments.place.server {
        Some(name) => format!("the server {name}"),
        None => "the store".to_owned(),
    };
    let mut code = ExitCode::SUCCESS;
    for url in &arguments.urls {
        match opener.open(url) {
            Ok(object) => {
                let shown = shown(url, &object.meta(), &read_by, arguments.json);
                if let Err(error) = io::stdout().write_all(shown.as_bytes()) {
                    return output_failed(&error);
                }
            }
            Err(wrong) => code = complain(&wrong),
        }
    }
    code
}

fn shown(url: &str, meta: &ObjectMeta, read_by: &str, json: bool) -> String {
    // Not every store tells a time.
    let modified = (meta.last_modified.timestamp() > 0).then(|| meta.last_modified.to_rfc3339());
    let rows = [
        ("object", "object", Some(url.to_owned())),
        ("etag", "ETag", meta.e_tag.clone()),
        ("version", "version", meta.version.clone()),
        ("modified", "modified", modified),
        ("answered_by", "answered by", Some(read_by.to_owned())),
    ];
    if json {
        let value = |text: &Option<String>| text.as_deref().map_or("null".to_owned(), log::quoted);
        let rows: Vec<_> = rows.iter().map(|(key, _, text)| format!("\"{key}\":{}", value(text))).collect();
        return format!("{{\"size_bytes\":{},{}}}\n", meta.size, rows.join(","));
    }
    let lines = rows.iter().map(|(_, name, text)| (*name, text.clone().unwrap_or_else(|| "none".into())));
    let size = ("size", format!("{} bytes", meta.size));
    let lines: Vec<_> = lines.chain([size]).collect();
    lines.iter().map(|(name, text)| format!("{name:12} {text}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_has_no_contradictions() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn a_range_is_two_numbers_of_which_either_may_be_left_out() {
        assert_eq!(range("5..10"), Ok(5..10));
        assert_eq!((range("5.."), range("..10")), (Ok(5..u64::MAX), Ok(0..10)));
        for wrong in ["", "5", "10..5", "a..", "-1..5", "1...2"] {
            assert!(range(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_local_name_is_no_url_and_a_key_with_an_empty_part_is_refused() {
        for local in ["file", "/a/b", "file:///a", "://x", ""] {
            assert!(!is_url(local), "{local}");
        }
        let cache = quinion::Cache::builder().memory(quinion::Cache::MEMORY_MIN).build().unwrap();
        for url in ["s3://bucket", "s3://bucket/", "s3://bucket//a", "s3://bucket/a//b", "s3://bucket/a/"] {
            assert!(open_own(&cache, url).unwrap_err().contains("s3://BUCKET/KEY"), "{url}");
        }
    }
}
