//! Restores: page faults of VMs, answered from this program's cache.
//!
//! ```text
//!   [[restore]]   s3://bucket/vm.mem --opener--> a file of the cache: pages by GETs, in memory, on the disk tier --+
//!                 /srv/vm.mem, diffs ------------> files of the cache ---------------------------------------------+
//!                                                                                                                  v
//!   socket  <-- VMMs connect, send their regions -->  quinion_vm::Server, one for each snapshot
//! ```
//!
//! The VMs of all snapshots and the clients of this program share one cache: its bound, its disk tier, and the pages of
//! objects that both read. An object is served in the version that it had at the start, for its GETs have that as a
//! condition. When it is replaced, its VMs are given up, as those of a file that was changed.
//!
//! To open a snapshot may take long: a store is asked, and some pages are read. So a thread of its own starts the
//! servers, one after the other, and the program waits for it and for signals. If one cannot be started, none is, and
//! the program ends: a supervisor sees that VMs would find no server.
//!
//! A server whose VMs another one has taken over (`quinion restore --replace`) is ended soon: it has the socket open
//! still, and would keep VMs waiting there, and other servers away, when the other one is no more.
//!
//! Not an invariant: that the thread has ended when the program does. It may wait for a store that is gone.

use std::fmt::Display;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use quinion::Cache;
use quinion_serve::config::RestoreConfig;
use quinion_serve::fetching::Deadline;
use quinion_serve::log::Log;
use quinion_service::ObjectOpener;
use quinion_vm::{
    Event, FaultRecord, FaultRecordError, ImageIdentity, RestoreOptions, RestoreStats, Server, SocketOwner,
    identify_file, identify_layers, try_layers,
};
use tokio::sync::oneshot;

/// How long a fault waits for a store whose GETs fail, if the configuration does not say.
const DEADLINE: Duration = Duration::from_secs(60);

/// The parts of the program by which servers are started.
pub struct Starter {
    /// The cache that they read through.
    pub cache: Cache,
    pub opener: ObjectOpener,
    pub log: Log,
}

#[derive(Clone, Debug)]
pub struct Restores {
    /// `None` once they were stopped: one that starts later ends at once.
    running: Arc<Mutex<Option<Vec<RunningRestore>>>>,
    /// Threads that end those that were replaced.
    ends: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

fn take<T>(place: &Mutex<Option<T>>) -> Option<T> {
    place.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl Default for Restores {
    fn default() -> Self {
        Self { running: Arc::new(Mutex::new(Some(Vec::new()))), ends: Arc::default() }
    }
}

/// A server that runs.
#[derive(Debug)]
struct RunningRestore {
    socket: String,
    record: Option<PathBuf>,
    server: Server,
}

impl RunningRestore {
    /// Ends the server and writes its record. Waits some seconds at most for processes that were killed.
    fn end(self, log: Log) {
        let Self { socket, record: path, server } = self;
        let (record, is_replaced) = (server.record(), server.is_replaced());
        let stats = server.stop();
        let numbers = [
            ("vms", stats.vms_total),
            ("vms_given_up", stats.vms_given_up),
            ("vms_handed_over", stats.vms_handed_over),
            ("faults", stats.counters.faults),
            ("recorded_pages", record.as_ref().map_or(0, FaultRecord::pages)),
        ];
        let numbers = numbers.map(|(name, number)| (name, number.to_string()));
        let mut values = vec![("socket", socket.as_str())];
        values.extend(numbers.iter().map(|(name, number)| (*name, number.as_str())));
        let written = record.zip(path).map_or(Ok(()), |(record, path)| {
            // The other server may have written its own there already.
            let written =
                if is_replaced { record.write_unless_contained(&path) } else { record.write(&path) };
            written.map_err(|error| format!("{}: {error}", path.display()))
        });
        let why = written.err();
        values.extend(why.as_ref().map(|why| ("record_not_written", why.as_str())));
        log.event("restored", &values);
    }
}

/// The result of a start that is under way.
pub struct Starting(oneshot::Receiver<Result<(), String>>);

/// Checks all that can be checked without a store.
///
/// # Errors
/// Two have one socket; an object has what only a file can have; a record could not be written.
pub fn check(configs: &[RestoreConfig]) -> Result<(), String> {
    let mut sockets: Vec<_> = configs.iter().map(|config| &config.socket).collect();
    sockets.sort_unstable();
    if let Some(pair) = sockets.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!(
            "there are two snapshots at {}; give each a socket of its own",
            pair[0].display()
        ));
    }
    let mut records: Vec<_> = configs.iter().filter_map(|config| config.record.as_ref()).collect();
    records.sort_unstable();
    if let Some(pair) = records.windows(2).find(|pair| pair[0] == pair[1]) {
        let record = pair[0].display();
        return Err(format!("there are two snapshots with the record {record}; give each a file of its own"));
    }
    configs.iter().try_for_each(|config| {
        let of_files = [("diff", !config.diff.is_empty()), ("minor", config.minor)];
        if let Some((key, _)) = of_files.into_iter().find(|(_, is_set)| *is_set && config.is_url()) {
            return Err(failed(
                config,
                &format_args!("`{key}` is for files; leave it out, or name a local copy of the object"),
            ));
        }
        if !config.packs.is_empty() && !config.is_url() {
            let remedy = "leave it out: the packs that a file refers to are found in its folder";
            return Err(failed(config, &format_args!("`packs` is for objects; {remedy}")));
        }
        let Some(path) = &config.record else { return Ok(()) };
        FaultRecord::check_target(path).map_err(|error| {
            let remedy = match &error {
                FaultRecordError::Write(_) => "; name a file in a folder that you may write to",
                _ => "",
            };
            failed(config, &format_args!("{}: {error}{remedy}", path.display()))
        })
    })
}

