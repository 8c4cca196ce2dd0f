//! Endpoint: a signed request of S3's, to the cache or to the store.
//!
//! ```text
//!   s3s: path, query, signature, chunks of a body          errors as S3 has them
//!     -> is it a reader or a writer, and may it?           check_access
//!     -> routing.rs -> read.rs: the cache
//!                 -> upstream.rs: the store; what was written is forgotten before its writer is told
//! ```
//!
//! A write that a store has in whole goes on there when its client is gone. So a write is a task of its own, and the
//! object is forgotten when the store has answered. If a client is gone before its body came in whole, the body ends
//! with an error, and the store writes nothing.
//!
//! A request without a signature may read, if the endpoint allows it, and if no web page can have sent it: it names the
//! endpoint by an address or `localhost`, has no `Origin`, and no `Sec-Fetch-Site` but `none`.
//!
//! A signature has to cover each header for the store (`x-amz-*`), as S3 has it: a signed URL allows the request that
//! was signed, and nothing that is added to it.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::StreamExt;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::Extensions;
use hyper::{Method, Uri};
use object_store::ObjectStore;
use object_store::path::Path;
use percent_encoding::percent_decode_str;
use quinion_object::CachedStore;
use quinion_serve::log::Log;
use quinion_service::ClientStore;
use s3s::dto::{Bucket as BucketName, ListBucketsInput, ListBucketsOutput};
use s3s::route::S3Route;
use s3s::{Body, S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::listen::UnderWay;
use crate::read::{self, Refusal};
use crate::routing::{Access, Answer, Query, RoutedRequest, Target, query_of, route};
use crate::signed_url::headers_from_query;
use crate::upload::{Fault, Trailer, checked};
use crate::upstream::{self, Upstream};

/// The limit of S3.
const BODY_BYTES_MAX: u64 = 5 << 30;
/// The limit of documents, enough for any list of parts.
const DOCUMENT_BYTES_MAX: u64 = 16 << 20;
/// The longest validity of a signed URL, in seconds: S3's, seven days.
const EXPIRES_MAX: u64 = 7 * 24 * 3600;

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
    pub upstream: Upstream,
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

/// An endpoint that speaks S3's protocol; clones share one state.
#[derive(Clone, Debug)]
pub struct Endpoint(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    buckets: BTreeMap<String, Arc<Bucket>>,
    rules: Rules,
    log: Log,
    /// When a failure was logged last, in seconds.
    logged: AtomicU64,
}

/// A write that is under way: at its end the cache drops all it knows of the objects, whatever the outcome.
struct Writing(Arc<Bucket>, Option<Path>);

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.cached.invalidate(self.1.as_ref());
    }
}

/// A request that the store answers, with what was parsed of it.
struct PassedRequest {
    request: S3Request<Body>,
    target: Target,
    query: Query,
    answer: Answer,
}

impl Endpoint {
    pub fn new(buckets: BTreeMap<String, Bucket>, rules: Rules, log: Log) -> Self {
        let buckets = buckets.into_iter().map(|(name, bucket)| (name, Arc::new(bucket))).collect();
        Self(Arc::new(Shared { buckets, rules, log, logged: AtomicU64::new(0) }))
    }

    /// One line a second at most: a store that is away fails all requests. `why` is asked for only then.
    async fn log_failure(&self, name: &str, why: impl Future<Output = String>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        if self.0.logged.swap(now, Ordering::Relaxed) != now {
            self.0.log.event("failed", &[("bucket", name), ("why", &why.await)]);
        }
    }

