//! `bowline bench`: measures this machine.

use std::ffi::OsString;

use bowline_node::{Failure, Outcome};

/// Measure this machine: bowline beside bare TCP and other message libraries.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// What to measure and how: `rds`, `roce`, `rtrs`, `rnbd` or `net` with their options, or
    /// `report` for the tables and pictures of recorded runs; each has `--help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    rest: Vec<OsString>,
}

/// Runs the bench; its exit status tells whether the targets are met.
pub(crate) fn run(args: Args) -> Outcome {
    let rest: Option<Vec<String>> =
        args.rest.into_iter().map(|argument| argument.into_string().ok()).collect();
    let Some(rest) = rest else {
        return Err(Failure::Usage("an argument is not valid UTF-8".to_owned()));
    };
    std::process::exit(bowline_bench::main(&rest))
}