/// Checks all that this machine can tell, before a server that runs is asked to end: places of sockets, and snapshots
/// that are files. `cache` has as much memory as the one that is to serve them.
///
/// # Errors
/// One of `configs` could not be served.
pub fn try_out(configs: &[RestoreConfig], cache: &Cache) -> Result<(), String> {
    let mut images = Vec::new(); // each has its memory until all have theirs
    for config in configs {
        try_socket(&config.socket).map_err(|why| failed(config, &why))?;
        if let Some(path) = &config.replay {
            readable(path).map_err(|why| failed(config, &why))?;
        }
        if config.is_url() {
            continue;
        }
        let layers = layers_of(config);
        layers.iter().try_for_each(|path| readable(path)).map_err(|why| failed(config, &why))?;
        let tried = try_layers(cache, &layers, &options_of(config));
        images.push(tried.map_err(|error| not_served(config, &error, cache))?);
    }
    Ok(())
}

/// The error of a snapshot of files, in the units of the configuration if it has no room.
fn not_served(config: &RestoreConfig, error: &quinion::Error, cache: &Cache) -> String {
    let is_full = config.minor && error.kind() == quinion::ErrorKind::NoMemory;
    let image = is_full.then(|| identify_layers(cache, &layers_of(config)).ok()).flatten();
    match image {
        Some(image) => failed(config, &format_args!("{} ({error})", no_room(image.bytes, cache))),
        None => failed(config, error),
    }
}

fn readable(path: &Path) -> Result<(), String> {
    let remedy = "name a file that is there, and may be read";
    let found = std::fs::metadata(path).and_then(|found| match found.is_dir() {
        true => Err(std::io::ErrorKind::IsADirectory.into()),
        false if found.is_file() => std::fs::File::open(path).map(drop),
        false => Ok(()), // opening it may wait
    });
    found.map_err(|error| format!("cannot read {}: {error}; {remedy}", path.display()))
}

/// Whether a socket can be made there, as far as that can be told while another server may have it.
fn try_socket(path: &Path) -> Result<(), String> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err("something else is there; name another place, or remove it".into());
        }
        Ok(_) => return Ok(()),
        Err(_) => {}
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let found = rustix::fs::access(folder, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK);
    found.map_err(|error| {
        let remedy = "name a folder that is there, and that you may write to";
        format!("cannot make a socket in {}: {error}; {remedy}", folder.display())
    })
}

