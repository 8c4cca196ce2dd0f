//! Signed URL: headers of S3's in the query of a URL that is signed.
//!
//! ```text
//!   PUT /bucket/key?X-Amz-Signature=..&x-amz-meta-a=b     as if the request had the header x-amz-meta-a: b
//! ```
//!
//! SDKs for JavaScript and Go put them there, with their names in any case. The URL's signature covers the whole query.

use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use s3s::{S3Result, s3_error};

use crate::routing::Query;
use crate::upstream::is_passed_on;

/// Takes headers out of the query.
///
/// # Errors
/// `InvalidArgument`: a value is none of a header, or the request has another one in its headers.
pub fn headers_from_query(query: &mut Query, headers: &mut HeaderMap) -> S3Result<()> {
    let is_header = |name: &str| name.starts_with("x-amz-") && is_passed_on(name);
    let found = query.extract_if(.., |(name, _)| is_header(&name.to_ascii_lowercase()));
    for (name, value) in found {
        let refused = || s3_error!(InvalidArgument, "{name} in the URL cannot be taken as a header.");
        let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| refused())?;
        let header = HeaderName::from_bytes(name.as_bytes()).map_err(|_| refused())?;
        if headers.get_all(&header).iter().any(|other| *other != value) {
            return Err(refused());
        }
        headers.insert(header, value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hyper::Method;

    use super::*;
    use crate::routing::{RoutedRequest, Target, query_of, route};

    /// 1. A client signs a URL by the SDK for JavaScript, which moves its headers into the query.
    /// 2. The endpoint answered that it has no such operation.
    #[test]
    fn headers_in_a_signed_url_are_headers() {
        let taken = |query: &str, mut headers: HeaderMap| {
            let mut query = query_of(Some(query));
            let result = headers_from_query(&mut query, &mut headers);
            result.map(|()| (query, headers)).map_err(|error| error.code().as_str().to_owned())
        };
        let signs = "X-Amz-Algorithm=a&X-Amz-Date=b&X-Amz-Content-Sha256=UNSIGNED-PAYLOAD&X-Amz-Signature=c";
        let url = format!("{signs}&x-amz-checksum-mode=ENABLED&X-Amz-Meta-A=b%20%2B&x-id=GetObject");
        let (query, headers) = taken(&url, HeaderMap::new()).unwrap();
        assert_eq!((query, headers.len()), (vec![], 2));
        assert_eq!(
            (&headers["x-amz-checksum-mode"], &headers["x-amz-meta-a"]),
            (&"ENABLED".parse().unwrap(), &"b +".parse().unwrap())
        );
        let target = Target::of("/b/k").unwrap();
        assert!(matches!(route(&Method::GET, &target, &vec![]), Ok(RoutedRequest::Cached)));
        // The same in both places is one header; another one is none that was signed.
        let own = || HeaderMap::from_iter([("x-amz-acl".parse().unwrap(), "private".parse().unwrap())]);
        assert_eq!(taken("x-amz-acl=private", own()).unwrap().1.len(), 1);
        for url in [
            "x-amz-acl=public-read",
            "x-amz-acl=private&X-Amz-Acl=public-read",
            "x-amz-meta-%C3%A4=a",
            "x-amz-meta-a=b%0Ac",
        ] {
            assert_eq!(taken(url, own()).unwrap_err(), "InvalidArgument", "{url}");
        }
        // No header of the request's signature or of its chunks comes from the query.
        let (query, headers) =
            taken("x-amz-date=a&x-amz-trailer=b&versionId=c&acl", HeaderMap::new()).unwrap();
        assert_eq!((query.len(), headers.len()), (4, 0));
    }
}
