//! Metrics: numbers of each machine that a server serves.
//!
//! ```text
//!   two machines, 1 and 3 faults --> stats().each: two rows, and as many in the text for Prometheus
//! ```

use std::time::{Duration, Instant};

use quinion_testing::vmm;
mod fixture;

use fixture::{Fixture, options};
use quinion_testing::vmm::{Image, Monitor, Need, PAGE, kernel};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

#[test]
fn each_machine_has_numbers_of_its_own_while_it_is_served() {
    let test = "each_machine_has_numbers_of_its_own_while_it_is_served";
    if !vmm::has(test, &[Need::Userfault(kernel::EVENT_REMOVE)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(81, 200));
    let server = fixture.serve(options(|o| o.run_bytes = PAGE as u64));
    assert_eq!(server.stats().each, []);
    let mut monitors = [Monitor::start(&fixture.plan()), Monitor::start(&fixture.plan())];
    monitors[0].does("touch 0 1 1");
    for page in [10, 100, 190] {
        monitors[1].does(&format!("touch {page} 1 1"));
    }
    // The machine continues as soon as it has its page; the server counts it afterwards.
    let began = Instant::now();
    while server.stats().counters.faults < 4 {
        assert!(began.elapsed() < Duration::from_secs(120), "the faults are not counted");
        std::thread::yield_now();
    }
    let stats = server.stats();
    assert_eq!((stats.vms, stats.each.len()), (2, 2));
    assert!(stats.each[0].vm < stats.each[1].vm && stats.each.iter().all(|vm| vm.process != 0), "{stats:?}");
    let faults: Vec<u64> = stats.each.iter().map(|vm| vm.counters.faults).collect();
    assert_eq!(faults, [1, 3]);
    let (vm, process) = (stats.each[1].vm, stats.each[1].process);
    let row = format!("quinion_restore_vm_faults_total{{vm=\"{vm}\",process=\"{process}\"}} 3\n");
    assert!(stats.prometheus().contains(&row), "{row} is not in {}", stats.prometheus());
    assert_eq!(server.stop().each, []);
}
