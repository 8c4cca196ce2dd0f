//! Read: GET and HEAD of an object's current version, by the cache.
//!
//! ```text
//!   headers -> conditions, one range -> ObjectStore::get_opts of the cache -> 200, 206, 304, or an error of S3's
//! ```
//!
//! Several ranges, and a range or date that cannot be parsed, are ignored, as in S3. With `If-Range` the whole object
//! is the answer, which HTTP always allows.

use futures_util::StreamExt;
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, StatusCode};
use object_store::path::Path;
use object_store::{
    Attribute, Error as StoreError, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore,
};
use quinion_object::internals::RangeOutside;
use quinion_serve::kept_headers;
use s3s::{Body, S3Error, S3Response, S3Result, s3_error};

use crate::routing::{OVERRIDES, Query};

/// S3's type of an object that was written without one.
const TYPE_OF_NONE: &str = "binary/octet-stream";

/// A GET or HEAD of an object.
pub struct ObjectRead<'r> {
    pub method: &'r Method,
    pub path: &'r Path,
    /// The parameters: none but overrides.
    pub query: &'r Query,
    pub headers: &'r HeaderMap,
}

pub enum Refusal {
    /// An error that the client gets, as S3 would send it.
    Answer(S3Error),
    /// The endpoint has no credentials for the store: the message is for the log.
    Unauthenticated(StoreError),
    /// The store, or the server of the cache, fails for the moment: its message is for the log.
    Failed(StoreError),
}

impl From<S3Error> for Refusal {
    fn from(error: S3Error) -> Self {
        Self::Answer(error)
    }
}

/// The answer.
///
/// # Errors
/// The object is not there, does not fulfil the conditions or has no such range; it could not be read.
pub async fn read(store: &dyn ObjectStore, request: ObjectRead<'_>) -> Result<S3Response<Body>, Refusal> {
    let ObjectRead { method, path, query, headers } = request;
    let mut options = options_of(headers).with_head(*method == Method::HEAD);
    options.range = range_of(headers);
    let range = options.range.clone();
    let tag = options.if_none_match.clone();
    let result = match store.get_opts(path, options).await {
        Ok(result) => result,
        Err(StoreError::NotModified { .. }) => return Ok(not_modified(tag)),
        Err(StoreError::Precondition { .. }) => return Err(s3_error!(PreconditionFailed).into()),
        Err(StoreError::NotFound { .. }) => return Err(s3_error!(NoSuchKey).into()),
        Err(error @ StoreError::Unauthenticated { .. }) => return Err(Refusal::Unauthenticated(error)),
        Err(StoreError::PermissionDenied { .. }) => {
            return Err(s3_error!(AccessDenied, "The store does not let the endpoint read it.").into());
        }
        Err(error) => {
            // It may be the range, which is no kind of error of its own. A store without an answer is not asked again.
            if let Some(size) = size_behind(&error) {
                return Err(unsatisfiable(size).into());
            }
            let is_refused = error.to_string().contains("416 Range Not Satisfiable");
            let Some(range) = range.filter(|_| is_refused) else { return Err(Refusal::Failed(error)) };
            let head = store.get_opts(path, GetOptions::new().with_head(true)).await;
            return Err(match head {
                Ok(head) if range.as_range(head.meta.size).is_err() => unsatisfiable(head.meta.size).into(),
                _ => Refusal::Failed(error),
            });
        }
    };
    if range.is_some() && result.range.is_empty() {
        return Err(unsatisfiable(result.meta.size).into());
    }
    let mut shown = headers_of(&result, range.is_some());
    override_headers(&mut shown, query)?;
    let status = if range.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let body = if *method == Method::HEAD { Body::empty() } else { body_of(result) };
    let mut response = S3Response::with_status(body, status);
    response.headers = shown;
    Ok(response)
}

fn body_of(result: GetResult) -> Body {
    let frames = result.into_stream().map(|bytes| bytes.map(Frame::data));
    Body::http_body_unsync(StreamBody::new(frames))
}

/// The size of the object that does not have the range, if that is the error.
fn size_behind(error: &StoreError) -> Option<u64> {
    let StoreError::Generic { source, .. } = error else { return None };
    source.downcast_ref::<RangeOutside>().map(|outside| outside.size)
}

