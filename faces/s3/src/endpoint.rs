//! Endpoint: a signed request of S3's, to the cache or to the store.
//!
//! ```text
//!   s3s: path, query, signature, chunks of a body          errors as S3 has them
//!     -> is it a reader or a writer, and may it?           check_access
//!     -> routing.rs -> read.rs: the cache
//!                 -> upstream.rs: the store; what was written is forgotten before its writer is told
//! ```
//!
//! A request without a signature may read, if the endpoint allows it, and if no web page can have sent it: it names the
//! endpoint by an address or `localhost`, and has no `Origin`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::StreamExt;
use hyper::header::{self, HeaderMap};
use hyper::http::Extensions;
use hyper::{Method, Uri};
use object_store::ObjectStore;
use object_store::path::Path;
use percent_encoding::percent_decode_str;
use quinion_object::CachedStore;
use quinion_serve::log::Log;
use quinion_serve::store_text;
use quinion_service::ClientStore;
use s3s::dto::{Bucket as BucketName, ListBucketsInput, ListBucketsOutput};
use s3s::route::S3Route;
use s3s::{Body, S3, S3Request, S3Response, S3Result, s3_error};

use crate::read::{self, Refusal};
use crate::routing::{Access, Answer, Query, RoutedRequest, Target, asked, query_of};
use crate::upload::{Fault, Trailer, checked};
use crate::upstream::{self, Upstream};

/// The limit of S3.
const BODY_BYTES_MAX: u64 = 5 << 30;
/// The limit of documents, enough for any list of parts.
const DOCUMENT_BYTES_MAX: u64 = 16 << 20;

#[derive(Clone, Debug)]
pub enum Cached {
    Own(CachedStore),
    Served(ClientStore),
}

impl Cached {
    fn store(&self) -> &dyn ObjectStore {
        match self {
            Self::Own(store) => store,
            Self::Served(store) => store,
        }
    }

    fn invalidate(&self, path: Option<&Path>) {
        match (self, path) {
            (Self::Own(store), Some(path)) => store.invalidate(path),
            (Self::Own(store), None) => store.invalidate_all(),
            (Self::Served(store), Some(path)) => store.invalidate(path),
            (Self::Served(store), None) => store.invalidate_all(),
        }
    }
}

#[derive(Debug)]
pub struct Bucket {
    /// At its store.
    pub upstream: Upstream,
    /// In the cache.
    pub cached: Cached,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    pub anonymous: Anonymous,
    pub writes: Writes,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Anonymous {
    Reads,
    Refused,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writes {
    Signed,
    Refused,
}

/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct Endpoint(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    buckets: BTreeMap<String, Bucket>,
    rules: Rules,
    log: Log,
    /// When a failure was logged last, in seconds.
    logged: AtomicU64,
}

/// A write that is under way: at its end the cache drops all it knows of the objects, whatever the outcome.
struct Writing<'b>(&'b Bucket, Option<Path>);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.cached.invalidate(self.1.as_ref());
    }
}

/// A request that the store answers, with what was parsed of it.
struct PassedRequest<'r> {
    request: S3Request<Body>,
    target: &'r Target,
    query: &'r Query,
}

impl Endpoint {
    pub fn new(buckets: BTreeMap<String, Bucket>, rules: Rules, log: Log) -> Self {
        Self(Arc::new(Shared { buckets, rules, log, logged: AtomicU64::new(0) }))
    }

