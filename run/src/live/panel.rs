//! Panel: the numbers of a run become a picture.
//!
//! ```text
//!   - quinion: grep -c the FILE ------------------------------------ 00:12 -
//!   hits       ##################--  97.3 % of 12345 reads
//!   served     1.2 GiB/s  ..::||||||||||    3.4 GiB in all; kernel 12 reads
//!   device     310.0 MiB/s  1.0 GiB in all; readahead 98.1 % used
//!   memory     ####----------------  512.0 MiB of 2.0 GiB; evicted 0/s, 0 in all, 0 refaulted
//!   FILE                                                  512.0 MiB cached
//! ```
//!
//! A rate is that of about the last second; counts since the beginning say "in all". The files are those about which
//! the owner gets most requests, which is not how often each is read (`quinion_owner::HotFile`).
//!
//! Drawing reads no clock: the same numbers give the same picture.

use std::collections::VecDeque;
use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::bar;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Sparkline, Widget};

use super::RunSample;
use quinion_size::shown;

/// Rows that are not files'.
const ROWS_OF_NUMBERS: u16 = 5;
/// The time over which a rate is taken.
pub const WINDOW: Duration = Duration::from_secs(1);
const LABEL_COLUMNS: u16 = 10;
const GAUGE_COLUMNS: u16 = 20;
/// Columns of the curve that [`Glyphs::draw_rate`] draws; numbers beyond these are not shown.
pub const SPARKLINE_COLUMNS: u16 = 20;

pub(super) fn files_in(area: Rect) -> usize {
    usize::from(area.height.saturating_sub(ROWS_OF_NUMBERS))
}

pub(super) struct Panel {
    title: String,
    /// The counts of about the last second, with their times.
    past: VecDeque<(Duration, Counted)>,
    /// Bytes a second that were served, a number for each picture.
    served: VecDeque<u64>,
    glyphs: Glyphs,
}

#[derive(Clone, Copy, Default)]
struct Counted {
    served_bytes: u64,
    device_bytes: u64,
    evicted_pages: u64,
}

/// The characters that a panel is drawn with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Glyphs {
    /// Blocks of eight heights.
    Blocks,
    /// Where the locale has no UTF-8.
    Ascii,
}

impl Panel {
    pub(super) fn new(title: String) -> Self {
        let (past, served) = (VecDeque::new(), VecDeque::new());
        Self { title, past, served, glyphs: Glyphs::of_locale() }
    }

    /// The picture after `elapsed`, in which each row is written to the width of `area`.
    pub(super) fn drawn(&mut self, area: Rect, elapsed: Duration, sample: RunSample) -> Buffer {
        let rates = self.note(elapsed, &sample);
        let mut buffer = Buffer::empty(area);
        let rows: [Rect; ROWS_OF_NUMBERS as usize] =
            Layout::vertical([Constraint::Length(1); ROWS_OF_NUMBERS as usize]).areas(area);
        self.glyphs.draw_title(rows[0], &mut buffer, &self.title, elapsed);
        self.draw_hits(rows[1], &mut buffer, &sample);
        self.draw_served(rows[2], &mut buffer, &sample, rates.served_bytes);
        draw_device(rows[3], &mut buffer, &sample, rates.device_bytes);
        self.draw_memory(rows[4], &mut buffer, &sample, rates.evicted_pages);
        for (file, y) in sample.hottest.iter().zip(area.y + ROWS_OF_NUMBERS..area.bottom()) {
            let cached =
                file.cached_bytes.map_or("closed".into(), |bytes| format!("{} cached", shown(bytes)));
            draw_file(Rect { y, height: 1, ..area }, &mut buffer, &file.name.to_string_lossy(), &cached);
        }
        buffer
    }

