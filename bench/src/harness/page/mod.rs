//! Page: a run as one page of HTML that needs no other file and no network.
//!
//! ```text
//!   machine, what was run
//!   goals met and missed, each with its ratio        what was not measured, and why
//!   the originals' claims beside ours                scoreboard
//!   for each experiment: its question
//!       curves, where there is something to draw     curves    hit ratios, time series, latencies
//!       for each situation and metric: bars          bars      with quartiles; ratios below
//! ```
//!
//! It has no script. Colours are named in one place, once for a light and once for a dark screen; bars are boxes, so
//! that they are as wide as there is room for, and a library draws curves (`charts`).
//!
//! Invariants:
//!  1. Nothing in it is fetched: there is no address in it but anchors of its own.
//!  2. Whatever comes from outside (names of traces, of machines, of errors) is escaped.
//!  3. Each row is in it, a row that has no number with the reason if that is known.

/// Writes to a page, or a part of one.
macro_rules! put {
    ($html:expr, $($words:tt)*) => {{
        use std::fmt::Write as _;
        write!($html, $($words)*).expect("a string takes it");
    }};
}

mod bars;
mod curves;

use super::escape::escaped;
use super::recorded::RecordedRow;
use super::rows::Row;
use super::scoreboard;

const STYLE: &str = include_str!("style.css");

#[derive(Debug)]
pub struct Section {
    pub name: &'static str,
    pub question: &'static str,
    pub rows: Vec<Row>,
    /// Cases that could not be measured, and why.
    pub unmeasured: Vec<(String, String)>,
}

pub fn page(machine: &str, sections: &[Section]) -> String {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>quinion bench</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>What Quinion does on this machine, beside its peers</h1>\n<nav>"
    );
    for section in sections {
        put!(html, "<a href=\"#{0}\">{0}</a> ", section.name);
    }
    put!(html, "</nav>\n<pre>{}</pre>\n", escaped(machine));
    html.push_str(HOW_TO_READ);
    put_goals(&mut html, sections);
    put_unmeasured(&mut html, sections);
    let rows: Vec<RecordedRow> =
        sections.iter().flat_map(|section| &section.rows).map(RecordedRow::from).collect();
    scoreboard::put(&mut html, &rows);
    for section in sections {
        put_section(&mut html, section);
    }
    html.push_str("</body>\n</html>\n");
    html
}

const HOW_TO_READ: &str = "<p class=\"dim\">A ratio above 1 means that Quinion is better, whatever the metric. \
    Numbers are medians over repetitions; ratios are taken within a repetition, and the brackets behind them are their \
    quartiles. The line on a bar goes from the lower to the upper quartile of the values. Where a mechanism stands \
    beside Quinion without it, a high ratio says little by itself: both sides are given as they are. Instructions per \
    cycle need hardware counters, which virtual machines seldom have: instructions (counted by callgrind) and \
    nanoseconds stand for them.</p>\n";

fn put_goals(html: &mut String, sections: &[Section]) {
    let rows = || sections.iter().flat_map(|section| &section.rows);
    let with = |met: bool| -> Vec<&Row> { rows().filter(|row| row.met == Some(met)).collect() };
    let (met, missed) = (with(true), with(false));
    let unsteady: Vec<&Row> = rows().filter(|row| !row.is_steady()).collect();
    let behind: Vec<&Row> = rows().filter(|row| row.met.is_none() && row.is_lost()).collect();
    html.push_str("<h2 id=\"goals\">Goals</h2>\n");
    let (with_goal, of) = (met.len() + missed.len(), rows().filter(|row| row.peer_name.is_some()).count());
    put!(html, "<p>{} of {with_goal} goals that can be compared are met. ", met.len());
    put!(html, "{} of {of} comparisons are not steady.</p>\n", unsteady.len());
    for (rows, heading, open) in [
        (missed, "Missed", " open"),
        (unsteady, "Not steady: repetitions differ by more than twice, so nothing is concluded", ""),
        (behind, "Without a goal, and behind a peer in three repetitions of four, or in the only one", ""),
        (met, "Met", ""),
    ] {
        if !rows.is_empty() {
            put!(html, "<details{open}><summary>{heading}: {}</summary>\n", rows.len());
            bars::put_table(html, &rows, bars::TableLead::Where);
            html.push_str("</details>\n");
        }
    }
}

fn put_unmeasured(html: &mut String, sections: &[Section]) {
    let mut told = String::new();
    for section in sections {
        for (case, why) in &section.unmeasured {
            put!(told, "<tr><td>{}: {}</td><td>{}</td></tr>\n", section.name, escaped(case), escaped(why));
        }
        let mut known: Vec<(&str, &str)> = Vec::new();
        for row in &section.rows {
            let missing = row.not_measured.iter().map(|(name, why)| (*name, why.as_str()));
            known.extend(missing.filter(|runs| !known.contains(runs)).collect::<Vec<_>>());
        }
        for (name, why) in known {
            put!(told, "<tr><td>{}: {}</td><td>{}</td></tr>\n", section.name, escaped(name), escaped(why));
        }
    }
    html.push_str("<h2 id=\"unmeasured\">What was not measured, and why</h2>\n");
    match told.as_str() {
        "" => html.push_str("<p>Nothing was left out of what was asked for.</p>\n"),
        told => put!(html, "<table><tbody>\n{told}</tbody></table>\n"),
    }
}

