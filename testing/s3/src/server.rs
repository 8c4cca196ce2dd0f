//! Server: the listener, its counts, and its faults.
//!
//! ```text
//!   request --> counted --> latency, hold --> a fault drawn --> s3s --> headers --> body, at its speed --> or fault
//! ```
//!
//! Faults of a script come to GETs alone, in order; a plan's also to HEADs, as far as an answer without a body can show
//! them. A reset needs the socket: it is set to send RST when it is closed, and then the answer breaks off.
//!
//! Invariant: a fault changes an object before the answer that shows it, so a reader that knows the new version by an
//! answer finds it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, HeaderValue, IF_MATCH, RANGE, RETRY_AFTER};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use object_store::aws::AmazonS3;
use percent_encoding::percent_decode_str;
use rustix::net::sockopt::set_socket_linger;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::sync::watch;

use crate::client::store_at;
use crate::fault::{Drawing, Fault, FaultPlan, KINDS};
use crate::objects::Objects;

const PIECE: usize = 64 << 10;
/// The pause before a connection breaks, so that the bytes before the break are sent.
const BREAK_PAUSE: Duration = Duration::from_millis(3);

/// Requests that have come, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Requests {
    /// For an object's bytes.
    pub gets: u64,
    /// For what an object is.
    pub heads: u64,
    /// For a list of objects.
    pub lists: u64,
    /// Requests that write, copy or delete.
    pub writes: u64,
}

/// Settings and counts of the server.
#[derive(Debug, Default)]
pub struct Control {
    objects: Objects,
    script: Mutex<VecDeque<Fault>>,
    plan: Mutex<Option<Drawing>>,
    retry_after: Mutex<Option<HeaderValue>>,
    /// Whether answers are held back.
    holds: watch::Sender<bool>,
    latency: AtomicU64,
    /// Bytes in a second, of each connection; 0: as fast as can be.
    bandwidth: AtomicU64,
    gets: AtomicU64,
    heads: AtomicU64,
    lists: AtomicU64,
    writes: AtomicU64,
    refused: AtomicU64,
    now: AtomicU64,
    most: AtomicU64,
    ranges: Mutex<Vec<(u64, u64)>>,
    faults: [AtomicU64; KINDS],
    names: Mutex<[&'static str; KINDS]>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// An object of `len` bytes in its first version, which is 1.
    pub fn put(&self, key: &str, len: usize) {
        self.put_version(key, len, 1);
    }
    /// An object of `len` bytes in that version, whatever it was before.
    pub fn put_version(&self, key: &str, len: usize, version: u32) {
        self.objects.put(key, len, version);
    }
    /// The object's next version, of as many bytes.
    ///
    /// # Panics
    /// There is no such object.
    pub fn change(&self, key: &str) -> u32 {
        self.objects.change(key).expect("the object exists")
    }
    /// Removes an object.
    pub fn delete(&self, key: &str) {
        self.objects.delete(key);
    }
    /// The version that an object has now.
    pub fn version(&self, key: &str) -> Option<u32> {
        self.objects.version(key)
    }
    /// Sets the faults of the next GETs, one after the other.
    pub fn trouble(&self, faults: impl IntoIterator<Item = Fault>) {
        lock(&self.script).extend(faults);
    }
    /// Drops the rest of the script.
    pub fn end_trouble(&self) {
        lock(&self.script).clear();
    }
    /// Faults by chance from now on, or none. Scripts come first.
    pub fn set_plan(&self, plan: Option<FaultPlan>) {
        *lock(&self.plan) = plan.map(Drawing::new);
    }
    /// How long each request waits for its answer.
    pub fn set_latency(&self, time: Duration) {
        self.latency.store(time.as_micros() as u64, Ordering::Relaxed);
    }
    /// The `Retry-After` of answers with status 429 and 503; none at first.
    ///
    /// # Panics
    /// `value` cannot be in a header.
    pub fn set_retry_after(&self, value: Option<&str>) {
        let value = value.map(|value| HeaderValue::from_str(value).expect("a header's value"));
        *lock(&self.retry_after) = value;
    }
    /// Holds back all answers from now on, until [`Control::release`].
    pub fn hold(&self) {
        self.holds.send_replace(true);
    }
    /// Answers requests again, those that were held back first.
    pub fn release(&self) {
        self.holds.send_replace(false);
    }
    /// Requests that are under way, until their answers begin.
    pub fn under_way(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }
    /// How many bytes of a body are sent in a second; 0: as fast as can be. Other bodies at the same time have as many.
    pub fn set_bandwidth(&self, bytes: u64) {
        self.bandwidth.store(bytes, Ordering::Relaxed);
    }
    /// All requests.
    pub fn requests(&self) -> Requests {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Self { gets, heads, lists, writes, .. } = self;
        Requests { gets: of(gets), heads: of(heads), lists: of(lists), writes: of(writes) }
    }
    /// Requests for bytes.
    pub fn gets(&self) -> u64 {
        self.requests().gets
    }
    /// Requests for what an object is.
    pub fn heads(&self) -> u64 {
        self.requests().heads
    }
    /// Requests whose condition did not hold.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
    /// The most requests that were under way at a time, until their answers began.
    pub fn most_at_a_time(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }
    /// The ranges of all GETs whose condition held, in their order.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        lock(&self.ranges).clone()
    }
    /// Faults that requests have met, by kind.
    pub fn faults(&self) -> Vec<(&'static str, u64)> {
        let counts = self.faults.iter().map(|count| count.load(Ordering::Relaxed));
        let names = *lock(&self.names);
        names.into_iter().zip(counts).filter(|(_, count)| *count > 0).collect()
    }

