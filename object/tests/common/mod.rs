//! A store of our own on loopback, for tests: objects in memory, spoken to by S3's HTTP, with any trouble one likes.
//!
//! ```text
//!   Server: objects, latency, faults for the next GETs, counts      <--HTTP--  AmazonS3 of object_store, by hyper
//! ```
//!
//! It supports GET and HEAD with `Range` and `If-Match`, and nothing else. Its objects' bytes follow from a version and
//! a position, so that a test can tell of each byte it reads whether it is right, and of which version.

// Each test program has a part of it.
#![allow(dead_code)]

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use hyper::body::Frame;
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, IF_MATCH, LAST_MODIFIED, RANGE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client as http_client;
use object_store::{ClientOptions, RetryConfig};

/// What goes wrong with a GET.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It is answered with this status.
    Status(u16),
    /// The connection is cut after so many bytes of the body.
    Cut(usize),
    /// The body has so many bytes, and the answer says that these are all.
    Short(usize),
    /// The body stops after so many bytes, and the connection stays.
    Stall(usize),
    /// The answer begins so many milliseconds later than others.
    Late(u64),
    /// The answer is of the range that begins a page later, and says so.
    OtherRange,
    /// The object has its next version before the GET is answered.
    ChangedBefore,
    /// The connection is cut after so many bytes, and the object has its next version.
    ChangedAfter(usize),
    /// The object has its next version, and the condition is not looked at.
    Unconditional,
}

/// An object of the server.
#[derive(Clone, Debug)]
struct Object {
    version: u32,
    bytes: Bytes,
}

/// What the server is told and tells.
#[derive(Debug, Default)]
pub struct Control {
    objects: Mutex<HashMap<String, Object>>,
    faults: Mutex<VecDeque<Fault>>,
    /// In microseconds.
    latency: AtomicU64,
    heads: AtomicU64,
    gets: AtomicU64,
    /// GETs whose condition did not hold.
    refused: AtomicU64,
    now: AtomicU64,
    most: AtomicU64,
    ranges: Mutex<Vec<(u64, u64)>>,
}

/// The server; it ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    pub control: Arc<Control>,
    address: std::net::SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.runtime.take().expect("it is dropped once").shutdown_background();
    }
}

/// The bytes of an object of `len` bytes in its `version`.
pub fn content(version: u32, len: usize) -> Bytes {
    (0..len).map(|at| byte(version, at as u64)).collect::<Vec<u8>>().into()
}

/// The byte at `at` of an object in its `version`.
pub fn byte(version: u32, at: u64) -> u8 {
    let mixed = (at ^ u64::from(version) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8 ^ version as u8
}

/// Whether `bytes`, read at `offset`, are those of `version`.
#[track_caller]
pub fn check(version: u32, offset: u64, bytes: &[u8]) {
    let wrong = bytes.iter().enumerate().find(|&(at, &is)| is != byte(version, offset + at as u64));
    if let Some((at, is)) = wrong {
        panic!("byte {} of version {version} is {is}", offset + at as u64);
    }
}

impl Control {
    /// An object of `len` bytes in its first version, which is 1.
    pub fn put(&self, key: &str, len: usize) {
        let object = Object { version: 1, bytes: content(1, len) };
        self.objects.lock().unwrap().insert(key.to_owned(), object);
    }
    /// The object's next version, of as many bytes.
    pub fn change(&self, key: &str) -> u32 {
        let mut objects = self.objects.lock().unwrap();
        let object = objects.get_mut(key).expect("the object exists");
        object.version += 1;
        object.bytes = content(object.version, object.bytes.len());
        object.version
    }
    pub fn delete(&self, key: &str) {
        self.objects.lock().unwrap().remove(key);
    }
    /// What goes wrong with the next GETs, one after the other.
    pub fn trouble(&self, faults: impl IntoIterator<Item = Fault>) {
        self.faults.lock().unwrap().extend(faults);
    }
    pub fn end_trouble(&self) {
        self.faults.lock().unwrap().clear();
    }
    pub fn set_latency(&self, time: Duration) {
        self.latency.store(time.as_micros() as u64, Ordering::Relaxed);
    }
    pub fn gets(&self) -> u64 {
        self.gets.load(Ordering::Relaxed)
    }
    /// GETs whose condition did not hold.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
    pub fn heads(&self) -> u64 {
        self.heads.load(Ordering::Relaxed)
    }
    /// The most GETs that were under way at a time.
    pub fn most_at_a_time(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }
    /// The ranges of all GETs, in their order.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        self.ranges.lock().unwrap().clone()
    }
}

