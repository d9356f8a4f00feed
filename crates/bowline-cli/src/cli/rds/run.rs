//! `bowline run`: a program whose RDS sockets are those of the host's node.

use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    libc::{self, Libc},
    programs,
};
use crate::cli::{Failure, Outcome};

/// File name of the library that the program is started with, and how to build it.
const LIBRARY: (&str, &str) =
    ("libbowline_preload.so", "cargo build --release --package bowline-preload");
/// That for programs of musl.
const MUSL_LIBRARY: (&str, &str) = ("libbowline_preload-musl.so", "cargo xtask preload-musl");
/// Folder of it in a system, below that of this command's folder.
const INSTALLED: &str = "../lib/bowline";

/// Run a program whose RDS sockets (AF_RDS) are those of a node on this host.
///
/// The program needs no change, and the kernel no module: start a node with `bowline node` before.
/// What the program starts runs so as well, if it has the same C library: glibc or musl. Programs
/// that are linked statically, that gain privileges when they are started, or that make system
/// calls past the C library cannot be run so.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Place at which the node serves programs [default: bowline/rds/host.sock in
    /// $XDG_RUNTIME_DIR or /run]
    #[arg(long, value_name = "PATH")]
    node: Option<PathBuf>,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Replaces this process by the program.
pub(crate) fn run(args: &Args) -> Outcome {
    let Some((name, words)) = args.program.split_first() else {
        return Err(Failure::usage("no program is named"));
    };
    let program = find(name)?;
    let library = library_for(&program)?;
    let node = reachable(args.node.as_deref())?;
    let mut preload = library.into_os_string();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let error = Command::new(&program)
        .arg0(name)
        .args(words)
        .env("LD_PRELOAD", preload)
        .env("BOWLINE_RDS_SOCKET", node)
        .exec();
    Err(Failure::failed(format!("cannot start {}: {error}", program.display())))
}

/// The library for a program, which has to be of the same C library.
fn library_for(program: &Path) -> Outcome<PathBuf> {
    let libc = libc::of(program);
    match libc.map_err(|e| Failure::failed(format!("cannot read {}: {e}", program.display())))? {
        Libc::Other => library(LIBRARY),
        Libc::Musl => library(MUSL_LIBRARY),
        Libc::None => Err(Failure::failed(format!(
            "{} is linked statically, so its calls cannot be reached: use one that is linked \
             dynamically",
            program.display()
        ))),
    }
}

/// A library: next to this command, or where packages put it.
fn library((name, build): (&str, &str)) -> Outcome<PathBuf> {
    let own = env::current_exe().unwrap_or_default();
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(name), folder.join(INSTALLED).join(name)];
    let found = places.iter().find(|place| place.is_file());
    found.cloned().ok_or_else(|| {
        Failure::failed(format!(
            "{name} is neither at {} nor in {}: build it with `{build}`",
            places[0].display(),
            places[1].display()
        ))
    })
}

/// Path of the socket of a node that answers.
fn reachable(given: Option<&Path>) -> Outcome<PathBuf> {
    let places = given.map_or_else(programs::places, |place| vec![place.to_owned()]);
    let mut why = String::new();
    for place in &places {
        match UnixStream::connect(place) {
            Ok(_) => return Ok(place.clone()),
            Err(error) if why.is_empty() => why = format!("{}: {error}", place.display()),
            Err(error) => why = format!("{why}; {}: {error}", place.display()),
        }
    }
    Err(Failure::failed(format!(
        "no node serves programs here ({why}): start one with `bowline node`"
    )))
}

/// The file of a program, as a shell finds it.
fn find(name: &OsStr) -> Outcome<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return Ok(path.to_owned());
    }
    let folders = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&folders).map(|folder| folder.join(path)).find(|p| p.is_file());
    found.ok_or_else(|| Failure::failed(format!("{}: no such command", path.display())))
}
