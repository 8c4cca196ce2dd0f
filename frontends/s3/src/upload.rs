//! Upload: a request's body on its way to a store, checked before its last bytes leave.
//!
//! ```text
//!   client -> long chunks are cut (chunks.rs) -> signed chunks are decoded and checked (s3s)
//!          -> length; checksum of the trailer, if there is one -> store
//!                                  | the last piece waits here for it
//! ```
//!
//! A store writes an object when all announced bytes are there. So a body that is wrong at its end, by its length, a
//! checksum or a signature, is cut before its last piece, and the store writes nothing. (Of chunks, a header says the
//! length of their content, which is what the store is told: without the look here, what comes behind it would be left
//! out, and the client told that all is written.)
//!
//! A body that is announced as empty has no last piece, and the store none to wait for: it is read to its end before
//! the store is asked.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_util::stream::{self, Stream, StreamExt};
use s3s::checksum::ChecksumHasher;
use s3s::crypto::Checksum as _;
use s3s::{Body, S3Error, S3ErrorCode, S3Result, StdError, TrailingHeaders, s3_error};

use crate::chunks::SIGNED_TOO_LONG;

#[derive(Clone, Debug, Default)]
pub struct Fault(Arc<Mutex<Option<S3Error>>>);

impl Fault {
    pub fn take(&self) -> Option<S3Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set(&self, error: S3Error) -> StdError {
        let text = error.code().as_str().to_owned();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        text.into()
    }
}

#[derive(Debug)]
pub struct Trailer {
    name: String,
    values: TrailingHeaders,
}

impl Trailer {
    /// As the header `x-amz-trailer` announces it.
    ///
    /// # Errors
    /// `NotImplemented`: it is none that can be checked.
    pub fn announced(name: &str, values: TrailingHeaders) -> S3Result<Self> {
        let name = name.trim().to_ascii_lowercase();
        let refused = || s3_error!(NotImplemented, "The endpoint cannot check such a trailer.");
        hasher(&name).ok_or_else(refused)?;
        Ok(Self { name, values })
    }
}

fn hasher(trailer: &str) -> Option<ChecksumHasher> {
    let mut hasher = ChecksumHasher::default();
    match trailer.strip_prefix("x-amz-checksum-")? {
        "crc32" => hasher.crc32 = Some(s3s::crypto::Crc32::new()),
        "crc32c" => hasher.crc32c = Some(s3s::crypto::Crc32c::new()),
        "crc64nvme" => hasher.crc64nvme = Some(s3s::crypto::Crc64Nvme::new()),
        "sha1" => hasher.sha1 = Some(s3s::crypto::Sha1::new()),
        "sha256" => hasher.sha256 = Some(s3s::crypto::Sha256::new()),
        _ => return None,
    }
    Some(hasher)
}

struct Upload {
    body: Body,
    /// Bytes that are announced and have not come.
    left: u64,
    trailer: Option<HashedTrailer>,
    held: Option<Bytes>,
    fault: Fault,
}

impl Upload {
    async fn next(&mut self) -> Option<Result<Bytes, StdError>> {
        loop {
            match self.body.next().await {
                Some(Ok(bytes)) if bytes.is_empty() => {}
                Some(Ok(bytes)) => {
                    let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
                        return Some(Err(self.fault.set(incomplete())));
                    };
                    self.left = left;
                    if let Some(trailer) = &mut self.trailer {
                        trailer.hasher.update(&bytes);
                    }
                    if let Some(before) = self.held.replace(bytes) {
                        return Some(Ok(before));
                    }
                }
                Some(Err(error)) => return Some(Err(self.fault.set(error_of(&*error)))),
                None if self.left > 0 => return Some(Err(self.fault.set(incomplete()))),
                None => match self.trailer.take().map(HashedTrailer::check) {
                    Some(Err(error)) => return Some(Err(self.fault.set(error))),
                    Some(Ok(())) | None => return self.held.take().map(Ok),
                },
            }
        }
    }
}

/// A trailer, and the checksum of what came before it.
struct HashedTrailer {
    trailer: Trailer,
    hasher: ChecksumHasher,
}

