//! Tests that need a process of their own.

use std::{
    env, fs,
    path::PathBuf,
    process::{self, Command},
};

/// Set in the process in which the body of a test runs; names its folder.
const CHILD: &str = "BOWLINE_TEST_APART";

/// Runs `body` in a process of its own, such as one that confines itself: it is the test `test` of
/// `module` once more, with a folder for it.
///
/// # Panics
/// When the test fails there.
pub fn apart(module: &str, test: &str, body: impl FnOnce(PathBuf)) {
    if let Some(folder) = env::var_os(CHILD) {
        return body(PathBuf::from(folder));
    }
    let folder = env::temp_dir().join(format!("{test}-{}", process::id()));
    fs::create_dir(&folder).expect("a folder");
    let (_, module) = module.split_once("::").expect("a module of a crate");
    let done = Command::new(env::current_exe().expect("this test program"))
        .args(["--exact", &format!("{module}::{test}"), "--nocapture"])
        .env(CHILD, &folder)
        .output()
        .expect("the test runs again");
    fs::remove_dir_all(&folder).expect("the folder");
    let out = String::from_utf8_lossy(&done.stdout);
    let err = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && out.contains("1 passed"), "{out}{err}");
    print!("{out}");
}
