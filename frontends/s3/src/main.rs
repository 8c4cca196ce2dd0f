//! The program `quinion-s3`: an S3 endpoint on this machine whose reads come from Quinion's cache.
//!
//! ```text
//!   quinion-s3 serve --store s3://BUCKET... --key-file FILE [--anonymous] [--read-only] [--listen ADDRESS]
//!                    [--server NAME | --memory SIZE [--disk FOLDER:SIZE]] [--freshness ..] [--config FILE]
//!                    [--ca-certificates FILE] [--hedge ..] [--deadline ..] [--gets-in-flight ..]
//!                    [--bytes-in-flight ..]
//!
//!   any client of S3 --HTTP, signed with the endpoint's keys--> quinion-s3 --signed with the store's--> S3
//!                                                                  | GET, HEAD
//!                                                                  v
//!                                             a cache of its own, or that of a running quinion-serve
//! ```
//!
//! Standard output stays empty; events go to standard error, a line each. No request is logged, and no secret.
//!
//! | exit code | means |
//! |---|---|
//! | 0 | it was asked to end, by SIGTERM or SIGINT |
//! | 1 | it could not start; standard error says why |
//! | 2 | the command line was not understood |

mod routing;
mod chunks;
mod endpoint;
mod keys;
mod listen;
mod messages;
mod read;
mod signed_url;
mod silence;
mod upload;
mod upstream;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use quinion_object::{ObjectCache, Options, cached_with};
use quinion_serve::config::{Bytes, Config, Disk, StoreConfig, StoreDefaults};
use quinion_serve::log::{Form, Log};
use quinion_serve::{notify, stores};
use quinion_service::{Client, ClientStore};
use s3s::config::{S3Config, StaticConfigProvider};
use s3s::service::S3ServiceBuilder;
use tokio::signal::unix::{SignalKind, signal};

use endpoint::{Anonymous, Bucket, Cached, Endpoint, Rules, Writes};
use keys::Keys;
use listen::{Bounds, Listening};

/// The endpoint itself reads no longer documents of clients.
const XML_BYTES_MAX: usize = 1 << 20;

/// An S3 endpoint whose reads come from Quinion's cache.
#[derive(Parser, Debug)]
#[command(name = "quinion-s3", version, max_term_width = 100)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Serve(Box<Arguments>),
}

/// Answer clients of S3 on this machine: reads from the cache, all else by the store.
#[derive(clap::Args, Debug)]
struct Arguments {
    /// A bucket that clients see, as s3://BUCKET. Given once or more often. Credentials come from the environment.
    #[arg(long, value_name = "PREFIX")]
    store: Vec<String>,
    /// The file with the keys by which clients sign: a line each, ACCESS-KEY SECRET. It is closed to other users.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Let requests without a signature read.
    #[arg(long)]
    anonymous: bool,
    /// Refuse all that would write.
    #[arg(long)]
    read_only: bool,
    /// The address and port to listen at.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9000")]
    listen: SocketAddr,
    /// Read by the cache of the quinion-serve of that name, which must have the same stores.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["memory", "disk"])]
    server: Option<String>,
    /// Memory of the cache in this process, such as 8G; a quarter of the machine's without this and --server.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Keep what stores send on a local disk as well: a folder and a size, such as /var/cache/quinion-s3:200G.
    #[arg(long, value_name = "FOLDER:SIZE")]
    disk: Option<Disk>,
    #[command(flatten)]
    store_defaults: StoreDefaults,
    /// A file in TOML, the same as that of quinion-serve: [[store]], and memory and [disk] unless there is a --server.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How many connections there may be at a time; more wait.
    #[arg(long, value_name = "NUMBER", default_value = "1024", value_parser = at_least_one)]
    connections: usize,
    /// How many requests there may be at a time; more are answered by SlowDown.
    #[arg(long, value_name = "NUMBER", default_value = "256", value_parser = at_least_one)]
    requests: usize,
    /// For how many seconds a client may neither send nor take anything.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = at_least_one)]
    stall: usize,
    /// Write events as JSON, one object a line.
    #[arg(long)]
    json: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse::<u32>().ok().filter(|&number| number > 0);
    number.map(|number| number as usize).ok_or_else(|| "write a whole number, 1 or more".into())
}

fn main() -> ExitCode {
    // It fails only if there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match CommandLine::parse().command {
        Command::Serve(arguments) => {
            let form = if arguments.json { Form::Json } else { Form::Text };
            let log = Log { program: "quinion-s3", form };
            match serve(*arguments, log) {
                Ok(()) => ExitCode::SUCCESS,
                Err(why) => {
                    log.event("failed", &[("why", &why)]);
                    ExitCode::FAILURE
                }
            }
        }
    }
}

