//! Skip: what a test does whose server is not installed: it is skipped, in a line that the harness does not capture, or
//! fails.
//!
//! | environment | a server that is not installed |
//! |---|---|
//! | nothing | skips its tests, each with a line |
//! | `QUINION_TEST_SERVERS=required`, as `cargo xtask test` says | fails its tests |
//! | `QUINION_TEST_WITHOUT=versitygw,moto,fake-gcs-server,azurite` | skips its tests, also if it is installed |

use std::io::Write;

/// Whether the environment says to do without the server of that name.
pub fn is_switched_off(server: &str) -> bool {
    std::env::var("QUINION_TEST_WITHOUT").unwrap_or_default().split(',').any(|word| word == server)
}

/// Prints that `test` is skipped for want of `server`.
///
/// # Panics
/// If the environment requires the server.
pub fn missing(test: &str, server: &str) {
    let is_required = std::env::var("QUINION_TEST_SERVERS").is_ok_and(|value| value == "required");
    if is_required && !is_switched_off(server) {
        panic!(
            "{test} needs {server}, which is not in the target folder: scripts/setup installs it, or says why it \
             cannot; QUINION_TEST_WITHOUT={server} skips what needs it"
        );
    }
    let line =
        format!("SKIPPED: {test}: there is no {server} in the target folder; scripts/setup installs it\n");
    std::io::stderr().write_all(line.as_bytes()).expect("standard error is open");
}
