//! What a user installs: manual pages, completions, the Debian package, and its test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::repo;
use crate::run::{Outcome, cargo, status};

/// What is installed of the command: not what is for those who have the sources.
const COMMAND: &[&str] = &["--package", "bowline-cli", "--no-default-features"];
/// The daemon.
const DAEMON: &[&str] = &["--package", "bowline-node", "--features", "options"];

/// Writes manual pages and completions, and with `--deb` the Debian package.
pub(crate) fn run(rest: &[String]) -> Outcome {
    let package = match rest {
        [] => false,
        [flag] if flag == "--deb" => true,
        _ => return Outcome::Usage("dist takes only --deb".into()),
    };
    if package && !has("dpkg-deb") {
        return Outcome::Skipped("no dpkg-deb, which Debian and its relatives have".into());
    }
    let dist = repo::target().join("dist");
    let written = build(package).and_then(|()| pages(&dist)).and_then(|()| match package {
        true => done(status(Command::new(script("deb/build")).args([&release(), &dist]))),
        false => Ok(()),
    });
    match written {
        Ok(()) => {
            println!("written to {}", dist.display());
            Outcome::Passed
        }
        Err(outcome) => outcome,
    }
}

/// Installs the package into an empty system, uses it there, and removes it.
pub(crate) fn test() -> Outcome {
    match run(&["--deb".into()]) {
        Outcome::Passed => status(Command::new(script("test")).arg(repo::target().join("dist"))),
        outcome => outcome,
    }
}

fn build(with_libraries: bool) -> Result<(), Outcome> {
    // Each by itself: built together, they would have the features of all.
    let mut packages = vec![COMMAND, DAEMON];
    if with_libraries {
        packages.push(&["--package", "bowline-preload"]);
    }
    packages.into_iter().try_for_each(|package| {
        done(status(cargo(&["build", "--release", "--locked"]).args(package)))
    })?;
    if with_libraries {
        let package = ["--locked", "--package", "bowline-ibverbs"];
        done(status(cargo(&["build", "--profile", "shared"]).args(package)))?;
        let built = repo::target().join("shared/bowline-ibverbs");
        fs::copy(&built, release().join("bowline-ibverbs"))
            .map_err(|error| Outcome::Failed(format!("{}: {error}", built.display())))?;
    }
    Ok(())
}

/// Writes man pages and completions as the command itself describes them; those of before are gone.
fn pages(dist: &Path) -> Result<(), Outcome> {
    let failed = |error: std::io::Error| Outcome::Failed(format!("{}: {error}", dist.display()));
    let (man, completions) = (dist.join("man"), dist.join("completions"));
    for folder in [&man, &completions] {
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(failed)?;
        }
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let command = || Command::new(release().join("bowline"));
    done(status(command().arg("man").arg(&man)))?;
    for program in ["bowline", "bowline-node"] {
        for (shell, before, behind) in
            [("bash", "", ".bash"), ("zsh", "_", ""), ("fish", "", ".fish")]
        {
            let file = completions.join(format!("{before}{program}{behind}"));
            let file = fs::File::create(file).map_err(failed)?;
            let words = ["completions", shell, "--of", program];
            done(status(command().args(words).stdout(file)))?;
        }
    }
    Ok(())
}

/// Folder of what is built for release.
fn release() -> PathBuf {
    repo::target().join("release")
}

fn script(name: &str) -> PathBuf {
    repo::root().join("packaging").join(name)
}

fn has(program: &str) -> bool {
    let mut command = Command::new(program);
    let found = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.is_ok_and(|status| status.success())
}

fn done(outcome: Outcome) -> Result<(), Outcome> {
    if outcome == Outcome::Passed { Ok(()) } else { Err(outcome) }
}
