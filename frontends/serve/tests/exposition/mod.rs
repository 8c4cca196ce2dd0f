//! Exposition: a parser of OpenMetrics that refuses what a monitor would, and more.
//!
//! | checked | |
//! |---|---|
//! | families | each once, `# HELP` and `# TYPE` before its samples |
//! | samples | names with the suffix of the type; labels in quotes; a number; no series twice |
//! | histograms | each series: bounds that rise, counts that do not fall, `+Inf` last and equal to `_count`, a `_sum` |
//! | the end | `# EOF`, and nothing after it |

use std::collections::{BTreeMap, HashMap, HashSet};

/// A series: its labels, without the bound of a bucket.
type Labels = BTreeMap<String, String>;

#[derive(Debug, Default)]
struct Histogram {
    buckets: Vec<(f64, f64)>,
    count: Option<f64>,
    has_sum: bool,
}

/// Checks a whole answer.
///
/// # Errors
/// The first line that is wrong, and why.
pub fn check(text: &str) -> Result<(), String> {
    let body = text.strip_suffix("# EOF\n").ok_or("it does not end with # EOF")?;
    let (mut types, mut series) = (HashMap::<&str, &str>::new(), HashSet::new());
    let (mut family, mut histograms) = ("", HashMap::<(String, Labels), Histogram>::new());
    for line in body.lines() {
        let wrong = |why: &str| format!("{why}: {line:?}");
        if let Some(rest) = line.strip_prefix("# ") {
            let mut words = rest.splitn(3, ' ');
            let (kind, name) = (words.next().unwrap_or(""), words.next().ok_or_else(|| wrong("no name"))?);
            match (kind, words.next()) {
                ("HELP", Some(_)) => {}
                ("TYPE", Some(of)) if ["counter", "gauge", "histogram"].contains(&of) => {
                    if types.insert(name, of).is_some() {
                        return Err(wrong("a family twice"));
                    }
                    family = name;
                }
                _ => return Err(wrong("neither HELP nor TYPE")),
            }
            continue;
        }
        let (name, labels, value) = sample(line).ok_or_else(|| wrong("no sample"))?;
        let suffix = name.strip_prefix(family).ok_or_else(|| wrong("a sample of another family"))?;
        let of = types.get(family).ok_or_else(|| wrong("no TYPE before"))?;
        let allowed: &[&str] = match *of {
            "counter" => &["_total"],
            "gauge" => &[""],
            _ => &["_bucket", "_count", "_sum"],
        };
        if !allowed.contains(&suffix) {
            return Err(wrong("a suffix that its type does not have"));
        }
        if !series.insert((name.to_owned(), labels.clone())) {
            return Err(wrong("a series twice"));
        }
        if *of == "histogram" {
            let mut labels = labels;
            let bound = labels.remove("le");
            let histogram = histograms.entry((family.to_owned(), labels)).or_default();
            match (suffix, bound) {
                ("_bucket", Some(bound)) => {
                    let bound = if bound == "+Inf" { Some(f64::INFINITY) } else { bound.parse().ok() };
                    histogram.buckets.push((bound.ok_or_else(|| wrong("no bound"))?, value));
                }
                ("_count", None) => histogram.count = Some(value),
                ("_sum", None) => histogram.has_sum = true,
                _ => return Err(wrong("a bound where there is none, or none")),
            }
        } else if *of == "counter" && (value < 0.0 || value.is_nan()) {
            return Err(wrong("a counter below 0"));
        }
    }
    for (name, Histogram { buckets, count, has_sum }) in &histograms {
        let rises = buckets.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let ends = buckets.last().is_some_and(|(bound, all)| bound.is_infinite() && Some(*all) == *count);
        if !rises || !ends || !has_sum {
            return Err(format!("a histogram that is none: {name:?} {buckets:?} of {count:?}"));
        }
    }
    Ok(())
}

/// A line as name, labels and value.
fn sample(line: &str) -> Option<(&str, Labels, f64)> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') && !name.is_empty();
    let mut labels = Labels::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(key.to_owned(), value).is_none().then_some(())?;
            match (after.strip_prefix(','), after.strip_prefix('}')) {
                (Some(more), _) => rest = more,
                (_, Some(after)) => break rest = after,
                _ => return None,
            }
        }
    }
    let value = rest.strip_prefix(' ')?.parse().ok()?;
    is_name.then_some((name, labels, value))
}

/// A value up to its quote, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                other @ ('"' | '\\') => other,
                _ => return None,
            }),
            '\n' => return None,
            other => value.push(other),
        }
    }
    None
}

#[test]
fn the_parser_refuses_text_that_is_no_exposition() {
    let head = "# HELP a A.\n# TYPE a counter\n";
    let histogram = "# HELP h H.\n# TYPE h histogram\nh_sum 1.5\nh_count 3\n";
    assert_eq!(
        check(&format!("{head}a_total{{store=\"s3://b\"}} 1\na_total{{store=\"\\\"\"}} 2\n# EOF\n")),
        Ok(())
    );
    assert_eq!(
        check(&format!("{histogram}h_bucket{{le=\"0.5\"}} 1\nh_bucket{{le=\"+Inf\"}} 3\n# EOF\n")),
        Ok(())
    );
    for (text, why) in [
        (format!("{head}a_total 1\n"), "EOF"),
        (format!("{head}a 1\n# EOF\n"), "suffix"),
        (format!("{head}b_total 1\n# EOF\n"), "another family"),
        (format!("{head}a_total 1\na_total 1\n# EOF\n"), "twice"),
        (format!("{head}{head}# EOF\n"), "family twice"),
        (format!("{head}a_total -1\n# EOF\n"), "below 0"),
        (format!("{head}a_total{{store=\"x}} 1\n# EOF\n"), "no sample"),
        (format!("{head}a_total one\n# EOF\n"), "no sample"),
        ("a_total 1\n# EOF\n".into(), "TYPE"),
        (format!("{histogram}h_bucket{{le=\"0.5\"}} 1\n# EOF\n"), "is none"),
        (format!("{histogram}h_bucket{{le=\"0.5\"}} 4\nh_bucket{{le=\"+Inf\"}} 3\n# EOF\n"), "is none"),
        (format!("{histogram}h_bucket{{le=\"+Inf\"}} 2\n# EOF\n"), "is none"),
        (
            format!(
                "{histogram}h_bucket{{le=\"2\"}} 1\nh_bucket{{le=\"1\"}} 2\nh_bucket{{le=\"+Inf\"}} 3\n# EOF\n"
            ),
            "is none",
        ),
    ] {
        let error = check(&text).expect_err(&text);
        assert!(error.contains(why), "{text} {error}");
    }
}
