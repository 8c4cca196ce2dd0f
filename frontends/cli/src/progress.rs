//! Progress: how far a file has been read, for people who watch.
//!
//! The bar goes to standard error, and only if that is a terminal and standard output is not: bytes and a bar on the
//! same terminal would spoil each other, and a pipe or a log file needs no bar.

use std::io::{IsTerminal, stderr, stdout};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BarPlace {
    /// A terminal shows standard error and nothing else of this process.
    Terminal,
    /// Standard error is no terminal, or the bytes themselves are on the terminal.
    Hidden,
}

impl BarPlace {
    /// The choice for the standard streams of this process.
    pub fn now() -> Self {
        Self::of_terminals(stdout().is_terminal(), stderr().is_terminal())
    }

    fn of_terminals(stdout_is_terminal: bool, stderr_is_terminal: bool) -> Self {
        if stderr_is_terminal && !stdout_is_terminal { Self::Terminal } else { Self::Hidden }
    }
}

pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub fn new(place: BarPlace, path: &Path, bytes: u64) -> Self {
        let target = match place {
            BarPlace::Terminal => ProgressDrawTarget::stderr(),
            BarPlace::Hidden => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(bytes), target);
        bar.set_style(style());
        bar.set_message(path.display().to_string());
        Self { bar }
    }

    pub fn at(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn style() -> ProgressStyle {
    let template = "{msg}  [{bar:30}]  {binary_bytes} of {binary_total_bytes}  {binary_bytes_per_sec}  {eta}";
    ProgressStyle::with_template(template).expect("the template is a constant").progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_shown_only_beside_the_bytes() {
        assert_eq!(BarPlace::of_terminals(false, true), BarPlace::Terminal);
        assert_eq!(BarPlace::of_terminals(true, true), BarPlace::Hidden);
        assert_eq!(BarPlace::of_terminals(true, false), BarPlace::Hidden);
        assert_eq!(BarPlace::of_terminals(false, false), BarPlace::Hidden);
    }

    #[test]
    fn the_template_is_understood() {
        let progress = Progress::new(BarPlace::Hidden, Path::new("x"), 10);
        progress.at(5);
        assert_eq!(progress.bar.position(), 5);
    }
}
