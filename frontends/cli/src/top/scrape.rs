//! Scrape: asks a server for its metrics, and parses them.
//!
//! ```text
//!   # HELP ...                                             skipped
//!   quinion_service_socket{socket="/run/.."} 1             the server, by its socket
//!   quinion_service_reads_total 10                         a number, by its name without `_total`
//!   quinion_store_gets_total{store="s3://one"} 3           one of a store
//!   quinion_store_first_byte_seconds{store=..,quantile=..} one of three of a store
//!   # EOF                                                  the end: without it the answer was cut
//! ```
//!
//! Unknown metrics are skipped, so that a newer server can be watched, too.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// A deadline for the server's answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Longer answers are no metrics.
const ANSWER_BYTES_MAX: u64 = 8 << 20;
const PAGE_BYTES: u64 = 4096;
/// The parts of answers whose time to the first byte is told.
const QUANTILES: [&str; 3] = ["0.5", "0.95", "0.99"];
const FIRST_BYTE: &str = "quinion_store_first_byte_seconds";

/// The address at which a server answers monitors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Monitor(String);

/// A server's numbers at one time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Sample {
    numbers: BTreeMap<String, f64>,
    /// Where its clients connect; `None` of an older server.
    pub socket: Option<String>,
    /// The samples of its stores, by their prefixes.
    pub stores: Vec<StoreSample>,
}

/// The numbers of a store.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StoreSample {
    /// The store's prefix.
    pub prefix: String,
    numbers: BTreeMap<String, f64>,
    /// Seconds within which half of its answers began, 95 of 100, and 99; `None` before there are enough.
    pub first_byte: [Option<f64>; 3],
}

impl Monitor {
    /// A monitor of the server at `address`, which may be an `http://` URL.
    pub fn new(address: &str) -> Self {
        let address = address.strip_prefix("http://").unwrap_or(address);
        Self(address.split('/').next().unwrap_or_default().to_owned())
    }

    /// The address.
    pub fn address(&self) -> &str {
        &self.0
    }

    /// Asks the server for its numbers now.
    ///
    /// # Errors
    /// A sentence: the server does not answer, or another program does.
    pub fn ask(&self) -> Result<Sample, String> {
        let failed = |why: &dyn std::fmt::Display| {
            format!("cannot read the metrics at {}: {why}; start `quinion serve --metrics {0}`", self.0)
        };
        let answer = self.answer().map_err(|error| match error.kind() {
            // The kernel says the former of a read, and the latter of a connect.
            ErrorKind::WouldBlock | ErrorKind::TimedOut => format!(
                "cannot read the metrics at {}: no answer in {} seconds; the server is stopped or too busy: \
                 let it go on, or try again later",
                self.0,
                ANSWER_MAX.as_secs()
            ),
            _ => failed(&error),
        })?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| failed(&"the answer is cut"))?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        if status != "200" {
            return Err(failed(&format!("the answer is {status}")));
        }
        Sample::of(body).map_err(|why| failed(&why))
    }

    fn answer(&self) -> std::io::Result<String> {
        let none = || std::io::Error::other("it is not an address");
        let address = self.0.to_socket_addrs()?.next().ok_or_else(none)?;
        let mut stream = TcpStream::connect_timeout(&address, ANSWER_MAX)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        stream.set_write_timeout(Some(ANSWER_MAX))?;
        stream.write_all(format!("GET /metrics HTTP/1.0\r\nHost: {}\r\n\r\n", self.0).as_bytes())?;
        let mut answer = String::new();
        stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
        Ok(answer)
    }
}

impl Sample {
    /// The numbers in a text.
    ///
    /// # Errors
    /// It is not whole, or not a server's.
    pub fn of(text: &str) -> Result<Self, &'static str> {
        if text.lines().last() != Some("# EOF") {
            return Err("the answer is cut, or no metrics");
        }
        let mut sample = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            let (name, labels) = name.split_once('{').unwrap_or((name, ""));
            let name = name.strip_suffix("_total").unwrap_or(name);
            if name == "quinion_service_socket" {
                sample.socket = label_of(labels, "socket");
            }
            match label_of(labels, "store") {
                Some(store) => sample.store(store).note(name, label_of(labels, "quantile").as_deref(), value),
                None => note(&mut sample.numbers, name, value),
            }
        }
        if sample.numbers.contains_key("quinion_service_reads") {
            Ok(sample)
        } else {
            Err("they are not those of a server of Quinion's")
        }
    }

    fn store(&mut self, prefix: String) -> &mut StoreSample {
        let at = self.stores.iter().position(|store| store.prefix == prefix).unwrap_or_else(|| {
            self.stores.push(StoreSample { prefix, ..Default::default() });
            self.stores.len() - 1
        });
        &mut self.stores[at]
    }

    /// A number, if there is one of that name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.numbers.get(name).copied()
    }

    /// A number; 0 if there is none of that name.
    pub fn number(&self, name: &str) -> f64 {
        self.get(name).unwrap_or(0.0)
    }

    /// Pages as the bytes they have.
    pub fn pages_as_bytes(&self, name: &str) -> u64 {
        self.number(name) as u64 * PAGE_BYTES
    }

    /// Reads of clients that the server was not asked for, and all of them.
    pub fn hits(&self) -> (u64, u64) {
        let reads = self.number("quinion_service_reads") as u64;
        (reads.saturating_sub(self.number("quinion_service_asked_reads") as u64), reads)
    }

    /// The server, by its socket, and where it answers.
    pub fn server_at(&self, address: &str) -> String {
        self.socket.as_ref().map_or_else(|| address.to_owned(), |socket| format!("{socket} at {address}"))
    }

    /// Whether there is a disk tier.
    pub fn has_disk(&self) -> bool {
        self.get("quinion_disk_pages").is_some()
    }
}

