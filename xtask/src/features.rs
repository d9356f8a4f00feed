//! The library with each set of features that changes what the others need.

use crate::run::{self, Outcome};

/// All together are built by every other step.
const SETS: [&str; 4] = ["", "rdma", "rtrs", "tokio,tracing"];

/// Checks the library, its tests and its examples with each set.
pub(crate) fn check() -> Outcome {
    for set in SETS {
        println!("features: {}", if set.is_empty() { "none" } else { set });
        let done = run::status(&mut run::cargo(&[
            "check",
            "--quiet",
            "--locked",
            "--package=bowline",
            "--tests",
            "--examples",
            "--no-default-features",
            "--features",
            set,
        ]));
        if done != Outcome::Passed {
            return done;
        }
    }
    Outcome::Passed
}
