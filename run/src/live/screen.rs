//! Screen: the last rows of a terminal that others write to.
//!
//! ```text
//!   take     so many lines up, if the cursor is that low   save   region 1..n-h   restore
//!   draw     save   row n-h+1, cells   row n-h+2, cells ..  restore
//!   give     save   region all   clear below n-h            restore
//! ```
//!
//! The cursor and its colours are the program's: each of the three is one write that leaves it where it was, so output
//! may come between any two of them. Colours that the program has set half-way stay set for it.
//!
//! A killed process restores nothing. So another process does:
//!
//! ```text
//!   this process                          the repairer: this command again, in a process group of its own
//!     |-- a line each time: what to write if this process is gone -->  keeps the last one
//!     X   ends, however it ends           the pipe ends: it writes that line to the terminal, and ends
//! ```
//!
//! An empty line is written when the rows are restored; then the repairer has nothing to do.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write, stderr};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use rustix::termios::{tcgetpgrp, tcgetwinsize};

use super::paint::{Colours, painted};
use crate::signals;

/// The hidden verb of the command that repairs a terminal.
pub const REPAIR_VERB: &str = "repair-terminal";

/// Rows of a panel where there is less room than it wants.
const ROWS_SMALL: u16 = 5;
/// A terminal with fewer rows or columns has no panel.
const ROWS_MIN: u16 = 12;
const ROWS_FOR_FULL: u16 = 20;
const COLUMNS_MIN: u16 = 40;

/// The last rows of the terminal of standard error.
pub struct Screen {
    terminal: File,
    repairer: Option<TerminalRepairer>,
    colours: Colours,
    full: u16,
    taken: Option<PanelRows>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PanelRows {
    rows: u16,
    columns: u16,
    height: u16,
}

impl Screen {
    /// The terminal of standard error, if it can show a panel. The panel takes `full` rows where there is room.
    pub fn of_stderr(full: u16) -> Option<Self> {
        let can_move = std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb");
        if !stderr().is_terminal() || !can_move {
            return None;
        }
        // A description of its own: the program may make the shared one non-blocking.
        let terminal = File::options()
            .write(true)
            .custom_flags(libc::O_NOCTTY)
            .open("/proc/self/fd/2")
            .or_else(|_| io::stderr().as_fd().try_clone_to_owned().map(File::from));
        let terminal = terminal.ok()?;
        let repairer = TerminalRepairer::start(&terminal).ok();
        Some(Self { terminal, repairer, colours: Colours::wanted(), full, taken: None })
    }

    /// Draws `picture` into the last rows, and takes them first if need be. Does nothing where there are too few, or
    /// while another process group has the terminal.
    pub fn show(&mut self, picture: impl FnOnce(Rect) -> Buffer) {
        let Some(now) = self.place() else { return self.hide() };
        let mut bytes = Vec::new();
        if self.taken != Some(now) {
            if self.taken.is_none() && !self.is_ours() {
                return;
            }
            if let Some(before) = self.taken.filter(|before| before.top() <= now.rows) {
                bytes.extend(before.give().into_bytes());
            }
            bytes.extend(now.take().into_bytes());
            self.send_to_repairer(&now.give());
            self.taken = Some(now);
        }
        let area = Rect::new(0, 0, now.columns, now.height);
        bytes.extend(painted(&picture(area), now.top(), self.colours));
        self.write(&bytes);
    }

    /// Whether the terminal is hung up.
    pub fn is_gone(&self) -> bool {
        tcgetwinsize(&self.terminal).is_err()
    }

    /// Gives the rows back to the terminal.
    pub fn hide(&mut self) {
        if let Some(taken) = self.taken.take() {
            self.write(taken.give().as_bytes());
            self.send_to_repairer("");
        }
    }

    /// The panel's rows now, if there is room for it.
    fn place(&self) -> Option<PanelRows> {
        let size = tcgetwinsize(&self.terminal).ok()?;
        PanelRows::on(size.ws_row, size.ws_col, self.full)
    }