    fn draw(&self, method: &Method) -> Option<Fault> {
        let is_get = method == Method::GET;
        let fault = is_get.then(|| lock(&self.script).pop_front()).flatten();
        let by_chance = || lock(&self.plan).as_mut().and_then(Drawing::next);
        let is_asked = is_get || method == Method::HEAD;
        let fault = fault.or_else(|| is_asked.then(by_chance).flatten());
        let fault = fault.filter(|fault| is_get || fault.is_without_body())?;
        let (kind, name) = fault.kind();
        self.faults[kind].fetch_add(1, Ordering::Relaxed);
        lock(&self.names)[kind] = name;
        Some(fault)
    }

    fn change_if_there(&self, key: &str) {
        let _ = self.objects.change(key); // another request may have deleted it
    }
}

/// The server; it ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    /// Settings and counts of the server.
    pub control: Arc<Control>,
    address: std::net::SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.runtime.take().expect("it is dropped once").shutdown_background();
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::new()
    }
}

impl Server {
    /// A server without objects.
    ///
    /// # Panics
    /// The system gives no thread or no port.
    pub fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let control = Arc::new(Control::default());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let s3 = Arc::new(S3ServiceBuilder::new(control.objects.clone()).build());
        runtime.spawn(accept(listener, Arc::clone(&control), s3));
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

async fn accept(listener: std::net::TcpListener, control: Arc<Control>, s3: Arc<S3Service>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
    while let Ok((stream, _)) = listener.accept().await {
        let (control, s3) = (Arc::clone(&control), Arc::clone(&s3));
        let _ = stream.set_nodelay(true);
        let Ok(stream) = stream.into_std() else { continue };
        let line = Line(Arc::new(Mutex::new(stream.try_clone().ok().map(OwnedFd::from))));
        let Ok(stream) = tokio::net::TcpStream::from_std(stream) else { continue };
        tokio::spawn(async move {
            let serve = service_fn(|request| {
                let exchange = Exchange { control: Arc::clone(&control), line: line.clone() };
                let answer = exchange.answer(Arc::clone(&s3), request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            let http = hyper::server::conn::http1::Builder::new();
            // It may be broken off on purpose.
            let _ = http.serve_connection(TokioIo::new(stream), serve).await;
        });
    }
}

#[derive(Clone, Debug)]
struct Line(Arc<Mutex<Option<OwnedFd>>>);

impl Line {
    /// When the server closes it, the peer's connection is reset.
    fn reset(&self) {
        if let Some(socket) = lock(&self.0).take() {
            let _ = set_socket_linger(&socket, Some(Duration::ZERO));
        }
    }
}

type Body = UnsyncBoxBody<Bytes, io::Error>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    Whole,
    Closed,
    Reset,
    Stalled,
}

struct Shape {
    bytes: Bytes,
    ending: Ending,
    /// The object that changes after so many bytes.
    change: Option<(usize, String)>,
}

struct Exchange {
    control: Arc<Control>,
    line: Line,
}

impl Exchange {
    async fn answer(self, s3: Arc<S3Service>, mut request: Request<Incoming>) -> Response<Body> {
        let control = Arc::clone(&self.control);
        let path = percent_decode_str(request.uri().path()).decode_utf8_lossy().into_owned();
        let key = path.trim_start_matches('/').split_once('/').map_or("", |(_, key)| key).to_owned();
        let method = request.method().clone();
        let counter = match (&method, key.is_empty()) {
            (&Method::HEAD, _) => &control.heads,
            (&Method::GET, false) => &control.gets,
            (&Method::GET, true) => &control.lists,
            _ => &control.writes,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let now = control.now.fetch_add(1, Ordering::Relaxed) + 1;
        control.most.fetch_max(now, Ordering::Relaxed);
        let _now = Leaving(&control.now);
        pause(Duration::from_micros(control.latency.load(Ordering::Relaxed))).await;
        // The sender is in `control`, so there is one.
        let _ = control.holds.subscribe().wait_for(|holds| !holds).await;
        let fault = if key.is_empty() { None } else { control.draw(&method) };
        match fault {
            Some(Fault::Status(code)) => return refusal(code, &lock(&control.retry_after)),
            Some(Fault::Late(millis)) => pause(Duration::from_millis(millis)).await,
            Some(Fault::ChangedBefore) => control.change_if_there(&key),
            Some(Fault::Unconditional) => {
                control.change_if_there(&key);
                request.headers_mut().remove(IF_MATCH);
            }
            Some(Fault::Whole) => drop(request.headers_mut().remove(RANGE)),
            Some(Fault::OtherRange) => move_range(request.headers_mut()),
            _ => {}
        }
        let (mut head, body) = match s3.call(request.map(s3s::Body::from)).await {
            Ok(answer) => answer.into_parts(),
            Err(_) => return refusal(500, &None),
        };
        if head.status == StatusCode::PRECONDITION_FAILED {
            control.refused.fetch_add(1, Ordering::Relaxed);
        }
        let mut bytes = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        if method == Method::GET && !key.is_empty() && head.status.is_success() {
            let first = first_of(&head.headers).unwrap_or(0);
            lock(&control.ranges).push((first, first + bytes.len() as u64));
            if let Some(Fault::Longer(more)) = fault {
                bytes = [&bytes[..], &vec![b'?'; more][..]].concat().into();
                head.headers.insert(CONTENT_LENGTH, bytes.len().into());
            }
            if let Some(Fault::Short(len)) = fault {
                bytes.truncate(len);
                head.headers.insert(CONTENT_LENGTH, bytes.len().into());
            }
            let body = self.shaped(bytes, fault, key);
            return Response::from_parts(head, body);
        }
        Response::from_parts(head, whole(bytes))
    }

    /// The body of a GET that meets `fault`.
    fn shaped(&self, bytes: Bytes, fault: Option<Fault>, key: String) -> Body {
        let until = |len: usize| bytes.slice(..len.min(bytes.len()));
        let shape = |bytes, ending| Shape { bytes, ending, change: None };
        let shape = match fault {
            Some(Fault::Cut(len)) => shape(until(len), Ending::Closed),
            Some(Fault::Reset(len)) => shape(until(len), Ending::Reset),
            Some(Fault::Stall(len)) => shape(until(len), Ending::Stalled),
            Some(Fault::ChangedAfter(len)) => {
                self.control.change_if_there(&key);
                shape(until(len), Ending::Closed)
            }
            Some(Fault::ChangedWithin(len)) => {
                // No server is asked for what follows the last byte.
                let len = len.min(bytes.len().saturating_sub(1));
                Shape { change: Some((len, key)), ..shape(bytes.clone(), Ending::Whole) }
            }
            _ => shape(bytes.clone(), Ending::Whole),
        };
        self.sent(shape)
    }

    /// A body in pieces, at the set speed.
    fn sent(&self, shape: Shape) -> Body {
        let (control, line) = (Arc::clone(&self.control), self.line.clone());
        let pieces = stream::unfold((shape, 0), move |(mut shape, at)| {
            let (control, line) = (Arc::clone(&control), line.clone());
            async move {
                if let Some((_, key)) = shape.change.take_if(|(len, _)| *len <= at) {
                    control.change_if_there(&key);
                }
                let end = shape.change.as_ref().map_or(usize::MAX, |(len, _)| *len).min(at + PIECE);
                let piece = shape.bytes.slice(at..shape.bytes.len().min(end));
                if !piece.is_empty() {
                    let speed = control.bandwidth.load(Ordering::Relaxed);
                    let nanos = (piece.len() as u64 * 1_000_000_000).checked_div(speed).unwrap_or(0);
                    pause(Duration::from_nanos(nanos)).await;
                    let at = at + piece.len();
                    return Some((Ok(Frame::data(piece)), (shape, at)));
                }
                match shape.ending {
                    Ending::Whole => return None,
                    Ending::Stalled => return std::future::pending().await,
                    Ending::Closed => pause(BREAK_PAUSE).await,
                    Ending::Reset => {
                        pause(BREAK_PAUSE).await;
                        line.reset();
                    }
                }
                shape.ending = Ending::Whole;
                Some((Err(io::Error::from(io::ErrorKind::ConnectionReset)), (shape, at)))
            }
        });
        StreamBody::new(pieces).boxed_unsync()
    }
}

/// A request whose answer begins, or that is dropped.
struct Leaving<'c>(&'c AtomicU64);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn pause(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}

fn whole(bytes: Bytes) -> Body {
    http_body_util::Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

fn refusal(status: u16, retry_after: &Option<HeaderValue>) -> Response<Body> {
    let code = match status {
        400 => "InvalidArgument",
        503 => "SlowDown",
        429 => "TooManyRequests",
        _ => "InternalError",
    };
    let text = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code></Error>");
    let mut answer = Response::new(whole(text.into()));
    *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
    if let (429 | 503, Some(value)) = (status, retry_after) {
        answer.headers_mut().insert(RETRY_AFTER, value.clone());
    }
    answer
}

/// Where the bytes of an answer begin in the object.
fn first_of(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    text.split_once('-')?.0.parse().ok()
}

/// Has the request ask for the range that begins a page later.
fn move_range(headers: &mut HeaderMap) {
    let range = headers.get(RANGE).and_then(|range| range.to_str().ok()?.strip_prefix("bytes="));
    let Some((first, last)) = range.and_then(|range| range.split_once('-')) else { return };
    let (Ok(first), Ok(last)) = (first.parse::<u64>(), last.parse::<u64>()) else { return };
    // The last page of an object has none after it: then it is a page before.
    let moved = if first >= 4096 { (first - 4096, last - 4096) } else { (first + 4096, last + 4096) };
    if let Ok(range) = HeaderValue::from_str(&format!("bytes={}-{}", moved.0, moved.1)) {
        headers.insert(RANGE, range);
    }
}
