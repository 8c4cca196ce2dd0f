//! The differential run: the same calls of two equal stores, whose answers are compared as words.
//!
//! The calls are drawn at random: writes of every kind, some of them behind a store's back, and reads with ranges and
//! conditions. An answer's words have its bytes (as a checksum), ranges, ETags, attributes, or the kind of its error.

// Each test program has a part of it.
#![allow(dead_code)]

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMode, PutOptions, UpdateVersion,
};
use proptest::prelude::*;

use quinion_testing_s3 as s3;

#[derive(Clone, Debug)]
pub enum Call {
    Put { key: u8, len: usize, by_others: bool },
    Create { key: u8, len: usize },
    Update { key: u8, len: usize, stale: bool },
    Upload { key: u8, len: usize },
    Delete { key: u8, by_others: bool },
    Copy { from: u8, to: u8, create: bool },
    Rename { from: u8, to: u8 },
    Get { key: u8, range: Option<GetRange>, condition: Condition, head: bool },
    Ranges { key: u8, ranges: Vec<Range<u64>> },
    List,
}

#[derive(Clone, Copy, Debug)]
pub enum Condition {
    None,
    Match,
    StaleMatch,
    NoneMatch,
    StaleNoneMatch,
    /// `*`, which any version is.
    AnyMatch,
    NoneMatchAny,
    /// A list, with the version among others.
    ListMatch,
    /// Seconds from the version's own time.
    ModifiedSince(i64),
    UnmodifiedSince(i64),
}

const LEN_MAX: usize = 300_000;

fn ranges() -> impl Strategy<Value = Range<u64>> {
    (0..LEN_MAX as u64, 0..LEN_MAX as u64).prop_map(|(at, len)| at..at + len)
}

pub fn calls() -> impl Strategy<Value = Call> {
    let (key, len) = (|| 0_u8..4, || prop_oneof![Just(0), 0_usize..20, 4000_usize..9000, 0_usize..LEN_MAX]);
    let range = prop_oneof![
        ranges().prop_map(GetRange::Bounded),
        (0..LEN_MAX as u64).prop_map(GetRange::Offset),
        (0..LEN_MAX as u64).prop_map(GetRange::Suffix),
    ];
    let condition = prop_oneof![
        4 => Just(Condition::None),
        1 => Just(Condition::Match),
        1 => Just(Condition::StaleMatch),
        1 => Just(Condition::NoneMatch),
        1 => Just(Condition::StaleNoneMatch),
        1 => Just(Condition::AnyMatch),
        1 => Just(Condition::NoneMatchAny),
        1 => Just(Condition::ListMatch),
        1 => (-1_i64..2).prop_map(Condition::ModifiedSince),
        1 => (-1_i64..2).prop_map(Condition::UnmodifiedSince),
    ];
    prop_oneof![
        3 => (key(), len(), any::<bool>()).prop_map(|(key, len, by_others)| Call::Put { key, len, by_others }),
        1 => (key(), len()).prop_map(|(key, len)| Call::Create { key, len }),
        1 => (key(), len(), any::<bool>()).prop_map(|(key, len, stale)| Call::Update { key, len, stale }),
        1 => (key(), len()).prop_map(|(key, len)| Call::Upload { key, len }),
        1 => (key(), any::<bool>()).prop_map(|(key, by_others)| Call::Delete { key, by_others }),
        1 => (key(), key(), any::<bool>()).prop_map(|(from, to, create)| Call::Copy { from, to, create }),
        1 => (key(), key()).prop_map(|(from, to)| Call::Rename { from, to }),
        8 => (key(), prop::option::of(range), condition, prop::bool::weighted(0.1))
            .prop_map(|(key, range, condition, head)| Call::Get { key, range, condition, head }),
        4 => (key(), prop::collection::vec(ranges(), 0..6)).prop_map(|(key, ranges)| Call::Ranges { key, ranges }),
        1 => Just(Call::List),
    ]
}

pub fn path(key: u8) -> Path {
    let name = ["plain", "with a space, a %25 and a %2F", "\u{fc}+#?&=;:@", "..."][usize::from(key)];
    Path::from(format!("folder/{name}"))
}

/// Callers look at the kind.
pub fn kind(error: &Error) -> &'static str {
    match error {
        Error::NotFound { .. } => "not found",
        Error::Precondition { .. } => "precondition",
        Error::NotModified { .. } => "not modified",
        Error::AlreadyExists { .. } => "already exists",
        Error::Generic { .. } => "generic",
        _ => "another",
    }
}

async fn shown(result: Result<GetResult, Error>, head: bool) -> String {
    match result {
        Err(error) => kind(&error).to_owned(),
        Ok(result) => {
            let (meta, range, attributes) =
                (result.meta.clone(), result.range.clone(), result.attributes.clone());
            let bytes = if head { Bytes::new() } else { result.bytes().await.unwrap() };
            let sum =
                bytes.iter().fold(bytes.len() as u64, |sum, &byte| sum.rotate_left(5) ^ u64::from(byte));
            let mut attributes: Vec<_> = attributes.iter().map(|pair| format!("{pair:?}")).collect();
            attributes.sort();
            format!("{} {} {:?} {range:?} {attributes:?} {sum:x}", meta.location, meta.size, meta.e_tag)
        }
    }
}