    async fn answer(&self, mut request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let target = Target::of(request.uri.path())?;
        let mut query = query_of(request.uri.query());
        if is_signed_url(&request) {
            headers_from_query(&mut query, &mut request.headers)?;
        }
        let routed = route(&request.method, &target, &query)?;
        let bucket = self.0.buckets.get(&target.bucket).ok_or_else(|| s3_error!(NoSuchBucket))?;
        // A key that the crate `object_store` writes in another way is another object there.
        let path =
            target.key.as_deref().and_then(|key| Path::parse(key).ok().filter(|path| path.as_ref() == key));
        match (routed, &path) {
            (RoutedRequest::Cached, Some(path)) if !is_for_the_store(&request) => {
                let S3Request { method, headers, .. } = &request;
                let read = read::ObjectRead { method, path, query: &query, headers };
                match read::read(bucket.cached.store(), read).await {
                    Ok(response) => Ok(response),
                    Err(Refusal::Answer(error)) => Err(error),
                    Err(Refusal::Unauthenticated(error)) => {
                        // There are no secrets to hide, and to look for them would take as long again.
                        self.log_failure(&target.bucket, ready(error.to_string())).await;
                        Err(upstream::no_credentials())
                    }
                    Err(Refusal::Failed(error)) => {
                        let why = bucket.upstream.redacted(error.to_string());
                        self.log_failure(&target.bucket, why).await;
                        Err(s3_error!(ServiceUnavailable, "The object could not be read. Try again later."))
                    }
                }
            }
            (RoutedRequest::Cached, _) => {
                self.pass_on(bucket, PassedRequest { request, target, query, answer: Answer::Data }).await
            }
            (RoutedRequest::Store(Access::Reads, answer), _) => {
                self.pass_on(bucket, PassedRequest { request, target, query, answer }).await
            }
            (RoutedRequest::Store(Access::Writes, answer), _) => {
                if self.0.rules.writes == Writes::Refused {
                    return Err(s3_error!(AccessDenied, "The endpoint only reads."));
                }
                let writing = Writing(Arc::clone(bucket), path);
                self.write(writing, PassedRequest { request, target, query, answer }).await
            }
        }
    }

    /// Passes on a write, to its end also if the caller drops this future.
    async fn write(&self, writing: Writing, passed: PassedRequest) -> S3Result<S3Response<Body>> {
        let endpoint = self.clone();
        let under_way = passed.request.extensions.get::<UnderWay>().cloned();
        let task = tokio::spawn(async move {
            let answered = endpoint.pass_on(&writing.0, passed).await;
            drop((writing, under_way));
            answered
        });
        task.await.unwrap_or_else(|_| Err(s3_error!(InternalError)))
    }

    async fn pass_on(&self, bucket: &Bucket, passed: PassedRequest) -> S3Result<S3Response<Body>> {
        let PassedRequest { mut request, target, query, answer } = passed;
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
        let asked = upstream::UpstreamRequest {
            method: request.method,
            key: target.key.as_deref(),
            query: &query,
            headers: &request.headers,
            body,
            answer,
        };
        let answered = bucket.upstream.ask(asked).await;
        let why = answered.as_ref().err().and_then(S3Error::source).map(ToString::to_string);
        if let Some(why) = why {
            // It says why there are no credentials.
            self.log_failure(&target.bucket, ready(why)).await;
        }
        match (fault.take(), answered) {
            (Some(fault), _) => Err(fault),
            (None, answered) => answered,
        }
    }

    /// Checks that the source of a copy is this endpoint's, and at the same store.
    fn check_copy(&self, bucket: &Bucket, headers: &HeaderMap) -> S3Result<()> {
        let mut sources = headers.get_all("x-amz-copy-source").iter();
        let Some(source) = sources.next() else { return Ok(()) };
        if sources.next().is_some() {
            // Which of them a store takes, it alone knows.
            return Err(s3_error!(InvalidArgument, "A copy has one source; name one in x-amz-copy-source."));
        }
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

/// Whether no web page can have sent it: none by an address of its own, and none that a browser tells of. (A browser
/// gives no `Origin` of images, scripts and links, nor of reads by a page that comes from a bucket itself.)
fn is_of_no_page(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, port)| match port.parse::<u16>() {
        Ok(_) => name,
        Err(_) => host,
    });
    let address = name.trim_start_matches('[').trim_end_matches(']');
    // Systems connect to this machine by 0.0.0.0, too, and to its addresses of version 4 as mapped ones of version 6;
    // browsers take neither for this machine, and do not say there from where a request comes.
    let is_address = address.parse().is_ok_and(|address: std::net::IpAddr| {
        address.to_canonical() == address && !address.is_unspecified()
    });
    let is_named = is_address || name.eq_ignore_ascii_case("localhost");
    // A URL that a user has typed, or opened from a bookmark, is of no site.
    let is_of_a_site = headers.get_all("sec-fetch-site").iter().any(|site| site != "none");
    is_named && !headers.contains_key(header::ORIGIN) && !is_of_a_site
}

