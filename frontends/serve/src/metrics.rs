//! Metrics: a server's counters and sizes, in Prometheus's format.
//!
//! | begins with | is |
//! |---|---|
//! | `quinion_cache_` | a number of the cache: each of `quinion::Stats` |
//! | `quinion_service_` | clients, what they hold, and their reads |
//! | `quinion_store_` | what was asked of a store and came from it; `store` is its prefix, which has no secret (`stores.rs`) |
//! | `quinion_saved_` | what clients' reads did not ask of stores, and its price, if stores have one |
//! | `quinion_spent_` | the price of what was asked |
//! | `quinion_disk_` | the disk tier, if there is one |
//! | `quinion_restore_` | a server of page faults; `socket` is where its VMs connect. The names are those of `quinion restore`, without `device_bytes` |
//! | `quinion_restore_vm_` | a VM that is served now, 256 of each server at most; `vm` is its number |
//!
//! They are read when a monitor asks; nothing is counted here. The text is OpenMetrics (`prometheus-client`).

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use quinion::{DiskStats, Stats};
use quinion_object::{AnswerTimes, FetchStats, FirstByte};
use quinion_serve::price::{Price, Savings};
use quinion_service::{Server, ServerStats};
use quinion_vm::{RestoreNumber, RestoreStats, RestoreValue};

/// The media type of [`text_of`].
pub const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Facts of a configuration that metrics show.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The price of a store's answers, if that was given.
    pub price: Option<Price>,
    /// Whether there is to be a disk tier. If the cache has none, it could not be opened.
    pub has_disk: bool,
}

/// All metrics of a server, and of those of page faults, by their sockets.
pub fn text_of(server: &Server, shown: Shown, restores: Vec<(String, RestoreStats)>) -> String {
    let (cache, service) = (server.cache().stats(), server.stats());
    let Shown { price, has_disk } = shown;
    let missing = || {
        let mut stats = DiskStats::default();
        stats.is_off = true;
        has_disk.then_some(stats)
    };
    let socket = server.socket().display().to_string();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot {
        cache,
        socket,
        service,
        disk: server.cache().disk_stats().or_else(missing),
        price,
        restores,
    }));
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("a string takes all");
    text
}

#[derive(Debug)]
struct Snapshot {
    cache: Stats,
    /// Where clients connect.
    socket: String,
    service: ServerStats,
    disk: Option<DiskStats>,
    price: Option<Price>,
    restores: Vec<(String, RestoreStats)>,
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (about, (name, number)) in Stats::describe().into_iter().zip(self.cache.numbers()) {
            let kind = if about.is_count { Kind::Count } else { Kind::Gauge };
            encode_one(
                &mut encoder,
                &Row { name: format!("quinion_cache_{name}"), help: about.help, kind },
                number,
            )?;
        }
        encode_socket(&mut encoder, &self.socket)?;
        let service = &self.service;
        for (name, help, kind, number) in [
            ("clients", "Processes that are connected.", Kind::Gauge, service.clients as u64),
            (
                "open_files",
                "Files and objects that clients have open.",
                Kind::Gauge,
                service.open_files as u64,
            ),
            ("pins", "Ranges that clients have pinned.", Kind::Gauge, service.pins as u64),
            ("reads", "Reads of clients, as the clients count them.", Kind::Count, service.reads),
            (
                "read_bytes",
                "Bytes that clients have read, as the clients count them.",
                Kind::Count,
                service.bytes,
            ),
            ("asked_reads", "Reads of clients that had to ask the server.", Kind::Count, service.asked),
        ] {
            encode_one(&mut encoder, &Row { name: format!("quinion_service_{name}"), help, kind }, number)?;
        }
        for (name, help, of) in FETCH_COUNTS {
            let numbers: Vec<_> =
                service.fetches.iter().map(|(prefix, fetches)| (prefix.as_str(), of(fetches))).collect();
            encode_stores(&mut encoder, name, help, &numbers)?;
        }
        encode_first_bytes(&mut encoder, &service.first_bytes)?;
        encode_answer_times(&mut encoder, &service.answer_times)?;
        encode_savings(&mut encoder, Savings::of(service), self.price)?;
        for (name, help, kind, of) in DISK_NUMBERS {
            let Some(disk) = &self.disk else { break };
            let row = Row { name: format!("quinion_disk_{name}"), help, kind: *kind };
            encode_one(&mut encoder, &row, of(disk))?;
        }
        encode_restores(&mut encoder, &self.restores)?;
        encode_restore_times(&mut encoder, &self.restores)?;
        encode_restored_vms(&mut encoder, &self.restores)
    }
}

