//! The library that gives programs their RDS sockets: where it is, and how a program gets it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// File name of the library.
const NAME: &str = "libbowline_preload.so";
/// Folder of it in a system, below that of this command's folder.
const INSTALLED: &str = "../lib/bowline";

/// Finds the library: next to this command, or where packages put it.
///
/// # Errors
/// Says where it was looked for, and which command builds it.
pub fn preload_library() -> Result<PathBuf, String> {
    let own = env::current_exe().unwrap_or_default();
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(NAME), folder.join(INSTALLED).join(NAME)];
    let found = places.iter().find(|place| place.is_file());
    found.cloned().ok_or_else(|| {
        format!(
            "{NAME} is neither at {} nor in {}: build it with `cargo build --release --package \
             bowline-preload`",
            places[0].display(),
            places[1].display()
        )
    })
}

/// Has a program that will be started load the library, and use the node that serves programs at
/// `node`. Libraries that are preloaded already stay.
pub fn preload(command: &mut Command, library: &Path, node: &Path) {
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload).env("BOWLINE_RDS_SOCKET", node);
}
