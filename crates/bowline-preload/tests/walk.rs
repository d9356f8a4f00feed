//! A random walk over calls on descriptors, compared with what a kernel's sockets gave: see
//! `programs/walk.c`. What differs on purpose is in `walk/explained.tsv`, with its reason; the
//! scenario `programs-walk` of `interop/` walks further, and makes the record.

mod scene;

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use bowline_testkit::skipped;
use scene::{Scene, finish, script};

/// Sequences that are walked, of those in the record, and calls in each.
const SEQUENCES: &str = "150";
const STEPS: &str = "60";

#[test]
fn sequences_of_calls_give_what_a_kernel_gave() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/walk");
    let scene = Scene::new();
    let Some(program) = scene.compiles("walk.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    let walked = scene.folder.join("walked");
    let mut walk = scene.command(program.to_str().unwrap());
    walk.args(&scene.addresses)
        .args(["1", SEQUENCES, STEPS])
        .stdout(File::create(&walked).unwrap());
    let output = walk.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut compare = Command::new("python3");
    compare.arg(script("walk.py")).arg(folder.join("explained.tsv"));
    compare.arg(folder.join("kernel.txt.gz")).arg(&walked);
    compare.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(compare.spawn().unwrap(), "walk.py");
    scene.is_empty_again();
}
