//! Size: amounts of memory as people write them.
//!
//! ```text
//!   65536   64K   64KiB   1.5G   2T        bytes, in powers of 1024
//!   64KB    1.5GB                          bytes, in powers of 1000
//!   25%                                    of the memory of the machine or container
//! ```
//!
//! As in the units of IEC and SI, only those written with a B alone are powers of 1000. The library checks whether a
//! size is enough for a cache.

use std::fmt;
use std::str::FromStr;

/// An amount of memory from a command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// A number of bytes.
    Bytes(u64),
    /// Millionths of the memory of the machine or container.
    Millionths(u32),
}

/// Why a text is not a size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SizeError {
    /// The text, which does not begin with a number.
    NoNumber(String),
    /// The text after the number, which is not a unit.
    Unit(String),
    /// The text, which is more than a cache could ever have.
    TooLarge(String),
    /// The text, which is a share of 0 % or of more than 100 %.
    Share(String),
    /// The text, which is a share, where none can be taken.
    NoShare(String),
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNumber(text) => {
                write!(f, "`{text}` is not a size; write a number and a unit, such as 256M or 1.5G")
            }
            Self::Unit(unit) => write!(
                f,
                "`{unit}` is not a unit; use K, M, G or T (powers of 1024), KB, MB, GB or TB (powers of 1000), or %"
            ),
            Self::TooLarge(text) => write!(f, "`{text}` is more than this machine can address; write less"),
            Self::Share(text) => {
                write!(f, "`{text}` is not a share of the memory; write one above 0% and up to 100%")
            }
            Self::NoShare(text) => {
                write!(
                    f,
                    "`{text}` is a share, which is of no memory here; write a number and a unit, such as 256M"
                )
            }
        }
    }
}

impl std::error::Error for SizeError {}

/// The largest unit of which `bytes` are a whole number: its name, and its bytes.
fn largest_unit(bytes: u64) -> Option<(&'static str, u64)> {
    const UNITS: [(&str, u64); 8] = [
        ("T", 1 << 40),
        ("TB", 1_000_000_000_000),
        ("G", 1 << 30),
        ("GB", 1_000_000_000),
        ("M", 1 << 20),
        ("MB", 1_000_000),
        ("K", 1 << 10),
        ("KB", 1_000),
    ];
    UNITS.into_iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit))
}

impl fmt::Display for Size {
    /// As it may be typed: in the largest unit of which it is a whole number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Bytes(bytes) => match largest_unit(bytes) {
                Some((name, unit)) => write!(f, "{}{name}", bytes / unit),
                None => write!(f, "{bytes}"),
            },
            Self::Millionths(share) => write!(f, "{}%", f64::from(share) / 1e4),
        }
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number = Decimal::parse(number).ok_or_else(|| SizeError::NoNumber(text.to_owned()))?;
        let unit = unit.trim_start();
        if unit == "%" {
            let millionths = number.times(10_000).and_then(|share| u32::try_from(share).ok());
            let share = millionths.filter(|share| (1..=1_000_000).contains(share));
            return share.map(Self::Millionths).ok_or_else(|| SizeError::Share(text.to_owned()));
        }
        let unit_bytes = unit_bytes(unit).ok_or_else(|| SizeError::Unit(unit.to_owned()))?;
        number.times(unit_bytes).map(Self::Bytes).ok_or_else(|| SizeError::TooLarge(text.to_owned()))
    }
}

impl Size {
    /// The bytes this is on a machine that allows `machine_bytes`.
    pub fn bytes(self, machine_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Millionths(share) => (u128::from(machine_bytes) * u128::from(share) / 1_000_000) as u64,
        }
    }

    /// `bytes` as it may be typed in place of this, rounded down: in MB if this is in powers of 1000, else in M.
    pub fn rounded_down(self, bytes: u64) -> String {
        let (name, unit) = self.megabytes();
        format!("{}{name}", bytes / unit)
    }

    /// `bytes` as it may be typed in place of this, rounded up: in MB if this is in powers of 1000, else in M.
    pub fn rounded_up(self, bytes: u64) -> String {
        let (name, unit) = self.megabytes();
        format!("{}{name}", bytes.div_ceil(unit))
    }

    fn megabytes(self) -> (&'static str, u64) {
        match self {
            Self::Bytes(bytes) if largest_unit(bytes).is_some_and(|(name, _)| name.ends_with('B')) => {
                ("MB", 1_000_000)
            }
            _ => ("M", 1 << 20),
        }
    }
}

/// An amount in bytes, where no share can be taken.
///
/// # Errors
/// The text is not a size, or a share.
pub fn bytes_of(text: &str) -> Result<u64, SizeError> {
    match text.parse()? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Millionths(_) => Err(SizeError::NoShare(text.to_owned())),
    }
}

