//! Starting other programs, and the verbs that are one command.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::{ffi::OsStrExt, process::CommandExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::repo;

/// Exit status of a program that could not run here and said why.
pub(crate) const SKIPPED: u8 = 77;

/// How a verb or a step ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Everything was done and right.
    Passed,
    /// Nothing was done, with the reason.
    Skipped(String),
    /// Something was wrong.
    Failed(String),
    /// The command line was wrong.
    Usage(String),
}

/// The number behind a verb's only option, or that which holds without one.
pub(crate) fn number(
    verb: &str,
    option: &str,
    without: u64,
    args: &[String],
) -> Result<u64, Outcome> {
    match args {
        [] => Ok(without),
        [given, number] if given == option => match number.parse() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(Outcome::Usage(format!("{option} takes a positive number, not {number}"))),
        },
        _ => Err(Outcome::Usage(format!("{verb} takes only {option} N"))),
    }
}

/// A cargo command in the root of the repository.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(repo::root());
    command
}

/// A cargo command of the nightly toolchain.
pub(crate) fn cargo_nightly(args: &[&str]) -> Command {
    // CARGO names the binary of the running toolchain, which does not know `+nightly`.
    let mut command = Command::new("cargo");
    command.arg("+nightly").args(args).current_dir(repo::root());
    command.env_remove("RUSTUP_TOOLCHAIN");
    command
}

/// Tells whether the nightly toolchain has a cargo command.
pub(crate) fn nightly_has(args: &[&str]) -> bool {
    let mut command = cargo_nightly(args);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Runs a command with this terminal.
pub(crate) fn status(command: &mut Command) -> Outcome {
    let name = describe(command);
    match command.status() {
        Ok(status) if status.success() => Outcome::Passed,
        Ok(status) if status.code() == Some(i32::from(SKIPPED)) => {
            Outcome::Skipped(format!("{name} said so above"))
        }
        Ok(status) => Outcome::Failed(format!("{name}: {status}")),
        Err(error) => Outcome::Failed(format!("{name}: {error}")),
    }
}

/// What of a command's output explains a failure: where output is shown shortened, its middle is
/// missing, and that is where most steps are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said {
    telling: Vec<String>,
    last: VecDeque<String>,
    /// Lines to be kept behind one that begins an explanation.
    following: usize,
    skip_reason: Option<String>,
}

impl Said {
    const TELLING: usize = 60;
    const LAST: usize = 12;

    fn hear(&mut self, line: &str) {
        if let Some(text) = line.strip_prefix("SKIPPED: ") {
            self.skip_reason = Some(text.to_owned());
        }
        // A panic's message and a case's reason are on the lines that follow.
        if line.contains("panicked at") || line.contains("FAILED: ") {
            self.following = 4;
        }
        let is_telling = line.starts_with("error")
            || ["FAILED", "panicked at", "has been running for over"]
                .iter()
                .any(|word| line.contains(word));
        if (is_telling || self.following > 0) && self.telling.len() < Self::TELLING {
            self.telling.push(line.to_owned());
            self.following = self.following.saturating_sub(usize::from(!is_telling));
        }
        if self.last.len() == Self::LAST {
            self.last.pop_front();
        }
        self.last.push_back(line.to_owned());
    }

    /// The lines that explain a failure, then the last ones.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &str> {
        self.telling.iter().map(String::as_str).chain(["..."]).chain(self.last.iter().map(|l| &**l))
    }
}

/// The same command, to be run when processors have nothing else to do.
pub(crate) fn niced(command: &Command) -> Command {
    let mut niced = Command::new("nice");
    niced.arg("-n19").arg(command.get_program()).args(command.get_args());
    niced.current_dir(command.get_current_dir().unwrap_or(&repo::root()));
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => niced.env(name, value),
            None => niced.env_remove(name),
        };
    }
    niced
}

/// Runs a command without input in a process group of its own, and ends the group after `limit`.
/// What it says is printed behind `mark`.
pub(crate) fn bounded(
    command: &mut Command,
    limit: Duration,
    mark: &'static str,
) -> (Outcome, Said) {
    let said = Arc::new(Mutex::new(Said::default()));
    let outcome = bounded_heard(command, limit, mark, &said);
    let said = said.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (outcome, said)
}

