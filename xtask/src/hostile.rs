//! Hostile programs, nodes, users and peers, each against the others, for a while.

use crate::run::{self, Outcome};

/// Runs them; the random ones of programs, nodes and users go on for so many seconds each.
pub(crate) fn run(args: &[String]) -> Outcome {
    let seconds = match run::number("hostile", "--seconds", 20, args) {
        Ok(seconds) => seconds,
        Err(wrong) => return wrong,
    };
    // With all features of all packages nothing is built that another test has not.
    let mut command = run::cargo(&["test", "--locked", "--workspace", "--all-features"]);
    command.args(["--test", "hostile", "--", "--nocapture"]);
    run::status(command.env("BOWLINE_HOSTILE_SECONDS", seconds.to_string()))
}
