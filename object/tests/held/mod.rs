//! Held: a store in memory whose answers wait until they are released, so that threads meet in an order that is given.
//!
//! An answer is held when the store has it, on its way: what is written meanwhile is not in it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};
use tokio::sync::oneshot;

#[derive(Debug, Default)]
pub struct HeldStore {
    pub inner: InMemory,
    gates: Mutex<VecDeque<Gate>>,
}

#[derive(Debug)]
struct Gate {
    reached: mpsc::Sender<()>,
    released: oneshot::Receiver<()>,
}

/// Releases the answer also when it is dropped.
pub struct HeldAnswer {
    reached: mpsc::Receiver<()>,
    _release: oneshot::Sender<()>,
}

impl HeldStore {
    /// Holds the answer to the next get that has none.
    pub fn hold_next(&self) -> HeldAnswer {
        let ((reached, is_reached), (release, released)) = (mpsc::channel(), oneshot::channel());
        self.gates.lock().unwrap().push_back(Gate { reached, released });
        HeldAnswer { reached: is_reached, _release: release }
    }
}

impl HeldAnswer {
    /// Waits until the store has the answer.
    pub fn wait(&self) {
        self.reached.recv_timeout(Duration::from_secs(60)).expect("the store is asked");
    }
}

impl fmt::Display for HeldStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HeldStore")
    }
}

#[async_trait::async_trait]
impl ObjectStore for HeldStore {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> StoreResult<PutResult> {
        self.inner.put_opts(path, payload, options).await
    }
    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }
    async fn get_opts(&self, path: &Path, options: GetOptions) -> StoreResult<GetResult> {
        let gate = self.gates.lock().unwrap().pop_front();
        let answer = self.inner.get_opts(path, options).await;
        if let Some(gate) = gate {
            let _ = gate.reached.send(());
            let _ = gate.released.await; // dropped, too, is released
        }
        answer
    }
    fn delete_stream(
        &self,
        paths: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        self.inner.delete_stream(paths)
    }
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.inner.list(prefix)
    }
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> StoreResult<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
