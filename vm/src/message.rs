//! Message: what a VMM says on the socket, and whether it can be so.
//!
//! ```text
//!   Firecracker    [{"base_host_virt_addr":A,"size":S,"offset":O,"page_size":4096}, ..]     and a userfaultfd
//!   image, first   {"quinion_restore":1,"want":"image"}                                     and nothing
//!     the answer   {"quinion_restore":1,"size":BYTES,"page_size":4096}                      and the image's memory
//!   image, then    the same regions, as places in the image that was sent                   and a userfaultfd
//!     the answer   {"quinion_restore":1,"ready":true}                                       and nothing
//! ```
//!
//! The first is what Firecracker sends when a snapshot is loaded with the memory backend `Uffd` (its public
//! documentation says what the fields mean). Older ones call `page_size` `page_size_kib` and mean bytes all the same.
//! Unknown fields are no error.
//!
//! All that is said is checked, with the image's size at hand, before any of it is used. Pure.
//!
//! Not an invariant: that a message comes in one piece. A stream may cut it, and the descriptor may come with any of
//! them; [`parse`] says that something is missing until it is not.

use serde::Deserialize;

use quinion::internals::units::PAGE_SIZE;

use super::pages::{MappedRegion, Pages};

/// The longest message, in bytes: 64 regions need a tenth of it.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The most regions a VM may have.
pub const REGIONS_MAX: usize = 64;
/// The most descriptors that may come with a message.
pub const DESCRIPTORS_MAX: usize = 4;
/// Sizes of the pages by which a VM's memory is mapped: base pages, or those of hugetlbfs.
pub(super) const UNITS: [u64; 2] = [PAGE_SIZE as u64, 2 << 20];
/// The version of the messages about the image.
pub const VERSION: u64 = 1;

/// A region as a VMM describes it; see Firecracker's documentation of snapshots and page faults.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct VmmRegion {
    /// The region's first address in the VMM.
    pub base_host_virt_addr: u64,
    /// The region's size in bytes.
    pub size: u64,
    /// Where it begins in the snapshot, in bytes.
    pub offset: u64,
    /// The size of the pages by which it is mapped, in bytes.
    pub page_size: Option<u64>,
    /// As `page_size`, in bytes too.
    pub page_size_kib: Option<u64>,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
struct Request {
    quinion_restore: u64,
    want: String,
}

/// The meaning of the bytes so far.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ParseStep {
    /// No whole message yet; more has to come.
    Unfinished,
    /// The regions that are to be served.
    Regions(Vec<VmmRegion>),
    /// The peer wants the image's memory.
    WantsImage,
}

/// An error in a peer's message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each is said by its message")]
#[non_exhaustive]
pub enum BadMessage {
    #[error("the message is not JSON: {0}; send Firecracker's array of regions")]
    NotJson(String),
    #[error(
        "the message is longer than {MESSAGE_BYTES_MAX} bytes; send {REGIONS_MAX} regions at most, in one array"
    )]
    TooLong,
    #[error("something follows the message; send one, and then nothing")]
    Trailing,
    #[error(
        "the message asks for \"{want}\" by version {version}; this server knows \"image\" by version {VERSION}: send \
         that"
    )]
    Unknown { version: u64, want: String },
    #[error("the message has {0} regions, and a VM can have 1 to {REGIONS_MAX}; send so many")]
    RegionCount(usize),
    #[error(
        "region {region} is mapped by pages of {bytes} bytes; use 4096 or 2097152, the same for all regions"
    )]
    PageSize { region: usize, bytes: u64 },
    #[error(
        "region {region} has the {what} {value}, which is no multiple of its page size of {unit} bytes; align it"
    )]
    Unaligned { region: usize, what: &'static str, value: u64, unit: u64 },
    #[error("region {region} has no bytes; leave it out")]
    Empty { region: usize },
    #[error(
        "region {region} needs {bytes} bytes of the snapshot at byte {offset}, which has {image_bytes}; \
         give this server the snapshot that the VM was told of"
    )]
    BehindTheEnd { region: usize, offset: u64, bytes: u64, image_bytes: u64 },
    #[error("region {region} ends behind the last address there is; send its address and size in bytes")]
    BehindTheLastAddress { region: usize },
    #[error("regions {0} and {1} overlap in {2}; send each range once")]
    Overlap(usize, usize, &'static str),
}

/// Reads the bytes that have come so far.
///
/// # Errors
/// It cannot become a message any more.
pub fn parse(bytes: &[u8]) -> Result<ParseStep, BadMessage> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(BadMessage::TooLong);
    }
    let Some(first) = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) else {
        return Ok(ParseStep::Unfinished);
    };
    match first {
        b'{' => match value::<Request>(bytes)? {
            None => Ok(ParseStep::Unfinished),
            Some(Request { quinion_restore: VERSION, want }) if want == "image" => Ok(ParseStep::WantsImage),
            Some(Request { quinion_restore: version, want }) => {
                Err(BadMessage::Unknown { version, want: want.chars().take(32).collect() })
            }
        },
        _ => Ok(value(bytes)?.map_or(ParseStep::Unfinished, ParseStep::Regions)),
    }
}