    /// One line a second at most: a store that is away fails all requests.
    async fn log_failure(&self, name: &str, upstream: &Upstream, why: String) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        if self.0.logged.swap(now, Ordering::Relaxed) != now {
            let why = upstream.redacted(store_text::shown(&why)).await;
            self.0.log.event("failed", &[("bucket", name), ("why", &why)]);
        }
    }

    async fn answer(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let target = Target::of(request.uri.path())?;
        let query = query_of(request.uri.query());
        let asked = asked(&request.method, &target, &query)?;
        let bucket = self.0.buckets.get(&target.bucket).ok_or_else(|| s3_error!(NoSuchBucket))?;
        // A key that the crate `object_store` writes in another way is another object there.
        let path =
            target.key.as_deref().and_then(|key| Path::parse(key).ok().filter(|path| path.as_ref() == key));
        match (asked, &path) {
            (RoutedRequest::Cached, Some(path)) if !is_for_the_store(&request) => {
                let S3Request { method, headers, .. } = &request;
                let read = read::Request { method, path, query: &query, headers };
                match read::read(bucket.cached.store(), read).await {
                    Ok(response) => Ok(response),
                    Err(Refusal::Answer(error)) => Err(error),
                    Err(Refusal::Failed(error)) => {
                        self.log_failure(&target.bucket, &bucket.upstream, error.to_string()).await;
                        Err(s3_error!(ServiceUnavailable, "The object could not be read. Try again later."))
                    }
                }
            }
            (RoutedRequest::Cached, _) => {
                self.pass_on(bucket, PassedRequest { request, target: &target, query: &query }, Answer::Data)
                    .await
            }
            (RoutedRequest::Store(Access::Reads, answer), _) => {
                self.pass_on(bucket, PassedRequest { request, target: &target, query: &query }, answer).await
            }
            (RoutedRequest::Store(Access::Writes, answer), _) => {
                if self.0.rules.writes == Writes::Refused {
                    return Err(s3_error!(AccessDenied, "The endpoint only reads."));
                }
                let _writing = Writing(bucket, path);
                self.pass_on(bucket, PassedRequest { request, target: &target, query: &query }, answer).await
            }
        }
    }

    async fn pass_on(
        &self,
        bucket: &Bucket,
        passed: PassedRequest<'_>,
        answer: Answer,
    ) -> S3Result<S3Response<Body>> {
        let PassedRequest { mut request, target, query } = passed;
        self.check_copy(bucket, &request.headers)?;
        let fault = Fault::default();
        let mut body = body_of(&mut request, target.key.is_some(), &fault)?;
        if let Some((pieces, 0)) = &mut body {
            // An HTTP client does not poll a body of no bytes, and so would not find its fault.
            while pieces.next().await.is_some() {}
            if let Some(fault) = fault.take() {
                return Err(fault);
            }
            body = Some((futures_util::stream::empty().boxed(), 0));
        }
        let asked = upstream::Request {
            method: request.method,
            key: target.key.as_deref(),
            query,
            headers: &request.headers,
            body,
            answer,
        };
        let answered = bucket.upstream.ask(asked).await;
        match (fault.take(), answered) {
            (Some(fault), _) => Err(fault),
            (None, answered) => answered,
        }
    }

    /// Checks that the source of a copy is this endpoint's, and at the same store.
    fn check_copy(&self, bucket: &Bucket, headers: &HeaderMap) -> S3Result<()> {
        let Some(source) = headers.get("x-amz-copy-source") else { return Ok(()) };
        let source = source.to_str().unwrap_or_default();
        let source = percent_decode_str(source).decode_utf8().map_err(|_| s3_error!(InvalidArgument))?;
        let name = source.strip_prefix('/').unwrap_or(&source).split('/').next().unwrap_or_default();
        let source = self.0.buckets.get(name).ok_or_else(|| {
            s3_error!(AccessDenied, "The endpoint copies from its own buckets, named as bucket/key.")
        })?;
        match source.upstream.is_beside(&bucket.upstream) {
            true => Ok(()),
            false => Err(s3_error!(NotImplemented, "The endpoint does not copy from one store to another.")),
        }
    }
}

/// Whether only the store can answer: the object is encrypted by a key of the client's, with which the cache could not
/// read it; the bucket may be another account's; a HEAD asks for checksums. (SDKs ask for them by each GET, and do
/// without.)
fn is_for_the_store(request: &S3Request<Body>) -> bool {
    let has = |name: &str| request.headers.contains_key(name);
    has("x-amz-server-side-encryption-customer-algorithm")
        || has("x-amz-expected-bucket-owner")
        || request.method == Method::HEAD && has("x-amz-checksum-mode")
}

/// The body for the store, and its length.
#[expect(clippy::type_complexity, reason = "a stream and its length")]
fn body_of(
    request: &mut S3Request<Body>,
    is_object: bool,
    fault: &Fault,
) -> S3Result<Option<(futures_util::stream::BoxStream<'static, Result<bytes::Bytes, s3s::StdError>>, u64)>> {
    if [Method::GET, Method::HEAD, Method::DELETE].contains(&request.method) {
        return Ok(None);
    }
    let headers = &request.headers;
    // For signed chunks, s3s puts the length of their content there, if there is a length at all.
    let number = |len: &hyper::header::HeaderValue| len.to_str().ok()?.parse::<u64>().ok();
    let len = headers.get(header::CONTENT_LENGTH).or_else(|| headers.get("x-amz-decoded-content-length"));
    // Without a length and without chunks there is no body, as HTTP has it.
    let len = match len {
        None if !headers.contains_key(header::TRANSFER_ENCODING) => Some(0),
        len => len.and_then(number),
    };
    let len = len.ok_or_else(|| s3_error!(MissingContentLength))?;
    let is_data = is_object && request.method == Method::PUT;
    if len > if is_data { BODY_BYTES_MAX } else { DOCUMENT_BYTES_MAX } {
        return Err(s3_error!(EntityTooLarge));
    }
    let trailer = match (headers.get("x-amz-trailer"), request.trailing_headers.take()) {
        (Some(name), Some(values)) => {
            let name = name.to_str().map_err(|_| s3_error!(InvalidArgument))?;
            Some(Trailer::announced(name, values)?)
        }
        _ => None,
    };
    let body = std::mem::take(&mut request.input);
    Ok(Some((checked(body, len, trailer, fault.clone()).boxed(), len)))
}

