//! Prose: what a sentence of a comment or a document may not be.
//!
//! ```text
//!   opening     "Who ..", "Whoever ..", "Nobody ..", "Somebody ..": the actor is not named
//!   word        a pronoun or a metaphor where the field has a term
//!   actor       "we", "us", "our" in a comment, outside a quotation: which part acts is not said
//!   length      more words than a reader keeps in mind, between full stops, colons and semicolons
//!   spelling    a misspelling, or the American form of a word that is written the British way elsewhere
//! ```
//!
//! Drawings and examples (between fences) are not checked. Of tables and strings only the words are. Paragraphs are
//! checked as a whole: a sentence is followed from one line of a comment to the next.

/// Words of a sentence, or of a part of it up to a colon or a semicolon.
const WORDS_MAX: usize = 45;

const OPENINGS: &[&str] = &["Who", "Whoever", "Nobody", "Somebody", "Anybody", "Everybody"];

/// What is not written, and what to write: words and phrases in small letters.
const WORDS: &[(&str, &str)] = &[
    ("nobody", "name the thread, process, caller or handle, or use the passive"),
    ("nobody's", "name the owner"),
    ("somebody", "name the thread, process, caller or handle"),
    ("somebody's", "name the owner"),
    ("anybody", "name the thread, process or reader, or use the passive"),
    ("anybody's", "name the owner"),
    ("everybody", "name the readers, threads or processes"),
    ("everybody's", "name the owners"),
    ("someone", "name the thread, process, caller or handle"),
    ("comes and goes", "say what starts and what ends"),
    ("gives way", "say what shrinks, waits or is replaced"),
    ("heard of", "say which message came, or what was noticed"),
    ("hears of", "say which message comes, or what is noticed"),
    ("trips over", "say what fails"),
    ("without a word", "say which message is not sent"),
    ("left word", "say what is recorded"),
    ("pokes", "say: wakes"),
];

const SPELLINGS: &[(&str, &str)] = &[
    ("behavior", "behaviour"),
    ("behaviors", "behaviours"),
    ("canceled", "cancelled"),
    ("canceling", "cancelling"),
    ("favor", "favour"),
    ("honor", "honour"),
    ("initialise", "initialize"),
    ("initialised", "initialized"),
    ("neighbor", "neighbour"),
    ("neighbors", "neighbours"),
    ("occured", "occurred"),
    ("optimise", "optimize"),
    ("optimised", "optimized"),
    ("optimiser", "optimizer"),
    ("recognise", "recognize"),
    ("recognised", "recognized"),
    ("recieve", "receive"),
    ("seperate", "separate"),
    ("serialise", "serialize"),
    ("serialises", "serializes"),
    ("untill", "until"),
];

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    pub line: usize,
    pub wrong: String,
    pub remedy: &'static str,
}

/// A line of prose: where it is, and whether a paragraph begins with it.
struct ProseLine<'a> {
    line: usize,
    text: &'a str,
    begins: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Comments,
    Document,
}

pub fn check_comments(text: &str) -> Vec<Fault> {
    // A comment behind code is a paragraph by itself. A slash pair in a string may pass for one: no harm is done.
    let comment = |line: &'_ str| match line.trim_start().strip_prefix("//") {
        Some(comment) => (Some(comment.len()), true),
        None => (line.split_once(" // ").map(|(_, comment)| comment.len()), false),
    };
    let lines = text.lines().enumerate().map(|(at, line)| match comment(line) {
        (Some(len), whole) => {
            let comment = &line[line.len() - len..];
            (at + 1, comment.trim_start_matches(['/', '!']).trim(), whole)
        }
        (None, _) => (at + 1, "", false),
    });
    check(Kind::Comments, lines)
}

/// Sentences, each with the line on which it begins. An empty one is none.
struct Sentences(Vec<(usize, String)>);

impl Sentences {
    fn new() -> Self {
        Self(vec![(0, String::new())])
    }

    /// The next word begins another sentence, whether the last one has ended or not.
    fn part(&mut self) {
        self.0.push((0, String::new()));
    }

    fn add(&mut self, line: usize, text: &str) {
        for word in text.split_whitespace() {
            let last = self.0.last_mut().expect("there is one always");
            if last.1.is_empty() {
                last.0 = line;
            }
            last.1.extend([word, " "]);
            if word.trim_end_matches(['*', ')', '`', '"', '_']).ends_with(['.', '!', '?']) {
                self.part();
            }
        }
    }

    /// Sentences that begin with "What" and ask nothing: a clause stands where a noun should.
    fn headless(self) -> Vec<Fault> {
        let is_headless = |sentence: &str| {
            sentence.trim_start_matches(['[', '(']).starts_with("What ") && !sentence.ends_with("? ")
        };
        let fault = |(line, sentence): (usize, String)| Fault {
            line,
            wrong: format!("a clause stands where a noun should: `{}`", sentence.trim_end()),
            remedy: "name the page, range, request or error that is meant",
        };
        self.0.into_iter().filter(|(_, sentence)| is_headless(sentence)).map(fault).collect()
    }
}

