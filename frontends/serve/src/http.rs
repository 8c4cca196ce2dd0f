//! HTTP: what monitors ask a server, on a port of its own.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | all metrics (`metrics.rs`) |
//! | `/healthz` | 200 if a client that connects now comes to this server, else 503 |
//!
//! It answers GET and HEAD, a few connections at a time, each for some seconds at most; more are closed. So a hostile
//! client can only delay other monitors' answers. Nothing of an object can be read here, and nothing changed.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use quinion_service::Server;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::LocalSet;
use tokio::time::timeout;

use crate::metrics::{self, Shown};
use crate::restores::Restores;

/// More connections are closed.
const CONNECTIONS_MAX: usize = 16;
/// How long a connection may stay.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(10);
/// The pause after the system has given no connection, for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// A port that is listened at.
#[derive(Debug)]
pub struct Monitor(TcpListener);

impl Monitor {
    /// In a runtime.
    ///
    /// # Errors
    /// The address is another program's, or not this machine's.
    pub async fn at(address: SocketAddr) -> Result<Self, String> {
        let listener = TcpListener::bind(address).await;
        listener.map(Self).map_err(|error| {
            let remedy = "name an address of this machine whose port is free";
            format!("cannot listen at {address} for monitors: {error}; {remedy}")
        })
    }

    /// Where it listens: the port is the system's choice if 0 was asked for.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Answers until it is dropped.
    pub async fn serve(&self, server: &Rc<Server>, restores: &Rc<Restores>, shown: Shown) -> Infallible {
        let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let tasks = LocalSet::new();
        let accepting = async {
            loop {
                let Ok((stream, _)) = self.0.accept().await else {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                };
                let Ok(permit) = Arc::clone(&free).try_acquire_owned() else { continue };
                let (server, restores) = (Rc::clone(server), Rc::clone(restores));
                tokio::task::spawn_local(async move {
                    let answer = service_fn(|request| {
                        let text = || metrics::text_of(&server, shown, restores.stats());
                        std::future::ready(Ok::<_, Infallible>(answer(&server, text, &request)))
                    });
                    let mut http = hyper::server::conn::http1::Builder::new();
                    http.keep_alive(false);
                    drop(
                        timeout(CONNECTION_TIME_MAX, http.serve_connection(TokioIo::new(stream), answer))
                            .await,
                    );
                    drop(permit);
                });
            }
        };
        tasks.run_until(accepting).await
    }
}

fn answer(
    server: &Server,
    metrics: impl Fn() -> String,
    request: &Request<Incoming>,
) -> Response<Full<Bytes>> {
    let with = |status, kind: &'static str, text: String| {
        let response = Response::builder().status(status).header(CONTENT_TYPE, kind);
        response.body(Full::from(text)).expect("its parts are right")
    };
    let plain = |status, text: &str| with(status, "text/plain; charset=utf-8", text.into());
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "ask by GET\n");
    }
    match request.uri().path() {
        "/metrics" => with(StatusCode::OK, metrics::MEDIA_TYPE, metrics()),
        "/healthz" if server.is_reachable() => plain(StatusCode::OK, "clients can connect\n"),
        "/healthz" => {
            plain(StatusCode::SERVICE_UNAVAILABLE, "clients cannot connect: the socket leads elsewhere\n")
        }
        _ => plain(StatusCode::NOT_FOUND, "there are /metrics and /healthz\n"),
    }
}