fn serve(arguments: Arguments, log: Log) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| {
        format!("cannot start threads: {error}; allow this user more of them (ulimit -u, pids.max)")
    })?;
    // Before anything else: a signal that comes while the endpoint starts is not lost.
    let caught = |kind| runtime.block_on(async { signal(kind) }).map_err(|error| error.to_string());
    let (mut terminate, mut interrupt) = (caught(SignalKind::terminate())?, caught(SignalKind::interrupt())?);
    let bounds = Bounds {
        connections: arguments.connections,
        requests: arguments.requests,
        stall: Duration::from_secs(arguments.stall as u64),
        end: Duration::from_secs(10),
    };
    let keys = keys_of(&arguments)?;
    let rules = Rules {
        anonymous: if arguments.anonymous { Anonymous::Reads } else { Anonymous::Refused },
        writes: if arguments.read_only { Writes::Refused } else { Writes::Signed },
    };
    let endpoint = Endpoint::new(open(&arguments)?, rules, log);
    let mut builder = S3ServiceBuilder::new(endpoint.clone());
    builder.set_auth(keys);
    builder.set_route(endpoint);
    let mut config = S3Config::default();
    config.xml_max_body_size = XML_BYTES_MAX;
    config.form_max_field_size = XML_BYTES_MAX;
    config.form_max_fields_size = XML_BYTES_MAX;
    config.post_object_max_file_size = XML_BYTES_MAX as u64;
    builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(config))));
    let listening = runtime.block_on(Listening::at(arguments.listen, bounds))?;
    let address = listening.address().map_err(|error| error.to_string())?;
    log.event("listening", &[("endpoint", &format!("http://{address}"))]);
    let told = |state: &str| {
        if let Err(error) = notify::notify(state) {
            log.event("not notified", &[("state", state), ("why", &error.to_string())]);
        }
    };
    told("READY=1");
    runtime.block_on(listening.serve(builder.build(), async {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
            never = notify::keep_alive(told) => match never {},
        };
        told("STOPPING=1");
        log.event("ending", &[("signal", name)]);
    }));
    // Does not wait for reads that a store or a server does not answer.
    runtime.shutdown_background();
    Ok(())
}

fn keys_of(arguments: &Arguments) -> Result<Keys, String> {
    match &arguments.key_file {
        Some(path) => Keys::read(path),
        None if arguments.anonymous => Ok(Keys::default()),
        None => {
            let text = "there are no keys; give a --key-file, or let requests without a signature read by --anonymous";
            Err(text.into())
        }
    }
}

fn open(arguments: &Arguments) -> Result<BTreeMap<String, Bucket>, String> {
    let config = arguments.config.as_deref().map_or(Ok(Config::default()), Config::read)?;
    let given =
        arguments.store.iter().map(|prefix| StoreConfig { prefix: prefix.clone(), ..Default::default() });
    let mut configs: Vec<_> = config.stores.into_iter().chain(given).collect();
    for store in &mut configs {
        store.complete_by(&arguments.store_defaults);
    }
    if configs.is_empty() {
        return Err("there is no store; give one as --store s3://BUCKET, or as [[store]] in the file".into());
    }
    stores::check_prefixes(&configs)?;
    let (environment, http) = (stores::environment(), upstream::http_client(None)?);
    let opened = configs.iter().map(|config| upstream::open(config, &environment, &http));
    let opened = opened.collect::<Result<Vec<_>, _>>()?;
    if let Some(itself) = opened.iter().find(|opened| opened.upstream.is_at(arguments.listen)) {
        return Err(format!(
            "the store s3://{} is at {}, where this endpoint listens: it would ask itself; start it with the \
             store's own address in AWS_ENDPOINT_URL_S3, and set the endpoint's for its clients alone, or give \
             another --listen",
            itself.name, arguments.listen
        ));
    }
    let read_by = match &arguments.server {
        Some(name) => ReadBy::Server(Client::connect(name).map_err(|error| error.to_string())?),
        None => {
            ReadBy::Cache(cache(arguments.memory.or(config.memory), arguments.disk.clone().or(config.disk))?)
        }
    };
    let mut buckets = BTreeMap::new();
    for (opened, config) in opened.into_iter().zip(&configs) {
        buckets.insert(opened.name.clone(), read_by.bucket(opened, config)?);
    }
    Ok(buckets)
}

fn cache(memory: Option<Bytes>, disk: Option<Disk>) -> Result<quinion::Cache, String> {
    let mut builder = quinion::Cache::builder();
    if let Some(Bytes(memory)) = memory {
        builder = builder.memory(memory);
    }
    if let Some(disk) = disk {
        builder = builder.disk(quinion::DiskOptions::new(disk.folder, disk.size.0));
    }
    builder.build().map_err(|error| error.to_string())
}

/// How long a store is asked before a client is told that it does not answer: SDKs wait for an answer for 60 seconds.
const STORE_DEADLINE: Duration = Duration::from_secs(40);

enum ReadBy {
    Cache(quinion::Cache),
    Server(Client),
}

impl ReadBy {
    fn bucket(&self, opened: upstream::Opened, config: &StoreConfig) -> Result<Bucket, String> {
        let freshness = config.freshness.unwrap_or_default().0;
        let upstream::Opened { name, upstream, store, store_name } = opened;
        let store = Arc::new(store);
        let cached = match self {
            Self::Cache(cache) => {
                let options = Options::new().store_name(store_name).deadline(STORE_DEADLINE);
                let options = stores::fetched_as(config, options);
                let objects =
                    ObjectCache::new(cache.clone(), store, options).map_err(|error| error.to_string())?;
                Cached::Own(cached_with(objects, freshness))
            }
            Self::Server(client) => {
                let builder = ClientStore::builder(store, client.clone(), format!("s3://{name}"));
                let store = builder
                    .freshness(freshness)
                    .kept_headers(true)
                    .build()
                    .map_err(|error| error.to_string())?;
                Cached::Served(store)
            }
        };
        Ok(Bucket { upstream, cached })
    }
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
    fn freshness_is_a_word_or_seconds() {
        let of = |text: &str| {
            let line = ["quinion-s3", "serve", "--anonymous", "--store", "s3://b", "--freshness", text];
            CommandLine::try_parse_from(line).map(drop)
        };
        assert!(["always", "immutable", "5", "0.5"].into_iter().all(|text| of(text).is_ok()));
        assert!(of("-1").is_err() && of("never").is_err());
    }
}