/// Why a snapshot of `image` bytes that VMMs map has no room beside those that have theirs.
fn no_room(image: u64, cache: &Cache) -> String {
    let stats = cache.stats();
    let (memory, all) = (stats.memory_bytes, stats.guest_bytes + image);
    let wanted = all + all / 32 + 2 * Cache::MEMORY_MIN;
    format!(
        "`minor`: the snapshot has {}, for which a memory of {} has no room; give memory {}M or more",
        quinion_size::shown(image),
        quinion_size::shown(memory),
        wanted.div_ceil(1 << 20)
    )
}

/// The files of a snapshot that is no object: the base, and the diffs above it.
fn layers_of(config: &RestoreConfig) -> Vec<PathBuf> {
    std::iter::once(PathBuf::from(&config.snapshot)).chain(config.diff.iter().cloned()).collect()
}

fn failed(config: &RestoreConfig, why: &dyn Display) -> String {
    format!("cannot serve the snapshot {} at {}: {why}", config.snapshot, config.socket.display())
}

impl Starter {
    /// Starts a server for each of `configs`, on a thread of its own. Each is one of `restores` as soon as it runs.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(self, configs: Vec<RestoreConfig>, restores: &Restores) -> Result<Starting, String> {
        let restores = restores.clone();
        let (sender, receiver) = oneshot::channel();
        let is_nothing = configs.is_empty();
        let start = move || {
            let started = configs.iter().try_for_each(|config| {
                restores.add(self.begin(config)?);
                Ok(())
            });
            drop(self);
            // The program may be ending, and wait for nothing.
            drop(sender.send(started));
        };
        if is_nothing {
            start();
        } else {
            let thread = std::thread::Builder::new().name("quinion-start".into()).spawn(start);
            thread.map_err(|error| format!("cannot start a thread to open snapshots: {error}"))?;
        }
        Ok(Starting(receiver))
    }

    fn begin(&self, config: &RestoreConfig) -> Result<RunningRestore, String> {
        let socket = config.socket.display().to_string();
        let failed = |why: &dyn Display| failed(config, why);
        let (mut options, log, of) = (options_of(config), self.log, socket.clone());
        let tell = move |event: &Event| log.event("vm", &[("socket", &of), ("says", &event.to_string())]);
        options.observer = Some(Arc::new(tell));
        let server = if config.is_url() {
            let open = |url: &String| self.opener.open(url).map(|object| object.file().clone());
            let file = open(&config.snapshot).map_err(|error| failed(&error))?;
            let packs: Result<Vec<_>, _> = config.packs.iter().map(open).collect();
            options.packs = packs.map_err(|error| failed(&error))?;
            if let Some(path) = &config.replay {
                let image =
                    identify_file(&self.cache, &file, &options.packs).map_err(|error| failed(&error))?;
                options.replay = self.record_of(path, image).map_err(|why| failed(&why))?;
            }
            Server::start_file(&self.cache, &file, &config.socket, options)
        } else {
            let layers = layers_of(config);
            if let Some(path) = &config.replay {
                let image = identify_layers(&self.cache, &layers).map_err(|error| failed(&error))?;
                options.replay = self.record_of(path, image).map_err(|why| failed(&why))?;
            }
            Server::start_layers(&self.cache, &layers, &config.socket, options)
        };
        let server = server.map_err(|error| not_served(config, &error, &self.cache))?;
        let bytes = server.image().bytes.to_string();
        let values = [("snapshot", config.snapshot.as_str()), ("bytes", &bytes), ("socket", &socket)];
        self.log.event("restoring", &values);
        Ok(RunningRestore { socket, record: config.record.clone(), server })
    }

    /// The record at `path`, as far as it is of use; what is not goes to the log.
    fn record_of(&self, path: &Path, image: ImageIdentity) -> Result<Option<FaultRecord>, String> {
        let remedy = "name a file that a server has written as its `record`, or leave out `replay`";
        let read = FaultRecord::for_replay(path, image)
            .map_err(|error| format!("{}: {error}; {remedy}", path.display()))?;
        read.remarks.iter().for_each(|remark| self.log.event("record", &[("why", remark)]));
        Ok(read.record)
    }
}

