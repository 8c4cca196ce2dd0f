//! Upstream: a bucket of the store behind the endpoint, asked with the endpoint's own credentials.
//!
//! ```text
//!   request of a client, its signature checked and taken off
//!     -> headers and parameters that are known, a path encoded anew -> signed (object_store) -> the store
//!     <- headers that are known, bytes as they come; documents in whole, without the account's name
//! ```
//!
//! Invariants:
//!  1. No header of the endpoint's own request, and no text of an error of the store's, reaches a client: of an error
//!     it is told the code, the status, and words of the endpoint's.
//!  2. The store is asked for that very key: one whose segments a URL would fold (`.`, `..`) is refused.

use std::fmt;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::{BoxStream, StreamExt};
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, StatusCode};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpRequest, HttpRequestBody};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use quinion_object::RetryAfterConnector;
use quinion_serve::config::StoreConfig;
use quinion_serve::kept_headers::Connector;
use quinion_serve::stores;
use s3s::{Body, S3Error, S3ErrorCode, S3Response, S3Result, StdError, s3_error};

use crate::routing::{Answer, Query};

/// A list of a thousand keys is shorter.
const DOCUMENT_BYTES_MAX: usize = 32 << 20;
/// Bytes of an error that are read.
const ERROR_BYTES_MAX: usize = 64 << 10;
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// The longest silence of the store: the end of an upload takes it a while.
const SILENCE_MAX: Duration = Duration::from_secs(300);
/// Characters that S3 leaves unescaped in a path, and in a query.
const IN_PATH: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b'/');
const IN_QUERY: AsciiSet = IN_PATH.add(b'/');

/// A client of HTTP for buckets. It trusts the authorities whose certificates are in `pem` beside the system's.
///
/// # Errors
/// What it says.
pub fn http_client(pem: Option<&[u8]>) -> Result<reqwest::Client, String> {
    let failed = |error| format!("cannot make a client of HTTP: {error}");
    let builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none());
    let certificates = pem.map_or(Ok(Vec::new()), reqwest::Certificate::from_pem_bundle).map_err(failed)?;
    let builder = builder.tls_certs_merge(certificates);
    builder.connect_timeout(CONNECT_MAX).read_timeout(SILENCE_MAX).build().map_err(failed)
}

pub struct Upstream {
    /// Its address, without a slash at the end.
    base: String,
    /// Its store's address, which other buckets may share.
    store: String,
    region: String,
    /// `None`: requests are not signed.
    credentials: Option<AwsCredentialProvider>,
    http: reqwest::Client,
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream").field("base", &self.base).finish_non_exhaustive()
    }
}

/// The part of a request that is signed.
#[derive(Clone, Copy)]
struct RequestHead<'r> {
    method: &'r Method,
    url: &'r str,
    /// The client's.
    headers: &'r HeaderMap,
}

pub struct Opened {
    pub name: String,
    /// For requests of clients.
    pub upstream: Upstream,
    /// For the cache.
    pub store: AmazonS3,
    /// The name of the store for a disk tier.
    pub store_name: String,
}

/// Opens the bucket of a store's prefix, `s3://bucket`.
///
/// # Errors
/// It is another prefix, or what is told of the store is not enough.
pub fn open(
    config: &StoreConfig,
    environment: &[(String, String)],
    http: &reqwest::Client,
) -> Result<Opened, String> {
    let prefix = stores::trimmed(&config.prefix);
    let failed = |why: &dyn fmt::Display| format!("the store {prefix}: {why}; see docs/s3.md");
    let name = prefix.strip_prefix("s3://").filter(|name| !name.is_empty() && !name.contains('/'));
    let name =
        name.ok_or_else(|| failed(&"the endpoint serves whole buckets of S3, named as s3://bucket"))?;
    let scheme = object_store::ObjectStoreScheme::AmazonS3;
    let options = stores::options_of(&scheme, config, environment).map_err(|error| failed(&error))?;
    let client = stores::client_options(config)?;
    let own_http = stores::ca_certificates(config)?.map(|pem| http_client(Some(&pem))).transpose()?;
    let http = own_http.as_ref().unwrap_or(http);
    let builder = AmazonS3Builder::new().with_url(prefix).with_client_options(client);
    let builder = builder.with_http_connector(RetryAfterConnector(Connector::Keeping));
    let builder = options.iter().fold(builder, |builder, (key, value)| match key.parse() {
        Ok(key) => builder.with_config(key, value),
        Err(_) => builder,
    });
    let told = |key| builder.get_config_value(&key);
    let is_true = |key| {
        told(key).is_some_and(|value| ["1", "true", "on", "yes", "y"].contains(&&*value.to_lowercase()))
    };
    let region = told(AmazonS3ConfigKey::Region).unwrap_or_else(|| "us-east-1".into());
    let aws = || format!("https://s3.{region}.amazonaws.com");
    let store = told(AmazonS3ConfigKey::Endpoint).unwrap_or_else(aws).trim_end_matches('/').to_owned();
    let base = match is_true(AmazonS3ConfigKey::VirtualHostedStyleRequest) {
        true if told(AmazonS3ConfigKey::Endpoint).is_some() => store.clone(),
        true => format!("https://{name}.s3.{region}.amazonaws.com"),
        false => format!("{store}/{name}"),
    };
    let is_signed = !is_true(AmazonS3ConfigKey::SkipSignature);
    let own = builder.build().map_err(|error| failed(&error))?;
    let credentials = is_signed.then(|| own.credentials().clone());
    let upstream = Upstream { base, store, region, credentials, http: http.clone() };
    let store_name = stores::name_of(prefix, &options);
    Ok(Opened { name: name.to_owned(), upstream, store: own, store_name })
}

