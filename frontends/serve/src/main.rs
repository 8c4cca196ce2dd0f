//! The program `quinion-serve`: one cache for the processes of a node, as a daemon in the foreground.
//!
//! ```text
//!   quinion-serve [--config FILE] [--name NAME] [--memory SIZE] [--disk FOLDER:SIZE] [--store PREFIX]...
//!                 [--freshness HOW] [--ca-certificates FILE] [--metrics ADDRESS] [--replace]
//!                 [--restore SNAPSHOT=SOCKET]...
//!
//!   read the configuration -> open stores -> take the name -> build the cache -> serve -> open snapshots of VMs
//!                                                             -> READY=1 -> wait for a signal
//!   SIGTERM, SIGINT: STOPPING=1, VMs are ended (`restores.rs`), the socket is removed, end
//!   SIGHUP: the configuration is read again; stores come and go, memory is resized (`reload.rs`)
//!   --replace: the server that has the name is sent SIGTERM before the name is taken
//! ```
//!
//! It is a package of its own, since HTTP clients and TLS are more code than all of Quinion: neither the library nor
//! the command `quinion` is built with them. Standard output stays empty; events go to standard error.
//!
//! | exit code | means |
//! |---|---|
//! | 0 | it was asked to end, by SIGTERM or SIGINT |
//! | 1 | it could not start, or could not serve a snapshot; standard error says why |
//! | 2 | the command line was not understood |

mod activation;
mod http;
mod metrics;
mod reload;
mod restores;

use std::cell::RefCell;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use clap::Parser;
use quinion::internals::arena::control::VIEWERS_MAX;
use quinion_serve::config::{Bytes, Config, Disk, PinPercent, RestoreConfig, StoreConfig, StoreDefaults};
use quinion_serve::log::{Form, Log};
use quinion_serve::price::{Price, Savings};
use quinion_serve::{notify, stores};
use quinion_service::{Builder, Server, ServerStats, Socket};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use http::Monitor;
use metrics::Shown;
use reload::Reload;
use restores::{Restores, Starter, Starting};

/// The deadline for the end of a replaced server, and then for that of its disk tier.
const REPLACE_MAX: Duration = Duration::from_secs(60);
/// How long to wait for a disk on which the making of a file is tried.
const FOLDER_MAX: Duration = Duration::from_secs(10);
/// A store that is gone fails each read; the log has one line of them in this time.
const FAILURES_EVERY: Duration = Duration::from_secs(2);
/// How often servers are looked at whose VMs another server may have taken over.
const REPLACED_EVERY: Duration = Duration::from_secs(1);
/// A store's message may be in the text, and is as long as the store likes.
const FAILURE_CHARACTERS_MAX: usize = 1000;

/// Serve one cache of objects to the processes of this user.
#[derive(Parser, Clone, Debug)]
#[command(name = "quinion-serve", version, max_term_width = 100)]
struct Arguments {
    /// A file in TOML with what is not said here: name, memory, [disk], [price], [[store]], [[restore]].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The name that clients connect to, or the path of the socket; `default` if not given.
    #[arg(long)]
    name: Option<String>,
    /// Memory of the cache in all, such as 8G.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Take all of that memory from the machine at once, in place of as it fills: the first reads are faster then.
    #[arg(long)]
    populate: bool,
    /// How many processes may be connected at a time, 4096 at most; 1024 if not given.
    #[arg(long, value_name = "NUMBER")]
    clients: Option<usize>,
    /// How many percent of the memory one process may pin, 50 at most; 25 if not given.
    #[arg(long, value_name = "PERCENT")]
    pin_percent: Option<PinPercent>,
    /// Keep what stores send on a local disk as well: a folder and a size, such as /var/cache/quinion:200G.
    #[arg(long, value_name = "FOLDER:SIZE")]
    disk: Option<Disk>,
    /// A store that clients may read, if there is any: s3://BUCKET, gs://BUCKET, az://CONTAINER or http(s)://HOST/PATH.
    /// Given once or more often. Credentials come from the environment.
    #[arg(long, value_name = "PREFIX")]
    store: Vec<String>,
    #[command(flatten)]
    store_defaults: StoreDefaults,
    /// Answer the page faults of VMs from a snapshot, the URL of an object below a store or the path of a file, at a
    /// socket, as Firecracker's `Uffd` memory backend asks for it. Given once or more often; [[restore]] of the
    /// configuration has more options.
    #[arg(long, value_name = "SNAPSHOT=SOCKET")]
    restore: Vec<RestoreConfig>,
    /// Answer monitors at this address and port, such as 127.0.0.1:9464: /metrics for Prometheus, and /healthz.
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    metrics: Option<SocketAddr>,
    /// Take the place of the server of that name, which is told to end. Clients go on with this one.
    #[arg(long)]
    replace: bool,
    /// Write events as JSON, one object a line.
    #[arg(long)]
    json: bool,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let remedy = "write a numeric address and a port, such as 127.0.0.1:9464";
    text.parse().map_err(|_| format!("it is no address to listen at; {remedy}"))
}

