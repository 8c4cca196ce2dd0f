//! Panel: the numbers of a server become a picture, by the parts that `run --live` draws with.
//!
//! ```text
//!   - quinion: /run/user/1000/quinion/node at 127.0.0.1:9464 --------- 00:12 -
//!   hits      ##################--  97.3 % of 12345 reads, 2 clients
//!   served    1.2 GiB/s  ..::||||||||||    3.4 GiB in all
//!   stores    310.0 MiB/s  1.0 GiB in all, 130 GETs, 12 HEADs, 0 failures
//!   saved     12215 GETs, 2.4 GiB, for 0.2210; spent 0.0925
//!   memory    ####----------------  512.0 MiB of 2.0 GiB; 0 pages evicted
//!   disk      40.0 GiB held; 3.1 GiB read from it, 44.0 GiB written, 0 errors
//!   s3://bucket                          130 GETs, 1.0 GiB; first byte, ms: p50 12.0 p95 20.0 p99 31.2
//! ```
//!
//! A terminal with few rows shows the first ones. The same numbers give the same picture.

use std::collections::VecDeque;
use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Color;

use super::{Sample, StoreSample, latencies};
use quinion_run::live::panel::{Glyphs, SPARKLINE_COLUMNS, WINDOW, draw_file, label, write};
use quinion_size::shown;

const ROWS_OF_NUMBERS: u16 = 7;

pub(super) fn rows_of(stores: usize) -> u16 {
    ROWS_OF_NUMBERS + u16::try_from(stores).unwrap_or(u16::MAX - ROWS_OF_NUMBERS)
}

type DrawRow<'d> = dyn Fn(Rect, &mut Buffer) + 'd;

pub(super) struct Panel {
    address: String,
    glyphs: Glyphs,
    /// Times and counts: bytes that clients read, and bytes from stores.
    past: VecDeque<(Duration, [u64; 2])>,
    served: VecDeque<u64>,
}

impl Panel {
    pub(super) fn new(address: String, glyphs: Glyphs) -> Self {
        Self { address, glyphs, past: VecDeque::new(), served: VecDeque::new() }
    }

    pub(super) fn drawn(&mut self, area: Rect, elapsed: Duration, sample: &Result<Sample, String>) -> Buffer {
        let mut buffer = Buffer::empty(area);
        let row = |at: u16| Rect { y: area.y + at, height: 1, ..area };
        let address = &self.address;
        let title = sample.as_ref().map_or_else(|_| address.clone(), |sample| sample.server_at(address));
        self.glyphs.draw_title(row(0), &mut buffer, &title, elapsed);
        let sample = match sample {
            Ok(sample) => sample,
            Err(why) => {
                write(row(1), &mut buffer, why);
                self.past.clear(); // the next server counts from its own beginning
                return buffer;
            }
        };
        let [served, fetched] = self.rates(elapsed, sample);
        let rows: [&DrawRow<'_>; ROWS_OF_NUMBERS as usize - 1] = [
            &|row, buffer| self.draw_hits(row, buffer, sample),
            &|row, buffer| self.draw_served(row, buffer, sample, served),
            &|row, buffer| draw_stores(row, buffer, sample, fetched),
            &|row, buffer| draw_line(row, buffer, "saved", &saved(sample)),
            &|row, buffer| self.draw_memory(row, buffer, sample),
            &|row, buffer| draw_line(row, buffer, "disk", &disk(sample)),
        ];
        for (draw, at) in rows.iter().zip(1..area.height) {
            draw(row(at), &mut buffer);
        }
        for (store, at) in sample.stores.iter().zip(ROWS_OF_NUMBERS..area.height) {
            draw_file(row(at), &mut buffer, &store.prefix, &store_text(store));
        }
        buffer
    }

