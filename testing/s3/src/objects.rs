//! Objects: what the server has, as `s3s` asks for it.
//!
//! It supports the requests of readers and writers of whole objects: GET and HEAD with ranges and conditions, PUT,
//! COPY, DELETE and lists. There is one bucket, whose name is ignored.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use s3s::dto::{
    CommonPrefix, CopyObjectInput, CopyObjectOutput, CopyObjectResult, CopySource, DeleteObjectInput,
    DeleteObjectOutput, DeleteObjectsInput, DeleteObjectsOutput, DeletedObject, ETag, GetObjectInput,
    GetObjectOutput, HeadObjectInput, HeadObjectOutput, ListObjectsV2Input, ListObjectsV2Output,
    Object as Listed, PutObjectInput, PutObjectOutput, StreamingBlob, Timestamp, TimestampFormat,
};
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use crate::content::content;

/// When an object of version 0 was put: each version is a second younger than the one before.
const BEGIN: Duration = Duration::from_secs(1_577_836_800);

#[derive(Clone, Debug)]
struct Object {
    version: u32,
    bytes: Bytes,
}

impl Object {
    fn e_tag(&self) -> ETag {
        format!("\"v{}\"", self.version)
    }
    fn modified(&self) -> Timestamp {
        (SystemTime::UNIX_EPOCH + BEGIN + Duration::from_secs(self.version.into())).into()
    }
}

/// Since 1970: HTTP has no parts of seconds.
fn seconds(time: &Timestamp) -> i64 {
    let mut text = Vec::new();
    time.format(TimestampFormat::EpochSeconds, &mut text).expect("a time of a header");
    String::from_utf8_lossy(&text).parse::<f64>().expect("a number") as i64
}

/// A request's conditions on the version.
struct Conditions {
    is: Option<String>,
    is_not: Option<String>,
    since: Option<Timestamp>,
    not_since: Option<Timestamp>,
}