type FetchCount = (&'static str, &'static str, fn(&FetchStats) -> u64);

const FETCH_COUNTS: &[FetchCount] = &[
    ("heads", "HEADs that were sent, with those that were sent again.", |fetches| fetches.heads),
    ("gets", "GETs that were sent, with those that were sent again.", |fetches| fetches.gets),
    ("fetched_bytes", "Bytes of the answers of stores.", |fetches| fetches.bytes),
    ("gap_bytes", "Bytes of answers between two wanted ranges, thrown away.", |fetches| fetches.gap_bytes),
    ("retries", "Requests to stores that were sent again.", |fetches| fetches.retries),
    (
        "advised_retries",
        "Requests that were sent again after a pause for which the store asked (Retry-After).",
        |fetches| fetches.advised,
    ),
    ("failures", "Fetches that failed after all retries.", |fetches| fetches.failures),
    ("changes", "Fetches that failed because the object was replaced or deleted.", |fetches| fetches.changes),
    ("hedges", "GETs that were sent beside a late one.", |fetches| fetches.hedges),
    ("hedges_won", "GETs sent beside a late one whose answer began first.", |fetches| fetches.hedges_won),
];

type DiskNumber = (&'static str, &'static str, Kind, fn(&DiskStats) -> u64);

const DISK_NUMBERS: &[DiskNumber] = &[
    (
        "off",
        "1 while the disk is left alone, because it failed or does not answer; else 0.",
        Kind::Gauge,
        |disk| disk.is_off.into(),
    ),
    ("pages", "Pages on the disk; none while it is left alone.", Kind::Gauge, |disk| disk.pages),
    ("put_pages", "Pages stored on the disk.", Kind::Count, |disk| disk.put_pages),
    (
        "refused_pages",
        "Pages that were not stored: the disk was behind, or the tier is off. Counts each attempt.",
        Kind::Count,
        |disk| disk.refused_pages,
    ),
    ("hit_pages", "Pages read from the disk.", Kind::Count, |disk| disk.hit_pages),
    ("written_bytes", "Bytes written to the disk, tables and padding included.", Kind::Count, |disk| {
        disk.written_bytes
    }),
    ("pending_pages", "Refused pages that wait in memory to be stored later.", Kind::Gauge, |disk| {
        disk.pending_pages
    }),
    ("late_pages", "Refused pages that were stored later.", Kind::Count, |disk| disk.late_pages),
    (
        "missed_pages",
        "Refused pages that are not stored later: gone from memory, written, too many, or the disk full or failed.",
        Kind::Count,
        |disk| disk.missed_pages,
    ),
    ("corrupt_extents", "Extents whose checksum did not match.", Kind::Count, |disk| disk.corrupt_extents),
    ("errors", "Reads and writes that the disk refused, or did not answer.", Kind::Count, |disk| disk.errors),
];

/// Whether a number only rises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Count,
    Gauge,
}

struct Row {
    name: String,
    help: &'static str,
    kind: Kind,
}

fn encode_one(encoder: &mut DescriptorEncoder<'_>, row: &Row, number: u64) -> fmt::Result {
    let Row { name, help, kind } = row;
    let help = help.trim_end_matches('.'); // the encoder adds one
    match kind {
        Kind::Count => {
            let metric = ConstCounter::new(number);
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)
        }
        Kind::Gauge => {
            let metric = ConstGauge::new(number.min(i64::MAX as u64) as i64);
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)
        }
    }
}