    /// Bytes a second of about the last second: to clients, and from stores.
    fn rates(&mut self, elapsed: Duration, sample: &Sample) -> [u64; 2] {
        let fetched = sum(sample, "quinion_store_fetched_bytes");
        let now = [sample.number("quinion_service_read_bytes") as u64, fetched];
        if self.past.back().is_some_and(|(_, then)| now[0] < then[0] || now[1] < then[1]) {
            self.past.clear(); // another server
        }
        self.past.push_back((elapsed, now));
        while self.past.len() > 2 && elapsed.saturating_sub(self.past[1].0) >= WINDOW {
            self.past.pop_front();
        }
        let (since, then) = self.past[0];
        let seconds = elapsed.saturating_sub(since).as_secs_f64();
        let rate = |at: usize| if seconds > 0.0 { ((now[at] - then[at]) as f64 / seconds) as u64 } else { 0 };
        let rates = [rate(0), rate(1)];
        self.served.push_back(rates[0]);
        if self.served.len() > usize::from(SPARKLINE_COLUMNS) {
            self.served.pop_front();
        }
        rates
    }

    fn draw_hits(&self, row: Rect, buffer: &mut Buffer, sample: &Sample) {
        let (hits, reads) = sample.hits();
        let share = if reads == 0 { 0.0 } else { hits as f64 / reads as f64 };
        let clients = sample.number("quinion_service_clients");
        let text = match reads {
            0 => format!("no reads yet, {clients} clients"),
            _ => format!("{:.1} % of {reads} reads, {clients} clients", 100.0 * share),
        };
        let row = self.glyphs.draw_gauge(label(row, buffer, "hits"), buffer, share, Color::Green);
        write(row, buffer, &text);
    }

    fn draw_served(&self, row: Rect, buffer: &mut Buffer, sample: &Sample, rate: u64) {
        let rest = self.glyphs.draw_rate(label(row, buffer, "served"), buffer, rate, &self.served);
        let all = sample.number("quinion_service_read_bytes") as u64;
        write(rest, buffer, &format!("{} in all", shown(all)));
    }

    fn draw_memory(&self, row: Rect, buffer: &mut Buffer, sample: &Sample) {
        let [bound, grown] =
            ["memory", "grown"].map(|name| sample.number(&format!("quinion_cache_{name}_bytes")));
        let share = if bound > 0.0 { grown / bound } else { 0.0 };
        let row = self.glyphs.draw_gauge(label(row, buffer, "memory"), buffer, share, Color::Yellow);
        let evicted = sample.number("quinion_cache_evicted_pages");
        let text = format!("{} of {}; {evicted} pages evicted", shown(grown as u64), shown(bound as u64));
        write(row, buffer, &text);
    }
}

fn sum(sample: &Sample, name: &str) -> u64 {
    sample.stores.iter().map(|store| store.number(name) as u64).sum()
}

fn draw_line(row: Rect, buffer: &mut Buffer, name: &str, text: &str) {
    write(label(row, buffer, name), buffer, text);
}

fn draw_stores(row: Rect, buffer: &mut Buffer, sample: &Sample, rate: u64) {
    let of = |name: &str| sum(sample, &format!("quinion_store_{name}"));
    let (bytes, gets, heads, failures) = (of("fetched_bytes"), of("gets"), of("heads"), of("failures"));
    let all = format!("{} in all, {gets} GETs, {heads} HEADs, {failures} failures", shown(bytes));
    let rate = format!("{}/s", shown(rate));
    draw_line(row, buffer, "stores", &format!("{rate:14}{all}"));
}

fn saved(sample: &Sample) -> String {
    let (gets, bytes) = (sample.number("quinion_saved_gets"), sample.number("quinion_saved_bytes") as u64);
    let text = format!("{gets} GETs, {}", shown(bytes));
    match (sample.get("quinion_saved_price"), sample.get("quinion_spent_price")) {
        (Some(saved), Some(spent)) => format!("{text}, for {saved:.4}; spent {spent:.4}"),
        _ => text,
    }
}

