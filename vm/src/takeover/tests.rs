//! Takeover, tested: what one server writes the other reads, and no bytes lead to pages that cannot be.
//!
//! ```text
//!   pages after some operations --> bytes --> pages: each page needs the same; hostile words --> an error
//! ```

use proptest::prelude::*;

use super::*;
use crate::pages::{ImagePart, MappedRegion, PageNeed};

const UNIT: u64 = 4096;
const IMAGE: u64 = 200 * UNIT;

fn region(base: u64, offset: u64, pages: u64) -> MappedRegion {
    MappedRegion { base: base * UNIT, offset: offset * UNIT, bytes: pages * UNIT }
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn refused(words: &[u64], part: &str) {
    let why = parse_states(&bytes_of(words), 1, IMAGE).expect_err(part).to_string();
    assert!(why.contains(part), "{part}: {why}");
}

#[test]
fn states_that_cannot_be_are_refused_with_a_reason() {
    let is_good = |words: &[u64]| parse_states(&bytes_of(words), 1, IMAGE).is_ok();
    assert!(is_good(&[UNIT, 0]), "all of it was unmapped");
    assert!(is_good(&[UNIT, 1, UNIT, 0, 3, 0b10_01_00]));
    refused(&[], "cut");
    refused(&[UNIT], "cut");
    refused(&[UNIT, 1, UNIT, 0, 3], "cut");
    refused(&[UNIT, 2, UNIT, 0, 3, 0], "cut");
    refused(&[UNIT, 0, 0], "behind the states");
    refused(&[8192, 0], "pages of 8192 bytes");
    refused(&[0, 0], "pages of 0 bytes");
    refused(&[UNIT, PIECES_MAX as u64 + 1], "1025 regions");
    refused(&[UNIT, u64::MAX], "regions");
    refused(&[UNIT, 1, UNIT, 0, 3, 0b11], "a state that there is not");
    refused(&[UNIT, 1, UNIT, 0, 3, 0b01_00_00_00], "a state that there is not");
    for wrong in [
        [UNIT, 0, 0],
        [UNIT, 0, u64::MAX],
        [UNIT, 0, u64::MAX / UNIT],
        [UNIT, 0, 201],
        [UNIT, 200 * UNIT, 1],
        [UNIT, u64::MAX - UNIT + 1, 1],
        [u64::MAX - UNIT + 1, 0, 1],
        [UNIT + 1, 0, 1],
        [UNIT, 8, 1],
    ] {
        refused(&[&[UNIT, 1], &wrong[..], &[0; 7]].concat(), "a region of");
    }
    refused(&[UNIT, 2, UNIT, 0, 3, 0, 3 * UNIT, 0, 1, 0], "overlap");
    refused(&[UNIT, 2, 9 * UNIT, 0, 1, 0, UNIT, UNIT, 1, 0], "overlap");
    let twice = [&[UNIT, 2, UNIT, 0, 150][..], &[0; 5], &[400 * UNIT, 0, 150], &[0; 5]].concat();
    refused(&twice, "more memory");
    let two = bytes_of(&[UNIT, 0, 2 << 20, 0]);
    assert!(parse_states(&two, 2, IMAGE).unwrap_err().to_string().contains("different sizes"));
}

#[test]
fn messages_of_another_version_and_wrong_ones_are_refused_with_a_reason() {
    let image = ImageIdentity { bytes: IMAGE, fingerprint: 7 };
    let request = TakeoverRequest::new(image, Vec::new(), 3);
    let read = TakeoverRequest::parse(&request.packet()).expect("its own message");
    assert!(read == request && read.is_of(image, &[]));
    assert!(!read.is_of(ImageIdentity { fingerprint: 8, ..image }, &[]));
    let newer = String::from_utf8(request.packet()).unwrap().replace("takeover\":1", "takeover\":2");
    let why = TakeoverRequest::parse(newer.as_bytes()).unwrap_err();
    assert!(matches!(why, TakeoverError::Version(2)), "{why}");
    // Of another version nothing but the version need be as it is here.
    let why = TakeoverRequest::parse(br#"{"quinion_takeover":9}"#).unwrap_err();
    assert!(matches!(why, TakeoverError::Version(9)), "{why}");
    for nonsense in
        [&b""[..], b"{}", b"[", b"\xFF", br#"{"quinion_takeover":1}"#, br#"{"quinion_takeover":-1}"#]
    {
        assert!(matches!(TakeoverRequest::parse(nonsense), Err(TakeoverError::BadMessage(_))));
    }
    let no = TakeoverAnswer::Refused("not now".into()).packet();
    assert!(matches!(TakeoverAnswer::parse(&no), Err(TakeoverError::Refused(why)) if why == "not now"));
    assert!(matches!(VmHead::parse(&no, 0, IMAGE), Err(TakeoverError::Refused(_))));
    assert!(TakeoverAnswer::parse(&TakeoverAnswer::Taken.packet()).is_ok());
}

#[test]
fn a_wrong_number_of_descriptors_or_of_bytes_is_refused() {
    let offer = TakeoverOffer::new(5, [1, 2], 0);
    assert_eq!(TakeoverOffer::parse(&offer.packet(), 4, 5).expect("its own message"), offer);
    for descriptors in [0, 3, 5] {
        assert!(TakeoverOffer::parse(&offer.packet(), descriptors, 5).is_err(), "{descriptors}");
    }
    let why = TakeoverOffer::parse(&offer.packet(), 4, 4).unwrap_err();
    assert!(matches!(why, TakeoverError::TooManyVms { vms: 5, vms_max: 4 }), "{why}");
    assert!(TakeoverOffer::parse(&TakeoverOffer::new(0, [1, 2], u64::MAX).packet(), 4, 5).is_err());

    let head = VmHead::new(7, true, 2, 1000);
    assert_eq!(VmHead::parse(&head.packet(), 4, IMAGE).expect("its own message"), head);
    for descriptors in [0, 3, 5] {
        assert!(VmHead::parse(&head.packet(), descriptors, IMAGE).is_err(), "{descriptors}");
    }
    for (spaces, bytes) in [(0, 0), (SPACES_MAX + 1, 0), (1, 1 << 30), (1, u64::MAX)] {
        let wrong = VmHead::new(7, false, spaces, bytes).packet();
        assert!(VmHead::parse(&wrong, 1 + spaces, IMAGE).is_err(), "{spaces} {bytes}");
        assert!(VmHead::parse(&wrong, 1 + spaces, u64::MAX).is_err() || bytes == 1 << 30);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Supplied(u64, u64),
    Removed(u64, u64),
    Unmapped(u64, u64),
    Moved(u64, u64, u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let place = || (1..220_u64, 1..40_u64);
    let op = prop_oneof![
        place().prop_map(|(at, len)| Op::Supplied(at, len)),
        place().prop_map(|(at, len)| Op::Removed(at, len)),
        place().prop_map(|(at, len)| Op::Unmapped(at, len)),
        (place(), 300..600_u64).prop_map(|((at, len), to)| Op::Moved(at, to, len)),
    ];
    prop::collection::vec(op, 0..20)
}

proptest! {
    #[test]
    fn pages_have_the_same_needs_before_and_after_a_handover(ops in ops()) {
        let mut pages = Pages::new(UNIT, &[region(1, 100, 70), region(90, 0, 100)]);
        for op in ops {
            let range = |at: u64, len: u64| at * UNIT..(at + len) * UNIT;
            match op {
                Op::Supplied(at, len) => pages.supplied(range(at, len)),
                Op::Removed(at, len) => pages.removed(range(at, len)),
                Op::Unmapped(at, len) => pages.unmapped(range(at, len)).expect("few pieces"),
                Op::Moved(from, to, len) => {
                    pages.moved(from * UNIT, to * UNIT, len * UNIT).expect("few pieces");
                }
            }
        }
        let bytes = states_bytes([&pages, &pages].into_iter());
        let read = parse_states(&bytes, 2, IMAGE).expect("they are a VM's");
        for page in 0..700 {
            let need = |pages: &Pages| pages.need(page * UNIT, 16 * UNIT);
            prop_assert_eq!(need(&read[0]), need(&pages));
            prop_assert_eq!(need(&read[1]), need(&pages));
        }
    }

    #[test]
    fn no_words_lead_to_a_panic_or_to_pages_outside_the_image(
        words in prop::collection::vec(prop_oneof![0..4_u64, Just(UNIT), Just(2 * UNIT), any::<u64>()], 0..12),
        cut in 0..9_usize,
    ) {
        let mut bytes = bytes_of(&[&[UNIT], &words[..]].concat());
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        for pages in parse_states(&bytes, 1, IMAGE).into_iter().flatten() {
            pages.check();
            prop_assert!(pages.bytes() <= IMAGE && pages.image_end() <= IMAGE);
            if let PageNeed::Supply(ImagePart { offset, bytes, .. }) = pages.need(UNIT, UNIT) {
                prop_assert!(offset + bytes <= IMAGE);
            }
        }
    }

    #[test]
    fn no_packet_leads_to_a_panic(packet in prop::collection::vec(any::<u8>(), 0..200), count in 0..12_usize) {
        let _ = TakeoverRequest::parse(&packet);
        let _ = TakeoverOffer::parse(&packet, count, 9);
        let _ = VmHead::parse(&packet, count, IMAGE);
        let _ = TakeoverAnswer::parse(&packet);
    }
}
