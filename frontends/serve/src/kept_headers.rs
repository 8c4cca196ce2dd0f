//! Kept headers: what S3 tells of an object and the crate `object_store` does not, as attributes that come through it.
//!
//! ```text
//!   answer of the store          Expires: Fri, 01 Jan 2027 00:00:00 GMT      Content-Disposition: inline; .. (Latin-1)
//!     -> `Connector`             x-amz-meta-quinion-kept-expires: 4672692c..   x-amz-meta-quinion-kept-con..: 696e..
//!     -> object_store, a cache, a server: metadata of a user's, as any
//!     -> a client's store       left out, unless it asks for them (`ClientStoreBuilder::kept_headers`)
//!   answer of the endpoint       `header_of` makes the header of it again
//! ```
//!
//! The crate has no attribute for `Expires`, nor reads a storage class. Of a value that is not ASCII it makes an error
//! of the whole answer, so that such an object could not be read at all.
//!
//! Invariants:
//!  1. A header is kept as it is, byte by byte: its value is written in hexadecimal digits.
//!  2. No user's metadata is taken for a kept header: metadata whose name looks so is kept as well, under another name.
//!
//! Stores of other kinds have no endpoint; of their answers only the values that would be errors are left out.

use std::pin::Pin;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use quinion_service::ClientStore;

/// The beginning of the names of users' metadata at S3.
const METADATA: &str = "x-amz-meta-";
/// The beginning of a kept header's name, behind [`METADATA`].
const KEPT: &str = ClientStore::KEPT_HEADER;

/// Whether the crate has no attribute for it: headers that tell of a version, and not of the account or its settings.
fn is_unread(name: &HeaderName) -> bool {
    name == header::EXPIRES
        || ["x-amz-missing-meta", "x-amz-storage-class", "x-amz-website-redirect-location"]
            .contains(&name.as_str())
}

/// Whether the crate reads the header as text.
fn is_text(name: &HeaderName) -> bool {
    const READ: [HeaderName; 5] = [
        header::CACHE_CONTROL,
        header::CONTENT_DISPOSITION,
        header::CONTENT_ENCODING,
        header::CONTENT_LANGUAGE,
        header::CONTENT_TYPE,
    ];
    let users = [METADATA, "x-goog-meta-", "x-ms-meta-"];
    READ.contains(name) || users.iter().any(|prefix| name.as_str().starts_with(prefix))
}

fn is_ascii(value: &HeaderValue) -> bool {
    value.to_str().is_ok()
}

/// Connects to stores, and keeps the headers of their answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Connector {
    /// To stores that speak S3's protocol.
    Keeping,
    /// To others: headers that would be errors are left out.
    LeavingOut,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Service { connector: *self, client }))
    }
}

#[derive(Debug)]
struct Service {
    connector: Connector,
    client: HttpClient,
}

type Answer = Result<HttpResponse, HttpError>;

impl HttpService for Service {
    fn call<'s, 'f>(&'s self, request: HttpRequest) -> Pin<Box<dyn Future<Output = Answer> + Send + 'f>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let mut response = self.client.execute(request).await?;
            let headers = std::mem::take(response.headers_mut());
            *response.headers_mut() = self.connector.changed(headers);
            Ok(response)
        })
    }
}

impl Connector {
    fn changed(self, headers: HeaderMap) -> HeaderMap {
        let reserved = [METADATA, KEPT].concat();
        let is_kept = |name: &HeaderName, value: &HeaderValue| {
            (is_text(name) && !is_ascii(value))
                || self == Self::Keeping && (is_unread(name) || name.as_str().starts_with(&reserved))
        };
        if !headers.iter().any(|(name, value)| is_kept(name, value)) {
            return headers;
        }
        let mut changed = HeaderMap::new();
        for (name, value) in &headers {
            if !is_kept(name, value) {
                changed.append(name, value.clone());
            } else if let (Self::Keeping, Ok(kept)) =
                (self, format!("{reserved}{name}").parse::<HeaderName>())
            {
                let digits: String = value.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
                changed.append(kept, HeaderValue::try_from(digits).expect("digits are a header's value"));
            }
        }
        changed
    }
}

/// The header that metadata of an object is, by its name without `x-amz-meta-`: one that was kept, or the user's own.
/// `None` if it cannot be a header.
pub fn header_of(metadata: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    match metadata.strip_prefix(KEPT) {
        Some(name) => Some((name.parse().ok()?, HeaderValue::from_bytes(&bytes_of(value)?).ok()?)),
        None => Some((format!("{METADATA}{metadata}").parse().ok()?, HeaderValue::from_str(value).ok()?)),
    }
}

fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    let pairs = (0..digits.len()).step_by(2).map(|at| digits.get(at..at + 2));
    pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &[u8])]) -> HeaderMap {
        let pair = |(name, value): &(&str, &[u8])| {
            (name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value).unwrap())
        };
        pairs.iter().map(pair).collect()
    }

    /// As the crate and the endpoint do.
    fn through(headers: HeaderMap) -> HeaderMap {
        let changed = Connector::Keeping.changed(headers);
        let back = changed.iter().map(|(name, value)| match name.as_str().strip_prefix(METADATA) {
            Some(metadata) => header_of(metadata, value.to_str().unwrap()).unwrap(),
            None => (name.clone(), value.clone()),
        });
        back.collect()
    }

    #[test]
    fn headers_of_all_bytes_come_through_as_they_were() {
        let all = headers(&[
            ("etag", b"\"a\""),
            ("expires", b"Fri, 01 Jan 2027 00:00:00 GMT"),
            ("content-disposition", "inline; filename=\"\u{e9}\"".as_bytes()),
            ("content-type", b"text/plain"),
            ("x-amz-storage-class", b"GLACIER"),
            ("x-amz-meta-plain", b"100%"),
            ("x-amz-meta-latin", b"caf\xe9"),
            ("x-amz-meta-quinion-kept-expires", b"the user's own"),
            ("x-amz-meta-quinion-kept-quinion-kept-x", b"\xff"),
        ]);
        let changed = Connector::Keeping.changed(all.clone());
        assert!(changed.iter().all(|(_, value)| is_ascii(value)), "{changed:?}");
        assert!(!changed.contains_key("expires") && changed["etag"] == "\"a\"");
        assert_eq!(through(all.clone()), all);
    }

    #[test]
    fn answers_of_other_stores_keep_the_headers_that_can_be_read() {
        let all = headers(&[("expires", b"0"), ("content-type", b"\xff"), ("x-goog-meta-a", b"\xe9")]);
        assert_eq!(Connector::LeavingOut.changed(all), headers(&[("expires", b"0")]));
    }

    #[test]
    fn text_that_is_no_kept_value_is_no_header() {
        for text in ["0", "0g", "\u{e9}\u{e9}", "0a", "00"] {
            assert_eq!(header_of("quinion-kept-expires", text), None, "{text}");
        }
        assert_eq!(header_of("quinion-kept-a b", "41"), None);
    }
}