    /// Notes the counts, and returns their rates.
    fn note(&mut self, elapsed: Duration, sample: &RunSample) -> Counted {
        let now = Counted {
            served_bytes: sample.totals.bytes,
            device_bytes: sample.owner.device_bytes,
            evicted_pages: sample.owner.evicted_pages,
        };
        self.past.push_back((elapsed, now));
        while self.past.len() > 2 && elapsed - self.past[1].0 >= WINDOW {
            self.past.pop_front();
        }
        let (since, then) = self.past[0];
        let seconds = (elapsed - since).as_secs_f64();
        let rate = |now: u64, then: u64| match seconds {
            0.0 => 0,
            _ => (now.saturating_sub(then) as f64 / seconds) as u64,
        };
        let rates = Counted {
            served_bytes: rate(now.served_bytes, then.served_bytes),
            device_bytes: rate(now.device_bytes, then.device_bytes),
            evicted_pages: rate(now.evicted_pages, then.evicted_pages),
        };
        self.served.push_back(rates.served_bytes);
        if self.served.len() > usize::from(SPARKLINE_COLUMNS) {
            self.served.pop_front();
        }
        rates
    }

    fn draw_hits(&self, row: Rect, buffer: &mut Buffer, sample: &RunSample) {
        let reads = sample.totals.reads;
        let hits = reads.saturating_sub(sample.totals.asked);
        let share = if reads == 0 { 0.0 } else { hits as f64 / reads as f64 };
        let text = match reads {
            0 => "no reads yet".to_owned(),
            _ => format!("{:.1} % of {reads} reads", 100.0 * share),
        };
        let row = label(row, buffer, "hits");
        let row = self.glyphs.draw_gauge(row, buffer, share, Color::Green);
        write(row, buffer, &text);
    }

    fn draw_served(&self, row: Rect, buffer: &mut Buffer, sample: &RunSample, rate: u64) {
        let row = label(row, buffer, "served");
        let rest = self.glyphs.draw_rate(row, buffer, rate, &self.served);
        let totals = &sample.totals;
        let all = format!("{} in all; kernel {} reads", shown(totals.bytes), totals.kernel_reads);
        write(rest, buffer, &all);
    }

    fn draw_memory(&self, row: Rect, buffer: &mut Buffer, sample: &RunSample, evicted: u64) {
        let (stats, owner) = (&sample.stats, &sample.owner);
        let share =
            if stats.bound_bytes == 0 { 0.0 } else { stats.grown_bytes as f64 / stats.bound_bytes as f64 };
        let row = label(row, buffer, "memory");
        let row = self.glyphs.draw_gauge(row, buffer, share, Color::Yellow);
        let text = format!(
            "{} of {}; evicted {evicted}/s, {} in all, {} refaulted",
            shown(stats.grown_bytes),
            shown(stats.bound_bytes),
            owner.evicted_pages,
            owner.refaulted_pages
        );
        write(row, buffer, &text);
    }
}

fn draw_device(row: Rect, buffer: &mut Buffer, sample: &RunSample, rate: u64) {
    let owner = &sample.owner;
    let used = owner.readahead.accuracy().map_or("-".into(), |share| format!("{:.1} %", 100.0 * share));
    let row = label(row, buffer, "device");
    let columns = [Constraint::Length(14), Constraint::Fill(1)];
    let [number, rest] = Layout::horizontal(columns).areas(row);
    write(number, buffer, &format!("{}/s", shown(rate)));
    write(rest, buffer, &format!("{} in all; readahead {used} used", shown(owner.device_bytes)));
}

/// Draws a file's name, its end if there is no room for all of it, and `known` at the right.
pub fn draw_file(row: Rect, buffer: &mut Buffer, name: &str, known: &str) {
    let room = usize::from(row.width).saturating_sub(known.len() + 2);
    let mut name: String = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    while Span::raw(name.as_str()).width() > room && !name.is_empty() {
        name = name.chars().skip(1).collect();
    }
    buffer.set_stringn(row.x, row.y, name, room, Style::new());
    let at = row.right().saturating_sub(known.len() as u16);
    buffer.set_string(at, row.y, known, Style::new().dim());
}

