//! Stores: from what Python says of a store to one that can be read.
//!
//! | prefix | store | options come on top of |
//! |---|---|---|
//! | `s3://bucket` | S3, or what speaks its protocol | the environment's `AWS_...` |
//! | `gs://bucket` | Google Cloud Storage | `GOOGLE_...` |
//! | `az://container` | Azure Blob Storage | `AZURE_...` |
//! | `http://host`, `https://host` | a web server | nothing |
//!
//! A folder or objects in memory may have any prefix. Options have their names in the crate `object_store`. An endpoint
//! that begins with `http://` is asked without TLS.
//!
//! A disk tier keeps bytes by a store's name. The name has the endpoint and the account, from options or the
//! environment, so bytes that one account has fetched are not given to another. No secret is in it.

use std::collections::HashMap;
use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::{
    ClientConfigKey, ClientOptions, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig, path::Path,
};
use pyo3::FromPyObject;
use quinion_object::Options;

/// How often the store's own client tries again, before Quinion's fetcher does.
const STORE_RETRIES_MAX: usize = 1;

/// A store as Python describes it.
#[derive(FromPyObject)]
pub(crate) enum StoreRequest {
    /// `"file:///folder"`
    Folder(String),
    /// Options of a store on the network, by their names in the crate `object_store`.
    Network(HashMap<String, String>),
    /// Objects in memory.
    Objects(HashMap<String, Vec<u8>>),
}

/// A store, and how it is read.
pub(crate) type OpenedStore = (Arc<dyn ObjectStore>, Options);

/// The store for URLs that begin with `prefix`.
///
/// # Errors
/// In words: which store, and what is wrong.
pub(crate) fn open(prefix: &str, request: StoreRequest) -> Result<OpenedStore, String> {
    let opened = match request {
        StoreRequest::Folder(url) => folder(prefix, &url),
        StoreRequest::Objects(objects) => memory(objects),
        StoreRequest::Network(options) if is_network(prefix) => network(prefix, options),
        StoreRequest::Network(options) if options.is_empty() => memory(HashMap::new()),
        StoreRequest::Network(_) => Err(
            "options are for s3://, gs://, az://, http:// and https://; other stores are a file:/// URL, \
                 or objects"
                .into(),
        ),
    };
    opened.map_err(|why| format!("the store {prefix}: {why}"))
}

/// Whether such URLs are of a store that can be opened by the prefix and the environment alone.
pub(crate) fn is_network(url: &str) -> bool {
    ["s3://", "gs://", "az://", "http://", "https://"].iter().any(|scheme| url.starts_with(scheme))
}

fn folder(prefix: &str, url: &str) -> Result<OpenedStore, String> {
    let path = url.strip_prefix("file://").filter(|path| path.starts_with('/'));
    let path = path.ok_or_else(|| format!("{url:?} is not a folder; write it as file:///folder"))?;
    let store = LocalFileSystem::new_with_prefix(path).map_err(|error| error.to_string())?;
    Ok((Arc::new(store), Options::new().store_name(format!("{prefix} at {url}")).etags_are_times()))
}

fn memory(objects: HashMap<String, Vec<u8>>) -> Result<OpenedStore, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(|error| error.to_string())?;
    let store = InMemory::new();
    for (key, bytes) in objects {
        // As the keys of URLs are read.
        let path = Path::parse(&key).ok().filter(|path| path.as_ref() == key);
        let path = path.ok_or_else(|| format!("{key:?} cannot be a key"))?;
        let put = async { store.put(&path, PutPayload::from(bytes)).await };
        runtime.block_on(put).map_err(|error| error.to_string())?;
    }
    Ok((Arc::new(store), Options::new()))
}

fn network(prefix: &str, options: HashMap<String, String>) -> Result<OpenedStore, String> {
    let (scheme, bucket) = prefix.split_once("://").unwrap_or_default();
    let bucket = bucket.trim_end_matches('/');
    if bucket.is_empty() || bucket.contains('/') {
        return Err(format!("name all of it, as {scheme}://bucket"));
    }
    let opened = match scheme {
        "s3" => s3(bucket, options),
        "gs" => gs(bucket, options),
        "az" => az(bucket, options),
        _ => http(&format!("{scheme}://{bucket}"), options),
    };
    let (store, place) = opened.map_err(|error| error.to_string())?;
    let options = Options::new().store_name(format!("{prefix} at {place:?}"));
    // ETags of web servers are made of a file's time and size.
    Ok((store, if scheme.starts_with("http") { options.etags_are_times() } else { options }))
}

/// With that of its configuration which tells one place and account from another.
type Configured = object_store::Result<(Arc<dyn ObjectStore>, Vec<Option<String>>)>;

fn retry() -> RetryConfig {
    RetryConfig { max_retries: STORE_RETRIES_MAX, ..RetryConfig::default() }
}

fn s3(bucket: &str, options: HashMap<String, String>) -> Configured {
    use AmazonS3ConfigKey::{AccessKeyId, Endpoint, S3Endpoint};
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry());
    let of_s3 = |name: &String| name.parse::<AmazonS3ConfigKey>().is_ok_and(|key| key == S3Endpoint);
    let has_s3s = options.keys().any(of_s3);
    for (name, value) in options {
        // An endpoint among the options wins over both of the environment; that of S3 alone wins over the other.
        let key = name.parse::<AmazonS3ConfigKey>()?;
        builder = builder.with_config(if key == Endpoint && !has_s3s { S3Endpoint } else { key }, value);
    }
    let value_of = |key| builder.get_config_value(&key);
    let place = vec![value_of(S3Endpoint).or(value_of(Endpoint)), value_of(AccessKeyId)];
    let builder = if is_plain(&place[0]) { builder.with_allow_http(true) } else { builder };
    Ok((Arc::new(builder.build()?), place))
}

/// Whether an endpoint is to be asked without TLS, which its scheme says: as `quinion-serve` takes it.
fn is_plain(endpoint: &Option<String>) -> bool {
    endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"))
}

fn gs(bucket: &str, options: HashMap<String, String>) -> Configured {
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(retry());
    for (name, value) in options {
        builder = builder.with_config(name.parse::<GoogleConfigKey>()?, value);
    }
    let place = [GoogleConfigKey::BaseUrl, GoogleConfigKey::ServiceAccount];
    let place = place.iter().map(|key| builder.get_config_value(key)).collect();
    Ok((Arc::new(builder.build()?), place))
}

fn az(container: &str, options: HashMap<String, String>) -> Configured {
    let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(container).with_retry(retry());
    for (name, value) in options {
        builder = builder.with_config(name.parse::<AzureConfigKey>()?, value);
    }
    let place = [AzureConfigKey::Endpoint, AzureConfigKey::AccountName, AzureConfigKey::ClientId];
    let place: Vec<_> = place.iter().map(|key| builder.get_config_value(key)).collect();
    let builder = if is_plain(&place[0]) { builder.with_allow_http(true) } else { builder };
    Ok((Arc::new(builder.build()?), place))
}

fn http(url: &str, options: HashMap<String, String>) -> Configured {
    let is_plain = url.starts_with("http://");
    let mut client = ClientOptions::new().with_allow_http(is_plain);
    for (name, value) in options {
        client = client.with_config(name.parse::<ClientConfigKey>()?, value);
    }
    let builder = HttpBuilder::new().with_url(url).with_client_options(client).with_retry(retry());
    Ok((Arc::new(builder.build()?), Vec::new()))
}
