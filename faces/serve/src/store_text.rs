//! Store text: what a store has answered, as a log may have it.
//!
//! The error of a request that a store has refused has the whole body of the answer. S3 and Azure write more there than
//! the reason: the access key, and the string that was signed, with all headers, a token of a session among them. Of
//! such a document the code and the message are kept; of a page of HTML, nothing.
//!
//! Invariant: nothing else of a document is shown, also if its end is missing.

/// An error's text, whose documents are left out, but for their reason.
pub fn shown(text: &str) -> String {
    let Some(at) = document_at(text) else { return text.into() };
    let (before, document) = text.split_at(at);
    // How often it was tried stands behind the document.
    let after = document.rfind(" (after ").map_or("", |at| &document[at..]);
    let after = if after.ends_with(" ms)") && document_at(after).is_none() { after } else { "" };
    let reason: Vec<_> = ["Code", "Message"].into_iter().filter_map(|name| element(document, name)).collect();
    let reason = if reason.is_empty() { "a document without a code".into() } else { reason.join(": ") };
    format!("{before}{reason}{after}")
}

/// Where its first tag begins.
fn document_at(text: &str) -> Option<usize> {
    let is_tag = |at: &usize| {
        let next = text[at + 1..].chars().next();
        next.is_some_and(|next| next.is_ascii_alphabetic() || "?!/".contains(next))
    };
    text.match_indices('<').map(|(at, _)| at).find(is_tag)
}

/// The text of its first element of that name, if there are no others in it.
fn element<'d>(document: &'d str, name: &str) -> Option<&'d str> {
    let (_, rest) = document.split_once(&format!("<{name}>"))?;
    let (text, rest) = rest.split_at(rest.find('<')?);
    rest.starts_with(&format!("</{name}>")).then(|| text.trim()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: &str = "<?xml version=\"1.0\"?>\n<Error><Code>SignatureDoesNotMatch</Code><Message>The signature is \
        not the key's.</Message><AWSAccessKeyId>AKIA</AWSAccessKeyId><StringToSign>AWS4\nx-amz-security-token:T\
        </StringToSign></Error>";

    /// 1. A store refuses a fetch, and says in its answer by which key it was signed, and what.
    /// 2. The server's log had all of it.
    #[test]
    fn a_log_has_the_reason_and_no_key() {
        let before = "cannot fetch bytes 0 to 9 of a<1: the store said: 403 Forbidden: ";
        let reason = "SignatureDoesNotMatch: The signature is not the key's.";
        assert_eq!(shown(&format!("{before}{REFUSED}")), format!("{before}{reason}"));
        let tried = format!("{before}{REFUSED} (after 3 GETs in 12 ms)");
        assert_eq!(shown(&tried), format!("{before}{reason} (after 3 GETs in 12 ms)"));
        assert_eq!(shown(before), before);
    }

    #[test]
    fn a_document_that_is_cut_or_of_another_kind_shows_nothing_else() {
        for end in (0..=REFUSED.len()).filter(|end| REFUSED.is_char_boundary(*end)) {
            let shown = shown(&format!("403: {} (after 3 GETs in 12 ms)", &REFUSED[..end]));
            assert!(!["AKIA", "AWS4", ":T"].iter().any(|secret| shown.contains(secret)), "{shown}");
        }
        assert_eq!(shown("503: <!DOCTYPE html><p>AKIA"), "503: a document without a code");
        assert_eq!(shown("<Code><Key>AKIA</Key></Code><Message>m</Message>"), "m");
    }
}
