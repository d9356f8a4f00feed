//! What a change must pass, in one list.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::api;
use crate::run::{self, Outcome};

/// Everything together ends within this time.
const TOTAL: Duration = Duration::from_secs(44 * 60);

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

/// What is optional is built and tested, too.
const ALL: &str = "--all-features";

/// Builds all that the next steps run.
const FIRST: [Step; 5] = [
    step("fmt", &["fmt", "--all", "--check"], 60),
    step(
        "clippy",
        &["clippy", "--workspace", "--all-targets", ALL, "--locked", "--", "-D", "warnings"],
        600,
    ),
    // What a package has of the command.
    step(
        "installed",
        &["check", "--package", "bowline-cli", "--no-default-features", "--locked"],
        300,
    ),
    step("features", &["xtask", "features"], 300),
    step("test build", &["test", "--workspace", ALL, "--locked", "--no-run"], 900),
];

/// Tests, which wait most of the time.
const TESTS: [Step; 4] = [
    // More of them at once than there are processors.
    Step {
        name: "test",
        cargo: &["test", "--workspace", ALL, "--locked", "--no-fail-fast"],
        env: Some(("RUST_TEST_THREADS", "6")),
        limit: 1700,
    },
    // Sixteen seconds of what the step before has shown for eight; the same features, so
    // nothing is built again.
    Step {
        name: "churn",
        cargo: &[
            "test",
            "--workspace",
            ALL,
            "--locked",
            "--test",
            "front_ends",
            "a_path_is_killed_every_two_seconds",
            "--",
            "--nocapture",
        ],
        env: Some(("BOWLINE_CHURN_SECONDS", "16")),
        limit: 300,
    },
    // A part of it again, where a node runs.
    step("beside", &["xtask", "beside"], 300),
    step("hostile", &["xtask", "hostile", "--seconds", "6"], 400),
];

/// What needs a processor, and gets it while tests wait.
const BESIDE: [Step; 12] = [
    step("release", &["build", "--release", "--locked"], 900),
    step("model", &["xtask", "model"], 600),
    step("musl", &["xtask", "musl"], 600),
    // Only its own profile links it.
    step(
        "shared",
        &["build", "--profile", "shared", "--locked", "--package", "bowline-ibverbs"],
        600,
    ),
    step("fuzz", &["xtask", "fuzz", "--seconds", "1"], 900),
    Step { name: "doc", cargo: &api::DOC, env: Some(api::DOC_FLAGS), limit: 300 },
    step("api", &["xtask", "api"], 120),
    step("check", &["xtask", "check"], 120),
    step("dissect", &["xtask", "dissect"], 300),
    step("deny", &["xtask", "deny"], 60),
    step("semver", &["xtask", "semver"], 400),
    step("publish", &["xtask", "publish"], 300),
];

/// What shows figures.
const ALONE: [Step; 2] = [
    step("quickstart", &["run", "--release", "--locked", "--", "quickstart"], 120),
    step("readme", &["xtask", "readme"], 300),
];

/// Guests have one processor each, and wait for much.
const GUESTS: [Step; 1] = [step("interop", &["xtask", "interop", "--subset", "ci"], 1200)];

/// What the simulators search, beside guests.
const SEARCHED: [Step; 9] = [
    step("sim", &["xtask", "sim", "--seeds", "4000"], 600),
    step("sim rdma", &["xtask", "sim", "--scenario", "rdma", "--seeds", "5000"], 600),
    // A connection over RDMA is lost at every work request of some stories.
    step(
        "sim step",
        &["xtask", "sim", "--scenario", "rdma-step", "--from", "0", "--seeds", "4000"],
        600,
    ),
    step("sim roce", &["xtask", "sim", "--roce", "--seeds", "4000"], 600),
    step("sim cells", &["xtask", "sim", "--roce", "--cells", "--seeds", "2"], 600),
    step("sim rtrs", &["xtask", "sim", "--rtrs", "--seeds", "3000"], 600),
    step("sim host", &["xtask", "sim", "--host", "--seeds", "4000"], 600),
    // Every mishap at every datagram of four stories.
    step(
        "sim each",
        &["xtask", "sim", "--rtrs", "--scenario", "each", "--from", "0", "--seeds", "24000"],
        600,
    ),
    // Those before stay the same, so that what once held still holds; these nobody has looked at.
    step("sim fresh", &["xtask", "sim-fresh", "--seconds", "8"], 460),
];

