//! Endpoint: what does a warm GET of 1 MiB cost at `quinion-s3`, beside versitygw on the same files?
//!
//! ```text
//!   made once   versitygw on a folder, with objects of 1 MiB; two endpoints whose store it is
//!
//!     asking      quinion-s3 --freshness always: each GET asks versitygw by a HEAD whether the object is the same
//!     immutable   quinion-s3 --freshness immutable: no question
//!     versitygw   the store itself, whose files the kernel has cached
//!
//!   clients     boto3       an SDK for Python, in a process of its own, with connections kept and no checksums
//!               bare HTTP   signed URLs over connections that are kept, by threads of this process
//! ```
//!
//! All clients sign their requests, all servers check that, and all answer over loopback. Every object is read before
//! it is measured. The answers are counted, and their first and last bytes compared.
//!
//! The CPU time of a GET is that of all servers that had a part in it: for `asking`, of the endpoint and of the store.
//! Clients have theirs on top, and on two cores they compete with the servers: the time of a slow client is mostly its
//! own. versitygw keeps connections, as it does by an option.

mod bare;
mod boto;
mod servers;

use std::rc::Rc;

use crate::fixtures::shared::Shared;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use servers::{At, Servers};

const THROUGHPUT: &str = "throughput";
const CPU: &str = "cpu of servers";
const METRICS: [Metric; 2] = [Metric::gain(THROUGHPUT, "MiB/s"), Metric::cost(CPU, "ms/GET")];

const ASKING: &str = "quinion-s3, asking";
const IMMUTABLE: &str = "quinion-s3, immutable";
const PEER: &str = "versitygw";
const GOAL: f64 = 1.0;
const REPEAT: usize = 9;

/// Elapsed seconds of so many GETs by so many connections; the clock runs when all are connected.
type Client = fn(&Servers, At, Gets) -> Result<Measured, Unmeasured>;

#[derive(Clone, Copy, Debug)]
struct Gets {
    gets: usize,
    /// Number of connections, each with one GET at a time.
    connections: usize,
}

#[derive(Clone, Copy, Debug)]
struct Measured {
    /// From the first request to the last byte.
    seconds: f64,
    /// CPU seconds of the servers meanwhile.
    cpu_seconds: f64,
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let servers = Shared::new(settings, |settings| Servers::new(settings, boto::write));
    let gets = settings.pick(48, 512);
    let clients: [(&str, Client); 2] = [("boto3", boto::read), ("bare HTTP", bare::read)];
    let shapes = [1, 4].map(|connections| Gets { gets, connections });
    let each = clients.into_iter().flat_map(|(name, client)| shapes.map(|shape| (name, client, shape)));
    each.map(|(name, client, shape)| {
        case(&servers, &format!("{name}, {} at a time", shape.connections), client, shape)
    })
    .collect()
}

fn case(servers: &Shared<Servers>, name: &str, client: Client, shape: Gets) -> Case {
    let servers = servers.clone();
    let case = Case::new(format!("1 MiB by {name}"), &METRICS, move || {
        let servers = servers.get()?;
        let of = |name, at| {
            let servers = Rc::clone(&servers);
            Alternative::new(name, move |_| {
                let Measured { seconds, cpu_seconds } = client(&servers, at, shape)?;
                let mib = (shape.gets as u64 * servers::OBJECT_BYTES) as f64 / f64::from(1 << 20);
                Ok(vec![mib / seconds, cpu_seconds * 1e3 / shape.gets as f64])
            })
            .excused(METRICS.len())
        };
        Ok(vec![of(ASKING, At::Asking), of(IMMUTABLE, At::Immutable), of(PEER, At::Store)])
    });
    [ASKING, IMMUTABLE].into_iter().fold(case.usually(REPEAT).at_least(REPEAT), |case, ours| {
        case.compare(THROUGHPUT, ours, PEER).goal(GOAL).compare(CPU, ours, PEER)
    })
}
