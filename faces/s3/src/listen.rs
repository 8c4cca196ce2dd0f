//! Listen: connections of HTTP/1.1, few enough and none for ever.
//!
//! | bound | and then |
//! |---|---|
//! | connections | more wait in the kernel's queue |
//! | requests under way, with their bodies | `SlowDown`, which clients try again |
//! | time to the next request's headers, also between requests | the connection is closed |
//! | time without a byte of a request's body | `IncompleteBody` |
//! | time in which a client takes no byte of an answer | the connection is closed |
//!
//! At the end requests under way have some seconds to finish.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use s3s::service::S3Service;
use s3s::{Body, StdError, s3_error};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;

/// The pause after the system has given no connection, for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

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
        let graceful = GracefulShutdown::new();
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
            let mut stream = TimeoutStream::new(stream);
            stream.set_write_timeout(Some(bounds.stall));
            let (service, requests) = (Arc::clone(&service), Arc::clone(&requests));
            let answer = service_fn(move |request| {
                let (service, free) = (Arc::clone(&service), Arc::clone(&requests).try_acquire_owned().ok());
                async move { Ok::<_, Infallible>(answered(&service, request, free, bounds.stall).await) }
            });
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(bounds.stall);
            let connection = graceful.watch(http.serve_connection(TokioIo::new(Box::pin(stream)), answer));
            tokio::spawn(async move {
                // An error of a connection concerns only that client.
                drop(connection.await);
                drop(permit);
            });
        }
        drop(listener);
        let _ = timeout(bounds.end, graceful.shutdown()).await;
    }
}

/// The answer to one request, which counts as under way until the last byte of the answer is sent.
async fn answered(
    service: &S3Service,
    request: Request<Incoming>,
    free: Option<OwnedSemaphorePermit>,
    stall: Duration,
) -> Response<Body> {
    let Some(free) = free else {
        let error = s3_error!(SlowDown, "The endpoint has as many requests as it takes.");
        return error.to_http_response().unwrap_or_else(|_| failed());
    };
    let request = request.map(|body| within(body, stall));
    let response = service.call(request).await.unwrap_or_else(|_| failed());
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

/// A body that ends with an error when it has no byte for so long.
fn within(body: Incoming, stall: Duration) -> Body {
    if body.is_end_stream() {
        return Body::empty();
    }
    let frames = stream::unfold(Some(body), move |body| async move {
        let mut body = body?;
        let frame: Result<Frame<_>, StdError> = match timeout(stall, body.frame()).await {
            Ok(None) => return None,
            Ok(Some(frame)) => frame.map_err(Into::into),
            Err(_) => Err("the client sends nothing".into()),
        };
        let goes_on = frame.is_ok();
        Some((frame, goes_on.then_some(body)))
    });
    Body::http_body_unsync(StreamBody::new(frames))
}