/// The names of the headers that a request's signature covers, as s3s has looked for it. `None`: it is none of version
/// 4 that covers the URL. s3s takes signatures of version 2 as well, and looks for them first; they say nothing of a
/// body. And it takes those of a form, which cover its fields alone.
fn signed_headers(method: &Method, headers: &HeaderMap, query: Option<&str>) -> Option<Vec<String>> {
    const FORM: &[u8] = b"multipart/form-data";
    let is_form = |kind: &HeaderValue| {
        kind.as_bytes().get(..FORM.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(FORM))
    };
    if method == Method::POST && headers.get_all(header::CONTENT_TYPE).iter().any(is_form) {
        return None;
    }
    let is_by_2 = |value: &HeaderValue| !value.as_bytes().starts_with(b"AWS4-");
    if headers.get_all(header::AUTHORIZATION).iter().any(is_by_2) {
        return None;
    }
    let parameters: Vec<_> = form_urlencoded::parse(query.unwrap_or_default().as_bytes()).collect();
    let parameter =
        |wanted: &str| parameters.iter().find(|(name, _)| name == wanted).map(|(_, value)| &**value);
    if parameter("Signature").is_some() {
        return None;
    }
    let names = match parameter("X-Amz-Signature") {
        Some(_) => parameter("X-Amz-SignedHeaders")?,
        None => {
            let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
            let mut parts = value.split(|byte: char| byte == ',' || byte.is_ascii_whitespace());
            parts.find_map(|part| part.strip_prefix("SignedHeaders="))?
        }
    };
    Some(names.split(';').map(str::to_owned).collect())
}

/// Whether a request was signed by its URL.
fn is_signed_url(request: &S3Request<Body>) -> bool {
    let query = request.uri.query().unwrap_or_default();
    request.credentials.is_some()
        && form_urlencoded::parse(query.as_bytes()).any(|(name, _)| name == "X-Amz-Signature")
}

/// Whether a signed URL, if the request has one, is valid for no longer than S3 would let it be.
fn expires_in_time(query: Option<&str>) -> bool {
    let parameters = form_urlencoded::parse(query.unwrap_or_default().as_bytes());
    let mut times = parameters.filter(|(name, _)| name == "X-Amz-Expires");
    times.all(|(_, time)| time.parse::<u64>().is_ok_and(|seconds| seconds <= EXPIRES_MAX))
}

/// A header for the store that the signature does not cover: a holder of a signed URL could add it, and make an upload
/// a copy of another object.
fn unsigned_header<'h>(headers: &'h HeaderMap, signed: &[String]) -> Option<&'h str> {
    let is_for_the_store = |name: &&str| name.starts_with("x-amz-") && upstream::is_passed_on(name);
    headers
        .keys()
        .map(|name| name.as_str())
        .filter(is_for_the_store)
        .find(|name| !signed.iter().any(|one| one == name))
}

#[async_trait::async_trait]
impl S3Route for Endpoint {
    fn is_match(&self, method: &Method, uri: &Uri, _: &HeaderMap, _: &mut Extensions) -> bool {
        !(method == Method::GET && uri.path() == "/")
    }

