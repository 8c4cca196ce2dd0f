//! Curves: what is better seen as lines, as SVG inside the page.
//!
//! ```text
//!   hit ratios      a chart for each trace: per cent against the size of the cache; sizes stand at equal distances,
//!                   as they are: 1, 5, 10, 20 % would crowd at the left
//!   time series     a chart for each situation: each way's intervals, at the seconds at which they ended
//!   latencies       a chart for each situation: each way's P50, P75, P99 .., on a scale of powers of ten
//! ```
//!
//! Ours is the first and the thickest, and lies on top; what nothing can be better than is grey and dashed. The
//! words below a chart say which line is whose, so that they may wrap.

use super::bars::grouped;
use super::{Section, escaped};
use crate::harness::hit_ratios;
use crate::harness::rows::{PeerKind, Row, Series};
use quinion_cli::report::digits;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 410.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 212.0;
/// Lines of a grid from zero, at most and about.
const GRID_STEPS: f64 = 5.0;
/// Colours that the style has names for.
const COLOURS: usize = 8;

/// One drawing.
struct Chart {
    title: String,
    /// Below each place of the x axis; empty where it is one of seconds.
    places: Vec<String>,
    x_name: &'static str,
    y_name: String,
    scale: Scale,
    curves: Vec<Curve>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scale {
    /// From zero.
    Linear,
    /// By powers of ten.
    Powers,
}

/// One line; a place without a number is left out, and so is a value whose second is not known.
struct Curve {
    name: String,
    /// Where its values stand on an axis of seconds; empty where they stand at the places.
    seconds: Vec<f64>,
    values: Vec<f64>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Ours,
    Peer,
    Bound,
}

impl Curve {
    fn at_places(name: &str, values: Vec<f64>, kind: Kind) -> Self {
        Self { name: name.to_owned(), seconds: Vec::new(), values, kind }
    }
}

/// The charts of an experiment, if it has any.
pub fn put(html: &mut String, section: &Section) {
    let mut charts = Vec::new();
    if section.name == hit_ratios::NAME {
        charts.extend(hit_ratio_charts(&section.rows));
    } else {
        for situation in grouped(section.rows.iter(), |row| row.situation().0) {
            charts.extend(series(&situation));
            charts.extend(latencies(&situation));
        }
    }
    if charts.is_empty() {
        return;
    }
    html.push_str("<div class=\"charts\">\n");
    for chart in &charts {
        put_chart(html, chart);
    }
    html.push_str("</div>\n");
}

fn hit_ratio_charts(rows: &[Row]) -> Vec<Chart> {
    let mut charts: Vec<Chart> = Vec::new();
    for line in hit_ratios::lines(rows) {
        let Some((trace, size)) = line.place() else { continue };
        if charts.last().is_none_or(|chart| chart.title != trace) {
            let kind = |name: &str| match name {
                hit_ratios::OURS => Kind::Ours,
                hit_ratios::OPTIMUM => Kind::Bound,
                _ => Kind::Peer,
            };
            let curve = |name: &str| Curve::at_places(name, Vec::new(), kind(name));
            charts.push(Chart {
                title: trace.to_owned(),
                places: Vec::new(),
                x_name: "cache, of the pages asked for",
                y_name: "hit ratio, %".to_owned(),
                scale: Scale::Linear,
                curves: line.ratios.iter().map(|(name, _)| curve(name)).collect(),
            });
        }
        let chart = charts.last_mut().expect("one was put there");
        chart.places.push(format!("{size} %"));
        for curve in &mut chart.curves {
            let found = line.ratios.iter().find(|(other, _)| *other == curve.name);
            curve.values.push(found.map_or(f64::NAN, |(_, ratio)| *ratio));
        }
    }
    charts
}

/// How the last repetition went, of each way that tells. A way that could not be measured has told nothing.
fn series(situation: &[&Row]) -> Option<Chart> {
    let told = situation.iter().filter_map(|row| Some((*row, row.series.as_ref()?)));
    let told: Vec<(usize, (&Row, &Series))> =
        told.enumerate().filter(|(_, (_, series))| !series.values.is_empty()).collect();
    let (_, (first, course)) = *told.first()?;
    let curve = |(number, (row, series)): &(usize, (&Row, &Series))| Curve {
        name: row.situation().1.to_owned(),
        seconds: series.seconds.clone(),
        values: series.values.clone(),
        kind: if *number == 0 { Kind::Ours } else { Kind::Peer },
    };
    Some(Chart {
        title: format!("{}: {}, the last repetition", first.situation().0, first.metric),
        places: Vec::new(),
        x_name: "seconds from the beginning",
        y_name: course.unit.to_owned(),
        scale: Scale::Linear,
        curves: told.iter().map(curve).collect(),
    })
}

/// The share of a metric that is one of a distribution's: 99 of "P99" and of "hot p99".
fn percentile(metric: &str) -> Option<f64> {
    let last = metric.rsplit(' ').next()?;
    last.strip_prefix(['p', 'P'])?.parse().ok().filter(|share| (0.0..=100.0).contains(share))
}

/// Each way's latencies, if two or more of its distribution are known.
fn latencies(situation: &[&Row]) -> Option<Chart> {
    let known = |row: &&&Row| percentile(row.metric).is_some();
    let rows: Vec<&Row> = situation.iter().filter(known).copied().collect();
    let mut metrics: Vec<&'static str> = Vec::new();
    for row in &rows {
        if !metrics.contains(&row.metric) {
            metrics.push(row.metric);
        }
    }
    let of = |metric: &&'static str| percentile(metric).unwrap_or(f64::NAN);
    metrics.sort_by(|a, b| of(a).total_cmp(&of(b)));
    if metrics.len() < 2 {
        return None;
    }
    let mut curves: Vec<Curve> = Vec::new();
    let mut note = |name: &str, kind, metric: &str, value: Option<f64>| {
        if curves.iter().all(|curve| curve.name != name) {
            curves.push(Curve::at_places(name, vec![f64::NAN; metrics.len()], kind));
        }
        let curve = curves.iter_mut().find(|curve| curve.name == name).expect("it was put there");
        let at = metrics.iter().position(|known| *known == metric).expect("it is one of them");
        curve.values[at] = value.unwrap_or(f64::NAN);
    };
    for row in &rows {
        note(row.situation().1, Kind::Ours, row.metric, row.quinion);
        let kind = if row.standing == PeerKind::Bound { Kind::Bound } else { Kind::Peer };
        if let Some(name) = row.peer_name {
            note(name, kind, row.metric, row.peer);
        }
    }
    Some(Chart {
        title: format!("{}: latency", rows[0].situation().0),
        places: metrics.iter().map(|metric| (*metric).to_owned()).collect(),
        x_name: "share of the reads that are not slower",
        y_name: rows[0].unit.to_owned(),
        scale: Scale::Powers,
        curves,
    })
}

/// The values that the y axis goes from and to.
fn ends(chart: &Chart) -> (f64, f64) {
    let values = || {
        chart.curves.iter().flat_map(|curve| &curve.values).copied().filter(|value| is_drawn(chart, *value))
    };
    let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    match chart.scale {
        _ if high <= 0.0 => (if chart.scale == Scale::Powers { 1.0 } else { 0.0 }, 10.0),
        Scale::Linear => {
            let step = rounded_up(high / GRID_STEPS);
            (0.0, step * (high / step).ceil())
        }
        Scale::Powers => {
            let (low, high) = (10_f64.powf(low.log10().floor()), 10_f64.powf(high.log10().ceil()));
            (low, if high > low { high } else { low * 10.0 })
        }
    }
}

/// Where an axis of seconds ends; `None` if the chart has none.
fn seconds_end(chart: &Chart) -> Option<f64> {
    let seconds = chart.curves.iter().flat_map(|curve| &curve.seconds).copied();
    let last = seconds.filter(|seconds| seconds.is_finite()).reduce(f64::max)?;
    let step = rounded_up(last / GRID_STEPS);
    (last > 0.0).then(|| step * (last / step).ceil())
}

fn is_drawn(chart: &Chart, value: f64) -> bool {
    value.is_finite() && (chart.scale == Scale::Linear || value > 0.0)
}

/// The next number of one digit that is 1, 2, 5 or 10 times a power of ten.
fn rounded_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= value);
    digit.unwrap_or(10.0) * power
}