type Body = BoxBody<Bytes, io::Error>;

fn body(parts: Vec<io::Result<Bytes>>) -> Body {
    let frames = stream::iter(parts).then(|part| async move {
        if part.is_err() {
            // What comes before an error is sent before it.
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        part.map(Frame::data)
    });
    BodyExt::boxed(StreamBody::new(frames))
}

fn chunks(bytes: &Bytes) -> Vec<io::Result<Bytes>> {
    let pieces = (0..bytes.len()).step_by(50_000);
    pieces.map(|at| Ok(bytes.slice(at..bytes.len().min(at + 50_000)))).collect()
}

fn status(status: u16) -> Response<Body> {
    let mut answer = Response::new(body(Vec::new()));
    *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
    answer
}

fn range_of(headers: &HeaderMap, size: u64) -> Option<(u64, u64)> {
    let text = headers.get(RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
    let (first, last) = text.split_once('-')?;
    Some((first.parse().ok()?, last.parse::<u64>().ok()?.min(size.saturating_sub(1))))
}

async fn answer(control: Arc<Control>, request: Request<hyper::body::Incoming>) -> Response<Body> {
    let key = request.uri().path().trim_start_matches("/bucket/").to_owned();
    let is_head = request.method() == Method::HEAD;
    let counter = if is_head { &control.heads } else { &control.gets };
    counter.fetch_add(1, Ordering::Relaxed);
    let now = control.now.fetch_add(1, Ordering::Relaxed) + 1;
    control.most.fetch_max(now, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_micros(control.latency.load(Ordering::Relaxed))).await;
    let fault = if is_head { None } else { control.faults.lock().unwrap().pop_front() };
    if let Some(Fault::Late(millis)) = fault {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
    let answer = answer_as(&control, &key, &request, fault);
    control.now.fetch_sub(1, Ordering::Relaxed);
    answer
}

fn answer_as<B>(control: &Control, key: &str, request: &Request<B>, fault: Option<Fault>) -> Response<Body> {
    match fault {
        Some(Fault::Status(code)) => return status(code),
        Some(Fault::ChangedBefore | Fault::Unconditional) => drop(control.change(key)),
        _ => {}
    }
    let Some(object) = control.objects.lock().unwrap().get(key).cloned() else { return status(404) };
    let e_tag = format!("\"v{}\"", object.version);
    let wanted = request.headers().get(IF_MATCH).map(|tag| tag.as_bytes() == e_tag.as_bytes());
    if wanted == Some(false) && fault != Some(Fault::Unconditional) {
        control.refused.fetch_add(1, Ordering::Relaxed);
        return status(412);
    }
    let size = object.bytes.len() as u64;
    let mut answer = status(200);
    let headers = answer.headers_mut();
    headers.insert(ETAG, e_tag.parse().unwrap());
    headers.insert(LAST_MODIFIED, "Tue, 01 Jan 2030 00:00:00 GMT".parse().unwrap());
    if request.method() == Method::HEAD {
        headers.insert(CONTENT_LENGTH, size.into());
        return answer;
    }
    let (mut first, mut last) = range_of(request.headers(), size).unwrap_or((0, size.saturating_sub(1)));
    if first >= size {
        return status(416);
    }
    control.ranges.lock().unwrap().push((first, last + 1));
    if fault == Some(Fault::OtherRange) {
        (first, last) = ((first + 4096).min(size - 1), (last + 4096).min(size - 1));
    }
    headers.insert(CONTENT_RANGE, format!("bytes {first}-{last}/{size}").parse().unwrap());
    let mut bytes = object.bytes.slice(first as usize..last as usize + 1);
    let reset = || Err(io::Error::from(io::ErrorKind::ConnectionReset));
    headers.insert(CONTENT_LENGTH, (bytes.len() as u64).into());
    let parts = match fault {
        Some(Fault::Cut(len)) => [chunks(&bytes.split_to(len.min(bytes.len()))), vec![reset()]].concat_all(),
        Some(Fault::ChangedAfter(len)) => {
            control.change(key);
            [chunks(&bytes.split_to(len.min(bytes.len()))), vec![reset()]].concat_all()
        }
        Some(Fault::Short(len)) => {
            let bytes = bytes.split_to(len.min(bytes.len()));
            headers.insert(CONTENT_LENGTH, (bytes.len() as u64).into());
            chunks(&bytes)
        }
        Some(Fault::Stall(len)) => {
            let parts = stream::iter(chunks(&bytes.split_to(len.min(bytes.len()))));
            let frames = parts.chain(stream::pending()).map(|part| part.map(Frame::data));
            *answer.body_mut() = BodyExt::boxed(StreamBody::new(frames));
            *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
            return answer;
        }
        _ => chunks(&bytes),
    };
    *answer.body_mut() = body(parts);
    *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
    answer
}

/// Several lists as one; errors of input and output cannot be cloned.
trait ConcatAll<T> {
    fn concat_all(self) -> Vec<T>;
}

impl<T, const N: usize> ConcatAll<T> for [Vec<T>; N] {
    fn concat_all(self) -> Vec<T> {
        self.into_iter().flatten().collect()
    }
}

impl Server {
    /// A server without objects.
    pub fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let control = Arc::new(Control::default());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::clone(&control);
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = Arc::clone(&shared);
                let serve = service_fn(move |request| {
                    let answer = answer(Arc::clone(&shared), request);
                    async move { Ok::<_, Infallible>(answer.await) }
                });
                let http = hyper::server::conn::http1::Builder::new();
                let connection = http.serve_connection(TokioIo::new(stream), serve);
                tokio::spawn(async move { drop(connection.await) });
            }
        });
        Self { control, address, runtime: Some(runtime) }
    }

    /// A server with one object of `len` bytes, named "object".
    pub fn with_object(len: usize) -> Self {
        let server = Self::new();
        server.control.put("object", len);
        server
    }

    /// Where it listens.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// A client of it that tries nothing again by itself.
    pub fn store(&self) -> Arc<AmazonS3> {
        store_at(&self.address())
    }
}

