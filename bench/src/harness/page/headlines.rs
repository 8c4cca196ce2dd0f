//! Headlines: what the originals of the five mechanisms were announced with, beside the rows of ours that ask the same.
//!
//! Each of the originals is a change of the Linux kernel, measured against the kernel without it, by its author, on a
//! large machine. Ours is measured against Quinion without it where that is an option of the library, and on this
//! machine; so the two ratios are not of one thing, and where ours is less the page says what we know of the reason.

use super::{Section, escaped};
use crate::harness::rows::Row;
use quinion_cli::report::digits;

/// A number that an original was announced with.
struct Headline {
    mechanism: &'static str,
    /// In the words of its author, about.
    announced: &'static str,
    /// The same as a ratio of ours is told, if it is a number.
    ratio: Option<f64>,
    /// Which rows of ours ask the same.
    asks: fn(&Row) -> bool,
    /// Why ours shows less, where it does.
    reason: &'static str,
}

const FEW_INSERTIONS: &str =
    "with folios of up to 2 MiB there are few insertions to batch, and their cost does not show in the whole";
const FEW_WALKS: &str =
    "the walks that are saved are a small part of a miss, whose device and sleepers take most of it";
const DEVICE_BOUND: &str =
    "where the device is the limit throughput is the device's, and the processor's time alone is saved";
const ONE_LOOKUP: &str = "what is saved is a lookup and a lock a folio, which the bytes that are copied hide";

const READ_AND_COPIED: &str =
    "the snapshot is read into the cache and copied from there, and folios of 2 MiB need few grabs";
const COPIED_ALIKE: &str =
    "the bytes are copied once to the reader, as by the kernel, and on a fast device that is most of it";
const HEADLINES: [Headline; 11] = [
    Headline {
        mechanism: "batched insertion",
        announced: "RocksDB readseq: 1.51x the throughput",
        ratio: Some(1.51),
        asks: |row| is_readseq(row, "throughput"),
        reason: FEW_INSERTIONS,
    },
    Headline {
        mechanism: "batched insertion",
        announced: "its P50 63.9 % lower",
        ratio: Some(lower_by(63.9)),
        asks: |row| is_readseq(row, "P50"),
        reason: FEW_INSERTIONS,
    },
    Headline {
        mechanism: "batched insertion",
        announced: "its P75 42.1 % lower",
        ratio: Some(lower_by(42.1)),
        asks: |row| is_readseq(row, "P75"),
        reason: FEW_INSERTIONS,
    },
    Headline {
        mechanism: "batched insertion",
        announced: "its P99 31.4 % lower",
        ratio: Some(lower_by(31.4)),
        asks: |row| is_readseq(row, "P99"),
        reason: FEW_INSERTIONS,
    },
    Headline {
        mechanism: "single-walk insertion",
        announced: "7.3 % faster, thrash of 4 KiB",
        ratio: Some(1.073),
        asks: |row| is_thrash(row, "random", "rate"),
        reason: FEW_WALKS,
    },
    Headline {
        mechanism: "single-walk insertion",
        announced: "12.5 % faster, thrash after large folios",
        ratio: Some(1.125),
        asks: |row| is_thrash(row, "large folios", "time"),
        reason: FEW_WALKS,
    },
    Headline {
        mechanism: "batched reads",
        announced: "fewer branches and instructions for each read",
        ratio: None,
        asks: |row| row.experiment == "readbatch" && row.unit == "per read",
        reason: "",
    },
    Headline {
        mechanism: "uncached reads",
        announced: "65 % more throughput",
        ratio: Some(1.65),
        asks: |row| is_stream(row, "throughput"),
        reason: DEVICE_BOUND,
    },
    Headline {
        mechanism: "uncached reads",
        announced: "at half the processor's time",
        ratio: Some(2.0),
        asks: |row| is_stream(row, "cpu"),
        reason: COPIED_ALIKE,
    },
    Headline {
        mechanism: "grabbed folios",
        announced: "guest memory populated 10.3 % faster",
        ratio: Some(1.103),
        asks: |row| {
            row.experiment == "populate" && row.metric == "cpu" && row.peer_name == Some("one by one")
        },
        reason: ONE_LOOKUP,
    },
    Headline {
        mechanism: "grabbed folios",
        announced: "guest memory restored 9.5 % faster",
        ratio: Some(1.095),
        asks: |row| {
            row.experiment == "restore" && row.metric == "time" && row.peer_name == Some("one by one")
        },
        reason: READ_AND_COPIED,
    },
];

