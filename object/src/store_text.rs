//! Store text: of what a store has answered, the part that errors and logs may have.
//!
//! ```text
//!   error of a request   .. returned non-2xx status code: 403 Forbidden: <Error><Code>Denied</Code>..<StringToSign>..
//!     -> shown           .. the answer was 403 Forbidden: Denied: No.
//!   a URL                https://user:word@host/key?sig=..    -> shown    https://host/key?..
//! ```
//!
//! The error of a request that a store has refused has the whole body of the answer. S3 and Azure write more there than
//! the reason: the access key, and the string that was signed, with all headers, a token of a session among them. Of
//! such a document, and of one in JSON, the code and the message are kept; of any other body, nothing. A URL may be
//! signed by its query, and name a user: both are left out.
//!
//! The texts of this crate's errors are shown by this, and so is each reason in an event of `quinion serve` and
//! `quinion s3`. An error's `source` has the store's own text, for programs that want it.
//!
//! Invariants:
//!  1. Nothing else of a body is shown, also if its end is missing.
//!  2. A text that is shown again stays as it is.

use std::error::Error;

/// How the crate `object_store` begins the text of a refused request, up to the status; the body is behind that.
const REFUSED: &str = "Server returned non-2xx status code: ";
/// How it begins the text of an answer that was no error by its status. The body follows.
const WRONG: &str = "Server returned error response: ";
/// A message is a sentence or two.
const REASON_CHARACTERS_MAX: usize = 500;

/// The text of an error without what is a secret, or may be: see the head of this file.
pub fn shown(text: &str) -> String {
    let refused = text.split_once(REFUSED).map(|(before, answer)| {
        let (status, body) = answer.split_once(": ").unwrap_or(("", answer));
        (before, status, body)
    });
    let wrong = text.split_once(WRONG).map(|(before, body)| (before, "", body));
    let document = document_at(text).map(|at| (&text[..at], &text[at..]));
    // All that follows the first of them may be a body.
    let answer = refused.into_iter().chain(wrong).min_by_key(|(before, ..)| before.len());
    let told = match (answer, document) {
        (Some((before, status, body)), document)
            if document.is_none_or(|(text, _)| before.len() < text.len()) =>
        {
            let is_plain = |c: &char| c.is_ascii_alphanumeric() || *c == ' ';
            let status: String = status.chars().take_while(is_plain).collect();
            let parts = [status.trim().to_owned(), reason_of(body)];
            let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            format!("{before}the answer was {}", parts.join(": "))
        }
        (_, Some((before, document))) => format!("{before}{}", reason_of(document)),
        (_, None) => text.into(),
    };
    without_queries(&told)
}

/// [`shown`], of the text of a store's error. Clients of HTTP say that they could not send a request, and why not only
/// in the innermost cause: that is added.
pub(crate) fn shown_of(error: &(dyn Error + 'static)) -> String {
    let (text, innermost) = (error.to_string(), causes(error).last().map(ToString::to_string));
    match innermost.filter(|cause| !text.contains(cause.as_str())) {
        Some(cause) => format!("{}: {}", shown(&text), shown(&cause)),
        None => shown(&text),
    }
}

/// The error and its causes, from the outermost on.
pub(crate) fn causes<'e>(
    error: &'e (dyn Error + 'static),
) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// Where the first tag, or the first object of JSON, begins.
fn document_at(text: &str) -> Option<usize> {
    let begins = |(at, first): &(usize, char)| {
        let rest = &text[at + first.len_utf8()..];
        match first {
            '<' => rest.starts_with(|next: char| next.is_ascii_alphabetic() || "?!/".contains(next)),
            '{' => rest.trim_start().starts_with('"'),
            _ => false,
        }
    };
    text.char_indices().find(begins).map(|(at, _)| at)
}

/// The code and the message of a body, and nothing of one without these.
pub(crate) fn reason_of(body: &str) -> String {
    if body.trim().is_empty() {
        return String::new();
    }
    let of_xml = ["Code", "Message"].into_iter().filter_map(|name| element(body, name));
    let of_json =
        ["code", "error", "message", "error_description"].into_iter().filter_map(|name| member(body, name));
    let found: Vec<_> = of_xml.chain(of_json).collect();
    match &found[..] {
        [] => "a document without a code".into(),
        found => found.join(": ").chars().take(REASON_CHARACTERS_MAX).collect(),
    }
}

/// The text of the first element of that name, if there are no others in it.
fn element<'d>(document: &'d str, name: &str) -> Option<&'d str> {
    let (_, rest) = document.split_once(&format!("<{name}>"))?;
    let (text, rest) = rest.split_at(rest.find('<')?);
    rest.starts_with(&format!("</{name}>")).then(|| text.trim()).filter(|text| !text.is_empty())
}

