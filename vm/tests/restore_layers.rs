//! Layers: machines receive a snapshot that lies in a base and diffs, as if it were one file.
//!
//! ```text
//!   the image, page by page, in the layer that is on top there; pages of another image below it
//!   base + diffs --served--> monitors, which check each page against the image that the layers are merged to
//! ```

use quinion_testing::vmm;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use quinion::Cache;
use quinion_testing::content::Dice;
use quinion_vm::{FaultRecord, Fill, RestoreOptions, Server, identify_layers};
use tempfile::TempDir;

use quinion_testing::vmm::{Backing, Image, Monitor, Need, PAGE, Plan, kernel};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);
const BOTH_KINDS: u64 = kernel::MINOR_SHMEM | kernel::MISSING_SHMEM | kernel::EVENT_REMOVE;

fn options(choose: impl FnOnce(&mut RestoreOptions)) -> RestoreOptions {
    let mut options = RestoreOptions::default();
    choose(&mut options);
    options
}

struct Fixture {
    sockets: TempDir,
    _disk: TempDir,
    image: Image,
    layers: Vec<PathBuf>,
    cache: Cache,
}

impl Fixture {
    /// `diffs` diffs over a base, each page of the image in a layer of its own choice.
    fn new(image: Image, diffs: usize, seed: u64) -> Self {
        let disk = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let layers: Vec<PathBuf> =
            (0..=diffs).map(|number| disk.path().join(format!("layer-{number}"))).collect();
        write(&layers, image, seed);
        Self {
            sockets: tempfile::tempdir().unwrap(),
            _disk: disk,
            image,
            layers,
            cache: Cache::builder().memory(64 << 20).build().unwrap(),
        }
    }
    fn socket(&self) -> PathBuf {
        self.sockets.path().join("socket")
    }
    fn plan(&self) -> Plan {
        Plan::new(self.socket(), self.image)
    }
    /// From the disk.
    fn serve(&self, options: RestoreOptions) -> Server {
        self.layers.iter().for_each(|layer| vmm::evict(layer, 0, None));
        self.serve_warm(options)
    }
    fn serve_warm(&self, options: RestoreOptions) -> Server {
        Server::start_layers(&self.cache, &self.layers, &self.socket(), options).unwrap()
    }
    fn reads_all(&self) {
        let pages = self.image.pages;
        Monitor::start(&self.plan()).does(&format!("touch 0 {pages} 3"));
    }
}

/// Runs of pages go to one layer, as a VM writes them; what lies below is of another image.
fn write(layers: &[PathBuf], image: Image, seed: u64) {
    let below = Image { generation: image.generation + 1, ..image };
    let files: Vec<fs::File> = layers.iter().map(|path| fs::File::create(path).unwrap()).collect();
    files.iter().for_each(|file| file.set_len(image.bytes()).unwrap());
    let mut dice = Dice::new(seed);
    let mut page = 0;
    while page < image.pages {
        let top = dice.below(layers.len() as u64) as usize;
        let run = 1 + dice.below(40);
        for page in page..image.pages.min(page + run) {
            for (number, file) in files.iter().enumerate().take(top + 1) {
                // The base has all pages, and diffs below the top one have some.
                if number == top {
                    file.write_all_at(&image.page(page), page * PAGE as u64).unwrap();
                } else if number == 0 || dice.below(2) == 0 {
                    file.write_all_at(&below.page(page), page * PAGE as u64).unwrap();
                }
            }
        }
        page += run;
    }
    files.iter().for_each(|file| file.sync_all().unwrap());
}

#[test]
fn machines_of_layers_read_the_pages_that_the_layers_are_merged_to() {
    if !vmm::has("machines_of_layers_read_the_pages_that_the_layers_are_merged_to", &[REMOVALS]) {
        return;
    }
    for (number, diffs) in [(61, 1), (62, 2), (63, 7)] {
        let fixture = Fixture::new(Image::new(number, 1500), diffs, u64::from(number));
        for fill in [Fill::Nothing, Fill::All] {
            let server = fixture.serve(options(|o| o.fill = fill));
            fixture.reads_all();
            let mut monitor = Monitor::start(&fixture.plan().in_regions(3));
            monitor.does("write 650 200 77");
            monitor.does("balloon 600 150 dontneed");
            monitor.does("touch 0 1500 4");
            server.stop();
        }
        fixture.cache.check().unwrap();
    }
}

/// What the kernel holds of the layers is copied from there.
#[test]
fn machines_of_layers_that_the_kernel_holds_read_the_same() {
    if !vmm::has("machines_of_layers_that_the_kernel_holds_read_the_same", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(64, 1200), 3, 64);
    fixture.layers.iter().for_each(|layer| drop(fs::read(layer).unwrap()));
    let server = fixture.serve_warm(options(|_| ()));
    fixture.reads_all();
    // Some of it is held, and the rest is read.
    vmm::evict(&fixture.layers[0], 1 << 20, Some(2 << 20));
    fixture.reads_all();
    server.stop();
}