fn unit_bytes(unit: &str) -> Option<u64> {
    match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kib" => Some(1 << 10),
        "m" | "mib" => Some(1 << 20),
        "g" | "gib" => Some(1 << 30),
        "t" | "tib" => Some(1 << 40),
        "kb" => Some(1_000),
        "mb" => Some(1_000_000),
        "gb" => Some(1_000_000_000),
        "tb" => Some(1_000_000_000_000),
        _ => None,
    }
}

struct Decimal {
    digits: u64,
    places: u32,
}

impl Decimal {
    fn parse(text: &str) -> Option<Self> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        if whole.is_empty() || fraction.contains('.') {
            return None;
        }
        let fraction = fraction.trim_end_matches('0');
        let digits = format!("{whole}{fraction}").parse().ok()?;
        Some(Self { digits, places: u32::try_from(fraction.len()).ok()? })
    }

    /// The number times `unit`, rounded down; `None` if that is more than a `u64` holds.
    fn times(&self, unit: u64) -> Option<u64> {
        let scale = 10_u128.checked_pow(self.places)?;
        u64::try_from(u128::from(self.digits) * u128::from(unit) / scale).ok()
    }
}

/// `bytes` for people: "17 bytes", "1.5 MiB".
pub fn shown(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1 << 10 {
        return format!("{bytes} bytes");
    }
    let power = (bytes.ilog2() / 10).min(UNITS.len() as u32);
    let value = bytes as f64 / (1_u64 << (10 * power)) as f64;
    format!("{value:.1} {}", UNITS[power as usize - 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(text: &str) -> Result<u64, SizeError> {
        text.parse::<Size>().map(|size| size.bytes(1000))
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let cases: [(&str, u64); 14] = [
            ("0", 0),
            ("17", 17),
            ("512K", 512 << 10),
            ("64M", 64 << 20),
            ("64m", 64 << 20),
            ("64MiB", 64 << 20),
            (" 64 M ", 64 << 20),
            ("64MB", 64_000_000),
            ("1.5gb", 1_500_000_000),
            ("1.5G", 3 << 29),
            ("2T", 2 << 40),
            ("0.1K", 102),
            ("25%", 250),
            ("12.5 %", 125),
        ];
        for (text, expected) in cases {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn other_amounts_are_shown_in_the_units_of_a_size() {
        let shown = |text: &str, bytes| {
            let size = text.parse::<Size>().expect(text);
            (size.rounded_down(bytes), size.rounded_up(bytes))
        };
        let expected = |down: &str, up: &str| (down.to_owned(), up.to_owned());
        for text in ["64M", "1.5G", "2T", "17", "0", "25%"] {
            assert_eq!(shown(text, (1 << 30) + 1), expected("1024M", "1025M"), "{text}");
        }
        for text in ["64MB", "1.5GB", "2TB", "3KB"] {
            assert_eq!(shown(text, 2_000_000_001), expected("2000MB", "2001MB"), "{text}");
        }
        assert_eq!(shown("64MB", 64_000_000), expected("64MB", "64MB"));
    }

    #[test]
    fn a_size_is_shown_as_it_was_typed() {
        for text in ["0", "17", "5M", "64MB", "2T", "1536M", "25%", "12.5%", "100%", "1K", "3GB"] {
            assert_eq!(text.parse::<Size>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn nonsense_is_refused_with_a_remedy() {
        let wrong = |text: &str| bytes(text).expect_err(text).to_string();
        for text in ["", "M", "-1", ".5G", "1.2.3G", "many"] {
            assert!(wrong(text).contains("such as 256M"), "{text}");
        }
        for text in ["64Mb/s", "64X", "1e9", "5%%", "1 000"] {
            assert!(wrong(text).contains("use K, M, G or T"), "{text}");
        }
        assert!(wrong("99999999T").contains("write less"));
        for text in ["0%", "101%", "999999999999%"] {
            assert!(wrong(text).contains("up to 100%"), "{text}");
        }
    }

    #[test]
    fn a_share_is_refused_where_it_is_of_nothing() {
        assert_eq!(bytes_of("64MB"), Ok(64_000_000));
        assert!(bytes_of("25%").expect_err("a share").to_string().contains("such as 256M"));
        assert!(bytes_of("G").is_err());
    }

    #[test]
    fn bytes_are_shown_in_the_largest_unit_that_fits() {
        assert_eq!(shown(0), "0 bytes");
        assert_eq!(shown(1023), "1023 bytes");
        assert_eq!(shown(1024), "1.0 KiB");
        assert_eq!(shown(3 << 29), "1.5 GiB");
        assert_eq!(shown(u64::MAX), "16384.0 PiB");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[0-9.]{0,30} ?[a-zA-Z%]{0,4}") {
            let _ = text.parse::<Size>();
        }

        #[test]
        fn a_whole_number_of_a_unit_is_exact(number in 0_u64..1 << 20, power in 0_usize..5) {
            let text = format!("{number}{}", ["", "K", "M", "G", "T"][power]);
            prop_assert_eq!(bytes(&text), Ok(number << (10 * power)));
        }
    }
}