/// The answer to a VMM that wants the image, whose memory comes with it.
pub fn offer(image_bytes: u64) -> String {
    let (version, page) = (VERSION, PAGE_SIZE);
    format!("{{\"quinion_restore\":{version},\"size\":{image_bytes},\"page_size\":{page}}}\n")
}

/// The answer to a VMM that has mapped the image, when all of its faults are told.
pub fn ready() -> String {
    format!("{{\"quinion_restore\":{VERSION},\"ready\":true}}\n")
}

/// The one value that `bytes` are; `None` if its end is missing.
fn value<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<Option<T>, BadMessage> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<T>();
    match values.next() {
        None => Ok(None),
        Some(Err(error)) if error.is_eof() => Ok(None),
        Some(Err(error)) => Err(BadMessage::NotJson(error.to_string())),
        Some(Ok(value)) => {
            let rest = &bytes[values.byte_offset()..];
            let is_blank = rest.iter().all(|&byte| byte.is_ascii_whitespace() || byte == 0);
            if is_blank { Ok(Some(value)) } else { Err(BadMessage::Trailing) }
        }
    }
}

/// The pages of a VM with these regions, of an image of `image_bytes` bytes.
///
/// # Errors
/// They cannot be so.
pub fn check(regions: &[VmmRegion], image_bytes: u64) -> Result<Pages, BadMessage> {
    if regions.is_empty() || regions.len() > REGIONS_MAX {
        return Err(BadMessage::RegionCount(regions.len()));
    }
    let unit = regions[0].unit();
    for (number, region) in regions.iter().enumerate() {
        region.check(number, unit, image_bytes)?;
    }
    check_overlaps(regions, "addresses", |region| region.base_host_virt_addr)?;
    check_overlaps(regions, "the snapshot", |region| region.offset)?;
    let place = |region: &VmmRegion| MappedRegion {
        base: region.base_host_virt_addr,
        offset: region.offset,
        bytes: region.size,
    };
    Ok(Pages::new(unit, &regions.iter().map(place).collect::<Vec<_>>()))
}

impl VmmRegion {
    fn unit(&self) -> u64 {
        self.page_size.or(self.page_size_kib).unwrap_or(UNITS[0])
    }

    fn check(&self, region: usize, unit: u64, image_bytes: u64) -> Result<(), BadMessage> {
        if !UNITS.contains(&self.unit()) || self.unit() != unit {
            return Err(BadMessage::PageSize { region, bytes: self.unit() });
        }
        let numbers = [("address", self.base_host_virt_addr), ("size", self.size), ("offset", self.offset)];
        for (what, value) in numbers {
            if !value.is_multiple_of(unit) {
                return Err(BadMessage::Unaligned { region, what, value, unit });
            }
        }
        let (offset, bytes) = (self.offset, self.size);
        match (offset.checked_add(bytes), self.base_host_virt_addr.checked_add(bytes)) {
            _ if bytes == 0 => Err(BadMessage::Empty { region }),
            (Some(end), _) if end > image_bytes => {
                Err(BadMessage::BehindTheEnd { region, offset, bytes, image_bytes })
            }
            (None, _) => Err(BadMessage::BehindTheEnd { region, offset, bytes, image_bytes }),
            (_, None) => Err(BadMessage::BehindTheLastAddress { region }),
            _ => Ok(()),
        }
    }
}