    /// Whether this process group is in the foreground: a job in the background leaves the terminal alone.
    fn is_ours(&self) -> bool {
        tcgetpgrp(&self.terminal).map_or(true, |group| group == rustix::process::getpgrp())
    }

    fn write(&mut self, bytes: &[u8]) {
        let _ = self.terminal.write_all(bytes); // a terminal that is gone shows nothing
    }

    fn send_to_repairer(&mut self, line: &str) {
        if let Some(repairer) = &mut self.repairer {
            let _ = writeln!(repairer.pipe(), "{line}");
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.hide();
    }
}

impl PanelRows {
    fn on(rows: u16, columns: u16, full: u16) -> Option<Self> {
        let height = if rows >= ROWS_FOR_FULL { full.min(rows - 2) } else { ROWS_SMALL };
        (rows >= ROWS_MIN && columns >= COLUMNS_MIN).then_some(Self { rows, columns, height })
    }

    fn top(self) -> u16 {
        self.rows - self.height + 1
    }

    /// Makes room: the screen scrolls up if the cursor is too low (a vertical tab goes a line down and keeps the
    /// column), and from now on the rest scrolls without the panel's rows.
    fn take(self) -> String {
        let down = "\x0b".repeat(usize::from(self.height));
        format!("{down}\x1b[{}A\x1b7\x1b[1;{}r\x1b8", self.height, self.top() - 1)
    }

    fn give(self) -> String {
        format!("\x1b7\x1b[r\x1b[{};1H\x1b[0m\x1b[J\x1b8", self.top())
    }
}

/// The process that restores the rows if this one cannot.
struct TerminalRepairer(Child);

impl TerminalRepairer {
    fn start(terminal: &File) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(REPAIR_VERB).process_group(0).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(terminal.try_clone()?);
        Ok(Self(command.spawn()?))
    }

    fn pipe(&mut self) -> &mut impl Write {
        self.0.stdin.as_mut().expect("it was started with a pipe")
    }
}

impl Drop for TerminalRepairer {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait(); // it ends with its pipe, unless it was killed before
    }
}

/// Reads lines from standard input until it ends, and writes the last one to standard error, a terminal.
///
/// # Errors
/// If the lines cannot be read, or the last not be written.
pub fn repair_terminal() -> io::Result<()> {
    signals::block(signals::BACKGROUND_WRITE);
    let mut told = String::new();
    io::stdin().read_to_string(&mut told)?;
    stderr().write_all(last_line(&told).as_bytes())
}

/// The last complete line.
fn last_line(told: &str) -> &str {
    let whole = told.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.rsplit('\n').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_panel_is_at_the_bottom_of_terminals_that_have_room() {
        let full = PanelRows { rows: 50, columns: 100, height: 8 };
        assert_eq!((PanelRows::on(50, 100, 8), full.top()), (Some(full), 43));
        assert_eq!(PanelRows::on(12, 40, 8).map(|taken| taken.height), Some(ROWS_SMALL));
        assert_eq!(PanelRows::on(24, 80, 200).map(|taken| (taken.height, taken.top())), Some((22, 3)));
        let none = [(11, 100), (50, 39), (0, 0)].map(|(rows, columns)| PanelRows::on(rows, columns, 8));
        assert_eq!(none, [None; 3]);
    }

    #[test]
    fn rows_taken_from_the_terminal_are_given_back() {
        let taken = PanelRows { rows: 24, columns: 80, height: 5 };
        assert_eq!(taken.take(), "\x0b\x0b\x0b\x0b\x0b\x1b[5A\x1b7\x1b[1;19r\x1b8");
        assert_eq!(taken.give(), "\x1b7\x1b[r\x1b[20;1H\x1b[0m\x1b[J\x1b8");
    }

    #[test]
    fn the_repairer_uses_the_last_whole_line() {
        for (told, last) in [("", ""), ("a\n", "a"), ("a\nb\n", "b"), ("a\n\n", ""), ("a\nb", "a"), ("b", "")]
        {
            assert_eq!(last_line(told), last, "{told:?}");
        }
    }
}
