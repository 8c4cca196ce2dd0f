//! Image: machines that map one image receive its pages, share them, and keep their own writes private.
//!
//! ```text
//!   snapshot --device, once--> image --mapped, not copied--> clone, clone, clone     each MAP_PRIVATE
//! ```

use quinion_testing::vmm;
mod fixture;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use fixture::{Fixture, options};
use quinion_vm::OnFailure;

use quinion_testing::vmm::{Backing, Image, Monitor, Need, Plan, kernel};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const FEATURES: u64 = kernel::MINOR_SHMEM | kernel::MISSING_SHMEM | kernel::EVENT_REMOVE;

fn mapping(fixture: &Fixture) -> Plan {
    fixture.plan().backing(Backing::Offered).features(FEATURES)
}

#[test]
fn clones_share_an_image_and_keep_their_writes() {
    if !vmm::has("clones_share_an_image_and_keep_their_writes", &[Need::Userfault(FEATURES)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(51, 3000));
    let server = fixture.serve(options(|o| o.minor = true));
    let mut clones: Vec<Monitor> = (0..4).map(|_| Monitor::start(&mapping(&fixture))).collect();
    for (number, clone) in clones.iter_mut().enumerate() {
        clone.tell(&format!("touch {} 1500 3", 300 * number));
    }
    for (number, clone) in clones.iter_mut().enumerate() {
        assert_eq!(clone.answer().as_deref(), Some("done"));
        clone.does(&format!("write 100 2000 {}", 77 + number));
        clone.does("touch 0 3000 2");
    }
    let read = fixture.cache.stats().device_bytes;
    let mut late = Monitor::start(&mapping(&fixture));
    late.does("touch 0 3000 2");
    assert_eq!(fixture.cache.stats().device_bytes, read, "there is one image for all of them");
    // A monitor that copies runs beside them, and another one connects late.
    Monitor::start(&Plan::new(fixture.socket(), fixture.image)).does("touch 0 3000 2");
    Monitor::start(&mapping(&fixture).in_regions(3)).does("touch 0 3000 2");
    server.stop();
    fixture.cache.check().unwrap();
}

/// A machine that is told of only one kind of fault would read zeros, or memory that is not filled yet. The server
/// registers both kinds, whichever the machine asked for.
#[test]
fn a_machine_that_asked_for_one_kind_of_fault_sees_the_snapshot_all_the_same() {
    let test = "a_machine_that_asked_for_one_kind_of_fault_sees_the_snapshot_all_the_same";
    if !vmm::has(test, &[Need::Userfault(FEATURES)]) {
        return;
    }
    for (number, mode) in [(54, kernel::MINOR), (55, kernel::MISSING)] {
        let fixture = Fixture::new(Image::new(number, 1500));
        let server = fixture.serve(options(|o| o.minor = true));
        let plan = mapping(&fixture);
        // The memory of the first 2 MiB exists after this touch, and most of its pages are not filled yet.
        Monitor::start(&plan).does("touch 0 1 1");
        Monitor::start(&plan.backing(Backing::OfferedFor(mode))).does("touch 0 1500 2");
        server.stop();
    }
}

#[test]
fn a_clones_memory_that_is_given_back_is_the_image_again() {
    let test = "a_clones_memory_that_is_given_back_is_the_image_again";
    if !vmm::has(test, &[Need::Userfault(FEATURES)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(52, 400));
    let _server = fixture.serve(options(|o| o.minor = true));
    let mut clone = Monitor::start(&mapping(&fixture));
    clone.does("write 50 200 5");
    clone.does("reset 100 200");
    clone.does("touch 0 400 3");
}

#[test]
fn an_image_is_handed_only_to_authorised_peers_and_not_for_writing() {
    let test = "an_image_is_handed_only_to_authorised_peers_and_not_for_writing";
    if !vmm::has(test, &[Need::Userfault(FEATURES)]) {
        return;
    }
    let want = b"{\"quinion_restore\":1,\"want\":\"image\"}\n";
    let fixture = Fixture::new(Image::new(53, 100));
    let server = fixture.serve(options(|_| ()));
    let stream = UnixStream::connect(fixture.socket()).unwrap();
    kernel::send(&stream, want, &[]).unwrap();
    let (said, descriptors) = kernel::receive(&stream).unwrap();
    assert!(String::from_utf8_lossy(&said).contains("\"error\"") && descriptors.is_empty(), "{said:?}");
    server.stop();

    let server = fixture.serve(options(|o| {
        o.minor = true;
        o.on_failure = OnFailure::Leave;
    }));
    let stream = UnixStream::connect(fixture.socket()).unwrap();
    kernel::send(&stream, want, &[]).unwrap();
    let (_, descriptors) = kernel::receive(&stream).unwrap();
    let [image] = &descriptors[..] else { panic!("one image: {descriptors:?}") };
    let written = std::fs::File::from(image.as_fd().try_clone_to_owned().unwrap());
    let refused = std::os::unix::fs::FileExt::write_at(&written, b"x", 0).expect_err("it is for reading");
    assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
    vmm::memory::map(&vmm::memory::Of::Shared(image), 0, 4096).expect_err("nor is it mapped for writing");
    server.stop();
}

#[test]
fn guests_of_one_image_go_on_in_it_and_keep_their_writes() {
    let needs = [Need::Userfault(FEATURES), Need::Kvm];
    if !vmm::has("guests_of_one_image_go_on_in_it_and_keep_their_writes", &needs) {
        return;
    }
    let fixture = Fixture::new(Image::new(12, 1024));
    let _server = fixture.serve(options(|o| o.minor = true));
    let plan = mapping(&fixture);
    let mut clones = [(); 3].map(|()| Monitor::start(&plan));
    for (number, clone) in clones.iter_mut().enumerate() {
        clone.does("sum 0 600");
        clone.does(&format!("set 100 800 {}", 1000 + number));
    }
    for clone in &mut clones {
        clone.does("sum 0 1024");
        clone.does("touch 0 1024 2");
    }
    let read = fixture.cache.stats().device_bytes;
    assert!(read >= fixture.image.bytes());
    Monitor::start(&plan).does("sum 0 1024");
    assert_eq!(fixture.cache.stats().device_bytes, read, "there is one image for all of them");
}