impl StoreSample {
    fn note(&mut self, name: &str, quantile: Option<&str>, value: f64) {
        match quantile.and_then(|quantile| QUANTILES.iter().position(|other| *other == quantile)) {
            Some(at) if name == FIRST_BYTE => self.first_byte[at] = Some(value),
            _ => note(&mut self.numbers, name, value),
        }
    }

    /// A number; 0 if there is none of that name.
    pub fn number(&self, name: &str) -> f64 {
        self.numbers.get(name).copied().unwrap_or(0.0)
    }
}

fn note(numbers: &mut BTreeMap<String, f64>, name: &str, value: f64) {
    numbers.insert(name.to_owned(), value);
}

/// The value of a label, without escapes: a store's prefix has neither quotation mark nor backslash.
fn label_of(labels: &str, name: &str) -> Option<String> {
    let (_, rest) = labels.split_once(&format!("{name}=\""))?;
    Some(rest.split_once('"')?.0.to_owned())
}

#[cfg(test)]
pub(super) const EXAMPLE: &str = "\
# HELP quinion_service_clients Processes that are connected.
# TYPE quinion_service_clients gauge
quinion_service_clients 2
quinion_service_socket{socket=\"/run/q.sock\"} 1
quinion_service_open_files 3
quinion_service_reads_total 10
quinion_service_read_bytes_total 10485760
quinion_service_asked_reads_total 2
quinion_cache_memory_bytes 8388608
quinion_cache_grown_bytes 4194304
quinion_cache_cached_pages 512
quinion_cache_evicted_pages_total 5
quinion_store_heads_total{store=\"s3://one\"} 1
quinion_store_heads_total{store=\"s3://two\"} 0
quinion_store_gets_total{store=\"s3://one\"} 3
quinion_store_fetched_bytes_total{store=\"s3://one\"} 3145728
quinion_store_first_byte_seconds{store=\"s3://one\",quantile=\"0.5\"} 0.012
quinion_store_first_byte_seconds{store=\"s3://one\",quantile=\"0.95\"} 0.02
quinion_saved_gets 7
quinion_saved_bytes 7340032
quinion_saved_price 0.5
quinion_spent_price 0.25
quinion_disk_pages 10
quinion_disk_hit_pages_total 4
quinion_disk_written_bytes_total 1048576
quinion_disk_errors_total 0
# EOF
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_name_and_by_store() {
        let sample = Sample::of(EXAMPLE).unwrap();
        assert_eq!((sample.number("quinion_service_clients"), sample.hits()), (2.0, (8, 10)));
        assert_eq!(sample.socket.as_deref(), Some("/run/q.sock"));
        let names: Vec<_> = sample.stores.iter().map(|store| store.prefix.as_str()).collect();
        assert_eq!(names, ["s3://one", "s3://two"]);
        assert_eq!(sample.stores[0].number("quinion_store_gets"), 3.0);
        assert_eq!(sample.stores[0].first_byte, [Some(0.012), Some(0.02), None]);
        assert_eq!((sample.stores[1].number("quinion_store_gets"), sample.has_disk()), (0.0, true));
    }

    #[test]
    fn an_answer_that_is_cut_or_of_another_program_is_no_sample() {
        assert!(Sample::of(&EXAMPLE[..200]).unwrap_err().contains("cut"));
        assert!(Sample::of("up 1\n# EOF\n").unwrap_err().contains("not those of a server"));
        assert!(Sample::of("").is_err());
    }

    #[test]
    fn a_server_that_is_stopped_is_said_to_be_so() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap(); // the kernel accepts for it
        let error = Monitor::new(&listener.local_addr().unwrap().to_string()).ask().unwrap_err();
        assert!(error.contains("no answer in 2 seconds"), "{error}");
    }

    #[test]
    fn an_address_may_come_as_the_url_that_the_server_tells() {
        assert_eq!(Monitor::new("http://127.0.0.1:9464/metrics"), Monitor::new("127.0.0.1:9464"));
        let error = Monitor::new("127.0.0.1:1").ask().unwrap_err();
        assert!(error.contains("--metrics 127.0.0.1:1"), "{error}");
    }
}
