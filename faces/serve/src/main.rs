//! The program `quinion-serve`: one cache for the processes of a node, as a daemon in the foreground.
//!
//! ```text
//!   quinion-serve [--config FILE] [--name NAME] [--memory SIZE] [--disk FOLDER:SIZE] [--store PREFIX]...
//!
//!   read the configuration -> open stores -> build the cache -> listen -> READY=1 -> wait for a signal
//!   SIGTERM, SIGINT: STOPPING=1, the socket is removed, end       SIGHUP: said to change nothing
//! ```
//!
//! It is a package of its own, since HTTP clients and TLS are more code than all of Quinion: neither the library nor
//! the command `quinion` is built with them. Standard output stays empty; events go to standard error.
//!
//! | exit code | means |
//! |---|---|
//! | 0 | it was asked to end, by SIGTERM or SIGINT |
//! | 1 | it could not start; standard error says why |
//! | 2 | the command line was not understood |

mod config;
mod log;
mod notify;
mod stores;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use quinion_service::Server;
use tokio::signal::unix::{SignalKind, signal};

use config::{Bytes, Config, Disk, StoreConfig};
use log::{Form, Log};

/// Serve one cache of objects to the processes of this user.
#[derive(Parser, Debug)]
#[command(name = "quinion-serve", version, max_term_width = 100)]
struct Arguments {
    /// A file in TOML with what is not said here: name, memory, [disk], [[store]].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The name that clients connect to, or the path of the socket; `default` if not given.
    #[arg(long)]
    name: Option<String>,
    /// Memory of the cache in all, such as 8G.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Keep what leaves memory on a local disk as well: a folder and a size, such as /var/cache/quinion:200G.
    #[arg(long, value_name = "FOLDER:SIZE")]
    disk: Option<Disk>,
    /// A store that clients may read: s3://BUCKET, gs://BUCKET, az://CONTAINER or http(s)://HOST/PATH.
    /// Given once or more often. Credentials come from the environment.
    #[arg(long, value_name = "PREFIX")]
    store: Vec<String>,
    /// Write events as JSON, one object a line.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let log = Log(if arguments.json { Form::Json } else { Form::Text });
    match settled(arguments).and_then(|config| serve(&config, log)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            log.event("failed", &[("why", &why)]);
            ExitCode::FAILURE
        }
    }
}

/// What the file says, with what the command line says in its place; stores of both.
fn settled(arguments: Arguments) -> Result<Config, String> {
    let mut config = arguments.config.map_or(Ok(Config::default()), |path| Config::read(&path))?;
    config.name = arguments.name.or(config.name);
    config.memory = arguments.memory.or(config.memory);
    config.disk = arguments.disk.or(config.disk);
    let more = arguments.store.into_iter().map(|prefix| StoreConfig { prefix, ..Default::default() });
    config.stores.extend(more);
    if config.stores.is_empty() {
        return Err("there is no store; give one as --store s3://BUCKET, or as [[store]] in the file".into());
    }
    Ok(config)
}

/// Serves until a signal says to end.
fn serve(config: &Config, log: Log) -> Result<(), String> {
    // Before anything else: a signal that comes while the server starts is not lost.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.map_err(|error| format!("cannot wait for signals: {error}"))?;
    let mut signals = runtime.block_on(async { Signals::new() }).map_err(|error| error.to_string())?;
    // It fails only if there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = start(config)?;
    let socket = server.socket().display().to_string();
    log.event("listening", &[("socket", &socket)]);
    let told = |state: &str| {
        if let Err(error) = notify::notify(state) {
            log.event("not notified", &[("state", state), ("why", &error.to_string())]);
        }
    };
    told("READY=1");
    let name = runtime.block_on(signals.wait_for_end(log));
    told("STOPPING=1");
    let stats = server.stats();
    server.stop();
    let values =
        [("signal", name), ("clients", &stats.clients.to_string()), ("reads", &stats.reads.to_string())];
    log.event("ended", &values);
    Ok(())
}

fn start(config: &Config) -> Result<Server, String> {
    let environment: Vec<_> = std::env::vars_os()
        .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let mut builder = quinion::Cache::builder();
    if let Some(Bytes(memory)) = config.memory {
        builder = builder.memory(memory);
    }
    if let Some(disk) = &config.disk {
        builder = builder.disk(quinion::DiskOptions::new(&disk.folder, disk.size.0));
    }
    let opened: Vec<_> = config
        .stores
        .iter()
        .map(|store| stores::open(store, &environment).map(|opened| (store.prefix.clone(), opened)))
        .collect::<Result<_, _>>()?;
    let cache = builder.build().map_err(|error| error.to_string())?;
    let server = opened.into_iter().fold(Server::builder(cache), |server, (prefix, (store, options))| {
        server.store(prefix, store, options)
    });
    server.start(config.name.as_deref().unwrap_or("default")).map_err(|error| error.to_string())
}

/// The signals that a service is told things by.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Signals {
    /// In a runtime.
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The name of the one that ends the server.
    async fn wait_for_end(&mut self, log: Log) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.hangup.recv() => {
                    log.event("not reloaded", &[("do", "restart the server to read its configuration again")]);
                }
            }
        }
    }
}
