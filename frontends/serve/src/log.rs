//! Log: a line on standard error for each event, for people or as JSON.
//!
//! A log without a reader does not end the server: what cannot be written is dropped.
//!
//! A reason (`why`) may be a store's answer, or have an address that is signed, and logs are kept where others read
//! them. So each reason is shown by `store_text.rs` of `quinion-object`.

use std::fmt::Write as _;
use std::io::Write as _;

use quinion_object::internals::shown;

/// The value of an event that is a reason.
const REASON: &str = "why";

/// In which form events are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// `quinion-serve: listening at="/run/..."`
    Text,
    /// One object of JSON.
    Json,
}

/// A writer of events.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    /// The program of these events.
    pub program: &'static str,
    /// In which form they are written.
    pub form: Form,
}

impl Log {
    /// Writes one event with its values. Of a reason, `why`, it has no secret of a store's.
    pub fn event(self, event: &str, values: &[(&str, &str)]) {
        let line = self.line(event, values);
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    fn line(self, event: &str, values: &[(&str, &str)]) -> String {
        let written =
            |key: &str, value: &str| if key == REASON { quoted(&shown(value)) } else { quoted(value) };
        let pairs = [("event", event)].into_iter().chain(values.iter().copied());
        match self.form {
            Form::Text => {
                let values: String =
                    values.iter().map(|(key, value)| format!(" {key}={}", written(key, value))).collect();
                format!("{}: {event}{values}\n", self.program)
            }
            Form::Json => {
                let pairs: Vec<_> =
                    pairs.map(|(key, value)| format!("{}:{}", quoted(key), written(key, value))).collect();
                format!("{{{}}}\n", pairs.join(","))
            }
        }
    }
}

/// A string of JSON.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            '\n' => quoted.push_str("\\n"),
            c if c.is_control() => write!(quoted, "\\u{:04x}", u32::from(c)).expect("a string takes it"),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_with_any_bytes_in_its_values() {
        let values = [("why", "a\n\"b\"\\\u{1}")];
        let log = |form| Log { program: "quinion-serve", form };
        let json = log(Form::Json).line("failed", &values);
        assert_eq!(json, "{\"event\":\"failed\",\"why\":\"a\\n\\\"b\\\"\\\\\\u0001\"}\n");
        let text = log(Form::Text).line("failed", &values);
        assert_eq!(text, "quinion-serve: failed why=\"a\\n\\\"b\\\"\\\\\\u0001\"\n");
    }

    #[test]
    fn a_reason_has_no_secret_in_either_form() {
        let refused = "Server returned non-2xx status code: 403 Forbidden: <Error><Key>AKIA</Key></Error>";
        for why in [refused, "cannot reach https://user:AKIA@host", "cannot reach https://host/a?sig=AKIA"] {
            for form in [Form::Text, Form::Json] {
                let line = Log { program: "quinion-serve", form }
                    .line("failed", &[("store", "s3://b"), ("why", why)]);
                assert!(!line.contains("AKIA") && line.contains("s3://b"), "{line}");
            }
        }
    }
}