#[test]
fn clones_map_the_image_of_layers() {
    if !vmm::has("clones_map_the_image_of_layers", &[Need::Userfault(BOTH_KINDS)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(65, 1100), 2, 65);
    let server = fixture.serve(options(|o| o.minor = true));
    let plan = fixture.plan().backing(Backing::Offered).features(BOTH_KINDS);
    let mut clones = [Monitor::start(&plan), Monitor::start(&plan)];
    for clone in &mut clones {
        clone.does("touch 0 600 3");
        clone.does("write 100 50 9");
        clone.does("touch 0 1100 3");
    }
    fixture.reads_all();
    let stats = server.stop();
    assert!(stats.counters.mapped_bytes > 0, "{stats:?}");
}

#[test]
fn a_record_of_layers_is_replayed_and_stale_when_a_diff_is_added() {
    if !vmm::has("a_record_of_layers_is_replayed_and_stale_when_a_diff_is_added", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(66, 1000), 2, 66);
    let server = fixture.serve(options(|o| o.record = true));
    Monitor::start(&fixture.plan()).does("touch 100 500 1");
    let record: FaultRecord = server.record().unwrap();
    server.stop();
    assert_eq!(record.image(), identify_layers(&fixture.cache, &fixture.layers).unwrap());
    assert_eq!(record.pages(), 500);

    let server = fixture.serve(options(|o| o.replay = Some(record.clone())));
    let mut monitor = Monitor::start(&fixture.plan());
    until("the record is replayed", || server.stats().counters.ahead_bytes >= 500 * PAGE as u64);
    monitor.does("touch 0 1000 2");
    assert_eq!(server.stop().counters.stale_bytes, 0);

    // A diff above them, of other bytes in those of 57 pages that are not zeros: they are left to their faults.
    let next = Image { generation: 9, ..fixture.image };
    let top = fixture.layers[2].with_file_name("top");
    let file = fs::File::create(&top).unwrap();
    file.set_len(next.bytes()).unwrap();
    let pages = (300..357).filter(|&page| !next.is_zero(page));
    let changed = pages.map(|page| file.write_all_at(&next.page(page), page * PAGE as u64).unwrap()).count();
    drop(file);
    let mut layers = fixture.layers.clone();
    layers.push(top);
    assert_ne!(record.image(), identify_layers(&fixture.cache, &layers).unwrap());
    let replay = options(|o| o.replay = Some(record));
    let server = Server::start_layers(&fixture.cache, &layers, &fixture.socket(), replay).unwrap();
    let mut monitor = Monitor::start(&fixture.plan());
    // Before the machine asks: a page that came by a fault is not looked at.
    until("the changed pages are found", || server.stats().counters.stale_bytes >= (changed * PAGE) as u64);
    monitor.does("touch 0 300 2");
    monitor.does("touch 357 643 2");
    assert!(monitor.ask("touch 301 1 1").unwrap().starts_with("page 301"), "the new diff is on top");
    assert_eq!(server.stop().counters.stale_bytes, (changed * PAGE) as u64);
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what}: it does not happen");
        std::thread::yield_now();
    }
}

/// From then on no machine has a byte of any layer.
#[test]
fn a_layer_that_changes_ends_the_machines_and_not_with_mixed_bytes() {
    if !vmm::has("a_layer_that_changes_ends_the_machines_and_not_with_mixed_bytes", &[REMOVALS]) {
        return;
    }
    type Change = fn(&Path);
    fn writable(path: &Path) -> fs::File {
        fs::OpenOptions::new().write(true).open(path).unwrap()
    }
    let changes: [Change; 2] = [
        |path| writable(path).write_all_at(b"x", 9).unwrap(),
        |path| writable(path).set_len(1 << 20).unwrap(),
    ];
    for (layer, change) in [(0, changes[0]), (1, changes[1]), (2, changes[0])] {
        let fixture = Fixture::new(Image::new(67, 800), 2, 67);
        let server = fixture.serve(options(|_| ()));
        let mut monitor = Monitor::start(&fixture.plan());
        monitor.does("touch 0 10 1");
        change(&fixture.layers[layer]);
        monitor.tell("touch 0 800 2");
        let ended = monitor.ended();
        assert!(!ended.success(), "layer {layer}: {ended:?}");
        assert_eq!(server.stop().vms_given_up, 1);
    }
}

#[test]
fn one_layer_is_a_snapshot_as_ever_and_wrong_ones_are_refused_at_the_start() {
    let fixture = Fixture::new(Image::new(68, 300), 1, 68);
    let start = |layers: &[PathBuf]| {
        Server::start_layers(&fixture.cache, layers, &fixture.socket(), RestoreOptions::default())
    };
    let alone = start(&fixture.layers[..1]).unwrap();
    assert_eq!(alone.image(), quinion_vm::identify(&fixture.cache, &fixture.layers[0]).unwrap());
    alone.stop();
    let file = fs::OpenOptions::new().write(true).open(&fixture.layers[1]).unwrap();
    file.set_len(fixture.image.bytes() - PAGE as u64).unwrap();
    let said = start(&fixture.layers).unwrap_err().to_string();
    assert!(said.contains("this diff has") && said.contains("the base has"), "{said}");
    start(&[]).unwrap_err();
    assert!(!fixture.socket().exists());
}
