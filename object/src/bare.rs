//! Bare: answers of the store itself, where the cache cannot give one.
//!
//! The crate `object_store` hands out what came: a body that is shorter or longer than its own range is no error there,
//! and ranges of one call may be of several versions. Here:
//!
//!  1. A body has the bytes of its range, all of them and no more, or ends with an error.
//!  2. The ranges of one call are of one version. If nothing tells versions apart, they come by one GET.

use std::ops::Range;
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::{
    Error as StoreError, GetOptions, GetResult, GetResultPayload, ObjectMeta, ObjectStore,
    Result as StoreResult, path::Path,
};

use crate::error::Error;
use crate::version;

/// How often ranges far from each other are asked for whose object is replaced each time.
const CHANGES_MAX: u32 = 8;
/// Ranges within so many bytes come by one GET, of one version, when their object is replaced between two.
const SPAN_MAX: u64 = 16 << 20;
const RANGES_MAX: usize = 8;

/// A get of the store.
///
/// # Errors
/// Those of the store.
pub async fn get(store: &dyn ObjectStore, path: &Path, options: GetOptions) -> StoreResult<GetResult> {
    let is_head = options.head;
    let result = store.get_opts(path, options).await?;
    Ok(if is_head { result } else { exactly(result) })
}

/// Ranges by the store, of one version.
///
/// # Errors
/// Those of the store; [`StoreError::Precondition`]: the object was replaced again and again, and the ranges are far
/// from each other.
pub async fn get_ranges(
    store: &dyn ObjectStore,
    path: &Path,
    ranges: &[Range<u64>],
) -> StoreResult<Vec<Bytes>> {
    let span = span_of(ranges).filter(|span| span.end - span.start <= SPAN_MAX);
    let mut attempts = 1;
    loop {
        match (ranges_at_once(store, path, ranges).await, &span) {
            (Err(StoreError::Precondition { .. }), Some(span)) => {
                return ranges_of_span(store, path, ranges, span).await;
            }
            (Err(StoreError::Precondition { source, .. }), None)
                if attempts < CHANGES_MAX && !source.is::<Error>() =>
            {
                attempts += 1;
            }
            (answer, _) => return answer,
        }
    }
}

/// The bytes of `range` of the very version that `known` tells of.
///
/// # Errors
/// Those of the store; [`StoreError::Precondition`]: the object is of another version.
pub async fn get_of_version(
    store: &dyn ObjectStore,
    known: &ObjectMeta,
    range: &Range<u64>,
) -> StoreResult<Bytes> {
    let path = &known.location;
    let (found, bytes) = range_of(store, path, version::conditions(known), range).await?;
    // The time as well: a store in memory begins its ETags anew, and `known` may be of the one before. It is told by a
    // server, to which a time before 1970 is 1970.
    let time = |meta: &ObjectMeta| meta.last_modified.max(UNIX_EPOCH.into());
    if version::is_same(known, &found) && time(known) == time(&found) {
        return Ok(bytes);
    }
    let source = format!("it is {} by now", version::describe(&found)).into();
    Err(StoreError::Precondition { path: path.to_string(), source })
}

fn span_of(ranges: &[Range<u64>]) -> Option<Range<u64>> {
    let start = ranges.iter().map(|range| range.start).min()?;
    let end = ranges.iter().map(|range| range.end).max()?;
    (start < end).then_some(start..end)
}

async fn ranges_of_span(
    store: &dyn ObjectStore,
    path: &Path,
    ranges: &[Range<u64>],
    span: &Range<u64>,
) -> StoreResult<Vec<Bytes>> {
    let (_, bytes) = range_of(store, path, GetOptions::new(), span).await?;
    let end = span.start + bytes.len() as u64;
    // The store itself gives the error for a range that begins behind the end.
    if let Some(behind) = ranges.iter().find(|range| range.start >= end) {
        range_of(store, path, GetOptions::new(), behind).await?;
        let source = format!("it had {end} bytes a moment ago").into();
        return Err(StoreError::Precondition { path: path.to_string(), source });
    }
    let at = |place: u64| (place.min(end) - span.start) as usize;
    Ok(ranges.iter().map(|range| bytes.slice(at(range.start)..at(range.end))).collect())
}