/// Which server this is: by a label, as numbers are all that there is.
fn encode_socket(encoder: &mut DescriptorEncoder<'_>, socket: &str) -> fmt::Result {
    let help = "Where clients connect, as the label says; the value is 1";
    let mut metrics = encoder.encode_descriptor("quinion_service_socket", help, None, MetricType::Gauge)?;
    let labels = [("socket", socket)];
    ConstGauge::new(1_i64).encode(metrics.encode_family(&labels)?)
}

fn encode_stores(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    numbers: &[(&str, u64)],
) -> fmt::Result {
    let (name, help) = (format!("quinion_store_{name}"), help.trim_end_matches('.'));
    let mut metrics = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
    numbers.iter().try_for_each(|(store, number)| {
        let labels = [("store", *store)];
        let store: MetricEncoder<'_> = metrics.encode_family(&labels)?;
        ConstCounter::new(*number).encode(store)
    })
}

fn encode_first_bytes(encoder: &mut DescriptorEncoder<'_>, times: &[(String, FirstByte)]) -> fmt::Result {
    let (name, help) =
        ("quinion_store_first_byte_seconds", "Time to the first byte of a store's answers, by quantile");
    let mut metrics = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (prefix, FirstByte { p50, p95, p99, .. }) in times {
        for (quantile, time) in [("0.5", p50), ("0.95", p95), ("0.99", p99)] {
            let labels = [("store", prefix.as_str()), ("quantile", quantile)];
            ConstGauge::new(time.as_secs_f64()).encode(metrics.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// In buckets, so that a monitor can add up those of several nodes before it takes a quantile.
fn encode_answer_times(encoder: &mut DescriptorEncoder<'_>, times: &[(String, AnswerTimes)]) -> fmt::Result {
    let (name, help) =
        ("quinion_store_answer_seconds", "Time to the first byte of a store's answers to GETs of fetches");
    let mut metrics = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    for (prefix, times) in times {
        let end_of = |end: Option<std::time::Duration>| end.map_or(f64::MAX, |end| end.as_secs_f64());
        let buckets: Vec<_> = times.buckets().map(|(end, count)| (end_of(end), count)).collect();
        let labels = [("store", prefix.as_str())];
        let mut store: MetricEncoder<'_> = metrics.encode_family(&labels)?;
        store.encode_histogram::<[(&str, &str); 0]>(
            times.sum().as_secs_f64(),
            times.count(),
            &buckets,
            None,
        )?;
    }
    Ok(())
}

/// No counters: fetching ahead of reads makes them smaller for a while.
fn encode_savings(
    encoder: &mut DescriptorEncoder<'_>,
    savings: Savings,
    price: Option<Price>,
) -> fmt::Result {
    let Savings { sent_gets, sent_bytes, saved_gets, saved_bytes } = savings;
    for (name, help, number) in [
        ("gets", "Reads of clients beyond the GETs that were sent.", saved_gets),
        ("bytes", "Bytes that clients have read beyond those that were fetched.", saved_bytes),
    ] {
        let row = Row { name: format!("quinion_saved_{name}"), help, kind: Kind::Gauge };
        encode_one(encoder, &row, number)?;
    }
    let Some(price) = price else { return Ok(()) };
    for (name, help, number) in [
        ("quinion_saved_price", "Price of the GETs and bytes saved", price.of(saved_gets, saved_bytes)),
        (
            "quinion_spent_price",
            "Price of the GETs that were sent and their bytes",
            price.of(sent_gets, sent_bytes),
        ),
    ] {
        let metric = ConstGauge::new(number);
        metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
    }
    Ok(())
}

/// The name of a family: OpenMetrics has one for a count and its gauge, and here are two.
fn family_of(number: &RestoreNumber) -> &'static str {
    if number.is_count && number.name == "vms" { "vms_served" } else { number.name }
}

fn kind_of(number: &RestoreNumber) -> MetricType {
    if number.is_count { MetricType::Counter } else { MetricType::Gauge }
}

fn encode_number(metric: MetricEncoder<'_>, number: &RestoreNumber) -> fmt::Result {
    match (number.is_count, number.value) {
        (true, RestoreValue::Whole(value)) => ConstCounter::new(value).encode(metric),
        (true, RestoreValue::Nanoseconds(value)) => ConstCounter::new(value as f64 / 1e9).encode(metric),
        (false, RestoreValue::Whole(value)) => {
            ConstGauge::new(value.min(i64::MAX as u64) as i64).encode(metric)
        }
        (false, RestoreValue::Nanoseconds(value)) => ConstGauge::new(value as f64 / 1e9).encode(metric),
    }
}

/// A family for each number, with a row for each server.
fn encode_restores(encoder: &mut DescriptorEncoder<'_>, restores: &[(String, RestoreStats)]) -> fmt::Result {
    // The cache reads devices for clients, too, and which of these bytes were a VM's it does not know.
    let own = |stats: &RestoreStats| {
        stats.numbers().into_iter().filter(|number| number.name != "device_bytes").collect::<Vec<_>>()
    };
    let all: Vec<_> = restores.iter().map(|(socket, stats)| (socket, own(stats))).collect();
    let families = all.first().map_or(0, |(_, numbers)| numbers.len());
    for family in 0..families {
        let number = &all[0].1[family];
        let name = format!("quinion_restore_{}", family_of(number));
        let mut metrics = encoder.encode_descriptor(&name, number.help, None, kind_of(number))?;
        for (socket, numbers) in &all {
            let labels = [("socket", socket.as_str())];
            encode_number(metrics.encode_family(&labels)?, &numbers[family])?;
        }
    }
    Ok(())
}

fn encode_restore_times(
    encoder: &mut DescriptorEncoder<'_>,
    restores: &[(String, RestoreStats)],
) -> fmt::Result {
    if restores.is_empty() {
        return Ok(());
    }
    let (name, help) = ("quinion_restore_fault_seconds", "From reading a fault to its answer");
    let mut metrics = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    for (socket, stats) in restores {
        // Each bucket has those alone that are in none before.
        let mut before = 0;
        let mut alone = |faults: u64| faults - std::mem::replace(&mut before, faults);
        let ends = stats.latency_buckets().into_iter();
        let mut buckets: Vec<_> = ends.map(|(end, faults)| (end as f64 / 1e9, alone(faults))).collect();
        let latency = &stats.counters.latency;
        buckets.push((f64::MAX, alone(latency.count())));
        let labels = [("socket", socket.as_str())];
        let mut server: MetricEncoder<'_> = metrics.encode_family(&labels)?;
        let (sum, count) = (latency.sum() as f64 / 1e9, latency.count());
        server.encode_histogram::<[(&str, &str); 0]>(sum, count, &buckets, None)?;
    }
    Ok(())
}

/// A family for each number, with a row for each VM.
fn encode_restored_vms(
    encoder: &mut DescriptorEncoder<'_>,
    restores: &[(String, RestoreStats)],
) -> fmt::Result {
    let vms = restores.iter().flat_map(|(socket, stats)| stats.each.iter().map(move |vm| (socket, vm)));
    let all: Vec<_> =
        vms.map(|(socket, vm)| (socket, vm.vm.to_string(), vm.process.to_string(), vm.numbers())).collect();
    let families = all.first().map_or(0, |(.., numbers)| numbers.len());
    for family in 0..families {
        let number = &all[0].3[family];
        let (name, help) =
            (format!("quinion_restore_vm_{}", number.name), format!("{}, of one VM", number.help));
        let mut metrics = encoder.encode_descriptor(&name, &help, None, kind_of(number))?;
        for (socket, vm, process, numbers) in &all {
            let labels = [("socket", socket.as_str()), ("vm", vm.as_str()), ("process", process.as_str())];
            encode_number(metrics.encode_family(&labels)?, &numbers[family])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_gauge_is_named_like_a_counter() {
        for about in Stats::describe().iter().filter(|about| !about.is_count) {
            assert!(!about.name.ends_with("_total"), "{}", about.name);
        }
        assert!(DISK_NUMBERS.iter().all(|(name, ..)| !name.ends_with("_total")));
    }
}
