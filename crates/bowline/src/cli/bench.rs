//! `bowline bench`: hands over to the program `bowline-bench`.
//!
//! The benches are a program of their own, because they load other message libraries when those
//! are installed, which the command itself never does.

use std::{
    env,
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Failure, Outcome};

const PROGRAM: &str = "bowline-bench";

/// Measure this machine: bowline beside bare TCP and other message libraries.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Passed on to `bowline-bench`; try `--help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    rest: Vec<OsString>,
}

/// Replaces this process by the bench program, which only returns when that fails.
pub(crate) fn run(args: Args) -> Outcome {
    let beside = env::current_exe().ok().and_then(|me| Some(me.parent()?.join(PROGRAM)));
    let program: PathBuf = match beside {
        Some(path) if path.is_file() => path,
        _ => Path::new(PROGRAM).to_owned(),
    };
    let error = Command::new(&program).args(args.rest).exec();
    Err(Failure::Failed(if error.kind() == io::ErrorKind::NotFound {
        format!(
            "{PROGRAM} is neither beside this program nor in PATH; build it with \
             `cargo build --release -p {PROGRAM}`"
        )
    } else {
        format!("cannot run {}: {error}", program.display())
    }))
}
