//! Escape: text from outside, as it may stand in a page.
//!
//! Names of traces, machines and programs, and errors, come from outside. Between tags and in an attribute no letter of
//! them may be taken for markup.

pub fn escaped(text: &str) -> String {
    let mut safe = String::new();
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\n' => safe.push('\n'),
            character if character.is_control() => safe.push(' '),
            character => safe.push(character),
        }
    }
    safe
}