/// Sentences of comments that begin with "What" and ask nothing.
pub fn headless(text: &str) -> Vec<Fault> {
    let mut sentences = Sentences::new();
    for (at, line) in text.lines().enumerate() {
        let comment = line.trim_start().strip_prefix("//").or_else(|| Some(line.split_once(" // ")?.1));
        match comment {
            Some(comment) => sentences.add(at + 1, comment.trim_start_matches(['/', '!'])),
            None => sentences.part(),
        }
    }
    sentences.headless()
}

/// Sentences of a document that begin with "What" and ask nothing, those in tables too. Headings and bold titles may.
pub fn headless_document(text: &str) -> Vec<Fault> {
    let (mut sentences, mut is_fenced) = (Sentences::new(), false);
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        is_fenced ^= line.starts_with("```");
        let item = line.trim_start_matches(|c: char| c.is_ascii_digit());
        let is_numbered = item.len() < line.len() && item.starts_with(". ");
        if is_fenced || line.is_empty() || line.starts_with(['#', '|', '-', '*']) || is_numbered {
            sentences.part();
        }
        if is_fenced || line.starts_with('#') {
            continue;
        }
        if !line.starts_with('|') {
            let text = if is_numbered { &item[2..] } else { line.strip_prefix("- ").unwrap_or(line) };
            sentences.add(at + 1, text);
            continue;
        }
        for cell in line.split('|') {
            sentences.part();
            sentences.add(at + 1, cell);
        }
        sentences.part();
    }
    sentences.headless()
}

/// The words of a string that begins on `line`: a message, a help. It may be broken by backslashes.
pub fn check_string(line: usize, literal: &str) -> Vec<Fault> {
    let text = literal.replace("\\\n", " ").replace("\\\"", " ").replace("\\n", " ").replace('\n', " ");
    words(&ProseLine { line, text: text.trim_start_matches('r').trim_matches(['#', '"']), begins: true })
}

pub fn check_document(text: &str) -> Vec<Fault> {
    check(Kind::Document, text.lines().enumerate().map(|(at, line)| (at + 1, line.trim(), true)))
}

/// The faults of `lines`, each with its number and whether it may continue the paragraph of the line before.
fn check<'a>(kind: Kind, lines: impl Iterator<Item = (usize, &'a str, bool)>) -> Vec<Fault> {
    let (mut prose, mut rows, mut is_fenced, mut is_inside) = (Vec::new(), Vec::new(), false, false);
    for (line, text, continues) in lines {
        if text.starts_with("```") {
            (is_fenced, is_inside) = (!is_fenced, false);
        } else if text.starts_with('|') && !is_fenced {
            rows.push(ProseLine { line, text, begins: true });
            is_inside = false;
        } else if is_fenced || text.is_empty() || text.starts_with('#') {
            is_inside = false;
        } else {
            let item = text.trim_start_matches(|c: char| c.is_ascii_digit());
            let is_item = text.starts_with(['-', '*']) || (item.len() < text.len() && item.starts_with(". "));
            prose.push(ProseLine { line, text, begins: !is_inside || !continues || is_item });
            is_inside = continues;
        }
    }
    let mut faults: Vec<Fault> = prose.iter().chain(&rows).flat_map(|line| words(line)).collect();
    faults.extend(sentences(&prose));
    if kind == Kind::Comments {
        faults.extend(prose.iter().chain(&rows).filter_map(|line| unnamed_actor(line)));
    }
    faults.sort_by_key(|fault| fault.line);
    faults
}

fn bare(word: &str) -> &str {
    word.trim_matches(|c: char| !c.is_alphanumeric() && c != '\'')
}

/// The first "we", "us", "our" or the like of a line. Microseconds and a module's name ("Ours: ..") are none.
fn unnamed_actor(prose: &ProseLine<'_>) -> Option<Fault> {
    let outside = |text: &str, mark: char| text.split(mark).step_by(2).collect::<Vec<_>>().join(" . ");
    let text = outside(&outside(prose.text, '`'), '"');
    let words: Vec<&str> = text.split_whitespace().collect();
    let is_number = |word: &str| bare(word).starts_with(|c: char| c.is_ascii_digit());
    let is_actor = |(at, word): (usize, &&str)| match bare(word).split('\'').next().unwrap_or_default() {
        "we" | "We" | "our" | "Our" | "ours" | "ourselves" => true,
        "Ours" => *word != "Ours:",
        "us" | "Us" => !at.checked_sub(1).is_some_and(|before| is_number(words[before])),
        _ => false,
    };
    words.iter().enumerate().any(is_actor).then(|| Fault {
        line: prose.line,
        wrong: format!("`we`, `us` or `our` in `{}`", prose.text),
        remedy: "name the owner, the viewer, the cache or the calling thread, or use the passive",
    })
}

