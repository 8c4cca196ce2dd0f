//! Bare: answers of the store itself, where the cache cannot give one.
//!
//! The crate `object_store` hands out what came: a body that is shorter than its own range says, or longer, is no error
//! there, and ranges of one call may be of several versions. Readers of a cached store were told otherwise.
//!
//! Invariants:
//!  1. A body has the bytes of its range, all of them and no more, or ends with an error.
//!  2. The ranges of one call are of one version.

use std::ops::Range;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::{
    Error as StoreError, GetOptions, GetResult, GetResultPayload, ObjectMeta, ObjectStore,
    Result as StoreResult, path::Path,
};

use crate::version;

/// How often ranges are asked for one by one whose object is replaced each time; then for all that lies between them,
/// by one GET, which is of one version.
const CHANGES_MAX: u32 = 2;
/// How often where so much lies between them that it is not asked for.
const CHANGES_OF_WIDE_MAX: u32 = 8;
/// The most that is asked for by that one GET.
const SPAN_MAX: u64 = 16 << 20;
/// How many ranges are asked for at a time.
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
    let most = if span.is_some() { CHANGES_MAX } else { CHANGES_OF_WIDE_MAX };
    for _ in 1..most {
        match ranges_at_once(store, path, ranges).await {
            Err(StoreError::Precondition { .. }) => {}
            answer => return answer,
        }
    }
    match span {
        Some(span) => ranges_of_span(store, path, ranges, span).await,
        None => ranges_at_once(store, path, ranges).await,
    }
}

/// From the first byte of `ranges` to the last, if there are any.
fn span_of(ranges: &[Range<u64>]) -> Option<Range<u64>> {
    let start = ranges.iter().map(|range| range.start).min()?;
    let end = ranges.iter().map(|range| range.end).max()?;
    (start < end).then_some(start..end)
}

/// The ranges out of one GET of `span`, in which all of them lie.
async fn ranges_of_span(
    store: &dyn ObjectStore,
    path: &Path,
    ranges: &[Range<u64>],
    span: Range<u64>,
) -> StoreResult<Vec<Bytes>> {
    let result = get(store, path, GetOptions::new().with_range(Some(span.clone()))).await?;
    let end = result.range.end;
    // The store itself says what is wrong with a range that begins behind the end.
    if let Some(behind) = ranges.iter().find(|range| range.start >= end) {
        get(store, path, GetOptions::new().with_range(Some(behind.clone()))).await?;
        let source = format!("it had {end} bytes a moment ago").into();
        return Err(StoreError::Precondition { path: path.to_string(), source });
    }
    let bytes = result.bytes().await?;
    let at = |place: u64| (place.min(end) - span.start) as usize;
    Ok(ranges.iter().map(|range| bytes.slice(at(range.start)..at(range.end.max(range.start)))).collect())
}

async fn ranges_at_once(
    store: &dyn ObjectStore,
    path: &Path,
    ranges: &[Range<u64>],
) -> StoreResult<Vec<Bytes>> {
    let Some((first, rest)) = ranges.split_first() else { return Ok(Vec::new()) };
    let first = get(store, path, GetOptions::new().with_range(Some(first.clone()))).await?;
    let known = &first.meta.clone();
    let first = first.bytes().await?;
    let rest = stream::iter(rest.to_vec()).map(|range| range_of(store, known, range));
    let rest: Vec<_> = rest.buffered(RANGES_MAX).try_collect().await?;
    Ok([first].into_iter().chain(rest).collect())
}

/// A range of the version that `known` says.
async fn range_of(store: &dyn ObjectStore, known: &ObjectMeta, range: Range<u64>) -> StoreResult<Bytes> {
    let result = get(store, &known.location, version::conditions(known).with_range(Some(range))).await?;
    if version::is_same(known, &result.meta) {
        return result.bytes().await;
    }
    let source = format!("it is {} by now", version::describe(&result.meta)).into();
    Err(StoreError::Precondition { path: known.location.to_string(), source })
}

/// The same answer, whose body has the bytes of its range or ends with an error.
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