/// The ratio that a cost has if it is so many per cent lower.
const fn lower_by(percent: f64) -> f64 {
    100.0 / (100.0 - percent)
}

fn is_readseq(row: &Row, metric: &str) -> bool {
    row.experiment == "readseq" && row.metric == metric && row.peer_name == Some("one by one")
}

fn is_thrash(row: &Row, situation: &str, metric: &str) -> bool {
    let is_beside_us = row.peer_name.is_some_and(|peer| peer.ends_with("three walks"));
    row.experiment == "thrash" && row.case.starts_with(situation) && row.metric == metric && is_beside_us
}

fn is_stream(row: &Row, metric: &str) -> bool {
    let is_pair = row.situation().1 == "quinion uncached" && row.peer_name == Some("kernel buffered");
    row.experiment == "stream" && row.metric == metric && is_pair
}

/// Writes the headlines, each above what this run has of it.
pub fn put(html: &mut String, sections: &[Section]) {
    html.push_str("<h2 id=\"headlines\">The originals' headlines, and ours</h2>\n");
    html.push_str(
        "<p class=\"dim\">Each original is a change of the Linux kernel, measured by its author against the kernel \
         without it. Ours is measured here, against Quinion without it where that can be chosen.</p>\n",
    );
    html.push_str(
        "<table><thead><tr><th>mechanism</th><th>announced</th><th>here</th></tr></thead><tbody>\n",
    );
    for headline in &HEADLINES {
        let rows = sections.iter().flat_map(|section| &section.rows).filter(|row| (headline.asks)(row));
        let here: Vec<String> = rows.map(|row| told(row, headline)).collect();
        let here = if here.is_empty() {
            "<span class=\"dim\">not in this run</span>".to_owned()
        } else {
            here.concat()
        };
        let (mechanism, announced) = (escaped(headline.mechanism), escaped(headline.announced));
        put!(html, "<tr><td>{mechanism}</td><td>{announced}</td><td>{here}</td></tr>\n");
    }
    html.push_str("</tbody></table>\n");
}

/// A row of ours: the ratio, both sides as they are, and why it is less if it is.
fn told(row: &Row, headline: &Headline) -> String {
    let [.., ratio, _, _] = row.cells();
    let mut text = format!(
        "<div>{}, {}: <b>{ratio}</b> ({} against {} {} of {})",
        escaped(&row.case),
        escaped(row.metric),
        row.quinion.map_or("-".to_owned(), digits),
        row.peer.map_or("-".to_owned(), digits),
        escaped(row.unit),
        escaped(row.peer_name.unwrap_or("nothing")),
    );
    if headline.ratio.zip(row.ratio).is_some_and(|(announced, ours)| ours < announced) {
        put!(text, "<br><span class=\"dim\">less, probably: {}</span>", headline.reason);
    }
    text + "</div>"
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn a_headline_stands_above_what_asks_the_same_and_says_why_it_is_less() {
        let of = |metric, ratio: f64| Row {
            experiment: "readseq",
            ..row("cold: quinion run", metric, 10.0, Some(("one by one", 10.0 * ratio)))
        };
        let rows = vec![of("P50", 1.02), of("P99", 2.0), of("P75", f64::NAN)];
        let mut html = String::new();
        put(&mut html, &[Section { name: "readseq", question: "?", rows, unmeasured: Vec::new() }]);
        assert!(html.contains("<b>1.02x [1.02 1.02]</b> (10.00 against 10.20 ns of one by one)"), "{html}");
        assert_eq!(html.matches(FEW_INSERTIONS).count(), 1, "P99 is more than was announced: {html}");
        assert_eq!(html.matches("not in this run").count(), HEADLINES.len() - 3, "{html}");
    }

    /// What is wanted of throughput is not what is wanted of the processor's time.
    #[test]
    fn each_row_stands_below_one_headline() {
        let stream = |metric| Row {
            experiment: "stream",
            ..row("64 KiB: quinion uncached", metric, 10.0, Some(("kernel buffered", 18.0)))
        };
        let rows = vec![stream("throughput"), stream("cpu")];
        let mut html = String::new();
        put(&mut html, &[Section { name: "stream", question: "?", rows, unmeasured: Vec::new() }]);
        assert_eq!(html.matches("<b>").count(), 2, "{html}");
        assert!(!html.contains(DEVICE_BOUND) && html.contains(COPIED_ALIKE), "{html}");
    }

    #[test]
    fn a_percentage_is_the_ratio_that_it_comes_to() {
        assert!((lower_by(50.0) - 2.0).abs() < 1e-9 && (lower_by(63.9) - 2.77).abs() < 0.001);
    }
}