pub struct Request<'r> {
    pub method: Method,
    /// The object; `None` asks for the bucket.
    pub key: Option<&'r str>,
    /// The parameters.
    pub query: &'r Query,
    pub headers: &'r HeaderMap,
    /// The body and its length.
    pub body: Option<(BoxStream<'static, Result<Bytes, StdError>>, u64)>,
    pub answer: Answer,
}

impl Upstream {
    /// Whether both are at one store, so that one can copy from the other.
    pub fn is_beside(&self, other: &Self) -> bool {
        self.store == other.store
    }

    pub async fn redacted(&self, text: String) -> String {
        let Some(provider) = &self.credentials else { return text };
        let Ok(credential) = provider.get_credential().await else { return text };
        let secrets = [Some(&credential.key_id), Some(&credential.secret_key), credential.token.as_ref()];
        let secrets = secrets.into_iter().flatten().filter(|secret| !secret.is_empty());
        secrets.fold(text, |text, secret| text.replace(secret.as_str(), "[hidden]"))
    }

    /// Sends a request to the store, and returns the answer as a client may see it.
    ///
    /// # Errors
    /// The store's own, by their codes; `ServiceUnavailable`: it could not be asked.
    pub async fn ask(&self, request: Request<'_>) -> S3Result<S3Response<Body>> {
        let Request { method, key, query, headers, body, answer } = request;
        let url = self.url(key, query)?;
        let head = RequestHead { method: &method, url: &url, headers };
        let headers = self.signed(head, body.is_some()).await?;
        let is_head = method == Method::HEAD;
        let mut asked = self.http.request(method, url).headers(headers);
        if let Some((body, len)) = body {
            asked = asked.header(header::CONTENT_LENGTH, len).body(reqwest::Body::wrap_stream(body));
        }
        // Its text may have the whole URL, which has nothing secret, but does not concern the client.
        let response = asked.send().await.map_err(|_| unavailable())?;
        let status = response.status();
        let has_body = !is_head && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
        if !status.is_success() && status != StatusCode::NOT_MODIFIED {
            let text = if has_body { document(response, ERROR_BYTES_MAX).await? } else { Bytes::new() };
            return Err(told_error(status, &String::from_utf8_lossy(&text)));
        }
        let mut headers = shown_headers(response.headers());
        let body = match answer {
            _ if !has_body => Body::empty(),
            Answer::Data => {
                let frames = response.bytes_stream().map(|bytes| bytes.map(Frame::data));
                Body::http_body_unsync(StreamBody::new(frames))
            }
            Answer::Document => {
                headers.remove(header::CONTENT_LENGTH);
                self.without_account(document(response, DOCUMENT_BYTES_MAX).await?).await.into()
            }
        };
        let mut response = S3Response::with_status(body, status);
        response.headers = headers;
        Ok(response)
    }

    fn url(&self, key: Option<&str>, query: &Query) -> S3Result<String> {
        let mut url = self.base.clone();
        if let Some(key) = key {
            if key.split('/').any(|segment| segment == "." || segment == "..") {
                return Err(s3_error!(
                    NotImplemented,
                    "The endpoint cannot pass on a key with a segment of dots."
                ));
            }
            url.extend(["/"].into_iter().chain(utf8_percent_encode(key, &IN_PATH)));
        }
        for (at, (name, value)) in query.iter().enumerate() {
            url.push(if at == 0 { '?' } else { '&' });
            url.extend(utf8_percent_encode(name, &IN_QUERY));
            url.push('=');
            url.extend(utf8_percent_encode(value, &IN_QUERY));
        }
        Ok(url)
    }

