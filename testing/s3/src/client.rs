//! Client: the `AmazonS3` of the crate `object_store`, over plain HTTP.
//!
//! It is the users' client, with two differences: nothing is signed, and nothing is tried again, so that a test counts
//! its requests. TLS is left out with the HTTP client that would bring it.
//!
//! Invariant: a client has no state of a server's, so one of another process is as good.

use std::sync::Arc;

use http_body_util::BodyExt;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client as http_client;
use object_store::{ClientOptions, RetryConfig};

/// A client of the server that listens there, which may be another process's. It tries nothing again by itself.
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
