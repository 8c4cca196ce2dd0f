//! Manual pages of section 3, made of the comments of quinion.h.
//!
//! ```text
//!   /*                                       NAME         the first sentence
//!    * Gives a pin back; ... from then on.   SYNOPSIS     the declaration
//!    *                                       DESCRIPTION  the paragraphs
//!    * Errors: -EINVAL.                      ERRORS       the paragraph that begins so
//!    */
//!   int qn_unpin(struct qn_pin *pin);
//! ```
//!
//! A struct has a page as well, and the head of the header becomes quinion(3), which lists the others.

#[derive(PartialEq, Eq, Debug)]
pub struct Page {
    pub name: String,
    pub text: String,
}

struct Documented {
    paragraphs: Vec<String>,
    declaration: String,
}

pub fn pages(header: &str) -> Vec<Page> {
    let all = documented(header);
    let mut pages: Vec<Page> = all.iter().filter_map(page).collect();
    pages.sort_by(|a, b| a.name.cmp(&b.name));
    pages.dedup_by(|a, b| a.name == b.name);
    let names: Vec<String> = pages.iter().map(|page| page.name.clone()).collect();
    if let Some(head) = all.first() {
        pages.insert(0, overview(head, &names));
    }
    pages
}

/// The comments of a header at the beginning of a line, each with what follows.
fn documented(header: &str) -> Vec<Documented> {
    let (mut all, mut lines) = (Vec::new(), header.lines().peekable());
    while let Some(line) = lines.next() {
        if !line.starts_with("/*") {
            continue;
        }
        let mut comment = vec![line];
        while !comment.last().expect("it has a line").ends_with("*/") {
            let Some(line) = lines.next() else { break };
            comment.push(line);
        }
        let mut declaration = Vec::new();
        let mut depth = 0;
        while let Some(line) = lines.next_if(|line| !line.starts_with("/*")) {
            depth += line.matches('{').count();
            depth -= line.matches('}').count().min(depth);
            declaration.push(line);
            if depth == 0 && (line.ends_with(';') || line.is_empty() || line.starts_with('#')) {
                break;
            }
        }
        all.push(Documented { paragraphs: paragraphs(&comment), declaration: declaration.join("\n") });
    }
    all
}

fn paragraphs(comment: &[&str]) -> Vec<String> {
    let inner = comment.iter().map(|line| {
        let line = line.trim().trim_start_matches('/').trim_end_matches("*/");
        line.trim_start_matches('*').trim()
    });
    let mut paragraphs = vec![String::new()];
    for line in inner {
        let last = paragraphs.last_mut().expect("there is one");
        match (line.is_empty(), last.is_empty()) {
            (true, false) => paragraphs.push(String::new()),
            (true, true) => {}
            (false, true) => last.push_str(line),
            (false, false) => *last = format!("{last} {line}"),
        }
    }
    paragraphs.retain(|paragraph| !paragraph.is_empty());
    paragraphs
}

/// The name that a declaration declares, if it has a page: of a function, or of a struct with fields.
fn name_of(declaration: &str) -> Option<&str> {
    let words = |text: &str| !text.is_empty() && text.starts_with("qn_");
    if let Some(rest) = declaration.strip_prefix("typedef struct ") {
        return rest.split_once(" {").map(|(name, _)| name).filter(|name| words(name));
    }
    let (before, _) = declaration.split_once('(')?;
    before.rsplit([' ', '*']).next().filter(|name| words(name))
}

fn page(of: &Documented) -> Option<Page> {
    let name = name_of(&of.declaration)?;
    let (errors, description): (Vec<&String>, Vec<&String>) =
        of.paragraphs.iter().partition(|paragraph| paragraph.starts_with("Errors:"));
    let first = description.first().map(|text| first_sentence(text)).unwrap_or_default();
    let mut text = head(name, first);
    text.push_str(".SH SYNOPSIS\n.nf\n#include <quinion.h>\n.sp\n");
    text.push_str(&verbatim(&of.declaration));
    text.push_str(".fi\n.SH DESCRIPTION\n");
    text.push_str(&described(description));
    if !errors.is_empty() {
        text.push_str(".SH ERRORS\nThe result is negative, and qn_error_message(3) tells more.\n.PP\n");
        text.push_str(&described(errors));
    }
    text.push_str(".SH SEE ALSO\n.BR quinion (3)\n");
    Some(Page { name: name.to_owned(), text })
}

fn overview(of: &Documented, names: &[String]) -> Page {
    let first = of.paragraphs.first().map(|text| first_sentence(text)).unwrap_or_default();
    let first = first.split_once(": ").map_or(first, |(_, rest)| rest);
    let mut text = head("quinion", first);
    text.push_str(".SH SYNOPSIS\n.nf\n#include <quinion.h>\n.fi\n.SH DESCRIPTION\n");
    text.push_str(&described(of.paragraphs.iter().collect()));
    text.push_str(".SH SEE ALSO\n");
    let each = names.iter().map(|name| format!(".BR {name} (3)"));
    text.push_str(&each.collect::<Vec<_>>().join(",\n"));
    text.push('\n');
    Page { name: "quinion".to_owned(), text }
}

fn head(name: &str, first: &str) -> String {
    format!(".TH {name} 3 \"\" \"Quinion 0.1\" \"Quinion for C\"\n.SH NAME\n{name} \\- {}\n", escaped(first))
}

fn first_sentence(text: &str) -> &str {
    text.split_once(". ").map_or(text, |(first, _)| first).trim_end_matches('.')
}

fn described(paragraphs: Vec<&String>) -> String {
    let each = paragraphs.iter().map(|paragraph| format!("{}\n", escaped(paragraph)));
    each.collect::<Vec<_>>().join(".PP\n")
}

fn verbatim(declaration: &str) -> String {
    declaration.trim_end().lines().map(|line| format!("{}\n", escaped(line))).collect()
}

/// Escapes what roff would take for its own.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "/* Quinion for C: a page cache. Release 0.\n *\n * Threads. All.\n */\n#ifndef Q\n\n\
        /*\n * A pin.\n */\ntypedef struct qn_pin qn_pin;\n\n\
        /*\n * Options. All zero.\n */\ntypedef struct qn_o {\n  /*\n   * The size.\n   */\n  size_t size;\n} qn_o;\n\n\
        /*\n * Gives a pin back; it ends. May block.\n *\n * .More.\n *\n * Errors: -EINVAL.\n */\n\
        int qn_unpin(struct qn_pin *pin,\n             int x);\n";

    #[test]
    fn functions_and_structs_have_pages() {
        let pages = pages(HEADER);
        let names: Vec<&str> = pages.iter().map(|page| &*page.name).collect();
        assert_eq!(names, ["quinion", "qn_o", "qn_unpin"]);
        let text = &pages[2].text;
        for part in [
            "qn_unpin \\- Gives a pin back; it ends\n",
            "int qn_unpin(struct qn_pin *pin,\n             int x);\n.fi\n",
            ".SH DESCRIPTION\nGives a pin back; it ends. May block.\n.PP\n\\&.More.\n",
            ".PP\nErrors: \\-EINVAL.\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(pages[1].text.contains("  size_t size;\n} qn_o;\n"), "{}", pages[1].text);
        assert!(pages[0].text.contains(".BR qn_o (3),\n.BR qn_unpin (3)\n"), "{}", pages[0].text);
    }
}