    /// The headers of the request to the store, from those of the client's.
    async fn signed(&self, head: RequestHead<'_>, has_body: bool) -> S3Result<HeaderMap> {
        let RequestHead { method, url, headers } = head;
        let passed =
            headers.iter().filter(|(name, _)| is_passed_on(name)).map(|(n, v)| (n.clone(), v.clone()));
        let mut passed: HeaderMap = passed.collect();
        without_chunks(&mut passed);
        let Some(provider) = &self.credentials else { return Ok(passed) };
        let refused = |_| s3_error!(AccessDenied, "The endpoint has no credentials for the store.");
        let credential = provider.get_credential().await.map_err(refused)?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method.clone();
        *request.uri_mut() = url.parse().map_err(|_| s3_error!(InvalidURI))?;
        *request.headers_mut() = passed;
        let digest = headers.get("x-amz-content-sha256").and_then(|digest| digest_of(digest.as_bytes()));
        let authorizer = AwsAuthorizer::new(&credential, "s3", &self.region);
        let authorizer = authorizer.with_sign_payload(!has_body || digest.is_some());
        let digest = digest.as_ref().filter(|_| has_body).map(<[u8; 32]>::as_slice);
        authorizer.try_authorize(&mut request, digest).map_err(|_| unavailable())?;
        Ok(std::mem::take(request.headers_mut()))
    }

    /// A document without the name of the account: some stores use the access key for it.
    async fn without_account(&self, text: Bytes) -> Bytes {
        let Some(provider) = &self.credentials else { return text };
        let Ok(credential) = provider.get_credential().await else { return text };
        let Ok(as_text) = std::str::from_utf8(&text) else { return text };
        if credential.key_id.is_empty() || !as_text.contains(credential.key_id.as_str()) {
            return text;
        }
        let hidden = ["ID", "DisplayName"].into_iter().fold(as_text.to_owned(), |text, tag| {
            text.replace(
                &format!("<{tag}>{}</{tag}>", credential.key_id),
                &format!("<{tag}>endpoint</{tag}>"),
            )
        });
        hidden.into()
    }
}

fn unavailable() -> S3Error {
    s3_error!(ServiceUnavailable, "The store behind the endpoint does not answer.")
}

/// Whether a client's header concerns the object; the others are about its connection or its signature.
fn is_passed_on(name: &HeaderName) -> bool {
    const NOT: [&str; 5] = [
        "x-amz-date",
        "x-amz-content-sha256",
        "x-amz-security-token",
        "x-amz-decoded-content-length",
        "x-amz-trailer",
    ];
    const OTHERS: [&str; 13] = [
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-md5",
        "content-type",
        "expires",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-unmodified-since",
        "if-range",
        "range",
    ];
    let name = name.as_str();
    OTHERS.contains(&name) || name.starts_with("x-amz-") && !NOT.contains(&name)
}

/// Removes headers about chunks, which were decoded.
fn without_chunks(headers: &mut HeaderMap) {
    let Some(encoding) = headers.remove(header::CONTENT_ENCODING) else { return };
    let encodings = encoding.to_str().unwrap_or_default().split(',').map(str::trim);
    let left: Vec<_> = encodings.filter(|encoding| !encoding.eq_ignore_ascii_case("aws-chunked")).collect();
    if let (false, Ok(left)) = (left.concat().is_empty(), HeaderValue::from_str(&left.join(","))) {
        headers.insert(header::CONTENT_ENCODING, left);
    }
}

fn digest_of(text: &[u8]) -> Option<[u8; 32]> {
    let text = std::str::from_utf8(text).ok().filter(|text| text.len() == 64)?;
    let mut digest = [0; 32];
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(digest)
}

/// Headers of the store's answer that concern the object.
fn shown_headers(headers: &HeaderMap) -> HeaderMap {
    const SHOWN: [&str; 12] = [
        "accept-ranges",
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-length",
        "content-range",
        "content-type",
        "etag",
        "expires",
        "last-modified",
        "location",
    ];
    let is_shown = |name: &HeaderName| SHOWN.contains(&name.as_str()) || name.as_str().starts_with("x-amz-");
    headers.iter().filter(|(name, _)| is_shown(name)).map(|(n, v)| (n.clone(), v.clone())).collect()
}

async fn document(response: reqwest::Response, bytes_max: usize) -> S3Result<Bytes> {
    let mut stream = response.bytes_stream();
    let mut all = BytesMut::new();
    while let Some(bytes) = stream.next().await {
        let bytes = bytes.map_err(|_| unavailable())?;
        if all.len() + bytes.len() > bytes_max {
            return Err(s3_error!(InternalError, "The store's answer is too long."));
        }
        all.extend_from_slice(&bytes);
    }
    Ok(all.freeze())
}

