//! Tests of both judges, by what a naive cache around them sees.
//!
//! The vectors V1 to V12 were measured on Linux 6.18 with windows of 32 pages;
//! the statements Q01 to Q12 hold for the default judge, and where it does
//! better than the kernel the test says so.

use proptest::prelude::*;

use super::simulator::Simulator;
use super::*;

const FILE: u64 = 100_000;

/// The kernel with small folios, and with large ones.
fn kernel(order_max: u8) -> Simulator {
    Simulator::new(Config::kernel_like(32, 320, Order(order_max)), FILE)
}

fn ours(pages_max: u32, file_pages: u64) -> Simulator {
    Simulator::new(Config::new(pages_max), file_pages)
}

fn read_each(simulator: &mut Simulator, pages: impl IntoIterator<Item = u64>) -> String {
    pages.into_iter().for_each(|page| simulator.read(page, 1));
    simulator.told()
}

fn read_steps(simulator: &mut Simulator, first: u64, pages: u64, reads: u64) -> String {
    (0..reads).for_each(|i| simulator.read(first + i * pages, pages));
    simulator.told()
}

// The kernel's windows.

#[test]
fn q01_v01_small_folios_one_page_at_a_time() {
    let told = read_each(&mut kernel(0), 0..93);
    assert_eq!(told, "0+4(3) 4+8(8) 12+16(16) 28+32(32) 60+32(32) 92+32(32) 124+32(32)");
}

#[test]
fn q01_v02_small_folios_four_pages_at_a_time() {
    let told = read_steps(&mut kernel(0), 0, 4, 15);
    assert_eq!(told, "0+8(4) 8+16(16) 24+32(32) 56+32(32) 88+32(32)");
}

#[test]
fn q01_v03_large_folios_trim_the_ramp() {
    let mut simulator = kernel(9);
    let told = read_each(&mut simulator, 0..65);
    let expected = "0+4(3) 4+8(8) 12+4(4) 16+8(8) 24+8(8) 32+16(16) 48+16(16) 64+32(32) 96+32(32)";
    assert_eq!(told, expected);
    assert_eq!(simulator.told_folios(), "4xo0 3xo2 2xo3 2xo4 2xo5");
}

#[test]
fn q01_v04_large_folios_from_the_middle() {
    let mut simulator = kernel(9);
    let told = read_each(&mut simulator, 1000..1089);
    let expected = "1000+1 1001+4(3) 1005+7(7) 1012+12(12) 1024+24(24) 1048+8(8) 1056+16(16) 1072+16(16) \
                    1088+32(32) 1120+32(32)";
    assert_eq!(told, expected);
    let folios = simulator.told_folios();
    assert!(folios.starts_with("6xo0 1xo1 2xo2 1xo3 1xo4 2xo3"), "{folios}");
}

#[test]
fn q01_v05_sixteen_pages_at_a_time() {
    let mut simulator = kernel(9);
    assert_eq!(read_steps(&mut simulator, 0, 16, 5), "0+32(16) 32+32(32) 64+32(32) 96+32(32)");
    assert_eq!(simulator.told_folios(), "32xo0 8xo2 2xo4 1xo5");
}

#[test]
fn q01_v06_a_read_larger_than_the_window() {
    let mut simulator = kernel(9);
    simulator.read(0, 256);
    assert_eq!(simulator.told(), "0+256(128) 256+256(256)");
    assert_eq!(simulator.told_folios(), "256xo0 64xo2");
}

#[test]
fn q01_v07_random_reads() {
    let mut simulator = kernel(9);
    assert_eq!(read_each(&mut simulator, [7000, 300, 52_000, 9_001]), "7000+1 300+1 52000+1 9001+1");
    simulator.read(80_000, 8);
    simulator.read(40_004, 8);
    assert_eq!(simulator.told(), "80000+8 40004+8");
}

#[test]
fn q01_v08_backward() {
    assert_eq!(read_each(&mut kernel(9), (96..=100).rev()), "100+1 99+1 98+1 97+1 96+1");
}

#[test]
fn q01_v09_every_second_page_looks_like_a_stream() {
    let told = read_each(&mut kernel(0), (5000..5012).step_by(2));
    assert_eq!(told, "5000+1 5002+4(3) 5006+4(3) 5010+4(3)");
}

#[test]
fn q01_v10_two_streams_that_take_turns() {
    let told = read_each(&mut kernel(9), (0..6).flat_map(|i| [2000 + i, 8000 + i]));
    let expected = "2000+1 8000+1 2001+1 8001+1 2002+3(1) 8002+3(1) 2005+3(3) 8005+3(3) 2008+8(8) 8008+8(8)";
    assert_eq!(told, expected);
}

#[test]
fn q01_v11_the_hint_random() {
    let mut simulator = kernel(9);
    simulator.state.set_hint(Hint::Random);
    for (first, pages) in [(100, 1), (104, 4), (2000, 64)] {
        simulator.read(first, pages);
    }
    assert_eq!(simulator.told(), "100+1 104+4 2000+64");
}

#[test]
fn q01_v12_page_faults() {
    let mut simulator = kernel(9);
    (100..=160).for_each(|page| simulator.fault(page));
    assert_eq!(simulator.told(), "84+32(8) 116+32(32) 148+28(28) 176+16(16)");
    let mut simulator = kernel(9);
    (simulator.fault(5000), simulator.fault(9000));
    assert_eq!(simulator.told(), "4984+32(8) 8984+32(8)");
    let mut simulator = kernel(9);
    simulator.state.set_hint(Hint::Random);
    (simulator.fault(5000), simulator.fault(9000));
    assert_eq!(simulator.told(), "5000+1 9000+1");
}
