//! Reload: another configuration for a server that runs.
//!
//! Stores are added and removed, and memory is resized up to its size at the server's start. Settings that cannot
//! change while clients read (name, disk tier, monitors' address) are reported, and wait for a restart; so do snapshots
//! of VMs, since to end a server is to end its VMs. Credentials are in the environment, which is that of the start.
//!
//! Invariant: a configuration that is not understood, or has a store that cannot be opened, changes nothing.

use quinion_serve::config::{Bytes, Changes, Config};
use quinion_serve::log::Log;
use quinion_serve::stores;
use quinion_service::Server;

use crate::restores;

/// The configuration of the start, and the one in force.
#[derive(Debug)]
pub struct Reload {
    start: Config,
    now: Config,
}

impl Reload {
    /// The one that the server was started with.
    pub fn new(config: Config) -> Self {
        Self { start: config.clone(), now: config }
    }

    /// Applies what can be changed, and logs that.
    pub fn reload(&mut self, new: Result<Config, String>, server: &Server, log: Log) {
        match new.and_then(|new| self.change(new, server)) {
            Ok(changes) => {
                let count = |stores: usize| stores.to_string();
                let (removed, added) = (count(changes.removed.len()), count(changes.added.len()));
                let mut values = vec![("stores_removed", removed.as_str()), ("stores_added", &added)];
                let waits = changes.at_restart.join(" ");
                values.extend((!waits.is_empty()).then_some(("after_restart", waits.as_str())));
                log.event("reloaded", &values);
            }
            Err(why) => log.event("not reloaded", &[("why", &why)]),
        }
    }

    fn change(&mut self, new: Config, server: &Server) -> Result<Changes, String> {
        // 1. The steps that can fail: all stores, also those that stay, since two may have one prefix.
        let at_restart = Changes::between(&self.start, &new).at_restart;
        let changes = Changes { at_restart, ..Changes::between(&self.now, &new) };
        stores::check_prefixes(&new.stores)?;
        restores::check(&new.restores)?;
        let opened = stores::open_all(&changes.added)?;
        // 2. Memory, which is refused in whole.
        if let Some(Bytes(bytes)) = changes.memory {
            let most = server.cache().stats().memory_max_bytes;
            if bytes > most {
                let (asked, most) = (quinion_size::shown(bytes), quinion_size::shown(most));
                let remedy = "restart the server to give it more";
                return Err(format!(
                    "memory: {asked} was asked for, and it was started with {most}; {remedy}"
                ));
            }
            server.cache().resize(bytes).map_err(|error| format!("memory: {error}"))?;
        }
        // 3. Stores, those first that may be wrong. A prefix that gets another store is never without one.
        let stays = |prefix: &str| {
            new.stores.iter().any(|store| stores::trimmed(&store.prefix) == stores::trimmed(prefix))
        };
        for (prefix, (store, options)) in opened {
            server.set_store(prefix, store, options).map_err(|error| error.to_string())?;
        }
        for store in changes.removed.iter().filter(|store| !stays(&store.prefix)) {
            server.remove_store(&store.prefix);
        }
        self.now = new;
        Ok(changes)
    }
}