/// An error of the store's, without its text: that may name the account, or what was signed.
fn told_error(status: StatusCode, text: &str) -> S3Error {
    const OF_CREDENTIALS: [&str; 9] = [
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "NotSignedUp",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    ];
    let code =
        text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    let is_code = |code: &&str| code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let code = code.filter(is_code).unwrap_or(match status {
        StatusCode::NOT_FOUND => "NoSuchKey",
        StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED => "AccessDenied",
        StatusCode::PRECONDITION_FAILED => "PreconditionFailed",
        StatusCode::RANGE_NOT_SATISFIABLE => "InvalidRange",
        status if status.is_server_error() => "ServiceUnavailable",
        _ => "InvalidRequest",
    });
    if OF_CREDENTIALS.contains(&code) {
        return s3_error!(AccessDenied, "The store does not accept the endpoint's credentials.");
    }
    let code = S3ErrorCode::from_bytes(code.as_bytes()).unwrap_or(S3ErrorCode::InternalError);
    let mut error = S3Error::with_message(code, "The store has refused it.");
    error.set_status_code(if status.is_redirection() { StatusCode::BAD_GATEWAY } else { status });
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstream() -> Upstream {
        let config = StoreConfig {
            prefix: "s3://b".into(),
            endpoint: Some("http://h:1".into()),
            ..Default::default()
        };
        let environment = [("AWS_ACCESS_KEY_ID", "own-key"), ("AWS_SECRET_ACCESS_KEY", "own-secret")];
        let environment: Vec<_> = environment.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        let _ = rustls::crypto::ring::default_provider().install_default();
        open(&config, &environment, &http_client(None).unwrap()).unwrap().upstream
    }

    #[test]
    fn the_store_is_asked_for_the_very_key() {
        let (upstream, query) = (upstream(), vec![("prefix".into(), "a/b +".into())]);
        let url = |key| upstream.url(Some(key), &vec![]).map_err(|error| error.code().clone());
        assert_eq!(upstream.url(None, &query).unwrap(), "http://h:1/b?prefix=a%2Fb%20%2B");
        assert_eq!(url("a//b c%2F+/").unwrap(), "http://h:1/b/a//b%20c%252F%2B/");
        for key in ["..", "a/../b", "./a", "a/."] {
            assert_eq!(url(key), Err(S3ErrorCode::NotImplemented), "{key}");
        }
    }

    #[tokio::test]
    async fn the_clients_signature_is_taken_off_and_the_endpoints_put_on() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("authorization", "AWS4-HMAC-SHA256 Credential=client"),
            ("x-amz-date", "20200101T000000Z"),
            ("x-amz-security-token", "client"),
            ("x-amz-meta-a", "b"),
            ("cookie", "c"),
            ("content-encoding", "aws-chunked,gzip"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        let signed = {
            let head = RequestHead { method: &Method::PUT, url: "http://h:1/b/k", headers: &headers };
            upstream().signed(head, true).await.unwrap()
        };
        let value = |name| signed.get(name).map(|value: &HeaderValue| value.to_str().unwrap());
        assert!(value("authorization").unwrap().contains("Credential=own-key/"));
        assert_eq!((value("cookie"), value("x-amz-security-token")), (None, None));
        assert_eq!((value("x-amz-meta-a"), value("content-encoding")), (Some("b"), Some("gzip")));
        assert_eq!(value("x-amz-content-sha256"), Some("UNSIGNED-PAYLOAD"));
    }

    #[tokio::test]
    async fn nothing_of_the_credentials_is_in_errors_and_lists() {
        let upstream = upstream();
        let text =
            "<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>own-key</AWSAccessKeyId></Error>";
        let error = told_error(StatusCode::FORBIDDEN, text);
        assert_eq!(error.code(), &S3ErrorCode::AccessDenied);
        assert!(!format!("{error:?}").contains("own-key"));
        assert_eq!(upstream.redacted("own-key: own-secret".into()).await, "[hidden]: [hidden]");
        let list = Bytes::from("<Key>own-key</Key><Owner><ID>own-key</ID></Owner>");
        let shown = upstream.without_account(list).await;
        assert_eq!(shown, "<Key>own-key</Key><Owner><ID>endpoint</ID></Owner>");
    }

    #[test]
    fn an_error_of_the_store_keeps_its_code_and_status() {
        let error = told_error(StatusCode::NOT_FOUND, "<Error><Code>NoSuchUpload</Code></Error>");
        assert_eq!(error.code(), &S3ErrorCode::NoSuchUpload);
        assert_eq!(error.status_code(), Some(StatusCode::NOT_FOUND));
        assert_eq!(told_error(StatusCode::NOT_FOUND, "").code(), &S3ErrorCode::NoSuchKey);
        let strange = told_error(StatusCode::BAD_REQUEST, "<Code><b>x</b></Code>");
        assert_eq!(strange.code(), &S3ErrorCode::InvalidRequest);
    }
}