/// A client of the server that listens there, which may be another process's.
pub fn store_at(address: &str) -> Arc<AmazonS3> {
    let store = AmazonS3Builder::new()
        .with_bucket_name("bucket")
        .with_endpoint(format!("http://{address}"))
        .with_allow_http(true)
        .with_skip_signature(true)
        .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
        .with_http_connector(Connector);
    Arc::new(store.build().expect("a client"))
}

/// Speaks HTTP by hyper, without TLS.
#[derive(Debug)]
pub struct Connector;

impl http_client::HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<http_client::HttpClient> {
        let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        Ok(http_client::HttpClient::new(Service(client)))
    }
}

#[derive(Debug)]
struct Service(Client<HttpConnector, http_client::HttpRequestBody>);

#[async_trait::async_trait]
impl http_client::HttpService for Service {
    async fn call(
        &self,
        request: http_client::HttpRequest,
    ) -> Result<http_client::HttpResponse, http_client::HttpError> {
        let failed = |error| http_client::HttpError::new(http_client::HttpErrorKind::Connect, error);
        let answer = self.0.request(request).await.map_err(failed)?;
        Ok(answer.map(|body| {
            let broken = |error| http_client::HttpError::new(http_client::HttpErrorKind::Interrupted, error);
            http_client::HttpResponseBody::new(body.map_err(broken))
        }))
    }
}