impl HashedTrailer {
    fn check(self) -> S3Result<()> {
        let Self { trailer: Trailer { name, values }, hasher } = self;
        let told = values.take().and_then(|values| Some(values.get(&name)?.to_str().ok()?.trim().to_owned()));
        let is = hasher.finalize();
        let all = [
            is.checksum_crc32,
            is.checksum_crc32c,
            is.checksum_crc64nvme,
            is.checksum_sha1,
            is.checksum_sha256,
        ];
        match (told, all.into_iter().flatten().next()) {
            (Some(told), Some(is)) if told == is => Ok(()),
            (None, _) => Err(s3_error!(InvalidRequest, "The trailer {name} is missing.")),
            _ => Err(s3_error!(BadDigest, "The body is not what {name} says.")),
        }
    }
}

/// The S3 error of a body that broke off.
fn error_of(error: &(dyn std::error::Error + 'static)) -> S3Error {
    let has = |text| {
        // s3s has the error of what it reads from in a text alone.
        let mut causes = std::iter::successors(Some(error), |error| error.source());
        causes.any(|error| error.to_string().contains(text))
    };
    if has(SIGNED_TOO_LONG) {
        return s3_error!(InvalidRequest, "A signed chunk has at most 16 MiB; send shorter ones.");
    }
    if has("Sha256Mismatch") {
        let code = S3ErrorCode::Custom("XAmzContentSHA256Mismatch".into());
        let mut error = S3Error::with_message(code, "The body is not what x-amz-content-sha256 says.");
        error.set_status_code(hyper::StatusCode::BAD_REQUEST);
        return error;
    }
    incomplete()
}

fn incomplete() -> S3Error {
    s3_error!(IncompleteBody, "The body did not come as it was announced.")
}

/// A body of `len` bytes.
pub fn checked(
    body: Body,
    len: u64,
    trailer: Option<Trailer>,
    fault: Fault,
) -> impl Stream<Item = Result<Bytes, StdError>> + Send + 'static {
    let trailer =
        trailer.and_then(|trailer| hasher(&trailer.name).map(|hasher| HashedTrailer { trailer, hasher }));
    let upload = Upload { body, left: len, trailer, held: None, fault };
    stream::unfold(Some(upload), |upload| async move {
        let mut upload = upload?;
        let piece = upload.next().await?;
        let goes_on = piece.is_ok();
        Some((piece, goes_on.then_some(upload)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that pass of a body in these pieces, announced with that length, and the code of its fault.
    async fn sent(pieces: &[&'static str], len: u64) -> (String, Option<String>) {
        let pieces: Vec<_> = pieces
            .iter()
            .map(|piece| Ok::<_, StdError>(hyper::body::Frame::data(Bytes::from(*piece))))
            .collect();
        let body = Body::http_body_unsync(http_body_util::StreamBody::new(stream::iter(pieces)));
        let fault = Fault::default();
        let sent = checked(body, len, None, fault.clone()).filter_map(|piece| std::future::ready(piece.ok()));
        let sent: Vec<Bytes> = sent.collect().await;
        let code = fault.take().map(|fault| fault.code().as_str().to_owned());
        (String::from_utf8(sent.concat()).unwrap(), code)
    }

    /// 1. A client announces less content than its signed chunks have.
    /// 2. The store got as much as was announced, wrote it, and the client was told that all is well.
    #[tokio::test]
    async fn a_body_of_another_length_than_was_announced_never_reaches_the_store_in_whole() {
        assert_eq!(sent(&["ab", "", "cd"], 4).await, ("abcd".into(), None));
        assert_eq!(sent(&[], 0).await, (String::new(), None));
        for (pieces, len) in
            [(&["abcd"][..], 2), (&["ab", "cd"], 2), (&["a"], 0), (&["ab", "c"], 4), (&[], 1)]
        {
            let (sent, code) = sent(pieces, len).await;
            assert_eq!(code.as_deref(), Some("IncompleteBody"), "{pieces:?} as {len}");
            assert!(sent.len() < len.max(1) as usize, "{pieces:?} as {len}: {sent}");
        }
    }
}
