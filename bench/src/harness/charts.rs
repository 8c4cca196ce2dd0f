//! Charts: lines in a frame, drawn as SVG by the crate `plotters`.
//!
//! ```text
//!   Ground::Page    inside a page: its ink is the page's, light or dark, and there is nothing below it
//!   Ground::Paper   a file by itself: dark ink on white
//! ```
//!
//! Quinion's is the thickest line, and is drawn last, so that it lies on top; a bound is thin and grey. A scale of
//! powers is logarithmic, and its labels are the powers.
//!
//! Invariant: a value that is not a number, has no second, or is not above zero on a scale of powers is left out, and
//! the others stay where they are.

use std::ops::Range;

use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::drawing::IntoDrawingArea;
use plotters::element::PathElement;
use plotters::series::LineSeries;
use plotters::style::{Color, IntoFont, RGBColor, WHITE};
use quinion_run::report::digits;

const WIDTH: u32 = 560;
const HEIGHT: u32 = 340;
const FONT: u32 = 16;
const GRID_LINES: usize = 6;

/// First Quinion's, then the others'. They can be told apart on white and on black.
const COLOURS: [RGBColor; 8] = [
    RGBColor(217, 84, 30),
    RGBColor(45, 127, 201),
    RGBColor(46, 150, 90),
    RGBColor(145, 105, 205),
    RGBColor(184, 134, 11),
    RGBColor(20, 150, 152),
    RGBColor(165, 90, 50),
    RGBColor(209, 73, 139),
];
const BOUND: RGBColor = RGBColor(140, 148, 160);
/// A colour that no line has: on a page it becomes the page's own.
const INK: RGBColor = RGBColor(1, 2, 3);
const INK_TEXT: &str = "#010203";
/// Removed: a page fetches nothing, and must not look as if it did.
const NAME_SPACE: &str = " xmlns=\"http://www.w3.org/2000/svg\"";

pub struct Chart {
    pub title: String,
    pub places: Vec<String>,
    pub x_name: &'static str,
    pub y_name: String,
    pub scale: Scale,
    pub curves: Vec<Curve>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    Linear,
    /// An axis with a line at each power of ten.
    Powers,
}

pub struct Curve {
    pub name: String,
    /// Places of its values on an axis of seconds; empty on an axis of places.
    pub seconds: Vec<f64>,
    pub values: Vec<f64>,
    pub kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Ours,
    Peer,
    /// No line can be better.
    Bound,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ground {
    Page,
    Paper,
}

impl Curve {
    pub fn at_places(name: &str, values: Vec<f64>, kind: Kind) -> Self {
        Self { name: name.to_owned(), seconds: Vec::new(), values, kind }
    }

    /// The points that are drawn of it.
    pub fn points(&self, scale: Scale) -> Vec<(f64, f64)> {
        let place = |at: usize| match self.seconds.as_slice() {
            [] => Some(at as f64),
            seconds => seconds.get(at).copied().filter(|seconds| seconds.is_finite()),
        };
        let value = |value: f64| match scale {
            Scale::Linear => Some(value),
            Scale::Powers => (value > 0.0).then(|| value.log10()),
        };
        let all = self.values.iter().enumerate().filter(|(_, value)| value.is_finite());
        all.filter_map(|(at, &number)| Some((place(at)?, value(number)?))).collect()
    }

    fn colour(&self, number: usize) -> RGBColor {
        if self.kind == Kind::Bound { BOUND } else { COLOURS[number % COLOURS.len()] }
    }

