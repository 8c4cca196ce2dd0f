//! Fetching: how a store's objects are fetched, as far as operators set it: a hedge, a deadline, and bounds.
//!
//! | key of `[[store]]` | option | default |
//! |---|---|---|
//! | `hedge = 95` | `--hedge 95` | no second GETs |
//! | `deadline = 30` | `--deadline 30` | the program's own |
//! | `gets_in_flight = 64` | `--gets-in-flight 64` | 32 |
//! | `bytes_in_flight = "128M"` | `--bytes-in-flight 128M` | 64 MiB |
//!
//! The library brings values inside what is possible ([`quinion_object::Options`]); here those outside are errors,
//! since an operator who writes one means something else.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use quinion_object::Options;
use serde::Deserialize;

/// The share of 100 answers within whose time an answer has to begin, or a second GET is sent: 50 to 99.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "Number")]
pub struct Hedge(u8);

/// How long a fetch may take with all its attempts, in seconds: more than 0, and a day at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "Number")]
pub struct Deadline(Duration);

/// The most GETs under way at a time: 1 to 65,536.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "Number")]
pub struct GetsInFlight(usize);

/// The most bytes that GETs under way have asked for: from 1 MiB to 1 TiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct BytesInFlight(u64);

/// A number as TOML has it, with places or without, or as text.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Whole(i64),
    Places(f64),
    Text(String),
}

/// The value, if it is a number in `range`.
fn within<T>(text: &str, range: RangeInclusive<T>, what: &str) -> Result<T, String>
where
    T: FromStr + PartialOrd + Display,
{
    let (least, most) = (range.start(), range.end());
    let value = text.parse::<T>().ok().filter(|value| range.contains(value));
    value.ok_or_else(|| format!("{text:?} is not {what}; write a number from {least} to {most}"))
}

impl Hedge {
    /// `options` with it.
    pub fn of(self, options: Options) -> Options {
        options.hedge_slower_than(self.0)
    }
}

impl FromStr for Hedge {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        within(text, 50..=99, "a hedge, the answers of 100 that are not late").map(Self)
    }
}

impl Deadline {
    /// `options` with it.
    pub fn of(self, options: Options) -> Options {
        options.deadline(self.0)
    }

    /// The time.
    pub fn time(self) -> Duration {
        self.0
    }
}

impl FromStr for Deadline {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        within(text, 0.001..=86_400.0, "a deadline in seconds")
            .map(|seconds| Self(Duration::from_secs_f64(seconds)))
    }
}

impl GetsInFlight {
    /// `options` with it.
    pub fn of(self, options: Options) -> Options {
        options.requests_max(self.0)
    }
}

impl FromStr for GetsInFlight {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        within(text, 1..=1 << 16, "a number of GETs").map(Self)
    }
}

impl BytesInFlight {
    /// `options` with it.
    pub fn of(self, options: Options) -> Options {
        options.in_flight_max(self.0)
    }
}

impl FromStr for BytesInFlight {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = quinion_size::bytes_of(text).map_err(|error| error.to_string())?;
        let is_possible = (1 << 20..=1 << 40).contains(&bytes);
        if is_possible {
            Ok(Self(bytes))
        } else {
            Err(format!("{text:?} is no amount of bytes in flight; write 1M to 1T"))
        }
    }
}

impl TryFrom<String> for BytesInFlight {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

macro_rules! of_numbers {
    ($($name:ty),*) => {$(
        impl TryFrom<Number> for $name {
            type Error = String;
            fn try_from(number: Number) -> Result<Self, String> {
                match number {
                    Number::Whole(number) => number.to_string().parse(),
                    Number::Places(number) => number.to_string().parse(),
                    Number::Text(text) => text.parse(),
                }
            }
        }
    )*};
}

of_numbers!(Hedge, Deadline, GetsInFlight);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Changes, Config, StoreConfig, StoreDefaults};
    use crate::stores::fetched_as as applied;

    fn read(text: &str) -> Result<Config, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, format!("[[store]]\nprefix = 's3://b'\n{text}")).unwrap();
        Config::read(file.path())
    }

    #[test]
    fn a_store_is_fetched_as_its_configuration_says() {
        let text = "hedge = 95\ndeadline = 0.5\ngets_in_flight = 64\nbytes_in_flight = '128M'";
        let options = applied(&read(text).unwrap().stores[0], Options::new());
        let found = format!("{options:?}");
        for part in
            ["hedge_percent: Some(95)", "deadline: 500ms", "requests_max: 64", "in_flight_max: 134217728"]
        {
            assert!(found.contains(part), "{part}: {found}");
        }
        assert_eq!(
            format!("{:?}", applied(&read("").unwrap().stores[0], Options::new())),
            format!("{:?}", Options::new())
        );
    }

    #[test]
    fn the_command_line_is_for_stores_of_which_the_file_says_nothing() {
        let defaults =
            StoreDefaults { hedge: "90".parse().ok(), deadline: "7".parse().ok(), ..Default::default() };
        let mut config = read("hedge = 60").unwrap();
        config.stores[0].complete_by(&defaults);
        let StoreConfig { hedge, deadline, gets_in_flight, .. } = config.stores[0].clone();
        assert_eq!((hedge, deadline, gets_in_flight), (Some(Hedge(60)), "7".parse().ok(), None));
    }

    #[test]
    fn wrong_values_are_refused_with_words() {
        for (text, words) in [
            ("hedge = 0", "50 to 99"),
            ("hedge = 100", "50 to 99"),
            ("hedge = 95.5", "50 to 99"),
            ("hedge = -1", "50 to 99"),
            ("deadline = 0", "0.001 to 86400"),
            ("deadline = -3", "0.001 to 86400"),
            ("deadline = inf", "0.001 to 86400"),
            ("deadline = nan", "0.001 to 86400"),
            ("deadline = 'soon'", "0.001 to 86400"),
            ("gets_in_flight = 0", "1 to 65536"),
            ("gets_in_flight = 99999999999999999", "1 to 65536"),
            ("bytes_in_flight = '1K'", "1M to 1T"),
            ("bytes_in_flight = '2000T'", "1M to 1T"),
            ("bytes_in_flight = 'much'", "such as 256M"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(words) && error.contains("line 3"), "{text}: {error}");
        }
    }

    #[test]
    fn another_deadline_takes_effect_at_a_reload() {
        let (old, new) = (read("deadline = 5").unwrap(), read("deadline = 6").unwrap());
        let changes = Changes::between(&old, &new);
        assert_eq!((changes.added, changes.removed), (new.stores, old.stores));
        assert!(changes.at_restart.is_empty());
    }
}
