//! Bars: the values of a situation and a metric side by side, with their quartiles, and the ratios below.
//!
//! ```text
//!   situation                         folded away if it has no goal
//!     metric, unit
//!       quinion    #######|--|        7.1      each way once, Quinion's first, all to one scale from zero
//!       peer       ################  31.2
//!     quinion | peer | ratio [quartiles] | goal | verdict
//! ```
//!
//! A bar is an element of the page with a width, and no picture of the plot library: name, value and reason are text
//! of the page, which can be searched, copied and folded away with its situation, and a page of some hundred metrics
//! needs no script for that. Curves have axes, and the library draws them (`curves.rs`).

use super::escaped;
use crate::harness::rows::Row;
use quinion_run::report::digits;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TableLead {
    /// Experiment, case and metric: the rows are of different ones.
    Where,
    /// Which of Quinion's ways: the rest stands above.
    Way,
}

struct Bar<'a> {
    name: &'a str,
    is_ours: bool,
    value: Option<f64>,
    spread: Option<[f64; 2]>,
    why: Option<&'a str>,
}

pub fn put(html: &mut String, rows: &[Row]) {
    for situation in grouped(rows.iter(), |row| row.situation().0) {
        let has_goal = situation.iter().any(|row| row.met.is_some());
        let open = if has_goal { " open" } else { "" };
        put!(html, "<details{open}><summary>{}", escaped(situation[0].situation().0));
        for (met, word) in [(true, "met"), (false, "missed")] {
            let count = situation.iter().filter(|row| row.met == Some(met)).count();
            if count > 0 {
                put!(html, " <span class=\"badge {word}\">{count} {word}</span>");
            }
        }
        let unsteady = situation.iter().filter(|row| !row.is_steady()).count();
        if unsteady > 0 {
            put!(html, " <span class=\"dim\">{unsteady} not steady</span>");
        }
        html.push_str("</summary>\n");
        for metric in grouped(situation.iter().copied(), |row| row.metric) {
            put!(
                html,
                "<h3>{} <span class=\"dim\">{}</span></h3>\n",
                escaped(metric[0].metric),
                escaped(metric[0].unit)
            );
            put_bars(html, &bars(&metric));
            let compared: Vec<&Row> = metric.into_iter().filter(|row| row.peer_name.is_some()).collect();
            if !compared.is_empty() {
                put_table(html, &compared, TableLead::Way);
            }
        }
        html.push_str("</details>\n");
    }
}

/// Rows that have the same key, in the order of the keys' first rows.
pub fn grouped<'a, K: PartialEq>(
    rows: impl Iterator<Item = &'a Row>,
    key: impl Fn(&'a Row) -> K,
) -> Vec<Vec<&'a Row>> {
    let mut groups: Vec<(K, Vec<&Row>)> = Vec::new();
    for row in rows {
        let key = key(row);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(row),
            None => groups.push((key, vec![row])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Each way that the rows name, once; Quinion's first.
fn bars<'a>(rows: &[&'a Row]) -> Vec<Bar<'a>> {
    let mut bars: Vec<Bar> = Vec::new();
    for row in rows {
        let why =
            |name: &str| row.not_measured.iter().find(|(of, _)| *of == name).map(|(_, why)| why.as_str());
        let name = row.situation().1;
        let ours =
            Bar { name, is_ours: true, value: row.quinion, spread: row.quinion_spread, why: why(name) };
        let peer = row.peer_name.map(|name| Bar {
            name,
            is_ours: false,
            value: row.peer,
            spread: row.peer_spread,
            why: why(name),
        });
        for bar in [Some(ours), peer].into_iter().flatten() {
            if bars.iter().all(|known| known.name != bar.name) {
                bars.push(bar);
            }
        }
    }
    bars.sort_by_key(|bar| !bar.is_ours);
    bars
}

