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
//!  3. A request ends when the store was silent for too long (silence.rs), and not because it takes long.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::{BoxStream, StreamExt};
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, StatusCode, Uri};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpRequest, HttpRequestBody};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use quinion_object::RetryAfterConnector;
use quinion_serve::config::StoreConfig;
use quinion_serve::kept_headers::Connector;
use quinion_serve::{credentials, stores};
use s3s::{Body, S3Error, S3ErrorCode, S3Response, S3Result, StdError, s3_error};

use crate::routing::{Answer, Query};
use crate::silence::UpstreamSilence;

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
    // Without `read_timeout`, which counts from the beginning of a request, also while its body is being sent.
    builder.connect_timeout(CONNECT_MAX).build().map_err(failed)
}

pub struct Upstream {
    /// The bucket's address, without a slash at the end.
    base: String,
    /// The store's address, which other buckets may share.
    store: String,
    region: String,
    /// `None`: requests are not signed.
    credentials: Option<AwsCredentialProvider>,
    /// Whether the endpoint's account pays for requests, in place of the bucket's.
    pays: bool,
    silence_max: Duration,
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
    headers: &'r HeaderMap,
}

pub struct Opened {
    pub name: String,
    pub upstream: Upstream,
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
    if is_true(AmazonS3ConfigKey::S3Express) {
        let text = "AWS_S3_EXPRESS is set, and the endpoint does not open sessions, which directory buckets want; \
                    unset it, and name another bucket";
        return Err(failed(&text));
    }
    let is_requester = |payer: String| payer.eq_ignore_ascii_case("requester");
    let pays = is_true(AmazonS3ConfigKey::RequestPayer)
        || told(AmazonS3ConfigKey::RequestPayer).is_some_and(is_requester);
    let is_signed = !is_true(AmazonS3ConfigKey::SkipSignature);
    let own = credentials::s3(builder, prefix, &options).map_err(|error| failed(&error))?;
    let credentials = is_signed.then(|| own.credentials().clone());
    let (silence_max, http) = (SILENCE_MAX, http.clone());
    let upstream = Upstream { base, store, region, credentials, pays, silence_max, http };
    let store_name = stores::name_of(prefix, &options);
    Ok(Opened { name: name.to_owned(), upstream, store: own, store_name })
}

pub struct UpstreamRequest<'r> {
    pub method: Method,
    /// The object; `None` asks for the bucket.
    pub key: Option<&'r str>,
    pub query: &'r Query,
    pub headers: &'r HeaderMap,
    pub body: Option<(BoxStream<'static, Result<Bytes, StdError>>, u64)>,
    pub answer: Answer,
}

impl Upstream {
    /// Whether both are at one store, so that one can copy from the other.
    pub fn is_beside(&self, other: &Self) -> bool {
        self.store == other.store
    }