/// The first member of that name, if it is a string.
fn member<'d>(document: &'d str, name: &str) -> Option<&'d str> {
    let (_, rest) = document.split_once(&format!("\"{name}\""))?;
    let text = rest.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
    let is_end = |(at, _): &(usize, &str)| !text[..*at].ends_with('\\');
    let (end, _) = text.match_indices('"').find(is_end)?;
    Some(text[..end].trim()).filter(|text| !text.is_empty())
}

/// `text` with each URL up to its query, and without its user.
fn without_queries(text: &str) -> String {
    let (mut told, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + "://".len());
        let is_over = |c: char| c.is_whitespace() || "\"'<>`".contains(c);
        let (url, behind) = after.split_at(after.find(is_over).unwrap_or(after.len()));
        let (authority, path) = url.split_at(url.find(['/', '?', '#']).unwrap_or(url.len()));
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        told.extend([before, host]);
        match path.split_once(['?', '#']) {
            Some((path, _)) => told.extend([path, "?.."]),
            None => told.push_str(path),
        }
        rest = behind;
    }
    told + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSAL: &str = "<?xml version=\"1.0\"?>\n<Error><Code>SignatureDoesNotMatch</Code><Message>The signature is \
        not the key's.</Message><AWSAccessKeyId>AKIA</AWSAccessKeyId><StringToSign>AWS4\nx-amz-security-token:T\
        </StringToSign></Error>";
    const REASON: &str = "SignatureDoesNotMatch: The signature is not the key's.";

    /// As `object_store` writes it.
    fn refused(body: &str) -> String {
        format!("Error performing GET https://h/a<1 in 3ms - {REFUSED}403 Forbidden: {body}")
    }

    /// 1. A store refuses a fetch, and says in its answer by which key it was signed, and what.
    /// 2. The server's log had all of it.
    #[test]
    fn an_error_has_the_reason_and_no_key() {
        let before = "Error performing GET https://h/a<1 in 3ms - the answer was 403 Forbidden";
        assert_eq!(shown(&refused(REFUSAL)), format!("{before}: {REASON}"));
        assert_eq!(shown(&refused("")), before);
        assert_eq!(shown(&refused("Authorization: AKIA")), format!("{before}: a document without a code"));
        let json = "{ \"error\": {\"code\": 403, \"message\": \"It is \\\"no\\\".\", \"token\": \"T\"}}";
        assert_eq!(shown(&refused(json)), format!("{before}: It is \\\"no\\\"."));
        assert_eq!(shown(&format!("{WRONG}{REFUSAL}")), format!("the answer was {REASON}"));
        assert_eq!(shown("cannot read {a} of \u{e9}<1: {}"), "cannot read {a} of \u{e9}<1: {}");
    }

    #[test]
    fn a_document_that_is_cut_or_of_another_kind_shows_nothing_else() {
        for end in (0..=REFUSAL.len()).filter(|end| REFUSAL.is_char_boundary(*end)) {
            for text in [refused(&REFUSAL[..end]), format!("403: {}", &REFUSAL[..end])] {
                let shown = shown(&text);
                assert!(!["AKIA", "AWS4", ":T"].iter().any(|secret| shown.contains(secret)), "{shown}");
            }
        }
        assert_eq!(shown("503: <!DOCTYPE html><p>AKIA"), "503: a document without a code");
        assert_eq!(shown("<Code><Key>AKIA</Key></Code><Message>m</Message>"), "m");
        assert_eq!(shown("it said {\"secret\":\"AKIA\"} twice"), "it said a document without a code");
    }

    #[test]
    fn a_url_has_neither_its_query_nor_a_user() {
        let text = "GET https://user:word@host:1/a@b?sv=1&sig=S in 3ms, of s3://b/c#d";
        assert_eq!(shown(text), "GET https://host:1/a@b?.. in 3ms, of s3://b/c?..");
        assert_eq!(shown("(see http://user@host) ://"), "(see http://host) ://");
    }

    /// An error is shown where it is made, and where an event has it.
    #[test]
    fn a_text_that_is_shown_again_stays_as_it_is() {
        let unknown = format!("{REFUSED}499 <unknown status code>: {REFUSAL}");
        let twice = format!("{} - {}", refused(REFUSAL), refused("x"));
        for text in [refused(REFUSAL), refused(""), refused("AKIA"), unknown, twice, "https://h/?a".into()] {
            let once = shown(&text);
            assert_eq!(shown(&once), once, "{text}");
            assert!(!once.contains("AKIA"), "{once}");
        }
    }
}