async fn ranges_at_once(
    store: &dyn ObjectStore,
    path: &Path,
    ranges: &[Range<u64>],
) -> StoreResult<Vec<Bytes>> {
    let Some((first, rest)) = ranges.split_first() else { return Ok(Vec::new()) };
    let (known, first) = range_of(store, path, GetOptions::new(), first).await?;
    if version::is_untold(&known) && !rest.is_empty() {
        // By another GET they could be of another version, however often they are asked for.
        let source = Error::Unversioned(path.clone()).into();
        return Err(StoreError::Precondition { path: path.to_string(), source });
    }
    let known = &known;
    let rest = stream::iter(rest.to_vec()).map(|range| async move {
        let (meta, bytes) = range_of(store, path, version::conditions(known), &range).await?;
        if version::is_same(known, &meta) {
            return Ok(bytes);
        }
        let source = format!("it is {} by now", version::describe(&meta)).into();
        Err(StoreError::Precondition { path: path.to_string(), source })
    });
    let rest: Vec<_> = rest.buffered(RANGES_MAX).try_collect().await?;
    Ok([first].into_iter().chain(rest).collect())
}

/// A range under the conditions in `options`, as far as the object goes, and what the store says of the object. Not
/// every store compares an answer's range with the question's.
async fn range_of(
    store: &dyn ObjectStore,
    path: &Path,
    options: GetOptions,
    range: &Range<u64>,
) -> StoreResult<(ObjectMeta, Bytes)> {
    let result = get(store, path, options.with_range(Some(range.clone()))).await?;
    let (meta, answered) = (result.meta.clone(), result.range.clone());
    if answered != (range.start..range.end.min(meta.size)) {
        let source = format!("{range:?} was asked for, and {answered:?} was answered").into();
        return Err(StoreError::Generic { store: "Quinion", source });
    }
    Ok((meta, result.bytes().await?))
}

/// The answer with a body that has the bytes of its range or ends with an error.
pub fn exactly(result: GetResult) -> GetResult {
    let GetResult { payload, meta, range, attributes, extensions } = result;
    let payload = match payload {
        GetResultPayload::Stream(body) => GetResultPayload::Stream(exact_body(body, range.clone())),
        // A file that is read by the caller: a variant that `object_store` has with its feature `fs` alone.
        #[allow(unreachable_patterns)]
        payload => payload,
    };
    GetResult { payload, meta, range, attributes, extensions }
}

fn exact_body(
    body: BoxStream<'static, StoreResult<Bytes>>,
    range: Range<u64>,
) -> BoxStream<'static, StoreResult<Bytes>> {
    let end = range.end;
    let exact = stream::unfold(Some((body, range.start)), move |state| async move {
        let (mut body, at) = state.filter(|(_, at)| *at < end)?;
        match body.next().await {
            Some(Ok(mut bytes)) => {
                bytes.truncate(usize::try_from(end - at).unwrap_or(usize::MAX));
                let at = at + bytes.len() as u64;
                Some((Ok(bytes), Some((body, at))))
            }
            Some(Err(error)) => Some((Err(error), None)),
            None => {
                let source = format!("the answer ends at byte {at}, and said that it ends at {end}").into();
                Some((Err(StoreError::Generic { store: "Quinion", source }), None))
            }
        }
    });
    exact.boxed()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use object_store::ObjectStoreExt;
    use object_store::local::LocalFileSystem;

    use super::*;

    /// 1. A server tells of an object that was put before 1970 as of one of 1970, and ends.
    /// 2. Its client found another time at the store, and took that for a change.
    #[tokio::test]
    async fn a_version_of_before_1970_is_the_one_that_was_told_as_of_1970() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "bytes").unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(UNIX_EPOCH - Duration::from_secs(1)).unwrap();
        let store = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        let found = store.head(&Path::from("a")).await.unwrap();
        assert_eq!(found.last_modified.timestamp(), -1);
        for (told, is_same) in [(UNIX_EPOCH, true), (UNIX_EPOCH + Duration::from_secs(1), false)] {
            let known = ObjectMeta { last_modified: told.into(), ..found.clone() };
            assert_eq!(get_of_version(&store, &known, &(0..5)).await.is_ok(), is_same, "{told:?}");
        }
    }
}
