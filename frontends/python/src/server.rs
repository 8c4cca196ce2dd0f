//! Server: a cache that other processes of this user read, and the stores behind it.
//!
//! A forked child has the object but not the threads, and the socket is the parent's: there it does nothing, and its
//! drop stops nothing.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quinion::Cache;
use quinion_service::ServerTotals;

use crate::error::Failure;
use crate::file::{dict_of, freshness_of};
use crate::stores::{self, StoreRequest};
use crate::wait::drop_detached;

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
        drop_detached(running); // its threads are waited for
    }
}

impl Server {
    fn take(&self) -> Option<quinion_service::Server> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn numbers(&self) -> PyResult<ServerTotals> {
        if std::process::id() != self.process {
            return Err(PyValueError::new_err(format!(
                "the server {:?} is the parent's; ask there, or start one here",
                self.name
            )));
        }
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let stopped =
            || PyValueError::new_err(format!("the server {:?} was stopped; start another", self.name));
        running.as_ref().map(quinion_service::Server::totals).ok_or_else(stopped)
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
        freshness: Option<&str>,
    ) -> PyResult<Self> {
        let freshness = freshness_of(freshness)?.unwrap_or_default();
        let invalid = |error: &dyn std::fmt::Display| PyValueError::new_err(error.to_string());
        let cache = Cache::builder().memory(memory).build().map_err(|error| invalid(&error))?;
        let mut builder = quinion_service::Server::builder(cache);
        for (prefix, request) in stores {
            let (store, options) = stores::open(&prefix, request).map_err(|why| invalid(&why))?;
            builder = builder.store(prefix, store, options.freshness(freshness));
        }
        let server = py.detach(|| builder.start(&name)).map_err(Failure::from)?;
        Ok(Self { name, process: std::process::id(), running: Mutex::new(Some(server)) })
    }

    /// Statistics of the server.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dict_of(py, self.numbers()?)
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
        let Ok(totals) = self.numbers() else { return format!("<quinion.Server {:?}: stopped>", self.name) };
        let hits = totals.reads.saturating_sub(totals.asked) as f64 * 100.0 / totals.reads.max(1) as f64;
        let ServerTotals { reads, bytes, clients, .. } = totals;
        format!(
            "<quinion.Server {:?}: {hits:.1} % of {reads} reads hit, {bytes} bytes, {clients} clients>",
            self.name
        )
    }
}
