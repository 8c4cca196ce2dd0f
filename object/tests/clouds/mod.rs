//! Clouds: clients of fake-gcs-server and Azurite, the servers of the protocols of Google and of Azure.
//!
//! ```text
//!   azure   object_store's client for all                                       --signed HTTP--> Azurite
//!   google  object_store's client, which speaks the XML API, to read and list   --HTTP---------> fake-gcs-server
//!           the JSON API to put, copy and delete
//! ```
//!
//! fake-gcs-server 1.56.1 answers puts and copies by the XML API with errors; a test says so. The JSON API is as much
//! Google's.

// Each test program has a part of it.
#![allow(dead_code)]

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::azure::{
    AzureAccessKey, AzureAuthorizer, AzureCredential, MicrosoftAzure, MicrosoftAzureBuilder,
};
use object_store::client::{HttpConnector, HttpRequest, HttpRequestBody};
use object_store::gcp::{GcpCredential, GoogleCloudStorage, GoogleCloudStorageBuilder};
use object_store::path::Path;
use object_store::{
    Attribute, ClientOptions, CopyMode, CopyOptions, Error, GetOptions, GetResult, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, RetryConfig, StaticCredentialProvider,
};
use quinion_testing_s3::Connector;

use crate::real::{ACCOUNT, ACCOUNT_KEY, Server, ask};

fn never_again() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// The folder of all containers.
pub fn azure_endpoint(server: &Server) -> String {
    format!("{}/{ACCOUNT}", server.endpoint())
}

pub async fn make_container(server: &Server, name: &str) {
    let mut request = HttpRequest::new(HttpRequestBody::empty());
    *request.method_mut() = "PUT".parse().unwrap();
    *request.uri_mut() = format!("{}/{name}?restype=container", azure_endpoint(server)).parse().unwrap();
    request.headers_mut().insert("content-length", "0".parse().unwrap());
    let credential = AzureCredential::AccessKey(AzureAccessKey::try_new(ACCOUNT_KEY).unwrap());
    AzureAuthorizer::new(&credential, ACCOUNT).try_authorize(&mut request).unwrap();
    let client = Connector.connect(&ClientOptions::new()).unwrap();
    let answer = client.execute(request).await.unwrap();
    assert_eq!(answer.status().as_u16(), 201);
}

/// A new container. Its client tries nothing again by itself.
pub async fn azure(server: &Server, name: &str) -> Arc<MicrosoftAzure> {
    make_container(server, name).await;
    let store = MicrosoftAzureBuilder::new()
        .with_container_name(name)
        .with_endpoint(azure_endpoint(server))
        .with_account(ACCOUNT)
        .with_access_key(ACCOUNT_KEY)
        .with_allow_http(true)
        .with_retry(never_again())
        .with_http_connector(Connector);
    Arc::new(store.build().unwrap())
}

/// A bucket by the XML API alone.
pub fn google_xml(server: &Server, bucket: &str) -> GoogleCloudStorage {
    let credentials = StaticCredentialProvider::new(GcpCredential { bearer: String::new() });
    let store = GoogleCloudStorageBuilder::new()
        .with_bucket_name(bucket)
        .with_base_url(&server.endpoint())
        .with_credentials(Arc::new(credentials))
        .with_skip_signature(true)
        .with_client_options(ClientOptions::new().with_allow_http(true))
        .with_retry(never_again())
        .with_http_connector(Connector);
    store.build().unwrap()
}

/// A new bucket. Its client tries nothing again by itself.
pub fn google(server: &Server, bucket: &str) -> Arc<GoogleStore> {
    server.make_bucket(bucket);
    let reads = google_xml(server, bucket);
    Arc::new(GoogleStore { reads, address: server.address(), bucket: bucket.to_owned() })
}

/// A bucket that is read by the XML API and written by the JSON API.
#[derive(Debug)]
pub struct GoogleStore {
    reads: GoogleCloudStorage,
    address: SocketAddr,
    bucket: String,
}

impl fmt::Display for GoogleStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reads)
    }
}

fn encoded(path: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric();
    path.as_ref()
        .bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

impl GoogleStore {
    fn call(&self, request: &str, body: &[u8], path: &Path) -> Result<()> {
        let (status, answer) = ask(self.address, request, body);
        let (path, source) = (path.to_string(), answer.into());
        match status {
            200..300 => Ok(()),
            404 => Err(Error::NotFound { path, source }),
            412 => Err(Error::Precondition { path, source }),
            _ => Err(Error::Generic { store: "fake-gcs-server", source }),
        }
    }

    fn object(&self, path: &Path) -> String {
        format!("/storage/v1/b/{}/o/{}", self.bucket, encoded(path))
    }
}

#[async_trait::async_trait]
impl ObjectStore for GoogleStore {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let condition = match &options.mode {
            PutMode::Overwrite => String::new(),
            PutMode::Create => "&ifGenerationMatch=0".to_owned(),
            PutMode::Update(version) => {
                format!("&ifGenerationMatch={}", version.version.as_deref().unwrap_or("1"))
            }
        };
        let content_type = options.attributes.get(&Attribute::ContentType);
        let content_type = content_type.map_or("application/octet-stream", |value| value.as_ref());
        let target =
            format!("/upload/storage/v1/b/{}/o?uploadType=media&name={}", self.bucket, encoded(path));
        let request = format!("POST {target}{condition}\nContent-Type: {content_type}\n");
        let body: Vec<u8> = payload.iter().flatten().copied().collect();
        match (self.call(&request, &body, path), &options.mode) {
            (Err(Error::Precondition { path, source }), PutMode::Create) => {
                return Err(Error::AlreadyExists { path, source });
            }
            (done, _) => done?,
        }
        let ObjectMeta { e_tag, version, .. } = self.reads.head(path).await?;
        Ok(PutResult { e_tag, version, extensions: Default::default() })
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.reads.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.reads.get_opts(path, options).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let this = Self { reads: self.reads.clone(), address: self.address, bucket: self.bucket.clone() };
        let deleted = move |path: Result<Path>| {
            let path = path?;
            this.call(&format!("DELETE {}", this.object(&path)), &[], &path)?;
            Ok(path)
        };
        paths.map(deleted).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.reads.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.reads.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        if options.mode == CopyMode::Create {
            // The server takes no condition with it.
            return self.reads.copy_opts(from, to, options).await;
        }
        let to = format!("/b/{}/o/{}", self.bucket, encoded(to));
        self.call(&format!("POST {}/rewriteTo{to}", self.object(from)), &[], from)
    }
}
