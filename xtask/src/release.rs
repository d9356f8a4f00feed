//! A release: sets its version, and compares the library with the last one.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::repo;
use crate::run::{Outcome, cargo, status};

/// Files with the version, beside Cargo.toml: the package's name has it.
const TEXTS: [&str; 2] = ["README.md", "packaging/README.md"];
/// Lock files, by their manifests.
const LOCKS: [&str; 3] = ["Cargo.toml", "model/Cargo.toml", "fuzz/Cargo.toml"];
const OLD: &str = env!("CARGO_PKG_VERSION");

/// Sets the version of all crates and of what names it, as docs/release.md has it, and says what
/// is left for a person.
pub(crate) fn prepare(args: &[String]) -> Outcome {
    let [version] = args else { return Outcome::Usage("release takes a version".into()) };
    if !is_version(version) {
        return Outcome::Usage(format!("{version} is no version such as 0.2.0"));
    }
    let done = dated(version).and_then(|()| set(version)).and_then(|()| lock());
    if let Err(why) = done {
        return Outcome::Failed(why);
    }
    println!(
        "version {version} is set; see `git diff`. Then:\n  \
         git commit --all --message \"release: {version}\"\n  \
         git tag --annotate v{version} --message \"bowline {version}\"\n  \
         git push origin main v{version}    # CI runs on the tag; wait for it\n  \
         cargo publish --workspace"
    );
    Outcome::Passed
}

/// Compares the public interface of the library with that of the last tag, by the rules of
/// versions; needs cargo-semver-checks.
pub(crate) fn semver() -> Outcome {
    let mut tool = cargo(&["semver-checks", "--version"]);
    let found = tool.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        return Outcome::Skipped(
            "no cargo-semver-checks (cargo install --locked cargo-semver-checks)".into(),
        );
    }
    let mut git = std::process::Command::new("git");
    git.args(["describe", "--tags", "--match", "v*", "--abbrev=0"]).current_dir(repo::root());
    let tag = git.stderr(Stdio::null()).output();
    let tag = tag.map_or(String::new(), |tag| String::from_utf8_lossy(&tag.stdout).into_owned());
    if tag.trim().is_empty() {
        return Outcome::Skipped("no release yet that the library could be compared with".into());
    }
    let words = ["semver-checks", "--package", "bowline", "--all-features", "--baseline-rev"];
    status(cargo(&words).arg(tag.trim()))
}

/// Tells whether a text is a version of three numbers.
fn is_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    parts.len() == 3 && parts.iter().all(|part| part.parse::<u32>().is_ok())
}

/// Checks that the changelog has the version with a date.
fn dated(version: &str) -> Result<(), String> {
    let text = read("CHANGELOG.md")?;
    let head = format!("## [{version}] - 2");
    let found = text.lines().any(|line| line.starts_with(&head));
    found.then_some(()).ok_or_else(|| format!("CHANGELOG.md has no line {head}... with its date"))
}

fn set(version: &str) -> Result<(), String> {
    write("Cargo.toml", &with_version(&read("Cargo.toml")?, OLD, version))?;
    TEXTS.iter().try_for_each(|name| {
        let packages = read(name)?.replace(&format!("_{OLD}-1_"), &format!("_{version}-1_"));
        write(name, &packages)
    })
}

/// The workspace's manifest with another version of its crates.
fn with_version(manifest: &str, old: &str, new: &str) -> String {
    let (old, new) = (format!("version = \"{old}\""), format!("version = \"{new}\""));
    let is_own = |line: &str| line.starts_with("version") || line.contains("path = \"crates/");
    let line = |line: &str| if is_own(line) { line.replace(&old, &new) } else { line.to_owned() };
    manifest.split_inclusive('\n').map(line).collect()
}

/// Has cargo write the version into the lock files.
fn lock() -> Result<(), String> {
    LOCKS.iter().try_for_each(|manifest| {
        let mut metadata = cargo(&["metadata", "--format-version", "1", "--manifest-path"]);
        metadata.arg(repo::root().join(manifest)).stdout(Stdio::null());
        match status(&mut metadata) {
            Outcome::Passed => Ok(()),
            other => Err(format!("{manifest}: {other:?}")),
        }
    })
}

fn read(name: impl AsRef<Path>) -> Result<String, String> {
    let path = repo::root().join(name);
    fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(name: impl AsRef<Path>, text: &str) -> Result<(), String> {
    let path = repo::root().join(name);
    fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_own_crates_change_and_those_of_others_do_not() {
        let text = "version = \"0.1.0\"\nrust-version = \"1.89\"\n\
                    a = { path = \"crates/a\", version = \"0.1.0\", default-features = false }\n\
                    other = { version = \"0.1.0\" }\n";
        let new = with_version(text, "0.1.0", "0.2.0");
        assert_eq!(new.matches("0.2.0").count(), 2, "{new}");
        assert!(new.contains("other = { version = \"0.1.0\" }\n"), "{new}");
    }

    #[test]
    fn a_version_has_three_numbers() {
        assert!(is_version("0.2.0") && is_version("1.20.3"));
        assert!(!is_version("0.2") && !is_version("v0.2.0") && !is_version("0.2.0-rc1"));
    }
}