fn put_section(html: &mut String, section: &Section) {
    put!(html, "<h2 id=\"{}\">{}</h2>\n", section.name, escaped(section.question));
    if section.rows.is_empty() {
        html.push_str("<p>Nothing of it was measured; see above for the reasons.</p>\n");
    }
    curves::put(html, section);
    bars::put(html, &section.rows);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::rows::{PeerKind, Series};
    use crate::harness::verdict::{Estimator, Steadiness};

    pub(super) fn row(case: &str, metric: &'static str, ours: f64, peer: Option<(&'static str, f64)>) -> Row {
        let ratio = peer.map(|(_, peer)| peer / ours);
        Row {
            experiment: "insert",
            case: case.to_owned(),
            metric,
            unit: "ns",
            quinion: Some(ours),
            quinion_spread: Some([ours * 0.9, ours * 1.1]),
            quinion_runs: vec![ours],
            peer_runs: peer.map(|(_, peer)| peer).into_iter().collect(),
            estimator: Estimator::Median,
            steadiness: peer.map(|_| Steadiness::Steady),
            peer: peer.map(|(_, peer)| peer),
            peer_spread: peer.map(|(_, peer)| [peer * 0.9, peer * 1.1]),
            peer_name: peer.map(|(name, _)| name),
            standing: PeerKind::Peer,
            ratio,
            spread: ratio.map(|ratio| [ratio, ratio]),
            goal: None,
            met: None,
            series: None,
            not_measured: Vec::new(),
        }
    }

    /// The tags of a page, in order, without those that have no end.
    fn tags(html: &str) -> Vec<String> {
        let inside = html.split('<').skip(1).map(|rest| rest.split('>').next().unwrap());
        let named = inside
            .filter(|tag| !tag.ends_with('/') && !tag.starts_with("!DOCTYPE") && !tag.starts_with("meta"));
        named.map(|tag| tag.split_whitespace().next().unwrap().to_owned()).collect()
    }

    fn sample() -> String {
        let met = Row {
            goal: Some(2.0),
            met: Some(true),
            ..row("one thread: batches", "time", 10.0, Some(("single", 30.0)))
        };
        let missed = Row { goal: Some(9.0), met: Some(false), ..met.clone() };
        let mut excused = row("one thread: batches", "time", 10.0, Some(("<other>", f64::NAN)));
        (excused.peer, excused.ratio, excused.spread) = (None, None, None);
        excused.not_measured = vec![("<other>", "there is no \"other\" & so on".to_owned())];
        let told = Series { unit: "MB/s", seconds: vec![0.5, 1.0, 1.5], values: vec![1.0, 2.0, 1.5] };
        let series = Row { series: Some(told), ..row("a stream: batches", "rate", 10.0, None) };
        let p50 = row("a stream: batches", "P50", 10.0, Some(("single", 5.0)));
        let p99 = row("a stream: batches", "P99", 100.0, Some(("single", 50.0)));
        let wild = Row { steadiness: Some(Steadiness::NotSteady), ..missed.clone() };
        let rows = vec![met, missed, excused, series, p50, p99, Row { met: None, ..wild }];
        let section =
            |name, rows, unmeasured| Section { name, question: "insert: how dear?", rows, unmeasured };
        let why = vec![("cold".to_owned(), "root may, and we may not".to_owned())];
        page("kernel  6.1\n<cpu>", &[section("insert", rows, vec![]), section("cold", vec![], why)])
    }

    #[test]
    fn every_tag_is_closed_and_foreign_text_is_escaped() {
        let html = sample();
        let mut open: Vec<String> = Vec::new();
        for tag in tags(&html) {
            match tag.strip_prefix('/') {
                Some(end) => assert_eq!(open.pop().as_deref(), Some(end), "{html}"),
                None => open.push(tag),
            }
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(html.contains("&lt;cpu&gt;") && html.contains("no &quot;other&quot; &amp; so on"), "{html}");
    }

    #[test]
    fn the_page_fetches_nothing_and_runs_nothing() {
        let html = sample();
        for word in ["http:", "https:", "src=", "url(", "@import", "<script", "<link", "<iframe"] {
            assert!(!html.contains(word), "{word} in {html}");
        }
        assert!(html.contains("prefers-color-scheme: dark") && html.contains("max-width: 40rem"));
    }

    #[test]
    fn goals_reasons_and_drawings_are_there() {
        let html = sample();
        for words in [
            "1 of 2 goals",
            "1 of 6 comparisons are not steady",
            "3.00x [3.00 3.00]",
            "9.00x",
            "root may, and we may not",
            "class=\"whisker\"",
            "P99",
            "<svg",
            "not measured",
        ] {
            assert!(html.contains(words), "{words} is missing in {html}");
        }
        assert_eq!(html.matches("<figure>").count(), 2, "a series and latencies: {html}");
    }
}