    fn width(&self) -> u32 {
        if self.kind == Kind::Ours { 3 } else { 1 + u32::from(self.kind == Kind::Peer) }
    }
}

pub fn svg(chart: &Chart, ground: Ground) -> String {
    let mut text = String::new();
    draw(chart, ground, &mut text).expect("a string takes all that is drawn");
    match ground {
        Ground::Page => text.replace(NAME_SPACE, "").replace(INK_TEXT, "currentColor"),
        Ground::Paper => text,
    }
}

fn draw(chart: &Chart, ground: Ground, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(text, (WIDTH, HEIGHT)).into_drawing_area();
    let font = || ("sans-serif", FONT).into_font().color(&INK);
    let (x, y) = (across(chart), up(chart));
    let mut builder = ChartBuilder::on(&root);
    builder.margin(8).x_label_area_size(42).y_label_area_size(58);
    if ground == Ground::Paper {
        root.fill(&WHITE)?;
        builder.caption(&chart.title, ("sans-serif", FONT + 2).into_font().color(&INK));
    }
    let mut frame = builder.build_cartesian_2d(x, y)?;
    let below = |at: &f64| label(chart, *at);
    let beside = |value: &f64| match chart.scale {
        Scale::Linear => short(*value),
        Scale::Powers if is_whole(*value) => short(10_f64.powf(*value)),
        Scale::Powers => String::new(),
    };
    frame
        .configure_mesh()
        .light_line_style(INK.mix(0.0))
        .bold_line_style(INK.mix(0.15))
        .axis_style(INK.mix(0.4))
        .label_style(font())
        .axis_desc_style(font())
        .x_labels(if chart.places.is_empty() { GRID_LINES } else { 2 * chart.places.len() + 2 })
        .y_labels(GRID_LINES)
        .x_label_formatter(&below)
        .y_label_formatter(&beside)
        .x_desc(chart.x_name)
        .y_desc(&chart.y_name)
        .draw()?;
    for (number, curve) in chart.curves.iter().enumerate().rev() {
        let style = curve.colour(number).stroke_width(curve.width());
        let line = frame.draw_series(LineSeries::new(curve.points(chart.scale), style))?;
        line.label(&curve.name).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    frame
        .configure_series_labels()
        .position(match chart.scale {
            Scale::Linear => SeriesLabelPosition::LowerRight,
            Scale::Powers => SeriesLabelPosition::UpperLeft, // what rises leaves room there
        })
        .label_font(font())
        .background_style(WHITE.mix(0.0))
        .draw()?;
    root.present()?;
    Ok(())
}

/// The range of the x axis.
fn across(chart: &Chart) -> Range<f64> {
    if !chart.places.is_empty() {
        return -0.5..chart.places.len() as f64 - 0.5;
    }
    let seconds = chart.curves.iter().flat_map(|curve| &curve.seconds).copied();
    let last = seconds.filter(|seconds| seconds.is_finite()).fold(0.0, f64::max);
    0.0..if last > 0.0 { last } else { 1.0 }
}

fn up(chart: &Chart) -> Range<f64> {
    let points = || chart.curves.iter().flat_map(|curve| curve.points(chart.scale));
    let values = || points().map(|(_, value)| value);
    let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
    match chart.scale {
        _ if low > high => 0.0..1.0,
        Scale::Linear => 0.0..if high > 0.0 { high * 1.1 } else { 1.0 },
        Scale::Powers => low.floor()..high.ceil().max(low.floor() + 1.0),
    }
}

fn is_whole(value: f64) -> bool {
    (value - value.round()).abs() < 1e-6
}

/// The label of a place of the x axis.
fn label(chart: &Chart, at: f64) -> String {
    if chart.places.is_empty() {
        return short(at);
    }
    let place = is_whole(at).then(|| chart.places.get(at.round() as usize)).flatten();
    place.filter(|_| at > -0.5).cloned().unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: Scale, curves: Vec<Curve>) -> Chart {
        let places = vec!["p50".to_owned(), "p99 <".to_owned()];
        Chart { title: "a & b".to_owned(), places, x_name: "share", y_name: "us".to_owned(), scale, curves }
    }

    #[test]
    fn labels_of_a_grid_are_short() {
        let labels = [0.0, 20.0, 0.5, 10_000.0, 3e6, 2e9, 100.0].map(short);
        assert_eq!(labels, ["0", "20", "0.5", "10k", "3M", "2G", "100"]);
    }

    #[test]
    fn points_without_a_number_or_a_place_are_left_out_and_the_others_stay() {
        let values = vec![1.0, f64::NAN, 100.0, 0.0];
        let seconds = vec![1.0, 2.0, 4.0, 5.0];
        let curve = Curve { name: String::new(), seconds, values: values.clone(), kind: Kind::Ours };
        assert_eq!(curve.points(Scale::Linear), [(1.0, 1.0), (4.0, 100.0), (5.0, 0.0)]);
        assert_eq!(curve.points(Scale::Powers), [(1.0, 0.0), (4.0, 2.0)]);
        let short = Curve { seconds: vec![f64::NAN, 2.0, 3.0], ..curve };
        assert_eq!(short.points(Scale::Linear), [(3.0, 100.0)]);
    }

    #[test]
    fn ours_lies_on_top_and_every_line_has_its_name() {
        let curve = |name, kind| Curve::at_places(name, vec![2.0, 300.0], kind);
        let curves = vec![curve("ours", Kind::Ours), curve("peer", Kind::Peer), curve("bound", Kind::Bound)];
        let drawn = svg(&chart(Scale::Powers, curves), Ground::Page);
        let lines: Vec<&str> = drawn.split("<polyline").filter(|line| line.contains("#D9541E")).collect();
        assert!(lines[0].contains("stroke-width=\"3\""), "{drawn}");
        assert!(drawn.find("#2D7FC9") < drawn.find("#D9541E"), "{drawn}");
        for words in ["ours", "peer", "bound", "p50", "p99 &lt;", "share", "us", "currentColor"] {
            assert!(drawn.contains(words), "{words} is not in {drawn}");
        }
        assert!(!drawn.contains("http") && !drawn.contains(INK_TEXT), "{drawn}");
    }

    #[test]
    fn paper_is_white_and_a_file_of_its_own() {
        let drawn = svg(&chart(Scale::Linear, Vec::new()), Ground::Paper);
        assert!(
            drawn.contains(NAME_SPACE) && drawn.contains("#FFFFFF") && drawn.contains("a &amp; b"),
            "{drawn}"
        );
    }

    #[test]
    fn nothing_one_point_and_zeros_can_be_drawn() {
        for values in [vec![], vec![5.0], vec![0.0, 0.0], vec![f64::INFINITY, 1.0]] {
            for scale in [Scale::Linear, Scale::Powers] {
                let curve = Curve::at_places("x", values.clone(), Kind::Ours);
                let drawn = svg(&chart(scale, vec![curve]), Ground::Page);
                assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
            }
        }
    }
}