fn put_bars(html: &mut String, bars: &[Bar]) {
    let ends = bars.iter().flat_map(|bar| [bar.value, bar.spread.map(|[_, high]| high)]).flatten();
    let top = ends.filter(|end| end.is_finite()).fold(0.0, f64::max);
    let percent = |value: f64| if top > 0.0 { (100.0 * value / top).clamp(0.0, 100.0) } else { 0.0 };
    for bar in bars {
        let class = if bar.is_ours { "bar ours" } else { "bar" };
        put!(
            html,
            "<div class=\"{class}\"><span class=\"who\">{}</span><span class=\"track\">",
            escaped(bar.name)
        );
        if let Some(value) = bar.value {
            put!(html, "<span class=\"fill\" style=\"width:{:.1}%\"></span>", percent(value));
        }
        if let Some([low, high]) = bar.spread.filter(|[low, high]| high > low) {
            let (left, width) = (percent(low), percent(high) - percent(low));
            put!(html, "<span class=\"whisker\" style=\"left:{left:.1}%;width:{width:.1}%\"></span>");
        }
        let value = bar.value.map_or_else(|| "not measured".to_owned(), digits);
        put!(html, "</span><span class=\"value\">{value}</span></div>\n");
        if let Some(why) = bar.why.filter(|_| bar.value.is_none()) {
            put!(html, "<p class=\"dim\">{}: {}</p>\n", escaped(bar.name), escaped(why));
        }
    }
}

pub fn put_table(html: &mut String, rows: &[&Row], told: TableLead) {
    let first = if told == TableLead::Where { "where" } else { "ours" };
    put!(html, "<table><thead><tr><th>{first}</th><th>beside</th><th>ratio [quartiles]</th>");
    html.push_str("<th>goal</th><th></th></tr></thead><tbody>\n");
    for row in rows {
        let place = match told {
            TableLead::Where => format!(
                "<a href=\"#{0}\">{0}</a> {1}, {2}: {3} against {4} {5}",
                row.experiment,
                escaped(&row.case),
                escaped(row.metric),
                row.quinion.map_or("-".to_owned(), digits),
                row.peer.map_or("-".to_owned(), digits),
                escaped(row.unit)
            ),
            TableLead::Way => escaped(row.situation().1),
        };
        let [.., ratio, goal, verdict] = row.cells();
        let goal = if row.goal.is_some() {
            format!("<span class=\"narrow\">goal </span>{goal}")
        } else {
            String::new()
        };
        let class = match row.met {
            Some(true) => "badge met",
            _ if row.is_lost() => "badge missed",
            _ => "dim",
        };
        let verdict = if verdict.is_empty() {
            String::new()
        } else {
            format!("<span class=\"{class}\">{verdict}</span>")
        };
        let peer = escaped(row.peer_name.unwrap_or("-"));
        put!(
            html,
            "<tr><td>{place}</td><td><span class=\"narrow\">beside </span>{peer}</td><td class=\"number\">{ratio}</td>\
             <td class=\"number\">{goal}</td><td>{verdict}</td></tr>\n"
        );
    }
    html.push_str("</tbody></table>\n");
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn each_way_is_one_bar_and_the_longest_reaches_the_end() {
        let rows = [
            row("x: ours", "time", 10.0, Some(("peer", 40.0))),
            row("x: ours", "time", 10.0, Some(("other", 20.0))),
            row("x: too", "time", 5.0, Some(("peer", 40.0))),
        ];
        let bars = bars(&rows.iter().collect::<Vec<_>>());
        let names: Vec<_> = bars.iter().map(|bar| (bar.name, bar.is_ours)).collect();
        assert_eq!(names, [("ours", true), ("too", true), ("peer", false), ("other", false)]);
        let mut html = String::new();
        put_bars(&mut html, &bars);
        // The peer's upper quartile is at 44.
        assert!(html.contains("width:90.9%") && html.contains("left:81.8%;width:18.2%"), "{html}");
    }

    #[test]
    fn nothing_but_zeros_and_gaps_is_drawn_too() {
        let mut none = row("x: ours", "time", 0.0, Some(("peer", 0.0)));
        (none.peer, none.quinion_spread, none.peer_spread) = (None, None, None);
        let mut html = String::new();
        put(&mut html, &[none]);
        assert!(html.contains("width:0.0%") && html.contains("not measured"), "{html}");
    }
}
