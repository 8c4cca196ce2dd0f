//! Curves: what is better seen as lines, as SVG inside the page.
//!
//! ```text
//!   hit ratios      a chart for each trace: per cent against the size of the cache; sizes stand at equal distances,
//!                   as they are: 1, 5, 10, 20 % would crowd at the left
//!   time series     a chart for each situation: each way's intervals, at the seconds at which they ended
//!   latencies       a chart for each situation: each way's P50, P75, P99 .., on a scale of powers of ten
//! ```
//!
//! They are drawn by `charts`.

use super::bars::grouped;
use super::{Section, escaped};
use crate::harness::charts::{Chart, Curve, Ground, Kind, Scale, svg};
use crate::harness::hit_ratios;
use crate::harness::rows::{PeerKind, Row, Series};

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
        put!(
            html,
            "<figure><figcaption>{}</figcaption>\n{}</figure>\n",
            escaped(&chart.title),
            svg(chart, Ground::Page)
        );
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
        assert_eq!(chart.curves[2].points(chart.scale).len(), 1);
        assert!(latencies(&[&rows[0]]).is_none());
    }

    #[test]
    fn a_trace_is_a_chart_with_a_curve_for_each_policy_and_ours_is_the_first() {
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
    }

    /// A row whose way has this series.
    fn telling(case: &str, seconds: &[f64], values: &[f64]) -> Row {
        let unit = if values.is_empty() { "" } else { "MB/s" };
        let series = Series { unit, seconds: seconds.to_vec(), values: values.to_vec() };
        Row { series: Some(series), ..row(case, "rate", 2.0, None) }
    }

    #[test]
    fn each_way_that_tells_is_a_line() {
        let told = |case: &str| telling(case, &[1.0, 2.0], &[1.0, 3.0]);
        let rows = [told("s: ours"), told("s: kernel"), row("s: ours", "cpu", 1.0, None)];
        let chart = series(&rows.iter().collect::<Vec<_>>()).expect("two tell");
        assert_eq!((chart.curves.len(), chart.y_name.as_str()), (2, "MB/s"));
        assert_eq!(chart.curves[0].points(chart.scale), [(1.0, 1.0), (2.0, 3.0)]);
        assert!(series(&[&rows[2]]).is_none());
    }

    /// 1. Quinion's way could not be measured, and has no series.
    /// 2. The first peer is drawn as if it were Quinion's, on an axis without a unit.
    #[test]
    fn a_way_without_a_series_has_no_line_and_lends_its_look_to_no_other() {
        let rows = [telling("s: ours", &[], &[]), telling("s: kernel", &[1.0, 2.0], &[1.0, 2.0])];
        let chart = series(&rows.iter().collect::<Vec<_>>()).expect("one tells");
        assert_eq!(
            (chart.curves.len(), chart.curves[0].kind, chart.y_name.as_str()),
            (1, Kind::Peer, "MB/s")
        );
        assert!(series(&[&rows[0]]).is_none(), "nothing is no chart");
    }
}