/// Draws the name of a row at its left; returns the rest of it.
pub fn label(row: Rect, buffer: &mut Buffer, name: &str) -> Rect {
    let columns = [Constraint::Length(LABEL_COLUMNS), Constraint::Fill(1)];
    let [label, rest] = Layout::horizontal(columns).areas(row);
    buffer.set_stringn(label.x, label.y, name, usize::from(label.width), Style::new().bold());
    rest
}

/// Draws `text` into `row`, cut to its width.
pub fn write(row: Rect, buffer: &mut Buffer, text: &str) {
    buffer.set_stringn(row.x, row.y, text, usize::from(row.width), Style::new());
}

impl Glyphs {
    /// The symbols of the locale that the environment names.
    pub fn of_locale() -> Self {
        let named = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(|name| std::env::var(name).ok());
        Self::of(&named.into_iter().find(|value| !value.is_empty()).unwrap_or_default())
    }

    /// The symbols of a locale, such as "en_GB.UTF-8".
    pub fn of(locale: &str) -> Self {
        let locale = locale.to_ascii_lowercase();
        if locale.contains("utf-8") || locale.contains("utf8") { Self::Blocks } else { Self::Ascii }
    }

    /// Draws the line above a panel: a title, and the time since the start.
    pub fn draw_title(self, row: Rect, buffer: &mut Buffer, title: &str, elapsed: Duration) {
        let rule = self.rule().repeat(usize::from(row.width));
        buffer.set_string(row.x, row.y, rule, Style::new().dim());
        let seconds = elapsed.as_secs();
        let clock = format!(" {:02}:{:02} ", seconds / 60, seconds % 60);
        let room = usize::from(row.width).saturating_sub(clock.len() + 4);
        let title = Line::from(vec![Span::from(" quinion: ").bold(), Span::from(title), " ".into()]);
        buffer.set_line(row.x + 1, row.y, &title, room as u16);
        buffer.set_string(row.right().saturating_sub(clock.len() as u16 + 1), row.y, clock, Style::new());
    }

    /// Draws a share from 0 to 1 at the left of `row`; returns the rest of it.
    pub fn draw_gauge(self, row: Rect, buffer: &mut Buffer, share: f64, colour: Color) -> Rect {
        let columns = [Constraint::Length(GAUGE_COLUMNS + 2), Constraint::Fill(1)];
        let [gauge, rest] = Layout::horizontal(columns).areas(row);
        let full = (share.clamp(0.0, 1.0) * f64::from(GAUGE_COLUMNS)).round() as usize;
        let (filled, empty) = self.gauge();
        let line = Line::from(vec![
            Span::from(filled.repeat(full)).fg(colour),
            Span::from(empty.repeat(usize::from(GAUGE_COLUMNS) - full)).dim(),
        ]);
        buffer.set_line(gauge.x, gauge.y, &line, gauge.width);
        rest
    }

    /// Draws bytes a second, and those of the last pictures, at the left of `row`; returns the rest of it.
    pub fn draw_rate(self, row: Rect, buffer: &mut Buffer, rate: u64, past: &VecDeque<u64>) -> Rect {
        let columns =
            [Constraint::Length(14), Constraint::Length(SPARKLINE_COLUMNS + 2), Constraint::Fill(1)];
        let [number, line, rest] = Layout::horizontal(columns).areas(row);
        write(number, buffer, &format!("{}/s", shown(rate)));
        let line = Rect { width: line.width.min(SPARKLINE_COLUMNS), ..line };
        let sparkline = Sparkline::default().data(past.iter().copied()).bar_set(self.bars());
        sparkline.style(Style::new().fg(Color::Cyan)).render(line, buffer);
        rest
    }

