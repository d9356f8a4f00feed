//! What tests say that cannot run on this machine. Tests of any crate include this file by its
//! path.
//!
//! A test that is skipped passes, and nobody sees what it prints. So its reason also goes to the
//! file named by `BOWLINE_SKIPS`, a line each, which `xtask ci` prints. For want of a program that
//! `.ci/run` installs no test is skipped where `CI` is set, but fails.
#![allow(dead_code, reason = "not every test uses all of it")]

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

/// Says that the test which runs here is skipped, or a part of it, and why.
pub(crate) fn because(reason: impl Display) {
    println!("skipped: {reason}");
    let Some(path) = std::env::var_os("BOWLINE_SKIPS") else { return };
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let reason = reason.to_string().replace('\n', " ");
    let line = format!("{} {test}: {reason}\n", env!("CARGO_PKG_NAME"));
    let file = OpenOptions::new().create(true).append(true).open(path);
    // One write, since tests of all crates may share the file.
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file of BOWLINE_SKIPS");
}

/// Says so for want of a program.
///
/// # Panics
/// Where it should be there.
#[track_caller]
pub(crate) fn without(program: &str) {
    let missing = std::env::var_os("CI").is_some() && INSTALLED.contains(&program);
    assert!(!missing, "{program} is not installed; .ci/run installs it where it may");
    because(format_args!("{program} is not installed"));
}

/// Says so for want of FUSE.
///
/// # Panics
/// Where its program should be there.
#[track_caller]
pub(crate) fn without_fuse(error: impl Display) {
    if Command::new("fusermount3").arg("-V").output().is_err() {
        without("fusermount3");
    } else {
        because(format_args!("cannot mount: {error}"));
    }
}