fn bounded_heard(
    command: &mut Command,
    limit: Duration,
    mark: &'static str,
    said: &Arc<Mutex<Said>>,
) -> Outcome {
    let name = describe(command);
    // One pipe for both, so that lines stay in their order.
    let (reader, child) = match std::io::pipe().and_then(|(reader, writer)| {
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let child = command.process_group(0).spawn();
        // The command has the other end until then; with it the output would never end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok((reader, child?))
    }) {
        Ok(started) => started,
        Err(error) => return Outcome::Failed(format!("{name}: {error}")),
    };
    let mut child = child;
    let output = thread::spawn({
        let said = Arc::clone(said);
        move || {
            for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line);
                println!("{mark}{line}");
                said.lock().unwrap_or_else(PoisonError::into_inner).hear(&line);
            }
        }
    });
    let end = Instant::now() + limit;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(50)),
            Ok(None) => {
                let group = format!("-{}", child.id());
                let killed = Command::new("kill").args(["-KILL", "--", &group]).status();
                if !killed.is_ok_and(|s| s.success()) {
                    let _ = child.kill();
                }
                let _ = child.wait();
                return Outcome::Failed(format!("{name}: not done after {} s", limit.as_secs()));
            }
            Err(error) => return Outcome::Failed(format!("{name}: {error}")),
        }
    };
    // That thread has shown a panic of its own; what it has heard counts.
    let _ = output.join();
    let reason = said.lock().unwrap_or_else(PoisonError::into_inner).skip_reason.clone();
    match (status.code(), reason) {
        (Some(0), _) => Outcome::Passed,
        (Some(code), Some(reason)) if code == i32::from(SKIPPED) => Outcome::Skipped(reason),
        (Some(code), None) if code == i32::from(SKIPPED) => {
            Outcome::Failed(format!("{name}: skipped without a reason"))
        }
        _ => Outcome::Failed(format!("{name}: {status}")),
    }
}

fn describe(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let mut text = program.file_name().unwrap_or(OsStr::new("?")).to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    text
}

/// Links a program that serves disks with musl by the oldest Rust that is promised; its musl lacks
/// calls that later ones have. Without optimisation: only what is missing matters.
pub(crate) fn musl() -> Outcome {
    const VERSION: &str = env!("CARGO_PKG_RUST_VERSION");
    let toolchain = format!("+{VERSION}");
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let mut find = Command::new("rustc");
    find.args([&*toolchain, "--print", "target-libdir", "--target", &*target]);
    let found = find.env_remove("RUSTUP_TOOLCHAIN").stderr(Stdio::null()).output();
    let libraries = found.map_or_else(|_| Vec::new(), |found| found.stdout);
    let libraries = PathBuf::from(OsStr::from_bytes(libraries.trim_ascii()));
    if !libraries.is_dir() {
        return Outcome::Skipped(format!(
            "no Rust {VERSION} for musl (rustup toolchain install {VERSION} --profile minimal --target {target})"
        ));
    }
    let mut build = Command::new("cargo");
    build.args([
        &*toolchain,
        "build",
        "--locked",
        "--config",
        "profile.dev.opt-level=0",
        "--package",
        "bowline",
        "--example",
        "own_backend",
        "--target",
        &*target,
    ]);
    // CARGO names the binary of the running toolchain, which does not know `+1.89`.
    status(build.current_dir(repo::root()).env_remove("RUSTUP_TOOLCHAIN"))
}

/// Runs a subcommand of the bowline binary, built for release.
pub(crate) fn bowline(verb: &str, args: &[String]) -> Outcome {
    let run = ["run", "--release", "--locked", "--package", "bowline-cli", "--", verb];
    status(cargo(&run).args(args))
}

/// Runs the benchmarks.
pub(crate) fn bench(args: &[String]) -> Outcome {
    let run = ["run", "--release", "--locked", "--package", "bowline-bench", "--"];
    status(cargo(&run).args(args))
}

