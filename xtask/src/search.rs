//! The simulators on seeds that nobody has looked at.

use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::repo;
use crate::run::{self, Outcome};

/// The simulators, as `bowline sim` is told of them. RDMA is seldom among what the first draws.
const SIMULATORS: [(&str, &[&str]); 5] = [
    ("rds", &[]),
    ("rds over RDMA", &["--scenario", "rdma"]),
    ("roce", &["--roce"]),
    ("rtrs", &["--rtrs"]),
    ("host", &["--host"]),
];
/// Where plans of seeds that failed are written; those worth keeping go to crates/bowline-sim/kept.
const KEEP: &str = "target/sim-failures";
/// Seeds of each simulator in a night.
const NIGHT: u64 = 1_000_000;

/// Runs seeds of each simulator for so many seconds, from a seed that the commit draws: every
/// commit has its own, and the same again when it is looked at again.
pub(crate) fn fresh(args: &[String]) -> Outcome {
    let seconds = match run::number("sim-fresh", "--seconds", 60, args) {
        Ok(seconds) => seconds,
        Err(wrong) => return wrong,
    };
    let Some(commit) = commit() else {
        return Outcome::Failed("git rev-parse HEAD tells no commit".into());
    };
    let from = seed_of(&commit);
    println!("commit {commit} draws seeds from {from} on");
    each(&["--from", &from.to_string(), "--seconds", &u64::to_string(&seconds)])
}

/// Runs a million seeds of each simulator from the time of day on, and the tests of simulators that
/// take minutes: they look whether such seeds still show what is done wrong on purpose.
pub(crate) fn night(args: &[String]) -> Outcome {
    let seeds = match run::number("night", "--seeds", NIGHT, args) {
        Ok(seeds) => seeds,
        Err(wrong) => return wrong,
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let from = now.map_or(0, |time| time.as_millis()).to_string();
    println!("seeds from {from} on");
    let searched = each(&["--from", &from, "--seeds", &u64::to_string(&seeds), "--coverage"]);
    let mut shown = run::cargo(&["test", "--release", "--locked", "--package", "bowline-sim"]);
    shown.args(["--", "--include-ignored", "--nocapture"]).env("BOWLINE_FRESH_FROM", &from);
    match (searched, run::status(&mut shown)) {
        (Outcome::Passed, outcome) | (outcome, _) => outcome,
    }
}

/// Runs `bowline sim` with these arguments for each simulator, also after one has failed.
fn each(args: &[&str]) -> Outcome {
    let mut failed = Vec::new();
    for (name, which) in SIMULATORS {
        println!("== {name}");
        let all = which.iter().chain(args).chain(&["--keep", KEEP]);
        let all: Vec<String> = all.map(|arg| (*arg).to_owned()).collect();
        if run::bowline("sim", &all) != Outcome::Passed {
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return Outcome::Passed;
    }
    Outcome::Failed(format!(
        "failed: {}; {KEEP} has the plans: look at one with bowline sim --plan FILE --trace",
        failed.join(", ")
    ))
}

fn commit() -> Option<String> {
    let mut git = Command::new("git");
    git.args(["rev-parse", "HEAD"]).current_dir(repo::root()).stderr(Stdio::null());
    let output = git.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// The seed that a commit draws: its first twelve digits.
fn seed_of(commit: &str) -> u64 {
    commit.get(..12).and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_draw_different_seeds() {
        assert_eq!(seed_of("9a4044e0000001ff"), 0x9a40_44e0_0000);
        assert_ne!(seed_of("9a4044e1aaaaaaaa"), seed_of("ea28efd1aaaaaaaa"));
        let here = commit().expect("this is a checkout");
        assert!(here.len() >= 40 && seed_of(&here) > 0, "{here}");
    }
}