/// The lines of the grid: values of the y axis.
fn grid(scale: Scale, (low, high): (f64, f64)) -> Vec<f64> {
    match scale {
        Scale::Linear => {
            let step = rounded_up(high / GRID_STEPS);
            (0..=(high / step).round() as u32).map(|line| step * f64::from(line)).collect()
        }
        Scale::Powers => {
            let powers = (high / low).log10().round() as i32;
            (0..=powers).map(|power| low * 10_f64.powi(power)).collect()
        }
    }
}

fn put_chart(html: &mut String, chart: &Chart) {
    let ends = ends(chart);
    let places = chart.curves.iter().map(|curve| curve.values.len()).max().unwrap_or(0).max(1);
    let x = |place: usize| LEFT + (RIGHT - LEFT) * (place as f64 + 0.5) / places as f64;
    let last = seconds_end(chart);
    let after = |seconds: f64| LEFT + (RIGHT - LEFT) * seconds / last.unwrap_or(1.0);
    let y = |value: f64| {
        let share = match chart.scale {
            Scale::Linear => value / ends.1,
            Scale::Powers => (value / ends.0).log10() / (ends.1 / ends.0).log10(),
        };
        BOTTOM - (BOTTOM - TOP) * share
    };
    put!(html, "<figure><figcaption>{}</figcaption>\n", escaped(&chart.title));
    put!(
        html,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
        escaped(&chart.title)
    );
    put!(html, "<text x=\"2\" y=\"{}\">{}</text>\n", TOP - 14.0, escaped(&chart.y_name));
    for value in grid(chart.scale, ends) {
        let at = y(value);
        put!(html, "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{RIGHT}\"/>");
        put!(
            html,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            LEFT - 6.0,
            at + 4.0,
            short(value)
        );
    }
    for (place, label) in chart.places.iter().enumerate() {
        let (at, below) = (x(place), BOTTOM + 18.0);
        put!(html, "<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{}</text>\n", escaped(label));
    }
    for seconds in last.map_or(Vec::new(), |last| grid(Scale::Linear, (0.0, last))) {
        let (at, below) = (after(seconds), BOTTOM + 18.0);
        put!(html, "<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{}</text>\n", short(seconds));
    }
    // Ours last, so that it lies on top.
    for (number, curve) in chart.curves.iter().enumerate().rev() {
        let place = |at: usize| match curve.seconds.as_slice() {
            [] => Some(x(at)),
            seconds => seconds.get(at).filter(|seconds| seconds.is_finite()).map(|&seconds| after(seconds)),
        };
        let drawn = curve.values.iter().enumerate().filter(|(_, value)| is_drawn(chart, **value));
        let points = drawn.filter_map(|(at, value)| Some(format!("{:.1},{:.1}", place(at)?, y(*value))));
        let points: Vec<_> = points.collect();
        put!(html, "<polyline class=\"{}\" points=\"{}\"/>\n", class(number, curve.kind), points.join(" "));
    }
    let middle = (LEFT + RIGHT) / 2.0;
    put!(
        html,
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n</svg>\n",
        HEIGHT - 8.0,
        chart.x_name
    );
    html.push_str("<div class=\"legend\">");
    for (number, curve) in chart.curves.iter().enumerate() {
        let class = class(number, curve.kind);
        put!(html, "<span><svg viewBox=\"0 0 24 8\"><path class=\"{class}\" d=\"M0 4h24\"/></svg>");
        put!(html, "{}</span>", escaped(&curve.name));
    }
    html.push_str("</div></figure>\n");
}

