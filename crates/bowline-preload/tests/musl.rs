//! Programs that are linked with another C library than glibc: musl.

mod scene;

use std::path::{Path, PathBuf};
use std::process::Command;

use bowline_testkit::skipped;
use scene::{Scene, finish, script};

/// Exit status of `cargo xtask` when it cannot do something here and has said why.
const SKIPPED: i32 = 77;

/// The library for musl, or the reason why it is missing.
fn library(folder: &Path) -> Result<PathBuf, String> {
    let library = folder.join("libbowline_preload-musl.so");
    let mut xtask = Command::new(env!("CARGO"));
    xtask.args(["xtask", "preload-musl"]).arg(&library);
    let output = xtask.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match output.status.code() {
        Some(0) => Ok(library),
        Some(SKIPPED) => Err(said),
        _ => panic!("{said}{}", String::from_utf8_lossy(&output.stderr)),
    }
}

#[test]
fn a_program_of_musl_calls_as_one_of_glibc() {
    let scene = Scene::new();
    let library = match library(&scene.folder) {
        Ok(library) => library,
        Err(reason) => return skipped::because(reason),
    };
    // The same program is right with glibc, too.
    for (compiler, library) in [("cc", scene::library()), ("musl-gcc", &library)] {
        let program = scene.folder.join(compiler);
        let mut compile = Command::new(compiler);
        compile.args(["-Wall", "-Wextra", "-Werror", "-O2", "-o"]).arg(&program);
        compile.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"));
        let output = compile.arg(script("calls.c")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut command = scene.command(program.to_str().unwrap());
        command.env("LD_PRELOAD", library).args(&scene.addresses);
        finish(command.spawn().unwrap(), compiler);
        scene.is_empty_again();
    }
}