impl Conditions {
    /// In the order of RFC 9110, 13.2.2.
    fn check(&self, object: &Object) -> S3Result {
        let is = |tag: &String| tag == "*" || *tag == object.e_tag();
        let holds = match (&self.is, &self.not_since) {
            (Some(tag), _) => is(tag),
            (None, Some(time)) => seconds(&object.modified()) <= seconds(time),
            (None, None) => true,
        };
        if !holds {
            return Err(s3_error!(PreconditionFailed));
        }
        let is_new = match (&self.is_not, &self.since) {
            (Some(tag), _) => !is(tag),
            (None, Some(time)) => seconds(&object.modified()) > seconds(time),
            (None, None) => true,
        };
        if is_new { Ok(()) } else { Err(s3_error!(NotModified)) }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Objects {
    all: Arc<Mutex<BTreeMap<String, Object>>>,
}

impl Objects {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Object>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn put(&self, key: &str, len: usize, version: u32) {
        let object = Object { version, bytes: content(version, len) };
        self.lock().insert(key.to_owned(), object);
    }

    /// The object's next version, of as many bytes; `None` if there is no such object.
    pub(crate) fn change(&self, key: &str) -> Option<u32> {
        // Its bytes are made before the lock is taken: a change delays no reader.
        loop {
            let Object { version, bytes } = self.lock().get(key).cloned()?;
            let next = Object { version: version + 1, bytes: content(version + 1, bytes.len()) };
            let mut all = self.lock();
            match all.get_mut(key) {
                Some(object) if object.version == version => {
                    *object = next;
                    return Some(version + 1);
                }
                _ => {}
            }
        }
    }

    pub(crate) fn delete(&self, key: &str) {
        self.lock().remove(key);
    }

    pub(crate) fn version(&self, key: &str) -> Option<u32> {
        self.lock().get(key).map(|object| object.version)
    }

    fn get(&self, key: &str) -> S3Result<Object> {
        self.lock().get(key).cloned().ok_or_else(|| s3_error!(NoSuchKey))
    }

    fn write(&self, key: String, bytes: Bytes) -> Object {
        let mut all = self.lock();
        let version = all.get(&key).map_or(1, |object| object.version + 1);
        let object = Object { version, bytes };
        all.insert(key, object.clone());
        object
    }
}

fn i64_of(len: usize) -> i64 {
    len as i64
}

#[async_trait::async_trait]
impl S3 for Objects {
    async fn get_object(&self, request: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        let object = self.get(&input.key)?;
        let conditions = Conditions {
            is: input.if_match,
            is_not: input.if_none_match,
            since: input.if_modified_since,
            not_since: input.if_unmodified_since,
        };
        conditions.check(&object)?;
        let size = object.bytes.len();
        let range = input.range.map(|range| range.check(size as u64)).transpose();
        let range = range.map_err(|_| s3_error!(InvalidRange))?;
        let content_range =
            range.as_ref().map(|range| format!("bytes {}-{}/{size}", range.start, range.end - 1));
        let bytes = range.map_or(object.bytes.clone(), |range| {
            object.bytes.slice(range.start as usize..range.end as usize)
        });
        Ok(S3Response::new(GetObjectOutput {
            content_length: Some(i64_of(bytes.len())),
            content_range,
            e_tag: Some(object.e_tag()),
            last_modified: Some(object.modified()),
            body: Some(StreamingBlob::from(s3s::Body::from(bytes))),
            ..Default::default()
        }))
    }

    async fn head_object(
        &self,
        request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        let object = self.get(&input.key)?;
        let conditions = Conditions {
            is: input.if_match,
            is_not: input.if_none_match,
            since: input.if_modified_since,
            not_since: input.if_unmodified_since,
        };
        conditions.check(&object)?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(i64_of(object.bytes.len())),
            e_tag: Some(object.e_tag()),
            last_modified: Some(object.modified()),
            ..Default::default()
        }))
    }

    async fn put_object(&self, request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let PutObjectInput { key, body, .. } = request.input;
        let mut bytes = BytesMut::new();
        if let Some(mut body) = body {
            while let Some(part) = body.next().await {
                bytes.extend_from_slice(&part.map_err(|_| s3_error!(IncompleteBody))?);
            }
        }
        let object = self.write(key, bytes.freeze());
        Ok(S3Response::new(PutObjectOutput { e_tag: Some(object.e_tag()), ..Default::default() }))
    }

    async fn copy_object(
        &self,
        request: S3Request<CopyObjectInput>,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        let CopySource::Bucket { key: from, .. } = request.input.copy_source else {
            return Err(s3_error!(NotImplemented));
        };
        let bytes = self.get(&from)?.bytes;
        let object = self.write(request.input.key, bytes);
        let (e_tag, last_modified) = (Some(object.e_tag()), Some(object.modified()));
        let result = CopyObjectResult { e_tag, last_modified, ..Default::default() };
        Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..Default::default() }))
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.delete(&request.input.key);
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let deleted = request.input.delete.objects.into_iter().map(|object| {
            self.delete(&object.key);
            DeletedObject { key: Some(object.key), ..Default::default() }
        });
        let deleted = Some(deleted.collect());
        Ok(S3Response::new(DeleteObjectsOutput { deleted, ..Default::default() }))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let ListObjectsV2Input { prefix, delimiter, start_after, bucket, .. } = request.input;
        let (start, all) = (prefix.clone().unwrap_or_default(), self.lock());
        let mut contents = Vec::new();
        let mut prefixes = std::collections::BTreeSet::new();
        for (key, object) in all.range(start.clone()..).take_while(|(key, _)| key.starts_with(&start)) {
            if start_after.as_ref().is_some_and(|after| key <= after) {
                continue;
            }
            let rest = &key[start.len()..];
            if let Some(at) = delimiter.as_ref().and_then(|delimiter| rest.find(delimiter.as_str())) {
                prefixes.insert(format!("{start}{}/", &rest[..at]));
                continue;
            }
            contents.push(Listed {
                key: Some(key.clone()),
                size: Some(i64_of(object.bytes.len())),
                e_tag: Some(object.e_tag()),
                last_modified: Some(object.modified()),
                ..Default::default()
            });
        }
        let prefixes: Vec<_> =
            prefixes.into_iter().map(|prefix| CommonPrefix { prefix: Some(prefix) }).collect();
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(bucket),
            prefix,
            delimiter,
            key_count: Some((contents.len() + prefixes.len()) as i32),
            is_truncated: Some(false),
            contents: Some(contents),
            common_prefixes: Some(prefixes),
            ..Default::default()
        }))
    }
}
