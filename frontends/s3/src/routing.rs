//! Routing: what a request is for, by its method, path and query.
//!
//! ```text
//!   GET, HEAD of an object, of its current version             the cache
//!   GET of a version, a part, lists, uploads, tags             the store: reads
//!   PUT, POST, DELETE of objects, parts, uploads, tags         the store: writes
//!   buckets that come and go, policies, access lists, ...      not implemented
//! ```
//!
//! Only what is named here reaches a store: a client has the endpoint's rights on objects, and none on buckets.

use hyper::Method;
use percent_encoding::percent_decode_str;
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RoutedRequest {
    Cached,
    Store(Access, Answer),
}

/// Whether the request changes objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Reads,
    Writes,
}

/// The kind of the store's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    Data,
    Document,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target {
    pub bucket: String,
    pub key: Option<String>,
}

impl Target {
    /// The target that a URL's path names.
    ///
    /// # Errors
    /// `InvalidURI`.
    pub fn of(path: &str) -> S3Result<Self> {
        let path = percent_decode_str(path).decode_utf8().map_err(|_| s3_error!(InvalidURI))?;
        let path = path.strip_prefix('/').unwrap_or(&path);
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let key = (!key.is_empty()).then(|| key.to_owned());
        Ok(Self { bucket: bucket.to_owned(), key })
    }
}

pub type Query = Vec<(String, String)>;

/// The query without parameters that only sign the request or name its operation.
pub fn query_of(query: Option<&str>) -> Query {
    const SIGNS: [&str; 9] = [
        "X-Amz-Algorithm",
        "X-Amz-Credential",
        "X-Amz-Date",
        "X-Amz-Expires",
        "X-Amz-SignedHeaders",
        "X-Amz-Signature",
        "X-Amz-Security-Token",
        "X-Amz-Content-Sha256",
        "x-id",
    ];
    let pairs = form_urlencoded::parse(query.unwrap_or_default().as_bytes()).into_owned();
    pairs.filter(|(name, _)| !SIGNS.contains(&name.as_str())).collect()
}

/// Parameters of a GET that change its answer's headers alone.
pub const OVERRIDES: [(&str, &str); 6] = [
    ("response-cache-control", "cache-control"),
    ("response-content-disposition", "content-disposition"),
    ("response-content-encoding", "content-encoding"),
    ("response-content-language", "content-language"),
    ("response-content-type", "content-type"),
    ("response-expires", "expires"),
];

/// Parameters of a bucket's lists.
const LISTS: [&str; 18] = [
    "list-type",
    "prefix",
    "delimiter",
    "max-keys",
    "marker",
    "continuation-token",
    "start-after",
    "encoding-type",
    "fetch-owner",
    "versions",
    "key-marker",
    "version-id-marker",
    "uploads",
    "upload-id-marker",
    "max-uploads",
    "location",
    "allow-unordered",
    "optional-object-attributes",
];