/// Runs what threads and processes hand to one another in many orders, the same each time.
pub(crate) fn model() -> Outcome {
    let manifest = repo::root().join("model/Cargo.toml");
    let mut test = cargo(&["test", "--locked", "--manifest-path"]);
    // One at a time: a failure is told beside the order that led to it.
    status(test.arg(manifest).args(["--", "--test-threads=1"]))
}

/// Checks licences, sources and duplicates of the dependencies; needs cargo-deny.
pub(crate) fn deny() -> Outcome {
    let mut version = cargo(&["deny", "--version"]);
    let found = version.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        return Outcome::Skipped("no cargo-deny (cargo install cargo-deny)".into());
    }
    status(&mut cargo(&["deny", "--locked", "check", "bans", "licenses", "sources"]))
}

/// Runs the scenarios against kernel peers; skipped, with the reason, where no guest can be booted.
pub(crate) fn interop(args: &[String]) -> Outcome {
    let only_tells = args.iter().any(|arg| ["-h", "--help", "--list"].contains(&arg.as_str()));
    if !only_tells && let Some(reason) = no_guests() {
        return Outcome::Skipped(reason);
    }
    // A runner that is wrong makes cases fail that are right.
    let mut tests = Command::new(repo::root().join("interop/tests/test_runner.py"));
    if !only_tells && let failed @ Outcome::Failed(_) = status(&mut tests) {
        return failed;
    }
    status(Command::new(repo::root().join("interop/run")).args(args).current_dir(repo::root()))
}

/// Why this machine cannot boot guests on a network of their own.
fn no_guests() -> Option<String> {
    let id = Command::new("id").arg("-u").stderr(Stdio::null()).output();
    if id.map_or(true, |id| id.stdout.trim_ascii() != b"0") {
        return Some("interop needs root for network namespaces".into());
    }
    let tun = std::path::Path::new("/dev/net/tun");
    (!tun.exists()).then(|| "interop needs /dev/net/tun".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Outcome {
        bounded(Command::new("sh").args(["-c", script]), limit, "").0
    }

    #[test]
    fn what_explains_a_failure_is_kept_in_order_and_within_bounds() {
        let script = "echo begins; echo 'thread panicked at x.rs:1' >&2; echo left; echo right; \
                      for i in $(seq 100); do echo line $i; done; echo 'test a ... FAILED'; exit 1";
        let (outcome, said) =
            bounded(Command::new("sh").args(["-c", script]), Duration::from_secs(60), "");
        assert!(matches!(outcome, Outcome::Failed(_)));
        let lines: Vec<&str> = said.lines().collect();
        let telling = ["thread panicked at x.rs:1", "left", "right", "line 1", "line 2"];
        assert_eq!(lines[..5], telling);
        assert_eq!(lines[5..7], ["test a ... FAILED", "..."]);
        assert_eq!(lines.last(), Some(&"test a ... FAILED"));
        assert_eq!(lines.len(), 5 + 2 + Said::LAST);
    }

    #[test]
    fn what_a_command_said_before_it_hung_is_kept() {
        let script = "echo 'test a has been running for over 60 seconds'; sleep 600";
        let mut command = Command::new("sh");
        let (outcome, said) = bounded(command.args(["-c", script]), Duration::from_secs(1), "");
        assert!(matches!(outcome, Outcome::Failed(_)));
        assert_eq!(said.lines().next(), Some("test a has been running for over 60 seconds"));
    }

    #[test]
    fn a_skip_needs_its_reason() {
        let limit = Duration::from_secs(60);
        let skip = shell("echo 'SKIPPED: no emulator'; exit 77", limit);
        assert_eq!(skip, Outcome::Skipped("no emulator".into()));
        assert!(matches!(shell("exit 77", limit), Outcome::Failed(_)));
        assert!(matches!(shell("echo 'SKIPPED: x'; exit 1", limit), Outcome::Failed(_)));
        assert_eq!(shell("echo 'SKIPPED: a part'", limit), Outcome::Passed);
    }

    #[test]
    fn what_hangs_is_ended_with_its_children() {
        let start = Instant::now();
        let outcome = shell("sleep 600 & sleep 600", Duration::from_millis(100));
        assert!(matches!(outcome, Outcome::Failed(why) if why.contains("not done after")));
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}