fn under(options: GetOptions, condition: Condition, now: Option<ObjectMeta>) -> GetOptions {
    let (any, stale) = (Some("*".to_owned()), Some("\"77777\"".to_owned()));
    let tag = now.as_ref().and_then(|now| now.e_tag.clone());
    let since = |seconds: i64| {
        let (step, time) = (Duration::from_secs(seconds.unsigned_abs()), now.as_ref()?.last_modified);
        Some(if seconds < 0 { time - step } else { time + step })
    };
    match condition {
        Condition::None => options,
        Condition::Match => options.with_if_match(tag),
        Condition::StaleMatch => options.with_if_match(stale),
        Condition::NoneMatch => options.with_if_none_match(tag),
        Condition::StaleNoneMatch => options.with_if_none_match(stale),
        Condition::AnyMatch => options.with_if_match(any),
        Condition::NoneMatchAny => options.with_if_none_match(any),
        Condition::ListMatch => options.with_if_match(tag.map(|tag| format!("\"77777\", {tag}, \"8\""))),
        Condition::ModifiedSince(seconds) => options.with_if_modified_since(since(seconds)),
        Condition::UnmodifiedSince(seconds) => options.with_if_unmodified_since(since(seconds)),
    }
}

/// Makes `call` of `store` as the `at`th; `other_client` is what lies below it, if calls may be made of that. The
/// outcome, in words.
pub async fn made(
    call: &Call,
    at: usize,
    store: &dyn ObjectStore,
    other_client: Option<&dyn ObjectStore>,
) -> String {
    let has_other_client = other_client.is_some();
    let other_client = other_client.unwrap_or(store);
    let content = |len: usize| s3::content(at as u32, len);
    let version = async |key: &u8| match store.head(&path(*key)).await {
        Ok(meta) => UpdateVersion { e_tag: meta.e_tag, version: meta.version },
        Err(_) => UpdateVersion { e_tag: None, version: None },
    };
    let put = async |key: &u8, len: usize, mode: PutMode| {
        let attributes = Attributes::from_iter([(Attribute::ContentType, format!("type/{at}"))]);
        let options = PutOptions { mode, attributes, ..PutOptions::default() };
        let put = store.put_opts(&path(*key), content(len).into(), options).await;
        put.map_or_else(|error| kind(&error).to_owned(), |put| format!("{:?}", put.e_tag))
    };
    let done = |result: Result<(), Error>| result.map_or_else(|error| kind(&error), |()| "done").to_owned();
    match call {
        Call::Put { key, len, by_others: true } if has_other_client => {
            other_client.put(&path(*key), content(*len).into()).await.unwrap();
            String::new()
        }
        Call::Put { key, len, .. } => put(key, *len, PutMode::Overwrite).await,
        Call::Create { key, len } => put(key, *len, PutMode::Create).await,
        Call::Update { key, len, stale } => {
            let stale_version =
                UpdateVersion { e_tag: Some("\"77777\"".to_owned()), version: Some("77777".to_owned()) };
            let version = if *stale { stale_version } else { version(key).await };
            put(key, *len, PutMode::Update(version)).await
        }
        Call::Upload { key, len } => {
            let mut upload = store.put_multipart(&path(*key)).await.unwrap();
            upload.put_part(content(*len).into()).await.unwrap();
            format!("{:?}", upload.complete().await.unwrap().e_tag)
        }
        Call::Delete { key, by_others } => {
            done(if *by_others && has_other_client { other_client } else { store }.delete(&path(*key)).await)
        }
        Call::Copy { from, to, create: false } => done(store.copy(&path(*from), &path(*to)).await),
        Call::Copy { from, to, .. } => done(store.copy_if_not_exists(&path(*from), &path(*to)).await),
        Call::Rename { from, to } => done(store.rename(&path(*from), &path(*to)).await),
        Call::Get { key, range, condition, head } => {
            let options = GetOptions::new().with_range(range.clone()).with_head(*head);
            let options = under(options, *condition, store.head(&path(*key)).await.ok());
            shown(store.get_opts(&path(*key), options).await, *head).await
        }
        Call::Ranges { key, ranges } => match store.get_ranges(&path(*key), ranges).await {
            Ok(all) => format!(
                "{:x?}",
                all.iter().map(|bytes| (bytes.len(), bytes.first(), bytes.last())).collect::<Vec<_>>()
            ),
            Err(error) => kind(&error).to_owned(),
        },
        Call::List => {
            let listed =
                store.list(None).map(|meta| meta.unwrap()).map(|meta| (meta.location, meta.size, meta.e_tag));
            format!("{:?}", listed.collect::<Vec<_>>().await)
        }
    }
}

/// Whether the interface says what comes of `call`. It does not for ranges of an object without bytes (S3 refuses them;
/// a store that knows the size need not ask), for no ranges of a missing object, nor for several of which one begins
/// behind the end (the crate's own way to cut them panics). Nor for what was not modified since a time to come: HTTP
/// has servers ignore such a time (RFC 9110, 13.1.3), and it passes between two calls.
pub async fn is_defined(call: &Call, store: &dyn ObjectStore) -> bool {
    let size = async |key: &u8| store.head(&path(*key)).await.map_or(0, |meta| meta.size);
    match call {
        Call::Ranges { key, ranges } => {
            let size = size(key).await;
            !ranges.is_empty() && ranges.iter().all(|range| range.start < size)
        }
        Call::Get { condition: Condition::ModifiedSince(1..), .. } => false,
        Call::Get { key, range: Some(_), .. } => size(key).await > 0,
        _ => true,
    }
}
