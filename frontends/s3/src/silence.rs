//! Silence: how long a store may neither take a byte of a request nor send one of its answer.
//!
//! ```text
//!   a piece of the body is handed over     the time begins anew
//!   the client has no further piece yet    the time stands still: clients have a bound of their own (listen.rs)
//!   a piece of the answer comes            the time begins anew; it runs only while a piece is waited for
//! ```
//!
//! No bound is for a whole request: an upload may take hours.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use s3s::StdError;
use tokio::time::{Instant, sleep_until, timeout};

/// The silence of one request. Clones are of the same one.
#[derive(Clone, Debug)]
pub struct UpstreamSilence {
    longest: Duration,
    /// When it began; `None` while the store has all that there is.
    begun: Arc<Mutex<Option<Instant>>>,
}

impl UpstreamSilence {
    /// A silence that begins now.
    pub fn new(longest: Duration) -> Self {
        Self { longest, begun: Arc::new(Mutex::new(Some(Instant::now()))) }
    }

    fn set(&self, begun: Option<Instant>) {
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = begun;
    }

    /// Waits until it was too long.
    pub async fn is_too_long(&self) {
        loop {
            let now = Instant::now();
            let begun = *self.begun.lock().unwrap_or_else(PoisonError::into_inner);
            let end = begun.unwrap_or(now) + self.longest;
            if end <= now {
                return;
            }
            sleep_until(end).await;
        }
    }

    /// A request's body, each piece of which ends the silence when the store's connection takes it.
    pub fn ended_by(
        &self,
        mut body: BoxStream<'static, Result<Bytes, StdError>>,
    ) -> impl Stream<Item = Result<Bytes, StdError>> + Send + 'static {
        let silence = self.clone();
        stream::poll_fn(move |context| {
            let piece = body.poll_next_unpin(context);
            silence.set(piece.is_ready().then(Instant::now));
            piece
        })
    }

    /// An answer's body, which ends with an error after too long a silence.
    pub fn bounding(
        &self,
        body: impl Stream<Item = Result<Bytes, reqwest::Error>> + Send + 'static,
    ) -> BoxStream<'static, Result<Bytes, StdError>> {
        let longest = self.longest;
        let pieces = stream::unfold(Some(body.boxed()), move |body| async move {
            let mut body = body?;
            let piece = match timeout(longest, body.next()).await {
                Ok(piece) => piece?.map_err(StdError::from),
                Err(_) => Err("the store sends nothing".into()),
            };
            let goes_on = piece.is_ok();
            Some((piece, goes_on.then_some(body)))
        });
        pieces.boxed()
    }
}