/// A value of the grid, in few letters: 0, 20, 0.5, 10k, 3M.
fn short(value: f64) -> String {
    let (value, unit) = match value {
        _ if value >= 1e9 => (value / 1e9, "G"),
        _ if value >= 1e6 => (value / 1e6, "M"),
        _ if value >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = digits(value);
    let plain =
        if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { &digits };
    format!("{plain}{unit}")
}

fn class(number: usize, kind: Kind) -> String {
    match kind {
        Kind::Ours => format!("curve ours c{}", number % COLOURS),
        Kind::Peer => format!("curve c{}", number % COLOURS),
        Kind::Bound => "curve bound".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn percentiles_are_known_by_their_names() {
        let known = ["P50", "hot p99", "p99.9", "throughput", "page", "p"].map(percentile);
        assert_eq!(known, [Some(50.0), Some(99.0), Some(99.9), None, None, None]);
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!([0.7, 1.0, 1.2, 30.0, 99.0, 1234.0].map(rounded_up), [1.0, 1.0, 2.0, 50.0, 100.0, 2000.0]);
        assert_eq!(grid(Scale::Powers, (1.0, 1000.0)), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(grid(Scale::Linear, (0.0, 50.0)), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!(grid(Scale::Linear, (0.0, 80.0)), [0.0, 20.0, 40.0, 60.0, 80.0]);
        let labels = [0.0, 20.0, 0.5, 10_000.0, 3e6, 2e9, 100.0].map(short);
        assert_eq!(labels, ["0", "20", "0.5", "10k", "3M", "2G", "100"]);
    }

    #[test]
    fn latencies_stand_in_rising_order_and_a_gap_is_left_out() {
        let rows = [
            row("x: ours", "p99", 90.0, Some(("peer", 400.0))),
            row("x: ours", "p50", 2.0, Some(("peer", 3.0))),
            row("x: ours", "p50", 2.0, Some(("other", 5.0))),
            row("x: ours", "time", 7.0, None),
        ];
        let chart = latencies(&rows.iter().collect::<Vec<_>>()).expect("there are two");
        assert_eq!(chart.places, ["p50", "p99"]);
        let curves: Vec<_> =
            chart.curves.iter().map(|curve| (curve.name.as_str(), curve.values.clone())).collect();
        assert_eq!(curves[..2], [("ours", vec![2.0, 90.0]), ("peer", vec![3.0, 400.0])]);
        assert!(curves[2].1[1].is_nan());
        assert_eq!(ends(&chart), (1.0, 1000.0));
        let mut html = String::new();
        put_chart(&mut html, &chart);
        assert_eq!(html.matches("<polyline").count(), 3, "{html}");
        assert!(latencies(&[&rows[0]]).is_none());
    }

    #[test]
    fn a_trace_is_a_chart_with_a_curve_for_each_policy_and_ours_lies_on_top() {
        let at_size = |percent: u32, ours: f64| {
            let case = format!("trace at {percent} %: {}", hit_ratios::OURS);
            [("Linux", 40.0), (hit_ratios::OPTIMUM, 70.0)]
                .map(|(peer, ratio)| row(&case, "hit ratio", ours, Some((peer, ratio))))
        };
        let charts = hit_ratio_charts(&[at_size(1, 45.0), at_size(5, 60.0)].concat());
        assert_eq!((charts.len(), charts[0].places.len()), (1, 2));
        assert_eq!(
            (charts[0].curves[0].name.as_str(), charts[0].curves[0].kind),
            (hit_ratios::OURS, Kind::Ours)
        );
        assert!(charts[0].curves.iter().any(|curve| curve.kind == Kind::Bound));
        let mut html = String::new();
        put_chart(&mut html, &charts[0]);
        let last = html.rsplit("<polyline").next().unwrap();
        assert!(last.starts_with(" class=\"curve ours c0\""), "{last}");
    }

    #[test]
    fn each_way_that_tells_is_a_line() {
        let series_of = |values: &[f64]| Series {
            unit: "MB/s",
            seconds: (1..=values.len()).map(|second| second as f64).collect(),
            values: values.to_vec(),
        };
        let told = |case: &str| Row { series: Some(series_of(&[1.0, 3.0])), ..row(case, "rate", 2.0, None) };
        let rows = [told("s: ours"), told("s: kernel"), row("s: ours", "cpu", 1.0, None)];
        let chart = series(&rows.iter().collect::<Vec<_>>()).expect("two tell");
        assert_eq!(chart.curves.len(), 2);
        assert_eq!((ends(&chart), seconds_end(&chart)), ((0.0, 3.0), Some(2.0)));
        let mut html = String::new();
        put_chart(&mut html, &chart);
        // The last interval ends where the axis does, and half as far is half of it.
        assert!(
            html.contains(">MB/s</text>") && html.contains(">seconds from the beginning</text>"),
            "{html}"
        );
        assert!(html.contains("points=\"233.0,150.0 410.0,26.0\""), "{html}");
        assert!(series(&[&rows[2]]).is_none());
    }

    /// A row whose way has told so much, at these seconds.
    fn telling(case: &str, seconds: &[f64], values: &[f64]) -> Row {
        let unit = if values.is_empty() { "" } else { "MB/s" };
        let series = Series { unit, seconds: seconds.to_vec(), values: values.to_vec() };
        Row { series: Some(series), ..row(case, "rate", 2.0, None) }
    }

    fn points(chart: &Chart) -> Vec<String> {
        let mut html = String::new();
        put_chart(&mut html, chart);
        assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
        let drawn = html.split("points=\"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned());
        drawn.collect()
    }

    #[test]
    fn an_interval_without_a_number_or_a_second_is_left_out_and_the_others_stay_where_they_are() {
        let unusual = [
            telling("s: ours", &[1.0, 2.0, 4.0], &[1.0, f64::NAN, 3.0]),
            telling("s: no second", &[1.0], &[1.0, 2.0]),
            telling("s: wrong second", &[f64::NAN, 4.0], &[2.0, 3.0]),
            telling("s: nothing but zero", &[1.0, 4.0], &[0.0, f64::INFINITY]),
        ];
        let chart = series(&unusual.iter().collect::<Vec<_>>()).expect("all tell");
        assert_eq!((ends(&chart), seconds_end(&chart)), ((0.0, 3.0), Some(4.0)));
        // The last is drawn first.
        let expected = ["144.5,212.0", "410.0,26.0", "144.5,150.0", "144.5,150.0 410.0,26.0"];
        assert_eq!(points(&chart), expected);
    }

    /// 1. Our way could not be measured, and has told nothing.
    /// 2. The first peer is drawn as if it were ours, on an axis without a unit.
    #[test]
    fn a_way_that_tells_nothing_has_no_line_and_lends_its_look_to_nobody() {
        let rows = [telling("s: ours", &[], &[]), telling("s: kernel", &[1.0, 2.0], &[1.0, 2.0])];
        let chart = series(&rows.iter().collect::<Vec<_>>()).expect("one tells");
        assert_eq!(
            (chart.curves.len(), chart.curves[0].kind, chart.y_name.as_str()),
            (1, Kind::Peer, "MB/s")
        );
        assert!(series(&[&rows[0]]).is_none(), "nothing is no chart");
        // One interval that took no time, of nothing.
        let chart = series(&[&telling("s: ours", &[0.0], &[0.0])]).expect("it tells");
        assert_eq!((ends(&chart), seconds_end(&chart)), ((0.0, 10.0), None));
        assert_eq!(points(&chart), ["56.0,212.0"]);
    }

    #[test]
    fn a_latency_that_is_missing_or_zero_is_left_out_on_a_scale_of_powers() {
        let missing = Row { quinion: None, ..row("x: ours", "p99", 1.0, Some(("peer", 100.0))) };
        let rows = [
            row("x: ours", "p50", 0.0, Some(("peer", 1.0))),
            missing,
            row("x: ours", "p99.9", 1000.0, Some(("peer", f64::NAN))),
        ];
        let chart = latencies(&rows.iter().collect::<Vec<_>>()).expect("there are three");
        assert_eq!((chart.places.join(" "), ends(&chart)), ("p50 p99 p99.9".to_owned(), (1.0, 1000.0)));
        // The peer's first: of ours the last is left, of the peer's all but that.
        assert_eq!(points(&chart), ["115.0,212.0 233.0,88.0", "351.0,26.0"]);
        let nothing = [row("x: ours", "p50", f64::NAN, None), row("x: ours", "p99", f64::NAN, None)];
        let chart = latencies(&nothing.iter().collect::<Vec<_>>()).expect("two are asked");
        assert_eq!((ends(&chart), points(&chart)), ((1.0, 10.0), vec![String::new()]));
    }
}
