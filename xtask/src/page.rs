//! Page: what a browser makes of the page that `quinion-bench --out` writes.
//!
//! ```text
//!   target/page/index.html     a quick run
//!   target/page/look.html      shows it in frames of several widths, and writes down what it sees
//!   chromium, headless         once as on a light screen, once as on a dark one; without a network
//! ```
//!
//! The tests of the command check that the page is well formed and names nothing to fetch. Whether it is as wide as its
//! frame, has its drawings, and is dark on a dark screen, only a browser shows; one is too heavy for every change, so
//! this is a step of the longer runs.

use std::fs;
use std::process::Command;

use crate::bench;
use crate::step::{Action, Failure, Step};
use crate::tools::{is_installed, repository};

const FOLDER: &str = "target/page";
/// Widths of frames, in pixels: a telephone's and a screen's.
const WIDTHS: [u32; 2] = [360, 1200];
const EXPERIMENTS: &str = "split insert ratio";

#[derive(Clone, PartialEq, Eq, Debug)]
struct FrameView {
    width: u32,
    drawings: u32,
    /// How many files were fetched beside the page.
    fetched: u32,
    background: String,
}

pub fn step() -> Step {
    let action = if is_installed("chromium") {
        Action::Call(check)
    } else {
        Action::Skip("chromium is not installed; Debian has a package of that name".to_owned())
    };
    Step::new("page", action)
}

fn check() -> Result<(), Failure> {
    let words = format!("--quick --repeat 1 --out {FOLDER} {EXPERIMENTS}");
    bench::run(&words.split_whitespace().map(str::to_owned).collect::<Vec<_>>())?;
    let observer = repository().join(FOLDER).join("look.html");
    fs::write(&observer, observer_page())
        .map_err(|error| Failure::new(format!("{}: {error}", observer.display())))?;
    // 1 is light and 0 is dark.
    let (light, dark) = (seen(1)?, seen(0)?);
    complaint(&light, &dark).map_or(Ok(()), |wrong| Err(Failure::new(wrong)))
}

/// A page that shows the other one, and writes a line for each frame.
fn observer_page() -> String {
    let frames: String = WIDTHS
        .iter()
        .map(|width| {
            format!(
                "<iframe src=\"index.html\" width=\"{width}\" height=\"900\" frameborder=\"0\"></iframe>\n"
            )
        })
        .collect();
    format!(
        "<!DOCTYPE html>\n<meta charset=\"utf-8\"><meta name=\"color-scheme\" content=\"light dark\">\n\
         {frames}<pre></pre>\n<script>\n\
         addEventListener('load', () => {{\n\
           for (const frame of document.querySelectorAll('iframe')) {{\n\
             const page = frame.contentDocument, body = getComputedStyle(page.body);\n\
             const drawings = page.querySelectorAll('figure > svg').length;\n\
             const fetched = frame.contentWindow.performance.getEntriesByType('resource').length;\n\
             const background = body.backgroundColor.replaceAll(' ', '');\n\
             const told = ['SEEN', page.documentElement.scrollWidth, drawings, fetched, background];\n\
             document.querySelector('pre').append(told.join(' ') + '\\n');\n\
           }}\n\
         }});\n</script>\n"
    )
}

/// Each frame as chromium shows it on a screen of that kind.
fn seen(scheme: u32) -> Result<Vec<FrameView>, Failure> {
    let mut chromium = Command::new("chromium");
    chromium.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]);
    chromium.args([
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=10000",
        "--window-size=1700,1000",
    ]);
    chromium.arg(format!("--blink-settings=preferredColorScheme={scheme}")).arg("--dump-dom");
    chromium.arg(format!("file://{}", repository().join(FOLDER).join("look.html").display()));
    let output = chromium.output().map_err(|error| Failure::new(format!("chromium: {error}")))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let frames: Vec<FrameView> = printed.lines().filter_map(parsed).collect();
    if frames.len() == WIDTHS.len() {
        return Ok(frames);
    }
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::new(format!("chromium saw {} frames of {}: {printed}\n{told}", frames.len(), WIDTHS.len())))
}

fn parsed(line: &str) -> Option<FrameView> {
    let line = line.trim_start_matches("<pre>");
    let words: Vec<&str> = line.strip_prefix("SEEN ")?.split_whitespace().collect();
    let [width, drawings, fetched, background] = words.try_into().ok()?;
    let number = |word: &str| word.parse().ok();
    Some(FrameView {
        width: number(width)?,
        drawings: number(drawings)?,
        fetched: number(fetched)?,
        background: background.to_owned(),
    })
}

fn complaint(light: &[FrameView], dark: &[FrameView]) -> Option<String> {
    for ((seen, width), on_dark) in light.iter().zip(WIDTHS).zip(dark) {
        if seen.width > width {
            return Some(format!("in a frame of {width} pixels the page is {} wide", seen.width));
        }
        if seen.drawings == 0 {
            return Some(format!("in a frame of {width} pixels there is no drawing"));
        }
        if seen.fetched > 0 {
            return Some(format!("the page has fetched {} files", seen.fetched));
        }
        if seen.background == on_dark.background {
            return Some(format!("the page is {} on a light screen and on a dark one", seen.background));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(background: &str) -> Vec<FrameView> {
        WIDTHS.map(|width| parsed(&format!("<pre>SEEN {width} 2 0 {background}")).unwrap()).to_vec()
    }

    #[test]
    fn a_wrong_page_is_reported() {
        let (light, dark) = (frames("rgb(255,255,255)"), frames("rgb(20,23,27)"));
        assert_eq!(complaint(&light, &dark), None);
        assert!(complaint(&light, &light).is_some_and(|wrong| wrong.contains("dark")));
        let with = |change: fn(&mut FrameView)| {
            let mut seen = light.clone();
            change(&mut seen[0]);
            complaint(&seen, &dark).unwrap()
        };
        assert!(with(|seen| seen.width = 700).contains("700 wide"));
        assert!(with(|seen| seen.drawings = 0).contains("no drawing"));
        assert!(with(|seen| seen.fetched = 1).contains("fetched"));
        assert_eq!(parsed("SEEN 1 2 x rgb"), None);
    }
}
