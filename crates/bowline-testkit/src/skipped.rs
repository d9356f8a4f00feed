//! How a test says that it cannot run on this machine.
//!
//! A test that is skipped passes, and nobody sees what it prints. So its reason also goes to the
//! file named by `BOWLINE_SKIPS`, a line each, which `xtask ci` prints. Where `CI` is set, no test
//! is skipped for a missing program that `.ci/run` installs: it fails.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::process::Command;

/// Programs of the packages that `.ci/run` installs.
const INSTALLED: [&str; 11] = [
    "debugfs",
    "fio",
    "fsck.ext4",
    "fusermount3",
    "gcc",
    "ip",
    "mkfs.ext4",
    "nbdcopy",
    "nbdinfo",
    "qemu-img",
    "qemu-io",
];

/// Says that the calling test, or a part of it, is skipped, and why.
///
/// # Panics
/// When the file that `BOWLINE_SKIPS` names cannot be written.
pub fn because(reason: impl Display) {
    println!("skipped: {reason}");
    let Some(path) = std::env::var_os("BOWLINE_SKIPS") else { return };
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // Cargo tells a test which package it is of.
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let reason = reason.to_string().replace('\n', " ");
    let line = format!("{package} {test}: {reason}\n");
    let file = OpenOptions::new().create(true).append(true).open(path);
    // One write, since tests of all crates may share the file.
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file of BOWLINE_SKIPS");
}

/// Says that the calling test is skipped because a program is missing.
///
/// # Panics
/// Where the program should be there.
#[track_caller]
pub fn without(program: &str) {
    let missing = std::env::var_os("CI").is_some() && INSTALLED.contains(&program);
    assert!(!missing, "{program} is not installed; .ci/run installs it where it may");
    because(format_args!("{program} is not installed"));
}

/// Says that the calling test is skipped because nothing can be mounted by FUSE.
///
/// # Panics
/// Where fusermount3 should be there.
#[track_caller]
pub fn without_fuse(error: impl Display) {
    if Command::new("fusermount3").arg("-V").output().is_err() {
        without("fusermount3");
    } else {
        because(format_args!("cannot mount: {error}"));
    }
}
