//! Price: what GETs and bytes from stores cost, and so what the cache has saved.
//!
//! ```toml
//! [price]
//! gets_1000 = 0.0004   # of 1,000 GETs
//! gigabyte = 0.09      # of 10^9 bytes that leave the store
//! ```
//!
//! Money is of whatever currency the two are in. Each read of a client's counts as a GET that it would have sent
//! without the cache, so the savings are an upper estimate: a client that joins its reads would have sent fewer. Reads
//! of local files count as well; the price of a server that has many of these says nothing.

use quinion_service::ServerStats;
use serde::Deserialize;

/// A store's prices.
#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// The price of 1,000 GETs.
    #[serde(default)]
    pub gets_1000: Amount,
    /// The price of 10^9 bytes.
    #[serde(default)]
    pub gigabyte: Amount,
}

/// Money: a number that is not below zero.
#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(try_from = "toml::Value")]
pub struct Amount(f64);

impl TryFrom<toml::Value> for Amount {
    type Error = String;
    fn try_from(value: toml::Value) -> Result<Self, String> {
        let number = value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64));
        let number = number.filter(|number| number.is_finite() && *number >= 0.0);
        number
            .map(Self)
            .ok_or_else(|| format!("a price is a number from 0 on, such as 0.09, and not {value:?}"))
    }
}

impl Price {
    /// The price of so many GETs and bytes.
    pub fn of(self, gets: u64, bytes: u64) -> f64 {
        gets as f64 / 1e3 * self.gets_1000.0 + bytes as f64 / 1e9 * self.gigabyte.0
    }
}

/// Requests to all stores, and requests that the cache made unnecessary.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Savings {
    /// GETs that were sent.
    pub sent_gets: u64,
    /// Bytes of their answers.
    pub sent_bytes: u64,
    /// Reads beyond these, each as one GET. None, if more was fetched than read.
    pub saved_gets: u64,
    /// Bytes of reads beyond these.
    pub saved_bytes: u64,
}

/// Requests, and the bytes of their answers.
#[derive(Clone, Copy, Debug)]
struct Traffic {
    requests: u64,
    bytes: u64,
}

impl Savings {
    /// The cost that a server's counts amount to.
    pub fn of(stats: &ServerStats) -> Self {
        let sum = |of: fn(&quinion_object::FetchStats) -> u64| stats.fetches.iter().map(|(_, f)| of(f)).sum();
        let read = Traffic { requests: stats.reads, bytes: stats.bytes };
        let sent = Traffic { requests: sum(|fetches| fetches.gets), bytes: sum(|fetches| fetches.bytes) };
        Self::between(read, sent)
    }

    fn between(read: Traffic, sent: Traffic) -> Self {
        Self {
            sent_gets: sent.requests,
            sent_bytes: sent.bytes,
            saved_gets: read.requests.saturating_sub(sent.requests),
            saved_bytes: read.bytes.saturating_sub(sent.bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic(requests: u64, bytes: u64) -> Traffic {
        Traffic { requests, bytes }
    }

    #[test]
    fn reads_beyond_the_gets_that_were_sent_are_saved() {
        let savings = Savings::between(traffic(10_000, 5_000_000_000), traffic(1_000, 2_000_000_000));
        assert_eq!((savings.saved_gets, savings.saved_bytes), (9_000, 3_000_000_000));
        let price = Price { gets_1000: Amount(0.5), gigabyte: Amount(2.0) };
        assert_eq!(price.of(savings.saved_gets, savings.saved_bytes), 10.5);
        assert_eq!(Savings::between(traffic(1, 1), traffic(2, 2)).saved_gets, 0);
    }

    #[test]
    fn a_price_is_a_number_that_is_not_below_zero() {
        let read = |text: &str| toml::from_str::<Price>(text);
        assert_eq!(read("gets_1000 = 0.5\ngigabyte = 2").unwrap().of(1000, 1_000_000_000), 2.5);
        assert_eq!(read("gigabyte = 2").unwrap().of(1000, 0), 0.0);
        for wrong in ["gigabyte = -1", "gigabyte = nan", "gigabyte = inf", "gigabyte = '1'", "gigabytes = 1"]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
