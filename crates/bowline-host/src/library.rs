//! The library that gives programs their RDS sockets: where it is, and how a program gets it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folder of a library in a system, below the one that has this command's folder.
const INSTALLED: &str = "lib/bowline";

/// Finds the library: next to this command, or where packages put it.
///
/// # Errors
/// Says where it was looked for, and which command builds it.
pub fn preload_library() -> Result<PathBuf, String> {
    find("libbowline_preload.so", "cargo build --release --package bowline-preload")
}

/// Finds the library for programs of musl.
///
/// # Errors
/// As [`preload_library`].
pub fn preload_library_of_musl() -> Result<PathBuf, String> {
    find("libbowline_preload-musl.so", "cargo xtask preload-musl")
}

/// Finds a file next to this command, or where packages put it.
pub fn installed(name: &str) -> Option<PathBuf> {
    places(name).into_iter().find(|place| place.is_file())
}

fn places(name: &str) -> [PathBuf; 2] {
    let own = env::current_exe().unwrap_or_default();
    let root = Path::new("/");
    let folder = own.parent().unwrap_or(root);
    [folder.join(name), folder.parent().unwrap_or(root).join(INSTALLED).join(name)]
}

fn find(name: &str, build: &str) -> Result<PathBuf, String> {
    installed(name).ok_or_else(|| {
        let places = places(name);
        format!(
            "{name} is neither at {} nor in {}: build it with `{build}`",
            places[0].display(),
            places[1].display()
        )
    })
}

/// Has a program that will be started load the library, and use the node that serves programs at
/// `node`, or that of the network namespace in which it asks for a socket. Libraries that are
/// preloaded already stay.
pub fn preload(command: &mut Command, library: &Path, node: Option<&Path>) {
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload);
    if let Some(node) = node {
        command.env("BOWLINE_RDS_SOCKET", node);
    }
}
