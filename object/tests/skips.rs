//! Tests whose server is not installed are skipped where that is seen, and fail where servers are required.
//!
//! This program starts itself with the output of tests captured, as it is by default, and looks at what is seen.

use std::process::{Command, Output};

mod real;

use real::{Server, or_skipped};

const CHILD: &str = "a_test_of_a_server_that_is_switched_off";

/// Started by the others as a process of its own; by itself it does nothing.
#[test]
fn a_test_of_a_server_that_is_switched_off() {
    let Ok(server) = std::env::var("QUINION_SKIPS") else { return };
    let found = match &*server {
        "versitygw" => Server::versitygw(),
        "moto" => Server::moto(),
        "fake-gcs-server" => Server::fake_gcs_server(),
        "azurite" => Server::azurite(),
        _ => None,
    };
    assert!(or_skipped(found, CHILD, &server).is_none(), "{server} is not switched off");
}

/// The output is captured, as it is by default.
fn run(server: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", CHILD]).env("QUINION_SKIPS", server);
    command.env_remove("QUINION_TEST_SERVERS").env_remove("QUINION_TEST_WITHOUT");
    command.envs(variables.iter().copied()).output().unwrap()
}

#[test]
fn a_skip_is_seen_though_the_harness_captures_the_output_of_tests() {
    for (server, variables) in [
        ("absent", &[][..]),
        ("versitygw", &[("QUINION_TEST_WITHOUT", "kvm,versitygw")]),
        ("moto", &[("QUINION_TEST_WITHOUT", "moto"), ("QUINION_TEST_SERVERS", "required")]),
        ("fake-gcs-server", &[("QUINION_TEST_WITHOUT", "moto,fake-gcs-server")]),
        ("azurite", &[("QUINION_TEST_WITHOUT", "azurite"), ("QUINION_TEST_SERVERS", "required")]),
    ] {
        let output = run(server, variables);
        let seen = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{seen}");
        assert!(seen.contains(&format!("SKIPPED: {CHILD}: there is no {server}")), "{seen}");
    }
}

#[test]
fn a_required_server_that_is_missing_fails_its_test() {
    let output = run("absent", &[("QUINION_TEST_SERVERS", "required")]);
    let seen = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{seen}");
    assert!(seen.contains("needs absent") && seen.contains("scripts/setup"), "{seen}");
}
