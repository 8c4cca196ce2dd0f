//! Source: a Rust file as the tidy rules see it, code and comments apart.
//!
//! ```text
//!   text      let n = "a // b"; // why        as it is on disk
//!   code      let n = "      ";               same length, comments and the insides of strings blank
//!   comments                    // why        same length, everything else blank
//! ```
//!
//! Both views keep every newline, so a line number means the same in all three. Words of the code are [`Token`]s. This
//! is far less than a parser: it knows strings, comments, brackets and modules, which is all that the rules need.

use std::ops::Range;

/// A file: its path from the top of the repository, its text, its comments, its strings and the words of its code.
pub struct Source {
    pub path: String,
    pub text: String,
    pub comments: String,
    pub strings: Vec<StringLiteral>,
    pub tokens: Vec<Token>,
}

/// A string or character of the code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StringLiteral {
    /// As it is written, with its quotes and escapes.
    pub text: String,
    /// Where it begins.
    pub line: usize,
}

/// A word, a number, `::`, or one other character of the code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Token {
    pub word: String,
    pub line: usize,
}

impl Source {
    /// Parses `text`. `path` only serves messages and the rules that ask where a file lies.
    pub fn new(path: &str, text: &str) -> Self {
        let Parts { code, comments, strings } = separate(text);
        let tokens = tokenize(&code);
        Self { path: path.to_owned(), text: text.to_owned(), comments, strings, tokens }
    }

    pub fn word(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| &token.word)
    }

    pub fn is_at(&self, at: usize, words: &[&str]) -> bool {
        words.iter().enumerate().all(|(i, word)| self.word(at + i) == *word)
    }

    pub fn has_comment_near(&self, line: usize, above: usize, word: &str) -> bool {
        let first = line.saturating_sub(above).max(1);
        let lines = self.comments.lines().skip(first - 1).take(line + 1 - first);
        lines.map(str::to_lowercase).any(|comment| comment.contains(&word.to_lowercase()))
    }

    pub fn is_test_file(&self) -> bool {
        self.path.ends_with("/tests.rs") || self.path.contains("/tests/")
    }

    pub fn test_ranges(&self) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        for at in 0..self.tokens.len() {
            if self.is_at(at, &["#", "[", "cfg", "(", "test", ")", "]"])
                || self.is_at(at, &["#", "[", "cfg", "(", "all", "(", "test"])
            {
                let attribute_end = self.closing(at + 1);
                ranges.push(at..self.item_end(attribute_end + 1));
            }
        }
        ranges
    }

    /// The last token of the item that begins at `at`: its `;`, or the bracket that closes its body.
    pub fn item_end(&self, at: usize) -> usize {
        let mut at = at;
        while at < self.tokens.len() {
            match self.word(at) {
                "{" => return self.closing(at),
                ";" => return at,
                "(" | "[" => at = self.closing(at) + 1,
                _ => at += 1,
            }
        }
        at
    }

    /// The token that closes the bracket at `open`, or the end of the file.
    pub fn closing(&self, open: usize) -> usize {
        let mut depth = 0;
        for at in open..self.tokens.len() {
            match self.word(at) {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return at;
            }
        }
        self.tokens.len()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Code,
    Comment,
    Literal,
}

/// The code and the comments of a text, each with blanks in place of the other, and its strings.
struct Parts {
    code: String,
    comments: String,
    strings: Vec<StringLiteral>,
}

fn separate(text: &str) -> Parts {
    let bytes = text.as_bytes();
    let (mut code, mut comments, mut strings) = (Vec::new(), Vec::new(), Vec::new());
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let (part, end) = part_at(bytes, at);
        if part == Part::Literal {
            strings.push(StringLiteral { text: String::from_utf8_lossy(&bytes[at..end]).into_owned(), line });
        }
        line += bytes[at..end].iter().filter(|byte| **byte == b'\n').count();
        for &byte in &bytes[at..end] {
            let keep = |wanted| if byte == b'\n' || part == wanted { byte } else { b' ' };
            code.push(keep(Part::Code));
            comments.push(keep(Part::Comment));
        }
        at = end;
    }
    let [code, comments] = [code, comments].map(|part| String::from_utf8_lossy(&part).into_owned());
    Parts { code, comments, strings }
}

fn part_at(bytes: &[u8], at: usize) -> (Part, usize) {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return (Part::Comment, at + rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len()));
    }
    if rest.starts_with(b"/*") {
        return (Part::Comment, at + block_comment_len(rest));
    }
    if let Some(len) = literal_len(rest) {
        return (Part::Literal, at + len);
    }
    // A whole word at once, so that the `r` of `for` does not begin a raw string.
    let word = rest.iter().take_while(|b| is_word_byte(**b)).count();
    (Part::Code, at + word.max(1))
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

fn block_comment_len(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest[at..].starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
        } else {
            at += 1;
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// The length of the string or character that begins here, if one does.
fn literal_len(rest: &[u8]) -> Option<usize> {
    let prefix = rest.iter().take_while(|b| matches!(b, b'b' | b'c' | b'r')).count();
    let raw = rest[..prefix].contains(&b'r');
    let hashes = rest[prefix..].iter().take_while(|b| **b == b'#').count();
    match rest.get(prefix + hashes) {
        Some(b'"') if raw => Some(raw_string_len(rest, prefix + hashes + 1, hashes)),
        Some(b'"') if hashes == 0 => Some(quoted_len(rest, prefix + 1, b'"')),
        Some(b'\'') if hashes == 0 && is_character(&rest[prefix + 1..]) => {
            Some(quoted_len(rest, prefix + 1, b'\''))
        }
        _ => None,
    }
}

fn raw_string_len(rest: &[u8], inside: usize, hashes: usize) -> usize {
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let found = rest[inside..].windows(close.len()).position(|window| window == close);
    found.map_or(rest.len(), |at| inside + at + close.len())
}

fn quoted_len(rest: &[u8], inside: usize, quote: u8) -> usize {
    let mut at = inside;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// Whether what follows a `'` is a character and not a lifetime.
fn is_character(inside: &[u8]) -> bool {
    let character = inside.utf8_chunks().next().and_then(|chunk| chunk.valid().chars().next());
    match character {
        Some('\\') => true,
        Some(character) => inside.get(character.len_utf8()) == Some(&b'\''),
        None => false,
    }
}

fn tokenize(code: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let mut rest = line.trim_start();
        while !rest.is_empty() {
            let word = rest.bytes().take_while(|b| is_word_byte(*b)).count();
            let len = if rest.starts_with("::") { 2 } else { word.max(1) };
            tokens.push(Token { word: rest[..len].to_owned(), line: number + 1 });
            rest = rest[len..].trim_start();
        }
    }
    tokens
}