fn main() -> ExitCode {
    // First: an inherited descriptor is taken before another could get its number.
    let given = activation::socket();
    // Before the command line and the configuration are read: a signal that comes meanwhile is not lost. SIGHUP would
    // end a process that does not wait for it, and for a service manager that is an end in order.
    let waiting = Waiting::new();
    let arguments = Arguments::parse();
    allow_descriptors();
    let form = if arguments.json { Form::Json } else { Form::Text };
    let log = Log { program: "quinion-serve", form };
    let claim = if arguments.replace { NameClaim::Replacing } else { NameClaim::Free };
    let settle = || settled(arguments.clone());
    let claim = given.map(|given| given.map_or(claim, |socket| NameClaim::Given(socket, arguments.replace)));
    match claim.and_then(|claim| serve(waiting?, &settle, claim, log)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            log.event("failed", &[("why", &why)]);
            ExitCode::FAILURE
        }
    }
}

/// Raises the limit of descriptors as far as the system allows: each client takes two.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }); // as many as before do for some
}

/// The file's options, with those of the command line in their place; stores of both.
fn settled(arguments: Arguments) -> Result<Config, String> {
    let mut config = arguments.config.map_or(Ok(Config::default()), |path| Config::read(&path))?;
    config.name = arguments.name.or(config.name);
    config.memory = arguments.memory.or(config.memory);
    config.populate |= arguments.populate;
    config.clients = arguments.clients.or(config.clients);
    if let Some(clients) = config.clients.filter(|clients| !(1..=VIEWERS_MAX).contains(clients)) {
        return Err(format!("{clients} clients were asked for, and there can be 1 to {VIEWERS_MAX}"));
    }
    config.pin_percent = arguments.pin_percent.or(config.pin_percent);
    config.disk = arguments.disk.or(config.disk);
    config.metrics = arguments.metrics.or(config.metrics);
    let more = arguments.store.into_iter().map(|prefix| StoreConfig { prefix, ..Default::default() });
    config.stores.extend(more);
    for store in &mut config.stores {
        store.complete_by(&arguments.store_defaults);
    }
    config.restores.extend(arguments.restore);
    Ok(config)
}

/// A thread that takes memory for the cache from the machine. Ends with this value, within some steps.
struct Populating {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Populating {
    /// Bytes that are taken between two looks at whether it is over.
    const STEP: u64 = 32 << 20;