fn unsatisfiable(size: u64) -> S3Error {
    let mut error = s3_error!(InvalidRange);
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_RANGE, value(format!("bytes */{size}")));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    error.set_headers(headers);
    error
}

/// The answer for an object with a tag that the client named; its tag is known if the client named only one.
fn not_modified(tag: Option<String>) -> S3Response<Body> {
    let mut response = S3Response::with_status(Body::empty(), StatusCode::NOT_MODIFIED);
    let tag = tag.filter(|tag| tag != "*" && !tag.contains(','));
    if let Some(tag) = tag.and_then(|tag| HeaderValue::from_str(&tag).ok()) {
        response.headers.insert(header::ETAG, tag);
    }
    response
}

fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

fn options_of(headers: &HeaderMap) -> GetOptions {
    let date = |name| httpdate::parse_http_date(text(headers, name)?).ok().map(Into::into);
    let mut options = GetOptions::new();
    options.if_match = text(headers, &header::IF_MATCH).map(tags);
    options.if_none_match = text(headers, &header::IF_NONE_MATCH).map(tags);
    options.if_modified_since = date(&header::IF_MODIFIED_SINCE);
    options.if_unmodified_since = date(&header::IF_UNMODIFIED_SINCE);
    options
}

/// Adds quotes to tags: S3 takes them without as well.
fn tags(text: &str) -> String {
    let quoted = text.split(',').map(str::trim).map(|tag| match tag {
        "*" => tag.to_owned(),
        tag if tag.ends_with('"') => tag.to_owned(),
        tag => format!("\"{tag}\""),
    });
    quoted.collect::<Vec<_>>().join(", ")
}

/// The one range that is asked for.
fn range_of(headers: &HeaderMap) -> Option<GetRange> {
    if headers.contains_key(header::IF_RANGE) {
        return None;
    }
    let (first, last) = text(headers, &header::RANGE)?.strip_prefix("bytes=")?.split_once('-')?;
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse::<u64>().unwrap_or(u64::MAX))
    };
    match (number(first), number(last)) {
        (None, Some(last)) if first.is_empty() => Some(GetRange::Suffix(last)),
        (Some(first), None) if last.is_empty() => Some(GetRange::Offset(first)),
        // A number without meaning, which no object reaches.
        (Some(u64::MAX), Some(u64::MAX)) => Some(GetRange::Offset(u64::MAX)),
        (Some(first), Some(last)) if first <= last => Some(GetRange::Bounded(first..last.saturating_add(1))),
        _ => None,
    }
}

fn value(text: String) -> HeaderValue {
    HeaderValue::try_from(text).expect("it has letters and digits alone")
}

/// When the object was put. `None`: it has no date of HTTP, whose years have four digits.
fn date_of(meta: &ObjectMeta) -> Option<HeaderValue> {
    // Not by `httpdate`, which panics at times before 1970.
    let date = meta.last_modified.format("%a, %d %b %Y %H:%M:%S GMT").to_string();
    (date.len() == "Thu, 01 Jan 1970 00:00:00 GMT".len()).then(|| value(date))
}

fn headers_of(result: &GetResult, is_part: bool) -> HeaderMap {
    let GetResult { meta, range, attributes, .. } = result;
    let mut headers = HeaderMap::new();
    if let Some(date) = date_of(meta) {
        headers.insert(header::LAST_MODIFIED, date);
    }
    headers.insert(header::CONTENT_LENGTH, (range.end - range.start).into());
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(TYPE_OF_NONE));
    if is_part {
        let text = format!("bytes {}-{}/{}", range.start, range.end - 1, meta.size);
        headers.insert(header::CONTENT_RANGE, value(text));
    }
    let version = HeaderName::from_static("x-amz-version-id");
    let names = [(header::ETAG, &meta.e_tag), (version, &meta.version)];
    let told = names
        .into_iter()
        .filter_map(|(name, told)| Some((name, HeaderValue::from_bytes(told.as_deref()?.as_bytes()).ok()?)));
    for (name, told) in told.chain(attributes.iter().filter_map(|(kind, told)| header_of(kind, told))) {
        headers.insert(name, told);
    }
    headers
}

