//! Hostile programs, nodes and users, each against the other two, for a while.

use crate::run::{self, Outcome};

/// The programs of tests, by package.
const TESTS: [&str; 2] = ["bowline-host", "bowline-preload"];

/// Runs them; the random ones of each program go on for so many seconds.
pub(crate) fn run(args: &[String]) -> Outcome {
    let seconds: u32 = match args {
        [] => 20,
        [flag, n] if flag == "--seconds" => match n.parse() {
            Ok(n) if n > 0 => n,
            _ => return Outcome::Usage("--seconds takes a positive number".into()),
        },
        _ => return Outcome::Usage("hostile takes only --seconds N".into()),
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
