//! Server: a cache that other processes of this user read, and the stores behind it.
//!
//! A forked child has the object but not the threads, and the socket is the parent's: there it does nothing, and its
//! end stops nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload, RetryConfig, path::Path};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quinion::Cache;
use quinion_object::Options;
use quinion_service::ServerStats;

use crate::error::python;

/// How often the store's own client tries again, before our fetcher does.
const STORE_RETRIES_MAX: usize = 1;

/// What Python says of a store.
#[derive(FromPyObject)]
enum StoreRequest {
    /// `"file:///folder"`
    Folder(String),
    /// Options of an S3 store, by their names in the crate `object_store`.
    S3(HashMap<String, String>),
    /// Objects in memory.
    Objects(HashMap<String, Vec<u8>>),
}

/// A server, until it is stopped or collected.
#[pyclass(frozen, module = "quinion")]
pub(crate) struct Server {
    name: String,
    process: u32,
    running: Mutex<Option<quinion_service::Server>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(running) = self.take() else { return };
        if std::process::id() != self.process {
            std::mem::forget(running);
            return;
        }
        // Its threads are waited for, and not by all of Python's.
        let mut running = Some(running);
        Python::try_attach(|py| py.detach(|| drop(running.take())));
        drop(running);
    }
}

impl Server {
    fn take(&self) -> Option<quinion_service::Server> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn numbers(&self) -> PyResult<ServerStats> {
        if std::process::id() != self.process {
            return Err(PyValueError::new_err(format!("the server {:?} is the parent's", self.name)));
        }
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let stopped = || PyValueError::new_err(format!("the server {:?} was stopped", self.name));
        running.as_ref().map(quinion_service::Server::stats).ok_or_else(stopped)
    }
}

#[pymethods]
impl Server {
    #[new]
    fn new(
        py: Python<'_>,
        name: String,
        memory: u64,
        stores: HashMap<String, StoreRequest>,
    ) -> PyResult<Self> {
        let invalid = |error: &dyn std::fmt::Display| PyValueError::new_err(error.to_string());
        let cache = Cache::builder().memory(memory).build().map_err(|error| invalid(&error))?;
        let mut builder = quinion_service::Server::builder(cache);
        for (prefix, request) in stores {
            let store =
                store(&prefix, request).map_err(|why| invalid(&format!("the store {prefix}: {why}")))?;
            builder = builder.store(prefix, store, Options::default());
        }
        let server = py.detach(|| builder.start(&name)).map_err(python)?;
        Ok(Self { name, process: std::process::id(), running: Mutex::new(Some(server)) })
    }

    /// What the server has done, and has.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, dict) = (self.numbers()?, PyDict::new(py));
        dict.set_item("clients", stats.clients)?;
        dict.set_item("open_files", stats.open_files)?;
        dict.set_item("pins", stats.pins)?;
        dict.set_item("reads", stats.reads)?;
        dict.set_item("bytes", stats.bytes)?;
        dict.set_item("asked", stats.asked)?;
        dict.set_item("gets", stats.fetches.iter().map(|(_, fetched)| fetched.gets).sum::<u64>())?;
        dict.set_item("fetched_bytes", stats.fetches.iter().map(|(_, fetched)| fetched.bytes).sum::<u64>())?;
        Ok(dict)
    }

    /// Stops serving. Clients' reads of objects fail from now on.
    fn stop(&self, py: Python<'_>) {
        if std::process::id() == self.process {
            let running = self.take();
            py.detach(|| drop(running));
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_why))]
    fn __exit__(&self, py: Python<'_>, _why: &Bound<'_, PyAny>) {
        self.stop(py);
    }

    fn __repr__(&self) -> String {
        let Ok(stats) = self.numbers() else { return format!("<quinion.Server {:?}: stopped>", self.name) };
        let hits = stats.reads.saturating_sub(stats.asked) as f64 * 100.0 / stats.reads.max(1) as f64;
        let ServerStats { reads, bytes, clients, .. } = stats;
        format!(
            "<quinion.Server {:?}: {hits:.1} % of {reads} reads hit, {bytes} bytes, {clients} clients>",
            self.name
        )
    }
}

fn store(prefix: &str, request: StoreRequest) -> Result<Arc<dyn ObjectStore>, String> {
    let is_s3 = prefix.starts_with("s3://");
    match request {
        StoreRequest::Folder(url) => folder(&url),
        StoreRequest::S3(options) if is_s3 => s3(prefix, options),
        StoreRequest::Objects(objects) => memory(objects),
        StoreRequest::S3(options) if options.is_empty() => memory(HashMap::new()),
        StoreRequest::S3(_) => {
            Err("options are for s3://bucket; other stores are a file:/// URL, or objects".into())
        }
    }
}

fn folder(url: &str) -> Result<Arc<dyn ObjectStore>, String> {
    let path = url.strip_prefix("file://").filter(|path| path.starts_with('/'));
    let path = path.ok_or_else(|| format!("{url:?} is no folder; write it as file:///folder"))?;
    let store = LocalFileSystem::new_with_prefix(path).map_err(|error| error.to_string())?;
    Ok(Arc::new(store))
}

fn s3(prefix: &str, options: HashMap<String, String>) -> Result<Arc<dyn ObjectStore>, String> {
    let bucket = prefix.trim_start_matches("s3://").trim_end_matches('/');
    if bucket.is_empty() || bucket.contains('/') {
        return Err("name a whole bucket, as s3://bucket".into());
    }
    let retry = RetryConfig { max_retries: STORE_RETRIES_MAX, ..RetryConfig::default() };
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry);
    for (name, value) in options {
        let key: AmazonS3ConfigKey = name.parse().map_err(|error: object_store::Error| error.to_string())?;
        builder = builder.with_config(key, value);
    }
    builder.build().map(|store| Arc::new(store) as _).map_err(|error| error.to_string())
}

fn memory(objects: HashMap<String, Vec<u8>>) -> Result<Arc<dyn ObjectStore>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(|error| error.to_string())?;
    let store = InMemory::new();
    for (key, bytes) in objects {
        // As the keys of URLs are read.
        let path = Path::parse(&key).ok().filter(|path| path.as_ref() == key);
        let path = path.ok_or_else(|| format!("{key:?} cannot be a key"))?;
        let put = async { store.put(&path, PutPayload::from(bytes)).await };
        runtime.block_on(put).map_err(|error| error.to_string())?;
    }
    Ok(Arc::new(store))
}