fn header_of(kind: &Attribute, told: &str) -> Option<(HeaderName, HeaderValue)> {
    let name = match kind {
        Attribute::ContentDisposition => header::CONTENT_DISPOSITION,
        Attribute::ContentEncoding => header::CONTENT_ENCODING,
        Attribute::ContentLanguage => header::CONTENT_LANGUAGE,
        Attribute::ContentType => header::CONTENT_TYPE,
        Attribute::CacheControl => header::CACHE_CONTROL,
        Attribute::StorageClass => HeaderName::from_static("x-amz-storage-class"),
        Attribute::Metadata(name) => return kept_headers::header_of(name, told),
        _ => return None,
    };
    Some((name, HeaderValue::from_bytes(told.as_bytes()).ok()?))
}

/// Overrides the answer's headers as the client asks.
fn override_headers(headers: &mut HeaderMap, query: &Query) -> S3Result<()> {
    for (parameter, wanted) in query {
        let Some((_, name)) = OVERRIDES.iter().find(|(other, _)| other == parameter) else { continue };
        let wanted = HeaderValue::from_str(wanted);
        let wanted =
            wanted.map_err(|_| s3_error!(InvalidArgument, "{parameter} is not a header's value."))?;
        headers.insert(HeaderName::from_static(name), wanted);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use futures_util::stream;
    use object_store::GetResultPayload;

    use super::*;

    fn with(name: HeaderName, text: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(text))])
    }

    #[test]
    fn one_range_is_one_and_all_else_is_none() {
        let range = |text| range_of(&with(header::RANGE, text));
        assert_eq!(range("bytes=0-0"), Some(GetRange::Bounded(0..1)));
        assert_eq!(range("bytes=5-"), Some(GetRange::Offset(5)));
        assert_eq!(range("bytes=-7"), Some(GetRange::Suffix(7)));
        assert_eq!(range("bytes=1-99999999999999999999"), Some(GetRange::Bounded(1..u64::MAX)));
        for text in
            ["bytes=-", "bytes=5-2", "bytes=0-1,3-4", "bytes=a-", "bytes=+1-2", "lines=0-1", "bytes 0-1"]
        {
            assert_eq!(range(text), None, "{text}");
        }
        let mut headers = with(header::RANGE, "bytes=0-1");
        headers.insert(header::IF_RANGE, HeaderValue::from_static("\"a\""));
        assert_eq!(range_of(&headers), None);
    }

    /// 1. An object's file was dated before 1970, or in the year 10000, by a program that made it.
    /// 2. The endpoint panicked at each request for it.
    #[test]
    fn an_object_of_any_date_has_an_answer() {
        let date = |modified: std::time::SystemTime| {
            let (location, last_modified) = (Path::from("a"), modified.into());
            let meta = ObjectMeta { location, last_modified, size: 0, e_tag: None, version: None };
            let payload = GetResultPayload::Stream(stream::empty().boxed());
            let (attributes, extensions) = Default::default();
            let result = GetResult { payload, meta, range: 0..0, attributes, extensions };
            let date = headers_of(&result, false).get(header::LAST_MODIFIED)?.to_str().unwrap().to_owned();
            Some(date)
        };
        let second = Duration::from_secs;
        assert_eq!(date(UNIX_EPOCH + second(784_111_777)).as_deref(), Some("Sun, 06 Nov 1994 08:49:37 GMT"));
        assert_eq!(date(UNIX_EPOCH - second(1)).as_deref(), Some("Wed, 31 Dec 1969 23:59:59 GMT"));
        let last = UNIX_EPOCH + second(253_402_300_799);
        assert_eq!(date(last).as_deref(), Some("Fri, 31 Dec 9999 23:59:59 GMT"));
        assert_eq!((date(last + second(1)), date(UNIX_EPOCH - second(100_000_000_000))), (None, None));
    }

    #[test]
    fn tags_are_taken_with_quotes_and_without() {
        for (text, read) in [
            ("abc", "\"abc\""),
            ("\"abc\"", "\"abc\""),
            ("*", "*"),
            ("a, \"b\",W/\"c\"", "\"a\", \"b\", W/\"c\""),
        ] {
            assert_eq!(options_of(&with(header::IF_MATCH, text)).if_match.as_deref(), Some(read));
        }
        assert_eq!(options_of(&with(header::IF_MODIFIED_SINCE, "yesterday")).if_modified_since, None);
    }
}