fn options_of(config: &RestoreConfig) -> RestoreOptions {
    let mut options = RestoreOptions::new();
    options.record = config.record.is_some();
    options.minor = config.minor;
    if let Some(mode) = config.socket_mode {
        options.socket_mode = mode.0;
    }
    if let Some(SocketOwner { user, group }) = config.socket_owner {
        (options.socket_owner, options.socket_group) = (Some(user), group);
    }
    options.fill = config.fill.unwrap_or(options.fill);
    options.on_failure = config.on_failure.unwrap_or(options.on_failure);
    options.vms_max = config.vms_max.unwrap_or(options.vms_max);
    options.workers = config.workers.unwrap_or(options.workers);
    if config.is_url() {
        options.snapshot_name = Some(config.snapshot.clone());
        options.retry_reads = config.deadline.map_or(DEADLINE, Deadline::time);
    }
    options
}

impl Starting {
    /// Waits until all servers have been started.
    ///
    /// # Errors
    /// One of them could not be.
    pub async fn done(self) -> Result<(), String> {
        self.0.await.map_err(|_| {
            "the thread that opens snapshots panicked; see its message above, and report it".to_owned()
        })?
    }
}

impl Restores {
    /// Each server's socket and numbers.
    pub fn stats(&self) -> Vec<(String, RestoreStats)> {
        let running = self.running();
        running.iter().flatten().map(|one| (one.socket.clone(), one.server.stats())).collect()
    }

    fn running(&self) -> MutexGuard<'_, Option<Vec<RunningRestore>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, one: RunningRestore) {
        let mut running = self.running();
        if let Some(all) = running.as_mut() {
            all.push(one);
        } else {
            drop(running); // the end of a server waits for its VMs
            drop(one);
        }
    }

    /// Ends the servers whose VMs another one has taken over, each on a thread of its own, since an end may wait for a
    /// device. One for which the system has no thread is tried again by the next call.
    pub fn end_replaced(&self, log: Log) {
        let mut running = self.running();
        let Some(all) = running.as_mut() else { return };
        let replaced: Vec<_> = all.extract_if(.., |one| one.server.is_replaced()).collect();
        for one in replaced {
            let one = Arc::new(Mutex::new(Some(one)));
            let of_thread = Arc::clone(&one);
            let end = move || take(&of_thread).into_iter().for_each(|one| one.end(log));
            match std::thread::Builder::new().name("quinion-end".to_owned()).spawn(end) {
                Ok(thread) => self.ends.lock().unwrap_or_else(PoisonError::into_inner).push(thread),
                Err(_) => all.extend(take(&one)),
            }
        }
    }

    /// Ends the servers, whose VMs are killed or left, and writes their records. Waits for ends that have begun.
    pub fn stop(&self, log: Log) {
        let running = self.running().take();
        running.into_iter().flatten().for_each(|one| one.end(log));
        let ends = std::mem::take(&mut *self.ends.lock().unwrap_or_else(PoisonError::into_inner));
        ends.into_iter().for_each(|end| drop(end.join())); // should one have panicked, the others have ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> RestoreConfig {
        text.parse().unwrap()
    }

    #[test]
    fn a_wrong_table_is_refused_before_a_store_is_asked() {
        let object = config("s3://bucket/vm.mem=/run/a.sock");
        assert_eq!(check(&[object.clone(), config("/srv/vm.mem=/run/b.sock")]), Ok(()));
        let refused = |configs: &[RestoreConfig], word: &str| {
            let why = check(configs).unwrap_err();
            assert!(why.contains(word) && why.contains(';'), "{word}: {why}");
        };
        refused(&[object.clone(), config("/srv/vm.mem=/run/a.sock")], "two snapshots at /run/a.sock");
        refused(&[RestoreConfig { diff: vec!["d".into()], ..object.clone() }], "`diff` is for files");
        let record = |socket: &str| RestoreConfig { record: Some("/tmp/r".into()), ..config(socket) };
        refused(&[record("s3://b/k=/run/a.sock"), record("s3://b/k=/run/b.sock")], "the record /tmp/r");
        let file = RestoreConfig { snapshot: "/f".into(), packs: vec!["s3://b/p".into()], ..object.clone() };
        refused(&[file], "`packs` is for objects");
        refused(&[RestoreConfig { minor: true, ..object.clone() }], "`minor` is for files");
        let record = Some(PathBuf::from("/nowhere/at/all"));
        refused(&[RestoreConfig { record, ..object }], "/nowhere/at/all");
    }
}