/// Whether no web page of another origin can have sent it.
fn is_of_no_page(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, port)| match port.parse::<u16>() {
        Ok(_) => name,
        Err(_) => host,
    });
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let is_named = name.eq_ignore_ascii_case("localhost") || address.parse::<std::net::IpAddr>().is_ok();
    is_named && !headers.contains_key(header::ORIGIN)
}

/// A signature of version 2, which s3s takes as well, says nothing of a body.
fn is_signed_by_version_4(headers: &HeaderMap, query: Option<&str>) -> bool {
    match headers.get(header::AUTHORIZATION) {
        Some(value) => value.as_bytes().starts_with(b"AWS4-"),
        None => form_urlencoded::parse(query.unwrap_or_default().as_bytes())
            .any(|(name, _)| name == "X-Amz-Algorithm"),
    }
}

#[async_trait::async_trait]
impl S3Route for Endpoint {
    fn is_match(&self, method: &Method, uri: &Uri, _: &HeaderMap, _: &mut Extensions) -> bool {
        !(method == Method::GET && uri.path() == "/")
    }

    async fn check_access(&self, request: &mut S3Request<Body>) -> S3Result<()> {
        let reads = [Method::GET, Method::HEAD].contains(&request.method);
        let is_by_4 = is_signed_by_version_4(&request.headers, request.uri.query());
        match (&request.credentials, request.service.as_deref()) {
            (Some(_), Some("s3")) if is_by_4 => Ok(()),
            (Some(_), _) => Err(s3_error!(
                AccessDenied,
                "Sign by version 4, for the service s3; boto3 does by Config(signature_version='s3v4')."
            )),
            (None, _) if self.0.rules.anonymous == Anonymous::Refused => {
                Err(s3_error!(AccessDenied, "A signature is required."))
            }
            (None, _) if !reads => Err(s3_error!(AccessDenied, "A signature is required to write.")),
            (None, _) if !is_of_no_page(&request.headers) => Err(s3_error!(
                AccessDenied,
                "Without a signature, name the endpoint by its address, and not from a web page."
            )),
            (None, _) => Ok(()),
        }
    }

    async fn call(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        self.answer(request).await
    }
}

#[async_trait::async_trait]
impl S3 for Endpoint {
    async fn list_buckets(&self, _: S3Request<ListBucketsInput>) -> S3Result<S3Response<ListBucketsOutput>> {
        let named = |name: &String| BucketName { name: Some(name.clone()), ..Default::default() };
        let buckets = Some(self.0.buckets.keys().map(named).collect());
        Ok(S3Response::new(ListBucketsOutput { buckets, ..Default::default() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_of_version_2_is_none() {
        let of = |value: &'static str| {
            HeaderMap::from_iter([(header::AUTHORIZATION, hyper::header::HeaderValue::from_static(value))])
        };
        assert!(is_signed_by_version_4(&of("AWS4-HMAC-SHA256 Credential=a"), None));
        assert!(is_signed_by_version_4(&HeaderMap::new(), Some("x-id=a&X-Amz-Algorithm=AWS4-HMAC-SHA256")));
        assert!(!is_signed_by_version_4(&of("AWS key:signature"), Some("X-Amz-Algorithm=AWS4-HMAC-SHA256")));
        let of_2 = "AWSAccessKeyId=key&Signature=a&Expires=1";
        assert!(!is_signed_by_version_4(&HeaderMap::new(), Some(of_2)));
    }

    #[test]
    fn a_page_that_names_a_host_of_its_own_is_told_apart() {
        let of = |host: &'static str| {
            HeaderMap::from_iter([(header::HOST, hyper::header::HeaderValue::from_static(host))])
        };
        for host in ["127.0.0.1:9000", "127.0.0.1", "[::1]:9000", "[::1]", "localhost:1", "LocalHost"] {
            assert!(is_of_no_page(&of(host)), "{host}");
        }
        for host in ["evil.example:9000", "127.0.0.1.evil.example", "", "localhost.evil"] {
            assert!(!is_of_no_page(&of(host)), "{host}");
        }
        let mut headers = of("127.0.0.1:9000");
        headers.insert(header::ORIGIN, hyper::header::HeaderValue::from_static("null"));
        assert!(!is_of_no_page(&headers));
    }
}
