//! Hostile programs, nodes and users, each against the other two, for a while.

use crate::run::{self, Outcome};

/// The programs of tests, by package.
const TESTS: [&str; 2] = ["bowline-host", "bowline-preload"];

/// Runs them; the random ones of each program go on for so many seconds.
pub(crate) fn run(args: &[String]) -> Outcome {
    let seconds = match run::number("hostile", "--seconds", 20, args) {
        Ok(seconds) => seconds,
        Err(wrong) => return wrong,
    };
    for package in TESTS {
        let mut command = run::cargo(&["test", "--locked", "--package", package]);
        command.args(["--test", "hostile", "--", "--nocapture"]);
        let done = run::status(command.env("BOWLINE_HOSTILE_SECONDS", seconds.to_string()));
        if done != Outcome::Passed {
            return done;
        }
    }
    Outcome::Passed
}
