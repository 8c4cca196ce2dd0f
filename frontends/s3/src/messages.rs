//! Messages: a sentence for people in each error that has none: S3's clients show a code and a message.
//!
//! The library that reads requests, and the reads of the cache, answer many errors by their code alone. Here each
//! document of an error is seen before it is sent. Sentences depend on the code alone, so they have no key, no
//! signature and no name.

use hyper::header::{CONTENT_LENGTH, HeaderValue};
use hyper::{Response, StatusCode};
use s3s::Body;

/// The mistake, and the remedy.
const MESSAGES: [(&str, &str); 15] = [
    (
        "AccessDenied",
        "The request has no signature, or is not allowed. Sign it with a key of the endpoint's key file.",
    ),
    ("AuthorizationHeaderMalformed", "The Authorization header cannot be read. Sign by version 4."),
    ("EntityTooLarge", "The body is larger than the endpoint takes. Upload it in parts."),
    ("InternalError", "The endpoint failed. Its log may say why."),
    ("InvalidAccessKeyId", "The endpoint has no such access key. Use a pair of its key file."),
    ("InvalidArgument", "A header or parameter is wrong."),
    ("InvalidRange", "The object does not have these bytes. Ask for a range within its size."),
    ("MissingContentLength", "The request does not say how long its body is. Send Content-Length."),
    (
        "NoSuchBucket",
        "The endpoint does not serve this bucket. Start it with another --store, or name one of its own.",
    ),
    ("NoSuchKey", "The bucket has no object of this key."),
    (
        "NotImplemented",
        "The endpoint does not answer such requests; its documentation lists those that it does.",
    ),
    ("PreconditionFailed", "The object is not what a condition of the request asks for."),
    ("RequestTimeTooSkewed", "The clocks of client and endpoint differ by too much. Set the client's."),
    (
        "SignatureDoesNotMatch",
        "The signature is not that of this request by the secret of this access key. Check the secret, and that \
         nothing has changed the request on its way.",
    ),
    ("XAmzContentSHA256Mismatch", "The body is not the one that was signed."),
];
const OTHERS: &str = "The endpoint refused the request.";

/// The answer, with a message if it is an error in a document that has none.
pub fn with_message(mut response: Response<Body>) -> Response<Body> {
    if response.status() < StatusCode::BAD_REQUEST {
        return response;
    }
    let Some(text) = response.body().bytes().and_then(|document| add_message(&document)) else {
        return response;
    };
    if response.headers().contains_key(CONTENT_LENGTH) {
        response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(text.len()));
    }
    *response.body_mut() = Body::from(text);
    response
}

/// The document with a message behind the code. `None`: it is none of an error, or has a message.
fn add_message(document: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(document).ok()?;
    let (before, rest) = text.split_once("<Error><Code>")?;
    let (code, rest) = rest.split_once("</Code>")?;
    if rest.contains("<Message>") {
        return None;
    }
    let message = MESSAGES.iter().find(|(known, _)| *known == code).map_or(OTHERS, |(_, message)| message);
    Some(format!("{before}<Error><Code>{code}</Code><Message>{message}</Message>{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_without_a_message_gets_that_of_its_code() {
        let of = |text: &str| add_message(text.as_bytes());
        let given = of("<?xml?><Error><Code>NoSuchKey</Code><RequestId>1</RequestId></Error>").unwrap();
        assert!(
            given.starts_with("<?xml?><Error><Code>NoSuchKey</Code><Message>The bucket has no"),
            "{given}"
        );
        assert!(given.ends_with("</Message><RequestId>1</RequestId></Error>"), "{given}");
        assert!(of("<Error><Code>Other</Code></Error>").unwrap().contains(OTHERS));
        for text in ["", "<Error><Code>NoSuchKey</Code><Message>m</Message></Error>", "<a><Code>b</Code></a>"]
        {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
