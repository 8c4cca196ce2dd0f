//! Signatures: the parameters of each function of the product.
//!
//! ```text
//!   fn read<F: Fn(u8) -> u8>(&self, range: (u64, u64), f: F) -> ..
//!           not looked at     1      2, a tuple         3
//! ```
//!
//! Tests are left out, and so are the methods of a trait's implementation: the trait says what they are given.

use std::ops::Range;

use super::source::Source;

/// A function, as it is declared.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    pub name: String,
    pub line: usize,
    /// `self` is one.
    pub parameters: usize,
    /// Parameters that are tuples, or references to one.
    pub tuples: usize,
}

/// The functions with a name in `source`, in the order in which they are declared.
pub fn signatures(source: &Source) -> Vec<Signature> {
    if source.is_test_file() {
        return Vec::new();
    }
    let mut passed = source.test_ranges();
    passed.extend(trait_implementations(source));
    let is_passed = |at: usize| passed.iter().any(|range| range.contains(&at));
    let is_function = |at: &usize| source.word(*at) == "fn" && is_name(source.word(at + 1));
    let found = (0..source.tokens.len()).filter(is_function).filter(|at| !is_passed(*at));
    found.map(|at| signature(source, at)).collect()
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

fn signature(source: &Source, at: usize) -> Signature {
    let open = match source.word(at + 2) {
        "<" => after_angles(source, at + 2),
        _ => at + 2,
    };
    let parameters = split_at_commas(source, open + 1..source.closing(open));
    Signature {
        name: source.word(at + 1).to_owned(),
        line: source.tokens[at].line,
        parameters: parameters.len(),
        tuples: parameters.into_iter().filter(|parameter| is_tuple(source, parameter.clone())).count(),
    }
}

/// The token behind the `>` that closes the `<` at `open`.
fn after_angles(source: &Source, open: usize) -> usize {
    let (mut at, mut depth) = (open, 0_usize);
    while at < source.tokens.len() {
        match source.word(at) {
            "(" | "[" | "{" => at = source.closing(at),
            "<" => depth += 1,
            ">" if source.word(at - 1) != "-" => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

/// What lies between the commas of `tokens`, but for those within brackets.
fn split_at_commas(source: &Source, tokens: Range<usize>) -> Vec<Range<usize>> {
    let (mut parts, mut first, mut at) = (Vec::new(), tokens.start, tokens.start);
    while at < tokens.end {
        match source.word(at) {
            "(" | "[" | "{" => at = source.closing(at) + 1,
            "<" => at = after_angles(source, at),
            "," => {
                parts.push(first..at);
                at += 1;
                first = at;
            }
            _ => at += 1,
        }
    }
    parts.push(first..tokens.end);
    parts.retain(|part| !part.is_empty());
    parts
}

fn is_tuple(source: &Source, parameter: Range<usize>) -> bool {
    let Some(colon) = parameter.clone().find(|at| source.word(*at) == ":") else { return false };
    let mut at = colon + 1;
    while matches!(source.word(at), "&" | "mut" | "'") {
        at += if source.word(at) == "'" { 2 } else { 1 };
    }
    source.word(at) == "(" && split_at_commas(source, at + 1..source.closing(at)).len() > 1
}

/// The `impl Trait for Type` of a file, each from its `impl` to its end. A `for<'a>` in a bound makes none.
fn trait_implementations(source: &Source) -> Vec<Range<usize>> {
    let begins_item = |at: usize| {
        at.checked_sub(1).is_none_or(|before| matches!(source.word(before), ";" | "{" | "}" | "]" | "unsafe"))
    };
    let is_of_trait = |at: usize| {
        let head = (at..source.tokens.len()).take_while(|at| source.word(*at) != "{");
        head.clone().any(|at| source.word(at) == "for" && source.word(at + 1) != "<")
    };
    let items = (0..source.tokens.len()).filter(|at| source.word(*at) == "impl" && begins_item(*at));
    items.filter(|at| is_of_trait(*at)).map(|at| at..source.item_end(at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(text: &str) -> Vec<(String, usize, usize)> {
        let found = signatures(&Source::new("p/src/a.rs", text));
        found.into_iter().map(|found| (found.name, found.parameters, found.tuples)).collect()
    }

    #[test]
    fn parameters_are_counted() {
        let text = "fn none() {}\nimpl<'a, F: for<'b> Fn(&'b u8) -> u8> X<F> {\n\
                    fn one<T: Into<(u8, u8)>, G: Fn(u8, u8) -> u8>(&self) -> (u8, u8) { |a: u8, b: u8| 1 }\n\
                    pub const fn three(&'a mut self, of: HashMap<u8, (u8, u8)>, f: impl Fn(u8, u8) -> X<u8>,) {}\n}\n\
                    trait Y {\n    fn two(a: [u8; 2], f: fn(u8, u8)) -> u8;\n}";
        let expected = [("none", 0, 0), ("one", 1, 0), ("three", 3, 0), ("two", 2, 0)];
        assert_eq!(counts(text), expected.map(|(name, n, tuples)| (name.to_owned(), n, tuples)));
    }

    #[test]
    fn tuples_are_counted() {
        let text = "fn f(unit: (), a: (u8, u8), b: &'a mut (u8, X<u8>), (c, d): (u8, u8), e: &[(u8, u8)]) {}";
        assert_eq!(counts(text), [("f".to_owned(), 5, 3)]);
    }

    #[test]
    fn tests_and_implementations_of_traits_are_left_out() {
        let text = "unsafe impl Y for X {\n    fn two(a: u8, b: u8) {}\n}\n\
                    #[cfg(test)]\nmod tests {\n    fn t(a: u8) {}\n}";
        assert_eq!(counts(text), []);
        assert!(signatures(&Source::new("p/src/a/tests.rs", "fn t(a: u8) {}")).is_empty());
    }
}