fn check_overlaps(
    regions: &[VmmRegion],
    what: &'static str,
    begin: impl Fn(&VmmRegion) -> u64,
) -> Result<(), BadMessage> {
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_by_key(|&number| begin(&regions[number]));
    for pair in order.windows(2) {
        let (first, second) = (&regions[pair[0]], &regions[pair[1]]);
        if begin(first) + first.size > begin(second) {
            return Err(BadMessage::Overlap(pair[0].min(pair[1]), pair[0].max(pair[1]), what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn region(base: u64, size: u64, offset: u64) -> VmmRegion {
        VmmRegion { base_host_virt_addr: base, size, offset, page_size: Some(4096), page_size_kib: None }
    }

    /// As a Firecracker of 2026 says it.
    const REAL: &str = concat!(
        r#"[{"base_host_virt_addr":140117268234240,"size":134217728,"offset":0,"#,
        r#""page_size":4096,"page_size_kib":4096}]"#
    );

    #[test]
    fn firecrackers_message_is_understood() {
        let Ok(ParseStep::Regions(regions)) = parse(REAL.as_bytes()) else {
            panic!("{:?}", parse(REAL.as_bytes()))
        };
        let pages = check(&regions, 128 << 20).expect("a VM of 128 MiB");
        assert_eq!((pages.bytes(), pages.unit()), (128 << 20, 4096));
        let old =
            r#" [{"base_host_virt_addr":4096,"size":8192,"offset":0,"page_size_kib":4096,"more":[{}]}]  "#;
        assert!(
            matches!(parse(old.as_bytes()), Ok(ParseStep::Regions(regions)) if check(&regions, 8192).is_ok())
        );
    }

    #[test]
    fn a_message_in_pieces_is_unfinished_until_its_end() {
        for end in 0..REAL.len() {
            assert_eq!(parse(&REAL.as_bytes()[..end]), Ok(ParseStep::Unfinished), "{end} bytes");
        }
        let ours = br#"{"quinion_restore":1,"want":"image"}"#;
        assert_eq!(parse(ours), Ok(ParseStep::WantsImage));
        assert!((0..ours.len()).all(|end| parse(&ours[..end]) == Ok(ParseStep::Unfinished)));
    }

    #[test]
    fn bytes_that_are_no_message_are_refused_with_a_reason() {
        let refused = |text: &str| parse(text.as_bytes()).expect_err("no message").to_string();
        assert!(refused("GET / HTTP/1.1\r\n").contains("not JSON"));
        assert!(refused("[{\"size\":-1}]").contains("not JSON"));
        assert!(refused("[1]").contains("not JSON"));
        assert!(refused("[] []").contains("follows"));
        assert!(refused(r#"{"quinion_restore":2,"want":"image"}"#).contains("version 2"));
        assert!(refused(r#"{"quinion_restore":1,"want":"all"}"#).contains("\"all\""));
        assert!(refused(&"[".repeat(MESSAGE_BYTES_MAX + 1)).contains("longer than"));
        assert!(refused(&format!("[{}", "[".repeat(60_000))).contains("not JSON"), "deep ones cost no stack");
    }

    #[test]
    fn regions_that_cannot_be_are_refused_with_a_reason() {
        let refused = |regions: &[VmmRegion]| check(regions, GIB).expect_err("cannot be");
        let (base, unit) = (7 * GIB, 4096);
        assert_eq!(refused(&[]), BadMessage::RegionCount(0));
        let many: Vec<_> = (0..65).map(|i| region(base + i * unit, unit, i * unit)).collect();
        assert_eq!(refused(&many), BadMessage::RegionCount(65));
        assert!(check(&many[..64], GIB).is_ok());
        assert_eq!(refused(&[region(base, 0, 0)]), BadMessage::Empty { region: 0 });
        for wrong in [region(base + 1, unit, 0), region(base, unit + 512, 0), region(base, unit, 8)] {
            assert!(matches!(refused(&[wrong]), BadMessage::Unaligned { .. }));
        }
        for wrong in [region(base, 2 * GIB, 0), region(base, unit, GIB), region(base, unit, u64::MAX - 4095)]
        {
            assert!(matches!(refused(&[wrong]), BadMessage::BehindTheEnd { .. }));
        }
        let last = region(u64::MAX - 4095, unit, 0);
        assert_eq!(refused(&[last]), BadMessage::BehindTheLastAddress { region: 0 });
        let overlap = [region(base, 2 * unit, 0), region(base + unit, unit, 8 * unit)];
        assert_eq!(refused(&overlap), BadMessage::Overlap(0, 1, "addresses"));
        let overlap = [region(base, 2 * unit, unit), region(9 * GIB, 2 * unit, 0)];
        assert_eq!(refused(&overlap), BadMessage::Overlap(0, 1, "the snapshot"));
        for (first, second) in [(Some(0), Some(0)), (Some(8192), None), (Some(4096), Some(2 << 20))] {
            let sized = |base, page_size| VmmRegion { page_size, ..region(base, 2 << 20, base - 8 * GIB) };
            let wrong = refused(&[sized(8 * GIB, first), sized(8 * GIB + (4 << 20), second)]);
            assert!(matches!(wrong, BadMessage::PageSize { .. }), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_numbers_lead_to_a_panic(
            numbers in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), 0..3_u8), 0..6),
            image_bytes in any::<u64>(),
        ) {
            let region = |&(base, size, offset, cut): &(u64, u64, u64, u8)| {
                let cut = |number: u64| if cut > 0 { number >> 40 << 12 } else { number };
                region(cut(base), cut(size), cut(offset))
            };
            let regions: Vec<_> = numbers.iter().map(region).collect();
            // Accepted regions lie in the image and do not overlap; `Pages::new` asserts the rest.
            if let Ok(pages) = check(&regions, image_bytes.min(1 << 30)) {
                prop_assert!(pages.bytes() <= image_bytes);
            }
        }

        #[test]
        fn no_bytes_lead_to_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