/// Runs every step, also after one failed, and prints a table at the end.
pub(crate) fn run() -> Outcome {
    let skips = Skips::new();
    let run = Run { start: Instant::now(), skips: &skips };
    let mut done = run.each(&FIRST, Place::Alone);
    done.extend(run.both(&TESTS, &BESIDE));
    done.extend(run.each(&ALONE, Place::Alone));
    done.extend(run.both(&GUESTS, &SEARCHED));
    let failed = done.iter().filter(|done| done.why.is_some()).map(|done| done.name);
    let mut failed: Vec<_> = failed.map(str::to_owned).collect();
    match skips.lines() {
        Ok(lines) if lines.is_empty() => println!("\nskipped tests: none"),
        Ok(lines) => {
            println!("\nskipped tests:");
            lines.iter().for_each(|line| println!("  {line}"));
        }
        Err(error) => failed.push(format!("skipped tests: {}: {error}", skips.0.display())),
    }
    done.iter().filter_map(|done| done.why.as_ref()).for_each(|text| println!("{text}"));
    println!();
    done.iter().for_each(|done| println!("{}", done.row));
    println!("{:<12}{:>6.0} s", "total", run.start.elapsed().as_secs_f64());
    if failed.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed(format!("failed: {}", failed.join(", ")))
    }
}

/// Which other steps run at the same time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Place {
    Alone,
    /// Others run at a lower priority.
    Before,
    /// At a lower priority than others; its lines are marked.
    Behind,
}

/// How a step has ended.
struct Done {
    name: &'static str,
    row: String,
    /// What explains its failure.
    why: Option<String>,
}

struct Run<'a> {
    start: Instant,
    skips: &'a Skips,
}

impl Run<'_> {
    /// Runs steps one after the other.
    fn each(&self, steps: &[Step], place: Place) -> Vec<Done> {
        steps.iter().map(|step| self.one(step, place)).collect()
    }

    /// Runs some steps, and others beside them at a lower priority.
    fn both(&self, steps: &[Step], others: &[Step]) -> Vec<Done> {
        thread::scope(|scope| {
            let others = scope.spawn(|| self.each(others, Place::Behind));
            let mut done = self.each(steps, Place::Before);
            done.extend(others.join().expect("a thread that has shown its panic"));
            done
        })
    }

    fn one(&self, step: &Step, place: Place) -> Done {
        let mark = if place == Place::Behind { "| " } else { "" };
        println!("\n{mark}=== {}: cargo {}", step.name, step.cargo.join(" "));
        let began = Instant::now();
        let left = TOTAL.saturating_sub(self.start.elapsed());
        let mut command = command(step);
        if place == Place::Behind {
            command = run::niced(&command);
        }
        command.env("CI", "true").env("BOWLINE_SKIPS", &self.skips.0);
        let limit = Duration::from_secs(step.limit).min(left);
        let (outcome, said) = run::bounded(&mut command, limit, mark);
        let seconds = began.elapsed().as_secs_f64();
        let (verdict, why) = match outcome {
            Outcome::Passed => ("PASS".to_owned(), None),
            Outcome::Skipped(reason) => (format!("SKIPPED ({reason})"), None),
            Outcome::Failed(why) | Outcome::Usage(why) => {
                let lines: Vec<_> = said.lines().map(|line| format!("  {line}")).collect();
                let text = format!("\nwhy {} failed:\n{}", step.name, lines.join("\n"));
                (format!("FAIL ({why})"), Some(text))
            }
        };
        println!("{mark}=== {}: {verdict}, {seconds:.0} s", step.name);
        let row = format!("{:<12}{seconds:>6.0} s  {verdict}", step.name);
        Done { name: step.name, row, why }
    }
}

/// The file in which tests write that they are skipped (`bowline_testkit::skipped`); gone at the
/// end.
struct Skips(PathBuf);

impl Skips {
    fn new() -> Self {
        Self(std::env::temp_dir().join(format!("bowline-skips-{}", std::process::id())))
    }

    /// Each skip once; none where no test has written.
    fn lines(&self) -> std::io::Result<BTreeSet<String>> {
        match std::fs::read_to_string(&self.0) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Skips {
    fn drop(&mut self) {
        // The system clears its temporary files where this fails.
        let _ = std::fs::remove_file(&self.0);
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

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;
    use bowline_testkit::skipped;

    #[test]
    #[ignore = "the process that another test starts"]
    fn lacks_an_unknown_program() {
        skipped::without("no-such-program");
    }

    #[test]
    #[ignore = "the process that another test starts"]
    fn lacks_fio() {
        skipped::without("fio");
    }

    /// Runs one of them in a process of its own; tells whether it passed.
    fn passes(test: &str, skips: &Skips, ci: bool) -> bool {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", &format!("ci::tests::{test}"), "--ignored"]);
        command.env_remove("CI").env("BOWLINE_SKIPS", &skips.0);
        if ci {
            command.env("CI", "true");
        }
        command.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("it runs").success()
    }

    #[test]
    fn what_is_skipped_is_written_down_and_what_should_be_there_is_not_skipped() {
        let skips = Skips::new();
        assert_eq!(skips.lines().expect("no file"), BTreeSet::new());
        for ci in [false, true] {
            assert!(passes("lacks_an_unknown_program", &skips, ci));
            assert_eq!(passes("lacks_fio", &skips, ci), !ci);
        }
        let expected = [
            "xtask ci::tests::lacks_an_unknown_program: no-such-program is not installed",
            "xtask ci::tests::lacks_fio: fio is not installed",
        ];
        assert_eq!(skips.lines().expect("a file"), expected.map(str::to_owned).into());
    }
}
