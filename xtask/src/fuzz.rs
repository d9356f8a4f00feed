//! Every fuzz target for a while.

use std::process::Stdio;

use crate::repo;
use crate::run::{self, Outcome};

/// Targets that run for fewer seconds are not optimized: building them would take longer than that
/// saves.
const BUILT_FOR: u64 = 10;

/// Runs each target of the fuzz crate; skipped, with the reason, where the tools are missing.
pub(crate) fn run(args: &[String]) -> Outcome {
    let seconds = match run::number("fuzz", "--seconds", 20, args) {
        Ok(seconds) => seconds,
        Err(wrong) => return wrong,
    };
    if !run::nightly_has(&["--version"]) {
        return Outcome::Skipped("no nightly toolchain (rustup toolchain install nightly)".into());
    }
    if !run::nightly_has(&["fuzz", "--version"]) {
        return Outcome::Skipped("no cargo-fuzz (cargo install cargo-fuzz)".into());
    }
    let list = run::cargo_nightly(&["fuzz", "list"]).stderr(Stdio::inherit()).output();
    let targets: Vec<String> = match list {
        Ok(out) if out.status.success() => {
            String::from_utf8_lossy(&out.stdout).lines().map(str::to_owned).collect()
        }
        Ok(out) => return Outcome::Failed(format!("cargo fuzz list: {}", out.status)),
        Err(error) => return Outcome::Failed(format!("cargo fuzz list: {error}")),
    };
    if targets.is_empty() {
        return Outcome::Failed("the fuzz crate has no targets".into());
    }
    let limit = format!("-max_total_time={seconds}");
    for target in &targets {
        println!("fuzz {target}, {seconds} s");
        let quiet = ["-verbosity=0", "-print_final_stats=1"];
        let how: &[&str] = if seconds < BUILT_FOR { &["--dev"] } else { &[] };
        let mut command = run::cargo_nightly(&["fuzz", "run"]);
        command.args(how).args([target, "--", &limit]);
        let done = run::status(command.args(quiet));
        if done != Outcome::Passed {
            let place = repo::root().join("fuzz/artifacts").join(target);
            eprintln!("inputs that failed are in {}", place.display());
            return done;
        }
    }
    Outcome::Passed
}
