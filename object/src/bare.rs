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

/// How often ranges are asked for whose object is replaced each time.
const CHANGES_MAX: u32 = 8;
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
/// Those of the store; [`StoreError::Precondition`]: the object was replaced again and again.
pub async fn get_ranges(
    store: &dyn ObjectStore,
    path: &Path,
    ranges: &[Range<u64>],
) -> StoreResult<Vec<Bytes>> {
    let mut attempts = 1;
    loop {
        match ranges_at_once(store, path, ranges).await {
            Err(StoreError::Precondition { .. }) if attempts < CHANGES_MAX => attempts += 1,
            answer => return answer,
        }
    }
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