fn disk(sample: &Sample) -> String {
    if !sample.has_disk() {
        return "none".to_owned();
    }
    let pages = |name: &str| shown(sample.pages_as_bytes(&format!("quinion_disk_{name}")));
    let written = shown(sample.number("quinion_disk_written_bytes") as u64);
    let errors = sample.number("quinion_disk_errors");
    format!(
        "{} held; {} read from it, {written} written, {errors} errors",
        pages("pages"),
        pages("hit_pages")
    )
}

fn store_text(store: &StoreSample) -> String {
    let (gets, bytes) = (store.number("quinion_store_gets"), store.number("quinion_store_fetched_bytes"));
    format!("{gets} GETs, {}; first byte, ms:{}", shown(bytes as u64), latencies(store))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::scrape::EXAMPLE;

    fn rows(buffer: &Buffer) -> Vec<String> {
        let rows = buffer.content().chunks(usize::from(buffer.area.width));
        let text =
            |cells: &[ratatui::buffer::Cell]| cells.iter().map(|cell| cell.symbol()).collect::<String>();
        rows.map(|cells| text(cells).trim_end().to_owned()).collect()
    }

    #[test]
    fn numbers_have_their_places_and_rates_are_of_the_last_second() {
        let mut panel = Panel::new("127.0.0.1:9464".into(), Glyphs::of("C"));
        let area = Rect::new(0, 0, 90, rows_of(2));
        let earlier = EXAMPLE.replace("read_bytes_total 10485760", "read_bytes_total 0");
        panel.drawn(area, Duration::from_secs(60), &Sample::of(&earlier).map_err(str::to_owned));
        let picture = panel.drawn(area, Duration::from_secs(62), &Sample::of(EXAMPLE).map_err(str::to_owned));
        let picture = rows(&picture);
        assert!(picture[0].starts_with("- quinion: /run/q.sock at 127.0.0.1:9464 ---"), "{picture:#?}");
        assert_eq!(picture[1], "hits      ################----  80.0 % of 10 reads, 2 clients");
        assert!(picture[2].starts_with("served    5.0 MiB/s"), "{picture:#?}");
        assert!(picture[2].ends_with("10.0 MiB in all"), "{picture:#?}");
        assert_eq!(picture[3], "stores    0 bytes/s     3.0 MiB in all, 3 GETs, 1 HEADs, 0 failures");
        assert_eq!(picture[4], "saved     7 GETs, 7.0 MiB, for 0.5000; spent 0.2500");
        assert_eq!(picture[5], "memory    ##########----------  4.0 MiB of 8.0 MiB; 5 pages evicted");
        assert!(picture[6].starts_with("disk      40.0 KiB held; 16.0 KiB read from it"), "{picture:#?}");
        assert!(picture[7].starts_with("s3://one ") && picture[7].ends_with("p50 12.0 p95 20.0 p99 -"));
        assert!(picture[8].starts_with("s3://two "), "{picture:#?}");
    }

    #[test]
    fn a_server_that_is_away_or_new_has_no_rate() {
        let mut panel = Panel::new("a:1".into(), Glyphs::of("C"));
        let (area, sample) = (Rect::new(0, 0, 60, 5), Sample::of(EXAMPLE).map_err(str::to_owned));
        panel.drawn(area, Duration::ZERO, &sample);
        let away = rows(&panel.drawn(area, Duration::from_secs(1), &Err("it does not answer".into())));
        assert_eq!(away[1..3], ["it does not answer".to_owned(), String::new()]);
        panel.drawn(area, Duration::from_secs(2), &sample);
        let anew = EXAMPLE.replace("read_bytes_total 10485760", "read_bytes_total 7");
        let picture = panel.drawn(area, Duration::from_secs(3), &Sample::of(&anew).map_err(str::to_owned));
        assert!(rows(&picture)[2].starts_with("served    0 bytes/s"), "{:#?}", rows(&picture));
    }
}
