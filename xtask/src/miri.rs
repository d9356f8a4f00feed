//! What is unsafe and needs no system call, run by an interpreter that checks each access.

use crate::run::{self, Outcome};

/// Tests by package: the checksum, registered memory, a device that reads and writes such memory,
/// and memory that programs share with the node. All other unsafe code calls the
/// system or another library, which Miri cannot.
const TESTS: [&[&str]; 4] = [
    &["--package", "bowline-crc", "--lib"],
    &["--package", "bowline-verbs", "--lib"],
    &["--package", "bowline-roce", "--test", "placed"],
    &["--package", "bowline-host-wire", "--test", "rings"],
];

/// Runs the tests; skipped, with the reason, where Miri is missing.
pub(crate) fn run() -> Outcome {
    if !run::nightly_has(&["miri", "--version"]) {
        return Outcome::Skipped(
            "no Miri (rustup toolchain install nightly --component miri,rust-src)".into(),
        );
    }
    for tests in TESTS {
        let mut command = run::cargo_nightly(&["miri", "test", "--locked"]);
        // Tests look at the environment for where to write that they are skipped.
        command.args(tests).env("MIRIFLAGS", "-Zmiri-disable-isolation");
        let done = run::status(&mut command);
        if done != Outcome::Passed {
            return done;
        }
    }
    Outcome::Passed
}
