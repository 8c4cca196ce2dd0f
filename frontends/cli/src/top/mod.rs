//! Top: what a running `quinion serve` does, on the terminal until it is interrupted.
//!
//! ```text
//!   quinion serve --metrics ADDRESS <--GET /metrics, every half second-- scrape   text becomes numbers
//!                                                                        panel    numbers become a picture
//!   the terminal's last rows <-- run::live::screen, paint ------------------'     as of `run --live`
//! ```
//!
//! The numbers are those that monitors get; the server is asked for nothing else. Where standard output is no terminal,
//! they are printed once, as lines or as JSON.
//!
//! When the server ends, the panel says that it does not answer, and goes on with the next server at that address.

use std::fmt::Write as _;
use std::time::Instant;

use quinion_run::live::screen::Screen;
use quinion_run::live::{PERIOD, panel::Glyphs};
use quinion_run::report::{Form, Report, Value};

mod panel;
mod scrape;

use panel::Panel;
pub use scrape::{Monitor, Sample, StoreSample};

/// Pictures are drawn more often than numbers are asked for.
const PICTURES_OF_A_SAMPLE: u32 = 2;

/// Draws what `monitor` tells in the last rows of the terminal until that is gone: an interrupt ends the process, and
/// the repairer gives the rows back. Returns at once where there is no such terminal.
pub fn watch(monitor: &Monitor, first: Sample) {
    let rows = panel::rows_of(first.stores.len());
    let Some(mut screen) = Screen::of_stderr(rows) else { return };
    let (begun, mut panel) = (Instant::now(), Panel::new(monitor.address().to_owned(), Glyphs::of_locale()));
    let mut sample = Ok(first);
    while !screen.is_gone() {
        let elapsed = begun.elapsed();
        screen.show(|area| panel.drawn(area, elapsed, &sample));
        std::thread::sleep(PERIOD * PICTURES_OF_A_SAMPLE);
        sample = monitor.ask();
    }
}

/// The numbers of the server that `monitor` has asked, in a form.
pub fn printed(monitor: &Monitor, sample: &Sample, form: Form) -> String {
    report(monitor, sample, form).printed(form)
}

fn report(monitor: &Monitor, sample: &Sample, form: Form) -> Report {
    let number = |name: &str| Value::Number(sample.number(name) as u64);
    let bytes = |name: &str| Value::Bytes(sample.number(name) as u64);
    let money = |name: &str| sample.get(name).map_or(Value::Unknown, Value::Real);
    let (hits, reads) = sample.hits();
    let mut report = Report::new();
    if form == Form::Json {
        report.add("schema", "schema", Value::Number(1));
    }
    report.add("server", "server", Value::Text(sample.server_at(monitor.address())));
    report.add("clients", "clients", number("quinion_service_clients"));
    report.add("open_files", "open files", number("quinion_service_open_files"));
    report.add("reads", "reads", Value::Number(reads));
    report.add("hits", "hits", Value::Number(hits));
    report.add("hit_share", "hit share", Value::Share { part: hits, whole: reads });
    report.add("read_bytes", "read", bytes("quinion_service_read_bytes"));
    let mut saved = Report::new();
    saved.add("gets", "GETs", number("quinion_saved_gets"));
    saved.add("bytes", "bytes", bytes("quinion_saved_bytes"));
    saved.add("price", "price", money("quinion_saved_price"));
    saved.add("spent_price", "price of what was asked", money("quinion_spent_price"));
    report.add("saved", "saved", Value::Group(saved));
    let mut memory = Report::new();
    memory.add("bound_bytes", "bound", bytes("quinion_cache_memory_bytes"));
    memory.add("grown_bytes", "taken", bytes("quinion_cache_grown_bytes"));
    memory.add("cached_bytes", "cached", Value::Bytes(sample.pages_as_bytes("quinion_cache_cached_pages")));
    memory.add("evicted_pages", "evicted pages", number("quinion_cache_evicted_pages"));
    report.add("memory", "memory", Value::Group(memory));
    report.add("disk", "disk", sample.has_disk().then(|| disk(sample)).map_or(Value::Unknown, Value::Group));
    report.add("stores", "stores", Value::List(sample.stores.iter().map(store).collect()));
    report
}

fn disk(sample: &Sample) -> Report {
    let bytes = |name: &str| Value::Bytes(sample.pages_as_bytes(name));
    let mut disk = Report::new();
    disk.add("held_bytes", "held", bytes("quinion_disk_pages"));
    disk.add("hit_bytes", "read from it", bytes("quinion_disk_hit_pages"));
    disk.add("written_bytes", "written", Value::Bytes(sample.number("quinion_disk_written_bytes") as u64));
    disk.add("errors", "errors", Value::Number(sample.number("quinion_disk_errors") as u64));
    disk
}

fn store(store: &StoreSample) -> Value {
    let number = |name: &str| Value::Number(store.number(name) as u64);
    let millis =
        |at: usize| store.first_byte[at].map_or(Value::Unknown, |seconds| Value::Real(seconds * 1e3));
    let mut one = Report::new();
    one.add("store", "store", Value::Text(store.prefix.clone()));
    one.add("heads", "HEADs", number("quinion_store_heads"));
    one.add("gets", "GETs", number("quinion_store_gets"));
    one.add("fetched_bytes", "fetched", Value::Bytes(store.number("quinion_store_fetched_bytes") as u64));
    one.add("retries", "sent again", number("quinion_store_retries"));
    one.add("failures", "failures", number("quinion_store_failures"));
    one.add("first_byte_p50_ms", "first byte p50 (ms)", millis(0));
    one.add("first_byte_p95_ms", "first byte p95 (ms)", millis(1));
    one.add("first_byte_p99_ms", "first byte p99 (ms)", millis(2));
    Value::Group(one)
}

fn latencies(store: &StoreSample) -> String {
    let mut text = String::new();
    for (name, seconds) in [("p50", 0), ("p95", 1), ("p99", 2)].map(|(name, at)| (name, store.first_byte[at]))
    {
        match seconds {
            Some(seconds) => write!(text, " {name} {:.1}", seconds * 1e3).expect("a string takes it"),
            None => write!(text, " {name} -").expect("a string takes it"),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_of_a_sample_has_its_numbers_by_store() {
        let (monitor, sample) = (Monitor::new("a:1"), Sample::of(scrape::EXAMPLE).unwrap());
        let json = printed(&monitor, &sample, Form::Json);
        for part in [
            "\"server\":\"/run/q.sock at a:1\",\"clients\":2",
            "\"reads\":10,\"hits\":8",
            "\"saved\":{\"gets\":7,\"bytes\":7340032,\"price\":0.5000,\"spent_price\":0.2500}",
            "\"bound_bytes\":8388608",
            "\"disk\":{\"held_bytes\":40960",
            "{\"store\":\"s3://one\",\"heads\":1,\"gets\":3",
            "\"first_byte_p50_ms\":12.00,\"first_byte_p95_ms\":20.00,\"first_byte_p99_ms\":null",
            "{\"store\":\"s3://two\"",
        ] {
            assert!(json.contains(part), "{part} is not in {json}");
        }
        assert_eq!(json.lines().count(), 1);
        let without =
            scrape::EXAMPLE.lines().filter(|line| !line.contains("disk") && !line.contains("price"));
        let without = Sample::of(&without.map(|line| format!("{line}\n")).collect::<String>()).unwrap();
        let json = printed(&monitor, &without, Form::Json);
        assert!(json.contains("\"price\":null") && json.contains("\"disk\":null"), "{json}");
    }
}
