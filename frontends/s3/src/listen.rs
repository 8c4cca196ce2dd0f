//! Listen: connections of HTTP/1.1, few enough and none for ever.
//!
//! | bound | and then |
//! |---|---|
//! | connections | more wait in the kernel's queue |
//! | requests under way, with their bodies | `SlowDown`, which clients try again |
//! | time to the next request's headers, also between requests | the connection is closed |
//! | time without a byte of a request's body | `IncompleteBody` |
//! | bytes of a signed chunk of a body (chunks.rs) | `InvalidRequest` |
//! | time in which a client takes no byte of an answer | the connection is closed |
//!
//! At the end:
//!
//! | a connection | is closed |
//! |---|---|
//! | without a request, or with a part of one's headers | at once |
//! | whose client sends a body | when that is answered, or after a second without a byte of it |
//! | whose client takes an answer | when it has it |
//!
//! A request is under way until it is answered, and until the store has ended a write that its client no longer waits
//! for. All have some seconds in sum. No bound is for one request alone: clients try again what broke off.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use s3s::service::S3Service;
use s3s::{Body, StdError, s3_error};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;

use crate::chunks;
use crate::messages::with_message;

/// The pause after the system has given no connection, for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest silence of a client that sends a body while the endpoint ends.
const SILENCE_AT_END_MAX: Duration = Duration::from_secs(1);

/// A request under way, one of as many as are taken at a time. Its parts that outlive the others keep a clone.
#[derive(Clone, Debug)]
pub struct UnderWay {
    _permit: Arc<OwnedSemaphorePermit>,
}

/// Bounds on clients.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub connections: usize,
    pub requests: usize,
    pub stall: Duration,
    pub end: Duration,
}

#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    bounds: Bounds,
}

impl Listening {
    /// In a runtime.
    ///
    /// # Errors
    /// The address is another program's, or not this machine's.
    pub async fn at(address: SocketAddr, bounds: Bounds) -> Result<Self, String> {
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|error| {
            format!("cannot listen at {address}: {error}; name an address of this machine whose port is free")
        })?;
        Ok(Self { listener, bounds })
    }

    /// Where it listens: the port is the system's choice if 0 was asked for.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub async fn serve(self, service: S3Service, end: impl Future<Output = ()>) {
        let Self { listener, bounds } = self;
        let service = Arc::new(service);
        let connections = Arc::new(Semaphore::new(bounds.connections));
        let requests = Arc::new(Semaphore::new(bounds.requests));
        // Connections watch the first, and drop the second when they are over.
        let (ends, ended) = watch::channel(());
        let (over, mut all_over) = mpsc::channel::<Infallible>(1);
        let mut end = std::pin::pin!(end);
        loop {
            let accepted = async {
                let permit = Arc::clone(&connections).acquire_owned().await.expect("it is never closed");
                (listener.accept().await, permit)
            };
            let (accepted, permit) = tokio::select! {
                () = &mut end => break,
                accepted = accepted => accepted,
            };
            let Ok((stream, _)) = accepted else {
                sleep(PAUSE).await;
                continue;
            };
            let _ = stream.set_nodelay(true); // an answer's end is not held back, that is all
            let connection = Connection {
                service: Arc::clone(&service),
                requests: Arc::clone(&requests),
                stall: bounds.stall,
                end: End(ended.clone()),
            };
            let over = over.clone();
            tokio::spawn(async move {
                connection.serve(stream).await;
                drop((permit, over));
            });
        }
        drop((listener, ends, over));
        // Writes whose clients are gone have a request's permit, and no connection.
        let all = u32::try_from(bounds.requests).unwrap_or(u32::MAX);
        let all_ended = async {
            all_over.recv().await;
            let _permits = requests.acquire_many(all).await;
        };
        let _ = timeout(bounds.end, all_ended).await;
    }
}

/// The end of the endpoint: its sender is dropped.
#[derive(Clone)]
struct End(watch::Receiver<()>);

impl End {
    async fn wait(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

struct Connection {
    service: Arc<S3Service>,
    requests: Arc<Semaphore>,
    stall: Duration,
    end: End,
}

impl Connection {
    async fn serve(self, stream: TcpStream) {
        let Self { service, requests, stall, mut end } = self;
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(stall));
        let is_asked = AtomicBool::new(false);
        let (is_asked, of_bodies) = (&is_asked, end.clone());
        let answer = service_fn(move |request| {
            is_asked.store(true, Ordering::Relaxed); // only this task looks at it
            let (service, free) = (Arc::clone(&service), Arc::clone(&requests).try_acquire_owned().ok());
            let silence = ClientSilence { stall, end: of_bodies.clone() };
            async move { Ok::<_, Infallible>(answered(&service, request, free, silence).await) }
        });
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(stall);
        let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(Box::pin(stream)), answer));
        tokio::select! {
            // An error of a connection concerns only that client.
            _ = &mut connection => return,
            () = end.wait() => {}
        }
        // hyper waits for the rest of a first request, but not for that of a later one.
        if is_asked.load(Ordering::Relaxed) {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await; // as above
        }
    }
}

/// How long a client that sends a body may send nothing of it.
struct ClientSilence {
    stall: Duration,
    end: End,
}

impl ClientSilence {
    /// Waits until it was silent for too long.
    async fn is_too_long(&mut self) {
        let at_end = async {
            self.end.wait().await;
            sleep(SILENCE_AT_END_MAX).await;
        };
        tokio::select! {
            () = sleep(self.stall) => {}
            () = at_end => {}
        }
    }
}

/// The answer to one request, which counts as under way until the last byte of the answer is sent.
async fn answered(
    service: &S3Service,
    request: Request<Incoming>,
    free: Option<OwnedSemaphorePermit>,
    silence: ClientSilence,
) -> Response<Body> {
    let Some(free) = free else {
        let error = s3_error!(SlowDown, "The endpoint has as many requests as it takes.");
        return error.to_http_response().unwrap_or_else(|_| failed());
    };
    let free = UnderWay { _permit: Arc::new(free) };
    let mut request = request.map(|body| within(body, silence));
    if let Some(len) = chunks::announced(request.headers()) {
        request = request.map(|body| chunks::bounded(body, len));
    }
    request.extensions_mut().insert(free.clone());
    let response = with_message(service.call(request).await.unwrap_or_else(|_| failed()));
    response.map(|body| {
        if body.is_end_stream() {
            return body;
        }
        Body::http_body_unsync(body.map_frame(move |frame| {
            let _under_way = &free;
            frame
        }))
    })
}

fn failed() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}

/// A body that ends with an error when its client is silent for too long.
fn within(body: Incoming, silence: ClientSilence) -> Body {
    if body.is_end_stream() {
        return Body::empty();
    }
    let frames = stream::unfold(Some((body, silence)), move |state| async move {
        let (mut body, mut silence) = state?;
        let frame: Result<Frame<_>, StdError> = tokio::select! {
            biased;
            frame = body.frame() => frame?.map_err(Into::into),
            () = silence.is_too_long() => Err("the client sends nothing".into()),
        };
        let goes_on = frame.is_ok();
        Some((frame, goes_on.then_some((body, silence))))
    });
    Body::http_body_unsync(StreamBody::new(frames))
}