    /// Whether the store is what listens at `address` of this machine: only names of this machine are looked at.
    pub fn is_at(&self, address: SocketAddr) -> bool {
        let Ok(url) = self.store.parse::<Uri>() else { return false };
        let default = if url.scheme_str() == Some("https") { 443 } else { 80 };
        if url.port_u16().unwrap_or(default) != address.port() || address.port() == 0 {
            return false;
        }
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let at = address.ip().to_canonical();
        if host.eq_ignore_ascii_case("localhost") {
            return at == Ipv4Addr::LOCALHOST || at == Ipv6Addr::LOCALHOST || at.is_unspecified();
        }
        host.parse::<IpAddr>().is_ok_and(|host| {
            let host = host.to_canonical();
            host == at
                || host.is_unspecified() && (at.is_loopback() || at.is_unspecified() && at.is_ipv6())
                || host.is_loopback() && at.is_unspecified() && (at.is_ipv6() || host.is_ipv4())
        })
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
    /// The store's own, by their codes; `ServiceUnavailable`: it could not be asked. Why there are no
    /// credentials is in the error's source, for the log.
    pub async fn ask(&self, request: UpstreamRequest<'_>) -> S3Result<S3Response<Body>> {
        let UpstreamRequest { method, key, query, headers, body, answer } = request;
        let url = self.url(key, query)?;
        let head = RequestHead { method: &method, url: &url, headers };
        let headers = self.signed(head, body.is_some()).await?;
        let is_head = method == Method::HEAD;
        let silence = UpstreamSilence::new(self.silence_max);
        let mut asked = self.http.request(method, url).headers(headers);
        if let Some((body, len)) = body {
            let body = reqwest::Body::wrap_stream(silence.ended_by(body));
            asked = asked.header(header::CONTENT_LENGTH, len).body(body);
        }
        let response = tokio::select! {
            // Its text may have the whole URL, which has nothing secret, but does not concern the client.
            response = asked.send() => response.map_err(|_| unavailable())?,
            () = silence.is_too_long() => return Err(unavailable()),
        };
        let status = response.status();
        let has_body = !is_head && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
        if !status.is_success() && status != StatusCode::NOT_MODIFIED {
            let body = silence.bounding(response.bytes_stream());
            let text = if has_body { document(body, ERROR_BYTES_MAX).await? } else { Bytes::new() };
            return Err(store_error(status, &String::from_utf8_lossy(&text)));
        }
        let mut headers = shown_headers(response.headers());
        let body = match answer {
            _ if !has_body => Body::empty(),
            Answer::Data => {
                let frames = silence.bounding(response.bytes_stream()).map(|bytes| bytes.map(Frame::data));
                Body::http_body_unsync(StreamBody::new(frames))
            }
            Answer::Document => {
                headers.remove(header::CONTENT_LENGTH);
                let text = document(silence.bounding(response.bytes_stream()), DOCUMENT_BYTES_MAX).await?;
                if is_error(&text) {
                    return Err(late_error(&String::from_utf8_lossy(&text)));
                }
                self.without_account(text).await.into()
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
        let passed = headers.iter().filter(|(name, _)| is_passed_on(name.as_str()));
        let mut passed: HeaderMap = passed.map(|(n, v)| (n.clone(), v.clone())).collect();
        without_chunks(&mut passed);
        if headers.contains_key("x-amz-trailer") {
            // It names the checksum behind the body, which was checked here. S3 refuses it without one.
            passed.remove("x-amz-sdk-checksum-algorithm");
        }
        let Some(provider) = &self.credentials else { return Ok(passed) };
        let credential = provider.get_credential().await.map_err(|error| {
            let mut refused = no_credentials();
            refused.set_source(error.into());
            refused
        })?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method.clone();
        *request.uri_mut() = url.parse().map_err(|_| s3_error!(InvalidURI))?;
        let unsigned = without_opaque(&mut passed)?;
        *request.headers_mut() = passed;
        let digest = headers.get("x-amz-content-sha256").and_then(|digest| digest_of(digest.as_bytes()));
        let authorizer = AwsAuthorizer::new(&credential, "s3", &self.region);
        let authorizer = authorizer.with_sign_payload(!has_body || digest.is_some());
        let authorizer = authorizer.with_request_payer(self.pays);
        let digest = digest.as_ref().filter(|_| has_body).map(<[u8; 32]>::as_slice);
        authorizer.try_authorize(&mut request, digest).map_err(|_| unavailable())?;
        let mut headers = std::mem::take(request.headers_mut());
        headers.extend(unsigned);
        Ok(headers)
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

/// The answer to a client of an endpoint without credentials.
pub fn no_credentials() -> S3Error {
    s3_error!(
        AccessDenied,
        "The endpoint has no credentials for the store. Its log says which were looked for."
    )
}

fn unavailable() -> S3Error {
    s3_error!(ServiceUnavailable, "The store behind the endpoint does not answer.")
}

/// Whether a client's header of this name concerns the object; the others are about its connection or its signature.
pub fn is_passed_on(name: &str) -> bool {
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
    OTHERS.contains(&name) || name.starts_with("x-amz-") && !NOT.contains(&name)
}

/// Removes the encoding by chunks, which were decoded. Encodings may stand in several lines.
fn without_chunks(headers: &mut HeaderMap) {
    let lines: Vec<_> = headers.get_all(header::CONTENT_ENCODING).iter().cloned().collect();
    headers.remove(header::CONTENT_ENCODING);
    for line in lines {
        let encodings = line.to_str().unwrap_or_default().split(',').map(str::trim);
        let left: Vec<_> =
            encodings.filter(|encoding| !encoding.eq_ignore_ascii_case("aws-chunked")).collect();
        if let (false, Ok(left)) = (left.concat().is_empty(), HeaderValue::from_str(&left.join(","))) {
            headers.append(header::CONTENT_ENCODING, left);
        }
    }
}

/// Takes out headers with bytes that are not UTF-8, which the crate `object_store` cannot sign: it panics. S3 wants a
/// signature for those of its own alone.
fn without_opaque(headers: &mut HeaderMap) -> S3Result<HeaderMap> {
    let is_opaque = |value: &HeaderValue| std::str::from_utf8(value.as_bytes()).is_err();
    let names: Vec<_> =
        headers.iter().filter(|(_, value)| is_opaque(value)).map(|(name, _)| name.clone()).collect();
    let mut opaque = HeaderMap::new();
    for name in names {
        if name.as_str().starts_with("x-amz-") {
            return Err(s3_error!(InvalidArgument, "The header {name} is not UTF-8; encode it."));
        }
        opaque.extend(headers.get_all(&name).iter().map(|value| (name.clone(), value.clone())));
        headers.remove(&name);
    }
    Ok(opaque)
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

async fn document(
    mut stream: BoxStream<'static, Result<Bytes, StdError>>,
    bytes_max: usize,
) -> S3Result<Bytes> {
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

/// Whether the root of a document is `Error`. S3 begins the answers to long copies and to the ends of uploads with 200
/// before it knows how they end.
fn is_error(document: &[u8]) -> bool {
    let mut text = document.strip_prefix(b"\xef\xbb\xbf").unwrap_or(document).trim_ascii_start();
    for (begin, end) in [(&b"<?"[..], &b"?>"[..]), (b"<!--", b"-->")].into_iter().cycle().take(16) {
        if text.starts_with(begin) {
            let Some(at) = text.windows(end.len()).position(|part| part == end) else { return false };
            text = text[at + end.len()..].trim_ascii_start();
        }
    }
    let rest = text.strip_prefix(b"<Error").and_then(|rest| rest.first());
    rest.is_some_and(|&byte| b"/>".contains(&byte) || byte.is_ascii_whitespace())
}

/// The error in a document with the status 200, with the status that its code has.
fn late_error(text: &str) -> S3Error {
    let mut error = store_error(StatusCode::INTERNAL_SERVER_ERROR, text);
    if let Some(status) = error.code().status_code() {
        error.set_status_code(status);
    }
    error
}

/// An error of the store's, without its text: that may name the account, or what was signed.
fn store_error(status: StatusCode, text: &str) -> S3Error {
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
        opened("h:1", &[]).unwrap()
    }

    /// A bucket of the store at that address, opened with these variables besides the credentials.
    fn opened(address: &str, variables: &[(&str, &str)]) -> Result<Upstream, String> {
        let config = StoreConfig {
            prefix: "s3://b".into(),
            endpoint: Some(format!("http://{address}")),
            ..Default::default()
        };
        let environment = [("AWS_ACCESS_KEY_ID", "own-key"), ("AWS_SECRET_ACCESS_KEY", "own-secret")];
        let environment = environment.iter().chain(variables);
        let environment: Vec<_> = environment.map(|(k, v)| ((*k).into(), (*v).into())).collect();
        let _ = rustls::crypto::ring::default_provider().install_default();
        open(&config, &environment, &http_client(None).unwrap()).map(|opened| opened.upstream)
    }

    /// Whether a store takes a request's body, and the bytes that it answers.
    #[derive(Clone, Copy)]
    enum Script {
        TakesAll(&'static str),
        TakesNothing,
    }

    /// A bucket of a store that behaves so, and then is silent. It is given up after `silence_max`.
    async fn upstream_with(script: Script, silence_max: Duration) -> Upstream {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (mut all, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
            while let Script::TakesAll(answer) = script {
                stream.readable().await.unwrap();
                if let Ok(bytes) = stream.try_read(&mut buffer) {
                    assert!(bytes > 0, "the connection was closed before the end of the request");
                    all.extend_from_slice(&buffer[..bytes]);
                }
                let Some(head) = all.windows(4).position(|part| part == b"\r\n\r\n") else { continue };
                let text = String::from_utf8_lossy(&all[..head]).to_lowercase();
                let len =
                    text.split("content-length: ").nth(1).map_or("0", |len| len.lines().next().unwrap());
                if all.len() == head + 4 + len.parse::<usize>().unwrap() {
                    stream.writable().await.unwrap();
                    assert_eq!(stream.try_write(answer.as_bytes()).unwrap(), answer.len());
                    break;
                }
            }
            std::future::pending::<()>().await;
            drop(stream);
        });
        Upstream { silence_max, ..opened(&address, &[]).unwrap() }
    }

    /// Asks for that, with a body of `pieces` a byte each, with a pause before each; for a minute at most.
    async fn asked(
        upstream: &Upstream,
        method: Method,
        pieces: u64,
        pause: Duration,
    ) -> S3Result<S3Response<Body>> {
        let body = futures_util::stream::unfold(0, move |at| async move {
            tokio::time::sleep(pause).await;
            (at < pieces).then(|| (Ok(Bytes::from_static(b"a")), at + 1))
        });
        let answer = if method == Method::GET { Answer::Data } else { Answer::Document };
        let (headers, query) = (HeaderMap::new(), vec![]);
        let body = (method != Method::GET).then(|| (body.boxed(), pieces));
        let request =
            UpstreamRequest { method, key: Some("k"), query: &query, headers: &headers, body, answer };
        tokio::time::timeout(Duration::from_secs(60), upstream.ask(request)).await.expect("it ends")
    }

    fn code_of<T>(answer: S3Result<T>) -> String {
        answer.map(drop).unwrap_err().code().as_str().to_owned()
    }

    const DONE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

    /// 1. A client sends a body for longer than a store may be silent, piece after piece, and the store takes each.
    /// 2. The request was given up: the time ran from its beginning.
    #[tokio::test]
    async fn an_upload_lasts_longer_than_the_longest_silence() {
        let upstream = upstream_with(Script::TakesAll(DONE), Duration::from_secs(1)).await;
        let answer = asked(&upstream, Method::PUT, 40, Duration::from_millis(50)).await.unwrap();
        assert_eq!(answer.status, Some(StatusCode::OK));
    }

    #[tokio::test]
    async fn a_silent_store_is_given_up() {
        let (short, none) = (Duration::from_millis(100), Duration::ZERO);
        for script in [Script::TakesNothing, Script::TakesAll("")] {
            let upstream = upstream_with(script, short).await;
            assert_eq!(code_of(asked(&upstream, Method::PUT, 1000, none).await), "ServiceUnavailable");
        }
        let part = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc";
        let upstream = upstream_with(Script::TakesAll(part), short).await;
        assert_eq!(code_of(asked(&upstream, Method::PUT, 1, none).await), "ServiceUnavailable");
        let upstream = upstream_with(Script::TakesAll(part), short).await;
        let answer = asked(&upstream, Method::GET, 0, none).await.unwrap();
        let pieces = tokio::time::timeout(Duration::from_secs(60), answer.output.collect::<Vec<_>>()).await;
        let pieces = pieces.expect("it ends");
        assert_eq!(pieces[0].as_ref().unwrap(), "abc");
        assert!(pieces.len() == 2 && pieces[1].is_err());
    }

    /// 1. S3 answers 200 at once to the end of an upload, which takes long, and tells an error in the document.
    /// 2. The document reached the client as it was, with the store's own text.
    #[tokio::test]
    async fn an_error_behind_a_status_of_success_is_told_as_one() {
        const LATE: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n60\r\n\
            <?xml version=\"1.0\"?>  \n<Error><Code>SlowDown</Code>\
            <Message>own-key, wait</Message></Error>    \r\n0\r\n\r\n";
        let upstream = upstream_with(Script::TakesAll(LATE), Duration::from_secs(60)).await;
        let error = asked(&upstream, Method::POST, 1, Duration::ZERO).await.map(drop).unwrap_err();
        assert_eq!(
            (error.code(), error.status_code()),
            (&S3ErrorCode::SlowDown, Some(StatusCode::SERVICE_UNAVAILABLE))
        );
        assert!(!format!("{error:?}").contains("own-key"), "{error:?}");
        for text in ["<Error/>", " <!-- a --> <Error xmlns='b'>", "<?xml?><!--a--><Error>", "\u{feff}<Error>"]
        {
            assert!(is_error(text.as_bytes()), "{text}");
        }
        for text in ["", "<?xml", "<Errors>", "<DeleteResult><Error>", "<Error"] {
            assert!(!is_error(text.as_bytes()), "{text}");
        }
        assert_eq!(late_error("<Error/>").status_code(), Some(StatusCode::SERVICE_UNAVAILABLE));
    }

    #[tokio::test]
    async fn headers_that_are_not_utf_8_are_passed_on_unsigned_but_for_those_of_s3() {
        let (upstream, opaque) = (upstream(), HeaderValue::from_bytes(b"caf\xe9").unwrap());
        let signed = async |name: &'static str| {
            let headers = HeaderMap::from_iter([(HeaderName::from_static(name), opaque.clone())]);
            let head = RequestHead { method: &Method::PUT, url: "http://h:1/b/k", headers: &headers };
            upstream.signed(head, true).await
        };
        let passed = signed("content-disposition").await.unwrap();
        assert_eq!(passed["content-disposition"], opaque);
        assert!(!passed["authorization"].to_str().unwrap().contains("content-disposition"));
        assert_eq!(code_of(signed("x-amz-meta-a").await), "InvalidArgument");
    }

    #[tokio::test]
    async fn the_account_pays_if_it_is_told_so_and_directory_buckets_are_refused() {
        for (payer, pays) in [("requester", true), ("TRUE", true), ("false", false)] {
            let upstream = opened("h:1", &[("AWS_REQUEST_PAYER", payer)]).unwrap();
            let head =
                RequestHead { method: &Method::GET, url: "http://h:1/b/k", headers: &HeaderMap::new() };
            let signed = upstream.signed(head, false).await.unwrap();
            assert_eq!(signed.contains_key("x-amz-request-payer"), pays, "{payer}");
        }
        let refused = opened("h:1", &[("AWS_S3_EXPRESS", "true")]).map(drop).unwrap_err();
        assert!(refused.contains("AWS_S3_EXPRESS") && refused.contains("unset it"), "{refused}");
    }

    #[test]
    fn a_store_at_the_endpoints_own_address_is_known() {
        let is_at = |store: &str, address: &str| opened(store, &[]).unwrap().is_at(address.parse().unwrap());
        let own = [("127.0.0.1:9000", "127.0.0.1:9000"), ("localhost:9000", "127.0.0.1:9000")];
        for (store, address) in own.into_iter().chain([
            ("127.0.0.1:9000", "0.0.0.0:9000"),
            ("[::1]:9", "[::1]:9"),
            ("127.0.0.1:9", "[::ffff:127.0.0.1]:9"),
        ]) {
            assert!(is_at(store, address), "{store} {address}");
        }
        let other = [
            ("127.0.0.1:9001", "127.0.0.1:9000"),
            ("10.0.0.1:9000", "127.0.0.1:9000"),
            ("h", "127.0.0.1:9"),
            ("localhost:9", "127.0.0.2:9"),
            ("[::1]:9", "0.0.0.0:9"),
        ];
        for (store, address) in other {
            assert!(!is_at(store, address), "{store} {address}");
        }
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
    async fn headers_about_chunks_and_their_checksum_stay_here_and_other_lines_of_theirs_do_not() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("content-encoding", "aws-chunked"),
            ("content-encoding", "gzip"),
            ("x-amz-trailer", "x-amz-checksum-crc32"),
            ("x-amz-sdk-checksum-algorithm", "CRC32"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let upstream = upstream();
        let signed = async |headers: &HeaderMap| {
            let head = RequestHead { method: &Method::PUT, url: "http://h:1/b/k", headers };
            upstream.signed(head, true).await.unwrap()
        };
        let passed = signed(&headers).await;
        assert_eq!(passed.get_all("content-encoding").iter().collect::<Vec<_>>(), ["gzip"]);
        assert_eq!(passed.get("x-amz-sdk-checksum-algorithm"), None);
        // Beside a checksum in the headers it stays.
        headers.remove("x-amz-trailer");
        assert_eq!(signed(&headers).await["x-amz-sdk-checksum-algorithm"], "CRC32");
    }

    #[tokio::test]
    async fn nothing_of_the_credentials_is_in_errors_and_lists() {
        let upstream = upstream();
        let text =
            "<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>own-key</AWSAccessKeyId></Error>";
        let error = store_error(StatusCode::FORBIDDEN, text);
        assert_eq!(error.code(), &S3ErrorCode::AccessDenied);
        assert!(!format!("{error:?}").contains("own-key"));
        assert_eq!(upstream.redacted("own-key: own-secret".into()).await, "[hidden]: [hidden]");
        let list = Bytes::from("<Key>own-key</Key><Owner><ID>own-key</ID></Owner>");
        let shown = upstream.without_account(list).await;
        assert_eq!(shown, "<Key>own-key</Key><Owner><ID>endpoint</ID></Owner>");
    }

    #[test]
    fn an_error_of_the_store_keeps_its_code_and_status() {
        let error = store_error(StatusCode::NOT_FOUND, "<Error><Code>NoSuchUpload</Code></Error>");
        assert_eq!(error.code(), &S3ErrorCode::NoSuchUpload);
        assert_eq!(error.status_code(), Some(StatusCode::NOT_FOUND));
        assert_eq!(store_error(StatusCode::NOT_FOUND, "").code(), &S3ErrorCode::NoSuchKey);
        let strange = store_error(StatusCode::BAD_REQUEST, "<Code><b>x</b></Code>");
        assert_eq!(strange.code(), &S3ErrorCode::InvalidRequest);
    }
}