fn words(prose: &ProseLine<'_>) -> Vec<Fault> {
    let code_free: String = prose.text.split('`').step_by(2).collect::<Vec<_>>().join("` `");
    let words: Vec<String> = code_free.split_whitespace().map(|word| bare(word).to_lowercase()).collect();
    let has = |phrase: &str| {
        let phrase: Vec<&str> = phrase.split(' ').collect();
        words.windows(phrase.len()).any(|found| found.iter().eq(phrase.iter()))
    };
    let banned = WORDS.iter().filter(|(word, _)| has(word)).map(|(word, remedy)| Fault {
        line: prose.line,
        wrong: format!("`{word}` in `{}`", prose.text),
        remedy,
    });
    let misspelled = SPELLINGS.iter().filter(|(word, _)| has(word)).map(|(word, right)| Fault {
        line: prose.line,
        wrong: format!("`{word}` is written `{right}`"),
        remedy: "one spelling everywhere",
    });
    banned.chain(misspelled).collect()
}

fn sentences(prose: &[ProseLine<'_>]) -> Vec<Fault> {
    let (mut faults, mut count, mut is_first) = (Vec::new(), 0, true);
    for ProseLine { line, text, begins } in prose {
        if *begins {
            (count, is_first) = (0, true);
        }
        for word in text.split_whitespace() {
            if is_first && OPENINGS.contains(&word) {
                faults.push(Fault {
                    line: *line,
                    wrong: format!("a sentence begins with `{word}`"),
                    remedy: "name the thread, process, caller or part that acts",
                });
            }
            count += 1;
            if count == WORDS_MAX + 1 {
                faults.push(Fault {
                    line: *line,
                    wrong: format!("a sentence of more than {WORDS_MAX} words"),
                    remedy: "say one thing in a sentence",
                });
            }
            let end = word.trim_end_matches(['*', ')', '`', '"', '_']);
            is_first = end.ends_with(['.', '!', '?']);
            if is_first || end.ends_with([':', ';']) {
                count = 0;
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(faults: &[Fault]) -> Vec<(usize, &str)> {
        faults.iter().map(|fault| (fault.line, fault.wrong.as_str())).collect()
    }

    #[test]
    fn plain_sentences_pass() {
        let text = "//! A thread that waits is woken.\n//!\n//! ```text\n//!   nobody | Who\n//! ```\n//! | Who | x |\n\
                    let nobody = 1; // for `nobody`\n/// Others, who wait, do not.";
        assert_eq!(check_comments(text), []);
        assert_eq!(check_document("# Nobody\n\nA sentence.\n"), []);
    }

    #[test]
    fn openings_and_words_are_seen() {
        // (An escape, since the rule runs over this file, too.)
        let text = "// Who waits is woken.\n// A page that\n// nobody has. Whoever asks gets it.\n\
                    let a = 1; // the reader gives way\n/// Its neigh\u{62}or.";
        let faults = check_comments(text);
        let found = wrong(&faults);
        assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 3, 3, 4, 5], "{found:?}");
        assert!(found[0].1.contains("begins with `Who`"), "{found:?}");
        assert!(found[3].1.contains("`gives way`") && found[4].1.contains("`neighbour`"), "{found:?}");
        assert_eq!(check_document("It ends.\nNobody waits.").len(), 2);
        let table = check_document("| a page | that everybody has |");
        assert!(table.len() == 1 && table[0].wrong.contains("`everybody`"), "{table:?}");
    }

    #[test]
    fn comments_without_an_actor_are_seen() {
        let right = "//! Ours: the cache's own.\n// In 250 us, as \"we\" is said. `our`\n/// A bus, an hour.\n\
                     //! ```text\n//!   ours | peer\n//! ```\nlet us = our; // 1.5 us";
        assert_eq!(check_comments(right), []);
        assert_eq!(check_document("Where we lose, and ours wins."), []);
        let wrong_ones = "// Then we wait.\n/// SAFETY: the page is ours.\n//! Our page.\nf(); // given to us\n\
                          //! | page | ours |\n// we've it\n// It is us: \"who\" else.";
        let faults = check_comments(wrong_ones);
        let lines: Vec<usize> = faults.iter().map(|fault| fault.line).collect();
        assert_eq!(lines, [1, 2, 3, 4, 5, 6, 7], "{faults:?}");
    }

    #[test]
    fn long_sentences_are_seen_across_lines() {
        let half = "word ".repeat(WORDS_MAX / 2);
        assert_eq!(check_comments(&format!("// {half}\n// {half}end.\n// {half}")), []);
        let long = check_comments(&format!("// {half}\n// {half} one\n// more."));
        assert_eq!(long.len(), 1, "{long:?}");
        assert_eq!(check_comments(&format!("// {half}\n//\n// {half}one more.")), []);
    }
}