    async fn check_access(&self, request: &mut S3Request<Body>) -> S3Result<()> {
        let reads = [Method::GET, Method::HEAD].contains(&request.method);
        let S3Request { method, headers, uri, .. } = &*request;
        let signed = signed_headers(method, headers, uri.query());
        match (&request.credentials, request.service.as_deref(), signed) {
            (Some(_), Some("s3"), Some(_)) if !expires_in_time(uri.query()) => Err(s3_error!(
                AccessDenied,
                "The signed URL is valid for more than seven days; sign it for 604800 seconds at most."
            )),
            (Some(_), Some("s3"), Some(signed)) => match unsigned_header(headers, &signed) {
                None => Ok(()),
                Some(name) => {
                    let text = format!("The header {name} is not signed; sign it, or leave it out.");
                    Err(S3Error::with_message(S3ErrorCode::AccessDenied, text))
                }
            },
            (Some(_), ..) => Err(s3_error!(
                AccessDenied,
                "Sign by version 4, for the service s3; boto3 does by Config(signature_version='s3v4')."
            )),
            (None, ..) if self.0.rules.anonymous == Anonymous::Refused => {
                Err(s3_error!(AccessDenied, "A signature is required."))
            }
            (None, ..) if !reads => Err(s3_error!(AccessDenied, "A signature is required to write.")),
            (None, ..) if !is_of_no_page(headers) => Err(s3_error!(
                AccessDenied,
                "Without a signature, name the endpoint by its address, and not from a web page."
            )),
            (None, ..) => Ok(()),
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

    fn with(name: header::HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
    }

    #[test]
    fn only_a_signature_of_version_4_that_covers_the_url_is_one() {
        let of = |headers: &HeaderMap, query| {
            signed_headers(&Method::PUT, headers, query).map(|names| names.join(" "))
        };
        let by_4 =
            "AWS4-HMAC-SHA256 Credential=k/d/r/s3/aws4_request, SignedHeaders=host;x-amz-date, Signature=0";
        let by_4 = with(header::AUTHORIZATION, by_4);
        assert_eq!(of(&by_4, None).as_deref(), Some("host x-amz-date"));
        let url = "X-Amz-SignedHeaders=host%3Bx-amz-acl&X-Amz-Signature=0";
        assert_eq!(of(&HeaderMap::new(), Some(url)).as_deref(), Some("host x-amz-acl"));
        let by_2 = with(header::AUTHORIZATION, "AWS key:signature");
        assert_eq!(of(&by_2, None), None);
        assert_eq!(of(&by_2, Some("X-Amz-Algorithm=AWS4-HMAC-SHA256")), None);
        assert_eq!(of(&by_2, Some(url)), None, "s3s looks at the header first");
        let url_by_2 = "AWSAccessKeyId=key&Signature=a&Expires=1";
        assert_eq!(of(&HeaderMap::new(), Some(url_by_2)), None);
        let both = format!("{url_by_2}&{url}&X-Amz-Algorithm=AWS4-HMAC-SHA256");
        assert_eq!(of(&HeaderMap::new(), Some(&both)), None, "s3s looks for version 2 first");
        assert_eq!(of(&by_4, Some(url_by_2)), None, "as above");
        let mut form = with(header::CONTENT_TYPE, "Multipart/Form-Data; boundary=b");
        form.extend(by_4);
        assert_eq!(signed_headers(&Method::POST, &form, None), None, "s3s looks at the form alone");
    }

    #[test]
    fn a_signed_url_is_valid_for_seven_days_at_most() {
        for time in ["1", "604800"] {
            assert!(expires_in_time(Some(&format!("x-id=a&X-Amz-Expires={time}"))), "{time}");
        }
        for time in ["604801", "4000000000", "99999999999999999999", "-1", ""] {
            assert!(!expires_in_time(Some(&format!("X-Amz-Expires={time}&X-Amz-Expires=1"))), "{time}");
        }
        assert!(expires_in_time(None) && expires_in_time(Some("list-type=2")));
    }

    #[test]
    fn headers_for_the_store_are_to_be_signed() {
        let signed = ["host".to_owned(), "x-amz-acl".to_owned()];
        let unsigned =
            |name| unsigned_header(&with(header::HeaderName::from_static(name), "a"), &signed).is_some();
        assert!(unsigned("x-amz-copy-source") && unsigned("x-amz-tagging") && unsigned("x-amz-meta-a"));
        for name in
            ["x-amz-acl", "x-amz-date", "x-amz-content-sha256", "range", "x-amzn-trace-id", "user-agent"]
        {
            assert!(!unsigned(name), "{name}");
        }
    }

    #[test]
    fn a_page_that_names_a_host_of_its_own_is_told_apart() {
        let of = |host: &'static str| HeaderMap::from_iter([(header::HOST, HeaderValue::from_static(host))]);
        for host in ["127.0.0.1:9000", "127.0.0.1", "[::1]:9000", "[::1]", "localhost:1", "LocalHost"] {
            assert!(is_of_no_page(&of(host)), "{host}");
        }
        let unspecified = ["0.0.0.0:9000", "0.0.0.0", "[::]:9000", "[::]", "[::ffff:0.0.0.0]:9000"];
        let mapped = ["[::ffff:7f00:1]:9000", "[::ffff:127.0.0.1]"];
        let others = ["evil.example:9000", "127.0.0.1.evil.example", "", "localhost.evil"];
        for host in unspecified.into_iter().chain(mapped).chain(others) {
            assert!(!is_of_no_page(&of(host)), "{host}");
        }
        let mut headers = of("127.0.0.1:9000");
        headers.insert("sec-fetch-site", HeaderValue::from_static("none"));
        assert!(is_of_no_page(&headers), "a user has typed it");
        for site in ["cross-site", "same-site", "same-origin"] {
            headers.insert("sec-fetch-site", HeaderValue::from_static(site));
            assert!(!is_of_no_page(&headers), "{site}");
        }
        headers.remove("sec-fetch-site");
        headers.insert(header::ORIGIN, HeaderValue::from_static("null"));
        assert!(!is_of_no_page(&headers));
    }
}