    fn start(server: &Server, log: Log) -> Result<Self, String> {
        let (cache, is_over) = (server.cache().clone(), Arc::new(AtomicBool::new(false)));
        let over = Arc::clone(&is_over);
        let populate = move || {
            let (mut wanted, mut grown) = (Self::STEP, 0);
            // Until the bound, or the end of the machine's memory: then there is less than was wanted.
            while !over.load(Ordering::Relaxed) && grown + Self::STEP >= wanted {
                match cache.populate(wanted) {
                    Ok(bytes) => (grown, wanted) = (bytes, wanted + Self::STEP),
                    Err(_) => break,
                }
            }
            log.event("populated", &[("bytes", &grown.to_string())]);
        };
        let thread = std::thread::Builder::new().name("populate".into()).spawn(populate);
        let thread = thread.map_err(|error| {
            format!("cannot start a thread to populate memory: {error}; allow this process one thread more")
        })?;
        Ok(Self { is_over, thread: Some(thread) })
    }
}

impl Drop for Populating {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// How the server gets its name.
enum NameClaim {
    Free,
    /// The server that has it ends first.
    Replacing,
    /// A socket from the service manager; and whether a server was to be replaced all the same.
    Given(OwnedFd, bool),
}

/// Serves until a signal says to end; `settle` reads the configuration again.
fn serve(
    waiting: Waiting,
    settle: &dyn Fn() -> Result<Config, String>,
    claim: NameClaim,
    log: Log,
) -> Result<(), String> {
    let config = settle()?;
    let Waiting { runtime, mut signals } = waiting;
    // It fails only if there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = Rc::new(start(&config, claim, log)?);
    let restores = Rc::new(Restores::default());
    // After a replaced server has released its port.
    let monitor = config.metrics.map(|address| runtime.block_on(Monitor::at(address))).transpose()?;
    let mut values = vec![("socket", server.socket().display().to_string())];
    if let Some(Ok(address)) = monitor.as_ref().map(Monitor::address) {
        values.push(("metrics", format!("http://{address}/metrics")));
    }
    let values: Vec<_> = values.iter().map(|(key, value)| (*key, value.as_str())).collect();
    log.event("listening", &values);
    let populating = config.populate.then(|| Populating::start(&server, log)).transpose()?;
    let told = |state: &str| {
        if let Err(error) = notify::notify(state) {
            log.event("not notified", &[("state", state), ("why", &error.to_string())]);
        }
    };
    let starter = Starter { cache: server.cache().clone(), opener: server.opener(), log };
    let starting = starter.start(config.restores.clone(), &restores)?;
    let shown = Shown { price: config.price, has_disk: config.disk.is_some() };
    let reloaded = RefCell::new(Reload::new(config));
    let reload = || reloaded.borrow_mut().reload(settle(), &server, log);
    let monitored = async {
        match &monitor {
            Some(monitor) => monitor.serve(&server, &restores, shown).await,
            None => std::future::pending().await,
        }
    };
    let ended = runtime.block_on(async {
        tokio::select! {
            biased;
            name = signals.wait_for_end(reload) => Ok(name),
            why = failed_start(starting, told) => Err(why),
            never = monitored => match never {},
            never = log_failures(&server, log) => match never {},
            never = log_disk(server.cache(), log) => match never {},
            never = end_replaced(&restores, log) => match never {},
            never = notify::keep_alive(told) => match never {},
        }
    });
    told("STOPPING=1");
    drop(monitor);
    drop(populating);
    restores.stop(log);
    let stats = server.stats();
    Rc::into_inner(server).expect("the monitor's tasks ended with it").stop();
    log_end(ended?, &stats, shown.price, log);
    Ok(())
}

/// Tells the service manager when the servers of VMs have been started. Returns only if one cannot be.
async fn failed_start(starting: Starting, told: impl Fn(&str)) -> String {
    match starting.done().await {
        Ok(()) => {
            told("READY=1");
            std::future::pending().await
        }
        Err(why) => why,
    }
}

fn log_end(name: &str, stats: &ServerStats, price: Option<Price>, log: Log) {
    let Savings { saved_gets, saved_bytes, .. } = Savings::of(stats);
    let mut values = vec![("signal", name.to_owned()), ("clients", stats.clients.to_string())];
    values.extend(
        [("reads", stats.reads), ("saved_gets", saved_gets), ("saved_bytes", saved_bytes)]
            .map(|(name, number)| (name, number.to_string())),
    );
    values.extend(price.map(|price| ("saved_price", format!("{:.6}", price.of(saved_gets, saved_bytes)))));
    let values: Vec<_> = values.iter().map(|(key, value)| (*key, value.as_str())).collect();
    log.event("ended", &values);
}

/// Writes an event for each store of which fetches fail: one in [`FAILURES_EVERY`], of the newest failure.
async fn log_failures(server: &Server, log: Log) -> Infallible {
    loop {
        tokio::time::sleep(FAILURES_EVERY).await;
        for (store, error) in server.take_store_failures() {
            let why: String = error.to_string().chars().take(FAILURE_CHARACTERS_MAX).collect();
            log.event("store failed", &[("store", &store), ("why", &why)]);
        }
    }
}

/// Writes an event when the disk tier is left alone, and when it is used again.
async fn log_disk(cache: &quinion::Cache, log: Log) -> Infallible {
    let mut before = None;
    loop {
        tokio::time::sleep(FAILURES_EVERY).await;
        let trouble = cache.disk_trouble();
        match &trouble {
            Some(why) if before.is_none() => log.event("disk tier off", &[("why", why)]),
            None if before.is_some() => log.event("disk tier used again", &[]),
            _ => {}
        }
        before = trouble;
    }
}

/// Ends the servers of VMs that another server has taken over.
async fn end_replaced(restores: &Restores, log: Log) -> Infallible {
    loop {
        tokio::time::sleep(REPLACED_EVERY).await;
        restores.end_replaced(log);
    }
}

fn start(config: &Config, claim: NameClaim, log: Log) -> Result<Server, String> {
    stores::check_prefixes(&config.stores)?;
    restores::check(&config.restores)?;
    let opened = stores::open_all(&config.stores)?;
    if let Some(Bytes(memory)) = config.memory {
        check_memory(memory)?;
    }
    let replaces = matches!(claim, NameClaim::Replacing);
    // After the stores are open and the rest was tried: an error of this server ends no other. And before the cache is
    // built: a replaced server has the disk tier until it ends.
    if replaces {
        try_out(config)?;
    }
    let socket = socket_of(config, claim)?;
    let cache = build_cache(config, replaces, log)?;
    let server = Server::builder(cache).revisions(true); // this process locks no files that clients have
    let server = config.clients.into_iter().fold(server, Builder::clients_max);
    let pin_percent = config.pin_percent.map(|share| share.0);
    let server = pin_percent.into_iter().fold(server, Builder::pin_percent);
    let server = opened
        .into_iter()
        .fold(server, |server, (prefix, (store, options))| server.store(prefix, store, options));
    server.start_at(socket).map_err(|error| error.to_string())
}

/// The cache, with its disk tier. Where a server was replaced and the tier cannot be opened after all, the cache has
/// none: else clients would have no server, for the other one has ended.
fn build_cache(config: &Config, replaces: bool, log: Log) -> Result<quinion::Cache, String> {
    let builder = || {
        let builder = quinion::Cache::builder();
        config.memory.iter().fold(builder, |builder, Bytes(memory)| builder.memory(*memory))
    };
    let Some(disk) = &config.disk else { return builder().build().map_err(|error| error.to_string()) };
    let options = disk_options(disk);
    // A replaced server's name is this one's before it has written all that it had for the disk.
    let options = if replaces { options.in_use_max(REPLACE_MAX) } else { options };
    match builder().disk(options).build() {
        Err(error) if replaces => {
            let cache = builder().build().map_err(|error| error.to_string())?;
            let why = format!("{error}; this server goes on without it until its next start");
            log.event("disk tier off", &[("why", &why)]);
            Ok(cache)
        }
        built => built.map_err(|error| error.to_string()),
    }
}

fn disk_options(disk: &Disk) -> quinion::DiskOptions {
    quinion::DiskOptions::new(&disk.folder, disk.size.0)
}

/// The library checks it as well, and speaks of bytes.
fn check_memory(bytes: u64) -> Result<(), String> {
    let (min, max) = (quinion::Cache::MEMORY_MIN, quinion::process_limit());
    let asked = quinion_size::shown(bytes);
    if bytes < min {
        return Err(format!(
            "cannot have a cache of {asked}: that is too small; give it {}M or more",
            min >> 20
        ));
    }
    if bytes > max {
        let (limit, max) = (quinion_size::shown(max), max >> 20);
        return Err(format!(
            "cannot have a cache of {asked}: this process may use {limit}; give {max}M or less"
        ));
    }
    Ok(())
}

/// Checks whether memory, the disk tier's folder, files of snapshots and the monitors' address can be had, as far as
/// that is possible while another server has them.
fn try_out(config: &Config) -> Result<(), String> {
    let builder = quinion::Cache::builder();
    let builder = config.memory.iter().fold(builder, |builder, Bytes(memory)| builder.memory(*memory));
    let cache = builder.build().map_err(|error| error.to_string())?;
    if let Some(disk) = &config.disk {
        try_folder(&disk.folder).map_err(|error| {
            let remedy = "name a folder that this user can make and write to";
            format!("cannot use {} for the disk tier: {error}; {remedy}", disk.folder.display())
        })?;
        quinion::Builder::try_disk(&disk_options(disk)).map_err(|error| error.to_string())?;
    }
    restores::try_out(&config.restores, &cache)?;
    drop(cache);
    match config.metrics.map(std::net::TcpListener::bind) {
        Some(Err(error)) if error.kind() != std::io::ErrorKind::AddrInUse => {
            Err(format!("cannot listen for monitors: {error}; name an address of this machine for `metrics`"))
        }
        _ => Ok(()),
    }
}

/// Whether a file can be made there. The disk tier's own may be in use by the server that is replaced.
fn try_folder(folder: &Path) -> std::io::Result<()> {
    let folder = folder.to_owned();
    let (answers, tried) = std::sync::mpsc::channel();
    let try_it = move || {
        std::fs::create_dir_all(&folder)?;
        let probe = folder.join(format!("quinion.probe.{}", std::process::id()));
        std::fs::OpenOptions::new().write(true).create_new(true).open(&probe)?;
        std::fs::remove_file(&probe)
    };
    // A disk that does not answer leaves that thread behind.
    std::thread::Builder::new().name("quinion-probe".to_owned()).spawn(move || answers.send(try_it()))?;
    tried.recv_timeout(FOLDER_MAX).unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

/// Takes the name, or the socket that the service manager has given.
fn socket_of(config: &Config, claim: NameClaim) -> Result<Socket, String> {
    let name = config.name.as_deref().unwrap_or("default");
    let socket = match claim {
        NameClaim::Given(_, true) => {
            return Err(
                "the service manager gives the socket, and replaces servers; leave out --replace".into()
            );
        }
        // It is not replaceable: its manager would start it again, or lose the socket.
        NameClaim::Given(socket, false) => Socket::adopt(socket),
        NameClaim::Free => Socket::bind(name).and_then(Socket::replaceable),
        NameClaim::Replacing => Socket::replace(name, REPLACE_MAX).and_then(Socket::replaceable),
    };
    socket.map_err(|error| error.to_string())
}

/// Where this program waits.
struct Waiting {
    runtime: Runtime,
    signals: Signals,
}

impl Waiting {
    fn new() -> Result<Self, String> {
        let failed = |error| format!("cannot wait for signals: {error}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let signals = runtime.block_on(async { Signals::new() }).map_err(failed)?;
        Ok(Self { runtime, signals })
    }
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal that ends the server, and returns its name; SIGHUP only reloads.
    async fn wait_for_end(&mut self, reload: impl Fn()) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.hangup.recv() => reload(),
            }
        }
    }
}
