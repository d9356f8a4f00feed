//! `bowline run` with a program of musl.

use std::{path::Path, process::Command};

use bowline_testkit::skipped;

use crate::support::{Folder, start, start_as};

/// Exit status of `cargo xtask` when it cannot do something here and has said why.
const SKIPPED: i32 = 77;

#[test]
fn a_program_of_musl_gets_its_own_library_or_is_told_how_to_build_it() {
    let folder = Folder::new();
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bowline-preload");
    let program = folder.path().join("exchange");
    let mut compiler = Command::new("musl-gcc");
    compiler.arg("-I").arg(programs.join("include")).arg("-o").arg(&program);
    match compiler.arg(programs.join("examples/exchange.c")).output() {
        Err(error) => return skipped::because(format!("no musl-gcc: {error}")),
        Ok(output) => assert!(output.status.success(), "{output:?}"),
    }
    // A command without libraries beside it.
    let command = folder.path().join("bowline-alone");
    std::fs::copy(env!("CARGO_BIN_EXE_bowline"), &command).expect("a copy of the command");
    let words = ["run", program.to_str().expect("text"), "127.41.41.1", "127.41.41.2"];
    let none = start_as(command.as_os_str(), &folder, &words).finish().exits(1);
    none.complains(&["libbowline_preload-musl.so", "build it with `cargo xtask preload-musl`"]);

    let mut xtask = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    xtask.args(["xtask", "preload-musl"]).arg(folder.path().join("libbowline_preload-musl.so"));
    let built = xtask.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo starts");
    match built.status.code() {
        Some(0) => {}
        Some(SKIPPED) => return skipped::because(String::from_utf8_lossy(&built.stdout).trim()),
        _ => panic!("{built:?}"),
    }
    let addresses = ["--address", "127.41.41.1", "--address", "127.41.41.2"];
    let mut node = start(&folder, &[&["node"], &addresses[..]].concat());
    node.expect("ready");
    let done = start_as(command.as_os_str(), &folder, &words).finish().exits(0);
    assert_eq!(done.out, "hello from port 4600 over transport 2\n");
}
