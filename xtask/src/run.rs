//! Starting other programs, and the verbs that are one command.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::{ffi::OsStrExt, process::CommandExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
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

/// Runs a command without input in a process group of its own, and ends the group after `limit`.
pub(crate) fn bounded(command: &mut Command, limit: Duration) -> Outcome {
    let name = describe(command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return Outcome::Failed(format!("{name}: {error}")),
    };
    // Passes the output through and remembers the line that tells why something was skipped.
    let output = child.stdout.take().map(|stdout| {
        thread::spawn(move || {
            let mut reason = None;
            for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line);
                println!("{line}");
                if let Some(text) = line.strip_prefix("SKIPPED: ") {
                    reason = Some(text.to_owned());
                }
            }
            reason
        })
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
    let reason = output.and_then(|thread| thread.join().ok()).flatten();
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
        bounded(Command::new("sh").args(["-c", script]), limit)
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
