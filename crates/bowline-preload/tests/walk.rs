//! A random walk over calls on descriptors, compared with what a kernel's sockets gave: see
//! `programs/walk.c`. What differs on purpose is in `walk/explained.tsv`, with its reason; the
//! scenario `programs-walk` of `interop/` walks further, and makes the record. `BOWLINE_WALK="FIRST
//! COUNT STEPS RECORD"` in the environment walks what another record of a kernel has.

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
    let asked = std::env::var("BOWLINE_WALK").unwrap_or_default();
    let asked: Vec<&str> = asked.split_whitespace().collect();
    let usual = folder.join("kernel.txt.gz");
    let (which, record) = match &asked[..] {
        [first, count, steps, record] => ([*first, *count, *steps], Path::new(*record)),
        _ => (["1", SEQUENCES, STEPS], &*usual),
    };
    let walked = scene.folder.join("walked");
    let mut walk = scene.command(program.to_str().unwrap());
    walk.args(&scene.addresses).args(which).stdout(File::create(&walked).unwrap());
    let output = walk.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut compare = Command::new("python3");
    compare.arg(script("walk.py")).arg(folder.join("explained.tsv")).arg(record).arg(&walked);
    compare.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(compare.spawn().unwrap(), "walk.py");
    scene.is_empty_again();
}
