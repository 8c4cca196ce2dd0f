//! Plot: hit ratio against the size of the cache, a panel for each trace, as SVG.
//!
//! ```text
//!   trace         legend
//!   100 |
//!       |      ___--- optimum           sizes stand at equal distances, as they are:
//!       |  __--  ==== ours, thicker     1, 5, 10, 20 % would crowd at the left
//!     0 +--+---+---+--
//!          1   5   10
//! ```
//!
//! One file that needs no other: shapes, words and their colours.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::table::{Line, lines};
use super::{OPTIMUM, OURS};
use crate::bench::rows::Row;

const PANEL_WIDTH: f64 = 420.0;
const PANEL_HEIGHT: f64 = 320.0;
const MARGIN: f64 = 50.0;
const LEGEND_WIDTH: f64 = 140.0;
const LEGEND_STEP: f64 = 20.0;
const GRID_STEPS: u32 = 5;
/// Ours is the first that is drawn; the optimum is grey.
const COLOURS: [&str; 8] =
    ["#d00000", "#1f77b4", "#9ecae1", "#2ca02c", "#bcbd22", "#8c564b", "#ff7f0e", "#9467bd"];
const GREY: &str = "#777777";

/// Draws the traces among `rows` into the file `out`, or into a file of that folder; returns which it was.
///
/// # Errors
/// The file cannot be written.
pub fn write(rows: &[Row], out: &Path) -> Result<PathBuf, String> {
    let path = if out.is_dir() { out.join("ratio.svg") } else { out.to_owned() };
    std::fs::write(&path, drawn(rows)).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}

/// One trace: its name, its sizes in per cent, and what each policy reached at each.
struct Panel<'a> {
    trace: &'a str,
    sizes: Vec<f64>,
    curves: Vec<(&'a str, Vec<f64>)>,
}

fn panels<'a>(lines: &[Line<'a>]) -> Vec<Panel<'a>> {
    let mut panels: Vec<Panel> = Vec::new();
    for line in lines {
        let Some((trace, size)) = line.place() else { continue };
        if panels.last().is_none_or(|panel| panel.trace != trace) {
            let curves = line.ratios.iter().map(|(name, _)| (*name, Vec::new())).collect();
            panels.push(Panel { trace, sizes: Vec::new(), curves });
        }
        let panel = panels.last_mut().expect("one was put there");
        panel.sizes.push(size);
        for (name, curve) in &mut panel.curves {
            let found = line.ratios.iter().find(|(other, _)| other == name);
            curve.push(found.map_or(f64::NAN, |(_, ratio)| *ratio));
        }
    }
    panels
}

/// The picture.
fn drawn(rows: &[Row]) -> String {
    let lines = lines(rows);
    let panels = panels(&lines);
    let width = PANEL_WIDTH * panels.len() as f64 + LEGEND_WIDTH;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{PANEL_HEIGHT}\" \
         viewBox=\"0 0 {width} {PANEL_HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (number, panel) in panels.iter().enumerate() {
        let _ = writeln!(svg, "<g transform=\"translate({} 0)\">", PANEL_WIDTH * number as f64);
        draw_panel(&mut svg, panel);
        svg.push_str("</g>\n");
    }
    if let Some(panel) = panels.first() {
        draw_legend(&mut svg, panel, width - LEGEND_WIDTH);
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw_panel(svg: &mut String, panel: &Panel) {
    let (right, bottom) = (PANEL_WIDTH - MARGIN / 2.0, PANEL_HEIGHT - MARGIN);
    let all = panel.curves.iter().flat_map(|(_, curve)| curve).copied();
    let top = all.filter(|ratio| ratio.is_finite()).fold(10.0, f64::max);
    let top = (top / 10.0).ceil() * 10.0;
    let x = |place: usize| MARGIN + (right - MARGIN) * (place as f64 + 0.5) / panel.sizes.len() as f64;
    let y = |ratio: f64| bottom - (bottom - MARGIN) * ratio / top;
    let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"30\" font-size=\"15\">{}</text>", escaped(panel.trace));
    for step in 0..=GRID_STEPS {
        let ratio = top * f64::from(step) / f64::from(GRID_STEPS);
        let (at, label) = (y(ratio), MARGIN - 6.0);
        let _ = writeln!(svg, "<path d=\"M{MARGIN} {at:.1}H{right}\" stroke=\"#dddddd\"/>");
        let _ =
            writeln!(svg, "<text x=\"{label}\" y=\"{:.1}\" text-anchor=\"end\">{ratio:.0}</text>", at + 4.0);
    }
    for (place, size) in panel.sizes.iter().enumerate() {
        let (at, below) = (x(place), bottom + 18.0);
        let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{size} %</text>");
    }
    // Ours last, so that it lies on top.
    for (number, (name, curve)) in panel.curves.iter().enumerate().rev() {
        let points = curve.iter().enumerate().filter(|(_, ratio)| ratio.is_finite());
        let points: Vec<_> = points.map(|(at, ratio)| format!("{:.1},{:.1}", x(at), y(*ratio))).collect();
        let (points, style) = (points.join(" "), style(number, name));
        let _ = writeln!(svg, "<polyline points=\"{points}\" fill=\"none\" {style}/>");
    }
    let (x, y) = ((MARGIN + right) / 2.0, PANEL_HEIGHT - 10.0);
    let _ = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">cache, of the pages asked for</text>"
    );
}

fn draw_legend(svg: &mut String, panel: &Panel, left: f64) {
    let _ = writeln!(svg, "<text x=\"{left}\" y=\"30\">hit ratio, %</text>");
    for (number, (name, _)) in panel.curves.iter().enumerate() {
        let (y, style) = (MARGIN + LEGEND_STEP * number as f64, style(number, name));
        let _ = writeln!(svg, "<path d=\"M{left} {y}h24\" {style}/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\">{}</text>", left + 30.0, y + 4.0, escaped(name));
    }
}

fn style(number: usize, name: &str) -> String {
    let colour = if name == OPTIMUM { GREY } else { COLOURS[number % COLOURS.len()] };
    let (width, dashes) = match name {
        OURS => (3.0, ""),
        OPTIMUM => (1.5, " stroke-dasharray=\"4 3\""),
        _ => (1.5, ""),
    };
    format!("stroke=\"{colour}\" stroke-width=\"{width}\"{dashes}")
}

/// `text` as it may stand between tags: the name of a trace is the name of a file.
fn escaped(text: &str) -> String {
    let mut safe = String::new();
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            character if character.is_control() => safe.push(' '),
            character => safe.push(character),
        }
    }
    safe
}
