//! Message: what a runner and the owner of a kept cache send each other, one line of JSON at a time.
//!
//! ```text
//!   {"ask":"join","protocol":1,"version":"0.1.0",...}
//!                                     {"answer":"joined","process":77,"run":3,...}
//! ```
//!
//! Flat: names, each with a whole number or a text. A reader skips unknown names, and refuses a message that lacks a
//! name it needs. So later versions can send more, and earlier ones can still stop them.
//!
//! Invariant: what [`Message::line`] writes, [`Message::parse`] reads unchanged; anything else it refuses, or reads as
//! some message, and never more.

use std::fmt::Write as _;

use crate::report::{Form, Report, Value};

/// Bytes of the longest line that is listened to.
pub const LINE_MAX: usize = 1 << 20;

#[derive(Clone, PartialEq, Eq, Debug)]
enum MessageValue {
    Number(u64),
    Text(String),
}

/// Named values, in order.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Message(Vec<(String, MessageValue)>);

impl Message {
    pub fn ask(what: &str) -> Self {
        Self::default().text("ask", what)
    }
    pub fn answer(what: &str) -> Self {
        Self::default().text("answer", what)
    }
    #[must_use]
    pub fn number(mut self, name: &str, number: u64) -> Self {
        self.0.push((name.to_owned(), MessageValue::Number(number)));
        self
    }
    #[must_use]
    pub fn text(mut self, name: &str, text: &str) -> Self {
        self.0.push((name.to_owned(), MessageValue::Text(text.to_owned())));
        self
    }

    /// Adds bytes, as a text of hexadecimal digits.
    #[must_use]
    pub fn bytes(self, name: &str, bytes: &[u8]) -> Self {
        let mut text = String::with_capacity(2 * bytes.len());
        bytes.iter().for_each(|byte| write!(text, "{byte:02x}").expect("a string takes it"));
        self.text(name, &text)
    }

    fn get(&self, name: &str) -> Option<&MessageValue> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, word)| word)
    }
    pub fn number_of(&self, name: &str) -> Option<u64> {
        match self.get(name)? {
            MessageValue::Number(number) => Some(*number),
            MessageValue::Text(_) => None,
        }
    }
    pub fn text_of(&self, name: &str) -> Option<&str> {
        match self.get(name)? {
            MessageValue::Text(text) => Some(text),
            MessageValue::Number(_) => None,
        }
    }
    pub fn bytes_of(&self, name: &str) -> Option<Vec<u8>> {
        let digits = self.text_of(name)?.as_bytes();
        let value = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
        let byte = |pair: &[u8]| Some(value(pair[0])? << 4 | value(*pair.get(1)?)?);
        digits.chunks(2).map(byte).collect()
    }
    /// Whether it is the question `what`.
    pub fn asks(&self, what: &str) -> bool {
        self.text_of("ask") == Some(what)
    }
    /// Whether it is the answer `what`.
    pub fn answers(&self, what: &str) -> bool {
        self.text_of("answer") == Some(what)
    }

    /// The message as one line, with its end.
    pub fn line(&self) -> String {
        let mut line = String::from("{");
        for (place, (name, word)) in self.0.iter().enumerate() {
            let comma = if place > 0 { "," } else { "" };
            let value = match word {
                MessageValue::Number(number) => Value::Number(*number),
                MessageValue::Text(text) => Value::Text(text.clone()),
            };
            write!(line, "{comma}\"{name}\":{}", json(value)).expect("a string takes it");
        }
        line + "}\n"
    }

    /// Reads a line without its end; `None` if it is no message.
    pub fn parse(line: &str) -> Option<Self> {
        let mut rest = line.trim().strip_prefix('{')?.strip_suffix('}')?;
        let mut message = Self::default();
        while !rest.is_empty() {
            if !message.0.is_empty() {
                rest = rest.strip_prefix(',')?;
            }
            let (name, after) = text_at(rest)?;
            let (word, after) = word_at(after.strip_prefix(':')?)?;
            message.0.push((name, word));
            rest = after;
        }
        Some(message)
    }
}

/// All JSON of the command is written in one place.
fn json(value: Value) -> String {
    let mut report = Report::new();
    report.add("", "", value);
    let line = report.printed(Form::Json);
    line["{\"\":".len()..line.len() - "}\n".len()].to_owned()
}

fn word_at(from: &str) -> Option<(MessageValue, &str)> {
    if from.starts_with('"') {
        let (text, after) = text_at(from)?;
        return Some((MessageValue::Text(text), after));
    }
    let end = from.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(from.len());
    Some((MessageValue::Number(from[..end].parse().ok()?), &from[end..]))
}

fn text_at(from: &str) -> Option<(String, &str)> {
    let mut letters = from.strip_prefix('"')?.chars();
    let mut text = String::new();
    loop {
        match letters.next()? {
            '"' => return Some((text, letters.as_str())),
            '\\' => text.push(escaped(&mut letters)?),
            letter => text.push(letter),
        }
    }
}

fn escaped(letters: &mut std::str::Chars<'_>) -> Option<char> {
    match letters.next()? {
        letter @ ('"' | '\\' | '/') => Some(letter),
        'n' => Some('\n'),
        't' => Some('\t'),
        'u' => {
            let (code, after) = letters.as_str().split_at_checked(4)?;
            *letters = after.chars();
            char::from_u32(u32::from_str_radix(code, 16).ok()?)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_written_message_is_read_back_unchanged(
            words in prop::collection::vec(("[a-z_]{1,8}", prop_oneof![
                any::<u64>().prop_map(MessageValue::Number), any::<String>().prop_map(MessageValue::Text)]), 0..8)
        ) {
            let message = Message(words);
            let line = message.line();
            prop_assert_eq!(line.find('\n'), Some(line.len() - 1), "one line");
            prop_assert_eq!(Message::parse(&line), Some(message));
        }

        #[test]
        fn nonsense_is_refused_or_read_and_is_no_panic(line in "[{}\":,\\\\u0-9a-f \u{e9}]{0,40}") {
            let _ = Message::parse(&line);
            let _ = Message::parse(&format!("{{{line}}}"));
        }
    }

    #[test]
    fn bytes_go_as_digits() {
        let bytes: Vec<u8> = (0..=255).collect();
        let message = Message::parse(&Message::ask("x").bytes("plan", &bytes).line()).unwrap();
        assert_eq!(message.bytes_of("plan"), Some(bytes));
        for wrong in ["0", "0g", "000"] {
            assert_eq!(Message::ask("x").text("plan", wrong).bytes_of("plan"), None, "{wrong}");
        }
    }

    #[test]
    fn names_are_found_and_types_are_looked_at() {
        let message = Message::parse(r#"{"ask":"join","protocol":1,"later":"\u00e9\n","n":7}"#).unwrap();
        assert!(message.asks("join") && !message.answers("join"));
        assert_eq!((message.number_of("protocol"), message.text_of("protocol")), (Some(1), None));
        assert_eq!((message.text_of("later"), message.number_of("none")), (Some("\u{e9}\n"), None));
        for wrong in [
            "",
            "{",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":-1}",
            "{\"a\":1 \"b\":2}",
            "[1]",
            "{\"a\":99999999999999999999}",
        ] {
            assert_eq!(Message::parse(wrong), None, "{wrong}");
        }
    }
}