/// Where it is answered.
///
/// # Errors
/// `NotImplemented`, `MethodNotAllowed`.
pub fn route(method: &Method, target: &Target, query: &Query) -> S3Result<RoutedRequest> {
    use {Access::*, Answer::*};
    let only = |names: &[&str]| query.iter().all(|(name, _)| names.contains(&name.as_str()));
    let has = |name: &str| query.iter().any(|(other, _)| other == name);
    let reads = Ok(RoutedRequest::Store(Reads, Document));
    let writes = Ok(RoutedRequest::Store(Writes, Document));
    let is_override = |name: &String| OVERRIDES.iter().any(|(other, _)| other == name);
    match (method, &target.key) {
        (&Method::GET, None) if only(&LISTS) => reads,
        (&Method::HEAD, None) if query.is_empty() => reads,
        (&Method::POST, None) if only(&["delete"]) && has("delete") => writes,
        (&Method::GET | &Method::HEAD, Some(_)) if query.iter().all(|(name, _)| is_override(name)) => {
            Ok(RoutedRequest::Cached)
        }
        (&Method::GET | &Method::HEAD, Some(_))
            if query.iter().all(|(name, _)| {
                is_override(name) || ["versionId", "partNumber"].contains(&name.as_str())
            }) =>
        {
            Ok(RoutedRequest::Store(Reads, Data))
        }
        (&Method::GET, Some(_))
            if only(&["uploadId", "max-parts", "part-number-marker", "encoding-type"]) && has("uploadId") =>
        {
            reads
        }
        (&Method::GET, Some(_)) if only(&["tagging", "attributes", "versionId"]) => reads,
        (&Method::PUT, Some(_)) if only(&["partNumber", "uploadId"]) || only(&["tagging", "versionId"]) => {
            writes
        }
        (&Method::POST, Some(_)) if only(&["uploads"]) && has("uploads") => writes,
        (&Method::POST, Some(_)) if only(&["uploadId"]) && has("uploadId") => writes,
        (&Method::DELETE, Some(_)) if only(&["versionId", "tagging"]) || only(&["uploadId"]) => writes,
        (&Method::GET | &Method::HEAD | &Method::PUT | &Method::POST | &Method::DELETE, _) => {
            let text = "The endpoint serves objects and lists of them, and not this operation.";
            Err(S3Error::with_message(S3ErrorCode::NotImplemented, text))
        }
        _ => Err(s3_error!(MethodNotAllowed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(method: Method, url: &str) -> Result<RoutedRequest, String> {
        let (path, query) = url.split_once('?').map_or((url, None), |(path, query)| (path, Some(query)));
        let target = Target::of(path).unwrap();
        route(&method, &target, &query_of(query)).map_err(|error| error.code().as_str().to_owned())
    }

    #[test]
    fn an_object_is_the_caches_and_a_version_of_it_the_stores() {
        use {Access::*, Answer::*};
        for url in ["/b/k", "/b/k?x-id=GetObject", "/b/k?response-content-type=a", "/b/k?X-Amz-Signature=1"] {
            assert_eq!(of(Method::GET, url), Ok(RoutedRequest::Cached), "{url}");
            assert_eq!(of(Method::HEAD, url), Ok(RoutedRequest::Cached), "{url}");
        }
        assert_eq!(of(Method::GET, "/b/k?versionId=1"), Ok(RoutedRequest::Store(Reads, Data)));
        assert_eq!(of(Method::HEAD, "/b/k?partNumber=2"), Ok(RoutedRequest::Store(Reads, Data)));
        for url in ["/b", "/b/", "/b?list-type=2&prefix=a%2Fb&delimiter=/", "/b?uploads", "/b?location"] {
            assert_eq!(of(Method::GET, url), Ok(RoutedRequest::Store(Reads, Document)), "{url}");
        }
        for (method, url) in [
            (Method::PUT, "/b/k"),
            (Method::PUT, "/b/k?partNumber=1&uploadId=u"),
            (Method::POST, "/b/k?uploads"),
            (Method::POST, "/b/k?uploadId=u"),
            (Method::POST, "/b?delete"),
            (Method::DELETE, "/b/k?versionId=1"),
            (Method::DELETE, "/b/k?uploadId=u"),
        ] {
            assert_eq!(of(method, url), Ok(RoutedRequest::Store(Writes, Document)), "{url}");
        }
    }

    #[test]
    fn requests_about_buckets_and_rights_reach_no_store() {
        for (method, url) in [
            (Method::PUT, "/b"),
            (Method::DELETE, "/b"),
            (Method::GET, "/b?policy"),
            (Method::PUT, "/b?acl"),
            (Method::GET, "/b?list-type=2&acl"),
            (Method::PUT, "/b/k?acl"),
            (Method::GET, "/b/k?acl"),
            (Method::GET, "/b/k?versionId=1&acl"),
            (Method::PUT, "/b/k?uploadId=u&retention"),
            (Method::POST, "/b/k"),
            (Method::POST, "/b"),
            (Method::DELETE, "/b/k?uploadId=u&versionId=1"),
        ] {
            assert_eq!(of(method, url), Err("NotImplemented".into()), "{url}");
        }
        assert_eq!(of(Method::PATCH, "/b/k"), Err("MethodNotAllowed".into()));
    }

    #[test]
    fn a_path_is_a_bucket_and_a_key_as_it_is() {
        let key = |path| Target::of(path).unwrap().key;
        assert_eq!((key("/b"), key("/b/")), (None, None));
        assert_eq!(key("/b//a%2Fb/../c+d%25/"), Some("/a/b/../c+d%/".into()));
        assert!(Target::of("/b/%ff").is_err());
    }
}
