//! What a change must pass, in one list.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::run::{self, Outcome};

/// Everything together ends within this time.
const TOTAL: Duration = Duration::from_secs(40 * 60);

struct Step {
    name: &'static str,
    cargo: &'static [&'static str],
    env: Option<(&'static str, &'static str)>,
    /// Seconds after which the step counts as hanging.
    limit: u64,
}

const fn step(name: &'static str, cargo: &'static [&'static str], limit: u64) -> Step {
    Step { name, cargo, env: None, limit }
}

const XTASK: [&str; 6] = ["run", "--quiet", "--locked", "--package", "xtask", "--"];

/// The only optional part of the workspace is built and tested, too.
const TOKIO: &str = "--features=bowline/tokio";

const STEPS: [Step; 12] = [
    step("fmt", &["fmt", "--all", "--check"], 60),
    step(
        "clippy",
        &["clippy", "--workspace", "--all-targets", TOKIO, "--locked", "--", "-D", "warnings"],
        600,
    ),
    step("test", &["test", "--workspace", TOKIO, "--locked"], 900),
    Step {
        name: "doc",
        cargo: &["doc", "--workspace", "--no-deps", TOKIO, "--locked"],
        env: Some(("RUSTDOCFLAGS", "-D warnings")),
        limit: 300,
    },
    step("check", &["xtask", "check"], 60),
    step("deny", &["xtask", "deny"], 60),
    step("quickstart", &["run", "--release", "--locked", "--", "quickstart"], 600),
    step("sim", &["xtask", "sim", "--seeds", "20000"], 600),
    step("sim roce", &["xtask", "sim", "--roce", "--seeds", "20000"], 600),
    step("sim rtrs", &["xtask", "sim", "--rtrs", "--seeds", "20000"], 600),
    step("fuzz", &["xtask", "fuzz", "--seconds", "20"], 600),
    step("interop", &["xtask", "interop", "--subset", "ci"], 1200),
];

/// Runs every step, also after one failed, and prints a table at the end.
pub(crate) fn run() -> Outcome {
    let start = Instant::now();
    let mut rows = Vec::new();
    let mut failed = Vec::new();
    for step in &STEPS {
        println!("\n=== {}: cargo {}", step.name, step.cargo.join(" "));
        let began = Instant::now();
        let limit = Duration::from_secs(step.limit).min(TOTAL.saturating_sub(start.elapsed()));
        let outcome = run::bounded(command(step).env("CI", "true"), limit);
        let seconds = began.elapsed().as_secs_f64();
        let verdict = match outcome {
            Outcome::Passed => "PASS".to_owned(),
            Outcome::Skipped(reason) => format!("SKIPPED ({reason})"),
            Outcome::Failed(why) | Outcome::Usage(why) => {
                failed.push(step.name);
                format!("FAIL ({why})")
            }
        };
        println!("=== {}: {verdict}, {seconds:.0} s", step.name);
        rows.push(format!("{:<12}{seconds:>6.0} s  {verdict}", step.name));
    }
    println!("\n{}", rows.join("\n"));
    println!("{:<12}{:>6.0} s", "total", start.elapsed().as_secs_f64());
    if failed.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed(format!("failed: {}", failed.join(", ")))
    }
}

fn command(step: &Step) -> Command {
    let mut command = match step.cargo {
        ["xtask", args @ ..] => {
            let mut command = run::cargo(&XTASK);
            command.args(args);
            command
        }
        args => run::cargo(args),
    };
    command.envs(step.env);
    command
}
