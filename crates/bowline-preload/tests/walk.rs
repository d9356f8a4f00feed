//! A random walk over calls on descriptors, compared with what a kernel's sockets gave: see
//! `programs/walk.c`. What differs on purpose is in `walk/explained.tsv`, with its reason; the
//! scenario `programs-walk` of `interop/` walks further, and makes the record. `BOWLINE_WALK="FIRST
//! COUNT STEPS RECORD"` in the environment walks what another record of a kernel has, and
//! `BOWLINE_WALK_TWO` what one of two kernels has.

mod scene;

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use bowline_testkit::skipped;
use scene::{Scene, finish, script};

/// Which sequences are walked, of those in the records: the first, how many, and calls in each.
const ONE_NODE: [&str; 3] = ["1", "150", "60"];
const TWO_NODES: [&str; 3] = ["1", "100", "40"];

#[test]
fn sequences_of_calls_give_what_a_kernel_gave() {
    let scene = Scene::new();
    walk(&scene, None, "kernel.txt.gz", ONE_NODE);
    scene.is_empty_again();
}

#[test]
fn sequences_of_calls_of_two_nodes_give_what_two_kernels_gave() {
    let [scene, other] = Scene::pair();
    walk(&scene, Some(&other), "two-kernels.txt.gz", TWO_NODES);
    scene.is_empty_again();
    other.is_empty_again();
}

fn walk(scene: &Scene, other: Option<&Scene>, record: &str, which: [&str; 3]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/walk");
    let Some(program) = scene.compiles("walk.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    let name = if other.is_some() { "BOWLINE_WALK_TWO" } else { "BOWLINE_WALK" };
    let asked = std::env::var(name).unwrap_or_default();
    let asked: Vec<&str> = asked.split_whitespace().collect();
    let kept = folder.join(record);
    let (which, record) = match &asked[..] {
        [first, count, steps, record] => ([*first, *count, *steps], Path::new(*record)),
        _ => (which, &*kept),
    };
    let walked = scene.folder.join("walked");
    let mut walk = scene.command(program.to_str().unwrap());
    if let Some(other) = other {
        walk.env("WALK_NODE", other.folder.join("host.sock"));
    }
    walk.args(&scene.addresses).args(which).stdout(File::create(&walked).unwrap());
    let output = walk.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut compare = Command::new("python3");
    compare.arg(script("walk.py")).arg(folder.join("explained.tsv")).arg(record).arg(&walked);
    compare.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(compare.spawn().unwrap(), "walk.py");
}
