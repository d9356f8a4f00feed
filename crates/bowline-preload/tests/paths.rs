//! Files of an RDMA device in /sys and /dev, for programs whose device is bowline's.
#![cfg(target_env = "gnu")]

mod scene;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use bowline_testkit::skipped;
use scene::{library, script};

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn python(words: &[&str], files: Option<&Path>) -> Output {
    let mut command = Command::new("python3");
    command.arg(script("paths.py")).args(words).env("LD_PRELOAD", library());
    if let Some(files) = files {
        command.env("BOWLINE_VERBS_FILES", files);
    }
    command.output().expect("python3 starts")
}

/// Each function finds what is in the folder, and the system's error where nothing is.
#[test]
fn each_function_that_takes_a_path_finds_the_device() {
    if Path::new("/sys/class/infiniband").exists() {
        return skipped::because("this machine has RDMA devices");
    }
    let folder = std::env::temp_dir().join(format!("bowline-paths-{}", std::process::id()));
    let folder = Folder(folder);
    let device = folder.0.join("sys/class/infiniband/bowline0");
    std::fs::create_dir_all(&device).unwrap();
    std::fs::create_dir_all(folder.0.join("dev/infiniband")).unwrap();
    std::fs::write(device.join("node_desc"), "here\n").unwrap();
    std::fs::write(folder.0.join("dev/infiniband/uverbs0"), "").unwrap();
    for (words, files) in [
        (["there"], Some(folder.0.as_path())),
        (["absent"], None),
        (["absent"], Some(Path::new("/nonexistent"))),
    ] {
        let done = python(&words, files);
        assert!(done.status.success(), "{words:?} {files:?}: {done:?}");
    }
}