    fn rule(self) -> &'static str {
        if self == Self::Blocks { "\u{2500}" } else { "-" }
    }

    fn gauge(self) -> (&'static str, &'static str) {
        if self == Self::Blocks { ("\u{2588}", "\u{2591}") } else { ("#", "-") }
    }

    fn bars(self) -> bar::Set<'static> {
        match self {
            Self::Blocks => bar::NINE_LEVELS,
            Self::Ascii => bar::Set {
                full: "#",
                seven_eighths: "#",
                three_quarters: "|",
                five_eighths: "|",
                half: ":",
                three_eighths: ":",
                one_quarter: ".",
                one_eighth: ".",
                empty: " ",
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(buffer: &Buffer) -> Vec<String> {
        let rows = buffer.content().chunks(usize::from(buffer.area.width));
        rows.map(|cells| cells.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned())
            .collect()
    }

    fn sample(reads: u64, bytes: u64) -> RunSample {
        let mut sample = RunSample::default();
        (sample.totals.reads, sample.totals.asked, sample.totals.bytes) = (reads, reads / 4, bytes);
        (sample.stats.grown_bytes, sample.stats.bound_bytes) = (256 << 20, 1 << 30);
        (sample.owner.device_bytes, sample.owner.evicted_pages) = (bytes / 2, reads);
        (sample.owner.readahead.used_pages, sample.owner.readahead.wasted_pages) = (9, 1);
        sample
    }

    fn panel() -> Panel {
        Panel { glyphs: Glyphs::Ascii, ..Panel::new("grep -c the FILE".into()) }
    }

    #[test]
    fn numbers_have_their_places_and_rates_are_of_the_last_second() {
        let (mut panel, area) = (panel(), Rect::new(0, 0, 90, 5));
        panel.drawn(area, Duration::ZERO, sample(0, 0));
        panel.drawn(area, Duration::from_secs(60), sample(10, 9 << 30));
        let picture = rows(&panel.drawn(area, Duration::from_secs(62), sample(30, 10 << 30)));
        assert!(picture[0].starts_with("- quinion: grep -c the FILE ---"), "{picture:#?}");
        assert!(picture[0].ends_with("- 01:02 -"), "{picture:#?}");
        assert_eq!(picture[1], "hits      ###############-----  76.7 % of 30 reads");
        assert!(picture[2].starts_with("served    512.0 MiB/s"), "{picture:#?}");
        assert!(picture[2].ends_with("10.0 GiB in all; kernel 0 reads"), "{picture:#?}");
        assert_eq!(picture[3], "device    256.0 MiB/s   5.0 GiB in all; readahead 90.0 % used");
        let memory = "256.0 MiB of 1.0 GiB; evicted 10/s, 30 in all, 0 refaulted";
        assert_eq!(picture[4], format!("memory    #####---------------  {memory}"));
    }

    #[test]
    fn nothing_read_is_no_ratio() {
        let picture = rows(&panel().drawn(Rect::new(0, 0, 60, 5), Duration::ZERO, RunSample::default()));
        assert_eq!(picture[1], "hits      --------------------  no reads yet");
        assert!(picture[4].contains("0 bytes of 0 bytes"), "{picture:#?}");
    }

    #[test]
    fn files_show_the_ends_of_their_names() {
        let area = Rect::new(0, 0, 40, 1);
        let mut buffer = Buffer::empty(area);
        draw_file(area, &mut buffer, "/a/folder/with\na/rather/long/name/data.db", "1.0 GiB cached");
        assert_eq!(
            rows(&buffer),
            ["ith?a/rather/long/name/data.db".get(6..).unwrap().to_owned() + "  1.0 GiB cached"]
        );
        assert_eq!((files_in(Rect::new(0, 0, 80, 8)), files_in(Rect::new(0, 0, 80, 5))), (3, 0));
    }

    #[test]
    fn the_smallest_size_that_the_screen_gives_is_drawn() {
        for (width, height) in [(40, 5), (40, 8), (50, 5), (300, 8)] {
            let mut sample = sample(5, 1 << 20);
            sample.hottest.clear();
            panel().drawn(Rect::new(0, 0, width, height), Duration::from_secs(1), sample);
        }
    }

    #[test]
    fn a_locale_without_utf_8_gets_ascii() {
        assert_eq!(["C", "", "en_US.UTF-8", "C.utf8"].map(Glyphs::of)[..2], [Glyphs::Ascii; 2]);
        assert_eq!(["en_US.UTF-8", "C.utf8"].map(Glyphs::of), [Glyphs::Blocks; 2]);
    }
}
