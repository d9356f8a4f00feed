//! The preload library for programs of musl.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::repo;
use crate::run::{Outcome, cargo, status};

const LINKER: &str = "musl-gcc";

/// Builds the library, to beside the one for glibc unless another place is named.
pub(crate) fn musl(rest: &[String]) -> Outcome {
    let place = match rest {
        [] => repo::target().join("release/libbowline_preload-musl.so"),
        [place] => place.into(),
        _ => return Outcome::Usage("preload-musl takes the place of the library only".into()),
    };
    match build(&place) {
        Ok(()) => {
            println!("written to {}", place.display());
            Outcome::Passed
        }
        Err(outcome) => outcome,
    }
}

fn build(place: &Path) -> Result<(), Outcome> {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let libraries = libraries(&target)?;
    if Command::new(LINKER).arg("--version").stdout(Stdio::null()).status().is_err() {
        return Err(Outcome::Skipped(format!("no {LINKER}, which Debian has in musl-tools")));
    }
    let failed = |error: std::io::Error| Outcome::Failed(format!("{}: {error}", place.display()));
    // Rust's library asks for libgcc_s.so, which a system of musl may not have, and the one of this
    // system is glibc's. The linker takes this file for it, which names what comes with Rust.
    let own = repo::target().join(&target).join("unwind");
    fs::create_dir_all(&own).map_err(failed)?;
    let unwind = libraries.join("self-contained/libunwind.a");
    fs::write(own.join("libgcc_s.so"), format!("INPUT(\"{}\")\n", unwind.display()))
        .map_err(failed)?;
    let mut build = cargo(&["build", "--quiet", "--release", "--locked"]);
    build.args(["--package", "bowline-preload", "--target", &target]);
    let variable = target.to_uppercase().replace('-', "_");
    build.env(format!("CARGO_TARGET_{variable}_LINKER"), LINKER);
    let flags = format!("-C target-feature=-crt-static -L native={}", own.display());
    build.env(format!("CARGO_TARGET_{variable}_RUSTFLAGS"), flags).env_remove("RUSTFLAGS");
    match status(&mut build) {
        Outcome::Passed => {}
        outcome => return Err(outcome),
    }
    let built = repo::target().join(&target).join("release/libbowline_preload.so");
    fs::copy(built, place).map_err(failed)?;
    Ok(())
}

/// Folder of Rust's libraries for a target.
fn libraries(target: &str) -> Result<PathBuf, Outcome> {
    let mut find = Command::new("rustc");
    find.args(["--print", "target-libdir", "--target", target]).stderr(Stdio::null());
    let found = find.output().map_or_else(|_| Vec::new(), |found| found.stdout);
    let folder = PathBuf::from(String::from_utf8_lossy(found.trim_ascii()).into_owned());
    if folder.is_dir() {
        return Ok(folder);
    }
    Err(Outcome::Skipped(format!("no Rust for musl (rustup target add {target})")))
}
